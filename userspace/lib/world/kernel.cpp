/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "world/kernel.hpp"
#include "world/uverbs_cmd.hpp"

#include <cerrno>
#include <fcntl.h>
#include <limits>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace npr {

template <class Cmd>
int uverbs_kernel::run(Cmd &cmd) noexcept
{
	cmd.set_driver(driver_);
	return ioctl(fd_, RDMA_VERBS_IOCTL, cmd.header()) ? -errno : 0;
}

int uverbs_kernel::query(rdma_np_query &out) noexcept
{
	/*
	 * The kernel answers EINVAL to a call with another driver's number before
	 * it looks at anything else, and libibverbs keeps the number to itself.
	 */
	int rc = -EINVAL;

	for (driver_ = RDMA_DRIVER_MLX5; driver_ < 64; ++driver_) {
		uverbs_cmd<1> cmd(UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_QUERY);
		out = {};
		cmd.out(RDMA_NP_ATTR_QUERY_RESP, out);
		rc = run(cmd);
		if (rc != -EINVAL)
			break;
	}
	/* no such object, or no ioctl interface at all */
	if (rc == -EPROTONOSUPPORT || rc == -ENOTTY || rc == -EINVAL)
		return -EOPNOTSUPP;
	if (!rc && out.abi_version != RDMA_NP_ABI_VERSION)
		return -EOPNOTSUPP;
	return rc;
}

int uverbs_kernel::channel(int &fd) noexcept
{
	uverbs_cmd<2> cmd(UVERBS_OBJECT_NP_CHANNEL, RDMA_NP_METHOD_CHANNEL_ALLOC);
	const std::uint32_t event_size = sizeof(rdma_np_event);

	cmd.fd_out(RDMA_NP_ATTR_CHANNEL_FD);
	cmd.in(RDMA_NP_ATTR_CHANNEL_EVENT_SIZE, event_size);
	if (const int rc = run(cmd))
		return rc;
	fd = cmd.new_fd(RDMA_NP_ATTR_CHANNEL_FD);
	const int flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) || fcntl(fd, F_SETFD, FD_CLOEXEC)) {
		const int rc = -errno;
		close(fd);
		return rc;
	}
	return 0;
}

std::atomic<std::uint64_t> *uverbs_kernel::map_posted(int channel) noexcept
{
	static_assert(sizeof(std::atomic<std::uint64_t>) == sizeof(std::uint64_t) &&
		      std::atomic<std::uint64_t>::is_always_lock_free);
	void *const p = mmap(nullptr, RDMA_NP_PAGE_SIZE, PROT_READ, MAP_SHARED, channel, 0);

	return p == MAP_FAILED ? nullptr : static_cast<std::atomic<std::uint64_t> *>(p);
}

void uverbs_kernel::unmap_posted(std::atomic<std::uint64_t> *posted) noexcept
{
	munmap(posted, RDMA_NP_PAGE_SIZE);
}

int uverbs_kernel::read_events(int channel, std::span<rdma_np_event> events) noexcept
{
	ssize_t n;

	/* A signal is no reason to take what is there for read. */
	do
		n = read(channel, events.data(), events.size_bytes());
	while (n < 0 && errno == EINTR);
	return static_cast<int>(n / static_cast<ssize_t>(sizeof(rdma_np_event)));
}

int uverbs_kernel::resolve(const ibv_qp &qp, int channel, std::uint32_t rkey, std::uint64_t addr,
			   rdma_np_region_info &out) noexcept
{
	uverbs_cmd<5> cmd(UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_RESOLVE);

	out = {};
	cmd.idr(RDMA_NP_ATTR_RESOLVE_QP, qp.handle);
	cmd.fd(RDMA_NP_ATTR_RESOLVE_CHANNEL, channel);
	cmd.in(RDMA_NP_ATTR_RESOLVE_RKEY, rkey);
	cmd.out(RDMA_NP_ATTR_RESOLVE_RESP, out);
	cmd.in(RDMA_NP_ATTR_RESOLVE_ADDR, addr);
	return run(cmd);
}

int uverbs_kernel::fault(const ibv_qp &qp, int channel, const rdma_np_fault_req &req,
			 std::span<const rdma_np_range> ranges) noexcept
{
	uverbs_cmd<4> cmd(UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_FAULT);

	cmd.idr(RDMA_NP_ATTR_FAULT_QP, qp.handle);
	cmd.fd(RDMA_NP_ATTR_FAULT_CHANNEL, channel);
	cmd.in(RDMA_NP_ATTR_FAULT_REQ, req);
	cmd.in(RDMA_NP_ATTR_FAULT_RANGES, std::as_bytes(ranges));
	return run(cmd);
}

int uverbs_kernel::release(const ibv_qp &qp, std::uint64_t hold) noexcept
{
	uverbs_cmd<2> cmd(UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_RELEASE);

	cmd.idr(RDMA_NP_ATTR_RELEASE_QP, qp.handle);
	cmd.in(RDMA_NP_ATTR_RELEASE_HOLD, hold);
	return run(cmd);
}

int uverbs_kernel::forget(const ibv_qp &qp, std::uint64_t region) noexcept
{
	uverbs_cmd<2> cmd(UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_FORGET);

	cmd.idr(RDMA_NP_ATTR_FORGET_QP, qp.handle);
	cmd.in(RDMA_NP_ATTR_FORGET_REGION, region);
	return run(cmd);
}

int uverbs_kernel::hold(std::uint32_t mr, const rdma_np_hold_req &req, rdma_np_hold_info &out, std::uint32_t &handle,
			int channel) noexcept
{
	uverbs_cmd<5> cmd(UVERBS_OBJECT_NP_HOLD, RDMA_NP_METHOD_HOLD_ALLOC);

	out = {};
	cmd.idr(RDMA_NP_ATTR_HOLD_ALLOC_HANDLE, 0);
	cmd.idr(RDMA_NP_ATTR_HOLD_ALLOC_MR, mr);
	cmd.in(RDMA_NP_ATTR_HOLD_ALLOC_REQ, req);
	cmd.out(RDMA_NP_ATTR_HOLD_ALLOC_RESP, out);
	if (channel >= 0)
		cmd.fd(RDMA_NP_ATTR_HOLD_ALLOC_CHANNEL, channel);
	if (const int rc = run(cmd))
		return rc;
	handle = cmd.new_handle(RDMA_NP_ATTR_HOLD_ALLOC_HANDLE);
	return 0;
}

int uverbs_kernel::hold_free(std::uint32_t handle) noexcept
{
	uverbs_cmd<1> cmd(UVERBS_OBJECT_NP_HOLD, RDMA_NP_METHOD_HOLD_FREE);

	cmd.idr(RDMA_NP_ATTR_HOLD_FREE_HANDLE, handle);
	return run(cmd);
}

int uverbs_kernel::query_mr(const ibv_mr &mr, rdma_np_mr_info &out) noexcept
{
	uverbs_cmd<2> cmd(UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_QUERY_MR);

	out = {};
	cmd.idr(RDMA_NP_ATTR_QUERY_MR_HANDLE, mr.handle);
	cmd.out(RDMA_NP_ATTR_QUERY_MR_RESP, out);
	return run(cmd);
}

int uverbs_kernel::set_error(ibv_qp &qp) noexcept
{
	ibv_qp_attr attr{};

	attr.qp_state = IBV_QPS_ERR;
	return -ibv_modify_qp(&qp, &attr, IBV_QP_STATE);
}

bool uverbs_kernel::connected(ibv_qp &qp) noexcept
{
	ibv_qp_attr attr{};
	ibv_qp_init_attr init{};

	return !ibv_query_qp(&qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_RTS;
}

std::uint64_t uverbs_kernel::tries_for(ibv_qp &qp) noexcept
{
	ibv_qp_attr attr{};
	ibv_qp_init_attr init{};

	if (ibv_query_qp(&qp, &attr, IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT, &init))
		return 0;
	/* ibv_modify_qp(3): 4.096 us * 2^timeout, 0: for ever */
	return attr.timeout ? (4096ULL << (attr.timeout & 31)) * (attr.retry_cnt + 1U)
			    : std::numeric_limits<std::uint64_t>::max();
}

} // namespace npr
