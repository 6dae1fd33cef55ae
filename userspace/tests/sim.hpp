/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The peer and a wire to it for the engine, in one thread, driven step by step.
 *
 * WRITEs take effect in order, in units of 64 bytes; a READ may fetch its units any time after the WRITEs
 * before it, and later READs may overtake it. It is fetched in requests that are cut
 * at multiples of their size behind the READ's first byte (P3), and a unit that lies
 * across two of them comes in two parts. Nothing moves unless a test, or its
 * dice, say so.
 *
 * A region that has leases does not die. A recall is an event like others, and may come before that of its grant. What is posted under a lease the
 * responder cannot tell from anything else: if it is not there any more, data is lost.
 *
 * An atomic is not ordered against a later READ, unless that has a fence. Out of order,
 * READs and WRITEs overtake WRITEs as well, fence or not; completions still come in order.
 *
 * What it checks by itself (as test failures): keys that are used belong to a
 * region that was not forgotten, the send queue and the CQ are not overrun, a region is
 * forgotten only when nothing refers to it, a hold is released once, an effect
 * on memory keeps the order in which the application posted, what has to happen
 * once does.
 */
#ifndef NPR_TESTS_SIM_HPP
#define NPR_TESTS_SIM_HPP

#include "peer.hpp"
#include "protocol/engine.hpp"

#include <deque>
#include <functional>
#include <gtest/gtest.h>
#include <map>
#include <random>
#include <vector>

namespace npr::test {

inline constexpr std::uint32_t words_lkey = 0x77;
inline constexpr std::uint32_t pinned_lkey = 0x11, local_lkey = 0x22;
/* What the HCA is given for the latter, and how far its addresses are away. */
inline constexpr std::uint32_t held_lkey = 0x33;
inline constexpr std::uint64_t held_offset = 1ULL << 52;
/* The same of one that was narrowed. */
inline constexpr std::uint32_t narrow_lkey = 0x34;
inline constexpr std::uint64_t narrow_offset = 1ULL << 51;
/* An unpinned region that does not have the CPU's addresses, and memory that has none. */
inline constexpr std::uint32_t iova_lkey = 0x44, opaque_lkey = 0x55;
inline constexpr std::uint64_t iova_offset = 1ULL << 53, opaque_offset = 1ULL << 54;

using sim_region = peer::region;

/* What the test posted, for the order of effects. */
struct app_op {
	std::uint64_t seq = 0;
	ibv_wr_opcode opcode = IBV_WR_RDMA_READ;
	std::size_t memory = 0; /* index in sim::memories */
	std::uint64_t offset = 0, length = 0;
	std::vector<std::byte> buffer, expected;
	std::uint64_t addend = 0; /* of an atomic */
	bool signaled = true, done = false, began = false;
};

class sim;

/* A CQ of several sims. What is not for their credits is full of what an application has not polled. */
struct sim_cq {
	explicit sim_cq(std::uint32_t entries) : pool(entries) {}

	/* After anything happened to the engine of @s. */
	void settle(sim &s) noexcept;
	void serve() noexcept;
	/* False: it is empty. */
	bool poll();

	credits pool;
	std::deque<std::pair<sim *, ibv_wc>> cqes;
};

class sim : public backend, public credits::waiter, public peer {
public:
	explicit sim(std::uint64_t seed = 1) : rng(seed) {}

	/* --- the world, as the engine sees it --- */
	int post(ibv_send_wr *chain, ibv_send_wr **bad) noexcept override;
	int fault(const rdma_np_fault_req &req, std::span<const rdma_np_range> ranges) noexcept override;
	void release(std::uint64_t hold) noexcept override;
	void forget(std::uint64_t region) noexcept override;
	void resolve(const remote_key &key) noexcept override { resolves.push_back(key); }
	bool is_local(std::uint32_t lkey) noexcept override
	{
		return lkey == local_lkey || lkey == iova_lkey || lkey == unpinned_later;
	}
	bool is_plain(std::uint32_t lkey) noexcept override { return !is_local(lkey) && lkey != opaque_lkey; }
	int hold_local(ibv_sge &sge, bool write, std::uint32_t &hold, cpu_view &view,
		       local_ticket &ticket) noexcept override;
	void free_local(std::uint32_t hold) noexcept override;
	bool local_wanted() noexcept override { return local_recalled; }
	int narrow_local(const ibv_sge &sge, bool write, std::uint32_t &hold, ibv_sge &wire) noexcept override;
	void fail_qp() noexcept override { qp_error = true; }
	bool connected() noexcept override { return !qp_error; }
	nanoseconds now() noexcept override { return clock; }
	nanoseconds recently() noexcept override { return clock; }

	/* --- the peer, whose events the engine hears of --- */
	sim_region &add_region(std::uint64_t base, std::uint64_t length, std::uint32_t rkey);
	sim_region &replace_region(sim_region &r);
	sim_region &pin_region(sim_region &r);
	void kill_region(sim_region &r, bool tell = true);
	/* An event that says so, once. */
	void recall(std::uint64_t hold);
	void recall_all(const sim_region &r);

	/* --- the wire --- */
	struct wire {
		ibv_send_wr wr;
		std::vector<ibv_sge> sges;
		std::vector<std::byte> inlined;
		std::uint64_t length = 0, done = 0; /* bytes */
		std::vector<std::uint32_t> todo;    /* of a READ, what is not fetched yet: see fetch_end() */
		bool started = false, finished = false;
		ibv_wc_status status = IBV_WC_SUCCESS;
	};
	/* Do up to @units units of queue entry @i if the order allows; false if it does not. */
	bool advance(std::size_t i, std::uint64_t units, bool shuffled);
	/* A request of the first READ that is not done. False: there is none. */
	bool advance_request();
	/* All that is posted, completed. */
	void run_wire();
	/* The oldest request alone. */
	void run_wire_first();
	/* The completion of the first entry, if it is finished: to the engine, or into the CQ. */
	bool complete_one();
	void serve_fault(std::size_t i, rdma_np_status status = RDMA_NP_OK);
	void answer_resolve(std::size_t i, int error = 0);
	void deliver(std::size_t i);
	/* Each FAULT answered and each event delivered. */
	void run_control();

	void step() noexcept;

	/* --- for everything at once: until nothing is left to do --- */
	void settle();
	/* One thing that may happen, chosen by dice. */
	void tick();
	/* Nothing is left that the engine could wait for. */
	[[nodiscard]] bool quiet() const
	{
		return queue.empty() && faults.empty() && events.empty() && resolves.empty() &&
		       !attached->deadline();
	}

	[[nodiscard]] std::uint64_t dice(std::uint64_t n) { return rng() % n; }

	struct pending_fault {
		rdma_np_fault_req req;
		std::vector<rdma_np_range> ranges;
	};
	std::mt19937_64 rng;
	engine *attached = nullptr;
	bool quick = false; /* requests and completions go the quick way, and these are told() then */
	std::uint64_t hot_posts = 0, hot_ends = 0;
	std::uint32_t unpinned_later = local_lkey; /* a key that was pinned memory's before local_keys changed */
	std::atomic<std::uint64_t> local_keys{0};
	std::deque<ibv_wc> told;
	std::uint64_t quick_ends = 0;
	void arrives(const ibv_wc &wc) noexcept;
	sim_cq *cq = nullptr; /* shared with others; without it an engine hears of completions at once */
	std::deque<std::vector<std::uint64_t>> stamps; /* by byte: the app_op that wrote it last */
	std::deque<wire> queue;
	std::vector<pending_fault> faults;
	std::vector<rdma_np_event> events;
	std::vector<remote_key> resolves;
	struct local_hold {
		std::uint64_t addr, length;
		bool write;
		sim_region *around = nullptr; /* all of this is held, too */
		bool narrow = false;
	};
	std::map<std::uint32_t, local_hold> local_holds;
	/*
	 * Local buffers are in the part of memory of which this is a region, and what holds them is a lease of that part. Peers
	 * use the region: those of another sim, or, in a loopback, this one.
	 */
	sim_region *leased_around = nullptr;
	bool local_recalled = false; /* these leases are wanted back */
	int narrow_error = 0;	     /* of a hold of a buffer alone; less than 0: and the lease has gone before */
	unsigned narrowed = 0;
	int lease_error = 0; /* what a FAULT that asks for a lease says */
	int local_error = 0; /* what local holds say */
	std::size_t local_errors_from = ~std::size_t{0}; /* -EFAULT, when there are so many */
	std::deque<app_op> ops; /* not retired */
	nanoseconds clock = 1;
	bool qp_error = false;
	bool peer_error = false; /* the peer's QP has ended, too */
	ibv_wc_status refused = IBV_WC_SUCCESS; /* with what the HCA refused what had to be */

	/* faults of the dice */
	unsigned chance_page_out = 0; /* percent of ticks */
	unsigned chance_busy = 0;     /* percent of faults */
	rdma_np_status hold_answer = RDMA_NP_OK; /* to holds: RDMA_NP_ADDRESS as of files on ext4 or DAX */
	unsigned chance_no_hold = 0;  /* percent of holds that the peer has no memory for */
	unsigned chance_rereg = 0;    /* permille of ticks */
	unsigned chance_recall = 0;   /* permille of ticks, and that idle leases go back */
	unsigned chance_no_lease = 0; /* percent of those asked for */
	bool unowned = false;	      /* WRITEs need not be those of an app_op */
	bool sig_all = false;	      /* the HCA tells of everything */
	bool ordered = true;	      /* WRITEs take effect in order; a SEND always waits for them */
	bool lands_once = false;      /* so do WRITEs, lower addresses first; those with immediate of one piece */
	bool out_of_order = false;    /* the responder executes READs and WRITEs in any order (not P1) */
	int refuse_post_after = -1;   /* entries until post() fails */
	ibv_wc_status fail_send = IBV_WC_SUCCESS; /* how the next SEND does */
	std::uint64_t failed_seq = 0; /* the app_op of that SEND */
	std::uint32_t budget = 0;     /* 0: not checked */
	std::uint32_t request = 4096; /* bytes that a READ fetches at once, a multiple of 64 */

	unsigned fault_requests = 0, hold_requests = 0, lease_requests = 0, word_reads = 0, data_reads = 0, writes = 0;
	std::vector<std::uint64_t> released; /* holds, in order */
	unsigned doorbells = 0; /* calls of post() */
	std::vector<std::vector<rdma_np_range>> fault_log;
	std::function<void(sim &)> before_cqe; /* runs before each completion */
	/* What receivers heard: immediate data and byte count. */
	std::vector<std::pair<std::uint32_t, std::uint64_t>> immediates;

private:
	/* Where what a READ fetches at once, from byte @offset on, ends: with its unit, or its request. */
	[[nodiscard]] std::uint64_t fetch_end(const wire &w, std::uint64_t offset) const;
	void execute(wire &w, std::uint64_t offset, std::uint64_t n);
	/* The application's memory behind bytes of an entry. */
	std::byte *memory_of(const ibv_sge &s, std::uint64_t offset, std::uint64_t n, bool write) const;
	void store(wire &w, std::uint64_t offset, std::span<const std::byte> bytes);
	void load(const wire &w, std::uint64_t offset, std::span<std::byte> bytes) const;
	void effect(sim_region &r, std::uint64_t start, std::uint64_t n, const wire &w);
	void execute_atomic(wire &w);

	std::uint32_t next_local_ = 1;
};

/* An application on a sim: posts, polls, and knows what it must see. */
class app {
public:
	explicit app(engine_config config, std::uint64_t seed = 1, sim_cq *cq = nullptr);

	/* Random work on all regions, until @count requests are posted. */
	bool post_random(std::size_t count);
	app_op &post(ibv_wr_opcode opcode, std::size_t memory, std::uint64_t offset, std::uint64_t length,
		     unsigned flags = IBV_SEND_SIGNALED, unsigned sges = 1);
	/* Data for the next WRITE. */
	std::function<void(std::span<std::byte>)> fill;
	unsigned chance_local = 0; /* percent of buffers that are in an unpinned region */
	unsigned chance_opaque = 0; /* percent that the CPU knows by another address, or by none; 100: none */
	unsigned chance_once = 0; /* percent of WRITEs that are atomics or have an immediate */
	/* Meanwhile post() only makes a list, which @whole or not is posted by post_list(). */
	bool listing = false;
	void post_list(bool whole);
	/* Takes completions and checks them against the ops, in order. */
	unsigned poll();
	void finish(std::uint64_t limit = 20'000'000);
	/* All memory is what was written. */
	void check_memory();

	sim world;
	std::vector<std::uint64_t> words;
	engine_config config;
	credits pool{1U << 20}; /* without a CQ that is shared */
	std::unique_ptr<engine> eng;
	std::vector<ibv_wc> completions;
	std::vector<std::vector<std::byte>> reference;
	bool expect_success = true;
	bool unique_data = true; /* no two WRITEs of 8 bytes look the same */
	std::size_t posted = 0;
	int last_rc = 0;
	unsigned max_pages = 8;
	std::size_t window = 0; /* outstanding ops; 0: the depth */

private:
	struct request {
		ibv_send_wr wr{};
		std::vector<ibv_sge> sges;
		std::vector<std::byte> shown; /* inline data */
	};
	[[nodiscard]] bool conflicts(const app_op &o) const;
	/* The engine has it to read, until it returns. */
	int give(bool whole);
	int give_quick(ibv_send_wr &wr, ibv_send_wr **bad, bool whole);

	std::vector<request> list_;
	std::uint64_t next_seq_ = 1;
};

engine_config small_config();

} // namespace npr::test

#endif
