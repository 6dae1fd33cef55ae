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
#include "trace.h"

bool np_state_connected(enum ib_qp_state state)
{
	return state == IB_QPS_RTR || state == IB_QPS_RTS || state == IB_QPS_SQD;
}

static void np_peer_free(struct work_struct *work)
{
	struct np_peer *peer = container_of(work, struct np_peer, free);
	struct np_hca *hca = peer->hca;

	rdma_destroy_ah(peer->ah, RDMA_DESTROY_AH_SLEEPABLE);
	xa_destroy(&peer->grants);
	kvfree(peer->serve);
	kfree_rcu(peer, rcu);
	if (atomic_dec_and_test(&hca->nr_peers))
		wake_up_all(&hca->idle);
	np_hca_put(hca);
}

/* To destroy its address handle may sleep. */
static void np_peer_release_ref(struct kref *ref)
{
	queue_work(np_wq, &container_of(ref, struct np_peer, ref)->free);
}

/**
 * np_peer_put - Give back a reference
 * @peer: the peer
 *
 * Context: process context, without locks; does not sleep
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
	peer->pkey_index = attr.pkey_index;
	rdma_ah_set_port_num(&attr.ah_attr, port_num);
	np_peer_addr(peer, &attr.ah_attr);
	/* The flavour for user space resolves a RoCE peer's MAC address, too */
	peer->ah = rdma_create_user_ah(peer->port->agent->qp->pd, &attr.ah_attr,
				       NULL);
	return PTR_ERR_OR_ZERO(peer->ah);
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
	np_serve_init(peer);
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
	atomic_inc(&hca->nr_peers);
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

		xa_lock_irq(&hca->peers);
		changed = qp->np.changed;
		left = qp->np.left;
		xa_unlock_irq(&hca->peers);
		peer = np_peer_alloc(hca, qp);
		if (IS_ERR(peer))
			goto out;
		peer->left = left;

		xa_lock_irq(&hca->peers);
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
		xa_unlock_irq(&hca->peers);
		if (!err)
			goto out;

		old = peer;
		peer = ERR_PTR(err);
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

/**
 * np_peer_kill - End a peer
 * @peer: the peer
 *
 * When it returns, nothing is left of @peer but references to its memory.
 *
 * Context: process context, not while serving the peer
 */
void np_peer_kill(struct np_peer *peer)
{
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
	np_ask_kill(peer);
	wait_event(peer->idle, np_peer_is_idle(peer));
	np_serve_kill(peer);
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
	mutex_lock(&qp->np.lock);
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
	mutex_unlock(&qp->np.lock);
	if (err)
		ibdev_warn_ratelimited(peer->hca->ibdev,
				       "nprdma: QP %u to error: %d\n",
				       peer->qpn, err);
	rdma_restrack_put(&qp->res);
	/* A device that does not even do that has lost the QP */
	if (connected)
		np_peer_kill(peer);
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
 * np_peer_kill_device - End all peers of a device
 * @hca: the device
 *
 * Returns when the last reference is gone and nobody serves anything.
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
	wait_event(hca->idle,
		   !atomic_read(&hca->nr_peers) && !READ_ONCE(hca->serving));
}

/**
 * np_device_leaves - User space is about to lose a device
 * @ibdev: the device
 *
 * uverbs waits for its system calls to return, before it destroys QPs: those that wait
 * for a peer do so now.
 */
void np_device_leaves(struct ib_device *ibdev)
{
	struct np_hca *hca = np_hca_get(ibdev);
	struct np_peer *peer;
	unsigned long qpn;

	if (!hca)
		return;
	/* A peer that is made later is made under the same lock */
	xa_lock_irq(&hca->peers);
	WRITE_ONCE(hca->leaving, true);
	xa_unlock_irq(&hca->peers);
	xa_for_each(&hca->peers, qpn, peer) {
		peer = np_peer_find(hca, qpn);
		if (!peer)
			continue;
		np_ask_leave(peer);
		np_peer_put(peer);
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
 * np_peer_queue - Queue work
 * @work: waits neither for user memory nor for a peer
 */
void np_peer_queue(struct work_struct *work)
{
	queue_work(np_wq, work);
}
