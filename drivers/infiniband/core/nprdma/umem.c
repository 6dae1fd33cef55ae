// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: umems that drivers register from.
 *
 * A driver's reg_user_mr() calls ib_umem_get(), which knows the address, the size
 * and the access flags of a registration, but not which window of which region is
 * meant.  So np_umem_reg_mr() notes that for the current task before it calls the
 * driver, and np_umem_get() looks it up.  A call with IB_ACCESS_UNPINNED from
 * elsewhere finds nothing and is refused: no other object of a driver can sit on
 * memory that nobody pins.
 *
 * The umem has a scatter list of DMA addresses only; the block iterators of
 * ib_umem.h look at nothing else.
 */
#include <linux/sched/mm.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

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

/**
 * struct np_umem_request - a registration that is just being made by a task
 * @node: in np_umem_requests
 * @task: who makes it
 * @region: the region
 * @start: the address that the driver was given as start
 * @length: bytes
 * @iova: what the driver shall translate to, congruent to @start modulo PAGE_SIZE
 * @taken: np_umem_get() has made the umem
 */
struct np_umem_request {
	struct list_head node;
	struct task_struct *task;
	struct np_region *region;
	unsigned long start;
	size_t length;
	dma_addr_t iova;
	bool taken;
};

static LIST_HEAD(np_umem_requests);
static DEFINE_SPINLOCK(np_umem_lock);

static struct np_umem_request *np_umem_request_take(struct ib_device *ibdev,
						    unsigned long start,
						    size_t length)
{
	struct np_umem_request *req, *found = NULL;

	spin_lock(&np_umem_lock);
	list_for_each_entry(req, &np_umem_requests, node) {
		if (req->task == current && !req->taken &&
		    req->region->npdev->ibdev == ibdev &&
		    req->start == start && req->length == length) {
			req->taken = true;
			found = req;
			break;
		}
	}
	spin_unlock(&np_umem_lock);
	return found;
}

/**
 * np_umem_get() - ib_umem_get() for IB_ACCESS_UNPINNED
 * @ibdev: device
 * @addr: what the driver was given as start
 * @size: bytes
 * @access: IB_ACCESS_*
 *
 * Context: called by drivers in the task that called np_umem_reg_mr().
 * Return: the umem, -EOPNOTSUPP for any other object than a key of a region, or
 * -ENOMEM.
 */
struct ib_umem *np_umem_get(struct ib_device *ibdev, unsigned long addr,
			    size_t size, int access)
{
	struct np_umem_request *req;
	struct scatterlist *sg;
	struct np_umem *npu;
	struct sg_table *sgt;
	dma_addr_t iova;
	unsigned int i;
	size_t left;

	req = np_umem_request_take(ibdev, addr, size);
	if (!req) {
		dev_warn_ratelimited(&ibdev->dev,
				     "unpinned memory refused: only memory regions can do without pinning\n");
		return ERR_PTR(-EOPNOTSUPP);
	}

	npu = kzalloc(sizeof(*npu), GFP_KERNEL);
	if (!npu)
		return ERR_PTR(-ENOMEM);
	npu->umem.ibdev = ibdev;
	npu->umem.length = size;
	npu->umem.address = addr;
	npu->umem.iova = addr;
	npu->umem.writable = ib_access_writable(access);
	npu->umem.is_np = 1;

	iova = ALIGN_DOWN(req->iova, PAGE_SIZE);
	left = ALIGN(req->iova + size, PAGE_SIZE) - iova;
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

	npu->umem.owning_mm = req->region->mm;
	mmgrab(npu->umem.owning_mm);
	npu->region = req->region;
	np_region_get(npu->region);
	return &npu->umem;
}
EXPORT_SYMBOL_GPL(np_umem_get);

/**
 * np_umem_release() - ib_umem_release() for a umem of np_umem_get()
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
 * @udata: of the caller, NULL if no request of user space is at hand
 *
 * Fills in what the driver's dereg_mr() may look at.  Does not count a use of @pd.
 *
 * Context: process context.
 * Return: the MR, or what the driver said.
 */
struct ib_mr *np_umem_reg_mr(struct np_region *region, struct ib_pd *pd,
			     dma_addr_t iova, size_t length, u64 virt,
			     u32 access, struct ib_udata *udata)
{
	struct np_umem_request req = {
		.task = current,
		.region = region,
		.start = ALIGN_DOWN(region->start, PAGE_SIZE) +
			 offset_in_page(iova),
		.length = length,
		.iova = iova,
	};
	struct ib_device *ibdev = pd->device;
	struct ib_mr *mr;

	spin_lock(&np_umem_lock);
	list_add(&req.node, &np_umem_requests);
	spin_unlock(&np_umem_lock);

	mr = ibdev->ops.reg_user_mr(pd, req.start, length, virt,
				    access | IB_ACCESS_UNPINNED, udata);

	spin_lock(&np_umem_lock);
	list_del(&req.node);
	spin_unlock(&np_umem_lock);

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

	if (!req.taken) {
		ibdev->ops.dereg_mr(mr, udata);
		dev_warn_ratelimited(&ibdev->dev,
				     "unpinned memory region refused: the driver does not register from a umem\n");
		return ERR_PTR(-EOPNOTSUPP);
	}
	return mr;
}
