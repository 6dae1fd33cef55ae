/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What a program can find out about the machine it runs on: counters of
 * /proc, and properties of the emulated HCAs of a guest of scripts/vm.
 */
#ifndef NPRDMA_DEMO_GUEST_HPP
#define NPRDMA_DEMO_GUEST_HPP

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>

namespace guest
{

/* The number after @name in a file of lines "name value" or "name: value kB"; 0 without such a line. */
[[nodiscard]] inline std::uint64_t number_of(const std::string &file, std::string_view name)
{
	std::ifstream in(file);

	for (std::string line; std::getline(in, line);) {
		if (!line.starts_with(name))
			continue;
		const std::size_t end = line[name.size()] == ':' ? name.size() + 1 : name.size();
		if (line[end] == ' ' || line[end] == '\t')
			return std::strtoull(line.c_str() + end, nullptr, 10);
	}
	return 0;
}

/* A property of an emulated HCA; nothing if this is not such a guest. */
[[nodiscard]] inline std::optional<std::uint64_t> hca_property(const std::string &hca,
							       const std::string &name)
{
	const char *path = std::getenv("NPRDMA_CTL");
	const std::string question = "get " + hca + " " + name;
	sockaddr_un addr{};
	char answer[256];
	ssize_t n = -1;

	if (!path || std::strlen(path) >= sizeof(addr.sun_path))
		return std::nullopt;
	addr.sun_family = AF_UNIX;
	std::strcpy(addr.sun_path, path);
	const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return std::nullopt;
	if (!connect(fd, reinterpret_cast<const sockaddr *>(&addr), sizeof(addr)) &&
	    send(fd, question.data(), question.size(), MSG_NOSIGNAL) > 0)
		n = recv(fd, answer, sizeof(answer) - 1, 0);
	close(fd);
	if (n < 4)
		return std::nullopt;
	answer[n] = 0;
	if (std::strncmp(answer, "ok ", 3) != 0)
		return std::nullopt;
	return std::strtoull(answer + 3, nullptr, 10);
}

} // namespace guest

#endif // NPRDMA_DEMO_GUEST_HPP
