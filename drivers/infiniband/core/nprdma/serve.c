// SPDX-License-Identifier: GPL-2.0
/*
 * Serving a peer: what arrives, and what we do about it.
 *
 * A request is obeyed if it comes from a kernel, the QP it names is ours, is connected
 * to the QP it claims to come from at the address it came from, the request carries the
 * secret that this address was told (but RESOLVE, whose answer tells it), and the region
 * belongs to that QP's PD: exactly those who could have used the rkey of a pinned region.
 *
 * np_receive() runs in the handler of a completion, with all the port's other MADs
 * behind it, so it never sleeps.  It answers peers where that needs no waiting; FAULTs go
 * to a queue of the memory's owner, who may keep them waiting, and the rest to one of
 * ours.  So do answers to those who are no peers: to make an address handle may take a
 * second, in which a neighbour is looked for.  Everything that is queued is counted; over
 * a bound the answer is BUSY, or there is none, and no memory is spent.
 *
 * A FAULT is executed once, however often it arrives: see struct np_lane.
 */
#include <linux/moduleparam.h>
#include <linux/random.h>
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "../core_priv.h"
#include "../restrack.h"
#include "np_proto.h"
#include "np_region.h"
#include "trace.h"

VISIBLE_IF_KUNIT unsigned int np_hold_ms = 5000;
EXPORT_SYMBOL_IF_KUNIT(np_hold_ms);
module_param_named(nprdma_hold_ms, np_hold_ms, uint, 0644);
MODULE_PARM_DESC(nprdma_hold_ms,
		 "Time after which a hold not given back ends its QP, in ms");

static unsigned int np_fault_around = 16;
module_param_named(nprdma_fault_around, np_fault_around, uint, 0644);
MODULE_PARM_DESC(nprdma_fault_around,
		 "Pages of an aligned block that come with a fault for reading if the owner has them, at most 512; 1: none");

/**
 * struct np_held - a hold that we granted
 * @entry: in np_peer.holds, oldest first
 * @node: in np_peer.held
 * @work: releases it
 * @peer: reference while @work is queued
 * @hold: the region's
 * @id: cannot be guessed, and is looked up in its own peer only
 * @pages: what it counts in the bounds
 * @expires: jiffies
 */
struct np_held {
	struct list_head entry;
	struct rb_node node;
	struct work_struct work;
	struct np_peer *peer;
	struct np_hold *hold;
	u64 id;
	unsigned int pages;
	unsigned long expires;
};

/**
 * struct np_pgrant - the other end of a peer was given a region's keys
 * @grant: the region's part
 * @gone: tells the other end that the region died; its references are those
 *        of the whole
 * @wait: in np_peer.untold or told
 * @drop: ungrants
 * @peer: the peer
 * @id: the region's id
 * @seq: tid of the newest RESOLVE that was answered with it
 * @dead: the region died
 * @dropped: is told no more
 *
 * What a dead region has (keys, windows, addresses) stays until the other end says that
 * it does not use it, in which it may be slow, or malicious.  So GONEs take turns: there
 * are NP_MAX_GONE under way, whatever they are answered.  The next one goes when one has
 * ended: of those that were never sent in any case, of the others only if there was
 * progress, or after a pause, which grows.  And what waits so is bounded.
 */
struct np_pgrant {
	struct np_grant grant;
	struct np_trans gone;
	struct list_head wait;
	struct work_struct drop;
	struct np_peer *peer;
	u64 id;
	u64 seq;
	bool dead;
	bool dropped;
};

/**
 * struct np_serve_lane - a lane of the other end
 * @lane: what was answered in it
 * @job: serves the FAULT
 * @peer: reference while it is served
 * @region: reference while it is served
 * @msg: the FAULT
 */
struct np_serve_lane {
	struct np_lane lane;
	struct np_job job;
	struct np_peer *peer;
	struct np_region *region;
	struct np_msg msg;
};

struct np_serve {
	struct np_serve_lane lanes[NP_LANES];
};

/**
 * struct np_mad_from - what it takes to answer a MAD
 * @port: where it arrived
 * @wc: its completion
 * @grh: its GRH, if the completion says that there is one
 */
struct np_mad_from {
	struct np_port *port;
	struct ib_wc wc;
	struct ib_grh grh;
};

/**
 * struct np_asked - a RESOLVE or FORGET that waits for its turn
 * @work: serves it
 * @peer: reference; NULL: not a peer, or not yet
 * @mad: from a stranger; of a peer's only the port
 * @from: where it came from
 * @msg: the request
 */
struct np_asked {
	struct work_struct work;
	struct np_peer *peer;
	struct np_mad_from mad;
	struct np_addr from;
	struct np_msg msg;
};

/**
 * struct np_refusal - an answer to who is no peer
 * @work: sends it
 * @mad: to whom
 * @answer: the answer
 */
struct np_refusal {
	struct work_struct work;
	struct np_mad_from mad;
	struct np_msg answer;
};

/* --- answers -------------------------------------------------------------------- */

static void np_answer_init(struct np_msg *answer, const struct np_msg *msg,
			   u32 status)
{
	memset(answer, 0, sizeof(*answer));
	answer->type = msg->type;
	answer->answer = true;
	answer->status = status;
	answer->quick = msg->quick;
	answer->src_qpn = msg->dst_qpn;
	answer->dst_qpn = msg->src_qpn;
	answer->tid = msg->tid;
	/* Also by who does not know it: so the asker knows that its request was seen */
	answer->secret = msg->secret;
	answer->nonce = msg->nonce;
}

static void np_answer_peer(struct np_peer *peer, const struct np_msg *answer)
{
	np_send(peer->port, peer->ah, peer->pkey_index, peer, answer);
}

static void np_answer_status(struct np_peer *peer, const struct np_msg *msg,
			     u32 status)
{
	struct np_msg answer;

	np_answer_init(&answer, msg, status);
	np_answer_peer(peer, &answer);
}

static void np_mad_from(struct np_mad_from *mad, struct np_port *port,
			const struct ib_mad_recv_wc *recv)
{
	mad->port = port;
	mad->wc = *recv->wc;
	if (recv->wc->wc_flags & IB_WC_GRH)
		mad->grh = *recv->recv_buf.grh;
}

static void np_refusal_work(struct work_struct *work)
{
	struct np_refusal *refusal = container_of(work, struct np_refusal, work);
	struct np_port *port = refusal->mad.port;
	struct ib_ah *ah;

	ah = ib_create_ah_from_wc(port->agent->qp->pd, &refusal->mad.wc,
				  &refusal->mad.grh, port->port_num);
	if (!IS_ERR(ah))
		np_send(port, ah, refusal->mad.wc.pkey_index, NULL,
			&refusal->answer);
	kfree(refusal);
	np_hca_end_refusal(port->hca);
}

/* Over the bound there is no answer: so an address without anybody delays no others. */
static void np_refuse(const struct np_mad_from *mad, const struct np_msg *msg,
		      u32 status)
{
	struct np_refusal *refusal;

	if (!np_hca_begin_refusal(mad->port->hca))
		return;
	refusal = kzalloc(sizeof(*refusal), GFP_NOWAIT | __GFP_NOWARN);
	if (!refusal) {
		np_hca_end_refusal(mad->port->hca);
		return;
	}
	refusal->mad = *mad;
	np_answer_init(&refusal->answer, msg, status);
	INIT_WORK(&refusal->work, np_refusal_work);
	queue_work(np_wq, &refusal->work);
}

static void np_answer_stranger(struct np_port *port,
			       const struct ib_mad_recv_wc *recv,
			       const struct np_msg *msg, u32 status)
{
	struct np_mad_from mad = {};

	np_mad_from(&mad, port, recv);
	np_refuse(&mad, msg, status);
}

/* --- holds ------------------------------------------------------------------------ */

/**
 * struct np_holder - pages under hold for peers, of one owner of regions
 * @entry: in np_hca.holders
 * @owner: compare only; one who comes to the place of one who has gone counts with
 *	   what that one is just giving back
 * @pages: their number
 */
struct np_holder {
	struct hlist_node entry;
	const void *owner;
	unsigned long pages;
};

/* Under the lock of np_hca.peers. */
static struct np_holder *np_holder_find(struct np_hca *hca, const void *owner)
{
	struct np_holder *holder;

	hash_for_each_possible(hca->holders, holder, entry,
			       (unsigned long)owner) {
		if (holder->owner == owner)
			return holder;
	}
	return NULL;
}

/*
 * An owner may have as much as it leaves free, as with FAULTs: so those that pin as
 * much as they can, without end, leave something to the others.
 */
static int np_holder_take(struct np_hca *hca, const void *owner,
			  unsigned int pages)
{
	struct np_holder *spare, *holder;
	int err = -EBUSY;

	spare = kzalloc(sizeof(*spare), GFP_KERNEL);
	if (!spare)
		return -ENOMEM;
	spare->owner = owner;

	xa_lock_irq(&hca->peers);
	holder = np_holder_find(hca, owner) ?: spare;
	if (holder->pages + pages + hca->held_pages <= NP_HELD_DEVICE) {
		if (holder == spare) {
			hash_add(hca->holders, &spare->entry,
				 (unsigned long)owner);
			spare = NULL;
		}
		holder->pages += pages;
		hca->held_pages += pages;
		err = 0;
	}
	xa_unlock_irq(&hca->peers);
	kfree(spare);
	return err;
}

static void np_holder_give(struct np_hca *hca, const void *owner,
			   unsigned int pages)
{
	struct np_holder *holder;

	xa_lock_irq(&hca->peers);
	holder = np_holder_find(hca, owner);
	holder->pages -= pages;
	hca->held_pages -= pages;
	if (holder->pages)
		holder = NULL;
	else
		hash_del(&holder->entry);
	xa_unlock_irq(&hca->peers);
	kfree(holder);
}

/* @owner: whose memory it is. */
VISIBLE_IF_KUNIT int np_held_reserve(struct np_peer *peer, const void *owner,
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
	err = np_holder_take(peer->hca, owner, pages);
	if (err) {
		spin_lock(&peer->lock);
		peer->held_pages -= pages;
		spin_unlock(&peer->lock);
	}
	return err;
}
EXPORT_SYMBOL_IF_KUNIT(np_held_reserve);

VISIBLE_IF_KUNIT void np_held_unreserve(struct np_peer *peer,
					const void *owner, unsigned int pages)
{
	np_holder_give(peer->hca, owner, pages);
	spin_lock(&peer->lock);
	peer->held_pages -= pages;
	spin_unlock(&peer->lock);
}
EXPORT_SYMBOL_IF_KUNIT(np_held_unreserve);

static void np_held_free(struct np_peer *peer, struct np_held *held)
{
	const void *owner = held->hold->region->owner;

	trace_np_hold_release(peer->hca->ibdev, peer->qpn, held->id,
			      held->pages);
	np_hold_release(held->hold);
	np_held_unreserve(peer, owner, held->pages);
	kfree(held);
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

/*
 * The hold is granted: it counts from here on, and belongs to the peer, who may be
 * killed at once: it is not looked at any more, not even when this returns true.
 */
static bool np_held_add(struct np_peer *peer, struct np_held *held)
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
static void np_serve_expire(struct work_struct *work)
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

static void np_serve_release(struct np_peer *peer, const struct np_msg *msg)
{
	struct rb_node *found = NULL;
	struct np_held *held;

	spin_lock(&peer->lock);
	if (!peer->dead)
		found = rb_find(&msg->hold_id, &peer->held, np_held_cmp);
	if (found) {
		held = rb_entry(found, struct np_held, node);
		list_del(&held->entry);
		rb_erase(found, &peer->held);
		/* As in np_peer_begin() */
		peer->active++;
	}
	spin_unlock(&peer->lock);

	/* Not found: a copy. */
	if (found) {
		kref_get(&peer->ref);
		held->peer = peer;
		queue_work(np_wq, &held->work);
	}
	np_answer_status(peer, msg, RDMA_NP_OK);
}

/* --- FAULT ---------------------------------------------------------------------------- */

static unsigned int np_range_pages(const struct rdma_np_range *range)
{
	return ((range->addr + range->length - 1) >> RDMA_NP_PAGE_SHIFT) -
	       (range->addr >> RDMA_NP_PAGE_SHIFT) + 1;
}

static unsigned int np_fault_pages(const struct np_msg *msg)
{
	unsigned int i, pages = 0;

	for (i = 0; i < msg->fault.nr_ranges; i++)
		pages += np_range_pages(&msg->fault.ranges[i]);
	return pages;
}

static int np_fault_ranges(struct np_serve_lane *sl, struct np_hold *hold,
			   struct np_msg *answer)
{
	const struct rdma_np_range *range = sl->msg.fault.ranges;
	unsigned int i, nr_words;
	int err;

	nr_words = min_t(unsigned int, np_range_pages(range), RDMA_NP_EVENT_WORDS);
	for (i = 0; i < sl->msg.fault.nr_ranges; i++) {
		err = np_region_fault(sl->region, range[i].addr,
				      range[i].length,
				      sl->msg.fault.flags & RDMA_NP_FAULT_WRITE,
				      hold, i ? NULL : answer->faulted.words,
				      i ? 0 : nr_words);
		if (err)
			return err;
	}
	answer->faulted.nr_words = nr_words;
	return 0;
}

static int np_fault_held(struct np_serve_lane *sl, struct np_msg *answer)
{
	unsigned int pages = np_fault_pages(&sl->msg);
	struct np_peer *peer = sl->peer;
	struct np_charge charge;
	struct np_held *held;
	int err;

	err = np_held_reserve(peer, sl->region->owner, pages);
	if (err)
		return err;
	np_region_charge(sl->region, &charge);
	held = kzalloc(sizeof(*held), GFP_KERNEL_ACCOUNT);
	if (held)
		held->hold = np_hold_alloc(sl->region, sl->msg.fault.flags &
						       RDMA_NP_FAULT_WRITE);
	np_region_uncharge(&charge);
	if (!held || !held->hold) {
		err = -ENOMEM;
		goto err_free;
	}
	INIT_WORK(&held->work, np_held_work);
	held->pages = pages;
	do
		held->id = get_random_u64();
	while (!held->id);
	answer->faulted.hold_id = held->id;

	err = np_fault_ranges(sl, held->hold, answer);
	if (!err && !np_held_add(peer, held))
		err = -ENOTCONN;
	if (err)
		goto err_release;
	return 0;

err_release:
	np_hold_release(held->hold);
err_free:
	kfree(held);
	np_held_unreserve(peer, sl->region->owner, pages);
	return err;
}

/* The FAULT of a lane was served. */
static void np_fault_served(struct np_serve_lane *sl, struct np_msg *answer,
			    bool queued)
{
	struct np_peer *peer = sl->peer;

	trace_np_fault_serve(peer->hca->ibdev, peer->qpn, sl->msg.tid,
			     sl->msg.fault.region_id, queued, answer->status);
	spin_lock(&peer->lock);
	np_lane_answer(&sl->lane, answer);
	peer->faulting--;
	spin_unlock(&peer->lock);
	/* The lane may be used again from here on */
	np_answer_peer(peer, answer);
	np_peer_put(peer);
}

/*
 * What lies around the pages that were asked for is likely to be asked for next.
 * What the owner's page tables have of it comes along; nothing is read from a disk,
 * and nothing becomes writable, because that would make it dirty.
 */
static void np_fault_neighbours(struct np_region *region,
				const struct rdma_np_range *range)
{
	u64 block = min_t(u64, READ_ONCE(np_fault_around), RDMA_NP_MAX_PAGES)
		    << RDMA_NP_PAGE_SHIFT;
	u64 start, last, end, rest;
	struct np_resolve what;

	if (block <= RDMA_NP_PAGE_SIZE)
		return;
	np_region_describe(region, &what);
	end = what.base + (what.length - 1);
	start = max(what.base, range->addr - range->addr % block);
	last = range->addr + (range->length - 1);
	rest = block - 1 - last % block;
	last = end - last > rest ? last + rest : end;
	np_region_fault(region, start, last - start + 1,
			NP_FAULT_PRESENT | NP_FAULT_AROUND, NULL, NULL, 0);
}

static void np_fault_job(struct np_job *job)
{
	struct np_serve_lane *sl = container_of(job, struct np_serve_lane, job);
	struct np_hca *hca = sl->peer->hca;
	struct np_region *region = sl->region;
	struct rdma_np_range ranges[RDMA_NP_MAX_RANGES];
	unsigned int i, nr_ranges = 0;
	struct np_msg answer;
	int err;

	np_answer_init(&answer, &sl->msg, RDMA_NP_OK);
	if (READ_ONCE(sl->peer->dead))
		err = -ENOTCONN;
	else if (sl->msg.fault.flags & RDMA_NP_FAULT_HOLD)
		err = np_fault_held(sl, &answer);
	else
		err = np_fault_ranges(sl, NULL, &answer);
	/*
	 * Whoever asks whether a hold lived must hear of a region's end, also if a
	 * hole in its memory or a lack of ours was met first.
	 */
	if (err && np_region_is_gone(sl->region))
		err = -ENXIO;
	answer.status = np_errno_to_status(err);
	if (!err && !sl->msg.fault.flags) {
		nr_ranges = sl->msg.fault.nr_ranges;
		memcpy(ranges, sl->msg.fault.ranges,
		       nr_ranges * sizeof(ranges[0]));
	}
	np_fault_served(sl, &answer, true);
	/* The peer does not wait for these, and the lane is not ours any more */
	for (i = 0; i < nr_ranges; i++)
		np_fault_neighbours(region, &ranges[i]);
	np_region_served(region);
	np_region_put(region);
	/* The device stays until then, because it waits for us */
	np_hca_end_fault(hca);
}

static struct np_region *np_granted_region(struct np_peer *peer, u64 id)
{
	struct np_region *region = NULL;
	struct np_pgrant *pg;

	xa_lock(&peer->grants);
	pg = xa_load(&peer->grants, id);
	if (pg) {
		region = pg->grant.region;
		np_region_get(region);
	}
	xa_unlock(&peer->grants);
	return region;
}

static void np_serve_fault(struct np_peer *peer, const struct np_msg *msg)
{
	enum np_lane_verdict verdict;
	struct np_serve_lane *sl;
	unsigned int depth;
	struct np_msg answer;

	spin_lock(&peer->lock);
	if (peer->dead || !peer->serve) {
		spin_unlock(&peer->lock);
		np_answer_status(peer, msg, peer->dead ? RDMA_NP_QP : RDMA_NP_GONE);
		return;
	}
	sl = &peer->serve->lanes[msg->fault.lane];
	verdict = np_lane_arrive(&sl->lane, msg);
	if (verdict == NP_LANE_REPLAY)
		answer = sl->lane.answer;
	peer->faulting += verdict == NP_LANE_NEW;
	depth = peer->faulting;
	spin_unlock(&peer->lock);

	switch (verdict) {
	case NP_LANE_NEW:
		break;
	case NP_LANE_REPLAY:
		answer.quick = msg->quick;
		np_answer_peer(peer, &answer);
		return;
	case NP_LANE_WORKING:
		np_answer_status(peer, msg, NP_WIRE_WORKING);
		return;
	case NP_LANE_BUSY:
		np_answer_status(peer, msg, RDMA_NP_BUSY);
		return;
	case NP_LANE_STALE:
		return;
	}

	/* The lane is ours until np_lane_answer() */
	kref_get(&peer->ref);
	sl->peer = peer;
	sl->msg = *msg;
	sl->region = np_granted_region(peer, msg->fault.region_id);
	if (sl->region && np_hca_begin_fault(peer->hca, sl->region, depth)) {
		np_region_serve(sl->region, &sl->job, depth);
		return;
	}
	np_answer_init(&answer, msg, sl->region ? NP_WIRE_FULL : RDMA_NP_GONE);
	if (sl->region)
		np_region_put(sl->region);
	np_fault_served(sl, &answer, false);
}

/* --- RESOLVE, FORGET, GONE --------------------------------------------------------------- */

static void np_pgrant_free(struct np_trans *gone)
{
	kfree(container_of(gone, struct np_pgrant, gone));
}

/* GONEs for the places that are free, @again of them at most of those that were sent. */
static void np_gone_next(struct np_peer *peer, unsigned int again)
{
	struct np_pgrant *pg;

	for (;;) {
		spin_lock(&peer->lock);
		pg = list_first_entry_or_null(&peer->untold, struct np_pgrant,
					      wait);
		if (!pg && again) {
			pg = list_first_entry_or_null(&peer->told,
						      struct np_pgrant, wait);
			again--;
		}
		if (!pg || peer->dead || peer->nr_gone >= NP_MAX_GONE) {
			spin_unlock(&peer->lock);
			return;
		}
		list_del_init(&pg->wait);
		peer->nr_gone++;
		np_trans_list(&pg->gone);
		kref_get(&pg->gone.ref);
		spin_unlock(&peer->lock);

		trace_np_gone_send(peer->hca->ibdev, peer->qpn, pg->id, RDMA_NP_OK);
		np_trans_send(&pg->gone);
		np_trans_put(&pg->gone);
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
	if (!peer->dead && !list_empty(&peer->told) &&
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
	if (!peer->dead && !list_empty(&peer->told) &&
	    queue_delayed_work(np_wq, &peer->gone_again, peer->gone_pause))
		kref_get(&peer->ref);
	spin_unlock(&peer->lock);
	np_gone_next(peer, NP_MAX_GONE);
	np_peer_put(peer);
}

/* It is not granted any more: no GONE of it is under way, nor will be. */
static void np_gone_stop(struct np_pgrant *pg)
{
	struct np_peer *peer = pg->peer;
	bool dead = pg->dead, cancelled;

	spin_lock(&peer->lock);
	pg->dropped = true;
	list_del_init(&pg->wait);
	peer->nr_dead -= dead;
	spin_unlock(&peer->lock);
	cancelled = np_trans_cancel(&pg->gone);
	np_trans_put(&pg->gone);
	if (!dead)
		return;
	spin_lock(&peer->lock);
	peer->nr_gone -= cancelled;
	np_gone_progress(peer);
	spin_unlock(&peer->lock);
	np_gone_next(peer, 1);
}

/* Under np_peer.ctl. */
static void np_pgrant_drop(struct np_pgrant *pg)
{
	struct np_peer *peer = pg->peer;

	lockdep_assert_held(&peer->ctl);
	xa_erase(&peer->grants, pg->id);
	peer->nr_grants--;
	trace_np_ungrant(peer->hca->ibdev, peer->qpn, pg->id, RDMA_NP_OK);
	/* After this np_peer_region_gone() is not called for it any more */
	np_region_ungrant(&pg->grant);
	np_gone_stop(pg);
}

static void np_pgrant_drop_work(struct work_struct *work)
{
	struct np_pgrant *pg = container_of(work, struct np_pgrant, drop);
	struct np_peer *peer = pg->peer;

	mutex_lock(&peer->ctl);
	/* Else it was dropped meanwhile */
	if (xa_load(&peer->grants, pg->id) == pg)
		np_pgrant_drop(pg);
	mutex_unlock(&peer->ctl);
	np_trans_put(&pg->gone);
	np_peer_put(peer);
}

/*
 * The other end does not use the keys (OK), or does not know the QP; or else it has its
 * turn again.
 */
static void np_gone_done(struct np_trans *gone, u32 status,
			 const struct np_msg *answer)
{
	struct np_pgrant *pg = container_of(gone, struct np_pgrant, gone);
	struct np_peer *peer = pg->peer;
	bool over = answer && status != RDMA_NP_BUSY;

	spin_lock(&peer->lock);
	peer->nr_gone--;
	/* If it is our QP that died, who kills the peer drops the grant */
	if (!over && !peer->dead && !pg->dropped) {
		list_add_tail(&pg->wait, &peer->told);
		if (queue_delayed_work(np_wq, &peer->gone_again,
				       np_gone_pause(peer)))
			kref_get(&peer->ref);
	}
	spin_unlock(&peer->lock);
	if (over) {
		kref_get(&gone->ref);
		kref_get(&peer->ref);
		queue_work(np_wq, &pg->drop);
	}
	np_gone_next(peer, over);
}

/* np_peer.overdue, with a reference. */
static void np_serve_overdue(struct work_struct *work)
{
	struct np_peer *peer = container_of(work, struct np_peer, overdue);

	ibdev_warn_ratelimited(peer->hca->ibdev,
			       "nprdma: QP %u kept the keys of more than %u dead regions: ending it\n",
			       peer->qpn, NP_MAX_DEAD);
	np_peer_fail(peer);
	np_peer_put(peer);
}

/**
 * np_peer_region_gone - A region died whose keys a peer knows
 * @grant: the peer's grant
 *
 * Context: process context, under the region's lock, so @grant stays
 */
void np_peer_region_gone(struct np_grant *grant)
{
	struct np_pgrant *pg = container_of(grant, struct np_pgrant, grant);
	struct np_peer *peer = pg->peer;
	bool overdue;

	spin_lock(&peer->lock);
	pg->dead = true;
	list_add_tail(&pg->wait, &peer->untold);
	overdue = ++peer->nr_dead > NP_MAX_DEAD;
	spin_unlock(&peer->lock);
	np_gone_next(peer, 0);
	if (!overdue)
		return;
	/* The QP goes to the error state, and then the keys go */
	kref_get(&peer->ref);
	if (!np_peer_queue_kill(&peer->overdue))
		np_peer_put(peer);
}
EXPORT_SYMBOL_IF_KUNIT(np_peer_region_gone);

/* Under np_peer.ctl, and charged to the owner. */
VISIBLE_IF_KUNIT struct np_pgrant *np_pgrant_make(struct np_peer *peer,
						  struct np_region *region)
{
	struct np_pgrant *pg;
	int err;

	/* What is being forgotten makes room */
	if (peer->nr_grants >= NP_MAX_GRANTS)
		return ERR_PTR(-EBUSY);
	pg = kzalloc(sizeof(*pg), GFP_KERNEL_ACCOUNT);
	if (!pg)
		return ERR_PTR(-ENOMEM);
	pg->peer = peer;
	pg->id = np_region_id(region);
	INIT_LIST_HEAD(&pg->wait);
	INIT_WORK(&pg->drop, np_pgrant_drop_work);
	np_trans_init(&pg->gone, peer, NP_MSG_GONE, np_gone_done,
		      np_pgrant_free);
	pg->gone.msg.forget.region_id = pg->id;

	/* From here on it may be told that the region is gone */
	err = np_region_grant(region, &pg->grant);
	if (err)
		goto err_free;
	err = xa_err(xa_store(&peer->grants, pg->id, pg, GFP_KERNEL_ACCOUNT));
	if (err)
		goto err_ungrant;
	peer->nr_grants++;
	return pg;

err_ungrant:
	np_region_ungrant(&pg->grant);
	np_gone_stop(pg);
	return ERR_PTR(err);
err_free:
	np_trans_put(&pg->gone);
	return ERR_PTR(err);
}
EXPORT_SYMBOL_IF_KUNIT(np_pgrant_make);

VISIBLE_IF_KUNIT int np_serve_alloc(struct np_peer *peer)
{
	struct np_serve *serve;
	unsigned int i;

	if (peer->serve)
		return 0;
	serve = kvzalloc(sizeof(*serve), GFP_KERNEL_ACCOUNT);
	if (!serve)
		return -ENOMEM;
	for (i = 0; i < NP_LANES; i++)
		serve->lanes[i].job.serve = np_fault_job;
	spin_lock(&peer->lock);
	peer->serve = serve;
	spin_unlock(&peer->lock);
	return 0;
}
EXPORT_SYMBOL_IF_KUNIT(np_serve_alloc);

/* Under np_peer.ctl. */
static int np_serve_resolve(struct np_peer *peer, const struct np_msg *msg,
			    struct np_resolve *out)
{
	struct np_charge charge;
	struct np_region *region;
	struct np_pgrant *pg;
	bool made;
	int err;

	region = np_region_find_rkey(peer->hca->ibdev, msg->rkey);
	/* Whose PD it is not must not learn that it exists */
	if (!region)
		return np_promise_none(peer->hca->ibdev, msg->rkey, NULL,
				       &peer->promised);
	if (np_region_pd(region) != peer->pd) {
		err = -EACCES;
		goto out;
	}

	pg = xa_load(&peer->grants, np_region_id(region));
	made = !pg;
	if (made) {
		np_region_charge(region, &charge);
		err = np_serve_alloc(peer);
		pg = err ? ERR_PTR(err) : np_pgrant_make(peer, region);
		np_region_uncharge(&charge);
		if (IS_ERR(pg)) {
			err = PTR_ERR(pg);
			goto out;
		}
	}
	err = np_region_resolve(region, out);
	out->max_pages = RDMA_NP_MAX_PAGES;
	out->max_ranges = RDMA_NP_MAX_RANGES;
	out->lanes = NP_LANES;
	if (!err)
		pg->seq = max(pg->seq, msg->tid);
	else if (made)
		np_pgrant_drop(pg);
out:
	/* A region that is gone is no region, and any other error may pass */
	if (err == -EACCES || err == -EPERM || err == -ENXIO)
		err = np_promise_none(peer->hca->ibdev, msg->rkey, region,
				      &peer->promised);
	np_region_put(region);
	return err;
}

/* Under np_peer.ctl. */
static void np_serve_forget(struct np_peer *peer, const struct np_msg *msg)
{
	struct np_pgrant *pg = xa_load(&peer->grants, msg->forget.region_id);

	/* A late copy does not undo a newer RESOLVE */
	if (pg && pg->seq <= msg->forget.seq)
		np_pgrant_drop(pg);
}

static struct np_peer *np_stranger_peer(struct np_asked *asked)
{
	struct np_hca *hca = asked->mad.port->hca;
	struct np_peer *peer = ERR_PTR(-EACCES);
	struct rdma_restrack_entry *res;
	struct ib_qp *qp;

	res = rdma_restrack_get_byid(hca->ibdev, RDMA_RESTRACK_QP,
				     asked->msg.dst_qpn);
	if (IS_ERR(res))
		return ERR_CAST(res);
	qp = container_of(res, struct ib_qp, res);
	/* Each peer that is made costs a command of the device */
	if (np_qp_may_be_connected(hca, qp, asked->msg.src_qpn, &asked->from))
		peer = np_peer_make(qp);
	rdma_restrack_put(res);
	if (IS_ERR(peer))
		return peer;
	if (peer->port == asked->mad.port &&
	    peer->remote_qpn == asked->msg.src_qpn &&
	    np_addr_match(&peer->addr, &asked->from) && np_peer_begin(peer))
		return peer;
	np_peer_put(peer);
	return ERR_PTR(-EACCES);
}

static void np_asked_work(struct work_struct *work)
{
	struct np_asked *asked = container_of(work, struct np_asked, work);
	struct np_hca *hca = asked->mad.port->hca;
	bool stranger = !asked->peer;
	struct np_peer *peer = asked->peer;
	struct np_msg answer;
	int err = 0;

	np_answer_init(&answer, &asked->msg, RDMA_NP_OK);
	if (stranger) {
		peer = np_stranger_peer(asked);
		if (IS_ERR(peer)) {
			err = PTR_ERR(peer);
			/* The same for each reason; a QP may be connected soon */
			np_refuse(&asked->mad, &asked->msg,
				  err == -EBUSY || err == -ENOMEM ?
				  RDMA_NP_BUSY : RDMA_NP_QP);
			goto out;
		}
	}

	mutex_lock(&peer->ctl);
	if (asked->msg.type == NP_MSG_RESOLVE)
		err = np_serve_resolve(peer, &asked->msg, &answer.region);
	else
		np_serve_forget(peer, &asked->msg);
	mutex_unlock(&peer->ctl);

	answer.status = np_errno_to_status(err);
	answer.given = peer->our_secret;
	if (asked->msg.type == NP_MSG_RESOLVE)
		trace_np_resolve_serve(hca->ibdev, peer->qpn, asked->msg.rkey,
				       answer.region.id, answer.status);
	np_answer_peer(peer, &answer);

	if (!stranger) {
		spin_lock(&peer->lock);
		peer->control--;
		spin_unlock(&peer->lock);
	}
	np_peer_end(peer);
	np_peer_put(peer);
out:
	np_hca_end(hca, stranger);
	kfree(asked);
}

/* Queue a RESOLVE or FORGET. False: over a bound. */
static bool np_asked_queue(struct np_port *port, struct np_peer *peer,
			   const struct np_msg *msg, const struct np_addr *from,
			   struct ib_mad_recv_wc *recv)
{
	struct np_asked *asked;

	if (peer) {
		bool ok;

		spin_lock(&peer->lock);
		ok = !peer->dead && peer->control < NP_SERVE_CONTROL;
		peer->control += ok;
		peer->active += ok;
		spin_unlock(&peer->lock);
		if (!ok)
			return false;
	}
	if (!np_hca_begin(port->hca, !peer))
		goto err_peer;
	asked = kzalloc(sizeof(*asked), GFP_NOWAIT | __GFP_NOWARN);
	if (!asked)
		goto err_hca;
	asked->mad.port = port;
	asked->msg = *msg;
	asked->from = *from;
	INIT_WORK(&asked->work, np_asked_work);
	if (peer) {
		kref_get(&peer->ref);
		asked->peer = peer;
	} else {
		np_mad_from(&asked->mad, port, recv);
	}
	queue_work(np_wq, &asked->work);
	return true;

err_hca:
	np_hca_end(port->hca, !peer);
err_peer:
	if (peer) {
		spin_lock(&peer->lock);
		peer->control--;
		spin_unlock(&peer->lock);
		np_peer_end(peer);
	}
	return false;
}

/* --- arrivals --------------------------------------------------------------------------------- */

static void np_receive_stranger(struct np_port *port, const struct np_msg *msg,
				const struct np_addr *from,
				struct ib_mad_recv_wc *recv)
{
	switch (msg->type) {
	case NP_MSG_RESOLVE:
		if (!np_asked_queue(port, NULL, msg, from, recv))
			np_answer_stranger(port, recv, msg, RDMA_NP_BUSY);
		return;
	case NP_MSG_GONE:
		/* Who is no peer has no keys */
		np_answer_stranger(port, recv, msg, RDMA_NP_OK);
		return;
	default:
		np_answer_stranger(port, recv, msg, RDMA_NP_QP);
	}
}

/*
 * Is it the kernel of the peer's that sent this? RESOLVE has no secret: whoever sends it,
 * the answer goes to the peer, where the nonce tells whether it was asked for.
 */
static bool np_peer_believes(const struct np_peer *peer,
			     const struct np_msg *msg,
			     const struct np_addr *from)
{
	/* GONE is about the memory of who sends it, the others of who is asked */
	bool ours = (msg->type == NP_MSG_GONE) == msg->answer;

	if (msg->quick && from->qpn != READ_ONCE(peer->ud_qpn))
		return false;
	if (msg->type == NP_MSG_RESOLVE)
		return !msg->quick;
	return msg->secret && msg->secret == (ours ? peer->our_secret :
					      READ_ONCE(peer->their_secret));
}

/*
 * A request by MAD without the right secret is not obeyed. But it may be of the peer's
 * kernel, and about what it had of, or gave to, an earlier peer of this QP: it must not
 * wait for an answer in vain. Here is nothing of an earlier peer, so it is answered as
 * who asks for a grant or a hold that does not exist. The answer goes to the peer,
 * whoever asked, and there it is of no use without the right secret.
 */
static void np_answer_disbelieved(struct np_peer *peer, const struct np_msg *msg)
{
	u32 status = RDMA_NP_OK;

	if (msg->type == NP_MSG_FAULT)
		status = RDMA_NP_GONE;
	else if (msg->type == NP_MSG_GONE &&
		 np_peer_uses(peer, msg->forget.region_id))
		status = RDMA_NP_BUSY;
	np_answer_status(peer, msg, status);
}

static void np_receive_peer(struct np_port *port, struct np_peer *peer,
			    const struct np_msg *msg,
			    const struct np_addr *from,
			    struct ib_mad_recv_wc *recv)
{
	if (!np_peer_believes(peer, msg, from)) {
		trace_np_disbelieve(peer->hca->ibdev, peer->qpn, msg->type,
				    msg->answer, from->qpn);
		if (!msg->answer && recv)
			np_answer_disbelieved(peer, msg);
		return;
	}
	if (msg->quick)
		WRITE_ONCE(peer->ud_known, true);
	else if (msg->type != NP_MSG_RESOLVE)
		np_ud_learn(peer, msg);
	if (msg->answer) {
		np_peer_answered(peer, msg);
		return;
	}

	switch (msg->type) {
	case NP_MSG_FAULT:
		np_serve_fault(peer, msg);
		return;
	case NP_MSG_RELEASE:
		np_serve_release(peer, msg);
		return;
	case NP_MSG_GONE:
		np_answer_status(peer, msg,
				 np_peer_told_gone(peer,
						   msg->forget.region_id));
		return;
	case NP_MSG_RESOLVE:
	case NP_MSG_FORGET:
		if (!np_asked_queue(port, peer, msg, from, recv))
			np_answer_status(peer, msg, RDMA_NP_BUSY);
	}
}

/**
 * np_receive - A message arrived
 * @port: here
 * @msg: the message
 * @malformed: only its header is valid, and it is a request
 * @from: from there
 * @recv: the MAD; NULL: came by the quick transport, so from a peer or nobody
 *
 * MADs are of kernels only if they come from QP1: any QP may send to it, if its process
 * may set a privileged Q_Key.
 *
 * Context: completion handler: process context, does not sleep
 */
void np_receive(struct np_port *port, const struct np_msg *msg, bool malformed,
		const struct np_addr *from, struct ib_mad_recv_wc *recv)
{
	struct np_peer *peer;

	if (recv && from->qpn != 1) {
		trace_np_disbelieve(port->hca->ibdev, msg->dst_qpn, msg->type,
				    msg->answer, from->qpn);
		return;
	}
	if (malformed) {
		np_answer_stranger(port, recv, msg, RDMA_NP_PROTO);
		return;
	}

	peer = np_peer_find(port->hca, msg->dst_qpn);
	if (peer && peer->port == port && peer->remote_qpn == msg->src_qpn &&
	    np_addr_match(&peer->addr, from))
		np_receive_peer(port, peer, msg, from, recv);
	else if (!msg->answer && recv)
		np_receive_stranger(port, msg, from, recv);
	if (peer)
		np_peer_put(peer);
}
EXPORT_SYMBOL_IF_KUNIT(np_receive);

/**
 * np_serve_init - Prepare a peer's part of serving
 * @peer: zeroed
 */
void np_serve_init(struct np_peer *peer)
{
	INIT_LIST_HEAD(&peer->holds);
	peer->held = RB_ROOT;
	INIT_LIST_HEAD(&peer->untold);
	INIT_LIST_HEAD(&peer->told);
	mutex_init(&peer->ctl);
	xa_init(&peer->grants);
	INIT_DELAYED_WORK(&peer->expire, np_serve_expire);
	INIT_DELAYED_WORK(&peer->gone_again, np_gone_again);
	INIT_WORK(&peer->overdue, np_serve_overdue);
}

/**
 * np_serve_kill - The QP is not connected any more: undo what we did for it
 * @peer: dead, and nobody serves it
 */
void np_serve_kill(struct np_peer *peer)
{
	struct np_held *held, *next;
	struct np_pgrant *pg;
	unsigned long id;
	LIST_HEAD(holds);

	spin_lock(&peer->lock);
	list_splice_init(&peer->holds, &holds);
	peer->held = RB_ROOT;
	spin_unlock(&peer->lock);
	list_for_each_entry_safe(held, next, &holds, entry)
		np_held_free(peer, held);
	if (cancel_delayed_work(&peer->expire))
		np_peer_put(peer);
	if (cancel_delayed_work(&peer->gone_again))
		np_peer_put(peer);

	mutex_lock(&peer->ctl);
	xa_for_each(&peer->grants, id, pg)
		np_pgrant_drop(pg);
	mutex_unlock(&peer->ctl);
}
EXPORT_SYMBOL_IF_KUNIT(np_serve_kill);
