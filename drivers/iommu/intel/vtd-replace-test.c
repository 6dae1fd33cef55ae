// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of live replacement in VT-d page tables: what VT-d's entries and
 * descriptors look like, and what only VT-d has. The tests that all drivers share are
 * in iommu-live-test.h, which says how they work.
 */
#define RT_LEAF_HINT true

#include "iommu.h"
#include "../iommu-live-test.h"

struct rt_format {
	const char *name;
	int agaw;
	bool first_level;
	bool not_coherent;
	bool snoop;
};

static const struct rt_format rt_formats[] = {
	{ .name = "second level", .agaw = 2 },
	{ .name = "second level of 3 levels", .agaw = 1 },
	{ .name = "second level, walks not coherent", .agaw = 2, .not_coherent = true },
	{ .name = "second level, snoop control", .agaw = 2, .snoop = true },
	{ .name = "first level", .agaw = 2, .first_level = true },
	{ .name = "first level of 5 levels", .agaw = 3, .first_level = true },
};

KUNIT_ARRAY_PARAM_DESC(rt_format, rt_formats, name);

struct rt_hw {
	struct dmar_domain *dmar;
	struct intel_iommu *iommu;	/* [2] */
	struct cache_tag tag[4];
};

/* ---- entries ---- */

static u64 *rt_root(const struct rt *rt, unsigned int *levels)
{
	*levels = rt->hw->dmar->agaw + 2;

	return (u64 *)rt->hw->dmar->pgd;
}

static bool rt_present(const struct rt *rt, u64 val)
{
	return rt->format->first_level ? val & BIT(0) : val & (BIT(0) | BIT(1));
}

static bool rt_leaf2(u64 val)
{
	return val & BIT(7);
}

static u64 rt_addr(u64 val)
{
	return val & GENMASK_ULL(51, 12);
}

static bool rt_writable(u64 val)
{
	return val & BIT(1);
}

/* In a first level table a clear accessed or dirty bit would make the hardware write. */
static bool rt_leaf_bits_ok(const struct rt *rt, u64 val, int level)
{
	u64 ign = GENMASK_ULL(51, 12) | BIT(0) | BIT(1) | (level == 2 ? BIT(7) : 0);
	u64 want = 0;

	if (rt->format->first_level) {
		want = BIT(2) | BIT(5);
		if (val & BIT(1))
			want |= BIT(6);
	} else if (rt->format->snoop) {
		want = BIT(11);
	}

	return (val & ~ign) == want;
}

static bool rt_table_bits_ok(const struct rt *rt, u64 val, int level)
{
	u64 want = BIT(0) | BIT(1);

	if (rt->format->first_level)
		want |= BIT(2) | BIT(5);

	return !(val & BIT(7)) && (val & want) == want;
}

static atomic_t *rt_splits(const struct rt *rt)
{
	return &rt->hw->dmar->splits;
}

static unsigned long rt_end_of_space(const struct rt *rt)
{
	return 1UL << (30 + 9 * rt->hw->dmar->agaw);
}

/* ---- descriptors ---- */

static struct rt_flush rt_decode(const struct qi_desc *desc)
{
	struct rt_flush f = {};

	switch (desc->qw0 & 0xf) {
	case QI_IOTLB_TYPE:
		f.all = ((desc->qw0 >> 4) & 3) != 3;
		f.addr = desc->qw1 & VTD_PAGE_MASK;
		f.am = desc->qw1 & 0x3f;
		f.leaf_only = desc->qw1 & BIT(6);
		break;
	case QI_EIOTLB_TYPE:
		f.all = ((desc->qw0 >> 4) & 3) != QI_GRAN_PSI_PASID;
		f.addr = desc->qw1 & VTD_PAGE_MASK;
		f.am = desc->qw1 & 0x3f;
		f.leaf_only = desc->qw1 & BIT(6);
		break;
	case QI_DIOTLB_TYPE:
		f.devtlb = true;
		f.addr = desc->qw1 & VTD_PAGE_MASK;
		if (desc->qw1 & QI_DEV_IOTLB_SIZE) {
			f.am = ffz(f.addr >> 12) + 1;
			f.addr &= ~0ULL << (12 + f.am);
		}
		break;
	}

	return f;
}

static int rt_qi_submit_sync(struct intel_iommu *iommu, struct qi_desc *desc,
			     unsigned int count, unsigned long options)
{
	struct kunit *test = kunit_get_current_test();
	struct rt *rt = test->priv;
	unsigned int i;

	if (rt_drained(rt))
		return 0;
	if (rt->on_flush)
		rt->on_flush(test);

	rt->nr_waits++;
	for (i = 0; i < count; i++)
		rt_flushed(rt, rt_decode(&desc[i]));

	return 0;
}

/* ---- set-up ---- */

static void rt_add_tag(struct rt *rt, unsigned int i, enum cache_tag_type type,
		       struct intel_iommu *iommu, struct device *dev)
{
	struct cache_tag *tag = &rt->hw->tag[i];

	tag->type = type;
	tag->iommu = iommu;
	tag->dev = dev;
	tag->domain_id = 7 + i;
	tag->pasid = IOMMU_NO_PASID;
	tag->users = 1;
	list_add_tail(&tag->node, &rt->hw->dmar->cache_tags);
}

static void rt_add_devtlb(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct device_domain_info *info;
	struct device *dev;

	dev = kunit_kzalloc(test, sizeof(*dev), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, dev);
	dev->iommu = kunit_kzalloc(test, sizeof(*dev->iommu), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, dev->iommu);
	info = kunit_kzalloc(test, sizeof(*info), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, info);
	dev->init_name = "replace-test";
	info->iommu = &rt->hw->iommu[0];
	info->ats_enabled = 1;
	info->bus = 3;
	/* Not dev_iommu_priv_set(): nobody probes this device. */
	dev->iommu->priv = info;
	rt_add_tag(rt, 1, CACHE_TAG_DEVTLB, &rt->hw->iommu[0], dev);
}

static void rt_add_unit(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_add_tag(rt, 2, CACHE_TAG_IOTLB, &rt->hw->iommu[1], NULL);
}

static void rt_free_domain(void *data)
{
	struct rt *rt = data;

	INIT_LIST_HEAD(&rt->hw->dmar->cache_tags);
	iommu_domain_free(rt->domain);
}

static int rt_init(struct kunit *test)
{
	struct rt *rt = rt_new(test);
	int i;

	rt->hw = kunit_kzalloc(test, sizeof(*rt->hw), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, rt->hw);
	rt->hw->iommu = kunit_kcalloc(test, 2, sizeof(*rt->hw->iommu), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, rt->hw->iommu);
	for (i = 0; i < 2; i++) {
		/* Page-selective invalidation of at most 1GiB; queued */
		rt->hw->iommu[i].cap = BIT_ULL(39) | 18ULL << 48;
		rt->hw->iommu[i].ecap = BIT_ULL(1);
		rt->hw->iommu[i].gcmd = DMA_GCMD_TE;
		rt->hw->iommu[i].seq_id = i;
	}

	rt->domain = intel_iommu_ops.domain_alloc(IOMMU_DOMAIN_UNMANAGED);
	KUNIT_ASSERT_NOT_NULL(test, rt->domain);
	rt->hw->dmar = to_dmar_domain(rt->domain);
	rt->domain->type = IOMMU_DOMAIN_UNMANAGED;
	rt->domain->ops = intel_iommu_ops.default_domain_ops;
	rt->domain->pgsize_bitmap = SZ_4K | SZ_2M | SZ_1G;
	rt->hw->dmar->iommu_superpage = 2;
	rt->hw->dmar->agaw = rt->format->agaw;
	rt->hw->dmar->gaw = agaw_to_width(rt->format->agaw);
	rt->hw->dmar->use_first_level = rt->format->first_level;
	rt->hw->dmar->iommu_coherency = !rt->format->not_coherent;
	rt->hw->dmar->set_pte_snp = rt->format->snoop;
	rt->hw->dmar->qi_batch = kzalloc(sizeof(*rt->hw->dmar->qi_batch), GFP_KERNEL);
	rt_add_tag(rt, 0, CACHE_TAG_IOTLB, &rt->hw->iommu[0], NULL);
	KUNIT_ASSERT_EQ(test, kunit_add_action_or_reset(test, rt_free_domain, rt), 0);
	KUNIT_ASSERT_NOT_NULL(test, rt->hw->dmar->qi_batch);

	kunit_activate_static_stub(test, qi_submit_sync, rt_qi_submit_sync);

	return 0;
}

/* ---- units that do not keep what live replacement promises ---- */

#define CAP_CACHING_MODE	BIT_ULL(7)
#define CAP_DRAIN_WRITES	BIT_ULL(54)
#define CAP_DRAIN_READS		BIT_ULL(55)

static void units_that_cannot_are_refused(struct kunit *test)
{
	struct rt *rt = test->priv;
	const char *(*refusal)(struct iommu_domain *domain) =
		rt->domain->replace_ops->refusal;
	struct iommu_domain_info info[2] = {
		{ .iommu = &rt->hw->iommu[0] }, { .iommu = &rt->hw->iommu[1] },
	};
	const char *why;
	int i;

	for (i = 0; i < 2; i++) {
		rt->hw->iommu[i].cap |= CAP_DRAIN_READS | CAP_DRAIN_WRITES;
		KUNIT_ASSERT_EQ(test, xa_err(xa_store(&rt->hw->dmar->iommu_array, i,
						      &info[i], GFP_KERNEL)), 0);
	}
	KUNIT_EXPECT_NULL(test, refusal(rt->domain));

	/* One of two is enough */
	for (i = 0; i < 2; i++) {
		rt->hw->iommu[i].cap &= ~CAP_DRAIN_READS;
		why = refusal(rt->domain);
		KUNIT_EXPECT_TRUE(test, why && strstr(why, "in flight"));
		rt->hw->iommu[i].cap |= CAP_DRAIN_READS;

		rt->hw->iommu[i].cap &= ~CAP_DRAIN_WRITES;
		why = refusal(rt->domain);
		KUNIT_EXPECT_TRUE(test, why && strstr(why, "in flight"));
		rt->hw->iommu[i].cap |= CAP_DRAIN_WRITES;

		/* First level tables are nested under the hypervisor's, and not shadowed */
		rt->hw->iommu[i].cap |= CAP_CACHING_MODE;
		why = refusal(rt->domain);
		if (rt->format->first_level)
			KUNIT_EXPECT_NULL(test, why);
		else
			KUNIT_EXPECT_TRUE(test, why && strstr(why, "caching mode"));
		rt->hw->iommu[i].cap &= ~CAP_CACHING_MODE;
	}
	for (i = 0; i < 2; i++)
		xa_erase(&rt->hw->dmar->iommu_array, i);
}

/* ---- what VT-d does otherwise than others ---- */

static void map_fill_flushes_where_not_present_is_cached(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_map(test);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 0U);
	KUNIT_ASSERT_EQ(test, iommu_unmap(rt->domain, BASE, LEN), LEN);

	/* As dmar_domain_attach_device() does for caching mode */
	rt->hw->iommu[0].cap |= BIT_ULL(7);
	rt->hw->dmar->iotlb_sync_map = true;
	rt->nr_waits = 0;
	rt_map(test);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, rt->format->first_level ? 0U : 1U);
}

static void unmap_copes_with_mixed_leaves(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct page *table[2];
	int i;

	rt_map(test);
	rt_split(test, 0);
	rt_split(test, 2);
	table[0] = rt_table(rt, 0);
	table[1] = rt_table(rt, 2);
	KUNIT_ASSERT_EQ(test, iommu_replace(rt->domain, IOVA(2 * PAGES + 1), SZ_4K,
					    USER_PAGE(0), RW, NULL, &rt->inval), 0);
	iommu_inval_sync(rt->domain, &rt->inval);
	for (i = 0; i < 2; i++)
		get_page(table[i]);

	KUNIT_EXPECT_EQ(test, iommu_unmap(rt->domain, BASE, LEN), LEN);
	for (i = 0; i < SLOTS; i++)
		KUNIT_EXPECT_EQ(test, rt_slot_val(rt, BASE + i * SZ_2M), 0ULL);
	for (i = 0; i < 2; i++) {
		KUNIT_EXPECT_EQ(test, page_count(table[i]), 1);
		put_page(table[i]);
	}
	/* And the range can be used again. */
	rt_map(test);
	KUNIT_EXPECT_TRUE(test, rt_filled(rt, BASE, SLOTS, PATTERN_A));
}

static struct kunit_case rt_replace_cases[] = {
	KUNIT_CASE_PARAM(units_that_cannot_are_refused, rt_format_gen_params),
	KUNIT_CASE_PARAM(map_fill_flushes_where_not_present_is_cached,
			 rt_format_gen_params),
	KUNIT_CASE_PARAM(unmap_copes_with_mixed_leaves, rt_format_gen_params),
	KUNIT_CASE_PARAM(replace_of_a_hole_is_enoent, rt_format_gen_params),
	KUNIT_CASE_PARAM(replace_of_a_leaf_of_another_size_is_ebusy,
			 rt_format_gen_params),
	KUNIT_CASE_PARAM(replace_within_a_1g_leaf_is_ebusy, rt_format_gen_params),
	KUNIT_CASE_PARAM(replace_pages_is_all_or_nothing, rt_format_gen_params),
	KUNIT_CASE_PARAM(replace_changes_one_leaf_and_tells_what_it_was,
			 rt_format_gen_params),
	KUNIT_CASE_PARAM(replace_of_a_large_leaf, rt_format_gen_params),
	KUNIT_CASE_PARAM(replace_by_the_same_needs_no_flush, rt_format_gen_params),
	KUNIT_CASE_PARAM(replace_pages_keeps_what_it_is_told_to, rt_format_gen_params),
	KUNIT_CASE_PARAM(replace_pages_crosses_slots_and_tables, rt_format_gen_params),
	KUNIT_CASE_PARAM(fill_replaces_whole_slots_by_one_leaf, rt_format_gen_params),
	KUNIT_CASE_PARAM(fill_at_all_edges, rt_format_gen_params),
	KUNIT_CASE_PARAM(fill_keeps_tables, rt_format_gen_params),
	KUNIT_CASE_PARAM(fill_of_part_of_a_leaf_that_is_filled_so_changes_nothing,
			 rt_format_gen_params),
	KUNIT_CASE_PARAM(fill_loses_a_race_to_a_split, rt_format_gen_params),
	KUNIT_CASE_PARAM(replace_loses_a_race_to_a_split, rt_format_gen_params),
	KUNIT_CASE_PARAM(split_keeps_the_translation, rt_format_gen_params),
	KUNIT_CASE_PARAM(split_flushes_the_large_translation, rt_format_gen_params),
	KUNIT_CASE_PARAM(replace_during_the_flush_of_a_split_invalidates_the_slot,
			 rt_format_gen_params),
	KUNIT_CASE_PARAM(split_loses_a_race_to_a_replace, rt_format_gen_params),
	KUNIT_CASE_PARAM(split_loses_a_race_to_a_split, rt_format_gen_params),
	KUNIT_CASE_PARAM(merge_frees_the_table_after_the_flush, rt_format_gen_params),
	KUNIT_CASE_PARAM(merge_of_a_large_leaf_replaces_it, rt_format_gen_params),
	KUNIT_CASE_PARAM(merge_split_and_merge_again, rt_format_gen_params),
	KUNIT_CASE_PARAM(map_fill_at_all_sizes, rt_format_gen_params),
	KUNIT_CASE_PARAM(map_fill_of_the_last_slot, rt_format_gen_params),
	KUNIT_CASE_PARAM(map_fill_over_a_mapping_is_eexist_and_undone,
			 rt_format_gen_params),
	KUNIT_CASE_PARAM(map_fill_without_memory_is_undone, rt_format_gen_params),
	KUNIT_CASE_PARAM(what_notifiers_do_needs_no_memory_and_no_sleep,
			 rt_format_gen_params),
	KUNIT_CASE_PARAM(map_fill_takes_empty_tables_away, rt_format_gen_params),
	KUNIT_CASE_PARAM(iommu_map_and_fill_write_the_same_leaves, rt_format_gen_params),
	{}
};

static struct kunit_suite rt_replace_suite = {
	.name = "vtd_replace",
	.init = rt_init,
	.test_cases = rt_replace_cases,
};

static void more_than_a_batch_is_flushed_all_the_same(struct kunit *test)
{
	struct rt *rt = test->priv;
	unsigned int i, n = 0;

	/* 4 ranges that are cut, on 4 caches: 32 descriptors, 16 to a batch */
	rt_add_devtlb(test);
	rt_add_tag(rt, 2, CACHE_TAG_IOTLB, &rt->hw->iommu[0], NULL);
	rt_add_tag(rt, 3, CACHE_TAG_DEVTLB, &rt->hw->iommu[0], rt->hw->tag[1].dev);
	iommu_inval_init(&rt->inval);
	for (i = 1; i <= 4; i++)
		iommu_inval_add(&rt->inval, i * SZ_1G - SZ_4K, SZ_8K, false);
	iommu_inval_sync(rt->domain, &rt->inval);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 2U);
	KUNIT_ASSERT_EQ(test, rt->nr_flush, 32U);
	for (i = 0; i < 32; i++)
		n += rt->flush[i].devtlb;
	KUNIT_EXPECT_EQ(test, n, 16U);
}

static void more_than_the_hardware_can_select_is_all(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct rt_flush f;

	/* 1GiB is the most that these IOMMUs select. */
	rt_sync_range(rt, SZ_1G, SZ_1G, false);
	KUNIT_ASSERT_EQ(test, rt->nr_flush, 1U);
	KUNIT_EXPECT_FALSE(test, rt->flush[0].all);

	rt_sync_range(rt, 2UL * SZ_1G, SZ_1G + SZ_4K, false);
	KUNIT_ASSERT_EQ(test, rt->nr_flush, 1U);
	f = rt->flush[0];
	KUNIT_EXPECT_TRUE(test, f.all);
	KUNIT_EXPECT_FALSE(test, f.leaf_only);
}

static void an_iommu_that_cannot_select_flushes_all(struct kunit *test)
{
	struct rt *rt = test->priv;

	if (rt->format->first_level)
		kunit_skip(test, "first level tables need page-selective invalidation");
	rt->hw->iommu[0].cap &= ~BIT_ULL(39);
	rt_sync_range(rt, SZ_1G, SZ_4K, false);
	KUNIT_ASSERT_EQ(test, rt->nr_flush, 1U);
	KUNIT_EXPECT_TRUE(test, rt->flush[0].all);
}

static struct kunit_case rt_inval_cases[] = {
	KUNIT_CASE_PARAM(more_than_a_batch_is_flushed_all_the_same, rt_format_gen_params),
	KUNIT_CASE_PARAM(more_than_the_hardware_can_select_is_all, rt_format_gen_params),
	KUNIT_CASE_PARAM(an_iommu_that_cannot_select_flushes_all, rt_format_gen_params),
	KUNIT_CASE_PARAM(one_wait_for_both_windows_and_the_device, rt_format_gen_params),
	KUNIT_CASE_PARAM(each_iommu_is_waited_for_once, rt_format_gen_params),
	KUNIT_CASE_PARAM(nothing_to_flush_is_no_wait, rt_format_gen_params),
	KUNIT_CASE_PARAM(a_large_page_is_flushed_as_one, rt_format_gen_params),
	KUNIT_CASE_PARAM(a_range_across_a_coarse_boundary_is_cut, rt_format_gen_params),
	KUNIT_CASE_PARAM(flushed_is_the_range_and_less_than_twice_the_range,
			 rt_format_gen_params),
	KUNIT_CASE_PARAM(the_model_finds_a_missing_flush, rt_format_gen_params),
	KUNIT_CASE_PARAM(no_cache_outlives_a_sync, rt_format_gen_params),
	{}
};

static struct kunit_suite rt_inval_suite = {
	.name = "vtd_inval",
	.init = rt_init,
	.test_cases = rt_inval_cases,
};

static struct kunit_case rt_thread_cases[] = {
	KUNIT_CASE_PARAM(threads_on_their_slots_and_splits_on_all, rt_format_gen_params),
	{}
};

static struct kunit_suite rt_thread_suite = {
	.name = "vtd_replace_threads",
	.init = rt_init,
	.test_cases = rt_thread_cases,
};

kunit_test_suites(&rt_replace_suite, &rt_inval_suite, &rt_thread_suite);

MODULE_IMPORT_NS(EXPORTED_FOR_KUNIT_TESTING);
MODULE_DESCRIPTION("KUnit tests of live replacement in VT-d page tables");
MODULE_LICENSE("GPL");
