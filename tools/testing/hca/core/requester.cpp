// SPDX-License-Identifier: GPL-2.0
/*
 * The requester: fetches send work requests, turns them into packets, and
 * completes them in order as acknowledgements and responses come back.
 *
 * What is in flight is a window over the send queue. Each request knows its
 * packet sequence numbers; going back is moving the cursor to the request that
 * a number belongs to and sending on from there. A request that fails waits
 * until all before it are done, so completions keep their order.
 */
#include <algorithm>

#include "device.h"
#include "qp.h"

namespace nphca {

static constexpr size_t max_inflight = 128;
static constexpr uint32_t window = 256, ack_interval = 32; /* packets */

/* Signed distance of packet sequence numbers. */
static int32_t psn_diff(uint32_t a, uint32_t b) noexcept
{
	return static_cast<int32_t>((a - b) << 8) >> 8;
}

static uint8_t vendor_of(wc_error e) noexcept
{
	switch (e) {
	case wc_error::local_length:
		return 0x69;
	case wc_error::local_qp_op:
		return 0x68;
	case wc_error::local_protection:
		return 0x51;
	case wc_error::flushed:
		return 0xf9;
	case wc_error::remote_access:
		return 0x88;
	case wc_error::remote_invalid:
		return 0x8a;
	case wc_error::remote_op:
		return 0x89;
	case wc_error::retry:
		return 0x81;
	case wc_error::rnr_retry:
		return 0x87;
	default:
		return 0x32;
	}
}

static nphca_knob counter_of(wc_error e) noexcept
{
	switch (e) {
	case wc_error::local_length:
		return NPHCA_ERR_LOCAL_LENGTH;
	case wc_error::local_qp_op:
		return NPHCA_ERR_LOCAL_QP_OP;
	case wc_error::local_protection:
		return NPHCA_ERR_LOCAL_PROTECTION;
	case wc_error::bad_response:
		return NPHCA_ERR_BAD_RESPONSE;
	case wc_error::remote_invalid:
		return NPHCA_ERR_REMOTE_INVALID;
	case wc_error::remote_access:
		return NPHCA_ERR_REMOTE_ACCESS;
	case wc_error::remote_op:
		return NPHCA_ERR_REMOTE_OP;
	case wc_error::retry:
		return NPHCA_ERR_RETRY;
	case wc_error::rnr_retry:
		return NPHCA_ERR_RNR_RETRY;
	default:
		return NPHCA_ERR_OTHER;
	}
}

static wc_error local_error(mem_result r) noexcept
{
	/* What the bus refuses is not the work request's fault, and the QP cannot go on. */
	return r == mem_result::protection ? wc_error::local_protection : wc_error::local_qp_op;
}

bool qp::read_sq(uint16_t counter, uint8_t *buf, size_t len)
{
	while (len) {
		const uint32_t block = counter & sq_mask();
		const size_t n = std::min(len, size_t{64} * ((1u << log_sq) - block));
		if (!buffer.read(dev, sq_offset + uint64_t{block} * 64, buf, n))
			return false;
		counter = static_cast<uint16_t>(counter + n / 64);
		buf += n;
		len -= n;
	}
	return true;
}

mem_result qp::gather(const send_wqe &w, uint32_t offset, uint8_t *buf, uint32_t len)
{
	for (const segment &s : w.sgl) {
		if (!len)
			break;
		if (offset >= s.length) {
			offset -= s.length;
			continue;
		}
		const uint32_t n = std::min(len, s.length - offset);
		const mem_result r = s.is_inline ? mem_result::ok :
						   dev.access(s.key, s.va + offset, buf, n, false, LOCAL_READ, self());
		if (r != mem_result::ok)
			return r;
		if (s.is_inline)
			std::copy_n(w.data.begin() + static_cast<ptrdiff_t>(s.va + offset), n, buf);
		buf += n;
		len -= n;
		offset = 0;
	}
	return mem_result::ok;
}

mem_result qp::scatter(const std::vector<segment> &sgl, uint64_t offset, const uint8_t *buf, uint32_t len,
		       const accessor &who)
{
	for (const segment &s : sgl) {
		if (!len)
			break;
		if (offset >= s.length) {
			offset -= s.length;
			continue;
		}
		const auto n = static_cast<uint32_t>(std::min<uint64_t>(len, s.length - offset));
		/* A write does not change the buffer. */
		const mem_result r = dev.access(s.key, s.va + offset, const_cast<uint8_t *>(buf), n, true, LOCAL_WRITE, who);
		if (r != mem_result::ok)
			return r;
		buf += n;
		len -= n;
		offset = 0;
	}
	return mem_result::ok;
}

/* Everything of a request but the address vector of a datagram. */
wc_error qp::parse(send_wqe &w, const_bytes raw)
{
	size_t at = 16;

	w.opcode = raw[3];
	w.signaled = (raw[11] & wqe_ce_mask) >= wqe_ce_always;
	w.solicited = raw[11] & wqe_solicited;
	w.imm = load32(&raw[12]);
	switch (w.opcode) {
	case WQE_NOP:
		return wc_error::none;
	case WQE_UMR:
		return is_reliable() || st == ST_REG_UMR ? wc_error::none : wc_error::local_qp_op;
	case WQE_SEND:
	case WQE_SEND_IMM:
		if (st == ST_REG_UMR)
			return wc_error::local_qp_op;
		if (is_datagram()) {
			if (raw.size() < at + 16)
				return wc_error::local_qp_op;
			at += load32(&raw[at + 8]) & av_extended ? 48 : 16;
		}
		break;
	case WQE_WRITE:
	case WQE_WRITE_IMM:
		if (!is_connected())
			return wc_error::local_qp_op;
		break;
	case WQE_SEND_INVAL:
	case WQE_READ:
	case WQE_CAS:
	case WQE_FAA:
		if (!is_reliable())
			return wc_error::local_qp_op;
		break;
	default:
		return wc_error::local_qp_op;
	}
	if (st == ST_XRC) {
		if (raw.size() < at + 16)
			return wc_error::local_qp_op;
		w.srqn = load32(&raw[at]) & 0xffffff;
		at += 16;
	}
	if (w.opcode == WQE_WRITE || w.opcode == WQE_WRITE_IMM || w.wants_response()) {
		if (raw.size() < at + 16)
			return wc_error::local_qp_op;
		w.va = load64(&raw[at]);
		w.rkey = load32(&raw[at + 8]);
		at += 16;
	}
	if (w.opcode == WQE_CAS || w.opcode == WQE_FAA) {
		if (raw.size() < at + 16)
			return wc_error::local_qp_op;
		w.operand = load64(&raw[at]);
		w.compare = load64(&raw[at + 8]);
		at += 16;
	}
	uint64_t total = 0;
	while (at + 16 <= raw.size()) {
		const uint32_t count = load32(&raw[at]);
		if (count & seg_inline) {
			/* In front of, behind or between others: UCX has its headers so. */
			const size_t n = count & seg_inline_len;
			if (w.wants_response() || n + 4 > raw.size() - at)
				return wc_error::local_qp_op;
			if (n)
				w.sgl.push_back({w.data.size(), 0, static_cast<uint32_t>(n), true});
			w.data.insert(w.data.end(), raw.begin() + static_cast<ptrdiff_t>(at + 4),
				      raw.begin() + static_cast<ptrdiff_t>(at + 4 + n));
			total += n;
			at += (n + 4 + 15) & ~size_t{15};
			continue;
		}
		if (count) {
			w.sgl.push_back({load64(&raw[at + 8]), load32(&raw[at + 4]), count});
			total += count;
		}
		at += 16;
	}
	if (total > 1u << 30 || (is_datagram() && total > mtu))
		return wc_error::local_length;
	w.length = static_cast<uint32_t>(total);
	if ((w.opcode == WQE_CAS || w.opcode == WQE_FAA) && total != 8)
		return wc_error::local_length;
	return wc_error::none;
}

/* Take the next request from the queue to the window. */
qp::step qp::fetch()
{
	if (sq_head_ == sq_pi_ || inflight_.size() >= max_inflight)
		return step::blocked;
	if (is_datagram() && !dev.fab.pool.available(packet_pool::for_requests))
		return step::no_packet;

	std::array<uint8_t, max_wqe> raw;
	send_wqe w;
	bool ok = read_sq(sq_head_, raw.data(), 64);
	size_t size = ok ? size_t{16} * (load32(&raw[4]) & 0x3f) : 0;
	const uint32_t blocks = size ? static_cast<uint32_t>((size + 63) / 64) : 1;

	if (blocks > static_cast<uint16_t>(sq_pi_ - sq_head_))
		size = 0; /* reaches beyond what was posted */
	if (size > 64 && !read_sq(static_cast<uint16_t>(sq_head_ + 1), raw.data() + 64, (blocks - 1) * 64))
		size = 0;
	w.counter = sq_head_;
	wc_error error = wc_error::local_qp_op;
	if (size >= 16) {
		const uint8_t fence = raw[11] >> 5;
		/* A fence waits for READs and atomics before it. */
		if (fence >= 2 && outstanding_)
			return step::blocked;
		error = parse(w, {raw.data(), size});
	}
	sq_head_ = static_cast<uint16_t>(sq_head_ + std::min<uint32_t>(blocks, static_cast<uint16_t>(sq_pi_ - sq_head_)));
	w.first_psn = next_psn_;
	if (error == wc_error::none) {
		if (w.opcode == WQE_UMR)
			error = dev.umr(*this, {raw.data(), size});
		else if (is_datagram() && w.opcode != WQE_NOP)
			send_datagram(w, {raw.data(), size});
	}
	if (error != wc_error::none) {
		fail(w, error, vendor_of(error));
	} else if (w.opcode == WQE_UMR || w.opcode == WQE_NOP || is_datagram()) {
		w.done = true;
	} else {
		const bool atomic = w.opcode == WQE_CAS || w.opcode == WQE_FAA;
		w.packets = atomic ? 1 : std::max(1u, (w.length + mtu - 1) / mtu);
		next_psn_ = (next_psn_ + w.packets) & psn_mask;
	}
	inflight_.push_back(std::move(w));
	return step::done;
}

void qp::send_datagram(send_wqe &w, const_bytes raw)
{
	const const_bytes av = raw.subspan(16);
	const uint32_t dqp = load32(&av[8]);
	packet *p = dev.fab.pool.get(packet_pool::for_requests);

	if (!p) {
		/* fetch() looked; datagrams may be lost. */
		return;
	}
	p->opcode = w.opcode == WQE_SEND_IMM ? BTH_UD | BTH_SEND_ONLY_IMM : BTH_UD | BTH_SEND_ONLY;
	if (!dev.ethernet) {
		p->slid = dev.lid;
		p->dlid = load16(&av[14]);
		p->sl = av[12] & 0xf;
	}
	p->dqpn = dqp & 0xffffff;
	p->sqpn = st == ST_QP1 ? 1 : st == ST_QP0 ? 0 : qpn;
	/* With the top bit set the QP's own key goes out: users cannot make one up. */
	const uint32_t key = load32(&av[0]);
	p->qkey = key & 1u << 31 ? qkey : key;
	p->imm = w.imm;
	p->solicited = w.solicited;
	p->psn = next_psn_;
	next_psn_ = (next_psn_ + 1) & psn_mask;
	p->size = w.length;
	const mem_result r = gather(w, 0, p->data.data(), w.length);
	if (r != mem_result::ok) {
		dev.fab.pool.put(p);
		fail(w, local_error(r), vendor_of(local_error(r)));
		return;
	}
	constexpr size_t bth_deth = 12 + 8;
	if (dev.ethernet) {
		/* Global always, whatever the bit of the address vector says that InfiniBand has for it. */
		const roce_address *from = av.size() >= 48 ? dev.address(load32(&av[28]) >> 20 & 0xff) : nullptr;
		if (!from || !(dqp & av_extended)) {
			dev.fab.pool.put(p);
			fail(w, wc_error::local_qp_op, vendor_of(wc_error::local_qp_op));
			return;
		}
		roce_path to_there{};
		to_there.mac = uint64_t{load16(&av[20])} << 32 | load32(&av[22]);
		std::copy_n(av.begin() + 32, to_there.gid.size(), to_there.gid.begin());
		to_there.tclass = av[26];
		to_there.hop_limit = av[27];
		to_there.priority = av[12] >> 1 & 7;
		to_there.flow_label = load32(&av[28]) & 0xfffff;
		to_there.sport = load16(&av[14]);
		put_route(*p, *from, to_there);
		put_length(*p, bth_deth + (w.opcode == WQE_SEND_IMM ? 4 : 0) + ((w.length + 3) & ~3u));
	} else if (dqp & av_extended && av.size() >= 48 && load32(&av[28]) & av_grh) {
		const uint32_t flow = load32(&av[28]) & 0xfffff;
		p->has_grh = true;
		store32(&p->grh[0], 6u << 28 | uint32_t{av[26]} << 20 | flow);
		store16(&p->grh[4], static_cast<uint16_t>(w.length + bth_deth + icrc_size));
		p->grh[6] = 0x1b;
		p->grh[7] = av[27];
		store64(&p->grh[8], 0xfe80000000000000ull);
		store64(&p->grh[16], dev.guid);
		std::copy_n(av.begin() + 32, 16, p->grh.begin() + 24);
	}
	dev.fab.send(p);
}

qp::step qp::send_packet(send_wqe &w)
{
	const uint32_t psn = (w.first_psn + w.next) & psn_mask;

	if (w.wants_response()) {
		/* Half of all sequence numbers at most, else old and new look alike. */
		if (outstanding_ >= max_requests ||
		    (outstanding_ && psn_diff(psn, acked_psn_) + static_cast<int64_t>(w.packets) >= 0x800000))
			return step::blocked;
	} else if (is_reliable() && psn_diff(psn, acked_psn_) >= static_cast<int32_t>(window)) {
		return step::blocked;
	}
	packet *p = dev.fab.pool.get(packet_pool::for_requests);
	if (!p)
		return step::no_packet;
	address(*p);
	p->dqpn = remote_qpn;
	p->psn = psn;
	p->va = w.va;
	p->rkey = w.rkey;
	p->srqn = w.srqn;
	p->length = w.length;
	p->imm = w.imm;
	p->ack_req = true;

	if (w.opcode == WQE_READ) {
		const uint32_t from = w.next * mtu;
		p->opcode = BTH_READ_REQUEST;
		p->va += from;
		p->length -= from;
		w.next = w.packets;
		++outstanding_;
	} else if (w.wants_response()) {
		p->opcode = w.opcode == WQE_CAS ? BTH_CAS : BTH_FAA;
		p->operand = w.operand;
		p->compare = w.compare;
		w.next = 1;
		++outstanding_;
	} else {
		const uint32_t from = w.next * mtu;
		const bool first = w.next == 0, last = w.next + 1 == w.packets;
		const bool is_write = w.opcode == WQE_WRITE || w.opcode == WQE_WRITE_IMM;
		const bool imm = w.opcode == WQE_WRITE_IMM || w.opcode == WQE_SEND_IMM;
		const uint8_t base = is_write ? BTH_WRITE_FIRST : BTH_SEND_FIRST;

		p->size = std::min(mtu, w.length - from);
		p->placeable = is_write;
		p->offset = from;
		const mem_result r = gather(w, from, p->data.data(), p->size);
		if (r != mem_result::ok) {
			dev.fab.pool.put(p);
			fail(w, local_error(r), vendor_of(local_error(r)));
			return step::done;
		}
		/* first 0, middle 1, last 2, last with immediate 3, only 4, only with immediate 5 */
		uint8_t kind = first ? (last ? 4 : 0) : (last ? 2 : 1);
		if (last && imm)
			++kind;
		p->opcode = static_cast<uint8_t>(base + kind);
		if (last && w.opcode == WQE_SEND_INVAL)
			p->opcode = first ? BTH_SEND_ONLY_INV : BTH_SEND_LAST_INV;
		if (st == ST_UC)
			p->opcode |= BTH_UC;
		p->solicited = last && w.solicited;
		p->ack_req = last || w.next % ack_interval == ack_interval - 1;
		++w.next;
		if (last && !is_reliable())
			w.done = true;
	}
	dev.fab.send(p);
	if (is_reliable() && deadline == UINT64_MAX)
		start_timer();
	return step::done;
}

bool qp::requester_turn()
{
	constexpr int packets_per_turn = 16;

	for (int i = 0; i < packets_per_turn; ++i) {
		if (state != qp_state::rts || waiting_rnr_)
			return false;
		if (cursor_ == inflight_.size()) {
			if (stalled_)
				return false;
			switch (fetch()) {
			case step::done:
				break;
			case step::blocked:
				return false;
			case step::no_packet:
				return true;
			}
		}
		send_wqe &w = inflight_[cursor_];
		if (!w.done) {
			switch (send_packet(w)) {
			case step::done:
				break;
			case step::blocked:
				return false;
			case step::no_packet:
				return true;
			}
		}
		if (w.done || w.next == w.packets) {
			++cursor_;
			retire();
		}
	}
	return true;
}

/* @w fails once all before it are done; nothing after it is sent. */
void qp::fail(send_wqe &w, wc_error error, uint8_t vendor) noexcept
{
	w.error = error;
	w.vendor = vendor;
	w.done = true;
	stalled_ = true;
}

void qp::complete_send(const send_wqe &w)
{
	cqe e;

	e.opcode = CQE_REQ;
	e.error = w.error;
	e.vendor = w.vendor;
	e.qpn = qpn;
	e.uidx = uidx;
	e.wqe_opcode = w.opcode;
	e.counter = w.counter;
	e.byte_count = w.length;
	if (w.error == wc_error::flushed) {
		dev.count(NPHCA_FLUSHED);
	} else if (w.error != wc_error::none) {
		dev.count(NPHCA_QP_ERRORS);
		dev.count(counter_of(w.error));
		dev.log(NPHCA_LOG_DEBUG, "port %u: qp 0x%x: request %u (opcode 0x%x) failed with 0x%x", dev.lid, qpn, w.counter,
			w.opcode, static_cast<unsigned int>(w.error));
	}
	dev.complete(cqn_send, e);
}

/* Complete, in order, what is done. */
void qp::retire()
{
	while (!inflight_.empty() && inflight_.front().done) {
		const send_wqe w = std::move(inflight_.front());
		inflight_.pop_front();
		if (cursor_)
			--cursor_;
		if (w.error != wc_error::none) {
			complete_send(w);
			if (is_reliable() || st == ST_REG_UMR) {
				to_error(0);
			} else {
				state = qp_state::sqer;
				flush_send();
			}
			return;
		}
		if (w.signaled)
			complete_send(w);
	}
	if (inflight_.empty() && is_reliable() && !waiting_rnr_ && state == qp_state::rts)
		dev.fab.set_timer(*this, UINT64_MAX);
}

void qp::flush_send()
{
	std::array<uint8_t, 16> control;

	if (!has_sq)
		return;
	for (send_wqe &w : inflight_) {
		w.error = wc_error::flushed;
		w.vendor = vendor_of(w.error);
		complete_send(w);
	}
	inflight_.clear();
	cursor_ = 0;
	outstanding_ = 0;
	while (sq_head_ != sq_pi_) {
		send_wqe w;
		uint32_t blocks = 1;
		w.counter = sq_head_;
		w.error = wc_error::flushed;
		w.vendor = vendor_of(w.error);
		if (read_sq(sq_head_, control.data(), control.size())) {
			w.opcode = control[3];
			blocks = std::max(1u, ((load32(&control[4]) & 0x3f) + 3) / 4);
		}
		complete_send(w);
		sq_head_ = static_cast<uint16_t>(sq_head_ + std::min<uint32_t>(blocks, static_cast<uint16_t>(sq_pi_ - sq_head_)));
	}
}

void qp::start_timer() noexcept
{
	/* Until a receiver is ready its timer runs, and no other. */
	if (ack_timeout && !waiting_rnr_)
		dev.fab.set_timer(*this, dev.fab.now() + (4096ull << ack_timeout));
}

void qp::progress() noexcept
{
	retries_ = rnr_retries_ = patience_ = 0;
	asked_again_ = false;
	start_timer();
}

void qp::count_outstanding() noexcept
{
	outstanding_ = 0;
	for (size_t i = 0; i < cursor_; ++i)
		if (inflight_[i].wants_response() && !inflight_[i].done)
			++outstanding_;
}

/* Send again from @psn on, unless that is still to be sent. */
void qp::retransmit(uint32_t psn)
{
	for (size_t i = 0; i < inflight_.size(); ++i) {
		send_wqe &w = inflight_[i];
		if (w.done || !w.packets)
			continue;
		const int32_t into = psn_diff(psn, w.first_psn);
		if (into >= static_cast<int32_t>(w.packets))
			continue;
		if (i > cursor_ || (i == cursor_ && into > 0 && static_cast<uint32_t>(into) > w.next))
			return;
		cursor_ = i;
		w.next = into > 0 ? static_cast<uint32_t>(into) : 0;
		if (w.wants_response() && w.next < w.received)
			w.next = w.received;
		for (++i; i < inflight_.size(); ++i)
			inflight_[i].next = inflight_[i].received;
		count_outstanding();
		dev.count(NPHCA_RETRANSMISSIONS);
		dev.fab.ready(*this);
		return;
	}
}

/*
 * Something after @psn was answered before it was. That takes one more request,
 * however many answers are out of sequence; if it gets lost the timer asks.
 */
void qp::ask_again(uint32_t psn)
{
	if (asked_again_)
		return;
	asked_again_ = true;
	retransmit(psn);
}

/* All requests up to @psn were executed. */
void qp::acknowledged(uint32_t psn)
{
	bool lost = false;
	uint32_t from = 0;

	for (send_wqe &w : inflight_) {
		if (w.done || !w.packets)
			continue;
		if (psn_diff(psn, w.first_psn) < 0)
			break;
		if (w.wants_response()) {
			/* Its response should have come first. */
			from = (w.first_psn + w.received) & psn_mask;
			lost = psn_diff(psn, from) >= 0;
			break;
		}
		if (psn_diff(psn, w.first_psn + w.packets - 1) < 0)
			break;
		w.done = true;
	}
	const uint32_t next = lost ? from : (psn + 1) & psn_mask;
	if (psn_diff(next, acked_psn_) > 0) {
		acked_psn_ = next;
		progress();
	}
	if (lost)
		ask_again(from);
}

void qp::fail_at(uint32_t psn, wc_error error, uint8_t vendor)
{
	for (send_wqe &w : inflight_) {
		if (w.done || !w.packets)
			continue;
		const int32_t into = psn_diff(psn, w.first_psn);
		if (into < 0)
			break;
		if (into < static_cast<int32_t>(w.packets)) {
			if (w.wants_response() && outstanding_)
				--outstanding_;
			fail(w, error, vendor);
			break;
		}
	}
	retire();
}

void qp::handle_ack(packet &p)
{
	static constexpr uint32_t rnr_delay_us[32] = {
		655360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920,
		2560, 3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520,
	};

	if (state != qp_state::rts || psn_diff(p.psn, next_psn_) >= 0 || psn_diff(p.psn, acked_psn_) < 0)
		return;
	const uint8_t value = p.syndrome & AETH_VALUE;
	switch (p.syndrome & AETH_TYPE) {
	case AETH_ACK:
		acknowledged(p.psn);
		retire();
		break;
	case AETH_RNR:
		acknowledged((p.psn - 1) & psn_mask);
		retire();
		if (state != qp_state::rts)
			return;
		if (waiting_rnr_)
			return; /* a duplicate */
		if (rnr_retry != 7 && rnr_retries_ >= rnr_retry) {
			fail_at(p.psn, wc_error::rnr_retry, vendor_of(wc_error::rnr_retry));
			return;
		}
		++rnr_retries_;
		retransmit(p.psn);
		waiting_rnr_ = true;
		/* May be earlier than an acknowledgement's time-out, or later. */
		dev.fab.set_timer(*this, UINT64_MAX);
		dev.fab.set_timer(*this, dev.fab.now() + uint64_t{1000} * rnr_delay_us[value]);
		return;
	case AETH_NAK: {
		acknowledged((p.psn - 1) & psn_mask);
		retire();
		if (state != qp_state::rts)
			return;
		if (value == NAK_SEQUENCE) {
			retransmit(p.psn);
			break;
		}
		const wc_error error = value == NAK_INVALID ? wc_error::remote_invalid :
				       value == NAK_ACCESS  ? wc_error::remote_access :
							      wc_error::remote_op;
		fail_at(p.psn, error, vendor_of(error));
		return;
	}
	default:
		return;
	}
	if (state == qp_state::rts)
		dev.fab.ready(*this);
}

/*
 * The request that a response with data belongs to, and which of its packets it is; or
 * null: it is an old one, or one before it has been lost and is asked for again.
 */
send_wqe *qp::awaiting(const packet &p, uint32_t *into)
{
	for (send_wqe &w : inflight_) {
		if (w.done || !w.packets)
			continue;
		const int32_t diff = psn_diff(p.psn, w.first_psn);
		if (diff < 0)
			return nullptr;
		*into = static_cast<uint32_t>(diff);
		if (*into < w.packets)
			return &w;
		if (w.wants_response()) {
			ask_again((w.first_psn + w.received) & psn_mask);
			return nullptr;
		}
		/* Executed before the READ or atomic was. */
		w.done = true;
	}
	retire();
	if (state == qp_state::rts)
		dev.fab.ready(*this);
	return nullptr;
}

void qp::handle_read_response(packet &p)
{
	uint32_t into = 0;
	send_wqe *w = state == qp_state::rts ? awaiting(p, &into) : nullptr;

	if (!w || w->opcode != WQE_READ || into < w->received)
		return;
	if (into > w->received) {
		ask_again((w->first_psn + w->received) & psn_mask);
		return;
	}
	const uint32_t at = w->received * mtu;
	wc_error error = wc_error::none;
	if (p.size != std::min(mtu, w->length - at))
		error = wc_error::bad_response;
	else if (const mem_result r = scatter(w->sgl, at, p.data.data(), p.size, self()); r != mem_result::ok)
		error = local_error(r);
	if (error == wc_error::none) {
		++w->received;
		acked_psn_ = (p.psn + 1) & psn_mask;
		progress();
		w->done = w->received == w->packets;
	}
	if ((w->done || error != wc_error::none) && outstanding_)
		--outstanding_;
	if (error != wc_error::none)
		fail(*w, error, vendor_of(error));
	retire();
	if (state == qp_state::rts)
		dev.fab.ready(*this);
}

void qp::handle_atomic_response(packet &p)
{
	uint32_t into = 0;
	send_wqe *w = state == qp_state::rts ? awaiting(p, &into) : nullptr;

	if (!w || (w->opcode != WQE_CAS && w->opcode != WQE_FAA))
		return;
	/* In host order, as the driver asks of its requesters. */
	std::array<uint8_t, 8> value;
	std::memcpy(value.data(), &p.operand, value.size());
	const mem_result r = scatter(w->sgl, 0, value.data(), 8, self());
	if (outstanding_)
		--outstanding_;
	w->received = 1;
	acked_psn_ = (p.psn + 1) & psn_mask;
	progress();
	if (r != mem_result::ok)
		fail(*w, local_error(r), vendor_of(local_error(r)));
	else
		w->done = true;
	retire();
	if (state == qp_state::rts)
		dev.fab.ready(*this);
}

void qp::timer()
{
	constexpr uint64_t last_look = 64000000; /* ns */
	constexpr uint8_t max_patience = 3;

	if (state == qp_state::err) {
		flush_recv();
		flush_poll_ = std::min(flush_poll_ * 2, last_look);
		dev.fab.set_timer(*this, dev.fab.now() + flush_poll_);
		return;
	}
	if (state != qp_state::rts)
		return;
	if (waiting_rnr_) {
		waiting_rnr_ = false;
		start_timer();
		dev.fab.ready(*this);
		return;
	}
	for (send_wqe &w : inflight_) {
		if (w.done || !w.packets)
			continue;
		if (!w.next && !waiting)
			return; /* nothing is on its way */
		/*
		 * A time-out may take four times as long as asked for. Where DMA
		 * is slow the answer is probably waiting behind other work here.
		 */
		if (patience_ < max_patience && dev.fab.busy()) {
			++patience_;
			start_timer();
			return;
		}
		patience_ = 0;
		if (retries_ >= retry_count) {
			if (w.wants_response() && outstanding_)
				--outstanding_;
			fail(w, wc_error::retry, vendor_of(wc_error::retry));
			retire();
			return;
		}
		++retries_;
		asked_again_ = false;
		retransmit(acked_psn_);
		start_timer();
		return;
	}
}

} // namespace nphca
