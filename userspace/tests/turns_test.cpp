/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The library's thread goes on with requests while the application does something else. */
#include "objects_fixture.hpp"

#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

using namespace npr::fake;
using namespace std::chrono_literals;

namespace {

struct Turns : Objects {
	explicit Turns(bool turns = true) : Objects(0, turns) {}

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

	/* How often the thread has slept. */
	static std::uint64_t sleeps()
	{
		for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
			std::ifstream comm(task.path() / "comm"), status(task.path() / "status");
			std::string word;
			std::uint64_t n;
			if (!(comm >> word) || word != "nprdma-keeper")
				continue;
			while (status >> word)
				if (word == "voluntary_ctxt_switches:" && status >> n)
					return n;
		}
		return 0;
	}

	/* There come no turns any more; false: for a long time there do. */
	static bool end()
	{
		constexpr std::chrono::nanoseconds long_enough(20 * npr::lease_keeper::longest);
		const auto begun = std::chrono::steady_clock::now();
		std::uint64_t last = 0;

		for (auto since = begun; std::chrono::steady_clock::now() - since < long_enough; std::this_thread::sleep_for(1ms)) {
			const std::uint64_t n = sleeps();
			if (std::exchange(last, n) != n)
				since = std::chrono::steady_clock::now();
			if (since - begun > 10s)
				return false;
		}
		return last;
	}

	std::uint64_t faults(npr_qp *qp)
	{
		npr_stats s;

		EXPECT_EQ(npr_get_stats(qp, &s, sizeof(s)), 0);
		return s.faults;
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
				dev.all_out();
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
	dev.all_in();
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	EXPECT_EQ(next().wr_id, 1U);
	const auto before = faults(qp);
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 2), 0);
	/* By what the READ has brought nothing more would have been asked for. */
	for (const auto begun = std::chrono::steady_clock::now(); faults(qp) == before;)
		ASSERT_LT(std::chrono::steady_clock::now() - begun, 10s);
	EXPECT_EQ(next().wr_id, 2U);
}

/* A completion queue without queue pairs may be destroyed at any time. */
TEST_F(Turns, EndWithTheLastQueuePair)
{
	for (int i = 0; i < 20; ++i) {
		npr_qp *const qp = attach(1);
		std::uint64_t polls;

		dev.all_out();
		ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
		EXPECT_EQ(next().wr_id, 1U);
		ASSERT_EQ(npr_detach_qp(qp), 0);
		{
			const std::lock_guard lock(dev.mutex);
			polls = dev.main.polls;
		}
		std::this_thread::sleep_for(5ms);
		const std::lock_guard lock(dev.mutex);
		EXPECT_EQ(dev.main.polls, polls);
	}
}

/* The thread sleeps when there is nothing more, and wakes when there is again. */
TEST_F(Turns, EndWithWhatWaitsForThem)
{
	npr_qp *const qp = attach(1);

	for (std::uint64_t i = 1; i <= 2; ++i) {
		{
			const std::lock_guard lock(dev.mutex);
			dev.all_out();
		}
		ASSERT_EQ(post(qp, IBV_WR_RDMA_WRITE, 0, b, i), 0);
		EXPECT_TRUE(soon([&] { return dev.resident(0) && dev.completions.empty(); }));
		EXPECT_TRUE(end());
		EXPECT_EQ(next().wr_id, i);
	}
}

/* --- one turn --------------------------------------------------------------- */

/* The test takes them, one by one. */
struct OneTurn : Turns {
	OneTurn() : Turns(false), qp(attach(1))
	{
		EXPECT_EQ(npr_resolve(qp, rkey, nullptr), 0);
		dev.all_in();
	}

	/* A READ, which has not completed yet. */
	void begin(std::uint64_t id)
	{
		dev.stall = true;
		ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, id), 0);
		ASSERT_EQ(dev.stalled.size(), 1U);
	}

	void receive(std::uint64_t id)
	{
		ibv_wc wc{};

		wc.wr_id = id;
		wc.opcode = IBV_WC_RECV;
		wc.qp_num = 1;
		const std::lock_guard lock(dev.mutex);
		dev.complete(cq->verbs, wc);
	}

	bool nothing_to_poll()
	{
		ibv_wc wc;

		return !npr_poll_cq(cq.get(), 1, &wc);
	}

	npr_qp *const qp;
};

/* It sees what a READ has brought, and so asks for nothing that is there. */
TEST_F(OneTurn, LeavesWhatCompletesToWhoPolls)
{
	ASSERT_NO_FATAL_FAILURE(begin(1));
	ASSERT_TRUE(nothing_to_poll());
	dev.go_on();
	EXPECT_FALSE(cq->take_turn()) << "then the next one is not soon";
	EXPECT_EQ(dev.completions.size(), 1U);
	const auto before = faults(qp);
	EXPECT_EQ(next().wr_id, 1U);
	EXPECT_EQ(faults(qp), before);

	ASSERT_NO_FATAL_FAILURE(begin(2));
	(void)cq->take_turn();
	dev.go_on();
	EXPECT_TRUE(cq->take_turn()) << "and not to who has polled long ago";
	EXPECT_EQ(next().wr_id, 2U);
}

/* Whoever polled before. */
TEST_F(OneTurn, IsTakenForWhoHasNotPolledSinceTheRequest)
{
	ASSERT_TRUE(nothing_to_poll());
	ASSERT_NO_FATAL_FAILURE(begin(1));
	dev.go_on();
	EXPECT_TRUE(cq->take_turn());
	EXPECT_TRUE(dev.completions.empty());
	EXPECT_EQ(next().wr_id, 1U);
}

/* What the peer takes its time for is no reason to look again soon, nor is what comes for the application meanwhile. */
TEST_F(OneTurn, IsNotSoonWhileNothingGoesOn)
{
	ASSERT_NO_FATAL_FAILURE(begin(1));
	for (std::uint64_t i = 10; i < 15; ++i) {
		EXPECT_FALSE(cq->take_turn());
		receive(i);
		EXPECT_FALSE(cq->take_turn());
	}
	dev.go_on();
	EXPECT_TRUE(cq->take_turn());
	for (std::uint64_t i = 10; i < 15; ++i)
		EXPECT_EQ(next().wr_id, i) << "nothing is lost, nor overtaken";
	EXPECT_EQ(next().wr_id, 1U);
}

/* What is posted next finds that turns are soon. */
TEST_F(OneTurn, IsSoonWhenAllIsDone)
{
	ASSERT_NO_FATAL_FAILURE(begin(1));
	dev.go_on();
	while (!dev.completions.empty())
		EXPECT_TRUE(cq->take_turn());
	for (int i = 0; i < 3; ++i)
		EXPECT_TRUE(cq->take_turn());
	EXPECT_EQ(next().wr_id, 1U);
}

/* Who polls all the time is no reason for turns, nor is what it has seen to by itself. Then what is posted begins them anew. */
TEST_F(OneTurn, IsTheLastOneThoughTheApplicationPolls)
{
	ASSERT_NO_FATAL_FAILURE(begin(1));
	dev.go_on();
	EXPECT_EQ(next().wr_id, 1U);
	for (int i = 0; i < 8; ++i) {
		ASSERT_TRUE(nothing_to_poll());
		EXPECT_FALSE(cq->take_turn());
	}
	ASSERT_TRUE(nothing_to_poll());
	ASSERT_NO_FATAL_FAILURE(begin(2));
	dev.go_on();
	EXPECT_TRUE(cq->take_turn()) << "nobody has polled since they have begun";
	EXPECT_EQ(next().wr_id, 2U);
}

/* The others stay in the completion queue, where the application has counted on them. */
TEST_F(OneTurn, PutsNoMoreAsideThanTheQueueHas)
{
	constexpr std::uint64_t n = 100;
	npr::fake::cq small(dev, 48);
	small.capacity = n;
	ASSERT_EQ(npr_detach_qp(qp), 0);
	auto other = std::make_unique<npr_cq>(ctx, small.base(), 16);
	std::swap(cq, other);
	npr_qp *const q = attach(1);
	ASSERT_EQ(npr_resolve(q, rkey, nullptr), 0);

	dev.stall = true;
	ASSERT_EQ(post(q, IBV_WR_RDMA_READ, 0, b, 1), 0);
	for (std::uint64_t i = 0; i < n; ++i)
		receive(10 + i);
	for (std::uint64_t i = 0; i < n; ++i)
		(void)cq->take_turn();
	EXPECT_EQ(small.completions.size(), n - 48);
	for (std::uint64_t i = 0; i < n; ++i)
		EXPECT_EQ(next().wr_id, 10 + i);
	dev.go_on();
	EXPECT_EQ(next().wr_id, 1U);
	EXPECT_EQ(npr_detach_qp(q), 0);
	std::swap(cq, other);
}

} // namespace
