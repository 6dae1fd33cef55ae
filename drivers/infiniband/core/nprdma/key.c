// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: the keys of a region.
 *
 * The public key of a region, which the application knows, is registered in a
 * protection domain that no QP belongs to, without remote rights: it is a name.  A
 * peer that uses it as an rkey, and an application that uses it as an lkey, get a
 * protection error; the scheme fails closed.  The read key and the write key give
 * access to the region's bytes in the two windows, the table key to the residency
 * words of its pages, and none to anything else.  They are made when the first peer
 * resolves the region.  Each lease of a peer has a key of its own, to the pages of the lease:
 * so it can end although the peer does not give it back.
 *
 * Drivers reuse key values at once.  So when the public MR dies, the region is
 * gone, all its pages become absent for good, and these keys stay in
 * quarantine until every peer that was given them has said that it does not use
 * them any more, or has lost its QP.  A peer with stale keys reads signatures and
 * writes to the scratch page; it never reaches another region.
 */
#include <kunit/visibility.h>

#include "../core_priv.h"
#include "../restrack.h"
#include "np_region.h"

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

/*
 * The PD must be free to go once its last grant is gone, so this is synchronous. False: the
 * driver could not destroy it, and may still use its umem.
 */
static bool np_region_free_key(struct np_region *region, struct ib_mr **key)
{
	struct ib_mr *mr = *key;
	struct ib_device *ibdev;
	int ret;

	lockdep_assert_held(&region->lock);
	if (!mr)
		return true;
	ibdev = mr->device;
	rdma_restrack_del(&mr->res);
	ret = ibdev->ops.dereg_mr(mr, NULL);
	if (ret) {
		dev_err(&ibdev->dev,
			"key of an unpinned memory region could not be destroyed (%d), its windows stay mapped\n",
			ret);
		return false;
	}
	*key = NULL;
	ib_rdmacg_uncharge(&region->cg, ibdev, RDMACG_RESOURCE_HCA_OBJECT);
	atomic_dec(&region->pd->usecnt);
	return true;
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

/* Free those of these keys that exist. False: one stays */
static bool np_region_drop_keys(struct np_region *region, unsigned int which)
{
	struct ib_mr **keys[] = NP_REGION_KEYS(region);
	unsigned int i = ARRAY_SIZE(keys);
	bool ok = true;

	lockdep_assert_held(&region->lock);
	while (i--)
		if (which & BIT(i))
			ok &= np_region_free_key(region, keys[i]);
	return ok;
}

/**
 * np_keys_free() - the keys that peers were given do not exist any more
 * @region: region that is gone and has no grants; its lock is held
 *
 * Context: process context.
 * Return: false: the driver could not destroy one.
 */
bool np_keys_free(struct np_region *region)
{
	return np_region_drop_keys(region, ~0U);
}

/**
 * np_keys_free_local() - the keys for the owner's work requests do not exist any more
 * @region: region that is gone; its lock is held
 *
 * Context: process context.
 * Return: false: the driver could not destroy one.
 */
bool np_keys_free_local(struct np_region *region)
{
	bool ok;

	lockdep_assert_held(&region->lock);
	ok = np_region_free_key(region, &region->sink_mr);
	return np_region_free_key(region, &region->source_mr) && ok;
}

/* A key that stays reaches stand-in pages only, and its umem the windows */
static void np_hold_free_key(struct np_hold *hold)
{
	struct np_region *region = hold->region;

	lockdep_assert_held(&region->lock);
	if (!hold->key)
		return;
	if (!np_region_free_key(region, &hold->key)) {
		hold->key = NULL;
		region->leaks = true;
		if (region->gone)
			np_region_leak(region);
	}
	guard(spinlock)(&region->hold_lock);
	if (!--region->lease_keys)
		wake_up(&region->unleased);
}

/**
 * np_hold_grant() - a lease is somebody's: make its key
 * @hold: hold of np_hold_alloc(), a lease
 * @addr: first address that it is of, in the region's space
 * @len: bytes
 * @rkey: set to the key; addresses under it are those under the region's read key, or, if it
 *	is for writing, under the write key
 *
 * With the rights of the region: whoever may write may read what he has written, too.
 *
 * Only from here on does the end of the region wait for the lease. A fault that is under way
 * for one may wait for memory for as long as the owner likes, and nobody could end that.
 *
 * Context: process context.
 * Return: 0, then np_hold_revoke() follows; -ENXIO if the region is gone, -ENOMEM, or what
 * the driver said.
 */
int np_hold_grant(struct np_hold *hold, u64 addr, u64 len, u32 *rkey)
{
	struct np_region *region = hold->region;
	u32 access = region->access & IB_ACCESS_REMOTE_READ;
	u64 start = np_region_read_addr(region);
	int ret;

	if (hold->write) {
		start = np_region_write_addr(region);
		access |= (region->access & NP_ACCESS_REMOTE_CHANGE) | IB_ACCESS_LOCAL_WRITE;
	}
	guard(mutex)(&region->lock);
	if (region->gone)
		return -ENXIO;
	ret = np_region_make_key(region, &hold->key, start + (addr - region->base), len, access);
	if (ret)
		return ret;
	scoped_guard(spinlock, &region->hold_lock)
		region->lease_keys++;
	*rkey = hold->key->rkey;
	return 0;
}
EXPORT_SYMBOL_GPL(np_hold_grant);

/**
 * np_hold_revoke() - a lease is nobody's any more: its key does not exist
 * @hold: hold; nothing happens if it has no key
 * @overdue: it was not given back
 *
 * Whatever was reported done under it is in the owner's page. np_hold_release() may follow.
 *
 * Context: process context.
 */
void np_hold_revoke(struct np_hold *hold, bool overdue)
{
	struct np_region *region = hold->region;

	guard(mutex)(&region->lock);
	if (hold->key && overdue)
		atomic64_inc(&region->count->overdue);
	np_hold_free_key(hold);
}
EXPORT_SYMBOL_GPL(np_hold_revoke);

static struct np_hold *np_hold_with_key(struct np_region *region)
{
	struct np_hold *hold;

	guard(spinlock)(&region->hold_lock);
	list_for_each_entry(hold, &region->holds, node) {
		if (hold->key)
			return hold;
	}
	return NULL;
}

/**
 * np_keys_free_leases() - the keys of leases that were not given back do not exist any more
 * @region: region that is gone
 *
 * Context: process context.
 */
void np_keys_free_leases(struct np_region *region)
{
	struct np_hold *hold;

	guard(mutex)(&region->lock);
	/* Under the lock one that has a key is not released */
	while ((hold = np_hold_with_key(region))) {
		atomic64_inc(&region->count->overdue);
		np_hold_free_key(hold);
	}
}

static int np_region_make_keys(struct np_region *region)
{
	unsigned long end = PAGE_ALIGN(region->start + region->length);
	size_t npages = (end - (region->start & PAGE_MASK)) >> PAGE_SHIFT;
	u32 change = region->access & NP_ACCESS_REMOTE_CHANGE;
	int ret;

	lockdep_assert_held(&region->lock);
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
		 * has a grant already, so grants do not say whether somebody was. One that
		 * cannot be destroyed is there for the next who asks.
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
