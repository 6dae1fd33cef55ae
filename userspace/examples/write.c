/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* WRITEs to memory of a peer that is paged out, many at once. */
#include "ends.h"

#include <nprdma/nprdma.h>

enum { CHUNK = 4096, CHUNKS = 256, DEPTH = 32, SIZE = CHUNK * CHUNKS };

int main(int argc, char **argv)
{
	static char buffer[CHUNK];
	struct end owner, peer;
	struct ibv_mr *remote, *local;
	struct npr_context *ctx;
	struct npr_cq *cq;
	struct npr_qp *qp;
	int posted = 0, done = 0, failed = 0;

	open_ends(argc, argv, &owner, &peer);
	char *memory = map_memory(SIZE, 'x');
	remote = npr_reg_mr(owner.pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	check_pointer(remote, "npr_reg_mr");

	/* As no two of them overlap, a WRITE need not wait until the one before is proven. */
	struct npr_qp_attr attr = {.flags = NPR_QP_RELAXED_ORDER, .max_send_wr = DEPTH};
	check_pointer(ctx = npr_open(peer.verbs, 0), "npr_open");
	check_pointer(cq = npr_attach_cq(ctx, peer.cq), "npr_attach_cq");
	check_pointer(qp = npr_attach_qp(cq, peer.qp, &attr), "npr_attach_qp");
	check_pointer(local = ibv_reg_mr(peer.pd, buffer, CHUNK, 0), "ibv_reg_mr");
	memset(buffer, 'y', CHUNK);
	struct ibv_sge sge = {(uintptr_t)buffer, CHUNK, local->lkey};
	while (done < CHUNKS) {
		struct ibv_send_wr *bad, wr = {
			.sg_list = &sge, .num_sge = 1,
			.opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
		};
		for (; posted < CHUNKS && posted - done < DEPTH; posted++) {
			wr.wr_id = (uint64_t)posted;
			wr.wr.rdma.remote_addr = (uintptr_t)memory + (size_t)posted * CHUNK;
			wr.wr.rdma.rkey = remote->rkey;
			check(npr_post_send(qp, &wr, &bad), "npr_post_send");
		}
		struct ibv_wc wc[DEPTH];
		int n = npr_poll_cq(cq, DEPTH, wc);
		check(n < 0 ? n : 0, "npr_poll_cq");
		for (int i = 0; i < n; i++)
			failed += wc[i].status != IBV_WC_SUCCESS;
		done += n;
	}
	for (int i = 0; i < CHUNKS; i++)
		failed += memcmp(memory + (size_t)i * CHUNK, buffer, CHUNK) != 0;
	printf("%d WRITEs, %d failures\n", done, failed);

	check(npr_detach_qp(qp), "npr_detach_qp");
	check(npr_detach_cq(cq), "npr_detach_cq");
	check(npr_close(ctx), "npr_close");
	check(ibv_dereg_mr(local), "ibv_dereg_mr");
	check(npr_dereg_mr(remote), "npr_dereg_mr");
	close_end(&peer);
	close_end(&owner);
	return failed != 0;
}
