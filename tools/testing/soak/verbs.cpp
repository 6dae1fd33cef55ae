// SPDX-License-Identifier: GPL-2.0
/* Making and connecting what a cell's two ends need; errors are exceptions. */
#include "verbs.hpp"

#include <cstring>

namespace soak
{

namespace
{

/* From RESET to RTS. A UD queue pair knows its peers from each request. */
void connect(ibv_qp &qp, np_addr to)
{
	const bool ud = qp.qp_type == IBV_QPT_UD;
	ibv_qp_attr attr{};

	if (qp.qp_type == IBV_QPT_RC) {
		if (int error = np_qp_connect(&qp, to))
			rc::fail(-error, "connect");
		return;
	}
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	attr.qkey = ud_key;
	attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
	if (int error = ibv_modify_qp(&qp, &attr,
				      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					  (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)))
		rc::fail(error, "QP to INIT");
	attr = {};
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_4096;
	attr.dest_qp_num = to.qpn;
	attr.ah_attr.dlid = to.lid;
	attr.ah_attr.port_num = 1;
	if (int error = ibv_modify_qp(
		&qp, &attr,
		IBV_QP_STATE | (ud ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)))
		rc::fail(error, "QP to RTR");
	attr = {};
	attr.qp_state = IBV_QPS_RTS;
	if (int error = ibv_modify_qp(&qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN))
		rc::fail(error, "QP to RTS");
}

} // namespace

device::device(const char *name) : verbs(rc::own(np_open_device(name), "open the device"))
{
	ibv_port_attr port{};

	if (int error = ibv_query_port(verbs.get(), 1, &port))
		rc::fail(error, "ibv_query_port");
	lid = port.lid;
	pd = rc::own(ibv_alloc_pd(verbs.get()), "ibv_alloc_pd");
	library.emplace(*verbs);
}

shared_receives::shared_receives(device &d, unsigned receives)
{
	ibv_srq_init_attr init{};

	init.attr.max_wr = receives;
	init.attr.max_sge = 2;
	verbs = rc::own(ibv_create_srq(d.pd.get(), &init), "ibv_create_srq");
	srq.emplace(npr_attach_srq(d.library->get(), verbs.get()));
}

connection::connection(device &d, const connection_options &o)
    : with(o),
      channel(rc::own(ibv_create_comp_channel(d.verbs.get()), "ibv_create_comp_channel")),
      verbs_cq(rc::own(
	  ibv_create_cq(d.verbs.get(), static_cast<int>(4 * o.send + 2 * o.recv), nullptr, channel.get(), 0),
	  "ibv_create_cq"))
{
	ibv_qp_init_attr init{};

	init.send_cq = verbs_cq.get();
	init.recv_cq = verbs_cq.get();
	init.srq = o.srq;
	init.qp_type = o.type;
	init.sq_sig_all = o.all_signaled;
	init.cap.max_send_wr = 2 * o.send;
	init.cap.max_recv_wr = o.srq ? 0 : o.recv;
	init.cap.max_send_sge = 4;
	init.cap.max_recv_sge = 2;
	init.cap.max_inline_data = 64;
	verbs_qp = rc::own(ibv_create_qp(d.pd.get(), &init), "ibv_create_qp");
}

void connection::attach(device &d, np_addr to, std::uint32_t flags)
{
	npr_qp_attr attr{};

	connect(*verbs_qp, to);
	attr.flags = flags;
	cq.emplace(npr_attach_cq(d.library->get(), verbs_cq.get()));
	qp.emplace(npr_attach_qp(cq->get(), verbs_qp.get(), &attr));
}

int connection::post(ibv_send_wr *&wr)
{
	ibv_send_wr *bad = nullptr;

	if (with.extended)
		return post_extended(wr);
	const int error = qp->post_send(*wr, bad);
	if (error)
		wr = bad;
	return error;
}

int connection::post_extended(ibv_send_wr *wr)
{
	ibv_qp_ex *q = &qp->ex();

	ibv_wr_start(q);
	for (; wr; wr = wr->next) {
		q->wr_id = wr->wr_id;
		q->wr_flags = wr->send_flags & ~static_cast<unsigned>(IBV_SEND_INLINE);
		switch (wr->opcode) {
		case IBV_WR_SEND:
			ibv_wr_send(q);
			break;
		case IBV_WR_SEND_WITH_IMM:
			ibv_wr_send_imm(q, wr->imm_data);
			break;
		case IBV_WR_SEND_WITH_INV:
			ibv_wr_send_inv(q, wr->invalidate_rkey);
			break;
		case IBV_WR_RDMA_WRITE:
			ibv_wr_rdma_write(q, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
			break;
		case IBV_WR_RDMA_WRITE_WITH_IMM:
			ibv_wr_rdma_write_imm(q, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr, wr->imm_data);
			break;
		case IBV_WR_RDMA_READ:
			ibv_wr_rdma_read(q, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
			break;
		case IBV_WR_ATOMIC_CMP_AND_SWP:
			ibv_wr_atomic_cmp_swp(q, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr,
					      wr->wr.atomic.compare_add, wr->wr.atomic.swap);
			break;
		case IBV_WR_ATOMIC_FETCH_AND_ADD:
			ibv_wr_atomic_fetch_add(q, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr,
						wr->wr.atomic.compare_add);
			break;
		default:
			ibv_wr_abort(q);
			return -EINVAL;
		}
		if (with.type == IBV_QPT_UD)
			ibv_wr_set_ud_addr(q, wr->wr.ud.ah, wr->wr.ud.remote_qpn, wr->wr.ud.remote_qkey);
		if (wr->send_flags & IBV_SEND_INLINE)
			ibv_wr_set_inline_data(q, reinterpret_cast<void *>(wr->sg_list->addr),
					       wr->sg_list->length);
		else if (wr->num_sge == 1)
			ibv_wr_set_sge(q, wr->sg_list->lkey, wr->sg_list->addr, wr->sg_list->length);
		else
			ibv_wr_set_sge_list(q, static_cast<std::size_t>(wr->num_sge), wr->sg_list);
	}
	return -ibv_wr_complete(q);
}

int connection::poll(std::span<ibv_wc> wc)
{
	return with.extended_poll ? poll_extended(wc) : cq->poll(wc);
}

int connection::poll_extended(std::span<ibv_wc> wc)
{
	ibv_cq_ex *q = &cq->ex();
	ibv_poll_cq_attr attr{};
	std::size_t n = 0;
	int error = ibv_start_poll(q, &attr);

	if (error)
		return error == ENOENT ? 0 : -error;
	do {
		ibv_wc &w = wc[n++] = {};

		w.wr_id = q->wr_id;
		w.status = q->status;
		if (w.status != IBV_WC_SUCCESS) {
			w.vendor_err = ibv_wc_read_vendor_err(q);
			continue;
		}
		w.opcode = ibv_wc_read_opcode(q);
		w.byte_len = ibv_wc_read_byte_len(q);
		w.wc_flags = ibv_wc_read_wc_flags(q);
		if (w.wc_flags & IBV_WC_WITH_INV)
			w.invalidated_rkey = ibv_wc_read_invalidated_rkey(q);
		else
			w.imm_data = ibv_wc_read_imm_data(q);
	} while (n < wc.size() && !(error = ibv_next_poll(q)));
	ibv_end_poll(q);
	return static_cast<int>(n);
}

own<ibv_mr> pin(device &d, void *memory, std::size_t length, int access)
{
	return rc::own(ibv_reg_mr(d.pd.get(), memory, length, access), "ibv_reg_mr");
}

std::vector<std::uint8_t> content_of(std::uint64_t seed, std::uint64_t number, std::size_t length,
				     bool numbered)
{
	std::vector<std::uint8_t> bytes(length);
	random_source random(seed);

	for (std::uint8_t &b : bytes)
		b = static_cast<std::uint8_t>(random.word());
	if (numbered)
		std::memcpy(bytes.data(), &number, sizeof(number));
	return bytes;
}

} // namespace soak
