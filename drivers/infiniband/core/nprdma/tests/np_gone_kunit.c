// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of dead regions on the serving side: who has their keys is told by GONE.
 */
#include <kunit/test.h>

#include "np_ask_fixture.h"

static unsigned int np_under_way(struct np_ask_test *t)
{
	unsigned int nr;

	spin_lock(&t->fake.peer.lock);
	nr = list_count_nodes(&t->fake.peer.trans);
	spin_unlock(&t->fake.peer.lock);
	return nr;
}

/* The place of a region's GONE, looked for from @first on. */
static unsigned int np_sent_gone(struct np_ask_test *t, u64 region_id,
				 unsigned int first)
{
	unsigned int i, nr;

	spin_lock(&t->lock);
	nr = min(t->nr_sent, NP_TEST_SENT);
	for (i = first; i < nr; i++)
		if (t->sent[i].type == NP_MSG_GONE &&
		    t->sent[i].forget.region_id == region_id)
			break;
	spin_unlock(&t->lock);
	return i < nr ? i : NP_TEST_SENT;
}

/* One that is in use keeps no other from being told, and neither do many. */
static void np_gone_is_told_of_each_region(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	const unsigned int nr = 5 * NP_MAX_TELLING;
	struct np_peer *peer = &t->fake.peer;
	struct np_region *regions;
	unsigned int i, at;

	/* Else they are sent again beside the test */
	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	regions = np_granted_regions(test, nr);
	for (i = 0; i < nr; i++)
		np_region_dies(&regions[i]);
	KUNIT_EXPECT_EQ(test, np_under_way(t), NP_MAX_TELLING);
	KUNIT_EXPECT_EQ(test, np_sent_gone(t, NP_MAX_TELLING + 1, 0), NP_TEST_SENT);

	for (i = 0; i < nr; i++) {
		at = np_sent_gone(t, i + 1, 0);
		KUNIT_ASSERT_LT_MSG(test, at, NP_TEST_SENT, "region %u", i + 1);
		np_answer_to(test, at, RDMA_NP_BUSY, 0);
		KUNIT_ASSERT_LE(test, np_under_way(t),
				NP_MAX_TELLING);
	}
	KUNIT_EXPECT_EQ(test, peer->nr_gone, nr);
	KUNIT_EXPECT_FALSE(test, xa_empty(&peer->grants));

	/* Those come again in their turn: so each of them may end */
	for (i = 0; i < nr; i++) {
		KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
			(at = np_sent_gone(t, i + 1, nr)) < NP_TEST_SENT,
			30 * HZ));
		np_answer_to(test, at, RDMA_NP_OK, 0);
	}
	flush_workqueue(np_wq);
	KUNIT_EXPECT_EQ(test, peer->nr_gone, 0);
	KUNIT_EXPECT_TRUE(test, xa_empty(&peer->grants));
}

/* Was the same transaction sent before?  Then it had no answer in time. */
static bool np_sent_before(struct np_ask_test *t, unsigned int at)
{
	unsigned int i;

	for (i = 0; i < at; i++)
		if (t->sent[i].tid == t->sent[at].tid)
			return true;
	return false;
}

/* Not more often for those that are many, and ever more seldom. */
static void np_gone_is_seldom_repeated(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	unsigned long begin = jiffies, due = 0, pause;
	const unsigned int nr = 5 * NP_MAX_TELLING;
	unsigned int i, count = 0;
	struct np_region *regions;

	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	regions = np_granted_regions(test, nr);
	for (i = 0; i < nr; i++)
		np_region_dies(&regions[i]);
	pause = msecs_to_jiffies(NP_GONE_MIN_MS);
	for (i = 0; count < nr + 3 * NP_MAX_TELLING; i++) {
		KUNIT_ASSERT_LT(test, i, NP_TEST_SENT);
		KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
			READ_ONCE(t->nr_sent) > i, 30 * HZ));
		/* What a slow machine answers too late is sent again, which is no repetition */
		if (np_sent_before(t, i))
			continue;
		np_answer_to(test, i, RDMA_NP_BUSY, 0);
		if (count >= nr && !(count % NP_MAX_TELLING)) {
			due += pause;
			pause *= 2;
			KUNIT_EXPECT_TRUE_MSG(test, time_after_eq(t->sent_at[i],
								  begin + due),
					      "number %u after %lu jiffies", count,
					      t->sent_at[i] - begin);
		}
		count++;
	}
}

/* Time-outs are long, so nothing is sent beside the test. */
static void np_forgotten_region_makes_room_for_a_gone(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_region *regions;
	unsigned int i;

	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	regions = np_granted_regions(test, NP_MAX_TELLING + 2);
	for (i = 0; i < NP_MAX_TELLING + 2; i++)
		np_region_dies(&regions[i]);
	/* One under way, and one that waits */
	np_test_forgets(t, 3);
	KUNIT_EXPECT_LT(test, np_sent_gone(t, NP_MAX_TELLING + 1, 0), NP_TEST_SENT);
	KUNIT_EXPECT_EQ(test, np_sent_gone(t, NP_MAX_TELLING + 2, 0), NP_TEST_SENT);
	np_test_forgets(t, NP_MAX_TELLING + 2);
	KUNIT_EXPECT_EQ(test, peer->nr_gone, NP_MAX_TELLING);
	KUNIT_EXPECT_EQ(test, np_under_way(t), NP_MAX_TELLING);
	KUNIT_EXPECT_TRUE(test, list_empty(&peer->to_tell));
}

static void np_peer_that_answers_no_gone_hears_of_the_next(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_region *regions;
	unsigned int i;

	np_rtt_sample(&t->fake.peer.rtt, 1);
	regions = np_granted_regions(test, NP_MAX_TELLING + 1);
	for (i = 0; i < NP_MAX_TELLING + 1; i++)
		np_region_dies(&regions[i]);
	KUNIT_EXPECT_EQ(test, np_sent_gone(t, NP_MAX_TELLING + 1, 0), NP_TEST_SENT);
	KUNIT_EXPECT_NE(test, 0, wait_event_timeout(t->wait,
		np_sent_gone(t, NP_MAX_TELLING + 1, 0) < NP_TEST_SENT, 60 * HZ));
}

static void np_dead_regions_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_region *regions;
	unsigned int i;

	t->fake.failed = np_keys_are_there;
	regions = np_granted_regions(test, NP_MAX_GONE + 2);
	for (i = 0; i < NP_MAX_GONE + 1; i++) {
		np_region_dies(&regions[i]);
		/* What was forgotten does not count */
		if (!i)
			np_test_forgets(t, 1);
	}
	flush_work(&peer->too_many_gone);
	KUNIT_EXPECT_EQ(test, peer->nr_gone, NP_MAX_GONE);
	KUNIT_EXPECT_EQ(test, t->failed, 0);
	KUNIT_EXPECT_FALSE(test, peer->dead);

	np_region_dies(&regions[i]);
	flush_work(&peer->too_many_gone);
	/* First the QP, then the keys */
	KUNIT_EXPECT_EQ(test, t->failed, 1);
	KUNIT_EXPECT_TRUE(test, t->had_keys);
	KUNIT_EXPECT_TRUE(test, peer->dead);
	KUNIT_EXPECT_TRUE(test, xa_empty(&peer->grants));
}

static struct kunit_case np_gone_cases[] = {
	KUNIT_CASE_SLOW(np_gone_is_told_of_each_region),
	KUNIT_CASE_SLOW(np_gone_is_seldom_repeated),
	KUNIT_CASE(np_forgotten_region_makes_room_for_a_gone),
	KUNIT_CASE_SLOW(np_peer_that_answers_no_gone_hears_of_the_next),
	KUNIT_CASE(np_dead_regions_are_bounded),
	{}
};

static struct kunit_suite np_gone_suite = {
	.name = "nprdma_proto_gone",
	.init = np_ask_init_test,
	.exit = np_ask_exit_test,
	.test_cases = np_gone_cases,
};

kunit_test_suite(np_gone_suite);
