// SPDX-License-Identifier: GPL-2.0-only
/*
 * Live replacement in tables that a device may be walking.
 *
 * A present entry of a table never becomes not present here: each change is one
 * compare-and-exchange of the whole entry. Hardware that walks the table at the
 * same time finds the old entry or the new one, and both lead to a page.
 *
 * The caller serialises everything on one 2MiB slot, except splits. So there is
 * one entry that may change under our hands, the level 2 entry that turns from a
 * leaf into a table; it is re-read whenever the exchange fails. Nothing but a merge,
 * which is serialised, takes a table away.
 *
 * Between the moment when a split shows its table and the end of its flush, an
 * IOTLB may hold the 2MiB translation still. An invalidation of one 4KiB page need
 * not hit that, as the address mask of an invalidation must be that of the page
 * size. live->splits counts the splits in that state; while there is one, who
 * replaces a 4KiB leaf invalidates the whole slot.
 *
 * A leaf of another size than 4KiB and 2MiB is not ours: it is refused with -EBUSY,
 * and so is a large page that is replicated over several entries (AMD).
 */
#include <linux/bitops.h>
#include <linux/io.h>
#include <linux/iommu.h>
#include <linux/sched/signal.h>
#include <linux/sizes.h>
#include <linux/string.h>
#include <kunit/static_stub.h>
#include <kunit/visibility.h>

#include "iommu-live.h"
#include "iommu-pages.h"

#define LIVE_SHIFT	9
#define LIVE_ENTRIES	BIT(LIVE_SHIFT)
#define LIVE_PAGE_SHIFT	12

/**
 * iommu_live_try_cmpxchg() - the one place where an entry that may be live is changed
 * @entry: the entry
 * @old: what it is thought to be; receives what it was if it was not that
 * @new: what it shall be
 *
 * Context: any. Fully ordered if it succeeds.
 * Return: whether it was changed.
 */
bool iommu_live_try_cmpxchg(u64 *entry, u64 *old, u64 new)
{
	KUNIT_STATIC_STUB_REDIRECT(iommu_live_try_cmpxchg, entry, old, new);

	return try_cmpxchg64(entry, old, new);
}
EXPORT_SYMBOL_IF_KUNIT(iommu_live_try_cmpxchg);

/**
 * iommu_live_alloc_table() - a page of zeroes for a table
 * @nid: preferred node
 * @gfp: how to allocate
 *
 * Context: as @gfp allows.
 * Return: the table or NULL.
 */
void *iommu_live_alloc_table(int nid, gfp_t gfp)
{
	KUNIT_STATIC_STUB_REDIRECT(iommu_live_alloc_table, nid, gfp);

	return iommu_alloc_page_node(nid, gfp);
}
EXPORT_SYMBOL_IF_KUNIT(iommu_live_alloc_table);

static u64 live_exchange(u64 *entry, u64 new)
{
	u64 old = READ_ONCE(*entry);

	while (old != new && !iommu_live_try_cmpxchg(entry, &old, new))
		;

	return old;
}

static bool live_present(const struct iommu_live *live, u64 val)
{
	return val & live->format->present;
}

static bool live_large(const struct iommu_live *live, u64 val)
{
	return (val & live->format->kind) == live->format->large;
}

static bool live_small(const struct iommu_live *live, u64 val)
{
	return !(val & live->format->kind);
}

static bool live_table(const struct iommu_live *live, u64 val, unsigned int level)
{
	return (val & live->format->kind) == (level - 1) * live->format->table_step;
}

static u64 *live_table_of(const struct iommu_live *live, u64 val)
{
	return phys_to_virt(val & live->addr);
}

static unsigned long live_index(u64 pfn, unsigned int level)
{
	return (pfn >> ((level - 1) * LIVE_SHIFT)) % LIVE_ENTRIES;
}

static bool live_first_in_table(const u64 *entry)
{
	return IS_ALIGNED((unsigned long)entry, SZ_4K);
}

static void live_flush_entries(const struct iommu_live *live, void *first, size_t len)
{
	if (live->flush_entries)
		live->flush_entries(live->domain, first, len);
}

/**
 * iommu_live_find() - find the entry of an address without allocating anything
 * @live: the tables
 * @iova: the address
 * @level: 1 for the entry of a 4KiB leaf, 2 for that of a 2MiB leaf
 * @entry: set to the entry
 *
 * Context: any.
 * Return: 0, -ENOENT if there is no table, -EBUSY if there is a larger leaf.
 */
int iommu_live_find(const struct iommu_live *live, unsigned long iova,
		    unsigned int level, u64 **entry)
{
	unsigned int l, bits = LIVE_PAGE_SHIFT + live->levels * LIVE_SHIFT;
	unsigned long pfn = iova >> LIVE_PAGE_SHIFT;
	u64 *table = live->root;

	if (bits < BITS_PER_LONG && iova >> bits)
		return -ENOENT;

	for (l = live->levels; l > level; l--) {
		u64 val = READ_ONCE(table[live_index(pfn, l)]);

		if (!live_present(live, val))
			return -ENOENT;
		if (!live_table(live, val, l))
			return -EBUSY;
		table = live_table_of(live, val);
	}
	*entry = &table[live_index(pfn, level)];

	return 0;
}

static void live_leaf_decode(const struct iommu_live *live, u64 val, size_t pgsize,
			     struct iommu_leaf *leaf)
{
	leaf->paddr = val & live->addr;
	leaf->pgsize = pgsize;
	leaf->prot = 0;
	if (val & live->format->read)
		leaf->prot |= IOMMU_READ;
	if (val & live->format->write)
		leaf->prot |= IOMMU_WRITE;
	/* Domains that track dirty pages do not offer live replacement. */
	leaf->dirty = leaf->prot & IOMMU_WRITE;
}

/* Note that @npages 4KiB leaves from @pfn, within one slot, have changed. */
static void live_inval_leaves(const struct iommu_live *live, unsigned long pfn,
			      unsigned long npages, struct iommu_inval *inval)
{
	/*
	 * The table that the leaves are in was read before the counter is; pairs
	 * with atomic_inc_return() in iommu_live_split().
	 */
	smp_rmb();
	if (atomic_read(live->splits))
		iommu_inval_add(inval, ALIGN_DOWN(pfn, LIVE_ENTRIES) << LIVE_PAGE_SHIFT,
				SZ_2M, true);
	else
		iommu_inval_add(inval, pfn << LIVE_PAGE_SHIFT,
				npages << LIVE_PAGE_SHIFT, false);
}

/**
 * iommu_live_replace() - iommu_replace() for a driver
 * @live: the tables
 * @iova: see iommu_replace()
 * @pgsize: see iommu_replace()
 * @paddr: see iommu_replace()
 * @attr: bits of the leaf beside its address and size
 * @old: see iommu_replace()
 * @inval: see iommu_replace()
 *
 * Context: as iommu_replace().
 * Return: as iommu_replace().
 */
int iommu_live_replace(const struct iommu_live *live, unsigned long iova,
		       size_t pgsize, phys_addr_t paddr, u64 attr,
		       struct iommu_leaf *old, struct iommu_inval *inval)
{
	bool large = pgsize == SZ_2M;
	u64 *entry, val, new;
	int ret;

	ret = iommu_live_find(live, iova, large ? 2 : 1, &entry);
	if (ret)
		return ret;

	new = paddr | attr | (large ? live->format->large : 0);
	val = READ_ONCE(*entry);
	do {
		if (!live_present(live, val))
			return -ENOENT;
		if (large ? !live_large(live, val) : !live_small(live, val))
			return -EBUSY;
		if (val == new)
			break;
	} while (!iommu_live_try_cmpxchg(entry, &val, new));

	if (val != new) {
		live_flush_entries(live, entry, sizeof(*entry));
		if (large)
			iommu_inval_add(inval, iova, SZ_2M, false);
		else
			live_inval_leaves(live, iova >> LIVE_PAGE_SHIFT, 1, inval);
	}
	if (old)
		live_leaf_decode(live, val, pgsize, old);

	return 0;
}

/* Is there a 4KiB leaf that may be replaced? */
static int live_check_leaf(const struct iommu_live *live, u64 val)
{
	if (!live_present(live, val))
		return -ENOENT;
	if (!live_small(live, val))
		return -EBUSY;

	return 0;
}

/* Could iommu_live_replace_pages() change these leaves of one slot? */
static int live_check_pages(const struct iommu_live *live, unsigned long pfn,
			    unsigned long npages, const phys_addr_t *paddrs)
{
	u64 *leaves = NULL;
	unsigned long i;
	int ret;

	for (i = 0; i < npages; i++) {
		if (paddrs[i] == IOMMU_LEAF_KEEP)
			continue;
		if (!IS_ALIGNED(paddrs[i], SZ_4K))
			return -EINVAL;
		if (!leaves) {
			ret = iommu_live_find(live, pfn << LIVE_PAGE_SHIFT, 1, &leaves);
			if (ret)
				return ret;
		}
		ret = live_check_leaf(live, READ_ONCE(leaves[i]));
		if (ret)
			return ret;
	}

	return 0;
}

/* Point leaves of one slot at @paddrs, or where that is NULL at @paddr and on. */
static void live_replace_leaves(const struct iommu_live *live, u64 *leaves,
				unsigned long pfn, unsigned long npages,
				const phys_addr_t *paddrs, phys_addr_t paddr, u64 attr,
				struct iommu_inval *inval)
{
	unsigned long i, run = 0;

	/* One round more, to end the last run of changed leaves */
	for (i = 0; i <= npages; i++) {
		if (i < npages && !(paddrs && paddrs[i] == IOMMU_LEAF_KEEP)) {
			u64 new = attr | (paddrs ? paddrs[i] :
						   paddr + (i << LIVE_PAGE_SHIFT));

			if (live_exchange(&leaves[i], new) != new) {
				run++;
				continue;
			}
		}
		if (run) {
			live_flush_entries(live, &leaves[i - run], run * sizeof(*leaves));
			live_inval_leaves(live, pfn + i - run, run, inval);
			run = 0;
		}
	}
}

/**
 * iommu_live_replace_pages() - iommu_replace_pages() for a driver
 * @live: the tables
 * @iova: see iommu_replace_pages()
 * @npages: see iommu_replace_pages()
 * @paddrs: see iommu_replace_pages()
 * @attr: bits of the leaves beside their address
 * @inval: see iommu_replace_pages()
 *
 * Context: as iommu_replace_pages().
 * Return: as iommu_replace_pages().
 */
int iommu_live_replace_pages(const struct iommu_live *live, unsigned long iova,
			     unsigned int npages, const phys_addr_t *paddrs, u64 attr,
			     struct iommu_inval *inval)
{
	unsigned long pfn = iova >> LIVE_PAGE_SHIFT;
	unsigned long i, n;
	int ret;

	/* All or nothing: what is present now stays so, see above. */
	for (i = 0; i < npages; i += n) {
		n = min(npages - i, LIVE_ENTRIES - (pfn + i) % LIVE_ENTRIES);
		ret = live_check_pages(live, pfn + i, n, &paddrs[i]);
		if (ret)
			return ret;
	}

	for (i = 0; i < npages; i += n) {
		u64 *leaves;

		n = min(npages - i, LIVE_ENTRIES - (pfn + i) % LIVE_ENTRIES);
		/* Fails only for slots where every leaf is kept */
		if (!iommu_live_find(live, (pfn + i) << LIVE_PAGE_SHIFT, 1, &leaves))
			live_replace_leaves(live, leaves, pfn + i, n, &paddrs[i], 0, attr,
					    inval);
	}

	return 0;
}

/*
 * Walk the slots of [iova, iova + len): check first, with @inval == NULL, then
 * change. Level 2 entries of one table are neighbours, so a range of many large
 * leaves is a linear walk.
 */
static int live_fill_slots(const struct iommu_live *live, unsigned long iova, size_t len,
			   phys_addr_t paddr, u64 attr, struct iommu_inval *inval)
{
	u64 leaf = paddr | attr | live->format->large;
	unsigned long pfn = iova >> LIVE_PAGE_SHIFT;
	unsigned long npages = len >> LIVE_PAGE_SHIFT;
	unsigned long i, n, j, offset;
	u64 *entry = NULL, *leaves;
	u64 val;
	int ret;

	for (i = 0; i < npages; i += n, entry++) {
		offset = (pfn + i) % LIVE_ENTRIES;
		n = min(npages - i, LIVE_ENTRIES - offset);

		if (!entry || live_first_in_table(entry)) {
			ret = iommu_live_find(live, (pfn + i) << LIVE_PAGE_SHIFT, 2, &entry);
			if (ret)
				return ret;
		}

		val = READ_ONCE(*entry);
		if (inval) {
			while (live_large(live, val) && val != leaf &&
			       !iommu_live_try_cmpxchg(entry, &val, leaf))
				;
			if (live_large(live, val)) {
				if (val == leaf)
					continue;
				live_flush_entries(live, entry, sizeof(*entry));
				iommu_inval_add(inval, (pfn + i) << LIVE_PAGE_SHIFT,
						SZ_2M, false);
				continue;
			}
		} else {
			if (!live_present(live, val))
				return -ENOENT;
			if (live_large(live, val)) {
				if (n < LIVE_ENTRIES && val != leaf)
					return -EBUSY;
				continue;
			}
			if (!live_table(live, val, 2))
				return -EBUSY;
		}

		leaves = live_table_of(live, val) + offset;
		if (inval) {
			live_replace_leaves(live, leaves, pfn + i, n, NULL,
					    paddr + (offset << LIVE_PAGE_SHIFT), attr,
					    inval);
			continue;
		}
		for (j = 0; j < n; j++) {
			ret = live_check_leaf(live, READ_ONCE(leaves[j]));
			if (ret)
				return ret;
		}
	}

	return 0;
}

/**
 * iommu_live_replace_fill() - iommu_replace_fill() for a driver
 * @live: the tables
 * @iova: see iommu_replace_fill()
 * @len: see iommu_replace_fill()
 * @paddr: see iommu_replace_fill()
 * @attr: bits of the leaves beside their address and size
 * @inval: see iommu_replace_fill()
 *
 * Context: as iommu_replace_fill().
 * Return: as iommu_replace_fill().
 */
int iommu_live_replace_fill(const struct iommu_live *live, unsigned long iova, size_t len,
			    phys_addr_t paddr, u64 attr, struct iommu_inval *inval)
{
	int ret;

	ret = live_fill_slots(live, iova, len, paddr, attr, NULL);
	if (ret)
		return ret;

	return live_fill_slots(live, iova, len, paddr, attr, inval);
}

/**
 * iommu_live_split() - iommu_split() for a driver
 * @live: the tables
 * @iova: see iommu_split(), aligned to 2MiB
 * @gfp: see iommu_split()
 *
 * Context: as iommu_split().
 * Return: as iommu_split().
 */
int iommu_live_split(const struct iommu_live *live, unsigned long iova, gfp_t gfp)
{
	u64 *entry, *table;
	u64 old, new;
	int ret, i;

	ret = iommu_live_find(live, iova, 2, &entry);
	if (ret)
		return ret;

	old = READ_ONCE(*entry);
	if (!live_present(live, old))
		return -ENOENT;
	if (live_table(live, old, 2))
		return 0;
	if (!live_large(live, old))
		return -EBUSY;

	table = iommu_live_alloc_table(live->nid, gfp);
	if (!table)
		return -ENOMEM;

	new = virt_to_phys(table) | live->table | live->format->table_step;

	/*
	 * Counted before the table can be seen, and until no 2MiB translation can
	 * be cached; pairs with smp_rmb() in live_inval_leaves().
	 */
	atomic_inc_return(live->splits);
	do {
		if (!live_large(live, old)) {
			/* Somebody else was faster. The slot is never unmapped. */
			atomic_dec(live->splits);
			iommu_free_page(table);
			return 0;
		}
		for (i = 0; i < LIVE_ENTRIES; i++)
			table[i] = (old & ~live->format->kind) +
				   ((u64)i << LIVE_PAGE_SHIFT);
		live_flush_entries(live, table, SZ_4K);
	} while (!iommu_live_try_cmpxchg(entry, &old, new));

	live_flush_entries(live, entry, sizeof(*entry));
	live->flush_slot(live->domain, iova);
	atomic_dec_return(live->splits);

	return 0;
}

/**
 * iommu_live_merge() - iommu_merge_leaves() for a driver
 * @live: the tables
 * @iova: see iommu_merge_leaves()
 * @paddr: see iommu_merge_leaves()
 * @attr: bits of the leaf beside its address and size
 * @inval: see iommu_merge_leaves()
 *
 * Context: as iommu_merge_leaves().
 * Return: as iommu_merge_leaves().
 */
int iommu_live_merge(const struct iommu_live *live, unsigned long iova,
		     phys_addr_t paddr, u64 attr, struct iommu_inval *inval)
{
	u64 *entry, old, new;
	int ret;

	ret = iommu_live_find(live, iova, 2, &entry);
	if (ret)
		return ret;
	old = READ_ONCE(*entry);
	if (!live_present(live, old))
		return -ENOENT;
	if (!live_large(live, old) && !live_table(live, old, 2))
		return -EBUSY;

	new = paddr | attr | live->format->large;
	old = live_exchange(entry, new);
	if (old == new)
		return 0;

	live_flush_entries(live, entry, sizeof(*entry));
	if (!live_large(live, old)) {
		struct page *table = virt_to_page(live_table_of(live, old));

		/* Hardware may be walking it, so it lives until the flush. */
		list_add_tail(&table->lru, &inval->freelist);
		iommu_inval_add(inval, iova, SZ_2M, true);
	} else {
		iommu_inval_add(inval, iova, SZ_2M, false);
	}

	return 0;
}

/*
 * Make room for a 2MiB leaf in a slot where nothing is mapped. Mappings that are
 * gone may have left their table behind, which hardware may have cached.
 */
static int live_unlink_empty_table(const struct iommu_live *live, u64 *entry,
				   unsigned long iova, struct iommu_inval *inval)
{
	u64 val = READ_ONCE(*entry);
	u64 *table;

	if (!live_table(live, val, 2))
		return -EEXIST;
	table = live_table_of(live, val);
	if (memchr_inv(table, 0, LIVE_ENTRIES * sizeof(*table)))
		return -EEXIST;

	WRITE_ONCE(*entry, 0);
	live_flush_entries(live, entry, sizeof(*entry));
	list_add_tail(&virt_to_page(table)->lru, &inval->freelist);
	iommu_inval_add(inval, iova, SZ_2M, true);

	return 0;
}

/**
 * iommu_live_map_fill() - iommu_map_fill() for a driver
 * @live: the tables
 * @iova: see iommu_map_fill(), within what the domain can address
 * @len: see iommu_map_fill()
 * @paddr: see iommu_map_fill()
 * @attr: bits of the leaves beside their address and size
 * @gfp: see iommu_map_fill()
 * @mapped: set to the number of bytes from @iova that are mapped, also on error
 *
 * Context: as iommu_map_fill().
 * Return: as iommu_map_fill().
 */
int iommu_live_map_fill(struct iommu_live *live, unsigned long iova, size_t len,
			phys_addr_t paddr, u64 attr, gfp_t gfp, size_t *mapped)
{
	u64 leaf = paddr | attr | live->format->large;
	struct iommu_inval inval;
	size_t done = 0;
	int ret = 0;

	iommu_inval_init(&inval);
	while (done < len && !ret) {
		u64 *first, *entry;

		/* One round is a GiB, and the caller may map terabytes */
		if (gfpflags_allow_blocking(gfp)) {
			cond_resched();
			if (fatal_signal_pending(current)) {
				ret = -EINTR;
				break;
			}
		}

		/* Drivers would take a larger leaf for a table, or replace it by one. */
		if (iommu_live_find(live, iova + done, 2, &first) == -EBUSY) {
			ret = -EEXIST;
			break;
		}
		first = live->slot_entry(live, iova + done, gfp);
		if (!first) {
			ret = -ENOMEM;
			break;
		}

		entry = first;
		do {
			if (live_present(live, READ_ONCE(*entry))) {
				ret = live_unlink_empty_table(live, entry, iova + done,
							      &inval);
				if (ret)
					break;
			}
			WRITE_ONCE(*entry, leaf);
			done += SZ_2M;
		} while (!live_first_in_table(++entry) && done < len);

		live_flush_entries(live, first, (void *)entry - (void *)first);
	}
	*mapped = done;
	if (inval.nr_ranges)
		iommu_inval_sync(live->domain, &inval);

	return ret;
}

/**
 * iommu_live_cut() - where to cut a range that hardware would flush too much for
 * @range: what shall be flushed
 *
 * Hardware flushes aligned blocks whose size is a power of two. The smallest one that
 * covers a range may be many times as large: 2GiB for two pages around a 1GiB boundary.
 * If it is twice the range or more, cut the range at the coarsest boundary within. The
 * two blocks that end and begin there cover less than twice the range. A range that is
 * one large page is a block by itself, so it is flushed with the size that large pages
 * need.
 *
 * Context: any.
 * Return: the address where the second part begins, or 0 if one block will do.
 */
unsigned long iommu_live_cut(const struct iommu_inval_range *range)
{
	unsigned long first = range->start >> LIVE_PAGE_SHIFT;
	unsigned long last = range->last >> LIVE_PAGE_SHIFT;

	if (BIT(fls_long(first ^ last)) / 2 < last - first + 1)
		return 0;

	return (last & (~0UL << __fls(first ^ last))) << LIVE_PAGE_SHIFT;
}
