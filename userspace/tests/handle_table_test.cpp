/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "handle_table.hpp"

#include <array>
#include <gtest/gtest.h>
#include <set>
#include <thread>
#include <vector>

namespace npr {
namespace {

struct key {
	int a;
};
struct value {
	int a;
};
using table = handle_table<key, value>;

TEST(HandleTable, FindsWhatHasTheNumberAndTheKey)
{
	table t;
	key k[2]{};
	value v[2]{};

	EXPECT_FALSE(t.find(7, &k[0]));
	EXPECT_TRUE(t.set(7, &k[0], &v[0]));
	EXPECT_TRUE(t.set(1U << 20, &k[1], &v[1]));
	EXPECT_EQ(t.find(7, &k[0]), &v[0]);
	EXPECT_EQ(t.find(1U << 20, &k[1]), &v[1]);
	EXPECT_FALSE(t.find(7, &k[1])) << "a number that an object of somebody else has";
	EXPECT_FALSE(t.find(8, &k[0]));
	EXPECT_FALSE(t.find(1U << 20 | 7, &k[0]));
}

TEST(HandleTable, NumbersOutOfRangeAreRefused)
{
	table t;
	key k{};
	value v{};

	for (const std::uint32_t n : {1U << 24, ~0U}) {
		EXPECT_FALSE(t.set(n, &k, &v));
		EXPECT_FALSE(t.find(n, &k));
		EXPECT_FALSE(t.remove(n, &v));
	}
	EXPECT_TRUE(t.set((1U << 24) - 1, &k, &v));
	EXPECT_EQ(t.find((1U << 24) - 1, &k), &v);
}

/* The kernel gives the number away before the library knows that the object is destroyed. */
TEST(HandleTable, RemovesNoOtherThatHasTheNumberByNow)
{
	table t;
	key k[2]{};
	value v[2]{};

	ASSERT_TRUE(t.set(3, &k[0], &v[0]));
	ASSERT_TRUE(t.set(3, &k[1], &v[1]));
	EXPECT_FALSE(t.remove(3, &v[0]));
	EXPECT_EQ(t.find(3, &k[1]), &v[1]);
	EXPECT_TRUE(t.remove(3, &v[1]));
	EXPECT_FALSE(t.find(3, &k[1]));
	EXPECT_FALSE(t.remove(3, &v[1]));
}

TEST(HandleTable, DrainsAllThatIsThere)
{
	table t;
	std::array<key, 4> k{};
	std::array<value, 4> v{};
	std::set<const value *> drained;

	for (std::uint32_t i = 0; i < 4; ++i)
		ASSERT_TRUE(t.set(i * 5000, &k[i], &v[i]));
	ASSERT_TRUE(t.remove(5000, &v[1]));
	t.drain([&](value *x) { EXPECT_TRUE(drained.insert(x).second); });
	EXPECT_EQ(drained, (std::set<const value *>{&v[0], &v[2], &v[3]}));
	for (std::uint32_t i = 0; i < 4; ++i)
		EXPECT_FALSE(t.find(i * 5000, &k[i]));
}

TEST(HandleTable, IsReadWhileOthersComeAndGo)
{
	table t;
	key stays{};
	value of_it{};
	std::atomic<bool> stop{false};
	std::vector<std::thread> threads;

	ASSERT_TRUE(t.set(0, &stays, &of_it));
	for (std::uint32_t n = 1; n <= 2; ++n)
		threads.emplace_back([&, n] {
			for (std::uint32_t i = 0; !stop.load(std::memory_order_relaxed); ++i) {
				const std::uint32_t number = n + (i % 64 << 12);
				key k{};
				value v{static_cast<int>(i)};
				ASSERT_TRUE(t.set(number, &k, &v));
				ASSERT_EQ(t.find(number, &k)->a, static_cast<int>(i));
				ASSERT_TRUE(t.remove(number, &v));
			}
		});
	for (unsigned i = 0; i < 20000; ++i) {
		ASSERT_EQ(t.find(0, &stays), &of_it);
		ASSERT_FALSE(t.find(1, &stays));
	}
	stop.store(true, std::memory_order_relaxed);
	for (std::thread &th : threads)
		th.join();
}

} // namespace
} // namespace npr
