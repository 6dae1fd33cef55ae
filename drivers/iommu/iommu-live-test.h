/* SPDX-License-Identifier: GPL-2.0 */
/*
 * KUnit tests of live replacement in page tables, for the drivers whose tables are
 * those of iommu-live.c. Each includes this in a test of its own, and says what its
 * entries and its invalidations look like.
 *
 * The domains are real, the hardware is not: a test plays the IOMMU. It walks the
 * tables with code of its own before each store that the driver makes to an entry
 * that may be live, so every intermediate state is seen, not only the result; and
 * it takes what the driver submits for invalidation, so it can say how many waits
 * there were and what was flushed. The model of the caches in the last tests is as
 * unhelpful as the specifications allow: it caches what it can at any moment, drops a
 * 2MiB translation only for an invalidation of that size, and keeps tables that a
 * leaf-only hint allows it to keep.
 *
 * Nothing here needs the hardware in the machine. Leaves point at addresses that are
 * made up; nobody accesses them.
 */
#ifndef __IOMMU_LIVE_TEST_H
#define __IOMMU_LIVE_TEST_H

#include <kunit/static_stub.h>
#include <kunit/test.h>
#include <kunit/visibility.h>
#include <linux/iommu.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/prandom.h>
#include <linux/sizes.h>

#include "iommu-live.h"
#include "iommu-pages.h"

#define RW		(IOMMU_READ | IOMMU_WRITE)
#define PAGES		512UL		/* leaves in a slot */
#define SLOTS		4UL
#define NPAGES		(SLOTS * PAGES)
#define LEN		(SLOTS * SZ_2M)
#define BASE		(SZ_1G - 2UL * SZ_2M)	/* two slots on each side of 1GiB */
#define PATTERN_A	0x1000000000ULL
#define PATTERN_B	0x1000200000ULL
#define USER_PAGE(n)	(0x1080000000ULL + (n) * 3ULL * SZ_4K)
#define IOVA(page)	(BASE + (page) * SZ_4K)

/* A translation of one page as one number: address, present, writable; 0 for none */
#define KEY_PRESENT	BIT_ULL(0)
#define KEY_WRITE	BIT_ULL(1)
#define KEY(paddr, prot) ((paddr) | KEY_PRESENT |			\
			  ((prot) & IOMMU_WRITE ? KEY_WRITE : 0))

/* An invalidation, whatever the hardware's commands look like */
struct rt_flush {
	bool devtlb;
	bool all;
	u64 addr;
	unsigned int am;	/* it is for 2^am pages from addr */
	bool leaf_only;
};

#define RT_MAX_FLUSH	64

struct rt {
	const struct rt_format *format;	/* the driver's test says what that is */
	struct rt_hw *hw;		/* likewise */
	struct iommu_domain *domain;
	struct iommu_inval inval;

	/* What the driver has submitted */
	struct rt_flush flush[RT_MAX_FLUSH];
	unsigned int nr_flush;
	unsigned int nr_waits;

	/* What each page may mean while an operation runs */
	bool observe;
	u64 old[NPAGES];
	u64 new[NPAGES];
	unsigned long nr_seen;
	unsigned long nr_bad;
	unsigned long bad_page;
	u64 bad_key;

	/* Called before a store, before a flush is carried out */
	void (*on_store)(struct kunit *test, u64 *entry, u64 old, u64 new);
	void (*on_flush)(struct kunit *test);
	struct page *table;
	unsigned int count;

	/* Tables that were allocated, and which allocation is to fail */
	struct page *held[32];
	unsigned int nr_held;
	int fail_at;

	/* The caches of the model */
	bool model;
	struct rnd_state rnd;
	u64 tlb4k[NPAGES];
	u64 tlb2m[SLOTS];
	u64 tables[SLOTS];

	/* Walker of the concurrency test */
	unsigned int walking;		/* odd while it is within a walk */
	unsigned long nr_walks;
	bool drain;
};

/* ---- what the driver's test has ---- */

/*
 * RT_LEAF_HINT: has the hardware a hint that only leaves have changed, and does the
 * driver give it? To be defined before this is included.
 */

static u64 *rt_root(const struct rt *rt, unsigned int *levels);
static bool rt_present(const struct rt *rt, u64 val);
/* Is this level 2 entry a leaf? */
static bool rt_leaf2(u64 val);
static u64 rt_addr(u64 val);
static bool rt_writable(u64 val);
/* Are the bits of a leaf as this hardware wants them? */
static bool rt_leaf_bits_ok(const struct rt *rt, u64 val, int level);
/* Does a table take away rights of its leaves? Level 2 is that of 2MiB. */
static bool rt_table_bits_ok(const struct rt *rt, u64 val, int level);
static atomic_t *rt_splits(const struct rt *rt);
/* The first address that the domain cannot have */
static unsigned long rt_end_of_space(const struct rt *rt);
/* One more IOMMU; a device with a TLB behind the first one */
static void rt_add_unit(struct kunit *test);
static void rt_add_devtlb(struct kunit *test);
static void rt_free_domain(void *data);

/* ---- the test's view of the tables ---- */

/* The level 2 entry of an address, or NULL if the tables do not reach so far */
static u64 *rt_pde(const struct rt *rt, unsigned long iova)
{
	unsigned int level;
	u64 *table = rt_root(rt, &level);

	if (12 + 9 * level < 64 && iova >> (12 + 9 * level))
		return NULL;
	for (; level > 2; level--) {
		u64 val = READ_ONCE(table[(iova >> (12 + 9 * (level - 1))) & 511]);

		if (!rt_present(rt, val) || !rt_table_bits_ok(rt, val, level))
			return NULL;
		table = phys_to_virt(rt_addr(val));
	}

	return &table[(iova >> 21) & 511];
}

static u64 rt_leaf_key(const struct rt *rt, u64 val, int level, unsigned long page)
{
	if (!rt_present(rt, val) || !rt_leaf_bits_ok(rt, val, level))
		return 0;

	return KEY(rt_addr(val) + (level == 2 ? page % PAGES * SZ_4K : 0),
		   rt_writable(val) ? RW : IOMMU_READ);
}

/* What address IOVA(@page) means, where @pde is the level 2 entry of its slot */
static u64 rt_key_at(const struct rt *rt, const u64 *pde, unsigned long page)
{
	u64 val, *table;

	if (!pde)
		return 0;
	val = READ_ONCE(*pde);
	if (!rt_present(rt, val))
		return 0;
	if (rt_leaf2(val))
		return rt_leaf_key(rt, val, 2, page);
	/* The rights of the table must not take away those of the leaf. */
	if (!rt_table_bits_ok(rt, val, 2))
		return 0;
	table = phys_to_virt(rt_addr(val));

	return rt_leaf_key(rt, READ_ONCE(table[page % PAGES]), 1, page);
}

/* What address IOVA(@page) means now */
static u64 rt_key(const struct rt *rt, unsigned long page)
{
	return rt_key_at(rt, rt_pde(rt, IOVA(page)), page);
}

static bool rt_is_large(const struct rt *rt, unsigned long slot)
{
	u64 *pde = rt_pde(rt, BASE + slot * SZ_2M);

	return pde && rt_leaf2(READ_ONCE(*pde));
}

static struct page *rt_table(const struct rt *rt, unsigned long slot)
{
	u64 *pde = rt_pde(rt, BASE + slot * SZ_2M);

	if (!pde || !rt_present(rt, *pde) || rt_leaf2(*pde))
		return NULL;
	return pfn_to_page(rt_addr(*pde) >> PAGE_SHIFT);
}

/* The slot that an entry belongs to, or SLOTS */
static unsigned long rt_slot_of(const struct rt *rt, const u64 *entry)
{
	unsigned long slot;

	for (slot = 0; slot < SLOTS; slot++)
		if (entry == rt_pde(rt, BASE + slot * SZ_2M) ||
		    virt_to_page(entry) == rt_table(rt, slot))
			break;

	return slot;
}

/*
 * Each page must mean what it meant before or what it shall mean. All pages are
 * looked at now and then, those of the slot where something happens each time.
 */
static void rt_look(struct rt *rt, const u64 *entry)
{
	unsigned long at = rt_slot_of(rt, entry);
	unsigned long slot, page;

	for (slot = 0; slot < SLOTS; slot++) {
		const u64 *pde = rt_pde(rt, BASE + slot * SZ_2M);

		if (slot != at && at != SLOTS && rt->nr_seen % 64)
			continue;
		for (page = slot * PAGES; page < (slot + 1) * PAGES; page++) {
			u64 key = rt_key_at(rt, pde, page);

			if (key && (key == rt->old[page] || key == rt->new[page]))
				continue;
			if (!rt->nr_bad++) {
				rt->bad_page = page;
				rt->bad_key = key;
			}
		}
	}
	rt->nr_seen++;
}

/* Note what is, as what may be seen from now on; the caller then edits rt->new. */
static void rt_begin(struct rt *rt)
{
	unsigned long i;

	for (i = 0; i < NPAGES; i++) {
		rt->old[i] = rt_key(rt, i);
		rt->new[i] = rt->old[i];
	}
	cond_resched();
	rt->nr_seen = 0;
	rt->nr_bad = 0;
	rt->nr_flush = 0;
	rt->nr_waits = 0;
	iommu_inval_init(&rt->inval);
	rt->observe = true;
}

static void rt_set_new(struct rt *rt, unsigned long page, unsigned long n,
		       phys_addr_t paddr, int prot)
{
	unsigned long i;

	for (i = page; i < page + n; i++)
		rt->new[i] = KEY(paddr + i % PAGES * SZ_4K, prot);
}

/* Nothing but old and new was seen, in at least @stores states; now all is new. */
static void rt_end(struct kunit *test, unsigned long stores)
{
	struct rt *rt = test->priv;
	unsigned long i;

	rt->observe = false;
	KUNIT_EXPECT_GE(test, rt->nr_seen, stores);
	KUNIT_EXPECT_EQ_MSG(test, rt->nr_bad, 0UL,
			    "page %lu was seen as %llx, may be %llx or %llx",
			    rt->bad_page, rt->bad_key, rt->old[rt->bad_page],
			    rt->new[rt->bad_page]);
	for (i = 0; i < NPAGES; i++)
		if (rt_key(rt, i) != rt->new[i])
			break;
	KUNIT_EXPECT_EQ_MSG(test, i, NPAGES, "page %lu is %llx, shall be %llx", i,
			    i < NPAGES ? rt_key(rt, i) : 0,
			    i < NPAGES ? rt->new[i] : 0);
}

static void rt_expect_ranges(struct kunit *test, unsigned int n)
{
	struct rt *rt = test->priv;

	KUNIT_EXPECT_EQ(test, rt->inval.nr_ranges, n);
}

static void rt_expect_range(struct kunit *test, unsigned int i, unsigned long page,
			    unsigned long n, bool tables)
{
	struct rt *rt = test->priv;

	KUNIT_ASSERT_LT(test, i, rt->inval.nr_ranges);
	KUNIT_EXPECT_EQ(test, rt->inval.range[i].start, IOVA(page));
	KUNIT_EXPECT_EQ(test, rt->inval.range[i].last, IOVA(page + n) - 1);
	KUNIT_EXPECT_EQ(test, rt->inval.range[i].tables, tables);
}

/* ---- the model of the caches ---- */

/* The device accesses IOVA(@page), and caches keep all that they learn. */
static void rt_touch(struct rt *rt, unsigned long page)
{
	unsigned long slot = page / PAGES;
	u64 *pde = rt_pde(rt, IOVA(page));
	u64 *table;

	if (!rt->tables[slot]) {
		if (rt_leaf2(*pde)) {
			if (!rt->tlb2m[slot])
				rt->tlb2m[slot] = rt_leaf_key(rt, *pde, 2, 0);
			return;
		}
		rt->tables[slot] = rt_addr(*pde);
	}
	table = phys_to_virt(rt->tables[slot]);
	if (!rt->tlb4k[page])
		rt->tlb4k[page] = rt_leaf_key(rt, table[page % PAGES], 1, page);
}

static void rt_touch_some(struct rt *rt)
{
	int i;

	for (i = 0; i < 24; i++)
		rt_touch(rt, prandom_u32_state(&rt->rnd) % NPAGES);
}

static void rt_model_flush(struct rt *rt, unsigned long first, unsigned long last,
			   bool large, bool tables)
{
	unsigned long i;

	for (i = 0; i < NPAGES; i++) {
		unsigned long pfn = IOVA(i) >> 12;

		if (pfn >= first && pfn <= last)
			rt->tlb4k[i] = 0;
	}
	for (i = 0; i < SLOTS; i++) {
		unsigned long pfn = IOVA(i * PAGES) >> 12;

		if (large && pfn >= first && pfn + PAGES - 1 <= last)
			rt->tlb2m[i] = 0;
		if (tables && pfn <= last && pfn + PAGES - 1 >= first)
			rt->tables[i] = 0;
	}
}

/* Between a sync and the next operation nothing stale may be cached. */
static unsigned long rt_model_stale(const struct rt *rt)
{
	unsigned long i, n = 0;

	for (i = 0; i < NPAGES; i++)
		if (rt->tlb4k[i] && rt->tlb4k[i] != rt_key(rt, i))
			n++;
	for (i = 0; i < SLOTS; i++) {
		u64 pde = *rt_pde(rt, BASE + i * SZ_2M);

		/* Nor may a 2MiB translation survive beside a table. */
		if (rt->tlb2m[i] &&
		    (!rt_leaf2(pde) || rt->tlb2m[i] != rt_key(rt, i * PAGES)))
			n++;
		if (rt->tables[i] &&
		    (rt_leaf2(pde) || rt->tables[i] != rt_addr(pde)))
			n++;
	}

	return n;
}

/* ---- what stands in for the driver's hands and the hardware's ears ---- */

/* For the stub of a wait: has what was begun ended? */
static bool rt_drained(struct rt *rt)
{
	unsigned int walk = READ_ONCE(rt->walking);

	if (!rt->drain)
		return false;
	/* A request that began before the flush ends before the flush. */
	while (walk & 1 && READ_ONCE(rt->walking) == walk)
		cpu_relax();

	return true;
}

/* For the stub of the submission */
static void rt_flushed(struct rt *rt, struct rt_flush f)
{
	unsigned long first = f.all ? 0 : f.addr >> 12;
	unsigned long last = f.all ? ~0UL : first + BIT(f.am) - 1;

	if (rt->nr_flush < RT_MAX_FLUSH)
		rt->flush[rt->nr_flush++] = f;
	if (rt->model && !f.devtlb)
		rt_model_flush(rt, first, last, f.all || f.am >= 9, f.all || !f.leaf_only);
}

static bool rt_try_cmpxchg(u64 *entry, u64 *old, u64 new)
{
	struct kunit *test = kunit_get_current_test();
	struct rt *rt = test->priv;
	bool done;

	if (rt->observe)
		rt_look(rt, entry);
	if (rt->model)
		rt_touch_some(rt);
	if (rt->on_store)
		rt->on_store(test, entry, *old, new);

	done = try_cmpxchg64(entry, old, new);

	if (rt->observe)
		rt_look(rt, entry);
	if (rt->model)
		rt_touch_some(rt);

	return done;
}

/* Holds each table, to see in the end whether the driver has let go of it */
static void *rt_alloc_table(int nid, gfp_t gfp)
{
	struct kunit *test = kunit_get_current_test();
	struct rt *rt = test->priv;
	void *table;

	if (!rt->fail_at--)
		return NULL;
	table = iommu_alloc_page_node(nid, gfp);
	if (table && rt->nr_held < ARRAY_SIZE(rt->held)) {
		rt->held[rt->nr_held] = virt_to_page(table);
		get_page(rt->held[rt->nr_held++]);
	}

	return table;
}

/* ---- set-up ---- */

static struct rt *rt_new(struct kunit *test)
{
	struct rt *rt;

	rt = kunit_kzalloc(test, sizeof(*rt), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, rt);
	test->priv = rt;
	rt->format = test->param_value;
	prandom_seed_state(&rt->rnd, 20260102);
	iommu_inval_init(&rt->inval);
	kunit_activate_static_stub(test, iommu_live_try_cmpxchg, rt_try_cmpxchg);

	return rt;
}

/* The whole range of the tests, absent: pattern A, read-only */
static void rt_map(struct kunit *test)
{
	struct rt *rt = test->priv;

	KUNIT_ASSERT_EQ(test, iommu_map_fill(rt->domain, BASE, LEN, PATTERN_A,
					     IOMMU_READ, GFP_KERNEL), 0);
}

static void rt_split(struct kunit *test, unsigned long slot)
{
	struct rt *rt = test->priv;

	KUNIT_ASSERT_EQ(test, iommu_split(rt->domain, BASE + slot * SZ_2M, GFP_KERNEL), 0);
}

/* ---- refusals: nothing changes, nothing is to be flushed ---- */

static void replace_of_a_hole_is_enoent(struct kunit *test)
{
	struct rt *rt = test->priv;
	phys_addr_t paddr = USER_PAGE(0);

	/* No table at all */
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, BASE, SZ_4K, paddr, RW, NULL,
					    &rt->inval), -ENOENT);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, BASE, SZ_2M, PATTERN_B, RW, NULL,
					    &rt->inval), -ENOENT);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, BASE, 1, &paddr, RW,
						  &rt->inval), -ENOENT);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, BASE, SZ_2M, PATTERN_B, RW,
						 &rt->inval), -ENOENT);
	KUNIT_EXPECT_EQ(test, iommu_split(rt->domain, BASE, GFP_KERNEL), -ENOENT);
	KUNIT_EXPECT_EQ(test, iommu_merge_leaves(rt->domain, BASE, PATTERN_B, RW,
						 &rt->inval), -ENOENT);
	/* A table, with a leaf beside the hole */
	KUNIT_ASSERT_EQ(test, iommu_map(rt->domain, IOVA(1), paddr, SZ_4K, RW,
					GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, IOVA(0), SZ_4K, paddr, RW, NULL,
					    &rt->inval), -ENOENT);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, IOVA(2), 1, &paddr, RW,
						  &rt->inval), -ENOENT);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, IOVA(1), SZ_8K, PATTERN_B,
						 RW, &rt->inval), -ENOENT);
	KUNIT_EXPECT_EQ(test, rt_key(rt, 0), 0ULL);
	KUNIT_EXPECT_EQ(test, rt_key(rt, 1), KEY(paddr, RW));
	/* A slot without a table beside one that has one */
	KUNIT_EXPECT_EQ(test, iommu_split(rt->domain, BASE + SZ_2M, GFP_KERNEL), -ENOENT);
	KUNIT_EXPECT_EQ(test, iommu_merge_leaves(rt->domain, BASE + SZ_2M, PATTERN_B, RW,
						 &rt->inval), -ENOENT);
	/* Beyond what the domain can address */
	if (rt_end_of_space(rt)) {
		unsigned long beyond = rt_end_of_space(rt);

		KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, beyond, SZ_4K, paddr, RW,
						    NULL, &rt->inval), -ENOENT);
		KUNIT_EXPECT_EQ(test, iommu_split(rt->domain, beyond, GFP_KERNEL), -ENOENT);
	}
	rt_expect_ranges(test, 0);
}

static void replace_of_a_leaf_of_another_size_is_ebusy(struct kunit *test)
{
	struct rt *rt = test->priv;
	phys_addr_t paddr = USER_PAGE(0);

	rt_map(test);
	rt_split(test, 1);
	rt_begin(rt);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, BASE, SZ_4K, paddr, RW, NULL,
					    &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, BASE, 1, &paddr, RW,
						  &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, BASE + SZ_2M, SZ_2M, PATTERN_B, RW,
					    NULL, &rt->inval), -EBUSY);
	/* One page short at either end */
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, IOVA(1), SZ_2M - SZ_4K,
						 PATTERN_B, RW, &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, IOVA(0), SZ_2M - SZ_4K,
						 PATTERN_B, RW, &rt->inval), -EBUSY);
	/* The same pattern with other rights is another content. */
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, IOVA(0), SZ_4K, PATTERN_A, RW,
						 &rt->inval), -EBUSY);
	rt_end(test, 0);
	rt_expect_ranges(test, 0);
}

static void replace_within_a_1g_leaf_is_ebusy(struct kunit *test)
{
	struct rt *rt = test->priv;
	phys_addr_t paddr = USER_PAGE(0);

	KUNIT_ASSERT_EQ(test, iommu_map(rt->domain, SZ_1G, 2UL * SZ_1G, SZ_1G, RW,
					GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, SZ_1G, SZ_4K, paddr, RW, NULL,
					    &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, SZ_1G, SZ_2M, PATTERN_A, RW, NULL,
					    &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, SZ_1G, SZ_1G, PATTERN_A, RW,
						 &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_split(rt->domain, SZ_1G, GFP_KERNEL), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_merge_leaves(rt->domain, SZ_1G, PATTERN_A, RW,
						 &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(rt->domain, SZ_1G, SZ_2M, PATTERN_A, RW,
					     GFP_KERNEL), -EEXIST);
	KUNIT_EXPECT_EQ(test, iommu_iova_to_phys(rt->domain, SZ_1G + SZ_2M),
			2ULL * SZ_1G + SZ_2M);
	rt_expect_ranges(test, 0);
}

static void replace_pages_is_all_or_nothing(struct kunit *test)
{
	struct rt *rt = test->priv;
	phys_addr_t *paddrs;
	int i;

	paddrs = kunit_kcalloc(test, 2 * PAGES, sizeof(*paddrs), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, paddrs);
	for (i = 0; i < 2 * PAGES; i++)
		paddrs[i] = USER_PAGE(i);
	rt_map(test);
	rt_split(test, 0);
	rt_begin(rt);

	/* The second slot has a large leaf. */
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, BASE, 2 * PAGES, paddrs, RW,
						  &rt->inval), -EBUSY);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, BASE, PAGES + 1, paddrs, RW,
						  &rt->inval), -EBUSY);
	/* The last address is not that of a page. */
	paddrs[PAGES - 1]++;
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, BASE, PAGES, paddrs, RW,
						  &rt->inval), -EINVAL);
	rt_end(test, 0);
	rt_expect_ranges(test, 0);

	/* One leaf is missing. */
	KUNIT_ASSERT_EQ(test, iommu_unmap(rt->domain, IOVA(300), SZ_4K), SZ_4K);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, BASE, 301, paddrs, RW,
						  &rt->inval), -ENOENT);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, BASE, LEN, PATTERN_B, RW,
						 &rt->inval), -ENOENT);
	KUNIT_EXPECT_EQ(test, rt_key(rt, 0), KEY(PATTERN_A, IOMMU_READ));
	KUNIT_EXPECT_EQ(test, rt_key(rt, PAGES), KEY(PATTERN_A, IOMMU_READ));
	rt_expect_ranges(test, 0);
	/* It is not looked at where it is kept, and one page earlier all is well. */
	paddrs[300] = IOMMU_LEAF_KEEP;
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, BASE, 301, paddrs, RW,
						  &rt->inval), 0);
	KUNIT_EXPECT_EQ(test, rt_key(rt, 299), KEY(USER_PAGE(299), RW));
	KUNIT_EXPECT_EQ(test, rt_key(rt, 300), 0ULL);
	KUNIT_EXPECT_EQ(test, rt_key(rt, 301), KEY(PATTERN_A + 301 * SZ_4K, IOMMU_READ));
}

/* ---- replace ---- */

static void replace_changes_one_leaf_and_tells_what_it_was(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct iommu_leaf old = {};

	rt_map(test);
	rt_split(test, 1);
	rt_begin(rt);
	rt->new[700] = KEY(USER_PAGE(1), RW);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, IOVA(700), SZ_4K, USER_PAGE(1), RW,
					    &old, &rt->inval), 0);
	rt_end(test, 2);
	KUNIT_EXPECT_EQ(test, old.paddr, PATTERN_A + (700 - PAGES) * SZ_4K);
	KUNIT_EXPECT_EQ(test, old.pgsize, (size_t)SZ_4K);
	KUNIT_EXPECT_EQ(test, old.prot, IOMMU_READ);
	KUNIT_EXPECT_FALSE(test, old.dirty);
	rt_expect_ranges(test, 1);
	rt_expect_range(test, 0, 700, 1, false);

	/* What was writable may have been written to, and is said to be dirty. */
	rt_begin(rt);
	rt->new[700] = KEY(PATTERN_B, IOMMU_READ);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, IOVA(700), SZ_4K, PATTERN_B,
					    IOMMU_READ, &old, &rt->inval), 0);
	rt_end(test, 2);
	KUNIT_EXPECT_EQ(test, old.paddr, USER_PAGE(1));
	KUNIT_EXPECT_EQ(test, old.prot, RW);
	KUNIT_EXPECT_TRUE(test, old.dirty);
}

static void replace_of_a_large_leaf(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct iommu_leaf old = {};

	rt_map(test);
	rt_begin(rt);
	rt_set_new(rt, 2 * PAGES, PAGES, PATTERN_B, RW);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, IOVA(2 * PAGES), SZ_2M, PATTERN_B,
					    RW, &old, &rt->inval), 0);
	rt_end(test, 2);
	KUNIT_EXPECT_TRUE(test, rt_is_large(rt, 2));
	KUNIT_EXPECT_EQ(test, old.paddr, PATTERN_A);
	KUNIT_EXPECT_EQ(test, old.pgsize, (size_t)SZ_2M);
	KUNIT_EXPECT_EQ(test, old.prot, IOMMU_READ);
	rt_expect_ranges(test, 1);
	rt_expect_range(test, 0, 2 * PAGES, PAGES, false);
}

static void replace_by_the_same_needs_no_flush(struct kunit *test)
{
	struct rt *rt = test->priv;
	phys_addr_t same = PATTERN_A + SZ_4K;

	rt_map(test);
	rt_split(test, 0);
	rt_begin(rt);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, IOVA(1), SZ_4K, same, IOMMU_READ,
					    NULL, &rt->inval), 0);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, IOVA(1), 1, &same, IOMMU_READ,
						  &rt->inval), 0);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, BASE, LEN, PATTERN_A,
						 IOMMU_READ, &rt->inval), 0);
	KUNIT_EXPECT_EQ(test, iommu_merge_leaves(rt->domain, BASE + SZ_2M, PATTERN_A,
						 IOMMU_READ, &rt->inval), 0);
	rt_end(test, 0);
	rt_expect_ranges(test, 0);
	iommu_inval_sync(rt->domain, &rt->inval);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 0U);

	/* Other rights are not the same. */
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, IOVA(1), SZ_4K, same, RW, NULL,
					    &rt->inval), 0);
	rt_expect_ranges(test, 1);
}

static void replace_pages_keeps_what_it_is_told_to(struct kunit *test)
{
	struct rt *rt = test->priv;
	phys_addr_t *paddrs;
	unsigned long i;

	paddrs = kunit_kcalloc(test, NPAGES, sizeof(*paddrs), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, paddrs);
	rt_map(test);
	for (i = 0; i < SLOTS; i++)
		if (i != 2)
			rt_split(test, i);

	/* Two runs; slot 2 keeps its large leaf in between. */
	rt_begin(rt);
	for (i = 0; i < NPAGES; i++) {
		paddrs[i] = IOMMU_LEAF_KEEP;
		if ((i >= 10 && i < 20) || (i >= 3 * PAGES && i <= 3 * PAGES + 1)) {
			paddrs[i] = USER_PAGE(i);
			rt->new[i] = KEY(USER_PAGE(i), RW);
		}
	}
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, BASE, NPAGES, paddrs, RW,
						  &rt->inval), 0);
	rt_end(test, 12);
	KUNIT_EXPECT_TRUE(test, rt_is_large(rt, 2));
	rt_expect_ranges(test, 2);
	rt_expect_range(test, 0, 10, 10, false);
	rt_expect_range(test, 1, 3 * PAGES, 2, false);
}

static void replace_pages_crosses_slots_and_tables(struct kunit *test)
{
	/* 1GiB, where another level 2 table begins, is at page 1024. */
	static const struct { unsigned long page, n; } at[] = {
		{ 0, 1 }, { 511, 1 }, { 511, 2 }, { 512, 1 }, { 0, 512 }, { 0, 513 },
		{ 1, 512 }, { 1023, 1 }, { 1023, 2 }, { 1024, 1 }, { 511, 1026 },
		{ 0, 2048 }, { 2047, 1 },
	};
	struct rt *rt = test->priv;
	phys_addr_t *paddrs;
	unsigned long i, j;

	paddrs = kunit_kcalloc(test, NPAGES, sizeof(*paddrs), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, paddrs);
	rt_map(test);
	for (i = 0; i < SLOTS; i++)
		rt_split(test, i);

	for (i = 0; i < ARRAY_SIZE(at); i++) {
		rt_begin(rt);
		for (j = 0; j < at[i].n; j++) {
			paddrs[j] = USER_PAGE(NPAGES * i + j);
			rt->new[at[i].page + j] = KEY(paddrs[j], IOMMU_READ);
		}
		KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, IOVA(at[i].page),
							  at[i].n, paddrs, IOMMU_READ,
							  &rt->inval), 0);
		rt_end(test, at[i].n);
		rt_expect_ranges(test, 1);
		rt_expect_range(test, 0, at[i].page, at[i].n, false);
	}
}

/* ---- fill ---- */

static void fill_replaces_whole_slots_by_one_leaf(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_map(test);
	rt_begin(rt);
	rt_set_new(rt, 0, NPAGES, PATTERN_B, RW);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, BASE, LEN, PATTERN_B, RW,
						 &rt->inval), 0);
	rt_end(test, SLOTS);
	KUNIT_EXPECT_LE(test, rt->nr_seen, 2 * SLOTS);
	KUNIT_EXPECT_TRUE(test, rt_is_large(rt, 0) && rt_is_large(rt, 3));
	rt_expect_ranges(test, 1);
	rt_expect_range(test, 0, 0, NPAGES, false);
}

static void fill_at_all_edges(struct kunit *test)
{
	static const unsigned long edge[] = {
		0, 1, 512, 1023, 1024, 1025, 2047, 2048,
	};
	struct rt *rt = test->priv;
	bool flip = false;
	unsigned int i, j;

	/* Slots 0 and 3 are tables, 1 and 2 large leaves wherever the range allows. */
	rt_map(test);
	for (i = 0; i < ARRAY_SIZE(edge); i++) {
		for (j = i + 1; j < ARRAY_SIZE(edge); j++) {
			unsigned long from = edge[i], to = edge[j], slot;
			u64 pattern = flip ? PATTERN_A : PATTERN_B;
			int prot = flip ? IOMMU_READ : RW;

			for (slot = 0; slot < SLOTS; slot++) {
				bool whole = from <= slot * PAGES &&
					     to >= (slot + 1) * PAGES;

				if (slot == 0 || slot == 3 || !whole)
					rt_split(test, slot);
			}
			/* All the other pattern, so that each page of it changes */
			KUNIT_ASSERT_EQ(test,
					iommu_replace_fill(rt->domain, BASE, LEN,
							   flip ? PATTERN_B : PATTERN_A,
							   flip ? RW : IOMMU_READ,
							   &rt->inval), 0);
			rt_begin(rt);
			rt_set_new(rt, from, to - from, pattern, prot);
			KUNIT_EXPECT_EQ(test,
					iommu_replace_fill(rt->domain, IOVA(from),
							   (to - from) * SZ_4K, pattern,
							   prot, &rt->inval), 0);
			rt_end(test, 2);
			rt_expect_ranges(test, 1);
			rt_expect_range(test, 0, from, to - from, false);
			flip = !flip;
		}
	}
}

static void fill_keeps_tables(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_map(test);
	rt_split(test, 1);
	rt_begin(rt);
	rt_set_new(rt, 0, NPAGES, PATTERN_B, IOMMU_READ);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, BASE, LEN, PATTERN_B,
						 IOMMU_READ, &rt->inval), 0);
	rt_end(test, PAGES);
	KUNIT_EXPECT_FALSE(test, rt_is_large(rt, 1));
	KUNIT_EXPECT_TRUE(test, list_empty(&rt->inval.freelist));
	rt_expect_ranges(test, 1);
	rt_expect_range(test, 0, 0, NPAGES, false);
}

static void fill_of_part_of_a_leaf_that_is_filled_so_changes_nothing(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_map(test);
	rt_begin(rt);
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, IOVA(5), 600 * SZ_4K,
						 PATTERN_A, IOMMU_READ, &rt->inval), 0);
	rt_end(test, 0);
	rt_expect_ranges(test, 0);
	KUNIT_EXPECT_TRUE(test, rt_is_large(rt, 0) && rt_is_large(rt, 1));
}

static void split_meanwhile(struct kunit *test, u64 *entry, u64 old, u64 new)
{
	struct rt *rt = test->priv;

	if (rt->count++)
		return;
	rt->observe = false;
	rt_split(test, 1);
	rt->observe = true;
}

/* A split needs no lock, so it may come between the look at a leaf and its change. */
static void fill_loses_a_race_to_a_split(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_map(test);
	rt_begin(rt);
	rt_set_new(rt, PAGES, PAGES, PATTERN_B, RW);
	rt->on_store = split_meanwhile;
	KUNIT_EXPECT_EQ(test, iommu_replace_fill(rt->domain, IOVA(PAGES), SZ_2M, PATTERN_B,
						 RW, &rt->inval), 0);
	rt->on_store = NULL;
	rt_end(test, PAGES);
	KUNIT_EXPECT_FALSE(test, rt_is_large(rt, 1));
	KUNIT_EXPECT_TRUE(test, list_empty(&rt->inval.freelist));
}

static void replace_loses_a_race_to_a_split(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_map(test);
	rt_begin(rt);
	rt->on_store = split_meanwhile;
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, IOVA(PAGES), SZ_2M, PATTERN_B, RW,
					    NULL, &rt->inval), -EBUSY);
	rt->on_store = NULL;
	rt_end(test, 2);
	KUNIT_EXPECT_FALSE(test, rt_is_large(rt, 1));
	rt_expect_ranges(test, 0);
}

/* ---- split ---- */

static void split_keeps_the_translation(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_map(test);
	KUNIT_ASSERT_EQ(test, iommu_replace(rt->domain, IOVA(PAGES), SZ_2M, PATTERN_B, RW,
					    NULL, &rt->inval), 0);
	rt_begin(rt);
	/* Any address in the slot will do. */
	KUNIT_EXPECT_EQ(test, iommu_split(rt->domain, BASE + 77, GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, iommu_split(rt->domain, IOVA(2 * PAGES) - 1, GFP_KERNEL), 0);
	rt_end(test, 4);
	KUNIT_EXPECT_FALSE(test, rt_is_large(rt, 0) || rt_is_large(rt, 1));
	KUNIT_EXPECT_TRUE(test, rt_is_large(rt, 2) && rt_is_large(rt, 3));

	/* Again: no store, no flush */
	rt_begin(rt);
	KUNIT_EXPECT_EQ(test, iommu_split(rt->domain, BASE, GFP_KERNEL), 0);
	rt_end(test, 0);
	KUNIT_EXPECT_EQ(test, rt->nr_seen, 0UL);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 0U);
}

static void split_flushes_the_large_translation(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct rt_flush f;

	rt_map(test);
	rt_begin(rt);
	rt_split(test, 1);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 1U);
	KUNIT_ASSERT_EQ(test, rt->nr_flush, 1U);
	f = rt->flush[0];
	KUNIT_EXPECT_FALSE(test, f.all);
	KUNIT_EXPECT_EQ(test, f.addr, (u64)IOVA(PAGES));
	KUNIT_EXPECT_EQ(test, f.am, 9U);
	KUNIT_EXPECT_FALSE(test, f.leaf_only);
}

static void replace_while_split_flushes(struct kunit *test)
{
	struct rt *rt = test->priv;
	phys_addr_t paddr = USER_PAGE(0);

	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, IOVA(PAGES + 5), SZ_4K, paddr, RW,
					    NULL, &rt->inval), 0);
	KUNIT_EXPECT_EQ(test, iommu_replace_pages(rt->domain, IOVA(PAGES + 300), 1, &paddr,
						  RW, &rt->inval), 0);
}

/*
 * A 2MiB translation may be cached until the flush of the split has ended, and the
 * invalidation of a 4KiB page need not hit it.
 */
static void replace_during_the_flush_of_a_split_invalidates_the_slot(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct rt_flush f;

	rt_map(test);
	iommu_inval_init(&rt->inval);
	rt->on_flush = replace_while_split_flushes;
	rt_split(test, 1);
	rt->on_flush = NULL;
	rt_expect_ranges(test, 1);
	rt_expect_range(test, 0, PAGES, PAGES, true);

	rt->nr_flush = 0;
	iommu_inval_sync(rt->domain, &rt->inval);
	KUNIT_ASSERT_EQ(test, rt->nr_flush, 1U);
	f = rt->flush[0];
	KUNIT_EXPECT_EQ(test, f.addr, (u64)IOVA(PAGES));
	KUNIT_EXPECT_EQ(test, f.am, 9U);
	KUNIT_EXPECT_FALSE(test, f.leaf_only);

	/* Afterwards it is precise again. */
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, IOVA(PAGES + 5), SZ_4K,
					    USER_PAGE(1), RW, NULL, &rt->inval), 0);
	rt_expect_ranges(test, 1);
	rt_expect_range(test, 0, PAGES + 5, 1, false);
}

static void change_leaf_meanwhile(struct kunit *test, u64 *entry, u64 old, u64 new)
{
	struct rt *rt = test->priv;

	if (rt->count++)
		return;
	rt_set_new(rt, PAGES, PAGES, PATTERN_B, RW);
	KUNIT_EXPECT_EQ(test, iommu_replace(rt->domain, IOVA(PAGES), SZ_2M, PATTERN_B, RW,
					    NULL, &rt->inval), 0);
}

static void split_loses_a_race_to_a_replace(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_map(test);
	rt_begin(rt);
	rt->on_store = change_leaf_meanwhile;
	rt_split(test, 1);
	rt->on_store = NULL;
	rt_end(test, 3);
	KUNIT_EXPECT_FALSE(test, rt_is_large(rt, 1));
}

static void split_faster(struct kunit *test, u64 *entry, u64 old, u64 new)
{
	struct rt *rt = test->priv;

	if (rt->count++)
		return;
	/* Hold the table of the loser, to see whether it lets go of it. */
	rt->table = pfn_to_page(rt_addr(new) >> PAGE_SHIFT);
	get_page(rt->table);
	rt_split(test, 1);
}

static void split_loses_a_race_to_a_split(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_map(test);
	rt_begin(rt);
	rt->on_store = split_faster;
	rt_split(test, 1);
	rt->on_store = NULL;
	rt_end(test, 3);
	KUNIT_EXPECT_FALSE(test, rt_is_large(rt, 1));
	KUNIT_ASSERT_NOT_NULL(test, rt->table);
	KUNIT_EXPECT_PTR_NE(test, rt_table(rt, 1), rt->table);
	KUNIT_EXPECT_EQ(test, page_count(rt->table), 1);
	put_page(rt->table);
	/* The loser is no split in progress any more. */
	KUNIT_EXPECT_EQ(test, atomic_read(rt_splits(rt)), 0);
}

/* ---- merge ---- */

static void table_is_alive(struct kunit *test)
{
	struct rt *rt = test->priv;

	KUNIT_EXPECT_EQ(test, page_count(rt->table), 2);
	rt->count++;
}

static void merge_frees_the_table_after_the_flush(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct rt_flush f;

	rt_map(test);
	rt_split(test, 1);
	KUNIT_ASSERT_EQ(test, iommu_replace(rt->domain, IOVA(PAGES + 9), SZ_4K,
					    USER_PAGE(9), RW, NULL, &rt->inval), 0);
	rt->table = rt_table(rt, 1);
	KUNIT_ASSERT_NOT_NULL(test, rt->table);
	get_page(rt->table);

	rt_begin(rt);
	rt_set_new(rt, PAGES, PAGES, PATTERN_B, IOMMU_READ);
	KUNIT_EXPECT_EQ(test, iommu_merge_leaves(rt->domain, IOVA(PAGES), PATTERN_B,
						 IOMMU_READ, &rt->inval), 0);
	rt_end(test, 2);
	KUNIT_EXPECT_TRUE(test, rt_is_large(rt, 1));
	KUNIT_EXPECT_EQ(test, page_count(rt->table), 2);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 0U);
	rt_expect_ranges(test, 1);
	rt_expect_range(test, 0, PAGES, PAGES, true);

	rt->on_flush = table_is_alive;
	iommu_inval_sync(rt->domain, &rt->inval);
	rt->on_flush = NULL;
	KUNIT_EXPECT_EQ(test, rt->count, 1U);
	KUNIT_EXPECT_EQ(test, page_count(rt->table), 1);
	put_page(rt->table);
	KUNIT_ASSERT_EQ(test, rt->nr_flush, 1U);
	f = rt->flush[0];
	KUNIT_EXPECT_EQ(test, f.addr, (u64)IOVA(PAGES));
	KUNIT_EXPECT_EQ(test, f.am, 9U);
	KUNIT_EXPECT_FALSE(test, f.leaf_only);
	/* Emptied: a second sync has nothing to do. */
	iommu_inval_sync(rt->domain, &rt->inval);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 1U);
}

static void merge_of_a_large_leaf_replaces_it(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_map(test);
	rt_begin(rt);
	rt_set_new(rt, PAGES, PAGES, PATTERN_B, RW);
	KUNIT_EXPECT_EQ(test, iommu_merge_leaves(rt->domain, IOVA(PAGES), PATTERN_B, RW,
						 &rt->inval), 0);
	rt_end(test, 2);
	rt_expect_ranges(test, 1);
	rt_expect_range(test, 0, PAGES, PAGES, false);
	KUNIT_EXPECT_TRUE(test, list_empty(&rt->inval.freelist));
}

static void merge_split_and_merge_again(struct kunit *test)
{
	struct rt *rt = test->priv;
	int i;

	rt_map(test);
	rt_begin(rt);
	for (i = 0; i < 100; i++) {
		rt_split(test, 2);
		KUNIT_EXPECT_EQ(test, iommu_merge_leaves(rt->domain, IOVA(2 * PAGES),
							 PATTERN_A, IOMMU_READ,
							 &rt->inval), 0);
		/* Every second time, two tables wait for one flush. */
		if (i & 1)
			iommu_inval_sync(rt->domain, &rt->inval);
	}
	rt_end(test, 400);
	KUNIT_EXPECT_EQ(test, rt->inval.nr_ranges, 0U);
	KUNIT_EXPECT_TRUE(test, rt_is_large(rt, 2));
}

/* ---- map and unmap ---- */

static bool rt_filled(struct rt *rt, unsigned long iova, unsigned long slots,
		      phys_addr_t paddr)
{
	unsigned long i;

	for (i = 0; i < slots; i++) {
		u64 *pde = rt_pde(rt, iova + i * SZ_2M);

		if (!pde || !rt_leaf2(*pde) ||
		    rt_leaf_key(rt, *pde, 2, 0) != KEY(paddr, IOMMU_READ))
			return false;
	}

	return true;
}

static u64 rt_slot_val(struct rt *rt, unsigned long iova)
{
	u64 *pde = rt_pde(rt, iova);

	return pde ? *pde : 0;
}

static void map_fill_at_all_sizes(struct kunit *test)
{
	static const unsigned long from[] = { 1, 511, 512, 513, 0x3ffff, 0x40000 };
	static const unsigned long slots[] = { 1, 2, 510, 511, 512, 513, 1025 };
	struct rt *rt = test->priv;
	unsigned int i, j;

	for (i = 0; i < ARRAY_SIZE(from); i++) {
		for (j = 0; j < ARRAY_SIZE(slots); j++) {
			unsigned long iova = from[i] * SZ_2M, n = slots[j];

			/* 512GiB, where a level 3 table ends, is the end at 3 levels. */
			if (from[i] + n > rt_end_of_space(rt) / SZ_2M) {
				KUNIT_EXPECT_EQ(test,
						iommu_map_fill(rt->domain, iova, n * SZ_2M,
							       PATTERN_A, IOMMU_READ,
							       GFP_KERNEL), -ERANGE);
				continue;
			}
			KUNIT_ASSERT_EQ(test,
					iommu_map_fill(rt->domain, iova, n * SZ_2M,
						       PATTERN_A, IOMMU_READ, GFP_KERNEL),
					0);
			KUNIT_EXPECT_TRUE(test, rt_filled(rt, iova, n, PATTERN_A));
			KUNIT_EXPECT_EQ(test, rt_slot_val(rt, iova - SZ_2M), 0ULL);
			KUNIT_EXPECT_EQ(test, rt_slot_val(rt, iova + n * SZ_2M), 0ULL);
			KUNIT_EXPECT_EQ(test, iommu_iova_to_phys(rt->domain,
								 iova + n * SZ_2M - 1),
					PATTERN_A + SZ_2M - 1);
			KUNIT_EXPECT_EQ(test, iommu_unmap(rt->domain, iova, n * SZ_2M),
					n * SZ_2M);
			KUNIT_EXPECT_EQ(test, rt_slot_val(rt, iova), 0ULL);
			KUNIT_EXPECT_EQ(test, rt_slot_val(rt, iova + (n - 1) * SZ_2M), 0ULL);
		}
	}
}

static void map_fill_of_the_last_slot(struct kunit *test)
{
	struct rt *rt = test->priv;
	unsigned long end = rt_end_of_space(rt);

	KUNIT_EXPECT_EQ(test, iommu_map_fill(rt->domain, end, SZ_2M, PATTERN_A, IOMMU_READ,
					     GFP_KERNEL), -ERANGE);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(rt->domain, end - SZ_2M, 2 * SZ_2M, PATTERN_A,
					     IOMMU_READ, GFP_KERNEL), -ERANGE);
	KUNIT_EXPECT_EQ(test, rt_slot_val(rt, end - SZ_2M), 0ULL);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(rt->domain, end - SZ_2M, SZ_2M, PATTERN_A,
					     IOMMU_READ, GFP_KERNEL), 0);
	KUNIT_EXPECT_TRUE(test, rt_filled(rt, end - SZ_2M, 1, PATTERN_A));
}

static void map_fill_over_a_mapping_is_eexist_and_undone(struct kunit *test)
{
	struct rt *rt = test->priv;
	phys_addr_t paddr = USER_PAGE(0);

	/* A page in slot 3, then a large leaf there */
	KUNIT_ASSERT_EQ(test, iommu_map(rt->domain, IOVA(3 * PAGES + 17), paddr, SZ_4K, RW,
					GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(rt->domain, BASE, LEN, PATTERN_A, IOMMU_READ,
					     GFP_KERNEL), -EEXIST);
	KUNIT_EXPECT_EQ(test, rt_key(rt, 3 * PAGES + 17), KEY(paddr, RW));
	KUNIT_EXPECT_EQ(test, rt_key(rt, 0), 0ULL);
	KUNIT_EXPECT_EQ(test, rt_key(rt, 3 * PAGES - 1), 0ULL);
	KUNIT_ASSERT_EQ(test, iommu_unmap(rt->domain, IOVA(3 * PAGES + 17), SZ_4K), SZ_4K);

	KUNIT_ASSERT_EQ(test, iommu_map_fill(rt->domain, IOVA(3 * PAGES), SZ_2M, PATTERN_B,
					     IOMMU_READ, GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, iommu_map_fill(rt->domain, BASE, LEN, PATTERN_A, IOMMU_READ,
					     GFP_KERNEL), -EEXIST);
	KUNIT_EXPECT_EQ(test, rt_key(rt, 3 * PAGES), KEY(PATTERN_B, IOMMU_READ));
	KUNIT_EXPECT_EQ(test, rt_key(rt, 0), 0ULL);
	/* One slot less fits. */
	KUNIT_EXPECT_EQ(test, iommu_map_fill(rt->domain, BASE, LEN - SZ_2M, PATTERN_A,
					     IOMMU_READ, GFP_KERNEL), 0);
}

/* Each allocation of a mapping fails in turn; nothing stays, nothing leaks. */
static void map_fill_without_memory_is_undone(struct kunit *test)
{
	const unsigned long len = 3UL * SZ_1G;
	struct rt *rt = test->priv;
	unsigned int i, failures;
	int ret;

	kunit_activate_static_stub(test, iommu_live_alloc_table, rt_alloc_table);
	for (failures = 0; ; failures++) {
		rt->fail_at = failures;
		ret = iommu_map_fill(rt->domain, BASE, len, PATTERN_A, IOMMU_READ,
				     GFP_KERNEL);
		if (!ret)
			break;
		KUNIT_ASSERT_EQ(test, ret, -ENOMEM);
		for (i = 0; i < len / SZ_2M; i++)
			KUNIT_ASSERT_EQ(test, rt_slot_val(rt, BASE + i * SZ_2M), 0ULL);
	}
	/* Of the four level 2 tables, two are taken away with what they map. */
	KUNIT_EXPECT_GE(test, failures, 3U);
	KUNIT_EXPECT_TRUE(test, rt_filled(rt, BASE, len / SZ_2M, PATTERN_A));

	rt->fail_at = 0;
	KUNIT_EXPECT_EQ(test, iommu_split(rt->domain, BASE, GFP_KERNEL), -ENOMEM);
	KUNIT_EXPECT_TRUE(test, rt_is_large(rt, 0));
	KUNIT_EXPECT_EQ(test, atomic_read(rt_splits(rt)), 0);
	rt->fail_at = -1;
	KUNIT_EXPECT_EQ(test, iommu_split(rt->domain, BASE, GFP_KERNEL), 0);
	KUNIT_EXPECT_FALSE(test, rt_is_large(rt, 0));

	kunit_release_action(test, rt_free_domain, rt);
	KUNIT_EXPECT_GE(test, rt->nr_held, 5U);
	KUNIT_ASSERT_LT(test, rt->nr_held, (unsigned int)ARRAY_SIZE(rt->held));
	for (i = 0; i < rt->nr_held; i++) {
		KUNIT_EXPECT_EQ(test, page_count(rt->held[i]), 1);
		put_page(rt->held[i]);
	}
}

static void *no_table(int nid, gfp_t gfp)
{
	return NULL;
}

/* They run under spinlocks, and while memory is reclaimed. */
static void what_notifiers_do_needs_no_memory_and_no_sleep(struct kunit *test)
{
	struct rt *rt = test->priv;
	phys_addr_t pages[2] = { USER_PAGE(1), USER_PAGE(2) };
	int ret[4];

	rt_map(test);
	rt_split(test, 1);
	kunit_activate_static_stub(test, iommu_live_alloc_table, no_table);
	iommu_inval_init(&rt->inval);
	preempt_disable();
	ret[0] = iommu_replace(rt->domain, IOVA(PAGES), SZ_4K, USER_PAGE(0), RW, NULL,
			       &rt->inval);
	ret[1] = iommu_replace_pages(rt->domain, IOVA(PAGES + 1), 2, pages, RW, &rt->inval);
	ret[2] = iommu_replace_fill(rt->domain, BASE, LEN, PATTERN_B, IOMMU_READ, &rt->inval);
	ret[3] = iommu_merge_leaves(rt->domain, IOVA(PAGES), PATTERN_B, IOMMU_READ,
				    &rt->inval);
	iommu_inval_sync(rt->domain, &rt->inval);
	preempt_enable();
	kunit_deactivate_static_stub(test, iommu_live_alloc_table);
	KUNIT_EXPECT_EQ(test, ret[0], 0);
	KUNIT_EXPECT_EQ(test, ret[1], 0);
	KUNIT_EXPECT_EQ(test, ret[2], 0);
	KUNIT_EXPECT_EQ(test, ret[3], 0);
	KUNIT_EXPECT_TRUE(test, rt_filled(rt, BASE, SLOTS, PATTERN_B));
}

static void table_is_alive_at_first(struct kunit *test)
{
	struct rt *rt = test->priv;

	if (!rt->count)
		table_is_alive(test);
}

/* The DMA API leaves tables behind that hold nothing any more. */
static void map_fill_takes_empty_tables_away(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct rt_flush f;

	KUNIT_ASSERT_EQ(test, iommu_map(rt->domain, IOVA(PAGES), USER_PAGE(0), SZ_4K, RW,
					GFP_KERNEL), 0);
	KUNIT_ASSERT_EQ(test, iommu_unmap(rt->domain, IOVA(PAGES), SZ_4K), SZ_4K);
	rt->table = rt_table(rt, 1);
	KUNIT_ASSERT_NOT_NULL(test, rt->table);
	get_page(rt->table);

	rt->nr_flush = 0;
	rt->on_flush = table_is_alive_at_first;
	rt_map(test);
	rt->on_flush = NULL;
	KUNIT_EXPECT_TRUE(test, rt_filled(rt, BASE, SLOTS, PATTERN_A));
	KUNIT_EXPECT_EQ(test, rt->count, 1U);
	KUNIT_EXPECT_EQ(test, page_count(rt->table), 1);
	put_page(rt->table);
	/* AMD's driver flushes all that was mapped, too. */
	KUNIT_ASSERT_GE(test, rt->nr_flush, 1U);
	f = rt->flush[0];
	KUNIT_EXPECT_EQ(test, f.addr, (u64)IOVA(PAGES));
	KUNIT_EXPECT_EQ(test, f.am, 9U);
	KUNIT_EXPECT_FALSE(test, f.leaf_only);
}

static void iommu_map_and_fill_write_the_same_leaves(struct kunit *test)
{
	struct rt *rt = test->priv;
	u64 large, small;

	KUNIT_ASSERT_EQ(test, iommu_map(rt->domain, BASE, PATTERN_A, SZ_2M, RW, GFP_KERNEL),
			0);
	large = *rt_pde(rt, BASE);
	KUNIT_ASSERT_EQ(test, iommu_unmap(rt->domain, BASE, SZ_2M), SZ_2M);
	KUNIT_ASSERT_EQ(test, iommu_map(rt->domain, BASE, PATTERN_A, SZ_4K, RW, GFP_KERNEL),
			0);
	small = *(u64 *)page_address(rt_table(rt, 0));
	KUNIT_ASSERT_EQ(test, iommu_unmap(rt->domain, BASE, SZ_4K), SZ_4K);

	KUNIT_ASSERT_EQ(test, iommu_map_fill(rt->domain, BASE, SZ_2M, PATTERN_A, RW,
					     GFP_KERNEL), 0);
	KUNIT_EXPECT_EQ(test, *rt_pde(rt, BASE), large);
	rt_split(test, 0);
	KUNIT_EXPECT_EQ(test, *(u64 *)page_address(rt_table(rt, 0)), small);
	KUNIT_ASSERT_EQ(test, iommu_replace(rt->domain, BASE, SZ_4K, PATTERN_B, IOMMU_READ,
					    NULL, &rt->inval), 0);
	KUNIT_ASSERT_EQ(test, iommu_replace(rt->domain, BASE, SZ_4K, PATTERN_A, RW, NULL,
					    &rt->inval), 0);
	KUNIT_EXPECT_EQ(test, *(u64 *)page_address(rt_table(rt, 0)), small);
	iommu_inval_sync(rt->domain, &rt->inval);
}

/* ---- what is flushed, and how often the driver waits ---- */

static void rt_sync_range(struct rt *rt, unsigned long iova, size_t len, bool tables)
{
	rt->nr_flush = 0;
	rt->nr_waits = 0;
	iommu_inval_init(&rt->inval);
	iommu_inval_add(&rt->inval, iova, len, tables);
	iommu_inval_sync(rt->domain, &rt->inval);
}

static void one_wait_for_both_windows_and_the_device(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct rt_flush f[4];
	int i;

	rt_add_devtlb(test);
	iommu_inval_init(&rt->inval);
	iommu_inval_add(&rt->inval, SZ_1G, SZ_4K, false);
	iommu_inval_add(&rt->inval, 5UL * SZ_1G, SZ_2M, true);
	iommu_inval_sync(rt->domain, &rt->inval);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 1U);
	KUNIT_ASSERT_EQ(test, rt->nr_flush, 4U);
	for (i = 0; i < 4; i++) {
		f[i] = rt->flush[i];
		/* A device refills its TLB from the IOTLB, which comes first. */
		KUNIT_EXPECT_EQ(test, f[i].devtlb, i >= 2);
		KUNIT_EXPECT_EQ(test, f[i].addr, i & 1 ? 5ULL * SZ_1G : SZ_1G);
		KUNIT_EXPECT_EQ(test, f[i].am, i & 1 ? 9U : 0U);
	}
	KUNIT_EXPECT_EQ(test, f[0].leaf_only, RT_LEAF_HINT);
	KUNIT_EXPECT_FALSE(test, f[1].leaf_only);
}

static void each_iommu_is_waited_for_once(struct kunit *test)
{
	struct rt *rt = test->priv;

	rt_add_unit(test);
	rt_sync_range(rt, SZ_1G, SZ_4K, false);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 2U);
	KUNIT_EXPECT_EQ(test, rt->nr_flush, 2U);
}

static void nothing_to_flush_is_no_wait(struct kunit *test)
{
	struct rt *rt = test->priv;

	iommu_inval_init(&rt->inval);
	iommu_inval_sync(rt->domain, &rt->inval);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 0U);
}

static void a_large_page_is_flushed_as_one(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct rt_flush f;

	rt_sync_range(rt, BASE, SZ_2M, false);
	KUNIT_ASSERT_EQ(test, rt->nr_flush, 1U);
	f = rt->flush[0];
	KUNIT_EXPECT_EQ(test, f.addr, (u64)BASE);
	KUNIT_EXPECT_EQ(test, f.am, 9U);
	KUNIT_EXPECT_EQ(test, f.leaf_only, RT_LEAF_HINT);
}

/* Two pages around 1GiB are two pages, not 2GiB. */
static void a_range_across_a_coarse_boundary_is_cut(struct kunit *test)
{
	struct rt *rt = test->priv;
	struct rt_flush f;
	int i;

	rt_sync_range(rt, SZ_1G - SZ_4K, SZ_8K, false);
	KUNIT_EXPECT_EQ(test, rt->nr_waits, 1U);
	KUNIT_ASSERT_EQ(test, rt->nr_flush, 2U);
	for (i = 0; i < 2; i++) {
		f = rt->flush[i];
		KUNIT_EXPECT_EQ(test, f.addr, (u64)SZ_1G - SZ_4K + i * SZ_4K);
		KUNIT_EXPECT_EQ(test, f.am, 0U);
		KUNIT_EXPECT_EQ(test, f.leaf_only, RT_LEAF_HINT);
	}
}

/*
 * Whatever the range: all of it is flushed, less than twice of it, aligned, and
 * each large page within by a mask that is large enough.
 */
static void flushed_is_the_range_and_less_than_twice_the_range(struct kunit *test)
{
	struct rt *rt = test->priv;
	int i, j, round;

	rt_add_devtlb(test);
	for (round = 0; round < 20000; round++) {
		unsigned long first = prandom_u32_state(&rt->rnd) % (1 << 20);
		unsigned long n = 1 + prandom_u32_state(&rt->rnd) %
				  (1 << (prandom_u32_state(&rt->rnd) % 18));
		unsigned long last = first + n - 1, next = first, sum = 0, slot;

		rt_sync_range(rt, first * SZ_4K, n * SZ_4K, round & 1);
		KUNIT_ASSERT_EQ(test, rt->nr_waits, 1U);
		KUNIT_ASSERT_LE(test, rt->nr_flush, 4U);
		for (i = 0; i < rt->nr_flush; i++) {
			struct rt_flush f = rt->flush[i];
			unsigned long a = f.addr >> 12, size = BIT(f.am);

			if (f.devtlb) {
				/* The device is told the same. */
				struct rt_flush g =
					rt->flush[i - rt->nr_flush / 2];

				KUNIT_ASSERT_EQ(test, f.addr, g.addr);
				KUNIT_ASSERT_EQ(test, f.am, g.am);
				continue;
			}
			KUNIT_ASSERT_EQ(test, f.leaf_only, RT_LEAF_HINT && !(round & 1));
			KUNIT_ASSERT_TRUE(test, IS_ALIGNED(a, size));
			KUNIT_ASSERT_LE(test, a, next);
			KUNIT_ASSERT_GT(test, a + size, next);
			next = a + size;
			sum += size;
		}
		KUNIT_ASSERT_GT(test, next, last);
		KUNIT_ASSERT_LT(test, sum, 2 * n);
		for (slot = round_up(first, PAGES); slot + PAGES - 1 <= last;
		     slot += PAGES) {
			for (j = 0; j < rt->nr_flush; j++) {
				struct rt_flush f = rt->flush[j];

				if (!f.devtlb && f.addr >> 12 <= slot && f.am >= 9 &&
				    (f.addr >> 12) + BIT(f.am) >= slot + PAGES)
					break;
			}
			KUNIT_ASSERT_LT(test, j, rt->nr_flush);
		}
	}
}

/* Random operations, devices that touch everything at any moment: nothing stale */
static void no_cache_outlives_a_sync(struct kunit *test)
{
	struct rt *rt = test->priv;
	unsigned long stale = 0, synced = 0;
	phys_addr_t *paddrs;
	int round, i;

	paddrs = kunit_kcalloc(test, NPAGES, sizeof(*paddrs), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, paddrs);
	rt_map(test);
	rt->model = true;
	iommu_inval_init(&rt->inval);
	for (round = 0; round < 3000; round++) {
		unsigned long page = prandom_u32_state(&rt->rnd) % NPAGES;
		unsigned long n = 1 + prandom_u32_state(&rt->rnd) %
				  min(NPAGES - page,
				      BIT(prandom_u32_state(&rt->rnd) % 12));
		unsigned long slot = page / PAGES * SZ_2M + BASE;
		int prot = round & 1 ? RW : IOMMU_READ;
		int ret = 0;

		switch (prandom_u32_state(&rt->rnd) % 6) {
		case 0:
			ret = iommu_replace(rt->domain, IOVA(page), SZ_4K,
					    USER_PAGE(round), prot, NULL, &rt->inval);
			break;
		case 1:
			for (i = 0; i < n; i++)
				paddrs[i] = prandom_u32_state(&rt->rnd) & 3 ?
					    USER_PAGE(round + i) : IOMMU_LEAF_KEEP;
			ret = iommu_replace_pages(rt->domain, IOVA(page), n, paddrs, prot,
						  &rt->inval);
			break;
		case 2:
			ret = iommu_replace_fill(rt->domain, IOVA(page), n * SZ_4K,
						 PATTERN_A, IOMMU_READ, &rt->inval);
			break;
		case 3:
			ret = iommu_replace_fill(rt->domain, slot, SZ_2M, PATTERN_B, prot,
						 &rt->inval);
			break;
		case 4:
			ret = iommu_split(rt->domain, slot, GFP_KERNEL);
			break;
		case 5:
			ret = iommu_merge_leaves(rt->domain, slot, PATTERN_A, IOMMU_READ,
						 &rt->inval);
			break;
		}
		KUNIT_ASSERT_TRUE(test, !ret || ret == -EBUSY);
		rt_touch_some(rt);
		/* Now and then several operations under one sync */
		if (prandom_u32_state(&rt->rnd) & 1) {
			iommu_inval_sync(rt->domain, &rt->inval);
			stale += rt_model_stale(rt);
			synced++;
		}
	}
	iommu_inval_sync(rt->domain, &rt->inval);
	KUNIT_EXPECT_GT(test, synced, 1000UL);
	KUNIT_EXPECT_EQ(test, stale, 0UL);
}

/* The model itself must be able to see what it is there to see. */
static void the_model_finds_a_missing_flush(struct kunit *test)
{
	struct rt *rt = test->priv;
	unsigned long i;

	rt_map(test);
	rt_split(test, 0);
	for (i = 0; i < NPAGES; i++)
		rt_touch(rt, i);
	KUNIT_EXPECT_EQ(test, rt_model_stale(rt), 0UL);
	KUNIT_ASSERT_EQ(test, iommu_replace(rt->domain, IOVA(3), SZ_4K, USER_PAGE(0), RW,
					    NULL, &rt->inval), 0);
	KUNIT_EXPECT_EQ(test, rt_model_stale(rt), 1UL);
	KUNIT_ASSERT_EQ(test, iommu_replace(rt->domain, IOVA(PAGES), SZ_2M, PATTERN_B, RW,
					    NULL, &rt->inval), 0);
	KUNIT_EXPECT_EQ(test, rt_model_stale(rt), 2UL);
	/* A flush of the page only does not take the 2MiB translation away. */
	rt_model_flush(rt, IOVA(PAGES) >> 12, IOVA(PAGES) >> 12, false, true);
	KUNIT_EXPECT_EQ(test, rt_model_stale(rt), 2UL);
	rt_model_flush(rt, IOVA(PAGES) >> 12, (IOVA(2 * PAGES) >> 12) - 1, true, false);
	KUNIT_EXPECT_EQ(test, rt_model_stale(rt), 1UL);
	rt_model_flush(rt, 0, ~0UL, true, false);
	KUNIT_EXPECT_EQ(test, rt_model_stale(rt), 0UL);
	KUNIT_ASSERT_EQ(test, iommu_merge_leaves(rt->domain, BASE, PATTERN_A, IOMMU_READ,
						 &rt->inval), 0);
	KUNIT_EXPECT_EQ(test, rt_model_stale(rt), 1UL);
	iommu_inval_sync(rt->domain, &rt->inval);
}

/* ---- threads ---- */

#define RT_MUTATORS	2
#define RT_ROUNDS	4000
#define RT_WALKS	20000

struct rt_thread {
	struct kunit *test;
	struct task_struct *task;
	struct completion done;
	unsigned int nr;
	unsigned long bad;
	unsigned long busy;
	int ret;
};

/* What the threads may put there: a pattern or a page that belongs to the slot */
static bool rt_plausible(unsigned long page, u64 key)
{
	u64 paddr = key & ~(KEY_PRESENT | KEY_WRITE);

	return paddr == PATTERN_A + page % PAGES * SZ_4K ||
	       paddr == PATTERN_B + page % PAGES * SZ_4K ||
	       paddr == USER_PAGE(page) || paddr == USER_PAGE(page + NPAGES);
}

/* Long enough to meet the others, however few processors there are */
static bool rt_go_on(struct rt *rt, unsigned long round)
{
	cond_resched();

	return round < RT_ROUNDS || READ_ONCE(rt->nr_walks) < RT_WALKS;
}

/* Owner of every RT_MUTATORS-th slot, as the region lock would make it */
static int rt_mutate(void *data)
{
	struct rt_thread *t = data;
	struct rt *rt = t->test->priv;
	struct iommu_inval inval;
	struct rnd_state rnd;
	phys_addr_t *paddrs;
	unsigned long round, i;

	/* The stubs of the test act for this thread too. */
	current->kunit_test = t->test;
	prandom_seed_state(&rnd, 77 + t->nr);
	iommu_inval_init(&inval);
	paddrs = kcalloc(PAGES, sizeof(*paddrs), GFP_KERNEL);
	if (!paddrs)
		t->ret = -ENOMEM;

	for (round = 0; rt_go_on(rt, round) && !t->ret; round++) {
		unsigned long slot = t->nr + RT_MUTATORS *
				     (prandom_u32_state(&rnd) % (SLOTS / RT_MUTATORS));
		unsigned long from = prandom_u32_state(&rnd) % PAGES;
		unsigned long n = 1 + prandom_u32_state(&rnd) % (PAGES - from);
		unsigned long page = slot * PAGES + from;
		unsigned long user = round & 1 ? NPAGES : 0;
		u64 want = 0;

		switch (prandom_u32_state(&rnd) % 4) {
		case 0:
			for (i = 0; i < n; i++)
				paddrs[i] = USER_PAGE(page + i + user);
			want = KEY(USER_PAGE(page + user), RW);
			do {
				t->ret = iommu_replace_pages(rt->domain, IOVA(page), n,
							     paddrs, RW, &inval);
				if (t->ret == -EBUSY)
					t->ret = iommu_split(rt->domain, IOVA(page),
							     GFP_KERNEL) ?: -EBUSY;
			} while (t->ret == -EBUSY && ++t->busy);
			break;
		case 1:
			want = KEY(PATTERN_A + from * SZ_4K, IOMMU_READ);
			do {
				t->ret = iommu_replace_fill(rt->domain, IOVA(page),
							    n * SZ_4K, PATTERN_A,
							    IOMMU_READ, &inval);
				if (t->ret == -EBUSY)
					t->ret = iommu_split(rt->domain, IOVA(page),
							     GFP_KERNEL) ?: -EBUSY;
			} while (t->ret == -EBUSY && ++t->busy);
			break;
		case 2:
			want = KEY(PATTERN_B + from * SZ_4K, RW);
			t->ret = iommu_replace_fill(rt->domain, IOVA(slot * PAGES), SZ_2M,
						    PATTERN_B, RW, &inval);
			break;
		case 3:
			want = KEY(PATTERN_A + from * SZ_4K, IOMMU_READ);
			t->ret = iommu_merge_leaves(rt->domain, IOVA(slot * PAGES),
						    PATTERN_A, IOMMU_READ, &inval);
			break;
		}
		iommu_inval_sync(rt->domain, &inval);
		if (rt_key(rt, page) != want)
			t->bad++;
	}
	kfree(paddrs);
	current->kunit_test = NULL;
	/* Ends outside this module, which may go away as soon as all are done */
	kthread_complete_and_exit(&t->done, 0);
}

/* Splits whatever it finds, without any lock */
static int rt_split_all(void *data)
{
	struct rt_thread *t = data;
	struct rt *rt = t->test->priv;
	unsigned long round;

	current->kunit_test = t->test;
	for (round = 0; rt_go_on(rt, round) && !t->ret; round++)
		t->ret = iommu_split(rt->domain, BASE + round % SLOTS * SZ_2M, GFP_KERNEL);
	current->kunit_test = NULL;
	/* Ends outside this module, which may go away as soon as all are done */
	kthread_complete_and_exit(&t->done, 0);
}

/* The hardware: one walk is not interrupted, and a flush waits for its end. */
static int rt_walk(void *data)
{
	struct rt_thread *t = data;
	struct rt *rt = t->test->priv;
	unsigned long page = 0;

	while (!kthread_should_stop()) {
		unsigned long i;

		for (i = 0; i < 64; i++) {
			unsigned long flags;
			u64 key;

			page = (page + 1237) % NPAGES;
			local_irq_save(flags);
			WRITE_ONCE(rt->walking, rt->walking + 1);
			/* The walk is seen to have begun before it reads a table. */
			smp_mb();
			key = rt_key(rt, page);
			/* It is seen to have ended after it read the last one. */
			smp_mb();
			WRITE_ONCE(rt->walking, rt->walking + 1);
			local_irq_restore(flags);
			if (!key || !rt_plausible(page, key))
				t->bad++;
			WRITE_ONCE(rt->nr_walks, rt->nr_walks + 1);
		}
		cond_resched();
	}

	return 0;
}

static void threads_on_their_slots_and_splits_on_all(struct kunit *test)
{
	enum { WALKER = RT_MUTATORS + 1 };
	static int (*const fn[])(void *) = {
		rt_mutate, rt_mutate, rt_split_all, rt_walk,
	};
	struct rt *rt = test->priv;
	struct rt_thread *t;
	int i;

	BUILD_BUG_ON(ARRAY_SIZE(fn) != WALKER + 1);
	t = kunit_kcalloc(test, ARRAY_SIZE(fn), sizeof(*t), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, t);
	rt_map(test);
	rt->drain = true;
	/* Looking on at each store would make the threads take turns. */
	kunit_deactivate_static_stub(test, iommu_live_try_cmpxchg);
	for (i = 0; i < ARRAY_SIZE(fn); i++) {
		t[i].test = test;
		t[i].nr = i;
		init_completion(&t[i].done);
	}
	t[WALKER].task = kthread_run(rt_walk, &t[WALKER], "replace-test/walk");
	KUNIT_ASSERT_FALSE(test, IS_ERR(t[WALKER].task));
	for (i = 0; i < WALKER; i++)
		t[i].task = kthread_run(fn[i], &t[i], "replace-test/%d", i);
	for (i = 0; i < WALKER; i++)
		if (!IS_ERR(t[i].task))
			wait_for_completion(&t[i].done);
	kthread_stop(t[WALKER].task);

	for (i = 0; i < ARRAY_SIZE(fn); i++) {
		KUNIT_EXPECT_FALSE(test, IS_ERR(t[i].task));
		KUNIT_EXPECT_EQ(test, t[i].ret, 0);
		KUNIT_EXPECT_EQ_MSG(test, t[i].bad, 0UL, "thread %d", i);
	}
	KUNIT_EXPECT_GE(test, rt->nr_walks, (unsigned long)RT_WALKS);
	KUNIT_EXPECT_EQ(test, atomic_read(rt_splits(rt)), 0);
	rt->drain = false;
	KUNIT_EXPECT_EQ(test, iommu_unmap(rt->domain, BASE, LEN), LEN);
}

#endif /* __IOMMU_LIVE_TEST_H */
