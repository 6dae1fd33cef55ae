/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * One lease of this process's own memory, as its users see it: they count themselves in and out.
 *
 * A queue pair remembers the lease that it used last, in a local_ticket. Most of its requests are for the same
 * buffers, and find their lease there without a look-up.
 */
#ifndef NPR_LOCAL_LEASE_HPP
#define NPR_LOCAL_LEASE_HPP

#include "world/event_channel.hpp"

#include <array>
#include <atomic>
#include <cstdint>
#include <infiniband/verbs.h>

namespace npr {

/* Never freed as long as its local_leases live: who counts himself in at one that is another's by now takes that back. */
struct local_lease {
	static constexpr unsigned stripes = 8;
	/*
	 * A lease that ends belongs to whoever sees first that nobody uses it any more, and frees it. Who looks
	 * for that may be late, and the lease another one's by then: hence its life is counted with the state.
	 */
	enum class state : std::uint8_t { free, live, ending, freed };
	static constexpr unsigned state_bits = 2;

	struct alignas(64) counter {
		std::atomic<std::uint32_t> users{0};
	};
	std::array<counter, stripes> counters;
	std::atomic<std::uint64_t> life{0}; /* number, and in the low bits the state */
	std::atomic<bool> used{false};	    /* since somebody has looked for idle ones */

	[[nodiscard]] static state state_of(std::uint64_t life) noexcept
	{
		return static_cast<state>(life & ((1U << state_bits) - 1));
	}
	[[nodiscard]] state at() const noexcept { return state_of(life.load(std::memory_order_seq_cst)); }

	/*
	 * Whoever withdraws a lease changes its life first and looks at the counters then. Here it is the other way
	 * round. As both are sequentially consistent, one of the two sees the other: it does not end under us.
	 */
	void count_in(unsigned stripe) noexcept { counters[stripe].users.fetch_add(1, std::memory_order_seq_cst); }
	/* True: it ends, and this may have been the last one. */
	[[nodiscard]] bool count_out(unsigned stripe) noexcept
	{
		counters[stripe].users.fetch_sub(1, std::memory_order_seq_cst);
		return at() == state::ending;
	}
	[[gnu::always_inline]] void be_used() noexcept
	{
		/* relaxed: a hint for who looks for idle ones; and not written without need, for others read the line */
		if (!used.load(std::memory_order_relaxed))
			used.store(true, std::memory_order_relaxed);
	}
};

/* For more uses of a lease that one queue pair has used, and remembers. */
class local_ticket {
public:
	/*
	 * Lease @l of [@first, @first + @length), which is @life, and that @recalls tells of, of which @seen were read before
	 * its life was looked at; see the members.
	 */
	void become(local_lease &l, std::uint64_t life, const event_channel &recalls, std::uint64_t seen, unsigned stripe, std::uint64_t first,
		    std::uint64_t length, std::uint64_t delta, std::uint32_t lkey, std::uint32_t token, bool write) noexcept
	{
		const bool live = local_lease::state_of(life) == local_lease::state::live;

		first_ = first;
		length_ = live ? length : 0;
		delta_ = delta;
		lkey_ = lkey;
		/* One that ends already is not given back here, for nobody would see that it was the last time. */
		token_ = live ? token : no_token;
		write_ = write;
		life_ = life;
		lease_ = &l;
		users_ = &l.counters[stripe].users;
		recalls_ = &recalls.posted();
		seen_ = seen;
	}
	/* The program's key of the memory. */
	void name(std::uint32_t lkey) noexcept { program_lkey_ = lkey; }
	[[nodiscard]] std::uint64_t first() const noexcept { return first_; }
	[[nodiscard]] std::uint64_t length() const noexcept { return length_; }
	/* The hold that each use is. */
	[[nodiscard]] std::uint32_t token() const noexcept { return token_; }

	/* Is all of @s under it, for all that was known when it was made? */
	[[nodiscard, gnu::always_inline]] bool covers(const ibv_sge &s, bool writes) const noexcept
	{
		const std::uint64_t at = s.addr - first_;

		return s.lkey == program_lkey_ && at < length_ && s.length <= length_ - at && (!writes || write_);
	}
	/* One more use of it, of what it covers. False: it has ended; now the hold is to be given back by its token. */
	[[nodiscard, gnu::always_inline]] bool take() noexcept
	{
		local_lease *const l = lease_;

		users_->fetch_add(1, std::memory_order_seq_cst);
		/*
		 * No recall has come since, read or not; and nothing else has ended it. Acquire: as event_channel::has_events().
		 * If one has come, of whichever lease, this is made anew.
		 */
		if (recalls_->load(std::memory_order_acquire) != seen_ || l->life.load(std::memory_order_seq_cst) != life_)
			[[unlikely]]
			return false;
		l->be_used();
		return true;
	}
	/* One less. False: the hold is to be given back by its token. */
	[[nodiscard, gnu::always_inline]] bool give() noexcept
	{
		local_lease *const l = lease_;

		users_->fetch_sub(1, std::memory_order_seq_cst);
		if (l->life.load(std::memory_order_seq_cst) == life_) [[likely]]
			return true;
		/* It may be ending. Counted in again, as one that is another's may be, it ends with who counts us out. */
		users_->fetch_add(1, std::memory_order_seq_cst);
		return false;
	}
	/* @s as the HCA is given it. */
	[[nodiscard]] ibv_sge wire(const ibv_sge &s) const noexcept { return {s.addr + delta_, s.length, lkey_}; }

private:
	std::uint64_t first_ = 0, length_ = 0; /* in the program's addresses; 0: there is none */
	std::uint64_t delta_ = 0;	       /* from these to that under @lkey */
	std::uint32_t lkey_ = 0, program_lkey_ = 0;
	static constexpr std::uint32_t no_token = ~0U; /* no hold is this one */
	std::uint32_t token_ = no_token;
	bool write_ = false;
	std::uint64_t life_ = 0; /* of the lease, when it was like this */
	local_lease *lease_ = nullptr;
	std::atomic<std::uint32_t> *users_ = nullptr; /* of it, with our stripe */
	const std::atomic<std::uint64_t> *recalls_ = nullptr; /* how many there were, */
	std::uint64_t seen_ = 0;			      /* and how many when it was like this */
};

} // namespace npr

#endif
