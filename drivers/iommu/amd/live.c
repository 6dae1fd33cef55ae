// SPDX-License-Identifier: GPL-2.0-only
/*
 * Live replacement in the v1 page tables of AMD's IOMMU.
 *
 * An entry tells the level of the table that it points to, and a leaf level 0: 4KiB and
 * 2MiB leaves look alike, and what tells them from one another is where they are. A
 * large page of another size is several equal entries of level 7; such pages are never
 * made here, and are refused.
 *
 * The table of a domain grows at its top when an address does not fit. The old root
 * becomes a part of the new one, so a walk from either finds the same entries, and
 * hardware sees one 64-bit entry of its device table change, which names root and
 * levels.
 */
#include <linux/bits.h>
#include <linux/iommu.h>
#include <linux/mem_encrypt.h>
#include <linux/seqlock.h>
#include <kunit/visibility.h>
#include <asm/iommu.h>

#include "amd_iommu.h"
#include "../iommu-live.h"

static const struct iommu_live_format amd_v1_format = {
	.present	= IOMMU_PTE_PR,
	.read		= IOMMU_PTE_IR,
	.write		= IOMMU_PTE_IW,
	.kind		= PM_LEVEL_ENC(7),
	.large		= PM_LEVEL_ENC(0),
	.table_step	= PM_LEVEL_ENC(1),
};

static void amd_live_flush_slot(struct iommu_domain *domain, unsigned long iova)
{
	struct iommu_inval inval;

	iommu_inval_init(&inval);
	iommu_inval_add(&inval, iova, SZ_2M, true);
	amd_iommu_flush_inval(to_pdomain(domain), &inval);
}

/* Root and levels change together. */
static void amd_live_root(struct iommu_live *live)
{
	struct amd_io_pgtable *pgtable = &to_pdomain(live->domain)->iop;
	unsigned int seq;

	do {
		seq = read_seqcount_begin(&pgtable->seqcount);
		live->root = pgtable->root;
		live->levels = pgtable->mode;
	} while (read_seqcount_retry(&pgtable->seqcount, seq));
}

static u64 *amd_live_slot_entry(struct iommu_live *live, unsigned long iova, gfp_t gfp)
{
	u64 *entry = amd_iommu_v1_slot_entry(&to_pdomain(live->domain)->iop, iova, gfp);

	amd_live_root(live);

	return entry;
}

static int amd_live(struct iommu_domain *domain, struct iommu_live *live)
{
	struct protection_domain *pdom = to_pdomain(domain);

	if (pdom->pd_mode != PD_MODE_V1 || pdom->iop.mode == PAGE_MODE_NONE)
		return -EOPNOTSUPP;

	*live = (struct iommu_live) {
		.format = &amd_v1_format,
		.addr = __sme_clr(PM_ADDR_MASK),
		.table = __sme_set(IOMMU_PTE_PR | IOMMU_PTE_IR | IOMMU_PTE_IW),
		.splits = &pdom->splits,
		.nid = pdom->iop.pgtbl.cfg.amd.nid,
		.domain = domain,
		.flush_slot = amd_live_flush_slot,
		.slot_entry = amd_live_slot_entry,
	};
	amd_live_root(live);

	return 0;
}

/* All bits of a leaf but its address, as iommu_v1_map_pages() makes them */
static u64 amd_live_attr(int prot)
{
	u64 attr = __sme_set(IOMMU_PTE_PR | IOMMU_PTE_FC);

	if (prot & IOMMU_READ)
		attr |= IOMMU_PTE_IR;
	if (prot & IOMMU_WRITE)
		attr |= IOMMU_PTE_IW;

	return attr;
}

/*
 * A device TLB that does not answer an invalidation is reported by an event, which
 * nobody waits for, and the COMPLETION_WAIT behind it completes.
 */
static bool amd_live_has_devtlb(struct protection_domain *pdom)
{
	struct iommu_dev_data *dev_data;
	unsigned long flags;
	bool has = false;

	spin_lock_irqsave(&pdom->lock, flags);
	list_for_each_entry(dev_data, &pdom->dev_list, list)
		has |= dev_data->ats_enabled;
	spin_unlock_irqrestore(&pdom->lock, flags);

	return has;
}

/*
 * A hypervisor that shadows the tables has to hear of new mappings, so it says that it
 * caches what is not present. It turns the change of a live leaf into an unmap and a
 * map, and a device that accesses the leaf in between gets a fault.
 */
static const char *amd_replace_refusal(struct iommu_domain *domain)
{
	struct protection_domain *pdom = to_pdomain(domain);

	if (pdom->pd_mode != PD_MODE_V1)
		return "live translations change in v1 tables only (boot with amd_iommu=pgtbl_v1)";
	if (amd_iommu_np_cache)
		return "a hypervisor shadows the tables of the IOMMU (NpCache)";
	if (amd_iommu_snp_en)
		return "the IOMMU guards encrypted guests (SNP), under which this was never tried";
	if (amd_live_has_devtlb(pdom))
		return "the device has a TLB that nobody waits for (boot with pci=noats)";
	return NULL;
}

static int amd_replace(struct iommu_domain *domain, unsigned long iova, size_t pgsize,
		       phys_addr_t paddr, int prot, struct iommu_leaf *old,
		       struct iommu_inval *inval)
{
	struct iommu_live live;
	int ret;

	ret = amd_live(domain, &live);
	if (ret)
		return ret;

	return iommu_live_replace(&live, iova, pgsize, paddr, amd_live_attr(prot), old,
				  inval);
}

static int amd_replace_pages(struct iommu_domain *domain, unsigned long iova,
			     unsigned int npages, const phys_addr_t *paddrs, int prot,
			     struct iommu_inval *inval)
{
	struct iommu_live live;
	int ret;

	ret = amd_live(domain, &live);
	if (ret)
		return ret;

	return iommu_live_replace_pages(&live, iova, npages, paddrs, amd_live_attr(prot),
					inval);
}

static int amd_replace_fill(struct iommu_domain *domain, unsigned long iova, size_t len,
			    phys_addr_t paddr, int prot, struct iommu_inval *inval)
{
	struct iommu_live live;
	int ret;

	ret = amd_live(domain, &live);
	if (ret)
		return ret;

	return iommu_live_replace_fill(&live, iova, len, paddr, amd_live_attr(prot), inval);
}

static int amd_split(struct iommu_domain *domain, unsigned long iova, gfp_t gfp)
{
	struct iommu_live live;
	int ret;

	ret = amd_live(domain, &live);
	if (ret)
		return ret;

	return iommu_live_split(&live, iova, gfp);
}

static int amd_merge(struct iommu_domain *domain, unsigned long iova, phys_addr_t paddr,
		     int prot, struct iommu_inval *inval)
{
	struct iommu_live live;
	int ret;

	ret = amd_live(domain, &live);
	if (ret)
		return ret;

	return iommu_live_merge(&live, iova, paddr, amd_live_attr(prot), inval);
}

static int amd_map_fill(struct iommu_domain *domain, unsigned long iova, size_t len,
			phys_addr_t paddr, int prot, gfp_t gfp, size_t *mapped)
{
	struct iommu_inval inval;
	struct iommu_live live;
	int ret;

	ret = amd_live(domain, &live);
	if (ret)
		return ret;
	if (iova + len - 1 > domain->geometry.aperture_end)
		return -ERANGE;

	ret = iommu_live_map_fill(&live, iova, len, paddr, amd_live_attr(prot), gfp, mapped);
	/*
	 * The root may have grown, here or under another caller that still waits with
	 * pdom->lock for its device table entries. Hardware that looked from the old
	 * root, after the flush that came before these, may not keep what it saw.
	 */
	if (*mapped) {
		iommu_inval_init(&inval);
		iommu_inval_add(&inval, iova, *mapped, true);
		amd_iommu_flush_inval(to_pdomain(domain), &inval);
	}

	return ret;
}

static void amd_inval_sync(struct iommu_domain *domain, struct iommu_inval *inval)
{
	amd_iommu_flush_inval(to_pdomain(domain), inval);
}

const struct iommu_replace_ops amd_iommu_replace_ops = {
	.refusal	= amd_replace_refusal,
	.replace	= amd_replace,
	.replace_pages	= amd_replace_pages,
	.replace_fill	= amd_replace_fill,
	.map_fill	= amd_map_fill,
	.split		= amd_split,
	.merge		= amd_merge,
	.inval_sync	= amd_inval_sync,
};
EXPORT_SYMBOL_IF_KUNIT(amd_iommu_replace_ops);
