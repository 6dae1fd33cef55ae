/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The search for the signature in what a READ brought. A unit of 64 bytes, aligned in
 * remote address, that was fetched by one request is all page or all signature,
 * so its first word decides. Units that the READ covers in part, or that lie across
 * two local buffers, are compared in all bytes there are.
 */
#ifndef NPR_SCAN_HPP
#define NPR_SCAN_HPP

#include "protocol/page_bits.hpp"

#include <cstddef>
#include <cstdint>
#include <infiniband/verbs.h>
#include <span>

namespace npr {

inline constexpr unsigned unit_shift = 6;
inline constexpr unsigned unit_size = 1U << unit_shift;
inline constexpr unsigned page_shift = 12;
inline constexpr std::uint64_t page_size = 1ULL << page_shift;

/* Is the first word of any of the @units units at @p the signature? */
[[nodiscard]] bool any_unit_matches(const std::byte *p, std::size_t units, std::uint64_t signature) noexcept;

/* Is anything suspicious in @length bytes, at least one, that were read from remote address @raddr to @p? */
[[nodiscard]] bool any_suspicious(const std::byte *p, std::uint64_t raddr, std::uint64_t length,
				  std::uint64_t signature) noexcept;

/*
 * @length bytes that were read from remote address @raddr lie in @sgl from
 * byte @offset on. Sets in @out the bit of each suspicious page; bit 0 is the
 * page of remote address @origin.
 */
void scan_suspicious(std::span<const ibv_sge> sgl, std::uint64_t offset, std::uint64_t raddr,
		     std::uint64_t length, std::uint64_t signature, std::uint64_t origin,
		     page_bits &out) noexcept;

} // namespace npr

#endif
