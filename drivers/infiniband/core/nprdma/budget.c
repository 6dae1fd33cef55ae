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
 *
 * A peer's lease that is not given back in time ends with its key. A process's lease of its own
 * memory cannot be ended like that, because its requests would fail, and it may be right to keep
 * it: a receive is posted for as long as nobody sends. So one that is overdue is what a hold of
 * one's own is: it counts in RLIMIT_MEMLOCK, and leaves to others what may be leased. For its own
 * process it counts as before, so who ignores recalls gets no more leases than who obeys.
 */
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/rbtree.h>
#include <linux/refcount.h>
#include <linux/sched/signal.h>
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
/* Leases that are found overdue under one lock */
#define NP_OVERDUE_BATCH	64

/**
 * struct np_budget - leased pages of an address space, or of a memory cgroup
 * @node: in np_budgets
 * @ref: of its regions, and of budgets below it; the last one is dropped under np_budgets_lock
 * @of: the address space or the cgroup, by which it is found
 * @memcg: reference; NULL: an address space, whose regions keep it
 * @parent: reference: of its cgroup, or of the cgroup above; NULL: the host
 * @pages: pages
 * @overdue: of an address space: pages of its process's own leases that are overdue
 * @wanted: leases that were recalled, and have not ended
 * @own_wanted: of an address space: those of them that its process has
 * @wanted_at: when the last one was recalled, in jiffies
 * @scanned: reclaim has looked at the cgroup since then, and found nothing left to recall
 * @returned: pages of leases that were recalled, which nobody pins any more
 * @from: jiffies: there are no leases until then
 */
struct np_budget {
	struct rb_node node;
	refcount_t ref;
	unsigned long of;
	struct mem_cgroup *memcg;
	struct np_budget *parent;
	atomic_long_t pages;
	atomic_long_t overdue;
	atomic_long_t wanted;
	atomic_long_t own_wanted;
	unsigned long wanted_at;
	bool scanned;
	atomic_long_t returned;
	unsigned long from;
};

/*
 * Registration and the end of a region take this lock, in whatever cgroup, so nothing is
 * allocated under it: then one that is short of memory would stop all, and those whose end gives
 * memory back.
 */
static DEFINE_SPINLOCK(np_budgets_lock);
static struct rb_root np_budgets = RB_ROOT;	/* by np_budget.of, under np_budgets_lock */
static DEFINE_SPINLOCK(np_recalled_lock);
static LIST_HEAD(np_recalled);		/* struct np_own_lease, the oldest recall first */
static atomic_long_t np_leased;		/* pages, of the host */
static unsigned long np_leases_from;	/* as np_budget.from, of the host */
/* As np_budget.from, of those who reclaim from outside; these get leases */
static unsigned long np_outside_from;

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

/* With a reference: what the caller needs memory for, and may make somebody be killed for */
static struct mem_cgroup *np_memcg_charged(void)
{
	return get_mem_cgroup_from_mm(NULL);
}

/**
 * np_charges_somebody() - is this done on behalf of a cgroup?
 *
 * Return: true if another cgroup than the caller's own pays for what is allocated now.
 */
bool np_charges_somebody(void)
{
	return current->active_memcg;
}

static bool np_memcg_is_full(struct mem_cgroup *memcg)
{
	return page_counter_read(&memcg->memory) + MEMCG_CHARGE_BATCH >
	       READ_ONCE(memcg->memory.max);
}

static bool np_memcg_has_too_much(struct mem_cgroup *memcg)
{
	return page_counter_read(&memcg->memory) > READ_ONCE(memcg->memory.max);
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

static struct mem_cgroup *np_memcg_charged(void)
{
	return NULL;
}

bool np_charges_somebody(void)
{
	return false;
}

static bool np_memcg_is_full(struct mem_cgroup *memcg)
{
	return false;
}

static bool np_memcg_has_too_much(struct mem_cgroup *memcg)
{
	return false;
}
#endif

/* jiffies have 64 bits here, and do not come again */
static void np_pause(unsigned long *from, unsigned int ms)
{
	WRITE_ONCE(*from, jiffies + msecs_to_jiffies(ms));
}

static bool np_is_paused(const unsigned long *from)
{
	return time_before(jiffies, READ_ONCE(*from));
}

/*
 * Until when somebody waits who comes now. A pause begins with a time to wait. Whoever finds none
 * begins one; whoever finds one waits for what is left of that time, and makes neither longer.
 */
static unsigned long np_pause_to_wait(unsigned long *from)
{
	unsigned long next = jiffies + msecs_to_jiffies(NP_OOM_PAUSE_MS);
	unsigned long until = READ_ONCE(*from);

	if (!time_before(jiffies, until) && try_cmpxchg(from, &until, next))
		until = next;
	return until - msecs_to_jiffies(NP_OOM_PAUSE_MS - NP_OOM_MS);
}

static struct np_budget *to_np_budget(const struct rb_node *node)
{
	return rb_entry(node, struct np_budget, node);
}

static int np_budget_cmp(const void *of, const struct rb_node *node)
{
	unsigned long its = to_np_budget(node)->of;

	return *(const unsigned long *)of < its ? -1 : *(const unsigned long *)of > its;
}

static int np_budget_cmp_node(struct rb_node *budget, const struct rb_node *node)
{
	return np_budget_cmp(&to_np_budget(budget)->of, node);
}

static void np_budget_free(struct np_budget *budget)
{
	if (budget->memcg)
		mem_cgroup_put(budget->memcg);
	kfree(budget);
}

/* Takes over the reference to @memcg, if there is memory; np_budget_add() follows */
static struct np_budget *np_budget_alloc(unsigned long of, struct mem_cgroup *memcg)
{
	struct np_budget *budget = kzalloc(sizeof(*budget), GFP_KERNEL_ACCOUNT);

	if (!budget)
		return NULL;
	refcount_set(&budget->ref, 1);
	budget->of = of;
	budget->memcg = memcg;
	return budget;
}

static struct np_budget *np_budget_find(unsigned long of)
{
	struct np_budget *budget;
	struct rb_node *node;

	guard(spinlock)(&np_budgets_lock);
	node = rb_find(&of, &np_budgets, np_budget_cmp);
	if (!node)
		return NULL;
	budget = to_np_budget(node);
	refcount_inc(&budget->ref);
	return budget;
}

/*
 * Takes over the reference to @parent. Returns @budget, or what somebody else has added
 * meanwhile: then @budget is freed.
 */
static struct np_budget *np_budget_add(struct np_budget *budget, struct np_budget *parent)
{
	struct np_budget *other = NULL;
	struct rb_node *node;

	budget->parent = parent;
	spin_lock(&np_budgets_lock);
	node = rb_find_add(&budget->node, &np_budgets, np_budget_cmp_node);
	if (node) {
		other = to_np_budget(node);
		refcount_inc(&other->ref);
	}
	spin_unlock(&np_budgets_lock);
	if (!other)
		return budget;
	np_budget_free(budget);
	np_budget_put(parent);
	return other;
}

/**
 * np_budget_get() - where leases of an address space's memory count
 * @mm: address space, which the caller keeps until np_budget_put()
 *
 * What is missing is allocated from the bottom up, and added from the top down, so that
 * each has its parent before anybody finds it. Nothing is locked meanwhile: a cgroup that is
 * short of memory keeps nobody else waiting.
 *
 * Context: process context.
 * Return: its budget, or NULL: no memory.
 */
struct np_budget *np_budget_get(struct mm_struct *mm)
{
	struct np_budget *budget, *made, *next;
	struct mem_cgroup *memcg;

	budget = np_budget_find((unsigned long)mm);
	if (budget)
		return budget;
	/* Those that were made, the last one first, by np_budget.parent */
	made = np_budget_alloc((unsigned long)mm, NULL);
	if (!made)
		return NULL;
	for (memcg = np_memcg_of(mm); memcg; memcg = np_memcg_above(memcg)) {
		budget = np_budget_find((unsigned long)memcg);
		next = budget ? NULL : np_budget_alloc((unsigned long)memcg, memcg);
		if (!next) {
			mem_cgroup_put(memcg);
			break;
		}
		next->parent = made;
		made = next;
	}
	if (memcg && !budget)
		goto free;
	for (; made; made = next) {
		next = made->parent;
		budget = np_budget_add(made, budget);
	}
	return budget;

free:
	for (; made; made = next) {
		next = made->parent;
		np_budget_free(made);
	}
	return NULL;
}
EXPORT_SYMBOL_IF_KUNIT(np_budget_get);

/**
 * np_budget_put() - drop a reference
 * @budget: budget; NULL: the host, which has none
 *
 * Not by recursion: cgroups may be nested as deep as somebody likes.
 *
 * Context: any but interrupts; may be called in reclaim.
 */
void np_budget_put(struct np_budget *budget)
{
	struct np_budget *parent;

	for (; budget && refcount_dec_and_lock(&budget->ref, &np_budgets_lock); budget = parent) {
		rb_erase(&budget->node, &np_budgets);
		spin_unlock(&np_budgets_lock);
		WARN_ON(atomic_long_read(&budget->pages) || atomic_long_read(&budget->overdue) ||
			atomic_long_read(&budget->wanted));
		parent = budget->parent;
		np_budget_free(budget);
	}
}
EXPORT_SYMBOL_IF_KUNIT(np_budget_put);

/**
 * np_budget_memcg() - where leases of an address space count
 * @budget: of np_budget_get(), which keeps it
 *
 * Return: its cgroup; or NULL: there are none.
 */
struct mem_cgroup *np_budget_memcg(const struct np_budget *budget)
{
	return budget->parent ? budget->parent->memcg : NULL;
}

/**
 * np_budget_is_below() - does one count in another?
 * @budget: budget
 * @above: its own, or one above it; NULL: the host, which is above all
 *
 * Context: any.
 * Return: true if it does.
 */
bool np_budget_is_below(const struct np_budget *budget, const struct np_budget *above)
{
	while (budget && budget != above)
		budget = budget->parent;
	return budget == above;
}

/* Up to, and without, @end */
static void np_budget_drop(struct np_budget *budget, struct np_budget *end,
			   unsigned long pages)
{
	for (; budget != end; budget = budget->parent)
		atomic_long_sub(pages, &budget->pages);
}

/*
 * True: they count in the budget and in all above it. Else *@full is the one that has no room;
 * NULL: there are no leases now. @beside: see np_lease_try()
 */
static bool np_budget_count(struct np_budget *budget, unsigned long pages, unsigned long beside,
			    struct np_budget **full)
{
	struct np_budget *at;

	*full = NULL;
	for (at = budget; at; at = at->parent) {
		unsigned long most = at->memcg ?
			np_budget_share(np_memcg_limit(at->memcg)) : ULONG_MAX;

		if (np_is_paused(&at->from)) {
			np_budget_drop(budget, at, pages);
			return false;
		}
		if (atomic_long_add_return(pages, &at->pages) > most - min(beside, most)) {
			np_budget_drop(budget, at->parent, pages);
			*full = at;
			return false;
		}
	}
	return true;
}

/*
 * @beside: pages of who asks that count for nobody else. -EAGAIN: there is no room, and who asks
 * may have some made, in *@full; NULL: in the host
 */
static int np_lease_try(struct np_region *region, unsigned long pages, unsigned long own,
			unsigned long beside, struct np_budget **full)
{
	unsigned long most = np_budget_share(totalram_pages());

	if (np_is_paused(&np_leases_from))
		return -EBUSY;
	own = max_t(unsigned long, own, atomic_long_read(&region->budget->pages));
	if (pages > most || own > most)
		return -EBUSY;
	if (!np_budget_count(region->budget, pages, beside, full)) {
		most = *full ? np_budget_share(np_memcg_limit((*full)->memcg)) : 0;
		return own + pages <= most / NP_BUDGET_FEW ? -EAGAIN : -EBUSY;
	}
	if (atomic_long_add_return(pages, &np_leased) <= most - own)
		return 0;
	np_lease_unreserve(region, pages);
	return own + pages <= most / NP_BUDGET_FEW ? -EAGAIN : -EBUSY;
}

/* How many were found overdue, of which no more are looked for under one lock: recalls need it */
static unsigned int np_leases_find_overdue(void)
{
	unsigned long time = msecs_to_jiffies(np_recall_time());
	struct np_own_lease *own;
	unsigned int found;

	guard(spinlock)(&np_recalled_lock);
	for (found = 0; found < NP_OVERDUE_BATCH; found++) {
		own = list_first_entry_or_null(&np_recalled, struct np_own_lease, node);
		if (!own || time_before(jiffies, own->recalled + time))
			break;
		list_del_init(&own->node);
		own->overdue = true;
		atomic_long_add(own->pages, &own->region->budget->overdue);
		np_lease_unreserve(own->region, own->pages);
	}
	return found;
}

/* True: some were found overdue, and count for their own process alone from now on */
static bool np_leases_are_overdue(void)
{
	unsigned int found, all = 0;

	do {
		found = np_leases_find_overdue();
		all += found;
		cond_resched();
	} while (found == NP_OVERDUE_BATCH);
	return all;
}

/*
 * As np_lease_try(). What is overdue is read under the lock under which it stops to count for
 * others: else what becomes overdue in between would count for nobody.
 */
static int np_own_lease_try(struct np_region *region, unsigned long pages,
			    struct np_budget **full)
{
	unsigned long overdue, leased;

	guard(spinlock)(&np_recalled_lock);
	overdue = atomic_long_read(&region->budget->overdue);
	leased = atomic_long_read(&region->budget->pages);
	return np_lease_try(region, pages, leased + overdue, overdue, full);
}

/* @itself: the region's process asks; else a peer, who has @own pages already */
static int np_lease_reserve_for(struct np_region *region, unsigned long pages, bool itself,
				unsigned long own)
{
	struct np_budget *full = NULL;
	int ret;

	/* Nobody else is hurt by what is overdue, so nobody else looks for it */
	do {
		ret = itself ? np_own_lease_try(region, pages, &full) :
			       np_lease_try(region, pages, own, 0, &full);
	} while (ret && np_leases_are_overdue());
	if (ret != -EAGAIN)
		return ret;
	np_leases_make_room(pages, full);
	return -EBUSY;
}

/**
 * np_lease_reserve() - may so many pages be leased to a peer?
 * @region: region of which
 * @pages: pages
 * @own: how many the peer has already
 *
 * Each may have as much as he leaves to the others of the host. If somebody who has little
 * gets nothing, the oldest leases are recalled, of the host or of the cgroup that has no room and
 * those below it, whoever has them: there is room soon.
 *
 * Context: process context.
 * Return: 0, then np_lease_unreserve() follows; -EBUSY.
 */
int np_lease_reserve(struct np_region *region, unsigned long pages, unsigned long own)
{
	return np_lease_reserve_for(region, pages, false, own);
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
 * np_own_lease_reserve() - may a process lease so many pages of its own?
 * @own: set
 * @region: of the process; it stays until np_own_lease_unreserve()
 * @pages: pages
 *
 * As np_lease_reserve().
 *
 * Context: process context.
 * Return: 0, then np_own_lease_unreserve() follows; -EBUSY.
 */
int np_own_lease_reserve(struct np_own_lease *own, struct np_region *region, unsigned long pages)
{
	INIT_LIST_HEAD(&own->node);
	own->region = region;
	own->pages = pages;
	own->wanted = false;
	own->overdue = false;
	return np_lease_reserve_for(region, pages, true, 0);
}
EXPORT_SYMBOL_IF_KUNIT(np_own_lease_reserve);

/**
 * np_own_lease_recalled() - from now on the time runs after which it is overdue
 * @own: of np_own_lease_reserve(); once
 *
 * Context: any but interrupts.
 */
void np_own_lease_recalled(struct np_own_lease *own)
{
	atomic_long_inc(&own->region->budget->own_wanted);
	guard(spinlock)(&np_recalled_lock);
	own->wanted = true;
	own->recalled = jiffies;
	list_add_tail(&own->node, &np_recalled);
}
EXPORT_SYMBOL_IF_KUNIT(np_own_lease_recalled);

/**
 * np_own_lease_unreserve() - pages are not leased any more
 * @own: of np_own_lease_reserve(); it is not recalled any more
 */
void np_own_lease_unreserve(struct np_own_lease *own)
{
	scoped_guard(spinlock, &np_recalled_lock)
		list_del_init(&own->node);
	if (own->wanted)
		atomic_long_dec(&own->region->budget->own_wanted);
	if (own->overdue)
		atomic_long_sub(own->pages, &own->region->budget->overdue);
	else
		np_lease_unreserve(own->region, own->pages);
}
EXPORT_SYMBOL_IF_KUNIT(np_own_lease_unreserve);

/**
 * np_leases_pause() - nobody gets a lease for a while
 * @ms: for how long; 0: the pause is over
 */
void np_leases_pause(unsigned int ms)
{
	np_pause(&np_leases_from, ms);
}
EXPORT_SYMBOL_IF_KUNIT(np_leases_pause);

/**
 * np_budget_want() - a lease is recalled
 * @budget: of its region
 *
 * Context: any but interrupts.
 */
void np_budget_want(struct np_budget *budget)
{
	for (; budget; budget = budget->parent) {
		WRITE_ONCE(budget->wanted_at, jiffies);
		WRITE_ONCE(budget->scanned, false);
		atomic_long_inc(&budget->wanted);
	}
}

/**
 * np_budget_return() - leases that were recalled have ended
 * @budget: of their region
 * @leases: how many
 * @pages: that they pinned, and nobody pins any more
 *
 * Context: any but interrupts.
 */
void np_budget_return(struct np_budget *budget, unsigned int leases, unsigned long pages)
{
	for (; budget; budget = budget->parent) {
		atomic_long_add(pages, &budget->returned);
		atomic_long_sub(leases, &budget->wanted);
	}
}

/* May leases come back soon, besides so many? */
static bool np_budget_awaits(struct np_budget *budget, long own)
{
	return atomic_long_read(&budget->wanted) > own &&
	       time_before(jiffies, READ_ONCE(budget->wanted_at) + msecs_to_jiffies(NP_OOM_MS));
}

/**
 * np_memcg_awaits_leases() - may leases of a cgroup's memory come back soon?
 * @memcg: cgroup, and those below it; NULL: none
 *
 * Context: any but interrupts; may be called in reclaim.
 * Return: true if some were recalled, a moment ago.
 */
bool np_memcg_awaits_leases(struct mem_cgroup *memcg)
{
	struct np_budget *budget = memcg ? np_budget_find((unsigned long)memcg) : NULL;
	bool awaits = budget && np_budget_awaits(budget, 0);

	np_budget_put(budget);
	return awaits;
}

/* Leases of @budget that nobody but the caller can give back */
static long np_budget_own(struct np_budget *budget)
{
	struct np_budget *own;
	long wanted = 0;

	if (!current->mm || atomic_read(&current->mm->mm_users) > 1)
		return 0;
	own = np_budget_find((unsigned long)current->mm);
	if (own && np_budget_is_below(own, budget))
		wanted = atomic_long_read(&own->own_wanted);
	np_budget_put(own);
	return wanted;
}

/*
 * The next one, from @budget upwards, whose cgroup is full, so that the caller may make the kernel
 * kill somebody in it: he charges it, or one below it. What others have filled is not his business.
 * But who lowers a limit kills for a cgroup that he need not be in: *@outside. Such a cgroup has
 * more than it may have.
 */
static struct np_budget *np_budget_full(struct np_budget *budget, bool *outside)
{
	struct mem_cgroup *charged = np_memcg_charged();
	struct np_budget *lowered = NULL;

	for (; budget; budget = budget->parent) {
		if (!mem_cgroup_is_descendant(charged, budget->memcg)) {
			if (!lowered && np_memcg_has_too_much(budget->memcg))
				lowered = budget;
		} else if (np_memcg_is_full(budget->memcg)) {
			break;
		}
	}
	mem_cgroup_put(charged);
	*outside = !budget;
	return budget ?: lowered;
}

/**
 * np_memcg_await_leases() - wait for leases of a cgroup's memory
 * @memcg: cgroup that reclaim looks at
 *
 * If it, or one above it, is so full that the caller may make somebody be killed, this waits until
 * something has come back, but no longer than NP_OOM_MS, and nobody gets leases of the full one for
 * NP_OOM_PAUSE_MS. What has come back may be enough; else reclaim comes again. All who come
 * meanwhile wait for the same time: so one who reclaims waits no longer, however often he comes
 * here, however many cgroups below the full one he looks at, and however many leases others have
 * there, which are recalled one after the other. Those who reclaim from outside have one such time
 * together, for all cgroups.
 *
 * The first call after a recall only says that more may follow: reclaim may have had something
 * left to do from when there were leases that it could recall, and may have got nowhere near an
 * end. It has that for each node, so there may be one call too many for each other node.
 *
 * Context: reclaim that may wait; the caller may have any lock that is held across reclaim.
 * Return: pages that have come back meanwhile.
 */
unsigned long np_memcg_await_leases(struct mem_cgroup *memcg)
{
	struct np_budget *budget = np_budget_find((unsigned long)memcg), *full;
	unsigned long before, end, outside_end, back = 0;
	bool outside;
	long own;

	if (!budget)
		return 0;
	if (!READ_ONCE(budget->scanned)) {
		WRITE_ONCE(budget->scanned, true);
		goto put;
	}
	full = np_budget_full(budget, &outside);
	if (!full)
		goto put;
	own = np_budget_own(full);
	if (!np_budget_awaits(full, own))
		goto put;
	before = atomic_long_read(&full->returned);
	end = np_pause_to_wait(&full->from);
	if (outside) {
		outside_end = np_pause_to_wait(&np_outside_from);
		if (time_before(outside_end, end))
			end = outside_end;
	}
	while (np_budget_awaits(full, own) && time_before(jiffies, end) &&
	       atomic_long_read(&full->returned) == before && !fatal_signal_pending(current))
		schedule_timeout_killable(1);
	back = atomic_long_read(&full->returned) - before;
	/*
	 * What was scanned in vain while it was leased is on the active list. Reclaim takes nothing
	 * from there if old statistics say that there is enough on the inactive one.
	 */
	if (back)
		mem_cgroup_flush_stats(full->memcg);
put:
	np_budget_put(budget);
	return back;
}

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
