/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The counters of a local unpinned region, straight from the kernel, so that
 * the demo's responder needs nothing but libibverbs.
 */
#ifndef NPRDMA_DEMO_MR_COUNTERS_HPP
#define NPRDMA_DEMO_MR_COUNTERS_HPP

#include <infiniband/verbs.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/nprdma.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <sys/ioctl.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>

namespace demo
{

/* Nothing: the region is pinned, or the device is not an mlx5. */
[[nodiscard]] inline std::optional<rdma_np_mr_info> mr_counters(const ibv_mr &mr) noexcept
{
	rdma_np_mr_info info{};
	/* The header ends in a flexible array, which C++ lets nothing follow. */
	alignas(ib_uverbs_ioctl_hdr)
	    std::byte call[sizeof(ib_uverbs_ioctl_hdr) + 2 * sizeof(ib_uverbs_attr)]{};
	auto *header = new (call) ib_uverbs_ioctl_hdr{};

	header->length = sizeof(call);
	header->object_id = UVERBS_OBJECT_NPRDMA;
	header->method_id = RDMA_NP_METHOD_QUERY_MR;
	header->num_attrs = 2;
	header->driver_id = RDMA_DRIVER_MLX5;
	header->attrs[0].attr_id = RDMA_NP_ATTR_QUERY_MR_HANDLE;
	header->attrs[0].flags = UVERBS_ATTR_F_MANDATORY;
	header->attrs[0].data = mr.handle;
	header->attrs[1].attr_id = RDMA_NP_ATTR_QUERY_MR_RESP;
	header->attrs[1].flags = UVERBS_ATTR_F_MANDATORY;
	header->attrs[1].len = sizeof(info);
	header->attrs[1].data = reinterpret_cast<std::uintptr_t>(&info);
	if (ioctl(mr.context->cmd_fd, RDMA_VERBS_IOCTL, call))
		return std::nullopt;
	return info;
}

} // namespace demo

#endif // NPRDMA_DEMO_MR_COUNTERS_HPP
