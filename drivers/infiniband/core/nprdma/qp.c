// SPDX-License-Identifier: GPL-2.0
/*
 * What the core knows of queue pairs for the protocol.
 *
 * What is kept for the other end of an RC QP must be given up when the QP leaves the
 * connected states, gets another address, or is destroyed.  The core calls here after
 * the device did it, and the protocol, if there is one, hears of it.  The core also
 * remembers in the QP who that is connected to, so that the claim of a stranger to be
 * that needs no query of the device.
 *
 * The protocol's part of a QP that is made from attributes which were read before a
 * concurrent modification must not come to life after it: ib_qp_np.changed orders the two.
 */
#include <linux/export.h>
#include <linux/srcu.h>
#include <kunit/visibility.h>

#include "np.h"
#include "np_hooks.h"

/* Who listens may be a module that goes */
DEFINE_STATIC_SRCU(np_qp_srcu);
static const struct np_qp_ops __rcu *np_qp_listener;

/**
 * np_qp_listen - Hear of QPs, or hear no more of them
 * @ops: what to call; NULL: nothing any more
 *
 * Context: process context; when it returns nothing is called that was set before
 */
void np_qp_listen(const struct np_qp_ops *ops)
{
	rcu_assign_pointer(np_qp_listener, ops);
	synchronize_srcu(&np_qp_srcu);
}
EXPORT_SYMBOL_GPL(np_qp_listen);

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
	mutex_init(&qp->np.modify);
	spin_lock_init(&qp->np.lock);
}
EXPORT_SYMBOL_IF_KUNIT(np_qp_init);

/**
 * np_qp_modify_begin - A QP is about to be modified
 * @qp: the QP; np_qp_modify_end() must follow
 *
 * Context: process context, may sleep
 */
void np_qp_modify_begin(struct ib_qp *qp)
{
	/* Else the protocol has it, which is who modifies the QP */
	if (np_qp_has_peers(qp) && READ_ONCE(qp->np.holder) != current)
		mutex_lock(&qp->np.modify);
}

static bool np_qp_still_connected(const struct ib_qp_attr *attr, int attr_mask)
{
	if (attr_mask & (IB_QP_AV | IB_QP_DEST_QPN | IB_QP_PKEY_INDEX |
			 IB_QP_PORT | IB_QP_PATH_MIG_STATE))
		return false;
	if (!(attr_mask & IB_QP_STATE))
		return true;
	return np_state_connected(attr->qp_state);
}

static void np_qp_remember(struct ib_qp_np *np, const struct ib_qp_attr *attr,
			   int attr_mask)
{
	lockdep_assert_held(&np->lock);
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
	bool left = !ret && !np_qp_still_connected(attr, attr_mask);
	bool failing = READ_ONCE(qp->np.holder) == current;
	const struct np_qp_ops *ops;
	u32 count = 0;
	int idx;

	if (!np_qp_has_peers(qp))
		return;
	if (!ret) {
		spin_lock_irq(&qp->np.lock);
		np_qp_remember(&qp->np, attr, attr_mask);
		qp->np.changed += left;
		qp->np.left += left;
		count = qp->np.left;
		spin_unlock_irq(&qp->np.lock);
	}
	if (failing)
		return;
	mutex_unlock(&qp->np.modify);
	if (!left)
		return;
	idx = srcu_read_lock(&np_qp_srcu);
	ops = srcu_dereference(np_qp_listener, &np_qp_srcu);
	if (ops)
		ops->left(qp, count);
	srcu_read_unlock(&np_qp_srcu, idx);
}
EXPORT_SYMBOL_IF_KUNIT(np_qp_modify_end);

/**
 * np_qp_destroyed - The device has destroyed a QP
 * @qp: no lookup finds it any more
 *
 * Context: process context, may sleep
 */
void np_qp_destroyed(struct ib_qp *qp)
{
	const struct np_qp_ops *ops;
	int idx;

	if (!np_qp_has_peers(qp))
		return;
	idx = srcu_read_lock(&np_qp_srcu);
	ops = srcu_dereference(np_qp_listener, &np_qp_srcu);
	if (ops)
		ops->destroyed(qp);
	srcu_read_unlock(&np_qp_srcu, idx);
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
 * Context: any
 */
void np_qp_event(struct ib_qp *qp, enum ib_event_type event)
{
	const struct np_qp_ops *ops;
	unsigned long flags;
	int idx;

	if (!np_qp_has_peers(qp) || !np_qp_has_failed(event))
		return;
	spin_lock_irqsave(&qp->np.lock, flags);
	qp->np.changed++;
	spin_unlock_irqrestore(&qp->np.lock, flags);

	idx = srcu_read_lock(&np_qp_srcu);
	ops = srcu_dereference(np_qp_listener, &np_qp_srcu);
	if (ops)
		ops->failed(qp);
	srcu_read_unlock(&np_qp_srcu, idx);
}
EXPORT_SYMBOL_IF_KUNIT(np_qp_event);
