// SPDX-License-Identifier: GPL-2.0
/*
 * A guest that writes garbage: nothing may crash, hang or grow without bound,
 * and a second guest on the fabric must not notice. Run under the sanitizers.
 */
#include "driver.h"
#include "link.h"

using namespace nphca;
using namespace nphca::test;

namespace {

class random_source {
public:
	explicit random_source(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252ull) {}
	uint64_t operator()()
	{
		state_ ^= state_ << 13;
		state_ ^= state_ >> 7;
		state_ ^= state_ << 17;
		return state_;
	}
	uint32_t below(uint64_t n) { return static_cast<uint32_t>((*this)() % n); }
	/* Small, huge and aligned values are where bounds are. */
	uint64_t odd()
	{
		switch (below(5)) {
		case 0:
			return below(64);
		case 1:
			return ~uint64_t{0} - below(64);
		case 2:
			return machine::ram_base + below(machine::ram_size);
		case 3:
			return uint64_t{1} << below(64);
		default:
			return (*this)();
		}
	}

private:
	uint64_t state_;
};

constexpr uint16_t opcodes[] = {
	OP_QUERY_HCA_CAP, OP_QUERY_ADAPTER, OP_ENABLE_HCA, OP_QUERY_PAGES, OP_MANAGE_PAGES, OP_SET_HCA_CAP, OP_QUERY_ISSI,
	OP_SET_ISSI, OP_CREATE_MKEY, OP_QUERY_MKEY, OP_DESTROY_MKEY, OP_QUERY_SPECIAL_CONTEXTS, OP_CREATE_EQ, OP_DESTROY_EQ,
	OP_QUERY_EQ, OP_CREATE_CQ, OP_DESTROY_CQ, OP_QUERY_CQ, OP_MODIFY_CQ, OP_CREATE_QP, OP_DESTROY_QP, OP_RST2INIT_QP,
	OP_INIT2RTR_QP, OP_RTR2RTS_QP, OP_RTS2RTS_QP, OP_SQERR2RTS_QP, OP_2ERR_QP, OP_2RST_QP, OP_QUERY_QP, OP_SQD2RTS_QP,
	OP_MAD_IFC, OP_INIT2INIT_QP, OP_CREATE_SRQ, OP_DESTROY_SRQ, OP_QUERY_SRQ, OP_ARM_RQ, OP_CREATE_XRC_SRQ,
	OP_QUERY_XRC_SRQ, OP_QUERY_HCA_VPORT_CONTEXT, OP_QUERY_HCA_VPORT_GID, OP_QUERY_HCA_VPORT_PKEY, OP_ALLOC_Q_COUNTER,
	OP_DEALLOC_Q_COUNTER, OP_QUERY_Q_COUNTER, OP_ALLOC_PD, OP_ALLOC_UAR, OP_ACCESS_REG, OP_ATTACH_TO_MCG,
	OP_DETACH_FROM_MCG, OP_ALLOC_XRCD, OP_CREATE_RMP, OP_MODIFY_RMP, OP_DESTROY_RMP, OP_QUERY_RMP,
};

struct hostile : ::testing::TestWithParam<int> {
	machine m;
	port good1{m, 1}, good2{m, 2}, bad{m, 3};

	/* The good ports still work. */
	void check_others()
	{
		cq_t c1 = good1.create_cq(4), c2 = good2.create_cq(4);
		qp_t q1 = good1.create_qp(c1, c1), q2 = good2.create_qp(c2, c2);
		good1.up(q1, {}, 2, q2.qpn);
		good2.up(q2, {}, 1, q1.qpn);
		const uint64_t buf = m.alloc(8192);
		m.fill(buf, 4096, 1);
		good1.post(q1, wr(WQE_WRITE).remote(buf + 4096, good2.reg(buf, 8192, acc_all)).sge(buf, good1.reg(buf, 8192, acc_all), 4096));
		good1.expect(c1, CQE_REQ);
		EXPECT_TRUE(m.filled(buf + 4096, 4096, 1));
	}
};

TEST_P(hostile, random_commands_get_a_status)
{
	random_source r(static_cast<uint64_t>(GetParam()));
	uint32_t last = 0;
	for (int i = 0; i < 3000; ++i) {
		auto in = bad.input(opcodes[r.below(std::size(opcodes))], r.below(3) ? last : r.below(0x200), 8 + r.below(1200));
		if (r.below(4) == 0)
			in[0] = static_cast<uint8_t>(r());
		for (uint32_t n = r.below(24); n; --n) {
			const size_t at = 8 + r.below(in.size() - 7);
			if (at + 8 <= in.size())
				store64(&in[at], r.odd());
		}
		std::vector<uint8_t> out(8 + r.below(1200));
		const int status = bad.command(in, out);
		ASSERT_GE(status, 0) << "command " << std::hex << get(in, cmd_opcode);
		if (status == 0 && out.size() >= 12 && get32(out, cmd_object))
			last = get32(out, cmd_object);
	}
	m.run_for(1000000);
	check_others();
}

TEST_P(hostile, random_command_entries_and_registers_do_no_harm)
{
	random_source r(static_cast<uint64_t>(GetParam()) + 1000);
	const uint64_t queue = m.alloc(4096);
	bad.mmio(seg_cmdq_low, __builtin_bswap32(static_cast<uint32_t>(queue)), 4);
	for (int i = 0; i < 3000; ++i) {
		uint8_t *e = m.at(queue + 64 * r.below(32));
		for (int n = 0; n < 8; ++n)
			store64(e + 8 * n, r.odd());
		store32(e + 4, static_cast<uint32_t>(r.below(4) ? r.below(4096) : r.odd()));
		store32(e + 56, static_cast<uint32_t>(r.below(4) ? r.below(4096) : r.odd()));
		store16(e + 16, opcodes[r.below(std::size(opcodes))]);
		e[63] = 1;
		bad.mmio(seg_doorbell, r(), 4);
		const unsigned int size = 1u << r.below(4);
		bad.mmio((r.below(2) ? r.below(0x2000) : r.below(NPHCA_BAR0_SIZE)) & ~uint64_t{size - 1}, r.odd(), size);
		nphca_mmio_read(bad.dev, r.odd(), size);
		m.run();
	}
	check_others();
}

TEST_P(hostile, random_work_requests_fail_or_do_what_they_may)
{
	random_source r(static_cast<uint64_t>(GetParam()) + 2000);
	const uint64_t buf = m.alloc(65536);
	const uint32_t key = bad.reg(buf, 65536, acc_all);
	const uint64_t secret = m.alloc(4096);
	m.fill(secret, 4096, 99);
	for (int round = 0; round < 150; ++round) {
		cq_t c = bad.create_cq(6);
		const uint8_t kinds[] = {ST_RC, ST_UC, ST_UD, ST_REG_UMR};
		qp_options o;
		o.st = kinds[r.below(std::size(kinds))];
		o.timeout = 1;
		srq_t s;
		const bool shared = r.below(3) == 0;
		if (shared)
			s = bad.create_srq(4);
		qp_t q = bad.create_qp(c, c, o, shared ? &s : nullptr);
		qp_t peer = bad.create_qp(c, c, o);
		bad.up(q, o, 3, peer.qpn);
		bad.up(peer, o, 3, q.qpn);
		for (uint64_t i = 0; i < 8192; i += 8)
			if (r.below(3) == 0)
				store64(m.at(q.buffer + i % (shared ? 4096 : 8192)), r.odd());
		for (int i = 0; i < 12; ++i) {
			const uint8_t codes[] = {WQE_SEND, WQE_SEND_IMM, WQE_SEND_INVAL, WQE_WRITE, WQE_WRITE_IMM, WQE_READ, WQE_CAS,
						 WQE_FAA, WQE_UMR, WQE_NOP, static_cast<uint8_t>(r())};
			wr w(codes[r.below(std::size(codes))], r.below(2), r.below(2) ? key : static_cast<uint32_t>(r.odd()));
			w.remote(r.below(2) ? buf + r.below(65536) : r.odd(), r.below(3) ? key : static_cast<uint32_t>(r.odd()));
			for (uint32_t n = r.below(12); n; --n) {
				if (r.below(3))
					w.sge(r.below(2) ? buf + r.below(65536) : r.odd(), r.below(3) ? key : static_cast<uint32_t>(r.odd()),
					      r.below(2) ? r.below(9000) : static_cast<uint32_t>(r.odd()));
				else
					w.inline_data(std::string(r.below(60), 'i'));
			}
			for (uint32_t n = r.below(4); n; --n)
				w.raw[r.below(w.raw.size())] = static_cast<uint8_t>(r());
			bad.post(q, w, false);
			/* Now and then another size than the one that is there. */
			if (r.below(8) == 0)
				m.at(q.buffer + (shared ? 0 : 4096))[64 * ((q.sq_pi - 1u) & 63) + 7] = static_cast<uint8_t>(r());
			if (r.below(2))
				bad.recv(peer, buf + r.below(65536), r.below(4) ? key : static_cast<uint32_t>(r()), r.below(9000));
		}
		if (r.below(5) == 0)
			q.sq_pi = static_cast<uint16_t>(r());
		if (r.below(5) == 0)
			store32(m.at(peer.dbr), static_cast<uint32_t>(r()));
		bad.ring(q);
		m.run_for(3000000);
		bad.simple(OP_2ERR_QP, q.qpn);
		bad.simple(OP_DESTROY_QP, q.qpn);
		bad.simple(OP_DESTROY_QP, peer.qpn);
		bad.simple(OP_DESTROY_CQ, c.cqn);
	}
	EXPECT_TRUE(m.filled(secret, 4096, 99)) << "memory that no key names";
	check_others();
}

INSTANTIATE_TEST_SUITE_P(seeds, hostile, ::testing::Range(0, 6));

TEST(hostile_guest, doorbells_for_what_does_not_exist_are_ignored)
{
	machine m;
	port p(m, 1);
	const uint64_t page = uint64_t{p.uar} << 12;
	for (uint64_t reg = 0; reg < 0x1000; reg += 8)
		p.mmio(page + reg, ~0ull - reg);
	m.run();
	EXPECT_EQ(p.simple(OP_NOP), 0);
}

/* What comes from another host, which may run anything. */
struct hostile_host : ::testing::TestWithParam<int> {
	machine m, other;
	port a{m, 1}, b{m, 2}, far{other, 17};
	cq_t ca = a.create_cq(8), cf = far.create_cq(8);

	hostile_host() { m.join(other); }
	void check_locals()
	{
		cq_t c1 = a.create_cq(4), c2 = b.create_cq(4);
		qp_t q1 = a.create_qp(c1, c1), q2 = b.create_qp(c2, c2);
		a.up(q1, {}, 2, q2.qpn);
		b.up(q2, {}, 1, q1.qpn);
		const uint64_t buf = m.alloc(8192);
		m.fill(buf, 4096, 1);
		a.post(q1, wr(WQE_WRITE).remote(buf + 4096, b.reg(buf, 8192, acc_all)).sge(buf, a.reg(buf, 8192, acc_all), 4096));
		a.expect(c1, CQE_REQ);
		EXPECT_TRUE(m.filled(buf + 4096, 4096, 1));
	}
};

TEST_P(hostile_host, garbage_is_counted_and_dropped)
{
	random_source r(static_cast<uint64_t>(GetParam()) + 4000);
	for (int i = 0; i < 20000; ++i) {
		std::vector<uint8_t> raw(1 + r.below(r.below(4) ? 100 : 6000));
		for (uint8_t &x : raw)
			x = static_cast<uint8_t>(r());
		if (r.below(2) && raw.size() >= 20) {
			/* As far as a packet as its first check asks for. */
			raw.resize(raw.size() & ~size_t{3});
			raw[0] = 0;
			raw[1] = static_cast<uint8_t>(r.below(8) << 4 | (2 + r.below(2)));
			store16(&raw[2], static_cast<uint16_t>(1 + r.below(3)));
			store16(&raw[4], static_cast<uint16_t>(raw.size() / 4));
			store16(&raw[6], 17);
			raw[8] = static_cast<uint8_t>(r.below(0x80));
			raw[9] &= 0xf0;
			store16(&raw[10], 0xffff);
		}
		m.arriving.push_back(raw);
		if (i % 64 == 0)
			m.run();
	}
	m.run();
	EXPECT_GT(nphca_link_knob_get(m.fabric, NPHCA_LINK_MALFORMED), 5000u);
	EXPECT_GT(nphca_link_knob_get(m.fabric, NPHCA_LINK_RECEIVED), 500u);
	check_locals();
}

/* Real traffic, of which any bytes are changed: no crash, no hang, nothing but what keys allow. */
TEST_P(hostile_host, changed_packets_reach_nothing_that_no_key_names)
{
	random_source r(static_cast<uint64_t>(GetParam()) + 5000);
	const uint64_t buf = m.alloc(65536), secret = m.alloc(65536), mine = other.alloc(65536);
	const uint32_t key = a.reg(buf, 65536, acc_all), far_key = far.reg(mine, 65536, acc_all);
	m.fill(secret, 65536, 99);
	for (int round = 0; round < 60; ++round) {
		qp_options o;
		const uint8_t kinds[] = {ST_RC, ST_RC, ST_UC, ST_UD};
		o.st = kinds[r.below(std::size(kinds))];
		o.timeout = 1;
		qp_t q = a.create_qp(ca, ca, o), p = far.create_qp(cf, cf, o);
		a.up(q, o, 17, p.qpn);
		far.up(p, o, 1, q.qpn);
		for (int i = 0; i < 8; ++i) {
			a.recv(q, buf, key, 4096);
			const uint8_t codes[] = {WQE_SEND, WQE_WRITE, WQE_WRITE_IMM, WQE_READ, WQE_CAS, WQE_FAA};
			const uint8_t code = o.st == ST_UD ? uint8_t{WQE_SEND} : codes[r.below(o.st == ST_UC ? 3 : std::size(codes))];
			wr w(code);
			if (o.st == ST_UD)
				w.datagram(q.qpn, o.qkey, 1);
			if (code != WQE_SEND)
				w.remote(buf + 8 * r.below(4096), key);
			if (code == WQE_CAS || code == WQE_FAA)
				w.atomic(r(), r());
			far.post(p, w.sge(mine, far_key, code == WQE_CAS || code == WQE_FAA ? 8 : r.below(900)));
			/* The same from here, so that answers are changed, too. */
			wr back(o.st == ST_UD ? WQE_SEND : WQE_WRITE);
			if (o.st == ST_UD)
				back.datagram(p.qpn, o.qkey, 17);
			else
				back.remote(mine, far_key);
			a.post(q, back.sge(buf, key, 800));
			for (int k = 0; k < 30; ++k) {
				uint64_t deadline;
				nphca_fabric_poll(other.fabric, &deadline);
				for (auto &raw : m.arriving)
					for (uint32_t n = r.below(4); n; --n) {
						const size_t at = r.below(std::min<size_t>(raw.size(), 64));
						raw[at] = r.below(2) ? static_cast<uint8_t>(r()) : static_cast<uint8_t>(raw[at] + 1);
						if (r.below(3) == 0 && !m.arriving.empty())
							std::swap(raw, m.arriving[r.below(m.arriving.size())]);
					}
				nphca_fabric_poll(m.fabric, &deadline);
			}
			m.run_for(100000);
		}
		m.run_for(3000000);
		while (a.poll(ca)) {
		}
		while (far.poll(cf)) {
		}
		a.simple(OP_2ERR_QP, q.qpn);
		a.simple(OP_DESTROY_QP, q.qpn);
		far.simple(OP_DESTROY_QP, p.qpn);
	}
	EXPECT_TRUE(m.filled(secret, 65536, 99)) << "memory that no key names";
	check_locals();
}

TEST_P(hostile_host, packets_in_the_name_of_a_local_port_are_not_taken)
{
	cq_t cb = b.create_cq(4);
	qp_t q = a.create_qp(ca, ca), p = b.create_qp(cb, cb);
	a.up(q, {}, 2, p.qpn);
	const uint64_t buf = m.alloc(4096);
	const uint32_t key = a.reg(buf, 4096, acc_all);
	/* The far host claims to be port 2, of which a's queue takes requests. */
	packet forged{};
	forged.opcode = BTH_WRITE_ONLY;
	forged.slid = 2;
	forged.dlid = 1;
	forged.pkey = 0xffff;
	forged.dqpn = q.qpn;
	forged.psn = 0xfffff0;
	forged.va = buf;
	forged.rkey = key;
	forged.length = forged.size = 64;
	forged.data.fill(0xee);
	std::array<uint8_t, max_wire> raw;
	for (const uint16_t slid : {uint16_t{2}, uint16_t{1}, uint16_t{17}}) {
		forged.slid = slid;
		const size_t n = encode(forged, raw);
		ASSERT_GT(n, 0u);
		m.arriving.emplace_back(raw.begin(), raw.begin() + static_cast<ptrdiff_t>(n));
		m.run();
	}
	EXPECT_EQ(*m.at(buf), 0);
	EXPECT_EQ(nphca_link_knob_get(m.fabric, NPHCA_LINK_MALFORMED), 2u);
}

INSTANTIATE_TEST_SUITE_P(seeds, hostile_host, ::testing::Range(0, 6));

TEST(hostile_guest, mailboxes_that_form_a_ring_end)
{
	machine m;
	port p(m, 1);
	const uint64_t queue = m.alloc(4096), box = m.alloc(4096);
	store64(m.at(box + 560), box);
	uint8_t *e = m.at(queue);
	store32(e + 4, 32u << 20);
	store64(e + 8, box);
	store32(e + 56, 32u << 20);
	store64(e + 48, box);
	store16(e + 16, OP_NOP);
	e[63] = 1;
	p.mmio(seg_cmdq_low, __builtin_bswap32(static_cast<uint32_t>(queue)), 4);
	p.mmio(seg_doorbell, __builtin_bswap32(1), 4);
	m.run();
	EXPECT_EQ(e[63] & 1, 0);
}

TEST(hostile_guest, device_that_goes_away_under_traffic_leaves_the_rest_alone)
{
	machine m;
	port a(m, 1);
	auto b = std::make_unique<port>(m, 2);
	cq_t ca = a.create_cq(), cb = b->create_cq();
	qp_t qa = a.create_qp(ca, ca), qb = b->create_qp(cb, cb);
	a.up(qa, {}, 2, qb.qpn);
	b->up(qb, {}, 1, qa.qpn);
	const uint64_t buf = m.alloc(1u << 20);
	const uint32_t ka = a.reg(buf, 1u << 20, acc_all), kb = b->reg(buf, 1u << 20, acc_all);
	a.post(qa, wr(WQE_READ).remote(buf, kb).sge(buf, ka, 1u << 20));
	uint64_t deadline;
	for (int i = 0; i < 5; ++i)
		nphca_fabric_poll(m.fabric, &deadline);
	b->ring(qb);
	b.reset();
	m.run_for(100000000);
	a.expect_error(ca, wc_error::retry);
	EXPECT_EQ(a.simple(OP_NOP), 0);
}

} // namespace
