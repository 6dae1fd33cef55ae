/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a client asks a server, and the entries of pages. Both ends have one byte order. */
#ifndef NPRDMA_FAR_PROTOCOL_HPP
#define NPRDMA_FAR_PROTOCOL_HPP

#include "codec.hpp"

namespace nprdma::far
{

constexpr std::uint32_t protocol_magic = 0x33726166; /* and version */

enum class op : std::uint32_t { open = 1, flush = 2, set_generation = 3 };
constexpr std::uint32_t open_read_only = 1, open_shared = 2, open_make = 4;

/* Of a connection: who asks waits for the answer, and who does not may be dropped. The server gives no more.
 */
constexpr transport::message_room protocol_room = {4, 256};

struct request {
	std::uint32_t magic;
	op what;
	std::uint32_t flags, reserved;
	std::uint64_t bytes, page_bytes; /* to make */
	std::uint64_t client;            /* to open: the same for all connections of one */
	std::uint64_t generation, tag;   /* to set_generation */
	char name[96];                   /* ends with a zero */
};

/*
 * A region of memory that somebody else uses, too: pages are there as they are, have no entries, and the last
 * one ends where the region does.
 */
constexpr std::uint32_t region_plain = 1;

struct answer {
	std::uint32_t magic;
	std::int32_t code; /* 0 or of errno */
	std::uint64_t id;  /* of this region: another one of the same name has another one */
	std::uint64_t bytes, page_bytes;
	std::uint32_t flags;
	/*
	 * What was written under one verifier, and is to be made durable under another one, may be lost: the
	 * server was started anew in between, maybe with its host. So may what was written before the last
	 * one of so many times that the file could not be made durable. 0: the region is not open.
	 */
	std::uint32_t failures;
	std::uint64_t verifier;
	std::uint64_t generation, tag; /* see store::generation() */
	std::uint64_t owner;           /* the client that opened it to write, last and before this; 0: none */
	transport::token data, entries;
	char text[128]; /* of an error */
};

static_assert(sizeof(request) <= protocol_room.max_message && sizeof(answer) <= protocol_room.max_message);

/* Of a page: 0 if it was never written. */
struct entry {
	std::uint64_t word;

	static constexpr std::uint64_t has_checksum = 1ULL << 63;

	static entry make(stored how, std::size_t bytes, bool summed, std::uint32_t sum) noexcept
	{
		return {sum | static_cast<std::uint64_t>(bytes) << 32 |
			static_cast<std::uint64_t>(how) << 56 | (summed ? has_checksum : 0)};
	}
	[[nodiscard]] bool written() const noexcept { return word != 0; }
	[[nodiscard]] stored how() const noexcept { return static_cast<stored>(word >> 56 & 0x7f); }
	[[nodiscard]] std::size_t bytes() const noexcept { return word >> 32 & 0xffffff; }
	[[nodiscard]] bool summed() const noexcept { return word & has_checksum; }
	[[nodiscard]] std::uint32_t sum() const noexcept { return static_cast<std::uint32_t>(word); }
	/* What a peer, or damage, made of it. */
	[[nodiscard]] bool sane(std::size_t page_bytes) const noexcept
	{
		return how() == stored::raw ? bytes() == page_bytes
					    : how() >= stored::lz4 && how() <= stored::zfp_32 &&
						  bytes() > 0 && bytes() < page_bytes && summed();
	}
};

} // namespace nprdma::far

#endif
