/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Sleeps until memory of a peer was read that is paged out. */
#include "ends.h"

#include <nprdma/nprdma.h>

/* One completion. What came before the CQ was armed makes no event: so poll once more. */
static struct ibv_wc wait_for_one(struct npr_cq *cq)
{
	struct ibv_wc wc;
	int n;

	for (;;) {
		check(npr_req_notify_cq(cq, 0), "npr_req_notify_cq");
		if ((n = npr_poll_cq(cq, 1, &wc)) != 0)
			break;
		/* A wake-up is not a completion: the library may have work to do. */
		n = npr_wait_cq(cq, -1);
		check(n < 0 ? n : 0, "npr_wait_cq");
	}
	check(n < 0 ? n : 0, "npr_poll_cq");
	return wc;
}

int main(int argc, char **argv)
{
	static char buffer[4096];
	struct end owner, peer;
	struct ibv_mr *remote, *local;
	struct npr_context *ctx;
	struct npr_cq *cq;
	struct npr_qp *qp;

	open_ends(argc, argv, &owner, &peer);
	char *memory = map_memory(sizeof(buffer), 'x');
	remote = npr_reg_mr(owner.pd, memory, sizeof(buffer), IBV_ACCESS_REMOTE_READ);
	check_pointer(remote, "npr_reg_mr");
	local = ibv_reg_mr(peer.pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE);
	check_pointer(local, "ibv_reg_mr");
	check_pointer(ctx = npr_open(peer.verbs, 0), "npr_open");
	check_pointer(cq = npr_attach_cq(ctx, peer.cq), "npr_attach_cq");
	check_pointer(qp = npr_attach_qp(cq, peer.qp, NULL), "npr_attach_qp");
	struct ibv_sge sge = {(uintptr_t)buffer, sizeof(buffer), local->lkey};
	struct ibv_send_wr *bad, wr = {
		.sg_list = &sge, .num_sge = 1,
		.opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = {.remote_addr = (uintptr_t)memory, .rkey = remote->rkey},
	};
	check(npr_post_send(qp, &wr, &bad), "npr_post_send");
	struct ibv_wc wc = wait_for_one(cq);
	printf("READ: %s; the first byte is '%c'\n", ibv_wc_status_str(wc.status), buffer[0]);

	check(npr_detach_qp(qp), "npr_detach_qp");
	check(npr_detach_cq(cq), "npr_detach_cq");
	check(npr_close(ctx), "npr_close");
	check(ibv_dereg_mr(local), "ibv_dereg_mr");
	check(npr_dereg_mr(remote), "npr_dereg_mr");
	close_end(&peer);
	close_end(&owner);
	return wc.status != IBV_WC_SUCCESS || memcmp(buffer, memory, sizeof(buffer));
}
