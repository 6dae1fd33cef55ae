// SPDX-License-Identifier: GPL-2.0
/*
 * Event queues, completion queues and the buffers of all queues.
 *
 * There is no order inside one DMA request as a CPU sees it, so the byte that
 * hands an entry to software is always written by a request of its own, last.
 */
#include "queues.h"

#include <algorithm>

#include "device.h"

namespace nphca {

bool queue_buffer::set(const_bytes pas, uint32_t log_page_size, uint32_t page_offset, uint64_t size)
{
	if (log_page_size < 12 || log_page_size > 40 || page_offset >= 64 || size > (1ull << 32))
		return false;
	const uint64_t page = 1ull << log_page_size, first = uint64_t{page_offset} << (log_page_size - 6);
	const uint64_t n = (first + size + page - 1) >> log_page_size;
	if (pas.size() / 8 < n)
		return false;
	pages.resize(n);
	for (size_t i = 0; i < n; ++i)
		pages[i] = load64(pas.data() + 8 * i) & ~7ull;
	log_page = log_page_size;
	offset = first;
	return true;
}

template <typename F>
bool queue_buffer::walk(uint64_t at, size_t len, F &&f) const noexcept
{
	const uint64_t page = 1ull << log_page;

	at += offset;
	while (len) {
		const uint64_t index = at >> log_page, in_page = at & (page - 1);
		const size_t n = std::min<uint64_t>(len, page - in_page);
		if (index >= pages.size() || !f(pages[index] + in_page, n))
			return false;
		at += n;
		len -= n;
	}
	return true;
}

bool queue_buffer::read(device &d, uint64_t at, void *buf, size_t len) const noexcept
{
	auto *p = static_cast<uint8_t *>(buf);
	return walk(at, len, [&](uint64_t iova, size_t n) {
		const bool ok = d.dma_read(iova, p, n);
		p += n;
		return ok;
	});
}

bool queue_buffer::write(device &d, uint64_t at, const void *buf, size_t len) const noexcept
{
	auto *p = static_cast<const uint8_t *>(buf);
	return walk(at, len, [&](uint64_t iova, size_t n) {
		const bool ok = d.dma_write(iova, p, n);
		p += n;
		return ok;
	});
}

/* Event queues */

/* An interrupt is a write, too, and passes none. */
void device::notify(uint32_t vector) noexcept
{
	posted.commit_all();
	ops_.msix_notify(host_, vector);
}

void device::write_eqe(eq &e, uint8_t type, uint8_t subtype, const_bytes data) noexcept
{
	std::array<uint8_t, 64> entry{};
	const uint32_t size = 1u << e.log_size;

	if (((e.pi - e.ci) & 0xffffff) >= size) {
		if (!e.overrun)
			log(NPHCA_LOG_ERROR, "event queue %u overrun", e.eqn);
		e.overrun = true;
		return;
	}
	entry[1] = type;
	entry[3] = subtype;
	std::copy_n(data.begin(), std::min<size_t>(data.size(), 28), entry.begin() + 32);
	const uint64_t at = uint64_t{e.pi & (size - 1)} * 64;
	const uint8_t owner = (e.pi >> e.log_size) & 1;
	if (!e.buffer.write(*this, at, entry.data(), 63))
		return;
	if (!e.buffer.write(*this, at + 63, &owner, 1))
		return;
	e.pi = (e.pi + 1) & 0xffffff;
	if (e.armed) {
		e.armed = false;
		notify(e.vector);
	}
}

void device::update_eq(uint32_t eqn, uint32_t ci, bool arm) noexcept
{
	eq *e = eqs.find(eqn);
	if (!e)
		return;
	e->ci = ci;
	if (!arm)
		return;
	if (e->pi != e->ci)
		notify(e->vector);
	else
		e->armed = true;
}

void device::post_event(uint8_t type, uint8_t subtype, const_bytes data) noexcept
{
	eqs.each([&](eq &e) {
		if (e.mask[type / 64] >> (type % 64) & 1)
			write_eqe(e, type, subtype, data);
	});
}

/* An event about a QP, or about an SRQ by its number. */
void device::qp_event(const qp &q, uint8_t type) noexcept
{
	std::array<uint8_t, 28> data{};

	store32(data.data() + 24, q.qpn);
	post_event(type, 0, data);
}

/* Completion queues */

void device::write_cqe(cq &c, const cqe &e) noexcept
{
	std::array<uint8_t, 64> entry{};
	const uint32_t size = 1u << c.log_size;
	uint8_t opcode = e.opcode;

	if (e.error != wc_error::none) {
		opcode = e.opcode == CQE_REQ ? CQE_REQ_ERR : CQE_RESP_ERR;
		entry[54] = e.vendor;
		entry[55] = static_cast<uint8_t>(e.error);
	} else {
		store64(entry.data() + 48, fab.now());
		store16(entry.data() + 22, e.slid);
		store32(entry.data() + 24, (e.grh ? 1u << 28 : 0) | uint32_t{e.sl & 0xfu} << 24 | (e.remote_qpn & 0xffffff));
		entry[29] = e.tagged ? 1 : 0;
		store16(entry.data() + 30, e.tag);
		store32(entry.data() + 36, e.imm);
		store32(entry.data() + 44, e.byte_count);
	}
	store32(entry.data() + 32, e.uidx != 0xffffff ? e.uidx : e.srqn);
	store32(entry.data() + 56, uint32_t{e.wqe_opcode} << 24 | e.qpn);
	store16(entry.data() + 60, e.counter);
	const uint8_t own = static_cast<uint8_t>(opcode << 4 | (e.solicited ? 2 : 0) | ((c.pi >> c.log_size) & 1));

	const uint64_t at = uint64_t{c.pi & (size - 1)} * c.stride + (c.stride - 64);
	if (!c.buffer.write(*this, at, entry.data(), 63)) {
		c.failed = true;
		return;
	}
	if (!c.buffer.write(*this, at + 63, &own, 1)) {
		c.failed = true;
		return;
	}
	c.pi = (c.pi + 1) & 0xffffff;
}

static void store_cqn(std::array<uint8_t, 28> &data, uint32_t cqn) noexcept
{
	store32(data.data() + 24, cqn);
}

/* Is @a later than @b? Indices have 24 bits. */
static bool after(uint32_t a, uint32_t b) noexcept
{
	const uint32_t d = (a - b) & 0xffffff;
	return d && d < 0x800000;
}

void device::complete(uint32_t cqn, const cqe &e) noexcept
{
	cq *c = cqs.find(cqn);
	if (!c || c->failed)
		return;
	const uint32_t size = 1u << c->log_size;
	if (!c->ignore_overrun && ((c->pi - c->ci) & 0xffffff) >= size) {
		std::array<uint8_t, 4> record{};
		if (dma_read(c->dbr, record.data(), record.size()))
			c->ci = load32(record.data()) & 0xffffff;
		if (((c->pi - c->ci) & 0xffffff) >= size)
			c->failed = true;
	}
	if (!c->failed)
		write_cqe(*c, e);
	if (c->failed) {
		std::array<uint8_t, 28> data{};
		store32(data.data(), c->cqn);
		data[11] = 1; /* overrun */
		log(NPHCA_LOG_ERROR, "completion queue 0x%x failed", c->cqn);
		post_event(EV_CQ_ERROR, 0, data);
		return;
	}
	const bool urgent = e.solicited || e.error != wc_error::none;
	if (urgent)
		c->solicited = c->pi;
	if (c->armed == cq::next || (c->armed == cq::next_solicited && urgent)) {
		c->armed = cq::unarmed;
		c->notified = c->pi;
		if (eq *q = eqs.find(c->eqn)) {
			std::array<uint8_t, 28> data{};
			store_cqn(data, c->cqn);
			write_eqe(*q, EV_COMPLETION, 0, data);
		}
	}
}

/*
 * Software arms with the index up to which it has looked. What is in the queue
 * beyond that, and beyond what it was told of already, is news at once.
 */
void device::arm_cq(uint32_t cqn, uint32_t word) noexcept
{
	cq *c = cqs.find(cqn);
	if (!c)
		return;
	const uint32_t ci = word & 0xffffff;
	const bool any = !(word & 1u << 24);
	const uint32_t seen = after(c->notified, ci) ? c->notified : ci;
	const uint32_t news = any ? c->pi : c->solicited;

	if (after(news, seen)) {
		c->armed = cq::unarmed;
		c->notified = c->pi;
		if (eq *q = eqs.find(c->eqn)) {
			std::array<uint8_t, 28> data{};
			store_cqn(data, c->cqn);
			write_eqe(*q, EV_COMPLETION, 0, data);
		}
	} else {
		c->armed = any ? cq::next : cq::next_solicited;
	}
}

} // namespace nphca
