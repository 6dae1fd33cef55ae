/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "local_regions.hpp"

#include <mutex>

namespace npr {

local_regions &local_regions::all() noexcept
{
	static local_regions regions;

	return regions;
}

void local_regions::add(const ibv_mr &mr)
{
	const std::lock_guard lock(mutex_);

	handles_[{mr.context, mr.lkey}] = mr.handle;
	count_.store(handles_.size(), std::memory_order_relaxed);
}

void local_regions::remove(const ibv_mr &mr) noexcept
{
	const std::lock_guard lock(mutex_);

	handles_.erase({mr.context, mr.lkey});
	count_.store(handles_.size(), std::memory_order_relaxed);
}

std::optional<std::uint32_t> local_regions::find(const ibv_context *verbs, std::uint32_t lkey) const noexcept
{
	const std::shared_lock lock(mutex_);
	const auto it = handles_.find({verbs, lkey});

	if (it == handles_.end())
		return std::nullopt;
	return it->second;
}

} // namespace npr
