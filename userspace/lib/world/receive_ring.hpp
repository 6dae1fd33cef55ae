/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Receives of one queue pair that has a receive queue of its own, each with one buffer under a lease: what was posted, until
 * its completion. All that is done here is done under the lock of its CQ, so nothing is looked for: the next
 * completion is that of the oldest one. Other receives are in "receives".
 *
 * The HCA gets the number of a receive as its wr_id, and the application's own is put back. A number has a part that
 * differs from ring to ring, for the completion of one that was abandoned may come late.
 */
#ifndef NPR_RECEIVE_RING_HPP
#define NPR_RECEIVE_RING_HPP

#include "protocol/untouched.hpp"
#include "world/local_lease.hpp"

#include <bit>
#include <cstdint>
#include <infiniband/verbs.h>
#include <utility>

namespace npr {

class receive_ring {
public:
	static constexpr unsigned index_bits = 20;
	static constexpr std::uint64_t indices = 1ULL << index_bits;

	/* For @count receives, whose numbers begin with @first, the lower index_bits of which are not set. Throws std::bad_alloc. */
	receive_ring(std::uint32_t count, std::uint64_t first)
	    : records_(count ? std::bit_ceil(std::size_t{count}) : 0), size_(records_.size()), mask_(size_ - 1), first_(first)
	{
	}

	[[nodiscard]] std::uint64_t size() const noexcept { return size_; }
	[[nodiscard]] bool empty() const noexcept { return head_ == tail_; }
	[[nodiscard]] bool full() const noexcept { return tail_ - head_ >= size_; }
	/* Not full: one is to be posted under @lease, and has this number. */
	[[nodiscard]] std::uint64_t put(std::uint64_t wr_id, local_lease &lease) noexcept
	{
		records_[tail_ & mask_] = {wr_id, &lease};
		return id(tail_++);
	}
	/* The last one was not posted. */
	void take_back() noexcept { --tail_; }

	/*
	 * That of the oldest one has succeeded: true, and it is the application's by now. False: it is for end(), and nothing
	 * has changed; the caller knows that it is a receive's if it has succeeded.
	 */
	[[nodiscard, gnu::always_inline]] bool hot_end(ibv_wc &wc, unsigned stripe) noexcept
	{
		if (wc.wr_id != id(head_) || empty() || wc.status != IBV_WC_SUCCESS) [[unlikely]]
			return false;
		const record &r = records_[head_ & mask_];
		if (r.lease->count_out(stripe)) [[unlikely]] {
			/* Counted in again, it ends with who counts us out. */
			r.lease->count_in(stripe);
			return false;
		}
		wc.wr_id = r.wr_id;
		++head_;
		return true;
	}
	/* The lease of the receive with @wr_id, which becomes the application's; null: it is none that is under way. */
	[[nodiscard]] local_lease *end(std::uint64_t &wr_id) noexcept
	{
		const std::uint64_t behind = (wr_id - id(head_)) & (indices - 1);

		if ((wr_id ^ first_) >> index_bits || behind >= tail_ - head_)
			return nullptr;
		record &r = records_[(head_ + behind) & mask_];
		local_lease *const lease = std::exchange(r.lease, nullptr);
		if (lease)
			wr_id = r.wr_id;
		/* They end in order; but whatever a provider says, none is given back twice. */
		while (head_ != tail_ && !records_[head_ & mask_].lease)
			++head_;
		return lease;
	}
	/* @f(lease) for each: nobody hears of them. */
	template <class F> void drain(F &&f) noexcept
	{
		for (; head_ != tail_; ++head_)
			if (local_lease *const lease = records_[head_ & mask_].lease)
				f(*lease);
	}

private:
	struct record {
		std::uint64_t wr_id;
		local_lease *lease; /* null: it is over, before an older one */
	};

	[[nodiscard]] std::uint64_t id(std::uint64_t i) const noexcept { return first_ | (i & (indices - 1)); }

	untouched_vector<record> records_;
	const std::uint64_t size_, mask_, first_;
	std::uint64_t head_ = 0, tail_ = 0;
};

} // namespace npr

#endif
