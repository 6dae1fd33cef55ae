/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "protocol/scan.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace npr {

namespace {

std::uint64_t load(const std::byte *p) noexcept
{
	std::uint64_t v;
	std::memcpy(&v, p, sizeof(v));
	return v;
}

/* Are the @n bytes at @p, of a unit that begins before or ends after them, those of the signature at @raddr? */
bool part_matches(const std::byte *p, std::uint64_t n, std::uint64_t raddr, std::uint64_t signature) noexcept
{
	/* the signature from any byte of a word on */
	const std::array pattern{signature, signature};
	const std::uint64_t word = load(reinterpret_cast<const std::byte *>(pattern.data()) + raddr % 8);

	for (; n >= sizeof(word); n -= sizeof(word), p += sizeof(word))
		if (load(p) != word)
			return false;
	return !std::memcmp(p, &word, n);
}

/* A position in a scatter list. */
struct cursor {
	std::span<const ibv_sge> sgl;
	std::size_t index = 0;
	std::uint64_t offset;

	cursor(std::span<const ibv_sge> s, std::uint64_t o) noexcept : sgl(s), offset(o) { skip(); }

	[[nodiscard]] const std::byte *data() const noexcept
	{
		return reinterpret_cast<const std::byte *>(static_cast<std::uintptr_t>(sgl[index].addr)) + offset;
	}

	[[nodiscard]] std::uint64_t left() const noexcept { return sgl[index].length - offset; }

	void advance(std::uint64_t n) noexcept
	{
		offset += n;
		skip();
	}

	void skip() noexcept
	{
		while (index < sgl.size() && offset >= sgl[index].length)
			offset -= sgl[index++].length;
	}
};

} // namespace

/*
 * One comparison per cache line: the memory decides the speed, and strided loads
 * do not vectorise. The branches are never taken, so they cost next to nothing
 * and keep the loads independent.
 */
bool any_unit_matches(const std::byte *p, std::size_t units, std::uint64_t signature) noexcept
{
	for (; units >= 8; units -= 8, p += 8 * unit_size) {
		if (load(p) == signature || load(p + unit_size) == signature ||
		    load(p + 2 * unit_size) == signature || load(p + 3 * unit_size) == signature ||
		    load(p + 4 * unit_size) == signature || load(p + 5 * unit_size) == signature ||
		    load(p + 6 * unit_size) == signature || load(p + 7 * unit_size) == signature)
			return true;
	}
	for (; units; --units, p += unit_size)
		if (load(p) == signature)
			return true;
	return false;
}

bool any_suspicious(const std::byte *p, std::uint64_t raddr, std::uint64_t length, std::uint64_t signature) noexcept
{
	const std::uint64_t head = std::min(-raddr % unit_size, length);
	const std::uint64_t units = (length - head) / unit_size;
	const std::uint64_t tail = (length - head) % unit_size;
	const std::uint64_t end = length - tail;

	return (head && part_matches(p, head, raddr, signature)) || any_unit_matches(p + head, units, signature) ||
	       (tail && part_matches(p + end, tail, raddr + end, signature));
}

void scan_suspicious(std::span<const ibv_sge> sgl, std::uint64_t offset, std::uint64_t raddr,
		     std::uint64_t length, std::uint64_t signature, std::uint64_t origin,
		     page_bits &out) noexcept
{
	const std::uint64_t origin_page = origin >> page_shift;
	cursor at(sgl, offset);

	while (length) {
		const auto page = static_cast<unsigned>((raddr >> page_shift) - origin_page);
		std::uint64_t n;
		bool match;

		if (raddr % unit_size == 0 && length >= unit_size && at.left() >= unit_size) {
			n = std::min({length, at.left(), page_size - raddr % page_size});
			n -= n % unit_size;
			match = any_unit_matches(at.data(), n / unit_size, signature);
			at.advance(n);
		} else {
			std::array<std::byte, unit_size> bytes;
			n = std::min<std::uint64_t>(length, unit_size - raddr % unit_size);
			for (std::uint64_t done = 0; done < n;) {
				const std::uint64_t part = std::min(n - done, at.left());
				std::memcpy(bytes.data() + done, at.data(), part);
				at.advance(part);
				done += part;
			}
			match = part_matches(bytes.data(), n, raddr, signature);
		}
		if (match)
			out.set(page);
		raddr += n;
		length -= n;
	}
}

} // namespace npr
