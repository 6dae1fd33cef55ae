// SPDX-License-Identifier: GPL-2.0
/*
 * Completion queues, event queues, shared receive queues.
 */
#include "driver.h"

using namespace nphca;
using namespace nphca::test;

namespace {

struct queues : pair_fixture {
	void send(bool solicited = false)
	{
		b.recv(bq, b_buf, b_key, 64);
		wr w = wr(WQE_SEND).sge(a_buf, a_key, 8);
		if (solicited)
			w.solicited();
		a.post(aq, w);
		a.expect(a_cq, CQE_REQ);
	}
	size_t notifications()
	{
		const auto e = b.events();
		return static_cast<size_t>(std::count_if(e.begin(), e.end(), [&](const auto &x) {
			return x.type == EV_COMPLETION && x.number == b_cq.cqn;
		}));
	}
};

TEST_F(queues, unarmed_queue_makes_no_event)
{
	send();
	EXPECT_EQ(notifications(), 0u);
}

TEST_F(queues, armed_queue_makes_one_event_for_the_next_completion)
{
	b.arm(b_cq);
	EXPECT_EQ(notifications(), 0u);
	send();
	send();
	EXPECT_EQ(notifications(), 1u);
	send();
	EXPECT_EQ(notifications(), 0u);
}

TEST_F(queues, arming_with_news_in_the_queue_makes_an_event_at_once)
{
	send();
	b.arm(b_cq);
	EXPECT_EQ(notifications(), 1u);
}

TEST_F(queues, arming_again_without_polling_makes_no_second_event_for_old_news)
{
	send();
	b.arm(b_cq);
	EXPECT_EQ(notifications(), 1u);
	b.arm(b_cq); /* nothing new since */
	EXPECT_EQ(notifications(), 0u);
	send();
	EXPECT_EQ(notifications(), 1u);
}

TEST_F(queues, solicited_arming_waits_for_a_solicited_completion)
{
	b.arm(b_cq, true);
	send(false);
	EXPECT_EQ(notifications(), 0u);
	send(true);
	EXPECT_EQ(notifications(), 1u);
}

TEST_F(queues, solicited_arming_fires_for_an_error)
{
	b.recv(bq, b_buf, b_key, 64);
	b.arm(b_cq, true);
	ASSERT_EQ(b.modify(bq, OP_2ERR_QP, {}), 0);
	EXPECT_EQ(notifications(), 1u);
}

TEST_F(queues, full_queue_is_an_error_event_and_stops)
{
	cq_t small = b.create_cq(2);
	qp_t q = b.create_qp(b_cq, small), peer = a.create_qp(a_cq, a_cq);
	b.up(q, {}, a.lid, peer.qpn);
	a.up(peer, {}, b.lid, q.qpn);
	for (int i = 0; i < 5; ++i) {
		b.recv(q, b_buf, b_key, 64);
		a.post(peer, wr(WQE_SEND).sge(a_buf, a_key, 8));
		a.expect(a_cq, CQE_REQ);
	}
	const auto e = b.events();
	ASSERT_EQ(e.size(), 1u);
	EXPECT_EQ(e[0].type, EV_CQ_ERROR);
	EXPECT_EQ(e[0].number, small.cqn);
}

TEST_F(queues, owner_bit_changes_with_each_round)
{
	for (int i = 0; i < 3 * 256 + 7; ++i) {
		send();
		b.expect(b_cq, CQE_RESP_SEND);
	}
}

TEST_F(queues, resized_queue_goes_on_where_the_old_one_stopped)
{
	send();
	send();
	b.expect(b_cq, CQE_RESP_SEND);
	uint64_t buffer;
	ASSERT_EQ(b.resize_cq(b_cq, 4, &buffer), 0);
	b.expect(b_cq, CQE_RESP_SEND);
	b.expect(b_cq, CQE_RESIZE);
	b_cq.buffer = buffer;
	b_cq.log = 4;
	for (int i = 0; i < 40; ++i) {
		send();
		b.expect(b_cq, CQE_RESP_SEND);
	}
}

TEST_F(queues, resize_below_what_is_not_polled_is_refused)
{
	for (int i = 0; i < 4; ++i)
		send();
	uint64_t buffer;
	EXPECT_EQ(b.resize_cq(b_cq, 2, &buffer), 0x40);
	for (int i = 0; i < 4; ++i)
		b.expect(b_cq, CQE_RESP_SEND);
}

struct shared_receive : pair_fixture {
	srq_t s;
	void SetUp() override
	{
		s = b.create_srq(4);
		bq = b.create_qp(b_cq, b_cq, {}, &s);
		aq = a.create_qp(a_cq, a_cq);
		b.up(bq, {}, a.lid, aq.qpn);
		a.up(aq, {}, b.lid, bq.qpn);
	}
};

TEST_F(shared_receive, completion_names_the_entry)
{
	for (uint32_t i = 0; i < 3; ++i)
		b.recv(s, b_buf + 64 * i, b_key, 64);
	for (uint16_t i = 0; i < 3; ++i) {
		m.fill(a_buf, 32, static_cast<uint8_t>(i));
		a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 32));
		a.expect(a_cq, CQE_REQ);
		const completion c = b.expect(b_cq, CQE_RESP_SEND);
		EXPECT_EQ(c.counter, i);
		EXPECT_EQ(c.byte_count, 32u);
		EXPECT_EQ(c.uidx, s.srqn);
		EXPECT_TRUE(m.filled(b_buf + 64 * i, 32, static_cast<uint8_t>(i)));
	}
}

TEST_F(shared_receive, entries_come_in_the_order_of_the_list)
{
	/* What a driver's list looks like after completions in another order. */
	store16(m.at(s.buffer + 2), 5);
	store16(m.at(s.buffer + 64 * 5 + 2), 3);
	for (const uint32_t i : {0u, 5u, 3u}) {
		uint8_t *e = m.at(s.buffer + 64 * i + 16);
		store32(e, 64);
		store32(e + 4, b_key);
		store64(e + 8, b_buf);
		store32(e + 20, key_terminate);
	}
	store32(m.at(s.dbr), 3);
	for (const uint16_t i : std::initializer_list<uint16_t>{0, 5, 3}) {
		a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 32));
		a.expect(a_cq, CQE_REQ);
		EXPECT_EQ(b.expect(b_cq, CQE_RESP_SEND).counter, i);
	}
}

TEST_F(shared_receive, limit_makes_one_event_when_it_is_undercut)
{
	for (int i = 0; i < 5; ++i)
		b.recv(s, b_buf, b_key, 64);
	auto in = b.input(OP_MODIFY_RMP, s.srqn, cmd_in_pas);
	set(in, modify_rmp_in_bitmask, 1);
	set(part(bytes(in), cmd_in_rmpc + 48), wq_lwm, 3);
	std::vector<uint8_t> out(16);
	ASSERT_EQ(b.command(in, out), 0);
	size_t limits = 0;
	for (int i = 0; i < 5; ++i) {
		a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 8));
		a.expect(a_cq, CQE_REQ);
		for (const auto &e : b.events()) {
			EXPECT_EQ(e.type, EV_SRQ_LIMIT);
			EXPECT_EQ(e.number, s.srqn);
			EXPECT_EQ(i, 2) << "2 left are fewer than 3";
			++limits;
		}
	}
	EXPECT_EQ(limits, 1u);
}

TEST_F(shared_receive, empty_queue_is_receiver_not_ready)
{
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 8));
	m.run();
	EXPECT_FALSE(a.poll(a_cq));
	b.recv(s, b_buf, b_key, 64);
	m.run_for(20000);
	a.expect(a_cq, CQE_REQ);
}

TEST_F(shared_receive, failed_queue_pair_announces_its_last_entry)
{
	ASSERT_EQ(b.modify(bq, OP_2ERR_QP, {}), 0);
	const auto e = b.events();
	ASSERT_EQ(e.size(), 1u);
	EXPECT_EQ(e[0].type, EV_SRQ_LAST_WQE);
	EXPECT_EQ(e[0].number, bq.qpn);
}

TEST_F(shared_receive, list_that_leaves_the_queue_is_an_error_of_the_queue)
{
	store16(m.at(s.buffer + 2), 0x4000);
	for (int i = 0; i < 2; ++i)
		b.recv(s, b_buf, b_key, 64);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 8));
	a.expect(a_cq, CQE_REQ);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 8));
	m.run_for(1000000);
	a.expect_error(a_cq, wc_error::rnr_retry);
	const auto e = b.events();
	ASSERT_FALSE(e.empty());
	EXPECT_EQ(e[0].type, EV_SRQ_ERROR);
}

TEST_F(queues, interrupt_comes_once_per_arming_of_the_event_queue)
{
	b.events();
	const uint32_t before = b.interrupts;
	b.arm(b_cq);
	send();
	EXPECT_EQ(b.interrupts, before + 1);
	b.expect(b_cq, CQE_RESP_SEND);
	b.arm(b_cq);
	send();
	EXPECT_EQ(b.interrupts, before + 1) << "not armed again";
	/* Arming with an event left over is an interrupt at once. */
	b.arm_eq(b.eq);
	EXPECT_EQ(b.interrupts, before + 2);
}

} // namespace
