/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What verbs.h has as inline functions: calls through pointers of a device's context. */
#ifndef NPR_PRELOAD_POINTERS_HPP
#define NPR_PRELOAD_POINTERS_HPP

#include <cstddef>
#include <cstdint>
#include <functional>
#include <infiniband/verbs.h>

struct npr_cq;

namespace npr::preload {

/* These are in the ops of known devices only, so what they are called for is of one. */
int post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad);
int post_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad);
int post_srq_recv(ibv_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **bad);
int post_wq_recv(ibv_wq *wq, ibv_recv_wr *wr, ibv_recv_wr **bad);
int poll_cq(ibv_cq *cq, int n, ibv_wc *wc);
int req_notify_cq(ibv_cq *cq, int solicited_only);
int bind_mw(ibv_qp *qp, ibv_mw *mw, ibv_mw_bind *bind);
ibv_qp *create_qp_ex(ibv_context *context, ibv_qp_init_attr_ex *attr);
ibv_cq_ex *create_cq_ex(ibv_context *context, ibv_cq_init_attr_ex *attr);
ibv_srq *create_srq_ex(ibv_context *context, ibv_srq_init_attr_ex *attr);
ibv_wq *create_wq(ibv_context *context, ibv_wq_init_attr *attr);
int destroy_wq(ibv_wq *wq);
ibv_xrcd *open_xrcd(ibv_context *context, ibv_xrcd_init_attr *attr);
int close_xrcd(ibv_xrcd *xrcd);
ibv_qp *open_qp(ibv_context *context, ibv_qp_open_attr *attr);
ibv_mr *reg_dm_mr(ibv_pd *pd, ibv_dm *dm, std::uint64_t offset, std::size_t length, unsigned access);
ibv_mr *alloc_null_mr(ibv_pd *pd);
ibv_pd *alloc_parent_domain(ibv_context *context, ibv_parent_domain_init_attr *attr);
int query_device_ex(ibv_context *context, const ibv_query_device_ex_input *input, ibv_device_attr_ex *attr, size_t size);

/* A device that the program has opened otherwise than by ibv_open_device(), or null. */
ibv_context *adopt_opened(ibv_context *context);

/* By @make(attr), one that the library does not take. */
ibv_cq_ex *create_left_cq_ex(ibv_cq_init_attr_ex *attr, const std::function<ibv_cq_ex *(ibv_cq_init_attr_ex *)> &make);

/* What only the library tells of @cq reaches those who wait for its channel. False and errno. */
[[nodiscard]] bool watch(ibv_cq *cq, const npr_cq &lib);

} // namespace npr::preload

#endif
