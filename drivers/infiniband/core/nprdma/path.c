// SPDX-License-Identifier: GPL-2.0
/*
 * Paths: ways to other kernels, and the sending of one message.
 *
 * A message goes by the quick transport if it may and the other kernel is known there,
 * else by MAD.  One that cannot be sent now is dropped: the asker repeats requests, and
 * a repeated request is answered again.
 *
 * A path keeps its address handle until the last MAD that uses it was sent.  Who closes
 * a port waits for its paths, so whoever has one gives it back soon.
 */
#include <linux/debugfs.h>
#include <linux/fault-inject.h>
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "np_hca.h"

#ifdef CONFIG_FAULT_INJECTION_DEBUG_FS
/* Loses messages, as a network may: debugfs directory "nprdma_lose" */
static DECLARE_FAULT_ATTR(np_lose);
static struct dentry *np_lose_dir;

static bool np_is_lost(void)
{
	return should_fail(&np_lose, 1);
}

/**
 * np_lose_init - Let messages be lost, if somebody wants them to
 */
void np_lose_init(void)
{
	np_lose_dir = fault_create_debugfs_attr("nprdma_lose", NULL, &np_lose);
}

/**
 * np_lose_exit - End what np_lose_init() began
 */
void np_lose_exit(void)
{
	debugfs_remove_recursive(np_lose_dir);
}
#else
static bool np_is_lost(void)
{
	return false;
}

void np_lose_init(void)
{
}

void np_lose_exit(void)
{
}
#endif

/**
 * np_wc_addr - Where a datagram came from
 * @port: that received it
 * @wc: its completion
 * @grh: the first bytes of its receive buffer
 * @addr: set
 *
 * Return: 0 or -EINVAL: on Ethernet it does not say so
 */
int np_wc_addr(const struct np_port *port, const struct ib_wc *wc, const void *grh,
	       struct np_addr *addr)
{
	enum rdma_network_type type;
	union ib_gid dgid;

	*addr = (struct np_addr) {
		.roce = rdma_protocol_roce(port->hca->ibdev, port->port_num),
		.grh = wc->wc_flags & IB_WC_GRH,
		.lid = wc->slid,
		.qpn = wc->src_qp,
	};
	if (!addr->roce) {
		if (addr->grh)
			addr->gid = ((const struct ib_grh *)grh)->sgid;
		return 0;
	}
	if (!addr->grh)
		return -EINVAL;
	type = wc->wc_flags & IB_WC_WITH_NETWORK_HDR_TYPE ?
	       wc->network_hdr_type : RDMA_NETWORK_IPV6;
	return ib_get_gids_from_rdma_hdr(grh, type, &addr->gid, &dgid);
}

static void np_path_free(struct work_struct *work)
{
	struct np_path *path = container_of(work, struct np_path, free);
	struct np_port *port = path->port;
	struct np_hca *hca = port->hca;

	rdma_destroy_ah(path->ah, RDMA_DESTROY_AH_SLEEPABLE);
	kfree(path);
	if (atomic_dec_and_test(&port->paths))
		wake_up_all(&port->idle);
	/* Last: the port goes with it */
	np_hca_put(hca);
}

/**
 * np_path_make - A way to another kernel
 * @port: from here
 * @ah: to there; consumed, even on error
 * @pkey_index: in this partition
 *
 * Context: process context, may sleep
 * Return: with a reference, for np_path_put(), or -ENOMEM
 */
struct np_path *np_path_make(struct np_port *port, struct ib_ah *ah, u16 pkey_index)
{
	struct np_path *path = kzalloc(sizeof(*path), GFP_KERNEL);

	if (!path) {
		rdma_destroy_ah(ah, RDMA_DESTROY_AH_SLEEPABLE);
		return ERR_PTR(-ENOMEM);
	}
	kref_init(&path->ref);
	INIT_WORK(&path->free, np_path_free);
	kref_get(&port->hca->ref);
	atomic_inc(&port->paths);
	path->port = port;
	path->ah = ah;
	path->pkey_index = pkey_index;
	return path;
}

/**
 * np_path_get - Take a reference
 * @path: of which the caller has one
 *
 * Return: @path
 */
struct np_path *np_path_get(struct np_path *path)
{
	kref_get(&path->ref);
	return path;
}

/* To destroy its address handle may sleep. */
static void np_path_release(struct kref *ref)
{
	queue_work(np_wq, &container_of(ref, struct np_path, ref)->free);
}

/**
 * np_path_put - Give back a reference
 * @path: the path
 *
 * Context: any, does not sleep
 */
void np_path_put(struct np_path *path)
{
	kref_put(&path->ref, np_path_release);
}

/**
 * np_send - Send one message, once
 * @path: by which
 * @msg: the message; what each message tells of its sender is filled in
 *
 * Context: process context; allocates, if at all, without waiting
 */
void np_send(struct np_path *path, const struct np_msg *msg)
{
	if (np_is_lost())
		return;
	if (msg->quick && !np_ud_send(path, msg))
		return;
	path->port->send(path, msg);
}
