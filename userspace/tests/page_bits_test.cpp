/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "protocol/page_bits.hpp"

#include <gtest/gtest.h>
#include <random>
#include <vector>

namespace npr {
namespace {

std::vector<unsigned> pages(const page_bits &b)
{
	std::vector<unsigned> v;
	b.for_each([&](unsigned i) { v.push_back(i); });
	return v;
}

TEST(PageBits, EmptySetHasNoRun)
{
	const page_bits b;
	EXPECT_FALSE(b.any());
	EXPECT_EQ(b.runs(), 0U);
	EXPECT_TRUE(pages(b).empty());
}

TEST(PageBits, SetFirstSetsExactlySoMany)
{
	for (unsigned n : {0U, 1U, 63U, 64U, 65U, 127U, 128U, 511U, 512U}) {
		page_bits b;
		b.set_first(n);
		EXPECT_EQ(b.count(), n);
		EXPECT_EQ(pages(b).size(), n);
		if (n) {
			EXPECT_EQ(b.hull().first, 0U);
			EXPECT_EQ(b.hull().end, n);
		}
	}
}

TEST(PageBits, RunsCrossWordsAndReachTheEnd)
{
	page_bits b;
	for (unsigned i = 60; i < 70; ++i)
		b.set(i);
	b.set(511);
	EXPECT_EQ(b.runs(), 2U);
	EXPECT_EQ(b.next_run(0).first, 60U);
	EXPECT_EQ(b.next_run(0).end, 70U);
	EXPECT_EQ(b.next_run(70).first, 511U);
	EXPECT_EQ(b.next_run(70).end, 512U);
	EXPECT_EQ(b.hull().first, 60U);
	EXPECT_EQ(b.hull().end, 512U);
}

TEST(PageBits, MergeFillsTheSmallestGapsOnly)
{
	page_bits b;
	for (unsigned i : {0U, 2U, 10U, 13U, 100U})
		b.set(i);
	b.merge_runs(3);
	EXPECT_EQ(pages(b), (std::vector<unsigned>{0, 1, 2, 10, 11, 12, 13, 100}));
	b.merge_runs(1);
	EXPECT_EQ(b.count(), 101U);
}

TEST(PageBits, MergeNeverLosesAPageAndKeepsTheLimit)
{
	std::mt19937 rng(1);
	for (int round = 0; round < 500; ++round) {
		page_bits b;
		const unsigned n = rng() % 512;
		for (unsigned i = 0; i < n; ++i)
			b.set(rng() % 512);
		const page_bits before = b;
		const unsigned limit = 1 + rng() % 8;
		b.merge_runs(limit);
		EXPECT_LE(b.runs(), limit);
		before.for_each([&](unsigned i) { EXPECT_TRUE(b.test(i)); });
		if (before.any()) {
			EXPECT_EQ(before.hull().first, b.hull().first);
			EXPECT_EQ(before.hull().end, b.hull().end);
		}
	}
}

} // namespace
} // namespace npr
