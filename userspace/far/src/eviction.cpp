/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Room in the buffer. Nobody who waits for a page evicts one: evictors begin before there is no room left,
 * and take many pages at a time, so that stores have many under way.
 */
#include "pager_state.hpp"

#include <algorithm>
#include <utility>

namespace nprdma::far
{

namespace
{

constexpr std::size_t batch_pages = 64;
constexpr std::uint64_t batch_bytes = 8 << 20;
constexpr std::uint64_t fewest_pages = 8; /* in a buffer: one instruction may touch several at once */
constexpr auto retry_time = std::chrono::milliseconds(20);  /* of what cannot be written back */
constexpr auto look_again = std::chrono::microseconds(100); /* at a page that another thread owns */

std::int64_t now_ns() noexcept
{
	return std::chrono::steady_clock::now().time_since_epoch().count();
}

/* Calls @f(first, count) for each run of neighbours; sorts. */
template <class F> void for_runs(std::vector<std::size_t> &pages, F f)
{
	std::sort(pages.begin(), pages.end());
	for (std::size_t i = 0, n; i < pages.size(); i += n) {
		for (n = 1; i + n < pages.size() && pages[i + n] == pages[i] + n; n++)
			;
		f(pages[i], n);
	}
}

} // namespace

pager_state::marks pager_state::marks_of(std::uint64_t bytes, std::uint64_t page_bytes) const noexcept
{
	const std::uint64_t most = std::max(bytes, fewest_pages * page_bytes);
	const auto part = [most](double of) {
		return static_cast<std::uint64_t>(static_cast<double>(most) * of);
	};
	const std::uint64_t high = std::min(part(how_.high), most - page_bytes);

	return {most, high, std::min(part(how_.low), high - page_bytes)};
}

/* The mutex, so that the word is not lost between an evictor's look and his sleep. */
void pager_state::hurry() noexcept
{
	{
		const std::lock_guard guard(room_mutex_);
		evict_wanted_ = true;
	}
	evict_.notify_one();
}

bool pager_state::reserve(area &a, bool wait) noexcept
{
	const std::uint64_t size = a.page_bytes;
	const auto try_it = [&] {
		const marks all = marks_of(buffer_bytes_.load(std::memory_order_relaxed),
					   largest_page_.load(std::memory_order_relaxed));
		/* seq_cst: after waiting_, pairs with release(); the pages are ordered by their states */
		std::uint64_t was = resident_.load(std::memory_order_seq_cst);
		std::uint64_t own = a.resident.load(std::memory_order_seq_cst);

		if (a.options.budget) {
			const marks of = marks_of(a.options.budget, size);
			do
				if (own + size > (wait ? of.most : of.high))
					return false;
			while (!a.resident.compare_exchange_weak(own, own + size, std::memory_order_relaxed));
			if (own + size > of.high && !a.draining.exchange(true, std::memory_order_relaxed))
				hurry();
		} else {
			a.resident.fetch_add(size, std::memory_order_relaxed);
		}
		do
			if (was + size > (wait ? all.most : all.high)) {
				a.resident.fetch_sub(size, std::memory_order_relaxed);
				return false;
			}
		while (!resident_.compare_exchange_weak(was, was + size, std::memory_order_relaxed));
		if (was + size > all.high && !draining_.exchange(true, std::memory_order_relaxed))
			hurry();
		return true;
	};

	if (try_it())
		return true;
	if (!wait)
		return false;
	a.count.waits.fetch_add(1, std::memory_order_relaxed);
	std::unique_lock lock(room_mutex_);
	const auto until = std::chrono::steady_clock::now() + how_.room_deadline;

	waiting_++;
	for (bool late = false;;) {
		/* What is released from here on is not slept through. */
		const std::uint64_t seen = releases_;

		lock.unlock();
		const bool done = try_it();
		lock.lock();
		if (done || late || stop_.load(std::memory_order_relaxed)) {
			waiting_--;
			return done;
		}
		evict_wanted_ = true;
		evict_.notify_all();
		/* Evictors that found nothing are sent again. */
		(void)room_.wait_until(
		    lock, std::min(until, std::chrono::steady_clock::now() + retry_time),
		    [&] { return releases_ != seen || stop_.load(std::memory_order_relaxed); });
		late = std::chrono::steady_clock::now() >= until;
	}
}

void pager_state::release(area &a, std::size_t pages) noexcept
{
	/* seq_cst: the room is there before the look at who waits; a waiter counts himself before he tries */
	a.resident.fetch_sub(pages * a.page_bytes, std::memory_order_seq_cst);
	resident_.fetch_sub(pages * a.page_bytes, std::memory_order_seq_cst);
	if (waiting_.load(std::memory_order_seq_cst)) {
		const std::lock_guard guard(room_mutex_);
		releases_++;
		room_.notify_all();
	}
}

/* The area that is above its budget, or else the one whose oldest page is the oldest. */
pager_state::reference pager_state::to_evict_from(std::uint64_t &excess, const area *fruitless) noexcept
{
	const marks all = marks_of(buffer_bytes_.load(std::memory_order_relaxed),
				   largest_page_.load(std::memory_order_relaxed));
	const std::uint64_t is = resident_.load(std::memory_order_relaxed);
	reference oldest;
	std::uint64_t least = UINT64_MAX;

	if (is > all.high)
		draining_.store(true, std::memory_order_relaxed);
	else if (is <= all.low)
		draining_.store(false, std::memory_order_relaxed);
	excess = is > all.low ? is - all.low : 0;
	const bool drain = draining_.load(std::memory_order_relaxed);
	const std::int64_t now = now_ns();
	const std::shared_lock guard(areas_mutex_);

	for (const reference &a : areas_) {
		const std::int64_t failed = a->write_failed_ns.load(std::memory_order_relaxed);

		if (failed && now - failed < std::chrono::nanoseconds(retry_time).count())
			continue;
		if (a->options.budget) {
			const marks own = marks_of(a->options.budget, a->page_bytes);
			const std::uint64_t has = a->resident.load(std::memory_order_relaxed);

			if (has > own.high)
				a->draining.store(true, std::memory_order_relaxed);
			else if (has <= own.low)
				a->draining.store(false, std::memory_order_relaxed);
			if (a->draining.load(std::memory_order_relaxed)) {
				excess = has > own.low ? has - own.low : 0;
				return a;
			}
		}
		if (!drain)
			continue;
		const std::lock_guard queues(a->queues);
		const auto &first = !a->inactive.empty() ? a->inactive : a->active;
		const bool passed =
		    a.get() != fruitless && ((!a->inactive.empty() && a->passed(a->inactive.front().page)) ||
					     (!a->active.empty() && a->passed(a->active.front().page)));
		const std::uint64_t stamp = passed ? 0 : first.empty() ? UINT64_MAX : first.front().stamp;
		if (stamp < least) {
			least = stamp;
			oldest = a;
		}
	}
	return oldest;
}

void pager_state::evictor() noexcept
{
	/*
	 * What a stream has passed may be pinned, and must not keep others from being evicted. But it may
	 * only be busy for a moment, and that is no reason to evict what others use.
	 */
	constexpr unsigned vain_most = 5;
	const area *fruitless = nullptr; /* only to compare with: it may have gone */
	unsigned vain = 0;

	for (bool again = false;;) {
		{
			std::unique_lock lock(room_mutex_);
			const auto called = [&] {
				return evict_wanted_ || stop_.load(std::memory_order_relaxed);
			};

			if (again)
				evict_.wait_for(lock, retry_time, called);
			else
				evict_.wait(lock, called);
			evict_wanted_ = false;
			if (stop_.load(std::memory_order_relaxed))
				return;
		}
		again = false;
		std::uint64_t excess;
		while (const reference of = to_evict_from(excess, vain >= vain_most ? fruitless : nullptr)) {
			const visit v = enter(of);

			if (!v)
				continue;
			/* Enough and no more, and not so much that the first of it comes late. */
			const std::size_t most = std::clamp<std::size_t>(
			    std::min(excess, batch_bytes) / (*v).page_bytes, 1, batch_pages);
			const evicted done = evict_some(*v, most, false, nullptr);

			if (!done.freed && !done.moved) {
				/* Busy, pinned, or not to be written back. */
				vain = of.get() == fruitless ? vain + 1 : 1;
				fruitless = of.get();
				again = true;
				break;
			}
			if (of.get() == fruitless)
				vain = 0;
		}
		/* Above a mark, and nothing to be had now. */
		again |= draining_.load(std::memory_order_relaxed);
	}
}

/*
 * What a stream has passed goes first, before what is older in this mapping and in others. Pages come in the
 * order in which they are passed, so those are the oldest ones.
 */
void pager_state::cool_passed(area &a, std::size_t most) noexcept
{
	std::vector<std::pair<std::size_t, kind>> mine;
	std::vector<area::entry> cold;

	{
		const std::lock_guard guard(a.queues);

		for (std::size_t n = std::min(most, a.active.size()); n && a.passed(a.active.front().page);
		     n--) {
			area::entry e = a.active.front();
			const kind k = a.kind_of(e.page);

			a.active.pop_front();
			if (k == absent || k == poisoned || k == gone) {
				a.set_flag(e.page, queued, false);
				continue;
			}
			if (a.move(e.page, clean, evicting, pinned)) {
				mine.emplace_back(e.page, idle_clean);
			} else if (a.move(e.page, dirty, evicting, pinned)) {
				mine.emplace_back(e.page, idle_dirty);
			} else if (a.has_flag(e.page, pinned) || (k != idle_clean && k != idle_dirty)) {
				e.stamp = clock_.fetch_add(1, std::memory_order_relaxed);
				a.active.push_back(e);
				continue;
			}
			cold.push_back({e.page, 0});
		}
	}
	for (const auto &[page, as] : mine) {
		a.unmap_run(page, 1);
		a.leave(uffd_, page, as);
	}
	const std::lock_guard guard(a.queues);
	a.inactive.insert(a.inactive.begin(), cold.begin(), cold.end());
}

/* The oldest pages out of sight: who wants them back soon finds them still in their frames. */
std::size_t pager_state::unmap_some(area &a, std::size_t most) noexcept
{
	std::vector<std::size_t> cleans, dirties;
	std::vector<area::entry> idle;
	std::size_t moved = 0;

	{
		const std::lock_guard guard(a.queues);

		for (std::size_t n = std::min(most, a.active.size()); n; n--) {
			area::entry e = a.active.front();
			const kind k = a.kind_of(e.page);

			a.active.pop_front();
			if (k == absent || k == poisoned || k == gone) {
				a.set_flag(e.page, queued, false);
				moved++;
			} else if (!a.has_flag(e.page, pinned) && (k == idle_clean || k == idle_dirty)) {
				idle.push_back(e);
			} else if (a.move(e.page, clean, evicting, pinned)) {
				idle.push_back(e);
				cleans.push_back(e.page);
			} else if (a.move(e.page, dirty, evicting, pinned) ||
				   a.move(e.page, poisoned_dirty, evicting, pinned)) {
				idle.push_back(e);
				dirties.push_back(e.page);
			} else {
				e.stamp = clock_.fetch_add(1, std::memory_order_relaxed);
				a.active.push_back(e);
			}
		}
	}
	const auto unmap = [&](std::vector<std::size_t> &pages, kind as) {
		for_runs(pages, [&](std::size_t first, std::size_t n) {
			a.unmap_run(first, n);
			for (std::size_t page = first; page < first + n; page++)
				a.leave(uffd_, page, as);
		});
	};
	unmap(cleans, idle_clean);
	unmap(dirties, idle_dirty);
	const std::lock_guard guard(a.queues);
	a.inactive.insert(a.inactive.end(), idle.begin(), idle.end());
	return moved + idle.size();
}

status pager_state::write_back(area &a, std::span<const std::size_t> pages) noexcept
{
	std::vector<piece> pieces;

	if (pages.empty())
		return {};
	for (const std::size_t page : pages)
		pieces.push_back(a.piece_of(page));
	status s = a.source->write_many(pieces);
	if (s) {
		a.count.written_back.fetch_add(pages.size(), std::memory_order_relaxed);
		a.write_failed_ns.store(0, std::memory_order_relaxed);
	} else {
		a.count.write_errors.fetch_add(1, std::memory_order_relaxed);
		a.failed(s.why());
		a.write_failed_ns.store(now_ns(), std::memory_order_relaxed);
	}
	return s;
}

/* The caller owns the pages, which are mapped nowhere but in the alias. @count: how many are absent now. */
status pager_state::give_back(area &a, std::vector<std::size_t> dirties, std::vector<std::size_t> freed,
			      bool all, std::size_t &count) noexcept
{
	const auto keep = [&](std::size_t page, kind as) {
		a.leave(uffd_, page, as);
		enqueue(a, page);
	};

	std::sort(dirties.begin(), dirties.end());
	status s = write_back(a, dirties);
	if (s) {
		for (const std::size_t page : dirties) {
			/* Somebody wants it, and it is still here. */
			if (a.has_flag(page, wanted) && !all)
				keep(page, idle_clean);
			else
				freed.push_back(page);
		}
	} else {
		for (const std::size_t page : dirties)
			keep(page, idle_dirty);
	}
	for_runs(freed, [&](std::size_t first, std::size_t n) {
		a.free_run(first, n);
		for (std::size_t i = first; i < first + n; i++)
			a.leave(uffd_, i, absent);
	});
	a.count.evicted.fetch_add(freed.size(), std::memory_order_relaxed);
	if (!freed.empty())
		release(a, freed.size());
	count = freed.size();
	return s;
}

pager_state::evicted pager_state::evict_some(area &a, std::size_t most, bool all, status *why) noexcept
{
	std::vector<std::size_t> dirties, cleans, mapped;
	evicted done{0, 0};
	std::size_t active, inactive;

	cool_passed(a, most);
	{
		const std::lock_guard guard(a.queues);
		active = a.active.size();
		inactive = a.inactive.size();
	}
	/* A good part is out of sight, so that it can be seen what is used. */
	const bool stream =
	    a.access.load(std::memory_order_relaxed) == static_cast<std::uint8_t>(hint::stream);
	/* Of a stream it is known: what it has not come to yet stays mapped, unless there is nothing else. */
	if (all || (stream ? inactive == 0 : inactive < std::max(most, (active + inactive) / 8)))
		done.moved += unmap_some(a, most);
	{
		const std::lock_guard guard(a.queues);

		for (std::size_t n = std::min(most, a.inactive.size()); n; n--) {
			area::entry e = a.inactive.front();
			const kind k = a.kind_of(e.page);

			a.inactive.pop_front();
			done.moved++;
			if (k == absent || k == poisoned || k == gone) {
				a.set_flag(e.page, queued, false);
			} else if (a.move(e.page, idle_clean, evicting, pinned)) {
				a.set_flag(e.page, queued, false);
				cleans.push_back(e.page);
			} else if (a.move(e.page, idle_dirty, evicting, pinned)) {
				a.set_flag(e.page, queued, false);
				dirties.push_back(e.page);
			} else if (!all && a.passed(e.page) && a.move(e.page, clean, evicting, pinned)) {
				a.set_flag(e.page, queued, false);
				cleans.push_back(e.page);
				mapped.push_back(e.page);
			} else if (!all && a.passed(e.page) && a.move(e.page, dirty, evicting, pinned)) {
				a.set_flag(e.page, queued, false);
				dirties.push_back(e.page);
				mapped.push_back(e.page);
			} else {
				e.stamp = clock_.fetch_add(1, std::memory_order_relaxed);
				a.active.push_back(e);
			}
		}
	}
	/* It was touched since it was unmapped, as the stream came to it. */
	for_runs(mapped, [&](std::size_t first, std::size_t n) { a.unmap_run(first, n); });

	if (status s = give_back(a, std::move(dirties), std::move(cleans), all, done.freed); !s) {
		if (why)
			*why = s;
		if (!done.freed)
			return {0, 0};
	}
	return done;
}

/*
 * All that are in memory, but for what is pinned, also those that an evictor has in his hands just now: his
 * entries are in neither queue.
 */
status pager_state::evict_idle(area &a) noexcept
{
	std::vector<std::size_t> dirties, cleans;
	status why;
	const auto some = [&] {
		std::vector<std::size_t> all = dirties;
		std::size_t freed;

		all.insert(all.end(), cleans.begin(), cleans.end());
		for_runs(all, [&](std::size_t first, std::size_t n) { a.unmap_run(first, n); });
		if (status s = give_back(a, std::move(dirties), std::move(cleans), true, freed); !s)
			why = s;
		dirties.clear();
		cleans.clear();
	};

	for_present(a, 0, a.pages, [&](std::size_t page) {
		while (why) {
			const kind k = a.kind_of(page);

			if (k == evicting || k == busy) {
				/* Nobody need wait for those that we have. */
				some();
				std::this_thread::sleep_for(look_again);
			} else if (k == absent || k == poisoned || k == gone || a.has_flag(page, pinned)) {
				return;
			} else if (a.move(page, k, evicting, pinned)) {
				/* If it is mapped, or poisoned, some() unmaps it before it looks. */
				(k == clean || k == idle_clean ? cleans : dirties).push_back(page);
				if (dirties.size() + cleans.size() == batch_pages)
					some();
				return;
			}
		}
	});
	some();
	return why;
}

} // namespace nprdma::far
