/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * One end's device, memory and queue pairs, by plain verbs or through libnprdma, as the mode
 * says. Plain verbs are also what the preload library finds: the same code runs in both modes.
 */
#ifndef NP_PERF_LINK_HPP
#define NP_PERF_LINK_HPP

#include "../demo/rc.hpp"
#include "memory.hpp"
#include "messages.hpp"

#include <nprdma/nprdma.hpp>

#include <optional>
#include <span>
#include <string>
#include <vector>

namespace perf
{

/* A queue pair with a completion queue of its own. */
class queue
{
public:
	queue(ibv_pd &pd, const test &t, const layout &l, nprdma::context *library, std::uint8_t access);

	void connect(const test &t, const endpoint &mine, const endpoint &theirs, qp_address psn_of,
		     qp_address peer, int gid_index);

	/* 0 or an errno. */
	[[nodiscard]] int post_send(ibv_send_wr &wr) noexcept
	{
		ibv_send_wr *bad = nullptr;

		return library_qp_ ? -library_qp_->post_send(wr, bad) : ibv_post_send(qp_.get(), &wr, &bad);
	}
	[[nodiscard]] int post_recv(ibv_recv_wr &wr) noexcept
	{
		ibv_recv_wr *bad = nullptr;

		return library_qp_ ? -library_qp_->post_recv(wr, bad) : ibv_post_recv(qp_.get(), &wr, &bad);
	}
	/* A count, or negative. */
	[[nodiscard]] int poll(std::span<ibv_wc> wc) noexcept
	{
		return library_cq_ ? library_cq_->poll(wc)
				   : ibv_poll_cq(cq_.get(), static_cast<int>(wc.size()), wc.data());
	}

	[[nodiscard]] std::uint32_t number() const noexcept { return qp_->qp_num; }
	[[nodiscard]] unsigned receives() const noexcept { return receives_; }
	/* Zeros without the library. */
	[[nodiscard]] npr_stats statistics() const noexcept
	{
		return library_qp_ ? library_qp_->stats() : npr_stats{};
	}
	/* For UD. */
	[[nodiscard]] ibv_ah *peer() const noexcept { return peer_.get(); }
	[[nodiscard]] std::uint32_t peer_number() const noexcept { return peer_number_; }

private:
	rc::handle<ibv_cq> cq_;
	rc::handle<ibv_qp> qp_;
	rc::handle<ibv_ah> peer_;
	std::optional<nprdma::cq> library_cq_;
	std::optional<nprdma::qp> library_qp_;
	std::uint32_t peer_number_ = 0;
	unsigned receives_;
};

class link
{
public:
	link(const test &t, const device_choice &device, bool client);

	[[nodiscard]] endpoint self() const;
	void connect(const endpoint &theirs);

	[[nodiscard]] std::vector<queue> &queues() noexcept { return queues_; }
	[[nodiscard]] const memory &mem() const noexcept { return memory_; }
	[[nodiscard]] std::uint32_t lkey() const noexcept { return mr()->lkey; }
	/* Nothing for a pinned region. */
	[[nodiscard]] std::optional<npr_mr_attr> counters() const;

private:
	[[nodiscard]] ibv_mr *mr() const noexcept { return region_ ? region_->get() : plain_.get(); }

	const test test_;
	rc::handle<ibv_context> context_;
	rc::handle<ibv_pd> pd_;
	ibv_port_attr port_{};
	ibv_gid gid_{};
	int gid_index_ = 0;
	memory memory_;
	std::optional<nprdma::context> library_;
	rc::handle<ibv_mr> plain_;
	std::optional<nprdma::region> region_;
	std::vector<queue> queues_;
};

} // namespace perf

#endif // NP_PERF_LINK_HPP
