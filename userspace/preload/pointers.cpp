/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "pointers.hpp"
#include "protocol/opcodes.hpp"
#include "registry.hpp"

#include <nprdma/nprdma.h>

#include <cerrno>

namespace npr::preload {

namespace {

/* Inline data is the CPU's to read. */
bool uses_keys(const ibv_send_wr &wr)
{
	return !(wr.send_flags & IBV_SEND_INLINE);
}

bool uses_keys(const ibv_recv_wr &)
{
	return true;
}

/* What the library has not taken: by the provider's @f. */
template <class Object, class Wr>
int post_left(device &d, int (*f)(Object *, Wr *, Wr **), Object *object, Wr *wr, Wr **bad)
{
	if (!d.regions.any())
		return f(object, wr, bad);
	return d.regions.post(
		wr, bad, [](const Wr &w) { return uses_keys(w); },
		[&](Wr &w) {
			Wr *b;

			return f(object, &w, &b);
		});
}

/* The program is told that it is invalid, and could look for what is wrong with it. */
[[gnu::cold]] void tell_opcode(device &d, const ibv_send_wr &wr)
{
	if (!npr::is_known(wr.opcode) && d.told.first(once::opcode))
		say(&d.verbs, "a work request of opcode %u (TSO, an atomic WRITE, or one of a newer libibverbs) is refused: without this library "
		    "the provider decides", static_cast<unsigned>(wr.opcode));
}

} // namespace

int post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad)
{
	device &d = *find(qp->context);
	npr_qp *const lib = d.qps.find(qp->handle, qp);

	if (!lib) [[unlikely]] {
		ibv_qp *const real = real_of(qp);

		return real != qp ? post_send(real, wr, bad) : post_left(d, d.ops.post_send, qp, wr, bad);
	}
	const int rc = -npr_post_send(lib, wr, bad);
	if (rc == EINVAL) [[unlikely]]
		tell_opcode(d, **bad);
	return rc;
}

int post_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	device &d = *find(qp->context);
	npr_qp *const lib = d.qps.find(qp->handle, qp);

	if (!lib) [[unlikely]] {
		ibv_qp *const real = real_of(qp);

		return real != qp ? post_recv(real, wr, bad) : post_left(d, d.ops.post_recv, qp, wr, bad);
	}
	return -npr_post_recv(lib, wr, bad);
}

int post_wq_recv(ibv_wq *wq, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	device &d = *find(wq->context);

	return post_left(d, d.wqs.find(wq->handle, wq)->post_recv, wq, wr, bad);
}

int post_srq_recv(ibv_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	device &d = *find(srq->context);
	npr_srq *const lib = d.srqs.find(srq->handle, srq);

	return lib ? -npr_post_srq_recv(lib, wr, bad) : post_left(d, d.ops.post_srq_recv, srq, wr, bad);
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
	if (!lib->notifies()) {
		if (!watch(cq, *lib))
			return errno;
		(void)set_armed(cq, true);
	}
	return -npr_req_notify_cq(lib, solicited_only);
}

/*
 * The provider's posts by itself, which the library has to do. A window of type 1 gets its next key
 * with each binding, as verbs say.
 */
int bind_mw(ibv_qp *qp, ibv_mw *mw, ibv_mw_bind *bind)
{
	qp = real_of(qp);
	const device &d = *find(qp->context);
	npr_qp *const lib = d.qps.find(qp->handle, qp);

	if (!lib)
		return d.ops.bind_mw(qp, mw, bind);
	if (mw->type != IBV_MW_TYPE_1)
		return EINVAL;
	const ibv_mr *const mr = bind->bind_info.mr;
	if ((!mr && (bind->bind_info.addr || bind->bind_info.length)) || (mr && mr->pd != mw->pd))
		return EINVAL;
	ibv_send_wr wr{}, *bad;
	wr.wr_id = bind->wr_id;
	wr.opcode = IBV_WR_BIND_MW;
	wr.send_flags = bind->send_flags;
	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
	wr.bind_mw.bind_info = bind->bind_info;
	const int rc = -npr_post_send(lib, &wr, &bad);
	if (!rc)
		mw->rkey = wr.bind_mw.rkey;
	return rc;
}

} // namespace npr::preload
