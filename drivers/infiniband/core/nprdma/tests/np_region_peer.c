// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: peers of the regions of unit tests: what they ask, and what they are answered.
 */
#include <kunit/test.h>

#include "np_region_fixture.h"

static int np_test_peer_send(struct np_path *path, const struct np_msg *msg)
{
	struct np_test_peer *t = container_of(path->port, struct np_test_peer,
					      fake.port);

	if (!msg->answer) {
		t->asked = *msg;
		complete(&t->told);
		return 0;
	}
	t->answer = *msg;
	complete(&t->answered);
	return 0;
}

void np_test_peer_exit(void *data)
{
	struct np_test_peer *peer = data;

	np_fake_served(&peer->fake.hca);
	peer->fake.ibdev->np = NULL;
	peer->t->npdev.ibdev = peer->t->ibdev;
	np_fake_peer_exit(peer->t->fake.test, &peer->fake);
}

/* A peer with a QP in @pd, on the device of the regions */
struct np_test_peer *np_test_peer(struct kunit *test, struct ib_pd *pd)
{
	struct np_test *t = test->priv;
	struct np_test_peer *peer;

	peer = kunit_kzalloc(test, sizeof(*peer), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, peer);
	init_completion(&peer->answered);
	init_completion(&peer->told);
	peer->t = t;
	np_fake_peer_init(test, &peer->fake);
	peer->fake.port.send = np_test_peer_send;
	peer->fake.peer.pd = pd;
	t->npdev.ibdev = peer->fake.ibdev;
	peer->fake.ibdev->np = &t->npdev;
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, np_test_peer_exit,
							   peer));
	return peer;
}

/* What the peer is answered, or somebody at @lid who says that he is the peer */
const struct np_msg *np_test_asks(struct kunit *test,
				  struct np_test_peer *peer,
				  struct np_msg *msg, u16 lid)
{
	msg->src_qpn = peer->fake.peer.remote_qpn;
	msg->dst_qpn = peer->fake.peer.qpn;
	msg->tid = ++peer->tid;
	if (msg->type != NP_MSG_RESOLVE)
		msg->secret = peer->fake.peer.our_secret;
	np_fake_arrives(&peer->fake.port, msg, false, lid);
	KUNIT_ASSERT_NE(test, 0, wait_for_completion_timeout(&peer->answered,
							     30 * HZ));
	return &peer->answer;
}

/* As np_test_asks(), and the answer is to be just this status */
noinline_for_stack void np_test_refused(struct kunit *test,
					struct np_test_peer *peer,
					struct np_msg *msg, u16 lid,
					u8 status)
{
	const struct np_msg *answer = np_test_asks(test, peer, msg, lid);

	np_fake_expect(test, msg, answer, status);
}

noinline_for_stack void np_test_resolve(struct kunit *test,
					struct np_test_peer *peer,
					u32 rkey, u16 lid, u8 status)
{
	struct np_msg msg = { .type = NP_MSG_RESOLVE, .rkey = rkey };

	np_test_refused(test, peer, &msg, lid, status);
}

noinline_for_stack void np_test_forget(struct kunit *test,
				       struct np_test_peer *peer, u64 id)
{
	struct np_msg msg = {
		.type = NP_MSG_FORGET, .forget.region_id = id,
		.forget.seq = U64_MAX,
	};

	np_test_refused(test, peer, &msg, 0, RDMA_NP_OK);
}

noinline_for_stack void np_test_release(struct kunit *test,
					struct np_test_peer *peer,
					u64 id, u16 lid, u8 status)
{
	struct np_msg msg = { .type = NP_MSG_RELEASE, .hold_id = id };

	np_test_refused(test, peer, &msg, lid, status);
}

/* Of the first page */
struct np_msg np_test_fault_msg(struct np_region *region, u64 id,
				unsigned int flags)
{
	return (struct np_msg){
		.type = NP_MSG_FAULT, .fault.region_id = id,
		.fault.flags = flags, .fault.nr_ranges = 1,
		.fault.ranges[0] = { region->base, PAGE_SIZE },
	};
}

/* As if the peer had resolved it */
void np_test_grant(struct kunit *test, struct np_test_peer *peer,
		   struct np_region *region)
{
	mutex_lock(&peer->fake.peer.ctl);
	KUNIT_EXPECT_EQ(test, np_serve_alloc(&peer->fake.peer), 0);
	KUNIT_EXPECT_NOT_ERR_OR_NULL(test,
				     np_pgrant_make(&peer->fake.peer, region));
	mutex_unlock(&peer->fake.peer.ctl);
}

/* One more region, of the first page, behind the one of np_test_region() */
struct np_region *np_test_more(struct kunit *test, struct ib_pd *pd,
			       u32 access)
{
	struct np_test *t = test->priv;
	struct np_region *region;

	refcount_inc(&t->npdev.users);
	region = np_region_create(&t->npdev, pd, NULL, &t->fake.domain, t->va,
				  PAGE_SIZE, 0x1000, access);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, region);
	return region;
}

void np_test_end(struct np_region *region)
{
	np_region_close(region);
	np_region_put(region);
}
