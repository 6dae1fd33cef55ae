// SPDX-License-Identifier: GPL-2.0
/*
 * Queue pair contexts: the commands that make and change them, and what a
 * change of state does to the work in the queues.
 */
#include "qp.h"

#include <algorithm>

#include "device.h"

namespace nphca {

qp::~qp()
{
	drop_responses();
	for (const auto &[n, table] : {std::pair{cqn_send, &dev.cqs}, std::pair{cqn_recv, &dev.cqs}})
		if (cq *c = table->find(n); c && c->users)
			--c->users;
	if (srq *s = rq_type == RQ_SRQ ? dev.srqs.find(srqn) : nullptr; s && s->users)
		--s->users;
}

void qp::decode() noexcept
{
	const_bytes c = context;
	const const_bytes path = part(c, qpc_primary_address_path.bit / 8, ads_size);

	remote_qpn = get32(c, qpc_remote_qpn);
	qkey = get32(c, qpc_q_key);
	const uint32_t code = get32(c, qpc_mtu);
	mtu = code >= 1 && code <= 5 ? 128u << code : 256;
	dlid = static_cast<uint16_t>(get(path, ads_rlid));
	sl = static_cast<uint8_t>(get(path, ads_sl));
	address_index = static_cast<uint8_t>(get(path, ads_src_addr_index));
	to.mac = get(path, ads_rmac);
	std::copy_n(path.begin() + ads_rgid_rip.bit / 8, to.gid.size(), to.gid.begin());
	to.tclass = static_cast<uint8_t>(get(path, ads_tclass));
	to.hop_limit = static_cast<uint8_t>(get(path, ads_hop_limit));
	to.priority = static_cast<uint8_t>(get(path, ads_eth_prio));
	to.flow_label = get32(path, ads_flow_label);
	to.sport = static_cast<uint16_t>(get(path, ads_udp_sport));
	may_read = get(c, qpc_rre);
	may_write = get(c, qpc_rwe);
	may_atomic = get(c, qpc_rae);
	max_requests = 1u << get(c, qpc_log_sra_max);
	max_responses = 1u << get(c, qpc_log_rra_max);
	retry_count = static_cast<uint8_t>(get(c, qpc_retry_count));
	rnr_retry = static_cast<uint8_t>(get(c, qpc_rnr_retry));
	rnr_code = static_cast<uint8_t>(get(c, qpc_min_rnr_nak));
	ack_timeout = static_cast<uint8_t>(get(path, ads_ack_timeout));
}

bool qp::sends_to_others() const noexcept
{
	return is_connected() && state != qp_state::err && !(dev.ethernet ? dev.fab.by_mac(to.mac) : dev.fab.by_lid(dlid));
}

/* An address that has gone leaves a packet that nobody takes: it is for MAC address 0. */
void qp::address(packet &p) const noexcept
{
	p.slid = dev.lid;
	p.dlid = dlid;
	p.sl = sl;
	if (!dev.ethernet)
		return;
	p.slid = p.dlid = 0;
	if (const roce_address *from = dev.address(address_index)) {
		put_route(p, *from, to);
	} else {
		put_route(p, {}, {});
	}
}

/* What comes to an address of the port, and from the peer's; on Ethernet also: to this QP's address. */
bool qp::is_from_peer(const packet &p) const noexcept
{
	if (!dev.ethernet)
		return p.slid == dlid;
	const roce_address *own = dev.address(address_index);
	return own && own->kind == p.kind && own->tagged == p.tagged && (!own->tagged || own->vlan == (p.tag & 0xfff)) &&
	       destination_gid(p) == own->gid && source_gid(p) == to.gid;
}

void qp::doorbell()
{
	std::array<uint8_t, 4> record;

	if (!has_sq || state == qp_state::rst || state == qp_state::init)
		return;
	if (!dev.dma_read(dbr + 4, record.data(), record.size())) {
		to_error(EV_QP_FATAL);
		return;
	}
	const auto pi = static_cast<uint16_t>(load32(record.data()));
	if (static_cast<uint16_t>(pi - sq_head_) > (1u << log_sq)) {
		/* More than the queue can hold: the record is garbage. */
		if (state != qp_state::err)
			to_error(EV_QP_FATAL);
		return;
	}
	sq_pi_ = pi;
	if (state != qp_state::rtr)
		dev.fab.ready(*this);
}

void qp::turn()
{
	bool more = false;

	if (!responses_.empty())
		more |= responder_turn();
	if (state == qp_state::rts)
		more |= requester_turn();
	else if (state == qp_state::err || state == qp_state::sqer)
		flush_send();
	if (more)
		dev.fab.ready(*this);
}

void qp::receive(packet &p)
{
	const uint8_t cls = p.opcode & BTH_CLASS;

	if (is_datagram()) {
		if (cls == BTH_UD)
			receive_datagram(p);
	} else if (!is_from_peer(p)) {
		dev.count(NPHCA_DROPPED);
	} else if (st == ST_UC) {
		if (cls == BTH_UC)
			receive_unreliable(p);
	} else if (is_reliable() && cls == 0) {
		switch (p.opcode) {
		case BTH_ACK:
			handle_ack(p);
			break;
		case BTH_ATOMIC_ACK:
			handle_atomic_response(p);
			break;
		case BTH_READ_FIRST:
		case BTH_READ_MIDDLE:
		case BTH_READ_LAST:
		case BTH_READ_ONLY:
			handle_read_response(p);
			break;
		default:
			receive_reliable(p);
		}
	}
}

void qp::to_error(uint8_t event)
{
	constexpr uint64_t first_look = 1000000; /* ns */

	if (state == qp_state::err)
		return;
	trail_reads(0);
	state = qp_state::err;
	drop_responses();
	message_ = idle;
	if (event)
		dev.qp_event(*this, event);
	flush_send();
	flush_recv();
	if (rq_type == RQ_SRQ && st != ST_XRC)
		dev.qp_event(*this, EV_SRQ_LAST_WQE);
	dev.fab.set_timer(*this, UINT64_MAX);
	if (rq_type == RQ_REGULAR) {
		/* Receives may still be posted, and nothing tells. */
		flush_poll_ = first_look;
		dev.fab.set_timer(*this, dev.fab.now() + flush_poll_);
	}
}

void qp::to_reset()
{
	state = qp_state::rst;
	drop_responses();
	dev.fab.forget(*this);
	inflight_.clear();
	cursor_ = 0;
	sq_head_ = sq_pi_ = rq_head_ = rq_pi_ = 0;
	next_psn_ = acked_psn_ = expected_psn_ = msn_ = 0;
	outstanding_ = 0;
	stalled_ = waiting_rnr_ = asked_again_ = nak_sent_ = refused_ = skip_message_ = ended_ = false;
	retries_ = rnr_retries_ = patience_ = 0;
	message_ = idle;
	recv_ = {};
	atomics_.clear();
	dev.fab.set_timer(*this, UINT64_MAX);
}

cmd_status device::create_qp(const_bytes in, bytes out)
{
	const const_bytes ctx = part(in, cmd_in_qpc, qpc_size);
	if (ctx.size() != qpc_size)
		return cmd_status::bad_in_len;
	auto q = std::make_unique<qp>(*this);
	std::copy(ctx.begin(), ctx.end(), q->context.begin());
	q->st = static_cast<uint8_t>(get(ctx, qpc_st));
	switch (q->st) {
	case ST_RC:
	case ST_UC:
	case ST_UD:
	case ST_XRC:
	case ST_QP0:
	case ST_QP1:
	case ST_REG_UMR:
		break;
	default:
		return cmd_status::bad_param;
	}
	q->pd = get32(ctx, qpc_pd);
	q->xrcd = get32(ctx, qpc_xrcd);
	q->uidx = get32(ctx, qpc_user_index);
	q->dbr = get(ctx, qpc_dbr_addr) & ~3ull;
	q->has_sq = !get(ctx, qpc_no_sq);
	q->log_sq = get32(ctx, qpc_log_sq_size);
	q->log_rq = get32(ctx, qpc_log_rq_size);
	q->log_rq_stride = get32(ctx, qpc_log_rq_stride) + 4;
	/* Numbers are taken on only once they are known to be good: ~qp() gives them back. */
	const auto rq_type = static_cast<uint8_t>(get(ctx, qpc_rq_type));
	const uint32_t cqn_send = get32(ctx, qpc_cqn_snd), cqn_recv = get32(ctx, qpc_cqn_rcv),
		       srqn = get32(ctx, qpc_srqn_rmpn_xrqn);
	if ((q->st != ST_REG_UMR && !pds.find(q->pd)) || (q->has_sq && !cqs.find(cqn_send)) ||
	    (rq_type != RQ_NONE && !cqs.find(cqn_recv)) || (rq_type == RQ_SRQ && !srqs.find(srqn)))
		return cmd_status::bad_resource;
	if (rq_type == RQ_CRQ)
		return cmd_status::bad_param;

	uint64_t size = 0;
	if (rq_type == RQ_REGULAR)
		size = 1ull << (q->log_rq + q->log_rq_stride);
	q->sq_offset = size;
	if (q->has_sq)
		size += 64ull << q->log_sq;
	const uint32_t log_page = 12 + get32(ctx, qpc_log_page_size);
	if (!q->buffer.set(part(in, cmd_in_pas), log_page, get32(ctx, qpc_page_offset), size))
		return cmd_status::bad_in_len;

	q->rq_type = rq_type;
	q->cqn_send = cqn_send;
	q->cqn_recv = cqn_recv;
	q->srqn = srqn;
	for (const uint32_t n : {cqn_send, cqn_recv})
		if (cq *c = cqs.find(n))
			++c->users;
	if (rq_type == RQ_SRQ)
		++srqs.find(srqn)->users;
	q->decode();

	qp *p = q.get();
	const uint32_t n = qps.add(std::move(q));
	if (!n)
		return cmd_status::no_resource;
	p->qpn = n;
	if (p->st == ST_QP0 || p->st == ST_QP1)
		special_qp[p->st - ST_QP0] = n;
	set(out, cmd_object, n);
	return cmd_status::ok;
}

/* Which parameters a transition takes: always, and if the mask asks for it. */
cmd_status device::modify_qp(uint16_t op, qp &q, const_bytes in)
{
	const struct {
		uint16_t op;
		qp_state from, to;
	} transitions[] = {
		{OP_RST2INIT_QP, qp_state::rst, qp_state::init}, {OP_INIT2INIT_QP, qp_state::init, qp_state::init},
		{OP_INIT2RTR_QP, qp_state::init, qp_state::rtr}, {OP_RTR2RTS_QP, qp_state::rtr, qp_state::rts},
		{OP_RTS2RTS_QP, qp_state::rts, qp_state::rts},	 {OP_SQERR2RTS_QP, qp_state::sqer, qp_state::rts},
		{OP_SQD2RTS_QP, qp_state::sqd, qp_state::rts},
	};

	if (op == OP_2RST_QP) {
		q.trail_reads(0);
		q.to_reset();
		return cmd_status::ok;
	}
	if (op == OP_2ERR_QP) {
		q.to_error(0);
		q.ended_ = true;
		return cmd_status::ok;
	}
	const auto t = std::find_if(std::begin(transitions), std::end(transitions), [op](const auto &x) { return x.op == op; });
	if (t == std::end(transitions))
		return cmd_status::bad_op;
	if (t->from != q.state)
		return cmd_status::bad_qp_state;

	const const_bytes ctx = part(in, cmd_in_qpc, qpc_size);
	if (ctx.size() != qpc_size)
		return cmd_status::bad_in_len;
	const uint32_t opt = get32(in, qp_opt_param_mask);
	const auto take = [&](field f) { set(q.context, f, get(ctx, f)); };
	const auto path = [&](field f) {
		const uint32_t base = qpc_primary_address_path.bit;
		take({base + f.bit, f.width});
	};
	const auto whole_path = [&](field which) {
		const size_t at = which.bit / 8;
		std::copy_n(ctx.begin() + static_cast<ptrdiff_t>(at), ads_size, q.context.begin() + static_cast<ptrdiff_t>(at));
	};
	const bool to_init = op == OP_RST2INIT_QP, to_rtr = op == OP_INIT2RTR_QP, to_rts = op == OP_RTR2RTS_QP;

	if (to_init) {
		take(qpc_counter_set_id);
		take(qpc_pm_state);
		take(qpc_rlky);
	}
	if (to_init || opt & OPT_PORT)
		path(ads_vhca_port_num);
	if (to_init || opt & OPT_PKEY)
		path(ads_pkey_index);
	if (to_init || opt & OPT_RRE)
		take(qpc_rre);
	if (to_init || opt & OPT_RWE)
		take(qpc_rwe);
	if (to_init || opt & OPT_RAE) {
		take(qpc_rae);
		take(qpc_atomic_mode);
	}
	if (to_init || opt & OPT_QKEY)
		take(qpc_q_key);
	if (to_rtr) {
		const uint64_t port = get(part(const_bytes(q.context), qpc_primary_address_path.bit / 8), ads_vhca_port_num),
			       pkey = get(part(const_bytes(q.context), qpc_primary_address_path.bit / 8), ads_pkey_index);
		take(qpc_mtu);
		take(qpc_log_msg_max);
		take(qpc_remote_qpn);
		take(qpc_next_rcv_psn);
		take(qpc_log_rra_max);
		take(qpc_min_rnr_nak);
		if (q.is_connected())
			whole_path(qpc_primary_address_path);
		const uint32_t base = qpc_primary_address_path.bit;
		set(q.context, {base + ads_vhca_port_num.bit, ads_vhca_port_num.width}, port);
		if (!(opt & OPT_PKEY))
			set(q.context, {base + ads_pkey_index.bit, ads_pkey_index.width}, pkey);
	}
	if (opt & OPT_RNR_TIMEOUT)
		take(qpc_min_rnr_nak);
	if (opt & OPT_RRA_MAX)
		take(qpc_log_rra_max);
	if (opt & OPT_PRI_PATH && !to_rtr)
		whole_path(qpc_primary_address_path);
	if (opt & OPT_ALT_PATH)
		whole_path(qpc_secondary_address_path);
	if (opt & OPT_PM_STATE)
		take(qpc_pm_state);
	if (to_rts) {
		take(qpc_log_ack_req_freq);
		take(qpc_next_send_psn);
	}
	if (to_rts || opt & OPT_SRA_MAX)
		take(qpc_log_sra_max);
	if (to_rts || opt & OPT_RETRY)
		take(qpc_retry_count);
	if (to_rts || opt & OPT_RNR_RETRY)
		take(qpc_rnr_retry);
	if (to_rts || opt & OPT_ACK_TIMEOUT)
		path(ads_ack_timeout);
	if (opt & OPT_COUNTER)
		take(qpc_counter_set_id);

	if (ethernet && to_rtr && q.is_connected() &&
	    !address(get(part(ctx, qpc_primary_address_path.bit / 8), ads_src_addr_index)))
		return cmd_status::bad_param;

	q.decode();
	q.state = t->to;
	if (to_rtr)
		q.expected_psn_ = get32(ctx, qpc_next_rcv_psn);
	if (to_rts)
		q.next_psn_ = q.acked_psn_ = get32(ctx, qpc_next_send_psn);
	if (t->to == qp_state::rts) {
		q.stalled_ = false;
		/* Work may have been posted before. */
		q.doorbell();
	}
	return cmd_status::ok;
}

cmd_status device::query_qp(qp &q, bytes out)
{
	set(q.context, qpc_state, static_cast<uint8_t>(q.state));
	set(q.context, qpc_next_rcv_psn, q.expected_psn_);
	set(q.context, qpc_next_send_psn, q.next_psn_);
	set(q.context, qpc_last_acked_psn, (q.acked_psn_ - 1) & psn_mask);
	set(q.context, qpc_hw_sq_wqebb_counter, q.sq_head_);
	set(q.context, qpc_sw_sq_wqebb_counter, q.sq_pi_);
	set(q.context, qpc_hw_rq_counter, q.rq_head_);
	set(q.context, qpc_sw_rq_counter, q.rq_pi_);
	set(q.context, qpc_rmsn, q.msn_);
	const bytes o = part(out, cmd_in_qpc, qpc_size);
	std::copy_n(q.context.begin(), o.size(), o.begin());
	return cmd_status::ok;
}

cmd_status device::cmd_qp(uint16_t op, const_bytes in, bytes out)
{
	if (op == OP_CREATE_QP)
		return create_qp(in, out);
	const uint32_t n = get32(in, cmd_object);
	qp *q = qps.find(n);
	if (!q)
		return cmd_status::bad_resource;
	if (op == OP_QUERY_QP)
		return query_qp(*q, out);
	if (op != OP_DESTROY_QP)
		return modify_qp(op, *q, in);
	for (uint32_t &special : special_qp)
		if (special == n)
			special = 0;
	std::erase_if(multicast, [n](const auto &m) { return m.second == n; });
	q->trail_reads(0);
	qps.remove(n);
	return cmd_status::ok;
}

} // namespace nphca
