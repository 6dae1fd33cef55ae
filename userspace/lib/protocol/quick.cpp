/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What is posted as it is, and needs nothing to be thought of but its lease: the quick path, and the hot one. */
#include "protocol/engine.hpp"
#include "protocol/requests.hpp"

#include <algorithm>

namespace npr {

/*
 * A READ, or a WRITE to pages that are known to be writable, in one piece and with nothing else to think of. Of
 * the piece only what every end of it needs is filled in; unpack() does the rest if it turns out that one try was
 * not enough.
 */
template <bool write>
bool engine::quick_move(const ibv_send_wr &wr, region &r, bool last) noexcept
{
	if (wr.num_sge != 1 || wr.send_flags & ~unsigned{IBV_SEND_SIGNALED} ||
	    (config_.local && !world_.is_plain(wr.sg_list[0].lkey)) || !has_piece())
		return false;

	const rdma_np_region_info &info = r.info;
	const std::uint64_t addr = wr.wr.rdma.remote_addr;
	const ibv_sge s = wr.sg_list[0];
	const std::uint32_t length = s.length;
	/* The words of a WRITE go with it, or when it has completed. */
	const bool chained = write && r.in_order();
	const std::uint64_t head = write ? 0 : split(addr, length);
	const std::uint32_t entries = chained || head ? 2 : 1;

	if (!has_room(entries) || !length || addr < info.base || length > info.length ||
	    addr - info.base > info.length - length)
		return false;

	piece &p = pieces_[free_.first];
	ibv_send_wr *const w = &chain_[state_.chained];
	ibv_send_wr &second = w[entries - 1];
	if constexpr (write) {
		if (config_.ordered_writes)
			return false;
		const std::uint64_t page = (addr >> page_shift) - (info.base >> page_shift);
		const std::uint32_t pages = pages_of(addr, length);

		if (pages > std::min(quick_pages, info.max_pages) || page % slot_words + pages > slot_words || !info.write_key ||
		    !(info.access & IBV_ACCESS_REMOTE_WRITE))
			return false;
		const std::uint64_t *known = cache_.peek(r.uid, page);
		if (!known)
			return false;
		for (std::uint32_t k = 0; k < pages; ++k)
			if (known[k] == unknown_word || !(known[k] & word_writable))
				return false;
		if (!take_ring(p, page, pages))
			return false;
		std::copy_n(known, pages, &snap_[p.ring_offset]);

		w->wr.rdma.rkey = info.write_key;
		w->wr.rdma.remote_addr = addr - info.base + info.write_addr;
		if (chained) {
			second.sg_list = &chain_sges_[(state_.chained + 1) * config_.max_sge];
			second.sg_list[0] = {reinterpret_cast<std::uintptr_t>(&config_.words[p.ring_offset]),
					     static_cast<std::uint32_t>(pages * sizeof(std::uint64_t)), config_.words_lkey};
			second.wr.rdma.rkey = info.table_key;
			second.wr.rdma.remote_addr = info.table_addr + page * sizeof(std::uint64_t);
		}
		w->sg_list = wr.sg_list;
	} else {
		/* in one piece for sure: no need to count its pages */
		if (length > (info.max_pages - 1) * page_size || length - 1 >= quick_limit_ ||
		    !info.read_key || !(info.access & IBV_ACCESS_REMOTE_READ) || config_.opaque_sinks)
			return false;
		p.ring = none;
		w->wr.rdma.rkey = info.read_key;
		w->wr.rdma.remote_addr = addr - info.base + info.read_addr;
		w->sg_list = wr.sg_list;
		if (head) {
			w->sg_list = &chain_sges_[state_.chained * config_.max_sge];
			w->sg_list[0] = {s.addr, static_cast<std::uint32_t>(head), s.lkey};
			second.sg_list = &chain_sges_[(state_.chained + 1) * config_.max_sge];
			second.sg_list[0] = {s.addr + head, static_cast<std::uint32_t>(length - head), s.lkey};
			second.wr.rdma.rkey = info.read_key;
			second.wr.rdma.remote_addr = w->wr.rdma.remote_addr + head;
		}
	}
	expand();
	w->wr_id = sq_id(sq_tail_);
	w->num_sge = 1;
	w->opcode = wr.opcode;
	w->send_flags = 0;
	w->next = w + 1;
	if (entries == 2) {
		second.wr_id = sq_id(sq_tail_ + 1);
		second.num_sge = 1;
		second.opcode = IBV_WR_RDMA_READ;
		second.next = &second + 1;
	}
	second.send_flags = IBV_SEND_SIGNALED;
	state_.chained += entries;

	const std::uint32_t lost = last ? send_chain() : 0;

	op &o = begin(wr, write ? op_kind::write : op_kind::read, length);
	o.wr.sg_list = o.wire = sges_of(tail_);
	o.wr.sg_list[0] = s;
	o.wr.num_sge = 1;
	o.wr.wr.rdma = wr.wr.rdma;
	o.pieces = 1;
	o.slots = entries;
	++(write ? state_.live_writes : state_.live_reads);
	stats_.word_reads += chained;

	take(p);
	p.op = tail_;
	p.reg = &r;
	++r.refs;
	p.offset = 0;
	p.length = length;
	p.slots = entries;
	p.at = !write ? stage::quick_read : chained ? stage::quick_words : stage::quick_write;
	p.rebinds = 0;

	slots_[sq_tail_ & sq_mask_] = {tail_, index(p)};
	if (entries == 2)
		slots_[(sq_tail_ + 1) & sq_mask_] = {tail_, index(p)};
	first_brief_ = sq_tail_ += entries;
	credits_.take(entries);
	if (unsignaled_)
		set_tail(0);
	next_ = ++tail_;
	if (lost) [[unlikely]] {
		not_posted(lost);
		step();
	}
	return true;
}

/*
 * The local buffers of @w, the next entry of the chain and request of the next op, become held, so many as @held
 * says; @hold is the first. False: none is, and why accept() will find out. Where the CPU finds them is of no use
 * here: the HCA alone looks at what is posted as it is.
 */
bool engine::hold_all(ibv_send_wr &w, std::uint32_t &held, std::uint32_t &hold) noexcept
{
	const bool write = brings(w.opcode);
	forget_last(); /* as what is under the ticket it remembers */
	ibv_sge *const wire = &chain_sges_[state_.chained * config_.max_sge];
	op &o = op_at(tail_);

	o.held = 0;
	for (int k = 0; k < w.num_sge; ++k) {
		cpu_view view;

		wire[k] = w.sg_list[k];
		if (!wire[k].length)
			continue;
		const int rc = world_.hold_local(wire[k], write, hold_of(o, tail_, o.held), view, ticket_);
		if (rc && rc != backend::no_hold) {
			free_buffers(o);
			return false;
		}
		o.held += !rc;
	}
	w.sg_list = wire;
	held = o.held;
	hold = o.hold;
	return true;
}

/* The hint of @b becomes that of a lease under which @wr may be posted. False: there is none. */
bool engine::look_for_lease(const ibv_send_wr &wr, std::uint32_t length, binding &b) const noexcept
{
	const rdma_np_region_info &i = b.to->info;
	const auto need = lease_range(wr, length, *b.to);
	const std::uint32_t n = need ? leases_.find(*need) : none;

	if (n == none)
		return false;
	const remote_leases::range has = leases_.bytes(n);
	lease_hint &h = b.hint;
	h.first = addr_of(wr) - need->first + has.first;
	h.length = has.end - has.first;
	h.delta = (has.write ? i.write_addr : i.read_addr) - i.base;
	h.version = leases_.version();
	h.lease = n;
	h.rkey = leases_.rkey(n);
	h.may = opcodes();
	if (i.access & IBV_ACCESS_REMOTE_READ && i.read_key)
		h.may.add(opcodes(IBV_WR_RDMA_READ));
	if (has.write && i.access & IBV_ACCESS_REMOTE_WRITE && i.write_key)
		h.may.add(opcodes(IBV_WR_RDMA_WRITE));
	if (has.write && i.access & IBV_ACCESS_REMOTE_ATOMIC && i.write_key)
		h.may.add(opcodes_of<trait::atomic>);
	return true;
}

/*
 * A request that is posted as it is, with its local buffers where they are and, if it has a key, with one that
 * is known (@b) to be pinned memory's; or @leased: one of a region, to memory that is leased to this QP.
 *
 * The caller's request gets neither our wr_id nor our flags, not for a moment: threads may share one, and it may
 * be in memory that cannot be written to. So it is copied, once, but for what only windows need.
 */
template <bool leased, engine::place at>
[[gnu::always_inline]] inline bool engine::quick_pass(const ibv_send_wr &wr, unsigned traits, binding *b) noexcept
{
	/* Those flags that change nothing here. */
	constexpr unsigned no_matter = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;
	const std::uint64_t tail = tail_, sq_tail = sq_tail_;
	const std::uint32_t chained = at == place::alone ? 0 : state_.chained;
	const ibv_sge *one = nullptr; /* the only buffer */
	bool looks = config_.local;
	std::uint64_t length;

	if (wr.num_sge == 1 && !(wr.send_flags & ~no_matter) && wr.sg_list[0].length <= max_length) [[likely]] {
		one = wr.sg_list;
		length = one->length;
	} else {
		if (check(wr, length) || static_cast<std::uint32_t>(wr.num_sge) > max_held)
			return false;
		looks &= !(wr.send_flags & IBV_SEND_INLINE);
	}
	looks &= length != 0;
	if (traits & trait::atomic)
		length = atomic_size;
	if (!(traits & trait::passing) || !has_room(1))
		return false;
	if constexpr (leased) {
		const lease_hint &h = b->hint;
		const std::uint64_t start = addr_of(wr) - h.first;

		if (h.version != leases_.version() || start >= h.length || length - 1 >= h.length - start ||
		    !h.may.has(wr.opcode) || (traits & trait::atomic && addr_of(wr) % atomic_size)) [[unlikely]]
			if (!look_for_lease(wr, static_cast<std::uint32_t>(length), *b))
				return false;
	} else if (traits & trait::remote && !config_.local_only && length && (!b || !stays_plain(*b))) {
		return false;
	}

	ibv_send_wr &w = chain_[chained];
	/* All but what windows need. */
	w.sg_list = wr.sg_list;
	w.num_sge = wr.num_sge;
	w.opcode = wr.opcode;
	w.send_flags = wr.send_flags;
	w.imm_data = wr.imm_data;
	w.wr = wr.wr;
	w.qp_type = wr.qp_type;
	/* From here on it is posted, or else its buffers are free again. */
	std::uint32_t held = 0, hold = 0;
	if (looks) {
		if (one && ticket_.covers(*one, traits & trait::bringing) && take_ticket()) [[likely]] {
			w.sg_list = &chain_sges_[chained * config_.max_sge];
			*w.sg_list = ticket_.wire(*one);
			hold = ticket_.token();
			held = 1;
		} else if (!(one && !world_.is_local(one->lkey)) && !hold_all(w, held, hold)) {
			return false;
		}
	}
	w.wr_id = sq_id(sq_tail);
	w.next = at == place::alone ? nullptr : &w + 1;
	w.send_flags = signal(wr.send_flags | hot_.signals);
	if constexpr (leased) {
		(traits & trait::atomic ? w.wr.atomic.rkey : w.wr.rdma.rkey) = b->hint.rkey;
		w.wr.rdma.remote_addr += b->hint.delta; /* an atomic's, too: see addr_of() */
	}

	std::uint32_t lost = 0;
	if constexpr (at == place::alone) {
		ibv_send_wr *bad;

		lost = world_.post(&w, &bad) != 0;
	} else {
		state_.chained = chained + 1;
		if (at == place::last)
			lost = send_chain();
	}

	forget_last();
	briefs_[sq_tail & sq_mask_] = {wr.wr_id,
				       {static_cast<std::uint8_t>(wr.opcode), static_cast<std::uint8_t>(wr.send_flags), leased,
					static_cast<std::uint8_t>(held), hold},
				       static_cast<std::uint32_t>(length),
				       leased ? b->hint.lease : none};
	if constexpr (leased)
		leases_.use(b->hint.lease);
	sq_tail_ = sq_tail + 1;
	credits_.take(1);
	if (traits & trait::receive_taking)
		stalls_ = sq_tail + 1;
	next_ = tail_ = tail + 1;
	if (lost) [[unlikely]] {
		not_posted(lost);
		step();
	} else if constexpr (at == place::alone) {
		open_hot(traits & trait::remote ? b : nullptr);
	}
	return true;
}

/* What needs no detour, as its opcode and key have it. Nothing is under way that it would have to wait for. */
template <engine::place at>
[[gnu::always_inline]] inline bool engine::route_quick(const ibv_send_wr &wr) noexcept
{
	const unsigned traits = traits_of(wr.opcode);

	/* What is not proven nothing overtakes but READs and WRITEs of regions. */
	const bool passes = at == place::alone || !state_.live_writes;

	if (config_.local_only || !(traits & trait::remote))
		return passes && quick_pass<false, at>(wr, traits, nullptr);

	binding *b = find_binding(traits & trait::atomic ? wr.wr.atomic.rkey : wr.wr.rdma.rkey, addr_of(wr));
	if (!b || b->state != binding_state::bound)
		return passes && quick_pass<false, at>(wr, traits, b);
	if (!leases_.empty() && !stalled() && quick_pass<true, at>(wr, traits, b))
		return true;
	/* Its region is not gone, and no more happens to it here than that its QP ends. */
	return move_quick(wr, *b, at != place::inside);
}

/*
 * The hot path opens, or stays open, behind a request that was posted as it is; @b: under the lease that its hint
 * is of, or with a key that is plain.
 */
void engine::open_hot(const binding *b) noexcept
{
	if (next_ != tail_ || trouble_.any() || !state_.quiet() || tail_ - head_ != under_way())
		return;
	hot_.most = std::min(config_.depth, config_.sq_budget);
	follow();
	if (!b)
		return;
	hot_.rkey = b->rkey;
	if (b->state == binding_state::plain) {
		hot_.lease = {};
		hot_.plain_until = b->until == ~0ULL ? b->until : b->until - std::min(b->until, plain_time / 2);
	} else {
		hot_.lease = b->hint;
		hot_.plain_until = 0;
	}
}

/* Those that come are compared with this one then. */
ibv_send_wr *engine::post_other(const ibv_send_wr &wr) noexcept
{
	constexpr unsigned no_matter = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;
	const std::uint64_t sq_tail = sq_tail_;

	if (under_way() >= hot_.most || under_way() >= credits_.free() || hot_.owed || wr.num_sge != 1 ||
	    wr.send_flags & ~no_matter)
		return nullptr;
	const ibv_sge &s = wr.sg_list[0];
	const ibv_wr_opcode opcode = wr.opcode;
	const std::uint32_t bytes = s.length;
	std::uint32_t length = bytes;
	bool leased = false, plain = false;
	ibv_send_wr &w = hot_.wr;

	/* What has none, or too many, is for check() to judge. */
	if (bytes - 1 >= max_length)
		return nullptr;
	forget_last();
	w.wr = wr.wr;
	if (hot_.lease.may.has(opcode)) {
		const lease_hint &h = hot_.lease;
		const std::uint64_t start = addr_of(wr) - h.first;
		std::uint32_t rkey = wr.wr.rdma.rkey;

		w.wr.rdma.remote_addr = addr_of(wr) + h.delta;
		if (is_atomic(opcode)) {
			rkey = wr.wr.atomic.rkey;
			w.wr.atomic.rkey = h.rkey;
			length = atomic_size;
			if (addr_of(wr) % atomic_size)
				return nullptr;
		} else {
			w.wr.rdma.rkey = h.rkey;
		}
		if (rkey != hot_.rkey || start >= h.length || length > h.length - start || stalled())
			return nullptr;
		leased = true;
	} else if (!hot_.free.has(opcode)) {
		if (!opcodes_of<trait::remote, trait::receive_taking>.has(opcode) || !is_hot_plain(wr))
			return nullptr;
		plain = true;
		if (is_atomic(opcode))
			length = atomic_size;
	}

	ending end{static_cast<std::uint8_t>(opcode), static_cast<std::uint8_t>(wr.send_flags), leased, 0, 0};
	if (ticket_.covers(s, brings(opcode))) {
		if (!ticket_.take()) {
			hot_.owed = true;
			return nullptr;
		}
		hot_.sge = ticket_.wire(s);
		end.hold = ticket_.token();
		end.held = 1;
	} else {
		if (config_.local && world_.is_local(s.lkey))
			return nullptr;
		hot_.sge = s;
	}
	w.wr_id = sq_id(sq_tail);
	w.opcode = opcode;
	w.send_flags = signal(wr.send_flags | hot_.signals);
	w.imm_data = wr.imm_data;
	w.qp_type = wr.qp_type;
	briefs_[sq_tail & sq_mask_] = {wr.wr_id, end, length, leased ? hot_.lease.lease : none};
	if (takes_receive(opcode))
		stalls_ = sq_tail + 1;
	credits_.take(1);
	sq_tail_ = sq_tail + 1;
	++next_;
	++tail_;
	aim(wr, end, length, plain);
	return &w;
}

/* @wr, of which post_other() has found out all that there is to know, is the last one. */
void engine::aim(const ibv_send_wr &wr, const ending &end, std::uint32_t length, bool plain) noexcept
{
	const ibv_sge &s = wr.sg_list[0];

	if (!end.held && !local_keys_)
		return;
	hot_.held = end.held;
	if (end.held) {
		hot_.first = ticket_.first();
		hot_.span = ticket_.length() - s.length;
		hot_.delta = ticket_.wire(s).addr - s.addr;
	} else {
		hot_.first = hot_.delta = 0;
		hot_.span = ~std::uint64_t{0};
		/* acquire: what the key was is asked behind this, by the next one that is compared with another value */
		hot_.keys = local_keys_->load(std::memory_order_acquire);
		if (config_.local && world_.is_local(s.lkey))
			return;
	}
	hot_.goes = plain ? way::plain : !end.leased ? way::passed : is_atomic(wr.opcode) ? way::leased_atomic : way::leased;
	hot_.remote_span = hot_.lease.length - length;
	hot_.silent = !tells(wr.send_flags);
	hot_.send_flags = wr.send_flags;
	hot_.lkey = s.lkey;
	hot_.longest = s.length;
	hot_.end = end;
	hot_.kind = kind_of(wr);
}

/* What comes is like nothing that was. */
void engine::forget_last() noexcept
{
	if (hot_.end.leased) {
		done_[hot_.end.opcode].requests += hot_.requests;
		done_[hot_.end.opcode].bytes += hot_.bytes;
	} else {
		stats_.passed += hot_.requests;
	}
	hot_.requests = hot_.bytes = 0;
	hot_.kind = no_kind;
	hot_.longest = 0;
	hot_.end = no_ending;
}

void engine::expand_all() noexcept
{
	std::uint64_t i = std::max(first_brief_, sq_head_);
	std::uint64_t n = tail_ - briefs();

	for (; i != sq_tail_; ++i, ++n) {
		const brief &b = briefs_[i & sq_mask_];
		op &o = op_at(n);

		o.wr.wr_id = b.wr_id;
		o.wr.opcode = static_cast<ibv_wr_opcode>(b.end.opcode);
		o.wr.send_flags = b.end.send_flags;
		o.held = b.end.held;
		o.hold = b.end.hold;
		o.length = b.length;
		o.lease = b.lease;
		o.vendor_err = 0;
		o.status = IBV_WC_SUCCESS;
		o.slots = 1;
		o.kind = b.end.leased ? op_kind::leased : op_kind::pass;
		o.opaque = false;
		o.started = true;
		o.finished = false;
		if (b.end.leased)
			leases_.take(b.lease);
		slots_[i & sq_mask_] = {n, none};
	}
	first_brief_ = sq_tail_;
	forget_last();
	hot_.lease = {};
	hot_.plain_until = 0;
	hot_.most = 0;
	follow();
}

/* That of the oldest entry, which is the oldest request's, has succeeded, and it is brief. */
engine::quick_end engine::end_brief(ibv_wc &wc) noexcept
{
	const brief &b = briefs_[sq_head_ & sq_mask_];

	/* Mostly there is one hold, under the lease of the ticket. */
	if (b.end.held && (b.end.held != 1 || b.end.hold != ticket_.token() || !ticket_.give())) [[unlikely]]
		free_buffers(b);
	if (b.end.leased)
		count(static_cast<ibv_wr_opcode>(b.end.opcode), b.length);
	else
		++stats_.passed;
	credits_.give(1);
	++sq_head_;
	++head_;
	follow();
	if (!tells(b.end.send_flags))
		return quick_end::silent;
	wc.wr_id = b.wr_id;
	return quick_end::told;
}

/* The buffers of the oldest request, which is brief. */
void engine::free_buffers(const brief &b) noexcept
{
	op &o = op_at(head_);

	o.held = b.end.held;
	o.hold = b.end.hold;
	free_buffers(o);
}

void engine::hot_refused() noexcept
{
	not_posted(1);
	step();
}

/*
 * What needs no detour, of a QP of which nothing waits, is posted as it comes. What the HCA has to know comes
 * first: the rest is written while it works.
 */
bool engine::post_quick(const ibv_send_wr &wr) noexcept
{
	if (hot_.owed) {
		hot_.owed = false;
		world_.free_local(ticket_.token());
	}
	if (next_ != tail_ || trouble_.any() || tail_ - head_ >= config_.depth)
		return false;
	if (!state_.quiet()) [[unlikely]]
		return calm() && post_disturbed(wr, true);
	return route_quick<place::alone>(wr);
}

/* The same of the @last one of a list, and with it, in one call, of what is in the chain; one before it goes into the chain. */
bool engine::post_of_list(const ibv_send_wr &wr, bool last) noexcept
{
	if (state_.chained >= chain_limit_)
		flush();
	if (next_ != tail_ || trouble_.any() || state_.waits || tail_ - head_ >= config_.depth)
		return false;
	return post_disturbed(wr, last);
}

/* Something is under way, which @wr may have to wait for. */
bool engine::post_disturbed(const ibv_send_wr &wr, bool last) noexcept
{
	/* A READ or WRITE that waits for no proof need not wait for what is proven. */
	const bool passive = is_passive(wr.opcode) && !(wr.send_flags & IBV_SEND_FENCE);

	if (state_.live_once || (state_.live_writes && !(config_.relaxed && passive)) ||
	    (state_.holds_wanted && takes_receive(wr.opcode)) || (wr.send_flags & IBV_SEND_FENCE && state_.live_reads))
		return false;
	return last ? route_quick<place::last>(wr) : route_quick<place::inside>(wr);
}

bool engine::move_quick(const ibv_send_wr &wr, binding &b, bool last) noexcept
{
	region &r = *b.to;

	return wr.opcode == IBV_WR_RDMA_READ	 ? quick_move<false>(wr, r, last)
	       : wr.opcode == IBV_WR_RDMA_WRITE && quick_move<true>(wr, r, last);
}

/* A quick piece needs more than one try. */
void engine::unpack(piece &p) noexcept
{
	region &r = *p.reg;

	--r.refs;
	reset_piece(p, r);
}

engine::quick_end engine::quick_cqe(ibv_wc &wc) noexcept
{
	const std::uint64_t i = wc.wr_id - first_id_;

	/* Of a receive that has succeeded the caller knows. */
	if (i - sq_head_ >= under_way() || wc.status != IBV_WC_SUCCESS || !calm())
		return quick_end::no;
	/* It is that of entry @i, and the end of unsignaled ones before it. */
	while (sq_head_ != i) {
		/* One that is to be told has no completion: poll() tells it. */
		const bool told = sq_head_ < first_brief_ ? tells(op_at(head_)) : tells(briefs_[sq_head_ & sq_mask_].end.send_flags);

		if (told || end_quick(wc) == quick_end::no)
			return quick_end::no;
	}
	return end_quick(wc);
}

/* That of the oldest entry has succeeded. */
engine::quick_end engine::end_quick(ibv_wc &wc) noexcept
{
	if (sq_head_ >= first_brief_)
		return tail_ - head_ == briefs() ? end_brief(wc) : quick_end::no;

	const slot &s = slots_[sq_head_ & sq_mask_];
	op &o = op_at(head_);

	if (s.op != head_ || s.piece != none || o.status != IBV_WC_SUCCESS || !as_it_is(o))
		return quick_end::no;
	o.slots = 0;
	if (o.kind == op_kind::leased && leases_.give(o.lease))
		lease_ended(o.lease);
	finish(o);
	free_buffers(o);
	credits_.give(1);
	++sq_head_;
	++head_;
	follow();
	if (!tells(o))
		return quick_end::silent;
	wc.wr_id = o.wr.wr_id;
	return quick_end::told;
}

} // namespace npr
