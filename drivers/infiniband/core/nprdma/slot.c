// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: residency, the one place where correctness lives: the words and leaves of a
 * slot, and the order in which they change.
 *
 * P is what the leaves of a page say in both windows, w its residency word.
 *
 * A page becomes absent (notifier, end of a hold, end of the region):
 *   1. w := absent, generation + 1
 *   2. P := signature page and scratch page, one store for each leaf
 *   3. invalidation of IOTLB and device TLB, with drain
 *   4. return
 * A page that the owner keeps loses the right to be written (notifier: fork, soft
 * dirty, write-back, mprotect() to read-only): the same, with w := readable, and with
 * P of the write window only.
 * A page becomes resident (fault):
 *   0. if it becomes writable, it is marked dirty: whoever writes back or drops the
 *      page looks at that, and knows nothing of what a device wrote
 *   1. P := page
 *   2. invalidation, because the signature page's translation may be cached
 *   3. w := resident, generation + 1
 *
 * A peer that reads a word after its WRITE, finds it writable, and finds it the
 * same as before the WRITE, thereby knows that P was the page all that time: w
 * changes before P does on the way out, and after P on the way in.
 *
 * np_chunk.lock serialises all of that.  The notifier takes it, so under it nothing
 * may enter reclaim: page tables for single leaves (iommu_split()), pages of the
 * residency table, hold counters and batches are allocated before.  What a fault
 * found out without the lock is checked under it, against the notifier's sequence
 * and np_slot.merges, and if it is out of date the fault looks again, until a
 * deadline.  Memory may be taken away as fast as it can be brought: then the fault
 * soon asks for fewer pages at once, at last for one as the owner's CPU would, and
 * keeps what it has got.
 *
 * Pages under a hold are pinned, so an invalidation may leave their leaves as they
 * are, and does: who holds a page relies on the leaf and not on the word.  The word
 * becomes absent all the same, because nobody else may prove a WRITE by it.  Such a
 * leaf is "stale".  If a fault finds that the owner has the same page there still (as
 * after a failed migration, or when write-back has cleaned it), the page is resident
 * again; if it is another one, the fault waits for the holds to end.  What is stale
 * then becomes absent.  A held page that loses the right to be written is stale in
 * the write window only.  There, only pages under a hold for writing are ever stale:
 * what is pinned for reading may be cleaned, or not be the owner's to write any more.
 *
 * What the CPU maps with one entry of 2 MiB becomes one leaf, too, and the first fault
 * of any of its pages brings them all.  Such a slot is "huge": all of it goes at once,
 * because a split allocates.  Nothing is lost by that, for the kernel announces the
 * whole entry before it changes a part.  A hold of all of a slot keeps its leaf, or makes
 * it one: all of its pages are held then, so all become stale at once, and go at once
 * when the last such hold ends.  Under a hold of a part pages part, so it splits the slot
 * first, and as long as there is one no slot is huge.
 */
#include <kunit/static_stub.h>
#include <kunit/visibility.h>
#include <linux/slab.h>

#include "np_region.h"

/**
 * np_slot_word_set() - change the word of a page
 * @chunk: chunk
 * @slot: slot; np_slot_count() follows
 * @i: number of the page
 * @rights: RDMA_NP_WORD_*, 0: absent; with a new generation
 *
 * Context: under np_chunk.lock.
 */
void np_slot_word_set(struct np_chunk *chunk, struct np_slot *slot, unsigned int i,
		      u64 rights)
{
	u64 old = np_slot_word(slot, i);
	u64 new = ((old & ~NP_WORD_RIGHTS) + NP_WORD_GENERATION) | rights;
	int readable = !!(new & RDMA_NP_WORD_READABLE) - !!(old & RDMA_NP_WORD_READABLE);
	int writable = !!(new & RDMA_NP_WORD_WRITABLE) - !!(old & RDMA_NP_WORD_WRITABLE);

	lockdep_assert_held(&chunk->lock);
	/* One store: peers read it while it changes */
	WRITE_ONCE(slot->words[i], cpu_to_le64(new));
	slot->resident += readable;
	slot->writable += writable;
}

/**
 * np_slot_count() - the region's statistics follow those of a slot
 * @chunk: chunk
 * @slot: slot
 * @resident: what the slot had before
 * @writable: likewise
 *
 * Context: under np_chunk.lock.
 */
void np_slot_count(struct np_chunk *chunk, const struct np_slot *slot,
		   int resident, int writable)
{
	struct np_region *region = chunk->region;

	lockdep_assert_held(&chunk->lock);
	atomic64_add(slot->resident - resident, &region->count->resident);
	atomic64_add(slot->writable - writable, &region->count->writable);
}

/* Only leaves of pages that are not @held */
static void np_slot_fill(struct np_chunk *chunk, struct np_slot *slot,
			 unsigned int first, unsigned int end,
			 struct np_window *win,
			 bool (*held)(const struct np_slot *slot, unsigned int i),
			 struct iommu_inval *inval)
{
	unsigned long va = np_slot_va(chunk, slot);
	unsigned int i, run;

	lockdep_assert_held(&chunk->lock);
	for (run = first; run < end; run = i + 1) {
		for (i = run; i < end; i++)
			if (held(slot, i))
				break;
		/* If this fails a device can reach a page that is not the owner's any more */
		if (i > run)
			WARN_ON_ONCE(np_window_fill(win, va + (run << PAGE_SHIFT),
						    i - run, inval));
	}
}

/**
 * np_slot_fill_read() - leaves of the read window show that pages are absent
 * @chunk: chunk
 * @slot: slot
 * @first: first page
 * @end: behind the last page
 * @inval: notes what is to be invalidated
 *
 * Those of pages under a hold stay.
 *
 * Context: under np_chunk.lock.
 */
void np_slot_fill_read(struct np_chunk *chunk, struct np_slot *slot,
		       unsigned int first, unsigned int end,
		       struct iommu_inval *inval)
{
	np_slot_fill(chunk, slot, first, end, &chunk->region->read,
		     np_slot_is_held, inval);
}

/**
 * np_slot_fill_write() - leaves of the write window show that pages are absent
 * @chunk: chunk
 * @slot: slot
 * @first: first page
 * @end: behind the last page
 * @inval: notes what is to be invalidated
 *
 * Those of pages under a hold for writing stay.
 *
 * Context: under np_chunk.lock.
 */
void np_slot_fill_write(struct np_chunk *chunk, struct np_slot *slot,
			unsigned int first, unsigned int end,
			struct iommu_inval *inval)
{
	np_slot_fill(chunk, slot, first, end, &chunk->region->write,
		     np_slot_is_held_for_write, inval);
}

/**
 * np_slot_set_huge() - a leaf of 2 MiB maps the owner's memory, or none does
 * @chunk: chunk
 * @slot: slot
 * @huge: which of the two
 *
 * Context: under np_chunk.lock.
 */
void np_slot_set_huge(struct np_chunk *chunk, struct np_slot *slot, bool huge)
{
	lockdep_assert_held(&chunk->lock);
	if (slot->huge == huge)
		return;
	WRITE_ONCE(slot->huge, huge);
	atomic64_add(huge ? 1 : -1, &chunk->region->count->huge);
}

/**
 * np_slot_merged() - there may be no tables for leaves of single pages any more
 * @chunk: chunk
 * @slot: slot
 *
 * Context: under np_chunk.lock.
 */
void np_slot_merged(struct np_chunk *chunk, struct np_slot *slot)
{
	lockdep_assert_held(&chunk->lock);
	slot->read_split = false;
	slot->write_split = false;
	/* Pairs with the acquire in np_fault_try() */
	smp_store_release(&slot->merges, slot->merges + 1);
}

/**
 * np_slot_merge() - the windows show that all of a slot is absent
 * @chunk: chunk
 * @slot: slot
 * @inval: notes what is to be invalidated
 *
 * One store for 512 pages, and the tables are free again.
 *
 * Context: under np_chunk.lock.
 */
void np_slot_merge(struct np_chunk *chunk, struct np_slot *slot,
		   struct iommu_inval *inval)
{
	unsigned long va = np_slot_va(chunk, slot);
	struct np_region *region = chunk->region;

	lockdep_assert_held(&chunk->lock);
	WARN_ON_ONCE(np_window_merge(&region->write, va, region->write.absent,
				     inval));
	WARN_ON_ONCE(np_window_merge(&region->read, va, region->read.absent,
				     inval));
	np_slot_set_huge(chunk, slot, false);
	np_slot_merged(chunk, slot);
}

/* The word of a held page becomes absent, the leaves that its holds need stay */
static void np_slot_make_stale(struct np_chunk *chunk, struct np_slot *slot,
			       unsigned int i)
{
	lockdep_assert_held(&chunk->lock);
	if (np_slot_word(slot, i) & RDMA_NP_WORD_READABLE)
		__set_bit(i, slot->holds->stale_read);
	if (np_slot_word(slot, i) & RDMA_NP_WORD_WRITABLE &&
	    np_slot_is_held_for_write(slot, i))
		__set_bit(i, slot->holds->stale_write);
	np_slot_word_set(chunk, slot, i, 0);
}

/**
 * np_slot_absent() - steps 1 and 2 for pages of a slot
 * @chunk: chunk
 * @slot: slot
 * @first: first page
 * @end: behind the last page
 * @how: what happens to held and absent pages
 * @inval: iommu_inval_sync() must follow before the lock is dropped
 *
 * Context: under np_chunk.lock.
 * Return: how many became absent.
 */
unsigned int np_slot_absent(struct np_chunk *chunk, struct np_slot *slot,
			    unsigned int first, unsigned int end,
			    enum np_absent how, struct iommu_inval *inval)
{
	unsigned int resident = slot->resident, writable = slot->writable;
	unsigned int i, out = 0;

	lockdep_assert_held(&chunk->lock);
	if (!slot->resident && how != NP_ABSENT_UNDO)
		return 0;
	if (slot->huge) {
		first = 0;
		end = NP_SLOT_PAGES;
	}

	for (i = first; i < end; i++) {
		if (!(np_slot_word(slot, i) & RDMA_NP_WORD_READABLE))
			continue;
		if (np_slot_is_held(slot, i))
			np_slot_make_stale(chunk, slot, i);
		else
			np_slot_word_set(chunk, slot, i, 0);
		out++;
	}
	if (!out && how == NP_ABSENT_UNHELD)
		return 0;
	np_slot_count(chunk, slot, resident, writable);

	/*
	 * 1 before 2, as devices see it. Pairs with the peer, which reads the word
	 * after its WRITE went through the leaf.
	 */
	dma_wmb();

	if (!slot->resident && !slot->held) {
		np_slot_merge(chunk, slot, inval);
		return out;
	}
	np_slot_fill_write(chunk, slot, first, end, inval);
	np_slot_fill_read(chunk, slot, first, end, inval);
	return out;
}

/**
 * np_slot_protect() - likewise, where the owner keeps the pages
 * @chunk: chunk
 * @slot: slot
 * @first: first page
 * @end: behind the last page
 * @inval: iommu_inval_sync() must follow before the lock is dropped
 *
 * Only the right to write them goes.
 *
 * Context: under np_chunk.lock.
 * Return: how many lost it.
 */
unsigned int np_slot_protect(struct np_chunk *chunk, struct np_slot *slot,
			     unsigned int first, unsigned int end,
			     struct iommu_inval *inval)
{
	unsigned int resident = slot->resident, writable = slot->writable;
	unsigned int i, out = 0;

	lockdep_assert_held(&chunk->lock);
	if (!slot->writable)
		return 0;
	if (slot->huge) {
		first = 0;
		end = NP_SLOT_PAGES;
	}

	for (i = first; i < end; i++) {
		if (!(np_slot_word(slot, i) & RDMA_NP_WORD_WRITABLE))
			continue;
		if (np_slot_is_held_for_write(slot, i))
			__set_bit(i, slot->holds->stale_write);
		np_slot_word_set(chunk, slot, i, RDMA_NP_WORD_READABLE);
		out++;
	}
	if (!out)
		return 0;
	np_slot_count(chunk, slot, resident, writable);

	/* 1 before 2, as in np_slot_absent() */
	dma_wmb();

	np_slot_fill_write(chunk, slot, first, end, inval);
	return out;
}

/**
 * np_slot_close() - step 2 for a slot whose words no peer can read any more
 * @chunk: chunk
 * @slot: slot
 * @inval: iommu_inval_sync() must follow before the lock is dropped
 *
 * Pages under holds become absent, too.
 *
 * Context: under np_chunk.lock.
 */
void np_slot_close(struct np_chunk *chunk, struct np_slot *slot,
		   struct iommu_inval *inval)
{
	unsigned int resident = slot->resident, writable = slot->writable;

	lockdep_assert_held(&chunk->lock);
	/* Without words it was never split */
	if (!slot->words)
		return;
	slot->resident = 0;
	slot->writable = 0;
	np_slot_count(chunk, slot, resident, writable);
	if (slot->holds) {
		bitmap_zero(slot->holds->stale_read, NP_SLOT_PAGES);
		bitmap_zero(slot->holds->stale_write, NP_SLOT_PAGES);
	}
	np_slot_merge(chunk, slot, inval);
}

/**
 * np_slot_make_words() - let a slot have words
 * @region: region
 * @slot: slot
 * @va: of the slot, or in it
 *
 * Context: process context; takes np_region.table_lock.
 * Return: 0, also if it has some; -ENOMEM; -ENXIO if the region is gone.
 */
int np_slot_make_words(struct np_region *region, struct np_slot *slot,
		       unsigned long va)
{
	struct page *page;
	int ret;

	page = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (!page)
		return -ENOMEM;

	guard(mutex)(&region->table_lock);
	if (slot->words) {
		__free_page(page);
		return 0;
	}
	/* The table is dropped after that was set, and does not come back */
	ret = READ_ONCE(region->closed) ? -ENXIO : np_aging_get_slot(region, va);
	if (ret)
		goto free_page;
	ret = np_window_table_page(&region->read, va, page);
	if (ret)
		goto put_slot;
	atomic64_inc(&region->count->table_pages);
	/* Pairs with the acquire in np_fault_is_noop(); then see np_chunk.lock */
	smp_store_release(&slot->words, page_address(page));
	return 0;

put_slot:
	np_aging_put_slot(region, va);
free_page:
	__free_page(page);
	return ret;
}

/**
 * np_slot_make_holds() - let a slot count holds
 * @chunk: chunk
 * @slot: slot
 *
 * Context: process context; takes np_chunk.lock.
 * Return: 0, also if it does; or -ENOMEM.
 */
int np_slot_make_holds(struct np_chunk *chunk, struct np_slot *slot)
{
	struct np_slot_holds *holds;

	holds = kzalloc(sizeof(*holds), GFP_KERNEL_ACCOUNT);
	if (!holds)
		return -ENOMEM;
	mutex_lock(&chunk->lock);
	if (!slot->holds) {
		WRITE_ONCE(slot->holds, holds);
		holds = NULL;
	}
	mutex_unlock(&chunk->lock);
	kfree(holds);
	return 0;
}

/**
 * np_slot_free() - free what a slot has
 * @chunk: chunk; nobody looks at it any more
 * @slot: slot
 */
void np_slot_free(struct np_chunk *chunk, struct np_slot *slot)
{
	KUNIT_STATIC_STUB_REDIRECT(np_slot_free, chunk, slot);
	kfree(slot->holds);
	if (!slot->words)
		return;
	np_aging_put_slot(chunk->region, np_slot_va(chunk, slot));
	free_page((unsigned long)slot->words);
	atomic64_dec(&chunk->region->count->table_pages);
}
EXPORT_SYMBOL_IF_KUNIT(np_slot_free);
