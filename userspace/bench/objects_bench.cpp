/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the library adds to a work request: posting and polling it, one at a time, beside a provider whose HCA
 * does all at once. Local buffers are in an unpinned region, and all memory is hot, so both sides are leased.
 * "objects_bench CASE [COUNT]" prints the time. bench/instructions.py counts instructions.
 */
#include "hot_kernel.hpp"
#include "object/cq.hpp"
#include "still_clock.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

using npr::bench::base;

namespace {

constexpr std::uint32_t words_lkey = 7, lkey = 0x800, plain_lkey = 0x900, mr_handle = 8;
constexpr std::uint32_t rkey = 0x100;

/* Completions that are there, of the one queue pair. */
ibv_wc done[256];
unsigned count;

extern "C" [[gnu::noinline]] int provider_post(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **)
{
	for (; wr; wr = wr->next) {
		if (wr->num_sge && wr->sg_list[0].lkey == words_lkey)
			for (std::uint32_t n = 0; n < wr->sg_list[0].length / 8; ++n)
				reinterpret_cast<std::uint64_t *>(static_cast<std::uintptr_t>(wr->sg_list[0].addr))[n] =
					RDMA_NP_WORD_READABLE | RDMA_NP_WORD_WRITABLE;
		if (wr->send_flags & IBV_SEND_SIGNALED) {
			done[count] = {};
			done[count].wr_id = wr->wr_id;
			done[count].qp_num = qp->qp_num;
			done[count++].opcode = IBV_WC_SEND;
		}
	}
	return 0;
}

extern "C" [[gnu::noinline]] int provider_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **)
{
	done[count] = {};
	done[count].wr_id = wr->wr_id;
	done[count].qp_num = qp->qp_num;
	done[count++].opcode = IBV_WC_RECV;
	return 0;
}

extern "C" [[gnu::noinline]] int provider_poll(ibv_cq *, int n, ibv_wc *wc)
{
	const int got = std::min(n, static_cast<int>(count));

	std::copy_n(done, got, wc);
	count -= static_cast<unsigned>(got);
	return got;
}

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
	ibv_context verbs{};
	verbs.cmd_fd = -1;
	verbs.ops.post_send = provider_post;
	verbs.ops.post_recv = provider_recv;
	verbs.ops.poll_cq = provider_poll;
	ibv_cq verbs_cq{};
	verbs_cq.context = &verbs;
	verbs_cq.cqe = 4096;
	ibv_qp verbs_qp{};
	verbs_qp.context = &verbs;
	verbs_qp.qp_num = 17;
	verbs_qp.send_cq = verbs_qp.recv_cq = &verbs_cq;

	auto owned = std::make_unique<npr::bench::hot_kernel>();
	npr::bench::hot_kernel &kernel = *owned;
	npr::local_regions &regions = npr::local_regions::of(&verbs);
	ibv_mr mr{};
	mr.lkey = lkey;
	mr.handle = mr_handle;
	regions.add(mr);
	npr::provider provider(verbs);
	provider.reg_mr = [](ibv_pd *, void *, size_t, std::uint64_t, unsigned) {
		static ibv_mr words{};
		words.lkey = words_lkey;
		return &words;
	};
	provider.dereg_mr = [](ibv_mr *) { return 0; };
	npr_context ctx(&verbs, std::move(owned), 0, provider);
	/* The clock stands still, and the first one would be waited for in vain. */
	ctx.keeper.gives_turns = false;
	npr_cq cq(ctx, &verbs_cq, 1024);
	npr::qp_params params{};
	params.depth = params.budget = 128;
	params.max_sge = 4;
	params.cache_slots = 64;
	params.receives = 128;
	params.receive_sge = 4;
	npr_qp &qp = *cq.attach(&verbs_qp, params);

	ibv_sge s{reinterpret_cast<std::uintptr_t>(kernel.buffer.data()), w.length, w.lkey};
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
	const std::uint32_t leases = kernel.leases, holds = kernel.holds;
	const double begin = npr::bench::real_time();
	for (unsigned i = 0; i < times; ++i)
		if (!measured(cq, qp, &wr, r))
			return 1;
	const double spent = npr::bench::real_time() - begin;
	/* Then the figure is of something else. */
	if (kernel.leases != leases || kernel.holds != holds || (w.opcode != IBV_WR_SEND && qp.engine.stats().leases != 1)) {
		std::fprintf(stderr, "not leased: %u and %u leases, %u and %u holds\n", leases,
			     kernel.leases.load(), holds, kernel.holds.load());
		return 1;
	}
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
