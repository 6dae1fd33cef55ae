/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "protocol/word_cache.hpp"

#include <gtest/gtest.h>
#include <map>
#include <random>

namespace npr {
namespace {

TEST(WordCache, KnowsNothingAtFirst)
{
	word_cache c(16);
	EXPECT_EQ(c.get(1, 0), unknown_word);
	EXPECT_EQ(c.get(1, 511), unknown_word);
}

TEST(WordCache, NeighboursOfAKnownWordStayUnknown)
{
	word_cache c(16);
	c.set(1, 7, 42);
	EXPECT_EQ(c.get(1, 7), 42U);
	EXPECT_EQ(c.get(1, 6), unknown_word);
	EXPECT_EQ(c.get(1, 8), unknown_word);
	EXPECT_EQ(c.get(2, 7), unknown_word);
	EXPECT_EQ(c.get(1, 7 + slot_words), unknown_word);
}

TEST(WordCache, ForgetsOneWord)
{
	word_cache c(16);
	c.set(1, 7, 42);
	c.set(1, 8, 43);
	c.forget(1, 7);
	EXPECT_EQ(c.get(1, 7), unknown_word);
	EXPECT_EQ(c.get(1, 8), 43U);
}

/* What it still knows after evictions is right; a slot's old words never shine through. */
TEST(WordCache, LosesWordsButNeverMakesThemUp)
{
	word_cache c(4);
	std::map<std::pair<std::uint32_t, std::uint64_t>, std::uint64_t> model;
	std::mt19937_64 rng(3);
	unsigned known = 0;
	for (int i = 0; i < 200'000; ++i) {
		const std::uint32_t region = 1 + static_cast<std::uint32_t>(rng() % 5);
		const std::uint64_t page = rng() % 8 * slot_words + rng() % 4;
		if (rng() % 2) {
			const std::uint64_t w = rng() % 1000;
			c.set(region, page, w);
			model[{region, page}] = w;
		} else if (const std::uint64_t w = c.get(region, page); w != unknown_word) {
			++known;
			ASSERT_EQ(w, (model[{region, page}]));
		}
	}
	EXPECT_GT(known, 1000U);
}

TEST(WordCache, TellsRegionsApartAtTheEndsOfTheirNumbers)
{
	word_cache c(64);
	c.set(1, (1ULL << 36) - 1, 1);
	c.set(2, 0, 2);
	EXPECT_EQ(c.get(1, (1ULL << 36) - 1), 1U);
	EXPECT_EQ(c.get(2, 0), 2U);
}

} // namespace
} // namespace npr
