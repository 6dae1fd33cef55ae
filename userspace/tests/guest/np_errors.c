// SPDX-License-Identifier: GPL-2.0
/*
 * What goes wrong, with libnprdma on unpinned memory as with plain verbs on pinned memory
 * (np_verbs.c): work requests, receives and keys that are wrong, and memory that is gone.
 */
#include <arpa/inet.h>
#include <fcntl.h>

#include "np_verbs.h"

/* --- what goes wrong ----------------------------------------------------------------- */

enum wrong {
	LKEY,		/* no key */
	LOCAL_RANGE,	/* out of the region */
	LOCAL_RIGHT,	/* region without the right to write */
	RKEY,
	REMOTE_RANGE,
	REMOTE_END,	/* the first bytes are in the region */
	REMOTE_RIGHT,
	REMOTE_PD,
	REMOTE_DEAD,	/* deregistered */
	REMOTE_DIED,	/* used, then deregistered */
	MISALIGNED,
	TOO_LONG,	/* for the receive */
	NO_RECEIVE,
	RECEIVE_LKEY,
	RECEIVE_RANGE,
	INVALIDATE,	/* a region that is not for that */
};

static const struct fault {
	enum wrong wrong;
	enum ibv_wr_opcode op;
	int status;		/* as the standard says */
} faults[] = {
	{ LKEY, IBV_WR_SEND, IBV_WC_LOC_PROT_ERR },
	{ LKEY, IBV_WR_RDMA_WRITE, IBV_WC_LOC_PROT_ERR },
	{ LKEY, IBV_WR_RDMA_READ, IBV_WC_LOC_PROT_ERR },
	{ LKEY, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WC_LOC_PROT_ERR },
	{ LOCAL_RANGE, IBV_WR_SEND, IBV_WC_LOC_PROT_ERR },
	{ LOCAL_RANGE, IBV_WR_RDMA_WRITE, IBV_WC_LOC_PROT_ERR },
	{ LOCAL_RANGE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WC_LOC_PROT_ERR },
	{ LOCAL_RANGE, IBV_WR_RDMA_READ, IBV_WC_LOC_PROT_ERR },
	{ LOCAL_RIGHT, IBV_WR_RDMA_READ, IBV_WC_LOC_PROT_ERR },
	{ LOCAL_RIGHT, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WC_LOC_PROT_ERR },
	{ RKEY, IBV_WR_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR },
	{ RKEY, IBV_WR_RDMA_READ, IBV_WC_REM_ACCESS_ERR },
	{ RKEY, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_RANGE, IBV_WR_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_RANGE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_RANGE, IBV_WR_RDMA_READ, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_RANGE, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_END, IBV_WR_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_END, IBV_WR_RDMA_READ, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_RIGHT, IBV_WR_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_RIGHT, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_RIGHT, IBV_WR_RDMA_READ, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_RIGHT, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_PD, IBV_WR_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_PD, IBV_WR_RDMA_READ, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_PD, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_DEAD, IBV_WR_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_DEAD, IBV_WR_RDMA_READ, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_DIED, IBV_WR_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_DIED, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_DIED, IBV_WR_RDMA_READ, IBV_WC_REM_ACCESS_ERR },
	{ REMOTE_DIED, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WC_REM_ACCESS_ERR },
	{ MISALIGNED, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WC_REM_INV_REQ_ERR },
	{ MISALIGNED, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WC_REM_INV_REQ_ERR },
	{ TOO_LONG, IBV_WR_SEND, IBV_WC_REM_INV_REQ_ERR },
	{ NO_RECEIVE, IBV_WR_SEND, IBV_WC_RNR_RETRY_EXC_ERR },
	{ NO_RECEIVE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WC_RNR_RETRY_EXC_ERR },
	{ RECEIVE_LKEY, IBV_WR_SEND, IBV_WC_REM_OP_ERR },
	{ RECEIVE_RANGE, IBV_WR_SEND, IBV_WC_REM_OP_ERR },
	{ INVALIDATE, IBV_WR_SEND_WITH_INV, IBV_WC_REM_ACCESS_ERR },
};

/* Another region of the same memory, which need not be pinned. */
static struct ibv_mr *another(struct area *area, struct ibv_pd *pd, bool pinned, int access)
{
	return pinned ? ibv_reg_mr(pd, area->mem[1], AREA, access) :
			npr_reg_mr(pd, area->mem[1], AREA, access);
}

static int drop(struct ibv_mr *mr, bool pinned)
{
	return pinned ? ibv_dereg_mr(mr) : npr_dereg_mr(mr);
}

/*
 * Four work requests, of which the second is wrong, and one after the QP has failed. If the
 * receives are shared they are for others then, but for the one that went wrong.
 */
static int fail(struct world *w, const struct fault *f, enum ibv_wr_opcode first, bool signaled,
		bool srq, bool pinned, struct result *r, int *line)
{
	const struct variant v = {
		.type = IBV_QPT_RC, .local = UNPINNED, .remote = UNPINNED, .srq = srq,
		.ex = f->wrong & 1,
	};
	const unsigned int receives = f->wrong == NO_RECEIVE ? 0 : 3;
	const bool taken = f->wrong >= TOO_LONG && f->wrong != NO_RECEIVE;
	struct ibv_srq_attr limit = { .srq_limit = receives };
	struct area *areas[] = { &w->here, &w->there, &w->sink };
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct ibv_send_wr wr[4] = {}, after;
	struct ibv_mr *extra = NULL;
	struct ibv_pd *pd = NULL;
	struct ibv_sge sge[4];
	unsigned int n;
	int ret;

	memset(r->count, 0, sizeof(r->count));
	fill(w);
	TRY(side_start(&w->a, &v, pinned));
	TRY(side_start(&w->b, &v, pinned));
	TRY(side_connect(&w->a, &w->b, 1));
	TRY(side_connect(&w->b, &w->a, 7));
	for (unsigned int i = 0; i < receives; i++) {
		struct ibv_sge rsge = {
			(uintptr_t)w->sink.mem[1] + i * SLOT, 200, w->sink.mr[1]->lkey
		};
		struct ibv_recv_wr recv = { .wr_id = 1000 + i, .sg_list = &rsge, .num_sge = 1 };

		if (f->wrong == RECEIVE_LKEY)
			rsge.lkey ^= 0x7700;
		else if (f->wrong == RECEIVE_RANGE)
			rsge.addr = (uintptr_t)w->sink.mem[1] + AREA - 8;
		TRY(post_recv(&w->b, &recv));
	}
	if (srq && receives)
		TRY(-ibv_modify_srq(w->b.srq, &limit, IBV_SRQ_LIMIT));
	for (unsigned int i = 0; i < 4; i++) {
		wr[i].wr_id = 100 + i;
		wr[i].opcode = i == 2 ? IBV_WR_SEND : i ? IBV_WR_RDMA_WRITE : first;
		wr[i].send_flags = signaled || i == 3 ? IBV_SEND_SIGNALED : 0;
		wr[i].sg_list = &sge[i];
		wr[i].num_sge = 1;
		wr[i].next = i < 3 ? &wr[i + 1] : NULL;
		sge[i] = (struct ibv_sge){ (uintptr_t)w->here.mem[1] + i * SLOT, 64,
					   w->here.mr[1]->lkey };
		wr[i].wr.rdma.remote_addr = (uintptr_t)w->there.mem[1] + i * SLOT;
		wr[i].wr.rdma.rkey = w->there.mr[1]->rkey;
	}
	after = wr[3];
	after.wr_id = 200;
	/* What is begun before a READ or an atomic fails is anybody's guess. */
	wr[2].send_flags |= IBV_SEND_FENCE;
	wr[1].opcode = f->op;
	wr[1].imm_data = htonl(77);
	if (f->op == IBV_WR_SEND_WITH_INV)
		wr[1].invalidate_rkey = w->there.mr[1]->rkey;
	if (is_atomic(f->op)) {
		wr[1].wr.atomic.rkey = w->there.mr[1]->rkey;
		wr[1].wr.atomic.compare_add = 1;
		sge[1].length = 8;
	}
	switch (f->wrong) {
	case LKEY:
		sge[1].lkey ^= 0x7700;
		break;
	case LOCAL_RANGE:
		sge[1].addr = (uintptr_t)w->here.mem[1] + AREA - 8;
		break;
	case LOCAL_RIGHT:
		extra = another(&w->here, w->a.pd, pinned, 0);
		TRY(!extra);
		sge[1].lkey = extra->lkey;
		break;
	case REMOTE_RANGE:
		wr[1].wr.rdma.remote_addr = (uintptr_t)w->there.mem[1] + AREA;
		break;
	case REMOTE_END:
		wr[1].wr.rdma.remote_addr = (uintptr_t)w->there.mem[1] + AREA - 8;
		break;
	case REMOTE_RIGHT:
		extra = another(&w->there, w->b.pd, pinned,
				f->op == IBV_WR_RDMA_READ || is_atomic(f->op) ?
				IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE :
				IBV_ACCESS_REMOTE_READ);
		break;
	case REMOTE_PD:
		pd = ibv_alloc_pd(w->b.ctx);
		TRY(!pd);
		extra = another(&w->there, pd, pinned, NP_RIGHTS);
		break;
	case REMOTE_DEAD:
	case REMOTE_DIED:
		extra = another(&w->there, w->b.pd, pinned, NP_RIGHTS);
		break;
	case MISALIGNED:
		wr[1].wr.atomic.remote_addr += 4;
		break;
	case TOO_LONG:
		sge[1].length = 201;
		break;
	default:
		break;
	}
	if (f->wrong == RKEY && is_atomic(f->op))
		wr[1].wr.atomic.rkey ^= 0x7700;
	else if (f->wrong == RKEY)
		wr[1].wr.rdma.rkey ^= 0x7700;
	if (f->wrong >= REMOTE_RIGHT && f->wrong <= REMOTE_DIED) {
		TRY(!extra);
		if (is_atomic(f->op))
			wr[1].wr.atomic.rkey = extra->rkey;
		else
			wr[1].wr.rdma.rkey = extra->rkey;
	}
	if (f->wrong == REMOTE_DIED) {
		struct ibv_send_wr use = after;

		use.wr.rdma.rkey = extra->rkey;
		TRY(post_send(&w->a, &use, v.ex));
		TRY(collect(w, r, &v, 0, 1));
	}
	if (f->wrong == REMOTE_DEAD || f->wrong == REMOTE_DIED) {
		TRY(drop(extra, pinned));
		extra = NULL;
	}
	/* Then a READ needs an answer of the peer's kernel. */
	if (first == IBV_WR_RDMA_READ && madvise(w->there.mem[1], AREA, MADV_PAGEOUT))
		TRY(-errno);
	TRY(post_send(&w->a, wr, v.ex));
	n = r->count[0] + (signaled ? 4 : 3);
	TRY(collect(w, r, &v, 0, n));
	r->state[0] = np_qp_state(w->a.qp);
	r->state[1] = np_qp_state(w->b.qp);
	TRY(post_send(&w->a, &after, v.ex));
	TRY(collect(w, r, &v, 0, n + 1));
	TRY(-ibv_modify_qp(w->b.qp, &error, IBV_QP_STATE));
	TRY(collect(w, r, &v, 1, srq ? taken : receives));
	for (int k = 0; k < 2; k++)
		TRY(note(r, k ? &w->b : &w->a, k ? &w->a : &w->b, k, false));
	TRY(take_events(&w->a, r, 0));
	TRY(take_events(&w->b, r, 1));
	TRY(side_end(&w->a));
	TRY(side_end(&w->b));
	if (extra)
		TRY(drop(extra, pinned));
	if (pd)
		TRY(ibv_dealloc_pd(pd));
	for (int i = 0; i < 6; i++)
		memcpy(r->mem[i], areas[i / 2]->mem[i % 2], AREA);
	return 0;
}

/* Of what a request that failed, or was flushed, has done to memory nothing is promised. */
static void forget_slot(const struct result *want, struct result *got, int area, size_t slot)
{
	memcpy(got->mem[area] + slot * SLOT, want->mem[area] + slot * SLOT, SLOT);
}

/*
 * Nothing waits for a READ that waits for its page, so something behind it may fail first. The READ
 * is then flushed, where a pinned region's would have succeeded; the cause is told as ever.
 */
TEST_F(verbs, errors_behind_a_read)
{
	static const struct fault behind[] = {
		{ LKEY, IBV_WR_SEND, IBV_WC_LOC_PROT_ERR },
		{ LOCAL_RANGE, IBV_WR_SEND, IBV_WC_LOC_PROT_ERR },
		{ TOO_LONG, IBV_WR_SEND, IBV_WC_REM_INV_REQ_ERR },
		{ NO_RECEIVE, IBV_WR_SEND, IBV_WC_RNR_RETRY_EXC_ERR },
		{ RECEIVE_LKEY, IBV_WR_SEND, IBV_WC_REM_OP_ERR },
	};
	unsigned int flushed = 0;

	for (unsigned int i = 0; i < ARRAY_SIZE(behind); i++) {
		const struct fault *f = &behind[i];
		struct seen *first = &self->result->wc[0][0];
		int line = 0, ret;

		ret = fail(self->pinned, f, IBV_WR_RDMA_READ, true, false, true, self->expected, &line);
		ASSERT_EQ(0, ret) TH_LOG("pinned, wrong %u, line %d: %s", f->wrong, line,
					 strerror(-ret));
		ASSERT_EQ(f->status, self->expected->wc[0][1].status);
		ret = fail(self->unpinned, f, IBV_WR_RDMA_READ, true, false, false, self->result, &line);
		ASSERT_EQ(0, ret) TH_LOG("wrong %u, line %d: %s", f->wrong, line, strerror(-ret));
		if (first->status == IBV_WC_WR_FLUSH_ERR) {
			flushed++;
			*first = self->expected->wc[0][0];
			forget_slot(self->expected, self->result, 1, 0);
		}
		EXPECT_EQ(NULL, difference(self->expected, self->result))
			TH_LOG("wrong %u: %s", f->wrong, difference(self->expected, self->result));
	}
	EXPECT_LT(0U, flushed) TH_LOG("no READ was caught unproven");
	stop = true;
	ASSERT_EQ(0, pthread_join(self->pager, NULL));
}

TEST_F(verbs, errors)
{
	/* Each signaled and unsignaled, each with receives of its own and with shared ones. */
	for (unsigned int i = 0; i < 2 * ARRAY_SIZE(faults); i++) {
		const struct fault *f = &faults[i / 2];
		const struct seen *wc = self->expected->wc[0];
		unsigned int *events = self->expected->events[1];
		const bool srq = (i + i / 2) % 2;
		int line = 0, ret;

		ret = fail(self->pinned, f, IBV_WR_RDMA_WRITE, i % 2, srq, true, self->expected,
			   &line);
		ASSERT_EQ(0, ret) TH_LOG("pinned, wrong %u op %u, line %d: %s", f->wrong, f->op,
					 line, strerror(-ret));
		/* Unsignaled, the first one says nothing. */
		wc += (f->wrong == REMOTE_DIED) + i % 2;
		EXPECT_EQ(f->status, wc->status) TH_LOG("wrong %u op %u", f->wrong, f->op);
		EXPECT_EQ(101UL, wc->wr_id);
		/* The other side hears of it, and both that the QP needs its SRQ no more. */
		EXPECT_EQ(f->status == IBV_WC_REM_ACCESS_ERR, events[IBV_EVENT_QP_ACCESS_ERR]);
		EXPECT_EQ(f->wrong == MISALIGNED, events[IBV_EVENT_QP_REQ_ERR]);
		EXPECT_EQ(srq && f->wrong >= TOO_LONG && f->wrong != NO_RECEIVE,
			  events[IBV_EVENT_SRQ_LIMIT_REACHED]);
		EXPECT_EQ(srq, events[IBV_EVENT_QP_LAST_WQE_REACHED]);
		EXPECT_EQ(srq, self->expected->events[0][IBV_EVENT_QP_LAST_WQE_REACHED]);
		ret = fail(self->unpinned, f, IBV_WR_RDMA_WRITE, i % 2, srq, false, self->result,
			   &line);
		if (f->wrong == NO_RECEIVE)
			forget_slot(self->expected, self->result, 3, 1);
		ASSERT_EQ(0, ret)
			TH_LOG("wrong %u op %u signaled %u srq %u, line %d: %s", f->wrong, f->op, i % 2,
			       srq, line, strerror(-ret));
		EXPECT_EQ(NULL, difference(self->expected, self->result))
			TH_LOG("wrong %u op %u signaled %u srq %u: %s", f->wrong, f->op, i % 2, srq,
			       difference(self->expected, self->result));
	}
	stop = true;
	ASSERT_EQ(0, pthread_join(self->pager, NULL));
}

/* --- what goes wrong without an answer ----------------------------------------------- */

static const struct fault unanswered[] = {
	{ LKEY, IBV_WR_SEND, IBV_WC_LOC_PROT_ERR },
	{ LKEY, IBV_WR_RDMA_WRITE, IBV_WC_LOC_PROT_ERR },
	{ LOCAL_RANGE, IBV_WR_SEND, IBV_WC_LOC_PROT_ERR },
	{ LOCAL_RANGE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WC_LOC_PROT_ERR },
	/* of the receive, the sender hears nothing */
	{ TOO_LONG, IBV_WR_SEND, IBV_WC_LOC_LEN_ERR },
	{ RECEIVE_LKEY, IBV_WR_SEND, IBV_WC_LOC_PROT_ERR },
	{ RECEIVE_RANGE, IBV_WR_SEND, IBV_WC_LOC_PROT_ERR },
};

/*
 * Three work requests, of which the second is wrong, or the first receive. A send queue that has
 * stopped is told to go on, and does one more.
 */
static int fail_unanswered(struct world *w, const struct fault *f, enum ibv_qp_type type,
			   bool signaled, bool pinned, struct result *r, int *line)
{
	const struct variant v = { .type = type, .local = UNPINNED, .ex = signaled };
	const bool sender = f->wrong == LKEY || f->wrong == LOCAL_RANGE;
	struct ibv_qp_attr go_on = { .qp_state = IBV_QPS_RTS, .cur_qp_state = IBV_QPS_SQE };
	struct ibv_ah_attr av = np_path(w->a.ctx, w->b.lid);
	struct ibv_ah *ah = ibv_create_ah(w->a.pd, &av);
	struct area *areas[] = { &w->here, &w->there, &w->sink };
	struct ibv_send_wr wr[3] = {}, after;
	struct ibv_sge sge[3];
	unsigned int n;
	int ret;

	memset(r->count, 0, sizeof(r->count));
	fill(w);
	TRY(!ah);
	TRY(side_start(&w->a, &v, pinned));
	TRY(side_start(&w->b, &v, pinned));
	TRY(side_connect(&w->a, &w->b, 7));
	TRY(side_connect(&w->b, &w->a, 7));
	for (unsigned int i = 0; i < 3; i++) {
		struct ibv_sge rsge = {
			(uintptr_t)w->sink.mem[1] + i * SLOT, 200, w->sink.mr[1]->lkey
		};
		struct ibv_recv_wr recv = { .wr_id = 1000 + i, .sg_list = &rsge, .num_sge = 1 };

		if (f->wrong == RECEIVE_LKEY)
			rsge.lkey ^= 0x7700;
		else if (f->wrong == RECEIVE_RANGE)
			rsge.addr = (uintptr_t)w->sink.mem[1] + AREA - 8;
		else if (f->wrong == TOO_LONG)
			rsge.length = 50;
		TRY(post_recv(&w->b, &recv));
	}
	for (unsigned int i = 0; i < 3; i++) {
		wr[i].wr_id = 100 + i;
		wr[i].opcode = i == 1 ? f->op : IBV_WR_SEND;
		wr[i].send_flags = signaled || i == 2 ? IBV_SEND_SIGNALED : 0;
		wr[i].sg_list = &sge[i];
		wr[i].num_sge = 1;
		wr[i].next = i < 2 ? &wr[i + 1] : NULL;
		wr[i].imm_data = htonl(77);
		sge[i] = (struct ibv_sge){ (uintptr_t)w->here.mem[1] + i * SLOT, 64,
					   w->here.mr[1]->lkey };
		if (type == IBV_QPT_UD) {
			wr[i].wr.ud.ah = ah;
			wr[i].wr.ud.remote_qpn = w->b.qp->qp_num;
			wr[i].wr.ud.remote_qkey = QKEY;
		} else {
			wr[i].wr.rdma.remote_addr = (uintptr_t)w->there.mem[0] + i * SLOT;
			wr[i].wr.rdma.rkey = w->there.mr[0]->rkey;
		}
	}
	after = wr[2];
	after.wr_id = 200;
	if (f->wrong == LKEY)
		sge[1].lkey ^= 0x7700;
	else if (f->wrong == LOCAL_RANGE)
		sge[1].addr = (uintptr_t)w->here.mem[1] + AREA - 8;
	TRY(post_send(&w->a, wr, v.ex));
	n = signaled ? 3 : sender ? 2 : 1;
	TRY(collect(w, r, &v, 0, n));
	TRY(collect(w, r, &v, 1, sender ? 1 : 3));
	r->state[0] = np_qp_state(w->a.qp);
	r->state[1] = np_qp_state(w->b.qp);
	if (sender) {
		/* As long as nobody has told it to go on, it does nothing. */
		TRY(post_send(&w->a, &after, v.ex));
		TRY(collect(w, r, &v, 0, ++n));
		TRY(-ibv_modify_qp(w->a.qp, &go_on, IBV_QP_STATE | IBV_QP_CUR_STATE));
		TRY(np_qp_state(w->a.qp) == IBV_QPS_RTS ? 0 : -ENOTCONN);
	}
	after.wr_id = 300;
	TRY(post_send(&w->a, &after, v.ex));
	TRY(collect(w, r, &v, 0, n + 1));
	TRY(collect(w, r, &v, 1, sender ? 2 : 3));
	for (int k = 0; k < 2; k++)
		TRY(note(r, k ? &w->b : &w->a, k ? &w->a : &w->b, k, false));
	TRY(take_events(&w->a, r, 0));
	TRY(take_events(&w->b, r, 1));
	TRY(side_end(&w->a));
	TRY(side_end(&w->b));
	TRY(ibv_destroy_ah(ah));
	for (int i = 0; i < 6; i++)
		memcpy(r->mem[i], areas[i / 2]->mem[i % 2], AREA);
	return 0;
}

TEST_F(verbs, errors_without_answers)
{
	static const enum ibv_qp_type types[] = { IBV_QPT_UC, IBV_QPT_UD };

	for (unsigned int i = 0; i < 4 * ARRAY_SIZE(unanswered); i++) {
		const struct fault *f = &unanswered[i / 4];
		const enum ibv_qp_type type = types[i / 2 % 2];
		const bool sender = f->wrong == LKEY || f->wrong == LOCAL_RANGE;
		const struct seen *wc = &self->expected->wc[!sender][sender && i % 2];
		int line = 0, ret;

		if (type == IBV_QPT_UD && f->op != IBV_WR_SEND)
			continue;
		ret = fail_unanswered(self->pinned, f, type, i % 2, true, self->expected, &line);
		ASSERT_EQ(0, ret) TH_LOG("pinned, type %u wrong %u op %u, line %d: %s", type,
					 f->wrong, f->op, line, strerror(-ret));
		EXPECT_EQ(f->status, wc->status) TH_LOG("wrong %u op %u", f->wrong, f->op);
		EXPECT_EQ(sender ? IBV_QPS_SQE : IBV_QPS_RTS, self->expected->state[0]);
		EXPECT_EQ(IBV_WC_SUCCESS,
			  self->expected->wc[0][self->expected->count[0] - 1].status);
		ret = fail_unanswered(self->unpinned, f, type, i % 2, false, self->result, &line);
		ASSERT_EQ(0, ret)
			TH_LOG("type %u wrong %u op %u signaled %u, line %d: %s", type, f->wrong,
			       f->op, i % 2, line, strerror(-ret));
		EXPECT_EQ(NULL, difference(self->expected, self->result))
			TH_LOG("type %u wrong %u op %u signaled %u: %s", type, f->wrong, f->op,
			       i % 2, difference(self->expected, self->result));
	}
	stop = true;
	ASSERT_EQ(0, pthread_join(self->pager, NULL));
}

/* The application ends its own QP while requests wait for pages, in the library: all are told. */
TEST_F(verbs, end_of_ones_own_queue_flushes_what_waits)
{
	const struct variant v = { .type = IBV_QPT_RC };
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct world *w = self->unpinned;
	struct result *r = self->result;
	unsigned int flushed = 0;

	stop = true;
	ASSERT_EQ(0, pthread_join(self->pager, NULL));
	for (unsigned int round = 0; round < ROUNDS; round++) {
		static const enum ibv_wr_opcode ops[] = {
			IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_ATOMIC_FETCH_AND_ADD,
		};
		struct ibv_send_wr wr[OPS] = {};
		struct ibv_sge sge[OPS];
		bool ended = false;

		memset(r->count, 0, sizeof(r->count));
		fill(w);
		ASSERT_EQ(0, side_start(&w->a, &v, false));
		ASSERT_EQ(0, side_start(&w->b, &v, false));
		ASSERT_EQ(0, side_connect(&w->a, &w->b, 7));
		ASSERT_EQ(0, side_connect(&w->b, &w->a, 7));
		for (unsigned int i = 0; i < OPS; i++) {
			sge[i] = (struct ibv_sge){ (uintptr_t)w->here.mem[1] + i * SLOT, 8,
						   w->here.mr[1]->lkey };
			wr[i].wr_id = i;
			wr[i].opcode = ops[round];
			wr[i].send_flags = i % 2 ? IBV_SEND_SIGNALED : 0;
			wr[i].sg_list = &sge[i];
			wr[i].num_sge = 1;
			wr[i].next = i + 1 < OPS ? &wr[i + 1] : NULL;
			if (is_atomic(ops[round])) {
				wr[i].wr.atomic.remote_addr = (uintptr_t)w->there.mem[1] + i * SLOT;
				wr[i].wr.atomic.rkey = w->there.mr[1]->rkey;
			} else {
				wr[i].wr.rdma.remote_addr = (uintptr_t)w->there.mem[1] + i * SLOT;
				wr[i].wr.rdma.rkey = w->there.mr[1]->rkey;
			}
		}
		ASSERT_EQ(0, madvise(w->there.mem[1], AREA, MADV_PAGEOUT));
		ASSERT_EQ(0, post_send(&w->a, wr, false));
		ASSERT_EQ(0, -ibv_modify_qp(w->a.qp, &error, IBV_QP_STATE));
		/* Of those before the first that is flushed only each second is told. */
		for (uint64_t seen = 0; seen < OPS;) {
			ASSERT_EQ(0, collect(w, r, &v, 0, r->count[0] + 1));
			struct seen *wc = &r->wc[0][r->count[0] - 1];

			if (wc->status == IBV_WC_SUCCESS) {
				ASSERT_FALSE(ended);
				ASSERT_EQ(1UL, wc->wr_id % 2);
			} else {
				ASSERT_EQ(IBV_WC_WR_FLUSH_ERR, wc->status);
				flushed++;
				ended = true;
			}
			ASSERT_LE(seen, wc->wr_id);
			ASSERT_GE(seen + 1, wc->wr_id);
			seen = wc->wr_id + 1;
		}
		EXPECT_EQ(IBV_QPS_ERR, np_qp_state(w->a.qp));
		ASSERT_EQ(0, side_end(&w->a));
		ASSERT_EQ(0, side_end(&w->b));
	}
	EXPECT_LT(0U, flushed) TH_LOG("nothing waited");
}

/* A page of the mapping ends, or is one of a device's registers from now on. */
static int take_page(uint8_t *page, bool registers)
{
	void *p;
	int fd;

	if (!registers)
		return munmap(page, PAGE) ? -errno : 0;
	fd = open("/sys/class/infiniband/" NP_OWNER_DEV "/device/resource0", O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	p = mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
	close(fd);
	return p == page ? 0 : -errno;
}

/* What is no memory any more is to the peer as if it were no part of the region. */
TEST_F(verbs, address_that_is_gone)
{
	static const enum ibv_wr_opcode ops[] = {
		IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
		IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD,
	};
	const struct variant v = { .type = IBV_QPT_RC };
	struct world *w = self->unpinned;
	struct result *r = self->result;

	for (size_t i = 0; i < 2 * ARRAY_SIZE(ops); i++) {
		const enum ibv_wr_opcode op = ops[i / 2];
		const bool registers = i % 2;
		uint8_t *data = np_map(4 * PAGE);
		struct ibv_mr *mr = npr_reg_mr(w->b.pd, data, 4 * PAGE, NP_RIGHTS);
		struct ibv_sge sge = { (uintptr_t)w->here.mem[1], 8, w->here.mr[1]->lkey };
		struct ibv_send_wr wr = {
			.wr_id = i,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IBV_WR_RDMA_READ,
			.send_flags = IBV_SEND_SIGNALED,
		};

		ASSERT_NE(NULL, mr);
		np_fill(data, 4 * PAGE, i);
		memset(r->count, 0, sizeof(r->count));
		ASSERT_EQ(0, side_start(&w->a, &v, false));
		ASSERT_EQ(0, side_start(&w->b, &v, false));
		ASSERT_EQ(0, side_connect(&w->a, &w->b, 7));
		ASSERT_EQ(0, side_connect(&w->b, &w->a, 7));
		wr.wr.rdma.remote_addr = (uintptr_t)data + 2 * PAGE;
		wr.wr.rdma.rkey = mr->rkey;
		ASSERT_EQ(0, post_send(&w->a, &wr, false));
		ASSERT_EQ(0, collect(w, r, &v, 0, 1));
		ASSERT_EQ(IBV_WC_SUCCESS, r->wc[0][0].status);
		ASSERT_EQ(0, take_page(data + 2 * PAGE, registers));
		wr.opcode = op;
		if (is_atomic(op))
			wr.wr.atomic.rkey = mr->rkey;
		ASSERT_EQ(0, post_send(&w->a, &wr, false));
		ASSERT_EQ(0, collect(w, r, &v, 0, 2));
		EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, r->wc[0][1].status)
			TH_LOG("op %u registers %d", op, registers);
		wr.opcode = IBV_WR_SEND;
		ASSERT_EQ(0, post_send(&w->a, &wr, false));
		ASSERT_EQ(0, collect(w, r, &v, 0, 3));
		EXPECT_EQ(IBV_WC_WR_FLUSH_ERR, r->wc[0][2].status);
		EXPECT_EQ(IBV_QPS_ERR, np_qp_state(w->a.qp));
		EXPECT_EQ(IBV_QPS_ERR, np_qp_state(w->b.qp));
		EXPECT_EQ(-1, np_differs(data, 2 * PAGE, i));
		ASSERT_EQ(0, take_events(&w->b, r, 1));
		EXPECT_EQ(1U, r->events[1][IBV_EVENT_QP_ACCESS_ERR]);
		ASSERT_EQ(0, side_end(&w->a));
		ASSERT_EQ(0, side_end(&w->b));
		ASSERT_EQ(0, npr_dereg_mr(mr));
		ASSERT_EQ(0, munmap(data, 4 * PAGE));
	}
}

TEST_HARNESS_MAIN
