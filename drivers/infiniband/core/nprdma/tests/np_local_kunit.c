// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of local holds, those of the owner himself: what they are charged
 * for, and what those that fail leave behind.
 */
#include <kunit/test.h>
#include <linux/cred.h>
#include <linux/sched/signal.h>

#include "np_region_fixture.h"

static struct np_local *np_test_local(struct np_region *region, u64 offset,
				      u64 len, unsigned int flags)
{
	u64 addr;
	u32 lkey;

	return np_local_hold(region, region->base + offset, len, flags, NULL, &addr,
			     &lkey);
}

static u64 np_test_charged(void)
{
	return atomic64_read(&current->mm->pinned_vm);
}

/* Whole pages, however little of them; each hold for itself, until its own end */
static void np_local_hold_is_charged_until_it_ends(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test *t = test->priv;
	struct np_local *a, *b;
	struct np_stats stats;

	KUNIT_ASSERT_EQ(test, np_test_charged(), 0);
	a = np_test_local(region, PAGE_SIZE - 1, 2, 0);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, a);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 2);
	b = np_test_local(region, PAGE_SIZE, 3 * PAGE_SIZE, RDMA_NP_FAULT_WRITE);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, b);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 5);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 4);
	np_local_release(a);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 3);
	KUNIT_EXPECT_TRUE(test, np_local_is_needed(b));

	/* The region's end ends the pins and the keys, but the hold is still there */
	KUNIT_EXPECT_EQ(test, t->live_keys, 2);
	np_region_close(region);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_FALSE(test, np_local_is_needed(b));
	KUNIT_EXPECT_EQ(test, np_test_charged(), 3);
	np_local_release(b);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 0);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_local(region, 0, 1, 0)), -ENXIO);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 0);
}

/* Neither memory nor a key for longer than the attempt takes */
static void np_test_no_local(struct kunit *test, struct np_region *region,
			     u64 offset, u64 len, unsigned int flags, int err)
{
	u64 charged = np_test_charged();
	struct np_stats stats;

	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_local(region, offset, len, flags)),
			err);
	KUNIT_EXPECT_EQ(test, np_test_charged(), charged);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, charged);
}

static void np_local_hold_that_fails_costs_nothing(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test *t = test->priv;
	struct np_local *local;

	np_test_unmap(t, 6, 1);
	np_test_no_local(test, region, 0, 0, 0, -ERANGE);
	np_test_no_local(test, region, 8 * PAGE_SIZE - 1, 2, 0, -ERANGE);
	t->fail_key = 1;
	np_test_no_local(test, region, 0, PAGE_SIZE, 0, -ENOMEM);
	t->fail_key = 0;
	/* Some pages are there, and then comes a hole */
	np_test_no_local(test, region, 4 * PAGE_SIZE, 3 * PAGE_SIZE, 0, -EFAULT);
	local = np_test_local(region, 0, PAGE_SIZE, 0);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, local);
	np_test_no_local(test, region, 4 * PAGE_SIZE, 3 * PAGE_SIZE,
			 RDMA_NP_FAULT_WRITE, -EFAULT);
	np_local_release(local);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 0);
}

static void np_local_hold_beyond_the_limit_charges_nothing(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	const struct cred *old;
	struct np_local *local;
	struct cred *new;

	/* Of this test alone, whose thread ends with it */
	current->signal->rlim[RLIMIT_MEMLOCK].rlim_cur = 4 * PAGE_SIZE;
	new = prepare_creds();
	KUNIT_ASSERT_NOT_NULL(test, new);
	cap_lower(new->cap_effective, CAP_IPC_LOCK);
	old = override_creds(new);
	np_test_no_local(test, region, 0, 5 * PAGE_SIZE, 0, -ENOMEM);
	local = np_test_local(region, 0, 4 * PAGE_SIZE, 0);
	KUNIT_EXPECT_NOT_ERR_OR_NULL(test, local);
	np_test_no_local(test, region, 5 * PAGE_SIZE, 1, 0, -ENOMEM);
	/* Also what is held already: each hold may be the last one */
	np_test_no_local(test, region, 0, 1, 0, -ENOMEM);
	if (!IS_ERR(local))
		np_local_release(local);
	local = np_test_local(region, 4 * PAGE_SIZE, 4 * PAGE_SIZE, 0);
	KUNIT_EXPECT_NOT_ERR_OR_NULL(test, local);
	revert_creds(old);
	put_cred(new);

	/* Who may lock as much as he likes is charged all the same */
	KUNIT_EXPECT_EQ(test, np_test_charged(), 4);
	if (!IS_ERR(local))
		np_local_release(local);
	local = np_test_local(region, 0, 8 * PAGE_SIZE, 0);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, local);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 8);
	np_local_release(local);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 0);
}

static struct kunit_case np_local_cases[] = {
	KUNIT_CASE(np_local_hold_is_charged_until_it_ends),
	KUNIT_CASE(np_local_hold_that_fails_costs_nothing),
	KUNIT_CASE(np_local_hold_beyond_the_limit_charges_nothing),
	{}
};

static struct kunit_suite np_local_suite = {
	.name = "nprdma_region_local",
	.init = np_test_init,
	.test_cases = np_local_cases,
};

kunit_test_suite(np_local_suite);
