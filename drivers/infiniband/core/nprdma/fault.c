// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: faults, by which pages become resident.
 *
 * What may wait or allocate is done without np_chunk.lock: memory is looked at, which
 * brings it, pages are pinned for a hold, leaves are split.  What was found out that way
 * is checked under the lock, against the notifier's sequence and np_slot.merges, and if
 * it is out of date the fault looks again, until a deadline.  Memory may be taken away as
 * fast as it can be brought: then the fault soon asks for fewer pages at once, at last for
 * one as the owner's CPU would, and keeps what it has got.  In which order words and leaves
 * change is said in slot.c.
 *
 * Where nothing has to be waited for, or allocated, a fault of a few pages needs no process
 * of its own: see np_region_fault_at_once().
 */
#include <kunit/static_stub.h>
#include <kunit/visibility.h>
#include <linux/cpuset.h>
#include <linux/delay.h>
#include <linux/hmm.h>
#include <linux/hugetlb_inline.h>
#include <linux/memcontrol.h>
#include <linux/mempolicy.h>
#include <linux/memremap.h>
#include <linux/pagemap.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/sched/task.h>
#include <linux/secretmem.h>
#include <linux/slab.h>
#include <linux/timer.h>
#include <linux/userfaultfd_k.h>

#include "np_region.h"
#include "trace.h"

/* After this long a fault is not tried again, and the peer hears "busy" */
#define NP_FAULT_DEADLINE	msecs_to_jiffies(1000)

/* After this long it tries with fewer pages at once */
#define NP_FAULT_PATIENCE	msecs_to_jiffies(100)

/* For so long it waits for who serves the owner's userfaultfd */
#define NP_MONITOR_DEADLINE	msecs_to_jiffies(1000)

/* Who waits for a hold to end looks again after this long, doubled each time */
#define NP_FAULT_MIN_PAUSE	32
#define NP_FAULT_MAX_PAUSE	8192	/* us */

/**
 * struct np_fault - a fault of a range in one slot
 * @region: region
 * @chunk: chunk
 * @slot: slot
 * @mm: of the owner, with a user
 * @memcg: of @mm, which is charged meanwhile
 * @other_memcg: what was charged before
 * @policy: of the owner's memory
 * @va: of the first page
 * @first: number of the first page in the slot
 * @npages: number of pages
 * @asked: of these, with NP_FAULT_PRESENT: the first one that has to be there
 * @nr_asked: and so many from there on
 * @most: at once, as memory changes too fast for more
 * @flags: NP_FAULT_*
 * @hold: or NULL
 * @pin: pages pinned for @hold, not yet on it
 * @no_memory: said the last attempt to pin
 * @changed: said the last attempt: what it saw
 * @must_wait: said the last attempt: for somebody's hold
 * @split_write: the write window's slot was split
 * @huge: what the CPU maps with one entry becomes one leaf
 * @touched: all of it was there when it was touched, and yet it was refused
 * @pfns: for HMM
 * @read: what the read window shall map to
 * @write: what the write window shall map to
 */
struct np_fault {
	struct np_region *region;
	struct np_chunk *chunk;
	struct np_slot *slot;
	struct mm_struct *mm;
	struct mem_cgroup *memcg;
	struct mem_cgroup *other_memcg;
	struct mempolicy policy;
	unsigned long va;
	unsigned int first;
	unsigned int npages;
	unsigned int asked;
	unsigned int nr_asked;
	unsigned int most;
	unsigned int flags;
	struct np_hold *hold;
	struct np_pin *pin;
	bool no_memory;
	bool changed;
	bool must_wait;
	bool split_write;
	bool huge;
	bool touched;
	unsigned long *pfns;
	phys_addr_t *read;
	phys_addr_t *write;
};

/* What allocates, and may be needed anew in each attempt */
static int np_slot_prepare(struct np_fault *f)
{
	struct np_region *region = f->region;
	struct np_slot *slot = f->slot;
	int ret;

	guard(rwsem_read)(&region->window_sem);
	if (READ_ONCE(region->closed))
		return -ENXIO;
	f->split_write = np_window_exists(&region->write) &&
			 (f->flags & RDMA_NP_FAULT_WRITE || READ_ONCE(slot->huge));
	if (f->split_write) {
		ret = np_window_split(&region->write, f->va);
		if (ret)
			return ret;
	}
	return np_window_split(&region->read, f->va);
}

/*
 * What may be mapped for a device as long as the notifier is silent. ZONE_DEVICE
 * holds much that is not memory, or not ours to give; DAX is ordinary.
 */
static bool np_page_is_memory(unsigned long pfn)
{
	struct page *page;

	if (!pfn_valid(pfn))
		return false;
	page = pfn_to_page(pfn);
	if (!is_zone_device_page(page))
		return true;
	return page->pgmap->type == MEMORY_DEVICE_FS_DAX;
}

/*
 * Step 0. Under the lock and with a valid sequence the page is in the owner's page
 * table, writable, so nobody truncates it now. Marking a page of a file system
 * dirty may allocate, though: false says that it must be done outside the lock
 * first. Then it stays dirty, because cleaning it takes the write permission of the
 * mapping away, and that invalidates.
 */
static bool np_page_make_dirty(struct page *page)
{
	struct folio *folio = page_folio(page);
	struct address_space *mapping;

	if (folio_test_dirty(folio))
		return true;
	if (folio_test_anon(folio)) {
		folio_set_dirty(folio);
		return true;
	}
	mapping = folio_mapping(folio);
	if (mapping && mapping->a_ops->dirty_folio != noop_dirty_folio)
		return false;
	folio_mark_dirty(folio);
	return true;
}

/*
 * HMM says -EFAULT whatever went wrong. Want of memory is not the end, though: the
 * owner's CPU tries again for as long as it takes. Without dropping the lock, as in
 * np_pin_pages().
 */
static int np_fault_why(const struct np_fault *f)
{
	bool write = f->flags & RDMA_NP_FAULT_WRITE;
	struct vm_area_struct *vma;
	struct page *page;
	unsigned long va;
	unsigned int i;
	long ret;

	mmap_assert_locked(f->mm);
	for (i = 0; i < f->npages; i++) {
		if (!f->hold && !np_slot_lacks(f->slot, f->first + i, write))
			continue;
		va = f->va + ((unsigned long)i << PAGE_SHIFT);
		vma = vma_lookup(f->mm, va);
		/* Of what may be written only, HMM wants nothing to do with */
		if (!vma || !(vma->vm_flags & VM_READ))
			return -EFAULT;
		ret = get_user_pages_remote(f->mm, va, 1, write ? FOLL_WRITE : 0,
					    &page, NULL);
		if (ret != 1)
			return ret == -ENOMEM ? -ENOMEM : -EFAULT;
		put_page(page);
	}
	/* There is memory now */
	return -EBUSY;
}

/**
 * struct np_waker - ends a sleep that has no bound
 * @timer: fires when it is time, and again until it is deleted
 * @task: who sleeps
 */
struct np_waker {
	struct timer_list timer;
	struct task_struct *task;
};

static void np_waker_fires(struct timer_list *timer)
{
	struct np_waker *waker = from_timer(waker, timer, timer);

	wake_up_process(waker->task);
	/* It may just be about to sleep */
	mod_timer(timer, jiffies + msecs_to_jiffies(10));
}

static bool np_fault_has_monitor(const struct np_fault *f)
{
	unsigned long end = f->va + ((unsigned long)f->npages << PAGE_SHIFT);
	struct vm_area_struct *vma;
	struct vma_iterator vmi;
	bool has = false;

	mmap_read_lock(f->mm);
	vma_iter_init(&vmi, f->mm, f->va);
	for_each_vma_range(vmi, vma, end)
		has |= userfaultfd_armed(vma);
	mmap_read_unlock(f->mm);
	return has;
}

/* As the owner's CPU would fault it. 0: it is there; -EBUSY: look again */
static int np_fault_touch(const struct np_fault *f, unsigned long va)
{
	unsigned int flags = FAULT_FLAG_REMOTE | FAULT_FLAG_ALLOW_RETRY |
			     FAULT_FLAG_KILLABLE;
	vm_flags_t need = VM_READ;
	struct vm_area_struct *vma;
	vm_fault_t fault;

	if (f->flags & RDMA_NP_FAULT_WRITE) {
		flags |= FAULT_FLAG_WRITE;
		need |= VM_WRITE;
	}
	mmap_read_lock(f->mm);
	vma = vma_lookup(f->mm, va);
	if (!vma || (vma->vm_flags & need) != need)
		fault = VM_FAULT_SIGSEGV;
	else if (userfaultfd_armed(vma))
		fault = handle_mm_fault(vma, va, flags, NULL);
	else
		fault = 0;
	/* The lock was dropped */
	if (fault & VM_FAULT_RETRY)
		return -EBUSY;
	if (fault & VM_FAULT_COMPLETED)
		return 0;
	mmap_read_unlock(f->mm);
	return fault & VM_FAULT_ERROR ? vm_fault_to_errno(fault, 0) : 0;
}

/*
 * HMM and pinning keep the mmap lock, and so do not wait for the monitor of a
 * userfaultfd, who brings missing pages and lifts write protection. He may never do it,
 * so a timer wakes us; what he has brought by then stays, and the peer asks again.
 * Meanwhile a worker of the owner sleeps, and no other's.
 *
 * Return: -EBUSY: he has been asked, look again; -EAGAIN: he takes too long; -EFAULT:
 * it was not he who was missing.
 */
static int np_fault_ask_monitor(struct np_fault *f)
{
	unsigned long end = f->va + ((unsigned long)f->npages << PAGE_SHIFT);
	unsigned long deadline = jiffies + NP_MONITOR_DEADLINE;
	struct np_waker waker = { .task = current };
	unsigned long va = f->va;
	int ret = -EFAULT, err;

	if (f->flags & NP_FAULT_PRESENT || !np_fault_has_monitor(f))
		return -EFAULT;
	timer_setup_on_stack(&waker.timer, np_waker_fires, 0);
	mod_timer(&waker.timer, deadline);
	while (va < end) {
		err = np_fault_touch(f, va);
		if (!err) {
			va += PAGE_SIZE;
			continue;
		}
		ret = err;
		if (err != -EBUSY)
			break;
		if (fatal_signal_pending(current))
			ret = -EINTR;
		else if (time_after_eq(jiffies, deadline))
			ret = -EAGAIN;
		if (ret != -EBUSY)
			break;
	}
	timer_delete_sync(&waker.timer);
	destroy_timer_on_stack(&waker.timer);
	/*
	 * Nobody had to be waited for. Then a page may have come after we looked; if that
	 * happens twice it is something else.
	 */
	if (ret == -EFAULT && va >= end && !f->touched) {
		f->touched = true;
		return -EBUSY;
	}
	return ret;
}

/*
 * What pinning refuses, and HMM does not: memory that nobody but its owner's CPU shall
 * see, and return addresses, which not even that may write.
 */
static bool np_fault_is_forbidden(const struct np_fault *f)
{
	unsigned long end = f->va + ((unsigned long)f->npages << PAGE_SHIFT);
	struct vm_area_struct *vma;
	struct vma_iterator vmi;

	mmap_assert_locked(f->mm);
	vma_iter_init(&vmi, f->mm, f->va);
	for_each_vma_range(vmi, vma, end)
		if (vma_is_secretmem(vma) ||
		    (f->flags & RDMA_NP_FAULT_WRITE && vma->vm_flags & VM_SHADOW_STACK))
			return true;
	return false;
}

/* Unit tests let memory change meanwhile */
VISIBLE_IF_KUNIT int np_hmm_range_fault(struct hmm_range *range)
{
	KUNIT_STATIC_STUB_REDIRECT(np_hmm_range_fault, range);
	return hmm_range_fault(range);
}
EXPORT_SYMBOL_IF_KUNIT(np_hmm_range_fault);

static struct hmm_range np_fault_range(const struct np_fault *f, unsigned long seq)
{
	return (struct hmm_range){
		.notifier = &f->chunk->notifier,
		.notifier_seq = seq,
		.start = f->va,
		.end = f->va + ((unsigned long)f->npages << PAGE_SHIFT),
		.hmm_pfns = f->pfns,
		.pfn_flags_mask = HMM_PFN_REQ_FAULT | HMM_PFN_REQ_WRITE,
	};
}

/*
 * Ask the CPU's page tables, faulting what is asked for and not there. Pages that
 * the peers have already are not asked for, except for a hold, which needs to know
 * that what it has pinned is what is there.
 */
static int np_fault_look(struct np_fault *f, unsigned long seq)
{
	bool write = f->flags & RDMA_NP_FAULT_WRITE;
	struct hmm_range range = np_fault_range(f, seq);
	unsigned long want = HMM_PFN_REQ_FAULT;
	unsigned int i;
	int ret;

	if (write)
		want |= HMM_PFN_REQ_WRITE;
	if (f->flags & NP_FAULT_PRESENT)
		want = 0;
	for (i = 0; i < f->npages; i++)
		f->pfns[i] = f->hold || np_slot_lacks(f->slot, f->first + i,
						      write) ? want : 0;

	mmap_read_lock(f->mm);
	if (!np_fault_is_forbidden(f)) {
		ret = np_hmm_range_fault(&range);
	} else if (want) {
		ret = -EFAULT;
	} else {
		/* As HMM does with a hole: there is nothing to be had of these pages */
		memset(f->pfns, 0, f->npages * sizeof(*f->pfns));
		ret = 0;
	}
	if (ret == -EFAULT && want)
		ret = np_fault_why(f);
	mmap_read_unlock(f->mm);
	return ret;
}

/* The first page of the slot, as HMM sees it */
static unsigned long np_fault_slot_pfn(const struct np_fault *f)
{
	return (f->pfns[0] & ~HMM_PFN_FLAGS) - f->first;
}

/*
 * Does one entry of the CPU's page table map the whole slot, and may one leaf do so,
 * too? Not under a hold of a part, which keeps pages where an invalidation takes others.
 */
static bool np_fault_is_huge(const struct np_fault *f)
{
	unsigned long want = HMM_PFN_VALID |
			     (f->flags & RDMA_NP_FAULT_WRITE ? HMM_PFN_WRITE : 0);
	unsigned long va = ALIGN_DOWN(f->va, NP_SLOT_SIZE);
	struct np_region *region = f->region;
	unsigned long pfn = np_fault_slot_pfn(f);
	unsigned int i;

	if (f->hold && f->npages < NP_SLOT_PAGES)
		return false;
	/* There may be holds of parts, unless one leaf is what they hold */
	if (READ_ONCE(f->slot->held) && !READ_ONCE(f->slot->huge))
		return false;
	/* The notifier speaks of the region's pages only */
	if (va < (region->start & PAGE_MASK) ||
	    va + NP_SLOT_SIZE > PAGE_ALIGN(region->start + region->length) ||
	    !IS_ALIGNED(pfn, NP_SLOT_PAGES))
		return false;
	for (i = 0; i < f->npages; i++)
		if ((f->pfns[i] & want) != want ||
		    (f->pfns[i] & ~HMM_PFN_FLAGS) != pfn + f->first + i ||
		    hmm_pfn_to_map_order(f->pfns[i]) < NP_SLOT_ORDER)
			return false;
	return true;
}

/* May a page be left as it is? */
static bool np_fault_is_optional(const struct np_fault *f, unsigned int i)
{
	return f->flags & NP_FAULT_PRESENT && i - f->asked >= f->nr_asked;
}

/* A neighbour that shall become resident when a peer asks for it, and not before */
static bool np_fault_is_uncalled(const struct np_fault *f, unsigned long va,
				 unsigned int npages)
{
	return f->flags & NP_FAULT_AROUND &&
	       np_aging_is_asked(f->region, va, npages);
}

/* Has a page as many holds as can be counted? Then who wants one more waits */
static bool np_fault_is_one_too_many(const struct np_fault *f, unsigned int i)
{
	lockdep_assert_held(&f->chunk->lock);
	return f->pin && np_slot_is_held(f->slot, f->first + i) &&
	       f->slot->holds->count[f->first + i] == U16_MAX;
}

/* Do holds keep a leaf of the page that says something else than @pfn? */
static bool np_fault_must_wait(struct np_fault *f, unsigned int i,
			       unsigned long pfn)
{
	struct np_slot_holds *holds = f->slot->holds;
	struct np_window *win = &f->region->read;

	lockdep_assert_held(&f->chunk->lock);
	if (!np_slot_is_held(f->slot, f->first + i))
		return false;
	if (!test_bit(f->first + i, holds->stale_read) &&
	    !test_bit(f->first + i, holds->stale_write))
		return false;
	return iommu_iova_to_phys(win->domain,
				  np_window_iova(win, f->va) +
				  (i << PAGE_SHIFT)) != PFN_PHYS(pfn);
}

/*
 * Under the lock and with a valid sequence: what shall the leaves say? Returns 1 if
 * there is something to do, 0 if not, or an error.
 */
static int np_fault_plan(struct np_fault *f, struct page **undirty)
{
	bool write = f->flags & RDMA_NP_FAULT_WRITE;
	bool work = false, optional;
	unsigned int i;

	lockdep_assert_held(&f->chunk->lock);
	for (i = 0; i < f->npages; i++) {
		unsigned long pfn = f->pfns[i] & ~HMM_PFN_FLAGS;
		bool ok = f->pfns[i] & HMM_PFN_VALID &&
			  (!write || f->pfns[i] & HMM_PFN_WRITE);
		u64 word = np_slot_word(f->slot, f->first + i);

		f->read[i] = IOMMU_LEAF_KEEP;
		f->write[i] = IOMMU_LEAF_KEEP;
		/* A hold comes with the pages that HMM sees now, or is made anew */
		if (f->pin && (!ok || pfn_to_page(pfn) != f->pin->pages[i])) {
			f->changed = true;
			return -EBUSY;
		}
		/* Most holds are of pages that are resident, and there is no more to do */
		if (np_fault_is_one_too_many(f, i)) {
			f->must_wait = true;
			return -EBUSY;
		}
		if (!np_slot_lacks(f->slot, f->first + i, write))
			continue;
		optional = np_fault_is_optional(f, i);
		if (!ok && optional)
			continue;
		if (optional && np_fault_is_uncalled(f, f->va + (i << PAGE_SHIFT), 1))
			continue;
		if (!ok)
			return -EBUSY;
		if (np_fault_must_wait(f, i, pfn)) {
			if (optional && !f->pin)
				continue;
			f->must_wait = true;
			return -EBUSY;
		}
		if (!np_page_is_memory(pfn))
			return -EFAULT;
		if (!(word & RDMA_NP_WORD_READABLE))
			f->read[i] = PFN_PHYS(pfn);
		if (write) {
			f->write[i] = PFN_PHYS(pfn);
			if (!np_page_make_dirty(pfn_to_page(pfn))) {
				*undirty = pfn_to_page(pfn);
				get_page(*undirty);
				return -EBUSY;
			}
		}
		work = true;
	}
	return work;
}

/* Likewise, if one leaf shall map the slot */
static int np_fault_plan_huge(struct np_fault *f, struct page **undirty)
{
	bool write = f->flags & RDMA_NP_FAULT_WRITE;
	unsigned long pfn = np_fault_slot_pfn(f);
	struct page *page;
	unsigned int i;

	lockdep_assert_held(&f->chunk->lock);
	if (f->slot->held && !f->slot->huge)
		return -EBUSY;
	if (f->pin) {
		/* As in np_fault_plan() */
		for (i = 0; i < NP_SLOT_PAGES; i++)
			if (pfn_to_page(pfn + i) != f->pin->pages[i]) {
				f->changed = true;
				return -EBUSY;
			}
		f->must_wait = np_fault_is_one_too_many(f, 0);
		if (f->must_wait)
			return -EBUSY;
	} else if (np_fault_is_uncalled(f, np_slot_va(f->chunk, f->slot), NP_SLOT_PAGES)) {
		return 0;
	}
	for (i = 0; i < f->npages; i++)
		if (np_slot_lacks(f->slot, f->first + i, write))
			break;
	/* What is held for long is worth one leaf, although all of it is resident */
	if (i == f->npages && (!f->pin || f->slot->huge))
		return 0;
	/* All of it is stale, or none */
	f->must_wait = np_fault_must_wait(f, 0, pfn + f->first);
	if (f->must_wait)
		return -EBUSY;
	if (!np_page_is_memory(pfn))
		return -EFAULT;
	page = pfn_to_page(pfn);
	if (write && !np_page_make_dirty(page)) {
		*undirty = page;
		get_page(page);
		return -EBUSY;
	}
	return 1;
}

/* Is there an entry that is not IOMMU_LEAF_KEEP? */
static bool np_paddrs_any(const phys_addr_t *paddrs, unsigned int npages)
{
	unsigned int i;

	for (i = 0; i < npages; i++)
		if (paddrs[i] != IOMMU_LEAF_KEEP)
			return true;
	return false;
}

/* Steps 1 to 3, under the lock */
static int np_fault_map(struct np_fault *f)
{
	unsigned int resident = f->slot->resident, writable = f->slot->writable;
	struct np_slot_holds *holds = f->slot->holds;
	struct np_region *region = f->region;
	struct iommu_inval inval;
	unsigned int i, in = 0;
	int ret = 0;

	lockdep_assert_held(&f->chunk->lock);
	iommu_inval_init(&inval);
	if (np_paddrs_any(f->write, f->npages))
		ret = np_window_pages(&region->write, f->va, f->npages,
				      f->write, &inval);
	if (!ret && np_paddrs_any(f->read, f->npages))
		ret = np_window_pages(&region->read, f->va, f->npages, f->read,
				      &inval);
	if (ret)
		np_slot_absent(f->chunk, f->slot, f->first,
			       f->first + f->npages, NP_ABSENT_UNDO, &inval);
	iommu_inval_sync(region->read.domain, &inval);
	if (ret)
		return ret;

	/*
	 * 3 after 2: a peer that reads the word reaches the page. Pairs with the
	 * peer, which posts its WRITE after it has read the word.
	 */
	dma_wmb();
	for (i = 0; i < f->npages; i++) {
		u64 rights = RDMA_NP_WORD_READABLE;

		if (f->read[i] == IOMMU_LEAF_KEEP &&
		    f->write[i] == IOMMU_LEAF_KEEP)
			continue;
		if (f->write[i] != IOMMU_LEAF_KEEP)
			rights |= RDMA_NP_WORD_WRITABLE;
		if (holds) {
			__clear_bit(f->first + i, holds->stale_read);
			if (rights & RDMA_NP_WORD_WRITABLE)
				__clear_bit(f->first + i, holds->stale_write);
		}
		/* Before peers can see it: their next use leaves no trace */
		np_aging_use(region, f->va + (i << PAGE_SHIFT), 1);
		np_slot_word_set(f->chunk, f->slot, f->first + i, rights);
		in++;
	}
	np_slot_count(f->chunk, f->slot, resident, writable);
	trace_np_residency(region->id, region->public_rkey, f->va, in,
			   f->flags & RDMA_NP_FAULT_WRITE ? NP_WORD_RIGHTS :
						       RDMA_NP_WORD_READABLE);
	return in;
}

/* Steps 1 to 3 with one leaf for 512 pages */
static int np_fault_map_huge(struct np_fault *f)
{
	u64 rights = RDMA_NP_WORD_READABLE |
		     (f->flags & RDMA_NP_FAULT_WRITE ? RDMA_NP_WORD_WRITABLE : 0);
	phys_addr_t paddr = PFN_PHYS(np_fault_slot_pfn(f));
	unsigned long va = np_slot_va(f->chunk, f->slot);
	struct np_region *region = f->region;
	struct np_slot *slot = f->slot;
	unsigned int resident = slot->resident, writable = slot->writable;
	struct iommu_inval inval;
	unsigned int i, in = 0;
	int ret = 0;

	lockdep_assert_held(&f->chunk->lock);
	np_slot_set_huge(f->chunk, slot, true);
	iommu_inval_init(&inval);
	if (rights & RDMA_NP_WORD_WRITABLE)
		ret = np_window_merge(&region->write, va, paddr, &inval);
	if (!ret)
		ret = np_window_merge(&region->read, va, paddr, &inval);
	/*
	 * Whatever happened, a table that a fault has made for itself may be gone. Not
	 * earlier: who looks at the count before he splits would find tables that go.
	 */
	np_slot_merged(f->chunk, slot);
	if (ret)
		np_slot_absent(f->chunk, slot, 0, NP_SLOT_PAGES, NP_ABSENT_UNDO,
			       &inval);
	iommu_inval_sync(region->read.domain, &inval);
	if (ret)
		return ret;

	if (slot->holds) {
		bitmap_zero(slot->holds->stale_read, NP_SLOT_PAGES);
		if (rights & RDMA_NP_WORD_WRITABLE)
			bitmap_zero(slot->holds->stale_write, NP_SLOT_PAGES);
	}
	/* Reclaim asks about all of it at once */
	np_aging_use(region, f->va, f->npages);
	/* 3 after 2, as in np_fault_map() */
	dma_wmb();
	for (i = 0; i < NP_SLOT_PAGES; i++) {
		u64 has = np_slot_word(slot, i) & NP_WORD_RIGHTS;

		if ((has & rights) == rights)
			continue;
		np_slot_word_set(f->chunk, slot, i, has | rights);
		in++;
	}
	np_slot_count(f->chunk, slot, resident, writable);
	trace_np_residency(region->id, region->public_rkey, va, in, rights);
	return in;
}

/* Do the page tables have all of it, for what is wanted? A hint */
static bool np_fault_is_present(struct np_fault *f)
{
	unsigned long want = HMM_PFN_VALID |
			     (f->flags & RDMA_NP_FAULT_WRITE ? HMM_PFN_WRITE : 0);
	unsigned int i;

	if (np_fault_look(f, mmu_interval_read_begin(&f->chunk->notifier)))
		return false;
	for (i = 0; i < f->npages; i++)
		if ((f->pfns[i] & want) != want)
			return false;
	return true;
}

/*
 * Pages that are to be held are pinned before we look, because nothing but the pin
 * makes them stay while we do: however hard memory is pressed, the next round
 * finds them.
 *
 * Pages that must not be pinned where they are have to move first, and if somebody
 * else has one in his hands just then, that is -ENOMEM, too.  Most likely he wants to
 * pin it as well, so the second time nobody else pins anything of the region.
 */
static int np_fault_pin(struct np_fault *f)
{
	struct rw_semaphore *lock = &f->region->pin_lock;
	bool wait = !(f->flags & NP_FAULT_PRESENT);
	struct np_pin *pin;
	int ret;

	pin = kvzalloc(struct_size(pin, pages, f->npages), GFP_KERNEL_ACCOUNT);
	if (!pin)
		return -ENOMEM;
	pin->va = f->va;
	pin->npages = f->npages;

	if (wait)
		ret = down_read_killable(lock);
	else
		ret = down_read_trylock(lock) ? 0 : -EAGAIN;
	if (!ret) {
		ret = np_pin_pages(f->region, f->mm, pin, f->flags);
		/* What others may write has to be copied first: so are pages of zeros */
		if (ret == -EFAULT && !wait && np_fault_is_present(f))
			ret = np_pin_pages(f->region, f->mm, pin,
					   f->flags & ~NP_FAULT_PRESENT);
		up_read(lock);
	}
	if (ret == -ENOMEM && wait) {
		ret = down_write_killable(lock);
		if (!ret) {
			ret = np_pin_pages(f->region, f->mm, pin, f->flags);
			up_write(lock);
		}
	}
	f->no_memory = ret == -ENOMEM;
	if (ret) {
		kvfree(pin);
		return f->no_memory ? -EBUSY : ret;
	}
	f->pin = pin;
	return 0;
}

/* What was pinned is not held: the fault failed, or it is not what is there any more */
static void np_fault_unpin(struct np_fault *f)
{
	if (!f->pin)
		return;
	unpin_user_pages(f->pin->pages, f->pin->npages);
	kvfree(f->pin);
	f->pin = NULL;
}

/* Memory changes faster than so many pages can be looked at */
static void np_fault_shrink(struct np_fault *f)
{
	np_fault_unpin(f);
	f->npages /= 2;
	f->most = f->npages;
}

/* Under the lock: the slot has tables and no large leaf now. False: the split was undone */
static bool np_fault_take_tables(struct np_fault *f, unsigned int merges)
{
	lockdep_assert_held(&f->chunk->lock);
	if (f->slot->merges != merges)
		return false;
	if (f->slot->huge && np_window_exists(&f->region->write) &&
	    !f->split_write)
		return false;
	np_slot_set_huge(f->chunk, f->slot, false);
	f->slot->read_split = true;
	f->slot->write_split |= f->split_write;
	return true;
}

/* One attempt. -EBUSY: memory changed meanwhile, look again */
static int np_fault_try(struct np_fault *f, u64 *words, unsigned int nr_words)
{
	struct np_slot *slot = f->slot;
	struct page *undirty = NULL;
	unsigned int merges, i;
	unsigned long seq;
	int ret;

	if (f->hold && !f->pin) {
		ret = np_fault_pin(f);
		if (ret)
			return ret;
	}
	if (f->hold && !READ_ONCE(slot->holds)) {
		ret = np_slot_make_holds(f->chunk, slot);
		if (ret)
			return ret;
	}
	seq = mmu_interval_read_begin(&f->chunk->notifier);
	ret = np_fault_look(f, seq);
	f->changed = ret == -EBUSY;
	if (ret)
		return ret;

	/* Before the split, so that a merge that undoes it is noticed */
	merges = smp_load_acquire(&slot->merges);
	f->huge = np_fault_is_huge(f);
	if (!f->huge) {
		ret = np_slot_prepare(f);
		if (ret)
			return ret;
	}

	mutex_lock(&f->chunk->lock);
	f->changed = mmu_interval_read_retry(&f->chunk->notifier, seq);
	if (f->chunk->closed)
		ret = -ENXIO;
	else if (f->changed)
		ret = -EBUSY;
	else if (f->huge)
		ret = np_fault_plan_huge(f, &undirty);
	else if (!np_fault_take_tables(f, merges))
		ret = -EBUSY;
	else
		ret = np_fault_plan(f, &undirty);
	if (ret > 0)
		ret = f->huge ? np_fault_map_huge(f) : np_fault_map(f);
	if (ret >= 0) {
		if (f->pin) {
			np_hold_add(f->hold, f->chunk, f->pin);
			f->pin = NULL;
		}
		for (i = 0; i < min(nr_words, f->npages); i++)
			words[i] = np_slot_word(slot, f->first + i);
	}
	mutex_unlock(&f->chunk->lock);

	if (undirty) {
		set_page_dirty_lock(undirty);
		put_page(undirty);
	}
	if (ret < 0)
		np_fault_unpin(f);
	return ret;
}

/*
 * Returns how many pages became resident, or had rights added. Those that @f is left
 * with are what was asked for, or, if memory changes too fast, the first of them.
 */
static int np_fault_slot(struct np_fault *f, u64 *words, unsigned int nr_words)
{
	unsigned long deadline = jiffies;
	unsigned long patience = jiffies + NP_FAULT_PATIENCE;
	unsigned int pause = NP_FAULT_MIN_PAUSE;
	bool first = true;
	int ret;

	f->no_memory = false;
	f->touched = false;
	for (;;) {
		f->must_wait = false;
		f->changed = false;
		ret = np_fault_try(f, words, nr_words);
		if (ret == -EFAULT)
			ret = np_fault_ask_monitor(f);
		if (ret != -EBUSY)
			break;
		/* More pages of a lease: all of them at once, or none */
		if (f->hold && f->flags & NP_FAULT_PRESENT) {
			ret = -EAGAIN;
			break;
		}
		atomic64_inc(&f->region->count->retries);
		if (fatal_signal_pending(current)) {
			ret = -EINTR;
			break;
		}
		/* The first look may have to wait for a disk, the next ones find it read */
		if (first)
			deadline = jiffies + NP_FAULT_DEADLINE;
		first = false;
		if (f->changed && f->npages > 1 &&
		    (f->most < NP_SLOT_PAGES || time_after(jiffies, patience))) {
			np_fault_shrink(f);
			first = true;
		} else if (time_after(jiffies, deadline)) {
			ret = f->no_memory ? -ENOMEM : -EAGAIN;
			break;
		}
		if (f->must_wait) {
			usleep_range(pause, 2 * pause);
			pause = min(2 * pause, NP_FAULT_MAX_PAUSE);
		} else {
			cond_resched();
		}
	}
	f->most = min(2 * f->most, NP_SLOT_PAGES);
	/* It was kept for the next attempt if memory changed while we looked */
	np_fault_unpin(f);
	return ret;
}

/* Is all of it there already? Then this is all that there is to do */
static bool np_fault_is_noop(struct np_fault *f, u64 *words,
			     unsigned int nr_words)
{
	struct np_chunk *chunk = np_chunk_get(f->region, f->va, NULL);
	struct np_slot *slot;
	unsigned int i;

	if (!chunk)
		return false;
	slot = np_chunk_slot(chunk, f->va);
	/* Pairs with the release in np_slot_make_words() */
	if (!smp_load_acquire(&slot->words))
		return false;
	for (i = 0; i < f->npages; i++)
		if (np_slot_lacks(slot, f->first + i,
				  f->flags & RDMA_NP_FAULT_WRITE))
			return false;
	for (i = 0; i < min(nr_words, f->npages); i++)
		words[i] = np_slot_word(slot, f->first + i);
	return true;
}

static bool np_region_has(struct np_region *region, unsigned long va, bool write)
{
	struct np_chunk *chunk = np_chunk_get(region, va, NULL);
	struct np_slot *slot;

	if (!chunk)
		return false;
	slot = np_chunk_slot(chunk, va);
	/* Pairs with the release in np_slot_make_words() */
	return smp_load_acquire(&slot->words) &&
	       !np_slot_lacks(slot, (va & (NP_SLOT_SIZE - 1)) >> PAGE_SHIFT, write);
}

/**
 * np_region_around() - how far are the pages around a range resident, too?
 * @region: region
 * @flags: RDMA_NP_FAULT_WRITE: writable
 * @range: a range of the region, in the space of the application's remote addresses; grows to
 *	its whole pages
 * @all: set to that and the pages around it
 * @most: not beyond this, which contains it
 *
 * A hint: pages come and go.
 *
 * Context: process context.
 * Return: true if @all is of one slot: then all of it is held at once, or nothing.
 */
bool np_region_around(struct np_region *region, unsigned int flags,
		      struct rdma_np_range *range, struct rdma_np_range *all,
		      const struct rdma_np_range *most)
{
	u64 start = max(most->addr, region->base);
	u64 last = min(most->addr + (most->length - 1),
		       region->base + (region->length - 1));
	u64 first = range->addr, end = range->addr + (range->length - 1);
	/* From a remote address to that of the owner */
	u64 to_va = region->start - region->base;
	u64 next;

	first -= min_t(u64, offset_in_page(first + to_va), first - start);
	end += min_t(u64, PAGE_SIZE - 1 - offset_in_page(end + to_va), last - end);
	range->addr = first;
	range->length = end - first + 1;
	*all = *range;
	if (!np_region_enter(region))
		return false;
	while (first > start) {
		/* The last byte of the page before */
		next = first - 1;
		if (!np_region_has(region, next + to_va, flags & RDMA_NP_FAULT_WRITE))
			break;
		first -= min_t(u64, PAGE_SIZE, first - start);
	}
	while (end < last) {
		/* The first byte of the page behind */
		next = end + 1;
		if (!np_region_has(region, next + to_va, flags & RDMA_NP_FAULT_WRITE))
			break;
		end += min_t(u64, PAGE_SIZE, last - end);
	}
	np_region_leave(region);
	all->addr = first;
	all->length = end - first + 1;
	return (first + to_va) >> NP_SLOT_SHIFT == (end + to_va) >> NP_SLOT_SHIFT;
}
EXPORT_SYMBOL_GPL(np_region_around);

#if defined(CONFIG_MEMCG) && defined(CONFIG_NUMA)
/*
 * A worker puts pages where its owner's own touch would: on the nodes that the memory
 * policy and the cpuset of the owner's first thread allow.  mbind() is a policy of the
 * mapping, and needs no help.  The policy is copied, because cpusets change policies
 * in place, under the lock of their thread.
 */
static void np_fault_adopt_policy(struct np_fault *f)
{
	struct mempolicy *policy = NULL;
	struct task_struct *task;
	nodemask_t mems = node_states[N_MEMORY];

	rcu_read_lock();
	task = rcu_dereference(f->mm->owner);
	if (!(current->flags & PF_KTHREAD) || !task) {
		rcu_read_unlock();
		return;
	}
	task_lock(task);
	if (task->mempolicy) {
		f->policy = *task->mempolicy;
		atomic_set(&f->policy.refcnt, 1);
		policy = &f->policy;
	}
#ifdef CONFIG_CPUSETS
	mems = task->mems_allowed;
#endif
	task_unlock(task);
	rcu_read_unlock();

	task_lock(current);
	current->mempolicy = policy;
	task_unlock(current);
	set_mems_allowed(mems);
}

static void np_fault_drop_policy(struct np_fault *f)
{
	if (!(current->flags & PF_KTHREAD))
		return;
	task_lock(current);
	current->mempolicy = NULL;
	task_unlock(current);
	/* What all workers may use, as it is now: it may have changed meanwhile */
	set_mems_allowed(node_states[N_MEMORY]);
}
#else
static void np_fault_adopt_policy(struct np_fault *f)
{
}

static void np_fault_drop_policy(struct np_fault *f)
{
}
#endif

/*
 * The owner, who pays for all that his peers make the kernel do for him. We may be the
 * worker of everybody's peers, to whose group page cache, page tables and our own
 * memory would be charged.
 */
static int np_fault_get_owner(struct np_fault *f)
{
	if (f->mm)
		return 0;
	if (!mmget_not_zero(f->region->mm))
		return -ENXIO;
	f->mm = f->region->mm;
	f->memcg = get_mem_cgroup_from_mm(f->mm);
	f->other_memcg = set_active_memcg(f->memcg);
	np_fault_adopt_policy(f);
	return 0;
}

static void np_fault_put_owner(struct np_fault *f)
{
	if (!f->mm)
		return;
	np_fault_drop_policy(f);
	set_active_memcg(f->other_memcg);
	mem_cgroup_put(f->memcg);
	/* The last user tears the address space down: not here, under a peer's request */
	mmput_async(f->mm);
}

/* What it takes when the answer is not there yet: the owner, and memory */
static int np_fault_begin(struct np_fault *f, unsigned int max_pages)
{
	void *mem;
	int ret;

	ret = np_fault_get_owner(f);
	if (ret)
		return ret;
	if (!f->read) {
		mem = kvcalloc(max_pages, 2 * sizeof(phys_addr_t) +
			       sizeof(unsigned long), GFP_KERNEL_ACCOUNT);
		if (!mem)
			return -ENOMEM;
		f->read = mem;
		f->write = f->read + max_pages;
		f->pfns = (unsigned long *)(f->write + max_pages);
	}
	f->chunk = np_chunk_get(f->region, f->va, f->mm);
	if (IS_ERR(f->chunk))
		return PTR_ERR(f->chunk);
	f->slot = np_chunk_slot(f->chunk, f->va);
	if (READ_ONCE(f->slot->words))
		return 0;
	return np_slot_make_words(f->region, f->slot, f->va);
}

/* What was resident before, too: to ask for it is the only trace of its use */
static void np_fault_is_use(struct np_fault *f)
{
	if (!(f->flags & NP_FAULT_PRESENT))
		np_aging_use(f->region, f->va, f->npages);
}

static int np_fault_pages(struct np_fault *f, unsigned int max_pages, u64 *words,
			  unsigned int nr_words)
{
	struct np_counters *count = f->region->count;
	unsigned long maj_flt = current->maj_flt;
	unsigned int major;
	int ret;

	f->first = (f->va & (NP_SLOT_SIZE - 1)) >> PAGE_SHIFT;
	if (!f->hold && np_fault_is_noop(f, words, nr_words)) {
		np_fault_is_use(f);
		atomic64_add(f->npages, &count->faults_noop);
		return 0;
	}
	ret = np_fault_begin(f, max_pages);
	if (!ret)
		ret = np_fault_slot(f, words, nr_words);
	if (ret < 0)
		return ret;
	np_fault_is_use(f);

	major = min_t(unsigned long, ret, current->maj_flt - maj_flt);
	atomic64_add(major, &count->faults_major);
	atomic64_add(ret - major, &count->faults_minor);
	/* One leaf may bring more than was asked for */
	atomic64_add(f->npages - min_t(unsigned int, ret, f->npages),
		     &count->faults_noop);
	return 0;
}

/**
 * np_region_check_range() - could np_region_fault() do that?
 * @region: region
 * @addr: first address, in the space of the application's remote addresses
 * @len: bytes
 * @flags: RDMA_NP_FAULT_WRITE, NP_FAULT_LOCAL
 *
 * Return: 0, -ERANGE, or -EPERM if the region lacks the right.
 */
int np_region_check_range(struct np_region *region, u64 addr, u64 len,
			  unsigned int flags)
{
	/* Of the whole address space nothing is resident but in its parts */
	if (region->parts || !len || addr < region->base ||
	    addr - region->base > region->length ||
	    len > region->length - (addr - region->base))
		return -ERANGE;
	if (flags & RDMA_NP_FAULT_WRITE && !np_window_exists(&region->write))
		return -EPERM;
	if (flags & NP_FAULT_LOCAL)
		return 0;
	if (!(region->access & (flags & RDMA_NP_FAULT_WRITE ? NP_ACCESS_REMOTE_CHANGE :
							 IB_ACCESS_REMOTE_READ)))
		return -EPERM;
	return 0;
}

/**
 * np_region_fault() - make pages resident
 * @region: region
 * @addr: first address, in the space of the application's remote addresses
 * @len: bytes
 * @flags: RDMA_NP_FAULT_WRITE, NP_FAULT_PRESENT, NP_FAULT_AROUND, NP_FAULT_LOCAL
 * @hold: pin the pages on it, too; or NULL
 * @words: receives the residency words of the first pages, or NULL
 * @nr_words: how many; those behind the range are left alone
 *
 * What is resident with enough rights already is left as it is, so that two peers
 * do not invalidate each other's proofs.
 *
 * If memory changes all the time the pages come in parts, and without a hold the first
 * may have gone when the last ones are there.
 *
 * Context: process context, without mmap lock.
 * Return: 0, -ERANGE outside of the region, -EPERM not with the rights of the
 * region or of the mapping, -EFAULT nothing is mapped there, or nothing that can
 * be mapped for a device, -ENXIO region or owner are gone, -ENOMEM for a hold or the
 * owner, -EAGAIN memory changed faster than we could look at one page, or a peer has
 * to wait for some, or for the monitor of a userfaultfd, -EINTR killed.
 */
int np_region_fault(struct np_region *region, u64 addr, u64 len,
		    unsigned int flags, struct np_hold *hold, u64 *words,
		    unsigned int nr_words)
{
	struct np_fault f = {
		.region = region,
		.flags = flags,
		.hold = hold,
		.most = NP_SLOT_PAGES,
	};
	unsigned int n, max_pages;
	unsigned long end;
	int ret;

	if (hold && hold->write)
		f.flags |= RDMA_NP_FAULT_WRITE;
	ret = np_region_check_range(region, addr, len, f.flags);
	if (ret)
		goto out;
	ret = -ENXIO;
	if (READ_ONCE(region->closed) || !np_region_enter(region))
		goto out;

	f.va = region->start + (addr - region->base);
	end = PAGE_ALIGN(f.va + len);
	f.va &= PAGE_MASK;
	max_pages = min(NP_SLOT_PAGES, (end - f.va) >> PAGE_SHIFT);
	while (f.va < end) {
		f.npages = min((min(end, ALIGN(f.va + 1, NP_SLOT_SIZE)) - f.va) >>
			       PAGE_SHIFT, f.most);
		ret = np_fault_pages(&f, max_pages, words, nr_words);
		if (ret)
			break;
		n = min(nr_words, f.npages);
		words += n;
		nr_words -= n;
		f.va += (unsigned long)f.npages << PAGE_SHIFT;
		if (fatal_signal_pending(current)) {
			ret = -EINTR;
			break;
		}
		/* Of what is there already, gigabytes may have been asked for */
		cond_resched();
	}
	kvfree(f.read);
	np_fault_put_owner(&f);
	np_region_leave(region);
	/*
	 * The owner's CPU would wait for memory, and so does a peer: he asks again. Not
	 * so who wants it pinned, which fails for want of memory in any region.
	 */
	if (ret == -ENOMEM && !hold && !(flags & NP_FAULT_LOCAL))
		ret = -EAGAIN;
out:
	if (ret)
		atomic64_inc(&region->count->faults_failed);
	return ret;
}
EXPORT_SYMBOL_GPL(np_region_fault);

/*
 * What takes a lock to look at, or is not to be had at all. Under the lock of hugetlb's
 * VMAs HMM would sleep.
 */
static bool np_fault_needs_process(const struct np_fault *f)
{
	unsigned long end = f->va + ((unsigned long)f->npages << PAGE_SHIFT);
	struct vm_area_struct *vma;
	struct vma_iterator vmi;

	if (np_fault_is_forbidden(f))
		return true;
	vma_iter_init(&vmi, f->mm, f->va);
	for_each_vma_range(vmi, vma, end)
		if (is_vm_hugetlb_page(vma))
			return true;
	return false;
}

/* What is there to do, with leaves that exist? As np_fault_plan(); no memory is waited for */
static int np_fault_plan_at_once(struct np_fault *f)
{
	struct page *undirty = NULL;
	struct hmm_range range;
	unsigned long seq;
	int ret;

	mmap_assert_locked(f->mm);
	lockdep_assert_held(&f->chunk->lock);
	/* Under the lock the notifier is silent, but what it told of may not be over yet */
	if (!mmu_interval_read_try_begin(&f->chunk->notifier, &seq))
		return -EBUSY;
	if (np_fault_needs_process(f))
		return -EFAULT;
	range = np_fault_range(f, seq);
	ret = np_hmm_range_fault(&range);
	if (ret)
		return ret;
	if (mmu_interval_read_retry(&f->chunk->notifier, seq))
		return -EBUSY;
	/* All of it at once is better, and takes longer */
	if (np_fault_is_huge(f))
		return -EBUSY;
	ret = np_fault_plan(f, &undirty);
	if (undirty)
		put_page(undirty);
	return ret;
}

/* How many of the pages that are asked for are not resident with the right? */
static unsigned int np_fault_lacks(const struct np_fault *f)
{
	unsigned int i, lacks = 0;

	for (i = f->asked; i < f->asked + f->nr_asked; i++)
		lacks += np_slot_lacks(f->slot, f->first + i,
				       f->flags & RDMA_NP_FAULT_WRITE);
	return lacks;
}

/* Under the lock of a chunk that is not closed. Less than 0: no word, nor leaf, has changed */
static int np_fault_make_at_once(struct np_fault *f)
{
	struct np_slot *slot = f->slot;
	int ret = -EBUSY;

	lockdep_assert_held(&f->chunk->lock);
	if (!np_fault_lacks(f))
		return 0;
	if (slot->huge || !slot->read_split ||
	    (f->flags & RDMA_NP_FAULT_WRITE && !slot->write_split))
		return -EBUSY;
	if (!mmget_not_zero(f->region->mm))
		return -ENXIO;
	f->mm = f->region->mm;
	if (mmap_read_trylock(f->mm)) {
		ret = np_fault_plan_at_once(f);
		mmap_read_unlock(f->mm);
	}
	if (ret > 0) {
		ret = np_fault_map(f);
		/* It has made pages absent: but there were leaves, by what the slot says */
		WARN_ON_ONCE(ret < 0);
	}
	mmput_async(f->mm);
	return ret;
}

/* The pages of @around in the slot of those of @range. False: too many, or in two slots */
static bool np_fault_set_ranges(struct np_fault *f, const struct rdma_np_range *range,
				const struct rdma_np_range *around)
{
	/* From a remote address to that of the owner */
	u64 to_va = f->region->start - f->region->base;
	unsigned long va = (range->addr + to_va) & PAGE_MASK;
	unsigned long last = range->addr + to_va + (range->length - 1);
	unsigned long slot_va = ALIGN_DOWN(va, NP_SLOT_SIZE);
	unsigned long end = around->addr + to_va + (around->length - 1);

	if (last - slot_va >= NP_SLOT_SIZE)
		return false;
	f->va = max((unsigned long)(around->addr + to_va) & PAGE_MASK, slot_va);
	end = min(end, slot_va + NP_SLOT_SIZE - 1);
	f->first = (f->va - slot_va) >> PAGE_SHIFT;
	f->npages = ((end - f->va) >> PAGE_SHIFT) + 1;
	f->asked = (va - f->va) >> PAGE_SHIFT;
	f->nr_asked = ((last - va) >> PAGE_SHIFT) + 1;
	return f->npages <= NP_AT_ONCE_PAGES;
}

/**
 * np_region_fault_at_once() - make pages resident, if nothing has to be waited for
 * @region: region of which the caller has a reference
 * @range: what is asked for, in the space of the application's remote addresses
 * @around: contains it; what the owner's page tables have of the rest comes along, unless
 *	all that is asked for is resident
 * @flags: RDMA_NP_FAULT_WRITE
 * @words: receives the residency words of the first pages that were asked for
 * @nr_words: how many; not more than there are
 *
 * For handlers, in which nobody may sleep: locks are taken if they are free, nothing is
 * allocated, and no more than NP_AT_ONCE_PAGES pages are looked at. Whatever takes more
 * is left to np_region_fault(): a page that is not in the owner's page tables, that the
 * file system has to be told of before it is written, or for which leaves have to be
 * split; memory that is just changing; errors.
 *
 * The region is not entered, because who leaves last sleeps. As long as the lock of a
 * chunk is held that is not closed, np_chunks_close() waits, and nothing is freed; RCU
 * keeps the chunk until its lock was given back, if it was found before it was erased.
 *
 * Context: process context, does not sleep.
 * Return: true: as if np_region_fault() had returned 0; false: nothing has changed.
 */
bool np_region_fault_at_once(struct np_region *region, const struct rdma_np_range *range,
			     const struct rdma_np_range *around, unsigned int flags,
			     u64 *words, unsigned int nr_words)
{
	struct np_counters *count = region->count;
	phys_addr_t read[NP_AT_ONCE_PAGES], write[NP_AT_ONCE_PAGES];
	unsigned long pfns[NP_AT_ONCE_PAGES] = {};
	struct np_fault f = {
		.region = region,
		.flags = flags | NP_FAULT_PRESENT | NP_FAULT_AROUND,
		.pfns = pfns,
		.read = read,
		.write = write,
	};
	unsigned int i, lacks = 0;
	int ret = -EBUSY;

	if (np_region_check_range(region, range->addr, range->length, flags) ||
	    !np_fault_set_ranges(&f, range, around))
		return false;

	guard(rcu)();
	f.chunk = np_chunk_get(region, f.va, NULL);
	if (!f.chunk || !mutex_trylock(&f.chunk->lock))
		return false;
	f.slot = np_chunk_slot(f.chunk, f.va);
	/* Pairs with the release in np_slot_make_words() */
	if (!f.chunk->closed && smp_load_acquire(&f.slot->words)) {
		lacks = np_fault_lacks(&f);
		ret = np_fault_make_at_once(&f);
	}
	if (ret >= 0) {
		np_aging_use(region, f.va + ((unsigned long)f.asked << PAGE_SHIFT), f.nr_asked);
		for (i = 0; i < nr_words; i++)
			words[i] = np_slot_word(f.slot, f.first + f.asked + i);
	}
	mutex_unlock(&f.chunk->lock);
	if (ret < 0)
		return false;

	atomic64_add(ret, &count->faults_minor);
	atomic64_add(f.nr_asked - lacks, &count->faults_noop);
	atomic64_inc(&count->faults_at_once);
	return true;
}
EXPORT_SYMBOL_GPL(np_region_fault_at_once);
