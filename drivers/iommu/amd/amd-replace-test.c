// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of live replacement in AMD's v1 page tables: what their entries and the
 * commands look like, and what only AMD's IOMMU has. The tests that all drivers share
 * are in iommu-live-test.h, which says how they work.
 */
#define RT_LEAF_HINT false	/* every command drops cached tables, too */

#include <asm/iommu.h>

#include "amd_iommu.h"
#include "../iommu-live-test.h"

struct rt_format {
	const char *name;
	int mode;		/* levels in the beginning */
	unsigned int bits;	/* of an address */
};

static const struct rt_format rt_formats[] = {
	{ .name = "v1, grows from 3 levels", .mode = 3, .bits = 48 },
	{ .name = "v1 of 4 levels", .mode = 4, .bits = 48 },
	{ .name = "v1 of 6 levels", .mode = 6, .bits = 56 },
};

KUNIT_ARRAY_PARAM_DESC(rt_format, rt_formats, name);

struct rt_hw {
	struct protection_domain *pdom;
	struct amd_iommu *iommu;	/* [2] */
	struct pdom_iommu_info info[2];
	unsigned int waited[2];
	unsigned int fail_commands, fail_waits;
	bool timed_out;
};

/* ---- entries ---- */

#define LEVEL(val)	((val) >> 9 & 7)

static u64 *rt_root(const struct rt *rt, unsigned int *levels)
{
	struct amd_io_pgtable *pgtable = &rt->hw->pdom->iop;
	unsigned int seq;
	u64 *root;

	do {
		seq = read_seqcount_begin(&pgtable->seqcount);
		root = pgtable->root;
		*levels = pgtable->mode;
	} while (read_seqcount_retry(&pgtable->seqcount, seq));

	return root;
}

static bool rt_present(const struct rt *rt, u64 val)
{
	return val & BIT(0);
}

static bool rt_leaf2(u64 val)
{
	return LEVEL(val) == 0;
}

static u64 rt_addr(u64 val)
{
	return __sme_clr(val & GENMASK_ULL(51, 12));
}

static bool rt_writable(u64 val)
{
	return val & BIT_ULL(62);
}

static bool rt_encrypted(u64 val)
{
	u64 bit = __sme_set(0ULL);

	return (val & bit) == bit;
}

/* Coherent, encrypted like all memory, no bit of large pages, and not without rights */
static bool rt_leaf_bits_ok(const struct rt *rt, u64 val, int level)
{
	u64 ign = GENMASK_ULL(51, 12) | BIT_ULL(61) | BIT_ULL(62);

	return (val & ~ign) == (BIT_ULL(60) | BIT(0)) && val & (BIT_ULL(61) | BIT_ULL(62)) &&
	       rt_encrypted(val);
}

static bool rt_table_bits_ok(const struct rt *rt, u64 val, int level)
{
	u64 rights = BIT_ULL(61) | BIT_ULL(62);

	return LEVEL(val) == level - 1 && (val & rights) == rights && rt_encrypted(val);
}

static atomic_t *rt_splits(const struct rt *rt)
{
	return &rt->hw->pdom->splits;
}

static unsigned long rt_end_of_space(const struct rt *rt)
{
	return BIT(rt->format->bits);
}

/* ---- commands ---- */

static struct rt_flush rt_decode(const struct iommu_cmd *cmd)
{
	u64 addr = cmd->data[2] | (u64)cmd->data[3] << 32;
	struct rt_flush f = {
		.devtlb = cmd->data[1] >> 28 == 4,
		.addr = addr & PAGE_MASK,
		.leaf_only = !(addr & BIT(1)),
	};

	if (addr & BIT(0)) {
		f.am = ffz((addr | ~PAGE_MASK) >> 12) + 1;
		f.all = f.am > 39;
		f.addr &= ~0ULL << (12 + f.am);
	}

	return f;
}

static unsigned int rt_unit(const struct rt *rt, const struct amd_iommu *iommu)
{
	return iommu == &rt->hw->iommu[1];
}

static int rt_queue_command(struct amd_iommu *iommu, struct iommu_cmd *cmd)
{
	struct kunit *test = kunit_get_current_test();
	struct rt *rt = test->priv;
	unsigned int type = cmd->data[1] >> 28;

	if (rt->drain)
		return 0;
	if (rt->hw->fail_commands) {
		rt->hw->fail_commands--;
		return -EIO;
	}
	KUNIT_EXPECT_TRUE(test, type == 3 || type == 4);
	if (type == 3)
		KUNIT_EXPECT_EQ(test, cmd->data[1] & 0xffff, (u32)rt->hw->pdom->id);
	if (rt->on_flush)
		rt->on_flush(test);
	rt_flushed(rt, rt_decode(cmd));

	return 0;
}

static int rt_completion_wait(struct amd_iommu *iommu)
{
	struct kunit *test = kunit_get_current_test();
	struct rt *rt = test->priv;

	if (rt_drained(rt))
		return 0;
	rt->nr_waits++;
	/* What timed out was lost: it has to be queued again. */
	KUNIT_EXPECT_TRUE(test, !rt->hw->timed_out || iommu->need_sync);
	rt->hw->timed_out = rt->hw->fail_waits;
	iommu->need_sync = false;
	if (rt->hw->fail_waits) {
		rt->hw->fail_waits--;
		return -EIO;
	}
	rt->hw->waited[rt_unit(rt, iommu)]++;

	return 0;
}

/* ---- set-up ---- */

static void rt_attach(struct kunit *test, unsigned int i)
{
	struct rt *rt = test->priv;

	rt->hw->info[i].iommu = &rt->hw->iommu[i];
	raw_spin_lock_init(&rt->hw->iommu[i].lock);
	KUNIT_ASSERT_EQ(test, xa_err(xa_store(&rt->hw->pdom->iommu_array, i, &rt->hw->info[i],
					      GFP_KERNEL)), 0);
}

static void rt_add_unit(struct kunit *test)
{
	rt_attach(test, 1);
}

static void rt_add_devtlb(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct iommu_dev_data *data;
	struct device *dev;

	dev = kunit_kzalloc(test, sizeof(*dev), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, dev);
	dev->iommu = kunit_kzalloc(test, sizeof(*dev->iommu), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, dev->iommu);
	data = kunit_kzalloc(test, sizeof(*data), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, data);
	dev->init_name = "replace-test";
	dev->iommu->iommu_dev = &rt->hw->iommu[0].iommu;
	data->dev = dev;
	data->ats_enabled = 1;
	data->devid = 0x300;
	list_add(&data->list, &rt->hw->pdom->dev_list);
}

static void rt_free_domain(void *data)
{
	struct rt *rt = data;

	INIT_LIST_HEAD(&rt->hw->pdom->dev_list);
	xa_destroy(&rt->hw->pdom->iommu_array);
	iommu_domain_free(rt->domain);
}

static int rt_init(struct kunit *test)
{
	struct rt *rt = rt_new(test);
	struct io_pgtable_ops *ops;
	struct protection_domain *pdom;

	rt->hw = kunit_kzalloc(test, sizeof(*rt->hw), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, rt->hw);
	rt->hw->iommu = kunit_kcalloc(test, 2, sizeof(*rt->hw->iommu), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, rt->hw->iommu);
	kunit_activate_static_stub(test, iommu_queue_command, rt_queue_command);
	kunit_activate_static_stub(test, iommu_completion_wait, rt_completion_wait);

	/* As protection_domain_alloc() does, which needs IOMMUs to be there */
	pdom = kzalloc(sizeof(*pdom), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, pdom);
	rt->hw->pdom = pdom;
	spin_lock_init(&pdom->lock);
	INIT_LIST_HEAD(&pdom->dev_list);
	INIT_LIST_HEAD(&pdom->dev_data_list);
	xa_init(&pdom->iommu_array);
	pdom->iop.pgtbl.cfg.amd.nid = NUMA_NO_NODE;
	pdom->pd_mode = PD_MODE_V1;
	ops = alloc_io_pgtable_ops(AMD_IOMMU_V1, &pdom->iop.pgtbl.cfg, pdom);
	if (!ops)
		kfree(pdom);
	KUNIT_ASSERT_NOT_NULL(test, ops);

	rt->domain = &pdom->domain;
	rt->domain->type = IOMMU_DOMAIN_DMA;
	rt->domain->ops = amd_iommu_ops.default_domain_ops;
	rt->domain->replace_ops = &amd_iommu_replace_ops;
	rt->domain->pgsize_bitmap = SZ_4K | SZ_2M | SZ_1G;
	rt->domain->geometry.aperture_end = rt_end_of_space(rt) - 1;
	KUNIT_ASSERT_EQ(test, kunit_add_action_or_reset(test, rt_free_domain, rt), 0);
	rt_attach(test, 0);

	/* An address that needs that many levels, and no test uses */
	if (rt->format->mode > pdom->iop.mode) {
		unsigned long high = BIT(12 + 9 * (rt->format->mode - 1)) + 77UL * SZ_1G;

		KUNIT_ASSERT_EQ(test, iommu_map(rt->domain, high, PATTERN_A, SZ_4K, RW,
						GFP_KERNEL), 0);
		KUNIT_ASSERT_EQ(test, iommu_unmap(rt->domain, high, SZ_4K), SZ_4K);
	}
	KUNIT_ASSERT_EQ(test, pdom->iop.mode, rt->format->mode);
	rt->nr_flush = 0;
	rt->nr_waits = 0;
	rt->hw->waited[0] = 0;

	return 0;
}

/* ---- what does not keep what live replacement promises ---- */

static void each_refusal_has_its_reason(struct kunit *test)
{
	struct rt *rt = test->priv;
	const char *(*refusal)(struct iommu_domain *domain) =
		rt->domain->replace_ops->refusal;
	bool np_cache = amd_iommu_np_cache, snp = amd_iommu_snp_en;
	const char *why;

	amd_iommu_np_cache = false;
	amd_iommu_snp_en = false;
	KUNIT_EXPECT_NULL(test, refusal(rt->domain));

	amd_iommu_np_cache = true;
	why = refusal(rt->domain);
	KUNIT_EXPECT_TRUE(test, why && strstr(why, "NpCache"));
	amd_iommu_np_cache = false;

	amd_iommu_snp_en = true;
	why = refusal(rt->domain);
	KUNIT_EXPECT_TRUE(test, why && strstr(why, "SNP"));
	amd_iommu_snp_en = false;

	rt->hw->pdom->pd_mode = PD_MODE_V2;
	why = refusal(rt->domain);
	KUNIT_EXPECT_TRUE(test, why && strstr(why, "pgtbl_v1"));
	rt->hw->pdom->pd_mode = PD_MODE_V1;

	KUNIT_EXPECT_NULL(test, refusal(rt->domain));
	rt_add_devtlb(test);
	why = refusal(rt->domain);
	KUNIT_EXPECT_TRUE(test, why && strstr(why, "pci=noats"));

	amd_iommu_np_cache = np_cache;
	amd_iommu_snp_en = snp;
}

/* Whoever does not ask first does no harm. */
static void v2_tables_are_not_walked_as_v1_tables(struct kunit *test)
{
	struct rt *rt = test->priv;
	phys_addr_t paddr = USER_PAGE(0);

	rt_map(test);
	rt_begin(rt);
	rt->hw->pdom->pd_mode = PD_MODE_V2;
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, BASE, SZ_2M, PATTERN_B, RW, NULL,
					    &rt->inval), -EOPNOTSUPP);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, BASE, 1, &paddr, RW,
						  &rt->inval), -EOPNOTSUPP);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, BASE, SZ_2M, PATTERN_B, RW,
						 &rt->inval), -EOPNOTSUPP);
	KUNIT_EXPECT_EQ(test, iommu_split(rt->domain, BASE, GFP_KERNEL), -EOPNOTSUPP);
	KUNIT_EXPECT_EQ(test, iommu_merge_leaves(rt->domain, BASE, PATTERN_B, RW,
						 &rt->inval), -EOPNOTSUPP);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(rt->domain, BASE + LEN, SZ_2M, PATTERN_B, RW,
					     GFP_KERNEL), -EOPNOTSUPP);
	rt->hw->pdom->pd_mode = PD_MODE_V1;
	rt_end(test, 0);
	rt_expect_ranges(test, 0);
}

/* ---- pages that are several equal entries ---- */

static void replicated_leaves_are_ebusy(struct kunit *test)
{
	struct rt *rt = test->priv;
	phys_addr_t paddrs[2] = { USER_PAGE(0), USER_PAGE(1) };
	const unsigned long iova = 4UL * SZ_1G;

	rt->domain->pgsize_bitmap |= SZ_16K | SZ_4M;
	KUNIT_ASSERT_EQ(test, iommu_map(rt->domain, iova, SZ_1G, SZ_4M, RW, GFP_KERNEL), 0);
	KUNIT_ASSERT_EQ(test, LEVEL(*rt_pde(rt, iova)), 7ULL);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, iova, SZ_2M, PATTERN_A, RW, NULL,
					    &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, iova, SZ_4K, PATTERN_A, RW, NULL,
					    &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, iova, 2, paddrs, RW,
						  &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, iova, SZ_4M, PATTERN_A, RW,
						 &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_split(rt->domain, iova, GFP_KERNEL), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_merge_leaves(rt->domain, iova, PATTERN_A, RW,
						 &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(rt->domain, iova, SZ_2M, PATTERN_A, RW,
					     GFP_KERNEL), -EEXIST);
	KUNIT_EXPECT_EQ(test, iommu_iova_to_phys(rt->domain, iova + SZ_2M + 5),
			(phys_addr_t)SZ_1G + SZ_2M + 5);

	/* 16KiB in a table, beside a page that may be replaced */
	KUNIT_ASSERT_EQ(test, iommu_map(rt->domain, iova + SZ_4M, SZ_1G, SZ_16K, RW,
					GFP_KERNEL), 0);
	KUNIT_ASSERT_EQ(test, iommu_map(rt->domain, iova + SZ_4M + SZ_16K, 2UL * SZ_1G, SZ_4K,
					RW, GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, iova + SZ_4M, SZ_4K, PATTERN_A, RW,
					    NULL, &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, iova + SZ_4M + SZ_16K - SZ_4K,
						  2, paddrs, RW, &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, iova + SZ_4M, SZ_16K + SZ_4K,
						 PATTERN_A, RW, &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_iova_to_phys(rt->domain, iova + SZ_4M + SZ_16K),
			2ULL * SZ_1G);
	rt_expect_ranges(test, 0);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, iova + SZ_4M + SZ_16K, 1,
						  paddrs, RW, &rt->inval), 0);
}

/* ---- a root that grows ---- */

/* Each level is added above tables that a device is using. */
static void what_is_mapped_stays_so_while_the_root_grows(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct amd_io_pgtable *pgtable = &rt->hw->pdom->iop;
	unsigned int levels;

	rt->domain->geometry.aperture_end = ~0ULL;
	rt_map(test);
	rt_split(test, 1);
	rt_begin(rt);
	for (levels = pgtable->mode + 1; levels <= 6; levels++) {
		u64 *old_root = pgtable->root;
		unsigned long high = BIT(12 + 9 * (levels - 1));

		KUNIT_ASSERT_EQ(test, iommu_map_fill(rt->domain, high, SZ_2M, PATTERN_B,
						     IOMMU_READ, GFP_KERNEL), 0);
		KUNIT_ASSERT_EQ(test, pgtable->mode, (int)levels);
		KUNIT_EXPECT_PTR_EQ(test, phys_to_virt(rt_addr(pgtable->root[0])),
				    (void *)old_root);
		KUNIT_EXPECT_EQ(test, iommu_iova_to_phys(rt->domain, high + 5), PATTERN_B + 5);
		/* Both ends can be changed. */
		KUNIT_EXPECT_EQ(test, iommu_split(rt->domain, high, GFP_KERNEL), 0);
		KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, high, SZ_4K, USER_PAGE(levels),
						    RW, NULL, &rt->inval), 0);
		rt->new[700] = KEY(USER_PAGE(levels), RW);
		KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, IOVA(700), SZ_4K,
						    USER_PAGE(levels), RW, NULL, &rt->inval), 0);
		rt->old[700] = rt->new[700];
	}
	rt_end(test, 0);
	iommu_inval_sync(rt->domain, &rt->inval);
}

/* ---- map and unmap ---- */

static void the_last_slot_of_64_bits_can_be_mapped(struct kunit *test)
{
	struct rt *rt = test->priv;
	const unsigned long last = -(unsigned long)SZ_2M;

	rt->domain->geometry.aperture_end = ~0ULL;
	KUNIT_EXPECT_EQ(test, iommu_map_fill(rt->domain, last, SZ_2M, PATTERN_A, IOMMU_READ,
					     GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, rt->hw->pdom->iop.mode, 6);
	KUNIT_EXPECT_TRUE(test, rt_filled(rt, last, 1, PATTERN_A));
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, last, SZ_2M, PATTERN_B, IOMMU_READ,
					    NULL, &rt->inval), 0);
	rt_expect_ranges(test, 1);
	KUNIT_EXPECT_EQ(test, rt->inval.range[0].last, ~0UL);
	iommu_inval_sync(rt->domain, &rt->inval);
}

static bool rt_was_flushed(const struct rt *rt, unsigned long iova)
{
	unsigned int i;

	for (i = 0; i < rt->nr_flush; i++) {
		const struct rt_flush *f = &rt->flush[i];

		if (!f->devtlb && !f->leaf_only &&
		    (f->all || (iova >= f->addr && iova - f->addr < BIT(12 + f->am))))
			return true;
	}

	return false;
}

/* It may have looked from a root that did not reach so far. */
static void map_fill_flushes_what_hardware_may_have_seen(struct kunit *test)
{
	struct rt *rt = test->priv;
	bool np_cache = amd_iommu_np_cache;
	unsigned long i;

	amd_iommu_np_cache = false;
	KUNIT_ASSERT_EQ(test, iommu_map_fill(rt->domain, BASE, LEN, PATTERN_A,
					     IOMMU_READ, GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 1U);
	for (i = 0; i < SLOTS; i++)
		KUNIT_EXPECT_TRUE(test, rt_was_flushed(rt, IOVA(i * PAGES)));
	KUNIT_EXPECT_TRUE(test, rt_was_flushed(rt, BASE + LEN - SZ_4K));
	amd_iommu_np_cache = np_cache;
}

/* Its tables stay, and the next mapping there takes them away. */
static void unmap_copes_with_mixed_leaves(struct kunit *test)
{
	struct rt *rt = test->priv;
	unsigned long i;

	rt_map(test);
	rt_split(test, 0);
	rt_split(test, 2);
	rt->table = rt_table(rt, 2);
	KUNIT_ASSERT_NOT_NULL(test, rt->table);
	get_page(rt->table);
	KUNIT_ASSERT_EQ(test, iommu_replace(rt->domain, IOVA(2 * PAGES + 1), SZ_4K,
					    USER_PAGE(0), RW, NULL, &rt->inval), 0);
	iommu_inval_sync(rt->domain, &rt->inval);

	KUNIT_EXPECT_EQ(test, iommu_unmap(rt->domain, BASE, LEN), LEN);
	for (i = 0; i < NPAGES; i++)
		KUNIT_ASSERT_EQ(test, rt_key(rt, i), 0ULL);
	rt_map(test);
	KUNIT_EXPECT_TRUE(test, rt_filled(rt, BASE, SLOTS, PATTERN_A));
	KUNIT_EXPECT_EQ(test, page_count(rt->table), 1);
	put_page(rt->table);
}

static struct kunit_case rt_replace_cases[] = {
	KUNIT_CASE_PARAM(each_refusal_has_its_reason, rt_format_gen_params),
	KUNIT_CASE_PARAM(v2_tables_are_not_walked_as_v1_tables, rt_format_gen_params),
	KUNIT_CASE_PARAM(replicated_leaves_are_ebusy, rt_format_gen_params),
	KUNIT_CASE_PARAM(what_is_mapped_stays_so_while_the_root_grows,
			 rt_format_gen_params),
	KUNIT_CASE_PARAM(the_last_slot_of_64_bits_can_be_mapped, rt_format_gen_params),
	KUNIT_CASE_PARAM(map_fill_flushes_what_hardware_may_have_seen,
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
	.name = "amd_replace",
	.init = rt_init,
	.test_cases = rt_replace_cases,
};

/* ---- what is flushed, and how often the driver waits ---- */

/* All commands are on their way to both before one is waited for. */
static void both_iommus_get_their_commands_before_a_wait(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_add_unit(test);
	iommu_inval_init(&rt->inval);
	iommu_inval_add(&rt->inval, SZ_1G, SZ_4K, false);
	iommu_inval_add(&rt->inval, 5UL * SZ_1G, SZ_2M, true);
	iommu_inval_sync(rt->domain, &rt->inval);
	KUNIT_EXPECT_EQ(test, rt->nr_flush, 4U);
	KUNIT_EXPECT_EQ(test, rt->hw->waited[0], 1U);
	KUNIT_EXPECT_EQ(test, rt->hw->waited[1], 1U);
}

/* Hardware that takes its time has not drained: the caller may not be let go. */
static void a_wait_that_times_out_is_repeated(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt->hw->fail_waits = 3;
	rt_sync_range(rt, SZ_1G, SZ_4K, false);
	KUNIT_EXPECT_EQ(test, rt->hw->fail_waits, 0U);
	KUNIT_EXPECT_EQ(test, rt->hw->waited[0], 1U);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 4U);
}

static void a_command_that_finds_no_room_is_repeated(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_add_devtlb(test);
	rt->hw->fail_commands = 2;
	rt_sync_range(rt, SZ_1G, SZ_4K, false);
	KUNIT_EXPECT_EQ(test, rt->hw->fail_commands, 0U);
	KUNIT_ASSERT_EQ(test, rt->nr_flush, 2U);
	KUNIT_EXPECT_FALSE(test, rt->flush[0].devtlb);
	KUNIT_EXPECT_TRUE(test, rt->flush[1].devtlb);
	KUNIT_EXPECT_EQ(test, rt->hw->waited[0], 1U);
}

static struct kunit_case rt_inval_cases[] = {
	KUNIT_CASE_PARAM(both_iommus_get_their_commands_before_a_wait,
			 rt_format_gen_params),
	KUNIT_CASE_PARAM(a_wait_that_times_out_is_repeated, rt_format_gen_params),
	KUNIT_CASE_PARAM(a_command_that_finds_no_room_is_repeated, rt_format_gen_params),
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
	.name = "amd_inval",
	.init = rt_init,
	.test_cases = rt_inval_cases,
};

static struct kunit_case rt_thread_cases[] = {
	KUNIT_CASE_PARAM(threads_on_their_slots_and_splits_on_all, rt_format_gen_params),
	{}
};

static struct kunit_suite rt_thread_suite = {
	.name = "amd_replace_threads",
	.init = rt_init,
	.test_cases = rt_thread_cases,
};

kunit_test_suites(&rt_replace_suite, &rt_inval_suite, &rt_thread_suite);

MODULE_IMPORT_NS(EXPORTED_FOR_KUNIT_TESTING);
MODULE_DESCRIPTION("KUnit tests of live replacement in the page tables of AMD's IOMMU");
MODULE_LICENSE("GPL");
