// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of faults and holds of memory that changes while they are at work:
 * they look again, ask for less, and come to an end.
 */
#include <kunit/static_stub.h>
#include <kunit/test.h>
#include <linux/delay.h>
#include <linux/hmm.h>
#include <linux/mman.h>

#include "np_region_fixture.h"

/* The table that the fault has just made is merged away before it takes the lock */
static void np_fault_notices_that_its_split_is_undone(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_stats stats;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 3, 1, RDMA_NP_FAULT_WRITE), 0);
	/* In the split of the read window, which comes last; the notifier is silent */
	t->fake.on_split = np_age_other_page;
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 2);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_GE(test, stats.retries, 1);
	/* It knows from the count, and need not try */
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_settled(test);
}

/* Runs in the fault, after it has looked */
static void np_replace_first_page(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);

	fake->on_split = NULL;
	KUNIT_EXPECT_EQ(fake->test, t->va,
			vm_mmap(NULL, t->va, PAGE_SIZE, PROT_READ | PROT_WRITE,
				MAP_FIXED | MAP_ANONYMOUS | MAP_PRIVATE, 0));
}

/* What it has seen is not the owner's any more. A hold keeps the slot from a merge */
static void np_fault_looks_again_after_an_invalidation(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	struct np_stats stats;
	struct page *old;

	hold = np_test_hold(test, region, 3, 1, 0);
	np_touch(test, t->va, 1);
	old = np_page_at(test, t->va);
	get_page(old);	/* or it might come again */
	t->fake.on_split = np_replace_first_page;
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_GE(test, stats.retries, 1);
	KUNIT_EXPECT_PTR_NE(test, np_page_at(test, t->va), old);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0),
			page_to_phys(np_page_at(test, t->va)));
	np_test_settled(test);
	put_page(old);
	np_hold_release(hold);
}

/*
 * Runs in each attempt, after it has looked: as if somebody took away pages of the
 * mapping faster than two of them can be brought.
 */
static void np_take_away_what_is_not_alone(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);
	unsigned int i, present = 0;
	struct page *page;

	for (i = 0; i < 16; i++) {
		if (get_user_pages_fast_only(t->va + i * PAGE_SIZE, 1, 0,
					     &page) != 1)
			continue;
		put_page(page);
		present++;
	}
	if (present < 2)
		return;
	KUNIT_EXPECT_EQ(fake->test, t->va,
			vm_mmap(NULL, t->va, 16 * PAGE_SIZE,
				PROT_READ | PROT_WRITE, MAP_FIXED |
				MAP_ANONYMOUS | MAP_PRIVATE, 0));
	fake->taken_away++;
}

/* The owner's CPU needs one page at a time, and so does a fault if it must */
static void np_fault_goes_on_while_memory_changes(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_test *t = test->priv;
	struct np_stats stats;
	u64 words[16] = {};
	unsigned int i;

	t->fake.on_split = np_take_away_what_is_not_alone;
	KUNIT_ASSERT_EQ(test, np_region_fault(region, region->base,
					      16 * PAGE_SIZE, RDMA_NP_FAULT_WRITE,
					      NULL, words, ARRAY_SIZE(words)), 0);
	t->fake.on_split = NULL;
	for (i = 0; i < ARRAY_SIZE(words); i++)
		KUNIT_EXPECT_EQ_MSG(test, words[i] & NP_WORD_RIGHTS,
				    NP_WORD_RIGHTS, "page %u", i);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 15), NP_WORD_RIGHTS);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_GE(test, stats.faults_minor, 16);
	np_test_settled(test);
}

/* One page can not be made less: it is there when the first look at it ends too late */
static void np_replace_page_slowly(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);

	fake->on_split = NULL;
	fake->taken_away++;
	msleep(1100);
	KUNIT_EXPECT_EQ(fake->test, t->va,
			vm_mmap(NULL, t->va, PAGE_SIZE, PROT_READ | PROT_WRITE,
				MAP_FIXED | MAP_ANONYMOUS | MAP_PRIVATE, 0));
}

static void np_replace_page_next_time(struct fake_iommu *fake)
{
	fake->on_split = np_replace_page_slowly;
}

/* The first look at two, and then the one at one, takes longer than the deadline */
static void np_take_away_slowly(struct fake_iommu *fake)
{
	np_take_away_what_is_not_alone(fake);
	if (!fake->taken_away)
		return;
	/* The other window is split in the same attempt */
	fake->on_split = np_replace_page_next_time;
	msleep(1100);
}

static void np_fault_asks_for_less_before_it_gives_up(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_test *t = test->priv;

	t->fake.on_split = np_take_away_slowly;
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 2, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, t->fake.taken_away, 2);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), NP_WORD_RIGHTS);
	np_test_settled(test);
}

static void np_hold_gets_its_pages_while_memory_changes(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	struct np_stats stats;

	t->fake.on_split = np_take_away_what_is_not_alone;
	hold = np_test_hold(test, region, 0, 16, RDMA_NP_FAULT_WRITE);
	t->fake.on_split = NULL;
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 16);
	KUNIT_EXPECT_EQ(test, stats.holds, 1);
	np_hold_release(hold);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 0);
	np_test_settled(test);
}

/* Memory changes while more than one page is looked at */
static int np_look_at_one_page(struct hmm_range *range)
{
	if (range->end - range->start > PAGE_SIZE)
		return -EBUSY;
	return hmm_range_fault(range);
}

static void np_hold_in_parts_pins_what_it_counts(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_hold *hold;
	struct np_stats stats;
	unsigned int i;

	kunit_activate_static_stub(test, np_hmm_range_fault,
				   np_look_at_one_page);
	/* What one takes too much, or gives back too often, the next one meets */
	for (i = 1; i <= 2; i++) {
		hold = np_test_hold(test, region, 0, 16, RDMA_NP_FAULT_WRITE);
		np_region_stats(region, &stats);
		KUNIT_EXPECT_EQ(test, stats.held, 16);
		KUNIT_EXPECT_EQ(test, stats.holds, i);
		np_hold_release(hold);
		np_region_stats(region, &stats);
		KUNIT_EXPECT_EQ(test, stats.held, 0);
	}
	kunit_deactivate_static_stub(test, np_hmm_range_fault);
	np_test_settled(test);
}

/* What is seen of more than one page is not what was pinned */
static int np_look_at_others(struct hmm_range *range)
{
	int ret = hmm_range_fault(range);

	if (!ret && range->end - range->start > PAGE_SIZE)
		swap(range->hmm_pfns[0], range->hmm_pfns[1]);
	return ret;
}

static void np_hold_asks_for_less_while_pages_are_replaced(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_hold *hold;
	struct np_stats stats;

	kunit_activate_static_stub(test, np_hmm_range_fault, np_look_at_others);
	hold = np_test_hold(test, region, 0, 4, RDMA_NP_FAULT_WRITE);
	kunit_deactivate_static_stub(test, np_hmm_range_fault);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 4);
	np_hold_release(hold);
	np_test_settled(test);
}

/* Runs instead of the look at memory that may take for ever, and then ends after all */
static int np_look_until_the_device_has_gone(struct hmm_range *range)
{
	struct kunit *test = kunit_get_current_test();
	struct np_test *t = test->priv;
	struct np_region *region = t->region;

	kunit_deactivate_static_stub(test, np_hmm_range_fault);
	/* The end comes from somebody else, who does not have it */
	mmap_read_unlock(range->notifier->mm);
	np_region_close(region);
	KUNIT_EXPECT_FALSE(test, xa_empty(&t->fake.slots));
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 2);
	np_regions_detach(&t->npdev);
	KUNIT_EXPECT_TRUE(test, xa_empty(&t->fake.slots));
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
	KUNIT_EXPECT_TRUE(test, list_empty(&t->npdev.regions));
	t->fake.splits = 0;
	mmap_read_lock(range->notifier->mm);
	return hmm_range_fault(range);
}

/* The owner's file system may keep it waiting for as long as it likes */
static void np_device_does_not_wait_for_a_fault(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	kunit_activate_static_stub(test, np_hmm_range_fault,
				   np_look_until_the_device_has_gone);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 1, 1, RDMA_NP_FAULT_WRITE), -ENXIO);
	KUNIT_EXPECT_EQ(test, t->fake.splits, 0);
	/* Nor does it touch windows later, or give the device back once more */
	np_test_close(t);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
}

static struct kunit_case np_race_cases[] = {
	KUNIT_CASE(np_fault_notices_that_its_split_is_undone),
	KUNIT_CASE(np_fault_looks_again_after_an_invalidation),
	KUNIT_CASE(np_fault_goes_on_while_memory_changes),
	KUNIT_CASE(np_fault_asks_for_less_before_it_gives_up),
	KUNIT_CASE(np_hold_gets_its_pages_while_memory_changes),
	KUNIT_CASE(np_hold_in_parts_pins_what_it_counts),
	KUNIT_CASE(np_hold_asks_for_less_while_pages_are_replaced),
	KUNIT_CASE(np_device_does_not_wait_for_a_fault),
	{}
};

static struct kunit_suite np_race_suite = {
	.name = "nprdma_region_race",
	.init = np_test_init,
	.test_cases = np_race_cases,
};

kunit_test_suite(np_race_suite);
