/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The arena: blocks, keys, what goes back, errors, statistics. */
#include <nprdma/alloc.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <gtest/gtest.h>
#include <list>
#include <map>
#include <random>
#include <set>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

using namespace nprdma::alloc;

constexpr std::size_t kib = 1024, mib = 1024 * kib, gib = 1024 * mib;

/* Remembers what is registered, and refuses when told. */
class recorder final : public registrar {
public:
	explicit recorder(bool pins = false, std::uint32_t first_key = 100) : pins_(pins), next_(first_key) {}

	std::unique_ptr<registration> add(std::span<std::byte> memory) override
	{
		if (refuse)
			throw std::system_error(ENOMEM, std::generic_category(), "refused by the test");
		const std::lock_guard lock(mutex);
		const std::uint32_t key = next_++;
		live[key] = memory;
		struct one final : registration {
			one(recorder &by, nprdma::alloc::keys k) : registration(by, k), by_(by) {}
			~one() override
			{
				const std::lock_guard lock(by_.mutex);
				EXPECT_EQ(by_.live.erase(keys().lkey), 1U) << "deregistered twice";
			}
			recorder &by_;
		};
		return std::make_unique<one>(*this, nprdma::alloc::keys{key, key + 1000});
	}
	[[nodiscard]] bool pins() const noexcept override { return pins_; }

	std::map<std::uint32_t, std::span<std::byte>> live;
	std::atomic<bool> refuse = false;

private:
	std::mutex mutex;
	bool pins_;
	std::uint32_t next_;
};

std::uintptr_t number(const void *p)
{
	return reinterpret_cast<std::uintptr_t>(p);
}

/* What the message of the exception has to name. */
template <class E, class F>
void throws(F &&f, const std::string &part)
{
	try {
		f();
		FAIL() << "nothing was thrown";
	} catch (const E &e) {
		EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
	}
}

TEST(Arena, RefusesSizesThatItCannotHave)
{
	host_registrar r;
	throws<bad_size>([&] { arena(r, {.capacity = 0}); }, "0 bytes");
	throws<bad_size>([&] { arena(r, {.capacity = SIZE_MAX}); }, "cannot have");
	arena a(r, {.name = "small", .capacity = 4 * mib});
	throws<out_of_memory>([&] { (void)a.allocate(4 * mib + 1); }, "small: a block of 4194305 bytes");
	throws<out_of_memory>([&] { (void)a.allocate(SIZE_MAX); }, "more than it has");
	throws<bad_size>([&] { (void)a.allocate(64, 3); }, "an alignment of 3 is no power of two");
	throws<bad_size>([&] { (void)a.allocate(64, 0); }, "an alignment of 0");
	throws<out_of_memory>([&] { (void)a.allocate(64, 8 * mib); }, "more than it has");
	EXPECT_EQ(a.stats().allocations, 0U);
}

TEST(Arena, SaysWhenItIsExhaustedAndWorksAgainAfterwards)
{
	host_registrar r;
	arena a(r, {.name = "full", .capacity = 16 * mib});
	std::vector<void *> all;
	throws<out_of_memory>(
		[&] {
			for (;;)
				all.push_back(a.allocate(mib));
		},
		"full: no room for a block of 1048576 bytes");
	EXPECT_GE(all.size(), 12U);
	EXPECT_LE(all.size(), 16U);
	/* As bad_alloc, for those who know nothing of arenas. */
	EXPECT_THROW((void)a.allocate(8 * mib), std::bad_alloc);
	for (void *const p : all)
		a.deallocate(p);
	/* Neighbours become one again. */
	void *const big = a.allocate(10 * mib);
	std::memset(big, 1, 10 * mib);
	a.deallocate(big);
	EXPECT_EQ(a.stats().used, 0U);
}

TEST(Arena, NoticesDoubleFrees)
{
	host_registrar r;
	arena a(r, {.name = "twice", .capacity = 64 * mib});
	for (const std::size_t size : {std::size_t{1}, 4 * kib, 100 * kib, 8 * mib}) {
		void *const p = a.allocate(size);
		a.deallocate(p);
		throws<double_free>([&] { a.deallocate(p); }, "twice: no block in use begins at");
	}
	auto *const p = static_cast<std::byte *>(a.allocate(4096));
	throws<double_free>([&] { a.deallocate(p + 64); }, "inside of one");
	throws<double_free>([&] { a.deallocate(p + 1); }, "inside of one");
	a.deallocate(p);
	EXPECT_EQ(a.stats().blocks, 0U);
	EXPECT_EQ(a.stats().deallocations, 5U);
}

TEST(Arena, NoticesForeignPointers)
{
	host_registrar r;
	arena a(r, {.name = "mine", .capacity = 4 * mib}), b(r, {.name = "other", .capacity = 4 * mib});
	void *const p = b.allocate(100);
	int local = 0;
	throws<foreign_pointer>([&] { a.deallocate(p); }, "is not of this arena");
	throws<foreign_pointer>([&] { a.deallocate(&local); }, "is not of this arena");
	throws<foreign_pointer>([&] { (void)a.locate(&local); }, "mine");
	throws<foreign_pointer>([&] { (void)a.size_of(nullptr); }, "is not of this arena");
	throws<foreign_pointer>([&] { (void)a.discard(&local, 1); }, "are not of this arena");
	throws<foreign_pointer>([&] { (void)a.discard(a.range().data(), 4 * mib + 1); }, "are not of this arena");
	EXPECT_FALSE(a.find(p));
	EXPECT_FALSE(a.owns(p));
	EXPECT_TRUE(b.owns(p));
	b.deallocate(p);
}

TEST(Arena, ComparesTheSizeOfWhatIsFreed)
{
	host_registrar r;
	arena a(r, {.capacity = 4 * mib});
	void *const p = a.allocate(1000);
	throws<bad_size>([&] { a.deallocate(p, 100, 64); }, "is freed as one of 100 bytes");
	throws<bad_size>([&] { a.deallocate(p, 1000, 2 * mib); }, "has 1024 bytes");
	throws<bad_size>([&] { a.deallocate(p, 1000, 48); }, "aligned to 48");
	throws<bad_size>([&] { a.deallocate(p, SIZE_MAX, 64); }, "has 1024 bytes");
	EXPECT_EQ(a.stats().blocks, 1U);
	a.deallocate(p, 1000, 64);
}

TEST(Arena, LeavesAFailedRegistrationBehindWithoutATrace)
{
	recorder good, bad;
	bad.refuse = true;
	const std::array<registrar *, 2> both{&good, &bad};
	EXPECT_THROW(arena(both, {.capacity = 4 * mib}), std::system_error);
	EXPECT_TRUE(good.live.empty());
	EXPECT_EQ(good.count().made, 1U);
	EXPECT_EQ(good.count().ended, 1U);

	/* One that grows goes on, and with a reason. */
	recorder pins(true);
	arena a(pins, {.name = "grows", .capacity = 64 * mib, .chunk = 2 * mib});
	void *const first = a.allocate(mib);
	pins.refuse = true;
	throws<out_of_memory>([&] { (void)a.allocate(8 * mib); }, "refused by the test");
	pins.refuse = false;
	void *const second = a.allocate(8 * mib);
	a.deallocate(first);
	a.deallocate(second);
}

TEST(Arena, BlocksAreAlignedDistinctAndOfTheirSize)
{
	host_registrar r;
	arena a(r, {.capacity = gib});
	std::mt19937_64 random(1);
	std::map<std::uintptr_t, std::size_t> blocks;
	for (int i = 0; i < 3000; i++) {
		const std::size_t bytes = random() % (std::size_t{1} << random() % 19);
		const std::size_t alignment = std::size_t{1} << random() % 17;
		const auto p = number(a.allocate(bytes, alignment));
		const std::size_t size = a.size_of(reinterpret_cast<void *>(p));
		ASSERT_GE(size, bytes);
		ASSERT_EQ(p % std::max<std::size_t>(alignment, 64), 0U) << bytes << " " << alignment;
		auto next = blocks.lower_bound(p);
		ASSERT_TRUE(next == blocks.end() || p + size <= next->first);
		ASSERT_TRUE(next == blocks.begin() || std::prev(next)->first + std::prev(next)->second <= p);
		blocks[p] = size;
		if (random() % 3 == 0) {
			next = blocks.begin();
			std::advance(next, random() % blocks.size());
			a.deallocate(reinterpret_cast<void *>(next->first));
			blocks.erase(next);
		}
	}
	std::size_t used = 0;
	for (const auto &[p, size] : blocks)
		used += size;
	EXPECT_EQ(a.stats().used, used);
	EXPECT_EQ(a.stats().blocks, blocks.size());
	EXPECT_EQ(a.stats().registrations, 1U);
	const auto found = a.leaks(SIZE_MAX);
	ASSERT_EQ(found.size(), blocks.size());
	for (const leak &l : found)
		EXPECT_EQ(blocks.at(number(l.address)), l.bytes);
	for (const auto &[p, size] : blocks)
		a.deallocate(reinterpret_cast<void *>(p));
	EXPECT_EQ(a.stats().used, 0U);
	EXPECT_TRUE(a.leaks().empty());
}

/* The quickest of some: what else the machine does can only add to it. */
std::chrono::nanoseconds time_to_make(std::size_t capacity)
{
	auto best = std::chrono::nanoseconds::max();
	for (int i = 0; i < 20; i++) {
		host_registrar r;
		const auto begin = std::chrono::steady_clock::now();
		const arena a(r, {.capacity = capacity});
		best = std::min<std::chrono::nanoseconds>(best, std::chrono::steady_clock::now() - begin);
	}
	return best;
}

TEST(Arena, OfSixtyFourGibibytesTakesNoMemoryAndHardlyMoreTimeThanASmallOne)
{
	/* Generous: whatever is done for each page, or for each line of tags, takes 1000 times as long. */
	EXPECT_LT(time_to_make(64 * gib) / 30, time_to_make(64 * mib));
	recorder r;
	arena a(r, {.capacity = 64 * gib});
	EXPECT_EQ(a.resident(), 0U);
	EXPECT_EQ(a.stats().registered, 64 * gib);
	ASSERT_EQ(r.live.size(), 1U);
	EXPECT_EQ(r.live.at(100).data(), a.range().data());
	EXPECT_EQ(r.live.at(100).size(), 64 * gib);
	/* Not to be touched before it is allocated. */
	EXPECT_EQ(mprotect(a.range().data() + 32 * gib, 4096, PROT_NONE), 0);
}

TEST(Arena, LocatesAnyAddressForEachAdapter)
{
	recorder one(false, 7), two(false, 70);
	const std::array<registrar *, 2> both{&one, &two};
	arena a(both, {.capacity = 64 * mib});
	auto *const p = static_cast<std::byte *>(a.allocate(10000));
	const location at = a.locate(p + 9999, 1);
	EXPECT_EQ(at.lkey, 70U);
	EXPECT_EQ(at.rkey, 1070U);
	EXPECT_EQ(at.base, number(a.range().data()));
	EXPECT_EQ(at.address(), number(p + 9999));
	EXPECT_EQ(a.locate(p).lkey, 7U);
	EXPECT_EQ(a.stats().registrations, 2U);
	throws<std::out_of_range>([&] { (void)a.locate(p, 2); }, "it has 2 registrars, and number 2");
	EXPECT_FALSE(a.find(p, 2));
	a.deallocate(p);
}

TEST(Arena, GivesAllItsPagesBackWhileKeysStay)
{
	recorder r;
	arena a(r, {.capacity = gib, .decay = std::chrono::milliseconds(-1)});
	std::vector<void *> blocks;
	for (int i = 0; i < 100; i++) {
		blocks.push_back(a.allocate(mib));
		std::memset(blocks.back(), 1, mib);
	}
	const location before = a.locate(blocks[3]);
	EXPECT_GE(a.resident(), 100 * mib);
	for (std::size_t i = 1; i < blocks.size(); i++)
		a.deallocate(blocks[i]);
	EXPECT_GE(a.resident(), 100 * mib);
	EXPECT_GE(a.trim(), 99 * mib);
	EXPECT_LE(a.resident(), mib + 64 * kib);
	EXPECT_GE(a.stats().given_back, 99 * mib);
	const location after = a.locate(blocks[3]);
	EXPECT_EQ(before.rkey, after.rkey);
	EXPECT_EQ(before.address(), after.address());
	EXPECT_EQ(r.count().made, 1U);
	EXPECT_EQ(r.count().ended, 0U);
	/* What is in use stays as it is. */
	EXPECT_EQ(static_cast<unsigned char *>(blocks[0])[mib - 1], 1);
	a.deallocate(blocks[0]);
}

TEST(Arena, TrimEmptiesCachesOfSmallBlocks)
{
	host_registrar r;
	arena a(r, {.capacity = gib, .decay = std::chrono::milliseconds(-1)});
	std::vector<void *> blocks;
	for (int i = 0; i < 20000; i++) {
		blocks.push_back(a.allocate(512));
		std::memset(blocks.back(), 1, 512);
	}
	for (void *const p : blocks)
		a.deallocate(p);
	EXPECT_GE(a.stats().managed, 9 * mib);
	(void)a.trim();
	EXPECT_EQ(a.stats().managed, 0U);
	EXPECT_EQ(a.resident(), 0U);
}

TEST(Arena, PagesGoBackByThemselves)
{
	host_registrar r;
	arena a(r, {.capacity = gib, .decay = std::chrono::milliseconds(0)});
	void *const p = a.allocate(16 * mib);
	std::memset(p, 1, 16 * mib);
	a.deallocate(p);
	/* At once: nothing has to be waited for. */
	EXPECT_LT(a.resident(), mib);
	EXPECT_GE(a.stats().given_back, 16 * mib);
}

TEST(Arena, DiscardsWholePagesOfABlock)
{
	recorder r;
	arena a(r, {.capacity = 64 * mib});
	auto *const p = static_cast<std::byte *>(a.allocate(64 * kib));
	std::memset(p, 1, 64 * kib);
	EXPECT_EQ(a.discard(p + 1, 64 * kib - 1), 60 * kib);
	EXPECT_EQ(p[0], std::byte{1});
	EXPECT_EQ(p[4095], std::byte{1});
	EXPECT_EQ(p[4096], std::byte{0});
	EXPECT_EQ(p[64 * kib - 1], std::byte{0});
	EXPECT_EQ(a.discard(p + 1, 100), 0U);
	EXPECT_EQ(r.count().made, 1U);
	a.deallocate(p);
}

TEST(Arena, CountsOnlyMemoryThatGoesBack)
{
	recorder r;
	arena a(r, {.capacity = gib, .decay = std::chrono::milliseconds(-1)});
	auto *const p = static_cast<std::byte *>(a.allocate(64 * mib));
	EXPECT_EQ(a.discard(p, 64 * mib), 0U) << "nobody has touched it";
	std::memset(p + mib, 1, mib);
	EXPECT_EQ(a.discard(p, 64 * mib), mib);
	EXPECT_EQ(a.discard(p, 64 * mib), 0U) << "it is gone";
	std::memset(p, 1, 2 * mib);
	a.deallocate(p);
	EXPECT_EQ(a.trim(), 2 * mib);
	EXPECT_EQ(a.stats().given_back, 3 * mib);

	recorder pins(true);
	arena pinned(pins, {.capacity = 64 * mib, .chunk = 8 * mib, .decay = std::chrono::milliseconds(-1)});
	void *const q = pinned.allocate(4 * mib);
	std::memset(q, 1, mib);
	pinned.deallocate(q);
	EXPECT_EQ(pinned.trim(), mib);
	EXPECT_EQ(pins.live.size(), 0U);
}

TEST(Arena, SaysHowSizesAreRounded)
{
	recorder r;
	arena a(r, {.name = "odd", .capacity = 61 * mib});
	throws<out_of_memory>([&] { (void)a.allocate(58 * mib); },
			      "odd: no room for a block of 67108864 bytes, to which the 60817408 bytes asked for are rounded up");
	/* By less than a quarter, at any size. */
	arena b(r, {.capacity = gib});
	for (std::size_t bytes = 257; bytes < 100 * mib; bytes += bytes / 7) {
		void *const p = b.allocate(bytes);
		EXPECT_LT(b.size_of(p), bytes + bytes / 4 + 1) << bytes;
		b.deallocate(p);
	}
}

TEST(Arena, PinnedMemoryIsRegisteredInChunksAndDeregisteredByTrim)
{
	recorder r(true);
	{
		arena a(r, {.capacity = 61 * mib, .chunk = 4 * mib, .decay = std::chrono::milliseconds(-1)});
		EXPECT_EQ(r.live.size(), 0U);
		EXPECT_EQ(a.stats().registered, 0U);
		std::vector<void *> blocks;
		for (int i = 0; i < 20; i++)
			blocks.push_back(a.allocate(mib));
		const std::uint64_t made = r.count().made;
		EXPECT_GE(made, 5U);
		EXPECT_LE(made, 8U);
		/* No block lies in two registrations. */
		for (void *const p : blocks) {
			const location at = a.locate(p);
			const auto whole = r.live.at(at.lkey);
			EXPECT_EQ(number(whole.data()), at.base);
			EXPECT_LE(at.offset + mib, whole.size());
		}
		/* Reuse registers nothing. */
		for (int i = 0; i < 1000; i++) {
			a.deallocate(blocks[static_cast<std::size_t>(i) % 20]);
			blocks[static_cast<std::size_t>(i) % 20] = a.allocate(mib);
		}
		EXPECT_EQ(r.count().made, made);
		/* More than a chunk at once. */
		void *const big = a.allocate(9 * mib);
		EXPECT_GE(r.live.at(a.locate(big).lkey).size(), 9 * mib);
		a.deallocate(big);
		for (void *const p : blocks)
			std::memset(p, 1, mib);
		for (std::size_t i = 1; i < blocks.size(); i++)
			a.deallocate(blocks[i]);
		EXPECT_GE(a.trim(), 15 * mib);
		EXPECT_EQ(r.live.size(), 1U);
		EXPECT_EQ(a.stats().registered, r.live.begin()->second.size());
		EXPECT_EQ(static_cast<char *>(blocks[0])[mib - 1], 1);
		a.deallocate(blocks[0]);
		(void)a.trim();
		EXPECT_TRUE(r.live.empty());
		EXPECT_FALSE(a.find(a.range().data()));
		EXPECT_EQ(a.stats().registered, 0U);
		EXPECT_EQ(a.stats().deregistrations, a.stats().registrations);
		/* And once more, to the last byte of an odd capacity. */
		void *const whole = a.allocate(56 * mib);
		std::memset(whole, 1, 56 * mib);
		a.deallocate(whole);
	}
	EXPECT_TRUE(r.live.empty());
}

TEST(Arena, EagerMemoryIsThereFromTheBeginning)
{
	for (const unsigned int threads : {1U, 3U}) {
		recorder r(true);
		arena a(r, {.capacity = 32 * mib, .eager = true, .threads = threads});
		EXPECT_EQ(a.stats().registered, 32 * mib);
		EXPECT_EQ(a.resident(), 32 * mib);
		const auto made = r.count().made;
		EXPECT_EQ(made, threads);
		void *const p = a.allocate(4 * mib);
		a.deallocate(p);
		EXPECT_EQ(r.count().made, made);
		/* And until the end. */
		(void)a.trim();
		EXPECT_EQ(a.stats().registered, 32 * mib);
		EXPECT_EQ(a.resident(), 32 * mib);
		EXPECT_EQ(r.count().ended, 0U);
	}
}

TEST(Arena, EagerMemoryIsRegisteredInEqualParts)
{
	/* Of a page more than a power of two, one part would be all of it but for that page, if parts were powers of two. */
	recorder r(true);
	arena a(r, {.capacity = 64 * mib + 4096, .eager = true, .threads = 2});
	ASSERT_EQ(r.live.size(), 2U);
	std::size_t sum = 0;
	for (const auto &[key, bytes] : r.live) {
		EXPECT_LE(bytes.size(), 34 * mib);
		sum += bytes.size();
		/* Each of them is found, up to its last byte. */
		for (const std::byte *p : {bytes.data(), bytes.data() + bytes.size() - 1}) {
			EXPECT_EQ(a.locate(p).lkey, key);
			EXPECT_EQ(a.locate(p).address(), number(p));
		}
	}
	EXPECT_EQ(sum, a.range().size());
}

/* Page faults of this thread, and of all. */
std::pair<long, long> faults()
{
	rusage mine{}, all{};
	EXPECT_EQ(getrusage(RUSAGE_THREAD, &mine), 0);
	EXPECT_EQ(getrusage(RUSAGE_SELF, &all), 0);
	return {mine.ru_minflt, all.ru_minflt};
}

TEST(Arena, EagerMemoryIsTouchedByAllItsThreads)
{
	constexpr std::size_t capacity = 64 * mib;
	constexpr long pages = capacity / 4096;
	/* A huge page is one fault. */
	ASSERT_EQ(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
	for (const bool pinned : {false, true}) {
		recorder r(pinned);
		const auto before = faults();
		arena a(r, {.capacity = capacity, .eager = true, .threads = 4});
		const auto after = faults();
		EXPECT_EQ(a.resident(), capacity);
		EXPECT_GE(after.second - before.second, pages);
		EXPECT_LT(after.first - before.first, pages / 2) << "this thread touched more than its part";
	}
	EXPECT_EQ(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0), 0);
}

TEST(Arena, RefusesEagerMemoryThatCannotBeRegistered)
{
	recorder r(true);
	r.refuse = true;
	EXPECT_THROW(arena(r, {.capacity = 32 * mib, .eager = true, .threads = 4}), std::system_error);
	EXPECT_TRUE(r.live.empty());
}

TEST(Arena, LivesInMemoryOfTheCaller)
{
	std::vector<std::byte> mine(8 * mib + 100);
	int cleanups = 0;
	recorder r;
	const std::array<registrar *, 1> one{&r};
	{
		arena a(one, mine, [&] { cleanups++; }, {});
		/* Whole pages of it. */
		EXPECT_GE(a.range().data(), mine.data());
		EXPECT_LE(a.range().data() + a.range().size(), mine.data() + mine.size());
		auto *const p = static_cast<std::byte *>(a.allocate(mib));
		EXPECT_GE(p, mine.data());
		std::memset(p, 1, mib);
		EXPECT_EQ(a.discard(p, mib), 0U);
		EXPECT_EQ(p[5], std::byte{1});
		EXPECT_EQ(a.locate(p).lkey, 100U);
		a.deallocate(p);
		EXPECT_EQ(cleanups, 0);
	}
	EXPECT_EQ(cleanups, 1);
	EXPECT_TRUE(r.live.empty());
	throws<bad_size>([&] { arena(one, std::span(mine).first(100), nullptr, {}); }, "no whole page");
}

TEST(Arena, TellsOfLeaks)
{
	std::string told;
	host_registrar r;
	{
		arena a(r, {.name = "leaky", .capacity = 4 * mib, .on_leak = [&](const std::string &m) { told = m; }});
		(void)a.allocate(1000);
		(void)a.allocate(5000);
		EXPECT_EQ(a.leaks().size(), 2U);
		EXPECT_EQ(a.leaks(1).size(), 1U);
	}
	EXPECT_NE(told.find("leaky: ends with 2 blocks in use, of 6144 bytes; the first is at 0x"), std::string::npos) << told;
	told.clear();
	{
		arena a(r, {.capacity = 4 * mib, .on_leak = [&](const std::string &m) { told = m; }});
		a.deallocate(a.allocate(1000));
	}
	EXPECT_EQ(told, "");
}

TEST(Arena, CountsWhatItDoes)
{
	host_registrar r;
	arena a(r, {.capacity = 64 * mib});
	EXPECT_EQ(a.stats().capacity, 64 * mib);
	void *const p = a.allocate(100), *const q = a.allocate(mib);
	statistics s = a.stats();
	EXPECT_EQ(s.used, 128 + mib);
	EXPECT_EQ(s.blocks, 2U);
	EXPECT_EQ(s.allocations, 2U);
	EXPECT_GE(s.managed, s.used);
	EXPECT_EQ(s.free, s.managed - s.used);
	a.deallocate(p);
	a.deallocate(q);
	s = a.stats();
	EXPECT_EQ(s.used, 0U);
	EXPECT_EQ(s.deallocations, 2U);
	EXPECT_GE(s.peak, mib);
	EXPECT_EQ(s.peak, s.managed);
	EXPECT_EQ(s.registrations, 1U);
	EXPECT_EQ(s.deregistrations, 0U);
}

TEST(Arena, IsAMemoryResourceForContainers)
{
	host_registrar r;
	arena a(r, {.capacity = 64 * mib});
	{
		std::pmr::vector<std::pmr::string> words(&a);
		for (int i = 0; i < 1000; i++)
			words.emplace_back("a string that is too long to be stored inside of itself " + std::to_string(i));
		EXPECT_TRUE(a.owns(words[999].data()));
		std::pmr::map<int, double> tree(&a);
		for (int i = 0; i < 100; i++)
			tree[i] = i;
		std::deque<int, allocator<int>> numbers(1000, 5, allocator<int>(a));
		std::list<short, allocator<short>> chain{allocator<short>(a)};
		chain.push_back(1);
		EXPECT_TRUE(a.owns(&chain.front()));
		EXPECT_TRUE(a.owns(&numbers[999]));
		EXPECT_TRUE(allocator<int>(a) == allocator<short>(a));
		EXPECT_THROW((void)allocator<double>(a).allocate(SIZE_MAX / 2), std::bad_array_new_length);
		EXPECT_GT(a.stats().blocks, 1000U);
	}
	EXPECT_EQ(a.stats().blocks, 0U);
	EXPECT_TRUE(a.is_equal(a));
}

TEST(Buffer, OwnsItsBlock)
{
	host_registrar r;
	arena a(r, {.capacity = 64 * mib});
	buffer b = a.acquire(5000);
	EXPECT_EQ(b.size(), 5000U);
	EXPECT_EQ(b.where().address(), number(b.data()));
	buffer c = std::move(b);
	EXPECT_FALSE(b);
	EXPECT_TRUE(c);
	EXPECT_THROW((void)b.where(), foreign_pointer);
	c = a.acquire(1);
	EXPECT_EQ(a.stats().blocks, 1U);
	c = buffer();
	EXPECT_EQ(a.stats().blocks, 0U);
	EXPECT_EQ(a.stats().allocations, 2U);
}

TEST(Buffer, RegistersMemoryOfTheCallerAndCleansUpOnce)
{
	recorder r;
	arena a(r, {.capacity = 4 * mib});
	std::vector<std::byte> mine(10000);
	int cleanups = 0;
	{
		buffer b = a.adopt(mine, [&] { cleanups++; });
		EXPECT_EQ(b.data(), mine.data());
		EXPECT_EQ(b.where().lkey, 101U);
		EXPECT_EQ(b.where().offset, 0U);
		buffer c = std::move(b);
		EXPECT_EQ(r.live.size(), 2U);
	}
	EXPECT_EQ(cleanups, 1);
	EXPECT_EQ(r.live.size(), 1U);
	r.refuse = true;
	EXPECT_THROW((void)a.adopt(mine, [&] { cleanups++; }), std::system_error);
	EXPECT_EQ(cleanups, 1) << "the memory is the caller's still";
	r.refuse = false;
	EXPECT_EQ(a.stats().registrations, a.stats().deregistrations + 1);
	buffer throwing = a.adopt(mine, [] { throw 1; });
	throws<bad_size>([&] { (void)a.adopt({}, nullptr); }, "no memory was given");
	throws<std::out_of_range>([&] { (void)throwing.where(3); }, "it has 1 registrars, and number 3");
}

TEST(HostRegistrar, LocksPinnedMemory)
{
	host_registrar pins(pinning::pinned);
	auto locked = [] {
		std::string line;
		std::FILE *const f = std::fopen("/proc/self/status", "r");
		std::array<char, 200> text{};
		unsigned long n = 0;
		while (std::fgets(text.data(), text.size(), f))
			if (std::sscanf(text.data(), "VmLck: %lu", &n) == 1)
				break;
		(void)std::fclose(f);
		return n;
	};
	const unsigned long before = locked();
	{
		arena a(pins, {.capacity = 8 * mib, .chunk = 2 * mib, .decay = std::chrono::milliseconds(-1)});
		void *const p = a.allocate(100);
		EXPECT_EQ(locked(), before + 2048);
		a.deallocate(p);
		(void)a.trim();
		EXPECT_EQ(locked(), before);
		void *const q = a.allocate(100);
		a.deallocate(q);
	}
	EXPECT_EQ(locked(), before);
}

TEST(Arena, PlacesPagesOnNodes)
{
	host_registrar r;
	arena a(r, {.capacity = 4 * mib, .numa = numa_policy::bind, .numa_nodes = 1});
	void *const p = a.allocate(4096);
	std::memset(p, 1, 4096);
	int mode = -1;
	unsigned long nodes = 0;
	/* MPOL_F_ADDR: the policy of this address. */
	if (syscall(SYS_get_mempolicy, &mode, &nodes, 8 * sizeof(nodes), p, 2UL) && errno == ENOSYS)
		FAIL() << "this kernel has no NUMA policies, and mbind() was said to have worked";
	EXPECT_EQ(mode, 2 /* MPOL_BIND */);
	EXPECT_EQ(nodes, 1U);
	a.deallocate(p);
	/* A node that no machine of ours has. */
	EXPECT_THROW(arena(r, {.name = "nowhere", .capacity = 4 * mib, .numa = numa_policy::bind, .numa_nodes = 1UL << 63}),
		     std::system_error);
}

/* Of 2 MiB each: those that are free, or those that the kernel may make beside them. */
std::size_t huge_pages(const std::string &which)
{
	std::ifstream file("/sys/kernel/mm/hugepages/hugepages-2048kB/" + which);
	std::size_t n = 0;
	file >> n;
	return n;
}

TEST(Arena, SaysThatThereAreNotEnoughHugePages)
{
	host_registrar r;
	const std::size_t more = huge_pages("free_hugepages") + huge_pages("nr_overcommit_hugepages") + 1;
	throws<std::system_error>([&] { arena(r, {.name = "huge", .capacity = more * 2 * mib, .pages = page_size::huge}); },
				  "/proc/sys/vm/nr_hugepages says how many");
}

TEST(Arena, TakesHugePages)
{
	const std::size_t free = huge_pages("free_hugepages");
	if (free < 2)
		GTEST_SKIP() << "2 free huge pages are needed, there are " << free << ": echo 2 >/proc/sys/vm/nr_hugepages";
	host_registrar r;
	arena a(r, {.name = "huge", .capacity = 3 * mib, .pages = page_size::huge});
	EXPECT_EQ(a.stats().capacity, 4 * mib);
	auto *const p = static_cast<std::byte *>(a.allocate(mib));
	std::memset(p, 1, mib);
	EXPECT_EQ(a.discard(p, mib), 0U);
	EXPECT_EQ(p[0], std::byte{1});
	a.deallocate(p);
	EXPECT_EQ(huge_pages("free_hugepages") - huge_pages("resv_hugepages"), free - 2) << "both are the arena's";
}

TEST(Arena, AsksForTransparentHugePages)
{
	host_registrar r;
	arena t(r, {.capacity = 8 * mib, .pages = page_size::transparent});
	void *const p = t.allocate(4 * mib);
	std::memset(p, 1, 4 * mib);
	t.deallocate(p);
	(void)t.trim();
	EXPECT_EQ(t.resident(), 0U);
}

} // namespace
