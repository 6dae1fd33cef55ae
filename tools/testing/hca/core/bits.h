/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Big-endian bit fields and words in byte buffers. An access beyond the buffer
 * reads as zero and writes nothing: buffers come from guests, with any length.
 */
#ifndef NPHCA_BITS_H
#define NPHCA_BITS_H

#include <cstdint>
#include <cstring>
#include <span>

#include "spec.h"

namespace nphca {

using bytes = std::span<uint8_t>;
using const_bytes = std::span<const uint8_t>;

[[nodiscard]] inline uint64_t get(const_bytes b, field f) noexcept
{
	if ((size_t{f.bit} + f.width + 7) / 8 > b.size() || f.width > 64)
		return 0;
	uint64_t value = 0;
	uint32_t bit = f.bit, left = f.width;
	while (left) {
		const uint32_t in_byte = 8 - bit % 8, take = left < in_byte ? left : in_byte;
		const uint32_t part = (uint32_t{b[bit / 8]} >> (in_byte - take)) & ((1u << take) - 1);
		value = value << take | part;
		bit += take;
		left -= take;
	}
	return value;
}

[[nodiscard]] inline uint32_t get32(const_bytes b, field f) noexcept
{
	return static_cast<uint32_t>(get(b, f));
}

inline void set(bytes b, field f, uint64_t value) noexcept
{
	if ((size_t{f.bit} + f.width + 7) / 8 > b.size() || f.width > 64)
		return;
	uint32_t bit = f.bit, left = f.width;
	while (left) {
		const uint32_t in_byte = 8 - bit % 8, take = left < in_byte ? left : in_byte;
		const uint32_t mask = ((1u << take) - 1) << (in_byte - take);
		const uint32_t part = static_cast<uint32_t>(value >> (left - take)) << (in_byte - take);
		uint8_t &byte = b[bit / 8];
		byte = static_cast<uint8_t>((byte & ~mask) | (part & mask));
		bit += take;
		left -= take;
	}
}

/* The part of @b from @from on, at most @len bytes; empty if there is none. */
template <typename T>
[[nodiscard]] std::span<T> part(std::span<T> b, size_t from, size_t len = SIZE_MAX) noexcept
{
	if (from >= b.size())
		return {};
	return b.subspan(from, len < b.size() - from ? len : b.size() - from);
}

[[nodiscard]] inline uint16_t load16(const uint8_t *p) noexcept
{
	uint16_t v;
	std::memcpy(&v, p, sizeof(v));
	return __builtin_bswap16(v);
}

[[nodiscard]] inline uint32_t load32(const uint8_t *p) noexcept
{
	uint32_t v;
	std::memcpy(&v, p, sizeof(v));
	return __builtin_bswap32(v);
}

[[nodiscard]] inline uint64_t load64(const uint8_t *p) noexcept
{
	uint64_t v;
	std::memcpy(&v, p, sizeof(v));
	return __builtin_bswap64(v);
}

inline void store16(uint8_t *p, uint16_t v) noexcept
{
	v = __builtin_bswap16(v);
	std::memcpy(p, &v, sizeof(v));
}

inline void store32(uint8_t *p, uint32_t v) noexcept
{
	v = __builtin_bswap32(v);
	std::memcpy(p, &v, sizeof(v));
}

inline void store64(uint8_t *p, uint64_t v) noexcept
{
	v = __builtin_bswap64(v);
	std::memcpy(p, &v, sizeof(v));
}

} // namespace nphca

#endif
