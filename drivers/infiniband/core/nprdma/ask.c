// SPDX-License-Identifier: GPL-2.0
/*
 * Asking a peer: the requests that user space makes, and the keys and holds that they
 * bring.
 */
#include <linux/ktime.h>
#include <linux/random.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "np_proto.h"
#include "peer_trace.h"

/* Bindings */

static int np_binding_cmp(const void *region_id, const struct rb_node *node)
{
	u64 id = rb_entry(node, struct np_binding, node)->region_id;

	return *(const u64 *)region_id < id ? -1 : *(const u64 *)region_id > id;
}

static bool np_binding_less(struct rb_node *node, const struct rb_node *other)
{
	return np_binding_cmp(&rb_entry(node, struct np_binding, node)->region_id,
			      other) < 0;
}

/**
 * np_binding_add - A region of a peer's may be used
 * @peer: its lock is held
 * @binding: with its channel and the region's id; belongs to @peer from now on
 */
VISIBLE_IF_KUNIT void np_binding_add(struct np_peer *peer,
				     struct np_binding *binding)
{
	lockdep_assert_held(&peer->lock);
	rb_add(&binding->node, &peer->bindings, np_binding_less);
	peer->nr_bindings++;
}
EXPORT_SYMBOL_IF_KUNIT(np_binding_add);

/* Under the peer's lock: of one region's, each channel has its own. */
static struct np_binding *np_binding_first(struct np_peer *peer, u64 region_id)
{
	return rb_entry_safe(rb_find_first(&region_id, &peer->bindings,
					   np_binding_cmp),
			     struct np_binding, node);
}

static struct np_binding *np_binding_next(struct np_binding *binding)
{
	return rb_entry_safe(rb_next_match(&binding->region_id, &binding->node,
					   np_binding_cmp),
			     struct np_binding, node);
}

/* Holds */

/**
 * struct np_fault - a FAULT of ours; also the record of the hold it brought
 * @trans: the FAULT; its references are those of the whole
 * @rel: the RELEASE, with memory set aside before the hold exists
 * @ev: the event that tells its end
 * @channel: for @ev
 * @kept: in np_peer.kept, under the peer's lock
 * @hold_id: of the hold; 0: brought none
 * @recalled: it is a lease, and @recall was posted, under the peer's lock
 * @recall: the event that says so
 */
struct np_fault {
	struct np_trans trans;
	struct np_trans rel;
	struct np_ev ev;
	struct np_channel *channel;
	struct list_head kept;
	u64 hold_id;
	bool recalled;
	struct np_ev recall;
};

static bool np_fault_is_lease(const struct np_fault *fault)
{
	return fault->trans.msg.fault.flags & RDMA_NP_FAULT_LEASE;
}

static void np_kept_less(struct np_fault *fault)
{
	struct np_peer *peer = fault->trans.peer;

	spin_lock(&peer->lock);
	peer->nr_kept--;
	peer->nr_kept_leases -= np_fault_is_lease(fault);
	spin_unlock(&peer->lock);
}

/* From here on another hold may be asked for: so RELEASEs are bounded as holds are. */
static void np_release_done(struct np_trans *rel, u32 status,
			    const struct np_msg *answer)
{
	np_kept_less(container_of(rel, struct np_fault, rel));
}

static void np_release_free(struct np_trans *rel)
{
	np_trans_put(&container_of(rel, struct np_fault, rel)->trans);
}

/* With the reference that np_peer.kept had. */
static void np_fault_give_back(struct np_peer *peer, struct np_fault *fault)
{
	np_trans_init(&fault->rel, peer, NP_MSG_RELEASE, np_release_done,
		      np_release_free);
	fault->rel.msg.hold_id = fault->hold_id;
	if (np_trans_start(&fault->rel))
		np_kept_less(fault);
	np_trans_put(&fault->rel);
}

/*
 * Once, without a transaction: if it is lost, the hold's time-out ends it. So it goes by
 * MAD, which the other end takes whatever it knows of our UD QP.
 */
static void np_release_send(struct np_peer *peer, u64 hold_id)
{
	struct np_msg msg = {
		.type = NP_MSG_RELEASE,
		.src_qpn = peer->qpn,
		.dst_qpn = peer->remote_qpn,
		.tid = np_tid_next(),
		.secret = READ_ONCE(peer->their_secret),
		.hold_id = hold_id,
	};

	np_peer_send(peer, &msg);
}

static void np_answer_late(struct np_peer *peer, const struct np_msg *msg)
{
	/* A hold for a request that was given up: nobody else will release it */
	if (msg->type == NP_MSG_FAULT && !msg->status && msg->faulted.hold_id)
		np_release_send(peer, msg->faulted.hold_id);
}

/*
 * Under the lock under which @trans was taken off its list: whoever brings a copy of
 * the answer, at the same time on another CPU, finds it in one list or the other, and
 * does not release what is in use.  What was not asked for is not kept: it would
 * count in no bound.
 */
static void np_fault_keep(struct np_trans *trans, const struct np_msg *answer)
{
	struct np_fault *fault = container_of(trans, struct np_fault, trans);
	struct np_peer *peer = trans->peer;

	lockdep_assert_held(&peer->lock);
	if (answer->status || !answer->faulted.hold_id || peer->dead)
		return;
	if (!(trans->msg.fault.flags & RDMA_NP_FAULT_HOLD))
		return;
	fault->hold_id = answer->faulted.hold_id;
	fault->recall.ev.hold_id = fault->hold_id;
	kref_get(&trans->ref);
	list_add_tail(&fault->kept, &peer->kept);
	peer->nr_kept++;
	peer->nr_kept_leases += np_fault_is_lease(fault);
}

/* Under the peer's lock. */
static struct np_fault *np_kept_find(struct np_peer *peer, u64 hold_id)
{
	struct np_fault *fault;

	lockdep_assert_held(&peer->lock);
	list_for_each_entry(fault, &peer->kept, kept) {
		if (fault->hold_id == hold_id)
			return fault;
	}
	return NULL;
}

static struct np_fault *np_kept_take(struct np_peer *peer, u64 hold_id)
{
	struct np_fault *fault;

	spin_lock(&peer->lock);
	fault = np_kept_find(peer, hold_id);
	if (fault)
		list_del_init(&fault->kept);
	spin_unlock(&peer->lock);
	if (fault)
		np_channel_unpost(fault->channel, &fault->recall);
	return fault;
}

/* What is answered to a RECALL; @tell: and who has it is told */
static u32 np_peer_recall(struct np_peer *peer, u64 hold_id, bool tell)
{
	u32 status = RDMA_NP_GONE;
	struct np_fault *fault;
	struct np_trans *trans;

	guard(spinlock)(&peer->lock);
	fault = np_kept_find(peer, hold_id);
	if (fault) {
		/* Under the lock, so that it is not freed meanwhile */
		if (tell && !fault->recalled && np_fault_is_lease(fault))
			np_channel_post(fault->channel, &fault->recall);
		fault->recalled |= tell;
		return RDMA_NP_OK;
	}
	list_for_each_entry(trans, &peer->trans, entry) {
		if (trans->msg.type == NP_MSG_FAULT &&
		    trans->msg.fault.flags & RDMA_NP_FAULT_LEASE)
			status = RDMA_NP_BUSY;
		/* One is given back already */
		if (trans->msg.type == NP_MSG_RELEASE && trans->msg.hold_id == hold_id)
			return RDMA_NP_OK;
	}
	return status;
}

/**
 * np_peer_keeps - Is there such a hold, or may there be one soon
 * @peer: of whom
 * @hold_id: as its answer to a FAULT said
 *
 * Return: true if so
 */
bool np_peer_keeps(struct np_peer *peer, u64 hold_id)
{
	return np_peer_recall(peer, hold_id, false) != RDMA_NP_GONE;
}
EXPORT_SYMBOL_IF_KUNIT(np_peer_keeps);

/**
 * np_peer_told_recall - The other end wants a lease back
 * @peer: the peer
 * @hold_id: as its answer to a FAULT said
 *
 * Who has it is told by an event, once.
 *
 * Return: what to answer: RDMA_NP_OK; RDMA_NP_BUSY: the grant may be on its way, and who hears of
 * it later must hear of the recall; RDMA_NP_GONE: nobody here has it, or will
 */
u32 np_peer_told_recall(struct np_peer *peer, u64 hold_id)
{
	return np_peer_recall(peer, hold_id, true);
}
EXPORT_SYMBOL_IF_KUNIT(np_peer_told_recall);

/**
 * np_peer_release - Give back a hold
 * @peer: the peer that granted it
 * @hold_id: as the event said
 *
 * Context: process context, does not wait
 * Return: 0; -ENOENT: this QP has no such hold
 */
int np_peer_release(struct np_peer *peer, u64 hold_id)
{
	struct np_fault *fault = np_kept_take(peer, hold_id);

	if (!fault)
		return -ENOENT;
	np_fault_give_back(peer, fault);
	return 0;
}
EXPORT_SYMBOL_GPL(np_peer_release);

/* FAULT */

/* In jiffies: what one that was sent twice waits for its answer */
static unsigned long np_lanes_pause(struct np_peer *peer)
{
	return usecs_to_jiffies(np_rtt_timeout(&peer->rtt, 2));
}

/* Of those that the other end has; it may say another number than before */
static unsigned int np_lanes_free(struct np_peer *peer)
{
	return peer->nr_lanes - bitmap_weight(peer->lanes, peer->nr_lanes);
}

/*
 * Under the peer's lock: there are too many FAULTs at the other end.  To ask again at
 * once would take CPUs of both ends from those that are served there, for one more
 * refusal.  So there are no more under way than are left now, until more are wanted: one
 * for each time-out of a second try that has passed by then.
 */
static void np_lanes_close(struct np_peer *peer)
{
	lockdep_assert_held(&peer->lock);
	peer->lanes_closed = np_lanes_free(peer);
	peer->lanes_since = jiffies;
}

/* Under the peer's lock: the lane for one more FAULT, or NP_LANES. */
static unsigned int np_lanes_find(struct np_peer *peer)
{
	unsigned int free = np_lanes_free(peer);
	unsigned long opened;

	lockdep_assert_held(&peer->lock);
	if (peer->lanes_closed && peer->lanes_closed >= free) {
		opened = (jiffies - peer->lanes_since) / np_lanes_pause(peer);
		if (!opened)
			return NP_LANES;
		peer->lanes_closed = free - min_t(unsigned long, opened, free);
		peer->lanes_since = jiffies;
	}
	return free ? find_first_zero_bit(peer->lanes, peer->nr_lanes) : NP_LANES;
}

static void np_fault_free(struct np_trans *trans)
{
	struct np_fault *fault = container_of(trans, struct np_fault, trans);

	np_channel_put(fault->channel);
	kfree(fault);
}

static void np_fault_consumed(struct np_ev *ev)
{
	np_trans_put(&container_of(ev, struct np_fault, ev)->trans);
}

/* What it is of: what the other end says, if that can be, and else what was asked for */
static void np_fault_say_lease(struct np_fault *fault, const struct np_msg *answer,
			       struct rdma_np_event *ev)
{
	const struct rdma_np_range *ranges = fault->trans.msg.fault.ranges;
	const struct rdma_np_range *most = &ranges[fault->trans.msg.fault.nr_ranges - 1];
	struct rdma_np_range said = {
		answer->faulted.lease_addr, answer->faulted.lease_length
	};
	u64 last;

	if (!fault->hold_id || !np_fault_is_lease(fault))
		return;
	if (!said.length || check_add_overflow(said.addr, said.length - 1, &last) ||
	    !np_range_holds(most, &said) || !np_range_holds(&said, &ranges[0]))
		said = ranges[0];
	ev->lease_key = answer->faulted.lease_key;
	ev->lease_addr = said.addr;
	ev->lease_length = said.length;
}

static void np_fault_say_words(const struct np_msg *answer, struct rdma_np_event *ev)
{
	unsigned int i;

	ev->nr_words = answer->faulted.nr_words;
	for (i = 0; i < ev->nr_words; i++)
		ev->words[i] = cpu_to_le64(answer->faulted.words[i]);
}

static void np_fault_done(struct np_trans *trans, u32 status,
			  const struct np_msg *answer)
{
	struct np_fault *fault = container_of(trans, struct np_fault, trans);
	struct np_peer *peer = trans->peer;
	struct rdma_np_event *ev = &fault->ev.ev;
	bool full = status == NP_WIRE_FULL;

	trace_np_fault_complete(peer->hca->ibdev, peer->qpn, trans->msg.tid,
				status, trans->tries,
				ktime_get_ns() - trans->sent);

	spin_lock(&peer->lock);
	__clear_bit(trans->msg.fault.lane, peer->lanes);
	if (full)
		np_lanes_close(peer);
	/* A hold dies with the QP pair, also one that was kept just now */
	if (!status && peer->dead && trans->msg.fault.flags & RDMA_NP_FAULT_HOLD)
		status = RDMA_NP_QP;
	spin_unlock(&peer->lock);

	if (!status) {
		np_fault_say_words(answer, ev);
		ev->hold_id = fault->hold_id;
		np_fault_say_lease(fault, answer, ev);
	}
	if (answer && !fault->hold_id)
		np_answer_late(peer, answer);

	ev->status = full ? RDMA_NP_BUSY : status;
	kref_get(&trans->ref);
	if (!np_channel_post(fault->channel, &fault->ev)) {
		/* Nobody will ever learn of the hold */
		if (fault->hold_id)
			np_peer_release(peer, fault->hold_id);
		np_trans_put(trans);
	}
}

/**
 * np_peer_fault - Ask for pages
 * @peer: the peer
 * @channel: for the event
 * @req: checked
 * @ranges: checked
 * @nr: their number
 *
 * Context: process context, does not wait for the peer
 * Return: 0, then exactly one event follows; -EBUSY, -ENOENT, -ENOTCONN, -ENOMEM;
 * -EINVAL: more than the other end takes
 */
int np_peer_fault(struct np_peer *peer, struct np_channel *channel,
		  const struct rdma_np_fault_req *req, const struct rdma_np_range *ranges,
		  unsigned int nr)
{
	struct np_fault *fault;
	unsigned int lane = NP_LANES;
	bool bound;
	int err;

	fault = kzalloc(sizeof(*fault), GFP_KERNEL_ACCOUNT);
	if (!fault)
		return -ENOMEM;
	err = np_channel_reserve(channel);
	if (err) {
		kfree(fault);
		return err;
	}

	np_trans_init(&fault->trans, peer, NP_MSG_FAULT, np_fault_done,
		      np_fault_free);
	INIT_LIST_HEAD(&fault->kept);
	fault->channel = np_channel_get(channel);
	fault->trans.msg.fault.region_id = req->region_id;
	fault->trans.msg.fault.flags = req->flags;
	fault->trans.msg.fault.nr_ranges = nr;
	memcpy(fault->trans.msg.fault.ranges, ranges, nr * sizeof(*ranges));
	INIT_LIST_HEAD(&fault->ev.entry);
	fault->ev.reserved = true;
	fault->ev.consumed = np_fault_consumed;
	fault->ev.ev.type = RDMA_NP_EVENT_FAULT;
	fault->ev.ev.cookie = req->cookie;
	fault->ev.ev.region_id = req->region_id;
	INIT_LIST_HEAD(&fault->recall.entry);
	fault->recall.ev.type = RDMA_NP_EVENT_RECALL;
	fault->recall.ev.cookie = req->cookie;
	fault->recall.ev.region_id = req->region_id;

	spin_lock(&peer->lock);
	bound = np_binding_first(peer, req->region_id);
	if (peer->dead)
		err = -ENOTCONN;
	else if (!bound)
		err = -ENOENT;
	else if (nr > peer->max_ranges ||
		 np_ranges_pages(ranges, nr, req->flags) > peer->max_pages)
		err = -EINVAL;
	else if (!(req->flags & RDMA_NP_FAULT_HOLD) ||
		 (peer->nr_kept < NP_MAX_KEPT &&
		  (!(req->flags & RDMA_NP_FAULT_LEASE) ||
		   peer->nr_kept_leases < NP_MAX_LEASES)))
		lane = np_lanes_find(peer);
	if (!err && lane == NP_LANES)
		err = -EBUSY;
	if (err) {
		spin_unlock(&peer->lock);
		np_channel_unreserve(channel);
		np_trans_put(&fault->trans);
		return err;
	}
	__set_bit(lane, peer->lanes);
	fault->trans.msg.fault.lane = lane;
	/*
	 * The answerer takes a tid below the lane's last one for a late copy: it is
	 * drawn here, after the lane.
	 */
	np_trans_list(&fault->trans);
	spin_unlock(&peer->lock);

	trace_np_fault_submit(peer->hca->ibdev, peer->qpn,
			      fault->trans.msg.tid, req->region_id,
			      ranges[0].addr, ranges[0].length, nr, req->flags);
	np_trans_send(&fault->trans);
	np_trans_put(&fault->trans);
	return 0;
}
EXPORT_SYMBOL_GPL(np_peer_fault);

/* RESOLVE, FORGET, GONE */

static void np_binding_free(struct np_binding *binding)
{
	np_channel_unpost(binding->channel, &binding->ev);
	np_channel_put(binding->channel);
	kfree(binding);
}

/* Under the peer's lock: out of the tree, to be freed later. */
static void np_binding_take(struct np_peer *peer, struct np_binding *binding,
			    struct list_head *list)
{
	rb_erase(&binding->node, &peer->bindings);
	list_add(&binding->taken, list);
	peer->nr_bindings--;
}

static void np_bindings_free(struct list_head *list)
{
	struct np_binding *binding, *next;

	list_for_each_entry_safe(binding, next, list, taken)
		np_binding_free(binding);
}

/**
 * struct np_resolving - a RESOLVE that somebody waits for
 * @trans: the RESOLVE
 * @entry: in np_peer.resolves, until its keys belong to a channel or to nobody
 * @done: it ended
 * @status: so
 * @err: what it failed of here
 * @info: what the peer said
 * @binding: becomes the caller's binding
 */
struct np_resolving {
	struct np_trans trans;
	struct list_head entry;
	struct completion done;
	u32 status;
	int err;
	struct np_resolve info;
	struct np_binding *binding;
};

static void np_resolving_free(struct np_trans *trans)
{
	struct np_resolving *res = container_of(trans, struct np_resolving,
						trans);

	if (res->binding)
		np_binding_free(res->binding);
	kfree(res);
}

/* Under the peer's lock. */
static void np_resolving_end(struct np_resolving *res)
{
	list_del(&res->entry);
	res->trans.peer->resolving--;
}

/* The binding exists before the answer has an effect: see np_peer_told_gone(). */
static void np_resolve_done(struct np_trans *trans, u32 status,
			    const struct np_msg *answer)
{
	struct np_resolving *res = container_of(trans, struct np_resolving,
						trans);
	struct np_binding *binding, *next;
	struct np_peer *peer = trans->peer;
	unsigned int channels = 0;
	const char *reason;
	LIST_HEAD(closed);

	if (!status) {
		res->info = answer->region;
		reason = np_resolve_accept(&res->info);
		if (reason) {
			np_peer_refuse(peer, "unpinned region of the peer of QP %u refused: %s",
				       peer->qpn, reason);
			status = RDMA_NP_PROTO;
		}
	}

	spin_lock(&peer->lock);
	np_resolving_end(res);
	if (status == RDMA_NP_QP && answer)
		res->err = -ECONNREFUSED;
	if (!status && peer->dead)
		status = RDMA_NP_QP;
	if (!status) {
		peer->nr_lanes = res->info.lanes;
		peer->max_ranges = res->info.max_ranges;
		peer->max_pages = res->info.max_pages;
		res->binding->region_id = answer->region.id;
		res->binding->ev.ev.region_id = answer->region.id;
		for (binding = np_binding_first(peer, answer->region.id);
		     binding; binding = next) {
			next = np_binding_next(binding);
			if (binding->channel == res->binding->channel)
				break;
			if (np_channel_is_closed(binding->channel))
				np_binding_take(peer, binding, &closed);
			else
				channels++;
		}
		if (!binding && channels < NP_MAX_CHANNELS) {
			np_binding_add(peer, res->binding);
			res->binding = NULL;
		} else if (!binding) {
			res->err = -ENOSPC;
		}
	}
	spin_unlock(&peer->lock);
	np_bindings_free(&closed);
	res->status = status;
	complete(&res->done);
}

static int np_resolve_once(struct np_peer *peer, struct np_channel *channel,
			   u32 rkey, u64 addr, struct np_resolve *out)
{
	struct np_resolving *res;
	int err;

	res = kzalloc(sizeof(*res), GFP_KERNEL_ACCOUNT);
	if (!res)
		return -ENOMEM;
	res->binding = kzalloc(sizeof(*res->binding), GFP_KERNEL_ACCOUNT);
	if (!res->binding) {
		kfree(res);
		return -ENOMEM;
	}
	res->binding->channel = np_channel_get(channel);
	INIT_LIST_HEAD(&res->binding->ev.entry);
	res->binding->ev.ev.type = RDMA_NP_EVENT_REGION_GONE;
	res->binding->ev.ev.status = RDMA_NP_GONE;
	init_completion(&res->done);
	np_trans_init(&res->trans, peer, NP_MSG_RESOLVE, np_resolve_done,
		      np_resolving_free);
	res->trans.msg.rkey = rkey;
	res->trans.msg.addr = addr;
	res->trans.msg.nonce = get_random_u64();

	spin_lock(&peer->lock);
	if (peer->dead)
		err = -ENOTCONN;
	else if (READ_ONCE(peer->hca->leaving))
		err = -ENODEV;
	else if (peer->nr_bindings + peer->resolving >= NP_MAX_BINDINGS)
		err = -ENOSPC;
	else if (peer->resolving >= NP_MAX_ASKED)
		err = -EBUSY;
	else
		err = 0;
	if (!err) {
		peer->resolving++;
		list_add_tail(&res->entry, &peer->resolves);
		np_trans_list(&res->trans);
	}
	spin_unlock(&peer->lock);
	if (err)
		goto out;
	np_trans_send(&res->trans);

	err = wait_for_completion_killable(&res->done);
	if (err && np_trans_cancel(&res->trans)) {
		spin_lock(&peer->lock);
		np_resolving_end(res);
		spin_unlock(&peer->lock);
		goto out;
	}
	if (err)
		wait_for_completion(&res->done);

	err = res->err ?: np_status_to_errno(res->status);
	if (res->status == RDMA_NP_TIMEOUT && !READ_ONCE(peer->heard))
		err = -EHOSTUNREACH;
	if (!err)
		*out = res->info;
	trace_np_resolve(peer->hca->ibdev, peer->qpn, rkey, res->info.id,
			 res->status);
out:
	np_trans_put(&res->trans);
	return err;
}

/* A peer that is over a bound is asked again for this long */
#define NP_RESOLVE_BUSY_MS	2000

/**
 * np_peer_resolve - Exchange an rkey for a region's keys
 * @peer: the peer
 * @channel: is told when the region dies
 * @rkey: what the peer's application handed out
 * @addr: that is to be used; it counts if the key is of the whole address space
 * @out: what the region is, or the part of it
 *
 * Context: process context; waits, bounded and killable
 * Return: 0 or what the UAPI header says
 */
int np_peer_resolve(struct np_peer *peer, struct np_channel *channel, u32 rkey,
		    u64 addr, struct np_resolve *out)
{
	unsigned long end = jiffies + msecs_to_jiffies(NP_RESOLVE_BUSY_MS);
	unsigned int pause = 1;
	int err;

	for (;;) {
		err = np_resolve_once(peer, channel, rkey, addr, out);
		if (err != -EBUSY || time_after(jiffies, end))
			return err;
		if (schedule_timeout_killable(msecs_to_jiffies(pause)) &&
		    fatal_signal_pending(current))
			return -EINTR;
		pause = min(2 * pause, 100U);
	}
}
EXPORT_SYMBOL_GPL(np_peer_resolve);

static void np_forget_done(struct np_trans *trans, u32 status,
			   const struct np_msg *answer)
{
	struct np_peer *peer = trans->peer;

	spin_lock(&peer->lock);
	peer->forgetting--;
	spin_unlock(&peer->lock);
}

static void np_forget_free(struct np_trans *trans)
{
	kfree(trans);
}

/*
 * Under the peer's lock: the newest RESOLVE that FORGET undoes.  All that are older than
 * those under way brought their keys to who gives them back now, or to nobody.  One that
 * is under way may have been answered.
 */
static u64 np_forget_seq(struct np_peer *peer)
{
	struct np_resolving *oldest;

	oldest = list_first_entry_or_null(&peer->resolves, struct np_resolving,
					  entry);
	return oldest ? oldest->trans.msg.tid - 1 : np_tid_last();
}

/**
 * np_peer_forget - Nothing of this QP uses a region's keys any more
 * @peer: the peer
 * @region_id: the region
 *
 * If the peer cannot be told now, it is when it asks: see np_peer_told_gone().  So if
 * too many are under way, because the peer answers none, this one is sent only once.
 *
 * What a RESOLVE that is under way brings stays granted; who gets it has to forget it.
 *
 * Context: process context, does not wait for the peer
 * Return: 0; -ENOENT: was not resolved, or forgotten before; -ENOMEM
 */
int np_peer_forget(struct np_peer *peer, u64 region_id)
{
	struct np_binding *binding, *next;
	struct np_trans *trans;
	int err = -ENOENT;
	LIST_HEAD(list);
	bool tell;

	trans = kzalloc(sizeof(*trans), GFP_KERNEL_ACCOUNT);
	if (!trans)
		return -ENOMEM;
	np_trans_init(trans, peer, NP_MSG_FORGET, np_forget_done,
		      np_forget_free);
	trans->msg.forget.region_id = region_id;

	spin_lock(&peer->lock);
	trans->msg.forget.seq = np_forget_seq(peer);
	for (binding = np_binding_first(peer, region_id); binding;
	     binding = next) {
		next = np_binding_next(binding);
		np_binding_take(peer, binding, &list);
		err = 0;
	}
	tell = !err && !peer->dead;
	if (tell && peer->forgetting < NP_MAX_ASKED) {
		peer->forgetting++;
		np_trans_list(trans);
	}
	spin_unlock(&peer->lock);

	np_bindings_free(&list);
	if (tell)
		np_trans_send(trans);
	np_trans_put(trans);
	return err;
}
EXPORT_SYMBOL_GPL(np_peer_forget);

/**
 * np_peer_told_gone - The peer says that a region died
 * @peer: the peer
 * @region_id: the region
 *
 * As long as a binding exists, user space may use the keys.  A RESOLVE under way
 * may be about to hand them out: its answer can come in later than GONE.
 *
 * Return: RDMA_NP_OK: nobody uses the keys; RDMA_NP_BUSY: ask again
 */
u32 np_peer_told_gone(struct np_peer *peer, u64 region_id)
{
	struct np_binding *binding, *next;
	LIST_HEAD(closed);
	u32 status;

	spin_lock(&peer->lock);
	status = peer->resolving ? RDMA_NP_BUSY : RDMA_NP_OK;
	for (binding = np_binding_first(peer, region_id); binding;
	     binding = next) {
		next = np_binding_next(binding);
		if (np_channel_is_closed(binding->channel)) {
			np_binding_take(peer, binding, &closed);
			continue;
		}
		status = RDMA_NP_BUSY;
		if (!binding->posted) {
			binding->posted = true;
			/* Under the lock, so that it is not freed meanwhile */
			np_channel_post(binding->channel, &binding->ev);
		}
	}
	spin_unlock(&peer->lock);
	np_bindings_free(&closed);
	trace_np_gone_receive(peer->hca->ibdev, peer->qpn, region_id, status);
	return status;
}
EXPORT_SYMBOL_IF_KUNIT(np_peer_told_gone);

/**
 * np_peer_uses - May somebody here use the keys of a peer's region
 * @peer: the peer
 * @region_id: the region
 *
 * As np_peer_told_gone(), but tells nobody and changes nothing.
 *
 * Return: true also if a RESOLVE may be about to bring them
 */
bool np_peer_uses(struct np_peer *peer, u64 region_id)
{
	struct np_binding *binding;
	bool uses;

	spin_lock(&peer->lock);
	uses = peer->resolving;
	for (binding = np_binding_first(peer, region_id); binding && !uses;
	     binding = np_binding_next(binding))
		uses = !np_channel_is_closed(binding->channel);
	spin_unlock(&peer->lock);
	return uses;
}

/* Answers */

/* Under the peer's lock: a copy of an answer that brought a hold which is still had. */
static bool np_kept_by(struct np_peer *peer, u64 tid)
{
	struct np_fault *fault;

	lockdep_assert_held(&peer->lock);
	list_for_each_entry(fault, &peer->kept, kept) {
		if (fault->trans.msg.tid == tid)
			return true;
	}
	return false;
}

/**
 * np_peer_answered - An answer came in
 * @peer: from whom
 * @msg: the answer
 */
void np_peer_answered(struct np_peer *peer, const struct np_msg *msg)
{
	struct np_trans *trans;
	bool kept, ended;

	spin_lock(&peer->lock);
	trans = np_trans_find(peer, msg);
	if (!trans) {
		/* A copy of an answer we have is nothing to release */
		kept = np_kept_by(peer, msg->tid);
		spin_unlock(&peer->lock);
		if (!kept)
			np_answer_late(peer, msg);
		return;
	}
	ended = np_trans_heard(trans, msg);
	if (ended && msg->type == NP_MSG_FAULT)
		np_fault_keep(trans, msg);
	spin_unlock(&peer->lock);

	if (ended)
		np_trans_finish(trans, msg->status, msg);
}
EXPORT_SYMBOL_IF_KUNIT(np_peer_answered);

/**
 * np_peer_answered_at_once - np_peer_answered(), if nothing has to be waited for
 * @peer: from whom
 * @msg: the answer
 *
 * That is of a FAULT which has brought its pages, and no hold: what most who wait for an
 * answer wait for. Its event tells it, and that is all there is to do.
 *
 * Context: softirq too: whom it interrupts may have the locks, so it waits for none
 * Return: false: nothing has happened, and np_peer_answered() must follow
 */
bool np_peer_answered_at_once(struct np_peer *peer, const struct np_msg *msg)
{
	struct np_fault *fault;
	struct np_trans *trans;

	if (msg->type != NP_MSG_FAULT || msg->status != RDMA_NP_OK || msg->faulted.hold_id)
		return false;
	if (!spin_trylock(&peer->lock))
		return false;
	trans = np_trans_find(peer, msg);
	if (!trans || trans->msg.fault.flags & RDMA_NP_FAULT_HOLD)
		goto later;
	fault = container_of(trans, struct np_fault, trans);
	np_fault_say_words(msg, &fault->ev.ev);
	fault->ev.ev.status = RDMA_NP_OK;
	/* The event's; who reads it meanwhile gives it back. The list's reference stays */
	kref_get(&trans->ref);
	if (!np_channel_try_post(fault->channel, &fault->ev)) {
		np_trans_put(trans);
		/* What comes of it in the end may be something else */
		fault->ev.ev.nr_words = 0;
		goto later;
	}
	np_trans_heard(trans, msg);
	__clear_bit(trans->msg.fault.lane, peer->lanes);
	spin_unlock(&peer->lock);
	trace_np_fault_complete(peer->hca->ibdev, peer->qpn, trans->msg.tid, msg->status,
				trans->tries, ktime_get_ns() - trans->sent);
	np_trans_end(trans);
	return true;

later:
	spin_unlock(&peer->lock);
	return false;
}
EXPORT_SYMBOL_IF_KUNIT(np_peer_answered_at_once);

/**
 * np_ask_kill - The QP is not connected any more: end all requests of ours
 * @peer: dead, so nothing new begins
 */
void np_ask_kill(struct np_peer *peer)
{
	struct np_fault *fault, *next;
	struct np_binding *binding, *after;
	struct np_trans *trans;
	LIST_HEAD(bindings);
	LIST_HEAD(kept);

	for (;;) {
		spin_lock(&peer->lock);
		trans = list_first_entry_or_null(&peer->trans, struct np_trans,
						 entry);
		if (trans)
			list_del_init(&trans->entry);
		spin_unlock(&peer->lock);
		if (!trans)
			break;
		np_trans_finish(trans, RDMA_NP_QP, NULL);
	}

	spin_lock(&peer->lock);
	rbtree_postorder_for_each_entry_safe(binding, after, &peer->bindings,
					     node)
		list_add(&binding->taken, &bindings);
	peer->bindings = RB_ROOT;
	peer->nr_bindings = 0;
	list_splice_init(&peer->kept, &kept);
	spin_unlock(&peer->lock);

	np_bindings_free(&bindings);
	/*
	 * The other end's QP may live on, and should not die for our holds. Ours does not,
	 * whatever it was that ended the peer: see np_client_remove().
	 */
	list_for_each_entry_safe(fault, next, &kept, kept) {
		list_del_init(&fault->kept);
		np_channel_unpost(fault->channel, &fault->recall);
		np_kept_less(fault);
		np_release_send(peer, fault->hold_id);
		np_trans_put(&fault->trans);
	}
}
EXPORT_SYMBOL_IF_KUNIT(np_ask_kill);

/**
 * np_ask_leave - End the requests that somebody waits for in a system call
 * @peer: of a device that is leaving, so none begins
 */
void np_ask_leave(struct np_peer *peer)
{
	struct np_trans *trans;
	bool found;

	do {
		found = false;
		spin_lock(&peer->lock);
		list_for_each_entry(trans, &peer->trans, entry) {
			found = trans->msg.type == NP_MSG_RESOLVE;
			if (found)
				break;
		}
		if (found)
			list_del_init(&trans->entry);
		spin_unlock(&peer->lock);
		if (found)
			np_trans_finish(trans, RDMA_NP_QP, NULL);
	} while (found);
}
EXPORT_SYMBOL_IF_KUNIT(np_ask_leave);
