// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of the order of service: whose FAULTs come first when not all can
 * be served at once, and who finds a place on the device.
 */
#include <kunit/test.h>
#include <linux/log2.h>

#include "np_region_fixture.h"

/*
 * FAULTs of one owner that may be at work at once, as sched.c has it: when all but one
 * wait, those that are queued are served one after the other, in the order they were
 * chosen.
 */
#define NP_TEST_SERVERS	128
#define NP_TEST_CLASSES	6
#define NP_TEST_STEPS	64
#define NP_TEST_ANSWERS	(NP_TEST_SERVERS + NP_TEST_STEPS + 1)

struct np_asker {
	struct np_fake_peer fake;
	struct np_order *order;
	unsigned int depth[NP_LANES];	/* FAULTs under way, with the one in the lane */
	u64 tid;	/* the lane is the rest of its division by NP_LANES */
};

/* FAULTs whose answers do not go before the test says so */
struct np_order {
	struct kunit *test;
	struct np_region *region;
	wait_queue_head_t wait;
	bool over;
	spinlock_t lock; /* of what follows */
	unsigned int nr;	/* answers */
	DECLARE_BITMAP(go, NP_TEST_ANSWERS);
	struct np_asker *asker[NP_TEST_ANSWERS];
	u64 tid[NP_TEST_ANSWERS];
	unsigned int nr_busy;
	unsigned int nr_askers;
	struct np_asker askers[] __counted_by(nr_askers);
};

static int np_order_send(struct np_path *path, const struct np_msg *msg)
{
	struct np_asker *asker = container_of(path->port, struct np_asker,
					      fake.port);
	struct np_order *order = asker->order;
	unsigned int nr = NP_TEST_ANSWERS;

	spin_lock(&order->lock);
	if (msg->status == NP_WIRE_FULL)
		order->nr_busy++;
	else if (order->nr < NP_TEST_ANSWERS)
		nr = order->nr++;
	if (nr < NP_TEST_ANSWERS) {
		order->asker[nr] = asker;
		order->tid[nr] = msg->tid;
	}
	spin_unlock(&order->lock);
	wake_up_all(&order->wait);
	if (nr < NP_TEST_ANSWERS)
		wait_event(order->wait,
			   READ_ONCE(order->over) || test_bit(nr, order->go));
	return 0;
}

static void np_asker_asks(struct np_asker *asker, unsigned int lane)
{
	struct np_region *region = asker->order->region;
	static const struct np_addr from;
	struct np_msg msg;

	msg = np_test_fault_msg(region, np_region_id(region), 0);
	msg.src_qpn = asker->fake.peer.remote_qpn;
	msg.dst_qpn = asker->fake.peer.qpn;
	msg.secret = asker->fake.peer.our_secret;
	msg.fault.lane = lane;
	asker->tid = round_down(asker->tid, NP_LANES) + NP_LANES + lane;
	msg.tid = asker->tid;
	spin_lock(&asker->fake.peer.lock);
	asker->depth[lane] = asker->fake.peer.faulting + 1;
	spin_unlock(&asker->fake.peer.lock);
	np_receive(&asker->fake.port, &msg, false, &from, NULL);
}

static void np_order_end(void *data)
{
	struct np_order *order = data;
	unsigned int i = order->nr_askers;
	struct np_asker *asker;

	WRITE_ONCE(order->over, true);
	wake_up_all(&order->wait);
	/* The first one's device last: it has the owner */
	while (i--) {
		asker = &order->askers[i];
		if (!asker->order)
			continue;
		np_fake_served(&order->askers[0].fake.hca);
		asker->fake.peer.hca = &asker->fake.hca;
		np_fake_peer_exit(order->test, &asker->fake);
	}
}

static struct np_order *np_order_make(struct kunit *test, unsigned int nr_askers)
{
	struct np_order *order;
	struct np_asker *asker;
	unsigned int i;

	order = kunit_kzalloc(test, struct_size(order, askers, nr_askers),
			      GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, order);
	order->nr_askers = nr_askers;
	order->test = test;
	order->region = np_test_region(test, 4);
	spin_lock_init(&order->lock);
	init_waitqueue_head(&order->wait);
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, np_order_end,
							   order));
	for (i = 0; i < nr_askers; i++) {
		asker = &order->askers[i];
		np_fake_peer_init(test, &asker->fake);
		asker->order = order;
		asker->fake.port.send = np_order_send;
		/* Of what is served where it arrives the answer would keep us here */
		asker->fake.port.at_once_from = U64_MAX;
		/* They ask one owner, on one device */
		asker->fake.peer.hca = &order->askers[0].fake.hca;
		mutex_lock(&asker->fake.peer.ctl);
		KUNIT_EXPECT_EQ(test, np_serve_alloc(&asker->fake.peer), 0);
		KUNIT_EXPECT_NOT_ERR_OR_NULL(test,
					     np_pgrant_make(&asker->fake.peer,
							    order->region));
		mutex_unlock(&asker->fake.peer.ctl);
	}
	return order;
}

/* The answer to @lane of the asker that is returned is number @nr, and the last one */
static struct np_asker *np_order_served(struct kunit *test, struct np_order *order,
					unsigned int nr, unsigned int *lane)
{
	KUNIT_ASSERT_NE(test, 0, wait_event_timeout(order->wait,
						    READ_ONCE(order->nr) > nr,
						    60 * HZ));
	KUNIT_ASSERT_EQ(test, order->nr, nr + 1);
	*lane = order->tid[nr] % NP_LANES;
	return order->asker[nr];
}

static void np_order_go(struct np_order *order, unsigned int nr)
{
	set_bit(nr, order->go);
	wake_up_all(&order->wait);
}

#define NP_TEST_BLOCKERS	(NP_TEST_SERVERS / NP_LANES)

/* All servers are taken, by askers behind @nr that are the test's */
static struct np_order *np_order_blocked(struct kunit *test, unsigned int nr)
{
	struct np_order *order = np_order_make(test, nr + NP_TEST_BLOCKERS);
	unsigned int i, lane;

	KUNIT_ASSERT_EQ(test, np_test_fault(order->region, 0, 1, 0), 0);
	for (i = nr; i < nr + NP_TEST_BLOCKERS; i++)
		for (lane = 0; lane < NP_LANES; lane++)
			np_asker_asks(&order->askers[i], lane);
	np_order_served(test, order, NP_TEST_SERVERS - 1, &lane);
	return order;
}

/*
 * QPs that have 1, 2, 4, ..., 32 under way, always: who has one waits for at most one of
 * those that have more, who has two or three gets a quarter, and so on, and each 32nd is
 * one that waits behind as many of its own.
 */
static void np_fault_waits_for_few_of_those_of_qps_with_more(struct kunit *test)
{
	struct np_order *order = np_order_blocked(test, NP_TEST_CLASSES);
	unsigned int next[NP_TEST_CLASSES] = {}, count[NP_TEST_CLASSES] = {};
	unsigned int i, lane, class, every;
	struct np_asker *asker;

	for (i = 0; i < NP_TEST_CLASSES; i++)
		for (lane = 0; lane < 1 << i; lane++)
			np_asker_asks(&order->askers[i], lane);
	np_order_go(order, 0);
	for (i = 0; i < NP_TEST_STEPS; i++) {
		asker = np_order_served(test, order, NP_TEST_SERVERS + i, &lane);
		class = ilog2(asker->depth[lane]);
		every = min(2 << class, NP_LANES);
		KUNIT_ASSERT_LT(test, class, NP_TEST_CLASSES);
		KUNIT_EXPECT_LT_MSG(test, i, next[class] + every,
				    "behind %u of its QP", asker->depth[lane]);
		next[class] = i + 1;
		count[class]++;
		np_asker_asks(asker, lane);
		np_order_go(order, NP_TEST_SERVERS + i);
	}
	for (class = 0; class < NP_TEST_CLASSES; class++)
		KUNIT_EXPECT_EQ(test, count[class],
				NP_TEST_STEPS / min(2 << class, NP_LANES));
	kunit_release_action(test, np_order_end, order);
}

static void np_qps_that_ask_in_the_same_way_take_turns(struct kunit *test)
{
	const unsigned int nr = 5;
	struct np_order *order = np_order_blocked(test, nr);
	struct np_asker *asker;
	unsigned int i, lane;

	for (i = 0; i < nr; i++)
		np_asker_asks(&order->askers[i], 0);
	np_order_go(order, 0);
	for (i = 0; i < 4 * nr; i++) {
		asker = np_order_served(test, order, NP_TEST_SERVERS + i, &lane);
		KUNIT_EXPECT_EQ(test, asker - order->askers, i % nr);
		np_asker_asks(asker, lane);
		np_order_go(order, NP_TEST_SERVERS + i);
	}
	kunit_release_action(test, np_order_end, order);
}

/* One more, when the device has @free places */
static bool np_asker_may(struct np_asker *asker, unsigned int lane, unsigned int free)
{
	unsigned int busy = asker->order->nr_busy;
	struct np_hca *hca = asker->fake.peer.hca;
	unsigned int others = NP_SERVE_DEVICE - free - hca->serving;

	hca->serving += others;
	np_asker_asks(asker, lane);
	xa_lock_irq(&hca->peers);
	hca->serving -= others;
	xa_unlock_irq(&hca->peers);
	return asker->order->nr_busy == busy;
}

/* As much as it has under way, and the last places are for who has nothing else there */
static void np_faults_on_one_owners_memory_leave_places_free(struct kunit *test)
{
	struct np_order *order = np_order_make(test, 3);
	struct np_asker *a = &order->askers[0], *b = &order->askers[1];
	struct np_asker *c = &order->askers[2];

	WRITE_ONCE(order->over, true);
	/* What is at work stays there, because it waits for memory */
	mmap_write_lock(current->mm);
	KUNIT_EXPECT_FALSE(test, np_asker_may(a, 0, 0));
	KUNIT_EXPECT_TRUE(test, np_asker_may(a, 0, 1));
	KUNIT_EXPECT_FALSE(test, np_asker_may(b, 0, 1));
	KUNIT_EXPECT_TRUE(test, np_asker_may(b, 0, 2));
	KUNIT_EXPECT_FALSE(test, np_asker_may(b, 1, 32 + 2));
	KUNIT_EXPECT_FALSE(test, np_asker_may(c, 0, 2));
	KUNIT_EXPECT_TRUE(test, np_asker_may(c, 0, 3));
	KUNIT_EXPECT_FALSE(test, np_asker_may(c, 1, 32 + 3));
	KUNIT_EXPECT_TRUE(test, np_asker_may(c, 1, 32 + 4));
	KUNIT_EXPECT_EQ(test, READ_ONCE(order->nr), 0);
	mmap_write_unlock(current->mm);
	KUNIT_EXPECT_NE(test, 0, wait_event_timeout(order->wait,
						    READ_ONCE(order->nr) == 4,
						    60 * HZ));
	KUNIT_EXPECT_EQ(test, order->nr_busy, 5);
	kunit_release_action(test, np_order_end, order);
}

static struct kunit_case np_order_cases[] = {
	KUNIT_CASE_SLOW(np_fault_waits_for_few_of_those_of_qps_with_more),
	KUNIT_CASE_SLOW(np_qps_that_ask_in_the_same_way_take_turns),
	KUNIT_CASE(np_faults_on_one_owners_memory_leave_places_free),
	{}
};

static struct kunit_suite np_order_suite = {
	.name = "nprdma_region_order",
	.init = np_test_init,
	.test_cases = np_order_cases,
};

kunit_test_suite(np_order_suite);
