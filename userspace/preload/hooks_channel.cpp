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
	ibv_comp_channel *const real = verbs().ibv_create_comp_channel(context);

	if (!real || !find(context))
		return real;
	epoll_event e{};
	e.events = EPOLLIN;
	int error = ENOMEM;
	try {
		auto c = std::make_shared<channel>();
		c->real = real;
		c->context = context;
		c->epoll = npr::unique_fd(epoll_create1(EPOLL_CLOEXEC));
		c->fd = c->epoll.get();
		/* It was readable, but another thread may have taken what there was, or the kernel, with the CQ. */
		const int flags = fcntl(real->fd, F_GETFL);
		if (c->fd >= 0 && flags >= 0 && !fcntl(real->fd, F_SETFL, flags | O_NONBLOCK) &&
		    !epoll_ctl(c->fd, EPOLL_CTL_ADD, real->fd, &e)) {
			ibv_comp_channel *const ours = c.get();
			if (add(all().channels, ours, std::move(c)))
				return ours;
		} else {
			error = errno;
		}
	} catch (const std::bad_alloc &) {
	}
	(void)verbs().ibv_destroy_comp_channel(real);
	errno = error;
	return nullptr;
}

NPR_EXPORT int ibv_destroy_comp_channel(ibv_comp_channel *ours)
{
	const auto c = find(all().channels, ours);

	if (!c)
		return verbs().ibv_destroy_comp_channel(ours);
	/* A child may have the descriptors, too, so that closing them need not be the end. */
	(void)epoll_ctl(c->epoll.get(), EPOLL_CTL_DEL, c->real->fd, nullptr);
	const int rc = verbs().ibv_destroy_comp_channel(c->real);
	if (rc) {
		epoll_event e{};
		e.events = EPOLLIN;
		(void)epoll_ctl(c->epoll.get(), EPOLL_CTL_ADD, c->real->fd, &e);
	} else {
		(void)take(all().channels, ours);
	}
	return rc;
}

/* Something may have happened that only the library can tell: that is an event, too. */
NPR_EXPORT int ibv_get_cq_event(ibv_comp_channel *ours, ibv_cq **cq, void **cq_context)
{
	const auto c = find(all().channels, ours);

	if (!c)
		return verbs().ibv_get_cq_event(ours, cq, cq_context);
	for (;;) {
		/* As the application set them. */
		const int flags = fcntl(c->epoll.get(), F_GETFL);
		const bool waits = flags < 0 || !(flags & O_NONBLOCK);
		epoll_event e;

		switch (epoll_wait(c->epoll.get(), &e, 1, waits ? -1 : 0)) {
		case 1:
			if (e.data.ptr) {
				if (own_event(e.data.ptr, cq, cq_context))
					return 0;
			} else {
				const int rc = verbs().ibv_get_cq_event(c->real, cq, cq_context);
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
			if (ours && !it->second.events)
				all().acknowledged.notify_all();
		}
	}
	if (n)
		verbs().ibv_ack_cq_events(cq, n);
}
