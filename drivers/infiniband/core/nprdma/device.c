// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: devices, and what regions share.
 *
 * Says whether a device can have unpinned regions, and if not, why.  Keeps for
 * each device a protection domain that no QP belongs to (the public keys live
 * there), for each protection domain that had a region its scratch page, and for
 * the host the signature page and a page of absent residency words.
 *
 * The 2 MiB pages are what absent pages of a window map to.  The signature and the
 * zero page are mapped read-only; a scratch page is written by the peers of one
 * protection domain and read by them only, so nothing leaks between two.
 */
#include <kunit/static_stub.h>
#include <kunit/visibility.h>
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/highmem.h>
#include <linux/iommu.h>
#include <linux/moduleparam.h>
#include <linux/pci.h>
#include <linux/random.h>
#include <linux/slab.h>

#include "np_hooks.h"
#include "np_region.h"

struct np_host np_host;
EXPORT_SYMBOL_IF_KUNIT(np_host);
static DEFINE_MUTEX(np_host_lock);

/*
 * A driver takes part by reg_umem_mr(), which may be called from any context. An op
 * that registers memory of the caller's cannot stand in: it may want udata, or
 * current->mm, and would meet neither when a peer makes us call it.
 */
static const char *np_driver_reason(struct ib_device *ibdev)
{
	if (!ibdev->dma_device || ib_uses_virt_dma(ibdev))
		return "no DMA that an IOMMU translates; use a hardware device";
	if (!ibdev->ops.reg_umem_mr || !ibdev->ops.dereg_mr)
		return "its driver does not register memory that is not pinned; use another device";
	if (!ibdev->kverbs_provider)
		return "its driver has no verbs for the kernel, which answers peers; use another device";
	return NULL;
}

/* The DMA API belongs to a device, which unit tests do not have */
VISIBLE_IF_KUNIT struct iommu_domain *np_dma_domain(struct device *dev,
						    const char **reason)
{
	KUNIT_STATIC_STUB_REDIRECT(np_dma_domain, dev, reason);
	return iommu_dma_replaceable_domain(dev, reason);
}
EXPORT_SYMBOL_IF_KUNIT(np_dma_domain);

/* An error pointer, and why, if the device cannot have unpinned regions */
static struct iommu_domain *np_find_domain(struct ib_device *ibdev,
					   const char **reason)
{
	struct iommu_domain *domain;

	*reason = np_driver_reason(ibdev);
	if (*reason)
		return ERR_PTR(-EOPNOTSUPP);
	domain = np_dma_domain(ibdev->dma_device, reason);
	if (!IS_ERR_OR_NULL(domain))
		return domain;
	if (!*reason)
		*reason = "its IOMMU domain does not support it";
	return ERR_PTR(-EOPNOTSUPP);
}

/**
 * np_device_domain() - the domain in which the device's windows would be
 * @ibdev: device of a live registration, or held by a client
 *
 * Logs the reason of a refusal, with what to do about it, at a limited rate.
 *
 * Context: process context.
 * Return: the domain, or -EOPNOTSUPP.
 */
struct iommu_domain *np_device_domain(struct ib_device *ibdev)
{
	const char *reason;
	struct iommu_domain *domain = np_find_domain(ibdev, &reason);

	if (IS_ERR(domain))
		dev_warn_ratelimited(&ibdev->dev,
				     "unpinned memory regions refused: %s\n",
				     reason);
	return domain;
}
EXPORT_SYMBOL_IF_KUNIT(np_device_domain);

static const char *const np_read_orders[] = {
	[RDMA_NP_READ_UNKNOWN] = "unknown",
	[RDMA_NP_READ_IN_ORDER] = "in-order",
	[RDMA_NP_READ_OUT_OF_ORDER] = "out-of-order",
	[NP_READ_ORDER_AUTO] = "auto",
};

static unsigned int np_read_order = NP_READ_ORDER_AUTO;

static int np_read_order_set(const char *val, const struct kernel_param *kp)
{
	int order = sysfs_match_string(np_read_orders, val);

	if (order < 0)
		return order;
	WRITE_ONCE(np_read_order, order);
	return 0;
}

static int np_read_order_get(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%s\n", np_read_orders[READ_ONCE(np_read_order)]);
}

static const struct kernel_param_ops np_read_order_ops = {
	.set = np_read_order_set,
	.get = np_read_order_get,
};

module_param_cb(nprdma_read_order, &np_read_order_ops, NULL, 0644);
MODULE_PARM_DESC(nprdma_read_order,
		 "What peers are told of READs behind WRITEs: auto (what the driver knows), in-order, out-of-order, or unknown");

/* A read passes no posted write (P2), unless the device may say that it may */
VISIBLE_IF_KUNIT bool np_device_is_relaxed(struct ib_device *ibdev)
{
	struct device *dev = ibdev->dma_device;

	KUNIT_STATIC_STUB_REDIRECT(np_device_is_relaxed, ibdev);
	/* A virtual function has no such bit of its own */
	return dev && dev_is_pci(dev) &&
	       pcie_relaxed_ordering_enabled(pci_physfn(to_pci_dev(dev)));
}
EXPORT_SYMBOL_IF_KUNIT(np_device_is_relaxed);

/**
 * np_read_order_of() - does a device execute READs behind the WRITEs of their QP?
 * @npdev: device
 * @asked: what the administrator says, enum rdma_np_read_order or NP_READ_ORDER_AUTO
 *
 * Peers that are told so prove a WRITE by a READ that is posted behind it at once. So
 * whoever does not know must not say so.
 *
 * Context: process context.
 * Return: enum rdma_np_read_order.
 */
VISIBLE_IF_KUNIT u8 np_read_order_of(struct np_device *npdev, unsigned int asked)
{
	struct ib_device *ibdev = npdev->ibdev;
	u8 known = ibdev->attrs.read_order;

	if (asked != NP_READ_ORDER_AUTO)
		return asked;
	if (known != RDMA_NP_READ_IN_ORDER || !np_device_is_relaxed(ibdev))
		return known;

	if (!xchg(&npdev->told_relaxed, true))
		dev_info(&ibdev->dev,
			 "PCIe relaxed ordering is enabled, so peers prove WRITEs to unpinned memory the slow way; if the device orders its writes all the same, set ib_core.nprdma_read_order=in-order\n");
	return RDMA_NP_READ_UNKNOWN;
}
EXPORT_SYMBOL_IF_KUNIT(np_read_order_of);

/**
 * np_device_read_order() - what peers may be told of READs behind WRITEs
 * @npdev: device
 *
 * Context: process context.
 * Return: enum rdma_np_read_order.
 */
u8 np_device_read_order(struct np_device *npdev)
{
	return np_read_order_of(npdev, READ_ONCE(np_read_order));
}
EXPORT_SYMBOL_IF_KUNIT(np_device_read_order);

/**
 * np_device_get() - our side of an RDMA device
 * @ibdev: device of a live registration, or held by a client
 *
 * Return: the device with a reference, or NULL if it is going away.
 */
struct np_device *np_device_get(struct ib_device *ibdev)
{
	struct np_device *npdev;

	KUNIT_STATIC_STUB_REDIRECT(np_device_get, ibdev);
	npdev = READ_ONCE(ibdev->np);
	if (!npdev || !refcount_inc_not_zero(&npdev->users))
		return NULL;
	return npdev;
}
EXPORT_SYMBOL_IF_KUNIT(np_device_get);

/**
 * np_device_put() - drop the reference of np_device_get()
 * @npdev: device
 */
void np_device_put(struct np_device *npdev)
{
	if (refcount_dec_and_test(&npdev->users))
		complete(&npdev->idle);
}

/**
 * np_device_check() - can the device have unpinned regions?
 * @ibdev: device of a live registration, or held by a client
 *
 * Asks all that np_reg_user_mr() asks of the device.
 *
 * Context: process context.
 * Return: 0, -EOPNOTSUPP with the reason in the kernel's log, or -ENODEV if the
 * device is going away.
 */
int np_device_check(struct ib_device *ibdev)
{
	struct iommu_domain *domain = np_device_domain(ibdev);
	struct np_device *npdev;

	if (IS_ERR(domain))
		return PTR_ERR(domain);
	npdev = np_device_get(ibdev);
	if (!npdev)
		return -ENODEV;
	np_device_put(npdev);
	return 0;
}
EXPORT_SYMBOL_GPL(np_device_check);

/**
 * struct np_space - the addresses of a domain, for what regions take of them
 * @node: in np_spaces
 * @domain: compare only
 * @taken: bytes that regions have, more than 0
 */
struct np_space {
	struct list_head node;
	struct iommu_domain *domain;
	u64 taken;
};

static LIST_HEAD(np_spaces);
static DEFINE_MUTEX(np_spaces_lock);

static struct np_space *np_space_find(struct iommu_domain *domain)
{
	struct np_space *space;

	lockdep_assert_held(&np_spaces_lock);
	list_for_each_entry(space, &np_spaces, node)
		if (space->domain == domain)
			return space;
	return NULL;
}

/**
 * np_device_take_iova() - let a region have IOVA space
 * @ibdev: device of the region
 * @domain: its domain
 * @size: bytes, not 0
 *
 * IOVA space costs next to nothing, and all who use the domain live from it, which
 * may be several devices. A quarter is not for regions, so that pinned memory and
 * drivers find room, whatever somebody registers.
 *
 * Context: process context.
 * Return: 0, then np_device_give_iova() follows; -ENOSPC; or -ENOMEM.
 */
int np_device_take_iova(struct ib_device *ibdev, struct iommu_domain *domain,
			size_t size)
{
	u64 most = min_t(u64, dma_get_mask(ibdev->dma_device),
			 domain->geometry.aperture_end) / 4 * 3;
	struct np_space *space;

	guard(mutex)(&np_spaces_lock);
	space = np_space_find(domain);
	if (size > most || (space && space->taken > most - size)) {
		dev_warn_ratelimited(&ibdev->dev,
				     "unpinned memory region refused: %zu MiB of DMA addresses are more than others leave; deregister something\n",
				     size >> 20);
		return -ENOSPC;
	}
	if (!space) {
		space = kzalloc(sizeof(*space), GFP_KERNEL);
		if (!space)
			return -ENOMEM;
		space->domain = domain;
		list_add(&space->node, &np_spaces);
	}
	space->taken += size;
	return 0;
}
EXPORT_SYMBOL_IF_KUNIT(np_device_take_iova);

/**
 * np_device_give_iova() - the end of what np_device_take_iova() gave
 * @domain: domain
 * @size: bytes
 */
void np_device_give_iova(struct iommu_domain *domain, size_t size)
{
	struct np_space *space;

	/* Nothing was taken for regions that unit tests make */
	if (!size)
		return;
	guard(mutex)(&np_spaces_lock);
	space = np_space_find(domain);
	if (WARN_ON(!space))
		return;
	space->taken -= size;
	if (space->taken)
		return;
	list_del(&space->node);
	kfree(space);
}
EXPORT_SYMBOL_IF_KUNIT(np_device_give_iova);

/**
 * np_device_pd() - the protection domain of the public keys
 * @npdev: device
 *
 * Context: process context.
 * Return: the PD, which lives as long as the device, or an error pointer.
 */
struct ib_pd *np_device_pd(struct np_device *npdev)
{
	struct ib_pd *pd;

	guard(mutex)(&npdev->lock);
	if (!npdev->pd) {
		pd = ib_alloc_pd(npdev->ibdev, 0);
		if (IS_ERR(pd))
			return pd;
		npdev->pd = pd;
	}
	return npdev->pd;
}

static struct page *np_alloc_2m(gfp_t gfp)
{
	return alloc_pages(gfp | __GFP_ZERO | __GFP_NOWARN |
			   __GFP_RETRY_MAYFAIL, NP_SLOT_ORDER);
}

/**
 * np_host_pages() - make the signature page and the zero page, once
 *
 * Costs the host 4 MiB.
 *
 * Context: process context.
 * Return: 0 or -ENOMEM.
 */
int np_host_pages(void)
{
	__le64 *words;
	int i;

	guard(mutex)(&np_host_lock);
	if (np_host.signature_page)
		return 0;

	if (!np_host.zero_page)
		np_host.zero_page = np_alloc_2m(GFP_KERNEL);
	if (!np_host.zero_page)
		return -ENOMEM;
	np_host.signature_page = np_alloc_2m(GFP_KERNEL);
	if (!np_host.signature_page)
		return -ENOMEM;

	/* Zero is what fresh memory holds: the one value that would often match */
	do {
		np_host.signature = get_random_u64();
	} while (!np_host.signature);

	words = page_address(np_host.signature_page);
	for (i = 0; i < NP_SLOT_SIZE / sizeof(*words); i++)
		words[i] = cpu_to_le64(np_host.signature);
	return 0;
}

static void np_host_free(void)
{
	if (np_host.signature_page)
		__free_pages(np_host.signature_page, NP_SLOT_ORDER);
	if (np_host.zero_page)
		__free_pages(np_host.zero_page, NP_SLOT_ORDER);
}

static void np_scratch_free(struct kref *ref)
{
	struct np_scratch *scratch = container_of(ref, struct np_scratch, ref);

	__free_pages(scratch->page, NP_SLOT_ORDER);
	kfree(scratch);
}

/**
 * np_scratch_get() - the scratch page of a PD, for one more region
 * @npdev: device
 * @pd: the application's PD
 *
 * The first region of a PD makes the page, and it stays for the others to come:
 * clearing 2 MiB costs more than all else that a registration does.
 *
 * Context: process context.
 * Return: the scratch page, for np_scratch_put() when no window of the region
 * maps it any more, or -ENOMEM.
 */
struct np_scratch *np_scratch_get(struct np_device *npdev, struct ib_pd *pd)
{
	struct np_scratch *scratch;

	guard(mutex)(&npdev->lock);
	scratch = pd->np;
	if (!scratch) {
		scratch = kzalloc(sizeof(*scratch), GFP_KERNEL);
		if (!scratch)
			return ERR_PTR(-ENOMEM);
		scratch->page = np_alloc_2m(GFP_KERNEL_ACCOUNT);
		if (!scratch->page) {
			kfree(scratch);
			return ERR_PTR(-ENOMEM);
		}
		kref_init(&scratch->ref);
		pd->np = scratch;
	}
	kref_get(&scratch->ref);
	return scratch;
}

/**
 * np_scratch_put() - a region's windows do not map the page any more
 * @scratch: of np_scratch_get()
 */
void np_scratch_put(struct np_scratch *scratch)
{
	kref_put(&scratch->ref, np_scratch_free);
}

/**
 * np_pd_dealloc() - a PD ends
 * @pd: the PD; no MR and no QP is left in it
 *
 * Windows of dead regions may still map its scratch page, which goes with them.
 *
 * Context: process context.
 */
void np_pd_dealloc(struct ib_pd *pd)
{
	if (pd->np)
		np_scratch_put(pd->np);
	pd->np = NULL;
}
EXPORT_SYMBOL_IF_KUNIT(np_pd_dealloc);

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
	if (!npdev) {
		dev_warn(&ibdev->dev, "no memory for unpinned memory regions\n");
		return;
	}
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
		np_region_orphan(region);
	}
	np_regions_detach(npdev);
	np_device_put(npdev);
	wait_for_completion(&npdev->idle);
	WRITE_ONCE(ibdev->np, NULL);
	if (npdev->pd)
		ib_dealloc_pd(npdev->pd);
	WARN_ON(!xa_empty(&npdev->rkeys));
	kvfree(npdev->told);
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
	return np_aging_init(np_region_age);
}

/**
 * np_exit() - end with ib_core; there are no devices any more
 */
void np_exit(void)
{
	np_aging_exit();
	np_host_free();
}
