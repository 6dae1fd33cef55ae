// SPDX-License-Identifier: GPL-2.0
/*
 * Transactions: requests to a peer, until they are answered or given up.
 *
 * A transaction is in its peer's list from the moment it may be answered until
 * somebody takes it out, under the peer's lock: the answer, the timer, a killed
 * caller, or the death of the peer.  Who took it finishes it, so it is finished
 * exactly once, and whoever comes later finds nothing.
 */
#include <linux/ktime.h>
#include <linux/random.h>
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "np_proto.h"

/*
 * Counts up from a random number: what is left over from an earlier boot
 * matches nothing.  It does not wrap: there are 2^63 to go.
 */
static atomic64_t np_last_tid;

/**
 * np_tid_init - Choose where transactions begin
 */
void np_tid_init(void)
{
	atomic64_set(&np_last_tid, get_random_u64() >> 2);
}

/**
 * np_tid_next - The number of one more transaction
 *
 * Return: more than all before, not 0
 */
u64 np_tid_next(void)
{
	return atomic64_inc_return(&np_last_tid);
}

/**
 * np_tid_last - The number of the newest transaction
 *
 * Return: as np_tid_next() said last
 */
u64 np_tid_last(void)
{
	return atomic64_read(&np_last_tid);
}

static void np_trans_free(struct kref *ref)
{
	struct np_trans *trans = container_of(ref, struct np_trans, ref);

	if (trans->release)
		trans->release(trans);
}

/**
 * np_trans_put - Give back a reference
 * @trans: the transaction
 */
void np_trans_put(struct np_trans *trans)
{
	kref_put(&trans->ref, np_trans_free);
}
EXPORT_SYMBOL_IF_KUNIT(np_trans_put);

static unsigned long np_trans_delay(struct np_trans *trans)
{
	return max(usecs_to_jiffies(np_rtt_timeout(&trans->peer->rtt,
						   trans->tries)), 1UL);
}

/**
 * np_trans_send - Send a request that is listed
 * @trans: the caller has a reference
 */
void np_trans_send(struct np_trans *trans)
{
	/* What does not get away now gets away next time, by MAD */
	np_peer_send(trans->peer, &trans->msg);
}

/* The list's and the timer's references to the peer and to @trans. */
static void np_trans_unref(struct np_trans *trans)
{
	struct np_peer *peer = trans->peer;

	np_trans_put(trans);
	np_peer_put(peer);
}

/**
 * np_trans_finish - A transaction ended
 * @trans: the caller took it off its peer's list
 * @status: how it ended, enum rdma_np_status
 * @answer: what the peer said; NULL: nothing
 *
 * Context: process context, without locks
 */
void np_trans_finish(struct np_trans *trans, u32 status,
			    const struct np_msg *answer)
{
	if (cancel_delayed_work(&trans->work))
		np_trans_unref(trans);
	trans->done(trans, status, answer);
	np_trans_unref(trans);
}

/**
 * np_trans_end - np_trans_finish() of what was told already: nothing is called
 * @trans: the caller took it off its peer's list
 *
 * Context: any but with the peer's lock
 */
void np_trans_end(struct np_trans *trans)
{
	if (cancel_delayed_work(&trans->work))
		np_trans_unref(trans);
	np_trans_unref(trans);
}

/*
 * Under the peer's lock: jiffies until a request may be sent again, or look again. What
 * holds up one answer holds up all that are under way, and to ask for all of them again,
 * by MAD, would cost both ends more than to answer. So there is one place for each
 * time-out, and who comes too late for it takes the next. If that is too far away, it
 * takes none, and looks again later: those before it may have been answered meanwhile.
 * An answer hastens the next.
 */
static unsigned long np_again_wait(struct np_trans *trans)
{
	struct np_peer *peer = trans->peer;
	unsigned long now = jiffies, at = peer->again;
	unsigned long last = now + usecs_to_jiffies(NP_RTO_MAX_US);

	lockdep_assert_held(&peer->lock);
	if (time_before(at, now))
		at = now;
	if (time_after(at, last))
		return last - now;
	peer->again = at + max(usecs_to_jiffies(np_rtt_timeout(&peer->rtt, 1)),
			       1UL);
	trans->placed = at != now;
	return at - now;
}

/*
 * Under the peer's lock, when the answer came to what was sent again: the peer is
 * there, and the next of those that wait for a place goes now.  So what was lost
 * together is asked for one by one, as fast as the peer answers.
 */
static void np_again_hasten(struct np_peer *peer)
{
	struct np_trans *trans;

	lockdep_assert_held(&peer->lock);
	list_for_each_entry(trans, &peer->trans, entry) {
		if (!trans->waits)
			continue;
		trans->placed = true;
		kref_get(&trans->ref);
		kref_get(&peer->ref);
		/* Its timer had these references already, unless it is running */
		if (mod_delayed_work(np_wq, &trans->work, 0))
			np_trans_unref(trans);
		return;
	}
}

/* Under the peer's lock: that of the memory's owner. */
static u64 np_trans_secret(const struct np_trans *trans)
{
	if (trans->msg.type == NP_MSG_RESOLVE)
		return 0;
	return np_msg_by_owner(trans->msg.type) ? trans->peer->our_secret :
						  trans->peer->their_secret;
}

static void np_trans_work(struct work_struct *work)
{
	struct np_trans *trans = container_of(to_delayed_work(work),
					      struct np_trans, work);
	struct np_peer *peer = trans->peer;
	unsigned long wait = 0;
	bool expired;

	spin_lock(&peer->lock);
	if (list_empty(&trans->entry)) {
		spin_unlock(&peer->lock);
		np_trans_unref(trans);
		return;
	}
	expired = trans->unheard >= NP_TRIES ||
		  time_after(jiffies, trans->deadline);
	if (expired) {
		list_del_init(&trans->entry);
	} else {
		if (!trans->placed)
			wait = np_again_wait(trans);
		trans->waits = wait;
		if (!wait) {
			trans->placed = false;
			trans->unheard++;
			if (trans->tries < 2 * NP_TRIES)
				trans->tries++;
			trans->msg.quick = false;
			/* A RESOLVE may have brought another one */
			trans->msg.secret = np_trans_secret(trans);
		}
		/* Who takes it off the list may cancel that, but not us */
		kref_get(&trans->ref);
		kref_get(&peer->ref);
		/* Hastened while it waited for the lock: that has its own references */
		if (!queue_delayed_work(np_wq, &trans->work,
					wait ?: np_trans_delay(trans)))
			np_trans_unref(trans);
	}
	spin_unlock(&peer->lock);

	if (expired)
		np_trans_finish(trans, RDMA_NP_TIMEOUT, NULL);
	else if (!wait)
		np_trans_send(trans);
	np_trans_unref(trans);
}

/**
 * np_trans_init - Prepare a request
 * @trans: zeroed; the caller has its first reference
 * @peer: to whom
 * @type: enum np_msg_type; the rest of @trans->msg is the caller's
 * @done: called once, when it was answered or given up
 * @release: called with the last reference
 */
void np_trans_init(struct np_trans *trans, struct np_peer *peer, u8 type,
		   void (*done)(struct np_trans *trans, u32 status,
				const struct np_msg *answer),
		   void (*release)(struct np_trans *trans))
{
	kref_init(&trans->ref);
	trans->peer = peer;
	INIT_LIST_HEAD(&trans->entry);
	INIT_DELAYED_WORK(&trans->work, np_trans_work);
	trans->done = done;
	trans->release = release;
	trans->msg.type = type;
	/* RESOLVE tells the UD QPs, and makes peers, which only a MAD can */
	trans->msg.quick = type != NP_MSG_RESOLVE;
	trans->msg.src_qpn = peer->qpn;
	trans->msg.dst_qpn = peer->remote_qpn;
	trans->msg.tid = np_tid_next();
}
EXPORT_SYMBOL_IF_KUNIT(np_trans_init);

/*
 * Under the peer's lock, when something is heard of what went by the quick transport
 * first. An answer by MAD says that it was lost there, or its answer was: partitions, a
 * firewall, or a port that is overrun may do that to all, and then each request would
 * cost a time-out.
 */
static void np_quick_judge(struct np_trans *trans, const struct np_msg *answer)
{
	struct np_peer *peer = trans->peer;

	lockdep_assert_held(&peer->lock);
	trans->quick = false;
	/* The second copy is what WORKING answers: so the first one was there */
	if (answer->quick || (answer->status == NP_WIRE_WORKING &&
			      trans->tries == 2)) {
		peer->quick_lost = 0;
		return;
	}
	/* Of those that were lost together one counts */
	if (answer->status == NP_WIRE_WORKING ||
	    trans->sent < peer->quick_lost_at)
		return;
	peer->quick_lost_at = ktime_get_ns();
	if (++peer->quick_lost < NP_QUICK_TRIES)
		return;
	peer->quick_lost = NP_QUICK_TRIES - 1;
	WRITE_ONCE(peer->quick_after,
		   jiffies + msecs_to_jiffies(NP_QUICK_PAUSE_MS));
}

/**
 * np_trans_list - Begin to wait for the answer
 * @trans: prepared, or finished before; the caller sends it soon
 *
 * Context: under the peer's lock, and the peer is alive
 */
void np_trans_list(struct np_trans *trans)
{
	struct np_peer *peer = trans->peer;

	lockdep_assert_held(&peer->lock);
	kref_get(&trans->ref);
	kref_get(&peer->ref);
	list_add_tail(&trans->entry, &peer->trans);

	/* What comes late for an earlier time is no answer to this one */
	trans->msg.tid = np_tid_next();
	trans->msg.secret = np_trans_secret(trans);
	trans->msg.quick = trans->msg.quick && np_quick_is_used(peer);
	trans->quick = trans->msg.quick && np_ud_reaches(peer->path);
	trans->sent = ktime_get_ns();
	trans->deadline = jiffies + msecs_to_jiffies(NP_WORKING_MS);
	trans->tries = 1;
	trans->unheard = 1;
	trans->waits = false;
	trans->placed = false;
	kref_get(&trans->ref);
	kref_get(&peer->ref);
	if (!queue_delayed_work(np_wq, &trans->work, np_trans_delay(trans)))
		np_trans_unref(trans);
}

/**
 * np_trans_start - Send a request
 * @trans: prepared
 *
 * Context: process context; takes only the peer's lock, does not wait
 * Return: 0, then @done will be called; -ENOTCONN: the peer is dead
 */
int np_trans_start(struct np_trans *trans)
{
	struct np_peer *peer = trans->peer;

	spin_lock(&peer->lock);
	if (peer->dead) {
		spin_unlock(&peer->lock);
		return -ENOTCONN;
	}
	np_trans_list(trans);
	spin_unlock(&peer->lock);
	np_trans_send(trans);
	return 0;
}
EXPORT_SYMBOL_IF_KUNIT(np_trans_start);

/**
 * np_trans_cancel - Stop waiting for the answer
 * @trans: started
 *
 * Return: true if it ends here and @done is not called; false if @done was or
 * is being called
 */
bool np_trans_cancel(struct np_trans *trans)
{
	struct np_peer *peer = trans->peer;

	spin_lock(&peer->lock);
	if (list_empty(&trans->entry)) {
		spin_unlock(&peer->lock);
		return false;
	}
	list_del_init(&trans->entry);
	spin_unlock(&peer->lock);
	np_trans_end(trans);
	return true;
}
EXPORT_SYMBOL_IF_KUNIT(np_trans_cancel);

/**
 * np_trans_find - The request that an answer is of
 * @peer: from whom it is; its lock is held
 * @msg: the answer
 *
 * Return: the transaction, which is listed, or NULL
 */
struct np_trans *np_trans_find(struct np_peer *peer, const struct np_msg *msg)
{
	struct np_trans *trans;

	lockdep_assert_held(&peer->lock);
	list_for_each_entry(trans, &peer->trans, entry) {
		if (trans->msg.tid == msg->tid && trans->msg.type == msg->type &&
		    trans->msg.nonce == msg->nonce)
			return trans;
	}
	return NULL;
}

/**
 * np_trans_heard - An answer came in
 * @trans: listed; the lock of its peer is held
 * @msg: the answer
 *
 * Return: true: it is off the list, and np_trans_finish() must follow; false: the peer is
 * still at work
 */
bool np_trans_heard(struct np_trans *trans, const struct np_msg *msg)
{
	struct np_peer *peer = trans->peer;

	lockdep_assert_held(&peer->lock);
	peer->heard = true;
	if (msg->type == NP_MSG_RESOLVE && !msg->status)
		WRITE_ONCE(peer->their_secret, msg->given);
	if (msg->type == NP_MSG_RESOLVE)
		np_ud_learn(peer->path, msg);
	else if (!msg->quick)
		WRITE_ONCE(peer->path->ud_known, true);
	if (trans->quick)
		np_quick_judge(trans, msg);
	if (msg->status == NP_WIRE_WORKING) {
		trans->unheard = 0;
		return false;
	}
	list_del_init(&trans->entry);
	/*
	 * Only the first time it goes the quick way, and so the answer to that comes. If
	 * it was sent again for nothing, this is what has to be learned: else a peer
	 * that is slow gets each request twice, and the second time by MAD.
	 * Making keys takes long, and says nothing about FAULT.
	 */
	if ((trans->tries == 1 || msg->quick) && msg->type != NP_MSG_RESOLVE)
		np_rtt_sample(&peer->rtt, (ktime_get_ns() - trans->sent) /
					  NSEC_PER_USEC);
	if (trans->tries > 1)
		np_again_hasten(peer);
	return true;
}
