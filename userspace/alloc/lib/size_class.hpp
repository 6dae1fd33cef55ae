/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Sizes of blocks: those of jemalloc that are whole lines, four for each power of two, numbered. A block of
 * a small class begins at a multiple of the class's size from the beginning of a page.
 */
#ifndef NPRA_SIZE_CLASS_HPP
#define NPRA_SIZE_CLASS_HPP

#include <bit>
#include <cstddef>
#include <cstdint>

namespace npra {

inline constexpr std::size_t line = 64;
inline constexpr std::size_t page = 4096;
/* From here on jemalloc gives each block pages of its own. */
inline constexpr std::size_t large = 16384;
inline constexpr std::size_t max_block = std::size_t{1} << 46;

/* std::has_single_bit() counts bits, by a call where the compiler may not assume that there is an instruction. */
[[nodiscard]] constexpr bool is_power_of_two(std::size_t n) noexcept
{
	return n && !(n & (n - 1));
}

/* @to: a power of two. */
[[nodiscard]] constexpr std::size_t round_up(std::size_t n, std::size_t to) noexcept
{
	return (n + to - 1) & ~(to - 1);
}

[[nodiscard]] constexpr unsigned int class_of(std::size_t bytes) noexcept
{
	const std::size_t last = bytes ? bytes - 1 : 0;
	if (last < 4 * line)
		return static_cast<unsigned int>(last / line);
	const auto octave = static_cast<unsigned int>(std::bit_width(last)) - 9;
	return 4 + 4 * octave + static_cast<unsigned int>(last >> (octave + 6) & 3);
}

[[nodiscard]] constexpr std::size_t bytes_of(unsigned int size_class) noexcept
{
	if (size_class < 4)
		return (size_class + 1) * line;
	return std::size_t{5 + size_class % 4} << (size_class / 4 - 1 + 6);
}

/* Most bytes of a block that shares a run of pages with others. */
inline constexpr std::size_t max_small = bytes_of(class_of(large) - 1);

/* Is it a block of that kind, aligned as all are? Then its class is class_of(bytes). */
[[nodiscard]] constexpr bool is_plain_small(std::size_t bytes, std::size_t alignment) noexcept
{
	/* Of 0, too, one less is more than that. */
	return bytes - 1 < max_small && alignment - 1 < line && !(alignment & (alignment - 1));
}

/* Of a power of two. A page and less is had by the choice of the class. */
[[nodiscard]] constexpr unsigned int class_of(std::size_t bytes, std::size_t alignment) noexcept
{
	if (alignment <= line) [[likely]]
		return class_of(bytes);
	if (alignment > page)
		return class_of(bytes < large ? large : bytes);
	unsigned int c = class_of(bytes < alignment ? alignment : bytes);
	while (bytes_of(c) % alignment)
		c++;
	return c;
}

} // namespace npra

#endif
