/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The link: a cable from the switch of this fabric to that of another process.
 *
 * A packet for a LID that no port of this fabric has goes out as InfiniBand
 * packets look on a wire (local and base transport header, the extended headers
 * that its opcode asks for, the payload), but for the checksums, which a socket
 * does not need. What comes in goes to a port of this fabric or nowhere, never
 * out again. Nothing that comes in is believed: a packet is taken as far as it
 * has the size its headers say and comes from a LID that is not ours.
 *
 * On its way in a packet may be lost, duplicated and delayed, each with a
 * probability, from a seeded sequence; a delayed packet is overtaken by those
 * behind it. A link that is down carries nothing in either direction. The two
 * switches' ports stay active all the while: between them there might be more
 * than one link.
 */
#ifndef NPHCA_LINK_H
#define NPHCA_LINK_H

#include <array>
#include <atomic>
#include <deque>
#include <queue>
#include <vector>

#include "bits.h"
#include "fabric.h"
#include "nphca.h"

namespace nphca {

/*
 * LRH, or Ethernet header, tag and UDP header; GRH or another network header, BTH, the
 * longest extended headers and immediate data, payload, and on Ethernet an ICRC
 */
inline constexpr size_t max_wire = 26 + grh_size + 12 + 4 + 28 + 4 + max_mtu + icrc_size;

/* The packet as it is on the wire; returns its size, 0 if it is none. */
[[nodiscard]] size_t encode(packet &p, std::array<uint8_t, max_wire> &raw) noexcept;
/* False: not a packet of this fabric's kind, and @p is undefined. */
[[nodiscard]] bool decode(const_bytes raw, packet &p, bool ethernet = false) noexcept;

class link {
public:
	link(fabric &f, const nphca_link_ops &ops, void *host);

	/* Any thread */
	[[nodiscard]] uint64_t knob_get(uint32_t knob) const noexcept;
	bool knob_set(uint32_t knob, uint64_t value) noexcept;

	/* Polling thread */
	void send(packet &p);
	/* What has come, what may go at last; true if there may be more. */
	bool poll();
	/* When the next delayed packet arrives. */
	[[nodiscard]] uint64_t deadline() const noexcept;
	/* The other side does not take what is sent: who can wait has to. */
	[[nodiscard]] bool blocked() const noexcept { return !out_.empty(); }

private:
	struct delayed {
		uint64_t when, number;
		packet *p;
		bool operator>(const delayed &other) const noexcept
		{
			return when != other.when ? when > other.when : number > other.number;
		}
	};

	[[nodiscard]] uint64_t knob(nphca_link_knob k) const noexcept
	{
		return knobs_[k].load(std::memory_order_relaxed); /* read afresh often enough */
	}
	void count(nphca_link_knob k) noexcept { knobs_[k].fetch_add(1, std::memory_order_relaxed); }
	uint64_t random() noexcept;
	bool chance(nphca_link_knob k) noexcept;
	void arrive(packet *p);
	void deliver(packet *p);

	/* Waiting packets are few, so that the pool and other links of the fabric stay usable. */
	static constexpr size_t max_out = 1024, max_delayed = 512;

	fabric &fab_;
	nphca_link_ops ops_;
	void *host_;
	std::deque<std::vector<uint8_t>> out_;
	std::priority_queue<delayed, std::vector<delayed>, std::greater<>> delayed_;
	uint64_t number_ = 0;	   /* of delayed packets so far */
	uint64_t seed_ = 0, random_ = 0;
	std::array<uint8_t, max_wire> raw_;
	std::array<std::atomic<uint64_t>, NPHCA_LINK_KNOBS> knobs_{};
};

} // namespace nphca

#endif
