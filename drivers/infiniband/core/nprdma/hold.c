// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: holds, which pin pages.
 *
 * A fault pins pages before it looks at them, and adds them to a hold once the leaves
 * show them.  The hold is released, or the region unpins it when it is gone.
 */
#include <linux/mm.h>
#include <linux/slab.h>

#include "np_region.h"

/**
 * np_pin_pages() - pin pages that shall be held
 * @region: region
 * @mm: of the owner, with a user
 * @pin: says which; np_hold_add() may follow
 * @flags: RDMA_NP_FAULT_WRITE: for writing; NP_FAULT_PRESENT: if they are there
 *
 * The mmap lock is not to be dropped: userfaultfd would take that as leave to wait until
 * the owner answers. np_fault_ask_monitor() waits, for as long as is allowed.
 *
 * Context: process context, under np_region.pin_lock; takes the mmap lock.
 * Return: 0, or no page is pinned: -EFAULT, -ENOMEM, or what pinning says.
 */
int np_pin_pages(struct np_region *region, struct mm_struct *mm, struct np_pin *pin,
		 unsigned int flags)
{
	unsigned int gup_flags = FOLL_LONGTERM;
	unsigned int done = 0;
	long n = 0;

	lockdep_assert_held(&region->pin_lock);
	if (flags & RDMA_NP_FAULT_WRITE)
		gup_flags |= FOLL_WRITE;
	if (flags & NP_FAULT_PRESENT)
		gup_flags |= FOLL_NOFAULT;
	mmap_read_lock(mm);
	while (done < pin->npages) {
		n = pin_user_pages_remote(mm,
					  pin->va + ((unsigned long)done << PAGE_SHIFT),
					  pin->npages - done, gup_flags,
					  pin->pages + done, NULL);
		if (n <= 0)
			break;
		done += n;
	}
	mmap_read_unlock(mm);
	if (done == pin->npages)
		return 0;
	unpin_user_pages(pin->pages, done);
	/* DAX: nothing may keep its file system from taking a page back */
	if (n == -EOPNOTSUPP)
		return -EFAULT;
	return n ? n : -EFAULT;
}

/**
 * np_hold_add() - a hold has these pages, too
 * @hold: hold; now @pin is its own
 * @chunk: chunk of the pages
 * @pin: pages that np_pin_pages() pinned as the hold does, and that the leaves show
 *
 * Context: under np_chunk.lock.
 */
void np_hold_add(struct np_hold *hold, struct np_chunk *chunk, struct np_pin *pin)
{
	struct np_slot *slot = np_chunk_slot(chunk, pin->va);
	unsigned int first = (pin->va & (NP_SLOT_SIZE - 1)) >> PAGE_SHIFT;
	struct np_slot_holds *holds = slot->holds;
	struct np_region *region = hold->region;
	unsigned int i;

	lockdep_assert_held(&chunk->lock);
	for (i = first; i < first + pin->npages; i++) {
		holds->writers[i] += hold->write;
		if (holds->count[i]++)
			continue;
		slot->held++;
		atomic64_inc(&region->count->held);
	}
	pin->chunk = chunk;
	pin->hold = hold;
	pin->leased = hold->recall;
	if (pin->leased) {
		pin->range.start = pin->va;
		pin->range.last = pin->va + ((unsigned long)pin->npages << PAGE_SHIFT) - 1;
		interval_tree_insert(&pin->range, &chunk->leased[hold->write]);
		atomic64_add(pin->npages, &region->count->leased);
	}
	spin_lock(&region->hold_lock);
	if (!hold->pages)
		atomic64_inc(&region->count->holds);
	hold->pages += pin->npages;
	list_add(&pin->node, &hold->pins);
	spin_unlock(&region->hold_lock);
}

/*
 * Leaves that only stayed for holds that have ended. A leaf of 2 MiB is held as a whole, so it is
 * stale as a whole.
 */
static bool np_slot_drop_stale(struct np_chunk *chunk, struct np_slot *slot, unsigned int first,
			       unsigned int end, struct iommu_inval *inval)
{
	struct np_slot_holds *holds = slot->holds;
	bool dropped = false;
	unsigned int i;

	lockdep_assert_held(&chunk->lock);
	for (i = first; i < end; i++) {
		unsigned int from = slot->huge ? first : i, to = slot->huge ? end : i + 1;

		if (!holds->writers[i] && test_bit(i, holds->stale_write)) {
			bitmap_clear(holds->stale_write, from, to - from);
			np_slot_fill_write(chunk, slot, from, to, inval);
			dropped = true;
		}
		if (!holds->count[i] && test_bit(i, holds->stale_read)) {
			bitmap_clear(holds->stale_read, from, to - from);
			np_slot_fill_read(chunk, slot, from, to, inval);
			dropped = true;
		}
	}
	return dropped;
}

/**
 * np_pin_release() - pages are not pinned any more
 * @pin: pins of a hold; freed
 * @write: they were for writing
 *
 * The leaves first, then the pages. Stale leaves were kept for the sake of holds.
 *
 * Context: process context.
 * Return: how many pages no hold of the region pins any more.
 */
unsigned int np_pin_release(struct np_pin *pin, bool write)
{
	struct np_chunk *chunk = pin->chunk;
	struct np_slot *slot = np_chunk_slot(chunk, pin->va);
	unsigned int first = (pin->va & (NP_SLOT_SIZE - 1)) >> PAGE_SHIFT;
	unsigned int i, end = first + pin->npages, freed = 0;
	struct np_slot_holds *holds = slot->holds;
	struct iommu_inval inval;

	mutex_lock(&chunk->lock);
	if (pin->leased) {
		if (!RB_EMPTY_NODE(&pin->range.rb))
			interval_tree_remove(&pin->range, &chunk->leased[write]);
		atomic64_sub(pin->npages, &chunk->region->count->leased);
	}
	for (i = first; i < end; i++) {
		holds->writers[i] -= write;
		if (--holds->count[i])
			continue;
		freed++;
		slot->held--;
		atomic64_dec(&chunk->region->count->held);
	}
	iommu_inval_init(&inval);
	if (np_slot_drop_stale(chunk, slot, first, end, &inval) && !slot->resident && !slot->held)
		np_slot_merge(chunk, slot, &inval);
	iommu_inval_sync(chunk->region->read.domain, &inval);
	mutex_unlock(&chunk->lock);

	unpin_user_pages_dirty_lock(pin->pages, pin->npages, write);
	kvfree(pin);
	return freed;
}

/**
 * np_hold_alloc() - a hold without pages
 * @region: region
 * @flags: RDMA_NP_FAULT_WRITE: pages will be pinned for write
 * @recall: it is a lease: called when it is wanted back, once, from here on; NULL: no
 *
 * Context: process context.
 * Return: the hold, to pass to np_region_fault(); NULL: no memory.
 */
struct np_hold *np_hold_alloc(struct np_region *region, unsigned int flags,
			      struct np_recall *recall)
{
	struct np_hold *hold;

	hold = np_lease_alloc(region, recall);
	if (!hold)
		return NULL;
	hold->write = flags & RDMA_NP_FAULT_WRITE;
	INIT_LIST_HEAD(&hold->pins);
	np_region_get(region);
	/* Who recalls it for the region's sake takes it off what this adds it to */
	np_lease_begin(hold);
	spin_lock(&region->hold_lock);
	list_add(&hold->node, &region->holds);
	spin_unlock(&region->hold_lock);
	return hold;
}
EXPORT_SYMBOL_GPL(np_hold_alloc);

/**
 * np_hold_release() - the end of a hold
 * @hold: hold; freed; if it was granted, np_hold_revoke() was called
 *
 * When this returns the pages are not pinned by it any more, and it is not recalled.
 *
 * Context: process context.
 */
void np_hold_release(struct np_hold *hold)
{
	struct np_region *region = hold->region;
	bool entered = np_region_enter(region);
	struct np_pin *pin, *next;
	unsigned long freed = 0;
	LIST_HEAD(pins);

	WARN_ON(hold->key);
	np_lease_end(hold);
	spin_lock(&region->hold_lock);
	list_del(&hold->node);
	list_splice(&hold->pins, &pins);
	spin_unlock(&region->hold_lock);

	/* If there are any, their slots are there */
	list_for_each_entry_safe(pin, next, &pins, node) {
		freed += np_pin_release(pin, hold->write);
	}
	if (entered)
		np_region_leave(region);
	np_lease_returned(hold, freed);
	np_lease_free(hold);
	np_region_put(region);
}
EXPORT_SYMBOL_GPL(np_hold_release);

/**
 * np_hold_pages() - how much a hold pins
 * @hold: hold
 *
 * Return: pages, counted once for each time that they were pinned.
 */
unsigned long np_hold_pages(const struct np_hold *hold)
{
	return READ_ONCE(hold->pages);
}
EXPORT_SYMBOL_GPL(np_hold_pages);

/**
 * np_holds_unpin() - holds of a region pin no page any more
 * @region: region whose chunks are closed
 *
 * The holds stay until they are released.
 *
 * Context: process context.
 */
void np_holds_unpin(struct np_region *region)
{
	struct np_pin *pin, *next;
	unsigned long freed = 0;
	struct np_hold *hold;
	LIST_HEAD(pins);
	LIST_HEAD(dirty_pins);
	bool leased;

	spin_lock(&region->hold_lock);
	list_for_each_entry(hold, &region->holds, node)
		list_splice_init(&hold->pins,
				 hold->write ? &dirty_pins : &pins);
	spin_unlock(&region->hold_lock);
	/* All leases were recalled before */
	list_for_each_entry_safe(pin, next, &dirty_pins, node) {
		leased = pin->leased;
		freed += np_pin_release(pin, true) * leased;
	}
	list_for_each_entry_safe(pin, next, &pins, node) {
		leased = pin->leased;
		freed += np_pin_release(pin, false) * leased;
	}
	np_leases_freed(region, freed);
}
