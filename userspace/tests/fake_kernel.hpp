/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The kernel of the unit tests, with the methods of nprdma: for memory of this process, of which hca has the regions,
 * and for that of its peer. It answers at once, or when it is told to. Real file descriptors, so that real threads
 * sleep there.
 */
#ifndef NPR_TESTS_FAKE_KERNEL_HPP
#define NPR_TESTS_FAKE_KERNEL_HPP

#include "fake_hca.hpp"
#include "world/kernel.hpp"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace npr::fake {

/* What the HCA is given for a local buffer that is held is so far away from it. */
inline constexpr std::uint64_t held_offset = 1ULL << 40;

struct fake_kernel final : npr::kernel {
	/* One end of a channel, and how many events were posted there. */
	struct end {
		end(int r, int w) : reader(r), writer(w) {}
		int reader, writer; /* the kernel's: the library may have closed its own */
		std::atomic<std::uint64_t> posted{0};
	};
	/* Of the peer's memory. */
	struct lease {
		std::uint64_t cookie;
		end *where;
		std::uint64_t of_peer; /* the hold */
	};
	/* Of memory of this process, leased or not. */
	struct local_hold {
		std::uint32_t mr;
		rdma_np_hold_req req;
		std::uint32_t lkey;
		end *where; /* of a lease: for its recall */
	};

	explicit fake_kernel(hca &h);
	~fake_kernel() override;

	/* --- methods --- */
	int query(rdma_np_query &q) noexcept override;
	int channel(int &fd) noexcept override;
	std::atomic<std::uint64_t> *map_posted(int channel) noexcept override;
	void unmap_posted(std::atomic<std::uint64_t> *) noexcept override {}
	int read_events(int channel, std::span<rdma_np_event> events) noexcept override;
	int resolve(const ibv_qp &qp, int channel, std::uint32_t key, std::uint64_t addr,
		    rdma_np_region_info &i) noexcept override;
	int fault(const ibv_qp &qp, int channel, const rdma_np_fault_req &req,
		  std::span<const rdma_np_range> ranges) noexcept override;
	int release(const ibv_qp &qp, std::uint64_t hold) noexcept override;
	int forget(const ibv_qp &qp, std::uint64_t region) noexcept override;
	int hold(std::uint32_t mr, const rdma_np_hold_req &req, rdma_np_hold_info &info, std::uint32_t &handle,
		 int channel) noexcept override;
	int hold_free(std::uint32_t handle) noexcept override;
	int query_mr(const ibv_mr &mr, rdma_np_mr_info &i) noexcept override;
	bool connected(ibv_qp &qp) noexcept override;
	std::uint64_t tries_for(ibv_qp &) noexcept override { return tries; }
	int set_error(ibv_qp &qp) noexcept override;

	/* --- events --- */
	/* An answer comes where it was asked for. */
	end &end_for(const rdma_np_event &e);
	void send(const rdma_np_event &e) { send(e, end_for(e)); }
	void send(const rdma_np_event &e, end &where);
	/* How many answers does it keep? */
	[[nodiscard]] std::size_t answers();

	/* --- leases of the peer's memory --- */
	/* Those of a queue pair are recalled. How many are there? */
	std::size_t recall(std::uint32_t qp_num);
	[[nodiscard]] std::size_t live();
	/* Until there is none; false: for a long time there are some. */
	[[nodiscard]] bool all_back();

	/* --- holds and leases of this process's memory --- */
	/* All leases, or those of region @mr, are wanted back. The newest of their keys. */
	std::uint32_t recall_local(std::optional<std::uint32_t> mr = {});
	/* Of region @mr. Under the mutex. */
	[[nodiscard]] std::size_t count_local_leases(std::uint32_t mr) const;
	[[nodiscard]] std::size_t live_local();
	/* There is one. */
	[[nodiscard]] local_hold only_local();

	/* --- what blocks --- */
	/* RESOLVE of that queue pair does not return until unblock(), but to the test itself. */
	void block(std::uint32_t qp_num);
	void unblock();
	/* False: not so many, for a long time. */
	[[nodiscard]] bool await_resolves(std::size_t n = 1);

	hca &dev;
	std::mutex mutex;
	std::condition_variable gate, entered, returned;

	/* channels */
	int refuse_query = 0, refuse_channel = 0;
	bool maps = true;     /* says how many events there are */
	bool silent = false;  /* channels are never readable, so that a thread comes by its clock only */
	std::atomic<std::uint64_t> reads{0}; /* system calls */
	std::atomic<unsigned> channels{0};   /* asked for */
	std::deque<end> ends;
	std::map<int, end *> end_of; /* of these, by channel */

	/* RESOLVE */
	std::set<std::uint32_t> blocked, asking; /* QP numbers */
	const std::thread::id tester = std::this_thread::get_id();
	std::size_t inside = 0;
	std::set<int> interrupted_by; /* signals: threads that are not the tester's */
	std::set<std::uint32_t> keys;
	std::uint8_t part_shift = 0; /* not 0: the key is of a whole address space */
	std::uint64_t mapped = 0;    /* bytes of it, from the region's base on */
	bool nonsense = false;
	int busy = 0, busy_answer = -EBUSY;
	std::uint64_t tries = std::numeric_limits<std::uint64_t>::max();

	/* FAULT, and what it grants */
	std::atomic<unsigned> forgotten{0};
	bool withhold = false;
	std::vector<rdma_np_event> held; /* withheld answers */
	std::map<std::uint64_t, end *> asked; /* by cookie */
	int refuse_fault = 0; /* once */
	/* Not 0: FAULTs are of memory behind a lease of this local region. The peer is this process. */
	std::uint32_t waits_for_local = 0;
	bool grants = false;  /* leases of the peer's memory */
	static constexpr std::uint64_t first_lease = 1'000'000; /* other holds have the peer's numbers */
	std::atomic<unsigned> leases_asked{0};
	std::uint32_t last_lease_key = 0;
	/* By QP and number, which each peer counts by himself. */
	std::map<std::pair<std::uint32_t, std::uint64_t>, lease> leases;
	std::map<std::uint32_t, std::uint64_t> made;

	/* HOLD */
	int refuse_hold = 0;
	bool block_hold = false; /* until unblock(): as if the memory were on a disk */
	std::size_t most_held = SIZE_MAX; /* at once, leases included: RLIMIT_MEMLOCK */
	std::uint32_t holds_made = 0, most_holds = ~0U;
	std::atomic<unsigned> local_leases_asked{0}, queries{0}, freed{0};
	std::map<std::uint32_t, local_hold> local_holds; /* by handle */
	std::function<void(const local_hold &)> on_free;

private:
	void drop_events(end &e, std::uint64_t cookie);
};

} // namespace npr::fake

#endif
