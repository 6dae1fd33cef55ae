/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The transport between threads and processes of one host.
 *
 * The one that posts a READ or WRITE copies, by process_vm_readv(2) and process_vm_writev(2): the kernel
 * checks each page, so that memory that is gone is an error as it is in verbs, and any memory can be
 * registered. Each context has an adapter, a page that its peers map: its regions, and until when its link is
 * taken. Each connection has two rings of messages, an eventfd for each end, and a socket whose end is that
 * of the peer.
 *
 * An adapter of RDMA checks keys where the memory is; here the one that posts does. It is busy while it
 * copies, and a region is deregistered only when none of its connections is.
 *
 * Whoever is stopped between the check and the copy, or never says that he has done, is not waited for
 * without end. A WRITE touches a byte of the peer's first, its gate, by the same system call, which stops at
 * the first thing that is not mapped: one that begins when the gate is closed copies nothing, so who goes on
 * later writes to nothing that is something else by then. After a READ the key is looked at again. What is
 * left is a system call that had begun: it copies 2 GiB at most, and nothing stops it but pages that have to
 * be brought.
 */
#include "door.hpp"
#include "kinds.hpp"
#include "owners.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <fcntl.h>
#include <limits>
#include <mutex>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <thread>
#include <vector>

namespace nprdma::transport
{

namespace
{

constexpr std::uint64_t hello_magic = 0x336d68736d72646eULL; /* and version */
constexpr std::size_t max_regions = 4096;
constexpr auto set_up_time = std::chrono::seconds(2); /* of a peer that has connected */
/* Of one system call of a peer: 2 GiB, though memory has to be found for all of it. */
constexpr auto copy_time = std::chrono::seconds(5);
constexpr auto look_again = std::chrono::microseconds(50);

std::int64_t now_ns() noexcept
{
	return std::chrono::duration_cast<std::chrono::nanoseconds>(clock::now().time_since_epoch()).count();
}

clock::time_point at_ns(std::int64_t ns) noexcept
{
	return clock::time_point(std::chrono::duration_cast<clock::duration>(std::chrono::nanoseconds(ns)));
}

struct region_slot {
	std::atomic<std::uint64_t> key; /* 0: free */
	std::atomic<std::uint64_t> addr, length;
	std::atomic<std::uint32_t> readable, writable;
};

/* Shared with all peers of a context. */
struct adapter {
	double bytes_per_second;
	std::int64_t latency_ns;
	std::atomic<std::int64_t> sends_until, receives_until; /* CLOCK_MONOTONIC, ns */
	region_slot regions[max_regions];
};

/* Messages to one end. */
struct ring {
	alignas(64) std::atomic<std::uint64_t> head; /* next to receive */
	std::atomic<std::uint32_t> stalled;          /* the sender waits for room */
	alignas(64) std::atomic<std::uint64_t> tail; /* next to send */
	std::atomic<std::uint32_t> armed;            /* the receiver waits for a message */
	std::atomic<std::uint32_t> busy;             /* the sender copies from or to the receiver's memory */
	std::atomic<std::uint32_t> closed;           /* by the receiver, whose memory may go */
	std::atomic<std::uint64_t> gate;             /* the receiver's: see above */
};

struct slot_head {
	std::int64_t due_ns;
	std::uint32_t bytes;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

struct hello {
	std::uint64_t magic;
	std::uint32_t messages, max_message;
	std::uint32_t refused, reserved; /* it was more than this, and there is no connection */
};

constexpr std::size_t slot_bytes(std::size_t max_message)
{
	return (sizeof(slot_head) + max_message + 63) / 64 * 64;
}

constexpr std::size_t rings_bytes(std::size_t messages, std::size_t max_message)
{
	return 2 * (sizeof(ring) + messages * slot_bytes(max_message));
}

/* Sealed, so that a peer cannot shrink what we have mapped. */
result<descriptor> shared_memory(const char *name, std::size_t bytes)
{
	descriptor fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));

	if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) ||
	    ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))
		return failure(errno, "shared memory of the transport");
	return fd;
}

bool is_sealed(int fd, std::size_t bytes) noexcept
{
	struct stat st;
	/* -1 of a file that cannot have seals: its owner could cut it off, and who touches it then dies. */
	const int seals = ::fcntl(fd, F_GET_SEALS);

	return seals >= 0 && (seals & F_SEAL_SHRINK) && ::fstat(fd, &st) == 0 &&
	       st.st_size == static_cast<off_t>(bytes);
}

status send_hello(int socket, const hello &h, std::span<const int> fds)
{
	iovec iov = {const_cast<hello *>(&h), sizeof(h)};
	alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 3)]{};
	msghdr msg{};

	msg.msg_iov = &iov;
	msg.msg_iovlen = 1;
	if (!fds.empty()) {
		msg.msg_control = control;
		msg.msg_controllen = CMSG_SPACE(fds.size_bytes());
		cmsghdr *const c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(fds.size_bytes());
		std::memcpy(CMSG_DATA(c), fds.data(), fds.size_bytes());
	}
	if (::sendmsg(socket, &msg, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(h)))
		return failure(errno, "greeting the peer");
	return {};
}

struct greeting {
	hello head;
	std::vector<descriptor> fds;
	pid_t pid;
	descriptor process;
};

status check_user(const ucred &who)
{
	if (who.pid <= 0 || (who.uid != ::geteuid() && ::geteuid() != 0 && who.uid != 0))
		return error{
		    EPERM,
		    "the peer is another user's process; the shm transport copies from and to its memory, "
		    "which the kernel would refuse"};
	return {};
}

/* What the peer says of itself, of exactly @fds descriptors, and who the kernel says that it is. */
result<greeting> receive_hello(int socket, std::size_t fds, clock::time_point deadline)
{
	greeting g{};
	iovec iov = {&g.head, sizeof(g.head)};
	alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 8) + CMSG_SPACE(sizeof(ucred))]{};
	msghdr msg{};

	for (;;) {
		pollfd p = {socket, POLLIN, 0};
		/* Also behind the deadline: what is there counts. */
		const int n = ::poll(&p, 1, milliseconds_to(deadline));

		if (n < 0 && errno != EINTR)
			return failure(errno, "greeting of the peer");
		if (n > 0)
			break;
		if (clock::now() >= deadline)
			return error{ETIMEDOUT, "the peer does not answer"};
	}
	msg.msg_iov = &iov;
	msg.msg_iovlen = 1;
	msg.msg_control = control;
	msg.msg_controllen = sizeof(control);
	const ssize_t n = ::recvmsg(socket, &msg, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
	if (n < 0)
		return failure(errno, "greeting of the peer");
	ucred who{};
	for (cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
			for (std::size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= c->cmsg_len; i++) {
				int fd;

				std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
				g.fds.emplace_back(fd);
			}
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_CREDENTIALS)
			std::memcpy(&who, CMSG_DATA(c), sizeof(who));
	}
	if (n == 0)
		return error{ECONNRESET, "the peer has closed the connection"};
	if (n != static_cast<ssize_t>(sizeof(g.head)) || g.head.magic != hello_magic ||
	    msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
		return error{EPROTO, "the peer is not this transport, or of another version"};
	if (g.head.refused)
		return too_much_room({g.head.messages, g.head.max_message});
	if (g.fds.size() != fds)
		return error{EPROTO, "the peer is not this transport, or of another version"};
	if (status s = check_user(who); !s)
		return s.why();
	g.pid = who.pid;
	g.process = descriptor(static_cast<int>(::syscall(SYS_pidfd_open, g.pid, 0)));
	if (!g.process)
		return failure(errno, "the peer's process");
	return g;
}

result<sockaddr_un> socket_address(std::string_view address, socklen_t &bytes)
{
	constexpr std::string_view kind = "shm:", prefix = "nprdma-transport/";
	sockaddr_un a{};

	if (address.substr(0, kind.size()) == kind)
		address.remove_prefix(kind.size());
	if (address.empty() || address.size() > sizeof(a.sun_path) - 1 - prefix.size())
		return error{EINVAL,
			     "address of the shm transport: \"shm:NAME\", with a name of 1 to 90 bytes"};
	/* Abstract: gone with its owner. */
	a.sun_family = AF_UNIX;
	std::copy(prefix.begin(), prefix.end(), a.sun_path + 1);
	std::copy(address.begin(), address.end(), a.sun_path + 1 + prefix.size());
	bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + prefix.size() + address.size());
	return a;
}

result<descriptor> make_socket()
{
	descriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
	const int on = 1;

	if (!fd || ::setsockopt(fd.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)))
		return failure(errno, "socket of the shm transport");
	return fd;
}

/* A byte that each WRITE to our memory touches first, of a connection. */
class gate
{
public:
	/* Shared, so that it is a mapping by itself: to close it needs no memory. */
	gate() noexcept
	    : page_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
	{
	}
	gate(gate &&other) noexcept : page_(std::exchange(other.page_, MAP_FAILED)) {}
	gate &operator=(gate &&) = delete;
	~gate()
	{
		/* The address of what is closed, and may be looked for, is never anything else. */
		if (*this && !late_.load(std::memory_order_relaxed))
			::munmap(page_, bytes);
	}

	explicit operator bool() const noexcept { return page_ != MAP_FAILED; }
	[[nodiscard]] std::uintptr_t address() const noexcept
	{
		return reinterpret_cast<std::uintptr_t>(page_);
	}
	void close() noexcept
	{
		/* relaxed: only the destructor looks, which comes after all */
		late_.store(true, std::memory_order_relaxed);
		(void)::mprotect(page_, bytes, PROT_NONE);
	}

private:
	static constexpr std::size_t bytes = 1; /* the kernel makes a page of it */

	void *page_;
	std::atomic<bool> late_ = false;
};

class shm_connection;

class shm_context final : public context
{
public:
	shm_context(const options &how, descriptor fd, mapping memory)
	    : how_(how), fd_(std::move(fd)), memory_(std::move(memory))
	{
		own().bytes_per_second = how.bytes_per_second;
		own().latency_ns = how.latency.count();
	}

	result<std::unique_ptr<region>> register_memory(std::span<std::byte> memory,
							const region_options &how) override;
	result<std::unique_ptr<listener>> listen(std::string_view address,
						 std::optional<message_room> most) override;
	result<std::unique_ptr<connection>> connect(std::string_view address, clock::time_point deadline,
						    std::optional<message_room> room) override;

	[[nodiscard]] adapter &own() const noexcept { return *reinterpret_cast<adapter *>(memory_.get()); }
	[[nodiscard]] int fd() const noexcept { return fd_.get(); }
	[[nodiscard]] const options &how() const noexcept { return how_; }

	void deregister(std::size_t slot) noexcept;
	void add(shm_connection *c)
	{
		const std::lock_guard guard(mutex_);

		connections_.push_back(c);
	}
	void remove(shm_connection *c) noexcept
	{
		const std::lock_guard guard(mutex_);

		std::erase(connections_, c);
	}

private:
	const options how_;
	const descriptor fd_;
	const mapping memory_;
	std::mutex mutex_; /* of what follows, and of free slots of own() */
	std::uint64_t generation_ = 0;
	std::uint64_t ends_ = 0; /* of regions, so far */
	std::vector<shm_connection *> connections_;
};

class shm_region final : public region
{
public:
	shm_region(shm_context &c, std::span<std::byte> memory, std::size_t slot, token t) noexcept
	    : context_(c), memory_(memory), slot_(slot), token_(t)
	{
	}
	~shm_region() override { context_.deregister(slot_); }

	[[nodiscard]] std::span<std::byte> memory() const noexcept override { return memory_; }
	[[nodiscard]] token remote() const noexcept override { return token_; }
	[[nodiscard]] bool unpinned() const noexcept override { return true; }

private:
	shm_context &context_;
	const std::span<std::byte> memory_;
	const std::size_t slot_;
	const token token_;
};

struct ends {
	descriptor socket, own_event, peer_event;
	descriptor process; /* of the peer: readable when it has ended */
	mapping peer_adapter, rings;
	gate own_gate;
	pid_t peer;
	std::uint32_t messages, max_message;
	bool connected; /* and not accepted */
};

/* Of the two rings the first one is to the end that accepted. */
ring &ring_of(const ends &e, bool first) noexcept
{
	return *reinterpret_cast<ring *>(e.rings.get() + (first ? 0 : e.rings.bytes() / 2));
}

ring &incoming_ring(const ends &e) noexcept
{
	return ring_of(e, !e.connected);
}

class shm_connection final : public connection
{
public:
	shm_connection(shm_context &c, ends e) : context_(c), e_(std::move(e)) { context_.add(this); }
	~shm_connection() override
	{
		/* A region of ours that goes next does not know of this connection. */
		if (!shm_connection::quiesce())
			give_up(closed_at_ + copy_time);
		context_.remove(this);
	}

	bool quiesce() noexcept override
	{
		if (quiet_)
			return true;
		/* seq_cst: before the look at who is busy; pairs with copy() */
		incoming().closed.store(1, std::memory_order_seq_cst);
		shm_connection::shutdown();
		/* Who becomes busy later sees that it is closed, and copies nothing: nobody looks again. */
		quiet_ = !peer_is_busy();
		if (!quiet_ && closed_at_ == clock::time_point()) {
			/* What the destructor gives time for is what has begun now. */
			e_.own_gate.close();
			closed_at_ = clock::now();
		}
		return quiet_;
	}

	status read(std::span<const segment> segments, std::uint64_t id) noexcept override
	{
		return copy(segments, id, {}, false);
	}

	status write(std::span<const segment> segments, std::uint64_t id,
		     std::span<const std::byte> message) noexcept override
	{
		return copy(segments, id, message, true);
	}

	status send(std::span<const std::byte> message) noexcept override
	{
		if (const int code = may_send(message))
			return said(code);
		publish(message, transfer(context_.own(), peer_adapter(), message.size()));
		return {};
	}

	std::size_t poll(std::span<completion> to) noexcept override
	{
		std::size_t n = 0;
		const std::int64_t now = under_way_.empty() || under_way_.front().due_ns == 0 ? 0 : now_ns();

		for (; n < to.size() && !under_way_.empty(); n++) {
			operation &o = under_way_.front();

			if (!o.error && o.due_ns > now) {
				if (!broken())
					break;
				o.error = ECONNRESET;
			}
			to[n] = {o.id, o.error};
			under_way_.pop_front();
		}
		return n;
	}

	result<std::size_t> receive(std::span<std::byte> buffer) noexcept override
	{
		ring &r = incoming();
		/* relaxed: only we move it */
		const std::uint64_t head = r.head.load(std::memory_order_relaxed);
		const slot_head *const next = peek(head);

		if (!next) {
			if (!broken())
				return std::size_t{0};
			/* What was sent before the end is received: look again, now that nothing more can
			 * come. */
			if (!peek(head))
				return error{ECONNRESET, "the peer is gone"};
			return receive(buffer);
		}
		if (next->due_ns > 0 && next->due_ns > now_ns())
			return std::size_t{0};
		/* The peer could change it under our hands. */
		const std::uint32_t bytes = reinterpret_cast<const volatile slot_head *>(next)->bytes;
		if (bytes == 0 || bytes > e_.max_message) {
			shutdown();
			return error{EPROTO, "the peer has sent a message with an impossible size"};
		}
		if (bytes > buffer.size())
			return error{ENOBUFS, "the message is larger than the buffer"};
		std::memcpy(buffer.data(), next + 1, bytes);
		/* seq_cst: before the look at stalled; pairs with may_send() */
		r.head.store(head + 1, std::memory_order_seq_cst);
		if (r.stalled.load(std::memory_order_seq_cst) &&
		    r.stalled.exchange(0, std::memory_order_relaxed))
			ring_bell(e_.peer_event);
		return std::size_t{bytes};
	}

	[[nodiscard]] bool alive() noexcept override
	{
		if (!broken() && !socket_is_open())
			broken_.store(true, std::memory_order_relaxed);
		return !broken();
	}

	void shutdown() noexcept override
	{
		/* relaxed: nothing is read because of it; the socket is what orders */
		broken_.store(true, std::memory_order_relaxed);
		(void)::shutdown(e_.socket.get(), SHUT_RDWR);
	}

	[[nodiscard]] std::size_t max_message() const noexcept override { return e_.max_message; }
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
		interest i = {{e_.own_event.get(), e_.socket.get()}, clock::time_point::max(), false};
		ring &r = incoming();
		std::int64_t due = std::numeric_limits<std::int64_t>::max();

		/* seq_cst: before the look at the tail; pairs with publish() */
		r.armed.store(1, std::memory_order_seq_cst);
		if (const slot_head *next = peek(r.head.load(std::memory_order_relaxed)))
			due = next->due_ns;
		else
			i.ready = broken();
		if (!under_way_.empty())
			due = broken() ? 0 : std::min(due, under_way_.front().due_ns);
		if (stalled_ && room())
			i.ready = true;
		if (due <= 0)
			i.ready = true;
		else if (due != std::numeric_limits<std::int64_t>::max())
			i.due = at_ns(due);
		/* A socket that has hung up would wake us again and again, until what is due is due. */
		if (broken())
			i.fds[1] = -1;
		return i;
	}

	void finish_wait() noexcept override
	{
		std::uint64_t count;

		/* relaxed: one wake-up too many does no harm */
		incoming().armed.store(0, std::memory_order_relaxed);
		(void)!::read(e_.own_event.get(), &count, sizeof(count));
		(void)alive();
	}

	/* Does the peer copy from or to our memory? */
	[[nodiscard]] bool peer_is_busy() const noexcept
	{
		pollfd p = {e_.process.get(), POLLIN, 0};

		/* seq_cst: after the key is gone, or closed is set; pairs with copy() */
		return incoming().busy.load(std::memory_order_seq_cst) != 0 && ::poll(&p, 1, 0) == 0;
	}

	[[nodiscard]] bool is_quiet(clock::time_point until) const noexcept
	{
		while (peer_is_busy()) {
			if (clock::now() >= until)
				return false;
			std::this_thread::sleep_for(look_again);
		}
		return true;
	}

	/* Broken: what the peer begins to copy from here on fails, and for what it has begun there is time.
	 */
	void give_up(clock::time_point until) noexcept
	{
		abandon();
		if (!is_quiet(until))
			tell();
	}

	/*
	 * Is nothing under way of what the peer had begun when region @number of the context ended? For the
	 * context, under its mutex. @late: what it begins from here on fails; @too_late: it is no more waited
	 * for.
	 */
	[[nodiscard]] bool passes(std::uint64_t number, bool late, bool too_late) noexcept
	{
		if (passed_ >= number)
			return true;
		if (peer_is_busy()) {
			if (late && !std::exchange(late_, true))
				abandon();
			if (!too_late)
				return false;
			tell();
		}
		passed_ = number;
		return true;
	}

private:
	struct operation {
		std::uint64_t id;
		std::int64_t due_ns;
		int error;
	};

	void abandon() noexcept
	{
		e_.own_gate.close();
		shutdown();
	}

	void tell() noexcept
	{
		if (!told_.exchange(true, std::memory_order_relaxed))
			(void)std::fprintf(
			    stderr,
			    "nprdma-transport: process %d is stopped where it copies from or to "
			    "memory of this one: the connection is given up\n",
			    static_cast<int>(e_.peer));
	}

	[[nodiscard]] bool broken() const noexcept
	{
		/* relaxed: see shutdown() */
		return broken_.load(std::memory_order_relaxed);
	}

	[[nodiscard]] bool socket_is_open() const noexcept
	{
		pollfd p = {e_.socket.get(), POLLIN | POLLRDHUP, 0};

		/* Nothing is sent by way of it: readable is closed. */
		return ::poll(&p, 1, 0) == 0;
	}

	[[nodiscard]] adapter &peer_adapter() const noexcept
	{
		return *reinterpret_cast<adapter *>(e_.peer_adapter.get());
	}

	[[nodiscard]] ring &outgoing() const noexcept { return ring_of(e_, e_.connected); }
	[[nodiscard]] ring &incoming() const noexcept { return incoming_ring(e_); }
	[[nodiscard]] slot_head *slot(ring &r, std::uint64_t n) const noexcept
	{
		std::byte *const first = reinterpret_cast<std::byte *>(&r) + sizeof(ring);

		return reinterpret_cast<slot_head *>(first + n % e_.messages * slot_bytes(e_.max_message));
	}

	[[nodiscard]] const slot_head *peek(std::uint64_t head) const noexcept
	{
		ring &r = incoming();

		/* seq_cst: acquire for the message, and after armed; pairs with publish() */
		return r.tail.load(std::memory_order_seq_cst) == head ? nullptr : slot(r, head);
	}

	[[nodiscard]] bool room() const noexcept
	{
		const ring &r = outgoing();

		/* seq_cst: after stalled; pairs with receive() */
		return r.tail.load(std::memory_order_relaxed) - r.head.load(std::memory_order_seq_cst) <
		       e_.messages;
	}

	[[nodiscard]] int may_send(std::span<const std::byte> message) noexcept
	{
		if (message.empty() || message.size() > e_.max_message)
			return EMSGSIZE;
		if (!alive_of_late())
			return ECONNRESET;
		stalled_ = !room();
		if (!stalled_)
			return 0;
		/* seq_cst: before the second look at the head; pairs with receive() */
		outgoing().stalled.store(1, std::memory_order_seq_cst);
		stalled_ = !room();
		return stalled_ ? EAGAIN : 0;
	}

	void publish(std::span<const std::byte> message, std::int64_t due_ns) noexcept
	{
		ring &r = outgoing();
		/* relaxed: only we move it */
		const std::uint64_t tail = r.tail.load(std::memory_order_relaxed);
		slot_head *const s = slot(r, tail);

		/* In order: what is behind a WRITE is due no earlier. */
		last_sent_ns_ = std::max(due_ns, last_sent_ns_);
		s->due_ns = due_ns ? last_sent_ns_ : 0;
		s->bytes = static_cast<std::uint32_t>(message.size());
		std::memcpy(s + 1, message.data(), message.size());
		/* seq_cst: release for the message, and before the look at armed; pairs with prepare_wait()
		 */
		r.tail.store(tail + 1, std::memory_order_seq_cst);
		if (r.armed.load(std::memory_order_seq_cst) && r.armed.exchange(0, std::memory_order_relaxed))
			ring_bell(e_.peer_event);
	}

	static void ring_bell(const descriptor &event) noexcept
	{
		const std::uint64_t one = 1;

		(void)!::write(event.get(), &one, sizeof(one));
	}

	/* When the last one of @bytes has arrived; 0: now. */
	static std::int64_t transfer(adapter &from, adapter &to, std::size_t bytes) noexcept
	{
		const auto duration = [&](const adapter &a) {
			const double ns = static_cast<double>(bytes) * 1e9 / a.bytes_per_second;

			return a.bytes_per_second > 0 && ns < 1e15 ? static_cast<std::int64_t>(ns) : 0;
		};
		const std::int64_t sending = duration(from), receiving = duration(to);
		const std::int64_t latency =
		    std::clamp<std::int64_t>(std::max(from.latency_ns, to.latency_ns), 0, 1'000'000'000);

		if (!sending && !receiving && !latency)
			return 0;
		const std::int64_t now = now_ns();
		const auto take = [now](std::atomic<std::int64_t> &until, std::int64_t time) {
			/* relaxed: it is a number, and orders nothing */
			std::int64_t was = until.load(std::memory_order_relaxed), is;
			do
				is = std::max(was, now) + time;
			while (!until.compare_exchange_weak(was, is, std::memory_order_relaxed));
			return is;
		};
		return std::max(sending ? take(from.sends_until, sending) : now,
				receiving ? take(to.receives_until, receiving) : now) +
		       latency;
	}

	static status said(int code) noexcept
	{
		switch (code) {
		case EAGAIN:
			return error{code, "too much under way: poll, and try again"};
		case ECONNRESET:
			return error{code, "the connection is broken"};
		case EMSGSIZE:
			return error{code, "a message has 1 to max_message() bytes"};
		default:
			return error{code, "segments: none, too many, or outside of the local region"};
		}
	}

	/* After its death the peer's process id may be another one's. */
	[[nodiscard]] bool alive_of_late() noexcept
	{
		const std::int64_t now = now_ns();

		/* A system call for each operation would show; within a millisecond no id comes around. */
		if (now - seen_ns_ <= 1'000'000)
			return !broken();
		seen_ns_ = now;
		return alive();
	}

	status copy(std::span<const segment> segments, std::uint64_t id, std::span<const std::byte> message,
		    bool write) noexcept
	{
		if (const int code = check_segments(segments, max_segments()))
			return said(code);
		if (!alive_of_late())
			return said(ECONNRESET);
		if (under_way_.size() >= max_operations())
			return said(EAGAIN);
		if (!message.empty())
			if (const int code = may_send(message))
				return said(code);

		operation o{id, 0, 0};
		std::size_t bytes = 0;

		/* seq_cst: before closed and the key are looked at; pairs with peer_is_busy() */
		outgoing().busy.store(1, std::memory_order_seq_cst);
		if (outgoing().closed.load(std::memory_order_seq_cst))
			o.error = ECONNRESET;
		for (std::size_t i = 0; i < segments.size() && !o.error; i += batch) {
			const auto some = segments.subspan(i, std::min(batch, segments.size() - i));

			for (const segment &s : some)
				bytes += s.bytes;
			o.error = move(some, write);
		}
		/* release: after the copy */
		outgoing().busy.store(0, std::memory_order_release);
		if (o.error) {
			shutdown();
		} else {
			adapter &own = context_.own(), &peer = peer_adapter();

			o.due_ns =
			    write ? transfer(own, peer, bytes + message.size()) : transfer(peer, own, bytes);
			if (!message.empty())
				publish(message, o.due_ns);
			last_done_ns_ = o.due_ns = std::max(o.due_ns, o.due_ns ? last_done_ns_ : 0);
		}
		under_way_.push_back(o);
		return {};
	}

	static constexpr std::size_t batch = 64;

	[[nodiscard]] bool may_access(const segment &s, bool write) const noexcept
	{
		const region_slot &r = peer_adapter().regions[s.key % max_regions];
		/*
		 * acquire of the rest: who sees anything of the slot's next region sees that the key of this
		 * one is gone; pairs with register_memory(). relaxed: each key is another one.
		 */
		const bool is = s.key != 0 && r.key.load(std::memory_order_seq_cst) == s.key;
		const std::uint64_t addr = r.addr.load(std::memory_order_acquire);
		const std::uint64_t length = r.length.load(std::memory_order_acquire);
		const bool allowed = (write ? r.writable : r.readable).load(std::memory_order_acquire);

		return is && allowed && r.key.load(std::memory_order_relaxed) == s.key && s.remote >= addr &&
		       s.remote - addr <= length && s.bytes <= length - (s.remote - addr);
	}

	/* 0, or the error that verbs would have made of it. */
	[[nodiscard]] int move(std::span<const segment> segments, bool write) noexcept
	{
		iovec local[1 + batch], remote[1 + batch];
		/* relaxed: it was there before the peer greeted */
		const std::uintptr_t gate = outgoing().gate.load(std::memory_order_relaxed);
		const std::size_t gates = write;
		std::byte none{};
		std::size_t n = 1;

		for (const segment &s : segments) {
			if (!may_access(s, write))
				return EACCES;
			local[n] = {s.buffer, s.bytes};
			remote[n++] = {reinterpret_cast<void *>(s.remote), s.bytes};
		}
		for (std::size_t i = 1; i < n;) {
			iovec *const from = local + i - gates, *const to = remote + i - gates;
			const std::size_t count = n - i + gates;

			if (write) {
				*from = {&none, 1};
				*to = {reinterpret_cast<void *>(gate), 1};
			}
			const ssize_t done = write ? ::process_vm_writev(e_.peer, from, count, to, count, 0)
						   : ::process_vm_readv(e_.peer, from, count, to, count, 0);
			if (done <= static_cast<ssize_t>(gates))
				return done >= 0 ? EFAULT : errno == ESRCH ? ECONNRESET : errno;
			/* It stops in the middle at what is not mapped, which the next call says. */
			for (std::size_t left = static_cast<std::size_t>(done) - gates; left;) {
				const std::size_t part = std::min(left, local[i].iov_len);

				local[i].iov_base = static_cast<char *>(local[i].iov_base) + part;
				remote[i].iov_base = static_cast<char *>(remote[i].iov_base) + part;
				local[i].iov_len = remote[i].iov_len -= part;
				left -= part;
				i += local[i].iov_len == 0;
			}
		}
		/* Was it still the region's when all was read? */
		if (!write)
			for (const segment &s : segments)
				if (!may_access(s, false))
					return EACCES;
		return 0;
	}

	shm_context &context_;
	ends e_;
	std::deque<operation> under_way_;
	std::atomic<bool> broken_ = false;
	std::uint64_t passed_ = 0;      /* passes() has said so of this end of a region, and of all before */
	bool late_ = false;             /* it was asked late, and has given up */
	bool quiet_ = false;            /* the end has begun, and the peer copies nothing */
	clock::time_point closed_at_{}; /* when the end had begun, and the peer was in a copy */
	bool stalled_ = false;
	std::atomic<bool> told_ = false; /* of a peer that is stopped; orders nothing */
	std::int64_t seen_ns_ = 0, last_done_ns_ = 0, last_sent_ns_ = 0;
};

class shm_listener final : public listener
{
public:
	shm_listener(shm_context &c, door at, std::string address, const message_room &most)
	    : context_(c), door_(std::move(at)), address_(std::move(address)), most_(most)
	{
	}

	result<std::unique_ptr<connection>> accept(clock::time_point deadline) override;
	[[nodiscard]] int fd() const noexcept override { return door_.fd(); }
	[[nodiscard]] std::string address() const override { return address_; }

private:
	struct caller {
		int fd; /* of @socket */
		clock::time_point until;
		descriptor socket;
	};

	status take_caller(int which);
	/* Its greeting is there. */
	result<std::unique_ptr<connection>> meet(descriptor socket);

	shm_context &context_;
	door door_;
	const std::string address_;
	const message_room most_;
	std::vector<caller> callers_; /* oldest first */
};

result<std::unique_ptr<region>> shm_context::register_memory(std::span<std::byte> memory,
							     const region_options &how)
{
	if (memory.empty())
		return error{EINVAL, "to register: an empty range"};
	const std::lock_guard guard(mutex_);

	for (std::size_t i = 0; i < max_regions; i++) {
		region_slot &s = own().regions[i];

		/* relaxed: the mutex orders what this process does; release for the peers, after the key of
		 * the slot's last region is gone, pairs with may_access() */
		if (s.key.load(std::memory_order_relaxed) != 0 || i == 0)
			continue;
		const token t = {reinterpret_cast<std::uintptr_t>(memory.data()), memory.size(),
				 ++generation_ * max_regions + i};

		s.addr.store(t.addr, std::memory_order_release);
		s.length.store(t.length, std::memory_order_release);
		s.readable.store(how.remote_read, std::memory_order_release);
		s.writable.store(how.remote_write, std::memory_order_release);
		s.key.store(t.key, std::memory_order_release);
		return std::unique_ptr<region>(std::make_unique<shm_region>(*this, memory, i, t));
	}
	return error{ENOSPC, "to register: 4095 regions are registered; register fewer and larger ones"};
}

void shm_context::deregister(std::size_t slot) noexcept
{
	std::uint64_t number;

	{
		const std::lock_guard guard(mutex_);

		/* seq_cst: before the look at who is busy */
		own().regions[slot].key.store(0, std::memory_order_seq_cst);
		number = ++ends_;
	}
	/*
	 * Who copies much copies it by several system calls, and is not given up at once. Others register and
	 * connect meanwhile, so connections come and go.
	 */
	for (const clock::time_point begin = clock::now();; std::this_thread::sleep_for(look_again)) {
		const std::lock_guard guard(mutex_);
		const clock::time_point now = clock::now();
		bool all = true;

		for (shm_connection *c : connections_)
			all &= c->passes(number, now >= begin + copy_time, now >= begin + 2 * copy_time);
		if (all)
			return;
	}
}

result<std::unique_ptr<listener>> shm_context::listen(std::string_view address,
						      std::optional<message_room> most)
{
	socklen_t bytes;
	result<sockaddr_un> a = socket_address(address, bytes);
	result<descriptor> fd = make_socket();
	const result<message_room> room = room_of(most, how_);

	if (!room)
		return room.why();
	if (!a)
		return a.why();
	if (!fd)
		return fd.why();
	if (::bind(fd->get(), reinterpret_cast<const sockaddr *>(&*a), bytes) || ::listen(fd->get(), 128))
		return failure(errno, "listen at " + std::string(address));
	result<door> at = door::open(std::move(*fd));
	if (!at)
		return error{at.code(), std::string(address) + ": " + at.why().text};
	return std::unique_ptr<listener>(
	    std::make_unique<shm_listener>(*this, std::move(*at), std::string(address), *room));
}

result<std::unique_ptr<connection>> shm_context::connect(std::string_view address, clock::time_point deadline,
							 std::optional<message_room> said)
{
	const result<message_room> room = room_of(said, how_);
	const std::string name = "connect to " + std::string(address);
	socklen_t bytes;
	result<sockaddr_un> a = socket_address(address, bytes);
	result<descriptor> socket = make_socket();

	if (!a)
		return a.why();
	if (!socket)
		return socket.why();
	if (!room)
		return room.why();
	while (::connect(socket->get(), reinterpret_cast<const sockaddr *>(&*a), bytes)) {
		if (errno != EAGAIN)
			return failure(errno, name);
		/* The backlog is full, and the kernel does not say when it is not. */
		if (clock::now() >= deadline)
			return failure(ETIMEDOUT, name);
		std::this_thread::sleep_for(std::chrono::milliseconds(1));
	}

	const hello h = {hello_magic, static_cast<std::uint32_t>(room->messages),
			 static_cast<std::uint32_t>(room->max_message), 0, 0};
	const std::size_t size = rings_bytes(h.messages, h.max_message);
	result<descriptor> rings = shared_memory("nprdma-rings", size);
	if (!rings)
		return rings.why();
	ends e{};
	e.socket = std::move(*socket);
	e.own_event = descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
	e.rings = mapping(rings->get(), size);
	e.connected = true;
	if (!e.own_event || !e.rings || !e.own_gate)
		return failure(errno, name);
	incoming_ring(e).gate.store(e.own_gate.address(), std::memory_order_relaxed);
	const int fds[] = {fd(), rings->get(), e.own_event.get()};
	if (status s = send_hello(e.socket.get(), h, fds); !s)
		return s.why();
	result<greeting> g = receive_hello(e.socket.get(), 2, deadline);
	if (!g)
		return error{g.code(), name + ": " + g.why().text};
	if (!is_sealed(g->fds[0].get(), sizeof(adapter)))
		return error{EPROTO, name + ": the peer's memory is not as agreed"};
	e.peer_adapter = mapping(g->fds[0].get(), sizeof(adapter));
	e.peer_event = std::move(g->fds[1]);
	if (!e.peer_adapter)
		return failure(errno, name);
	e.peer = g->pid;
	e.process = std::move(g->process);
	e.messages = h.messages;
	e.max_message = h.max_message;
	return std::unique_ptr<connection>(std::make_unique<shm_connection>(*this, std::move(e)));
}

status shm_listener::take_caller(int which)
{
	result<descriptor> s = door_.take(which);
	ucred who{};
	socklen_t size = sizeof(who);

	if (!s)
		return error{s.code(), address_ + ": " + s.why().text};
	if (!*s)
		return {};
	/* Another user's process is not waited for. */
	if (::getsockopt(s->get(), SOL_SOCKET, SO_PEERCRED, &who, &size))
		return failure(errno, address_);
	if (status is = check_user(who); !is)
		return is;
	if (!door_.watch(s->get()))
		return failure(errno, address_);
	if (callers_.size() >= door::most_callers)
		callers_.erase(callers_.begin());
	const int fd = s->get();
	callers_.push_back({fd, clock::now() + set_up_time, std::move(*s)});
	return {};
}

result<std::unique_ptr<connection>> shm_listener::accept(clock::time_point deadline)
{
	return accept_at(
	    door_, callers_, deadline, address_, [&](int which) { return take_caller(which); },
	    [&](caller &c) { return meet(std::move(c.socket)); });
}

result<std::unique_ptr<connection>> shm_listener::meet(descriptor socket)
{
	ends e{};

	e.socket = std::move(socket);
	result<greeting> g = receive_hello(e.socket.get(), 3, clock::now());
	if (!g)
		return g.why();
	const hello &h = g->head;
	if (h.messages > most_.messages || h.max_message > most_.max_message) {
		const hello no = {hello_magic, static_cast<std::uint32_t>(most_.messages),
				  static_cast<std::uint32_t>(most_.max_message), 1, 0};
		(void)send_hello(e.socket.get(), no, {});
		const error why = too_much_room(most_);
		return error{why.code, address_ + ": " + why.text};
	}
	if (!is_sane({h.messages, h.max_message}) || !is_sealed(g->fds[0].get(), sizeof(adapter)) ||
	    !is_sealed(g->fds[1].get(), rings_bytes(h.messages, h.max_message)))
		return error{EPROTO, address_ + ": the peer's memory is not as agreed"};
	e.peer_adapter = mapping(g->fds[0].get(), sizeof(adapter));
	e.rings = mapping(g->fds[1].get(), rings_bytes(h.messages, h.max_message));
	e.peer_event = std::move(g->fds[2]);
	e.own_event = descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
	if (!e.peer_adapter || !e.rings || !e.own_event || !e.own_gate)
		return failure(errno, address_);
	e.peer = g->pid;
	e.process = std::move(g->process);
	e.messages = h.messages;
	e.max_message = h.max_message;
	e.connected = false;
	incoming_ring(e).gate.store(e.own_gate.address(), std::memory_order_relaxed);
	const int line = e.socket.get(), fds[] = {context_.fd(), e.own_event.get()};
	/* Before the peer can use our memory the context knows of it. */
	std::unique_ptr<connection> c = std::make_unique<shm_connection>(context_, std::move(e));
	if (status s = send_hello(line, h, fds); !s)
		return s.why();
	return c;
}

} // namespace

result<std::unique_ptr<context>> open_shm(const options &how)
{
	result<descriptor> fd = shared_memory("nprdma-adapter", sizeof(adapter));

	if (!fd)
		return fd.why();
	mapping memory(fd->get(), sizeof(adapter));
	if (!memory)
		return failure(errno, "shared memory of the transport");
	return std::unique_ptr<context>(
	    std::make_unique<shm_context>(how, std::move(*fd), std::move(memory)));
}

} // namespace nprdma::transport
