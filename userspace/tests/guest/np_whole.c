// SPDX-License-Identifier: GPL-2.0
/*
 * Regions of a whole address space: one key for all memory that a process has, and for what
 * it maps later. The kernel makes their parts where a peer, or the process itself, uses them.
 */
#include <nprdma/nprdma.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "np_harness.h"

#define PART		(1UL << 30)
#define BOUNDARY	(4096 * PART)	/* where nothing else is mapped */
#define MAX_PARTS "/sys/module/ib_core/parameters/nprdma_max_parts"

FIXTURE(whole) {
	struct np_pair pair;
	struct npr_context *ctx;
	struct npr_cq *cq;
	struct npr_qp *qp;
	struct ibv_mr *own;	/* the peer's, of its address space, which is the same */
	uint8_t *across;	/* 8 pages on either side of a boundary of parts */
};

FIXTURE_SETUP(whole)
{
	struct np_pair *pair = &self->pair;
	struct np_end *peer = &pair->peer;

	ASSERT_EQ(0, np_pair_open(pair));
	ASSERT_EQ(0, np_set_fault_around(NP_FAULT_AROUND));
	ASSERT_EQ(0, np_write_text(MAX_PARTS, "4096"));
	pair->data = np_map(NP_DATA_LEN);
	ASSERT_NE(NULL, pair->data);
	self->across = mmap((void *)(BOUNDARY - 8 * PAGE), 16 * PAGE, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	ASSERT_EQ((void *)(BOUNDARY - 8 * PAGE), self->across);
	for (size_t i = 0; i < 16; i++)
		np_fill(self->across + i * PAGE, PAGE, 100 + i);
	for (size_t i = 0; i < 16; i++)
		np_fill(pair->data + i * PAGE, PAGE, i);
	pair->mr = ibv_reg_mr(pair->owner.pd, NULL, SIZE_MAX, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, pair->mr) TH_LOG("%s", strerror(errno));
	self->ctx = npr_open(peer->ctx, 0);
	ASSERT_NE(NULL, self->ctx) TH_LOG("%s", strerror(errno));
	self->cq = npr_attach_cq(self->ctx, peer->cq);
	ASSERT_NE(NULL, self->cq) TH_LOG("%s", strerror(errno));
	self->qp = npr_attach_qp(self->cq, peer->qp, NULL);
	ASSERT_NE(NULL, self->qp) TH_LOG("%s", strerror(errno));
	self->own = npr_reg_mr(peer->pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE);
	ASSERT_NE(NULL, self->own) TH_LOG("%s", strerror(errno));
}

FIXTURE_TEARDOWN_PARENT(whole)
{
	NP_CHECK_USAGE(&self->pair.before);
}

static int await(struct npr_cq *cq, struct ibv_wc *wc)
{
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;

	do {
		int ret = npr_poll_cq(cq, 1, wc);

		if (ret)
			return ret < 0 ? ret : (int)wc->status;
	} while (np_now_ms() < deadline);
	return -ETIMEDOUT;
}

/* ibv_wc_status or -errno. */
static int run(FIXTURE_DATA(whole) *self, enum ibv_wr_opcode op, void *here, uint32_t lkey, const void *there,
	       size_t len)
{
	struct ibv_sge sge = { .addr = (uintptr_t)here, .length = len, .lkey = lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = op,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = (uintptr_t)there, .rkey = self->pair.mr->rkey },
	}, *bad;
	struct ibv_wc wc;
	int ret = npr_post_send(self->qp, &wr, &bad);

	return ret ? ret : await(self->cq, &wc);
}

static int run_pinned(FIXTURE_DATA(whole) *self, enum ibv_wr_opcode op, const void *there, size_t len)
{
	return run(self, op, self->pair.peer.buf, self->pair.peer.mr->lkey, there, len);
}

TEST_F(whole, reads_and_writes_what_is_mapped)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_mr_info info;

	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_EQ(0, info.base);
	EXPECT_EQ(UINT64_MAX, info.length);
	EXPECT_EQ(0, info.resident_pages);
	ASSERT_EQ(0, run_pinned(self, IBV_WR_RDMA_READ, pair->data, 16 * PAGE));
	for (size_t i = 0; i < 16; i++) {
		ASSERT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, i));
	}
	np_fill(pair->peer.buf, PAGE, 77);
	ASSERT_EQ(0, run_pinned(self, IBV_WR_RDMA_WRITE, pair->data + 3 * PAGE, PAGE));
	EXPECT_EQ(-1, np_differs(pair->data + 3 * PAGE, PAGE, 77));
	EXPECT_EQ(-1, np_differs(pair->data + 4 * PAGE, PAGE, 4));
	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_LE(16, info.resident_pages);
}

TEST_F(whole, what_is_mapped_later_is_there)
{
	struct np_pair *pair = &self->pair;
	uint8_t *later = mmap((void *)(BOUNDARY + 5 * PART), 2 * PAGE, PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

	ASSERT_EQ((void *)(BOUNDARY + 5 * PART), later);
	np_fill(later, PAGE, 5);
	ASSERT_EQ(0, run_pinned(self, IBV_WR_RDMA_READ, later, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 5));
	/* And again what is mapped there instead. */
	ASSERT_EQ(0, munmap(later, 2 * PAGE));
	ASSERT_EQ(later, mmap(later, PAGE, PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
	np_fill(later, PAGE, 6);
	ASSERT_EQ(0, run_pinned(self, IBV_WR_RDMA_READ, later, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 6));
}

TEST_F(whole, requests_across_parts_are_right_while_pages_go)
{
	struct np_pair *pair = &self->pair;

	for (int round = 0; round < 20; round++) {
		ASSERT_LE(0, madvise(self->across, 16 * PAGE, MADV_PAGEOUT));
		ASSERT_EQ(0, run_pinned(self, IBV_WR_RDMA_READ, self->across, 16 * PAGE));
		for (size_t i = 0; i < 16; i++) {
			ASSERT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, 100 + i + 16 * round));
			np_fill(pair->peer.buf + i * PAGE, PAGE, 116 + i + 16 * round);
		}
		ASSERT_LE(0, madvise(self->across, 16 * PAGE, MADV_PAGEOUT));
		ASSERT_EQ(0, run_pinned(self, IBV_WR_RDMA_WRITE, self->across, 16 * PAGE));
		for (size_t i = 0; i < 16; i++) {
			ASSERT_EQ(-1, np_differs(self->across + i * PAGE, PAGE, 116 + i + 16 * round));
		}
	}
}

TEST_F(whole, immediate_across_parts_is_refused)
{
	EXPECT_EQ(IBV_WC_REM_INV_REQ_ERR,
		  run_pinned(self, IBV_WR_RDMA_WRITE_WITH_IMM, (void *)(BOUNDARY - 8), 16));
}

TEST_F(whole, where_nothing_is_mapped_is_an_access_error)
{
	struct rdma_np_region_info info;

	EXPECT_EQ(-EFAULT, np_resolve_at(&self->pair.peer, self->pair.mr->rkey, 0, &info));
	EXPECT_EQ(-EFAULT, np_resolve(&self->pair.peer, self->pair.mr->rkey, &info));
	EXPECT_EQ(-EFAULT, np_resolve_at(&self->pair.peer, self->pair.mr->rkey, UINT64_MAX, &info));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, run_pinned(self, IBV_WR_RDMA_READ, (void *)(BOUNDARY + 7 * PART), 8));
}

TEST_F(whole, what_may_not_be_read_is_an_access_error)
{
	struct rdma_np_region_info info;
	void *none = mmap((void *)(BOUNDARY + 9 * PART), PAGE, PROT_NONE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

	ASSERT_EQ((void *)(BOUNDARY + 9 * PART), none);
	EXPECT_EQ(-EFAULT, np_resolve_at(&self->pair.peer, self->pair.mr->rkey, (uintptr_t)none, &info));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, run_pinned(self, IBV_WR_RDMA_READ, none, 8));
}

TEST_F(whole, write_to_what_may_only_be_read_is_an_access_error)
{
	ASSERT_EQ(0, mprotect(self->across, PAGE, PROT_READ));
	EXPECT_EQ(0, run_pinned(self, IBV_WR_RDMA_READ, self->across, PAGE));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, run_pinned(self, IBV_WR_RDMA_WRITE, self->across, PAGE));
	EXPECT_EQ(-1, np_differs(self->across, PAGE, 100));
}

TEST_F(whole, parts_are_what_resolve_says)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_region_info low, high;
	struct npr_region_attr attr;

	ASSERT_EQ(0, np_resolve_at(&pair->peer, pair->mr->rkey, BOUNDARY - 1, &low));
	ASSERT_EQ(0, np_resolve_at(&pair->peer, pair->mr->rkey, BOUNDARY, &high));
	EXPECT_EQ(30, low.part_shift);
	EXPECT_EQ(BOUNDARY - PART, low.base);
	EXPECT_EQ(BOUNDARY, high.base);
	EXPECT_EQ(PART, high.length);
	EXPECT_NE(low.region_id, high.region_id);
	/* Of both together, for who uses the library. */
	ASSERT_EQ(0, npr_resolve_range(self->qp, pair->mr->rkey, BOUNDARY - 1, 2, &attr));
	EXPECT_EQ(1, attr.unpinned);
	EXPECT_EQ(low.region_id, attr.id);
	EXPECT_EQ(BOUNDARY - PART, attr.base);
	EXPECT_EQ(2 * PART, attr.length);
	EXPECT_EQ(-EFAULT, npr_resolve_range(self->qp, pair->mr->rkey, BOUNDARY, PART + 1, &attr));
	EXPECT_EQ(-EFAULT, npr_resolve(self->qp, pair->mr->rkey, &attr));
	/* As far as the first part goes, which is all that is asked for at once. */
	EXPECT_EQ(2 * PAGE, npr_prefetch(self->qp, pair->mr->rkey, BOUNDARY - 2 * PAGE, 4 * PAGE,
					 IBV_ACCESS_REMOTE_READ));
}

TEST_F(whole, parts_of_a_process_are_bounded)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_region_info info;

	ASSERT_EQ(0, np_write_text(MAX_PARTS, "1"));
	ASSERT_EQ(0, np_resolve_at(&pair->peer, pair->mr->rkey, BOUNDARY, &info));
	/* It hears "busy" until there may be more. */
	ASSERT_EQ(0, np_write_text(MAX_PARTS, "2"));
	EXPECT_EQ(0, np_resolve_at(&pair->peer, pair->mr->rkey, BOUNDARY - 1, &info));
	ASSERT_EQ(0, np_write_text(MAX_PARTS, "4096"));
}

/* The local key is for any address as well, also for a buffer that is in two parts. */
TEST_F(whole, local_buffers_are_anywhere)
{
	struct np_pair *pair = &self->pair;

	for (int round = 0; round < 8; round++) {
		memset(self->across, round, 16 * PAGE);
		ASSERT_LE(0, madvise(self->across, 16 * PAGE, MADV_PAGEOUT));
		ASSERT_EQ(0, run(self, IBV_WR_RDMA_READ, self->across, self->own->lkey, pair->data, 16 * PAGE));
		for (size_t i = 0; i < 16; i++) {
			ASSERT_EQ(-1, np_differs(self->across + i * PAGE, PAGE, i));
		}
		memset(self->across, round, 16 * PAGE);
		ASSERT_EQ(0, run(self, IBV_WR_RDMA_WRITE, self->across + PAGE, self->own->lkey, pair->data + 20 * PAGE,
				 2 * PAGE));
		EXPECT_EQ(0, memcmp(self->across, pair->data + 20 * PAGE, 2 * PAGE));
	}
	EXPECT_EQ(-EFAULT, run(self, IBV_WR_RDMA_READ, (void *)PAGE, self->own->lkey, pair->data, 8));
}

TEST_F(whole, advice_brings_pages_of_parts)
{
	struct np_pair *pair = &self->pair;
	struct ibv_sge sge = { (uintptr_t)self->across, 16 * PAGE, pair->mr->lkey };
	struct rdma_np_mr_info info;

	ASSERT_EQ(0, ibv_advise_mr(pair->owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH,
				   &sge, 1));
	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_EQ(16, info.writable_pages);
	sge.addr += 8 * PAGE;
	EXPECT_EQ(EFAULT, ibv_advise_mr(pair->owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH,
					&sge, 1));
	sge.addr = 0;
	EXPECT_EQ(EFAULT, ibv_advise_mr(pair->owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1));
	EXPECT_EQ(0, ibv_advise_mr(pair->owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, 0, &sge, 1));
}

/* Peers find it gone, wherever they used it; and the key may name something else. */
TEST_F(whole, end_of_the_region_ends_all_parts)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, run_pinned(self, IBV_WR_RDMA_READ, self->across, 16 * PAGE));
	ASSERT_EQ(0, run_pinned(self, IBV_WR_RDMA_READ, pair->data, PAGE));
	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	pair->mr = ibv_reg_mr(pair->owner.pd, NULL, SIZE_MAX, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, pair->mr);
	ASSERT_EQ(0, run_pinned(self, IBV_WR_RDMA_READ, self->across, 16 * PAGE));
	for (size_t i = 0; i < 16; i++) {
		EXPECT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, 100 + i));
	}
	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, run_pinned(self, IBV_WR_RDMA_READ, pair->data, PAGE));
}

/* It is the parent's, of whose memory the child's is a copy. */
TEST_F(whole, fork_leaves_it_to_the_parent)
{
	struct np_pair *pair = &self->pair;
	int status;
	pid_t pid;

	ASSERT_EQ(0, run_pinned(self, IBV_WR_RDMA_READ, pair->data, PAGE));
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid) {
		memset(pair->data, 1, 16 * PAGE);
		memset(self->across, 1, 16 * PAGE);
		_exit(0);
	}
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	EXPECT_EQ(0, status);
	ASSERT_EQ(0, run_pinned(self, IBV_WR_RDMA_READ, pair->data, 16 * PAGE));
	for (size_t i = 0; i < 16; i++) {
		EXPECT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, i));
	}
	np_fill(pair->peer.buf, PAGE, 42);
	ASSERT_EQ(0, run_pinned(self, IBV_WR_RDMA_WRITE, pair->data, PAGE));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 42));
}

TEST_F(whole, is_refused_where_its_addresses_would_be_others)
{
	errno = 0;
	EXPECT_EQ(NULL, ibv_reg_mr_iova(self->pair.owner.pd, NULL, SIZE_MAX, PAGE, NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(EINVAL, errno);
	errno = 0;
	EXPECT_EQ(NULL, ibv_reg_mr(self->pair.owner.pd, NULL, SIZE_MAX - 1, NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(EINVAL, errno);
}

TEST_HARNESS_MAIN
