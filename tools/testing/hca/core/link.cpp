// SPDX-License-Identifier: GPL-2.0
/*
 * The link's packet format, its faults, and what waits on either side of it.
 */
#include "link.h"

#include <algorithm>

#include "spec.h"

namespace nphca {

enum : uint8_t { lnh_local = 2, lnh_global = 3 };
enum : uint8_t { ext_xrc = 1, ext_deth = 2, ext_reth = 4, ext_atomic = 8, ext_aeth = 16, ext_atomic_ack = 32, ext_imm = 64,
		 payload = 128 };
static constexpr uint8_t class_xrc = 0xa0;

/* The headers that an opcode has behind the base transport header; 0: there is no such opcode. */
static uint8_t layout(uint8_t opcode) noexcept
{
	const uint8_t cls = opcode & BTH_CLASS;
	const auto kind = static_cast<uint8_t>(opcode & ~BTH_CLASS);
	uint8_t headers = 0;

	switch (kind) {
	case BTH_SEND_FIRST:
	case BTH_SEND_MIDDLE:
	case BTH_SEND_LAST:
	case BTH_SEND_ONLY:
	case BTH_WRITE_MIDDLE:
	case BTH_WRITE_LAST:
		headers = payload;
		break;
	case BTH_SEND_LAST_IMM:
	case BTH_SEND_ONLY_IMM:
	case BTH_WRITE_LAST_IMM:
	case BTH_SEND_LAST_INV:
	case BTH_SEND_ONLY_INV:
		headers = payload | ext_imm;
		break;
	case BTH_WRITE_FIRST:
	case BTH_WRITE_ONLY:
		headers = payload | ext_reth;
		break;
	case BTH_WRITE_ONLY_IMM:
		headers = payload | ext_reth | ext_imm;
		break;
	case BTH_READ_REQUEST:
		headers = ext_reth;
		break;
	case BTH_CAS:
	case BTH_FAA:
		headers = ext_atomic;
		break;
	case BTH_READ_FIRST:
	case BTH_READ_LAST:
	case BTH_READ_ONLY:
		headers = payload | ext_aeth;
		break;
	case BTH_READ_MIDDLE:
		return cls == 0 ? payload : 0;
	case BTH_ACK:
		headers = ext_aeth;
		break;
	case BTH_ATOMIC_ACK:
		headers = ext_aeth | ext_atomic_ack;
		break;
	default:
		return 0;
	}
	switch (cls) {
	case 0:
		return headers;
	case class_xrc: /* responses are those of RC */
		return headers & ext_aeth ? 0 : headers | ext_xrc;
	case BTH_UC:
		return kind <= BTH_WRITE_ONLY_IMM ? headers : 0;
	case BTH_UD:
		return kind == BTH_SEND_ONLY || kind == BTH_SEND_ONLY_IMM ? headers | ext_deth : 0;
	default:
		return 0;
	}
}

size_t encode(packet &p, std::array<uint8_t, max_wire> &raw) noexcept
{
	/* Inside, who serves a request of XRC is a number, and no class of opcodes. */
	const uint8_t opcode = p.srqn && !(p.opcode & BTH_CLASS) ? p.opcode | class_xrc : p.opcode;
	const uint8_t headers = layout(opcode);
	const size_t front = p.ethernet ? frame_header_size(p) : p.has_grh ? 8 + grh_size : 8;
	size_t at = front;

	if (!headers || p.size > max_mtu)
		return 0;
	const uint32_t size = headers & payload ? p.size : 0, pad = -size & 3;
	raw[at] = opcode;
	raw[at + 1] = static_cast<uint8_t>((p.solicited ? 0x80 : 0) | pad << 4);
	store16(&raw[at + 2], p.pkey);
	store32(&raw[at + 4], p.dqpn & 0xffffff);
	store32(&raw[at + 8], (p.ack_req ? 1u << 31 : 0) | (p.psn & psn_mask));
	at += 12;
	if (headers & ext_xrc) {
		store32(&raw[at], p.srqn & 0xffffff);
		at += 4;
	}
	if (headers & ext_deth) {
		store32(&raw[at], p.qkey);
		store32(&raw[at + 4], p.sqpn & 0xffffff);
		at += 8;
	}
	if (headers & ext_reth) {
		store64(&raw[at], p.va);
		store32(&raw[at + 8], p.rkey);
		store32(&raw[at + 12], p.length);
		at += 16;
	}
	if (headers & ext_atomic) {
		store64(&raw[at], p.va);
		store32(&raw[at + 8], p.rkey);
		store64(&raw[at + 12], p.operand);
		store64(&raw[at + 20], p.compare);
		at += 28;
	}
	if (headers & ext_aeth) {
		store32(&raw[at], uint32_t{p.syndrome} << 24 | (p.msn & 0xffffff));
		at += 4;
	}
	if (headers & ext_atomic_ack) {
		store64(&raw[at], p.operand);
		at += 8;
	}
	if (headers & ext_imm) {
		store32(&raw[at], p.imm);
		at += 4;
	}
	std::copy_n(p.data.begin(), size, raw.begin() + static_cast<ptrdiff_t>(at));
	std::fill_n(raw.begin() + static_cast<ptrdiff_t>(at + size), pad, uint8_t{0});
	at += size + pad;
	if (p.ethernet) {
		put_length(p, at - front);
		put_frame_header(p, raw.data());
		store32(&raw[at], 0);
		return at + icrc_size;
	}
	if (p.has_grh)
		std::copy(p.grh.begin(), p.grh.end(), raw.begin() + 8);
	raw[0] = 0;
	raw[1] = static_cast<uint8_t>(p.sl << 4 | (p.has_grh ? lnh_global : lnh_local));
	store16(&raw[2], p.dlid);
	store16(&raw[4], static_cast<uint16_t>(at / 4));
	store16(&raw[6], p.slid);
	return at;
}

/* The size of the headers of InfiniBand in front of the base transport header, 0 if there are none. */
static size_t take_local_header(const_bytes raw, packet &p) noexcept
{
	if (raw.size() < 8 + 12 || raw.size() > max_wire || load16(&raw[4]) * size_t{4} != raw.size() || raw[0])
		return 0;
	const uint8_t lnh = raw[1] & 3;
	if (lnh != lnh_local && lnh != lnh_global)
		return 0;
	p.sl = raw[1] >> 4;
	p.dlid = load16(&raw[2]);
	p.slid = load16(&raw[6]);
	p.has_grh = lnh == lnh_global;
	/* Nothing but multicast goes to more than one port. */
	if (!p.slid || p.slid >= first_multicast_lid || !p.dlid)
		return 0;
	if (!p.has_grh)
		return 8;
	if (raw.size() < 8 + grh_size + 12)
		return 0;
	std::copy_n(raw.begin() + 8, grh_size, p.grh.begin());
	return 8 + grh_size;
}

bool decode(const_bytes raw, packet &p, bool ethernet) noexcept
{
	size_t at = ethernet ? take_frame_header(raw, p) : take_local_header(raw, p);

	if (!at)
		return false;
	if (ethernet) {
		if (raw.size() > max_wire || raw.size() < at + 12 + icrc_size)
			return false;
		raw = raw.first(raw.size() - icrc_size);
	}
	p.opcode = raw[at];
	const uint8_t headers = layout(p.opcode);
	if (!headers || raw[at + 1] & 0x0f)
		return false;
	const size_t pad = raw[at + 1] >> 4 & 3;
	p.solicited = raw[at + 1] & 0x80;
	p.pkey = load16(&raw[at + 2]);
	p.dqpn = load32(&raw[at + 4]) & 0xffffff;
	p.ack_req = raw[at + 8] & 0x80;
	p.psn = load32(&raw[at + 8]) & psn_mask;
	at += 12;
	const size_t need = (headers & ext_xrc ? 4 : 0) + (headers & ext_deth ? 8 : 0) + (headers & ext_reth ? 16 : 0) +
			    (headers & ext_atomic ? 28 : 0) + (headers & ext_aeth ? 4 : 0) +
			    (headers & ext_atomic_ack ? 8 : 0) + (headers & ext_imm ? 4 : 0);
	if (raw.size() - at < need + pad)
		return false;
	if (headers & ext_xrc) {
		p.opcode &= static_cast<uint8_t>(~BTH_CLASS);
		p.srqn = load32(&raw[at]) & 0xffffff;
		at += 4;
	}
	if (headers & ext_deth) {
		p.qkey = load32(&raw[at]);
		p.sqpn = load32(&raw[at + 4]) & 0xffffff;
		at += 8;
	}
	if (headers & ext_reth) {
		p.va = load64(&raw[at]);
		p.rkey = load32(&raw[at + 8]);
		p.length = load32(&raw[at + 12]);
		at += 16;
	}
	if (headers & ext_atomic) {
		p.va = load64(&raw[at]);
		p.rkey = load32(&raw[at + 8]);
		p.operand = load64(&raw[at + 12]);
		p.compare = load64(&raw[at + 20]);
		p.length = 8;
		at += 28;
	}
	if (headers & ext_aeth) {
		p.syndrome = raw[at];
		p.msn = load32(&raw[at]) & 0xffffff;
		at += 4;
	}
	if (headers & ext_atomic_ack) {
		p.operand = load64(&raw[at]);
		at += 8;
	}
	if (headers & ext_imm) {
		p.imm = load32(&raw[at]);
		at += 4;
	}
	const size_t size = raw.size() - at - pad;
	if (size > max_mtu || (size && !(headers & payload)))
		return false;
	p.size = static_cast<uint32_t>(size);
	std::copy_n(raw.begin() + static_cast<ptrdiff_t>(at), size, p.data.begin());
	/* There is one partition. */
	return (p.pkey & 0x7fff) == 0x7fff;
}

link::link(fabric &f, const nphca_link_ops &ops, void *host) : fab_(f), ops_(ops), host_(host)
{
	knob_set(NPHCA_LINK_UP, 1);
	knob_set(NPHCA_LINK_SEED, 1);
}

uint64_t link::knob_get(uint32_t k) const noexcept
{
	return k < NPHCA_LINK_KNOBS ? knobs_[k].load(std::memory_order_relaxed) : 0;
}

bool link::knob_set(uint32_t k, uint64_t value) noexcept
{
	uint64_t highest = 0;

	switch (k) {
	case NPHCA_LINK_UP:
		highest = 1;
		break;
	case NPHCA_LINK_SEED:
		highest = UINT64_MAX;
		break;
	case NPHCA_LINK_LOSS:
	case NPHCA_LINK_DUPLICATE:
	case NPHCA_LINK_DELAY:
		highest = 1000000;
		break;
	case NPHCA_LINK_DELAY_NS:
		highest = 10000000000;
		break;
	default:
		if (k < NPHCA_LINK_COUNTERS || k >= NPHCA_LINK_KNOBS)
			return false;
	}
	if (value > highest)
		return false;
	/* Relaxed: each is read by itself, at the next packet. */
	knobs_[k].store(value, std::memory_order_relaxed);
	return true;
}

/* xorshift, started from the seed by a multiplication, so that near seeds differ at once. */
uint64_t link::random() noexcept
{
	if (const uint64_t seed = knob(NPHCA_LINK_SEED); seed != seed_ || !random_) {
		seed_ = seed;
		random_ = (seed + 1) * 0x9e3779b97f4a7c15ull | 1;
	}
	random_ ^= random_ << 13;
	random_ ^= random_ >> 7;
	random_ ^= random_ << 17;
	return random_ >> 11;
}

bool link::chance(nphca_link_knob k) noexcept
{
	const uint64_t of_a_million = knob(k);

	return of_a_million && random() % 1000000 < of_a_million;
}

void link::send(packet &p)
{
	if (!knob(NPHCA_LINK_UP)) {
		count(NPHCA_LINK_CUT);
		return;
	}
	const size_t size = encode(p, raw_);
	if (!size)
		return;
	count(NPHCA_LINK_SENT);
	if (out_.empty()) {
		const int r = ops_.send(host_, raw_.data(), size);
		if (r < 0)
			count(NPHCA_LINK_UNSENT);
		if (r)
			return;
	}
	if (out_.size() >= max_out)
		count(NPHCA_LINK_UNSENT);
	else
		out_.emplace_back(raw_.begin(), raw_.begin() + static_cast<ptrdiff_t>(size));
}

void link::deliver(packet *p)
{
	if (knob(NPHCA_LINK_UP))
		fab_.deliver_from_link(*p);
	else
		count(NPHCA_LINK_CUT);
	fab_.pool.put(p);
}

void link::arrive(packet *p)
{
	if (!chance(NPHCA_LINK_DELAY)) {
		deliver(p);
		return;
	}
	if (delayed_.size() >= max_delayed) {
		count(NPHCA_LINK_LOST);
		fab_.pool.put(p);
		return;
	}
	count(NPHCA_LINK_DELAYED);
	delayed_.push({fab_.now() + random() % (knob(NPHCA_LINK_DELAY_NS) + 1), number_++, p});
}

bool link::poll()
{
	constexpr int turn = 256;

	while (!out_.empty()) {
		const int r = knob(NPHCA_LINK_UP) ? ops_.send(host_, out_.front().data(), out_.front().size()) : -1;
		if (!r)
			break;
		if (r < 0)
			count(NPHCA_LINK_UNSENT);
		out_.pop_front();
	}
	if (!delayed_.empty())
		for (const uint64_t t = fab_.now(); !delayed_.empty() && delayed_.top().when <= t;) {
			packet *p = delayed_.top().p;
			delayed_.pop();
			deliver(p);
		}
	for (int i = 0; i < turn; ++i) {
		/* What cannot be taken now waits on the other side. */
		packet *p = fab_.pool.get(packet_pool::for_responses);
		if (!p)
			return true;
		const size_t size = ops_.receive(host_, raw_.data(), raw_.size());
		if (!size) {
			fab_.pool.put(p);
			return false;
		}
		bool gone = true;
		if (size > raw_.size() || !decode({raw_.data(), size}, *p, fab_.is_ethernet()) || fab_.from(*p))
			count(NPHCA_LINK_MALFORMED);
		else if (!knob(NPHCA_LINK_UP))
			count(NPHCA_LINK_CUT);
		else if (chance(NPHCA_LINK_LOSS))
			count(NPHCA_LINK_LOST);
		else
			gone = false;
		if (gone) {
			fab_.pool.put(p);
			continue;
		}
		count(NPHCA_LINK_RECEIVED);
		if (chance(NPHCA_LINK_DUPLICATE))
			if (packet *twin = fab_.pool.get(packet_pool::for_responses)) {
				count(NPHCA_LINK_DUPLICATED);
				*twin = *p;
				arrive(twin);
			}
		arrive(p);
	}
	return true;
}

uint64_t link::deadline() const noexcept
{
	return delayed_.empty() ? UINT64_MAX : delayed_.top().when;
}

} // namespace nphca
