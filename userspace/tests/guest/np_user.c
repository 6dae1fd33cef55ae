// SPDX-License-Identifier: GPL-2.0
/*
 * With libnprdma: an application that uses the rkey it was told, on memory whose
 * content is the worst case: equal to the signature, as a whole or in part. I6: it
 * costs time and is never an error, never lost and never a livelock.
 */
#include <nprdma/nprdma.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "np_harness.h"

/* Without leases a buffer is pinned for its work request alone, and can be paged out after it. */
#define LEASES "/sys/module/ib_core/parameters/nprdma_lease_percent"

FIXTURE(library) {
	struct np_pair pair;
	struct npr_context *ctx;
	struct npr_cq *cq;
	struct npr_qp *qp;
};

FIXTURE_SETUP(library)
{
	struct np_pair *pair = &self->pair;
	struct np_end *peer = &pair->peer;

	ASSERT_EQ(0, np_pair_open(pair));
	/* As it is outside of tests. */
	ASSERT_EQ(0, np_set_fault_around(NP_FAULT_AROUND));
	ASSERT_EQ(0, np_write_text(LEASES, "25"));
	ASSERT_EQ(0, np_pair_register(pair, NP_RIGHTS));
	/* For the signature only; the library resolves for itself. */
	ASSERT_EQ(0, np_pair_resolve(pair));
	ASSERT_EQ(0, np_forget(peer, pair->info.region_id));
	self->ctx = npr_open(peer->ctx, 0);
	ASSERT_NE(NULL, self->ctx) TH_LOG("%s", strerror(errno));
	self->cq = npr_attach_cq(self->ctx, peer->cq);
	ASSERT_NE(NULL, self->cq) TH_LOG("%s", strerror(errno));
	self->qp = npr_attach_qp(self->cq, peer->qp, NULL);
	ASSERT_NE(NULL, self->qp) TH_LOG("%s", strerror(errno));
}

FIXTURE_TEARDOWN_PARENT(library)
{
	NP_CHECK_USAGE(&self->pair.before);
}

struct op {
	enum ibv_wr_opcode op;
	size_t at;	/* in the peer's buffer */
	size_t off;	/* in the region */
	size_t len;
};

/* Polls until @wr_id is complete: ibv_wc_status or -errno. */
static int await(struct npr_cq *cq, uint64_t wr_id, struct ibv_wc *wc)
{
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	int ret;

	do {
		ret = npr_poll_cq(cq, 1, wc);
		if (ret < 0)
			return ret;
		if (ret)
			return wc->wr_id == wr_id ? (int)wc->status : -EPROTO;
	} while (np_now_ms() < deadline);
	return -ETIMEDOUT;
}

/* Posts one operation and waits for it: ibv_wc_status or -errno. */
static int run(struct np_pair *pair, struct npr_qp *qp, struct npr_cq *cq, struct op op)
{
	struct ibv_sge sge = {
		.addr = (uintptr_t)pair->peer.buf + op.at,
		.length = op.len,
		.lkey = pair->peer.mr->lkey,
	};
	struct ibv_send_wr wr = {
		.wr_id = op.off,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = op.op,
		.send_flags = IBV_SEND_SIGNALED,
		.imm_data = op.off,
		.wr.rdma = {
			.remote_addr = (uintptr_t)pair->data + op.off,
			.rkey = pair->mr->rkey,
		},
	}, *bad;
	struct ibv_wc wc;
	int ret = npr_post_send(qp, &wr, &bad);

	return ret ? ret : await(cq, op.off, &wc);
}

/* Atomic on the 8 bytes at @off of the region; what was there comes to the buffer's start. */
static int atomic(struct np_pair *pair, struct npr_qp *qp, struct npr_cq *cq, size_t off,
		  enum ibv_wr_opcode op, uint64_t compare_add, uint64_t swap)
{
	struct ibv_sge sge = {
		.addr = (uintptr_t)pair->peer.buf,
		.length = 8,
		.lkey = pair->peer.mr->lkey,
	};
	struct ibv_send_wr wr = {
		.wr_id = off,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = op,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.atomic = {
			.remote_addr = (uintptr_t)pair->data + off,
			.compare_add = compare_add,
			.swap = swap,
			.rkey = pair->mr->rkey,
		},
	}, *bad;
	struct ibv_wc wc;
	int ret = npr_post_send(qp, &wr, &bad);

	return ret ? ret : await(cq, off, &wc);
}

#define RUN(...) run(&self->pair, self->qp, self->cq, (struct op){ __VA_ARGS__ })

static void fill_signature(struct np_pair *pair, size_t off, size_t len)
{
	const uint8_t *sig = (const uint8_t *)&pair->info.signature;

	for (size_t i = off; i < off + len; i++)
		pair->data[i] = sig[i % 8];
}

TEST_F(library, reads_right_data)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, RUN(IBV_WR_RDMA_READ, 0, 0, 64 * PAGE));
	for (size_t i = 0; i < 64; i++) {
		ASSERT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, i));
	}
}

TEST_F(library, writes_right_data)
{
	struct np_pair *pair = &self->pair;

	for (size_t i = 0; i < 64; i++)
		np_fill(pair->peer.buf + i * PAGE, PAGE, 1000 + i);
	ASSERT_EQ(0, RUN(IBV_WR_RDMA_WRITE, 0, PAGE, 64 * PAGE));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 0));
	for (size_t i = 0; i < 64; i++) {
		ASSERT_EQ(-1, np_differs(pair->data + (1 + i) * PAGE, PAGE, 1000 + i));
	}
	EXPECT_EQ(-1, np_differs(pair->data + 65 * PAGE, PAGE, 65));
}

TEST_F(library, whole_pages_of_signature_are_read_right)
{
	struct np_pair *pair = &self->pair;
	struct npr_stats stats;

	fill_signature(pair, 0, 8 * PAGE);
	for (int i = 0; i < 4; i++) {
		memset(pair->peer.buf, 0, 16 * PAGE);
		ASSERT_EQ(0, RUN(IBV_WR_RDMA_READ, 0, 0, 16 * PAGE));
		EXPECT_TRUE(np_all(pair->peer.buf, 8 * PAGE, pair->info.signature));
		for (size_t k = 8; k < 16; k++) {
			ASSERT_EQ(-1, np_differs(pair->peer.buf + k * PAGE, PAGE, k));
		}
	}
	ASSERT_EQ(0, npr_get_stats(self->qp, &stats, sizeof(stats)));
	EXPECT_LT(0, stats.false_suspicions);
}

TEST_F(library, single_words_of_signature_are_read_right)
{
	struct np_pair *pair = &self->pair;

	/* First word of a unit, a word in the middle, last of a page. */
	fill_signature(pair, 0, 8);
	fill_signature(pair, 24, 8);
	fill_signature(pair, PAGE - 8, 8);
	fill_signature(pair, 2 * PAGE + UNIT, UNIT);
	for (int i = 0; i < 4; i++) {
		memset(pair->peer.buf, 0, 4 * PAGE);
		ASSERT_EQ(0, RUN(IBV_WR_RDMA_READ, 0, 0, 4 * PAGE));
		EXPECT_EQ(0, memcmp(pair->data, pair->peer.buf, 4 * PAGE));
		memset(pair->peer.buf, 0, 8);
		ASSERT_EQ(0, RUN(IBV_WR_RDMA_READ, 0, 24, 8));
		EXPECT_TRUE(np_all(pair->peer.buf, 8, pair->info.signature));
	}
}

TEST_F(library, odd_parts_of_signature_are_read_right)
{
	struct np_pair *pair = &self->pair;
	static const struct { size_t off, len; } part[] = {
		{ 1, 1 }, { 3, 8 }, { 61, 7 }, { 63, 2 }, { PAGE - 5, 11 }, { PAGE - 1, 2 },
		{ HUGE_PAGE - 3, 70 }, { 2 * PAGE + 1, 2 * PAGE }, { 7, 5 * PAGE + 3 },
	};

	fill_signature(pair, 0, 8 * PAGE);
	fill_signature(pair, HUGE_PAGE - PAGE, 2 * PAGE);
	for (size_t i = 0; i < ARRAY_SIZE(part); i++) {
		memset(pair->peer.buf, 0, part[i].len + 2);
		ASSERT_EQ(0, RUN(IBV_WR_RDMA_READ, 1, part[i].off, part[i].len))
			TH_LOG("part %zu", i);
		EXPECT_EQ(0, memcmp(pair->data + part[i].off, pair->peer.buf + 1, part[i].len));
		EXPECT_EQ(0, pair->peer.buf[0]);
		EXPECT_EQ(0, pair->peer.buf[1 + part[i].len]);
	}
}

TEST_F(library, signature_is_written_right)
{
	struct np_pair *pair = &self->pair;
	const uint8_t *sig = (const uint8_t *)&pair->info.signature;

	for (size_t i = 0; i < 8 * PAGE; i++)
		pair->peer.buf[i] = sig[i % 8];
	ASSERT_EQ(0, RUN(IBV_WR_RDMA_WRITE, 0, 0, 4 * PAGE));
	EXPECT_TRUE(np_all(pair->data, 4 * PAGE, pair->info.signature));
	EXPECT_EQ(-1, np_differs(pair->data + 4 * PAGE, PAGE, 4));
	ASSERT_EQ(0, RUN(IBV_WR_RDMA_WRITE, 3, 4 * PAGE + 3, PAGE));
	EXPECT_EQ(0, memcmp(pair->data + 4 * PAGE + 3, pair->peer.buf + 3, PAGE));
}

static long held(struct np_pair *pair)
{
	struct rdma_np_mr_info info;

	return np_query_mr(pair->mr, &info) ? -1 : (long)info.held_pages;
}

TEST_F(library, signature_survives_pages_that_come_and_go)
{
	struct np_pair *pair = &self->pair;

	for (int i = 0; i < 30; i++) {
		ASSERT_EQ(0, madvise(pair->data, 4 * PAGE, MADV_DONTNEED));
		/* As with pinned memory, a lease is of what was there. */
		ASSERT_TRUE(np_wait_until(!held(pair)));
		if (i % 2)
			fill_signature(pair, (i % 4) * PAGE, PAGE);
		ASSERT_EQ(0, RUN(IBV_WR_RDMA_READ, 0, 0, 4 * PAGE));
		EXPECT_EQ(0, memcmp(pair->data, pair->peer.buf, 4 * PAGE));
	}
}

struct churner {
	uint8_t *data;
	atomic_bool stop;
};

/* Pages go one at a time, so that the READ that meets it has the others. */
static void *churn_thread(void *arg)
{
	struct churner *c = arg;

	for (unsigned int i = 0; !atomic_load(&c->stop); i++) {
		if (madvise(c->data + i % 4 * PAGE, PAGE, MADV_PAGEOUT))
			return "madvise";
		sched_yield();
	}
	return NULL;
}

/*
 * Each packet is fetched by itself, and in an unaligned READ it ends within a unit. An
 * HCA that overlaps READs fetches the first packet of one that waits long before the next.
 */
TEST_F(library, unaligned_reads_are_right_while_pages_come_and_go)
{
	static const size_t start[] = { PAGE - 36, PAGE - 3, 2 * PAGE - 36, 1, 2 * PAGE - 20, 63 };
	struct np_pair *pair = &self->pair;
	struct churner churner = { .data = pair->data };
	const size_t len = 2 * PAGE, reads = 8;
	uint64_t until = np_now_ms() + 3000;
	struct npr_stats stats;
	unsigned long wrong = 0;
	pthread_t thread;
	void *failed;

	ASSERT_EQ(0, pthread_create(&thread, NULL, churn_thread, &churner));
	for (int round = 0; round < 50 || np_now_ms() < until; round++) {
		struct ibv_wc wc;

		for (size_t i = 0; i < reads; i++) {
			struct ibv_sge sge = {
				.addr = (uintptr_t)pair->peer.buf + i * len,
				.length = len,
				.lkey = pair->peer.mr->lkey,
			};
			struct ibv_send_wr wr = {
				.wr_id = i,
				.sg_list = &sge,
				.num_sge = 1,
				.opcode = IBV_WR_RDMA_READ,
				.send_flags = i == reads - 1 ? IBV_SEND_SIGNALED : 0,
				.wr.rdma = {
					.remote_addr = (uintptr_t)pair->data +
						       start[(round + i) % ARRAY_SIZE(start)],
					.rkey = pair->mr->rkey,
				},
			}, *bad;

			memset(pair->peer.buf + i * len, 0xff, len);
			ASSERT_EQ(0, npr_post_send(self->qp, &wr, &bad));
		}
		ASSERT_EQ(0, await(self->cq, reads - 1, &wc));
		for (size_t i = 0; i < reads; i++)
			wrong += memcmp(pair->data + start[(round + i) % ARRAY_SIZE(start)],
					pair->peer.buf + i * len, len) != 0;
	}
	atomic_store(&churner.stop, true);
	ASSERT_EQ(0, pthread_join(thread, &failed));
	EXPECT_EQ(NULL, failed);
	EXPECT_EQ(0, wrong);
	ASSERT_EQ(0, npr_get_stats(self->qp, &stats, sizeof(stats)));
	EXPECT_LT(0, stats.suspicious_pages);
	TH_LOG("%lu READs, %lu suspicious pages", (unsigned long)stats.reads,
	       (unsigned long)stats.suspicious_pages);
}

/* The result is the test: done twice, or on the scratch page, it is another one. */
TEST_F(library, atomics_are_done_once_whatever_becomes_of_their_pages)
{
	struct np_pair *pair = &self->pair;
	const uint64_t *result = (uint64_t *)pair->peer.buf;
	uint64_t want[8] = {};

	memset(pair->data, 0, 8 * PAGE);
	for (int i = 0; i < 400; i++) {
		size_t off = i % 8 * (PAGE + 8);
		uint64_t *at = &want[i % 8];

		if (i % 3 == 0)
			ASSERT_EQ(0, madvise(pair->data, 8 * PAGE, MADV_PAGEOUT));
		if (i % 16 < 8) {
			ASSERT_EQ(0, atomic(pair, self->qp, self->cq, off,
					    IBV_WR_ATOMIC_FETCH_AND_ADD, i + 1, 0));
			ASSERT_EQ(*at, *result);
			*at += i + 1;
		} else {
			/* Every other one fails to compare. */
			ASSERT_EQ(0, atomic(pair, self->qp, self->cq, off,
					    IBV_WR_ATOMIC_CMP_AND_SWP, *at + i % 2, i));
			ASSERT_EQ(*at, *result);
			if (i % 2 == 0)
				*at = i;
		}
	}
	for (int i = 0; i < 8; i++) {
		EXPECT_EQ(want[i], *(uint64_t *)(pair->data + i * (PAGE + 8)));
	}
}

TEST_F(library, atomic_is_refused_as_on_pinned_memory)
{
	struct np_pair *pair = &self->pair;

	EXPECT_EQ(IBV_WC_REM_INV_REQ_ERR, atomic(pair, self->qp, self->cq, 4,
						 IBV_WR_ATOMIC_FETCH_AND_ADD, 1, 0));
}

TEST_F(library, write_with_immediate_is_heard_once_when_it_is_there)
{
	static const size_t lengths[] = { 0, 1, 8, PAGE, 3 * PAGE + 5, HUGE_PAGE, HUGE_PAGE + 77,
					  NP_DATA_LEN - PAGE };
	struct np_pair *pair = &self->pair;
	struct ibv_recv_wr recv = {}, *bad;

	for (size_t i = 0; i < 2 * ARRAY_SIZE(lengths); i++) {
		size_t len = lengths[i / 2], off = i * 100;
		struct ibv_wc wc;

		np_fill(pair->peer.buf, NP_DATA_LEN, 1000 + i);
		recv.wr_id = i;
		ASSERT_EQ(0, ibv_post_recv(pair->owner.qp, &recv, &bad));
		if (i % 2)
			ASSERT_EQ(0, madvise(pair->data, NP_DATA_LEN, MADV_PAGEOUT));
		ASSERT_EQ(0, RUN(IBV_WR_RDMA_WRITE_WITH_IMM, 0, off, len)) TH_LOG("length %zu", len);
		ASSERT_EQ(0, np_poll(&pair->owner, &wc));
		EXPECT_EQ(i, wc.wr_id);
		EXPECT_EQ(IBV_WC_RECV_RDMA_WITH_IMM, wc.opcode);
		EXPECT_TRUE(wc.wc_flags & IBV_WC_WITH_IMM);
		EXPECT_EQ(off, wc.imm_data);
		EXPECT_EQ(len, wc.byte_len);
		EXPECT_EQ(0, memcmp(pair->peer.buf, pair->data + off, len));
		EXPECT_EQ(0, ibv_poll_cq(pair->owner.cq, 1, &wc));
	}
}

/* --- local buffers in unpinned regions -------------------------------------------------- */

/* @len bytes at @at under @lkey, and the same of the pair's region: ibv_wc_status or -errno. */
static int run_local(struct np_pair *pair, struct npr_qp *qp, struct npr_cq *cq,
		     enum ibv_wr_opcode op, void *at, size_t len, uint32_t lkey, size_t off)
{
	struct ibv_sge sge = { .addr = (uintptr_t)at, .length = len, .lkey = lkey };
	struct ibv_send_wr wr = {
		.wr_id = off,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = op,
		.send_flags = IBV_SEND_SIGNALED,
	}, *bad;
	struct ibv_wc wc;
	int ret;

	if (op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = (uintptr_t)pair->data + off;
		wr.wr.atomic.rkey = pair->mr->rkey;
		wr.wr.atomic.compare_add = 1;
	} else if (op != IBV_WR_SEND) {
		wr.wr.rdma.remote_addr = (uintptr_t)pair->data + off;
		wr.wr.rdma.rkey = pair->mr->rkey;
	}
	ret = npr_post_send(qp, &wr, &bad);
	return ret ? ret : await(cq, off, &wc);
}

#define RUN_LOCAL(...) run_local(pair, self->qp, self->cq, __VA_ARGS__)

/* A lease pins what was there. What the owner has there by the time he posts is what goes. */
TEST_F(library, buffers_that_change_under_leases_are_used_as_they_are)
{
	struct np_pair *pair = &self->pair;
	uint8_t *here = np_map(NP_DATA_LEN);
	unsigned int leased = 0;
	struct ibv_mr *mr;
	long before;

	ASSERT_NE(NULL, here);
	/* With the region comes the memory that words are read into. */
	ASSERT_EQ(0, npr_resolve(self->qp, pair->mr->rkey, NULL));
	before = np_pinned();
	mr = npr_reg_mr(pair->peer.pd, here, NP_DATA_LEN, IBV_ACCESS_LOCAL_WRITE);
	ASSERT_NE(NULL, mr);
	for (int i = 0; i < 200; i++) {
		size_t off = i % 7 * 24, len = (i % 5) * PAGE + 100;

		np_fill(here, 6 * PAGE, 3000 + i);
		ASSERT_EQ(0, RUN_LOCAL(IBV_WR_RDMA_WRITE, here + off, len, mr->lkey, off));
		ASSERT_EQ(0, memcmp(here + off, pair->data + off, len));
		ASSERT_EQ(0, RUN_LOCAL(IBV_WR_RDMA_READ, here + 8 * PAGE + off, len, mr->lkey, off));
		ASSERT_EQ(0, memcmp(here + 8 * PAGE + off, pair->data + off, len));
		leased += np_pinned() > before;
		switch (i % 4) {
		case 0:
			ASSERT_EQ(0, madvise(here, 16 * PAGE, MADV_DONTNEED));
			break;
		case 1:
			ASSERT_EQ(here, mmap(here, 16 * PAGE, PROT_READ | PROT_WRITE,
					     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
			break;
		case 2: {
			/* Who writes to a page after fork() gets another one. */
			pid_t child = fork();

			if (!child)
				_exit(0);
			ASSERT_EQ(child, waitpid(child, NULL, 0));
		}
		}
	}
	TH_LOG("leased after %u of 200 rounds", leased);
	EXPECT_LT(20, leased);
	/* They go back when nobody has used them for a while, though nobody posts or polls. */
	EXPECT_TRUE(np_wait_until(np_pinned() == before));
	EXPECT_EQ(0, npr_dereg_mr(mr));
}

TEST_F(library, both_sides_may_be_unpinned)
{
	struct np_pair *pair = &self->pair;
	uint8_t *here = np_map(NP_DATA_LEN);
	struct ibv_mr *mr;
	uint64_t count;
	long before;

	ASSERT_EQ(0, npr_resolve(self->qp, pair->mr->rkey, NULL));
	before = np_pinned();
	ASSERT_EQ(0, np_write_text(LEASES, "0"));
	ASSERT_NE(NULL, here);
	mr = npr_reg_mr(pair->peer.pd, here, NP_DATA_LEN, IBV_ACCESS_LOCAL_WRITE);
	ASSERT_NE(NULL, mr);
	memset(pair->data, 0, 8);
	for (int i = 0; i < 20; i++) {
		size_t off = (i % 5 + 1) * 3 * PAGE + i * 8, len = (i % 7) * PAGE + 100;

		np_fill(here, len, 1000 + i);
		madvise(here, NP_DATA_LEN, MADV_PAGEOUT);
		madvise(pair->data, NP_DATA_LEN, MADV_PAGEOUT);
		ASSERT_EQ(0, RUN_LOCAL(IBV_WR_RDMA_WRITE, here, len, mr->lkey, off));
		ASSERT_EQ(0, memcmp(here, pair->data + off, len));
		/* Where it goes is in swap, or was never there. */
		madvise(here, NP_DATA_LEN, i % 2 ? MADV_PAGEOUT : MADV_DONTNEED);
		ASSERT_EQ(0, RUN_LOCAL(IBV_WR_RDMA_READ, here + HUGE_PAGE - 50, len, mr->lkey, off));
		madvise(here, NP_DATA_LEN, MADV_PAGEOUT);
		ASSERT_EQ(0, memcmp(here + HUGE_PAGE - 50, pair->data + off, len));
		madvise(here, NP_DATA_LEN, MADV_PAGEOUT);
		ASSERT_EQ(0, RUN_LOCAL(IBV_WR_ATOMIC_FETCH_AND_ADD, here, 8, mr->lkey, 0));
		memcpy(&count, here, 8);
		ASSERT_EQ(i, count);
	}
	EXPECT_EQ(before, np_pinned());
	ASSERT_EQ(0, munmap(here + PAGE, PAGE));
	EXPECT_EQ(-EFAULT, RUN_LOCAL(IBV_WR_RDMA_WRITE, here, 2 * PAGE, mr->lkey, 0));
	EXPECT_EQ(IBV_WC_LOC_PROT_ERR,
		  RUN_LOCAL(IBV_WR_RDMA_WRITE, here + NP_DATA_LEN - 8, 16, mr->lkey, 0));
	EXPECT_EQ(0, npr_dereg_mr(mr));
}

TEST_F(library, messages_go_from_unpinned_to_unpinned_memory)
{
	struct np_pair *pair = &self->pair;
	uint8_t *here = np_map(NP_DATA_LEN), *there = np_map(NP_DATA_LEN);
	struct ibv_mr *from, *to;
	struct npr_context *ctx;
	struct npr_cq *cq;
	struct npr_qp *qp;
	long before, alone = np_pinned();

	ASSERT_EQ(0, np_write_text(LEASES, "0"));
	ctx = npr_open(pair->owner.ctx, 0);
	ASSERT_NE(NULL, ctx);
	cq = npr_attach_cq(ctx, pair->owner.cq);
	ASSERT_NE(NULL, cq);
	qp = npr_attach_qp(cq, pair->owner.qp, NULL);
	ASSERT_NE(NULL, qp);
	from = npr_reg_mr(pair->peer.pd, here, NP_DATA_LEN, 0);
	to = npr_reg_mr(pair->owner.pd, there, NP_DATA_LEN, IBV_ACCESS_LOCAL_WRITE);
	ASSERT_NE(NULL, from);
	ASSERT_NE(NULL, to);
	before = np_pinned();
	for (int i = 0; i < 40; i++) {
		struct ibv_sge sge = {
			.addr = (uintptr_t)there + i * 8,
			.length = 8 * PAGE,
			.lkey = to->lkey,
		};
		struct ibv_recv_wr recv = { .wr_id = i, .sg_list = &sge, .num_sge = 1 }, *bad;
		size_t len = i * 700 + 1;
		struct ibv_wc wc;

		np_fill(here, 8 * PAGE, 2000 + i);
		madvise(here, NP_DATA_LEN, MADV_PAGEOUT);
		ASSERT_EQ(0, npr_post_recv(qp, &recv, &bad));
		madvise(there, NP_DATA_LEN, MADV_PAGEOUT);
		ASSERT_EQ(0, RUN_LOCAL(IBV_WR_SEND, here, len, from->lkey, i));
		ASSERT_EQ(0, await(cq, i, &wc));
		EXPECT_EQ(len, wc.byte_len);
		madvise(there, NP_DATA_LEN, MADV_PAGEOUT);
		ASSERT_EQ(0, memcmp(here, there + i * 8, len));
		EXPECT_EQ(before, np_pinned());
	}
	/* A receive that never completes is held until the QP is given back. */
	{
		struct ibv_sge sge = { (uintptr_t)there, 4 * PAGE, to->lkey };
		struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad;

		ASSERT_EQ(0, npr_post_recv(qp, &recv, &bad));
	}
	EXPECT_EQ(before + 4, np_pinned());
	EXPECT_EQ(0, npr_detach_qp(qp));
	EXPECT_EQ(alone, np_pinned());
	EXPECT_EQ(IBV_QPS_ERR, np_qp_state(pair->owner.qp));
	EXPECT_EQ(0, npr_detach_cq(cq));
	EXPECT_EQ(0, npr_close(ctx));
	EXPECT_EQ(0, npr_dereg_mr(from));
	EXPECT_EQ(0, npr_dereg_mr(to));
}

#define QKEY 0x1234

/* A QP of another type on the end's CQ, in INIT. */
static struct ibv_qp *make_qp(struct np_end *end, enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = {
		.send_cq = end->cq,
		.recv_cq = end->cq,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 2 },
		.qp_type = type,
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = type == IBV_QPT_UC ? IBV_ACCESS_REMOTE_WRITE : 0,
		.qkey = QKEY,
	};
	struct ibv_qp *qp = ibv_create_qp(end->pd, &init);

	if (qp && ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				(type == IBV_QPT_UC ? IBV_QP_ACCESS_FLAGS : IBV_QP_QKEY)))
		return NULL;
	return qp;
}

static int start_qp(struct ibv_qp *qp, uint32_t qpn, uint16_t lid)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = qpn,
		.ah_attr = np_path(qp->context, lid),
	};
	bool uc = qp->qp_type == IBV_QPT_UC;
	int ret;

	ret = ibv_modify_qp(qp, &attr, IBV_QP_STATE | (uc ? IBV_QP_AV | IBV_QP_PATH_MTU |
			    IBV_QP_DEST_QPN | IBV_QP_RQ_PSN : 0));
	attr.qp_state = IBV_QPS_RTS;
	return ret ? ret : ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
}

TEST_F(library, queues_without_answers_take_local_buffers)
{
	static const enum ibv_qp_type types[] = { IBV_QPT_UC, IBV_QPT_UD };
	struct np_pair *pair = &self->pair;
	uint8_t *here = np_map(HUGE_PAGE), *there = np_map(HUGE_PAGE);
	struct ibv_mr *from, *to;
	struct npr_context *ctx;
	struct npr_cq *cq;

	ctx = npr_open(pair->owner.ctx, 0);
	ASSERT_NE(NULL, ctx);
	cq = npr_attach_cq(ctx, pair->owner.cq);
	ASSERT_NE(NULL, cq);
	from = npr_reg_mr(pair->peer.pd, here, HUGE_PAGE, 0);
	to = npr_reg_mr(pair->owner.pd, there, HUGE_PAGE, IBV_ACCESS_LOCAL_WRITE);
	ASSERT_NE(NULL, from);
	ASSERT_NE(NULL, to);
	for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
		struct ibv_ah_attr av = np_path(pair->peer.ctx, pair->owner.lid);
		struct ibv_qp *a = make_qp(&pair->peer, types[t]), *b = make_qp(&pair->owner, types[t]);
		const size_t header = types[t] == IBV_QPT_UD ? 40 : 0;
		struct ibv_ah *ah = ibv_create_ah(pair->peer.pd, &av);
		struct npr_qp *qa, *qb;

		ASSERT_NE(NULL, a);
		ASSERT_NE(NULL, b);
		ASSERT_NE(NULL, ah);
		ASSERT_EQ(0, start_qp(a, b->qp_num, pair->owner.lid));
		ASSERT_EQ(0, start_qp(b, a->qp_num, pair->peer.lid));
		qa = npr_attach_qp(self->cq, a, NULL);
		qb = npr_attach_qp(cq, b, NULL);
		ASSERT_NE(NULL, qa) TH_LOG("%s", strerror(errno));
		ASSERT_NE(NULL, qb) TH_LOG("%s", strerror(errno));
		for (int i = 0; i < 20; i++) {
			struct ibv_sge rs = { (uintptr_t)there + i * 90, 2 * PAGE, to->lkey };
			struct ibv_recv_wr recv = { .wr_id = i, .sg_list = &rs, .num_sge = 1 }, *rbad;
			struct ibv_sge ss = { (uintptr_t)here + i * 400, 1 + i * 50, from->lkey };
			struct ibv_send_wr send = {
				.wr_id = i,
				.sg_list = &ss,
				.num_sge = 1,
				.opcode = IBV_WR_SEND,
				.send_flags = IBV_SEND_SIGNALED,
			}, *bad;
			struct ibv_wc wc;

			if (header) {
				send.wr.ud.ah = ah;
				send.wr.ud.remote_qpn = b->qp_num;
				send.wr.ud.remote_qkey = QKEY;
			}
			np_fill(here, 16 * PAGE, 3000 + i);
			madvise(here, HUGE_PAGE, MADV_PAGEOUT);
			madvise(there, HUGE_PAGE, MADV_PAGEOUT);
			ASSERT_EQ(0, npr_post_recv(qb, &recv, &rbad));
			ASSERT_EQ(0, npr_post_send(qa, &send, &bad));
			ASSERT_EQ(0, await(self->cq, i, &wc));
			ASSERT_EQ(0, await(cq, i, &wc));
			EXPECT_EQ(header + 1 + i * 50, wc.byte_len);
			EXPECT_EQ(0, memcmp(here + i * 400, there + i * 90 + header, 1 + i * 50));
		}
		EXPECT_EQ(0, npr_detach_qp(qa));
		EXPECT_EQ(0, npr_detach_qp(qb));
		EXPECT_EQ(0, ibv_destroy_qp(a));
		EXPECT_EQ(0, ibv_destroy_qp(b));
		EXPECT_EQ(0, ibv_destroy_ah(ah));
	}
	EXPECT_EQ(0, npr_dereg_mr(from));
	EXPECT_EQ(0, npr_dereg_mr(to));
}

/* --- how often the owner's kernel is asked ----------------------------------------------- */

static long resident(struct np_pair *pair)
{
	struct rdma_np_mr_info info;

	return np_query_mr(pair->mr, &info) ? -1 : (long)info.resident_pages;
}

/*
 * READs all pages, each alone: page 0, then the one that is @step behind it, and so on
 * around the region. None is begun before all is there that was asked for. 0,
 * ibv_wc_status or -errno.
 */
static int read_each_page(struct np_pair *pair, struct npr_qp *qp, struct npr_cq *cq, size_t step,
			  struct npr_stats *stats)
{
	struct npr_stats before;
	int ret = npr_get_stats(qp, &before, sizeof(before));

	for (size_t i = 0; i < NP_DATA_PAGES && !ret; i++) {
		size_t page = i * step % NP_DATA_PAGES;
		long asked;

		ret = run(pair, qp, cq, (struct op){ IBV_WR_RDMA_READ, 0, page * PAGE, PAGE });
		if (!ret && np_differs(pair->peer.buf, PAGE, page) != -1)
			ret = -EBADMSG;
		if (!ret)
			ret = npr_get_stats(qp, stats, sizeof(*stats));
		stats->suspicious_pages -= before.suspicious_pages;
		stats->read_ahead -= before.read_ahead;
		stats->faults -= before.faults;
		stats->busy -= before.busy;
		asked = stats->suspicious_pages + stats->read_ahead;
		if (!ret && !np_wait_until(resident(pair) == asked))
			ret = -ETIMEDOUT;
	}
	return ret;
}

#define READ_EACH_PAGE(...) read_each_page(&self->pair, self->qp, self->cq, __VA_ARGS__)

static void log_trips(struct __test_metadata *_metadata, const struct npr_stats *stats)
{
	TH_LOG("%lu pages absent, %lu read ahead, %lu faults, %lu busy",
	       (unsigned long)stats->suspicious_pages, (unsigned long)stats->read_ahead,
	       (unsigned long)stats->faults, (unsigned long)stats->busy);
}

/*
 * Nobody else brings neighbours. What is asked for ahead doubles each time, and so one
 * READ for each doubling finds its page absent.
 */
TEST_F(library, sequential_reads_ask_for_what_comes_next)
{
	struct np_pair *pair = &self->pair;
	struct npr_stats stats;

	ASSERT_EQ(0, np_set_fault_around(1));
	for (int swapped = 0; swapped < 2; swapped++) {
		if (swapped)
			ASSERT_EQ(0, np_page_out(pair->data, NP_DATA_LEN));
		ASSERT_EQ(0, READ_EACH_PAGE(1, &stats));
		log_trips(_metadata, &stats);
		EXPECT_EQ(NP_DATA_PAGES, stats.suspicious_pages + stats.read_ahead);
		EXPECT_LT(NP_DATA_PAGES * 9 / 10, stats.read_ahead);
		EXPECT_GT(NP_DATA_PAGES / 32, stats.faults - stats.busy);
	}
}

TEST_F(library, other_reads_ask_for_their_own_pages_only)
{
	/* Backwards, and far apart. */
	static const size_t steps[] = { NP_DATA_PAGES - 1, 389 };
	struct np_pair *pair = &self->pair;
	struct npr_stats stats;

	ASSERT_EQ(0, np_set_fault_around(1));
	for (size_t i = 0; i < ARRAY_SIZE(steps); i++) {
		/* Absent again, and what it was. */
		ASSERT_EQ(0, np_page_out(pair->data, NP_DATA_LEN));
		ASSERT_EQ(0, READ_EACH_PAGE(steps[i], &stats));
		log_trips(_metadata, &stats);
		EXPECT_EQ(0, stats.read_ahead);
		EXPECT_EQ(NP_DATA_PAGES, stats.faults - stats.busy);
	}
}

/* Every other page of 2 MiB is there: more holes than a request has ranges. */
static int every_other_page(struct np_pair *pair, bool write)
{
	struct rdma_np_mr_info info;
	int ret = np_set_fault_around(1);

	for (size_t off = 0; off < HUGE_PAGE && !ret; off += 2 * PAGE) {
		struct ibv_sge sge = { (uintptr_t)pair->data + off, PAGE, pair->mr->lkey };

		ret = ibv_advise_mr(pair->owner.pd, write ? IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE :
				    IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH,
				    &sge, 1);
	}
	if (!ret)
		ret = np_query_mr(pair->mr, &info);
	return ret ?: (int)(info.resident_pages - HUGE_PAGE / PAGE / 2);
}

TEST_F(library, missing_pages_of_a_read_are_one_fault)
{
	struct np_pair *pair = &self->pair;
	struct npr_stats stats;

	ASSERT_EQ(0, every_other_page(pair, false));
	ASSERT_EQ(0, RUN(IBV_WR_RDMA_READ, 0, 0, HUGE_PAGE));
	for (size_t i = 0; i < HUGE_PAGE / PAGE; i++) {
		ASSERT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, i));
	}
	ASSERT_EQ(0, npr_get_stats(self->qp, &stats, sizeof(stats)));
	log_trips(_metadata, &stats);
	EXPECT_EQ(HUGE_PAGE / PAGE / 2, stats.suspicious_pages);
	EXPECT_EQ(1, stats.faults);
	EXPECT_EQ(0, stats.busy);
}

TEST_F(library, missing_pages_of_a_write_are_one_fault)
{
	struct np_pair *pair = &self->pair;
	struct npr_stats stats;

	ASSERT_EQ(0, every_other_page(pair, true));
	for (size_t i = 0; i < HUGE_PAGE / PAGE; i++)
		np_fill(pair->peer.buf + i * PAGE, PAGE, 1000 + i);
	ASSERT_EQ(0, RUN(IBV_WR_RDMA_WRITE, 0, 0, HUGE_PAGE));
	for (size_t i = 0; i < HUGE_PAGE / PAGE; i++) {
		ASSERT_EQ(-1, np_differs(pair->data + i * PAGE, PAGE, 1000 + i));
	}
	ASSERT_EQ(0, npr_get_stats(self->qp, &stats, sizeof(stats)));
	log_trips(_metadata, &stats);
	EXPECT_EQ(1, stats.faults);
	EXPECT_EQ(0, stats.busy);
	EXPECT_EQ(0, stats.repeated_pages);
}

TEST_F(library, operation_outside_the_region_fails_as_on_pinned_memory)
{
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, RUN(IBV_WR_RDMA_READ, 0, NP_DATA_LEN - 8, 16));
}

TEST_F(library, write_to_a_read_only_mapping_fails)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, mprotect(pair->data, PAGE, PROT_READ));
	np_fill(pair->peer.buf, PAGE, 77);
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, RUN(IBV_WR_RDMA_WRITE, 0, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 0));
}

TEST_F(library, region_that_dies_under_the_library_is_an_error_not_a_hang)
{
	struct np_pair *pair = &self->pair;
	struct ibv_mr copy = *pair->mr;

	ASSERT_EQ(0, RUN(IBV_WR_RDMA_READ, 0, 0, PAGE));
	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	/* The peer still knows the key. */
	pair->mr = &copy;
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, RUN(IBV_WR_RDMA_READ, 0, 0, PAGE));
}

/*
 * Drivers use key values again, and the application says nothing of that to its peer: what
 * was an unpinned region's is pinned memory's, and the other way round.
 */
TEST_F(library, key_values_come_again)
{
	enum { ROUNDS = 300, LEN = 32 };
	static struct { uint32_t rkey; bool pinned; } seen[ROUNDS];
	struct np_pair *pair = &self->pair;
	unsigned int seed = 1, again[2][2] = {};	/* was pinned, is pinned */
	uint8_t *at = np_map(LEN * PAGE);

	ASSERT_NE(NULL, at);
	for (size_t r = 0; r < ROUNDS; r++) {
		/* A public key is made of one page, so pinned regions of one are the likeliest */
		bool pinned = r > ROUNDS / 4 && rand_r(&seed) % 2;
		size_t len = pinned && rand_r(&seed) % 2 ? 1 : LEN, w;
		struct ibv_mr *mr;

		ASSERT_EQ(at, mmap(at, LEN * PAGE, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
		for (size_t i = 0; i < LEN; i++)
			np_fill(at + i * PAGE, PAGE, r * LEN + i);
		mr = ibv_reg_mr(pair->owner.pd, at, len * PAGE,
				NP_RIGHTS | (pinned ? 0 : NP_UNPINNED));
		ASSERT_NE(NULL, mr) TH_LOG("%s", strerror(errno));
		seen[r].rkey = mr->rkey;
		seen[r].pinned = pinned;
		for (size_t i = r; i-- > 0;) {
			if (seen[i].rkey == mr->rkey) {
				again[seen[i].pinned][pinned]++;
				break;
			}
		}
		if (!pinned && rand_r(&seed) % 2) {
			ASSERT_EQ(0, np_page_out(at, LEN * PAGE));
		}

		pair->data = at;
		pair->mr = mr;
		memset(pair->peer.buf, 0, len * PAGE);
		ASSERT_EQ(0, RUN(IBV_WR_RDMA_READ, 0, 0, len * PAGE))
			TH_LOG("round %zu, %spinned", r, pinned ? "" : "un");
		for (size_t i = 0; i < len; i++) {
			ASSERT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, r * LEN + i));
		}
		w = rand_r(&seed) % len;
		np_fill(pair->peer.buf, PAGE, 1000000 + r);
		ASSERT_EQ(0, RUN(IBV_WR_RDMA_WRITE, 0, w * PAGE, PAGE))
			TH_LOG("round %zu, %spinned", r, pinned ? "" : "un");
		ASSERT_EQ(-1, np_differs(at + w * PAGE, PAGE, 1000000 + r));
		ASSERT_EQ(0, ibv_dereg_mr(mr));
		ASSERT_EQ(0, munmap(at, LEN * PAGE));
	}
	TH_LOG("unpinned before: %u pinned, %u unpinned; pinned before: %u pinned, %u unpinned",
	       again[0][1], again[0][0], again[1][1], again[1][0]);
	EXPECT_LT(0, again[0][1]);
}

TEST_HARNESS_MAIN
