/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The fabric: packets, the switch that carries them between ports, the queue
 * through which other threads hand over register accesses, and the scheduler
 * that gives every QP with work its turn.
 *
 * Packets come from a pool of fixed size. Requesters stop well before it is
 * empty, READ responses a little later, so acknowledgements always find one;
 * memory is bounded whatever guests post.
 */
#ifndef NPHCA_FABRIC_H
#define NPHCA_FABRIC_H

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <queue>
#include <unordered_map>
#include <vector>

#include "bits.h"
#include "nphca.h"
#include "roce.h"

namespace nphca {

class device;
class link;
struct qp;

inline constexpr uint32_t max_mtu = 4096;
inline constexpr size_t grh_size = 40, icrc_size = 4;
inline constexpr uint16_t first_multicast_lid = 0xc000;
inline constexpr uint32_t psn_mask = 0xffffff;

struct packet {
	uint16_t slid, dlid;
	uint8_t opcode, sl, syndrome;
	bool ack_req, solicited, has_grh;
	uint16_t pkey;
	uint32_t dqpn, sqpn, psn, msn;
	uint32_t qkey, rkey, length, imm, srqn;
	uint64_t va, operand, compare;
	/* Of a WRITE's packet, whose header does not say that inside a message: where in it. */
	bool placeable;
	uint32_t offset;
	std::array<uint8_t, grh_size> grh;
	/* On Ethernet, which has no LIDs: MAC addresses, a tag, and a network header in place of the GRH. */
	bool ethernet, tagged;
	network kind;
	uint16_t tag, sport;
	uint64_t smac, dmac;
	uint32_t size; /* of the payload */
	std::array<uint8_t, max_mtu> data;
};

class packet_pool {
public:
	static constexpr size_t capacity = 4096;
	/* What each kind of sender leaves to the more urgent ones. */
	static constexpr size_t for_requests = capacity / 2, for_responses = capacity / 4, for_acks = 0;

	packet *get(size_t reserve) noexcept;
	void put(packet *p) noexcept;
	[[nodiscard]] bool available(size_t reserve) const noexcept { return capacity - used_ > reserve; }

private:
	std::vector<std::unique_ptr<packet>> all_; /* grows to capacity as needed */
	std::vector<packet *> free_;
	size_t used_ = 0;
};

/* A register access or request from another thread. */
struct posting {
	device *dev;
	uint64_t offset, value;
	uint32_t size; /* 0: reset */
};

class fabric {
public:
	fabric(const nphca_fabric_ops &ops, void *host);
	~fabric();

	bool poll(uint64_t *deadline);
	[[nodiscard]] bool pending() const noexcept { return posted_.load(std::memory_order_acquire) != 0; }
	void post(const posting &p) noexcept;

	[[nodiscard]] uint64_t now() const noexcept { return ops_.now(host_); }

	/*
	 * A DMA request is under way between these two: the count is odd. What was
	 * translated before an invalidation is waited for, or waits itself for nothing.
	 */
	void begin_dma() noexcept
	{
		/*
		 * Odd before the translation; pairs with drain(). Both read and write the
		 * count: either drain() finds it odd and waits, or this comes later, and
		 * then what was invalidated before drain() is seen by the translation.
		 */
		dma_seq_.fetch_add(1, std::memory_order_acq_rel);
	}
	void end_dma() noexcept
	{
		/* Release: what the request did, and what it posted, is seen by drain(). */
		dma_seq_.store(dma_seq_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
	}
	void drain() noexcept; /* any thread */

	/* All ports of a fabric are of one kind, InfiniBand or Ethernet. */
	bool add(device *dev, uint16_t lid);
	void remove(device *dev);
	[[nodiscard]] uint16_t free_lid() const noexcept;
	[[nodiscard]] device *by_lid(uint16_t lid) const noexcept
	{
		return lid < first_multicast_lid ? by_lid_[lid] : nullptr;
	}
	[[nodiscard]] device *by_mac(uint64_t mac) const noexcept
	{
		const auto it = by_mac_.find(mac);
		return it == by_mac_.end() ? nullptr : it->second;
	}
	/* The one port that @p goes to, if it is here; that which it came from. */
	[[nodiscard]] device *to(const packet &p) const noexcept { return p.ethernet ? by_mac(p.dmac) : by_lid(p.dlid); }
	[[nodiscard]] device *from(const packet &p) const noexcept { return p.ethernet ? by_mac(p.smac) : by_lid(p.slid); }
	[[nodiscard]] static bool is_multicast(const packet &p) noexcept
	{
		return p.ethernet ? is_group_mac(p.dmac) : p.dlid >= first_multicast_lid;
	}
	/* The addresses of a port have changed. */
	void learn_macs();
	[[nodiscard]] bool is_ethernet() const noexcept;

	bool join(const nphca_link_ops &ops, void *host);
	[[nodiscard]] link *uplink() const noexcept { return link_.get(); }
	/* To a port here, if there is one. */
	void deliver_from_link(packet &p);
	/* What is still on its way to @q arrives nowhere. */
	void forget(const qp &q) noexcept;

	packet_pool pool;
	void send(packet *p) noexcept { wire_.push_back(p); }
	/* Are packets or turns still waiting? */
	[[nodiscard]] bool busy() const noexcept { return !wire_.empty() || !late_.empty() || !ready_.empty(); }

	/* Give @q a turn; nothing happens if it waits for one already. */
	void ready(qp &q) noexcept;
	/* ... once the writes before its next answer are in memory. */
	void ready_when_placed(qp &q);
	void set_timer(qp &q, uint64_t when) noexcept;

private:
	struct handle {
		device *dev;
		uint32_t qpn;
	};
	struct timer {
		uint64_t when;
		handle h;
		bool operator>(const timer &other) const noexcept { return when > other.when; }
	};

	void deliver(packet &p);
	bool run_link();
	bool run_postings();
	bool run_wire();
	bool run_ready();
	bool run_timers(uint64_t *deadline);
	void run_posted(uint64_t *deadline) noexcept;
	bool hold_back(packet *p);
	bool run_late(uint64_t *deadline);
	qp *find(const handle &h) noexcept;

	static constexpr size_t max_postings = 65536;
	static constexpr uint64_t drain_limit = 1000000000; /* ns */

	nphca_fabric_ops ops_;
	void *host_;
	std::vector<device *> ports_; /* changed under the mutex */
	std::array<device *, first_multicast_lid> by_lid_{};
	std::unordered_map<uint64_t, device *> by_mac_;
	std::deque<packet *> wire_;
	struct late_packet {
		uint64_t when;
		packet *p;
		bool operator>(const late_packet &other) const noexcept { return when > other.when; }
	};
	std::vector<late_packet> late_; /* a heap: others overtake them */
	std::deque<handle> ready_;
	std::vector<handle> waiting_; /* would be ready, if the link were */
	std::vector<handle> placing_; /* ... if their writes were in memory */
	std::priority_queue<timer, std::vector<timer>, std::greater<>> timers_;
	std::unique_ptr<link> link_;
	std::atomic<uint64_t> dma_seq_{0}; /* written by the polling thread */

	std::mutex mutex_; /* of what follows, up to posted_ */
	std::vector<posting> postings_;
	std::vector<posting> taken_; /* polling thread's */
	/* Number of postings_; written under the mutex, read without by pending(). */
	std::atomic<size_t> posted_{0};
};

} // namespace nphca

#endif
