// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: windows, the IOVA ranges through which devices reach a region.
 *
 * A window covers whole slots of 2 MiB.  From its first moment to its last every
 * address of it is mapped: absent pages to the 2 MiB page of struct np_window.absent,
 * and nothing here ever makes a leaf not-present before np_window_unmap().
 *
 * Behind the slots of a read window follows the residency table, one page for
 * each slot.  It starts on a 2 MiB boundary, so the last slot need not be split
 * for it.
 */
#include <kunit/static_stub.h>
#include <kunit/visibility.h>
#include <linux/iommu.h>
#include <linux/log2.h>
#include <linux/mm.h>

#include "np_region.h"

/* The DMA API belongs to a device, which unit tests do not have */
VISIBLE_IF_KUNIT int np_iova_reserve(struct device *dev, size_t size,
				     size_t align, size_t offset,
				     dma_addr_t *iova)
{
	KUNIT_STATIC_STUB_REDIRECT(np_iova_reserve, dev, size, align, offset,
				   iova);
	return iommu_dma_reserve_iova(dev, size, align, offset, iova);
}
EXPORT_SYMBOL_IF_KUNIT(np_iova_reserve);

VISIBLE_IF_KUNIT void np_iova_release(struct device *dev, dma_addr_t iova,
				      size_t size)
{
	KUNIT_STATIC_STUB_REDIRECT(np_iova_release, dev, iova, size);
	iommu_dma_release_iova(dev, iova, size);
}
EXPORT_SYMBOL_IF_KUNIT(np_iova_release);

#define NP_TABLE_PROT	(IOMMU_READ | IOMMU_CACHE)

static size_t np_window_slots_size(unsigned long start, size_t length)
{
	return ALIGN(start + length, NP_SLOT_SIZE) -
	       ALIGN_DOWN(start, NP_SLOT_SIZE);
}

/**
 * np_window_size() - how much IOVA space does np_window_map() take?
 * @start: first va
 * @length: bytes; not 0, checked against wrapping
 * @table: with a residency table behind it
 *
 * Return: bytes.
 */
size_t np_window_size(unsigned long start, size_t length, bool table)
{
	size_t size = np_window_slots_size(start, length);

	if (table)
		size += ALIGN(size >> NP_SLOT_SHIFT << PAGE_SHIFT,
			      NP_SLOT_SIZE);
	return size;
}
EXPORT_SYMBOL_IF_KUNIT(np_window_size);

/**
 * np_window_map() - reserve a window and map all of it absent
 * @win: what to fill in, zeroed
 * @dev: the device that does DMA
 * @domain: its domain
 * @start: first va
 * @length: bytes; not 0, checked against wrapping
 * @table: with a residency table behind it
 * @absent: 2 MiB page for absent pages
 * @prot: IOMMU_* of every leaf
 *
 * The IOVA is congruent to @start modulo the largest power of 2 that fits into the
 * window, at most 1 GiB, so that the device's translation table needs few entries.
 *
 * Context: process context.
 * Return: 0, -ENOMEM, or what the IOMMU driver says.
 */
int np_window_map(struct np_window *win, struct device *dev,
		  struct iommu_domain *domain, unsigned long start,
		  size_t length, bool table, phys_addr_t absent, int prot)
{
	size_t slots_size = np_window_slots_size(start, length);
	size_t align;
	int ret;

	win->va = ALIGN_DOWN(start, NP_SLOT_SIZE);
	win->slots = slots_size >> NP_SLOT_SHIFT;
	win->size = np_window_size(start, length, table);
	win->dev = dev;
	win->domain = domain;
	win->absent = absent;
	win->prot = prot | IOMMU_CACHE;

	align = clamp_t(size_t, rounddown_pow_of_two(slots_size), NP_SLOT_SIZE,
			SZ_1G);
	ret = np_iova_reserve(dev, win->size, align, win->va & (align - 1),
			      &win->iova);
	if (ret)
		goto forget;

	ret = iommu_map_fill(domain, win->iova, slots_size, absent, win->prot,
			     GFP_KERNEL_ACCOUNT);
	if (ret)
		goto release;
	if (table) {
		ret = iommu_map_fill(domain, win->iova + slots_size,
				     win->size - slots_size,
				     page_to_phys(np_host.zero_page),
				     NP_TABLE_PROT, GFP_KERNEL_ACCOUNT);
		if (ret)
			goto unmap;
	}
	return 0;

unmap:
	iommu_unmap(domain, win->iova, slots_size);
release:
	np_iova_release(dev, win->iova, win->size);
forget:
	win->slots = 0;
	return ret;
}

/**
 * np_window_unmap() - the end of a window
 * @win: window to which no key gives access any more; nothing if it never existed
 *
 * Context: process context.
 */
void np_window_unmap(struct np_window *win)
{
	if (!np_window_exists(win))
		return;
	iommu_unmap(win->domain, win->iova, win->size);
	np_iova_release(win->dev, win->iova, win->size);
	win->slots = 0;
}

/**
 * np_window_fill() - point leaves at what absent pages map to
 * @win: window
 * @va: of the first page
 * @npages: number of pages
 * @inval: what to iommu_inval_sync()
 *
 * Context: under the lock of the chunk. Never allocates.
 * Return: 0, or what the IOMMU driver says: a bug of ours.
 */
int np_window_fill(struct np_window *win, unsigned long va, unsigned long npages,
		   struct iommu_inval *inval)
{
	if (!np_window_exists(win))
		return 0;
	return iommu_replace_fill(win->domain, np_window_iova(win, va),
				  npages << PAGE_SHIFT, win->absent, win->prot,
				  inval);
}

/**
 * np_window_merge() - make a slot one leaf
 * @win: window
 * @va: of the slot
 * @paddr: 2 MiB that it shall map to: the owner's, or np_window.absent
 * @inval: what to iommu_inval_sync()
 *
 * Context: under the lock of the chunk. Never allocates.
 * Return: 0, or what the IOMMU driver says: a bug of ours.
 */
int np_window_merge(struct np_window *win, unsigned long va, phys_addr_t paddr,
		    struct iommu_inval *inval)
{
	if (!np_window_exists(win))
		return 0;
	return iommu_merge_leaves(win->domain, np_window_iova(win, va), paddr,
				  win->prot, inval);
}

/**
 * np_window_pages() - point leaves at pages
 * @win: window
 * @va: of the first page
 * @npages: number of pages, all in one slot
 * @paddrs: what each shall map to, or IOMMU_LEAF_KEEP
 * @inval: what to iommu_inval_sync()
 *
 * Context: under the lock of the chunk. Never allocates.
 * Return: 0; -EBUSY if the slot is not split; nothing has changed on error.
 */
int np_window_pages(struct np_window *win, unsigned long va, unsigned int npages,
		    const phys_addr_t *paddrs, struct iommu_inval *inval)
{
	return iommu_replace_pages(win->domain, np_window_iova(win, va), npages,
				   paddrs, win->prot, inval);
}

/**
 * np_window_split() - make room for leaves of single pages
 * @win: window
 * @va: any in the slot
 *
 * Context: process context, without the lock of the chunk: a merge may undo it
 * until the lock is taken.
 * Return: 0 or -ENOMEM.
 */
int np_window_split(struct np_window *win, unsigned long va)
{
	return iommu_split(win->domain, np_window_iova(win, va),
			   GFP_KERNEL_ACCOUNT);
}

/**
 * np_window_table_page() - let a slot's words be in a page of its own
 * @win: read window
 * @va: any in the slot
 * @page: zeroed page
 *
 * Peers read zeros before and after; when this returns no device reads the
 * zero page in its place any more.
 *
 * Context: process context, under the region's table_lock.
 * Return: 0 or -ENOMEM.
 */
int np_window_table_page(struct np_window *win, unsigned long va,
			 struct page *page)
{
	dma_addr_t iova = np_window_table_iova(win, va);
	struct iommu_inval inval;
	int ret;

	ret = iommu_split(win->domain, iova, GFP_KERNEL_ACCOUNT);
	if (ret)
		return ret;

	iommu_inval_init(&inval);
	ret = iommu_replace(win->domain, iova, PAGE_SIZE, page_to_phys(page),
			    NP_TABLE_PROT, NULL, &inval);
	iommu_inval_sync(win->domain, &inval);
	return ret;
}

/**
 * np_window_table_drop() - no page of words is in the table any more
 * @win: read window
 *
 * Peers read zeros from then on; when this returns no device reads words, and their
 * pages may be freed.
 *
 * Context: process context, under the region's table_lock. Never allocates.
 */
void np_window_table_drop(struct np_window *win)
{
	dma_addr_t iova = np_window_table_iova(win, win->va);
	dma_addr_t end = win->iova + win->size;
	struct iommu_inval inval;

	iommu_inval_init(&inval);
	for (; iova < end; iova += NP_SLOT_SIZE)
		/* If this fails a device can read memory that is not ours any more */
		WARN_ON_ONCE(iommu_merge_leaves(win->domain, iova,
						page_to_phys(np_host.zero_page),
						NP_TABLE_PROT, &inval));
	iommu_inval_sync(win->domain, &inval);
}
