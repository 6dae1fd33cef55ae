/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Live replacement in tables that a device may be walking: what IOMMU drivers share
 * whose tables are radix trees of 512 entries of 64 bits. See iommu-live.c.
 */
#ifndef __IOMMU_LIVE_H
#define __IOMMU_LIVE_H

#include <linux/atomic.h>
#include <linux/iommu.h>
#include <linux/types.h>

/**
 * struct iommu_live_format - what the bits of an entry mean
 * @present: an entry is present if any of these is set
 * @read: devices may read
 * @write: devices may write
 * @kind: these tell leaves from tables. They are 0 in a 4KiB leaf.
 * @large: what they are in a 2MiB leaf
 * @table_step: what they are in an entry of level l that points to a table is
 *              (l - 1) times this; 4KiB leaves are at level 1, 2MiB leaves at level 2
 */
struct iommu_live_format {
	u64 present;
	u64 read;
	u64 write;
	u64 kind;
	u64 large;
	u64 table_step;
};

/**
 * struct iommu_live - the tables of a domain, as long as one call takes
 * @format: what their bits mean
 * @root: the top table
 * @levels: how many levels there are, at least 2
 * @addr: bits of an entry that are the address of a page or table
 * @table: bits of an entry that points to a table, beside address and kind
 * @splits: counts the splits of the domain whose flush has not ended
 * @nid: where to allocate tables
 * @domain: for the calls below
 * @flush_entries: make changed entries visible to hardware that does not snoop caches;
 *                 NULL if it does
 * @flush_slot: invalidate all of the 2MiB at an address, tables included, and drain
 * @slot_entry: the level 2 entry of an address, for iommu_live_map_fill(). Allocates the
 *              tables above it, and may change @root and @levels for that. NULL without memory.
 */
struct iommu_live {
	const struct iommu_live_format *format;
	u64 *root;
	unsigned int levels;
	u64 addr;
	u64 table;
	atomic_t *splits;
	int nid;
	struct iommu_domain *domain;
	void (*flush_entries)(struct iommu_domain *domain, void *first, size_t len);
	void (*flush_slot)(struct iommu_domain *domain, unsigned long iova);
	u64 *(*slot_entry)(struct iommu_live *live, unsigned long iova, gfp_t gfp);
};

int iommu_live_find(const struct iommu_live *live, unsigned long iova,
		    unsigned int level, u64 **entry);
int iommu_live_replace(const struct iommu_live *live, unsigned long iova,
		       size_t pgsize, phys_addr_t paddr, u64 attr,
		       struct iommu_leaf *old, struct iommu_inval *inval);
int iommu_live_replace_pages(const struct iommu_live *live, unsigned long iova,
			     unsigned int npages, const phys_addr_t *paddrs, u64 attr,
			     struct iommu_inval *inval);
int iommu_live_replace_fill(const struct iommu_live *live, unsigned long iova,
			    size_t len, phys_addr_t paddr, u64 attr,
			    struct iommu_inval *inval);
int iommu_live_split(const struct iommu_live *live, unsigned long iova, gfp_t gfp);
int iommu_live_merge(const struct iommu_live *live, unsigned long iova,
		     phys_addr_t paddr, u64 attr, struct iommu_inval *inval);
int iommu_live_map_fill(struct iommu_live *live, unsigned long iova, size_t len,
			phys_addr_t paddr, u64 attr, gfp_t gfp, size_t *mapped);
unsigned long iommu_live_cut(const struct iommu_inval_range *range);

/* For KUnit, which looks on at the one and lets the other fail */
bool iommu_live_try_cmpxchg(u64 *entry, u64 *old, u64 new);
void *iommu_live_alloc_table(int nid, gfp_t gfp);

#endif /* __IOMMU_LIVE_H */
