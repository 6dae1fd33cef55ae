/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What verbs.h has as inline functions: calls through pointers of a device's context. */
#ifndef NPR_PRELOAD_POINTERS_HPP
#define NPR_PRELOAD_POINTERS_HPP

#include <infiniband/verbs.h>

namespace npr::preload {

/* These are in the ops of known devices only, so what they are called for is of one. */
int post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad);
int post_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad);
int post_srq_recv(ibv_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **bad);
int poll_cq(ibv_cq *cq, int n, ibv_wc *wc);
int req_notify_cq(ibv_cq *cq, int solicited_only);
int bind_mw(ibv_qp *qp, ibv_mw *mw, ibv_mw_bind *bind);
ibv_qp *create_qp_ex(ibv_context *context, ibv_qp_init_attr_ex *attr);

} // namespace npr::preload

#endif
