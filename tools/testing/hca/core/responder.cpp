// SPDX-License-Identifier: GPL-2.0
/*
 * The responder: executes the requests of the other side.
 *
 * SENDs, WRITEs and atomics are executed as they arrive, in order. READs are
 * queued, and fetch their data when their turn to answer comes; everything else
 * that has to be said to the requester queues behind them, because answers keep
 * the order of requests. So a READ sees all WRITEs before it, and may see one
 * after it, as the InfiniBand ordering rules have it.
 */
#include <algorithm>
#include <utility>

#include "device.h"
#include "qp.h"

namespace nphca {

static constexpr size_t max_queued_responses = 512, max_saved_atomics = 32;
/* How far a packet may be ahead before the ones in between count as lost, and how much of a READ is fetched then. */
static constexpr int32_t early_window = 64;
static constexpr uint32_t early_packets = 16;

static int32_t psn_diff(uint32_t a, uint32_t b) noexcept
{
	return static_cast<int32_t>((a - b) << 8) >> 8;
}

/* Receive queues */

/* The shared queue that serves us; with XRC each packet names one of its domain. */
srq *qp::srq_of(uint32_t named) const noexcept
{
	if (rq_type != RQ_SRQ)
		return nullptr;
	if (st != ST_XRC)
		return dev.srqs.find(srqn);
	srq *s = dev.srqs.find(named);
	return s && s->xrcd && s->xrcd == xrcd ? s : nullptr;
}

/* On whose behalf a receive's memory is written. */
accessor qp::receiver() const noexcept
{
	if (recv_.srqn)
		if (const srq *s = dev.srqs.find(recv_.srqn))
			return {s->pd, qpn, false};
	return self();
}

/* On whose behalf the other side accesses memory: with XRC, on the shared queue's. */
accessor qp::remote(uint32_t named) const noexcept
{
	if (st != ST_XRC)
		return self();
	const srq *s = srq_of(named);
	return {s ? s->pd : ~0u, qpn, false};
}

uint16_t qp::posted_recvs()
{
	std::array<uint8_t, 4> record;

	if (dev.dma_read(dbr, record.data(), record.size())) {
		const auto pi = static_cast<uint16_t>(load32(record.data()));
		/* More than fit: garbage. */
		if (static_cast<uint16_t>(pi - rq_head_) <= (1u << log_rq))
			rq_pi_ = pi;
	}
	return static_cast<uint16_t>(rq_pi_ - rq_head_);
}

static void parse_segments(recv_wqe &w, const_bytes raw)
{
	w.sgl.clear();
	w.capacity = 0;
	w.filled = 0;
	for (size_t at = 0; at + 16 <= raw.size(); at += 16) {
		const uint32_t count = load32(&raw[at]), key = load32(&raw[at + 4]);
		if (key == key_terminate)
			break;
		if (!(count & ~seg_inline))
			continue;
		w.sgl.push_back({load64(&raw[at + 8]), key, count & ~seg_inline});
		w.capacity += count & ~seg_inline;
	}
}

/* The next receive work request, in recv_; false if there is none. */
bool qp::take_recv(const packet &p)
{
	std::array<uint8_t, 2048> raw;

	if (rq_type == RQ_REGULAR) {
		const size_t stride = size_t{1} << log_rq_stride;
		if (rq_pi_ == rq_head_ && !posted_recvs())
			return false;
		const uint32_t index = rq_head_ & ((1u << log_rq) - 1);
		if (stride > raw.size() || !buffer.read(dev, uint64_t{index} * stride, raw.data(), stride))
			return false;
		recv_.counter = rq_head_++;
		recv_.srqn = 0;
		parse_segments(recv_, {raw.data(), stride});
		recv_.valid = true;
		return true;
	}
	srq *s = srq_of(p.srqn);
	if (!s || s->failed)
		return false;
	const auto look = [&] {
		std::array<uint8_t, 4> record;
		if (dev.dma_read(s->dbr, record.data(), record.size()))
			s->posted = static_cast<uint16_t>(load32(record.data()));
		return static_cast<uint16_t>(s->posted - s->taken);
	};
	uint16_t left = static_cast<uint16_t>(s->posted - s->taken);
	if (!left || (s->limit && left <= s->limit))
		left = look();
	if (!left)
		return false;
	const size_t stride = size_t{1} << s->log_stride;
	if (left > 1u << s->log_size || s->head >= 1u << s->log_size || stride > raw.size() || stride < 32 ||
	    !s->buffer.read(dev, uint64_t{s->head} << s->log_stride, raw.data(), stride)) {
		std::array<uint8_t, 28> data{};
		s->failed = true;
		store32(data.data() + 24, s->srqn);
		dev.post_event(EV_SRQ_ERROR, 0, data);
		return false;
	}
	recv_.counter = s->head;
	recv_.srqn = s->srqn;
	/* Free entries form a list; the one after the last posted is not looked at. */
	s->head = load16(&raw[2]);
	++s->taken;
	parse_segments(recv_, {raw.data() + 16, stride - 16});
	recv_.valid = true;
	if (s->limit && left - 1 < s->limit) {
		std::array<uint8_t, 28> data{};
		s->limit = 0;
		store32(data.data() + 24, s->srqn);
		dev.post_event(EV_SRQ_LIMIT, 0, data);
	}
	return true;
}

void qp::finish_recv(const packet &p, uint8_t opcode, wc_error error)
{
	cqe e;

	e.opcode = opcode;
	e.error = error;
	e.vendor = error == wc_error::flushed ? 0xf9 : 0x33;
	e.qpn = qpn;
	e.uidx = uidx;
	uint32_t cqn = cqn_recv;
	if (const srq *s = recv_.srqn ? dev.srqs.find(recv_.srqn) : nullptr) {
		e.srqn = s->srqn;
		if (st == ST_XRC) {
			e.uidx = s->uidx;
			cqn = s->cqn;
		}
	}
	e.counter = recv_.counter;
	e.byte_count = opcode == CQE_RESP_WRITE_IMM ? message_length_ : recv_.filled;
	e.imm = st == ST_QP1 && opcode == CQE_RESP_SEND ? p.pkey : p.imm;
	e.solicited = p.solicited;
	e.slid = p.slid;
	e.sl = p.ethernet ? static_cast<uint8_t>(p.kind) : p.sl;
	e.remote_qpn = is_datagram() ? p.sqpn : remote_qpn;
	e.grh = is_datagram() && p.has_grh;
	e.tagged = p.ethernet && p.tagged;
	e.tag = e.tagged ? p.tag : 0;
	recv_.valid = false;
	if (error == wc_error::flushed)
		dev.count(NPHCA_FLUSHED);
	dev.complete(cqn, e);
}

void qp::flush_recv()
{
	packet none{};

	if (recv_.valid)
		finish_recv(none, CQE_RESP_SEND, wc_error::flushed);
	if (rq_type != RQ_REGULAR)
		return;
	for (uint16_t n = posted_recvs(); n; --n) {
		recv_.counter = rq_head_++;
		finish_recv(none, CQE_RESP_SEND, wc_error::flushed);
	}
}

/* Append a packet to the message in recv_. False if it does not fit. */
bool qp::fill_recv(const packet &p, mem_result *result)
{
	*result = mem_result::ok;
	if (p.size > recv_.capacity - recv_.filled)
		return false;
	*result = scatter(recv_.sgl, recv_.filled, p.data.data(), p.size, receiver());
	recv_.filled += p.size;
	return true;
}

/* Answers */

/* The answer to a READ, whatever has to be checked first. */
static response answer_to_read(const packet &p, uint32_t mtu) noexcept
{
	response r;

	r.what = response::read;
	r.psn = p.psn;
	r.srqn = p.srqn;
	r.va = p.va;
	r.rkey = p.rkey;
	r.length = p.length;
	r.packets = std::max(1u, (p.length + mtu - 1) / mtu);
	return r;
}

void qp::drop_responses()
{
	for (response &r : responses_)
		for (packet *p : r.ahead)
			if (p)
				dev.fab.pool.put(p);
	responses_.clear();
	for (early_request &e : early_)
		drop_early(e);
	early_.clear();
}

bool qp::send_ack(uint32_t psn, uint8_t syndrome)
{
	packet *p = dev.fab.pool.get(packet_pool::for_acks);

	if (!p)
		return false;
	p->opcode = BTH_ACK;
	address(*p);
	p->dqpn = remote_qpn;
	p->psn = psn & psn_mask;
	p->msn = msn_;
	p->syndrome = syndrome;
	dev.fab.send(p);
	return true;
}

void qp::respond(response r)
{
	if (!dev.knob(NPHCA_ACK_BEFORE_PLACEMENT))
		r.after = dev.posted.posted();
	if (responses_.empty() && r.what == response::ack && !is_posted_before(r) && send_ack(r.psn, AETH_ACK | AETH_VALUE))
		return;
	if (r.what == response::ack && !responses_.empty() && responses_.back().what == response::ack) {
		responses_.back().psn = r.psn;
		responses_.back().after = r.after;
		return;
	}
	if (responses_.size() >= max_queued_responses && !refused_) {
		for (packet *p : r.ahead)
			if (p)
				dev.fab.pool.put(p);
		return; /* the requester will ask again */
	}
	responses_.push_back(std::move(r));
	dev.fab.ready(*this);
}

void qp::acknowledge(const packet &p)
{
	if (!p.ack_req)
		return;
	response r;
	r.what = response::ack;
	r.psn = p.psn;
	respond(r);
}

/* Say no, once all before it are answered, and give up the QP. */
void qp::refuse(const packet &p, uint8_t nak, wc_error recv_error, uint8_t event)
{
	if (recv_.valid && recv_error != wc_error::none)
		finish_recv(p, CQE_RESP_SEND, recv_error);
	refused_ = true;
	refuse_event_ = event;
	response r;
	r.what = response::nak;
	r.psn = p.psn;
	r.code = static_cast<uint8_t>(AETH_NAK | nak);
	respond(r);
}

/* The memory that the requester named. */
void qp::refuse_memory(const packet &p, mem_result why)
{
	if (why == mem_result::protection)
		refuse(p, NAK_ACCESS, wc_error::none, EV_QP_ACCESS);
	else
		refuse(p, NAK_OPERATION, wc_error::none, EV_QP_FATAL);
}

/* The memory that our own receive named. */
void qp::refuse_recv(const packet &p, mem_result why)
{
	if (why == mem_result::protection)
		refuse(p, NAK_OPERATION, wc_error::local_protection, 0);
	else
		refuse(p, NAK_OPERATION, wc_error::local_qp_op, EV_QP_FATAL);
}

void qp::not_ready(const packet &p)
{
	response r;

	dev.count(NPHCA_RNR_NAKS);
	nak_sent_ = true; /* what follows is out of sequence, and expected to be */
	r.what = response::nak;
	r.psn = p.psn;
	r.code = static_cast<uint8_t>(AETH_RNR | (rnr_code & AETH_VALUE));
	respond(r);
}

/* The data of one packet of a READ's response, in a packet; NULL without a result: no packet. */
packet *qp::fetch_read(const response &r, uint32_t index, size_t reserve, mem_result *result)
{
	packet *p = dev.fab.pool.get(reserve);

	*result = mem_result::ok;
	if (!p)
		return nullptr;
	const uint32_t from = index * mtu;
	p->size = std::min(mtu, r.length - from);
	*result = dev.access(r.rkey, r.va + from, p->data.data(), p->size, false, REMOTE_READ, remote(r.srqn));
	if (*result != mem_result::ok) {
		dev.fab.pool.put(p);
		return nullptr;
	}
	return p;
}

/* An ACK says that what was written is there. */
bool qp::is_posted_before(const response &r) const noexcept
{
	return r.what == response::ack && r.after > dev.posted.committed();
}

/* False: there is no packet to be had now. */
bool qp::send_response(response &r)
{
	packet *p;

	switch (r.what) {
	case response::ack:
		if (!send_ack(r.psn, AETH_ACK | AETH_VALUE))
			return false;
		r.next = 1;
		return true;
	case response::nak:
		if (!send_ack(r.psn, r.code))
			return false;
		r.next = 1;
		return true;
	case response::atomic:
		p = dev.fab.pool.get(packet_pool::for_responses);
		if (!p)
			return false;
		p->opcode = BTH_ATOMIC_ACK;
		p->operand = r.original;
		break;
	default: {
		mem_result result = mem_result::ok;
		p = r.next < r.ahead.size() ? std::exchange(r.ahead[r.next], nullptr) : nullptr;
		if (!p)
			p = fetch_read(r, r.next, packet_pool::for_responses, &result);
		if (result != mem_result::ok && r.answered) {
			/* As in repeat_read() */
			r.next = r.packets;
			return true;
		}
		if (result != mem_result::ok) {
			/* The right has gone since the request came: this is the last answer. */
			packet named{};
			named.psn = (r.psn + r.next) & psn_mask;
			drop_responses();
			refuse_memory(named, result);
			return true;
		}
		if (!p)
			return false;
		const bool first = r.next == 0, last = r.next + 1 == r.packets;
		p->opcode = first ? (last ? BTH_READ_ONLY : BTH_READ_FIRST) : (last ? BTH_READ_LAST : BTH_READ_MIDDLE);
		break;
	}
	}
	address(*p);
	p->dqpn = remote_qpn;
	p->psn = (r.psn + r.next) & psn_mask;
	p->msn = msn_;
	p->syndrome = AETH_ACK | AETH_VALUE;
	++r.next;
	dev.fab.send(p);
	return true;
}

/* Fetch a packet of an answer before its turn, if there is room. A fault is found again, and told, in its turn. */
bool qp::fetch_ahead(response &r, uint32_t index)
{
	mem_result result;

	if (index >= r.ahead.size())
		r.ahead.resize(index + 1);
	if (!r.ahead[index])
		r.ahead[index] = fetch_read(r, index, packet_pool::for_requests, &result);
	return r.ahead[index];
}

void qp::trail_reads(uint32_t key)
{
	constexpr uint32_t most = 16; /* packets of each */

	if (!dev.knob(NPHCA_TRAILING_DMA))
		return;
	for (response &r : responses_) {
		if (r.what != response::read || (key && r.rkey >> 8 != key))
			continue;
		for (uint32_t i = r.next; i < r.packets && i - r.next < most && fetch_ahead(r, i); ++i)
			dev.count(NPHCA_TRAILING);
	}
}

/*
 * It failed by itself, and no command has ended it yet: requests may be on their way to
 * memory. Not those that were done before, whose place may belong to others since.
 */
void qp::trail(const packet &p)
{
	const bool begins = p.opcode == BTH_WRITE_FIRST || p.opcode == BTH_WRITE_ONLY || p.opcode == BTH_WRITE_ONLY_IMM;

	if (state != qp_state::err || ended_ || !dev.knob(NPHCA_TRAILING_DMA) || psn_diff(p.psn, expected_psn_) < 0)
		return;
	mem_result result = mem_result::protection;
	if (begins && may_write && p.size <= mtu) {
		/* A write does not change the buffer. */
		result = dev.access(p.rkey, p.va, const_cast<uint8_t *>(p.data.data()), p.size, true, REMOTE_WRITE,
				    remote(p.srqn));
	} else if (p.opcode == BTH_READ_REQUEST && may_read) {
		if (packet *data = fetch_read(answer_to_read(p, mtu), 0, packet_pool::for_requests, &result))
			dev.fab.pool.put(data);
		else
			result = mem_result::protection;
	}
	if (result == mem_result::ok)
		dev.count(NPHCA_TRAILING);
}

/* Let READs that wait behind another fetch their first data before it does. */
bool qp::overlap_reads()
{
	bool any = false;

	if (responses_.empty() || responses_.front().what != response::read)
		return false;
	for (size_t i = responses_.size(); i-- > 1;) {
		response &r = responses_[i];
		if (r.what != response::read || r.next || (!r.ahead.empty() && r.ahead[0]))
			continue;
		if (fetch_ahead(r, 0)) {
			dev.count(NPHCA_OVERLAPPED_READS);
			any = true;
		}
	}
	return any;
}

/* The next packets of all READs that wait, in any order. */
void qp::fetch_at_random()
{
	std::array<std::pair<size_t, uint32_t>, 16> next;
	size_t count = 0;

	for (size_t i = 0; i < responses_.size() && count < next.size(); ++i) {
		const response &r = responses_[i];
		if (r.what != response::read)
			continue;
		for (uint32_t k = r.next; k < r.packets && count < next.size(); ++k)
			if (k >= r.ahead.size() || !r.ahead[k])
				next[count++] = {i, k};
	}
	for (size_t i = 0; i < count; ++i) {
		std::swap(next[i], next[i + dev.random() % (count - i)]);
		fetch_ahead(responses_[next[i].first], next[i].second);
	}
}

bool qp::responder_turn()
{
	constexpr int packets_per_turn = 16;

	if (dev.knob(NPHCA_READ_OVERLAP))
		overlap_reads();
	if (dev.knob(NPHCA_RANDOM_FETCH))
		fetch_at_random();
	for (int i = 0; i < packets_per_turn && !responses_.empty(); ++i) {
		if (is_posted_before(responses_.front())) {
			dev.fab.ready_when_placed(*this);
			return false;
		}
		if (!send_response(responses_.front()))
			return true;
		response &r = responses_.front();
		if (r.next < r.packets)
			continue;
		const bool fatal = r.what == response::nak && refused_ && responses_.size() == 1;
		responses_.pop_front();
		if (fatal) {
			to_error(refuse_event_);
			return false;
		}
	}
	return !responses_.empty();
}

/* Requests */

bool qp::message_fits(const packet &p, bool first, bool last)
{
	if (first ? message_ != idle : message_ == idle)
		return false;
	return last ? p.size <= mtu : p.size == mtu;
}

void qp::request_send(packet &p, uint8_t kind)
{
	const bool invalidate = kind == BTH_SEND_LAST_INV || kind == BTH_SEND_ONLY_INV;
	const bool first = kind == BTH_SEND_FIRST || kind == BTH_SEND_ONLY || kind == BTH_SEND_ONLY_IMM || kind == BTH_SEND_ONLY_INV;
	const bool last = kind != BTH_SEND_FIRST && kind != BTH_SEND_MIDDLE;
	const bool imm = kind == BTH_SEND_LAST_IMM || kind == BTH_SEND_ONLY_IMM;
	mem_result result;

	if (!message_fits(p, first, last) || (!first && message_ != in_send)) {
		refuse(p, NAK_INVALID, wc_error::none, EV_QP_INVALID_REQ);
		return;
	}
	if (first && st == ST_XRC && !srq_of(p.srqn)) {
		refuse(p, NAK_INVALID, wc_error::none, EV_QP_INVALID_REQ);
		return;
	}
	if (first && !take_recv(p)) {
		not_ready(p);
		return;
	}
	if (!fill_recv(p, &result)) {
		refuse(p, NAK_INVALID, wc_error::local_length, 0);
		return;
	}
	if (result != mem_result::ok) {
		refuse_recv(p, result);
		return;
	}
	if (last && invalidate) {
		mkey *m = dev.find_mkey(p.imm);
		if (!m || m->free || m->pd != remote(p.srqn).pd || !m->remote_invalidate) {
			refuse(p, NAK_ACCESS, wc_error::none, EV_QP_ACCESS);
			return;
		}
		set(m->context, mkc_free, 1);
		m->decode();
	}
	message_ = last ? idle : in_send;
	expected_psn_ = (expected_psn_ + 1) & psn_mask;
	if (last) {
		msn_ = (msn_ + 1) & psn_mask;
		finish_recv(p, invalidate ? CQE_RESP_SEND_INV : imm ? CQE_RESP_SEND_IMM : CQE_RESP_SEND, wc_error::none);
	}
	acknowledge(p);
}

void qp::request_write(packet &p, uint8_t kind)
{
	const bool first = kind == BTH_WRITE_FIRST || kind >= BTH_WRITE_ONLY;
	const bool last = kind != BTH_WRITE_FIRST && kind != BTH_WRITE_MIDDLE;
	const bool imm = kind == BTH_WRITE_LAST_IMM || kind == BTH_WRITE_ONLY_IMM;

	if (!message_fits(p, first, last) || (!first && message_ != in_write) || !may_write) {
		refuse(p, NAK_INVALID, wc_error::none, EV_QP_INVALID_REQ);
		return;
	}
	if (first) {
		const mkey *m;
		if (p.length && dev.check_key(p.rkey, p.va, p.length, REMOTE_WRITE, remote(p.srqn), &m) != mem_result::ok) {
			refuse_memory(p, mem_result::protection);
			return;
		}
		write_va_ = p.va;
		write_key_ = p.rkey;
		write_left_ = message_length_ = p.length;
	}
	if (p.size > write_left_ || (last && p.size != write_left_)) {
		refuse(p, NAK_INVALID, wc_error::none, EV_QP_INVALID_REQ);
		return;
	}
	if (imm && !recv_.valid && !take_recv(p)) {
		not_ready(p);
		return;
	}
	const mem_result result = turn_ && turn_->placed ? mem_result::ok :
		dev.access(write_key_, write_va_, p.data.data(), p.size, true, REMOTE_WRITE, remote(p.srqn));
	if (result != mem_result::ok) {
		refuse_memory(p, result);
		return;
	}
	write_va_ += p.size;
	write_left_ -= p.size;
	message_ = last ? idle : in_write;
	expected_psn_ = (expected_psn_ + 1) & psn_mask;
	if (last)
		msn_ = (msn_ + 1) & psn_mask;
	if (imm)
		finish_recv(p, CQE_RESP_WRITE_IMM, wc_error::none);
	acknowledge(p);
}

void qp::request_read(packet &p)
{
	const mkey *m;

	if (message_ != idle || !may_read || p.length > 1u << 30) {
		refuse(p, NAK_INVALID, wc_error::none, EV_QP_INVALID_REQ);
		return;
	}
	const auto busy = static_cast<size_t>(std::count_if(responses_.begin(), responses_.end(), [](const response &x) {
		return (x.what == response::read || x.what == response::atomic) && !x.again;
	}));
	if (busy >= max_responses) {
		refuse(p, NAK_INVALID, wc_error::none, EV_QP_INVALID_REQ);
		return;
	}
	if (p.length && dev.check_key(p.rkey, p.va, p.length, REMOTE_READ, remote(p.srqn), &m) != mem_result::ok) {
		refuse_memory(p, mem_result::protection);
		return;
	}
	response r = answer_to_read(p, mtu);
	if (turn_)
		r.ahead = std::move(turn_->fetched);
	expected_psn_ = (expected_psn_ + r.packets) & psn_mask;
	msn_ = (msn_ + 1) & psn_mask;
	respond(std::move(r));
}

/*
 * Answers go out in the order of their sequence numbers, those that are given
 * again, too: else each would make the requester ask for the other once more.
 */
void qp::insert_response(const response &r)
{
	const auto again = static_cast<size_t>(std::count_if(responses_.begin(), responses_.end(), [](const response &x) {
		return x.again;
	}));

	if (again >= max_responses || responses_.size() >= max_queued_responses)
		return; /* the requester will ask again */
	const auto at = std::find_if(responses_.begin(), responses_.end(), [&](const response &x) {
		return psn_diff(x.psn, r.psn) > 0;
	});
	response &inserted = *responses_.insert(at, r);
	inserted.again = inserted.answered = true;
	dev.fab.ready(*this);
}

/* A READ, or the rest of one, that was asked for before. The data is what is there now. */
void qp::repeat_read(const packet &p)
{
	const mkey *m;

	const response again = answer_to_read(p, mtu);
	if (p.length > 1u << 30 || psn_diff(p.psn + again.packets, expected_psn_) > 0)
		return;
	for (response &r : responses_) {
		const int32_t into = psn_diff(p.psn, r.psn);
		if (r.what != response::read || into < 0 || into >= static_cast<int32_t>(r.packets))
			continue;
		/* Still being answered: go back in it. */
		r.next = std::min(r.next, static_cast<uint32_t>(into));
		r.again = true;
		return;
	}
	/*
	 * It may be a late copy of one that was answered: that the memory has gone
	 * since is no reason to end the connection.
	 */
	if (may_read && (!p.length || dev.check_key(p.rkey, p.va, p.length, REMOTE_READ, remote(p.srqn), &m) == mem_result::ok))
		insert_response(again);
}

/* Done once; what it found there is told as often as it is asked for. */
void qp::repeat_atomic(const packet &p)
{
	for (const response &r : responses_)
		if (r.what == response::atomic && r.psn == p.psn)
			return;
	for (auto a = atomics_.rbegin(); a != atomics_.rend(); ++a)
		if (a->psn == p.psn) {
			response r;
			r.what = response::atomic;
			r.psn = p.psn;
			r.original = a->original;
			insert_response(r);
			return;
		}
}

/*
 * Atomic against all other atomics of this fabric, which one thread executes;
 * not against CPUs, nor would PCI Express be.
 */
void qp::request_atomic(packet &p)
{
	const mkey *m;
	uint64_t value;
	response r;

	if (message_ != idle || !may_atomic || p.va & 7) {
		refuse(p, NAK_INVALID, wc_error::none, EV_QP_INVALID_REQ);
		return;
	}
	if (dev.check_key(p.rkey, p.va, 8, REMOTE_ATOMIC, remote(p.srqn), &m) != mem_result::ok) {
		refuse_memory(p, mem_result::protection);
		return;
	}
	dev.posted.commit_all(); /* one operation: no knob comes between it and the one before */
	mem_result result = dev.copy(*m, p.va, reinterpret_cast<uint8_t *>(&value), 8, false, 0);
	if (result == mem_result::ok) {
		r.original = value;
		if (p.opcode == BTH_FAA)
			value += p.operand;
		else if (value == p.compare)
			value = p.operand;
		result = dev.copy(*m, p.va, reinterpret_cast<uint8_t *>(&value), 8, true, 0);
	}
	if (result != mem_result::ok) {
		refuse_memory(p, result);
		return;
	}
	expected_psn_ = (expected_psn_ + 1) & psn_mask;
	msn_ = (msn_ + 1) & psn_mask;
	atomics_.push_back({p.psn, r.original});
	if (atomics_.size() > max_saved_atomics)
		atomics_.pop_front();
	r.what = response::atomic;
	r.psn = p.psn;
	respond(r);
}

void qp::drop_early(early_request &e) noexcept
{
	for (packet *p : e.fetched)
		if (p)
			dev.fab.pool.put(p);
	dev.fab.pool.put(e.p);
}

/*
 * A request that came too early: keep it, and do now what of it needs no order. A WRITE's
 * data is placed and a READ's fetched; completions, acknowledgements, and what takes a
 * receive or changes memory exactly once, wait for their turn. What fails here fails again
 * then, and is told then. False: it cannot be kept.
 */
bool qp::take_early(const packet &p)
{
	const auto same = [&](const early_request &e) { return e.p->psn == p.psn; };
	const bool is_write = p.opcode >= BTH_WRITE_FIRST && p.opcode <= BTH_WRITE_ONLY_IMM;
	const bool begins = p.opcode == BTH_WRITE_FIRST || p.opcode >= BTH_WRITE_ONLY;
	const mkey *m;

	if (std::any_of(early_.begin(), early_.end(), same))
		return true;
	early_.reserve(early_window);
	if (early_.size() >= early_window)
		return false;
	early_request e;
	e.p = dev.fab.pool.get(packet_pool::for_requests);
	if (!e.p)
		return false;
	*e.p = p;
	if (is_write && may_write && p.size <= mtu && (begins || p.placeable)) {
		const uint64_t va = begins ? p.va : p.va + p.offset;
		e.placed = dev.access(p.rkey, va, e.p->data.data(), p.size, true, REMOTE_WRITE, remote(p.srqn)) == mem_result::ok;
	} else if (p.opcode == BTH_READ_REQUEST && may_read && p.length <= 1u << 30 &&
		   dev.check_key(p.rkey, p.va, p.length, REMOTE_READ, remote(p.srqn), &m) == mem_result::ok) {
		response r = answer_to_read(p, mtu);
		for (uint32_t i = 0; i < std::min(r.packets, early_packets) && fetch_ahead(r, i); ++i)
			;
		e.fetched = std::move(r.ahead);
	}
	if (e.placed || (!e.fetched.empty() && e.fetched[0]))
		dev.count(NPHCA_EARLY);
	early_.push_back(std::move(e));
	return true;
}

/* Those whose turn has come now. */
void qp::run_early()
{
	for (;;) {
		std::erase_if(early_, [this](early_request &e) {
			const bool over = psn_diff(e.p->psn, expected_psn_) < 0;
			if (over)
				drop_early(e);
			return over;
		});
		const auto next = std::find_if(early_.begin(), early_.end(), [this](const early_request &e) {
			return e.p->psn == expected_psn_;
		});
		if (next == early_.end() || !listening() || refused_)
			return;
		early_request e = std::move(*next);
		early_.erase(next);
		turn_ = &e;
		execute(*e.p);
		turn_ = nullptr;
		drop_early(e);
	}
}

void qp::receive_reliable(packet &p)
{
	if (!listening() || refused_) {
		trail(p);
		dev.count(NPHCA_DROPPED);
		return;
	}
	const int32_t diff = psn_diff(p.psn, expected_psn_);
	if (diff > 0) {
		if (diff < early_window && dev.knob(NPHCA_OUT_OF_ORDER) && take_early(p))
			return;
		if (!nak_sent_) {
			nak_sent_ = true;
			response r;
			r.what = response::nak;
			r.psn = expected_psn_;
			r.code = uint8_t{AETH_NAK} + uint8_t{NAK_SEQUENCE};
			respond(r);
		}
		return;
	}
	if (diff < 0) {
		/* Executed already; say again what was said. */
		if (p.opcode == BTH_READ_REQUEST) {
			repeat_read(p);
		} else if (p.opcode == BTH_CAS || p.opcode == BTH_FAA) {
			repeat_atomic(p);
		} else if (p.ack_req) {
			response r;
			r.what = response::ack;
			r.psn = (expected_psn_ - 1) & psn_mask;
			respond(r);
		}
		return;
	}
	execute(p);
	if (!early_.empty())
		run_early();
}

/* The request whose turn it is. */
void qp::execute(packet &p)
{
	nak_sent_ = false;
	switch (p.opcode) {
	case BTH_SEND_FIRST:
	case BTH_SEND_MIDDLE:
	case BTH_SEND_LAST:
	case BTH_SEND_LAST_IMM:
	case BTH_SEND_ONLY:
	case BTH_SEND_ONLY_IMM:
	case BTH_SEND_LAST_INV:
	case BTH_SEND_ONLY_INV:
		request_send(p, p.opcode);
		break;
	case BTH_WRITE_FIRST:
	case BTH_WRITE_MIDDLE:
	case BTH_WRITE_LAST:
	case BTH_WRITE_LAST_IMM:
	case BTH_WRITE_ONLY:
	case BTH_WRITE_ONLY_IMM:
		request_write(p, p.opcode);
		break;
	case BTH_READ_REQUEST:
		request_read(p);
		break;
	case BTH_CAS:
	case BTH_FAA:
		request_atomic(p);
		break;
	default:
		refuse(p, NAK_INVALID, wc_error::none, EV_QP_INVALID_REQ);
	}
}

/* Nothing is answered; a message with a gap or without rights is dropped whole. */
void qp::receive_unreliable(packet &p)
{
	const auto kind = static_cast<uint8_t>(p.opcode & ~BTH_CLASS);
	const bool is_send = kind <= BTH_SEND_ONLY_IMM;
	const bool is_write = kind >= BTH_WRITE_FIRST && kind <= BTH_WRITE_ONLY_IMM;
	const uint8_t step = static_cast<uint8_t>(is_send ? kind : kind - BTH_WRITE_FIRST);
	const bool first = step == 0 || step >= 4, last = step >= 2, imm = step == 3 || step == 5;
	mem_result result = mem_result::ok;

	if (!listening() || !(is_send || is_write)) {
		dev.count(NPHCA_DROPPED);
		return;
	}
	const bool gap = p.psn != expected_psn_;
	expected_psn_ = (p.psn + 1) & psn_mask;
	if (first)
		skip_message_ = false;
	else if (gap)
		skip_message_ = true;
	if (first)
		message_ = idle;
	if (!skip_message_ && (!message_fits(p, first, last) || (!first && message_ != (is_send ? in_send : in_write))))
		skip_message_ = true;

	if (!skip_message_ && is_send) {
		/* A receive left over from a broken message is used again. */
		if (first && recv_.valid)
			recv_.filled = 0;
		else if (first && !take_recv(p))
			skip_message_ = true;
		if (!skip_message_ && !fill_recv(p, &result)) {
			finish_recv(p, CQE_RESP_SEND, wc_error::local_length);
			to_error(0);
			return;
		}
		if (result != mem_result::ok) {
			finish_recv(p, CQE_RESP_SEND,
				    result == mem_result::protection ? wc_error::local_protection : wc_error::local_qp_op);
			to_error(0);
			return;
		}
	} else if (!skip_message_) {
		const mkey *m;
		if (first) {
			write_va_ = p.va;
			write_key_ = p.rkey;
			write_left_ = message_length_ = p.length;
			if (!may_write || (p.length && dev.check_key(p.rkey, p.va, p.length, REMOTE_WRITE, remote(p.srqn), &m) != mem_result::ok))
				skip_message_ = true;
		}
		if (p.size > write_left_ || (last && p.size != write_left_))
			skip_message_ = true;
		if (!skip_message_ && imm && !recv_.valid && !take_recv(p))
			skip_message_ = true;
		if (!skip_message_) {
			result = dev.access(write_key_, write_va_, p.data.data(), p.size, true, REMOTE_WRITE, remote(p.srqn));
			if (result == mem_result::dma_fault) {
				to_error(EV_QP_FATAL);
				return;
			}
			skip_message_ = result != mem_result::ok;
			write_va_ += p.size;
			write_left_ -= p.size;
		}
	}
	if (skip_message_) {
		message_ = idle;
		dev.count(NPHCA_DROPPED);
		return;
	}
	message_ = last ? idle : is_send ? in_send : in_write;
	if (last && is_send)
		finish_recv(p, imm ? CQE_RESP_SEND_IMM : CQE_RESP_SEND, wc_error::none);
	else if (last && imm)
		finish_recv(p, CQE_RESP_WRITE_IMM, wc_error::none);
}

void qp::receive_datagram(packet &p)
{
	mem_result result = mem_result::ok;

	/* A wrong Q_Key is dropped without a word, as is what finds no receive. */
	if (!listening() || p.qkey != qkey || !take_recv(p)) {
		dev.count(NPHCA_DROPPED);
		return;
	}
	/* The first 40 bytes are for the global route header, whether there is one or not. */
	if (recv_.capacity < grh_size + p.size) {
		finish_recv(p, CQE_RESP_SEND, wc_error::local_length);
		to_error(0);
		return;
	}
	if (p.has_grh)
		result = scatter(recv_.sgl, 0, p.grh.data(), grh_size, receiver());
	if (result == mem_result::ok)
		result = scatter(recv_.sgl, grh_size, p.data.data(), p.size, receiver());
	recv_.filled = static_cast<uint32_t>(grh_size + p.size);
	if (result != mem_result::ok) {
		finish_recv(p, CQE_RESP_SEND,
			    result == mem_result::protection ? wc_error::local_protection : wc_error::local_qp_op);
		to_error(0);
		return;
	}
	finish_recv(p, static_cast<uint8_t>(p.opcode & ~BTH_CLASS) == BTH_SEND_ONLY_IMM ? CQE_RESP_SEND_IMM : CQE_RESP_SEND, wc_error::none);
}

} // namespace nphca
