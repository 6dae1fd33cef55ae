// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of who is believed: messages from QP 1 or the peer's QP with the secret,
 * and answers that repeat a nonce.
 */
#include <kunit/test.h>

#include "np_ask_fixture.h"

/* Of the other end's, whose secret is right */
static struct np_msg np_true_msg(struct np_peer *peer, u8 type, bool answer)
{
	struct np_msg msg = np_sample(type, answer);

	msg.dst_qpn = peer->qpn;
	msg.src_qpn = peer->remote_qpn;
	if (type != NP_MSG_RESOLVE)
		msg.secret = np_msg_by_owner(type) == answer ?
			     peer->our_secret : peer->their_secret;
	return msg;
}

/* By MAD from QP @qpn, or by the quick transport */
static void np_test_from(struct np_ask_test *t, const struct np_msg *msg, u32 qpn)
{
	struct np_addr from = { .qpn = qpn };
	struct ib_wc wc = { .src_qp = qpn };
	struct ib_grh grh = {};
	struct ib_mad_recv_wc recv = { .wc = &wc, .recv_buf.grh = &grh };

	/* As np_ud_received() does it */
	if (msg->quick && np_receive_at_once(&t->fake.port, msg, &from))
		return;
	np_receive(&t->fake.port, msg, false, &from, msg->quick ? NULL : &recv);
	flush_workqueue(np_wq);
}

/*
 * All that the other end's kernel could send; nothing is told, and what is answered says
 * that there is nothing, but that keys are in use
 */
static void np_test_nothing_is_believed(struct kunit *test, u32 qpn, bool quick,
					u64 wrong)
{
	static const u8 status[] = {
		[NP_MSG_FAULT] = RDMA_NP_GONE,
		[NP_MSG_RELEASE] = RDMA_NP_OK,
		[NP_MSG_FORGET] = RDMA_NP_OK,
		[NP_MSG_GONE] = RDMA_NP_BUSY,
		[NP_MSG_RECALL] = RDMA_NP_GONE,
	};
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	unsigned int nr = t->nr_sent;
	struct rdma_np_event ev;
	struct np_msg msg;
	int answer;
	u8 type;

	for (type = 1; type <= NP_MSG_LAST; type++) {
		for (answer = 0; answer < 2; answer++) {
			/* Those two have no secret that could be wrong */
			if (type == NP_MSG_RESOLVE && wrong)
				continue;
			msg = np_true_msg(peer, type, answer);
			msg.quick = quick;
			msg.secret ^= wrong;
			if (type == NP_MSG_FORGET && !answer)
				msg.forget.seq = U64_MAX;
			np_test_from(t, &msg, qpn);
			if (!answer && wrong && !quick) {
				/* It may be of an earlier peer of the QP */
				KUNIT_ASSERT_EQ(test, t->nr_sent, nr + 1);
				np_fake_expect(test, &msg, &t->sent[nr],
					       status[type]);
				nr++;
			}
			KUNIT_EXPECT_EQ_MSG(test, t->nr_sent, nr,
					    "type %u answer %d", type, answer);
		}
	}
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, peer->nr_grants, 7);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, 1);
	KUNIT_EXPECT_FALSE(test, peer->path->ud_known);
}

static void np_test_believes_init(struct kunit *test)
{
	struct np_peer *peer = &np_ask_test(test)->fake.peer;

	peer->their_secret = NP_TEST_THEIRS;
	np_granted_regions(test, 7);
	np_bind(test, 7);
}

/* Any process may send to QP1 that may set a privileged Q_Key */
static void np_mad_is_believed_from_qp1_only(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg msg;

	np_test_believes_init(test);
	np_test_nothing_is_believed(test, 0x99, false, 0);
	np_test_nothing_is_believed(test, 0, false, 0);
	KUNIT_EXPECT_EQ(test, t->fake.path.ud_qpn, 0);
	/* Nor is a stranger answered, or who sends nonsense */
	msg = np_true_msg(&t->fake.peer, NP_MSG_RESOLVE, false);
	msg.src_qpn++;
	np_test_from(t, &msg, 0x99);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);

	msg = np_true_msg(&t->fake.peer, NP_MSG_FORGET, false);
	msg.forget.seq = U64_MAX;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_grants, 6);
}

/* The address is the right one, as that of another function of the same adapter is */
static void np_message_without_the_secret_is_not_obeyed(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	unsigned int bit;

	np_test_believes_init(test);
	for (bit = 0; bit < 64; bit++)
		np_test_nothing_is_believed(test, 1, false, BIT_ULL(bit));
	/* That of the other one's memory */
	np_test_nothing_is_believed(test, 1, false,
				    peer->our_secret ^ peer->their_secret);
	KUNIT_EXPECT_EQ(test, peer->path->ud_qpn, 0);
	/* Who was given none knows none */
	peer->their_secret = 0;
	np_test_nothing_is_believed(test, 1, false, peer->our_secret);
	peer->their_secret = NP_TEST_THEIRS;
}

/* Its keys may be there from an earlier peer of the other end's QP */
static void np_gone_without_the_secret_waits_for_who_uses_the_keys(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_msg msg;

	np_test_believes_init(test);
	msg = np_true_msg(peer, NP_MSG_GONE, false);
	msg.secret ^= 1;
	np_test_from(t, &msg, 1);
	msg.forget.region_id = 8;
	np_test_from(t, &msg, 1);
	peer->resolving = 1;
	np_test_from(t, &msg, 1);
	peer->resolving = 0;
	msg.forget.region_id = 7;
	np_channel_close(&t->channel);
	np_test_from(t, &msg, 1);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 4);
	KUNIT_EXPECT_EQ(test, t->sent[0].status, RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, t->sent[1].status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, t->sent[2].status, RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, t->sent[3].status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, 1);
}

/* Who asked would take GONE for the end of it, and the pages for free */
static void np_recall_without_the_secret_does_not_end_a_lease(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct rdma_np_event ev;
	struct np_msg msg;

	np_test_believes_init(test);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD |
					   RDMA_NP_FAULT_LEASE), 0);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	t->nr_sent = 0;
	msg = np_true_msg(peer, NP_MSG_RECALL, false);
	msg.secret ^= 1;
	msg.hold_id = 42;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	msg.hold_id = 43;
	np_test_from(t, &msg, 1);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 1);
	KUNIT_EXPECT_EQ(test, t->sent[0].status, RDMA_NP_GONE);
}

static void np_quick_message_is_believed_from_its_qp_only(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_msg msg;

	np_test_believes_init(test);
	/* Nobody's, as long as no MAD has told */
	np_test_nothing_is_believed(test, 0x515253, true, 0);
	np_test_nothing_is_believed(test, 1, true, 0);
	peer->path->ud_qpn = 0x515253;
	np_test_nothing_is_believed(test, 0x515252, true, 0);
	np_test_nothing_is_believed(test, 1, true, 0);
	np_test_nothing_is_believed(test, 0x515253, true, 1);
	/* RESOLVE and its answer only by MAD */
	msg = np_true_msg(peer, NP_MSG_RESOLVE, false);
	msg.quick = true;
	np_test_from(t, &msg, 0x515253);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);

	msg = np_true_msg(peer, NP_MSG_FORGET, false);
	msg.forget.seq = U64_MAX;
	msg.quick = true;
	msg.ud_qpn = 0x777;
	np_test_from(t, &msg, 0x515253);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
	KUNIT_EXPECT_EQ(test, peer->nr_grants, 6);
	KUNIT_EXPECT_TRUE(test, peer->path->ud_known);
	/* And it tells of no other one */
	KUNIT_EXPECT_EQ(test, peer->path->ud_qpn, 0x515253);
}

/* Where it is told at once nobody else looks at it */
static void np_answer_is_believed_in_softirq_from_its_qp_only(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_addr from = { .qpn = 0x515253 };
	struct np_msg answer, wrong, request;
	struct np_addr other = from;
	struct rdma_np_event ev;

	np_test_believes_init(test);
	peer->path->ud_qpn = from.qpn;
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	answer = np_true_msg(peer, NP_MSG_FAULT, true);
	answer.quick = true;
	answer.tid = t->sent[0].tid;
	answer.faulted.hold_id = 0;

	wrong = answer;
	wrong.secret ^= 1;
	KUNIT_EXPECT_FALSE(test, np_receive_at_once(&t->fake.port, &wrong, &from));
	wrong = answer;
	wrong.src_qpn ^= 1;
	KUNIT_EXPECT_FALSE(test, np_receive_at_once(&t->fake.port, &wrong, &from));
	wrong = answer;
	wrong.dst_qpn ^= 1;
	KUNIT_EXPECT_FALSE(test, np_receive_at_once(&t->fake.port, &wrong, &from));
	other.qpn++;
	KUNIT_EXPECT_FALSE(test, np_receive_at_once(&t->fake.port, &answer, &other));
	other = from;
	other.lid++;
	KUNIT_EXPECT_FALSE(test, np_receive_at_once(&t->fake.port, &answer, &other));
	KUNIT_EXPECT_FALSE(test, np_receive_at_once(&t->other, &answer, &from));
	request = np_true_msg(peer, NP_MSG_FAULT, false);
	request.quick = true;
	KUNIT_EXPECT_FALSE(test, np_receive_at_once(&t->fake.port, &request, &from));
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_FALSE(test, peer->path->ud_known);

	KUNIT_EXPECT_TRUE(test, np_receive_at_once(&t->fake.port, &answer, &from));
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_OK);
	KUNIT_EXPECT_TRUE(test, peer->path->ud_known);
}

static void np_ud_qpn_is_learned_from_a_mad_with_the_secret(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_msg msg;

	np_test_believes_init(test);
	msg = np_true_msg(peer, NP_MSG_RESOLVE, false);
	msg.ud_pkey = 0x8000;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, peer->path->ud_qpn, 0);
	/* The port of the test has no UD QP, whose partition is taken for 0 */
	msg = np_true_msg(peer, NP_MSG_RELEASE, false);
	msg.ud_pkey = 0x8000;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, peer->path->ud_qpn, msg.ud_qpn);
	/* Another partition, or limited members both of them */
	msg.ud_pkey = 0x8001;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, peer->path->ud_qpn, 0);
	msg.ud_pkey = 0x8000;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, peer->path->ud_qpn, msg.ud_qpn);
	msg.ud_pkey = 0;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, peer->path->ud_qpn, 0);
}

/* Whoever knows the pair, and even the transaction */
static void np_answer_to_resolve_repeats_its_nonce(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_ask_resolve r = { .t = t };
	struct np_msg answer, request;

	INIT_WORK_ONSTACK(&r.work, np_ask_resolve);
	schedule_work(&r.work);
	KUNIT_EXPECT_NE(test, 0, wait_event_timeout(t->wait, READ_ONCE(t->nr_sent),
						    10 * HZ));
	request = t->sent[0];
	KUNIT_EXPECT_EQ(test, request.secret, 0);
	answer = np_true_msg(peer, NP_MSG_RESOLVE, true);
	answer.tid = request.tid;
	answer.nonce = request.nonce ^ 1;
	np_test_from(t, &answer, 1);
	answer.status = RDMA_NP_ACCESS;
	np_test_from(t, &answer, 1);
	KUNIT_EXPECT_EQ(test, peer->resolving, 1);
	KUNIT_EXPECT_EQ(test, peer->their_secret, 0);

	answer.nonce = request.nonce;
	answer.status = RDMA_NP_OK;
	np_test_from(t, &answer, 1);
	flush_work(&r.work);
	destroy_work_on_stack(&r.work);
	KUNIT_EXPECT_EQ(test, r.err, 0);
	KUNIT_EXPECT_EQ(test, peer->their_secret, answer.given);
	/* And from now on FAULTs carry it */
	t->nr_sent = 0;
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, answer.region.id, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, t->sent[0].secret, answer.given);
	np_answer_to(test, 0, RDMA_NP_OK, 0);
}

/* Else its answer would be believed no more, and the QP be lost */
static void np_fault_is_repeated_with_the_newest_secret(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);

	np_bind(test, 7);
	t->fake.peer.their_secret = NP_TEST_THEIRS;
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 1, 0), 0);
	t->fake.peer.their_secret = NP_TEST_THEIRS + 1;
	KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
						    READ_ONCE(t->nr_sent) >= 2,
						    10 * HZ));
	KUNIT_EXPECT_EQ(test, t->sent[0].secret, NP_TEST_THEIRS);
	KUNIT_EXPECT_EQ(test, t->sent[1].secret, NP_TEST_THEIRS + 1);
	np_answer_to(test, 0, RDMA_NP_OK, 0);
}

static struct kunit_case np_belief_cases[] = {
	KUNIT_CASE(np_mad_is_believed_from_qp1_only),
	KUNIT_CASE(np_message_without_the_secret_is_not_obeyed),
	KUNIT_CASE(np_gone_without_the_secret_waits_for_who_uses_the_keys),
	KUNIT_CASE(np_recall_without_the_secret_does_not_end_a_lease),
	KUNIT_CASE(np_quick_message_is_believed_from_its_qp_only),
	KUNIT_CASE(np_answer_is_believed_in_softirq_from_its_qp_only),
	KUNIT_CASE(np_ud_qpn_is_learned_from_a_mad_with_the_secret),
	KUNIT_CASE(np_answer_to_resolve_repeats_its_nonce),
	KUNIT_CASE(np_fault_is_repeated_with_the_newest_secret),
	{}
};

static struct kunit_suite np_belief_suite = {
	.name = "nprdma_proto_belief",
	.init = np_ask_init_test,
	.exit = np_ask_exit_test,
	.test_cases = np_belief_cases,
};

kunit_test_suite(np_belief_suite);
