/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The send queue: entries, chains of work requests for the provider, completions, and the ring of words. */
#include "protocol/engine.hpp"
#include "protocol/requests.hpp"

#include <algorithm>
#include <utility>

namespace npr {

ibv_send_wr &engine::push(std::uint64_t i, piece *p, bool signaled) noexcept
{
	if (state_.chained == chain_.size())
		flush();

	/* The rest is zero, or of a request that was passed on, and nothing to a READ or WRITE. */
	ibv_send_wr &w = chain_[state_.chained];
	w.next = &w + 1;
	w.num_sge = 0;
	w.wr_id = sq_id(sq_tail_);
	/* Some providers look at the first entry of a list that has none, too. */
	w.sg_list = &chain_sges_[state_.chained * config_.max_sge];
	w.sg_list[0] = {};
	w.send_flags = signaled ? IBV_SEND_SIGNALED : 0;
	slots_[sq_tail_ & sq_mask_] = {i, p ? index(*p) : none};
	first_brief_ = ++sq_tail_;
	++state_.chained;
	credits_.take(1);
	set_tail(signaled || config_.sq_sig_all ? 0 : unsignaled_ + 1);
	if (i != no_op)
		++op_at(i).slots;
	if (p)
		++p->slots;
	return w;
}

/* @length bytes of the op from @start on. */
void engine::push_data(piece &p, std::uint64_t start, std::uint64_t length, bool signaled) noexcept
{
	const op &o = op_at(p.op);
	const bool read = o.kind == op_kind::read;
	ibv_send_wr &w = push(p.op, &p, signaled);

	w.opcode = read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
	w.send_flags |= o.wr.send_flags & (IBV_SEND_FENCE | IBV_SEND_INLINE);
	w.wr.rdma.rkey = rkey_of(o.wr);
	w.wr.rdma.remote_addr = addr_of(o.wr) + start;
	if (p.reg) {
		const rdma_np_region_info &i = p.reg->info;
		w.wr.rdma.rkey = read ? i.read_key : i.write_key;
		w.wr.rdma.remote_addr += (read ? i.read_addr : i.write_addr) - i.base;
	}
	for (int k = 0; length; ++k) {
		const ibv_sge &s = o.wire[k];
		if (start >= s.length) {
			start -= s.length;
			continue;
		}
		const auto n = static_cast<std::uint32_t>(std::min<std::uint64_t>(s.length - start, length));
		w.sg_list[w.num_sge++] = {s.addr + start, n, s.lkey};
		length -= n;
		start = 0;
	}
}

/* The op as the application posted it, but for the key. */
void engine::push_once(piece &p, bool signaled) noexcept
{
	const op &o = op_at(p.op);
	ibv_send_wr &w = push(p.op, &p, signaled);

	w.opcode = o.wr.opcode;
	w.send_flags |= o.wr.send_flags & (IBV_SEND_FENCE | IBV_SEND_INLINE | IBV_SEND_SOLICITED);
	w.imm_data = o.wr.imm_data;
	w.wr = o.wr.wr;
	if (p.reg)
		translate(w, p.reg->info, p.reg->info.write_key, true);
	w.num_sge = o.wr.num_sge;
	std::copy_n(o.wire, o.wr.num_sge, w.sg_list);
}

/* READ the residency words for which the piece has a place in the ring. */
void engine::push_words(piece &p, bool signaled, unsigned flags) noexcept
{
	ibv_send_wr &w = push(p.op, &p, signaled);

	w.opcode = IBV_WR_RDMA_READ;
	w.send_flags |= flags;
	w.wr.rdma.rkey = p.reg->info.table_key;
	w.wr.rdma.remote_addr = p.reg->info.table_addr + p.ring_page * sizeof(std::uint64_t);
	w.sg_list[0] = {reinterpret_cast<std::uintptr_t>(&config_.words[p.ring_offset]),
			static_cast<std::uint32_t>(p.ring_pages * sizeof(std::uint64_t)), config_.words_lkey};
	w.num_sge = 1;
	++stats_.word_reads;
}

/* For op @i, in its place: what every HCA refuses, with the event that the peer would have had for it. */
void engine::push_refused(std::uint64_t i) noexcept
{
	const op &o = op_at(i);
	/* Of no whole word; its key comes second. */
	const bool misaligned = is_atomic(o.wr.opcode) && o.status == IBV_WC_REM_INV_REQ_ERR;
	ibv_send_wr &w = push(i, nullptr, true);

	w.sg_list[0] = {reinterpret_cast<std::uintptr_t>(config_.words.data()), misaligned ? atomic_size : 1,
			config_.words_lkey};
	w.num_sge = 1;
	if (misaligned) {
		w.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
		w.wr.atomic = {refused_addr, 0, 0, refused_key};
	} else {
		w.opcode = IBV_WR_RDMA_WRITE;
		w.wr.rdma = {refused_addr, refused_key};
	}
}

/*
 * Completions come in order, so that of this one says that all before it are over, unsignaled ones that
 * had succeeded included. A dead QP flushes it. The peer of a live one looks at no key, for it accesses nothing, but
 * at what its QP allows. Both QPs allow READs: without a lease nothing is proven without one, see nprdma(7).
 */
void engine::push_drain() noexcept
{
	ibv_send_wr &w = push(no_op, nullptr, true);

	w.opcode = trouble_.dead ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
	w.wr.rdma = {};
}

/* How many of the chain, which is not empty, could not be posted? */
std::uint32_t engine::send_chain() noexcept
{
	const std::uint32_t n = std::exchange(state_.chained, 0);
	ibv_send_wr *bad = nullptr;

	chain_[n - 1].next = nullptr;
	/* Nothing may follow what could not be posted. */
	if ((!trouble_.broken || trouble_.dead) && !world_.post(chain_.data(), &bad))
		return 0;
	return n - posted(bad);
}

void engine::flush() noexcept
{
	if (!state_.chained)
		return;
	if (const std::uint32_t lost = send_chain())
		not_posted(lost);
}

/* How many work requests of the chain the provider took before @bad. */
std::uint32_t engine::posted(const ibv_send_wr *bad) const noexcept
{
	return bad ? static_cast<std::uint32_t>(bad - chain_.data()) : 0;
}

/* The last @n entries of the send queue are not there. */
void engine::not_posted(std::uint32_t n) noexcept
{
	std::uint64_t first = no_op;

	expand();
	credits_.give(n);
	for (; n; --n) {
		const slot &s = slots_[--sq_tail_ & sq_mask_];
		if (s.op == no_op)
			continue;
		first = s.op;
		op &o = op_at(s.op);
		--o.slots;
		if (o.kind == op_kind::leased && leases_.give(o.lease))
			lease_ended(o.lease);
		if (s.piece != none && !--pieces_[s.piece].slots && pieces_[s.piece].at == stage::dropped)
			free_piece(pieces_[s.piece]);
	}
	first_brief_ = sq_tail_;
	/* Some of what is left may be signaled, but nobody knows any more. */
	set_tail(under_way());
	if (!trouble_.broken && !trouble_.dead && first != no_op && op_at(first).status == IBV_WC_SUCCESS)
		op_at(first).status = IBV_WC_LOC_QP_OP_ERR;
	/* step() ends the QP: here somebody may be in the middle of a piece. */
	trouble_.broken = true;
}

bool engine::on_cqe(const ibv_wc &wc) noexcept
{
	const std::uint64_t i = wc.wr_id - first_id_;
	if (i - sq_head_ >= under_way() || (wc.status == IBV_WC_SUCCESS && wc.opcode & IBV_WC_RECV))
		return false;

	const bool bad = wc.status != IBV_WC_SUCCESS;
	expand();
	lost_ |= !trouble_.dead && wc.status == IBV_WC_RETRY_EXC_ERR;
	credits_.give(static_cast<std::uint32_t>(i + 1 - sq_head_));
	while (sq_head_ <= i) {
		const slot s = slots_[sq_head_ & sq_mask_];
		const bool failed = bad && sq_head_ == i;

		++sq_head_;
		if (s.op == no_op)
			continue;
		op &o = op_at(s.op);
		--o.slots;
		if (failed) {
			if (o.status == IBV_WC_SUCCESS)
				o.status = wc.status;
			o.vendor_err = wc.vendor_err;
		}
		if (s.piece == none) {
			if (o.kind == op_kind::leased && leases_.give(o.lease))
				lease_ended(o.lease);
			if (!failed && o.status == IBV_WC_SUCCESS)
				finish(o);
			continue;
		}
		piece &p = pieces_[s.piece];
		if (--p.slots)
			continue;
		if (p.at == stage::dropped)
			free_piece(p);
		else if (!bad)
			arrived(p);
	}
	if (bad || trouble_.broken)
		set_tail(std::min(unsignaled_, under_way()));
	if (bad && !config_.local_only)
		die();
	else if (bad && wc.status != IBV_WC_WR_FLUSH_ERR)
		flush_rest();
	return true;
}

bool engine::take_ring(piece &p, std::uint64_t page, std::uint32_t pages) noexcept
{
	const auto size = static_cast<std::uint32_t>(config_.words.size());
	std::uint32_t offset;

	if (ring_tail_ - ring_head_ == ring_.size())
		return false;
	if (ring_head_ == ring_tail_)
		ring_end_ = 0;
	const std::uint32_t begin = ring_head_ == ring_tail_ ? 0 : ring_[ring_head_ & ring_mask_].offset;
	if (ring_end_ >= begin) {
		if (pages <= size - ring_end_)
			offset = ring_end_;
		else if (pages < begin)
			offset = 0;
		else
			return false;
	} else if (pages < begin - ring_end_) {
		offset = ring_end_;
	} else {
		return false;
	}
	p.ring = static_cast<std::uint32_t>(ring_tail_ & ring_mask_);
	p.ring_offset = offset;
	p.ring_page = page;
	p.ring_pages = pages;
	ring_[p.ring] = {offset, pages, false};
	++ring_tail_;
	ring_end_ = offset + pages;
	return true;
}

void engine::give_ring(piece &p) noexcept
{
	if (p.ring == none)
		return;
	ring_[p.ring].free = true;
	p.ring = none;
	while (ring_head_ != ring_tail_ && ring_[ring_head_ & ring_mask_].free)
		++ring_head_;
}

/* The words as they are known before what proves with them is posted. */
void engine::snapshot(piece &p) noexcept
{
	for (std::uint32_t k = 0; k < p.ring_pages; ++k)
		snap_[p.ring_offset + k] = cache_.get(p.reg->uid, p.ring_page + k);
}

void engine::learn_words(piece &p) noexcept
{
	for (std::uint32_t k = 0; k < p.ring_pages; ++k)
		cache_.set(p.reg->uid, p.ring_page + k, config_.words[p.ring_offset + k]);
}

} // namespace npr
