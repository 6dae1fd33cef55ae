/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "mapping.hpp"

#include "size_class.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <linux/mman.h>
#include <optional>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>

namespace npra {
namespace {

namespace api = nprdma::alloc;

constexpr std::size_t huge = std::size_t{2} << 20;

/* mbind(2), for which libnuma would be one more dependency. */
void place(std::byte *begin, std::size_t size, const api::options &how)
{
	/* MPOL_PREFERRED, MPOL_BIND, MPOL_INTERLEAVE */
	const int mode = how.numa == api::numa_policy::preferred ? 1 : how.numa == api::numa_policy::bind ? 2 : 3;
	const unsigned long nodes = how.numa_nodes;

	/* The kernel looks at one bit less than it is told. */
	if (syscall(SYS_mbind, begin, size, mode, &nodes, 8 * sizeof(nodes) + 1, 0))
		fail(how.name + ": mbind() to the nodes whose bits numa_nodes = " + std::to_string(how.numa_nodes) + " has");
}

/* Bytes in memory of whole pages, or nothing, and errno says why. No memory is needed for it. */
[[nodiscard]] std::optional<std::size_t> in_memory(std::byte *begin, std::size_t size) noexcept
{
	std::array<unsigned char, 4096> pages;
	std::size_t bytes = 0;

	for (std::size_t i = 0; i < size; i += pages.size() * page) {
		const std::size_t n = std::min(pages.size() * page, size - i);
		if (mincore(begin + i, n, pages.data()))
			return {};
		bytes += page * static_cast<std::size_t>(
			std::count_if(pages.begin(), pages.begin() + static_cast<std::ptrdiff_t>(n / page),
				      [](unsigned char c) { return c & 1; }));
	}
	return bytes;
}

} // namespace

void fail(const std::string &what)
{
	throw std::system_error(errno, std::generic_category(), what);
}

unique_fd::~unique_fd()
{
	if (fd_ >= 0)
		(void)close(fd_);
}

mapping::~mapping()
{
	if (!bytes_.empty())
		(void)munmap(bytes_.data(), bytes_.size());
}

mapping mapping::zeros(std::size_t size, const char *what)
{
	void *const p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		fail(what);
	return {p, size};
}

backing::backing(const api::options &how)
    : page_(how.pages == api::page_size::huge ? huge : npra::page)
{
	const bool hugetlb = how.pages == api::page_size::huge;
	/* So that huge pages fit, whoever makes them. */
	const std::size_t size = round_up(how.capacity, hugetlb ? huge : npra::page), room = size + huge;

	if (!how.capacity || how.capacity > max_block)
		throw api::bad_size(how.name + ": an arena cannot have " + std::to_string(how.capacity) + " bytes");
	void *const p = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		fail(how.name + ": reserving " + std::to_string(size) + " bytes of addresses");
	reserved_ = mapping(p, room);
	const auto first = reinterpret_cast<std::uintptr_t>(p);
	std::byte *const begin = reserved_.bytes().data() + (round_up(first, huge) - first);
	bytes_ = {begin, size};

	if (hugetlb) {
		/* All are reserved here, so that there is an error here and no SIGBUS when they are touched. */
		const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_2MB | MAP_FIXED;
		if (mmap(begin, size, PROT_NONE, flags, -1, 0) == MAP_FAILED)
			fail(how.name + ": mapping " + std::to_string(size) +
			     " bytes of huge pages; /proc/sys/vm/nr_hugepages says how many there are");
	}
	if (how.pages == api::page_size::transparent && madvise(begin, size, MADV_HUGEPAGE))
		fail(how.name + ": transparent huge pages");
	if (how.numa != api::numa_policy::none)
		place(begin, size, how);
}

backing::backing(std::span<std::byte> given) : page_(npra::page)
{
	/* Blocks are whole lines, and jemalloc works with whole pages. */
	const auto address = reinterpret_cast<std::uintptr_t>(given.data());
	const std::uintptr_t begin = round_up(address, npra::page);
	const std::uintptr_t end = (address + given.size()) & ~(npra::page - 1);

	if (given.empty() || end <= begin || end - begin > max_block)
		throw api::bad_size("memory of " + std::to_string(given.size()) + " bytes has no whole page");
	bytes_ = given.subspan(begin - address, end - begin);
}

bool backing::allow(std::byte *begin, std::size_t size, bool allowed) const noexcept
{
	return !ours() || !mprotect(begin, size, allowed ? PROT_READ | PROT_WRITE : PROT_NONE);
}

std::size_t backing::drop(std::byte *begin, std::size_t size) const noexcept
{
	const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(begin);
	const std::uintptr_t first = round_up(address, page_), end = (address + size) & ~(page_ - 1);

	/*
	 * What the caller's memory is we do not know: zeros might not come back. A huge page that is given back
	 * is not reserved any more.
	 */
	if (!ours() || page_ != npra::page || end <= first)
		return 0;
	std::byte *const from = begin + (first - address);
	const std::size_t there = in_memory(from, end - first).value_or(0);
	return madvise(from, end - first, MADV_DONTNEED) ? 0 : there;
}

void backing::populate(std::byte *begin, std::size_t size) const
{
	if (madvise(begin, size, MADV_POPULATE_WRITE))
		fail("touching " + std::to_string(size) + " bytes");
}

std::size_t backing::resident() const
{
	const auto bytes = in_memory(begin(), size());
	if (!bytes)
		fail("mincore()");
	return *bytes;
}

} // namespace npra
