/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "policy.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <utility>

namespace npr::preload {

namespace {

constexpr const char *host_file = "/etc/nprdma.conf";

std::string_view trimmed(std::string_view s)
{
	constexpr std::string_view blank = " \t\r";
	const auto begin = s.find_first_not_of(blank);

	return begin == s.npos ? std::string_view{} : s.substr(begin, s.find_last_not_of(blank) - begin + 1);
}

/* In decimal or, with 0x, in hexadecimal. */
std::optional<std::size_t> bytes(std::string_view s)
{
	const int base = s.starts_with("0x") ? 16 : 10;
	std::size_t n;

	if (base == 16)
		s.remove_prefix(2);
	const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), n, base);
	return error == std::errc{} && end == s.data() + s.size() ? std::optional(n) : std::nullopt;
}

std::optional<std::string> assign_unpinned(settings &s, std::string_view value)
{
	using unpin = settings::unpin;
	constexpr std::array<std::pair<std::string_view, unpin>, 4> words{
		{{"all", unpin::all}, {"remote", unpin::remote}, {"odp", unpin::odp}, {"none", unpin::none}}};
	settings n = s;

	n.which = unpin::all;
	n.at_least = 0;
	for (bool named = false, sized = false;;) {
		const auto comma = value.find(',');
		const std::string_view part = trimmed(value.substr(0, comma));
		const auto word = std::find_if(words.begin(), words.end(), [&](const auto &w) { return w.first == part; });

		if (word != words.end() && !std::exchange(named, true))
			n.which = word->second;
		else if (const auto size = bytes(part); size && !std::exchange(sized, true))
			n.at_least = *size;
		else
			return "is all, remote, odp or none, or a number of bytes, or both with a comma between, not \"" +
				std::string(value) + "\"";
		if (comma == value.npos)
			break;
		value.remove_prefix(comma + 1);
	}
	s = std::move(n);
	return std::nullopt;
}

std::optional<std::string> assign_bool(bool &to, std::string_view value)
{
	if (value != "0" && value != "1")
		return "is 0 or 1, not \"" + std::string(value) + "\"";
	to = value == "1";
	return std::nullopt;
}

constexpr std::array<std::pair<const char *, const char *>, 5> variables{{
	{"NPRDMA_UNPINNED", "unpinned"},
	{"NPRDMA_ORDERED", "ordered"},
	{"NPRDMA_LEASES", "leases"},
	{"NPRDMA_DIRECT_VERBS", "direct_verbs"},
	{"NPRDMA_REPORT", "report"},
}};

[[noreturn]] void wrong(const std::string &what)
{
	std::fprintf(stderr, "libnprdma-preload: %s\n", what.c_str());
	std::_Exit(64);
}

settings read_all()
{
	settings s;
	const char *const named = secure_getenv("NPRDMA_CONFIG");
	const char *const file = named ? named : host_file;

	/* An empty name: no file. */
	if (std::ifstream in; *file) {
		in.open(file);
		std::stringstream text;
		if (in)
			text << in.rdbuf();
		else if (named || errno != ENOENT)
			wrong(std::string(file) + " cannot be read: " + std::strerror(errno));
		if (const auto error = assign_lines(s, text.str()))
			wrong(std::string(file) + ", " + *error);
	}
	for (const auto &[variable, name] : variables) {
		const char *const value = secure_getenv(variable);

		if (!value || !*value)
			continue;
		if (const auto error = assign(s, name, value))
			wrong(std::string(variable) + " " + *error);
	}
	return s;
}

} // namespace

std::optional<std::string> assign(settings &s, std::string_view name, std::string_view value)
{
	if (name == "unpinned")
		return assign_unpinned(s, value);
	if (name == "ordered")
		return assign_bool(s.ordered, value);
	if (name == "leases")
		return assign_bool(s.leases, value);
	if (name == "direct_verbs") {
		using direct = settings::direct;
		if (value != "auto" && value != "pinned" && value != "hidden")
			return "is auto, pinned or hidden, not \"" + std::string(value) + "\"";
		s.direct_verbs = value == "auto" ? direct::automatic : value == "pinned" ? direct::pinned : direct::hidden;
		return std::nullopt;
	}
	if (name == "report") {
		s.report = value != "0";
		s.report_file = value == "0" || value == "1" ? std::string_view{} : value;
		return std::nullopt;
	}
	return "is no setting; there are unpinned, ordered, leases, direct_verbs and report";
}

std::optional<std::string> assign_lines(settings &s, std::string_view lines)
{
	for (unsigned number = 1; !lines.empty(); ++number) {
		const auto end = lines.find('\n');
		const std::string_view line = trimmed(lines.substr(0, std::min(end, lines.find('#'))));

		lines.remove_prefix(end == lines.npos ? lines.size() : end + 1);
		if (line.empty())
			continue;
		const std::string where = "line " + std::to_string(number) + ": ";
		const auto equals = line.find('=');
		if (equals == line.npos)
			return where + "a line is \"name = value\", not \"" + std::string(line) + "\"";
		const std::string_view name = trimmed(line.substr(0, equals));
		if (const auto error = assign(s, name, trimmed(line.substr(equals + 1))))
			return where + std::string(name) + " " + *error;
	}
	return std::nullopt;
}

const settings &policy()
{
	/* Never destroyed: see all(). */
	static const settings &s = *std::make_unique<settings>(read_all()).release();

	return s;
}

namespace {

/* Relaxed: who makes a queue pair for what polls memory has called it before, or been told by who has. */
std::atomic<bool> polls_memory;

} // namespace

bool ordered()
{
	return policy().ordered || polls_memory.load(std::memory_order_relaxed);
}

void order_writes() noexcept
{
	polls_memory.store(true, std::memory_order_relaxed);
}

} // namespace npr::preload
