// SPDX-License-Identifier: GPL-2.0
/*
 * What IPoIB and rdma_cm ask the subnet administrator, as their kernels do: by datagrams of QP1.
 */
#include "administrator.h"
#include "driver.h"

using namespace nphca;
using namespace nphca::test;

namespace {

constexpr uint8_t get_it = 0x01, set_it = 0x02, trap = 0x05, delete_it = 0x15, response = 0x80;
constexpr uint16_t port_info = 0x0001, service = 0x0031, path = 0x0035, member = 0x0038;
using record_t = std::array<uint8_t, 200>;
using gid_t = std::array<uint8_t, 16>;

gid_t gid_of(uint16_t lid)
{
	gid_t gid{0xfe, 0x80};

	store64(&gid[8], guid_of_lid(lid));
	return gid;
}

/* As IPoIB's of IPv4: the broadcast group, or that of an address. */
gid_t group(uint8_t last)
{
	return {0xff, 0x12, 0x40, 0x1b, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, last};
}

struct answer {
	uint8_t method;
	uint16_t status;
	uint64_t transaction;
	record_t record;
	completion c;

	[[nodiscard]] uint64_t at(size_t bit, uint32_t width) const
	{
		return nphca::get(record, field{static_cast<uint32_t>(bit), width});
	}
};

/* A port with a QP1, or another QP that has its Q_Key. */
struct asker {
	asker(machine &m, uint16_t lid, uint8_t st = ST_QP1) : mem(m), p(m, lid)
	{
		o.st = st;
		o.qkey = 0x80010000;
		cq = p.create_cq();
		one = p.create_qp(cq, cq, o);
		p.up(one, o);
		out = m.alloc(4096);
		in = m.alloc(4096);
		key = p.reg(out, 4096, acc_all);
		in_key = p.reg(in, 4096, acc_all);
	}
	void send(uint8_t method, uint16_t attribute, uint64_t mask, const record_t &record, uint32_t size = 256,
		  uint16_t to = administrator_lid)
	{
		uint8_t *mad = mem.at(out);

		std::memset(mad, 0, 4096);
		mad[0] = 1;
		mad[1] = 3;
		mad[2] = 2;
		mad[3] = method;
		store64(mad + 8, ++transaction);
		store16(mad + 16, attribute);
		store64(mad + 48, mask);
		std::copy(record.begin(), record.end(), mad + 56);
		p.recv(one, in, in_key, 4096);
		p.post(one, wr(WQE_SEND).datagram(1, o.qkey, to).sge(out, key, size));
		p.expect(cq, CQE_REQ);
	}
	answer ask(uint8_t method, uint16_t attribute, uint64_t mask, const record_t &record)
	{
		answer a{};

		send(method, attribute, mask, record);
		a.c = p.expect(cq, CQE_RESP_SEND);
		const uint8_t *mad = mem.at(in) + 40;
		a.method = mad[3];
		a.status = load16(mad + 4);
		a.transaction = load64(mad + 8);
		std::copy_n(mad + 56, a.record.size(), a.record.begin());
		return a;
	}
	answer join(const gid_t &mgid, uint64_t mask = 1, uint32_t qkey = 0)
	{
		record_t r{};

		std::copy(mgid.begin(), mgid.end(), r.begin());
		store32(&r[32], qkey);
		r[48] = 0x01; /* a full member; scope is the upper half */
		return ask(set_it, member, mask, r);
	}
	answer way(const gid_t &to, const gid_t &from)
	{
		record_t r{};

		std::copy(to.begin(), to.end(), r.begin() + 8);
		std::copy(from.begin(), from.end(), r.begin() + 24);
		return ask(get_it, path, 0, r);
	}

	machine &mem;
	port p;
	qp_options o;
	cq_t cq;
	qp_t one;
	uint64_t out, in, transaction = 0;
	uint32_t key, in_key;
};

struct administration : ::testing::Test {
	machine m;
	asker a{m, 1}, b{m, 2};
};

TEST_F(administration, who_joins_a_group_learns_its_lid_and_what_it_is_like)
{
	const answer first = a.join(group(0xff));

	EXPECT_EQ(first.method, get_it | response);
	EXPECT_EQ(first.status, 0);
	EXPECT_EQ(first.transaction, a.transaction);
	EXPECT_EQ(first.c.byte_count, 40u + 256);
	EXPECT_EQ(first.c.slid, administrator_lid);
	EXPECT_EQ(first.c.remote_qpn, 1u);
	EXPECT_FALSE(first.c.grh);
	EXPECT_EQ(first.at(0x100, 32), 0x0b1bu) << "Q_Key";
	EXPECT_GE(first.at(0x120, 16), first_multicast_lid);
	EXPECT_LT(first.at(0x120, 16), 0xffffu);
	EXPECT_EQ(first.at(0x130, 8), 0x84u) << "exactly 2048 bytes";
	EXPECT_EQ(first.at(0x140, 16), 0xffffu) << "P_Key";
	EXPECT_EQ(first.at(0x150, 8), 0x83u) << "exactly 10 Gb/s";
	EXPECT_EQ(first.record[48], 0x01) << "what it joined as";
	const answer second = b.join(group(0xff)), other = b.join(group(0xfe));
	EXPECT_EQ(second.record, first.record);
	EXPECT_EQ(second.c.slid, administrator_lid);
	EXPECT_NE(other.at(0x120, 16), first.at(0x120, 16));
}

TEST_F(administration, qkey_of_a_group_is_what_was_asked_for)
{
	EXPECT_EQ(a.join(group(1), 1 | 1 << 2, 0x01234567).at(0x100, 32), 0x01234567u);
	EXPECT_EQ(a.join(group(1), 1, 0x01234567).at(0x100, 32), 0x0b1bu);
}

TEST_F(administration, group_without_a_gid_of_groups_is_refused)
{
	EXPECT_EQ(a.join(group(1), 0).status, 0x0200);
	EXPECT_EQ(a.join(gid_of(2)).status, 0x0200);
}

TEST_F(administration, way_to_a_port_is_its_lid)
{
	const answer r = b.way(gid_of(1), gid_of(2));

	EXPECT_EQ(r.method, get_it | response);
	EXPECT_EQ(r.status, 0);
	EXPECT_EQ(r.at(0x140, 16), 1u) << "destination";
	EXPECT_EQ(r.at(0x150, 16), 2u) << "source";
	EXPECT_EQ(r.at(0x188, 8), 0x81u) << "reversible, one path";
	EXPECT_EQ(r.at(0x190, 16), 0xffffu) << "P_Key";
	EXPECT_EQ(r.at(0x1b0, 8), 0x85u) << "exactly 4096 bytes";
	EXPECT_EQ(r.at(0x1b8, 8), 0x83u) << "exactly 10 Gb/s";
	EXPECT_EQ(r.at(0x1c0, 8), 0x90u) << "exactly 268 ms";
}

TEST_F(administration, there_is_no_way_to_who_is_no_port)
{
	gid_t stranger = gid_of(2), elsewhere = gid_of(2), odd = gid_of(2);

	stranger[9] = 0x55;
	elsewhere[1] = 0xc0; /* another subnet */
	odd[15] = 1;
	for (const gid_t &gid : {stranger, elsewhere, odd, gid_of(0), gid_of(first_multicast_lid), gid_t{}}) {
		EXPECT_EQ(a.way(gid, gid_of(1)).status, 0x0300);
		EXPECT_EQ(a.way(gid_of(1), gid).status, 0x0300);
	}
}

TEST_F(administration, who_leaves_is_let_go)
{
	record_t r{};

	const answer left = a.ask(delete_it, member, 0, r);
	EXPECT_EQ(left.method, delete_it | response);
	EXPECT_EQ(left.status, 0);
}

TEST_F(administration, lets_ports_send_only_and_refuses_what_it_does_not_know)
{
	record_t r{};

	r.fill(0xff);
	const answer info = a.ask(get_it, port_info, 0, r);
	EXPECT_EQ(info.status, 0);
	EXPECT_EQ(info.record[0], 1);
	EXPECT_EQ(info.record[1], 2);
	EXPECT_EQ(info.at(0x20, 32), 1u << 12 << 5);
	EXPECT_EQ(std::count(info.record.begin() + 2, info.record.end(), 0), 197);
	for (const auto &[method, attribute] :
	     {std::pair{get_it, service}, {set_it, path}, {get_it, member}, {delete_it, path}, {trap, port_info},
	      {set_it, port_info}}) {
		const answer refused = a.ask(method, attribute, ~0ull, r);
		EXPECT_EQ(refused.status, 0x000c);
		EXPECT_TRUE(refused.method & response);
		EXPECT_EQ(refused.record, r) << "and says nothing else";
	}
}

TEST_F(administration, port_of_its_lid_gets_what_is_not_for_it)
{
	record_t r{};

	a.p.recv(a.one, a.in, a.in_key, 4096);
	/* An answer; less than a datagram of management; to another LID. */
	b.send(get_it | response, path, 0, r);
	EXPECT_EQ(a.p.expect(a.cq, CQE_RESP_SEND).slid, 2u);
	a.p.recv(a.one, a.in, a.in_key, 4096);
	b.send(get_it, path, 0, r, 255);
	EXPECT_EQ(a.p.expect(a.cq, CQE_RESP_SEND).byte_count, 40u + 255);
	asker c(m, 3);
	b.p.recv(b.one, b.in, b.in_key, 4096);
	c.send(get_it, path, 0, r, 256, 2);
	EXPECT_EQ(b.p.expect(b.cq, CQE_RESP_SEND).slid, 3u);
	EXPECT_FALSE(b.p.poll(b.cq));
	EXPECT_FALSE(c.p.poll(c.cq));
}

TEST_F(administration, answer_is_for_the_queue_pair_that_asked)
{
	asker c(m, 3, ST_UD);
	const answer r = c.way(gid_of(2), gid_of(3));

	EXPECT_EQ(r.status, 0);
	EXPECT_EQ(r.c.qpn, c.one.qpn);
	EXPECT_EQ(r.c.remote_qpn, 1u);
}

TEST(administration_of_two_hosts, each_answers_its_own_ports_and_both_the_same)
{
	machine ma, mb;
	ma.join(mb);
	asker a(ma, 1), b(mb, 17);
	const answer here = a.join(group(0xff)), there = b.join(group(0xff));

	EXPECT_EQ(here.record, there.record);
	EXPECT_EQ(there.c.slid, administrator_lid);
	EXPECT_EQ(b.way(gid_of(1), gid_of(17)).at(0x140, 16), 1u);
	EXPECT_EQ(a.way(gid_of(17), gid_of(1)).at(0x140, 16), 17u);
	EXPECT_EQ(nphca_link_knob_get(ma.fabric, NPHCA_LINK_SENT) + nphca_link_knob_get(mb.fabric, NPHCA_LINK_SENT), 0u);
	EXPECT_FALSE(a.p.poll(a.cq)) << "the port of that LID was asked";
}

} // namespace
