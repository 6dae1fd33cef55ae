// SPDX-License-Identifier: GPL-2.0
/*
 * Holds that were granted to peers: their bounds, and their end.
 *
 * A hold has to be given back within some time. One that is a lease may be kept until it
 * is recalled: the peer is told, and from then on it is as the others. One of some age is
 * recalled in any case, because the peer may have died without a word.
 */
#include <linux/moduleparam.h>
#include <linux/random.h>
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "np_proto.h"
#include "peer_trace.h"

VISIBLE_IF_KUNIT unsigned int np_hold_ms = 5000;
EXPORT_SYMBOL_IF_KUNIT(np_hold_ms);
module_param_named(hold_ms, np_hold_ms, uint, 0644);
MODULE_PARM_DESC(hold_ms,
		 "Time after which a hold not given back ends its QP, in ms");

VISIBLE_IF_KUNIT unsigned int np_lease_ms = 30000;
EXPORT_SYMBOL_IF_KUNIT(np_lease_ms);
module_param_named(lease_ms, np_lease_ms, uint, 0644);
MODULE_PARM_DESC(lease_ms,
		 "Time after which a lease is asked back from a peer that may be dead, in ms");

static int np_held_reserve_lease(struct np_peer *peer, struct np_region *region,
				 unsigned int pages)
{
	unsigned long own;
	bool ok;
	int err;

	spin_lock(&peer->lock);
	ok = !peer->dead && !READ_ONCE(peer->hca->leaving) &&
	     peer->nr_leases < NP_MAX_LEASES;
	if (peer->lease_lost && time_before(jiffies, peer->leases_from))
		ok = false;
	own = peer->leased_pages;
	peer->nr_leases += ok;
	peer->leased_pages += ok ? pages : 0;
	spin_unlock(&peer->lock);
	if (!ok)
		return -EBUSY;
	err = np_lease_reserve(region, pages, own);
	if (err) {
		spin_lock(&peer->lock);
		peer->nr_leases--;
		peer->leased_pages -= pages;
		spin_unlock(&peer->lock);
	}
	return err;
}

/* @lease: the region that it is of; NULL: it is no lease */
VISIBLE_IF_KUNIT int np_held_reserve(struct np_peer *peer, struct np_owner *owner,
				     struct np_region *lease, unsigned int pages)
{
	bool ok;
	int err;

	if (lease)
		return np_held_reserve_lease(peer, lease, pages);
	spin_lock(&peer->lock);
	ok = !peer->dead && peer->held_pages + pages <= NP_HELD_QP;
	if (ok)
		peer->held_pages += pages;
	spin_unlock(&peer->lock);
	if (!ok)
		return -EBUSY;
	err = np_owner_hold(owner, pages);
	if (err) {
		spin_lock(&peer->lock);
		peer->held_pages -= pages;
		spin_unlock(&peer->lock);
	}
	return err;
}
EXPORT_SYMBOL_IF_KUNIT(np_held_reserve);

VISIBLE_IF_KUNIT void np_held_unreserve(struct np_peer *peer, struct np_owner *owner,
					struct np_region *lease, unsigned int pages)
{
	if (lease)
		np_lease_unreserve(lease, pages);
	else
		np_owner_unhold(owner, pages);
	spin_lock(&peer->lock);
	if (lease) {
		peer->nr_leases--;
		peer->leased_pages -= pages;
	} else {
		peer->held_pages -= pages;
	}
	spin_unlock(&peer->lock);
}
EXPORT_SYMBOL_IF_KUNIT(np_held_unreserve);

/**
 * np_held_drop - A hold was not granted, or ends
 * @peer: for whom it was made
 * @held: of np_held_make(); freed
 */
void np_held_drop(struct np_peer *peer, struct np_held *held)
{
	/* It is not recalled any more when this returns; nobody reaches its pages before they go */
	if (held->lease)
		np_hold_revoke(held->hold, held->expired);
	np_hold_release(held->hold);
	np_held_unreserve(peer, held->owner, held->lease, held->pages);
	if (held->lease)
		np_region_put(held->lease);
	np_owner_put(held->owner);
	np_trans_cancel(&held->tell);
	/* Else it runs, and finds that nothing is granted */
	if (cancel_delayed_work(&held->wanted_work)) {
		np_trans_put(&held->tell);
		np_peer_put(peer);
	}
	np_trans_put(&held->tell);
}
EXPORT_SYMBOL_IF_KUNIT(np_held_drop);

static void np_held_free(struct np_peer *peer, struct np_held *held)
{
	trace_np_hold_release(peer->hca->ibdev, peer->qpn, held->id,
			      held->pages);
	np_held_drop(peer, held);
}

static void np_held_work(struct work_struct *work)
{
	struct np_held *held = container_of(work, struct np_held, work);
	struct np_peer *peer = held->peer;

	np_held_free(peer, held);
	np_peer_end(peer);
	np_peer_put(peer);
}

/* Recalls */

/* Under the peer's lock, of a lease that it has: true: np_trans_send() follows. */
static bool np_held_want(struct np_peer *peer, struct np_held *held)
{
	lockdep_assert_held(&peer->lock);
	if (!held->recalled) {
		held->recalled = true;
		held->expires = jiffies + msecs_to_jiffies(READ_ONCE(np_hold_ms));
		list_move_tail(&held->entry, &peer->holds);
		if (queue_delayed_work(np_kill_wq, &peer->expire,
				       held->expires - jiffies + 1))
			kref_get(&peer->ref);
	}
	if (!list_empty(&held->tell.entry))
		return false;
	np_trans_list(&held->tell);
	return true;
}

/* With references to both. */
static void np_held_wanted(struct work_struct *work)
{
	struct np_held *held = container_of(to_delayed_work(work), struct np_held,
					    wanted_work);
	struct np_peer *peer = held->peer;
	bool tell;

	spin_lock(&peer->lock);
	held->wanted = true;
	tell = !peer->dead && held->granted && np_held_want(peer, held);
	spin_unlock(&peer->lock);
	if (tell)
		np_trans_send(&held->tell);
	np_trans_put(&held->tell);
	np_peer_put(peer);
}

static void np_held_want_in(struct np_held *held, unsigned int ms)
{
	struct np_peer *peer = held->peer;

	kref_get(&peer->ref);
	kref_get(&held->tell.ref);
	if (queue_delayed_work(np_wq, &held->wanted_work, msecs_to_jiffies(ms)))
		return;
	np_trans_put(&held->tell);
	np_peer_put(peer);
}

/* Under the lock, so that who ends it finds the work */
static void np_held_want_again(struct np_held *held)
{
	struct np_peer *peer = held->peer;

	spin_lock(&peer->lock);
	if (!peer->dead && held->granted)
		np_held_want_in(held, NP_RECALL_AGAIN_MS);
	spin_unlock(&peer->lock);
}

/* Under the peer's lock: leases of some age are asked back when it is time. */
static void np_held_renew_in(struct np_peer *peer, unsigned long delay)
{
	delay = min(delay, msecs_to_jiffies(NP_RENEW_MS));
	if (queue_delayed_work(np_wq, &peer->renew, delay + 1))
		kref_get(&peer->ref);
}

/*
 * np_peer.renew, with a reference: a peer that is gone gives back nothing, and says nothing.
 * One that is there asks for what it still uses once more.
 */
static void np_held_renew(struct work_struct *work)
{
	struct np_peer *peer = container_of(to_delayed_work(work), struct np_peer, renew);
	unsigned long age = msecs_to_jiffies(READ_ONCE(np_lease_ms));
	struct np_held *held;

	spin_lock(&peer->lock);
	/* It is empty if the peer is dead; in the order in which they were granted */
	list_for_each_entry(held, &peer->leases, entry) {
		if (time_before(jiffies, held->granted_at + age)) {
			np_held_renew_in(peer, held->granted_at + age - jiffies);
			break;
		}
		np_hold_recall(held->hold);
	}
	spin_unlock(&peer->lock);
	np_peer_put(peer);
}

/* np_recall.fn: the hold stays meanwhile, and with it its peer. */
static void np_held_recalled(struct np_recall *recall)
{
	np_held_want_in(container_of(recall, struct np_held, recall), 0);
}

static void np_recall_done(struct np_trans *tell, u32 status,
			   const struct np_msg *answer)
{
	struct np_held *held = container_of(tell, struct np_held, tell);

	if (answer && status == RDMA_NP_OK)
		return;
	if (answer && status == RDMA_NP_GONE)
		np_held_release(tell->peer, held->id);
	else
		np_held_want_again(held);
}

static void np_recall_free(struct np_trans *tell)
{
	kfree(container_of(tell, struct np_held, tell));
}

static int np_held_cmp(const void *id, const struct rb_node *node)
{
	u64 its = rb_entry(node, struct np_held, node)->id;

	return *(const u64 *)id < its ? -1 : *(const u64 *)id > its;
}

static bool np_held_less(struct rb_node *held, const struct rb_node *other)
{
	return np_held_cmp(&rb_entry(held, struct np_held, node)->id, other) < 0;
}

/**
 * np_held_make - Prepare a hold for a peer
 * @peer: for whom
 * @region: of which
 * @owner: of that, who pays
 * @pages: what it counts in the bounds
 * @flags: RDMA_NP_FAULT_WRITE: pages will be pinned for writing; RDMA_NP_FAULT_LEASE
 *
 * Context: process context
 * Return: the hold, for np_held_add() or np_held_drop(); -EBUSY: over a bound; -ENOMEM
 */
struct np_held *np_held_make(struct np_peer *peer, struct np_region *region,
			     struct np_owner *owner, unsigned int pages, u32 flags)
{
	struct np_region *lease = flags & RDMA_NP_FAULT_LEASE ? region : NULL;
	struct np_charge charge;
	struct np_held *held;
	int err;

	err = np_held_reserve(peer, owner, lease, pages);
	if (err)
		return ERR_PTR(err);
	np_region_charge(region, &charge);
	held = kzalloc(sizeof(*held), GFP_KERNEL_ACCOUNT);
	if (!held)
		goto uncharge;
	INIT_WORK(&held->work, np_held_work);
	INIT_DELAYED_WORK(&held->wanted_work, np_held_wanted);
	np_trans_init(&held->tell, peer, NP_MSG_RECALL, np_recall_done, np_recall_free);
	held->peer = peer;
	held->pages = pages;
	held->lease = lease;
	do
		held->id = get_random_u64();
	while (!held->id);
	held->tell.msg.hold_id = held->id;
	held->recall.fn = np_held_recalled;
	/* From here on it may be recalled */
	held->hold = np_hold_alloc(region, flags & RDMA_NP_FAULT_WRITE,
				   lease ? &held->recall : NULL);
	if (!held->hold)
		goto free;
	np_region_uncharge(&charge);
	if (lease)
		np_region_get(lease);
	kref_get(&owner->ref);
	held->owner = owner;
	return held;

free:
	np_trans_put(&held->tell);
uncharge:
	np_region_uncharge(&charge);
	np_held_unreserve(peer, owner, lease, pages);
	return ERR_PTR(-ENOMEM);
}
EXPORT_SYMBOL_IF_KUNIT(np_held_make);

/**
 * np_held_shrink - A lease is of fewer pages
 * @held: not granted yet
 * @pages: that it is told to be of; what it has pinned counts in any case
 */
void np_held_shrink(struct np_held *held, unsigned int pages)
{
	unsigned int rest;

	pages = max_t(unsigned long, pages, np_hold_pages(held->hold));
	if (WARN_ON(pages > held->pages))
		return;
	rest = held->pages - pages;

	np_lease_unreserve(held->lease, rest);
	spin_lock(&held->peer->lock);
	held->peer->leased_pages -= rest;
	spin_unlock(&held->peer->lock);
	held->pages = pages;
}
EXPORT_SYMBOL_IF_KUNIT(np_held_shrink);

/**
 * np_held_add - A hold is granted
 * @peer: to whom
 * @held: counts from here on, and belongs to the peer, who may be killed at once: it is
 *	  not looked at any more by the caller, not even when this returns true
 *
 * Return: false: the peer is dead
 */
bool np_held_add(struct np_peer *peer, struct np_held *held)
{
	unsigned long delay = msecs_to_jiffies(READ_ONCE(np_hold_ms));
	bool tell = false;

	spin_lock(&peer->lock);
	if (peer->dead) {
		spin_unlock(&peer->lock);
		return false;
	}
	rb_add(&held->node, &peer->held, np_held_less);
	trace_np_hold_grant(peer->hca->ibdev, peer->qpn, held->id,
			    held->pages);
	held->granted = true;
	held->granted_at = jiffies;
	held->expires = held->granted_at + delay;
	if (held->lease) {
		list_add_tail(&held->entry, &peer->leases);
		np_held_renew_in(peer, msecs_to_jiffies(READ_ONCE(np_lease_ms)));
		/* It was recalled before it was granted; the peer answers BUSY until it knows it */
		tell = held->wanted && np_held_want(peer, held);
		if (tell)
			kref_get(&held->tell.ref);
	} else {
		list_add_tail(&held->entry, &peer->holds);
		if (queue_delayed_work(np_kill_wq, &peer->expire, delay + 1))
			kref_get(&peer->ref);
	}
	spin_unlock(&peer->lock);
	if (tell) {
		np_trans_send(&held->tell);
		np_trans_put(&held->tell);
	}
	return true;
}

/* Under the peer's lock: a hold that it has ends; np_held_free() and np_peer_end() follow */
static void np_held_take(struct np_peer *peer, struct np_held *held)
{
	lockdep_assert_held(&peer->lock);
	list_del(&held->entry);
	rb_erase(&held->node, &peer->held);
	held->granted = false;
	/* As in np_peer_begin() */
	peer->active++;
}

/*
 * Under the peer's lock: the next hold that was not given back in time, if it is a lease.
 * *@fail: it is none. Else the work comes again when there may be one.
 */
static struct np_held *np_held_expired(struct np_peer *peer, bool *fail)
{
	struct np_held *held;

	lockdep_assert_held(&peer->lock);
	held = list_first_entry_or_null(&peer->holds, struct np_held, entry);
	if (!held || peer->dead)
		return NULL;
	if (time_before(jiffies, held->expires)) {
		if (queue_delayed_work(np_kill_wq, &peer->expire,
				       held->expires - jiffies + 1))
			kref_get(&peer->ref);
		return NULL;
	}
	trace_np_hold_expire(peer->hca->ibdev, peer->qpn, held->id, held->pages);
	*fail = !held->lease;
	if (*fail)
		return NULL;
	held->expired = true;
	peer->lease_lost = true;
	peer->leases_from = jiffies + msecs_to_jiffies(READ_ONCE(np_hold_ms));
	np_held_take(peer, held);
	return held;
}

/*
 * np_peer.expire, with a reference: ends leases that were not given back, with their keys;
 * and the QP of another hold, which has none.
 */
static void np_held_expire(struct work_struct *work)
{
	struct np_peer *peer = container_of(to_delayed_work(work),
					    struct np_peer, expire);
	struct np_held *held;
	bool fail = false;

	do {
		spin_lock(&peer->lock);
		held = np_held_expired(peer, &fail);
		spin_unlock(&peer->lock);
		if (held) {
			np_held_free(peer, held);
			np_peer_end(peer);
		}
	} while (held);

	if (fail) {
		np_peer_refuse(peer, "nprdma: QP %u kept a hold for too long: ending it",
			       peer->qpn);
		np_peer_fail(peer);
	}
	np_peer_put(peer);
}

/**
 * np_held_release - A peer gives a hold back
 * @peer: the peer
 * @id: of the hold; nothing happens if there is none: it is a copy
 *
 * Context: handler of what arrives: process context, does not sleep
 */
void np_held_release(struct np_peer *peer, u64 id)
{
	struct rb_node *found = NULL;
	struct np_held *held;

	spin_lock(&peer->lock);
	if (!peer->dead)
		found = rb_find(&id, &peer->held, np_held_cmp);
	if (found) {
		held = rb_entry(found, struct np_held, node);
		np_held_take(peer, held);
	}
	spin_unlock(&peer->lock);

	if (found) {
		kref_get(&peer->ref);
		queue_work(np_wq, &held->work);
	}
}

/**
 * np_held_answered - A FAULT is answered once more
 * @peer: of whom; its lock is held
 * @answer: what was answered first
 *
 * A lease may have ended since, because it was not given back by who has never heard of it:
 * then there is none (I9). What was not recalled in time tells its end by itself.
 */
void np_held_answered(struct np_peer *peer, struct np_msg *answer)
{
	struct rb_node *found;

	lockdep_assert_held(&peer->lock);
	if (!answer->faulted.lease_key)
		return;
	found = rb_find(&answer->faulted.hold_id, &peer->held, np_held_cmp);
	if (found && !np_region_is_gone(rb_entry(found, struct np_held, node)->lease))
		return;
	answer->faulted.hold_id = 0;
	answer->faulted.lease_key = 0;
}

/**
 * np_held_init - Prepare a peer's holds
 * @peer: zeroed
 */
void np_held_init(struct np_peer *peer)
{
	INIT_LIST_HEAD(&peer->holds);
	INIT_LIST_HEAD(&peer->leases);
	peer->held = RB_ROOT;
	INIT_DELAYED_WORK(&peer->expire, np_held_expire);
	INIT_DELAYED_WORK(&peer->renew, np_held_renew);
}

/**
 * np_held_kill - Release all holds of a peer
 * @peer: dead, and nobody serves it
 */
void np_held_kill(struct np_peer *peer)
{
	struct np_held *held, *next;
	LIST_HEAD(holds);

	spin_lock(&peer->lock);
	list_splice_init(&peer->holds, &holds);
	list_splice_init(&peer->leases, &holds);
	peer->held = RB_ROOT;
	list_for_each_entry(held, &holds, entry)
		held->granted = false;
	spin_unlock(&peer->lock);
	list_for_each_entry_safe(held, next, &holds, entry)
		np_held_free(peer, held);
	if (cancel_delayed_work(&peer->expire))
		np_peer_put(peer);
	if (cancel_delayed_work(&peer->renew))
		np_peer_put(peer);
}

/**
 * np_held_leave - The device is leaving, and waits for no peer
 * @peer: of the device
 *
 * Its leases end.
 */
void np_held_leave(struct np_peer *peer)
{
	struct np_held *held, *next;

	spin_lock(&peer->lock);
	list_for_each_entry_safe(held, next, &peer->holds, entry) {
		if (held->lease)
			list_move(&held->entry, &peer->leases);
	}
	list_for_each_entry(held, &peer->leases, entry) {
		held->recalled = true;
		held->expires = jiffies;
	}
	if (!peer->dead && !list_empty(&peer->leases)) {
		list_splice_init(&peer->leases, &peer->holds);
		kref_get(&peer->ref);
		if (mod_delayed_work(np_kill_wq, &peer->expire, 0))
			np_peer_put(peer);
	}
	spin_unlock(&peer->lock);
}
