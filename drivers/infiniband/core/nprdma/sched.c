// SPDX-License-Identifier: GPL-2.0
/*
 * Owners of memory: whose turn it is to be served, and what one of them may take of what
 * a device has for all.
 */
#include <linux/log2.h>
#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "np_hca.h"

/* What is left for QPs that have nothing else under way */
#define NP_OWNER_SPARSE		32

/* So many (region, peer) may know keys of one owner's regions: half a KiB each */
VISIBLE_IF_KUNIT unsigned int np_owner_max_grants = 1 << 20;
EXPORT_SYMBOL_IF_KUNIT(np_owner_max_grants);

/* Under the owner's lock, with something waiting: of each two, one of the first class. */
static struct np_job *np_owner_next(struct np_owner *owner)
{
	unsigned int class = __ffs(++owner->turn | BIT(NP_OWNER_DEPTHS - 1));
	struct np_job *job;

	lockdep_assert_held(&owner->lock);
	if (list_empty(&owner->waiting[class]))
		for (class = 0; list_empty(&owner->waiting[class]); class++)
			;
	job = list_first_entry(&owner->waiting[class], struct np_job, entry);
	list_del(&job->entry);
	owner->nr_waiting--;
	return job;
}

/* Under the owner's lock. */
static void np_owner_start(struct np_owner *owner)
{
	unsigned int nr = find_first_zero_bit(owner->busy, NP_OWNER_ACTIVE);

	lockdep_assert_held(&owner->lock);
	if (owner->starting || !owner->nr_waiting || nr == NP_OWNER_ACTIVE)
		return;
	owner->starting = true;
	__set_bit(nr, owner->busy);
	queue_work(owner->wq, &owner->servers[nr].work);
}

static void np_server_work(struct work_struct *work)
{
	struct np_server *server = container_of(work, struct np_server, work);
	struct np_owner *owner = server->owner;
	struct np_job *job;

	spin_lock(&owner->lock);
	job = np_owner_next(owner);
	owner->starting = false;
	np_owner_start(owner);
	spin_unlock(&owner->lock);

	job->serve(job);

	spin_lock(&owner->lock);
	__clear_bit(server - owner->servers, owner->busy);
	np_owner_start(owner);
	spin_unlock(&owner->lock);
}

static void np_owner_free(struct work_struct *work)
{
	struct np_owner *owner = container_of(work, struct np_owner, free);

	scoped_guard(mutex, &owner->hca->owners_lock)
		list_del(&owner->node);

	destroy_workqueue(owner->wq);
	mmdrop(owner->mm);
	np_hca_put(owner->hca);
	kfree(owner);
	module_put(THIS_MODULE);
}

static struct np_owner *np_owner_alloc(struct np_hca *hca, struct mm_struct *mm)
{
	struct np_owner *owner;
	unsigned int i;

	owner = kzalloc(sizeof(*owner), GFP_KERNEL_ACCOUNT);
	if (!owner)
		return NULL;
	/*
	 * Unbound, so that a fault that waits for a disk delays no other; not
	 * dependent on new workers, because the peer's memory pressure may wait
	 * for us.  The queue's own bound is divided among the NUMA nodes, and all
	 * FAULTs may come by a CPU of one of them.  A server that it keeps inactive
	 * would keep the others from being started, so it is the number of servers
	 * that bounds it.
	 */
	owner->wq = alloc_workqueue("nprdma-fault",
				    WQ_UNBOUND | WQ_HIGHPRI | WQ_MEM_RECLAIM,
				    WQ_MAX_ACTIVE);
	if (!owner->wq) {
		kfree(owner);
		return NULL;
	}
	/* Its memory may keep a FAULT at work for longer than we have the device */
	__module_get(THIS_MODULE);
	kref_init(&owner->ref);
	kref_get(&hca->ref);
	owner->hca = hca;
	mmgrab(mm);
	owner->mm = mm;
	INIT_WORK(&owner->free, np_owner_free);
	spin_lock_init(&owner->lock);
	for (i = 0; i < NP_OWNER_DEPTHS; i++)
		INIT_LIST_HEAD(&owner->waiting[i]);
	for (i = 0; i < NP_OWNER_ACTIVE; i++) {
		INIT_WORK(&owner->servers[i].work, np_server_work);
		owner->servers[i].owner = owner;
	}
	return owner;
}

/**
 * np_owner_get - The owner of an address space's regions on a device
 * @hca: the device
 * @mm: the address space
 *
 * Context: process context; who pays is the caller's business
 * Return: with a reference, or NULL: there is no memory
 */
struct np_owner *np_owner_get(struct np_hca *hca, struct mm_struct *mm)
{
	struct np_owner *owner;

	guard(mutex)(&hca->owners_lock);
	list_for_each_entry(owner, &hca->owners, node) {
		if (owner->mm == mm && kref_get_unless_zero(&owner->ref))
			return owner;
	}
	owner = np_owner_alloc(hca, mm);
	if (owner)
		list_add(&owner->node, &hca->owners);
	return owner;
}
EXPORT_SYMBOL_IF_KUNIT(np_owner_get);

static void np_owner_release(struct kref *ref)
{
	queue_work(np_wq, &container_of(ref, struct np_owner, ref)->free);
}

/**
 * np_owner_put - Give back a reference
 * @owner: the owner
 *
 * Context: any, does not sleep; also the last work of the owner's queue
 */
void np_owner_put(struct np_owner *owner)
{
	kref_put(&owner->ref, np_owner_release);
}
EXPORT_SYMBOL_IF_KUNIT(np_owner_put);

/**
 * np_owner_begin - Count a FAULT of a peer that is to be served
 * @owner: of the memory
 * @depth: how many of the same QP are under way, with this one
 *
 * An owner may have as many under way as it leaves free for others. So one whose
 * memory hangs takes half of what there is, a second one half of the rest, and there is
 * always something left; an owner that is alone has enough. The last ones are for QPs
 * that have no other, so that those that have many do not keep them out.
 *
 * Context: any, that is not an interrupt
 * Return: false if there is no room for it, or the device is going; else
 * np_owner_serve() and np_owner_end() must follow
 */
bool np_owner_begin(struct np_owner *owner, unsigned int depth)
{
	struct np_hca *hca = owner->hca;
	unsigned int most;
	bool ok;

	xa_lock_irq(&hca->peers);
	most = NP_SERVE_DEVICE - min(hca->serving, NP_SERVE_DEVICE);
	if (depth > 1)
		most -= min(most, NP_OWNER_SPARSE);
	ok = !hca->dying && owner->serving < most;
	owner->serving += ok;
	hca->serving += ok;
	xa_unlock_irq(&hca->peers);
	return ok;
}
EXPORT_SYMBOL_IF_KUNIT(np_owner_begin);

/**
 * np_owner_serve - Serve a FAULT, in its turn
 * @owner: of the memory
 * @job: keeps what it needs
 * @depth: as np_owner_begin() was told
 */
void np_owner_serve(struct np_owner *owner, struct np_job *job, unsigned int depth)
{
	unsigned int class = min(ilog2(depth), NP_OWNER_DEPTHS - 1);

	spin_lock(&owner->lock);
	list_add_tail(&job->entry, &owner->waiting[class]);
	owner->nr_waiting++;
	np_owner_start(owner);
	spin_unlock(&owner->lock);
}
EXPORT_SYMBOL_IF_KUNIT(np_owner_serve);

/**
 * np_owner_has_waiting - Do FAULTs wait for their turn
 * @owner: of the memory
 *
 * Context: any, that is not an interrupt
 * Return: true: one more would have to wait, too
 */
bool np_owner_has_waiting(struct np_owner *owner)
{
	guard(spinlock)(&owner->lock);
	return owner->nr_waiting;
}

/**
 * np_owner_end - A FAULT was served
 * @owner: as np_owner_begin() was told
 */
void np_owner_end(struct np_owner *owner)
{
	struct np_hca *hca = owner->hca;

	xa_lock_irq(&hca->peers);
	owner->serving--;
	hca->serving--;
	xa_unlock_irq(&hca->peers);
}
EXPORT_SYMBOL_IF_KUNIT(np_owner_end);

/**
 * np_owner_hold - Count pages that peers will hold
 * @owner: of the memory
 * @pages: their number
 *
 * An owner may have as much as it leaves free, as with FAULTs: so those that pin as
 * much as they can, without end, leave something to the others.
 *
 * Return: 0, then np_owner_unhold() must follow; -EBUSY
 */
int np_owner_hold(struct np_owner *owner, unsigned int pages)
{
	struct np_hca *hca = owner->hca;
	bool ok;

	xa_lock_irq(&hca->peers);
	ok = owner->held_pages + pages + hca->held_pages <= NP_HELD_DEVICE;
	if (ok) {
		owner->held_pages += pages;
		hca->held_pages += pages;
	}
	xa_unlock_irq(&hca->peers);
	return ok ? 0 : -EBUSY;
}

/**
 * np_owner_unhold - End what np_owner_hold() began
 * @owner: of the memory
 * @pages: their number
 */
void np_owner_unhold(struct np_owner *owner, unsigned int pages)
{
	struct np_hca *hca = owner->hca;

	xa_lock_irq(&hca->peers);
	owner->held_pages -= pages;
	hca->held_pages -= pages;
	xa_unlock_irq(&hca->peers);
}

/**
 * np_owner_grant - Count one more (region, peer) that knows keys
 * @owner: of the region
 *
 * Return: false if it is over the bound; else np_owner_ungrant() must follow
 */
bool np_owner_grant(struct np_owner *owner)
{
	if (atomic_inc_return(&owner->grants) <= np_owner_max_grants)
		return true;
	atomic_dec(&owner->grants);
	return false;
}

/**
 * np_owner_ungrant - End what np_owner_grant() began
 * @owner: of the region
 */
void np_owner_ungrant(struct np_owner *owner)
{
	atomic_dec(&owner->grants);
}
