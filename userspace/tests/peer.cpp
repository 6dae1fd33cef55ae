/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "peer.hpp"

#include "protocol/scan.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <gtest/gtest.h>

namespace npr::test {

std::uint64_t peer::region::page_of(std::uint64_t offset) const
{
	return ((info.base + offset) >> page_shift) - (info.base >> page_shift);
}

/* --- regions ------------------------------------------------------------ */

void peer::new_keys(region &r)
{
	r.info.region_id = next_id_++;
	r.info.table_key = next_key_++;
	r.info.read_key = next_key_++;
	r.info.write_key = next_key_++;
}

peer::region &peer::add_region(std::uint64_t base, std::uint64_t length, std::uint32_t rkey)
{
	memories.emplace_back(length);
	regions.emplace_back();
	region &r = regions.back();
	r.rkey = rkey;
	r.memory = &memories.back();
	new_keys(r);
	r.info.base = base;
	r.info.length = length;
	r.info.access = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
	r.info.read_addr = 0x700000000000 + base;
	r.info.write_addr = 0x600000000000 + base;
	r.info.table_addr = 0x500000000000;
	r.info.signature = signature;
	r.info.page_shift = page_shift;
	r.info.unit_shift = 6;
	r.info.read_order = RDMA_NP_READ_IN_ORDER;
	r.info.max_pages = RDMA_NP_MAX_PAGES;
	r.info.max_ranges = RDMA_NP_MAX_RANGES;
	r.info.max_outstanding = 16;
	r.pages.resize(r.page_of(length - 1) + 1);
	return r;
}

void peer::kill_region(region &r)
{
	for (std::uint64_t p = 0; p < r.pages.size(); ++p) {
		r.pages[p].holds = 0;
		page_out(r, p);
		r.pages[p].mapped_read = r.pages[p].mapped_write = false;
	}
	r.gone = true;
	std::erase_if(holds, [&](const auto &h) { return h.second.of == &r; });
}

peer::region &peer::replace_region(region &old)
{
	kill_region(old);
	regions.push_back(old);
	region &r = regions.back();
	r.gone = r.forgotten = r.known = r.ending = false;
	new_keys(r);
	r.pages.assign(r.pages.size(), {});
	return r;
}

peer::region &peer::pin_region(region &old)
{
	region &r = replace_region(old);

	r.pinned = true;
	r.info.read_key = r.info.write_key = r.rkey;
	r.info.read_addr = r.info.write_addr = r.info.base;
	all_in(r, true);
	for (page &p : r.pages)
		p.holds = 1;
	return r;
}

void peer::page_out(region &r, std::uint64_t i)
{
	page &p = r.pages[i];

	if (p.holds || !(p.mapped_read || p.mapped_write))
		return;
	p.word = ((p.word >> 2) + 1) << 2;
	p.mapped_read = p.mapped_write = false;
}

void peer::page_taken(region &r, std::uint64_t i)
{
	page &p = r.pages[i];

	if (!p.holds)
		return page_out(r, i);
	p.word = ((p.word >> 2) + 1) << 2;
	p.stale = true;
}

void peer::page_in(region &r, std::uint64_t i, bool write)
{
	page &p = r.pages[i];
	const std::uint64_t rights = RDMA_NP_WORD_READABLE | (write ? std::uint64_t{RDMA_NP_WORD_WRITABLE} : 0);

	if ((p.word & rights) == rights)
		return;
	p.mapped_read = true;
	p.mapped_write |= write;
	p.word = ((p.word >> 2) + 1) << 2 | rights | (p.word & RDMA_NP_WORD_WRITABLE);
}

void peer::all_in(region &r, bool write)
{
	for (std::uint64_t p = 0; p < r.pages.size(); ++p)
		page_in(r, p, write);
}

void peer::all_out(region &r)
{
	for (std::uint64_t p = 0; p < r.pages.size(); ++p)
		page_out(r, p);
}

bool peer::has_leases(const region &r) const
{
	return std::any_of(holds.begin(), holds.end(), [&](const auto &h) { return h.second.lease && h.second.of == &r; });
}

/* --- the kernel --------------------------------------------------------- */

int peer::tell_region(std::uint32_t rkey, std::uint64_t addr, rdma_np_region_info &info)
{
	int error = -EACCES;

	for (region &r : regions) {
		if (r.rkey != rkey || r.gone || r.pinned)
			continue;
		/* Of a whole address space, which has nothing elsewhere. */
		if (r.info.part_shift && addr - r.info.base >= r.info.length) {
			if (error == -EACCES)
				error = -EFAULT;
			continue;
		}
		r.known = true;
		info = r.info;
		error = 0;
	}
	return error;
}

rdma_np_event peer::answer_fault(region &r, const rdma_np_fault_req &req, std::span<const rdma_np_range> ranges,
				 rdma_np_status status, bool lends)
{
	const auto page = [&](std::uint64_t addr) { return r.page_of(addr - r.info.base); };
	const bool write = req.flags & RDMA_NP_FAULT_WRITE;
	rdma_np_event e{};

	e.type = RDMA_NP_EVENT_FAULT;
	e.cookie = req.cookie;
	e.region_id = req.region_id;
	e.status = static_cast<std::uint32_t>(r.gone ? RDMA_NP_GONE : status);
	for (const rdma_np_range &range : ranges) {
		EXPECT_GE(range.addr, r.info.base);
		EXPECT_LE(range.addr - r.info.base + range.length, r.info.length);
		/* The owner has another page there now, and the leaf is the holds' */
		for (std::uint64_t p = page(range.addr);
		     e.status == RDMA_NP_OK && p <= page(range.addr + range.length - 1); ++p)
			if (r.pages[p].stale)
				e.status = RDMA_NP_BUSY;
	}
	if (e.status != RDMA_NP_OK)
		return e;
	if (req.flags & RDMA_NP_FAULT_LEASE) {
		grant(r, ranges, write, lends, e);
		return e;
	}
	std::vector<std::uint64_t> pages;
	for (const rdma_np_range &range : ranges) {
		const std::uint64_t first = page(range.addr), last = page(range.addr + range.length - 1);
		for (std::uint64_t p = first; p <= last; ++p) {
			page_in(r, p, write);
			pages.push_back(p);
			if (&range == &ranges.front() && p - first < RDMA_NP_EVENT_WORDS)
				e.words[e.nr_words++] = r.pages[p].word;
		}
	}
	if (req.flags & RDMA_NP_FAULT_HOLD) {
		e.hold_id = next_hold_++;
		for (const auto p : pages)
			++r.pages[p].holds;
		holds[e.hold_id] = {&r, pages};
	}
	return e;
}

/* The pages of the first range, and of the second one what is there next to them. */
void peer::grant(region &r, std::span<const rdma_np_range> ranges, bool write, bool lends, rdma_np_event &e)
{
	const std::uint64_t right = write ? RDMA_NP_WORD_WRITABLE : RDMA_NP_WORD_READABLE;
	const auto page = [&](std::uint64_t addr) { return r.page_of(addr - r.info.base); };
	const rdma_np_range &asked = ranges.front(), &around = ranges.back();

	EXPECT_LE(ranges.size(), 2U);
	EXPECT_TRUE(around.addr <= asked.addr && around.addr + around.length >= asked.addr + asked.length);
	std::uint64_t first = page(asked.addr), last = page(asked.addr + asked.length - 1);
	for (std::uint64_t p = first; p <= last; ++p)
		page_in(r, p, write);
	if (r.ending || !lends)
		return;
	while (first > page(around.addr) && r.pages[first - 1].word & right && !r.pages[first - 1].stale)
		--first;
	while (last < page(around.addr + around.length - 1) && r.pages[last + 1].word & right && !r.pages[last + 1].stale)
		++last;
	hold h{&r, {}, true};
	h.write = write;
	h.key = next_lease_key_++;
	for (std::uint64_t p = first; p <= last; ++p) {
		++r.pages[p].holds;
		h.pages.push_back(p);
	}
	e.hold_id = next_hold_++;
	e.lease_addr = (r.info.base & ~(page_size - 1)) + first * page_size;
	e.lease_length = (last + 1 - first) * page_size;
	e.lease_key = h.key;
	holds[e.hold_id] = h;
}

void peer::unhold(page &p)
{
	if (!--p.holds && p.stale)
		p.stale = p.mapped_read = p.mapped_write = false;
}

bool peer::end_hold(std::uint64_t id)
{
	const auto h = holds.find(id);

	if (h == holds.end())
		return false;
	for (const auto i : h->second.pages)
		unhold(h->second.of->pages[i]);
	holds.erase(h);
	return true;
}

rdma_np_event peer::gone_event(const region &r)
{
	rdma_np_event e{};

	e.type = RDMA_NP_EVENT_REGION_GONE;
	e.region_id = r.info.region_id;
	return e;
}

rdma_np_event peer::recall_event(std::uint64_t id) const
{
	rdma_np_event e{};

	e.type = RDMA_NP_EVENT_RECALL;
	e.hold_id = id;
	e.region_id = holds.at(id).of->info.region_id;
	return e;
}

/* --- the HCA ------------------------------------------------------------ */

peer::region *peer::by_key(std::uint32_t key, std::uint32_t rdma_np_region_info::*which)
{
	for (region &r : regions)
		if (key && r.info.*which == key)
			return &r;
	return nullptr;
}

const peer::hold *peer::by_lease(std::uint32_t key) const
{
	for (const auto &[id, h] : holds)
		if (key && h.key == key)
			return &h;
	return nullptr;
}

/* The region that @wr reaches, its first byte there, and the lease whose key it has, which holds all of it. */
peer::target peer::target_of(const ibv_send_wr &wr, std::uint64_t addr, std::uint64_t n)
{
	const std::uint32_t key = is_atomic(wr.opcode) ? wr.wr.atomic.rkey : wr.wr.rdma.rkey;
	const bool write = changes_memory(wr.opcode);
	const hold *lease = by_lease(key);
	target t{lease ? lease->of
		       : by_key(key, write ? &rdma_np_region_info::write_key : &rdma_np_region_info::read_key),
		 addr, 0, lease ? lease->write : write};

	if (!t.of)
		return t;
	t.start = addr - (t.write_window ? t.of->info.write_addr : t.of->info.read_addr);
	if (!lease)
		return t;
	EXPECT_TRUE(lease->write || !write) << "a lease that is not for writing";
	for (const std::uint64_t at : {t.start, t.start + n - 1})
		EXPECT_TRUE(std::count(lease->pages.begin(), lease->pages.end(), t.of->page_of(at)))
			<< "outside of the lease";
	return t;
}

void peer::read(const target &t, std::span<std::byte> bytes)
{
	const page &p = t.of->pages[t.of->page_of(t.start)];

	if (t.write_window ? p.mapped_write : p.mapped_read) {
		std::memcpy(bytes.data(), t.of->memory->data() + t.start, bytes.size());
		return;
	}
	for (std::uint64_t i = 0; i < bytes.size(); ++i)
		bytes[i] = static_cast<std::byte>(signature >> 8 * ((t.addr + i) % 8));
}

bool peer::write(const target &t, std::span<const std::byte> bytes)
{
	if (!t.of->pages[t.of->page_of(t.start)].mapped_write)
		return false;
	std::memcpy(t.of->memory->data() + t.start, bytes.data(), bytes.size());
	return true;
}

bool peer::atomic(const target &t, const ibv_send_wr &wr, std::uint64_t &old)
{
	std::byte *const at = t.of->memory->data() + t.start;

	old = 0x5c7a7c45c7a7c4; /* scratch */
	if (!t.of->pages[t.of->page_of(t.start)].mapped_write)
		return false;
	std::memcpy(&old, at, 8);
	std::uint64_t value = old + wr.wr.atomic.compare_add;
	if (wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP)
		value = old == wr.wr.atomic.compare_add ? wr.wr.atomic.swap : old;
	std::memcpy(at, &value, 8);
	return true;
}

void peer::read_words(const region &r, std::uint64_t addr, std::span<std::byte> bytes)
{
	for (; !bytes.empty(); bytes = bytes.subspan(8), addr += 8) {
		const std::uint64_t i = (addr - r.info.table_addr) / 8;

		ASSERT_LT(i, r.pages.size()) << "outside of the table";
		std::memcpy(bytes.data(), &r.pages[i].word, 8);
	}
}

void complete_as(ibv_wc &wc, ibv_wr_opcode opcode, std::span<const ibv_sge> sges)
{
	switch (opcode) {
	case IBV_WR_RDMA_READ:
		wc.opcode = IBV_WC_RDMA_READ;
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		wc.opcode = IBV_WC_COMP_SWAP;
		break;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		wc.opcode = IBV_WC_FETCH_ADD;
		break;
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		wc.opcode = IBV_WC_RDMA_WRITE;
		return;
	default:
		wc.opcode = IBV_WC_SEND;
		return;
	}
	for (const ibv_sge &s : sges)
		wc.byte_len += s.length;
}

} // namespace npr::test
