/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Parameters as they travel: as they are, or as integers of 16 or 8 bits with one scale for each block.
 *
 * What rounding loses is told to the caller, who adds it to what it sends next (error feedback): over the
 * rounds nothing is lost, only late.
 */
#ifndef NPRDMA_SYNC_WIRE_HPP
#define NPRDMA_SYNC_WIRE_HPP

#include <nprdma/export.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace nprdma::sync
{

enum class wire : std::uint32_t { exact, int16, int8 };

/* Elements with one scale. */
inline constexpr std::size_t wire_block = 64;

/* "exact", "int16" or "int8". Throws std::invalid_argument. */
[[nodiscard]] NPRDMA_API wire parse_wire(std::string_view name);

/* Of @count elements of type T, which is float or double. */
template <class T> [[nodiscard]] NPRDMA_API std::size_t wire_bytes(wire format, std::size_t count) noexcept;

/*
 * @values to @to, which has wire_bytes() of them. @lost, which may be the same as @values: each value less
 * what the receiver will have instead. False: a value is not finite or too large for a scale, and nothing is
 * to be sent. As they are, any go.
 */
template <class T>
[[nodiscard]] NPRDMA_API bool encode(wire format, std::span<const T> values, std::span<T> lost,
				     std::span<std::byte> to) noexcept;

/*
 * sum[i] += weight * (value i of @from). False, with @sum as it was: @from does not have wire_bytes(), or a
 * scale is none.
 */
template <class T>
[[nodiscard]] NPRDMA_API bool add_decoded(wire format, std::span<const std::byte> from, T weight,
					  std::span<T> sum) noexcept;

/* The same with values[i] = value i of @from. */
template <class T>
[[nodiscard]] NPRDMA_API bool decode(wire format, std::span<const std::byte> from,
				     std::span<T> values) noexcept;

/* Of data end to end: finds what is torn, old or misplaced; no protection against who wants to deceive. */
[[nodiscard]] NPRDMA_API std::uint64_t checksum(std::span<const std::byte> data) noexcept;

} // namespace nprdma::sync

#endif
