// SPDX-License-Identifier: GPL-2.0
/*
 * The local side of work requests: buffers in unpinned regions, under holds of
 * the process itself, with keys that nobody else can use.
 */
#include <sys/resource.h>
#include <sys/wait.h>

#include "np_harness.h"

FIXTURE(local) {
	struct np_pair pair;
	struct ibv_mr *remote;	/* the peer's buffer, pinned */
};

FIXTURE_SETUP(local)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, np_pair_open(pair));
	ASSERT_EQ(0, np_pair_register(pair, NP_RIGHTS));
	self->remote = ibv_reg_mr(pair->peer.pd, pair->peer.buf, NP_BUF_LEN, NP_RIGHTS);
	ASSERT_NE(NULL, self->remote);
}

FIXTURE_TEARDOWN_PARENT(local)
{
	NP_CHECK_USAGE(&self->pair.before);
}

/* A hold on [@off, @off + @len) of the pair's region. */
static int64_t hold(struct np_pair *pair, size_t off, size_t len, uint32_t flags,
		    struct rdma_np_hold_info *info)
{
	return np_hold(pair->mr, (uintptr_t)pair->data + off, len, flags, info);
}

/* One work request of @end with a buffer at @addr under @lkey: ibv_wc_status or -errno. */
static int post_send(struct np_end *end, enum ibv_wr_opcode op, uint64_t addr, size_t len,
		     uint32_t lkey, uint64_t remote_addr, uint32_t rkey)
{
	struct ibv_sge sge = { .addr = addr, .length = len, .lkey = lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = op,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = remote_addr, .rkey = rkey },
	}, *bad;
	struct ibv_wc wc;
	int ret = ibv_post_send(end->qp, &wr, &bad);

	return ret ? -ret : np_poll(end, &wc);
}

static int post_recv(struct np_end *end, uint64_t addr, size_t len, uint32_t lkey)
{
	struct ibv_sge sge = { .addr = addr, .length = len, .lkey = lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	return -ibv_post_recv(end->qp, &wr, &bad);
}

/* --- what is refused ---------------------------------------------------------------- */

TEST_F(local, regions_own_lkey_is_no_key)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, post_recv(&pair->peer, (uintptr_t)pair->peer.buf, PAGE, pair->peer.mr->lkey));
	EXPECT_EQ(IBV_WC_LOC_PROT_ERR,
		  post_send(&pair->owner, IBV_WR_SEND, (uintptr_t)pair->data, PAGE,
			    pair->mr->lkey, 0, 0));
}

TEST_F(local, what_cannot_be_held_is_refused)
{
	struct np_pair *pair = &self->pair;
	uint64_t start = (uintptr_t)pair->data;
	struct rdma_np_hold_info info;
	struct ibv_mr *mr;
	long before = np_pinned();

	EXPECT_EQ(-EINVAL, np_hold(pair->mr, start, 0, 0, &info));
	EXPECT_EQ(-EINVAL, np_hold(pair->mr, start, PAGE, RDMA_NP_FAULT_HOLD, &info));
	EXPECT_EQ(-EINVAL, np_hold(pair->mr, start, PAGE, 1U << 8, &info));
	EXPECT_EQ(-EINVAL, np_hold(pair->owner.mr, (uintptr_t)pair->owner.buf, 8, 0, &info));
	EXPECT_EQ(-ERANGE, np_hold(pair->mr, start - 1, PAGE, 0, &info));
	EXPECT_EQ(-ERANGE, np_hold(pair->mr, start, NP_DATA_LEN + 1, 0, &info));
	EXPECT_EQ(-ERANGE, np_hold(pair->mr, start + NP_DATA_LEN, 1, 0, &info));
	EXPECT_EQ(-ERANGE, np_hold(pair->mr, start + PAGE, UINT64_MAX, 0, &info));
	EXPECT_EQ(-ERANGE, np_hold(pair->mr, UINT64_MAX, 2, 0, &info));

	mr = ibv_reg_mr(pair->owner.pd, pair->data, PAGE, NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	EXPECT_EQ(-EPERM, np_hold(mr, start, PAGE, RDMA_NP_FAULT_WRITE, &info));
	EXPECT_EQ(0, ibv_dereg_mr(mr));

	ASSERT_EQ(0, mprotect(pair->data, PAGE, PROT_READ));
	EXPECT_EQ(-EFAULT, np_hold(pair->mr, start, PAGE, RDMA_NP_FAULT_WRITE, &info));
	ASSERT_EQ(0, munmap(pair->data + PAGE, PAGE));
	EXPECT_EQ(-EFAULT, np_hold(pair->mr, start, 2 * PAGE, 0, &info));
	EXPECT_EQ(before, np_pinned());
	EXPECT_EQ(-ENOENT, np_hold_free(pair->owner.ctx, 12345));
}

/* It would be charged to the owner, against the limit of somebody else. */
TEST_F(local, hold_is_for_the_owners_process_only)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_hold_info info;
	int status;
	pid_t pid;

	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid)
		_exit(hold(pair, 0, PAGE, 0, &info) == -EPERM ? 0 : 1);
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	EXPECT_EQ(0, status);
	EXPECT_LE(0, hold(pair, 0, PAGE, 0, &info));
}

TEST_F(local, key_of_a_hold_has_no_remote_rights)
{
	for (unsigned int i = 0; i < 4; i++) {
		struct np_pair *pair = &self->pair;
		struct rdma_np_hold_info info;
		int64_t id;

		id = hold(pair, 0, PAGE, i & 1 ? RDMA_NP_FAULT_WRITE : 0, &info);
		ASSERT_LE(0, id);
		EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
			  i & 2 ? np_read(&pair->peer, 0, 8, info.addr, info.lkey) :
				  np_write(&pair->peer, 0, 8, info.addr, info.lkey));
		EXPECT_EQ(0, np_hold_free(pair->owner.ctx, id));
		ASSERT_EQ(0, np_reconnect(&pair->owner, &pair->peer));
	}
}

TEST_F(local, source_key_is_no_sink)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_hold_info info;

	ASSERT_LE(0, hold(pair, 0, PAGE, 0, &info));
	EXPECT_EQ(IBV_WC_LOC_PROT_ERR,
		  post_send(&pair->owner, IBV_WR_RDMA_READ, info.addr, PAGE, info.lkey,
			    (uintptr_t)pair->peer.buf, self->remote->rkey));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 0));
}

TEST_F(local, key_works_in_the_regions_pd_only)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_hold_info info;
	struct np_end other;

	ASSERT_EQ(0, np_open(&other, NP_OWNER_DEV, PAGE));
	ASSERT_LE(0, hold(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, &info));
	ASSERT_EQ(0, np_reconnect(&other, &pair->peer));
	ASSERT_EQ(0, post_recv(&pair->peer, (uintptr_t)pair->peer.buf, PAGE, pair->peer.mr->lkey));
	EXPECT_EQ(IBV_WC_LOC_PROT_ERR, post_send(&other, IBV_WR_SEND, info.addr, PAGE, info.lkey,
						 0, 0));
}

/* --- what works ------------------------------------------------------------------------ */

TEST_F(local, send_and_receive_in_unpinned_memory)
{
	struct np_pair *pair = &self->pair;
	size_t len = 3 * PAGE + 17;
	struct rdma_np_hold_info info;
	struct ibv_wc wc;
	int64_t id;

	for (int i = 0; i < 20; i++) {
		ASSERT_EQ(0, np_page_out(pair->data + 5 * PAGE, 4 * PAGE));
		id = hold(pair, 5 * PAGE + 11, len, 0, &info);
		ASSERT_LE(0, id);
		memset(pair->peer.buf, 0, len);
		ASSERT_EQ(0, post_recv(&pair->peer, (uintptr_t)pair->peer.buf, len,
				       pair->peer.mr->lkey));
		ASSERT_EQ(0, post_send(&pair->owner, IBV_WR_SEND, info.addr, len, info.lkey, 0, 0));
		ASSERT_EQ(0, np_poll(&pair->peer, &wc));
		EXPECT_EQ(len, wc.byte_len);
		EXPECT_EQ(0, memcmp(pair->peer.buf, pair->data + 5 * PAGE + 11, len));
		EXPECT_EQ(0, np_hold_free(pair->owner.ctx, id));

		np_fill(pair->peer.buf, 4 * PAGE, 1000 + i);
		ASSERT_EQ(0, np_page_out(pair->data + 5 * PAGE, 4 * PAGE));
		id = hold(pair, 5 * PAGE + 11, len, RDMA_NP_FAULT_WRITE, &info);
		ASSERT_LE(0, id);
		ASSERT_EQ(0, post_recv(&pair->owner, info.addr, len, info.lkey));
		ASSERT_EQ(0, post_send(&pair->peer, IBV_WR_SEND, (uintptr_t)pair->peer.buf, len,
				       pair->peer.mr->lkey, 0, 0));
		ASSERT_EQ(0, np_poll(&pair->owner, &wc));
		EXPECT_EQ(len, wc.byte_len);
		EXPECT_EQ(0, np_hold_free(pair->owner.ctx, id));
		/* It is not lost when the page goes at once. */
		ASSERT_EQ(0, np_page_out(pair->data + 5 * PAGE, 4 * PAGE));
		EXPECT_EQ(0, memcmp(pair->peer.buf, pair->data + 5 * PAGE + 11, len));
	}
}

TEST_F(local, every_verb_takes_them)
{
	struct np_pair *pair = &self->pair;
	uint64_t remote = (uintptr_t)pair->peer.buf;
	uint32_t rkey = self->remote->rkey;
	struct rdma_np_hold_info info;

	ASSERT_LE(0, hold(pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE, &info));
	ASSERT_EQ(0, post_send(&pair->owner, IBV_WR_RDMA_WRITE, info.addr, 4 * PAGE, info.lkey,
			       remote, rkey));
	EXPECT_EQ(0, memcmp(pair->data, pair->peer.buf, 4 * PAGE));
	np_fill(pair->peer.buf, 4 * PAGE, 77);
	ASSERT_EQ(0, post_send(&pair->owner, IBV_WR_RDMA_READ, info.addr, 4 * PAGE, info.lkey,
			       remote, rkey));
	EXPECT_EQ(-1, np_differs(pair->data, 4 * PAGE, 77));
}

TEST_F(local, held_page_stays_under_whatever_its_owner_does)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_hold_info info;
	long before = np_pinned();
	int64_t id;

	id = hold(pair, 0, 8 * PAGE, RDMA_NP_FAULT_WRITE, &info);
	ASSERT_LE(0, id);
	EXPECT_EQ(before + 8, np_pinned());
	/* As of a pinned region: what is there now is something else. */
	ASSERT_EQ(0, madvise(pair->data, PAGE, MADV_DONTNEED));
	memset(pair->data, 0, PAGE);
	madvise(pair->data, NP_DATA_LEN, MADV_PAGEOUT);
	ASSERT_EQ(0, post_recv(&pair->peer, (uintptr_t)pair->peer.buf, 8 * PAGE,
			       pair->peer.mr->lkey));
	ASSERT_EQ(0, post_send(&pair->owner, IBV_WR_SEND, info.addr, 8 * PAGE, info.lkey, 0, 0));
	for (int i = 0; i < 8; i++) {
		EXPECT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, i));
	}
	EXPECT_EQ(0, np_hold_free(pair->owner.ctx, id));
	EXPECT_EQ(before, np_pinned());
	/* A new hold is of what is there now. */
	ASSERT_LE(0, hold(pair, 0, PAGE, 0, &info));
	ASSERT_EQ(0, post_recv(&pair->peer, (uintptr_t)pair->peer.buf, PAGE, pair->peer.mr->lkey));
	ASSERT_EQ(0, post_send(&pair->owner, IBV_WR_SEND, info.addr, PAGE, info.lkey, 0, 0));
	EXPECT_TRUE(np_all(pair->peer.buf, PAGE, 0));
}

/* --- how it ends -------------------------------------------------------------------------- */

TEST_F(local, keys_die_with_the_region_and_holds_may_be_freed_later)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_hold_info info, sink;
	long before = np_pinned();
	int64_t a, b;

	a = hold(pair, 0, 4 * PAGE, 0, &info);
	b = hold(pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE, &sink);
	ASSERT_LE(0, a);
	ASSERT_LE(0, b);
	EXPECT_EQ(before + 8, np_pinned());
	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	EXPECT_EQ(before, np_pinned());
	ASSERT_EQ(0, post_recv(&pair->peer, (uintptr_t)pair->peer.buf, PAGE, pair->peer.mr->lkey));
	EXPECT_EQ(IBV_WC_LOC_PROT_ERR, post_send(&pair->owner, IBV_WR_SEND, info.addr, PAGE,
						 info.lkey, 0, 0));
	EXPECT_EQ(0, np_hold_free(pair->owner.ctx, a));
	EXPECT_EQ(-ENOENT, np_hold_free(pair->owner.ctx, a));
	/* The other one goes with the process. */
}

TEST_F(local, held_pages_count_as_locked_ones)
{
	/* Queues and pinned buffers count, too. */
	const long pinned = np_status_kb("VmPin") / 4;
	const struct rlimit limit = { (pinned + 64) * PAGE, (pinned + 64) * PAGE };
	struct np_pair *pair = &self->pair;
	struct rdma_np_hold_info info;
	int64_t id;

	ASSERT_EQ(0, setrlimit(RLIMIT_MEMLOCK, &limit));
	/* Root may lock what it likes. */
	id = hold(pair, 0, 65 * PAGE, 0, &info);
	ASSERT_LE(0, id);
	EXPECT_EQ(0, np_hold_free(pair->owner.ctx, id));
	ASSERT_EQ(0, setresuid(65534, 65534, 65534));
	EXPECT_EQ(-ENOMEM, hold(pair, 0, 65 * PAGE, 0, &info));
	EXPECT_EQ(-ENOMEM, hold(pair, PAGE - 1, 63 * PAGE + 2, 0, &info));
	for (int i = 0; i < 8; i++) {
		id = hold(pair, 0, 64 * PAGE, 0, &info);
		ASSERT_LE(0, id);
		EXPECT_EQ((pinned + 64) * 4, np_status_kb("VmPin"));
		EXPECT_EQ(-ENOMEM, hold(pair, 0, 1, 0, &info));
		EXPECT_EQ(0, np_hold_free(pair->owner.ctx, id));
		EXPECT_EQ(pinned * 4, np_status_kb("VmPin"));
	}
}

TEST_HARNESS_MAIN
