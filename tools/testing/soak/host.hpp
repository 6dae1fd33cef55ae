/* SPDX-License-Identifier: GPL-2.0 */
/* What happens to all of the host at once. */
#ifndef NPRDMA_SOAK_HOST_HPP
#define NPRDMA_SOAK_HOST_HPP

#include "cell.hpp"

#include <map>
#include <string>

namespace soak
{

/*
 * Sets the guest up for all kinds of memory, and knows how to trouble it. What an event
 * changes stays until another one, or calm(), changes it back. Set-up throws
 * std::runtime_error.
 */
class host
{
public:
	explicit host(std::uint64_t seed);
	~host();
	host(const host &) = delete;
	host &operator=(const host &) = delete;

	/* One event at random; counts it by its name. */
	void event();
	/* Devices and parameters as tests find them. */
	void calm();
	/* Takes one of the two devices away from its driver and gives it back. */
	void remove_device(void (*between)(void *), void *arg);
	[[nodiscard]] const std::map<std::string, std::uint64_t> &events() const { return events_; }

private:
	void swap_again();
	void use_zram(bool yes);
	void memory_block();
	void knob();

	random_source random_;
	std::map<std::string, std::uint64_t> events_;
	std::string swap_;
	bool zram_ = false;
};

inline constexpr const char *owners_group = "/sys/fs/cgroup/nprdma-soak";

} // namespace soak

#endif
