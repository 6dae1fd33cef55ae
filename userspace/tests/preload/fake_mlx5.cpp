/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The provider's library with its direct verbs, which do nothing. */
#include "fake_verbs.hpp"

#include <infiniband/mlx5dv.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT bool mlx5dv_is_supported(ibv_device *)
{
	return true;
}

EXPORT ibv_context *mlx5dv_open_device(ibv_device *device, mlx5dv_context_attr *)
{
	return fake_open(device);
}

EXPORT int mlx5dv_query_device(ibv_context *, mlx5dv_context *)
{
	return 0;
}

EXPORT int mlx5dv_init_obj(mlx5dv_obj *, uint64_t)
{
	return 0;
}

EXPORT ibv_cq_ex *mlx5dv_create_cq(ibv_context *, ibv_cq_init_attr_ex *, mlx5dv_cq_init_attr *)
{
	static ibv_cq_ex object;

	return &object;
}

EXPORT ibv_qp *mlx5dv_create_qp(ibv_context *, ibv_qp_init_attr_ex *, mlx5dv_qp_init_attr *)
{
	static ibv_qp object;

	return &object;
}

EXPORT ibv_wq *mlx5dv_create_wq(ibv_context *, ibv_wq_init_attr *, mlx5dv_wq_init_attr *)
{
	static ibv_wq object;

	return &object;
}

EXPORT mlx5dv_mkey *mlx5dv_create_mkey(mlx5dv_mkey_init_attr *)
{
	static mlx5dv_mkey object;

	return &object;
}

EXPORT mlx5dv_devx_obj *mlx5dv_devx_obj_create(ibv_context *, const void *, size_t, void *, size_t)
{
	static int object;

	return reinterpret_cast<mlx5dv_devx_obj *>(&object);
}

EXPORT mlx5dv_qp_ex *mlx5dv_qp_ex_from_ibv_qp_ex(ibv_qp_ex *ex)
{
	return reinterpret_cast<mlx5dv_qp_ex *>(ex);
}
