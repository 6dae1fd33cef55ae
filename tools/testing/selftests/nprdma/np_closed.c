// SPDX-License-Identifier: GPL-2.0
/*
 * The scheme fails closed: whoever does not take part in it, or has no right to,
 * gets an error, and nothing is read or written. And what the kernel's methods
 * refuse.
 */
#include <poll.h>

#include "np_harness.h"

#define READ_ORDER	"/sys/module/ib_core/parameters/nprdma_read_order"

/* --- a peer without libnprdma, with the rkey that the application announced ------ */

enum np_op { OP_READ, OP_WRITE, OP_WRITE_IMM, OP_FETCH_ADD, OP_CMP_SWAP };

FIXTURE(application_key) {
	struct np_pair pair;
};

FIXTURE_VARIANT(application_key) {
	enum np_op op;
	bool resident;		/* the kernel was asked before: changes nothing */
};

FIXTURE_VARIANT_ADD(application_key, read) { .op = OP_READ };
FIXTURE_VARIANT_ADD(application_key, write) { .op = OP_WRITE };
FIXTURE_VARIANT_ADD(application_key, write_with_immediate) { .op = OP_WRITE_IMM };
FIXTURE_VARIANT_ADD(application_key, fetch_and_add) { .op = OP_FETCH_ADD };
FIXTURE_VARIANT_ADD(application_key, compare_and_swap) { .op = OP_CMP_SWAP };
FIXTURE_VARIANT_ADD(application_key, read_of_resident) { .op = OP_READ, .resident = true };
FIXTURE_VARIANT_ADD(application_key, write_to_resident) { .op = OP_WRITE, .resident = true };
FIXTURE_VARIANT_ADD(application_key, add_to_resident) { .op = OP_FETCH_ADD, .resident = true };

FIXTURE_SETUP(application_key)
{
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
	if (variant->resident) {
		ASSERT_EQ(0, np_pair_resolve(&self->pair));
		ASSERT_EQ(0, np_pair_fault(&self->pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	}
}

FIXTURE_TEARDOWN_PARENT(application_key)
{
	NP_CHECK_USAGE(&self->pair.before);
}

TEST_F(application_key, is_a_remote_access_error)
{
	struct np_end *peer = &self->pair.peer;
	uint64_t addr = (uintptr_t)self->pair.data;
	uint32_t rkey = self->pair.mr->rkey;
	struct ibv_wc wc;
	int ret = -1;

	np_fill(peer->buf, PAGE, 1234);
	switch (variant->op) {
	case OP_READ:
		ret = np_read(peer, 0, PAGE, addr, rkey);
		break;
	case OP_WRITE:
		ret = np_write(peer, 0, PAGE, addr, rkey);
		break;
	case OP_WRITE_IMM:
		ASSERT_EQ(0, np_post(peer, IBV_WR_RDMA_WRITE_WITH_IMM, 0, PAGE, addr, rkey,
				     IBV_SEND_SIGNALED));
		ret = np_poll(peer, &wc);
		break;
	case OP_FETCH_ADD:
		ret = np_fetch_add(peer, 0, addr, rkey, 1);
		break;
	case OP_CMP_SWAP:
		ret = np_cmp_swap(peer, 0, addr, rkey, np_pattern(0, 0), 1);
		break;
	}
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, ret)
		TH_LOG("%s", ret < 0 ? strerror(-ret) : ibv_wc_status_str(ret));
	EXPECT_EQ(-1, np_differs(peer->buf, PAGE, 1234));
	EXPECT_EQ(-1, np_differs(self->pair.data, PAGE, 0));
	EXPECT_EQ(IBV_QPS_ERR, np_qp_state(peer->qp));
}

/* --- the same key, used by the application itself -------------------------------- */

FIXTURE(application_lkey) {
	struct np_pair pair;
};

FIXTURE_VARIANT(application_lkey) {
	enum ibv_wr_opcode op;
};

FIXTURE_VARIANT_ADD(application_lkey, source_of_write) { .op = IBV_WR_RDMA_WRITE };
FIXTURE_VARIANT_ADD(application_lkey, source_of_send) { .op = IBV_WR_SEND };
FIXTURE_VARIANT_ADD(application_lkey, sink_of_read) { .op = IBV_WR_RDMA_READ };

FIXTURE_SETUP(application_lkey)
{
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
}

FIXTURE_TEARDOWN_PARENT(application_lkey)
{
	NP_CHECK_USAGE(&self->pair.before);
}

TEST_F(application_lkey, is_a_local_protection_error)
{
	struct np_end *owner = &self->pair.owner, *peer = &self->pair.peer;
	struct ibv_sge sge = {
		.addr = (uintptr_t)self->pair.data,
		.length = 64,
		.lkey = self->pair.mr->lkey,
	};
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = variant->op,
		.send_flags = IBV_SEND_SIGNALED,
	}, *bad;
	struct ibv_mr *target;
	struct ibv_wc wc;

	/* A pinned buffer of the peer that would allow it. */
	np_fill(peer->buf, PAGE, 1234);
	target = ibv_reg_mr(peer->pd, peer->buf, PAGE, NP_RIGHTS);
	ASSERT_NE(NULL, target);
	wr.wr.rdma.remote_addr = (uintptr_t)peer->buf;
	wr.wr.rdma.rkey = target->rkey;
	ASSERT_EQ(0, ibv_post_send(owner->qp, &wr, &bad));
	EXPECT_EQ(IBV_WC_LOC_PROT_ERR, np_poll(owner, &wc))
		TH_LOG("%s", ibv_wc_status_str(wc.status));
	EXPECT_EQ(-1, np_differs(peer->buf, PAGE, 1234));
	EXPECT_EQ(-1, np_differs(self->pair.data, PAGE, 0));
}

/* --- the keys of RESOLVE are good for one thing each ------------------------------- */

FIXTURE(resolved) {
	struct np_pair pair;
};

FIXTURE_SETUP(resolved)
{
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
	ASSERT_EQ(0, np_pair_fault(&self->pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	np_fill(self->pair.peer.buf, PAGE, 1234);
}

FIXTURE_TEARDOWN_PARENT(resolved)
{
	NP_CHECK_USAGE(&self->pair.before);
}

TEST_F(resolved, region_is_as_registered)
{
	struct rdma_np_region_info *info = &self->pair.info;
	struct rdma_np_mr_info mr;

	ASSERT_EQ(0, np_query_mr(self->pair.mr, &mr));
	EXPECT_EQ(mr.region_id, info->region_id);
	EXPECT_EQ((uintptr_t)self->pair.data, info->base);
	EXPECT_EQ(NP_DATA_LEN, info->length);
	EXPECT_EQ(NP_RIGHTS | NP_UNPINNED, info->access);
	EXPECT_NE(self->pair.mr->rkey, info->read_key);
	EXPECT_NE(self->pair.mr->rkey, info->write_key);
	EXPECT_NE(self->pair.mr->rkey, info->table_key);
	EXPECT_NE(info->write_key, info->read_key);
	EXPECT_NE(info->table_key, info->read_key);
	EXPECT_NE(info->table_key, info->write_key);
	EXPECT_NE(0, info->signature);
	EXPECT_EQ(RDMA_NP_PAGE_SHIFT, info->page_shift);
	EXPECT_EQ(UNIT, 1 << info->unit_shift);
	EXPECT_EQ(RDMA_NP_MAX_PAGES, info->max_pages);
	EXPECT_EQ(RDMA_NP_MAX_RANGES, info->max_ranges);
	EXPECT_LT(0, info->max_outstanding);
	EXPECT_EQ(0, info->part_shift);
	EXPECT_EQ(0, info->reserved[0] | info->reserved[1]);
}

TEST_F(resolved, read_order_is_what_the_owner_is_told)
{
	static const struct { const char *name; unsigned int order; } cases[] = {
		{ "out-of-order", RDMA_NP_READ_OUT_OF_ORDER },
		{ "in-order", RDMA_NP_READ_IN_ORDER },
		{ "unknown", RDMA_NP_READ_UNKNOWN },
		/* Of such an adapter the driver cannot know. */
		{ "auto", RDMA_NP_READ_UNKNOWN },
	};
	char before[32] = "";
	FILE *file = fopen(READ_ORDER, "r");

	ASSERT_NE(NULL, file);
	ASSERT_NE(NULL, fgets(before, sizeof(before), file));
	fclose(file);
	for (unsigned int i = 0; i < ARRAY_SIZE(cases); i++) {
		ASSERT_EQ(0, np_write_text(READ_ORDER, cases[i].name));
		EXPECT_EQ(-EINVAL, np_write_text(READ_ORDER, "disorder"));
		ASSERT_EQ(0, np_pair_resolve(&self->pair));
		EXPECT_EQ(cases[i].order, self->pair.info.read_order) TH_LOG("%s", cases[i].name);
		/* Whatever it is, a WRITE can be proven. */
		EXPECT_EQ(0, np_write_proven(&self->pair.peer, &self->pair.info, 0, 0, PAGE));
	}
	EXPECT_EQ(-1, np_differs(self->pair.data, PAGE, 1234));
	EXPECT_EQ(0, np_write_text(READ_ORDER, before));
}

TEST_F(resolved, read_key_does_not_write)
{
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
		  np_write(&self->pair.peer, 0, PAGE, np_read_addr(&self->pair.info, 0),
			   self->pair.info.read_key));
	EXPECT_EQ(-1, np_differs(self->pair.data, PAGE, 0));
}

TEST_F(resolved, read_key_does_not_add)
{
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
		  np_fetch_add(&self->pair.peer, 0, np_read_addr(&self->pair.info, 0),
			       self->pair.info.read_key, 1));
	EXPECT_EQ(-1, np_differs(self->pair.data, PAGE, 0));
}

TEST_F(resolved, residency_words_cannot_be_written)
{
	uint64_t word = np_pair_word(&self->pair, 0);

	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
		  np_write(&self->pair.peer, 0, 8, np_word_addr(&self->pair.info, 0),
			   self->pair.info.table_key));
	ASSERT_EQ(0, np_reconnect(&self->pair.owner, &self->pair.peer));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
	EXPECT_EQ(word, np_pair_word(&self->pair, 0));
}

TEST_F(resolved, write_key_does_not_read)
{
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
		  np_read(&self->pair.peer, 0, PAGE, np_write_addr(&self->pair.info, 0),
			  self->pair.info.write_key));
	EXPECT_EQ(-1, np_differs(self->pair.peer.buf, PAGE, 1234));
}

TEST_F(resolved, table_key_ends_with_the_words)
{
	uint64_t end = np_word_addr(&self->pair.info, NP_DATA_LEN);

	EXPECT_EQ(0, np_read(&self->pair.peer, 0, 8, end - 8, self->pair.info.table_key));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
		  np_read(&self->pair.peer, 0, 16, end - 8, self->pair.info.table_key));
}

TEST_F(resolved, read_key_ends_with_the_region)
{
	uint64_t end = np_read_addr(&self->pair.info, NP_DATA_LEN);

	EXPECT_EQ(0, np_read(&self->pair.peer, 0, 8, end - 8, self->pair.info.read_key));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
		  np_read(&self->pair.peer, 0, 16, end - 8, self->pair.info.read_key));
}

TEST_F(resolved, read_key_begins_with_the_region)
{
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
		  np_read(&self->pair.peer, 0, 16, np_read_addr(&self->pair.info, 0) - 8,
			  self->pair.info.read_key));
}

TEST_F(resolved, write_key_ends_with_the_region)
{
	EXPECT_EQ(0, np_write(&self->pair.peer, 0, 8,
			      np_write_addr(&self->pair.info, NP_DATA_LEN - 8),
			      self->pair.info.write_key));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
		  np_write(&self->pair.peer, 0, 16,
			   np_write_addr(&self->pair.info, NP_DATA_LEN - 8),
			   self->pair.info.write_key));
}

/* --- who may ask ------------------------------------------------------------------------ */

/* A second pair of QPs whose owner's side is in another PD of the same process. */
struct np_stranger {
	struct ibv_pd *pd;
	struct ibv_qp *owner_qp;
	struct ibv_qp *peer_qp;
};

static int np_stranger_open(struct np_pair *pair, struct np_stranger *s)
{
	struct np_addr addr;
	int ret;

	s->pd = ibv_alloc_pd(pair->owner.ctx);
	if (!s->pd)
		return -errno;
	s->owner_qp = np_make_qp(&pair->owner, s->pd);
	s->peer_qp = np_make_qp(&pair->peer, pair->peer.pd);
	if (!s->owner_qp || !s->peer_qp)
		return -errno;
	addr = (struct np_addr){ .qpn = s->peer_qp->qp_num, .lid = pair->peer.lid };
	ret = np_qp_connect(s->owner_qp, addr);
	if (ret)
		return ret;
	addr = (struct np_addr){ .qpn = s->owner_qp->qp_num, .lid = pair->owner.lid };
	return np_qp_connect(s->peer_qp, addr);
}

TEST_F(resolved, qp_of_another_pd_cannot_use_the_keys)
{
	struct np_end *peer = &self->pair.peer;
	struct ibv_qp *own = peer->qp;
	struct np_stranger s;

	ASSERT_EQ(0, np_stranger_open(&self->pair, &s));
	peer->qp = s.peer_qp;
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, np_pair_read(&self->pair, 0, PAGE));
	EXPECT_EQ(-1, np_differs(peer->buf, PAGE, 1234));
	peer->qp = own;
	/* That was the other QP's end, not ours. */
	EXPECT_EQ(0, np_pair_read(&self->pair, 0, PAGE));
	EXPECT_EQ(-1, np_differs(peer->buf, PAGE, 0));
}

TEST_F(resolved, qp_of_another_pd_cannot_resolve)
{
	struct rdma_np_region_info info;
	struct np_stranger s;

	ASSERT_EQ(0, np_stranger_open(&self->pair, &s));
	EXPECT_EQ(-EACCES, np_resolve_on(&self->pair.peer, s.peer_qp, self->pair.mr->rkey, &info));
	EXPECT_TRUE(np_all(&info, sizeof(info), 0));
}

TEST_F(resolved, qp_that_did_not_resolve_cannot_fault)
{
	uint64_t word = np_pair_word(&self->pair, PAGE);
	struct np_stranger s;

	ASSERT_EQ(0, np_stranger_open(&self->pair, &s));
	EXPECT_EQ(-ENOENT, np_fault_once(&self->pair.peer, s.peer_qp, self->pair.info.region_id,
					 self->pair.info.base + PAGE, PAGE, 0, NULL));
	EXPECT_EQ(word, np_pair_word(&self->pair, PAGE));
}

TEST_F(resolved, unconnected_qp_cannot_resolve)
{
	struct np_end *peer = &self->pair.peer;
	struct rdma_np_region_info info;
	struct ibv_qp *qp;

	qp = np_make_qp(peer, peer->pd);
	ASSERT_NE(NULL, qp);
	EXPECT_EQ(-ENOTCONN, np_resolve_on(peer, qp, self->pair.mr->rkey, &info));
	ASSERT_EQ(0, np_qp_reset(peer->qp));
	EXPECT_EQ(-ENOTCONN, np_resolve(peer, self->pair.mr->rkey, &info));
}

TEST_F(resolved, datagram_qp_cannot_resolve)
{
	struct np_end *peer = &self->pair.peer;
	struct ibv_qp_init_attr init = {
		.send_cq = peer->cq,
		.recv_cq = peer->cq,
		.qp_type = IBV_QPT_UD,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct rdma_np_region_info info;
	struct ibv_qp *qp;

	qp = ibv_create_qp(peer->pd, &init);
	ASSERT_NE(NULL, qp);
	EXPECT_EQ(-ENOTCONN, np_resolve_on(peer, qp, self->pair.mr->rkey, &info));
}

/* The peer's QP says it is connected to the owner's, which is connected to another. */
TEST_F(resolved, one_sided_connection_cannot_resolve)
{
	struct np_addr addr = np_address(&self->pair.owner);
	struct np_end *peer = &self->pair.peer;
	struct rdma_np_region_info info;
	struct ibv_qp *qp;

	qp = np_make_qp(peer, peer->pd);
	ASSERT_NE(NULL, qp);
	ASSERT_EQ(0, np_qp_connect(qp, addr));
	EXPECT_EQ(-ECONNREFUSED, np_resolve_on(peer, qp, self->pair.mr->rkey, &info));
}

/* Who is connected first, and asks at once, is told so, and not that there is no region. */
TEST_F(resolved, connection_that_is_not_complete_is_no_answer)
{
	struct np_end *peer = &self->pair.peer, *owner = &self->pair.owner;
	struct np_addr there = np_address(owner), here = np_address(peer);
	struct rdma_np_region_info info;
	struct ibv_qp *a, *b;

	a = np_make_qp(peer, peer->pd);
	b = np_make_qp(owner, owner->pd);
	ASSERT_NE(NULL, a);
	ASSERT_NE(NULL, b);
	there.qpn = b->qp_num;
	here.qpn = a->qp_num;
	ASSERT_EQ(0, np_qp_connect(a, there));
	EXPECT_EQ(-ECONNREFUSED, np_resolve_on(peer, a, self->pair.mr->rkey, &info));
	ASSERT_EQ(0, np_qp_connect(b, here));
	EXPECT_EQ(0, np_resolve_on(peer, a, self->pair.mr->rkey, &info));
	EXPECT_EQ(self->pair.info.region_id, info.region_id);
}

TEST_F(resolved, pinned_and_unknown_keys_do_not_resolve)
{
	struct rdma_np_region_info info;
	struct ibv_mr *pinned;

	pinned = ibv_reg_mr(self->pair.owner.pd, self->pair.data, PAGE, NP_RIGHTS);
	ASSERT_NE(NULL, pinned);
	EXPECT_EQ(-EACCES, np_resolve(&self->pair.peer, pinned->rkey, &info));
	EXPECT_EQ(-EACCES, np_resolve(&self->pair.peer, 0, &info));
	EXPECT_EQ(-EACCES, np_resolve(&self->pair.peer, ~0U, &info));
	EXPECT_EQ(-EACCES, np_resolve(&self->pair.peer, self->pair.mr->rkey ^ 1, &info));
	EXPECT_EQ(-EACCES, np_resolve(&self->pair.peer, self->pair.info.read_key, &info));
	EXPECT_EQ(-EACCES, np_resolve(&self->pair.peer, self->pair.info.write_key, &info));
}

TEST_F(resolved, resolving_again_tells_the_same)
{
	struct rdma_np_region_info again;

	ASSERT_EQ(0, np_resolve(&self->pair.peer, self->pair.mr->rkey, &again));
	EXPECT_EQ(0, memcmp(&again, &self->pair.info, sizeof(again)));
}

TEST_F(resolved, peers_of_one_pd_share_the_keys)
{
	struct np_end *peer = &self->pair.peer;
	struct ibv_qp *a, *b;
	struct rdma_np_region_info info;

	a = np_make_qp(&self->pair.owner, self->pair.owner.pd);
	b = np_make_qp(peer, peer->pd);
	ASSERT_NE(NULL, a);
	ASSERT_NE(NULL, b);
	ASSERT_EQ(0, np_qp_connect(a, (struct np_addr){ .qpn = b->qp_num, .lid = peer->lid }));
	ASSERT_EQ(0, np_qp_connect(b, (struct np_addr){ .qpn = a->qp_num,
							.lid = self->pair.owner.lid }));
	ASSERT_EQ(0, np_resolve_on(peer, b, self->pair.mr->rkey, &info));
	EXPECT_EQ(0, memcmp(&info, &self->pair.info, sizeof(info)));
}

/* --- what FAULT and its relatives refuse -------------------------------------------------- */

TEST_F(resolved, faults_outside_the_region_are_address_errors)
{
	struct rdma_np_event event;

	EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(&self->pair, NP_DATA_LEN, PAGE, 0, &event));
	EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(&self->pair, -PAGE, PAGE, 0, &event));
	EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(&self->pair, NP_DATA_LEN - PAGE, PAGE + 1, 0, &event));
	EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(&self->pair, 1ULL << 62, PAGE, 0, &event));
	/* Its last byte is inside. */
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(&self->pair, NP_DATA_LEN - 1, 1, 0, &event));
}

TEST_F(resolved, senseless_fault_requests_are_refused)
{
	struct np_end *peer = &self->pair.peer;
	uint64_t id = self->pair.info.region_id, base = self->pair.info.base;
	struct rdma_np_range ranges[RDMA_NP_MAX_RANGES + 1];

	for (int i = 0; i <= RDMA_NP_MAX_RANGES; i++)
		ranges[i] = (struct rdma_np_range){ .addr = base + i * PAGE, .length = PAGE };
	EXPECT_EQ(-EINVAL, np_fault_start(peer, id, 0, 0, ranges, 0));
	EXPECT_EQ(-EINVAL, np_fault_start(peer, id, 0, 0, ranges, RDMA_NP_MAX_RANGES + 1));
	EXPECT_EQ(-EINVAL, np_fault_start(peer, id, 1 << 2, 0, ranges, 1));
	EXPECT_EQ(-EINVAL, np_fault_start(peer, id, 1 << 8, 0, ranges, 1));
	EXPECT_EQ(-EINVAL, np_fault_start(peer, id, 1U << 31, 0, ranges, 1));
	EXPECT_EQ(-ENOENT, np_fault_start(peer, id + 1, 0, 0, ranges, 1));
	EXPECT_EQ(-ENOENT, np_fault_start(peer, 0, 0, 0, ranges, 1));
	ranges[0].length = 0;
	EXPECT_EQ(-EINVAL, np_fault_start(peer, id, 0, 0, ranges, 1));
	ranges[0].length = (RDMA_NP_MAX_PAGES + 1) * PAGE;
	EXPECT_EQ(-EINVAL, np_fault_start(peer, id, 0, 0, ranges, 1));
	ranges[0] = (struct rdma_np_range){ .addr = -PAGE, .length = 2 * PAGE };
	EXPECT_EQ(-EINVAL, np_fault_start(peer, id, 0, 0, ranges, 1));
	/* A refused request has no event. */
	EXPECT_EQ(0, np_next_event(peer, &(struct rdma_np_event){}, 0));
}

TEST_F(resolved, fault_of_512_pages_is_granted_and_one_more_is_not)
{
	struct rdma_np_range range = { .addr = self->pair.info.base, .length = RDMA_NP_MAX_PAGES * PAGE };
	struct rdma_np_event event;

	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(&self->pair, 0, RDMA_NP_MAX_PAGES * PAGE, 0, &event));
	EXPECT_EQ(RDMA_NP_EVENT_WORDS, event.nr_words);
	/* The same length, but it touches 513. */
	range.addr += 1;
	EXPECT_EQ(-EINVAL, np_fault_start(&self->pair.peer, self->pair.info.region_id, 0, 0,
					  &range, 1));
}

TEST_F(resolved, releasing_what_is_not_held_is_refused)
{
	EXPECT_NE(0, np_release(&self->pair.peer, 0));
	EXPECT_NE(0, np_release(&self->pair.peer, 0x1234567890ULL));
}

TEST_F(resolved, channel_gives_whole_events_only)
{
	struct rdma_np_event event;

	EXPECT_EQ(-1, read(self->pair.peer.channel, &event, sizeof(event) - 1));
	EXPECT_EQ(EINVAL, errno);
	EXPECT_EQ(-1, read(self->pair.peer.channel, &event, sizeof(event)));
	EXPECT_EQ(EAGAIN, errno);
}

/* An event for @channel of the peer; it or an earlier one can be read when this returns. */
static int event_comes(struct np_pair *pair, int channel, uint64_t cookie)
{
	struct rdma_np_range range = { .addr = pair->info.base, .length = PAGE };
	struct pollfd p = { .fd = channel, .events = POLLIN };
	int own = pair->peer.channel, ret;

	pair->peer.channel = channel;
	ret = np_fault_start(&pair->peer, pair->info.region_id, 0, cookie, &range, 1);
	pair->peer.channel = own;
	return ret ?: poll(&p, 1, NP_WAIT_MS) == 1 ? 0 : -ETIMEDOUT;
}

TEST_F(resolved, event_that_cannot_be_delivered_stays)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	void *nowhere = np_map(PAGE);

	ASSERT_EQ(0, munmap(nowhere, PAGE));
	ASSERT_EQ(0, event_comes(pair, pair->peer.channel, 77));
	for (int i = 0; i < 2; i++) {
		EXPECT_EQ(-1, read(pair->peer.channel, nowhere, sizeof(event)));
		EXPECT_EQ(EFAULT, errno);
	}
	ASSERT_EQ(1, np_next_event(&pair->peer, &event, 0));
	EXPECT_EQ(77, event.cookie);
	EXPECT_EQ(RDMA_NP_OK, event.status);
	EXPECT_EQ(0, np_next_event(&pair->peer, &event, 0));
}

TEST_F(resolved, events_before_one_that_cannot_be_delivered_are_told)
{
	struct np_pair *pair = &self->pair;
	uint8_t *map = np_map(2 * PAGE), *end = map + PAGE;
	struct rdma_np_event event, *first = (void *)(end - sizeof(event));

	ASSERT_NE(NULL, map);
	ASSERT_EQ(0, munmap(end, PAGE));
	/* Both may be there before the read, or only the first; neither is ever lost. */
	for (uint64_t i = 0; i < 100; i += 2) {
		ASSERT_EQ(0, event_comes(pair, pair->peer.channel, i));
		ASSERT_EQ(0, event_comes(pair, pair->peer.channel, i + 1));
		ASSERT_EQ(sizeof(event), read(pair->peer.channel, first, 2 * sizeof(event)));
		ASSERT_EQ(1, np_next_event(&pair->peer, &event, NP_WAIT_MS));
		/* One may overtake the other. */
		ASSERT_EQ(2 * i + 1, first->cookie + event.cookie);
	}
	EXPECT_EQ(0, munmap(map, PAGE));
}

TEST_F(resolved, channel_gives_records_of_the_size_that_was_asked_for)
{
	static const uint32_t bad[] = {
		0, 8, RDMA_NP_EVENT_SIZE_VER0 - 8, RDMA_NP_EVENT_SIZE_VER0 + 4, 4104, UINT32_MAX,
		0xfffffff8,
	};
	static const uint32_t good[] = {
		RDMA_NP_EVENT_SIZE_VER0, sizeof(struct rdma_np_event),
		sizeof(struct rdma_np_event) + 8, 4096,
	};
	struct ibv_context *ctx = self->pair.peer.ctx;
	struct np_pair *pair = &self->pair;
	uint8_t *buf = pair->peer.buf;
	struct rdma_np_event *event = (void *)buf;

	for (unsigned int i = 0; i < ARRAY_SIZE(bad); i++) {
		EXPECT_EQ(-EINVAL, np_channel_of(ctx, bad[i])) TH_LOG("%u bytes", bad[i]);
	}
	for (unsigned int i = 0; i < ARRAY_SIZE(good); i++) {
		int channel = np_channel_of(ctx, good[i]);

		ASSERT_LE(0, channel);
		ASSERT_EQ(0, event_comes(pair, channel, i));
		memset(buf, 0x55, 2 * PAGE);
		EXPECT_EQ(-1, read(channel, buf, good[i] - 1));
		EXPECT_EQ(EINVAL, errno);
		EXPECT_EQ(good[i], read(channel, buf, 2 * good[i] - 1));
		EXPECT_EQ(RDMA_NP_EVENT_FAULT, event->type);
		EXPECT_EQ(i, event->cookie);
		/* What this kernel does not know is 0, and the next record is none. */
		for (size_t b = sizeof(*event); b < good[i]; b++)
			ASSERT_EQ(0, buf[b]);
		EXPECT_EQ(0x55, buf[good[i]]);
		close(channel);
	}
}

/* --- a region's rights -------------------------------------------------------------------- */

FIXTURE(rights) {
	struct np_pair pair;
};

FIXTURE_SETUP(rights)
{
	ASSERT_EQ(0, np_pair_open(&self->pair));
}

FIXTURE_TEARDOWN_PARENT(rights)
{
	NP_CHECK_USAGE(&self->pair.before);
}

TEST_F(rights, local_region_does_not_resolve)
{
	ASSERT_EQ(0, np_pair_register(&self->pair, IBV_ACCESS_LOCAL_WRITE));
	EXPECT_EQ(-EACCES, np_pair_resolve(&self->pair));
}

TEST_F(rights, read_only_region_has_no_write_key)
{
	struct rdma_np_event event;

	ASSERT_EQ(0, np_pair_register(&self->pair, IBV_ACCESS_REMOTE_READ));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
	EXPECT_EQ(0, self->pair.info.write_key);
	EXPECT_EQ(0, self->pair.info.write_addr);
	EXPECT_EQ(RDMA_NP_ACCESS, np_pair_fault(&self->pair, 0, PAGE, RDMA_NP_FAULT_WRITE, &event));
	EXPECT_FALSE(np_writable(np_pair_word(&self->pair, 0)));
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(&self->pair, 0, PAGE, 0, &event));
	EXPECT_EQ(0, np_pair_read(&self->pair, 0, PAGE));
	EXPECT_EQ(-1, np_differs(self->pair.peer.buf, PAGE, 0));
}

TEST_F(rights, write_only_region_cannot_be_read)
{
	struct rdma_np_event event;
	uint64_t word;

	ASSERT_EQ(0, np_pair_register(&self->pair,
				      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
	EXPECT_EQ(0, self->pair.info.read_key);
	EXPECT_EQ(0, self->pair.info.read_addr);
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(&self->pair, 0, PAGE, RDMA_NP_FAULT_WRITE, &event));
	ASSERT_EQ(0, np_word(&self->pair.peer, &self->pair.info, 0, &word));
	EXPECT_EQ(event.words[0], word);
	/* The words are the only thing to read: one page before them is none of it. */
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
		  np_read(&self->pair.peer, 0, PAGE, self->pair.info.table_addr - PAGE,
			  self->pair.info.table_key));
}

TEST_F(rights, atomic_needs_its_own_right)
{
	ASSERT_EQ(0, np_pair_register(&self->pair,
				      NP_RIGHTS & ~IBV_ACCESS_REMOTE_ATOMIC));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
		  np_fetch_add(&self->pair.peer, 0, np_write_addr(&self->pair.info, 0),
			       self->pair.info.write_key, 1));
	EXPECT_EQ(-1, np_differs(self->pair.data, PAGE, 0));
}

TEST_HARNESS_MAIN
