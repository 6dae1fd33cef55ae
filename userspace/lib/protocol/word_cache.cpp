/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "protocol/word_cache.hpp"

#include <algorithm>
#include <bit>

namespace npr {

word_cache::word_cache(unsigned slots)
{
	/* two sets at least: a shift by 64 bits is not defined */
	const std::size_t n = std::bit_ceil(std::max<std::size_t>(slots, 2 * ways));

	words_.resize(n * slot_words);
	keys_.resize(n);
	victim_.resize(n / ways);
	shift_ = 64 - static_cast<unsigned>(std::countr_zero(n / ways));
}

std::uint64_t *word_cache::make(std::uint64_t k) noexcept
{
	if (std::uint64_t *w = find(k))
		return w;
	const std::size_t s = set_of(k);
	const std::size_t i = s + victim_[s / ways]++ % ways;
	keys_[i] = k;
	last_key_ = k;
	last_ = &words_[i * slot_words];
	std::fill_n(last_, slot_words, unknown_word);
	return last_;
}

} // namespace npr
