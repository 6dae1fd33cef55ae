// SPDX-License-Identifier: GPL-2.0
/*
 * Every verb against its like on pinned memory: one program is run twice, with plain
 * verbs on pinned regions and with libnprdma on unpinned ones whose pages are paged out
 * all the time. Memory, completions and their order, the states of the QPs and what is said
 * of them and their SRQs in asynchronous events have to be equal.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include <nprdma/nprdma.h>

#include "np_harness.h"

#define OPS	16			/* of one chain */
#define ROUNDS	3
#define SLOT	(4 * PAGE)
#define AREA	(OPS * SLOT)
#define INLINE	64U
#define UD_MAX	1024U
#define QKEY	0x1234
#define MAX_WC	(4 * OPS * ROUNDS)
#define EVENTS	(IBV_EVENT_WQ_FATAL + 1)

enum local { PINNED, UNPINNED, MIXED, INLINED, LOCALS };
enum signals { EVERY, FOURTH, LAST, SIGNALS };
enum wait { POLL, EVENT, SOLICITED, WAITS };

struct variant {
	enum ibv_qp_type type;
	unsigned int local;		/* enum local */
	unsigned int remote;		/* PINNED or UNPINNED */
	unsigned int srq;
	unsigned int signals;		/* enum signals */
	unsigned int ex;		/* ibv_wr_*() and ibv_start_poll() */
	unsigned int wait;		/* enum wait */
};

/* The same place twice: [0] is pinned, [1] is what the test is about. */
struct area {
	uint8_t *mem[2];
	struct ibv_mr *mr[2];
};

struct side {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	uint16_t lid;
	struct npr_context *lib;
	struct ibv_qp *fence;		/* see take_events() */
	/* of one run */
	bool pinned;			/* plain verbs */
	struct ibv_comp_channel *channel[2];
	struct ibv_cq *cq[2];		/* send, receive */
	struct npr_cq *lcq[2];
	struct ibv_srq *srq;
	struct npr_srq *lsrq;
	struct ibv_qp *qp;
	struct npr_qp *lqp;
};

struct world {
	struct side a, b;		/* who asks, who is asked */
	struct area here, there, sink;	/* a's buffers, b's memory, b's receives */
};

/* What an application sees of a completion. */
struct seen {
	uint64_t wr_id;
	int status, opcode;
	uint32_t byte_len, imm, flags, qp, src_qp, slid, sl;
};

struct result {
	struct seen wc[2][MAX_WC];	/* of a's sends, b's receives */
	unsigned int count[2];
	unsigned int solicited;		/* times that b was woken for such */
	int state[2];
	unsigned int events[2][EVENTS];	/* asynchronous ones, of a side's QP and SRQ */
	uint8_t *mem[6];
};

/* --- one side ------------------------------------------------------------------------ */

static int side_open(struct side *s, const char *dev)
{
	struct ibv_qp_init_attr fence = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1, .max_send_sge = 1 },
	};
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 1, .max_sge = 1 } };
	struct ibv_port_attr port;

	memset(s, 0, sizeof(*s));
	s->ctx = np_open_device(dev);
	if (!s->ctx || ibv_query_port(s->ctx, 1, &port))
		return -errno;
	s->lid = port.lid;
	s->pd = ibv_alloc_pd(s->ctx);
	s->lib = npr_open(s->ctx, 0);
	if (!s->pd || !s->lib)
		return -errno;
	fence.srq = ibv_create_srq(s->pd, &srq);
	fence.send_cq = ibv_create_cq(s->ctx, 1, NULL, NULL, 0);
	fence.recv_cq = fence.send_cq;
	if (!fence.srq || !fence.send_cq)
		return -errno;
	s->fence = ibv_create_qp(s->pd, &fence);
	return s->fence ? 0 : -errno;
}

static int area_open(struct area *area, struct side *s, bool pinned, int access)
{
	for (int k = 0; k < 2; k++) {
		area->mem[k] = np_map(AREA);
		if (!area->mem[k])
			return -ENOMEM;
		area->mr[k] = pinned || !k ? ibv_reg_mr(s->pd, area->mem[k], AREA, access) :
					     npr_reg_mr(s->pd, area->mem[k], AREA, access);
		if (!area->mr[k])
			return -errno;
	}
	return 0;
}

/* A QP of the variant's type in INIT, with a CQ for each direction. */
static int side_start(struct side *s, const struct variant *v, bool pinned)
{
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 2 * OPS, .max_sge = 3 } };
	struct ibv_qp_init_attr init = {
		.qp_type = v->type,
		.cap = {
			.max_send_wr = 4 * OPS,
			.max_recv_wr = 2 * OPS,
			.max_send_sge = 3,
			.max_recv_sge = 3,
			.max_inline_data = INLINE,
		},
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qkey = QKEY,
	};

	s->pinned = pinned;
	s->lqp = NULL;
	for (int k = 0; k < 2; k++) {
		s->channel[k] = ibv_create_comp_channel(s->ctx);
		if (!s->channel[k])
			return -errno;
		s->cq[k] = ibv_create_cq(s->ctx, 8 * OPS, NULL, s->channel[k], 0);
		if (!s->cq[k])
			return -errno;
		if (pinned)
			continue;
		s->lcq[k] = npr_attach_cq(s->lib, s->cq[k]);
		if (!s->lcq[k])
			return -errno;
	}
	if (v->srq && !s->srq) {
		s->srq = ibv_create_srq(s->pd, &srq);
		if (!s->srq)
			return -errno;
		if (!pinned) {
			s->lsrq = npr_attach_srq(s->lib, s->srq);
			if (!s->lsrq)
				return -errno;
		}
	}
	init.send_cq = s->cq[0];
	init.recv_cq = s->cq[1];
	init.srq = s->srq;
	s->qp = ibv_create_qp(s->pd, &init);
	if (!s->qp)
		return -errno;
	if (v->type == IBV_QPT_RC)
		attr.qp_access_flags = NP_RIGHTS & ~IBV_ACCESS_LOCAL_WRITE;
	else if (v->type == IBV_QPT_UC)
		attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
	/* Before or after it is connected: applications do either. */
	if (!pinned && v->ex) {
		s->lqp = npr_attach_qp(s->lcq[0], s->qp, NULL);
		if (!s->lqp)
			return -errno;
	}
	return -ibv_modify_qp(s->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			      (v->type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
}

static int side_connect(struct side *s, const struct side *to, unsigned int rnr_retry)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = to->qp->qp_num,
		.max_dest_rd_atomic = 4,
		.min_rnr_timer = 1,
		.ah_attr = { .dlid = to->lid, .port_num = 1 },
	};
	int mask = IBV_QP_STATE, ret;

	if (s->qp->qp_type != IBV_QPT_UD)
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (s->qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	ret = ibv_modify_qp(s->qp, &attr, mask);
	if (ret)
		return -ret;
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = rnr_retry,
		.max_rd_atomic = 4,
	};
	mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (s->qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			IBV_QP_MAX_QP_RD_ATOMIC;
	ret = ibv_modify_qp(s->qp, &attr, mask);
	if (ret || s->pinned || s->lqp)
		return -ret;
	s->lqp = npr_attach_qp(s->lcq[0], s->qp, NULL);
	return s->lqp ? 0 : -errno;
}

static int side_end(struct side *s)
{
	int ret = 0;

	if (!s->pinned)
		ret |= npr_detach_qp(s->lqp);
	s->lqp = NULL;
	ret |= ibv_destroy_qp(s->qp);
	if (s->srq) {
		if (!s->pinned)
			ret |= npr_detach_srq(s->lsrq);
		ret |= ibv_destroy_srq(s->srq);
		s->srq = NULL;
	}
	for (int k = 0; k < 2; k++) {
		if (!s->pinned)
			ret |= npr_detach_cq(s->lcq[k]);
		ret |= ibv_destroy_cq(s->cq[k]);
		ret |= ibv_destroy_comp_channel(s->channel[k]);
	}
	return ret;
}

static int post_recv(struct side *s, struct ibv_recv_wr *wr)
{
	struct ibv_recv_wr *bad;

	if (s->srq)
		return s->pinned ? -ibv_post_srq_recv(s->srq, wr, &bad) :
				   npr_post_srq_recv(s->lsrq, wr, &bad);
	return s->pinned ? -ibv_post_recv(s->qp, wr, &bad) : npr_post_recv(s->lqp, wr, &bad);
}

/* What an application would write that builds its work requests one by one. */
static int post_ex(struct ibv_qp_ex *q, struct ibv_send_wr *wr)
{
	ibv_wr_start(q);
	for (; wr; wr = wr->next) {
		q->wr_id = wr->wr_id;
		q->wr_flags = wr->send_flags & ~IBV_SEND_INLINE;
		switch (wr->opcode) {
		case IBV_WR_SEND:
			ibv_wr_send(q);
			break;
		case IBV_WR_SEND_WITH_IMM:
			ibv_wr_send_imm(q, wr->imm_data);
			break;
		case IBV_WR_SEND_WITH_INV:
			ibv_wr_send_inv(q, wr->invalidate_rkey);
			break;
		case IBV_WR_RDMA_WRITE:
			ibv_wr_rdma_write(q, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
			break;
		case IBV_WR_RDMA_WRITE_WITH_IMM:
			ibv_wr_rdma_write_imm(q, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr,
					      wr->imm_data);
			break;
		case IBV_WR_RDMA_READ:
			ibv_wr_rdma_read(q, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
			break;
		case IBV_WR_ATOMIC_CMP_AND_SWP:
			ibv_wr_atomic_cmp_swp(q, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr,
					      wr->wr.atomic.compare_add, wr->wr.atomic.swap);
			break;
		case IBV_WR_ATOMIC_FETCH_AND_ADD:
			ibv_wr_atomic_fetch_add(q, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr,
						wr->wr.atomic.compare_add);
			break;
		case IBV_WR_BIND_MW:
			ibv_wr_bind_mw(q, wr->bind_mw.mw, wr->bind_mw.rkey, &wr->bind_mw.bind_info);
			continue;
		case IBV_WR_LOCAL_INV:
			ibv_wr_local_inv(q, wr->invalidate_rkey);
			continue;
		default:
			ibv_wr_abort(q);
			return -EINVAL;
		}
		if (q->qp_base.qp_type == IBV_QPT_UD)
			ibv_wr_set_ud_addr(q, wr->wr.ud.ah, wr->wr.ud.remote_qpn,
					   wr->wr.ud.remote_qkey);
		if (wr->send_flags & IBV_SEND_INLINE && wr->num_sge == 1)
			ibv_wr_set_inline_data(q, (void *)(uintptr_t)wr->sg_list->addr,
					       wr->sg_list->length);
		else if (wr->num_sge == 1)
			ibv_wr_set_sge(q, wr->sg_list->lkey, wr->sg_list->addr,
				       wr->sg_list->length);
		else
			ibv_wr_set_sge_list(q, wr->num_sge, wr->sg_list);
	}
	return -ibv_wr_complete(q);
}

static int post_send(struct side *s, struct ibv_send_wr *wr, bool ex)
{
	struct ibv_send_wr *bad;

	if (s->pinned)
		return -ibv_post_send(s->qp, wr, &bad);
	return ex ? post_ex(npr_qp_to_qp_ex(s->lqp), wr) : npr_post_send(s->lqp, wr, &bad);
}

/* One completion of a direction: 1, 0 or -errno. */
static int poll_one(struct side *s, int k, bool ex, struct ibv_wc *wc)
{
	struct ibv_poll_cq_attr attr = {};
	struct ibv_cq_ex *q;
	int ret;

	memset(wc, 0, sizeof(*wc));
	if (s->pinned)
		return ibv_poll_cq(s->cq[k], 1, wc);
	if (!ex)
		return npr_poll_cq(s->lcq[k], 1, wc);
	q = npr_cq_to_cq_ex(s->lcq[k]);
	ret = ibv_start_poll(q, &attr);
	if (ret)
		return ret == ENOENT ? 0 : -ret;
	wc->wr_id = q->wr_id;
	wc->status = q->status;
	wc->opcode = ibv_wc_read_opcode(q);
	wc->byte_len = ibv_wc_read_byte_len(q);
	wc->imm_data = ibv_wc_read_imm_data(q);
	wc->qp_num = ibv_wc_read_qp_num(q);
	wc->src_qp = ibv_wc_read_src_qp(q);
	wc->wc_flags = ibv_wc_read_wc_flags(q);
	wc->slid = ibv_wc_read_slid(q);
	wc->sl = ibv_wc_read_sl(q);
	ibv_end_poll(q);
	return 1;
}

/* The library needs to be called for what is under way, whoever waits for what. */
static int note(struct result *r, struct side *s, const struct side *other, int k, bool ex)
{
	struct ibv_wc wc;
	struct seen *seen;
	int ret = poll_one(s, k, ex, &wc);

	if (ret <= 0)
		return ret;
	if (r->count[k] == MAX_WC)
		return -EOVERFLOW;
	seen = &r->wc[k][r->count[k]++];
	*seen = (struct seen){ .wr_id = wc.wr_id, .status = wc.status };
	seen->qp = wc.qp_num == s->qp->qp_num;
	if (wc.status)
		return 1;
	seen->opcode = wc.opcode;
	seen->byte_len = wc.byte_len;
	seen->flags = wc.wc_flags;
	seen->imm = wc.wc_flags & IBV_WC_WITH_IMM ? wc.imm_data : 0;
	seen->src_qp = wc.src_qp == other->qp->qp_num ? 1 : wc.src_qp ? 2 : 0;
	seen->slid = wc.slid;
	seen->sl = wc.sl;
	return 1;
}

static int arm(struct side *s, int k, bool solicited)
{
	return s->pinned ? -ibv_req_notify_cq(s->cq[k], solicited) :
			   npr_req_notify_cq(s->lcq[k], solicited);
}

/* 1: an event, which is acknowledged. */
static int await_event(struct side *s, int k)
{
	struct pollfd p = { .fd = s->channel[k]->fd, .events = POLLIN };
	struct ibv_cq *cq;
	void *context;

	if (!s->pinned)
		return npr_wait_cq(s->lcq[k], NP_WAIT_MS);
	if (poll(&p, 1, NP_WAIT_MS) != 1)
		return 0;
	if (ibv_get_cq_event(s->channel[k], &cq, &context))
		return -errno;
	ibv_ack_cq_events(cq, 1);
	return 1;
}

/* Until @k has @n completions. */
static int collect(struct world *w, struct result *r, const struct variant *v, int k,
		   unsigned int n)
{
	struct side *s = k ? &w->b : &w->a, *other = k ? &w->a : &w->b;
	const bool solicited = k && v->wait == SOLICITED;
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	bool armed = false;

	while (r->count[k] < n) {
		int ret = note(r, s, other, k, v->ex);

		if (ret < 0)
			return ret;
		if (ret) {
			armed = false;
			continue;
		}
		if (np_now_ms() > deadline)
			return -ETIMEDOUT;
		if (v->wait == POLL)
			continue;
		if (armed) {
			ret = await_event(s, k);
			if (ret <= 0)
				return ret ? ret : -ETIME;
			r->solicited += solicited;
		} else {
			ret = arm(s, k, solicited);
			if (ret)
				return ret;
		}
		armed = !armed;
	}
	return 0;
}

/* 1: the last one, of the fence. */
static int take_event(struct side *s, unsigned int *events)
{
	struct pollfd p = { .fd = s->ctx->async_fd, .events = POLLIN };
	struct ibv_async_event event;
	bool fence, ours;

	if (poll(&p, 1, NP_WAIT_MS) != 1)
		return -ETIME;
	if (ibv_get_async_event(s->ctx, &event))
		return -errno;
	switch (event.event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		fence = event.element.qp == s->fence;
		ours = event.element.qp == s->qp;
		break;
	case IBV_EVENT_SRQ_LIMIT_REACHED:
	case IBV_EVENT_SRQ_ERR:
		fence = false;
		ours = event.element.srq == s->srq;
		break;
	default:
		fence = false;
		ours = false;
	}
	events[event.event_type] += ours;
	ibv_ack_async_event(&event);
	return fence ? 1 : ours ? 0 : -EBADMSG;
}

/*
 * All events of a side up to now. They come in their order, so they were all when one has come
 * that is asked for: a QP that fails is done with its SRQ.
 */
static int take_events(struct side *s, struct result *r, int k)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	int ret;

	memset(r->events[k], 0, sizeof(r->events[k]));
	ret = -ibv_modify_qp(s->fence, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			     IBV_QP_ACCESS_FLAGS);
	if (ret)
		return ret;
	attr.qp_state = IBV_QPS_ERR;
	ret = -ibv_modify_qp(s->fence, &attr, IBV_QP_STATE);
	while (!ret)
		ret = take_event(s, r->events[k]);
	if (ret < 0)
		return ret;
	attr.qp_state = IBV_QPS_RESET;
	return -ibv_modify_qp(s->fence, &attr, IBV_QP_STATE);
}

/* --- the program ---------------------------------------------------------------------- */

static const enum ibv_wr_opcode rc_ops[] = {
	IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND, IBV_WR_ATOMIC_FETCH_AND_ADD,
	IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE,
	IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_RDMA_READ, IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM,
	IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
};
static const enum ibv_wr_opcode uc_ops[] = {
	IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM,
};
static const enum ibv_wr_opcode ud_ops[] = { IBV_WR_SEND, IBV_WR_SEND_WITH_IMM };
static const unsigned int sizes[] = {
	8, 3 * PAGE + 17, 1, PAGE, 63, PAGE + 1, 0, 2 * PAGE, 1000, 64, PAGE - 1,
};

static bool is_atomic(enum ibv_wr_opcode op)
{
	return op == IBV_WR_ATOMIC_FETCH_AND_ADD || op == IBV_WR_ATOMIC_CMP_AND_SWP;
}

static bool is_received(enum ibv_wr_opcode op)
{
	return op == IBV_WR_SEND || op == IBV_WR_SEND_WITH_IMM ||
	       op == IBV_WR_RDMA_WRITE_WITH_IMM;
}

/* @len bytes at @off of @area as the variant wants them; the number of entries. */
static int make_sges(struct ibv_sge *sge, const struct area *area, size_t off, size_t len,
		     enum local local)
{
	const size_t part[] = { len / 3, len / 2, len - len / 3 - len / 2 };
	int n = 0;

	if (local != MIXED) {
		int k = local == UNPINNED;

		sge[0] = (struct ibv_sge){ (uintptr_t)area->mem[k] + off, len, area->mr[k]->lkey };
		return 1;
	}
	for (int i = 0; i < 3; i++) {
		if (!part[i])
			continue;
		sge[n++] = (struct ibv_sge){ (uintptr_t)area->mem[i & 1] + off, part[i],
					     area->mr[i & 1]->lkey };
		off += part[i];
	}
	return n;
}

static int post_receives(struct world *w, const struct variant *v, unsigned int round,
			 unsigned int n)
{
	/* What is inlined comes from anywhere, and has to go somewhere. */
	const enum local local = v->local == INLINED ? UNPINNED : v->local;

	for (unsigned int i = 0; i < n; i++) {
		struct ibv_sge sge[3];
		struct ibv_recv_wr wr = {
			.wr_id = 1000 * (round + 1) + i,
			.sg_list = sge,
			.num_sge = make_sges(sge, &w->sink, i * SLOT + i, SLOT - 2 * OPS, local),
		};
		int ret = post_recv(&w->b, &wr);

		if (ret)
			return ret;
	}
	return 0;
}

struct chain {
	struct ibv_send_wr wr[OPS];
	struct ibv_sge sge[OPS][3];
	unsigned int n[2];	/* completions that each side gets of it */
};

static void build(struct chain *c, struct world *w, const struct variant *v, unsigned int round,
		  struct ibv_ah *ah)
{
	const enum ibv_wr_opcode *ops = v->type == IBV_QPT_RC ? rc_ops :
					v->type == IBV_QPT_UC ? uc_ops : ud_ops;
	const unsigned int nr = v->type == IBV_QPT_RC ? ARRAY_SIZE(rc_ops) :
				v->type == IBV_QPT_UC ? ARRAY_SIZE(uc_ops) : ARRAY_SIZE(ud_ops);
	struct ibv_send_wr *wr = c->wr;

	memset(c, 0, sizeof(*c));
	for (unsigned int i = 0; i < OPS; i++) {
		/* The last is what a receiver waits for that wants solicited events only. */
		enum ibv_wr_opcode op = i == OPS - 1 ? IBV_WR_SEND_WITH_IMM :
						       ops[(i + round) % nr];
		enum local local = v->local;
		unsigned int len = sizes[(7 * i + round) % ARRAY_SIZE(sizes)];
		size_t at = i * SLOT, far = i * SLOT;

		if (v->type == IBV_QPT_UD && len > UD_MAX)
			len %= UD_MAX;
		if (local == INLINED) {
			if (op == IBV_WR_RDMA_READ || is_atomic(op))
				local = UNPINNED;
			else if (len > INLINE)
				len %= INLINE;
		}
		if (is_atomic(op)) {
			len = 8;
			if (local == MIXED)
				local = i & 1 ? UNPINNED : PINNED;
		} else {
			at += (13 * i) % 64;
			far += (5 * i) % 64;
		}
		/* What was just written, too. */
		if (op == IBV_WR_RDMA_READ && i && wr[i - 1].opcode == IBV_WR_RDMA_WRITE)
			far = wr[i - 1].wr.rdma.remote_addr -
			      (uintptr_t)w->there.mem[v->remote];
		wr[i].wr_id = 100 * (round + 1) + i;
		wr[i].opcode = op;
		wr[i].sg_list = c->sge[i];
		wr[i].num_sge = make_sges(c->sge[i], &w->here, at, len, local);
		wr[i].imm_data = htonl(0xabc00 + i);
		if (local == INLINED)
			wr[i].send_flags |= IBV_SEND_INLINE;
		if (v->signals == EVERY || i == OPS - 1 || (v->signals == FOURTH && i % 4 == 3)) {
			wr[i].send_flags |= IBV_SEND_SIGNALED;
			c->n[0]++;
		}
		if (i == OPS - 1)
			wr[i].send_flags |= IBV_SEND_SOLICITED;
		c->n[1] += is_received(op);
		if (is_atomic(op)) {
			wr[i].wr.atomic.remote_addr = (uintptr_t)w->there.mem[v->remote] + far;
			wr[i].wr.atomic.rkey = w->there.mr[v->remote]->rkey;
			wr[i].wr.atomic.compare_add = op == IBV_WR_ATOMIC_FETCH_AND_ADD || round & 1 ?
				i : np_pattern(3, far / 8);
			wr[i].wr.atomic.swap = 1234567 + i;
		} else if (v->type == IBV_QPT_UD) {
			wr[i].wr.ud.ah = ah;
			wr[i].wr.ud.remote_qpn = w->b.qp->qp_num;
			wr[i].wr.ud.remote_qkey = QKEY;
		} else {
			wr[i].wr.rdma.remote_addr = (uintptr_t)w->there.mem[v->remote] + far;
			wr[i].wr.rdma.rkey = w->there.mr[v->remote]->rkey;
		}
		if (i)
			wr[i - 1].next = &wr[i];
	}
}

/* The side that is asked waits for itself. */
struct receiver {
	struct world *w;
	const struct variant *v;
	struct result *r;
	unsigned int n;
	int ret;
};

static void *receive(void *arg)
{
	struct receiver *r = arg;

	r->ret = collect(r->w, r->r, r->v, 1, r->n);
	return NULL;
}

static void fill(struct world *w)
{
	for (int k = 0; k < 2; k++) {
		np_fill(w->here.mem[k], AREA, 1 + k);
		np_fill(w->there.mem[k], AREA, 3);
		np_fill(w->sink.mem[k], AREA, 5 + k);
	}
}

/* Runs the variant once: 0, or -errno with the line in *@line. */
#define TRY(call) do {							\
	ret = (call);							\
	if (ret) {							\
		*line = __LINE__;					\
		return ret;						\
	}								\
} while (0)

static int run(struct world *w, const struct variant *v, bool pinned, struct result *r, int *line)
{
	struct ibv_ah_attr av = { .dlid = w->b.lid, .port_num = 1 };
	struct ibv_ah *ah = ibv_create_ah(w->a.pd, &av);
	struct area *areas[] = { &w->here, &w->there, &w->sink };
	struct ibv_srq_attr limit = { .srq_limit = 2 };
	struct receiver receiver = { w, v, r };
	struct chain chain;
	unsigned int n = 0;
	pthread_t thread;
	int ret;

	memset(r->count, 0, sizeof(r->count));
	r->solicited = 0;
	fill(w);
	TRY(!ah);
	TRY(side_start(&w->a, v, pinned));
	TRY(side_start(&w->b, v, pinned));
	TRY(side_connect(&w->a, &w->b, 7));
	TRY(side_connect(&w->b, &w->a, 7));
	for (unsigned int round = 0; round < ROUNDS; round++) {
		build(&chain, w, v, round, ah);
		TRY(post_receives(w, v, round, chain.n[1]));
		/* Until one is left of them. */
		if (v->srq)
			TRY(-ibv_modify_srq(w->b.srq, &limit, IBV_SRQ_LIMIT));
		n += chain.n[0];
		receiver.n += chain.n[1];
		TRY(pthread_create(&thread, NULL, receive, &receiver));
		ret = post_send(&w->a, chain.wr, v->ex);
		if (!ret)
			ret = collect(w, r, v, 0, n);
		/* After an error it gives up in time. */
		pthread_join(thread, NULL);
		TRY(ret);
		TRY(receiver.ret);
	}
	/* One of each round is solicited, the others wake nobody. */
	TRY(r->solicited > ROUNDS ? -EBADMSG : 0);
	/* None too many */
	for (int k = 0; k < 2; k++)
		TRY(note(r, k ? &w->b : &w->a, k ? &w->a : &w->b, k, false));
	r->state[0] = np_qp_state(w->a.qp);
	r->state[1] = np_qp_state(w->b.qp);
	TRY(take_events(&w->a, r, 0));
	TRY(take_events(&w->b, r, 1));
	TRY(side_end(&w->a));
	TRY(side_end(&w->b));
	TRY(ibv_destroy_ah(ah));
	for (int i = 0; i < 6; i++)
		memcpy(r->mem[i], areas[i / 2]->mem[i % 2], AREA);
	return 0;
}

/* --- both, compared ------------------------------------------------------------------- */

FIXTURE(verbs) {
	struct np_usage before;
	struct world *pinned, *unpinned;
	struct result *expected, *result;
	pthread_t pager;
};

static atomic_bool stop;

/* Whatever is used is absent again and again. */
static void *page_out(void *arg)
{
	struct world *w = arg;
	struct area *areas[] = { &w->here, &w->there, &w->sink };

	while (!stop)
		for (int i = 0; i < 3; i++)
			madvise(areas[i]->mem[1], AREA, MADV_PAGEOUT);
	return NULL;
}

static struct world *make_world(bool pinned)
{
	struct world *w = calloc(1, sizeof(*w));

	if (!w || side_open(&w->a, NP_PEER_DEV) || side_open(&w->b, NP_OWNER_DEV) ||
	    area_open(&w->here, &w->a, pinned, IBV_ACCESS_LOCAL_WRITE) ||
	    area_open(&w->there, &w->b, pinned, NP_RIGHTS) ||
	    area_open(&w->sink, &w->b, pinned, IBV_ACCESS_LOCAL_WRITE))
		return NULL;
	return w;
}

static struct result *make_result(void)
{
	struct result *r = calloc(1, sizeof(*r));

	for (int i = 0; r && i < 6; i++) {
		r->mem[i] = malloc(AREA);
		if (!r->mem[i])
			return NULL;
	}
	return r;
}

FIXTURE_SETUP(verbs)
{
	ASSERT_EQ(0, np_usage_start(&self->before));
	ASSERT_EQ(0, np_set_fault_around(NP_FAULT_AROUND));
	self->pinned = make_world(true);
	ASSERT_NE(NULL, self->pinned);
	self->unpinned = make_world(false);
	ASSERT_NE(NULL, self->unpinned) TH_LOG("%s", strerror(errno));
	self->expected = make_result();
	self->result = make_result();
	ASSERT_NE(NULL, self->expected);
	ASSERT_NE(NULL, self->result);
	ASSERT_EQ(0, pthread_create(&self->pager, NULL, page_out, self->unpinned));
}

FIXTURE_TEARDOWN_PARENT(verbs)
{
	NP_CHECK_USAGE(&self->before);
}

static const char *const side_names[] = { "send", "receive" };

/* Where the two differ, for a human; NULL if they do not. */
static const char *difference(const struct result *want, const struct result *got)
{
	static char text[300];

	for (int k = 0; k < 2; k++) {
		for (unsigned int i = 0; i < want->count[k] && i < got->count[k]; i++) {
			const struct seen *x = &want->wc[k][i], *y = &got->wc[k][i];

			if (!memcmp(x, y, sizeof(*x)))
				continue;
			snprintf(text, sizeof(text),
				 "%s completion %u: want id %lu status %d opcode %d len %u imm %x flags %x qp %u src %u lid %u sl %u, got id %lu status %d opcode %d len %u imm %x flags %x qp %u src %u lid %u sl %u",
				 side_names[k], i, (unsigned long)x->wr_id, x->status, x->opcode,
				 x->byte_len, x->imm, x->flags, x->qp, x->src_qp, x->slid, x->sl,
				 (unsigned long)y->wr_id, y->status, y->opcode, y->byte_len, y->imm,
				 y->flags, y->qp, y->src_qp, y->slid, y->sl);
			return text;
		}
		if (want->count[k] != got->count[k]) {
			snprintf(text, sizeof(text), "%u %s completions, not %u", got->count[k],
				 side_names[k], want->count[k]);
			return text;
		}
		if (want->state[k] != got->state[k]) {
			snprintf(text, sizeof(text), "QP of the %s side in state %d, not %d",
				 k ? "asked" : "asking", got->state[k], want->state[k]);
			return text;
		}
		for (int i = 0; i < EVENTS; i++) {
			if (want->events[k][i] == got->events[k][i])
				continue;
			snprintf(text, sizeof(text), "%u events \"%s\" on the %s side, not %u",
				 got->events[k][i], ibv_event_type_str(i),
				 k ? "asked" : "asking", want->events[k][i]);
			return text;
		}
	}
	for (int i = 0; i < 6; i++) {
		for (size_t at = 0; at < AREA; at++) {
			if (want->mem[i][at] == got->mem[i][at])
				continue;
			snprintf(text, sizeof(text), "memory %d differs at slot %zu + %zu", i,
				 at / SLOT, at % SLOT);
			return text;
		}
	}
	return NULL;
}

/*
 * All products of a type's local, remote, receive side and signals; the way of posting and
 * of waiting goes round so that each of their pairs with the others comes up.
 */
static void run_all(struct __test_metadata *_metadata, FIXTURE_DATA(verbs) *self,
		    enum ibv_qp_type type)
{
	struct area *areas[] = { &self->unpinned->here, &self->unpinned->there,
				 &self->unpinned->sink };
	unsigned int pairs[7][7] = {}, n = 0;
	const long pinned = np_pinned();

	for (unsigned int i = 0; i < LOCALS * 2 * 2 * SIGNALS; i++) {
		const unsigned int local = i % LOCALS, remote = i / LOCALS % 2;
		const unsigned int srq = i / LOCALS / 2 % 2, signals = i / LOCALS / 4;
		const struct variant v = {
			.type = type,
			.local = local,
			.remote = remote,
			.srq = srq,
			.signals = signals,
			.ex = (local + remote + srq + signals) % 2,
			.wait = (local + 2 * remote + srq + signals) % WAITS,
		};
		const unsigned int value[] = { v.local, v.remote, v.srq, v.signals, v.ex, v.wait };
		int line = 0, ret;

		/* A peer's unpinned memory is for RC. */
		if (type != IBV_QPT_RC && remote)
			continue;
		for (unsigned int x = 0; x < ARRAY_SIZE(value); x++)
			for (unsigned int y = 0; y < x; y++)
				pairs[x][y] |= 1U << (4 * value[x] + value[y]);
		ret = run(self->pinned, &v, true, self->expected, &line);
		ASSERT_EQ(0, ret) TH_LOG("pinned, line %d: %s", line, strerror(-ret));
		EXPECT_EQ(srq ? ROUNDS : 0, self->expected->events[1][IBV_EVENT_SRQ_LIMIT_REACHED]);
		ret = run(self->unpinned, &v, false, self->result, &line);
		ASSERT_EQ(0, ret)
			TH_LOG("local %u remote %u srq %u signals %u ex %u wait %u, line %d: %s", v.local,
			       v.remote, v.srq, v.signals, v.ex, v.wait, line, strerror(-ret));
		EXPECT_EQ(NULL, difference(self->expected, self->result))
			TH_LOG("local %u remote %u srq %u signals %u ex %u wait %u: %s", v.local,
			       v.remote, v.srq, v.signals, v.ex, v.wait,
			       difference(self->expected, self->result));
		n += self->result->count[0] + self->result->count[1];
	}
	/* ex with everything, wait with everything */
	for (unsigned int x = 4; x < 6; x++) {
		const unsigned int values[] = { LOCALS, type == IBV_QPT_RC ? 2 : 1, 2, SIGNALS, 2,
						WAITS };

		for (unsigned int y = 0; y < x; y++)
			EXPECT_EQ(values[x] * values[y],
				  (unsigned int)__builtin_popcount(pairs[x][y]));
	}
	stop = true;
	ASSERT_EQ(0, pthread_join(self->pager, NULL));
	TH_LOG("%u completions", n);
	/* All of it was away in between, and nothing is kept. */
	for (int i = 0; i < 3; i++) {
		struct npr_mr_attr attr;

		ASSERT_EQ(0, npr_query_mr(areas[i]->mr[1], &attr));
		EXPECT_EQ(0UL, attr.held_pages);
		if (i == 1 && type != IBV_QPT_RC)
			continue;
		EXPECT_LT(0UL, attr.holds);
		EXPECT_LT(0UL, attr.pages_invalidated);
	}
	EXPECT_EQ(pinned, np_pinned());
}

/* Hundreds of queue pairs: minutes on the debug kernel. */
TEST_F(verbs, reliable_connection)
{
	run_all(_metadata, self, IBV_QPT_RC);
}

TEST_F(verbs, unreliable_connection)
{
	run_all(_metadata, self, IBV_QPT_UC);
}

TEST_F(verbs, unreliable_datagram)
{
	run_all(_metadata, self, IBV_QPT_UD);
}

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
	for (unsigned int i = 0; i < 4 * ARRAY_SIZE(faults); i++) {
		const struct fault *f = &faults[i / 4];
		const struct seen *wc = self->expected->wc[0];
		unsigned int *events = self->expected->events[1];
		const bool srq = i / 2 % 2;
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
	struct ibv_ah_attr av = { .dlid = w->b.lid, .port_num = 1 };
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

/* --- receives that come late ------------------------------------------------------- */

/* Less than an obedient peer waits here, and more than it takes to grant a hold. */
#define LATE_HOLD_MS	1000

static const struct {
	enum ibv_wr_opcode op[2];
	unsigned int receives;
} lates[] = {
	{ { IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE }, 1 },
	{ { IBV_WR_SEND, IBV_WR_ATOMIC_FETCH_AND_ADD }, 1 },
	{ { IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM }, 2 },
};

/* The first finds no receive for longer than a hold lives. */
static int late(struct world *w, unsigned int i, bool pinned, struct result *r, int *line)
{
	const struct variant v = { .type = IBV_QPT_RC, .local = UNPINNED, .remote = UNPINNED };
	struct area *areas[] = { &w->here, &w->there, &w->sink };
	struct ibv_send_wr wr[2] = {};
	struct ibv_sge sge[2];
	uint64_t end;
	int ret;

	memset(r->count, 0, sizeof(r->count));
	fill(w);
	TRY(side_start(&w->a, &v, pinned));
	TRY(side_start(&w->b, &v, pinned));
	TRY(side_connect(&w->a, &w->b, 7));
	TRY(side_connect(&w->b, &w->a, 7));
	for (unsigned int k = 0; k < 2; k++) {
		const bool atomic = is_atomic(lates[i].op[k]);

		sge[k] = (struct ibv_sge){ (uintptr_t)w->here.mem[1] + k * SLOT,
					   atomic ? 8 : PAGE, w->here.mr[1]->lkey };
		wr[k].wr_id = k;
		wr[k].opcode = lates[i].op[k];
		wr[k].send_flags = k ? IBV_SEND_SIGNALED : 0;
		wr[k].sg_list = &sge[k];
		wr[k].num_sge = 1;
		wr[k].next = k ? NULL : &wr[1];
		wr[k].imm_data = htonl(7);
		if (atomic) {
			wr[k].wr.atomic.remote_addr = (uintptr_t)w->there.mem[1] + k * SLOT;
			wr[k].wr.atomic.rkey = w->there.mr[1]->rkey;
			wr[k].wr.atomic.compare_add = 5;
		} else {
			wr[k].wr.rdma.remote_addr = (uintptr_t)w->there.mem[1] + k * SLOT;
			wr[k].wr.rdma.rkey = w->there.mr[1]->rkey;
		}
	}
	TRY(post_send(&w->a, wr, false));
	/* It is the time itself that is tested. */
	for (end = np_now_ms() + 3 * LATE_HOLD_MS; np_now_ms() < end;)
		TRY(note(r, &w->a, &w->b, 0, false));
	for (unsigned int k = 0; k < lates[i].receives; k++) {
		struct ibv_sge rsge = {
			(uintptr_t)w->sink.mem[1] + k * SLOT, SLOT, w->sink.mr[1]->lkey
		};
		struct ibv_recv_wr recv = { .wr_id = 1000 + k, .sg_list = &rsge, .num_sge = 1 };

		TRY(post_recv(&w->b, &recv));
	}
	TRY(collect(w, r, &v, 0, 1));
	TRY(collect(w, r, &v, 1, lates[i].receives));
	r->state[0] = np_qp_state(w->a.qp);
	r->state[1] = np_qp_state(w->b.qp);
	TRY(take_events(&w->a, r, 0));
	TRY(take_events(&w->b, r, 1));
	TRY(side_end(&w->a));
	TRY(side_end(&w->b));
	for (int k = 0; k < 6; k++)
		memcpy(r->mem[k], areas[k / 2]->mem[k % 2], AREA);
	return 0;
}

TEST_F(verbs, receives_that_come_late)
{
	for (unsigned int i = 0; i < ARRAY_SIZE(lates); i++) {
		int line = 0, ret;

		ret = late(self->pinned, i, true, self->expected, &line);
		ASSERT_EQ(0, ret) TH_LOG("pinned, %u, line %d: %s", i, line, strerror(-ret));
		ASSERT_EQ(IBV_WC_SUCCESS, self->expected->wc[0][0].status);
		ASSERT_EQ(0, np_set_hold_ms(LATE_HOLD_MS));
		ret = late(self->unpinned, i, false, self->result, &line);
		ASSERT_EQ(0, np_set_hold_ms(NP_HOLD_MS));
		ASSERT_EQ(0, ret) TH_LOG("%u, line %d: %s", i, line, strerror(-ret));
		EXPECT_EQ(NULL, difference(self->expected, self->result))
			TH_LOG("%u: %s", i, difference(self->expected, self->result));
	}
	stop = true;
	ASSERT_EQ(0, pthread_join(self->pager, NULL));
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

/* Which receive serves which QP nobody knows; each gives back what it held, and all in the end. */
TEST_F(verbs, shared_queue_of_two_pairs)
{
	const struct variant v = { .type = IBV_QPT_RC, .srq = 1 };
	struct world *w = self->unpinned;
	struct npr_mr_attr attr;
	struct side a[2], b[2];
	unsigned int seen = 0;
	long before;

	stop = true;
	ASSERT_EQ(0, pthread_join(self->pager, NULL));
	for (int k = 0; k < 2; k++) {
		const struct variant plain = { .type = IBV_QPT_RC };

		a[k] = w->a;
		b[k] = k ? b[0] : w->b;
		ASSERT_EQ(0, side_start(&a[k], &plain, false));
		ASSERT_EQ(0, side_start(&b[k], &v, false));
		ASSERT_EQ(0, side_connect(&a[k], &b[k], 7));
		ASSERT_EQ(0, side_connect(&b[k], &a[k], 7));
	}
	fill(w);
	before = np_pinned();
	for (unsigned int i = 0; i < OPS; i++) {
		struct ibv_sge sge = { (uintptr_t)w->sink.mem[1] + i * SLOT, SLOT,
				       w->sink.mr[1]->lkey };
		struct ibv_recv_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1 };

		ASSERT_EQ(0, post_recv(&b[0], &wr));
	}
	EXPECT_EQ(before + OPS * 4, np_pinned());
	for (unsigned int i = 0; i < OPS - 2; i++) {
		struct ibv_sge sge = { (uintptr_t)w->here.mem[1] + i * SLOT, PAGE + i,
				       w->here.mr[1]->lkey };
		struct ibv_send_wr wr = {
			.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
			.send_flags = IBV_SEND_SIGNALED,
		};
		const int k = i % 3 == 0;
		struct ibv_wc wc;

		ASSERT_EQ(0, post_send(&a[k], &wr, false));
		ASSERT_TRUE(np_wait_until(poll_one(&a[k], 0, false, &wc)));
		ASSERT_EQ(0, wc.status);
		ASSERT_TRUE(np_wait_until(poll_one(&b[k], 1, i & 1, &wc)));
		ASSERT_EQ(0, wc.status);
		EXPECT_EQ(b[k].qp->qp_num, wc.qp_num);
		EXPECT_EQ(PAGE + i, wc.byte_len);
		ASSERT_GT((uint64_t)OPS, wc.wr_id);
		EXPECT_EQ(0U, seen & 1U << wc.wr_id);
		seen |= 1U << wc.wr_id;
		EXPECT_EQ(0, memcmp(w->sink.mem[1] + wc.wr_id * SLOT, w->here.mem[1] + i * SLOT,
				    PAGE + i));
		EXPECT_EQ(before + (long)(OPS - 1 - i) * 4, np_pinned());
	}
	/* The last two are never used. */
	b[1].srq = NULL;
	for (int k = 1; k >= 0; k--) {
		EXPECT_EQ(0, side_end(&a[k]));
		EXPECT_EQ(0, side_end(&b[k]));
	}
	ASSERT_EQ(0, npr_query_mr(w->sink.mr[1], &attr));
	EXPECT_EQ(0UL, attr.held_pages);
}

/* --- keys that come and go with work requests --------------------------------------------- */

/* The completion of one work request of @s. */
#define ASSERT_DONE(s, wr, ex, want)						\
	do {									\
		struct ibv_wc wc;						\
		ASSERT_EQ(0, post_send(s, wr, ex));				\
		ASSERT_TRUE(np_wait_until(poll_one(s, 0, ex, &wc)));		\
		ASSERT_EQ((wr)->wr_id, wc.wr_id);				\
		ASSERT_EQ(want, wc.status);					\
		if (!wc.status) {						\
			EXPECT_EQ(completion((wr)->opcode), (int)wc.opcode);	\
		}								\
	} while (0)

static int completion(enum ibv_wr_opcode op)
{
	switch (op) {
	case IBV_WR_BIND_MW:
		return IBV_WC_BIND_MW;
	case IBV_WR_LOCAL_INV:
		return IBV_WC_LOCAL_INV;
	case IBV_WR_RDMA_READ:
		return IBV_WC_RDMA_READ;
	default:
		return IBV_WC_SEND;
	}
}

/*
 * A window on pinned memory is of use until its owner, or a peer's SEND, invalidates it,
 * and everything else in these requests is in unpinned memory.
 */
TEST_F(verbs, window_is_of_use_until_it_is_invalidated)
{
	struct world *worlds[] = { self->pinned, self->unpinned };
	uint8_t *data = np_map(PAGE);

	ASSERT_NE(NULL, data);
	np_fill(data, PAGE, 0);
	for (unsigned int i = 0; i < 8; i++) {
		const bool pinned = i & 1, local = i & 2, ex = !pinned && i & 4;
		const struct variant v = { .type = IBV_QPT_RC, .ex = ex };
		struct world *w = worlds[!pinned];
		struct ibv_mr *mr = ibv_reg_mr(w->b.pd, data, PAGE, NP_RIGHTS | IBV_ACCESS_MW_BIND);
		struct ibv_mw *mw = ibv_alloc_mw(w->b.pd, IBV_MW_TYPE_2);
		struct ibv_sge here = { (uintptr_t)w->here.mem[1], 2 * PAGE, w->here.mr[1]->lkey };
		struct ibv_sge sink = { (uintptr_t)w->sink.mem[1], SLOT, w->sink.mr[1]->lkey };
		struct ibv_recv_wr recv = { .wr_id = 7, .sg_list = &sink, .num_sge = 1 };
		struct ibv_send_wr bind = {
			.wr_id = 1, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
		};
		struct ibv_send_wr invalidate = {
			.wr_id = 2, .send_flags = IBV_SEND_SIGNALED,
			.opcode = local ? IBV_WR_LOCAL_INV : IBV_WR_SEND_WITH_INV,
		};
		struct ibv_send_wr look = {
			.wr_id = 3, .sg_list = &here, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
			.send_flags = IBV_SEND_SIGNALED,
		};
		struct ibv_wc wc;
		uint32_t rkey;

		ASSERT_NE(NULL, mr);
		ASSERT_NE(NULL, mw) TH_LOG("no memory windows: %s", strerror(errno));
		fill(w);
		ASSERT_EQ(0, side_start(&w->a, &v, pinned));
		ASSERT_EQ(0, side_start(&w->b, &v, pinned));
		ASSERT_EQ(0, side_connect(&w->a, &w->b, 7));
		ASSERT_EQ(0, side_connect(&w->b, &w->a, 7));
		rkey = ibv_inc_rkey(mw->rkey);
		bind.bind_mw.mw = mw;
		bind.bind_mw.rkey = rkey;
		bind.bind_mw.bind_info = (struct ibv_mw_bind_info){
			mr, (uintptr_t)data + 8, PAGE - 8, IBV_ACCESS_REMOTE_READ
		};
		ASSERT_DONE(&w->b, &bind, ex, IBV_WC_SUCCESS);

		here.length = PAGE - 8;
		look.wr.rdma.remote_addr = (uintptr_t)data + 8;
		look.wr.rdma.rkey = rkey;
		ASSERT_DONE(&w->a, &look, ex, IBV_WC_SUCCESS);
		EXPECT_EQ(0, memcmp(w->here.mem[1], data + 8, PAGE - 8));

		ASSERT_EQ(0, post_recv(&w->b, &recv));
		invalidate.invalidate_rkey = rkey;
		if (local) {
			ASSERT_DONE(&w->b, &invalidate, ex, IBV_WC_SUCCESS);
		} else {
			here.addr += SLOT;
			here.length = SLOT - 3;
			invalidate.sg_list = &here;
			invalidate.num_sge = 1;
			ASSERT_DONE(&w->a, &invalidate, ex, IBV_WC_SUCCESS);
			ASSERT_TRUE(np_wait_until(poll_one(&w->b, 1, false, &wc)));
			ASSERT_EQ(IBV_WC_SUCCESS, wc.status);
			EXPECT_EQ(IBV_WC_RECV, wc.opcode);
			EXPECT_EQ(IBV_WC_WITH_INV, wc.wc_flags);
			EXPECT_EQ(rkey, wc.invalidated_rkey);
			EXPECT_EQ(SLOT - 3, wc.byte_len);
			EXPECT_EQ(0, memcmp(w->sink.mem[1], w->here.mem[1] + SLOT, SLOT - 3));
			here.length = 8;
		}
		/* It can be bound again, by another name. */
		bind.bind_mw.rkey = ibv_inc_rkey(rkey);
		ASSERT_DONE(&w->b, &bind, ex, IBV_WC_SUCCESS);
		look.wr.rdma.rkey = bind.bind_mw.rkey;
		ASSERT_DONE(&w->a, &look, ex, IBV_WC_SUCCESS);
		look.wr.rdma.rkey = rkey;
		ASSERT_DONE(&w->a, &look, ex, IBV_WC_REM_ACCESS_ERR);
		EXPECT_EQ(IBV_QPS_ERR, np_qp_state(w->a.qp));
		ASSERT_EQ(0, side_end(&w->a));
		ASSERT_EQ(0, side_end(&w->b));
		ASSERT_EQ(0, ibv_dealloc_mw(mw));
		ASSERT_EQ(0, ibv_dereg_mr(mr));
	}
}

/* --- what is refused ------------------------------------------------------------------ */

TEST_F(verbs, registration_does_not_change_and_no_window_shows_it)
{
	const int rights = NP_RIGHTS | IBV_ACCESS_MW_BIND;
	struct world *w = self->unpinned;
	struct ibv_mr *mr = w->there.mr[1], *pinned = w->there.mr[0];
	struct ibv_pd *pd = ibv_alloc_pd(w->b.ctx);
	static const int changes[] = {
		IBV_REREG_MR_CHANGE_ACCESS, IBV_REREG_MR_CHANGE_PD, IBV_REREG_MR_CHANGE_TRANSLATION,
		IBV_REREG_MR_CHANGE_ACCESS | IBV_REREG_MR_CHANGE_PD |
			IBV_REREG_MR_CHANGE_TRANSLATION,
	};
	/* A window of the other sort, bound by a work request. */
	const struct variant connected = { .type = IBV_QPT_RC };
	struct ibv_mw mw = { .context = w->b.ctx, .pd = w->b.pd, .type = IBV_MW_TYPE_2 };
	struct ibv_send_wr wr = {
		.opcode = IBV_WR_BIND_MW,
		.send_flags = IBV_SEND_SIGNALED,
		.bind_mw = { &mw, 0x100, { mr, (uintptr_t)mr->addr, PAGE, 0 } },
	}, *bad;
	const struct variant mixed = { .type = IBV_QPT_RC, .local = MIXED, .remote = UNPINNED };
	uint32_t lkey = mr->lkey, rkey = mr->rkey;
	struct npr_mr_attr attr;
	struct ibv_wc wc;
	int line = 0;

	ASSERT_NE(NULL, pd);
	for (size_t i = 0; i < ARRAY_SIZE(changes); i++) {
		for (int flag = 0; flag < 2; flag++) {
			const bool access = changes[i] & IBV_REREG_MR_CHANGE_ACCESS;

			errno = 0;
			/* Rights that are not to change the library would refuse. */
			EXPECT_NE(0, ibv_rereg_mr(mr, changes[i], pd, mr->addr, PAGE, !access ? 0 :
						  IBV_ACCESS_REMOTE_READ |
						  (flag ? NP_UNPINNED : 0)));
			EXPECT_EQ(EOPNOTSUPP, errno) TH_LOG("change %d", changes[i]);
		}
	}
	EXPECT_NE(0, ibv_rereg_mr(pinned, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0,
				  NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(EOPNOTSUPP, errno);
	/* It is what it was. */
	EXPECT_EQ(lkey, mr->lkey);
	EXPECT_EQ(rkey, mr->rkey);
	EXPECT_EQ(0, npr_query_mr(mr, &attr));
	EXPECT_EQ(-EINVAL, npr_query_mr(pinned, &attr));
	errno = 0;
	EXPECT_EQ(NULL, npr_reg_mr(w->b.pd, w->there.mem[1], AREA, rights));
	EXPECT_EQ(EOPNOTSUPP, errno);

	ASSERT_EQ(0, side_start(&w->a, &connected, false));
	ASSERT_EQ(0, side_start(&w->b, &connected, false));
	ASSERT_EQ(0, side_connect(&w->b, &w->a, 7));
	ASSERT_EQ(0, side_connect(&w->a, &w->b, 7));
	EXPECT_EQ(-EOPNOTSUPP, npr_post_send(w->b.lqp, &wr, &bad));
	EXPECT_EQ(&wr, bad);
	EXPECT_EQ(0, npr_poll_cq(w->b.lcq[0], 1, &wc));
	EXPECT_EQ(0, side_end(&w->a));
	EXPECT_EQ(0, side_end(&w->b));

	/* The same program as ever runs on it. */
	ASSERT_EQ(0, run(self->pinned, &mixed, true, self->expected, &line));
	ASSERT_EQ(0, run(w, &mixed, false, self->result, &line)) TH_LOG("line %d", line);
	EXPECT_EQ(NULL, difference(self->expected, self->result));
}

TEST_HARNESS_MAIN
