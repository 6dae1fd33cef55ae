/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Many threads at once: nothing is handed out twice, nothing is lost, numbers add up. */
#include <nprdma/alloc.hpp>

#include <atomic>
#include <cstring>
#include <gtest/gtest.h>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace {

using namespace nprdma::alloc;

constexpr std::size_t mib = 1024 * 1024;

/* Blocks on their way from one thread to another, each full of one byte. */
class exchange {
public:
	struct block {
		unsigned char *p = nullptr;
		std::size_t bytes = 0;
		unsigned char with = 0;
	};

	/* Puts @in, and gets some other. */
	block swap(const block &in, std::size_t at)
	{
		const std::lock_guard lock(mutex_);
		return std::exchange(blocks_[at % blocks_.size()], in);
	}

private:
	std::mutex mutex_;
	std::vector<block> blocks_{64};
};

void check_and_free(arena &a, const exchange::block &b)
{
	if (!b.p)
		return;
	for (std::size_t i = 0; i < b.bytes; i += 61)
		ASSERT_EQ(b.p[i], b.with);
	a.deallocate(b.p, b.bytes, 64);
}

TEST(Threads, FreeWhatOthersAllocated)
{
	for (const bool pinned : {false, true}) {
		host_registrar r;
		host_registrar pins(pinning::pinned);
		arena a(pinned ? pins : r, {.capacity = 512 * mib, .chunk = 2 * mib, .decay = std::chrono::milliseconds(0)});
		exchange middle;
		std::atomic<bool> over = false;
		std::jthread watcher([&] {
			/* relaxed: it only ends a loop */
			while (!over.load(std::memory_order_relaxed)) {
				const statistics s = a.stats();
				EXPECT_LE(s.used, s.capacity) << "more is freed than was allocated";
				(void)a.trim();
				std::this_thread::yield();
			}
		});
		{
			std::vector<std::jthread> threads;
			for (unsigned int t = 0; t < 4; t++)
				threads.emplace_back([&, t] {
					std::mt19937_64 random(t);
					for (int i = 0; i < 3000; i++) {
						exchange::block b;
						b.bytes = random() % 10 ? 1 + random() % 3000 : 1 + random() % 200000;
						b.p = static_cast<unsigned char *>(a.allocate(b.bytes));
						b.with = static_cast<unsigned char>(random());
						std::memset(b.p, b.with, b.bytes);
						EXPECT_EQ(a.locate(b.p).address(), reinterpret_cast<std::uintptr_t>(b.p));
						check_and_free(a, middle.swap(b, random()));
					}
				});
		}
		over.store(true, std::memory_order_relaxed);
		watcher.join();
		for (std::size_t i = 0; i < 64; i++)
			check_and_free(a, middle.swap({}, i));
		const statistics s = a.stats();
		EXPECT_EQ(s.used, 0U);
		EXPECT_EQ(s.allocations, 12000U);
		EXPECT_EQ(s.deallocations, 12000U);
		(void)a.trim();
		EXPECT_EQ(a.stats().managed, 0U) << "caches of threads that have ended came back";
		if (pinned) {
			EXPECT_EQ(a.stats().registered, 0U);
		}
	}
}

TEST(Threads, OfTwoThatFreeABlockOneIsTold)
{
	host_registrar r;
	arena a(r, {.capacity = 64 * mib});
	for (int i = 0; i < 300; i++) {
		void *const p = a.allocate(i % 2 ? 16384 : 100000); /* smaller ones: see arena_state::release() */
		std::atomic<int> told = 0, ready = 0;
		const auto free_it = [&] {
			ready.fetch_add(1);
			while (ready.load() < 2)
				std::this_thread::yield();
			try {
				a.deallocate(p);
			} catch (const double_free &) {
				told.fetch_add(1);
			}
		};
		{
			const std::jthread one(free_it), two(free_it);
		}
		ASSERT_EQ(told.load(), 1);
	}
	EXPECT_EQ(a.stats().used, 0U);
}

TEST(Threads, OutliveArenasAndArenasOutliveThreads)
{
	host_registrar r;
	/* More arenas than a thread has slots for, and threads that used arenas that are gone. */
	std::vector<std::unique_ptr<arena>> arenas;
	for (int i = 0; i < 40; i++)
		arenas.push_back(std::make_unique<arena>(r, options{.capacity = 4 * mib}));
	std::atomic<int> phase = 0;
	std::jthread worker([&] {
		for (int round = 0; round < 3; round++)
			for (const auto &a : arenas)
				a->deallocate(a->allocate(100));
		phase.store(1);
		phase.notify_all();
		phase.wait(1);
		for (const auto &a : arenas)
			a->deallocate(a->allocate(100));
	});
	phase.wait(0);
	for (const auto &a : arenas)
		EXPECT_EQ(a->stats().allocations, 3U);
	arenas.clear();
	for (int i = 0; i < 5; i++)
		arenas.push_back(std::make_unique<arena>(r, options{.capacity = 4 * mib}));
	phase.store(2);
	phase.notify_all();
	worker.join();
	for (const auto &a : arenas) {
		EXPECT_EQ(a->stats().deallocations, 1U);
		(void)a->trim();
		EXPECT_EQ(a->stats().managed, 0U);
	}
}

TEST(Threads, MayDoWithoutCaches)
{
	host_registrar r;
	arena a(r, {.capacity = 64 * mib, .thread_caches = false});
	{
		std::vector<std::jthread> threads;
		for (int t = 0; t < 3; t++)
			threads.emplace_back([&] {
				for (int i = 0; i < 500; i++)
					a.deallocate(a.allocate(static_cast<std::size_t>(i)));
			});
	}
	EXPECT_EQ(a.stats().allocations, 1500U);
	EXPECT_EQ(a.stats().used, 0U);
}

} // namespace
