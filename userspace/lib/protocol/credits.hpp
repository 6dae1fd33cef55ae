/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The entries of one CQ that the work requests of the library may fill, for all queue
 * pairs that complete there.
 *
 * Each entry of a send queue takes a credit when it is posted and gives it back when a CQE
 * has told that it is over. One that is unsignaled takes one as well, because it has a CQE if
 * it fails or is flushed. The entries that the application may fill by other means, above all
 * with receives, are no credits, so that nothing overruns the CQ.
 *
 * - A queue pair may have as many credits as it leaves to the others: k peers that do not answer
 *   leave 1/(k+1) of all. One that has none may take the last.
 * - Who finds too few stands in line; and while there is a line, credits are for those in it, each
 *   at his turn. There nobody is passed by but those who have to give back something first.
 * - Of what is posted unsignaled with nothing signaled behind it, the tail of a queue pair, nobody
 *   hears before that queue pair posts again. All tails together leave enough for any request:
 *   2 * tails + largest <= total, as who has a tail has to leave as much to the others.
 *
 * The lock is that of the CQ. Nothing here allocates.
 */
#ifndef NPR_CREDITS_HPP
#define NPR_CREDITS_HPP

#include <rdma/nprdma.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace npr {

class credits {
public:
	/* Someone in line. */
	struct waiter {
		std::uint32_t wants = 0; /* credits at once */
		std::uint32_t level = 0; /* how many there have to be for that */
		bool waits = false;
		waiter *next = nullptr;
	};

	/* For a WRITE and the words behind it, or a READ in two parts: nothing goes on with fewer. */
	static constexpr std::uint32_t least = 2;
	/* A READ of so many ranges, the bytes before its first whole unit, and words. */
	static constexpr std::uint32_t most = RDMA_NP_MAX_RANGES + 2;

	explicit credits(std::uint32_t total) noexcept
	    : total_(std::max(total, least)), largest_(std::min(total_, most)), free_(total_)
	{
	}
	credits(const credits &) = delete;
	credits &operator=(const credits &) = delete;

	[[nodiscard]] std::uint32_t total() const noexcept { return total_; }
	/* How many a request may need at once, whatever becomes of the CQ. */
	[[nodiscard]] std::uint32_t largest() const noexcept { return largest_; }
	[[nodiscard]] std::uint32_t used() const noexcept { return total_ - free_ - kept_; }

	/* Those that may be taken now. */
	[[nodiscard]] std::uint32_t free() const noexcept { return free_; }
	void take(std::uint32_t n) noexcept { free_ -= n; }
	void give(std::uint32_t n) noexcept { (first_ ? kept_ : free_) += n; }

	/* The tail of a queue pair has changed. */
	void tail(std::uint32_t before, std::uint32_t now) noexcept { tails_ += now - before; }
	/* May another entry be posted unsignaled? */
	[[nodiscard]] bool tail_may_grow() const noexcept { return 2 * (tails_ + 1) + largest_ <= total_; }

	[[nodiscard]] bool line() const noexcept { return first_; }
	/* @w wants @wants, for which there have to be @level; 0: nothing any more. */
	void line_up(waiter &w, std::uint32_t wants, std::uint32_t level) noexcept
	{
		w.wants = wants;
		w.level = wants ? level : 0;
		if (!w.waits && wants)
			append(w);
	}
	/* @w is no more. */
	void leave(waiter &w) noexcept
	{
		waiter *before = nullptr;

		if (!w.waits)
			return;
		for (waiter *i = first_; i != &w; i = i->next)
			before = i;
		(before ? before->next : first_) = w.next;
		if (last_ == &w)
			last_ = before;
		w.waits = false;
		if (!first_)
			free_ += std::exchange(kept_, 0);
	}
	/* Whose turn it is, with what there is: @go(w) takes what it can, and lines up again for more. */
	template <class F>
	void serve(F &&go) noexcept
	{
		waiter *const end = last_;

		for (bool more = first_; more && first_->wants <= kept_;) {
			waiter &w = *first_;

			more = &w != end;
			first_ = w.next;
			if (!first_)
				last_ = nullptr;
			w.waits = false;
			if (w.level > kept_) {
				append(w);
				continue;
			}
			free_ = std::exchange(kept_, 0);
			go(w);
			if (first_)
				kept_ += std::exchange(free_, 0);
		}
	}

	/* The CQ has another size. No less than used() + largest(). */
	void resize(std::uint32_t total) noexcept
	{
		(first_ ? kept_ : free_) += total - total_;
		total_ = total;
	}

private:
	void append(waiter &w) noexcept
	{
		w.waits = true;
		w.next = nullptr;
		(last_ ? last_->next : first_) = &w;
		last_ = &w;
		kept_ += std::exchange(free_, 0);
	}

	std::uint32_t total_;
	const std::uint32_t largest_;
	std::uint32_t free_;
	std::uint32_t kept_ = 0; /* for those in line */
	std::uint32_t tails_ = 0;
	waiter *first_ = nullptr, *last_ = nullptr;
};

/*
 * A CQ for an application that asks for @own entries. It has more than these for what the library
 * posts: 2 for each completion that the application may wait for, as a WRITE takes two, and
 * twice that, as no queue pair has more than it leaves to the others. The device may not have so
 * many, in all @limit, or no memory for them: then fewer, but @least. @make(entries) is true of success.
 */
template <class F>
auto with_credits(std::uint32_t own, std::uint32_t least, std::uint32_t limit, F &&make)
{
	const std::uint32_t more = limit > own ? limit - own : 0;

	for (std::uint32_t n = std::min(std::max(2 * own, 256U), more); n > least; n /= 4)
		if (auto made = make(own + n))
			return made;
	return make(own + least);
}

} // namespace npr

#endif
