// SPDX-License-Identifier: GPL-2.0
/*
 * Peers: connected RC QPs of ours, and when their state ends.
 *
 * A peer is made on the first RESOLVE in either direction and tells, from then
 * on without asking the device, who the other end is.  It is the answer to "may
 * he?": a request is obeyed only if it comes from the address and names the QP
 * that our QP is connected to.
 *
 * A peer ends when its QP is modified out of the connected states, gets another
 * address, or is destroyed.  The core's hooks say so after the device did it;
 * when they return, nothing that was done on behalf of the other end is left:
 * requests are finished, holds released, grants dropped.  Only FAULTs that are at
 * work end later, because they may wait for memory that comes when this process
 * has closed its files; they grant no hold any more.  A QP that returns to a connected
 * state begins anew.
 *
 * It also ends, a little later, when the device says that the QP failed by itself.
 * An initiator whose request is refused hears of that as a completion in user
 * space only; its peer ends with what the application does next.
 *
 * A peer made from attributes that were read before a concurrent modification
 * must not come to life after it: ib_qp_np.changed orders the two.
 */
#include <linux/random.h>
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "../core_priv.h"
#include "../restrack.h"
#include "np_hooks.h"
#include "np_proto.h"
#include "peer_trace.h"

/* What the layers above make of a peer, given at init */
static const struct np_peer_ops *np_peer_ops;

static void np_peer_free(struct work_struct *work)
{
	struct np_peer *peer = container_of(work, struct np_peer, free);
	struct np_hca *hca = peer->hca;

	xa_destroy(&peer->grants);
	kvfree(peer->serve);
	kfree_rcu(peer, rcu);
	np_hca_put(hca);
}

/* To free its lanes may sleep. */
static void np_peer_release_ref(struct kref *ref)
{
	queue_work(np_wq, &container_of(ref, struct np_peer, ref)->free);
}

/**
 * np_peer_put - Give back a reference
 * @peer: the peer
 *
 * Context: any, without locks; does not sleep
 */
void np_peer_put(struct np_peer *peer)
{
	kref_put(&peer->ref, np_peer_release_ref);
}
EXPORT_SYMBOL_GPL(np_peer_put);

/**
 * np_peer_find - The peer of a QP number
 * @hca: the device
 * @qpn: of our QP
 *
 * Return: with a reference, or NULL
 */
struct np_peer *np_peer_find(struct np_hca *hca, u32 qpn)
{
	struct np_peer *peer;

	rcu_read_lock();
	peer = xa_load(&hca->peers, qpn);
	if (peer && !kref_get_unless_zero(&peer->ref))
		peer = NULL;
	rcu_read_unlock();
	return peer;
}

/**
 * np_peer_get - The peer of a QP, if it has been made
 * @qp: the QP
 *
 * Return: with a reference, or NULL
 */
struct np_peer *np_peer_get(struct ib_qp *qp)
{
	struct np_hca *hca = np_hca_get(qp->device);
	struct np_peer *peer;

	if (!hca)
		return NULL;
	peer = np_peer_find(hca, qp->qp_num);
	np_hca_put(hca);
	if (peer && peer->qp != qp) {
		np_peer_put(peer);
		return NULL;
	}
	return peer;
}
EXPORT_SYMBOL_GPL(np_peer_get);

static void np_peer_addr(struct np_peer *peer, const struct rdma_ah_attr *ah)
{
	peer->addr.roce = rdma_protocol_roce(peer->hca->ibdev,
					     peer->port->port_num);
	peer->addr.lid = rdma_ah_get_dlid(ah);
	peer->addr.grh = rdma_ah_get_ah_flags(ah) & IB_AH_GRH;
	if (peer->addr.grh)
		peer->addr.gid = rdma_ah_read_grh(ah)->dgid;
}

static void np_peer_failed(struct work_struct *work);
static void np_peer_fail_again(struct work_struct *work);

/* Ask the device who @qp is connected to. */
static int np_peer_query(struct np_peer *peer, struct ib_qp *qp)
{
	struct ib_qp_init_attr init = {};
	struct ib_qp_attr attr = {};
	struct ib_ah *ah;
	u32 port_num;
	int err;

	err = ib_query_qp(qp, &attr,
			  IB_QP_STATE | IB_QP_AV | IB_QP_DEST_QPN |
			  IB_QP_PKEY_INDEX | IB_QP_PORT, &init);
	if (err)
		return err;
	if (attr.qp_state != IB_QPS_RTR && attr.qp_state != IB_QPS_RTS)
		return -ENOTCONN;

	port_num = attr.port_num ?: qp->port;
	if (!port_num || port_num > peer->hca->nr_ports)
		return -ENOTCONN;
	peer->port = &peer->hca->ports[port_num - 1];
	if (!peer->port->agent)
		return -EOPNOTSUPP;

	peer->remote_qpn = attr.dest_qp_num;
	rdma_ah_set_port_num(&attr.ah_attr, port_num);
	np_peer_addr(peer, &attr.ah_attr);
	/* The flavour for user space resolves a RoCE peer's MAC address, too */
	ah = rdma_create_user_ah(peer->port->agent->qp->pd, &attr.ah_attr, NULL);
	if (IS_ERR(ah))
		return PTR_ERR(ah);
	peer->path = np_path_make(peer->port, ah, attr.pkey_index);
	return PTR_ERR_OR_ZERO(peer->path);
}

/**
 * np_peer_prepare - Prepare what needs neither the device nor the queue pair
 * @peer: zeroed; the caller has its first reference
 */
VISIBLE_IF_KUNIT void np_peer_prepare(struct np_peer *peer)
{
	peer->again = jiffies;
	peer->quick_after = jiffies;
	kref_init(&peer->ref);
	spin_lock_init(&peer->lock);
	INIT_LIST_HEAD(&peer->resolves);
	INIT_LIST_HEAD(&peer->trans);
	peer->nr_lanes = NP_LANES;
	peer->max_ranges = RDMA_NP_MAX_RANGES;
	peer->max_pages = RDMA_NP_MAX_PAGES;
	peer->bindings = RB_ROOT;
	INIT_LIST_HEAD(&peer->kept);
	init_waitqueue_head(&peer->idle);
	init_completion(&peer->gone);
	INIT_DELAYED_WORK(&peer->fail_again, np_peer_fail_again);
	INIT_WORK(&peer->free, np_peer_free);
	do
		peer->our_secret = get_random_u64();
	while (!peer->our_secret);
	xa_init(&peer->grants);
	mutex_init(&peer->ctl);
	np_peer_ops->init(peer);
}
EXPORT_SYMBOL_IF_KUNIT(np_peer_prepare);

static struct np_peer *np_peer_alloc(struct np_hca *hca, struct ib_qp *qp)
{
	struct np_peer *peer;
	int err;

	peer = kzalloc(sizeof(*peer), GFP_KERNEL);
	if (!peer)
		return ERR_PTR(-ENOMEM);
	peer->hca = hca;
	peer->qp = qp;
	peer->pd = qp->pd;
	peer->qpn = qp->qp_num;
	np_peer_prepare(peer);
	INIT_WORK(&peer->failed, np_peer_failed);

	err = np_peer_query(peer, qp);
	if (err) {
		kfree(peer);
		return ERR_PTR(err);
	}
	kref_get(&hca->ref);
	return peer;
}

/**
 * np_peer_make - The peer of a QP; made if it does not exist
 * @qp: the caller keeps it from being destroyed
 *
 * Context: process context, may sleep
 * Return: with a reference; -ENOTCONN: not RC, or not connected, or the core does
 * not find it by its number; -ENODEV: the device is going; -EBUSY: somebody modifies
 * it all the time, or the peer of a QP that had its number is still there;
 * -EOPNOTSUPP: its port has no MAD agent; -ENOMEM; what ib_query_qp() says
 */
struct np_peer *np_peer_make(struct ib_qp *qp)
{
	struct np_peer *peer, *old;
	struct np_hca *hca;
	unsigned int tries;
	u32 changed, left;
	int err;

	/* What is not tracked could not be ended: see np_peer_qp() */
	if (qp->qp_type != IB_QPT_RC || qp->real_qp != qp || !qp->res.valid)
		return ERR_PTR(-ENOTCONN);
	hca = np_hca_get(qp->device);
	if (!hca)
		return ERR_PTR(-ENODEV);

	for (tries = 0; tries < 8; tries++) {
		peer = np_peer_find(hca, qp->qp_num);
		if (peer && peer->qp == qp)
			goto out;
		if (peer)
			np_peer_put(peer);

		spin_lock_irq(&qp->np.lock);
		changed = qp->np.changed;
		left = qp->np.left;
		spin_unlock_irq(&qp->np.lock);
		peer = np_peer_alloc(hca, qp);
		if (IS_ERR(peer))
			goto out;
		peer->left = left;

		/* Who changes it looks for a peer after that */
		spin_lock_irq(&qp->np.lock);
		xa_lock(&hca->peers);
		if (hca->dying)
			err = -ENODEV;
		else if (changed != qp->np.changed)
			err = -EBUSY;
		else
			err = __xa_insert(&hca->peers, qp->qp_num, peer,
					  GFP_ATOMIC);
		/* The table's reference is the first one */
		if (!err)
			kref_get(&peer->ref);
		xa_unlock(&hca->peers);
		spin_unlock_irq(&qp->np.lock);
		if (!err)
			goto out;

		old = peer;
		peer = ERR_PTR(err);
		np_path_put(old->path);
		np_peer_put(old);
		if (err != -EBUSY)
			break;
	}
out:
	np_hca_put(hca);
	return peer;
}
EXPORT_SYMBOL_GPL(np_peer_make);

/**
 * np_peer_begin - Begin to serve the other end
 * @peer: the peer
 *
 * Return: false if the peer is dead; else np_peer_end() must follow
 */
bool np_peer_begin(struct np_peer *peer)
{
	bool ok;

	spin_lock(&peer->lock);
	ok = !peer->dead;
	peer->active += ok;
	spin_unlock(&peer->lock);
	return ok;
}

/**
 * np_peer_end - End what np_peer_begin() began
 * @peer: the peer
 */
void np_peer_end(struct np_peer *peer)
{
	spin_lock(&peer->lock);
	if (!--peer->active)
		wake_up_all(&peer->idle);
	spin_unlock(&peer->lock);
}

static bool np_peer_is_idle(struct np_peer *peer)
{
	bool idle;

	spin_lock(&peer->lock);
	idle = !peer->active;
	spin_unlock(&peer->lock);
	return idle;
}

/* When it returns, nothing is left of @peer but references to its memory. */
static void np_peer_kill(struct np_peer *peer)
{
	struct np_path *path;

	spin_lock(&peer->lock);
	if (peer->dead) {
		spin_unlock(&peer->lock);
		wait_for_completion(&peer->gone);
		return;
	}
	peer->dead = true;
	spin_unlock(&peer->lock);

	xa_cmpxchg_irq(&peer->hca->peers, peer->qpn, peer, NULL, 0);
	if (cancel_delayed_work(&peer->fail_again))
		np_peer_put(peer);
	np_peer_ops->end_asking(peer);
	wait_event(peer->idle, np_peer_is_idle(peer));
	np_peer_ops->end_serving(peer);

	/* FAULTs at work, which may stay for long, keep only the memory of the peer */
	spin_lock(&peer->lock);
	path = peer->path;
	peer->path = NULL;
	spin_unlock(&peer->lock);
	np_path_put(path);
	complete_all(&peer->gone);
	np_peer_put(peer);
}

/*
 * With a restrack reference.  NULL: it is being destroyed, or the peer is dead,
 * and who does that ends the peer, if the device lets him.
 */
static struct ib_qp *np_peer_qp(struct np_peer *peer)
{
	struct rdma_restrack_entry *res;
	struct ib_qp *qp;

	res = rdma_restrack_get_byid(peer->hca->ibdev, RDMA_RESTRACK_QP,
				     peer->qpn);
	if (IS_ERR(res))
		return NULL;
	qp = container_of(res, struct ib_qp, res);
	if (qp == peer->qp && !READ_ONCE(peer->dead))
		return qp;
	rdma_restrack_put(res);
	return NULL;
}

/**
 * np_peer_task - Whose process a peer's QP is
 * @peer: the peer
 *
 * Context: any but interrupts
 * Return: with a reference; NULL: the QP is the kernel's, or is being destroyed
 */
struct task_struct *np_peer_task(struct np_peer *peer)
{
	struct ib_qp *qp = np_peer_qp(peer);
	struct task_struct *task = NULL;

	if (!qp)
		return NULL;
	if (!rdma_is_kernel_res(&qp->res))
		task = get_task_struct(qp->res.task);
	rdma_restrack_put(&qp->res);
	return task;
}

/*
 * The device said that the QP had failed.  By now it may have been connected
 * anew: a peer made after that must live, for its other end has the keys.
 */
static void np_peer_failed(struct work_struct *work)
{
	struct np_peer *peer = container_of(work, struct np_peer, failed);
	struct ib_qp *qp = np_peer_qp(peer);
	struct ib_qp_init_attr init = {};
	struct ib_qp_attr attr = {};

	if (qp && !ib_query_qp(qp, &attr, IB_QP_STATE, &init) &&
	    !np_state_connected(attr.qp_state))
		np_peer_kill(peer);
	if (qp)
		rdma_restrack_put(&qp->res);
	np_peer_put(peer);
}

/**
 * np_peer_fail - Move the peer's QP to the error state, and so end the peer
 * @peer: the peer
 *
 * What somebody pays who keeps memory for longer than we allow.
 *
 * Context: process context, not while serving the peer
 */
void np_peer_fail(struct np_peer *peer)
{
	struct ib_qp_attr attr = { .qp_state = IB_QPS_ERR };
	struct ib_qp *qp = np_peer_qp(peer);
	bool connected;
	int err = 0;

	if (!qp) {
		spin_lock(&peer->lock);
		if (!peer->dead && queue_delayed_work(np_kill_wq,
						      &peer->fail_again, HZ))
			kref_get(&peer->ref);
		spin_unlock(&peer->lock);
		return;
	}
	mutex_lock(&qp->np.modify);
	/*
	 * Else it was modified meanwhile, and who did that ends the peer. The QP may be
	 * connected to somebody else by now.
	 */
	connected = qp->np.left == peer->left;
	if (connected) {
		WRITE_ONCE(qp->np.holder, current);
		err = ib_modify_qp(qp, &attr, IB_QP_STATE);
		WRITE_ONCE(qp->np.holder, NULL);
	}
	mutex_unlock(&qp->np.modify);
	if (err)
		ibdev_warn_ratelimited(peer->hca->ibdev,
				       "nprdma: QP %u to error: %d\n",
				       peer->qpn, err);
	/* A device that does not even do that has lost the QP */
	if (connected)
		np_peer_kill(peer);
	/* Only now: who destroys the QP finds nothing of the peer, and relies on that */
	rdma_restrack_put(&qp->res);
}
EXPORT_SYMBOL_IF_KUNIT(np_peer_fail);

/* np_peer.fail_again, with a reference. */
static void np_peer_fail_again(struct work_struct *work)
{
	struct np_peer *peer = container_of(to_delayed_work(work),
					    struct np_peer, fail_again);

	np_peer_fail(peer);
	np_peer_put(peer);
}

/**
 * np_peer_tell - What is done for a QP, for user space
 * @ibdev: the device
 * @qpn: number of the QP, maybe of none
 * @out: set
 *
 * Context: process context
 * Return: 0; -ENOENT: nothing is done for it
 */
int np_peer_tell(struct ib_device *ibdev, u32 qpn, struct rdma_np_qp_info *out)
{
	struct np_hca *hca = np_hca_get(ibdev);
	struct np_peer *peer = NULL;
	int err = -ENOENT;

	if (hca) {
		peer = np_peer_find(hca, qpn);
		np_hca_put(hca);
	}
	if (!peer)
		return err;
	memset(out, 0, sizeof(*out));
	spin_lock(&peer->lock);
	if (!peer->dead) {
		err = 0;
		out->qpn = peer->qpn;
		out->remote_qpn = peer->remote_qpn;
		if (peer->heard || peer->serve)
			out->flags |= RDMA_NP_QP_HEARD;
		if (np_quick_is_used(peer) && np_ud_reaches(peer->path))
			out->flags |= RDMA_NP_QP_QUICK;
		if (peer->resolving)
			out->flags |= RDMA_NP_QP_ASKING;
		out->faults = bitmap_weight(peer->lanes, NP_LANES);
		out->holds = peer->nr_kept;
		out->leases = peer->nr_kept_leases;
		out->faults_served = peer->faulting;
		out->leases_granted = peer->nr_leases;
		out->held_pages = peer->held_pages;
		out->leased_pages = peer->leased_pages;
	}
	spin_unlock(&peer->lock);
	np_peer_put(peer);
	return err;
}
EXPORT_SYMBOL_GPL(np_peer_tell);

static bool np_hca_is_idle(struct np_hca *hca)
{
	bool idle;

	xa_lock_irq(&hca->peers);
	idle = !hca->asked && !hca->refusing;
	xa_unlock_irq(&hca->peers);
	return idle;
}

/**
 * np_peer_kill_device - End all peers of a device
 * @hca: the device
 *
 * When it returns nobody serves anything but FAULTs, which do not need the device.
 */
void np_peer_kill_device(struct np_hca *hca)
{
	struct np_peer *peer;
	unsigned long qpn;

	xa_lock_irq(&hca->peers);
	hca->dying = true;
	xa_unlock_irq(&hca->peers);

	xa_for_each(&hca->peers, qpn, peer) {
		peer = np_peer_find(hca, qpn);
		if (!peer)
			continue;
		np_peer_kill(peer);
		np_peer_put(peer);
	}
	wait_event(hca->idle, np_hca_is_idle(hca));
}

/**
 * np_device_leaves - User space is about to lose a device, or has got it
 * @ibdev: the device
 * @leaves: which of the two
 *
 * uverbs waits for its system calls to return, before it destroys QPs: those that wait
 * for a peer do so now.
 */
void np_device_leaves(struct ib_device *ibdev, bool leaves)
{
	struct np_hca *hca = np_hca_get(ibdev);
	struct np_peer *peer;
	unsigned long qpn;

	if (!hca)
		return;
	/* A peer that is made later is made under the same lock */
	xa_lock_irq(&hca->peers);
	WRITE_ONCE(hca->leaving, leaves);
	xa_unlock_irq(&hca->peers);
	if (leaves) {
		xa_for_each(&hca->peers, qpn, peer) {
			peer = np_peer_find(hca, qpn);
			if (!peer)
				continue;
			np_peer_ops->leave(peer);
			np_peer_put(peer);
		}
	}
	np_hca_put(hca);
}
EXPORT_SYMBOL_GPL(np_device_leaves);

/**
 * np_peer_queue_kill - Queue work that ends a peer, or waits for its end
 * @work: the work
 *
 * Context: any
 * Return: false if it was queued already
 */
bool np_peer_queue_kill(struct work_struct *work)
{
	return queue_work(np_kill_wq, work);
}
EXPORT_SYMBOL_IF_KUNIT(np_peer_queue_kill);

/**
 * np_peer_path - The way to a peer
 * @peer: the peer
 *
 * Return: with a reference; NULL: the peer has ended
 */
struct np_path *np_peer_path(struct np_peer *peer)
{
	struct np_path *path;

	spin_lock(&peer->lock);
	path = peer->path;
	if (path)
		np_path_get(path);
	spin_unlock(&peer->lock);
	return path;
}

/**
 * np_peer_try_path - np_peer_path(), if nobody has the peer's lock
 * @peer: the peer
 *
 * Context: softirq too: whom it interrupts may have the lock
 * Return: with a reference; NULL: the peer has ended, or the lock is taken
 */
struct np_path *np_peer_try_path(struct np_peer *peer)
{
	struct np_path *path;

	if (!spin_trylock(&peer->lock))
		return NULL;
	path = peer->path;
	if (path)
		np_path_get(path);
	spin_unlock(&peer->lock);
	return path;
}

/**
 * np_peer_send - Send one message to a peer, once
 * @peer: the peer; nothing is sent if it has ended
 * @msg: the message
 *
 * Context: process context, without locks; does not wait
 */
void np_peer_send(struct np_peer *peer, const struct np_msg *msg)
{
	struct np_path *path = np_peer_path(peer);

	if (!path)
		return;
	np_send(path, msg);
	np_path_put(path);
}

/**
 * np_answer_init - Begin an answer
 * @answer: filled in
 * @msg: the request
 * @status: enum rdma_np_status
 */
void np_answer_init(struct np_msg *answer, const struct np_msg *msg, u32 status)
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
EXPORT_SYMBOL_IF_KUNIT(np_answer_init);

/**
 * np_answer_peer - Send an answer to a peer, once
 * @peer: the peer
 * @answer: the answer
 */
void np_answer_peer(struct np_peer *peer, const struct np_msg *answer)
{
	np_peer_send(peer, answer);
}

/**
 * np_answer_status - Answer a request of a peer with a status only
 * @peer: the peer
 * @msg: the request
 * @status: enum rdma_np_status
 */
void np_answer_status(struct np_peer *peer, const struct np_msg *msg, u32 status)
{
	struct np_msg answer;

	np_answer_init(&answer, msg, status);
	np_answer_peer(peer, &answer);
}

/* Only RC QPs have peers. */
static bool np_qp_has_peers(const struct ib_qp *qp)
{
	return qp->qp_type == IB_QPT_RC;
}

/**
 * np_qp_may_be_connected - Is a QP connected to somebody, as far as it was told
 * @qp: the QP
 * @qpn: somebody's
 * @from: somebody's
 *
 * Asks the core and not the device, which has to answer others, too.
 *
 * Return: false if it certainly is not
 */
bool np_qp_may_be_connected(struct ib_qp *qp, u32 qpn, const struct np_addr *from)
{
	struct np_addr addr = { .roce = from->roce };
	bool may;

	if (!np_qp_has_peers(qp))
		return false;
	spin_lock_irq(&qp->np.lock);
	addr.grh = qp->np.grh;
	addr.lid = qp->np.dlid;
	addr.gid = qp->np.dgid;
	may = qp->np.connected && qp->np.dest_qpn == qpn &&
	      (qp->np.migrates || np_addr_match(&addr, from));
	spin_unlock_irq(&qp->np.lock);
	return may;
}

/*
 * An RC QP that @lives has the number for itself: a peer of another one is of one whose
 * destroyer has not come here yet. Its own peer may have been made since ib_qp_np.left
 * became @left: that one is of the connection that it has now, and stays.
 */
static void np_qp_end_peer(struct ib_qp *qp, bool lives, u32 left)
{
	struct np_hca *hca = np_hca_get(qp->device);
	struct np_peer *peer;
	bool ends;

	if (!hca)
		return;
	peer = np_peer_find(hca, qp->qp_num);
	np_hca_put(hca);
	if (!peer)
		return;
	if (peer->qp != qp)
		ends = lives;
	else
		ends = !lives || (s32)(peer->left - left) < 0;
	if (ends)
		np_peer_kill(peer);
	np_peer_put(peer);
}

/* np_qp_ops.left */
static void np_peer_qp_left(struct ib_qp *qp, u32 left)
{
	np_qp_end_peer(qp, true, left);
}

/* np_qp_ops.destroyed */
static void np_peer_qp_destroyed(struct ib_qp *qp)
{
	np_qp_end_peer(qp, false, 0);
}

/* np_qp_ops.failed: in any context, so the peer's end is left to a worker. */
static void np_peer_qp_failed(struct ib_qp *qp)
{
	struct np_hca *hca = np_hca_get(qp->device);
	struct np_peer *peer;
	unsigned long flags;

	if (!hca)
		return;
	xa_lock_irqsave(&hca->peers, flags);
	peer = xa_load(&hca->peers, qp->qp_num);
	/* While it is in the table, under its lock, the table's reference stays */
	if (peer && peer->qp == qp) {
		kref_get(&peer->ref);
		if (!np_peer_queue_kill(&peer->failed))
			np_peer_put(peer);
	}
	xa_unlock_irqrestore(&hca->peers, flags);
	np_hca_put(hca);
}

static const struct np_qp_ops np_qp_ops = {
	.left = np_peer_qp_left,
	.destroyed = np_peer_qp_destroyed,
	.failed = np_peer_qp_failed,
};

/**
 * np_peer_init - Begin
 * @ops: what the layers above make of a peer
 */
void np_peer_init(const struct np_peer_ops *ops)
{
	np_peer_ops = ops;
}

/**
 * np_peer_listen - Hear of QPs
 */
void np_peer_listen(void)
{
	np_qp_listen(&np_qp_ops);
}

/**
 * np_peer_deafen - Hear no more of QPs, whose peers end with their device
 */
void np_peer_deafen(void)
{
	np_qp_listen(NULL);
}
