/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What an arena is made of, from below: addresses (backing), segments of them that are registered, free ranges of
 * these, from which jemalloc takes extents, blocks of which are in use or in caches of threads.
 *
 * Unpinned memory is one segment from the beginning. Pinned memory is registered when it is needed, in segments
 * of whole chunks; a block never lies in two of them, because the ranges of two segments never become one.
 *
 * Locks: @caches_mutex_ is taken under a cache's @life; @mutex_ under jemalloc's, and nothing is called under it that
 * might allocate from an arena.
 */
#ifndef NPRA_ARENA_STATE_HPP
#define NPRA_ARENA_STATE_HPP

#include "cache.hpp"
#include "jemalloc.hpp"
#include "mapping.hpp"
#include "ranges.hpp"

#include <nprdma/alloc/arena.hpp>

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace nprdma::alloc {

class arena_state {
public:
	arena_state(std::span<registrar *const> registrars, npra::backing memory, const options &how,
		    std::function<void()> cleanup);
	~arena_state();
	arena_state(const arena_state &) = delete;
	arena_state &operator=(const arena_state &) = delete;

	[[nodiscard]] void *allocate(std::size_t bytes, std::size_t alignment);
	void deallocate(void *block) { release(block, class_at(block)); }
	void deallocate(void *block, std::size_t bytes, std::size_t alignment);
	[[nodiscard]] std::size_t size_of(const void *block) const;
	[[nodiscard]] const location *find(const void *p, std::size_t registrar, location &where) const noexcept;
	[[nodiscard]] std::vector<std::unique_ptr<registration>> add(std::span<std::byte> memory);
	void ended(std::vector<std::unique_ptr<registration>> &all) noexcept;

	std::size_t discard(void *p, std::size_t bytes);
	std::size_t trim();
	[[nodiscard]] statistics stats() const;
	[[nodiscard]] std::vector<leak> leaks(std::size_t limit) const;
	[[nodiscard]] const npra::backing &backing() const noexcept { return backing_; }
	[[nodiscard]] std::size_t registrars() const noexcept { return registrars_.size(); }
	[[nodiscard]] const std::string &name() const noexcept { return how_.name; }

	/*
	 * This is a child that fork() made after the arena. Regions and keys are its parent's, and locks may be held by
	 * threads that it does not have: so blocks are not freed here, and whatever else needs a lock is refused.
	 */
	[[nodiscard]] bool inherited() const noexcept;

	/* A thread ends; @c.life is held. */
	void retire(npra::cache &c) noexcept;

private:
	/*
	 * One that has ended becomes another. Meanwhile somebody may look at it who found it before, without a lock. So what
	 * is looked at is atomic, and has a version: while that is odd, or if it has changed, what was seen is to be
	 * forgotten.
	 */
	struct segment {
		explicit segment(std::size_t registrars) : keys(registrars) {}

		std::size_t size = 0; /* 0: not in use */
		std::size_t managed = 0;
		std::vector<std::unique_ptr<registration>> registrations;

		std::atomic<std::uint64_t> version = 0;
		std::atomic<std::byte *> begin = nullptr;
		std::atomic<std::size_t> length = 0;
		std::vector<std::atomic<alloc::keys>> keys;
	};

	/* What jemalloc calls. */
	struct hooks : npra_extent_hooks {
		arena_state *self;
	};
	[[nodiscard]] void *take_extent(std::size_t size, std::size_t alignment) noexcept;
	[[nodiscard]] bool give_extent(std::byte *begin, std::size_t size) noexcept;

	void refuse_inherited() const;
	void populate() const;
	void register_segment(segment &s, std::byte *begin, std::size_t size);
	void show_segment(segment &s) noexcept;
	[[nodiscard]] segment &unused_segment();
	void register_all();
	void grow(std::size_t size, std::size_t alignment);
	[[nodiscard]] bool commit(std::byte *begin, std::size_t size) noexcept;
	[[nodiscard]] std::size_t release_segments() noexcept;
	[[nodiscard]] segment *segment_of(const std::byte *p) const noexcept
	{
		/* acquire: pairs with show_segment() */
		return index_[offset_of(p) >> chunk_shift_].load(std::memory_order_acquire);
	}

	[[nodiscard]] std::size_t offset_of(const void *p) const noexcept
	{
		return reinterpret_cast<std::uintptr_t>(p) - reinterpret_cast<std::uintptr_t>(backing_.begin());
	}
	[[nodiscard]] std::atomic_ref<std::uint8_t> tag_of(std::size_t offset) const noexcept
	{
		return std::atomic_ref<std::uint8_t>(reinterpret_cast<std::uint8_t *>(tags_.bytes().data())[offset / npra::line]);
	}
	[[nodiscard]] unsigned int class_at(const void *block) const;
	[[gnu::noinline]] void release(void *block, unsigned int size_class);
	[[gnu::cold, gnu::noinline, noreturn]] void refuse_size(std::size_t bytes, std::size_t alignment) const;
	[[gnu::cold, gnu::noinline, noreturn]] void refuse_block(const void *block) const;
	[[gnu::cold, gnu::noinline, noreturn]] void refuse_end(const void *block, unsigned int size_class,
							       std::size_t bytes, std::size_t alignment) const;
	[[gnu::cold, gnu::noinline, noreturn]] void refuse_twice(const void *block) const;
	[[gnu::noinline]] void *allocate_any(std::size_t bytes, std::size_t alignment);
	[[gnu::noinline]] void *allocate_slowly(std::size_t bytes, unsigned int size_class, std::size_t alignment);
	[[gnu::noinline]] void deallocate_any(void *block, std::size_t bytes, std::size_t alignment);
	[[gnu::noinline]] void release_slowly(void *block, unsigned int size_class) noexcept;

	[[nodiscard]] npra::cache *my_cache() noexcept;
	[[nodiscard, gnu::noinline]] npra::cache *find_cache() noexcept;
	[[gnu::noinline]] void refresh(npra::cache &c) noexcept;
	void flush(npra::cache &c) noexcept;
	[[nodiscard, gnu::noinline]] void *fill(npra::cache &c, std::size_t bytes, unsigned int size_class);
	[[gnu::noinline]] void spill(npra::cache &c, unsigned int size_class) noexcept;
	[[nodiscard]] void *from_jemalloc(unsigned int size_class, std::size_t alignment, int flags) noexcept;
	[[nodiscard]] void *must_have(std::size_t bytes, unsigned int size_class, std::size_t alignment, npra::cache *c);
	void purge() noexcept;
	void drop_tags() noexcept;

	const options how_;
	std::vector<registrar *> registrars_;
	std::function<void()> cleanup_;
	npra::backing backing_;
	npra::mapping tags_; /* for each line 1 + the size class of the block that begins there, or 0 */
	bool pins_;
	bool in_pieces_;
	unsigned int chunk_shift_; /* a segment begins at a multiple of 1 << @chunk_shift_ */
	std::size_t part_;	   /* size of each segment but the last of those that are made at the beginning */
	std::vector<std::atomic<segment *>> index_; /* by chunk */
	hooks hooks_;
	unsigned int jemalloc_ = 0;
	int flags_ = 0;
	const std::uint64_t serial_; /* of all arenas that ever were */
	const std::uint64_t forks_;  /* generation of the process that made it, see inherited() */
	std::atomic<std::uint64_t> epoch_ = 0; /* caches of an earlier one are to be flushed */

	mutable std::mutex mutex_; /* what follows */
	std::deque<segment> segments_;
	npra::ranges chunks_; /* offsets that are of no segment */
	npra::ranges free_;
	std::size_t committed_ = 0; /* offsets below it may be touched; of memory that is not in pieces */
	std::size_t high_ = 0;	    /* no block has ever been at offsets above it */
	std::size_t registered_ = 0, managed_ = 0, peak_ = 0;
	std::string why_; /* the last extent was refused */

	mutable std::mutex caches_mutex_;
	std::vector<std::shared_ptr<npra::cache>> caches_;
	npra::counters past_; /* of threads that have ended, and of those without a cache */

	std::atomic<std::uint64_t> registrations_ = 0, deregistrations_ = 0, given_back_ = 0;
};

} // namespace nprdma::alloc

#endif
