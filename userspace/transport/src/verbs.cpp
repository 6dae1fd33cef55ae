/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The transport over verbs: RC queue pairs, whose send queues libnprdma has, so that regions of both ends may
 * be unpinned. The ends find each other by a TCP connection, which stays: its end is that of the peer.
 *
 * A message behind a WRITE is a SEND: the library posts it when all earlier WRITEs are proven to have landed,
 * which the last byte of an unpinned WRITE does not say. Buffers of messages are ours, and pinned.
 *
 * READs may overtake WRITEs here (NPR_QP_RELAXED_ORDER), so that WRITEs are pipelined.
 */
#include "door.hpp"
#include "kinds.hpp"
#include "owners.hpp"
#include "tcp.hpp"

#include <nprdma/nprdma.hpp>

#include <algorithm>
#include <atomic>
#include <deque>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <thread>
#include <vector>

namespace nprdma::transport
{

namespace
{

constexpr std::uint32_t setup_magic = 0x3262766e;      /* and version */
constexpr auto set_up_time = std::chrono::seconds(20); /* of a peer that has connected: guests are slow */
constexpr auto memory_time = std::chrono::seconds(10); /* for the kernel to find memory */
constexpr auto memory_pause = std::chrono::milliseconds(50);
constexpr unsigned send_entries = 256; /* of a queue pair: the library queues what is more */

struct setup {
	std::uint32_t magic, messages, max_message;
	std::uint32_t qpn, lid, mtu, reads;
	std::uint32_t refused; /* more messages were asked for than these: there is no connection */
	ibv_gid gid;
};

template <auto F> struct ended_by {
	template <class T> void operator()(T *p) const noexcept { (void)F(p); }
};
using device_owner = std::unique_ptr<ibv_context, ended_by<ibv_close_device>>;
using pd_owner = std::unique_ptr<ibv_pd, ended_by<ibv_dealloc_pd>>;
using channel_owner = std::unique_ptr<ibv_comp_channel, ended_by<ibv_destroy_comp_channel>>;
using cq_owner = std::unique_ptr<ibv_cq, ended_by<ibv_destroy_cq>>;
using qp_owner = std::unique_ptr<ibv_qp, ended_by<ibv_destroy_qp>>;
using mr_owner = std::unique_ptr<ibv_mr, ended_by<ibv_dereg_mr>>;

/* Waits for @events, or until @deadline: ETIMEDOUT. */
int wait_for(int fd, short events, clock::time_point deadline) noexcept
{
	for (;;) {
		pollfd p = {fd, events, 0};
		const int n = ::poll(&p, 1, milliseconds_to(deadline));

		if (n > 0)
			return 0;
		if (n < 0 && errno != EINTR)
			return errno;
		if (clock::now() >= deadline)
			return ETIMEDOUT;
	}
}

int send_all(int fd, const void *data, std::size_t bytes, clock::time_point deadline) noexcept
{
	for (std::size_t done = 0; done < bytes;) {
		const ssize_t n =
		    ::send(fd, static_cast<const char *>(data) + done, bytes - done, MSG_NOSIGNAL);

		if (n > 0)
			done += static_cast<std::size_t>(n);
		else if (errno != EAGAIN && errno != EINTR)
			return errno;
		else if (const int code = wait_for(fd, POLLOUT, deadline))
			return code;
	}
	return 0;
}

int receive_all(int fd, void *data, std::size_t bytes, clock::time_point deadline) noexcept
{
	for (std::size_t done = 0; done < bytes;) {
		const ssize_t n = ::recv(fd, static_cast<char *>(data) + done, bytes - done, 0);

		if (n > 0)
			done += static_cast<std::size_t>(n);
		else if (n == 0)
			return ECONNRESET;
		else if (errno != EAGAIN && errno != EINTR)
			return errno;
		else if (const int code = wait_for(fd, POLLIN, deadline))
			return code;
	}
	return 0;
}

struct addresses_end {
	void operator()(addrinfo *a) const noexcept { ::freeaddrinfo(a); }
};

/* "verbs:HOST:PORT" */
result<std::unique_ptr<addrinfo, addresses_end>> resolve(std::string_view address, bool passive)
{
	constexpr std::string_view kind = "verbs:";
	std::string_view rest =
	    address.substr(0, kind.size()) == kind ? address.substr(kind.size()) : address;
	const std::size_t colon = rest.rfind(':');
	addrinfo hints{}, *found = nullptr;

	if (colon == std::string_view::npos || colon + 1 == rest.size())
		return error{EINVAL, std::string(address) +
					 ": an address of the verbs transport is \"verbs:HOST:PORT\""};
	std::string host(rest.substr(0, colon));
	const std::string port(rest.substr(colon + 1));
	if (host.size() > 2 && host.front() == '[' && host.back() == ']')
		host = host.substr(1, host.size() - 2);
	hints.ai_socktype = SOCK_STREAM;
	hints.ai_flags = passive ? AI_PASSIVE : 0;
	if (const int code =
		::getaddrinfo(host.empty() ? nullptr : host.c_str(), port.c_str(), &hints, &found))
		return error{EADDRNOTAVAIL, std::string(address) + ": " + ::gai_strerror(code)};
	return std::unique_ptr<addrinfo, addresses_end>(found);
}

class verbs_context final : public context
{
public:
	verbs_context(const options &how, device_owner device) : how_(how), device_(std::move(device)) {}

	status start()
	{
		npr_device_attr unpinned{};

		pd_.reset(::ibv_alloc_pd(device_.get()));
		if (!pd_)
			return failure(errno, "ibv_alloc_pd");
		if (::ibv_query_device(device_.get(), &attr_) ||
		    ::ibv_query_port(device_.get(), how_.port, &port_))
			return failure(EINVAL, "verbs transport: port " + std::to_string(how_.port) +
						   " of the device");
		can_unpinned_ = ::npr_query_device(device_.get(), &unpinned) == 0;
		library_.reset(::npr_open(device_.get(), 0));
		if (!library_)
			return failure(errno, "npr_open");
		return {};
	}

	result<std::unique_ptr<region>> register_memory(std::span<std::byte> memory,
							const region_options &how) override;
	result<std::unique_ptr<listener>> listen(std::string_view address,
						 std::optional<message_room> most) override;
	result<std::unique_ptr<connection>> connect(std::string_view address, clock::time_point deadline,
						    std::optional<message_room> room) override;

	/* The rest of connect(), once @socket is connected. */
	result<std::unique_ptr<connection>> meet(descriptor socket, clock::time_point deadline,
						 const message_room &room);

	[[nodiscard]] const options &how() const noexcept { return how_; }
	[[nodiscard]] ibv_context *device() const noexcept { return device_.get(); }
	[[nodiscard]] ibv_pd *pd() const noexcept { return pd_.get(); }
	[[nodiscard]] npr_context *library() const noexcept { return library_.get(); }
	[[nodiscard]] const ibv_port_attr &port() const noexcept { return port_; }
	[[nodiscard]] std::uint32_t reads() const noexcept
	{
		return static_cast<std::uint32_t>(
		    std::clamp(std::min(attr_.max_qp_rd_atom, attr_.max_qp_init_rd_atom), 1, 16));
	}

private:
	const options how_;
	const device_owner device_;
	pd_owner pd_;
	ibv_device_attr attr_{};
	ibv_port_attr port_{};
	bool can_unpinned_ = false;
	detail::handle<npr_context> library_;
};

class verbs_region final : public region
{
public:
	verbs_region(std::span<std::byte> memory, ibv_mr *mr, bool unpinned) noexcept
	    : memory_(memory), mr_(mr), unpinned_(unpinned)
	{
	}
	~verbs_region() override
	{
		if (unpinned_)
			(void)::npr_dereg_mr(mr_);
		else
			(void)::ibv_dereg_mr(mr_);
	}

	[[nodiscard]] std::span<std::byte> memory() const noexcept override { return memory_; }
	[[nodiscard]] token remote() const noexcept override
	{
		return {reinterpret_cast<std::uintptr_t>(memory_.data()), memory_.size(), mr_->rkey};
	}
	[[nodiscard]] bool unpinned() const noexcept override { return unpinned_; }
	[[nodiscard]] std::uint32_t lkey() const noexcept { return mr_->lkey; }

private:
	const std::span<std::byte> memory_;
	ibv_mr *const mr_;
	const bool unpinned_;
};

class verbs_connection final : public connection
{
public:
	verbs_connection(verbs_context &c, descriptor socket) : context_(c), socket_(std::move(socket)) {}
	~verbs_connection() override
	{
		shutdown();
		/* Before what it works on: the queue pair's end is that of all access to memory. */
		library_qp_.reset();
	}

	status make(std::uint32_t messages, std::uint32_t max_message);
	status connect(const setup &peer);
	[[nodiscard]] setup describe() const;

	status read(std::span<const segment> segments, std::uint64_t id) noexcept override
	{
		return post(segments, id, {}, IBV_WR_RDMA_READ);
	}
	status write(std::span<const segment> segments, std::uint64_t id,
		     std::span<const std::byte> message) noexcept override
	{
		return post(segments, id, message, IBV_WR_RDMA_WRITE);
	}
	status send(std::span<const std::byte> message) noexcept override
	{
		if (const int code = may_send(message))
			return said(code);
		return post_message(message);
	}

	std::size_t poll(std::span<completion> to) noexcept override
	{
		std::size_t n = 0;

		if (done_.size() < to.size())
			progress();
		for (; n < to.size() && !done_.empty(); n++) {
			to[n] = done_.front();
			done_.pop_front();
		}
		return n;
	}

	result<std::size_t> receive(std::span<std::byte> buffer) noexcept override
	{
		if (received_.empty())
			progress();
		if (received_.empty()) {
			if (alive())
				return std::size_t{0};
			/* What arrived before the end is received. */
			progress();
			if (received_.empty())
				return said(ECONNRESET);
		}
		const arrival a = received_.front();
		if (a.bytes > buffer.size())
			return error{ENOBUFS, "the message is larger than the buffer"};
		std::memcpy(buffer.data(), receive_slot(a.slot), a.bytes);
		received_.pop_front();
		if (const int code = post_receive(a.slot); code && !broken())
			shutdown();
		return std::size_t{a.bytes};
	}

	[[nodiscard]] bool alive() noexcept override
	{
		pollfd p = {socket_.get(), POLLIN | POLLRDHUP, 0};

		/* Nothing is sent by way of it any more: readable is closed. */
		if (!broken() && ::poll(&p, 1, 0) != 0)
			shutdown();
		return !broken();
	}

	void shutdown() noexcept override
	{
		ibv_qp_attr attr{};

		/* relaxed: nothing is read because of it */
		if (broken_.exchange(true, std::memory_order_relaxed))
			return;
		attr.qp_state = IBV_QPS_ERR;
		if (qp_)
			(void)::ibv_modify_qp(qp_.get(), &attr, IBV_QP_STATE);
		(void)::shutdown(socket_.get(), SHUT_RDWR);
	}

	void advise(std::uint64_t remote, std::uint64_t key, std::uint64_t bytes,
		    advice what) noexcept override
	{
		(void)::npr_advise(library_qp_.get(), static_cast<std::uint32_t>(key), remote, bytes,
				   what == advice::read_often    ? NPR_ADVISE_READ_OFTEN
				   : what == advice::write_often ? NPR_ADVISE_WRITE_OFTEN
								 : NPR_ADVISE_SELDOM);
	}

	[[nodiscard]] std::size_t max_message() const noexcept override { return max_message_; }
	[[nodiscard]] std::size_t max_segments() const noexcept override
	{
		return context_.how().max_segments;
	}
	[[nodiscard]] std::size_t max_operations() const noexcept override
	{
		return context_.how().max_operations;
	}

	[[nodiscard]] interest prepare_wait() noexcept override
	{
		interest i = {{::npr_get_fd(library_cq_.get()), broken() ? -1 : socket_.get()},
			      clock::time_point::max(),
			      false};

		/* Arm, then look, then wait: what comes in between is not missed. */
		const bool armed = ::npr_req_notify_cq(library_cq_.get(), 0) >= 0;
		const std::size_t free = free_slots_.size(), posted = work_requests_;
		progress();
		i.ready = !armed || !done_.empty() || !received_.empty() || free_slots_.size() != free ||
			  work_requests_ != posted || (broken() && under_way_.empty());
		return i;
	}

	void finish_wait() noexcept override
	{
		(void)::npr_wait_cq(library_cq_.get(), 0);
		(void)alive();
	}

private:
	enum what : std::uint64_t { is_operation = 0, is_send = 1, is_receive = 2 };
	struct operation {
		std::uint64_t id;
		std::size_t work_requests;
	};
	struct arrival {
		std::uint32_t slot, bytes;
	};

	[[nodiscard]] bool broken() const noexcept { return broken_.load(std::memory_order_relaxed); }
	[[nodiscard]] std::byte *send_slot(std::uint32_t i) const noexcept
	{
		return buffers_.get() + std::size_t{i} * max_message_;
	}
	[[nodiscard]] std::byte *receive_slot(std::uint32_t i) const noexcept
	{
		return send_slot(messages_ + i);
	}

	static error said(int code) noexcept
	{
		switch (code) {
		case EAGAIN:
			return {code, "too much under way: poll, and try again"};
		case ECONNRESET:
			return {code, "the connection is broken"};
		case EMSGSIZE:
			return {code, "a message has 1 to max_message() bytes"};
		case EINVAL:
			return {code, "segments: none, too many, or outside of the local region"};
		default:
			return failure(code, "posting to a queue pair");
		}
	}

	static int code_of(ibv_wc_status s) noexcept
	{
		switch (s) {
		case IBV_WC_SUCCESS:
			return 0;
		case IBV_WC_REM_ACCESS_ERR:
			return EACCES;
		case IBV_WC_LOC_PROT_ERR:
			return EFAULT;
		case IBV_WC_RETRY_EXC_ERR:
			return ETIMEDOUT;
		case IBV_WC_WR_FLUSH_ERR:
			return ECONNRESET;
		default:
			return EIO;
		}
	}

	[[nodiscard]] int post_receive(std::uint32_t slot) noexcept
	{
		ibv_sge sge = {reinterpret_cast<std::uintptr_t>(receive_slot(slot)), max_message_,
			       buffers_mr_->lkey};
		ibv_recv_wr wr{}, *bad;

		wr.wr_id = std::uint64_t{slot} << 2 | is_receive;
		wr.sg_list = &sge;
		wr.num_sge = 1;
		return ::ibv_post_recv(qp_.get(), &wr, &bad);
	}

	[[nodiscard]] int may_send(std::span<const std::byte> message) noexcept
	{
		if (message.empty() || message.size() > max_message_)
			return EMSGSIZE;
		if (broken())
			return ECONNRESET;
		if (free_slots_.empty())
			progress();
		return broken() ? ECONNRESET : free_slots_.empty() ? EAGAIN : 0;
	}

	status post_message(std::span<const std::byte> message) noexcept
	{
		const std::uint32_t slot = free_slots_.back();
		ibv_sge sge = {reinterpret_cast<std::uintptr_t>(send_slot(slot)),
			       static_cast<std::uint32_t>(message.size()), buffers_mr_->lkey};
		ibv_send_wr wr{}, *bad;

		std::memcpy(send_slot(slot), message.data(), message.size());
		wr.wr_id = std::uint64_t{slot} << 2 | is_send;
		wr.sg_list = &sge;
		wr.num_sge = 1;
		wr.opcode = IBV_WR_SEND;
		wr.send_flags = IBV_SEND_SIGNALED;
		if (const int code = -::npr_post_send(library_qp_.get(), &wr, &bad))
			return said(code == ENOMEM ? EAGAIN : code);
		free_slots_.pop_back();
		return {};
	}

	status post(std::span<const segment> segments, std::uint64_t id, std::span<const std::byte> message,
		    ibv_wr_opcode opcode) noexcept
	{
		if (const int code = check_segments(segments, max_segments()))
			return said(code);
		if (broken())
			return said(ECONNRESET);
		/* What is done counts until poll() has told it: it is kept until then. */
		const auto too_much = [&] {
			return under_way_.size() + done_.size() >= max_operations() ||
			       work_requests_ + segments.size() > most_work_;
		};
		if (too_much())
			progress();
		if (too_much())
			return said(EAGAIN);
		if (!message.empty())
			if (const int code = may_send(message))
				return said(code);

		std::vector<ibv_send_wr> &wrs = scratch_;
		std::vector<ibv_sge> &sges = scratch_sges_;
		const std::size_t n = segments.size();
		ibv_send_wr *bad = nullptr;
		wrs.assign(n, {});
		sges.resize(n);
		for (std::size_t i = 0; i < n; i++) {
			const segment &s = segments[i];

			sges[i] = {reinterpret_cast<std::uintptr_t>(s.buffer), s.bytes,
				   static_cast<const verbs_region *>(s.local)->lkey()};
			wrs[i].wr_id = is_operation;
			wrs[i].next = i + 1 < n ? &wrs[i + 1] : nullptr;
			wrs[i].sg_list = &sges[i];
			wrs[i].num_sge = 1;
			wrs[i].opcode = opcode;
			wrs[i].send_flags = i + 1 < n ? 0 : IBV_SEND_SIGNALED;
			wrs[i].wr.rdma.remote_addr = s.remote;
			wrs[i].wr.rdma.rkey = static_cast<std::uint32_t>(s.key);
		}
		if (const int code = -::npr_post_send(library_qp_.get(), wrs.data(), &bad)) {
			if (bad == wrs.data())
				return said(code == ENOMEM ? EAGAIN : code);
			/* A part of it is on its way, and will have no completion. */
			shutdown();
			return said(code);
		}
		under_way_.push_back({id, n});
		work_requests_ += n;
		if (!message.empty())
			if (status s = post_message(message); !s) {
				shutdown();
				return s;
			}
		return {};
	}

	void progress() noexcept
	{
		ibv_wc wc[16];
		int n;

		do {
			n = ::npr_poll_cq(library_cq_.get(), 16, wc);
			for (int i = 0; i < n; i++)
				complete(wc[i]);
		} while (n == 16);
		if (n < 0)
			shutdown();
	}

	void complete(const ibv_wc &wc) noexcept
	{
		const auto slot = static_cast<std::uint32_t>(wc.wr_id >> 2);
		const int code = code_of(wc.status);

		switch (wc.wr_id & 3) {
		case is_operation: {
			if (under_way_.empty())
				break;
			/* An error of one in the middle of a list has a completion of its own; those after it
			 * are flushed. */
			if (code && reported_)
				break;
			const operation o = under_way_.front();
			under_way_.pop_front();
			work_requests_ -= o.work_requests;
			done_.push_back({o.id, code});
			if (code) {
				reported_ = true;
				/* Whatever follows on this queue pair has not been done. */
				for (const operation &rest : under_way_)
					done_.push_back({rest.id, ECONNRESET});
				under_way_.clear();
				work_requests_ = 0;
			}
			break;
		}
		case is_send:
			free_slots_.push_back(slot);
			break;
		case is_receive:
			if (!code)
				received_.push_back({slot, wc.byte_len});
			break;
		default:
			break;
		}
		if (code)
			shutdown();
	}

	verbs_context &context_;
	const descriptor socket_;
	std::uint32_t messages_ = 0, max_message_ = 0;
	std::size_t most_work_ = 0;
	mapping buffers_; /* to send, then to receive */
	mr_owner buffers_mr_;
	channel_owner channel_;
	cq_owner cq_;
	detail::handle<npr_cq> library_cq_;
	qp_owner qp_;
	detail::handle<npr_qp> library_qp_;

	std::vector<std::uint32_t> free_slots_;
	std::deque<operation> under_way_;
	std::size_t work_requests_ = 0;
	std::deque<completion> done_;
	std::deque<arrival> received_;
	std::vector<ibv_send_wr> scratch_;
	std::vector<ibv_sge> scratch_sges_;
	bool reported_ = false;
	std::atomic<bool> broken_ = false;
};

status verbs_connection::make(std::uint32_t messages, std::uint32_t max_message)
{
	messages_ = messages;
	max_message_ = max_message;
	most_work_ = std::max<std::size_t>(max_operations(), max_segments()) + 1024;
	const std::size_t bytes = std::size_t{2} * messages * max_message;
	const descriptor fd(::memfd_create("nprdma-messages", MFD_CLOEXEC));
	if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)))
		return failure(errno, "memory of messages");
	buffers_ = mapping(fd.get(), bytes);
	if (!buffers_)
		return failure(errno, "memory of messages");
	buffers_mr_.reset(::ibv_reg_mr(context_.pd(), buffers_.get(), bytes, IBV_ACCESS_LOCAL_WRITE));
	if (!buffers_mr_)
		return failure(errno,
			       "verbs transport: to register the memory of messages (RLIMIT_MEMLOCK?)");
	channel_.reset(::ibv_create_comp_channel(context_.device()));
	if (!channel_)
		return failure(errno, "ibv_create_comp_channel");
	/* npr_attach_cq(3): four times the send queue, and what else completes there. */
	cq_.reset(::ibv_create_cq(context_.device(), static_cast<int>(4 * send_entries + 2 * messages),
				  nullptr, channel_.get(), 0));
	if (!cq_)
		return failure(errno, "ibv_create_cq");
	library_cq_.reset(::npr_attach_cq(context_.library(), cq_.get()));
	if (!library_cq_)
		return failure(errno, "npr_attach_cq");
	ibv_qp_init_attr init{};
	init.send_cq = init.recv_cq = cq_.get();
	init.cap.max_send_wr = send_entries;
	init.cap.max_recv_wr = messages;
	init.cap.max_send_sge = init.cap.max_recv_sge = 1;
	init.qp_type = IBV_QPT_RC;
	qp_.reset(::ibv_create_qp(context_.pd(), &init));
	if (!qp_)
		return failure(errno, "ibv_create_qp");
	ibv_qp_attr attr{};
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = context_.how().port;
	/* READ at both ends: it is what proves a WRITE. */
	attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
	if (const int code = ::ibv_modify_qp(
		qp_.get(), &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		return failure(code, "ibv_modify_qp to INIT");
	npr_qp_attr library{};
	library.flags = NPR_QP_RELAXED_ORDER;
	library.max_send_wr = static_cast<std::uint32_t>(most_work_ + messages);
	library_qp_.reset(::npr_attach_qp(library_cq_.get(), qp_.get(), &library));
	if (!library_qp_)
		return failure(errno, "npr_attach_qp");
	for (std::uint32_t i = 0; i < messages; i++) {
		if (const int code = post_receive(i))
			return failure(code, "ibv_post_recv");
		free_slots_.push_back(i);
	}
	return {};
}

setup verbs_connection::describe() const
{
	setup s{};

	s.magic = setup_magic;
	s.messages = messages_;
	s.max_message = max_message_;
	s.qpn = qp_->qp_num;
	s.lid = context_.port().lid;
	s.mtu = context_.port().active_mtu;
	s.reads = context_.reads();
	(void)::ibv_query_gid(context_.device(), context_.how().port, context_.how().gid_index, &s.gid);
	return s;
}

status verbs_connection::connect(const setup &peer)
{
	ibv_qp_attr attr{};

	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = static_cast<ibv_mtu>(std::clamp<std::uint32_t>(
	    std::min<std::uint32_t>(peer.mtu, context_.port().active_mtu), IBV_MTU_256, IBV_MTU_4096));
	attr.dest_qp_num = peer.qpn;
	attr.max_dest_rd_atomic = static_cast<std::uint8_t>(
	    std::clamp<std::uint32_t>(std::min(peer.reads, context_.reads()), 1, 16));
	attr.min_rnr_timer = 12;
	attr.ah_attr.dlid = static_cast<std::uint16_t>(peer.lid);
	attr.ah_attr.port_num = context_.how().port;
	if (context_.port().link_layer == IBV_LINK_LAYER_ETHERNET) {
		attr.ah_attr.is_global = 1;
		attr.ah_attr.grh.hop_limit = 64;
		attr.ah_attr.grh.dgid = peer.gid;
		attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(context_.how().gid_index);
	}
	if (const int code =
		::ibv_modify_qp(qp_.get(), &attr,
				IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
		return failure(code, "ibv_modify_qp to RTR");
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 14;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	attr.max_rd_atomic = attr.max_dest_rd_atomic;
	if (const int code = ::ibv_modify_qp(qp_.get(), &attr,
					     IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
						 IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
		return failure(code, "ibv_modify_qp to RTS");
	return {};
}

/* What the peer says of itself: it is there, or comes until @deadline. */
result<setup> receive_setup(int socket, clock::time_point deadline)
{
	setup peer{};

	if (const int code = receive_all(socket, &peer, sizeof(peer), deadline))
		return failure(code, "greeting of the peer");
	if (peer.magic != setup_magic || !is_sane({peer.messages, peer.max_message}))
		return error{EPROTO, "the peer is not this transport, or of another version"};
	if (peer.refused)
		return too_much_room({peer.messages, peer.max_message});
	return peer;
}

/*
 * Who connects and then says nothing keeps nobody waiting: the next step of a caller is made only when all is
 * there that it needs.
 */
class verbs_listener final : public listener
{
public:
	verbs_listener(verbs_context &c, door at, std::string address, const message_room &most)
	    : context_(c), door_(std::move(at)), address_(std::move(address)), most_(most)
	{
	}

	result<std::unique_ptr<connection>> accept(clock::time_point deadline) override
	{
		return accept_at(
		    door_, callers_, deadline, address_, [&](int which) { return take_caller(which); },
		    [&](caller &c) -> result<std::unique_ptr<connection>> {
			    if (status s = next_step(c); !s)
				    return s.why();
			    return std::unique_ptr<connection>(c.ready ? std::move(c.line) : nullptr);
		    });
	}
	[[nodiscard]] int fd() const noexcept override { return door_.fd(); }
	[[nodiscard]] std::string address() const override { return address_; }

private:
	struct caller {
		int fd; /* of @socket, then of @line */
		clock::time_point until;
		descriptor socket;
		std::unique_ptr<verbs_connection> line; /* once it has greeted */
		bool ready = false;
	};

	status take_caller(int which)
	{
		const int all = sizeof(setup);
		result<descriptor> s = door_.take(which);

		if (!s)
			return error{s.code(), address_ + ": " + s.why().text};
		if (!*s)
			return {};
		const int fd = s->get();
		set_up_tcp(fd);
		if (::setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &all, sizeof(all)) || !door_.watch(fd))
			return failure(errno, address_);
		if (callers_.size() >= door::most_callers)
			callers_.erase(callers_.begin());
		callers_.push_back({fd, clock::now() + set_up_time, std::move(*s), nullptr});
		return {};
	}

	/* It is readable: of its greeting all has come, or its end. */
	status next_step(caller &c)
	{
		const int one = 1;
		char go;

		if (c.line) {
			/* It can receive. */
			if (const int code = receive_all(c.fd, &go, 1, clock::now()))
				return failure(code, address_ + ": greeting of a peer");
			c.ready = true;
			return {};
		}
		const result<setup> peer = receive_setup(c.fd, clock::now());
		if (!peer)
			return error{peer.code(), address_ + ": " + peer.why().text};
		if (peer->messages > most_.messages || peer->max_message > most_.max_message) {
			setup no{};

			no.magic = setup_magic;
			no.messages = static_cast<std::uint32_t>(most_.messages);
			no.max_message = static_cast<std::uint32_t>(most_.max_message);
			no.refused = 1;
			(void)send_all(c.fd, &no, sizeof(no), clock::now());
			const error why = too_much_room(most_);
			return error{why.code, address_ + ": " + why.text};
		}
		(void)::setsockopt(c.fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof(one));
		c.line = std::make_unique<verbs_connection>(context_, std::move(c.socket));
		if (status s = c.line->make(peer->messages, peer->max_message); !s)
			return s;
		if (status s = c.line->connect(*peer); !s)
			return s;
		const setup own = c.line->describe();
		/* Its socket's buffer is empty. */
		if (const int code = send_all(c.fd, &own, sizeof(own), clock::now()))
			return failure(code, address_ + ": greeting a peer");
		return {};
	}

	verbs_context &context_;
	door door_;
	const std::string address_;
	const message_room most_;
	std::vector<caller> callers_; /* oldest first */
};

result<std::unique_ptr<region>> verbs_context::register_memory(std::span<std::byte> memory,
							       const region_options &how)
{
	/* The rules of verbs: who may write from afar may write here. */
	const int access = IBV_ACCESS_LOCAL_WRITE | (how.remote_read ? IBV_ACCESS_REMOTE_READ : 0) |
			   (how.remote_write ? IBV_ACCESS_REMOTE_WRITE : 0);

	if (memory.empty())
		return error{EINVAL, "to register: an empty range"};
	if (!how.pinned && can_unpinned_) {
		const auto until = clock::now() + memory_time;
		ibv_mr *mr;

		/*
		 * The first unpinned region of a protection domain takes 2 MiB in a row of the kernel, its
		 * scratch page. Where memory is short there may be none now, and some when more was
		 * reclaimed.
		 */
		while (!(mr = ::npr_reg_mr(pd_.get(), memory.data(), memory.size(), access)) &&
		       errno == ENOMEM && clock::now() < until)
			std::this_thread::sleep_for(memory_pause);
		if (mr)
			return std::unique_ptr<region>(std::make_unique<verbs_region>(memory, mr, true));
		if (errno == ENOMEM)
			return failure(errno,
				       "to register memory unpinned: the kernel has no 2 MiB in a row, or "
				       "not for this control group");
		if (errno != EOPNOTSUPP && errno != EINVAL)
			return failure(errno, "to register memory unpinned");
	}
	ibv_mr *const mr = ::ibv_reg_mr(pd_.get(), memory.data(), memory.size(), access);
	if (!mr)
		return failure(errno, "to register memory (RLIMIT_MEMLOCK? memory that is not mapped?)");
	return std::unique_ptr<region>(std::make_unique<verbs_region>(memory, mr, false));
}

result<std::unique_ptr<connection>> verbs_context::meet(descriptor socket, clock::time_point deadline,
							const message_room &room)
{
	const int fd = socket.get();
	auto c = std::make_unique<verbs_connection>(*this, std::move(socket));
	const char go = 1;

	set_up_tcp(fd);
	if (status s = c->make(static_cast<std::uint32_t>(room.messages),
			       static_cast<std::uint32_t>(room.max_message));
	    !s)
		return s.why();
	const setup own = c->describe();
	if (const int code = send_all(fd, &own, sizeof(own), deadline))
		return failure(code, "greeting the peer");
	const result<setup> peer = receive_setup(fd, deadline);
	if (!peer)
		return peer.why();
	if (status s = c->connect(*peer); !s)
		return s.why();
	/* Who accepted does not send before we can receive. */
	if (const int code = send_all(fd, &go, 1, deadline))
		return failure(code, "greeting the peer");
	return std::unique_ptr<connection>(std::move(c));
}

result<std::unique_ptr<listener>> verbs_context::listen(std::string_view address,
							std::optional<message_room> most)
{
	auto to = resolve(address, true);
	const result<message_room> room = room_of(most, how_);
	const int on = 1;

	if (!room)
		return room.why();
	if (!to)
		return to.why();
	const addrinfo &a = **to;
	descriptor fd(::socket(a.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
	if (!fd || ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) ||
	    ::bind(fd.get(), a.ai_addr, a.ai_addrlen) || ::listen(fd.get(), 128))
		return failure(errno, "listen at " + std::string(address));
	sockaddr_storage bound{};
	socklen_t size = sizeof(bound);
	if (::getsockname(fd.get(), reinterpret_cast<sockaddr *>(&bound), &size))
		return failure(errno, "listen at " + std::string(address));
	const in_port_t port = bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6 &>(bound).sin6_port
							   : reinterpret_cast<sockaddr_in &>(bound).sin_port;
	const std::string text =
	    std::string(address.substr(0, address.rfind(':') + 1)) + std::to_string(ntohs(port));
	result<door> at = door::open(std::move(fd));
	if (!at)
		return error{at.code(), text + ": " + at.why().text};
	return std::unique_ptr<listener>(
	    std::make_unique<verbs_listener>(*this, std::move(*at), text, *room));
}

result<std::unique_ptr<connection>>
verbs_context::connect(std::string_view address, clock::time_point deadline, std::optional<message_room> said)
{
	const std::string name = "connect to " + std::string(address);
	const result<message_room> room = room_of(said, how_);
	auto to = resolve(address, false);
	int code = 0;

	if (!room)
		return room.why();
	if (!to)
		return to.why();
	for (const addrinfo *a = to->get(); a; a = a->ai_next) {
		descriptor fd(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
		socklen_t size = sizeof(code);

		if (!fd) {
			code = errno;
			continue;
		}
		code = ::connect(fd.get(), a->ai_addr, a->ai_addrlen) ? errno : 0;
		if (code == EINPROGRESS) {
			code = wait_for(fd.get(), POLLOUT, deadline);
			if (!code && ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &code, &size))
				code = errno;
		}
		if (code)
			continue;
		auto c = meet(std::move(fd), deadline, *room);
		if (!c)
			return error{c.code(), name + ": " + c.why().text};
		return c;
	}
	return failure(code ? code : EADDRNOTAVAIL, name);
}

} // namespace

result<std::unique_ptr<context>> open_verbs(const options &how)
{
	device_owner device;
	int n = 0;
	ibv_device **const list = ::ibv_get_device_list(&n);

	for (int i = 0; list && i < n && !device; i++)
		if (how.device.empty() || how.device == ::ibv_get_device_name(list[i]))
			device.reset(::ibv_open_device(list[i]));
	if (list)
		::ibv_free_device_list(list);
	if (!device)
		return error{ENODEV, "transport \"verbs\": no RDMA device" +
					 (how.device.empty() ? "" : " " + how.device)};
	auto c = std::make_unique<verbs_context>(how, std::move(device));
	if (status s = c->start(); !s)
		return s.why();
	return std::unique_ptr<context>(std::move(c));
}

} // namespace nprdma::transport
