/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "twins.hpp"

#include "real.hpp"

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

namespace npr::preload {

bool twins::add(ibv_mr *mr, std::uint64_t iova, unsigned access, bool foreign) noexcept
{
	const std::lock_guard lock(mutex_);

	try {
		regions_.insert_or_assign(mr->lkey, region{mr, iova, access, foreign, false, nullptr});
	} catch (const std::bad_alloc &) {
		return false;
	}
	any_.store(true, std::memory_order_relaxed);
	return true;
}

bool twins::has(std::uint32_t lkey) noexcept
{
	const std::lock_guard lock(mutex_);

	return regions_.contains(lkey);
}

std::optional<twins::region> twins::get(std::uint32_t lkey) noexcept
{
	const std::lock_guard lock(mutex_);
	const auto it = regions_.find(lkey);

	return it == regions_.end() ? std::nullopt : std::optional(it->second);
}

void twins::name(ibv_mr *mr) noexcept
{
	const std::lock_guard lock(mutex_);

	if (const auto it = regions_.find(mr->lkey); it != regions_.end())
		it->second.mr = mr;
}

twins::regions::node_type twins::take(std::uint32_t lkey) noexcept
{
	const std::lock_guard lock(mutex_);

	return regions_.extract(lkey);
}

void twins::put(regions::node_type &&r) noexcept
{
	const std::lock_guard lock(mutex_);

	try {
		regions_.insert(std::move(r));
	} catch (const std::bad_alloc &) {
		/* Others have filled the table since, and it did not grow: what a queue would post of it is refused by the adapter. */
	}
}

void twins::clear() noexcept
{
	const std::lock_guard lock(mutex_);

	for (const auto &[lkey, r] : regions_)
		if (r.twin)
			(void)verbs().ibv_dereg_mr(r.twin);
	regions_.clear();
}

bool twins::any_remote() noexcept
{
	const std::lock_guard lock(mutex_);

	return std::any_of(regions_.begin(), regions_.end(), [](const auto &r) { return r.second.access & remote_rights; });
}

int twins::translate(ibv_sge &sge) noexcept
{
	const std::lock_guard lock(mutex_);
	const auto it = regions_.find(sge.lkey);

	if (it == regions_.end())
		return 0;
	region &r = it->second;
	if (r.foreign) {
		if (!std::exchange(r.told, true))
			say(r.mr->context, "an imported region that is not pinned is used by a queue that needs pinned memory: "
			    "refused");
		return EOPNOTSUPP;
	}
	if (is_whole(r.mr->length)) {
		if (tally_.first(once::whole_twin))
			say(r.mr->context, "a queue that needs pinned memory uses the region of the whole address space, which cannot be "
			    "pinned: refused");
		return EOPNOTSUPP;
	}
	if (!r.twin) {
		/* Peers have the region's own key. */
		r.twin = verbs().ibv_reg_mr_iova2(r.mr->pd, r.mr->addr, r.mr->length, r.iova, r.access & IBV_ACCESS_LOCAL_WRITE);
		if (!r.twin) {
			const int error = errno;

			if (tally_.first(once::no_twin))
				say(r.mr->context, "a region of %zu bytes cannot be pinned as well for a queue that needs it: %m. "
				    "RLIMIT_MEMLOCK may be too low: what the queue posts of it is refused", r.mr->length);
			return error;
		}
		tally_.add(because::copied, r.mr->length);
		if (!tally_.said[static_cast<std::size_t>(because::copied)].exchange(true))
			say(r.mr->context, "a region of %zu bytes is pinned as well, because a queue uses it that unpinned memory "
			    "cannot be used by: others may follow", r.mr->length);
	}
	sge.lkey = r.twin->lkey;
	return 0;
}

} // namespace npr::preload
