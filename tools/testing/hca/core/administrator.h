/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The subnet administrator: what IPoIB and rdma_cm ask one for, and no more. Ports join and leave
 * multicast groups, and learn the way to other ports.
 *
 * It keeps nothing. The LID of a port follows from its GUID, and that of a group from its GID, so
 * the fabric of each host answers its own ports, and all answers agree. Whoever asks for a group
 * finds it; who is in it is known to the adapters, at which queue pairs attach.
 *
 * Records and their numbers are those of the InfiniBand architecture, volume 1, chapter 15.
 */
#ifndef NPHCA_ADMINISTRATOR_H
#define NPHCA_ADMINISTRATOR_H

#include "fabric.h"

namespace nphca {

/* Where ports send to, by what they are told of themselves. */
inline constexpr uint16_t administrator_lid = 1;

/* Of a port that was given no other one. */
[[nodiscard]] constexpr uint64_t guid_of_lid(uint16_t lid) noexcept
{
	return 0x0002c90300000000 + (uint64_t{lid} << 8);
}
/* 0: it is the GUID of no such port. */
[[nodiscard]] constexpr uint16_t lid_of_guid(uint64_t guid) noexcept
{
	const auto lid = static_cast<uint16_t>(guid >> 8);

	return guid == guid_of_lid(lid) && lid < first_multicast_lid ? lid : uint16_t{0};
}

/* Is it a request to the administrator? */
[[nodiscard]] bool is_for_administrator(const packet &p) noexcept;
/* Such a packet becomes its answer, on the way back. */
void administer(packet &p) noexcept;

} // namespace nphca

#endif
