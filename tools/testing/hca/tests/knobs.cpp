// SPDX-License-Identifier: GPL-2.0
/*
 * The knobs: what hardware may do that is less kind, and, as a counter-test,
 * what it may not. Each test says what a driver or a peer gets to see of it.
 */
#include <atomic>
#include <thread>

#include "driver.h"

using namespace nphca;
using namespace nphca::test;

namespace {

struct knobs : pair_fixture {
	static constexpr uint64_t latest = 1000; /* ns */

	void set(unsigned int knob, uint64_t value)
	{
		for (port *p : {&a, &b})
			ASSERT_TRUE(nphca_knob_set(p->dev, knob, value));
	}
	wr write(uint32_t at, uint32_t len) { return wr(WQE_WRITE).remote(b_buf + at, b_key).sge(a_buf, a_key, len); }
	wr read(uint32_t at, uint32_t len) { return wr(WQE_READ).remote(b_buf + at, b_key).sge(a_buf + size / 2, a_key, len); }
	void done(unsigned int n = 1)
	{
		m.run_for(100 * latest);
		while (n--)
			a.expect(a_cq, CQE_REQ);
	}
};

TEST_F(knobs, refuse_what_they_do_not_mean)
{
	const struct {
		unsigned int knob;
		uint64_t most;
	} limits[] = {
		{NPHCA_POSTED_WRITES, 1000000000}, {NPHCA_ACK_BEFORE_PLACEMENT, 1}, {NPHCA_OUT_OF_ORDER, 10000000},
		{NPHCA_CUT_FROM_START, 1},	   {NPHCA_RANDOM_FETCH, 1},	    {NPHCA_TRAILING_DMA, 1},
		{NPHCA_READ_PASSES_WRITE, 1},	   {NPHCA_NO_DRAIN, 1},		    {NPHCA_SPLIT_UNITS, 1},
		{NPHCA_IGNORE_INVALIDATIONS, 1},
	};
	for (const auto &l : limits) {
		EXPECT_EQ(a.knob(l.knob), 0u) << "off by default";
		EXPECT_TRUE(nphca_knob_set(a.dev, l.knob, l.most));
		EXPECT_FALSE(nphca_knob_set(a.dev, l.knob, l.most + 1));
		EXPECT_EQ(a.knob(l.knob), l.most);
		EXPECT_TRUE(nphca_knob_set(a.dev, l.knob, 0));
	}
	EXPECT_FALSE(nphca_knob_set(a.dev, NPHCA_COUNTERS - 1, 0)) << "there is none";
}

/* Posted writes */

TEST_F(knobs, posted_write_is_in_memory_later_and_acknowledged_when_it_is)
{
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_POSTED_WRITES, latest));
	m.fill(a_buf, 512, 3);
	a.post(aq, write(0, 512));
	m.run();
	EXPECT_EQ(*m.at(b_buf), 0);
	EXPECT_FALSE(a.poll(a_cq)) << "no ACK before the data is there";
	EXPECT_EQ(b.knob(NPHCA_POSTED), 1u);
	done();
	EXPECT_TRUE(m.filled(b_buf, 512, 3));
}

TEST_F(knobs, acknowledgement_need_not_wait_for_the_memory)
{
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_POSTED_WRITES, latest));
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_ACK_BEFORE_PLACEMENT, 1));
	m.fill(a_buf, 512, 3);
	a.post(aq, write(0, 512));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(*m.at(b_buf), 0);
	m.run_for(latest);
	EXPECT_TRUE(m.filled(b_buf, 512, 3));
}

TEST_F(knobs, posted_writes_arrive_in_order)
{
	set(NPHCA_POSTED_WRITES, latest);
	set(NPHCA_ACK_BEFORE_PLACEMENT, 1);
	for (int round = 0; round < 100; ++round) {
		const auto x = static_cast<uint8_t>(round + 1);
		for (uint32_t i = 0; i < 8; ++i) {
			*m.at(a_buf + i) = x;
			a.post(aq, wr(WQE_WRITE, i == 7).remote(b_buf + 4096 * i, b_key).sge(a_buf + i, a_key, 1));
		}
		/* At every instant a prefix of them is there. */
		for (int t = 0; t < 100; ++t) {
			m.run_for(latest / 50);
			for (uint32_t i = 1; i < 8; ++i)
				ASSERT_TRUE(*m.at(b_buf + 4096 * i) != x || *m.at(b_buf + 4096 * (i - 1)) == x);
		}
		done();
	}
}

TEST_F(knobs, read_pushes_the_writes_before_it)
{
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_POSTED_WRITES, 1000000000));
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_ACK_BEFORE_PLACEMENT, 1));
	m.fill(a_buf, 4096, 7);
	a.post(aq, write(0, 4096), false);
	a.post(aq, read(0, 4096));
	m.run();
	a.expect(a_cq, CQE_REQ);
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(m.filled(a_buf + size / 2, 4096, 7));
	EXPECT_TRUE(m.filled(b_buf, 4096, 7));
}

TEST_F(knobs, read_that_passes_writes_finds_what_was_there_before)
{
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_POSTED_WRITES, 1000000000));
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_ACK_BEFORE_PLACEMENT, 1));
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_READ_PASSES_WRITE, 1));
	m.fill(a_buf, 4096, 7);
	a.post(aq, write(0, 4096), false);
	a.post(aq, read(0, 4096));
	a.expect(a_cq, CQE_REQ);
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(*m.at(a_buf + size / 2), 0);
}

TEST_F(knobs, atomic_finds_the_one_before_it)
{
	set(NPHCA_POSTED_WRITES, latest);
	set(NPHCA_READ_PASSES_WRITE, 1);
	for (uint64_t i = 0; i < 10; ++i) {
		a.post(aq, wr(WQE_FAA).remote(b_buf, b_key).atomic(1, 0).sge(a_buf, a_key, 8));
		done();
		uint64_t old;
		std::memcpy(&old, m.at(a_buf), 8);
		EXPECT_EQ(old, i);
	}
}

TEST_F(knobs, interrupt_pushes_the_writes_before_it)
{
	a.arm(a_cq);
	a.arm_eq(a.eq);
	m.run();
	ASSERT_TRUE(nphca_knob_set(a.dev, NPHCA_POSTED_WRITES, 1000000000));
	a.post(aq, write(0, 64));
	m.run();
	EXPECT_EQ(a.interrupts, 1u);
	EXPECT_EQ(a.poll(a_cq)->opcode, CQE_REQ);
	EXPECT_EQ(a.poll_event(a.eq)->type, EV_COMPLETION);
}

TEST_F(knobs, completion_is_posted_behind_its_data)
{
	ASSERT_TRUE(nphca_knob_set(a.dev, NPHCA_POSTED_WRITES, latest));
	for (int round = 1; round < 50; ++round) {
		m.fill(b_buf, 4096, static_cast<uint8_t>(round));
		a.post(aq, read(0, 4096));
		m.run();
		std::optional<completion> c;
		for (int t = 0; t < 100 && !(c = a.poll(a_cq)); ++t)
			m.run_for(latest / 50);
		ASSERT_TRUE(c);
		ASSERT_TRUE(m.filled(a_buf + size / 2, 4096, static_cast<uint8_t>(round)));
	}
}

TEST_F(knobs, posted_write_goes_where_its_translation_said_until_it_is_drained)
{
	const uint64_t other = m.alloc(4096);
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_POSTED_WRITES, 1000000000));
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_ACK_BEFORE_PLACEMENT, 1));
	m.fill(a_buf, 512, 9);
	a.post(aq, write(0, 512));
	a.expect(a_cq, CQE_REQ);
	m.move(b_buf, other);
	EXPECT_EQ(*m.at(b_buf), 0);
	nphca_drain(m.fabric);
	EXPECT_TRUE(m.filled(b_buf, 512, 9)) << "to where the page was";
	std::memset(m.at(b_buf), 0, 4096);
	m.run_for(1000000000);
	EXPECT_EQ(*m.at(b_buf), 0) << "nothing comes after the drain";
	EXPECT_EQ(*m.at(other), 0);
}

TEST_F(knobs, without_a_drain_the_write_reaches_the_page_that_has_gone)
{
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_POSTED_WRITES, latest));
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_ACK_BEFORE_PLACEMENT, 1));
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_NO_DRAIN, 1));
	m.fill(a_buf, 512, 9);
	a.post(aq, write(0, 512));
	a.expect(a_cq, CQE_REQ);
	nphca_drain(m.fabric);
	EXPECT_EQ(*m.at(b_buf), 0);
	m.run_for(latest);
	EXPECT_TRUE(m.filled(b_buf, 512, 9)) << "after the drain";
}

TEST_F(knobs, drain_of_a_request_that_does_not_end_gives_up_and_says_so)
{
	/* The request under way waits for us, as for a lock that we hold. */
	const uint64_t before = m.requests_done;
	std::atomic<int> clock{0};
	m.on_dma = [&](uint64_t, size_t, bool) {
		if (clock.exchange(1, std::memory_order_relaxed))
			return;
		std::thread drainer([&] { nphca_drain(m.fabric); });
		m.ticking = true;
		drainer.join();
		m.ticking = false;
	};
	a.post(aq, write(0, 64));
	a.expect(a_cq, CQE_REQ);
	m.on_dma = nullptr;
	EXPECT_GT(m.requests_done, before);
	EXPECT_EQ(a.knob(NPHCA_DRAIN_TIMEOUTS), 1u);
	EXPECT_EQ(b.knob(NPHCA_DRAIN_TIMEOUTS), 1u);
}

TEST_F(knobs, write_that_cannot_be_posted_passes_none_that_was)
{
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_POSTED_WRITES, 1000000000));
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_ACK_BEFORE_PLACEMENT, 1));
	m.fill(a_buf, 512, 9);
	a.post(aq, write(0, 512));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(*m.at(b_buf), 0);
	m.unpostable = true;
	a.post(aq, write(4096, 1));
	a.expect(a_cq, CQE_REQ);
	EXPECT_NE(*m.at(b_buf + 4096), 0);
	EXPECT_TRUE(m.filled(b_buf, 512, 9));
}

TEST_F(knobs, more_writes_than_are_kept_push_the_first)
{
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_POSTED_WRITES, 1000000000));
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_ACK_BEFORE_PLACEMENT, 1));
	m.fill(a_buf, size / 2, 5);
	a.post(aq, write(0, size / 2));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(b.knob(NPHCA_POSTED), size / 2 / 512);
	ASSERT_GE(size / 2 / 512, 256u);
	a.post(aq, write(size / 2, 512));
	a.expect(a_cq, CQE_REQ);
	EXPECT_NE(*m.at(b_buf + 1), 0);
	EXPECT_EQ(*m.at(b_buf + size / 2 - 1), 0);
}

TEST_F(knobs, all_verbs_are_right_when_writes_are_posted)
{
	set(NPHCA_POSTED_WRITES, latest);
	for (int round = 0; round < 60; ++round) {
		const uint32_t len = 1 + static_cast<uint32_t>(round * 331 % 9000);
		m.fill(a_buf, len, static_cast<uint8_t>(round));
		b.recv(bq, b_buf + 65536, b_key, 16384);
		a.post(aq, wr(WQE_WRITE, false).remote(b_buf, b_key).sge(a_buf, a_key, len), false);
		a.post(aq, wr(WQE_SEND, false).sge(a_buf, a_key, len), false);
		a.post(aq, read(0, len));
		done();
		ASSERT_TRUE(m.filled(a_buf + size / 2, len, static_cast<uint8_t>(round)));
		ASSERT_TRUE(m.filled(b_buf + 65536, len, static_cast<uint8_t>(round)));
		ASSERT_EQ(b.poll(b_cq)->byte_count, len);
	}
}

/* How requests are cut */

TEST_F(knobs, requests_cut_from_the_start_are_as_long_as_they_may_be_and_cross_no_page)
{
	for (const uint64_t limit : {64, 128, 512, 4096}) {
		set(NPHCA_CUT_FROM_START, 1);
		set(NPHCA_DMA_REQUEST_SIZE, limit);
		m.fill(b_buf, 3000, 1);
		m.requests.clear();
		m.record = true;
		a.post(aq, wr(WQE_READ).remote(b_buf + 16, b_key).sge(a_buf + 4096, a_key, 1000));
		a.expect(a_cq, CQE_REQ);
		m.record = false;
		EXPECT_EQ(std::memcmp(m.at(a_buf + 4096), m.at(b_buf + 16), 1000), 0);
		uint64_t next = b_buf + 16;
		for (const auto &r : m.requests) {
			EXPECT_LE(r.len, limit);
			EXPECT_EQ(r.iova / 4096, (r.iova + r.len - 1) / 4096);
			if (r.write || r.iova < b_buf || r.iova >= b_buf + size)
				continue;
			EXPECT_EQ(r.iova, next);
			next += std::min<uint64_t>(limit, 1000);
		}
		EXPECT_GE(next, b_buf + 16 + 1000);
		a.post(aq, wr(WQE_WRITE).remote(b_buf + 4090, b_key).sge(a_buf, a_key, 1000));
		a.expect(a_cq, CQE_REQ);
		EXPECT_EQ(std::memcmp(m.at(b_buf + 4090), m.at(a_buf), 1000), 0);
	}
}

TEST_F(knobs, split_units_are_cut_inside_but_words_are_whole)
{
	unsigned int inside = 0;

	set(NPHCA_SPLIT_UNITS, 1);
	for (uint32_t i = 0; i < 200; ++i) {
		const uint32_t at = i * 8 % 512, len = 8 + i * 40 % 4000;
		m.fill(b_buf, 8192, static_cast<uint8_t>(i));
		m.requests.clear();
		m.record = true;
		a.post(aq, read(at, len));
		a.expect(a_cq, CQE_REQ);
		m.record = false;
		ASSERT_EQ(std::memcmp(m.at(a_buf + size / 2), m.at(b_buf + at), len), 0);
		for (const auto &r : m.requests) {
			const uint64_t end = r.iova + r.len;
			if (r.iova < b_buf || r.iova >= b_buf + size || end == b_buf + at + len)
				continue;
			ASSERT_EQ(end % 8, 0u);
			inside += end % 64 != 0;
		}
	}
	EXPECT_GT(inside, 200u);
}

/* READs in random order */

TEST_F(knobs, fetches_in_random_order_bring_the_same)
{
	bool backwards = false, across = false;

	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_RANDOM_FETCH, 1));
	for (int round = 0; round < 20; ++round) {
		m.fill(b_buf, 60000, static_cast<uint8_t>(round));
		m.requests.clear();
		m.record = true;
		for (uint32_t i = 0; i < 3; ++i)
			a.post(aq, wr(WQE_READ).remote(b_buf + 20000 * i, b_key).sge(a_buf + 20000 * i, a_key, 20000), i == 2);
		for (int i = 0; i < 3; ++i)
			a.expect(a_cq, CQE_REQ);
		m.record = false;
		ASSERT_TRUE(m.filled(a_buf, 60000, static_cast<uint8_t>(round)));
		uint64_t last = 0;
		for (const auto &r : m.requests) {
			if (r.write || r.iova < b_buf || r.iova >= b_buf + size)
				continue;
			backwards |= r.iova < last && last - r.iova < 1024;
			across |= r.iova < last && last - r.iova > 1024;
			last = r.iova;
		}
	}
	EXPECT_TRUE(backwards) << "inside a packet";
	EXPECT_TRUE(across) << "among packets";
}

/* Out of order */

TEST_F(knobs, requests_out_of_order_come_to_the_same_in_the_end)
{
	qp_options o;
	o.timeout = 14;
	connect(o);
	set(NPHCA_OUT_OF_ORDER, latest);
	uint64_t sum = 0;
	for (int round = 0; round < 200; ++round) {
		const uint32_t len = 1 + static_cast<uint32_t>(round * 331 % 9000);
		m.fill(a_buf, len, static_cast<uint8_t>(round));
		b.recv(bq, b_buf + 65536, b_key, 16384);
		a.post(aq, write(0, len), false);
		a.post(aq, wr(WQE_FAA).remote(b_buf + 131072, b_key).atomic(3, 0).sge(a_buf + 16384, a_key, 8), false);
		a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, len), false);
		a.post(aq, wr(WQE_READ).remote(b_buf + 65536, b_key).sge(a_buf + size / 2, a_key, 100));
		done(4);
		uint64_t old;
		std::memcpy(&old, m.at(a_buf + 16384), 8);
		ASSERT_EQ(old, sum) << "once, and in order";
		sum += 3;
		ASSERT_TRUE(m.filled(b_buf, len, static_cast<uint8_t>(round)));
		ASSERT_TRUE(m.filled(b_buf + 65536, len, static_cast<uint8_t>(round)));
		ASSERT_EQ(b.poll(b_cq)->byte_count, len);
		ASSERT_FALSE(b.poll(b_cq));
		a.post(aq, read(65536, len));
		done();
		ASSERT_TRUE(m.filled(a_buf + size / 2, len, static_cast<uint8_t>(round)));
	}
	EXPECT_GT(b.knob(NPHCA_EARLY), 100u);
	EXPECT_EQ(a.knob(NPHCA_RETRANSMISSIONS), 0u);
}

TEST_F(knobs, read_out_of_order_may_miss_the_write_before_it)
{
	unsigned int missed = 0, seen = 0;

	for (const uint64_t knob : {uint64_t{0}, latest}) {
		set(NPHCA_OUT_OF_ORDER, knob);
		for (int round = 0; round < 100; ++round) {
			std::memset(m.at(b_buf), 0, 4096);
			m.fill(a_buf, 64, static_cast<uint8_t>(round + 1));
			a.post(aq, write(0, 64), false);
			a.post(aq, read(0, 64));
			done(2);
			ASSERT_TRUE(m.filled(b_buf, 64, static_cast<uint8_t>(round + 1)));
			const bool same = m.filled(a_buf + size / 2, 64, static_cast<uint8_t>(round + 1));
			ASSERT_TRUE(same || (knob && *m.at(a_buf + size / 2) == 0)) << "the old, or the new";
			missed += !same;
			seen += same;
		}
	}
	EXPECT_GT(missed, 5u);
	EXPECT_GT(seen, 105u);
}

TEST_F(knobs, read_after_the_completion_of_a_write_sees_it_whatever_the_order)
{
	set(NPHCA_OUT_OF_ORDER, latest);
	for (int round = 0; round < 100; ++round) {
		m.fill(a_buf, 5000, static_cast<uint8_t>(round));
		a.post(aq, write(0, 5000));
		done();
		a.post(aq, read(0, 5000));
		done();
		ASSERT_TRUE(m.filled(a_buf + size / 2, 5000, static_cast<uint8_t>(round)));
	}
}

TEST_F(knobs, early_request_without_the_right_is_refused_in_its_turn)
{
	for (int round = 0; round < 20; ++round) {
		connect({});
		const uint32_t key = b.reg(b_buf, size, acc_all & ~acc_rw);
		set(NPHCA_OUT_OF_ORDER, latest);
		m.fill(a_buf, 64, 1);
		a.post(aq, write(0, 64), false);
		a.post(aq, wr(WQE_WRITE).remote(b_buf + 4096, key).sge(a_buf, a_key, 64));
		m.run_for(100 * latest);
		a.expect(a_cq, CQE_REQ);
		a.expect_error(a_cq, wc_error::remote_access);
		EXPECT_TRUE(m.filled(b_buf, 64, 1));
		EXPECT_EQ(*m.at(b_buf + 4096), 0);
	}
}

TEST_F(knobs, lost_packets_are_sent_again_when_others_are_out_of_order)
{
	qp_options o;
	o.retry = o.rnr_retry = 7;
	o.timeout = 2;
	connect(o);
	set(NPHCA_OUT_OF_ORDER, latest);
	set(NPHCA_LOSS, 20);
	for (int round = 0; round < 50; ++round) {
		m.fill(a_buf, 9000, static_cast<uint8_t>(round));
		b.recv(bq, b_buf + 65536, b_key, 16384);
		a.post(aq, write(0, 9000), false);
		a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 9000));
		m.run_for(20000000);
		a.expect(a_cq, CQE_REQ);
		a.expect(a_cq, CQE_REQ);
		ASSERT_TRUE(m.filled(b_buf, 9000, static_cast<uint8_t>(round)));
		ASSERT_TRUE(m.filled(b_buf + 65536, 9000, static_cast<uint8_t>(round)));
		ASSERT_TRUE(b.poll(b_cq));
	}
}

/* Trailing DMA */

TEST_F(knobs, failed_queue_pair_may_write_until_a_command_ends_it)
{
	for (const bool trailing : {false, true}) {
		connect({});
		set(NPHCA_TRAILING_DMA, trailing);
		/* The second request fails there, and the third is on its way behind it. */
		m.fill(a_buf, 64, 4);
		a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key + 0x100).sge(a_buf, a_key, 64), false);
		a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf + 8192, a_key, 64), false);
		a.post(aq, write(4096, 64));
		/* Again, once it has failed: as a switch would that still has it. */
		m.run_for(3000000);
		a.expect_error(a_cq, wc_error::remote_access);
		ASSERT_EQ(b.state(bq), 6u);
		qp_t stray = a.create_qp(a_cq, a_cq);
		qp_options o;
		o.psn += 100;
		a.up(stray, o, b.lid, bq.qpn);
		a.post(stray, write(4096, 64));
		m.run();
		EXPECT_EQ(m.filled(b_buf + 4096, 64, 4), trailing);
		EXPECT_EQ(b.knob(NPHCA_TRAILING) > 0, trailing);
		std::memset(m.at(b_buf + 4096), 0, 64);
		ASSERT_EQ(b.modify(bq, OP_2ERR_QP, {}), 0);
		const uint64_t before = b.knob(NPHCA_TRAILING);
		a.post(stray, write(4096, 64));
		m.run_for(5000000);
		EXPECT_EQ(*m.at(b_buf + 4096), 0) << "the command has completed";
		EXPECT_EQ(b.knob(NPHCA_TRAILING), before);
	}
}

TEST_F(knobs, read_that_is_queued_may_fetch_through_a_key_that_ends)
{
	set(NPHCA_TRAILING_DMA, 1);
	m.fill(b_buf, 64 * 1024, 4);
	a.post(aq, read(0, 64 * 1024));
	/* Until some of it is answered, and most is not. */
	const uint64_t enough = b.knob(NPHCA_DMA_REQUESTS) + 30;
	uint64_t deadline;
	while (b.knob(NPHCA_DMA_REQUESTS) < enough)
		nphca_fabric_poll(m.fabric, &deadline);
	ASSERT_EQ(b.simple(OP_DESTROY_MKEY, b_key >> 8), 0);
	EXPECT_GT(b.knob(NPHCA_TRAILING), 0u);
}

} // namespace
