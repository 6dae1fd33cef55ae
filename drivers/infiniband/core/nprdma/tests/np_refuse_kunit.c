// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of what peers without a grant, or without a hold, are answered:
 * the same as if there were no such thing.
 */
#include <kunit/test.h>

#include "np_region_fixture.h"

static void np_resolve_is_refused_the_same_whatever_the_reason(struct kunit *test)
{
	enum { NONE, LIVE, OTHER, MUTE, DEAD, NR };
	struct np_region *region[NR] = {};
	const struct np_msg *answer;
	struct np_test *t = test->priv;
	struct ib_pd other = { .device = t->ibdev };
	struct np_test_peer *peer;
	struct np_resolve out;
	struct np_msg msg;
	unsigned int i;

	region[LIVE] = np_test_region(test, 4);
	region[OTHER] = np_test_more(test, &other, NP_TEST_ACCESS);
	region[MUTE] = np_test_more(test, &t->pd, IB_ACCESS_LOCAL_WRITE |
				    IB_ACCESS_UNPINNED);
	region[DEAD] = np_test_more(test, &t->pd, NP_TEST_ACCESS);
	np_region_close(region[DEAD]);
	for (i = LIVE; i < NR; i++)
		KUNIT_ASSERT_EQ(test, 0, xa_err(xa_store(&t->npdev.rkeys, i,
							 region[i],
							 GFP_KERNEL)));
	peer = np_test_peer(test, &t->pd);
	for (i = NONE; i < NR; i++)
		if (i != LIVE)
			np_test_resolve(test, peer, i, 0, RDMA_NP_ACCESS);
	/* From another host */
	for (i = NONE; i < NR; i++)
		np_test_resolve(test, peer, i, 1, RDMA_NP_QP);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_grants, 0);
	KUNIT_EXPECT_EQ(test, t->nr_keys, 0);
	for (i = LIVE; i < NR; i++)
		KUNIT_EXPECT_TRUE(test, list_empty(&region[i]->grants));

	msg = (struct np_msg){ .type = NP_MSG_RESOLVE, .rkey = LIVE };
	answer = np_test_asks(test, peer, &msg, 0);
	KUNIT_EXPECT_EQ(test, answer->status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_region_resolve(region[LIVE], &out), 0);
	out.max_pages = RDMA_NP_MAX_PAGES;
	out.max_ranges = RDMA_NP_MAX_RANGES;
	out.lanes = NP_LANES;
	KUNIT_EXPECT_MEMEQ(test, &answer->region, &out, sizeof(out));
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	KUNIT_EXPECT_EQ(test, list_count_nodes(&region[LIVE]->grants), 1);

	/* Now the peer, but nobody else, has them */
	np_test_resolve(test, peer, LIVE, 1, RDMA_NP_QP);
	np_test_resolve(test, peer, OTHER, 0, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_grants, 1);
	xa_destroy(&t->npdev.rkeys);
	for (i = OTHER; i < NR; i++) {
		if (i != DEAD)
			np_region_close(region[i]);
		np_region_put(region[i]);
	}
	np_pd_dealloc(&other);
}

static noinline_for_stack void np_test_fault_refused(struct kunit *test,
						     struct np_test_peer *peer,
						     struct np_region *region,
						     u64 id, unsigned int flags,
						     u16 lid, u8 status)
{
	struct np_msg msg = np_test_fault_msg(region, id, flags);

	np_test_refused(test, peer, &msg, lid, status);
}

/* Whatever is asked for, it is answered so, and nothing happens to the region */
static void np_test_no_fault(struct kunit *test, struct np_test_peer *peer,
			     struct np_region *region, u64 id, u16 lid, u8 status)
{
	np_test_fault_refused(test, peer, region, id, 0, lid, status);
	np_test_fault_refused(test, peer, region, id,
			      RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_WRITE, lid, status);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->resident), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->faults_failed), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->holds), 0);
}

static void np_fault_without_a_grant_is_answered_as_of_no_region(struct kunit *test)
{
	struct np_region *live = np_test_region(test, 4), *mine, *theirs, *dead;
	struct np_test *t = test->priv;
	struct ib_pd other = { .device = t->ibdev };
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct np_msg msg;
	unsigned int i;

	mine = np_test_more(test, &t->pd, NP_TEST_ACCESS);
	theirs = np_test_more(test, &other, NP_TEST_ACCESS);
	dead = np_test_more(test, &t->pd, NP_TEST_ACCESS);
	np_region_close(dead);
	for (i = 0; i < 2; i++) {
		np_test_no_fault(test, peer, mine, mine->id, 0, RDMA_NP_GONE);
		np_test_no_fault(test, peer, theirs, theirs->id, 0, RDMA_NP_GONE);
		np_test_no_fault(test, peer, dead, dead->id, 0, RDMA_NP_GONE);
		np_test_no_fault(test, peer, mine, U64_MAX, 0, RDMA_NP_GONE);
		/* The same of who has resolved another one */
		if (!i)
			np_test_grant(test, peer, live);
	}
	/* Of that one, but not in the peer's name from elsewhere */
	np_test_no_fault(test, peer, live, live->id, 1, RDMA_NP_QP);
	msg = np_test_fault_msg(live, live->id, 0);
	KUNIT_EXPECT_EQ(test, np_test_asks(test, peer, &msg, 0)->status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_rights(live, 0), RDMA_NP_WORD_READABLE);

	/* When it is dead, and when it was forgotten */
	np_region_close(live);
	np_test_fault_refused(test, peer, live, live->id, 0, 0, RDMA_NP_GONE);
	np_test_forget(test, peer, live->id);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_grants, 0);
	np_test_fault_refused(test, peer, live, live->id, 0, 0, RDMA_NP_GONE);
	np_test_end(mine);
	np_test_end(theirs);
	np_region_put(dead);
	np_pd_dealloc(&other);
}

static u64 np_test_pages_held(struct np_region *region)
{
	return atomic64_read(&region->count->held);
}

/* Who guesses ids does not learn which there are, and gives nothing back */
static void np_release_of_no_hold_is_answered_as_of_one(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *a = np_test_peer(test, &t->pd);
	struct np_test_peer *b = np_test_peer(test, &t->pd);
	unsigned int hold_ms = np_hold_ms;
	struct np_msg msg;
	u64 id;

	np_hold_ms = 600000;
	np_test_grant(test, a, region);
	np_test_grant(test, b, region);
	msg = np_test_fault_msg(region, np_region_id(region), RDMA_NP_FAULT_HOLD);
	id = np_test_asks(test, a, &msg, 0)->faulted.hold_id;
	np_hold_ms = hold_ms;
	KUNIT_EXPECT_NE(test, id, 0);
	KUNIT_EXPECT_EQ(test, np_test_pages_held(region), 1);

	np_test_release(test, a, id + 1, 0, RDMA_NP_OK);
	np_test_release(test, a, 0, 0, RDMA_NP_OK);
	np_test_release(test, b, id, 0, RDMA_NP_OK);
	np_test_release(test, a, id, 1, RDMA_NP_QP);
	KUNIT_EXPECT_EQ(test, np_test_pages_held(region), 1);
	np_test_release(test, a, id, 0, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_test_pages_held(region), 0);
	/* A copy */
	np_test_release(test, a, id, 0, RDMA_NP_OK);
}

static struct kunit_case np_refuse_cases[] = {
	KUNIT_CASE(np_resolve_is_refused_the_same_whatever_the_reason),
	KUNIT_CASE(np_fault_without_a_grant_is_answered_as_of_no_region),
	KUNIT_CASE(np_release_of_no_hold_is_answered_as_of_one),
	{}
};

static struct kunit_suite np_refuse_suite = {
	.name = "nprdma_region_refuse",
	.init = np_test_init,
	.test_cases = np_refuse_cases,
};

kunit_test_suite(np_refuse_suite);
