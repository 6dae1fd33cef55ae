/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* How one page is stored: raw, by LZ4, or by ZFP. */
#ifndef NPRDMA_FAR_CODEC_HPP
#define NPRDMA_FAR_CODEC_HPP

#include <nprdma/far_network.hpp>

#include <atomic>

namespace nprdma::far
{

/* As it is in entries. */
enum class stored : std::uint8_t { raw = 1, lz4 = 2, zfp_64 = 3, zfp_32 = 4 };

/*
 * Chooses page by page. After pages that gained nothing most are not tried any more, so that data that does
 * not compress costs next to nothing.
 */
class codec
{
public:
	codec(coding what, double error_bound) noexcept : what_(what), error_bound_(error_bound) {}

	/* Bytes of @out that are used, at most 7/8 of @in; 0: raw is better. */
	[[nodiscard]] std::size_t encode(std::span<const std::byte> in, std::span<std::byte> out,
					 stored &how) noexcept;

private:
	const coding what_;
	const double error_bound_;
	std::atomic<unsigned> failures_ = 0, skipped_ = 0;
};

/* False: damaged. All of @out is filled if true. */
[[nodiscard]] bool decode(stored how, std::span<const std::byte> in, std::span<std::byte> out) noexcept;

[[nodiscard]] std::uint32_t checksum(std::span<const std::byte> data) noexcept;

} // namespace nprdma::far

#endif
