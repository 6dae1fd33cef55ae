/* SPDX-License-Identifier: GPL-2.0 */
/* One end of a cell's connections: a device with a CQ of libnprdma for each queue pair. */
#ifndef NPRDMA_SOAK_VERBS_HPP
#define NPRDMA_SOAK_VERBS_HPP

#include "cell.hpp"
#include "rc.hpp"

#include <nprdma/nprdma.hpp>

#include <optional>

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

/* A queue pair with a CQ of its own, both in the hands of libnprdma once attached. */
struct connection {
	own<ibv_comp_channel> channel;
	own<ibv_cq> verbs_cq;
	own<ibv_qp> verbs_qp;
	std::optional<nprdma::cq> cq;
	std::optional<nprdma::qp> qp;

	connection(device &d, unsigned send, unsigned recv);
	void attach(device &d, np_addr to, std::uint32_t flags);
	[[nodiscard]] np_addr address(const device &d) const { return {verbs_qp->qp_num, d.lid}; }
};

own<ibv_mr> pin(device &d, void *memory, std::size_t length);

} // namespace soak

#endif
