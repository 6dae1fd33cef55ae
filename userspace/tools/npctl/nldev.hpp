/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the kernel says of RDMA devices, regions and queue pairs over rdma netlink. Whatever it
 * sends is looked at within its bounds; attributes of another size than theirs say nothing.
 */
#ifndef NPR_CTL_NLDEV_HPP
#define NPR_CTL_NLDEV_HPP

#include "world/unique_fd.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace npr::ctl
{

using bytes = std::span<const std::byte>;

struct device {
	std::uint32_t index = 0;
	std::string name, firmware, protocol;
	std::uint32_t ports = 0;
};

/* Who has an object: a process, which may be about to end (0), or a part of the kernel. */
struct owner {
	std::uint32_t pid = 0;
	std::string kernel;
};

/* An MR of an unpinned region: the one that its process registered, or a key that the kernel made of it. */
struct region {
	std::uint32_t number = 0; /* of the MR */
	owner whose;
	std::optional<std::uint32_t> pd;
	std::uint64_t id = 0; /* the same for all MRs of a region */
	std::uint64_t length = 0;
	/* Pages, now */
	std::uint64_t resident = 0, writable = 0, held = 0, leased = 0, huge = 0;
	/* Since it was registered; empty: it went before they were asked for */
	std::map<std::string, std::uint64_t> counters;

	[[nodiscard]] std::uint64_t count(const std::string &name) const
	{
		const auto c = counters.find(name);

		return c == counters.end() ? 0 : c->second;
	}
};

struct queue_pair {
	std::uint32_t number = 0;
	owner whose;
	std::optional<std::uint32_t> port, pd, remote;
	std::optional<std::uint8_t> type, state;
};

/* By number and port: each port has a QP1. */
using queue_pairs = std::map<std::pair<std::uint32_t, std::uint32_t>, queue_pair>;

/* The attributes of a message of each kind; a message that is not whole adds nothing of what is broken. */
void read_device(bytes message, std::vector<device> &);
void read_regions(bytes message, std::map<std::uint32_t, region> &);
/* Into the regions that are there. */
void read_counters(bytes message, std::map<std::uint32_t, region> &);
void read_queue_pairs(bytes message, queue_pairs &);

/* What one datagram of a dump came to. */
struct progress {
	bool over = false;
	int error = 0; /* of the kernel, positive */
};

/* Calls each with the attributes of each message that answers the request. Throws if it is no whole netlink.
 */
progress read_datagram(bytes datagram, std::uint32_t sequence, const std::function<void(bytes)> &each);

/* Throws std::system_error where the kernel cannot be asked. */
class nldev
{
public:
	nldev();
	[[nodiscard]] std::vector<device> devices();
	/* Nothing: the device has gone. */
	[[nodiscard]] std::optional<std::vector<region>> regions(const device &);
	[[nodiscard]] std::optional<std::vector<queue_pair>> queue_pairs(const device &);

private:
	/* The kernel's error, or 0. */
	int dump(unsigned command, std::initializer_list<std::pair<std::uint16_t, std::uint32_t>> attributes,
		 const std::function<void(bytes)> &each);

	unique_fd socket_;
	std::uint32_t sequence_ = 0;
	std::vector<std::byte> buffer_;
};

} // namespace npr::ctl

#endif
