/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "protocol/hold_state.hpp"

#include <gtest/gtest.h>

namespace npr {
namespace {

struct HoldState : ::testing::Test {
	hold_state h;
	std::uint32_t count = 0;
};

TEST_F(HoldState, OneThatNobodyWantsIsNotTaken)
{
	EXPECT_FALSE(h.grant(7));
	EXPECT_EQ(h.id(), 0U);
	EXPECT_EQ(h.end(count), 0U);
	EXPECT_EQ(count, 0U);
}

TEST_F(HoldState, ASecondOneIsNotTaken)
{
	ASSERT_TRUE(h.want(count));
	ASSERT_TRUE(h.grant(7));
	EXPECT_FALSE(h.grant(8));
	EXPECT_EQ(h.id(), 7U);
}

TEST_F(HoldState, WantedTwiceItCountsOnce)
{
	ASSERT_TRUE(h.want(count));
	ASSERT_TRUE(h.want(count));
	EXPECT_EQ(count, 1U);
	EXPECT_EQ(h.end(count), 0U);
	EXPECT_EQ(count, 0U);
	EXPECT_EQ(h.end(count), 0U);
	EXPECT_EQ(count, 0U);
}

TEST_F(HoldState, WhatIsRefusedForNowMayBeWantedAgain)
{
	ASSERT_TRUE(h.want(count));
	EXPECT_EQ(h.refuse(false, count), 0U);
	EXPECT_EQ(count, 0U);
	EXPECT_TRUE(h.refused());
	EXPECT_FALSE(h.grant(7));
	ASSERT_TRUE(h.want(count));
	EXPECT_EQ(count, 1U);
	EXPECT_TRUE(h.grant(7));
	EXPECT_TRUE(h.refused());
}

TEST_F(HoldState, WhatIsImpossibleIsNotWanted)
{
	ASSERT_TRUE(h.want(count));
	EXPECT_EQ(h.refuse(true, count), 0U);
	EXPECT_FALSE(h.want(count));
	EXPECT_EQ(h.refuse(false, count), 0U);
	EXPECT_EQ(h.end(count), 0U);
	EXPECT_FALSE(h.want(count));
	EXPECT_TRUE(h.refused());
	EXPECT_EQ(count, 0U);
	EXPECT_EQ(h.reset(count), 0U);
	EXPECT_FALSE(h.refused());
	EXPECT_TRUE(h.want(count));
}

TEST_F(HoldState, WhateverEndsItTellsWhatToRelease)
{
	for (const int way : {0, 1, 2}) {
		hold_state held;

		ASSERT_TRUE(held.want(count));
		ASSERT_TRUE(held.grant(7));
		EXPECT_EQ(way == 0   ? held.end(count)
			  : way == 1 ? held.refuse(true, count)
				     : held.reset(count),
			  7U);
		EXPECT_EQ(held.id(), 0U);
		EXPECT_EQ(count, 0U);
	}
}

} // namespace
} // namespace npr
