/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Leases of the peer's memory: who asks, and when they go back. */
#include "protocol/engine.hpp"
#include "protocol/requests.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>

namespace npr {

int engine::advise(std::uint32_t rkey, std::uint64_t addr, std::uint64_t length, npr_advice advice) noexcept
{
	expand();
	if (length && addr + (length - 1) < addr)
		return -EFAULT;
	/* Parts of a whole address space one by one; other regions have all of it, or it is an error. */
	do {
		const binding *b = find_binding(rkey, addr);
		if (!b || b->state != binding_state::bound)
			return -ENOENT;
		const rdma_np_region_info &i = b->to->info;
		const std::uint64_t here =
			i.part_shift ? std::min<std::uint64_t>(length, i.length - (addr - i.base)) : length;
		if (const int error = advise_region(*b->to, rkey, addr, here, advice))
			return error;
		addr += here;
		length -= here;
	} while (length);
	return 0;
}

int engine::advise_region(const region &r, std::uint32_t rkey, std::uint64_t addr, std::uint64_t length,
			  npr_advice advice) noexcept
{
	using leases = remote_leases;
	const bool write = advice == NPR_ADVISE_WRITE_OFTEN, seldom = advice == NPR_ADVISE_SELDOM;
	if (const int error = prefetch_error(r, addr, length, write))
		return error;
	const unsigned rights = write ? IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC : IBV_ACCESS_REMOTE_READ;
	if (!seldom && !(r.info.access & rights))
		return -EACCES;
	if (!length || !config_.leases)
		return 0;
	const std::uint64_t base = r.info.base >> leases::part_shift, last = addr + (length - 1);
	const std::uint64_t begin = addr >> leases::part_shift, end = (last >> leases::part_shift) + 1;

	if (seldom) {
		use_seldom(r, addr, last);
		return 0;
	}
	for (std::uint64_t part = begin; part < std::min(end, begin + max_advised); ++part) {
		leases_.expect(leases::key_of(r.uid, static_cast<std::uint32_t>(part - base)), write);
		/* As its first request would, as long as there is room. */
		std::uint64_t first = std::max(addr, part << leases::part_shift);
		std::uint64_t bytes = std::min(last - first, page_size - 1 - first % page_size) + 1;
		ibv_send_wr wr{};
		wr.opcode = write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
		if (write && !(r.info.access & IBV_ACCESS_REMOTE_WRITE)) {
			first += -first % atomic_size;
			bytes = atomic_size;
			wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
		}
		wr.wr.rdma.remote_addr = first; /* an atomic's, too */
		(is_atomic(wr.opcode) ? wr.wr.atomic.rkey : wr.wr.rdma.rkey) = rkey;
		if (find_lease(wr, static_cast<std::uint32_t>(bytes), r) == none)
			want_lease(wr, static_cast<std::uint32_t>(bytes), r, true);
	}
	return 0;
}

/* Leases of any of [@addr, @last] go back, and so do those that are asked for; nothing there is expected to be worth one. */
void engine::use_seldom(const region &r, std::uint64_t addr, std::uint64_t last) noexcept
{
	using leases = remote_leases;
	const std::uint64_t base = r.info.base >> leases::part_shift;
	const std::uint64_t first_key = leases::key_of(r.uid, static_cast<std::uint32_t>((addr >> leases::part_shift) - base));
	const std::uint64_t last_key = leases::key_of(r.uid, static_cast<std::uint32_t>((last >> leases::part_shift) - base));

	leases_.expect_none(first_key, last_key);
	for (lease_ask &q : lease_asks_)
		q.unwanted |= q.key >= first_key && q.key <= last_key;
	leases_.for_each_live([&](std::uint32_t n) {
		const leases::range x = leases_.bytes(n);
		const std::uint64_t part = (base + (x.key & ~0U)) << leases::part_shift;

		if (x.key >> 32 == r.uid && part + x.first <= last && part + (x.end - 1) >= addr)
			end_lease(n);
	});
}

/* The bytes of a region that @wr needs; or nothing if it may not have them, or no lease can be of them all. */
std::optional<remote_leases::range> engine::lease_range(const ibv_send_wr &wr, std::uint32_t length,
							const region &r) const noexcept
{
	using leases = remote_leases;
	const std::uint64_t addr = addr_of(wr);

	if (!length || !allowed(wr, length, r) || (is_atomic(wr.opcode) && addr % atomic_size))
		return {};
	/* It may wait for a receive for ever, and a lease has to go back in time. If it is to land once a hold is no better. */
	if (takes_receive(wr.opcode) && !config_.ordered_writes)
		return {};
	const std::uint64_t index = (addr >> leases::part_shift) - (r.info.base >> leases::part_shift);
	const auto first = static_cast<std::uint32_t>(addr % leases::part);
	if (index > ~0U || length > lease_span - first)
		return {};
	return leases::range{leases::key_of(r.uid, static_cast<std::uint32_t>(index)), first, first + length,
			     wr.opcode != IBV_WR_RDMA_READ};
}

/* The number of a lease under which @wr may be posted now. */
std::uint32_t engine::find_lease(const ibv_send_wr &wr, std::uint32_t length, const region &r) const noexcept
{
	const auto need = lease_range(wr, length, r);

	return need ? leases_.find(*need) : none;
}

/*
 * A request is without a lease. The second one of its kind in this part within a short time asks for one: of its
 * pages, and of all others of the part that are resident already. Not @now: its pages have come only for it. A lease would be
 * of little more than these, and its FAULT would be in the way of the next one's.
 */
void engine::want_lease(const ibv_send_wr &wr, std::uint32_t length, const region &r, bool now) noexcept
{
	using leases = remote_leases;
	const rdma_np_region_info &i = r.info;
	const auto need = lease_range(wr, length, r);

	if (!need || trouble_.dead || trouble_.broken || !leases_.wants(need->key, need->write, world_.recently()) ||
	    !now)
		return;
	/* work requests go first */
	if (asked_leases_ == max_lease_asks || faults_ > config_.max_faults / 2)
		return;
	lease_ask *q = nullptr;
	for (lease_ask &x : lease_asks_) {
		if (x.key == need->key && x.write == need->write)
			return;
		if (!x.key)
			q = &x;
	}

	const std::uint64_t addr = addr_of(wr), start = addr - need->first;
	const std::uint32_t pages = pages_of(addr, length);
	std::array<rdma_np_range, 2> ranges{{{addr, length}}};
	std::size_t n = 1;
	if (pages > i.max_pages)
		return;
	/*
	 * The part, with its overlap if the request reaches into it, or so many of its pages around the request as the owner
	 * takes; last is inclusive. Without need nothing of the next part: a hold of a part of a huge page cuts its leaf.
	 */
	const std::uint64_t span = need->end > leases::part ? lease_span : leases::part;
	std::uint64_t first = std::max<std::uint64_t>(start, i.base);
	std::uint64_t last = std::min<std::uint64_t>(start + std::min(span - 1, ~start), i.base + (i.length - 1));
	const std::uint64_t around = std::min<std::uint64_t>((last >> page_shift) - (first >> page_shift) + 1, i.max_pages);
	if (i.max_ranges > 1 && around > pages && last - first >= length) {
		const std::uint64_t page = std::min(addr >> page_shift, (last >> page_shift) + 1 - around);
		first = std::max(first, page << page_shift);
		last = std::min(last, (page + around - 1) << page_shift | (page_size - 1));
		ranges[n++] = {first, last - first + 1};
	}

	rdma_np_fault_req req{};
	req.region_id = i.region_id;
	req.cookie = std::uint64_t{config_.cookie} << 48 | std::uint64_t{q->generation} << 16 |
		     (lease_cookie + static_cast<std::uint32_t>(q - lease_asks_.data()));
	req.flags = RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE | (need->write ? RDMA_NP_FAULT_WRITE : 0);
	if (world_.fault(req, {ranges.data(), n}))
		return leases_.refused(need->key, need->write, world_.recently());
	q->key = need->key;
	q->region = i.region_id;
	q->start = start;
	q->write = need->write;
	q->unwanted = false;
	++asked_leases_;
	++faults_;
}

void engine::lease_answered(std::uint32_t k, const rdma_np_event &e) noexcept
{
	lease_ask &q = lease_asks_[k];

	if (!q.key || q.generation != static_cast<std::uint32_t>(e.cookie >> 16))
		return release_unused(e.hold_id);
	if (q.unwanted) {
		release_unused(e.hold_id);
	} else if (!granted(q, e)) {
		release_unused(e.hold_id);
		leases_.refused(q.key, q.write, world_.recently());
	}
	q.key = 0;
	++q.generation;
	if (!--asked_leases_)
		nr_early_recalls_ = 0;
}

/* False: there is no lease, or it is of no use. What it is of a peer has said. */
bool engine::granted(const lease_ask &q, const rdma_np_event &e) noexcept
{
	const std::uint64_t said = e.lease_addr + (e.lease_length - 1);
	region *r = find_region(q.region);

	if (e.status != RDMA_NP_OK || !e.hold_id || !e.lease_length || trouble_.dead || !r || r->gone ||
	    leases_.by_hold(e.hold_id) != none)
		return false;
	/* A recall that came first wins (I9). */
	const std::size_t known = std::min(nr_early_recalls_, early_recalls_.size());
	if (nr_early_recalls_ > known || std::count(early_recalls_.data(), early_recalls_.data() + known, e.hold_id))
		return false;

	/* What of it is in the region, and in the part or its overlap; last is inclusive, and less if there was an overflow. */
	const std::uint64_t first = std::max<std::uint64_t>({e.lease_addr, q.start, r->info.base});
	const std::uint64_t last = std::min<std::uint64_t>(said, r->info.base + (r->info.length - 1));
	if (first > last || first - q.start >= lease_span)
		return false;
	const std::uint32_t n = leases_.place(q.key);
	if (n == none)
		return false;
	if (leases_.hold(n))
		end_lease(n);
	const std::uint64_t end = std::min(last - q.start, lease_span - 1) + 1;
	leases_.insert(n, {q.key, static_cast<std::uint32_t>(first - q.start), static_cast<std::uint32_t>(end), q.write},
		       e.hold_id, q.region, e.lease_key);
	leases_.granted(q.key, q.write, world_.recently());
	++r->refs;
	++stats_.leases;
	return true;
}

void engine::recalled(std::uint64_t hold) noexcept
{
	const std::uint32_t n = hold ? leases_.by_hold(hold) : none;

	if (n != none) {
		if (leases_.is_live(n)) {
			++stats_.recalls;
			end_lease(n);
		}
		return;
	}
	/* It may be of what an answer on its way brings; or of another QP, for which there is no room for ever. */
	if (hold && asked_leases_ && nr_early_recalls_ <= early_recalls_.size()) {
		if (nr_early_recalls_ < early_recalls_.size())
			early_recalls_[nr_early_recalls_] = hold;
		++nr_early_recalls_;
	}
}

/* From now on nothing is posted under it (I9). It goes back when what was has completed. */
void engine::end_lease(std::uint32_t n) noexcept
{
	if (leases_.withdraw(n))
		return lease_ended(n);
	/* Of what is unsignaled at the end of the send queue the HCA would say nothing. */
	trouble_.drains |= unsignaled_ && !trouble_.dead;
}

/* Nothing is under way under it, nor will be. */
void engine::lease_ended(std::uint32_t n) noexcept
{
	region *r = find_region(leases_.region(n));

	world_.release(leases_.hold(n));
	leases_.erase(n);
	unref(*r);
}

/* An answer that nobody waits for has brought a hold, unless it has come before. */
void engine::release_unused(std::uint64_t hold) noexcept
{
	if (hold && leases_.by_hold(hold) == none)
		world_.release(hold);
}

void engine::age_leases() noexcept
{
	expand();
	/* What waits for its turn may be for one that it has only just got. */
	if (next_ < tail_)
		return;
	leases_.for_each_idle([this](std::uint32_t n) { end_lease(n); });
}

} // namespace npr
