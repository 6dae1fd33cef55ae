// SPDX-License-Identifier: GPL-2.0
/*
 * What KUnit tests of the protocol between kernels share.
 *
 * The asking side runs for real, on a peer without a device: what it sends ends
 * in a list of the test.
 */
#include <kunit/test.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "np_ask_fixture.h"

struct np_msg np_sample(u8 type, bool answer)
{
	struct np_msg msg = {
		.type = type,
		.answer = answer,
		.ud_pkey = 0xa5a6,
		.ud_qpn = 0x515253,
		.src_qpn = 0x123456,
		.dst_qpn = 0xabcdef,
		.tid = 0x1122334455667788,
		.secret = 0x99aabbccddeeff00,
	};
	unsigned int i;

	if (type == NP_MSG_RESOLVE) {
		msg.secret = 0;
		msg.nonce = 0x0123456789abcdef;
	}
	if (answer && type == NP_MSG_RESOLVE)
		msg.given = 0xfedcba9876543210;
	if (answer && type == NP_MSG_RESOLVE) {
		msg.region = (struct np_resolve) {
			.id = 7, .base = 0x7f0000001000, .length = 0x5000,
			.access = 0x40f, .table_key = 0x3333,
			.read_key = 0x1111, .write_key = 0x2222,
			.read_addr = 0x100000001000,
			.write_addr = 0x200000001000,
			.table_addr = 0x100000200000,
			.signature = 0xdeadbeefcafef00d,
			.page_shift = RDMA_NP_PAGE_SHIFT,
			.unit_shift = NP_UNIT_SHIFT,
			.read_order = RDMA_NP_READ_IN_ORDER,
			.max_pages = 0x123456, .max_ranges = 0x1234,
			.lanes = 0x4321,
		};
	} else if (answer && type == NP_MSG_FAULT) {
		msg.faulted.hold_id = 99;
		msg.faulted.lease_addr = 0x7f0000002000;
		msg.faulted.lease_length = 0x3000;
		msg.faulted.lease_key = 0x11223344;
		msg.faulted.nr_words = RDMA_NP_EVENT_WORDS;
		for (i = 0; i < RDMA_NP_EVENT_WORDS; i++)
			msg.faulted.words[i] = i << 2 | 3;
	} else if (type == NP_MSG_RESOLVE) {
		msg.rkey = 0x87654321;
		msg.addr = 0x7f0011223344;
	} else if (type == NP_MSG_FAULT && !answer) {
		msg.fault.region_id = 7;
		msg.fault.flags = RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD;
		msg.fault.lane = NP_LANES - 1;
		msg.fault.nr_ranges = RDMA_NP_MAX_RANGES;
		for (i = 0; i < RDMA_NP_MAX_RANGES; i++)
			msg.fault.ranges[i] = (struct rdma_np_range) {
				.addr = 0x1000 * i + 5, .length = 4096,
			};
	} else if ((type == NP_MSG_RELEASE || type == NP_MSG_RECALL) && !answer) {
		msg.hold_id = 0x99;
	} else if (!answer) {
		msg.forget.region_id = 7;
		msg.forget.seq = 0x55;
	}
	return msg;
}

/* A region of a peer that has the bounds that we have */
struct np_resolve np_ask_region(u64 id)
{
	return (struct np_resolve) {
		.id = id, .length = 4096,
		.page_shift = RDMA_NP_PAGE_SHIFT, .unit_shift = NP_UNIT_SHIFT,
		.max_pages = RDMA_NP_MAX_PAGES, .max_ranges = RDMA_NP_MAX_RANGES,
		.lanes = NP_LANES,
	};
}

static void np_test_sent(struct np_ask_test *t, const struct np_msg *msg)
{
	spin_lock(&t->lock);
	if (t->nr_sent < NP_TEST_SENT) {
		t->sent[t->nr_sent] = *msg;
		t->sent_at[t->nr_sent] = jiffies;
	}
	t->nr_sent++;
	spin_unlock(&t->lock);
	wake_up_all(&t->wait);
}

static int np_test_send(struct np_path *path, const struct np_msg *msg)
{
	struct np_ask_test *t = container_of(path->port, struct np_ask_test,
					     fake.port);
	struct np_msg answer = {
		.type = NP_MSG_RESOLVE,
		.answer = true,
		.tid = msg->tid,
		.nonce = msg->nonce,
		.given = NP_TEST_THEIRS,
		.region = t->resolves_to,
	};

	np_test_sent(t, msg);
	if (t->resolves_to.id && msg->type == NP_MSG_RESOLVE)
		np_peer_answered(&t->fake.peer, &answer);
	return 0;
}

static int np_test_send_other(struct np_path *path, const struct np_msg *msg)
{
	np_test_sent(container_of(path->port, struct np_ask_test, other), msg);
	return 0;
}

static void np_test_channel_free(struct np_channel *channel)
{
	container_of(channel, struct np_ask_test, channel)->released = true;
}

int np_ask_init_test(struct kunit *test)
{
	struct np_ask_test *t = kunit_kzalloc(test, sizeof(*t), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, t);
	test->priv = t;
	spin_lock_init(&t->lock);
	init_waitqueue_head(&t->wait);
	np_channel_init(&t->channel, np_test_channel_free);
	np_fake_peer_init(test, &t->fake);
	t->fake.port.send = np_test_send;
	t->other = t->fake.port;
	init_waitqueue_head(&t->other.idle);
	t->other.send = np_test_send_other;
	return 0;
}

/* Everything ends, nothing keeps a reference. */
void np_ask_exit_test(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);

	np_channel_close(&t->channel);
	np_channel_put(&t->channel);
	np_fake_peer_exit(test, &t->fake);
	KUNIT_EXPECT_TRUE(test, t->released);
	KUNIT_EXPECT_EQ(test, t->channel.reserved, 0);
	KUNIT_EXPECT_TRUE(test, bitmap_empty(t->fake.peer.lanes, NP_LANES));
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_kept, 0);
}

/* As if RESOLVE had been answered. */
void np_bind(struct kunit *test, u64 region_id)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_binding *binding = kzalloc(sizeof(*binding), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, binding);
	binding->channel = np_channel_get(&t->channel);
	binding->region_id = region_id;
	INIT_LIST_HEAD(&binding->ev.entry);
	binding->ev.ev.type = RDMA_NP_EVENT_REGION_GONE;
	binding->ev.ev.region_id = region_id;
	spin_lock(&t->fake.peer.lock);
	np_binding_add(&t->fake.peer, binding);
	spin_unlock(&t->fake.peer.lock);
}

int np_ask_fault(struct kunit *test, u64 region_id, u64 cookie,
		 u32 flags)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_range range = { 0x1000, 4096 };
	struct rdma_np_fault_req req = {
		.region_id = region_id, .cookie = cookie, .flags = flags,
	};

	return np_peer_fault(&t->fake.peer, &t->channel, &req, &range, 1);
}

void np_answer_request(struct kunit *test, const struct np_msg *request,
		       u8 status, u64 hold_id)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg answer = {
		.type = request->type,
		.answer = true,
		.status = status,
		.tid = request->tid,
		.nonce = request->nonce,
	};

	if (!status && answer.type == NP_MSG_FAULT) {
		answer.faulted.hold_id = hold_id;
		answer.faulted.lease_addr = t->lease.addr;
		answer.faulted.lease_length = t->lease.length;
		answer.faulted.lease_key = 0x5151;
		answer.faulted.nr_words = 1;
		answer.faulted.words[0] = 7;
	}
	np_peer_answered(&t->fake.peer, &answer);
}

void np_answer_to(struct kunit *test, unsigned int nr, u8 status,
		  u64 hold_id)
{
	np_answer_request(test, &np_ask_test(test)->sent[nr], status, hold_id);
}

void np_test_done(struct np_trans *trans, u32 status,
		  const struct np_msg *answer)
{
}

/* Puts @done into the place of what ends the only transaction under way. */
void np_instead_of_done(struct kunit *test,
			void (*done)(struct np_trans *trans, u32 status,
				     const struct np_msg *answer))
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_trans *trans;

	spin_lock(&t->fake.peer.lock);
	trans = list_first_entry(&t->fake.peer.trans, struct np_trans, entry);
	t->done = trans->done;
	trans->done = done;
	spin_unlock(&t->fake.peer.lock);
}

void np_test_channel_stays(struct np_channel *channel)
{
}

void np_ask_resolve(struct work_struct *work)
{
	struct np_ask_resolve *r = container_of(work, struct np_ask_resolve,
						work);

	r->err = np_peer_resolve(&r->t->fake.peer, &r->t->channel, 1, 0, &r->info);
}

KUNIT_DEFINE_ACTION_WRAPPER(np_test_kvfree, kvfree, const void *);

/* Of their owner, who is compared only */
static struct mm_struct np_test_mm = { .mm_count = ATOMIC_INIT(1) };

/* @nr regions whose keys the peer has, with ids from 1. */
struct np_region *np_granted_regions(struct kunit *test, unsigned int nr)
{
	struct np_peer *peer = &np_ask_test(test)->fake.peer;
	struct np_region *regions;
	unsigned int i;

	regions = kvcalloc(nr, sizeof(*regions), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, regions);
	KUNIT_ASSERT_EQ(test, kunit_add_action_or_reset(test, np_test_kvfree,
							regions), 0);
	for (i = 0; i < nr; i++) {
		kref_init(&regions[i].ref);
		regions[i].id = i + 1;
		mutex_init(&regions[i].lock);
		INIT_LIST_HEAD(&regions[i].grants);
		regions[i].mm = &np_test_mm;
		mutex_lock(&peer->ctl);
		KUNIT_EXPECT_NOT_ERR_OR_NULL(test,
					     np_pgrant_make(peer, &regions[i]));
		mutex_unlock(&peer->ctl);
	}
	return regions;
}

/* As in np_region_close() */
void np_region_dies(struct np_region *region)
{
	struct np_grant *grant;

	mutex_lock(&region->lock);
	region->gone = true;
	list_for_each_entry(grant, &region->grants, node)
		grant->gone(grant);
	mutex_unlock(&region->lock);
}

void np_test_forgets(struct np_ask_test *t, u64 region_id)
{
	struct np_msg msg = np_sample(NP_MSG_FORGET, false);
	static const struct np_addr from;

	msg.dst_qpn = t->fake.peer.qpn;
	msg.src_qpn = t->fake.peer.remote_qpn;
	msg.secret = t->fake.peer.our_secret;
	msg.forget.region_id = region_id;
	np_receive(&t->fake.port, &msg, false, &from, NULL);
	flush_workqueue(np_wq);
}

void np_keys_are_there(struct np_fake_peer *fake)
{
	struct np_ask_test *t = container_of(fake, struct np_ask_test, fake);

	t->had_keys = !xa_empty(&fake->peer.grants);
	t->failed++;
}

MODULE_IMPORT_NS(EXPORTED_FOR_KUNIT_TESTING);
MODULE_DESCRIPTION("KUnit tests of nprdma's protocol");
MODULE_LICENSE("GPL");
