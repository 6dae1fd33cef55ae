/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Values of JSON, to be written. */
#ifndef NPR_CTL_JSON_HPP
#define NPR_CTL_JSON_HPP

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace npr::ctl
{

/* Names come from outside: what is not printable ASCII must reach neither a terminal nor a parser. */
[[nodiscard]] std::string printable(std::string_view);

class json
{
public:
	using list = std::vector<json>;
	using object = std::vector<std::pair<std::string, json>>;

	json() = default; /* null */
	json(bool b) : value_(b) {}
	template <std::unsigned_integral T> json(T n) : value_(std::uint64_t{n}) {}
	json(double d) : value_(d) {}
	json(std::string s) : value_(std::move(s)) {}
	json(std::string_view s) : value_(std::string(s)) {}
	json(const char *s) : value_(std::string(s)) {}
	json(list l) : value_(std::move(l)) {}
	json(object o) : value_(std::move(o)) {}
	template <class T> json(const std::optional<T> &o)
	{
		if (o)
			*this = json(*o);
	}

	/* On one line. */
	[[nodiscard]] std::string text() const;

private:
	void append(std::string &) const;

	std::variant<std::nullptr_t, bool, std::uint64_t, double, std::string, list, object> value_ = nullptr;
};

} // namespace npr::ctl

#endif
