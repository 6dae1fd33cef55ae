// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of what the serving side does for peers, and keeps of them: all of it is
 * bounded.
 */
#include <kunit/test.h>

#include "np_ask_fixture.h"

static void np_requests_other_than_fault_are_bounded(struct kunit *test)
{
	struct np_hca *hca = &np_ask_test(test)->fake.hca;
	unsigned int nr, strangers;

	for (strangers = 0; np_hca_begin(hca, true); strangers++)
		KUNIT_ASSERT_LT(test, strangers, NP_SERVE_DEVICE);
	KUNIT_EXPECT_EQ(test, strangers, NP_SERVE_STRANGERS);
	for (nr = strangers; np_hca_begin(hca, false); nr++)
		KUNIT_ASSERT_LT(test, nr, NP_SERVE_DEVICE);
	KUNIT_EXPECT_EQ(test, nr, NP_SERVE_ASKED);
	/* FAULTs have at least the rest */
	KUNIT_EXPECT_LE(test, hca->serving, NP_SERVE_DEVICE / 2);

	for (; nr > strangers; nr--)
		np_hca_end(hca, false);
	KUNIT_EXPECT_FALSE(test, np_hca_begin(hca, true));
	for (; nr; nr--)
		np_hca_end(hca, true);
	KUNIT_EXPECT_TRUE(test, np_hca_begin(hca, true));
	np_hca_end(hca, true);

	hca->serving = NP_SERVE_DEVICE;
	KUNIT_EXPECT_FALSE(test, np_hca_begin(hca, false));
	hca->serving = 0;
}

/* FORGETs that cannot go on, because somebody else has the lock that they need. */
static void np_requests_of_one_peer_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg msg = np_sample(NP_MSG_FORGET, false);
	static const struct np_addr from;
	unsigned int i;

	msg.dst_qpn = t->fake.peer.qpn;
	msg.src_qpn = t->fake.peer.remote_qpn;
	msg.secret = t->fake.peer.our_secret;
	mutex_lock(&t->fake.peer.ctl);
	for (i = 0; i < NP_SERVE_CONTROL; i++) {
		msg.tid++;
		np_receive(&t->fake.port, &msg, false, &from, NULL);
	}
	KUNIT_EXPECT_EQ(test, READ_ONCE(t->nr_sent), 0);
	msg.tid++;
	np_receive(&t->fake.port, &msg, false, &from, NULL);
	KUNIT_EXPECT_EQ(test, READ_ONCE(t->nr_sent), 1);
	KUNIT_EXPECT_EQ(test, t->sent[0].status, RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, t->sent[0].tid, msg.tid);
	KUNIT_EXPECT_EQ(test, READ_ONCE(t->fake.hca.serving), NP_SERVE_CONTROL);
	mutex_unlock(&t->fake.peer.ctl);
	flush_workqueue(np_wq);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 1 + NP_SERVE_CONTROL);
	for (i = 1; i <= NP_SERVE_CONTROL; i++)
		KUNIT_EXPECT_EQ(test, t->sent[i].status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, t->fake.peer.control, 0);
}

/* As many as there are of @owner, in steps of a FAULT, each with a QP that has none. */
static unsigned int np_hold_all(struct kunit *test, struct np_owner *owner)
{
	struct np_peer *peer = &np_ask_test(test)->fake.peer;
	unsigned int pages = 0;

	while (!np_held_reserve(peer, owner, NULL, RDMA_NP_MAX_PAGES)) {
		pages += RDMA_NP_MAX_PAGES;
		KUNIT_ASSERT_LE(test, pages, NP_HELD_DEVICE);
		peer->held_pages = 0;
	}
	KUNIT_EXPECT_EQ(test, peer->held_pages, 0);
	return pages;
}

static void np_pages_under_hold_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	unsigned int pages[3], i;
	struct np_owner *owner;

	owner = kunit_kcalloc(test, 3, sizeof(*owner), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, owner);
	for (i = 0; i < 3; i++)
		owner[i].hca = &t->fake.hca;

	/* One QP */
	KUNIT_EXPECT_EQ(test, np_held_reserve(peer, owner, NULL, NP_HELD_QP), 0);
	KUNIT_EXPECT_EQ(test, np_held_reserve(peer, owner, NULL, 1), -EBUSY);
	KUNIT_EXPECT_EQ(test, peer->held_pages, NP_HELD_QP);
	np_held_unreserve(peer, owner, NULL, 1);
	KUNIT_EXPECT_EQ(test, np_held_reserve(peer, owner, NULL, 2), -EBUSY);
	KUNIT_EXPECT_EQ(test, np_held_reserve(peer, owner, NULL, 1), 0);
	np_held_unreserve(peer, owner, NULL, NP_HELD_QP);
	KUNIT_EXPECT_EQ(test, t->fake.hca.held_pages, 0);

	/* Each owner takes half of what is left, whoever else asks for it. */
	for (i = 0; i < 3; i++) {
		pages[i] = np_hold_all(test, &owner[i]);
		KUNIT_ASSERT_EQ(test, pages[i], NP_HELD_DEVICE >> (i + 1));
	}
	/* What one gives back others may have */
	peer->held_pages = RDMA_NP_MAX_PAGES;
	np_held_unreserve(peer, &owner[0], NULL, RDMA_NP_MAX_PAGES);
	KUNIT_EXPECT_EQ(test, np_held_reserve(peer, &owner[2], NULL, RDMA_NP_MAX_PAGES), 0);
	pages[0] -= RDMA_NP_MAX_PAGES;
	pages[2] += RDMA_NP_MAX_PAGES;

	for (i = 0; i < 3; i++) {
		peer->held_pages = pages[i];
		np_held_unreserve(peer, &owner[i], NULL, pages[i]);
	}
	KUNIT_EXPECT_EQ(test, t->fake.hca.held_pages, 0);

	np_peer_fail(peer);
	KUNIT_EXPECT_EQ(test, np_held_reserve(peer, owner, NULL, 1), -EBUSY);
}

/* Of a FAULT under way; some may have been sent more than once. */
static struct np_msg np_oldest_fault(struct np_peer *peer)
{
	struct np_msg request = { };
	struct np_trans *trans;

	spin_lock(&peer->lock);
	list_for_each_entry(trans, &peer->trans, entry) {
		if (trans->msg.type == NP_MSG_FAULT) {
			request = trans->msg;
			break;
		}
	}
	spin_unlock(&peer->lock);
	return request;
}

/* @nr holds: all are asked for, and then granted. */
static void np_test_holds(struct kunit *test, unsigned int nr)
{
	struct np_ask_test *t = np_ask_test(test);
	static u64 id;
	struct np_msg request;
	struct rdma_np_event ev;
	unsigned int i;

	for (i = 0; i < nr; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 1, i, RDMA_NP_FAULT_HOLD),
				0);
	for (i = 0; i < nr; i++) {
		request = np_oldest_fault(&t->fake.peer);
		np_answer_request(test, &request, RDMA_NP_OK, ++id);
		KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	}
}

/* All that a peer can leave unanswered: among these each answer is looked up. */
static void np_all_under_way_is_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_region *regions;
	struct np_trans *resolves;
	unsigned int i, most;
	u64 id;

	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	resolves = kunit_kcalloc(test, NP_MAX_ASKED, sizeof(*resolves),
				 GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, resolves);
	np_bind(test, 1);
	for (i = 0; i < NP_MAX_KEPT - 1; i++)
		np_test_holds(test, 1);
	np_test_holds(test, NP_LANES);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 1, i, RDMA_NP_FAULT_HOLD), -EBUSY);
	for (i = 0; i < NP_LANES; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 1, i, 0), 0);
	for (id = 2; id < 2 + 2 * NP_MAX_ASKED; id++) {
		np_bind(test, id);
		KUNIT_ASSERT_EQ(test, np_peer_forget(peer, id), 0);
	}
	/* Each of which somebody waits for */
	for (i = 0; i < NP_MAX_ASKED; i++) {
		np_trans_init(&resolves[i], peer, NP_MSG_RESOLVE, np_test_done,
			      NULL);
		KUNIT_ASSERT_EQ(test, np_trans_start(&resolves[i]), 0);
	}
	regions = np_granted_regions(test, 5 * NP_MAX_TELLING);
	for (i = 0; i < 5 * NP_MAX_TELLING; i++)
		np_region_dies(&regions[i]);

	spin_lock(&peer->lock);
	most = list_count_nodes(&peer->trans) + list_count_nodes(&peer->kept);
	spin_unlock(&peer->lock);
	/* RECALLs are of the other side, and as many as its leases: see np_recall_kunit.c */
	KUNIT_EXPECT_EQ(test, most, NP_MAX_UNDER_WAY - NP_MAX_LEASES);
	np_peer_fail(peer);
	flush_workqueue(np_wq);
}

static void np_regions_that_a_peer_knows_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_region *regions = np_granted_regions(test, 1);

	np_test_forgets(t, 1);
	KUNIT_EXPECT_EQ(test, peer->nr_grants, 0);
	mutex_lock(&peer->ctl);
	peer->nr_grants = NP_MAX_GRANTS;
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_pgrant_make(peer, regions)), -EBUSY);
	KUNIT_EXPECT_TRUE(test, list_empty(&regions->grants));
	/* Which an asker takes for: later */
	KUNIT_EXPECT_EQ(test, np_errno_to_status(-EBUSY), RDMA_NP_BUSY);
	peer->nr_grants = NP_MAX_GRANTS - 1;
	KUNIT_EXPECT_NOT_ERR_OR_NULL(test, np_pgrant_make(peer, regions));
	KUNIT_EXPECT_EQ(test, peer->nr_grants, NP_MAX_GRANTS);
	peer->nr_grants = 1;
	mutex_unlock(&peer->ctl);
}

static struct kunit_case np_serve_cases[] = {
	KUNIT_CASE(np_requests_other_than_fault_are_bounded),
	KUNIT_CASE(np_requests_of_one_peer_are_bounded),
	KUNIT_CASE(np_pages_under_hold_are_bounded),
	KUNIT_CASE(np_all_under_way_is_bounded),
	KUNIT_CASE(np_regions_that_a_peer_knows_are_bounded),
	{}
};

static struct kunit_suite np_serve_suite = {
	.name = "nprdma_proto_serve",
	.init = np_ask_init_test,
	.exit = np_ask_exit_test,
	.test_cases = np_serve_cases,
};

kunit_test_suite(np_serve_suite);
