/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "json.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace npr::ctl
{

namespace
{

void append_string(std::string &to, std::string_view s)
{
	to += '"';
	for (const char c : printable(s)) {
		if (c == '"' || c == '\\')
			to += '\\';
		to += c;
	}
	to += '"';
}

} // namespace

std::string printable(std::string_view s)
{
	std::string all(s);

	std::replace_if(
	    all.begin(), all.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
	return all;
}

void json::append(std::string &to) const
{
	auto each = [&to](const auto &all, char begin, char end, auto write) {
		bool first = true;

		to += begin;
		for (const auto &one : all) {
			if (!std::exchange(first, false))
				to += ',';
			write(one);
		}
		to += end;
	};

	if (const auto *b = std::get_if<bool>(&value_))
		to += *b ? "true" : "false";
	else if (const auto *n = std::get_if<std::uint64_t>(&value_))
		to += std::to_string(*n);
	else if (const auto *d = std::get_if<double>(&value_); d && std::isfinite(*d))
		to += fmt::format("{:.3f}", *d);
	else if (const auto *s = std::get_if<std::string>(&value_))
		append_string(to, *s);
	else if (const auto *l = std::get_if<list>(&value_))
		each(*l, '[', ']', [&to](const json &j) { j.append(to); });
	else if (const auto *o = std::get_if<object>(&value_))
		each(*o, '{', '}', [&to](const auto &member) {
			append_string(to, member.first);
			to += ':';
			member.second.append(to);
		});
	else
		to += "null";
}

std::string json::text() const
{
	std::string all;

	append(all);
	return all;
}

} // namespace npr::ctl
