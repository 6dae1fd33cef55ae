// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "nprdma/sync/wire.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace nprdma::sync
{
namespace
{

/* Quantised, the scales of all blocks come first, as floats, and then the integers. */
std::size_t scale_bytes(std::size_t count) noexcept
{
	return (count + wire_block - 1) / wire_block * sizeof(float);
}

/*
 * As nearbyint() does it, of what is at most 2^20 in size: the sum has no room for a fraction. Without
 * SSE 4.1, which x86-64 need not have, nearbyint() is a call for each value.
 */
template <class T> T rounded(T value) noexcept
{
	constexpr T large = T(std::uint64_t{3} << (std::numeric_limits<T>::digits - 2));

	return (value + large) - large;
}

template <class Int, class T>
bool quantise(std::span<const T> values, std::span<T> lost, std::byte *to) noexcept
{
	using bits = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
	constexpr T top = std::is_same_v<Int, std::int8_t> ? 127 : 32767;
	std::byte *const integers = to + scale_bytes(values.size());

	for (std::size_t first = 0; first < values.size(); first += wire_block) {
		const std::size_t n = std::min(wire_block, values.size() - first);
		T value[wire_block] = {}, left[wire_block];

		std::copy_n(values.data() + first, n, value);
		/* Without their signs numbers are in the order of their bits; above are the infinity and what
		 * is none. */
		bits largest = 0;
		for (const T v : value)
			largest =
			    std::max(largest, std::bit_cast<bits>(v) & std::numeric_limits<bits>::max());
		float scale = static_cast<float>(std::bit_cast<T>(largest) / top);

		if (!std::isfinite(scale))
			return false;
		/* Denormal, it would be too coarse; what is so small is lost, and so is sent later. */
		if (!std::isnormal(scale))
			scale = 0;
		const T step = scale, inverse = scale > 0 ? 1 / step : T(0);
		Int q[wire_block];

		for (std::size_t i = 0; i < wire_block; ++i) {
			const T whole = rounded(std::min(std::max(value[i] * inverse, -top), top));

			q[i] = static_cast<Int>(static_cast<std::int32_t>(whole));
			left[i] = value[i] - whole * step;
		}
		std::copy_n(left, n, lost.data() + first);
		std::memcpy(to + first / wire_block * sizeof(float), &scale, sizeof(scale));
		std::memcpy(integers + first * sizeof(Int), q, n * sizeof(Int));
	}
	return true;
}

bool scales_are_good(std::span<const std::byte> from, std::size_t count) noexcept
{
	for (std::size_t at = 0; at < scale_bytes(count); at += sizeof(float)) {
		float scale;

		std::memcpy(&scale, from.data() + at, sizeof(scale));
		if (!(scale >= 0 && std::isfinite(scale)))
			return false;
	}
	return true;
}

template <class Int, class T, class F>
void each_quantised(std::span<const std::byte> from, std::span<T> to, F &&f) noexcept
{
	const std::byte *const integers = from.data() + scale_bytes(to.size());

	for (std::size_t first = 0; first < to.size(); first += wire_block) {
		const std::size_t n = std::min(wire_block, to.size() - first);
		float scale;
		Int q[wire_block];

		std::memcpy(&scale, from.data() + first / wire_block * sizeof(float), sizeof(scale));
		std::memcpy(q, integers + first * sizeof(Int), n * sizeof(Int));
		const T step = scale;
		for (std::size_t i = 0; i < n; ++i)
			f(to[first + i], static_cast<T>(q[i]) * step);
	}
}

/* f(element of @to, value that arrived) for each. */
template <class T, class F>
bool each(wire format, std::span<const std::byte> from, std::span<T> to, F &&f) noexcept
{
	if (from.size() != wire_bytes<T>(format, to.size()))
		return false;
	if (format != wire::exact && !scales_are_good(from, to.size()))
		return false;
	if (format == wire::int16)
		each_quantised<std::int16_t>(from, to, f);
	else if (format == wire::int8)
		each_quantised<std::int8_t>(from, to, f);
	else
		for (std::size_t i = 0; i < to.size(); ++i) {
			T value;

			/* Of any alignment: the compiler makes a load of it, and takes several at once. */
			std::memcpy(&value, from.data() + i * sizeof(T), sizeof(value));
			f(to[i], value);
		}
	return true;
}

} // namespace

wire parse_wire(std::string_view name)
{
	if (name == "exact")
		return wire::exact;
	if (name == "int16")
		return wire::int16;
	if (name == "int8")
		return wire::int8;
	throw std::invalid_argument("wire format \"" + std::string(name) +
				    "\": there are exact, int16 and int8");
}

template <class T> std::size_t wire_bytes(wire format, std::size_t count) noexcept
{
	switch (format) {
	case wire::int16:
		return scale_bytes(count) + 2 * count;
	case wire::int8:
		return scale_bytes(count) + count;
	case wire::exact:
		break;
	}
	return count * sizeof(T);
}

template <class T>
bool encode(wire format, std::span<const T> values, std::span<T> lost, std::span<std::byte> to) noexcept
{
	if (lost.size() != values.size() || to.size() != wire_bytes<T>(format, values.size()))
		return false;
	switch (format) {
	case wire::int16:
		return quantise<std::int16_t>(values, lost, to.data());
	case wire::int8:
		return quantise<std::int8_t>(values, lost, to.data());
	case wire::exact:
		break;
	}
	if (!values.empty())
		std::memcpy(to.data(), values.data(), values.size_bytes());
	std::fill(lost.begin(), lost.end(), T(0));
	return true;
}

template <class T>
bool add_decoded(wire format, std::span<const std::byte> from, T weight, std::span<T> sum) noexcept
{
	return each(format, from, sum, [weight](T &s, T value) { s += weight * value; });
}

template <class T> bool decode(wire format, std::span<const std::byte> from, std::span<T> values) noexcept
{
	return each(format, from, values, [](T &v, T value) { v = value; });
}

std::uint64_t checksum(std::span<const std::byte> data) noexcept
{
	constexpr std::uint64_t odd = 0x9fb21c651e98df25;
	/* Four that do not wait for each other. */
	std::uint64_t lane[4] = {data.size(), 1, 2, 3};
	std::size_t at = 0;

	for (; data.size() - at >= sizeof(lane); at += sizeof(lane)) {
		std::uint64_t word[4];

		std::memcpy(word, data.data() + at, sizeof(word));
		for (int i = 0; i < 4; ++i)
			lane[i] = std::rotl((lane[i] ^ word[i]) * odd, 29);
	}
	std::uint64_t word[4] = {};
	if (at < data.size())
		std::memcpy(word, data.data() + at, data.size() - at);
	std::uint64_t sum = 0;
	for (int i = 0; i < 4; ++i)
		sum = (std::rotl(sum, 17) ^ (lane[i] ^ word[i])) * odd;
	return sum ^ (sum >> 32);
}

#define NPRDMA_SYNC_WIRE(T)                                                                                  \
	template std::size_t wire_bytes<T>(wire, std::size_t) noexcept;                                      \
	template bool encode<T>(wire, std::span<const T>, std::span<T>, std::span<std::byte>) noexcept;      \
	template bool add_decoded<T>(wire, std::span<const std::byte>, T, std::span<T>) noexcept;            \
	template bool decode<T>(wire, std::span<const std::byte>, std::span<T>) noexcept;
NPRDMA_SYNC_WIRE(float)
NPRDMA_SYNC_WIRE(double)
#undef NPRDMA_SYNC_WIRE

} // namespace nprdma::sync
