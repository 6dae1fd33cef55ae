/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "codec.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <lz4.h>
#include <memory>
#define XXH_INLINE_ALL
#include <xxhash.h>
#include <zfp.h>

namespace nprdma::far
{

namespace
{

constexpr unsigned patience = 4;     /* pages in a row without a gain */
constexpr unsigned most_skipped = 6; /* doublings: of 64 pages one is tried at the least */

/* Of how many pages is one tried, after so many that gained nothing? */
constexpr unsigned one_of(unsigned failures) noexcept
{
	return failures < patience ? 1 : 2U << std::min(failures - patience, most_skipped - 1);
}

struct zfp_end {
	void operator()(zfp_field *f) const noexcept { zfp_field_free(f); }
	void operator()(zfp_stream *s) const noexcept { zfp_stream_close(s); }
	void operator()(bitstream *b) const noexcept { stream_close(b); }
};

/* ZFP's streams are written in words of 8 bytes. */
struct zfp_call {
	zfp_call(void *data, std::size_t bytes, zfp_type type, void *stream, std::size_t room,
		 double bound) noexcept
	    : field(zfp_field_1d(data, type, bytes / zfp_type_size(type))),
	      bits(stream_open(stream, room)),
	      zfp(zfp_stream_open(bits.get()))
	{
		if (zfp) {
			(void)zfp_stream_set_accuracy(zfp.get(), bound);
			zfp_stream_rewind(zfp.get());
		}
	}

	std::unique_ptr<zfp_field, zfp_end> field;
	std::unique_ptr<bitstream, zfp_end> bits;
	std::unique_ptr<zfp_stream, zfp_end> zfp;
};

/* The bound goes first, because the stream does not say it. */
template <class T>
std::size_t encode_zfp(std::span<const std::byte> in, std::span<std::byte> out, std::size_t limit,
		       double bound) noexcept
{
	constexpr zfp_type type = sizeof(T) == 8 ? zfp_type_double : zfp_type_float;
	const std::size_t n = in.size() / sizeof(T);

	if (in.size() % sizeof(T) || !(bound > 0))
		return 0;
	std::vector<T> values(n), back(n);
	std::memcpy(values.data(), in.data(), in.size());
	for (const T v : values)
		if (!std::isfinite(v))
			return 0;
	std::size_t room;
	{
		zfp_call size(values.data(), in.size(), type, nullptr, 0, bound);
		if (!size.zfp || !size.field)
			return 0;
		room = zfp_stream_maximum_size(size.zfp.get(), size.field.get());
	}
	std::vector<std::uint64_t> coded(room / 8 + 1);
	zfp_call to(values.data(), in.size(), type, coded.data(), coded.size() * 8, bound);
	const std::size_t used = zfp_compress(to.zfp.get(), to.field.get());
	if (!used || used + sizeof(double) > limit)
		return 0;
	/* ZFP promises the bound for sane input; ours is what was in memory. */
	zfp_call from(back.data(), in.size(), type, coded.data(), coded.size() * 8, bound);
	if (!zfp_decompress(from.zfp.get(), from.field.get()))
		return 0;
	for (std::size_t i = 0; i < n; i++)
		if (!(std::abs(static_cast<double>(back[i]) - static_cast<double>(values[i])) <= bound))
			return 0;
	std::memcpy(out.data(), &bound, sizeof(bound));
	std::memcpy(out.data() + sizeof(bound), coded.data(), used);
	return used + sizeof(bound);
}

template <class T> bool decode_zfp(std::span<const std::byte> in, std::span<std::byte> out) noexcept
{
	double bound;

	if (in.size() <= sizeof(bound) || out.size() % sizeof(T))
		return false;
	std::memcpy(&bound, in.data(), sizeof(bound));
	if (!(bound > 0) || !std::isfinite(bound))
		return false;
	std::vector<T> values(out.size() / sizeof(T));
	/* A damaged stream may be read beyond its end: there are zeros for as long as one can be. */
	std::size_t room = in.size();
	zfp_call size(values.data(), out.size(), sizeof(T) == 8 ? zfp_type_double : zfp_type_float, nullptr,
		      0, bound);
	if (size.zfp && size.field)
		room += zfp_stream_maximum_size(size.zfp.get(), size.field.get());
	std::vector<std::uint64_t> coded(room / 8 + 2);
	std::memcpy(coded.data(), in.data() + sizeof(bound), in.size() - sizeof(bound));
	zfp_call from(values.data(), out.size(), sizeof(T) == 8 ? zfp_type_double : zfp_type_float,
		      coded.data(), coded.size() * 8, bound);
	if (!from.zfp || !from.field || !zfp_decompress(from.zfp.get(), from.field.get()))
		return false;
	std::memcpy(out.data(), values.data(), out.size());
	return true;
}

} // namespace

std::size_t codec::encode(std::span<const std::byte> in, std::span<std::byte> out, stored &how) noexcept
{
	if (what_ == coding::raw || in.size() > LZ4_MAX_INPUT_SIZE)
		return 0;
	/* relaxed: it is a guess */
	if (const unsigned n = one_of(failures_.load(std::memory_order_relaxed));
	    n > 1 && skipped_.fetch_add(1, std::memory_order_relaxed) % n)
		return 0;
	const std::size_t limit = std::min(out.size(), in.size() / 8 * 7);
	std::size_t used = 0;

	if (what_ == coding::zfp_64) {
		used = encode_zfp<double>(in, out, limit, error_bound_);
		how = stored::zfp_64;
	} else if (what_ == coding::zfp_32) {
		used = encode_zfp<float>(in, out, limit, error_bound_);
		how = stored::zfp_32;
	}
	if (!used) {
		const int n = LZ4_compress_default(reinterpret_cast<const char *>(in.data()),
						   reinterpret_cast<char *>(out.data()),
						   static_cast<int>(in.size()), static_cast<int>(limit));
		used = n > 0 ? static_cast<std::size_t>(n) : 0;
		how = stored::lz4;
	}
	if (used)
		failures_.store(0, std::memory_order_relaxed);
	else
		failures_.fetch_add(1, std::memory_order_relaxed);
	return used;
}

bool decode(stored how, std::span<const std::byte> in, std::span<std::byte> out) noexcept
{
	switch (how) {
	case stored::raw:
		if (in.size() != out.size())
			return false;
		std::memcpy(out.data(), in.data(), in.size());
		return true;
	case stored::lz4:
		return LZ4_decompress_safe(reinterpret_cast<const char *>(in.data()),
					   reinterpret_cast<char *>(out.data()), static_cast<int>(in.size()),
					   static_cast<int>(out.size())) == static_cast<int>(out.size());
	case stored::zfp_64:
		return decode_zfp<double>(in, out);
	case stored::zfp_32:
		return decode_zfp<float>(in, out);
	}
	return false;
}

std::uint32_t checksum(std::span<const std::byte> data) noexcept
{
	return static_cast<std::uint32_t>(XXH3_64bits(data.data(), data.size()));
}

} // namespace nprdma::far
