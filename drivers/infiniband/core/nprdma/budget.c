// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: how much may be leased.
 *
 * Leased pages cannot be reclaimed until whoever has the lease gives it back, which he may
 * be slow to do. So they are a share only of whatever bounds the memory of their owner: of
 * the host, and of his memory cgroup and of each above it. What the limits leave beside them
 * can be reclaimed as ever.
 *
 * Pages count where the region's owner was when he registered it.
 */
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "np_region.h"

VISIBLE_IF_KUNIT unsigned int np_lease_percent = 25;
EXPORT_SYMBOL_IF_KUNIT(np_lease_percent);
module_param_named(nprdma_lease_percent, np_lease_percent, uint, 0644);
MODULE_PARM_DESC(nprdma_lease_percent,
		 "Most of the memory of the host, and of a memory cgroup, that leases may pin, in per cent; 0: no leases");

/* Who has no more than this part of what may be leased makes others give back theirs */
#define NP_BUDGET_FEW	64

/**
 * struct np_budget - leased pages of an address space, or of a memory cgroup
 * @ref: of its regions, and of budgets below it; the last one is dropped under np_budgets
 * @of: the address space or the cgroup, by which it is found
 * @memcg: reference; NULL: an address space, whose regions keep it
 * @parent: reference: of its cgroup, or of the cgroup above; NULL: the host
 * @pages: pages
 */
struct np_budget {
	refcount_t ref;
	unsigned long of;
	struct mem_cgroup *memcg;
	struct np_budget *parent;
	atomic_long_t pages;
};

static DEFINE_MUTEX(np_budgets_lock);
static DEFINE_XARRAY(np_budgets);	/* by np_budget.of, under np_budgets_lock */
static atomic_long_t np_leased;		/* pages, of the host */
static unsigned long np_leases_from;	/* jiffies: there are none until then; 0: there are */

static unsigned long np_budget_share(unsigned long pages)
{
	return pages / 100 * min(READ_ONCE(np_lease_percent), 100U);
}

#ifdef CONFIG_MEMCG
static struct mem_cgroup *np_memcg_of(struct mm_struct *mm)
{
	return get_mem_cgroup_from_mm(mm);
}

/* With a reference; NULL: the host's own limit is the only one */
static struct mem_cgroup *np_memcg_above(struct mem_cgroup *memcg)
{
	struct mem_cgroup *parent = parent_mem_cgroup(memcg);

	if (parent)
		css_get(&parent->css);
	return parent;
}

/* Reclaim begins at either */
static unsigned long np_memcg_limit(struct mem_cgroup *memcg)
{
	return min(READ_ONCE(memcg->memory.max), READ_ONCE(memcg->memory.high));
}
#else
static struct mem_cgroup *np_memcg_of(struct mm_struct *mm)
{
	return NULL;
}

static struct mem_cgroup *np_memcg_above(struct mem_cgroup *memcg)
{
	return NULL;
}

static unsigned long np_memcg_limit(struct mem_cgroup *memcg)
{
	return ULONG_MAX;
}
#endif

/* Not by recursion: cgroups may be nested as deep as somebody likes */
static void np_budget_unref(struct np_budget *budget)
{
	struct np_budget *parent;

	lockdep_assert_held(&np_budgets_lock);
	for (; budget && refcount_dec_and_test(&budget->ref); budget = parent) {
		WARN_ON(atomic_long_read(&budget->pages));
		parent = budget->parent;
		xa_erase(&np_budgets, budget->of);
		if (budget->memcg)
			mem_cgroup_put(budget->memcg);
		kfree(budget);
	}
}

/* Takes over the references to @memcg and @parent, also if there is no memory */
static struct np_budget *np_budget_make(unsigned long of, struct mem_cgroup *memcg,
					struct np_budget *parent)
{
	struct np_budget *budget;

	lockdep_assert_held(&np_budgets_lock);
	budget = kzalloc(sizeof(*budget), GFP_KERNEL_ACCOUNT);
	if (!budget)
		goto drop;
	refcount_set(&budget->ref, 1);
	budget->of = of;
	budget->memcg = memcg;
	budget->parent = parent;
	if (!xa_err(xa_store(&np_budgets, of, budget, GFP_KERNEL_ACCOUNT)))
		return budget;
	kfree(budget);
drop:
	if (memcg)
		mem_cgroup_put(memcg);
	np_budget_unref(parent);
	return NULL;
}

static struct np_budget *np_budget_find(unsigned long of)
{
	struct np_budget *budget = xa_load(&np_budgets, of);

	lockdep_assert_held(&np_budgets_lock);
	if (budget)
		refcount_inc(&budget->ref);
	return budget;
}

/*
 * Takes over the reference to the cgroup. Sets *@budget to the cgroup's budget, NULL for the
 * host; false: there was no memory for it, or for one above it.
 */
static bool np_budget_of_memcg(struct mem_cgroup *memcg, struct np_budget **budget)
{
	struct np_budget **at = budget, *made;
	struct mem_cgroup *above;

	*budget = NULL;
	for (; memcg; memcg = above) {
		*at = np_budget_find((unsigned long)memcg);
		if (*at) {
			mem_cgroup_put(memcg);
			return true;
		}
		above = np_memcg_above(memcg);
		made = np_budget_make((unsigned long)memcg, memcg, NULL);
		if (!made) {
			if (above)
				mem_cgroup_put(above);
			np_budget_unref(*budget);
			return false;
		}
		*at = made;
		at = &made->parent;
	}
	return true;
}

/**
 * np_budget_get() - where leases of an address space's memory count
 * @mm: address space, which the caller keeps until np_budget_put()
 *
 * Context: process context.
 * Return: its budget, or NULL: no memory.
 */
struct np_budget *np_budget_get(struct mm_struct *mm)
{
	struct np_budget *budget, *parent;

	guard(mutex)(&np_budgets_lock);
	budget = np_budget_find((unsigned long)mm);
	if (budget)
		return budget;
	if (!np_budget_of_memcg(np_memcg_of(mm), &parent))
		return NULL;
	return np_budget_make((unsigned long)mm, NULL, parent);
}
EXPORT_SYMBOL_IF_KUNIT(np_budget_get);

/**
 * np_budget_put() - drop a reference
 * @budget: budget
 *
 * Context: process context.
 */
void np_budget_put(struct np_budget *budget)
{
	guard(mutex)(&np_budgets_lock);
	np_budget_unref(budget);
}
EXPORT_SYMBOL_IF_KUNIT(np_budget_put);

/* Up to, and without, @end */
static void np_budget_drop(struct np_budget *budget, struct np_budget *end,
			   unsigned long pages)
{
	for (; budget != end; budget = budget->parent)
		atomic_long_sub(pages, &budget->pages);
}

/* True: they count in the budget and in all above it */
static bool np_budget_count(struct np_budget *budget, unsigned long pages)
{
	struct np_budget *at;

	for (at = budget; at; at = at->parent) {
		unsigned long most = at->memcg ?
			np_budget_share(np_memcg_limit(at->memcg)) : ULONG_MAX;

		if (atomic_long_add_return(pages, &at->pages) > most) {
			np_budget_drop(budget, at->parent, pages);
			return false;
		}
	}
	return true;
}

/**
 * np_lease_reserve() - may so many pages be leased?
 * @region: region of which
 * @pages: pages
 * @own: how many who asks has already, if that is not the owner
 *
 * Each may have as much as he leaves to the others of the host. If somebody who has little
 * gets nothing, the oldest leases are recalled, whoever has them: there is room soon.
 *
 * Context: process context.
 * Return: 0, then np_lease_unreserve() follows; -EBUSY.
 */
int np_lease_reserve(struct np_region *region, unsigned long pages, unsigned long own)
{
	unsigned long most = np_budget_share(totalram_pages());
	unsigned long from = READ_ONCE(np_leases_from);

	if (from && time_before(jiffies, from))
		return -EBUSY;
	/* It is over for good: jiffies come again where they have 32 bits */
	if (from)
		cmpxchg(&np_leases_from, from, 0);
	own = max_t(unsigned long, own, atomic_long_read(&region->budget->pages));
	if (pages > most || own > most)
		return -EBUSY;
	if (!np_budget_count(region->budget, pages))
		return -EBUSY;
	if (atomic_long_add_return(pages, &np_leased) <= most - own)
		return 0;
	np_lease_unreserve(region, pages);
	if (own + pages <= most / NP_BUDGET_FEW)
		np_leases_make_room(pages);
	return -EBUSY;
}
EXPORT_SYMBOL_GPL(np_lease_reserve);

/**
 * np_lease_unreserve() - pages are not leased any more
 * @region: as np_lease_reserve() was told
 * @pages: likewise
 */
void np_lease_unreserve(struct np_region *region, unsigned long pages)
{
	np_budget_drop(region->budget, NULL, pages);
	atomic_long_sub(pages, &np_leased);
}
EXPORT_SYMBOL_GPL(np_lease_unreserve);

/**
 * np_leases_pause() - nobody gets a lease for a while
 * @ms: for how long; 0: the pause is over
 */
void np_leases_pause(unsigned int ms)
{
	WRITE_ONCE(np_leases_from, ms ? jiffies + msecs_to_jiffies(ms) ?: 1 : 0);
}
EXPORT_SYMBOL_IF_KUNIT(np_leases_pause);

/**
 * np_leased_pages() - how much is leased of the host
 *
 * Return: pages, counted once for each lease.
 */
unsigned long np_leased_pages(void)
{
	return atomic_long_read(&np_leased);
}
EXPORT_SYMBOL_IF_KUNIT(np_leased_pages);
