/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The lock of applications with and without threads, and of the library's own thread. */
#include "visited_mutex.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <gtest/gtest.h>
#include <mutex>
#include <thread>

namespace {

struct VisitedMutex : ::testing::TestWithParam<bool> {
	/* Two steps, so that who comes in between sees it, and what is lost is missed. */
	void change()
	{
		EXPECT_EQ(first, second);
		first = first + 1;
		second = second + 1;
	}

	npr::visited_mutex mutex{GetParam()};
	volatile std::uint64_t first = 0, second = 0;
};

TEST_P(VisitedMutex, VisitorAndApplicationAreNeverInsideAtOnce)
{
	constexpr std::uint64_t most = 20'000; /* visits; fewer on a machine that is busy */
	const auto begun = std::chrono::steady_clock::now();
	std::uint64_t visits = 0;
	std::atomic<bool> stop{false};
	std::atomic<std::uint64_t> changes{0};
	std::thread application([&] {
		while (!stop.load(std::memory_order_relaxed)) {
			const std::lock_guard lock(mutex);
			change();
			changes.store(changes.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
		}
	});

	for (; visits < most && std::chrono::steady_clock::now() - begun < std::chrono::seconds(3); ++visits) {
		/* not while it is still asleep from the last visit: both come at once */
		unsigned spins = 0;
		for (const std::uint64_t before = changes; changes.load(std::memory_order_relaxed) < before + 3;)
			if (++spins % 10'000 == 0)
				std::this_thread::yield(); /* there may be one processor for both */
		const npr::visit_guard visit(mutex);
		change();
	}
	stop = true;
	application.join();
	EXPECT_EQ(first, visits + changes);
	EXPECT_EQ(second, first);
}

/* It takes no turns with those who are inside most of the time: it waits for the end of one call. */
TEST_P(VisitedMutex, VisitorWaitsForWhoIsInsideAndNobodyComesInBeforeHimThen)
{
	std::atomic<bool> visited{false};

	mutex.lock();
	std::thread visitor([&] {
		const npr::visit_guard visit(mutex);
		visited = true;
	});
	std::this_thread::sleep_for(std::chrono::milliseconds(50));
	EXPECT_FALSE(visited);
	mutex.unlock();
	/* By then it is the visitor's, or was. */
	while (!visited) {
		const std::lock_guard lock(mutex);
		if (!GetParam()) {
			EXPECT_TRUE(visited);
		}
	}
	visitor.join();
}

INSTANTIATE_TEST_SUITE_P(Threads, VisitedMutex, ::testing::Bool());

} // namespace
