/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Addresses of the process, and what is behind them. */
#ifndef NPRA_MAPPING_HPP
#define NPRA_MAPPING_HPP

#include <nprdma/alloc/arena.hpp>

#include <cstddef>
#include <span>
#include <string>
#include <utility>

namespace npra {

[[noreturn]] void fail(const std::string &what);

class unique_fd {
public:
	unique_fd() noexcept = default;
	explicit unique_fd(int fd) noexcept : fd_(fd) {}
	unique_fd(unique_fd &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
	unique_fd &operator=(unique_fd &&other) noexcept
	{
		std::swap(fd_, other.fd_);
		return *this;
	}
	~unique_fd();
	[[nodiscard]] int get() const noexcept { return fd_; }

private:
	int fd_ = -1;
};

/* A range that is unmapped at the end. */
class mapping {
public:
	mapping() noexcept = default;
	mapping(void *address, std::size_t size) noexcept : bytes_(static_cast<std::byte *>(address), size) {}
	mapping(mapping &&other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
	mapping &operator=(mapping &&other) noexcept
	{
		std::swap(bytes_, other.bytes_);
		return *this;
	}
	~mapping();

	/* Zeros that are there when they are touched. */
	[[nodiscard]] static mapping zeros(std::size_t size, const char *what);

	[[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

private:
	std::span<std::byte> bytes_;
};

/* The memory of an arena. No page may be touched at first, see allow(). */
class backing {
public:
	/* Reserves it, as @how says. */
	explicit backing(const nprdma::alloc::options &how);
	/* Memory of the caller, all of which is allowed. */
	explicit backing(std::span<std::byte> given);

	[[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }
	[[nodiscard]] std::byte *begin() const noexcept { return bytes_.data(); }
	[[nodiscard]] std::size_t size() const noexcept { return bytes_.size(); }
	[[nodiscard]] bool ours() const noexcept { return !reserved_.bytes().empty(); }
	/* What it is made of. */
	[[nodiscard]] std::size_t page() const noexcept { return page_; }

	/* False, and errno says why: it could not be done. */
	[[nodiscard]] bool allow(std::byte *begin, std::size_t size, bool allowed) const noexcept;
	/* The pages inside of the range read as zeros; returns the bytes of those that were in memory. */
	std::size_t drop(std::byte *begin, std::size_t size) const noexcept;
	/* Touches all of it now. */
	void populate(std::byte *begin, std::size_t size) const;
	[[nodiscard]] std::size_t resident() const;

private:
	mapping reserved_;
	std::span<std::byte> bytes_;
	std::size_t page_;
};

} // namespace npra

#endif
