// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: key values that come again.
 *
 * Drivers use key values again. A peer asks what a value is before it uses it the first
 * time. "It is no unpinned region's" makes the peer use the value as it is, and ask no
 * more; but later the value may become the public key of an unpinned region, which
 * nobody can use as it is. So this answer comes with a promise: for RDMA_NP_PINNED_MS
 * no region gets this value.
 *
 * No request is posted with an answer that is not true any more:
 *
 * - The peer counts the time from before it asked, the owner counts it from when it
 *   promised, which is later. So what the peer posts before its time is over is posted
 *   before the owner's time is over.
 * - np_promise_none() and np_name_take() exclude each other by the lock of
 *   np_device.rkeys. If the promise comes first, np_name_take() sees it and the region
 *   gets another value. If the region comes first, np_promise_none() sees the region,
 *   and promises nothing.
 * - While a driver destroys the MR that had the value, nobody knows whether the region
 *   stays, so nothing is promised either. If it stays, it is what it was before, and the
 *   promises of before are of peers that may not reach it.
 * - np_promises_look() forgets a promise no sooner than NP_PROMISE_MS after it was made, which
 *   is twice the promised time, because the clocks of two hosts need not agree on how
 *   long a time is, and that of a virtual machine may stop for a while.
 * - A peer whose clock stops for longer than that uses the public key of a region as it
 *   is. That key has no remote rights, so the peer's HCA gets an access error, and no
 *   data.
 *
 * In the other direction, when the value of a dead region becomes that of pinned memory,
 * no promise is needed: the keys that the peer was given for the region stay in
 * quarantine and reach nothing, whoever uses them finds out that the region is gone,
 * and asks again.
 *
 * Promises are remembered in two bitmaps, by a hash of the value. Two values with the
 * same hash cost a registration another try, and nothing else. The number of promises
 * is bounded, so that a registration finds a value whatever the peers ask: at most
 * 2 * NP_PROMISE_MAX bits are set. One peer may have NP_PROMISE_USER_MAX of them, so that it
 * leaves some for the others, whatever it asks. Beyond a bound the answer comes without a
 * promise, and the peer asks for each request again.
 */
#include <kunit/visibility.h>
#include <linux/bitmap.h>
#include <linux/hash.h>
#include <linux/ktime.h>
#include <linux/slab.h>

#include "np_region.h"

/* How long a promise is remembered at least */
#define NP_PROMISE_MS	(2 * RDMA_NP_PINNED_MS)
#define NP_PROMISE_NS	((u64)NP_PROMISE_MS * NSEC_PER_MSEC)

/* Forget what is old enough. Under the lock of np_device.rkeys. */
static void np_promises_look(struct np_device *npdev)
{
	struct np_promises *made = npdev->promises;
	u64 now = ktime_get_ns();
	u64 age = now - made->turned;

	lockdep_assert_held(&npdev->rkeys.xa_lock);
	if (age < NP_PROMISE_NS)
		return;
	if (age < 2 * NP_PROMISE_NS)
		bitmap_copy(made->older, made->newer, NP_PROMISE_BITS);
	else
		bitmap_zero(made->older, NP_PROMISE_BITS);
	bitmap_zero(made->newer, NP_PROMISE_BITS);
	made->nr = 0;
	made->turned = now;
}

static struct np_promises *np_promises_get(struct np_device *npdev)
{
	struct np_promises *made = READ_ONCE(npdev->promises);

	if (made)
		return made;
	made = kvzalloc(sizeof(*made), GFP_KERNEL);
	if (!made)
		return NULL;
	made->turned = ktime_get_ns();
	xa_lock(&npdev->rkeys);
	if (npdev->promises) {
		xa_unlock(&npdev->rkeys);
		kvfree(made);
		return npdev->promises;
	}
	npdev->promises = made;
	xa_unlock(&npdev->rkeys);
	return made;
}

/**
 * np_promise_none() - say that a key is no unpinned region's that the peer may reach
 * @ibdev: device, held by a client
 * @rkey: the key
 * @region: the region that np_region_find_rkey() found, which the peer may not
 *	reach; or NULL
 * @user: of the peer that asks
 *
 * Context: process context.
 * Return: -EACCES: so it is, and stays for RDMA_NP_PINNED_MS; -ENXIO: so it is now;
 * -EAGAIN: it is another region's meanwhile.
 */
int np_promise_none(struct ib_device *ibdev, u32 rkey, struct np_region *region,
		    struct np_promise_user *user)
{
	struct np_device *npdev = np_device_get(ibdev);
	unsigned int bit = hash_32(rkey, NP_PROMISE_ORDER);
	struct np_region *named;
	struct np_promises *made;
	int ret = -ENXIO;

	if (!npdev)
		return ret;
	made = np_promises_get(npdev);

	xa_lock(&npdev->rkeys);
	named = xa_load(&npdev->rkeys, rkey);
	if (named && named->ending) {
		/* It may still become the region's again */
		ret = -ENXIO;
	} else if (named != region) {
		ret = -EAGAIN;
	} else if (made) {
		np_promises_look(npdev);
		if (user->turned != made->turned) {
			user->turned = made->turned;
			user->nr = 0;
		}
		if (test_bit(bit, made->newer)) {
			ret = -EACCES;
		} else if (made->nr < NP_PROMISE_MAX && user->nr < NP_PROMISE_USER_MAX) {
			__set_bit(bit, made->newer);
			made->nr++;
			user->nr++;
			ret = -EACCES;
		}
	}
	xa_unlock(&npdev->rkeys);
	np_device_put(npdev);
	return ret;
}
EXPORT_SYMBOL_GPL(np_promise_none);

/**
 * np_name_take() - let a key be the public key of a region
 * @npdev: device
 * @rkey: the key
 * @region: the region
 *
 * Context: process context.
 * Return: 0, then peers find @region by @rkey; -EADDRINUSE: a peer was promised that
 * it is none's, or it is still the name of a region that is ending; -ENOMEM.
 */
int np_name_take(struct np_device *npdev, u32 rkey, struct np_region *region)
{
	unsigned int bit = hash_32(rkey, NP_PROMISE_ORDER);
	struct np_promises *made;
	bool free = true;
	int ret;

	/* A place, which shows nothing: under the lock there is no memory to be had */
	ret = xa_insert(&npdev->rkeys, rkey, NULL, GFP_KERNEL);
	if (ret)
		return ret == -EBUSY ? -EADDRINUSE : ret;

	xa_lock(&npdev->rkeys);
	made = npdev->promises;
	if (made) {
		np_promises_look(npdev);
		free = !test_bit(bit, made->newer) &&
		       !test_bit(bit, made->older);
	}
	if (free)
		__xa_store(&npdev->rkeys, rkey, region, GFP_NOWAIT);
	xa_unlock(&npdev->rkeys);
	if (free)
		return 0;
	xa_release(&npdev->rkeys, rkey);
	return -EADDRINUSE;
}
EXPORT_SYMBOL_IF_KUNIT(np_name_take);
