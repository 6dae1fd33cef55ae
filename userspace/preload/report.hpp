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
	/* What is not the process's own memory, of which nobody is told but by the report. */
	device_memory,
	dmabuf,
	null,	  /* of ibv_alloc_null_mr() */
	imported, /* another process's, which is pinned */
	left,	  /* its device is left as it is */
	count
};

/* What the user is told once of a device. */
enum class once : std::uint8_t {
	objects,       /* that need pinned memory */
	on_demand,     /* refused */
	unpinned,      /* IBV_ACCESS_UNPINNED, refused */
	no_twin,       /* there is no memory for it */
	whole_twin,    /* there cannot be one */
	rereg_peers,   /* ibv_rereg_mr(), refused: what peers may use; */
	rereg_import,  /* another process's; */
	rereg_named,   /* of IBV_ACCESS_UNPINNED; */
	rereg_pinned,  /* what is pinned, to what is not */
	opcode,	       /* of a work request, refused */
	count
};

[[nodiscard]] const char *text(because why) noexcept;

/* What is counted of the devices of one name, which is never freed. */
struct tally {
	struct count {
		/* relaxed: counts */
		void clear() noexcept
		{
			regions.store(0, std::memory_order_relaxed);
			bytes.store(0, std::memory_order_relaxed);
		}

		std::atomic<std::uint64_t> regions, bytes;
	};

	/* Is it to be told now? */
	[[nodiscard]] bool first(once what) noexcept { return !told[static_cast<std::size_t>(what)].exchange(true); }
	void add(because why, std::size_t bytes) noexcept { add(pinned[static_cast<std::size_t>(why)], bytes); }
	void add(count &c, std::size_t bytes) noexcept
	{
		/* relaxed: counts */
		c.regions.fetch_add(1, std::memory_order_relaxed);
		c.bytes.fetch_add(bytes, std::memory_order_relaxed);
	}

	/* What was told stays so. */
	void clear() noexcept
	{
		unpinned.clear();
		for (count &c : pinned)
			c.clear();
	}

	std::string name;
	count unpinned;
	std::array<count, static_cast<std::size_t>(because::count)> pinned;
	std::array<std::atomic<bool>, static_cast<std::size_t>(because::count)> said;
	std::array<std::atomic<bool>, static_cast<std::size_t>(once::count)> told;
	std::mutex mutex;
	std::set<std::string> left; /* what the user was told to be left to the provider */
};

/* Throws std::bad_alloc. */
[[nodiscard]] tally &tally_of(const ibv_context *context);

/* One line to standard error, as of printf(), after the device's name. errno stays. */
void say(const ibv_context *context, const char *format, ...) __attribute__((format(printf, 2, 3)));

} // namespace npr::preload

#endif
