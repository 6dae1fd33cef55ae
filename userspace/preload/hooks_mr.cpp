/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Regions. */
#include "pointers.hpp"
#include "policy.hpp"
#include "real.hpp"
#include "registry.hpp"
#include "seam.hpp"

#include <nprdma/nprdma.h>

#include <cerrno>
#include <cstdint>
#include <new>
#include <optional>
#include <utility>

using namespace npr::preload;

namespace {

constexpr unsigned known = IBV_ACCESS_LOCAL_WRITE | remote_rights | IBV_ACCESS_ON_DEMAND | IBV_ACCESS_UNPINNED | IBV_ACCESS_HUGETLB |
	IBV_ACCESS_OPTIONAL_RANGE;

/* Why a region is pinned; nothing: it is not. */
std::optional<because> pinned(device &d, std::size_t length, unsigned access)
{
	using unpin = settings::unpin;
	const settings &s = policy();
	/* The program would take pinned memory for what it is not, as libnprdma does. */
	const bool named = access & IBV_ACCESS_UNPINNED;

	/* What has on-demand paging was promised it by the device. */
	if ((s.which == unpin::none && !named) ||
	    (!named && !(access & IBV_ACCESS_ON_DEMAND) &&
	     (is_whole(length) || length < s.at_least || s.which == unpin::odp ||
	      (s.which == unpin::remote && !(access & remote_rights)))))
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
	if (what && d.told.first(once::objects))
		say(&d.verbs, "%s needs pinned memory: what the program registers on this device stays pinned", what);
	return what ? std::optional(because::object) : std::nullopt;
}

/* One line for each reason that the user has not given himself, and has not been told. */
void stays_pinned(device &d, because why, std::size_t length)
{
	const auto k = static_cast<std::size_t>(why);

	d.told.add(why, length);
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
	if (access & IBV_ACCESS_UNPINNED) {
		if (d.told.first(once::unpinned))
			say(&d.verbs, "a region that the program registers with IBV_ACCESS_UNPINNED is refused, because %s", text(*why));
		errno = EOPNOTSUPP;
		return nullptr;
	}
	/* With on-demand paging, if the device has its own: pages that stay are not what such a program expects. */
	ibv_mr *const mr = verbs().ibv_reg_mr_iova2(pd, addr, length, iova, access);
	if (mr)
		stays_pinned(d, *why, length);
	else if (access & IBV_ACCESS_ON_DEMAND && *why != because::nobody_asked && d.told.first(once::on_demand))
		say(&d.verbs, "a region with on-demand paging is refused, because %s", text(*why));
	return mr;
}

/* One that the library knows from here on: null and errno. */
ibv_mr *make(device &d, ibv_pd *pd, void *addr, std::size_t length, std::uint64_t iova, unsigned access)
{
	ibv_mr *const mr = reg_mr(d, pd, addr, length, iova, access);

	if (!mr)
		return mr;
	try {
		npr::local_key key;
		if (d.regions.has(mr->lkey))
			key.handle = mr->handle;
		key.offset = reinterpret_cast<std::uintptr_t>(addr) - iova;
		d.lib->regions.add(*mr, key);
	} catch (const std::bad_alloc &) {
		(void)d.regions.take(mr->lkey);
		(void)verbs().ibv_dereg_mr(mr);
		errno = ENOMEM;
		return nullptr;
	}
	return mr;
}

/* What make() has made: 0 or an errno, and then it is still there. */
int unmake(device *d, ibv_mr *mr)
{
	/* Another region may have the key as soon as this one has not. */
	auto region = d ? d->regions.take(mr->lkey) : twins::regions::node_type();
	const int rc = -npr::dereg_mr(mr, verbs().ibv_dereg_mr);

	if (region && rc)
		d->regions.put(std::move(region));
	else if (region && region.mapped().twin)
		(void)verbs().ibv_dereg_mr(region.mapped().twin);
	return rc;
}

/* @mr, or null, of a device that the library has left as it is: for the report. */
ibv_mr *left_as_it_is(ibv_pd *pd, std::size_t length, ibv_mr *mr)
{
	const int error = errno;

	try {
		if (mr)
			tally_of(pd->context).add(because::left, length);
	} catch (const std::bad_alloc &) {
		/* It is not counted. */
	}
	errno = error;
	return mr;
}

/* The same of memory that is none of the process's. */
ibv_mr *not_its_own(ibv_pd *pd, because why, std::size_t length, ibv_mr *mr)
{
	device *const d = find(pd->context);

	if (!d)
		return left_as_it_is(pd, length, mr);
	if (mr)
		d->told.add(why, length);
	return mr;
}

/* --- registered anew ---------------------------------------------------- */

int rereg_fails(int rc, int error)
{
	errno = error;
	return rc;
}

/* 0; or what is wrong with the call, as libibverbs and the kernel say it, or what cannot be done. */
int rereg_refused(device &d, const ibv_mr &mr, const twins::region &old, int flags, const ibv_pd *pd, const void *addr,
		  std::size_t length, int access)
{
	const bool moves = flags & IBV_REREG_MR_CHANGE_TRANSLATION;

	if (flags & ~IBV_REREG_MR_FLAGS_SUPPORTED || (moves && (!addr || !length)) ||
	    (access && !(flags & IBV_REREG_MR_CHANGE_ACCESS)))
		return rereg_fails(IBV_REREG_MR_ERR_INPUT, EINVAL);
	if (!flags || (flags & IBV_REREG_MR_CHANGE_PD && (!pd || pd->context != mr.context)))
		return rereg_fails(IBV_REREG_MR_ERR_CMD, EINVAL);
	/* Where that one's memory is nobody knows. */
	if (old.foreign) {
		if (d.told.first(once::rereg_import))
			say(mr.context, "an imported region that is not pinned is to be registered anew: refused");
		return rereg_fails(IBV_REREG_MR_ERR_CMD, EOPNOTSUPP);
	}
	/* Another library, as libnprdma, may know it by its key. */
	if (old.access & IBV_ACCESS_UNPINNED) {
		if (d.told.first(once::rereg_named))
			say(mr.context, "a region of the program's own IBV_ACCESS_UNPINNED is to be registered anew: refused");
		return rereg_fails(IBV_REREG_MR_ERR_CMD, EOPNOTSUPP);
	}
	const unsigned rights = flags & IBV_REREG_MR_CHANGE_ACCESS ? static_cast<unsigned>(access) : old.access;
	if (rights & remote_rights && !moves) {
		if (d.told.first(once::rereg_peers))
			say(mr.context, "a region that peers may use is to be registered anew at the same address, and is not pinned: its "
			    "key would be another, and so it is refused");
		return rereg_fails(IBV_REREG_MR_ERR_CMD, EOPNOTSUPP);
	}
	return 0;
}

/*
 * The kernel changes nothing of an unpinned region, so another one takes its place in the program's object @mr. Its keys are others,
 * which verbs allow. But peers whose key was good go on to use it until they are told of something, and the adapters that change
 * pinned regions keep it: so what peers may use is refused, unless the program has to tell them a new address.
 */
int replace(device &d, ibv_mr &mr, const twins::region &old, int flags, ibv_pd *pd, void *addr, std::size_t length, int access)
{
	const bool moves = flags & IBV_REREG_MR_CHANGE_TRANSLATION;

	if (const int rc = rereg_refused(d, mr, old, flags, pd, addr, length, access))
		return rc;
	ibv_mr *const other = make(d, flags & IBV_REREG_MR_CHANGE_PD ? pd : mr.pd, moves ? addr : mr.addr, moves ? length : mr.length,
				   moves ? reinterpret_cast<std::uintptr_t>(addr) : old.iova,
				   flags & IBV_REREG_MR_CHANGE_ACCESS ? static_cast<unsigned>(access) : old.access);
	if (!other)
		return IBV_REREG_MR_ERR_CMD;
	const auto exchange = [&] {
		/* What the provider has behind them is the same for both. */
		std::swap(mr, *other);
		d.regions.name(&mr);
		d.regions.name(other);
	};
	exchange();
	if (const int error = unmake(&d, other)) {
		exchange();
		(void)unmake(&d, other);
		return rereg_fails(IBV_REREG_MR_ERR_CMD, error);
	}
	return 0;
}

} // namespace

NPR_EXPORT ibv_mr *ibv_reg_mr_iova2(ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	device *const d = find(pd->context);

	return d ? make(*d, pd, addr, length, iova, access) :
		   left_as_it_is(pd, length, verbs().ibv_reg_mr_iova2(pd, addr, length, iova, access));
}

/* It may be another process's unpinned region, which this library would not know to be one. */
NPR_EXPORT ibv_mr *ibv_import_mr(ibv_pd *pd, uint32_t handle)
{
	device *const d = find(pd->context);
	ibv_mr *const mr = verbs().ibv_import_mr ? verbs().ibv_import_mr(pd, handle) : nullptr;
	npr_mr_attr attr;

	if (!mr || !d || npr_query_mr(mr, &attr))
		return not_its_own(pd, because::imported, 0, mr);
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

/* Nothing of these is the process's memory. */
NPR_EXPORT ibv_mr *ibv_reg_dmabuf_mr(ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	const auto theirs = verbs().ibv_reg_dmabuf_mr;

	if (!theirs) {
		errno = EOPNOTSUPP;
		return nullptr;
	}
	return not_its_own(pd, because::dmabuf, length, theirs(pd, offset, length, iova, fd, access));
}

ibv_mr *npr::preload::reg_dm_mr(ibv_pd *pd, ibv_dm *dm, std::uint64_t offset, std::size_t length, unsigned access)
{
	const auto theirs = find(pd->context)->extended.reg_dm_mr;

	return not_its_own(pd, because::device_memory, length, theirs(pd, dm, offset, length, access));
}

ibv_mr *npr::preload::alloc_null_mr(ibv_pd *pd)
{
	return not_its_own(pd, because::null, 0, find(pd->context)->extended.alloc_null_mr(pd));
}

/* What it moves is at the CPU's addresses. */
NPR_EXPORT int ibv_rereg_mr(ibv_mr *mr, int flags, ibv_pd *pd, void *addr, size_t length, int access)
{
	if (device *const d = find(mr->context)) {
		if (const auto unpinned = d->regions.get(mr->lkey))
			return replace(*d, *mr, *unpinned, flags, pd, addr, length, access);
		if (flags & IBV_REREG_MR_CHANGE_ACCESS) {
			if (access & IBV_ACCESS_UNPINNED) {
				if (d->told.first(once::rereg_pinned))
					say(mr->context, "a pinned region is to be registered anew as one that is not: refused");
				return rereg_fails(IBV_REREG_MR_ERR_CMD, EOPNOTSUPP);
			}
			access &= ~int{IBV_ACCESS_ON_DEMAND};
		}
	}
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
	return unmake(find(mr->context), mr);
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
