/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the users of a mapping ask for: flush, eviction, discard, hints, unmapping. */
#include "pager_state.hpp"

#include <algorithm>
#include <cstring>
#include <sys/mman.h>

namespace nprdma::far
{

namespace
{

constexpr std::size_t batch_pages = 64;
/* Who owns a page has a store under way: there is no wake-up for those who only want to own it next. */
constexpr auto look_again = std::chrono::microseconds(100);

} // namespace

kind pager_state::take(area &a, std::size_t page, kind as) noexcept
{
	for (;;) {
		const kind k = a.kind_of(page);

		if (k != busy && k != evicting) {
			if (a.move(page, k, as))
				return k;
		} else {
			std::this_thread::sleep_for(look_again);
		}
	}
}

status pager_state::flush(area &a)
{
	const std::lock_guard one(a.exclusive);
	std::vector<std::size_t> pages;
	std::vector<kind> were;
	status first;

	const auto write = [&] {
		status s = write_back(a, pages);

		for (std::size_t i = 0; i < pages.size(); i++) {
			/* What could not be protected, or is poisoned, was unmapped instead. */
			const bool mapped = were[i] == dirty;

			/* One that is not written stays protected: the next write to it comes as a fault. */
			a.leave(uffd_, pages[i],
				s ? (mapped ? clean : idle_clean) : (mapped ? dirty : idle_dirty));
		}
		if (!s && first)
			first = s;
		pages.clear();
		were.clear();
	};
	for_present(a, 0, a.pages, [&](std::size_t page) {
		for (kind k = a.kind_of(page); k != absent && k != clean && k != idle_clean;
		     k = a.kind_of(page)) {
			if (k == poisoned || k == gone)
				return;
			/* It may be dirty, and on its way: whoever has it may fail. */
			if (k == busy || k == evicting) {
				/* And may wait for room, which needs pages that we own. */
				write();
				std::this_thread::sleep_for(look_again);
				continue;
			}
			if (!a.move(page, k, busy))
				continue;
			const bool still = k == dirty && a.can_protect &&
					   uffd_.protect(a.page_address(page), a.page_bytes, true) == 0;
			if (k == poisoned_dirty || (k == dirty && !still))
				a.unmap_run(page, 1);
			pages.push_back(page);
			were.push_back(still ? dirty : idle_dirty);
			if (pages.size() == batch_pages)
				write();
			return;
		}
	});
	write();
	if (!first)
		return first;
	return a.source->flush();
}

status pager_state::evict(area &a)
{
	const std::lock_guard one(a.exclusive);
	std::size_t left;
	status why;

	/* What was asked for before does not come after: acq_rel, see fault() and bring_ahead(). */
	evictions_.fetch_add(1, std::memory_order_acq_rel);
	a.evictions.fetch_add(1, std::memory_order_acq_rel);
	{
		const std::lock_guard guard(a.queues);
		left = 2 * (a.active.size() + a.inactive.size()) + 1;
	}
	/* What is touched again meanwhile stays: each page has its turn twice, once to be unmapped. */
	for (;;) {
		const evicted done = evict_some(a, batch_pages, true, &why);

		if (!why)
			return why;
		if (done.freed + done.moved == 0 || left <= done.moved)
			break;
		left -= done.moved;
	}
	return evict_idle(a);
}

status pager_state::discard(area &a, std::uint64_t offset, std::uint64_t bytes)
{
	if (offset > a.bytes || bytes > a.bytes - offset)
		return error{EINVAL, "discard: the range is not inside of the mapping"};
	if (a.options.read_only)
		return error{EACCES, "discard: the mapping is read-only"};
	const std::lock_guard one(a.exclusive);
	const std::size_t first = (offset + a.page_bytes - 1) / a.page_bytes;
	/* The last page may be less than whole. */
	const std::size_t end = offset + bytes == a.bytes ? a.pages : (offset + bytes) / a.page_bytes;

	if (first >= end)
		return {};
	a.discard_first.store(first, std::memory_order_relaxed);
	a.discard_end.store(end, std::memory_order_relaxed);
	/* acq_rel: before the look at the pages; pairs with being_discarded() */
	a.discards.fetch_add(1, std::memory_order_acq_rel);
	for_present(a, first, end, [&](std::size_t page) {
		const kind k = take(a, page, busy);

		if (k == gone)
			return a.leave(uffd_, page, gone);
		a.unmap_run(page, 1);
		a.free_run(page, 1);
		if (k != absent && k != poisoned)
			release(a, 1);
		a.leave(uffd_, page, absent);
	});
	const std::uint64_t from = first * a.page_bytes;
	status s = a.source->discard(a.store_offset + from,
				     std::min<std::uint64_t>(end * a.page_bytes, a.bytes) - from);
	/* release: who sees it finds the store as it is now */
	a.discards.fetch_add(1, std::memory_order_release);
	uffd_.wake(a.page_address(first), (end - first) * a.page_bytes);
	return s;
}

/* To the front of those that go next. */
void pager_state::cool(area &a, std::size_t first, std::size_t end) noexcept
{
	std::vector<std::pair<std::size_t, kind>> mine;
	std::vector<area::entry> cold;

	{
		const std::lock_guard guard(a.queues);

		std::erase_if(a.active, [&](const area::entry &e) {
			if (e.page < first || e.page >= end)
				return false;
			if (a.move(e.page, clean, evicting, pinned))
				mine.emplace_back(e.page, idle_clean);
			else if (a.move(e.page, dirty, evicting, pinned))
				mine.emplace_back(e.page, idle_dirty);
			else
				return false;
			cold.push_back({e.page, 0});
			return true;
		});
	}
	for (const auto &[page, as] : mine) {
		a.unmap_run(page, 1);
		a.leave(uffd_, page, as);
	}
	const std::lock_guard guard(a.queues);
	a.inactive.insert(a.inactive.begin(), cold.begin(), cold.end());
}

status pager_state::pin(area &a, std::size_t first, std::size_t end) noexcept
{
	std::vector<std::size_t> fresh;
	for (std::size_t page = first; page < end; page++)
		if (!a.has_flag(page, pinned))
			fresh.push_back(page);
	const std::uint64_t more = fresh.size() * a.page_bytes;
	const marks all = marks_of(a.options.budget ? std::min<std::uint64_t>(a.options.budget, buffer_bytes_)
						    : buffer_bytes_.load(),
				   a.page_bytes);

	if (a.pinned_bytes.load() + more > all.low)
		return error{ENOBUFS, "pin: more would be pinned than the low mark of the buffer allows"};
	std::size_t done = 0;
	status why;
	for (; done < fresh.size() && why; done++) {
		const std::size_t page = fresh[done];

		/* Before the look at it: from here on nobody begins to evict it. */
		a.set_flag(page, pinned, true);
		a.pinned_bytes += a.page_bytes;
		for (bool here = false; !here && why;)
			switch (a.kind_of(page)) {
			case absent:
				why = bring_ahead(a, {&page, 1}, no_page,
						  a.evictions.load(std::memory_order_relaxed), true);
				break;
			case busy:
			case evicting:
				std::this_thread::sleep_for(look_again);
				break;
			case poisoned:
			case poisoned_dirty:
				why = error{EIO, "pin: a page could not be brought"};
				break;
			case gone:
				why = error{EINVAL, "pin: a page was unmapped"};
				break;
			default:
				here = true;
			}
	}
	if (!why)
		for (std::size_t i = 0; i < done; i++) {
			a.set_flag(fresh[i], pinned, false);
			a.pinned_bytes -= a.page_bytes;
		}
	return why;
}

status pager_state::advise(area &a, std::uint64_t offset, std::uint64_t bytes, hint what)
{
	if (offset > a.bytes || bytes > a.bytes - offset)
		return error{EINVAL, "hint: the range is not inside of the mapping"};
	const std::size_t first = offset / a.page_bytes;
	const std::size_t end = bytes ? (offset + bytes - 1) / a.page_bytes + 1 : first;

	switch (what) {
	case hint::will_need: {
		/* No more than there is room for. */
		const std::size_t most = buffer_bytes_.load(std::memory_order_relaxed) / a.page_bytes;
		ahead work;

		work.evictions = a.evictions.load(std::memory_order_acquire);
		for (const reference &r : areas())
			if (r.get() == &a)
				work.of = r;
		for (std::size_t page = first; page < end && work.pages.size() < most; page++)
			if (a.kind_of(page) == absent)
				work.pages.push_back(page);
		if (work.of && !work.pages.empty())
			push_ahead(std::move(work));
		return {};
	}
	case hint::cold:
		cool(a, first, end);
		return {};
	case hint::pin: {
		const std::lock_guard one(a.exclusive);
		return pin(a, first, end);
	}
	case hint::unpin: {
		const std::lock_guard one(a.exclusive);
		for (std::size_t page = first; page < end; page++)
			if (a.has_flag(page, pinned)) {
				a.set_flag(page, pinned, false);
				a.pinned_bytes -= a.page_bytes;
			}
		return {};
	}
	case hint::stream:
	case hint::random:
	case hint::normal:
		a.access.store(static_cast<std::uint8_t>(what), std::memory_order_relaxed);
		return {};
	}
	return error{EINVAL, "hint: there is no such"};
}

void pager_state::retry(area &a)
{
	const std::lock_guard one(a.exclusive);

	for_present(a, 0, a.pages, [&](std::size_t page) {
		const bool kept = a.move(page, poisoned_dirty, busy);

		if (!kept && !a.move(page, poisoned, busy))
			return;
		a.unmap_run(page, 1);
		a.leave(uffd_, page, kept ? idle_dirty : absent);
	});
}

status pager_state::unmap(const std::shared_ptr<area> &of, std::uint64_t offset, std::uint64_t bytes)
{
	area &a = *of;
	const std::uint64_t end = offset + bytes;

	if (offset > a.bytes || bytes > a.bytes - offset || !bytes || offset % a.page_bytes ||
	    (end % a.page_bytes && end != a.bytes))
		return error{EINVAL, "unmap: the range is not of whole pages of the mapping"};
	if (offset == 0 && bytes == a.bytes)
		return unmap_all(of, false);
	const std::lock_guard one(a.exclusive);
	const std::size_t first = offset / a.page_bytes, last = (end - 1) / a.page_bytes;
	std::vector<std::size_t> dirties;

	/* Nobody touches it: what is dirty now is all that will be. */
	for (std::size_t page = first; page <= last; page++) {
		const kind k = take(a, page, busy);

		if (k == dirty || k == idle_dirty || k == poisoned_dirty) {
			if (status s = write_back(a, {&page, 1}); !s) {
				a.leave(uffd_, page, k);
				return s;
			}
			a.unmap_run(page, 1);
			a.leave(uffd_, page, idle_clean);
		} else {
			a.leave(uffd_, page, k);
		}
	}
	std::size_t freed = 0;
	for (std::size_t page = first; page <= last; page++) {
		const kind k = take(a, page, busy);

		freed += k != absent && k != poisoned && k != gone;
		if (a.has_flag(page, pinned)) {
			a.set_flag(page, pinned, false);
			a.pinned_bytes -= a.page_bytes;
		}
	}
	std::byte *const at = a.page_address(first);
	const std::size_t size = (last - first + 1) * a.page_bytes;
	a.free_run(first, last - first + 1);
	for (std::size_t page = first; page <= last; page++) {
		/* Before the addresses are another's. */
		a.leave(uffd_, page, gone);
	}
	(void)::munmap(at, size);
	uffd_.wake(at, size);
	release(a, freed);
	return {};
}

status pager_state::unmap_all(const std::shared_ptr<area> &of, bool force)
{
	area &a = *of;

	if (!a.options.read_only)
		if (status s = flush(a); !s && !force)
			return s;
	{
		const std::unique_lock guard(areas_mutex_);
		std::erase(areas_, of);
		/* seq_cst: pairs with enter() */
		a.closing.store(true, std::memory_order_seq_cst);
	}
	{
		const std::lock_guard guard(ahead_mutex_);
		std::erase_if(ahead_, [&](const ahead &w) { return w.of == of; });
	}
	for (int n; (n = a.users.load(std::memory_order_seq_cst)) != 0;)
		a.users.wait(n, std::memory_order_seq_cst);
	for (std::size_t page = 0, n; page < a.pages; page += n) {
		const bool is_gone = a.kind_of(page) == gone;

		for (n = 1; page + n < a.pages && (a.kind_of(page + n) == gone) == is_gone; n++)
			;
		if (!is_gone)
			(void)::munmap(a.page_address(page), n * a.page_bytes);
	}
	/* Whoever waits for a page there faults again, and finds nothing mapped. */
	uffd_.wake(a.base, a.mapped_bytes());
	a.detach();
	const std::size_t had = a.resident.load(std::memory_order_relaxed) / a.page_bytes;
	if (had)
		release(a, had);
	const auto add = [](std::atomic<std::uint64_t> &to, const std::atomic<std::uint64_t> &from) {
		to.fetch_add(from.load(std::memory_order_relaxed), std::memory_order_relaxed);
	};
	add(past_.demand, a.count.demand);
	add(past_.prefetched, a.count.prefetched);
	add(past_.empty, a.count.empty);
	add(past_.again, a.count.again);
	add(past_.first_write, a.count.first_write);
	add(past_.evicted, a.count.evicted);
	add(past_.written_back, a.count.written_back);
	add(past_.poisoned, a.count.poisoned);
	add(past_.write_errors, a.count.write_errors);
	add(past_.waits, a.count.waits);
	return {};
}

namespace
{

void add_to(statistics &s, const counters &c) noexcept
{
	const auto get = [](const std::atomic<std::uint64_t> &x) {
		return x.load(std::memory_order_relaxed);
	};

	s.demand += get(c.demand);
	s.prefetched += get(c.prefetched);
	s.empty += get(c.empty);
	s.again += get(c.again);
	s.first_write += get(c.first_write);
	s.evicted += get(c.evicted);
	s.written_back += get(c.written_back);
	s.poisoned += get(c.poisoned);
	s.write_errors += get(c.write_errors);
	s.waits += get(c.waits);
}

} // namespace

statistics pager_state::stats(const area &a) const noexcept
{
	statistics s{};

	add_to(s, a.count);
	s.resident_bytes = a.resident.load(std::memory_order_relaxed);
	return s;
}

statistics pager_state::stats() const noexcept
{
	statistics s{};
	const std::shared_lock guard(areas_mutex_);

	add_to(s, past_);
	for (const reference &a : areas_)
		add_to(s, a->count);
	s.resident_bytes = resident_.load(std::memory_order_relaxed);
	return s;
}

void pager_state::set_buffer_bytes(std::uint64_t bytes) noexcept
{
	buffer_bytes_.store(bytes, std::memory_order_relaxed);
	draining_.store(true, std::memory_order_relaxed);
	hurry();
}

} // namespace nprdma::far
