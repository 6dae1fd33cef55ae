// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of windows: what a new region is, where its windows lie, what
 * absent pages of it are, and what remains at its end.
 */
#include <kunit/test.h>
#include <linux/mman.h>

#include "np_region_fixture.h"

static void np_new_region_is_absent_everywhere(struct kunit *test)
{
	struct np_region *region = np_test_region_at(test, 3, 600, NP_TEST_ACCESS);
	struct np_test *t = test->priv;
	u64 leaf;

	KUNIT_EXPECT_EQ(test, region->read.slots, 2);
	KUNIT_EXPECT_EQ(test, region->read.size, 3 * NP_SLOT_SIZE);
	KUNIT_EXPECT_EQ(test, region->write.size, 2 * NP_SLOT_SIZE);
	np_test_settled(test);
	leaf = fake_leaf(&t->fake, np_window_table_iova(&region->read,
							region->read.va));
	KUNIT_EXPECT_EQ(test, fake_paddr(leaf),
			page_to_phys(np_host.zero_page));
	KUNIT_EXPECT_FALSE(test, leaf & IOMMU_WRITE);
	KUNIT_EXPECT_TRUE(test, xa_empty(&region->chunks));
	KUNIT_EXPECT_EQ(test, t->fake.splits, 0);
}

static void np_window_is_congruent_to_the_address(struct kunit *test)
{
	struct np_region *region = np_test_region_at(test, 3, 600, NP_TEST_ACCESS);
	unsigned long mask = 2 * NP_SLOT_SIZE - 1;

	KUNIT_EXPECT_EQ(test, region->read.iova & mask, region->read.va & mask);
	KUNIT_EXPECT_EQ(test, region->write.iova & mask, region->write.va & mask);
}

static void np_signature_fills_its_page(struct kunit *test)
{
	__le64 *words;

	np_test_region(test, 1);
	words = page_address(np_host.signature_page);
	KUNIT_EXPECT_NE(test, np_host.signature, 0);
	KUNIT_EXPECT_EQ(test, le64_to_cpu(words[0]), np_host.signature);
	KUNIT_EXPECT_EQ(test, le64_to_cpu(words[NP_SLOT_SIZE / 8 - 1]),
			np_host.signature);
	KUNIT_EXPECT_PTR_EQ(test, memchr_inv(page_address(np_host.zero_page), 0,
					     NP_SLOT_SIZE), NULL);
}

static void np_region_without_write_right_has_no_write_window(struct kunit *test)
{
	struct np_region *region;

	region = np_test_region_at(test, 0, 4,
				   IB_ACCESS_REMOTE_READ | IB_ACCESS_UNPINNED);
	KUNIT_EXPECT_FALSE(test, np_window_exists(&region->write));
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), -EPERM);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	np_test_settled(test);
	np_test_unmap(test->priv, 0, 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	np_test_settled(test);
}

static void np_closed_region_unmaps_its_windows(struct kunit *test)
{
	struct np_test *t = test->priv;

	np_test_region(test, 600);
	KUNIT_ASSERT_EQ(test, np_test_fault(t->region, 0, 600, RDMA_NP_FAULT_WRITE), 0);
	np_test_close(t);
	KUNIT_EXPECT_TRUE(test, xa_empty(&t->fake.slots));
	KUNIT_EXPECT_EQ(test, kref_read(&t->pd.np->ref), 1);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
}

static void np_scratch_is_shared_within_a_pd_only(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct np_region *a, *b, *c;
	struct ib_pd other = { .device = t->ibdev };

	np_test_map(test, PROT_READ | PROT_WRITE);
	refcount_add(3, &t->npdev.users);
	a = np_region_create(&t->npdev, &t->pd, NULL, &t->fake.domain, t->va,
			     PAGE_SIZE, 0, NP_TEST_ACCESS);
	b = np_region_create(&t->npdev, &t->pd, NULL, &t->fake.domain, t->va,
			     PAGE_SIZE, 0, NP_TEST_ACCESS);
	c = np_region_create(&t->npdev, &other, NULL, &t->fake.domain, t->va,
			     PAGE_SIZE, 0, NP_TEST_ACCESS);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, a);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, b);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, c);
	KUNIT_EXPECT_EQ(test, a->write.absent, b->write.absent);
	KUNIT_EXPECT_NE(test, a->write.absent, c->write.absent);
	KUNIT_EXPECT_NE(test, a->id, b->id);
	np_region_close(a);
	np_region_put(a);
	np_region_close(b);
	/* b's windows still exist, but a new PD at that address must not get its page */
	np_pd_dealloc(&t->pd);
	KUNIT_EXPECT_EQ(test, kref_read(&b->scratch->ref), 1);
	refcount_inc(&t->npdev.users);
	a = np_region_create(&t->npdev, &t->pd, NULL, &t->fake.domain, t->va,
			     PAGE_SIZE, 0, NP_TEST_ACCESS);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, a);
	KUNIT_EXPECT_NE(test, a->write.absent, b->write.absent);
	np_region_put(b);
	np_region_close(a);
	np_region_put(a);
	np_region_close(c);
	np_region_put(c);
	np_pd_dealloc(&other);
}

/* A PD whose regions come and go one at a time clears one page, not one for each. */
static void np_scratch_stays_with_its_pd(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct np_region *region;
	phys_addr_t page = 0;
	int i;

	np_test_map(test, PROT_READ | PROT_WRITE);
	for (i = 0; i < 3; i++) {
		refcount_inc(&t->npdev.users);
		region = np_region_create(&t->npdev, &t->pd, NULL, &t->fake.domain,
					  t->va, PAGE_SIZE, 0, NP_TEST_ACCESS);
		KUNIT_ASSERT_NOT_ERR_OR_NULL(test, region);
		if (i)
			KUNIT_EXPECT_EQ(test, region->write.absent, page);
		page = region->write.absent;
		np_region_close(region);
		np_region_put(region);
	}
}

static struct kunit_case np_window_cases[] = {
	KUNIT_CASE(np_new_region_is_absent_everywhere),
	KUNIT_CASE(np_window_is_congruent_to_the_address),
	KUNIT_CASE(np_signature_fills_its_page),
	KUNIT_CASE(np_region_without_write_right_has_no_write_window),
	KUNIT_CASE(np_closed_region_unmaps_its_windows),
	KUNIT_CASE(np_scratch_is_shared_within_a_pd_only),
	KUNIT_CASE(np_scratch_stays_with_its_pd),
	{}
};

static struct kunit_suite np_window_suite = {
	.name = "nprdma_region_window",
	.init = np_test_init,
	.test_cases = np_window_cases,
};

kunit_test_suite(np_window_suite);
