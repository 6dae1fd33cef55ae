/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "sim.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace npr::test {

namespace {

std::byte *at(std::uint64_t addr)
{
	return reinterpret_cast<std::byte *>(static_cast<std::uintptr_t>(addr));
}

} // namespace

engine_config small_config()
{
	engine_config c;
	c.depth = 32;
	c.sq_budget = 16;
	c.max_sge = 4;
	c.max_inline = 256;
	c.max_faults = 4;
	c.cache_slots = 64;
	c.qp_num = 17;
	c.tag = 0xabcd1234;
	c.cookie = 5;
	c.words_lkey = words_lkey;
	c.local = true;
	return c;
}

/* --- the peer ---------------------------------------------------------- */

sim_region &sim::add_region(std::uint64_t base, std::uint64_t length, std::uint32_t rkey)
{
	sim_region &r = peer::add_region(base, length, rkey);

	r.stamps = &stamps.emplace_back(length);
	return r;
}

void sim::kill_region(sim_region &r, bool tell)
{
	peer::kill_region(r);
	if (tell)
		events.push_back(gone_event(r));
}

sim_region &sim::replace_region(sim_region &r)
{
	events.push_back(gone_event(r));
	return peer::replace_region(r);
}

sim_region &sim::pin_region(sim_region &r)
{
	events.push_back(gone_event(r));
	return peer::pin_region(r);
}

void sim::recall(std::uint64_t id)
{
	hold &h = holds.at(id);

	ASSERT_TRUE(h.lease);
	if (!std::exchange(h.recalled, true))
		events.push_back(recall_event(id));
}

void sim::recall_all(const sim_region &r)
{
	for (const auto &[id, h] : holds)
		if (h.lease && h.of == &r)
			recall(id);
}

/* --- wire -------------------------------------------------------------- */

namespace {

bool is_refused(const ibv_send_wr &wr)
{
	if (is_atomic(wr.opcode))
		return wr.wr.atomic.rkey == engine::refused_key && wr.wr.atomic.remote_addr == engine::refused_addr;
	return wr.opcode == IBV_WR_RDMA_WRITE && wr.wr.rdma.rkey == engine::refused_key &&
	       wr.wr.rdma.remote_addr == engine::refused_addr;
}

/*
 * On an HCA that executes what it receives in the order of arrival. A fence does not help:
 * it makes the initiator wait, and only for READs and atomics.
 */
bool may_overtake(const ibv_send_wr &wr, const ibv_send_wr &earlier)
{
	return (wr.opcode == IBV_WR_RDMA_READ || (wr.opcode == IBV_WR_RDMA_WRITE && !is_refused(wr))) &&
	       (earlier.opcode == IBV_WR_RDMA_WRITE || earlier.opcode == IBV_WR_RDMA_WRITE_WITH_IMM);
}

} // namespace

int sim::post(ibv_send_wr *chain, ibv_send_wr **bad) noexcept
{
	++doorbells;
	for (ibv_send_wr *w = chain; w; w = w->next) {
		const auto held = std::count_if(holds.begin(), holds.end(), [](const auto &h) { return !h.second.lease; });
		/* One that is to land once has its own hold. */
		EXPECT_TRUE(qp_error || !takes_receive(w->opcode) ||
			    held <= (lands_once && w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM))
			<< "it may wait for a receive for longer than a hold lives";
		if (refuse_post_after >= 0 && refuse_post_after-- == 0) {
			*bad = w;
			return ENOMEM;
		}
		wire x{};
		x.wr = *w;
		x.sges.assign(w->sg_list, w->sg_list + w->num_sge);
		if (!w->num_sge && w->sg_list) {
			EXPECT_EQ(w->sg_list[0].length, 0U) << "irdma makes a READ of this, whatever the number";
		}
		for (const ibv_sge &s : x.sges)
			x.length += s.length;
		if (w->send_flags & IBV_SEND_INLINE) {
			for (const ibv_sge &s : x.sges)
				x.inlined.insert(x.inlined.end(), at(s.addr), at(s.addr) + s.length); /* never held */
		}
		if (w->opcode == IBV_WR_RDMA_READ) {
			const bool table = !x.sges.empty() && x.sges[0].lkey == words_lkey;
			++(table ? word_reads : data_reads);
			for (std::uint64_t o = 0; o < x.length; o = fetch_end(x, o))
				x.todo.push_back(static_cast<std::uint32_t>(o));
			std::reverse(x.todo.begin(), x.todo.end());
		} else if (changes_memory(w->opcode) && x.length && !is_refused(*w)) {
			++writes;
		}
		queue.push_back(std::move(x));
	}
	if (budget) {
		EXPECT_LE(queue.size(), budget) << "send queue overrun";
	}
	return 0;
}

std::byte *sim::memory_of(const ibv_sge &s, std::uint64_t offset, std::uint64_t n, bool write) const
{
	const bool narrow = s.lkey == narrow_lkey, held = s.lkey == held_lkey || narrow;
	const std::uint64_t moved = narrow ? narrow_offset : held ? held_offset : s.lkey == opaque_lkey ? opaque_offset : 0;
	const std::uint64_t addr = s.addr - moved + offset;

	EXPECT_TRUE((s.lkey != local_lkey && s.lkey != iova_lkey) || !s.length) << "a key without rights";
	if (held) {
		EXPECT_TRUE(std::any_of(local_holds.begin(), local_holds.end(),
					[&](const auto &h) {
						return h.second.narrow == narrow && addr >= h.second.addr &&
						       addr + n <= h.second.addr + h.second.length &&
						       (h.second.write || !write);
					}))
			<< "a local buffer that is not held";
	}
	return at(addr);
}

int sim::hold_local(ibv_sge &sge, bool write, std::uint32_t &hold, cpu_view &view, local_ticket &) noexcept
{
	if (is_plain(sge.lkey))
		return no_hold;
	if (local_error)
		return local_error;
	if (local_holds.size() >= local_errors_from)
		return -EFAULT;
	if (sge.lkey == opaque_lkey) {
		view.opaque = true;
		return no_hold;
	}
	if (sge.lkey == iova_lkey) {
		view.offset = -iova_offset;
		sge.addr -= iova_offset;
	}
	hold = next_local_++;
	local_holds[hold] = {sge.addr, sge.length, write, leased_around};
	if (leased_around)
		for (page &p : leased_around->pages)
			++p.holds;
	sge.addr += held_offset;
	sge.lkey = held_lkey;
	return 0;
}

void sim::free_local(std::uint32_t hold) noexcept
{
	const auto h = local_holds.find(hold);

	ASSERT_NE(h, local_holds.end()) << "a local hold was freed twice";
	if (h->second.around)
		for (page &p : h->second.around->pages)
			unhold(p);
	local_holds.erase(h);
}

int sim::narrow_local(const ibv_sge &sge, bool write, std::uint32_t &hold, ibv_sge &wire) noexcept
{
	const auto h = local_holds.find(hold);

	if (h == local_holds.end()) {
		ADD_FAILURE() << "a hold that is not there";
		return no_hold;
	}
	const local_hold had = h->second;
	EXPECT_TRUE(had.addr == sge.addr && had.length == sge.length && had.write == write) << "another buffer's hold";
	if (!had.around || !local_recalled || narrow_error > 0)
		return no_hold;
	for (const auto &w : queue)
		for (const ibv_sge &s : w.sges)
			EXPECT_FALSE(s.lkey == held_lkey && s.addr - held_offset >= sge.addr &&
				     s.addr - held_offset < sge.addr + sge.length)
				<< "the HCA has it";
	free_local(hold);
	if (narrow_error)
		return narrow_error;
	hold = next_local_++;
	local_holds[hold] = {sge.addr, sge.length, write, nullptr, true};
	wire = {sge.addr + narrow_offset, sge.length, narrow_lkey};
	++narrowed;
	return 0;
}

void sim::store(wire &w, std::uint64_t offset, std::span<const std::byte> bytes)
{
	for (const ibv_sge &s : w.sges) {
		if (offset >= s.length) {
			offset -= s.length;
			continue;
		}
		const std::uint64_t n = std::min<std::uint64_t>(bytes.size(), s.length - offset);
		std::memcpy(memory_of(s, offset, n, true), bytes.data(), n);
		bytes = bytes.subspan(n);
		offset = 0;
		if (bytes.empty())
			return;
	}
	ADD_FAILURE() << "READ beyond its buffers";
}

void sim::load(const wire &w, std::uint64_t offset, std::span<std::byte> bytes) const
{
	if (!w.inlined.empty()) {
		std::memcpy(bytes.data(), w.inlined.data() + offset, bytes.size());
		return;
	}
	for (const ibv_sge &s : w.sges) {
		if (offset >= s.length) {
			offset -= s.length;
			continue;
		}
		const std::uint64_t n = std::min<std::uint64_t>(bytes.size(), s.length - offset);
		std::memcpy(bytes.data(), memory_of(s, offset, n, false), n);
		bytes = bytes.subspan(n);
		offset = 0;
		if (bytes.empty())
			return;
	}
	ADD_FAILURE() << "WRITE beyond its buffers";
}

/* @n bytes of a WRITE reach memory: whose are they, and is it their turn? */
void sim::effect(sim_region &r, std::uint64_t start, std::uint64_t n, const wire &w)
{
	app_op *owner = nullptr;

	if (unowned)
		return;
	/* Of an empty buffer nothing is held, so its address may be one that only the HCA knows. */
	const auto first = std::find_if(w.sges.begin(), w.sges.end(), [](const ibv_sge &s) { return s.length != 0; });

	for (app_op &o : ops) {
		if (o.done || !changes_memory(o.opcode) || &memories[o.memory] != r.memory || start < o.offset ||
		    start + n > o.offset + o.length)
			continue;
		/* inline data is a copy: tests make it tell its owner (see post_random()) */
		const std::uint64_t skip = w.wr.wr.rdma.remote_addr - r.info.write_addr - o.offset;
		const std::byte *from = w.inlined.empty() ? memory_of(*first, 0, 0, false) : nullptr;
		const bool mine = w.inlined.empty() ? from >= o.buffer.data() &&
							      from < o.buffer.data() + o.buffer.size()
						    : skip < o.length && w.inlined.size() <= o.length - skip &&
							      std::equal(w.inlined.begin(), w.inlined.end(),
									 o.buffer.begin() +
										 static_cast<std::ptrdiff_t>(skip));
		if (mine) {
			owner = &o;
			break;
		}
	}
	ASSERT_TRUE(owner) << "a WRITE took effect that no unfinished work request asked for";
	if (!owner->began && ordered) {
		for (const app_op &o : ops) {
			if (o.seq >= owner->seq)
				break;
			if (!changes_memory(o.opcode))
				continue;
			for (std::uint64_t i = 0; i < o.length; ++i)
				ASSERT_GE(stamps[o.memory][o.offset + i], o.seq)
					<< "WRITE " << owner->seq << " overtook WRITE " << o.seq;
		}
	}
	owner->began = true;
	if (is_atomic(owner->opcode)) {
		ASSERT_LT((*r.stamps)[start], owner->seq) << "done twice";
	}
	/* One with immediate needs one hold. */
	if (lands_once && (owner->opcode == IBV_WR_RDMA_WRITE ||
			   (owner->opcode == IBV_WR_RDMA_WRITE_WITH_IMM &&
			    (r.info.base + owner->offset) % page_size + owner->length <= r.info.max_pages * page_size))) {
		ASSERT_LT((*r.stamps)[start], owner->seq) << "landed twice";
		for (std::uint64_t i = owner->offset; i < start; ++i)
			ASSERT_EQ((*r.stamps)[i], owner->seq) << "landed before a byte at a lower address";
	}
	for (std::uint64_t i = start; i < start + n; ++i) {
		ASSERT_LE((*r.stamps)[i], owner->seq) << "a later WRITE was overwritten";
		(*r.stamps)[i] = owner->seq;
	}
}

std::uint64_t sim::fetch_end(const wire &w, std::uint64_t offset) const
{
	const std::uint64_t unit = w.sges[0].lkey == words_lkey ? 8 : unit_size;
	const std::uint64_t in_unit = (w.wr.wr.rdma.remote_addr + offset) % unit;

	return std::min({offset + unit - in_unit, offset + request - offset % request, w.length});
}

/* Bytes [offset, offset + n) of @w, which lie in one unit. */
void sim::execute(wire &w, std::uint64_t offset, std::uint64_t n)
{
	const bool write = changes_memory(w.wr.opcode);
	const std::uint64_t addr = w.wr.wr.rdma.remote_addr + offset;
	sim_region *table = by_key(w.wr.wr.rdma.rkey, &rdma_np_region_info::table_key);
	const target to = table ? target{table, addr, 0, false} : target_of(w.wr, addr, n);
	sim_region *const r = to.of;
	std::byte bytes[unit_size];

	/* The name of a dead region, which no region has now: the HCA knows nothing of it. */
	if (!r && std::any_of(regions.begin(), regions.end(),
			      [&](const sim_region &d) { return d.gone && d.rkey == w.wr.wr.rdma.rkey; })) {
		w.status = refused = IBV_WC_REM_ACCESS_ERR;
		peer_error = true;
		return;
	}
	if (!r || r->forgotten) {
		ADD_FAILURE() << "a key that is not valid: " << w.wr.wr.rdma.rkey;
		w.status = IBV_WC_REM_ACCESS_ERR;
		return;
	}
	if (table) {
		ASSERT_FALSE(write) << "words cannot be written";
		ASSERT_EQ(n, 8U) << "not by words";
		read_words(*r, addr, {bytes, 8});
		store(w, offset, {bytes, 8});
		return;
	}
	const std::uint64_t start = to.start;
	ASSERT_TRUE(start < r->info.length && n <= r->info.length - start) << "outside of the region";
	if (write) {
		load(w, offset, {bytes, n});
		if (peer::write(to, {bytes, n}))
			effect(*r, start, n, w);
		return;
	}
	read(to, {bytes, n});
	store(w, offset, {bytes, n});
}

void sim::execute_atomic(wire &w)
{
	const target to = target_of(w.wr, w.wr.wr.atomic.remote_addr, 8);
	sim_region *const r = to.of;
	std::uint64_t old;

	if (!r || r->forgotten) {
		ADD_FAILURE() << "a key that is not valid: " << w.wr.wr.atomic.rkey;
		w.status = IBV_WC_REM_ACCESS_ERR;
		return;
	}
	ASSERT_LE(to.start + 8, r->info.length) << "outside of the region";
	if (atomic(to, w.wr, old))
		effect(*r, to.start, 8, w);
	store(w, 0, std::as_bytes(std::span(&old, 1)));
}

bool sim::advance(std::size_t i, std::uint64_t units, bool shuffled)
{
	wire &w = queue[i];

	if (w.finished)
		return false;
	if (qp_error) {
		/* in order: what was under way ends, the rest is flushed */
		if (w.status == IBV_WC_SUCCESS)
			w.status = IBV_WC_WR_FLUSH_ERR;
		w.finished = true;
		return true;
	}
	for (std::size_t k = 0; k < i; ++k) {
		if (queue[k].finished || (out_of_order && may_overtake(w.wr, queue[k].wr)))
			continue;
		const bool read = w.wr.opcode == IBV_WR_RDMA_READ && is_atomic(queue[k].wr.opcode);
		if ((queue[k].wr.opcode != IBV_WR_RDMA_READ && !read) || w.wr.send_flags & IBV_SEND_FENCE)
			return false;
	}
	if (w.wr.opcode == IBV_WR_RDMA_READ) {
		while (units-- && !w.todo.empty()) {
			if (shuffled)
				std::swap(w.todo.back(), w.todo[dice(w.todo.size())]);
			const std::uint64_t start = w.todo.back();
			w.todo.pop_back();
			execute(w, start, fetch_end(w, start) - start);
		}
		w.finished = w.todo.empty() || w.status != IBV_WC_SUCCESS;
	} else if (is_refused(w.wr)) {
		EXPECT_EQ(w.length, is_atomic(w.wr.opcode) ? 8U : 1U) << "nothing is not refused";
		w.status = refused = is_atomic(w.wr.opcode) ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_ACCESS_ERR;
		w.finished = peer_error = true;
	} else if (is_atomic(w.wr.opcode) && (by_key(w.wr.wr.atomic.rkey, &rdma_np_region_info::write_key) ||
					      by_lease(w.wr.wr.atomic.rkey))) {
		execute_atomic(w);
		w.finished = true;
	} else if (changes_memory(w.wr.opcode) && (by_key(w.wr.wr.rdma.rkey, &rdma_np_region_info::write_key) ||
						   by_lease(w.wr.wr.rdma.rkey))) {
		const std::uint64_t addr = w.wr.wr.rdma.remote_addr;
		while (units-- && w.done < w.length) {
			const std::uint64_t n =
				std::min(unit_size - (addr + w.done) % unit_size, w.length - w.done);
			execute(w, w.done, n);
			w.done += n;
		}
		w.finished = w.done == w.length || w.status != IBV_WC_SUCCESS;
		if (w.finished && w.status == IBV_WC_SUCCESS && w.wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
			immediates.emplace_back(w.wr.imm_data, w.length);
			for (const app_op &o : ops)
				for (std::uint64_t b = 0; o.seq == w.wr.imm_data && b < o.length; ++b)
					EXPECT_EQ(stamps[o.memory][o.offset + b], o.seq)
						<< "the receiver hears of what is not there";
		}
	} else if (w.wr.opcode == IBV_WR_SEND && fail_send != IBV_WC_SUCCESS) {
		/* what comes before it is completed before */
		for (std::size_t k = 0; k < i; ++k)
			if (!queue[k].finished)
				return false;
		w.status = std::exchange(fail_send, IBV_WC_SUCCESS);
		w.finished = true;
		failed_seq = w.wr.imm_data;
	} else {
		/* SEND, or a pinned region: it only takes its place in the order */
		if (!qp_error)
			for (const app_op &o : ops) {
				if (o.seq >= w.wr.imm_data)
					break;
				if (!changes_memory(o.opcode))
					continue;
				for (std::uint64_t b = 0; b < o.length; ++b)
					EXPECT_GE(stamps[o.memory][o.offset + b], o.seq)
						<< "SEND " << w.wr.imm_data << " overtook WRITE " << o.seq;
			}
		w.finished = true;
	}
	if (w.finished && w.status != IBV_WC_SUCCESS)
		qp_error = true;
	return true;
}

bool sim::advance_request()
{
	for (std::size_t i = 0; i < queue.size(); ++i) {
		const wire &w = queue[i];
		if (w.finished)
			continue;
		do
			EXPECT_TRUE(advance(i, 1, false));
		while (!w.finished && w.todo.back() % request);
		return true;
	}
	return false;
}

bool sim::complete_one()
{
	if (queue.empty() || !queue.front().finished)
		return false;
	const wire w = std::move(queue.front());
	queue.pop_front();
	if (!sig_all && !(w.wr.send_flags & IBV_SEND_SIGNALED) && w.status == IBV_WC_SUCCESS)
		return true;
	ibv_wc wc{};
	wc.wr_id = w.wr.wr_id;
	wc.status = w.status;
	wc.qp_num = 17;
	/* only these are defined after an error */
	wc.opcode = IBV_WC_RECV;
	if (w.status == IBV_WC_SUCCESS)
		complete_as(wc, w.wr.opcode, w.sges);
	if (before_cqe)
		before_cqe(*this);
	if (cq) {
		EXPECT_LT(cq->cqes.size(), cq->pool.total()) << "CQ overrun";
		cq->cqes.emplace_back(this, wc);
		return true;
	}
	arrives(wc);
	return true;
}

/* As npr_cq::poll() does it. */
void sim::arrives(const ibv_wc &wc) noexcept
{
	ibv_wc out = wc;

	engine::quick_end how = engine::quick_end::no;

	if (quick && attached->hot_cqe(out)) {
		how = engine::quick_end::told;
		++hot_ends;
	}
	if (quick && how == engine::quick_end::no)
		how = attached->quick_cqe(out);
	switch (how) {
	case engine::quick_end::told:
		told.push_back(out);
		++quick_ends;
		break;
	case engine::quick_end::silent:
		++quick_ends;
		break;
	case engine::quick_end::no:
		EXPECT_TRUE(attached->on_cqe(wc)) << "the engine did not know its own completion";
		step();
	}
}

void sim::step() noexcept
{
	attached->step();
	if (cq)
		cq->settle(*this);
}

void sim_cq::settle(sim &s) noexcept
{
	pool.line_up(s, s.attached->credits_wanted(), s.attached->credits_level());
}

void sim_cq::serve() noexcept
{
	pool.serve([](credits::waiter &w) { static_cast<sim &>(w).step(); });
}

bool sim_cq::poll()
{
	if (cqes.empty())
		return false;
	const auto [owner, wc] = cqes.front();
	cqes.pop_front();
	owner->arrives(wc);
	serve();
	return true;
}

void sim::run_wire_first()
{
	advance(0, ~0ULL, false);
	EXPECT_TRUE(complete_one());
}

void sim::run_wire()
{
	while (!queue.empty()) {
		for (std::size_t i = 0; i < queue.size(); ++i)
			advance(i, ~0ULL, false);
		while (complete_one())
			;
	}
}

/* --- the other kernel -------------------------------------------------- */

int sim::fault(const rdma_np_fault_req &req, std::span<const rdma_np_range> ranges) noexcept
{
	std::uint64_t pages = 0;

	/* The range that says how far a lease may reach has the pages of the other one. */
	for (const rdma_np_range &r : req.flags & RDMA_NP_FAULT_LEASE ? ranges.last(1) : ranges)
		pages += ((r.addr + r.length - 1) >> page_shift) - (r.addr >> page_shift) + 1;
	EXPECT_GE(ranges.size(), 1U);
	for (const sim_region &r : regions) {
		if (r.info.region_id != req.region_id)
			continue;
		EXPECT_LE(ranges.size(), r.info.max_ranges);
		EXPECT_LE(pages, r.info.max_pages);
		EXPECT_LT(faults.size(), r.info.max_outstanding);
	}
	const bool lease = req.flags & RDMA_NP_FAULT_LEASE;
	EXPECT_FALSE(req.flags & RDMA_NP_FAULT_HOLD && !lease && std::any_of(queue.begin(), queue.end(), [](const wire &w) {
		return takes_receive(w.wr.opcode) && !w.finished;
	})) << "a hold, and what is to be done under it has to wait for a receive";
	++fault_requests;
	lease_requests += lease;
	if (lease && lease_error)
		return lease_error;
	hold_requests += req.flags & RDMA_NP_FAULT_HOLD && !lease;
	faults.push_back({req, {ranges.begin(), ranges.end()}});
	fault_log.emplace_back(ranges.begin(), ranges.end());
	return 0;
}

void sim::serve_fault(std::size_t i, rdma_np_status status)
{
	const pending_fault f = faults[i];
	faults.erase(faults.begin() + static_cast<std::ptrdiff_t>(i));
	const auto r = std::find_if(regions.begin(), regions.end(),
				    [&](const sim_region &x) { return x.info.region_id == f.req.region_id; });
	ASSERT_NE(r, regions.end());

	const bool lease = f.req.flags & RDMA_NP_FAULT_LEASE, hold = f.req.flags & RDMA_NP_FAULT_HOLD && !lease;
	if (status == RDMA_NP_OK && hold && !r->gone)
		status = chance_no_hold && dice(100) < chance_no_hold ? RDMA_NP_NOMEM : hold_answer;
	const bool lends = !lease || !chance_no_lease || dice(100) >= chance_no_lease;
	events.push_back(answer_fault(*r, f.req, f.ranges, status, lends));
}

void sim::release(std::uint64_t id) noexcept
{
	released.push_back(id);
	/* a hold ends with its region too */
	EXPECT_TRUE(end_hold(id) || std::any_of(regions.begin(), regions.end(), [](const auto &r) { return r.gone; }))
		<< "released twice";
}

void sim::forget(std::uint64_t id) noexcept
{
	for (sim_region &r : regions) {
		if (r.info.region_id != id)
			continue;
		EXPECT_TRUE(r.gone || !r.known) << "of use still";
		/* twice does no harm: two messages may say that it is gone */
		r.forgotten = true;
		for (const wire &w : queue)
			EXPECT_FALSE(w.wr.wr.rdma.rkey == r.info.table_key ||
				     w.wr.wr.rdma.rkey == r.info.read_key ||
				     w.wr.wr.rdma.rkey == r.info.write_key)
				<< "forgotten while its keys are in use";
	}
}

void sim::answer_resolve(std::size_t i, int error)
{
	const remote_key key = resolves[i];
	rdma_np_region_info info{};

	resolves.erase(resolves.begin() + static_cast<std::ptrdiff_t>(i));
	if (!error)
		error = tell_region(key.rkey, key.addr, info);
	attached->on_resolved(key, error, info);
	step();
}

void sim::deliver(std::size_t i)
{
	const rdma_np_event e = events[i];

	events.erase(events.begin() + static_cast<std::ptrdiff_t>(i));
	attached->on_event(e);
	step();
}

void sim::run_control()
{
	while (!faults.empty())
		serve_fault(0);
	while (!events.empty())
		deliver(0);
}

void sim::settle()
{
	for (unsigned rounds = 0; !quiet(); ++rounds) {
		ASSERT_LT(rounds, 10000U) << "livelock";
		run_wire();
		while (!resolves.empty())
			answer_resolve(0);
		run_control();
		if (const auto d = attached->deadline()) {
			clock = *d;
			step();
		}
	}
}

void sim::tick()
{
	if (chance_page_out && dice(100) < chance_page_out) {
		sim_region &r = regions[dice(regions.size())];
		const std::uint64_t p = dice(r.pages.size());
		if (!r.gone)
			page_out(r, p);
		return;
	}
	if (chance_rereg && dice(1000) < chance_rereg) {
		sim_region &r = regions[dice(regions.size())];
		if (!r.gone) {
			r.ending = true;
			recall_all(r);
		}
	}
	for (std::size_t i = 0; i < regions.size(); ++i)
		if (regions[i].ending && !regions[i].gone && !has_leases(regions[i]))
			replace_region(regions[i]);
	if (chance_recall && dice(1000) < chance_recall) {
		if (!holds.empty()) {
			const auto h = std::next(holds.begin(), static_cast<std::ptrdiff_t>(dice(holds.size())));
			if (h->second.lease)
				recall(h->first);
		}
		if (!dice(4)) {
			attached->age_leases();
			step();
		}
		return;
	}
	switch (dice(6)) {
	case 0:
	case 1:
		if (!queue.empty())
			advance(dice(queue.size()), 1ULL << dice(10), dice(2));
		break;
	case 2:
		complete_one();
		break;
	case 3:
		if (!faults.empty())
			serve_fault(dice(faults.size()), dice(100) < chance_busy ? RDMA_NP_BUSY : RDMA_NP_OK);
		break;
	case 4:
		if (!events.empty())
			deliver(dice(events.size()));
		break;
	default:
		if (!resolves.empty())
			answer_resolve(dice(resolves.size()));
		clock += dice(100'000);
		if (dice(4) == 0)
			step();
		break;
	}
}

/* --- application ------------------------------------------------------- */

app::app(engine_config c, std::uint64_t seed, sim_cq *cq) : world(seed), config(c)
{
	world.cq = cq;
	config.local_keys = &world.local_keys;
	config.pool = cq ? &cq->pool : &pool;
	if (config.words.empty()) {
		words.resize(engine::min_words);
		config.words = words;
	}
	eng = std::make_unique<engine>(config, world);
	world.ordered = !config.relaxed;
	world.sig_all = config.sq_sig_all;
	world.attached = eng.get();
	world.budget = config.sq_budget;
	fill = [this](std::span<std::byte> b) {
		for (std::byte &x : b)
			x = static_cast<std::byte>(world.rng());
	};
}

app_op &app::post(ibv_wr_opcode opcode, std::size_t memory, std::uint64_t offset, std::uint64_t length,
		  unsigned flags, unsigned sges)
{
	app_op o;
	o.seq = next_seq_;
	o.opcode = opcode;
	o.memory = memory;
	o.offset = offset;
	o.length = length;
	o.signaled = flags & IBV_SEND_SIGNALED || config.sq_sig_all;
	o.buffer.resize(length);
	if (opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
		fill(o.buffer);

	if (reference.size() < world.memories.size()) {
		for (std::size_t i = reference.size(); i < world.memories.size(); ++i)
			reference.push_back(world.memories[i]);
	}
	std::vector<std::byte> &ref = reference[memory];
	if (opcode == IBV_WR_RDMA_READ || is_atomic(opcode))
		o.expected.assign(ref.begin() + static_cast<std::ptrdiff_t>(offset),
				  ref.begin() + static_cast<std::ptrdiff_t>(offset + length));

	/* cut the buffer at odd places */
	request &req = list_.emplace_back();
	std::vector<ibv_sge> &list = req.sges;
	std::uint64_t start = 0;
	for (unsigned i = 0; i < sges; ++i) {
		const std::uint64_t left = length - start;
		const std::uint64_t n = i + 1 == sges ? left : world.dice(left + 1);
		list.push_back({reinterpret_cast<std::uintptr_t>(o.buffer.data()) + start,
				static_cast<std::uint32_t>(n),
				chance_local && world.dice(100) < chance_local ? local_lkey : pinned_lkey});
		if (chance_opaque && !(flags & IBV_SEND_INLINE) && world.dice(100) < chance_opaque) {
			const bool opaque = chance_opaque == 100 || world.dice(2);
			list.back().addr += opaque ? opaque_offset : iova_offset;
			list.back().lkey = opaque ? opaque_lkey : iova_lkey;
		}
		start += n;
	}
	std::vector<std::byte> &shown = req.shown;
	if (flags & IBV_SEND_INLINE) {
		shown = o.buffer;
		for (ibv_sge &s : list)
			s.addr = s.addr - reinterpret_cast<std::uintptr_t>(o.buffer.data()) +
				 reinterpret_cast<std::uintptr_t>(shown.data());
	}

	const sim_region *r = nullptr;
	for (const sim_region &x : world.regions)
		if (x.memory == &world.memories[memory])
			r = &x;
	ibv_send_wr &wr = req.wr;
	wr.wr_id = o.seq;
	wr.sg_list = list.data();
	wr.num_sge = static_cast<int>(list.size());
	wr.opcode = opcode;
	wr.send_flags = flags;
	wr.imm_data = static_cast<std::uint32_t>(o.seq); /* the simulated wire looks at it */
	std::uint64_t old = 0, value = 0;
	if (is_atomic(opcode)) {
		wr.wr.atomic.remote_addr = r->info.base + offset;
		wr.wr.atomic.rkey = r->rkey;
		std::memcpy(&old, &ref[offset], 8);
		value = old + o.seq;
		wr.wr.atomic.compare_add = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? o.seq : old;
		wr.wr.atomic.swap = value;
	} else {
		wr.wr.rdma.remote_addr = r->info.base + offset;
		wr.wr.rdma.rkey = r->rkey;
	}

	/* before the post: it may take effect inside of it */
	world.ops.push_back(std::move(o));
	last_rc = listing ? 0 : give(false);
	if (last_rc) {
		world.ops.pop_back();
		static app_op refused;
		return refused;
	}
	++next_seq_;
	++posted;
	app_op &kept = world.ops.back();
	if (is_atomic(opcode))
		std::memcpy(&ref[offset], &value, 8);
	else if (changes_memory(opcode))
		std::copy(kept.buffer.begin(), kept.buffer.end(), ref.begin() + static_cast<std::ptrdiff_t>(offset));
	return kept;
}

/* As npr_cq::post_send() does it. */
int app::give_quick(ibv_send_wr &wr, ibv_send_wr **bad, bool whole)
{
	ibv_send_wr *hot = eng->post_hot(wr, [] { return false; });

	if (!hot)
		hot = eng->post_other(wr);
	if (hot) {
		ibv_send_wr *refused;

		++world.hot_posts;
		if (world.post(hot, &refused))
			eng->hot_refused();
		return 0;
	}
	return eng->post_quick(wr) ? 0 : eng->post_send(&wr, bad, whole);
}

int app::give(bool whole)
{
	std::vector<ibv_send_wr> wrs, before;
	std::vector<std::vector<ibv_sge>> sges;
	ibv_send_wr *bad = nullptr;

	for (const request &q : list_) {
		wrs.push_back(q.wr);
		sges.push_back(q.sges);
	}
	for (std::size_t i = 0; i + 1 < wrs.size(); ++i)
		wrs[i].next = &wrs[i + 1];
	before = wrs;
	const int rc = world.quick && wrs.size() == 1 ? give_quick(wrs[0], &bad, whole) : eng->post_send(wrs.data(), &bad, whole);
	if (world.cq) {
		world.cq->settle(world);
		world.cq->serve();
	}
	for (std::size_t i = 0; i < wrs.size(); ++i) {
		EXPECT_EQ(std::memcmp(&wrs[i], &before[i], sizeof(wrs[i])), 0) << "the caller's request has changed";
		EXPECT_TRUE(std::equal(sges[i].begin(), sges[i].end(), list_[i].sges.begin(),
				       [](const ibv_sge &x, const ibv_sge &y) { return !std::memcmp(&x, &y, sizeof(x)); }))
			<< "the caller's list has changed";
		/* inline data is the caller's again, and so are the lists */
		std::fill(list_[i].shown.begin(), list_[i].shown.end(), std::byte{0xee});
		std::fill(list_[i].sges.begin(), list_[i].sges.end(), ibv_sge{0xee, 0xee, 0xee});
	}
	list_.clear();
	return rc;
}

void app::post_list(bool whole)
{
	listing = false;
	if (!list_.empty()) {
		ASSERT_EQ(give(whole), 0);
	}
}

/*
 * A WRITE must not meet a READ under way, nor, out of order, another WRITE. Under a lease it is as with pinned
 * memory: the responder's order is the application's, and a READ overtakes an atomic.
 */
bool app::conflicts(const app_op &o) const
{
	for (const app_op &x : world.ops) {
		if (x.done || x.memory != o.memory || x.offset + x.length <= o.offset ||
		    o.offset + o.length <= x.offset)
			continue;
		if (x.opcode == IBV_WR_RDMA_READ && changes_memory(o.opcode))
			return true;
		if ((config.relaxed || (config.leases && world.out_of_order)) && changes_memory(x.opcode))
			return true;
		if (config.leases && is_atomic(x.opcode))
			return true;
	}
	return false;
}

bool app::post_random(std::size_t count)
{
	if (posted >= count)
		return false;
	if (world.ops.size() >= (window ? window : config.depth))
		return false;
	app_op want;
	const std::uint64_t kind = world.dice(10);
	want.opcode = kind < 4 ? IBV_WR_RDMA_READ : kind < 9 ? IBV_WR_RDMA_WRITE : IBV_WR_SEND;
	want.memory = world.dice(world.memories.size());
	const std::uint64_t size = world.memories[want.memory].size();
	const std::uint64_t limit = std::min<std::uint64_t>(size, max_pages * page_size);
	want.length = world.dice(3) ? 1 + world.dice(std::min<std::uint64_t>(limit, 300)) : 1 + world.dice(limit);
	want.offset = world.dice(size - want.length + 1);
	if (want.opcode == IBV_WR_SEND)
		want.length = world.dice(64);
	if (want.opcode == IBV_WR_RDMA_WRITE && chance_once && world.dice(100) < chance_once) {
		static constexpr ibv_wr_opcode once[] = {IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_ATOMIC_FETCH_AND_ADD,
							 IBV_WR_ATOMIC_CMP_AND_SWP};
		want.opcode = once[world.dice(3)];
	}
	if (is_atomic(want.opcode)) {
		want.length = 8;
		want.offset = std::min(want.offset, size - 16);
		for (const sim_region &r : world.regions)
			if (r.memory == &world.memories[want.memory])
				want.offset = ((r.info.base + want.offset + 7) & ~7ULL) - r.info.base;
	}
	if (conflicts(want))
		return false;
	unsigned flags = world.dice(3) ? IBV_SEND_SIGNALED : 0;
	if (posted + 1 == count)
		flags |= IBV_SEND_SIGNALED; /* so that the end is seen */
	const sim_region &r = world.regions[want.memory];
	const bool one_page = want.length && r.page_of(want.offset) == r.page_of(want.offset + want.length - 1);
	if (want.opcode != IBV_WR_RDMA_READ && !is_atomic(want.opcode) && want.length >= 8 && want.length <= config.max_inline && one_page &&
	    unique_data && world.dice(2))
		flags |= IBV_SEND_INLINE;
	if (!world.dice(16))
		flags |= IBV_SEND_FENCE;
	post(want.opcode, want.memory, want.offset, want.length, flags,
	     want.length && !is_atomic(want.opcode) ? 1 + static_cast<unsigned>(world.dice(config.max_sge)) : 1);
	return !last_rc;
}

unsigned app::poll()
{
	ibv_wc wc;
	unsigned n = 0;

	while (!world.told.empty() || eng->poll(wc)) {
		if (!world.told.empty()) {
			wc = world.told.front();
			world.told.pop_front();
		}
		++n;
		completions.push_back(wc);
		/* what comes before it had no completion to give */
		while (!world.ops.empty() && world.ops.front().seq != wc.wr_id) {
			EXPECT_FALSE(world.ops.front().signaled)
				<< "the completion of " << world.ops.front().seq << " was lost or is late";
			world.ops.pop_front();
		}
		if (world.ops.empty()) {
			ADD_FAILURE() << "a completion too many: " << wc.wr_id;
			return n;
		}
		const app_op o = std::move(world.ops.front());
		world.ops.pop_front();
		EXPECT_EQ(wc.qp_num, config.qp_num);
		if (expect_success) {
			EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << "of " << o.seq;
			EXPECT_TRUE(o.signaled) << "nobody asked for the completion of " << o.seq;
		}
		if (wc.status != IBV_WC_SUCCESS)
			continue;
		if (o.opcode == IBV_WR_RDMA_READ) {
			EXPECT_EQ(wc.opcode, IBV_WC_RDMA_READ);
			EXPECT_EQ(wc.byte_len, o.length);
			EXPECT_TRUE(o.buffer == o.expected) << "wrong data in READ " << o.seq;
		} else if (changes_memory(o.opcode)) {
			if (is_atomic(o.opcode)) {
				EXPECT_EQ(wc.byte_len, 8U);
				EXPECT_TRUE(o.buffer == o.expected) << "wrong result of atomic " << o.seq;
			} else {
				EXPECT_EQ(wc.opcode, IBV_WC_RDMA_WRITE);
			}
			if (o.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
				EXPECT_EQ(std::count(world.immediates.begin(), world.immediates.end(),
						     std::pair<std::uint32_t, std::uint64_t>(
							     static_cast<std::uint32_t>(o.seq), o.length)),
					  1)
					<< "of " << o.seq;
			}
			for (std::uint64_t i = 0; i < o.length; ++i) {
				if (world.stamps[o.memory][o.offset + i] >= o.seq)
					continue;
				ADD_FAILURE() << "WRITE " << o.seq << " was reported but is not in memory at "
					      << o.offset + i;
				break;
			}
		}
	}
	return n;
}

void app::finish(std::uint64_t limit)
{
	while (limit-- && !(world.ops.empty() && eng->idle())) {
		world.tick();
		poll();
		if (::testing::Test::HasFailure())
			return;
		/* the last ones may be unsignaled */
		if (world.quiet() && world.told.empty() && !eng->ready() && eng->idle())
			world.ops.clear();
	}
	ASSERT_TRUE(eng->idle()) << "not finished";
}

void app::check_memory()
{
	for (std::size_t i = 0; i < reference.size(); ++i)
		EXPECT_TRUE(world.memories[i] == reference[i]) << "memory " << i << " is not what was written";
}

} // namespace npr::test
