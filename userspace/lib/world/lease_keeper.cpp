/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "world/lease_keeper.hpp"

#include "world/own_thread.hpp"
#include "world/signals_blocked.hpp"
#include "world/uncancelled.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <exception>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace npr {

namespace {

std::uint64_t now() noexcept
{
	timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(t.tv_nsec);
}

bool control(int epoll, int op, int fd, std::uint32_t events) noexcept
{
	epoll_event e{};

	e.events = events;
	e.data.fd = fd;
	return !epoll_ctl(epoll, op, fd, &e);
}

[[noreturn]] void fail(const char *what)
{
	throw std::system_error(errno, std::generic_category(), what);
}

} // namespace

lease_keeper::~lease_keeper()
{
	const uncancelled here;

	if (thread_.joinable()) {
		{
			const std::lock_guard lock(mutex_);
			stop_ = true;
		}
		wake();
		thread_.join();
	}
	if (event_ >= 0)
		close(event_);
	if (epoll_ >= 0)
		close(epoll_);
}

void lease_keeper::start()
{
	if (epoll_ < 0 && (epoll_ = epoll_create1(EPOLL_CLOEXEC)) < 0)
		fail("epoll_create1");
	if (event_ < 0 && (event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0)
		fail("eventfd");
	if (!control(epoll_, EPOLL_CTL_ADD, event_, EPOLLIN) && errno != EEXIST)
		fail("epoll_ctl");
	const signals_blocked here;
	thread_ = std::thread([this] { run(); });
}

int lease_keeper::open(client &c, event_channel &channel) noexcept
{
	const uncancelled here;
	int rc = channel.open();

	if (!rc && !channel.is_mapped())
		rc = -EOPNOTSUPP;
	if (!rc && !try_add(c, channel.get()))
		rc = -EAGAIN;
	if (rc)
		channel.close();
	return rc;
}

bool lease_keeper::try_add(client &c, int channel) noexcept
{
	/* relaxed: who sees it late tries once more */
	const std::uint64_t not_before = not_before_.load(std::memory_order_relaxed);

	if (not_before && now() < not_before)
		return false;
	try {
		add(c, channel);
		return true;
	} catch (const std::exception &) {
		not_before_.store(now() + period, std::memory_order_relaxed);
		return false;
	}
}

void lease_keeper::add(client &c, int channel)
{
	const std::lock_guard lock(mutex_);
	const uncancelled here;

	if (!thread_.joinable())
		start();
	clients_.reserve(clients_.size() + 1);
	/* Nothing is waited for there before there are leases. */
	if (channel >= 0 && !control(epoll_, EPOLL_CTL_ADD, channel, 0))
		fail("epoll_ctl");
	c.channel_ = channel;
	if (!std::exchange(c.known_, true))
		clients_.push_back(&c);
}

void lease_keeper::remove(client &c) noexcept
{
	if (!c.known_)
		return;
	const uncancelled here;
	std::unique_lock lock(mutex_);

	(void)control(epoll_, EPOLL_CTL_DEL, c.channel_, 0);
	std::erase(clients_, &c);
	left_.wait(lock, [&] { return at_ != &c; });
}

void lease_keeper::change(client &c, bool has) noexcept
{
	const uncancelled here;

	c.watched_.store(has, std::memory_order_relaxed);
	(void)control(epoll_, EPOLL_CTL_MOD, c.channel_, has ? std::uint32_t{EPOLLIN} : 0U);
	if (has)
		wake();
}

bool lease_keeper::attend(client &c, bool has) noexcept
{
	const uncancelled here;

	if (!c.known_ && !try_add(c, -1))
		return false;
	/* relaxed: as in watch() */
	c.attended_.store(has ? ++c.times_ : 0, std::memory_order_relaxed);
	if (has)
		wake();
	return true;
}

std::uint64_t lease_keeper::next_turn(std::uint64_t time) noexcept
{
	std::uint64_t at = 0;

	for (client *const c : clients_) {
		const std::uint64_t serves = gives_turns ? c->attended_.load(std::memory_order_relaxed) : 0;

		/* It begins anew, however long its pauses were before. */
		if (c->serves_ != serves) {
			c->serves_ = serves;
			c->pause_ = shortest;
			c->turn_at_ = time + shortest;
		}
		if (serves && (!at || c->turn_at_ < at))
			at = c->turn_at_;
	}
	return at;
}

void lease_keeper::wake() noexcept
{
	const std::uint64_t one = 1;

	(void)!write(event_, &one, sizeof(one));
}

/* Until then, or until there is an event; 0: until there is one. In ns, which epoll_wait() does not know. */
void lease_keeper::sleep(std::uint64_t time, std::uint64_t until) const noexcept
{
	const std::uint64_t left = until > time ? until - time : 0;
	const timespec t{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
	pollfd p{epoll_, POLLIN, 0};

	(void)ppoll(&p, 1, until ? &t : nullptr, nullptr);
}

/* Under the mutex: so a descriptor that has ended is still that of the client whose it was, and not a new one's. */
void lease_keeper::read_events() noexcept
{
	std::array<epoll_event, 8> events;
	std::uint64_t count;

	const int n = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), 0);
	(void)!read(event_, &count, sizeof(count));
	/* The device has gone, and with it what would be said. */
	for (int i = 0; i < n; ++i)
		if (events[static_cast<std::size_t>(i)].events & EPOLLERR)
			(void)control(epoll_, EPOLL_CTL_DEL, events[static_cast<std::size_t>(i)].data.fd, 0);
}

void lease_keeper::run() noexcept
{
	become_own_thread("nprdma-keeper");
	std::uint64_t due = 0; /* when a period is over; 0: there are no leases */
	std::unique_lock lock(mutex_);

	while (!stop_) {
		const std::uint64_t time = now();
		const bool any = std::any_of(clients_.begin(), clients_.end(), [](const client *c) {
			return c->watched_.load(std::memory_order_relaxed);
		});
		if (!any)
			due = 0;
		else if (!due)
			due = time + period;
		const std::uint64_t turn = next_turn(time);
		const std::uint64_t until = !turn ? due : !due ? turn : std::min(due, turn);

		lock.unlock();
		sleep(time, until);
		lock.lock();
		read_events();
		const std::uint64_t woken = now();
		const bool age = due && woken >= due;
		if (age)
			due = woken + period;

		/* Who is passed over because another one leaves meanwhile has his turn later. */
		for (std::size_t i = 0; !stop_ && i < clients_.size(); ++i) {
			client &c = *clients_[i];
			const bool watched = c.watched_.load(std::memory_order_relaxed);
			/* Not if it has begun anew meanwhile. */
			const bool turns = c.serves_ && woken >= c.turn_at_ &&
					   c.serves_ == c.attended_.load(std::memory_order_relaxed);

			if (!watched && !turns)
				continue;
			at_ = &c;
			lock.unlock();
			if (watched)
				c.tend(age);
			if (turns) {
				c.pause_ = std::clamp(c.take_turn() ? c.pause_ / 2 : 2 * c.pause_, shortest, longest);
				c.turn_at_ = now() + c.pause_;
			}
			lock.lock();
			at_ = nullptr;
			left_.notify_all();
		}
	}
}

} // namespace npr
