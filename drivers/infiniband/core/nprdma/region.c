// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: regions: who has them, how they are found, and what they are.
 */
#include <kunit/visibility.h>
#include <linux/memcontrol.h>
#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "../core_priv.h"
#include "np_hooks.h"
#include "np_region.h"

/**
 * np_region_charge() - from now on the region's owner pays
 * @region: region
 * @charge: for np_region_uncharge(), which follows
 *
 * Context: process context.
 */
void np_region_charge(struct np_region *region, struct np_charge *charge)
{
	charge->memcg = get_mem_cgroup_from_mm(region->mm);
	charge->other = set_active_memcg(charge->memcg);
}
EXPORT_SYMBOL_GPL(np_region_charge);

/**
 * np_region_uncharge() - pays who paid before
 * @charge: of np_region_charge()
 */
void np_region_uncharge(struct np_charge *charge)
{
	set_active_memcg(charge->other);
	mem_cgroup_put(charge->memcg);
}
EXPORT_SYMBOL_GPL(np_region_uncharge);

/* Protects np_device.regions, and np_region.npdev of those in it */
static DEFINE_MUTEX(np_regions_lock);

/**
 * np_region_attach() - the device waits for the region
 * @region: region that is being made
 * @npdev: device, of which it takes over a reference
 */
void np_region_attach(struct np_region *region, struct np_device *npdev)
{
	guard(mutex)(&np_regions_lock);
	region->npdev = npdev;
	list_add(&region->device_node, &npdev->regions);
}

/*
 * From now on the region has no device. Who is told which one it was does with the
 * windows what has to be done, before he gives back the device. NULL: somebody else does.
 */
static struct np_device *np_region_take_device(struct np_region *region)
{
	struct np_device *npdev;

	guard(mutex)(&np_regions_lock);
	npdev = region->npdev;
	if (npdev)
		list_del(&region->device_node);
	region->npdev = NULL;
	return npdev;
}

/**
 * np_region_leak() - the driver could not destroy a key, and may still use its umem
 * @region: region that is gone; its lock is held
 *
 * Better to lose memory than to free it. As the region is never freed, its device does
 * not wait; but the owner's address space calls us for it, and its windows map our pages.
 *
 * Context: process context.
 */
void np_region_leak(struct np_region *region)
{
	struct np_device *npdev;

	lockdep_assert_held(&region->lock);
	npdev = np_region_take_device(region);
	if (!npdev)
		return;
	__module_get(THIS_MODULE);
	np_device_put(npdev);
}

static void np_region_unmap(struct np_region *region, struct np_device *npdev)
{
	np_window_unmap(&region->write);
	np_window_unmap(&region->read);
	np_device_give_iova(region->read.domain, region->iova_size);
	if (region->scratch)
		np_scratch_put(region->scratch);
	np_device_put(npdev);
}

static void np_region_free(struct kref *ref)
{
	struct np_region *region = container_of(ref, struct np_region, ref);
	struct np_device *npdev = np_region_take_device(region);

	WARN_ON(!list_empty(&region->grants));
	WARN_ON(!list_empty(&region->holds));
	WARN_ON(refcount_read(&region->users));
	if (npdev)
		np_region_unmap(region, npdev);
	if (region->whole) {
		np_region_put(region->whole);
	} else {
		ib_rdmacg_put(&region->cg);
		np_budget_put(region->budget);
		mmdrop(region->mm);
	}
	kfree(region->parts);
	kfree(region);
}

/*
 * A region of the device of which somebody else still has a reference, and that is freed
 * by whoever gives that back.
 */
static struct np_region *np_region_of_device(struct np_device *npdev)
{
	struct np_region *region;

	guard(mutex)(&np_regions_lock);
	list_for_each_entry(region, &npdev->regions, device_node) {
		if (kref_get_unless_zero(&region->ref))
			return region;
	}
	return NULL;
}

/**
 * np_regions_detach() - regions that are gone end without their device
 * @npdev: device that goes: none of its regions has an MR, keys or grants any more
 *
 * A fault that waits for memory of the owner keeps a region, and the owner may keep it
 * waiting for as long as he likes. When it goes on it finds the region closed, and looks
 * at no window: see np_region.window_sem and np_chunk.closed.
 *
 * Context: process context.
 */
void np_regions_detach(struct np_device *npdev)
{
	struct np_region *region;

	while ((region = np_region_of_device(npdev))) {
		/* Else somebody could still look at its windows */
		WARN_ON(!np_region_is_gone(region));
		/* Who makes room for leaves now is done; who comes later does not */
		down_write(&region->window_sem);
		up_write(&region->window_sem);
		if (np_region_take_device(region))
			np_region_unmap(region, npdev);
		np_region_put(region);
	}
}
EXPORT_SYMBOL_IF_KUNIT(np_regions_detach);

/**
 * np_region_get() - take a reference
 * @region: region of which the caller has a reference
 */
void np_region_get(struct np_region *region)
{
	kref_get(&region->ref);
}
EXPORT_SYMBOL_GPL(np_region_get);

/**
 * np_region_put() - drop a reference
 * @region: region
 *
 * Context: process context; the last one unmaps the windows.
 */
void np_region_put(struct np_region *region)
{
	kref_put(&region->ref, np_region_free);
}
EXPORT_SYMBOL_GPL(np_region_put);

/**
 * np_region_put_unless_last() - drop a reference where nobody may sleep
 * @region: region
 *
 * Context: any.
 * Return: false: it is the last one, and the caller still has it.
 */
bool np_region_put_unless_last(struct np_region *region)
{
	return refcount_dec_not_one(&region->ref.refcount);
}
EXPORT_SYMBOL_GPL(np_region_put_unless_last);

/**
 * np_region_find_rkey() - the live region with this public key
 * @ibdev: device, held by a client or a uverbs object
 * @rkey: what the owner's application calls mr->rkey (and mr->lkey)
 *
 * Return: the region with a reference, or NULL.
 */
struct np_region *np_region_find_rkey(struct ib_device *ibdev, u32 rkey)
{
	struct np_device *npdev = np_device_get(ibdev);
	struct np_region *region;

	if (!npdev)
		return NULL;
	xa_lock(&npdev->rkeys);
	region = xa_load(&npdev->rkeys, rkey);
	if (region && (region->ending || !kref_get_unless_zero(&region->ref)))
		region = NULL;
	xa_unlock(&npdev->rkeys);
	np_device_put(npdev);
	return region;
}
EXPORT_SYMBOL_GPL(np_region_find_rkey);

/**
 * np_mr_region() - the region behind an MR
 * @mr: MR that the caller keeps alive
 *
 * Return: the region, without a reference, or NULL if the MR is a pinned one.
 */
struct np_region *np_mr_region(struct ib_mr *mr)
{
	return mr->np;
}
EXPORT_SYMBOL_GPL(np_mr_region);

/**
 * np_region_is_gone() - is the public MR dead?
 * @region: region
 *
 * Return: true if it is; it may become so at any time.
 */
bool np_region_is_gone(struct np_region *region)
{
	return READ_ONCE(region->gone);
}
EXPORT_SYMBOL_GPL(np_region_is_gone);

/**
 * np_region_id() - the name that is never used again on this host
 * @region: region
 *
 * Return: its id, not 0.
 */
u64 np_region_id(struct np_region *region)
{
	return region->id;
}
EXPORT_SYMBOL_GPL(np_region_id);

/**
 * np_region_pd() - the application's PD
 * @region: region
 *
 * Return: the PD, to compare with that of a QP; it may be freed if the region is
 * gone.
 */
struct ib_pd *np_region_pd(struct np_region *region)
{
	return region->pd;
}
EXPORT_SYMBOL_GPL(np_region_pd);

/**
 * np_region_mm() - the owner's address space
 * @region: region
 *
 * Return: the address space, for as long as the caller keeps the region.
 */
struct mm_struct *np_region_mm(struct np_region *region)
{
	return region->mm;
}
EXPORT_SYMBOL_GPL(np_region_mm);

/**
 * np_region_describe() - what a region is, without making keys
 * @region: region
 * @out: where to; keys, remote addresses, bounds and order are 0
 */
void np_region_describe(struct np_region *region, struct np_resolve *out)
{
	*out = (struct np_resolve){
		.id = region->id,
		.base = region->base,
		.length = region->length,
		.access = region->access,
		.signature = np_host.signature,
		.page_shift = RDMA_NP_PAGE_SHIFT,
		.unit_shift = NP_UNIT_SHIFT,
		.part_shift = region->whole ? NP_PART_SHIFT : 0,
	};
}
EXPORT_SYMBOL_GPL(np_region_describe);

/**
 * np_region_stats() - read the counters
 * @region: region
 * @stats: where to; the counters are not read at one instant
 */
void np_region_stats(struct np_region *region, struct np_stats *stats)
{
	struct np_counters *count = region->count;

	*stats = (struct np_stats){
		.resident = atomic64_read(&count->resident),
		.writable = atomic64_read(&count->writable),
		.held = atomic64_read(&count->held),
		.huge = atomic64_read(&count->huge),
		.faults_minor = atomic64_read(&count->faults_minor),
		.faults_major = atomic64_read(&count->faults_major),
		.faults_noop = atomic64_read(&count->faults_noop),
		.faults_failed = atomic64_read(&count->faults_failed),
		.faults_at_once = atomic64_read(&count->faults_at_once),
		.retries = atomic64_read(&count->retries),
		.invalidations = atomic64_read(&count->invalidations),
		.pages_invalidated = atomic64_read(&count->pages_invalidated),
		.pages_aged = atomic64_read(&count->pages_aged),
		.holds = atomic64_read(&count->holds),
		.leases = atomic64_read(&count->leases),
		.leases_ended = atomic64_read(&count->leases_ended),
		.leased = atomic64_read(&count->leased),
		.recalls_change = atomic64_read(&count->recalls[NP_RECALL_CHANGE]),
		.recalls_memory = atomic64_read(&count->recalls[NP_RECALL_MEMORY]),
		.recalls_budget = atomic64_read(&count->recalls[NP_RECALL_BUDGET]),
		.recalls_age = atomic64_read(&count->recalls[NP_RECALL_AGE]),
		.recalls_gone = atomic64_read(&count->recalls[NP_RECALL_GONE]),
		.overdue = atomic64_read(&count->overdue),
		.table_pages = atomic64_read(&count->table_pages),
	};
}
EXPORT_SYMBOL_GPL(np_region_stats);
