/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * nprping: two processes, one region. The responder registers memory, unpinned
 * or pinned, and waits; the initiator fills it by WRITE, reads it back by READ and
 * compares, then measures both latencies. With --plain the initiator
 * uses ibv_post_send() and ibv_poll_cq(), for comparison (pinned memory only).
 *
 *   nprping all RESPONDER_DEVICE INITIATOR_DEVICE SIZE [OPTION...]
 * Options: pinned, plain, evict (the responder pages out between the passes),
 *   chunk=BYTES (4096), rounds=N (1000), relaxed, events
 */
#include <nprdma/nprdma.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

using clock_type = std::chrono::steady_clock;

struct closer {
	void operator()(ibv_context *p) const noexcept { ibv_close_device(p); }
	void operator()(ibv_pd *p) const noexcept { ibv_dealloc_pd(p); }
	void operator()(ibv_cq *p) const noexcept { ibv_destroy_cq(p); }
	void operator()(ibv_qp *p) const noexcept { ibv_destroy_qp(p); }
	void operator()(ibv_mr *p) const noexcept { npr_dereg_mr(p); }
	void operator()(ibv_comp_channel *p) const noexcept { ibv_destroy_comp_channel(p); }
};
template <class T>
using owned = std::unique_ptr<T, closer>;

[[noreturn]] void die(const std::string &what)
{
	throw std::system_error(errno, std::generic_category(), what);
}

template <class T>
owned<T> own(T *p, const char *what)
{
	if (!p)
		die(what);
	return owned<T>(p);
}

struct options {
	std::size_t size = 0, chunk = 4096, rounds = 1000;
	bool pinned = false, plain = false, evict = false, relaxed = false, events = false;
};

/* What one side tells the other. */
struct address {
	std::uint32_t qpn, rkey;
	std::uint16_t lid;
	std::uint8_t gid[16];
	std::uint64_t addr;
};

class endpoint {
public:
	explicit endpoint(const std::string &device)
	{
		int n;
		ibv_device **list = ibv_get_device_list(&n);
		for (int i = 0; list && i < n; ++i)
			if (device == ibv_get_device_name(list[i]))
				context.reset(ibv_open_device(list[i]));
		ibv_free_device_list(list);
		if (!context) {
			errno = ENODEV;
			die(device);
		}
		pd = own(ibv_alloc_pd(context.get()), "ibv_alloc_pd");
		channel = own(ibv_create_comp_channel(context.get()), "ibv_create_comp_channel");
		cq = own(ibv_create_cq(context.get(), 256, nullptr, channel.get(), 0), "ibv_create_cq");
		ibv_qp_init_attr init{};
		init.send_cq = init.recv_cq = cq.get();
		init.cap = {128, 16, 4, 1, 0};
		init.qp_type = IBV_QPT_RC;
		qp = own(ibv_create_qp(pd.get(), &init), "ibv_create_qp");
		ibv_qp_attr a{};
		a.qp_state = IBV_QPS_INIT;
		a.port_num = 1;
		a.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
		modify(a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	}

	[[nodiscard]] address self() const
	{
		address a{};
		ibv_port_attr port{};
		ibv_gid gid{};
		if (ibv_query_port(context.get(), 1, &port) || ibv_query_gid(context.get(), 1, 0, &gid))
			die("port");
		a.qpn = qp->qp_num;
		a.lid = port.lid;
		std::copy(std::begin(gid.raw), std::end(gid.raw), a.gid);
		return a;
	}

	void connect(const address &peer)
	{
		ibv_qp_attr a{};
		a.qp_state = IBV_QPS_RTR;
		a.path_mtu = IBV_MTU_4096;
		a.dest_qp_num = peer.qpn;
		a.max_dest_rd_atomic = 16;
		a.min_rnr_timer = 12;
		a.ah_attr.dlid = peer.lid;
		a.ah_attr.port_num = 1;
		if (!peer.lid) { /* Ethernet */
			a.ah_attr.is_global = 1;
			std::copy(std::begin(peer.gid), std::end(peer.gid), a.ah_attr.grh.dgid.raw);
			a.ah_attr.grh.hop_limit = 1;
			a.path_mtu = IBV_MTU_1024;
		}
		modify(a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
		a.qp_state = IBV_QPS_RTS;
		a.timeout = 14;
		a.retry_cnt = 7;
		a.rnr_retry = 7;
		a.max_rd_atomic = 16;
		modify(a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				  IBV_QP_MAX_QP_RD_ATOMIC);
	}

	owned<ibv_context> context;
	owned<ibv_pd> pd;
	owned<ibv_comp_channel> channel;
	owned<ibv_cq> cq;
	owned<ibv_qp> qp;

private:
	void modify(ibv_qp_attr &a, int mask)
	{
		errno = ibv_modify_qp(qp.get(), &a, mask);
		if (errno)
			die("ibv_modify_qp");
	}
};

template <class T>
void tell(int fd, const T &v)
{
	if (::write(fd, &v, sizeof(v)) != static_cast<ssize_t>(sizeof(v)))
		die("write");
}

template <class T>
bool hear(int fd, T &v)
{
	return ::read(fd, &v, sizeof(v)) == static_cast<ssize_t>(sizeof(v));
}

/* Page @i of pass @pass, which its reader can compute. */
void pattern(std::span<std::byte> b, std::uint64_t where, std::uint64_t pass)
{
	std::uint64_t x = where * 0x9e3779b97f4a7c15ULL + pass;
	for (std::byte &c : b) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		c = static_cast<std::byte>(x);
	}
}

std::span<std::byte> map(std::size_t size)
{
	void *p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		die("mmap");
	return {static_cast<std::byte *>(p), size};
}

int respond(const std::string &device, const options &o, int in, int out)
{
	endpoint e(device);
	const std::span<std::byte> memory = map(o.size);
	const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
	const auto mr = own(o.pinned ? ibv_reg_mr(e.pd.get(), memory.data(), memory.size(), access)
				     : npr_reg_mr(e.pd.get(), memory.data(), memory.size(), access),
			    "register");
	address self = e.self(), peer{};
	self.rkey = mr->rkey;
	self.addr = reinterpret_cast<std::uintptr_t>(memory.data());
	tell(out, self);
	if (!hear(in, peer))
		return 1;
	e.connect(peer);
	tell(out, 'c');
	/* 'e': page out; anything else, or the end: done */
	for (char c; hear(in, c) && c == 'e';) {
		if (madvise(memory.data(), memory.size(), MADV_PAGEOUT))
			die("MADV_PAGEOUT");
		tell(out, 'e');
	}
	npr_mr_attr a{};
	if (!o.pinned && !npr_query_mr(mr.get(), &a))
		std::fprintf(stderr,
			     "responder: %llu resident, %llu writable, faults %llu minor %llu major, "
			     "%llu invalidations of %llu pages, %llu holds\n",
			     static_cast<unsigned long long>(a.resident_pages),
			     static_cast<unsigned long long>(a.writable_pages),
			     static_cast<unsigned long long>(a.faults_minor),
			     static_cast<unsigned long long>(a.faults_major),
			     static_cast<unsigned long long>(a.invalidations),
			     static_cast<unsigned long long>(a.pages_invalidated),
			     static_cast<unsigned long long>(a.holds));
	return 0;
}

class initiator {
public:
	initiator(const std::string &device, const options &o, int in, int out)
	    : o_(o), e_(device), in_(in), out_(out), buffer_(map(std::max<std::size_t>(o.chunk, 4096)))
	{
		mr_ = own(ibv_reg_mr(e_.pd.get(), buffer_.data(), buffer_.size(), IBV_ACCESS_LOCAL_WRITE),
			  "ibv_reg_mr");
		if (!hear(in_, peer_))
			die("no peer");
		e_.connect(peer_);
		tell(out_, e_.self());
		char c;
		if (!hear(in_, c))
			die("no connection");
		if (!o_.plain) {
			context_.emplace(*e_.context);
			cq_.emplace(context_->attach(*e_.cq));
			npr_qp_attr a{};
			a.flags = o_.relaxed ? NPR_QP_RELAXED_ORDER : 0;
			qp_.emplace(cq_->attach(*e_.qp, a));
		}
	}

	void operate(ibv_wr_opcode opcode, std::uint64_t offset, std::size_t length)
	{
		ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer_.data()), static_cast<std::uint32_t>(length),
			  mr_->lkey};
		ibv_send_wr wr{}, *bad;
		wr.wr_id = offset;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = opcode;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.wr.rdma.remote_addr = peer_.addr + offset;
		wr.wr.rdma.rkey = peer_.rkey;
		/* verbs return an errno value, libnprdma a negative one */
		errno = std::abs(o_.plain ? ibv_post_send(e_.qp.get(), &wr, &bad) : qp_->post_send(wr, bad));
		if (errno)
			die("post_send");
		ibv_wc wc;
		int n;
		while (!(n = o_.plain ? ibv_poll_cq(e_.cq.get(), 1, &wc) : cq_->poll({&wc, 1})))
			if (o_.events && !o_.plain)
				sleep_on_cq();
		if (n < 0 || wc.status != IBV_WC_SUCCESS || wc.wr_id != offset) {
			std::fprintf(stderr, "at %llu: %s (%d)\n", static_cast<unsigned long long>(offset),
				     n < 0 ? "poll" : ibv_wc_status_str(wc.status), n);
			std::exit(1);
		}
	}

	void evict()
	{
		char c;
		if (!o_.evict)
			return;
		tell(out_, 'e');
		if (!hear(in_, c))
			die("evict");
	}

	std::size_t pass(std::uint64_t number)
	{
		std::vector<std::byte> want(o_.chunk);
		std::vector<std::uint64_t> order(o_.size / o_.chunk);
		std::size_t wrong = 0;

		for (std::size_t i = 0; i < order.size(); ++i)
			order[i] = i * o_.chunk;
		std::mt19937_64 rng(number);
		std::shuffle(order.begin(), order.end(), rng);
		evict();
		for (const auto at : order) {
			pattern(buffer_.first(o_.chunk), at, number);
			operate(IBV_WR_RDMA_WRITE, at, o_.chunk);
		}
		evict();
		std::shuffle(order.begin(), order.end(), rng);
		for (const auto at : order) {
			pattern(want, at, number);
			operate(IBV_WR_RDMA_READ, at, o_.chunk);
			wrong += std::memcmp(want.data(), buffer_.data(), o_.chunk) != 0;
		}
		return wrong;
	}

	/* Microseconds for one, median and 99th percentile, on memory that is resident. */
	std::pair<double, double> latency(ibv_wr_opcode opcode)
	{
		std::vector<double> us(o_.rounds);
		for (auto &t : us) {
			const auto begin = clock_type::now();
			operate(opcode, 0, o_.chunk);
			t = std::chrono::duration<double, std::micro>(clock_type::now() - begin).count();
		}
		std::sort(us.begin(), us.end());
		return {us[us.size() / 2], us[us.size() * 99 / 100]};
	}

	int run()
	{
		std::size_t wrong = 0;
		for (std::uint64_t i = 1; i <= 2; ++i)
			wrong += pass(i);
		const auto w = latency(IBV_WR_RDMA_WRITE);
		const auto r = latency(IBV_WR_RDMA_READ);
		tell(out_, 'q');
		std::printf("chunk %zu: mismatches %zu; READ median %.2f us, p99 %.2f us; WRITE median %.2f us, p99 %.2f us\n",
			    o_.chunk, wrong, r.first, r.second, w.first, w.second);
		if (qp_) {
			const npr_stats s = qp_->stats();
			std::printf("reads %llu writes %llu suspicious %llu repeated %llu faults %llu busy %llu holds %llu "
				    "word reads %llu resolves %llu gone %llu\n",
				    static_cast<unsigned long long>(s.reads),
				    static_cast<unsigned long long>(s.writes),
				    static_cast<unsigned long long>(s.suspicious_pages),
				    static_cast<unsigned long long>(s.repeated_pages),
				    static_cast<unsigned long long>(s.faults),
				    static_cast<unsigned long long>(s.busy),
				    static_cast<unsigned long long>(s.holds),
				    static_cast<unsigned long long>(s.word_reads),
				    static_cast<unsigned long long>(s.resolves),
				    static_cast<unsigned long long>(s.gone));
		}
		return wrong != 0;
	}

private:
	void sleep_on_cq()
	{
		/* one poll between arming and sleeping is the caller's next round */
		if (!armed_) {
			armed_ = true;
			if (cq_->req_notify() < 0)
				die("req_notify");
			return;
		}
		armed_ = false;
		if (cq_->wait(10'000) <= 0)
			std::fprintf(stderr, "no wake-up in 10 s\n");
	}

	options o_;
	endpoint e_;
	int in_, out_;
	std::span<std::byte> buffer_;
	owned<ibv_mr> mr_;
	address peer_{};
	bool armed_ = false;
	std::optional<nprdma::context> context_;
	std::optional<nprdma::cq> cq_;
	std::optional<nprdma::qp> qp_;
};

options parse(int argc, char **argv)
{
	options o;
	char *end;
	o.size = std::strtoull(argv[0], &end, 10);
	switch (*end) {
	case 'G':
		o.size <<= 10;
		[[fallthrough]];
	case 'M':
		o.size <<= 10;
		[[fallthrough]];
	case 'K':
		o.size <<= 10;
	}
	for (int i = 1; i < argc; ++i) {
		const std::string_view a = argv[i];
		if (a == "pinned")
			o.pinned = true;
		else if (a == "plain")
			o.plain = true;
		else if (a == "evict")
			o.evict = true;
		else if (a == "relaxed")
			o.relaxed = true;
		else if (a == "events")
			o.events = true;
		else if (a.starts_with("chunk="))
			o.chunk = std::strtoull(argv[i] + 6, nullptr, 10);
		else if (a.starts_with("rounds="))
			o.rounds = std::max(1ULL, std::strtoull(argv[i] + 7, nullptr, 10));
		else
			o.size = 0;
	}
	if (!o.chunk || o.chunk > o.size || o.size % o.chunk)
		o.size = 0;
	return o;
}

int both(const std::string &responder, const std::string &asker, const options &o)
{
	int down[2], up[2];

	if (pipe(down) || pipe(up))
		die("pipe");
	const pid_t child = fork();
	if (child < 0)
		die("fork");
	if (!child) {
		close(down[1]);
		close(up[0]);
		std::exit(respond(responder, o, down[0], up[1]));
	}
	close(down[0]);
	close(up[1]);
	int rc;
	{
		initiator i(asker, o, up[0], down[1]);
		rc = i.run();
	}
	close(down[1]);
	int status;
	if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status))
		rc = 1;
	return rc;
}

} // namespace

int main(int argc, char **argv)
{
	std::signal(SIGPIPE, SIG_IGN);
	try {
		if (argc >= 5 && std::string_view(argv[1]) == "all") {
			const options o = parse(argc - 4, argv + 4);
			if (o.size)
				return both(argv[2], argv[3], o);
		}
	} catch (const std::exception &e) {
		std::fprintf(stderr, "nprping: %s\n", e.what());
		return 1;
	}
	std::fprintf(stderr,
		     "usage: nprping all RESPONDER_DEVICE INITIATOR_DEVICE SIZE[K|M|G]\n"
		     "       [pinned] [plain] [evict] [relaxed] [events] [chunk=BYTES] [rounds=N]\n");
	return 2;
}
