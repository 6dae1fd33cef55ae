// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: do peers use a page?  For reclaim, which takes first what nobody uses.
 *
 * A page that a device reads leaves no trace that the CPU's page tables would show.
 * So the next use of a page is made to leave one: when reclaim asks whether a page is
 * young, and a peer has asked for it since the last time, the answer is yes, and the
 * page becomes absent for peers a moment later (not for the owner).  Who uses it
 * asks for it again, which costs one minor fault; if nobody does, the next answer is
 * no.  Nothing of this happens as long as nobody reclaims memory.
 *
 * For that, no page may become resident without a trace.  So whatever does counts as
 * used, also if it only came along with what was asked for; and what reclaim has
 * asked about does not come along, because it would count as used whether it is or
 * not.
 *
 * The question comes for an address of an address space, under the lock of its page
 * table, so what is known about use belongs to the address space and is found without
 * locks.  All regions of an owner share it.
 */
#include <kunit/visibility.h>
#include <linux/bitmap.h>
#include <linux/llist.h>
#include <linux/mmu_notifier.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "np_region.h"

/*
 * 2 MiB of an address space.
 * @users: regions that have words for it; under np_aging.lock
 * @used: pages that peers have asked for, or were given, since reclaim asked
 * @asked: pages of which it knows that they were used before it asked, and not since
 * @aged: of these, those that are to become absent
 * @queued: bit 0: @node is in np_aging.todo
 */
struct np_aging_slot {
	struct llist_node node;
	struct rcu_head rcu;
	unsigned long index;
	unsigned int users;
	unsigned long queued;
	DECLARE_BITMAP(used, NP_SLOT_PAGES);
	DECLARE_BITMAP(asked, NP_SLOT_PAGES);
	DECLARE_BITMAP(aged, NP_SLOT_PAGES);
};

/*
 * An address space.  The notifier counts its users, the regions, and keeps it until
 * no callback of it runs any more.
 * @slots: struct np_aging_slot by address, freed with RCU
 * @todo: slots with aged pages
 * @lock: protects @regions, @nr_parts and changes of @slots
 * @nr_parts: parts of the whole address space, those included that are not in @regions yet
 * @has_intervals: the address space takes interval notifiers; under its mmap lock
 */
struct np_aging {
	struct mmu_notifier notifier;
	struct xarray slots;
	struct llist_head todo;
	struct work_struct work;
	struct work_struct free;
	struct mutex lock;
	struct list_head regions;
	unsigned int nr_parts;
	bool has_intervals;
};

static struct workqueue_struct *np_aging_wq;
static np_age_fn *np_aging_age;

static struct np_aging *to_np_aging(struct mmu_notifier *notifier)
{
	return container_of(notifier, struct np_aging, notifier);
}

/* Under the lock of a page table: may not sleep */
VISIBLE_IF_KUNIT bool np_aging_ask(struct np_aging *aging, unsigned long start,
				   unsigned long end, bool clear)
{
	struct np_aging_slot *slot;
	unsigned long va, next;
	bool young = false;
	unsigned int i;

	guard(rcu)();
	for (va = start; va < end; va = next) {
		next = min(end, ALIGN(va + 1, NP_SLOT_SIZE));
		slot = xa_load(&aging->slots, va >> NP_SLOT_SHIFT);
		if (!slot)
			continue;
		for (; va < next; va += PAGE_SIZE) {
			i = (va & (NP_SLOT_SIZE - 1)) >> PAGE_SHIFT;
			if (!test_bit(i, slot->used))
				continue;
			young = true;
			if (!clear || !test_and_clear_bit(i, slot->used))
				continue;
			set_bit(i, slot->asked);
			set_bit(i, slot->aged);
			if (!test_and_set_bit(0, &slot->queued) &&
			    llist_add(&slot->node, &aging->todo))
				queue_work(np_aging_wq, &aging->work);
		}
	}
	return young;
}
EXPORT_SYMBOL_IF_KUNIT(np_aging_ask);

static int np_aging_clear_flush_young(struct mmu_notifier *notifier,
				      struct mm_struct *mm, unsigned long start,
				      unsigned long end)
{
	return np_aging_ask(to_np_aging(notifier), start, end, true);
}

static int np_aging_clear_young(struct mmu_notifier *notifier,
				struct mm_struct *mm, unsigned long start,
				unsigned long end)
{
	return np_aging_ask(to_np_aging(notifier), start, end, true);
}

static int np_aging_test_young(struct mmu_notifier *notifier,
			       struct mm_struct *mm, unsigned long addr)
{
	return np_aging_ask(to_np_aging(notifier), addr, addr + PAGE_SIZE,
			    false);
}

/* Of a slot that was queued, and is in no list any more */
static void np_aging_age_slot(struct np_aging *aging, struct np_aging_slot *slot)
{
	DECLARE_BITMAP(pages, NP_SLOT_PAGES);
	struct np_region *region;
	unsigned int i;

	guard(mutex)(&aging->lock);
	/* It stays queued, so that nobody queues it any more */
	if (!slot->users) {
		kfree_rcu(slot, rcu);
		return;
	}
	/*
	 * Whoever ages a page from now on queues the slot again; all before
	 * is seen below.  Pairs with test_and_set_bit() in np_aging_ask().
	 */
	clear_bit(0, &slot->queued);
	/* See above */
	smp_mb__after_atomic();
	for (i = 0; i < BITS_TO_LONGS(NP_SLOT_PAGES); i++)
		pages[i] = xchg(&slot->aged[i], 0);
	list_for_each_entry(region, &aging->regions, aging_node)
		np_aging_age(region, slot->index << NP_SLOT_SHIFT, pages);
}

/*
 * An owner may have thousands of regions, the parts of his address space, and reclaim may ask
 * about as many slots at once. So others come in between: faults, for words, and regions.
 */
static void np_aging_work(struct work_struct *work)
{
	struct np_aging *aging = container_of(work, struct np_aging, work);
	struct llist_node *todo = llist_del_all(&aging->todo);
	struct np_aging_slot *slot, *next;

	llist_for_each_entry_safe(slot, next, todo, node) {
		np_aging_age_slot(aging, slot);
		cond_resched();
	}
}

static void np_aging_free(struct work_struct *work)
{
	struct np_aging *aging = container_of(work, struct np_aging, free);
	struct np_aging_slot *slot, *next;

	cancel_work_sync(&aging->work);
	llist_for_each_entry_safe(slot, next, llist_del_all(&aging->todo), node)
		kfree(slot);
	WARN_ON(!xa_empty(&aging->slots));
	kfree(aging);
}

static struct mmu_notifier *np_aging_alloc_notifier(struct mm_struct *mm)
{
	struct np_aging *aging = kzalloc(sizeof(*aging), GFP_KERNEL_ACCOUNT);

	if (!aging)
		return ERR_PTR(-ENOMEM);
	xa_init(&aging->slots);
	init_llist_head(&aging->todo);
	INIT_WORK(&aging->work, np_aging_work);
	INIT_WORK(&aging->free, np_aging_free);
	mutex_init(&aging->lock);
	INIT_LIST_HEAD(&aging->regions);
	return &aging->notifier;
}

/* All regions are gone, and so are all callbacks: only the work may still run */
static void np_aging_free_notifier(struct mmu_notifier *notifier)
{
	queue_work(np_aging_wq, &to_np_aging(notifier)->free);
}

static const struct mmu_notifier_ops np_aging_ops = {
	.clear_flush_young = np_aging_clear_flush_young,
	.clear_young = np_aging_clear_young,
	.test_young = np_aging_test_young,
	.alloc_notifier = np_aging_alloc_notifier,
	.free_notifier = np_aging_free_notifier,
};

/**
 * np_aging_join() - from now on reclaim hears of the use of a region
 * @region: region that is being made, by the owner
 *
 * Whoever waits for the owner's mmap lock to write lets all others wait who read, and
 * a fault may hold it for as long as a disk or a server takes. So no fault waits like
 * that, and the owner does only as long as he lives. While a process has no region, the
 * next one takes the locks of all its mappings, twice.
 *
 * Context: the owner's; takes his mmap lock.
 * Return: 0, -ENOMEM, or -ERESTARTNOINTR.
 */
int np_aging_join(struct np_region *region)
{
	struct mm_struct *mm = region->mm;
	struct mmu_notifier *notifier;
	struct np_aging *aging = NULL;
	sigset_t later, before;
	int ret;

	ret = mmap_write_lock_killable(mm);
	if (ret)
		goto err;
	/*
	 * Who takes all locks of the address space gives up for any signal; one that
	 * comes every millisecond would keep a large process from it for ever
	 */
	siginitsetinv(&later, sigmask(SIGKILL));
	sigprocmask(SIG_BLOCK, &later, &before);
	notifier = mmu_notifier_get_locked(&np_aging_ops, mm);
	if (IS_ERR(notifier)) {
		ret = PTR_ERR(notifier);
		goto err_unlock;
	}
	aging = to_np_aging(notifier);
	/*
	 * The first mmu_interval_notifier_insert() would do this, and two at once may
	 * both be the first: then one waits behind the other's fault
	 */
	if (!aging->has_intervals) {
		ret = __mmu_notifier_register(NULL, mm);
		if (ret)
			goto err_unlock;
		aging->has_intervals = true;
	}
	sigprocmask(SIG_SETMASK, &before, NULL);
	mmap_write_unlock(mm);
	mutex_lock(&aging->lock);
	list_add(&region->aging_node, &aging->regions);
	mutex_unlock(&aging->lock);
	region->aging = aging;
	return 0;

err_unlock:
	sigprocmask(SIG_SETMASK, &before, NULL);
	mmap_write_unlock(mm);
	if (aging)
		mmu_notifier_put(&aging->notifier);
err:
	/*
	 * A freezer and a stop are signals as well.  Nothing has been done yet; if
	 * the reason has gone meanwhile, something has to see to the restart
	 */
	return ret == -EINTR ? restart_syscall() : ret;
}

/**
 * np_aging_join_part() - np_aging_join() for a part of the whole address space
 * @part: part that is being made, maybe by a worker for a peer; when it has its windows
 *	np_aging_show_part() follows
 * @whole: region that the part has entered
 * @own: the owner asks for it himself, and no peer
 *
 * No lock of the address space is taken, for which somebody else might have to wait: the
 * whole has joined, and leaves after all of its parts.
 *
 * Context: process context.
 * Return: 0 or -EBUSY: the owner has too many parts.
 */
int np_aging_join_part(struct np_region *part, struct np_region *whole, bool own)
{
	struct np_aging *aging = whole->aging;

	guard(mutex)(&aging->lock);
	if (!np_part_may_be_added(aging->nr_parts, own))
		return -EBUSY;
	aging->nr_parts++;
	INIT_LIST_HEAD(&part->aging_node);
	part->aging = aging;
	return 0;
}

/**
 * np_aging_show_part() - from now on reclaim hears of the use of a part
 * @part: part with windows, which np_region_age() looks at
 *
 * Context: process context.
 */
void np_aging_show_part(struct np_region *part)
{
	guard(mutex)(&part->aging->lock);
	list_add(&part->aging_node, &part->aging->regions);
}

/**
 * np_aging_leave() - the end of a region: its pages are not aged any more
 * @region: region; np_aging_put_slot() and np_aging_put() follow
 *
 * Context: process context.
 */
void np_aging_leave(struct np_region *region)
{
	struct np_aging *aging = region->aging;

	mutex_lock(&aging->lock);
	list_del(&region->aging_node);
	aging->nr_parts -= !!region->whole;
	mutex_unlock(&aging->lock);
}

/**
 * np_aging_put() - the last that a region does here
 * @region: region
 *
 * Context: process context.
 */
void np_aging_put(struct np_region *region)
{
	mmu_notifier_put(&region->aging->notifier);
}

/**
 * np_aging_get_slot() - room for what np_aging_use() says
 * @region: region
 * @va: of the slot
 *
 * Context: process context.
 * Return: 0 or -ENOMEM; if 0, np_aging_put_slot() follows.
 */
int np_aging_get_slot(struct np_region *region, unsigned long va)
{
	struct np_aging *aging = region->aging;
	struct np_aging_slot *slot;
	int ret;

	guard(mutex)(&aging->lock);
	/* Another region may have the same memory */
	slot = xa_load(&aging->slots, va >> NP_SLOT_SHIFT);
	if (slot) {
		slot->users++;
		return 0;
	}
	slot = kzalloc(sizeof(*slot), GFP_KERNEL_ACCOUNT);
	if (!slot)
		return -ENOMEM;
	slot->index = va >> NP_SLOT_SHIFT;
	slot->users = 1;
	ret = xa_err(xa_store(&aging->slots, slot->index, slot,
			      GFP_KERNEL_ACCOUNT));
	if (ret)
		kfree(slot);
	return ret;
}

/**
 * np_aging_put_slot() - a region does not have words for the slot any more
 * @region: region
 * @va: of the slot
 *
 * Context: process context.
 */
void np_aging_put_slot(struct np_region *region, unsigned long va)
{
	struct np_aging *aging = region->aging;
	struct np_aging_slot *slot;

	guard(mutex)(&aging->lock);
	slot = xa_load(&aging->slots, va >> NP_SLOT_SHIFT);
	if (--slot->users)
		return;
	xa_erase(&aging->slots, slot->index);
	/* If it is queued, or about to be, np_aging_work() frees it */
	if (!test_and_set_bit(0, &slot->queued))
		kfree_rcu(slot, rcu);
}

/**
 * np_aging_use() - a peer uses these pages, or may do so from now on
 * @region: region whose slot was made
 * @va: first page
 * @npages: within the slot
 *
 * Context: any; the caller has a reference to the region.
 */
void np_aging_use(struct np_region *region, unsigned long va, unsigned int npages)
{
	unsigned int first = (va & (NP_SLOT_SIZE - 1)) >> PAGE_SHIFT;
	struct np_aging_slot *slot;
	unsigned int i;

	slot = xa_load(&region->aging->slots, va >> NP_SLOT_SHIFT);
	for (i = first; slot && i < first + npages; i++) {
		if (test_bit(i, slot->asked))
			clear_bit(i, slot->asked);
		if (!test_bit(i, slot->used))
			set_bit(i, slot->used);
	}
}

/**
 * np_aging_is_asked() - does reclaim want to know whether these pages are used?
 * @region: region whose slot was made
 * @va: first page
 * @npages: within the slot
 *
 * Context: any; the caller has a reference to the region.
 * Return: true if a peer's own FAULT shall show it, of one page at least.
 */
bool np_aging_is_asked(struct np_region *region, unsigned long va,
		       unsigned int npages)
{
	unsigned int first = (va & (NP_SLOT_SIZE - 1)) >> PAGE_SHIFT;
	unsigned int end = first + npages;
	struct np_aging_slot *slot;

	slot = xa_load(&region->aging->slots, va >> NP_SLOT_SHIFT);
	return slot && find_next_bit(slot->asked, end, first) < end;
}

/**
 * np_aging_init() - start
 * @age: makes pages absent
 *
 * Return: 0 or -ENOMEM.
 */
int np_aging_init(np_age_fn *age)
{
	np_aging_age = age;
	np_aging_wq = alloc_workqueue("nprdma_aging", WQ_UNBOUND, 0);
	return np_aging_wq ? 0 : -ENOMEM;
}

/**
 * np_aging_exit() - end, when no region exists any more
 */
void np_aging_exit(void)
{
	mmu_notifier_synchronize();
	destroy_workqueue(np_aging_wq);
}
