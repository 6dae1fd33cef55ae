/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Residency words that one QP has seen, in slots of 512 words (2 MiB of a
 * region), four-way associative. The memory is reserved once and touched on
 * first use, so nothing on the data path allocates or fails. A stale word does
 * no harm: it fails to prove something. A lost word is read again.
 *
 * Words stay as they are in the owner's memory, which is little endian: they are compared as a whole,
 * and with the two bits below.
 */
#ifndef NPR_WORD_CACHE_HPP
#define NPR_WORD_CACHE_HPP

#include <bit>
#include <cstddef>
#include <cstdint>
#include <rdma/nprdma.h>

#include "protocol/untouched.hpp"

namespace npr {

/* Never a word of a page: no page changes that often. */
inline constexpr std::uint64_t unknown_word = ~0ULL;
inline constexpr unsigned slot_words = 512;

[[nodiscard]] constexpr std::uint64_t to_le64(std::uint64_t v) noexcept
{
	return std::endian::native == std::endian::little ? v : __builtin_bswap64(v);
}

inline constexpr std::uint64_t word_readable = to_le64(RDMA_NP_WORD_READABLE);
inline constexpr std::uint64_t word_writable = to_le64(RDMA_NP_WORD_WRITABLE);

class word_cache {
public:
	/* Throws std::bad_alloc. At least four slots; rounded up to a power of two. */
	explicit word_cache(unsigned slots);

	/* @region: a number of our own, never 0 and never used for another region. */
	[[nodiscard]] std::uint64_t get(std::uint32_t region, std::uint64_t page) noexcept
	{
		const std::uint64_t *w = find(key(region, page));
		return w ? w[page % slot_words] : unknown_word;
	}

	/* For several pages of one slot, starting with @page: null if nothing is known. */
	[[nodiscard]] const std::uint64_t *peek(std::uint32_t region, std::uint64_t page) noexcept
	{
		const std::uint64_t *w = find(key(region, page));
		return w ? w + page % slot_words : nullptr;
	}

	void set(std::uint32_t region, std::uint64_t page, std::uint64_t word) noexcept
	{
		make(key(region, page))[page % slot_words] = word;
	}

	void forget(std::uint32_t region, std::uint64_t page) noexcept
	{
		if (std::uint64_t *w = find(key(region, page)))
			w[page % slot_words] = unknown_word;
	}

private:
	static constexpr unsigned ways = 4;

	[[nodiscard]] static std::uint64_t key(std::uint32_t region, std::uint64_t page) noexcept
	{
		return std::uint64_t{region} << 40 | page / slot_words;
	}

	[[nodiscard]] std::size_t set_of(std::uint64_t k) const noexcept
	{
		return static_cast<std::size_t>((k * 0x9e3779b97f4a7c15ULL) >> shift_) * ways;
	}

	[[nodiscard]] std::uint64_t *find(std::uint64_t k) noexcept
	{
		if (k == last_key_)
			return last_;
		const std::size_t s = set_of(k);
		for (std::size_t i = s; i < s + ways; ++i) {
			if (keys_[i] == k) {
				last_key_ = k;
				return last_ = &words_[i * slot_words];
			}
		}
		return nullptr;
	}

	std::uint64_t *make(std::uint64_t k) noexcept;

	untouched_vector<std::uint64_t> keys_, words_;
	untouched_vector<std::uint8_t> victim_;
	unsigned shift_;
	std::uint64_t last_key_ = 0;
	std::uint64_t *last_ = nullptr;
};

} // namespace npr

#endif
