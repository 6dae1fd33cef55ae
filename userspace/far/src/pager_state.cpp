/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Faults and what is brought ahead of them: the fillers. Eviction is in eviction.cpp, what users ask for in
 * requests.cpp. */
#include "pager_state.hpp"

#include <algorithm>
#include <csignal>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

namespace nprdma::far
{

namespace
{

constexpr std::size_t most_ahead = 64; /* requests that wait */
constexpr std::size_t ahead_batch = 8; /* pages of one turn, after which faults come first again */

/*
 * A fresh frame of zeros, so that the store finds it in memory: an adapter need not fault it in, and no
 * thread is stopped at each page of the system, or killed if there is no memory.
 */
status make_frame(const area &a, const piece &p) noexcept
{
	while (::madvise(p.memory.data(), a.page_bytes, MADV_POPULATE_WRITE))
		if (errno != EINTR && errno != EAGAIN)
			return transport::failure(errno, "far: memory for a page");
	return {};
}

} // namespace

pager_state::visit::~visit()
{
	if (!area_)
		return;
	/* release: what was done with pages comes before the addresses go; pairs with unmap_all() */
	area_->users.fetch_sub(1, std::memory_order_release);
	area_->users.notify_all();
}

pager_state::pager_state(const pager_options &how, uffd u, transport::descriptor events,
			 transport::descriptor work)
    : how_(how),
      uffd_(std::move(u)),
      events_(std::move(events)),
      work_(std::move(work)),
      buffer_bytes_(how.buffer_bytes)
{
}

pager_state::~pager_state()
{
	const std::uint64_t one = 1;

	{
		const std::lock_guard guard(room_mutex_);
		/* relaxed: the mutex orders it for evictors, the descriptor for fillers */
		stop_.store(true, std::memory_order_relaxed);
	}
	evict_.notify_all();
	room_.notify_all();
	(void)!::write(work_.get(), &one, sizeof(one));
	for (std::thread &t : threads_)
		t.join();
}

status pager_state::start()
{
	sigset_t all, before;

	::sigfillset(&all);
	::pthread_sigmask(SIG_SETMASK, &all, &before);
	try {
		for (unsigned i = 0; i < how_.fillers; i++)
			threads_.emplace_back(&pager_state::filler, this, i);
		for (unsigned i = 0; i < how_.evictors; i++)
			threads_.emplace_back(&pager_state::evictor, this);
	} catch (const std::system_error &e) {
		::pthread_sigmask(SIG_SETMASK, &before, nullptr);
		return error{e.code().value(), std::string("threads of a pager: ") + e.what()};
	}
	::pthread_sigmask(SIG_SETMASK, &before, nullptr);
	return {};
}

status pager_state::add(std::shared_ptr<area> a)
{
	std::uint64_t largest = largest_page_.load(std::memory_order_relaxed);

	while (largest < a->page_bytes &&
	       !largest_page_.compare_exchange_weak(largest, a->page_bytes, std::memory_order_relaxed))
		;
	{
		const std::unique_lock guard(areas_mutex_);
		areas_.insert(std::upper_bound(
				  areas_.begin(), areas_.end(), a,
				  [](const reference &x, const reference &y) { return x->base < y->base; }),
			      a);
	}
	int code = uffd_.watch(a->base, a->mapped_bytes(), a->protects());
	if (!code &&
	    ::mprotect(a->base, a->mapped_bytes(), a->options.read_only ? PROT_READ : PROT_READ | PROT_WRITE))
		code = errno;
	if (!code)
		return {};
	(void)unmap_all(a, true);
	return transport::failure(code, "userfaultfd: to watch a mapping");
}

pager_state::visit pager_state::enter(const reference &a) noexcept
{
	/* seq_cst: before the look at closing; pairs with unmap_all() */
	a->users.fetch_add(1, std::memory_order_seq_cst);
	visit v(a, *this);
	if (a->closing.load(std::memory_order_seq_cst))
		return {};
	return v;
}

pager_state::visit pager_state::find(std::uintptr_t address) noexcept
{
	const std::shared_lock guard(areas_mutex_);
	const auto at = reinterpret_cast<std::byte *>(address);
	auto i = std::upper_bound(areas_.begin(), areas_.end(), at,
				  [](const std::byte *x, const reference &y) { return x < y->base; });

	/* One may lie where a part of another was unmapped: mostly the first is it. */
	while (i != areas_.begin()) {
		const reference &a = *--i;

		if (at < a->base + a->mapped_bytes() &&
		    a->kind_of(static_cast<std::size_t>(at - a->base) / a->page_bytes) != gone)
			return enter(a);
	}
	return {};
}

std::vector<pager_state::reference> pager_state::areas() const
{
	const std::shared_lock guard(areas_mutex_);

	return areas_;
}

void pager_state::filler(unsigned) noexcept
{
	for (;;) {
		uffd_msg m;
		epoll_event e;
		/* acquire: before the message is read; pairs with evict() */
		const std::uint64_t evictions = evictions_.load(std::memory_order_acquire);

		if (uffd_.next(m)) {
			fault(m, evictions);
			continue;
		}
		if (some_ahead())
			continue;
		if (stop_.load(std::memory_order_relaxed)) {
			const std::uint64_t one = 1;

			/* One of us may have read the call to stop as one to work. */
			(void)!::write(work_.get(), &one, sizeof(one));
			return;
		}
		if (::epoll_wait(events_.get(), &e, 1, -1) == 1 && e.data.fd == work_.get() &&
		    !stop_.load(std::memory_order_relaxed)) {
			std::uint64_t count;

			(void)!::read(work_.get(), &count, sizeof(count));
		}
	}
}

void pager_state::fault(const uffd_msg &m, std::uint64_t evictions) noexcept
{
	if (m.event != UFFD_EVENT_PAGEFAULT)
		return;
	const std::uintptr_t address = m.arg.pagefault.address;
	const bool write = m.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WRITE;
	const bool protection = m.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP;
	const visit v = find(address);

	/* Who unmaps wakes. */
	if (!v)
		return;
	area &a = *v;
	const std::size_t page = (address - reinterpret_cast<std::uintptr_t>(a.base)) / a.page_bytes;

	for (;;) {
		std::uint8_t s = a.state(page).load(std::memory_order_acquire);
		const kind k = static_cast<kind>(s & kind_mask);

		switch (k) {
		case absent:
			if (!a.move(page, absent, busy))
				continue;
			/*
			 * Who faulted may have the page long since, by a fault of another thread, and all was
			 * evicted again: then nobody waits, and the page would stay behind. Who does wait
			 * faults again. acq_rel: evict() sees that the page is busy, or we see evict().
			 */
			if (evictions_.fetch_add(0, std::memory_order_acq_rel) != evictions) {
				a.leave(uffd_, page, absent);
				uffd_.wake(a.page_address(page), a.page_bytes);
				return;
			}
			/* Who faulted waits until it is done: discard() wakes. */
			if (a.being_discarded(page)) {
				a.leave(uffd_, page, absent);
				return;
			}
			bring(v.shared(), page, write, evictions);
			return;
		case busy:
		case evicting:
			/* acq_rel: pairs with leave() */
			if (!a.state(page).compare_exchange_weak(s, s | wanted, std::memory_order_acq_rel))
				continue;
			return;
		case clean:
		case dirty:
			if (!a.move(page, k, busy))
				continue;
			if (protection) {
				a.count.first_write.fetch_add(k == clean, std::memory_order_relaxed);
				/* It wakes, unless it fails: then the write faults again. */
				if (uffd_.protect(a.page_address(page), a.page_bytes, false))
					uffd_.wake(a.page_address(page), a.page_bytes);
				a.leave(uffd_, page, dirty);
			} else {
				/* The kernel took it from the page table, to swap it out. */
				map(a, page, write || k == dirty);
			}
			return;
		case idle_clean:
		case idle_dirty: {
			const bool more = s & trigger;

			if (!a.move(page, k, busy))
				continue;
			a.count.again.fetch_add(1, std::memory_order_relaxed);
			map(a, page, write || k == idle_dirty);
			if (more)
				learn(v.shared(), page, true, evictions);
			return;
		}
		case poisoned:
		case poisoned_dirty:
			if (!a.move(page, k, busy))
				continue;
			(void)uffd_.poison(a.page_address(page), a.page_bytes);
			a.leave(uffd_, page, k);
			uffd_.wake(a.page_address(page), a.page_bytes);
			return;
		case gone:
			uffd_.wake(a.page_address(page), a.page_bytes);
			return;
		default:
			return;
		}
	}
}

/* The caller owns the page, which is in its frame. */
void pager_state::map(area &a, std::size_t page, bool write) noexcept
{
	write |= a.assumes_writes();
	if (const int code = uffd_.map(a.page_address(page), a.page_bytes, a.protects() && !write)) {
		a.failed(transport::failure(code, "far: userfaultfd, to map a page"));
		if (!write)
			return fail(a, page);
		/* The frame has what was written before, or by now in a part that is mapped already. */
		poison(a, page, poisoned_dirty);
	} else {
		a.leave(uffd_, page, write ? dirty : clean);
	}
	enqueue(a, page);
}

void pager_state::enqueue(area &a, std::size_t page) noexcept
{
	const std::lock_guard guard(a.queues);

	if (a.has_flag(page, queued))
		return;
	a.set_flag(page, queued, true);
	a.active.push_back({page, clock_.fetch_add(1, std::memory_order_relaxed)});
}

status pager_state::fill(area &a, std::size_t page) noexcept
{
	const piece p = a.piece_of(page);

	if (status s = make_frame(a, p); !s)
		return s;
	if (a.source->written(p.offset, p.memory.size()))
		return a.source->read(p);
	a.count.empty.fetch_add(1, std::memory_order_relaxed);
	return {};
}

/* Demand: somebody waits. The caller owns the page, which is absent. */
void pager_state::bring(const reference &of, std::size_t page, bool write, std::uint64_t evictions) noexcept
{
	area &a = *of;

	a.count.demand.fetch_add(1, std::memory_order_relaxed);
	if (!reserve(a, true)) {
		a.failed({ENOBUFS, "far: no room in the buffer before the deadline: all is pinned, or cannot "
				   "be written back"});
		return poison(a, page);
	}
	if (status s = fill(a, page); !s) {
		a.failed(s.why());
		return fail(a, page);
	}
	map(a, page, write);
	learn(of, page, false, evictions);
}

/* The caller owns the page, room is reserved for it, and its frame has nothing that the store has not. */
void pager_state::fail(area &a, std::size_t page) noexcept
{
	a.free_run(page, 1);
	release(a, 1);
	poison(a, page);
}

void pager_state::poison(area &a, std::size_t page, kind as) noexcept
{
	std::byte *const at = a.page_address(page);

	a.count.poisoned.fetch_add(1, std::memory_order_relaxed);
	if (uffd_.poison(at, a.page_bytes)) {
		/* A trace of an earlier protection is in the way. */
		(void)uffd_.protect(at, a.page_bytes, false);
		a.unmap_run(page, 1);
		(void)uffd_.poison(at, a.page_bytes);
	}
	/* Who gets the signal may call retry(), and finds the page in this state. */
	a.leave(uffd_, page, as);
	uffd_.wake(at, a.page_bytes);
}

/*
 * Which pages come next? The majority of the last steps between faults, as one thread's pattern may be broken
 * by another's. The page in the middle of what is asked for is left unmapped: its touch, which needs no
 * store, says that the guess was right, and asks for twice as many.
 */
void pager_state::learn(const reference &of, std::size_t page, bool expected,
			std::uint64_t evictions) noexcept
{
	area &a = *of;
	history &h = a.pattern;
	const auto how = static_cast<hint>(a.access.load(std::memory_order_relaxed));
	const auto at = static_cast<std::int64_t>(page);
	ahead work{of, {}};
	std::int64_t step = 0;

	if (how == hint::stream && !how_.prefetch) {
		a.stream_at.store(page, std::memory_order_relaxed);
		a.stream_end.store(page + 1, std::memory_order_relaxed);
	}
	if (how_.prefetch == 0 || how == hint::random)
		return;
	{
		const std::unique_lock guard(h.mutex, std::try_to_lock);
		if (!guard)
			return;
		if (!expected && h.last >= 0) {
			h.steps[h.at++ % history::depth] = at - h.last;
			h.filled = std::min(h.filled + 1, history::depth);
		}
		h.last = at;
		for (unsigned n : {4u, 8u, history::depth}) {
			if (n > h.filled || step)
				break;
			/* Boyer and Moore: a candidate, then a count. */
			std::int64_t candidate = 0;
			unsigned lead = 0, votes = 0;
			for (unsigned i = 1; i <= n; i++) {
				const std::int64_t s = h.steps[(h.at - i) % history::depth];
				if (!lead)
					candidate = s;
				lead = s == candidate ? lead + 1 : lead - 1;
			}
			for (unsigned i = 1; i <= n; i++)
				votes += h.steps[(h.at - i) % history::depth] == candidate;
			step = votes > n / 2 ? candidate : 0;
		}
		if (how == hint::stream) {
			step = 1;
			a.stream_at.store(page, std::memory_order_relaxed);
		}
		if (!step) {
			h.window = 0;
			return;
		}
		/* Each request has such a page. If they come close together, as after faults that overtook
		 * the fillers, a later one asks for more. */
		if (expected && (h.next - at) / step >= static_cast<std::int64_t>(how_.prefetch))
			return;
		h.window = expected || how == hint::stream
			       ? std::min(std::max(4u, 2 * h.window), how_.prefetch)
			       : std::min(4u, how_.prefetch);
		/* What was asked for before need not be asked for again. */
		const std::int64_t first = expected && (h.next - at) * step > 0 ? h.next : at + step;
		for (unsigned i = 0; i < h.window; i++) {
			const std::int64_t next = first + static_cast<std::int64_t>(i) * step;
			if (next < 0 || next >= static_cast<std::int64_t>(a.pages))
				break;
			work.pages.push_back(static_cast<std::size_t>(next));
		}
		h.next = first + static_cast<std::int64_t>(h.window) * step;
		if (how == hint::stream)
			a.stream_end.store(static_cast<std::size_t>(h.next), std::memory_order_relaxed);
	}
	if (work.pages.empty())
		return;
	work.trigger = work.pages[work.pages.size() / 2];
	/*
	 * Who faulted has the page, and may have called evict() since: nothing comes after that. acquire: who
	 * sees the area's number sees the pager's, which evict() has changed before.
	 */
	work.evictions = a.evictions.load(std::memory_order_acquire);
	if (evictions_.load(std::memory_order_relaxed) == evictions)
		push_ahead(std::move(work));
}

void pager_state::push_ahead(ahead work) noexcept
{
	const std::uint64_t one = 1;

	{
		const std::lock_guard guard(ahead_mutex_);
		/* The newest guess is the best one. */
		if (ahead_.size() >= most_ahead)
			ahead_.pop_front();
		ahead_.push_back(std::move(work));
	}
	(void)!::write(work_.get(), &one, sizeof(one));
}

bool pager_state::some_ahead() noexcept
{
	ahead now;

	{
		const std::lock_guard guard(ahead_mutex_);
		/* One filler is left for faults. */
		if (ahead_.empty() || (how_.fillers > 1 && prefetching_ >= how_.fillers - 1))
			return false;
		ahead &next = ahead_.front();
		const std::size_t n = std::min(next.pages.size(), ahead_batch);

		now.of = next.of;
		now.trigger = next.trigger;
		now.evictions = next.evictions;
		now.pages.assign(next.pages.begin(), next.pages.begin() + static_cast<std::ptrdiff_t>(n));
		next.pages.erase(next.pages.begin(), next.pages.begin() + static_cast<std::ptrdiff_t>(n));
		if (next.pages.empty())
			ahead_.pop_front();
		prefetching_++;
	}
	if (const visit v = enter(now.of))
		(void)bring_ahead(*v, now.pages, now.trigger, now.evictions, false);
	{
		const std::lock_guard guard(ahead_mutex_);
		prefetching_--;
	}
	return true;
}

/*
 * Those of @pages that are absent and for which there is room, unless all was evicted since they were asked
 * for. @patient: wait for room.
 */
status pager_state::bring_ahead(area &a, std::span<const std::size_t> pages, std::size_t trigger_page,
				std::uint64_t evictions, bool patient) noexcept
{
	std::vector<std::size_t> mine;
	std::vector<piece> pieces;
	status s;

	for (const std::size_t page : pages) {
		if (!a.move(page, absent, busy))
			continue;
		/* acq_rel: evict() sees that the page is busy, or we see evict() */
		if (a.evictions.fetch_add(0, std::memory_order_acq_rel) != evictions) {
			a.leave(uffd_, page, absent);
			break;
		}
		if (a.being_discarded(page)) {
			a.leave(uffd_, page, absent);
			continue;
		}
		if (!reserve(a, patient)) {
			a.leave(uffd_, page, absent);
			if (patient)
				s = error{ENOBUFS,
					  "no room in the buffer: all is pinned, or cannot be written back"};
			break;
		}
		const piece p = a.piece_of(page);
		if (status r = make_frame(a, p); !r) {
			a.free_run(page, 1);
			release(a, 1);
			a.leave(uffd_, page, absent);
			s = r;
			break;
		}
		mine.push_back(page);
		if (a.source->written(p.offset, p.memory.size()))
			pieces.push_back(p);
		else
			a.count.empty.fetch_add(1, std::memory_order_relaxed);
	}
	if (!pieces.empty())
		if (status r = a.source->read_many(pieces); !r) {
			/* Whoever touches them asks again, and gets the error. */
			for (const std::size_t page : mine) {
				a.free_run(page, 1);
				release(a, 1);
				a.leave(uffd_, page, absent);
			}
			return r;
		}
	a.count.prefetched.fetch_add(mine.size(), std::memory_order_relaxed);
	for (const std::size_t page : mine) {
		/* Who would map it for writing would make it dirty. */
		if (page == trigger_page || a.assumes_writes()) {
			a.leave(uffd_, page, idle_clean, page == trigger_page ? trigger : 0);
			enqueue(a, page);
		} else {
			map(a, page, false);
		}
	}
	return s;
}

} // namespace nprdma::far
