/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the examples need of plain verbs: on each of two devices of this host a queue pair, and
 * the two connected. Applications do that between hosts, by rdma_cm or as they like. Nothing here
 * is about unpinned memory.
 */
#ifndef ENDS_H
#define ENDS_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct end {
	struct ibv_context *verbs;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

/* For calls that return 0, an errno value as verbs do, or a negative one as libnprdma does. */
static inline void check(int error, const char *what)
{
	if (!error)
		return;
	fprintf(stderr, "%s: %s\n", what, strerror(abs(error)));
	exit(1);
}

/* For calls that return NULL and set errno. */
static inline void check_pointer(const void *p, const char *what)
{
	if (!p)
		check(errno, what);
}

/* Memory that is paged out: what is done with it has to bring it in. */
static inline char *map_memory(size_t size, int fill)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		check(errno, "mmap");
	memset(p, fill, size);
	if (madvise(p, size, MADV_PAGEOUT))
		check(errno, "madvise");
	return (char *)p;
}

static inline struct end open_end(const char *device)
{
	struct end e;
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct ibv_device **list = ibv_get_device_list(NULL);

	memset(&e, 0, sizeof(e));
	for (struct ibv_device **d = list; d && *d; d++)
		if (!strcmp(ibv_get_device_name(*d), device))
			e.verbs = ibv_open_device(*d);
	ibv_free_device_list(list);
	if (!e.verbs)
		check(ENODEV, device);
	check_pointer(e.pd = ibv_alloc_pd(e.verbs), "ibv_alloc_pd");
	check_pointer(e.channel = ibv_create_comp_channel(e.verbs), "ibv_create_comp_channel");
	/* Twice the entries that plain verbs would need: npr_attach_cq(3). */
	check_pointer(e.cq = ibv_create_cq(e.verbs, 128, NULL, e.channel, 0), "ibv_create_cq");
	memset(&init, 0, sizeof(init));
	init.send_cq = init.recv_cq = e.cq;
	init.cap.max_send_wr = 64;
	init.cap.max_recv_wr = 16;
	init.cap.max_send_sge = init.cap.max_recv_sge = 1;
	init.qp_type = IBV_QPT_RC;
	check_pointer(e.qp = ibv_create_qp(e.pd, &init), "ibv_create_qp");
	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	/* READ at both ends: it is what proves a WRITE. */
	attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
	check(ibv_modify_qp(e.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			    IBV_QP_ACCESS_FLAGS), "ibv_modify_qp to INIT");
	return e;
}

static inline void connect_end(const struct end *e, const struct end *to)
{
	struct ibv_port_attr port;
	struct ibv_qp_attr attr;

	memset(&attr, 0, sizeof(attr));
	check(ibv_query_port(to->verbs, 1, &port), "ibv_query_port");
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = port.active_mtu;
	attr.dest_qp_num = to->qp->qp_num;
	attr.max_dest_rd_atomic = 16;
	attr.min_rnr_timer = 12;
	attr.ah_attr.dlid = port.lid;
	attr.ah_attr.port_num = 1;
	if (port.link_layer == IBV_LINK_LAYER_ETHERNET) {
		attr.ah_attr.is_global = 1;
		attr.ah_attr.grh.hop_limit = 1;
		check(ibv_query_gid(to->verbs, 1, 0, &attr.ah_attr.grh.dgid), "ibv_query_gid");
	}
	check(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			    IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			    IBV_QP_MIN_RNR_TIMER), "ibv_modify_qp to RTR");
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 14;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	attr.max_rd_atomic = 16;
	check(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			    IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
	      "ibv_modify_qp to RTS");
}

/* The arguments are two devices: of the owner of the memory, and of its peer. */
static inline void open_ends(int argc, char **argv, struct end *owner, struct end *peer)
{
	if (argc != 3) {
		fprintf(stderr, "usage: %s OWNER_DEVICE PEER_DEVICE\n", argv[0]);
		exit(2);
	}
	*owner = open_end(argv[1]);
	*peer = open_end(argv[2]);
	connect_end(owner, peer);
	connect_end(peer, owner);
}

static inline void close_end(struct end *e)
{
	check(ibv_destroy_qp(e->qp), "ibv_destroy_qp");
	check(ibv_destroy_cq(e->cq), "ibv_destroy_cq");
	check(ibv_destroy_comp_channel(e->channel), "ibv_destroy_comp_channel");
	check(ibv_dealloc_pd(e->pd), "ibv_dealloc_pd");
	check(ibv_close_device(e->verbs), "ibv_close_device");
}

#endif
