// SPDX-License-Identifier: GPL-2.0
#include "pages.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <system_error>

namespace soak
{

namespace
{

constexpr std::uint64_t page_size = 4096;

/* An entry of /proc/kpageflags or /proc/kpagecount. */
std::uint64_t of_frame(const char *path, std::uint64_t frame)
{
	std::uint64_t value;
	const int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (pread(fd, &value, sizeof(value), static_cast<off_t>(frame * sizeof(value))) != sizeof(value))
		throw std::system_error(errno, std::generic_category(), path);
	close(fd);
	return value;
}

} // namespace

std::vector<std::uint64_t> page_map(const void *p, std::size_t pages)
{
	const std::size_t bytes = pages * sizeof(std::uint64_t);
	std::vector<std::uint64_t> map(pages);
	/* Of the process that looks, which may be a child of who looked before. */
	const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	const ssize_t n =
	    pread(fd, map.data(), bytes,
		  static_cast<off_t>(reinterpret_cast<std::uintptr_t>(p) / page_size * sizeof(map[0])));

	if (n != static_cast<ssize_t>(bytes))
		throw std::system_error(errno, std::generic_category(), "/proc/self/pagemap");
	close(fd);
	return map;
}

std::size_t present_pages(const void *p, std::size_t pages)
{
	const auto map = page_map(p, pages);

	return static_cast<std::size_t>(
	    std::count_if(map.begin(), map.end(), [](std::uint64_t entry) { return entry >> 63 != 0; }));
}

bool is_expendable(std::uint64_t entry)
{
	constexpr std::uint64_t present = 1ULL << 63, frame_bits = (1ULL << 55) - 1;
	/*
	 * KPF_COMPOUND_HEAD and _TAIL, KPF_HUGE, KPF_ZERO_PAGE. Of no use is KPF_KSM, which 6.12
	 * sets for all anonymous pages.
	 */
	constexpr std::uint64_t unfit = 1ULL << 15 | 1ULL << 16 | 1ULL << 17 | 1ULL << 24;
	const std::uint64_t frame = entry & frame_bits;

	if (!(entry & present) || !frame)
		return false;
	return line_of(std::string(memory_blocks) + "/memory" + std::to_string(frame / memory_block_pages()) +
		       "/valid_zones") != "Movable" &&
	       !(of_frame("/proc/kpageflags", frame) & unfit) && of_frame("/proc/kpagecount", frame) == 1;
}

std::string line_of(const std::string &path)
{
	std::ifstream file(path);
	std::string line;

	std::getline(file, line);
	return line;
}

std::uint64_t memory_block_pages()
{
	return std::stoull(line_of(std::string(memory_blocks) + "/block_size_bytes"), nullptr, 16) /
	       page_size;
}

} // namespace soak
