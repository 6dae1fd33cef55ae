/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "world/receives.hpp"

#include <algorithm>
#include <mutex>
#include <new>
#include <random>
#include <utility>

namespace npr {

/* The wr_ids of others are small numbers or addresses of user space, which end below the highest bit. */
receives::receives() : tag_(std::random_device{}() | 1U << 31) {}

void receives::reserve(std::size_t count, std::size_t max_sge)
{
	const std::lock_guard lock(mutex_);

	receives_.reserve(receives_.size() + count);
	holds_.reserve(holds_.size() + count * max_sge);
}

std::uint64_t receives::id_of(std::uint32_t i) const noexcept
{
	return std::uint64_t{tag_} << 32 | std::uint32_t{receives_[i].generation} << index_bits | i;
}

receives::receive *receives::at(std::uint64_t id) noexcept
{
	const std::uint32_t i = id & (max_receives - 1);

	if (i >= receives_.size() || !receives_[i].queue || id_of(i) != id)
		return nullptr;
	return &receives_[i];
}

void receives::remove(receive &r) noexcept
{
	r.queue = nullptr;
	if (r.generation < generations - 1) {
		r.holds = free_receive_;
		free_receive_ = static_cast<std::uint32_t>(&r - receives_.data());
	}
	used_.fetch_sub(1, std::memory_order_relaxed); /* see any() */
}

std::optional<std::uint64_t> receives::add(const void *queue, std::uint64_t wr_id, std::uint32_t hold) noexcept
{
	const std::lock_guard lock(mutex_);

	if (free_receive_ == none) {
		if (receives_.size() == max_receives)
			return std::nullopt;
		try {
			receives_.push_back({nullptr, 0, 0, none, 0, false});
		} catch (const std::bad_alloc &) {
			return std::nullopt;
		}
		free_receive_ = static_cast<std::uint32_t>(receives_.size() - 1);
	}
	const std::uint32_t i = free_receive_;
	free_receive_ = receives_[i].holds;
	receives_[i] = {queue, wr_id, hold, none, receives_[i].generation, false};
	used_.fetch_add(1, std::memory_order_relaxed); /* see any() */
	return id_of(i);
}

bool receives::add_hold(std::uint64_t id, std::uint32_t handle) noexcept
{
	const std::lock_guard lock(mutex_);
	receive &r = *at(id);

	if (free_hold_ == none) {
		try {
			holds_.push_back({0, none});
		} catch (const std::bad_alloc &) {
			return false;
		}
		free_hold_ = static_cast<std::uint32_t>(holds_.size() - 1);
	}
	const std::uint32_t i = free_hold_;
	free_hold_ = holds_[i].next;
	holds_[i] = {handle, r.holds};
	r.holds = i;
	return true;
}

std::size_t receives::take_holds(std::uint64_t id, std::span<std::uint32_t> holds) noexcept
{
	const std::lock_guard lock(mutex_);
	receive *const r = at(id);
	std::size_t n = 0;

	if (!r)
		return n;
	while (n < holds.size()) {
		const std::uint32_t i = r->holds;

		if (i == none && r->hold == none) {
			remove(*r);
			break;
		}
		if (i == none) {
			holds[n++] = std::exchange(r->hold, none);
			continue;
		}
		holds[n++] = holds_[i].handle;
		r->holds = holds_[i].next;
		holds_[i].next = free_hold_;
		free_hold_ = i;
	}
	return n;
}

receives::whose receives::completed_here(ibv_wc &wc, std::uint32_t &hold, std::uint64_t &id) noexcept
{
	const std::lock_guard lock(mutex_);
	receive *r = at(wc.wr_id);
	if (!r || r->completed)
		return (wc.wr_id & (max_receives - 1)) < receives_.size() ? whose::nobody : whose::application;
	id = wc.wr_id;
	wc.wr_id = r->wr_id;
	hold = r->hold;
	if (r->holds == none) {
		remove(*r);
		return whose::receive;
	}
	r->completed = true;
	return whose::several;
}

std::optional<std::uint64_t> receives::abandon(const void *queue) noexcept
{
	if (!any())
		return std::nullopt;

	const std::lock_guard lock(mutex_);
	for (std::size_t i = 0; i < receives_.size(); ++i) {
		receive &r = receives_[i];
		if (r.queue != queue || r.completed)
			continue;
		r.completed = true;
		++r.generation;
		return id_of(static_cast<std::uint32_t>(i));
	}
	return std::nullopt;
}

bool receives::any(const void *queue) noexcept
{
	if (!any())
		return false;

	const std::lock_guard lock(mutex_);
	return std::any_of(receives_.begin(), receives_.end(),
			   [&](const receive &r) { return r.queue == queue && !r.completed; });
}

} // namespace npr
