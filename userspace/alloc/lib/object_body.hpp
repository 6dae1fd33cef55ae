/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What an object and its copies share; no peer can write it. */
#ifndef NPRA_OBJECT_BODY_HPP
#define NPRA_OBJECT_BODY_HPP

#include <nprdma/alloc/object.hpp>

#include <cstring>

namespace nprdma::alloc {

struct object::body {
	buffer block;		     /* header, metadata, and data unless they are outside */
	buffer outside;		     /* data of the caller */
	std::shared_ptr<body> owner; /* instead of both: what has the memory */
	std::uint64_t type = 0;
	std::byte *header = nullptr;
	std::span<std::byte> metadata, data;

	/* @h is checked. */
	void lay_out(std::span<std::byte> bytes, const object_header &h) noexcept;
	[[nodiscard]] std::uint64_t checksum() const noexcept;
	/* Of what we know, and not of what a peer may have written over the one in memory. */
	[[nodiscard]] object_header fresh_header() const noexcept
	{
		object_header h;
		h.type = type;
		h.metadata_bytes = metadata.size();
		h.data_bytes = data.size();
		return h;
	}
	/* What has the header in it. */
	[[nodiscard]] const buffer &home() const noexcept
	{
		if (!owner)
			return block;
		return owner->outside ? owner->outside : owner->block;
	}
	void set_checksum(std::uint64_t value) noexcept
	{
		std::memcpy(header + offsetof(object_header, checksum), &value, sizeof(value));
	}
};

} // namespace nprdma::alloc

#endif
