// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of what those are answered whom nobody obeys: strangers, and peers whose
 * requests are malformed.
 */
#include <kunit/test.h>

#include "np_ask_fixture.h"

/* As np_mad_received() does it: breaks the message, which is to be noticed. */
static void np_test_malformed(struct kunit *test, struct np_wire *wire, u16 lid)
{
	struct np_ask_test *t = np_ask_test(test);
	unsigned int nr = t->nr_sent;
	struct np_msg msg;
	int err;

	err = np_msg_decode(wire, &msg);
	KUNIT_ASSERT_TRUE(test, err == -EPROTO || err == -EBADMSG);
	KUNIT_ASSERT_FALSE(test, msg.answer);
	np_fake_arrives(&t->fake.port, &msg, true, lid);
	KUNIT_ASSERT_EQ(test, t->nr_sent, nr + 1);
	np_fake_expect(test, &msg, &t->sent[nr], RDMA_NP_PROTO);
	KUNIT_EXPECT_EQ(test, t->fake.ah_lid, lid);
}

/* Whoever sends it, and however little of it is wrong. */
static void np_malformed_request_is_called_that_and_not_obeyed(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_wire good, wire;
	struct np_msg msg;
	u16 lid;
	u8 type;

	np_granted_regions(test, 7);
	np_bind(test, 7);
	for (lid = 0; lid < 2; lid++) {
		for (type = 1; type <= NP_MSG_LAST; type++) {
			msg = np_sample(type, false);
			msg.dst_qpn = peer->qpn;
			msg.src_qpn = peer->remote_qpn;
			np_msg_encode(&msg, &good);
			wire = good;
			wire.hdr.version++;
			np_test_malformed(test, &wire, lid);
			wire = good;
			wire.hdr.type = NP_MSG_LAST + type;
			np_test_malformed(test, &wire, lid);
			wire = good;
			wire.hdr.status = RDMA_NP_BUSY;
			np_test_malformed(test, &wire, lid);
			wire = good;
			be16_add_cpu(&wire.hdr.length, 1);
			np_test_malformed(test, &wire, lid);
		}
		msg = np_sample(NP_MSG_RESOLVE, false);
		np_msg_encode(&msg, &wire);
		wire.resolve.reserved = cpu_to_be32(1);
		np_test_malformed(test, &wire, lid);
		msg = np_sample(NP_MSG_FAULT, false);
		np_msg_encode(&msg, &wire);
		wire.fault.lane = cpu_to_be16(NP_LANES);
		np_test_malformed(test, &wire, lid);
	}
	KUNIT_EXPECT_EQ(test, peer->nr_grants, 7);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, 1);
	KUNIT_EXPECT_NULL(test, peer->serve);
}

/* Sends all there is to @port, as if from @lid; none of it may be obeyed. */
static void np_test_stranger(struct kunit *test, struct np_port *port,
			     u32 dst_qpn, u32 src_qpn, u16 lid)
{
	static const u8 status[] = {
		[NP_MSG_RESOLVE] = RDMA_NP_QP,
		[NP_MSG_FAULT] = RDMA_NP_QP,
		[NP_MSG_RELEASE] = RDMA_NP_QP,
		[NP_MSG_FORGET] = RDMA_NP_QP,
		[NP_MSG_GONE] = RDMA_NP_OK,
		[NP_MSG_RECALL] = RDMA_NP_GONE,
	};
	struct np_ask_test *t = np_ask_test(test);
	struct np_addr from = { .lid = lid, .qpn = 1 };
	struct np_msg msg;
	unsigned int nr;
	u8 type;

	for (type = 1; type <= NP_MSG_LAST; type++) {
		msg = np_sample(type, false);
		msg.dst_qpn = dst_qpn;
		msg.src_qpn = src_qpn;
		nr = t->nr_sent;
		np_fake_arrives(port, &msg, false, lid);
		KUNIT_ASSERT_EQ(test, t->nr_sent, nr + 1);
		np_fake_expect(test, &msg, &t->sent[nr], status[type]);
		KUNIT_EXPECT_EQ(test, t->fake.ah_lid, lid);

		/* By the quick transport only peers are answered */
		np_receive(port, &msg, false, &from, NULL);
		/* And who answers is not asked, and gets no answer */
		msg = np_sample(type, true);
		msg.dst_qpn = dst_qpn;
		msg.src_qpn = src_qpn;
		np_fake_arrives(port, &msg, false, lid);
		KUNIT_EXPECT_EQ(test, t->nr_sent, nr + 1);
	}
}

static void np_stranger_is_answered_the_same_whatever_the_reason(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	u32 qpn = peer->qpn, remote = peer->remote_qpn;

	np_granted_regions(test, 7);
	np_bind(test, 7);
	/* There is no such QP, or it is connected to another one, host, or port */
	np_test_stranger(test, &t->fake.port, qpn + 1, remote, 0);
	np_test_stranger(test, &t->fake.port, qpn, remote + 1, 0);
	np_test_stranger(test, &t->fake.port, qpn, remote, 1);
	np_test_stranger(test, &t->other, qpn, remote, 0);
	KUNIT_EXPECT_EQ(test, peer->nr_grants, 7);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, 1);
	KUNIT_EXPECT_EQ(test, peer->path->ud_qpn, 0);
	KUNIT_EXPECT_NULL(test, peer->serve);
	/* Or it is not connected any more */
	np_peer_fail(peer);
	np_test_stranger(test, &t->fake.port, qpn, remote, 0);
}

/* On RoCE that may take a second, in which no MAD of the port would be looked at */
static void np_handler_makes_no_address_handle(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg msg;
	int malformed;
	u8 type;

	for (type = 1; type <= NP_MSG_LAST; type++) {
		for (malformed = 0; malformed < 2; malformed++) {
			t->fake.ah_task = NULL;
			msg = np_sample(type, false);
			np_fake_arrives(&t->fake.port, &msg, malformed, 1);
			KUNIT_EXPECT_NOT_NULL(test, t->fake.ah_task);
			KUNIT_EXPECT_PTR_NE(test, t->fake.ah_task, current);
		}
	}
}

static void np_answers_to_strangers_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg msg = np_sample(NP_MSG_GONE, false);
	unsigned int i;

	for (i = 0; np_hca_begin_refusal(&t->fake.hca); i++)
		KUNIT_ASSERT_LT(test, i, NP_SERVE_REFUSALS);
	KUNIT_EXPECT_EQ(test, i, NP_SERVE_REFUSALS);
	/* The device waits for them, and others have their places */
	KUNIT_EXPECT_EQ(test, t->fake.hca.serving, NP_SERVE_REFUSALS);
	KUNIT_EXPECT_TRUE(test, np_hca_begin(&t->fake.hca, true));
	np_hca_end(&t->fake.hca, true);
	np_fake_arrives(&t->fake.port, &msg, false, 1);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);
	while (i--)
		np_hca_end_refusal(&t->fake.hca);
	np_fake_arrives(&t->fake.port, &msg, false, 1);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
}

static struct kunit_case np_answer_cases[] = {
	KUNIT_CASE(np_malformed_request_is_called_that_and_not_obeyed),
	KUNIT_CASE(np_stranger_is_answered_the_same_whatever_the_reason),
	KUNIT_CASE(np_handler_makes_no_address_handle),
	KUNIT_CASE(np_answers_to_strangers_are_bounded),
	{}
};

static struct kunit_suite np_answer_suite = {
	.name = "nprdma_proto_answer",
	.init = np_ask_init_test,
	.exit = np_ask_exit_test,
	.test_cases = np_answer_cases,
};

kunit_test_suite(np_answer_suite);
