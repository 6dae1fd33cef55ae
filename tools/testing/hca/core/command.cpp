// SPDX-License-Identifier: GPL-2.0
/*
 * The command queue: 32 entries of 64 bytes in guest memory, with chains of
 * mailboxes for what does not fit, and the commands themselves. A command that
 * is unknown, short or senseless gets a status; nothing in it is trusted.
 */
#include <algorithm>

#include "administrator.h"
#include "device.h"

namespace nphca {

static constexpr size_t max_command = 64u << 20, mailbox_data = 512, mailbox_size = 576, inline_data = 16, least = 8;

void device::run_commands(uint32_t doorbell) noexcept
{
	/* The driver polls until it has an event queue for commands, and wants no event for what it polled. */
	const uint8_t had_eq = eq_of_event(EV_COMMAND);

	for (uint32_t slot = 0; slot < 32; ++slot) {
		if (!(doorbell >> slot & 1) || !run_command(slot))
			continue;
		if (had_eq && eqs.find(had_eq)) {
			std::array<uint8_t, 28> data{};
			store32(data.data(), 1u << slot);
			write_eqe(*eqs.find(had_eq), EV_COMMAND, 0, data);
		}
	}
}

uint8_t device::eq_of_event(uint8_t type) noexcept
{
	uint8_t n = 0;
	eqs.each([&](eq &e) {
		if (e.mask[type / 64] >> (type % 64) & 1)
			n = static_cast<uint8_t>(e.eqn);
	});
	return n;
}

bool device::run_command(uint32_t slot) noexcept
{
	std::array<uint8_t, 64> entry;
	const uint64_t base = uint64_t{cmdq_high_.load(std::memory_order_relaxed)} << 32 |
			      (cmdq_low_.load(std::memory_order_relaxed) & ~0xfffu);
	const uint64_t at = base + slot * entry.size();
	constexpr uint64_t at_out = 32, at_own = 63;

	if (!base || !dma_read(at, entry.data(), entry.size()) || !(entry[at_own] & 1))
		return false;
	count(NPHCA_COMMANDS);

	const size_t in_len = load32(&entry[4]), out_len = load32(&entry[56]);
	cmd_status status = cmd_status::ok;
	std::vector<uint8_t> in, out;
	std::vector<uint64_t> out_boxes;

	if (in_len < least || in_len > max_command)
		status = cmd_status::bad_in_len;
	else if (out_len < least || out_len > max_command)
		status = cmd_status::bad_out_len;

	try {
		out.resize(status == cmd_status::ok ? out_len : inline_data);
		if (status == cmd_status::ok) {
			in.reserve(std::min<size_t>(in_len, 1u << 20));
			in.assign(&entry[16], &entry[16] + std::min(in_len, inline_data));
		}
		uint64_t next = load64(&entry[8]);
		while (status == cmd_status::ok && in.size() < in_len) {
			std::array<uint8_t, mailbox_size> box;
			if (!next || !dma_read(next, box.data(), box.size())) {
				status = cmd_status::bad_packet;
				break;
			}
			const size_t n = std::min(in_len - in.size(), mailbox_data);
			in.insert(in.end(), box.begin(), box.begin() + static_cast<ptrdiff_t>(n));
			next = load64(&box[560]);
		}
		if (status == cmd_status::ok)
			status = execute(in, out);
	} catch (const std::bad_alloc &) {
		status = cmd_status::no_resource;
	}
	if (out.size() < least) /* no memory for it */
		return false;
	if (status != cmd_status::ok) {
		count(NPHCA_COMMAND_ERRORS);
		std::fill(out.begin(), out.end(), uint8_t{0});
		log(NPHCA_LOG_DEBUG, "port %u: command 0x%x/0x%x: status 0x%x", lid,
		    in.empty() ? 0 : get32(in, cmd_opcode), in.empty() ? 0 : get32(in, cmd_op_mod),
		    static_cast<unsigned int>(status));
	} else {
		log(NPHCA_LOG_DEBUG, "port %u: command 0x%x/0x%x ok", lid, get32(in, cmd_opcode), get32(in, cmd_op_mod));
	}
	set(out, cmd_out_status, static_cast<uint8_t>(status));
	set(out, cmd_out_syndrome, status == cmd_status::ok ? 0 : 0xe0000u + static_cast<uint32_t>(status));

	uint64_t next = load64(&entry[48]);
	for (size_t done = inline_data; done < out.size() && next;) {
		std::array<uint8_t, 8> link{};
		const size_t n = std::min(out.size() - done, mailbox_data);
		if (!dma_read(next + 560, link.data(), link.size()) || !dma_write(next, out.data() + done, n))
			return false;
		done += n;
		next = load64(link.data());
	}
	if (!dma_write(at + at_out, out.data(), std::min(out.size(), inline_data)))
		return false;
	const uint8_t done = 0;
	return dma_write(at + at_own, &done, 1);
}

void device::caps(uint16_t type, bytes c) noexcept
{
	if (type == 3) { /* atomics */
		set(c, atomic_supported_atomic_req_8B_endianness_mode_1, 1);
		set(c, atomic_atomic_req_8B_endianness_mode, atomic_host_endian_ ? 1 : 0);
		set(c, atomic_atomic_operations, 3); /* compare and swap, fetch and add */
		set(c, atomic_atomic_size_qp, 8);
		return;
	}
	if (type == 4 && ethernet) {
		set(c, roce_sw_udp_sport, 1);
		set(c, roce_l3_type, ROCE_L3_CAPS);
		set(c, roce_version, ROCE_VERSION_CAPS);
		set(c, roce_dest_udp_port, roce_udp_port);
		set(c, roce_max_src_udp_port, 0xffff);
		set(c, roce_min_src_udp_port, 0xc000);
		set(c, roce_address_table_size, addresses.size());
		return;
	}
	if (type != 0)
		return;
	const struct {
		field f;
		uint64_t value;
	} values[] = {
		{cap_vhca_id, lid},
		{cap_log_max_srq_sz, 14}, {cap_log_max_qp_sz, 15}, {cap_log_max_qp, 17}, {cap_log_max_srq, 16},
		{cap_log_max_cq_sz, 20}, {cap_log_max_cq, 16}, {cap_log_max_eq_sz, 20}, {cap_log_max_mkey, 20},
		{cap_log_max_eq, 6}, {cap_max_num_eqs, 32}, {cap_max_indirection, 4}, {cap_log_max_mrw_sz, 40},
		{cap_log_max_klm_list_size, 16}, {cap_log_max_ra_req_qp, 4}, {cap_log_max_ra_res_qp, 4},
		{cap_log_max_msg, 30}, {cap_max_wqe_sz_sq, 1024}, {cap_max_wqe_sz_rq, 512}, {cap_log_max_pd, 16},
		{cap_log_max_mcg, 8}, {cap_max_qp_mcg, 64}, {cap_log_max_rmp, 16}, {cap_log_max_xrcd, 16},
		{cap_gid_table_size, 0}, {cap_pkey_table_size, 0}, {cap_ib_virt, 1}, {cap_num_ports, 1},
		{cap_port_type, ethernet ? 1u : 0u}, {cap_roce, ethernet ? 1u : 0u},
		{cap_rc, 1}, {cap_uc, 1}, {cap_ud, 1}, {cap_xrc, 1}, {cap_local_ca_ack_delay, 16},
		{cap_cqe_version, 1}, {cap_compact_address_vector, 1}, {cap_log_pg_sz, 12},
		{cap_device_frequency_khz, 1000000}, {cap_log_bf_reg_size, 9}, {cap_repeated_block_disabled, 1},
		{cap_umr_modify_entity_size_disabled, 0}, {cap_umr_extended_translation_offset, 1},
		{cap_umr_modify_atomic_disabled, 0}, {cap_umr_indirect_mkey_disabled, 1}, {cap_atomic, 1},
		{cap_cq_oi, 1}, {cap_cq_resize, 1}, {cap_cq_moderation, 1}, {cap_block_lb_mc, 1}, {cap_pkv, 1}, {cap_qkv, 1},
		{cap_imaicl, 1}, {cap_vport_counters, 0},
	};
	for (const auto &v : values)
		set(c, v.f, v.value);
}

cmd_status device::access_register(const_bytes in, bytes out)
{
	const bytes reg = part(out, 16);
	const const_bytes data = part(in, 16);
	const bool write = get32(in, cmd_op_mod) == 0;

	switch (get32(in, access_register_in_register_id)) {
	case REG_PTYS:
		set(reg, ptys_local_port, 1);
		if (ethernet) {
			constexpr uint32_t gbe_100 = 1u << 20; /* on copper, 4x */
			set(reg, ptys_proto_mask, 4);
			for (const field f : {ptys_eth_proto_capability, ptys_eth_proto_admin, ptys_eth_proto_oper})
				set(reg, f, gbe_100);
			break;
		}
		set(reg, ptys_proto_mask, 1);
		set(reg, ptys_ib_link_width_capability, 4);
		set(reg, ptys_ib_proto_capability, 32);
		set(reg, ptys_ib_link_width_oper, 4); /* 4x */
		set(reg, ptys_ib_proto_oper, 32);     /* EDR */
		break;
	case REG_PMTU:
		set(reg, pmtu_local_port, 1);
		set(reg, pmtu_max_mtu, max_mtu);
		set(reg, pmtu_admin_mtu, max_mtu);
		set(reg, pmtu_oper_mtu, max_mtu);
		break;
	case REG_PVLC:
		set(reg, pvlc_local_port, 1);
		set(reg, pvlc_vl_hw_cap, 1);
		set(reg, pvlc_vl_admin, 1);
		set(reg, pvlc_vl_operational, 1);
		break;
	case REG_NODE_DESC:
		if (write)
			std::copy_n(data.begin(), std::min(data.size(), node_desc_.size()), node_desc_.begin());
		std::copy_n(node_desc_.begin(), std::min(reg.size(), node_desc_.size()), reg.begin());
		break;
	case REG_HOST_ENDIAN:
		std::copy_n(data.begin(), std::min(data.size(), reg.size()), reg.begin());
		break;
	case REG_PCAP:
		break;
	default:
		return cmd_status::bad_param;
	}
	return cmd_status::ok;
}

cmd_status device::query_vport(uint16_t op, const_bytes in, bytes out)
{
	if (op == OP_QUERY_HCA_VPORT_CONTEXT) {
		const bytes c = part(out, 16);
		set(c, vport_port_physical_state, 5); /* link up */
		set(c, vport_port_state, 4);	      /* active */
		set(c, vport_vport_state, 4);
		set(c, vport_system_image_guid, guid);
		set(c, vport_port_guid, guid);
		set(c, vport_node_guid, guid);
		set(c, vport_cap_mask1, 0x02010000); /* has CM, client reregistration */
		set(c, vport_lid, lid);
		set(c, vport_sm_lid, administrator_lid);
		set(c, vport_subnet_timeout, 18);
		return cmd_status::ok;
	}
	if (op == OP_QUERY_HCA_VPORT_GID) {
		if (get32(in, query_hca_vport_gid_in_gid_index) == 0) {
			const bytes gid = part(out, 16, 16);
			if (gid.size() < 16)
				return cmd_status::bad_out_len;
			store64(gid.data(), 0xfe80000000000000ull);
			store64(gid.data() + 8, guid);
		}
		set(out, query_hca_vport_gid_out_gids_num, 1);
		return cmd_status::ok;
	}
	/* P_Keys: the default one, and nothing in the rest of the table. */
	if (const bytes pkey = part(out, 16); get32(in, query_hca_vport_gid_in_gid_index) == 0 && pkey.size() >= 4) {
		store32(pkey.data(), 0xffff);
	} else if (get32(in, query_hca_vport_gid_in_gid_index) == 0xffff) {
		for (size_t i = 0; i + 4 <= pkey.size(); i += 4)
			store32(pkey.data() + i, i ? 0 : 0xffff);
	}
	return cmd_status::ok;
}

/* What only an Ethernet port has. */
cmd_status device::cmd_nic(uint16_t op, const_bytes in, bytes out)
{
	constexpr uint16_t frame = 14 + 4 + 4; /* with a tag and the check sequence */

	if (!ethernet)
		return cmd_status::bad_op;
	switch (op) {
	case OP_QUERY_VPORT_STATE:
		set(out, vport_state_admin, 1);
		set(out, vport_state_state, 1);
		return cmd_status::ok;
	case OP_QUERY_NIC_VPORT_CONTEXT: {
		const bytes c = part(out, 16);
		set(c, nic_vport_roce_en, roce_enabled_ ? 1 : 0);
		set(c, nic_vport_mtu, max_mtu + grh_size + frame);
		set(c, nic_vport_system_image_guid, guid);
		set(c, nic_vport_port_guid, guid);
		set(c, nic_vport_node_guid, guid);
		set(c, nic_vport_permanent_address, mac());
		return cmd_status::ok;
	}
	case OP_MODIFY_NIC_VPORT_CONTEXT:
		if (get(in, modify_nic_vport_in_roce))
			roce_enabled_ = get(part(in, modify_nic_vport_in_ctx), nic_vport_roce_en);
		return cmd_status::ok;
	default:
		break;
	}

	/* An address table's entry; nothing but zeroes empties it. */
	const auto index = get32(in, set_roce_address_in_index);
	if (index >= addresses.size())
		return cmd_status::bad_index;
	roce_address &a = addresses[index];
	if (op == OP_QUERY_ROCE_ADDRESS) {
		const bytes c = part(out, 16, roce_address_size);
		if (c.size() != roce_address_size)
			return cmd_status::bad_out_len;
		std::copy(a.gid.begin(), a.gid.end(), c.begin());
		set(c, roce_addr_vlan_valid, a.tagged ? 1 : 0);
		set(c, roce_addr_vlan_id, a.vlan);
		set(c, roce_addr_mac, a.mac);
		set(c, roce_addr_l3_type, a.kind == network::ipv6 ? 1 : 0);
		set(c, roce_addr_version, a.valid && a.kind != network::grh ? ROCE_V2 : ROCE_V1);
		return cmd_status::ok;
	}
	const const_bytes c = part(in, 16, roce_address_size);
	if (c.size() != roce_address_size)
		return cmd_status::bad_in_len;
	const auto version = get(c, roce_addr_version), l3_type = get(c, roce_addr_l3_type);
	if ((version != ROCE_V1 && version != ROCE_V2) || l3_type > 1)
		return cmd_status::bad_param;
	roce_address next;
	std::copy_n(c.begin(), next.gid.size(), next.gid.begin());
	next.mac = get(c, roce_addr_mac);
	next.valid = next.mac && std::any_of(next.gid.begin(), next.gid.end(), [](uint8_t x) { return x; });
	if (next.valid) {
		next.kind = version == ROCE_V1 ? network::grh : l3_type == ROCE_IPV4 ? network::ipv4 : network::ipv6;
		next.tagged = get(c, roce_addr_vlan_valid);
		next.vlan = next.tagged ? static_cast<uint16_t>(get(c, roce_addr_vlan_id)) : uint16_t{0};
		if (is_group_mac(next.mac))
			return cmd_status::bad_param;
	} else {
		next = {};
	}
	a = next;
	fab.learn_macs();
	return cmd_status::ok;
}

cmd_status device::cmd_eq(uint16_t op, const_bytes in, bytes out)
{
	if (op == OP_CREATE_EQ) {
		auto e = std::make_unique<eq>();
		const const_bytes ctx = part(in, cmd_in_ctx, eqc_size);
		const const_bytes mask = part(in, cmd_in_eq_mask, 32);
		if (ctx.size() != eqc_size || mask.size() != 32)
			return cmd_status::bad_in_len;
		std::copy(ctx.begin(), ctx.end(), e->context.begin());
		e->log_size = get32(ctx, eqc_log_eq_size);
		e->vector = get32(ctx, eqc_intr);
		if (e->log_size > 20 || e->vector >= NPHCA_MSIX_VECTORS)
			return cmd_status::bad_param;
		const uint32_t log_page = 12 + get32(ctx, eqc_log_page_size);
		if (!e->buffer.set(part(in, cmd_in_pas), log_page, get32(ctx, eqc_page_offset),
				   64ull << e->log_size))
			return cmd_status::bad_in_len;
		for (size_t i = 0; i < 4; ++i)
			e->mask[i] = load64(mask.data() + 8 * i);
		/* Completion events go where their queue says. */
		e->mask[0] &= ~1ull;
		return enlist(eqs, std::move(e), &eq::eqn, out, cmd_out_eqn);
	}
	const uint32_t n = get32(in, field{0x58, 8});
	eq *e = eqs.find(n);
	if (!e)
		return cmd_status::bad_resource;
	if (op == OP_DESTROY_EQ) {
		eqs.remove(n);
		return cmd_status::ok;
	}
	set(e->context, eqc_producer_counter, e->pi);
	set(e->context, eqc_consumer_counter, e->ci);
	set(e->context, eqc_st, e->armed ? 9 : 10);
	const bytes ctx = part(out, cmd_in_ctx, eqc_size);
	std::copy_n(e->context.begin(), ctx.size(), ctx.begin());
	return cmd_status::ok;
}

static bool cq_buffer(queue_buffer &b, const_bytes ctx, const_bytes pas, uint32_t log_size, uint32_t stride)
{
	const uint32_t log_page = 12 + get32(ctx, cqc_log_page_size);
	return b.set(pas, log_page, get32(ctx, cqc_page_offset), uint64_t{stride} << log_size);
}

cmd_status device::cmd_cq(uint16_t op, const_bytes in, bytes out)
{
	const const_bytes ctx = part(in, cmd_in_ctx, cqc_size);

	if (op == OP_CREATE_CQ) {
		if (ctx.size() != cqc_size)
			return cmd_status::bad_in_len;
		auto c = std::make_unique<cq>();
		std::copy(ctx.begin(), ctx.end(), c->context.begin());
		c->log_size = get32(ctx, cqc_log_cq_size);
		c->stride = get32(ctx, cqc_cqe_sz) ? 128 : 64;
		c->eqn = get32(ctx, cqc_c_eqn_or_apu_element);
		c->dbr = get(ctx, cqc_dbr_addr) & ~7ull;
		c->ignore_overrun = get(ctx, cqc_oi);
		if (c->log_size > 22 || !eqs.find(c->eqn))
			return cmd_status::bad_param;
		if (!cq_buffer(c->buffer, ctx, part(in, cmd_in_pas), c->log_size, c->stride))
			return cmd_status::bad_in_len;
		return enlist(cqs, std::move(c), &cq::cqn, out);
	}

	const uint32_t n = get32(in, cmd_object);
	cq *c = cqs.find(n);
	if (!c)
		return cmd_status::bad_resource;
	switch (op) {
	case OP_DESTROY_CQ:
		if (c->users)
			return cmd_status::busy;
		cqs.remove(n);
		return cmd_status::ok;
	case OP_QUERY_CQ: {
		set(c->context, cqc_producer_counter, c->pi);
		set(c->context, cqc_consumer_counter, c->ci);
		set(c->context, cqc_last_notified_index, c->notified);
		set(c->context, cqc_last_solicit_index, c->solicited);
		set(c->context, cqc_status, c->failed ? 0xa : 0);
		set(c->context, cqc_st, c->armed == cq::next ? 9 : c->armed == cq::next_solicited ? 6 : 0xa);
		const bytes o = part(out, cmd_in_ctx, cqc_size);
		std::copy_n(c->context.begin(), o.size(), o.begin());
		return cmd_status::ok;
	}
	default:
		break;
	}

	/* MODIFY: a new buffer (op_mod 1), or moderation, which changes nothing here. */
	if (get32(in, cmd_op_mod) != 1) {
		set(c->context, cqc_cq_period, get(ctx, cqc_cq_period));
		set(c->context, cqc_cq_max_count, get(ctx, cqc_cq_max_count));
		return cmd_status::ok;
	}
	if (ctx.size() != cqc_size)
		return cmd_status::bad_in_len;
	const uint32_t log_size = get32(ctx, cqc_log_cq_size), stride = get32(ctx, cqc_cqe_sz) ? 128 : 64;
	queue_buffer buffer;
	if (log_size > 22 || stride != c->stride)
		return cmd_status::bad_param;
	if (!cq_buffer(buffer, ctx, part(in, cmd_in_pas), log_size, stride))
		return cmd_status::bad_in_len;
	std::array<uint8_t, 4> record{};
	if (dma_read(c->dbr, record.data(), record.size()))
		c->ci = load32(record.data()) & 0xffffff;
	/* The old buffer must take the marker, the new one what is not polled yet. */
	if (((c->pi - c->ci) & 0xffffff) >= (1u << log_size) || ((c->pi - c->ci) & 0xffffff) >= (1u << c->log_size))
		return cmd_status{0x40};
	cqe marker;
	marker.opcode = CQE_RESIZE;
	write_cqe(*c, marker);
	c->buffer = std::move(buffer);
	c->log_size = log_size;
	for (const field f : {cqc_log_cq_size, cqc_log_page_size, cqc_page_offset})
		set(c->context, f, get(ctx, f));
	return cmd_status::ok;
}

cmd_status device::cmd_srq(uint16_t op, const_bytes in, bytes out)
{
	if (op == OP_CREATE_SRQ || op == OP_CREATE_XRC_SRQ) {
		const const_bytes ctx = part(in, cmd_in_ctx, srqc_size);
		if (ctx.size() != srqc_size)
			return cmd_status::bad_in_len;
		auto s = std::make_unique<srq>();
		std::copy(ctx.begin(), ctx.end(), s->context.begin());
		s->log_size = get32(ctx, srqc_log_srq_size);
		s->log_stride = get32(ctx, srqc_log_rq_stride) + 4;
		s->dbr = get(ctx, srqc_dbr_addr) & ~3ull;
		s->pd = get32(ctx, srqc_pd);
		s->limit = static_cast<uint16_t>(get(ctx, srqc_lwm));
		if (op == OP_CREATE_XRC_SRQ) {
			s->uidx = get32(ctx, xrc_srqc_user_index);
			s->xrcd = get32(ctx, srqc_xrcd);
			s->cqn = get32(ctx, srqc_cqn);
		}
		const uint32_t log_page = 12 + get32(ctx, srqc_log_page_size);
		if (!s->buffer.set(part(in, cmd_in_pas), log_page, get32(ctx, srqc_page_offset),
				   1ull << (s->log_size + s->log_stride)))
			return cmd_status::bad_in_len;
		return enlist(srqs, std::move(s), &srq::srqn, out);
	}
	const uint32_t n = get32(in, cmd_object);
	srq *s = srqs.find(n);
	if (!s)
		return cmd_status::bad_resource;
	switch (op) {
	case OP_DESTROY_SRQ:
	case OP_DESTROY_XRC_SRQ:
		if (s->users)
			return cmd_status::busy;
		srqs.remove(n);
		return cmd_status::ok;
	case OP_ARM_RQ:
	case OP_ARM_XRC_SRQ:
		s->limit = static_cast<uint16_t>(get(in, arm_rq_in_lwm));
		return cmd_status::ok;
	default: {
		set(s->context, srqc_lwm, s->limit);
		set(s->context, srqc_state, s->failed ? 1 : 0);
		set(s->context, srqc_wqe_cnt, static_cast<uint16_t>(s->posted - s->taken));
		const bytes o = part(out, cmd_in_ctx, srqc_size);
		std::copy_n(s->context.begin(), o.size(), o.begin());
		return cmd_status::ok;
	}
	}
}

/* A receive memory pool is what newer drivers make of an SRQ. */
cmd_status device::cmd_rmp(uint16_t op, const_bytes in, bytes out)
{
	constexpr size_t wq_at = 48;

	if (op == OP_CREATE_RMP) {
		const const_bytes ctx = part(in, cmd_in_rmpc, rmpc_size), wq = part(ctx, wq_at);
		if (ctx.size() != rmpc_size)
			return cmd_status::bad_in_len;
		auto s = std::make_unique<srq>();
		s->is_rmp = true;
		std::copy(ctx.begin(), ctx.end(), s->rmp_context.begin());
		s->log_size = get32(wq, wq_log_wq_sz);
		s->log_stride = get32(wq, wq_log_wq_stride);
		s->dbr = get(wq, wq_dbr_addr) & ~3ull;
		s->pd = get32(wq, wq_pd);
		s->limit = static_cast<uint16_t>(get(wq, wq_lwm));
		const uint32_t log_page = 12 + get32(wq, wq_log_wq_pg_sz);
		if (s->log_size > 15 || s->log_stride < 5 || s->log_stride > 11)
			return cmd_status::bad_param;
		if (!s->buffer.set(part(in, cmd_in_pas), log_page, get32(wq, wq_page_offset),
				   1ull << (s->log_size + s->log_stride)))
			return cmd_status::bad_in_len;
		return enlist(srqs, std::move(s), &srq::srqn, out);
	}
	const uint32_t n = get32(in, cmd_object);
	srq *s = srqs.find(n);
	if (!s || !s->is_rmp)
		return cmd_status::bad_resource;
	switch (op) {
	case OP_DESTROY_RMP:
		if (s->users)
			return cmd_status::busy;
		srqs.remove(n);
		return cmd_status::ok;
	case OP_MODIFY_RMP:
		if (get(in, modify_rmp_in_bitmask) & 1)
			s->limit = static_cast<uint16_t>(get(part(in, cmd_in_rmpc + wq_at), wq_lwm));
		return cmd_status::ok;
	default: {
		const bytes wq = part(bytes(s->rmp_context), wq_at);
		set(wq, wq_lwm, s->limit);
		set(wq, wq_hw_counter, s->taken);
		set(wq, wq_sw_counter, s->posted);
		set(s->rmp_context, rmpc_state, s->failed ? 3 : 1);
		const bytes o = part(out, cmd_in_rmpc, rmpc_size);
		std::copy_n(s->rmp_context.begin(), o.size(), o.begin());
		return cmd_status::ok;
	}
	}
}

/* Management datagrams to the port itself: there is no agent, so each attribute is unsupported. */
cmd_status device::mad_ifc(const_bytes in, bytes out)
{
	constexpr size_t at_mad = 16, mad_size = 256, at_method = 3, at_status = 4;
	constexpr uint8_t response = 0x80;
	constexpr uint16_t unsupported = 0x000c;
	const const_bytes request = part(in, at_mad, mad_size);
	const bytes answer = part(out, at_mad, mad_size);

	if (request.size() != mad_size)
		return cmd_status::bad_in_len;
	if (answer.size() != mad_size)
		return cmd_status::bad_out_len;
	std::copy(request.begin(), request.end(), answer.begin());
	answer[at_method] |= response;
	store16(&answer[at_status], unsupported);
	return cmd_status::ok;
}

cmd_status device::execute(const_bytes in, bytes out)
{
	const auto op = static_cast<uint16_t>(get(in, cmd_opcode));
	const uint32_t number = get32(in, cmd_object);
	const auto add = [&](table<plain_object> &t) {
		const uint32_t n = t.add(std::make_unique<plain_object>());
		set(out, cmd_object, n);
		return n ? cmd_status::ok : cmd_status::no_resource;
	};
	const auto drop = [&](table<plain_object> &t, uint32_t n) {
		return t.remove(n) ? cmd_status::ok : cmd_status::bad_resource;
	};

	switch (op) {
	case OP_ENABLE_HCA:
	case OP_DISABLE_HCA:
	case OP_INIT_HCA:
	case OP_SET_DRIVER_VERSION:
	case OP_NOP:
	case OP_SET_MAD_DEMUX:
	case OP_CONFIG_INT_MODERATION:
	case OP_MODIFY_HCA_VPORT_CONTEXT:
		return cmd_status::ok;
	case OP_TEARDOWN_HCA:
		set(out, field{0x58, 8}, 0);
		return cmd_status::ok;
	case OP_QUERY_PAGES: /* this HCA has memory of its own */
		set(out, field{0x60, 32}, 0);
		return cmd_status::ok;
	case OP_MANAGE_PAGES:
		set(out, field{0x40, 32}, 0);
		return cmd_status::ok;
	case OP_QUERY_HCA_CAP: {
		const auto mod = static_cast<uint16_t>(get(in, cmd_op_mod));
		caps(static_cast<uint16_t>(mod >> 1), part(out, 16));
		return cmd_status::ok;
	}
	case OP_SET_HCA_CAP:
		/* Software may choose how atomics answer; the rest is what it read. */
		if (get32(in, cmd_op_mod) >> 1 == 3)
			atomic_host_endian_ = get(part(in, 16), atomic_atomic_req_8B_endianness_mode) != 0;
		return cmd_status::ok;
	case OP_QUERY_ADAPTER: {
		const bytes a = part(out, 16);
		set(a, adapter_ieee_vendor_id, 0x0002c9);
		constexpr char psid[] = "NPR0000000001";
		if (const bytes p = part(a, adapter_vsd_contd_psid.bit / 8, sizeof(psid) - 1); p.size() == sizeof(psid) - 1)
			std::copy_n(psid, sizeof(psid) - 1, p.begin());
		return cmd_status::ok;
	}
	case OP_QUERY_ISSI:
		set(out, query_issi_out_current_issi, issi_);
		set(out, query_issi_out_supported_issi_dw0, 3);
		return cmd_status::ok;
	case OP_SET_ISSI:
		if (get32(in, set_issi_in_current_issi) > 1)
			return cmd_status::bad_param;
		issi_ = get32(in, set_issi_in_current_issi);
		return cmd_status::ok;
	case OP_QUERY_SPECIAL_CONTEXTS:
		set(out, query_special_contexts_out_terminate_scatter_list_mkey, key_terminate);
		return cmd_status::ok;
	case OP_CREATE_MKEY:
	case OP_QUERY_MKEY:
	case OP_DESTROY_MKEY:
		return cmd_mkey(op, in, out);
	case OP_CREATE_EQ:
	case OP_DESTROY_EQ:
	case OP_QUERY_EQ:
		return cmd_eq(op, in, out);
	case OP_CREATE_CQ:
	case OP_DESTROY_CQ:
	case OP_QUERY_CQ:
	case OP_MODIFY_CQ:
		return cmd_cq(op, in, out);
	case OP_CREATE_QP:
	case OP_DESTROY_QP:
	case OP_RST2INIT_QP:
	case OP_INIT2RTR_QP:
	case OP_RTR2RTS_QP:
	case OP_RTS2RTS_QP:
	case OP_SQERR2RTS_QP:
	case OP_2ERR_QP:
	case OP_2RST_QP:
	case OP_QUERY_QP:
	case OP_SQD2RTS_QP:
	case OP_INIT2INIT_QP:
		return cmd_qp(op, in, out);
	case OP_MAD_IFC:
		return mad_ifc(in, out);
	case OP_CREATE_SRQ:
	case OP_DESTROY_SRQ:
	case OP_QUERY_SRQ:
	case OP_ARM_RQ:
	case OP_CREATE_XRC_SRQ:
	case OP_DESTROY_XRC_SRQ:
	case OP_QUERY_XRC_SRQ:
	case OP_ARM_XRC_SRQ:
		return cmd_srq(op, in, out);
	case OP_CREATE_RMP:
	case OP_MODIFY_RMP:
	case OP_DESTROY_RMP:
	case OP_QUERY_RMP:
		return cmd_rmp(op, in, out);
	case OP_QUERY_VPORT_STATE:
	case OP_QUERY_NIC_VPORT_CONTEXT:
	case OP_MODIFY_NIC_VPORT_CONTEXT:
	case OP_QUERY_ROCE_ADDRESS:
	case OP_SET_ROCE_ADDRESS:
		return cmd_nic(op, in, out);
	case OP_QUERY_HCA_VPORT_CONTEXT:
	case OP_QUERY_HCA_VPORT_GID:
	case OP_QUERY_HCA_VPORT_PKEY:
		return query_vport(op, in, out);
	case OP_ACCESS_REG:
		return access_register(in, out);
	case OP_ALLOC_PD:
		return add(pds);
	case OP_DEALLOC_PD:
		return drop(pds, number);
	case OP_ALLOC_UAR:
		return add(uars);
	case OP_DEALLOC_UAR:
		return drop(uars, number);
	case OP_ALLOC_XRCD:
		return add(xrcds);
	case OP_DEALLOC_XRCD:
		return drop(xrcds, number);
	case OP_ALLOC_TRANSPORT_DOMAIN:
		return add(domains);
	case OP_DEALLOC_TRANSPORT_DOMAIN:
		return drop(domains, number);
	case OP_ALLOC_Q_COUNTER: {
		const uint32_t n = counters.add(std::make_unique<plain_object>());
		set(out, field{0x58, 8}, n);
		return n ? cmd_status::ok : cmd_status::no_resource;
	}
	case OP_DEALLOC_Q_COUNTER:
		return drop(counters, get32(in, field{0x58, 8}));
	case OP_QUERY_Q_COUNTER:
	case OP_QUERY_VPORT_COUNTER:
		return cmd_status::ok;
	case OP_ATTACH_TO_MCG:
	case OP_DETACH_FROM_MCG: {
		std::array<uint8_t, 16> gid;
		const const_bytes g = part(in, attach_to_mcg_in_multicast_gid.bit / 8, gid.size());
		if (g.size() != gid.size())
			return cmd_status::bad_in_len;
		std::copy(g.begin(), g.end(), gid.begin());
		const auto [from, to] = multicast.equal_range(gid);
		const auto it = std::find_if(from, to, [&](const auto &m) { return m.second == number; });
		if (op == OP_DETACH_FROM_MCG) {
			if (it == to)
				return cmd_status::bad_resource;
			multicast.erase(it);
		} else if (!qps.find(number)) {
			return cmd_status::bad_resource;
		} else if (multicast.size() >= (1u << 14)) {
			return cmd_status::no_resource;
		} else if (it == to) {
			multicast.emplace(gid, number);
		}
		return cmd_status::ok;
	}
	default:
		return cmd_status::bad_op;
	}
}

} // namespace nphca
