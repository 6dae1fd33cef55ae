/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The command line. */
#ifndef NP_PERF_OPTIONS_HPP
#define NP_PERF_OPTIONS_HPP

#include "test.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace perf
{

struct options {
	test what; /* but for the mode and what a session adds */
	std::vector<mode> modes;
	std::vector<std::uint64_t> sizes;
	std::uint64_t iterations = 0; /* 0: --duration says how long */
	double duration = 0;          /* seconds */
	double warm = 0;              /* seconds */
	int rounds = 5;
	bool histogram = false;
	std::string json;

	std::string host; /* empty: both ends are here */
	std::uint16_t port = 18525;
	bool listens = false;
	device_choice device, target_device;
	std::string preload;

	/* The processes of a session. */
	int serve = -1, work = -1, connection = -1;
};

/* The message is for the user; @status 0 if it is what was asked for (--help). */
struct usage_error : std::runtime_error {
	usage_error(const std::string &what, int exit_status) : std::runtime_error(what), status(exit_status)
	{
	}
	int status;
};

[[nodiscard]] options parse(int argc, const char *const *argv);

} // namespace perf

#endif // NP_PERF_OPTIONS_HPP
