/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the library adds to a work request: posting and polling it, one at a time, beside the HCA and the kernel of the unit
 * tests. Local buffers are in an unpinned region, and all memory is hot, so both sides are leased.
 * "objects_bench CASE [COUNT]" prints the time. bench/instructions.py counts instructions.
 */
#include "fake_kernel.hpp"
#include "object/cq.hpp"
#include "still_clock.hpp"

#include <cstdio>
#include <cstdlib>
#include <gtest/gtest.h>
#include <memory>
#include <string_view>
#include <vector>

namespace {

constexpr std::uint32_t lkey = 0x800, plain_lkey = 0x900, mr_handle = 8;
constexpr std::uint32_t rkey = 0x100;
constexpr std::uint64_t base = 1 << 30, length = 1 << 20;

struct work {
	const char *name;
	ibv_wr_opcode opcode;
	std::uint32_t length, lkey;
	bool receive = false;
};

constexpr work cases[] = {
	{"read", IBV_WR_RDMA_READ, 4096, lkey},
	{"write", IBV_WR_RDMA_WRITE, 4096, lkey},
	{"send", IBV_WR_SEND, 64, lkey},
	{"atomic", IBV_WR_ATOMIC_FETCH_AND_ADD, 8, lkey},
	{"receive", IBV_WR_SEND, 64, lkey, true},
	{"read-to-pinned", IBV_WR_RDMA_READ, 4096, plain_lkey},
	{"send-of-pinned", IBV_WR_SEND, 64, plain_lkey},
};

/* One request, until its completion is there. */
inline bool one(npr_cq &cq, npr_qp &qp, ibv_send_wr *wr, ibv_recv_wr *receive)
{
	ibv_send_wr *bad;
	ibv_recv_wr *bad_receive;
	ibv_wc wc;
	int n;

	if (receive ? cq.post_recv(qp, receive, &bad_receive) : cq.post_send(qp, wr, &bad))
		return false;
	do
		n = cq.poll(1, &wc);
	while (!n);
	return n == 1 && wc.status == IBV_WC_SUCCESS;
}

extern "C" [[gnu::noinline]] bool measured(npr_cq &cq, npr_qp &qp, ibv_send_wr *wr, ibv_recv_wr *receive)
{
	return one(cq, qp, wr, receive);
}

int run(const work &w, unsigned times)
{
	std::vector<std::byte> buffer(length);
	npr::fake::hca device;
	device.receives_come = true;
	device.records = false;
	device.moves = false;
	device.regions[mr_handle] = {reinterpret_cast<std::uintptr_t>(buffer.data()), buffer.size(), 0, true};
	device.far.all_in(device.far.add_region(base, length, rkey), true);
	ibv_context &verbs = device.verbs.context;
	ibv_pd pd{};
	pd.context = &verbs;
	npr::fake::cq verbs_cq(device, 4096);
	npr::fake::qp verbs_qp(device, 17, verbs_cq.base(), verbs_cq.base());
	verbs_qp.base().pd = &pd;

	auto owned = std::make_unique<npr::fake::fake_kernel>(device);
	npr::fake::fake_kernel &kernel = *owned;
	kernel.grants = true;
	npr::local_regions &regions = npr::local_regions::of(&verbs);
	ibv_mr mr{};
	mr.lkey = lkey;
	mr.handle = mr_handle;
	regions.add(mr);
	npr::provider provider(verbs);
	provider.reg_mr = [](ibv_pd *of_pd, void *addr, size_t n, std::uint64_t iova, unsigned access) -> ibv_mr * {
		npr::fake::mr *const m = npr::fake::of(of_pd->context).register_memory(of_pd, addr, n, iova, access);
		return m ? &m->verbs : nullptr;
	};
	provider.dereg_mr = [](ibv_mr *v) {
		npr::fake::of(v->context).deregister(&npr::fake::of(v));
		return 0;
	};
	npr_context ctx(&verbs, std::move(owned), 0, provider);
	/* The clock stands still, and the first one would be waited for in vain. */
	ctx.keeper.gives_turns = false;
	npr_cq cq(ctx, verbs_cq.base(), 1024);
	npr::qp_params params{};
	params.depth = params.budget = 128;
	params.max_sge = 4;
	params.cache_slots = 64;
	params.receives = 128;
	params.receive_sge = 4;
	npr_qp &qp = *cq.attach(&verbs_qp.base(), params);

	ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer.data()), w.length, w.lkey};
	ibv_send_wr wr{};
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.opcode = w.opcode;
	wr.send_flags = IBV_SEND_SIGNALED;
	if (w.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.remote_addr = base;
	} else {
		wr.wr.rdma.rkey = rkey;
		wr.wr.rdma.remote_addr = base;
	}
	ibv_recv_wr receive{};
	receive.sg_list = &s;
	receive.num_sge = 1;
	ibv_recv_wr *const r = w.receive ? &receive : nullptr;

	/* What is used again is leased, and then the kernel is asked for nothing more. */
	for (unsigned i = 0; i < 10; ++i)
		if (!one(cq, qp, &wr, r))
			return 1;
	const auto leases = [&] { return kernel.leases_asked.load(); };
	const auto holds = [&] { return kernel.local_leases_asked + kernel.freed; };
	const unsigned before = leases(), held = holds();
	const double begin = npr::bench::real_time();
	for (unsigned i = 0; i < times; ++i)
		if (!measured(cq, qp, &wr, r))
			return 1;
	const double spent = npr::bench::real_time() - begin;
	/* Then the figure is of something else. */
	if (leases() != before || holds() != held || (w.opcode != IBV_WR_SEND && qp.engine.stats().leases != 1)) {
		std::fprintf(stderr, "not leased: %u and %u leases, %u and %u holds\n", before, leases(), held, holds());
		return 1;
	}
	if (testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed())
		return 1;
	std::printf("%s: %.1f ns for each of %u\n", w.name, spent / times, times);
	if (cq.detach(&qp))
		return 1;
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
