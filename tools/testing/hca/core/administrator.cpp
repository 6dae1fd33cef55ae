// SPDX-License-Identifier: GPL-2.0
#include <algorithm>
#include <utility>

#include "administrator.h"

namespace nphca {

namespace {

constexpr size_t mad_size = 256, at_class = 1, at_method = 3, at_status = 4, at_attribute = 16, at_mask = 48,
		 at_record = 56;
constexpr uint8_t subnet_administration = 3;
constexpr uint8_t method_get = 0x01, method_set = 0x02, method_delete = 0x15, is_response = 0x80;
constexpr uint16_t class_port_info = 0x0001, path_record = 0x0035, member_record = 0x0038;
constexpr uint16_t unsupported = 0x000c, invalid = 0x0200, no_records = 0x0300;

/* A multicast group's member, from the beginning of the record */
constexpr size_t member_mgid = 0;
constexpr field member_qkey{0x100, 32}, member_mlid{0x120, 16}, member_mtu_selector{0x130, 2}, member_mtu{0x132, 6},
    member_pkey{0x140, 16}, member_rate_selector{0x150, 2}, member_rate{0x152, 6},
    member_lifetime_selector{0x158, 2}, member_lifetime{0x15a, 6};
constexpr uint64_t member_has_mgid = 1 << 0, member_has_qkey = 1 << 2;

/* A path */
constexpr size_t path_dgid = 8, path_sgid = 24;
constexpr field path_dlid{0x140, 16}, path_slid{0x150, 16}, path_reversible{0x188, 1}, path_count{0x189, 7},
    path_pkey{0x190, 16}, path_sl{0x1ac, 4}, path_mtu_selector{0x1b0, 2}, path_mtu{0x1b2, 6},
    path_rate_selector{0x1b8, 2}, path_rate{0x1ba, 6}, path_lifetime_selector{0x1c0, 2}, path_lifetime{0x1c2, 6};

/* Numbers of the architecture: what is exactly so, 2048 and 4096 bytes, 10 Gb/s, 4.096 us * 2^16. */
constexpr uint64_t exactly = 2, mtu_2048 = 4, mtu_4096 = 5, rate_10 = 3, lifetime = 16;
constexpr uint64_t default_pkey = 0xffff, ipoib_qkey = 0x0b1b;

/* 0: no port has it. */
uint16_t lid_of(const_bytes gid) noexcept
{
	constexpr uint64_t link_local = 0xfe80000000000000;

	if (load64(gid.data()) != link_local)
		return 0;
	return lid_of_guid(load64(gid.data() + 8));
}

/* Groups may share one, because adapters look at the GID. */
uint16_t lid_of_group(const_bytes mgid) noexcept
{
	constexpr uint32_t lids = 0xfff0 - first_multicast_lid;
	uint32_t hash = 0;

	for (const uint8_t byte : mgid)
		hash = hash * 31 + byte;
	return static_cast<uint16_t>(first_multicast_lid + hash % lids);
}

uint16_t join(bytes record, uint64_t mask) noexcept
{
	constexpr uint8_t multicast = 0xff;

	/* A new group's GID would have to be made up. */
	if (!(mask & member_has_mgid) || record[member_mgid] != multicast)
		return invalid;
	set(record, member_mlid, lid_of_group(part(record, member_mgid, 16)));
	if (!(mask & member_has_qkey))
		set(record, member_qkey, ipoib_qkey);
	set(record, member_pkey, default_pkey);
	set(record, member_mtu_selector, exactly);
	set(record, member_mtu, mtu_2048);
	set(record, member_rate_selector, exactly);
	set(record, member_rate, rate_10);
	set(record, member_lifetime_selector, exactly);
	set(record, member_lifetime, lifetime);
	return 0;
}

uint16_t find_path(bytes record) noexcept
{
	const uint16_t to = lid_of(part(record, path_dgid, 16)), from = lid_of(part(record, path_sgid, 16));

	if (!to || !from)
		return no_records;
	set(record, path_dlid, to);
	set(record, path_slid, from);
	set(record, path_reversible, 1);
	set(record, path_count, 1);
	set(record, path_pkey, default_pkey);
	set(record, path_sl, 0);
	set(record, path_mtu_selector, exactly);
	set(record, path_mtu, mtu_4096);
	set(record, path_rate_selector, exactly);
	set(record, path_rate, rate_10);
	set(record, path_lifetime_selector, exactly);
	set(record, path_lifetime, lifetime);
	return 0;
}

/* Of what is optional only this: a port may send to a group of which it is no receiver. */
uint16_t describe(bytes record) noexcept
{
	constexpr uint8_t base_version = 1, class_version = 2;
	constexpr uint32_t sends_only = 1 << 12, below = 5; /* bits of the time to respond */

	std::fill(record.begin(), record.end(), uint8_t{0});
	record[0] = base_version;
	record[1] = class_version;
	store32(&record[4], sends_only << below);
	return 0;
}

} // namespace

bool is_for_administrator(const packet &p) noexcept
{
	return !p.ethernet && p.dlid == administrator_lid && p.dqpn == 1 && p.opcode == (BTH_UD | BTH_SEND_ONLY) &&
	       p.size >= mad_size && p.data[at_class] == subnet_administration && !(p.data[at_method] & is_response);
}

void administer(packet &p) noexcept
{
	const bytes mad(p.data.data(), mad_size), record = mad.subspan(at_record);
	const uint8_t method = mad[at_method];
	const uint16_t attribute = load16(&mad[at_attribute]);
	uint16_t status = unsupported;

	if (attribute == member_record && method == method_set)
		status = join(record, load64(&mad[at_mask]));
	else if (attribute == member_record && method == method_delete)
		status = 0;
	else if (attribute == path_record && method == method_get)
		status = find_path(record);
	else if (attribute == class_port_info && method == method_get)
		status = describe(record);

	mad[at_method] = method == method_set ? is_response | method_get : is_response | method;
	store16(&mad[at_status], status);
	p.size = mad_size;
	std::swap(p.slid, p.dlid);
	std::swap(p.sqpn, p.dqpn);
	p.has_grh = false;
}

} // namespace nphca
