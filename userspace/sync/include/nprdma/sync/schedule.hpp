/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Who averages with whom, round by round: divide-and-shuffle synchronisation (arXiv 2007.03298).
 *
 * A round divides the workers into groups. The members of a group replace their parameters by the group's
 * mean; the next round has other groups, so what one worker learned spreads to all. A schedule is data that
 * every worker computes by itself from the same numbers: no message is needed to agree on it.
 *
 * Some schedules promise that a number of rounds without updates between them gives every worker the exact
 * mean of all. mixes_exactly() proves that for any schedule, in exact arithmetic.
 */
#ifndef NPRDMA_SYNC_SCHEDULE_HPP
#define NPRDMA_SYNC_SCHEDULE_HPP

#include <nprdma/export.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nprdma::sync
{

/* A worker: 0 to the number of workers less one. */
using rank_t = std::uint32_t;

inline constexpr std::uint32_t max_workers = 4096;

struct group {
	std::vector<rank_t> members; /* ascending */
	/* Of each member's values in the group's mean; one for each member, or none: all the same. */
	std::vector<std::uint32_t> weights;

	[[nodiscard]] std::uint32_t weight(std::size_t member) const noexcept
	{
		return weights.empty() ? 1 : weights[member];
	}
	bool operator==(const group &) const = default;
};

/* Each worker is in exactly one group. A group of one averages nothing. */
struct NPRDMA_API grouping {
	std::vector<group> groups;

	/* The group of @worker. Throws std::out_of_range: it is in none. */
	[[nodiscard]] const group &of(rank_t worker) const &;
	const group &of(rank_t worker) const && = delete;
	bool operator==(const grouping &) const = default;
};

class NPRDMA_API schedule
{
public:
	/* That @rounds rounds without updates give the exact mean. */
	struct promise {
		std::uint32_t rounds = 0; /* 0: nothing is promised */
		/* They may begin with any round; otherwise with one whose number is a multiple of @rounds. */
		bool from_any = false;
	};

	/* All constructors throw std::invalid_argument, which says what is wrong. */

	/* One group of all: what a full all-reduce does. */
	static schedule full(std::uint32_t workers);
	/* No groups: the workers stay alone. */
	static schedule local(std::uint32_t workers);
	/*
	 * Neighbours of a ring, {0 1}{2 3}... and {1 2}{3 4}...{N-1 0} in turn. With four workers this is the
	 * authors' schedule, and two rounds give the exact mean. With an odd number one is left alone in each
	 * round.
	 */
	static schedule pairs(std::uint32_t workers);
	/* rows * columns workers; the rows and the columns of the grid in turn. Two rounds give the exact
	 * mean. */
	static schedule grid(std::uint32_t rows, std::uint32_t columns);
	/*
	 * The number of a worker written with digits of these radices, the first one the lowest: round i
	 * has those together that differ in digit i only. As many rounds as there are digits give the exact
	 * mean.
	 */
	static schedule mixed_radix(const std::vector<std::uint32_t> &radices);
	/*
	 * Any number of workers, in rows of at most @size and in columns that have of every row at least one
	 * worker. Rows and columns are unequal where the number does not divide, and the weights in a column
	 * see to it that two rounds give the exact mean. Who shares a column with another of its row changes,
	 * so in the long run all count the same.
	 */
	static schedule unequal(std::uint32_t workers, std::uint32_t size);
	/* Groups of about @size, which differ by at most one, drawn from @seed and the round's number alone.
	 */
	static schedule random(std::uint32_t workers, std::uint32_t size, std::uint64_t seed);
	/* These rounds again and again. What they promise is found out, for up to 64 workers and 16 rounds.
	 */
	static schedule listed(std::uint32_t workers, std::vector<grouping> rounds);
	/*
	 * A schedule by its name: "full", "local", "pairs", "grid", "grid:RxC", "radix:AxBxC",
	 * "unequal:SIZE", "random:SIZE:SEED", or rounds: "0,1|2,3;0,3|1,2". "+full:H" behind any of them has
	 * with_full_every(H).
	 */
	static schedule parse(std::string_view text, std::uint32_t workers);

	/* Every @rounds-th round is one group of all: a bound for how far any schedule lets workers drift
	 * (Gossip-PGA). */
	[[nodiscard]] schedule with_full_every(std::uint32_t rounds) const;

	[[nodiscard]] grouping at(std::uint64_t number) const;
	[[nodiscard]] std::uint32_t workers() const noexcept { return workers_; }
	[[nodiscard]] std::uint32_t largest_group() const noexcept { return largest_; }
	[[nodiscard]] const std::string &name() const noexcept { return name_; }
	[[nodiscard]] promise exact_mean() const noexcept { return promise_; }

private:
	enum class kind { listed, unequal, random };
	schedule(std::string name, std::uint32_t workers, std::vector<grouping> rounds, promise p);

	std::string name_;
	std::uint32_t workers_ = 0;
	std::uint32_t largest_ = 1;
	kind kind_ = kind::listed;
	std::vector<grouping> rounds_; /* listed: in turn */
	std::uint32_t size_ = 0;       /* otherwise: of groups */
	std::uint64_t seed_ = 0;
	std::uint32_t full_every_ = 0;
	promise promise_;
};

/*
 * Do the @count rounds from number @first on give each worker the mean of all, if nobody updates between
 * them? In fractions of integers, so without rounding. Throws std::overflow_error if 64 bits are not enough
 * for them.
 */
[[nodiscard]] NPRDMA_API bool mixes_exactly(const schedule &s, std::uint64_t first, std::uint32_t count);

} // namespace nprdma::sync

#endif
