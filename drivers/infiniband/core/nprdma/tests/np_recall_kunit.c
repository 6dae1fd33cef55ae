// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of leases that peers have: what they are of, and how they end.
 */
#include <kunit/test.h>
#include <linux/delay.h>
#include <linux/shrinker.h>

#include "np_region_fixture.h"

static u64 np_test_leased(struct np_region *region)
{
	struct np_stats stats;

	np_region_stats(region, &stats);
	return stats.leased;
}

/* Of page 5 of 16, and of what is resident around it */
static u64 np_test_lease_for(struct kunit *test, struct np_test_peer *peer,
			     struct np_region *region)
{
	struct np_msg msg = np_test_fault_msg(region, region->id,
					      RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE);
	const struct np_msg *answer;

	msg.fault.ranges[0].addr += 5 * PAGE_SIZE;
	msg.fault.nr_ranges = 2;
	msg.fault.ranges[1] = (struct rdma_np_range){ region->base, 16 * PAGE_SIZE };
	answer = np_test_asks(test, peer, &msg, 0);
	KUNIT_EXPECT_EQ(test, answer->status, RDMA_NP_OK);
	np_fake_served(&peer->fake.hca);
	return answer->faulted.hold_id;
}

static struct np_test_peer *np_test_lessee(struct kunit *test, struct np_region **region,
					   u64 *id)
{
	struct np_test *t = test->priv;
	struct np_test_peer *peer;

	*region = np_test_region(test, 16);
	peer = np_test_peer(test, &t->pd);
	np_test_grant(test, peer, *region);
	*id = np_test_lease_for(test, peer, *region);
	KUNIT_ASSERT_NE(test, *id, 0);
	return peer;
}

static void np_test_is_told(struct kunit *test, struct np_test_peer *peer, u64 id)
{
	KUNIT_ASSERT_NE(test, 0, wait_for_completion_timeout(&peer->told, 30 * HZ));
	KUNIT_EXPECT_EQ(test, peer->asked.type, NP_MSG_RECALL);
	KUNIT_EXPECT_EQ(test, peer->asked.hold_id, id);
	KUNIT_EXPECT_EQ(test, peer->asked.secret, peer->fake.peer.our_secret);
}

static void np_test_answers(struct np_test_peer *peer, u8 status)
{
	struct np_msg answer;

	np_answer_init(&answer, &peer->asked, status);
	answer.quick = false;
	np_fake_arrives(&peer->fake.port, &answer, false, 0);
}

static bool np_test_has_none(struct np_test_peer *peer)
{
	unsigned long deadline = jiffies + 30 * HZ;

	while (READ_ONCE(peer->fake.peer.nr_leases) && time_before(jiffies, deadline))
		msleep(20);
	return !READ_ONCE(peer->fake.peer.nr_leases);
}

static void np_lease_is_of_what_is_resident_around(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	u64 id;

	np_test_grant(test, peer, region);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 2, 1, 0), 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 4, 4, 0), 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 9, 7, 0), 0);
	id = np_test_lease_for(test, peer, region);
	KUNIT_ASSERT_NE(test, id, 0);
	KUNIT_EXPECT_EQ(test, peer->answer.faulted.lease_addr, region->base + 4 * PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, peer->answer.faulted.lease_length, 4 * PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 4);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.leased_pages, 4);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.held_pages, 0);
	/* It has no time limit */
	KUNIT_EXPECT_FALSE(test, delayed_work_pending(&peer->fake.peer.expire));

	np_test_release(test, peer, id, 0, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 0);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.leased_pages, 0);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_leases, 0);
}

static void np_lease_reaches_to_the_ends_of_its_region(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct rdma_np_range range = { region->base + 5 * PAGE_SIZE + 7, 8 }, all;
	struct rdma_np_range most = { 0, U64_MAX };

	np_test_grant(test, peer, region);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 16, 0), 0);
	np_region_around(region, 0, &range, &all, &most);
	KUNIT_EXPECT_EQ(test, range.addr, region->base + 5 * PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, range.length, PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, all.addr, region->base);
	KUNIT_EXPECT_EQ(test, all.length, 16 * PAGE_SIZE);
	/* Not beyond what was said, which need not be whole pages; nor where nobody may write */
	range = (struct rdma_np_range){ region->base + 5 * PAGE_SIZE + 7, 8 };
	most = (struct rdma_np_range){ region->base + 3 * PAGE_SIZE + 9, 4 * PAGE_SIZE };
	np_region_around(region, 0, &range, &all, &most);
	KUNIT_EXPECT_EQ(test, all.addr, most.addr);
	KUNIT_EXPECT_EQ(test, all.length, most.length);
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 0, 16);
	np_region_around(region, RDMA_NP_FAULT_WRITE, &range, &all, &most);
	KUNIT_EXPECT_EQ(test, all.addr, region->base + 5 * PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, all.length, PAGE_SIZE);
	/* Of its own page no more than was said either */
	range = (struct rdma_np_range){ region->base + 5 * PAGE_SIZE + 7, 8 };
	most = (struct rdma_np_range){ region->base + 5 * PAGE_SIZE + 2, 20 };
	np_region_around(region, 0, &range, &all, &most);
	KUNIT_EXPECT_EQ(test, range.addr, most.addr);
	KUNIT_EXPECT_EQ(test, range.length, most.length);
	KUNIT_EXPECT_EQ(test, all.addr, most.addr);
	KUNIT_EXPECT_EQ(test, all.length, most.length);
}

static void np_recalled_lease_is_given_back(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct np_test_peer *peer;
	struct np_region *region;
	u64 id;

	peer = np_test_lessee(test, &region, &id);
	np_test_invalidate(t, 5, 1);
	np_test_is_told(test, peer, id);
	/* The grant is on its way: it is told again */
	reinit_completion(&peer->told);
	np_test_answers(peer, RDMA_NP_BUSY);
	np_test_is_told(test, peer, id);
	np_test_answers(peer, RDMA_NP_OK);
	KUNIT_EXPECT_TRUE(test, list_empty(&peer->fake.peer.trans));
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 1);
	KUNIT_EXPECT_TRUE(test, delayed_work_pending(&peer->fake.peer.expire));
	np_test_release(test, peer, id, 0, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 0);
	KUNIT_EXPECT_FALSE(test, peer->fake.peer.dead);
}

static void np_lease_that_nobody_has_ends(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct np_test_peer *peer;
	struct np_region *region;
	u64 id;

	peer = np_test_lessee(test, &region, &id);
	np_test_invalidate(t, 5, 1);
	np_test_is_told(test, peer, id);
	np_test_answers(peer, RDMA_NP_GONE);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 0);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_leases, 0);
}

static void np_lease_is_refused_but_not_its_pages(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	unsigned int percent = np_lease_percent;
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);

	np_test_grant(test, peer, region);
	WRITE_ONCE(np_lease_percent, 0);
	KUNIT_EXPECT_EQ(test, np_test_lease_for(test, peer, region), 0);
	WRITE_ONCE(np_lease_percent, percent);
	KUNIT_EXPECT_EQ(test, np_rights(region, 5) & RDMA_NP_WORD_READABLE,
			RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 0);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_leases, 0);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.leased_pages, 0);
}

static void np_leases_of_a_peer_are_bounded(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	unsigned int i, percent = np_lease_percent;
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);

	np_test_grant(test, peer, region);
	WRITE_ONCE(np_lease_percent, 90);
	for (i = 0; i < NP_MAX_LEASES; i++)
		KUNIT_ASSERT_NE(test, np_test_lease_for(test, peer, region), 0);
	KUNIT_EXPECT_EQ(test, np_test_lease_for(test, peer, region), 0);
	WRITE_ONCE(np_lease_percent, percent);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_leases, NP_MAX_LEASES);
}

static void np_test_no_recall(struct np_recall *recall)
{
}

struct np_closing {
	struct work_struct work;
	struct np_region *region;
	struct completion done;
};

static void np_test_closes(struct work_struct *work)
{
	struct np_closing *closing = container_of(work, struct np_closing, work);

	np_region_close(closing->region);
	complete(&closing->done);
}

/* I11 */
static void np_region_ends_when_its_leases_have(struct kunit *test)
{
	struct np_recall recall = { .fn = np_test_no_recall };
	struct np_closing closing = {};
	struct np_test_peer *peer;
	struct np_region *region;
	struct np_hold *late;
	u32 rkey;
	u64 id;

	peer = np_test_lessee(test, &region, &id);
	closing.region = region;
	init_completion(&closing.done);
	INIT_WORK_ONSTACK(&closing.work, np_test_closes);
	schedule_work(&closing.work);
	np_test_is_told(test, peer, id);
	/* What is written meanwhile is in the owner's page */
	KUNIT_EXPECT_FALSE(test, completion_done(&closing.done));
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 1);
	np_test_answers(peer, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 1);
	KUNIT_EXPECT_EQ(test, np_lease_shrinker->count_objects(np_lease_shrinker,
							       &(struct shrink_control){}),
			SHRINK_EMPTY);
	/* Nobody gets one now, nor is it waited for */
	late = np_hold_alloc(region, 0, &recall);
	KUNIT_ASSERT_NOT_NULL(test, late);
	KUNIT_EXPECT_EQ(test, np_region_fault(region, region->base, PAGE_SIZE, 0, late, NULL, 0),
			0);
	KUNIT_EXPECT_EQ(test, np_hold_grant(late, region->base, PAGE_SIZE, &rkey), -ENXIO);
	np_test_release(test, peer, id, 0, RDMA_NP_OK);
	flush_work(&closing.work);
	destroy_work_on_stack(&closing.work);
	np_hold_release(late);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->overdue), 0);
	KUNIT_EXPECT_FALSE(test, peer->fake.peer.dead);
}

/*
 * A fault for a lease may be waiting for memory that never comes, and the end of its QP would
 * not end that: so the region does not wait for it (I11), and nobody gets the lease.
 */
static void np_region_does_not_wait_for_what_is_not_granted(struct kunit *test)
{
	struct np_recall recall = { .fn = np_test_no_recall };
	struct np_region *region = np_test_region(test, 16);
	struct np_closing closing = { .region = region };
	struct np_hold *hold;
	u32 rkey;

	hold = np_hold_alloc(region, 0, &recall);
	KUNIT_ASSERT_NOT_NULL(test, hold);
	KUNIT_ASSERT_EQ(test, np_region_fault(region, region->base, PAGE_SIZE, 0, hold,
					      NULL, 0), 0);
	init_completion(&closing.done);
	INIT_WORK_ONSTACK(&closing.work, np_test_closes);
	schedule_work(&closing.work);
	KUNIT_EXPECT_NE(test, wait_for_completion_timeout(&closing.done, 30 * HZ), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->overdue), 0);
	KUNIT_EXPECT_EQ(test, np_hold_grant(hold, region->base, PAGE_SIZE, &rkey), -ENXIO);
	np_hold_release(hold);
	flush_work(&closing.work);
	destroy_work_on_stack(&closing.work);
}

/* Who ends them takes the pins off the hold, which may be released meanwhile */
static void np_lease_may_end_while_its_region_does(struct kunit *test)
{
	struct np_recall recall = { .fn = np_test_no_recall };
	struct np_closing closing;
	struct np_region *region;
	struct np_hold *holds[4];
	unsigned int i, j;

	init_completion(&closing.done);
	for (i = 0; i < 30; i++) {
		region = np_test_region(test, 16);
		for (j = 0; j < ARRAY_SIZE(holds); j++) {
			holds[j] = np_hold_alloc(region, 0, &recall);
			KUNIT_ASSERT_NOT_NULL(test, holds[j]);
			KUNIT_ASSERT_EQ(test, np_region_fault(region, region->base, 16 * PAGE_SIZE,
							      0, holds[j], NULL, 0), 0);
		}
		closing.region = region;
		INIT_WORK_ONSTACK(&closing.work, np_test_closes);
		schedule_work(&closing.work);
		/* Later each time, so that they meet at each place */
		udelay(5 * i);
		for (j = 0; j < ARRAY_SIZE(holds); j++)
			np_hold_release(holds[j]);
		flush_work(&closing.work);
		destroy_work_on_stack(&closing.work);
		KUNIT_ASSERT_EQ(test, np_test_leased(region), 0);
		KUNIT_ASSERT_EQ(test, atomic64_read(&region->count->held), 0);
		np_test_close(test->priv);
	}
}

/* Pages that went while the lease was made do not come in for it, nor does it keep any */
static void np_lease_brings_in_no_neighbours(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_recall recall = { .fn = np_test_no_recall };
	struct np_hold *hold;
	int flags;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, 0), 0);
	hold = np_hold_alloc(region, 0, &recall);
	KUNIT_ASSERT_NOT_NULL(test, hold);
	KUNIT_EXPECT_EQ(test, np_region_fault(region, region->base, 4 * PAGE_SIZE,
					      NP_FAULT_PRESENT, hold, NULL, 0), 0);
	KUNIT_EXPECT_EQ(test, np_hold_pages(hold), 4);
	for (flags = 0; flags <= RDMA_NP_FAULT_WRITE; flags += RDMA_NP_FAULT_WRITE)
		KUNIT_EXPECT_NE(test, np_region_fault(region, region->base + 4 * PAGE_SIZE,
						      4 * PAGE_SIZE, flags | NP_FAULT_PRESENT,
						      hold, NULL, 0), 0);
	/* Nor if somebody else is just pinning what has to be moved first */
	down_write(&region->pin_lock);
	KUNIT_EXPECT_EQ(test, np_region_fault(region, region->base, PAGE_SIZE,
					      NP_FAULT_PRESENT, hold, NULL, 0), -EAGAIN);
	up_write(&region->pin_lock);
	KUNIT_EXPECT_EQ(test, np_hold_pages(hold), 4);
	KUNIT_EXPECT_EQ(test, np_rights(region, 4), 0);
	np_hold_release(hold);
}

/* Also what was pinned before the rest of it could not be */
static void np_lease_counts_all_that_it_pins(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct np_owner *owner;
	struct np_held *held;

	np_test_grant(test, peer, region);
	owner = np_owner_get(&peer->fake.hca, region->mm);
	KUNIT_ASSERT_NOT_NULL(test, owner);
	held = np_held_make(&peer->fake.peer, region, owner, 16,
			    RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, held);
	KUNIT_EXPECT_EQ(test, np_region_fault(region, region->base, 8 * PAGE_SIZE, 0,
					      held->hold, NULL, 0), 0);
	np_held_shrink(held, 4);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.leased_pages, 8);
	np_held_shrink(held, 8);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.leased_pages, 8);
	np_held_drop(&peer->fake.peer, held);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.leased_pages, 0);
	np_owner_put(owner);
}

static unsigned int np_test_leased_at_dereg;

static void np_test_key_ends(struct np_test *t, const struct fake_key *key)
{
	np_test_leased_at_dereg = np_test_leased(t->region);
}

/* The key ends before the pages are anybody else's; the queue pair does not */
static void np_lease_kept_for_too_long_ends_with_its_key(struct kunit *test)
{
	unsigned int recall_ms = np_recall_ms;
	struct np_test *t = test->priv;
	struct np_test_peer *peer;
	struct np_region *region;
	u64 id;

	peer = np_test_lessee(test, &region, &id);
	KUNIT_EXPECT_EQ(test, t->live_keys, 1);
	np_test_leased_at_dereg = 0;
	t->on_dereg = np_test_key_ends;
	WRITE_ONCE(np_recall_ms, 10);
	np_region_close(region);
	WRITE_ONCE(np_recall_ms, recall_ms);
	KUNIT_EXPECT_EQ(test, np_test_leased_at_dereg, 1);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->overdue), 1);
	KUNIT_EXPECT_FALSE(test, peer->fake.peer.dead);
	/* It may be given back all the same */
	np_test_release(test, peer, id, 0, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_leases, 0);
	t->on_dereg = NULL;
}

static void np_recalled_lease_has_a_time_limit(struct kunit *test)
{
	unsigned int hold_ms = np_hold_ms;
	struct np_test *t = test->priv;
	struct np_test_peer *peer;
	struct np_region *region;
	u64 id;

	peer = np_test_lessee(test, &region, &id);
	np_test_leased_at_dereg = 0;
	t->on_dereg = np_test_key_ends;
	WRITE_ONCE(np_hold_ms, 200);
	np_test_invalidate(t, 5, 1);
	np_test_is_told(test, peer, id);
	np_test_answers(peer, RDMA_NP_OK);
	KUNIT_EXPECT_TRUE(test, np_test_has_none(peer));
	WRITE_ONCE(np_hold_ms, 60000);
	KUNIT_EXPECT_EQ(test, np_test_leased_at_dereg, 1);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 0);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.leased_pages, 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->overdue), 1);
	KUNIT_EXPECT_FALSE(test, peer->fake.peer.dead);
	np_test_release(test, peer, id, 0, RDMA_NP_OK);
	/* Who does not give back gets nothing for a while, and then he does */
	peer->fake.peer.leases_from = jiffies + 600 * HZ;
	KUNIT_EXPECT_EQ(test, np_test_lease_for(test, peer, region), 0);
	peer->fake.peer.leases_from = jiffies;
	id = np_test_lease_for(test, peer, region);
	KUNIT_EXPECT_NE(test, id, 0);
	WRITE_ONCE(np_hold_ms, hold_ms);
	np_test_release(test, peer, id, 0, RDMA_NP_OK);
	t->on_dereg = NULL;
}

/* Who is there asks again, and who is not gives nothing back */
static void np_lease_of_some_age_is_recalled(struct kunit *test)
{
	unsigned int hold_ms = np_hold_ms, lease_ms = np_lease_ms;
	struct np_test *t = test->priv;
	struct np_test_peer *peer;
	struct np_region *region;
	struct np_stats stats;
	u64 id;

	WRITE_ONCE(np_lease_ms, 100);
	peer = np_test_lessee(test, &region, &id);
	np_test_is_told(test, peer, id);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.recalls_age, 1);
	KUNIT_EXPECT_EQ(test, stats.leases, 1);
	KUNIT_EXPECT_EQ(test, stats.leases_ended, 0);
	np_test_answers(peer, RDMA_NP_OK);
	np_test_release(test, peer, id, 0, RDMA_NP_OK);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.leases_ended, 1);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 0);

	WRITE_ONCE(np_hold_ms, 100);
	KUNIT_EXPECT_NE(test, np_test_lease_for(test, peer, region), 0);
	KUNIT_EXPECT_TRUE(test, np_test_has_none(peer));
	WRITE_ONCE(np_lease_ms, lease_ms);
	WRITE_ONCE(np_hold_ms, hold_ms);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 0);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_FALSE(test, peer->fake.peer.dead);
}

/* Whoever lowers the parameter means the leases that there are */
static void np_lease_obeys_a_lower_age(struct kunit *test)
{
	unsigned int lease_ms = np_lease_ms;
	struct np_test *t = test->priv;
	struct np_test_peer *peer;
	struct np_region *region;
	u64 id;

	WRITE_ONCE(np_lease_ms, 600000);
	peer = np_test_lessee(test, &region, &id);
	KUNIT_EXPECT_EQ(test, 0, wait_for_completion_timeout(&peer->told, HZ / 10));
	WRITE_ONCE(np_lease_ms, 100);
	np_test_is_told(test, peer, id);
	WRITE_ONCE(np_lease_ms, lease_ms);
	np_test_answers(peer, RDMA_NP_OK);
	np_test_release(test, peer, id, 0, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 0);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
}

/* Answered at once, as it was before */
static void np_test_repeat(struct np_test_peer *peer, struct np_msg *msg)
{
	np_fake_arrives(&peer->fake.port, msg, false, 0);
	reinit_completion(&peer->answered);
}

/* The first answer was lost, and with it all that the peer would have known of the lease */
static void np_answer_that_is_repeated_grants_no_ended_lease(struct kunit *test)
{
	unsigned int hold_ms = np_hold_ms, recall_ms = np_recall_ms;
	struct np_test *t = test->priv;
	struct np_test_peer *peer;
	struct np_region *region;
	struct np_msg msg;
	u64 id;

	peer = np_test_lessee(test, &region, &id);
	msg = np_test_fault_msg(region, region->id, RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE);
	msg.src_qpn = peer->fake.peer.remote_qpn;
	msg.dst_qpn = peer->fake.peer.qpn;
	msg.secret = peer->fake.peer.our_secret;
	msg.tid = peer->tid;
	np_test_repeat(peer, &msg);
	KUNIT_EXPECT_EQ(test, peer->answer.faulted.hold_id, id);
	KUNIT_EXPECT_NE(test, peer->answer.faulted.lease_key, 0);

	WRITE_ONCE(np_hold_ms, 10);
	np_test_invalidate(t, 5, 1);
	KUNIT_EXPECT_TRUE(test, np_test_has_none(peer));
	WRITE_ONCE(np_hold_ms, hold_ms);
	np_test_repeat(peer, &msg);
	KUNIT_EXPECT_EQ(test, peer->answer.status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, peer->answer.faulted.hold_id, 0);
	KUNIT_EXPECT_EQ(test, peer->answer.faulted.lease_key, 0);

	/* Likewise if the region has gone */
	peer->fake.peer.leases_from = jiffies;
	id = np_test_lease_for(test, peer, region);
	KUNIT_ASSERT_NE(test, id, 0);
	WRITE_ONCE(np_recall_ms, 10);
	np_region_close(region);
	WRITE_ONCE(np_recall_ms, recall_ms);
	msg.tid = peer->tid;
	np_test_repeat(peer, &msg);
	KUNIT_EXPECT_EQ(test, peer->answer.faulted.hold_id, 0);
	KUNIT_EXPECT_EQ(test, peer->answer.faulted.lease_key, 0);
	np_test_release(test, peer, id, 0, RDMA_NP_OK);
}

/* To its pages, and with the rights of the region */
static void np_lease_has_a_key_of_its_own(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_recall recall = { .fn = np_test_no_recall };
	struct np_test *t = test->priv;
	struct np_hold *hold;
	int flags;
	u32 rkey;

	for (flags = 0; flags <= RDMA_NP_FAULT_WRITE; flags += RDMA_NP_FAULT_WRITE) {
		struct np_window *win = flags ? &region->write : &region->read;
		const struct fake_key *key;

		hold = np_hold_alloc(region, flags, &recall);
		KUNIT_ASSERT_NOT_NULL(test, hold);
		KUNIT_ASSERT_EQ(test, np_hold_grant(hold, region->base + 2 * PAGE_SIZE + 8,
						    3 * PAGE_SIZE, &rkey), 0);
		key = t->keys[rkey - 1];
		KUNIT_ASSERT_NOT_NULL(test, key);
		KUNIT_EXPECT_EQ(test, key->addr, np_window_iova(win, region->start) +
				2 * PAGE_SIZE + 8);
		KUNIT_EXPECT_EQ(test, key->length, 3 * PAGE_SIZE);
		KUNIT_EXPECT_EQ(test, key->access,
				IB_ACCESS_REMOTE_READ |
				(flags ? IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE |
					 IB_ACCESS_REMOTE_ATOMIC : 0));
		np_hold_revoke(hold, false);
		KUNIT_EXPECT_EQ(test, t->live_keys, 0);
		np_hold_revoke(hold, true);
		np_hold_release(hold);
	}
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->overdue), 0);
}

/* Whoever gets no key gets no lease, and its pages all the same */
static void np_lease_without_a_key_is_refused(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);

	np_test_grant(test, peer, region);
	t->fail_key = t->nr_keys + 1;
	KUNIT_EXPECT_EQ(test, np_test_lease_for(test, peer, region), 0);
	t->fail_key = 0;
	KUNIT_EXPECT_EQ(test, peer->answer.faulted.lease_key, 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 5) & RDMA_NP_WORD_READABLE,
			RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_test_leased(region), 0);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_leases, 0);
}

static struct kunit_case np_recall_cases[] = {
	KUNIT_CASE(np_lease_is_of_what_is_resident_around),
	KUNIT_CASE(np_lease_reaches_to_the_ends_of_its_region),
	KUNIT_CASE(np_recalled_lease_is_given_back),
	KUNIT_CASE(np_lease_that_nobody_has_ends),
	KUNIT_CASE(np_lease_is_refused_but_not_its_pages),
	KUNIT_CASE(np_leases_of_a_peer_are_bounded),
	KUNIT_CASE(np_region_ends_when_its_leases_have),
	KUNIT_CASE(np_region_does_not_wait_for_what_is_not_granted),
	KUNIT_CASE(np_lease_may_end_while_its_region_does),
	KUNIT_CASE(np_lease_brings_in_no_neighbours),
	KUNIT_CASE(np_lease_counts_all_that_it_pins),
	KUNIT_CASE(np_answer_that_is_repeated_grants_no_ended_lease),
	KUNIT_CASE(np_lease_has_a_key_of_its_own),
	KUNIT_CASE(np_lease_without_a_key_is_refused),
	KUNIT_CASE(np_lease_kept_for_too_long_ends_with_its_key),
	KUNIT_CASE(np_recalled_lease_has_a_time_limit),
	KUNIT_CASE(np_lease_of_some_age_is_recalled),
	KUNIT_CASE(np_lease_obeys_a_lower_age),
	{}
};

static struct kunit_suite np_recall_suite = {
	.name = "nprdma_region_recall",
	.init = np_test_init,
	.test_cases = np_recall_cases,
};

kunit_test_suite(np_recall_suite);
