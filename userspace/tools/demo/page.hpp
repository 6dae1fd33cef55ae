/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What a page of the demo holds, and who may change it.
 *
 * Every word of a page follows from the page's number and version, and a
 * checksum over the rest stands in the page. Who knows the version that a page
 * has to have can so tell right data from every other: an older version, a
 * page that was never written, another page, and any mixture of these.
 *
 * The version that a page has to have stands in the ledger, which the two
 * processes share and which no RDMA touches. A page is changed, or looked at,
 * only by the one who has locked its entry. Nobody replaces a version before
 * it has been found in the page, but for the first one. So no write can get
 * lost, and no read can be stale, without being noticed.
 */
#ifndef NPRDMA_DEMO_PAGE_HPP
#define NPRDMA_DEMO_PAGE_HPP

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace demo
{

inline constexpr std::size_t page_size = 4096;
inline constexpr std::size_t page_words = page_size / sizeof(std::uint64_t);

using page_data = std::span<std::uint64_t, page_words>;
using const_page_data = std::span<const std::uint64_t, page_words>;

enum class writer : std::uint64_t { peer = 0x72656570, cpu = 0x757063 };

/* The first words of a page. */
enum header : std::size_t { header_page, header_version, header_writer, header_checksum, header_words };

/* A bijection that spreads every bit (the finaliser of MurmurHash3). */
constexpr std::uint64_t mix(std::uint64_t x) noexcept
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdULL;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ULL;
	return x ^ x >> 33;
}

/* A small generator: what is wanted is speed, and the same run for the same seed. */
class random_source
{
public:
	explicit random_source(std::uint64_t seed) noexcept : state_(mix(seed + 1)) {}

	std::uint64_t next() noexcept { return mix(state_ += 0x9e3779b97f4a7c15ULL); }

	/* Uniform enough: bounds are far below 2^32. */
	std::uint32_t below(std::uint32_t bound) noexcept
	{
		return static_cast<std::uint32_t>(((next() >> 32) * bound) >> 32);
	}

private:
	std::uint64_t state_;
};

/* The words of a page's body: start, start + step, ... */
struct page_body {
	static constexpr std::uint64_t step = 0x9e3779b97f4a7c15ULL;

	std::uint64_t start;

	page_body(std::uint64_t page, std::uint64_t version) noexcept : start(mix(mix(page) ^ version)) {}
};

/* A sum that depends on the place of each word. */
class checksum
{
public:
	void add(std::uint64_t word) noexcept
	{
		low_ += word;
		high_ += low_;
	}
	[[nodiscard]] std::uint64_t value() const noexcept { return high_ ^ std::rotl(low_, 32); }

private:
	std::uint64_t low_ = 1, high_ = 0;
};

inline void write_page(page_data to, std::uint64_t page, std::uint64_t version, writer who) noexcept
{
	std::uint64_t word = page_body(page, version).start;
	checksum sum;

	to[header_page] = page;
	to[header_version] = version;
	to[header_writer] = static_cast<std::uint64_t>(who);
	for (std::size_t i = 0; i < header_checksum; i++)
		sum.add(to[i]);
	for (std::size_t i = header_words; i < page_words; i++, word += page_body::step) {
		to[i] = word;
		sum.add(word);
	}
	to[header_checksum] = sum.value();
}

enum class verdict {
	good,
	never_written, /* all zero */
	wrong_page,
	wrong_version,
	damaged, /* header as expected, rest not: a mixture */
};

constexpr const char *to_string(verdict v) noexcept
{
	switch (v) {
	case verdict::good:
		return "good";
	case verdict::never_written:
		return "all zero";
	case verdict::wrong_page:
		return "not this page";
	case verdict::wrong_version:
		return "another version";
	case verdict::damaged:
		return "damaged";
	}
	return "?";
}

/* Compares every word with what it has to be, and the checksum with the page's. */
[[nodiscard]] inline verdict check_page(const_page_data from, std::uint64_t page,
					std::uint64_t version) noexcept
{
	std::uint64_t word = page_body(page, version).start;
	std::uint64_t different = 0, any = 0;
	checksum sum;

	for (std::size_t i = 0; i < header_checksum; i++)
		sum.add(from[i]);
	for (std::size_t i = header_words; i < page_words; i++, word += page_body::step) {
		different |= from[i] ^ word;
		sum.add(from[i]);
	}
	different |= from[header_page] ^ page;
	different |= from[header_version] ^ version;
	different |= from[header_checksum] ^ sum.value();
	if (!different) [[likely]]
		return verdict::good;

	for (std::uint64_t x : from)
		any |= x;
	if (!any)
		return verdict::never_written;
	if (from[header_page] != page)
		return verdict::wrong_page;
	if (from[header_version] != version)
		return verdict::wrong_version;
	return verdict::damaged;
}

/* One entry for each page: the version it has to have, and a lock. */
class ledger
{
public:
	using entry = std::atomic<std::uint32_t>;
	static_assert(entry::is_always_lock_free, "the ledger is shared between processes");

	ledger() = default;
	explicit ledger(std::span<entry> entries) noexcept : entries_(entries) {}

	[[nodiscard]] std::uint32_t pages() const noexcept
	{
		return static_cast<std::uint32_t>(entries_.size());
	}

	/* Acquire: what the one before wrote to the page is seen from here on. */
	[[nodiscard]] std::optional<std::uint32_t> try_lock(std::uint32_t page) noexcept
	{
		std::uint32_t version = entries_[page].load(std::memory_order_relaxed);

		if (version & locked || !entries_[page].compare_exchange_strong(version, version | locked,
										std::memory_order_acquire,
										std::memory_order_relaxed))
			return std::nullopt;
		return version;
	}

	/* Whoever knows that nobody changes pages now may ask without the lock. */
	[[nodiscard]] std::uint32_t version(std::uint32_t page) const noexcept
	{
		return entries_[page].load(std::memory_order_acquire) & ~locked;
	}

	/* Release: see try_lock(). */
	void unlock(std::uint32_t page, std::uint32_t version) noexcept
	{
		entries_[page].store(version, std::memory_order_release);
	}

private:
	static constexpr std::uint32_t locked = 1U << 31;

	std::span<entry> entries_;
};

} // namespace demo

#endif // NPRDMA_DEMO_PAGE_HPP
