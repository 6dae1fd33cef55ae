/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What "rdma resource show mr" and "rdma statistic show mr" say of unpinned regions, over the
 * same netlink socket, for who asks too often to start a program each time.
 */
#ifndef NPRDMA_DEMO_RDMA_SHOW_HPP
#define NPRDMA_DEMO_RDMA_SHOW_HPP

#include <linux/netlink.h>
#include <rdma/rdma_netlink.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace rdma_show
{

/* A region as its owner registered it; the keys that the kernel makes of it are left out. */
struct region {
	std::uint32_t device = 0; /* index; a device that comes back has another one */
	std::uint32_t mrn = 0, pid = 0;
	std::uint64_t length = 0;
	/* Pages, now */
	std::uint64_t resident = 0, writable = 0, held = 0, leased = 0;
	/* Since it was registered; not counted: it went between two questions */
	bool counted = false;
	std::uint64_t leases = 0, recalls_change = 0, recalls_memory = 0, recalls_budget = 0, recalls_age = 0,
		      overdue = 0;

	[[nodiscard]] std::uint64_t recalls() const noexcept
	{
		return recalls_change + recalls_memory + recalls_budget + recalls_age;
	}
};

class netlink
{
public:
	netlink() : fd_(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_RDMA)), buffer_(1 << 16)
	{
		if (fd_ < 0)
			throw std::system_error(errno, std::generic_category(), "netlink");
	}
	netlink(const netlink &) = delete;
	netlink &operator=(const netlink &) = delete;
	~netlink() { close(fd_); }

	/* Those of a device. None if there is no such device, or not any more. */
	[[nodiscard]] std::vector<region> regions(std::string_view device)
	{
		const auto index = index_of(device);
		std::vector<region> all;

		if (!index)
			return all;
		const bool shown = dump(RDMA_NLDEV_CMD_RES_MR_GET, {{RDMA_NLDEV_ATTR_DEV_INDEX, *index}},
					[&](bytes message) {
						for_each_mr(message, [&](bytes mr) {
							region r{.device = *index};

							if (read_resource(mr, r))
								all.push_back(r);
						});
					});
		const bool counted = dump(
		    RDMA_NLDEV_CMD_STAT_GET,
		    {{RDMA_NLDEV_ATTR_DEV_INDEX, *index}, {RDMA_NLDEV_ATTR_STAT_RES, RDMA_NLDEV_ATTR_RES_MR}},
		    [&](bytes message) { for_each_mr(message, [&](bytes mr) { read_counters(mr, all); }); });
		if (!shown || !counted)
			all.clear();
		return all;
	}

	/* The one of a process with this length; if there is none, all is 0. */
	[[nodiscard]] region region_of(std::string_view device, pid_t pid, std::uint64_t length)
	{
		for (const region &r : regions(device))
			if (r.pid == static_cast<std::uint32_t>(pid) && r.length == length)
				return r;
		return {};
	}

private:
	using bytes = std::span<const std::byte>;

	struct field {
		std::string_view name;
		std::uint64_t region::*value;
	};

	template <class T> static T get(bytes b) noexcept
	{
		T value{};

		std::memcpy(&value, b.data(), std::min(sizeof(value), b.size()));
		return value;
	}

	static std::string_view text(bytes b) noexcept
	{
		const std::string_view all(reinterpret_cast<const char *>(b.data()), b.size());

		return all.substr(0, all.find('\0'));
	}

	template <std::size_t n>
	static void set(region &r, const field (&fields)[n], std::string_view name,
			std::uint64_t value) noexcept
	{
		for (const field &f : fields)
			if (f.name == name)
				r.*f.value = value;
	}

	template <class F> static void for_each(bytes b, F f)
	{
		while (b.size() >= NLA_HDRLEN) {
			const auto head = get<nlattr>(b);

			if (head.nla_len < NLA_HDRLEN || head.nla_len > b.size())
				return;
			f(head.nla_type & NLA_TYPE_MASK, b.subspan(NLA_HDRLEN, head.nla_len - NLA_HDRLEN));
			b = b.subspan(std::min<std::size_t>(NLA_ALIGN(head.nla_len), b.size()));
		}
	}

	template <class F> static void for_each_mr(bytes message, F f)
	{
		for_each(message, [&](int type, bytes table) {
			if (type == RDMA_NLDEV_ATTR_RES_MR)
				for_each(table, [&](int entry, bytes mr) {
					if (entry == RDMA_NLDEV_ATTR_RES_MR_ENTRY)
						f(mr);
				});
		});
	}

	/* False: a pinned region, or a key of the kernel's. */
	static bool read_resource(bytes mr, region &r)
	{
		static constexpr field fields[] = {{"resident", &region::resident},
						   {"writable", &region::writable},
						   {"held", &region::held},
						   {"leased", &region::leased}};
		bool unpinned = false;

		for_each(mr, [&](int type, bytes value) {
			if (type == RDMA_NLDEV_ATTR_RES_MRN)
				r.mrn = get<std::uint32_t>(value);
			else if (type == RDMA_NLDEV_ATTR_RES_PID)
				r.pid = get<std::uint32_t>(value);
			else if (type == RDMA_NLDEV_ATTR_RES_MRLEN)
				r.length = get<std::uint64_t>(value);
			if (type != RDMA_NLDEV_ATTR_DRIVER)
				return;
			/* A name, maybe how to print it, and a value */
			std::string_view name;
			for_each(value, [&](int part, bytes content) {
				if (part == RDMA_NLDEV_ATTR_DRIVER_PRINT_TYPE)
					return;
				if (part == RDMA_NLDEV_ATTR_DRIVER_STRING && name.empty()) {
					name = text(content);
					return;
				}
				unpinned |= name == "memory" && text(content) == "unpinned";
				set(r, fields, name, get<std::uint64_t>(content));
				name = {};
			});
		});
		return unpinned && r.pid;
	}

	static void read_counters(bytes mr, std::vector<region> &all)
	{
		static constexpr field fields[] = {{"leases", &region::leases},
						   {"recalls_change", &region::recalls_change},
						   {"recalls_memory", &region::recalls_memory},
						   {"recalls_budget", &region::recalls_budget},
						   {"recalls_age", &region::recalls_age},
						   {"leases_overdue", &region::overdue}};
		std::uint32_t mrn = 0;
		bytes counters;

		for_each(mr, [&](int type, bytes value) {
			if (type == RDMA_NLDEV_ATTR_RES_MRN)
				mrn = get<std::uint32_t>(value);
			else if (type == RDMA_NLDEV_ATTR_STAT_HWCOUNTERS)
				counters = value;
		});
		const auto r =
		    std::find_if(all.begin(), all.end(), [mrn](const region &x) { return x.mrn == mrn; });
		if (r == all.end())
			return;
		for_each(counters, [&](int, bytes entry) {
			std::string_view name;
			std::uint64_t count = 0;

			for_each(entry, [&](int type, bytes value) {
				if (type == RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_NAME)
					name = text(value);
				else if (type == RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_VALUE)
					count = get<std::uint64_t>(value);
			});
			set(*r, fields, name, count);
		});
		r->counted = true;
	}

	std::optional<std::uint32_t> index_of(std::string_view device)
	{
		std::optional<std::uint32_t> found;

		dump(RDMA_NLDEV_CMD_GET, {}, [&](bytes message) {
			std::uint32_t index = 0;
			std::string_view name;

			for_each(message, [&](int type, bytes value) {
				if (type == RDMA_NLDEV_ATTR_DEV_INDEX)
					index = get<std::uint32_t>(value);
				else if (type == RDMA_NLDEV_ATTR_DEV_NAME)
					name = text(value);
			});
			if (name == device)
				found = index;
		});
		return found;
	}

	/* False: the kernel refused it, as it does for a device that has gone. */
	template <class F>
	bool dump(unsigned command, std::initializer_list<std::pair<std::uint16_t, std::uint32_t>> attributes,
		  F each)
	{
		const nlmsghdr head = {
		    .nlmsg_len =
			static_cast<std::uint32_t>(NLMSG_HDRLEN + attributes.size() * (NLA_HDRLEN + 4)),
		    .nlmsg_type = static_cast<std::uint16_t>(RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, command)),
		    .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP,
		    .nlmsg_seq = ++sequence_,
		    .nlmsg_pid = 0};
		std::byte request[NLMSG_HDRLEN + 4 * (NLA_HDRLEN + 4)]{};
		std::size_t length = NLMSG_HDRLEN;

		std::memcpy(request, &head, sizeof(head));
		for (const auto &[type, value] : attributes) {
			const nlattr a = {.nla_len = NLA_HDRLEN + 4, .nla_type = type};

			std::memcpy(request + length, &a, sizeof(a));
			std::memcpy(request + length + NLA_HDRLEN, &value, sizeof(value));
			length += NLA_HDRLEN + 4;
		}
		if (send(fd_, request, length, 0) != static_cast<ssize_t>(length))
			throw std::system_error(errno, std::generic_category(), "netlink");
		for (;;) {
			const ssize_t n = recv(fd_, buffer_.data(), buffer_.size(), 0);

			if (n < 0 && errno == EINTR)
				continue;
			if (n <= 0)
				throw std::system_error(errno, std::generic_category(), "netlink");
			bytes all(buffer_.data(), static_cast<std::size_t>(n));
			while (all.size() >= NLMSG_HDRLEN) {
				const auto h = get<nlmsghdr>(all);

				if (h.nlmsg_len < NLMSG_HDRLEN || h.nlmsg_len > all.size())
					throw std::system_error(EPROTO, std::generic_category(), "netlink");
				const bytes content = all.subspan(NLMSG_HDRLEN, h.nlmsg_len - NLMSG_HDRLEN);

				all =
				    all.subspan(std::min<std::size_t>(NLMSG_ALIGN(h.nlmsg_len), all.size()));
				/* What is left of a dump that was given up. */
				if (h.nlmsg_seq != sequence_)
					continue;
				if (h.nlmsg_type == NLMSG_DONE)
					return get<int>(content) >= 0;
				if (h.nlmsg_type == NLMSG_ERROR)
					return get<int>(content) >= 0;
				each(content);
			}
		}
	}

	int fd_;
	std::uint32_t sequence_ = 0;
	std::vector<std::byte> buffer_;
};

} // namespace rdma_show

#endif // NPRDMA_DEMO_RDMA_SHOW_HPP
