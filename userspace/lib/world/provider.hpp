/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the library calls below itself: the functions of a device's provider, as they are when the
 * device is opened, and those of libibverbs whose names the preload library takes. The preload library
 * changes the pointers in the device's context afterwards, so that applications come here by
 * them; what the library itself calls must not come here again.
 */
#ifndef NPR_PROVIDER_HPP
#define NPR_PROVIDER_HPP

#include <infiniband/verbs.h>

namespace npr {

struct provider {
	explicit provider(const ibv_context &verbs) noexcept
	    : post_send(verbs.ops.post_send), post_recv(verbs.ops.post_recv),
	      post_srq_recv(verbs.ops.post_srq_recv), poll_cq(verbs.ops.poll_cq),
	      req_notify_cq(verbs.ops.req_notify_cq)
	{
	}

	decltype(ibv_context_ops::post_send) post_send;
	decltype(ibv_context_ops::post_recv) post_recv;
	decltype(ibv_context_ops::post_srq_recv) post_srq_recv;
	decltype(ibv_context_ops::poll_cq) poll_cq;
	decltype(ibv_context_ops::req_notify_cq) req_notify_cq;
	decltype(::ibv_reg_mr_iova2) *reg_mr = ::ibv_reg_mr_iova2;
	decltype(::ibv_dereg_mr) *dereg_mr = ::ibv_dereg_mr;
};

} // namespace npr

#endif
