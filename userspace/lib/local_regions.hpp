/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What is known of the local keys of this process: a work request that names an unpinned
 * region as its local side needs a hold, and to look at what a READ brought its buffer's
 * address for the CPU is needed. Without the preload library these are the regions that
 * npr_reg_mr() made, and all others are taken for pinned memory that the HCA knows by the
 * CPU's addresses; a process that has none pays one load for each request. With it these
 * are all whose addresses are known, and others (device memory, dmabufs, imported regions)
 * may be anywhere.
 */
#ifndef NPR_LOCAL_REGIONS_HPP
#define NPR_LOCAL_REGIONS_HPP

#include <atomic>
#include <cstdint>
#include <infiniband/verbs.h>
#include <map>
#include <optional>
#include <shared_mutex>
#include <utility>

namespace npr {

struct local_key {
	std::optional<std::uint32_t> handle; /* the MR's, of an unpinned region */
	std::uint64_t offset = 0; /* from an address of a work request to that of the CPU */
	bool opaque = false;	  /* it has none */

	/* Pinned memory where its addresses say. */
	[[nodiscard]] bool plain() const noexcept { return !handle && !offset && !opaque; }
};

class local_regions {
public:
	/* All of the process. */
	[[nodiscard]] static local_regions &all() noexcept;

	/* Throws std::bad_alloc. */
	void add(const ibv_mr &mr, const local_key &key);
	/* An unpinned region that the HCA knows by the CPU's addresses. */
	void add(const ibv_mr &mr) { add(mr, {mr.handle}); }
	/* What it was, if it was there. */
	std::optional<local_key> remove(const ibv_mr &mr) noexcept;
	/* From here on what is not there is opaque. Before the first region. */
	void know_all() noexcept;
	/* Relaxed: who may use a region has synchronised with who made it. */
	[[nodiscard]] bool any() const noexcept { return count_.load(std::memory_order_relaxed); }
	[[nodiscard]] local_key find(const ibv_context *verbs, std::uint32_t lkey) const noexcept;

private:
	using key = std::pair<const ibv_context *, std::uint32_t>;

	mutable std::shared_mutex mutex_;
	std::map<key, local_key> keys_;
	bool all_known_ = false;
	std::atomic<std::size_t> count_{0}; /* one more if all are known */
};

} // namespace npr

#endif
