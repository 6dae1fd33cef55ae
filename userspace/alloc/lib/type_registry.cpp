/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include <nprdma/alloc/type_registry.hpp>

#include <array>
#include <cinttypes>
#include <cstdio>
#include <mutex>
#include <stdexcept>

namespace nprdma::alloc {
namespace {

std::string number(std::uint64_t type)
{
	std::array<char, 24> s{};
	(void)std::snprintf(s.data(), s.size(), "%#" PRIx64, type);
	return s.data();
}

} // namespace

type_registry::type_registry()
{
	add("nprdma.package", [](const object &o) { (void)unpack(o); },
	    [](const object &o) { return std::to_string(unpack(o).size()) + " objects"; });
}

std::uint64_t type_registry::add(const std::string &name, checker check, describer describe)
{
	const std::uint64_t type = type_id(name);
	const std::lock_guard lock(mutex_);
	const auto [i, fresh] = types_.try_emplace(type, entry{name, std::move(check), std::move(describe)});
	if (!fresh)
		throw std::invalid_argument("type \"" + name + "\": " +
					    (i->second.name == name ? "it is known already"
								    : "\"" + i->second.name + "\" has the same number"));
	return type;
}

std::optional<type_registry::entry> type_registry::find(std::uint64_t type) const
{
	const std::shared_lock lock(mutex_);
	const auto i = types_.find(type);
	return i == types_.end() ? std::nullopt : std::optional(i->second);
}

std::optional<std::string> type_registry::name_of(std::uint64_t type) const
{
	const auto t = find(type);
	return t ? std::optional(t->name) : std::nullopt;
}

void type_registry::check(const object &o) const
{
	/* A copy: checkers may use the registry. */
	const auto t = find(o.type());
	if (!t)
		throw bad_object("an object of type " + number(o.type()) + ", which nobody has registered");
	if (t->check)
		t->check(o);
}

std::string type_registry::describe(const object &o) const
{
	const auto t = find(o.type());
	std::string line = (t ? t->name : number(o.type())) + ": " + std::to_string(o.metadata().size()) +
			   " bytes of metadata, " + std::to_string(o.data().size()) + " of data";
	if (t && t->describe)
		line += "; " + t->describe(o);
	return line;
}

} // namespace nprdma::alloc
