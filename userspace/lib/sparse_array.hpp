/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * An array for numbers that are dense, as the kernel's handles, file descriptors and the upper 24 bits
 * of keys are, but whose range is large: leaves of it are made when something is put there.
 *
 * Readers take no lock and write nothing that another thread may read. So a leaf stays where it is as
 * long as the array lives, and what is in a slot is atomic.
 */
#ifndef NPR_SPARSE_ARRAY_HPP
#define NPR_SPARSE_ARRAY_HPP

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace npr {

template <class Slot>
class sparse_array {
public:
	static constexpr std::uint32_t size = 1U << 24;

	/* Null: nothing was ever put near there, or @i is out of range. */
	[[nodiscard]] const Slot *find(std::uint32_t i) const noexcept
	{
		if (i >= size) [[unlikely]]
			return nullptr;
		/* acquire: a leaf is seen as make() made it */
		const leaf *const l = root_[i / leaf_size].load(std::memory_order_acquire);
		return l ? &(*l)[i % leaf_size] : nullptr;
	}

	[[nodiscard]] Slot *find(std::uint32_t i) noexcept { return const_cast<Slot *>(std::as_const(*this).find(i)); }

	/* For one writer at a time. Null: out of range. Throws std::bad_alloc. */
	[[nodiscard]] Slot *make(std::uint32_t i)
	{
		if (i < size && !find(i)) {
			leaves_.push_back(std::make_unique<leaf>());
			/* release: pairs with find() */
			root_[i / leaf_size].store(leaves_.back().get(), std::memory_order_release);
		}
		return find(i);
	}

	/* All slots there are; for one writer at a time. */
	template <class F>
	void for_each(F &&f)
	{
		for (const auto &l : leaves_)
			for (Slot &s : *l)
				f(s);
	}

private:
	static constexpr std::uint32_t leaf_size = 1U << 12;
	using leaf = std::array<Slot, leaf_size>;

	std::array<std::atomic<leaf *>, size / leaf_size> root_{};
	std::vector<std::unique_ptr<leaf>> leaves_;
};

} // namespace npr

#endif
