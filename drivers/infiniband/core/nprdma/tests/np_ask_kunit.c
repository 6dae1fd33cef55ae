// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of FAULTs that are asked for: one event each, in lanes, answered, repeated,
 * given up and killed.
 */
#include <kunit/test.h>

#include "np_ask_fixture.h"

static void np_fault_has_one_event(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 1, 0), -ENOENT);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);
	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 0xc00c1e, 0), 0);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 1);
	KUNIT_EXPECT_EQ(test, t->sent[0].fault.region_id, 7);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));

	/* The answer to something else */
	t->sent[0].tid--;
	np_answer_to(test, 0, RDMA_NP_OK, 0);
	t->sent[0].tid++;
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));

	np_answer_to(test, 0, RDMA_NP_OK, 0);
	np_answer_to(test, 0, RDMA_NP_OK, 0);
	np_answer_to(test, 0, RDMA_NP_ACCESS, 0);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.type, RDMA_NP_EVENT_FAULT);
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, ev.cookie, 0xc00c1e);
	KUNIT_EXPECT_EQ(test, ev.nr_words, 1);
	KUNIT_EXPECT_EQ(test, le64_to_cpu(ev.words[0]), 7);
	KUNIT_EXPECT_EQ(test, ev.hold_id, 0);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
}

/* The answer to what was sent as number @nr, as it comes by the quick transport */
static bool np_test_at_once(struct kunit *test, unsigned int nr, u8 status, u64 hold_id)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg answer = {
		.type = t->sent[nr].type,
		.answer = true,
		.quick = true,
		.status = status,
		.tid = t->sent[nr].tid,
		.faulted = { .hold_id = hold_id, .nr_words = 1, .words = { 7 } },
	};

	return np_peer_answered_at_once(&t->fake.peer, &answer);
}

static void np_fault_is_answered_in_softirq(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct rdma_np_event ev;
	bool once, twice;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 0xc00c1e, 0), 0);
	local_bh_disable();
	once = np_test_at_once(test, 0, RDMA_NP_OK, 0);
	twice = np_test_at_once(test, 0, RDMA_NP_OK, 0);
	local_bh_enable();
	KUNIT_EXPECT_TRUE(test, once);
	KUNIT_EXPECT_FALSE(test, twice);
	KUNIT_EXPECT_TRUE(test, bitmap_empty(peer->lanes, NP_LANES));
	KUNIT_EXPECT_TRUE(test, list_empty(&peer->trans));
	/* It has all been done: a copy changes nothing, nor does the peer's end */
	np_answer_to(test, 0, RDMA_NP_OK, 0);
	np_peer_fail(peer);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.type, RDMA_NP_EVENT_FAULT);
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, ev.cookie, 0xc00c1e);
	KUNIT_EXPECT_EQ(test, ev.nr_words, 1);
	KUNIT_EXPECT_EQ(test, le64_to_cpu(ev.words[0]), 7);
	KUNIT_EXPECT_EQ(test, ev.hold_id, 0);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
}

/* What the softirq has interrupted may have any of the locks: then a worker does it */
static void np_fault_answered_in_softirq_waits_for_no_lock(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct rdma_np_event ev;
	bool with_peers, with_channels;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	spin_lock(&peer->lock);
	with_peers = np_test_at_once(test, 0, RDMA_NP_OK, 0);
	spin_unlock(&peer->lock);
	spin_lock(&t->channel.lock);
	with_channels = np_test_at_once(test, 0, RDMA_NP_OK, 0);
	spin_unlock(&t->channel.lock);
	KUNIT_EXPECT_FALSE(test, with_peers);
	KUNIT_EXPECT_FALSE(test, with_channels);
	/* And nothing has happened */
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_FALSE(test, bitmap_empty(peer->lanes, NP_LANES));
	KUNIT_EXPECT_FALSE(test, list_empty(&peer->trans));
	np_peer_fail(peer);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_QP);
	KUNIT_EXPECT_EQ(test, ev.nr_words, 0);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
}

/* What takes more than an event goes over a worker */
static void np_only_pages_are_answered_in_softirq(struct kunit *test)
{
	static const u8 status[] = {
		RDMA_NP_BUSY, RDMA_NP_GONE, RDMA_NP_ACCESS, NP_WIRE_FULL, NP_WIRE_WORKING,
	};
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct rdma_np_event ev;
	unsigned int i;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 0, 0), 0);
	for (i = 0; i < ARRAY_SIZE(status); i++)
		KUNIT_EXPECT_FALSE_MSG(test, np_test_at_once(test, 0, status[i], 0),
				       "status %u", status[i]);
	/* A hold that nobody has asked for goes back, which sends a message */
	KUNIT_EXPECT_FALSE(test, np_test_at_once(test, 0, RDMA_NP_OK, 0x99));
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 1, RDMA_NP_FAULT_HOLD), 0);
	KUNIT_EXPECT_FALSE(test, np_test_at_once(test, 1, RDMA_NP_OK, 0x99));
	KUNIT_EXPECT_FALSE(test, np_test_at_once(test, 1, RDMA_NP_OK, 0));
	KUNIT_EXPECT_EQ(test, peer->nr_kept, 0);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, bitmap_weight(peer->lanes, NP_LANES), 2);
	/* Of a closed channel nobody reads, and the worker gives back what it had */
	KUNIT_EXPECT_EQ(test, t->channel.reserved, 2);
	np_channel_close(&t->channel);
	KUNIT_EXPECT_FALSE(test, np_test_at_once(test, 0, RDMA_NP_OK, 0));
	KUNIT_EXPECT_EQ(test, t->channel.reserved, 2);
	np_answer_to(test, 0, RDMA_NP_OK, 0);
	np_answer_to(test, 1, RDMA_NP_BUSY, 0);
}

static void np_fault_lanes_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	DECLARE_BITMAP(seen, NP_LANES) = {};
	struct rdma_np_event ev;
	unsigned int i;

	np_bind(test, 7);
	for (i = 0; i < NP_LANES; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, i, 0), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, i, 0), -EBUSY);
	KUNIT_EXPECT_EQ(test, t->nr_sent, NP_LANES);
	for (i = 0; i < NP_LANES; i++)
		KUNIT_EXPECT_FALSE(test, __test_and_set_bit(t->sent[i].fault.lane,
							    seen));

	/* A lane is free when its answer is there; its next tid is higher */
	np_answer_to(test, 3, RDMA_NP_BUSY, 0);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 100, 0), 0);
	KUNIT_EXPECT_EQ(test, t->sent[NP_LANES].fault.lane,
			t->sent[3].fault.lane);
	KUNIT_EXPECT_GT(test, t->sent[NP_LANES].tid, t->sent[3].tid);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, ev.cookie, 3);
}

#define NP_TEST_TIMEOUT	usecs_to_jiffies(NP_RTO_MAX_US)

/* A peer that is full is asked for no more at once than it has left under way */
static void np_fault_lanes_close_while_the_peer_is_full(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	unsigned int i;

	/* Time-outs of a second, of which none passes but those that are said to */
	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	np_bind(test, 7);
	for (i = 0; i < 8; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, i, 0), 0);
	for (i = 0; i < 3; i++)
		np_answer_to(test, i, NP_WIRE_FULL, 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 8, 0), -EBUSY);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 8, RDMA_NP_FAULT_HOLD), -EBUSY);

	/* One that was served makes room for another */
	np_answer_to(test, 3, RDMA_NP_OK, 0);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 8, 0), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 9, 0), -EBUSY);

	/* And each time-out that passes for one more, until there are as many as ever */
	peer->lanes_since -= NP_TEST_TIMEOUT;
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 9, 0), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 10, 0), -EBUSY);
	peer->lanes_since -= 3 * NP_TEST_TIMEOUT;
	for (i = 10; i < 13; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, i, 0), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, i, 0), -EBUSY);
	peer->lanes_since -= NP_LANES * NP_TEST_TIMEOUT;
	for (; i < NP_LANES + 4; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, i, 0), 0);
	KUNIT_EXPECT_TRUE(test, bitmap_full(peer->lanes, NP_LANES));
	KUNIT_EXPECT_EQ(test, peer->lanes_closed, 0);
}

/* Also if that was the only one: its QP does not ask without end */
static void np_fault_alone_waits_for_a_full_peer(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct rdma_np_event ev;

	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	np_answer_to(test, 0, NP_WIRE_FULL, 0);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, ev.cookie, 5);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 6, 0), -EBUSY);
	peer->lanes_since -= NP_TEST_TIMEOUT;
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 6, 0), 0);
}

static void np_fault_dies_with_the_qp(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	np_peer_fail(&t->fake.peer);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 6, 0), -ENOTCONN);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_QP);
	KUNIT_EXPECT_EQ(test, ev.cookie, 5);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	np_answer_to(test, 0, RDMA_NP_OK, 0);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
}

static bool np_wait_event(struct np_ask_test *t, struct rdma_np_event *ev)
{
	return wait_event_timeout(t->channel.wait,
				  np_channel_pop(&t->channel, ev), 30 * HZ);
}

static void np_fault_is_repeated_then_given_up(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;
	unsigned int i;

	/* The shortest time-outs: 3.3 s in all */
	np_rtt_sample(&t->fake.peer.rtt, 1);
	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	KUNIT_ASSERT_TRUE(test, np_wait_event(t, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_TIMEOUT);
	KUNIT_EXPECT_EQ(test, ev.cookie, 5);
	KUNIT_ASSERT_EQ(test, t->nr_sent, NP_TRIES);
	/* Not all by the same way, see ud.c */
	KUNIT_EXPECT_TRUE(test, t->sent[0].quick);
	t->sent[0].quick = false;
	for (i = 1; i < NP_TRIES; i++)
		KUNIT_EXPECT_MEMEQ(test, &t->sent[i], &t->sent[0],
				   sizeof(t->sent[0]));
	KUNIT_EXPECT_TRUE(test, bitmap_empty(t->fake.peer.lanes, NP_LANES));
}

static void np_fault_working_is_not_given_up(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;
	unsigned int seen;

	np_rtt_sample(&t->fake.peer.rtt, 1);
	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	for (seen = 1; seen <= NP_TRIES + 2; seen++) {
		KUNIT_ASSERT_NE(test, 0,
				wait_event_timeout(t->wait,
						   READ_ONCE(t->nr_sent) >= seen,
						   30 * HZ));
		np_answer_to(test, 0, NP_WIRE_WORKING, 0);
	}
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	np_answer_to(test, 0, RDMA_NP_OK, 0);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_OK);
	/* Which copy was answered is not known: it teaches nothing */
	KUNIT_EXPECT_EQ(test, t->fake.peer.rtt.srtt_us, 1);
}

static void np_fault_repeated_too_early_teaches(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg answer = {
		.type = NP_MSG_FAULT, .answer = true, .status = RDMA_NP_BUSY,
		.quick = true,
	};

	np_rtt_sample(&t->fake.peer.rtt, 1);
	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
						    READ_ONCE(t->nr_sent) >= 2,
						    30 * HZ));
	/* To the first copy: the other one did not go the quick way */
	answer.tid = t->sent[0].tid;
	np_peer_answered(&t->fake.peer, &answer);
	/* The time-out, of which a timer may leave out a part of a jiffy, with weight 1/8 */
	KUNIT_EXPECT_GE(test, t->fake.peer.rtt.srtt_us, NP_RTO_MIN_US / 16);
}

/* FAULTs that go by the quick transport first, as if the port had one; then none do */
static unsigned int np_quick_faults(struct kunit *test, unsigned int nr)
{
	struct np_ask_test *t = np_ask_test(test);
	unsigned int i, first = t->nr_sent;
	struct np_trans *trans;

	for (i = 0; i < nr; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, i, 0), 0);
	spin_lock(&t->fake.peer.lock);
	list_for_each_entry(trans, &t->fake.peer.trans, entry) {
		trans->quick = trans->msg.quick;
		trans->tries = 2;
	}
	spin_unlock(&t->fake.peer.lock);
	return first;
}

static void np_quick_transport_that_loses_all_is_left(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	unsigned int nr, i, j;

	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	np_bind(test, 7);
	/* As many at once as there are: that is one loss */
	for (i = 0; i < NP_QUICK_TRIES; i++) {
		nr = np_quick_faults(test, 4);
		for (j = nr; j < nr + 4; j++) {
			KUNIT_EXPECT_TRUE(test, t->sent[j].quick);
			np_answer_to(test, j, RDMA_NP_OK, 0);
		}
	}
	nr = np_quick_faults(test, 1);
	KUNIT_EXPECT_FALSE(test, t->sent[nr].quick);
	np_answer_to(test, nr, RDMA_NP_OK, 0);
	/* After a while it is tried again, once */
	peer->quick_after = jiffies;
	for (i = 0; i < 2; i++) {
		nr = np_quick_faults(test, 1);
		KUNIT_EXPECT_EQ(test, t->sent[nr].quick, !i);
		np_answer_to(test, nr, RDMA_NP_OK, 0);
	}
}

static void np_quick_transport_that_loses_some_is_used(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg answer = {
		.type = NP_MSG_FAULT, .answer = true, .status = RDMA_NP_BUSY,
		.quick = true,
	};
	unsigned int nr, i;

	np_rtt_sample(&t->fake.peer.rtt, NP_RTO_MAX_US);
	np_bind(test, 7);
	for (i = 0; i < 6 * NP_QUICK_TRIES; i++) {
		nr = np_quick_faults(test, 1);
		KUNIT_ASSERT_TRUE(test, t->sent[nr].quick);
		answer.tid = t->sent[nr].tid;
		/* It came, or is said to have come, just before it is left */
		if (i % NP_QUICK_TRIES == NP_QUICK_TRIES - 1 && i & 1)
			np_peer_answered(&t->fake.peer, &answer);
		else if (i % NP_QUICK_TRIES == NP_QUICK_TRIES - 1)
			np_answer_to(test, nr, NP_WIRE_WORKING, 0);
		np_answer_to(test, nr, RDMA_NP_OK, 0);
	}
}

static void np_fault_is_not_repeated_out_of_place(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	unsigned long place = jiffies + HZ / 2;

	np_rtt_sample(&t->fake.peer.rtt, 1);
	np_bind(test, 7);
	/* Others have all places before */
	t->fake.peer.again = place;
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
						    READ_ONCE(t->nr_sent) >= 2,
						    30 * HZ));
	KUNIT_EXPECT_TRUE(test, time_after_eq(jiffies, place));
	/* The one that comes next is behind it */
	KUNIT_EXPECT_TRUE(test, time_after(READ_ONCE(t->fake.peer.again), place));
	KUNIT_EXPECT_MEMEQ(test, &t->sent[1].fault, &t->sent[0].fault,
			   sizeof(t->sent[0].fault));
	np_answer_to(test, 0, RDMA_NP_OK, 0);
}

static void np_answer_to_a_repetition_hastens_the_next(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_trans *next;
	unsigned int first;

	/* A long time-out, so that a place is far away */
	np_rtt_sample(&t->fake.peer.rtt, NP_RTO_MAX_US);
	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 6, 0), 0);
	KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
						    READ_ONCE(t->nr_sent) >= 3,
						    30 * HZ));
	/* One of them; the other one has the next place */
	first = t->sent[2].tid == t->sent[0].tid ? 0 : 1;
	np_answer_to(test, 2, RDMA_NP_OK, 0);
	/* On its way, without waiting for its place, or sent already */
	spin_lock(&t->fake.peer.lock);
	next = list_first_entry(&t->fake.peer.trans, struct np_trans, entry);
	KUNIT_EXPECT_TRUE(test, !next->placed ||
				!timer_pending(&next->work.timer));
	spin_unlock(&t->fake.peer.lock);
	KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
						    READ_ONCE(t->nr_sent) >= 4,
						    30 * HZ));
	KUNIT_EXPECT_EQ(test, t->sent[3].tid, t->sent[1 - first].tid);
	np_answer_to(test, 3, RDMA_NP_OK, 0);
}

#define NP_TEST_AGAIN	220	/* requests */
#define NP_TEST_AGAINS	120	/* more than there are time-outs in NP_RTO_MAX_US */

/* All time out together, more of them than have a place for as long as one waits for it. */
static void np_requests_are_not_sent_again_together(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	unsigned long begin, rto = usecs_to_jiffies(NP_RTO_MIN_US);
	struct np_trans *trans;
	unsigned int i, nr = 0;

	trans = kunit_kcalloc(test, NP_TEST_AGAIN, sizeof(*trans), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, trans);
	np_rtt_sample(&t->fake.peer.rtt, 1);
	begin = jiffies;
	for (i = 0; i < NP_TEST_AGAIN; i++) {
		np_trans_init(&trans[i], &t->fake.peer, NP_MSG_FORGET,
			      np_test_done, NULL);
		KUNIT_ASSERT_EQ(test, np_trans_start(&trans[i]), 0);
	}
	KUNIT_EXPECT_NE(test, 0,
			wait_event_timeout(t->wait, READ_ONCE(t->nr_sent) >=
					   NP_TEST_AGAIN + NP_TEST_AGAINS,
					   30 * HZ));
	np_peer_fail(&t->fake.peer);
	flush_workqueue(np_wq);
	/* The first time is quick; however late we are, nobody comes before his place */
	for (i = 0; i < min(t->nr_sent, NP_TEST_SENT); i++) {
		if (t->sent[i].quick)
			continue;
		KUNIT_ASSERT_TRUE_MSG(test, time_after_eq(t->sent_at[i],
							  begin + nr * rto),
				      "number %u after %lu jiffies", nr,
				      t->sent_at[i] - begin);
		nr++;
	}
	KUNIT_EXPECT_GE(test, nr, NP_TEST_AGAINS);
}

static struct kunit_case np_ask_cases[] = {
	KUNIT_CASE(np_fault_has_one_event),
	KUNIT_CASE(np_fault_is_answered_in_softirq),
	KUNIT_CASE(np_fault_answered_in_softirq_waits_for_no_lock),
	KUNIT_CASE(np_only_pages_are_answered_in_softirq),
	KUNIT_CASE(np_fault_lanes_are_bounded),
	KUNIT_CASE(np_fault_lanes_close_while_the_peer_is_full),
	KUNIT_CASE(np_fault_alone_waits_for_a_full_peer),
	KUNIT_CASE(np_fault_dies_with_the_qp),
	KUNIT_CASE_SLOW(np_fault_is_repeated_then_given_up),
	KUNIT_CASE_SLOW(np_fault_working_is_not_given_up),
	KUNIT_CASE(np_fault_repeated_too_early_teaches),
	KUNIT_CASE(np_quick_transport_that_loses_all_is_left),
	KUNIT_CASE(np_quick_transport_that_loses_some_is_used),
	KUNIT_CASE_SLOW(np_fault_is_not_repeated_out_of_place),
	KUNIT_CASE_SLOW(np_answer_to_a_repetition_hastens_the_next),
	KUNIT_CASE_SLOW(np_requests_are_not_sent_again_together),
	{}
};

static struct kunit_suite np_ask_suite = {
	.name = "nprdma_proto_ask",
	.init = np_ask_init_test,
	.exit = np_ask_exit_test,
	.test_cases = np_ask_cases,
};

kunit_test_suite(np_ask_suite);
