/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef NPR_WORD_RING_HPP
#define NPR_WORD_RING_HPP

#include "protocol/untouched.hpp"
#include "world/provider.hpp"

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

namespace npr {

/*
 * Memory that residency words are read into. It is registered, and so pinned, when there is a region whose words can be
 * read, and not before: a queue pair whose peer has none needs none.
 */
class word_ring {
public:
	/* Throws std::bad_alloc. */
	word_ring(const provider &p, ibv_pd *pd);
	word_ring(const word_ring &) = delete;
	word_ring &operator=(const word_ring &) = delete;

	[[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }
	/* Any thread, without a lock, for it may wait for memory: 0 or a negative errno. */
	[[nodiscard]] int make() noexcept;
	/* After make(). */
	[[nodiscard]] std::uint32_t lkey() const noexcept { return mr_->lkey; }

private:
	const decltype(provider::reg_mr) reg_mr_;
	ibv_pd *const pd_;
	std::mutex mutex_;
	untouched_vector<std::uint64_t> words_;
	std::unique_ptr<ibv_mr, int (*)(ibv_mr *)> mr_;
};

} // namespace npr

#endif
