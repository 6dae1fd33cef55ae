/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "elf_file.hpp"

#include <elf.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <string_view>

namespace npr::run
{

namespace
{

/* How many bytes there are, of those asked for. */
std::size_t read_at(int fd, void *to, std::size_t size, std::uint64_t offset) noexcept
{
	std::size_t done = 0;

	if (offset > std::uint64_t{LONG_MAX} - size)
		return 0;
	while (done < size) {
		const ssize_t n =
		    pread(fd, static_cast<char *>(to) + done, size - done, static_cast<off_t>(offset + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			break;
		done += static_cast<std::size_t>(n);
	}
	return done;
}

/* The numbers of a file for machines of the other byte order have to be turned. */
template <std::unsigned_integral T> T number(T value, bool turned) noexcept
{
	if (!turned)
		return value;
	T other = 0;

	for (std::size_t i = 0; i < sizeof(T); i++)
		other = static_cast<T>(other | ((value >> 8 * i & 0xff) << 8 * (sizeof(T) - 1 - i)));
	return other;
}

template <class Header, class Segment>
std::optional<elf_file> read_headers(int fd, elf_file file, bool turned)
{
	Header header;

	if (read_at(fd, &header, sizeof(header), 0) != sizeof(header))
		return std::nullopt;
	file.machine = number(header.e_machine, turned);
	file.shared_object = number(header.e_type, turned) == ET_DYN;
	const std::uint64_t count = number(header.e_phnum, turned), first = number(header.e_phoff, turned);

	if (count && number(header.e_phentsize, turned) != sizeof(Segment))
		return std::nullopt;
	for (std::uint64_t i = 0; i < count; i++) {
		Segment segment;

		if (first > std::uint64_t{LONG_MAX} ||
		    read_at(fd, &segment, sizeof(segment), first + i * sizeof(segment)) != sizeof(segment))
			return std::nullopt;
		if (number(segment.p_type, turned) != PT_INTERP)
			continue;
		const std::uint64_t length = number(segment.p_filesz, turned);

		/* As the kernel demands it: a name with its end. */
		if (length < 2 || length > PATH_MAX)
			return std::nullopt;
		file.loader.resize(length);
		if (read_at(fd, file.loader.data(), length, number(segment.p_offset, turned)) != length ||
		    file.loader.back() != '\0')
			return std::nullopt;
		file.loader.resize(std::strlen(file.loader.c_str()));
		break;
	}
	return file;
}

} // namespace

std::optional<elf_file> read_elf(int fd)
{
	unsigned char id[EI_NIDENT];
	elf_file file;

	if (read_at(fd, id, sizeof(id), 0) != sizeof(id) || std::memcmp(id, ELFMAG, SELFMAG) ||
	    (id[EI_DATA] != ELFDATA2LSB && id[EI_DATA] != ELFDATA2MSB))
		return std::nullopt;
	file.byte_order = id[EI_DATA];
	const bool turned = (id[EI_DATA] == ELFDATA2LSB) != (std::endian::native == std::endian::little);

	switch (id[EI_CLASS]) {
	case ELFCLASS32:
		file.bits = 32;
		return read_headers<Elf32_Ehdr, Elf32_Phdr>(fd, file, turned);
	case ELFCLASS64:
		file.bits = 64;
		return read_headers<Elf64_Ehdr, Elf64_Phdr>(fd, file, turned);
	default:
		return std::nullopt;
	}
}

std::optional<std::string> read_script(int fd)
{
	/* The kernel looks no further either. */
	char begin[256];
	std::string_view line(begin, read_at(fd, begin, sizeof(begin), 0));

	if (!line.starts_with("#!"))
		return std::nullopt;
	line = line.substr(2, line.find('\n') - 2);
	line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
	line = line.substr(0, line.find_first_of(std::string_view(" \t\0", 3)));
	if (line.empty())
		return std::nullopt;
	return std::string(line);
}

} // namespace npr::run
