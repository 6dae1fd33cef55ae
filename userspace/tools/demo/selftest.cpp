// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The demo says "0 mismatches". These tests say that it would not say so if a
 * page were lost, stale, foreign or mixed, and that the ledger lets one at a time.
 */
#include "page.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <thread>
#include <vector>

namespace
{

using namespace demo;

struct buffer {
	std::array<std::uint64_t, page_words> words{};

	buffer() = default;
	buffer(std::uint64_t page, std::uint64_t version) { write_page(words, page, version, writer::peer); }
	[[nodiscard]] verdict check(std::uint64_t page, std::uint64_t version) const
	{
		return check_page(words, page, version);
	}
};

TEST(Page, AnyWrongBitIsSeen)
{
	buffer b(7, 3);

	for (std::size_t i = 0; i < page_words; i++) {
		if (i == header_writer)
			continue;
		for (unsigned int bit = 0; bit < 64; bit++) {
			b.words[i] ^= 1ULL << bit;
			EXPECT_NE(b.check(7, 3), verdict::good) << "word " << i << " bit " << bit;
			b.words[i] ^= 1ULL << bit;
		}
	}
	b.words[header_writer]++;
	EXPECT_NE(b.check(7, 3), verdict::good) << "the checksum covers the writer";
}

TEST(Page, LostWriteIsAnotherVersion)
{
	EXPECT_EQ(buffer(7, 3).check(7, 4), verdict::wrong_version);
}

TEST(Page, PageThatWasNeverWrittenIsSaidSo)
{
	EXPECT_EQ(buffer().check(0, 0), verdict::never_written);
	EXPECT_EQ(buffer().check(7, 1), verdict::never_written);
}

TEST(Page, OtherPageIsSeen)
{
	EXPECT_EQ(buffer(8, 3).check(7, 3), verdict::wrong_page);
	EXPECT_EQ(buffer(3, 7).check(7, 3), verdict::wrong_page);
}

TEST(Page, SignatureIsSeen)
{
	buffer b;

	b.words.fill(0x5bd1e995a3c59ac3);
	EXPECT_EQ(b.check(7, 3), verdict::wrong_page);
}

TEST(Page, OneStaleUnitOf64BytesIsSeenWhereverItIs)
{
	const buffer old(7, 3), other(8, 4);

	for (const buffer *from : {&old, &other}) {
		for (std::size_t at = 0; at < page_words; at += 8) {
			buffer b(7, 4);

			std::copy_n(from->words.begin() + static_cast<std::ptrdiff_t>(at), 8,
				    b.words.begin() + static_cast<std::ptrdiff_t>(at));
			EXPECT_NE(b.check(7, 4), verdict::good) << "words from " << at;
		}
	}
}

TEST(Page, NewHeaderOnOldBodyIsDamaged)
{
	const buffer old(7, 3);
	buffer b(7, 4);

	std::copy(old.words.begin() + header_words, old.words.end(), b.words.begin() + header_words);
	EXPECT_EQ(b.check(7, 4), verdict::damaged);
}

TEST(Page, RightPageIsGood)
{
	for (std::uint64_t page : {0ULL, 1ULL, 786431ULL, 1ULL << 40})
		for (std::uint64_t version = 0; version < 5; version++)
			EXPECT_EQ(buffer(page, version).check(page, version), verdict::good);
}

TEST(Ledger, LockedPageCannotBeLocked)
{
	std::vector<ledger::entry> entries(4);
	ledger pages(entries);

	EXPECT_EQ(pages.try_lock(2), 0U);
	EXPECT_EQ(pages.try_lock(2), std::nullopt);
	EXPECT_EQ(pages.try_lock(1), 0U);
	pages.unlock(2, 5);
	EXPECT_EQ(pages.version(2), 5U);
	EXPECT_EQ(pages.try_lock(2), 5U);
}

TEST(Ledger, OneAtATime)
{
	constexpr std::uint32_t rounds = 100000;
	std::vector<ledger::entry> entries(1);
	ledger pages(entries);
	std::uint64_t plain = 0;
	const auto work = [&] {
		for (std::uint32_t done = 0; done < rounds;) {
			if (const auto version = pages.try_lock(0)) {
				plain++;
				pages.unlock(0, *version + 1);
				done++;
			} else {
				std::this_thread::yield();
			}
		}
	};
	std::jthread a(work), b(work);

	a.join();
	b.join();
	EXPECT_EQ(plain, 2 * rounds);
	EXPECT_EQ(pages.version(0), 2 * rounds);
}

} // namespace
