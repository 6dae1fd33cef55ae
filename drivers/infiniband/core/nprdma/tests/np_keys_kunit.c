// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of the keys that peers get: when they are made, what they give
 * access to, and how they outlive their region.
 */
#include <kunit/test.h>

#include "np_region_fixture.h"

/* The driver's part of it */
static void np_test_key(struct kunit *test, u32 rkey, u64 addr, u64 length,
			int access)
{
	struct np_test *t = test->priv;
	struct fake_key *key;

	KUNIT_ASSERT_GE(test, rkey, 1);
	KUNIT_ASSERT_LE(test, rkey, t->nr_keys);
	key = t->keys[rkey - 1];
	KUNIT_ASSERT_NOT_NULL(test, key);
	KUNIT_EXPECT_EQ(test, key->addr, addr);
	KUNIT_EXPECT_EQ(test, key->length, length);
	KUNIT_EXPECT_EQ(test, key->access, access);
	KUNIT_EXPECT_PTR_EQ(test, key->mr.pd, &t->pd);
}

static void np_keys_are_made_once_for_all_peers(struct kunit *test)
{
	struct np_region *region = np_test_region_at(test, 3, 600, NP_TEST_ACCESS);
	struct np_resolve first = {}, again = {};
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &first), 0);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	KUNIT_EXPECT_EQ(test, atomic_read(&t->pd.usecnt), 3);
	np_test_key(test, first.table_key, first.table_addr, 600 * sizeof(u64),
		    IB_ACCESS_REMOTE_READ);
	np_test_key(test, first.read_key, first.read_addr, region->length,
		    IB_ACCESS_REMOTE_READ);
	np_test_key(test, first.write_key, first.write_addr, region->length,
		    IB_ACCESS_LOCAL_WRITE | NP_ACCESS_REMOTE_CHANGE);
	KUNIT_EXPECT_EQ(test, np_region_resolve(region, &again), 0);
	KUNIT_EXPECT_MEMEQ(test, &again, &first, sizeof(first));
	KUNIT_EXPECT_EQ(test, t->nr_keys, 3);
	KUNIT_EXPECT_EQ(test, atomic_read(&t->pd.usecnt), 3);
}

static void np_keys_have_the_rights_of_the_region(struct kunit *test)
{
	struct np_region *region, *more;
	struct np_test *t = test->priv;
	struct np_resolve out = {};

	region = np_test_region_at(test, 0, 1, IB_ACCESS_LOCAL_WRITE |
				   IB_ACCESS_UNPINNED);
	KUNIT_EXPECT_EQ(test, np_region_resolve(region, &out), -EPERM);
	KUNIT_EXPECT_EQ(test, t->nr_keys, 0);

	more = np_test_more(test, &t->pd, IB_ACCESS_LOCAL_WRITE |
			    IB_ACCESS_REMOTE_READ | IB_ACCESS_UNPINNED);
	KUNIT_EXPECT_EQ(test, np_region_resolve(more, &out), 0);
	KUNIT_EXPECT_NE(test, out.read_key, 0);
	KUNIT_EXPECT_EQ(test, out.write_key, 0);
	KUNIT_EXPECT_EQ(test, t->live_keys, 2);
	np_test_end(more);

	out = (struct np_resolve){};
	more = np_test_more(test, &t->pd, IB_ACCESS_LOCAL_WRITE |
			    IB_ACCESS_REMOTE_WRITE | IB_ACCESS_UNPINNED);
	KUNIT_EXPECT_EQ(test, np_region_resolve(more, &out), 0);
	KUNIT_EXPECT_EQ(test, out.read_key, 0);
	np_test_key(test, out.table_key, out.table_addr, sizeof(u64),
		    IB_ACCESS_REMOTE_READ);
	np_test_key(test, out.write_key, out.write_addr, PAGE_SIZE,
		    IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE);
	np_test_end(more);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
}

/* All or none */
static void np_key_that_cannot_be_made_leaves_no_other(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_resolve out = {}, none = {};
	struct np_test *t = test->priv;
	unsigned int i;

	for (i = 1; i <= 3; i++) {
		t->fail_key = t->nr_keys + i;
		KUNIT_EXPECT_EQ(test, np_region_resolve(region, &out), -ENOMEM);
		KUNIT_EXPECT_EQ(test, t->live_keys, 0);
		KUNIT_EXPECT_EQ(test, atomic_read(&t->pd.usecnt), 0);
		KUNIT_EXPECT_MEMEQ(test, &out, &none, sizeof(none));
	}
	t->fail_key = 0;
	KUNIT_EXPECT_EQ(test, np_region_resolve(region, &out), 0);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
}

/* Also if it is for a peer, which is granted the keys before they are made */
static void np_resolve_that_fails_leaves_no_key(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_msg msg = { .type = NP_MSG_RESOLVE, .rkey = 7 };
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct np_grant other = {};
	unsigned int i;

	KUNIT_ASSERT_EQ(test, np_name_take(&t->npdev, 7, region), 0);
	for (i = 2; i <= 3; i++) {
		t->fail_key = t->nr_keys + i;
		np_test_resolve(test, peer, 7, 0, RDMA_NP_NOMEM);
		KUNIT_EXPECT_EQ(test, t->live_keys, 0);
		KUNIT_EXPECT_EQ(test, atomic_read(&t->pd.usecnt), 0);
	}
	/* Another one's grant makes no difference */
	KUNIT_EXPECT_EQ(test, np_region_grant(region, &other), 0);
	t->fail_key = t->nr_keys + 2;
	np_test_resolve(test, peer, 7, 0, RDMA_NP_NOMEM);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	np_region_ungrant(&other);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_grants, 0);

	t->fail_key = 0;
	KUNIT_EXPECT_EQ(test, np_test_asks(test, peer, &msg, 0)->status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_grants, 1);
	xa_destroy(&t->npdev.rkeys);
}

static void np_keys_that_nobody_was_granted_end_with_the_region(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_grant grant = {};
	struct np_resolve out;

	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &out), 0);
	/* Granted, and taken back, once */
	KUNIT_ASSERT_EQ(test, np_region_grant(region, &grant), 0);
	KUNIT_EXPECT_EQ(test, list_count_nodes(&region->grants), 1);
	np_region_ungrant(&grant);
	np_region_ungrant(&grant);
	KUNIT_EXPECT_TRUE(test, list_empty(&region->grants));
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	/* The keys' and ours */
	KUNIT_EXPECT_EQ(test, kref_read(&region->ref), 4);

	np_region_close(region);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_EQ(test, atomic_read(&t->pd.usecnt), 0);
	KUNIT_EXPECT_EQ(test, kref_read(&region->ref), 1);
	/* And nobody is granted any more */
	KUNIT_EXPECT_EQ(test, np_region_resolve(region, &out), -ENXIO);
	KUNIT_EXPECT_EQ(test, t->nr_keys, 3);
	KUNIT_EXPECT_EQ(test, np_region_grant(region, &grant), -ENXIO);
	KUNIT_EXPECT_TRUE(test, list_empty(&region->grants));
	KUNIT_EXPECT_NULL(test, grant.region);
	KUNIT_EXPECT_EQ(test, kref_read(&region->ref), 1);
}

/* Of all regions of an owner together, whose memory they take */
static void np_grants_of_an_owner_are_bounded(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4), *more[2];
	unsigned int bound = np_owner_max_grants;
	struct np_test *t = test->priv;
	struct np_test_peer *peer;
	struct np_pgrant *pg;

	more[0] = np_test_more(test, &t->pd, NP_TEST_ACCESS);
	more[1] = np_test_more(test, &t->pd, NP_TEST_ACCESS);
	peer = np_test_peer(test, &t->pd);
	mutex_lock(&peer->fake.peer.ctl);
	pg = np_pgrant_make(&peer->fake.peer, region);
	KUNIT_EXPECT_NOT_ERR_OR_NULL(test, pg);
	np_owner_max_grants = 2;
	KUNIT_EXPECT_NOT_ERR_OR_NULL(test, np_pgrant_make(&peer->fake.peer, more[0]));
	KUNIT_EXPECT_EQ(test, PTR_ERR_OR_ZERO(np_pgrant_make(&peer->fake.peer, more[1])),
			-EBUSY);
	KUNIT_EXPECT_TRUE(test, list_empty(&more[1]->grants));
	/* One makes room, of whichever region */
	if (!IS_ERR(pg))
		np_pgrant_drop(pg);
	KUNIT_EXPECT_NOT_ERR_OR_NULL(test, np_pgrant_make(&peer->fake.peer, more[1]));
	np_owner_max_grants = bound;
	mutex_unlock(&peer->fake.peer.ctl);
	kunit_release_action(test, np_test_peer_exit, peer);
	np_test_end(more[0]);
	np_test_end(more[1]);
}

/* A region that is kept for good is freed all the same, so that nothing leaks here */
static void np_test_unleak(struct np_test *t, struct np_region *region)
{
	unsigned int i;

	region->npdev = &t->npdev;
	list_add(&region->device_node, &t->npdev.regions);
	refcount_inc(&t->npdev.users);
	t->keep_keys = false;
	for (i = 0; i < t->nr_keys; i++)
		if (t->keys[i])
			fake_dereg_mr(&t->keys[i]->mr, NULL);
}

/* Sick firmware may let keys be: what they reach stays, and the device can go */
static void np_device_does_not_wait_for_keys_that_stay(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_resolve out;

	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &out), 0);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 2);
	t->keep_keys = true;
	np_region_close(region);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
	/* The umems' and ours: the windows stay */
	KUNIT_EXPECT_EQ(test, kref_read(&region->ref), 4);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	np_test_unleak(t, region);
	KUNIT_EXPECT_EQ(test, kref_read(&region->ref), 1);
}

/* Nor for the region of a public MR that the driver keeps */
static void np_device_does_not_wait_for_an_orphan(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	np_region_close_for_good(region);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
	KUNIT_EXPECT_TRUE(test, np_region_is_gone(region));
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), -ENXIO);
	np_test_unleak(t, region);
}

static void np_keys_of_a_dead_region_stay_for_who_has_them(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *a = np_test_peer(test, &t->pd);
	struct np_test_peer *b = np_test_peer(test, &t->pd);
	u64 id = np_region_id(region);
	struct np_resolve out;

	np_test_grant(test, a, region);
	np_test_grant(test, b, region);
	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &out), 0);
	np_region_close(region);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	KUNIT_EXPECT_EQ(test, a->fake.peer.nr_gone, 1);
	KUNIT_EXPECT_EQ(test, b->fake.peer.nr_gone, 1);
	/* Which are no use: the windows show stand-ins, and nothing comes back */
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), -ENXIO);

	np_test_forget(test, a, id);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	/* One says it twice: that is not two */
	np_test_forget(test, a, id);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	/* The other one says it by losing the QP */
	np_peer_fail(&b->fake.peer);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_EQ(test, atomic_read(&t->pd.usecnt), 0);
	KUNIT_EXPECT_TRUE(test, list_empty(&region->grants));
}

/*
 * What a peer keeps a dead region for is its keys.  All that tells of its pages goes,
 * although nobody has forgotten anything.
 */
static void np_dead_region_gives_back_what_tells_of_its_pages(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 2 * NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct np_region *other;
	struct np_resolve out;

	np_test_grant(test, peer, region);
	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &out), 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, NP_SLOT_PAGES - 1, 2,
					    RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->table_pages), 2);
	/* Of the same memory, so that what is known of the address space stays */
	refcount_inc(&t->npdev.users);
	other = np_region_create(&t->npdev, &t->pd, NULL, &t->fake.domain, t->va,
				 NP_SLOT_SIZE, 0x1000, NP_TEST_ACCESS);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, other);
	KUNIT_ASSERT_EQ(test, np_test_fault(other, 0, 1, 0), 0);

	np_region_close(region);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	KUNIT_EXPECT_TRUE(test, xa_empty(&region->chunks));
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->table_pages), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->resident), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->writable), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, NP_SLOT_PAGES), 0);
	np_test_settled(test);
	/* The tables of the two windows and of the words: all but those of the other one */
	KUNIT_EXPECT_EQ(test, t->fake.splits - t->fake.merges, 2);
	/* The second slot is of no use to reclaim any more, the first one is */
	KUNIT_EXPECT_TRUE(test, np_test_ask(other, 0, false));
	KUNIT_EXPECT_FALSE(test, np_test_ask(other, NP_SLOT_PAGES, false));
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), -ENXIO);

	np_region_close(other);
	np_region_put(other);
	np_test_forget(test, peer, np_region_id(region));
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
}

static struct kunit_case np_keys_cases[] = {
	KUNIT_CASE(np_dead_region_gives_back_what_tells_of_its_pages),
	KUNIT_CASE(np_keys_are_made_once_for_all_peers),
	KUNIT_CASE(np_keys_have_the_rights_of_the_region),
	KUNIT_CASE(np_key_that_cannot_be_made_leaves_no_other),
	KUNIT_CASE(np_resolve_that_fails_leaves_no_key),
	KUNIT_CASE(np_keys_that_nobody_was_granted_end_with_the_region),
	KUNIT_CASE(np_grants_of_an_owner_are_bounded),
	KUNIT_CASE(np_device_does_not_wait_for_keys_that_stay),
	KUNIT_CASE(np_device_does_not_wait_for_an_orphan),
	KUNIT_CASE(np_keys_of_a_dead_region_stay_for_who_has_them),
	{}
};

static struct kunit_suite np_keys_suite = {
	.name = "nprdma_region_keys",
	.init = np_test_init,
	.test_cases = np_keys_cases,
};

kunit_test_suite(np_keys_suite);
