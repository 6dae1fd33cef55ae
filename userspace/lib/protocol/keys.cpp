/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Remote keys, and the regions that they name. */
#include "protocol/engine.hpp"
#include "protocol/requests.hpp"

#include <algorithm>
#include <cerrno>
#include <new>

namespace npr {

engine::binding *engine::find_named(const binding_name &name) noexcept
{
	const auto i = bindings_.find(name);

	return i == bindings_.end() ? nullptr : &i->second;
}

engine::binding *engine::look_up(std::uint32_t rkey) noexcept
{
	binding *const b = find_named({rkey});

	return b ? recent(rkey) = b : nullptr;
}

engine::binding *engine::find_part(binding &whole, std::uint64_t addr) noexcept
{
	const binding_name name = part_name(whole.rkey, addr);

	whole.seen = true;
	if (whole.last && whole.last->part == name.part)
		return whole.last;
	binding *const b = find_named(name);
	if (b)
		whole.last = b;
	return b;
}

engine::binding *engine::make_named(const binding_name &name) noexcept
{
	if (binding *b = find_named(name))
		return b;
	if (nr_loose_ >= max_loose_keys)
		drop_key();
	try {
		binding &b = bindings_[name];
		b.rkey = name.rkey;
		b.part = name.part;
		loose_.append(b);
		++nr_loose_;
		if (!b.part)
			recent(b.rkey) = &b;
		return &b;
	} catch (const std::bad_alloc &) {
		return nullptr;
	}
}

engine::binding *engine::make_binding(std::uint32_t rkey, std::uint64_t addr) noexcept
{
	if (binding *b = find_binding(rkey, addr))
		return b;
	return make_named(find_key(rkey) ? part_name(rkey, addr) : binding_name{rkey});
}

/* What is known of @b now; @r: the region that it names. */
void engine::bind(binding &b, binding_state state, region *r) noexcept
{
	b.state = state;
	if (b.to == r)
		return;
	b.hint.version = 0;
	nr_loose_ += !r;
	nr_loose_ -= !b.to;
	b.to = r;
	b.unlink();
	(r ? r->keys : loose_).append(b);
}

/* Nothing is known of it, and no answer is to come. */
void engine::erase(binding &b) noexcept
{
	const binding_name name{b.rkey, b.part};

	if (recent(b.rkey) == &b)
		recent(b.rkey) = nullptr;
	if (b.part)
		if (binding *const whole = find_key(b.rkey); whole && whole->last == &b)
			whole->last = nullptr;
	nr_loose_ -= !b.to;
	b.unlink();
	bindings_.erase(name);
}

/*
 * One key of no region makes room for another, and is asked about if it is used again. One that was used since
 * this came by last, or that is asked about, is passed over; of the latter there are few, for a piece has one key.
 */
void engine::drop_key() noexcept
{
	for (std::size_t tries = 2 * nr_loose_; tries; --tries) {
		binding &b = static_cast<binding &>(*loose_.next);

		if (!b.asks && !b.seen)
			return erase(b);
		b.seen = false;
		b.unlink();
		loose_.append(b);
	}
}

/* @addr: of the request that asks. */
void engine::send_resolve(binding &b, std::uint64_t addr) noexcept
{
	if (!b.asks++) {
		b.asked = world_.now();
		b.tail = tail_;
	}
	++resolves_;
	world_.resolve({b.rkey, addr, b.part != 0});
}

void engine::ask_resolve(binding &b, std::uint64_t addr) noexcept
{
	if (b.state == binding_state::asked)
		return;
	bind(b, binding_state::asked);
	send_resolve(b, addr);
}

/*
 * What is known of @b is too old for a request. So may an answer be that is to come, and then the request asks once
 * more; two questions at a time would never let it see one that is its own.
 */
void engine::ask_afresh(binding &b, std::uint64_t addr) noexcept
{
	bind(b, binding_state::asked);
	if (!b.asks)
		send_resolve(b, addr);
}

/*
 * May request @i be posted with its key as it is?
 *
 * A key value that was pinned memory's may be an unpinned region's later. The peer's kernel
 * promises that it is none for a time, which it counts from its answer, and which is counted
 * here from before the question: so what is posted before it is over here was posted before
 * any such region was registered. Without that promise the answer is good for the requests
 * that had been posted when it was asked for, and for no other.
 *
 * A key that is used is asked about again at half of the time, so that nothing waits.
 */
bool engine::is_plain(binding &b, std::uint64_t i) noexcept
{
	b.seen = true;
	if (i < b.upto || b.until == ~0ULL)
		return true;

	/*
	 * Where the clock source is not the TSC, now() is a system call. The owner remembers the
	 * promise for twice as long, so the milliseconds that recently() is behind do not matter.
	 */
	const nanoseconds now = world_.recently();
	if (now >= b.until)
		return false;
	if (b.until - now < plain_time / 2 && !b.asks && renewals_ < max_renewals) {
		b.renews = true;
		++renewals_;
		send_resolve(b, addr_of(op_at(i).wr));
	}
	return true;
}

/* As is_plain() for a request that is posted now, if the key need not be asked about for that. */
bool engine::stays_plain(binding &b) noexcept
{
	if (b.state != binding_state::plain)
		return false;
	b.seen = true;
	if (b.until == ~0ULL)
		return true;

	const nanoseconds now = world_.recently();
	return now < b.until && (b.asks || b.until - now >= plain_time / 2);
}

/* RESOLVE, asked at @asked with requests below @tail, said that it is no unpinned region. */
void engine::make_plain(binding &b, int error, nanoseconds asked, std::uint64_t tail) noexcept
{
	if (b.state != binding_state::plain)
		b.until = b.upto = 0;
	bind(b, binding_state::plain);
	b.upto = std::max(b.upto, tail);
	if (error == -EACCES)
		b.until = std::max(b.until, asked + plain_time);
	else if (error == -EHOSTUNREACH)
		b.until = ~0ULL; /* there is nobody who could register one */
}

engine::region *engine::find_region(std::uint64_t id) noexcept
{
	const auto i = regions_.find(id);

	return i == regions_.end() ? nullptr : &i->second;
}

engine::region *engine::make_region(const rdma_np_region_info &info) noexcept
{
	try {
		region &r = regions_[info.region_id];
		r.info = info;
		/* What the arrays here have room for. */
		r.info.max_pages = std::min<std::uint32_t>(info.max_pages, page_bits::capacity);
		r.info.max_ranges = std::min<std::uint32_t>(info.max_ranges, RDMA_NP_MAX_RANGES);
		r.uid = next_uid_++;
		return &r;
	} catch (const std::bad_alloc &) {
		return nullptr;
	}
}

void engine::region_dies(region &r) noexcept
{
	if (r.gone)
		return;
	leases_.for_each_live([&](std::uint32_t n) {
		if (leases_.region(n) == r.info.region_id)
			end_lease(n);
	});
	r.gone = true;
	++stats_.gone;
	while (!r.keys.empty()) {
		binding &b = static_cast<binding &>(*r.keys.next);

		/* An answer finds the question that it belongs to. */
		if (b.asks)
			bind(b, binding_state::unknown);
		else
			erase(b);
	}
	if (!r.refs)
		retire(r);
}

/*
 * RESOLVE may have found a region, and then something else went wrong. Whoever got a region has to forget it, for
 * its owner keeps its keys until then.
 */
void engine::decline(const rdma_np_region_info &info) noexcept
{
	if (!info.region_id || find_region(info.region_id))
		return;
	if (region *const r = make_region(info)) {
		r->gone = true;
		retire(*r);
	}
}

/* It is dead, and no piece refers to it, nor ever will. */
void engine::retire(region &r) noexcept
{
	r.unused = unused_;
	unused_ = &r;
}

void engine::forget_dead() noexcept
{
	while (!resolves_ && unused_) {
		const std::uint64_t id = unused_->info.region_id;

		unused_ = unused_->unused;
		world_.forget(id);
		regions_.erase(id);
	}
}

/* The region of @p has died: its key may name another one by now. */
void engine::rebind(piece &p) noexcept
{
	const op &o = op_at(p.op);

	take(p);
	give_ring(p);
	end_hold(p);
	unref(p);
	p.at = stage::rebind;
	const std::uint64_t addr = addr_of(o.wr) + p.offset;
	binding *b = make_binding(rkey_of(o.wr), addr);
	if (!b)
		return fail_op(p.op, IBV_WC_GENERAL_ERR);
	const bool other = b->state == binding_state::bound && !serves(*b->to, p);
	if (++p.rebinds > max_rebinds || (other && answered_for(*b, p.op)))
		return fail_op(p.op, IBV_WC_REM_ACCESS_ERR);
	if (b->state == binding_state::plain && is_plain(*b, p.op)) {
		go_plain(p);
		return put(posting_, p);
	}
	if (b->state == binding_state::bound && !other) {
		reset_piece(p, *b->to);
		return put(posting_, p);
	}
	put(rebinding_, p);
	if (other)
		ask_afresh(*b, addr);
	else
		ask_resolve(*b, addr);
}

/* What may be made of what a peer says: 0, @error, or -EPROTO. */
int engine::vet(const remote_key &key, int error, const rdma_np_region_info &info) noexcept
{
	if (error)
		return error;
	if (!sane(info))
		return -EPROTO;
	/* A region is found by its id, and what was said of it first is what counts: it has no other addresses now. */
	const region *const r = find_region(info.region_id);
	if (r && !r->gone && !same_addresses(r->info, info))
		return -EPROTO;
	if (!info.part_shift)
		return 0;
	/* All parts are found by the same bits; and by those of the address that was asked for, or it is asked for ever. */
	if (!is_part_of(info, key.addr) || (part_shift_ && part_shift_ != info.part_shift))
		return -EPROTO;
	part_shift_ = info.part_shift;
	return 0;
}

/* The binding whose question this was, if it is still there. */
engine::binding *engine::asked_about(const remote_key &key) noexcept
{
	return key.part ? find_named(part_name(key.rkey, key.addr)) : find_key(key.rkey);
}

/*
 * The answer is about the part that it brings, about the address that was asked for, or else about the key, which is
 * then of no whole address space any more: parts that are still bound were of one, and end when their owner says so.
 */
void engine::adopt(const remote_key &key, int error, const rdma_np_region_info &info, nanoseconds asked,
		   std::uint64_t tail) noexcept
{
	binding *b = asked_about(key);
	/* Another answer may have come first, and its region have died; or a later one is to come. */
	const bool awaited = !b || (b->state == binding_state::asked && !b->asks);

	--resolves_;
	error = vet(key, error, info);
	if (error)
		decline(info);
	/* What is known stays so if this one says nothing; that a key is none only -EACCES says. */
	if (awaited || !error || error == -EACCES) {
		const bool whole = !error && info.part_shift;

		if (!error || is_answer(error)) {
			b = make_named({key.rkey});
			if (b && whole && b->state != binding_state::whole) {
				bind(*b, binding_state::whole);
				b->last = nullptr;
			}
			if (whole)
				b = make_named(part_name(key.rkey, key.addr));
		}
		/* To make these may have dropped it. */
		if (binding *const q = asked_about(key); q && q != b && q->state == binding_state::asked && !q->asks)
			bind(*q, binding_state::unknown);
		if (b && is_answer(error)) {
			/* Pinned, or nonsense: the HCA will say. */
			make_plain(*b, error, asked, tail);
		} else if (b) {
			bind(*b, binding_state::unknown);
		}
		if (!error && b) {
			region *r = find_region(info.region_id);
			if (!r)
				r = make_region(info);
			if (!r) {
				error = -ENOBUFS;
			} else if (!r->gone) {
				bind(*b, binding_state::bound, r);
				b->upto = tail;
				/* It is the peer's bound for the QP, which all of its regions tell. */
				config_.max_faults = std::min(config_.max_faults, info.max_outstanding);
				++stats_.resolves;
			}
		}
	}
	answer_waiting(key, error, error && awaited && (!b || b->state == binding_state::unknown));
	forget_dead();
}

/* Who waits for an answer, which @failed: for the key, or with -EFAULT for the address that was asked for. */
void engine::answer_waiting(const remote_key &key, int error, bool failed) noexcept
{
	const auto fails = [&](std::uint64_t addr) { return failed && (error != -EFAULT || addr == key.addr); };
	const auto why = [&] { return error == -ENOTCONN ? not_connected() : resolve_status(error); };

	if (next_ < tail_ && next_ < failing_ && !trouble_.dead) {
		const op &o = op_at(next_);
		if (is_remote(o.wr.opcode) && rkey_of(o.wr) == key.rkey && fails(addr_of(o.wr) + o.issued))
			fail_op(next_, why());
	}
	for (std::uint32_t i = rebinding_.first, after; i != none; i = after) {
		piece &p = pieces_[i];
		after = p.next;
		const op &o = op_at(p.op);
		const std::uint64_t addr = addr_of(o.wr) + p.offset;
		if (rkey_of(o.wr) != key.rkey)
			continue;
		binding *const b = make_binding(key.rkey, addr);
		if (fails(addr)) {
			fail_op(p.op, why());
			/* that took other pieces from the list too */
			after = rebinding_.first;
		} else if (!b) {
			continue;
		} else if (b->state == binding_state::unknown || b->state == binding_state::asked) {
			ask_resolve(*b, addr);
		} else if (b->state == binding_state::bound && serves(*b->to, p)) {
			take(p);
			reset_piece(p, *b->to);
			put(posting_, p);
		} else if (b->state == binding_state::plain) {
			if (is_plain(*b, p.op)) {
				take(p);
				go_plain(p);
				put(posting_, p);
			} else {
				ask_resolve(*b, addr);
			}
		} else if (answered_for(*b, p.op)) {
			fail_op(p.op, IBV_WC_REM_ACCESS_ERR);
			after = rebinding_.first;
		} else {
			ask_afresh(*b, addr);
		}
	}
}

void engine::on_resolved(const remote_key &key, int error, const rdma_np_region_info &info) noexcept
{
	nanoseconds asked = 0;
	std::uint64_t tail = 0;

	expand();
	if (binding *b = asked_about(key); b && b->asks) {
		/* Whose answer this is nobody knows: that of the first one is the safe assumption. */
		asked = b->asked;
		tail = b->tail;
		if (!--b->asks && b->renews) {
			b->renews = false;
			--renewals_;
		}
	}
	adopt(key, error, info, asked, tail);
}

/* No request waits for this answer: one that does asks for itself. */
int engine::resolve_ended(const remote_key &key, int error, const rdma_np_region_info &info, nanoseconds asked) noexcept
{
	expand();
	error = vet(key, error, info);
	if (!error || error == -EACCES) {
		adopt(key, error, info, asked, 0);
		return error;
	}
	/* A peer that was never heard need not be asked again for a key of which nothing was known. */
	if (error == -EHOSTUNREACH && !find_key(key.rkey))
		if (binding *b = make_named({key.rkey}))
			make_plain(*b, error, asked, 0);
	decline(info);
	--resolves_;
	forget_dead();
	return error;
}

} // namespace npr
