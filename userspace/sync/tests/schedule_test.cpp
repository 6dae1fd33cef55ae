// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Schedules: whom they group, and that they mix as they promise. */
#include "nprdma/sync/schedule.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

using namespace nprdma::sync;

namespace
{

std::vector<std::vector<rank_t>> members(const grouping &r)
{
	std::vector<std::vector<rank_t>> all;
	for (const group &g : r.groups)
		all.push_back(g.members);
	return all;
}

/* What goes wrong, or nothing. */
template <class F> std::string error_of(F &&f)
{
	try {
		f();
	} catch (const std::invalid_argument &e) {
		return e.what();
	}
	return "";
}

/* All that this file has promises of, and some that promise nothing. */
std::vector<schedule> all_schedules()
{
	std::vector<schedule> all;
	for (const std::uint32_t n : {1, 2, 3, 4, 5, 7, 9, 12, 13, 16, 30}) {
		all.push_back(schedule::full(n));
		all.push_back(schedule::local(n));
		all.push_back(schedule::pairs(n));
		all.push_back(schedule::parse("grid", n));
		all.push_back(schedule::random(n, std::min(n, 4U), 42));
		all.push_back(schedule::random(n, std::min(n, 2U), 7).with_full_every(3));
		all.push_back(schedule::pairs(n).with_full_every(5));
		for (const std::uint32_t size : {1, 2, 3, 4, 5, 8})
			all.push_back(schedule::unequal(n, size));
	}
	all.push_back(schedule::grid(2, 3));
	all.push_back(schedule::grid(4, 4));
	all.push_back(schedule::mixed_radix({2, 2, 2, 2}));
	all.push_back(schedule::mixed_radix({2, 3, 5}));
	all.push_back(schedule::mixed_radix({4, 1, 3}));
	return all;
}

/* Numbers that no schedule of these leaves as they are. */
std::vector<float> some_values(std::uint32_t n)
{
	std::vector<float> x(n);
	for (std::uint32_t i = 0; i < n; ++i)
		x[i] = std::sin(1.0F + static_cast<float>(i) * 12.9898F) * 43.758F;
	return x;
}

void average(const grouping &r, std::vector<float> &x)
{
	for (const group &g : r.groups) {
		float sum = 0, weights = 0;
		for (std::size_t m = 0; m < g.members.size(); ++m) {
			sum += static_cast<float>(g.weight(m)) * x[g.members[m]];
			weights += static_cast<float>(g.weight(m));
		}
		for (const rank_t m : g.members)
			x[m] = sum / weights;
	}
}

TEST(Schedule, BadOnesAreRefusedWithTheReason)
{
	EXPECT_EQ(error_of([] { schedule::full(0); }), "schedule: 0 workers; 1 to 4096 are possible");
	EXPECT_EQ(error_of([] { schedule::grid(100, 100); }),
		  "schedule: 10000 workers; 1 to 4096 are possible");
	EXPECT_EQ(error_of([] { schedule::mixed_radix({2, 0}); }), "schedule: a radix is 0");
	EXPECT_EQ(error_of([] { schedule::mixed_radix({}); }), "schedule: there are no radices");
	EXPECT_EQ(error_of([] { schedule::random(3, 4, 0); }), "schedule: random groups of 4 of 3 workers");
	EXPECT_EQ(error_of([] { schedule::random(3, 0, 0); }), "schedule: random groups of 0 of 3 workers");
	EXPECT_EQ(error_of([] { schedule::unequal(3, 0); }), "schedule: groups of 0 workers");
	EXPECT_EQ(error_of([] { (void)schedule::pairs(4).with_full_every(0); }),
		  "schedule: a full average every 0 rounds");
	EXPECT_EQ(error_of([] { schedule::listed(2, {}); }), "schedule: there are no rounds");
	EXPECT_EQ(error_of([] {
			  schedule::listed(2, {{{{{0, 1}, {1}}}}});
		  }),
		  "schedule: a group has 2 members and 1 weights; give each one a weight, or none");
	EXPECT_EQ(error_of([] {
			  schedule::listed(2, {{{{{0, 1}, {1, 0}}}}});
		  }),
		  "schedule: worker 1 has weight 0");
	EXPECT_EQ(error_of([] {
			  schedule::listed(2, {{{{{0, 1}, {}}, {{}, {}}}}});
		  }),
		  "schedule: a group has no members");
}

TEST(Schedule, TextThatMeansNothingIsRefusedWithTheReason)
{
	const auto error = [](const char *text) { return error_of([&] { schedule::parse(text, 4); }); };
	EXPECT_EQ(
	    error("0,1|2"),
	    "schedule: worker 3 is in no group of a round; one that shall stay alone is a group of one");
	EXPECT_EQ(error("0,1|2,3,4"), "schedule: worker 4 is in a group, and there are 4 workers, from 0 on");
	EXPECT_EQ(error("0,1|1,2,3"), "schedule: worker 1 is in two groups of one round");
	EXPECT_EQ(error("0,1||2,3"), "schedule: \"\" is no worker; it has to be a number up to 4096");
	EXPECT_EQ(error("99999999999999999999"),
		  "schedule: \"99999999999999999999\" is no worker; it has to be a number up to 4096");
	EXPECT_EQ(error("grid:2x3"), "schedule: \"grid:2x3\" is for 6 workers, and there are 4");
	EXPECT_EQ(error("radix:65536x65536"),
		  "schedule: \"65536\" is no radix; it has to be a number up to 4096");
	EXPECT_EQ(error("pairs+full:x"),
		  "schedule: \"x\" is no number of rounds; it has to be a number up to 4096");
	EXPECT_EQ(error("pairs+full:2+full:2"),
		  "schedule: \"2+full:2\" is no number of rounds; it has to be a number up to 4096");
	for (const char *text :
	     {"", "grid:2", "grid:2x2x1", "random:2", "random:2:", "random:2:1:1", "full:1", "-1", "0;1 "})
		EXPECT_NE(error(text), "") << text;
}

TEST(Schedule, FourInPairsIsTheAuthors)
{
	const schedule s = schedule::pairs(4);
	EXPECT_EQ(members(s.at(0)), (std::vector<std::vector<rank_t>>{{0, 1}, {2, 3}}));
	EXPECT_EQ(members(s.at(1)), (std::vector<std::vector<rank_t>>{{1, 2}, {0, 3}}));
	EXPECT_EQ(s.at(2), s.at(0));
	EXPECT_EQ(schedule::parse("0,1|2,3;1,2|0,3", 4).at(7), s.at(7));
}

TEST(Schedule, GridHasRowsAndColumns)
{
	const schedule s = schedule::grid(2, 3);
	EXPECT_EQ(members(s.at(0)), (std::vector<std::vector<rank_t>>{{0, 1, 2}, {3, 4, 5}}));
	EXPECT_EQ(members(s.at(1)), (std::vector<std::vector<rank_t>>{{0, 3}, {1, 4}, {2, 5}}));
	EXPECT_EQ(s.largest_group(), 3U);
	EXPECT_EQ(schedule::parse("grid", 16).name(), "grid:4x4");
	EXPECT_EQ(schedule::parse("grid", 7).name(), "grid:1x7");
}

TEST(Schedule, RadixOneHasNoRound)
{
	EXPECT_EQ(schedule::mixed_radix({4, 1, 3}).exact_mean().rounds, 2U);
	EXPECT_EQ(schedule::mixed_radix({1}).exact_mean().rounds, 1U);
}

TEST(Schedule, EachWorkerIsInOneGroupNotAboveTheLargest)
{
	for (const schedule &s : all_schedules())
		for (std::uint64_t r = 0; r < 12; ++r) {
			const grouping now = s.at(r);
			std::vector<int> seen(s.workers());
			for (const group &g : now.groups) {
				EXPECT_LE(g.members.size(), s.largest_group()) << s.name();
				for (const rank_t m : g.members) {
					++seen.at(m);
					EXPECT_EQ(now.of(m), g);
				}
			}
			EXPECT_EQ(seen, std::vector<int>(s.workers(), 1)) << s.name() << ", round " << r;
		}
}

TEST(Schedule, PromisedRoundsGiveTheExactMeanInFractions)
{
	unsigned promised = 0;
	for (const schedule &s : all_schedules()) {
		const auto [k, from_any] = s.exact_mean();
		if (!k)
			continue;
		++promised;
		for (std::uint64_t first = 0; first < 30; first += from_any ? 1 : k)
			EXPECT_TRUE(mixes_exactly(s, first, k)) << s.name() << " from round " << first;
		/* One less does not, or that would have been promised. */
		EXPECT_FALSE(k > 1 && mixes_exactly(s, 0, k - 1) &&
			     s.name().find("+full") == std::string::npos &&
			     s.name().find("unequal") == std::string::npos)
		    << s.name();
	}
	EXPECT_GT(promised, 60U);
}

TEST(Schedule, PromisedRoundsGiveTheMeanToRoundingInFloats)
{
	for (const schedule &s : all_schedules()) {
		const std::uint32_t k = s.exact_mean().rounds;
		std::vector<float> x = some_values(s.workers());
		const double mean = std::accumulate(x.begin(), x.end(), 0.0) / s.workers();
		for (std::uint32_t r = 0; r < k; ++r)
			average(s.at(r), x);
		for (std::size_t i = 0; k && i < x.size(); ++i)
			EXPECT_NEAR(x[i], mean, 1e-5 * 43.758) << s.name() << ", worker " << i;
	}
}

TEST(Schedule, WhatDoesNotMixPromisesNothing)
{
	EXPECT_FALSE(mixes_exactly(schedule::pairs(6), 0, 20));
	EXPECT_EQ(schedule::pairs(6).exact_mean().rounds, 0U);
	EXPECT_EQ(schedule::local(4).exact_mean().rounds, 0U);
	EXPECT_EQ(schedule::random(16, 4, 1).exact_mean().rounds, 0U);
	EXPECT_EQ(schedule::random(4, 4, 1).exact_mean().rounds, 1U);
	EXPECT_EQ(schedule::parse("0,1|2,3;0,1|2,3", 4).exact_mean().rounds, 0U);
}

TEST(Schedule, PromiseOfAListIsFoundOut)
{
	const auto found = [](const char *text, std::uint32_t n) {
		return schedule::parse(text, n).exact_mean();
	};
	EXPECT_EQ(found("0,1|2,3;0,2|1,3", 4).rounds, 2U);
	EXPECT_TRUE(found("0,1|2,3;0,2|1,3", 4).from_any);
	/* Weighted, it mixes from the rows on and not from the columns on. */
	const schedule rows_first = schedule::unequal(5, 3);
	const schedule listed = schedule::listed(5, {rows_first.at(0), rows_first.at(1)});
	EXPECT_EQ(listed.exact_mean().rounds, 2U);
	EXPECT_FALSE(listed.exact_mean().from_any);
	EXPECT_EQ(found("0,1,2", 3).rounds, 1U);
}

TEST(Schedule, FullRoundComesEveryHRounds)
{
	const schedule s = schedule::pairs(6).with_full_every(3);
	const schedule base = schedule::pairs(6);
	EXPECT_EQ(s.largest_group(), 6U);
	for (std::uint64_t r = 0; r < 30; ++r)
		EXPECT_EQ(s.at(r), r % 3 == 2 ? schedule::full(6).at(0) : base.at(r - r / 3)) << r;
}

TEST(Schedule, RandomDependsOnSeedAndRoundOnly)
{
	const schedule a = schedule::random(16, 4, 1), b = schedule::random(16, 4, 1),
		       c = schedule::random(16, 4, 2);
	EXPECT_EQ(a.at(1000), b.at(1000));
	EXPECT_NE(a.at(0), c.at(0));
	EXPECT_NE(a.at(0), a.at(1));
	/* Every two meet, about as often as any two: 3/15 of the rounds, within five standard deviations. */
	std::vector<int> met(16);
	for (std::uint64_t r = 0; r < 3000; ++r) {
		const grouping now = a.at(r);
		for (const rank_t m : now.of(3).members)
			++met[m];
	}
	EXPECT_EQ(met[3], 3000);
	for (rank_t m = 0; m < 16; ++m)
		if (m != 3) {
			EXPECT_NEAR(met[m], 600, 110) << m;
		}
}

TEST(Schedule, RandomGroupsDifferByOneAtMost)
{
	const grouping r = schedule::random(16, 5, 3).at(9);
	ASSERT_EQ(r.groups.size(), 3U);
	EXPECT_EQ(r.groups[0].members.size() + r.groups[1].members.size() + r.groups[2].members.size(), 16U);
	for (const group &g : r.groups)
		EXPECT_TRUE(g.members.size() == 5 || g.members.size() == 6);
}

/* A worker's update counts in the mean of all as much as another's, summed over the turns. */
TEST(Schedule, UnequalGroupsFavourNobodyInTheLongRun)
{
	for (const std::uint32_t n : {5, 7, 11, 13, 17}) {
		const schedule s = schedule::unequal(n, 4);
		std::vector<double> influence(n);
		/* All numbers of turns up to this divide 2 * 60. */
		for (std::uint64_t r = 1; r < 120; r += 2)
			for (const group &g : s.at(r).groups) {
				double sum = 0;
				for (std::size_t m = 0; m < g.members.size(); ++m)
					sum += g.weight(m);
				for (std::size_t m = 0; m < g.members.size(); ++m)
					influence[g.members[m]] +=
					    static_cast<double>(g.members.size() * g.weight(m)) / sum;
			}
		for (const double x : influence)
			EXPECT_NEAR(x, 60, 1e-9) << n << " workers";
	}
}

TEST(Schedule, SizesAtTheLimitsWork)
{
	EXPECT_EQ(schedule::full(max_workers).at(0).groups[0].members.size(), max_workers);
	EXPECT_NE(error_of([] { schedule::full(max_workers + 1); }), "");
	EXPECT_EQ(schedule::unequal(max_workers, 64).largest_group(), 64U);
}

} // namespace
