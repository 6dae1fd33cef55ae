/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Free blocks of an arena that one thread keeps for its next ones, and what it has counted.
 *
 * It belongs to its thread; only @life_ and @home are for others. A thread that ends gives all back to the
 * arena, an arena that ends forgets its caches: whichever comes second finds nothing to do.
 */
#ifndef NPRA_CACHE_HPP
#define NPRA_CACHE_HPP

#include "size_class.hpp"

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace nprdma::alloc {
class arena_state;
}

namespace npra {

/* Written by one thread, and read by all. */
class counter {
public:
	/* release, acquire: who sees that a block was freed sees that it had been allocated, see arena_state::stats() */
	void add(std::uint64_t n) noexcept { n_.store(n_.load(std::memory_order_relaxed) + n, std::memory_order_release); }
	[[nodiscard]] std::uint64_t get() const noexcept { return n_.load(std::memory_order_acquire); }

private:
	std::atomic<std::uint64_t> n_ = 0;
};

/* Blocks by size class: one addition for each call, and bytes are their product. */
struct counters {
	static constexpr unsigned int classes = class_of(max_block) + 1;
	std::array<counter, classes> allocated, freed;

	void add_allocated(const counters &other) noexcept
	{
		for (unsigned int i = 0; i < classes; i++)
			allocated[i].add(other.allocated[i].get());
	}
	void add_freed(const counters &other) noexcept
	{
		for (unsigned int i = 0; i < classes; i++)
			freed[i].add(other.freed[i].get());
	}
};

struct cache {
	static constexpr std::size_t max_bytes = 65536;
	static constexpr unsigned int classes = class_of(max_bytes) + 1;
	static constexpr unsigned int max_blocks = 63; /* a bin has a power of two bytes: it is found by a shift */
	static constexpr std::size_t class_bytes = 131072;

	/* So that no class keeps more than some 128 KiB. */
	[[nodiscard]] static constexpr unsigned int limit(unsigned int size_class) noexcept
	{
		const std::size_t n = class_bytes / bytes_of(size_class);
		return static_cast<unsigned int>(n < max_blocks ? n : max_blocks);
	}

	struct bin {
		unsigned int count = 0;
		unsigned int limit = 0; /* noted: limit() divides, which takes longer than all the rest */
		std::array<void *, max_blocks> blocks;
	};

	cache() noexcept
	{
		for (unsigned int i = 0; i < classes; i++)
			bins[i].limit = limit(i);
	}

	std::mutex life;
	std::atomic<nprdma::alloc::arena_state *> home; /* null: the arena has ended; set under @life */
	std::uint64_t epoch;
	unsigned int below; /* jemalloc's own cache for the thread, or no_cache */
	static constexpr unsigned int no_cache = ~0U;
	int flags; /* for jemalloc */
	counters counts;
	std::array<bin, classes> bins;
};
static_assert(cache::limit(cache::classes - 1) >= 2);
static_assert(is_power_of_two(sizeof(cache::bin)));

} // namespace npra

#endif
