/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * userfaultfd(2) as this library uses it. The C library's headers may be older than the kernel, so what they
 * lack of linux/userfaultfd.h is here.
 */
#ifndef NPRDMA_FAR_UFFD_HPP
#define NPRDMA_FAR_UFFD_HPP

#include "owners.hpp"

#include <cstdint>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>

namespace nprdma::far
{

namespace abi
{

constexpr std::uint64_t feature_poison = 1 << 14;
constexpr std::uint64_t continue_mode_wp = 1 << 1;
constexpr std::uint64_t poison_mode_dontwake = 1 << 0;

struct poison {
	uffdio_range range;
	std::uint64_t mode;
	std::int64_t updated;
};
constexpr unsigned long ioctl_poison = _IOWR(UFFDIO, 0x08, poison);

} // namespace abi

/* Functions return 0 or a positive errno value. Ranges are multiples of the system's page. */
class uffd
{
public:
	/* @protection: if the kernel can (CONFIG_PTE_MARKER_UFFD_WP). */
	static transport::result<uffd> open(bool user_only, bool protection);

	[[nodiscard]] int fd() const noexcept { return fd_.get(); }
	[[nodiscard]] bool user_only() const noexcept { return user_only_; }
	[[nodiscard]] bool can_protect() const noexcept { return protects_; }

	/* Missing and minor faults, and with @protect writes to protected pages, of shared memory come to us.
	 */
	[[nodiscard]] int watch(void *addr, std::size_t bytes, bool protect) const noexcept;
	/* Map what the memfd has, and wake who waits. A part may be mapped already. */
	[[nodiscard]] int map(void *addr, std::size_t bytes, bool protect) const noexcept;
	[[nodiscard]] int protect(void *addr, std::size_t bytes, bool on) const noexcept;
	/* Whoever touches it gets SIGBUS; who waits there is not woken. */
	[[nodiscard]] int poison(void *addr, std::size_t bytes) const noexcept;
	void wake(void *addr, std::size_t bytes) const noexcept;
	/* False: there is none now. */
	[[nodiscard]] bool next(uffd_msg &m) const noexcept;

private:
	uffd(transport::descriptor fd, bool user_only, bool protects) noexcept
	    : fd_(std::move(fd)), user_only_(user_only), protects_(protects)
	{
	}

	transport::descriptor fd_;
	bool user_only_, protects_;
};

} // namespace nprdma::far

#endif
