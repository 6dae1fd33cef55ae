/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The protocol between kernels: what goes over the wire, and what proto.c
 * (messages, answers given before), mad.c and ud.c (transports), peer.c (QP
 * pairs), ask.c and serve.c (its two sides) and np_uverbs.c (user space) share.
 *
 * Messages travel as vendor MADs on QP1, or on a UD QP of the kernel's that is known
 * from them (ud.c).  A Q_Key proves nothing: a process with CAP_NET_RAW may set a
 * privileged one.  The number of the QP that sent a message does, because the adapter
 * stamps it: see np_receive().  And an address is not enough: functions of one adapter
 * share their LID.  So the owner of memory makes a secret for each peer, and tells it in
 * the answer to RESOLVE, which goes to the address of the queue pair, whoever asked.  All
 * other messages about that memory carry the secret, in both directions.  The answer to
 * RESOLVE carries a nonce of the request instead.
 *
 * The method is always Send, so requests and answers are matched, repeated and
 * given up here and not in the MAD layer.  The asker owns retransmission; the
 * answerer never sends on its own except for an answer.
 *
 *   RESOLVE  rkey -> keys.           Repeating it is harmless.
 *   FAULT    ranges -> words, hold.  Executed at most once: see struct np_serve.
 *   RELEASE  of a hold.              Repeating it is harmless, ids are not reused.
 *   FORGET   of a region's keys.     Carries the tid of the newest RESOLVE it
 *                                    undoes, so a late copy cannot undo a newer one,
 *                                    nor one that was under way.
 *   GONE     the other way, from the region's owner: forget it.  Answered BUSY
 *            for as long as somebody uses the keys; then asked again, in its turn:
 *            see struct np_pgrant.
 *
 * Lock order: np_peer.ctl > np_region.lock > np_peer.lock > np_channel.lock.
 * ib_qp_np.lock is taken with none of them held, and none but np_hca.peers' under it.
 */
#ifndef NP_PROTO_H
#define NP_PROTO_H

#include <linux/completion.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/rbtree.h>
#include <linux/spinlock.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_verbs.h>

#include "np.h"

/* --- the wire ------------------------------------------------------------ */

/* A class of vendor range 2. The OUI has the "locally administered" bit. */
#define NP_MAD_CLASS		0x3c
#define NP_MAD_CLASS_VERSION	1
#define NP_MAD_OUI		{ 0x02, 'N', 'P' }

#define NP_WIRE_VERSION		2
#define NP_WIRE_SIZE		IB_MGMT_VENDOR_DATA

enum np_msg_type {
	NP_MSG_RESOLVE = 1,
	NP_MSG_FAULT,
	NP_MSG_RELEASE,
	NP_MSG_FORGET,
	NP_MSG_GONE,
	NP_MSG_LAST = NP_MSG_GONE,
};

/* np_wire_hdr.flags */
#define NP_WIRE_ANSWER		BIT(0)

/*
 * np_wire_hdr.status of FAULT, beside enum rdma_np_status: the request arrived and is
 * being served, which is said when it arrives again; there are too many FAULTs here,
 * and this one was not even looked at, which user space hears of as RDMA_NP_BUSY.
 * Nobody is kept waiting for an answer to anything else by who says that it is at work.
 */
#define NP_WIRE_WORKING		0x80
#define NP_WIRE_FULL		0x81

/**
 * struct np_wire_hdr - begins each message
 * @version: NP_WIRE_VERSION
 * @type: enum np_msg_type
 * @flags: NP_WIRE_ANSWER
 * @status: of an answer; 0 in a request
 * @length: bytes that follow the header
 * @ud_pkey: the partition of @ud_qpn
 * @ud_qpn: the sender's UD QP for the quick transport; 0: none
 * @reserved: 0
 * @src_qpn: the sender's QP of the connected pair
 * @dst_qpn: the receiver's
 * @incarnation: random number of the sender's boot
 * @tid: transaction, counted up by the asker from boot to reboot
 * @secret: of the owner of the memory that it is about, for this pair; 0 with RESOLVE
 *
 * The header is the same in all versions from 2 on.
 */
struct np_wire_hdr {
	u8 version;
	u8 type;
	u8 flags;
	u8 status;
	__be16 length;
	__be16 ud_pkey;
	__be32 ud_qpn;
	__be32 reserved;
	__be32 src_qpn;
	__be32 dst_qpn;
	__be64 incarnation;
	__be64 tid;
	__be64 secret;
};

struct np_wire_resolve {
	__be32 rkey;
	__be32 reserved;
	__be64 nonce;
};

/* An answer to RESOLVE other than OK */
struct np_wire_refused {
	__be64 nonce;
};

/* Sizes, bounds and the order of READs are what struct np_resolve says */
struct np_wire_region {
	__be64 id;
	__be64 base;
	__be64 length;
	__be64 read_addr;
	__be64 write_addr;
	__be64 table_addr;
	__be64 signature;
	__be32 access;
	__be32 table_key;
	__be32 read_key;
	__be32 write_key;
	__be64 secret;
	__be64 nonce;
	u8 page_shift;
	u8 unit_shift;
	u8 read_order;
	u8 reserved;
	__be32 max_pages;
	__be16 max_ranges;
	__be16 lanes;
	__be32 reserved2;
	__be64 reserved3[2];
};

struct np_wire_range {
	__be64 addr;
	__be64 length;
};

struct np_wire_fault {
	__be64 region_id;
	__be32 flags;
	__be16 lane;
	__be16 nr_ranges;
	struct np_wire_range ranges[RDMA_NP_MAX_RANGES];
};

struct np_wire_faulted {
	__be64 hold_id;
	__be32 nr_words;
	__be32 reserved;
	__be64 words[RDMA_NP_EVENT_WORDS];
};

struct np_wire_release {
	__be64 hold_id;
};

/* FORGET and GONE */
struct np_wire_forget {
	__be64 region_id;
	__be64 seq;
};

struct np_wire {
	struct np_wire_hdr hdr;
	union {
		struct np_wire_resolve resolve;
		struct np_wire_region region;
		struct np_wire_refused refused;
		struct np_wire_fault fault;
		struct np_wire_faulted faulted;
		struct np_wire_release release;
		struct np_wire_forget forget;
		u8 body[NP_WIRE_SIZE - sizeof(struct np_wire_hdr)];
	};
};

static_assert(sizeof(struct np_wire_hdr) == 48);
static_assert(sizeof(struct np_wire_resolve) == 16);
static_assert(sizeof(struct np_wire_refused) == 8);
static_assert(sizeof(struct np_wire_region) == 120);
static_assert(sizeof(struct np_wire_fault) == 144);
static_assert(sizeof(struct np_wire_faulted) == 144);
static_assert(sizeof(struct np_wire_release) == 8);
static_assert(sizeof(struct np_wire_forget) == 16);
static_assert(sizeof(struct np_wire) == NP_WIRE_SIZE);

/* --- messages in the kernel's own terms (proto.c) ------------------------- */

/**
 * struct np_msg - a decoded message
 * @type: enum np_msg_type
 * @answer: it is one
 * @status: of an answer
 * @quick: came, or is to go, by the quick transport; not on the wire
 * @ud_pkey: the partition of @ud_qpn; filled in when it is sent
 * @ud_qpn: the sender's UD QP; filled in when it is sent
 * @src_qpn: the sender's QP
 * @dst_qpn: the receiver's QP
 * @incarnation: the sender's; filled in when it is sent
 * @tid: transaction
 * @secret: of the owner of the memory; 0 with RESOLVE
 * @nonce: RESOLVE and its answer: random, so that nobody else answers
 * @given: answer to RESOLVE: the secret of the messages to come
 * @rkey: RESOLVE
 * @region: answer to RESOLVE
 * @fault: FAULT
 * @faulted: answer to FAULT
 * @hold_id: RELEASE
 * @forget: FORGET and GONE
 */
struct np_msg {
	u8 type;
	bool answer;
	u8 status;
	bool quick;
	u16 ud_pkey;
	u32 ud_qpn;
	u32 src_qpn;
	u32 dst_qpn;
	u64 incarnation;
	u64 tid;
	u64 secret;
	u64 nonce;
	u64 given;
	union {
		u32 rkey;
		struct np_resolve region;
		struct {
			u64 region_id;
			u32 flags;
			u16 lane;
			u16 nr_ranges;
			struct rdma_np_range ranges[RDMA_NP_MAX_RANGES];
		} fault;
		struct {
			u64 hold_id;
			u32 nr_words;
			u64 words[RDMA_NP_EVENT_WORDS];
		} faulted;
		u64 hold_id;
		struct {
			u64 region_id;
			u64 seq;
		} forget;
	};
};

/* FAULTs of one QP that may be under way at once */
#define NP_LANES		32

void np_msg_encode(const struct np_msg *msg, struct np_wire *wire);
int np_msg_decode(const struct np_wire *wire, struct np_msg *msg);
const char *np_resolve_accept(struct np_resolve *info);
u64 np_ranges_pages(const struct rdma_np_range *ranges, unsigned int nr);
int np_ranges_check(const struct rdma_np_range *ranges, unsigned int nr, u32 flags);
int np_status_to_errno(u32 status);
u32 np_errno_to_status(int err);

/**
 * struct np_rtt - when to ask again
 * @srtt_us: smoothed round trip; 0: none measured
 * @var_us: smoothed deviation
 */
struct np_rtt {
	u32 srtt_us;
	u32 var_us;
};

/* Bounds of the time after which a request is sent again. */
#define NP_RTO_MIN_US		20000U
#define NP_RTO_FIRST_US		100000U
#define NP_RTO_MAX_US		1000000U
/* A request that was never answered, not even WORKING, is given up after: */
#define NP_TRIES		8
/* ... and one that is still WORKING after: */
#define NP_WORKING_MS		60000U
/*
 * A GONE that was answered BUSY, or not at all, is asked again until the QP dies: as
 * many as may be under way, first after, and at last this often.
 */
#define NP_GONE_MIN_MS		100U
#define NP_GONE_MAX_MS		10000U

/*
 * Losses of the quick transport in a row, after which all goes by MAD for so long.  Then
 * one more is enough.
 */
#define NP_QUICK_TRIES		3
#define NP_QUICK_PAUSE_MS	60000U

void np_rtt_sample(struct np_rtt *rtt, u64 us);
unsigned long np_rtt_timeout(const struct np_rtt *rtt, unsigned int tries);

/**
 * enum np_lane_verdict - what to do with a FAULT that arrived
 * @NP_LANE_NEW: serve it, the lane is WORKING now
 * @NP_LANE_WORKING: a copy of what is being served: say so
 * @NP_LANE_REPLAY: a copy of what was served: send the same answer again
 * @NP_LANE_STALE: a copy of something older: drop it
 * @NP_LANE_BUSY: the asker gave up a request that is still being served
 */
enum np_lane_verdict {
	NP_LANE_NEW,
	NP_LANE_WORKING,
	NP_LANE_REPLAY,
	NP_LANE_STALE,
	NP_LANE_BUSY,
};

/**
 * struct np_lane - the answerer's memory of one of the asker's lanes
 * @incarnation: of the asker
 * @tid: newest transaction seen in this lane
 * @working: being served
 * @answer: what was answered, if not @working
 *
 * The asker has one transaction per lane at a time, with ever rising tids. So
 * one answer per lane is enough to serve each FAULT at most once, and the
 * memory is bounded by the number of lanes.
 */
struct np_lane {
	u64 incarnation;
	u64 tid;
	bool working;
	struct np_msg answer;
};

enum np_lane_verdict np_lane_arrive(struct np_lane *lane, const struct np_msg *msg);
void np_lane_answer(struct np_lane *lane, const struct np_msg *answer);

/* --- addresses ------------------------------------------------------------ */

/**
 * struct np_addr - where a MAD came from, or the other end of a QP
 * @roce: Ethernet link layer: only @gid counts
 * @grh: @gid is valid
 * @lid: IB link layer
 * @qpn: of the QP that sent a message, as the adapter says
 * @gid: of the other end
 */
struct np_addr {
	bool roce;
	bool grh;
	u16 lid;
	u32 qpn;
	union ib_gid gid;
};

bool np_addr_match(const struct np_addr *qp, const struct np_addr *mad);

/* --- transport (mad.c, ud.c) ----------------------------------------------------- */

struct np_hca;
struct np_peer;
struct np_ud;

/**
 * struct np_port - one port's MAD agent and its send buffers
 * @hca: the device
 * @port_num: number of the port
 * @send: send one message, once, by MAD; see np_send()
 * @ud: the quick transport; NULL: none
 * @agent: MAD agent; NULL: no IB management on this port
 * @lock: protects @pool, @pooled and @closing
 * @pool: struct np_send, ready to be filled and posted
 * @pooled: their number
 * @closing: buffers are freed, not pooled
 */
struct np_port {
	struct np_hca *hca;
	u32 port_num;
	int (*send)(struct np_port *port, struct ib_ah *ah, u16 pkey_index,
		    struct np_peer *peer, const struct np_msg *msg);
	struct np_ud *ud;
	struct ib_mad_agent *agent;
	spinlock_t lock; /* of what follows */
	struct list_head pool;
	unsigned int pooled;
	bool closing;
};

#define NP_HOLDER_BITS		6

/**
 * struct np_hca - the protocol's part of an IB device
 * @ibdev: the device
 * @ref: the client's, one for each peer, and lookups
 * @rcu: for freeing
 * @peers: struct np_peer by local QPN; its lock also protects @serving, @asked,
 *         @strangers, @refusing, @held_pages, @holders and @dying, and what struct
 *         ib_qp_np says of the device's QPs
 * @nr_peers: peers not yet freed
 * @serving: requests queued or being served; under the lock of @peers
 * @asked: of these, other than FAULT
 * @strangers: of these, from QPs that are no peers yet
 * @refusing: answers under way to those who are no peers; among @serving as well
 * @held_pages: on behalf of all peers
 * @holders: struct np_holder: whose memory these are
 * @idle: woken when @nr_peers or @serving falls to 0
 * @dying: no new peers
 * @leaving: no new RESOLVEs of ours
 * @nr_ports: ports
 * @ports: by port_num - 1
 */
struct np_hca {
	struct ib_device *ibdev;
	struct kref ref;
	struct rcu_head rcu;
	struct xarray peers;
	atomic_t nr_peers;
	unsigned int serving;
	unsigned int asked;
	unsigned int strangers;
	unsigned int refusing;
	unsigned long held_pages;
	DECLARE_HASHTABLE(holders, NP_HOLDER_BITS);
	wait_queue_head_t idle;
	bool dying;
	bool leaving;
	u32 nr_ports;
	struct np_port ports[] __counted_by(nr_ports);
};

/*
 * Requests that may wait or be served at once: for all of a device (and of the FAULTs
 * among them, one owner's as many as it leaves free, the last of which are not for QPs
 * that have others: np_region_may_serve()); of these, other than FAULT, so that these
 * leave something to FAULTs; of these, from QPs that are no peers yet; other than FAULT
 * (which has its lanes) of one peer.  Beyond that the answer is BUSY.  And answers to
 * those who are no peers, beyond which there are none.
 */
#define NP_SERVE_DEVICE		512
#define NP_SERVE_ASKED		128
#define NP_SERVE_STRANGERS	32
#define NP_SERVE_CONTROL	8
#define NP_SERVE_REFUSALS	32
/*
 * Pages under hold, on behalf of one QP and for all of a device; of these, one owner's
 * as many as it leaves free
 */
#define NP_HELD_QP		(8 * RDMA_NP_MAX_PAGES)
#define NP_HELD_DEVICE		(256 * RDMA_NP_MAX_PAGES)

/* A receive buffer of the quick transport */
#define NP_UD_GRH		sizeof(struct ib_grh)
#define NP_UD_SIZE		(NP_UD_GRH + NP_WIRE_SIZE)

void np_wire_stamp(struct np_wire *wire, const struct np_port *port);
int np_send(struct np_port *port, struct ib_ah *ah, u16 pkey_index,
	    struct np_peer *peer, const struct np_msg *msg);
struct np_hca *np_hca_get(struct ib_device *ibdev);
void np_hca_put(struct np_hca *hca);
void np_incarnation_init(void);
u64 np_incarnation(void);
extern struct ib_client np_client;
bool np_hca_begin(struct np_hca *hca, bool stranger);
void np_hca_end(struct np_hca *hca, bool stranger);
bool np_hca_begin_refusal(struct np_hca *hca);
void np_hca_end_refusal(struct np_hca *hca);
bool np_hca_begin_fault(struct np_hca *hca, struct np_region *region,
			unsigned int depth);
void np_hca_end_fault(struct np_hca *hca);
void np_ud_open(struct np_port *port);
void np_ud_close(struct np_port *port);
int np_ud_send(struct np_peer *peer, const struct np_msg *msg);
u32 np_ud_qpn(const struct np_port *port);
u16 np_ud_pkey(const struct np_port *port);
bool np_ud_reaches(const struct np_peer *peer);
void np_ud_learn(struct np_peer *peer, const struct np_msg *msg);
void np_lose_init(void);
void np_port_init(struct np_port *port, struct np_hca *hca, u32 port_num);
int np_port_open(struct np_port *port);
void np_port_close(struct np_port *port);

/* --- peers (peer.c) --------------------------------------------------------- */

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
#define NP_MAX_DEAD		4096
#define NP_MAX_GONE		8
/*
 * With FAULTs, which have their lanes, and RELEASEs, of which there are no more than
 * holds, these are all transactions of a peer.  An answer is looked up among them, and
 * among the holds, under the peer's lock.  A FAULT that asks for a hold counts as one
 * when it is answered, so there may be a lane's more for each but one.
 */
#define NP_MAX_UNDER_WAY	(NP_LANES + 2 * NP_MAX_ASKED + NP_MAX_GONE + \
				 NP_MAX_KEPT + NP_LANES - 1)

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
 * @pkey_index: the QP's
 * @ud_qpn: the other kernel's UD QP, as it told last in a MAD that it has proven to be
 *          its own; 0: none
 * @ud_known: the other kernel knows ours, too
 * @our_secret: proves messages about our memory
 * @their_secret: proves messages about theirs; 0: nothing was resolved
 * @addr: theirs
 * @ah: to it
 * @promised: keys of which it was promised that they are no region's
 * @lock: protects what follows, up to @ctl
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
 * @serve: lanes of the other end; NULL until it resolved something
 * @holds: struct np_held: pages that the other end may keep
 * @held: the same by id
 * @held_pages: their number, those being granted included
 * @untold: struct np_pgrant: GONEs that wait for their turn, never sent
 * @told: likewise, not answered with what would end them
 * @nr_gone: GONEs under way, which are in neither
 * @gone_pause: jiffies between GONEs of @told; 0: the first ones
 * @nr_dead: grants of dead regions
 * @idle: woken when @active falls to 0
 * @gone: the kill is complete
 * @ctl: serialises RESOLVE, FORGET and ungranting; protects @grants
 * @grants: struct np_pgrant by region id: keys the other end was given; its
 *          lock keeps the region of an entry that was found
 * @nr_grants: their number
 * @expire: ends holds not given back in time
 * @gone_again: sends those of @told
 * @overdue: ends the QP for which too many dead regions wait
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
	u16 pkey_index;
	u32 ud_qpn;
	bool ud_known;
	u64 our_secret;
	u64 their_secret;
	struct np_addr addr;
	struct ib_ah *ah;
	struct np_told_user promised;

	spinlock_t lock; /* of what follows */
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
	struct np_serve *serve;
	struct list_head holds;
	struct rb_root held;
	unsigned long held_pages;
	struct list_head untold;
	struct list_head told;
	unsigned int nr_gone;
	unsigned long gone_pause;
	unsigned int nr_dead;
	wait_queue_head_t idle;
	struct completion gone;

	struct mutex ctl; /* of what follows */
	struct xarray grants;
	unsigned int nr_grants;
	struct delayed_work expire;
	struct delayed_work gone_again;
	struct work_struct overdue;
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
 * @told: RDMA_NP_EVENT_REGION_GONE was posted
 * @ev: that
 */
struct np_binding {
	struct rb_node node;
	struct list_head taken;
	struct np_channel *channel;
	u64 region_id;
	bool told;
	struct np_ev ev;
};

extern struct workqueue_struct *np_wq;
extern struct workqueue_struct *np_kill_wq;

struct np_peer *np_peer_find(struct np_hca *hca, u32 qpn);
struct np_peer *np_peer_get(struct ib_qp *qp);
struct np_peer *np_peer_make(struct ib_qp *qp);
void np_peer_put(struct np_peer *peer);
bool np_peer_begin(struct np_peer *peer);
void np_peer_end(struct np_peer *peer);
void np_peer_fail(struct np_peer *peer);
void np_peer_kill(struct np_peer *peer);
bool np_state_connected(enum ib_qp_state state);
bool np_peer_queue_kill(struct work_struct *work);
void np_peer_kill_device(struct np_hca *hca);
bool np_qp_may_be_connected(struct np_hca *hca, struct ib_qp *qp, u32 qpn,
			    const struct np_addr *from);

/* --- transactions (trans.c) ---------------------------------------------------- */

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

/* --- asking (ask.c) ------------------------------------------------------------ */

int np_peer_resolve(struct np_peer *peer, struct np_channel *channel, u32 rkey,
		    struct np_resolve *out);
int np_peer_fault(struct np_peer *peer, struct np_channel *channel,
		  const struct rdma_np_fault_req *req, const struct rdma_np_range *ranges,
		  unsigned int nr);
int np_peer_release(struct np_peer *peer, u64 hold_id);
int np_peer_forget(struct np_peer *peer, u64 region_id);
u32 np_peer_told_gone(struct np_peer *peer, u64 region_id);
bool np_peer_uses(struct np_peer *peer, u64 region_id);
void np_peer_answered(struct np_peer *peer, const struct np_msg *msg);
void np_ask_kill(struct np_peer *peer);
void np_ask_leave(struct np_peer *peer);

/* --- holds of peers (held.c) ------------------------------------------------------ */

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

struct np_held *np_held_make(struct np_peer *peer, struct np_region *region,
			     unsigned int pages, unsigned int write);
void np_held_drop(struct np_peer *peer, struct np_held *held);
bool np_held_add(struct np_peer *peer, struct np_held *held);
void np_held_release(struct np_peer *peer, u64 id);
void np_held_init(struct np_peer *peer);
void np_held_kill(struct np_peer *peer);

/* --- grants (grant.c) --------------------------------------------------------------- */

struct np_pgrant;

struct np_pgrant *np_pgrant_find(struct np_peer *peer, u64 id);
struct np_pgrant *np_pgrant_make(struct np_peer *peer,
				 struct np_region *region);
void np_pgrant_resolved(struct np_pgrant *pg, u64 tid);
void np_pgrant_drop(struct np_pgrant *pg);
struct np_region *np_grant_region(struct np_peer *peer, u64 id);
void np_grant_forget(struct np_peer *peer, const struct np_msg *msg);
void np_grant_init(struct np_peer *peer);
void np_grant_kill(struct np_peer *peer);

/* --- serving (serve.c) ----------------------------------------------------------- */

void np_answer_init(struct np_msg *answer, const struct np_msg *msg, u32 status);
void np_answer_peer(struct np_peer *peer, const struct np_msg *answer);
void np_answer_status(struct np_peer *peer, const struct np_msg *msg, u32 status);
void np_serve_fault(struct np_peer *peer, const struct np_msg *msg);
int np_serve_resolve(struct np_peer *peer, const struct np_msg *msg,
		     struct np_resolve *out);
void np_serve_init(struct np_peer *peer);
void np_serve_kill(struct np_peer *peer);

/* --- arrivals (receive.c) ---------------------------------------------------------- */

void np_receive(struct np_port *port, const struct np_msg *msg, bool malformed,
		const struct np_addr *from, struct ib_mad_recv_wc *recv);
#if IS_ENABLED(CONFIG_KUNIT)
extern unsigned int np_hold_ms;
int np_serve_alloc(struct np_peer *peer);
bool np_ud_decode(const u8 *buf, u32 length, struct np_msg *msg);
void np_peer_prepare(struct np_peer *peer);
void np_binding_add(struct np_peer *peer, struct np_binding *binding);
int np_held_reserve(struct np_peer *peer, const void *owner, unsigned int pages);
void np_held_unreserve(struct np_peer *peer, const void *owner,
		       unsigned int pages);
#endif

/* --- channels (channel.c) --------------------------------------------------------- */

/**
 * struct np_channel - a queue of events
 * @ref: its file's, each FAULT's and each binding's
 * @release: called with the last reference
 * @lock: protects the rest
 * @events: struct np_ev
 * @seq: of the newest event, from 1
 * @reserved: those of @events, or still to come, that were reserved
 * @closed: no more events
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
	wait_queue_head_t wait;
};

void np_channel_init(struct np_channel *channel,
		     void (*release)(struct np_channel *channel));
struct np_channel *np_channel_get(struct np_channel *channel);
void np_channel_put(struct np_channel *channel);
int np_channel_reserve(struct np_channel *channel);
void np_channel_unreserve(struct np_channel *channel);
bool np_channel_post(struct np_channel *channel, struct np_ev *ev);
void np_channel_unpost(struct np_channel *channel, struct np_ev *ev);
u64 np_channel_peek(struct np_channel *channel, struct rdma_np_event *out);
void np_channel_take(struct np_channel *channel, u64 seq);
bool np_channel_pop(struct np_channel *channel, struct rdma_np_event *out);
bool np_channel_is_closed(struct np_channel *channel);
void np_channel_close(struct np_channel *channel);

#endif /* NP_PROTO_H */
