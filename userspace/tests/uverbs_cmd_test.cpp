/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "world/uverbs_cmd.hpp"

#include <array>
#include <gtest/gtest.h>

namespace npr {
namespace {

TEST(UverbsCmd, HeaderCountsWhatFollows)
{
	uverbs_cmd<3> c(0x300, 2);
	EXPECT_EQ(c.header()->length, 24U);
	EXPECT_EQ(c.header()->num_attrs, 0U);
	EXPECT_EQ(c.header()->object_id, 0x300U);
	EXPECT_EQ(c.header()->method_id, 2U);
	c.idr(0, 5);
	c.idr(1, 6);
	EXPECT_EQ(c.header()->num_attrs, 2U);
	EXPECT_EQ(c.header()->length, 24U + 2 * 16U);
	EXPECT_EQ(c.header()->reserved1, 0U);
	EXPECT_EQ(c.header()->reserved2, 0U);
}

TEST(UverbsCmd, EveryAttributeIsMandatoryAndCleanElsewhere)
{
	uverbs_cmd<2> c(1, 1);
	const std::uint32_t small = 0xdeadbeef;
	c.in(3, small);
	c.fd(4, 9);
	for (unsigned i = 0; i < 2; ++i) {
		EXPECT_EQ(c.attrs()[i].flags, UVERBS_ATTR_F_MANDATORY);
		EXPECT_EQ(c.attrs()[i].attr_data.reserved, 0U);
	}
}

TEST(UverbsCmd, SmallInputTravelsByValuePaddedWithZeros)
{
	uverbs_cmd<3> c(1, 1);
	const std::uint32_t four = 0x80000001;
	const std::uint64_t eight = 0x8877665544332211;
	c.in(0, four);
	c.in(1, eight);
	EXPECT_EQ(c.attrs()[0].len, 4U);
	EXPECT_EQ(c.attrs()[0].data, 0x80000001ULL);
	EXPECT_EQ(c.attrs()[1].len, 8U);
	EXPECT_EQ(c.attrs()[1].data, eight);
}

TEST(UverbsCmd, LargeInputTravelsByAddress)
{
	uverbs_cmd<1> c(1, 1);
	const std::array<std::uint64_t, 2> big{};
	c.in(0, big);
	EXPECT_EQ(c.attrs()[0].len, 16U);
	EXPECT_EQ(c.attrs()[0].data, reinterpret_cast<std::uintptr_t>(&big));
}

TEST(UverbsCmd, OutputTravelsByAddressHoweverSmall)
{
	uverbs_cmd<1> c(1, 1);
	std::uint32_t out = 0;
	c.out(0, out);
	EXPECT_EQ(c.attrs()[0].len, 4U);
	EXPECT_EQ(c.attrs()[0].data, reinterpret_cast<std::uintptr_t>(&out));
}

TEST(UverbsCmd, HandlesAndDescriptorsHaveNoLength)
{
	uverbs_cmd<3> c(1, 1);
	c.idr(0, 0xffffffff);
	c.fd(1, 7);
	c.fd_out(2);
	EXPECT_EQ(c.attrs()[0].len, 0U);
	EXPECT_EQ(c.attrs()[0].data, 0xffffffffULL);
	EXPECT_EQ(c.attrs()[1].len, 0U);
	EXPECT_EQ(c.attrs()[1].data_s64, 7);
	EXPECT_EQ(c.attrs()[2].len, 0U);
	EXPECT_EQ(c.attrs()[2].data, 0U);
}

TEST(UverbsCmd, NewDescriptorIsFoundByItsAttribute)
{
	uverbs_cmd<2> c(1, 1);
	c.idr(4, 3);
	c.fd_out(9);
	const_cast<ib_uverbs_attr *>(c.attrs())[1].data_s64 = 55;
	EXPECT_EQ(c.new_fd(9), 55);
	EXPECT_EQ(c.new_fd(8), -1);
}

TEST(UverbsCmd, NeverWritesBeyondItsRoom)
{
	struct {
		uverbs_cmd<1> c{1, 1};
		std::uint64_t guard = 0x1234;
	} s;
	s.c.idr(0, 1);
	s.c.idr(1, 2);
	EXPECT_EQ(s.guard, 0x1234U);
	EXPECT_EQ(s.c.header()->num_attrs, 1U);
}

} // namespace
} // namespace npr
