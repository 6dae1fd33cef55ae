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
 * An object that the library does not take (a type of QP, a CQ with time stamps) is left
 * to the provider: what it uses is pinned, or the program is told that it cannot be made. One that it
 * cannot take, without memory or room, is not made, unless the program has pinned regions.
 */
#include "pointers.hpp"
#include "policy.hpp"
#include "real.hpp"
#include "registry.hpp"
#include "seam.hpp"

#include <nprdma/nprdma.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

using namespace npr::preload;

namespace {

/* The provider's function, instead of which programs call @ours from here on; null: there is none. */
template <class F>
F replace(verbs_context *extended, std::size_t offset, F verbs_context::*member, F ours)
{
	/* Members are counted from the end, and an older libibverbs ends before some. */
	if (!extended || extended->sz < sizeof(*extended) - offset || !(extended->*member))
		return nullptr;
	return std::exchange(extended->*member, ours);
}

#define REPLACE(member) \
	d.extended.member = replace(extended, offsetof(verbs_context, member), &verbs_context::member, member)

/* What the program has opened is ours as well, if it has unpinned regions. */
void adopt(ibv_context *context)
{
	verbs_context *const extended = verbs_get_ctx(context);
	npr::provider provider(*context);

	provider.reg_mr = verbs().ibv_reg_mr_iova2;
	provider.dereg_mr = verbs().ibv_dereg_mr;
	npr_context *const lib = npr::open(context, policy().leases ? 0 : NPR_OPEN_NO_LEASES, provider);
	if (!lib)
		return say(context, "no unpinned regions (%m): left as it is");
	int max_cqe = some_cqe;
	if (ibv_device_attr attr{}; !ibv_query_device(context, &attr))
		max_cqe = attr.max_cqe;
	std::unique_ptr<device> owned;
	try {
		owned = std::make_unique<device>(*context, lib, max_cqe);
		owned->owner = lib->caps.flags & RDMA_NP_QUERY_OWNER;
	} catch (const std::bad_alloc &) {
	}
	if (!owned || !all().devices.set(static_cast<std::uint32_t>(context->cmd_fd), context, owned.get())) {
		say(context, "no memory to know it: left as it is");
		(void)npr_close(lib);
		return;
	}
	device &d = *owned.release(); /* until ibv_close_device() */
	/* All memory that has an address is registered by our functions from here on. */
	lib->regions.know_all();
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	context->ops.post_srq_recv = post_srq_recv;
	context->ops.poll_cq = poll_cq;
	context->ops.req_notify_cq = req_notify_cq;
	context->ops.bind_mw = bind_mw;
	REPLACE(create_qp_ex);
	REPLACE(create_cq_ex);
	REPLACE(create_srq_ex);
	REPLACE(create_wq);
	REPLACE(destroy_wq);
	REPLACE(open_xrcd);
	REPLACE(close_xrcd);
	REPLACE(open_qp);
	REPLACE(query_device_ex);
	REPLACE(alloc_parent_domain);
	REPLACE(reg_dm_mr);
	REPLACE(alloc_null_mr);
}

#undef REPLACE

/* The program may use the context no more, but libibverbs does. */
void give_back(const device &d)
{
	verbs_context *const extended = verbs_get_ctx(&d.verbs);
	const auto restore = [&](auto verbs_context::*member, auto theirs) {
		if (theirs)
			extended->*member = theirs;
	};

	d.verbs.ops = d.ops;
	restore(&verbs_context::create_qp_ex, d.extended.create_qp_ex);
	restore(&verbs_context::create_cq_ex, d.extended.create_cq_ex);
	restore(&verbs_context::create_srq_ex, d.extended.create_srq_ex);
	restore(&verbs_context::create_wq, d.extended.create_wq);
	restore(&verbs_context::destroy_wq, d.extended.destroy_wq);
	restore(&verbs_context::open_xrcd, d.extended.open_xrcd);
	restore(&verbs_context::close_xrcd, d.extended.close_xrcd);
	restore(&verbs_context::open_qp, d.extended.open_qp);
	restore(&verbs_context::query_device_ex, d.extended.query_device_ex);
	restore(&verbs_context::alloc_parent_domain, d.extended.alloc_parent_domain);
	restore(&verbs_context::reg_dm_mr, d.extended.reg_dm_mr);
	restore(&verbs_context::alloc_null_mr, d.extended.alloc_null_mr);
}

} // namespace

NPR_EXPORT ibv_context *ibv_open_device(ibv_device *dev)
{
	const opening now;
	ibv_context *const context = verbs().ibv_open_device(dev);

	if (context)
		adopt(context);
	return context;
}

/* That of another process, with its objects, which this library does not know; those that it makes here it does. */
NPR_EXPORT ibv_context *ibv_import_device(int cmd_fd)
{
	ibv_context *const context = verbs().ibv_import_device ? verbs().ibv_import_device(cmd_fd) : nullptr;

	if (context)
		adopt(context);
	return context;
}

ibv_context *npr::preload::adopt_opened(ibv_context *context)
{
	if (context)
		adopt(context);
	return context;
}

NPR_EXPORT int ibv_close_device(ibv_context *context)
{
	if (std::unique_ptr<device> d(find(context)); d && d->process != getpid()) {
		/*
		 * A child after fork(), which has nothing but its own descriptor to give up: the threads of the library are
		 * the parent's, the kernel's objects too, and a lock may have been taken for ever.
		 */
		give_back(*d.release());
	} else if (d) {
		/* Not every application destroys all it has before. */
		d->qps.drain([](npr_qp *qp) { (void)npr_detach_qp(qp); });
		d->srqs.drain([](npr_srq *srq) { (void)npr_detach_srq(srq); });
		d->builders.drain([](builder *b) { const std::unique_ptr<builder> owned(b); });
		d->wqs.drain([](left_wq *w) { const std::unique_ptr<left_wq> owned(w); });
		while (ibv_cq *const cq = any_cq(d->lib))
			(void)npr_detach_cq(take(all().cqs, cq).lib);
		{
			const std::lock_guard lock(all().mutex);
			std::erase_if(all().channels,
				      [&](const auto &entry) { return entry.second->context == context; });
			std::erase_if(all().orphans, [&](const auto &entry) {
				return entry.second->qp_base.context == context;
			});
			std::erase_if(all().rights, [&](const auto &entry) { return entry.second.context == context; });
			std::erase_if(all().groups, [&](const auto &entry) { return entry.second.context == context; });
		}
		d->regions.clear();
		d->lib->regions.clear();
		(void)npr_close(d->lib);
		give_back(*d);
		/* Before the descriptor is another's. */
		all().devices.remove(static_cast<std::uint32_t>(context->cmd_fd), d.get());
	}
	return verbs().ibv_close_device(context);
}

/* A device whose memory need not be pinned has on-demand paging, as far as programs can tell. */
int npr::preload::query_device_ex(ibv_context *context, const ibv_query_device_ex_input *input, ibv_device_attr_ex *attr,
				  std::size_t size)
{
	device &d = *find(context);
	const int rc = d.extended.query_device_ex(context, input, attr, size);

	/* relaxed: see objects::direct */
	if (rc || !d.owner || policy().which == settings::unpin::none || !d.memory.may_unpin() ||
	    all().direct.load(std::memory_order_relaxed))
		return rc;
	if (size >= offsetof(ibv_device_attr_ex, odp_caps) + sizeof(attr->odp_caps)) {
		attr->odp_caps.general_caps = IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT;
		attr->odp_caps.per_transport_caps.rc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
			IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_SRQ_RECV;
		attr->odp_caps.per_transport_caps.uc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV;
		attr->odp_caps.per_transport_caps.ud_odp_caps =
			IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV;
	}
	if (size >= offsetof(ibv_device_attr_ex, xrc_odp_caps) + sizeof(attr->xrc_odp_caps))
		attr->xrc_odp_caps = 0;
	return rc;
}

/*
 * What is made in a thread domain has no locks of the provider's, which ends a process that uses it with two threads, and a thread
 * of the library uses queues as well.
 */
ibv_pd *npr::preload::alloc_parent_domain(ibv_context *context, ibv_parent_domain_init_attr *attr)
{
	ibv_parent_domain_init_attr a{};

	/* That of a program that knows an older libibverbs ends before what its mask does not name. */
	a.pd = attr->pd;
	a.comp_mask = attr->comp_mask;
	if (a.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) {
		a.alloc = attr->alloc;
		a.free = attr->free;
	}
	if (a.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT)
		a.pd_context = attr->pd_context;
	return find(context)->extended.alloc_parent_domain(context, &a);
}
