// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Parameters as they travel. */
#include "nprdma/sync/wire.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

using namespace nprdma::sync;

namespace
{

template <class T> std::vector<T> some_values(std::size_t n, T largest = 1)
{
	std::mt19937 numbers(static_cast<unsigned>(n));
	std::uniform_real_distribution<T> any(-largest, largest);
	std::vector<T> x(n);
	for (T &v : x)
		v = any(numbers);
	return x;
}

template <class T> class Wire : public testing::Test
{
};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Wire, types);

constexpr wire formats[] = {wire::exact, wire::int16, wire::int8};

TYPED_TEST(Wire, ValueAndWhatIsLostAreTheWhole)
{
	using T = TypeParam;
	for (const wire format : formats)
		for (const std::size_t n : {0U, 1U, 63U, 64U, 65U, 1000U}) {
			const auto x = some_values<T>(n);
			std::vector<T> lost(n), back(n, 5);
			std::vector<std::byte> bytes(wire_bytes<T>(format, n));
			ASSERT_TRUE(encode<T>(format, x, lost, bytes));
			ASSERT_TRUE(decode<T>(format, bytes, back));
			const T step = format == wire::int8    ? T(1) / 127
				       : format == wire::int16 ? T(1) / 32767
							       : T(0);
			for (std::size_t i = 0; i < n; ++i) {
				EXPECT_NEAR(back[i] + lost[i], x[i], 1e-7) << i;
				EXPECT_LE(std::abs(lost[i]), step * T(0.501)) << i;
			}
			if (format == wire::exact) {
				EXPECT_EQ(back, x);
			}
		}
}

TYPED_TEST(Wire, HalvesGoToTheEvenOne)
{
	using T = TypeParam;
	for (const wire format : {wire::int16, wire::int8}) {
		const T top = format == wire::int8 ? 127 : 32767;
		std::vector<T> x = {top, -top}, lost(64), back(64);
		for (int i = -31; i < 31; ++i)
			x.push_back(T(i) + T(0.5));
		std::vector<std::byte> bytes(wire_bytes<T>(format, 64));
		ASSERT_TRUE(encode<T>(format, x, lost, bytes));
		ASSERT_TRUE(decode<T>(format, bytes, back));
		for (std::size_t i = 0; i < 64; ++i) {
			EXPECT_EQ(back[i], std::nearbyint(x[i])) << i;
			EXPECT_EQ(lost[i], x[i] - back[i]) << i;
		}
	}
}

TYPED_TEST(Wire, TravelsInFewerBytes)
{
	using T = TypeParam;
	EXPECT_EQ(wire_bytes<T>(wire::exact, 640), 640 * sizeof(T));
	EXPECT_EQ(wire_bytes<T>(wire::int16, 640), 640U * 2 + 40);
	EXPECT_EQ(wire_bytes<T>(wire::int8, 640), 640U + 40);
	EXPECT_EQ(wire_bytes<T>(wire::int8, 65), 65U + 8);
}

TYPED_TEST(Wire, WeightedValuesAreAdded)
{
	using T = TypeParam;
	for (const wire format : formats) {
		const auto x = some_values<T>(100);
		std::vector<T> lost(100), back(100), sum(100, 7);
		std::vector<std::byte> bytes(wire_bytes<T>(format, 100));
		ASSERT_TRUE(encode<T>(format, x, lost, bytes));
		ASSERT_TRUE(decode<T>(format, bytes, back));
		ASSERT_TRUE(add_decoded<T>(format, bytes, 3, sum));
		for (std::size_t i = 0; i < 100; ++i)
			EXPECT_NEAR(sum[i], 7 + 3 * back[i], 1e-5);
	}
}

/* What is sent, summed over the rounds, is never further from the sum of the values than one step. */
TYPED_TEST(Wire, ErrorFeedbackLosesNothingOverTheRounds)
{
	using T = TypeParam;
	for (const wire format : {wire::int16, wire::int8}) {
		const auto x = some_values<T>(64);
		std::vector<T> carried(64), sent(64);
		std::vector<std::byte> bytes(wire_bytes<T>(format, 64));
		for (int round = 1; round <= 200; ++round) {
			for (std::size_t i = 0; i < 64; ++i)
				carried[i] += x[i];
			ASSERT_TRUE(encode<T>(format, carried, carried, bytes));
			ASSERT_TRUE(add_decoded<T>(format, bytes, 1, sent));
		}
		const T step = T(1.01) / (format == wire::int8 ? 127 : 32767);
		for (std::size_t i = 0; i < 64; ++i)
			EXPECT_NEAR(sent[i], 200 * x[i],
				    step + 200 * 200 * std::numeric_limits<T>::epsilon());
	}
}

TYPED_TEST(Wire, ZerosAndTheTiniestAreSentOrCarried)
{
	using T = TypeParam;
	for (const wire format : formats) {
		std::vector<T> x(64), lost(64), back(64);
		x[3] = std::numeric_limits<float>::denorm_min();
		std::vector<std::byte> bytes(wire_bytes<T>(format, 64));
		ASSERT_TRUE(encode<T>(format, x, lost, bytes));
		ASSERT_TRUE(decode<T>(format, bytes, back));
		EXPECT_EQ(back[3] + lost[3], x[3]);
		EXPECT_EQ(back[0], 0);
	}
}

TYPED_TEST(Wire, QuantisedWhatIsNotFiniteIsRefused)
{
	using T = TypeParam;
	for (const wire format : {wire::int16, wire::int8})
		for (const T bad : {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity(),
				    -std::numeric_limits<T>::infinity()})
			for (const std::size_t at : {0U, 64U, 99U}) {
				auto x = some_values<T>(100);
				std::vector<T> lost(100);
				std::vector<std::byte> bytes(wire_bytes<T>(format, 100));
				x[at] = bad;
				EXPECT_FALSE(encode<T>(format, x, lost, bytes));
			}
}

TYPED_TEST(Wire, BytesOfAPeerAreChecked)
{
	using T = TypeParam;
	for (const wire format : {wire::int16, wire::int8})
		for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
					std::numeric_limits<float>::infinity(), -1.0F}) {
			const auto x = some_values<T>(130);
			std::vector<T> lost(130), back(130, 5);
			std::vector<std::byte> bytes(wire_bytes<T>(format, 130));
			ASSERT_TRUE(encode<T>(format, x, lost, bytes));
			EXPECT_FALSE(decode<T>(format, std::span(bytes).first(bytes.size() - 1), back));
			std::memcpy(bytes.data() + 2 * sizeof(float), &bad, sizeof(bad));
			EXPECT_FALSE(decode<T>(format, bytes, back));
			EXPECT_FALSE(add_decoded<T>(format, bytes, 1, back));
			EXPECT_EQ(back, std::vector<T>(130, 5));
		}
}

TEST(WireName, IsKnownOrRefused)
{
	EXPECT_EQ(parse_wire("int8"), wire::int8);
	EXPECT_THROW((void)parse_wire("int4"), std::invalid_argument);
}

TEST(Checksum, ChangesWithEachByteAndWithTheLength)
{
	for (const std::size_t n : {1U, 7U, 31U, 32U, 33U, 100U}) {
		std::vector<std::byte> data(n);
		const std::uint64_t zeros = checksum(data);
		EXPECT_EQ(checksum(data), zeros);
		for (std::size_t i = 0; i < n; ++i) {
			data[i] = std::byte{1};
			EXPECT_NE(checksum(data), zeros) << i << " of " << n;
			data[i] = std::byte{0};
		}
		data.push_back({});
		EXPECT_NE(checksum(data), zeros) << n;
	}
	/* Two words that change places. */
	std::vector<std::byte> data(96);
	data[0] = std::byte{1};
	const std::uint64_t first = checksum(data);
	data[0] = std::byte{0};
	for (const std::size_t at : {8U, 32U, 64U}) {
		data[at] = std::byte{1};
		EXPECT_NE(checksum(data), first) << at;
		data[at] = std::byte{0};
	}
}

} // namespace
