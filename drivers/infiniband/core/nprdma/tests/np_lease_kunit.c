// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of leases: who is asked to give one back, when, and how often.
 */
#include <kunit/test.h>
#include <linux/delay.h>
#include <linux/memcontrol.h>
#include <linux/sched/mm.h>
#include <linux/shrinker.h>

#include "np_region_fixture.h"

struct np_test_lease {
	struct np_recall recall;
	struct np_local *local;
	struct work_struct work;
	unsigned int recalled;
};

static void np_test_recalled(struct np_recall *recall)
{
	container_of(recall, struct np_test_lease, recall)->recalled++;
}

static int np_test_lease(struct np_region *region, struct np_test_lease *lease,
			 unsigned int page, unsigned int npages, unsigned int flags)
{
	u64 addr;
	u32 lkey;

	*lease = (struct np_test_lease){ .recall.fn = np_test_recalled };
	lease->local = np_local_hold(region, region->base + page * PAGE_SIZE,
				     npages * PAGE_SIZE, flags, &lease->recall, &addr,
				     &lkey);
	return PTR_ERR_OR_ZERO(lease->local);
}

/* Before the notifier returns: then the owner has other memory there, or none */
static void np_lease_is_recalled_when_its_memory_changes(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_test_lease first, second;
	struct np_test *t = test->priv;
	struct np_stats stats;

	KUNIT_ASSERT_EQ(test, np_test_lease(region, &first, 0, 4, 0), 0);
	KUNIT_ASSERT_EQ(test, np_test_lease(region, &second, 8, 4, RDMA_NP_FAULT_WRITE), 0);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.leases, 2);
	KUNIT_EXPECT_EQ(test, stats.leased, 8);

	np_test_invalidate(t, 4, 4);
	np_test_invalidate(t, 12, 4);
	KUNIT_EXPECT_EQ(test, first.recalled + second.recalled, 0);

	np_test_invalidate(t, 3, 1);
	KUNIT_EXPECT_EQ(test, first.recalled, 1);
	KUNIT_EXPECT_EQ(test, second.recalled, 0);
	np_test_invalidate(t, 7, 2);
	KUNIT_EXPECT_EQ(test, second.recalled, 1);

	/* Once is enough */
	np_test_invalidate(t, 0, 16);
	KUNIT_EXPECT_EQ(test, first.recalled, 1);
	KUNIT_EXPECT_EQ(test, second.recalled, 1);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.recalls_change, 2);
	KUNIT_EXPECT_EQ(test, stats.leased, 8);

	np_local_release(first.local);
	np_local_release(second.local);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.leased, 0);
	KUNIT_EXPECT_EQ(test, stats.held, 0);
	np_test_invalidate(t, 0, 16);
	KUNIT_EXPECT_EQ(test, first.recalled, 1);
}

/* Whoever sends from a page sees what its owner sees, also if he may not write it now */
static void np_lease_to_read_stays_where_only_writing_ends(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test_lease source, sink;
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_lease(region, &source, 0, 4, 0), 0);
	KUNIT_ASSERT_EQ(test, np_test_lease(region, &sink, 0, 4, RDMA_NP_FAULT_WRITE), 0);
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 0, 8);
	KUNIT_EXPECT_EQ(test, source.recalled, 0);
	KUNIT_EXPECT_EQ(test, sink.recalled, 1);
	np_test_invalidate(t, 0, 8);
	KUNIT_EXPECT_EQ(test, source.recalled, 1);
	np_local_release(source.local);
	np_local_release(sink.local);
}

#define NP_TEST_MANY	10000

static void np_test_ignored(struct np_recall *recall)
{
}

/* The shortest of some: others may run in between */
static u64 np_test_time_of_change(struct np_test *t, unsigned int page)
{
	u64 start, least = U64_MAX;
	unsigned int i;

	for (i = 0; i < 50; i++) {
		start = ktime_get_ns();
		np_test_invalidate(t, page, 1);
		least = min(least, ktime_get_ns() - start);
	}
	return least;
}

/* The owner waits for it, and peers can have as many leases as they like */
static void np_change_looks_at_no_other_leases(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_recall recall = { .fn = np_test_ignored };
	struct np_test *t = test->priv;
	struct np_stats stats;
	struct np_hold **holds;
	unsigned int i, made;
	u64 none, many;

	holds = kunit_kcalloc(test, NP_TEST_MANY, sizeof(*holds), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, holds);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 8, 0), 0);
	none = np_test_time_of_change(t, 4);
	for (made = 0; made < NP_TEST_MANY; made++) {
		holds[made] = np_hold_alloc(region, 0, &recall);
		if (!holds[made])
			break;
		if (np_region_fault(region, region->base, PAGE_SIZE, 0, holds[made], NULL, 0)) {
			np_hold_release(holds[made]);
			break;
		}
	}
	KUNIT_EXPECT_EQ(test, made, NP_TEST_MANY);
	many = np_test_time_of_change(t, 4);
	kunit_info(test, "a change: %llu ns without leases, %llu ns beside %u of them", none,
		   many, made);
	KUNIT_EXPECT_LT(test, many, 4 * none + 10 * NSEC_PER_USEC);

	/* Nor at those that it has recalled before */
	np_test_invalidate(t, 0, 1);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.recalls_change, made);
	many = np_test_time_of_change(t, 0);
	kunit_info(test, "a change: %llu ns with as many that were recalled", many);
	KUNIT_EXPECT_LT(test, many, 4 * none + 10 * NSEC_PER_USEC);
	for (i = 0; i < made; i++)
		np_hold_release(holds[i]);
}

/* Of a hold that is none nobody asks anything */
static void np_hold_is_no_lease(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test *t = test->priv;
	struct np_stats stats;
	struct np_hold *hold;

	hold = np_test_hold(test, region, 0, 8, RDMA_NP_FAULT_WRITE);
	np_test_invalidate(t, 0, 8);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.leases, 0);
	KUNIT_EXPECT_EQ(test, stats.leased, 0);
	KUNIT_EXPECT_EQ(test, stats.recalls_change, 0);
	np_hold_release(hold);
}

static unsigned long np_test_shrink(unsigned long pages)
{
	struct shrinker *shrinker = np_lease_shrinker;
	struct shrink_control sc = { .gfp_mask = GFP_KERNEL };
	unsigned long freed = 0, n;

	for_each_online_node(sc.nid) {
		sc.nr_to_scan = pages;
		sc.nr_scanned = pages;
		n = shrinker->count_objects(shrinker, &sc);
		if (n && n != SHRINK_EMPTY)
			freed += shrinker->scan_objects(shrinker, &sc);
	}
	return freed;
}

/* The oldest first, and no more than are wanted; what is recalled counts no more */
static void np_lease_is_recalled_when_memory_is_short(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_test_lease lease[4];
	struct np_stats stats;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(lease); i++)
		KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease[i], 4 * i, 4, 0), 0);
	KUNIT_EXPECT_GT(test, np_test_shrink(2 * NP_SLOT_PAGES), 0);
	/* Nodes are shrunk each for itself */
	KUNIT_EXPECT_EQ(test, lease[0].recalled, 1);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_GE(test, stats.recalls_memory, 1);
	if (num_online_nodes() == 1) {
		KUNIT_EXPECT_EQ(test, lease[1].recalled, 1);
		KUNIT_EXPECT_EQ(test, lease[2].recalled, 0);
		KUNIT_EXPECT_EQ(test, lease[3].recalled, 0);
	}

	np_test_shrink(100 * NP_SLOT_PAGES);
	KUNIT_EXPECT_EQ(test, np_test_shrink(100 * NP_SLOT_PAGES), 0);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.recalls_memory, 4);
	for (i = 0; i < ARRAY_SIZE(lease); i++) {
		KUNIT_EXPECT_EQ(test, lease[i].recalled, 1);
		np_local_release(lease[i].local);
	}
}

/*
 * Reclaim for a cgroup sees that there is something to wait for, as long as there is, and a
 * moment only. The test is a kernel thread, and does not wait.
 */
static void np_recall_is_seen_by_reclaim_of_its_cgroup(struct kunit *test)
{
	struct shrink_control sc = { .gfp_mask = GFP_KERNEL, .nr_to_scan = 1, .nr_scanned = 1 };
	struct np_region *region = np_test_region(test, 8);
	struct shrinker *shrinker = np_lease_shrinker;
	struct np_test *t = test->priv;
	struct np_test_lease lease;
	struct mem_cgroup *memcg;

	if (!IS_ENABLED(CONFIG_MEMCG))
		kunit_skip(test, "there are no memory cgroups");
	memcg = get_mem_cgroup_from_mm(current->mm);
	sc.nid = first_online_node;
	sc.memcg = memcg;
	KUNIT_EXPECT_EQ(test, shrinker->count_objects(shrinker, &sc), SHRINK_EMPTY);
	KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease, 0, 4, 0), 0);
	np_test_invalidate(t, 0, 1);
	KUNIT_EXPECT_EQ(test, shrinker->count_objects(shrinker, &sc), 1);
	KUNIT_EXPECT_EQ(test, shrinker->scan_objects(shrinker, &sc), SHRINK_STOP);
	np_local_release(lease.local);
	KUNIT_EXPECT_EQ(test, shrinker->count_objects(shrinker, &sc), SHRINK_EMPTY);

	KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease, 0, 4, 0), 0);
	np_test_invalidate(t, 0, 1);
	msleep(300);
	KUNIT_EXPECT_EQ(test, shrinker->count_objects(shrinker, &sc), SHRINK_EMPTY);
	np_local_release(lease.local);
	mem_cgroup_put(memcg);
}

/* Unless they charge somebody, as the workers do that serve peers */
static void np_kernel_threads_do_not_wait(struct kunit *test)
{
	struct shrink_control sc = { .gfp_mask = GFP_KERNEL };
	struct mem_cgroup *other;
	unsigned int reclaims;

	if (!IS_ENABLED(CONFIG_MEMCG))
		kunit_skip(test, "there are no memory cgroups");
	sc.memcg = get_mem_cgroup_from_mm(current->mm);
	reclaims = memalloc_noreclaim_save();
	KUNIT_EXPECT_FALSE(test, np_may_wait(&sc));
	other = set_active_memcg(sc.memcg);
	KUNIT_EXPECT_TRUE(test, np_may_wait(&sc));
	memalloc_noreclaim_restore(reclaims);
	/* Who drops caches needs no memory */
	KUNIT_EXPECT_FALSE(test, np_may_wait(&sc));
	set_active_memcg(other);
	mem_cgroup_put(sc.memcg);
}

/* A cgroup's charge that fails is not waited for; one that file systems make is */
static void np_who_would_rather_fail_does_not_wait(struct kunit *test)
{
	static const gfp_t waits[] = { GFP_KERNEL, GFP_NOFS, GFP_NOIO, GFP_HIGHUSER_MOVABLE };
	static const gfp_t fails[] = { GFP_NOWAIT, GFP_ATOMIC, GFP_KERNEL | __GFP_NORETRY,
				       GFP_KERNEL | __GFP_RETRY_MAYFAIL };
	struct shrink_control sc = {};
	struct mem_cgroup *other;
	unsigned int reclaims, i;

	if (!IS_ENABLED(CONFIG_MEMCG))
		kunit_skip(test, "there are no memory cgroups");
	sc.memcg = get_mem_cgroup_from_mm(current->mm);
	other = set_active_memcg(sc.memcg);
	reclaims = memalloc_noreclaim_save();
	for (i = 0; i < ARRAY_SIZE(waits); i++) {
		sc.gfp_mask = waits[i];
		KUNIT_EXPECT_TRUE_MSG(test, np_may_wait(&sc), "%u", i);
	}
	for (i = 0; i < ARRAY_SIZE(fails); i++) {
		sc.gfp_mask = fails[i];
		KUNIT_EXPECT_FALSE_MSG(test, np_may_wait(&sc), "%u", i);
	}
	memalloc_noreclaim_restore(reclaims);
	set_active_memcg(other);
	mem_cgroup_put(sc.memcg);
}

static unsigned long np_test_most(void)
{
	return totalram_pages() / 100 * np_lease_percent;
}

/* What counts for leases of a region of another process */
static struct np_region *np_test_neighbour(struct kunit *test)
{
	struct np_region *neighbour;

	neighbour = kunit_kzalloc(test, sizeof(*neighbour), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, neighbour);
	neighbour->mm = kunit_kzalloc(test, sizeof(*neighbour->mm), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, neighbour->mm);
	neighbour->budget = np_budget_get(neighbour->mm);
	KUNIT_ASSERT_NOT_NULL(test, neighbour->budget);
	return neighbour;
}

/* Who gets none is told at once, is charged nothing, and finds room later */
static void np_leases_are_bounded(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	u64 charged = atomic64_read(&current->mm->pinned_vm);
	struct np_test_lease lease, other;
	struct np_region *neighbour;
	struct np_stats stats;
	unsigned long all;

	neighbour = np_test_neighbour(test);
	KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease, 0, 4, 0), 0);
	all = np_test_most() - np_leased_pages();
	KUNIT_ASSERT_EQ(test, np_lease_reserve(neighbour, all, 0), 0);
	/* Who has little asks for much: he may come with less */
	KUNIT_EXPECT_EQ(test, np_lease_reserve(region, np_test_most() / 2, 0), -EBUSY);
	KUNIT_EXPECT_EQ(test, lease.recalled, 0);
	KUNIT_EXPECT_EQ(test, np_test_lease(region, &other, 4, 4, 0), -EBUSY);
	KUNIT_EXPECT_EQ(test, lease.recalled, 1);
	KUNIT_EXPECT_EQ(test, atomic64_read(&current->mm->pinned_vm), charged + 4);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.recalls_budget, 1);
	KUNIT_EXPECT_EQ(test, stats.leased, 4);
	np_local_release(lease.local);
	KUNIT_EXPECT_EQ(test, atomic64_read(&current->mm->pinned_vm), charged);

	/* Nothing is left of it in what all together may have */
	KUNIT_EXPECT_EQ(test, np_leased_pages(), all);
	np_lease_unreserve(neighbour, all);
	KUNIT_EXPECT_EQ(test, np_test_lease(region, &other, 4, 4, 0), 0);
	np_local_release(other.local);
	np_budget_put(neighbour->budget);
}

/*
 * Who ends one may be what somebody waits for who is in reclaim, and in another cgroup: with
 * lockdep the kernel says whether both need the same lock
 */
static void np_budget_may_end_while_memory_is_short(struct kunit *test)
{
	struct np_region *neighbour = np_test_neighbour(test);
	struct np_budget *again;

	again = np_budget_get(neighbour->mm);
	KUNIT_EXPECT_PTR_EQ(test, again, neighbour->budget);
	fs_reclaim_acquire(GFP_KERNEL);
	np_budget_put(again);
	np_budget_put(neighbour->budget);
	fs_reclaim_release(GFP_KERNEL);
}

/* Its process is stopped, say, or does not care: others get leases all the same */
static void np_recall_that_is_ignored_costs_others_nothing(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_region *first = np_test_neighbour(test);
	struct np_region *second = np_test_neighbour(test);
	unsigned int recall_ms = np_recall_ms;
	struct np_test_lease lease;
	unsigned long all;
	bool got;

	WRITE_ONCE(np_recall_ms, 60000);
	KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease, 0, 4, 0), 0);
	all = np_test_most() - np_leased_pages();
	KUNIT_ASSERT_EQ(test, np_lease_reserve(first, all, 0), 0);
	KUNIT_EXPECT_EQ(test, np_lease_reserve(second, 4, 0), -EBUSY);
	KUNIT_EXPECT_EQ(test, lease.recalled, 1);
	/* He has some time */
	KUNIT_EXPECT_EQ(test, np_lease_reserve(second, 4, 0), -EBUSY);
	WRITE_ONCE(np_recall_ms, 10);
	msleep(30);
	KUNIT_EXPECT_EQ(test, np_lease_reserve(second, 5, 0), -EBUSY);
	got = !np_lease_reserve(second, 4, 0);
	KUNIT_EXPECT_TRUE(test, got);
	WRITE_ONCE(np_recall_ms, recall_ms);
	KUNIT_EXPECT_EQ(test, np_leased_pages(), all + 4);
	/* It counts no more when it is given back in the end */
	np_local_release(lease.local);
	KUNIT_EXPECT_EQ(test, np_leased_pages(), all + 4);
	if (got)
		np_lease_unreserve(second, 4);
	np_lease_unreserve(first, all);
	KUNIT_EXPECT_EQ(test, np_leased_pages(), 0);
	np_budget_put(second->budget);
	np_budget_put(first->budget);
}

/* Who ignores recalls gets no more leases than who has these and was not asked for them */
static void np_recall_that_is_ignored_counts_for_its_process(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_region *other = np_test_neighbour(test);
	unsigned long most = np_test_most(), rest = most - most / 2;
	unsigned int recall_ms = np_recall_ms;
	struct np_own_lease kept, next;

	KUNIT_ASSERT_EQ(test, np_own_lease_reserve(&kept, region, most / 2 + 1), 0);
	np_own_lease_recalled(&kept);
	WRITE_ONCE(np_recall_ms, 10);
	msleep(30);
	/* Nobody wants it */
	KUNIT_EXPECT_EQ(test, np_lease_reserve(other, 1, 0), 0);
	np_lease_unreserve(other, 1);
	KUNIT_EXPECT_EQ(test, np_leased_pages(), most / 2 + 1);
	KUNIT_ASSERT_EQ(test, np_lease_reserve(other, most, 0), 0);
	np_lease_unreserve(other, most);
	WRITE_ONCE(np_recall_ms, recall_ms);
	KUNIT_EXPECT_EQ(test, np_leased_pages(), 0);

	KUNIT_EXPECT_EQ(test, np_own_lease_reserve(&next, region, rest), -EBUSY);
	/* Peers of that process have not ignored anything */
	KUNIT_EXPECT_EQ(test, np_lease_reserve(region, rest, 0), 0);
	np_lease_unreserve(region, rest);
	np_own_lease_unreserve(&kept);
	KUNIT_EXPECT_EQ(test, np_leased_pages(), 0);
	KUNIT_ASSERT_EQ(test, np_own_lease_reserve(&next, region, rest), 0);
	np_own_lease_unreserve(&next);
	KUNIT_EXPECT_EQ(test, np_leased_pages(), 0);
	np_budget_put(other->budget);
}

#define NP_TEST_OVERDUE	200

/* However many there are, though recalls need the lock meanwhile */
static void np_all_overdue_leases_are_found(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_region *other = np_test_neighbour(test);
	unsigned int recall_ms = np_recall_ms;
	struct np_own_lease *own;
	unsigned int i;

	own = kunit_kcalloc(test, NP_TEST_OVERDUE, sizeof(*own), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, own);
	for (i = 0; i < NP_TEST_OVERDUE; i++) {
		KUNIT_EXPECT_EQ(test, np_own_lease_reserve(&own[i], region, 1), 0);
		np_own_lease_recalled(&own[i]);
	}
	WRITE_ONCE(np_recall_ms, 10);
	msleep(30);
	/* It takes the room of all of them */
	KUNIT_EXPECT_EQ(test, np_lease_reserve(other, np_test_most(), 0), 0);
	WRITE_ONCE(np_recall_ms, recall_ms);
	np_lease_unreserve(other, np_test_most());
	for (i = 0; i < NP_TEST_OVERDUE; i++)
		np_own_lease_unreserve(&own[i]);
	KUNIT_EXPECT_EQ(test, np_leased_pages(), 0);
	np_budget_put(other->budget);
}

/* Who has much, or wants more than there can be, makes nobody give back anything */
static void np_greed_recalls_no_lease(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	unsigned long most = np_test_most();
	struct np_test_lease lease;

	KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease, 0, 4, 0), 0);
	KUNIT_EXPECT_EQ(test, np_lease_reserve(region, most + 1, 0), -EBUSY);
	KUNIT_EXPECT_EQ(test, np_lease_reserve(region, ULONG_MAX, 0), -EBUSY);
	KUNIT_EXPECT_EQ(test, np_lease_reserve(region, most - 8, most / 2), -EBUSY);
	KUNIT_EXPECT_EQ(test, np_lease_reserve(region, 1, most + 1), -EBUSY);
	/* A third of it twice is not more than is left, a third time it is */
	KUNIT_EXPECT_EQ(test, np_lease_reserve(region, most / 3, 0), 0);
	KUNIT_EXPECT_EQ(test, np_lease_reserve(region, most / 3, 0), -EBUSY);
	KUNIT_EXPECT_EQ(test, lease.recalled, 0);
	np_lease_unreserve(region, most / 3);
	KUNIT_EXPECT_EQ(test, np_leased_pages(), 4);
	np_local_release(lease.local);
}

static void np_room_is_made_by_few_leases(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 20);
	struct np_test_lease *lease;
	unsigned int i, nr = 0;

	lease = kunit_kcalloc(test, 20, sizeof(*lease), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, lease);
	for (i = 0; i < 20; i++)
		KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease[i], i, 1, 0), 0);
	np_leases_make_room(ULONG_MAX, NULL);
	for (i = 0; i < 20; i++) {
		nr += lease[i].recalled;
		np_local_release(lease[i].local);
	}
	KUNIT_EXPECT_EQ(test, nr, 16);
}

static void np_test_obeys(struct work_struct *work)
{
	struct np_test_lease *lease = container_of(work, struct np_test_lease, work);

	np_local_release(lease->local);
}

static void np_test_recalled_at_once(struct np_recall *recall)
{
	schedule_work(&container_of(recall, struct np_test_lease, recall)->work);
}

/* What comes back before somebody is killed for memory may save him */
static void np_leases_are_recalled_before_a_kill(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test_lease lease, stays;
	unsigned long freed = 0;
	u64 start;

	KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease, 0, 4, 0), 0);
	KUNIT_ASSERT_EQ(test, np_test_lease(region, &stays, 4, 1, 0), 0);
	INIT_WORK_ONSTACK(&lease.work, np_test_obeys);
	lease.recall.fn = np_test_recalled_at_once;
	KUNIT_EXPECT_EQ(test, np_lease_oom(NULL, 0, &freed), NOTIFY_OK);
	KUNIT_EXPECT_EQ(test, freed, 4);
	KUNIT_EXPECT_EQ(test, stays.recalled, 1);
	flush_work(&lease.work);
	destroy_work_on_stack(&lease.work);

	/* Whoever leases again and again does not keep it from killing */
	KUNIT_EXPECT_EQ(test, np_test_lease(region, &lease, 0, 4, 0), -EBUSY);
	/* Nor does who has had his time */
	msleep(NP_OOM_MS);
	start = ktime_get_ns();
	KUNIT_EXPECT_EQ(test, np_lease_oom(NULL, 0, &freed), NOTIFY_OK);
	KUNIT_EXPECT_LT(test, ktime_get_ns() - start, 100 * NSEC_PER_MSEC);
	KUNIT_EXPECT_EQ(test, freed, 4);
	np_local_release(stays.local);
	np_leases_pause(0);
	KUNIT_EXPECT_EQ(test, np_test_lease(region, &lease, 0, 4, 0), 0);
	np_local_release(lease.local);
}

/* It may be a receive, which nobody sends to: what has come back may be enough without it */
static void np_lease_that_stays_delays_no_other(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test_lease lease, stays;
	u64 start, least = U64_MAX;
	unsigned long freed = 0;
	unsigned int i;

	/* The shortest of some: the machine may be busy */
	for (i = 0; i < 20 && least > 100 * NSEC_PER_MSEC; i++) {
		KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease, 0, 4, 0), 0);
		KUNIT_ASSERT_EQ(test, np_test_lease(region, &stays, 4, 1, 0), 0);
		INIT_WORK_ONSTACK(&lease.work, np_test_obeys);
		lease.recall.fn = np_test_recalled_at_once;
		start = ktime_get_ns();
		KUNIT_EXPECT_EQ(test, np_lease_oom(NULL, 0, &freed), NOTIFY_OK);
		least = min(least, ktime_get_ns() - start);
		flush_work(&lease.work);
		destroy_work_on_stack(&lease.work);
		np_local_release(stays.local);
		np_leases_pause(0);
	}
	KUNIT_EXPECT_LE(test, least, 100 * NSEC_PER_MSEC);
	KUNIT_EXPECT_GE(test, freed, 4);
}

/* However many have it; and one that somebody else holds does not come back */
static void np_page_comes_back_once(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test_lease lease[2];
	unsigned long freed = 0;
	struct np_hold *hold;
	unsigned int i;

	hold = np_test_hold(test, region, 3, 1, 0);
	for (i = 0; i < ARRAY_SIZE(lease); i++) {
		KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease[i], 0, 4, 0), 0);
		INIT_WORK_ONSTACK(&lease[i].work, np_test_obeys);
		lease[i].recall.fn = np_test_recalled_at_once;
	}
	KUNIT_EXPECT_EQ(test, np_lease_oom(NULL, 0, &freed), NOTIFY_OK);
	for (i = 0; i < ARRAY_SIZE(lease); i++) {
		flush_work(&lease[i].work);
		destroy_work_on_stack(&lease[i].work);
	}
	KUNIT_EXPECT_EQ(test, freed, 3);
	np_hold_release(hold);
	np_leases_pause(0);
}

static void np_test_obeys_late(struct work_struct *work)
{
	msleep(50);
	np_test_obeys(work);
}

/* Reclaim comes first, and recalls it: its end is waited for all the same */
static void np_lease_that_reclaim_wants_is_waited_for(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test_lease lease;
	unsigned long freed = 0;
	unsigned int i;

	/* On a busy machine it may come back too early to be seen, or too late */
	for (i = 0; i < 20 && !freed; i++) {
		KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease, 0, 4, 0), 0);
		np_test_shrink(100 * NP_SLOT_PAGES);
		KUNIT_ASSERT_EQ(test, lease.recalled, 1);
		INIT_WORK_ONSTACK(&lease.work, np_test_obeys_late);
		schedule_work(&lease.work);
		KUNIT_EXPECT_EQ(test, np_lease_oom(NULL, 0, &freed), NOTIFY_OK);
		flush_work(&lease.work);
		destroy_work_on_stack(&lease.work);
		np_leases_pause(0);
	}
	KUNIT_EXPECT_EQ(test, freed, 4);
}

/* While reclaim looked elsewhere: it is not to kill before it has looked once more */
static void np_lease_that_has_come_back_counts_once(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test_lease lease;
	unsigned long freed = 0;

	KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease, 0, 4, 0), 0);
	np_test_shrink(100 * NP_SLOT_PAGES);
	KUNIT_ASSERT_EQ(test, lease.recalled, 1);
	np_local_release(lease.local);
	KUNIT_EXPECT_EQ(test, np_lease_oom(NULL, 0, &freed), NOTIFY_OK);
	KUNIT_EXPECT_EQ(test, freed, 4);
	KUNIT_EXPECT_EQ(test, np_lease_oom(NULL, 0, &freed), NOTIFY_OK);
	KUNIT_EXPECT_EQ(test, freed, 4);
	np_leases_pause(0);
}

/* What was only reserved, or given back by itself, is no memory that has come back */
static void np_reservations_save_nobody(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test_lease stays;
	unsigned long freed = 0;

	KUNIT_ASSERT_EQ(test, np_test_lease(region, &stays, 4, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, np_lease_reserve(region, 4, 0), 0);
	np_lease_unreserve(region, 4);
	KUNIT_EXPECT_EQ(test, np_lease_oom(NULL, 0, &freed), NOTIFY_OK);
	KUNIT_EXPECT_EQ(test, freed, 0);
	np_leases_pause(0);
	np_local_release(stays.local);
}

/* It is its own process's memory; the hold is still to be released */
static void np_lease_outlives_its_region(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test_lease lease;

	KUNIT_ASSERT_EQ(test, np_test_lease(region, &lease, 0, 8, 0), 0);
	np_region_close(region);
	KUNIT_EXPECT_FALSE(test, np_local_is_needed(lease.local));
	np_test_shrink(100 * NP_SLOT_PAGES);
	KUNIT_EXPECT_EQ(test, lease.recalled, 1);
	np_local_release(lease.local);
	KUNIT_EXPECT_EQ(test, np_test_shrink(100 * NP_SLOT_PAGES), 0);
}

static struct kunit_case np_lease_cases[] = {
	KUNIT_CASE(np_lease_is_recalled_when_its_memory_changes),
	KUNIT_CASE(np_lease_to_read_stays_where_only_writing_ends),
	KUNIT_CASE(np_change_looks_at_no_other_leases),
	KUNIT_CASE(np_hold_is_no_lease),
	KUNIT_CASE(np_lease_is_recalled_when_memory_is_short),
	KUNIT_CASE(np_recall_is_seen_by_reclaim_of_its_cgroup),
	KUNIT_CASE(np_kernel_threads_do_not_wait),
	KUNIT_CASE(np_who_would_rather_fail_does_not_wait),
	KUNIT_CASE(np_leases_are_bounded),
	KUNIT_CASE(np_budget_may_end_while_memory_is_short),
	KUNIT_CASE(np_recall_that_is_ignored_costs_others_nothing),
	KUNIT_CASE(np_recall_that_is_ignored_counts_for_its_process),
	KUNIT_CASE(np_all_overdue_leases_are_found),
	KUNIT_CASE(np_greed_recalls_no_lease),
	KUNIT_CASE(np_room_is_made_by_few_leases),
	KUNIT_CASE(np_leases_are_recalled_before_a_kill),
	KUNIT_CASE(np_lease_that_stays_delays_no_other),
	KUNIT_CASE(np_page_comes_back_once),
	KUNIT_CASE(np_lease_that_reclaim_wants_is_waited_for),
	KUNIT_CASE(np_lease_that_has_come_back_counts_once),
	KUNIT_CASE(np_reservations_save_nobody),
	KUNIT_CASE(np_lease_outlives_its_region),
	{}
};

/* The kernel has heard of all that came back before */
static int np_lease_test_init(struct kunit *test)
{
	unsigned long freed = 0;

	np_lease_oom(NULL, 0, &freed);
	np_leases_pause(0);
	return np_test_init(test);
}

static struct kunit_suite np_lease_suite = {
	.name = "nprdma_region_lease",
	.init = np_lease_test_init,
	.test_cases = np_lease_cases,
};

kunit_test_suite(np_lease_suite);
