// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of huge pages: one leaf, which comes, goes, is protected and aged
 * as a whole, and is cut by holds of parts.
 */
#include <kunit/static_stub.h>
#include <kunit/test.h>
#include <linux/hmm.h>
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

/* Both windows have one leaf there, which maps @paddr, or what is absent: 0 */
static void np_test_leaf(struct kunit *test, struct np_region *region, bool write,
			 phys_addr_t paddr)
{
	struct np_window *win = write ? &region->write : &region->read;
	phys_addr_t is = write ? np_write_paddr(region, 511) : np_read_paddr(region, 511);

	KUNIT_EXPECT_TRUE(test, np_test_is_whole(test->priv, win, 0));
	KUNIT_EXPECT_EQ(test, is, (paddr ?: win->absent) + 511 * PAGE_SIZE);
}

/* All that is held stays, all of it is stale when a part goes, and all of it ends with the hold */
static void np_hold_of_a_slot_keeps_its_leaf(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, 2 * NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	phys_addr_t paddr = page_to_phys(np_page_at(test, t->va));
	struct np_hold *hold;

	hold = np_test_hold(test, region, 0, NP_SLOT_PAGES, RDMA_NP_FAULT_WRITE);
	np_test_words(test, region, NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	np_test_leaf(test, region, false, paddr);
	np_test_leaf(test, region, true, paddr);

	np_test_invalidate(t, 4, 3);
	np_test_words(test, region, 2 * NP_WORD_GENERATION);
	np_test_leaf(test, region, false, paddr);
	np_test_leaf(test, region, true, paddr);

	/* It is what the owner has there still: by and by, for reading and for writing */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 9, 1, 0), 0);
	np_test_words(test, region, 3 * NP_WORD_GENERATION | RDMA_NP_WORD_READABLE);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 8, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_words(test, region, 4 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);

	np_test_invalidate(t, 511, 1);
	np_hold_release(hold);
	np_test_words(test, region, 5 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
	np_test_leaf(test, region, false, 0);
	np_test_leaf(test, region, true, 0);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
}

/* What is not stale stays when the hold ends, and the leaf with it */
static void np_hold_of_a_slot_leaves_its_leaf(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	phys_addr_t paddr = page_to_phys(np_page_at(test, t->va));
	struct np_hold *hold;

	/* Single pages, which have come before */
	hold = np_test_hold(test, region, 5, 1, RDMA_NP_FAULT_WRITE);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, NP_SLOT_PAGES, RDMA_NP_FAULT_WRITE), 0);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);

	hold = np_test_hold(test, region, 0, NP_SLOT_PAGES, RDMA_NP_FAULT_WRITE);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	np_test_words(test, region, NP_WORD_GENERATION | NP_WORD_RIGHTS);
	np_test_leaf(test, region, true, paddr);
	/* Stale for a while */
	np_test_invalidate(t, 5, 1);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 6, 1, RDMA_NP_FAULT_WRITE), 0);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	np_test_words(test, region, 3 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
	np_test_leaf(test, region, false, paddr);
	np_test_leaf(test, region, true, paddr);
	np_test_invalidate(t, 5, 1);
	np_test_words(test, region, 4 * NP_WORD_GENERATION);
	np_test_leaf(test, region, false, 0);
}

static unsigned long np_next_pfn;

/* What is seen at first is the huge page behind, which is not what was pinned */
static int np_look_at_next_huge_page(struct hmm_range *range)
{
	int ret = hmm_range_fault(range);
	unsigned int i;

	kunit_deactivate_static_stub(kunit_get_current_test(), np_hmm_range_fault);
	for (i = 0; i < NP_SLOT_PAGES; i++)
		range->hmm_pfns[i] = (range->hmm_pfns[i] & HMM_PFN_FLAGS) | (np_next_pfn + i);
	return ret;
}

static void np_held_leaf_is_what_was_pinned(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	struct np_hold *hold;

	np_next_pfn = page_to_pfn(np_page_at(test, t->va + NP_SLOT_SIZE));
	kunit_activate_static_stub(test, np_hmm_range_fault, np_look_at_next_huge_page);
	hold = np_test_hold(test, region, 0, NP_SLOT_PAGES, 0);
	np_test_leaf(test, region, false, page_to_phys(np_page_at(test, t->va)));
	np_hold_release(hold);
	np_test_settled(test);
}

/* Under holds of the slot for reading and for writing each window goes when it is time */
static void np_holds_of_a_slot_end_in_each_window(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	phys_addr_t paddr = page_to_phys(np_page_at(test, t->va));
	struct np_hold *reads, *writes;

	writes = np_test_hold(test, region, 0, NP_SLOT_PAGES, RDMA_NP_FAULT_WRITE);
	reads = np_test_hold(test, region, 0, NP_SLOT_PAGES, 0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	np_test_invalidate(t, 0, 1);
	np_test_leaf(test, region, true, paddr);
	np_hold_release(writes);
	np_test_leaf(test, region, true, 0);
	np_test_leaf(test, region, false, paddr);
	np_hold_release(reads);
	np_test_leaf(test, region, false, 0);
	np_test_words(test, region, 2 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);

	/* For reading alone, nothing keeps what is written */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	reads = np_test_hold(test, region, 0, NP_SLOT_PAGES, 0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	np_test_invalidate(t, 7, 1);
	np_test_leaf(test, region, true, 0);
	np_test_leaf(test, region, false, paddr);
	np_hold_release(reads);
	np_test_leaf(test, region, false, 0);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_settled(test);
}

/* A hold of a part cuts the leaf that a hold of all of it has kept */
static void np_hold_of_a_part_cuts_a_held_leaf(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	phys_addr_t paddr = page_to_phys(np_page_at(test, t->va));
	struct np_hold *all, *part;

	all = np_test_hold(test, region, 0, NP_SLOT_PAGES, RDMA_NP_FAULT_WRITE);
	part = np_test_hold(test, region, 5, 1, 0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
	KUNIT_EXPECT_FALSE(test, np_test_is_whole(t, &region->read, 0));
	KUNIT_EXPECT_FALSE(test, np_test_is_whole(t, &region->write, 0));
	np_test_invalidate(t, 4, 3);
	KUNIT_EXPECT_EQ(test, np_rights(region, 3), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 5), paddr + 5 * PAGE_SIZE);
	/* Nor does another one of all of it make one leaf of what parts */
	np_hold_release(all);
	KUNIT_EXPECT_EQ(test, np_rights(region, 3), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 4), region->read.absent + 4 * PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 5), paddr + 5 * PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 5), region->write.absent + 5 * PAGE_SIZE);
	all = np_test_hold(test, region, 0, NP_SLOT_PAGES, 0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
	np_hold_release(part);
	KUNIT_EXPECT_EQ(test, np_rights(region, 5), RDMA_NP_WORD_READABLE);
	np_hold_release(all);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_settled(test);
}

/* Other memory there is for nobody, as long as the leaf means what is held */
static void np_held_leaf_is_waited_for(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	struct np_hold *hold;

	hold = np_test_hold(test, region, 0, NP_SLOT_PAGES, 0);
	KUNIT_ASSERT_EQ(test, t->va, vm_mmap(NULL, t->va, NP_SLOT_SIZE, PROT_READ | PROT_WRITE,
					     MAP_FIXED | MAP_ANONYMOUS | MAP_PRIVATE, 0));
	mmap_write_lock(current->mm);
	vm_flags_set(vma_lookup(current->mm, t->va), VM_HUGEPAGE);
	mmap_write_unlock(current->mm);
	np_touch(test, t->va, 7);
	KUNIT_ASSERT_GE(test, compound_order(np_page_at(test, t->va)), NP_SLOT_ORDER);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 3, 1, 0), -EAGAIN);
	KUNIT_EXPECT_EQ(test, np_rights(region, 3), 0);
	np_hold_release(hold);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 3, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	np_test_leaf(test, region, false, page_to_phys(np_page_at(test, t->va)));
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_settled(test);
}

/* A peer's lease of what is resident in a slot: of all of it, whatever page was asked for */
static void np_lease_of_a_slot_keeps_its_leaf(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, 2 * NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	phys_addr_t paddr = page_to_phys(np_page_at(test, t->va));
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	const struct np_msg *answer;
	struct np_stats stats;
	struct np_msg msg;
	u64 id;

	np_test_grant(test, peer, region);
	msg = np_test_fault_msg(region, region->id, RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE |
						    RDMA_NP_FAULT_WRITE);
	msg.fault.ranges[0].addr += 5 * PAGE_SIZE;
	msg.fault.nr_ranges = 2;
	msg.fault.ranges[1] = (struct rdma_np_range){ region->base, NP_SLOT_SIZE };
	answer = np_test_asks(test, peer, &msg, 0);
	KUNIT_ASSERT_EQ(test, answer->status, RDMA_NP_OK);
	np_fake_served(&peer->fake.hca);
	id = answer->faulted.hold_id;
	KUNIT_ASSERT_NE(test, id, 0);
	KUNIT_EXPECT_EQ(test, answer->faulted.lease_addr, region->base);
	KUNIT_EXPECT_EQ(test, answer->faulted.lease_length, NP_SLOT_SIZE);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.leased, NP_SLOT_PAGES);
	KUNIT_EXPECT_EQ(test, stats.huge, 1);
	np_test_leaf(test, region, true, paddr);
	np_test_invalidate(t, 9, 1);
	np_test_leaf(test, region, true, paddr);
	np_test_release(test, peer, id, 0, RDMA_NP_OK);
	np_test_leaf(test, region, true, 0);
	np_test_words(test, region, 2 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
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
	KUNIT_CASE(np_hold_of_a_slot_keeps_its_leaf),
	KUNIT_CASE(np_hold_of_a_slot_leaves_its_leaf),
	KUNIT_CASE(np_held_leaf_is_what_was_pinned),
	KUNIT_CASE(np_holds_of_a_slot_end_in_each_window),
	KUNIT_CASE(np_hold_of_a_part_cuts_a_held_leaf),
	KUNIT_CASE_SLOW(np_held_leaf_is_waited_for),
	KUNIT_CASE(np_lease_of_a_slot_keeps_its_leaf),
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
