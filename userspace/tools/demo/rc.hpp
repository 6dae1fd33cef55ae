/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The verbs that the demo and the benchmarks need, nothing of libnprdma: owners
 * of the usual objects, and RC connections set up through a socket of any kind.
 */
#ifndef NPRDMA_DEMO_RC_HPP
#define NPRDMA_DEMO_RC_HPP

#include <infiniband/verbs.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

namespace rc
{

[[noreturn]] inline void fail(int error, const std::string &what)
{
	throw std::system_error(error, std::generic_category(), what);
}

struct deleter {
	void operator()(ibv_context *p) const noexcept { (void)ibv_close_device(p); }
	void operator()(ibv_pd *p) const noexcept { (void)ibv_dealloc_pd(p); }
	void operator()(ibv_cq *p) const noexcept { (void)ibv_destroy_cq(p); }
	void operator()(ibv_comp_channel *p) const noexcept { (void)ibv_destroy_comp_channel(p); }
	void operator()(ibv_qp *p) const noexcept { (void)ibv_destroy_qp(p); }
	void operator()(ibv_mr *p) const noexcept { (void)ibv_dereg_mr(p); }
	void operator()(ibv_mw *p) const noexcept { (void)ibv_dealloc_mw(p); }
	void operator()(ibv_srq *p) const noexcept { (void)ibv_destroy_srq(p); }
	void operator()(ibv_ah *p) const noexcept { (void)ibv_destroy_ah(p); }
};

template <class T> using handle = std::unique_ptr<T, deleter>;

template <class T> [[nodiscard]] handle<T> own(T *p, const std::string &what)
{
	if (!p)
		fail(errno ? errno : ENOMEM, what);
	return handle<T>(p);
}

[[nodiscard]] inline handle<ibv_context> open_device(const std::string &name)
{
	int count = 0;
	std::unique_ptr<ibv_device *[], void (*)(ibv_device **)> list(ibv_get_device_list(&count),
								      ibv_free_device_list);

	if (!list)
		fail(errno, "ibv_get_device_list");
	for (int i = 0; i < count; i++)
		if (name == ibv_get_device_name(list[static_cast<std::size_t>(i)]))
			return own(ibv_open_device(list[static_cast<std::size_t>(i)]), "open " + name);
	fail(ENODEV, name);
}

/* A device with what every user of it here makes. */
struct endpoint {
	handle<ibv_context> context;
	handle<ibv_pd> pd;
	handle<ibv_comp_channel> channel;
	handle<ibv_cq> cq;

	endpoint(const std::string &device, int cq_entries)
	    : context(open_device(device)),
	      pd(own(ibv_alloc_pd(context.get()), "ibv_alloc_pd")),
	      channel(own(ibv_create_comp_channel(context.get()), "ibv_create_comp_channel")),
	      cq(own(ibv_create_cq(context.get(), cq_entries, nullptr, channel.get(), 0), "ibv_create_cq"))
	{
	}

	[[nodiscard]] handle<ibv_mr> register_memory(void *addr, std::size_t length, int access) const
	{
		return own(ibv_reg_mr(pd.get(), addr, length, access), "ibv_reg_mr");
	}

	[[nodiscard]] handle<ibv_qp> create_qp(std::uint32_t send_wr, std::uint32_t recv_wr = 1) const
	{
		ibv_qp_init_attr init{};
		init.send_cq = cq.get();
		init.recv_cq = cq.get();
		init.qp_type = IBV_QPT_RC;
		init.cap = {.max_send_wr = send_wr,
			    .max_recv_wr = recv_wr,
			    .max_send_sge = 1,
			    .max_recv_sge = 1,
			    .max_inline_data = 64};
		return own(ibv_create_qp(pd.get(), &init), "ibv_create_qp");
	}
};

/* What one side tells the other about a QP. */
struct address {
	std::uint32_t qpn;
	std::uint32_t psn;
	std::uint16_t lid;
	std::uint16_t reserved[3];
	ibv_gid gid;
};

[[nodiscard]] inline address address_of(ibv_qp &qp)
{
	ibv_port_attr port{};
	address mine{};

	if (int error = ibv_query_port(qp.context, 1, &port))
		fail(error, "ibv_query_port");
	if (ibv_query_gid(qp.context, 1, 0, &mine.gid))
		fail(errno, "ibv_query_gid");
	mine.qpn = qp.qp_num;
	mine.psn = qp.qp_num * 37 & 0xffffff;
	mine.lid = port.lid;
	return mine;
}

/* From RESET to RTS, as the peer of @theirs. */
inline void connect(ibv_qp &qp, const address &mine, const address &theirs)
{
	ibv_port_attr port{};
	ibv_device_attr device{};
	ibv_qp_attr attr{};

	if (int error = ibv_query_port(qp.context, 1, &port))
		fail(error, "ibv_query_port");
	if (int error = ibv_query_device(qp.context, &device))
		fail(error, "ibv_query_device");
	const auto reads = static_cast<std::uint8_t>(device.max_qp_rd_atom < 16 ? device.max_qp_rd_atom : 16);

	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
	if (int error = ibv_modify_qp(&qp, &attr,
				      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		fail(error, "QP to INIT");

	attr = {};
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = port.active_mtu;
	attr.dest_qp_num = theirs.qpn;
	attr.rq_psn = theirs.psn;
	attr.max_dest_rd_atomic = reads;
	attr.min_rnr_timer = 12;
	attr.ah_attr.dlid = theirs.lid;
	attr.ah_attr.port_num = 1;
	if (port.link_layer == IBV_LINK_LAYER_ETHERNET) {
		attr.ah_attr.is_global = 1;
		attr.ah_attr.grh.dgid = theirs.gid;
		attr.ah_attr.grh.hop_limit = 1;
	}
	if (int error = ibv_modify_qp(&qp, &attr,
				      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
					  IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
		fail(error, "QP to RTR");

	attr = {};
	attr.qp_state = IBV_QPS_RTS;
	attr.sq_psn = mine.psn;
	attr.timeout = 18;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	attr.max_rd_atomic = reads;
	if (int error = ibv_modify_qp(&qp, &attr,
				      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
		fail(error, "QP to RTS");
}

/* Both ends in one process. */
inline void connect_pair(ibv_qp &a, ibv_qp &b)
{
	const address of_a = address_of(a), of_b = address_of(b);

	connect(a, of_a, of_b);
	connect(b, of_b, of_a);
}

/* Messages of a size that both sides know. */
template <class T> void send_all(int fd, const T *data, std::size_t count)
{
	const char *p = reinterpret_cast<const char *>(data);

	for (std::size_t left = count * sizeof(T); left;) {
		const ssize_t done = ::send(fd, p, left, MSG_NOSIGNAL);

		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			fail(errno, "send to the other side");
		p += done;
		left -= static_cast<std::size_t>(done);
	}
}

template <class T> void receive_all(int fd, T *data, std::size_t count)
{
	char *p = reinterpret_cast<char *>(data);

	for (std::size_t left = count * sizeof(T); left;) {
		const ssize_t done = ::recv(fd, p, left, 0);

		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			fail(errno, "receive from the other side");
		if (!done)
			fail(ECONNRESET, "the other side has gone");
		p += done;
		left -= static_cast<std::size_t>(done);
	}
}

/* Connects all of @qps, in order, with those of the other side. */
inline void connect_all(int fd, const std::vector<handle<ibv_qp>> &qps)
{
	std::vector<address> mine, theirs(qps.size());
	char ready = 1;

	for (const auto &qp : qps)
		mine.push_back(address_of(*qp));
	send_all(fd, mine.data(), mine.size());
	receive_all(fd, theirs.data(), theirs.size());
	for (std::size_t i = 0; i < qps.size(); i++)
		connect(*qps[i], mine[i], theirs[i]);
	/* Nobody sends before both are ready to receive. */
	send_all(fd, &ready, 1);
	receive_all(fd, &ready, 1);
}

} // namespace rc

#endif // NPRDMA_DEMO_RC_HPP
