// SPDX-License-Identifier: GPL-2.0
/*
 * Grants: which peers were given the keys of which regions, and how they hear that
 * a region is gone.
 */
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "np_proto.h"
#include "peer_trace.h"

/**
 * struct np_pgrant - the other end of a peer was given a region's keys
 * @grant: the region's part
 * @tell: tells the other end that the region is gone; its references are those
 *        of the whole
 * @wait: in np_peer.to_tell or tell_again
 * @drop: ungrants
 * @peer: the peer
 * @owner: of the region; reference
 * @id: the region's id
 * @seq: tid of the newest RESOLVE that was answered with it
 * @gone: the region is gone
 * @ungranted: the other end is told no more
 *
 * What a dead region has (keys, windows, addresses) stays until the other end says that
 * it does not use it, in which it may be slow, or malicious.  So GONEs take turns: there
 * are NP_MAX_TELLING under way, whatever they are answered.  The next one goes when one has
 * ended: of those that were never sent in any case, of the others only if there was
 * progress, or after a pause, which grows.  And what waits so is bounded.
 */
struct np_pgrant {
	struct np_grant grant;
	struct np_trans tell;
	struct list_head wait;
	struct work_struct drop;
	struct np_peer *peer;
	struct np_owner *owner;
	u64 id;
	u64 seq;
	bool gone;
	bool ungranted;
};

static void np_pgrant_free(struct np_trans *tell)
{
	struct np_pgrant *pg = container_of(tell, struct np_pgrant, tell);

	np_owner_put(pg->owner);
	kfree(pg);
}

/* GONEs for the places that are free, @again of them at most of those that were sent. */
static void np_gone_next(struct np_peer *peer, unsigned int again)
{
	struct np_pgrant *pg;

	for (;;) {
		spin_lock(&peer->lock);
		pg = list_first_entry_or_null(&peer->to_tell, struct np_pgrant,
					      wait);
		if (!pg && again) {
			pg = list_first_entry_or_null(&peer->tell_again,
						      struct np_pgrant, wait);
			again--;
		}
		if (!pg || peer->dead || peer->telling >= NP_MAX_TELLING) {
			spin_unlock(&peer->lock);
			return;
		}
		list_del_init(&pg->wait);
		peer->telling++;
		np_trans_list(&pg->tell);
		kref_get(&pg->tell.ref);
		spin_unlock(&peer->lock);

		trace_np_gone_send(peer->hca->ibdev, peer->qpn, pg->id, RDMA_NP_OK);
		np_trans_send(&pg->tell);
		np_trans_put(&pg->tell);
	}
}

static unsigned long np_gone_pause(struct np_peer *peer)
{
	return peer->gone_pause ?: msecs_to_jiffies(NP_GONE_MIN_MS);
}

/* Under the peer's lock: the other end let go of one, so maybe it does of the others. */
static void np_gone_progress(struct np_peer *peer)
{
	lockdep_assert_held(&peer->lock);
	if (!peer->gone_pause)
		return;
	peer->gone_pause = 0;
	if (!peer->dead && !list_empty(&peer->tell_again) &&
	    !mod_delayed_work(np_wq, &peer->gone_again, np_gone_pause(peer)))
		kref_get(&peer->ref);
}

/* np_peer.gone_again, with a reference. */
static void np_gone_again(struct work_struct *work)
{
	struct np_peer *peer = container_of(to_delayed_work(work),
					    struct np_peer, gone_again);

	spin_lock(&peer->lock);
	peer->gone_pause = min(2 * np_gone_pause(peer),
			       msecs_to_jiffies(NP_GONE_MAX_MS));
	if (!peer->dead && !list_empty(&peer->tell_again) &&
	    queue_delayed_work(np_wq, &peer->gone_again, peer->gone_pause))
		kref_get(&peer->ref);
	spin_unlock(&peer->lock);
	np_gone_next(peer, NP_MAX_TELLING);
	np_peer_put(peer);
}

/* It is not granted any more: no GONE of it is under way, nor will be. */
static void np_gone_stop(struct np_pgrant *pg)
{
	struct np_peer *peer = pg->peer;
	bool gone = pg->gone, cancelled;

	spin_lock(&peer->lock);
	pg->ungranted = true;
	list_del_init(&pg->wait);
	peer->nr_gone -= gone;
	spin_unlock(&peer->lock);
	cancelled = np_trans_cancel(&pg->tell);
	np_trans_put(&pg->tell);
	if (!gone)
		return;
	spin_lock(&peer->lock);
	peer->telling -= cancelled;
	np_gone_progress(peer);
	spin_unlock(&peer->lock);
	np_gone_next(peer, 1);
}

/**
 * np_pgrant_drop - A peer does not have a region's keys any more
 * @pg: the grant; freed
 *
 * Context: process context, under np_peer.ctl
 */
void np_pgrant_drop(struct np_pgrant *pg)
{
	struct np_peer *peer = pg->peer;

	lockdep_assert_held(&peer->ctl);
	xa_erase(&peer->grants, pg->id);
	peer->nr_grants--;
	trace_np_ungrant(peer->hca->ibdev, peer->qpn, pg->id, RDMA_NP_OK);
	/* After this np_pgrant_gone() is not called for it any more */
	np_region_ungrant(&pg->grant);
	np_owner_ungrant(pg->owner);
	np_gone_stop(pg);
}
EXPORT_SYMBOL_IF_KUNIT(np_pgrant_drop);

static void np_pgrant_drop_work(struct work_struct *work)
{
	struct np_pgrant *pg = container_of(work, struct np_pgrant, drop);
	struct np_peer *peer = pg->peer;

	mutex_lock(&peer->ctl);
	/* Else it was dropped meanwhile */
	if (xa_load(&peer->grants, pg->id) == pg)
		np_pgrant_drop(pg);
	mutex_unlock(&peer->ctl);
	np_trans_put(&pg->tell);
	np_peer_put(peer);
}

/*
 * The other end does not use the keys (OK), or does not know the QP; or else it has its
 * turn again.
 */
static void np_gone_done(struct np_trans *tell, u32 status,
			 const struct np_msg *answer)
{
	struct np_pgrant *pg = container_of(tell, struct np_pgrant, tell);
	struct np_peer *peer = pg->peer;
	bool over = answer && status != RDMA_NP_BUSY;

	spin_lock(&peer->lock);
	peer->telling--;
	/* If it is our QP that died, who kills the peer drops the grant */
	if (!over && !peer->dead && !pg->ungranted) {
		list_add_tail(&pg->wait, &peer->tell_again);
		if (queue_delayed_work(np_wq, &peer->gone_again,
				       np_gone_pause(peer)))
			kref_get(&peer->ref);
	}
	spin_unlock(&peer->lock);
	if (over) {
		kref_get(&tell->ref);
		kref_get(&peer->ref);
		queue_work(np_wq, &pg->drop);
	}
	np_gone_next(peer, over);
}

/* np_peer.too_many_gone, with a reference. */
static void np_grant_too_many(struct work_struct *work)
{
	struct np_peer *peer = container_of(work, struct np_peer, too_many_gone);

	np_peer_refuse(peer, "nprdma: QP %u kept the keys of more than %u dead regions: ending it",
		       peer->qpn, NP_MAX_GONE);
	np_peer_fail(peer);
	np_peer_put(peer);
}

/* np_grant.gone: under the region's lock, so @grant stays. */
static void np_pgrant_gone(struct np_grant *grant)
{
	struct np_pgrant *pg = container_of(grant, struct np_pgrant, grant);
	struct np_peer *peer = pg->peer;
	bool too_many;

	spin_lock(&peer->lock);
	pg->gone = true;
	list_add_tail(&pg->wait, &peer->to_tell);
	too_many = ++peer->nr_gone > NP_MAX_GONE;
	spin_unlock(&peer->lock);
	np_gone_next(peer, 0);
	if (!too_many)
		return;
	/* The QP goes to the error state, and then the keys go */
	kref_get(&peer->ref);
	if (!np_peer_queue_kill(&peer->too_many_gone))
		np_peer_put(peer);
}

/**
 * np_pgrant_find - The grant of a region's keys to a peer
 * @peer: the peer
 * @id: of the region
 *
 * Context: under np_peer.ctl
 * Return: the grant, or NULL
 */
struct np_pgrant *np_pgrant_find(struct np_peer *peer, u64 id)
{
	lockdep_assert_held(&peer->ctl);
	return xa_load(&peer->grants, id);
}

/**
 * np_pgrant_resolved - A RESOLVE is answered with a grant's keys
 * @pg: the grant
 * @tid: of the RESOLVE
 *
 * Context: under np_peer.ctl
 */
void np_pgrant_resolved(struct np_pgrant *pg, u64 tid)
{
	pg->seq = max(pg->seq, tid);
}

/**
 * np_pgrant_make - A peer will be given a region's keys
 * @peer: the peer; has no grant of it
 * @region: the region, whose owner pays: see np_region_charge()
 *
 * Context: process context, under np_peer.ctl
 * Return: the grant; -EBUSY: over a bound; -ENXIO: the region is gone; -ENOMEM
 */
struct np_pgrant *np_pgrant_make(struct np_peer *peer, struct np_region *region)
{
	struct np_pgrant *pg;
	int err;

	/* What is being forgotten makes room */
	if (peer->nr_grants >= NP_MAX_GRANTS)
		return ERR_PTR(-EBUSY);
	pg = kzalloc(sizeof(*pg), GFP_KERNEL_ACCOUNT);
	if (!pg)
		return ERR_PTR(-ENOMEM);
	pg->owner = np_owner_get(peer->hca, np_region_mm(region));
	if (!pg->owner) {
		kfree(pg);
		return ERR_PTR(-ENOMEM);
	}
	pg->peer = peer;
	pg->id = np_region_id(region);
	INIT_LIST_HEAD(&pg->wait);
	INIT_WORK(&pg->drop, np_pgrant_drop_work);
	np_trans_init(&pg->tell, peer, NP_MSG_GONE, np_gone_done,
		      np_pgrant_free);
	pg->tell.msg.forget.region_id = pg->id;

	if (!np_owner_grant(pg->owner)) {
		err = -EBUSY;
		goto err_free;
	}
	/* From here on it may be told that the region is gone */
	pg->grant.gone = np_pgrant_gone;
	err = np_region_grant(region, &pg->grant);
	if (err)
		goto err_owner;
	err = xa_err(xa_store(&peer->grants, pg->id, pg, GFP_KERNEL_ACCOUNT));
	if (err)
		goto err_ungrant;
	peer->nr_grants++;
	return pg;

err_ungrant:
	np_region_ungrant(&pg->grant);
	np_owner_ungrant(pg->owner);
	np_gone_stop(pg);
	return ERR_PTR(err);
err_owner:
	np_owner_ungrant(pg->owner);
err_free:
	np_trans_put(&pg->tell);
	return ERR_PTR(err);
}
EXPORT_SYMBOL_IF_KUNIT(np_pgrant_make);

/**
 * np_grant_begin - Count a FAULT of a region whose keys a peer was given
 * @peer: the peer
 * @id: of the region
 * @depth: FAULTs of the peer that are under way, with this one
 * @owner: set to the owner of the region's memory, with a reference; then
 *	   np_owner_serve() and np_owner_end() must follow
 *
 * No reference is taken that would be given back here: the last one of a region
 * unmaps its windows, which sleeps.
 *
 * Context: handler of what arrives
 * Return: the region with a reference; -ENXIO: there is none; -EBUSY: over a bound
 */
struct np_region *np_grant_begin(struct np_peer *peer, u64 id, unsigned int depth,
				 struct np_owner **owner)
{
	struct np_region *region = ERR_PTR(-ENXIO);
	struct np_pgrant *pg;

	xa_lock(&peer->grants);
	pg = xa_load(&peer->grants, id);
	if (pg && np_owner_begin(pg->owner, depth)) {
		kref_get(&pg->owner->ref);
		*owner = pg->owner;
		region = pg->grant.region;
		np_region_get(region);
	} else if (pg) {
		region = ERR_PTR(-EBUSY);
	}
	xa_unlock(&peer->grants);
	return region;
}

/**
 * np_grant_forget - A peer does not use a region's keys any more
 * @peer: the peer
 * @msg: its FORGET
 *
 * Context: process context, under np_peer.ctl
 */
void np_grant_forget(struct np_peer *peer, const struct np_msg *msg)
{
	struct np_pgrant *pg = np_pgrant_find(peer, msg->forget.region_id);

	/* A late copy does not undo a newer RESOLVE */
	if (pg && pg->seq <= msg->forget.seq)
		np_pgrant_drop(pg);
}

/**
 * np_grant_init - Prepare a peer's grants
 * @peer: zeroed
 */
void np_grant_init(struct np_peer *peer)
{
	INIT_LIST_HEAD(&peer->to_tell);
	INIT_LIST_HEAD(&peer->tell_again);
	INIT_DELAYED_WORK(&peer->gone_again, np_gone_again);
	INIT_WORK(&peer->too_many_gone, np_grant_too_many);
}

/**
 * np_grant_kill - Drop all grants of a peer
 * @peer: dead, and nobody serves it
 */
void np_grant_kill(struct np_peer *peer)
{
	struct np_pgrant *pg;
	unsigned long id;

	if (cancel_delayed_work(&peer->gone_again))
		np_peer_put(peer);
	mutex_lock(&peer->ctl);
	xa_for_each(&peer->grants, id, pg)
		np_pgrant_drop(pg);
	mutex_unlock(&peer->ctl);
}
