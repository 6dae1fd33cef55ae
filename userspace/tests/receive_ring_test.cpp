/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Receives under leases of this process's memory: by themselves, and of queue pairs. */
#include "objects_fixture.hpp"

#include <chrono>
#include <gtest/gtest.h>

namespace {

using namespace npr::fake;
using npr::local_lease;
using npr::receive_ring;

constexpr std::uint64_t first_id = 0xabcULL << 32 | 5U << receive_ring::index_bits;

ibv_wc completion(std::uint64_t wr_id, ibv_wc_status status = IBV_WC_SUCCESS)
{
	ibv_wc wc{};

	wc.wr_id = wr_id;
	wc.status = status;
	return wc;
}

void become(local_lease &l, local_lease::state s)
{
	l.life = 1U << local_lease::state_bits | static_cast<unsigned>(s);
}

TEST(ReceiveRing, HasAsMuchRoomAsItsQueue)
{
	local_lease l;
	receive_ring none(0, first_id), ring(3, first_id);

	EXPECT_TRUE(none.full());
	EXPECT_TRUE(none.empty());
	ibv_wc wc = completion(first_id);
	EXPECT_FALSE(none.hot_end(wc, 1));
	EXPECT_EQ(wc.wr_id, first_id);
	for (int i = 0; i < 4; ++i) {
		EXPECT_FALSE(ring.full());
		(void)ring.put(1, l);
	}
	EXPECT_TRUE(ring.full());
	ring.take_back();
	EXPECT_FALSE(ring.full());
}

TEST(ReceiveRing, NumbersGoRound)
{
	local_lease l;
	receive_ring ring(4, first_id);
	std::uint64_t last = 0;

	become(l, local_lease::state::live);
	for (std::uint64_t i = 0; i < receive_ring::indices + 3; ++i) {
		l.count_in(1);
		const std::uint64_t id = ring.put(i, l);
		ASSERT_EQ(id >> receive_ring::index_bits, first_id >> receive_ring::index_bits);
		ASSERT_NE(id, last);
		last = id;
		ibv_wc wc = completion(id);
		ASSERT_TRUE(ring.hot_end(wc, 1));
		ASSERT_EQ(wc.wr_id, i);
	}
	EXPECT_EQ(l.counters[1].users, 0U);
	EXPECT_TRUE(ring.empty());
}

TEST(ReceiveRing, WhatIsNotTheOldestOrFailsIsNotHot)
{
	local_lease l;
	receive_ring ring(4, first_id);

	become(l, local_lease::state::live);
	ibv_wc unposted = completion(first_id);
	EXPECT_FALSE(ring.hot_end(unposted, 0));
	for (std::uint64_t i = 0; i < 3; ++i) {
		l.count_in(0);
		EXPECT_EQ(ring.put(10 + i, l), first_id + i);
	}
	for (ibv_wc wc : {completion(first_id + 1), completion(first_id - 1), completion(first_id, IBV_WC_WR_FLUSH_ERR),
			  completion(10)}) {
		const std::uint64_t id = wc.wr_id;
		EXPECT_FALSE(ring.hot_end(wc, 0));
		EXPECT_EQ(wc.wr_id, id);
		EXPECT_EQ(l.counters[0].users, 3U);
	}
	/* What ends one that is not the oldest leaves the others. */
	std::uint64_t id = first_id + 1;
	EXPECT_EQ(ring.end(id), &l);
	EXPECT_EQ(id, 11U);
	id = first_id + 1;
	EXPECT_EQ(ring.end(id), nullptr) << "it is over";
	id = first_id + 3;
	EXPECT_EQ(ring.end(id), nullptr) << "it was never posted";
	id = (first_id + 2) ^ 1ULL << receive_ring::index_bits;
	EXPECT_EQ(ring.end(id), nullptr) << "another ring's";
	ibv_wc wc = completion(first_id);
	EXPECT_TRUE(ring.hot_end(wc, 0));
	EXPECT_EQ(wc.wr_id, 10U);
	id = first_id + 2;
	EXPECT_EQ(ring.end(id), &l);
	EXPECT_EQ(id, 12U);
	EXPECT_TRUE(ring.empty());
}

TEST(ReceiveRing, LeaseThatEndsIsLeftToWhoEndsIt)
{
	local_lease l;
	receive_ring ring(4, first_id);

	become(l, local_lease::state::ending);
	l.count_in(2);
	ibv_wc wc = completion(ring.put(10, l));
	EXPECT_FALSE(ring.hot_end(wc, 2));
	EXPECT_EQ(l.counters[2].users, 1U) << "it was not the last one";
	EXPECT_EQ(ring.end(wc.wr_id), &l);
	EXPECT_EQ(wc.wr_id, 10U);
}

/* --- of a queue pair --- */

struct LeasedReceives : Objects {
	static constexpr std::size_t size = 4 * 4096;
	static constexpr std::uint32_t key = 0x900;

	LeasedReceives()
	{
		mr.context = &dev.context;
		mr.lkey = key;
		mr.handle = 42;
		ctx.regions.add(mr);
		dev.add_region(mr.handle, memory, true);
	}
	~LeasedReceives() override { (void)ctx.regions.remove(mr); }

	[[nodiscard]] int receive(npr_qp *qp, std::uint64_t id, std::size_t page, std::uint32_t length = 64)
	{
		ibv_sge s{start + page * 4096, length, key};
		ibv_recv_wr wr{}, *bad = nullptr;

		wr.wr_id = id;
		wr.sg_list = &s;
		wr.num_sge = 1;
		const int rc = npr_post_recv(qp, &wr, &bad);
		EXPECT_EQ(bad, rc ? &wr : nullptr);
		return rc;
	}
	void arrive(std::uint32_t number, ibv_wc_status status = IBV_WC_SUCCESS)
	{
		ibv_wc wc = completion(dev.receives.front().first, status);

		wc.opcode = status == IBV_WC_SUCCESS ? IBV_WC_RECV : ibv_wc_opcode{};
		wc.qp_num = number;
		dev.receives.pop_front();
		dev.completions.push_back(wc);
	}
	/* Each of the pages is leased, and receives there are in the ring. */
	void warm(npr_qp *qp)
	{
		const auto begun = std::chrono::steady_clock::now();

		for (std::size_t page = 0; page < 4; ++page) {
			const unsigned asked = kernel_ptr->local_leases_asked;
			while (kernel_ptr->local_leases_asked == asked) {
				ASSERT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(20));
				ASSERT_EQ(receive(qp, 1, page), 0);
				arrive(qp->verbs->qp_num);
				ASSERT_EQ(next().wr_id, 1U);
			}
		}
		made = kernel_ptr->holds_made;
	}

	alignas(4096) static inline std::array<std::byte, size> memory;
	const std::uint64_t start = reinterpret_cast<std::uintptr_t>(memory.data());
	ibv_mr mr{};
	std::uint32_t made = 0; /* holds, when all was leased */
};

TEST_F(LeasedReceives, AreOneAfterTheOtherAndNowhereElse)
{
	npr_qp *const qp = attach(1);

	ASSERT_NO_FATAL_FAILURE(warm(qp));
	for (std::uint64_t round = 0; round < 50; ++round) {
		for (std::size_t page = 0; page < 4; ++page)
			ASSERT_EQ(receive(qp, 100 + page, page), 0);
		EXPECT_FALSE(ctx.receives.any()) << "they are in the ring";
		EXPECT_TRUE(is_held(dev.receives[3].second));
		EXPECT_EQ(receive(qp, 5, 0), -ENOMEM) << "as many as the receive queue takes";
		for (std::size_t page = 0; page < 4; ++page) {
			arrive(1, page == 2 && round == 49 ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS);
			EXPECT_EQ(next().wr_id, 100 + page);
		}
	}
	EXPECT_EQ(kernel_ptr->holds_made, made);
	/* One that is longer than its lease has a hold, or a lease, of its own. */
	ASSERT_EQ(receive(qp, 7, 3, 4096), 0);
	EXPECT_EQ(kernel_ptr->holds_made, made);
	ASSERT_EQ(receive(qp, 8, 2, 4097), 0);
	EXPECT_EQ(kernel_ptr->holds_made, made + 1);
	arrive(1);
	arrive(1);
	EXPECT_EQ(next().wr_id, 7U);
	EXPECT_EQ(next().wr_id, 8U);
}

/* A receive may be posted for ever, and with it would be what a longer one had leased. */
TEST_F(LeasedReceives, KeepNoPagesButTheirOwn)
{
	npr_qp *const qp = attach(1);
	const auto begun = std::chrono::steady_clock::now();
	const auto early = [&] { return std::chrono::steady_clock::now() - begun < std::chrono::seconds(5); };
	const auto holds = [&](auto what) {
		const std::lock_guard lock(kernel_ptr->mutex);
		return std::any_of(kernel_ptr->local_holds.begin(), kernel_ptr->local_holds.end(),
				   [&](const auto &h) { return what(h.second.req); });
	};
	const auto is_long = [](const rdma_np_hold_req &r) { return r.length > 4096; };

	ASSERT_NO_FATAL_FAILURE(warm(qp));
	do {
		ASSERT_TRUE(early());
		ASSERT_EQ(receive(qp, 1, 2, 4097), 0);
		arrive(1);
		ASSERT_EQ(next().wr_id, 1U);
	} while (!holds(is_long));
	ASSERT_EQ(receive(qp, 2, 2), 0);
	kernel_ptr->recall_local(mr.handle);
	while (holds(is_long) && early())
		std::this_thread::yield();
	EXPECT_FALSE(holds(is_long));
	EXPECT_TRUE(holds([&](const rdma_np_hold_req &r) { return r.addr == start + 2 * 4096; }));
	arrive(1);
	EXPECT_EQ(next().wr_id, 2U);
}

TEST_F(LeasedReceives, ListGoesOnBehindOneThatIsNotHot)
{
	npr_qp *const qp = attach(1);
	std::array<ibv_sge, 4> s;
	std::array<ibv_recv_wr, 4> wr{};
	ibv_recv_wr *bad = nullptr;

	ASSERT_NO_FATAL_FAILURE(warm(qp));
	for (std::size_t i = 0; i < 4; ++i) {
		s[i] = {start + i * 4096, 8, i == 1 ? 1 : key};
		wr[i].wr_id = 20 + i;
		wr[i].sg_list = &s[i];
		wr[i].num_sge = i == 2 ? 0 : 1;
		wr[i].next = i < 3 ? &wr[i + 1] : nullptr;
	}
	ASSERT_EQ(npr_post_recv(qp, wr.data(), &bad), 0);
	ASSERT_EQ(dev.receives.size(), 4U);
	EXPECT_EQ(dev.receives[1], std::make_pair(std::uint64_t{21}, 1U));
	EXPECT_EQ(dev.receives[2], std::make_pair(std::uint64_t{22}, 0U));
	for (std::size_t i = 0; i < 4; ++i) {
		arrive(1);
		EXPECT_EQ(next().wr_id, 20 + i);
	}
	EXPECT_EQ(kernel_ptr->holds_made, made);
	/* What is refused is told. */
	wr[3].num_sge = 99;
	EXPECT_EQ(npr_post_recv(qp, wr.data(), &bad), -EINVAL);
	EXPECT_EQ(bad, &wr[3]);
}

/* I9, and the lease ends with its last receive. */
TEST_F(LeasedReceives, NoneIsPostedUnderALeaseThatIsRecalled)
{
	npr_qp *const qp = attach(1);

	ASSERT_NO_FATAL_FAILURE(warm(qp));
	ASSERT_EQ(receive(qp, 1, 0), 0);
	const auto holds = [&] {
		const std::lock_guard lock(kernel_ptr->mutex);
		return kernel_ptr->local_holds.size();
	};
	const std::size_t before = holds();
	rdma_np_event e{};
	e.type = RDMA_NP_EVENT_RECALL;
	e.cookie = 0; /* that of the first page */
	kernel_ptr->send(e);
	ASSERT_EQ(receive(qp, 2, 0), 0);
	EXPECT_GT(kernel_ptr->holds_made, made);
	EXPECT_EQ(holds(), before + 1) << "the first one is under way, and has its lease";
	arrive(1);
	EXPECT_EQ(next().wr_id, 1U);
	EXPECT_EQ(holds(), before);
	arrive(1);
	EXPECT_EQ(next().wr_id, 2U);
}

/* They count in RLIMIT_MEMLOCK, and memory that is needed now comes before what may be used again. */
TEST_F(LeasedReceives, GoBackWhereTheLimitOfLockedMemoryIsReached)
{
	npr_qp *const qp = attach(1);
	ibv_mr other = mr;
	ibv_sge s{start, 64, key + 1};
	ibv_recv_wr wr{}, *bad;

	other.lkey = key + 1;
	other.handle = 43;
	ctx.regions.add(other);
	dev.add_region(other.handle, memory, true);
	wr.wr_id = 7;
	wr.sg_list = &s;
	wr.num_sge = 1;
	ASSERT_NO_FATAL_FAILURE(warm(qp));
	{
		const std::lock_guard lock(kernel_ptr->mutex);
		ASSERT_FALSE(kernel_ptr->local_holds.empty());
		kernel_ptr->most_held = kernel_ptr->local_holds.size();
	}
	ASSERT_EQ(npr_post_recv(qp, &wr, &bad), 0) << "none is in use";
	EXPECT_TRUE(is_held(dev.receives.back().second));
	/* What is in use stays, and then there is too little. */
	{
		const std::lock_guard lock(kernel_ptr->mutex);
		EXPECT_EQ(kernel_ptr->local_holds.size(), 1U);
		kernel_ptr->most_held = 1;
	}
	EXPECT_EQ(npr_post_recv(qp, &wr, &bad), -ENOBUFS);
	EXPECT_EQ(dev.receives.size(), 1U);
	arrive(1);
	EXPECT_EQ(next().wr_id, 7U);
	EXPECT_EQ(npr_post_recv(qp, &wr, &bad), 0);
	arrive(1);
	EXPECT_EQ(next().wr_id, 7U);
	(void)ctx.regions.remove(other);
}

TEST_F(LeasedReceives, OfADetachedQueuePairAreNobodys)
{
	ibv_wc wc{};
	npr_qp *const a = attach(1);

	ASSERT_NO_FATAL_FAILURE(warm(a));
	ASSERT_EQ(receive(a, 50, 0), 0);
	ASSERT_EQ(receive(a, 51, 1), 0);
	ASSERT_EQ(npr_detach_qp(a), 0);
	EXPECT_TRUE(dev.dead.count(1)) << "it would go on using them";
	EXPECT_TRUE(ctx.leases.give_back_idle());
	EXPECT_TRUE(kernel_ptr->local_holds.empty()) << "they have no users";
	arrive(1, IBV_WC_WR_FLUSH_ERR);
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0) << "of wr_id " << wc.wr_id;
	/* Nor are they those of the next one with the number. */
	const auto late = dev.receives.front();
	dev.receives.pop_front();
	npr_qp *const again = attach(1);
	ASSERT_NO_FATAL_FAILURE(warm(again));
	ASSERT_EQ(receive(again, 60, 0), 0);
	dev.receives.push_front(late);
	arrive(1, IBV_WC_WR_FLUSH_ERR);
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0) << "of wr_id " << wc.wr_id;
	arrive(1);
	EXPECT_EQ(next().wr_id, 60U);
}

TEST_F(LeasedReceives, RegionThatIsGoneIsNotLookedAt)
{
	npr_qp *const qp = attach(1);

	ASSERT_NO_FATAL_FAILURE(warm(qp));
	ASSERT_TRUE(ctx.regions.remove(mr));
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
	ASSERT_EQ(receive(qp, 1, 0), 0);
	EXPECT_EQ(dev.receives.back(), std::make_pair(std::uint64_t{1}, key)) << "the HCA says what it says";
	arrive(1);
	EXPECT_EQ(next().wr_id, 1U);
	/* Another one, with the same key. */
	mr.handle = 43;
	ctx.regions.add(mr);
	dev.add_region(mr.handle, memory, true);
	ASSERT_EQ(receive(qp, 2, 0), 0);
	EXPECT_TRUE(is_held(dev.receives.back().second));
	EXPECT_EQ(kernel_ptr->local_holds.size(), 1U);
	EXPECT_EQ(kernel_ptr->local_holds.begin()->second.mr, 43U);
	arrive(1);
	EXPECT_EQ(next().wr_id, 2U);
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
}

} // namespace
