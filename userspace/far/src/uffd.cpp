/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "uffd.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

namespace nprdma::far
{

namespace
{

uffdio_range range_of(void *addr, std::size_t bytes) noexcept
{
	return {reinterpret_cast<std::uintptr_t>(addr), bytes};
}

/* All faults, by either way that the kernel has to allow it, or those of user code. */
transport::descriptor open_any(bool &user_only) noexcept
{
	constexpr int flags = O_CLOEXEC | O_NONBLOCK;

	if (!user_only) {
		transport::descriptor fd(static_cast<int>(::syscall(SYS_userfaultfd, flags)));
		if (fd)
			return fd;
		if (const transport::descriptor device(::open("/dev/userfaultfd", O_RDWR | O_CLOEXEC));
		    device)
			if ((fd = transport::descriptor(::ioctl(device.get(), _IO(UFFDIO, 0x00), flags))))
				return fd;
	}
	user_only = true;
	return transport::descriptor(
	    static_cast<int>(::syscall(SYS_userfaultfd, flags | UFFD_USER_MODE_ONLY)));
}

} // namespace

transport::result<uffd> uffd::open(bool user_only, bool protection)
{
	transport::descriptor fd = open_any(user_only);

	if (!fd)
		return transport::failure(errno, "userfaultfd: not in this kernel, or not allowed (sysctl "
						 "vm.unprivileged_userfaultfd)");
	uffdio_api api{};
	constexpr std::uint64_t needed =
	    UFFD_FEATURE_MINOR_SHMEM | UFFD_FEATURE_MISSING_SHMEM | abi::feature_poison;
	for (const std::uint64_t more : {protection ? UFFD_FEATURE_WP_HUGETLBFS_SHMEM : 0, 0}) {
		api = {};
		api.api = UFFD_API;
		api.features = needed | more;
		if (::ioctl(fd.get(), UFFDIO_API, &api) == 0)
			return uffd(std::move(fd), user_only, more != 0);
	}
	return transport::error{ENOSYS,
				"userfaultfd: this kernel has no minor faults of shared memory, or no poison "
				"(Linux 6.6 and later have)"};
}

int uffd::watch(void *addr, std::size_t bytes, bool protect) const noexcept
{
	uffdio_register r{};

	r.range = range_of(addr, bytes);
	r.mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR |
		 (protect ? UFFDIO_REGISTER_MODE_WP : 0);
	return ::ioctl(fd_.get(), UFFDIO_REGISTER, &r) ? errno : 0;
}

int uffd::map(void *addr, std::size_t bytes, bool protect) const noexcept
{
	static const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
	std::size_t done = 0;
	bool existed = false;

	while (done < bytes) {
		uffdio_continue c{};

		c.range = range_of(static_cast<char *>(addr) + done, bytes - done);
		c.mode = protect ? abi::continue_mode_wp : 0;
		if (::ioctl(fd_.get(), UFFDIO_CONTINUE, &c) == 0) {
			done = bytes;
		} else if (errno == EEXIST || errno == EAGAIN) {
			/* It says how far it got, or why not at all. EAGAIN by itself: the address space
			 * changes; again. */
			const bool is = errno == EEXIST;
			if (c.mapped > 0)
				done += static_cast<std::size_t>(c.mapped);
			else if (is || c.mapped == -EEXIST) {
				done += page;
				existed = true;
			}
		} else {
			return errno;
		}
	}
	if (existed)
		wake(addr, bytes);
	return 0;
}

int uffd::protect(void *addr, std::size_t bytes, bool on) const noexcept
{
	uffdio_writeprotect w{};

	w.range = range_of(addr, bytes);
	w.mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0;
	while (::ioctl(fd_.get(), UFFDIO_WRITEPROTECT, &w))
		if (errno != EAGAIN)
			return errno;
	return 0;
}

int uffd::poison(void *addr, std::size_t bytes) const noexcept
{
	static const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
	int error = 0;

	for (std::size_t done = 0; done < bytes;) {
		abi::poison p{};

		p.range = range_of(static_cast<char *>(addr) + done, bytes - done);
		p.mode = abi::poison_mode_dontwake;
		if (::ioctl(fd_.get(), abi::ioctl_poison, &p) == 0)
			break;
		if (p.updated > 0) {
			done += static_cast<std::size_t>(p.updated);
		} else if (errno != EAGAIN) {
			error = errno;
			done += page;
		}
	}
	return error;
}

void uffd::wake(void *addr, std::size_t bytes) const noexcept
{
	uffdio_range r = range_of(addr, bytes);

	(void)::ioctl(fd_.get(), UFFDIO_WAKE, &r);
}

bool uffd::next(uffd_msg &m) const noexcept
{
	ssize_t n;

	do
		n = ::read(fd_.get(), &m, sizeof(m));
	while (n < 0 && errno == EINTR);
	return n == static_cast<ssize_t>(sizeof(m));
}

} // namespace nprdma::far
