// SPDX-License-Identifier: GPL-2.0
/*
 * The quick transport: a UD QP of the kernel's on each port.
 *
 * A MAD on QP1 costs mappings of its buffers, completions of its own and two
 * work queues on its way; a fault is short against that. MADs tell the number of this
 * QP, and so kernels that know each other through RESOLVE send the rest here: inline,
 * without completions, from and to memory that stays mapped. Nothing relies on it:
 * whatever is not answered is sent again by MAD, and a request that came by MAD is
 * answered by MAD.
 *
 * Completions are handled in softirq. An answer that somebody waits for is told there: a
 * worker in between would take longer than all the rest. What is left goes to a worker,
 * in the order in which it arrived, for it takes locks, and walks page tables.
 *
 * The Q_Key keeps stray messages out, and nobody who means harm: whoever has
 * CAP_NET_RAW may send with it. A message counts only if it comes from the address of a
 * peer and from the UD QP that the peer's kernel has named in a MAD with the secret of
 * the pair; see np_receive(). Until the peer's kernel knows ours in the same way, it
 * would not believe what we send here: see np_path.ud_known.
 */
#include <linux/dma-mapping.h>
#include <linux/llist.h>
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "np_hca.h"

#define NP_UD_QKEY	0x804e5031	/* bit 31: privileged */

#define NP_UD_SEND	256		/* depth of the send queue */
#define NP_UD_SIGNAL	32		/* every so many sends a completion */
#define NP_UD_RECV	512		/* receive buffers */

/**
 * struct np_ud_recv - a receive buffer
 * @cqe: its completion
 * @ud: the QP it belongs to
 * @buf: GRH, or on Ethernet the header in its place, and message
 * @dma: of @buf
 * @entry: in np_ud.arrived
 * @from: where the message there came from
 * @length: of what arrived, with the GRH
 */
struct np_ud_recv {
	struct ib_cqe cqe;
	struct np_ud *ud;
	u8 *buf;
	dma_addr_t dma;
	struct llist_node entry;
	struct np_addr from;
	u32 length;
};

/**
 * struct np_ud - a port's UD QP
 * @port: the port
 * @cq: for it
 * @qp: itself
 * @sent: completion of each NP_UD_SIGNAL-th send
 * @lock: protects @inflight, @unsignaled
 * @inflight: sends not known to be done
 * @unsignaled: sends since the last with a completion
 * @pkey: its partition
 * @broken: the QP failed, so all goes by MAD
 * @bufs: memory of all receive buffers
 * @dma: of @bufs
 * @arrived: receive buffers with messages for @work, the newest first
 * @work: receives them, and posts the buffers again
 * @closing: nobody is there any more for whom something could arrive
 * @recv: receive buffers
 */
struct np_ud {
	struct np_port *port;
	struct ib_cq *cq;
	struct ib_qp *qp;
	struct ib_cqe sent;
	spinlock_t lock; /* of @inflight and @unsignaled */
	unsigned int inflight;
	unsigned int unsignaled;
	u16 pkey;
	bool broken;
	u8 *bufs;
	dma_addr_t dma;
	struct llist_head arrived;
	struct work_struct work;
	bool closing;
	struct np_ud_recv recv[NP_UD_RECV];
};

static void np_ud_fail(struct np_ud *ud, const struct ib_wc *wc)
{
	if (wc->status == IB_WC_WR_FLUSH_ERR)
		return;
	if (!READ_ONCE(ud->broken))
		ibdev_warn(ud->port->hca->ibdev,
			   "nprdma: port %u: %s, going on with MADs\n",
			   ud->port->port_num, ib_wc_status_msg(wc->status));
	WRITE_ONCE(ud->broken, true);
}

static void np_ud_sent(struct ib_cq *cq, struct ib_wc *wc)
{
	struct np_ud *ud = container_of(wc->wr_cqe, struct np_ud, sent);

	if (wc->status != IB_WC_SUCCESS)
		np_ud_fail(ud, wc);
	spin_lock(&ud->lock);
	ud->inflight -= NP_UD_SIGNAL;
	spin_unlock(&ud->lock);
}

/* What to tell peers: the number of the port's UD QP; 0: none. */
static u32 np_ud_qpn(const struct np_port *port)
{
	/* Pairs with the release in np_ud_open() */
	struct np_ud *ud = READ_ONCE(port->ud);

	return ud && !READ_ONCE(ud->broken) ? ud->qp->qp_num : 0;
}

/* Likewise: its partition. */
static u16 np_ud_pkey(const struct np_port *port)
{
	struct np_ud *ud = READ_ONCE(port->ud);

	return ud ? ud->pkey : 0;
}

/**
 * np_wire_stamp - Fill in what each message tells of its sender
 * @wire: encoded
 * @port: of the sender
 */
void np_wire_stamp(struct np_wire *wire, const struct np_port *port)
{
	wire->hdr.incarnation = cpu_to_be64(np_incarnation());
	wire->hdr.ud_qpn = cpu_to_be32(np_ud_qpn(port));
	wire->hdr.ud_pkey = cpu_to_be16(np_ud_pkey(port));
}

/**
 * np_ud_reaches - Does a request go by the quick transport
 * @path: the way to the other kernel
 *
 * Return: false: np_ud_send() sends none
 */
bool np_ud_reaches(const struct np_path *path)
{
	struct np_ud *ud = READ_ONCE(path->port->ud);

	/* The QP is in the default partition, as nearly all are */
	return ud && READ_ONCE(path->ud_qpn) && !path->pkey_index &&
	       !READ_ONCE(ud->broken) && READ_ONCE(path->ud_known);
}

/**
 * np_ud_send - Send a message, once
 * @path: the way to the other kernel
 * @msg: the message
 *
 * Context: process context, does not wait
 * Return: 0 if it is on its way; else it must go by MAD
 */
int np_ud_send(struct np_path *path, const struct np_msg *msg)
{
	struct np_ud *ud = READ_ONCE(path->port->ud);
	u32 remote = READ_ONCE(path->ud_qpn);
	struct np_wire wire;
	struct ib_sge sge = {
		.addr = (uintptr_t)&wire,
	};
	struct ib_ud_wr wr = {
		.wr.sg_list = &sge,
		.wr.num_sge = 1,
		.wr.opcode = IB_WR_SEND,
		.wr.send_flags = IB_SEND_INLINE,
		.ah = path->ah,
		.remote_qpn = remote,
		.remote_qkey = NP_UD_QKEY,
		.port_num = path->port->port_num,
	};
	int err = -EAGAIN;

	/* The QP is in the default partition, as nearly all are */
	if (!ud || !remote || path->pkey_index || READ_ONCE(ud->broken))
		return -EOPNOTSUPP;
	/* An answer goes to whom we believed, who knows us */
	if (!msg->answer && !READ_ONCE(path->ud_known))
		return -EOPNOTSUPP;

	wr.wr.wr_cqe = &ud->sent;
	np_msg_encode(msg, &wire);
	np_wire_stamp(&wire, path->port);
	sge.length = sizeof(wire.hdr) + be16_to_cpu(wire.hdr.length);

	spin_lock_bh(&ud->lock);
	if (ud->inflight < NP_UD_SEND) {
		if (ud->unsignaled == NP_UD_SIGNAL - 1)
			wr.wr.send_flags |= IB_SEND_SIGNALED;
		err = ib_post_send(ud->qp, &wr.wr, NULL);
		if (!err) {
			ud->inflight++;
			ud->unsignaled = (ud->unsignaled + 1) % NP_UD_SIGNAL;
		}
	}
	spin_unlock_bh(&ud->lock);
	return err;
}

/* In one partition, and not both limited members of it. */
static bool np_ud_pkey_match(u16 a, u16 b)
{
	return !((a ^ b) & 0x7fff) && (a | b) & 0x8000;
}

/**
 * np_ud_learn - A MAD of another kernel told of its UD QP
 * @path: the way to it
 * @msg: that, and it has proven whose it is
 */
void np_ud_learn(struct np_path *path, const struct np_msg *msg)
{
	bool match = np_ud_pkey_match(msg->ud_pkey, np_ud_pkey(path->port));

	WRITE_ONCE(path->ud_qpn, match ? msg->ud_qpn : 0);
}

static int np_ud_post(struct np_ud_recv *recv)
{
	struct ib_sge sge = {
		.addr = recv->dma,
		.length = NP_UD_SIZE,
		.lkey = recv->ud->qp->pd->local_dma_lkey,
	};
	struct ib_recv_wr wr = {
		.wr_cqe = &recv->cqe,
		.sg_list = &sge,
		.num_sge = 1,
	};

	return ib_post_recv(recv->ud->qp, &wr, NULL);
}

/**
 * np_ud_decode - What a receive buffer holds
 * @buf: GRH and message; NP_UD_SIZE bytes
 * @length: what arrived, with the GRH
 * @msg: set
 *
 * What is behind the message's end is an older message's, maybe of another peer.
 *
 * Return: true if it is a message, not cut and not longer
 */
VISIBLE_IF_KUNIT bool np_ud_decode(const u8 *buf, u32 length, struct np_msg *msg)
{
	const struct np_wire *wire = (const struct np_wire *)(buf + NP_UD_GRH);

	if (length != NP_UD_GRH + sizeof(wire->hdr) + be16_to_cpu(wire->hdr.length))
		return false;
	return !np_msg_decode(wire, msg);
}
EXPORT_SYMBOL_IF_KUNIT(np_ud_decode);

/* The buffer is free again. */
static void np_ud_post_again(struct np_ud_recv *recv)
{
	if (np_ud_post(recv))
		WRITE_ONCE(recv->ud->broken, true);
}

static bool np_ud_is_answer(const struct np_ud_recv *recv)
{
	const struct np_wire *wire = (const struct np_wire *)(recv->buf + NP_UD_GRH);

	return wire->hdr.flags & NP_WIRE_ANSWER;
}

static bool np_ud_message(const struct np_ud_recv *recv, struct np_msg *msg)
{
	if (!np_ud_decode(recv->buf, recv->length, msg))
		return false;
	msg->quick = true;
	return true;
}

static void np_ud_work(struct work_struct *work)
{
	struct np_ud *ud = container_of(work, struct np_ud, work);
	struct np_ud_recv *recv, *next;
	struct llist_node *arrived;
	struct np_msg msg;

	arrived = llist_reverse_order(llist_del_all(&ud->arrived));
	llist_for_each_entry_safe(recv, next, arrived, entry) {
		if (READ_ONCE(ud->closing))
			break;
		if (np_ud_message(recv, &msg))
			ud->port->receive(ud->port, &msg, false, &recv->from, NULL);
		np_ud_post_again(recv);
		cond_resched();
	}
}

/* In softirq */
static void np_ud_received(struct ib_cq *cq, struct ib_wc *wc)
{
	struct np_ud_recv *recv = container_of(wc->wr_cqe, struct np_ud_recv,
					       cqe);
	struct np_ud *ud = recv->ud;
	struct np_msg msg;

	if (wc->status != IB_WC_SUCCESS) {
		np_ud_fail(ud, wc);
		return;
	}
	recv->length = wc->byte_len;
	if (np_wc_addr(ud->port, wc, recv->buf, &recv->from) ||
	    (np_ud_is_answer(recv) &&
	     (!np_ud_message(recv, &msg) ||
	      ud->port->receive_at_once(ud->port, &msg, &recv->from)))) {
		np_ud_post_again(recv);
		return;
	}
	if (llist_add(&recv->entry, &ud->arrived))
		queue_work(np_receive_wq, &ud->work);
}

static int np_ud_ready(struct np_ud *ud)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_INIT,
		.port_num = ud->port->port_num,
		.qkey = NP_UD_QKEY,
	};
	int err;

	err = ib_query_pkey(ud->qp->device, ud->port->port_num, 0, &ud->pkey);
	if (err)
		return err;
	err = ib_modify_qp(ud->qp, &attr, IB_QP_STATE | IB_QP_PKEY_INDEX |
					  IB_QP_PORT | IB_QP_QKEY);
	if (err)
		return err;
	attr.qp_state = IB_QPS_RTR;
	err = ib_modify_qp(ud->qp, &attr, IB_QP_STATE);
	if (err)
		return err;
	attr.qp_state = IB_QPS_RTS;
	return ib_modify_qp(ud->qp, &attr, IB_QP_STATE | IB_QP_SQ_PSN);
}

static void np_ud_free(struct np_ud *ud)
{
	/*
	 * Handlers and the work post receives again, so they end first. Those of sends touch
	 * only memory of ours, and a UD send queue cannot be drained: what
	 * drivers post for that is an RDMA WRITE.
	 */
	WRITE_ONCE(ud->closing, true);
	ib_drain_rq(ud->qp);
	flush_work(&ud->work);
	ib_destroy_qp(ud->qp);
	ib_free_cq(ud->cq);
	/* A device that is lost may not have drained anything: then it was queued once more, and does nothing */
	cancel_work_sync(&ud->work);
	dma_free_coherent(ud->port->hca->ibdev->dma_device,
			  NP_UD_RECV * NP_UD_SIZE, ud->bufs, ud->dma);
	kvfree(ud);
}

/**
 * np_ud_close - End the quick transport of a port
 * @port: has neither peers nor a MAD agent any more: nobody looks at it
 */
void np_ud_close(struct np_port *port)
{
	struct np_ud *ud = port->ud;

	if (!ud)
		return;
	port->ud = NULL;
	np_ud_free(ud);
}

static int np_ud_fill(struct np_ud *ud)
{
	unsigned int i;
	int err;

	for (i = 0; i < NP_UD_RECV; i++) {
		struct np_ud_recv *recv = &ud->recv[i];

		recv->cqe.done = np_ud_received;
		recv->ud = ud;
		recv->buf = ud->bufs + i * NP_UD_SIZE;
		recv->dma = ud->dma + i * NP_UD_SIZE;
		err = np_ud_post(recv);
		if (err)
			return err;
	}
	return 0;
}

/**
 * np_ud_open - Begin the quick transport of a port
 * @port: has a MAD agent
 *
 * A port without does all by MAD: that is slower, and no error.
 */
void np_ud_open(struct np_port *port)
{
	struct ib_device *ibdev = port->hca->ibdev;
	struct ib_qp_init_attr init = {
		.cap.max_send_wr = NP_UD_SEND + 1,
		.cap.max_recv_wr = NP_UD_RECV + 1,
		.cap.max_send_sge = 1,
		.cap.max_recv_sge = 1,
		.cap.max_inline_data = NP_WIRE_SIZE,
		.sq_sig_type = IB_SIGNAL_REQ_WR,
		.qp_type = IB_QPT_UD,
		.port_num = port->port_num,
	};
	struct np_ud *ud;
	int err;

	if ((!rdma_protocol_ib(ibdev, port->port_num) &&
	     !rdma_protocol_roce(ibdev, port->port_num)) ||
	    rdma_cap_opa_ah(ibdev, port->port_num) || ib_uses_virt_dma(ibdev))
		return;
	ud = kvzalloc(sizeof(*ud), GFP_KERNEL);
	if (!ud)
		return;
	ud->port = port;
	ud->sent.done = np_ud_sent;
	spin_lock_init(&ud->lock);
	init_llist_head(&ud->arrived);
	INIT_WORK(&ud->work, np_ud_work);

	ud->bufs = dma_alloc_coherent(ibdev->dma_device,
				      NP_UD_RECV * NP_UD_SIZE, &ud->dma,
				      GFP_KERNEL);
	if (!ud->bufs) {
		err = -ENOMEM;
		goto err_free;
	}
	ud->cq = ib_alloc_cq_any(ibdev, ud, NP_UD_SEND + NP_UD_RECV + 2,
				 IB_POLL_SOFTIRQ);
	if (IS_ERR(ud->cq)) {
		err = PTR_ERR(ud->cq);
		goto err_bufs;
	}
	init.send_cq = ud->cq;
	init.recv_cq = ud->cq;
	/* The PD of the peers' address handles */
	ud->qp = ib_create_qp(port->agent->qp->pd, &init);
	if (IS_ERR(ud->qp)) {
		err = PTR_ERR(ud->qp);
		goto err_cq;
	}
	err = np_ud_ready(ud);
	if (!err)
		err = np_ud_fill(ud);
	if (err) {
		/* Buffers may be posted */
		np_ud_free(ud);
		ud = NULL;
		goto err_free;
	}
	/* Messages come already, and their answers tell of it: see np_ud_qpn() */
	smp_store_release(&port->ud, ud);
	return;

err_cq:
	ib_free_cq(ud->cq);
err_bufs:
	dma_free_coherent(ibdev->dma_device, NP_UD_RECV * NP_UD_SIZE, ud->bufs,
			  ud->dma);
err_free:
	kvfree(ud);
	ibdev_warn(ibdev, "nprdma: no UD QP on port %u (%d), using MADs\n",
		   port->port_num, err);
}
