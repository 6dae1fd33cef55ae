// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: registration, and what else the core calls for the sake of regions.
 */
#include <kunit/visibility.h>
#include <linux/overflow.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "../core_priv.h"
#include "np_hooks.h"
#include "np_region.h"

/*
 * Keys that are tried for a name. NP_PROMISE_MAX * 2 of the NP_PROMISE_BITS that they hash to
 * may be taken, which is one of eight.
 */
#define NP_NAME_TRIES		(4 * NP_PROMISE_MAX)

static int np_refuse_access(struct ib_device *ibdev, u32 access)
{
	static const struct {
		u32 flag;
		const char *why;
	} refused[] = {
		{ IB_ACCESS_ON_DEMAND,
		  "the device cannot page on demand as well; ask for one of them" },
		{ IB_ACCESS_MW_BIND,
		  "memory windows cannot be bound to it; register without MW_BIND" },
		{ IB_ZERO_BASED,
		  "zero-based addresses are not supported; pass an IOVA of 0 instead" },
		{ IB_ACCESS_HUGETLB,
		  "HUGETLB promises pages that stay; register without it" },
		{ IB_ACCESS_FLUSH_GLOBAL | IB_ACCESS_FLUSH_PERSISTENT,
		  "FLUSH cannot be proven; register without the flush rights" },
	};
	int i;

	for (i = 0; i < ARRAY_SIZE(refused); i++) {
		if (!(access & refused[i].flag))
			continue;
		np_refuse(ibdev, "unpinned memory region refused: %s", refused[i].why);
		return -EOPNOTSUPP;
	}
	return access & ~(NP_ACCESS_RIGHTS | IB_ACCESS_UNPINNED) ? -EINVAL : 0;
}

/* Is it the whole address space? As drivers that page on demand are told it */
static bool np_reg_is_whole(u64 start, u64 length)
{
	return !start && length == U64_MAX;
}

/**
 * np_reg_check() - can this be an unpinned region of the device?
 * @ibdev: device
 * @start: first va
 * @length: bytes
 * @hca_va: remote address of @start
 * @access: IB_ACCESS_*, with IB_ACCESS_UNPINNED, without IB_ACCESS_OPTIONAL
 *
 * What a pinned registration would refuse for its arguments gets the same error.
 *
 * Return: 0 or an error.
 */
int np_reg_check(struct ib_device *ibdev, u64 start, u64 length, u64 hca_va,
		 u32 access)
{
	u64 end;
	int ret;

	ret = np_refuse_access(ibdev, access);
	if (ret)
		return ret;
	ret = ib_check_mr_access(ibdev, access & ~IB_ACCESS_UNPINNED);
	if (ret)
		return ret;
	/* Its remote addresses are those of the owner */
	if (np_reg_is_whole(start, length))
		return hca_va ? -EINVAL : 0;
	if (!length || check_add_overflow(start, length, &end) ||
	    PAGE_ALIGN(end) < end || check_add_overflow(hca_va, length - 1, &end))
		return -EINVAL;
	if (offset_in_page(start) != offset_in_page(hca_va))
		return -EINVAL;
	if (!access_ok((void __user *)(unsigned long)start, length))
		return -EFAULT;
	return 0;
}
EXPORT_SYMBOL_IF_KUNIT(np_reg_check);

/* False: the driver could not destroy it, and may use its umem for good */
static bool np_region_free_name(struct np_region *region, struct ib_mr *mr)
{
	if (!mr->device->ops.dereg_mr(mr, NULL))
		return true;
	mutex_lock(&region->lock);
	region->leaks = true;
	mutex_unlock(&region->lock);
	return false;
}

/* Keep a key that will not do from being made again; meanwhile the owner pays for it */
static int np_region_keep_unfit(struct np_region *region, struct xarray *all,
				unsigned long n, struct ib_mr *mr)
{
	struct ib_device *ibdev = mr->device;
	int ret;

	ret = ib_rdmacg_try_charge_to(&region->cg, ibdev,
				      RDMACG_RESOURCE_HCA_OBJECT);
	if (ret)
		return ret;
	ret = xa_err(xa_store(all, n, mr, GFP_KERNEL));
	if (ret)
		ib_rdmacg_uncharge(&region->cg, ibdev,
				   RDMACG_RESOURCE_HCA_OBJECT);
	return ret;
}

/*
 * The public key. One of which peers were told that it is no region's will not do, nor
 * one of a region that is just ending: then the driver makes others, until one will do.
 * There are fewer such keys than tries. Those that will not do are freed at the end, or
 * the driver would make them again.
 */
VISIBLE_IF_KUNIT struct ib_mr *np_region_make_name(struct np_region *region,
						   struct ib_pd *public_pd)
{
	struct ib_mr *mr, *unfit;
	unsigned long n, i;
	struct xarray all;
	int ret;

	xa_init(&all);
	for (n = 0; ; n++) {
		/* A name needs no translation: one page whatever the region's length */
		mr = np_umem_reg_mr(region, public_pd, region->read.iova,
				    PAGE_SIZE, ALIGN_DOWN(region->base, PAGE_SIZE),
				    0);
		if (IS_ERR(mr))
			break;
		mr->np = region;
		region->public_rkey = mr->rkey;
		ret = np_name_take(region->npdev, mr->rkey, region);
		if (!ret)
			break;
		if (ret == -EADDRINUSE && n == NP_NAME_TRIES)
			ret = -EBUSY;
		if (ret == -EADDRINUSE && fatal_signal_pending(current))
			ret = -EINTR;
		if (ret == -EADDRINUSE)
			ret = np_region_keep_unfit(region, &all, n, mr);
		if (ret) {
			np_region_free_name(region, mr);
			mr = ERR_PTR(ret);
			break;
		}
		cond_resched();
	}
	xa_for_each(&all, i, unfit)
		if (np_region_free_name(region, unfit))
			ib_rdmacg_uncharge(&region->cg, public_pd->device,
					   RDMACG_RESOURCE_HCA_OBJECT);
	xa_destroy(&all);
	return mr;
}
EXPORT_SYMBOL_IF_KUNIT(np_region_make_name);

/**
 * np_reg_user_mr() - register an unpinned region
 * @pd: the application's PD
 * @start: first va
 * @length: bytes; U64_MAX, with @start 0: the whole address space, see part.c
 * @hca_va: remote address of @start
 * @access: IB_ACCESS_*, with IB_ACCESS_UNPINNED, unchecked
 *
 * The caller fills in what it fills in for a pinned MR: pd, uobject, iova, length.
 *
 * Context: a uverbs request of the owner.
 * Return: the public MR, or an error.
 */
struct ib_mr *np_reg_user_mr(struct ib_pd *pd, u64 start, u64 length,
			     u64 hca_va, u32 access)
{
	struct ib_device *ibdev = pd->device;
	struct iommu_domain *domain;
	struct np_device *npdev;
	struct np_region *region;
	struct ib_pd *public_pd;
	struct ib_mr *mr;
	size_t size;
	bool whole;
	int ret;

	/*
	 * Leave to do something, as RELAXED_ORDERING is, that need not be used. No key
	 * may: a READ of the words could overtake the WRITE that it proves.
	 */
	access &= ~IB_ACCESS_OPTIONAL;
	ret = np_reg_check(ibdev, start, length, hca_va, access);
	if (ret)
		return ERR_PTR(ret);
	domain = np_device_domain(ibdev);
	if (IS_ERR(domain))
		return ERR_CAST(domain);
	npdev = np_device_get(ibdev);
	if (!npdev)
		return ERR_PTR(-ENODEV);
	public_pd = np_device_pd(npdev);
	if (IS_ERR(public_pd)) {
		ret = PTR_ERR(public_pd);
		goto put;
	}

	/* The public MR is of a page, whatever it is a name of */
	whole = np_reg_is_whole(start, length);
	if (whole)
		length = PAGE_SIZE;
	size = np_window_size(start, length, true);
	if (access & IB_ACCESS_LOCAL_WRITE)
		size += np_window_size(start, length, false);
	ret = np_device_take_iova(ibdev, domain, size, true);
	if (ret)
		goto put;

	region = np_region_create(npdev, pd, ibdev->dma_device, domain, start,
				  length, hca_va, access);
	if (IS_ERR(region)) {
		ret = PTR_ERR(region);
		np_device_give_iova(domain, size);
		goto put;
	}
	region->iova_size = size;

	ret = whole ? np_parts_begin(region) : 0;
	mr = ret ? ERR_PTR(ret) : np_region_make_name(region, public_pd);
	if (IS_ERR(mr)) {
		np_region_close(region);
		np_region_put(region);
	}
	return mr;

put:
	np_device_put(npdev);
	return ERR_PTR(ret);
}
EXPORT_SYMBOL_GPL(np_reg_user_mr);

/**
 * np_rereg_check() - may this MR be re-registered this way?
 * @mr: MR
 * @flags: IB_MR_REREG_*
 * @access: new access flags, if @flags say so
 *
 * Return: 0, or -EOPNOTSUPP: neither of an unpinned region nor to one.
 */
int np_rereg_check(struct ib_mr *mr, int flags, u32 access)
{
	if (!mr->np &&
	    !(flags & IB_MR_REREG_ACCESS && access & IB_ACCESS_UNPINNED))
		return 0;
	np_refuse(mr->device,
		  "re-registration refused: an unpinned memory region cannot change, and none can become one; deregister and register");
	return -EOPNOTSUPP;
}
EXPORT_SYMBOL_GPL(np_rereg_check);

static int np_advise_sge(struct ib_pd *pd, struct np_region *region,
			 unsigned int fault_flags, const struct ib_sge *sge)
{
	u64 addr = sge->addr, left, length;
	struct np_region *part;
	int ret = 0;

	if (region->pd != pd)
		return -EPERM;
	for (left = sge->length; left && !ret; left -= length, addr += length) {
		length = left;
		if (region->parts)
			length = min(left, NP_PART_SIZE - addr % NP_PART_SIZE);
		part = np_part_get(region, addr);
		if (!IS_ERR(part)) {
			ret = np_region_fault(part, addr, length,
					      fault_flags | NP_FAULT_LOCAL, NULL, NULL, 0);
			np_region_put(part);
		} else if (PTR_ERR(part) != -EFAULT || !(fault_flags & NP_FAULT_PRESENT)) {
			ret = PTR_ERR(part);
		}
	}
	/* As drivers that page on demand call it */
	return ret == -ERANGE ? -EFAULT : ret;
}

/**
 * np_advise_mr() - prefetch parts of unpinned regions
 * @pd: PD that the regions must belong to
 * @advice: enum ib_uverbs_advise_mr_advice
 * @flags: IB_UVERBS_ADVISE_MR_FLAG_FLUSH, which changes nothing: it is done when
 *	this returns
 * @sg_list: what to prefetch
 * @num_sge: its length
 * @ours: set to whether the first entry is of an unpinned region; otherwise nothing
 *	was done
 *
 * Context: a uverbs request.
 * Return: 0; -EINVAL for a list that mixes pinned and unpinned regions; -EFAULT outside of the
 * region; what np_region_fault() says.
 */
int np_advise_mr(struct ib_pd *pd, u32 advice, u32 flags,
		 struct ib_sge *sg_list, u32 num_sge, bool *ours)
{
	unsigned int fault_flags = 0;
	struct np_region *region;
	bool known = true;
	u32 i;
	int ret;

	*ours = false;
	switch (advice) {
	case IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH:
		break;
	case IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE:
		fault_flags = RDMA_NP_FAULT_WRITE;
		break;
	case IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT:
		fault_flags = NP_FAULT_PRESENT;
		break;
	default:
		known = false;
	}
	for (i = 0; i < num_sge; i++) {
		region = np_region_find_rkey(pd->device, sg_list[i].lkey);
		if (!region)
			return i ? -EINVAL : 0;
		*ours = true;
		ret = known ? np_advise_sge(pd, region, fault_flags,
					    &sg_list[i]) : -EOPNOTSUPP;
		np_region_put(region);
		if (ret)
			return ret;
	}
	return 0;
}
EXPORT_SYMBOL_GPL(np_advise_mr);

/* From now on nobody finds the region by its public key; or somebody does again */
static void np_region_set_ending(struct np_region *region, bool ending)
{
	xa_lock(&region->npdev->rkeys);
	region->ending = ending;
	xa_unlock(&region->npdev->rkeys);
}

/**
 * np_mr_dereg_begin() - the public MR is about to be destroyed
 * @mr: public MR
 *
 * The driver may give the key's value to somebody else before it returns, or say that
 * the MR stays. So nobody finds the region by it any more, but no other region gets it,
 * and no peer is promised that it is none's.
 */
void np_mr_dereg_begin(struct ib_mr *mr)
{
	struct np_region *region = mr->np;

	if (region)
		np_region_set_ending(region, true);
}
EXPORT_SYMBOL_IF_KUNIT(np_mr_dereg_begin);

/**
 * np_mr_dereg_end() - the driver has destroyed the public MR, or has not
 * @region: what mr->np was
 * @mr: public MR; valid only if @ret says that it exists
 * @ret: what the driver said
 */
void np_mr_dereg_end(struct np_region *region, struct ib_mr *mr, int ret)
{
	if (!region)
		return;
	if (ret) {
		/* As before; a later try may succeed, or np_client_remove() finds it */
		np_region_set_ending(region, false);
		return;
	}
	xa_erase(&region->npdev->rkeys, region->public_rkey);
	np_region_close(region);
	np_region_put(region);
}
EXPORT_SYMBOL_IF_KUNIT(np_mr_dereg_end);

/**
 * np_device_enable() - an RDMA device comes
 * @ibdev: device; has no clients yet
 *
 * A device for which there is no memory has no unpinned regions.
 *
 * Context: process context.
 */
void np_device_enable(struct ib_device *ibdev)
{
	struct np_device *npdev;
	const char *reason;

	/*
	 * Devices come when memory is young, the first region perhaps when it is
	 * fragmented, and has no 2 MiB in one piece. What does not succeed now is
	 * tried again then.
	 */
	if (!IS_ERR(np_find_domain(ibdev, &reason)))
		np_host_pages();

	npdev = kzalloc(sizeof(*npdev), GFP_KERNEL);
	if (!npdev)
		return;
	npdev->ibdev = ibdev;
	mutex_init(&npdev->lock);
	xa_init(&npdev->rkeys);
	INIT_LIST_HEAD(&npdev->regions);
	refcount_set(&npdev->users, 1);
	init_completion(&npdev->idle);
	WRITE_ONCE(ibdev->np, npdev);
}
EXPORT_SYMBOL_IF_KUNIT(np_device_enable);

/**
 * np_device_disable() - an RDMA device goes
 * @ibdev: device; its clients were removed, uverbs among them, which has destroyed its
 *	objects, and the protocol, with which the quarantine has ended
 *
 * What may be left are references of requests that are just running, and regions whose
 * memory keeps a fault waiting.
 *
 * Context: process context.
 */
void np_device_disable(struct ib_device *ibdev)
{
	struct np_device *npdev = ibdev->np;
	struct np_region *region;
	unsigned long rkey;

	if (!npdev)
		return;
	/* The driver could not destroy their MRs: they stay, and the device need not */
	xa_for_each(&npdev->rkeys, rkey, region) {
		xa_erase(&npdev->rkeys, rkey);
		np_region_close_for_good(region);
	}
	np_regions_detach(npdev);
	np_device_put(npdev);
	wait_for_completion(&npdev->idle);
	WRITE_ONCE(ibdev->np, NULL);
	if (npdev->pd)
		ib_dealloc_pd(npdev->pd);
	WARN_ON(!xa_empty(&npdev->rkeys));
	kvfree(npdev->promises);
	kfree(npdev);
}
EXPORT_SYMBOL_IF_KUNIT(np_device_disable);

/**
 * np_init() - start with ib_core
 *
 * Context: module init.
 * Return: 0 or an error.
 */
int np_init(void)
{
	int ret = np_lease_init();

	if (ret)
		return ret;
	ret = np_aging_init(np_region_age);
	if (ret)
		np_lease_exit();
	return ret;
}

/**
 * np_exit() - end with ib_core; there are no devices any more
 */
void np_exit(void)
{
	np_aging_exit();
	np_lease_exit();
	np_host_free();
	np_refusals_free();
}
