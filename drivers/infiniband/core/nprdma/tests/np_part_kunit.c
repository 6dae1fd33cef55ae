// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of the region of a whole address space: which parts are made, for
 * whom, and how they end.
 */
#include <kunit/static_stub.h>
#include <kunit/test.h>
#include <linux/mman.h>
#include <linux/workqueue.h>

#include "np_region_fixture.h"

static void np_test_restore_max_parts(void *most)
{
	np_max_parts = (unsigned long)most;
}

static struct np_region *np_test_whole(struct kunit *test, u32 access)
{
	struct np_test *t = test->priv;
	struct np_region *whole;

	if (!t->va)
		np_test_map(test, PROT_READ | PROT_WRITE);
	KUNIT_ASSERT_EQ(test, 0,
			kunit_add_action_or_reset(test, np_test_restore_max_parts,
						  (void *)(unsigned long)np_max_parts));
	refcount_inc(&t->npdev.users);
	whole = np_region_create(&t->npdev, &t->pd, NULL, &t->fake.domain, 0, PAGE_SIZE, 0,
				 access);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, whole);
	KUNIT_ASSERT_EQ(test, np_parts_begin(whole), 0);
	t->region = whole;
	return whole;
}

static unsigned int np_test_nr_parts(struct np_region *whole)
{
	return list_count_nodes(&whole->parts->all);
}

static struct np_region *np_test_part(struct kunit *test, struct np_region *whole,
				      unsigned long va)
{
	struct np_region *part = np_region_at(whole, va);

	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, part);
	return part;
}

static struct np_local *np_test_local(struct np_region *whole, u64 addr, u64 len)
{
	u64 at;
	u32 lkey;

	return np_local_hold(whole, addr, len, RDMA_NP_FAULT_WRITE, NULL, &at, &lkey);
}

/* Memory of @size bytes on both sides of a boundary of parts. What it is told of it is that */
static unsigned long np_test_map_across(struct kunit *test, unsigned long size)
{
	unsigned long boundary = 64 * NP_PART_SIZE;
	unsigned long va;

	va = kunit_vm_mmap(test, NULL, boundary - size, 2 * size, PROT_READ | PROT_WRITE,
			   MAP_ANONYMOUS | MAP_PRIVATE | MAP_FIXED_NOREPLACE, 0);
	KUNIT_ASSERT_EQ(test, va, boundary - size);
	return boundary;
}

static void np_part_is_made_once_for_its_addresses(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	struct np_test *t = test->priv;
	struct np_region *part, *same;
	struct np_resolve what;

	KUNIT_EXPECT_EQ(test, np_test_nr_parts(whole), 0);
	part = np_test_part(test, whole, t->va + 5);
	KUNIT_EXPECT_PTR_NE(test, part, whole);
	np_region_describe(part, &what);
	KUNIT_EXPECT_EQ(test, what.base, ALIGN_DOWN(t->va, NP_PART_SIZE));
	KUNIT_EXPECT_EQ(test, what.length, NP_PART_SIZE);
	KUNIT_EXPECT_EQ(test, what.part_shift, NP_PART_SHIFT);
	KUNIT_EXPECT_EQ(test, what.access, NP_TEST_ACCESS);
	same = np_test_part(test, whole, t->va + PAGE_SIZE);
	KUNIT_EXPECT_PTR_EQ(test, same, part);
	KUNIT_EXPECT_EQ(test, np_test_nr_parts(whole), 1);
	np_region_put(same);
	np_region_put(part);

	np_region_describe(whole, &what);
	KUNIT_EXPECT_EQ(test, what.base, 0);
	KUNIT_EXPECT_EQ(test, what.length, U64_MAX);
	KUNIT_EXPECT_EQ(test, what.part_shift, 0);
	/* Other regions are what serves all of their addresses */
	np_test_close(t);
	whole = np_test_region(test, 1);
	part = np_test_part(test, whole, 0);
	KUNIT_EXPECT_PTR_EQ(test, part, whole);
	np_region_put(part);
}

static void np_part_is_made_where_the_owner_has_memory(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	unsigned long va = 64 * NP_PART_SIZE;

	KUNIT_EXPECT_EQ(test, PTR_ERR(np_region_at(whole, 0)), -EFAULT);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_region_at(whole, va)), -EFAULT);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_region_at(whole, U64_MAX)), -EFAULT);
	/* Nor where nobody may read it */
	KUNIT_ASSERT_EQ(test, va, kunit_vm_mmap(test, NULL, va, PAGE_SIZE, PROT_NONE,
						MAP_ANONYMOUS | MAP_PRIVATE |
						MAP_FIXED_NOREPLACE, 0));
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_region_at(whole, va)), -EFAULT);
	KUNIT_EXPECT_EQ(test, np_test_nr_parts(whole), 0);
}

/* RESOLVE is served by workers that are few, and the owner keeps his lock as he likes */
static void np_part_does_not_wait_for_the_owner(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	struct np_test *t = test->priv;
	struct np_region *part, *again;

	mmap_write_lock(current->mm);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_region_at(whole, t->va)), -EAGAIN);
	mmap_write_unlock(current->mm);
	KUNIT_EXPECT_EQ(test, np_errno_to_status(-EAGAIN), RDMA_NP_BUSY);
	part = np_test_part(test, whole, t->va);
	/* One that is there needs no look */
	mmap_write_lock(current->mm);
	again = np_region_at(whole, t->va);
	mmap_write_unlock(current->mm);
	KUNIT_EXPECT_PTR_EQ(test, again, part);
	np_region_put(again);
	np_region_put(part);
}

static void np_parts_of_an_owner_are_bounded(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	unsigned long boundary = np_test_map_across(test, PAGE_SIZE);
	struct np_test *t = test->priv;
	struct np_region *part;

	np_max_parts = 1;
	part = np_test_part(test, whole, t->va);
	np_region_put(part);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_region_at(whole, boundary)), -EBUSY);
	KUNIT_EXPECT_EQ(test, np_errno_to_status(-EBUSY), RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, np_test_nr_parts(whole), 1);
	np_max_parts = 2;
	part = np_test_part(test, whole, boundary);
	np_region_put(part);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_part_of_hold(whole, boundary - 1, 2)), -EBUSY);

	/* Another region of his counts as well; and when this one ends there is room */
	np_test_close(t);
	whole = np_test_whole(test, NP_TEST_ACCESS);
	part = np_test_part(test, whole, boundary);
	np_region_put(part);
}

/* Parts stay, and without one for his buffer the owner's own work request fails */
static void np_peers_leave_parts_to_the_owner(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	unsigned long va = 64 * NP_PART_SIZE;
	struct np_region *part;
	struct np_local *local;
	unsigned int i;

	np_max_parts = 8;
	for (i = 0; i < 9; i++)
		KUNIT_ASSERT_EQ(test, va + i * NP_PART_SIZE,
				kunit_vm_mmap(test, NULL, va + i * NP_PART_SIZE, PAGE_SIZE,
					      PROT_READ | PROT_WRITE, MAP_ANONYMOUS |
					      MAP_PRIVATE | MAP_FIXED_NOREPLACE, 0));
	for (i = 0; i < 7; i++) {
		part = np_test_part(test, whole, va + i * NP_PART_SIZE);
		np_region_put(part);
	}
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_region_at(whole, va + 7 * NP_PART_SIZE)), -EBUSY);
	local = np_test_local(whole, va + 7 * NP_PART_SIZE, PAGE_SIZE);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, local);
	/* One that is there is for peers as well */
	part = np_test_part(test, whole, va + 7 * NP_PART_SIZE);
	np_region_put(part);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_local(whole, va + 8 * NP_PART_SIZE, PAGE_SIZE)),
			-EBUSY);
	np_local_release(local);
}

static int np_test_no_iova(struct device *dev, size_t size, size_t align, size_t offset,
			   dma_addr_t *iova)
{
	return -ENOMEM;
}

static void np_part_that_cannot_be_made_leaves_nothing(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	unsigned int users = refcount_read(&whole->users);
	unsigned int refs = kref_read(&whole->ref);
	struct np_test *t = test->priv;

	kunit_activate_static_stub(test, np_iova_reserve, np_test_no_iova);
	for (np_max_parts = 0; np_max_parts < 2; np_max_parts++) {
		KUNIT_EXPECT_EQ(test, PTR_ERR(np_region_at(whole, t->va)),
				np_max_parts ? -ENOMEM : -EBUSY);
		KUNIT_EXPECT_EQ(test, refcount_read(&whole->users), users);
		KUNIT_EXPECT_EQ(test, kref_read(&whole->ref), refs);
		KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 2);
		KUNIT_EXPECT_TRUE(test, list_empty(&whole->parts->all));
		KUNIT_EXPECT_TRUE(test, xa_empty(&whole->parts->at));
	}
}

/* Only its parts are */
static void np_whole_is_never_resident(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	struct np_test *t = test->priv;
	struct np_region *part;
	struct np_stats stats;

	KUNIT_EXPECT_EQ(test, np_region_fault(whole, t->va, PAGE_SIZE, 0, NULL, NULL, 0),
			-ERANGE);
	part = np_test_part(test, whole, t->va);
	t->fake.region = part;
	KUNIT_EXPECT_EQ(test, np_region_fault(part, t->va, 2 * PAGE_SIZE, 0, NULL, NULL, 0), 0);
	KUNIT_EXPECT_EQ(test, np_region_fault(part, t->va, PAGE_SIZE, RDMA_NP_FAULT_WRITE,
					      NULL, NULL, 0), 0);
	KUNIT_EXPECT_EQ(test, np_region_fault(part, part->base, PAGE_SIZE, 0, NULL, NULL, 0),
			part->base == t->va ? 0 : -EFAULT);
	KUNIT_EXPECT_EQ(test, np_region_fault(part, part->base + NP_PART_SIZE - 1, 2, 0, NULL,
					      NULL, 0), -ERANGE);
	/* What happens to parts the public MR tells */
	np_region_stats(whole, &stats);
	KUNIT_EXPECT_EQ(test, stats.resident, 2);
	KUNIT_EXPECT_EQ(test, stats.writable, 1);

	/* The owner's memory goes: so do the pages of the part */
	np_test_unmap(t, 0, NP_SLOT_PAGES);
	np_region_stats(whole, &stats);
	KUNIT_EXPECT_EQ(test, stats.resident, 0);
	KUNIT_EXPECT_EQ(test, np_region_fault(part, t->va, PAGE_SIZE, 0, NULL, NULL, 0), -EFAULT);
	t->fake.region = NULL;
	np_region_put(part);
}

/* Who asks with which address is told what */
static const struct np_msg *np_test_resolve_at(struct kunit *test, struct np_test_peer *peer,
					       u32 rkey, unsigned long va)
{
	struct np_msg msg = { .type = NP_MSG_RESOLVE, .rkey = rkey, .addr = va };

	return np_test_asks(test, peer, &msg, 0);
}

static void np_peers_resolve_parts_by_address(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	unsigned long boundary = np_test_map_across(test, PAGE_SIZE);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct np_region *parts[2];
	struct np_resolve low, high;
	const struct np_msg *answer;

	KUNIT_ASSERT_EQ(test, np_name_take(&t->npdev, 7, whole), 0);
	/* Made and freed here: workers that serve a peer find no stubs of the DMA API */
	parts[0] = np_test_part(test, whole, boundary - 1);
	parts[1] = np_test_part(test, whole, boundary);
	answer = np_test_resolve_at(test, peer, 7, boundary - 1);
	KUNIT_ASSERT_EQ(test, answer->status, RDMA_NP_OK);
	low = answer->region;
	answer = np_test_resolve_at(test, peer, 7, boundary);
	KUNIT_ASSERT_EQ(test, answer->status, RDMA_NP_OK);
	high = answer->region;
	KUNIT_EXPECT_EQ(test, low.base, boundary - NP_PART_SIZE);
	KUNIT_EXPECT_EQ(test, high.base, boundary);
	KUNIT_EXPECT_EQ(test, high.part_shift, NP_PART_SHIFT);
	KUNIT_EXPECT_NE(test, low.id, high.id);
	KUNIT_EXPECT_NE(test, low.read_key, high.read_key);
	KUNIT_EXPECT_NULL(test, np_resolve_accept(&high));
	KUNIT_EXPECT_EQ(test, t->live_keys, 6);
	/* The same once more; and where nothing is, which is no promise that the key is none's */
	answer = np_test_resolve_at(test, peer, 7, boundary);
	KUNIT_EXPECT_EQ(test, answer->region.id, high.id);
	answer = np_test_resolve_at(test, peer, 7, 0);
	KUNIT_EXPECT_EQ(test, answer->status, RDMA_NP_ADDRESS);
	KUNIT_EXPECT_EQ(test, t->live_keys, 6);
	KUNIT_EXPECT_NULL(test, t->npdev.promises);

	/* Keys of both outlive the whole, until the peer has forgotten them */
	xa_erase(&t->npdev.rkeys, 7);
	np_region_close(whole);
	KUNIT_EXPECT_EQ(test, t->live_keys, 6);
	np_test_forget(test, peer, low.id);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	np_test_forget(test, peer, high.id);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	flush_workqueue(np_wq);
	np_region_put(parts[0]);
	np_region_put(parts[1]);
}

static void np_part_is_not_made_for_who_is_told_nothing(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, IB_ACCESS_LOCAL_WRITE | IB_ACCESS_UNPINNED);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);

	KUNIT_ASSERT_EQ(test, np_name_take(&t->npdev, 7, whole), 0);
	KUNIT_EXPECT_EQ(test, np_test_resolve_at(test, peer, 7, t->va)->status, RDMA_NP_ACCESS);
	/* Nor for who is in another PD */
	peer->fake.peer.pd = &t->public_pd;
	KUNIT_EXPECT_EQ(test, np_test_resolve_at(test, peer, 7, t->va)->status, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, np_test_nr_parts(whole), 0);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	xa_erase(&t->npdev.rkeys, 7);
}

/* Of one part if it can be; a work request cannot be split where parts meet */
static void np_hold_across_parts_has_its_own(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	unsigned long boundary = np_test_map_across(test, 4 * PAGE_SIZE);
	struct np_test *t = test->priv;
	struct np_local *low, *across;
	struct np_stats stats;

	low = np_test_local(whole, boundary - PAGE_SIZE, PAGE_SIZE);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, low);
	KUNIT_EXPECT_EQ(test, np_test_nr_parts(whole), 1);
	KUNIT_EXPECT_EQ(test, t->live_keys, 1);
	across = np_test_local(whole, boundary - PAGE_SIZE - 1, PAGE_SIZE + 2);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, across);
	KUNIT_EXPECT_EQ(test, np_test_nr_parts(whole), 2);
	KUNIT_EXPECT_EQ(test, t->live_keys, 2);
	np_region_stats(whole, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 4);

	np_local_release(across);
	KUNIT_EXPECT_EQ(test, np_test_nr_parts(whole), 1);
	KUNIT_EXPECT_EQ(test, t->live_keys, 1);
	np_local_release(low);
	/* That one stays, for the next */
	KUNIT_EXPECT_EQ(test, np_test_nr_parts(whole), 1);
	KUNIT_EXPECT_EQ(test, t->live_keys, 1);
	np_region_stats(whole, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 0);

	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_local(whole, boundary - 1, U64_MAX)), -ERANGE);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_local(whole, TASK_SIZE - 1, 2)), -ERANGE);
	/* No work request has such a buffer, and its windows would take what others need */
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_local(whole, boundary - 1, SZ_4G)), -ERANGE);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_local(whole, 0, PAGE_SIZE)), -EFAULT);
	/* It begins in memory, and ends where there is none */
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_local(whole, boundary - 1, 5 * PAGE_SIZE)), -EFAULT);
	KUNIT_EXPECT_EQ(test, np_test_nr_parts(whole), 1);
}

struct np_test_release {
	struct work_struct work;
	struct np_local *local;
	struct completion done;
};

static void np_test_releases(struct work_struct *work)
{
	struct np_test_release *release = container_of(work, struct np_test_release, work);

	np_local_release(release->local);
	complete(&release->done);
}

/* Who makes a part may wait, with the lock, for memory that such a hold pins */
static void np_end_of_a_hold_does_not_wait_for_who_makes_parts(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	struct np_test *t = test->priv;
	struct np_test_release release;

	release.local = np_test_local(whole, t->va, PAGE_SIZE);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, release.local);
	init_completion(&release.done);
	INIT_WORK_ONSTACK(&release.work, np_test_releases);
	mutex_lock(&whole->parts->lock);
	queue_work(system_unbound_wq, &release.work);
	KUNIT_EXPECT_NE(test, 0, wait_for_completion_timeout(&release.done, 10 * HZ));
	mutex_unlock(&whole->parts->lock);
	flush_work(&release.work);
	destroy_work_on_stack(&release.work);
	KUNIT_EXPECT_EQ(test, np_test_nr_parts(whole), 1);
}

static void np_end_of_the_whole_ends_its_parts(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	unsigned long boundary = np_test_map_across(test, PAGE_SIZE);
	struct np_test *t = test->priv;
	struct np_local *local, *across;
	struct np_region *part;

	part = np_test_part(test, whole, boundary);
	local = np_test_local(whole, boundary, PAGE_SIZE);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, local);
	across = np_test_local(whole, boundary - PAGE_SIZE, 2 * PAGE_SIZE);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, across);
	KUNIT_EXPECT_TRUE(test, np_local_is_needed(local));

	np_region_close(whole);
	KUNIT_EXPECT_TRUE(test, np_region_is_gone(whole));
	KUNIT_EXPECT_TRUE(test, np_region_is_gone(part));
	KUNIT_EXPECT_EQ(test, np_test_nr_parts(whole), 0);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_FALSE(test, np_local_is_needed(local));
	KUNIT_EXPECT_FALSE(test, np_local_is_needed(across));
	KUNIT_EXPECT_EQ(test, refcount_read(&whole->users), 0);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_region_at(whole, boundary)), -ENXIO);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_local(whole, boundary - 1, 2)), -ENXIO);
	KUNIT_EXPECT_EQ(test, np_region_fault(part, boundary, PAGE_SIZE, 0, NULL, NULL, 0), -ENXIO);

	/* They may end in any order */
	np_local_release(across);
	np_local_release(local);
	KUNIT_EXPECT_EQ(test, kref_read(&part->ref), 1);
	np_region_put(part);
	KUNIT_EXPECT_EQ(test, kref_read(&whole->ref), 1);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 2);
}

struct np_test_leases {
	struct np_test_part_lease {
		struct np_recall recall;
		struct np_test_leases *all;
		struct np_hold *hold;
	} of[2];
	atomic_t recalled;
	struct work_struct work;
};

static void np_test_gives_both_back(struct work_struct *work)
{
	struct np_test_leases *leases = container_of(work, struct np_test_leases, work);
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(leases->of); i++) {
		np_hold_revoke(leases->of[i].hold, false);
		np_hold_release(leases->of[i].hold);
	}
}

static void np_test_recalls_one(struct np_recall *recall)
{
	struct np_test_leases *all =
		container_of(recall, struct np_test_part_lease, recall)->all;

	if (atomic_inc_return(&all->recalled) == ARRAY_SIZE(all->of))
		queue_work(system_unbound_wq, &all->work);
}

/* I11. Here none comes back before all are recalled: who waits for the first one waits in vain */
static void np_leases_of_all_parts_are_recalled_at_once(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	unsigned long boundary = np_test_map_across(test, PAGE_SIZE);
	unsigned int recall_ms = np_recall_ms;
	struct np_test_leases leases = {};
	struct np_region *parts[2];
	unsigned int i;
	u32 rkey;
	u64 addr;

	INIT_WORK_ONSTACK(&leases.work, np_test_gives_both_back);
	for (i = 0; i < ARRAY_SIZE(parts); i++) {
		addr = boundary - PAGE_SIZE + i * PAGE_SIZE;
		parts[i] = np_test_part(test, whole, addr);
		leases.of[i].recall.fn = np_test_recalls_one;
		leases.of[i].all = &leases;
		leases.of[i].hold = np_hold_alloc(parts[i], 0, &leases.of[i].recall);
		KUNIT_ASSERT_NOT_NULL(test, leases.of[i].hold);
		KUNIT_ASSERT_EQ(test, np_region_fault(parts[i], addr, PAGE_SIZE, 0,
						      leases.of[i].hold, NULL, 0), 0);
		KUNIT_ASSERT_EQ(test, np_hold_grant(leases.of[i].hold, addr, PAGE_SIZE, &rkey), 0);
	}
	KUNIT_EXPECT_PTR_NE(test, parts[0], parts[1]);

	WRITE_ONCE(np_recall_ms, 5000);
	np_region_close(whole);
	WRITE_ONCE(np_recall_ms, recall_ms);
	flush_work(&leases.work);
	destroy_work_on_stack(&leases.work);
	KUNIT_EXPECT_EQ(test, atomic64_read(&whole->count->overdue), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&whole->count->recalls[NP_RECALL_GONE]), 2);
	for (i = 0; i < ARRAY_SIZE(parts); i++)
		np_region_put(parts[i]);
}

/* Who is still in it, such as a fault that waits for memory, keeps what the whole has */
static void np_part_that_is_in_use_keeps_the_whole(struct kunit *test)
{
	struct np_region *whole = np_test_whole(test, NP_TEST_ACCESS);
	struct np_test *t = test->priv;
	struct np_region *part = np_test_part(test, whole, t->va);

	KUNIT_ASSERT_TRUE(test, np_region_enter(part));
	np_test_close(t);
	KUNIT_EXPECT_EQ(test, kref_read(&whole->ref), 1);
	KUNIT_EXPECT_EQ(test, refcount_read(&whole->users), 1);
	np_region_leave(part);
	KUNIT_EXPECT_EQ(test, refcount_read(&whole->users), 0);
	/* The last reference of the part is the last one of the whole */
	np_region_put(part);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
	KUNIT_EXPECT_TRUE(test, list_empty(&t->npdev.regions));
	KUNIT_EXPECT_TRUE(test, xa_empty(&t->fake.slots));
}

static struct kunit_case np_part_cases[] = {
	KUNIT_CASE(np_part_is_made_once_for_its_addresses),
	KUNIT_CASE(np_part_is_made_where_the_owner_has_memory),
	KUNIT_CASE(np_part_does_not_wait_for_the_owner),
	KUNIT_CASE(np_parts_of_an_owner_are_bounded),
	KUNIT_CASE(np_peers_leave_parts_to_the_owner),
	KUNIT_CASE(np_part_that_cannot_be_made_leaves_nothing),
	KUNIT_CASE(np_whole_is_never_resident),
	KUNIT_CASE(np_peers_resolve_parts_by_address),
	KUNIT_CASE(np_part_is_not_made_for_who_is_told_nothing),
	KUNIT_CASE(np_hold_across_parts_has_its_own),
	KUNIT_CASE(np_end_of_a_hold_does_not_wait_for_who_makes_parts),
	KUNIT_CASE(np_end_of_the_whole_ends_its_parts),
	KUNIT_CASE(np_leases_of_all_parts_are_recalled_at_once),
	KUNIT_CASE(np_part_that_is_in_use_keeps_the_whole),
	{}
};

static struct kunit_suite np_part_suite = {
	.name = "nprdma_region_part",
	.init = np_test_init,
	.test_cases = np_part_cases,
};

kunit_test_suite(np_part_suite);
