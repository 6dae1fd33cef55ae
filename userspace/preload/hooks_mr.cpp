/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Regions. */
#include "policy.hpp"
#include "real.hpp"
#include "registry.hpp"
#include "seam.hpp"

#include <nprdma/nprdma.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <utility>

using namespace npr::preload;

namespace {

constexpr unsigned known = IBV_ACCESS_LOCAL_WRITE | remote_rights | IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB |
	IBV_ACCESS_OPTIONAL_RANGE;

/* All memory that the process has, or will have: only with on-demand paging there is such a region. */
constexpr bool is_whole(std::size_t length)
{
	return length == std::numeric_limits<std::size_t>::max();
}

/* Why a region is pinned; nothing: it is not. */
std::optional<because> pinned(device &d, std::size_t length, unsigned access)
{
	using unpin = settings::unpin;
	const settings &s = policy();

	/* What has on-demand paging was promised it by the device. */
	if (s.which == unpin::none || (is_whole(length) && !(access & IBV_ACCESS_ON_DEMAND)) ||
	    (!(access & IBV_ACCESS_ON_DEMAND) &&
	     (length < s.at_least || s.which == unpin::odp || (s.which == unpin::remote && !(access & remote_rights)))))
		return because::nobody_asked;
	if (!d.owner)
		return because::refused;
	if (access & IBV_ACCESS_MW_BIND)
		return because::windows;
	if (access & IBV_ACCESS_ZERO_BASED)
		return because::zero_based;
	if (access & ~known)
		return because::access;
	/* relaxed: see there. It stays so. */
	if (all().direct.load(std::memory_order_relaxed))
		(void)d.memory.pin("a program that uses direct verbs (mlx5dv)");
	const char *const what = access & remote_rights && d.xrc.load(std::memory_order_relaxed) ?
		"XRC, by which peers may reach it," : d.memory.pinned_for();
	if (what && !d.told.said_objects.exchange(true))
		say(&d.verbs, "%s needs pinned memory: what the program registers on this device stays pinned", what);
	return what ? std::optional(because::object) : std::nullopt;
}

/* One line for each reason that the user has not given himself, and has not been told. */
void stays_pinned(device &d, because why, std::size_t length)
{
	const auto k = static_cast<std::size_t>(why);

	d.told.add(d.told.pinned[k], length);
	if (why != because::nobody_asked && why != because::object && !d.told.said[k].exchange(true))
		say(&d.verbs, "a region of %zu bytes stays pinned, because %s: others may follow", length, text(why));
}

ibv_mr *reg_mr(device &d, ibv_pd *pd, void *addr, std::size_t length, std::uint64_t iova, unsigned access)
{
	std::optional<because> why = pinned(d, length, access);

	if (!why) {
		/* Huge pages are a hint. */
		const unsigned unpinned = access & ~unsigned{IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB};
		ibv_mr *const mr = verbs().ibv_reg_mr_iova2(pd, addr, length, iova, unpinned | IBV_ACCESS_UNPINNED);
		d.memory.unpinned_made(mr);
		if (mr) {
			if (d.regions.add(mr, iova, access)) {
				d.told.add(d.told.unpinned, is_whole(length) ? 0 : length);
				return mr;
			}
			(void)verbs().ibv_dereg_mr(mr);
			errno = ENOMEM;
			return nullptr;
		}
		if (errno != EOPNOTSUPP)
			return nullptr;
		why = because::refused;
	}
	/* With on-demand paging, if the device has its own: pages that stay are not what such a program expects. */
	ibv_mr *const mr = verbs().ibv_reg_mr_iova2(pd, addr, length, iova, access);
	if (mr)
		stays_pinned(d, *why, length);
	else if (access & IBV_ACCESS_ON_DEMAND && *why != because::nobody_asked && !d.told.said_odp.exchange(true))
		say(&d.verbs, "a region with on-demand paging is refused, because %s", text(*why));
	return mr;
}

} // namespace

NPR_EXPORT ibv_mr *ibv_reg_mr_iova2(ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	device *const d = find(pd->context);

	if (!d)
		return verbs().ibv_reg_mr_iova2(pd, addr, length, iova, access);
	ibv_mr *const mr = reg_mr(*d, pd, addr, length, iova, access);
	if (!mr)
		return mr;
	try {
		npr::local_key key;
		if (d->regions.has(mr->lkey))
			key.handle = mr->handle;
		key.offset = reinterpret_cast<std::uintptr_t>(addr) - iova;
		d->lib->regions.add(*mr, key);
	} catch (const std::bad_alloc &) {
		(void)d->regions.take(mr->lkey);
		(void)verbs().ibv_dereg_mr(mr);
		errno = ENOMEM;
		return nullptr;
	}
	return mr;
}

/* It may be another process's unpinned region, which this library would not know to be one. */
NPR_EXPORT ibv_mr *ibv_import_mr(ibv_pd *pd, uint32_t handle)
{
	device *const d = find(pd->context);
	ibv_mr *const mr = verbs().ibv_import_mr ? verbs().ibv_import_mr(pd, handle) : nullptr;
	npr_mr_attr attr;

	if (!mr || !d || npr_query_mr(mr, &attr))
		return mr;
	npr::local_key key{mr->handle};
	/* Where its memory is in this process nobody knows. */
	key.opaque = true;
	try {
		const bool unpinned = !d->memory.pinned_for();
		if (unpinned)
			d->memory.unpinned_made(true);
		if (!unpinned) {
			say(mr->context, "an imported region is not pinned, and the program needs pinned memory: refused");
			errno = EOPNOTSUPP;
		} else if (d->regions.add(mr, 0, 0, true)) {
			d->lib->regions.add(*mr, key);
			return mr;
		} else {
			errno = ENOMEM;
		}
	} catch (const std::bad_alloc &) {
		errno = ENOMEM;
	}
	const int error = errno;
	(void)d->regions.take(mr->lkey);
	verbs().ibv_unimport_mr(mr);
	errno = error;
	return nullptr;
}

NPR_EXPORT void ibv_unimport_mr(ibv_mr *mr)
{
	if (device *const d = find(mr->context))
		(void)d->regions.take(mr->lkey);
	if (npr::local_regions *const regions = npr::local_regions::existing(mr->context))
		(void)regions->remove(*mr);
	if (verbs().ibv_unimport_mr)
		verbs().ibv_unimport_mr(mr);
}

NPR_EXPORT ibv_mr *ibv_reg_mr(ibv_pd *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, reinterpret_cast<std::uintptr_t>(addr),
				static_cast<unsigned int>(access));
}

NPR_EXPORT ibv_mr *ibv_reg_mr_iova(ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, iova, static_cast<unsigned int>(access));
}

/* Not of unpinned regions, which the kernel refuses. What it moves is at the CPU's addresses. */
NPR_EXPORT int ibv_rereg_mr(ibv_mr *mr, int flags, ibv_pd *pd, void *addr, size_t length, int access)
{
	if (find(mr->context) && flags & IBV_REREG_MR_CHANGE_ACCESS)
		access &= ~int{IBV_ACCESS_ON_DEMAND};
	npr::local_regions *const regions = npr::local_regions::existing(mr->context);
	auto key = regions ? regions->remove(*mr) : std::nullopt;
	const int rc = verbs().ibv_rereg_mr(mr, flags, pd, addr, length, access);

	if (!rc && key && flags & IBV_REREG_MR_CHANGE_TRANSLATION)
		key->offset = 0;
	try {
		if (key)
			regions->add(*mr, *key);
	} catch (const std::bad_alloc &) {
		/* what is not known is not looked at */
	}
	return rc;
}

NPR_EXPORT int ibv_dereg_mr(ibv_mr *mr)
{
	device *const d = find(mr->context);
	const std::uint32_t lkey = mr->lkey;
	/* Another region may have the key as soon as this one has not. */
	auto region = d ? d->regions.take(lkey) : twins::regions::node_type();
	const int rc = -npr::dereg_mr(mr, verbs().ibv_dereg_mr);

	if (region && rc)
		d->regions.put(std::move(region));
	else if (region && region.mapped().twin)
		(void)verbs().ibv_dereg_mr(region.mapped().twin);
	return rc;
}

/*
 * libibverbs takes what is registered from children, with all that is on the same pages; it is called by itself as well
 * (RDMAV_FORK_SAFE). Of an unpinned region a child may have everything, and this kernel copies for a child what is pinned. On one
 * that does not, nothing is unpinned.
 */
NPR_EXPORT int ibv_fork_init()
{
	const auto is = verbs().ibv_is_fork_initialized;

	if (policy().which != settings::unpin::none && is && is() == IBV_FORK_UNNEEDED)
		return 0;
	return verbs().ibv_fork_init();
}
