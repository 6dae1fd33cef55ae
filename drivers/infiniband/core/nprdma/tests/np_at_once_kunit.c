// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of faults that are served where they arrive: only if nothing has to
 * be waited for, and else nothing changes.
 */
#include <kunit/static_stub.h>
#include <kunit/test.h>
#include <linux/hmm.h>
#include <linux/mman.h>

#include "np_region_fixture.h"

static struct rdma_np_range np_test_range(struct np_region *region, unsigned int page,
					  unsigned int npages)
{
	return (struct rdma_np_range){
		region->base + page * PAGE_SIZE, npages * PAGE_SIZE,
	};
}

/* @page, and what is there of the first @around pages */
static bool np_test_at_once(struct np_region *region, unsigned int page,
			    unsigned int around, unsigned int flags)
{
	struct rdma_np_range range = np_test_range(region, page, 1);
	struct rdma_np_range all = around ? np_test_range(region, 0, around) : range;
	u64 word = 0;

	if (!np_region_fault_at_once(region, &range, &all, flags, &word, 1))
		return false;
	KUNIT_EXPECT_EQ(kunit_get_current_test(), word, np_word(region, page));
	return true;
}

/* The fault of a page is left to somebody who may wait, and nothing happens. */
static void np_test_left(struct kunit *test, struct np_region *region,
			 unsigned int page, unsigned int flags)
{
	struct np_test *t = test->priv;
	unsigned int changes = t->fake.changes, refused = t->fake.refused;
	struct np_stats before, after;
	u64 word = np_word(region, page);

	np_region_stats(region, &before);
	KUNIT_EXPECT_FALSE(test, np_test_at_once(region, page, 0, flags));
	np_region_stats(region, &after);
	KUNIT_EXPECT_MEMEQ(test, &before, &after, sizeof(after));
	KUNIT_EXPECT_EQ(test, t->fake.changes, changes);
	KUNIT_EXPECT_EQ(test, t->fake.refused, refused);
	KUNIT_EXPECT_EQ(test, np_word(region, page), word);
}

/* Of @npages pages that the owner has, where the last one is resident: there are leaves. */
static struct np_region *np_test_ready(struct kunit *test, unsigned int npages,
				       unsigned int flags)
{
	struct np_region *region = np_test_region(test, npages);
	struct np_test *t = test->priv;
	unsigned int i;

	for (i = 0; i < npages; i++)
		np_touch(test, t->va + i * PAGE_SIZE, i);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, npages - 1, 1, flags), 0);
	return region;
}

static void np_page_that_is_there_comes_at_once(struct kunit *test)
{
	struct np_region *region = np_test_ready(test, 4, RDMA_NP_FAULT_WRITE);
	struct np_test *t = test->priv;
	phys_addr_t paddr = page_to_phys(np_page_at(test, t->va + PAGE_SIZE));
	struct np_stats stats;

	KUNIT_EXPECT_TRUE(test, np_test_at_once(region, 1, 0, 0));
	KUNIT_EXPECT_EQ(test, np_word(region, 1),
			NP_WORD_GENERATION | RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 1), paddr);
	KUNIT_EXPECT_TRUE(test, np_test_at_once(region, 1, 0, RDMA_NP_FAULT_WRITE));
	KUNIT_EXPECT_EQ(test, np_word(region, 1), 2 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 1), paddr);
	KUNIT_EXPECT_TRUE(test, folio_test_dirty(page_folio(np_page_at(test, t->va + PAGE_SIZE))));
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 2), 0);
	KUNIT_EXPECT_TRUE(test, np_test_ask(region, 1, false));
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.faults_at_once, 2);
	KUNIT_EXPECT_EQ(test, stats.faults_minor, 3);
	KUNIT_EXPECT_EQ(test, stats.faults_noop, 0);
	np_test_settled(test);
}

static void np_resident_page_is_told_at_once(struct kunit *test)
{
	struct np_region *region = np_test_ready(test, 4, 0);
	struct np_test *t = test->priv;
	unsigned int syncs = t->fake.syncs;
	struct np_stats stats;

	/* Which needs nothing of the owner's */
	mmap_write_lock(current->mm);
	KUNIT_EXPECT_TRUE(test, np_test_at_once(region, 3, 4, 0));
	mmap_write_unlock(current->mm);
	KUNIT_EXPECT_EQ(test, np_generation(region, 3), 1);
	KUNIT_EXPECT_EQ(test, t->fake.syncs, syncs);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.faults_at_once, 1);
	KUNIT_EXPECT_EQ(test, stats.faults_noop, 1);
	KUNIT_EXPECT_EQ(test, stats.faults_minor, 1);
}

static void np_neighbours_come_at_once_with_one_flush(struct kunit *test)
{
	struct np_region *region = np_test_ready(test, 8, 0);
	struct np_test *t = test->priv;
	unsigned int syncs;
	struct np_stats stats;

	np_test_unmap(t, 4, 1);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 7, 1, 0), 0);
	np_region_stats(region, &stats);
	syncs = t->fake.syncs;
	KUNIT_EXPECT_TRUE(test, np_test_at_once(region, 2, 7, 0));
	KUNIT_EXPECT_EQ(test, t->fake.syncs, syncs + 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_rights(region, 2), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_rights(region, 4), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 6), RDMA_NP_WORD_READABLE);
	np_test_settled(test);
}

/* What reclaim has asked about comes when it is used: what was asked for, not what is near. */
static void np_page_that_was_aged_comes_at_once_if_it_is_used(struct kunit *test)
{
	struct np_region *region = np_test_ready(test, 4, 0);

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 3, 0), 0);
	np_test_age(test, region, 0);
	np_test_age(test, region, 1);
	KUNIT_EXPECT_TRUE(test, np_test_at_once(region, 1, 3, 0));
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_TRUE(test, np_test_ask(region, 1, false));
	np_test_settled(test);
}

/* Nothing is made resident for it. Tried until we come before the worker that makes it absent. */
static void np_resident_page_that_is_asked_for_is_in_use(struct kunit *test)
{
	struct np_region *region = np_test_ready(test, 4, 0);
	struct rdma_np_range range = np_test_range(region, 3, 1);
	unsigned long deadline = jiffies + 30 * HZ;
	struct np_stats before, after;
	bool seen = false;

	while (!seen && time_before(jiffies, deadline)) {
		KUNIT_ASSERT_EQ(test, np_test_fault(region, 3, 1, 0), 0);
		np_region_stats(region, &before);
		np_test_ask(region, 3, true);
		np_region_fault_at_once(region, &range, &range, 0, NULL, 0);
		np_region_stats(region, &after);
		seen = after.faults_noop != before.faults_noop;
		if (seen)
			KUNIT_EXPECT_TRUE(test, np_test_ask(region, 3, false));
	}
	KUNIT_EXPECT_TRUE(test, seen);
}

static void np_locks_are_not_waited_for(struct kunit *test)
{
	struct np_region *region = np_test_ready(test, 4, 0);
	struct np_chunk *chunk = xa_load(&region->chunks, 0);

	mmap_write_lock(current->mm);
	np_test_left(test, region, 1, 0);
	mmap_write_unlock(current->mm);
	mutex_lock(&chunk->lock);
	np_test_left(test, region, 1, 0);
	mutex_unlock(&chunk->lock);
	KUNIT_EXPECT_TRUE(test, np_test_at_once(region, 1, 0, 0));
}

/*
 * Between its beginning and its end all of the chunk counts as being invalidated. The count of
 * the address space is one more than that of the notifier when an invalidation has ended.
 */
static void np_end_of_an_invalidation_is_not_waited_for(struct kunit *test)
{
	struct np_region *region = np_test_ready(test, 4, 0);
	struct np_chunk *chunk = xa_load(&region->chunks, 0);

	chunk->notifier.invalidate_seq++;
	np_test_left(test, region, 1, 0);
	chunk->notifier.invalidate_seq--;
	KUNIT_EXPECT_TRUE(test, np_test_at_once(region, 1, 0, 0));
}

static void np_page_that_is_not_there_is_not_waited_for(struct kunit *test)
{
	struct np_region *region = np_test_ready(test, 4, RDMA_NP_FAULT_WRITE);
	struct np_test *t = test->priv;
	u64 zero;

	KUNIT_EXPECT_EQ(test, t->va, vm_mmap(NULL, t->va, 2 * PAGE_SIZE, PROT_READ | PROT_WRITE,
					     MAP_FIXED | MAP_ANONYMOUS | MAP_PRIVATE, 0));
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 3, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_left(test, region, 0, 0);
	/* The page of zeros: nobody may write that */
	KUNIT_ASSERT_EQ(test, 0, get_user(zero, (u64 __user *)t->va));
	np_test_left(test, region, 0, RDMA_NP_FAULT_WRITE);
	KUNIT_EXPECT_TRUE(test, np_test_at_once(region, 0, 0, 0));
	np_test_settled(test);
}

static void np_leaves_are_not_split_at_once(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	np_touch(test, t->va, 1);
	np_touch(test, t->va + PAGE_SIZE, 1);
	/* There are not even words, and no chunk */
	np_test_left(test, region, 0, 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	/* The write window has one leaf */
	np_test_left(test, region, 1, RDMA_NP_FAULT_WRITE);
	KUNIT_EXPECT_TRUE(test, np_test_at_once(region, 1, 0, 0));
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	/* Nothing is resident, so the slot is merged */
	np_test_invalidate(t, 0, 4);
	KUNIT_EXPECT_EQ(test, np_test_slot(region, t->va)->merges, 1);
	np_test_left(test, region, 1, 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	np_test_left(test, region, 1, RDMA_NP_FAULT_WRITE);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_TRUE(test, np_test_at_once(region, 1, 0, RDMA_NP_FAULT_WRITE));
	np_test_settled(test);
}

static int np_must_not_look(struct hmm_range *range)
{
	KUNIT_FAIL(kunit_get_current_test(), "it would sleep there");
	return -EBUSY;
}

static void np_memory_that_takes_a_lock_to_look_at_is_left_to_others(struct kunit *test)
{
	struct np_region *region = np_test_ready(test, 4, 0);
	struct np_test *t = test->priv;
	struct vm_area_struct *vma;

	mmap_write_lock(current->mm);
	vma = find_vma(current->mm, t->va);
	vm_flags_set(vma, VM_HUGETLB);
	mmap_write_unlock(current->mm);
	kunit_activate_static_stub(test, np_hmm_range_fault, np_must_not_look);
	np_test_left(test, region, 1, 0);
	kunit_deactivate_static_stub(test, np_hmm_range_fault);
	mmap_write_lock(current->mm);
	vm_flags_clear(vma, VM_HUGETLB);
	mmap_write_unlock(current->mm);
	KUNIT_EXPECT_TRUE(test, np_test_at_once(region, 1, 0, 0));
}

/* A chunk is not found any more when it may be freed, although others are not yet. */
static void np_free_while_looked_for(struct np_chunk *chunk, struct np_slot *slot)
{
	struct kunit *test = kunit_get_current_test();

	if (slot->words)
		KUNIT_EXPECT_NULL(test, xa_load(&chunk->region->chunks, 0));
	kunit_deactivate_static_stub(test, np_slot_free);
	np_slot_free(chunk, slot);
	kunit_activate_static_stub(test, np_slot_free, np_free_while_looked_for);
}

static void np_chunk_that_is_freed_is_not_found(struct kunit *test)
{
	struct np_region *region = np_test_ready(test, 4, 0);

	KUNIT_ASSERT_NOT_NULL(test, xa_load(&region->chunks, 0));
	np_region_get(region);
	kunit_activate_static_stub(test, np_slot_free, np_free_while_looked_for);
	np_region_close(region);
	kunit_deactivate_static_stub(test, np_slot_free);
	np_test_left(test, region, 1, 0);
	np_region_put(region);
}

static int np_looks_in_vain(struct hmm_range *range)
{
	return -EBUSY;
}

/* All of it in one leaf */
static int np_sees_huge_page(struct hmm_range *range)
{
	struct np_test *t = kunit_get_current_test()->priv;
	unsigned long i, first = (range->start - t->va) >> PAGE_SHIFT;

	for (i = 0; i < (range->end - range->start) >> PAGE_SHIFT; i++)
		range->hmm_pfns[i] = (NP_SLOT_PAGES + first + i) | HMM_PFN_VALID |
				     HMM_PFN_WRITE |
				     (unsigned long)NP_SLOT_ORDER << HMM_PFN_ORDER_SHIFT;
	return 0;
}

static void np_what_takes_longer_is_left_to_others(struct kunit *test)
{
	struct np_region *region = np_test_ready(test, 2 * NP_SLOT_PAGES, 0);
	struct rdma_np_range range = np_test_range(region, 0, NP_AT_ONCE_PAGES + 1);
	struct rdma_np_range less = np_test_range(region, 0, NP_AT_ONCE_PAGES);
	struct rdma_np_range slots = np_test_range(region, NP_SLOT_PAGES - 1, 2);

	KUNIT_ASSERT_EQ(test, np_test_fault(region, NP_SLOT_PAGES - 1, 1, 0), 0);
	kunit_activate_static_stub(test, np_hmm_range_fault, np_looks_in_vain);
	np_test_left(test, region, 1, 0);
	kunit_activate_static_stub(test, np_hmm_range_fault, np_sees_huge_page);
	np_test_left(test, region, 1, 0);
	kunit_deactivate_static_stub(test, np_hmm_range_fault);
	KUNIT_EXPECT_FALSE(test, np_region_fault_at_once(region, &range, &range, 0, NULL, 0));
	KUNIT_EXPECT_FALSE(test, np_region_fault_at_once(region, &less, &range, 0, NULL, 0));
	KUNIT_EXPECT_FALSE(test, np_region_fault_at_once(region, &slots, &slots, 0, NULL, 0));
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_TRUE(test, np_region_fault_at_once(region, &less, &less, 0, NULL, 0));
	KUNIT_EXPECT_EQ(test, np_rights(region, NP_AT_ONCE_PAGES - 1), RDMA_NP_WORD_READABLE);
	np_test_settled(test);
}

static void np_what_is_wrong_is_said_by_others(struct kunit *test)
{
	struct np_region *region = np_test_ready(test, 4, 0);
	struct rdma_np_range beyond = np_test_range(region, 3, 2);
	struct np_test *t = test->priv;

	KUNIT_EXPECT_FALSE(test, np_region_fault_at_once(region, &beyond, &beyond, 0, NULL, 0));
	np_test_unmap(t, 1, 1);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 3, 1, 0), 0);
	np_test_left(test, region, 1, 0);
	/* Somebody still looks at it when it goes */
	KUNIT_ASSERT_TRUE(test, np_region_enter(region));
	np_region_close(region);
	np_test_left(test, region, 3, 0);
	np_test_left(test, region, 2, 0);
	np_region_leave(region);
	np_test_left(test, region, 3, 0);
}

static void np_fault_for_writing_needs_the_right(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct np_region *region = np_test_region_at(test, 0, 4, IB_ACCESS_UNPINNED |
						     IB_ACCESS_REMOTE_READ);

	np_touch(test, t->va, 1);
	np_touch(test, t->va + PAGE_SIZE, 1);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	np_test_left(test, region, 1, RDMA_NP_FAULT_WRITE);
	KUNIT_EXPECT_TRUE(test, np_test_at_once(region, 1, 0, 0));
}

static void np_last_reference_is_not_put_at_once(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 1);

	np_region_get(region);
	KUNIT_EXPECT_TRUE(test, np_region_put_unless_last(region));
	KUNIT_EXPECT_FALSE(test, np_region_put_unless_last(region));
	KUNIT_EXPECT_EQ(test, kref_read(&region->ref), 1);
}

/* --- FAULTs of peers --------------------------------------------------------------- */

/* A FAULT of @page is answered; was that at once? */
static bool np_test_peer_at_once(struct kunit *test, struct np_test_peer *peer,
				 struct np_region *region, unsigned int page,
				 unsigned int flags)
{
	struct np_msg msg = np_test_fault_msg(region, np_region_id(region), flags);
	const struct np_msg *answer;
	struct np_stats before, after;

	np_region_stats(region, &before);
	msg.fault.ranges[0].addr += page * PAGE_SIZE;
	answer = np_test_asks(test, peer, &msg, 0);
	np_fake_served(&peer->fake.hca);
	KUNIT_EXPECT_EQ(test, answer->status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, answer->faulted.nr_words, 1);
	KUNIT_EXPECT_EQ(test, answer->faulted.words[0], np_word(region, page));
	KUNIT_EXPECT_TRUE(test, np_rights(region, page) & RDMA_NP_WORD_READABLE);
	if (answer->faulted.hold_id)
		np_test_release(test, peer, answer->faulted.hold_id, 0, RDMA_NP_OK);
	np_region_stats(region, &after);
	return after.faults_at_once != before.faults_at_once;
}

/* 64 pages, of which the first one is resident, also for writing. */
static struct np_region *np_test_region_of(struct kunit *test, struct np_test_peer **peer)
{
	struct np_region *region = np_test_ready(test, 65, RDMA_NP_FAULT_WRITE);
	struct np_test *t = test->priv;

	*peer = np_test_peer(test, &t->pd);
	np_test_grant(test, *peer, region);
	return region;
}

static void np_fault_that_finds_nobody_is_served_at_once(struct kunit *test)
{
	struct np_test_peer *peer;
	struct np_region *region = np_test_region_of(test, &peer);

	/* The page before is in another block */
	KUNIT_EXPECT_TRUE(test, np_test_peer_at_once(test, peer, region, 16, 0));
	peer->fake.port.at_once_from = 0;
	KUNIT_EXPECT_EQ(test, np_rights(region, 20), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_TRUE(test, np_test_peer_at_once(test, peer, region, 40,
						     RDMA_NP_FAULT_WRITE));
	KUNIT_EXPECT_EQ(test, np_rights(region, 40), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 41), 0);
	np_test_settled(test);
}

/* By the clock that the handler reads: a delay of an emulated CPU is shorter by it, at times */
static int np_looks_slowly(struct hmm_range *range)
{
	u64 until = ktime_get_ns() + 10 * NSEC_PER_MSEC;

	while (ktime_get_ns() < until)
		cpu_relax();
	return hmm_range_fault(range);
}

static void np_handler_serves_half_of_the_time(struct kunit *test)
{
	struct np_test_peer *peer;
	struct np_region *region = np_test_region_of(test, &peer);
	struct np_port *port = &peer->fake.port;
	struct np_test *t = test->priv;
	u64 begin = ktime_get_ns();
	struct np_msg msg;

	port->at_once_from = U64_MAX;
	KUNIT_EXPECT_FALSE(test, np_test_peer_at_once(test, peer, region, 1, 0));
	KUNIT_EXPECT_EQ(test, port->at_once_from, U64_MAX);
	port->at_once_from = begin;
	KUNIT_EXPECT_TRUE(test, np_test_peer_at_once(test, peer, region, 16, 0));
	KUNIT_EXPECT_GT(test, port->at_once_from, begin);
	KUNIT_EXPECT_LT(test, port->at_once_from, 2 * ktime_get_ns() - begin);
	/* As long as it took */
	port->at_once_from = 0;
	kunit_activate_static_stub(test, np_hmm_range_fault, np_looks_slowly);
	begin = ktime_get_ns();
	KUNIT_EXPECT_TRUE(test, np_test_peer_at_once(test, peer, region, 32, 0));
	KUNIT_EXPECT_GE(test, port->at_once_from, begin + 20 * NSEC_PER_MSEC);
	kunit_deactivate_static_stub(test, np_hmm_range_fault);
	/* Also if that was in vain */
	port->at_once_from = begin;
	np_test_unmap(t, 50, 1);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 64, 1, RDMA_NP_FAULT_WRITE), 0);
	msg = np_test_fault_msg(region, np_region_id(region), 0);
	msg.fault.ranges[0] = np_test_range(region, 50, 1);
	np_test_refused(test, peer, &msg, 0, RDMA_NP_ADDRESS);
	KUNIT_EXPECT_GT(test, port->at_once_from, begin);
}

static void np_qp_that_does_not_wait_is_served_in_its_turn(struct kunit *test)
{
	struct np_test_peer *peer;
	struct np_region *region = np_test_region_of(test, &peer);

	/* With four others under way, and with three, which may take long */
	peer->fake.peer.faulting = 4;
	KUNIT_EXPECT_FALSE(test, np_test_peer_at_once(test, peer, region, 16, 0));
	peer->fake.peer.faulting = 3;
	KUNIT_EXPECT_TRUE(test, np_test_peer_at_once(test, peer, region, 32, 0));
	peer->fake.peer.faulting = 0;
}

static void np_hold_is_not_served_at_once(struct kunit *test)
{
	struct np_test_peer *peer;
	struct np_region *region = np_test_region_of(test, &peer);

	KUNIT_EXPECT_FALSE(test, np_test_peer_at_once(test, peer, region, 16,
						      RDMA_NP_FAULT_HOLD));
	KUNIT_EXPECT_TRUE(test, np_test_peer_at_once(test, peer, region, 32, 0));
}

static void np_test_serve(struct np_job *job)
{
}

/* Somebody waits, as no server has taken his FAULT yet: who comes later waits, too. */
static void np_fault_that_finds_others_waits_for_its_turn(struct kunit *test)
{
	struct np_job first = { .serve = np_test_serve }, last = first;
	struct np_test_peer *peer;
	struct np_region *region = np_test_region_of(test, &peer);
	struct np_owner *owner = np_owner_get(&peer->fake.hca, region->mm);
	struct np_msg msg = np_test_fault_msg(region, np_region_id(region), 0);
	struct np_stats stats;

	KUNIT_ASSERT_NOT_NULL(test, owner);
	spin_lock(&owner->lock);
	owner->starting = true;
	spin_unlock(&owner->lock);
	np_owner_serve(owner, &first, 1);

	msg.src_qpn = peer->fake.peer.remote_qpn;
	msg.dst_qpn = peer->fake.peer.qpn;
	msg.tid = ++peer->tid;
	msg.secret = peer->fake.peer.our_secret;
	np_fake_arrives(&peer->fake.port, &msg, false, 0);
	KUNIT_EXPECT_FALSE(test, completion_done(&peer->answered));

	spin_lock(&owner->lock);
	owner->starting = false;
	spin_unlock(&owner->lock);
	np_owner_serve(owner, &last, 1);
	KUNIT_EXPECT_NE(test, 0, wait_for_completion_timeout(&peer->answered, 30 * HZ));
	np_fake_served(&peer->fake.hca);
	flush_workqueue(owner->wq);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.faults_at_once, 0);
	np_owner_put(owner);
}

static struct kunit_case np_at_once_cases[] = {
	KUNIT_CASE(np_page_that_is_there_comes_at_once),
	KUNIT_CASE(np_resident_page_is_told_at_once),
	KUNIT_CASE(np_neighbours_come_at_once_with_one_flush),
	KUNIT_CASE(np_page_that_was_aged_comes_at_once_if_it_is_used),
	KUNIT_CASE(np_resident_page_that_is_asked_for_is_in_use),
	KUNIT_CASE(np_locks_are_not_waited_for),
	KUNIT_CASE(np_end_of_an_invalidation_is_not_waited_for),
	KUNIT_CASE(np_page_that_is_not_there_is_not_waited_for),
	KUNIT_CASE(np_leaves_are_not_split_at_once),
	KUNIT_CASE(np_memory_that_takes_a_lock_to_look_at_is_left_to_others),
	KUNIT_CASE(np_chunk_that_is_freed_is_not_found),
	KUNIT_CASE(np_what_takes_longer_is_left_to_others),
	KUNIT_CASE(np_what_is_wrong_is_said_by_others),
	KUNIT_CASE(np_fault_for_writing_needs_the_right),
	KUNIT_CASE(np_last_reference_is_not_put_at_once),
	KUNIT_CASE(np_fault_that_finds_nobody_is_served_at_once),
	KUNIT_CASE(np_handler_serves_half_of_the_time),
	KUNIT_CASE(np_qp_that_does_not_wait_is_served_in_its_turn),
	KUNIT_CASE(np_hold_is_not_served_at_once),
	KUNIT_CASE(np_fault_that_finds_others_waits_for_its_turn),
	{}
};

static struct kunit_suite np_at_once_suite = {
	.name = "nprdma_region_at_once",
	.init = np_test_init,
	.test_cases = np_at_once_cases,
};

kunit_test_suite(np_at_once_suite);
