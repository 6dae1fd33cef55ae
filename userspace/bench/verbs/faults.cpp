// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * What a fault costs the one who READs or WRITEs: minor (the page is in memory)
 * beside the round trip of an event-driven ping-pong, major (the page is in
 * swap) beside what the CPU pays for its own major fault on the same swap.
 *
 * Both sides of the latter take pages in random order, and swap read-ahead is
 * off (vm.page-cluster), so that each page costs one read of the disk; fault-around is
 * off (ib_nprdma.fault_around), so that each page has a fault of its own. A sample
 * counts only if the kernel says that it was the fault it was meant to be.
 */
#include "../../tools/demo/guest.hpp"
#include "../../tools/demo/mr_counters.hpp"
#include "../../tools/demo/page.hpp"
#include "initiator.hpp"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <thread>

namespace bench
{

namespace
{

constexpr std::size_t region_bytes = 32 * MiB;
constexpr std::size_t region_pages = region_bytes / page_size;
constexpr int per_round = 40;

/* A setting of the guest's kernel, for the time of the measurement. */
class setting
{
public:
	setting(const char *path, const char *value) : path_(path)
	{
		std::ifstream(path_) >> before_;
		set(value);
	}
	setting(const setting &) = delete;
	setting &operator=(const setting &) = delete;
	~setting()
	{
		std::ofstream out(path_);

		out << before_;
	}

private:
	void set(const std::string &value)
	{
		std::ofstream out(path_);

		if (!(out << value << std::flush))
			rc::fail(EACCES, path_);
	}

	const char *path_;
	std::string before_;
};

/* A memory group of ours: the kernel reclaims from it when told to, as it would under pressure. */
class group
{
public:
	group()
	{
		write(std::string(root) + "/cgroup.subtree_control", "+memory");
		if (mkdir(path, 0755) && errno != EEXIST)
			rc::fail(errno, path);
		write(std::string(path) + "/cgroup.procs", "0");
	}
	group(const group &) = delete;
	group &operator=(const group &) = delete;
	~group()
	{
		std::ofstream(std::string(root) + "/cgroup.procs") << "0";
		rmdir(path);
	}

	/* Not all that is asked for may be there. */
	void reclaim(const char *bytes) const
	{
		std::ofstream(std::string(path) + "/memory.reclaim") << bytes;
	}

private:
	static constexpr const char *root = "/sys/fs/cgroup";
	static constexpr const char *path = "/sys/fs/cgroup/nprdma-bench";

	static void write(const std::string &file, const char *value)
	{
		std::ofstream out(file);

		if (!(out << value << std::flush))
			rc::fail(EACCES, file);
	}
};

/* Memory of which each page is visited once, in random order. */
class course
{
public:
	explicit course(std::uint64_t seed) : mem_(region_bytes, mapping::pages::small), order_(region_pages)
	{
		demo::random_source random(seed);

		/* Content that swap cannot take for zeros. */
		for (std::size_t i = 0; i < region_pages; i++)
			mem_.at_byte(i * page_size + i % page_size) = static_cast<char>(i | 1);
		std::iota(order_.begin(), order_.end(), 0U);
		for (auto i = static_cast<std::uint32_t>(order_.size()); i > 1; i--)
			std::swap(order_[i - 1], order_[random.below(i)]);
	}

	/* Where the next page begins. */
	std::size_t next()
	{
		if (at_ == order_.size())
			throw std::logic_error("no pages left");
		return order_[at_++] * page_size;
	}

	/* Out of memory, and out of the swap cache too, where its writes leave it. */
	void page_out(const group &ours)
	{
		const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);

		while (guest::number_of("/proc/self/smaps_rollup", "Swap") < swapped_before_ + missing() ||
		       guest::number_of("/proc/meminfo", "SwapCached") > 512) {
			if (madvise(mem_.addr(), mem_.bytes(), MADV_PAGEOUT))
				rc::fail(errno, "MADV_PAGEOUT");
			ours.reclaim("4M");
			if (std::chrono::steady_clock::now() > deadline)
				throw std::runtime_error(fmt::format(
				    "memory cannot be paged out: {} KiB of ours are in swap, {} KiB in "
				    "the swap cache",
				    guest::number_of("/proc/self/smaps_rollup", "Swap"),
				    guest::number_of("/proc/meminfo", "SwapCached")));
		}
	}

	[[nodiscard]] const mapping &mem() const noexcept { return mem_; }

private:
	/* KiB; a few pages may be busy. */
	[[nodiscard]] std::uint64_t missing() const noexcept { return mem_.bytes() / 1024 * 99 / 100; }

	std::uint64_t swapped_before_ = guest::number_of("/proc/self/smaps_rollup", "Swap");
	mapping mem_;
	std::vector<std::uint32_t> order_;
	std::size_t at_ = 0;
};

std::uint64_t own_major_faults()
{
	rusage usage{};

	getrusage(RUSAGE_THREAD, &usage);
	return static_cast<std::uint64_t>(usage.ru_majflt);
}

/* The CPU reads one page of each; only major faults count. */
void cpu_major(course &pages, samples &to)
{
	for (int i = 0; i < per_round; i++) {
		const std::size_t at = pages.next();
		const std::uint64_t before = own_major_faults();
		const double begin = now_us();

		[[maybe_unused]] const char touched = pages.mem().at_byte(at);
		const double us = now_us() - begin;
		if (own_major_faults() == before + 1)
			to.add(us);
	}
}

enum class wait_by { polling, sleeping };

/* A region that only faults are measured on. */
class target_region
{
public:
	/* With @ours, it is in swap. */
	target_region(const rc::endpoint &responder, std::uint64_t seed, const group *ours)
	    : pages_(seed),
	      mr_(responder.register_memory(pages_.mem().addr(), region_bytes,
					    remote_access | IBV_ACCESS_UNPINNED))
	{
		if (ours)
			pages_.page_out(*ours);
	}

	/* The first access makes the keys, which is no fault's business. */
	void resolve(initiator &via) { (void)via.library().resolve(mr_->rkey); }

	void round(initiator &via, ibv_wr_opcode opcode, wait_by how, bool major, samples &to)
	{
		for (int i = 0; i < per_round; i++) {
			const std::uint64_t at = pages_.mem().address() + pages_.next();
			const rdma_np_mr_info before = counters();
			const double begin = now_us();

			if (how == wait_by::polling)
				via.transfer(opcode, at, mr_->rkey, page_size);
			else
				via.transfer_sleeping(opcode, at, mr_->rkey, page_size);
			const double us = now_us() - begin;
			const rdma_np_mr_info after = counters();

			if (after.faults_major - before.faults_major == (major ? 1U : 0U) &&
			    after.faults_minor - before.faults_minor == (major ? 0U : 1U))
				to.add(us);
		}
	}

private:
	[[nodiscard]] rdma_np_mr_info counters() const
	{
		const auto now = demo::mr_counters(*mr_);

		if (!now)
			throw std::runtime_error("the region has no counters");
		return *now;
	}

	course pages_;
	rc::handle<ibv_mr> mr_;
};

row summary(const samples &s)
{
	return {{"median_us", s.median()},
		{"p10_us", s.quantile(0.1)},
		{"p90_us", s.quantile(0.9)},
		{"samples", static_cast<double>(s.count())}};
}

} // namespace

void measure_faults(const options &opt, report &out)
{
	const rc::endpoint responder(opt.dev.responder, 16);
	pingpong trip(opt.dev.responder, opt.dev.initiator);
	samples round_trip;

	if (!opt.unpinned) {
		for (int i = 0; i < opt.rounds; i++)
			round_trip.add(trip.round(100));
		out.add("faults", "event-driven ping-pong", summary(round_trip));
		return;
	}

	struct experiment {
		const char *name;
		ibv_wr_opcode opcode;
		wait_by how;
		bool major;
		target_region region;
		samples us;
	};
	const group ours;
	const setting off("/proc/sys/vm/page-cluster", "0");
	const setting fault_around("/sys/module/ib_nprdma/parameters/fault_around", "1");
	initiator via(opt.dev.initiator, responder, through::library, MiB);
	course by_cpu(1);
	samples cpu;

	by_cpu.page_out(ours);
	/* Those in swap first, so that making them does not put others there. */
	std::array<experiment, 6> list = {
	    experiment{"READ, major, polled for",
		       IBV_WR_RDMA_READ,
		       wait_by::polling,
		       true,
		       {responder, 2, &ours},
		       {}},
	    experiment{"READ, major, slept for",
		       IBV_WR_RDMA_READ,
		       wait_by::sleeping,
		       true,
		       {responder, 3, &ours},
		       {}},
	    experiment{"WRITE, major, polled for",
		       IBV_WR_RDMA_WRITE,
		       wait_by::polling,
		       true,
		       {responder, 4, &ours},
		       {}},
	    experiment{"READ, minor, polled for",
		       IBV_WR_RDMA_READ,
		       wait_by::polling,
		       false,
		       {responder, 5, nullptr},
		       {}},
	    experiment{"READ, minor, slept for",
		       IBV_WR_RDMA_READ,
		       wait_by::sleeping,
		       false,
		       {responder, 6, nullptr},
		       {}},
	    experiment{"WRITE, minor, polled for",
		       IBV_WR_RDMA_WRITE,
		       wait_by::polling,
		       false,
		       {responder, 7, nullptr},
		       {}},
	};
	const experiment &major = list[0], &minor = list[3];

	for (experiment &e : list)
		e.region.resolve(via);
	for (int i = 0; i < opt.rounds; i++) {
		round_trip.add(trip.round(100));
		cpu_major(by_cpu, cpu);
		for (experiment &e : list)
			e.region.round(via, e.opcode, e.how, e.major, e.us);
	}

	out.add("faults", "event-driven ping-pong", summary(round_trip));
	if (const auto theirs = rc_pingpong(opt.dev.initiator, opt.dev.responder))
		out.add("faults", "ibv_rc_pingpong -e", {{"mean_us", *theirs}});
	out.add("faults", "the CPU's own, major", summary(cpu));
	for (const experiment &e : list) {
		row values = summary(e.us);

		values.emplace_back("of_round_trip", e.us.median() / round_trip.median());
		out.add("faults", e.name, values);
	}

	const double trips = 3 * round_trip.median();
	const auto enough = [&](const samples &s) {
		return s.count() >= static_cast<std::size_t>(opt.rounds * per_round / 2);
	};
	out.expect({"minor fault, READ again: of the ping-pong's round trip",
		    minor.us.median() / round_trip.median(), 1.2, false, enough(minor.us)});
	out.expect({"major fault, READ again: of 3 round trips + 1.3 x the CPU's",
		    major.us.median() / (trips + 1.3 * cpu.median()), 1, false,
		    enough(major.us) && enough(cpu)});
}

} // namespace bench
