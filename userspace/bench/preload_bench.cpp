/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the preload library adds to a work request: as objects_bench, through the pointers of verbs that it has replaced, on
 * the libibverbs of its unit tests and a kernel that leases all memory. "preload_bench CASE [COUNT]" prints the
 * time. bench/instructions.py counts instructions.
 */
#include "../tests/preload/fake_verbs.hpp"
#include "hot_kernel.hpp"
#include "registry.hpp"
#include "still_clock.hpp"

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/nprdma.h>
#include <rdma/rdma_user_ioctl.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <string_view>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

npr::bench::hot_kernel kernel;

template <class T> T &pointed_to(const ib_uverbs_attr &a)
{
	return *reinterpret_cast<T *>(static_cast<std::uintptr_t>(a.data));
}

/* A method that is called as the kernel's, of hot_kernel. Is it one of them? They do not fail. */
bool method(ib_uverbs_ioctl_hdr &h)
{
	const ibv_qp qp{};
	const ibv_mr mr{};
	std::uint32_t handle;
	int rc = 0;

	switch (std::uint32_t{h.object_id} << 16 | h.method_id) {
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_RESOLVE:
		rc = kernel.resolve(qp, -1, 0, 0, pointed_to<rdma_np_region_info>(h.attrs[3]));
		break;
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_FAULT:
		rc = kernel.fault(qp, static_cast<int>(h.attrs[1].data_s64), pointed_to<rdma_np_fault_req>(h.attrs[2]),
				  {&pointed_to<rdma_np_range>(h.attrs[3]), h.attrs[3].len / sizeof(rdma_np_range)});
		break;
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_RELEASE:
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_FORGET:
	case UVERBS_OBJECT_NP_HOLD << 16 | RDMA_NP_METHOD_HOLD_FREE:
		break;
	case UVERBS_OBJECT_NP_HOLD << 16 | RDMA_NP_METHOD_HOLD_ALLOC:
		rc = kernel.hold(0, pointed_to<rdma_np_hold_req>(h.attrs[2]), pointed_to<rdma_np_hold_info>(h.attrs[3]), handle, -1);
		h.attrs[0].data = handle;
		break;
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_QUERY_MR:
		rc = kernel.query_mr(mr, pointed_to<rdma_np_mr_info>(h.attrs[1]));
		break;
	default:
		return false;
	}
	if (rc)
		std::abort();
	return true;
}

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
	ibv_context *const context = ibv_open_device(&fake_device);
	ibv_pd pd{};
	pd.context = context;
	ibv_mr *const mr = (ibv_reg_mr)(&pd, kernel.buffer.data(), kernel.buffer.size(), IBV_ACCESS_LOCAL_WRITE);
	ibv_cq *const cq = ibv_create_cq(context, 64, nullptr, nullptr, 0);
	ibv_qp_init_attr attr{};
	attr.send_cq = attr.recv_cq = cq;
	attr.qp_type = IBV_QPT_RC;
	attr.cap = {16, 16, 4, 4, 64};
	ibv_qp *const qp = ibv_create_qp(&pd, &attr);
	if (!mr || !cq || !qp)
		return 1;
	/* The clock stands still, and the first one would be waited for in vain. */
	npr::preload::find(cq)->ctx.keeper.gives_turns = false;

	ibv_sge s{reinterpret_cast<std::uintptr_t>(kernel.buffer.data()), w.length, mr->lkey};
	ibv_send_wr wr{};
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.opcode = w.opcode;
	wr.send_flags = IBV_SEND_SIGNALED;
	wr.wr.rdma.remote_addr = npr::bench::base; /* an atomic's, too */
	(w.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? wr.wr.atomic.rkey : wr.wr.rdma.rkey) = fake::unpinned_rkey;
	ibv_recv_wr receive{};
	receive.sg_list = &s;
	receive.num_sge = 1;
	ibv_recv_wr *const r = w.receive ? &receive : nullptr;

	/* What is used again is leased, and then the kernel is asked for nothing more. */
	for (unsigned i = 0; i < 10; ++i)
		if (!one(cq, qp, &wr, r))
			return 1;
	const std::uint32_t before = kernel.leases, held = kernel.holds;
	const double begin = npr::bench::real_time();
	for (unsigned i = 0; i < times; ++i)
		if (!measured(cq, qp, &wr, r))
			return 1;
	const double spent = npr::bench::real_time() - begin;
	/* Then the figure is of something else. */
	if (kernel.leases != before || kernel.holds != held || !held || (w.opcode != IBV_WR_SEND && !before)) {
		std::fprintf(stderr, "not leased: %u and %u leases, %u and %u holds\n", before, kernel.leases.load(), held,
			     kernel.holds.load());
		return 1;
	}
	std::printf("%s: %.1f ns for each of %u\n", w.name, spent / times, times);
	return ibv_destroy_qp(qp) || ibv_destroy_cq(cq) || ibv_dereg_mr(mr) || ibv_close_device(context);
}

} // namespace

/* The program's are found before those of libc. */
extern "C" __attribute__((visibility("default"))) int ioctl(int fd, unsigned long request, ...) noexcept
{
	va_list args;

	va_start(args, request);
	void *const arg = va_arg(args, void *);
	va_end(args);
	if (request != RDMA_VERBS_IOCTL)
		return static_cast<int>(syscall(SYS_ioctl, fd, request, arg));
	return method(*static_cast<ib_uverbs_ioctl_hdr *>(arg)) ? 0 : fake_ioctl(fd, arg);
}

extern "C" __attribute__((visibility("default"))) ssize_t read(int fd, void *to, size_t size)
{
	if (size < sizeof(rdma_np_event) || !kernel.take(fd, *static_cast<rdma_np_event *>(to)))
		return syscall(SYS_read, fd, to, size);
	return sizeof(rdma_np_event);
}

extern "C" __attribute__((visibility("default"))) void *mmap(void *addr, size_t size, int prot, int flags, int fd,
							      off_t offset) noexcept
{
	if (fd >= 0 && size == RDMA_NP_PAGE_SIZE && prot == PROT_READ)
		return kernel.map_posted(fd);
	return reinterpret_cast<void *>(syscall(SYS_mmap, addr, size, prot, flags, fd, offset));
}

/* What mmap() has given for a channel stays. */
extern "C" __attribute__((visibility("default"))) int munmap(void *addr, size_t size) noexcept
{
	return addr == &kernel.posted ? 0 : static_cast<int>(syscall(SYS_munmap, addr, size));
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
