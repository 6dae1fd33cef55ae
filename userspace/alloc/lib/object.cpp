/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "object_body.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace nprdma::alloc {
namespace {

[[nodiscard]] std::size_t padded(std::size_t n) noexcept
{
	return (n + 63) & ~std::size_t{63};
}

[[nodiscard]] std::size_t data_offset(std::size_t metadata_bytes) noexcept
{
	return sizeof(object_header) + padded(metadata_bytes);
}

/* Far from overflow, and more than any arena has. */
constexpr std::size_t max_part = std::size_t{1} << 60;

void check_sizes(std::size_t metadata_bytes, std::size_t data_bytes)
{
	if (metadata_bytes > max_part || data_bytes > max_part)
		throw bad_size("an object with " + std::to_string(metadata_bytes) + " bytes of metadata and " +
			       std::to_string(data_bytes) + " bytes of data");
}

object_header copied_header(std::span<const std::byte> bytes)
{
	object_header h;

	if (bytes.size() < sizeof(h))
		throw bad_object(std::to_string(bytes.size()) + " bytes are less than the header of an object, 64");
	std::memcpy(&h, bytes.data(), sizeof(h));
	const std::size_t wanted = object::size_of(h);
	if (wanted > bytes.size())
		throw bad_object("an object of " + std::to_string(wanted) + " bytes (metadata " +
				 std::to_string(h.metadata_bytes) + ", data " + std::to_string(h.data_bytes) + ") in " +
				 std::to_string(bytes.size()) + " bytes");
	return h;
}

/* Of an object that stays there: what is in it is used as types. */
object_header header_in_place(std::span<const std::byte> bytes)
{
	if (reinterpret_cast<std::uintptr_t>(bytes.data()) % 64)
		throw bad_object("an object that begins at an address that is no multiple of 64; object::copy_of() takes it from there");
	return copied_header(bytes);
}

/* Not for secrets: each step takes in a word, and none of the 64 bits is without effect on the rest. */
void mix(std::uint64_t &h, std::span<const std::byte> bytes) noexcept
{
	std::size_t i = 0;

	for (; i + 8 <= bytes.size(); i += 8) {
		std::uint64_t word;
		std::memcpy(&word, bytes.data() + i, 8);
		h = std::rotl((h ^ word) * 0x9e3779b97f4a7c15, 29);
	}
	std::uint64_t rest = bytes.size();
	for (; i < bytes.size(); i++)
		rest = rest << 8 | std::to_integer<std::uint64_t>(bytes[i]);
	h = std::rotl((h ^ rest) * 0x9e3779b97f4a7c15, 29);
}

bool equal(std::span<const std::byte> a, std::span<const std::byte> b) noexcept
{
	return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size()));
}

/* What is between two parts travels, too: nothing of what was in the memory before. */
void clear(std::span<std::byte> padding) noexcept
{
	std::fill(padding.begin(), padding.end(), std::byte{0});
}

void copy(std::span<const std::byte> from, std::span<std::byte> to) noexcept
{
	if (!from.empty())
		std::memcpy(to.data(), from.data(), from.size());
}

} // namespace

std::uint64_t object::body::checksum() const noexcept
{
	std::uint64_t h = type;

	mix(h, metadata);
	mix(h, data);
	h ^= h >> 32;
	return h ? h : 1;
}

void object::body::lay_out(std::span<std::byte> bytes, const object_header &h) noexcept
{
	header = bytes.data();
	type = h.type;
	metadata = bytes.subspan(sizeof(object_header), h.metadata_bytes);
	if (!outside)
		data = bytes.subspan(data_offset(h.metadata_bytes), h.data_bytes);
}

object::object(arena &home, std::uint64_t type, std::size_t metadata_bytes, std::size_t data_bytes)
{
	check_sizes(metadata_bytes, data_bytes);
	object_header h;
	h.type = type;
	h.metadata_bytes = metadata_bytes;
	h.data_bytes = data_bytes;
	auto made = std::make_shared<body>();
	made->block = home.acquire(data_offset(metadata_bytes) + data_bytes);
	std::memcpy(made->block.data(), &h, sizeof(h));
	clear(made->block.bytes().subspan(sizeof(h) + metadata_bytes, padded(metadata_bytes) - metadata_bytes));
	made->lay_out(made->block.bytes(), h);
	body_ = std::move(made);
}

object object::around(arena &home, std::uint64_t type, std::span<const std::byte> metadata, std::span<std::byte> data,
		      std::function<void()> cleanup)
{
	check_sizes(metadata.size(), data.size());
	object_header h;
	h.type = type;
	h.metadata_bytes = metadata.size();
	h.data_bytes = data.size();
	auto made = std::make_shared<body>();
	made->block = home.acquire(data_offset(metadata.size()));
	std::memcpy(made->block.data(), &h, sizeof(h));
	copy(metadata, made->block.bytes().subspan(sizeof(h)));
	clear(made->block.bytes().subspan(sizeof(h) + metadata.size()));
	/* Last: the memory is the caller's until nothing can fail any more. */
	made->outside = home.adopt(data, std::move(cleanup));
	made->data = data;
	made->lay_out(made->block.bytes(), h);
	return object(std::move(made));
}

object object::accept(buffer &&received)
{
	const object_header h = header_in_place(received.bytes());
	auto made = std::make_shared<body>();
	made->block = std::move(received);
	made->lay_out(made->block.bytes(), h);
	return object(std::move(made));
}

object object::copy_of(arena &home, std::span<const std::byte> bytes)
{
	/* Sizes are those of this copy, whatever a peer writes there meanwhile. */
	const object_header h = copied_header(bytes);
	object made(home, h.type, h.metadata_bytes, h.data_bytes);
	copy(bytes.subspan(sizeof(h), h.metadata_bytes), made.metadata());
	copy(bytes.subspan(data_offset(h.metadata_bytes), h.data_bytes), made.data());
	made.body_->set_checksum(h.checksum);
	return made;
}

object object::view(const std::shared_ptr<body> &owner, std::span<std::byte> bytes)
{
	const object_header h = header_in_place(bytes);
	auto made = std::make_shared<body>();
	made->owner = owner;
	made->lay_out(bytes, h);
	return object(std::move(made));
}

std::uint64_t object::type() const noexcept
{
	return body_ ? body_->type : 0;
}

std::span<std::byte> object::metadata() const noexcept
{
	return body_ ? body_->metadata : std::span<std::byte>();
}

std::span<std::byte> object::data() const noexcept
{
	return body_ ? body_->data : std::span<std::byte>();
}

std::size_t object::size() const noexcept
{
	return body_ ? data_offset(body_->metadata.size()) + body_->data.size() : 0;
}

std::size_t object::size_of(const object_header &h)
{
	if (h.magic != object_header::magic_value)
		throw bad_object("no object begins there: its first four bytes are no \"NPRO\"");
	if (h.version != object_header::version_value || h.bytes != sizeof(h))
		throw bad_object("an object of version " + std::to_string(h.version) + " with a header of " +
				 std::to_string(h.bytes) + " bytes; this library knows version 1, with 64");
	if (std::any_of(h.reserved.begin(), h.reserved.end(), [](std::uint64_t x) { return x != 0; }))
		throw bad_object("an object whose header has something in its reserved words");
	if (h.metadata_bytes > max_part || h.data_bytes > max_part)
		throw bad_object("an object that claims " + std::to_string(h.metadata_bytes) + " bytes of metadata and " +
				 std::to_string(h.data_bytes) + " bytes of data");
	return data_offset(h.metadata_bytes) + h.data_bytes;
}

std::vector<object::piece> object::pieces(std::size_t registrar) const
{
	std::vector<piece> all;

	if (!body_)
		return all;
	const std::size_t to_data = data_offset(body_->metadata.size());
	const std::span<std::byte> first(body_->header, body_->outside ? to_data : to_data + body_->data.size());
	const buffer &home = body_->home();
	location at = home.where(registrar);
	at.offset += static_cast<std::uint64_t>(first.data() - home.data());
	all.push_back({first, at});
	if (body_->outside && !body_->data.empty())
		all.push_back({body_->data, body_->outside.where(registrar)});
	return all;
}

object object::clone(arena &home) const
{
	if (!body_)
		return {};
	object made(home, type(), metadata().size(), data().size());
	copy(metadata(), made.metadata());
	copy(data(), made.data());
	return made;
}

bool object::operator==(const object &other) const noexcept
{
	if (!body_ || !other.body_ || body_ == other.body_)
		return body_ == other.body_;
	return type() == other.type() && equal(metadata(), other.metadata()) && equal(data(), other.data());
}

void object::seal() noexcept
{
	if (body_)
		body_->set_checksum(body_->checksum());
}

bool object::intact() const noexcept
{
	if (!body_)
		return true;
	std::uint64_t noted;
	std::memcpy(&noted, body_->header + offsetof(object_header, checksum), sizeof(noted));
	return !noted || noted == body_->checksum();
}

void object::mismatch(std::string_view what, std::size_t bytes, std::size_t wanted)
{
	throw bad_object("the " + std::string(what) + " of an object: " + std::to_string(bytes) +
			 " bytes, where units of " + std::to_string(wanted) + " are asked for");
}

object pack(arena &home, std::span<const object> objects)
{
	std::size_t bytes = 0;

	for (const object &o : objects) {
		if (!o)
			throw bad_object("an empty object in a package");
		bytes += padded(o.size());
	}
	object package(home, package_type, sizeof(std::uint64_t), bytes);
	package.metadata_as<std::uint64_t>() = objects.size();
	std::span<std::byte> to = package.data();
	for (const object &o : objects) {
		const object_header h = o.body_->fresh_header();
		copy(std::as_bytes(std::span(&h, 1)), to);
		copy(o.metadata(), to.subspan(sizeof(h)));
		clear(to.subspan(sizeof(h) + o.metadata().size(), padded(o.metadata().size()) - o.metadata().size()));
		copy(o.data(), to.subspan(data_offset(o.metadata().size())));
		clear(to.subspan(o.size(), padded(o.size()) - o.size()));
		to = to.subspan(padded(o.size()));
	}
	return package;
}

std::vector<object> unpack(const object &package)
{
	std::vector<object> all;

	if (package.type() != package_type)
		throw bad_object("what is unpacked is no package");
	const std::uint64_t count = package.metadata_as<std::uint64_t>();
	std::span<std::byte> from = package.data();
	/* A package in a package belongs to the outer one: that has the block. */
	const auto &owner = package.body_->owner ? package.body_->owner : package.body_;
	while (!from.empty()) {
		all.push_back(object::view(owner, from));
		from = from.subspan(std::min(padded(all.back().size()), from.size()));
	}
	if (all.size() != count)
		throw bad_object("a package that claims " + std::to_string(count) + " objects and has " +
				 std::to_string(all.size()));
	return all;
}

} // namespace nprdma::alloc
