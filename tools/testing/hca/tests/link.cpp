// SPDX-License-Identifier: GPL-2.0
/*
 * Two fabrics joined by a link: the transports when packets are lost, come twice
 * or late, when the link is cut, and when the other host stops, dies or is
 * another one by now. Time is simulated, and all chances come from seeds.
 */
#include "driver.h"
#include "link.h"

using namespace nphca;
using namespace nphca::test;

namespace {

struct faults {
	const char *name = "good";
	uint64_t loss = 0, duplicate = 0, delay = 0, delay_ns = 0; /* of a million */
};

/* Two hosts with a port each, a connected pair of QPs, a buffer on each side. */
struct two_hosts : ::testing::Test {
	two_hosts()
	{
		ma.join(mb);
		a_buf = ma.alloc(size);
		b_buf = mb.alloc(size);
		a_key = a.reg(a_buf, size, acc_all);
		b_key = b.reg(b_buf, size, acc_all);
		connect({});
	}
	void connect(const qp_options &o)
	{
		a_cq = a.create_cq();
		b_cq = b.create_cq();
		aq = a.create_qp(a_cq, a_cq, o);
		bq = b.create_qp(b_cq, b_cq, o);
		a.up(aq, o, b.lid, bq.qpn);
		b.up(bq, o, a.lid, aq.qpn);
	}
	void set(nphca_link_knob k, uint64_t value)
	{
		for (machine *m : {&ma, &mb})
			ASSERT_TRUE(nphca_link_knob_set(m->fabric, k, value));
	}
	void inject(const faults &f, uint64_t seed)
	{
		set(NPHCA_LINK_SEED, seed);
		set(NPHCA_LINK_LOSS, f.loss);
		set(NPHCA_LINK_DUPLICATE, f.duplicate);
		set(NPHCA_LINK_DELAY, f.delay);
		set(NPHCA_LINK_DELAY_NS, f.delay_ns);
	}
	uint64_t counter(machine &m, nphca_link_knob k) { return nphca_link_knob_get(m.fabric, k); }
	uint64_t value(machine &m, uint64_t at)
	{
		uint64_t v;
		std::memcpy(&v, m.at(at), 8);
		return v;
	}

	machine ma, mb;
	port a{ma, 1}, b{mb, 17};
	cq_t a_cq, b_cq;
	qp_t aq, bq;
	static constexpr uint32_t size = 256 * 1024;
	uint64_t a_buf = 0, b_buf = 0;
	uint32_t a_key = 0, b_key = 0;
};

TEST_F(two_hosts, every_verb_works_over_the_link)
{
	ma.fill(a_buf, 70000, 3);
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, a_key, 70000));
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(mb.filled(b_buf, 70000, 3));
	a.post(aq, wr(WQE_READ).remote(b_buf + 1, b_key).sge(a_buf + 100000, a_key, 69999));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(std::memcmp(ma.at(a_buf + 100000), mb.at(b_buf + 1), 69999), 0);
	for (const uint32_t len : {0u, 1u, 2u, 3u, 1025u}) {
		b.recv(bq, b_buf + 131072, b_key, 4096);
		wr w(WQE_SEND_IMM, true, 0xcafe0000 + len);
		if (len)
			w.sge(a_buf, a_key, len);
		a.post(aq, w);
		a.expect(a_cq, CQE_REQ);
		const completion c = b.expect(b_cq, CQE_RESP_SEND_IMM);
		EXPECT_EQ(c.imm, 0xcafe0000 + len);
		EXPECT_EQ(c.byte_count, len);
		EXPECT_EQ(c.slid, a.lid);
		EXPECT_TRUE(mb.filled(b_buf + 131072, len, 3));
	}
	b.recv(bq, b_buf, b_key, 64);
	a.post(aq, wr(WQE_WRITE_IMM, true, 7).remote(b_buf + 8192, b_key).sge(a_buf, a_key, 3000));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(b.expect(b_cq, CQE_RESP_WRITE_IMM).imm, 7u);
	std::memset(mb.at(b_buf), 0, 8);
	a.post(aq, wr(WQE_FAA).remote(b_buf, b_key).atomic(5, 0).sge(a_buf, a_key, 8));
	a.expect(a_cq, CQE_REQ);
	a.post(aq, wr(WQE_CAS).remote(b_buf, b_key).atomic(9, 5).sge(a_buf, a_key, 8));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(value(ma, a_buf), 5u);
	EXPECT_EQ(value(mb, b_buf), 9u);
	EXPECT_EQ(a.knob(NPHCA_RETRANSMISSIONS), 0u);
	EXPECT_EQ(counter(mb, NPHCA_LINK_MALFORMED), 0u);
}

TEST_F(two_hosts, ports_of_one_host_do_not_use_the_link)
{
	port c(ma, 2);
	cq_t cq = c.create_cq();
	qp_t x = a.create_qp(a_cq, a_cq), y = c.create_qp(cq, cq);
	a.up(x, {}, c.lid, y.qpn);
	c.up(y, {}, a.lid, x.qpn);
	const uint64_t sent = counter(ma, NPHCA_LINK_SENT);
	ma.fill(a_buf, 5000, 6);
	a.post(x, wr(WQE_WRITE).remote(a_buf + 65536, c.reg(a_buf, size, acc_all)).sge(a_buf, a_key, 5000));
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(ma.filled(a_buf + 65536, 5000, 6));
	EXPECT_EQ(counter(ma, NPHCA_LINK_SENT), sent);
}

TEST_F(two_hosts, refusals_are_told)
{
	a.post(aq, wr(WQE_WRITE).remote(b_buf + size, b_key).sge(a_buf, a_key, 64));
	a.expect_error(a_cq, wc_error::remote_access);
	EXPECT_EQ(b.state(bq), 6u);
	connect({});
	qp_options o;
	o.atomic = false;
	connect(o);
	a.post(aq, wr(WQE_FAA).remote(b_buf, b_key).atomic(5, 0).sge(a_buf, a_key, 8));
	a.expect_error(a_cq, wc_error::remote_invalid);
	connect({});
	b.recv(bq, b_buf + size, b_key, 64);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 64));
	a.expect_error(a_cq, wc_error::remote_op);
	b.expect_error(b_cq, wc_error::local_protection, true);
}

TEST_F(two_hosts, receiver_that_is_not_ready_is_waited_for_as_long_as_asked)
{
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 64));
	ma.run();
	b.recv(bq, b_buf, b_key, 64);
	ma.run_for(20000);
	a.expect(a_cq, CQE_REQ);
	b.expect(b_cq, CQE_RESP_SEND);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 64));
	ma.run_for(1000000);
	a.expect_error(a_cq, wc_error::rnr_retry);
	EXPECT_EQ(b.knob(NPHCA_RNR_NAKS), 4u) << "once, and once with two retries";
}

TEST_F(two_hosts, duplicated_rnr_counts_once)
{
	inject({"doubling", 0, 1000000}, 1);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 64));
	ma.run_for(15000);
	EXPECT_FALSE(a.poll(a_cq)) << "two retries are left";
	b.recv(bq, b_buf, b_key, 64);
	ma.run_for(1000000);
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(b.expect(b_cq, CQE_RESP_SEND).byte_count, 64u);
	EXPECT_FALSE(b.poll(b_cq));
}

/* A copy of a READ that was answered comes so late that part of its memory has gone. */
TEST_F(two_hosts, late_copy_of_a_read_may_find_its_memory_gone)
{
	mb.fill(b_buf, 100000, 8);
	mb.stopped = true;
	a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf, a_key, 100000));
	ma.run();
	ASSERT_EQ(mb.arriving.size(), 1u);
	const std::vector<uint8_t> copy = mb.arriving.front();
	mb.stopped = false;
	a.expect(a_cq, CQE_REQ);
	/* The key is in force still. */
	mb.protect(b_buf + 65536, 0);
	mb.arriving.push_back(copy);
	ma.run();
	EXPECT_EQ(b.state(bq), 3u) << "nobody waits for this answer";
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, a_key, 64));
	a.expect(a_cq, CQE_REQ);
	/* Who has no answer yet is told. */
	a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf, a_key, 100000));
	a.expect_error(a_cq, wc_error::remote_op);
	EXPECT_EQ(b.state(bq), 6u);
}

TEST_F(two_hosts, link_that_comes_back_in_time_costs_time_only)
{
	ma.fill(a_buf, 5000, 5);
	set(NPHCA_LINK_UP, 0);
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, a_key, 5000));
	ma.run_for(3 * (4096u << 7));
	EXPECT_FALSE(a.poll(a_cq));
	EXPECT_FALSE(mb.filled(b_buf, 5000, 5));
	set(NPHCA_LINK_UP, 1);
	ma.run_for(4096u << 8);
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(mb.filled(b_buf, 5000, 5));
	EXPECT_GE(counter(ma, NPHCA_LINK_CUT), 1u);
}

TEST_F(two_hosts, link_that_stays_cut_is_a_retry_error_and_the_rest_is_flushed)
{
	b.recv(bq, b_buf, b_key, 64);
	set(NPHCA_LINK_UP, 0);
	const uint64_t start = ma.now;
	a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf, a_key, 64), false);
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, a_key, 64));
	ma.run_for(3 * (4096u << 8));
	a.expect_error(a_cq, wc_error::retry);
	a.expect_error(a_cq, wc_error::flushed);
	EXPECT_GE(ma.now - start, 3u * (4096u << 8));
	EXPECT_EQ(a.state(aq), 6u);
	EXPECT_EQ(b.state(bq), 3u) << "a responder knows nothing of it";
	EXPECT_FALSE(b.poll(b_cq));
	/* It was an end: nothing of it comes when the link is back. */
	set(NPHCA_LINK_UP, 1);
	ma.run_for(100000000);
	EXPECT_EQ(*mb.at(b_buf), 0);
}

TEST_F(two_hosts, one_direction_that_is_cut_is_enough)
{
	std::memset(mb.at(b_buf), 0, 8);
	ASSERT_TRUE(nphca_link_knob_set(mb.fabric, NPHCA_LINK_LOSS, 0));
	ASSERT_TRUE(nphca_link_knob_set(ma.fabric, NPHCA_LINK_LOSS, 1000000));
	a.post(aq, wr(WQE_FAA).remote(b_buf, b_key).atomic(1, 0).sge(a_buf, a_key, 8));
	ma.run_for(3 * (4096u << 8));
	a.expect_error(a_cq, wc_error::retry);
	EXPECT_EQ(value(mb, b_buf), 1u) << "done once, however often it was asked for";
}

TEST_F(two_hosts, host_that_stops_holds_up_nobody_else)
{
	port c(ma, 2);
	cq_t cq = c.create_cq();
	qp_t x = a.create_qp(a_cq, a_cq), y = c.create_qp(cq, cq);
	a.up(x, {}, c.lid, y.qpn);
	c.up(y, {}, a.lid, x.qpn);
	const uint32_t c_key = c.reg(a_buf, size, acc_all);
	qp_options o;
	o.mtu = 1;
	connect(o);
	mb.stopped = true;
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, a_key, 200000));
	a.post(x, wr(WQE_WRITE).remote(a_buf + 65536, c_key).sge(a_buf, a_key, 5000));
	ma.run();
	EXPECT_EQ(mb.arriving.size(), mb.room);
	const auto own = a.poll(a_cq);
	ASSERT_FALSE(own) << "of another queue";
	ma.run_for(3 * (4096u << 8));
	a.expect_error(a_cq, wc_error::retry);
	/* What is posted to a failed queue is flushed, though the link is still full. */
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, a_key, 64));
	a.expect_error(a_cq, wc_error::flushed);
	/* It goes on, and finds a connection that is dead. */
	mb.stopped = false;
	ma.run_for(100000000);
	EXPECT_TRUE(mb.arriving.empty());
	connect({});
	ma.fill(a_buf, 64, 77);
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, a_key, 64));
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(mb.filled(b_buf, 64, 77));
}

TEST_F(two_hosts, dead_host_is_a_retry_error)
{
	mb.dead = mb.stopped = true;
	a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf, a_key, 200000));
	ma.run_for(3 * (4096u << 8));
	a.expect_error(a_cq, wc_error::retry);
	EXPECT_GE(counter(ma, NPHCA_LINK_UNSENT), 3u);
}

TEST_F(two_hosts, host_that_starts_again_under_its_lid_is_a_stranger)
{
	for (uint64_t life = 1; life < 20; ++life) {
		ma.join(mb);
		connect({});
		ma.leave();
		machine again;
		port b2(again, b.lid, life);
		ma.join(again);
		cq_t cq = b2.create_cq();
		qp_t q = b2.create_qp(cq, cq);
		const uint64_t buf = again.alloc(size);
		const uint32_t key = b2.reg(buf, size, acc_all);
		b2.up(q, {}, a.lid, aq.qpn);
		EXPECT_NE(q.qpn, bq.qpn);
		EXPECT_NE(key, b_key);
		ma.fill(a_buf, 64, 1);
		a.post(aq, wr(WQE_WRITE).remote(buf, b_key).sge(a_buf, a_key, 64));
		ma.run_for(3 * (4096u << 8));
		a.expect_error(a_cq, wc_error::retry);
		EXPECT_EQ(*again.at(buf), 0);
		EXPECT_EQ(b2.state(q), 3u) << "and does not notice";
		/* A connection with the newcomer is one like any other. */
		qp_t anew = a.create_qp(a_cq, a_cq), newcomer = b2.create_qp(cq, cq);
		a.up(anew, {}, b.lid, newcomer.qpn);
		b2.up(newcomer, {}, a.lid, anew.qpn);
		a.post(anew, wr(WQE_WRITE).remote(buf, key).sge(a_buf, a_key, 64));
		a.expect(a_cq, CQE_REQ);
		EXPECT_TRUE(again.filled(buf, 64, 1));
		ma.leave();
	}
}

/* All verbs, random sizes, over a link with faults: everything once, in order. */
struct faulty : two_hosts, ::testing::WithParamInterface<std::tuple<faults, int>> {};

TEST_P(faulty, every_request_takes_effect_exactly_once_and_in_order)
{
	const auto [f, seed] = GetParam();
	qp_options o;
	o.retry = 7;
	o.rnr_retry = 7;
	o.timeout = 4;
	connect(o);
	inject(f, static_cast<uint64_t>(seed));
	uint32_t state = 12345 + static_cast<uint32_t>(seed) * 7919;
	const auto random = [&](uint32_t n) {
		state = state * 1103515245 + 12345;
		return (state >> 8) % n;
	};
	uint64_t sum = 0;
	for (int round = 0; round < 60; ++round) {
		const uint32_t len = 1 + random(9000), add = random(1000), lag = random(3);
		const auto pattern = static_cast<uint8_t>(round);
		ma.fill(a_buf, len, pattern);
		/* Now and then the receive comes late. */
		if (lag)
			b.recv(bq, b_buf + 65536, b_key, 16384);
		a.post(aq, wr(WQE_READ, false).remote(b_buf + 131072, b_key).sge(a_buf + 65536, a_key, 8), false);
		a.post(aq, wr(WQE_WRITE, false).remote(b_buf, b_key).sge(a_buf, a_key, len), false);
		a.post(aq, wr(WQE_FAA, false).remote(b_buf + 131072, b_key).atomic(add, 0).sge(a_buf + 131072, a_key, 8), false);
		a.post(aq, wr(WQE_SEND, false).sge(a_buf, a_key, len), false);
		a.post(aq, wr(WQE_CAS, false).remote(b_buf + 131080, b_key).atomic(sum, sum - 1).sge(a_buf + 131080, a_key, 8), false);
		a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf + 16384, a_key, len));
		if (!lag) {
			ma.run_for(100000);
			b.recv(bq, b_buf + 65536, b_key, 16384);
		}
		/* Time-outs of 64 us; so many times bad luck is not believable. */
		std::optional<completion> c;
		for (int i = 0; i < 1000 && !c; ++i) {
			ma.run_for(100000);
			c = a.poll(a_cq);
		}
		ASSERT_TRUE(c) << "no completion in 100 ms; retransmissions: " << a.knob(NPHCA_RETRANSMISSIONS);
		ASSERT_EQ(c->opcode, CQE_REQ) << int{c->syndrome};
		/* A READ is not passed by an earlier request, but may see what a later one does. */
		ASSERT_TRUE(value(ma, a_buf + 65536) == sum || value(ma, a_buf + 65536) == sum + add);
		ASSERT_EQ(value(ma, a_buf + 131072), sum) << "an addition was done again, or not";
		sum += add;
		ASSERT_EQ(value(mb, b_buf + 131072), sum);
		ASSERT_TRUE(ma.filled(a_buf + 16384, len, pattern));
		ASSERT_TRUE(mb.filled(b_buf, len, pattern));
		ASSERT_TRUE(mb.filled(b_buf + 65536, len, pattern));
		const auto r = b.poll(b_cq);
		ASSERT_TRUE(r);
		ASSERT_EQ(r->opcode, CQE_RESP_SEND);
		ASSERT_EQ(r->byte_count, len);
		ASSERT_FALSE(b.poll(b_cq));
	}
	/* It was not a good link. */
	for (machine *m : {&ma, &mb}) {
		EXPECT_EQ(counter(*m, NPHCA_LINK_LOST) > 0, f.loss > 0);
		EXPECT_EQ(counter(*m, NPHCA_LINK_DUPLICATED) > 0, f.duplicate > 0);
		EXPECT_EQ(counter(*m, NPHCA_LINK_DELAYED) > 0, f.delay > 0);
	}
}

/* Many READs under way, of which copies come late, stay within what was agreed. */
TEST_P(faulty, reads_and_atomics_under_way_are_never_too_many)
{
	const auto [f, seed] = GetParam();
	qp_options o;
	o.retry = 7;
	o.timeout = 4;
	o.log_max_rd = 2;
	connect(o);
	inject(f, static_cast<uint64_t>(seed));
	mb.fill(b_buf, 65536, 9);
	uint64_t sum = 0;
	std::memset(mb.at(b_buf + 131072), 0, 8);
	for (int round = 0; round < 20; ++round) {
		std::memset(ma.at(a_buf), 0, 65536);
		for (uint32_t i = 0; i < 16; ++i) {
			a.post(aq, wr(WQE_READ, false).remote(b_buf + 4096 * i, b_key).sge(a_buf + 4096 * i, a_key, 4096), false);
			a.post(aq, wr(WQE_FAA, i == 15).remote(b_buf + 131072, b_key).atomic(1, 0).sge(a_buf + 131072 + 8 * i, a_key, 8),
			       i == 15);
		}
		std::optional<completion> c;
		for (int i = 0; i < 1000 && !c; ++i) {
			ma.run_for(100000);
			c = a.poll(a_cq);
		}
		ASSERT_TRUE(c) << "no completion in 100 ms; retransmissions: " << a.knob(NPHCA_RETRANSMISSIONS);
		ASSERT_EQ(c->opcode, CQE_REQ) << int{c->syndrome};
		ASSERT_TRUE(ma.filled(a_buf, 65536, 9));
		for (uint32_t i = 0; i < 16; ++i)
			ASSERT_EQ(value(ma, a_buf + 131072 + 8 * i), sum++);
	}
}

/* Requests of all kinds and sizes under way, posted and completed in any order of events. */
TEST_P(faulty, requests_complete_with_the_right_data_whenever_they_are_posted)
{
	const auto [f, seed] = GetParam();
	qp_options o;
	o.mtu = 5;
	o.retry = 7;
	o.timeout = static_cast<uint8_t>(4 + seed % 4);
	o.log_max_rd = 3;
	connect(o);
	inject(f, static_cast<uint64_t>(seed));
	uint64_t state = 88172645463325252ull + static_cast<uint64_t>(seed);
	const auto random = [&](uint32_t n) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		return static_cast<uint32_t>((state >> 11) % n);
	};
	struct request {
		uint32_t kind, len;
		uint8_t pattern;
		uint64_t sum;
	};
	constexpr uint32_t slots = 15, slot = 16384, total = 600;
	/* A place of its own for each, here and there. */
	std::array<request, slots> requests;
	uint32_t posted = 0, done = 0, idle = 0;
	uint64_t sum = 0;
	while (done < total) {
		if (posted < total && posted - done < slots && random(3)) {
			request &r = requests[posted % slots];
			const uint64_t here = a_buf + slot * (posted % slots), there = b_buf + slot * (posted % slots);
			r = {random(6), random(3) ? 1 + random(200) : 1 + random(slot), static_cast<uint8_t>(random(256)), sum};
			++posted;
			if (r.kind == 0) {
				a.post(aq, wr(WQE_FAA).remote(b_buf + slots * slot, b_key).atomic(1, 0).sge(here, a_key, 8));
				++sum;
			} else if (r.kind < 4) {
				mb.fill(there, r.len, r.pattern);
				a.post(aq, wr(WQE_READ).remote(there, b_key).sge(here, a_key, r.len));
			} else {
				ma.fill(here, r.len, r.pattern);
				a.post(aq, wr(WQE_WRITE).remote(there, b_key).sge(here, a_key, r.len));
			}
		} else {
			ma.run_for(random(random(4) ? 2000 : 50000));
		}
		const auto c = a.poll(a_cq);
		ASSERT_LT(idle += !c, 200000u) << "request " << done << " of kind " << requests[done % slots].kind;
		if (!c)
			continue;
		idle = 0;
		ASSERT_EQ(c->opcode, CQE_REQ) << int{c->syndrome};
		const request &r = requests[done % slots];
		const uint64_t here = a_buf + slot * (done % slots), there = b_buf + slot * (done % slots);
		if (r.kind == 0)
			ASSERT_EQ(value(ma, here), r.sum);
		else if (r.kind < 4)
			ASSERT_TRUE(ma.filled(here, r.len, r.pattern));
		else
			ASSERT_TRUE(mb.filled(there, r.len, r.pattern));
		++done;
	}
	EXPECT_EQ(value(mb, b_buf + slots * slot), sum);
}

const faults good{}, losing{"losing", 30000}, doubling{"doubling", 0, 200000},
	late{"late", 0, 0, 200000, 50000}, /* less than a time-out */
	very_late{"very_late", 0, 0, 20000, 5000000}, /* many time-outs */
	bad{"bad", 30000, 50000, 100000, 200000};

INSTANTIATE_TEST_SUITE_P(link, faulty,
			 ::testing::Combine(::testing::Values(good, losing, doubling, late, very_late, bad), ::testing::Range(0, 6)),
			 [](const auto &info) {
				 return std::string(std::get<0>(info.param).name) + "_" + std::to_string(std::get<1>(info.param));
			 });

/* Unreliable transports */

TEST_F(two_hosts, unreliable_message_arrives_whole_or_not_at_all)
{
	qp_options o;
	o.st = ST_UC;
	connect(o);
	inject({"bad", 100000, 100000, 50000, 1000}, 5);
	int arrived = 0;
	for (uint32_t i = 0; i < 200; ++i) {
		const uint32_t len = 500 + i * 20;
		b.recv(bq, b_buf, b_key, 16384);
		ma.fill(a_buf, len, static_cast<uint8_t>(i));
		std::memset(mb.at(b_buf), 0, len);
		a.post(aq, wr(WQE_SEND_IMM, true, i).sge(a_buf, a_key, len));
		a.expect(a_cq, CQE_REQ);
		ma.run_for(100000);
		while (const auto c = b.poll(b_cq)) {
			++arrived;
			ASSERT_EQ(c->opcode, CQE_RESP_SEND_IMM);
			/* Messages of one packet may come twice, as nothing tells that apart. */
			if (c->imm == i) {
				ASSERT_EQ(c->byte_count, len);
				ASSERT_TRUE(mb.filled(b_buf, len, static_cast<uint8_t>(i)));
			}
		}
	}
	EXPECT_GT(arrived, 40);
	EXPECT_LT(arrived, 190);
}

TEST_F(two_hosts, datagrams_and_multicast_cross_the_link_once)
{
	qp_options o;
	o.st = ST_UD;
	o.mtu = 5;
	connect(o);
	ma.fill(a_buf, 4096, 4);
	b.recv(bq, b_buf, b_key, 8192);
	a.post(aq, wr(WQE_SEND_IMM, true, 0x77).datagram(bq.qpn, o.qkey, b.lid, true).sge(a_buf, a_key, 4096));
	a.expect(a_cq, CQE_REQ);
	completion c = b.expect(b_cq, CQE_RESP_SEND_IMM);
	EXPECT_EQ(c.byte_count, 4136u);
	EXPECT_EQ(c.remote_qpn, aq.qpn);
	EXPECT_TRUE(c.grh);
	EXPECT_TRUE(mb.filled(b_buf + 40, 4096, 4));

	wr w = wr(WQE_SEND).datagram(0xffffff, o.qkey, 0xc001, true);
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
	b.recv(bq, b_buf, b_key, 8192);
	a.post(aq, w);
	a.expect(a_cq, CQE_REQ);
	b.expect(b_cq, CQE_RESP_SEND);
	EXPECT_FALSE(b.poll(b_cq));
	EXPECT_FALSE(a.poll(a_cq)) << "it came back";
}

/* The format */

TEST(wire, every_opcode_survives_the_way)
{
	std::array<uint8_t, max_wire> raw;
	int known = 0;
	for (uint32_t opcode = 0; opcode < 256; ++opcode)
		for (const bool xrc : {false, true})
			for (const bool grh : {false, true})
				for (const uint32_t size : {0u, 1u, 4095u, 4096u}) {
					packet in{}, out{};
					in.opcode = static_cast<uint8_t>(opcode);
					in.slid = 3;
					in.dlid = 0x1234;
					in.sl = 5;
					in.pkey = 0xffff;
					in.dqpn = 0xabcdef;
					in.psn = 0x123456;
					in.ack_req = in.solicited = true;
					in.srqn = xrc ? 0x77 : 0;
					in.has_grh = grh;
					in.grh.fill(9);
					in.va = 0x1122334455667788;
					in.rkey = 0xcafef00d;
					in.length = 77;
					in.operand = ~0ull;
					in.syndrome = 0x61;
					in.size = size;
					in.data.fill(static_cast<uint8_t>(size));
					const size_t n = encode(in, raw);
					if (!n || (opcode & BTH_CLASS) == 0xa0)
						continue;
					++known;
					ASSERT_TRUE(decode({raw.data(), n}, out)) << opcode;
					EXPECT_EQ(out.opcode, in.opcode);
					EXPECT_EQ(out.slid, in.slid);
					EXPECT_EQ(out.dlid, in.dlid);
					EXPECT_EQ(out.sl, in.sl);
					EXPECT_EQ(out.dqpn, in.dqpn);
					EXPECT_EQ(out.psn, in.psn);
					EXPECT_TRUE(out.ack_req && out.solicited);
					EXPECT_EQ(out.has_grh, grh);
					EXPECT_TRUE(!grh || out.grh == in.grh);
					EXPECT_TRUE(out.size == 0 || (out.size == size && std::equal(in.data.begin(), in.data.begin() + size, out.data.begin())));
					/* What came is what goes. */
					std::array<uint8_t, max_wire> again;
					packet copy = out;
					ASSERT_EQ(encode(copy, again), n);
					EXPECT_TRUE(std::equal(raw.begin(), raw.begin() + static_cast<ptrdiff_t>(n), again.begin()));
					/* Any other length is not believed. */
					EXPECT_FALSE(decode({raw.data(), n - 4}, out));
					EXPECT_FALSE(n + 4 <= max_wire && decode({raw.data(), n + 4}, out));
				}
	EXPECT_GT(known, 300);
}

} // namespace
