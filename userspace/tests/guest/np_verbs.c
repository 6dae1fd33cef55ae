// SPDX-License-Identifier: GPL-2.0
/*
 * Every verb against its like on pinned memory: one program is run twice, with plain
 * verbs on pinned regions and with libnprdma on unpinned ones whose pages are paged out
 * all the time. Memory, completions and their order, the states of the QPs and what is said
 * of them and their SRQs in asynchronous events have to be equal.
 */
#include <arpa/inet.h>

#include "np_verbs.h"

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

/* Runs the variant once: 0, or -errno with the line in *@line. */
static int run(struct world *w, const struct variant *v, bool pinned, struct result *r, int *line)
{
	struct ibv_ah_attr av = np_path(w->a.ctx, w->b.lid);
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
	/* All of it was away in between, and nothing is kept once leases have gone back. */
	for (int i = 0; i < 3; i++) {
		struct npr_mr_attr attr;

		ASSERT_TRUE(np_wait_until(npr_query_mr(areas[i]->mr[1], &attr) ||
					  !attr.held_pages));
		EXPECT_EQ(0UL, attr.held_pages);
		if (i == 1 && type != IBV_QPT_RC)
			continue;
		EXPECT_LT(0UL, attr.holds);
		EXPECT_LT(0UL, attr.pages_invalidated);
	}
	EXPECT_TRUE(np_wait_until(pinned == np_pinned()));
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
		EXPECT_TRUE(np_wait_until(before + (long)(OPS - 1 - i) * 4 == np_pinned()));
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
