/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The choice of a transport, and waiting, which is the same for all. */
#include "kinds.hpp"
#include "owners.hpp"

#include <algorithm>
#include <poll.h>
#include <sys/prctl.h>
#include <vector>

namespace nprdma::transport
{

void connection::advise(std::uint64_t, std::uint64_t, std::uint64_t, advice) noexcept {}

bool connection::quiesce() noexcept
{
	shutdown();
	return true;
}

result<std::unique_ptr<context>> open(std::string_view kind, const options &how)
{
	kind = kind.substr(0, kind.find(':'));
	if (!is_sane({how.messages, how.max_message}) || how.max_operations < 1 ||
	    how.max_operations > 1 << 16 || how.max_segments < 1 || how.max_segments > 1 << 10)
		return error{EINVAL,
			     "transport options: max_message is 8 to 1 MiB, messages 2 to 65536, both "
			     "multiplied at most 64 MiB, max_operations 1 to 65536, max_segments 1 to 1024"};
	if (!(how.bytes_per_second >= 0) || how.latency.count() < 0)
		return error{EINVAL, "transport options: the link's rate and latency are not negative"};
	if (kind == "shm")
		return open_shm(how);
	if (kind == "verbs")
		return open_verbs(how);
	return error{EINVAL, "transport \"" + std::string(kind) + "\": there are \"shm\" and \"verbs\""};
}

result<bool> wait(std::span<connection *const> connections, clock::time_point deadline, int wake) noexcept
{
	/* Most have few: no allocation then. */
	constexpr std::size_t few = 16;
	pollfd on_stack[2 * few + 1];
	std::vector<pollfd> many;
	pollfd *fds = on_stack;
	nfds_t n = 0;
	bool ready = false, timed = false;
	clock::time_point until = deadline;

	if (connections.size() > few) {
		many.resize(2 * connections.size() + 1);
		fds = many.data();
	}
	for (connection *c : connections) {
		const connection::interest i = c->prepare_wait();

		ready |= i.ready;
		if (i.due < until) {
			until = i.due;
			timed = true;
		}
		for (const int fd : i.fds)
			if (fd >= 0)
				fds[n++] = {fd, POLLIN | POLLRDHUP, 0};
	}
	if (wake >= 0)
		fds[n++] = {wake, POLLIN, 0};

	timespec left{};
	if (!ready) {
		/* What is due is due to the microsecond, and the default slack is 50. */
		if (thread_local bool exact = false; timed && !exact) {
			(void)::prctl(PR_SET_TIMERSLACK, 1000);
			exact = true;
		}
		const auto now = clock::now();
		/* A century is forever, and does not overflow. */
		const auto ns = until <= now ? std::chrono::nanoseconds(0)
					     : std::min<std::chrono::nanoseconds>(until - now,
										  std::chrono::hours(876000));

		left.tv_sec = static_cast<time_t>(ns.count() / 1'000'000'000);
		left.tv_nsec = static_cast<long>(ns.count() % 1'000'000'000);
	}
	const int found = ::ppoll(fds, n, &left, nullptr);
	const int code = found < 0 ? errno : 0;

	for (connection *c : connections)
		c->finish_wait();
	if (code && code != EINTR)
		return failure(code, "poll");
	return ready || timed || found != 0;
}

result<completion> next_completion(connection &c, clock::time_point deadline) noexcept
{
	connection *const one[] = {&c};
	completion done;

	for (;;) {
		if (c.poll({&done, 1}))
			return done;
		if (!c.alive())
			return error{ECONNRESET, "the connection is broken"};
		if (result<bool> r = wait(one, deadline); !r)
			return r.why();
		else if (!*r) {
			if (c.poll({&done, 1}))
				return done;
			return error{ETIMEDOUT, "no completion before the deadline"};
		}
	}
}

result<std::span<std::byte>> next_message(connection &c, std::span<std::byte> buffer,
					  clock::time_point deadline) noexcept
{
	connection *const one[] = {&c};

	for (bool late = false;;) {
		result<std::size_t> n = c.receive(buffer);

		if (!n)
			return n.why();
		if (*n)
			return buffer.first(*n);
		if (late)
			return error{ETIMEDOUT, "no message before the deadline"};
		if (result<bool> r = wait(one, deadline); !r)
			return r.why();
		else
			late = !*r;
	}
}

} // namespace nprdma::transport
