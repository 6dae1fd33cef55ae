// SPDX-License-Identifier: GPL-2.0
/*
 * Holds that were granted to peers: their bounds, and their end.
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

VISIBLE_IF_KUNIT int np_held_reserve(struct np_peer *peer, struct np_owner *owner,
				     unsigned int pages)
{
	bool ok;
	int err;

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
					unsigned int pages)
{
	np_owner_unhold(owner, pages);
	spin_lock(&peer->lock);
	peer->held_pages -= pages;
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
	np_hold_release(held->hold);
	np_held_unreserve(peer, held->owner, held->pages);
	np_owner_put(held->owner);
	kfree(held);
}

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
 * @write: pages will be pinned for writing
 *
 * Context: process context
 * Return: the hold, for np_held_add() or np_held_drop(); -EBUSY: over a bound; -ENOMEM
 */
struct np_held *np_held_make(struct np_peer *peer, struct np_region *region,
			     struct np_owner *owner, unsigned int pages,
			     unsigned int write)
{
	struct np_charge charge;
	struct np_held *held;
	int err;

	err = np_held_reserve(peer, owner, pages);
	if (err)
		return ERR_PTR(err);
	np_region_charge(region, &charge);
	held = kzalloc(sizeof(*held), GFP_KERNEL_ACCOUNT);
	if (held)
		held->hold = np_hold_alloc(region, write);
	np_region_uncharge(&charge);
	if (!held || !held->hold) {
		kfree(held);
		np_held_unreserve(peer, owner, pages);
		return ERR_PTR(-ENOMEM);
	}
	INIT_WORK(&held->work, np_held_work);
	held->pages = pages;
	kref_get(&owner->ref);
	held->owner = owner;
	do
		held->id = get_random_u64();
	while (!held->id);
	return held;
}

/**
 * np_held_add - A hold is granted
 * @peer: to whom
 * @held: counts from here on, and belongs to the peer, who may be killed at once: it is
 *	  not looked at any more, not even when this returns true
 *
 * Return: false: the peer is dead
 */
bool np_held_add(struct np_peer *peer, struct np_held *held)
{
	held->expires = jiffies + msecs_to_jiffies(READ_ONCE(np_hold_ms));

	spin_lock(&peer->lock);
	if (peer->dead) {
		spin_unlock(&peer->lock);
		return false;
	}
	list_add_tail(&held->entry, &peer->holds);
	rb_add(&held->node, &peer->held, np_held_less);
	trace_np_hold_grant(peer->hca->ibdev, peer->qpn, held->id,
			    held->pages);
	if (queue_delayed_work(np_kill_wq, &peer->expire,
			       msecs_to_jiffies(READ_ONCE(np_hold_ms)) + 1))
		kref_get(&peer->ref);
	spin_unlock(&peer->lock);
	return true;
}

/* np_peer.expire, with a reference: ends the QP of a hold that was not given back. */
static void np_held_expire(struct work_struct *work)
{
	struct np_peer *peer = container_of(to_delayed_work(work),
					    struct np_peer, expire);
	struct np_held *held;
	bool expired = false;

	spin_lock(&peer->lock);
	held = list_first_entry_or_null(&peer->holds, struct np_held, entry);
	if (held && !peer->dead) {
		expired = time_after_eq(jiffies, held->expires);
		if (expired)
			trace_np_hold_expire(peer->hca->ibdev, peer->qpn,
					     held->id, held->pages);
		else if (queue_delayed_work(np_kill_wq, &peer->expire,
					    held->expires - jiffies + 1))
			kref_get(&peer->ref);
	}
	spin_unlock(&peer->lock);

	if (expired) {
		ibdev_warn_ratelimited(peer->hca->ibdev,
				       "nprdma: QP %u kept a hold for %u ms: ending it\n",
				       peer->qpn, READ_ONCE(np_hold_ms));
		np_peer_fail(peer);
	}
	np_peer_put(peer);
}

/**
 * np_held_release - A peer gives a hold back
 * @peer: the peer
 * @id: of the hold; nothing happens if there is none: it is a copy
 *
 * Context: completion handler: process context, does not sleep
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
		list_del(&held->entry);
		rb_erase(found, &peer->held);
		/* As in np_peer_begin() */
		peer->active++;
	}
	spin_unlock(&peer->lock);

	if (found) {
		kref_get(&peer->ref);
		held->peer = peer;
		queue_work(np_wq, &held->work);
	}
}

/**
 * np_held_init - Prepare a peer's holds
 * @peer: zeroed
 */
void np_held_init(struct np_peer *peer)
{
	INIT_LIST_HEAD(&peer->holds);
	peer->held = RB_ROOT;
	INIT_DELAYED_WORK(&peer->expire, np_held_expire);
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
	peer->held = RB_ROOT;
	spin_unlock(&peer->lock);
	list_for_each_entry_safe(held, next, &holds, entry)
		np_held_free(peer, held);
	if (cancel_delayed_work(&peer->expire))
		np_peer_put(peer);
}
