/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The program's ioctl(), which is found before that of libc. */
#include "fake_verbs.hpp"

#include <cstdarg>
#include <rdma/rdma_user_ioctl.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

extern "C" __attribute__((visibility("default"))) int ioctl(int fd, unsigned long request, ...) noexcept
{
	va_list args;

	va_start(args, request);
	void *const arg = va_arg(args, void *);
	va_end(args);
	if (request == RDMA_VERBS_IOCTL)
		return fake_ioctl(fd, arg);
	return static_cast<int>(syscall(SYS_ioctl, fd, request, arg));
}
