/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the engine adds to a work request: posting and polling it, one at a time, beside an HCA that does
 * all at once. "engine_bench CASE [COUNT]" prints the time; the instructions are what callgrind collects
 * in measured(), divided by COUNT:
 *
 *	valgrind --tool=callgrind --callgrind-out-file=/dev/null --toggle-collect=measured engine_bench read 1000
 *
 * The memory that a READ brings is not written: it costs what the CPU does, with data in its cache.
 */
#include "protocol/engine.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

namespace {

constexpr std::uint32_t words_lkey = 7, lkey = 8;
constexpr std::uint32_t first_rkey = 0x100, pinned_rkey = 0x500;
constexpr std::uint64_t resident = RDMA_NP_WORD_READABLE | RDMA_NP_WORD_WRITABLE;

/* Completes what is posted, in order, with all pages resident. The peer grants each lease that is asked for. */
class hca final : public npr::backend {
public:
	int post(ibv_send_wr *chain, ibv_send_wr **) noexcept override
	{
		for (const ibv_send_wr *w = chain; w; w = w->next) {
			if (w->num_sge && w->sg_list[0].lkey == words_lkey) {
				auto *word = reinterpret_cast<std::uint64_t *>(static_cast<std::uintptr_t>(w->sg_list[0].addr));
				for (std::uint32_t n = w->sg_list[0].length / 8; n; --n)
					*word++ = resident;
			}
			if (w->send_flags & IBV_SEND_SIGNALED)
				done[count++] = w->wr_id;
		}
		return 0;
	}
	int fault(const rdma_np_fault_req &req, std::span<const rdma_np_range> ranges) noexcept override
	{
		if (!(req.flags & RDMA_NP_FAULT_LEASE))
			std::abort();
		granted = {};
		granted.type = RDMA_NP_EVENT_FAULT;
		granted.cookie = req.cookie;
		granted.region_id = req.region_id;
		granted.hold_id = req.region_id;
		granted.lease_addr = ranges.back().addr;
		granted.lease_length = ranges.back().length;
		return 0;
	}
	void release(std::uint64_t) noexcept override {}
	void forget(std::uint64_t) noexcept override {}
	void resolve(const npr::remote_key &) noexcept override { std::abort(); }
	bool is_local(std::uint32_t) noexcept override { return false; }
	bool is_plain(std::uint32_t) noexcept override { return true; }
	bool local_wanted() noexcept override { return false; }
	int narrow_local(const ibv_sge &, bool, std::uint32_t &, ibv_sge &) noexcept override { return no_hold; }
	int hold_local(ibv_sge &, bool, std::uint32_t &, npr::cpu_view &, npr::local_ticket &) noexcept override
	{
		return no_hold;
	}
	void free_local(std::uint32_t) noexcept override {}
	void fail_qp() noexcept override { std::abort(); }
	bool connected() noexcept override { return true; }
	/* A constant: what the clock costs is not the engine's. */
	npr::nanoseconds now() noexcept override { return 1; }
	npr::nanoseconds recently() noexcept override { return 1; }

	rdma_np_event granted{};
	std::uint64_t done[64];
	unsigned count = 0;
};

/* @wr is a list. As npr_cq::post_send() and npr_cq::poll() do it. */
extern "C" [[gnu::noinline]] bool measured(npr::engine &e, hca &h, ibv_send_wr *wr)
{
	ibv_send_wr *bad;
	ibv_wc wc{}, out;

	if (e.post_send(wr, &bad))
		return false;
	while (h.count) {
		const unsigned n = h.count;
		h.count = 0;
		for (unsigned i = 0; i < n; ++i) {
			wc.wr_id = h.done[i];
			wc.opcode = IBV_WC_SEND;
			if (e.quick_cqe(wc) != npr::engine::quick_end::no)
				continue;
			if (!e.on_cqe(wc))
				return false;
			if (!e.calm())
				e.step();
			while (e.poll(out))
				if (out.status != IBV_WC_SUCCESS)
					return false;
		}
	}
	return e.idle();
}

struct work {
	const char *name;
	ibv_wr_opcode opcode;
	std::uint32_t rkey, keys; /* the first one and how many in turn */
	std::uint32_t offset, length;
	unsigned list;
	bool leased = false;
};

constexpr work cases[] = {
	{"read", IBV_WR_RDMA_READ, first_rkey, 1, 0, 4096, 1},
	{"write", IBV_WR_RDMA_WRITE, first_rkey, 1, 0, 4096, 1},
	{"read-unaligned", IBV_WR_RDMA_READ, first_rkey, 1, 40, 4096, 1},
	{"read-keys", IBV_WR_RDMA_READ, first_rkey, 4, 0, 4096, 1},
	{"read-list", IBV_WR_RDMA_READ, first_rkey, 1, 0, 4096, 8},
	{"read-leased", IBV_WR_RDMA_READ, first_rkey, 1, 0, 4096, 1, true},
	{"write-leased", IBV_WR_RDMA_WRITE, first_rkey, 1, 0, 4096, 1, true},
	{"send", IBV_WR_SEND, 0, 1, 0, 64, 1},
	{"read-pinned", IBV_WR_RDMA_READ, pinned_rkey, 1, 0, 4096, 1},
};

int run(const work &w, unsigned count)
{
	std::vector<std::uint64_t> words(npr::engine::min_words);
	std::vector<std::byte> buffer(w.length);
	npr::engine_config c;
	npr::credits pool(256);
	hca h;

	c.depth = c.sq_budget = 64;
	c.pool = &pool;
	c.max_sge = 4;
	c.local = true;
	c.leases = w.leased;
	c.tag = 0x12345678;
	c.words = words;
	c.words_lkey = words_lkey;
	npr::engine e(c, h);

	rdma_np_region_info info{};
	info.length = 1 << 20;
	info.access = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
	info.signature = 0x5a17c0de9e3779b9ULL;
	info.page_shift = npr::page_shift;
	info.unit_shift = npr::unit_shift;
	info.read_order = RDMA_NP_READ_IN_ORDER;
	info.max_pages = RDMA_NP_MAX_PAGES;
	info.max_ranges = RDMA_NP_MAX_RANGES;
	info.max_outstanding = 16;
	for (std::uint32_t k = 0; k < 4; ++k) {
		info.region_id = 1 + k;
		info.base = std::uint64_t{1 + k} << 30;
		info.read_addr = info.write_addr = info.base + (1ULL << 40);
		info.table_addr = 1ULL << 50;
		info.table_key = 0x1000 + k;
		info.read_key = 0x2000 + k;
		info.write_key = 0x3000 + k;
		e.resolve_begins();
		if (e.resolve_ended(first_rkey + k, 0, info, 1))
			return 1;
	}
	e.resolve_begins();
	if (e.resolve_ended(pinned_rkey, -EACCES, info, 1) != -EACCES)
		return 1;

	std::vector<ibv_send_wr> wrs(w.keys * w.list);
	ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer.data()), w.length, lkey};
	for (std::uint32_t i = 0; i < wrs.size(); ++i) {
		const std::uint32_t k = i / w.list;
		ibv_send_wr &wr = wrs[i];
		wr.wr_id = i;
		wr.next = (i + 1) % w.list ? &wrs[i + 1] : nullptr;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = w.opcode;
		wr.send_flags = wr.next ? 0 : IBV_SEND_SIGNALED;
		wr.wr.rdma.rkey = w.rkey + k;
		wr.wr.rdma.remote_addr = (std::uint64_t{1 + k} << 30) + w.offset;
	}
	/* Words and pages of memory are known, and touched; what is asked for is leased. */
	for (std::uint32_t k = 0; k < w.keys; ++k)
		if (!measured(e, h, &wrs[k * w.list]))
			return 1;
	if (w.leased) {
		/* the request that asks is not done with its answer */
		if (measured(e, h, &wrs[0]))
			return 1;
		e.on_event(h.granted);
		if (e.stats().leases != 1)
			return 1;
	}

	const auto begin = std::chrono::steady_clock::now();
	for (unsigned i = 0; i < count; ++i)
		if (!measured(e, h, &wrs[i % w.keys * w.list]))
			return 1;
	const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
	std::printf("%s: %.1f ns for each of %u\n", w.name, spent.count() / count, count * w.list);
	return 0;
}

} // namespace

int main(int argc, char **argv)
{
	for (const work &w : cases)
		if (argc > 1 && std::string_view(argv[1]) == w.name)
			return run(w, argc > 2 ? static_cast<unsigned>(std::strtoul(argv[2], nullptr, 0)) : 1'000'000);
	std::fprintf(stderr, "usage: %s CASE [COUNT]\ncases:", argv[0]);
	for (const work &w : cases)
		std::fprintf(stderr, " %s", w.name);
	std::fputc('\n', stderr);
	return 64;
}
