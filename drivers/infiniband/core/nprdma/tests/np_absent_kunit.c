// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of what takes pages away from peers: invalidations, protection,
 * and reclaim, which asks first whether they are in use.
 */
#include <kunit/test.h>
#include <linux/mman.h>

#include "np_region_fixture.h"

static void np_invalidation_makes_absent(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_stats stats;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, RDMA_NP_FAULT_WRITE), 0);
	np_test_invalidate(test->priv, 1, 2);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_word(region, 1), 2 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, np_word(region, 2), 2 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, np_rights(region, 3), NP_WORD_RIGHTS);
	np_test_settled(test);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.resident, 2);
	KUNIT_EXPECT_EQ(test, stats.invalidations, 1);
	KUNIT_EXPECT_EQ(test, stats.pages_invalidated, 2);
}

static void np_invalidation_of_absent_pages_costs_no_flush(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	unsigned int syncs;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	syncs = t->fake.syncs;
	np_test_invalidate(t, 2, 2);
	KUNIT_EXPECT_EQ(test, t->fake.syncs, syncs);
	KUNIT_EXPECT_EQ(test, np_word(region, 2), 0);
}

static void np_absent_slot_is_merged(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 600);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 600, RDMA_NP_FAULT_WRITE), 0);
	np_test_invalidate(t, 0, 511);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 0);
	np_test_invalidate(t, 511, 1);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 2);
	KUNIT_EXPECT_NULL(test, fake_slot(&t->fake, region->read.iova)->leaf);
	KUNIT_EXPECT_NULL(test, fake_slot(&t->fake, region->write.iova)->leaf);
	np_test_settled(test);
}

static void np_generation_survives_a_merge(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 1);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_unmap(t, 0, 1);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 2);
	KUNIT_ASSERT_EQ(test, t->va, vm_mmap(NULL, t->va, PAGE_SIZE,
					     PROT_READ | PROT_WRITE, MAP_FIXED |
					     MAP_ANONYMOUS | MAP_PRIVATE, 0));
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, 0),
			3 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
	np_test_settled(test);
}

static void np_neighbour_counts_as_used(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	np_touch(test, t->va, 1);
	np_touch(test, t->va + PAGE_SIZE, 1);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, NP_FAULT_AROUND |
					    NP_FAULT_PRESENT), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_TRUE(test, np_test_ask(region, 0, false));
	KUNIT_EXPECT_TRUE(test, np_test_ask(region, 1, false));
	/* Nobody can use what is not there */
	KUNIT_EXPECT_FALSE(test, np_test_ask(region, 2, false));
	np_test_settled(test);
}

static void np_page_that_was_asked_about_comes_when_it_is_used(struct kunit *test)
{
	static const unsigned int flags[] = { 0, NP_FAULT_PRESENT };
	struct np_region *region = np_test_region(test, 4);
	unsigned int i;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, 0), 0);
	for (i = 0; i < ARRAY_SIZE(flags); i++) {
		np_test_age(test, region, 1);
		np_test_age(test, region, 2);
		/* As often as others are asked for */
		KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
		KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4,
						    NP_FAULT_AROUND |
						    NP_FAULT_PRESENT), 0);
		KUNIT_EXPECT_EQ(test, np_rights(region, 1), 0);
		KUNIT_EXPECT_EQ(test, np_rights(region, 2), 0);
		KUNIT_EXPECT_FALSE(test, np_test_ask(region, 1, false));
		/* Not as a neighbour, by whatever else */
		KUNIT_ASSERT_EQ(test, np_test_fault(region, 1, 1, flags[i]), 0);
		KUNIT_EXPECT_EQ(test, np_rights(region, 1), RDMA_NP_WORD_READABLE);
		KUNIT_EXPECT_EQ(test, np_rights(region, 2), 0);
		KUNIT_EXPECT_TRUE(test, np_test_ask(region, 1, false));
		KUNIT_ASSERT_EQ(test, np_test_fault(region, 2, 1, 0), 0);
	}
	np_test_settled(test);
}

static void np_invalidation_that_may_not_block_gives_up(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 1);
	struct np_test *t = test->priv;
	struct mmu_notifier_range range = {
		.start = t->va,
		.end = t->va + PAGE_SIZE,
	};
	struct np_chunk *chunk;
	unsigned long seq;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	chunk = xa_load(&region->chunks, 0);
	seq = chunk->notifier.invalidate_seq;
	mutex_lock(&chunk->lock);
	KUNIT_EXPECT_FALSE(test, chunk->notifier.ops->invalidate(&chunk->notifier,
								 &range, seq));
	mutex_unlock(&chunk->lock);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_TRUE(test, chunk->notifier.ops->invalidate(&chunk->notifier,
								&range, seq));
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	np_test_settled(test);
}

/* fork(), soft dirty, write-back; mprotect() and others in readable memory */
static void np_protection_leaves_the_read_window(struct kunit *test)
{
	static const enum mmu_notifier_event events[] = {
		MMU_NOTIFY_PROTECTION_PAGE,
		MMU_NOTIFY_SOFT_DIRTY,
		MMU_NOTIFY_PROTECTION_VMA,
	};
	struct np_region *region = np_test_region(test, 6);
	struct np_test *t = test->priv;
	struct np_stats stats;
	phys_addr_t paddr;
	unsigned int i;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 6, RDMA_NP_FAULT_WRITE), 0);
	for (i = 0; i < ARRAY_SIZE(events); i++) {
		paddr = np_read_paddr(region, i + 1);
		np_test_event(t, events[i], i + 1, 1);
		KUNIT_EXPECT_EQ(test, np_word(region, i + 1),
				2 * NP_WORD_GENERATION | RDMA_NP_WORD_READABLE);
		KUNIT_EXPECT_EQ(test, np_read_paddr(region, i + 1), paddr);
		KUNIT_EXPECT_EQ(test, np_write_paddr(region, i + 1),
				region->write.absent + (i + 1) * PAGE_SIZE);
		np_test_settled(test);
	}
	/* Their neighbours are as before */
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 4), NP_WORD_RIGHTS);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.resident, 6);
	KUNIT_EXPECT_EQ(test, stats.writable, 3);

	/* The way back is an upgrade, and the way out is that of readable pages */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 3, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, 1),
			3 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
	np_test_invalidate(t, 0, 6);
	KUNIT_EXPECT_EQ(test, np_word(region, 3), 3 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 2);
	np_test_settled(test);
}

static void np_protection_of_readable_pages_costs_no_flush(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	unsigned int syncs;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, 0), 0);
	syncs = t->fake.syncs;
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 0, 4);
	KUNIT_EXPECT_EQ(test, t->fake.syncs, syncs);
	KUNIT_EXPECT_EQ(test, np_word(region, 0),
			NP_WORD_GENERATION | RDMA_NP_WORD_READABLE);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	syncs = t->fake.syncs;
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 1, 3);
	KUNIT_EXPECT_EQ(test, t->fake.syncs, syncs);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
}

/* mprotect(PROT_NONE) has changed the mapping when it calls */
static void np_protection_of_what_is_not_readable_makes_absent(struct kunit *test)
{
	struct np_region *region;
	struct np_test *t = test->priv;

	np_test_map(test, PROT_READ | PROT_WRITE);
	region = np_test_region(test, 4);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, RDMA_NP_FAULT_WRITE), 0);
	mmap_write_lock(current->mm);
	vm_flags_clear(vma_lookup(current->mm, t->va), VM_READ);
	mmap_write_unlock(current->mm);
	np_test_event(t, MMU_NOTIFY_PROTECTION_VMA, 0, 1);
	KUNIT_EXPECT_EQ(test, np_word(region, 0), 2 * NP_WORD_GENERATION);
	np_test_settled(test);
	mmap_write_lock(current->mm);
	vm_flags_set(vma_lookup(current->mm, t->va), VM_READ);
	mmap_write_unlock(current->mm);

	/* More than one mapping: nobody looks at all of them */
	KUNIT_ASSERT_EQ(test, t->va + 2 * PAGE_SIZE,
			vm_mmap(NULL, t->va + 2 * PAGE_SIZE, PAGE_SIZE,
				PROT_NONE, MAP_FIXED | MAP_ANONYMOUS | MAP_PRIVATE,
				0));
	KUNIT_EXPECT_EQ(test, np_rights(region, 2), 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 2, RDMA_NP_FAULT_WRITE), 0);
	np_test_event(t, MMU_NOTIFY_PROTECTION_VMA, 1, 3);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), 0);
	np_test_settled(test);
}

static void np_neighbours_of_the_region_do_not_matter(struct kunit *test)
{
	struct np_region *region = np_test_region_at(test, 2, 2, NP_TEST_ACCESS);
	struct np_chunk *chunk;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 2, 0), 0);
	chunk = xa_load(&region->chunks, 0);
	KUNIT_EXPECT_EQ(test, chunk->notifier.interval_tree.start, region->start);
	KUNIT_EXPECT_EQ(test, chunk->notifier.interval_tree.last,
			region->start + 2 * PAGE_SIZE - 1);
}

static struct kunit_case np_absent_cases[] = {
	KUNIT_CASE(np_invalidation_makes_absent),
	KUNIT_CASE(np_invalidation_of_absent_pages_costs_no_flush),
	KUNIT_CASE(np_absent_slot_is_merged),
	KUNIT_CASE(np_generation_survives_a_merge),
	KUNIT_CASE(np_neighbour_counts_as_used),
	KUNIT_CASE(np_page_that_was_asked_about_comes_when_it_is_used),
	KUNIT_CASE(np_invalidation_that_may_not_block_gives_up),
	KUNIT_CASE(np_protection_leaves_the_read_window),
	KUNIT_CASE(np_protection_of_readable_pages_costs_no_flush),
	KUNIT_CASE(np_protection_of_what_is_not_readable_makes_absent),
	KUNIT_CASE(np_neighbours_of_the_region_do_not_matter),
	{}
};

static struct kunit_suite np_absent_suite = {
	.name = "nprdma_region_absent",
	.init = np_test_init,
	.test_cases = np_absent_cases,
};

kunit_test_suite(np_absent_suite);
