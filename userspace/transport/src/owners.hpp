/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Owners of a descriptor and of a mapping, and errors made of errno. */
#ifndef NPRDMA_TRANSPORT_OWNERS_HPP
#define NPRDMA_TRANSPORT_OWNERS_HPP

#include <nprdma/transport.hpp>

#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace nprdma::transport
{

inline error failure(int code, std::string_view what)
{
	return {code, std::string(what) + ": " + strerrordesc_np(code)};
}

class descriptor
{
public:
	descriptor() = default;
	explicit descriptor(int fd) noexcept : fd_(fd) {}
	descriptor(descriptor &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
	descriptor &operator=(descriptor &&other) noexcept
	{
		std::swap(fd_, other.fd_);
		return *this;
	}
	~descriptor()
	{
		if (fd_ >= 0)
			::close(fd_);
	}

	[[nodiscard]] int get() const noexcept { return fd_; }
	explicit operator bool() const noexcept { return fd_ >= 0; }

private:
	int fd_ = -1;
};

/* All of a descriptor that can be mapped, shared and writable. */
class mapping
{
public:
	mapping() = default;
	mapping(int fd, std::size_t bytes) noexcept : bytes_(bytes)
	{
		void *const p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

		memory_ = p == MAP_FAILED ? nullptr : static_cast<std::byte *>(p);
	}
	mapping(mapping &&other) noexcept
	    : memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_)
	{
	}
	mapping &operator=(mapping &&other) noexcept
	{
		std::swap(memory_, other.memory_);
		std::swap(bytes_, other.bytes_);
		return *this;
	}
	~mapping()
	{
		if (memory_)
			::munmap(memory_, bytes_);
	}

	[[nodiscard]] std::byte *get() const noexcept { return memory_; }
	[[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
	explicit operator bool() const noexcept { return memory_ != nullptr; }

private:
	std::byte *memory_ = nullptr;
	std::size_t bytes_ = 0;
};

} // namespace nprdma::transport

#endif
