// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: the region of a whole address space, and its parts.
 *
 * Who registers address 0 with length SIZE_MAX gets one key for all memory that he has, or
 * will have.  Windows for all of that would be as large as the address space.  So such a region
 * is made of parts, regions of NP_PART_SIZE each, aligned, with windows, residency and keys
 * of their own, which are made when somebody first asks for an address in them.  A peer
 * RESOLVEs the key with an address, is told the part's keys and what it covers, and does
 * with it what it does with any region: it has an id of its own, is granted, faulted,
 * leased, and GONE by itself.  Nothing below this file knows the difference.
 *
 * The owner's own holds are in parts as well.  A buffer that is in two parts is under one
 * key all the same, because a work request cannot be split there: so that hold has a part of
 * its own, for just its pages, which ends with it.
 *
 * A peer can make the kernel make a part only where the owner has memory that can be read,
 * which is looked at for the address that it names, and only np_max_parts of them for each
 * owner, who pays for them (np_region_charge()).  They stay until the public MR dies: memory
 * that is unmapped there and mapped again is found by the same keys, as in any region.  So
 * what peers have used up stays used up, and the last eighth of them (NP_PARTS_OWN) is the owner's:
 * without a part his own work requests fail.
 *
 * np_parts.lock is held while a part is made, so there is one for each address, and none
 * after np_parts_end() has closed them.  It is never held where somebody waits for the
 * owner's mmap_lock, which the owner may keep for as long as he likes: RESOLVE is served by
 * workers that are few.
 */
#include <kunit/visibility.h>
#include <linux/moduleparam.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "np_region.h"

VISIBLE_IF_KUNIT unsigned int np_max_parts = 4096;
EXPORT_SYMBOL_IF_KUNIT(np_max_parts);
module_param_named(nprdma_max_parts, np_max_parts, uint, 0644);
MODULE_PARM_DESC(nprdma_max_parts,
		 "GiB of a process's memory that its unpinned regions of the whole address space can serve, all together; each takes 16 KiB, and 2 GiB of DMA addresses");

/* One of so many is not for peers */
#define NP_PARTS_OWN	8

/**
 * np_part_may_be_added() - may an owner have one more part?
 * @nr: those that he has
 * @own: he asks for it himself, and no peer
 *
 * Return: true if so.
 */
bool np_part_may_be_added(unsigned int nr, bool own)
{
	unsigned int most = READ_ONCE(np_max_parts);

	return nr < most - (own ? 0 : most / NP_PARTS_OWN);
}

/**
 * np_parts_begin() - a region is of the whole address space
 * @region: region of the first page, that nobody knows yet
 *
 * Context: process context.
 * Return: 0 or -ENOMEM.
 */
int np_parts_begin(struct np_region *region)
{
	struct np_parts *parts = kzalloc(sizeof(*parts), GFP_KERNEL_ACCOUNT);

	if (!parts)
		return -ENOMEM;
	mutex_init(&parts->lock);
	xa_init(&parts->at);
	INIT_LIST_HEAD(&parts->all);
	region->parts = parts;
	region->length = SIZE_MAX;
	return 0;
}
EXPORT_SYMBOL_IF_KUNIT(np_parts_begin);

/*
 * Does the owner have memory at this address, of which a page might become resident? That
 * it can be written is found out when it is. @wait: the caller is the owner, whose
 * mmap_lock he may wait for himself.
 */
static int np_part_check(struct np_region *whole, u64 addr, bool wait)
{
	const vm_flags_t never = VM_IO | VM_PFNMAP;
	struct mm_struct *mm = whole->mm;
	struct vm_area_struct *vma;
	int ret = -EFAULT;

	if (!mmget_not_zero(mm))
		return ret;
	if (wait)
		ret = mmap_read_lock_killable(mm);
	else
		ret = mmap_read_trylock(mm) ? 0 : -EAGAIN;
	if (!ret) {
		vma = vma_lookup(mm, addr);
		if (!vma || !(vma->vm_flags & VM_READ) || vma->vm_flags & never)
			ret = -EFAULT;
		mmap_read_unlock(mm);
	}
	/* The last user's would close files, which may wait for us */
	mmput_async(mm);
	return ret;
}

/* A new one; its reference is that of np_parts.all. @own: no peer asks for it */
static struct np_region *np_part_make(struct np_region *whole, unsigned long start,
				      size_t length, bool own)
{
	struct np_charge charge;
	struct np_region *part;

	lockdep_assert_held(&whole->parts->lock);
	if (whole->parts->closed)
		return ERR_PTR(-ENXIO);
	np_region_charge(whole, &charge);
	part = np_region_create_part(whole, start, length, own);
	np_region_uncharge(&charge);
	if (!IS_ERR(part))
		list_add_tail(&part->part_node, &whole->parts->all);
	return part;
}

/* With a reference; NULL: there is none yet */
static struct np_region *np_part_find(struct np_region *whole, u64 addr)
{
	struct np_region *part;

	guard(mutex)(&whole->parts->lock);
	part = xa_load(&whole->parts->at, addr >> NP_PART_SHIFT);
	if (part)
		np_region_get(part);
	return part;
}

static struct np_region *np_part_get_or_make(struct np_region *whole, u64 addr, bool wait)
{
	struct np_parts *parts = whole->parts;
	unsigned long index = addr >> NP_PART_SHIFT;
	struct np_region *part = np_part_find(whole, addr);
	struct np_charge charge;
	int ret;

	if (part)
		return part;
	/* A peer would be told nothing of it */
	if (!wait && !(whole->access & NP_ACCESS_REMOTE))
		return ERR_PTR(-EPERM);
	ret = np_part_check(whole, addr, wait);
	if (ret)
		return ERR_PTR(ret);

	guard(mutex)(&parts->lock);
	part = xa_load(&parts->at, index);
	if (!part) {
		/* A place, so that what is made cannot fail to be found */
		np_region_charge(whole, &charge);
		ret = xa_reserve(&parts->at, index, GFP_KERNEL_ACCOUNT);
		np_region_uncharge(&charge);
		if (ret)
			return ERR_PTR(ret);
		part = np_part_make(whole, index << NP_PART_SHIFT, NP_PART_SIZE, wait);
		if (IS_ERR(part)) {
			xa_release(&parts->at, index);
			return part;
		}
		xa_store(&parts->at, index, part, GFP_KERNEL);
	}
	np_region_get(part);
	return part;
}

/**
 * np_region_at() - what serves an address of a region
 * @region: region
 * @addr: in the space of the application's remote addresses; of a region that is not of the
 *	whole address space any
 *
 * Context: process context; does not wait for the owner.
 * Return: @region or a part of it, with a reference; -EPERM: it has no remote rights; -EFAULT:
 * the owner has no memory there;
 * -ENXIO: the region is gone; -EAGAIN: the owner keeps his address space locked; -EBUSY: he
 * has too many parts; -ENOSPC, -ENOMEM, or what the IOMMU said.
 */
struct np_region *np_region_at(struct np_region *region, u64 addr)
{
	if (region->parts)
		return np_part_get_or_make(region, addr, false);
	np_region_get(region);
	return region;
}
EXPORT_SYMBOL_GPL(np_region_at);

/**
 * np_part_get() - np_region_at() for the owner
 * @region: region
 * @addr: likewise
 *
 * Context: process context, without mmap lock; the caller may wait for the owner.
 * Return: likewise; -EINTR and not -EAGAIN.
 */
struct np_region *np_part_get(struct np_region *region, u64 addr)
{
	if (region->parts)
		return np_part_get_or_make(region, addr, true);
	np_region_get(region);
	return region;
}

/**
 * np_part_of_hold() - what one hold of the owner's is to be of
 * @region: region
 * @addr: first address, in the space of the application's remote addresses
 * @len: bytes
 *
 * Context: process context, without mmap lock; the caller is the owner.
 * A part is made before it is known whether the caller may lock so much, and with np_parts.lock,
 * for which peers wait. So it is no longer than a work request's buffer can be.
 *
 * Return: as np_part_get(), or a part for this hold; in any case np_part_end() follows.
 * -ERANGE: the range is empty, wraps, is no user space, or is in two parts and longer than any
 * buffer.
 */
struct np_region *np_part_of_hold(struct np_region *region, u64 addr, u64 len)
{
	u64 first = ALIGN_DOWN(addr, PAGE_SIZE), last;
	struct np_region *part;
	int ret;

	if (!region->parts)
		return np_part_get(region, addr);
	if (!len || check_add_overflow(addr, len - 1, &last) || last >= TASK_SIZE)
		return ERR_PTR(-ERANGE);
	if (addr >> NP_PART_SHIFT == last >> NP_PART_SHIFT)
		return np_part_get(region, addr);
	/* ib_sge.length */
	if (len > U32_MAX)
		return ERR_PTR(-ERANGE);

	ret = np_part_check(region, addr, true);
	if (ret)
		return ERR_PTR(ret);
	guard(mutex)(&region->parts->lock);
	part = np_part_make(region, first, PAGE_ALIGN(last + 1) - first, true);
	if (!IS_ERR(part)) {
		part->of_hold = true;
		np_region_get(part);
	}
	return part;
}
EXPORT_SYMBOL_IF_KUNIT(np_part_of_hold);

/**
 * np_part_end() - the hold that np_part_of_hold() was for has ended
 * @part: what that returned
 *
 * A part that was made for it is closed, unless the end of the whole is just doing that.
 *
 * Of no other part np_parts.lock is taken: who makes one may wait, with that lock, for memory
 * that leases pin, and it is their end that comes here.
 *
 * Context: process context.
 */
void np_part_end(struct np_region *part)
{
	bool ends = false;

	if (part->of_hold) {
		struct np_parts *parts = part->whole->parts;

		guard(mutex)(&parts->lock);
		ends = !parts->closed;
		if (ends)
			list_del_init(&part->part_node);
	}
	if (ends) {
		np_region_close_by(part, jiffies);
		np_region_put(part);
	}
	np_region_put(part);
}

/**
 * np_parts_end() - the end of all parts of a region
 * @region: region of the whole address space, without a public MR
 * @deadline: of np_leases_deadline(), for the leases of all of them together
 *
 * Context: process context.
 */
void np_parts_end(struct np_region *region, unsigned long deadline)
{
	struct np_parts *parts = region->parts;
	struct np_region *part;

	scoped_guard(mutex, &parts->lock) {
		parts->closed = true;
		list_for_each_entry(part, &parts->all, part_node) {
			np_region_ends(part);
			np_leases_recall(part);
		}
		/* Nobody looks for one any more; the list has their references */
		xa_destroy(&parts->at);
	}
	for (;;) {
		scoped_guard(mutex, &parts->lock) {
			part = list_first_entry_or_null(&parts->all, struct np_region,
							part_node);
			if (part)
				list_del_init(&part->part_node);
		}
		if (!part)
			return;
		np_region_close_by(part, deadline);
		np_region_put(part);
		cond_resched();
	}
}
