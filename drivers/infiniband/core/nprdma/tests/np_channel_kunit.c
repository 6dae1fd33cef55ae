// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of channels: the end of a region is told to those that use it, and what
 * they may have is bounded.
 */
#include <kunit/test.h>

#include "np_ask_fixture.h"

static void np_gone_waits_for_forget(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_OK);
	np_bind(test, 7);
	np_bind(test, 8);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_BUSY);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.type, RDMA_NP_EVENT_REGION_GONE);
	KUNIT_EXPECT_EQ(test, ev.region_id, 7);
	/* Once, however often the peer repeats it */
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));

	KUNIT_EXPECT_EQ(test, np_peer_forget(&t->fake.peer, 7), 0);
	KUNIT_EXPECT_EQ(test, np_peer_forget(&t->fake.peer, 7), -ENOENT);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 1);
	KUNIT_EXPECT_EQ(test, t->sent[0].type, NP_MSG_FORGET);
	KUNIT_EXPECT_EQ(test, t->sent[0].forget.region_id, 7);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 8), RDMA_NP_BUSY);
}

static void np_gone_event_unread_at_forget_is_taken_back(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, np_peer_forget(&t->fake.peer, 7), 0);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
}

static void np_gone_closed_channel_uses_nothing(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);

	np_bind(test, 7);
	np_channel_close(&t->channel);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_bindings, 0);
}

/* The answer to RESOLVE may be overtaken by GONE. */
static void np_gone_waits_for_resolve(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);

	t->fake.peer.resolving = 1;
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_BUSY);
	t->fake.peer.resolving = 0;
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_OK);
}

static void np_channel_is_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	unsigned int i;

	for (i = 0; !np_channel_reserve(&t->channel); i++)
		KUNIT_ASSERT_LT(test, i, 100000);
	KUNIT_EXPECT_EQ(test, np_channel_reserve(&t->channel), -EBUSY);
	np_bind(test, 7);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, 0), -EBUSY);
	while (i--)
		np_channel_unreserve(&t->channel);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
}

/* All of them are looked at under a lock when an answer comes, and when the region goes */
static void np_channels_of_a_region_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_channel *channels;
	struct np_resolve info;
	unsigned int i;

	channels = kunit_kcalloc(test, NP_MAX_CHANNELS + 1, sizeof(*channels),
				 GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, channels);
	t->resolves_to = np_ask_region(7);
	for (i = 0; i <= NP_MAX_CHANNELS; i++) {
		np_channel_init(&channels[i], np_test_channel_stays);
		KUNIT_EXPECT_EQ(test, np_peer_resolve(peer, &channels[i], 1, 0, &info),
				i < NP_MAX_CHANNELS ? 0 : -ENOSPC);
	}
	/* Those that have it go on */
	KUNIT_EXPECT_EQ(test, np_peer_resolve(peer, &channels[3], 1, 0, &info), 0);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, NP_MAX_CHANNELS);
	/* Who does not listen any more makes room */
	np_channel_close(&channels[3]);
	KUNIT_EXPECT_EQ(test, np_peer_resolve(peer, &channels[i - 1], 1, 0, &info), 0);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, NP_MAX_CHANNELS);
	KUNIT_EXPECT_EQ(test, kref_read(&channels[3].ref), 1);
	for (i = 0; i <= NP_MAX_CHANNELS; i++)
		np_channel_close(&channels[i]);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(peer, 7), RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, 0);
}

static struct kunit_case np_channel_cases[] = {
	KUNIT_CASE(np_gone_waits_for_forget),
	KUNIT_CASE(np_gone_event_unread_at_forget_is_taken_back),
	KUNIT_CASE(np_gone_closed_channel_uses_nothing),
	KUNIT_CASE(np_gone_waits_for_resolve),
	KUNIT_CASE(np_channel_is_bounded),
	KUNIT_CASE(np_channels_of_a_region_are_bounded),
	{}
};

static struct kunit_suite np_channel_suite = {
	.name = "nprdma_proto_channel",
	.init = np_ask_init_test,
	.exit = np_ask_exit_test,
	.test_cases = np_channel_cases,
};

kunit_test_suite(np_channel_suite);
