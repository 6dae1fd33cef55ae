// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: the life of a region: it is made, granted to peers, and gone.
 *
 * A region is gone when its public MR dies: all its pages become absent for good, and
 * what is known of them is freed.  Only the keys that peers were granted stay, in
 * quarantine: see key.c.
 */
#include <kunit/visibility.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "../core_priv.h"
#include "np_region.h"

static atomic64_t np_region_last_id;

/* What needs neither memory nor anybody else */
static struct np_region *np_region_alloc(struct ib_pd *pd, unsigned long start, size_t length,
					 u64 base, u32 access)
{
	struct np_region *region = kzalloc(sizeof(*region), GFP_KERNEL_ACCOUNT);

	if (!region)
		return NULL;
	kref_init(&region->ref);
	refcount_set(&region->users, 1);
	region->id = atomic64_inc_return(&np_region_last_id);
	region->pd = pd;
	region->start = start;
	region->length = length;
	region->base = base;
	region->access = access;
	region->count = &region->own_count;
	mutex_init(&region->lock);
	INIT_LIST_HEAD(&region->grants);
	mutex_init(&region->chunk_lock);
	xa_init(&region->chunks);
	mutex_init(&region->table_lock);
	init_rwsem(&region->pin_lock);
	init_rwsem(&region->window_sem);
	spin_lock_init(&region->hold_lock);
	INIT_LIST_HEAD(&region->holds);
	init_waitqueue_head(&region->unleased);
	INIT_LIST_HEAD(&region->part_node);
	return region;
}

/* The windows of a region that has a scratch page if it may be written */
static int np_region_map(struct np_region *region, struct device *dev,
			 struct iommu_domain *domain)
{
	int ret;

	if (region->scratch) {
		ret = np_window_map(&region->write, dev, domain, region->start,
				    region->length, false,
				    page_to_phys(region->scratch->page),
				    IOMMU_READ | IOMMU_WRITE);
		if (ret)
			return ret;
	}
	ret = np_window_map(&region->read, dev, domain, region->start, region->length,
			    true, page_to_phys(np_host.signature_page), IOMMU_READ);
	if (ret)
		np_window_unmap(&region->write);
	return ret;
}

/**
 * np_region_create() - a region with its windows, without keys
 * @npdev: device; on success the region takes over the caller's reference
 * @pd: the application's PD
 * @dev: the device that does DMA
 * @domain: its domain
 * @start: first va
 * @length: bytes; not 0, [@start, @start + @length) is user space
 * @base: remote address of @start
 * @access: IB_ACCESS_*
 *
 * Context: process context; the owner is current->mm.
 * Return: the region with one reference, or -ENOMEM or what the IOMMU said.
 */
struct np_region *np_region_create(struct np_device *npdev, struct ib_pd *pd,
				   struct device *dev,
				   struct iommu_domain *domain, u64 start,
				   u64 length, u64 base, u32 access)
{
	struct np_region *region;
	int ret;

	ret = np_host_pages();
	if (ret)
		return ERR_PTR(ret);

	region = np_region_alloc(pd, start, length, base, access);
	if (!region)
		return ERR_PTR(-ENOMEM);
	region->mm = current->mm;
	ib_rdmacg_get(&region->cg);

	if (access & IB_ACCESS_LOCAL_WRITE) {
		region->scratch = np_scratch_get(npdev, pd);
		if (IS_ERR(region->scratch)) {
			ret = PTR_ERR(region->scratch);
			goto free;
		}
	}
	ret = np_region_map(region, dev, domain);
	if (ret)
		goto put_scratch;

	ret = -ENOMEM;
	region->budget = np_budget_get(region->mm);
	if (!region->budget)
		goto unmap;
	ret = np_aging_join(region);
	if (ret)
		goto put_budget;
	np_region_attach(region, npdev);
	mmgrab(region->mm);
	return region;

put_budget:
	np_budget_put(region->budget);
unmap:
	np_window_unmap(&region->read);
	np_window_unmap(&region->write);
put_scratch:
	if (region->scratch)
		np_scratch_put(region->scratch);
free:
	ib_rdmacg_put(&region->cg);
	kfree(region);
	return ERR_PTR(ret);
}
EXPORT_SYMBOL_IF_KUNIT(np_region_create);

/**
 * np_region_create_part() - a part of the region of a whole address space
 * @whole: region whose public MR lives and has its key: its np_parts.lock is held, and it
 *	is not closed
 * @start: first va, which is the remote address too
 * @length: bytes; not 0
 * @own: the owner asks for it himself, and no peer
 *
 * As the MR lives @whole has its device, its PD, and the user that it is born with.
 *
 * Context: process context, any address space; the caller sees to who pays.
 * Return: the part with one reference; -EBUSY: the owner has too many; -ENOSPC, -ENOMEM, or
 * what the IOMMU said.
 */
struct np_region *np_region_create_part(struct np_region *whole, unsigned long start,
					size_t length, bool own)
{
	struct iommu_domain *domain = whole->read.domain;
	struct np_device *npdev = whole->npdev;
	struct np_region *part;
	int ret;

	lockdep_assert_held(&whole->parts->lock);
	part = np_region_alloc(whole->pd, start, length, start, whole->access);
	if (!part)
		return ERR_PTR(-ENOMEM);
	part->whole = whole;
	part->mm = whole->mm;
	part->cg = whole->cg;
	part->budget = whole->budget;
	part->count = whole->count;
	part->public_rkey = whole->public_rkey;
	part->scratch = np_scratch_share(whole->scratch);
	np_region_get(whole);
	refcount_inc(&whole->users);
	/* First of all, because a peer may ask for one too many as often as it likes */
	ret = np_aging_join_part(part, whole, own);
	if (ret)
		goto put;

	/* Nothing is taken for regions that unit tests make */
	if (whole->iova_size) {
		part->iova_size = np_window_size(start, length, true);
		if (part->scratch)
			part->iova_size += np_window_size(start, length, false);
		ret = np_device_take_iova(npdev->ibdev, domain, part->iova_size, own);
		if (ret)
			goto leave;
	}
	ret = np_region_map(part, whole->read.dev, domain);
	if (ret)
		goto give;
	np_aging_show_part(part);
	refcount_inc(&npdev->users);
	np_region_attach(part, npdev);
	return part;

give:
	np_device_give_iova(domain, part->iova_size);
leave:
	np_aging_leave(part);
put:
	/* Neither is the last: the whole is not closed */
	np_region_leave(whole);
	np_region_put(whole);
	if (part->scratch)
		np_scratch_put(part->scratch);
	kfree(part);
	return ERR_PTR(ret);
}

/**
 * np_region_grant() - a peer will be told the keys
 * @region: region
 * @grant: zeroed, or with @gone; the caller's, until np_region_ungrant()
 *
 * Context: process context.
 * Return: 0; -ENXIO if the region is gone: then tell the peer nothing.
 */
int np_region_grant(struct np_region *region, struct np_grant *grant)
{
	guard(mutex)(&region->lock);
	if (region->gone)
		return -ENXIO;
	grant->region = region;
	np_region_get(region);
	list_add_tail(&grant->node, &region->grants);
	return 0;
}
EXPORT_SYMBOL_GPL(np_region_grant);

/**
 * np_region_ungrant() - the peer does not use the keys any more, or cannot
 * @grant: nothing happens if it is not granted
 *
 * The last grant of a region that is gone ends the quarantine: when this returns,
 * its keys do not exist any more.
 *
 * Context: process context, not in np_grant.gone().
 */
void np_region_ungrant(struct np_grant *grant)
{
	struct np_region *region = grant->region;

	if (!region)
		return;
	mutex_lock(&region->lock);
	list_del(&grant->node);
	grant->region = NULL;
	if (region->gone && list_empty(&region->grants) && !np_keys_free(region))
		np_region_leak(region);
	mutex_unlock(&region->lock);
	np_region_put(region);
}
EXPORT_SYMBOL_GPL(np_region_ungrant);

/**
 * np_region_ends() - the region is gone, and that is all: np_region_close_by() does the rest
 * @region: region without a public MR
 *
 * Nothing is granted of it any more. So of several regions that go all leases can be asked
 * back before one of them is waited for.
 */
void np_region_ends(struct np_region *region)
{
	guard(mutex)(&region->lock);
	WRITE_ONCE(region->gone, true);
}

/**
 * np_region_close_by() - np_region_close(), without waiting for leases beyond a time
 * @region: region without a public MR, whose parts have ended if it has any
 * @deadline: of np_leases_deadline()
 *
 * Context: process context.
 */
void np_region_close_by(struct np_region *region, unsigned long deadline)
{
	struct np_grant *grant;

	np_region_ends(region);
	mutex_lock(&region->lock);
	/* Of these only the owner knows, whose work requests fail from here on */
	if (!np_keys_free_local(region) || region->leaks)
		np_region_leak(region);
	mutex_unlock(&region->lock);

	np_leases_end(region, deadline);
	np_keys_free_leases(region);
	/* Pages first: peers that look again now read signatures, and ask us */
	np_chunks_close(region);
	np_holds_unpin(region);
	/*
	 * Words, chunks and the like are freed, however long peers keep the keys. If a
	 * fault is just looking at them, that is when it ends.
	 */
	np_region_leave(region);

	mutex_lock(&region->lock);
	if (list_empty(&region->grants) && !np_keys_free(region))
		np_region_leak(region);
	list_for_each_entry(grant, &region->grants, node) {
		if (grant->gone)
			grant->gone(grant);
	}
	mutex_unlock(&region->lock);
}

/**
 * np_region_close() - the region is gone
 * @region: region without a public MR
 *
 * When this returns all pages are absent and stay so, no page is pinned for the
 * region, and without grants it has no keys. With grants, that and the top levels of
 * its windows' tables is all it has: 4 KiB for each GiB of a window.
 *
 * That is so of each part, if it is of the whole address space. These go first: what makes
 * one needs the device, which a region whose MR the driver keeps loses here.
 *
 * Context: process context; may wait for peers that have leases, see np_leases_end().
 */
void np_region_close(struct np_region *region)
{
	unsigned long deadline = np_leases_deadline();

	if (region->parts)
		np_parts_end(region, deadline);
	np_region_close_by(region, deadline);
}
EXPORT_SYMBOL_IF_KUNIT(np_region_close);

/**
 * np_region_close_for_good() - the end of a region that could not be destroyed
 * @region: region whose public MR the driver keeps, and nobody else knows
 *
 * Context: process context; the device goes.
 */
void np_region_close_for_good(struct np_region *region)
{
	np_region_close(region);
	mutex_lock(&region->lock);
	np_region_leak(region);
	mutex_unlock(&region->lock);
}
EXPORT_SYMBOL_IF_KUNIT(np_region_close_for_good);
