/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The peer of all unit tests: its regions, and what its kernel and its HCA do with them. It moves nothing by
 * itself. sim drives it step by step for the engine, and hca does so at once for the objects around it.
 *
 * Regions have pages that become absent and resident in the two steps of the design (word, then mapping; mapping,
 * then word). An absent page reads as the signature and swallows WRITEs. A leased page stays where it is until the
 * lease is released.
 */
#ifndef NPR_TESTS_PEER_HPP
#define NPR_TESTS_PEER_HPP

#include <rdma/nprdma.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <infiniband/verbs.h>
#include <map>
#include <span>
#include <vector>

namespace npr::test {

inline constexpr std::uint64_t signature = 0x5a17c0de9e3779b9ULL;

struct peer {
	struct page {
		bool mapped_read = false, mapped_write = false; /* where DMA goes */
		std::uint64_t word = 0;
		unsigned holds = 0;
		bool stale = false; /* the owner has taken it away from under the holds */
	};

	struct region {
		rdma_np_region_info info{};
		std::uint32_t rkey = 0;
		std::vector<std::byte> *memory = nullptr; /* from info.base on */
		std::vector<std::uint64_t> *stamps = nullptr; /* by byte: who wrote it last, if somebody asks */
		std::vector<page> pages;
		bool gone = false, forgotten = false, known = false;
		bool pinned = false; /* its key is all there is, and RESOLVE knows nothing of it */
		bool ending = false; /* it is to die when its leases are back, and grants none */

		[[nodiscard]] std::uint64_t page_of(std::uint64_t offset) const;
	};

	struct hold {
		region *of;
		std::vector<std::uint64_t> pages;
		bool lease = false, recalled = false;
		bool write = false;	/* of a lease, like its key */
		std::uint32_t key = 0;
	};

	/* Where bytes of a request go. */
	struct target {
		region *of;	    /* null: no key's */
		std::uint64_t addr; /* on the wire */
		std::uint64_t start; /* in the region */
		bool write_window;
	};

	/* --- regions, and what their owner does --- */
	region &add_region(std::uint64_t base, std::uint64_t length, std::uint32_t rkey);
	void kill_region(region &r);
	/* The region dies; one with the same rkey and memory takes its place, its keys swapped. */
	region &replace_region(region &r);
	/* The same, and the new one is pinned memory. */
	region &pin_region(region &r);
	void page_out(region &r, std::uint64_t page);
	/* Held or not: the owner unmaps it. DMA of those who hold it still reaches what it was. */
	void page_taken(region &r, std::uint64_t page);
	void page_in(region &r, std::uint64_t page, bool write);
	void all_in(region &r, bool write);
	void all_out(region &r);
	[[nodiscard]] bool has_leases(const region &r) const;

	/* --- its kernel --- */
	/* To a RESOLVE: 0, or a negative errno. */
	int tell_region(std::uint32_t rkey, std::uint64_t addr, rdma_np_region_info &info);
	/* To a FAULT on @r: @status, or what is worse. @lends: a lease may be had. */
	rdma_np_event answer_fault(region &r, const rdma_np_fault_req &req, std::span<const rdma_np_range> ranges,
				   rdma_np_status status = RDMA_NP_OK, bool lends = true);
	/* A page has a hold less. */
	static void unhold(page &p);
	/* False: there is no such hold. */
	bool end_hold(std::uint64_t id);
	[[nodiscard]] static rdma_np_event gone_event(const region &r);
	[[nodiscard]] rdma_np_event recall_event(std::uint64_t hold) const;

	/* --- its HCA --- */
	region *by_key(std::uint32_t key, std::uint32_t rdma_np_region_info::*which);
	[[nodiscard]] const hold *by_lease(std::uint32_t key) const;
	/* Is it a key that some lease has, or had? */
	[[nodiscard]] static bool is_lease_key(std::uint32_t key) { return key >= first_lease_key; }
	/* @n bytes of @wr, from @addr on. */
	target target_of(const ibv_send_wr &wr, std::uint64_t addr, std::uint64_t n);
	static void read(const target &t, std::span<std::byte> bytes);
	/* False: into scratch, all of them, which lie in one page. */
	static bool write(const target &t, std::span<const std::byte> bytes);
	/* The same; @old: what was there. */
	static bool atomic(const target &t, const ibv_send_wr &wr, std::uint64_t &old);
	/* Words of @r, from @addr on. */
	static void read_words(const region &r, std::uint64_t addr, std::span<std::byte> bytes);

	std::deque<region> regions;
	std::deque<std::vector<std::byte>> memories;
	std::map<std::uint64_t, hold> holds;

private:
	static constexpr std::uint32_t first_lease_key = 0x1000000;

	void new_keys(region &r);
	void grant(region &r, std::span<const rdma_np_range> ranges, bool write, bool lends, rdma_np_event &e);

	std::uint64_t next_id_ = 100, next_hold_ = 1;
	std::uint32_t next_key_ = 0x1000, next_lease_key_ = first_lease_key;
};

[[nodiscard]] constexpr bool is_atomic(ibv_wr_opcode op)
{
	return op == IBV_WR_ATOMIC_CMP_AND_SWP || op == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

[[nodiscard]] constexpr bool takes_receive(ibv_wr_opcode op)
{
	return op == IBV_WR_SEND || op == IBV_WR_RDMA_WRITE_WITH_IMM;
}

/* Must it take effect exactly once? */
[[nodiscard]] constexpr bool is_once(ibv_wr_opcode op)
{
	return op == IBV_WR_RDMA_WRITE_WITH_IMM || is_atomic(op);
}

[[nodiscard]] constexpr bool changes_memory(ibv_wr_opcode op)
{
	return op == IBV_WR_RDMA_WRITE || is_once(op);
}

/* What an HCA says of a success. */
void complete_as(ibv_wc &wc, ibv_wr_opcode opcode, std::span<const ibv_sge> sges);

} // namespace npr::test

#endif
