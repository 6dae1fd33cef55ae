/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "nldev.hpp"

#include <linux/netlink.h>
#include <rdma/rdma_netlink.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>

namespace npr::ctl
{

namespace
{

/* More than the kernel ever puts into one datagram of a dump. */
constexpr std::size_t datagram_size = 1 << 18;

[[noreturn]] void fail(int error, const char *what)
{
	throw std::system_error(error, std::generic_category(), what);
}

template <class T> T get(bytes b) noexcept
{
	T value{};

	std::memcpy(&value, b.data(), std::min(sizeof(value), b.size()));
	return value;
}

/* Stops where an attribute is not whole. */
template <class F> void for_each(bytes b, F f)
{
	while (b.size() >= NLA_HDRLEN) {
		const auto head = get<nlattr>(b);

		if (head.nla_len < NLA_HDRLEN || head.nla_len > b.size())
			return;
		f(head.nla_type & NLA_TYPE_MASK, b.subspan(NLA_HDRLEN, head.nla_len - NLA_HDRLEN));
		b = b.subspan(std::min<std::size_t>(NLA_ALIGN(head.nla_len), b.size()));
	}
}

/* The entries of a table in a message, each a set of attributes. */
template <class F> void for_each_entry(bytes message, int table, int entry, F f)
{
	for_each(message, [&](int type, bytes content) {
		if (type == table)
			for_each(content, [&](int inner, bytes attributes) {
				if (inner == entry)
					f(attributes);
			});
	});
}

template <class T> std::optional<T> number(bytes b) noexcept
{
	if (b.size() != sizeof(T))
		return std::nullopt;
	return get<T>(b);
}

template <class T> void set(T &to, bytes b) noexcept
{
	to = number<T>(b).value_or(to);
}

template <class T> void set(std::optional<T> &to, bytes b) noexcept
{
	if (const auto n = number<T>(b))
		to = n;
}

std::string_view text(bytes b) noexcept
{
	const std::string_view all(reinterpret_cast<const char *>(b.data()), b.size());

	return all.substr(0, all.find('\0'));
}

bool set_owner(owner &whose, int type, bytes value)
{
	if (type == RDMA_NLDEV_ATTR_RES_PID)
		set(whose.pid, value);
	else if (type == RDMA_NLDEV_ATTR_RES_KERN_NAME)
		whose.kernel = text(value);
	else
		return false;
	return true;
}

/* What nprdma says of an MR, as of an attribute of its driver. False: the memory is pinned. */
bool read_driver(bytes table, region &r)
{
	static constexpr std::pair<std::string_view, std::uint64_t region::*> fields[] = {
	    {"region", &region::id}, {"resident", &region::resident}, {"writable", &region::writable},
	    {"held", &region::held}, {"leased", &region::leased},     {"huge", &region::huge}};
	bool unpinned = false;
	std::string_view name;

	/* A name, maybe how to print what follows, and a value */
	for_each(table, [&](int type, bytes value) {
		if (type == RDMA_NLDEV_ATTR_DRIVER_PRINT_TYPE)
			return;
		if (name.empty()) {
			if (type == RDMA_NLDEV_ATTR_DRIVER_STRING)
				name = text(value);
			return;
		}
		if (type == RDMA_NLDEV_ATTR_DRIVER_STRING)
			unpinned |= name == "memory" && text(value) == "unpinned";
		if (type == RDMA_NLDEV_ATTR_DRIVER_U64)
			for (const auto &[field, member] : fields)
				if (name == field)
					set(r.*member, value);
		name = {};
	});
	return unpinned;
}

} // namespace

void read_device(bytes message, std::vector<device> &all)
{
	device d;
	bool known = false;

	for_each(message, [&](int type, bytes value) {
		switch (type) {
		case RDMA_NLDEV_ATTR_DEV_INDEX:
			known = value.size() == sizeof(d.index);
			set(d.index, value);
			break;
		case RDMA_NLDEV_ATTR_DEV_NAME:
			d.name = text(value);
			break;
		case RDMA_NLDEV_ATTR_FW_VERSION:
			d.firmware = text(value);
			break;
		case RDMA_NLDEV_ATTR_DEV_PROTOCOL:
			d.protocol = text(value);
			break;
		case RDMA_NLDEV_ATTR_PORT_INDEX:
			set(d.ports, value);
			break;
		}
	});
	/* The name becomes a part of paths. */
	if (known && !d.name.empty() && d.name.front() != '.' && d.name.find('/') == d.name.npos)
		all.push_back(std::move(d));
}

void read_regions(bytes message, std::map<std::uint32_t, region> &all)
{
	for_each_entry(message, RDMA_NLDEV_ATTR_RES_MR, RDMA_NLDEV_ATTR_RES_MR_ENTRY, [&](bytes entry) {
		region r;
		bool known = false, unpinned = false;

		for_each(entry, [&](int type, bytes value) {
			if (set_owner(r.whose, type, value))
				return;
			switch (type) {
			case RDMA_NLDEV_ATTR_RES_MRN:
				known = value.size() == sizeof(r.number);
				set(r.number, value);
				break;
			case RDMA_NLDEV_ATTR_RES_MRLEN:
				set(r.length, value);
				break;
			case RDMA_NLDEV_ATTR_RES_PDN:
				set(r.pd, value);
				break;
			case RDMA_NLDEV_ATTR_DRIVER:
				unpinned |= read_driver(value, r);
				break;
			}
		});
		if (known && unpinned)
			all.insert_or_assign(r.number, std::move(r));
	});
}

void read_counters(bytes message, std::map<std::uint32_t, region> &all)
{
	for_each_entry(message, RDMA_NLDEV_ATTR_RES_MR, RDMA_NLDEV_ATTR_RES_MR_ENTRY, [&](bytes entry) {
		std::optional<std::uint32_t> mr;
		bytes counters;

		for_each(entry, [&](int type, bytes value) {
			if (type == RDMA_NLDEV_ATTR_RES_MRN)
				set(mr, value);
			else if (type == RDMA_NLDEV_ATTR_STAT_HWCOUNTERS)
				counters = value;
		});
		const auto r = mr ? all.find(*mr) : all.end();

		if (r == all.end())
			return;
		for_each(counters, [&](int type, bytes counter) {
			std::string_view name;
			std::optional<std::uint64_t> value;

			if (type != RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY)
				return;
			for_each(counter, [&](int part, bytes content) {
				if (part == RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_NAME)
					name = text(content);
				else if (part == RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_VALUE)
					set(value, content);
			});
			if (!name.empty() && value)
				r->second.counters.insert_or_assign(std::string(name), *value);
		});
	});
}

void read_queue_pairs(bytes message, queue_pairs &all)
{
	for_each_entry(message, RDMA_NLDEV_ATTR_RES_QP, RDMA_NLDEV_ATTR_RES_QP_ENTRY, [&](bytes entry) {
		queue_pair q;
		bool known = false;

		for_each(entry, [&](int type, bytes value) {
			if (set_owner(q.whose, type, value))
				return;
			switch (type) {
			case RDMA_NLDEV_ATTR_RES_LQPN:
				known = value.size() == sizeof(q.number);
				set(q.number, value);
				break;
			case RDMA_NLDEV_ATTR_RES_RQPN:
				set(q.remote, value);
				break;
			case RDMA_NLDEV_ATTR_PORT_INDEX:
				set(q.port, value);
				break;
			case RDMA_NLDEV_ATTR_RES_PDN:
				set(q.pd, value);
				break;
			case RDMA_NLDEV_ATTR_RES_TYPE:
				set(q.type, value);
				break;
			case RDMA_NLDEV_ATTR_RES_STATE:
				set(q.state, value);
				break;
			}
		});
		if (known)
			all.insert_or_assign({q.number, q.port.value_or(0)}, std::move(q));
	});
}

progress read_datagram(bytes datagram, std::uint32_t sequence, const std::function<void(bytes)> &each)
{
	while (!datagram.empty()) {
		const auto head = get<nlmsghdr>(datagram);

		if (datagram.size() < NLMSG_HDRLEN || head.nlmsg_len < NLMSG_HDRLEN ||
		    head.nlmsg_len > datagram.size())
			fail(EPROTO, "rdma netlink");
		const bytes content = datagram.subspan(NLMSG_HDRLEN, head.nlmsg_len - NLMSG_HDRLEN);

		datagram =
		    datagram.subspan(std::min<std::size_t>(NLMSG_ALIGN(head.nlmsg_len), datagram.size()));
		/* What is left of a dump that was given up. */
		if (head.nlmsg_seq != sequence)
			continue;
		if (head.nlmsg_type == NLMSG_DONE || head.nlmsg_type == NLMSG_ERROR) {
			const auto error = content.size() < sizeof(int) ? -EPROTO : get<int>(content);

			return {.over = true,
				.error = error < 0 && error > -4096 ? -error
					 : error                    ? EPROTO
								    : 0};
		}
		/* A type below these is netlink's own. */
		if (head.nlmsg_type >= NLMSG_MIN_TYPE)
			each(content);
	}
	return {};
}

nldev::nldev() : socket_(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_RDMA)), buffer_(datagram_size)
{
	if (socket_.get() < 0)
		fail(errno, errno == EPROTONOSUPPORT ? "the kernel has no RDMA (is ib_core loaded?)"
						     : "rdma netlink");
}

int nldev::dump(unsigned command, std::initializer_list<std::pair<std::uint16_t, std::uint32_t>> attributes,
		const std::function<void(bytes)> &each)
{
	std::vector<std::byte> request(NLMSG_HDRLEN +
				       attributes.size() * (NLA_HDRLEN + sizeof(std::uint32_t)));
	const nlmsghdr head = {.nlmsg_len = static_cast<std::uint32_t>(request.size()),
			       .nlmsg_type =
				   static_cast<std::uint16_t>(RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, command)),
			       .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP,
			       .nlmsg_seq = ++sequence_,
			       .nlmsg_pid = 0};
	std::byte *end = request.data();

	std::memcpy(end, &head, sizeof(head));
	end += NLMSG_HDRLEN;
	for (const auto &[type, value] : attributes) {
		const nlattr a = {.nla_len = NLA_HDRLEN + sizeof(value), .nla_type = type};

		std::memcpy(end, &a, sizeof(a));
		std::memcpy(end + NLA_HDRLEN, &value, sizeof(value));
		end += a.nla_len;
	}
	if (send(socket_.get(), request.data(), request.size(), 0) != static_cast<ssize_t>(request.size()))
		fail(errno, "rdma netlink");
	for (;;) {
		sockaddr_nl from{};
		socklen_t length = sizeof(from);
		const ssize_t n = recvfrom(socket_.get(), buffer_.data(), buffer_.size(), MSG_TRUNC,
					   reinterpret_cast<sockaddr *>(&from), &length);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			fail(errno, "rdma netlink");
		/* Processes can send as well. */
		if (length != sizeof(from) || from.nl_family != AF_NETLINK || from.nl_pid)
			continue;
		if (static_cast<std::size_t>(n) > buffer_.size() || !n)
			fail(EPROTO, "rdma netlink");
		const progress p =
		    read_datagram({buffer_.data(), static_cast<std::size_t>(n)}, sequence_, each);

		if (p.over)
			return p.error;
	}
}

std::vector<device> nldev::devices()
{
	std::vector<device> all;

	if (const int error = dump(RDMA_NLDEV_CMD_GET, {}, [&](bytes message) { read_device(message, all); }))
		fail(error, "rdma netlink");
	return all;
}

namespace
{

/* What the kernel answers for a device that has gone. */
bool is_gone(int error)
{
	return error == EINVAL || error == ENODEV || error == ENOENT;
}

} // namespace

std::optional<std::vector<region>> nldev::regions(const device &d)
{
	std::map<std::uint32_t, region> all;
	std::vector<region> list;
	const int error = dump(RDMA_NLDEV_CMD_RES_MR_GET, {{RDMA_NLDEV_ATTR_DEV_INDEX, d.index}},
			       [&](bytes message) { read_regions(message, all); });

	if (is_gone(error))
		return std::nullopt;
	if (error)
		fail(error, "rdma netlink");
	/* Counters that cannot be had are missing. */
	dump(RDMA_NLDEV_CMD_STAT_GET,
	     {{RDMA_NLDEV_ATTR_DEV_INDEX, d.index}, {RDMA_NLDEV_ATTR_STAT_RES, RDMA_NLDEV_ATTR_RES_MR}},
	     [&](bytes message) { read_counters(message, all); });
	for (auto &[number, r] : all)
		list.push_back(std::move(r));
	return list;
}

std::optional<std::vector<queue_pair>> nldev::queue_pairs(const device &d)
{
	ctl::queue_pairs all;
	std::vector<queue_pair> list;
	const int error = dump(RDMA_NLDEV_CMD_RES_QP_GET, {{RDMA_NLDEV_ATTR_DEV_INDEX, d.index}},
			       [&](bytes message) { read_queue_pairs(message, all); });

	if (is_gone(error))
		return std::nullopt;
	if (error)
		fail(error, "rdma netlink");
	for (auto &[number, q] : all)
		list.push_back(std::move(q));
	return list;
}

} // namespace npr::ctl
