/* SPDX-License-Identifier: GPL-2.0 */
/* What happens to all of the host at once. */
#ifndef NPRDMA_SOAK_HOST_HPP
#define NPRDMA_SOAK_HOST_HPP

#include "cell.hpp"

#include <string>

namespace soak
{

/*
 * Sets the guest up for all kinds of memory, and knows how to trouble it. What an event
 * changes stays until another one, or calm(), changes it back. Set-up throws
 * std::runtime_error.
 */
/* Says so when an event takes long, for whom has to find out where the time of a run went. */
class stopwatch
{
public:
	explicit stopwatch(kind k) : kind_(k), begin_(np_now_ms()) {}
	~stopwatch();
	stopwatch(const stopwatch &) = delete;
	stopwatch &operator=(const stopwatch &) = delete;

private:
	kind kind_;
	std::uint64_t begin_;
};

class host
{
public:
	/* Without leases: to see what then never happens. */
	host(std::uint64_t seed, tally &count, link_state &link, bool leases);
	~host();
	host(const host &) = delete;
	host &operator=(const host &) = delete;

	/* One event at random. */
	void event();
	/* Devices and parameters as tests find them. */
	void calm();
	/* Takes one of the two devices away, by its driver or as a whole, and gives it back. */
	void remove_device(kind how, void (*between)(void *), void *arg);

private:
	/* True if it happened. */
	bool happens(kind k);
	bool knob(kind k, np_hca_register what, std::uint64_t value);
	bool lose(unsigned device, std::uint64_t one_in);
	bool reclaim();
	bool limit();
	bool swap_again();
	bool use_zram(bool yes);
	bool cpu_away();
	bool balance();
	bool merge();
	bool memory_block();
	bool shorten_leases();
	bool want_leases();

	random_source random_;
	tally &count_;
	link_state &link_;
	const bool leases_;
	bool loses_[2] = {};
	deck<kind> events_;
	std::string swap_;
	bool zram_ = false;
	/* Owners say that READs are executed behind WRITEs. */
	bool ordered_ = true;
	/* The kernel's counters when it was turned on; it counts when it did something. */
	long balanced_ = 0, merged_ = 0;
};

/* True if the kernel took it; what it refuses now it may take later. */
bool put(const std::string &path, const std::string &text);
/* Nobody can write in frozen_directory, or all who wait go on. */
void freeze(bool yes);

inline constexpr const char *owners_group = "/sys/fs/cgroup/nprdma-soak";

} // namespace soak

#endif
