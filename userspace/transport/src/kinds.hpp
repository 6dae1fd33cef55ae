/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What open() chooses between, and what both have in common. */
#ifndef NPRDMA_TRANSPORT_KINDS_HPP
#define NPRDMA_TRANSPORT_KINDS_HPP

#include <nprdma/transport.hpp>

#include <cerrno>

namespace nprdma::transport
{

result<std::unique_ptr<context>> open_shm(const options &how);
result<std::unique_ptr<context>> open_verbs(const options &how);

/* messages * max_message: each end has a buffer of so many bytes for each direction. */
constexpr std::size_t most_message_bytes = 64 << 20;

[[nodiscard]] inline bool is_sane(const message_room &r) noexcept
{
	return r.max_message >= 8 && r.max_message <= 1 << 20 && r.messages >= 2 && r.messages <= 1 << 16 &&
	       r.messages * r.max_message <= most_message_bytes;
}

/* What the user has said, or else what the options say. */
[[nodiscard]] inline result<message_room> room_of(const std::optional<message_room> &said, const options &how)
{
	const message_room r = said.value_or(message_room{how.messages, how.max_message});

	if (!is_sane(r))
		return error{EINVAL, "room for messages: 2 to 65536 of 8 bytes to 1 MiB, at most 64 MiB"};
	return r;
}

/* What the side that connects hears, and what the one that listens says of it. */
inline error too_much_room(const message_room &most)
{
	return {ENOBUFS, "more room for messages was asked for than the side that listens gives, which is " +
			     std::to_string(most.messages) + " of " + std::to_string(most.max_message) +
			     " bytes (transport options messages, max_message)"};
}

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
