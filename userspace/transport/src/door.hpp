/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Where a listener is called, and those who have called and not greeted yet: one descriptor that is readable
 * when there is something to do.
 */
#ifndef NPRDMA_TRANSPORT_DOOR_HPP
#define NPRDMA_TRANSPORT_DOOR_HPP

#include "owners.hpp"

#include <algorithm>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <utility>
#include <vector>

namespace nprdma::transport
{

inline int milliseconds_to(clock::time_point deadline) noexcept
{
	const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - clock::now());

	return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 1 << 20));
}

class door
{
public:
	/* How many who have called are kept; the one that has kept silent for longest goes first. */
	static constexpr std::size_t most_callers = 128;
	static constexpr std::size_t most_late = 16; /* steps of callers behind the deadline */

	static result<door> open(descriptor socket)
	{
		door d;

		d.socket_ = std::move(socket);
		d.events_ = descriptor(::epoll_create1(EPOLL_CLOEXEC));
		d.pause_ = descriptor(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
		if (!d.events_ || !d.pause_ || !d.watch(d.socket_.get()) || !d.watch(d.pause_.get()))
			return failure(errno, "listener");
		return d;
	}

	[[nodiscard]] int fd() const noexcept { return events_.get(); }
	/* Until it is closed. */
	[[nodiscard]] bool watch(int fd) const noexcept { return control(EPOLL_CTL_ADD, fd, EPOLLIN); }
	void ignore(int fd) const noexcept { (void)control(EPOLL_CTL_DEL, fd, 0); }
	/* What is watched and readable; -1: nothing until @until. */
	[[nodiscard]] int next(clock::time_point until) const noexcept
	{
		epoll_event e;

		return ::epoll_wait(events_.get(), &e, 1, milliseconds_to(until)) == 1 ? e.data.fd : -1;
	}
	/* take() is to be called for it; otherwise it is a caller. */
	[[nodiscard]] bool is_own(int fd) const noexcept { return fd == socket_.get() || fd == pause_.get(); }

	/*
	 * A caller, or an empty descriptor. Where no descriptor can be had who calls stays where he is, and
	 * the socket readable: nobody looks at it for a while then.
	 */
	result<descriptor> take(int which)
	{
		if (which == pause_.get()) {
			std::uint64_t times;

			(void)!::read(pause_.get(), &times, sizeof(times));
			(void)control(EPOLL_CTL_MOD, socket_.get(), EPOLLIN);
			return descriptor();
		}
		descriptor caller(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
		if (caller) {
			said_ = false;
			return caller;
		}
		const int code = errno;
		switch (code) {
		case EAGAIN:
		case EINTR:
		case ECONNABORTED:
			return descriptor();
		case EMFILE:
		case ENFILE:
		case ENOBUFS:
		case ENOMEM: {
			const itimerspec later = {{}, {0, 100'000'000}};

			if (control(EPOLL_CTL_MOD, socket_.get(), 0))
				(void)::timerfd_settime(pause_.get(), 0, &later, nullptr);
			if (std::exchange(said_, true))
				return descriptor();
			return failure(code, code == EMFILE
						 ? "to accept, which fails until there is a higher "
						   "limit (ulimit -n), or there are fewer "
						   "connections (max_connections)"
						 : "to accept, which fails until the system has "
						   "more files (fs.file-max) or memory for it");
		}
		default:
			return failure(code, "to accept");
		}
	}

private:
	door() = default;

	[[nodiscard]] bool control(int what, int fd, std::uint32_t events) const noexcept
	{
		epoll_event e{};

		e.events = events;
		e.data.fd = fd;
		return ::epoll_ctl(events_.get(), what, fd, &e) == 0;
	}

	descriptor socket_, events_, pause_;
	bool said_ = false; /* that no descriptor can be had */
};

/*
 * A listener's accept(). @callers, oldest first, have "fd", which the door watches, and "until"; @take is for
 * a descriptor that is the door's own. @step goes on with a caller whose descriptor is readable: a
 * connection, none yet, or an error that ends it. Who calls and then says nothing keeps nobody waiting.
 */
template <class Caller, class Take, class Step>
result<std::unique_ptr<connection>> accept_at(const door &at, std::vector<Caller> &callers,
					      clock::time_point deadline, const std::string &address,
					      Take take, Step step)
{
	for (std::size_t late = 0;;) {
		clock::time_point until = deadline;

		std::erase_if(callers, [](const Caller &c) { return c.until < clock::now(); });
		for (const Caller &c : callers)
			until = std::min(until, c.until);
		const int who = at.next(until);
		/* Callers that never end keep nobody here: what is left is for the next time. */
		if (clock::now() >= deadline && (who < 0 || ++late > door::most_late))
			return error{ETIMEDOUT, address + ": nobody has connected before the deadline"};
		if (who < 0)
			continue;
		if (at.is_own(who)) {
			if (status s = take(who); !s)
				return s.why();
			continue;
		}
		const auto c = std::find_if(callers.begin(), callers.end(),
					    [&](const Caller &x) { return x.fd == who; });
		if (c == callers.end())
			continue;
		result<std::unique_ptr<connection>> line = step(*c);
		if (line && !*line)
			continue;
		/* Otherwise it is closed. */
		if (line)
			at.ignore(c->fd);
		callers.erase(c);
		return line;
	}
}

} // namespace nprdma::transport

#endif
