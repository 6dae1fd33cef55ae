/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Exceptions of constructors, which the C API makes errno values of. */
#ifndef NPR_ERRORS_HPP
#define NPR_ERRORS_HPP

#include "world/unique_fd.hpp"

#include <cerrno>
#include <system_error>

namespace npr {

[[noreturn]] inline void fail(int error, const char *what)
{
	throw std::system_error(error, std::generic_category(), what);
}

[[nodiscard]] inline unique_fd checked(int fd, const char *what)
{
	if (fd < 0)
		fail(errno, what);
	return unique_fd(fd);
}

} // namespace npr

#endif
