// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of holds on the asking side: each is kept and given back once, whoever
 * wants to learn of it.
 */
#include <kunit/test.h>

#include "np_ask_fixture.h"

static void np_hold_is_kept_and_given_back_once(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_EXPECT_EQ(test, np_peer_release(&t->fake.peer, 42), -ENOENT);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	/* A copy does not release what is in use */
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.hold_id, 42);

	KUNIT_EXPECT_EQ(test, np_peer_release(&t->fake.peer, 43), -ENOENT);
	KUNIT_EXPECT_EQ(test, np_peer_release(&t->fake.peer, 42), 0);
	KUNIT_EXPECT_EQ(test, np_peer_release(&t->fake.peer, 42), -ENOENT);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 2);
	KUNIT_EXPECT_EQ(test, t->sent[1].type, NP_MSG_RELEASE);
	KUNIT_EXPECT_EQ(test, t->sent[1].hold_id, 42);
	np_answer_to(test, 1, RDMA_NP_OK, 0);
}

static unsigned int np_released(struct np_ask_test *t)
{
	unsigned int i, nr = 0;

	for (i = 0; i < min(t->nr_sent, NP_TEST_SENT); i++)
		nr += t->sent[i].type == NP_MSG_RELEASE;
	return nr;
}

static void np_copy_then_done(struct np_trans *trans, u32 status,
			      const struct np_msg *answer)
{
	struct np_ask_test *t = container_of(trans->peer, struct np_ask_test,
					     fake.peer);

	np_peer_answered(trans->peer, answer);
	t->done(trans, status, answer);
}

/* The copies of an answer come by two queues, each with a worker of its own. */
static void np_hold_outlives_a_copy_beside_its_answer(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
	np_instead_of_done(test, np_copy_then_done);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, ev.hold_id, 42);
	KUNIT_EXPECT_EQ(test, np_released(t), 0);
	KUNIT_EXPECT_EQ(test, np_peer_release(&t->fake.peer, 42), 0);
	KUNIT_EXPECT_EQ(test, np_released(t), 1);
}

static void np_kill_then_done(struct np_trans *trans, u32 status,
			      const struct np_msg *answer)
{
	struct np_ask_test *t = container_of(trans->peer, struct np_ask_test,
					     fake.peer);

	np_peer_fail(trans->peer);
	t->done(trans, status, answer);
}

static void np_hold_answered_while_its_qp_ends_is_none(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
	np_instead_of_done(test, np_kill_then_done);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_QP);
	KUNIT_EXPECT_EQ(test, ev.hold_id, 0);
	KUNIT_EXPECT_EQ(test, ev.nr_words, 0);
	/* The other end's QP may live on */
	KUNIT_EXPECT_EQ(test, np_released(t), 1);
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_kept, 0);
}

static void np_hold_not_asked_for_is_given_back(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_WRITE), 0);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, ev.nr_words, 1);
	KUNIT_EXPECT_EQ(test, ev.hold_id, 0);
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_kept, 0);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 2);
	KUNIT_EXPECT_EQ(test, t->sent[1].type, NP_MSG_RELEASE);
	KUNIT_EXPECT_EQ(test, t->sent[1].hold_id, 42);
}

static void np_holds_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;
	u64 id;

	np_bind(test, 7);
	for (id = 1; id <= NP_MAX_KEPT; id++) {
		t->nr_sent = 0;
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD),
				0);
		np_answer_to(test, 0, RDMA_NP_OK, id);
		KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	}
	t->nr_sent = 0;
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), -EBUSY);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);

	/* One that is being given back counts until that was answered */
	KUNIT_EXPECT_EQ(test, np_peer_release(&t->fake.peer, 3), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), -EBUSY);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 2);
	np_answer_to(test, 1, NP_WIRE_WORKING, 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), -EBUSY);
	np_answer_to(test, 1, RDMA_NP_OK, 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
}

static void np_hold_nobody_learns_of_is_given_back(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg late;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
	np_channel_close(&t->channel);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 6, 0), -EBADF);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 2);
	KUNIT_EXPECT_EQ(test, t->sent[1].type, NP_MSG_RELEASE);
	KUNIT_EXPECT_EQ(test, t->sent[1].hold_id, 42);

	/* An answer to a request that was given up */
	late = np_sample(NP_MSG_FAULT, true);
	np_peer_answered(&t->fake.peer, &late);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 3);
	KUNIT_EXPECT_EQ(test, t->sent[2].type, NP_MSG_RELEASE);
	KUNIT_EXPECT_EQ(test, t->sent[2].hold_id, late.faulted.hold_id);
}

#define NP_TEST_LEASE	(RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE)

static void np_lease_is_recalled_by_one_event(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_EXPECT_EQ(test, np_peer_told_recall(peer, 42), RDMA_NP_GONE);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, NP_TEST_LEASE), 0);
	/* Who learns of the lease later has to learn of this, too */
	KUNIT_EXPECT_EQ(test, np_peer_told_recall(peer, 42), RDMA_NP_BUSY);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.type, RDMA_NP_EVENT_FAULT);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));

	KUNIT_EXPECT_EQ(test, np_peer_told_recall(peer, 43), RDMA_NP_GONE);
	KUNIT_EXPECT_EQ(test, np_peer_told_recall(peer, 42), RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_peer_told_recall(peer, 42), RDMA_NP_OK);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.type, RDMA_NP_EVENT_RECALL);
	KUNIT_EXPECT_EQ(test, ev.hold_id, 42);
	KUNIT_EXPECT_EQ(test, ev.region_id, 7);
	KUNIT_EXPECT_EQ(test, ev.cookie, 5);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));

	/* It is on its way back */
	KUNIT_EXPECT_EQ(test, np_peer_release(peer, 42), 0);
	KUNIT_EXPECT_EQ(test, np_peer_told_recall(peer, 42), RDMA_NP_OK);
	np_answer_to(test, 1, RDMA_NP_OK, 0);
	KUNIT_EXPECT_EQ(test, np_peer_told_recall(peer, 42), RDMA_NP_GONE);
	KUNIT_EXPECT_EQ(test, peer->nr_kept_leases, 0);
}

static void np_recall_of_a_lease_given_back_is_not_heard(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, NP_TEST_LEASE), 0);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, np_peer_told_recall(peer, 42), RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_peer_release(peer, 42), 0);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	np_answer_to(test, 1, RDMA_NP_OK, 0);
}

/* What is no lease ends in time by itself, and nobody would know the event */
static void np_hold_is_not_recalled(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, np_peer_told_recall(&t->fake.peer, 42), RDMA_NP_OK);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
}

/* There are always some holds left that are none */
static void np_kept_leases_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;
	u64 id;

	np_bind(test, 7);
	for (id = 1; id <= NP_MAX_LEASES; id++) {
		t->nr_sent = 0;
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, NP_TEST_LEASE), 0);
		np_answer_to(test, 0, RDMA_NP_OK, id);
		KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	}
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, NP_TEST_LEASE), -EBUSY);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
}

/* User space will take it for the truth: so it has what it asked for, and no more than that */
static void np_lease_is_of_what_can_be(struct kunit *test)
{
	static const struct rdma_np_range said[] = {
		{ 0x1000, 0x1000 },	/* what may be */
		{ 0x0800, 0x2000 },
		{ 0, 0 },		/* and what may not */
		{ 0x1000, 0 },
		{ 0x1001, 0x0fff },
		{ 0x1000, 0x0fff },
		{ 0x07ff, 0x2001 },
		{ 0x0800, 0x2002 },
		{ 0x3000, 0x10 },
		{ 0x0800, U64_MAX },
		{ U64_MAX, 0x3000 },
		{ 0, U64_MAX },
	};
	const struct rdma_np_range ranges[] = { { 0x1000, 0x1000 }, { 0x800, 0x2001 } };
	struct rdma_np_fault_req req = { .region_id = 7, .flags = NP_TEST_LEASE };
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct rdma_np_event ev;
	unsigned int i;

	np_bind(test, 7);
	for (i = 0; i < ARRAY_SIZE(said); i++) {
		const struct rdma_np_range *want = i < 2 ? &said[i] : ranges;

		t->nr_sent = 0;
		t->lease = said[i];
		KUNIT_ASSERT_EQ(test, np_peer_fault(peer, &t->channel, &req, ranges, 2), 0);
		np_answer_to(test, 0, RDMA_NP_OK, 42 + i);
		KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
		KUNIT_EXPECT_EQ(test, ev.hold_id, 42 + i);
		KUNIT_EXPECT_EQ_MSG(test, ev.lease_addr, want->addr, "%u", i);
		KUNIT_EXPECT_EQ_MSG(test, ev.lease_length, want->length, "%u", i);
		KUNIT_EXPECT_EQ(test, ev.lease_key, 0x5151);
	}
	/* What is no lease has none of these */
	t->nr_sent = 0;
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
	np_answer_to(test, 0, RDMA_NP_OK, 99);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.hold_id, 99);
	KUNIT_EXPECT_EQ(test, ev.lease_length, 0);
	KUNIT_EXPECT_EQ(test, ev.lease_key, 0);
}

static struct kunit_case np_held_cases[] = {
	KUNIT_CASE(np_lease_is_of_what_can_be),
	KUNIT_CASE(np_lease_is_recalled_by_one_event),
	KUNIT_CASE(np_recall_of_a_lease_given_back_is_not_heard),
	KUNIT_CASE(np_hold_is_not_recalled),
	KUNIT_CASE(np_kept_leases_are_bounded),
	KUNIT_CASE(np_hold_is_kept_and_given_back_once),
	KUNIT_CASE(np_hold_outlives_a_copy_beside_its_answer),
	KUNIT_CASE(np_hold_answered_while_its_qp_ends_is_none),
	KUNIT_CASE(np_hold_not_asked_for_is_given_back),
	KUNIT_CASE(np_holds_are_bounded),
	KUNIT_CASE(np_hold_nobody_learns_of_is_given_back),
	{}
};

static struct kunit_suite np_held_suite = {
	.name = "nprdma_proto_held",
	.init = np_ask_init_test,
	.exit = np_ask_exit_test,
	.test_cases = np_held_cases,
};

kunit_test_suite(np_held_suite);
