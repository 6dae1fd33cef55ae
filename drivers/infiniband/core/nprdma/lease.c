// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: leases, holds that are asked back.
 *
 * A hold without a time limit pins its pages for as long as somebody may use them, which
 * is right while he does, and wrong when the owner changes his memory, or when memory is
 * short. So whoever has such a hold is told then: the lease is recalled. He posts
 * nothing more under it, and releases it when what he posted has completed.
 *
 * Reclaim skips pinned pages and calls no notifier for them. It calls shrinkers, for each
 * cgroup those that have something of it. So leases are what a shrinker shrinks, the
 * oldest first; it counts each as a slot of pages, and only says that it wants it back.
 * Before the kernel kills somebody for memory, all are recalled, and it waits for them, because
 * without leases he would live.
 *
 * It kills for a cgroup that is full as well, and then calls nobody first. But it gives up
 * only after reclaim has failed many times, down to priority 0. So when all leases of a
 * cgroup are recalled and some have not come back yet, the shrinker says that there is one
 * object, and scanning it is waiting. Of one object the kernel scans something at priority 0; at
 * priority 1, if it has left some undone before; and at any priority, if it has left very many
 * undone, while there were leases to recall. It leaves no more than twice what there is
 * now, so only the first scan may come when there is no need, and does not count. If reclaim
 * really fails, there are at least 16. The wait is bounded: see np_memcg_await_leases().
 *
 * Whoever reclaims may have locks, so the wait may be for one who waits for these: it is in
 * vain then, and ends all the same. It takes no lock and keeps none. These do not wait:
 * - who charges no full cgroup that the leases are of: nobody is killed for him;
 * - who only drops caches: those who need memory have PF_MEMALLOC;
 * - who may not sleep; and who would rather fail, and lets nobody be killed for it. The wait
 *   enters no file system and does no I/O, and for a cgroup somebody is killed without GFP_FS, too;
 * - kernel threads that charge nobody: kswapd, and the workers that give leases back. A worker
 *   that brings in an owner's memory for a peer charges the owner's cgroup, and somebody may be
 *   killed for it, so it waits; it has no lock then that who gives back needs. One that makes
 *   a peer's keys has np_region.lock, which the end of a peer's lease takes;
 * - who is dying, as he needs no more memory;
 * - a process without other threads, for its own leases: nobody else gives them back.
 */
#include <linux/list_lru.h>
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/oom.h>
#include <linux/sched/mm.h>
#include <linux/shrinker.h>
#include <linux/slab.h>
#include <linux/wait.h>
#include <kunit/visibility.h>

#include "np_region.h"

VISIBLE_IF_KUNIT unsigned int np_recall_ms = 1000;
EXPORT_SYMBOL_IF_KUNIT(np_recall_ms);
module_param_named(nprdma_recall_ms, np_recall_ms, uint, 0644);
MODULE_PARM_DESC(nprdma_recall_ms,
		 "Time that peers have to give leases back of a region that is deregistered, and processes those of their own memory before they count for themselves alone, in ms");

/* However long the parameter is, nobody waits longer */
#define NP_RECALL_MAX_MS	60000
/* Most leases that one who gets none makes others give back */
#define NP_ROOM_LEASES		16
/* Leases that are recalled under one lock */
#define NP_RECALL_BATCH		64

static struct kmem_cache *np_hold_cache;
VISIBLE_IF_KUNIT struct shrinker *np_lease_shrinker;
EXPORT_SYMBOL_IF_KUNIT(np_lease_shrinker);
/* Leases that were not recalled, by node and cgroup, the oldest first */
static struct list_lru np_leases;
/* Leases that were recalled and have not ended yet; and pages of those that have */
static atomic_long_t np_leases_wanted;
static unsigned long np_leases_wanted_at;	/* jiffies: the last recall */
static atomic_long_t np_leases_returned;
/* So many of these the kernel was told of, before it would have killed; under its oom_lock */
static unsigned long np_leases_told;

/**
 * np_recall_time() - how long is a lease waited for that was recalled
 *
 * Return: ms.
 */
unsigned int np_recall_time(void)
{
	return min(READ_ONCE(np_recall_ms), NP_RECALL_MAX_MS);
}

/* Under a lock without which the hold cannot be released. Once, whoever comes first */
static void np_lease_tell(struct np_hold *hold, enum np_recall_why why)
{
	if (xchg(&hold->recalled, true))
		return;
	WRITE_ONCE(np_leases_wanted_at, jiffies);
	atomic_long_inc(&np_leases_wanted);
	np_budget_want(hold->region->budget);
	atomic64_inc(&hold->region->count->recalls[why]);
	hold->recall->fn(hold->recall);
}

/**
 * np_lease_recall() - ask for a hold, if it is a lease
 * @hold: hold, which cannot be released meanwhile
 * @why: what for
 *
 * Context: any but interrupts; allocates nothing and waits for nobody.
 */
void np_lease_recall(struct np_hold *hold, enum np_recall_why why)
{
	if (!hold->recall)
		return;
	/* In this order, so that at each time it is seen as one or the other */
	np_lease_tell(hold, why);
	list_lru_del_obj(&np_leases, &hold->lru);
}

/**
 * np_hold_recall() - ask for a lease back whose holder may be dead
 * @hold: of np_hold_alloc(); a lease, which cannot be released meanwhile
 *
 * Context: any but interrupts.
 */
void np_hold_recall(struct np_hold *hold)
{
	np_lease_recall(hold, NP_RECALL_AGE);
}
EXPORT_SYMBOL_GPL(np_hold_recall);

/**
 * np_leases_freed() - leases that were recalled pin no page any more
 * @region: of which they are
 * @pages: that no hold of the region pins any more
 *
 * A page may be on several leases, and can be reclaimed when the last one has ended.
 */
void np_leases_freed(struct np_region *region, unsigned long pages)
{
	atomic_long_add(pages, &np_leases_returned);
	np_budget_return(region->budget, 0, pages);
}

/**
 * np_lease_returned() - a hold has ended
 * @hold: hold; its pages are not pinned by it any more
 * @pages: see np_leases_freed()
 */
void np_lease_returned(const struct np_hold *hold, unsigned long pages)
{
	if (!READ_ONCE(hold->recalled))
		return;
	/* Who waits for the last one sees its pages */
	np_leases_freed(hold->region, pages);
	np_budget_return(hold->region->budget, 1, 0);
	atomic_long_dec(&np_leases_wanted);
}

static enum lru_status np_lease_isolate(struct list_head *item, struct list_lru_one *list,
					spinlock_t *lock, void *why)
{
	np_lease_tell(container_of(item, struct np_hold, lru),
		      *(enum np_recall_why *)why);
	list_lru_isolate(list, item);
	return LRU_REMOVED;
}

static unsigned long np_lease_count(struct shrinker *shrinker, struct shrink_control *sc)
{
	unsigned long nr = list_lru_shrink_count(&np_leases, sc);

	if (nr)
		return nr * NP_SLOT_PAGES;
	return np_memcg_awaits_leases(sc->memcg) ? 1 : SHRINK_EMPTY;
}

/* In reclaim: see the top of this file */
VISIBLE_IF_KUNIT bool np_may_wait(const struct shrink_control *sc)
{
	return sc->memcg && current->flags & PF_MEMALLOC &&
	       gfpflags_allow_blocking(sc->gfp_mask) &&
	       !(sc->gfp_mask & (__GFP_NORETRY | __GFP_RETRY_MAYFAIL)) &&
	       (!(current->flags & PF_KTHREAD) || np_charges_somebody()) &&
	       !(current->flags & PF_EXITING) && !fatal_signal_pending(current);
}
EXPORT_SYMBOL_IF_KUNIT(np_may_wait);

static unsigned long np_lease_scan(struct shrinker *shrinker, struct shrink_control *sc)
{
	enum np_recall_why why = NP_RECALL_MEMORY;
	unsigned long nr = DIV_ROUND_UP(sc->nr_to_scan, NP_SLOT_PAGES);

	if (!list_lru_shrink_count(&np_leases, sc))
		return np_may_wait(sc) ? np_memcg_await_leases(sc->memcg) : SHRINK_STOP;
	return list_lru_walk_one(&np_leases, sc->nid, sc->memcg, np_lease_isolate,
				 &why, &nr) * NP_SLOT_PAGES;
}

/**
 * struct np_room - leases that are recalled, so that others find room
 * @full: of this budget, and those below it; NULL: the host's
 * @nr: so many more
 */
struct np_room {
	struct np_budget *full;
	unsigned long nr;
};

static enum lru_status np_lease_isolate_below(struct list_head *item, struct list_lru_one *list,
					      spinlock_t *lock, void *arg)
{
	struct np_hold *hold = container_of(item, struct np_hold, lru);
	enum np_recall_why why = NP_RECALL_BUDGET;
	struct np_room *room = arg;

	/* Each cgroup has a list, so what holds for the first one of it holds for all */
	if (!room->nr || !np_budget_is_below(hold->region->budget, room->full))
		return LRU_STOP;
	room->nr--;
	return np_lease_isolate(item, list, lock, &why);
}

/**
 * np_leases_make_room() - the oldest leases are recalled, whoever has them
 * @pages: for so many pages
 * @full: of this cgroup, and of those below it, where processes are; NULL: of the host
 *
 * The oldest of a cgroup: of several the first that there is.
 *
 * Context: process context.
 */
void np_leases_make_room(unsigned long pages, struct np_budget *full)
{
	struct np_room room = {
		.full = full,
		.nr = min_t(unsigned long, pages / NP_SLOT_PAGES + 1, NP_ROOM_LEASES),
	};

	list_lru_walk(&np_leases, np_lease_isolate_below, &room, ULONG_MAX);
}
EXPORT_SYMBOL_IF_KUNIT(np_leases_make_room);

/*
 * Before the kernel kills somebody for memory: all leases are recalled, and those that come
 * back at once may be what he dies for. Reclaim has recalled some before. The first that come
 * back may be enough, and some may never come: so then the kernel tries again, and if it was not
 * enough this is called again. There are no leases for a while; and who has had his time, as
 * a process that is stopped, is not waited for each time that somebody is killed.
 */
VISIBLE_IF_KUNIT int np_lease_oom(struct notifier_block *nb, unsigned long unused, void *freed)
{
	enum np_recall_why why = NP_RECALL_MEMORY;
	unsigned long deadline, back;

	np_leases_pause(NP_OOM_PAUSE_MS);
	while (list_lru_walk(&np_leases, np_lease_isolate, &why, NP_RECALL_BATCH))
		cond_resched();
	deadline = READ_ONCE(np_leases_wanted_at) + msecs_to_jiffies(NP_OOM_MS);
	while (atomic_long_read(&np_leases_wanted) && time_before(jiffies, deadline) &&
	       atomic_long_read(&np_leases_returned) == np_leases_told)
		schedule_timeout_uninterruptible(1);
	/* Also what came back between two calls, while reclaim looked elsewhere */
	back = atomic_long_read(&np_leases_returned) - np_leases_told;
	np_leases_told += back;
	/* As in np_memcg_await_leases(), but of all */
	if (back)
		mem_cgroup_flush_stats(NULL);
	*(unsigned long *)freed += back;
	return NOTIFY_OK;
}
EXPORT_SYMBOL_IF_KUNIT(np_lease_oom);

static struct notifier_block np_lease_oom_nb = {
	.notifier_call = np_lease_oom,
};

static bool np_leases_have_keys(struct np_region *region)
{
	guard(spinlock)(&region->hold_lock);
	return region->lease_keys;
}

/**
 * np_leases_recall() - the region goes: recall all leases
 * @region: region that is gone: np_hold_grant() makes no key of it
 */
void np_leases_recall(struct np_region *region)
{
	struct np_hold *hold;

	guard(spinlock)(&region->hold_lock);
	list_for_each_entry(hold, &region->holds, node)
		np_lease_recall(hold, NP_RECALL_GONE);
}

/**
 * np_leases_deadline() - until when may regions that go now wait for leases?
 *
 * Return: jiffies.
 */
unsigned long np_leases_deadline(void)
{
	/* Nor does one that ends: its regions would wait one after the other */
	return jiffies + (current->flags & PF_EXITING ? 0 : msecs_to_jiffies(np_recall_time()));
}

/**
 * np_leases_end() - the region goes: recall all leases, and wait for those that peers have
 * @region: region that is gone: np_hold_grant() makes no key of it
 * @deadline: of np_leases_deadline()
 *
 * What a peer writes under a lease it finds written, and nothing tells it otherwise. So the
 * pages stay where they are until it has given the lease back, or its key has ended: see
 * np_keys_free_leases(). A process that was killed gives it no time, as its queue pairs end in
 * any case.
 *
 * Context: process context; waits for np_recall_ms at most.
 */
void np_leases_end(struct np_region *region, unsigned long deadline)
{
	long left;

	np_leases_recall(region);
	left = deadline - jiffies;
	wait_event_killable_timeout(region->unleased, !np_leases_have_keys(region),
				    max(left, 0L));
}

/**
 * np_lease_alloc() - memory for a hold
 * @region: of which
 * @recall: it will be a lease, whose holder this asks; NULL: it will not
 *
 * Reclaim finds a lease in the cgroup that pays for it. That is the one where it counts: its owner
 * may have moved since he registered the region.
 *
 * Context: process context.
 * Return: zeroed; or NULL.
 */
struct np_hold *np_lease_alloc(struct np_region *region, struct np_recall *recall)
{
	struct mem_cgroup *other = NULL;
	struct np_hold *hold;

	if (recall)
		other = set_active_memcg(np_budget_memcg(region->budget));
	hold = kmem_cache_alloc_lru(np_hold_cache, &np_leases,
				    GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (recall)
		set_active_memcg(other);
	if (!hold)
		return NULL;
	INIT_LIST_HEAD(&hold->lru);
	hold->region = region;
	hold->recall = recall;
	return hold;
}

/**
 * np_lease_begin() - from now on a hold may be recalled, if it is a lease
 * @hold: of np_lease_alloc(), with its region
 */
void np_lease_begin(struct np_hold *hold)
{
	if (!hold->recall)
		return;
	atomic64_inc(&hold->region->count->leases);
	list_lru_add_obj(&np_leases, &hold->lru);
}

/**
 * np_lease_end() - a hold is released: from now on memory pressure recalls it no more
 * @hold: hold
 */
void np_lease_end(struct np_hold *hold)
{
	if (!hold->recall)
		return;
	atomic64_inc(&hold->region->count->leases_ended);
	list_lru_del_obj(&np_leases, &hold->lru);
}

/**
 * np_lease_free() - free a hold
 * @hold: of np_lease_alloc(); ended, without pages
 */
void np_lease_free(struct np_hold *hold)
{
	kmem_cache_free(np_hold_cache, hold);
}

/**
 * np_lease_init() - start with ib_core
 *
 * Context: module init.
 * Return: 0 or -ENOMEM.
 */
int np_lease_init(void)
{
	int ret = -ENOMEM;

	np_hold_cache = KMEM_CACHE(np_hold, SLAB_ACCOUNT);
	if (!np_hold_cache)
		return ret;
	np_lease_shrinker = shrinker_alloc(SHRINKER_NUMA_AWARE | SHRINKER_MEMCG_AWARE,
					   "nprdma-leases");
	if (!np_lease_shrinker)
		goto free_cache;
	ret = list_lru_init_memcg(&np_leases, np_lease_shrinker);
	if (ret)
		goto free_shrinker;
	np_lease_shrinker->count_objects = np_lease_count;
	np_lease_shrinker->scan_objects = np_lease_scan;
	np_lease_shrinker->batch = NP_SLOT_PAGES;
	/* What comes back may be in use again at once */
	np_lease_shrinker->seeks = DEFAULT_SEEKS;
	shrinker_register(np_lease_shrinker);
	ret = register_oom_notifier(&np_lease_oom_nb);
	if (!ret)
		return 0;
	shrinker_free(np_lease_shrinker);
	list_lru_destroy(&np_leases);
	goto free_cache;

free_shrinker:
	shrinker_free(np_lease_shrinker);
free_cache:
	kmem_cache_destroy(np_hold_cache);
	return ret;
}

/**
 * np_lease_exit() - end with ib_core; there are no holds any more
 */
void np_lease_exit(void)
{
	unregister_oom_notifier(&np_lease_oom_nb);
	shrinker_free(np_lease_shrinker);
	list_lru_destroy(&np_leases);
	kmem_cache_destroy(np_hold_cache);
}
