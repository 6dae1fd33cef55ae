// SPDX-License-Identifier: GPL-2.0
/*
 * For np_preload: a program that knows nothing of unpinned regions, and whose regions
 * are not where work requests say. It READs and WRITEs memory that is paged out. That is
 * twice as large as the peer's own, so that NPRDMA_UNPINNED can tell them apart. And it
 * does what verbs allow and few programs do: the library is not to be seen.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "np_harness.h"

#define LEN	(64 * PAGE)

typedef struct ibv_mr *reg_fn(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
			      unsigned int access);

FIXTURE(buffer) {
	struct np_end owner;
	struct np_end peer;
	uint8_t *data;
	uint8_t *sink;
	struct ibv_mr *mr;
	uint64_t addr;
};

FIXTURE_VARIANT(buffer) {
	bool remote_iova;
	bool iova;	/* of the peer's own buffer */
	bool unseen;	/* registered by somebody whom the preload library does not see */
};
FIXTURE_VARIANT_ADD(buffer, where_it_is) { .remote_iova = false };
FIXTURE_VARIANT_ADD(buffer, remote_elsewhere) { .remote_iova = true };
FIXTURE_VARIANT_ADD(buffer, local_elsewhere) { .iova = true };
FIXTURE_VARIANT_ADD(buffer, elsewhere) { .remote_iova = true, .iova = true };
FIXTURE_VARIANT_ADD(buffer, not_seen) { .iova = true, .unseen = true };

FIXTURE_SETUP(buffer)
{
	reg_fn *reg = ibv_reg_mr_iova2;
	uint64_t iova;

	/* As programs do that have children. */
	ASSERT_EQ(0, ibv_fork_init());
	ASSERT_EQ(0, np_open(&self->owner, NP_OWNER_DEV, 0));
	ASSERT_EQ(0, np_open(&self->peer, NP_PEER_DEV, 0));
	ASSERT_EQ(0, np_connect(&self->owner, &self->peer));
	self->data = np_map(2 * LEN);
	self->sink = np_map(LEN);
	ASSERT_TRUE(self->data && self->sink);
	self->addr = variant->remote_iova ? PAGE : (uintptr_t)self->data;
	self->mr = reg(self->owner.pd, self->data, 2 * LEN, self->addr, NP_RIGHTS);
	ASSERT_NE(NULL, self->mr) TH_LOG("%s", strerror(errno));

	if (variant->unseen) {
		void *lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);

		ASSERT_NE(NULL, lib);
		reg = (reg_fn *)dlsym(lib, "ibv_reg_mr_iova2");
		ASSERT_NE(NULL, reg);
	}
	/* Nothing is mapped there. */
	iova = variant->iova ? 3 * PAGE : (uintptr_t)self->sink;
	self->peer.mr = reg(self->peer.pd, self->sink, LEN, iova, IBV_ACCESS_LOCAL_WRITE);
	ASSERT_NE(NULL, self->peer.mr) TH_LOG("%s", strerror(errno));
	self->peer.buf = (uint8_t *)(uintptr_t)iova;
	self->peer.buf_len = LEN;
}

FIXTURE_TEARDOWN(buffer)
{
	EXPECT_EQ(0, ibv_dereg_mr(self->mr));
	self->peer.buf = NULL;
	EXPECT_EQ(0, np_close(&self->peer));
	EXPECT_EQ(0, np_close(&self->owner));
}

TEST_F(buffer, is_read_and_written)
{
	static const size_t lengths[] = { 8, PAGE, 3 * PAGE + 200, LEN };
	size_t i;

	for (i = 0; i < ARRAY_SIZE(lengths); i++) {
		np_fill(self->data, LEN, i);
		memset(self->sink, 0, LEN);
		EXPECT_EQ(0, np_page_out(self->data, LEN));
		EXPECT_EQ(0, np_read(&self->peer, 0, lengths[i], self->addr, self->mr->rkey));
		EXPECT_EQ(-1, np_differs(self->sink, lengths[i], i));
		EXPECT_EQ(0, np_read(&self->peer, 0, lengths[i], self->addr, self->mr->rkey));
		EXPECT_EQ(-1, np_differs(self->sink, lengths[i], i));

		np_fill(self->sink, LEN, i + 100);
		EXPECT_EQ(0, np_page_out(self->data, LEN));
		EXPECT_EQ(0, np_write(&self->peer, 0, lengths[i], self->addr, self->mr->rkey));
		EXPECT_EQ(-1, np_differs(self->data, lengths[i], i + 100));
	}
}

/* What a peer writes later is the parent's. */
TEST_F(buffer, child_keeps_all_of_it)
{
	int go[2], status;
	pid_t pid;
	char c = 0;

	np_fill(self->data, 2 * LEN, 1);
	EXPECT_EQ(0, np_page_out(self->data, LEN));
	/* Some pages were reached by the peer, some are in use by it, and some are not there. */
	EXPECT_EQ(0, np_read(&self->peer, 0, LEN / 2, self->addr, self->mr->rkey));
	ASSERT_EQ(0, pipe(go));
	pid = np_fork();
	ASSERT_GE(pid, 0);
	if (!pid) {
		if (read(go[0], &c, 1) != 1)
			_exit(2);
		_exit(np_differs(self->data, 2 * LEN, 1) != -1);
	}
	np_fill(self->sink, LEN, 2);
	EXPECT_EQ(0, np_write(&self->peer, 0, LEN, self->addr, self->mr->rkey));
	EXPECT_EQ(-1, np_differs(self->data, LEN, 2));
	EXPECT_EQ(1, write(go[1], &c, 1));
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	EXPECT_EQ(0, status);
	EXPECT_EQ(0, np_read(&self->peer, 0, LEN, self->addr, self->mr->rkey));
	EXPECT_EQ(-1, np_differs(self->sink, LEN, 2));
	close(go[0]);
	close(go[1]);
}

/* --- objects for ibv_wr_*() ----------------------------------------------- */

static bool keep_freed;
void __libc_free(void *p);

/* Everybody's. What is used after it is wrong at once, and not by the next allocation's grace. */
void free(void *p)
{
	if (!keep_freed)
		__libc_free(p);
	else if (p)
		memset(p, 0xa5, malloc_usable_size(p));
}

static int wr_one(struct np_end *end, struct ibv_qp_ex *qpx, bool write, size_t len, uint64_t addr,
		  uint32_t rkey)
{
	struct ibv_wc wc;
	int ret;

	ibv_wr_start(qpx);
	qpx->wr_id = 1;
	qpx->wr_flags = IBV_SEND_SIGNALED;
	if (write)
		ibv_wr_rdma_write(qpx, rkey, addr);
	else
		ibv_wr_rdma_read(qpx, rkey, addr);
	ibv_wr_set_sge(qpx, end->mr->lkey, (uintptr_t)end->buf, len);
	ret = ibv_wr_complete(qpx);
	return ret ? -ret : np_poll(end, &wc);
}

TEST_F(buffer, is_reached_by_an_object_older_than_a_reset)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = self->peer.cq,
		.recv_cq = self->peer.cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = self->peer.pd,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_RDMA_WRITE,
	};
	struct ibv_qp_ex *qpx;
	size_t i;

	ASSERT_EQ(0, ibv_destroy_qp(self->peer.qp));
	self->peer.qp = ibv_create_qp_ex(self->peer.ctx, &init);
	ASSERT_NE(NULL, self->peer.qp) TH_LOG("%s", strerror(errno));
	qpx = ibv_qp_to_qp_ex(self->peer.qp);
	ASSERT_NE(NULL, qpx);
	for (i = 0; i < 3; i++) {
		keep_freed = true;
		ASSERT_EQ(0, np_reconnect(&self->owner, &self->peer));
		EXPECT_EQ(qpx, ibv_qp_to_qp_ex(self->peer.qp));
		np_fill(self->data, LEN, i);
		EXPECT_EQ(0, np_page_out(self->data, LEN));
		EXPECT_EQ(0, wr_one(&self->peer, qpx, false, LEN, self->addr, self->mr->rkey));
		EXPECT_EQ(-1, np_differs(self->sink, LEN, i));
		np_fill(self->sink, LEN, i + 100);
		EXPECT_EQ(0, np_page_out(self->data, LEN));
		EXPECT_EQ(0, wr_one(&self->peer, qpx, true, LEN, self->addr, self->mr->rkey));
		EXPECT_EQ(-1, np_differs(self->data, LEN, i + 100));
		keep_freed = false;
	}
}

/* --- what is in use ------------------------------------------------------- */

/* A shared receive queue that a QP uses stays, and what is posted there. */
TEST_F(buffer, is_received_into_by_a_queue_that_could_not_go)
{
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_qp_init_attr init = {
		.send_cq = self->owner.cq,
		.recv_cq = self->owner.cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_send_sge = 1 },
	};
	struct ibv_sge sge = { .addr = self->addr + PAGE, .length = PAGE, .lkey = self->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 7, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_srq *srq;
	struct ibv_wc wc;

	srq = ibv_create_srq(self->owner.pd, &srq_init);
	ASSERT_NE(NULL, srq) TH_LOG("%s", strerror(errno));
	ASSERT_EQ(0, ibv_destroy_qp(self->owner.qp));
	init.srq = srq;
	self->owner.qp = ibv_create_qp(self->owner.pd, &init);
	ASSERT_NE(NULL, self->owner.qp) TH_LOG("%s", strerror(errno));
	ASSERT_EQ(0, np_reconnect(&self->owner, &self->peer));

	EXPECT_EQ(EBUSY, ibv_destroy_srq(srq));
	EXPECT_EQ(0, np_page_out(self->data, LEN));
	ASSERT_EQ(0, ibv_post_srq_recv(srq, &wr, &bad));
	np_fill(self->sink, PAGE, 5);
	ASSERT_EQ(0, np_post(&self->peer, IBV_WR_SEND, 0, PAGE, 0, 0, IBV_SEND_SIGNALED));
	EXPECT_EQ(IBV_WC_SUCCESS, np_poll(&self->peer, &wc));
	EXPECT_EQ(IBV_WC_SUCCESS, np_poll(&self->owner, &wc));
	EXPECT_EQ(7, wc.wr_id);
	EXPECT_EQ(-1, np_differs(self->data + PAGE, PAGE, 5));

	EXPECT_EQ(0, ibv_destroy_qp(self->owner.qp));
	self->owner.qp = NULL;
	EXPECT_EQ(0, ibv_destroy_srq(srq));
}

/*
 * A QP that the library has no memory for, though the HCA has: with nothing but unpinned
 * regions it would be of no use. Where the library has not seen one, all are pinned from then on.
 */
TEST_F(buffer, is_for_queues_that_it_can_be_used_with)
{
	struct ibv_qp_init_attr init = {
		.send_cq = self->peer.cq,
		.recv_cq = self->peer.cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct rlimit limit, all;
	const char *bytes = getenv("NPRDMA_UNPINNED");
	struct ibv_qp *qp;

	ASSERT_EQ(0, ibv_destroy_qp(self->peer.qp));
	self->peer.qp = NULL;
	/* The HCA's queues are small; what the library remembers of words may have 8 MiB. */
	ASSERT_EQ(0, getrlimit(RLIMIT_AS, &all));
	limit = all;
	limit.rlim_cur = np_status_kb("VmSize") * 1024 + (4UL << 20);
	ASSERT_EQ(0, setrlimit(RLIMIT_AS, &limit));
	qp = ibv_create_qp(self->peer.pd, &init);
	if (variant->unseen || (bytes && strtoul(bytes, NULL, 0))) {
		ASSERT_NE(NULL, qp) TH_LOG("%s", strerror(errno));
		EXPECT_EQ(0, ibv_destroy_qp(qp));
	} else {
		ASSERT_EQ(NULL, qp);
		EXPECT_EQ(ENOMEM, errno);
	}

	ASSERT_EQ(0, setrlimit(RLIMIT_AS, &all));
	self->peer.qp = ibv_create_qp(self->peer.pd, &init);
	ASSERT_NE(NULL, self->peer.qp) TH_LOG("%s", strerror(errno));
	ASSERT_EQ(0, np_reconnect(&self->owner, &self->peer));
	EXPECT_EQ(0, np_read(&self->peer, 0, PAGE, self->addr, self->mr->rkey));
}

/* --- completions ---------------------------------------------------------- */

/* The peer's QP has a receive, and a SEND of which nobody tells that it is done. */
static int post_last(struct _test_data_buffer *self)
{
	struct ibv_sge sge = { .addr = self->addr, .length = PAGE, .lkey = self->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 7, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_wc wc;
	int ret;

	ret = -ibv_post_recv(self->owner.qp, &wr, &bad);
	if (ret)
		return ret;
	sge.addr = (uintptr_t)self->peer.buf;
	sge.lkey = self->peer.mr->lkey;
	ret = -ibv_post_recv(self->peer.qp, &wr, &bad);
	if (!ret)
		ret = np_post(&self->peer, IBV_WR_SEND, PAGE, PAGE, 0, 0, 0);
	return ret ? ret : np_poll(&self->owner, &wc);
}

/* Its wr_id may be the address of what the program has freed. */
TEST_F(buffer, is_not_told_of_when_its_queue_has_gone)
{
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	struct ibv_wc wc;

	ASSERT_EQ(0, post_last(self));
	ASSERT_EQ(0, ibv_modify_qp(self->peer.qp, &reset, IBV_QP_STATE));
	EXPECT_EQ(0, ibv_poll_cq(self->peer.cq, 1, &wc));
	ASSERT_EQ(0, np_reconnect(&self->owner, &self->peer));
	ASSERT_EQ(0, post_last(self));
	ASSERT_EQ(0, ibv_destroy_qp(self->peer.qp));
	self->peer.qp = NULL;
	EXPECT_EQ(0, ibv_poll_cq(self->peer.cq, 1, &wc));
}

/* --- many queues ---------------------------------------------------------- */

FIXTURE(queues) {
	struct np_end owner;
	struct np_end peer;
	uint8_t *data;
	struct ibv_mr *mr;
};

FIXTURE_SETUP(queues)
{
	ASSERT_EQ(0, np_open(&self->owner, NP_OWNER_DEV, 0));
	ASSERT_EQ(0, np_open(&self->peer, NP_PEER_DEV, PAGE));
	self->data = np_map(2 * LEN);
	ASSERT_NE(NULL, self->data);
	self->mr = ibv_reg_mr(self->owner.pd, self->data, 2 * LEN, NP_RIGHTS);
	ASSERT_NE(NULL, self->mr) TH_LOG("%s", strerror(errno));
}

FIXTURE_TEARDOWN(queues)
{
	EXPECT_EQ(0, ibv_dereg_mr(self->mr));
	EXPECT_EQ(0, np_close(&self->peer));
	EXPECT_EQ(0, np_close(&self->owner));
}

/* As many on one completion queue as @qps has. Providers round their send queues up. */
static int make_queues(struct np_end *end, struct ibv_qp_init_attr *init, struct ibv_qp **qps,
		       size_t n)
{
	const struct ibv_qp_cap cap = init->cap;
	size_t i;

	for (i = 0; i < n; i++) {
		init->cap = cap;
		qps[i] = ibv_create_qp(end->pd, init);
		if (!qps[i]) {
			fprintf(stderr, "# queue %zu: %s\n", i, strerror(errno));
			return -errno;
		}
	}
	return 0;
}

/* A program that signals few of its requests needs no completion queue for all of them. */
TEST_F(queues, are_any_number_on_a_small_completion_queue)
{
	static const struct { size_t queues, depth; } cases[] = { { 24, 17 }, { 90, 1 } };
	struct ibv_qp *qps[90];
	size_t c, i;

	for (c = 0; c < ARRAY_SIZE(cases); c++) {
		struct ibv_qp_init_attr init = {
			.recv_cq = self->peer.cq,
			.qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = cases[c].depth, .max_recv_wr = 1,
				 .max_send_sge = 1, .max_recv_sge = 1 },
		};

		init.send_cq = ibv_create_cq(self->peer.ctx, 4, NULL, NULL, 0);
		ASSERT_NE(NULL, init.send_cq);
		ASSERT_EQ(0, make_queues(&self->peer, &init, qps, cases[c].queues));
		for (i = 0; i < cases[c].queues; i++)
			EXPECT_EQ(0, ibv_destroy_qp(qps[i]));
		EXPECT_EQ(0, ibv_destroy_cq(init.send_cq));
	}
}

/* Those that send nothing: the completion queue is for the receives that they share. */
TEST_F(queues, are_any_number_that_only_receive)
{
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_sge = 1 },
	};
	struct ibv_sge sge = { .addr = (uintptr_t)self->data + PAGE, .length = PAGE, .lkey = self->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 7, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_qp *qps[70];
	struct ibv_wc wc;
	size_t i;

	ASSERT_EQ(0, ibv_destroy_qp(self->owner.qp));
	ASSERT_EQ(0, ibv_destroy_cq(self->owner.cq));
	self->owner.qp = NULL;
	self->owner.cq = ibv_create_cq(self->owner.ctx, 4, NULL, NULL, 0);
	ASSERT_NE(NULL, self->owner.cq);
	init.send_cq = init.recv_cq = self->owner.cq;
	init.srq = ibv_create_srq(self->owner.pd, &srq_init);
	ASSERT_NE(NULL, init.srq) TH_LOG("%s", strerror(errno));
	ASSERT_EQ(0, make_queues(&self->owner, &init, qps, ARRAY_SIZE(qps)));

	self->owner.qp = qps[ARRAY_SIZE(qps) - 1];
	ASSERT_EQ(0, np_connect(&self->owner, &self->peer));
	EXPECT_EQ(0, np_page_out(self->data, 2 * PAGE));
	ASSERT_EQ(0, ibv_post_srq_recv(init.srq, &wr, &bad));
	np_fill(self->peer.buf, PAGE, 5);
	ASSERT_EQ(0, np_post(&self->peer, IBV_WR_SEND, 0, PAGE, 0, 0, IBV_SEND_SIGNALED));
	EXPECT_EQ(IBV_WC_SUCCESS, np_poll(&self->peer, &wc));
	EXPECT_EQ(IBV_WC_SUCCESS, np_poll(&self->owner, &wc));
	EXPECT_EQ(7, wc.wr_id);
	EXPECT_EQ(-1, np_differs(self->data + PAGE, PAGE, 5));
	EXPECT_EQ(0, np_write(&self->peer, 0, PAGE, (uintptr_t)self->data, self->mr->rkey));
	EXPECT_EQ(-1, np_differs(self->data, PAGE, 5));

	for (i = 0; i < ARRAY_SIZE(qps); i++)
		EXPECT_EQ(0, ibv_destroy_qp(qps[i]));
	self->owner.qp = NULL;
	EXPECT_EQ(0, ibv_destroy_srq(init.srq));
}

/* --- events --------------------------------------------------------------- */

struct waiter {
	pthread_t thread;
	pid_t tid;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	void *cq_context;
	int ret;
	int error;
	bool done;
};

static void *wait_for_event(void *arg)
{
	struct waiter *w = arg;

	__atomic_store_n(&w->tid, syscall(SYS_gettid), __ATOMIC_RELEASE);
	w->ret = ibv_get_cq_event(w->channel, &w->cq, &w->cq_context);
	w->error = errno;
	__atomic_store_n(&w->done, true, __ATOMIC_RELEASE);
	return NULL;
}

static bool waiter_done(struct waiter *w)
{
	return __atomic_load_n(&w->done, __ATOMIC_ACQUIRE);
}

static bool waiter_sleeps(struct waiter *w)
{
	pid_t tid = __atomic_load_n(&w->tid, __ATOMIC_ACQUIRE);
	char path[64], state = 0;
	FILE *f;

	if (!tid)
		return false;
	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", tid);
	f = fopen(path, "r");
	if (!f)
		return false;
	if (fscanf(f, "%*d (%*[^)]) %c", &state) != 1)
		state = 0;
	fclose(f);
	return state == 'S';
}

/* A peer whose CQ the test makes; a program's CQs are on one channel. */
FIXTURE(events) {
	struct np_end owner;
	struct np_end peer;
	struct ibv_comp_channel *channel;
	struct waiter waiter;
	uint8_t *data;
	uint8_t *sink;
	struct ibv_mr *mr;
};

FIXTURE_SETUP(events)
{
	ASSERT_EQ(0, np_open(&self->owner, NP_OWNER_DEV, 0));
	ASSERT_EQ(0, np_open(&self->peer, NP_PEER_DEV, 0));
	ASSERT_EQ(0, ibv_destroy_qp(self->peer.qp));
	ASSERT_EQ(0, ibv_destroy_cq(self->peer.cq));
	self->peer.qp = NULL;
	self->peer.cq = NULL;
	self->channel = ibv_create_comp_channel(self->peer.ctx);
	ASSERT_NE(NULL, self->channel);
	memset(&self->waiter, 0, sizeof(self->waiter));
	self->waiter.channel = self->channel;
	self->data = np_map(2 * LEN);
	self->sink = np_map(LEN);
	ASSERT_TRUE(self->data && self->sink);
	np_fill(self->data, LEN, 1);
	self->mr = ibv_reg_mr(self->owner.pd, self->data, 2 * LEN, NP_RIGHTS);
	ASSERT_NE(NULL, self->mr) TH_LOG("%s", strerror(errno));
	self->peer.mr = ibv_reg_mr(self->peer.pd, self->sink, LEN, IBV_ACCESS_LOCAL_WRITE);
	ASSERT_NE(NULL, self->peer.mr) TH_LOG("%s", strerror(errno));
	self->peer.buf = self->sink;
	self->peer.buf_len = LEN;
}

FIXTURE_TEARDOWN(events)
{
	/* Before the channel that its CQ is on. */
	if (self->peer.qp)
		EXPECT_EQ(0, ibv_destroy_qp(self->peer.qp));
	if (self->peer.cq)
		EXPECT_EQ(0, ibv_destroy_cq(self->peer.cq));
	self->peer.qp = NULL;
	self->peer.cq = NULL;
	EXPECT_EQ(0, ibv_destroy_comp_channel(self->channel));
	EXPECT_EQ(0, ibv_dereg_mr(self->mr));
	EXPECT_EQ(0, np_close(&self->peer));
	EXPECT_EQ(0, np_close(&self->owner));
}

static int events_make_cq(struct _test_data_events *self)
{
	self->peer.cq = ibv_create_cq(self->peer.ctx, 128, NULL, self->channel, 0);
	return self->peer.cq ? 0 : -errno;
}

static int events_connect(struct _test_data_events *self)
{
	self->peer.qp = np_make_qp(&self->peer, self->peer.pd);
	return self->peer.qp ? np_connect(&self->owner, &self->peer) : -errno;
}

static bool events_start_waiter(struct _test_data_events *self)
{
	struct waiter *w = &self->waiter;

	return !pthread_create(&w->thread, NULL, wait_for_event, w) &&
	       np_wait_until(waiter_sleeps(w));
}

/* READ of a key that nobody knows: the HCA has nothing to tell until that is known. */
static int events_post_read(struct _test_data_events *self)
{
	return np_post(&self->peer, IBV_WR_RDMA_READ, 0, PAGE, (uintptr_t)self->data,
		       self->mr->rkey, IBV_SEND_SIGNALED);
}

static bool events_read_done(struct _test_data_events *self)
{
	struct ibv_wc wc;

	return np_poll(&self->peer, &wc) == IBV_WC_SUCCESS && np_differs(self->sink, PAGE, 1) == -1;
}

/* The waiter gets an event of the CQ where the READ will complete. */
static bool events_waiter_is_told(struct _test_data_events *self)
{
	struct waiter *w = &self->waiter;

	if (!np_wait_until(waiter_done(w)) || w->ret || w->cq != self->peer.cq ||
	    w->cq_context != self->peer.cq->cq_context)
		return false;
	ibv_ack_cq_events(w->cq, 1);
	return !pthread_join(w->thread, NULL);
}

TEST_F(events, come_of_a_queue_made_during_the_wait)
{
	ASSERT_TRUE(events_start_waiter(self));
	ASSERT_EQ(0, events_make_cq(self));
	ASSERT_EQ(0, events_connect(self));
	ASSERT_EQ(0, ibv_req_notify_cq(self->peer.cq, 0));
	ASSERT_EQ(0, events_post_read(self));
	ASSERT_TRUE(events_waiter_is_told(self));
	EXPECT_TRUE(events_read_done(self));
}

TEST_F(events, come_of_a_queue_that_could_not_go)
{
	ASSERT_EQ(0, events_make_cq(self));
	ASSERT_EQ(0, events_connect(self));
	ASSERT_EQ(0, ibv_req_notify_cq(self->peer.cq, 0));
	ASSERT_TRUE(events_start_waiter(self));
	EXPECT_EQ(EBUSY, ibv_destroy_cq(self->peer.cq));
	ASSERT_EQ(0, events_post_read(self));
	ASSERT_TRUE(events_waiter_is_told(self));
	EXPECT_TRUE(events_read_done(self));
}

TEST_F(events, come_when_other_queues_are_gone)
{
	struct ibv_cq *others[4];
	size_t i;

	ASSERT_EQ(0, events_make_cq(self));
	ASSERT_EQ(0, events_connect(self));
	for (i = 0; i < ARRAY_SIZE(others); i++) {
		others[i] = ibv_create_cq(self->peer.ctx, 8, NULL, self->channel, 0);
		ASSERT_NE(NULL, others[i]);
		ASSERT_EQ(0, ibv_req_notify_cq(others[i], 0));
	}
	ASSERT_TRUE(events_start_waiter(self));
	for (i = 0; i < ARRAY_SIZE(others); i++)
		ASSERT_EQ(0, ibv_destroy_cq(others[i]));
	ASSERT_EQ(0, ibv_req_notify_cq(self->peer.cq, 0));
	ASSERT_EQ(0, events_post_read(self));
	ASSERT_TRUE(events_waiter_is_told(self));
	EXPECT_TRUE(events_read_done(self));
}

/* Of a queue that was not armed: never; and a call that must not wait does not. */
/* The library has more completions than the program, and keeps its room. */
TEST_F(events, come_of_a_queue_that_was_made_smaller)
{
	const unsigned int posts = 32;
	struct ibv_wc wc;
	unsigned int i;

	ASSERT_EQ(0, events_make_cq(self));
	ASSERT_EQ(0, events_connect(self));
	ASSERT_EQ(0, events_post_read(self));
	ASSERT_TRUE(events_read_done(self));
	ASSERT_EQ(0, ibv_resize_cq(self->peer.cq, posts));
	for (i = 0; i < posts; i++)
		ASSERT_EQ(0, events_post_read(self));
	for (i = 0; i < posts; i++)
		ASSERT_EQ(IBV_WC_SUCCESS, np_poll(&self->peer, &wc));
	EXPECT_LE(2 * posts + 64, self->peer.cq->cqe);

	ASSERT_EQ(0, ibv_req_notify_cq(self->peer.cq, 0));
	ASSERT_TRUE(events_start_waiter(self));
	ASSERT_EQ(0, events_post_read(self));
	ASSERT_TRUE(events_waiter_is_told(self));
	EXPECT_TRUE(events_read_done(self));
}

TEST_F(events, come_when_they_were_asked_for)
{
	struct waiter *w = &self->waiter;
	struct ibv_wc wc;

	ASSERT_EQ(0, fcntl(self->channel->fd, F_SETFL,
			   fcntl(self->channel->fd, F_GETFL) | O_NONBLOCK));
	ASSERT_EQ(0, events_make_cq(self));
	ASSERT_EQ(0, events_connect(self));
	ASSERT_EQ(0, events_post_read(self));
	ASSERT_TRUE(events_read_done(self));
	ASSERT_EQ(-1, ibv_get_cq_event(self->channel, &w->cq, &w->cq_context));
	EXPECT_EQ(EAGAIN, errno);
	EXPECT_TRUE(fcntl(self->channel->fd, F_GETFL) & O_NONBLOCK);

	ASSERT_EQ(0, ibv_req_notify_cq(self->peer.cq, 0));
	ASSERT_EQ(0, ibv_poll_cq(self->peer.cq, 1, &wc));
	ASSERT_EQ(0, events_post_read(self));
	ASSERT_TRUE(np_wait_until(!ibv_get_cq_event(self->channel, &w->cq, &w->cq_context)));
	EXPECT_EQ(self->peer.cq, w->cq);
	ibv_ack_cq_events(w->cq, 1);
	EXPECT_TRUE(events_read_done(self));
}

static void *read_cancelled(void *arg)
{
	struct _test_data_events *self = arg;

	pthread_cancel(pthread_self());
	self->waiter.done = !ibv_req_notify_cq(self->peer.cq, 0) && !events_post_read(self) &&
			    events_read_done(self);
	pthread_testcancel();
	return NULL;
}

/* Neither asking, posting nor polling is where a thread is cancelled. */
TEST_F(events, are_asked_for_by_a_thread_that_ends)
{
	struct waiter *w = &self->waiter;
	void *result;

	ASSERT_EQ(0, events_make_cq(self));
	ASSERT_EQ(0, events_connect(self));
	EXPECT_EQ(0, np_page_out(self->data, LEN));
	ASSERT_EQ(0, pthread_create(&w->thread, NULL, read_cancelled, self));
	ASSERT_EQ(0, pthread_join(w->thread, &result));
	EXPECT_EQ(PTHREAD_CANCELED, result);
	EXPECT_TRUE(w->done);
}

static volatile sig_atomic_t signals;

static void count_signal(int number)
{
	signals++;
}

TEST_F(events, are_waited_for_after_a_signal)
{
	struct sigaction action = { .sa_handler = count_signal, .sa_flags = SA_RESTART };
	struct waiter *w = &self->waiter;

	ASSERT_EQ(0, sigaction(SIGALRM, &action, NULL));
	ASSERT_EQ(0, events_make_cq(self));
	ASSERT_EQ(0, events_connect(self));
	ASSERT_EQ(0, ibv_req_notify_cq(self->peer.cq, 0));
	ASSERT_TRUE(events_start_waiter(self));
	ASSERT_EQ(0, pthread_kill(w->thread, SIGALRM));
	ASSERT_TRUE(np_wait_until(signals && (waiter_done(w) || waiter_sleeps(w))));
	ASSERT_FALSE(waiter_done(w)) TH_LOG("%s", strerror(w->error));
	ASSERT_FALSE(fcntl(self->channel->fd, F_GETFL) & O_NONBLOCK);
	ASSERT_EQ(0, events_post_read(self));
	ASSERT_TRUE(events_waiter_is_told(self));
	EXPECT_TRUE(events_read_done(self));
}

TEST_F(events, are_not_waited_for_after_a_signal_that_ends_calls)
{
	struct sigaction action = { .sa_handler = count_signal };
	struct waiter *w = &self->waiter;

	ASSERT_EQ(0, sigaction(SIGALRM, &action, NULL));
	ASSERT_EQ(0, events_make_cq(self));
	ASSERT_TRUE(events_start_waiter(self));
	ASSERT_EQ(0, pthread_kill(w->thread, SIGALRM));
	ASSERT_TRUE(np_wait_until(waiter_done(w)));
	EXPECT_EQ(-1, w->ret);
	EXPECT_EQ(EINTR, w->error);
	EXPECT_EQ(0, pthread_join(w->thread, NULL));
}

/*
 * Each function that the preload library is to have, and each pointer of a device's context, is
 * its own: with the libibverbs of this machine and the versions of its symbols.
 */
static bool is_preloaded(const void *f)
{
	Dl_info info;

	return f && dladdr(f, &info) && info.dli_fname && strstr(info.dli_fname, "libnprdma-preload");
}

TEST(every_hook_is_the_librarys)
{
	enum kind { FUNCTION, POINTER, EXTENDED };
	static const struct {
		enum kind kind;
		const char *name;
		size_t offset;	/* of a pointer, in the device's context */
	} hooks[] = {
#include "np_hooks.h"
	};
	struct np_end end;

	ASSERT_EQ(0, np_open(&end, NP_OWNER_DEV, 0));
	for (size_t i = 0; i < sizeof(hooks) / sizeof(*hooks); i++) {
		const char *in = hooks[i].kind == POINTER ? (char *)&end.ctx->ops :
							    (char *)verbs_get_ctx(end.ctx);
		void *f;

		if (hooks[i].kind == FUNCTION)
			f = dlsym(RTLD_DEFAULT, hooks[i].name);
		else
			memcpy(&f, in + hooks[i].offset, sizeof(f));
		EXPECT_TRUE(is_preloaded(f))
			TH_LOG("%s is not the preload library's", hooks[i].name);
	}
	np_close(&end);
}

TEST_HARNESS_MAIN
