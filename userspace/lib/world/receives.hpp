/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Receives of one device whose buffers are in unpinned regions: what each holds,
 * from the post to the completion.
 *
 * The completions of a shared receive queue come in any order and on any CQ, so
 * the HCA gets the number of a receive as its wr_id, and the application's own is
 * put back into the completion. Receives without holds are not here at all.
 *
 * What was abandoned may complete nevertheless, late, and its place may have been given
 * to another receive by then. So a number has a generation, which an abandoned receive
 * takes with it; a place whose generations are used up is not used any more.
 */
#ifndef NPR_RECEIVES_HPP
#define NPR_RECEIVES_HPP

#include "optional_mutex.hpp"
#include "world/receive_ring.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <infiniband/verbs.h>
#include <optional>
#include <span>
#include <vector>

namespace npr {

class receives {
public:
	receives();

	/* Room for @count more, of @max_sge holds each. Throws std::bad_alloc. */
	void reserve(std::size_t count, std::size_t max_sge);
	/* A receive on @queue, any address that is one queue's, with its first hold. Without memory: nothing. */
	[[nodiscard]] std::optional<std::uint64_t> add(const void *queue, std::uint64_t wr_id, std::uint32_t hold) noexcept;
	/* Another hold. False: no memory. */
	[[nodiscard]] bool add_hold(std::uint64_t id, std::uint32_t hold) noexcept;
	/* How many holds of receive @id are in @holds; if that is not full there are no more, and no receive. */
	[[nodiscard]] std::size_t take_holds(std::uint64_t id, std::span<std::uint32_t> holds) noexcept;
	/* Whose completion is it? */
	enum class whose : std::uint8_t {
		application, /* none of these */
		receive,     /* one of these: its wr_id is the application's now; its only hold is @hold, and it is no more */
		several,     /* the same of one with more holds, which is still there: @id for take_holds() */
		nobody,	     /* one that was abandoned */
	};
	[[nodiscard]] whose completed(ibv_wc &wc, std::uint32_t &hold, std::uint64_t &id) noexcept
	{
		if (static_cast<std::uint32_t>(wc.wr_id >> 32) != tag_ ||
		    (wc.status == IBV_WC_SUCCESS && !(wc.opcode & IBV_WC_RECV))) [[likely]]
			return whose::application;
		return completed_here(wc, hold, id);
	}
	/* Is it one of a receive_ring, whose numbers begin with ring_id()? Of one that has succeeded the caller knows that it is a receive's. */
	[[nodiscard]] bool is_of_ring(std::uint64_t wr_id) const noexcept { return wr_id >> 32 == (tag_ ^ 1); }
	[[nodiscard]] std::uint64_t ring_id() noexcept
	{
		const std::uint32_t n = rings_.fetch_add(1, std::memory_order_relaxed); /* a number, and nothing else */

		return std::uint64_t{tag_ ^ 1} << 32 | n << receive_ring::index_bits;
	}
	/* A receive of @queue that is not completed; if it will be, nobody is told. */
	[[nodiscard]] std::optional<std::uint64_t> abandon(const void *queue) noexcept;
	[[nodiscard]] bool any(const void *queue) noexcept;
	/* Relaxed: a completion that is polled comes after the post through the HCA. */
	[[nodiscard]] bool any() const noexcept { return used_.load(std::memory_order_relaxed); }

private:
	static constexpr std::uint32_t none = ~0U;
	/* Lower half of a wr_id: generation, index. */
	static constexpr unsigned index_bits = 22;
	static constexpr std::uint32_t max_receives = 1U << index_bits;
	static constexpr std::uint32_t generations = 1U << (32 - index_bits);

	struct receive {
		const void *queue; /* null: free */
		std::uint64_t wr_id;
		std::uint32_t hold;  /* the first, or none any more; no hold has that number */
		std::uint32_t holds; /* the next, or none; of a free one the next free one */
		std::uint16_t generation;
		bool completed;
	};
	struct hold {
		std::uint32_t handle, next;
	};

	[[nodiscard]] std::uint64_t id_of(std::uint32_t i) const noexcept;
	[[nodiscard]] receive *at(std::uint64_t id) noexcept;
	[[nodiscard]] whose completed_here(ibv_wc &wc, std::uint32_t &hold, std::uint64_t &id) noexcept;
	void remove(receive &r) noexcept;

	light_mutex mutex_;
	std::vector<receive> receives_;
	std::vector<hold> holds_;
	std::uint32_t free_receive_ = none, free_hold_ = none;
	std::uint32_t tag_; /* upper half of our wr_ids */
	std::atomic<std::size_t> used_{0};
	std::atomic<std::uint32_t> rings_{0};
};

} // namespace npr

#endif
