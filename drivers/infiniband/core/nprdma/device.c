// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: devices.
 *
 * Says whether a device can have unpinned regions, and if not, why; what peers are told
 * of its order of READs; and how many addresses regions may take. Keeps for each device a
 * protection domain that no QP belongs to: the public keys live there.
 */
#include <kunit/static_stub.h>
#include <kunit/visibility.h>
#include <linux/dma-mapping.h>
#include <linux/iommu.h>
#include <linux/moduleparam.h>
#include <linux/pci.h>
#include <linux/slab.h>

#include "np_region.h"

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

/**
 * np_find_domain() - the domain in which the device's windows would be
 * @ibdev: device
 * @reason: set to why there is none
 *
 * Return: the domain, or -EOPNOTSUPP.
 */
struct iommu_domain *np_find_domain(struct ib_device *ibdev, const char **reason)
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
 * Tells the reason of a refusal, with what to do about it: see np_refuse().
 *
 * Context: process context.
 * Return: the domain, or -EOPNOTSUPP.
 */
struct iommu_domain *np_device_domain(struct ib_device *ibdev)
{
	const char *reason;
	struct iommu_domain *domain = np_find_domain(ibdev, &reason);

	if (IS_ERR(domain))
		np_refuse(ibdev, "unpinned memory regions refused: %s", reason);
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

	if (!xchg(&npdev->said_relaxed, true))
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
 * Return: 0, -EOPNOTSUPP with a refusal that says why, or -ENODEV if the device is
 * going away.
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

/* One of so many addresses for regions is not for what peers make */
#define NP_IOVA_OWN	8

/**
 * np_device_take_iova() - let a region have IOVA space
 * @ibdev: device of the region
 * @domain: its domain
 * @size: bytes, not 0
 * @own: its owner asks for it, and no peer
 *
 * IOVA space costs next to nothing, and all who use the domain live from it, which
 * may be several devices. A quarter is not for regions, so that pinned memory and
 * drivers find room, whatever somebody registers. And some of the rest is not for peers, which
 * make parts of one owner's address space, so that others of the host may still register.
 *
 * Context: process context.
 * Return: 0, then np_device_give_iova() follows; -ENOSPC; or -ENOMEM.
 */
int np_device_take_iova(struct ib_device *ibdev, struct iommu_domain *domain,
			size_t size, bool own)
{
	u64 most = min_t(u64, dma_get_mask(ibdev->dma_device),
			 domain->geometry.aperture_end) / 4 * 3;
	struct np_space *space;

	if (!own)
		most -= most / NP_IOVA_OWN;
	guard(mutex)(&np_spaces_lock);
	space = np_space_find(domain);
	if (size > most || (space && space->taken > most - size)) {
		np_refuse(ibdev,
			  "unpinned memory region refused: %zu MiB of DMA addresses are more than others leave; deregister something",
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
