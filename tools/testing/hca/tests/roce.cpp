// SPDX-License-Identifier: GPL-2.0
/*
 * RDMA over Ethernet: the address table, who takes which frame, and what a
 * receiver of datagrams finds in front of the payload.
 */
#include "driver.h"
#include "fabric.h"
#include "link.h"

using namespace nphca;
using namespace nphca::test;

namespace {

constexpr uint64_t mac_of(uint16_t lid)
{
	return 0x024e50000000ull | lid;
}

gid_bytes ipv4(uint8_t last)
{
	return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last};
}

gid_bytes ipv6(uint8_t last)
{
	return {0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last};
}

int status(cmd_status s)
{
	return static_cast<int>(s);
}

/* Two ports, each with an address of IPv4, one of IPv6, a GID of version 1, and IPv4 in VLAN 7. */
enum : uint8_t { at_ipv4, at_ipv6, at_v1, at_vlan };

void give_addresses(port &p, uint8_t last)
{
	const uint64_t mac = mac_of(p.lid);
	ASSERT_EQ(p.set_address(at_ipv4, {ipv4(last), mac}), 0);
	ASSERT_EQ(p.set_address(at_ipv6, {ipv6(last), mac, ROCE_V2, 1}), 0);
	ASSERT_EQ(p.set_address(at_v1, {ipv6(last), mac, ROCE_V1, 0}), 0);
	ASSERT_EQ(p.set_address(at_vlan, {ipv4(last), mac, ROCE_V2, ROCE_IPV4, 7}), 0);
}

gid_bytes gid_of(uint8_t index, uint8_t last)
{
	return index == at_ipv6 || index == at_v1 ? ipv6(last) : ipv4(last);
}

struct roce : ::testing::Test {
	roce()
	{
		give_addresses(a, 1);
		give_addresses(b, 2);
		a_cq = a.create_cq();
		b_cq = b.create_cq();
		a_buf = m.alloc(size);
		b_buf = m.alloc(size);
		a_key = a.reg(a_buf, size, acc_all);
		b_key = b.reg(b_buf, size, acc_all);
	}
	static qp_options options(uint8_t index, uint16_t lid, uint8_t last)
	{
		qp_options o;
		o.address = index;
		o.mac = mac_of(lid);
		o.gid = gid_of(index, last);
		return o;
	}
	void connect(uint8_t index)
	{
		aq = a.create_qp(a_cq, a_cq);
		bq = b.create_qp(b_cq, b_cq);
		a.up(aq, options(index, 2, 2), 0, bq.qpn);
		b.up(bq, options(index, 1, 1), 0, aq.qpn);
	}
	void datagrams()
	{
		qp_options o;
		o.st = ST_UD;
		o.mtu = 5;
		aq = a.create_qp(a_cq, a_cq, o);
		bq = b.create_qp(b_cq, b_cq, o);
		a.up(aq, o);
		b.up(bq, o);
	}
	void write(uint32_t len)
	{
		m.fill(a_buf, len, 3);
		m.fill(b_buf, len, 99);
		a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, a_key, len));
	}

	machine m;
	port a{m, 1, 0, true}, b{m, 2, 0, true};
	cq_t a_cq, b_cq;
	qp_t aq, bq;
	static constexpr uint32_t size = 64 * 1024, qkey = qp_options{}.qkey;
	uint64_t a_buf = 0, b_buf = 0;
	uint32_t a_key = 0, b_key = 0;
};

TEST_F(roce, function_says_that_its_port_is_ethernet)
{
	auto in = a.input(OP_QUERY_HCA_CAP);
	std::vector<uint8_t> out(16 + cap_size);
	ASSERT_EQ(a.command(in, out), 0);
	EXPECT_EQ(get(part(const_bytes(out), 16), cap_port_type), 1u);
	EXPECT_EQ(get(part(const_bytes(out), 16), cap_roce), 1u);
	set(in, cmd_op_mod, 4 << 1 | 1);
	ASSERT_EQ(a.command(in, out), 0);
	EXPECT_EQ(get(part(const_bytes(out), 16), roce_address_table_size), roce_addresses);
	in = a.input(OP_QUERY_NIC_VPORT_CONTEXT);
	ASSERT_EQ(a.command(in, out), 0);
	EXPECT_EQ(get(part(const_bytes(out), 16), nic_vport_permanent_address), mac_of(1));
}

TEST(roce_commands, infiniband_knows_nothing_of_addresses)
{
	machine m;
	port p{m, 1};
	for (const uint16_t op : {OP_SET_ROCE_ADDRESS, OP_QUERY_ROCE_ADDRESS, OP_QUERY_NIC_VPORT_CONTEXT,
				  OP_MODIFY_NIC_VPORT_CONTEXT, OP_QUERY_VPORT_STATE})
		EXPECT_EQ(p.simple(op), status(cmd_status::bad_op)) << std::hex << op;
	EXPECT_THROW((port{m, 2, 0, true}), std::runtime_error) << "one fabric, two kinds of ports";
}

TEST_F(roce, address_beyond_the_table_or_of_another_kind_is_refused)
{
	EXPECT_EQ(a.set_address(roce_addresses, {ipv4(9), 2}), status(cmd_status::bad_index));
	EXPECT_EQ(a.set_address(9, {ipv4(9), 2, 1}), status(cmd_status::bad_param));
	EXPECT_EQ(a.set_address(9, {ipv4(9), 2, ROCE_V2, 2}), status(cmd_status::bad_param));
	EXPECT_EQ(a.set_address(9, {ipv4(9), 1ull << 40}), status(cmd_status::bad_param));
	auto in = a.input(OP_SET_ROCE_ADDRESS);
	std::vector<uint8_t> out(16);
	EXPECT_EQ(a.command(in, out), status(cmd_status::bad_in_len));
}

TEST_F(roce, address_is_read_back)
{
	auto in = a.input(OP_QUERY_ROCE_ADDRESS);
	set(in, set_roce_address_in_index, at_vlan);
	std::vector<uint8_t> out(16 + roce_address_size);
	ASSERT_EQ(a.command(in, out), 0);
	const const_bytes c = part(const_bytes(out), 16);
	EXPECT_EQ(get(c, roce_addr_mac), mac_of(1));
	EXPECT_EQ(get(c, roce_addr_vlan_valid), 1u);
	EXPECT_EQ(get(c, roce_addr_vlan_id), 7u);
	EXPECT_EQ(get(c, roce_addr_version), ROCE_V2);
	EXPECT_EQ(c[15], 1);
}

TEST_F(roce, queue_pair_without_an_address_is_not_connected)
{
	qp_t q = a.create_qp(a_cq, a_cq);
	const qp_options o = options(40, 2, 2);
	ASSERT_EQ(a.modify(q, OP_RST2INIT_QP, o, 0, 1), 0);
	EXPECT_EQ(a.modify(q, OP_INIT2RTR_QP, o, 0, 1), status(cmd_status::bad_param));
	EXPECT_EQ(a.modify(q, OP_INIT2RTR_QP, options(at_ipv4, 2, 2), 0, 1), 0);
}

struct roce_kinds : roce, ::testing::WithParamInterface<uint8_t> {};

TEST_P(roce_kinds, reliable_connection_carries_all_that_there_is)
{
	const uint32_t len = 10000;
	connect(GetParam());
	write(len);
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(m.filled(b_buf, len, 3));
	m.fill(b_buf, len, 44);
	a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf, a_key, len));
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(m.filled(a_buf, len, 44));
	store64(m.at(b_buf), 5);
	a.post(aq, wr(WQE_FAA).remote(b_buf, b_key).atomic(2, 0).sge(a_buf, a_key, 8));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(load64(m.at(b_buf)), 5 + (2ull << 56)) << "operands are in host order";
	b.recv(bq, b_buf, b_key, len);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, len));
	EXPECT_EQ(b.expect(b_cq, CQE_RESP_SEND).byte_count, len);
}

TEST_P(roce_kinds, datagram_has_its_network_header_in_front)
{
	const uint8_t index = GetParam();
	datagrams();
	m.fill(a_buf, 100, 8);
	std::memset(m.at(b_buf), 0xee, 200);
	b.recv(bq, b_buf, b_key, 200);
	a.post(aq, wr(WQE_SEND).datagram(bq.qpn, qkey, index, mac_of(2), gid_of(index, 2)).sge(a_buf, a_key, 100));
	const completion c = b.expect(b_cq, CQE_RESP_SEND);
	EXPECT_EQ(c.byte_count, 140u);
	EXPECT_TRUE(c.grh);
	EXPECT_EQ(c.slid, 0);
	EXPECT_EQ(c.remote_qpn, aq.qpn);
	EXPECT_EQ(c.tagged, index == at_vlan);
	EXPECT_EQ(c.tag & 0xfff, index == at_vlan ? 7 : 0);
	EXPECT_TRUE(m.filled(b_buf + 40, 100, 8));

	const uint8_t *h = m.at(b_buf);
	constexpr uint16_t bth_to_icrc = 12 + 8 + 100 + 4;
	if (index == at_ipv4 || index == at_vlan) {
		EXPECT_EQ(c.sl, static_cast<uint8_t>(network::ipv4));
		EXPECT_EQ(h[20], 0x45);
		EXPECT_EQ(h[21], 0x22);
		EXPECT_EQ(load16(h + 22), 20 + 8 + bth_to_icrc);
		EXPECT_EQ(h[28], 7);
		EXPECT_EQ(h[29], 17);
		EXPECT_EQ(load32(h + 32), 0x0a000001u);
		EXPECT_EQ(load32(h + 36), 0x0a000002u);
		uint32_t sum = 0;
		for (size_t i = 20; i < 40; i += 2)
			sum += load16(h + i);
		EXPECT_EQ((sum & 0xffff) + (sum >> 16), 0xffffu) << "checksum";
	} else {
		const bool v1 = index == at_v1;
		EXPECT_EQ(c.sl, static_cast<uint8_t>(v1 ? network::grh : network::ipv6));
		EXPECT_EQ(h[0] >> 4, 6);
		EXPECT_EQ(load16(h + 4), (v1 ? 0 : 8) + bth_to_icrc);
		EXPECT_EQ(h[6], v1 ? 0x1b : 17);
		EXPECT_EQ(h[7], 7);
		EXPECT_EQ(std::memcmp(h + 8, ipv6(1).data(), 16), 0);
		EXPECT_EQ(std::memcmp(h + 24, ipv6(2).data(), 16), 0);
	}
}

/* One frame of each kind comes out of the wire's format as it went in. */
TEST_P(roce_kinds, frame_is_what_it_was_before_the_wire)
{
	const uint8_t index = GetParam();
	roce_address from;
	from.valid = true;
	from.kind = index == at_ipv6 ? network::ipv6 : index == at_v1 ? network::grh : network::ipv4;
	from.tagged = index == at_vlan;
	from.vlan = from.tagged ? 7 : 0;
	from.mac = mac_of(1);
	from.gid = gid_of(index, 1);
	auto p = std::make_unique<packet>(), back = std::make_unique<packet>();
	*p = {};
	p->opcode = BTH_WRITE_ONLY;
	p->pkey = 0xffff;
	p->va = 0x1234;
	p->size = 33;
	p->data[32] = 0x77;
	put_route(*p, from, {mac_of(2), gid_of(index, 2), 0x22, 7, 5, 0x12345, 0xc123});
	std::array<uint8_t, max_wire> raw;
	const size_t n = encode(*p, raw);
	ASSERT_GT(n, 0u);
	ASSERT_TRUE(decode({raw.data(), n}, *back, true));
	EXPECT_EQ(back->smac, mac_of(1));
	EXPECT_EQ(back->dmac, mac_of(2));
	EXPECT_EQ(back->tagged, from.tagged);
	EXPECT_EQ(back->kind, from.kind);
	EXPECT_EQ(source_gid(*back), from.gid);
	EXPECT_EQ(destination_gid(*back), gid_of(index, 2));
	EXPECT_EQ(back->va, 0x1234u);
	EXPECT_EQ(back->size, 33u);
	EXPECT_EQ(back->data[32], 0x77);

	/* Not the lengths, nor the kind, nor one byte too few or too many. */
	for (const size_t cut : {n - 1, n - 4, size_t{40}, size_t{13}, size_t{0}})
		EXPECT_FALSE(decode({raw.data(), cut}, *back, true)) << cut;
	EXPECT_FALSE(decode({raw.data(), n + 1}, *back, true));
	const size_t type = from.tagged ? 16 : 12;
	for (const size_t at : {type, type + 2}) {
		raw[at] ^= 0x11;
		EXPECT_FALSE(decode({raw.data(), n}, *back, true)) << at;
		raw[at] ^= 0x11;
	}
	raw[6] |= 1;
	EXPECT_FALSE(decode({raw.data(), n}, *back, true)) << "comes from a group";
}

INSTANTIATE_TEST_SUITE_P(all, roce_kinds, ::testing::Values(at_ipv4, at_ipv6, at_v1, at_vlan));

TEST_F(roce, completion_of_a_full_packet_with_immediate_data_fits)
{
	datagrams();
	b.recv(bq, b_buf, b_key, 4096 + 40);
	a.post(aq, wr(WQE_SEND_IMM, true, 0x55).datagram(bq.qpn, qkey, at_ipv6, mac_of(2), ipv6(2)).sge(a_buf, a_key, 4096));
	EXPECT_EQ(b.expect(b_cq, CQE_RESP_SEND_IMM).imm, 0x55u);
	EXPECT_EQ(load16(m.at(b_buf + 4)), 8 + 12 + 8 + 4 + 4096 + 4);
}

/* Who has the MAC address, but not the IP address, in that VLAN, takes nothing. */
TEST_F(roce, frame_for_another_address_or_vlan_is_dropped)
{
	datagrams();
	b.recv(bq, b_buf, b_key, 200);
	const auto send = [&](uint8_t index, uint64_t mac, const gid_bytes &gid) {
		a.post(aq, wr(WQE_SEND).datagram(bq.qpn, qkey, index, mac, gid).sge(a_buf, a_key, 10));
		a.expect(a_cq, CQE_REQ);
		return b.poll(b_cq).has_value();
	};
	EXPECT_FALSE(send(at_ipv4, mac_of(2), ipv4(9)));
	EXPECT_FALSE(send(at_ipv4, mac_of(9), ipv4(2)));
	EXPECT_FALSE(send(at_ipv6, mac_of(2), ipv6(9)));
	ASSERT_EQ(a.set_address(5, {ipv4(1), mac_of(1), ROCE_V2, ROCE_IPV4, 8}), 0);
	EXPECT_FALSE(send(5, mac_of(2), ipv4(2))) << "another VLAN";
	EXPECT_TRUE(send(at_ipv4, mac_of(2), ipv4(2)));
}

TEST_F(roce, datagram_from_no_address_fails)
{
	datagrams();
	a.post(aq, wr(WQE_SEND).datagram(bq.qpn, qkey, 40, mac_of(2), ipv4(2)).sge(a_buf, a_key, 10));
	a.expect_error(a_cq, wc_error::local_qp_op);
	EXPECT_EQ(b.poll(b_cq), std::nullopt);
}

TEST_F(roce, packet_that_is_not_from_the_peers_address_is_dropped)
{
	connect(at_ipv4);
	/* The same port, and queue pair, by another of its addresses. */
	ASSERT_EQ(a.set_address(at_ipv4, {ipv4(77), mac_of(1)}), 0);
	write(100);
	m.run_for(1000000000);
	a.expect_error(a_cq, wc_error::retry);
	EXPECT_TRUE(m.filled(b_buf, 100, 99));
}

TEST_F(roce, address_that_goes_takes_its_traffic_along)
{
	connect(at_ipv4);
	write(100);
	a.expect(a_cq, CQE_REQ);
	ASSERT_EQ(b.set_address(at_ipv4, {}), 0);
	write(100);
	m.run_for(1000000000);
	a.expect_error(a_cq, wc_error::retry);
	EXPECT_TRUE(m.filled(b_buf, 100, 99));
}

TEST_F(roce, interface_may_have_another_mac_address)
{
	constexpr uint64_t mac = 0x02aabbccddeeull;
	ASSERT_EQ(b.set_address(at_ipv4, {ipv4(2), mac}), 0);
	aq = a.create_qp(a_cq, a_cq);
	bq = b.create_qp(b_cq, b_cq);
	qp_options o = options(at_ipv4, 2, 2);
	o.mac = mac;
	a.up(aq, o, 0, bq.qpn);
	b.up(bq, options(at_ipv4, 1, 1), 0, aq.qpn);
	write(5000);
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(m.filled(b_buf, 5000, 3));
}

TEST_F(roce, loss_is_made_good)
{
	connect(at_ipv4);
	nphca_knob_set(b.dev, NPHCA_LOSS, 5);
	nphca_knob_set(b.dev, NPHCA_OUT_OF_ORDER, 1000);
	write(size);
	m.run_for(10000000000);
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(m.filled(b_buf, size, 3));
}

TEST_F(roce, multicast_reaches_who_is_attached_in_the_same_vlan)
{
	constexpr uint64_t group_mac = 0x01005e010203ull;
	const gid_bytes group = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 224, 1, 2, 3};
	datagrams();
	auto in = b.input(OP_ATTACH_TO_MCG, bq.qpn, 32);
	std::copy(group.begin(), group.end(), in.begin() + 16);
	std::vector<uint8_t> out(16);
	ASSERT_EQ(b.command(in, out), 0);
	const auto send = [&](uint8_t index) {
		a.post(aq, wr(WQE_SEND).datagram(0xffffff, qkey, index, group_mac, group).sge(a_buf, a_key, 10));
		a.expect(a_cq, CQE_REQ);
		return b.poll(b_cq).has_value();
	};
	b.recv(bq, b_buf, b_key, 200);
	EXPECT_TRUE(send(at_ipv4));
	b.recv(bq, b_buf, b_key, 200);
	ASSERT_EQ(a.set_address(5, {ipv4(1), mac_of(1), ROCE_V2, ROCE_IPV4, 8}), 0);
	EXPECT_FALSE(send(5));
}

TEST_F(roce, reset_empties_the_address_table)
{
	datagrams();
	nphca_reset(b.dev);
	a.post(aq, wr(WQE_SEND).datagram(1, qkey, at_ipv4, mac_of(2), ipv4(2)).sge(a_buf, a_key, 10));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(b.knob(NPHCA_DROPPED), 1u);
}

/* Across a link between two processes. */
struct roce_link : ::testing::Test {
	roce_link()
	{
		here.join(there);
		give_addresses(a, 1);
		give_addresses(b, 17);
	}
	machine here, there;
	port a{here, 1, 0, true}, b{there, 17, 0, true};
};

TEST_F(roce_link, reliable_connection_and_datagrams_cross)
{
	const uint32_t len = 9000;
	cq_t a_cq = a.create_cq(), b_cq = b.create_cq();
	const uint64_t from = here.alloc(len), to = there.alloc(len);
	const uint32_t a_key = a.reg(from, len, acc_all), b_key = b.reg(to, len, acc_all);
	for (const uint8_t index : {at_ipv4, at_ipv6, at_v1, at_vlan}) {
		qp_t aq = a.create_qp(a_cq, a_cq), bq = b.create_qp(b_cq, b_cq);
		a.up(aq, roce::options(index, 17, 17), 0, bq.qpn);
		b.up(bq, roce::options(index, 1, 1), 0, aq.qpn);
		here.fill(from, len, index);
		a.post(aq, wr(WQE_WRITE).remote(to, b_key).sge(from, a_key, len));
		a.expect(a_cq, CQE_REQ);
		EXPECT_TRUE(there.filled(to, len, index));
	}
	qp_options o;
	o.st = ST_UD;
	qp_t aq = a.create_qp(a_cq, a_cq, o), bq = b.create_qp(b_cq, b_cq, o);
	a.up(aq, o);
	b.up(bq, o);
	b.recv(bq, to, b_key, 200);
	a.post(aq, wr(WQE_SEND).datagram(bq.qpn, o.qkey, at_ipv4, mac_of(17), ipv4(17)).sge(from, a_key, 10));
	EXPECT_EQ(b.expect(b_cq, CQE_RESP_SEND).remote_qpn, aq.qpn);
	EXPECT_EQ(nphca_link_knob_get(there.fabric, NPHCA_LINK_MALFORMED), 0u);
}

TEST_F(roce_link, frames_that_are_none_are_counted_and_dropped)
{
	std::vector<uint8_t> raw(60, 0xff);
	raw[0] = 0;
	there.arriving.push_back(raw);
	there.arriving.emplace_back(5000, uint8_t{1});
	there.run();
	EXPECT_EQ(nphca_link_knob_get(there.fabric, NPHCA_LINK_MALFORMED), 2u);
}

} // namespace
