// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of RESOLVE and FORGET on the asking side: what may be resolved, and how
 * the one undoes the other.
 */
#include <kunit/test.h>

#include "np_ask_fixture.h"

static void np_resolved_regions_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_resolve info;

	t->fake.peer.nr_bindings = NP_MAX_BINDINGS - 1;
	t->fake.peer.resolving = 1;
	KUNIT_EXPECT_EQ(test, np_peer_resolve(&t->fake.peer, &t->channel, 7, 0, &info),
			-ENOSPC);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);
	t->fake.peer.nr_bindings = 0;
	t->fake.peer.resolving = 0;
}

/* What the owner says counts here, too, with the next FAULT */
static void np_fault_is_within_the_owners_bounds(struct kunit *test)
{
	struct rdma_np_range ranges[] = { { 0x1fff, 2 }, { 0x5000, 1 } };
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_fault_req req = { .region_id = 7 };
	struct np_peer *peer = &t->fake.peer;
	struct np_resolve info;

	t->resolves_to = np_ask_region(7);
	t->resolves_to.max_pages = 1;
	t->resolves_to.max_ranges = 1;
	t->resolves_to.lanes = 2;
	KUNIT_ASSERT_EQ(test, np_peer_resolve(peer, &t->channel, 1, 0, &info), 0);
	KUNIT_EXPECT_EQ(test, np_peer_fault(peer, &t->channel, &req, ranges, 1),
			-EINVAL);
	ranges[0].length = 1;
	KUNIT_EXPECT_EQ(test, np_peer_fault(peer, &t->channel, &req, ranges, 2),
			-EINVAL);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
	KUNIT_EXPECT_EQ(test, np_peer_fault(peer, &t->channel, &req, ranges, 1), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 2, 0), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 3, 0), -EBUSY);

	/* It changes its mind while they are under way */
	t->resolves_to.max_ranges = 2;
	t->resolves_to.max_pages = 2;
	t->resolves_to.lanes = 1;
	KUNIT_ASSERT_EQ(test, np_peer_resolve(peer, &t->channel, 1, 0, &info), 0);
	np_answer_to(test, 2, RDMA_NP_OK, 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 4, 0), -EBUSY);
	np_answer_to(test, 1, RDMA_NP_OK, 0);
	KUNIT_EXPECT_EQ(test, np_peer_fault(peer, &t->channel, &req, ranges, 2), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, 0), -EBUSY);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 5);
	KUNIT_EXPECT_EQ(test, t->sent[4].fault.lane, 0);
}

/* What it may reach holds what is asked for, and is all that it may pin */
static void np_lease_is_within_the_owners_bounds(struct kunit *test)
{
	struct rdma_np_range ranges[] = { { 0x3000, 1 }, { 0x2000, 0x2000 } };
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_fault_req req = { .region_id = 7 };
	struct np_peer *peer = &t->fake.peer;
	struct np_resolve info;

	t->resolves_to = np_ask_region(7);
	t->resolves_to.max_pages = 2;
	t->resolves_to.max_ranges = 2;
	KUNIT_ASSERT_EQ(test, np_peer_resolve(peer, &t->channel, 1, 0, &info), 0);
	KUNIT_EXPECT_EQ(test, np_peer_fault(peer, &t->channel, &req, ranges, 2), -EINVAL);
	req.flags = RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE;
	KUNIT_EXPECT_EQ(test, np_peer_fault(peer, &t->channel, &req, ranges, 2), 0);
	ranges[1].length++;
	KUNIT_EXPECT_EQ(test, np_peer_fault(peer, &t->channel, &req, ranges, 2), -EINVAL);
}

/* ... before a key of it is used for anything */
static void np_resolve_of_another_kind_fails(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_resolve info;

	t->resolves_to = np_ask_region(7);
	t->resolves_to.page_shift = 16;
	KUNIT_EXPECT_EQ(test, np_peer_resolve(&t->fake.peer, &t->channel, 1, 0,
					      &info), -EPROTO);
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_bindings, 0);
	KUNIT_EXPECT_EQ(test, t->fake.peer.resolving, 0);
}

/* The place of the FORGET of a region; others may be sent again meanwhile. */
static unsigned int np_sent_forget(struct np_ask_test *t, u64 region_id)
{
	unsigned int i, nr;

	spin_lock(&t->lock);
	nr = min(t->nr_sent, NP_TEST_SENT);
	for (i = 0; i < nr; i++)
		if (t->sent[i].type == NP_MSG_FORGET &&
		    t->sent[i].forget.region_id == region_id)
			break;
	spin_unlock(&t->lock);
	return i < nr ? i : NP_TEST_SENT;
}

/* Also one whose channel found no room */
static void np_forget_undoes_all_resolves_before_it(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_channel *channels;
	struct np_resolve info;
	unsigned int i, nr;
	u64 newest;

	channels = kunit_kcalloc(test, NP_MAX_CHANNELS + 1, sizeof(*channels),
				 GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, channels);
	t->resolves_to = np_ask_region(7);
	for (i = 0; i <= NP_MAX_CHANNELS; i++) {
		np_channel_init(&channels[i], np_test_channel_stays);
		KUNIT_EXPECT_EQ(test, np_peer_resolve(peer, &channels[i], 1, 0, &info),
				i < NP_MAX_CHANNELS ? 0 : -ENOSPC);
	}
	newest = t->sent[t->nr_sent - 1].tid;
	KUNIT_EXPECT_EQ(test, np_peer_forget(peer, 7), 0);
	nr = np_sent_forget(t, 7);
	KUNIT_ASSERT_LT(test, nr, NP_TEST_SENT);
	KUNIT_EXPECT_GE(test, t->sent[nr].forget.seq, newest);
	np_answer_to(test, nr, RDMA_NP_OK, 0);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, 0);
}

static void np_forget_then_done(struct np_trans *trans, u32 status,
				const struct np_msg *answer)
{
	struct np_ask_test *t = container_of(trans->peer, struct np_ask_test,
					     fake.peer);

	np_peer_forget(trans->peer, answer->region.id);
	t->done(trans, status, answer);
}

/* Its answer hands out keys, so what they were granted for has to last */
static void np_forget_undoes_no_resolve_under_way(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg answer = {
		.type = NP_MSG_RESOLVE,
		.answer = true,
		.region = np_ask_region(7),
	};
	struct np_ask_resolve r = { .t = t };
	unsigned int nr;

	INIT_WORK_ONSTACK(&r.work, np_ask_resolve);
	np_bind(test, 7);
	schedule_work(&r.work);
	KUNIT_EXPECT_NE(test, 0, wait_event_timeout(t->wait, READ_ONCE(t->nr_sent),
						    10 * HZ));
	answer.tid = t->sent[0].tid;
	answer.nonce = t->sent[0].nonce;
	np_instead_of_done(test, np_forget_then_done);
	np_peer_answered(&t->fake.peer, &answer);
	flush_work(&r.work);
	destroy_work_on_stack(&r.work);
	KUNIT_EXPECT_EQ(test, r.err, 0);
	KUNIT_EXPECT_EQ(test, r.info.id, 7);
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_bindings, 1);
	nr = np_sent_forget(t, 7);
	KUNIT_ASSERT_LT(test, nr, NP_TEST_SENT);
	KUNIT_EXPECT_LT(test, t->sent[nr].forget.seq, answer.tid);
	/* Nothing is under way any more: now it is undone as well */
	np_answer_to(test, nr, RDMA_NP_OK, 0);
	t->nr_sent = 0;
	KUNIT_EXPECT_EQ(test, np_peer_forget(&t->fake.peer, 7), 0);
	nr = np_sent_forget(t, 7);
	KUNIT_ASSERT_LT(test, nr, NP_TEST_SENT);
	KUNIT_EXPECT_GE(test, t->sent[nr].forget.seq, answer.tid);
	np_answer_to(test, nr, RDMA_NP_OK, 0);
}

static void np_resolves_under_way_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_resolve info;

	/* Asks again for a while, as if the peer had said so */
	t->fake.peer.resolving = NP_MAX_ASKED;
	KUNIT_EXPECT_EQ(test, np_peer_resolve(&t->fake.peer, &t->channel, 7, 0, &info),
			-EBUSY);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);
	t->fake.peer.resolving = 0;
}

/* A device can be taken away at any time, whatever a peer does */
static void np_device_that_leaves_waits_for_no_peer(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_ask_resolve r = { .t = t };
	struct np_resolve info;

	INIT_WORK_ONSTACK(&r.work, np_ask_resolve);
	np_rtt_sample(&t->fake.peer.rtt, NP_RTO_MAX_US);
	schedule_work(&r.work);
	KUNIT_EXPECT_NE(test, 0, wait_event_timeout(t->wait, READ_ONCE(t->nr_sent),
						    10 * HZ));
	t->fake.hca.leaving = true;
	np_ask_leave(&t->fake.peer);
	/* Before its first time-out, so nobody else can have ended it */
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
	flush_work(&r.work);
	destroy_work_on_stack(&r.work);
	KUNIT_EXPECT_EQ(test, r.err, -ENOTCONN);
	KUNIT_EXPECT_EQ(test, t->fake.peer.resolving, 0);
	KUNIT_EXPECT_EQ(test, np_peer_resolve(&t->fake.peer, &t->channel, 7, 0, &info),
			-ENODEV);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
}

/* A peer that answers none of them, or only that it is at work. */
static void np_forgets_under_way_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	unsigned int nr;
	u64 id;

	for (id = 1; id <= 2 * NP_MAX_ASKED; id++) {
		spin_lock(&t->lock);
		t->nr_sent = 0;
		spin_unlock(&t->lock);
		np_bind(test, id);
		KUNIT_ASSERT_EQ(test, np_peer_forget(&t->fake.peer, id), 0);
		/* Each is sent */
		nr = np_sent_forget(t, id);
		KUNIT_ASSERT_LT(test, nr, NP_TEST_SENT);
		np_answer_to(test, nr, NP_WIRE_WORKING, 0);
	}
	KUNIT_EXPECT_EQ(test, list_count_nodes(&t->fake.peer.trans), NP_MAX_ASKED);
	/* Also if the last one was lost, the peer is told when it asks */
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, id - 1), RDMA_NP_OK);
	np_ask_kill(&t->fake.peer);
	KUNIT_EXPECT_EQ(test, t->fake.peer.forgetting, 0);
}

static struct kunit_case np_resolve_cases[] = {
	KUNIT_CASE(np_resolved_regions_are_bounded),
	KUNIT_CASE(np_fault_is_within_the_owners_bounds),
	KUNIT_CASE(np_lease_is_within_the_owners_bounds),
	KUNIT_CASE(np_resolve_of_another_kind_fails),
	KUNIT_CASE(np_forget_undoes_all_resolves_before_it),
	KUNIT_CASE(np_forget_undoes_no_resolve_under_way),
	KUNIT_CASE_SLOW(np_resolves_under_way_are_bounded),
	KUNIT_CASE(np_device_that_leaves_waits_for_no_peer),
	KUNIT_CASE(np_forgets_under_way_are_bounded),
	{}
};

static struct kunit_suite np_resolve_suite = {
	.name = "nprdma_proto_resolve",
	.init = np_ask_init_test,
	.exit = np_ask_exit_test,
	.test_cases = np_resolve_cases,
};

kunit_test_suite(np_resolve_suite);
