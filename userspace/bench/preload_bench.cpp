/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the preload library adds to a work request: as objects_bench, through the pointers of verbs that it has replaced, on
 * the libibverbs of its unit tests and a kernel that leases all memory. "preload_bench CASE [COUNT]" prints the
 * time. bench/instructions.py counts instructions.
 */
#include "../tests/preload/fake_verbs.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/nprdma.h>
#include <rdma/rdma_user_ioctl.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <string_view>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

constexpr std::uint64_t base = 1ULL << 30, length = 1ULL << 20;
std::vector<std::byte> buffer(1 << 20);

/* The kernel's side of channels, which are eventfds here; their word is in memory of the program. */
std::mutex mutex;
std::map<int, std::deque<rdma_np_event>> events;
alignas(RDMA_NP_PAGE_SIZE) std::array<std::array<std::atomic<std::uint64_t>, RDMA_NP_PAGE_SIZE / 8>, 64> posted;
std::atomic<std::uint32_t> leases{0}, holds{0};

template <class T> T &pointed_to(const ib_uverbs_attr &a)
{
	return *reinterpret_cast<T *>(static_cast<std::uintptr_t>(a.data));
}

void fault(const ib_uverbs_ioctl_hdr &h)
{
	const int channel = static_cast<int>(h.attrs[1].data_s64);
	const auto &req = pointed_to<rdma_np_fault_req>(h.attrs[2]);
	const std::size_t ranges = h.attrs[3].len / sizeof(rdma_np_range);
	rdma_np_event e{};

	e.type = RDMA_NP_EVENT_FAULT;
	e.cookie = req.cookie;
	e.region_id = req.region_id;
	e.nr_words = 1;
	e.words[0] = RDMA_NP_WORD_READABLE | RDMA_NP_WORD_WRITABLE;
	e.hold_id = req.flags & RDMA_NP_FAULT_HOLD ? ++holds : 0;
	if (req.flags & RDMA_NP_FAULT_LEASE) {
		const rdma_np_range &all = (&pointed_to<rdma_np_range>(h.attrs[3]))[ranges - 1];

		e.lease_addr = all.addr;
		e.lease_length = all.length;
		e.lease_key = 0x1000 + ++leases;
	}
	const std::lock_guard lock(mutex);
	events[channel].push_back(e);
	posted[static_cast<std::size_t>(channel)][0].fetch_add(1);
	(void)eventfd_write(channel, 1);
}

/* Is it done? */
bool method(ib_uverbs_ioctl_hdr &h)
{
	switch (std::uint32_t{h.object_id} << 16 | h.method_id) {
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_RESOLVE:
		pointed_to<rdma_np_region_info>(h.attrs[3]) = {
			1, base, length, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC, 3, 1, 2,
			base, base, 0, 0x5a17c0de9e3779b9, 12, 6, RDMA_NP_READ_IN_ORDER, 0, RDMA_NP_MAX_PAGES,
			RDMA_NP_MAX_RANGES, 16, {}};
		return true;
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_FAULT:
		fault(h);
		return true;
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_RELEASE:
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_FORGET:
		return true;
	case UVERBS_OBJECT_NP_HOLD << 16 | RDMA_NP_METHOD_HOLD_ALLOC:
		pointed_to<rdma_np_hold_info>(h.attrs[3]) = {pointed_to<rdma_np_hold_req>(h.attrs[2]).addr, fake::held_lkey, 0};
		h.attrs[0].data = ++holds;
		return true;
	case UVERBS_OBJECT_NP_HOLD << 16 | RDMA_NP_METHOD_HOLD_FREE:
		return true;
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_QUERY_MR:
		pointed_to<rdma_np_mr_info>(h.attrs[1]) = {};
		pointed_to<rdma_np_mr_info>(h.attrs[1]).base = reinterpret_cast<std::uintptr_t>(buffer.data());
		pointed_to<rdma_np_mr_info>(h.attrs[1]).length = buffer.size();
		return true;
	default:
		return false;
	}
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
	ibv_mr *const mr = (ibv_reg_mr)(&pd, buffer.data(), buffer.size(), IBV_ACCESS_LOCAL_WRITE);
	ibv_cq *const cq = ibv_create_cq(context, 64, nullptr, nullptr, 0);
	ibv_qp_init_attr attr{};
	attr.send_cq = attr.recv_cq = cq;
	attr.qp_type = IBV_QPT_RC;
	attr.cap = {16, 16, 4, 4, 64};
	ibv_qp *const qp = ibv_create_qp(&pd, &attr);
	if (!mr || !cq || !qp)
		return 1;

	ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer.data()), w.length, mr->lkey};
	ibv_send_wr wr{};
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.opcode = w.opcode;
	wr.send_flags = IBV_SEND_SIGNALED;
	wr.wr.rdma.remote_addr = base; /* an atomic's, too */
	(w.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? wr.wr.atomic.rkey : wr.wr.rdma.rkey) = fake::unpinned_rkey;
	ibv_recv_wr receive{};
	receive.sg_list = &s;
	receive.num_sge = 1;
	ibv_recv_wr *const r = w.receive ? &receive : nullptr;

	/* Until what is used again is leased. */
	for (unsigned i = 0; i < 5; ++i) {
		if (!one(cq, qp, &wr, r))
			return 1;
		std::this_thread::sleep_for(std::chrono::milliseconds(25));
	}
	const std::uint32_t before = leases, held = holds;
	const auto begin = std::chrono::steady_clock::now();
	for (unsigned i = 0; i < times; ++i)
		if (!measured(cq, qp, &wr, r))
			return 1;
	const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
	/* Then the figure is of something else. */
	if (leases != before || holds != held || !held || (w.opcode != IBV_WR_SEND && !before)) {
		std::fprintf(stderr, "not leased: %u and %u leases, %u and %u holds\n", before, leases.load(), held, holds.load());
		return 1;
	}
	std::printf("%s: %.1f ns for each of %u\n", w.name, spent.count() / times, times);
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
	const std::lock_guard lock(mutex);
	const auto it = events.find(fd);

	if (it == events.end() || it->second.empty() || size < sizeof(rdma_np_event))
		return syscall(SYS_read, fd, to, size);
	std::memcpy(to, &it->second.front(), sizeof(rdma_np_event));
	it->second.pop_front();
	return sizeof(rdma_np_event);
}

extern "C" __attribute__((visibility("default"))) void *mmap(void *addr, size_t size, int prot, int flags, int fd,
							      off_t offset) noexcept
{
	if (fd >= 0 && static_cast<std::size_t>(fd) < posted.size() && size == RDMA_NP_PAGE_SIZE && prot == PROT_READ)
		return &posted[static_cast<std::size_t>(fd)];
	return reinterpret_cast<void *>(syscall(SYS_mmap, addr, size, prot, flags, fd, offset));
}

/* What mmap() has given for a channel stays. */
extern "C" __attribute__((visibility("default"))) int munmap(void *addr, size_t size) noexcept
{
	const auto p = reinterpret_cast<std::uintptr_t>(addr), begin = reinterpret_cast<std::uintptr_t>(&posted);

	return p - begin < sizeof(posted) ? 0 : static_cast<int>(syscall(SYS_munmap, addr, size));
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
