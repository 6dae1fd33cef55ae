// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: chunks, what one lock and one notifier cover.
 *
 * The notifier makes pages absent, or unwritable, when the owner's memory changes; aging
 * does to see whether peers still use them; and the end of the region does for good. None
 * of them allocates, waits for anything but the lock, or can fail.
 */
#include <kunit/visibility.h>
#include <linux/hugetlb_inline.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "np_region.h"
#include "trace.h"

/* All four steps for [start, last] of a chunk's va */
static unsigned int np_chunk_absent(struct np_chunk *chunk, unsigned long start,
				    unsigned long last, enum np_absent how)
{
	struct iommu_inval inval;
	unsigned int s, s_last, out = 0;

	lockdep_assert_held(&chunk->lock);
	iommu_inval_init(&inval);
	start = max(start, chunk->va);
	last = min(last, chunk->va + NP_CHUNK_SIZE - 1);
	s_last = (last - chunk->va) >> NP_SLOT_SHIFT;
	for (s = (start - chunk->va) >> NP_SLOT_SHIFT; s <= s_last; s++) {
		unsigned long va = chunk->va + ((unsigned long)s << NP_SLOT_SHIFT);
		unsigned int first = 0, end = NP_SLOT_PAGES;

		if (start > va)
			first = (start - va) >> PAGE_SHIFT;
		if (last < va + NP_SLOT_SIZE - 1)
			end = ((last - va) >> PAGE_SHIFT) + 1;
		if (how == NP_ABSENT_WRITE)
			out += np_slot_protect(chunk, &chunk->slots[s], first,
					       end, &inval);
		else
			out += np_slot_absent(chunk, &chunk->slots[s], first,
					      end, how, &inval);
	}
	iommu_inval_sync(chunk->region->read.domain, &inval);
	return out;
}

/*
 * Does each page of the range stay where it is, readable as before? Then who reads it
 * sees what the owner sees, until another event says that the page goes: a page table
 * entry that is about to mean another page, or none, is announced by CLEAR or UNMAP.
 *
 * PROTECTION_PAGE and SOFT_DIRTY write-protect entries and nothing else: fork(),
 * cleaning before write-back, clear_refs. PROTECTION_VMA comes from mprotect(), NUMA
 * balancing and userfaultfd, which hold the mmap lock and have changed the flags of
 * the mapping before. Its entries may become PROT_NONE: by mprotect() that is the end
 * of reading; by NUMA balancing it is a trap for the CPU, and the page stays. Huge
 * pages of hugetlbfs are left out, because their page tables may become unshared in
 * passing, without a word that entries go.
 */
static bool np_range_stays_readable(const struct mmu_notifier_range *range,
				    unsigned long start, unsigned long last)
{
	struct vm_area_struct *vma;

	switch (range->event) {
	case MMU_NOTIFY_PROTECTION_PAGE:
	case MMU_NOTIFY_SOFT_DIRTY:
		return true;
	case MMU_NOTIFY_PROTECTION_VMA:
		vma = vma_lookup(range->mm, start);
		return vma && last < vma->vm_end && vma->vm_flags & VM_READ &&
		       !is_vm_hugetlb_page(vma);
	default:
		return false;
	}
}

/*
 * The owner's memory changes: what leases of it pin may soon not be what he has there, and
 * those who have them must not go on for that. Readers may, where only writing ends.
 */
static void np_chunk_recall(struct np_chunk *chunk, unsigned long start,
			    unsigned long last, bool write)
{
	struct rb_root_cached *leased = &chunk->leased[write];
	struct interval_tree_node *range;
	struct np_pin *pin;

	lockdep_assert_held(&chunk->lock);
	while ((range = interval_tree_iter_first(leased, start, last))) {
		pin = container_of(range, struct np_pin, range);
		interval_tree_remove(range, leased);
		RB_CLEAR_NODE(&range->rb);
		np_lease_recall(pin->hold, NP_RECALL_CHANGE);
	}
}

/* No memory, no network, and no waiting for anything but the lock */
static bool np_chunk_invalidate(struct mmu_interval_notifier *notifier,
				const struct mmu_notifier_range *range,
				unsigned long cur_seq)
{
	struct np_chunk *chunk = container_of(notifier, struct np_chunk,
					      notifier);
	struct np_region *region = chunk->region;
	unsigned long start = max(range->start, notifier->interval_tree.start);
	unsigned long last = min(range->end - 1, notifier->interval_tree.last);
	bool readable = np_range_stays_readable(range, start, last);
	unsigned int out;

	if (mmu_notifier_range_blockable(range))
		mutex_lock(&chunk->lock);
	else if (!mutex_trylock(&chunk->lock))
		return false;
	mmu_interval_set_seq(notifier, cur_seq);
	out = np_chunk_absent(chunk, start, last, readable ? NP_ABSENT_WRITE :
							     NP_ABSENT_UNHELD);
	np_chunk_recall(chunk, start, last, true);
	if (!readable)
		np_chunk_recall(chunk, start, last, false);
	mutex_unlock(&chunk->lock);

	if (out) {
		trace_np_residency(region->id, region->public_rkey, start, out,
				   readable ? RDMA_NP_WORD_READABLE : 0);
		atomic64_inc(&region->count->invalidations);
		atomic64_add(out, &region->count->pages_invalidated);
	}
	return true;
}

static const struct mmu_interval_notifier_ops np_chunk_ops = {
	.invalidate = np_chunk_invalidate,
};

static struct np_chunk *np_chunk_alloc(struct np_region *region,
				       unsigned long index, struct mm_struct *mm)
{
	unsigned long va = region->read.va + (index << NP_CHUNK_SHIFT);
	unsigned long start, end;
	struct np_chunk *chunk;
	unsigned int i;
	int ret;

	chunk = kzalloc(sizeof(*chunk), GFP_KERNEL_ACCOUNT);
	if (!chunk)
		return ERR_PTR(-ENOMEM);
	chunk->region = region;
	chunk->va = va;
	for (i = 0; i < ARRAY_SIZE(chunk->leased); i++)
		chunk->leased[i] = RB_ROOT_CACHED;
	mutex_init(&chunk->lock);
	/* Reclaim calls the notifier: whoever allocates under the lock is told */
	fs_reclaim_acquire(GFP_KERNEL);
	might_lock(&chunk->lock);
	fs_reclaim_release(GFP_KERNEL);

	/* The owner's neighbouring memory is none of our business */
	start = max(va, region->start & PAGE_MASK);
	end = min(va + NP_CHUNK_SIZE, PAGE_ALIGN(region->start + region->length));
	ret = mmu_interval_notifier_insert(&chunk->notifier, mm, start,
					   end - start, &np_chunk_ops);
	if (ret) {
		kfree(chunk);
		return ERR_PTR(ret);
	}
	return chunk;
}

/**
 * np_chunk_get() - find a chunk, or make it
 * @region: region that was entered; to find one in an RCU section, any region
 * @va: in the chunk
 * @mm: of the owner, with a user; NULL: only find it
 *
 * Context: process context; to make one takes np_region.chunk_lock.
 * Return: the chunk, NULL if there is none and it was not to be made, -ENXIO if the
 * region is gone, or -ENOMEM.
 */
struct np_chunk *np_chunk_get(struct np_region *region, unsigned long va,
			      struct mm_struct *mm)
{
	unsigned long index = (va - region->read.va) >> NP_CHUNK_SHIFT;
	struct np_chunk *chunk;
	int ret;

	chunk = xa_load(&region->chunks, index);
	if (chunk || !mm)
		return chunk;

	guard(mutex)(&region->chunk_lock);
	if (region->closed)
		return ERR_PTR(-ENXIO);
	chunk = xa_load(&region->chunks, index);
	if (chunk)
		return chunk;
	chunk = np_chunk_alloc(region, index, mm);
	if (IS_ERR(chunk))
		return chunk;
	ret = xa_err(xa_store(&region->chunks, index, chunk,
			      GFP_KERNEL_ACCOUNT));
	if (ret) {
		mmu_interval_notifier_remove(&chunk->notifier);
		kfree(chunk);
		return ERR_PTR(ret);
	}
	return chunk;
}

static void np_chunk_close(struct np_chunk *chunk)
{
	struct iommu_inval inval;
	unsigned int s;

	mutex_lock(&chunk->lock);
	iommu_inval_init(&inval);
	for (s = 0; s < NP_CHUNK_SLOTS; s++)
		np_slot_close(chunk, &chunk->slots[s], &inval);
	iommu_inval_sync(chunk->region->read.domain, &inval);
	mutex_unlock(&chunk->lock);
	mmu_interval_notifier_remove(&chunk->notifier);
}

/* Step 1 for all pages at once: peers read the words of the host's page of zeros */
static void np_region_drop_words(struct np_region *region)
{
	struct np_chunk *chunk;
	unsigned long index;

	scoped_guard(mutex, &region->chunk_lock)
		region->closed = true;
	/* No word becomes readable any more, in no chunk */
	xa_for_each(&region->chunks, index, chunk) {
		mutex_lock(&chunk->lock);
		chunk->closed = true;
		mutex_unlock(&chunk->lock);
	}
	guard(mutex)(&region->table_lock);
	if (!xa_empty(&region->chunks))
		np_window_table_drop(&region->read);
}

/**
 * np_chunks_close() - all pages become absent and stay so
 * @region: region that is gone
 *
 * Pages under holds, too, which the caller unpins: no pin is added any more, because
 * that needs a chunk that is not closed.
 *
 * The words of a large region are not changed one by one: they go all at once, which
 * costs one store for each GiB, and the leaves one for each 2 MiB.
 *
 * Context: process context, once.
 */
void np_chunks_close(struct np_region *region)
{
	struct np_chunk *chunk;
	unsigned long index;

	np_region_drop_words(region);
	xa_for_each(&region->chunks, index, chunk) {
		np_chunk_close(chunk);
		cond_resched();
	}
}

/**
 * np_region_age() - see whether peers still use pages
 * @region: region
 * @va: slot in the owner's address space, which need not be one of the region's
 * @pages: bitmap of its pages
 *
 * They become absent for peers, and nothing happens to them.  Held pages are left
 * alone, because reclaim cannot take them, and stay in use: they may be resident
 * still when their holds end.
 *
 * Context: process context; the caller keeps the region from being freed.
 */
void np_region_age(struct np_region *region, unsigned long va,
		   const unsigned long *pages)
{
	struct iommu_inval inval;
	struct np_chunk *chunk;
	struct np_slot *slot;
	unsigned int i, out = 0;

	if (va < region->read.va)
		return;
	chunk = np_chunk_get(region, va, NULL);
	if (!chunk)
		return;
	slot = np_chunk_slot(chunk, va);

	mutex_lock(&chunk->lock);
	/* Then there may be no windows any more */
	if (chunk->closed) {
		mutex_unlock(&chunk->lock);
		return;
	}
	iommu_inval_init(&inval);
	for_each_set_bit(i, pages, NP_SLOT_PAGES) {
		if (np_slot_is_held(slot, i))
			np_aging_use(region, va + (i << PAGE_SHIFT), 1);
		else if (slot->resident)
			out += np_slot_absent(chunk, slot, i, i + 1,
					      NP_ABSENT_UNHELD, &inval);
	}
	iommu_inval_sync(region->read.domain, &inval);
	mutex_unlock(&chunk->lock);

	if (out) {
		trace_np_residency(region->id, region->public_rkey, va, out, 0);
		atomic64_add(out, &region->count->pages_aged);
	}
}
EXPORT_SYMBOL_IF_KUNIT(np_region_age);

/**
 * np_region_leave() - what is known about residency is not looked at any more
 * @region: region that was entered
 *
 * Context: process context; the last one frees it.
 */
void np_region_leave(struct np_region *region)
{
	struct np_chunk *chunk;
	unsigned long index;
	int s;

	if (!refcount_dec_and_test(&region->users))
		return;
	np_aging_leave(region);
	xa_for_each(&region->chunks, index, chunk) {
		/* Nobody finds it from here on; kfree_rcu() waits for who has found it */
		xa_erase(&region->chunks, index);
		for (s = 0; s < NP_CHUNK_SLOTS; s++)
			np_slot_free(chunk, &chunk->slots[s]);
		kfree_rcu(chunk, rcu);
		cond_resched();
	}
	/* Once, and no deeper: a whole is not a part */
	if (region->whole)
		np_region_leave(region->whole);
	else
		np_aging_put(region);
}
EXPORT_SYMBOL_IF_KUNIT(np_region_leave);
