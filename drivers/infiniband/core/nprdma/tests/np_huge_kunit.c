// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of huge pages: one leaf, which comes, goes, is protected and aged
 * as a whole, and is cut by holds.
 */
#include <kunit/test.h>
#include <linux/mman.h>
#include <linux/pagemap.h>

#include "np_region_fixture.h"

/* Region of @npages pages, @first pages behind the beginning of huge pages */
static struct np_region *np_test_huge(struct kunit *test, unsigned int first,
				      unsigned int npages)
{
	struct np_test *t = test->priv;
	unsigned int i;

	np_test_map(test, PROT_READ | PROT_WRITE);
	mmap_write_lock(current->mm);
	vm_flags_set(vma_lookup(current->mm, t->va), VM_HUGEPAGE);
	mmap_write_unlock(current->mm);
	for (i = 0; i < 3; i++) {
		unsigned long va = t->va + i * NP_SLOT_SIZE;

		np_touch(test, va, i);
		KUNIT_ASSERT_GE(test, compound_order(np_page_at(test, va)),
				NP_SLOT_ORDER);
	}
	return np_test_region_at(test, first, npages, NP_TEST_ACCESS);
}

static bool np_test_is_whole(struct np_test *t, const struct np_window *win,
			     unsigned int slot)
{
	return !fake_slot(&t->fake, win->iova + slot * NP_SLOT_SIZE)->leaf;
}

static u64 np_test_huge_leaves(struct np_region *region)
{
	struct np_stats stats;

	np_region_stats(region, &stats);
	return stats.huge;
}

/* All pages of the first slot have this word */
static void np_test_words(struct kunit *test, struct np_region *region, u64 word)
{
	unsigned int i, other = 0;

	for (i = 0; i < NP_SLOT_PAGES; i++)
		other += np_word(region, i) != word;
	KUNIT_EXPECT_EQ_MSG(test, other, 0, "word is not %llx", word);
	np_test_settled(test);
}

static void np_huge_page_is_one_leaf(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, 2 * NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	phys_addr_t paddr = page_to_phys(np_page_at(test, t->va));
	struct np_stats stats;
	struct folio *folio;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 7, 1, 0), 0);
	np_test_words(test, region, NP_WORD_GENERATION | RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 511), paddr + 511 * PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, np_rights(region, 512), 0);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.huge, 1);
	KUNIT_EXPECT_EQ(test, stats.resident, 512);
	KUNIT_EXPECT_EQ(test, stats.faults_minor, 512);
	KUNIT_EXPECT_EQ(test, stats.faults_noop, 0);

	folio = page_folio(pfn_to_page(PHYS_PFN(paddr)));
	folio_lock(folio);
	folio_clear_dirty_for_io(folio);
	folio_unlock(folio);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 9, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_words(test, region, 2 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 511), paddr + 511 * PAGE_SIZE);
	KUNIT_EXPECT_TRUE(test, PageDirty(pfn_to_page(PHYS_PFN(paddr))));
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	/* Of the residency table's page */
	KUNIT_EXPECT_EQ(test, t->fake.splits, 1);
	KUNIT_EXPECT_TRUE(test, np_test_is_whole(t, &region->read, 0));
	KUNIT_EXPECT_TRUE(test, np_test_is_whole(t, &region->write, 0));
}

static void np_look_at_count_of_merges(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);

	KUNIT_EXPECT_EQ(fake->test, np_test_slot(t->region, t->va)->merges, 0);
}

/* Who knows the count before he splits, and no lock, would not split what is a table yet */
static void np_merge_counts_when_the_tables_are_gone(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	struct np_hold *hold;

	hold = np_test_hold(test, region, 3, 1, RDMA_NP_FAULT_WRITE);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
	t->fake.on_merge = np_look_at_count_of_merges;
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, NP_SLOT_PAGES, RDMA_NP_FAULT_WRITE), 0);
	t->fake.on_merge = NULL;
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 2);
	KUNIT_EXPECT_EQ(test, np_test_slot(region, t->va)->merges, 1);
}

/* A split allocates, and the notifier may not */
static void np_huge_leaf_goes_as_a_whole(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, 2 * NP_SLOT_PAGES);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1024, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 2);
	np_test_invalidate(t, 3, 1);
	np_test_words(test, region, 2 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 512), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_invalidate(t, 512, 512);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
	np_test_settled(test);
}

static void np_huge_leaf_is_protected_as_a_whole(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 100, 1);
	np_test_words(test, region, 2 * NP_WORD_GENERATION | RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_words(test, region, 3 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
}

static void np_huge_leaf_is_aged_as_a_whole(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_age_other_page(&t->fake);
	np_test_words(test, region, 2 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
}

static void np_huge_leaf_that_was_asked_about_comes_when_it_is_used(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_age(test, region, 0);
	np_test_words(test, region, 2 * NP_WORD_GENERATION);
	/* Of neighbours in the next slot; the first page is not among them */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 1, 4, NP_FAULT_AROUND |
					    NP_FAULT_PRESENT), 0);
	np_test_words(test, region, 2 * NP_WORD_GENERATION);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_words(test, region, 3 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
}

/* What is pinned stays when its neighbours go */
static void np_hold_cuts_a_huge_leaf(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	phys_addr_t paddr;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	/* For read: the write window's leaf has to be cut, too */
	hold = np_test_hold(test, region, 5, 1, 0);
	np_test_words(test, region, NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
	KUNIT_EXPECT_FALSE(test, np_test_is_whole(t, &region->read, 0));
	KUNIT_EXPECT_FALSE(test, np_test_is_whole(t, &region->write, 0));
	paddr = np_read_paddr(region, 5);
	np_test_invalidate(t, 4, 3);
	KUNIT_EXPECT_EQ(test, np_rights(region, 3), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 6), 0);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 5), paddr);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);

	/* As long as it is there, single pages come back */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 6, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 6), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_rights(region, 4), 0);
	np_test_settled(test);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 5), region->read.absent +
			5 * PAGE_SIZE);
	np_test_settled(test);

	/* What was resident has not changed */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 4, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	KUNIT_EXPECT_EQ(test, np_word(region, 3),
			NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 5), NP_WORD_RIGHTS);
	KUNIT_EXPECT_TRUE(test, np_test_is_whole(t, &region->write, 0));
	np_test_settled(test);
}

/* Pages of the owner's that are not the region's stay out of it */
static void np_huge_leaf_lies_within_the_region(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 1, 3 * NP_SLOT_PAGES - 2);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 3 * NP_SLOT_PAGES - 2, 0),
			0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	KUNIT_EXPECT_FALSE(test, np_test_is_whole(t, &region->read, 0));
	KUNIT_EXPECT_TRUE(test, np_test_is_whole(t, &region->read, 1));
	KUNIT_EXPECT_FALSE(test, np_test_is_whole(t, &region->read, 2));
	np_test_settled(test);
}

static void np_read_other_page(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);

	fake->on_split = NULL;
	KUNIT_EXPECT_EQ(fake->test, np_test_fault(t->region, 8, 1, 0), 0);
	KUNIT_EXPECT_EQ(fake->test, np_test_huge_leaves(t->region), 1);
}

static void np_write_other_page(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);

	fake->on_split = NULL;
	KUNIT_EXPECT_EQ(fake->test,
			np_test_fault(t->region, 8, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(fake->test, np_test_huge_leaves(t->region), 1);
}

static void np_let_one_split_pass(struct fake_iommu *fake)
{
	fake->on_split = np_write_other_page;
}

/* The tables that a hold has just made, of both windows, give way to large leaves */
static void np_hold_for_write_notices_new_huge_leaves(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	struct np_hold *hold;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	np_test_invalidate(t, 0, 1);
	t->fake.on_split = np_let_one_split_pass;
	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_invalidate(t, 1, 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), 0);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_settled(test);
	np_hold_release(hold);
}

/* The same of one window, when the other one's has not been split */
static void np_hold_notices_a_new_huge_leaf(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	struct np_stats stats;

	/* So that only the slot's own splits are seen */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	np_test_invalidate(t, 0, 1);
	t->fake.on_split = np_read_other_page;
	hold = np_test_hold(test, region, 0, 1, 0);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_GE(test, stats.retries, 1);
	KUNIT_EXPECT_EQ(test, stats.huge, 0);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_invalidate(t, 1, 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 2), RDMA_NP_WORD_READABLE);
	np_test_settled(test);
	np_hold_release(hold);
}

static void np_failed_huge_leaf_is_undone(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;

	t->fake.read_pages_error = -EINVAL;
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 2, RDMA_NP_FAULT_WRITE), -EINVAL);
	np_test_words(test, region, 0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
}

static struct kunit_case np_huge_cases[] = {
	KUNIT_CASE(np_huge_page_is_one_leaf),
	KUNIT_CASE(np_merge_counts_when_the_tables_are_gone),
	KUNIT_CASE(np_huge_leaf_goes_as_a_whole),
	KUNIT_CASE(np_huge_leaf_is_protected_as_a_whole),
	KUNIT_CASE(np_huge_leaf_is_aged_as_a_whole),
	KUNIT_CASE(np_huge_leaf_that_was_asked_about_comes_when_it_is_used),
	KUNIT_CASE(np_hold_cuts_a_huge_leaf),
	KUNIT_CASE(np_huge_leaf_lies_within_the_region),
	KUNIT_CASE(np_hold_notices_a_new_huge_leaf),
	KUNIT_CASE(np_hold_for_write_notices_new_huge_leaves),
	KUNIT_CASE(np_failed_huge_leaf_is_undone),
	{}
};

static struct kunit_suite np_huge_suite = {
	.name = "nprdma_region_huge",
	.init = np_test_init,
	.test_cases = np_huge_cases,
};

kunit_test_suite(np_huge_suite);
