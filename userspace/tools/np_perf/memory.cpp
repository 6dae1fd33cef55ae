// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "memory.hpp"

#include "../demo/guest.hpp"
#include "../demo/page.hpp"
#include "../demo/rc.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <vector>

namespace perf
{

namespace
{

constexpr std::uint64_t word_step = 0x9e3779b97f4a7c15ULL;

} // namespace

pattern::pattern(std::uint64_t pass, std::uint64_t from, std::uint64_t index) noexcept
    : key(demo::mix(demo::mix(demo::mix(pass) ^ from) ^ index))
{
}

void pattern::fill(std::span<std::byte> out) const noexcept
{
	std::uint64_t word = key;

	for (; !out.empty(); word += word_step) {
		const std::uint64_t value = demo::mix(word);
		const std::size_t n = std::min(out.size(), sizeof(value));

		std::memcpy(out.data(), &value, n);
		out = out.subspan(n);
	}
}

bool pattern::matches(std::span<const std::byte> in) const noexcept
{
	std::uint64_t word = key;

	for (; !in.empty(); word += word_step) {
		const std::uint64_t value = demo::mix(word);
		const std::size_t n = std::min(in.size(), sizeof(value));

		if (std::memcmp(in.data(), &value, n) != 0)
			return false;
		in = in.subspan(n);
	}
	return true;
}

memory::memory(std::size_t bytes, bool minor, bool small_pages) : bytes_(bytes), minor_(minor)
{
	int fd = -1;

	if (minor) {
		fd = memfd_create("np_perf", MFD_CLOEXEC);
		if (fd < 0)
			rc::fail(errno, "memfd_create");
		if (ftruncate(fd, static_cast<off_t>(bytes))) {
			const int error = errno;

			close(fd);
			rc::fail(error, fmt::format("{} bytes of shared memory", bytes));
		}
	}
	void *const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
			     minor ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, fd, 0);
	const int error = errno;

	if (fd >= 0)
		close(fd);
	if (p == MAP_FAILED)
		rc::fail(error, fmt::format("{} bytes of memory", bytes));
	addr_ = static_cast<std::byte *>(p);
	/* Without it a page that is taken away may cost 511 others their huge page. */
	if (small_pages)
		(void)madvise(addr_, bytes, MADV_NOHUGEPAGE);
	/* Content that swap cannot take for zeros. */
	for (std::size_t at = 0; at < bytes; at += page_size) {
		const std::uint64_t value = demo::mix(at + 1);

		std::memcpy(addr_ + at, &value, sizeof(value));
	}
}

memory::~memory()
{
	munmap(addr_, bytes_);
}

void memory::make_resident() const noexcept
{
	for (std::size_t at = 0; at < bytes_; at += page_size)
		(void)*static_cast<volatile std::byte *>(addr_ + at);
}

void memory::make_absent(unsigned percent, std::uint64_t seed) const
{
	const auto wanted = [&](std::size_t page) {
		return demo::mix(seed ^ demo::mix(page)) % 100 < percent;
	};
	const std::size_t pages = bytes_ / page_size;

	for (std::size_t page = 0; page < pages;) {
		std::size_t end = page;

		while (end < pages && wanted(end))
			end++;
		if (end > page && madvise(addr_ + page * page_size, (end - page) * page_size,
					  minor_ ? MADV_DONTNEED : MADV_PAGEOUT))
			rc::fail(errno, minor_ ? "MADV_DONTNEED" : "MADV_PAGEOUT");
		page = end + 1;
	}
}

/* What is in the swap cache is in memory: a fault there reads nothing. */
std::size_t memory::not_in_memory() const
{
	const std::size_t pages = bytes_ / page_size;
	std::vector<unsigned char> there(std::min<std::size_t>(pages, 8192));
	std::size_t gone = 0;

	for (std::size_t page = 0; page < pages; page += there.size()) {
		const std::size_t n = std::min(there.size(), pages - page);

		if (mincore(addr_ + page * page_size, n * page_size, there.data()))
			rc::fail(errno, "mincore");
		for (std::size_t i = 0; i < n; i++)
			gone += !(there[i] & 1);
	}
	return gone;
}

std::size_t memory::not_mapped() const
{
	constexpr std::uint64_t present = 1ULL << 63;
	const std::size_t pages = bytes_ / page_size;
	std::vector<std::uint64_t> entries(std::min<std::size_t>(pages, 8192));
	const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	std::size_t gone = 0;

	if (fd < 0)
		rc::fail(errno, "/proc/self/pagemap");
	for (std::size_t page = 0; page < pages; page += entries.size()) {
		const std::size_t n = std::min(entries.size(), pages - page);
		const auto first = reinterpret_cast<std::uintptr_t>(addr_) / page_size + page;

		if (pread(fd, entries.data(), n * sizeof(std::uint64_t),
			  static_cast<off_t>(first * sizeof(std::uint64_t))) !=
		    static_cast<ssize_t>(n * sizeof(std::uint64_t))) {
			const int error = errno;

			close(fd);
			rc::fail(error, "/proc/self/pagemap");
		}
		for (std::size_t i = 0; i < n; i++)
			gone += !(entries[i] & present);
	}
	close(fd);
	return gone;
}

unsigned memory::absent() const
{
	const std::size_t pages = bytes_ / page_size, gone = minor_ ? not_mapped() : not_in_memory();

	return static_cast<unsigned>((gone * 100 + pages / 2) / pages);
}

namespace
{

constexpr const char *group_root = "/sys/fs/cgroup";

/* False: errno says why. */
bool write_file(const std::string &path, const std::string &text)
{
	const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return false;
	const bool ok = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
	const int error = errno;

	close(fd);
	errno = error;
	return ok;
}

} // namespace

evictor::evictor(std::size_t bytes_at_once) : group_(fmt::format("{}/np_perf.{}", group_root, getpid()))
{
	const std::string why =
	    "--pressure needs the memory controller of cgroup 2 in /sys/fs/cgroup, and root";
	int ends[2];

	if (!write_file(std::string(group_root) + "/cgroup.subtree_control", "+memory") ||
	    mkdir(group_.c_str(), 0755))
		rc::fail(errno, why);
	if (pipe2(ends, O_CLOEXEC)) {
		const int error = errno;

		rmdir(group_.c_str());
		rc::fail(error, "pipe");
	}
	commands_ = ends[1];
	child_ = fork();
	if (!child_) {
		close(ends[1]);
		evict(ends[0], bytes_at_once);
	}
	const int error = errno;
	close(ends[0]);
	if (child_ < 0) {
		close(commands_);
		rmdir(group_.c_str());
		rc::fail(error, "fork");
	}
	if (!write_file(group_ + "/cgroup.procs", "0")) {
		const int refused = errno;

		close(commands_);
		waitpid(child_, nullptr, 0);
		rc::fail(refused, why);
	}
}

evictor::~evictor()
{
	/* The child removes the group when nobody is left in it. */
	(void)write_file(std::string(group_root) + "/cgroup.procs", "0");
	close(commands_);
	waitpid(child_, nullptr, 0);
}

void evictor::tell(char what) const
{
	if (write(commands_, &what, 1) != 1)
		rc::fail(errno, "the process that evicts");
}

void evictor::reclaim(std::size_t bytes) const
{
	/* Not all that is asked for may be there. */
	(void)write_file(group_ + "/memory.reclaim", std::to_string(bytes));
}

void evictor::start()
{
	before_ = guest::number_of(group_ + "/memory.stat", "pgsteal");
	tell('e');
}

std::uint64_t evictor::stop()
{
	tell('s');
	return (guest::number_of(group_ + "/memory.stat", "pgsteal") - before_) * page_size;
}

void evictor::evict(int commands, std::size_t bytes) const
{
	bool evicting = false;

	std::signal(SIGINT, SIG_IGN);
	std::signal(SIGTERM, SIG_IGN);
	for (;;) {
		char what;

		fcntl(commands, F_SETFL, evicting ? O_NONBLOCK : 0);
		const ssize_t n = read(commands, &what, 1);
		if (!n || (n < 0 && errno != EAGAIN && errno != EINTR))
			break;
		if (n > 0)
			evicting = what == 'e';
		if (evicting) {
			reclaim(bytes);
			usleep(2000);
		}
	}
	/* The process may still be on its way out of there. */
	for (int i = 0; rmdir(group_.c_str()) && errno == EBUSY && i < 500; i++)
		usleep(10'000);
	_exit(0);
}

} // namespace perf
