/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the user is told: that memory stays pinned, and why; and how much of it, at exit. */
#ifndef NPR_PRELOAD_REPORT_HPP
#define NPR_PRELOAD_REPORT_HPP

#include <atomic>
#include <array>
#include <cstddef>
#include <cstdint>
#include <infiniband/verbs.h>
#include <mutex>
#include <set>
#include <string>

namespace npr::preload {

/* Why a region is pinned. */
enum class because : std::uint8_t {
	nobody_asked, /* the policy leaves it */
	windows,      /* IBV_ACCESS_MW_BIND */
	zero_based,
	access,	      /* others, that this library does not know */
	object,	      /* something else of the program needs pinned memory: see device::memory */
	refused,      /* by the kernel */
	copied,	      /* unpinned, but used by what only takes pinned memory: a second, pinned region of it */
	count
};

[[nodiscard]] const char *text(because why) noexcept;

/* What is counted of the devices of one name, which is never freed. */
struct tally {
	struct count {
		std::atomic<std::uint64_t> regions, bytes;
	};

	void add(count &c, std::size_t bytes) noexcept
	{
		/* relaxed: counts */
		c.regions.fetch_add(1, std::memory_order_relaxed);
		c.bytes.fetch_add(bytes, std::memory_order_relaxed);
	}

	std::string name;
	count unpinned;
	std::array<count, static_cast<std::size_t>(because::count)> pinned;
	std::array<std::atomic<bool>, static_cast<std::size_t>(because::count)> said;
	std::atomic<bool> said_objects, said_odp;
	std::mutex mutex;
	std::set<std::string> left; /* what the user was told to be left to the provider */
};

/* Throws std::bad_alloc. */
[[nodiscard]] tally &tally_of(const ibv_context *context);

/* One line to standard error, as of printf(), after the device's name. errno stays. */
void say(const ibv_context *context, const char *format, ...) __attribute__((format(printf, 2, 3)));

} // namespace npr::preload

#endif
