/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The hold of a piece of a request: whether the piece wants one, which one it has, and what the peer has said. A
 * piece has a hold only if it wants one, and wants none of memory that cannot be held. Who wants one is counted.
 */
#ifndef NPR_HOLD_STATE_HPP
#define NPR_HOLD_STATE_HPP

#include <cstdint>
#include <utility>

namespace npr {

class hold_state {
public:
	/* The number of the hold; 0: there is none. */
	[[nodiscard]] std::uint64_t id() const noexcept { return id_; }
	/* One is asked for, or there: counted. */
	[[nodiscard]] bool wanted() const noexcept { return wish_ == wish::yes; }
	/* The peer cannot hold this memory. */
	[[nodiscard]] bool impossible() const noexcept { return wish_ == wish::vain; }
	/* The peer has refused one since reset(), for now or for good. */
	[[nodiscard]] bool refused() const noexcept { return refused_; }

	/* False: it is impossible. @count is the number of those that are wanted, here and below. */
	[[nodiscard]] bool want(std::uint32_t &count) noexcept
	{
		if (impossible())
			return false;
		count += !wanted();
		wish_ = wish::yes;
		return true;
	}
	/* The peer has granted hold @id, which is not 0. False: that one is not wanted. */
	[[nodiscard]] bool grant(std::uint64_t id) noexcept
	{
		if (!wanted() || id_)
			return false;
		id_ = id;
		return true;
	}
	/* None is wanted any more. Returns the one that is to be released, or 0. */
	[[nodiscard]] std::uint64_t end(std::uint32_t &count) noexcept
	{
		if (!wanted())
			return 0;
		--count;
		wish_ = wish::no;
		return std::exchange(id_, 0);
	}
	/* end(), because the peer has granted none, and @for_good: will grant none. */
	[[nodiscard]] std::uint64_t refuse(bool for_good, std::uint32_t &count) noexcept
	{
		const std::uint64_t id = end(count);

		if (for_good)
			wish_ = wish::vain;
		refused_ = true;
		return id;
	}
	/* end(), and what the peer has said does not count any more. */
	[[nodiscard]] std::uint64_t reset(std::uint32_t &count) noexcept
	{
		const std::uint64_t id = end(count);

		wish_ = wish::no;
		refused_ = false;
		return id;
	}

private:
	enum class wish : std::uint8_t { no, yes, vain };

	std::uint64_t id_ = 0; /* not 0: wish_ is yes */
	wish wish_ = wish::no; /* vain: refused_ */
	bool refused_ = false;
};

} // namespace npr

#endif
