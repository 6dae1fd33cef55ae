// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "link.hpp"

#include <fmt/format.h>

#include <cstring>
#include <fstream>

namespace perf
{

namespace
{

constexpr std::uint32_t ud_key = 0x11111111; /* perftest's */
constexpr std::uint8_t port_number = 1;

rc::handle<ibv_context> open_device(const std::string &name)
{
	if (!name.empty())
		return rc::open_device(name);
	int count = 0;
	const std::unique_ptr<ibv_device *[], void (*)(ibv_device **)> list(ibv_get_device_list(&count),
									    ibv_free_device_list);

	if (!list || !count)
		rc::fail(list ? ENODEV : errno, "no RDMA device; see ibv_devices(1)");
	return rc::own(ibv_open_device(list[0]), "ibv_open_device");
}

/* Of Ethernet, RoCE v2 by an IPv4 address if there is one, else by any; of InfiniBand the port's own. */
int suitable_gid(ibv_context *context, const ibv_port_attr &port)
{
	static constexpr std::uint8_t ipv4[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
	int found = -1;

	if (port.link_layer != IBV_LINK_LAYER_ETHERNET)
		return 0;
	for (int i = 0; i < port.gid_tbl_len; i++) {
		ibv_gid_entry entry{};

		if (ibv_query_gid_ex(context, port_number, static_cast<std::uint32_t>(i), &entry, 0) ||
		    entry.gid_type != IBV_GID_TYPE_ROCE_V2)
			continue;
		if (!std::memcmp(entry.gid.raw, ipv4, sizeof(ipv4)))
			return i;
		if (found < 0)
			found = i;
	}
	return std::max(found, 0);
}

bool preload_is_loaded()
{
	std::ifstream maps("/proc/self/maps");

	for (std::string line; std::getline(maps, line);)
		if (line.find("libnprdma-preload") != std::string::npos)
			return true;
	return false;
}

void modify(ibv_qp &qp, ibv_qp_attr &attr, int mask, const char *what)
{
	if (const int error = ibv_modify_qp(&qp, &attr, mask))
		rc::fail(error, what);
}

ibv_ah_attr way_to(const endpoint &theirs, int gid_index)
{
	ibv_ah_attr a{};

	a.dlid = theirs.lid;
	a.port_num = port_number;
	if (theirs.ethernet || !theirs.lid) {
		a.is_global = 1;
		std::memcpy(a.grh.dgid.raw, theirs.gid.data(), sizeof(a.grh.dgid.raw));
		a.grh.sgid_index = static_cast<std::uint8_t>(gid_index);
		a.grh.hop_limit = 64;
	}
	return a;
}

} // namespace

queue::queue(ibv_pd &pd, const test &t, const layout &l, nprdma::context *library, std::uint8_t access)
{
	const std::uint32_t sends = std::max<std::uint32_t>(t.pingpong() ? 8 : t.window, 4);
	ibv_device_attr device{};

	receives_ = 1;
	if (t.takes_receives()) {
		receives_ =
		    t.over == transport::rc ? std::max(2U * t.window, 16U) : std::max(2U * t.window, 512U);
		/* A message is looked at before its place is given to another. */
		if (t.verify && t.op == verb::send)
			receives_ = static_cast<unsigned>(std::min<std::uint64_t>(receives_, l.receives));
	}
	if (const int error = ibv_query_device(pd.context, &device))
		rc::fail(error, "ibv_query_device");
	/* WRITEs to unpinned memory need two entries each. */
	if (device.max_qp_wr < static_cast<int>(2 * sends))
		rc::fail(EINVAL,
			 fmt::format("--window {}: the device has send queues of {} requests, twice as many "
				     "as the window are needed",
				     t.window, device.max_qp_wr));
	receives_ = std::min(receives_, static_cast<unsigned>(device.max_qp_wr));
	cq_ = rc::own(
	    ibv_create_cq(pd.context, static_cast<int>(2 * sends + receives_ + 16), nullptr, nullptr, 0),
	    "ibv_create_cq");

	ibv_qp_init_attr init{};

	init.send_cq = init.recv_cq = cq_.get();
	init.qp_type = t.over == transport::rc   ? IBV_QPT_RC
		       : t.over == transport::uc ? IBV_QPT_UC
						 : IBV_QPT_UD;
	init.cap = {.max_send_wr = 2 * sends,
		    .max_recv_wr = receives_,
		    .max_send_sge = 1,
		    .max_recv_sge = 1,
		    .max_inline_data = t.inline_bytes};
	qp_ = rc::own(ibv_create_qp(&pd, &init),
		      fmt::format("ibv_create_qp: --window {}, --inline {}", t.window, t.inline_bytes));

	ibv_qp_attr attr{};

	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = port_number;
	attr.qp_access_flags = access;
	attr.qkey = ud_key;
	modify(*qp_, attr,
	       IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		   (t.over == transport::ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS),
	       "queue pair to INIT");
	if (library) {
		npr_qp_attr flags{};

		flags.flags = t.ordered ? NPR_QP_ORDERED_WRITES : 0;
		library_cq_.emplace(library->attach(*cq_));
		library_qp_.emplace(library_cq_->attach(*qp_, flags));
	}
}

void queue::connect(const test &t, const endpoint &mine, const endpoint &theirs, qp_address self,
		    qp_address peer, int gid_index)
{
	ibv_device_attr device{};
	ibv_qp_attr attr{};

	if (const int error = ibv_query_device(qp_->context, &device))
		rc::fail(error, "ibv_query_device");
	peer_number_ = peer.qpn;
	attr.qp_state = IBV_QPS_RTR;
	if (t.over == transport::ud) {
		ibv_ah_attr way = way_to(theirs, gid_index);

		modify(*qp_, attr, IBV_QP_STATE, "queue pair to RTR");
		peer_ = rc::own(ibv_create_ah(qp_->pd, &way), "ibv_create_ah");
		attr.qp_state = IBV_QPS_RTS;
		attr.sq_psn = self.psn;
		modify(*qp_, attr, IBV_QP_STATE | IBV_QP_SQ_PSN, "queue pair to RTS");
		return;
	}
	const bool reliable = t.over == transport::rc;

	attr.path_mtu = static_cast<ibv_mtu>(std::min(mine.mtu, theirs.mtu));
	attr.dest_qp_num = peer.qpn;
	attr.rq_psn = peer.psn;
	attr.ah_attr = way_to(theirs, gid_index);
	attr.max_dest_rd_atomic = static_cast<std::uint8_t>(std::min(device.max_qp_rd_atom, 16));
	attr.min_rnr_timer = 12;
	modify(*qp_, attr,
	       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		   (reliable ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0),
	       "queue pair to RTR");
	attr = {};
	attr.qp_state = IBV_QPS_RTS;
	attr.sq_psn = self.psn;
	attr.timeout = 18;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	attr.max_rd_atomic = static_cast<std::uint8_t>(std::min(device.max_qp_init_rd_atom, 16));
	modify(*qp_, attr,
	       IBV_QP_STATE | IBV_QP_SQ_PSN |
		   (reliable ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC
			     : 0),
	       "queue pair to RTS");
}

link::link(const test &t, const device_choice &device, bool client)
    : test_(t),
      context_(open_device(device.name)),
      pd_(rc::own(ibv_alloc_pd(context_.get()), "ibv_alloc_pd")),
      memory_(memory_plan(t, client).bytes(), t.minor, t.absent || t.local_absent || t.pressure)
{
	const bool posts = client || t.pingpong() || t.takes_receives();
	int access = IBV_ACCESS_LOCAL_WRITE;

	if (preload_is_loaded() != (t.how == mode::preload))
		throw std::runtime_error(t.how == mode::preload
					     ? "libnprdma-preload.so was not loaded"
					     : "run np_perf without libnprdma-preload.so: it "
					       "loads it for --mode preload itself");
	if (npr_device_attr unpinned{}; t.unpinned())
		if (const int error = npr_query_device(context_.get(), &unpinned))
			rc::fail(-error,
				 fmt::format("mode {}: {} does not serve unpinned memory with this kernel",
					     name_of(mode_names, t.how),
					     ibv_get_device_name(context_->device)));
	if (const int error = ibv_query_port(context_.get(), port_number, &port_))
		rc::fail(error, "ibv_query_port");
	if (port_.state != IBV_PORT_ACTIVE)
		throw std::runtime_error(fmt::format("port {} of {} is not active", port_number,
						     ibv_get_device_name(context_->device)));
	gid_index_ = device.gid_index >= 0 ? device.gid_index : suitable_gid(context_.get(), port_);
	if (ibv_query_gid(context_.get(), port_number, gid_index_, &gid_))
		rc::fail(errno, fmt::format("GID {}", gid_index_));
	if (t.over == transport::ud && t.size > 128ULL << port_.active_mtu)
		throw std::runtime_error(fmt::format(
		    "UD has messages of one packet, here of {} bytes at most", 128U << port_.active_mtu));

	switch (t.op) {
	case verb::read:
		access |= IBV_ACCESS_REMOTE_READ;
		break;
	case verb::write:
	case verb::write_imm:
		access |= IBV_ACCESS_REMOTE_WRITE;
		break;
	case verb::fetch_add:
	case verb::cmp_swap:
		access |= IBV_ACCESS_REMOTE_ATOMIC;
		break;
	case verb::send:
		break;
	}
	/* The library proves what it WRITEs by READs of its own. */
	const auto qp_access =
	    static_cast<std::uint8_t>((access & ~IBV_ACCESS_LOCAL_WRITE) | IBV_ACCESS_REMOTE_READ);

	if (t.library()) {
		library_.emplace(*context_, t.how == mode::optimistic ? unsigned{NPR_OPEN_NO_LEASES} : 0);
		region_.emplace(*pd_, memory_.all(), access);
	} else {
		plain_ = rc::own(
		    ibv_reg_mr(pd_.get(), memory_.at(0), memory_.all().size(), access),
		    fmt::format("ibv_reg_mr of {} bytes{}", memory_.all().size(),
				t.unpinned() ? "" : ": RLIMIT_MEMLOCK (ulimit -l) limits what is pinned"));
	}
	/* What the columns are called they have to be. */
	if (counters().has_value() != t.unpinned())
		throw std::runtime_error(fmt::format("mode {}: the region is {}", name_of(mode_names, t.how),
						     t.unpinned() ? "pinned" : "not pinned"));
	const layout l(t, t.size);
	for (unsigned i = 0; i < t.threads; i++)
		queues_.emplace_back(*pd_, t, l, library_ && posts ? &*library_ : nullptr,
				     t.over == transport::uc
					 ? static_cast<std::uint8_t>(qp_access & ~IBV_ACCESS_REMOTE_READ)
					 : qp_access);
}

endpoint link::self() const
{
	endpoint e;

	e.address = reinterpret_cast<std::uintptr_t>(memory_.at(0));
	e.length = memory_.all().size();
	e.rkey = mr()->rkey;
	e.lid = port_.lid;
	std::memcpy(e.gid.data(), gid_.raw, e.gid.size());
	e.mtu = static_cast<std::uint8_t>(port_.active_mtu);
	e.ethernet = port_.link_layer == IBV_LINK_LAYER_ETHERNET;
	for (const queue &q : queues_)
		e.qps.push_back({q.number(), q.number() * 37 & 0xffffff});
	return e;
}

void link::connect(const endpoint &theirs)
{
	const endpoint mine = self();

	if (mine.ethernet != theirs.ethernet)
		throw std::runtime_error(fmt::format("this end is {}, the other {}: use --device",
						     mine.ethernet ? "Ethernet" : "InfiniBand",
						     theirs.ethernet ? "Ethernet" : "InfiniBand"));
	for (std::size_t i = 0; i < queues_.size(); i++)
		queues_[i].connect(test_, mine, theirs, mine.qps[i], theirs.qps[i], gid_index_);
}

std::optional<npr_mr_attr> link::counters() const
{
	npr_mr_attr attr{};
	const int error = npr_query_mr(mr(), &attr);

	if (!error)
		return attr;
	if (error == -EINVAL || error == -EOPNOTSUPP || error == -ENOTTY)
		return std::nullopt;
	rc::fail(-error, "npr_query_mr");
}

} // namespace perf
