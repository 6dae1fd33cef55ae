/* SPDX-License-Identifier: GPL-2.0 */
/*
 * nprdma: the protocol between kernels, module ib_nprdma.
 *
 * Its layers, of which each calls those below it only; who is called from below is given
 * as a function when the layer begins:
 *
 *   main.c                     the client: devices come and go
 *   receive.c                  what arrives: who is believed, and where it goes
 *   serve.c                    a peer's FAULT and RESOLVE of our memory
 *   grant.c held.c             what a peer has of it: keys, and holds
 *   ask.c                      our requests, and what they bring
 *   trans.c channel.c          requests until they are answered; events for user space
 *   peer.c                     a QP of ours, and who its other end is
 *   mad.c path.c ud.c          how messages go
 *   sched.c                    whose FAULT is served next, and bounds for each owner
 *   hca.c                      the protocol's part of a device, and its bounds
 *   wire.c                     messages
 *   ------------------------   np.h
 *   the regions                in ib_core, see np_region.h
 *
 * np_uverbs.c, a part of ib_uverbs, gives user space what ask.c and the regions do.
 *
 * Messages travel as vendor MADs on QP1, or on a UD QP of the kernel's that is known
 * from them (ud.c).  A Q_Key proves nothing: a process with CAP_NET_RAW may set a
 * privileged one.  The number of the QP that sent a message does, because the adapter
 * stamps it: see np_receive().  And an address is not enough: functions of one adapter
 * share their LID.  So the owner of memory makes a secret for each peer, and tells it in
 * the answer to RESOLVE, which goes to the address of the queue pair, whoever asked.  All
 * other messages about that memory carry the secret, in both directions.  RESOLVE carries
 * a nonce in its place, which the answer repeats.
 *
 * The MAD method is always Send: this code, not the MAD layer, matches and repeats
 * messages.  Who sends a request repeats it until it is answered, or gives it up.  The
 * owner's kernel asks GONE and RECALL, and answers all others.
 *
 *   RESOLVE  rkey, address -> keys.  Repeating it is harmless.  The address says which part
 *                                    of a region of the whole address space is meant.
 *   FAULT    ranges -> words, hold.  Executed at most once: see struct np_lane.
 *   RELEASE  of a hold.              Repeating it is harmless, ids are not reused.
 *   FORGET   of a region's keys.     Carries the tid of the newest RESOLVE it
 *                                    undoes, so a late copy cannot undo a newer one,
 *                                    nor one that was under way.
 *   GONE     the other way, from the region's owner: forget it.  Answered BUSY
 *            for as long as somebody uses the keys; then asked again, in its turn:
 *            see struct np_pgrant.
 *   RECALL   likewise, of a hold that is a lease: give it back soon.  Answered BUSY
 *            while the grant may be on its way, GONE by who has no such hold.
 */
#ifndef NP_PROTO_H
#define NP_PROTO_H

#include <linux/completion.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/rbtree.h>
#include <linux/sched/task.h>
#include <linux/spinlock.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_verbs.h>

#include "np.h"
#include "np_hca.h"
#include "np_wire.h"

/* Peers (peer.c) */

/*
 * Regions that one QP may have resolved, for each channel, and keep after they
 * are gone.
 */
#define NP_MAX_BINDINGS		65536
/* Channels that use one region through a QP: all are looked at when it is gone */
#define NP_MAX_CHANNELS		16
/*
 * Holds that one QP may have, when it asks for one more; those being given back
 * count until the other end has answered.
 */
#define NP_MAX_KEPT		256
/* A RECALL that was not answered, or answered BUSY, is sent again after */
#define NP_RECALL_AGAIN_MS	20
/* How old leases are is looked at so often, because the parameter that bounds it may change */
#define NP_RENEW_MS		2000
/* Of the holds, leases that it may have when it asks for one more. */
#define NP_MAX_LEASES		192
/*
 * RESOLVEs of one QP under way, and, apart from these, FORGETs: the other end
 * serves no more than NP_SERVE_CONTROL of them.
 */
#define NP_MAX_ASKED		64
/*
 * Regions of ours whose keys one QP's other end may have; of these, dead ones that it
 * has not forgotten: who keeps more memory of others from ending loses the QP; and
 * GONEs under way, of these.
 */
#define NP_MAX_GRANTS		65536
#define NP_MAX_GONE		4096
#define NP_MAX_TELLING		8
/*
 * With FAULTs, which have their lanes, and RELEASEs, of which there are no more than
 * holds, and RECALLs, of which there are no more than leases, these are all transactions
 * of a peer.  An answer is looked up among them, and among the holds, under the peer's
 * lock.  A FAULT that asks for a hold counts as one when it is answered, so there may be
 * a lane's more for each but one.
 */
#define NP_MAX_UNDER_WAY	(NP_LANES + 2 * NP_MAX_ASKED + NP_MAX_TELLING + \
				 NP_MAX_KEPT + NP_LANES - 1 + NP_MAX_LEASES)

struct np_serve;
struct np_channel;

/**
 * struct np_peer - a connected RC QP of ours, and all state about its other end
 * @ref: the table's, and each user's
 * @rcu: for freeing
 * @hca: holds a reference
 * @port: the QP's
 * @qp: compare only, except under a restrack reference
 * @pd: compare only
 * @qpn: ours
 * @left: ib_qp_np.left of @qp when the peer was made: another one says that it has ended
 * @remote_qpn: theirs
 * @our_secret: proves messages about our memory
 * @their_secret: proves messages about theirs; 0: nothing was resolved
 * @addr: theirs
 * @promised: keys of which it was promised that they are no region's
 * @lock: protects what follows, up to @ctl
 * @path: to it; NULL: the peer has ended
 * @dead: the QP left the connected states; nothing new begins
 * @heard: the other kernel did answer once
 * @rtt: to it
 * @quick_lost: what the quick transport lost in a row
 * @quick_lost_at: ns: when the last one was noticed
 * @quick_after: jiffies: when it may be used
 * @again: jiffies: when the next request may be sent again
 * @active: requests of the other end being served, but for FAULTs
 * @control: of these, other than FAULT
 * @faulting: FAULTs of the other end under way here
 * @resolves: RESOLVEs of ours under way, the oldest first
 * @resolving: their number
 * @forgetting: FORGETs of ours under way
 * @trans: struct np_trans under way
 * @lanes: those in which a FAULT of ours is under way
 * @lanes_closed: how many are not used, because the other end was full
 * @lanes_since: jiffies: since when it is so many
 * @nr_lanes: how many the other end has, as its last answer to RESOLVE said; at most
 *            ours
 * @max_ranges: likewise: bound of one FAULT
 * @max_pages: likewise: bound of one FAULT
 * @bindings: struct np_binding by region id, which the other end chose: keys we were
 *            given
 * @nr_bindings: their number
 * @kept: holds we were given: struct np_fault
 * @nr_kept: their number, those being given back included
 * @nr_kept_leases: of these, leases
 * @serve: lanes of the other end; NULL until it resolved something
 * @holds: struct np_held: pages that the other end has to give back, the first ones first
 * @leases: likewise, those that it may keep
 * @held: both by id
 * @held_pages: their number without those of leases, those being granted included
 * @leased_pages: those of leases, likewise
 * @nr_leases: leases, those being granted included
 * @lease_lost: a lease was not given back in time; there are none until
 * @leases_from: jiffies
 * @to_tell: struct np_pgrant: GONEs that wait for their turn, never sent
 * @tell_again: likewise, not answered with what would end them
 * @telling: GONEs under way, which are in neither
 * @gone_pause: jiffies between GONEs of @tell_again; 0: the first ones
 * @nr_gone: grants of regions that are gone
 * @idle: woken when @active falls to 0
 * @gone: the kill is complete
 * @ctl: serialises RESOLVE, FORGET and ungranting; protects @grants
 * @grants: struct np_pgrant by region id: keys the other end was given; its
 *          lock keeps the region of an entry that was found
 * @nr_grants: their number
 * @expire: ends holds not given back in time
 * @renew: recalls leases of some age
 * @gone_again: sends those of @tell_again
 * @too_many_gone: ends the QP that keeps the keys of too many regions that are gone
 * @failed: ends the peer after the device failed its QP
 * @fail_again: ends the QP if its destruction fails, which kept us from that
 * @free: frees the peer, whose last reference may be given back where nobody may sleep
 */
struct np_peer {
	struct kref ref;
	struct rcu_head rcu;
	struct np_hca *hca;
	struct np_port *port;
	struct ib_qp *qp;
	struct ib_pd *pd;
	u32 qpn;
	u32 left;
	u32 remote_qpn;
	u64 our_secret;
	u64 their_secret;
	struct np_addr addr;
	struct np_promise_user promised;

	spinlock_t lock; /* of what follows */
	struct np_path *path;
	bool dead;
	bool heard;
	struct np_rtt rtt;
	unsigned int quick_lost;
	u64 quick_lost_at;
	unsigned long quick_after;
	unsigned long again;
	unsigned int active;
	unsigned int control;
	unsigned int faulting;
	struct list_head resolves;
	unsigned int resolving;
	unsigned int forgetting;
	struct list_head trans;
	DECLARE_BITMAP(lanes, NP_LANES);
	unsigned int lanes_closed;
	unsigned long lanes_since;
	u16 nr_lanes;
	u16 max_ranges;
	u32 max_pages;
	struct rb_root bindings;
	unsigned int nr_bindings;
	struct list_head kept;
	unsigned int nr_kept;
	unsigned int nr_kept_leases;
	struct np_serve *serve;
	struct list_head holds;
	struct list_head leases;
	struct rb_root held;
	unsigned long held_pages;
	unsigned long leased_pages;
	unsigned int nr_leases;
	bool lease_lost;
	unsigned long leases_from;
	struct list_head to_tell;
	struct list_head tell_again;
	unsigned int telling;
	unsigned long gone_pause;
	unsigned int nr_gone;
	wait_queue_head_t idle;
	struct completion gone;

	struct mutex ctl; /* of what follows */
	struct xarray grants;
	unsigned int nr_grants;
	struct delayed_work expire;
	struct delayed_work renew;
	struct delayed_work gone_again;
	struct work_struct too_many_gone;
	struct work_struct failed;
	struct delayed_work fail_again;
	struct work_struct free;
};

/**
 * struct np_trans - a request of ours until it is answered or given up
 * @ref: the list's, the timer's and the owner's
 * @peer: holds a reference while listed
 * @entry: in np_peer.trans; empty: finished
 * @work: sends it again
 * @msg: the request
 * @sent: first time, ns
 * @deadline: jiffies, even if the peer says WORKING
 * @tries: times it was sent
 * @unheard: times it was sent since the peer last said anything about it
 * @quick: went by the quick transport first, and nothing was heard of that yet
 * @waits: its time-out has passed, and it has not been sent again since
 * @placed: is sent again when @work runs next, whatever else is
 * @done: called once, in process context, without locks
 * @release: frees the structure around it; NULL: its owner does
 */
struct np_trans {
	struct kref ref;
	struct np_peer *peer;
	struct list_head entry;
	struct delayed_work work;
	struct np_msg msg;
	u64 sent;
	unsigned long deadline;
	unsigned int tries;
	unsigned int unheard;
	bool quick;
	bool waits;
	bool placed;
	void (*done)(struct np_trans *trans, u32 status,
		     const struct np_msg *answer);
	void (*release)(struct np_trans *trans);
};

/**
 * struct np_ev - an event and its place in a channel's queue
 * @entry: in np_channel.events; empty: not queued
 * @ev: what user space reads
 * @seq: number of the event in its channel, while queued
 * @reserved: counted in np_channel.reserved until it was read or dropped
 * @consumed: called when it was read or dropped, without locks; or NULL
 */
struct np_ev {
	struct list_head entry;
	struct rdma_np_event ev;
	u64 seq;
	bool reserved;
	void (*consumed)(struct np_ev *ev);
};

/**
 * struct np_binding - a channel was given a region's keys for a QP
 * @node: in np_peer.bindings
 * @taken: in a list of those to be freed
 * @channel: reference
 * @region_id: the region
 * @posted: RDMA_NP_EVENT_REGION_GONE was
 * @ev: that
 */
struct np_binding {
	struct rb_node node;
	struct list_head taken;
	struct np_channel *channel;
	u64 region_id;
	bool posted;
	struct np_ev ev;
};

/**
 * struct np_peer_ops - what the layers above make of a peer
 * @init: prepare their part of a zeroed one
 * @end_asking: it is dead: end the requests of ours
 * @end_serving: it is dead, and nobody serves it: undo what was done for the other end
 * @leave: the device leaves: end what others wait for in system calls
 */
struct np_peer_ops {
	void (*init)(struct np_peer *peer);
	void (*end_asking)(struct np_peer *peer);
	void (*end_serving)(struct np_peer *peer);
	void (*leave)(struct np_peer *peer);
};

struct np_peer *np_peer_find(struct np_hca *hca, u32 qpn);
struct np_peer *np_peer_get(struct ib_qp *qp);
struct np_peer *np_peer_make(struct ib_qp *qp);
void np_peer_put(struct np_peer *peer);
bool np_peer_begin(struct np_peer *peer);
void np_peer_end(struct np_peer *peer);
struct np_path *np_peer_path(struct np_peer *peer);
struct np_path *np_peer_try_path(struct np_peer *peer);
void np_peer_send(struct np_peer *peer, const struct np_msg *msg);
void np_answer_init(struct np_msg *answer, const struct np_msg *msg, u32 status);
void np_answer_peer(struct np_peer *peer, const struct np_msg *answer);
void np_answer_status(struct np_peer *peer, const struct np_msg *msg, u32 status);
void np_peer_fail(struct np_peer *peer);
struct task_struct *np_peer_task(struct np_peer *peer);
int np_peer_tell(struct ib_device *ibdev, u32 qpn, struct rdma_np_qp_info *out);
bool np_peer_queue_kill(struct work_struct *work);
void np_peer_kill_device(struct np_hca *hca);
bool np_qp_may_be_connected(struct ib_qp *qp, u32 qpn, const struct np_addr *from);
/* Something is refused to who has the QP, or it is about to be ended; without locks */
#define np_peer_refuse(peer, fmt, ...)						\
do {										\
	struct np_peer *_peer = (peer);						\
	struct task_struct *_task = np_peer_task(_peer);			\
										\
	np_refuse_task(_task, _peer->hca->ibdev, fmt, ##__VA_ARGS__);		\
	if (_task)								\
		put_task_struct(_task);						\
} while (0)

void np_peer_init(const struct np_peer_ops *ops);
void np_peer_listen(void);
void np_peer_deafen(void);
#if IS_ENABLED(CONFIG_KUNIT)
void np_peer_prepare(struct np_peer *peer);
#endif

/* A message of ours may go by the quick transport. */
static inline bool np_quick_is_used(const struct np_peer *peer)
{
	return !time_before(jiffies, READ_ONCE(peer->quick_after));
}

/* Transactions (trans.c) */

void np_tid_init(void);
u64 np_tid_next(void);
u64 np_tid_last(void);
void np_trans_init(struct np_trans *trans, struct np_peer *peer, u8 type,
		   void (*done)(struct np_trans *trans, u32 status,
				const struct np_msg *answer),
		   void (*release)(struct np_trans *trans));
void np_trans_list(struct np_trans *trans);
void np_trans_send(struct np_trans *trans);
int np_trans_start(struct np_trans *trans);
bool np_trans_cancel(struct np_trans *trans);
void np_trans_put(struct np_trans *trans);
struct np_trans *np_trans_find(struct np_peer *peer, const struct np_msg *msg);
bool np_trans_heard(struct np_trans *trans, const struct np_msg *msg);
void np_trans_finish(struct np_trans *trans, u32 status,
		     const struct np_msg *answer);
void np_trans_end(struct np_trans *trans);

/* Asking (ask.c) */

int np_peer_resolve(struct np_peer *peer, struct np_channel *channel, u32 rkey,
		    u64 addr, struct np_resolve *out);
int np_peer_fault(struct np_peer *peer, struct np_channel *channel,
		  const struct rdma_np_fault_req *req, const struct rdma_np_range *ranges,
		  unsigned int nr);
int np_peer_release(struct np_peer *peer, u64 hold_id);
int np_peer_forget(struct np_peer *peer, u64 region_id);
u32 np_peer_told_gone(struct np_peer *peer, u64 region_id);
u32 np_peer_told_recall(struct np_peer *peer, u64 hold_id);
bool np_peer_keeps(struct np_peer *peer, u64 hold_id);
bool np_peer_uses(struct np_peer *peer, u64 region_id);
void np_peer_answered(struct np_peer *peer, const struct np_msg *msg);
bool np_peer_answered_at_once(struct np_peer *peer, const struct np_msg *msg);
void np_ask_kill(struct np_peer *peer);
void np_ask_leave(struct np_peer *peer);

/* Holds of peers (held.c) */

/**
 * struct np_held - a hold that we granted
 * @entry: in np_peer.holds or leases
 * @node: in np_peer.held
 * @work: releases it
 * @peer: reference while @work or @wanted_work is queued; it has us
 * @hold: the region's
 * @owner: of the region; reference
 * @id: cannot be guessed, and is looked up in its own peer only
 * @pages: what it counts in the bounds
 * @granted_at: jiffies: in np_peer.leases it is recalled np_lease_ms later
 * @expires: jiffies: in np_peer.holds it ends then
 * @lease: reference to its region; NULL: it is none. What follows is about leases
 * @granted: it is in a list of the peer's; under its lock
 * @wanted: it is to be given back; under the peer's lock
 * @recalled: since it was granted, so it has a time limit; under the peer's lock
 * @expired: it was not, and ends
 * @recall: called once when it is wanted back
 * @wanted_work: tells the peer
 * @tell: the RECALL; its references are those of the whole
 */
struct np_held {
	struct list_head entry;
	struct rb_node node;
	struct work_struct work;
	struct np_peer *peer;
	struct np_hold *hold;
	struct np_owner *owner;
	u64 id;
	unsigned int pages;
	unsigned long granted_at;
	unsigned long expires;
	struct np_region *lease;
	bool granted;
	bool wanted;
	bool recalled;
	bool expired;
	struct np_recall recall;
	struct delayed_work wanted_work;
	struct np_trans tell;
};

struct np_held *np_held_make(struct np_peer *peer, struct np_region *region,
			     struct np_owner *owner, unsigned int pages, u32 flags);
void np_held_shrink(struct np_held *held, unsigned int pages);
void np_held_drop(struct np_peer *peer, struct np_held *held);
bool np_held_add(struct np_peer *peer, struct np_held *held);
void np_held_release(struct np_peer *peer, u64 id);
void np_held_answered(struct np_peer *peer, struct np_msg *answer);
void np_held_leave(struct np_peer *peer);
void np_held_init(struct np_peer *peer);
void np_held_kill(struct np_peer *peer);

/* Grants (grant.c) */

struct np_pgrant;

struct np_pgrant *np_pgrant_find(struct np_peer *peer, u64 id);
struct np_pgrant *np_pgrant_make(struct np_peer *peer,
				 struct np_region *region);
void np_pgrant_resolved(struct np_pgrant *pg, u64 tid);
void np_pgrant_drop(struct np_pgrant *pg);
struct np_region *np_grant_begin(struct np_peer *peer, u64 id, unsigned int depth,
				 struct np_owner **owner);
void np_grant_forget(struct np_peer *peer, const struct np_msg *msg);
void np_grant_init(struct np_peer *peer);
void np_grant_kill(struct np_peer *peer);

/* Serving (serve.c) */

#ifdef CONFIG_INFINIBAND_NPRDMA_REGIONS
void np_serve_fault(struct np_peer *peer, const struct np_msg *msg);
void np_serve_release(struct np_peer *peer, const struct np_msg *msg);
int np_serve_resolve(struct np_peer *peer, const struct np_msg *msg,
		     struct np_resolve *out);
void np_serve_forget(struct np_peer *peer, const struct np_msg *msg);
void np_serve_init(struct np_peer *peer);
void np_serve_kill(struct np_peer *peer);
void np_serve_leave(struct np_peer *peer);
#else
/* A host without regions answers as one whose regions are all of others, or gone */
static inline void np_serve_fault(struct np_peer *peer, const struct np_msg *msg)
{
	np_answer_status(peer, msg, RDMA_NP_GONE);
}

static inline void np_serve_release(struct np_peer *peer, const struct np_msg *msg)
{
	np_answer_status(peer, msg, RDMA_NP_OK);
}

static inline int np_serve_resolve(struct np_peer *peer, const struct np_msg *msg,
				   struct np_resolve *out)
{
	return -EACCES;
}

static inline void np_serve_forget(struct np_peer *peer, const struct np_msg *msg)
{
}

static inline void np_serve_init(struct np_peer *peer)
{
}

static inline void np_serve_kill(struct np_peer *peer)
{
}

static inline void np_serve_leave(struct np_peer *peer)
{
}
#endif

/* Arrivals (receive.c) */

np_receive_fn np_receive;
np_receive_at_once_fn np_receive_at_once;
#if IS_ENABLED(CONFIG_KUNIT)
extern unsigned int np_hold_ms;
extern unsigned int np_lease_ms;
int np_serve_alloc(struct np_peer *peer);
void np_binding_add(struct np_peer *peer, struct np_binding *binding);
int np_held_reserve(struct np_peer *peer, struct np_owner *owner,
		    struct np_region *lease, unsigned int pages);
void np_held_unreserve(struct np_peer *peer, struct np_owner *owner,
		       struct np_region *lease, unsigned int pages);
#endif

/* Channels (channel.c) */

/**
 * struct np_channel - a queue of events
 * @ref: its file's, each FAULT's and each binding's
 * @release: called with the last reference
 * @lock: protects the rest
 * @events: struct np_ev
 * @seq: of the newest event, from 1
 * @reserved: those of @events, or still to come, that were reserved
 * @closed: no more events
 * @posted: NULL, or where readers see @seq without a system call; U64_MAX: @closed
 * @wait: for readers
 */
struct np_channel {
	struct kref ref;
	void (*release)(struct np_channel *channel);
	spinlock_t lock; /* of what follows */
	struct list_head events;
	u64 seq;
	unsigned int reserved;
	bool closed;
	u64 *posted;
	wait_queue_head_t wait;
};

void np_channel_init(struct np_channel *channel,
		     void (*release)(struct np_channel *channel));
struct np_channel *np_channel_get(struct np_channel *channel);
void np_channel_put(struct np_channel *channel);
int np_channel_reserve(struct np_channel *channel);
void np_channel_unreserve(struct np_channel *channel);
bool np_channel_post(struct np_channel *channel, struct np_ev *ev);
bool np_channel_try_post(struct np_channel *channel, struct np_ev *ev);
void np_channel_unpost(struct np_channel *channel, struct np_ev *ev);
u64 np_channel_peek(struct np_channel *channel, struct rdma_np_event *out);
void np_channel_take(struct np_channel *channel, u64 seq);
bool np_channel_pop(struct np_channel *channel, struct rdma_np_event *out);
bool np_channel_is_closed(struct np_channel *channel);
void np_channel_close(struct np_channel *channel);

#endif /* NP_PROTO_H */
