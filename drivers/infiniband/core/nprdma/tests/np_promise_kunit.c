// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of promises: a key that a peer was told not to be a name does not
 * become one.
 */
#include <kunit/test.h>

#include "np_region_fixture.h"

/* As many ms later than it is */
static void np_test_promises_age(struct np_test *t, u64 ms)
{
	t->npdev.promises->turned -= ms * NSEC_PER_MSEC;
}

static void np_key_that_was_told_is_no_name(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);

	np_test_resolve(test, peer, 7, 0, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), -EADDRINUSE);
	/* It leaves no trace */
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), -EADDRINUSE);
	/* What was not asked about will do */
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 8, region), 0);
	np_test_promises_age(t, RDMA_NP_PINNED_MS);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), -EADDRINUSE);
	np_test_promises_age(t, RDMA_NP_PINNED_MS);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), -EADDRINUSE);
	/* It was told again before that */
	np_test_resolve(test, peer, 7, 0, RDMA_NP_ACCESS);
	np_test_promises_age(t, 2 * RDMA_NP_PINNED_MS);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), -EADDRINUSE);
	np_test_promises_age(t, 2 * RDMA_NP_PINNED_MS);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), 0);
	xa_destroy(&t->npdev.rkeys);
}

static void np_key_that_was_told_long_ago_is_a_name(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);

	np_test_resolve(test, peer, 7, 0, RDMA_NP_ACCESS);
	np_test_promises_age(t, 4 * RDMA_NP_PINNED_MS);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), 0);
	xa_destroy(&t->npdev.rkeys);
}

/* Of a region of another's, or without remote rights, as of none */
static void np_key_that_is_refused_is_no_name_later(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct ib_pd other = { .device = t->ibdev };
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct np_region *mute;

	mute = np_test_more(test, &t->pd, IB_ACCESS_LOCAL_WRITE |
			    IB_ACCESS_UNPINNED);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, mute), 0);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 8, region), 0);
	np_test_resolve(test, peer, 7, 0, RDMA_NP_ACCESS);
	peer->fake.peer.pd = &other;
	np_test_resolve(test, peer, 8, 0, RDMA_NP_ACCESS);
	peer->fake.peer.pd = &t->pd;
	xa_erase(&t->npdev.rkeys, 7);
	xa_erase(&t->npdev.rkeys, 8);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), -EADDRINUSE);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 8, region), -EADDRINUSE);
	np_test_end(mute);
	xa_destroy(&t->npdev.rkeys);
}

static void np_region_that_appears_is_not_denied(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);

	/* The peer's key was looked up, and then registered */
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), 0);
	KUNIT_EXPECT_EQ(test, np_promise_none(peer->fake.ibdev, 7, NULL,
					      &peer->fake.peer.promised), -EAGAIN);
	xa_erase(&t->npdev.rkeys, 7);
	KUNIT_EXPECT_EQ(test, np_promise_none(peer->fake.ibdev, 7, region,
					      &peer->fake.peer.promised), -EAGAIN);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), 0);
	xa_destroy(&t->npdev.rkeys);
}

/* Beyond a bound nothing is promised, and so nothing has to be remembered */
static void np_promises_are_bounded(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	u32 rkey;
	int ret;

	for (rkey = 1; rkey <= 2 * NP_PROMISE_MAX; rkey++) {
		/* Each time another peer */
		struct np_promise_user user = {};

		ret = np_promise_none(peer->fake.ibdev, rkey, NULL, &user);
		if (ret != -EACCES)
			break;
	}
	KUNIT_ASSERT_EQ(test, ret, -ENXIO);
	KUNIT_EXPECT_EQ(test, t->npdev.promises->nr, NP_PROMISE_MAX);
	np_test_resolve(test, peer, rkey, 0, RDMA_NP_GONE);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, rkey, region), 0);
	/* What was promised already is promised again */
	np_test_resolve(test, peer, 1, 0, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, bitmap_weight(t->npdev.promises->newer, NP_PROMISE_BITS),
			NP_PROMISE_MAX);
	xa_destroy(&t->npdev.rkeys);
}

/* And one peer leaves some for the others */
static void np_promises_to_one_peer_are_bounded(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *greedy = np_test_peer(test, &t->pd);
	struct np_test_peer *other = np_test_peer(test, &t->pd);
	u32 rkey;
	int ret;

	for (rkey = 1; rkey <= 2 * NP_PROMISE_MAX; rkey++) {
		ret = np_promise_none(greedy->fake.ibdev, rkey, NULL,
				      &greedy->fake.peer.promised);
		if (ret != -EACCES)
			break;
	}
	KUNIT_ASSERT_EQ(test, ret, -ENXIO);
	KUNIT_EXPECT_EQ(test, t->npdev.promises->nr, NP_PROMISE_USER_MAX);
	np_test_resolve(test, greedy, rkey, 0, RDMA_NP_GONE);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, rkey, region), 0);
	xa_destroy(&t->npdev.rkeys);

	/* What is promised already costs nobody anything */
	np_test_resolve(test, greedy, 1, 0, RDMA_NP_ACCESS);
	np_test_resolve(test, other, 1, 0, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, other->fake.peer.promised.nr, 0);
	np_test_resolve(test, other, rkey, 0, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, other->fake.peer.promised.nr, 1);
	/* Nor does what was promised long ago */
	np_test_promises_age(t, 2 * RDMA_NP_PINNED_MS);
	np_test_resolve(test, greedy, rkey, 0, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, greedy->fake.peer.promised.nr, 1);
}

static void np_region_gets_a_key_that_was_not_told(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct ib_pd public_pd = { .device = t->ibdev };
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct ib_mr *mr;

	np_test_resolve(test, peer, 1, 0, RDMA_NP_ACCESS);
	np_test_resolve(test, peer, 2, 0, RDMA_NP_ACCESS);
	mr = np_region_make_name(region, &public_pd);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, mr);
	KUNIT_EXPECT_EQ(test, mr->rkey, 3);
	KUNIT_EXPECT_PTR_EQ(test, mr->np, region);
	KUNIT_EXPECT_EQ(test, region->public_rkey, 3);
	KUNIT_EXPECT_EQ(test, t->live_keys, 1);
	KUNIT_EXPECT_PTR_EQ(test, xa_load(&t->npdev.rkeys, 3), region);
	KUNIT_EXPECT_NULL(test, xa_load(&t->npdev.rkeys, 1));
	xa_destroy(&t->npdev.rkeys);
	KUNIT_EXPECT_EQ(test, fake_dereg_mr(mr, NULL), 0);

	/* Without a key there is no region, and nothing is left of those that would not do */
	np_test_resolve(test, peer, 4, 0, RDMA_NP_ACCESS);
	t->fail_key = 5;
	mr = np_region_make_name(region, &public_pd);
	KUNIT_EXPECT_EQ(test, PTR_ERR(mr), -ENOMEM);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_TRUE(test, xa_empty(&t->npdev.rkeys));
}

static struct kunit_case np_promises_cases[] = {
	KUNIT_CASE(np_key_that_was_told_is_no_name),
	KUNIT_CASE(np_key_that_was_told_long_ago_is_a_name),
	KUNIT_CASE(np_key_that_is_refused_is_no_name_later),
	KUNIT_CASE(np_region_that_appears_is_not_denied),
	KUNIT_CASE(np_promises_are_bounded),
	KUNIT_CASE(np_promises_to_one_peer_are_bounded),
	KUNIT_CASE(np_region_gets_a_key_that_was_not_told),
	{}
};

static struct kunit_suite np_promises_suite = {
	.name = "nprdma_region_promise",
	.init = np_test_init,
	.test_cases = np_promises_cases,
};

kunit_test_suite(np_promises_suite);
