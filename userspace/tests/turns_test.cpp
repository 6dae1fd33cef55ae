/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The library's thread goes on with requests while the application does something else. */
#include "objects_fixture.hpp"

#include <array>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

using namespace npr::fake;
using namespace std::chrono_literals;

namespace {

struct Turns : Objects {
	Turns() : Objects(0, true) {}

	/* @f() becomes true, with what the provider has under its lock. */
	template <class F> bool soon(F &&f)
	{
		for (const auto begun = std::chrono::steady_clock::now(); std::chrono::steady_clock::now() - begun < 10s;) {
			{
				const std::lock_guard lock(dev.mutex);
				if (f())
					return true;
			}
			std::this_thread::sleep_for(1ms);
		}
		return false;
	}

	std::array<std::byte, 64> b{};
};

/* As of pinned memory: who waits for the data, or for what the peer makes of them, need not poll. */
TEST_F(Turns, RequestsGoOnThoughNobodyPolls)
{
	npr_qp *const qp = attach(1);

	for (const ibv_wr_opcode op : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE}) {
		const std::byte brings{op == IBV_WR_RDMA_READ ? std::uint8_t{0x33} : std::uint8_t{0x22}};

		/* The region is not known yet, and later the pages are not there. */
		for (const std::uint64_t at : {0U, 4096U}) {
			{
				const std::lock_guard lock(dev.mutex);
				std::fill(dev.words.begin(), dev.words.end(), 4);
				std::fill(b.begin(), b.end(), std::byte{0x22});
				std::fill_n(&dev.memory[at], b.size(), std::byte{0x33});
			}
			ASSERT_EQ(post(qp, op, at, b, at + 1), 0);
			EXPECT_TRUE(soon([&] { return b.back() == brings && dev.memory[at + b.size() - 1] == brings; }));
			EXPECT_EQ(next().wr_id, at + 1) << "it is told when somebody polls";
		}
	}
}

/* A pause that somebody's answer makes is over though nobody polls. */
TEST_F(Turns, RequestsThatPauseGoOn)
{
	npr_qp *const qp = attach(1);

	ASSERT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	kernel_ptr->refuse_fault = -EBUSY;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	dev.memory[0] = std::byte{0x44};
	EXPECT_TRUE(soon([&] { return b[0] == std::byte{0x44}; }));
	EXPECT_EQ(next().wr_id, 1U);
}

/* The application may unmap its buffers, which is no harm while the HCA has the memory. */
TEST_F(Turns, DoNotLookAtTheApplicationsBuffers)
{
	npr_qp *const qp = attach(1);

	ASSERT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	dev.words.assign(pages, 4 | 3);
	const auto faults = [&] {
		npr_stats s;
		EXPECT_EQ(npr_get_stats(qp, &s, sizeof(s)), 0);
		return s.faults;
	};
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	EXPECT_EQ(next().wr_id, 1U);
	const auto before = faults();
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 2), 0);
	/* By what the READ has brought nothing more would have been asked for. */
	for (const auto begun = std::chrono::steady_clock::now(); faults() == before;)
		ASSERT_LT(std::chrono::steady_clock::now() - begun, 10s);
	EXPECT_EQ(next().wr_id, 2U);
}

/* It sees what a READ has brought, and so asks for nothing that is there. */
TEST_F(Turns, LeaveWhatCompletesToWhoPolls)
{
	npr_qp *const qp = attach(1);
	npr_stats s;

	ASSERT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	dev.words.assign(pages, 4 | 3);
	for (int i = 0; i < 20; ++i) {
		{
			const std::lock_guard lock(dev.mutex);
			dev.stall = true;
		}
		ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
		const auto begun = std::chrono::steady_clock::now();
		ibv_wc wc;
		int n;
		while (!(n = npr_poll_cq(cq.get(), 1, &wc)))
			if (dev.stall && std::chrono::steady_clock::now() - begun > 5ms)
				dev.go_on();
		ASSERT_EQ(n, 1);
	}
	ASSERT_EQ(npr_get_stats(qp, &s, sizeof(s)), 0);
	/* The machine may let the application wait for longer than a turn does. */
	EXPECT_LT(s.faults, 10U);
}

/* A completion queue without queue pairs may be destroyed at any time. */
TEST_F(Turns, EndWithTheLastQueuePair)
{
	for (int i = 0; i < 20; ++i) {
		npr_qp *const qp = attach(1);
		std::uint64_t polls;

		std::fill(dev.words.begin(), dev.words.end(), 4);
		ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
		EXPECT_EQ(next().wr_id, 1U);
		ASSERT_EQ(npr_detach_qp(qp), 0);
		{
			const std::lock_guard lock(dev.mutex);
			polls = dev.polls;
		}
		std::this_thread::sleep_for(5ms);
		const std::lock_guard lock(dev.mutex);
		EXPECT_EQ(dev.polls, polls);
	}
}

/* The thread sleeps when there is nothing more. */
TEST_F(Turns, EndWithWhatWaitsForThem)
{
	npr_qp *const qp = attach(1);

	for (int i = 0; i < 2; ++i) {
		ASSERT_EQ(post(qp, IBV_WR_RDMA_WRITE, 0, b, 1), 0);
		EXPECT_EQ(next().wr_id, 1U);
		EXPECT_TRUE(soon([&, last = std::uint64_t{0}, same = 0]() mutable {
			/* longer than any pause between two turns */
			same = std::exchange(last, dev.polls) == dev.polls ? same + 1 : 0;
			return same > 300;
		}));
		std::fill(dev.words.begin(), dev.words.end(), 4);
	}
}

} // namespace
