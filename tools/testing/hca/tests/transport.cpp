// SPDX-License-Identifier: GPL-2.0
/*
 * The transports: what arrives, in which order, and what happens when it
 * cannot.
 */
#include "driver.h"

using namespace nphca;
using namespace nphca::test;

namespace {

struct reliable : pair_fixture {};

TEST_F(reliable, send_arrives_with_length_and_source)
{
	for (const uint32_t len : {0u, 1u, 1023u, 1024u, 1025u, 70000u}) {
		m.fill(a_buf, len, 3);
		b.recv(bq, b_buf, b_key, size);
		wr w(WQE_SEND);
		if (len)
			w.sge(a_buf, a_key, len);
		a.post(aq, w);
		a.expect(a_cq, CQE_REQ);
		const completion c = b.expect(b_cq, CQE_RESP_SEND);
		EXPECT_EQ(c.byte_count, len);
		EXPECT_EQ(c.qpn, bq.qpn);
		EXPECT_EQ(c.slid, a.lid);
		EXPECT_TRUE(m.filled(b_buf, len, 3));
	}
}

TEST_F(reliable, immediate_data_arrives)
{
	b.recv(bq, b_buf, b_key, size);
	b.recv(bq, b_buf, b_key, size);
	a.post(aq, wr(WQE_SEND_IMM, true, 0xcafe0001).sge(a_buf, a_key, 3000));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(b.expect(b_cq, CQE_RESP_SEND_IMM).imm, 0xcafe0001);
	m.fill(a_buf, 3000, 8);
	a.post(aq, wr(WQE_WRITE_IMM, true, 0xcafe0002).remote(b_buf + 4096, b_key).sge(a_buf, a_key, 3000));
	a.expect(a_cq, CQE_REQ);
	const completion c = b.expect(b_cq, CQE_RESP_WRITE_IMM);
	EXPECT_EQ(c.imm, 0xcafe0002);
	EXPECT_EQ(c.byte_count, 3000u);
	EXPECT_TRUE(m.filled(b_buf + 4096, 3000, 8));
}

TEST_F(reliable, segments_are_gathered_and_scattered)
{
	m.fill(a_buf, 5000, 1);
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, a_key, 1).sge(a_buf + 1, a_key, 2999).sge(a_buf + 3000, a_key, 2000));
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(m.filled(b_buf, 5000, 1));
	a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf + 20000, a_key, 17).sge(a_buf + 20017, a_key, 4983));
	const completion c = a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(c.wqe_opcode, WQE_READ);
	EXPECT_EQ(c.byte_count, 5000u);
	EXPECT_TRUE(m.filled(a_buf + 20000, 5000, 1));
}

TEST_F(reliable, inline_data_needs_no_key)
{
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).inline_data("hello, this is more than one block of the send queue, is it not?"));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(std::memcmp(m.at(b_buf), "hello, this is more than one block of the send queue", 52), 0);
}

/* As UCX has them: a header in the request, and the data where it is. */
TEST_F(reliable, inline_data_may_stand_among_segments)
{
	const std::string head = "a header, ", tail = " and an end";

	std::memcpy(m.at(a_buf), "some data", 9);
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).inline_data(head).sge(a_buf, a_key, 9).inline_data("").inline_data(tail).sge(a_buf, a_key, 4));
	a.expect(a_cq, CQE_REQ);
	const std::string all = head + "some data" + tail + "some";
	EXPECT_EQ(std::string(reinterpret_cast<const char *>(m.at(b_buf)), all.size()), all);
	a.post(aq, wr(WQE_READ).remote(b_buf, b_key).inline_data(head));
	a.expect(a_cq, CQE_REQ_ERR);
}

TEST_F(reliable, queue_wraps_in_the_middle_of_a_request)
{
	const std::string text(150, 'x');
	for (int i = 0; i < 100; ++i) {
		const auto n = static_cast<size_t>(i) % 140;
		a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).inline_data(text.substr(0, 1 + n)));
		EXPECT_EQ(a.expect(a_cq, CQE_REQ).qpn, aq.qpn);
	}
}

TEST_F(reliable, unsignaled_requests_make_no_completion)
{
	for (int i = 0; i < 10; ++i)
		a.post(aq, wr(WQE_WRITE, i == 9).remote(b_buf, b_key).sge(a_buf, a_key, 2000), i == 9);
	EXPECT_EQ(a.expect(a_cq, CQE_REQ).counter, 9);
	EXPECT_FALSE(a.poll(a_cq));
}

TEST_F(reliable, atomics_return_the_old_value_and_leave_the_new)
{
	uint64_t value = 40;
	std::memcpy(m.at(b_buf + 8), &value, 8);
	a.post(aq, wr(WQE_FAA).remote(b_buf + 8, b_key).atomic(2, 0).sge(a_buf, a_key, 8));
	a.expect(a_cq, CQE_REQ);
	a.post(aq, wr(WQE_CAS).remote(b_buf + 8, b_key).atomic(7, 42).sge(a_buf + 8, a_key, 8));
	a.expect(a_cq, CQE_REQ);
	a.post(aq, wr(WQE_CAS).remote(b_buf + 8, b_key).atomic(9, 42).sge(a_buf + 16, a_key, 8));
	a.expect(a_cq, CQE_REQ);
	uint64_t old[3];
	std::memcpy(old, m.at(a_buf), sizeof(old));
	std::memcpy(&value, m.at(b_buf + 8), 8);
	EXPECT_EQ(old[0], 40u);
	EXPECT_EQ(old[1], 42u);
	EXPECT_EQ(old[2], 7u);
	EXPECT_EQ(value, 7u) << "the second comparison does not hold";
}

TEST_F(reliable, read_after_write_sees_the_write)
{
	m.fill(a_buf, 100000, 11);
	a.post(aq, wr(WQE_WRITE, false).remote(b_buf, b_key).sge(a_buf, a_key, 100000), false);
	a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf + 128 * 1024, a_key, 100000));
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(m.filled(a_buf + 128 * 1024, 100000, 11));
}

TEST_F(reliable, reads_fetch_in_order_unless_they_may_overlap)
{
	for (const bool overlap : {false, true}) {
		ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_READ_OVERLAP, overlap));
		m.requests.clear();
		m.record = true;
		a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf, a_key, 8192), false);
		a.post(aq, wr(WQE_READ).remote(b_buf + 65536, b_key).sge(a_buf + 65536, a_key, 64));
		EXPECT_EQ(a.expect(a_cq, CQE_REQ).byte_count, 8192u) << "completions stay in order";
		EXPECT_EQ(a.expect(a_cq, CQE_REQ).byte_count, 64u);
		m.record = false;
		size_t first = SIZE_MAX, second = SIZE_MAX;
		for (size_t i = 0; i < m.requests.size(); ++i) {
			if (m.requests[i].iova == b_buf)
				first = i;
			if (m.requests[i].iova == b_buf + 65536)
				second = i;
		}
		EXPECT_EQ(second < first, overlap);
		EXPECT_EQ(b.knob(NPHCA_OVERLAPPED_READS), overlap ? 1u : 0u);
	}
}

TEST_F(reliable, write_is_not_overtaken_by_a_read_that_may_overlap)
{
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_READ_OVERLAP, 1));
	for (uint8_t i = 1; i < 50; ++i) {
		m.fill(a_buf, 5000, i);
		a.post(aq, wr(WQE_READ, false).remote(b_buf + 65536, b_key).sge(a_buf + 65536, a_key, 8192), false);
		a.post(aq, wr(WQE_WRITE, false).remote(b_buf, b_key).sge(a_buf, a_key, 5000), false);
		a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf + 8192, a_key, 5000));
		a.expect(a_cq, CQE_REQ);
		ASSERT_TRUE(m.filled(a_buf + 8192, 5000, i));
	}
}

TEST_F(reliable, fence_waits_for_reads)
{
	m.fill(b_buf, 64, 21);
	a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf, a_key, 64), false);
	a.post(aq, wr(WQE_WRITE).remote(b_buf + 4096, b_key).sge(a_buf, a_key, 64).fence());
	a.expect(a_cq, CQE_REQ);
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(m.filled(b_buf + 4096, 64, 21)) << "it sends what the READ brought";
}

TEST_F(reliable, more_reads_than_allowed_wait_their_turn)
{
	qp_options o;
	o.log_max_rd = 1;
	connect(o);
	m.fill(b_buf, 40000, 2);
	for (uint32_t i = 0; i < 10; ++i)
		a.post(aq, wr(WQE_READ).remote(b_buf + 4000 * i, b_key).sge(a_buf + 4000 * i, a_key, 4000), i == 9);
	for (uint16_t i = 0; i < 10; ++i)
		EXPECT_EQ(a.expect(a_cq, CQE_REQ).counter, i);
	EXPECT_TRUE(m.filled(a_buf, 40000, 2));
}

TEST_F(reliable, receiver_that_becomes_ready_gets_the_message)
{
	m.fill(a_buf, 3000, 13);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 3000));
	m.run();
	EXPECT_FALSE(a.poll(a_cq));
	EXPECT_GE(b.knob(NPHCA_RNR_NAKS), 1u);
	b.recv(bq, b_buf, b_key, 4096);
	m.run_for(20000);
	a.expect(a_cq, CQE_REQ);
	b.expect(b_cq, CQE_RESP_SEND);
	EXPECT_TRUE(m.filled(b_buf, 3000, 13));
	EXPECT_GE(a.knob(NPHCA_RETRANSMISSIONS), 1u);
}

TEST_F(reliable, receiver_that_stays_unready_is_an_rnr_error)
{
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 10));
	m.run_for(1000000);
	a.expect_error(a_cq, wc_error::rnr_retry);
	EXPECT_EQ(b.knob(NPHCA_RNR_NAKS), 3u) << "once and two retries";
	EXPECT_EQ(b.state(bq), 3u);
}

TEST_F(reliable, rnr_retry_of_seven_is_without_end)
{
	qp_options o;
	o.rnr_retry = 7;
	connect(o);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 10));
	m.run_for(5000000);
	EXPECT_FALSE(a.poll(a_cq));
	b.recv(bq, b_buf, b_key, 64);
	m.run_for(1000000);
	a.expect(a_cq, CQE_REQ);
}

TEST_F(reliable, write_with_immediate_waits_for_a_receive)
{
	a.post(aq, wr(WQE_WRITE_IMM).remote(b_buf, b_key).sge(a_buf, a_key, 5000));
	m.run();
	EXPECT_FALSE(a.poll(a_cq));
	b.recv(bq, b_buf, b_key, 64);
	m.run_for(20000);
	a.expect(a_cq, CQE_REQ);
	b.expect(b_cq, CQE_RESP_WRITE_IMM);
}

TEST_F(reliable, silent_peer_is_a_retry_error)
{
	for (const int how : {0, 1, 2}) {
		connect({});
		ASSERT_EQ(how == 0   ? b.modify(bq, OP_2RST_QP, {}) :
			  how == 1 ? b.modify(bq, OP_2ERR_QP, {}) :
				     b.simple(OP_DESTROY_QP, bq.qpn),
			  0);
		const uint64_t start = m.now;
		a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf, a_key, 64));
		m.run();
		EXPECT_FALSE(a.poll(a_cq));
		m.run_for(10000000);
		a.expect_error(a_cq, wc_error::retry);
		EXPECT_GE(m.now - start, 3u * (4096u << 8));
		EXPECT_EQ(a.state(aq), 6u);
	}
}

TEST_F(reliable, packets_of_a_stranger_are_not_taken)
{
	/* A QP of a third port that claims to be connected to bq. */
	port c(m, 3);
	cq_t cq = c.create_cq();
	qp_t q = c.create_qp(cq, cq);
	c.up(q, {}, b.lid, bq.qpn);
	const uint64_t buf = m.alloc(4096);
	const uint32_t key = c.reg(buf, 4096, acc_all);
	m.fill(buf, 64, 1);
	c.post(q, wr(WQE_WRITE).remote(b_buf, b_key).sge(buf, key, 64));
	m.run_for(10000000);
	c.expect_error(cq, wc_error::retry);
	EXPECT_EQ(*m.at(b_buf), 0);
	EXPECT_EQ(b.state(bq), 3u);
}

TEST_F(reliable, loopback_to_the_own_port_works)
{
	qp_t x = a.create_qp(a_cq, a_cq), y = a.create_qp(a_cq, a_cq);
	a.up(x, {}, a.lid, y.qpn);
	a.up(y, {}, a.lid, x.qpn);
	m.fill(a_buf, 5000, 6);
	a.post(x, wr(WQE_WRITE).remote(a_buf + 65536, a_key).sge(a_buf, a_key, 5000));
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(m.filled(a_buf + 65536, 5000, 6));
}

TEST_F(reliable, error_state_flushes_both_queues)
{
	for (int i = 0; i < 3; ++i)
		b.recv(bq, b_buf, b_key, 64);
	ASSERT_EQ(b.modify(bq, OP_2ERR_QP, {}), 0);
	for (int i = 0; i < 3; ++i)
		b.expect_error(b_cq, wc_error::flushed, true);
	EXPECT_FALSE(b.poll(b_cq));
	/* What is posted later is flushed, too: sends at the doorbell, receives soon. */
	b.post(bq, wr(WQE_SEND, false).inline_data("x"));
	b.expect_error(b_cq, wc_error::flushed);
	b.recv(bq, b_buf, b_key, 64);
	m.run_for(100000000);
	b.expect_error(b_cq, wc_error::flushed, true);
}

TEST_F(reliable, reset_queue_pair_starts_anew)
{
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 10));
	m.run();
	ASSERT_EQ(a.modify(aq, OP_2RST_QP, {}), 0);
	ASSERT_EQ(b.modify(bq, OP_2RST_QP, {}), 0);
	for (qp_t *q : {&aq, &bq}) {
		q->sq_pi = q->rq_pi = 0;
		store64(m.at(q->dbr), 0);
	}
	a.up(aq, {}, b.lid, bq.qpn);
	b.up(bq, {}, a.lid, aq.qpn);
	m.fill(a_buf, 100, 1);
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, a_key, 100));
	EXPECT_EQ(a.expect(a_cq, CQE_REQ).counter, 0);
	EXPECT_TRUE(m.filled(b_buf, 100, 1));
	m.run_for(10000000);
	EXPECT_FALSE(a.poll(a_cq)) << "nothing is left of the time before";
}

TEST_F(reliable, opcode_that_does_not_exist_is_a_local_operation_error)
{
	a.post(aq, wr(0x77).sge(a_buf, a_key, 10));
	a.expect_error(a_cq, wc_error::local_qp_op);
}

TEST_F(reliable, message_longer_than_the_limit_is_a_local_length_error)
{
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, a_key, 0x7fffffff));
	a.expect_error(a_cq, wc_error::local_length);
}

/* All verbs, random sizes, over a link that loses packets: everything once, in order. */
struct lossy : pair_fixture, ::testing::WithParamInterface<int> {};

TEST_P(lossy, every_request_takes_effect_exactly_once_and_in_order)
{
	qp_options o;
	o.retry = 7;
	o.rnr_retry = 7;
	o.timeout = 2;
	connect(o);
	for (port *p : {&a, &b})
		ASSERT_TRUE(nphca_knob_set(p->dev, NPHCA_LOSS, static_cast<uint64_t>(GetParam())));
	uint32_t seed = 12345;
	const auto random = [&](uint32_t n) {
		seed = seed * 1103515245 + 12345;
		return (seed >> 8) % n;
	};
	uint64_t sum = 0, received = 0;
	for (int round = 0; round < 120; ++round) {
		const uint32_t len = 1 + random(9000);
		m.fill(a_buf, len, static_cast<uint8_t>(round));
		b.recv(bq, b_buf + 65536, b_key, 16384);
		const uint32_t add = random(1000);
		a.post(aq, wr(WQE_WRITE, false).remote(b_buf, b_key).sge(a_buf, a_key, len), false);
		a.post(aq, wr(WQE_FAA, false).remote(b_buf + 131072, b_key).atomic(add, 0).sge(a_buf + 131072, a_key, 8), false);
		a.post(aq, wr(WQE_SEND, false).sge(a_buf, a_key, len), false);
		a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf + 16384, a_key, len));
		/* Time-outs of 16 us; a hundred rounds of bad luck are not believable. */
		m.run_for(20000000);
		const auto c = a.poll(a_cq);
		ASSERT_TRUE(c);
		ASSERT_EQ(c->opcode, CQE_REQ) << int{c->syndrome};
		uint64_t old;
		std::memcpy(&old, m.at(a_buf + 131072), 8);
		ASSERT_EQ(old, sum);
		sum += add;
		ASSERT_TRUE(m.filled(a_buf + 16384, len, static_cast<uint8_t>(round)));
		ASSERT_TRUE(m.filled(b_buf + 65536, len, static_cast<uint8_t>(round)));
		const auto r = b.poll(b_cq);
		ASSERT_TRUE(r);
		ASSERT_EQ(r->byte_count, len);
		++received;
		ASSERT_FALSE(b.poll(b_cq));
	}
	EXPECT_EQ(a.knob(NPHCA_RETRANSMISSIONS) > 0, GetParam() > 0);
}

INSTANTIATE_TEST_SUITE_P(transport, lossy, ::testing::Values(0, 200, 30, 8));

/* Unreliable */

struct unreliable : pair_fixture {
	qp_options o;
	unreliable()
	{
		o.st = ST_UC;
		connect(o);
	}
};

TEST_F(unreliable, sends_and_writes_arrive)
{
	m.fill(a_buf, 5000, 4);
	b.recv(bq, b_buf, b_key, 8192);
	a.post(aq, wr(WQE_SEND_IMM, true, 5).sge(a_buf, a_key, 5000));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(b.expect(b_cq, CQE_RESP_SEND_IMM).byte_count, 5000u);
	EXPECT_TRUE(m.filled(b_buf, 5000, 4));
	b.recv(bq, b_buf, b_key, 8192);
	a.post(aq, wr(WQE_WRITE_IMM, true, 6).remote(b_buf + 65536, b_key).sge(a_buf, a_key, 5000));
	a.expect(a_cq, CQE_REQ);
	b.expect(b_cq, CQE_RESP_WRITE_IMM);
	EXPECT_TRUE(m.filled(b_buf + 65536, 5000, 4));
}

TEST_F(unreliable, message_without_right_or_receive_is_dropped_without_a_word)
{
	m.fill(a_buf, 64, 4);
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b.reg(b_buf, size, acc_all & ~acc_rw)).sge(a_buf, a_key, 64));
	a.expect(a_cq, CQE_REQ);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 64));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(*m.at(b_buf), 0);
	EXPECT_FALSE(b.poll(b_cq));
	EXPECT_EQ(b.state(bq), 3u);
	EXPECT_EQ(b.knob(NPHCA_DROPPED), 2u);
}

TEST_F(unreliable, read_is_a_local_operation_error)
{
	a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf, a_key, 64));
	a.expect_error(a_cq, wc_error::local_qp_op);
	EXPECT_EQ(a.state(aq), 4u) << "send queue error";
	ASSERT_EQ(a.modify(aq, OP_SQERR2RTS_QP, o), 0);
	b.recv(bq, b_buf, b_key, 64);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 64));
	a.expect(a_cq, CQE_REQ);
}

TEST_F(unreliable, message_that_lost_a_packet_is_dropped_whole)
{
	b.recv(bq, b_buf, b_key, 65536);
	b.recv(bq, b_buf, b_key, 65536);
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_LOSS, 2));
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 60000));
	a.expect(a_cq, CQE_REQ);
	EXPECT_FALSE(b.poll(b_cq));
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_LOSS, 0));
	m.fill(a_buf, 60000, 9);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 60000));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(b.expect(b_cq, CQE_RESP_SEND).byte_count, 60000u);
	EXPECT_TRUE(m.filled(b_buf, 60000, 9));
}

/* XRC: the sender names the shared queue, in any domain it can reach. */

struct shared_domain : pair_fixture {
	uint32_t xrcd = 0, xrcd2 = 0;
	qp_t ini, tgt;
	cq_t srq_cq;
	srq_t s;
	void SetUp() override
	{
		ASSERT_EQ(b.simple(OP_ALLOC_XRCD, 0, &xrcd), 0);
		ASSERT_EQ(b.simple(OP_ALLOC_XRCD, 0, &xrcd2), 0);
		srq_cq = b.create_cq();
		s = srq_of(xrcd);
		qp_options o;
		o.st = ST_XRC;
		tgt = b.create_qp(b_cq, b_cq, o, &s, b.alloc_pd(), xrcd);
		ini = a.create_qp(a_cq, a_cq, o, nullptr);
		a.up(ini, o, b.lid, tgt.qpn);
		b.up(tgt, o, a.lid, ini.qpn);
	}
	srq_t srq_of(uint32_t domain)
	{
		srq_t q = b.create_srq(4);
		auto in = b.input(OP_CREATE_XRC_SRQ, 0, cmd_in_pas + 8);
		const bytes c = part(bytes(in), cmd_in_ctx);
		set(c, srqc_log_srq_size, 4);
		set(c, srqc_log_rq_stride, 2);
		set(c, srqc_dbr_addr, q.dbr);
		set(c, srqc_pd, b.pd);
		set(c, srqc_xrcd, domain);
		set(c, srqc_cqn, srq_cq.cqn);
		set(c, xrc_srqc_user_index, 0xffffff);
		store64(&in[cmd_in_pas], q.buffer);
		std::vector<uint8_t> out(16);
		EXPECT_EQ(b.command(in, out), 0);
		q.srqn = get32(out, cmd_object);
		return q;
	}
	wr to(uint8_t opcode, uint32_t srqn)
	{
		wr w(opcode);
		w.raw.resize(32);
		store32(&w.raw[16], srqn);
		return w;
	}
};

TEST_F(shared_domain, message_arrives_in_the_queue_named_and_completes_there)
{
	b.recv(s, b_buf, b_key, 64);
	m.fill(a_buf, 50, 5);
	a.post(ini, to(WQE_SEND, s.srqn).sge(a_buf, a_key, 50));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(b.expect(srq_cq, CQE_RESP_SEND).uidx, s.srqn);
	EXPECT_FALSE(b.poll(b_cq));
	EXPECT_TRUE(m.filled(b_buf, 50, 5));
}

TEST_F(shared_domain, queue_of_another_domain_is_an_invalid_request)
{
	srq_t other = srq_of(xrcd2);
	b.recv(other, b_buf, b_key, 64);
	a.post(ini, to(WQE_SEND, other.srqn).sge(a_buf, a_key, 50));
	a.expect_error(a_cq, wc_error::remote_invalid);
	EXPECT_EQ(*m.at(b_buf), 0);
}

TEST_F(shared_domain, memory_belongs_to_the_protection_domain_of_the_queue)
{
	m.fill(a_buf, 50, 5);
	a.post(ini, to(WQE_WRITE, s.srqn).remote(b_buf, b_key).sge(a_buf, a_key, 50));
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(m.filled(b_buf, 50, 5));
	a.post(ini, to(WQE_WRITE, s.srqn + 1000).remote(b_buf, b_key).sge(a_buf, a_key, 50));
	a.expect_error(a_cq, wc_error::remote_access);
}

/* Datagrams */

struct datagrams : pair_fixture {
	qp_options o;
	datagrams()
	{
		o.st = ST_UD;
		o.mtu = 5;
		connect(o);
	}
};

TEST_F(datagrams, payload_comes_after_forty_bytes)
{
	m.fill(a_buf, 4096, 4);
	b.recv(bq, b_buf, b_key, 8192);
	a.post(aq, wr(WQE_SEND_IMM, true, 0x77).datagram(bq.qpn, o.qkey, b.lid).sge(a_buf, a_key, 4096));
	a.expect(a_cq, CQE_REQ);
	const completion c = b.expect(b_cq, CQE_RESP_SEND_IMM);
	EXPECT_EQ(c.byte_count, 4136u);
	EXPECT_EQ(c.remote_qpn, aq.qpn);
	EXPECT_EQ(c.slid, a.lid);
	EXPECT_EQ(c.imm, 0x77u);
	EXPECT_FALSE(c.grh);
	EXPECT_TRUE(m.filled(b_buf + 40, 4096, 4));
	EXPECT_EQ(*m.at(b_buf), 0);
}

TEST_F(datagrams, global_route_header_is_delivered)
{
	b.recv(bq, b_buf, b_key, 8192);
	a.post(aq, wr(WQE_SEND).datagram(bq.qpn, o.qkey, b.lid, true).sge(a_buf, a_key, 100));
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(b.expect(b_cq, CQE_RESP_SEND).grh);
	EXPECT_EQ(*m.at(b_buf) >> 4, 6);
	EXPECT_EQ(load16(m.at(b_buf + 4)), 124);
	EXPECT_EQ(load64(m.at(b_buf + 8)), 0xfe80000000000000ull);
}

TEST_F(datagrams, wrong_qkey_is_dropped_without_a_word)
{
	b.recv(bq, b_buf, b_key, 8192);
	a.post(aq, wr(WQE_SEND).datagram(bq.qpn, o.qkey + 1, b.lid).sge(a_buf, a_key, 100));
	a.expect(a_cq, CQE_REQ);
	EXPECT_FALSE(b.poll(b_cq));
	EXPECT_EQ(b.knob(NPHCA_DROPPED), 1u);
}

TEST_F(datagrams, privileged_qkey_cannot_be_made_up)
{
	qp_options gsi;
	gsi.st = ST_QP1;
	gsi.qkey = 0x80010000;
	qp_t one = b.create_qp(b_cq, b_cq, gsi);
	b.up(one, gsi);
	b.recv(one, b_buf, b_key, 8192);
	a.post(aq, wr(WQE_SEND).datagram(1, 0x80010000, b.lid).sge(a_buf, a_key, 100));
	a.expect(a_cq, CQE_REQ);
	EXPECT_FALSE(b.poll(b_cq)) << "the sender's own Q_Key went out";
	/* A QP1 has that Q_Key itself. */
	qp_t mine = a.create_qp(a_cq, a_cq, gsi);
	a.up(mine, gsi);
	a.post(mine, wr(WQE_SEND).datagram(1, 0x80010000, b.lid).sge(a_buf, a_key, 100));
	a.expect(a_cq, CQE_REQ);
	const completion c = b.expect(b_cq, CQE_RESP_SEND);
	EXPECT_EQ(c.remote_qpn, 1u);
	EXPECT_EQ(c.imm, 0xffffu) << "the P_Key";
	EXPECT_EQ(c.byte_count, 140u);
}

TEST_F(datagrams, nobody_there_is_no_error)
{
	a.post(aq, wr(WQE_SEND).datagram(bq.qpn, o.qkey, 99).sge(a_buf, a_key, 100));
	a.expect(a_cq, CQE_REQ);
	a.post(aq, wr(WQE_SEND).datagram(0x3ffff, o.qkey, b.lid).sge(a_buf, a_key, 100));
	a.expect(a_cq, CQE_REQ);
	a.post(aq, wr(WQE_SEND).datagram(bq.qpn, o.qkey, b.lid).sge(a_buf, a_key, 100));
	a.expect(a_cq, CQE_REQ);
	EXPECT_FALSE(b.poll(b_cq));
}

TEST_F(datagrams, longer_than_a_packet_is_a_local_length_error)
{
	a.post(aq, wr(WQE_SEND).datagram(bq.qpn, o.qkey, b.lid).sge(a_buf, a_key, 4097));
	a.expect_error(a_cq, wc_error::local_length);
}

TEST_F(datagrams, multicast_reaches_those_attached_but_the_sender)
{
	const uint16_t group_lid = 0xc001;
	qp_t other = b.create_qp(b_cq, b_cq, o);
	b.up(other, o);
	wr w = wr(WQE_SEND).datagram(0xffffff, o.qkey, group_lid, true);
	for (size_t i = 0; i < 16; ++i)
		w.raw[16 + 32 + i] = static_cast<uint8_t>(0xf0 + i);
	w.sge(a_buf, a_key, 100);
	for (const auto &[p, q] : {std::pair{&a, &aq}, std::pair{&b, &bq}}) {
		auto in = p->input(OP_ATTACH_TO_MCG, q->qpn, 32);
		std::copy_n(w.raw.begin() + 16 + 32, 16, in.begin() + 16);
		std::vector<uint8_t> out(16);
		ASSERT_EQ(p->command(in, out), 0);
		p->recv(*q, p == &a ? a_buf : b_buf, p == &a ? a_key : b_key, 8192);
	}
	b.recv(other, b_buf, b_key, 8192);
	a.post(aq, w);
	a.expect(a_cq, CQE_REQ);
	EXPECT_FALSE(a.poll(a_cq));
	EXPECT_EQ(b.expect(b_cq, CQE_RESP_SEND).qpn, bq.qpn);
	EXPECT_FALSE(b.poll(b_cq));
}

} // namespace
