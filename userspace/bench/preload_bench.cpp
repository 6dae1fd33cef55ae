/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the preload library adds to a work request: as objects_bench, through the pointers of verbs that it has replaced, on
 * the libibverbs of its unit tests. "preload_bench CASE [COUNT]" prints the time. bench/instructions.py counts instructions.
 */
#include "../tests/preload/fake_verbs.hpp"
#include "registry.hpp"
#include "still_clock.hpp"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <gtest/gtest.h>
#include <string_view>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

namespace {

/* That of the one device. */
fake::fake_kernel *kernel;

struct work {
	const char *name;
	ibv_wr_opcode opcode;
	std::uint32_t length;
	bool receive = false;
};

constexpr work cases[] = {
	{"read", IBV_WR_RDMA_READ, 4096},
	{"write", IBV_WR_RDMA_WRITE, 4096},
	{"send", IBV_WR_SEND, 64},
	{"atomic", IBV_WR_ATOMIC_FETCH_AND_ADD, 8},
	{"receive", IBV_WR_SEND, 64, true},
};

/* One request, until its completion is there. */
inline bool one(ibv_cq *cq, ibv_qp *qp, ibv_send_wr *wr, ibv_recv_wr *receive)
{
	ibv_send_wr *bad;
	ibv_recv_wr *bad_receive;
	ibv_wc wc;
	int n;

	if (receive ? ibv_post_recv(qp, receive, &bad_receive) : ibv_post_send(qp, wr, &bad))
		return false;
	do
		n = ibv_poll_cq(cq, 1, &wc);
	while (!n);
	return n == 1 && wc.status == IBV_WC_SUCCESS;
}

extern "C" [[gnu::noinline]] bool measured(ibv_cq *cq, ibv_qp *qp, ibv_send_wr *wr, ibv_recv_wr *receive)
{
	return one(cq, qp, wr, receive);
}

int run(const work &w, unsigned times)
{
	std::vector<std::byte> buffer(1 << 20);
	ibv_context *const context = ibv_open_device(&fake_device);
	fake::context &device = fake::opened(context);
	kernel = &device.kernel;
	ibv_pd pd{};
	pd.context = context;
	ibv_mr *const mr = (ibv_reg_mr)(&pd, buffer.data(), buffer.size(), IBV_ACCESS_LOCAL_WRITE);
	ibv_cq *const cq = ibv_create_cq(context, 64, nullptr, nullptr, 0);
	ibv_qp_init_attr attr{};
	attr.send_cq = attr.recv_cq = cq;
	attr.qp_type = IBV_QPT_RC;
	attr.cap = {16, 16, 4, 4, 64};
	ibv_qp *const qp = ibv_create_qp(&pd, &attr);
	if (!mr || !cq || !qp)
		return 1;
	/* All memory is hot, here and there, and is leased to who asks. What the HCA does with it is not the library's. */
	{
		const std::lock_guard lock(device.mutex);
		device.regions.at(mr->handle).leased = true;
		device.far.all_in(device.region, true);
		kernel->grants = true;
		device.moves = false;
	}
	/* The clock stands still, and the first one would be waited for in vain. */
	npr::preload::find(cq)->ctx.keeper.gives_turns = false;

	ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer.data()), w.length, mr->lkey};
	ibv_send_wr wr{};
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.opcode = w.opcode;
	wr.send_flags = IBV_SEND_SIGNALED;
	wr.wr.rdma.remote_addr = fake::unpinned_base; /* an atomic's, too */
	(w.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? wr.wr.atomic.rkey : wr.wr.rdma.rkey) = fake::unpinned_rkey;
	ibv_recv_wr receive{};
	receive.sg_list = &s;
	receive.num_sge = 1;
	ibv_recv_wr *const r = w.receive ? &receive : nullptr;

	/* What is used again is leased, and then the kernel is asked for nothing more. */
	for (unsigned i = 0; i < 10; ++i)
		if (!one(cq, qp, &wr, r))
			return 1;
	const auto leases = [] { return kernel->leases_asked.load(); };
	const auto holds = [] { return kernel->local_leases_asked + kernel->freed; };
	const unsigned before = leases(), held = holds();
	const double begin = npr::bench::real_time();
	for (unsigned i = 0; i < times; ++i)
		if (!measured(cq, qp, &wr, r))
			return 1;
	const double spent = npr::bench::real_time() - begin;
	/* Then the figure is of something else. */
	if (leases() != before || holds() != held || !held || (w.opcode != IBV_WR_SEND && !before)) {
		std::fprintf(stderr, "not leased: %u and %u leases, %u and %u holds\n", before, leases(), held, holds());
		return 1;
	}
	if (testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed())
		return 1;
	std::printf("%s: %.1f ns for each of %u\n", w.name, spent / times, times);
	return ibv_destroy_qp(qp) || ibv_destroy_cq(cq) || ibv_dereg_mr(mr) || ibv_close_device(context);
}

} // namespace

/* The program's are found before those of libc. */
extern "C" __attribute__((visibility("default"))) void *mmap(void *addr, size_t size, int prot, int flags, int fd,
							      off_t offset) noexcept
{
	if (kernel && fd >= 0 && size == RDMA_NP_PAGE_SIZE && prot == PROT_READ)
		return kernel->map_posted(fd);
	return reinterpret_cast<void *>(syscall(SYS_mmap, addr, size, prot, flags, fd, offset));
}

/* What mmap() has given for a channel stays. */
extern "C" __attribute__((visibility("default"))) int munmap(void *addr, size_t size) noexcept
{
	return size == RDMA_NP_PAGE_SIZE ? 0 : static_cast<int>(syscall(SYS_munmap, addr, size));
}

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
