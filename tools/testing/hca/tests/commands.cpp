// SPDX-License-Identifier: GPL-2.0
/*
 * The command queue and the states of a queue pair.
 */
#include "driver.h"

using namespace nphca;
using namespace nphca::test;

namespace {

struct commands : ::testing::Test {
	machine m;
	port p{m, 1};
};

int status(cmd_status s)
{
	return static_cast<int>(s);
}

TEST_F(commands, unknown_command_is_bad_op)
{
	EXPECT_EQ(p.simple(0x999), status(cmd_status::bad_op));
	EXPECT_EQ(p.simple(0), status(cmd_status::bad_op));
}

TEST_F(commands, object_that_does_not_exist_is_bad_resource)
{
	for (const uint16_t op : {OP_DESTROY_QP, OP_2RST_QP, OP_QUERY_QP, OP_DESTROY_CQ, OP_QUERY_CQ, OP_MODIFY_CQ,
				  OP_DESTROY_MKEY, OP_QUERY_MKEY, OP_DESTROY_RMP, OP_DESTROY_SRQ, OP_DEALLOC_PD, OP_DEALLOC_UAR,
				  OP_DEALLOC_XRCD, OP_DESTROY_EQ, OP_ATTACH_TO_MCG}) {
		auto in = p.input(op, 0xabcdef, 64);
		std::vector<uint8_t> out(16);
		EXPECT_EQ(p.command(in, out), status(cmd_status::bad_resource)) << std::hex << op;
	}
}

TEST_F(commands, create_commands_without_context_are_refused)
{
	for (const uint16_t op : {OP_CREATE_EQ, OP_CREATE_CQ, OP_CREATE_QP, OP_CREATE_MKEY, OP_CREATE_RMP, OP_CREATE_SRQ,
				  OP_CREATE_XRC_SRQ})
		EXPECT_NE(p.simple(op), 0) << std::hex << op;
}

TEST_F(commands, page_list_shorter_than_the_queue_is_refused)
{
	auto in = p.input(OP_CREATE_CQ, 0, cmd_in_pas + 8);
	set(part(bytes(in), cmd_in_ctx), cqc_log_cq_size, 7); /* two pages */
	set(part(bytes(in), cmd_in_ctx), cqc_c_eqn_or_apu_element, p.eq.eqn);
	std::vector<uint8_t> out(16);
	EXPECT_EQ(p.command(in, out), status(cmd_status::bad_in_len));
	in.resize(cmd_in_pas + 16);
	EXPECT_EQ(p.command(in, out), 0);
}

TEST_F(commands, destroyed_number_is_not_used_again_at_once)
{
	const uint32_t first = p.alloc_pd();
	EXPECT_EQ(p.simple(OP_DEALLOC_PD, first), 0);
	EXPECT_NE(p.alloc_pd(), first);
}

TEST_F(commands, queue_in_use_is_busy)
{
	cq_t c = p.create_cq();
	srq_t s = p.create_srq();
	qp_t q = p.create_qp(c, c, {}, &s);
	EXPECT_EQ(p.simple(OP_DESTROY_CQ, c.cqn), status(cmd_status::busy));
	EXPECT_EQ(p.simple(OP_DESTROY_RMP, s.srqn), status(cmd_status::busy));
	EXPECT_EQ(p.simple(OP_DESTROY_QP, q.qpn), 0);
	EXPECT_EQ(p.simple(OP_DESTROY_CQ, c.cqn), 0);
	EXPECT_EQ(p.simple(OP_DESTROY_RMP, s.srqn), 0);
}

TEST_F(commands, transition_from_a_wrong_state_is_refused)
{
	cq_t c = p.create_cq();
	qp_t q = p.create_qp(c, c);
	EXPECT_EQ(p.modify(q, OP_INIT2RTR_QP, {}), status(cmd_status::bad_qp_state));
	EXPECT_EQ(p.modify(q, OP_RTR2RTS_QP, {}), status(cmd_status::bad_qp_state));
	EXPECT_EQ(p.modify(q, OP_RST2INIT_QP, {}), 0);
	EXPECT_EQ(p.modify(q, OP_RST2INIT_QP, {}), status(cmd_status::bad_qp_state));
	EXPECT_EQ(p.modify(q, OP_INIT2INIT_QP, {}), 0);
	EXPECT_EQ(p.modify(q, OP_INIT2RTR_QP, {}), 0);
	EXPECT_EQ(p.modify(q, OP_RTR2RTS_QP, {}), 0);
	EXPECT_EQ(p.modify(q, OP_RTS2RTS_QP, {}), 0);
	EXPECT_EQ(p.modify(q, OP_2ERR_QP, {}), 0);
	EXPECT_EQ(p.modify(q, OP_RTS2RTS_QP, {}), status(cmd_status::bad_qp_state));
	EXPECT_EQ(p.modify(q, OP_2RST_QP, {}), 0);
	EXPECT_EQ(p.state(q), 0u);
}

TEST_F(commands, query_returns_what_modify_set)
{
	cq_t c = p.create_cq();
	qp_t q = p.create_qp(c, c);
	qp_options o;
	o.retry = 5;
	o.rnr_retry = 6;
	o.rnr_timer = 13;
	o.mtu = 4;
	o.log_max_rd = 2;
	o.read = false;
	p.up(q, o, 7, 0x1234);
	auto in = p.input(OP_QUERY_QP, q.qpn);
	std::vector<uint8_t> out(cmd_in_pas);
	ASSERT_EQ(p.command(in, out), 0);
	const const_bytes ctx = part(const_bytes(out), cmd_in_qpc, qpc_size);
	const const_bytes path = part(ctx, qpc_primary_address_path.bit / 8);
	EXPECT_EQ(get(ctx, qpc_state), 3u);
	EXPECT_EQ(get(ctx, qpc_remote_qpn), 0x1234u);
	EXPECT_EQ(get(path, ads_rlid), 7u);
	EXPECT_EQ(get(path, ads_ack_timeout), o.timeout);
	EXPECT_EQ(get(path, ads_vhca_port_num), 1u);
	EXPECT_EQ(get(ctx, qpc_retry_count), 5u);
	EXPECT_EQ(get(ctx, qpc_rnr_retry), 6u);
	EXPECT_EQ(get(ctx, qpc_min_rnr_nak), 13u);
	EXPECT_EQ(get(ctx, qpc_mtu), 4u);
	EXPECT_EQ(get(ctx, qpc_log_sra_max), 2u);
	EXPECT_EQ(get(ctx, qpc_rre), 0u);
	EXPECT_EQ(get(ctx, qpc_rwe), 1u);
	EXPECT_EQ(get(ctx, qpc_next_send_psn), o.psn);
}

TEST_F(commands, rights_of_a_live_queue_pair_change_only_if_asked_to)
{
	cq_t c = p.create_cq();
	qp_t q = p.create_qp(c, c);
	p.up(q);
	auto in = p.input(OP_RTS2RTS_QP, q.qpn, cmd_in_pas);
	std::vector<uint8_t> out(16), query(cmd_in_pas);
	ASSERT_EQ(p.command(in, out), 0);
	auto ask = p.input(OP_QUERY_QP, q.qpn);
	ASSERT_EQ(p.command(ask, query), 0);
	EXPECT_EQ(get(part(const_bytes(query), cmd_in_qpc), qpc_rwe), 1u);
	set(in, qp_opt_param_mask, OPT_RWE);
	ASSERT_EQ(p.command(in, out), 0);
	ASSERT_EQ(p.command(ask, query), 0);
	EXPECT_EQ(get(part(const_bytes(query), cmd_in_qpc), qpc_rwe), 0u);
	EXPECT_EQ(get(part(const_bytes(query), cmd_in_qpc), qpc_rre), 1u);
}

TEST_F(commands, port_is_active_and_has_its_lid_gid_and_pkey)
{
	auto in = p.input(OP_QUERY_HCA_VPORT_CONTEXT);
	std::vector<uint8_t> out(16 + 512);
	ASSERT_EQ(p.command(in, out), 0);
	const const_bytes v = part(const_bytes(out), 16);
	EXPECT_EQ(get(v, vport_vport_state), 4u);
	EXPECT_EQ(get(v, vport_lid), 1u);
	const uint64_t guid = get(v, vport_port_guid);
	in = p.input(OP_QUERY_HCA_VPORT_GID);
	ASSERT_EQ(p.command(in, out), 0);
	EXPECT_EQ(load64(&out[16]), 0xfe80000000000000ull);
	EXPECT_EQ(load64(&out[24]), guid);
	in = p.input(OP_QUERY_HCA_VPORT_PKEY);
	ASSERT_EQ(p.command(in, out), 0);
	EXPECT_EQ(load32(&out[16]), 0xffffu);
}

TEST_F(commands, management_datagram_to_the_port_is_answered_as_unsupported)
{
	auto in = p.input(OP_MAD_IFC, 0, 16 + 256);
	in[16 + 3] = 1; /* Get */
	in[16 + 40] = 0x77;
	std::vector<uint8_t> out(16 + 256);
	ASSERT_EQ(p.command(in, out), 0);
	EXPECT_EQ(out[16 + 3], 0x81);
	EXPECT_EQ(load16(&out[16 + 4]), 0x000c);
	EXPECT_EQ(out[16 + 40], 0x77);
}

TEST_F(commands, command_event_comes_only_after_its_queue_exists)
{
	eq_t e = p.create_eq(4, 3, 1ull << EV_COMMAND);
	EXPECT_FALSE(p.poll_event(e)); /* its own creation was polled for */
	p.arm_eq(e);
	EXPECT_EQ(p.simple(OP_NOP), 0);
	const auto event = p.poll_event(e);
	ASSERT_TRUE(event);
	EXPECT_EQ(event->type, EV_COMMAND);
	EXPECT_EQ(p.interrupts, 1u);
	EXPECT_EQ(p.last_vector, 3u);
	EXPECT_EQ(p.simple(OP_NOP), 0);
	EXPECT_EQ(p.interrupts, 1u) << "not armed again";
}

TEST_F(commands, reset_forgets_everything)
{
	cq_t c = p.create_cq();
	p.create_qp(c, c);
	nphca_reset(p.dev);
	m.run();
	EXPECT_EQ(p.simple(OP_NOP), -1) << "the command queue's address is gone, too";
	EXPECT_EQ(p.knob(NPHCA_DMA_REQUEST_SIZE), 512u);
}

TEST_F(commands, lid_is_taken_once)
{
	const nphca_config config = {1, 0, 0, false};
	const nphca_host_ops ops = {};
	EXPECT_EQ(nphca_device_new(m.fabric, &config, &ops, nullptr), nullptr);
	const nphca_config any = {0, 0, 0, false};
	struct nphca_device *other = nphca_device_new(m.fabric, &any, &ops, nullptr);
	ASSERT_NE(other, nullptr);
	nphca_device_free(other);
}

TEST_F(commands, knobs_refuse_values_out_of_range)
{
	EXPECT_FALSE(nphca_knob_set(p.dev, NPHCA_DMA_REQUEST_SIZE, 63));
	EXPECT_FALSE(nphca_knob_set(p.dev, NPHCA_DMA_REQUEST_SIZE, 96));
	EXPECT_FALSE(nphca_knob_set(p.dev, NPHCA_DMA_REQUEST_SIZE, 8192));
	EXPECT_TRUE(nphca_knob_set(p.dev, NPHCA_DMA_REQUEST_SIZE, 64));
	EXPECT_TRUE(nphca_knob_set(p.dev, NPHCA_DMA_REQUEST_SIZE, 4096));
	EXPECT_FALSE(nphca_knob_set(p.dev, NPHCA_READ_OVERLAP, 2));
	EXPECT_FALSE(nphca_knob_set(p.dev, NPHCA_KNOBS, 0));
	EXPECT_FALSE(nphca_knob_set(p.dev, NPHCA_DMA_REQUESTS, 1)) << "counters can only be cleared";
	EXPECT_NE(p.knob(NPHCA_DMA_REQUESTS), 0u);
	EXPECT_TRUE(nphca_knob_set(p.dev, NPHCA_DMA_REQUESTS, 0));
	EXPECT_EQ(p.knob(NPHCA_DMA_REQUESTS), 0u);
	EXPECT_EQ(p.knob(12345), 0u);
}

} // namespace
