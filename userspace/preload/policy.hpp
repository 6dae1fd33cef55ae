/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the environment and the host's file say: which memory is unpinned, and how it is used. */
#ifndef NPR_PRELOAD_POLICY_HPP
#define NPR_PRELOAD_POLICY_HPP

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace npr::preload {

struct settings {
	enum class unpin { all, remote, odp, none };
	/* A program that asks for direct verbs has pinned memory, or is told that there are none; automatic: see hooks_direct.cpp. */
	enum class direct { automatic, pinned, hidden };

	unpin which = unpin::all;   /* remote: what peers may use; odp: what asks for on-demand paging */
	std::size_t at_least = 0;   /* bytes of a region */
	bool ordered = false;	    /* WRITEs land in order, for peers that poll their memory */
	bool leases = true;	    /* memory in use may be leased */
	direct direct_verbs = direct::automatic;
	bool report = false;	    /* at exit */
	std::string report_file;    /* empty: standard error */

	/* Some regions stay pinned because somebody has said so. */
	[[nodiscard]] bool partial() const noexcept { return which != unpin::all || at_least; }
};

/*
 * Sets what is called @name, in lower case and without the environment's NPRDMA_, to @value. Otherwise
 * what is wrong with it.
 */
[[nodiscard]] std::optional<std::string> assign(settings &s, std::string_view name, std::string_view value);
/* The lines of a file, "name = value", "#" and what follows left out. Otherwise the first line that is wrong, and why. */
[[nodiscard]] std::optional<std::string> assign_lines(settings &s, std::string_view lines);

/* Of this process. What is wrong ends it with status 64, and a message. */
[[nodiscard]] const settings &policy();

/* Are WRITEs of queue pairs that are made now to land in order: by settings::ordered, or because of order_writes()? */
[[nodiscard]] bool ordered();
/* The program uses what polls memory: see hooks_rsocket.cpp. */
void order_writes() noexcept;

} // namespace npr::preload

#endif
