// SPDX-License-Identifier: GPL-2.0
/*
 * The headers of RDMA over Ethernet. The invariant CRC behind the payload has its
 * place in all lengths and on the wire, and is not computed: what carries packets
 * here has no bit errors.
 */
#include "roce.h"

#include <algorithm>

#include "fabric.h"

namespace nphca {

static constexpr uint16_t type_ipv4 = 0x0800, type_ipv6 = 0x86dd, type_grh = 0x8915, type_vlan = 0x8100;
static constexpr uint8_t next_ib = 0x1b, next_udp = 17;
static constexpr size_t ethernet_size = 14, tag_size = 4, mac_size = 6, ipv4_source = 12, ipv4_destination = 16;
static constexpr size_t gid_source = 8, gid_destination = 24;

static uint64_t load_mac(const uint8_t *p) noexcept
{
	return uint64_t{load16(p)} << 32 | load32(p + 2);
}

static void store_mac(uint8_t *p, uint64_t mac) noexcept
{
	store16(p, static_cast<uint16_t>(mac >> 32));
	store32(p + 2, static_cast<uint32_t>(mac));
}

static gid_bytes gid_at(const packet &p, size_t ipv6, size_t ipv4) noexcept
{
	gid_bytes gid{};

	if (p.kind == network::ipv4) {
		gid[10] = gid[11] = 0xff;
		std::copy_n(p.grh.begin() + static_cast<ptrdiff_t>(ipv4_at + ipv4), 4, gid.begin() + 12);
	} else {
		std::copy_n(p.grh.begin() + static_cast<ptrdiff_t>(ipv6), gid.size(), gid.begin());
	}
	return gid;
}

gid_bytes source_gid(const packet &p) noexcept
{
	return gid_at(p, gid_source, ipv4_source);
}

gid_bytes destination_gid(const packet &p) noexcept
{
	return gid_at(p, gid_destination, ipv4_destination);
}

void put_route(packet &p, const roce_address &from, const roce_path &to) noexcept
{
	constexpr uint16_t do_not_fragment = 0x4000;

	p.ethernet = true;
	p.has_grh = true;
	p.kind = from.kind;
	p.smac = from.mac;
	p.dmac = to.mac;
	p.tagged = from.tagged;
	p.tag = static_cast<uint16_t>(to.priority << 13 | from.vlan);
	p.sport = to.sport;
	p.grh.fill(0);
	if (p.kind == network::ipv4) {
		uint8_t *ip = &p.grh[ipv4_at];
		ip[0] = 0x45;
		ip[1] = to.tclass;
		store16(ip + 6, do_not_fragment);
		ip[8] = to.hop_limit;
		ip[9] = next_udp;
		std::copy_n(from.gid.begin() + 12, 4, ip + ipv4_source);
		std::copy_n(to.gid.begin() + 12, 4, ip + ipv4_destination);
		return;
	}
	store32(&p.grh[0], 6u << 28 | uint32_t{to.tclass} << 20 | (to.flow_label & 0xfffff));
	p.grh[6] = p.kind == network::ipv6 ? next_udp : next_ib;
	p.grh[7] = to.hop_limit;
	std::copy(from.gid.begin(), from.gid.end(), p.grh.begin() + gid_source);
	std::copy(to.gid.begin(), to.gid.end(), p.grh.begin() + gid_destination);
}

static uint16_t checksum(const uint8_t *ip) noexcept
{
	uint32_t sum = 0;

	for (size_t i = 0; i < ipv4_size; i += 2)
		sum += load16(ip + i);
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return static_cast<uint16_t>(~sum);
}

void put_length(packet &p, size_t size) noexcept
{
	size += icrc_size + (p.kind == network::grh ? 0 : udp_size);
	if (p.kind != network::ipv4) {
		store16(&p.grh[4], static_cast<uint16_t>(size));
		return;
	}
	uint8_t *ip = &p.grh[ipv4_at];
	store16(ip + 2, static_cast<uint16_t>(size + ipv4_size));
	store16(ip + 10, 0);
	store16(ip + 10, checksum(ip));
}

static size_t network_size(network kind) noexcept
{
	return (kind == network::ipv4 ? ipv4_size : grh_size) + (kind == network::grh ? 0 : udp_size);
}

size_t frame_header_size(const packet &p) noexcept
{
	return ethernet_size + (p.tagged ? tag_size : 0) + network_size(p.kind);
}

void put_frame_header(const packet &p, uint8_t *raw) noexcept
{
	const size_t from = p.kind == network::ipv4 ? ipv4_at : 0;
	const uint16_t type = p.kind == network::ipv4 ? type_ipv4 : p.kind == network::ipv6 ? type_ipv6 : type_grh;

	store_mac(raw, p.dmac);
	store_mac(raw + mac_size, p.smac);
	raw += 2 * mac_size;
	if (p.tagged) {
		store16(raw, type_vlan);
		store16(raw + 2, p.tag);
		raw += tag_size;
	}
	store16(raw, type);
	raw = std::copy(p.grh.begin() + static_cast<ptrdiff_t>(from), p.grh.end(), raw + 2);
	if (p.kind == network::grh)
		return;
	const auto length = static_cast<uint16_t>(p.kind == network::ipv4 ? load16(&p.grh[ipv4_at + 2]) - ipv4_size :
									   load16(&p.grh[4]));
	store16(raw, p.sport);
	store16(raw + 2, roce_udp_port);
	store16(raw + 4, length);
	store16(raw + 6, 0); /* no checksum, as RoCE has it */
}

size_t take_frame_header(const_bytes raw, packet &p) noexcept
{
	size_t at = 2 * mac_size;

	p.ethernet = p.has_grh = true;
	p.tagged = false;
	p.tag = p.slid = p.dlid = 0;
	if (raw.size() < ethernet_size + tag_size)
		return 0;
	p.dmac = load_mac(&raw[0]);
	p.smac = load_mac(&raw[mac_size]);
	if (!p.dmac || !p.smac || is_group_mac(p.smac))
		return 0;
	if (load16(&raw[at]) == type_vlan) {
		p.tagged = true;
		p.tag = load16(&raw[at + 2]);
		at += tag_size;
	}
	switch (load16(&raw[at])) {
	case type_ipv4:
		p.kind = network::ipv4;
		break;
	case type_ipv6:
		p.kind = network::ipv6;
		break;
	case type_grh:
		p.kind = network::grh;
		break;
	default:
		return 0;
	}
	at += 2;
	if (raw.size() < at + network_size(p.kind))
		return 0;
	const uint8_t *header = &raw[at];
	const size_t size = raw.size() - at;
	p.grh.fill(0);
	if (p.kind == network::ipv4) {
		if (header[0] != 0x45 || header[9] != next_udp || load16(header + 2) != size || checksum(header))
			return 0;
		std::copy_n(header, ipv4_size, p.grh.begin() + ipv4_at);
	} else {
		if (header[0] >> 4 != 6 || header[6] != (p.kind == network::grh ? next_ib : next_udp) ||
		    load16(header + 4) != size - grh_size)
			return 0;
		std::copy_n(header, grh_size, p.grh.begin());
	}
	if (p.kind != network::grh) {
		const uint8_t *udp = header + network_size(p.kind) - udp_size;
		p.sport = load16(udp);
		if (load16(udp + 2) != roce_udp_port || load16(udp + 4) != raw.data() + raw.size() - udp)
			return 0;
	}
	return at + network_size(p.kind);
}

} // namespace nphca
