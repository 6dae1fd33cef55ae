/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * libnprdma for applications that do not know it: loaded with LD_PRELOAD, it registers
 * their regions unpinned and lets the library carry out what they do with them.
 *
 * Functions of libibverbs are replaced by ours of the same name. What verbs.h has as
 * inline functions are calls through pointers in struct ibv_context and verbs_context,
 * which are per device: those are replaced when a device is opened. The library itself
 * goes on with what was there before (provider.hpp), and so do we.
 *
 * Who posts or polls takes no lock that another queue pair, another CQ or another thread has:
 * objects are found by their handles.
 *
 * An object that the library does not take (a type of QP, a CQ with attributes) is left
 * to the provider: it works, but not with unpinned regions, which fail closed. One that it
 * cannot take, without memory or room, is not made, unless the program has pinned regions.
 */
#include "pointers.hpp"
#include "real.hpp"
#include "registry.hpp"
#include "seam.hpp"

#include <nprdma/nprdma.h>

#include <cstdio>
#include <memory>
#include <mutex>
#include <new>

using namespace npr::preload;

NPR_EXPORT ibv_context *ibv_open_device(ibv_device *dev)
{
	ibv_context *const context = verbs().ibv_open_device(dev);
	verbs_context *const extended = context ? verbs_get_ctx(context) : nullptr;

	if (!context)
		return context;
	npr::provider provider(*context);
	provider.reg_mr = verbs().ibv_reg_mr_iova2;
	provider.dereg_mr = verbs().ibv_dereg_mr;
	npr_context *const lib = npr::open(context, 0, provider);
	if (!lib) {
		std::fprintf(stderr, "libnprdma-preload: %s has no unpinned regions (%m): left as it is\n",
			     ibv_get_device_name(dev));
		return context;
	}
	int max_cqe = some_cqe;
	if (ibv_device_attr attr{}; !ibv_query_device(context, &attr))
		max_cqe = attr.max_cqe;
	std::unique_ptr<device> d(new (std::nothrow)
					  device(*context, extended ? extended->create_qp_ex : nullptr, lib, max_cqe));
	if (!d || !all().devices.set(static_cast<std::uint32_t>(context->cmd_fd), context, d.get())) {
		std::fprintf(stderr, "libnprdma-preload: no memory to know %s: left as it is\n",
			     ibv_get_device_name(dev));
		(void)npr_close(lib);
		return context;
	}
	/* All memory that has an address is registered by our functions from here on. */
	lib->regions.know_all();
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	context->ops.post_srq_recv = post_srq_recv;
	context->ops.poll_cq = poll_cq;
	context->ops.req_notify_cq = req_notify_cq;
	context->ops.bind_mw = bind_mw;
	if (d->create_qp_ex)
		extended->create_qp_ex = create_qp_ex;
	(void)d.release(); /* until ibv_close_device() */
	return context;
}

NPR_EXPORT int ibv_close_device(ibv_context *context)
{
	if (const std::unique_ptr<device> d(find(context)); d) {
		/* Not every application destroys all it has before. */
		d->qps.drain([](npr_qp *qp) { (void)npr_detach_qp(qp); });
		d->srqs.drain([](npr_srq *srq) { (void)npr_detach_srq(srq); });
		while (ibv_cq *const cq = any_cq(d->lib))
			(void)npr_detach_cq(take(all().cqs, cq).lib);
		{
			const std::lock_guard lock(all().mutex);
			std::erase_if(all().channels,
				      [&](const auto &entry) { return entry.second->context == context; });
			std::erase_if(all().orphans, [&](const auto &entry) {
				return entry.second->qp_base.context == context;
			});
		}
		d->lib->regions.clear();
		(void)npr_close(d->lib);
		context->ops = d->ops;
		if (d->create_qp_ex)
			verbs_get_ctx(context)->create_qp_ex = d->create_qp_ex;
		/* Before the descriptor is another's. */
		all().devices.remove(static_cast<std::uint32_t>(context->cmd_fd), d.get());
	}
	return verbs().ibv_close_device(context);
}
