// SPDX-License-Identifier: GPL-2.0
/*
 * Arrivals: who is believed, and where a message goes.
 *
 * A request is obeyed if it comes from a kernel, the QP it names is ours, is connected
 * to the QP it claims to come from at the address it came from, the request carries the
 * secret that this address was told (but RESOLVE, whose answer tells it), and the region
 * belongs to that QP's PD: exactly those who could have used the rkey of a pinned region.
 *
 * np_receive() runs in the handler of what arrives, with all the port's other messages
 * behind it, so it never sleeps. The commonest answers do not even come there: see
 * np_receive_at_once().  It answers peers where that needs no waiting; other
 * FAULTs go to a queue of the memory's owner, who may keep them waiting, and the rest to
 * one of ours.  So do answers to those who are no peers: to make an address handle may take a
 * second, in which a neighbour is looked for.  Everything that is queued is counted; over
 * a bound the answer is BUSY, or there is none, and no memory is spent.
 */
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "../core_priv.h"
#include "../restrack.h"
#include "np_proto.h"
#include "peer_trace.h"

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
 * struct np_refused_msg - an answer to who is no peer
 * @work: sends it
 * @mad: to whom
 * @answer: the answer
 */
struct np_refused_msg {
	struct work_struct work;
	struct np_mad_from mad;
	struct np_msg answer;
};

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
	struct np_refused_msg *refusal =
		container_of(work, struct np_refused_msg, work);
	struct np_port *port = refusal->mad.port;
	struct np_path *path = NULL;
	struct ib_ah *ah;

	ah = ib_create_ah_from_wc(port->agent->qp->pd, &refusal->mad.wc,
				  &refusal->mad.grh, port->port_num);
	if (!IS_ERR(ah))
		path = np_path_make(port, ah, refusal->mad.wc.pkey_index);
	if (!IS_ERR_OR_NULL(path)) {
		np_send(path, &refusal->answer);
		np_path_put(path);
	}
	kfree(refusal);
	np_hca_end_refusal(port->hca);
}

/* Over the bound there is no answer: so an address without anybody delays no others. */
static void np_refuse_message(const struct np_mad_from *mad, const struct np_msg *msg,
		      u32 status)
{
	struct np_refused_msg *refusal;

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
	np_refuse_message(&mad, msg, status);
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
	if (np_qp_may_be_connected(qp, asked->msg.src_qpn, &asked->from))
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
			np_refuse_message(&asked->mad, &asked->msg,
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

/* Arrivals */

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
	case NP_MSG_RECALL:
		np_answer_stranger(port, recv, msg, RDMA_NP_GONE);
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
			     const struct np_path *path,
			     const struct np_msg *msg,
			     const struct np_addr *from)
{
	bool ours = np_msg_by_owner(msg->type) == msg->answer;

	if (msg->quick && from->qpn != READ_ONCE(path->ud_qpn))
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

	/* What is in use must not end because somebody does not know that it is */
	if (msg->type == NP_MSG_RECALL && np_peer_keeps(peer, msg->hold_id))
		return;
	if (msg->type == NP_MSG_FAULT || msg->type == NP_MSG_RECALL)
		status = RDMA_NP_GONE;
	else if (msg->type == NP_MSG_GONE &&
		 np_peer_uses(peer, msg->forget.region_id))
		status = RDMA_NP_BUSY;
	np_answer_status(peer, msg, status);
}

static void np_receive_peer(struct np_port *port, struct np_peer *peer,
			    struct np_path *path, const struct np_msg *msg,
			    const struct np_addr *from,
			    struct ib_mad_recv_wc *recv)
{
	if (!np_peer_believes(peer, path, msg, from)) {
		trace_np_disbelieve(peer->hca->ibdev, peer->qpn, msg->type,
				    msg->answer, from->qpn);
		if (!msg->answer && recv)
			np_answer_disbelieved(peer, msg);
		return;
	}
	if (msg->quick)
		WRITE_ONCE(path->ud_known, true);
	else if (msg->type != NP_MSG_RESOLVE)
		np_ud_learn(path, msg);
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
	case NP_MSG_RECALL:
		np_answer_status(peer, msg, np_peer_told_recall(peer, msg->hold_id));
		return;
	case NP_MSG_RESOLVE:
	case NP_MSG_FORGET:
		if (!np_asked_queue(port, peer, msg, from, recv))
			np_answer_status(peer, msg, RDMA_NP_BUSY);
	}
}

/* Is it from who @peer is connected to */
static bool np_peer_is_at(const struct np_peer *peer, const struct np_port *port,
			  const struct np_msg *msg, const struct np_addr *from)
{
	return peer->port == port && peer->remote_qpn == msg->src_qpn &&
	       np_addr_match(&peer->addr, from);
}

/**
 * np_receive_at_once - np_receive(), if nothing has to be waited for
 * @port: here
 * @msg: came by the quick transport
 * @from: from there
 *
 * That are answers that bring pages. Each saves the way over a worker, for which somebody
 * waits with it. Requests need a context that may walk page tables, whose locks are
 * no softirq's.
 *
 * The locks are tried, and whom the softirq interrupts may have them. Where there is one CPU
 * spin_trylock() always succeeds, as a lock is only to keep preemption off there: then a
 * worker has to do it.
 *
 * Context: softirq
 * Return: false: nothing has happened, and np_receive() must follow
 */
bool np_receive_at_once(struct np_port *port, const struct np_msg *msg,
			const struct np_addr *from)
{
	struct np_path *path = NULL;
	struct np_peer *peer;
	bool done = false;

	if (!msg->answer || !IS_ENABLED(CONFIG_SMP))
		return false;
	peer = np_peer_find(port->hca, msg->dst_qpn);
	if (!peer)
		return false;
	if (np_peer_is_at(peer, port, msg, from))
		path = np_peer_try_path(peer);
	if (path && np_peer_believes(peer, path, msg, from)) {
		done = np_peer_answered_at_once(peer, msg);
		if (done)
			WRITE_ONCE(path->ud_known, true);
	}
	if (path)
		np_path_put(path);
	np_peer_put(peer);
	return done;
}
EXPORT_SYMBOL_IF_KUNIT(np_receive_at_once);

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
 * Context: handler of what arrives: process context, does not sleep
 */
void np_receive(struct np_port *port, const struct np_msg *msg, bool malformed,
		const struct np_addr *from, struct ib_mad_recv_wc *recv)
{
	struct np_path *path = NULL;
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
	if (peer && np_peer_is_at(peer, port, msg, from))
		path = np_peer_path(peer);
	if (path)
		np_receive_peer(port, peer, path, msg, from, recv);
	else if (!msg->answer && recv)
		np_receive_stranger(port, msg, from, recv);
	if (path)
		np_path_put(path);
	if (peer)
		np_peer_put(peer);
}
EXPORT_SYMBOL_IF_KUNIT(np_receive);
