/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the processes of the demo share, in a memory file: the ledger, counters
 * for the monitor, and how far the run is. No data of the region goes this way.
 */
#ifndef NPRDMA_DEMO_SHARED_HPP
#define NPRDMA_DEMO_SHARED_HPP

#include "page.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <system_error>

namespace demo
{

/* Relaxed throughout: nothing is concluded from the order of counters. */
class counter
{
public:
	void add(std::uint64_t n = 1) noexcept { value_.fetch_add(n, std::memory_order_relaxed); }
	void set(std::uint64_t n) noexcept { value_.store(n, std::memory_order_relaxed); }
	[[nodiscard]] std::uint64_t get() const noexcept { return value_.load(std::memory_order_relaxed); }

private:
	std::atomic<std::uint64_t> value_{0};
	static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
};

enum class phase : std::uint64_t { setup, fill, settle, read_back, final_check, done };

constexpr const char *to_string(phase p) noexcept
{
	switch (p) {
	case phase::setup:
		return "set-up";
	case phase::fill:
		return "fill";
	case phase::settle:
		return "page out";
	case phase::read_back:
		return "read back";
	case phase::final_check:
		return "final check";
	case phase::done:
		return "done";
	}
	return "?";
}

enum class kind : std::uint64_t { unpinned, pinned };

/* Faults that the demo can be asked to commit, to show that its checks see them. */
enum class inject : std::uint64_t { nothing, lost_write, stale_read, discard };

struct options {
	std::uint64_t bytes = 3ULL << 30;
	std::uint64_t qps = 4;
	std::uint64_t window = 4;     /* operations under way on each QP */
	std::uint64_t block = 128;    /* pages in one operation */
	std::uint64_t cpu_rate = 250; /* pages that the CPU checks and changes each second */
	std::uint64_t seed = 1;
	kind memory = kind::unpinned;
	inject fault = inject::nothing;
	bool huge_pages = false;
	bool prefetch = true;     /* ask for pages before they are read and rewritten */
	bool plain_verbs = false; /* the peer uses no libnprdma */
	char responder_device[64] = "mlx5_0";
	char peer_device[64] = "mlx5_1";
};

struct state {
	options opt;
	std::atomic<phase> now{phase::setup};
	counter progress; /* of the pages, in this phase */
	counter mismatches;
	counter injected;

	/* the peer */
	counter reads, writes;
	counter pages_read, pages_written;
	counter suspicious, false_suspicions, repeated, fault_requests, busy, holds;
	counter peer_pid;

	/* the responder */
	counter pin_errno; /* of the attempt to pin the same */
	counter register_ns;
	counter cpu_checked, cpu_changed;
	counter last_checked; /* by the CPU, when all was over */
	counter minor, major, invalidations, resident, table_pages;
	counter pages_out_once, pages_out_twice;
	counter pages_advised; /* out only after MADV_PAGEOUT */
	counter responder_pid;
};

/* The mapping; a file descriptor of it goes from parent to child. */
class shared
{
public:
	/* A new one, for the processes to come. */
	explicit shared(const options &opt) : fd_(memfd_create("nprdma-demo", MFD_CLOEXEC))
	{
		size_ = sizeof(state) + opt.bytes / page_size * sizeof(ledger::entry);
		if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(size_)))
			throw std::system_error(errno, std::generic_category(), "memfd_create");
		map();
		state_ = new (base_) state;
		state_->opt = opt;
		attach_ledger();
	}

	/* The one that the parent made. */
	explicit shared(int fd) : fd_(fd)
	{
		const off_t end = lseek(fd, 0, SEEK_END);

		if (end < static_cast<off_t>(sizeof(state)))
			throw std::system_error(EINVAL, std::generic_category(), "shared state");
		size_ = static_cast<std::size_t>(end);
		map();
		state_ = std::launder(static_cast<state *>(base_));
		attach_ledger();
	}

	shared(const shared &) = delete;
	shared &operator=(const shared &) = delete;
	~shared()
	{
		munmap(base_, size_);
		close(fd_);
	}

	state *operator->() noexcept { return state_; }
	[[nodiscard]] int fd() const noexcept { return fd_; }
	[[nodiscard]] ledger &pages() noexcept { return ledger_; }
	[[nodiscard]] std::uint32_t page_count() const noexcept { return ledger_.pages(); }

	void enter(phase p) noexcept
	{
		state_->progress.set(0);
		state_->now.store(p, std::memory_order_relaxed);
	}

	/* Counts one, and tells of the first few. */
	void mismatch(const char *who, std::uint64_t page, std::uint64_t version, verdict v,
		      const_page_data found) noexcept
	{
		constexpr std::uint64_t told = 20;

		state_->mismatches.add();
		if (state_->mismatches.get() > told)
			return;
		std::fprintf(stderr,
			     "MISMATCH seen by the %s: page %llu must have version %llu, is %s: "
			     "says page %llu version %llu, words %016llx %016llx ... %016llx\n",
			     who, ull(page), ull(version), to_string(v), ull(found[header_page]),
			     ull(found[header_version]), ull(found[header_words]), ull(found[page_words / 2]),
			     ull(found[page_words - 1]));
	}

private:
	static unsigned long long ull(std::uint64_t x) noexcept { return x; }

	void map()
	{
		base_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
		if (base_ == MAP_FAILED)
			throw std::system_error(errno, std::generic_category(), "shared state");
	}

	void attach_ledger() noexcept
	{
		/* Zero bytes of the file are unlocked entries of version 0. */
		auto *first = reinterpret_cast<ledger::entry *>(static_cast<char *>(base_) + sizeof(state));
		ledger_ = ledger({first, (size_ - sizeof(state)) / sizeof(ledger::entry)});
	}

	int fd_;
	std::size_t size_ = 0;
	void *base_ = nullptr;
	state *state_ = nullptr;
	ledger ledger_;
};

} // namespace demo

#endif // NPRDMA_DEMO_SHARED_HPP
