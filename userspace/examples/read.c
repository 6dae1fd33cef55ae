/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* READs from memory of a peer that is paged out. */
#include "ends.h"

#include <nprdma/nprdma.h>

int main(int argc, char **argv)
{
	const size_t size = 1 << 20;
	static char buffer[4096];
	struct end owner, peer;
	struct ibv_mr *remote, *local;
	struct npr_context *ctx;
	struct npr_cq *cq;
	struct npr_qp *qp;

	/* The owner of the memory. */
	open_ends(argc, argv, &owner, &peer);
	char *memory = map_memory(size, 'x');
	check_pointer(remote = npr_reg_mr(owner.pd, memory, size, IBV_ACCESS_REMOTE_READ), "npr_reg_mr");

	/* Its peer hands CQ and QP to the library, and goes on as with verbs. */
	check_pointer(ctx = npr_open(peer.verbs, 0), "npr_open");
	check_pointer(cq = npr_attach_cq(ctx, peer.cq), "npr_attach_cq");
	check_pointer(qp = npr_attach_qp(cq, peer.qp, NULL), "npr_attach_qp");
	local = ibv_reg_mr(peer.pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE);
	check_pointer(local, "ibv_reg_mr");
	struct ibv_sge sge = {(uintptr_t)buffer, sizeof(buffer), local->lkey};
	struct ibv_send_wr *bad, wr = {
		.wr_id = 1, .sg_list = &sge, .num_sge = 1,
		.opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = {.remote_addr = (uintptr_t)memory + size / 2, .rkey = remote->rkey},
	};
	check(npr_post_send(qp, &wr, &bad), "npr_post_send");

	/* The library works when it is polled, as long as anything is under way. */
	struct ibv_wc wc;
	int n;
	while ((n = npr_poll_cq(cq, 1, &wc)) == 0)
		;
	check(n < 0 ? n : 0, "npr_poll_cq");
	printf("READ: %s; the first byte is '%c'\n", ibv_wc_status_str(wc.status), buffer[0]);

	check(npr_detach_qp(qp), "npr_detach_qp");
	check(npr_detach_cq(cq), "npr_detach_cq");
	check(npr_close(ctx), "npr_close");
	check(ibv_dereg_mr(local), "ibv_dereg_mr");
	check(npr_dereg_mr(remote), "npr_dereg_mr");
	close_end(&peer);
	close_end(&owner);
	return wc.status != IBV_WC_SUCCESS || memcmp(buffer, memory + size / 2, sizeof(buffer));
}
