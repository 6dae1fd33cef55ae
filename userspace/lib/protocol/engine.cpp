/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "protocol/engine.hpp"
#include "protocol/requests.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace npr {

engine::engine(const engine_config &config, backend &world)
    : config_(config), world_(world), credits_(*config.pool), cache_(config.cache_slots)
{
	const std::uint32_t budget = config_.sq_budget;
	const std::size_t ops = std::bit_ceil(std::max<std::size_t>(config_.depth, 1));
	const std::size_t slots = std::bit_ceil(std::size_t{budget});
	const std::size_t pieces = std::clamp<std::size_t>(budget, 16, 1024);
	const std::size_t records = std::bit_ceil(pieces);

	config_.max_sge = std::max(config_.max_sge, 1U);
	config_.max_faults = std::max(config_.max_faults, 1U);
	config_.leases &= !config_.local_only;
	ops_.resize(ops);
	op_mask_ = ops - 1;
	op_sges_.resize(2 * ops * config_.max_sge);
	op_holds_.resize(ops * config_.max_sge);
	op_inline_.resize(ops * config_.max_inline);

	slots_.resize(slots);
	briefs_.resize(slots);
	sq_mask_ = slots - 1;
	local_keys_ = config_.local ? config_.local_keys : &no_local_keys_;
	hot_.wr.sg_list = &hot_.sge;
	hot_.wr.num_sge = 1;
	hot_.signals = config_.sq_sig_all ? unsigned{IBV_SEND_SIGNALED} : 0U;
	hot_.free = config_.local_only ? opcodes_of<trait::passing> : opcodes_of<trait::passing, trait::remote>;
	chain_.resize(std::min(budget, 16U));
	chain_sges_.resize(chain_.size() * config_.max_sge);
	chain_limit_ = static_cast<std::uint32_t>(chain_.size()) - 1;
	/* What drains a dead queue is a WRITE, which not every type of QP has. */
	signal_every_ = config_.local_only ? 1U : std::max(std::min(budget, config_.depth) / 4, 1U);
	first_id_ = std::uint64_t{config_.tag} << 32;
	hot_.next = no_id();
	quick_limit_ = config_.read_words_min ? config_.read_words_min - 1 : ~0U;
	max_entries_ = std::min(budget, credits_.largest());

	snap_.resize(config_.words.size());
	ring_.resize(records);
	ring_mask_ = records - 1;

	pieces_.resize(pieces);
}

engine::~engine()
{
	/* Nobody hears of them any more. */
	set_tail(0);
	credits_.give(under_way());
}

/* 0, and the bytes of local buffers; or what is wrong with the request by itself. */
int engine::check(const ibv_send_wr &wr, std::uint64_t &length) const noexcept
{
	length = 0;
	if (wr.num_sge < 0 || static_cast<std::uint32_t>(wr.num_sge) > config_.max_sge || !is_known(wr.opcode))
		return -EINVAL;
	/* What a window shows would have to stay where it is. */
	if (wr.opcode == IBV_WR_BIND_MW && wr.bind_mw.bind_info.mr && wr.bind_mw.bind_info.length &&
	    world_.is_local(wr.bind_mw.bind_info.mr->lkey))
		return -EOPNOTSUPP;
	for (int i = 0; i < wr.num_sge; ++i)
		length += wr.sg_list[i].length;
	if (length > max_length ||
	    (wr.send_flags & IBV_SEND_INLINE && (length > config_.max_inline || wr.opcode == IBV_WR_RDMA_READ)))
		return -EINVAL;
	return 0;
}

int engine::accept(const ibv_send_wr &wr) noexcept
{
	const bool inlined = wr.send_flags & IBV_SEND_INLINE;
	std::uint64_t length;

	expand();
	if (const int rc = check(wr, length))
		return rc;
	if (tail_ - head_ >= config_.depth) {
		drop_silent();
		if (tail_ - head_ >= config_.depth)
			return -ENOMEM;
	}

	op &o = op_at(tail_);
	ibv_sge *sges = sges_of(tail_);

	o.wr = wr;
	o.wr.next = nullptr;
	o.wr.sg_list = o.wire = sges;
	o.held = 0;
	o.length = is_atomic(wr.opcode) ? atomic_size : static_cast<std::uint32_t>(length);
	o.issued = o.pieces = o.slots = o.vendor_err = 0;
	o.status = trouble_.dead ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS;
	o.kind = op_kind::undecided;
	o.opaque = config_.opaque_sinks && wr.opcode == IBV_WR_RDMA_READ;
	o.started = o.finished = false;
	if (inlined && length) {
		/* The application may use its buffer again at once: this copy serves repeats. */
		std::byte *copy = &op_inline_[(tail_ & op_mask_) * config_.max_inline];
		sges[0] = {reinterpret_cast<std::uintptr_t>(copy), o.length, 0};
		o.wr.num_sge = 1;
		for (int i = 0; i < wr.num_sge; ++i) {
			std::memcpy(copy,
				    reinterpret_cast<const void *>(
					    static_cast<std::uintptr_t>(wr.sg_list[i].addr)),
				    wr.sg_list[i].length);
			copy += wr.sg_list[i].length;
		}
	} else {
		sges[0] = {}; /* as in push() */
		std::copy_n(wr.sg_list, wr.num_sge, sges);
		if (config_.local && length)
			if (const int rc = hold_buffers(tail_))
				return rc;
	}
	++tail_;
	++stats_.slow;
	if (trouble_.dead)
		next_ = tail_;
	return 0;
}

/* Local buffers of op @i that are in unpinned regions become held; and where does the CPU find them? */
int engine::hold_buffers(std::uint64_t i) noexcept
{
	op &o = op_at(i);
	ibv_sge *wire = sges_of(i) + config_.max_sge;
	const bool write = brings(o.wr.opcode);

	std::copy_n(o.wr.sg_list, o.wr.num_sge, wire);
	for (int k = 0; k < o.wr.num_sge; ++k) {
		cpu_view view;

		if (!wire[k].length || world_.is_plain(wire[k].lkey))
			continue;
		const int rc = world_.hold_local(wire[k], write, hold_of(o, i, o.held), view, ticket_);
		if (rc && rc != backend::no_hold) {
			free_buffers(o);
			return rc;
		}
		o.held += !rc;
		o.opaque |= view.opaque && o.wr.opcode == IBV_WR_RDMA_READ;
		o.wr.sg_list[k].addr += view.offset;
	}
	o.wire = wire;
	return 0;
}

void engine::free_buffers(op &o) noexcept
{
	const auto i = static_cast<std::uint64_t>(&o - ops_.data());

	while (o.held) {
		const std::uint32_t hold = hold_of(o, i, --o.held);

		if (hold != ticket_.token() || !ticket_.give())
			world_.free_local(hold);
	}
}

npr_stats engine::stats() const noexcept
{
	npr_stats all = stats_;
	const auto add = [&](unsigned opcode, std::uint64_t requests, std::uint64_t bytes) {
		if (opcode == IBV_WR_RDMA_READ) {
			all.reads += requests;
			all.bytes_read += bytes;
		} else if (all_traits[opcode] & trait::atomic) {
			all.atomics += requests;
		} else {
			all.writes += requests;
			all.bytes_written += bytes;
		}
	};

	for (unsigned n = 0; n < std::size(done_); ++n)
		add(n, done_[n].requests, done_[n].bytes);
	if (hot_.end.leased)
		add(hot_.end.opcode, hot_.requests, hot_.bytes);
	else
		all.passed += hot_.requests;
	return all;
}

bool engine::unfinished() const noexcept
{
	for (std::uint64_t i = head_; i < tail_; ++i)
		if (!op_at(i).finished)
			return true;
	return waits_for_wire();
}

void engine::abandon() noexcept
{
	expand();
	for (; head_ < tail_; ++head_)
		free_buffers(op_at(head_));
}

/* The next op, which is posted or in the chain: what is the same for all of them. */
engine::op &engine::begin(const ibv_send_wr &wr, op_kind kind, std::uint32_t length) noexcept
{
	op &o = op_at(tail_);

	o.wr.wr_id = wr.wr_id;
	o.wr.opcode = wr.opcode;
	o.wr.send_flags = wr.send_flags;
	o.held = 0;
	o.length = o.issued = length;
	o.vendor_err = 0;
	o.status = IBV_WC_SUCCESS;
	o.kind = kind;
	o.opaque = false;
	o.started = true;
	o.finished = false;
	return o;
}

/* Ops from @first on, just accepted and not begun, were never there. */
void engine::retract(std::uint64_t first) noexcept
{
	stats_.slow -= tail_ - first;
	while (tail_ > first)
		free_buffers(op_at(--tail_));
	next_ = std::min(next_, tail_);
}

/* Is any of its local buffers one for which hold_buffers() asks the kernel? */
bool engine::needs_hold(const ibv_send_wr &wr) const noexcept
{
	if (!config_.local || wr.send_flags & IBV_SEND_INLINE)
		return false;
	for (int k = 0; k < wr.num_sge; ++k)
		if (wr.sg_list[k].length && !world_.is_plain(wr.sg_list[k].lkey))
			return true;
	return false;
}

/* Is there nothing for which accept() would refuse one of the list? */
bool engine::takes_all(const ibv_send_wr *wr) const noexcept
{
	std::uint64_t n = tail_ - head_, length;

	for (; wr; wr = wr->next) {
		if (++n > config_.depth || check(*wr, length) || needs_hold(*wr))
			return false;
	}
	return true;
}

int engine::post_send(ibv_send_wr *wr, ibv_send_wr **bad, bool whole) noexcept
{
	const std::uint64_t first = tail_;
	/* What is begun is not taken back. */
	const bool at_once = !whole || !wr->next || takes_all(wr);
	int rc;

	for (;; wr = wr->next) {
		if (at_once && post_of_list(*wr, !wr->next)) {
			if (!wr->next)
				return 0;
			continue;
		}
		rc = accept(*wr);
		if (rc) {
			if (bad)
				*bad = wr;
			if (!at_once)
				retract(first);
			break;
		}
		if (!wr->next)
			break;
		/* If it waits for nothing the next one may be quick. */
		if (at_once && posting_.empty())
			issue();
	}
	step();
	return rc;
}

bool engine::has_right(const ibv_send_wr &wr, const region &r) noexcept
{
	const rdma_np_region_info &i = r.info;

	if (wr.opcode == IBV_WR_RDMA_READ)
		return i.read_key && i.access & IBV_ACCESS_REMOTE_READ;
	return i.write_key &&
	       i.access & (is_atomic(wr.opcode) ? IBV_ACCESS_REMOTE_ATOMIC : IBV_ACCESS_REMOTE_WRITE);
}

bool engine::allowed(const ibv_send_wr &wr, std::uint32_t length, const region &r) const noexcept
{
	return is_inside(addr_of(wr), length, r.info) && has_right(wr, r);
}

/* May what is left of @o begin in @r? If that is a part it need not end there. */
bool engine::may_go_on(const op &o, const region &r) const noexcept
{
	if (!r.info.part_shift)
		return allowed(o.wr, o.length, r);
	return is_inside(addr_of(o.wr) + o.issued, 1, r.info) && has_right(o.wr, r);
}

/* Can it take the place of the region of @p, which has died? A piece has the size that the first one served. */
bool engine::serves(const region &r, const piece &p) const noexcept
{
	const op &o = op_at(p.op);
	const std::uint64_t addr = addr_of(o.wr) + p.offset;

	if (r.info.part_shift ? !is_inside(addr, p.length, r.info) || !has_right(o.wr, r) : !allowed(o.wr, o.length, r))
		return false;
	return pages_of(addr, p.length) <= r.info.max_pages;
}

/* What is op @i, the next to be issued? False: not known yet, or it failed. */
bool engine::classify(std::uint64_t i) noexcept
{
	op &o = op_at(i);

	if (config_.local_only || !is_remote(o.wr.opcode)) {
		o.kind = op_kind::pass;
		return true;
	}
	/* Nothing is accessed, so no key is looked at. */
	if (!o.length) {
		o.kind = op_kind::pass;
		return true;
	}
	binding *b = make_binding(rkey_of(o.wr), addr_of(o.wr));
	if (!b) {
		fail_op(i, IBV_WC_GENERAL_ERR);
		return false;
	}
	switch (b->state) {
	case binding_state::plain:
		if (!is_plain(*b, i)) {
			ask_resolve(*b, addr_of(o.wr));
			return false;
		}
		o.kind = op_kind::pass;
		return true;
	case binding_state::bound:
		break;
	default:
		ask_resolve(*b, addr_of(o.wr));
		return false;
	}
	if (is_atomic(o.wr.opcode) && addr_of(o.wr) % atomic_size) {
		fail_op(i, IBV_WC_REM_INV_REQ_ERR);
		return false;
	}
	if (o.wr.opcode == IBV_WR_RDMA_READ)
		o.kind = op_kind::read;
	else
		o.kind = is_atomic(o.wr.opcode) || lands_once(o, *b->to) ? op_kind::once : op_kind::write;
	return true;
}

/* With ordered WRITEs one with immediate data is posted once, too, if one hold does for it. */
bool engine::lands_once(const op &o, const region &r) const noexcept
{
	return config_.ordered_writes && o.wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM &&
	       pages_of(addr_of(o.wr), o.length) <= r.info.max_pages;
}

bool engine::must_wait(const op &o) const noexcept
{
	if (state_.live_once || (state_.live_writes && (!config_.relaxed || !is_passive(o.wr.opcode) || o.kind == op_kind::pass)))
		return true;
	if (state_.holds_wanted && takes_receive(o.wr.opcode))
		return true;
	/* It has a hold, and consumes a receive: a READ that gets a hold, too, would be queued behind it. */
	if (state_.live_reads && o.kind == op_kind::once && takes_receive(o.wr.opcode))
		return true;
	/*
	 * What the HCA does not know to be under way it cannot fence. This does not need P1: all before
	 * it has completed, words included.
	 */
	return o.wr.send_flags & IBV_SEND_FENCE && (state_.live_reads || state_.live_writes);
}

void engine::issue() noexcept
{
	while (next_ < tail_ && next_ < failing_ && !trouble_.dead) {
		op &o = op_at(next_);

		if (!o.started) {
			if (o.kind == op_kind::undecided && !classify(next_))
				return;
			if (must_wait(o))
				return;
		}
		const region *r = nullptr;
		std::uint32_t lease = none;
		if (config_.leases && !o.started && o.kind != op_kind::pass &&
		    (!stalled() || (config_.ordered_writes && takes_receive(o.wr.opcode)))) {
			const binding *b = find_binding(rkey_of(o.wr), addr_of(o.wr));
			if (b && b->state == binding_state::bound) {
				r = b->to;
				lease = find_lease(o.wr, o.length, *r);
			}
		}
		if (o.kind == op_kind::pass || lease != none) {
			/* Until there is, the lease may be recalled. */
			if (!room(1))
				return;
			const bool signaled = config_.sq_sig_all || o.wr.send_flags & IBV_SEND_SIGNALED ||
					      unsignaled_ + 1 >= signal_every_ || !credits_.tail_may_grow();
			o.started = true;
			ibv_send_wr &w = push(next_, nullptr, signaled);
			const std::uint64_t id = w.wr_id;
			w = o.wr;
			w.next = &w + 1;
			w.sg_list = o.wire;
			w.wr_id = id;
			if (signaled)
				w.send_flags |= IBV_SEND_SIGNALED;
			if (takes_receive(w.opcode))
				stalls_ = sq_tail_;
			if (lease != none) {
				translate(w, r->info, leases_.rkey(lease), leases_.bytes(lease).write);
				o.kind = op_kind::leased;
				o.lease = lease;
				leases_.take(lease);
			}
			++next_;
			continue;
		}
		if (!o.started) {
			o.started = true;
			++live(o);
			if (r && needs_hold(o))
				want_lease(o.wr, o.length, *r, true);
		}
		while (o.issued < o.length) {
			if (!has_piece() || !posting_.empty() ||
			    (config_.ordered_writes && o.kind == op_kind::write && o.pieces) || !start_piece(o, next_))
				return;
			if (trouble_.dead || failing_ <= next_)
				return;
		}
		++next_;
	}
}

void engine::finish(op &o) noexcept
{
	o.finished = true;
	if (o.kind == op_kind::pass) {
		++stats_.passed;
		return;
	}
	if (o.kind != op_kind::leased)
		--live(o);
	count(o.wr.opcode, o.length);
}

/* The number of those under way whose order is kept as that of @o. */
std::uint32_t &engine::live(const op &o) noexcept
{
	if (o.kind == op_kind::read)
		return state_.live_reads;
	return o.wr.opcode == IBV_WR_RDMA_WRITE ? state_.live_writes : state_.live_once;
}

/* Ops at the head that succeed without a completion. */
void engine::drop_silent() noexcept
{
	if (config_.sq_sig_all || trouble_.error_told)
		return;
	while (head_ < tail_) {
		op &o = op_at(head_);
		if (o.status != IBV_WC_SUCCESS || !o.finished || o.wr.send_flags & IBV_SEND_SIGNALED)
			return;
		free_buffers(o);
		++head_;
	}
}

bool engine::poll(ibv_wc &wc) noexcept
{
	expand();
	while (head_ < tail_ && complete(head_)) {
		op &o = op_at(head_++);
		ibv_wc_status status = o.status;

		if (o.held)
			free_buffers(o);

		/*
		 * What has failed says so, once, and after it there is nothing but flushes: RC
		 * would not have begun it. Before it only what could not be proven any more is
		 * flushed. But the first request that an unreachable peer has not done is the one
		 * whose retries were in vain, whichever of those under way the HCA had.
		 */
		if (cause_told_ || (trouble_.error_told && status == IBV_WC_SUCCESS))
			status = IBV_WC_WR_FLUSH_ERR;
		else if (status == IBV_WC_WR_FLUSH_ERR && lost_)
			status = IBV_WC_RETRY_EXC_ERR;
		if (status == IBV_WC_SUCCESS && !tells(o))
			continue;
		if (!config_.local_only) {
			trouble_.error_told |= status != IBV_WC_SUCCESS;
			cause_told_ |= status != IBV_WC_SUCCESS && status != IBV_WC_WR_FLUSH_ERR;
		}
		fill(wc, o, status);
		return true;
	}
	return false;
}

/* The application's completion of @o. */
void engine::fill(ibv_wc &wc, const op &o, ibv_wc_status status) const noexcept
{
	wc = {};
	wc.wr_id = o.wr.wr_id;
	wc.status = status;
	wc.opcode = completion_opcodes[o.wr.opcode];
	wc.vendor_err = o.vendor_err;
	wc.byte_len = brings(o.wr.opcode) ? o.length : 0;
	/* Only a receiver has a use for it, but providers say it here, too. */
	if (opcodes(IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM).has(o.wr.opcode))
		wc.wc_flags = IBV_WC_WITH_IMM;
	wc.qp_num = config_.qp_num;
}

/* The connection is said not to stand: on our side, or only on the peer's, which then does not answer? */
ibv_wc_status engine::not_connected() noexcept
{
	return world_.connected() ? IBV_WC_RETRY_EXC_ERR : IBV_WC_WR_FLUSH_ERR;
}

/* Op @i cannot succeed. The QP ends when all before it are done. */
void engine::fail_op(std::uint64_t i, ibv_wc_status status) noexcept
{
	op &o = op_at(i);

	if (trouble_.dead)
		return;
	if (o.status == IBV_WC_SUCCESS)
		o.status = status;
	failing_ = std::min(failing_, i);
	trouble_.failing = true;
	for (piece &p : std::span(pieces_.data(), made_))
		if (is_live(p) && p.op == i)
			drop_piece(p);
}

void engine::settle_failure() noexcept
{
	if (trouble_.dead || failing_ == no_op || op_at(failing_).slots)
		return;
	for (std::uint64_t i = head_; i < failing_; ++i) {
		const op &o = op_at(i);
		/* Of an unsignaled request that the HCA did nobody may ever hear. */
		const bool signaled = config_.sq_sig_all || o.wr.send_flags & IBV_SEND_SIGNALED;
		if (!o.finished && (!as_it_is(o) || signaled))
			return;
	}
	/*
	 * What the peer's HCA has not refused yet it has to refuse, so that its QP ends as well. Not if
	 * something later was begun, behind which this could wait for ever (for a receive).
	 */
	const ibv_wc_status status = op_at(failing_).status;
	std::uint64_t end = sq_tail_;
	while (end != sq_head_ && slots_[(end - 1) & sq_mask_].op == no_op)
		--end;
	const bool last = end == sq_head_ || slots_[(end - 1) & sq_mask_].op <= failing_;
	if ((status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR) && last && !trouble_.broken &&
	    !refused_) {
		if (!room(1))
			return;
		refused_ = true;
		push_refused(failing_);
		flush();
		if (!trouble_.broken)
			return;
	}
	world_.fail_qp();
	die();
}

/* The QP is in the error state. What it has posted comes back flushed. */
void engine::die() noexcept
{
	if (trouble_.dead)
		return;
	trouble_.dead = true;
	for (piece &p : std::span(pieces_.data(), made_))
		if (is_live(p))
			drop_piece(p);
	for (std::uint64_t i = head_; i < tail_; ++i) {
		op &o = op_at(i);
		/* What the HCA has, it tells; or it is done, unsignaled, and nothing is to tell. */
		if (!o.finished && o.status == IBV_WC_SUCCESS && !(as_it_is(o) && o.slots))
			o.status = IBV_WC_WR_FLUSH_ERR;
	}
	next_ = tail_;
	leases_.for_each_live([this](std::uint32_t n) { end_lease(n); });
}

/*
 * An error stops the send queue of a UC or UD QP, until the application lets it go on: what
 * comes then is the HCA's to judge. What it had no room for was posted before that.
 */
void engine::flush_rest() noexcept
{
	for (; next_ < tail_; ++next_)
		op_at(next_).status = IBV_WC_WR_FLUSH_ERR;
}

std::optional<nanoseconds> engine::deadline() const noexcept
{
	std::optional<nanoseconds> first;

	for (std::uint32_t i = pausing_.first; i != none; i = pieces_[i].next)
		if (!first || pieces_[i].wake < *first)
			first = pieces_[i].wake;
	return first;
}

void engine::step() noexcept
{
	expand();
	wanted_ = 0;
	if (calm())
		return drop_silent();
	if (!trouble_.dead && !pausing_.empty()) {
		const nanoseconds now = world_.now();
		for (std::uint32_t i = pausing_.first, after; i != none && !trouble_.dead; i = after) {
			piece &p = pieces_[i];
			after = p.next;
			if (p.wake > now)
				continue;
			take(p);
			send_fault(p);
			if (failing_ != no_op)
				after = pausing_.first == i ? none : pausing_.first;
		}
	}
	while (!trouble_.dead && !asking_.empty() && faults_ < config_.max_faults) {
		piece &p = pieces_[asking_.first];
		take(p);
		send_fault(p);
	}
	if (!state_.holds_wanted && !tails_.empty()) {
		piece &p = pieces_[tails_.first];
		take(p);
		put(posting_, p);
	}
	while (!trouble_.dead && !posting_.empty()) {
		piece &p = pieces_[posting_.first];
		take(p);
		if (!try_post(p)) {
			put_first(posting_, p);
			break;
		}
	}
	if (!trouble_.dead && posting_.empty())
		issue();
	/* With the next signaled one all would be said as well. */
	if (trouble_.drains && (trouble_.dead || !unsignaled_ || room(1))) {
		trouble_.drains = false;
		if (!trouble_.dead && unsignaled_)
			push_drain();
	}
	flush();
	if (trouble_.broken && !trouble_.dead) {
		world_.fail_qp();
		die();
	}
	settle_failure();
	if (trouble_.dead && unsignaled_ && room(1)) {
		push_drain();
		flush();
	}
	drop_silent();
}

} // namespace npr
