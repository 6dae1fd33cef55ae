/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Many threads at once: nothing is handed out twice, nothing is lost, numbers add up. */
#include <nprdma/alloc.hpp>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <stop_token>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
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

/* Its keys say where the registered memory begins. */
class tells_addresses final : public registrar {
public:
	std::unique_ptr<registration> add(std::span<std::byte> memory) override
	{
		struct one final : registration {
			one(registrar &by, nprdma::alloc::keys k) : registration(by, k) {}
		};
		const auto n = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(memory.data()) / mib);
		return std::make_unique<one>(*this, nprdma::alloc::keys{n, ~n});
	}
	[[nodiscard]] bool pins() const noexcept override { return true; }
};

TEST(Threads, FindWhatIsRegisteredWhileItComesAndGoes)
{
	tells_addresses r;
	arena a(r, {.capacity = 128 * mib, .chunk = 2 * mib, .decay = std::chrono::milliseconds(-1)});
	std::atomic<long> found = 0;
	std::jthread finder([&](const std::stop_token &over) {
		while (!over.stop_requested())
			for (std::size_t i = 0; i < 32 * mib; i += mib) {
				const std::byte *const p = a.range().data() + i;
				const auto at = a.find(p);
				if (!at)
					continue;
				found.fetch_add(1, std::memory_order_relaxed);
				ASSERT_EQ(at->address(), reinterpret_cast<std::uintptr_t>(p));
				ASSERT_EQ(at->lkey, static_cast<std::uint32_t>(at->base / mib)) << "a key of another chunk";
				ASSERT_EQ(at->rkey, ~at->lkey) << "half of a key";
			}
	});
	std::mt19937_64 random(5);
	std::vector<void *> blocks;
	for (int i = 0; i < 1000; i++) {
		/* Segments of one to four chunks, which begin at other addresses each time. */
		blocks.push_back(a.allocate((1 + random() % 6) * mib));
		while (blocks.size() > 2) {
			const std::size_t at = random() % blocks.size();
			a.deallocate(blocks[at]);
			blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(at));
		}
		(void)a.trim();
	}
	finder.request_stop();
	finder.join();
	EXPECT_GT(found.load(), 0);
	for (void *const p : blocks)
		a.deallocate(p);
}

TEST(Threads, KeepLittleOfEachSize)
{
	for (std::size_t size = 64; size <= 65536; size += std::max<std::size_t>(64, std::bit_floor(size) / 4)) {
		host_registrar r;
		arena a(r, {.capacity = 512 * mib, .decay = std::chrono::milliseconds(0)});
		std::vector<void *> blocks;
		for (int i = 0; i < 2000; i++)
			blocks.push_back(a.allocate(size));
		for (void *const p : blocks)
			a.deallocate(p);
		/* As the guide says. */
		EXPECT_LE(a.stats().managed, mib) << "of blocks of " << size << " bytes";
	}
}

/* Ended by a signal if it hangs. */
template <class F>
void in_child(F &&f)
{
	const pid_t child = fork();
	ASSERT_GE(child, 0);
	if (!child) {
		alarm(30);
		f();
		_exit(testing::Test::HasFailure());
	}
	int status = 0;
	ASSERT_EQ(waitpid(child, &status, 0), child);
	EXPECT_EQ(status, 0) << (WIFSIGNALED(status) ? "the child hung" : "the child failed");
}

TEST(Threads, MayBeGoneInAChildWhoseParentHasAnArena)
{
	struct ends_count {
		std::atomic<int> ended;
	};
	/* Seen by parent and children. */
	auto *const shared = static_cast<ends_count *>(
		mmap(nullptr, sizeof(ends_count), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
	ASSERT_NE(shared, MAP_FAILED);
	class counting final : public registrar {
	public:
		explicit counting(std::atomic<int> &ended) : ended_(ended) {}
		std::unique_ptr<registration> add(std::span<std::byte>) override
		{
			struct one final : registration {
				one(counting &by) : registration(by, {1, 1}), ended(by.ended_) {}
				~one() override { ended.fetch_add(1); }
				std::atomic<int> &ended;
			};
			return std::make_unique<one>(*this);
		}
		[[nodiscard]] bool pins() const noexcept override { return false; }

	private:
		std::atomic<int> &ended_;
	} r(shared->ended);
	auto a = std::make_unique<arena>(r, options{.name = "parent's", .capacity = 64 * mib});
	void *const before = a->allocate(100);
	std::vector<std::byte> mine(100);
	int cleanups = 0;
	buffer adopted = a->adopt(mine, [&] { cleanups++; });
	{
		std::vector<std::jthread> threads;
		for (int t = 0; t < 3; t++)
			threads.emplace_back([&, t](const std::stop_token &over) {
				while (!over.stop_requested()) {
					a->deallocate(a->allocate(t ? 100 : 200000));
					(void)a->stats();
				}
			});
		for (int i = 0; i < 100 && !testing::Test::HasFailure(); i++)
			in_child([&] {
				EXPECT_THROW((void)a->allocate(100), std::logic_error);
				EXPECT_THROW((void)a->allocate(mib), std::logic_error);
				EXPECT_THROW((void)a->stats(), std::logic_error);
				EXPECT_THROW((void)a->trim(), std::logic_error);
				EXPECT_THROW((void)a->discard(before, 100), std::logic_error);
				EXPECT_THROW((void)a->leaks(), std::logic_error);
				EXPECT_THROW((void)a->adopt(mine, nullptr), std::logic_error);
				a->deallocate(before);
				adopted = buffer();
				a.reset();
				EXPECT_EQ(cleanups, 0);
				/* One of its own. */
				host_registrar own;
				arena b(own, {.capacity = 4 * mib});
				b.deallocate(b.allocate(100));
				EXPECT_EQ(b.stats().blocks, 0U);
			});
	}
	EXPECT_EQ(shared->ended.load(), 0) << "a child deregistered what is its parent's";
	a->deallocate(before);
	a->deallocate(a->allocate(100));
	EXPECT_EQ(a->stats().blocks, 0U);
	adopted = buffer();
	EXPECT_EQ(cleanups, 1);
	a.reset();
	EXPECT_EQ(shared->ended.load(), 2);
	(void)munmap(shared, sizeof(ends_count));
}

} // namespace
