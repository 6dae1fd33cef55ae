// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: regions, their keys and their end.
 *
 * The public key of a region, which the application knows, is registered in a
 * protection domain that no QP belongs to, without remote rights: it is a name.  A
 * peer that uses it as an rkey, and an application that uses it as an lkey, get a
 * protection error; the scheme fails closed.  The read key and the write key give
 * access to the region's bytes in the two windows, the table key to the residency
 * words of its pages, and none to anything else.  They are made when the first peer
 * resolves the region.
 *
 * Drivers reuse key values at once.  So when the public MR dies, the region is
 * gone, all its pages become absent for good, and these keys stay in
 * quarantine until every peer that was given them has said that it does not use
 * them any more, or has lost its QP.  A peer with stale keys reads signatures and
 * writes to the scratch page; it never reaches another region.
 */
#include <kunit/visibility.h>
#include <linux/log2.h>
#include <linux/memcontrol.h>
#include <linux/module.h>
#include <linux/overflow.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "../core_priv.h"
#include "../restrack.h"
#include "np_hooks.h"
#include "np_region.h"

static atomic64_t np_region_last_id;

/*
 * Keys that are tried for a name. NP_TOLD_MAX * 2 of the NP_TOLD_BITS that they hash to
 * may be taken, which is one of eight.
 */
#define NP_NAME_TRIES		(4 * NP_TOLD_MAX)

/**
 * np_region_charge() - from now on the region's owner pays
 * @region: region
 * @charge: for np_region_uncharge(), which follows
 *
 * Context: process context.
 */
void np_region_charge(struct np_region *region, struct np_charge *charge)
{
	charge->memcg = get_mem_cgroup_from_mm(region->mm);
	charge->other = set_active_memcg(charge->memcg);
}
EXPORT_SYMBOL_GPL(np_region_charge);

/**
 * np_region_uncharge() - pays who paid before
 * @charge: of np_region_charge()
 */
void np_region_uncharge(struct np_charge *charge)
{
	set_active_memcg(charge->other);
	mem_cgroup_put(charge->memcg);
}
EXPORT_SYMBOL_GPL(np_region_uncharge);

/* --- references and lookup ----------------------------------------------- */

/* Protects np_device.regions, and np_region.npdev of those in it */
static DEFINE_MUTEX(np_regions_lock);

/*
 * From now on the region has no device. Who is told which one it was does with the
 * windows what has to be done, before he gives back the device. NULL: somebody else does.
 */
static struct np_device *np_region_take_device(struct np_region *region)
{
	struct np_device *npdev;

	guard(mutex)(&np_regions_lock);
	npdev = region->npdev;
	if (npdev)
		list_del(&region->device_node);
	region->npdev = NULL;
	return npdev;
}

/*
 * The driver could not destroy a key, and may still use its umem: better to lose
 * memory than to free it. As the region is never freed, its device does not wait;
 * but the owner's address space calls us for it, and its windows map our pages.
 */
static void np_region_leak(struct np_region *region)
{
	struct np_device *npdev;

	lockdep_assert_held(&region->lock);
	npdev = np_region_take_device(region);
	if (!npdev)
		return;
	__module_get(THIS_MODULE);
	np_device_put(npdev);
}

static void np_region_unmap(struct np_region *region, struct np_device *npdev)
{
	np_window_unmap(&region->write);
	np_window_unmap(&region->read);
	np_device_give_iova(region->read.domain, region->iova_size);
	if (region->scratch)
		np_scratch_put(region->scratch);
	np_device_put(npdev);
}

static void np_region_free(struct kref *ref)
{
	struct np_region *region = container_of(ref, struct np_region, ref);
	struct np_device *npdev = np_region_take_device(region);

	WARN_ON(!list_empty(&region->grants));
	WARN_ON(!list_empty(&region->holds));
	WARN_ON(refcount_read(&region->users));
	if (npdev)
		np_region_unmap(region, npdev);
	ib_rdmacg_put(&region->cg);
	mmdrop(region->mm);
	kfree(region);
}

/*
 * A region of the device of which somebody else still has a reference, and that is freed
 * by whoever gives that back.
 */
static struct np_region *np_region_of_device(struct np_device *npdev)
{
	struct np_region *region;

	guard(mutex)(&np_regions_lock);
	list_for_each_entry(region, &npdev->regions, device_node) {
		if (kref_get_unless_zero(&region->ref))
			return region;
	}
	return NULL;
}

/**
 * np_regions_detach() - regions that are gone end without their device
 * @npdev: device that goes: none of its regions has an MR, keys or grants any more
 *
 * A fault that waits for memory of the owner keeps a region, and the owner may keep it
 * waiting for as long as he likes. When it goes on it finds the region closed, and looks
 * at no window: see np_region.window_sem and np_chunk.closed.
 *
 * Context: process context.
 */
void np_regions_detach(struct np_device *npdev)
{
	struct np_region *region;

	while ((region = np_region_of_device(npdev))) {
		/* Who makes room for leaves now is done; who comes later does not */
		down_write(&region->window_sem);
		up_write(&region->window_sem);
		if (np_region_take_device(region))
			np_region_unmap(region, npdev);
		np_region_put(region);
	}
}
EXPORT_SYMBOL_IF_KUNIT(np_regions_detach);

/**
 * np_region_get() - take a reference
 * @region: region of which the caller has a reference
 */
void np_region_get(struct np_region *region)
{
	kref_get(&region->ref);
}
EXPORT_SYMBOL_GPL(np_region_get);

/**
 * np_region_put() - drop a reference
 * @region: region
 *
 * Context: process context; the last one unmaps the windows.
 */
void np_region_put(struct np_region *region)
{
	kref_put(&region->ref, np_region_free);
}
EXPORT_SYMBOL_GPL(np_region_put);

/**
 * np_region_find_rkey() - the live region with this public key
 * @ibdev: device, held by a client or a uverbs object
 * @rkey: what the owner's application calls mr->rkey (and mr->lkey)
 *
 * Return: the region with a reference, or NULL.
 */
struct np_region *np_region_find_rkey(struct ib_device *ibdev, u32 rkey)
{
	struct np_device *npdev = np_device_get(ibdev);
	struct np_region *region;

	if (!npdev)
		return NULL;
	xa_lock(&npdev->rkeys);
	region = xa_load(&npdev->rkeys, rkey);
	if (region && (region->ending || !kref_get_unless_zero(&region->ref)))
		region = NULL;
	xa_unlock(&npdev->rkeys);
	np_device_put(npdev);
	return region;
}
EXPORT_SYMBOL_GPL(np_region_find_rkey);

/**
 * np_mr_region() - the region behind an MR
 * @mr: MR that the caller keeps alive
 *
 * Return: the region, without a reference, or NULL if the MR is a pinned one.
 */
struct np_region *np_mr_region(struct ib_mr *mr)
{
	return mr->np;
}
EXPORT_SYMBOL_GPL(np_mr_region);

/**
 * np_region_is_gone() - is the public MR dead?
 * @region: region
 *
 * Return: true if it is; it may become so at any time.
 */
bool np_region_is_gone(struct np_region *region)
{
	return READ_ONCE(region->gone);
}
EXPORT_SYMBOL_GPL(np_region_is_gone);

/**
 * np_region_id() - the name that is never used again on this host
 * @region: region
 *
 * Return: its id, not 0.
 */
u64 np_region_id(struct np_region *region)
{
	return region->id;
}
EXPORT_SYMBOL_GPL(np_region_id);

/**
 * np_region_pd() - the application's PD
 * @region: region
 *
 * Return: the PD, to compare with that of a QP; it may be freed if the region is
 * gone.
 */
struct ib_pd *np_region_pd(struct np_region *region)
{
	return region->pd;
}
EXPORT_SYMBOL_GPL(np_region_pd);

/**
 * np_region_mm() - the owner's address space
 * @region: region
 *
 * Return: the address space, for as long as the caller keeps the region.
 */
struct mm_struct *np_region_mm(struct np_region *region)
{
	return region->mm;
}
EXPORT_SYMBOL_GPL(np_region_mm);

/**
 * np_region_describe() - what a region is, without making keys
 * @region: region
 * @out: where to; keys, remote addresses, bounds and order are 0
 */
void np_region_describe(struct np_region *region, struct np_resolve *out)
{
	*out = (struct np_resolve){
		.id = region->id,
		.base = region->base,
		.length = region->length,
		.access = region->access,
		.signature = np_host.signature,
		.page_shift = RDMA_NP_PAGE_SHIFT,
		.unit_shift = NP_UNIT_SHIFT,
	};
}
EXPORT_SYMBOL_GPL(np_region_describe);

/**
 * np_region_stats() - read the counters
 * @region: region
 * @stats: where to; the counters are not read at one instant
 */
void np_region_stats(struct np_region *region, struct np_stats *stats)
{
	struct np_counters *count = &region->count;

	*stats = (struct np_stats){
		.resident = atomic64_read(&count->resident),
		.writable = atomic64_read(&count->writable),
		.held = atomic64_read(&count->held),
		.huge = atomic64_read(&count->huge),
		.faults_minor = atomic64_read(&count->faults_minor),
		.faults_major = atomic64_read(&count->faults_major),
		.faults_noop = atomic64_read(&count->faults_noop),
		.faults_failed = atomic64_read(&count->faults_failed),
		.retries = atomic64_read(&count->retries),
		.invalidations = atomic64_read(&count->invalidations),
		.pages_invalidated = atomic64_read(&count->pages_invalidated),
		.pages_aged = atomic64_read(&count->pages_aged),
		.holds = atomic64_read(&count->holds),
		.table_pages = atomic64_read(&count->table_pages),
	};
}
EXPORT_SYMBOL_GPL(np_region_stats);

/* --- making a region ------------------------------------------------------- */

/**
 * np_region_create() - a region with its windows, without keys
 * @npdev: device; on success the region takes over the caller's reference
 * @pd: the application's PD
 * @dev: the device that does DMA
 * @domain: its domain
 * @start: first va
 * @length: bytes; not 0, [@start, @start + @length) is user space
 * @base: remote address of @start
 * @access: IB_ACCESS_*
 *
 * Context: process context; the owner is current->mm.
 * Return: the region with one reference, or -ENOMEM or what the IOMMU said.
 */
struct np_region *np_region_create(struct np_device *npdev, struct ib_pd *pd,
				   struct device *dev,
				   struct iommu_domain *domain, u64 start,
				   u64 length, u64 base, u32 access)
{
	struct np_region *region;
	int ret;

	ret = np_host_pages();
	if (ret)
		return ERR_PTR(ret);

	region = kzalloc(sizeof(*region), GFP_KERNEL_ACCOUNT);
	if (!region)
		return ERR_PTR(-ENOMEM);
	kref_init(&region->ref);
	refcount_set(&region->users, 1);
	region->id = atomic64_inc_return(&np_region_last_id);
	region->pd = pd;
	region->mm = current->mm;
	ib_rdmacg_get(&region->cg);
	region->start = start;
	region->length = length;
	region->base = base;
	region->access = access;
	mutex_init(&region->lock);
	INIT_LIST_HEAD(&region->grants);
	mutex_init(&region->chunk_lock);
	xa_init(&region->chunks);
	mutex_init(&region->table_lock);
	init_rwsem(&region->pin_lock);
	init_rwsem(&region->window_sem);
	spin_lock_init(&region->hold_lock);
	INIT_LIST_HEAD(&region->holds);

	if (access & IB_ACCESS_LOCAL_WRITE) {
		region->scratch = np_scratch_get(npdev, pd);
		if (IS_ERR(region->scratch)) {
			ret = PTR_ERR(region->scratch);
			goto free;
		}
		ret = np_window_map(&region->write, dev, domain, start, length,
				    false, page_to_phys(region->scratch->page),
				    IOMMU_READ | IOMMU_WRITE);
		if (ret)
			goto put_scratch;
	}
	ret = np_window_map(&region->read, dev, domain, start, length, true,
			    page_to_phys(np_host.signature_page), IOMMU_READ);
	if (ret)
		goto unmap;

	ret = np_aging_join(region);
	if (ret)
		goto unmap_read;
	region->npdev = npdev;
	scoped_guard(mutex, &np_regions_lock)
		list_add(&region->device_node, &npdev->regions);
	mmgrab(region->mm);
	return region;

unmap_read:
	np_window_unmap(&region->read);
unmap:
	np_window_unmap(&region->write);
put_scratch:
	if (region->scratch)
		np_scratch_put(region->scratch);
free:
	ib_rdmacg_put(&region->cg);
	kfree(region);
	return ERR_PTR(ret);
}
EXPORT_SYMBOL_IF_KUNIT(np_region_create);

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
		dev_warn_ratelimited(&ibdev->dev,
				     "unpinned memory region refused: %s\n",
				     refused[i].why);
		return -EOPNOTSUPP;
	}
	return access & ~(NP_ACCESS_RIGHTS | IB_ACCESS_UNPINNED) ? -EINVAL : 0;
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

static bool np_region_free_name(struct np_region *region, struct ib_mr *mr)
{
	if (!mr->device->ops.dereg_mr(mr, NULL))
		return true;
	mutex_lock(&region->lock);
	np_region_leak(region);
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
 * @length: bytes
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

	size = np_window_size(start, length, true);
	if (access & IB_ACCESS_LOCAL_WRITE)
		size += np_window_size(start, length, false);
	ret = np_device_take_iova(ibdev, domain, size);
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

	mr = np_region_make_name(region, public_pd);
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
	dev_warn_ratelimited(&mr->device->dev,
			     "re-registration refused: an unpinned memory region cannot change, and none can become one; deregister and register\n");
	return -EOPNOTSUPP;
}
EXPORT_SYMBOL_GPL(np_rereg_check);

static int np_advise_sge(struct ib_pd *pd, struct np_region *region,
			 unsigned int fault_flags, const struct ib_sge *sge)
{
	if (region->pd != pd)
		return -EPERM;
	if (!sge->length)
		return 0;
	return np_region_fault(region, sge->addr, sge->length,
			       fault_flags | NP_FAULT_LOCAL, NULL, NULL, 0);
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
 * Return: 0; -EINVAL for a list that mixes pinned and unpinned regions; what
 * np_region_fault() says.
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

/* --- keys and grants -------------------------------------------------------- */

/*
 * The address of a byte under a key is its IOVA: congruent whatever the base is,
 * so the device's translation table stays small, and it never wraps.
 */
static u64 np_region_read_addr(struct np_region *region)
{
	return np_window_iova(&region->read, region->start);
}

static u64 np_region_write_addr(struct np_region *region)
{
	return np_window_iova(&region->write, region->start);
}

static u64 np_region_table_addr(struct np_region *region)
{
	unsigned long index = (region->start - region->read.va) >> PAGE_SHIFT;

	return np_window_table_iova(&region->read, region->read.va) +
	       index * sizeof(u64);
}

/* Make the key if it does not exist; it is good for these bytes and no others */
static int np_region_make_key(struct np_region *region, struct ib_mr **key,
			      dma_addr_t iova, size_t length, u32 access)
{
	struct ib_device *ibdev = region->pd->device;
	struct ib_mr *mr;
	int ret;

	lockdep_assert_held(&region->lock);
	if (*key)
		return 0;
	/* The owner pays, whoever asks; -EAGAIN would mean that it passes by itself */
	ret = ib_rdmacg_try_charge_to(&region->cg, ibdev,
				      RDMACG_RESOURCE_HCA_OBJECT);
	if (ret)
		return -ENOMEM;
	mr = np_umem_reg_mr(region, region->pd, iova, length, iova, access);
	if (IS_ERR(mr)) {
		ib_rdmacg_uncharge(&region->cg, ibdev,
				   RDMACG_RESOURCE_HCA_OBJECT);
		return PTR_ERR(mr);
	}
	atomic_inc(&region->pd->usecnt);
	mr->np = region;
	rdma_restrack_new(&mr->res, RDMA_RESTRACK_MR);
	rdma_restrack_set_name(&mr->res, "nprdma");
	rdma_restrack_add(&mr->res);
	*key = mr;
	return 0;
}

/* The PD must be free to go once its last grant is gone, so this is synchronous */
static void np_region_free_key(struct np_region *region, struct ib_mr *mr)
{
	struct ib_device *ibdev;
	int ret;

	if (!mr)
		return;
	ibdev = mr->device;
	rdma_restrack_del(&mr->res);
	ret = ibdev->ops.dereg_mr(mr, NULL);
	if (ret) {
		np_region_leak(region);
		dev_err(&ibdev->dev,
			"key of a dead unpinned memory region could not be destroyed (%d), its windows stay mapped\n",
			ret);
		return;
	}
	ib_rdmacg_uncharge(&region->cg, ibdev, RDMACG_RESOURCE_HCA_OBJECT);
	atomic_dec(&region->pd->usecnt);
}

/* The keys that peers are given, by the bits of np_region_missing_keys() */
#define NP_REGION_KEYS(region)                                                 \
	{ &(region)->table_mr, &(region)->read_mr, &(region)->write_mr }

static unsigned int np_region_missing_keys(struct np_region *region)
{
	struct ib_mr **keys[] = NP_REGION_KEYS(region);
	unsigned int missing = 0;
	unsigned int i;

	lockdep_assert_held(&region->lock);
	for (i = 0; i < ARRAY_SIZE(keys); i++)
		if (!*keys[i])
			missing |= BIT(i);
	return missing;
}

/* Free those of these keys that exist */
static void np_region_drop_keys(struct np_region *region, unsigned int which)
{
	struct ib_mr **keys[] = NP_REGION_KEYS(region);
	unsigned int i = ARRAY_SIZE(keys);

	lockdep_assert_held(&region->lock);
	while (i--) {
		if (!(which & BIT(i)))
			continue;
		np_region_free_key(region, *keys[i]);
		*keys[i] = NULL;
	}
}

static void np_region_free_keys(struct np_region *region)
{
	np_region_drop_keys(region, ~0U);
}

static int np_region_make_keys(struct np_region *region)
{
	unsigned long end = PAGE_ALIGN(region->start + region->length);
	size_t npages = (end - (region->start & PAGE_MASK)) >> PAGE_SHIFT;
	u32 change = region->access & NP_ACCESS_REMOTE_CHANGE;
	int ret;

	/*
	 * Who may only write reads the residency words all the same. They have a key of
	 * their own, because between them and the region may lie the rest of a page
	 * of the owner's, and that is nobody's business.
	 */
	ret = np_region_make_key(region, &region->table_mr,
				 np_region_table_addr(region),
				 npages * sizeof(u64), IB_ACCESS_REMOTE_READ);
	if (!ret && region->access & IB_ACCESS_REMOTE_READ)
		ret = np_region_make_key(region, &region->read_mr,
					 np_region_read_addr(region),
					 region->length, IB_ACCESS_REMOTE_READ);
	if (!ret && change)
		ret = np_region_make_key(region, &region->write_mr,
					 np_region_write_addr(region),
					 region->length,
					 IB_ACCESS_LOCAL_WRITE | change);
	return ret;
}

/**
 * np_region_resolve() - make the keys, if they do not exist, and tell them
 * @region: region
 * @out: where to
 *
 * Context: process context.
 * Return: 0, -ENXIO if the region is gone, -EPERM if it has no remote rights,
 * -ENOMEM, or what the driver said.
 */
int np_region_resolve(struct np_region *region, struct np_resolve *out)
{
	unsigned int missing;
	int ret;

	if (!(region->access & NP_ACCESS_REMOTE))
		return -EPERM;

	guard(mutex)(&region->lock);
	if (region->gone)
		return -ENXIO;
	missing = np_region_missing_keys(region);
	ret = np_region_make_keys(region);
	if (ret) {
		/*
		 * All or none: the owner pays for no key that nobody was told. Who asks
		 * has a grant already, so grants do not say whether somebody was.
		 */
		np_region_drop_keys(region, missing);
		return ret;
	}

	np_region_describe(region, out);
	out->read_order = np_device_read_order(region->npdev);
	out->table_key = region->table_mr->rkey;
	out->table_addr = np_region_table_addr(region);
	if (region->read_mr) {
		out->read_key = region->read_mr->rkey;
		out->read_addr = np_region_read_addr(region);
	}
	if (region->write_mr) {
		out->write_key = region->write_mr->rkey;
		out->write_addr = np_region_write_addr(region);
	}
	return 0;
}
EXPORT_SYMBOL_GPL(np_region_resolve);

/**
 * np_region_local_key() - a key for the owner's own work requests
 * @region: region
 * @write: to the write window; otherwise to the read window
 * @addr: address in the region, checked
 * @key_addr: set to what @addr is under the key
 * @lkey: set to the key
 *
 * Context: process context.
 * Return: 0, -ENXIO if the region is gone, -ENOMEM, or what the driver said.
 */
int np_region_local_key(struct np_region *region, bool write, u64 addr,
			u64 *key_addr, u32 *lkey)
{
	u64 start = write ? np_region_write_addr(region) :
			    np_region_read_addr(region);
	struct ib_mr **mr = write ? &region->sink_mr : &region->source_mr;
	int ret;

	guard(mutex)(&region->lock);
	if (region->gone)
		return -ENXIO;
	ret = np_region_make_key(region, mr, start, region->length,
				 write ? IB_ACCESS_LOCAL_WRITE : 0);
	if (ret)
		return ret;
	*key_addr = start + (addr - region->base);
	*lkey = (*mr)->lkey;
	return 0;
}
EXPORT_SYMBOL_IF_KUNIT(np_region_local_key);

/**
 * np_region_grant() - a peer will be told the keys
 * @region: region
 * @grant: zeroed, or with @gone; the caller's, until np_region_ungrant()
 *
 * Context: process context.
 * Return: 0; -ENXIO if the region is gone: then tell the peer nothing.
 */
int np_region_grant(struct np_region *region, struct np_grant *grant)
{
	guard(mutex)(&region->lock);
	if (region->gone)
		return -ENXIO;
	grant->region = region;
	np_region_get(region);
	list_add_tail(&grant->node, &region->grants);
	return 0;
}
EXPORT_SYMBOL_GPL(np_region_grant);

/**
 * np_region_ungrant() - the peer does not use the keys any more, or cannot
 * @grant: nothing happens if it is not granted
 *
 * The last grant of a region that is gone ends the quarantine: when this returns,
 * its keys do not exist any more.
 *
 * Context: process context, not in np_grant.gone().
 */
void np_region_ungrant(struct np_grant *grant)
{
	struct np_region *region = grant->region;

	if (!region)
		return;
	mutex_lock(&region->lock);
	list_del(&grant->node);
	grant->region = NULL;
	if (region->gone && list_empty(&region->grants))
		np_region_free_keys(region);
	mutex_unlock(&region->lock);
	np_region_put(region);
}
EXPORT_SYMBOL_GPL(np_region_ungrant);

/* --- the end ----------------------------------------------------------------- */

/**
 * np_region_close() - the region is gone
 * @region: region without a public MR
 *
 * When this returns all pages are absent and stay so, no page is pinned for the
 * region, and without grants it has no keys. With grants, that and the top levels of
 * its windows' tables is all it has: 4 KiB for each GiB of a window.
 *
 * Context: process context.
 */
void np_region_close(struct np_region *region)
{
	struct np_grant *grant;

	mutex_lock(&region->lock);
	WRITE_ONCE(region->gone, true);
	/* Of these only the owner knows, whose work requests fail from here on */
	np_region_free_key(region, region->sink_mr);
	np_region_free_key(region, region->source_mr);
	region->sink_mr = NULL;
	region->source_mr = NULL;
	mutex_unlock(&region->lock);

	/* Pages first: peers that look again now read signatures, and ask us */
	np_chunks_close(region);
	np_holds_unpin(region);
	/*
	 * Words, chunks and the like are freed, however long peers keep the keys. If a
	 * fault is just looking at them, that is when it ends.
	 */
	np_region_leave(region);

	mutex_lock(&region->lock);
	if (list_empty(&region->grants))
		np_region_free_keys(region);
	list_for_each_entry(grant, &region->grants, node) {
		if (grant->gone)
			grant->gone(grant);
	}
	mutex_unlock(&region->lock);
}
EXPORT_SYMBOL_IF_KUNIT(np_region_close);

/**
 * np_region_orphan() - the end of a region that could not be destroyed
 * @region: region whose public MR the driver keeps, and nobody else knows
 *
 * Context: process context; the device goes.
 */
void np_region_orphan(struct np_region *region)
{
	np_region_close(region);
	mutex_lock(&region->lock);
	np_region_leak(region);
	mutex_unlock(&region->lock);
}
EXPORT_SYMBOL_IF_KUNIT(np_region_orphan);

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
