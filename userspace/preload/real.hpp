/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The functions of libibverbs whose names are ours. */
#ifndef NPR_PRELOAD_REAL_HPP
#define NPR_PRELOAD_REAL_HPP

#include <infiniband/verbs.h>

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>

/* Macros that choose between functions; these here are the functions. */
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define NPR_EXPORT extern "C" __attribute__((visibility("default")))

namespace npr::preload {

template <class F>
F *real(const char *name, const char *version)
{
	void *const f = dlvsym(RTLD_NEXT, name, version);

	if (!f) {
		std::fprintf(stderr, "libnprdma-preload: libibverbs has no %s@%s\n", name, version);
		std::abort();
	}
	return reinterpret_cast<F *>(f);
}

/* One that not each libibverbs has: null, and then no program calls it. */
template <class F>
F *real_if_any(const char *name, const char *version)
{
	return reinterpret_cast<F *>(dlvsym(RTLD_NEXT, name, version));
}

#define REAL(name, version) decltype(::name) *const name = real<decltype(::name)>(#name, version)
#define REAL_IF_ANY(name, version) decltype(::name) *const name = real_if_any<decltype(::name)>(#name, version)

struct functions {
	REAL(ibv_open_device, "IBVERBS_1.1");
	REAL(ibv_close_device, "IBVERBS_1.1");
	REAL(ibv_reg_mr_iova2, "IBVERBS_1.8");
	REAL(ibv_rereg_mr, "IBVERBS_1.1");
	REAL(ibv_dereg_mr, "IBVERBS_1.1");
	REAL(ibv_create_comp_channel, "IBVERBS_1.0");
	REAL(ibv_destroy_comp_channel, "IBVERBS_1.0");
	REAL(ibv_create_cq, "IBVERBS_1.1");
	REAL(ibv_resize_cq, "IBVERBS_1.1");
	REAL(ibv_destroy_cq, "IBVERBS_1.1");
	REAL(ibv_get_cq_event, "IBVERBS_1.1");
	REAL(ibv_ack_cq_events, "IBVERBS_1.1");
	REAL(ibv_create_srq, "IBVERBS_1.1");
	REAL(ibv_destroy_srq, "IBVERBS_1.1");
	REAL(ibv_create_qp, "IBVERBS_1.1");
	REAL(ibv_destroy_qp, "IBVERBS_1.1");
	REAL(ibv_modify_qp, "IBVERBS_1.1");
	REAL(ibv_qp_to_qp_ex, "IBVERBS_1.6");
	REAL(ibv_query_qp, "IBVERBS_1.1");
	REAL(ibv_attach_mcast, "IBVERBS_1.1");
	REAL(ibv_detach_mcast, "IBVERBS_1.1");
	REAL(ibv_fork_init, "IBVERBS_1.1");
	REAL_IF_ANY(ibv_is_fork_initialized, "IBVERBS_1.13");
	REAL_IF_ANY(ibv_import_device, "IBVERBS_1.10");
	REAL_IF_ANY(ibv_import_mr, "IBVERBS_1.10");
	REAL_IF_ANY(ibv_unimport_mr, "IBVERBS_1.10");
	REAL_IF_ANY(ibv_query_qp_data_in_order, "IBVERBS_1.14");
	REAL_IF_ANY(ibv_reg_dmabuf_mr, "IBVERBS_1.12");
	REAL_IF_ANY(ibv_query_ece, "IBVERBS_1.10");
	REAL_IF_ANY(ibv_set_ece, "IBVERBS_1.10");
};

#undef REAL
#undef REAL_IF_ANY

inline const functions &verbs()
{
	static const functions f;

	return f;
}

} // namespace npr::preload

#endif
