/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "pointers.hpp"
#include "registry.hpp"

#include <nprdma/nprdma.h>

#include <cerrno>

namespace npr::preload {

int post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad)
{
	const device &d = *find(qp->context);
	npr_qp *const lib = d.qps.find(qp->handle, qp);

	return lib ? -npr_post_send(lib, wr, bad) : d.ops.post_send(qp, wr, bad);
}

int post_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	const device &d = *find(qp->context);
	npr_qp *const lib = d.qps.find(qp->handle, qp);

	return lib ? -npr_post_recv(lib, wr, bad) : d.ops.post_recv(qp, wr, bad);
}

int post_srq_recv(ibv_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	const device &d = *find(srq->context);
	npr_srq *const lib = d.srqs.find(srq->handle, srq);

	return lib ? -npr_post_srq_recv(lib, wr, bad) : d.ops.post_srq_recv(srq, wr, bad);
}

int poll_cq(ibv_cq *cq, int n, ibv_wc *wc)
{
	const device &d = *find(cq->context);
	npr_cq *const lib = d.lib->cqs.find(cq->handle, cq);

	return lib ? npr_poll_cq(lib, n, wc) : d.ops.poll_cq(cq, n, wc);
}

int req_notify_cq(ibv_cq *cq, int solicited_only)
{
	const device &d = *find(cq->context);
	npr_cq *const lib = d.lib->cqs.find(cq->handle, cq);

	if (!lib)
		return d.ops.req_notify_cq(cq, solicited_only);
	if (!lib->notifies())
		(void)set_armed(cq, true);
	return -npr_req_notify_cq(lib, solicited_only);
}

/* It posts by itself. */
int bind_mw(ibv_qp *qp, ibv_mw *mw, ibv_mw_bind *bind)
{
	const device &d = *find(qp->context);

	return d.qps.find(qp->handle, qp) ? EOPNOTSUPP : d.ops.bind_mw(qp, mw, bind);
}

} // namespace npr::preload
