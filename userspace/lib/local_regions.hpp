/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The unpinned regions of this process that npr_reg_mr() made, by lkey: a work
 * request that names one as its local side needs a hold. A process that has none
 * pays one load for each request.
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

class local_regions {
public:
	/* All of the process. */
	[[nodiscard]] static local_regions &all() noexcept;

	/* Throws std::bad_alloc. */
	void add(const ibv_mr &mr);
	void remove(const ibv_mr &mr) noexcept;
	/* Relaxed: who may use a region has synchronised with who made it. */
	[[nodiscard]] bool any() const noexcept { return count_.load(std::memory_order_relaxed); }
	/* The MR's handle. */
	[[nodiscard]] std::optional<std::uint32_t> find(const ibv_context *verbs, std::uint32_t lkey) const noexcept;

private:
	using key = std::pair<const ibv_context *, std::uint32_t>;

	mutable std::shared_mutex mutex_;
	std::map<key, std::uint32_t> handles_;
	std::atomic<std::size_t> count_{0};
};

} // namespace npr

#endif
