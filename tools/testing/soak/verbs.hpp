/* SPDX-License-Identifier: GPL-2.0 */
/* One end of a cell's connections: a device with a CQ of libnprdma for each queue pair. */
#ifndef NPRDMA_SOAK_VERBS_HPP
#define NPRDMA_SOAK_VERBS_HPP

#include "cell.hpp"
#include "rc.hpp"

#include <nprdma/nprdma.hpp>

#include <optional>
#include <span>

namespace soak
{

template <class T> using own = rc::handle<T>;

struct device {
	own<ibv_context> verbs;
	own<ibv_pd> pd;
	std::optional<nprdma::context> library;
	std::uint16_t lid = 0;

	explicit device(const char *name);
};

struct shared_receives {
	own<ibv_srq> verbs;
	std::optional<nprdma::srq> srq;

	shared_receives(device &d, unsigned receives);
};

struct connection_options {
	ibv_qp_type type = IBV_QPT_RC;
	unsigned send = 1, recv = 1;
	ibv_srq *srq = nullptr;
	bool all_signaled = false;
	/* The extended interfaces, for requests and for completions */
	bool extended = false, extended_poll = false;
};

/* A queue pair with a CQ of its own, both in the hands of libnprdma once attached. */
struct connection {
	connection_options with;
	own<ibv_comp_channel> channel;
	own<ibv_cq> verbs_cq;
	own<ibv_qp> verbs_qp;
	std::optional<nprdma::cq> cq;
	std::optional<nprdma::qp> qp;

	connection(device &d, const connection_options &o);
	void attach(device &d, np_addr to, std::uint32_t flags);
	[[nodiscard]] np_addr address(const device &d) const { return {verbs_qp->qp_num, d.lid}; }

	/*
	 * 0 or -errno; wr becomes the first request that was not posted. The extended interface
	 * posts all or none.
	 */
	[[nodiscard]] int post(ibv_send_wr *&wr);
	/* How many, or -errno. */
	[[nodiscard]] int poll(std::span<ibv_wc> wc);

private:
	int post_extended(ibv_send_wr *wr);
	int poll_extended(std::span<ibv_wc> wc);
};

own<ibv_mr> pin(device &d, void *memory, std::size_t length, int access = IBV_ACCESS_LOCAL_WRITE);

} // namespace soak

#endif
