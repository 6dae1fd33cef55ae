// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: local buffers in unpinned regions.
 *
 * The NIC itself reads what we send and writes what we receive, and nobody finds
 * out afterwards whether it met a page or its stand-in.  So a work request's local
 * side goes under a hold, which its process takes before it posts, and under a key
 * that only such work requests use: it has no remote rights, dies with the region,
 * and is never told to a peer, so it needs no quarantine.
 *
 * A hold of one's own has no time limit.  It is what registration was, for as long
 * and as much as needed, and it is charged to the owner's RLIMIT_MEMLOCK as that was.
 * It may be a lease: the process keeps it for its next work requests, and hears when it is
 * wanted back, or when its memory is not there any more.
 */
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "np_region.h"

/**
 * struct np_local - a hold of the region's own process
 * @hold: the hold
 * @region: region, or part of the whole address space; holds a reference
 * @pages: charged to the region's mm
 * @lease: the process hears of it when it is recalled; NULL: it is no lease
 * @recall: of @hold, if it is a lease
 * @own: what it counts then
 */
struct np_local {
	struct np_hold *hold;
	struct np_region *region;
	unsigned long pages;
	struct np_recall *lease;
	struct np_recall recall;
	struct np_own_lease own;
};

static int np_local_charge(struct np_local *local, unsigned long pages)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;
	struct mm_struct *mm = local->region->mm;
	int ret = -ENOMEM;

	if (atomic64_add_return(pages, &mm->pinned_vm) <= limit ||
	    capable(CAP_IPC_LOCK))
		ret = local->lease ? np_own_lease_reserve(&local->own, local->region, pages) : 0;
	if (ret)
		atomic64_sub(pages, &mm->pinned_vm);
	else
		local->pages = pages;
	return ret;
}

static void np_local_uncharge(struct np_local *local)
{
	atomic64_sub(local->pages, &local->region->mm->pinned_vm);
	if (local->lease)
		np_own_lease_unreserve(&local->own);
}

static void np_local_recalled(struct np_recall *recall)
{
	struct np_local *local = container_of(recall, struct np_local, recall);

	np_own_lease_recalled(&local->own);
	local->lease->fn(local->lease);
}

/**
 * np_local_hold() - pin a range of a region for its own process
 * @region: region that stays while this runs
 * @addr: first address, in the space of the application's remote addresses
 * @len: bytes
 * @flags: RDMA_NP_FAULT_WRITE: the NIC will write there
 * @recall: it is a lease, see np_hold_alloc(); NULL: no
 * @key_addr: set to the address of @addr under @lkey
 * @lkey: set to the key to use, in the PD of the region
 *
 * Context: process context, without mmap lock.
 * Return: the hold, -EPERM if the region is another process's, whose limits are not
 * the caller's, or what np_region_fault() says, -ENOMEM also beyond
 * RLIMIT_MEMLOCK, -EBUSY: too much is leased, or what the driver said to the key.
 */
struct np_local *np_local_hold(struct np_region *region, u64 addr, u64 len,
			       unsigned int flags, struct np_recall *recall,
			       u64 *key_addr, u32 *lkey)
{
	struct np_local *local;
	int ret;

	if (region->mm != current->mm)
		return ERR_PTR(-EPERM);
	region = np_part_of_hold(region, addr, len);
	if (IS_ERR(region))
		return ERR_CAST(region);
	ret = np_region_check_range(region, addr, len, flags | NP_FAULT_LOCAL);
	if (ret)
		goto end;
	ret = np_region_local_key(region, flags & RDMA_NP_FAULT_WRITE, addr,
				  key_addr, lkey);
	if (ret)
		goto end;

	ret = -ENOMEM;
	local = kzalloc(sizeof(*local), GFP_KERNEL_ACCOUNT);
	if (!local)
		goto end;
	local->region = region;
	local->lease = recall;
	local->recall.fn = np_local_recalled;
	ret = np_local_charge(local, DIV_ROUND_UP(offset_in_page(addr) + len,
						  PAGE_SIZE));
	if (ret)
		goto free;
	ret = -ENOMEM;
	local->hold = np_hold_alloc(region, flags, recall ? &local->recall : NULL);
	if (!local->hold)
		goto uncharge;
	ret = np_region_fault(region, addr, len, flags | NP_FAULT_LOCAL,
			      local->hold, NULL, 0);
	if (ret)
		goto release;
	return local;

release:
	np_hold_release(local->hold);
uncharge:
	np_local_uncharge(local);
free:
	kfree(local);
end:
	np_part_end(region);
	return ERR_PTR(ret);
}
EXPORT_SYMBOL_GPL(np_local_hold);

/**
 * np_local_is_needed() - may work requests still use the pages?
 * @local: of np_local_hold()
 *
 * Return: false if their keys do not exist any more.
 */
bool np_local_is_needed(struct np_local *local)
{
	return !np_region_is_gone(local->region);
}
EXPORT_SYMBOL_GPL(np_local_is_needed);

/**
 * np_local_release() - the end of such a hold
 * @local: of np_local_hold(); freed
 *
 * Context: process context; the region may be gone.
 */
void np_local_release(struct np_local *local)
{
	struct np_region *region = local->region;

	np_hold_release(local->hold);
	/* The region keeps the mm */
	np_local_uncharge(local);
	np_part_end(region);
	kfree(local);
}
EXPORT_SYMBOL_GPL(np_local_release);
