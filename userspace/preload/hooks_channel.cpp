/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Completion channels, and events of their CQs. */
#include "real.hpp"
#include "registry.hpp"

#include <nprdma/nprdma.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <sys/epoll.h>

using namespace npr::preload;

namespace {

/* The flags of @fd as the application set them. */
int status_flags(channel &c, int fd)
{
	const std::lock_guard lock(c.reading);

	return fcntl(fd, F_GETFL);
}

/*
 * The channel's own event. It was readable, but another thread may have taken what there was, or
 * the kernel, with the CQ, and the library does not wake who waits in a read. Whether a read
 * waits is the file's flag, so that changes for a moment.
 */
int read_event(channel &c, ibv_comp_channel *verbs_channel, ibv_cq **cq, void **cq_context)
{
	const std::lock_guard lock(c.reading);
	const int fd = verbs_channel->fd;
	const int flags = fcntl(fd, F_GETFL);

	if (flags < 0)
		return -1;
	if (!(flags & O_NONBLOCK) && fcntl(fd, F_SETFL, flags | O_NONBLOCK))
		return -1;
	/* Also if the thread is cancelled in the read. */
	struct restore {
		~restore()
		{
			const int error = errno;

			if (!(flags & O_NONBLOCK))
				(void)fcntl(fd, F_SETFL, flags);
			errno = error;
		}
		int fd, flags;
	} const at_end{fd, flags};
	return verbs().ibv_get_cq_event(verbs_channel, cq, cq_context);
}

/* Something happened to CQ @key. False: nobody asked for its events. */
bool own_event(void *key, ibv_cq **cq, void **cq_context)
{
	const std::lock_guard lock(all().mutex);
	/* It may be destroyed by now. */
	const auto it = all().cqs.find(static_cast<ibv_cq *>(key));

	if (it == all().cqs.end() || !it->second.armed)
		return false;
	++it->second.events;
	*cq = it->first;
	*cq_context = it->first->cq_context;
	return true;
}

/*
 * A handler has run. The read that the application believes in goes on after it if that was
 * installed with SA_RESTART; epoll_wait() never does, and which one it was nobody tells. So it ends
 * where any handler wants calls to end, except of signals that do not come to who sleeps.
 */
bool goes_on()
{
	static constexpr int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};

	for (int s = 1; s < NSIG; ++s) {
		struct sigaction a;

		if (std::find(std::begin(own), std::end(own), s) != std::end(own) || sigaction(s, nullptr, &a))
			continue;
		if (!(a.sa_flags & SA_RESTART) && a.sa_handler != SIG_DFL && a.sa_handler != SIG_IGN)
			return false;
	}
	return true;
}

} // namespace

NPR_EXPORT ibv_comp_channel *ibv_create_comp_channel(ibv_context *context)
{
	ibv_comp_channel *const verbs_channel = verbs().ibv_create_comp_channel(context);

	if (!verbs_channel || !find(context))
		return verbs_channel;
	epoll_event e{};
	e.events = EPOLLIN;
	int error = ENOMEM;
	try {
		auto c = std::make_shared<channel>();
		c->context = context;
		c->epoll = npr::unique_fd(epoll_create1(EPOLL_CLOEXEC));
		if (c->epoll.get() >= 0 && !epoll_ctl(c->epoll.get(), EPOLL_CTL_ADD, verbs_channel->fd, &e)) {
			if (add(all().channels, verbs_channel, std::move(c)))
				return verbs_channel;
		} else {
			error = errno;
		}
	} catch (const std::bad_alloc &) {
	}
	(void)verbs().ibv_destroy_comp_channel(verbs_channel);
	errno = error;
	return nullptr;
}

NPR_EXPORT int ibv_destroy_comp_channel(ibv_comp_channel *verbs_channel)
{
	/* The next one may be at the same address. */
	const std::lock_guard lock(all().mutex);
	const int rc = verbs().ibv_destroy_comp_channel(verbs_channel);

	if (!rc)
		all().channels.erase(verbs_channel);
	return rc;
}

/* Something may have happened that only the library can tell: that is an event, too. */
NPR_EXPORT int ibv_get_cq_event(ibv_comp_channel *verbs_channel, ibv_cq **cq, void **cq_context)
{
	const auto c = find(all().channels, verbs_channel);

	if (!c)
		return verbs().ibv_get_cq_event(verbs_channel, cq, cq_context);
	for (;;) {
		const int flags = status_flags(*c, verbs_channel->fd);
		const bool waits = flags < 0 || !(flags & O_NONBLOCK);
		epoll_event e;

		switch (epoll_wait(c->epoll.get(), &e, 1, waits ? -1 : 0)) {
		case 1:
			if (e.data.ptr) {
				if (own_event(e.data.ptr, cq, cq_context))
					return 0;
			} else {
				const int rc = read_event(*c, verbs_channel, cq, cq_context);
				if (!rc || errno != EAGAIN)
					return rc;
			}
			break;
		case 0:
			errno = EAGAIN;
			return -1;
		default:
			if (errno != EINTR)
				return -1;
			if (!goes_on()) {
				errno = EINTR;
				return -1;
			}
		}
	}
}

NPR_EXPORT void ibv_ack_cq_events(ibv_cq *cq, unsigned int n)
{
	{
		const std::lock_guard lock(all().mutex);
		if (const auto it = all().cqs.find(cq); it != all().cqs.end()) {
			const unsigned int ours = std::min(n, it->second.events);
			it->second.events -= ours;
			n -= ours;
		}
	}
	if (n)
		verbs().ibv_ack_cq_events(cq, n);
}
