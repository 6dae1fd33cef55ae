/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A set of pages of one piece of a work request, and its runs. What is asked
 * for, read again or written again is a list of at most a few runs; filling the
 * smallest gaps makes a set fit, because repeating what was right already is
 * harmless for READ and for WRITE.
 */
#ifndef NPR_PAGE_BITS_HPP
#define NPR_PAGE_BITS_HPP

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace npr {

class page_bits {
public:
	static constexpr unsigned capacity = 512;

	struct run {
		unsigned first;
		unsigned end;
	};

	/* Room for pages below @limit: most work requests touch few. */
	explicit page_bits(unsigned limit = capacity) noexcept { reset(limit); }

	/* Empty. */
	void reset(unsigned limit) noexcept
	{
		used_ = (limit + 63) / 64;
		for (unsigned i = 0; i < used_; ++i)
			words_[i] = 0;
	}

	/* All of [0, n), and room for no more. */
	void set_first(unsigned n) noexcept
	{
		used_ = (n + 63) / 64;
		for (unsigned i = 0; i < used_; ++i)
			words_[i] = ~0ULL;
		if (n % 64)
			words_[used_ - 1] = ~0ULL >> (64 - n % 64);
	}

	void set(unsigned i) noexcept { words_[i / 64] |= 1ULL << (i % 64); }
	void clear(unsigned i) noexcept { words_[i / 64] &= ~(1ULL << (i % 64)); }
	[[nodiscard]] bool test(unsigned i) const noexcept { return words_[i / 64] >> (i % 64) & 1; }

	[[nodiscard]] bool any() const noexcept
	{
		std::uint64_t all = 0;
		for (unsigned i = 0; i < used_; ++i)
			all |= words_[i];
		return all != 0;
	}

	[[nodiscard]] unsigned count() const noexcept
	{
		unsigned n = 0;
		for (unsigned i = 0; i < used_; ++i)
			n += static_cast<unsigned>(std::popcount(words_[i]));
		return n;
	}

	/* The first run at or after @from; first == end: none. */
	[[nodiscard]] run next_run(unsigned from) const noexcept
	{
		const unsigned first = find(from, 0);
		return {first, find(first, ~0ULL)};
	}

	/* All runs in turn: f(run). */
	template <class F>
	void for_each_run(F &&f) const
	{
		for (run r = next_run(0); r.first != r.end; r = next_run(r.end))
			f(r);
	}

	template <class F>
	void for_each(F &&f) const
	{
		for_each_run([&](run r) {
			for (unsigned i = r.first; i < r.end; ++i)
				f(i);
		});
	}

	/* From the first page to the last, gaps included. */
	[[nodiscard]] run hull() const noexcept
	{
		run h = next_run(0);
		for (run r = h; r.first != r.end; r = next_run(r.end))
			h.end = r.end;
		return h;
	}

	[[nodiscard]] unsigned runs() const noexcept
	{
		unsigned n = 0;
		std::uint64_t before = 0;
		for (unsigned i = 0; i < used_; ++i) {
			const std::uint64_t w = words_[i];
			/* few, as a rule, and the baseline CPU has no instruction to count bits */
			for (std::uint64_t starts = w & ~(w << 1 | before); starts; starts &= starts - 1)
				++n;
			before = w >> 63;
		}
		return n;
	}

	/* Fill the smallest gaps until at most @limit runs are left. */
	void merge_runs(unsigned limit) noexcept
	{
		if (runs() <= limit)
			return;
		std::array<run, capacity / 2> gaps;
		unsigned n = 0, end = 0;
		for_each_run([&](run r) {
			if (n++)
				gaps[n - 2] = {end, r.first};
			end = r.end;
		});
		const auto last = gaps.begin() + (n - 1);
		std::sort(gaps.begin(), last,
			  [](run a, run b) { return a.end - a.first > b.end - b.first; });
		for (auto g = gaps.begin() + (limit - 1); g != last; ++g)
			for (unsigned i = g->first; i < g->end; ++i)
				set(i);
	}

private:
	[[nodiscard]] unsigned find(unsigned from, std::uint64_t invert) const noexcept
	{
		while (from < used_ * 64) {
			const std::uint64_t w = (words_[from / 64] ^ invert) >> (from % 64);
			if (w)
				return from + static_cast<unsigned>(std::countr_zero(w));
			from = (from / 64 + 1) * 64;
		}
		return used_ * 64;
	}

	unsigned used_;
	std::array<std::uint64_t, capacity / 64> words_; /* used_ of them */
};

} // namespace npr

#endif
