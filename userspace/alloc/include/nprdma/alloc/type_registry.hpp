/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What types of objects a program knows: their names, how to tell what is in one, and what to ask of one
 * that comes from a peer. Any thread may use it.
 */
#ifndef NPRDMA_ALLOC_TYPE_REGISTRY_HPP
#define NPRDMA_ALLOC_TYPE_REGISTRY_HPP

#include <nprdma/alloc/object.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <shared_mutex>
#include <string>

namespace nprdma::alloc {

class NPRDMA_ALLOC_API type_registry {
public:
	/* Throws if an object of this type cannot be one. May be empty. */
	using checker = std::function<void(const object &)>;
	using describer = std::function<std::string(const object &)>;

	/* Knows packages. */
	type_registry();
	/* Returns type_id(@name). Throws std::invalid_argument if the type, or its number, is there already. */
	std::uint64_t add(const std::string &name, checker check = {}, describer describe = {});
	[[nodiscard]] std::optional<std::string> name_of(std::uint64_t type) const;
	/* Throws bad_object for a type that is not known, and what its checker throws. */
	void check(const object &o) const;
	/* One line for people. */
	[[nodiscard]] std::string describe(const object &o) const;

private:
	struct entry {
		std::string name;
		checker check;
		describer describe;
	};
	[[nodiscard]] std::optional<entry> find(std::uint64_t type) const;

	mutable std::shared_mutex mutex_;
	std::map<std::uint64_t, entry> types_;
};

} // namespace nprdma::alloc

#endif
