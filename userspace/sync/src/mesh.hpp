/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The connections of one worker to all others, and what travels on them: data that is written into the peer's
 * memory with a note behind it, and notes alone. For one thread at a time.
 *
 * All workers' memory is laid out in the same way (see synchroniser.cpp), so an offset means the same
 * everywhere. That they agree is checked when they greet each other.
 */
#ifndef NPRDMA_SYNC_MESH_HPP
#define NPRDMA_SYNC_MESH_HPP

#include "nprdma/sync/schedule.hpp"

#include <nprdma/transport.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace nprdma::sync
{

using clock = transport::clock;

/* What all workers have to have in common; sums of longer things. */
struct agreement {
	std::uint64_t elements = 0;
	std::uint32_t element_bytes = 0;
	std::uint32_t format = 0;
	std::uint64_t schedule = 0; /* sum of its name */
	std::uint32_t workers = 0;
	std::uint32_t checked = 0; /* data has checksums */
	bool operator==(const agreement &) const = default;
};

struct note {
	enum class kind : std::uint32_t {
		piece = 1, /* values for their owner to average */
		mean,      /* the owner's average */
		part,      /* of an all-reduce */
		arrived,   /* at a barrier */
		ping,
		pong,
		suspect, /* worker @about, as it was, is left out from now on */
		join,    /* the sender wants to come back */
		welcome, /* the answer: no earlier than with @step */
		joined,  /* the sender comes back with @step */
		failed,  /* the sender's all-reduce with the number @view */
		bye,     /* the sender ends; what it had to say is said */
	};

	kind what{};
	std::uint32_t incarnation = 0;      /* of @about, or of the sender */
	std::uint64_t step = 0;             /* where the sender is, or as said above */
	std::uint64_t view = 0;             /* of the group, see members.hpp */
	std::uint64_t first = 0, count = 0; /* elements */
	std::uint64_t sum = 0;              /* checksum of the data */
	std::uint32_t weight = 0;           /* of a piece; in a mean, of all pieces together */
	rank_t about = 0;
	std::uint32_t standing = 0; /* of the sender's parameters, or of what the mean is of */
	std::uint32_t unused = 0;
};

struct hello {
	static constexpr std::uint64_t right_magic = 0x31636e79736d706eULL;

	std::uint64_t magic = right_magic;
	agreement common;
	std::uint64_t birth = 0; /* another one for each process */
	transport::token memory{};
	rank_t rank = 0;
	std::uint32_t known = 0; /* the incarnation of the receiver that the sender knows */
};

class mesh
{
public:
	struct events {
		std::function<void(rank_t, const note &)> received;
		std::function<void(rank_t, const hello &)> connected;
		std::function<void(rank_t)> broken;
		std::function<std::uint32_t(rank_t)> incarnation;
	};

	/*
	 * @addresses: of all workers, that of @own.rank is @listener's. All that is given stays as long as
	 * this does.
	 * @memory: all of it can be written by peers.
	 */
	mesh(transport::context &context, transport::listener &listener, std::vector<std::string> addresses,
	     const transport::region &memory, const hello &own, events e);

	/*
	 * Connects to @peer until @deadline, and greets it; it is connected when it has answered, for which
	 * it has the time @answer. 0, or why there is nobody to wait for.
	 */
	int dial(rank_t peer, clock::time_point deadline,
		 std::chrono::nanoseconds answer = std::chrono::seconds(2));
	/* Calls events. Does not wait. */
	void poll();
	/* Those that were turned away have read why, or have had the time for it. */
	[[nodiscard]] bool all_told() const noexcept { return refused_.empty(); }
	/* Until poll() may have something, or @deadline. */
	void wait(clock::time_point deadline);

	/*
	 * Writes @data, of the memory, at @offset of the peer's, and @n behind it; no data: only the note. It
	 * waits here until the transport takes it. @data is left alone until idle().
	 */
	void post(rank_t peer, std::span<const std::byte> data, std::uint64_t offset, const note &n);
	void post(rank_t peer, const note &n) { post(peer, {}, 0, n); }
	/* Nothing that was posted to it is under way. */
	[[nodiscard]] bool idle(rank_t peer) const noexcept;
	/* What waits is forgotten. */
	void forget(rank_t peer) noexcept { links_[peer].waiting.clear(); }
	[[nodiscard]] bool connected(rank_t peer) const noexcept { return links_[peer].line != nullptr; }
	[[nodiscard]] bool dialing(rank_t peer) const noexcept;
	[[nodiscard]] std::uint32_t workers() const noexcept { return own_.common.workers; }
	[[nodiscard]] rank_t self() const noexcept { return own_.rank; }
	/* Posted so far: data and notes. */
	[[nodiscard]] std::uint64_t bytes_sent() const noexcept { return bytes_sent_; }
	/* Why peers were turned away, the last one. */
	[[nodiscard]] const std::string &complaint() const noexcept { return complaint_; }
	/* A peer was a worker of nprdma-sync, and of something else than this one. */
	[[nodiscard]] bool disagreed() const noexcept { return disagreed_; }

private:
	struct outgoing {
		std::span<const std::byte> data;
		std::uint64_t offset;
		note n;
	};
	struct link {
		std::unique_ptr<transport::connection> line;
		rank_t dialer = 0;
		std::uint64_t birth = 0;
		transport::token memory{};
		std::deque<outgoing> waiting;
		std::size_t under_way = 0;
	};
	/* Somebody whose greeting has not come yet. */
	struct stranger {
		std::unique_ptr<transport::connection> line;
		std::optional<rank_t> dialed;
		clock::time_point until;
	};

	void take_callers();
	/* False: it is no worker of ours, or not needed. */
	bool welcome(stranger &s, const hello &h);
	[[nodiscard]] std::string wrong_with(const stranger &s, const hello &h) const;
	bool greet(transport::connection &line, rank_t peer);
	void hang_up();
	void flush(rank_t peer);
	void receive_all(rank_t peer);
	void lose(rank_t peer);

	transport::context &context_;
	transport::listener &listener_;
	const std::vector<std::string> addresses_;
	const transport::region &memory_;
	const hello own_;
	const events events_;
	std::vector<link> links_;
	std::vector<stranger> strangers_;
	std::vector<stranger> refused_;               /* they have been told why, and may not have read it */
	std::vector<transport::connection *> waited_; /* of wait(), kept for its memory */
	std::uint64_t bytes_sent_ = 0;
	std::string complaint_;
	bool disagreed_ = false;
};

} // namespace nprdma::sync

#endif
