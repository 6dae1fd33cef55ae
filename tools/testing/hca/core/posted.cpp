// SPDX-License-Identifier: GPL-2.0
/*
 * Posted writes: what was translated, and is stored later.
 */
#include "posted.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace nphca {

bool posted_writes::post(void *target, const void *buf, size_t len, uint64_t when) noexcept
{
	const std::lock_guard lock(mutex_);

	if (len > max_size)
		return false;
	if (queue_.size() >= capacity)
		commit_first();
	try {
		entry &e = queue_.emplace_back();
		e.target = target;
		e.when = when;
		e.len = len;
		std::memcpy(e.data.data(), buf, len);
	} catch (const std::bad_alloc &) {
		return false;
	}
	posted_.store(posted_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
	return true;
}

void posted_writes::commit_first() noexcept
{
	const entry &e = queue_.front();

	ops_.dma_commit(host_, e.target, e.data.data(), e.len);
	queue_.pop_front();
	/* Release: whoever sees the count finds the data in memory. */
	committed_.store(committed_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

void posted_writes::commit(uint64_t until) noexcept
{
	if (!any())
		return;
	const std::lock_guard lock(mutex_);

	/* The last one that is due pushes all before it. */
	const auto due = std::find_if(queue_.rbegin(), queue_.rend(), [until](const entry &e) { return e.when <= until; });
	for (auto n = queue_.rend() - due; n > 0; --n)
		commit_first();
}

uint64_t posted_writes::deadline() const noexcept
{
	uint64_t first = UINT64_MAX;

	if (!any())
		return first;
	const std::lock_guard lock(mutex_);
	for (const entry &e : queue_)
		first = std::min(first, e.when);
	return first;
}

} // namespace nphca
