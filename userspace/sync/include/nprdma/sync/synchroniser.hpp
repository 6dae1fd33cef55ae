/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * One worker's parameters, and averaging them with others as a schedule says.
 *
 * The parameters are one flat vector: weights, and the statistics of normalisation layers, which have to be
 * averaged with them. What an optimiser has besides, as momentum, stays with its worker. A step of training
 *is
 *
 *	sync.synchronise();                       // group means replace the parameters
 *	... gradient at sync.parameters(), local step of the optimiser ...
 *
 * or, with the exchange behind the computation of the gradient,
 *
 *	sync.start();
 *	... gradient at sync.parameters() ...
 *	sync.finish();                            // adds what the mean is away from where it started
 *	... local step of the optimiser ...
 *
 * Inside a group each member averages its share of the parameters: the others WRITE theirs to its inbox
 *(reduce-scatter), and it WRITEs the mean to theirs (all-gather). No message goes to a worker outside of the
 *group, so no group waits for another one. All members have the same bits afterwards.
 *
 * A member that is dead, or from which nothing is heard for the deadline, is left out and the others go on;
 *it may come back. Its parameters do not count then until a group has brought them up to date.
 *
 * All memory that peers reach is one range, registered once, unpinned unless asked otherwise. Of the inboxes
 *only what is used is ever touched.
 */
#ifndef NPRDMA_SYNC_SYNCHRONISER_HPP
#define NPRDMA_SYNC_SYNCHRONISER_HPP

#include "nprdma/sync/schedule.hpp"
#include "nprdma/sync/wire.hpp"

#include <nprdma/export.hpp>
#include <nprdma/transport.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace nprdma::sync
{

struct settings {
	wire format = wire::exact;
	/*
	 * A member that is awaited and says nothing for so long is left out. It has to be longer than workers
	 * are apart in their computing, and than what is written to one member takes.
	 */
	std::chrono::nanoseconds deadline = std::chrono::seconds(2);
	/* For all workers to connect. */
	std::chrono::nanoseconds founding = std::chrono::seconds(30);
	/*
	 * The parameters in so many parts, of which each synchronise() exchanges the next one; the schedule
	 * goes on when all have been. The promise of a schedule's k rounds is then kept by k times as many.
	 */
	std::uint32_t parts = 1;
	/* Data is checked end to end; all workers do, or none. What does not fit counts as not sent. */
	bool checksums = true;
	bool pinned = false;
	/* This worker was in the group before, as another process: the others are there already. */
	bool comes_back = false;
};

/* What the link to peers has to be opened with; @how: what else there is to say. */
[[nodiscard]] NPRDMA_API transport::options link_options(transport::options how = {});

/* Of one synchronisation. */
struct report {
	std::uint64_t step = 0;        /* from 1 on; a worker that comes back has missed some */
	std::uint32_t group = 1;       /* members that the group had, this one as well */
	std::uint32_t contributed = 1; /* to this worker's share */
	bool complete = true;          /* all of what was to be exchanged is the mean now */
	bool left_out = false;         /* by the others; the next step comes back */
};

struct statistics {
	std::uint64_t bytes_sent = 0; /* data and notes */
	std::uint32_t suspicions = 0; /* members that this one has left out */
	std::uint32_t returns = 0;    /* times that this one came back */
	std::uint32_t groups = 0;     /* different ones, made ready once and kept */
	std::uint64_t discarded = 0;  /* pieces and means whose checksum, size or range was wrong */
};

/* T is float or double. For one thread at a time. */
template <class T> class NPRDMA_API synchroniser
{
public:
	/*
	 * @addresses: of the listeners of all workers, by rank. All workers construct theirs at the same
	 * time, and with the same schedule, number of elements and settings. Throws std::system_error, and
	 * std::invalid_argument.
	 */
	synchroniser(transport::context &context, transport::listener &listener, rank_t rank,
		     std::vector<std::string> addresses, schedule who, std::size_t elements,
		     const settings &how = {});
	~synchroniser();
	synchroniser(const synchroniser &) = delete;
	synchroniser &operator=(const synchroniser &) = delete;

	/* In registered memory, zeros at first. */
	[[nodiscard]] std::span<T> parameters() noexcept;

	/*
	 * The next step: the mean of this worker's group instead of its parameters, or of the part whose turn
	 * it is. EDOM: a parameter is not finite and cannot be sent in the wire format; nothing was sent, and
	 * the others go on without this worker.
	 */
	transport::result<report> synchronise() noexcept;
	/* The same for elements @first to @first + @count less one only, which all of the group have to ask
	 * for. EINVAL: they are not there. */
	transport::result<report> synchronise(std::size_t first, std::size_t count) noexcept;

	/*
	 * Begins a step on another thread with the parameters as they are; they may be read and changed until
	 * finish(), which adds to each one what the mean differs from what it was at start(). EBUSY: the last
	 * one is not finished.
	 */
	transport::result<void> start() noexcept;
	transport::result<report> finish() noexcept;

	/* For comparison: the mean of all workers, by an all-reduce. Nobody may be absent: ECONNRESET. */
	enum class algorithm { ring, halving_doubling, direct };
	transport::result<void> all_reduce(algorithm how) noexcept;

	/* Until those of this group that take part are here as well. */
	void barrier(std::span<const rank_t> group) noexcept;

	/* What the next synchronise() is going to be, unless this worker is left out. */
	[[nodiscard]] std::uint64_t next_step() const noexcept;
	/* This one, and those of the others that it takes for alive. */
	[[nodiscard]] std::vector<rank_t> present() const;
	[[nodiscard]] statistics stats() const noexcept;
	/* Quantised: what this worker has still to send; empty otherwise. */
	[[nodiscard]] std::span<const T> carried() const noexcept;

private:
	class body;
	std::unique_ptr<body> body_;
};

extern template class synchroniser<float>;
extern template class synchroniser<double>;

} // namespace nprdma::sync

#endif
