// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of peers and their QPs: which QP a peer is of, when he comes to be, and how
 * he ends.
 */
#include <kunit/test.h>

#include "np_ask_fixture.h"

/* Whoever kept memory for too long is ended even if he tries to go, and cannot */
static void np_qp_whose_destruction_fails_is_ended(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;

	t->fake.failed = np_keys_are_there;
	rdma_restrack_begin_del(&t->fake.qp.res);
	np_peer_fail(peer);
	np_peer_fail(peer);
	KUNIT_EXPECT_EQ(test, t->failed, 0);
	KUNIT_EXPECT_FALSE(test, peer->dead);
	rdma_restrack_abort_del(&t->fake.qp.res);
	flush_delayed_work(&peer->fail_again);
	KUNIT_EXPECT_EQ(test, t->failed, 1);
}

/* Between the look at the peer and the lock that keeps its QP as it is */
static void np_qp_connected_anew_is_not_ended_for_a_former_peer(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);

	t->fake.failed = np_keys_are_there;
	t->fake.qp.np.left++;
	np_peer_fail(&t->fake.peer);
	KUNIT_EXPECT_EQ(test, t->failed, 0);
	/* Who modified the QP is about to end the peer */
	KUNIT_EXPECT_FALSE(test, t->fake.peer.dead);
	t->fake.qp.np.left--;
	np_peer_fail(&t->fake.peer);
	KUNIT_EXPECT_EQ(test, t->failed, 1);
	KUNIT_EXPECT_TRUE(test, t->fake.peer.dead);
}

static unsigned int np_test_queries;

static int np_test_query(struct ib_qp *qp, struct ib_qp_attr *attr, int mask,
			 struct ib_qp_init_attr *init)
{
	np_test_queries++;
	return -EIO;
}

static int np_test_modify_nothing(struct ib_qp *qp, struct ib_qp_attr *attr,
				  int attr_mask, struct ib_udata *udata)
{
	return 0;
}

/* The device gives a number away as soon as its QP is destroyed */
static void np_peer_is_not_that_of_a_former_qp(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct ib_qp *qp = kunit_kzalloc(test, sizeof(*qp), GFP_KERNEL);
	struct ib_qp_attr attr = { .qp_state = IB_QPS_INIT };
	struct np_peer *peer;

	KUNIT_ASSERT_NOT_NULL(test, qp);
	np_granted_regions(test, 1);
	peer = np_peer_make(&t->fake.qp);
	KUNIT_EXPECT_PTR_EQ(test, peer, &t->fake.peer);
	if (!IS_ERR(peer))
		np_peer_put(peer);
	np_qp_init(qp);
	qp->device = t->fake.qp.device;
	qp->real_qp = qp;
	qp->qp_num = t->fake.qp.qp_num;
	qp->qp_type = IB_QPT_RC;
	KUNIT_EXPECT_PTR_EQ(test, np_peer_get(qp), NULL);
	/* Not tracked, and so not to be ended */
	KUNIT_EXPECT_EQ(test, PTR_ERR_OR_ZERO(np_peer_make(qp)), -ENOTCONN);
	qp->res.valid = true;
	KUNIT_EXPECT_TRUE(test, IS_ERR(np_peer_make(qp)));
	KUNIT_EXPECT_FALSE(test, t->fake.peer.dead);
	t->fake.ibdev->ops.modify_qp = np_test_modify_nothing;
	/* Its number may be one of a queue of packets, which are counted for themselves */
	qp->qp_type = IB_QPT_RAW_PACKET;
	KUNIT_EXPECT_EQ(test, ib_modify_qp(qp, &attr, IB_QP_STATE), 0);
	KUNIT_EXPECT_FALSE(test, t->fake.peer.dead);
	/* What the former one knew is over before this one is connected */
	qp->qp_type = IB_QPT_RC;
	KUNIT_EXPECT_EQ(test, ib_modify_qp(qp, &attr, IB_QP_STATE), 0);
	t->fake.ibdev->ops.modify_qp = np_fake_modify_qp;
	KUNIT_EXPECT_TRUE(test, t->fake.peer.dead);
	KUNIT_EXPECT_TRUE(test, xa_empty(&t->fake.peer.grants));
}

static int np_test_modify_then_resolve(struct ib_qp *qp,
				       struct ib_qp_attr *attr, int attr_mask,
				       struct ib_udata *udata)
{
	struct np_fake_peer *fake = container_of(qp, struct np_fake_peer, qp);

	fake->peer.left = qp->np.left + 1;
	return 0;
}

/* The other end may resolve before who modified the QP looks for a peer to end */
static void np_peer_made_after_a_modification_outlives_it(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct ib_qp_attr attr = { .qp_state = IB_QPS_RTR, .dest_qp_num = 2 };
	const int mask = IB_QP_STATE | IB_QP_DEST_QPN;
	struct ib_qp *qp = &t->fake.qp;

	/* The counter may go round */
	qp->np.left = U32_MAX;
	t->fake.ibdev->ops.modify_qp = np_test_modify_then_resolve;
	KUNIT_EXPECT_EQ(test, ib_modify_qp(qp, &attr, mask), 0);
	KUNIT_EXPECT_FALSE(test, t->fake.peer.dead);
	t->fake.ibdev->ops.modify_qp = np_test_modify_nothing;
	KUNIT_EXPECT_EQ(test, ib_modify_qp(qp, &attr, mask), 0);
	KUNIT_EXPECT_TRUE(test, t->fake.peer.dead);
	t->fake.ibdev->ops.modify_qp = np_fake_modify_qp;
}

/* A device answers one query at a time, and has other things to do */
static void np_stranger_costs_no_query_of_the_device(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg msg = np_sample(NP_MSG_RESOLVE, false);
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTR,
		.dest_qp_num = 0x77,
	};
	struct ib_qp *qp = &t->fake.qp;

	np_peer_fail(&t->fake.peer);
	t->fake.ibdev->ops.modify_qp = np_test_modify_nothing;
	t->fake.ibdev->ops.query_qp = np_test_query;
	np_test_queries = 0;
	msg.dst_qpn = qp->qp_num;
	msg.src_qpn = 0x77;
	/* Not connected */
	np_fake_arrives(&t->fake.port, &msg, false, 5);
	KUNIT_EXPECT_EQ(test, np_test_queries, 0);

	rdma_ah_set_port_num(&attr.ah_attr, 1);
	rdma_ah_set_dlid(&attr.ah_attr, 5);
	attr.ah_attr.type = RDMA_AH_ATTR_TYPE_IB;
	attr.ah_attr.ib.dlid = 5;
	KUNIT_ASSERT_EQ(test, ib_modify_qp(qp, &attr, IB_QP_STATE | IB_QP_AV |
						      IB_QP_DEST_QPN), 0);
	/* Another host, or QP, says that it is connected to it */
	np_fake_arrives(&t->fake.port, &msg, false, 6);
	msg.src_qpn++;
	np_fake_arrives(&t->fake.port, &msg, false, 5);
	KUNIT_EXPECT_EQ(test, np_test_queries, 0);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 3);
	/* That may be so: now the device is asked */
	msg.src_qpn--;
	np_fake_arrives(&t->fake.port, &msg, false, 5);
	KUNIT_EXPECT_EQ(test, np_test_queries, 1);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 4);

	attr.qp_state = IB_QPS_ERR;
	KUNIT_ASSERT_EQ(test, ib_modify_qp(qp, &attr, IB_QP_STATE), 0);
	np_fake_arrives(&t->fake.port, &msg, false, 5);
	KUNIT_EXPECT_EQ(test, np_test_queries, 1);
	t->fake.ibdev->ops.modify_qp = np_fake_modify_qp;
}

/* Of a QP for which nothing is done, nothing is told */
static void np_qp_is_told_with_what_is_done_for_it(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct ib_device *ibdev = t->fake.ibdev;
	struct rdma_np_qp_info info;
	struct rdma_np_event ev;

	KUNIT_EXPECT_EQ(test, np_peer_tell(ibdev, 0, &info), -ENOENT);
	KUNIT_EXPECT_EQ(test, np_peer_tell(ibdev, 2, &info), -ENOENT);
	KUNIT_EXPECT_EQ(test, np_peer_tell(ibdev, U32_MAX, &info), -ENOENT);
	memset(&info, 0xff, sizeof(info));
	KUNIT_ASSERT_EQ(test, np_peer_tell(ibdev, 1, &info), 0);
	KUNIT_EXPECT_EQ(test, info.qpn, 1);
	KUNIT_EXPECT_EQ(test, info.remote_qpn, 2);
	KUNIT_EXPECT_TRUE(test, mem_is_zero(&info.flags, sizeof(info) -
					    offsetof(struct rdma_np_qp_info, flags)));

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 1, RDMA_NP_FAULT_HOLD), 0);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 2, 0), 0);
	KUNIT_ASSERT_EQ(test, np_peer_tell(ibdev, 1, &info), 0);
	KUNIT_EXPECT_EQ(test, info.faults, 2);
	KUNIT_EXPECT_EQ(test, info.holds, 0);
	KUNIT_EXPECT_EQ(test, info.flags, 0);
	np_answer_to(test, 0, RDMA_NP_OK, 5);
	KUNIT_ASSERT_EQ(test, np_peer_tell(ibdev, 1, &info), 0);
	KUNIT_EXPECT_EQ(test, info.faults, 1);
	KUNIT_EXPECT_EQ(test, info.holds, 1);
	KUNIT_EXPECT_EQ(test, info.leases, 0);
	/* There is no quick transport here */
	KUNIT_EXPECT_EQ(test, info.flags, RDMA_NP_QP_HEARD);
	KUNIT_EXPECT_TRUE(test, np_channel_pop(&t->channel, &ev));

	np_peer_fail(&t->fake.peer);
	KUNIT_EXPECT_EQ(test, np_peer_tell(ibdev, 1, &info), -ENOENT);
}

/* More than may be at work at once */
#define NP_TEST_KILLS	(WQ_DFL_ACTIVE + 1)

struct np_kill_test {
	struct completion served;
	struct work_struct serve;
	atomic_t waited;
	struct work_struct kills[NP_TEST_KILLS];
};

static struct np_kill_test *np_kill_test;

static void np_test_serve(struct work_struct *work)
{
	complete_all(&np_kill_test->served);
}

/* As np_peer_kill() waits for what is being served */
static void np_test_kill(struct work_struct *work)
{
	if (wait_for_completion_timeout(&np_kill_test->served, 10 * HZ))
		atomic_inc(&np_kill_test->waited);
}

static void np_peers_that_end_do_not_keep_out_what_they_wait_for(struct kunit *test)
{
	struct np_kill_test *t = kunit_kzalloc(test, sizeof(*t), GFP_KERNEL);
	unsigned int i;

	KUNIT_ASSERT_NOT_NULL(test, t);
	np_kill_test = t;
	init_completion(&t->served);
	INIT_WORK(&t->serve, np_test_serve);
	for (i = 0; i < NP_TEST_KILLS; i++) {
		INIT_WORK(&t->kills[i], np_test_kill);
		KUNIT_EXPECT_TRUE(test, np_peer_queue_kill(&t->kills[i]));
	}
	queue_work(np_wq, &t->serve);
	flush_work(&t->serve);
	for (i = 0; i < NP_TEST_KILLS; i++)
		flush_work(&t->kills[i]);
	KUNIT_EXPECT_EQ(test, atomic_read(&t->waited), NP_TEST_KILLS);
}

static struct kunit_case np_end_cases[] = {
	KUNIT_CASE(np_peers_that_end_do_not_keep_out_what_they_wait_for),
	{}
};

static struct kunit_suite np_end_suite = {
	.name = "nprdma_proto_end",
	.test_cases = np_end_cases,
};

static struct kunit_case np_peer_cases[] = {
	KUNIT_CASE(np_qp_whose_destruction_fails_is_ended),
	KUNIT_CASE(np_qp_connected_anew_is_not_ended_for_a_former_peer),
	KUNIT_CASE(np_stranger_costs_no_query_of_the_device),
	KUNIT_CASE(np_peer_is_not_that_of_a_former_qp),
	KUNIT_CASE(np_peer_made_after_a_modification_outlives_it),
	KUNIT_CASE(np_qp_is_told_with_what_is_done_for_it),
	{}
};

static struct kunit_suite np_peer_suite = {
	.name = "nprdma_proto_peer",
	.init = np_ask_init_test,
	.exit = np_ask_exit_test,
	.test_cases = np_peer_cases,
};

kunit_test_suites(&np_end_suite, &np_peer_suite);
