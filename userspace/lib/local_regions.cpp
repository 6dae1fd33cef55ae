/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "local_regions.hpp"

#include <mutex>

namespace npr {

local_regions &local_regions::all() noexcept
{
	static local_regions regions;

	return regions;
}

void local_regions::add(const ibv_mr &mr, const local_key &k)
{
	const std::lock_guard lock(mutex_);

	keys_[{mr.context, mr.lkey}] = k;
	count_.store(keys_.size() + all_known_, std::memory_order_relaxed); /* see any() */
}

std::optional<local_key> local_regions::remove(const ibv_mr &mr) noexcept
{
	const std::lock_guard lock(mutex_);
	const auto node = keys_.extract({mr.context, mr.lkey});

	count_.store(keys_.size() + all_known_, std::memory_order_relaxed); /* see any() */
	if (!node)
		return std::nullopt;
	return node.mapped();
}

void local_regions::know_all() noexcept
{
	const std::lock_guard lock(mutex_);

	all_known_ = true;
	count_.store(keys_.size() + all_known_, std::memory_order_relaxed); /* see any() */
}

local_key local_regions::find(const ibv_context *verbs, std::uint32_t lkey) const noexcept
{
	const std::shared_lock lock(mutex_);
	const auto it = keys_.find({verbs, lkey});

	return it == keys_.end() ? local_key{std::nullopt, 0, all_known_} : it->second;
}

} // namespace npr
