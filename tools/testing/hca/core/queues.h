/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Queues in guest memory: the buffers, event queues, completion queues and
 * shared receive queues.
 */
#ifndef NPHCA_QUEUES_H
#define NPHCA_QUEUES_H

#include <array>
#include <cstdint>
#include <vector>

#include "bits.h"

namespace nphca {

class device;

/* A buffer that is contiguous to its user and scattered over pages. */
struct queue_buffer {
	std::vector<uint64_t> pages;
	uint32_t log_page = 12;
	uint64_t offset = 0; /* of the first byte in the first page */

	/*
	 * Takes the page list of a command; the offset is in 64ths of a page.
	 * False if the pages do not cover @size bytes.
	 */
	[[nodiscard]] bool set(const_bytes pas, uint32_t log_page_size, uint32_t page_offset, uint64_t size);
	[[nodiscard]] bool read(device &d, uint64_t at, void *buf, size_t len) const noexcept;
	[[nodiscard]] bool write(device &d, uint64_t at, const void *buf, size_t len) const noexcept;

private:
	template <typename F>
	bool walk(uint64_t at, size_t len, F &&f) const noexcept;
};

struct eq {
	std::array<uint8_t, eqc_size> context{};
	queue_buffer buffer;
	uint32_t eqn = 0, log_size = 0, vector = 0;
	std::array<uint64_t, 4> mask{};
	uint32_t pi = 0, ci = 0;
	bool armed = false, overrun = false;
};

/* What there is to say about a finished work request. */
struct cqe {
	uint8_t opcode = 0;
	wc_error error = wc_error::none;
	uint8_t vendor = 0;
	bool solicited = false;
	uint32_t qpn = 0, uidx = 0xffffff, srqn = 0;
	uint8_t wqe_opcode = 0;
	uint16_t counter = 0;
	uint32_t byte_count = 0, imm = 0;
	uint32_t remote_qpn = 0;
	uint16_t slid = 0;
	uint8_t sl = 0;
	bool grh = false;
	bool tagged = false;
	uint16_t tag = 0;
};

struct cq {
	std::array<uint8_t, cqc_size> context{};
	queue_buffer buffer;
	uint32_t cqn = 0, log_size = 0, eqn = 0, stride = 64;
	uint64_t dbr = 0;
	uint32_t pi = 0, ci = 0; /* ci: as last read from the doorbell record */
	uint32_t notified = 0, solicited = 0; /* pi after the last CQE that was notified of, that was solicited */
	enum : uint8_t { unarmed, next, next_solicited } armed = unarmed;
	bool ignore_overrun = false, failed = false;
	uint32_t users = 0;
};

struct srq {
	std::array<uint8_t, srqc_size> context{};
	std::array<uint8_t, 240> rmp_context{};
	bool is_rmp = false;
	queue_buffer buffer;
	uint32_t srqn = 0, log_size = 0, log_stride = 4;
	uint64_t dbr = 0;
	uint32_t pd = 0, uidx = 0xffffff;
	uint32_t xrcd = 0, cqn = 0; /* of those that QPs of an XRC domain share */
	uint16_t head = 0;	/* next WQE, as the list in the buffer says */
	uint16_t taken = 0, posted = 0;
	uint16_t limit = 0;	/* 0: no event wanted */
	bool failed = false;
	uint32_t users = 0;
};

} // namespace nphca

#endif
