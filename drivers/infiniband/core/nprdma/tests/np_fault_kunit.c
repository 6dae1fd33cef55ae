// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of faults: pages become resident, for reading or for writing, and
 * faults are refused, or undone as a whole when a part of them fails.
 */
#include <kunit/test.h>
#include <linux/mman.h>
#include <linux/pagemap.h>

#include "np_region_fixture.h"

static void np_read_fault_maps_read_window_only(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	np_touch(test, t->va + PAGE_SIZE, 1);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 1, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, 1),
			NP_WORD_GENERATION | RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 1),
			page_to_phys(np_page_at(test, t->va + PAGE_SIZE)));
	KUNIT_EXPECT_EQ(test, np_word(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, 2), 0);
	np_test_settled(test);
}

static void np_write_fault_maps_both_windows(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	phys_addr_t paddr;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 1, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, 1),
			NP_WORD_GENERATION | NP_WORD_RIGHTS);
	paddr = page_to_phys(np_page_at(test, t->va + PAGE_SIZE));
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 1), paddr);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 1), paddr);
	np_test_settled(test);
}

static void np_writable_page_is_dirty(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct folio *folio;

	np_touch(test, t->va, 1);
	folio = page_folio(np_page_at(test, t->va));
	folio_clear_dirty(folio);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	KUNIT_EXPECT_FALSE(test, folio_test_dirty(folio));
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_PTR_EQ(test, page_folio(np_page_at(test, t->va)), folio);
	KUNIT_EXPECT_TRUE(test, folio_test_dirty(folio));
}

static void np_fault_on_resident_page_changes_nothing(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	unsigned int changes, syncs;
	struct np_stats stats;
	u64 words[2] = {};

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 2, RDMA_NP_FAULT_WRITE), 0);
	changes = t->fake.changes;
	syncs = t->fake.syncs;
	KUNIT_EXPECT_EQ(test, np_region_fault(region, region->base, 2 * PAGE_SIZE,
					      RDMA_NP_FAULT_WRITE, NULL, words, 2), 0);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 2, 0), 0);
	KUNIT_EXPECT_EQ(test, t->fake.changes, changes);
	KUNIT_EXPECT_EQ(test, t->fake.syncs, syncs);
	KUNIT_EXPECT_EQ(test, words[0], NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, words[1], NP_WORD_GENERATION | NP_WORD_RIGHTS);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.faults_noop, 4);
	KUNIT_EXPECT_EQ(test, stats.resident, 2);
	KUNIT_EXPECT_EQ(test, stats.writable, 2);
}

static void np_fault_next_to_resident_page_leaves_it_alone(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 1, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_generation(region, 0), 1);
	KUNIT_EXPECT_EQ(test, np_generation(region, 1), 1);
	KUNIT_EXPECT_EQ(test, np_generation(region, 3), 1);
	np_test_settled(test);
}

static void np_upgrade_changes_the_generation(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	phys_addr_t paddr;

	np_touch(test, t->va, 1);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	paddr = np_read_paddr(region, 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, 0),
			2 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	np_test_settled(test);
}

static void np_fault_crosses_slots(struct kunit *test)
{
	struct np_region *region = np_test_region_at(test, 510, 600,
						     NP_TEST_ACCESS);
	u64 words[4] = {};
	unsigned int i;

	KUNIT_ASSERT_EQ(test, np_region_fault(region, region->base + 1,
					      4 * PAGE_SIZE, RDMA_NP_FAULT_WRITE,
					      NULL, words, 4), 0);
	for (i = 0; i < 4; i++)
		KUNIT_EXPECT_EQ(test, words[i],
				NP_WORD_GENERATION | NP_WORD_RIGHTS);
	for (i = 0; i < 5; i++)
		KUNIT_EXPECT_EQ(test, np_rights(region, i), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 5), 0);
	np_test_settled(test);
}

static void np_prefetch_without_fault_takes_what_is_there(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	np_touch(test, t->va + PAGE_SIZE, 1);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, NP_FAULT_PRESENT |
					    RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 2), 0);
	np_test_settled(test);
}

static void np_fault_checks_range(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 2);
	u64 base = region->base, len = region->length;
	static const struct {
		s64 addr;
		s64 len;
		int ret;
	} cases[] = {
		{ 0, 0, -ERANGE },	 { -1, 1, -ERANGE },
		{ -1, 2, -ERANGE },	 { 0, 1, 0 },
		{ 0, 0x2000, 0 },	 { 0, 0x2001, -ERANGE },
		{ 0x1fff, 1, 0 },	 { 0x1fff, 2, -ERANGE },
		{ 0x2000, 1, -ERANGE },	 { 0x2000, 0, -ERANGE },
		{ 1, -1, -ERANGE },	 { 1, S64_MIN, -ERANGE },
		{ S64_MIN, 1, -ERANGE },
	};
	unsigned int i;

	KUNIT_ASSERT_EQ(test, len, 0x2000);
	for (i = 0; i < ARRAY_SIZE(cases); i++)
		KUNIT_EXPECT_EQ_MSG(test,
				    np_region_fault(region, base + cases[i].addr,
						    cases[i].len, 0, NULL, NULL, 0),
				    cases[i].ret, "case %u", i);
}

static void np_fault_checks_rights(struct kunit *test)
{
	struct np_region *region;

	region = np_test_region_at(test, 0, 2, IB_ACCESS_LOCAL_WRITE |
				   IB_ACCESS_REMOTE_WRITE | IB_ACCESS_UNPINNED);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), -EPERM);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, NP_FAULT_LOCAL), 0);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
}

static void np_fault_says_what_is_wrong_with_the_mapping(struct kunit *test)
{
	struct np_region *region;

	np_test_map(test, PROT_READ);
	region = np_test_region(test, 4);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), -EPERM);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	np_test_unmap(test->priv, 2, 1);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 2, 1, 0), -EFAULT);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 1, 3, 0), -EFAULT);
	np_test_settled(test);
}

static void np_failed_split_changes_nothing(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 3, 1, 0), 0);
	t->fake.split_error = -ENOMEM;
	/* The owner is told; a peer asks again */
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE |
					    NP_FAULT_LOCAL), -ENOMEM);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), -EAGAIN);
	KUNIT_EXPECT_EQ(test, np_word(region, 0), 0);
	np_test_settled(test);
	t->fake.split_error = 0;
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_settled(test);
}

static void np_failed_read_leaf_undoes_the_write_leaf(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 3, 1, RDMA_NP_FAULT_WRITE), 0);
	t->fake.read_pages_error = -EINVAL;
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 2, RDMA_NP_FAULT_WRITE), -EINVAL);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 3), NP_WORD_RIGHTS);
	np_test_settled(test);
}

static struct kunit_case np_fault_cases[] = {
	KUNIT_CASE(np_read_fault_maps_read_window_only),
	KUNIT_CASE(np_write_fault_maps_both_windows),
	KUNIT_CASE(np_writable_page_is_dirty),
	KUNIT_CASE(np_fault_on_resident_page_changes_nothing),
	KUNIT_CASE(np_fault_next_to_resident_page_leaves_it_alone),
	KUNIT_CASE(np_upgrade_changes_the_generation),
	KUNIT_CASE(np_fault_crosses_slots),
	KUNIT_CASE(np_prefetch_without_fault_takes_what_is_there),
	KUNIT_CASE(np_fault_checks_range),
	KUNIT_CASE(np_fault_checks_rights),
	KUNIT_CASE(np_fault_says_what_is_wrong_with_the_mapping),
	KUNIT_CASE(np_failed_split_changes_nothing),
	KUNIT_CASE(np_failed_read_leaf_undoes_the_write_leaf),
	{}
};

static struct kunit_suite np_fault_suite = {
	.name = "nprdma_region_fault",
	.init = np_test_init,
	.test_cases = np_fault_cases,
};

kunit_test_suite(np_fault_suite);
