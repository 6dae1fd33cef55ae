/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the peer's kernel is asked for: pages, and holds of them. */
#include "protocol/engine.hpp"
#include "protocol/requests.hpp"

#include <algorithm>
#include <cerrno>

namespace npr {

/* @hold: it is wanted from here until it is needed no more. Without, none is. */
void engine::ask(piece &p, bool hold) noexcept
{
	if (!hold)
		end_hold(p);
	else if (!p.hold.want(state_.holds_wanted))
		return go_without_hold(p, true);
	if (hold && stalled()) {
		p.at = stage::barrier;
		return proceed(p);
	}
	const op &o = op_at(p.op);
	if (hold || (o.kind != op_kind::write && !o.opaque)) {
		p.todo.merge_runs(max_runs(p));
		p.ask = p.todo;
	} else {
		p.ask.merge_runs(p.reg->info.max_ranges);
	}
	p.at = stage::fault;
	if (hold || o.kind != op_kind::read)
		return send_fault(p);

	region &r = *p.reg;
	const std::uint32_t rkey = rkey_of(o.wr);
	const page_bits::run h = p.ask.hull();
	const std::uint64_t first = p.first_page + h.first, end = p.first_page + h.end;
	send_fault(p);
	/* If the region died meanwhile it may not even be there any more */
	if (p.reg == &r && p.at == stage::fault && !trouble_.dead)
		read_ahead(r, rkey, first, end);
}

/* A READ has missed the pages [first, end). */
void engine::read_ahead(region &r, std::uint32_t rkey, std::uint64_t first, std::uint64_t end) noexcept
{
	const rdma_np_region_info &i = r.info;
	const bool goes_on = first - r.ahead < sequential_gap;

	/* It has overtaken what was asked for before, which is on its way */
	if (end <= r.ahead && r.ahead - first <= r.window)
		return;
	r.ahead = end;
	if (!goes_on) {
		r.window = 0;
		return;
	}
	r.window = std::min<std::uint32_t>(2 * std::max<std::uint32_t>(r.window, static_cast<std::uint32_t>(end - first)),
					   RDMA_NP_MAX_PAGES);
	const std::uint64_t pages = std::min<std::uint64_t>(r.window, region_pages(i) - end);
	if (!pages)
		return;
	const std::uint64_t start = (i.base & ~(page_size - 1)) + end * page_size;
	const auto length = std::min<std::uint64_t>(pages * page_size, i.base + (i.length - 1) - start + 1);
	const std::int64_t asked = prefetch(rkey, start, length, false);
	if (asked > 0) {
		const std::uint64_t n = (static_cast<std::uint64_t>(asked) + page_size - 1) >> page_shift;
		r.ahead = end + n;
		stats_.read_ahead += n;
	}
}

void engine::send_fault(piece &p) noexcept
{
	const rdma_np_region_info &i = p.reg->info;
	std::array<rdma_np_range, RDMA_NP_MAX_RANGES> ranges;
	std::size_t n = 0;

	if (p.reg->gone)
		return p.at == stage::doubt ? hold_answered(p, RDMA_NP_GONE) : rebind(p);
	if (faults_ >= config_.max_faults)
		return put(asking_, p);

	const std::uint64_t origin = (i.base & ~(page_size - 1)) + p.first_page * page_size;
	p.ask.for_each_run([&](page_bits::run r) {
		const std::uint64_t start = std::max<std::uint64_t>(i.base, origin + r.first * page_size);
		/* inclusive: the region may end where addresses do */
		const std::uint64_t last = std::min<std::uint64_t>(i.base + (i.length - 1), origin + r.end * page_size - 1);
		ranges[n++] = {start, last - start + 1};
	});

	rdma_np_fault_req req{};
	req.region_id = i.region_id;
	req.cookie = std::uint64_t{config_.cookie} << 48 | std::uint64_t{p.generation} << 16 | index(p);
	req.flags = (op_at(p.op).kind != op_kind::read ? RDMA_NP_FAULT_WRITE : 0) | (p.hold.wanted() ? RDMA_NP_FAULT_HOLD : 0);
	const int rc = world_.fault(req, {ranges.data(), n});
	switch (rc) {
	case 0:
		++faults_;
		++stats_.faults;
		stats_.holds += p.hold.wanted();
		return;
	case -EBUSY:
	case -EAGAIN:
	case -EINTR:
	case -ENOMEM:
		return back_off(p);
	case -ENOENT:
		region_dies(*p.reg);
		return p.at == stage::doubt ? hold_answered(p, RDMA_NP_GONE) : rebind(p);
	case -ENOTCONN:
		return fail_op(p.op, not_connected());
	default:
		return fail_op(p.op, IBV_WC_GENERAL_ERR);
	}
}

/* The peer's word for the first pages; of the others only that they were worse before. */
void engine::event_words(std::uint32_t uid, std::uint64_t first, std::uint32_t pages, const rdma_np_event &e) noexcept
{
	const std::uint32_t n = std::min({pages, e.nr_words, std::uint32_t{RDMA_NP_EVENT_WORDS}});

	for (std::uint32_t k = 0; k < n; ++k)
		cache_.set(uid, first + k, e.words[k]);
	for (std::uint32_t k = n; k < pages; ++k)
		cache_.forget(uid, first + k);
}

/*
 * What was done under a hold is done, unless the hold ended before, with its region.
 * But a word says that a page has not the right that the hold gave: either the region
 * has died, or the owner has taken the page away, from itself and not from the hold,
 * which a pinned region would not notice either. The peer's kernel is asked which. The
 * hold is given back first, or that could wait for it: another page may be there now.
 */
void engine::doubt_hold(piece &p) noexcept
{
	end_hold(p);
	p.todo.merge_runs(max_runs(p));
	p.ask = p.todo;
	p.at = stage::doubt;
	send_fault(p);
}

/* If the region lives now it lived then, and with it the hold. */
void engine::hold_answered(piece &p, std::uint32_t status) noexcept
{
	switch (status) {
	case RDMA_NP_OK:
	case RDMA_NP_ACCESS:
	case RDMA_NP_ADDRESS:
	case RDMA_NP_NOMEM:
		return end_piece(p);
	case RDMA_NP_GONE:
		region_dies(*p.reg);
		if (op_at(p.op).kind != op_kind::once)
			return rebind(p);
		/* nobody knows whether it happened */
		return fail_op(p.op, IBV_WC_REM_ACCESS_ERR);
	case RDMA_NP_BUSY:
		++stats_.busy;
		return back_off(p);
	default:
		return fail_op(p.op, status == RDMA_NP_QP ? not_connected() : fault_status(status));
	}
}

/* Are these the words that were known of all the pages that were asked for? */
bool engine::are_known(const piece &p, const rdma_np_event &e) noexcept
{
	const page_bits::run r = p.ask.hull();
	const std::uint32_t n = r.end - r.first;

	if (p.ask.count() != n || n > std::min(e.nr_words, std::uint32_t{RDMA_NP_EVENT_WORDS}))
		return false;
	for (std::uint32_t k = 0; k < n; ++k)
		if (cache_.get(p.reg->uid, p.first_page + r.first + k) != e.words[k])
			return false;
	return true;
}

void engine::fault_served(piece &p, const rdma_np_event &event) noexcept
{
	const bool read = op_at(p.op).kind == op_kind::read && !op_at(p.op).opaque;
	bool first = true;

	if (p.hold.wanted() && !event.hold_id)
		return fail_op(p.op, IBV_WC_REM_INV_REQ_ERR);
	if (event.hold_id && !p.hold.grant(event.hold_id))
		world_.release(event.hold_id);
	/* The pages of a READ whose words are as before were there: only the data looked absent, or nobody looked. */
	if (!read || !are_known(p, event))
		++p.faulted;
	p.ask.for_each_run([&](page_bits::run r) {
		rdma_np_event e = event;
		if (!first)
			e.nr_words = 0;
		first = false;
		event_words(p.reg->uid, p.first_page + r.first, r.end - r.first, e);
	});
	/* Otherwise it is in no hurry any more. */
	if (!p.hold.refused())
		p.pause = 0;
	if (read) {
		p.round = 1;
		p.at = stage::read_data;
	} else {
		p.at = stage::write_decide;
	}
	proceed(p);
}

/*
 * The pages are wanted in time for one more round, not for good. A later round may ask for a hold again, unless it was refused
 * @for_good.
 */
void engine::go_without_hold(piece &p, bool for_good) noexcept
{
	release_if(p.hold.refuse(for_good, state_.holds_wanted));
	p.unproven = p.fetches = p.faulted = 0;
	p.todo.merge_runs(max_runs(p));
	p.ask = p.todo;
	p.at = stage::fault;
	back_off(p);
}

/* It asks once more, later. What the peer waits for may be memory that we keep, so no more of that is kept than is needed. */
void engine::back_off(piece &p) noexcept
{
	p.pause = std::clamp(2 * p.pause, min_backoff, max_backoff);
	p.wake = world_.now() + p.pause;
	put(pausing_, p);
	/* It may fail the request of @p. */
	keep_less();
}

/*
 * A lease around a local buffer is of up to 2 MiB. When other memory has come in the place of one of its pages, the
 * kernel answers BUSY to each FAULT of that page until the lease has gone back. The FAULT may be ours, or of a peer that keeps a
 * lease for which ours waits. So who waits keeps no lease that is wanted back, or it might wait for itself.
 *
 * What the HCA has something of keeps its leases, and completes by itself. All else of this QP waits for an answer to a
 * FAULT or a RESOLVE, for room in the send queue, or for what is ahead of it. Answers come in bounded time, and when one is BUSY this is
 * called, for all of the QP. So no request keeps such a lease for as long as it waits. The same holds for every other QP.
 *
 * The hold of a buffer alone stays. A FAULT waits for one only if the page of the buffer itself was replaced. The
 * kernel does not do this to a pinned page, so the program has: it has given up the buffer of a request that is not done,
 * which it may not do with pinned memory either.
 */
void engine::keep_less() noexcept
{
	/* What the provider refused has nothing posted, and the QP is about to end. */
	if (!config_.local || trouble_.broken || !world_.local_wanted())
		return;
	/* First what is done: others may have a lease together with it, and need the room that it takes. */
	for (const bool narrows : {false, true}) {
		for (std::uint64_t i = head_; i < tail_; ++i) {
			op &o = op_at(i);

			if (!o.held || o.slots)
				continue;
			if (narrows && !o.finished && o.status == IBV_WC_SUCCESS && !narrow_buffers(i))
				fail_op(i, IBV_WC_LOC_QP_OP_ERR);
			/* Its completion has to wait for those ahead of it, but its buffers need not. */
			if (o.finished || o.status != IBV_WC_SUCCESS)
				free_buffers(o);
		}
	}
}

/* False: a buffer is not held any more. */
bool engine::narrow_buffers(std::uint64_t i) noexcept
{
	op &o = op_at(i);
	std::uint32_t n = 0;

	for (int k = 0; n < o.held; ++k) {
		const ibv_sge &s = o.wr.sg_list[k];

		/* What is held has another key for the HCA than the program has for it. */
		if (!s.length || o.wire[k].lkey == s.lkey)
			continue;
		std::uint32_t &hold = hold_of(o, i, n);
		if (world_.narrow_local(s, brings(o.wr.opcode), hold, o.wire[k]) < 0) {
			hold = hold_of(o, i, --o.held);
			return false;
		}
		++n;
	}
	return true;
}

/* A pinned region would have its pages: the pressure may pass, but nobody waits for ever. */
bool engine::waits_for_memory(piece &p) noexcept
{
	const nanoseconds now = world_.now();

	if (!p.hold.wanted())
		return false;
	if (!p.short_since)
		p.short_since = now;
	return now - p.short_since < hold_patience;
}

void engine::on_event(const rdma_np_event &e) noexcept
{
	expand();
	if (e.type == RDMA_NP_EVENT_REGION_GONE) {
		if (region *r = find_region(e.region_id)) {
			region_dies(*r);
			forget_dead();
		} else if (resolves_) {
			/* An answer that names it may be on its way: it must not be believed. */
			rdma_np_region_info info{};
			info.region_id = e.region_id;
			decline(info);
		}
		return;
	}
	if (e.type == RDMA_NP_EVENT_RECALL)
		return recalled(e.hold_id);
	if (e.type != RDMA_NP_EVENT_FAULT || !faults_)
		return;
	--faults_;

	const std::uint32_t i = e.cookie & 0xffff;
	if (i >= lease_cookie && i < prefetch_cookie)
		return lease_answered(i - lease_cookie, e);
	if (i >= prefetch_cookie) {
		prefetch_slot &f = prefetches_[0xffff - i];
		if (e.status == RDMA_NP_OK)
			event_words(f.uid, f.page, f.pages, e);
		f.uid = 0;
		return;
	}
	piece *p = i < made_ ? &pieces_[i] : nullptr;
	if (!p || p->on || (p->at != stage::fault && p->at != stage::doubt) ||
	    p->generation != static_cast<std::uint32_t>(e.cookie >> 16)) {
		/* for a work request that has failed meanwhile */
		return release_unused(e.hold_id);
	}
	if (p->at == stage::doubt)
		return hold_answered(*p, e.status);
	const op_kind kind = op_at(p->op).kind;
	const bool waits = kind == op_kind::once || (kind == op_kind::write && config_.ordered_writes && !p->hold.impossible());
	const bool repeatable_hold = p->hold.wanted() && !waits;
	switch (e.status) {
	case RDMA_NP_OK:
		return fault_served(*p, e);
	case RDMA_NP_GONE:
		region_dies(*p->reg);
		return rebind(*p);
	case RDMA_NP_BUSY:
		++stats_.busy;
		if (repeatable_hold)
			return go_without_hold(*p, false);
		return back_off(*p);
	case RDMA_NP_ADDRESS:
	case RDMA_NP_NOMEM:
		/* Nothing is mapped there, or nothing that can be pinned for long, or not now. */
		if (e.status == RDMA_NP_NOMEM && !repeatable_hold && waits_for_memory(*p))
			return back_off(*p);
		if (p->hold.wanted() && !is_atomic(op_at(p->op).wr.opcode)) {
			/* An ordered WRITE has waited in vain. One with immediate goes the way of others now. */
			if (kind == op_kind::once)
				op_at(p->op).kind = op_kind::write;
			return go_without_hold(*p, e.status == RDMA_NP_ADDRESS || waits);
		}
		[[fallthrough]];
	default:
		return fail_op(p->op, e.status == RDMA_NP_QP ? not_connected() : fault_status(e.status));
	}
}

/* Which rights does it ask for, and is it inside of the region? */
int engine::prefetch_error(const region &r, std::uint64_t addr, std::uint64_t length, bool write) noexcept
{
	const rdma_np_region_info &i = r.info;

	if (addr < i.base || length > i.length || addr - i.base > i.length - length)
		return -EFAULT;
	return write && !i.write_key ? -EACCES : 0;
}

std::int64_t engine::prefetch(std::uint32_t rkey, std::uint64_t addr, std::uint64_t length, bool write) noexcept
{
	const binding *b = find_binding(rkey, addr);
	std::uint64_t done = 0;

	expand();
	if (!b || b->state != binding_state::bound)
		return -ENOENT;
	const rdma_np_region_info &i = b->to->info;
	/* What is in other parts the caller sees by what is returned, and asks for. */
	if (i.part_shift)
		length = std::min<std::uint64_t>(length, i.length - (addr - i.base));
	if (const int error = prefetch_error(*b->to, addr, length, write))
		return error;
	for (unsigned k = 0; k < max_prefetches && done < length; ++k) {
		/* work requests go first */
		if (trouble_.dead || faults_ > config_.max_faults / 2)
			break;
		prefetch_slot &f = prefetches_[k];
		if (f.uid)
			continue;
		const std::uint64_t start = addr + done;
		const std::uint64_t n = std::min(length - done, i.max_pages * page_size - start % page_size);
		const rdma_np_range range{start, n};
		rdma_np_fault_req req{};
		req.region_id = i.region_id;
		req.cookie = std::uint64_t{config_.cookie} << 48 | (0xffff - k);
		req.flags = write ? RDMA_NP_FAULT_WRITE : 0;
		if (world_.fault(req, {&range, 1}))
			break;
		++faults_;
		++stats_.faults;
		f.uid = b->to->uid;
		f.page = (start >> page_shift) - (i.base >> page_shift);
		f.pages = static_cast<std::uint32_t>(((start + n - 1) >> page_shift) - (start >> page_shift) + 1);
		done += n;
	}
	return static_cast<std::int64_t>(done);
}

} // namespace npr
