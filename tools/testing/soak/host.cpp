// SPDX-License-Identifier: GPL-2.0
/* Events of the whole host: swap, compaction, reclaim, hotplug, the HCA's knobs. */
#include "host.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <vector>

#include <fmt/format.h>

namespace soak
{

namespace
{

constexpr const char *memory_blocks = "/sys/devices/system/memory";

/* True if the kernel took it; what it refuses now it may take later. */
bool put(const std::string &path, const std::string &text)
{
	const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return false;
	const bool ok = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
	close(fd);
	return ok;
}

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

std::string line_of(const std::string &path)
{
	std::ifstream file(path);
	std::string line;

	std::getline(file, line);
	return line;
}

std::uint64_t hexadecimal(const std::string &path)
{
	return std::strtoull(line_of(path).c_str(), nullptr, 16);
}

/* Has MADV_HWPOISON taken a page frame of it? Then it could go offline, but not come back. */
bool has_poison(const std::string &block)
{
	constexpr std::uint64_t page_size = 4096, hwpoison = 1ULL << 19; /* KPF_HWPOISON */
	const std::uint64_t bytes = hexadecimal(std::string(memory_blocks) + "/block_size_bytes");
	const std::uint64_t first = hexadecimal(block + "/phys_index") * (bytes / page_size);
	std::vector<std::uint64_t> flags(bytes / page_size);
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
	const std::string image = fmt::format("/tmp/soak/{}.image", name), dir = fmt::format("/tmp/soak/{}", name);

	shell(fmt::format("mkdir -p {1} && truncate -s {2}M {0} && {3} {0} && dev=$(losetup -f --show {0}) && "
			  "mount $dev {1}",
			  image, dir, megabytes, mkfs));
}

} // namespace

host::host(std::uint64_t seed) : random_(seed)
{
	std::ifstream swaps("/proc/swaps");
	std::string line;

	std::getline(swaps, line);
	if (!(swaps >> swap_))
		throw std::runtime_error("there is no swap: start the guest with --swap");
	must("/proc/sys/vm/nr_hugepages", "24");
	make_disk("ext4", "mkfs.ext4 -q -F", 64);
	make_disk("xfs", "mkfs.xfs -q -f", 320);
	put("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
	if (mkdir(owners_group, 0755) && errno != EEXIST)
		throw std::runtime_error(fmt::format("mkdir {}: {}", owners_group, std::strerror(errno)));
	must("/sys/kernel/mm/ksm/sleep_millisecs", "20");
	put("/sys/kernel/debug/sched/numa_balancing/scan_period_min_ms", "20");
	calm();
}

host::~host()
{
	calm();
}

void host::calm()
{
	for (const char *dev : {NP_OWNER_DEV, NP_PEER_DEV}) {
		np_hca_set(dev, NP_HCA_DMA_REQUEST_SIZE, 512);
		np_hca_set(dev, NP_HCA_DMA_DELAY_NS, 0);
		np_hca_set(dev, NP_HCA_READ_OVERLAP, 0);
		np_hca_set(dev, NP_HCA_LOSS, 0);
	}
	np_set_hold_ms(NP_HOLD_MS);
	put("/sys/devices/system/cpu/cpu1/online", "1");
	put("/proc/sys/kernel/numa_balancing", "0");
	put("/sys/kernel/mm/ksm/run", "2");
	use_zram(false);
}

void host::use_zram(bool yes)
{
	if (yes == zram_)
		return;
	if (yes) {
		if (!put("/sys/block/zram0/disksize", "256M"))
			return;
		shell("mkswap -q /dev/zram0 >/dev/null 2>&1 || mkswap /dev/zram0 >/dev/null");
		if (swapon("/dev/zram0", 0))
			return;
		if (swapoff(swap_.c_str())) {
			swapoff("/dev/zram0");
			put("/sys/block/zram0/reset", "1");
			return;
		}
	} else {
		if (swapon(swap_.c_str(), 0) && errno != EBUSY)
			throw std::runtime_error(fmt::format("swapon {}: {}", swap_, std::strerror(errno)));
		if (swapoff("/dev/zram0"))
			return;
		put("/sys/block/zram0/reset", "1");
	}
	zram_ = yes;
}

void host::swap_again()
{
	const std::string now = zram_ ? "/dev/zram0" : swap_;

	if (!swapoff(now.c_str()) && swapon(now.c_str(), 0))
		throw std::runtime_error(fmt::format("swapon {}: {}", now, std::strerror(errno)));
}

/* A block of movable memory goes, with all that is in it elsewhere, and comes back. */
void host::memory_block()
{
	for (int tries = 0; tries < 8; tries++) {
		const std::string block = fmt::format("{}/memory{}", memory_blocks, random_.below(24));

		if (line_of(block + "/valid_zones") != "Movable" || has_poison(block))
			continue;
		if (put(block + "/state", "offline") && !put(block + "/state", "online_movable")) {
			/* Poisoned while it went: it stays away. */
			if (errno != EHWPOISON)
				throw std::runtime_error(fmt::format("{} cannot be put online: {}", block,
								     std::strerror(errno)));
			events_["block lost"]++;
		}
		return;
	}
}

void host::knob()
{
	const char *dev = random_.one_in(2) ? NP_OWNER_DEV : NP_PEER_DEV;

	switch (random_.below(4)) {
	case 0:
		np_hca_set(dev, NP_HCA_DMA_REQUEST_SIZE, 64ULL << random_.below(7));
		break;
	case 1:
		np_hca_set(dev, NP_HCA_DMA_DELAY_NS, random_.one_in(2) ? 0 : random_.below(20000));
		break;
	case 2:
		np_hca_set(dev, NP_HCA_READ_OVERLAP, random_.below(2));
		break;
	case 3:
		np_hca_set(dev, NP_HCA_LOSS, random_.one_in(2) ? 0 : random_.between(200, 5000));
		break;
	}
}

void host::event()
{
	static constexpr const char *what[] = {"knob",	 "knob",    "knob",	   "reclaim", "reclaim", "compact",
					       "caches", "swapoff", "fault-around", "zram",    "cpu",	  "balancing",
					       "ksm",	 "block"};
	const std::string name = what[random_.below(std::size(what))];

	events_[name]++;
	if (name == "knob")
		knob();
	else if (name == "reclaim")
		put(std::string(owners_group) + "/memory.reclaim", fmt::format("{}K", 4 * random_.between(1, 2048)));
	else if (name == "compact")
		put("/proc/sys/vm/compact_memory", "1");
	else if (name == "caches")
		put("/proc/sys/vm/drop_caches", random_.one_in(2) ? "3" : "1");
	else if (name == "swapoff")
		swap_again();
	else if (name == "fault-around")
		np_set_fault_around(1U << random_.below(7));
	else if (name == "zram")
		use_zram(random_.one_in(2));
	else if (name == "cpu")
		put("/sys/devices/system/cpu/cpu1/online", random_.one_in(3) ? "0" : "1");
	else if (name == "balancing")
		put("/proc/sys/kernel/numa_balancing", random_.one_in(2) ? "1" : "0");
	else if (name == "ksm")
		put("/sys/kernel/mm/ksm/run", random_.one_in(2) ? "1" : "0");
	else if (name == "block")
		memory_block();
}

void host::remove_device(void (*between)(void *), void *arg)
{
	const char *dev = random_.one_in(2) ? NP_OWNER_DEV : NP_PEER_DEV;
	char function[NP_FUNCTION_LEN];

	const bool unplug = random_.one_in(2);
	const char *what = unplug ? "unplug" : "unbind";

	events_[what]++;
	if (int error = np_device_remove(dev, unplug, function))
		throw std::runtime_error(fmt::format("{} of {}: {}", what, dev, std::strerror(-error)));
	between(arg);
	if (int error = np_device_return(dev, function))
		throw std::runtime_error(fmt::format("return after {} of {}: {}", what, dev, std::strerror(-error)));
}

} // namespace soak
