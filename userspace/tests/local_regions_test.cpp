/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "world/local_regions.hpp"

#include <gtest/gtest.h>
#include <thread>
#include <vector>

namespace npr {
namespace {

ibv_mr region(std::uint32_t lkey, std::uint32_t handle)
{
	ibv_mr mr{};

	mr.lkey = lkey;
	mr.handle = handle;
	return mr;
}

TEST(LocalRegions, WhatIsNotKnownIsPlainUnlessAllIsKnown)
{
	local_regions regions;
	const ibv_mr mr = region(5, 9);

	EXPECT_TRUE(regions.find(5).plain());
	regions.add(mr);
	EXPECT_EQ(regions.find(5).handle, 9U);
	EXPECT_TRUE(regions.find(6).plain());
	EXPECT_TRUE(regions.find(~0U).plain());
	regions.know_all();
	for (const std::uint32_t unknown : {6U, 0x106U, ~0U}) {
		EXPECT_TRUE(regions.find(unknown).opaque);
		EXPECT_FALSE(regions.find(unknown).handle);
	}
	EXPECT_FALSE(regions.find(5).opaque);
	EXPECT_EQ(regions.remove(mr)->handle, 9U);
	EXPECT_FALSE(regions.remove(mr));
	EXPECT_TRUE(regions.find(5).opaque);
	regions.add(mr, {});
	EXPECT_TRUE(regions.find(5).plain());
}

TEST(LocalRegions, KeyHasAllThatIsKnownOfIt)
{
	local_regions regions;

	for (const std::uint32_t lkey : {0U, 0xffU, 0x100U, 0x12345678U, ~0U}) {
		const std::uint64_t offset = 0xfedcba9876543210 + lkey;
		regions.add(region(lkey, 0), {~lkey, offset, true});
		const local_key k = regions.find(lkey);
		EXPECT_EQ(k.handle, ~lkey);
		EXPECT_EQ(k.offset, offset);
		EXPECT_TRUE(k.opaque);
		EXPECT_TRUE(regions.find(lkey ^ 1).plain()) << "another variant of the same number";
	}
}

/* A device is free to give the lower bits a meaning. */
TEST(LocalRegions, KeysOfOneNumberAreToldApart)
{
	local_regions regions;

	for (std::uint32_t i = 1; i <= 3; ++i)
		regions.add(region(0x500 + i, i));
	for (std::uint32_t i = 1; i <= 3; ++i)
		EXPECT_EQ(regions.find(0x500 + i).handle, i);
	EXPECT_TRUE(regions.find(0x504).plain());
	EXPECT_EQ(regions.remove(region(0x501, 0))->handle, 1U);
	EXPECT_TRUE(regions.find(0x501).plain());
	EXPECT_EQ(regions.find(0x502).handle, 2U);
	regions.add(region(0x504, 4));
	regions.add(region(0x502, 22));
	EXPECT_EQ(regions.find(0x502).handle, 22U);
	EXPECT_EQ(regions.find(0x503).handle, 3U);
	EXPECT_EQ(regions.find(0x504).handle, 4U);
	for (std::uint32_t i = 2; i <= 4; ++i) {
		EXPECT_TRUE(regions.remove(region(0x500 + i, 0)));
		EXPECT_FALSE(regions.remove(region(0x500 + i, 0)));
		EXPECT_TRUE(regions.find(0x500 + i).plain());
	}
}

/* Freed without our knowledge: its value names what was registered last. */
TEST(LocalRegions, KeyThatComesAgainIsTheNewRegions)
{
	local_regions regions;

	regions.add(region(0x700, 1), {1, 64, false});
	regions.add(region(0x700, 2));
	EXPECT_EQ(regions.find(0x700).handle, 2U);
	EXPECT_EQ(regions.find(0x700).offset, 0U);
	EXPECT_TRUE(regions.remove(region(0x700, 2)));
	EXPECT_FALSE(regions.remove(region(0x700, 1)));
}

TEST(LocalRegions, ContextsHaveTheirOwnUntilTheyAreClosed)
{
	const ibv_context verbs[2]{};

	EXPECT_FALSE(local_regions::existing(&verbs[0]));
	local_regions &a = local_regions::of(&verbs[0]), &b = local_regions::of(&verbs[1]);
	EXPECT_EQ(local_regions::existing(&verbs[0]), &a);
	EXPECT_EQ(&local_regions::of(&verbs[0]), &a);
	a.know_all();
	a.add(region(0x10, 1));
	a.add(region(0x11, 2));
	EXPECT_TRUE(b.find(0x10).plain());
	a.clear();
	for (const std::uint32_t lkey : {0x10U, 0x11U, 0x12U})
		EXPECT_TRUE(a.find(lkey).plain());
	b.clear();
}

TEST(LocalRegions, AreLookedUpWhileOthersComeAndGo)
{
	local_regions regions;
	std::atomic<bool> stop{false};
	std::vector<std::thread> threads;

	/* 0x500 and 0x501 have one number; 0x100500 begins a leaf. */
	regions.add(region(0x500, 1), {1, 64, false});
	regions.add(region(0x501, 2), {2, 128, false});
	for (std::uint32_t t = 0; t < 2; ++t)
		threads.emplace_back([&, t] {
			for (std::uint32_t i = 0; !stop.load(std::memory_order_relaxed); ++i) {
				const ibv_mr mr = region((t ? 0x502 : 0x600) + (i % 64 << 20), 3);
				regions.add(mr);
				EXPECT_EQ(regions.find(mr.lkey).handle, 3U);
				EXPECT_TRUE(regions.remove(mr));
			}
		});
	for (unsigned i = 0; i < 20000; ++i) {
		ASSERT_EQ(regions.find(0x500).handle, 1U);
		ASSERT_EQ(regions.find(0x500).offset, 64U);
		ASSERT_EQ(regions.find(0x501).handle, 2U);
		ASSERT_EQ(regions.find(0x501).offset, 128U);
		ASSERT_TRUE(regions.find(0x503).plain());
	}
	stop.store(true, std::memory_order_relaxed);
	for (std::thread &t : threads)
		t.join();
}

} // namespace
} // namespace npr
