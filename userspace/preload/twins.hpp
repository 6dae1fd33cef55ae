/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Queues that the library does not take (raw packets, XRC, receive work queues, a CQ with time stamps) post by the provider,
 * for which the key of an unpinned region is no local key. What they name is given the key of a twin: a
 * pinned region of the same memory, made when it is first used so, and gone with the region.
 */
#ifndef NPR_PRELOAD_TWINS_HPP
#define NPR_PRELOAD_TWINS_HPP

#include "report.hpp"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <infiniband/verbs.h>
#include <limits>
#include <mutex>
#include <new>
#include <optional>
#include <unordered_map>
#include <vector>

namespace npr::preload {

inline constexpr unsigned remote_rights = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

/* All memory that the process has, or will have: only with on-demand paging there is such a region. */
[[nodiscard]] constexpr bool is_whole(std::size_t length) noexcept
{
	return length == std::numeric_limits<std::size_t>::max();
}

class twins {
public:
	explicit twins(tally &t) noexcept : tally_(t) {}

	struct region {
		ibv_mr *mr;
		std::uint64_t iova; /* of its first byte, in work requests */
		unsigned access;
		bool foreign; /* another process's, whose memory is nowhere here: it cannot have a twin */
		bool told;    /* and the user knows */
		ibv_mr *twin; /* null: none yet */
	};
	/* By lkey. */
	using regions = std::unordered_map<std::uint32_t, region>;

	/* False: no memory. */
	[[nodiscard]] bool add(ibv_mr *mr, std::uint64_t iova, unsigned access, bool foreign = false) noexcept;
	[[nodiscard]] bool has(std::uint32_t lkey) noexcept;
	/* What is known of it, if it is there. */
	[[nodiscard]] std::optional<region> get(std::uint32_t lkey) noexcept;
	/* The region of @mr's key, if it is there, is that of the object @mr. */
	void name(ibv_mr *mr) noexcept;
	/* Takes it out, if it is there. */
	[[nodiscard]] regions::node_type take(std::uint32_t lkey) noexcept;
	/* What take() gave, or nothing. */
	void put(regions::node_type &&r) noexcept;
	void clear() noexcept;
	/* May there be unpinned regions? */
	[[nodiscard]] bool any() const noexcept { return any_.load(std::memory_order_relaxed); }
	/* May peers use one of them? */
	[[nodiscard]] bool any_remote() noexcept;
	/*
	 * @post(wr) for each of the list @wr, the provider's, with keys that it may use; @wants(wr): it uses them. 0 or an
	 * errno and @bad.
	 */
	template <class Wr, class Wants, class Post>
	[[nodiscard]] int post(Wr *wr, Wr **bad, Wants &&wants, Post &&post);
	/* The provider may use the key of @sge. 0 or an errno. */
	[[nodiscard]] int translate(ibv_sge &sge) noexcept;

private:
	tally &tally_;
	std::atomic<bool> any_{false}; /* relaxed: who names a region has synchronised with who made it */
	std::mutex mutex_;
	regions regions_;
};

template <class Wr, class Wants, class Post>
int twins::post(Wr *wr, Wr **bad, Wants &&wants, Post &&post)
{
	std::vector<ibv_sge> sges;

	for (; wr; wr = wr->next) {
		Wr w = *wr;
		int error = 0;

		w.next = nullptr;
		if (wants(*wr) && wr->num_sge > 0) {
			try {
				sges.assign(wr->sg_list, wr->sg_list + wr->num_sge);
			} catch (const std::bad_alloc &) {
				error = ENOMEM;
			}
			for (ibv_sge &s : sges)
				if (!error)
					error = translate(s);
			w.sg_list = sges.data();
		}
		if (!error)
			error = post(w);
		if (error) {
			*bad = wr;
			return error;
		}
	}
	return 0;
}

} // namespace npr::preload

#endif
