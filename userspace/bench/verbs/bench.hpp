/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the parts of nprdma-bench share: times, medians, memory of a known
 * state, initiators, and the report.
 *
 * What is compared is measured in turns: one round of each way, then the next
 * round, so that a machine that gets slower gets slower for all of them. What
 * is told is the median of the rounds.
 */
#ifndef NPRDMA_BENCH_HPP
#define NPRDMA_BENCH_HPP

#include "../../tools/demo/rc.hpp"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#ifndef IBV_ACCESS_UNPINNED
#define IBV_ACCESS_UNPINNED (1 << 10)
#endif

namespace bench
{

inline constexpr std::size_t page_size = 4096;
inline constexpr int remote_access =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
inline constexpr std::uint64_t MiB = 1ULL << 20, GiB = 1ULL << 30;

[[nodiscard]] inline double now_us() noexcept
{
	timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) / 1e3;
}

/* Samples of one quantity. */
class samples
{
public:
	void add(double x) { all_.push_back(x); }
	[[nodiscard]] std::size_t count() const noexcept { return all_.size(); }
	/* Of an even number the lower one; 0 of none. */
	[[nodiscard]] double quantile(double q) const
	{
		if (all_.empty())
			return 0;
		std::vector<double> sorted(all_);
		const auto at = static_cast<std::size_t>(q * static_cast<double>(sorted.size() - 1));

		std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(at),
				 sorted.end());
		return sorted[at];
	}
	[[nodiscard]] double median() const { return quantile(0.5); }

private:
	std::vector<double> all_;
};

/* Anonymous memory. */
class mapping
{
public:
	enum class pages { untouched, small, huge };

	mapping(std::size_t bytes, pages state) : bytes_(bytes)
	{
		addr_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (addr_ == MAP_FAILED)
			rc::fail(errno, "mmap");
		if (state == pages::untouched)
			return;
		if (madvise(addr_, bytes, state == pages::huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE))
			rc::fail(errno, "madvise");
		for (std::size_t at = 0; at < bytes; at += page_size)
			at_byte(at) = 1;
	}
	mapping(const mapping &) = delete;
	mapping &operator=(const mapping &) = delete;
	~mapping() { munmap(addr_, bytes_); }

	[[nodiscard]] void *addr() const noexcept { return addr_; }
	[[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
	[[nodiscard]] volatile char &at_byte(std::size_t at) const noexcept
	{
		return static_cast<volatile char *>(addr_)[at];
	}
	[[nodiscard]] std::uint64_t address() const noexcept
	{
		return reinterpret_cast<std::uintptr_t>(addr_);
	}

private:
	void *addr_;
	std::size_t bytes_;
};

/* A parameter of the kernel has another value while this exists. */
class kernel_parameter
{
public:
	kernel_parameter(std::string path, const char *value)
	    : path_(std::move(path)), before_(access(nullptr))
	{
		access(value);
	}
	kernel_parameter(const kernel_parameter &) = delete;
	kernel_parameter &operator=(const kernel_parameter &) = delete;
	~kernel_parameter()
	{
		try {
			access(before_.c_str());
		} catch (const std::exception &e) {
			std::fprintf(stderr, "nprdma-bench: not as it was before: %s\n", e.what());
		}
	}

private:
	std::string access(const char *value) const
	{
		const std::unique_ptr<std::FILE, int (*)(std::FILE *)> f(
		    std::fopen(path_.c_str(), value ? "w" : "r"), std::fclose);
		char text[32] = "";

		if (!f || (value ? std::fputs(value, f.get()) < 0 || std::fflush(f.get())
				 : !std::fgets(text, sizeof(text), f.get())))
			rc::fail(errno, path_);
		text[std::strcspn(text, "\n")] = 0;
		return text;
	}

	std::string path_, before_;
};

/* What was to be reached, and what was. */
struct target {
	std::string what;
	double got, limit;
	bool at_least; /* else at most */
	bool measured = true;

	[[nodiscard]] bool met() const noexcept
	{
		return measured && (at_least ? got >= limit : got <= limit);
	}
};

using row = std::vector<std::pair<std::string, double>>;

class report
{
public:
	/* A row of the table called @group; prints it at once, for those who wait. */
	void add(const std::string &group, const std::string &name, const row &values);
	void expect(target t) { targets_.push_back(std::move(t)); }
	/* A line about the circumstances. */
	void note(const std::string &name, const std::string &value) { notes_.emplace_back(name, value); }
	void print_targets() const;
	void write_json(const std::string &path) const;

private:
	struct entry {
		std::string name;
		row values;
	};
	std::vector<std::pair<std::string, std::string>> notes_;
	std::vector<std::pair<std::string, std::vector<entry>>> groups_;
	std::vector<target> targets_;
};

/* The round trip of an event-driven ping-pong; see pingpong.cpp. */
class pingpong
{
public:
	pingpong(const std::string &here, const std::string &there);
	pingpong(const pingpong &) = delete;
	pingpong &operator=(const pingpong &) = delete;
	~pingpong();

	/* Mean round trip of @iterations, in microseconds. */
	double round(int iterations);

	/* The other side, which is a process of its own. Does not return. */
	[[noreturn]] static void serve(const std::string &device, int socket);

private:
	struct side;
	std::unique_ptr<side> side_;
	pid_t child_ = -1;
};

/* What `ibv_rc_pingpong -e` says, in microseconds; nothing if it does not run. */
[[nodiscard]] std::optional<double> rc_pingpong(const std::string &server, const std::string &client);

struct devices {
	std::string responder = "mlx5_0", initiator = "mlx5_1";
};

struct options {
	devices dev;
	int rounds = 15;
	bool unpinned = true; /* false: pinned only, to try this program where unpinned does not work yet */
	std::vector<std::string> only;

	[[nodiscard]] bool wants(const std::string &part) const
	{
		return only.empty() || std::find(only.begin(), only.end(), part) != only.end();
	}
};

void measure_registration(const options &opt, report &out);
void measure_data_path(const options &opt, report &out);
void measure_faults(const options &opt, report &out);
void measure_leases(const options &opt, report &out);

} // namespace bench

#endif // NPRDMA_BENCH_HPP
