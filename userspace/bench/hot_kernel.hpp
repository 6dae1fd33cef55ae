/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The kernel of objects_bench and preload_bench: all memory is hot, and it leases what it is asked for. */
#ifndef NPR_BENCH_HOT_KERNEL_HPP
#define NPR_BENCH_HOT_KERNEL_HPP

#include "world/kernel.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <sys/eventfd.h>
#include <utility>
#include <vector>

namespace npr::bench {

/* The peer's region, whatever the key. */
inline constexpr std::uint64_t base = 1ULL << 30, length = 1ULL << 20;
/* What the HCA is given for local buffers that are held. */
inline constexpr std::uint32_t held_lkey = 0xbeef00;

struct hot_kernel final : kernel {
	int query(rdma_np_query &q) noexcept override
	{
		q = {RDMA_NP_ABI_VERSION, 0, 8, 512, 4, 0};
		return 0;
	}
	int channel(int &fd) noexcept override
	{
		fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
		return fd < 0 ? -errno : 0;
	}
	std::atomic<std::uint64_t> *map_posted(int) noexcept override { return &posted; }
	void unmap_posted(std::atomic<std::uint64_t> *) noexcept override {}
	/* False: there is none on this channel. */
	bool take(int fd, rdma_np_event &to) noexcept
	{
		const std::lock_guard lock(mutex);
		const auto e = std::find_if(events.begin(), events.end(), [fd](const auto &x) { return x.first == fd; });

		if (e == events.end())
			return false;
		to = e->second;
		events.erase(e);
		return true;
	}
	int read_events(int fd, std::span<rdma_np_event> to) noexcept override
	{
		eventfd_t n;

		if (take(fd, to[0]))
			return 1;
		(void)eventfd_read(fd, &n);
		return 0;
	}
	int resolve(const ibv_qp &, int, std::uint32_t, std::uint64_t, rdma_np_region_info &i) noexcept override
	{
		i = {1, base, length, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
		     0x103, 0x101, 0x102, base, base, 0, 0x5a17c0de9e3779b9ULL, 12, 6, RDMA_NP_READ_IN_ORDER, 0,
		     RDMA_NP_MAX_PAGES, RDMA_NP_MAX_RANGES, 16, {}};
		return 0;
	}
	int fault(const ibv_qp &, int channel, const rdma_np_fault_req &req,
		  std::span<const rdma_np_range> ranges) noexcept override
	{
		rdma_np_event event{};
		event.type = RDMA_NP_EVENT_FAULT;
		event.cookie = req.cookie;
		event.region_id = req.region_id;
		event.nr_words = 1;
		event.words[0] = RDMA_NP_WORD_READABLE | RDMA_NP_WORD_WRITABLE;
		event.hold_id = req.flags & RDMA_NP_FAULT_HOLD ? ++remote_holds : 0;
		if (req.flags & RDMA_NP_FAULT_LEASE) {
			event.lease_addr = ranges.back().addr;
			event.lease_length = ranges.back().length;
			event.lease_key = 0x1000 + ++leases;
		}
		const std::lock_guard lock(mutex);
		events.emplace_back(channel, event);
		posted.fetch_add(1);
		return eventfd_write(channel, 1);
	}
	int release(const ibv_qp &, std::uint64_t) noexcept override { return 0; }
	int forget(const ibv_qp &, std::uint64_t) noexcept override { return 0; }
	int hold(std::uint32_t, const rdma_np_hold_req &req, rdma_np_hold_info &info, std::uint32_t &handle, int) noexcept override
	{
		info = {req.addr, held_lkey, 0};
		handle = ++holds;
		return 0;
	}
	int hold_free(std::uint32_t) noexcept override { return 0; }
	int query_mr(const ibv_mr &, rdma_np_mr_info &info) noexcept override
	{
		info = {};
		info.base = reinterpret_cast<std::uintptr_t>(buffer.data());
		info.length = buffer.size();
		return 0;
	}
	int set_error(ibv_qp &) noexcept override { std::abort(); }
	bool connected(ibv_qp &) noexcept override { return true; }
	std::uint64_t tries_for(ibv_qp &) noexcept override { return 0; }

	/* Of all channels, and a page of its own, as who maps it has it. */
	alignas(RDMA_NP_PAGE_SIZE) std::atomic<std::uint64_t> posted{0};
	alignas(RDMA_NP_PAGE_SIZE) std::mutex mutex; /* of the events, for the library's thread reads some */
	std::deque<std::pair<int, rdma_np_event>> events; /* by channel */
	std::atomic<std::uint32_t> leases{0}, holds{0}, remote_holds{0};
	std::vector<std::byte> buffer = std::vector<std::byte>(1 << 20);
};

} // namespace npr::bench

#endif
