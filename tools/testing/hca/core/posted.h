/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Posted writes: DMA writes of one function that were translated, and are not
 * in memory yet. They get there in order, at a random time, or when something
 * pushes them: a DMA read, an interrupt, or the IOMMU's drain.
 *
 * The polling thread posts; any thread may commit.
 */
#ifndef NPHCA_POSTED_H
#define NPHCA_POSTED_H

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>

#include "nphca.h"

namespace nphca {

class posted_writes {
public:
	static constexpr size_t capacity = 256, max_size = 4096;

	posted_writes(const nphca_host_ops &ops, void *host) noexcept : ops_(ops), host_(host) {}
	~posted_writes() { commit_all(); }
	posted_writes(const posted_writes &) = delete;
	posted_writes &operator=(const posted_writes &) = delete;

	/* False if there is no memory to keep it in; @target is the caller's still. */
	[[nodiscard]] bool post(void *target, const void *buf, size_t len, uint64_t when) noexcept;
	void commit_all() noexcept { commit(UINT64_MAX); }
	/* Those whose time has come, and those before them. */
	void commit_due(uint64_t now) noexcept { commit(now); }
	[[nodiscard]] uint64_t deadline() const noexcept;

	/* How many there have been; the difference is how many wait. */
	[[nodiscard]] uint64_t posted() const noexcept { return posted_.load(std::memory_order_relaxed); }
	[[nodiscard]] uint64_t committed() const noexcept
	{
		return committed_.load(std::memory_order_acquire); /* what is counted is in memory */
	}
	[[nodiscard]] bool any() const noexcept { return posted() != committed(); }

private:
	struct entry {
		void *target;
		uint64_t when;
		size_t len;
		std::array<uint8_t, max_size> data;
	};

	void commit(uint64_t until) noexcept;
	void commit_first() noexcept;

	const nphca_host_ops &ops_;
	void *host_;
	mutable std::mutex mutex_; /* of queue_, held while its entries are stored */
	std::deque<entry> queue_;
	/* Written under the mutex, read without. */
	std::atomic<uint64_t> posted_{0}, committed_{0};
};

} // namespace nphca

#endif
