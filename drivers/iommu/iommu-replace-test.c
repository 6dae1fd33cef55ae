// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of what is common to all drivers that replace live translations:
 * which domains and arguments are refused, how ranges to invalidate are gathered,
 * and how ranges of addresses are taken from the DMA API.
 *
 * The driver here is a recorder. The tests of real page tables are those of the
 * drivers, such as intel/vtd-replace-test.c. The last suite uses a device of this
 * machine, if it has one whose DMA is translated.
 */
#include <kunit/test.h>
#include <kunit/visibility.h>
#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/iommu.h>
#include <linux/iova.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/prandom.h>
#include <linux/sizes.h>

#include "dma-iommu.h"

#define RW	(IOMMU_READ | IOMMU_WRITE)

/* ---- a driver that notes its calls ---- */

struct mock_domain {
	const char *refusal;
	struct iommu_domain domain;
	unsigned int calls;
	unsigned int syncs;
	unsigned int sync_maps;
	unsigned long iova;
	size_t len;
	phys_addr_t paddr;
	size_t map_fill_mapped;		/* how far ->map_fill() comes before it fails */
	size_t unmapped;
	int ret;
};

static struct mock_domain *to_mock(struct iommu_domain *domain)
{
	return container_of(domain, struct mock_domain, domain);
}

static const char *mock_refusal(struct iommu_domain *domain)
{
	return to_mock(domain)->refusal;
}

static int mock_call(struct iommu_domain *domain, unsigned long iova, size_t len,
		     phys_addr_t paddr)
{
	struct mock_domain *mock = to_mock(domain);

	mock->calls++;
	mock->iova = iova;
	mock->len = len;
	mock->paddr = paddr;

	return mock->ret;
}

static int mock_replace(struct iommu_domain *domain, unsigned long iova, size_t pgsize,
			phys_addr_t paddr, int prot, struct iommu_leaf *old,
			struct iommu_inval *inval)
{
	return mock_call(domain, iova, pgsize, paddr);
}

static int mock_replace_pages(struct iommu_domain *domain, unsigned long iova,
			      unsigned int npages, const phys_addr_t *paddrs, int prot,
			      struct iommu_inval *inval)
{
	return mock_call(domain, iova, npages * (size_t)SZ_4K, paddrs[0]);
}

static int mock_replace_fill(struct iommu_domain *domain, unsigned long iova, size_t len,
			     phys_addr_t paddr, int prot, struct iommu_inval *inval)
{
	return mock_call(domain, iova, len, paddr);
}

static int mock_split(struct iommu_domain *domain, unsigned long iova, gfp_t gfp)
{
	return mock_call(domain, iova, SZ_2M, 0);
}

static int mock_merge(struct iommu_domain *domain, unsigned long iova, phys_addr_t paddr,
		      int prot, struct iommu_inval *inval)
{
	return mock_call(domain, iova, SZ_2M, paddr);
}

static int mock_map_fill(struct iommu_domain *domain, unsigned long iova, size_t len,
			 phys_addr_t paddr, int prot, gfp_t gfp, size_t *mapped)
{
	struct mock_domain *mock = to_mock(domain);

	*mapped = mock->ret ? mock->map_fill_mapped : len;

	return mock_call(domain, iova, len, paddr);
}

static void mock_inval_sync(struct iommu_domain *domain, struct iommu_inval *inval)
{
	to_mock(domain)->syncs++;
}

static const struct iommu_replace_ops mock_replace_ops = {
	.refusal = mock_refusal,
	.replace = mock_replace,
	.replace_pages = mock_replace_pages,
	.replace_fill = mock_replace_fill,
	.split = mock_split,
	.merge = mock_merge,
	.map_fill = mock_map_fill,
	.inval_sync = mock_inval_sync,
};

static size_t mock_unmap_pages(struct iommu_domain *domain, unsigned long iova,
			       size_t pgsize, size_t pgcount,
			       struct iommu_iotlb_gather *gather)
{
	to_mock(domain)->unmapped += pgsize * pgcount;

	return pgsize * pgcount;
}

static int mock_sync_map(struct iommu_domain *domain, unsigned long iova, size_t size)
{
	to_mock(domain)->sync_maps++;

	return 0;
}

static const struct iommu_domain_ops mock_ops = {
	.unmap_pages = mock_unmap_pages,
	.iotlb_sync_map = mock_sync_map,
};

static int mock_init(struct kunit *test)
{
	struct mock_domain *mock = kunit_kzalloc(test, sizeof(*mock), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, mock);
	mock->domain.type = IOMMU_DOMAIN_DMA;
	mock->domain.pgsize_bitmap = SZ_4K | SZ_2M;
	mock->domain.ops = &mock_ops;
	mock->domain.replace_ops = &mock_replace_ops;
	test->priv = mock;

	return 0;
}

/* All calls of the family; they must agree on which domains they work. */
static void expect_all(struct kunit *test, struct iommu_domain *domain, int ret)
{
	phys_addr_t paddr = SZ_2M;
	struct iommu_inval inval;

	iommu_inval_init(&inval);
	KUNIT_EXPECT_EQ(test, iommu_replace(domain, 0, SZ_4K, paddr, RW, NULL, &inval), ret);
	KUNIT_EXPECT_EQ(test, iommu_replace(domain, 0, SZ_2M, paddr, RW, NULL, &inval), ret);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(domain, 0, 1, &paddr, RW, &inval), ret);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(domain, 0, SZ_4K, paddr, RW, &inval), ret);
	KUNIT_EXPECT_EQ(test, iommu_split(domain, 0, GFP_KERNEL), ret);
	KUNIT_EXPECT_EQ(test, iommu_merge_leaves(domain, 0, paddr, RW, &inval), ret);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(domain, 0, SZ_2M, paddr, RW, GFP_KERNEL), ret);
	KUNIT_EXPECT_EQ(test, inval.nr_ranges, 0U);
}

static void a_driver_without_the_operations_is_refused(struct kunit *test)
{
	struct mock_domain *mock = test->priv;
	struct iommu_replace_ops ops = mock_replace_ops;

	mock->domain.replace_ops = NULL;
	KUNIT_EXPECT_FALSE(test, iommu_can_replace(&mock->domain));
	expect_all(test, &mock->domain, -EOPNOTSUPP);

	/* Some are not enough. */
	mock->domain.replace_ops = &ops;
	KUNIT_EXPECT_TRUE(test, iommu_can_replace(&mock->domain));
	ops.inval_sync = NULL;
	expect_all(test, &mock->domain, -EOPNOTSUPP);
	ops = mock_replace_ops;
	ops.split = NULL;
	expect_all(test, &mock->domain, -EOPNOTSUPP);
	ops = mock_replace_ops;
	ops.merge = NULL;
	expect_all(test, &mock->domain, -EOPNOTSUPP);
	ops = mock_replace_ops;
	ops.replace = NULL;
	expect_all(test, &mock->domain, -EOPNOTSUPP);
	ops = mock_replace_ops;
	ops.replace_pages = NULL;
	expect_all(test, &mock->domain, -EOPNOTSUPP);
	ops = mock_replace_ops;
	ops.replace_fill = NULL;
	expect_all(test, &mock->domain, -EOPNOTSUPP);
	ops = mock_replace_ops;
	ops.map_fill = NULL;
	expect_all(test, &mock->domain, -EOPNOTSUPP);
	KUNIT_EXPECT_EQ(test, mock->calls, 0U);
	/* The stack frame goes away. */
	mock->domain.replace_ops = NULL;
}

static void a_domain_that_does_not_translate_is_refused(struct kunit *test)
{
	struct mock_domain *mock = test->priv;

	KUNIT_EXPECT_FALSE(test, iommu_can_replace(NULL));
	expect_all(test, NULL, -EOPNOTSUPP);
	mock->domain.type = IOMMU_DOMAIN_IDENTITY;
	expect_all(test, &mock->domain, -EOPNOTSUPP);
	mock->domain.type = IOMMU_DOMAIN_BLOCKED;
	expect_all(test, &mock->domain, -EOPNOTSUPP);
	mock->domain.type = IOMMU_DOMAIN_DMA_FQ;
	expect_all(test, &mock->domain, 0);
}

static void a_domain_without_both_page_sizes_is_refused(struct kunit *test)
{
	struct mock_domain *mock = test->priv;

	mock->domain.pgsize_bitmap = SZ_4K;
	expect_all(test, &mock->domain, -EOPNOTSUPP);
	mock->domain.pgsize_bitmap = SZ_2M | SZ_1G;
	expect_all(test, &mock->domain, -EOPNOTSUPP);
	mock->domain.pgsize_bitmap = SZ_4K | SZ_2M | SZ_1G;
	expect_all(test, &mock->domain, 0);
}

static void bad_arguments_do_not_reach_the_driver(struct kunit *test)
{
	struct mock_domain *mock = test->priv;
	struct iommu_domain *d = &mock->domain;
	const unsigned long top = ~0UL - SZ_2M + 1;	/* the last 2 MiB */
	phys_addr_t paddr = 0;
	struct iommu_inval inval;

	iommu_inval_init(&inval);
	/* No length, or not of whole leaves */
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(d, 0, 0, &paddr, RW, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(d, 0, 0, 0, RW, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(d, 0, 0, 0, RW, GFP_KERNEL), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace(d, 0, 0, 0, RW, NULL, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace(d, 0, SZ_8K, 0, RW, NULL, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace(d, 0, SZ_1G, 0, RW, NULL, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(d, 0, SZ_4K + 1, 0, RW, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(d, 0, SZ_4K - 1, 0, RW, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(d, 0, SZ_2M + SZ_4K, 0, RW, GFP_KERNEL),
			-EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(d, 0, SZ_2M - SZ_4K, 0, RW, GFP_KERNEL),
			-EINVAL);
	/* Addresses not aligned */
	KUNIT_EXPECT_EQ(test, iommu_replace(d, 1, SZ_4K, 0, RW, NULL, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace(d, SZ_4K, SZ_2M, 0, RW, NULL, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace(d, 0, SZ_4K, SZ_2K, RW, NULL, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace(d, 0, SZ_2M, SZ_4K, RW, NULL, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(d, SZ_2K, 1, &paddr, RW, &inval),
			-EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(d, SZ_2K, SZ_4K, 0, RW, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(d, 0, SZ_4K, SZ_4K, RW, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_merge_leaves(d, SZ_4K, 0, RW, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_merge_leaves(d, 0, SZ_4K, RW, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(d, SZ_4K, SZ_2M, 0, RW, GFP_KERNEL), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(d, 0, SZ_2M, SZ_4K, RW, GFP_KERNEL), -EINVAL);
	/* Ranges that wrap */
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(d, top, 513, &paddr, RW, &inval),
			-EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(d, top, SZ_2M + SZ_4K, 0, RW, &inval),
			-EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(d, top, 2 * SZ_2M, 0, RW, GFP_KERNEL), -EINVAL);
	/* A leaf that nobody may use would be as good as none. */
	KUNIT_EXPECT_EQ(test, iommu_replace(d, 0, SZ_4K, 0, 0, NULL, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(d, 0, 1, &paddr, IOMMU_CACHE, &inval),
			-EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(d, 0, SZ_4K, 0, 0, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_merge_leaves(d, 0, 0, 0, &inval), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(d, 0, SZ_2M, 0, 0, GFP_KERNEL), -EINVAL);
	KUNIT_EXPECT_EQ(test, mock->calls, 0U);
	KUNIT_EXPECT_EQ(test, inval.nr_ranges, 0U);

	/* Up to the last byte is fine. */
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(d, top, 512, &paddr, RW, &inval), 0);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(d, top, SZ_2M, 0, RW, &inval), 0);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(d, top, SZ_2M, 0, RW, GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, mock->calls, 3U);
}

static void split_takes_any_address_of_the_slot(struct kunit *test)
{
	struct mock_domain *mock = test->priv;

	KUNIT_EXPECT_EQ(test, iommu_split(&mock->domain, SZ_1G + SZ_2M - 1, GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, mock->iova, (unsigned long)SZ_1G);
	KUNIT_EXPECT_EQ(test, iommu_split(&mock->domain, SZ_1G + SZ_2M, GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, mock->iova, SZ_1G + (unsigned long)SZ_2M);
}

static void map_fill_that_fails_is_undone(struct kunit *test)
{
	struct mock_domain *mock = test->priv;

	KUNIT_EXPECT_EQ(test, iommu_map_fill(&mock->domain, SZ_2M, 8 * SZ_2M, 0, RW,
					     GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, mock->sync_maps, 1U);
	KUNIT_EXPECT_EQ(test, mock->unmapped, 0UL);

	mock->ret = -ENOMEM;
	mock->map_fill_mapped = 3 * SZ_2M;
	KUNIT_EXPECT_EQ(test, iommu_map_fill(&mock->domain, SZ_2M, 8 * SZ_2M, 0, RW,
					     GFP_KERNEL), -ENOMEM);
	KUNIT_EXPECT_EQ(test, mock->unmapped, 3UL * SZ_2M);
	KUNIT_EXPECT_EQ(test, mock->sync_maps, 1U);

	mock->unmapped = 0;
	mock->map_fill_mapped = 0;
	KUNIT_EXPECT_EQ(test, iommu_map_fill(&mock->domain, SZ_2M, 8 * SZ_2M, 0, RW,
					     GFP_KERNEL), -ENOMEM);
	KUNIT_EXPECT_EQ(test, mock->unmapped, 0UL);
}

static struct kunit_case replace_cases[] = {
	KUNIT_CASE(a_driver_without_the_operations_is_refused),
	KUNIT_CASE(a_domain_that_does_not_translate_is_refused),
	KUNIT_CASE(a_domain_without_both_page_sizes_is_refused),
	KUNIT_CASE(bad_arguments_do_not_reach_the_driver),
	KUNIT_CASE(split_takes_any_address_of_the_slot),
	KUNIT_CASE(map_fill_that_fails_is_undone),
	{}
};

static struct kunit_suite replace_suite = {
	.name = "iommu_replace",
	.init = mock_init,
	.test_cases = replace_cases,
};

/* ---- ranges to invalidate ---- */

static void expect_range(struct kunit *test, const struct iommu_inval *inval,
			 unsigned int i, unsigned long start, unsigned long last,
			 bool tables)
{
	KUNIT_ASSERT_LT(test, i, inval->nr_ranges);
	KUNIT_EXPECT_EQ(test, inval->range[i].start, start);
	KUNIT_EXPECT_EQ(test, inval->range[i].last, last);
	KUNIT_EXPECT_EQ(test, inval->range[i].tables, tables);
}

static void ranges_that_touch_become_one(struct kunit *test)
{
	struct iommu_inval inval;

	iommu_inval_init(&inval);
	iommu_inval_add(&inval, 0x2000, SZ_4K, false);
	iommu_inval_add(&inval, 0x3000, SZ_4K, false);		/* above */
	iommu_inval_add(&inval, 0x1000, SZ_4K, false);		/* below */
	iommu_inval_add(&inval, 0x2000, SZ_4K, false);		/* within */
	iommu_inval_add(&inval, 0x3000, SZ_8K, false);		/* beyond */
	KUNIT_EXPECT_EQ(test, inval.nr_ranges, 1U);
	expect_range(test, &inval, 0, 0x1000, 0x4fff, false);
}

static void ranges_one_page_apart_stay_apart(struct kunit *test)
{
	struct iommu_inval inval;

	iommu_inval_init(&inval);
	iommu_inval_add(&inval, 0x1000, SZ_4K, false);
	iommu_inval_add(&inval, 0x3000, SZ_4K, true);
	KUNIT_EXPECT_EQ(test, inval.nr_ranges, 2U);
	expect_range(test, &inval, 0, 0x1000, 0x1fff, false);
	expect_range(test, &inval, 1, 0x3000, 0x3fff, true);
	/* What fills the gap joins both, and tables are not forgotten. */
	iommu_inval_add(&inval, 0x2000, SZ_4K, false);
	KUNIT_EXPECT_EQ(test, inval.nr_ranges, 1U);
	expect_range(test, &inval, 0, 0x1000, 0x3fff, true);
}

static void a_range_too_many_joins_the_nearest(struct kunit *test)
{
	struct iommu_inval inval;
	int i;

	iommu_inval_init(&inval);
	for (i = 0; i < IOMMU_INVAL_RANGES; i++)
		iommu_inval_add(&inval, (i + 1UL) << 30, SZ_4K, i == 1);
	KUNIT_EXPECT_EQ(test, inval.nr_ranges, (unsigned int)IOMMU_INVAL_RANGES);
	iommu_inval_add(&inval, (3UL << 30) - SZ_64K, SZ_4K, false);
	KUNIT_EXPECT_EQ(test, inval.nr_ranges, (unsigned int)IOMMU_INVAL_RANGES);
	expect_range(test, &inval, IOMMU_INVAL_RANGES - 1, (3UL << 30) - SZ_64K,
		     (3UL << 30) + SZ_4K - 1, false);
	for (i = 0; i < IOMMU_INVAL_RANGES - 1; i++)
		KUNIT_EXPECT_EQ(test, inval.range[i].last - inval.range[i].start,
				SZ_4K - 1UL);
}

/* Whatever was added is covered, with its tables; ranges never overlap. */
static void nothing_that_was_added_is_lost(struct kunit *test)
{
	enum { PAGES = 256 };
	struct iommu_inval inval;
	struct rnd_state rnd;
	int round, add, i, j;

	prandom_seed_state(&rnd, 4);
	for (round = 0; round < 2000; round++) {
		u8 added[PAGES] = {};

		iommu_inval_init(&inval);
		for (add = 0; add < 12; add++) {
			u32 from = prandom_u32_state(&rnd) % PAGES;
			u32 n = 1 + prandom_u32_state(&rnd) % min(8U, PAGES - from);
			bool tables = !(prandom_u32_state(&rnd) & 3);

			iommu_inval_add(&inval, from * (unsigned long)SZ_4K,
					n * (size_t)SZ_4K, tables);
			for (i = from; i < from + n; i++)
				added[i] |= 1 | tables << 1;

			KUNIT_ASSERT_LE(test, inval.nr_ranges,
					(unsigned int)IOMMU_INVAL_RANGES);
			for (i = 0; i < PAGES; i++) {
				unsigned long iova = i * (unsigned long)SZ_4K;
				int n_in = 0;

				for (j = 0; j < inval.nr_ranges; j++) {
					if (iova < inval.range[j].start ||
					    iova > inval.range[j].last)
						continue;
					n_in++;
					if (added[i] & 2)
						KUNIT_ASSERT_TRUE(test,
								  inval.range[j].tables);
				}
				KUNIT_ASSERT_LE(test, n_in, 1);
				if (added[i])
					KUNIT_ASSERT_EQ(test, n_in, 1);
			}
		}
	}
}

static void sync_empties_and_an_empty_sync_is_none(struct kunit *test)
{
	struct mock_domain *mock = test->priv;
	struct iommu_inval inval;

	iommu_inval_init(&inval);
	iommu_inval_sync(&mock->domain, &inval);
	KUNIT_EXPECT_EQ(test, mock->syncs, 0U);
	iommu_inval_add(&inval, 0, SZ_4K, false);
	iommu_inval_sync(&mock->domain, &inval);
	KUNIT_EXPECT_EQ(test, mock->syncs, 1U);
	KUNIT_EXPECT_EQ(test, inval.nr_ranges, 0U);
	iommu_inval_sync(&mock->domain, &inval);
	KUNIT_EXPECT_EQ(test, mock->syncs, 1U);
}

static struct kunit_case inval_cases[] = {
	KUNIT_CASE(ranges_that_touch_become_one),
	KUNIT_CASE(ranges_one_page_apart_stay_apart),
	KUNIT_CASE(a_range_too_many_joins_the_nearest),
	KUNIT_CASE(nothing_that_was_added_is_lost),
	KUNIT_CASE(sync_empties_and_an_empty_sync_is_none),
	{}
};

static struct kunit_suite inval_suite = {
	.name = "iommu_inval",
	.init = mock_init,
	.test_cases = inval_cases,
};

/* ---- addresses with a given remainder ---- */

static void put_iovad(void *data)
{
	put_iova_domain(data);
	iova_cache_put();
}

static int iova_init(struct kunit *test)
{
	struct iova_domain *iovad = kunit_kzalloc(test, sizeof(*iovad), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, iovad);
	KUNIT_ASSERT_EQ(test, iova_cache_get(), 0);
	init_iova_domain(iovad, SZ_4K, 1);
	KUNIT_ASSERT_EQ(test, iova_domain_init_rcaches(iovad), 0);
	KUNIT_ASSERT_EQ(test, kunit_add_action_or_reset(test, put_iovad, iovad), 0);
	test->priv = iovad;

	return 0;
}

static void remainders_are_as_asked_for(struct kunit *test)
{
	static const unsigned long sizes[] = { 1, 2, 511, 512, 513, 1000, 1 << 18 };
	static const unsigned long limits[] = { (1UL << 20) - 1, (1UL << 27) - 1,
						~0UL >> PAGE_SHIFT };
	struct iova_domain *iovad = test->priv;
	unsigned int s, l, shift;

	for (l = 0; l < ARRAY_SIZE(limits); l++) {
		for (s = 0; s < ARRAY_SIZE(sizes); s++) {
			for (shift = 0; shift <= 18; shift += 3) {
				unsigned long align = 1UL << shift;
				unsigned long offs[] = { 0, 1, align / 2, align - 1 };
				int i;

				for (i = 0; i < ARRAY_SIZE(offs); i++) {
					struct iova *iova;

					if (offs[i] >= align)
						continue;
					iova = alloc_iova_congruent(iovad, sizes[s],
								    limits[l], align,
								    offs[i]);
					KUNIT_ASSERT_NOT_NULL(test, iova);
					KUNIT_EXPECT_EQ(test, iova->pfn_lo % align,
							offs[i]);
					KUNIT_EXPECT_EQ(test, iova_size(iova), sizes[s]);
					KUNIT_EXPECT_LE(test, iova->pfn_hi, limits[l]);
					KUNIT_EXPECT_GE(test, iova->pfn_lo, 1UL);
					__free_iova(iovad, iova);
				}
			}
		}
	}
}

static void the_last_place_is_found_and_no_other(struct kunit *test)
{
	struct iova_domain *iovad = test->priv;
	struct iova *a, *b;

	/* Pages 1 to 31: of 8 pages at 3 modulo 8 there are 3, 11 and 19. */
	a = alloc_iova_congruent(iovad, 8, 31, 8, 3);
	KUNIT_ASSERT_NOT_NULL(test, a);
	KUNIT_EXPECT_EQ(test, a->pfn_lo, 19UL);
	b = alloc_iova_congruent(iovad, 8, 31, 8, 3);
	KUNIT_ASSERT_NOT_NULL(test, b);
	KUNIT_EXPECT_EQ(test, b->pfn_lo, 11UL);
	b = alloc_iova_congruent(iovad, 8, 31, 8, 3);
	KUNIT_ASSERT_NOT_NULL(test, b);
	KUNIT_EXPECT_EQ(test, b->pfn_lo, 3UL);
	KUNIT_EXPECT_NULL(test, alloc_iova_congruent(iovad, 8, 31, 8, 3));
	/* 5 pages at 3 modulo 8 end at page 31, those of 6 would not. */
	KUNIT_EXPECT_NULL(test, alloc_iova_congruent(iovad, 6, 31, 8, 3));
	b = alloc_iova_congruent(iovad, 5, 31, 8, 3);
	KUNIT_ASSERT_NOT_NULL(test, b);
	KUNIT_EXPECT_EQ(test, b->pfn_lo, 27UL);
	/* What is given back can be had again. */
	__free_iova(iovad, a);
	a = alloc_iova_congruent(iovad, 8, 31, 8, 3);
	KUNIT_ASSERT_NOT_NULL(test, a);
	KUNIT_EXPECT_EQ(test, a->pfn_lo, 19UL);
	/* More than there is, at any remainder */
	KUNIT_EXPECT_NULL(test, alloc_iova_congruent(iovad, 32, 31, 1, 0));
	KUNIT_EXPECT_NULL(test, alloc_iova_congruent(iovad, 1, 31, 64, 63));
	KUNIT_EXPECT_NULL(test, alloc_iova_congruent(iovad, 1, 31, 64, 32));
}

/* A remainder that cannot be had says nothing about what others can have. */
static void a_failure_does_not_spoil_it_for_others(struct kunit *test)
{
	struct iova_domain *iovad = test->priv;
	const unsigned long top = (1UL << 20) - 1;

	KUNIT_EXPECT_NULL(test, alloc_iova_congruent(iovad, 16, top, 1UL << 30, 1UL << 29));
	KUNIT_EXPECT_NULL(test, alloc_iova_congruent(iovad, 16, top, 1UL << 30, 0));
	KUNIT_EXPECT_NOT_NULL(test, alloc_iova(iovad, 16, top, true));
	KUNIT_EXPECT_NOT_NULL(test, alloc_iova(iovad, 512, top, true));
}

static void plain_allocation_is_as_before(struct kunit *test)
{
	struct iova_domain *iovad = test->priv;
	struct iova *iova;

	/* Top down, aligned to the next power of two if asked for */
	iova = alloc_iova(iovad, 3, 1023, true);
	KUNIT_ASSERT_NOT_NULL(test, iova);
	KUNIT_EXPECT_EQ(test, iova->pfn_lo, 1020UL);
	iova = alloc_iova(iovad, 3, 1023, false);
	KUNIT_ASSERT_NOT_NULL(test, iova);
	KUNIT_EXPECT_EQ(test, iova->pfn_lo, 1017UL);
	iova = alloc_iova(iovad, 1, 1023, true);
	KUNIT_ASSERT_NOT_NULL(test, iova);
	KUNIT_EXPECT_EQ(test, iova->pfn_lo, 1016UL);
	iova = alloc_iova(iovad, 256, 1023, true);
	KUNIT_ASSERT_NOT_NULL(test, iova);
	KUNIT_EXPECT_EQ(test, iova->pfn_lo, 512UL);
	/* The first page is not for sale, so there are 511 below. */
	KUNIT_EXPECT_NULL(test, alloc_iova(iovad, 512, 1023, false));
	KUNIT_EXPECT_NOT_NULL(test, alloc_iova(iovad, 511, 1023, false));
}

/* Both kinds at random against a map of pages: no page has two owners. */
static void ranges_never_overlap(struct kunit *test)
{
	enum { PAGES = 4096, HELD = 64 };
	struct iova_domain *iovad = test->priv;
	struct iova *held[HELD] = {};
	unsigned long got = 0, i;
	struct rnd_state rnd;
	int round;
	u8 *owner;

	owner = kunit_kzalloc(test, PAGES, GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, owner);
	prandom_seed_state(&rnd, 5);
	for (round = 0; round < 20000; round++) {
		u32 slot = prandom_u32_state(&rnd) % HELD;
		u32 size = 1 + prandom_u32_state(&rnd) % 100;
		struct iova *iova = held[slot];

		if (iova) {
			for (i = iova->pfn_lo; i <= iova->pfn_hi; i++) {
				KUNIT_ASSERT_EQ(test, owner[i], slot + 1);
				owner[i] = 0;
			}
			__free_iova(iovad, iova);
			held[slot] = NULL;
			continue;
		}
		if (prandom_u32_state(&rnd) & 1) {
			u32 align = 1 << prandom_u32_state(&rnd) % 8;
			u32 offset = prandom_u32_state(&rnd) % align;

			iova = alloc_iova_congruent(iovad, size, PAGES - 1, align, offset);
			if (iova)
				KUNIT_ASSERT_EQ(test, iova->pfn_lo % align, offset);
		} else {
			iova = alloc_iova(iovad, size, PAGES - 1, true);
		}
		if (!iova)
			continue;
		KUNIT_ASSERT_LT(test, iova->pfn_hi, (unsigned long)PAGES);
		for (i = iova->pfn_lo; i <= iova->pfn_hi; i++) {
			KUNIT_ASSERT_EQ(test, owner[i], 0);
			owner[i] = slot + 1;
		}
		held[slot] = iova;
		got++;
	}
	KUNIT_EXPECT_GT(test, got, 5000UL);
}

static struct kunit_case iova_cases[] = {
	KUNIT_CASE(remainders_are_as_asked_for),
	KUNIT_CASE(the_last_place_is_found_and_no_other),
	KUNIT_CASE(a_failure_does_not_spoil_it_for_others),
	KUNIT_CASE(plain_allocation_is_as_before),
	KUNIT_CASE(ranges_never_overlap),
	{}
};

static struct kunit_suite iova_suite = {
	.name = "iova_congruent",
	.init = iova_init,
	.test_cases = iova_cases,
};

/* ---- the DMA API's domains ---- */

static int mock_identity(struct device *dev)
{
	return IOMMU_DOMAIN_IDENTITY;
}

static int mock_any_type(struct device *dev)
{
	return 0;
}

static const struct iommu_ops mock_forces_passthrough = {
	.def_domain_type = mock_identity,
};

static const struct iommu_ops mock_leaves_it_to_others = {
	.def_domain_type = mock_any_type,
};

/* One device for each reason, made up */
static void each_refusal_has_its_own_error_and_reason(struct kunit *test)
{
	struct mock_domain *mock = test->priv;
	struct iommu_domain *d = &mock->domain;
	struct iommu_device *unit;
	struct dev_iommu *param;
	struct pci_dev *pdev;
	const char *why;
	int err;

	pdev = kunit_kzalloc(test, sizeof(*pdev), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, pdev);
	param = kunit_kzalloc(test, sizeof(*param), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, param);
	unit = kunit_kzalloc(test, sizeof(*unit), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, unit);
	unit->ops = &mock_leaves_it_to_others;
	param->iommu_dev = unit;
	KUNIT_ASSERT_EQ(test, iommu_get_dma_cookie(d), 0);
	pdev->dev.bus = &pci_bus_type;
	pdev->dev.dma_iommu = true;

	KUNIT_EXPECT_NULL(test, dma_replace_refusal(&pdev->dev, d, &err));

	KUNIT_EXPECT_NOT_NULL(test, dma_replace_refusal(&pdev->dev, NULL, &err));
	KUNIT_EXPECT_EQ(test, err, -ENODEV);

	d->type = IOMMU_DOMAIN_IDENTITY;
	why = dma_replace_refusal(&pdev->dev, d, &err);
	KUNIT_ASSERT_NOT_NULL(test, why);
	KUNIT_EXPECT_NOT_NULL(test, strstr(why, "passthrough"));
	KUNIT_EXPECT_EQ(test, err, -EPERM);

	/* The driver of AMD's IOMMU insists for what has PASID; without one nobody does. */
	pdev->dev.iommu = param;
	KUNIT_EXPECT_PTR_EQ(test, dma_replace_refusal(&pdev->dev, d, &err), why);
	unit->ops = &mock_forces_passthrough;
	KUNIT_ASSERT_NOT_NULL(test, dma_replace_refusal(&pdev->dev, d, &err));
	KUNIT_EXPECT_NOT_NULL(test, strstr(dma_replace_refusal(&pdev->dev, d, &err),
					   "amd_iommu=force_isolation"));
	KUNIT_EXPECT_EQ(test, err, -EPERM);
	pdev->dev.iommu = NULL;

	/* Owned by VFIO, say */
	d->type = IOMMU_DOMAIN_UNMANAGED;
	KUNIT_EXPECT_NOT_NULL(test, dma_replace_refusal(&pdev->dev, d, &err));
	KUNIT_EXPECT_EQ(test, err, -EBUSY);

	/* A driver with DMA operations of its own */
	d->type = IOMMU_DOMAIN_DMA;
	pdev->dev.dma_iommu = false;
	KUNIT_EXPECT_NOT_NULL(test, dma_replace_refusal(&pdev->dev, d, &err));
	KUNIT_EXPECT_EQ(test, err, -EBUSY);
	pdev->dev.dma_iommu = true;

	pdev->untrusted = true;
	KUNIT_EXPECT_NOT_NULL(test, dma_replace_refusal(&pdev->dev, d, &err));
	KUNIT_EXPECT_EQ(test, err, -EACCES);
	pdev->untrusted = false;

	mock->refusal = "the unit is too old";
	why = dma_replace_refusal(&pdev->dev, d, &err);
	KUNIT_EXPECT_PTR_EQ(test, why, mock->refusal);
	KUNIT_EXPECT_EQ(test, err, -EOPNOTSUPP);
	mock->refusal = NULL;

	d->replace_ops = NULL;
	KUNIT_EXPECT_NOT_NULL(test, dma_replace_refusal(&pdev->dev, d, &err));
	KUNIT_EXPECT_EQ(test, err, -EOPNOTSUPP);

	iommu_put_dma_cookie(d);
	KUNIT_EXPECT_NOT_NULL(test, dma_replace_refusal(&pdev->dev, d, &err));
	KUNIT_EXPECT_EQ(test, err, -EBUSY);
}

static struct device *real_device(struct kunit *test, unsigned int type)
{
	struct pci_dev *pdev = NULL;

	for_each_pci_dev(pdev) {
		struct iommu_domain *domain = iommu_get_domain_for_dev(&pdev->dev);

		if (domain && (domain->type & type) == type) {
			struct device *dev = &pdev->dev;

			/* Devices of a machine under test do not go away. */
			pci_dev_put(pdev);
			return dev;
		}
	}

	return NULL;
}

static void a_real_device_in_passthrough_is_refused(struct kunit *test)
{
	struct device *dev = real_device(test, IOMMU_DOMAIN_IDENTITY);
	const char *why;
	dma_addr_t iova;

	if (!dev)
		kunit_skip(test, "no device in a passthrough domain (boot with iommu=pt)");
	KUNIT_EXPECT_EQ(test, PTR_ERR(iommu_dma_replaceable_domain(dev, &why)), -EPERM);
	KUNIT_ASSERT_NOT_NULL(test, why);
	KUNIT_EXPECT_NOT_NULL(test, strstr(why, "passthrough"));
	KUNIT_EXPECT_EQ(test, iommu_dma_reserve_iova(dev, SZ_4K, SZ_4K, 0, &iova),
			-EOPNOTSUPP);
}

static void a_device_without_iommu_is_refused(struct kunit *test)
{
	struct device *dev = kunit_kzalloc(test, sizeof(*dev), GFP_KERNEL);
	const char *why;
	dma_addr_t iova;

	KUNIT_ASSERT_NOT_NULL(test, dev);
	KUNIT_EXPECT_EQ(test, PTR_ERR(iommu_dma_replaceable_domain(dev, &why)), -ENODEV);
	KUNIT_EXPECT_NOT_NULL(test, why);
	KUNIT_EXPECT_EQ(test, iommu_dma_reserve_iova(dev, SZ_4K, SZ_4K, 0, &iova),
			-EOPNOTSUPP);
}

static void a_real_device_has_its_range_to_itself(struct kunit *test)
{
	struct device *dev = real_device(test, __IOMMU_DOMAIN_DMA_API);
	struct iommu_domain *domain;
	dma_addr_t iova, again;
	const char *why;

	if (!dev)
		kunit_skip(test, "no device whose DMA is translated");
	domain = iommu_dma_replaceable_domain(dev, &why);
	if (IS_ERR(domain))
		kunit_skip(test, "%s: %s", dev_name(dev), why);

	KUNIT_EXPECT_NULL(test, why);
	KUNIT_EXPECT_EQ(test, iommu_dma_reserve_iova(dev, 0, SZ_4K, 0, &iova), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_dma_reserve_iova(dev, SZ_2K, SZ_4K, 0, &iova), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_dma_reserve_iova(dev, SZ_4K, SZ_2K, 0, &iova), -EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_dma_reserve_iova(dev, SZ_4K, 3 * SZ_4K, 0, &iova),
			-EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_dma_reserve_iova(dev, SZ_4K, SZ_4K, SZ_4K, &iova),
			-EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_dma_reserve_iova(dev, SZ_4K, SZ_2M, SZ_2K, &iova),
			-EINVAL);
	KUNIT_EXPECT_EQ(test, iommu_dma_reserve_iova(dev, PAGE_MASK, SZ_4K, 0, &iova),
			-ENOSPC);

	/* Room for both also within the 32 bits of a device that has no driver */
	KUNIT_ASSERT_EQ(test, iommu_dma_reserve_iova(dev, 4 * SZ_2M, SZ_64M, 6 * SZ_2M,
						     &iova), 0);
	KUNIT_EXPECT_EQ(test, iova % SZ_64M, 6ULL * SZ_2M);
	KUNIT_EXPECT_LE(test, iova + 4 * SZ_2M - 1, dma_get_mask(dev));
	KUNIT_ASSERT_EQ(test, iommu_dma_reserve_iova(dev, 4 * SZ_2M, SZ_64M, 6 * SZ_2M,
						     &again), 0);
	KUNIT_EXPECT_EQ(test, again % SZ_64M, 6ULL * SZ_2M);
	KUNIT_EXPECT_NE(test, iova, again);
	iommu_dma_release_iova(dev, again, 4 * SZ_2M);

	/* It can be mapped, and all of it is gone when it is unmapped. */
	KUNIT_EXPECT_EQ(test, iommu_map_fill(domain, iova, 4 * SZ_2M, SZ_1G, IOMMU_READ,
					     GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, iommu_iova_to_phys(domain, iova + SZ_2M + 5), SZ_1G + 5ULL);
	KUNIT_EXPECT_EQ(test, iommu_split(domain, iova, GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, iommu_iova_to_phys(domain, iova + SZ_4K), SZ_1G + SZ_4K + 0ULL);
	KUNIT_EXPECT_EQ(test, iommu_unmap(domain, iova, 4 * SZ_2M), 4UL * SZ_2M);
	KUNIT_EXPECT_EQ(test, iommu_iova_to_phys(domain, iova), 0ULL);
	iommu_dma_release_iova(dev, iova, 4 * SZ_2M);
}

static struct kunit_case dma_cases[] = {
	KUNIT_CASE(each_refusal_has_its_own_error_and_reason),
	KUNIT_CASE(a_device_without_iommu_is_refused),
	KUNIT_CASE(a_real_device_in_passthrough_is_refused),
	KUNIT_CASE(a_real_device_has_its_range_to_itself),
	{}
};

static struct kunit_suite dma_suite = {
	.name = "iommu_dma_reserve",
	.init = mock_init,
	.test_cases = dma_cases,
};

kunit_test_suites(&replace_suite, &inval_suite, &iova_suite, &dma_suite);

MODULE_IMPORT_NS(EXPORTED_FOR_KUNIT_TESTING);
MODULE_DESCRIPTION("KUnit tests of live replacement of I/O translations");
MODULE_LICENSE("GPL");
