/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A session is one mode's pair of processes: the target's, which serves its connection until the
 * other end leaves, and the client's, which does what the process that the user has started orders.
 */
#ifndef NP_PERF_SESSION_HPP
#define NP_PERF_SESSION_HPP

#include "link.hpp"
#include "messages.hpp"
#include "statistics.hpp"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace perf
{

/* Messages through a stream socket, which it owns. */
class channel
{
public:
	explicit channel(int fd) noexcept : fd_(fd) {}
	channel(const channel &) = delete;
	channel &operator=(const channel &) = delete;
	~channel();

	void send(std::span<const std::byte> message) const;
	/* The body of a message of kind @k. A failure of the other end is thrown. */
	[[nodiscard]] std::vector<std::byte> receive(kind k) const;
	/* The same for the other kind as well; says which one came. */
	[[nodiscard]] std::vector<std::byte> receive(kind k, kind other, kind &came) const;
	[[nodiscard]] int fd() const noexcept { return fd_; }

private:
	int fd_;
};

/*
 * What the client's process is to do, and what came of it. Both are the same program on one
 * host, so these go as they are.
 */
struct order {
	std::uint64_t size, number, operations, duration_ns, warm_ns;
};

struct outcome {
	bool failed;
	char text[600];
	latency_summary latency;
	bandwidth_summary bandwidth; /* of operations */
	histogram latencies;
	result target;
	std::uint64_t operations, lost, mismatches;
	unsigned absent, local_absent; /* per cent, before the pass */
	/* Of the client's own region, and of its queue pairs in the library. */
	std::uint64_t faults_minor, faults_major, invalidations, holds, reclaimed;
	std::uint64_t leases, recalls, suspicious_pages, repeated_pages;
};

/* Both return what exit() is to have. */
int serve(int connection, const device_choice &device);
int work(int orders, int connection, const device_choice &device);

} // namespace perf

#endif // NP_PERF_SESSION_HPP
