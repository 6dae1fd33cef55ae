/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* CQs. */
#include "pointers.hpp"
#include "real.hpp"
#include "registry.hpp"
#include "seam.hpp"

#include <nprdma/nprdma.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <sys/epoll.h>
#include <vector>

using namespace npr::preload;

namespace {

/* A child may have the descriptors, too, so that closing them need not be the end. */
void unwatch(const channel &c, const npr_cq &lib)
{
	for (const int fd : {lib.channel.get(), lib.event.get(), lib.timer.get()})
		(void)epoll_ctl(c.epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
}

/* The channel that libibverbs knows. */
ibv_comp_channel *real_of(const std::shared_ptr<channel> &c, ibv_comp_channel *other)
{
	return c ? c->real : other;
}

/*
 * @create(entries, channel) makes a CQ for @cqe completions of the application. It is taken if the
 * library can, and otherwise nobody's but the provider's, or not made.
 */
template <class F>
ibv_cq *create(device &d, std::uint32_t own, ibv_comp_channel *channel, F &&create)
{
	const auto c = find(all().channels, channel);
	ibv_cq *const cq = npr::with_credits(own, 0, static_cast<std::uint32_t>(d.max_cqe),
					     [&](std::uint32_t n) { return create(n, real_of(c, channel)); });

	if (!cq)
		return cq;
	npr_cq *const lib = npr::attach_cq(d.lib, cq, own);
	int error = errno;
	if (lib) {
		if (add(all().cqs, cq, queue{lib, 0, false, std::nullopt})) {
			if (c)
				cq->channel = c.get();
			return cq;
		}
		error = ENOMEM;
		(void)npr_detach_cq(lib);
	}
	if (may_be_left(d, "CQ", cq->handle, error)) {
		if (c)
			cq->channel = c.get();
		return cq;
	}
	(void)verbs().ibv_destroy_cq(cq);
	errno = error;
	return nullptr;
}

/* One that the library does not take. */
template <class F>
ibv_cq *create_left(ibv_comp_channel *channel, F &&create)
{
	const auto c = find(all().channels, channel);
	ibv_cq *const cq = create(real_of(c, channel));

	if (cq && c)
		cq->channel = c.get();
	return cq;
}

/* By a queue pair: then it is not destroyed. */
bool used(device &d, const ibv_cq *cq)
{
	bool found = false;

	d.qps.for_each([&](const npr_qp *q) {
		found = found || q->verbs->send_cq == cq || q->verbs->recv_cq == cq;
	});
	return found;
}

/*
 * As ibv_destroy_cq() does, for those that only we have seen: who got one may look at the CQ until
 * then. It has to be before the CQ is gone, as its address may be another's at once.
 */
void wait_for_acknowledgements(ibv_cq *cq)
{
	std::unique_lock lock(all().mutex);

	all().acknowledged.wait(lock, [&] {
		const auto it = all().cqs.find(cq);
		return it == all().cqs.end() || !it->second.events;
	});
}

/* The provider's object, whose functions are ours. */
npr::poller &poller_of(ibv_cq_ex *q) noexcept
{
	return find(ibv_cq_ex_to_cq(q))->ex.polling;
}

} // namespace

ibv_cq_ex *npr::preload::create_left_cq_ex(ibv_cq_init_attr_ex *attr,
					   const std::function<ibv_cq_ex *(ibv_cq_init_attr_ex *)> &make)
{
	return reinterpret_cast<ibv_cq_ex *>(create_left(attr->channel, [&](ibv_comp_channel *real) {
		ibv_cq_init_attr_ex a = *attr;

		a.channel = real;
		ibv_cq_ex *const cq = make(&a);
		return cq ? ibv_cq_ex_to_cq(cq) : nullptr;
	}));
}

bool npr::preload::watch(ibv_cq *cq, const npr_cq &lib)
{
	const auto c = find(all().channels, cq->channel);

	for (const int fd : {lib.channel.get(), lib.event.get(), lib.timer.get()}) {
		epoll_event e{};
		e.events = EPOLLIN | EPOLLET;
		e.data.ptr = cq;
		if (c && epoll_ctl(c->epoll.get(), EPOLL_CTL_ADD, fd, &e) && errno != EEXIST)
			return false;
	}
	return true;
}

NPR_EXPORT ibv_cq *ibv_create_cq(ibv_context *context, int cqe, void *cq_context, ibv_comp_channel *channel,
				 int comp_vector)
{
	device *const d = find(context);

	/* What there cannot be the provider says. */
	if (!d || cqe <= 0 || cqe > d->max_cqe)
		return create_left(channel, [&](ibv_comp_channel *real) {
			return verbs().ibv_create_cq(context, cqe, cq_context, real, comp_vector);
		});
	return create(*d, static_cast<std::uint32_t>(cqe), channel, [&](std::uint32_t n, ibv_comp_channel *real) {
		return verbs().ibv_create_cq(context, static_cast<int>(n), cq_context, real, comp_vector);
	});
}

ibv_cq_ex *npr::preload::create_cq_ex(ibv_context *context, ibv_cq_init_attr_ex *attr)
{
	device &d = *find(context);
	const bool small = attr->cqe && attr->cqe <= static_cast<std::uint32_t>(d.max_cqe);

	/* What a struct ibv_wc does not tell the library cannot tell either. */
	if (attr->wc_flags & ~std::uint64_t{IBV_WC_STANDARD_FLAGS} || !small) {
		if (small)
			tell_left(d, "a completion queue with time stamps, or other attributes that struct ibv_wc does not have,");
		return create_left_cq_ex(attr, [&](ibv_cq_init_attr_ex *a) { return d.extended.create_cq_ex(context, a); });
	}
	ibv_cq *const cq = create(d, attr->cqe, attr->channel, [&](std::uint32_t n, ibv_comp_channel *real) {
		ibv_cq_init_attr_ex a = *attr;

		a.cqe = n;
		a.channel = real;
		ibv_cq_ex *const made = d.extended.create_cq_ex(context, &a);
		return made ? ibv_cq_ex_to_cq(made) : nullptr;
	});
	ibv_cq_ex *const ex = reinterpret_cast<ibv_cq_ex *>(cq);
	if (cq && find(cq)) {
		{
			const std::lock_guard lock(all().mutex);
			all().cqs.at(cq).theirs = *ex;
		}
		npr::set_polling<poller_of>(*ex, attr->wc_flags);
	}
	return ex;
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
	const auto c = find(all().channels, cq->channel);
	ibv_comp_channel *const ours = cq->channel;
	ibv_context *const context = cq->context;

	/* Nobody is told of it any more, for it is gone when the call returns. */
	const bool armed = q.lib && set_armed(cq, false);
	if (c && armed)
		unwatch(*c, *q.lib);
	device *const d = find(context);
	if (d && !used(*d, cq))
		wait_for_acknowledgements(cq);
	cq->channel = real_of(c, ours);
	if (const int rc = verbs().ibv_destroy_cq(cq)) {
		cq->channel = ours;
		/* Not without memory: then the library wakes nobody for it any more. */
		if (armed) {
			(void)watch(cq, *q.lib);
			(void)set_armed(cq, true);
		}
		return rc;
	}
	if (d)
		d->memory.gone(cq);
	if (q.lib) {
		drop(cq, q.lib);
		(void)npr_detach_cq(q.lib);
	} else {
		drop(cq, nullptr);
	}
	return 0;
}

void npr::preload::leave(ibv_cq *cq)
{
	npr_cq *const lib = find(cq);
	device *const d = find(cq->context);

	if (!lib)
		return;
	const auto c = find(all().channels, cq->channel);
	if (set_armed(cq, false) && c)
		unwatch(*c, *lib);
	/* Those that complete there do so where the library does not poll any more. */
	std::vector<ibv_qp *> qps;
	d->qps.for_each([&](const npr_qp *q) {
		if (q->verbs->send_cq == cq || q->verbs->recv_cq == cq)
			qps.push_back(q->verbs);
	});
	for (ibv_qp *const q : qps)
		leave(q);
	{
		/* What it has told of is acknowledged later. */
		const std::lock_guard lock(all().mutex);
		const auto it = all().cqs.find(cq);
		if (it != all().cqs.end()) {
			it->second.lib = nullptr;
			if (const auto &theirs = it->second.theirs)
				npr::copy_polling(*reinterpret_cast<ibv_cq_ex *>(cq), *theirs);
		}
	}
	(void)npr_detach_cq(lib);
}
