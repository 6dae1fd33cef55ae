/* SPDX-License-Identifier: GPL-2.0 */
/*
 * nprdma: the protocol's part of a device (hca.c), the ways by which messages go
 * (path.c, mad.c, ud.c), and what the memory of one owner may take (sched.c).
 *
 * The transports know addresses and address handles, and nothing of peers: what
 * arrives goes to a function that the client gives when it opens a port.
 */
#ifndef NP_HCA_H
#define NP_HCA_H

#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/spinlock.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_verbs.h>

#include "np_wire.h"

struct np_hca;
struct np_port;
struct np_ud;

/**
 * typedef np_receive_fn - a message arrived
 * @port: here
 * @msg: the message
 * @malformed: only its header is valid, and it is a request
 * @from: from there
 * @recv: the MAD; NULL: came by the quick transport
 *
 * Context: a worker that handles what arrived: process context, does not sleep
 */
typedef void np_receive_fn(struct np_port *port, const struct np_msg *msg,
			   bool malformed, const struct np_addr *from,
			   struct ib_mad_recv_wc *recv);

/**
 * typedef np_receive_at_once_fn - np_receive_fn(), if nothing has to be waited for
 * @port: here
 * @msg: came by the quick transport
 * @from: from there
 *
 * Context: softirq
 * Return: false: nothing has happened, and np_receive_fn() must follow
 */
typedef bool np_receive_at_once_fn(struct np_port *port, const struct np_msg *msg,
				   const struct np_addr *from);

/**
 * struct np_path - a way to another kernel
 * @ref: its users', and one for each MAD under way
 * @free: destroys @ah, which may sleep
 * @port: from here; waits for its paths when it closes
 * @ah: to there
 * @pkey_index: in this partition
 * @ud_qpn: the other kernel's UD QP, as it told last in a MAD that it has proven to be
 *          its own; 0: none
 * @ud_known: the other kernel knows ours, too
 */
struct np_path {
	struct kref ref;
	struct work_struct free;
	struct np_port *port;
	struct ib_ah *ah;
	u16 pkey_index;
	u32 ud_qpn;
	bool ud_known;
};

/**
 * struct np_port - one port's MAD agent and its send buffers
 * @hca: the device
 * @port_num: number of the port
 * @receive: takes what arrives
 * @receive_at_once: takes it where that can be done without waiting
 * @send: send one message, once, by MAD; see np_send()
 * @ud: the quick transport; NULL: none
 * @at_once_from: ns: until then FAULTs are not served where they arrive
 * @agent: MAD agent; NULL: no IB management on this port
 * @paths: not yet freed
 * @idle: woken when @paths falls to 0
 * @lock: protects @pool, @pooled and @closing
 * @pool: struct np_send, ready to be filled and posted
 * @pooled: their number
 * @closing: buffers are freed, not pooled
 */
struct np_port {
	struct np_hca *hca;
	u32 port_num;
	np_receive_fn *receive;
	np_receive_at_once_fn *receive_at_once;
	int (*send)(struct np_path *path, const struct np_msg *msg);
	struct np_ud *ud;
	u64 at_once_from;
	struct ib_mad_agent *agent;
	atomic_t paths;
	wait_queue_head_t idle;
	spinlock_t lock; /* of what follows */
	struct list_head pool;
	unsigned int pooled;
	bool closing;
};

/**
 * struct np_hca - the protocol's part of an IB device
 * @ibdev: the device; not after the client's removal
 * @ref: the client's, one for each peer, path and owner, and lookups
 * @rcu: for freeing
 * @peers: struct np_peer by local QPN; its lock also protects @serving, @asked,
 *         @strangers, @refusing, @held_pages, np_owner.serving, np_owner.held_pages and
 *         @dying
 * @serving: requests queued or being served; under the lock of @peers
 * @asked: of these, other than FAULT
 * @strangers: of these, from QPs that are no peers yet
 * @refusing: answers under way to those who are no peers; among @serving as well
 * @held_pages: on behalf of all peers
 * @idle: woken when @asked or @refusing falls to 0
 * @dying: no new peers
 * @leaving: no new RESOLVEs of ours
 * @owners_lock: protects @owners
 * @owners: struct np_owner
 * @nr_ports: ports
 * @ports: by port_num - 1
 */
struct np_hca {
	struct ib_device *ibdev;
	struct kref ref;
	struct rcu_head rcu;
	struct xarray peers;
	unsigned int serving;
	unsigned int asked;
	unsigned int strangers;
	unsigned int refusing;
	unsigned long held_pages;
	wait_queue_head_t idle;
	bool dying;
	bool leaving;
	struct mutex owners_lock; /* of @owners */
	struct list_head owners;
	u32 nr_ports;
	struct np_port ports[] __counted_by(nr_ports);
};

extern struct workqueue_struct *np_wq;
extern struct workqueue_struct *np_receive_wq;
extern struct workqueue_struct *np_kill_wq;

/* Devices (hca.c) */

/*
 * Requests that may wait or be served at once: for all of a device (and of the FAULTs
 * among them, one owner's as many as it leaves free, the last of which are not for QPs
 * that have others: np_owner_begin()); of these, other than FAULT, so that these
 * leave something to FAULTs; of these, from QPs that are no peers yet; other than FAULT
 * (which has its lanes) of one peer.  Beyond that the answer is BUSY.  And answers to
 * those who are no peers, beyond which there are none.
 */
#define NP_SERVE_DEVICE		512
#define NP_SERVE_ASKED		128
#define NP_SERVE_STRANGERS	32
#define NP_SERVE_CONTROL	8
#define NP_SERVE_REFUSALS	32

extern struct ib_client np_client;

void np_incarnation_init(void);
u64 np_incarnation(void);
void np_hca_init(struct np_hca *hca, struct ib_device *ibdev);
struct np_hca *np_hca_get(struct ib_device *ibdev);
void np_hca_put(struct np_hca *hca);
bool np_hca_begin(struct np_hca *hca, bool stranger);
void np_hca_end(struct np_hca *hca, bool stranger);
bool np_hca_begin_refusal(struct np_hca *hca);
void np_hca_end_refusal(struct np_hca *hca);

/* The quick transport (ud.c) */

#define NP_UD_GRH		sizeof(struct ib_grh)
#define NP_UD_SIZE		(NP_UD_GRH + NP_WIRE_SIZE)

void np_ud_open(struct np_port *port);
void np_ud_close(struct np_port *port);
int np_ud_send(struct np_path *path, const struct np_msg *msg);
bool np_ud_reaches(const struct np_path *path);
void np_ud_learn(struct np_path *path, const struct np_msg *msg);
void np_wire_stamp(struct np_wire *wire, const struct np_port *port);
#if IS_ENABLED(CONFIG_KUNIT)
bool np_ud_decode(const u8 *buf, u32 length, struct np_msg *msg);
#endif

/* Paths (path.c) */

void np_lose_init(void);
void np_lose_exit(void);
int np_wc_addr(const struct np_port *port, const struct ib_wc *wc, const void *grh,
	       struct np_addr *addr);
struct np_path *np_path_make(struct np_port *port, struct ib_ah *ah, u16 pkey_index);
struct np_path *np_path_get(struct np_path *path);
void np_path_put(struct np_path *path);
void np_send(struct np_path *path, const struct np_msg *msg);

/* MADs (mad.c) */

void np_port_init(struct np_port *port, struct np_hca *hca, u32 port_num,
		  np_receive_fn *receive, np_receive_at_once_fn *at_once);
int np_port_open(struct np_port *port);
void np_port_close(struct np_port *port);

/* Owners of memory (sched.c) */

/* FAULTs of one owner's regions that may be at work at once */
#define NP_OWNER_ACTIVE		128
/* Classes of FAULTs that wait: 1 of a QP under way, 2 to 3, 4 to 7, ..., 32 */
#define NP_OWNER_DEPTHS		6
/*
 * Pages under hold, on behalf of one QP and for all of a device; of these, one owner's
 * as many as it leaves free
 */
#define NP_HELD_QP		(8 * RDMA_NP_MAX_PAGES)
#define NP_HELD_DEVICE		(256 * RDMA_NP_MAX_PAGES)

/**
 * struct np_job - a FAULT of a peer that waits for its turn
 * @entry: in the queue of the memory's owner
 * @serve: serves it
 */
struct np_job {
	struct list_head entry;
	void (*serve)(struct np_job *job);
};

/**
 * struct np_server - serves the FAULTs of an owner, one at a time
 * @work: serves one, whichever is next by then
 * @owner: the owner
 */
struct np_server {
	struct work_struct work;
	struct np_owner *owner;
};

/**
 * struct np_owner - an address space, for what its regions may take of a device's share
 * @ref: one for each grant, each hold and each FAULT
 * @node: in np_hca.owners
 * @hca: keeps it
 * @mm: keeps it, not what it maps
 * @wq: serves the FAULTs of peers on its regions
 * @serving: these, queued or at work; under the lock of np_hca.peers
 * @held_pages: pages under hold for peers; under the lock of np_hca.peers
 * @grants: of all its regions
 * @free: ends @wq, which its last work cannot do
 * @lock: protects what follows
 * @waiting: struct np_job by class
 * @nr_waiting: their number
 * @turn: counts FAULTs that were taken from @waiting
 * @starting: a server is queued and has not taken its FAULT
 * @busy: servers that are queued or at work
 * @servers: the servers
 *
 * Memory can make a fault wait for as long as somebody likes who is neither we nor
 * the peer: a file system in user space, a server that does not answer.  So each
 * owner's faults have a queue of their own, where they keep nobody else's waiting.
 *
 * There, who asks for little is served before who asks for much.  A QP that has
 * nothing else under way waits for at most one FAULT of those that have more, and
 * so gets at least half of what is served, whatever the others do; those with few
 * under way get a quarter, and so on.  Whatever a class leaves goes to the first.
 *
 * Which FAULT is next is decided when a CPU is there for it, and only one server
 * at a time waits for that: what is queued in workqueues is served in its order.
 * A server that has begun may sleep, so it is then that the next one is started.
 *
 * A FAULT that finds nothing waiting has its turn at once, and if nothing has to be waited
 * for either, it is served where it arrived: see np_fault_at_once().
 */
struct np_owner {
	struct kref ref;
	struct list_head node;
	struct np_hca *hca;
	struct mm_struct *mm;
	struct workqueue_struct *wq;
	unsigned int serving;
	unsigned long held_pages;
	atomic_t grants;
	struct work_struct free;

	spinlock_t lock; /* of what follows */
	struct list_head waiting[NP_OWNER_DEPTHS];
	unsigned int nr_waiting;
	unsigned int turn;
	bool starting;
	DECLARE_BITMAP(busy, NP_OWNER_ACTIVE);
	struct np_server servers[NP_OWNER_ACTIVE];
};

struct np_owner *np_owner_get(struct np_hca *hca, struct mm_struct *mm);
void np_owner_put(struct np_owner *owner);
bool np_owner_begin(struct np_owner *owner, unsigned int depth);
void np_owner_serve(struct np_owner *owner, struct np_job *job, unsigned int depth);
bool np_owner_has_waiting(struct np_owner *owner);
void np_owner_end(struct np_owner *owner);
int np_owner_hold(struct np_owner *owner, unsigned int pages);
void np_owner_unhold(struct np_owner *owner, unsigned int pages);
bool np_owner_grant(struct np_owner *owner);
void np_owner_ungrant(struct np_owner *owner);
#if IS_ENABLED(CONFIG_KUNIT)
extern unsigned int np_owner_max_grants;
#endif

#endif /* NP_HCA_H */
