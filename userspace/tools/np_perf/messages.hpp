/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the two ends tell each other through a stream socket. Each message has a head with a
 * magic number, the version, its kind and its length; numbers are big-endian. Nothing that
 * arrives is believed: decode() checks every number against its bounds and throws bad_message,
 * which names what is wrong.
 */
#ifndef NP_PERF_MESSAGES_HPP
#define NP_PERF_MESSAGES_HPP

#include "test.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace perf
{

inline constexpr std::uint32_t wire_magic = 0x4e505046; /* NPPF */
inline constexpr std::uint16_t wire_version = 1;
inline constexpr std::size_t head_bytes = 12, max_body = 16 * KiB;

class bad_message : public std::runtime_error
{
public:
	using std::runtime_error::runtime_error;
};

enum class kind : std::uint16_t {
	hello = 1, /* test */
	endpoint,  /* endpoint, of either end */
	pass,      /* pass */
	ready,     /* ready: memory is as it should be, and receives are posted */
	done,      /* done: how many operations each thread has completed */
	result,    /* result */
	failure,   /* failure, instead of any other: then the connection ends */
	bye,       /* nothing */
};

struct qp_address {
	std::uint32_t qpn, psn;
};

/* How to reach the memory and the queue pairs of an end. */
struct endpoint {
	std::uint64_t address = 0, length = 0;
	std::uint32_t rkey = 0;
	std::uint16_t lid = 0;
	std::array<std::uint8_t, 16> gid{};
	std::uint8_t mtu = 0; /* enum ibv_mtu */
	bool ethernet = false;
	std::vector<qp_address> qps;
};

struct pass {
	std::uint64_t size = 0;
	std::uint64_t number = 0; /* what data is like follows from it */
	bool prepare = true;      /* memory as it should be before a pass, operations from 0 on */
};

struct ready {
	std::uint8_t absent = 0; /* per cent of the memory that is */
};

struct done {
	std::vector<std::uint64_t> operations; /* of each thread, since the memory was prepared */
};

struct result {
	std::uint64_t mismatches = 0, received = 0;
	/* Of the region, during the pass; of pinned ones 0. */
	std::uint64_t faults_minor = 0, faults_major = 0, invalidations = 0, holds = 0;
	std::uint64_t reclaimed = 0; /* bytes, by --pressure */
};

struct failure {
	std::string text; /* printable ASCII */
};

struct head {
	kind what;
	std::uint32_t length; /* of the body */
};

/* Of the first head_bytes of a message. */
[[nodiscard]] head decode_head(std::span<const std::byte> bytes);

/* Whole messages. */
[[nodiscard]] std::vector<std::byte> encode(const test &m);
[[nodiscard]] std::vector<std::byte> encode(const endpoint &m);
[[nodiscard]] std::vector<std::byte> encode(const pass &m);
[[nodiscard]] std::vector<std::byte> encode(const ready &m);
[[nodiscard]] std::vector<std::byte> encode(const done &m);
[[nodiscard]] std::vector<std::byte> encode(const result &m);
[[nodiscard]] std::vector<std::byte> encode(const failure &m);
[[nodiscard]] std::vector<std::byte> encode_bye();

/* Bodies. @t is the test that both ends have agreed on; the other end's memory has to suffice for it. */
[[nodiscard]] test decode_test(std::span<const std::byte> body);
[[nodiscard]] endpoint decode_endpoint(std::span<const std::byte> body, const test &t, bool of_client);
[[nodiscard]] pass decode_pass(std::span<const std::byte> body, const test &t);
[[nodiscard]] ready decode_ready(std::span<const std::byte> body);
[[nodiscard]] done decode_done(std::span<const std::byte> body, const test &t);
[[nodiscard]] result decode_result(std::span<const std::byte> body);
[[nodiscard]] failure decode_failure(std::span<const std::byte> body);

/* What cannot be measured, in words for a user; empty: all is well. */
[[nodiscard]] std::string objection(const test &t);

} // namespace perf

#endif // NP_PERF_MESSAGES_HPP
