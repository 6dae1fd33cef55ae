/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "area.hpp"

#include <fcntl.h>
#include <sys/mman.h>

namespace nprdma::far
{

area::~area()
{
	detach();
}

status area::prepare()
{
	const std::size_t size = mapped_bytes();

	frames = transport::descriptor(::memfd_create("nprdma-far", MFD_CLOEXEC));
	if (!frames || ::ftruncate(frames.get(), static_cast<off_t>(size)))
		return transport::failure(errno, "memory of a mapping");
	alias = transport::mapping(frames.get(), size);
	if (!alias)
		return transport::failure(errno, "frames of a mapping");
	const transport::descriptor zeros(::memfd_create("nprdma-far-pages", MFD_CLOEXEC));
	if (!zeros || ::ftruncate(zeros.get(), static_cast<off_t>(pages)))
		return transport::failure(errno, "page states of a mapping");
	states = transport::mapping(zeros.get(), pages);
	if (!states)
		return transport::failure(errno, "page states of a mapping");
	/* A child would find holes, which nobody fills there, and read zeros. */
	if (::madvise(alias.get(), size, MADV_DONTFORK))
		return transport::failure(errno, "frames of a mapping");
	if (status s = source->attach({alias.get(), size}); !s)
		return s;
	attached = true;

	/* Not to be touched before it is watched: a page that is larger than the system's needs an address
	 * that fits. */
	const std::size_t slack = options.fixed ? 0 : page_bytes - system_page;
	void *const p =
	    ::mmap(options.address, size + slack, PROT_NONE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (options.fixed ? MAP_FIXED : 0), -1, 0);
	if (p == MAP_FAILED)
		return transport::failure(errno, "addresses for a mapping");
	std::byte *const all = static_cast<std::byte *>(p);
	const std::size_t skip =
	    (page_bytes - reinterpret_cast<std::uintptr_t>(all) % page_bytes) % page_bytes;
	if (skip)
		(void)::munmap(all, skip);
	if (slack - skip)
		(void)::munmap(all + skip + size, slack - skip);
	base = all + skip;
	if (::mmap(base, size, PROT_NONE, MAP_SHARED | MAP_FIXED, frames.get(), 0) == MAP_FAILED ||
	    ::madvise(base, size, MADV_DONTFORK)) {
		const int code = errno;
		(void)::munmap(base, size);
		return transport::failure(code, "mapping");
	}
	return {};
}

void area::unmap_run(std::size_t page, std::size_t count) const noexcept
{
	(void)::madvise(page_address(page), count * page_bytes, MADV_DONTNEED);
}

void area::free_run(std::size_t page, std::size_t count) const noexcept
{
	(void)::fallocate(frames.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
			  static_cast<off_t>(page * page_bytes), static_cast<off_t>(count * page_bytes));
}

} // namespace nprdma::far
