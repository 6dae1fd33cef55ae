/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "report.hpp"

#include "policy.hpp"
#include "world/uncancelled.hpp"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <unistd.h>
#include <utility>

namespace npr::preload {

namespace {

struct tallies {
	std::mutex mutex;
	std::deque<tally> of;
	pid_t process = 0; /* that has opened a device, and whose the counts are */
};

tallies &all_tallies()
{
	/* Never destroyed: see all(). */
	static tallies &t = *std::make_unique<tallies>().release();

	return t;
}

std::string with_unit(std::uint64_t bytes)
{
	static constexpr const char *units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
	double n = static_cast<double>(bytes);
	std::size_t u = 0;
	std::array<char, 40> text{};

	for (; n >= 1024 && u + 1 < std::size(units); ++u)
		n /= 1024;
	(void)std::snprintf(text.data(), text.size(), u ? "%.1f %s" : "%.0f %s", n, units[u]);
	return text.data();
}

void print(std::FILE *to, const char *what, const tally::count &c)
{
	if (const auto regions = c.regions.load(std::memory_order_relaxed))
		std::fprintf(to, "  %llu regions, %s in all: %s\n", static_cast<unsigned long long>(regions),
			     with_unit(c.bytes.load(std::memory_order_relaxed)).c_str(), what);
}

void report_to(std::FILE *to, const tallies &t)
{
	for (const tally &x : t.of) {
		std::fprintf(to, "libnprdma-preload: %s (%d) registered on %s:\n", program_invocation_short_name,
			     static_cast<int>(getpid()), x.name.c_str());
		print(to, "unpinned", x.unpinned);
		for (std::size_t k = 0; k < x.pinned.size(); ++k)
			print(to, (std::string("pinned: ") + text(static_cast<because>(k))).c_str(), x.pinned[k]);
	}
}

/* A process that has opened no device says nothing, and neither does a child of one that has, unless it opens one as well. */
[[gnu::destructor]] void report() noexcept
{
	try {
		tallies &t = all_tallies();
		const std::lock_guard lock(t.mutex);

		if (t.of.empty() || t.process != getpid() || !policy().report)
			return;
		const std::string &file = policy().report_file;
		std::FILE *const to = file.empty() ? stderr : std::fopen(file.c_str(), "ae");
		if (!to) {
			std::fprintf(stderr, "libnprdma-preload: %s cannot be written: %s\n", file.c_str(), std::strerror(errno));
			return;
		}
		report_to(to, t);
		if (to != stderr)
			(void)std::fclose(to);
	} catch (const std::exception &) {
		/* The program has ended, and this was to be told only. */
	}
}

} // namespace

const char *text(because why) noexcept
{
	switch (why) {
	case because::nobody_asked:
		return "NPRDMA_UNPINNED leaves it so";
	case because::windows:
		return "memory windows may be bound to it";
	case because::zero_based:
		return "its addresses begin at 0";
	case because::access:
		return "it has access flags that unpinned memory cannot have";
	case because::object:
		return "the program uses its device in a way that needs pinned memory";
	case because::refused:
		return "the kernel cannot serve it unpinned";
	case because::copied:
		return "what uses it takes only pinned memory";
	case because::device_memory:
		return "it is memory of the device";
	case because::dmabuf:
		return "it is a dmabuf";
	case because::null:
		return "it has no memory (ibv_alloc_null_mr())";
	case because::imported:
		return "another process has pinned it";
	case because::left:
		return "the device was left as it is";
	case because::count:
		break;
	}
	return "";
}

tally &tally_of(const ibv_context *context)
{
	tallies &t = all_tallies();
	const char *const name = ibv_get_device_name(context->device);
	const std::lock_guard lock(t.mutex);

	/* A child after fork() has registered nothing of what it finds here. */
	if (const pid_t process = getpid(); std::exchange(t.process, process) != process)
		for (tally &x : t.of)
			x.clear();
	for (tally &x : t.of)
		if (x.name == name)
			return x;
	t.of.emplace_back();
	t.of.back().name = name;
	return t.of.back();
}

void say(const ibv_context *context, const char *format, ...)
{
	const npr::uncancelled here;
	const int error = errno;
	std::array<char, 512> line{};
	std::va_list args;

	va_start(args, format);
	(void)std::vsnprintf(line.data(), line.size(), format, args);
	va_end(args);
	if (context)
		std::fprintf(stderr, "libnprdma-preload: %s: %s\n", ibv_get_device_name(context->device), line.data());
	else
		std::fprintf(stderr, "libnprdma-preload: %s\n", line.data());
	errno = error;
}

} // namespace npr::preload
