/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The methods of uverbs object nprdma. Everything returns 0 or a negative errno.
 * Virtual, so that tests put a kernel of their own behind the library.
 */
#ifndef NPR_KERNEL_HPP
#define NPR_KERNEL_HPP

#include <atomic>
#include <cstdint>
#include <infiniband/verbs.h>
#include <rdma/nprdma.h>
#include <span>

namespace npr {

class kernel {
public:
	virtual ~kernel() = default;

	[[nodiscard]] virtual int query(rdma_np_query &out) noexcept = 0;
	/* A new event channel, non-blocking and close-on-exec. */
	[[nodiscard]] virtual int channel(int &fd) noexcept = 0;
	/* How many events were posted there so far, to read only. Null: not with this kernel. */
	[[nodiscard]] virtual std::atomic<std::uint64_t> *map_posted(int channel) noexcept = 0;
	virtual void unmap_posted(std::atomic<std::uint64_t> *posted) noexcept = 0;
	/* How many were there; none, or an error: not above 0. */
	[[nodiscard]] virtual int read_events(int channel, std::span<rdma_np_event> events) noexcept = 0;
	/* Blocks. @addr: where the key is to be used. */
	[[nodiscard]] virtual int resolve(const ibv_qp &qp, int channel, std::uint32_t rkey, std::uint64_t addr,
					  rdma_np_region_info &out) noexcept = 0;
	[[nodiscard]] virtual int fault(const ibv_qp &qp, int channel, const rdma_np_fault_req &req,
					std::span<const rdma_np_range> ranges) noexcept = 0;
	virtual int release(const ibv_qp &qp, std::uint64_t hold) noexcept = 0;
	virtual int forget(const ibv_qp &qp, std::uint64_t region) noexcept = 0;
	/* Pins; for @mr only the number of its handle counts. With @channel it is a lease. */
	[[nodiscard]] virtual int hold(std::uint32_t mr, const rdma_np_hold_req &req, rdma_np_hold_info &out,
				       std::uint32_t &handle, int channel) noexcept = 0;
	virtual int hold_free(std::uint32_t handle) noexcept = 0;
	[[nodiscard]] virtual int query_mr(const ibv_mr &mr, rdma_np_mr_info &out) noexcept = 0;
	[[nodiscard]] virtual int set_error(ibv_qp &qp) noexcept = 0;
	/* Can it send? */
	[[nodiscard]] virtual bool connected(ibv_qp &qp) noexcept = 0;
	/* How long does it try to reach a peer? In ns; the largest number if for ever. */
	[[nodiscard]] virtual std::uint64_t tries_for(ibv_qp &qp) noexcept = 0;
};

class uverbs_kernel final : public kernel {
public:
	explicit uverbs_kernel(const ibv_context &verbs) noexcept : fd_(verbs.cmd_fd) {}

	/* Also finds out the driver's number, which every call carries. */
	[[nodiscard]] int query(rdma_np_query &out) noexcept override;
	[[nodiscard]] int channel(int &fd) noexcept override;
	[[nodiscard]] std::atomic<std::uint64_t> *map_posted(int channel) noexcept override;
	void unmap_posted(std::atomic<std::uint64_t> *posted) noexcept override;
	[[nodiscard]] int read_events(int channel, std::span<rdma_np_event> events) noexcept override;
	[[nodiscard]] int resolve(const ibv_qp &qp, int channel, std::uint32_t rkey, std::uint64_t addr,
				  rdma_np_region_info &out) noexcept override;
	[[nodiscard]] int fault(const ibv_qp &qp, int channel, const rdma_np_fault_req &req,
				std::span<const rdma_np_range> ranges) noexcept override;
	int release(const ibv_qp &qp, std::uint64_t hold) noexcept override;
	int forget(const ibv_qp &qp, std::uint64_t region) noexcept override;
	[[nodiscard]] int hold(std::uint32_t mr, const rdma_np_hold_req &req, rdma_np_hold_info &out,
			       std::uint32_t &handle, int channel) noexcept override;
	int hold_free(std::uint32_t handle) noexcept override;
	[[nodiscard]] int query_mr(const ibv_mr &mr, rdma_np_mr_info &out) noexcept override;
	[[nodiscard]] int set_error(ibv_qp &qp) noexcept override;
	[[nodiscard]] bool connected(ibv_qp &qp) noexcept override;
	[[nodiscard]] std::uint64_t tries_for(ibv_qp &qp) noexcept override;

private:
	template <class Cmd>
	[[nodiscard]] int run(Cmd &cmd) noexcept;

	int fd_;
	std::uint32_t driver_ = 0;
};

} // namespace npr

#endif
