/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The owner of a file descriptor. */
#ifndef NPR_UNIQUE_FD_HPP
#define NPR_UNIQUE_FD_HPP

#include "world/uncancelled.hpp"

#include <unistd.h>
#include <utility>

namespace npr {

class unique_fd {
public:
	unique_fd() noexcept = default;
	explicit unique_fd(int fd) noexcept : fd_(fd) {}
	unique_fd(unique_fd &&o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
	unique_fd &operator=(unique_fd &&o) noexcept
	{
		std::swap(fd_, o.fd_);
		return *this;
	}
	~unique_fd()
	{
		const uncancelled here;

		if (fd_ >= 0)
			::close(fd_);
	}
	[[nodiscard]] int get() const noexcept { return fd_; }

private:
	int fd_ = -1;
};

} // namespace npr

#endif
