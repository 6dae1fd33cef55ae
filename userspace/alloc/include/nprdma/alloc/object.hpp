/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * An object is a header, metadata and data, in registered memory: what applications send each other. The
 * header travels with it and says what it is; a peer that reads it knows how much to ask for.
 *
 * What this host believes of an object (type, sizes, how many copies there are) is in memory that no peer
 * can write. It is taken from a header once, checked, and never looked at there again.
 *
 * A copy of an object is shallow, and cheap: the memory ends with the last one. Copies may be made and ended by any
 * thread; content is the application's to protect.
 */
#ifndef NPRDMA_ALLOC_OBJECT_HPP
#define NPRDMA_ALLOC_OBJECT_HPP

#include <nprdma/alloc/arena.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace nprdma::alloc {

static_assert(std::endian::native == std::endian::little, "headers travel as they are in memory");

/* As it travels: little endian. Metadata follows it, and data after that, at the next multiple of 64 bytes. */
struct object_header {
	static constexpr std::uint32_t magic_value = 0x4f52504e; /* "NPRO" */
	static constexpr std::uint16_t version_value = 1;

	std::uint32_t magic = magic_value;
	std::uint16_t version = version_value;
	std::uint16_t bytes = 64; /* of this header */
	std::uint64_t type = 0;
	std::uint64_t metadata_bytes = 0;
	std::uint64_t data_bytes = 0;
	std::uint64_t checksum = 0; /* of metadata and data, see object::seal(); 0: there is none */
	std::array<std::uint64_t, 3> reserved{}; /* zeros */
};
static_assert(sizeof(object_header) == 64);

/* The number that stands for a type: the same for a name everywhere (FNV-1a, 64 bits). */
[[nodiscard]] constexpr std::uint64_t type_id(std::string_view name) noexcept
{
	std::uint64_t h = 0xcbf29ce484222325;
	for (const char c : name)
		h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3;
	return h;
}

class NPRDMA_ALLOC_API object {
public:
	/* Part of an object in one run of bytes, as a work request names it. */
	struct piece {
		std::span<std::byte> bytes;
		location where;
	};

	object() noexcept = default;
	/* Content is as the memory was left. */
	object(arena &home, std::uint64_t type, std::size_t metadata_bytes, std::size_t data_bytes);
	/*
	 * Data stay where they are, in memory of the caller (some: bad_size) that is registered for as long as the object lives;
	 * then @cleanup. Header and metadata are in the arena.
	 */
	[[nodiscard]] static object around(arena &home, std::uint64_t type, std::span<const std::byte> metadata,
					   std::span<std::byte> data, std::function<void()> cleanup);
	/* What a peer wrote there, at a multiple of 64, without a copy. Throws bad_object; then @received is as it was. */
	[[nodiscard]] static object accept(buffer &&received);
	/* A deep copy of what begins at @bytes, from wherever it came. Throws bad_object. */
	[[nodiscard]] static object copy_of(arena &home, std::span<const std::byte> bytes);

	[[nodiscard]] explicit operator bool() const noexcept { return body_ != nullptr; }
	[[nodiscard]] std::uint64_t type() const noexcept;
	[[nodiscard]] std::span<std::byte> metadata() const noexcept;
	[[nodiscard]] std::span<std::byte> data() const noexcept;
	/* Metadata as a structure, data as an array. Throws bad_object if they are too small, or no whole number of T. */
	template <class T>
	[[nodiscard]] T &metadata_as() const;
	template <class T>
	[[nodiscard]] std::span<T> data_as() const;
	/* All of it in one run, as it travels; and the size for which a receiver needs a buffer. */
	[[nodiscard]] std::size_t size() const noexcept;
	/* Of how much a header speaks, if it is one. Throws bad_object. For those who READ it from a peer. */
	[[nodiscard]] static std::size_t size_of(const object_header &header);
	/* One piece, or two if data are elsewhere: one after the other they are what travels. */
	[[nodiscard]] std::vector<piece> pieces(std::size_t registrar = 0) const;

	/* Shallow copies of this, itself included. */
	[[nodiscard]] long use_count() const noexcept { return body_.use_count(); }
	[[nodiscard]] bool same_as(const object &other) const noexcept { return body_ == other.body_; }
	/* A deep copy, in one block. */
	[[nodiscard]] object clone(arena &home) const;
	/* Type and content are equal; or both are empty. */
	[[nodiscard]] bool operator==(const object &other) const noexcept;

	/* Notes a checksum of the content in the header. Whoever changes the content seals it again. */
	void seal() noexcept;
	/* False: there is a checksum, and it is another one. Against accidents, not against peers who mean it. */
	[[nodiscard]] bool intact() const noexcept;

private:
	struct body;
	explicit object(std::shared_ptr<body> b) noexcept : body_(std::move(b)) {}
	[[nodiscard]] static object view(const std::shared_ptr<body> &owner, std::span<std::byte> bytes);
	[[noreturn]] static void mismatch(std::string_view what, std::size_t bytes, std::size_t wanted);

	friend NPRDMA_ALLOC_API object pack(arena &home, std::span<const object> objects);
	friend NPRDMA_ALLOC_API std::vector<object> unpack(const object &package);
	friend NPRDMA_ALLOC_API void save(const std::string &path, std::span<const object> objects);

	std::shared_ptr<body> body_;
};

inline constexpr std::uint64_t package_type = type_id("nprdma.package");

/* Deep copies of many objects in one, to be sent at once; without their checksums. */
[[nodiscard]] NPRDMA_ALLOC_API object pack(arena &home, std::span<const object> objects);
/* What is in it, without a copy: the package lives as long as one of them. Throws bad_object. */
[[nodiscard]] NPRDMA_ALLOC_API std::vector<object> unpack(const object &package);

/* A file of objects, with their checksums; it appears as a whole or not at all. Throws std::system_error. */
NPRDMA_ALLOC_API void save(const std::string &path, std::span<const object> objects);
/* Throws std::system_error, and bad_object if it is no such file, or damaged: each object has its checksum. */
[[nodiscard]] NPRDMA_ALLOC_API std::vector<object> load(arena &home, const std::string &path);

template <class T>
T &object::metadata_as() const
{
	static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 64);
	if (metadata().size() < sizeof(T))
		mismatch("metadata", metadata().size(), sizeof(T));
	return *reinterpret_cast<T *>(metadata().data());
}

template <class T>
std::span<T> object::data_as() const
{
	static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 64);
	if (data().size() % sizeof(T))
		mismatch("data", data().size(), sizeof(T));
	/* Data of the caller may begin anywhere. */
	if (reinterpret_cast<std::uintptr_t>(data().data()) % alignof(T))
		mismatch("alignment of data", 0, alignof(T));
	return {reinterpret_cast<T *>(data().data()), data().size() / sizeof(T)};
}

} // namespace nprdma::alloc

#endif
