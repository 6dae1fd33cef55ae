/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "world/local_leases.hpp"

#include "world/uncancelled.hpp"

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <limits>
#include <new>
#include <sys/mman.h>
#include <utility>
#include <vector>

namespace npr {

namespace {

constexpr unsigned stripe_bits = 3;
static_assert(local_leases::stripes == 1U << stripe_bits);

std::uint64_t now() noexcept
{
	timespec t;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
	return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(t.tv_nsec);
}

/* The pages around [@first, @end) that are in memory, within [@low, @high): leasing the others would bring them in. */
void widen(std::uint64_t &first, std::uint64_t &end, std::uint64_t low, std::uint64_t high) noexcept
{
	constexpr std::uint64_t page = RDMA_NP_PAGE_SIZE;
	std::array<unsigned char, (local_leases::part + local_leases::overlap) / page + 1> in;
	const std::uint64_t pages = (high - low) / page;

	if (pages > in.size() || mincore(reinterpret_cast<void *>(low), high - low, in.data()))
		return;
	while (first > low && in[(first - low) / page - 1] & 1)
		first -= page;
	while (end < high && in[(end - low) / page] & 1)
		end += page;
}

} // namespace

local_leases::~local_leases()
{
	const uncancelled here;

	keeper_.remove(*this);
	for (lease &l : leases_)
		if (l.at() == state::live || l.at() == state::ending)
			kernel_.hold_free(l.hold);
}

void local_leases::remove(std::uint32_t handle) noexcept
{
	const std::lock_guard lock(mutex_);
	const uncancelled here;
	std::atomic<region *> *const place = by_handle_.find(handle);
	/* relaxed: changes are under the mutex */
	region *const r = place ? place->load(std::memory_order_relaxed) : nullptr;

	if (!r)
		return;
	place->store(nullptr, std::memory_order_relaxed);
	const auto is_of = [r](const region *x) { return x == r || x->whole == r; };
	for (lease &l : leases_)
		if (l.at() == state::live && is_of(l.of))
			withdraw(l);
	std::erase_if(regions_, [&](const auto &p) { return is_of(p.get()); });
}

local_leases::region *local_leases::region_of(std::uint32_t handle, bool may_wait) noexcept
{
	std::atomic<region *> *const place = by_handle_.find(handle);
	region *const r = place ? place->load(std::memory_order_acquire) : nullptr;

	return r || !may_wait ? r : learn(handle);
}

local_leases::lasting local_leases::look_at(std::uint32_t handle) noexcept
{
	const region *const r = region_of(handle, false);

	return r && r->length && !r->blocks ? lasting{r->base, r->length, r->pages.get()} : lasting{};
}

/* One that is not known yet. Null: no memory. */
local_leases::region *local_leases::learn(std::uint32_t handle) noexcept
{
	const std::lock_guard lock(mutex_);
	const uncancelled here;
	ibv_mr mr{};
	rdma_np_mr_info info;

	try {
		auto *const place = by_handle_.make(handle);

		if (!place || place->load(std::memory_order_relaxed))
			return place ? place->load(std::memory_order_relaxed) : nullptr;
		auto r = std::make_unique<region>();
		r->handle = handle;
		mr.handle = handle;
		/* Otherwise the region stays one that is not leased. */
		if (!refused_ && !kernel_.query_mr(mr, info)) {
			if (info.length == std::numeric_limits<std::uint64_t>::max())
				r->blocks = std::make_unique<sparse_array<std::atomic<region *>>>();
			else
				make_entries(*r, info.base, info.length);
		}
		regions_.push_back(std::move(r));
		/* release: find() sees the region as it is made here */
		place->store(regions_.back().get(), std::memory_order_release);
		return regions_.back().get();
	} catch (const std::bad_alloc &) {
		return nullptr;
	}
}

void local_leases::make_entries(region &r, std::uint64_t base, std::uint64_t length) noexcept
{
	r.begin = base;
	r.base = base & ~(page - 1);
	r.length = base + length - r.base;
	/* Zeroed, and without memory until it is used: regions may be large. */
	r.entries.reset(static_cast<entry *>(std::calloc((r.base + r.length - 1) / part - r.base / part + 1, sizeof(entry))));
	r.pages.reset(static_cast<entry *>(std::calloc((r.length - 1) / page + 1, sizeof(entry))));
	if (!r.entries || !r.pages)
		r.length = 0;
}

/* Null: it is none of user space, or not known and not to be waited for, or there is no memory. */
local_leases::region *local_leases::block_of(region &whole, std::uint64_t addr, bool may_wait) noexcept
{
	const std::uint64_t number = addr >> block_shift;

	if (number >= whole.blocks->size)
		return nullptr;
	const auto i = static_cast<std::uint32_t>(number);
	std::atomic<region *> *const place = whole.blocks->find(i);
	region *const r = place ? place->load(std::memory_order_acquire) : nullptr;

	return r || !may_wait ? r : learn_block(whole, i);
}

local_leases::region *local_leases::learn_block(region &whole, std::uint32_t number) noexcept
{
	const std::lock_guard lock(mutex_);
	const uncancelled here;

	try {
		auto &place = *whole.blocks->make(number);

		if (region *const r = place.load(std::memory_order_relaxed))
			return r;
		auto r = std::make_unique<region>();
		r->handle = whole.handle;
		r->whole = &whole;
		make_entries(*r, std::uint64_t{number} << block_shift, 1ULL << block_shift);
		regions_.push_back(std::move(r));
		/* release: find() sees the block as it is made here */
		place.store(regions_.back().get(), std::memory_order_release);
		return regions_.back().get();
	} catch (const std::bad_alloc &) {
		return nullptr;
	}
}

/* Were all recalls read that the kernel had posted when this began? */
bool local_leases::current(bool may_wait) noexcept
{
	if (!channel_.has_events()) [[likely]]
		return true;
	std::unique_lock lock(mutex_, std::defer_lock);

	if (may_wait)
		lock.lock();
	else if (!lock.try_lock())
		return false;
	read_events();
	return !channel_.has_events();
}

std::optional<local_leases::use> local_leases::use_of(std::atomic<lease *> &place, std::uint64_t addr, std::uint64_t end,
						      term t, unsigned stripe, local_ticket *ticket, bool may_wait) noexcept
{
	lease *const l = place.load(std::memory_order_acquire);

	if (!l)
		return std::nullopt;
	/* That it ends is seen at its place: withdraw() changes that first of all. */
	l->count_in(stripe);
	if (place.load(std::memory_order_seq_cst) != l || !current(may_wait) || place.load(std::memory_order_seq_cst) != l ||
	    addr < l->first.load(std::memory_order_relaxed) || end > l->end.load(std::memory_order_relaxed) ||
	    (t == term::lasting && !ends_with(*l, end))) {
		count_out(*l, stripe);
		return std::nullopt;
	}
	l->be_used();

	const std::uint32_t token = is_lease | l->number << stripe_bits | stripe;
	/* As long as we are counted in it is not another one's. If it ends meanwhile, nobody has this life again. */
	if (ticket) {
		const std::uint64_t first = l->first.load(std::memory_order_relaxed);
		/* Before the life: what was read up to here has changed it. */
		const std::uint64_t seen = channel_.seen();

		ticket->become(*l, l->life.load(std::memory_order_seq_cst), channel_, seen, stripe, first,
			       l->end.load(std::memory_order_relaxed) - first, l->delta, l->lkey, token, l->write);
	}
	return use{token, l->lkey, addr + l->delta};
}

void local_leases::count_out(lease &l, unsigned stripe) noexcept
{
	if (l.count_out(stripe)) [[unlikely]]
		end_if_unused(l);
}

/* It is found no more, so once nobody uses it nobody will. */
void local_leases::end_if_unused(lease &l) noexcept
{
	std::uint64_t life = l.life.load(std::memory_order_seq_cst);

	if (local_lease::state_of(life) != state::ending)
		return;
	for (const local_lease::counter &c : l.counters)
		if (c.users.load(std::memory_order_seq_cst))
			return;
	/* Of several that have seen that, one frees it. */
	if (!l.life.compare_exchange_strong(life, life ^ static_cast<std::uint64_t>(state::ending) ^
							 static_cast<std::uint64_t>(state::freed),
					    std::memory_order_seq_cst))
		return;
	ending_.fetch_sub(1, std::memory_order_relaxed);
	kernel_.hold_free(l.hold);
	/* spare() may give it to somebody else */
	l.become(state::free);
}

std::optional<local_leases::use> local_leases::take(std::uint32_t handle, std::uint64_t addr, std::uint32_t length,
						    bool write, term t, unsigned stripe, local_ticket *ticket,
						    bool may_wait) noexcept
{
	region *r = region_of(handle, may_wait);

	if (r && r->blocks)
		r = block_of(*r, addr, may_wait);
	if (!r || addr < r->base || addr - r->base >= r->length || length > r->length - (addr - r->base))
		return std::nullopt;
	const std::uint64_t end = addr + length;
	entry &e = t == term::brief ? r->entries[addr / part - r->base / part] : r->pages[(addr - r->base) / page];

	stripe %= stripes;
	/* What may be written may be read. */
	for (std::size_t w = write; w < e.at.size(); ++w)
		if (const auto u = use_of(e.at[w], addr, end, t, stripe, ticket, may_wait))
			return u;
	if (!may_wait || !ask(*r, e, addr, end, write, t))
		return std::nullopt;
	return use_of(e.at[write], addr, end, t, stripe, ticket, may_wait);
}

void local_leases::give(std::uint32_t token) noexcept
{
	count_out(*by_number_.find((token & ~is_lease) >> stripe_bits)->load(std::memory_order_acquire),
		  token & (stripes - 1));
}

bool local_leases::any_wanted() noexcept
{
	/* If somebody else reads what there is now, it is known the next time. */
	(void)current(false);
	return ending_.load(std::memory_order_relaxed);
}

bool local_leases::is_wanted(std::uint32_t token) const noexcept
{
	return by_number_.find((token & ~is_lease) >> stripe_bits)->load(std::memory_order_acquire)->at() == state::ending;
}

bool local_leases::is_alone(std::uint32_t token) const noexcept
{
	const lease &l = *by_number_.find((token & ~is_lease) >> stripe_bits)->load(std::memory_order_acquire);
	std::uint32_t users = 0;

	for (const auto &c : l.counters)
		users += c.users.load(std::memory_order_seq_cst);
	return users == 1;
}

/* True: there is a new lease of the buffer. Asks only the second time within a short time. */
bool local_leases::ask(region &r, entry &e, std::uint64_t addr, std::uint64_t end, bool write, term t) noexcept
{
	const std::uint64_t time = now();
	const std::uint64_t before = e.asked[write].exchange(time, std::memory_order_relaxed);

	if (!before || time - before > warm || time < r.not_before.load(std::memory_order_relaxed))
		return false;
	std::uint64_t first = addr & ~(page - 1), last = (end + page - 1) & ~(page - 1);

	if (t == term::brief) {
		const std::uint64_t low = (r.base / part + static_cast<std::uint64_t>(&e - r.entries.get())) * part;
		/* Without need nothing of the next part: a hold of a part of a huge page cuts its leaf. */
		const std::uint64_t high = low + part + (last > low + part ? overlap : 0);

		if (last > high)
			return false;
		widen(first, last, std::max(low, r.base), std::min(high, (r.base + r.length + page - 1) & ~(page - 1)));
	} else if (last - first > part + overlap) {
		return false;
	}

	const std::lock_guard lock(mutex_);
	const uncancelled here;
	if (!start()) {
		r.not_before.store(time + pause, std::memory_order_relaxed);
		return false;
	}
	lease *const l = spare();
	if (!l)
		return false;

	rdma_np_hold_req req{};
	rdma_np_hold_info info;
	req.addr = std::max(first, r.begin);
	req.length = std::min(last, r.base + r.length) - req.addr;
	req.flags = (write ? RDMA_NP_FAULT_WRITE : 0) | RDMA_NP_FAULT_LEASE;
	req.cookie = l->number;
	if (kernel_.hold(r.handle, req, info, l->hold, channel_.get())) {
		r.not_before.store(time + pause, std::memory_order_relaxed);
		return false;
	}
	l->first.store(req.addr, std::memory_order_relaxed);
	l->end.store(req.addr + req.length, std::memory_order_relaxed);
	l->delta = info.addr - req.addr;
	l->lkey = info.lkey;
	l->write = write;
	l->of = &r;
	l->place = &e.at[write];
	l->used.store(true, std::memory_order_relaxed);
	/* The one that was too small; or too large, for a lasting buffer. */
	if (lease *const old = l->place->load(std::memory_order_relaxed))
		withdraw(*old);
	l->become(state::live);
	/* release: who finds the lease sees what it is */
	l->place->store(l, std::memory_order_release);
	/* It may have been recalled before it was made known. */
	if (channel_.has_events())
		read_events();
	keeper_.watch(*this, true);
	return l->at() == state::live;
}

bool local_leases::start() noexcept
{
	if (!channel_.is_open() && !refused_) {
		const int rc = keeper_.open(*this, channel_);

		/* For want of memory, descriptors or a thread there may be some later. */
		refused_ = rc && rc != -EAGAIN && rc != -EMFILE && rc != -ENFILE && rc != -ENOMEM;
	}
	return channel_.is_open();
}

local_leases::lease *local_leases::spare() noexcept
{
	/* Most are in use if there are many: a few looks go on where the last ones ended. */
	for (std::size_t n = 0; n < std::min<std::size_t>(leases_.size(), 16); ++n) {
		looked_ = (looked_ + 1) % leases_.size();
		if (leases_[looked_].at() == state::free)
			return &leases_[looked_];
	}
	try {
		const auto number = static_cast<std::uint32_t>(leases_.size());

		if (number >= most)
			return nullptr;
		auto &place = *by_number_.make(number);
		lease &l = leases_.emplace_back();

		l.number = number;
		place.store(&l, std::memory_order_release);
		return &l;
	} catch (const std::bad_alloc &) {
		return nullptr;
	}
}

void local_leases::read_events() noexcept
{
	channel_.read([this](const rdma_np_event &e) {
		const auto *const place = by_number_.find(static_cast<std::uint32_t>(e.cookie));
		lease *const l = place ? place->load(std::memory_order_relaxed) : nullptr;

		if (e.type == RDMA_NP_EVENT_RECALL && l && l->at() == state::live)
			withdraw(*l);
	});
}

/* Nobody finds it any more. */
void local_leases::withdraw(lease &l) noexcept
{
	l.place->store(nullptr, std::memory_order_seq_cst);
	ending_.fetch_add(1, std::memory_order_relaxed);
	l.become(state::ending);
	end_if_unused(l);
}

bool local_leases::give_back_idle() noexcept
{
	const std::lock_guard lock(mutex_);
	bool any = false;

	for (lease &l : leases_)
		if (l.at() == state::live) {
			withdraw(l);
			any |= l.at() == state::free;
		}
	return any;
}

/* Those that nobody has used since the last time. False: there is none any more. */
bool local_leases::look_round() noexcept
{
	bool any = false;

	for (lease &l : leases_) {
		if (l.at() != state::live)
			continue;
		bool idle = !l.used.exchange(false, std::memory_order_relaxed);
		for (const local_lease::counter &c : l.counters)
			idle = idle && !c.users.load(std::memory_order_relaxed);
		if (idle)
			withdraw(l);
		any |= !idle;
	}
	return any;
}

void local_leases::tend(bool age) noexcept
{
	/* Who takes a lease has read what there was. */
	if (!age && !channel_.has_events())
		return;
	const std::lock_guard lock(mutex_);

	read_events();
	if (age && !look_round())
		keeper_.watch(*this, false);
}

} // namespace npr
