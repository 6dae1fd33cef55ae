/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * One-sided READ and WRITE, and small messages, between two ends, over verbs (through libnprdma, RC queue
 * pairs) or, on a machine without RDMA, between threads and processes of one host.
 *
 * Addresses: "shm:NAME" and "verbs:HOST:PORT". HOST may be empty for listen().
 *
 * Errors are values. An operation that fails after it was accepted breaks its connection, as it does in
 * verbs: what follows fails with ECONNRESET. The connection is closed and another one made.
 *
 * Threads: a context may be used by all threads; a connection by one at a time, but for shutdown(). A
 * connection must not outlive its context, nor a region.
 */
#ifndef NPRDMA_TRANSPORT_HPP
#define NPRDMA_TRANSPORT_HPP

#include <nprdma/export.hpp>

#include <cassert>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace nprdma::transport
{

using clock = std::chrono::steady_clock;

struct error {
	int code; /* of errno */
	std::string text;
};

/* A value or an error. */
template <class T> class [[nodiscard]] result
{
public:
	result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
	result(error e) : state_(std::in_place_index<1>, std::move(e)) {}

	explicit operator bool() const noexcept { return state_.index() == 0; }

	T &operator*() noexcept
	{
		assert(*this);
		return *std::get_if<0>(&state_);
	}
	const T &operator*() const noexcept
	{
		assert(*this);
		return *std::get_if<0>(&state_);
	}
	T *operator->() noexcept { return &**this; }
	const T *operator->() const noexcept { return &**this; }

	[[nodiscard]] const error &why() const noexcept
	{
		assert(!*this);
		return *std::get_if<1>(&state_);
	}
	[[nodiscard]] int code() const noexcept { return *this ? 0 : why().code; }

private:
	std::variant<T, error> state_;
};

template <> class [[nodiscard]] result<void>
{
public:
	result() = default;
	result(error e) : error_(std::move(e)) {}

	explicit operator bool() const noexcept { return !error_; }

	[[nodiscard]] const error &why() const noexcept
	{
		assert(error_);
		return *error_;
	}
	[[nodiscard]] int code() const noexcept { return error_ ? error_->code : 0; }

private:
	std::optional<error> error_;
};

using status = result<void>;

/* What a peer needs in order to reach a region. It travels as it is, between hosts of one byte order. */
struct token {
	std::uint64_t addr;
	std::uint64_t length; /* bytes */
	std::uint64_t key;
};

struct region_options {
	bool remote_read = true;
	bool remote_write = true;
	/*
	 * False: registered unpinned. The kernel may page it out, and memory may be unmapped, mapped and
	 * discarded inside of it with the key valid. Shared memory of one host never pins.
	 */
	bool pinned = false;
};

/* A registered range of memory. It is deregistered by the destructor, which returns when no peer uses it any
 * more. */
class NPRDMA_API region
{
public:
	virtual ~region() = default;
	region(const region &) = delete;
	region &operator=(const region &) = delete;

	[[nodiscard]] virtual std::span<std::byte> memory() const noexcept = 0;
	[[nodiscard]] virtual token remote() const noexcept = 0;
	/* False also where pinned = false was asked for and the device cannot. */
	[[nodiscard]] virtual bool unpinned() const noexcept = 0;

protected:
	region() = default;
};

/* One contiguous transfer. */
struct segment {
	const region *local;  /* @buffer is inside of it */
	std::byte *buffer;    /* filled by READ, source of WRITE; left alone until the completion */
	std::uint64_t remote; /* address in the peer's region */
	std::uint64_t key;    /* token::key */
	std::uint32_t bytes;
};

struct completion {
	std::uint64_t id; /* as given to read() or write() */
	int error;        /* 0, or of errno: the connection is broken */
};

/* What is known of the use of a peer's memory: see npr_advise(3). Shared memory of one host needs none. */
enum class advice { read_often, write_often, seldom };

class NPRDMA_API connection
{
public:
	virtual ~connection() = default;
	connection(const connection &) = delete;
	connection &operator=(const connection &) = delete;

	/*
	 * Post all @segments as one operation, with one completion that has @id when all of it is done.
	 * EAGAIN: too many operations or segments under way; poll() and try again. EINVAL: a segment outside
	 * of its local region, more than max_segments(), or none. ECONNRESET: broken. Completions come in the
	 * order of the posts. Operations under way at once must not overlap, in either memory: a READ may
	 * overtake a WRITE.
	 */
	virtual status read(std::span<const segment> segments, std::uint64_t id) noexcept = 0;
	/*
	 * @message, unless empty, is sent as by send(): the peer receives it only after all of the data is in
	 * its memory, once and for good, pinned or not. To poll the memory itself for what was written is not
	 * defined: a WRITE to unpinned memory may land twice and out of order.
	 */
	virtual status write(std::span<const segment> segments, std::uint64_t id,
			     std::span<const std::byte> message = {}) noexcept = 0;
	/*
	 * 1 to max_message() bytes, copied before it returns; received in order, and after what write() wrote
	 * before it. EAGAIN: the peer does not receive as fast; wait().
	 */
	virtual status send(std::span<const std::byte> message) noexcept = 0;

	/* Completions so far, at most as many as @to has room for. Does not block. Once broken: all that is
	 * under way. */
	[[nodiscard]] virtual std::size_t poll(std::span<completion> to) noexcept = 0;
	/*
	 * The next message; 0: there is none. ENOBUFS: @buffer is too small, and the message stays.
	 * ECONNRESET: there is none, and will not be.
	 */
	virtual result<std::size_t> receive(std::span<std::byte> buffer) noexcept = 0;

	/* False as soon as it is known that the peer, its process or the link is gone. */
	[[nodiscard]] virtual bool alive() noexcept = 0;
	/* Break the connection, from any thread: the peer sees it, and whoever is in wait() returns. */
	virtual void shutdown() noexcept = 0;
	/*
	 * Begins the end, by whoever is the last to use it: only the destructor may follow. False: the peer
	 * is in the middle of a copy from or to memory of this process, and the destructor waits for that,
	 * until 5 seconds after the first call at most; true: it does not wait for the peer.
	 */
	[[nodiscard]] virtual bool quiesce() noexcept;

	virtual void advise(std::uint64_t remote, std::uint64_t key, std::uint64_t bytes,
			    advice what) noexcept;

	[[nodiscard]] virtual std::size_t max_message() const noexcept = 0;  /* bytes */
	[[nodiscard]] virtual std::size_t max_segments() const noexcept = 0; /* of one operation */
	[[nodiscard]] virtual std::size_t
	max_operations() const noexcept = 0; /* READs and WRITEs under way */

	/* For wait() only. */
	struct interest {
		int fds[2];            /* readable, or hung up; -1: none */
		clock::time_point due; /* or then */
		bool ready;            /* do not wait at all */
	};
	[[nodiscard]] virtual interest prepare_wait() noexcept = 0;
	virtual void finish_wait() noexcept = 0;

protected:
	connection() = default;
};

/*
 * Wait until poll() or receive() of one of @connections may have something, send() or a post that said EAGAIN
 * may succeed, or one is broken; until @wake (a descriptor, -1: none) is readable, which it stays; or until
 * @deadline. False: the deadline has passed. True may be too early, and then poll() finds nothing.
 */
NPRDMA_API result<bool> wait(std::span<connection *const> connections, clock::time_point deadline,
			     int wake = -1) noexcept;

/* Waits until the next completion of @c. ETIMEDOUT: not before @deadline, and the operation is still under
 * way. */
NPRDMA_API result<completion> next_completion(connection &c, clock::time_point deadline) noexcept;

/* Waits for the next message; the part of @buffer that it fills. ETIMEDOUT, and errors of receive(). */
NPRDMA_API result<std::span<std::byte>> next_message(connection &c, std::span<std::byte> buffer,
						     clock::time_point deadline) noexcept;

class NPRDMA_API listener
{
public:
	virtual ~listener() = default;
	listener(const listener &) = delete;
	listener &operator=(const listener &) = delete;

	/*
	 * ETIMEDOUT: nobody came, or not all the way. EMFILE, ENFILE, ENOBUFS, ENOMEM: no descriptor can be
	 * had, which is said once; who connects waits, and the descriptor is not readable for it all the
	 * time. Other errors concern one peer, and the next may be accepted.
	 */
	virtual result<std::unique_ptr<connection>> accept(clock::time_point deadline) = 0;
	/* Readable when accept() would find somebody. */
	[[nodiscard]] virtual int fd() const noexcept = 0;
	/* What connect() takes: with the port that the system chose for port 0. */
	[[nodiscard]] virtual std::string address() const = 0;

protected:
	listener() = default;
};

/* Each end of a connection has memory for twice @messages of @max_message bytes: to send and to receive. */
struct message_room {
	std::size_t messages; /* not received yet */
	std::size_t max_message;
};

struct options {
	/*
	 * What a connection has if connect() does not say it. The side that connects chooses, and the one
	 * that listens refuses more than it has said itself, of either.
	 */
	std::size_t max_message = 4096;   /* bytes */
	std::size_t messages = 64;        /* not received yet; times max_message at most 64 MiB */
	std::size_t max_operations = 256; /* READs and WRITEs of one connection under way */
	std::size_t max_segments = 64;    /* of one operation */

	/* verbs: the device, empty for the first one; its port and index of the GID */
	std::string device;
	std::uint8_t port = 1;
	int gid_index = 0;

	/*
	 * shm: the link to emulate. All connections of a context share its rate, for each direction apart. A
	 * transfer takes as long as the slower one of both ends needs. 0: as fast as memory is copied.
	 */
	double bytes_per_second = 0;
	std::chrono::nanoseconds latency{0}; /* added to each READ, WRITE and message */
};

class NPRDMA_API context
{
public:
	virtual ~context() = default;
	context(const context &) = delete;
	context &operator=(const context &) = delete;

	/* @memory is the caller's, and stays until the region is destroyed; unpinned, it need not be mapped.
	 */
	virtual result<std::unique_ptr<region>> register_memory(std::span<std::byte> memory,
								const region_options &how = {}) = 0;
	/*
	 * @most: that who connects may ask for, that of the options if it is not said. What peers cost is
	 * that many times the connections that are accepted, and over verbs 128 that are not yet.
	 */
	virtual result<std::unique_ptr<listener>> listen(std::string_view address,
							 std::optional<message_room> most = {}) = 0;
	/*
	 * ECONNREFUSED: nobody listens there; ETIMEDOUT; EPROTO: something else does; ENOBUFS: @room, or that
	 * of the options, is more than the peer gives.
	 */
	virtual result<std::unique_ptr<connection>> connect(std::string_view address,
							    clock::time_point deadline,
							    std::optional<message_room> room = {}) = 0;

protected:
	context() = default;
};

/* @kind: "shm" or "verbs", or an address that begins with one of them. */
NPRDMA_API result<std::unique_ptr<context>> open(std::string_view kind, const options &how = {});

} // namespace nprdma::transport

#endif /* NPRDMA_TRANSPORT_HPP */
