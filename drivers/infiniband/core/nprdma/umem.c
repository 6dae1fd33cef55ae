// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: umems that drivers register from.
 *
 * Each key of a region is for a part of a window.  np_umem_reg_mr() describes the
 * part by a umem with a scatter list of DMA addresses only, and hands it to the
 * driver's reg_umem_mr().  The block iterators of ib_umem.h look at nothing
 * else.
 *
 * ib_umem_get() never makes such a umem, so no other object of a driver can sit on
 * memory that nobody pins.
 */
#include <linux/sched/mm.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "np_hooks.h"
#include "np_region.h"

/* Largest power of 2 that the length of a scatter list entry can hold */
#define NP_UMEM_SEGMENT		SZ_2G

/**
 * struct np_umem - part of a window, for one key
 * @umem: what the driver sees
 * @region: holds a reference: the windows live as long as a driver may use them
 */
struct np_umem {
	struct ib_umem umem;
	struct np_region *region;
};

/*
 * @start has the offset of @iova in its page.  It only says which part of the
 * owner's memory the umem is for: the driver translates to @iova.
 */
static struct ib_umem *np_umem_make(struct np_region *region, unsigned long start,
				    size_t length, dma_addr_t iova, u32 access)
{
	struct scatterlist *sg;
	struct np_umem *npu;
	struct sg_table *sgt;
	unsigned int i;
	size_t left;

	npu = kzalloc(sizeof(*npu), GFP_KERNEL);
	if (!npu)
		return ERR_PTR(-ENOMEM);
	npu->umem.ibdev = region->npdev->ibdev;
	npu->umem.length = length;
	npu->umem.address = start;
	npu->umem.iova = start;
	npu->umem.writable = ib_access_writable(access);
	npu->umem.is_np = 1;

	left = ALIGN(iova + length, PAGE_SIZE);
	iova = ALIGN_DOWN(iova, PAGE_SIZE);
	left -= iova;
	sgt = &npu->umem.sgt_append.sgt;
	if (sg_alloc_table(sgt, DIV_ROUND_UP(left, NP_UMEM_SEGMENT),
			   GFP_KERNEL)) {
		kfree(npu);
		return ERR_PTR(-ENOMEM);
	}
	for_each_sgtable_dma_sg(sgt, sg, i) {
		sg_dma_address(sg) = iova;
		sg_dma_len(sg) = min_t(size_t, left, NP_UMEM_SEGMENT);
		iova += sg_dma_len(sg);
		left -= sg_dma_len(sg);
	}

	npu->umem.owning_mm = region->mm;
	mmgrab(npu->umem.owning_mm);
	npu->region = region;
	np_region_get(npu->region);
	return &npu->umem;
}

/**
 * np_umem_release() - ib_umem_release() for a umem of a region
 * @umem: umem that no key uses any more
 *
 * Context: process context.
 */
void np_umem_release(struct ib_umem *umem)
{
	struct np_umem *npu = container_of(umem, struct np_umem, umem);

	sg_free_table(&umem->sgt_append.sgt);
	mmdrop(umem->owning_mm);
	np_region_put(npu->region);
	kfree(npu);
}
EXPORT_SYMBOL_GPL(np_umem_release);

/**
 * np_umem_reg_mr() - register a part of a window with the driver
 * @region: region
 * @pd: PD of the key
 * @iova: first address of the part
 * @length: bytes
 * @virt: remote address of @iova under the key, congruent modulo PAGE_SIZE
 * @access: rights of the key
 *
 * Fills in what the driver's dereg_mr() may look at.  Does not count a use of @pd.
 *
 * Context: process context.
 * Return: the MR, -ENOMEM, or what the driver said.
 */
struct ib_mr *np_umem_reg_mr(struct np_region *region, struct ib_pd *pd,
			     dma_addr_t iova, size_t length, u64 virt,
			     u32 access)
{
	struct ib_device *ibdev = pd->device;
	struct ib_umem *umem;
	struct ib_mr *mr;

	umem = np_umem_make(region, ALIGN_DOWN(region->start, PAGE_SIZE) +
			    offset_in_page(iova), length, iova, access);
	if (IS_ERR(umem))
		return ERR_CAST(umem);
	mr = ibdev->ops.reg_umem_mr(pd, umem, virt, access);
	if (IS_ERR(mr))
		return mr;

	mr->device = ibdev;
	mr->pd = pd;
	mr->uobject = NULL;
	mr->type = IB_MR_TYPE_USER;
	mr->dm = NULL;
	mr->sig_attrs = NULL;
	mr->np = NULL;
	mr->iova = virt;
	mr->length = length;
	return mr;
}
