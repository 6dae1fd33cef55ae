// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* The table and the JSON file. */
#include "bench.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>

namespace bench
{

namespace
{

/* Four digits that matter, without exponents. */
std::string number(double x)
{
	const double size = std::abs(x);

	return fmt::format("{:.{}f}", x,
			   size >= 1000 || x == std::floor(x) ? 0
			   : size >= 100                      ? 1
			   : size >= 10                       ? 2
							      : 3);
}

std::string quoted(const std::string &text)
{
	std::string out = "\"";

	for (const char c : text) {
		if (static_cast<unsigned char>(c) < 0x20)
			continue;
		if (c == '"' || c == '\\')
			out += '\\';
		out += c;
	}
	return out + '"';
}

} // namespace

void report::add(const std::string &group, const std::string &name, const row &values)
{
	if (groups_.empty() || groups_.back().first != group) {
		groups_.emplace_back(group, std::vector<entry>());
		fmt::print("\n{}\n", group);
	}
	groups_.back().second.push_back({name, values});
	fmt::print("  {:<26}", name);
	for (const auto &[key, value] : values)
		fmt::print(" {} {:<9}", key, number(value));
	fmt::print("\n");
	std::fflush(stdout);
}

void report::print_targets() const
{
	fmt::print("\n{:<66}{:>10} {:>11}\n", "to reach", "is", "limit");
	for (const target &t : targets_)
		fmt::print("  {:<64}{:>10} {:>2} {:>8}  {}\n", t.what, t.measured ? number(t.got) : "?",
			   t.at_least ? ">=" : "<=", number(t.limit),
			   !t.measured ? "not measured"
			   : t.met()   ? "met"
				       : "MISSED");
}

void report::write_json(const std::string &path) const
{
	std::unique_ptr<std::FILE, int (*)(std::FILE *)> f(std::fopen(path.c_str(), "w"), std::fclose);
	const char *comma = "";

	if (!f)
		rc::fail(errno, path);
	fmt::print(f.get(), "{{\n");
	for (const auto &[name, value] : notes_)
		fmt::print(f.get(), "  {}: {},\n", quoted(name), quoted(value));
	/* A group that was added to in turns with another appears in parts. */
	std::map<std::string, std::vector<const entry *>> merged;
	for (const auto &[group, entries] : groups_)
		for (const entry &e : entries)
			merged[group].push_back(&e);
	for (const auto &[group, entries] : merged) {
		fmt::print(f.get(), "  {}: [", quoted(group));
		comma = "";
		for (const entry *e : entries) {
			fmt::print(f.get(), "{}\n    {{\"name\": {}", comma, quoted(e->name));
			for (const auto &[key, value] : e->values)
				fmt::print(f.get(), ", {}: {:.6g}", quoted(key), value);
			fmt::print(f.get(), "}}");
			comma = ",";
		}
		fmt::print(f.get(), "\n  ],\n");
	}
	fmt::print(f.get(), "  \"targets\": [");
	comma = "";
	for (const target &t : targets_) {
		fmt::print(f.get(), "{}\n    {{\"what\": {}, \"is\": {}, \"at_{}\": {:.6g}, \"met\": {}}}",
			   comma, quoted(t.what), t.measured ? fmt::format("{:.6g}", t.got) : "null",
			   t.at_least ? "least" : "most", t.limit, t.met());
		comma = ",";
	}
	fmt::print(f.get(), "\n  ]\n}}\n");
}

} // namespace bench
