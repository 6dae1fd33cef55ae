// SPDX-License-Identifier: GPL-2.0
/*
 * The transport between kernels: one MAD agent per port.
 *
 * Sending takes a buffer from a pool, so that an answer waits for no reclaim.
 * A message that cannot be sent now is dropped: the asker repeats requests, and
 * a repeated request is answered again.
 *
 * The agent's handlers run on the MAD layer's own work queue, with all the
 * port's other MADs behind them, so they neither wait nor fault.
 */
#include <linux/slab.h>

#include "../mad_priv.h"
#include "np_hca.h"

#define NP_POOL_FIRST		64
#define NP_POOL_MAX		512

static const u8 np_oui[3] = NP_MAD_OUI;

/**
 * struct np_send - a send buffer and what it keeps alive until it was sent
 * @entry: in np_port.pool
 * @buf: the MAD layer's
 * @port: of the agent
 * @path: reference, because of its address handle; NULL in the pool
 */
struct np_send {
	struct list_head entry;
	struct ib_mad_send_buf *buf;
	struct np_port *port;
	struct np_path *path;
};

/* Sending */

static void np_send_free(struct np_send *send)
{
	ib_free_send_mad(send->buf);
	kfree(send);
}

static struct np_send *np_send_alloc(struct np_port *port, gfp_t gfp)
{
	struct ib_vendor_mad *mad;
	struct np_send *send;

	send = kzalloc(sizeof(*send), gfp);
	if (!send)
		return NULL;
	send->buf = ib_create_send_mad(port->agent, 1, 0, 0, IB_MGMT_VENDOR_HDR,
				       IB_MGMT_VENDOR_DATA, gfp,
				       IB_MGMT_BASE_VERSION);
	if (IS_ERR(send->buf)) {
		kfree(send);
		return NULL;
	}
	send->port = port;
	send->buf->context[0] = send;
	mad = send->buf->mad;
	mad->mad_hdr.base_version = IB_MGMT_BASE_VERSION;
	mad->mad_hdr.mgmt_class = NP_MAD_CLASS;
	mad->mad_hdr.class_version = NP_MAD_CLASS_VERSION;
	mad->mad_hdr.method = IB_MGMT_METHOD_SEND;
	memcpy(mad->oui, np_oui, sizeof(mad->oui));
	return send;
}

static struct np_send *np_send_get(struct np_port *port)
{
	struct np_send *send;
	unsigned long flags;

	spin_lock_irqsave(&port->lock, flags);
	send = list_first_entry_or_null(&port->pool, struct np_send, entry);
	if (send) {
		list_del(&send->entry);
		port->pooled--;
	}
	spin_unlock_irqrestore(&port->lock, flags);
	return send ?: np_send_alloc(port, GFP_NOWAIT | __GFP_NOWARN);
}

static void np_send_put(struct np_send *send)
{
	struct np_port *port = send->port;
	struct np_path *path = send->path;
	unsigned long flags;
	bool keep;

	send->path = NULL;

	spin_lock_irqsave(&port->lock, flags);
	keep = !port->closing && port->pooled < NP_POOL_MAX;
	if (keep) {
		/* Last in, first out: it is in the cache */
		list_add(&send->entry, &port->pool);
		port->pooled++;
	}
	spin_unlock_irqrestore(&port->lock, flags);
	if (!keep)
		np_send_free(send);
	/* Last: the device, and so @port, may go with it */
	if (path)
		np_path_put(path);
}

static void np_mad_sent(struct ib_mad_agent *agent,
			struct ib_mad_send_wc *wc)
{
	np_send_put(wc->send_buf->context[0]);
}

/* np_port.send */
static int np_mad_send(struct np_path *path, const struct np_msg *msg)
{
	struct np_port *port = path->port;
	struct ib_mad_send_wr_private *wr;
	struct ib_vendor_mad *mad;
	struct np_wire *wire;
	struct np_send *send;
	int err;

	send = np_send_get(port);
	if (!send)
		return -ENOMEM;

	mad = send->buf->mad;
	wire = (struct np_wire *)mad->data;
	np_msg_encode(msg, wire);
	np_wire_stamp(wire, port);
	mad->mad_hdr.tid = wire->hdr.tid;
	mad->mad_hdr.attr_id = cpu_to_be16(msg->type);

	send->path = np_path_get(path);
	send->buf->ah = path->ah;
	send->buf->next = NULL;
	send->buf->timeout_ms = 0;
	send->buf->retries = 0;
	wr = container_of(send->buf, struct ib_mad_send_wr_private, send_buf);
	wr->send_wr.pkey_index = path->pkey_index;

	err = ib_post_send_mad(send->buf, NULL);
	if (err)
		np_send_put(send);
	return err;
}

/* Receiving */

static void np_mad_received(struct ib_mad_agent *agent,
			    struct ib_mad_send_buf *send_buf,
			    struct ib_mad_recv_wc *recv)
{
	struct np_port *port = agent->context;
	struct ib_vendor_mad *mad = (struct ib_vendor_mad *)recv->recv_buf.mad;
	struct np_addr from;
	struct np_msg msg;
	int err;

	err = np_msg_decode((const struct np_wire *)mad->data, &msg);
	if (err == -EINVAL || (err && msg.answer) ||
	    np_wc_addr(port, recv->wc, recv->recv_buf.grh, &from))
		goto out;
	port->receive(port, &msg, err, &from, recv);
out:
	ib_free_recv_mad(recv);
}

/* Devices */

/**
 * np_port_close - End a port
 * @port: its device is dying, so no path is made any more, and all peers are being killed
 */
void np_port_close(struct np_port *port)
{
	struct np_send *send, *next;
	LIST_HEAD(pool);

	if (!port->agent)
		return;
	/* Whoever sends has a path, and so has a peer until it is killed */
	wait_event(port->idle, !atomic_read(&port->paths));
	spin_lock_irq(&port->lock);
	port->closing = true;
	list_splice_init(&port->pool, &pool);
	port->pooled = 0;
	spin_unlock_irq(&port->lock);
	list_for_each_entry_safe(send, next, &pool, entry)
		np_send_free(send);
	/* Waits for the handlers, which find no peer, and answer no stranger */
	ib_unregister_mad_agent(port->agent);
	port->agent = NULL;
	np_ud_close(port);
}

/**
 * np_port_init - Prepare a port
 * @port: zeroed
 * @hca: the device
 * @port_num: number of the port
 * @receive: takes what arrives
 * @at_once: takes what came by the quick transport, where it can without waiting
 */
void np_port_init(struct np_port *port, struct np_hca *hca, u32 port_num,
		  np_receive_fn *receive, np_receive_at_once_fn *at_once)
{
	port->hca = hca;
	port->port_num = port_num;
	port->receive = receive;
	port->receive_at_once = at_once;
	init_waitqueue_head(&port->idle);
	port->send = np_mad_send;
	spin_lock_init(&port->lock);
	INIT_LIST_HEAD(&port->pool);
}

/**
 * np_port_open - Begin a port: its MAD agent and its quick transport
 * @port: zeroed but for @hca and @port_num
 *
 * Return: 0, also if the port does not have the management of InfiniBand, or an error; then,
 * too, np_port_close() must follow
 */
int np_port_open(struct np_port *port)
{
	struct ib_mad_reg_req req = {
		.mgmt_class = NP_MAD_CLASS,
		.mgmt_class_version = NP_MAD_CLASS_VERSION,
		.oui = NP_MAD_OUI,
	};
	struct ib_mad_agent *agent;
	struct np_send *send;
	unsigned int i;

	if (!np_port_may_ask(port->hca->ibdev, port->port_num))
		return 0;

	set_bit(IB_MGMT_METHOD_SEND, req.method_mask);
	agent = ib_register_mad_agent(port->hca->ibdev, port->port_num,
				      IB_QPT_GSI, &req, 0, np_mad_sent,
				      np_mad_received, port, 0);
	if (IS_ERR(agent))
		return PTR_ERR(agent);
	port->agent = agent;

	for (i = 0; i < NP_POOL_FIRST; i++) {
		send = np_send_alloc(port, GFP_KERNEL);
		if (!send)
			return -ENOMEM;
		np_send_put(send);
	}
	np_ud_open(port);
	return 0;
}
