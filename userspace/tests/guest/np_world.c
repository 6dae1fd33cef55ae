// SPDX-License-Identifier: GPL-2.0
/* See np_world.h. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "np_world.h"

/* --- one side ------------------------------------------------------------------------ */

int side_open(struct side *s, const char *dev)
{
	struct ibv_qp_init_attr fence = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1, .max_send_sge = 1 },
	};
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 1, .max_sge = 1 } };
	int ret;

	memset(s, 0, sizeof(*s));
	s->ctx = np_open_device(dev);
	if (!s->ctx)
		return -errno;
	ret = np_port_lid(s->ctx, &s->lid);
	if (ret)
		return ret;
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

int side_start(struct side *s, const struct variant *v, bool pinned)
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

int side_connect(struct side *s, const struct side *to, unsigned int rnr_retry)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = to->qp->qp_num,
		.max_dest_rd_atomic = 4,
		.min_rnr_timer = 1,
		.ah_attr = np_path(s->ctx, to->lid),
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

int side_end(struct side *s)
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

int post_recv(struct side *s, struct ibv_recv_wr *wr)
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

int post_send(struct side *s, struct ibv_send_wr *wr, bool ex)
{
	struct ibv_send_wr *bad;

	if (s->pinned)
		return -ibv_post_send(s->qp, wr, &bad);
	return ex ? post_ex(npr_qp_to_qp_ex(s->lqp), wr) : npr_post_send(s->lqp, wr, &bad);
}

int poll_one(struct side *s, int k, bool ex, struct ibv_wc *wc)
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

int note(struct result *r, struct side *s, const struct side *other, int k, bool ex)
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

int collect(struct world *w, struct result *r, const struct variant *v, int k,
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

int take_events(struct side *s, struct result *r, int k)
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

void fill(struct world *w)
{
	for (int k = 0; k < 2; k++) {
		np_fill(w->here.mem[k], AREA, 1 + k);
		np_fill(w->there.mem[k], AREA, 3);
		np_fill(w->sink.mem[k], AREA, 5 + k);
	}
}

/* --- both, compared ------------------------------------------------------------------- */

struct world *make_world(bool pinned)
{
	struct world *w = calloc(1, sizeof(*w));

	if (!w || side_open(&w->a, NP_PEER_DEV) || side_open(&w->b, NP_OWNER_DEV) ||
	    area_open(&w->here, &w->a, pinned, IBV_ACCESS_LOCAL_WRITE) ||
	    area_open(&w->there, &w->b, pinned, NP_RIGHTS) ||
	    area_open(&w->sink, &w->b, pinned, IBV_ACCESS_LOCAL_WRITE))
		return NULL;
	return w;
}

struct result *make_result(void)
{
	struct result *r = calloc(1, sizeof(*r));

	for (int i = 0; r && i < 6; i++) {
		r->mem[i] = malloc(AREA);
		if (!r->mem[i])
			return NULL;
	}
	return r;
}

static const char *const side_names[] = { "send", "receive" };

const char *difference(const struct result *want, const struct result *got)
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
