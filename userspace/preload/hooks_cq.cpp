/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* CQs. */
#include "policy.hpp"
#include "real.hpp"
#include "registry.hpp"
#include "seam.hpp"

#include <nprdma/nprdma.h>

#include <cerrno>
#include <cstdint>
#include <sys/epoll.h>

using namespace npr::preload;

namespace {

/* Of those of @cq that the channel does not tell. False and errno. */
bool watch(const channel &c, ibv_cq *cq, const npr_cq &lib)
{
	for (const int fd : {lib.channel.get(), lib.event.get(), lib.timer.get()}) {
		epoll_event e{};
		e.events = EPOLLIN | EPOLLET;
		e.data.ptr = cq;
		if (epoll_ctl(c.epoll.get(), EPOLL_CTL_ADD, fd, &e))
			return false;
	}
	return true;
}

/* A child may have the descriptors, too, so that closing them need not be the end. */
void unwatch(const channel &c, const npr_cq &lib)
{
	for (const int fd : {lib.channel.get(), lib.event.get(), lib.timer.get()})
		(void)epoll_ctl(c.epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
}

} // namespace

NPR_EXPORT ibv_cq *ibv_create_cq(ibv_context *context, int cqe, void *cq_context, ibv_comp_channel *channel,
				 int comp_vector)
{
	const device *const d = find(context);

	if (!d || cqe < 0 || cqe > d->max_cqe)
		return verbs().ibv_create_cq(context, cqe, cq_context, channel, comp_vector);
	const auto own = static_cast<std::uint32_t>(cqe);
	ibv_cq *const cq = npr::with_credits(own, 0, static_cast<std::uint32_t>(d->max_cqe), [&](std::uint32_t n) {
		return verbs().ibv_create_cq(context, static_cast<int>(n), cq_context, channel, comp_vector);
	});
	if (!cq)
		return cq;
	npr_cq *const lib = npr::attach_cq(d->lib, cq, own);
	const auto c = find(all().channels, channel);
	int error = errno;
	if (lib) {
		if (c && !watch(*c, cq, *lib))
			error = errno;
		else if (add(all().cqs, cq, queue{lib, 0, false}))
			return cq;
		else
			error = ENOMEM;
		(void)npr_detach_cq(lib);
	}
	if (may_be_left(context, "CQ", cq->handle, error))
		return cq;
	(void)verbs().ibv_destroy_cq(cq);
	errno = error;
	return nullptr;
}

NPR_EXPORT int ibv_resize_cq(ibv_cq *cq, int cqe)
{
	const device *const d = find(cq->context);
	npr_cq *const lib = find(cq);

	if (!lib || cqe < 0 || cqe > d->max_cqe)
		return verbs().ibv_resize_cq(cq, cqe);
	return lib->resize(static_cast<std::uint32_t>(cqe), static_cast<std::uint32_t>(d->max_cqe), [&](std::uint32_t n) {
		return verbs().ibv_resize_cq(cq, static_cast<int>(n));
	});
}

NPR_EXPORT int ibv_destroy_cq(ibv_cq *cq)
{
	const queue q = find(all().cqs, cq);

	if (!q.lib)
		return verbs().ibv_destroy_cq(cq);
	/* Nobody is told of it any more, for it is gone when the call returns. */
	const auto c = find(all().channels, cq->channel);
	const bool armed = set_armed(cq, false);
	if (c)
		unwatch(*c, *q.lib);
	if (const int rc = verbs().ibv_destroy_cq(cq)) {
		/* Not without memory: then the library wakes nobody for it any more. */
		if (c)
			(void)watch(*c, cq, *q.lib);
		(void)set_armed(cq, armed);
		return rc;
	}
	drop(cq, q.lib);
	(void)npr_detach_cq(q.lib);
	return 0;
}
