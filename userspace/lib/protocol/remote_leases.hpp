/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Leases of the peer's memory that one QP has, and which parts of it are worth one.
 *
 * A lease is of bytes in one part of a region, 2 MiB of the region's addresses as a huge page is, and may reach into
 * the next part by so much that each short request which begins in its part can be inside of it.
 * It is found by its region and part, as long as it is live. A lease that ends is not found
 * any more, but stays in its place until the last request under it has completed (I9).
 *
 * What a look-up reads of the four leases that a part may have is one cache line. Nothing here allocates but the
 * constructor, and what is never used of that takes no memory.
 */
#ifndef NPR_REMOTE_LEASES_HPP
#define NPR_REMOTE_LEASES_HPP

#include "protocol/untouched.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

namespace npr {

class remote_leases {
public:
	static constexpr unsigned part_shift = 21;
	static constexpr std::uint32_t part = 1U << part_shift, overlap = 256U << 10;
	/* Used again within this time, in ns, a part is worth a lease. */
	static constexpr std::uint64_t warm = 100'000'000;
	/* After no lease was got, so long none is asked for there. */
	static constexpr std::uint64_t pause = 1'000'000'000;
	/* After one was got that is not of the whole part, so long no larger one is: pages come one by one. */
	static constexpr std::uint64_t growth = 20'000'000;
	/* The owner's kernel allows 256 holds: the others are for requests that need one each. */
	static constexpr std::uint32_t most = 192;
	static constexpr std::uint32_t none = ~0U;

	/* Bytes of a part, and what for: what a request needs, or a lease gives. */
	struct range {
		std::uint64_t key; /* never 0: see key_of() */
		std::uint32_t first, end; /* bytes behind the part's first one */
		bool write;
	};

	/* @region: a number that is never 0, and never another region's. @index: that of a part. */
	[[nodiscard]] static std::uint64_t key_of(std::uint32_t region, std::uint32_t index) noexcept
	{
		return std::uint64_t{region} << 32 | index;
	}

	[[nodiscard]] bool empty() const noexcept { return !count_; }
	/* Never 0, and another one whenever a lease comes or is not found any more. */
	[[nodiscard]] std::uint64_t version() const noexcept { return version_; }

	/* The number of a live lease of all of @r. */
	[[nodiscard]] std::uint32_t find(const range &r) const noexcept
	{
		const std::uint32_t s = set_of(r.key);

		for (std::uint32_t k = 0; k < ways; ++k) {
			const tag &t = sets_[s].tags[k];

			if (t.key == r.key && t.first <= r.first && r.end <= t.end() && (t.write() || !r.write))
				return s * ways + k;
		}
		return none;
	}

	/* A request is posted under lease @n, which is live. */
	void take(std::uint32_t n) noexcept
	{
		++leases_[n].users;
		use(n);
	}
	/* It is not idle. */
	void use(std::uint32_t n) noexcept { leases_[n].used = ++uses_; }

	/* One has completed. True: it was the last one of a lease that ends. */
	[[nodiscard]] bool give(std::uint32_t n) noexcept { return !--leases_[n].users && !is_live(n); }

	/* It is not found any more. True: no request is under way under it. */
	[[nodiscard]] bool withdraw(std::uint32_t n) noexcept
	{
		tag_of(n).key = 0;
		++version_;
		return !leases_[n].users;
	}

	/* It has gone back. */
	void erase(std::uint32_t n) noexcept
	{
		leases_[n] = {};
		--count_;
	}

	/* Where a lease of this part can be: the place of none, or of the one idle for the longest time. */
	[[nodiscard]] std::uint32_t place(std::uint64_t key) const noexcept
	{
		const std::uint32_t first = set_of(key) * ways;
		std::uint32_t best = none;

		for (std::uint32_t n = first; n < first + ways; ++n) {
			if (!leases_[n].hold)
				return n;
			if (!leases_[n].users && (best == none || leases_[n].used < leases_[best].used))
				best = n;
		}
		return best;
	}

	/* In a place of none. @region: its id. @rkey: that of the lease. */
	void insert(std::uint32_t n, const range &r, std::uint64_t hold, std::uint64_t region, std::uint32_t rkey) noexcept
	{
		tag_of(n) = {r.key, r.first, r.end << 1 | r.write};
		leases_[n] = {hold, region, ++uses_, 0, rkey};
		++count_;
		++version_;
	}

	[[nodiscard]] bool is_live(std::uint32_t n) const noexcept { return sets_[n / ways].tags[n % ways].key != 0; }
	/* Of a live one. */
	[[nodiscard]] range bytes(std::uint32_t n) const noexcept
	{
		const tag &t = sets_[n / ways].tags[n % ways];

		return {t.key, t.first, t.end(), t.write()};
	}
	[[nodiscard]] std::uint32_t rkey(std::uint32_t n) const noexcept { return leases_[n].rkey; }
	[[nodiscard]] std::uint64_t hold(std::uint32_t n) const noexcept { return leases_[n].hold; }
	[[nodiscard]] std::uint64_t region(std::uint32_t n) const noexcept { return leases_[n].region; }

	/* The lease, which may be one that ends, with this hold: never 0. */
	[[nodiscard]] std::uint32_t by_hold(std::uint64_t hold) const noexcept
	{
		for (std::uint32_t n = 0; count_ && n < most; ++n)
			if (leases_[n].hold == hold)
				return n;
		return none;
	}

	/* Is there one that ends, and waits for its last request? */
	[[nodiscard]] bool any_ends() const noexcept
	{
		for (std::uint32_t n = 0; count_ && n < most; ++n)
			if (leases_[n].hold && !is_live(n))
				return true;
		return false;
	}

	template <class F> void for_each_live(F f)
	{
		for (std::uint32_t n = 0; count_ && n < most; ++n)
			if (is_live(n))
				f(n);
	}

	/* Those not used since the last call. */
	template <class F> void for_each_idle(F f)
	{
		for_each_live([&](std::uint32_t n) {
			if (leases_[n].used <= aged_)
				f(n);
		});
		aged_ = uses_;
	}

	/* A request that begins in a part, at @now, finds no lease. True: it is worth one. */
	[[nodiscard]] bool wants(std::uint64_t key, bool write, std::uint64_t now) noexcept
	{
		candidate &c = candidate_of(key, write);

		if (now < c.seen)
			return false; /* not again before that */
		const bool again = c.expected || (c.seen && now - c.seen < warm);
		c.seen = now;
		return again;
	}

	/* Already the first request there is worth one. */
	void expect(std::uint64_t key, bool write) noexcept { candidate_of(key, write).expected = true; }
	/* Of no part in [@first, @last] is it. */
	void expect_none(std::uint64_t first, std::uint64_t last) noexcept
	{
		for (candidate &c : candidates_)
			c.expected &= c.key < first || c.key > last;
	}

	/* One was got at @now. */
	void granted(std::uint64_t key, bool write, std::uint64_t now) noexcept
	{
		not_before(key, write, now + growth);
	}

	/* No lease was got at @now. */
	void refused(std::uint64_t key, bool write, std::uint64_t now) noexcept
	{
		not_before(key, write, now + pause);
	}

private:
	static constexpr std::uint32_t ways = 4;

	/* What is looked at to find a lease. */
	struct tag {
		std::uint64_t key = 0; /* 0: none, or one that ends */
		std::uint32_t first = 0;
		std::uint32_t end_write = 0; /* no lease is of 2 GiB */
		[[nodiscard]] std::uint32_t end() const noexcept { return end_write >> 1; }
		[[nodiscard]] bool write() const noexcept { return end_write & 1; }
	};
	struct alignas(64) set {
		std::array<tag, ways> tags;
	};
	static_assert(sizeof(set) == 64);

	struct lease {
		std::uint64_t hold = 0; /* 0: none */
		std::uint64_t region = 0;
		std::uint64_t used = 0; /* when last, by the count of all uses */
		std::uint32_t users = 0;
		std::uint32_t rkey = 0;
	};

	/* A part where requests begin that find no lease. */
	struct candidate {
		std::uint64_t key = 0;
		std::uint64_t seen = 0; /* in the future: so long no lease is asked for */
		bool write = false;
		bool expected = false;
	};

	/* So none is asked for, and what was expected there has been. */
	void not_before(std::uint64_t key, bool write, std::uint64_t time) noexcept
	{
		candidate &c = candidate_of(key, write);

		c.seen = time;
		c.expected = false;
	}

	[[nodiscard]] static std::uint32_t hash(std::uint64_t key) noexcept
	{
		return static_cast<std::uint32_t>((key * 0x9e3779b97f4a7c15ULL) >> 32);
	}
	[[nodiscard]] static std::uint32_t set_of(std::uint64_t key) noexcept
	{
		return static_cast<std::uint32_t>(std::uint64_t{hash(key)} * (most / ways) >> 32);
	}
	[[nodiscard]] tag &tag_of(std::uint32_t n) noexcept { return sets_[n / ways].tags[n % ways]; }

	[[nodiscard]] candidate &candidate_of(std::uint64_t key, bool write) noexcept
	{
		const auto first = candidates_.begin() + hash(key) % (candidates_.size() / ways) * ways;
		const auto found = std::find_if(first, first + ways, [&](const candidate &c) {
			return c.key == key && c.write == write;
		});

		if (found != first + ways)
			return *found;
		return *std::min_element(first, first + ways, [](const candidate &x, const candidate &y) {
			return x.seen < y.seen;
		}) = {key, 0, write, false};
	}

	/* In one piece, for a page is the least that is touched. */
	struct table {
		std::array<candidate, 256> candidates;
		std::array<set, most / ways> sets;
		std::array<lease, most> leases;
	};
	untouched_vector<table> table_ = untouched_vector<table>(1);
	std::array<candidate, 256> &candidates_ = table_[0].candidates;
	set *const sets_ = table_[0].sets.data();
	lease *const leases_ = table_[0].leases.data();
	std::uint64_t uses_ = 0, aged_ = 0, version_ = 1;
	std::uint32_t count_ = 0; /* with those that end */
};

} // namespace npr

#endif
