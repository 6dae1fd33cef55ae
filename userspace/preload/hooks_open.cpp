/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A libibverbs that this library does not see: one that is linked into the program or into a library of it, that is
 * loaded with RTLD_DEEPBIND, or whose functions were looked up with dlvsym(). What it registers stays pinned, and the
 * user is told so when it opens a device, which it does by the C library's open().
 */
/* It has an open() of its own, inline. */
#undef _FORTIFY_SOURCE
#include "real.hpp"
#include "registry.hpp"
#include "report.hpp"

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace npr::preload {

namespace {

thread_local unsigned ours;
std::atomic<bool> told{false};

using open_fn = int(const char *path, int flags, ...);
/* As others before the first call, which may come in a signal handler. Null before our constructors: then by the kernel. */
open_fn *const next_open = reinterpret_cast<open_fn *>(dlsym(RTLD_NEXT, "open"));
open_fn *const next_open64 = reinterpret_cast<open_fn *>(dlsym(RTLD_NEXT, "open64"));

void look_at(const char *path)
{
	constexpr char devices[] = "/dev/infiniband/uverbs";

	if (ours || std::strncmp(path, devices, sizeof(devices) - 1) || told.exchange(true, std::memory_order_relaxed))
		return;
	say(nullptr, "a libibverbs that this library does not see opens %s: what it registers stays pinned", path);
}

/* Is there a third argument? */
bool has_mode(int flags)
{
	return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE;
}

int open_by(open_fn *next, const char *path, int flags, mode_t mode)
{
	const int fd = next ? next(path, flags, mode) : static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));

	/* Not a path that the kernel could not read, or has not: it is not asked for more than an error. */
	if (fd >= 0 || (errno != EFAULT && errno != EINVAL))
		look_at(path);
	return fd;
}

} // namespace

opening::opening() noexcept
{
	++ours;
}

opening::~opening()
{
	--ours;
}

} // namespace npr::preload

using namespace npr::preload;

NPR_EXPORT int open(const char *path, int flags, ...)
{
	std::va_list args;

	va_start(args, flags);
	const mode_t mode = has_mode(flags) ? va_arg(args, mode_t) : 0;
	va_end(args);
	return open_by(next_open, path, flags, mode);
}

NPR_EXPORT int open64(const char *path, int flags, ...)
{
	std::va_list args;

	va_start(args, flags);
	const mode_t mode = has_mode(flags) ? va_arg(args, mode_t) : 0;
	va_end(args);
	return open_by(next_open64, path, flags | O_LARGEFILE, mode);
}
