/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "protocol/scan.hpp"

#include <cstring>
#include <gtest/gtest.h>
#include <random>
#include <vector>

namespace npr {
namespace {

constexpr std::uint64_t sig = 0x5a17c0de9e3779b9ULL;

std::byte pattern_byte(std::uint64_t addr)
{
	return static_cast<std::byte>(sig >> 8 * (addr % 8));
}

/* What was read from [raddr, raddr + n), cut into entries of the given lengths. */
struct transfer {
	std::vector<std::vector<std::byte>> parts;
	std::vector<ibv_sge> sgl;
	std::uint64_t raddr;

	transfer(std::uint64_t from, const std::vector<std::byte> &data, const std::vector<std::size_t> &cut)
	    : raddr(from)
	{
		std::size_t at = 0;
		for (std::size_t n : cut) {
			parts.emplace_back(data.begin() + static_cast<std::ptrdiff_t>(at),
					   data.begin() + static_cast<std::ptrdiff_t>(at + n));
			at += n;
		}
		for (auto &p : parts)
			sgl.push_back({reinterpret_cast<std::uintptr_t>(p.data()),
				       static_cast<std::uint32_t>(p.size()), 0});
	}

	[[nodiscard]] page_bits scan(std::uint64_t offset, std::uint64_t length) const
	{
		page_bits out;
		scan_suspicious(sgl, offset, raddr + offset, length, sig, raddr, out);
		return out;
	}
};

std::vector<std::byte> quiet(std::size_t n)
{
	return std::vector<std::byte>(n, std::byte{1});
}

TEST(Scan, DataWithoutTheSignatureIsNotSuspicious)
{
	const transfer t(0x1000, quiet(8192), {8192});
	EXPECT_FALSE(t.scan(0, 8192).any());
}

/* Of one buffer, whatever it begins and ends with, and wherever the signature is. */
TEST(Scan, AnythingSuspiciousIsASuspiciousPage)
{
	std::mt19937_64 rng(1);
	unsigned found = 0;

	for (unsigned i = 0; i < 20'000; ++i) {
		const std::size_t n = 1 + rng() % 300;
		const std::uint64_t raddr = 0x1000 + rng() % 128;
		auto d = quiet(n);
		/* units, and what is nearly one */
		const std::size_t from = rng() % 3 ? (-raddr % 64 + rng() % 3 * 64) % n : rng() % n;
		const std::size_t to = std::min(n, from + (rng() % 3 ? 64 : rng() % 80));
		for (std::size_t k = rng() % 2 ? 0 : from; k < to; ++k)
			d[k] = pattern_byte(raddr + k);
		const transfer t(raddr, d, {n});
		const bool any = any_suspicious(d.data(), raddr, n, sig);
		ASSERT_EQ(any, t.scan(0, n).any()) << n << " bytes at " << raddr << ", signature to " << to;
		found += any;
	}
	EXPECT_GT(found, 1000U);
	EXPECT_LT(found, 19'000U);
}

TEST(Scan, OneUnitMakesItsPageSuspiciousAndNoOther)
{
	auto d = quiet(3 * 4096);
	for (std::uint64_t i = 4096 + 64; i < 4096 + 128; ++i)
		d[i] = pattern_byte(i);
	const auto found = transfer(0x1000, d, {d.size()}).scan(0, d.size());
	EXPECT_FALSE(found.test(0));
	EXPECT_TRUE(found.test(1));
	EXPECT_FALSE(found.test(2));
}

TEST(Scan, LastUnitOfAPageCounts)
{
	auto d = quiet(8192);
	for (std::uint64_t i = 4096 - 64; i < 4096; ++i)
		d[i] = pattern_byte(i);
	EXPECT_TRUE(transfer(0x1000, d, {8192}).scan(0, 8192).test(0));
	EXPECT_FALSE(transfer(0x1000, d, {8192}).scan(0, 8192).test(1));
}

TEST(Scan, UnitsAreAlignedInRemoteAddressNotInTheBuffer)
{
	/* begins 24 bytes before a unit: the absent unit is at odd places of the buffer */
	const std::uint64_t raddr = 0x1000 + 64 - 24;
	auto d = quiet(24 + 64 + 10);
	for (std::uint64_t i = 24; i < 24 + 64; ++i)
		d[i] = pattern_byte(raddr + i);
	EXPECT_TRUE(transfer(raddr, d, {d.size()}).scan(0, d.size()).test(0));
}

TEST(Scan, ASignatureWordThatIsNotTheFirstOfItsUnitIsNotSuspicious)
{
	auto d = quiet(4096);
	for (std::uint64_t i = 8; i < 64; ++i)
		d[i] = pattern_byte(i);
	EXPECT_FALSE(transfer(0x1000, d, {4096}).scan(0, 4096).any());
}

TEST(Scan, EveryShortEdgeOfAnAbsentPageIsFound)
{
	for (std::uint64_t start = 0; start < 130; ++start) {
		for (std::uint64_t n : {1U, 2U, 7U, 8U, 9U, 63U, 64U, 65U, 100U}) {
			const std::uint64_t raddr = 0x2000 + start;
			std::vector<std::byte> d(n);
			for (std::uint64_t i = 0; i < n; ++i)
				d[i] = pattern_byte(raddr + i);
			EXPECT_TRUE(transfer(raddr, d, {n}).scan(0, n).test(0)) << start << " " << n;
		}
	}
}

TEST(Scan, OneWrongByteInAnEdgeClearsIt)
{
	for (std::uint64_t wrong = 0; wrong < 10; ++wrong) {
		const std::uint64_t raddr = 0x2000 + 30;
		std::vector<std::byte> d(10);
		for (std::uint64_t i = 0; i < 10; ++i)
			d[i] = pattern_byte(raddr + i);
		d[wrong] ^= std::byte{1};
		EXPECT_FALSE(transfer(raddr, d, {10}).scan(0, 10).any()) << wrong;
	}
}

TEST(Scan, EntriesMayCutAUnitAnywhere)
{
	std::mt19937 rng(7);
	for (int round = 0; round < 2000; ++round) {
		const std::uint64_t raddr = 0x5000 + rng() % 5000;
		const std::size_t n = 1 + rng() % 9000;
		auto d = quiet(n);
		page_bits want;
		/* absent: some whole units, as far as they are read */
		for (int k = 0; k < 3; ++k) {
			const std::uint64_t unit = (raddr + rng() % n) / 64 * 64;
			for (std::uint64_t a = std::max(unit, raddr); a < std::min(unit + 64, raddr + n); ++a) {
				d[a - raddr] = pattern_byte(a);
				want.set(static_cast<unsigned>((a >> 12) - (raddr >> 12)));
			}
		}
		std::vector<std::size_t> cut;
		std::size_t left = n;
		for (int k = 0; k < 5; ++k) {
			const std::size_t part = rng() % (left + 1);
			cut.push_back(part);
			left -= part;
		}
		cut.push_back(left);
		const auto got = transfer(raddr, d, cut).scan(0, n);
		for (unsigned p = 0; p < 5; ++p)
			ASSERT_EQ(got.test(p), want.test(p)) << round << " page " << p;
	}
}

TEST(Scan, StartsAtTheOffsetItIsGiven)
{
	auto d = quiet(8192);
	for (std::uint64_t i = 0; i < 4096; ++i)
		d[i] = pattern_byte(i);
	const transfer t(0x1000, d, {100, 8092});
	EXPECT_FALSE(t.scan(4096, 4096).any());
	EXPECT_TRUE(t.scan(4032, 64).any());
}

TEST(Scan, AnyUnitMatchesLooksAtEveryUnit)
{
	for (std::size_t units = 1; units < 40; ++units) {
		for (std::size_t hit = 0; hit < units; ++hit) {
			auto d = quiet(units * 64);
			std::memcpy(&d[hit * 64], &sig, 8);
			EXPECT_TRUE(any_unit_matches(d.data(), units, sig)) << units << " " << hit;
			EXPECT_EQ(any_unit_matches(d.data(), hit, sig), false);
		}
	}
}

} // namespace
} // namespace npr
