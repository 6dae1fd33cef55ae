/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Shared receive queues. */
#include "pointers.hpp"
#include "real.hpp"
#include "registry.hpp"

#include <nprdma/nprdma.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <new>

using namespace npr::preload;

namespace {

/* @srq, which the provider has made; or null and errno. */
ibv_srq *attach(device &d, ibv_srq *srq)
{
	npr_srq *const lib = npr_attach_srq(d.lib, srq);

	if (lib && d.srqs.set(srq->handle, srq, lib))
		return srq;
	const int error = lib ? ENOMEM : errno;
	if (lib)
		(void)npr_detach_srq(lib);
	if (may_be_left(d, "SRQ", srq->handle, error))
		return srq;
	(void)verbs().ibv_destroy_srq(srq);
	errno = error;
	return nullptr;
}

} // namespace

NPR_EXPORT ibv_srq *ibv_create_srq(ibv_pd *pd, ibv_srq_init_attr *attr)
{
	ibv_srq *const srq = verbs().ibv_create_srq(pd, attr);
	device *const d = find(pd->context);

	return srq && d ? attach(*d, srq) : srq;
}

ibv_srq *npr::preload::create_srq_ex(ibv_context *context, ibv_srq_init_attr_ex *attr)
{
	device &d = *find(context);
	const bool basic = !(attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE) || attr->srq_type == IBV_SRQT_BASIC;

	const auto make = [&] { return d.extended.create_srq_ex(context, attr); };

	/* What tag matching receives is put in place by the HCA, in lists of its own. */
	if (!basic && attr->srq_type != IBV_SRQT_XRC)
		return make_pinned(d, "a shared receive queue with tag matching", make);
	if (!basic) {
		tell_left(d, "a shared receive queue for XRC");
		return make();
	}
	ibv_srq *const srq = make();
	return srq ? attach(d, srq) : srq;
}

/* Receives are posted to it by a pointer of its own, which leads to what has keys of twins. */
ibv_wq *npr::preload::create_wq(ibv_context *context, ibv_wq_init_attr *attr)
{
	device &d = *find(context);

	tell_left(d, "a receive work queue");
	ibv_wq *const wq = d.extended.create_wq(context, attr);
	if (!wq)
		return wq;
	try {
		auto left = std::make_unique<left_wq>(left_wq{wq->post_recv});

		if (d.wqs.set(wq->handle, wq, left.get())) {
			wq->post_recv = post_wq_recv;
			(void)left.release(); /* until it is destroyed */
			return wq;
		}
	} catch (const std::bad_alloc &) {
	}
	if (may_be_left(d, "receive work queue", wq->wq_num, ENOMEM))
		return wq;
	(void)d.extended.destroy_wq(wq);
	errno = ENOMEM;
	return nullptr;
}

int npr::preload::destroy_wq(ibv_wq *wq)
{
	device &d = *find(wq->context);
	const std::uint32_t handle = wq->handle;
	left_wq *const left = d.wqs.find(handle, wq);
	const int rc = d.extended.destroy_wq(wq);

	if (rc)
		return rc;
	d.memory.gone(wq);
	if (left) {
		const std::unique_ptr<left_wq> owned(left);

		d.wqs.remove(handle, left);
	}
	return 0;
}

/* XRC queue pairs come later than memory, and peers reach it through them without a way to ask for pages. */
ibv_xrcd *npr::preload::open_xrcd(ibv_context *context, ibv_xrcd_init_attr *attr)
{
	device &d = *find(context);
	ibv_xrcd *const xrcd = d.extended.open_xrcd(context, attr);

	if (!xrcd)
		return xrcd;
	/* Where there is unpinned memory already, what peers may use is pinned from here on. */
	if (d.memory.pin("an XRC domain"))
		d.memory.is_for(xrcd);
	else
		d.xrc.store(true, std::memory_order_relaxed);
	return xrcd;
}

int npr::preload::close_xrcd(ibv_xrcd *xrcd)
{
	device &d = *find(xrcd->context);
	const int rc = d.extended.close_xrcd(xrcd);

	if (!rc)
		d.memory.gone(xrcd);
	return rc;
}

NPR_EXPORT int ibv_destroy_srq(ibv_srq *srq)
{
	device *const d = find(srq->context);
	const std::uint32_t handle = srq->handle;
	npr_srq *const lib = d ? d->srqs.find(handle, srq) : nullptr;

	if (const int rc = verbs().ibv_destroy_srq(srq); rc)
		return rc;
	if (d)
		d->memory.gone(srq);
	if (!lib)
		return 0;
	d->srqs.remove(handle, lib);
	(void)npr_detach_srq(lib);
	return 0;
}
