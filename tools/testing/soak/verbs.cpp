// SPDX-License-Identifier: GPL-2.0
/* Making and connecting what a cell's two ends need; errors are exceptions. */
#include "verbs.hpp"

namespace soak
{

device::device(const char *name) : verbs(rc::own(np_open_device(name), "open the device"))
{
	ibv_port_attr port{};

	if (int error = ibv_query_port(verbs.get(), 1, &port))
		rc::fail(error, "ibv_query_port");
	lid = port.lid;
	pd = rc::own(ibv_alloc_pd(verbs.get()), "ibv_alloc_pd");
	library.emplace(*verbs);
}

connection::connection(device &d, unsigned send, unsigned recv)
    : channel(rc::own(ibv_create_comp_channel(d.verbs.get()), "ibv_create_comp_channel")),
      verbs_cq(rc::own(ibv_create_cq(d.verbs.get(), static_cast<int>(4 * send + 2 * recv), nullptr, channel.get(), 0),
		    "ibv_create_cq"))
{
	ibv_qp_init_attr init{};

	init.send_cq = verbs_cq.get();
	init.recv_cq = verbs_cq.get();
	init.qp_type = IBV_QPT_RC;
	init.cap.max_send_wr = 2 * send;
	init.cap.max_recv_wr = recv;
	init.cap.max_send_sge = 4;
	init.cap.max_recv_sge = 2;
	init.cap.max_inline_data = 64;
	verbs_qp = rc::own(ibv_create_qp(d.pd.get(), &init), "ibv_create_qp");
}

void connection::attach(device &d, np_addr to, std::uint32_t flags)
{
	npr_qp_attr attr{};

	if (int error = np_qp_connect(verbs_qp.get(), to))
		rc::fail(-error, "connect");
	attr.flags = flags;
	cq.emplace(npr_attach_cq(d.library->get(), verbs_cq.get()));
	qp.emplace(npr_attach_qp(cq->get(), verbs_qp.get(), &attr));
}

own<ibv_mr> pin(device &d, void *memory, std::size_t length)
{
	return rc::own(ibv_reg_mr(d.pd.get(), memory, length, IBV_ACCESS_LOCAL_WRITE), "ibv_reg_mr");
}

} // namespace soak
