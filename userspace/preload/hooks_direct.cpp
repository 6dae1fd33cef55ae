/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Direct verbs: programs that fill the queues of the adapter themselves. The library cannot see what they
 * post, so their memory stays pinned. It is registered before there is a queue, so the first question for direct verbs
 * decides. A program that can do without them is told that there are none, and uses plain verbs on unpinned
 * memory: UCX, unless its user has named a transport that is made of them; others if NPRDMA_DIRECT_VERBS says so.
 *
 * The real functions are those of the provider's library, if the program has it: it may be found in no
 * scope but that of a module of the program.
 */
#include "pointers.hpp"
#include "policy.hpp"
#include "real.hpp"
#include "registry.hpp"

#include <infiniband/mlx5dv.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

using namespace npr::preload;

namespace {

template <class F>
F *direct(const char *name)
{
	static void *const library = dlopen("libmlx5.so.1", RTLD_LAZY | RTLD_NOLOAD);

	return library ? reinterpret_cast<F *>(dlsym(library, name)) : nullptr;
}

#define DIRECT(name) \
	[] { \
		static decltype(::name) *const f = direct<decltype(::name)>(#name); \
		return f; \
	}()

/* Of those that UCX_TLS may name, these are made of direct verbs. */
bool ucx_is_to_use_them()
{
	const char *const s = std::getenv("UCX_TLS");
	std::string_view list = s ? s : "";

	/* All but those. */
	if (list.starts_with('^'))
		return false;
	while (!list.empty()) {
		const auto comma = list.find(',');
		const std::string_view name = list.substr(0, std::min(comma, list.find(':')));

		if (name.ends_with("_x") || name.ends_with("_mlx5") || name == "dc")
			return true;
		list.remove_prefix(comma == list.npos ? list.size() : comma + 1);
	}
	return false;
}

/* True: @caller may not have them. */
bool hidden(const void *caller)
{
	using direct = settings::direct;
	const auto does_without = [&] {
		Dl_info module;

		return dladdr(caller, &module) && module.dli_fname && std::strstr(module.dli_fname, "/libuct_ib") &&
			!ucx_is_to_use_them();
	};

	if (policy().direct_verbs == direct::hidden || (policy().direct_verbs == direct::automatic && does_without())) {
		errno = EOPNOTSUPP;
		return true;
	}
	return false;
}

#define HIDDEN() hidden(__builtin_return_address(0))

/* By @make(f), if the provider has the function, what needs the program's memory on @context pinned. */
template <class F, class Make>
auto make_direct(F *f, bool may_not, ibv_context *context, const char *what, Make &&make) -> decltype(make(f))
{
	if (!f || may_not) {
		errno = EOPNOTSUPP;
		return nullptr;
	}
	device *const d = find(context);
	return d ? make_pinned(*d, what, [&] { return make(f); }) : make(f);
}

/* 0 or an errno. */
int init_obj(decltype(::mlx5dv_init_obj) *f, mlx5dv_obj *obj, std::uint64_t type)
{
	const auto direct = [](ibv_context *context, const void *object) {
		device *const d = find(context);

		if (d && !keep_pinned(*d, "direct access to its queues (mlx5dv_init_obj)"))
			return false;
		if (d)
			d->memory.is_for(object);
		return true;
	};

	if ((type & MLX5DV_OBJ_QP && !direct(obj->qp.in->context, obj->qp.in)) ||
	    (type & MLX5DV_OBJ_CQ && !direct(obj->cq.in->context, obj->cq.in)) ||
	    (type & MLX5DV_OBJ_SRQ && !direct(obj->srq.in->context, obj->srq.in)) ||
	    (type & MLX5DV_OBJ_RWQ && !direct(obj->rwq.in->context, obj->rwq.in)))
		return EOPNOTSUPP;
	if (type & MLX5DV_OBJ_QP)
		leave(obj->qp.in);
	if (type & MLX5DV_OBJ_CQ)
		leave(obj->cq.in);
	return f(obj, type);
}

} // namespace

NPR_EXPORT bool mlx5dv_is_supported(ibv_device *device)
{
	auto *const f = DIRECT(mlx5dv_is_supported);

	if (!f || HIDDEN() || !f(device))
		return false;
	all().direct.store(true, std::memory_order_relaxed);
	return true;
}

NPR_EXPORT ibv_context *mlx5dv_open_device(ibv_device *device, mlx5dv_context_attr *attr)
{
	auto *const f = DIRECT(mlx5dv_open_device);

	if (!f || HIDDEN()) {
		errno = EOPNOTSUPP;
		return nullptr;
	}
	const opening now;
	ibv_context *const context = f(device, attr);
	if (context)
		all().direct.store(true, std::memory_order_relaxed);
	return adopt_opened(context);
}

NPR_EXPORT int mlx5dv_query_device(ibv_context *context, mlx5dv_context *attr)
{
	auto *const f = DIRECT(mlx5dv_query_device);

	return f && !HIDDEN() ? f(context, attr) : EOPNOTSUPP;
}

/* Queues that the program fills and empties itself from here on. */
NPR_EXPORT int mlx5dv_init_obj(mlx5dv_obj *obj, std::uint64_t type)
{
	auto *const f = DIRECT(mlx5dv_init_obj);

	if (!f || HIDDEN())
		return EOPNOTSUPP;
	if (!(type & MLX5DV_OBJ_QP))
		return init_obj(f, obj, type);
	/* The structure is of the size that the program's header gives it. */
	ibv_qp *const named = obj->qp.in;
	obj->qp.in = real_of(named);
	const int rc = init_obj(f, obj, type);
	obj->qp.in = named;
	return rc;
}

NPR_EXPORT ibv_cq_ex *mlx5dv_create_cq(ibv_context *context, ibv_cq_init_attr_ex *attr, mlx5dv_cq_init_attr *more)
{
	const bool may_not = HIDDEN();

	return create_left_cq_ex(attr, [&](ibv_cq_init_attr_ex *a) {
		return make_direct(DIRECT(mlx5dv_create_cq), may_not, context, "a completion queue of direct verbs",
			    [&](auto *f) { return f(context, a, more); });
	});
}

NPR_EXPORT ibv_qp *mlx5dv_create_qp(ibv_context *context, ibv_qp_init_attr_ex *attr, mlx5dv_qp_init_attr *more)
{
	return make_direct(DIRECT(mlx5dv_create_qp), HIDDEN(), context, "a queue pair of direct verbs",
		    [&](auto *f) { return f(context, attr, more); });
}

NPR_EXPORT ibv_wq *mlx5dv_create_wq(ibv_context *context, ibv_wq_init_attr *attr, mlx5dv_wq_init_attr *more)
{
	return make_direct(DIRECT(mlx5dv_create_wq), HIDDEN(), context, "a receive work queue of direct verbs",
		    [&](auto *f) { return f(context, attr, more); });
}

/* It shows memory of other regions, by their keys. */
NPR_EXPORT mlx5dv_mkey *mlx5dv_create_mkey(mlx5dv_mkey_init_attr *attr)
{
	return make_direct(DIRECT(mlx5dv_create_mkey), HIDDEN(), attr->pd->context, "a memory key of direct verbs",
		    [&](auto *f) { return f(attr); });
}

/* A queue, or a key, or nothing of the kind: what it is the adapter knows. */
NPR_EXPORT mlx5dv_devx_obj *mlx5dv_devx_obj_create(ibv_context *context, const void *in, std::size_t inlen, void *out,
						   std::size_t outlen)
{
	return make_direct(DIRECT(mlx5dv_devx_obj_create), HIDDEN(), context, "an object of DevX",
		    [&](auto *f) { return f(context, in, inlen, out, outlen); });
}

/* Of a queue pair of ours there is none: it is not the provider's object. */
NPR_EXPORT mlx5dv_qp_ex *mlx5dv_qp_ex_from_ibv_qp_ex(ibv_qp_ex *ex)
{
	auto *const f = DIRECT(mlx5dv_qp_ex_from_ibv_qp_ex);

	if (f && !find_ex(ex))
		return f(ex);
	errno = EOPNOTSUPP;
	return nullptr;
}
