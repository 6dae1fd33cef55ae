/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * One mapping as the pager's threads see it, and the states of its pages.
 *
 * A page has one state at a time; who moves it to busy or evicting owns it until he moves it on. Owners are
 * few and each is bounded by the store's time-outs. Others who want the page leave the flag "wanted", and the
 * owner wakes the waiting threads when he leaves, which then fault again.
 *
 *	absent ----> busy ----> clean <----> dirty		mapped; clean is write-protected
 *	  ^            |          |            |
 *	  |        poisoned       +- evicting -+
 *	  |                       |            |
 *	  |                    idle_clean   idle_dirty		in its frame and not mapped
 *	  |                       |            |
 *	  +------------------ evicting <-------+
 *
 * An idle page is mapped nowhere but in the alias, so its content is still: who unmaps a page owns it until
 * that is done, or a write back in between would miss what is written until then. Recency comes from this:
 * pages are unmapped first, oldest first, and go only if nobody touched them until their turn comes.
 *
 * A page that could not be brought is poisoned: whoever touches it gets SIGBUS. One that could not be mapped
 * and may have been written to is poisoned_dirty: its frame stays until it is written back. Who unmaps it
 * takes the poison from it, and it is idle_dirty.
 */
#ifndef NPRDMA_FAR_AREA_HPP
#define NPRDMA_FAR_AREA_HPP

#include "owners.hpp"
#include "uffd.hpp"

#include <nprdma/far.hpp>

#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

namespace nprdma::far
{

enum kind : std::uint8_t {
	absent = 0, /* as fresh memory reads */
	busy,
	clean,
	dirty,
	idle_clean,
	idle_dirty,
	evicting,
	poisoned,
	poisoned_dirty,
	gone, /* unmapped */
};

enum flag : std::uint8_t {
	kind_mask = 0x0f,
	wanted = 0x10,  /* wake when the owner leaves */
	pinned = 0x20,  /* not to be evicted */
	trigger = 0x40, /* brought ahead: the first touch asks for more */
	queued = 0x80,  /* has an entry in one of the queues; changed under their mutex only */
};

struct counters {
	std::atomic<std::uint64_t> demand, prefetched, empty, again, first_write, evicted, written_back,
	    poisoned, write_errors, waits;
};

/* What the last faults say about the next ones. */
struct history {
	static constexpr unsigned depth = 16;

	std::mutex mutex;
	std::int64_t steps[depth] = {}; /* between faults, in pages; a ring */
	unsigned at = 0, filled = 0;
	std::int64_t last = -1;
	unsigned window = 0;    /* pages asked for last */
	std::int64_t next = -1; /* behind them */
};

class area
{
public:
	area(std::shared_ptr<store> from, const map_options &how, bool can_protect, std::uint64_t length,
	     std::size_t system_page) noexcept
	    : source(std::move(from)),
	      options(how),
	      can_protect(can_protect),
	      store_offset(how.store_offset),
	      bytes(length),
	      page_bytes(how.page_bytes),
	      pages((length + how.page_bytes - 1) / how.page_bytes),
	      system_page(system_page)
	{
	}
	~area();
	area(const area &) = delete;
	area &operator=(const area &) = delete;

	/* memfd, both mappings, states; not yet watched. */
	status prepare();

	/* From the store: nothing of ours is under way. */
	void detach() noexcept
	{
		if (std::exchange(attached, false))
			source->detach({alias.get(), mapped_bytes()});
	}

	[[nodiscard]] std::size_t mapped_bytes() const noexcept { return pages * page_bytes; }
	[[nodiscard]] std::byte *page_address(std::size_t page) const noexcept
	{
		return base + page * page_bytes;
	}
	[[nodiscard]] std::atomic<std::uint8_t> &state(std::size_t page) const noexcept
	{
		return reinterpret_cast<std::atomic<std::uint8_t> *>(states.get())[page];
	}
	/* The part of the page that the store has. */
	[[nodiscard]] piece piece_of(std::size_t page) const noexcept
	{
		const std::uint64_t at = page * page_bytes;

		return {store_offset + at,
			{alias.get() + at,
			 static_cast<std::size_t>(std::min<std::uint64_t>(page_bytes, bytes - at))}};
	}
	/* Is there a way to see the first write? If not, what is mapped counts as written. */
	[[nodiscard]] bool protects() const noexcept { return !options.read_only && can_protect; }
	[[nodiscard]] bool assumes_writes() const noexcept { return !options.read_only && !can_protect; }

	/* From @from to @to, flags kept. False: it is not in that state, or has one of the flags @unless. */
	[[nodiscard]] bool move(std::size_t page, kind from, kind to, std::uint8_t unless = 0) const noexcept
	{
		std::uint8_t s = state(page).load(std::memory_order_relaxed);

		/* acq_rel: the owner before has left his work, and ours begins after it */
		while ((s & kind_mask) == from && !(s & unless))
			if (state(page).compare_exchange_weak(
				s, static_cast<std::uint8_t>((s & ~kind_mask) | to),
				std::memory_order_acq_rel))
				return true;
		return false;
	}
	[[nodiscard]] kind kind_of(std::size_t page) const noexcept
	{
		/* acquire: with move() and leave() */
		return static_cast<kind>(state(page).load(std::memory_order_acquire) & kind_mask);
	}
	/* The owner of a page moves it on, and wakes who wants it. */
	void leave(const uffd &u, std::size_t page, kind to, std::uint8_t set = 0) const noexcept
	{
		std::uint8_t s = state(page).load(std::memory_order_relaxed);

		/* acq_rel: as in move() */
		while (!state(page).compare_exchange_weak(
		    s, static_cast<std::uint8_t>((s & ~(kind_mask | wanted | trigger)) | to | set),
		    std::memory_order_acq_rel))
			;
		if (s & wanted)
			u.wake(page_address(page), page_bytes);
	}
	void set_flag(std::size_t page, flag f, bool on) const noexcept
	{
		/* relaxed: the kind orders */
		if (on)
			state(page).fetch_or(f, std::memory_order_relaxed);
		else
			state(page).fetch_and(static_cast<std::uint8_t>(~f), std::memory_order_relaxed);
	}
	[[nodiscard]] bool has_flag(std::size_t page, flag f) const noexcept
	{
		return state(page).load(std::memory_order_relaxed) & f;
	}

	void unmap_run(std::size_t page, std::size_t count) const noexcept; /* from the application */
	void free_run(std::size_t page,
		      std::size_t count) const noexcept; /* the frames, and from everywhere */

	const std::shared_ptr<store> source;
	const map_options options;
	const bool can_protect;
	const std::uint64_t store_offset, bytes;
	const std::size_t page_bytes, pages, system_page;
	std::byte *base = nullptr;
	transport::descriptor frames;
	transport::mapping alias, states;
	bool attached = false;

	struct entry {
		std::size_t page;
		std::uint64_t stamp; /* of the pager's clock, for comparison between areas */
	};
	std::mutex queues;                  /* of: */
	std::deque<entry> active, inactive; /* oldest first */

	std::atomic<std::uint64_t> resident = 0; /* bytes, and room that is reserved for what is brought */
	std::atomic<std::uint64_t> pinned_bytes = 0;
	std::atomic<std::int64_t> write_failed_ns = 0; /* CLOCK_MONOTONIC; 0: the last write-back went well */
	std::atomic<std::uint8_t> access = static_cast<std::uint8_t>(hint::normal);
	/* Of hint::stream: where it is, and the end of what was brought ahead of it. */
	std::atomic<std::size_t> stream_at = 0, stream_end = 0;
	/* A stream has passed the page, or it is left of the one before. */
	[[nodiscard]] bool passed(std::size_t page) const noexcept
	{
		/* relaxed: it is a guess about what is not needed */
		return access.load(std::memory_order_relaxed) == static_cast<std::uint8_t>(hint::stream) &&
		       (page < stream_at.load(std::memory_order_relaxed) ||
			page >= stream_end.load(std::memory_order_relaxed));
	}
	std::atomic<std::uint64_t> evictions = 0; /* of all, that have begun: see pager_state::evict() */
	/*
	 * What the store is being asked to discard: nothing of it is brought meanwhile, because what is
	 * written to a page and goes back would be discarded with the rest. The number is odd while there is
	 * such a range.
	 */
	std::atomic<std::uint64_t> discards = 0;
	std::atomic<std::size_t> discard_first = 0, discard_end = 0;
	/* The caller owns the page and moved it from absent. acq_rel: discard() sees that, or we see the
	 * range. */
	[[nodiscard]] bool being_discarded(std::size_t page) noexcept
	{
		return discards.fetch_add(0, std::memory_order_acq_rel) % 2 &&
		       page >= discard_first.load(std::memory_order_relaxed) &&
		       page < discard_end.load(std::memory_order_relaxed);
	}
	std::atomic<int> users = 0; /* pager threads inside; see pager_state */
	std::atomic<bool> closing = false, draining = false;
	std::mutex exclusive; /* one flush, eviction of all, discard or unmap at a time */
	history pattern;
	mutable std::mutex error_mutex; /* of: */
	error last{0, {}};
	void failed(const error &why)
	{
		const std::lock_guard guard(error_mutex);
		last = why;
	}
	mutable counters count = {};
};

/* Calls @f(page) for the pages of [first, end) that were not absent when it looked. */
template <class F> void for_present(const area &a, std::size_t first, std::size_t end, F f)
{
	for (std::size_t page = first; page < end;) {
		std::uint64_t eight;

		/* Most of a large mapping is absent. A state that changes meanwhile is seen either way. */
		if (page % 8 == 0 && end - page >= 8) {
			eight = __atomic_load_n(reinterpret_cast<const std::uint64_t *>(&a.state(page)),
						__ATOMIC_ACQUIRE);
			if (!eight) {
				page += 8;
				continue;
			}
		}
		if (a.kind_of(page) != absent)
			f(page);
		page++;
	}
}

} // namespace nprdma::far

#endif
