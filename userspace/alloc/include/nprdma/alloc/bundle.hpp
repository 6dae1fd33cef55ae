/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * An object with several arrays of given types in it, each from a multiple of 64 bytes on:
 *
 *	bundle<double, std::uint32_t> b(home, type_id("particles"), {1000, 10});
 *	b.get<0>()[999] = 1.5;
 *
 * Metadata say how large an element of each array is, and how many there are; for an object of a peer they
 * are checked.
 */
#ifndef NPRDMA_ALLOC_BUNDLE_HPP
#define NPRDMA_ALLOC_BUNDLE_HPP

#include <nprdma/alloc/object.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>

namespace nprdma::alloc {

template <class... T>
class bundle {
	static_assert(sizeof...(T) > 0 && (std::is_trivially_copyable_v<T> && ...), "content is copied as bytes");
	static_assert(((alignof(T) <= 64) && ...));

public:
	static constexpr std::size_t arrays = sizeof...(T);
	using counts = std::array<std::size_t, arrays>;

	/* Content is as the memory was left. Throws bad_size, out_of_memory. */
	bundle(arena &home, std::uint64_t type, const counts &elements)
	    : object_(home, type, sizeof(table), checked_layout(elements).back()), offsets_(checked_layout(elements)),
	      counts_(elements)
	{
		table &t = object_.metadata_as<table>();
		for (std::size_t i = 0; i < arrays; i++)
			t[i] = {sizes[i], counts_[i]};
	}

	/* Throws bad_object if it is none, or has other types. */
	explicit bundle(object o) : object_(std::move(o))
	{
		if (object_.metadata().size() != sizeof(table))
			throw bad_object("an object with " + std::to_string(object_.metadata().size()) +
					 " bytes of metadata is no bundle of " + std::to_string(arrays) + " arrays");
		/* Once: a peer may change it meanwhile. */
		const table t = object_.metadata_as<table>();
		for (std::size_t i = 0; i < arrays; i++) {
			if (t[i].size != sizes[i])
				throw bad_object("array " + std::to_string(i) + " of a bundle has elements of " +
						 std::to_string(t[i].size) + " bytes, not of " + std::to_string(sizes[i]));
			counts_[i] = t[i].count;
		}
		const auto offsets = layout(counts_);
		if (!offsets || offsets->back() > object_.data().size())
			throw bad_object("a bundle that claims more than its data, " +
					 std::to_string(object_.data().size()) + " bytes");
		offsets_ = *offsets;
		/* Data of the caller may begin anywhere; arrays begin at multiples of 64 bytes from there. */
		if (reinterpret_cast<std::uintptr_t>(object_.data().data()) % alignment)
			throw bad_object("a bundle whose data do not begin at a multiple of " + std::to_string(alignment));
	}

	template <std::size_t I>
	[[nodiscard]] auto get() const noexcept
	{
		using element = std::tuple_element_t<I, std::tuple<T...>>;
		return std::span<element>(reinterpret_cast<element *>(object_.data().data() + offsets_[I]), counts_[I]);
	}
	[[nodiscard]] const object &as_object() const noexcept { return object_; }

private:
	struct entry {
		std::uint64_t size, count; /* of an element; of elements */
	};
	using table = std::array<entry, arrays>;
	using offsets = std::array<std::size_t, arrays + 1>; /* the last is the end of all */
	static constexpr std::array<std::size_t, arrays> sizes{sizeof(T)...};
	static constexpr std::size_t alignment = std::max({alignof(T)...});
	static constexpr std::size_t most = std::size_t{1} << 60;

	[[nodiscard]] static std::optional<offsets> layout(const counts &elements) noexcept
	{
		offsets o{};
		for (std::size_t i = 0; i < arrays; i++) {
			if (elements[i] > (most - o[i]) / sizes[i])
				return {};
			o[i + 1] = (o[i] + elements[i] * sizes[i] + 63) & ~std::size_t{63};
		}
		return o;
	}
	[[nodiscard]] static offsets checked_layout(const counts &elements)
	{
		const auto o = layout(elements);
		if (!o)
			throw bad_size("a bundle of more than any arena has");
		return *o;
	}

	object object_;
	offsets offsets_{};
	counts counts_{};
};

} // namespace nprdma::alloc

#endif
