/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What open() chooses between, and what both have in common. */
#ifndef NPRDMA_TRANSPORT_KINDS_HPP
#define NPRDMA_TRANSPORT_KINDS_HPP

#include <nprdma/transport.hpp>

namespace nprdma::transport
{

result<std::unique_ptr<context>> open_shm(const options &how);
result<std::unique_ptr<context>> open_verbs(const options &how);

/* messages * max_message: each end has a buffer of so many bytes for each direction, and who connects says
 * how many. */
constexpr std::size_t most_message_bytes = 64 << 20;

/* 0, or EINVAL: what read() and write() refuse, whatever carries them. */
inline int check_segments(std::span<const segment> segments, std::size_t most) noexcept
{
	if (segments.empty() || segments.size() > most)
		return EINVAL;
	for (const segment &s : segments) {
		if (!s.local || !s.bytes)
			return EINVAL;
		const std::span<std::byte> memory = s.local->memory();
		const auto base = reinterpret_cast<std::uintptr_t>(memory.data());
		const auto at = reinterpret_cast<std::uintptr_t>(s.buffer);

		if (at < base || at - base > memory.size() || s.bytes > memory.size() - (at - base))
			return EINVAL;
	}
	return 0;
}

} // namespace nprdma::transport

#endif
