// SPDX-License-Identifier: GPL-2.0
/* Events of the whole host: swap, compaction, reclaim, hotplug, the HCA's knobs. */
#include "host.hpp"
#include "pages.hpp"
#include "verbs.hpp"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace soak
{

bool put(const std::string &path, const std::string &text)
{
	const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return false;
	const bool ok = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
	close(fd);
	return ok;
}

void freeze(bool yes)
{
	const int fd = open(frozen_directory, O_RDONLY | O_CLOEXEC);
	const int error = fd < 0 || ioctl(fd, yes ? FIFREEZE : FITHAW, 0) ? errno : 0;

	close(fd);
	if (error)
		throw std::runtime_error(fmt::format("{}: {}", frozen_directory, std::strerror(error)));
}

namespace
{

constexpr const char *devices[] = {NP_OWNER_DEV, NP_PEER_DEV};
constexpr const char *numa = "/sys/kernel/debug/sched/numa_balancing/";
constexpr const char *numa_balancing = "/proc/sys/kernel/numa_balancing";
constexpr const char *ksm_run = "/sys/kernel/mm/ksm/run";
constexpr const char *lease_percent = "/sys/module/ib_core/parameters/nprdma_lease_percent";
constexpr const char *lease_ms = "/sys/module/ib_nprdma/parameters/lease_ms";
/* As the kernel has them */
constexpr const char *usual_percent = "25", *usual_ms = "30000";

void must(const std::string &path, const std::string &text)
{
	if (!put(path, text))
		throw std::runtime_error(fmt::format("'{}' to {}: {}", text, path, std::strerror(errno)));
}

void shell(const std::string &command)
{
	if (const int status = std::system(command.c_str()))
		throw std::runtime_error(fmt::format("{}: status {:#x}", command, status));
}

/* One number of a file of the owners' group that has a name and a number in each line. */
std::uint64_t group_field(const char *name, const std::string &field)
{
	std::ifstream file(std::string(owners_group) + "/" + name);
	std::string key;

	for (std::uint64_t value; file >> key >> value;)
		if (key == field)
			return value;
	throw std::runtime_error(fmt::format("{}: there is no {}", name, field));
}

long swapped_kb()
{
	return np_meminfo_kb("SwapTotal") - np_meminfo_kb("SwapFree");
}

std::uint64_t hexadecimal(const std::string &path)
{
	return std::strtoull(line_of(path).c_str(), nullptr, 16);
}

/* Has a frame of it been taken out of use? Then it could go offline, but not come back. */
bool has_poison(const std::string &block)
{
	constexpr std::uint64_t hwpoison = 1ULL << 19; /* KPF_HWPOISON */
	std::vector<std::uint64_t> flags(memory_block_pages());
	const std::uint64_t first = hexadecimal(block + "/phys_index") * flags.size();
	std::ifstream file("/proc/kpageflags", std::ios::binary);

	file.seekg(static_cast<std::streamoff>(first * sizeof(flags[0])));
	if (!file.read(reinterpret_cast<char *>(flags.data()),
		       static_cast<std::streamsize>(flags.size() * sizeof(flags[0]))))
		throw std::runtime_error("/proc/kpageflags: cannot be read");
	return std::any_of(flags.begin(), flags.end(), [](std::uint64_t f) { return (f & hwpoison) != 0; });
}

/* A file system on an image in memory; it does not know. */
void make_disk(const char *name, const char *mkfs, unsigned megabytes)
{
	const std::string image = fmt::format("/tmp/soak/{}.image", name),
			  dir = fmt::format("/tmp/soak/{}", name);

	shell(
	    fmt::format("mkdir -p {1} && truncate -s {2}M {0} && {3} {0} && dev=$(losetup -f --show {0}) && "
			"mount $dev {1}",
			image, dir, megabytes, mkfs));
}

/* On memory that keeps its content; scripts/soak says how much. */
void make_dax(memory m, const char *device, const char *mkfs)
{
	shell(fmt::format("mkdir -p {0} && {1} {2} && mount -o dax {2} {0}", directory_of(m), mkfs, device));
}

/* Leases memory of its own process, with the kernel's methods. */
struct lessee {
	np_end end{};
	int channel;
	std::uint8_t *data;
	own<ibv_mr> mr;

	explicit lessee(std::size_t length)
	{
		if (int error = np_open(&end, NP_PEER_DEV, PAGE))
			rc::fail(-error, "np_open");
		channel = np_channel(end.ctx);
		data = static_cast<std::uint8_t *>(np_map_aligned(length, HUGE_PAGE));
		if (channel < 0 || !data)
			throw std::runtime_error("a process that leases memory");
		mr = rc::own(ibv_reg_mr(end.pd, data, length, NP_UNPINNED | IBV_ACCESS_LOCAL_WRITE),
			     "ibv_reg_mr");
	}
	lessee(const lessee &) = delete;
	lessee &operator=(const lessee &) = delete;

	/* A handle, or -errno. */
	std::int64_t lease(std::size_t offset, std::size_t length, std::uint64_t cookie)
	{
		rdma_np_hold_info info;

		return np_lease(mr.get(), reinterpret_cast<std::uintptr_t>(data) + offset, length,
				RDMA_NP_FAULT_WRITE, channel, cookie, &info);
	}
};

/* 48 MiB, which is more than one per cent of the guest's memory. What is recalled goes back. */
int be_greedy(std::atomic<bool> &full, const std::atomic<bool> &stop)
{
	constexpr std::size_t most = 24;
	std::vector<std::int64_t> leases;
	rdma_np_event event;
	lessee me(most * HUGE_PAGE);

	for (std::size_t i = 0; i < most; i++)
		leases.push_back(me.lease(i * HUGE_PAGE, HUGE_PAGE, i));
	for (full = true; !stop; np_pause())
		while (read(me.channel, &event, sizeof(event)) == sizeof(event))
			if (event.cookie < most && leases[event.cookie] >= 0)
				np_hold_free(me.end.ctx, std::exchange(leases[event.cookie], -1));
	return 0;
}

enum want_status { lease_in_time, lease_at_once, no_lease };

/* What a process that tries to get a lease for NP_WAIT_MS ends with. */
int want_one_lease()
{
	lessee me(PAGE);
	bool waited = false;

	for (deadline end; !end.over(); np_pause()) {
		if (me.lease(0, PAGE, 0) >= 0)
			return waited ? lease_in_time : lease_at_once;
		waited = true;
	}
	return no_lease;
}

} // namespace

stopwatch::~stopwatch()
{
	const std::uint64_t seconds = (np_now_ms() - begin_) / 1000;

	if (seconds >= 15)
		fmt::print("soak: {} s for: {}\n", seconds, kind_names[static_cast<unsigned>(kind_)]);
}

host::host(std::uint64_t seed, tally &count, link_state &link, bool leases)
    : random_(seed),
      count_(count),
      link_(link),
      leases_(leases),
      events_({kind::request_size,  kind::dma_delay,    kind::dma_delay,    kind::read_overlap,
	       kind::posted_writes, kind::early_ack,    kind::out_of_order, kind::cut_from_start,
	       kind::random_fetch,  kind::trailing_dma, kind::link_loss,    kind::reclaim,
	       kind::reclaim,       kind::limit,        kind::compact,      kind::drop_caches,
	       kind::swap_off,      kind::zram,         kind::fault_around, kind::cpu,
	       kind::balancing,     kind::merging,      kind::lease_age,    kind::lease_budget,
	       kind::block})
{
	std::ifstream swaps("/proc/swaps");
	std::string line;

	std::getline(swaps, line);
	if (!(swaps >> swap_))
		throw std::runtime_error("there is no swap: start the guest with --swap");
	must("/proc/sys/vm/nr_hugepages", "24");
	make_disk("ext4", "mkfs.ext4 -q -F", 64);
	make_disk("xfs", "mkfs.xfs -q -f", 320);
	make_disk("frozen", "mkfs.ext4 -q -F", 16);
	make_dax(memory::ext4_dax, "/dev/pmem0", "mkfs.ext4 -q -F -b 4096");
	make_dax(memory::xfs_dax, "/dev/pmem1", "mkfs.xfs -q -f -m reflink=0");
	put("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
	if (mkdir(owners_group, 0755) && errno != EEXIST)
		throw std::runtime_error(fmt::format("mkdir {}: {}", owners_group, std::strerror(errno)));
	must("/sys/kernel/mm/ksm/sleep_millisecs", "20");
	must("/sys/kernel/mm/ksm/pages_to_scan", "200");
	must(std::string(numa) + "scan_delay_ms", "1");
	must(std::string(numa) + "scan_period_min_ms", "20");
	calm();
}

host::~host()
{
	try {
		calm();
	} catch (const std::exception &) {
		/* The guest ends. */
	}
}

void host::calm()
{
	for (unsigned i = 0; i < 2; i++) {
		const char *dev = devices[i];

		np_hca_set(dev, NP_HCA_DMA_REQUEST_SIZE, 512);
		np_hca_set(dev, NP_HCA_DMA_DELAY_NS, 0);
		np_hca_set(dev, NP_HCA_READ_OVERLAP, 0);
		for (np_hca_register r :
		     {NP_HCA_POSTED_WRITES, NP_HCA_ACK_BEFORE_PLACEMENT, NP_HCA_OUT_OF_ORDER,
		      NP_HCA_CUT_FROM_START, NP_HCA_RANDOM_FETCH, NP_HCA_TRAILING_DMA})
			np_hca_set(dev, r, 0);
		lose(i, 0);
	}
	/* Who has resolved before relies on what was said then. */
	ordered_ = random_.one_in(2);
	must("/sys/module/ib_core/parameters/nprdma_read_order", ordered_ ? "in-order" : "out-of-order");
	np_set_hold_ms(NP_HOLD_MS);
	must(lease_percent, leases_ ? usual_percent : "0");
	must(lease_ms, usual_ms);
	must("/sys/devices/system/cpu/cpu1/online", "1");
	/* What is on shows now what it did. */
	if (line_of(numa_balancing) == "1")
		count_.done(kind::balancing, balance());
	if (line_of(ksm_run) == "1")
		count_.done(kind::merging, merge());
	/* Nothing stays merged; it is on from the beginning, for it takes its time. */
	must(ksm_run, "2");
	must(ksm_run, "1");
	merged_ = np_vmstat("cow_ksm");
	use_zram(false);
}

/* It happened if something was in it, which is known when it ends. */
bool host::use_zram(bool yes)
{
	if (yes == zram_)
		return false;
	if (yes) {
		if (!put("/sys/block/zram0/disksize", "256M"))
			return false;
		shell("mkswap -q /dev/zram0 >/dev/null 2>&1 || mkswap /dev/zram0 >/dev/null");
		if (swapon("/dev/zram0", 0))
			return false;
		if (swapoff(swap_.c_str())) {
			swapoff("/dev/zram0");
			put("/sys/block/zram0/reset", "1");
			return false;
		}
		zram_ = true;
		return false;
	}
	const bool used = swapped_kb() > 0;

	if (swapon(swap_.c_str(), 0) && errno != EBUSY)
		throw std::runtime_error(fmt::format("swapon {}: {}", swap_, std::strerror(errno)));
	if (swapoff("/dev/zram0"))
		return false;
	put("/sys/block/zram0/reset", "1");
	zram_ = false;
	count_.done(kind::zram, used);
	return used;
}

bool host::swap_again()
{
	const std::string now = zram_ ? "/dev/zram0" : swap_;
	const bool used = swapped_kb() > 0;

	if (swapoff(now.c_str()))
		return false;
	if (swapon(now.c_str(), 0))
		throw std::runtime_error(fmt::format("swapon {}: {}", now, std::strerror(errno)));
	return used;
}

/* A block of movable memory goes, with all that is in it elsewhere, and comes back. */
bool host::memory_block()
{
	for (int tries = 0; tries < 8; tries++) {
		const std::string block = fmt::format("{}/memory{}", memory_blocks, random_.below(24));

		if (line_of(block + "/valid_zones") != "Movable" || has_poison(block))
			continue;
		if (!put(block + "/state", "offline"))
			return false;
		/* Poisoned while it went: it stays away. */
		if (!put(block + "/state", "online_movable") && errno != EHWPOISON)
			throw std::runtime_error(
			    fmt::format("{} cannot be put online: {}", block, std::strerror(errno)));
		return true;
	}
	return false;
}

bool host::knob(kind k, np_hca_register what, std::uint64_t value)
{
	const char *dev = devices[random_.below(2)];

	if (int error = np_hca_set(dev, what, value))
		throw std::runtime_error(fmt::format("{} of {}: {}", kind_names[static_cast<unsigned>(k)],
						     dev, std::strerror(-error)));
	return value != 0;
}

/* Those who count on nothing being lost are told before it is, and after the last time. */
bool host::lose(unsigned device, std::uint64_t one_in)
{
	if (one_in && !loses_[device]) {
		link_.lossy++;
		link_.changes++;
	}
	const int error = np_hca_set(devices[device], NP_HCA_LOSS, one_in);
	if (!one_in && loses_[device]) {
		link_.changes++;
		link_.lossy--;
	}
	loses_[device] = one_in != 0;
	if (error)
		throw std::runtime_error(
		    fmt::format("loss of {}: {}", devices[device], std::strerror(-error)));
	return loses_[device];
}

bool host::reclaim()
{
	const std::uint64_t before = group_field("memory.stat", "pgsteal");

	/* It says so if it was less than that. */
	put(std::string(owners_group) + "/memory.reclaim", fmt::format("{}K", 4 * random_.between(1, 2048)));
	return group_field("memory.stat", "pgsteal") > before;
}

/* For a moment the group may not have more than it has: it has to give something for what it gets. */
bool host::limit()
{
	const std::string group = owners_group, max = group + "/memory.max";
	const std::uint64_t before = group_field("memory.events", "max"), until = np_now_ms() + 2000;

	put(group + "/memory.reclaim", "4M");
	must(max, line_of(group + "/memory.current"));
	while (np_now_ms() < until && group_field("memory.events", "max") == before)
		np_pause();
	must(max, "max");
	return group_field("memory.events", "max") > before;
}

bool host::cpu_away()
{
	const std::string cpu = "/sys/devices/system/cpu/cpu1/online";

	if (line_of(cpu) == "0") {
		put(cpu, "1");
		return false;
	}
	return put(cpu, "0");
}

bool host::balance()
{
	if (line_of(numa_balancing) == "0") {
		balanced_ = np_vmstat("numa_pte_updates");
		put(numa_balancing, "1");
		return false;
	}
	put(numa_balancing, "0");
	return np_vmstat("numa_pte_updates") > balanced_;
}

/* Pages that were merged, and had to be separated again. */
bool host::merge()
{
	const long before = std::exchange(merged_, np_vmstat("cow_ksm"));

	if (line_of(ksm_run) != "1") {
		put(ksm_run, "1");
		return false;
	}
	if (random_.one_in(3))
		put(ksm_run, "0");
	return merged_ > before;
}

/* The kernel asks leases back that have this age. */
bool host::shorten_leases()
{
	const bool yes = !random_.one_in(3);

	must(lease_ms, yes ? std::to_string(random_.between(20, 1000)) : usual_ms);
	return yes;
}

/*
 * One process leases more of its memory than all may have from then on, and gives back what is
 * recalled. Another one, which has no lease, has to get one all the same: the oldest leases are
 * recalled for it, those of the cells first. Cells go on without them, or ask again. True: it had to wait.
 */
bool host::want_leases()
{
	struct state {
		std::atomic<bool> full, stop;
	};
	state &s = *make_shared_memory<state>();
	int status = 0;

	const pid_t greedy = np_fork();
	if (!greedy)
		_exit(be_greedy(s.full, s.stop));
	while (!s.full && waitpid(greedy, &status, WNOHANG) != greedy)
		np_pause();
	if (!s.full)
		throw std::runtime_error(fmt::format("who wants many leases ends with status {:#x}", status));
	must(lease_percent, "1");
	const pid_t modest = np_fork();
	if (!modest)
		_exit(want_one_lease());
	if (waitpid(modest, &status, 0) != modest || !WIFEXITED(status) || WEXITSTATUS(status) == no_lease)
		throw std::runtime_error(
		    fmt::format("who has no lease gets none while others have many: status {:#x}", status));
	must(lease_percent, usual_percent);
	const bool waited = WEXITSTATUS(status) == lease_in_time;
	s.stop = true;
	if (waitpid(greedy, &status, 0) != greedy || status)
		throw std::runtime_error(fmt::format("who had many leases ends with status {:#x}", status));
	munmap(&s, sizeof(s));
	return waited;
}

bool host::happens(kind k)
{
	switch (k) {
	case kind::request_size:
		return knob(k, NP_HCA_DMA_REQUEST_SIZE, 64ULL << random_.below(7));
	case kind::dma_delay:
		return knob(k, NP_HCA_DMA_DELAY_NS,
			    random_.one_in(3) ? 0 : random_.between(1, random_.one_in(4) ? 100000 : 20000));
	case kind::read_overlap:
		return knob(k, NP_HCA_READ_OVERLAP, !random_.one_in(3));
	case kind::posted_writes:
		return knob(k, NP_HCA_POSTED_WRITES, random_.one_in(3) ? 0 : random_.between(1, 20000));
	case kind::early_ack:
		return knob(k, NP_HCA_ACK_BEFORE_PLACEMENT, !random_.one_in(3));
	case kind::out_of_order:
		return !ordered_ &&
		       knob(k, NP_HCA_OUT_OF_ORDER, random_.one_in(3) ? 0 : random_.between(1, 20000));
	case kind::cut_from_start:
		return knob(k, NP_HCA_CUT_FROM_START, !random_.one_in(3));
	case kind::random_fetch:
		return knob(k, NP_HCA_RANDOM_FETCH, !random_.one_in(3));
	case kind::trailing_dma:
		return knob(k, NP_HCA_TRAILING_DMA, !random_.one_in(3));
	case kind::link_loss:
		return lose(static_cast<unsigned>(random_.below(2)),
			    random_.one_in(3) ? 0 : random_.between(200, 5000));
	case kind::reclaim:
		return reclaim();
	case kind::limit:
		return limit();
	case kind::compact: {
		const long before = np_vmstat("compact_isolated");

		return put("/proc/sys/vm/compact_memory", "1") && np_vmstat("compact_isolated") > before;
	}
	case kind::drop_caches:
		return put("/proc/sys/vm/drop_caches", random_.one_in(2) ? "3" : "1");
	case kind::swap_off:
		return swap_again();
	case kind::fault_around:
		return !np_set_fault_around(1U << random_.below(7));
	case kind::zram:
		/* Counted by itself, also when calm() ends it. */
		use_zram(!zram_);
		return false;
	case kind::cpu:
		return cpu_away();
	case kind::balancing:
		return balance();
	case kind::merging:
		return merge();
	case kind::lease_age:
		return shorten_leases();
	case kind::lease_budget:
		return leases_ && want_leases();
	case kind::block:
		return memory_block();
	default:
		throw std::logic_error(
		    fmt::format("'{}' is nothing of a host", kind_names[static_cast<unsigned>(k)]));
	}
}

void host::event()
{
	const kind k = events_.draw(random_);
	const stopwatch time(k);

	count_.tried(k);
	count_.done(k, happens(k));
}

void host::remove_device(kind how, void (*between)(void *), void *arg)
{
	const char *dev = devices[random_.below(2)];
	const char *what = kind_names[static_cast<unsigned>(how)];
	char function[NP_FUNCTION_LEN];

	count_.tried(how);
	const np_removal removal = how == kind::unplug ? NP_REMOVE : NP_UNBIND;

	if (int error = np_device_remove(dev, removal, function))
		throw std::runtime_error(fmt::format("{}: {}: {}", what, dev, std::strerror(-error)));
	between(arg);
	if (int error = np_device_return(dev, removal, function))
		throw std::runtime_error(
		    fmt::format("return after {}: {}: {}", what, dev, std::strerror(-error)));
	count_.done(how);
}

} // namespace soak
