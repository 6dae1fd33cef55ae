/* SPDX-License-Identifier: GPL-2.0 */
/*
 * RDMA over Ethernet: the addresses of a port, and what stands in front of the
 * base transport header. A packet keeps its network header in the 40 bytes that
 * InfiniBand's global route header has: one of IPv4 fills the last 20 of them,
 * as a receiver of datagrams finds it. Versions 1 (a global route header behind
 * an Ethernet header) and 2 (IP and UDP) are told apart by that header's kind.
 */
#ifndef NPHCA_ROCE_H
#define NPHCA_ROCE_H

#include <array>
#include <cstdint>

#include "bits.h"

namespace nphca {

struct packet;

using gid_bytes = std::array<uint8_t, 16>;

/* The kind of the network header, by its number in completions. */
enum class network : uint8_t { grh = 0, ipv6 = 1, ipv4 = 2 };

inline constexpr uint16_t roce_udp_port = 4791;
inline constexpr uint32_t roce_addresses = 64;
inline constexpr size_t ipv4_size = 20, ipv4_at = 20, udp_size = 8;

/* An entry of a port's address table. */
struct roce_address {
	bool valid = false, tagged = false;
	network kind = network::grh;
	uint16_t vlan = 0;
	uint64_t mac = 0;
	gid_bytes gid{};
};

/* Where to, as a queue pair or an address vector says. */
struct roce_path {
	uint64_t mac;
	gid_bytes gid;
	uint8_t tclass, hop_limit, priority;
	uint32_t flow_label;
	uint16_t sport;
};

[[nodiscard]] inline bool is_group_mac(uint64_t mac) noexcept
{
	return mac >> 40 & 1;
}
/* The addresses in the network header, those of IPv4 as IPv6 maps them. */
[[nodiscard]] gid_bytes source_gid(const packet &p) noexcept;
[[nodiscard]] gid_bytes destination_gid(const packet &p) noexcept;
/* All in front of the base transport header but the lengths. */
void put_route(packet &p, const roce_address &from, const roce_path &to) noexcept;
/* ... and those, for so many bytes from the base transport header to the end of the payload. */
void put_length(packet &p, size_t size) noexcept;

/* The same on the wire: returns the size, and where the headers end. */
[[nodiscard]] size_t frame_header_size(const packet &p) noexcept;
void put_frame_header(const packet &p, uint8_t *raw) noexcept;
/* The size of a frame's headers, 0 if it is none of RoCE. */
[[nodiscard]] size_t take_frame_header(const_bytes raw, packet &p) noexcept;

} // namespace nphca

#endif
