// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The demo's responder: an ordinary verbs application with more registered
 * memory than the machine has. It uses libibverbs and one access flag, nothing
 * of libnprdma. While a peer reads and writes the region, a thread here checks
 * and changes pages of it as any program does with its memory.
 *
 * Started by nprdma-demo, which passes the shared state and a socket to the peer.
 */
#include "guest.hpp"
#include "messages.hpp"
#include "mr_counters.hpp"
#include "page.hpp"
#include "rc.hpp"
#include "shared.hpp"

#include <linux/capability.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#ifndef IBV_ACCESS_UNPINNED
#define IBV_ACCESS_UNPINNED (1 << 10)
#endif

namespace
{

using namespace demo;
using clock_type = std::chrono::steady_clock;

constexpr int remote_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

constexpr const char *own_status = "/proc/self/status";

/*
 * Be a process that may lock as much memory as the machine has, and not more:
 * root without CAP_IPC_LOCK. With it, pinning too much would end in the OOM killer.
 */
void limit_memlock()
{
	const rlim_t all = guest::number_of("/proc/meminfo", "MemTotal") << 10;
	const rlimit limit = {all, all};
	__user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
	__user_cap_data_struct data[2]{};

	if (setrlimit(RLIMIT_MEMLOCK, &limit))
		rc::fail(errno, "RLIMIT_MEMLOCK");
	if (syscall(SYS_capget, &header, data))
		rc::fail(errno, "capget");
	data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective &= ~CAP_TO_MASK(CAP_IPC_LOCK);
	data[CAP_TO_INDEX(CAP_IPC_LOCK)].permitted &= ~CAP_TO_MASK(CAP_IPC_LOCK);
	if (syscall(SYS_capset, &header, data))
		rc::fail(errno, "capset");
	std::printf("responder: may lock %" PRIu64 " MiB, all the memory there is\n",
		    static_cast<std::uint64_t>(all) >> 20);
}

/* The region's memory. */
class memory
{
public:
	memory(std::size_t bytes, bool huge_pages) : bytes_(bytes)
	{
		addr_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (addr_ == MAP_FAILED)
			rc::fail(errno, "mmap");
		if (huge_pages && madvise(addr_, bytes, MADV_HUGEPAGE))
			rc::fail(errno, "MADV_HUGEPAGE");
	}
	memory(const memory &) = delete;
	memory &operator=(const memory &) = delete;
	~memory() { munmap(addr_, bytes_); }

	[[nodiscard]] void *addr() const noexcept { return addr_; }
	[[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
	[[nodiscard]] page_data page(std::size_t nr) const noexcept
	{
		return page_data(static_cast<std::uint64_t *>(addr_) + nr * page_words, page_words);
	}

	/* True for each page that is in swap now, and not in memory as a page of ours. */
	[[nodiscard]] std::vector<bool> swapped() const
	{
		constexpr std::uint64_t is_swapped = 1ULL << 62;
		std::vector<bool> out(bytes_ / page_size);
		std::vector<std::uint64_t> chunk(16384);
		std::ifstream pagemap("/proc/self/pagemap", std::ios::binary);

		pagemap.seekg(static_cast<std::streamoff>(reinterpret_cast<std::uintptr_t>(addr_) /
							  page_size * sizeof(std::uint64_t)));
		for (std::size_t at = 0; at < out.size();) {
			const std::size_t n = std::min(chunk.size(), out.size() - at);

			if (!pagemap.read(reinterpret_cast<char *>(chunk.data()),
					  static_cast<std::streamsize>(n * sizeof(chunk[0]))))
				rc::fail(errno ? errno : EIO, "/proc/self/pagemap");
			for (std::size_t i = 0; i < n; i++)
				out[at + i] = chunk[i] & is_swapped;
			at += n;
		}
		return out;
	}

	/*
	 * Page out what is still there. Pages that a CPU has only just seen wait in a
	 * list of that CPU, which MADV_PAGEOUT empties where it runs: it has to run on each.
	 */
	[[nodiscard]] std::vector<bool> page_out() const
	{
		const auto deadline = clock_type::now() + std::chrono::seconds(20);
		cpu_set_t all;

		if (sched_getaffinity(0, sizeof(all), &all))
			rc::fail(errno, "sched_getaffinity");
		for (;;) {
			for (std::size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
				cpu_set_t one;

				if (!CPU_ISSET(cpu, &all))
					continue;
				CPU_ZERO(&one);
				CPU_SET(cpu, &one);
				if (sched_setaffinity(0, sizeof(one), &one))
					rc::fail(errno, "sched_setaffinity");
				if (madvise(addr_, bytes_, MADV_PAGEOUT))
					rc::fail(errno, "MADV_PAGEOUT");
			}
			if (sched_setaffinity(0, sizeof(all), &all))
				rc::fail(errno, "sched_setaffinity");
			std::vector<bool> out = swapped();
			if (count(out) == out.size() || clock_type::now() > deadline)
				return out;
		}
	}

	static std::size_t count(const std::vector<bool> &v)
	{
		return static_cast<std::size_t>(std::count(v.begin(), v.end(), true));
	}

private:
	void *addr_;
	std::size_t bytes_;
};

/* The program that works on the memory while it is registered. */
class worker
{
public:
	worker(shared &common, const memory &mem)
	    : common_(common),
	      mem_(mem),
	      random_(common->opt.seed ^ 0xc0ffee),
	      thread_([this](std::stop_token stop) { run(stop); })
	{
	}

	/* Nothing is touched while this is held. */
	[[nodiscard]] std::unique_lock<std::mutex> pause() { return std::unique_lock(busy_); }

	void stop()
	{
		thread_.request_stop();
		thread_.join();
	}

	/* All pages, by all CPUs, when the peer is done. */
	void check_all()
	{
		const std::uint32_t pages = common_.page_count();
		const std::uint32_t share = pages / std::max(1U, std::thread::hardware_concurrency()) + 1;
		std::vector<std::jthread> threads;

		for (std::uint32_t first = 0; first < pages; first += share)
			threads.emplace_back([this, first, end = std::min(pages, first + share)] {
				for (std::uint32_t page = first; page < end; page++) {
					check(page, common_.pages().version(page));
					common_->last_checked.add();
					common_->progress.add();
				}
			});
	}

private:
	void check(std::uint32_t page, std::uint32_t version)
	{
		const verdict v = check_page(mem_.page(page), page, version);

		common_->cpu_checked.add();
		if (v != verdict::good)
			common_.mismatch("responder's CPU", page, version, v, mem_.page(page));
	}

	void visit(std::uint32_t page)
	{
		auto version = common_.pages().try_lock(page);

		if (!version)
			return; /* the peer is at it */
		if (*version) {
			check(page, *version);
			write_page(mem_.page(page), page, ++*version, writer::cpu);
			common_->cpu_changed.add();
		}
		common_.pages().unlock(page, *version);
	}

	/* At the rate that was asked for, or as fast as it goes; not to catch up after a pause. */
	void run(const std::stop_token &stop)
	{
		const auto interval = std::chrono::nanoseconds(1'000'000'000 / common_->opt.cpu_rate);
		auto next = clock_type::now();

		while (!stop.stop_requested()) {
			{
				const std::lock_guard lock(busy_);

				visit(random_.below(common_.page_count()));
			}
			next = std::max(next + interval, clock_type::now() - 100 * interval);
			std::this_thread::sleep_until(next);
		}
	}

	shared &common_;
	const memory &mem_;
	random_source random_;
	std::mutex busy_;
	std::jthread thread_;
};

/* Copies the kernel's counters of the region to where the monitor sees them. */
class sampler
{
public:
	sampler(shared &common, const ibv_mr &mr)
	    : common_(common), mr_(mr), thread_([this](const std::stop_token &stop) {
		      while (!stop.stop_requested()) {
			      sample();
			      std::this_thread::sleep_for(std::chrono::milliseconds(250));
		      }
	      })
	{
	}

	void sample() noexcept
	{
		const auto now = mr_counters(mr_);

		if (!now)
			return;
		common_->minor.set(now->faults_minor);
		common_->major.set(now->faults_major);
		common_->invalidations.set(now->invalidations);
		common_->resident.set(now->resident_pages);
		common_->table_pages.set(now->table_pages);
	}

private:
	shared &common_;
	const ibv_mr &mr_;
	std::jthread thread_;
};

rc::handle<ibv_mr> register_region(shared &common, const rc::endpoint &end, const memory &mem)
{
	const bool unpinned = common->opt.memory == kind::unpinned;

	if (unpinned) {
		limit_memlock();
		errno = 0;
		rc::handle<ibv_mr> pinned(ibv_reg_mr(end.pd.get(), mem.addr(), mem.bytes(), remote_access));

		common->pin_errno.set(pinned ? 0 : static_cast<std::uint64_t>(errno ? errno : ENOMEM));
		std::printf("responder: ibv_reg_mr(%zu MiB, pinned): %s\n", mem.bytes() >> 20,
			    pinned ? "it worked?" : std::strerror(errno));
	}

	const auto begin = clock_type::now();
	auto mr = end.register_memory(mem.addr(), mem.bytes(),
				      remote_access | (unpinned ? IBV_ACCESS_UNPINNED : 0));
	const auto ns = std::chrono::nanoseconds(clock_type::now() - begin).count();

	common->register_ns.set(static_cast<std::uint64_t>(ns));
	std::printf("responder: ibv_reg_mr(%zu MiB, %s): registered in %.2f ms; VmPin %" PRIu64
		    " KiB, VmRSS %" PRIu64 " KiB\n",
		    mem.bytes() >> 20, unpinned ? "unpinned" : "pinned", static_cast<double>(ns) / 1e6,
		    guest::number_of(own_status, "VmPin"), guest::number_of(own_status, "VmRSS"));
	std::fflush(stdout);
	return mr;
}

/*
 * Want more memory than there is, for a moment: what the region has left of it has
 * to go. Never so much that swap does not hold it, which would end in the OOM killer.
 */
void press()
{
	const char *const info = "/proc/meminfo";
	const std::uint64_t kib =
	    std::min(guest::number_of(info, "MemTotal") / 4 * 5, guest::number_of(info, "SwapFree") / 2);
	const std::size_t bytes = kib << 10;
	auto *const p = static_cast<char *>(
	    mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));

	if (!bytes)
		return;
	if (p == MAP_FAILED)
		rc::fail(errno, "mmap");
	for (std::size_t at = 0; at < bytes; at += page_size)
		static_cast<volatile char *>(p)[at] = 0;
	munmap(p, bytes);
}

/*
 * Page out all of it. Once all is out, a page that has been changed since and is
 * out again has been paged out twice: it was in memory when it was changed.
 */
class pager
{
public:
	pager(shared &common, const memory &mem) : common_(common), mem_(mem), before_(common.page_count()) {}

	void settle()
	{
		press();
		const std::size_t by_pressure = memory::count(mem_.swapped());
		const std::vector<bool> out = mem_.page_out();

		common_->pages_out_once.set(0);
		common_->pages_out_twice.set(0);
		common_->pages_advised.add(memory::count(out) - std::min(memory::count(out), by_pressure));
		for (std::uint32_t page = 0; page < common_.page_count(); page++) {
			page_state &was = before_[page];
			const std::uint32_t version = common_.pages().version(page);

			if (out[page] && (!was.times || version != was.version)) {
				was.times++;
				was.version = version;
			}
			if (was.times >= 1)
				common_->pages_out_once.add();
			if (was.times >= 2)
				common_->pages_out_twice.add();
		}
	}

private:
	struct page_state {
		std::uint32_t version = 0, times = 0;
	};

	shared &common_;
	const memory &mem_;
	std::vector<page_state> before_;
};

void serve(shared &common, int peer, const memory &mem, worker &cpu, sampler &counters)
{
	pager pages(common, mem);
	request what;

	do {
		rc::receive_all(peer, &what, 1);
		if (what == request::finish) {
			cpu.stop();
			cpu.check_all();
		}
		if (common->opt.memory == kind::unpinned) {
			const auto quiet = cpu.pause();

			pages.settle();
		}
		if (what == request::settle && common->opt.fault == inject::discard) {
			/* Lose a page that the peer wrote: somebody has to notice. */
			const auto quiet = cpu.pause();

			if (madvise(mem.page(common.page_count() / 3).data(), page_size, MADV_DONTNEED))
				rc::fail(errno, "MADV_DONTNEED");
			common->injected.add();
		}
		counters.sample();
		rc::send_all(peer, &what, 1);
	} while (what != request::finish);
}

void run(int shared_fd, int peer)
{
	shared common(shared_fd);
	const options &opt = common->opt;
	const memory mem(opt.bytes, opt.huge_pages);
	const rc::endpoint end(opt.responder_device, 16);
	const auto mr = register_region(common, end, mem);
	std::vector<rc::handle<ibv_qp>> qps;

	common->responder_pid.set(static_cast<std::uint64_t>(getpid()));
	for (std::uint64_t i = 0; i < opt.qps; i++)
		qps.push_back(end.create_qp(1));
	const announcement region = {reinterpret_cast<std::uintptr_t>(mem.addr()), opt.bytes, mr->rkey, 0};
	rc::send_all(peer, &region, 1);
	rc::connect_all(peer, qps);

	sampler counters(common, *mr);
	worker cpu(common, mem);
	serve(common, peer, mem, cpu, counters);
	std::printf("responder: VmPin %" PRIu64 " KiB at the end\n", guest::number_of(own_status, "VmPin"));
}

} // namespace

int main(int argc, char **argv)
{
	if (argc != 3) {
		std::fprintf(stderr, "%s is started by nprdma-demo\n", argv[0]);
		return 64;
	}
	try {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		run(std::atoi(argv[1]), std::atoi(argv[2]));
		return 0;
	} catch (const std::exception &e) {
		std::fprintf(stderr, "responder: %s\n", e.what());
		return 1;
	}
}
