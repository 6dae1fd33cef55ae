// SPDX-License-Identifier: GPL-2.0
/*
 * Hooks of the core where QPs change.
 */
#include "np_hooks.h"
#include "np_proto.h"

/* Only RC QPs have peers. */
static bool np_qp_has_peers(const struct ib_qp *qp)
{
	return qp->qp_type == IB_QPT_RC;
}

/**
 * np_qp_init - A QP is made
 * @qp: zeroed but for what the core says of it
 */
void np_qp_init(struct ib_qp *qp)
{
	mutex_init(&qp->np.lock);
}

/**
 * np_qp_modify_begin - A QP is about to be modified
 * @qp: the QP; np_qp_modify_end() must follow
 *
 * Context: process context, may sleep
 */
void np_qp_modify_begin(struct ib_qp *qp)
{
	/* Else np_peer_fail() has it, which is who modifies the QP */
	if (np_qp_has_peers(qp) && READ_ONCE(qp->np.holder) != current)
		mutex_lock(&qp->np.lock);
}

static bool np_still_connected(const struct ib_qp_attr *attr, int attr_mask)
{
	if (attr_mask & (IB_QP_AV | IB_QP_DEST_QPN | IB_QP_PKEY_INDEX |
			 IB_QP_PORT | IB_QP_PATH_MIG_STATE))
		return false;
	if (!(attr_mask & IB_QP_STATE))
		return true;
	return np_state_connected(attr->qp_state);
}

/* Under the lock of np_hca.peers. */
static void np_qp_remember(struct ib_qp_np *np, const struct ib_qp_attr *attr,
			   int attr_mask)
{
	if (attr_mask & IB_QP_STATE) {
		np->connected = np_state_connected(attr->qp_state);
		np->migrates = np->migrates && np->connected;
	}
	if (attr_mask & (IB_QP_ALT_PATH | IB_QP_PATH_MIG_STATE))
		np->migrates = true;
	if (attr_mask & IB_QP_DEST_QPN)
		np->dest_qpn = attr->dest_qp_num;
	if (attr_mask & IB_QP_AV) {
		np->dlid = rdma_ah_get_dlid(&attr->ah_attr);
		np->grh = rdma_ah_get_ah_flags(&attr->ah_attr) & IB_AH_GRH;
		if (np->grh)
			np->dgid = rdma_ah_read_grh(&attr->ah_attr)->dgid;
	}
}

/*
 * An RC QP that @lives has the number for itself: a peer of another one is of one whose
 * destroyer has not come here yet. Its own peer may have been made since ib_qp_np.left
 * became @left: that one is of the connection that it has now, and stays.
 */
static void np_qp_end_peer(struct np_hca *hca, struct ib_qp *qp, bool lives,
			   u32 left)
{
	struct np_peer *peer = np_peer_find(hca, qp->qp_num);
	bool ends;

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

/**
 * np_qp_modify_end - A QP was modified, or could not be
 * @qp: the QP
 * @attr: how
 * @attr_mask: what of that
 * @ret: what the device said
 *
 * Context: process context, may sleep
 */
void np_qp_modify_end(struct ib_qp *qp, const struct ib_qp_attr *attr,
		      int attr_mask, int ret)
{
	bool left = !ret && !np_still_connected(attr, attr_mask);
	bool failing = READ_ONCE(qp->np.holder) == current;
	struct np_hca *hca;
	u32 count = 0;

	if (!np_qp_has_peers(qp))
		return;
	hca = ret ? NULL : np_hca_get(qp->device);
	if (hca) {
		xa_lock_irq(&hca->peers);
		np_qp_remember(&qp->np, attr, attr_mask);
		qp->np.changed += left;
		qp->np.left += left;
		count = qp->np.left;
		xa_unlock_irq(&hca->peers);
	}
	if (!failing) {
		mutex_unlock(&qp->np.lock);
		if (hca && left)
			np_qp_end_peer(hca, qp, true, count);
	}
	if (hca)
		np_hca_put(hca);
}

/**
 * np_qp_may_be_connected - Is a QP connected to somebody, as far as it was told
 * @hca: the device
 * @qp: the QP
 * @qpn: somebody's
 * @from: somebody's
 *
 * Asks the core and not the device, which has to answer others, too.
 *
 * Return: false if it certainly is not
 */
bool np_qp_may_be_connected(struct np_hca *hca, struct ib_qp *qp, u32 qpn,
			    const struct np_addr *from)
{
	struct np_addr addr = { .roce = from->roce };
	bool may;

	if (!np_qp_has_peers(qp))
		return false;
	xa_lock_irq(&hca->peers);
	addr.grh = qp->np.grh;
	addr.lid = qp->np.dlid;
	addr.gid = qp->np.dgid;
	may = qp->np.connected && qp->np.dest_qpn == qpn &&
	      (qp->np.migrates || np_addr_match(&addr, from));
	xa_unlock_irq(&hca->peers);
	return may;
}

/**
 * np_qp_destroyed - The device has destroyed a QP
 * @qp: no lookup finds it any more
 *
 * Context: process context, may sleep
 */
void np_qp_destroyed(struct ib_qp *qp)
{
	struct np_hca *hca;

	if (!np_qp_has_peers(qp))
		return;
	hca = np_hca_get(qp->device);
	if (!hca)
		return;
	np_qp_end_peer(hca, qp, false, 0);
	np_hca_put(hca);
}

/* Of these events the architecture says that the QP is in the error state. */
static bool np_qp_has_failed(enum ib_event_type event)
{
	return event == IB_EVENT_QP_FATAL || event == IB_EVENT_QP_REQ_ERR ||
	       event == IB_EVENT_QP_ACCESS_ERR;
}

/**
 * np_qp_event - The device reports an event of a QP
 * @qp: the QP; exists until this returns
 * @event: the event
 *
 * Context: any, so the peer's end is left to a worker
 */
void np_qp_event(struct ib_qp *qp, enum ib_event_type event)
{
	struct np_peer *peer;
	unsigned long flags;
	struct np_hca *hca;

	if (!np_qp_has_peers(qp) || !np_qp_has_failed(event))
		return;
	hca = np_hca_get(qp->device);
	if (!hca)
		return;

	xa_lock_irqsave(&hca->peers, flags);
	qp->np.changed++;
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
