/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "policy.hpp"
#include "world/uncancelled.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace npr::preload {

std::size_t threshold()
{
	static const std::size_t bytes = [] {
		const char *s = std::getenv("NPRDMA_UNPINNED");
		char *end;

		if (!s || !*s)
			return std::size_t{0};
		errno = 0;
		const unsigned long long n = std::strtoull(s, &end, 0);
		if (*end || errno || *s == '-') {
			std::fprintf(stderr, "libnprdma-preload: NPRDMA_UNPINNED is not a number of bytes: %s\n", s);
			std::_Exit(64);
		}
		return static_cast<std::size_t>(n);
	}();

	return bytes;
}

bool ordered()
{
	static const bool yes = [] {
		const char *const s = std::getenv("NPRDMA_ORDERED");

		if (!s || !*s || !std::strcmp(s, "0"))
			return false;
		if (!std::strcmp(s, "1"))
			return true;
		std::fprintf(stderr, "libnprdma-preload: NPRDMA_ORDERED is 0 or 1, not %s\n", s);
		std::_Exit(64);
	}();

	return yes;
}

namespace {

const char *advice(int error)
{
	switch (error) {
	case ENOSPC:
		return "It has too few entries of its send queue, or its completion queue too many queue pairs. ";
	case ENOMEM:
		return "There is too little memory, or RLIMIT_MEMLOCK is too low. ";
	case EMFILE:
		return "RLIMIT_NOFILE is too low. ";
	default:
		return "";
	}
}

} // namespace

bool may_be_left(const ibv_context *context, const char *what, std::uint32_t number, int error)
{
	const npr::uncancelled here;
	const bool left = threshold();

	errno = error;
	std::fprintf(stderr, "libnprdma-preload: %s: %s %u cannot have unpinned memory: %m. %s%s\n",
		     ibv_get_device_name(context->device), what, number, advice(error),
		     left ? "It works with pinned memory only." :
			    "With NPRDMA_UNPINNED=BYTES it works with pinned memory.");
	errno = error;
	return left;
}

} // namespace npr::preload
