/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A program that has no descriptors left to accept with, when a test says so. Of one source of a program. */
#ifndef NPRDMA_TRANSPORT_TESTS_NO_DESCRIPTORS_HPP
#define NPRDMA_TRANSPORT_TESTS_NO_DESCRIPTORS_HPP

#include <atomic>
#include <cerrno>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace
{
std::atomic<bool> no_descriptors = false;
std::atomic<unsigned> accepts = 0;
} // namespace

/* The program's own, which is found before that of libc. */
extern "C" __attribute__((visibility("default"))) int accept4(int fd, sockaddr *of, socklen_t *bytes,
							      int flags)
{
	accepts++;
	if (no_descriptors) {
		errno = EMFILE;
		return -1;
	}
	return static_cast<int>(::syscall(SYS_accept4, fd, of, bytes, flags));
}

#endif
