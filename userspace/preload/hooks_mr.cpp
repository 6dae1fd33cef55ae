/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Regions. */
#include "policy.hpp"
#include "real.hpp"
#include "registry.hpp"
#include "seam.hpp"

#include <nprdma/nprdma.h>

#include <cerrno>
#include <cstdint>
#include <new>
#include <optional>

using namespace npr::preload;

NPR_EXPORT ibv_mr *ibv_reg_mr_iova2(ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	const device *const d = find(pd->context);

	if (!d)
		return verbs().ibv_reg_mr_iova2(pd, addr, length, iova, access);
	const bool unpinned = length >= threshold();
	if (unpinned)
		access |= IBV_ACCESS_UNPINNED;
	ibv_mr *const mr = verbs().ibv_reg_mr_iova2(pd, addr, length, iova, access);
	if (!mr)
		return mr;
	try {
		npr::local_key key;
		if (unpinned)
			key.handle = mr->handle;
		key.offset = reinterpret_cast<std::uintptr_t>(addr) - iova;
		d->lib->regions.add(*mr, key);
	} catch (const std::bad_alloc &) {
		(void)verbs().ibv_dereg_mr(mr);
		errno = ENOMEM;
		return nullptr;
	}
	return mr;
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
	return -npr::dereg_mr(mr, verbs().ibv_dereg_mr);
}
