// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * nprdma-demo: a region larger than the machine's memory, read and written by a
 * peer with RDMA while the kernel pages it out, and nothing lost.
 *
 * This program starts the responder and the peer, shows how they get on, keeps
 * samples for the plot, and at the end says what happened: its exit status is 0
 * only if all that the demo promises was seen.
 */
#include "guest.hpp"
#include "rdma_show.hpp"
#include "shared.hpp"

#include <CLI/CLI.hpp>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace
{

using namespace demo;
using clock_type = std::chrono::steady_clock;

constexpr auto sample_interval = std::chrono::milliseconds(500);
constexpr int samples_per_line = 4;

[[noreturn]] void fail(const std::string &what)
{
	throw std::system_error(errno, std::generic_category(), what);
}

/* The kernel's count of pages that went to swap and came back. */
struct swap_traffic {
	std::uint64_t in = guest::number_of("/proc/vmstat", "pswpin");
	std::uint64_t out = guest::number_of("/proc/vmstat", "pswpout");
};

/* DMA that the IOMMU refused, of both HCAs. */
std::optional<std::uint64_t> dma_faults(const options &opt)
{
	const auto a = guest::hca_property(opt.responder_device, "dma-faults");
	const auto b = guest::hca_property(opt.peer_device, "dma-faults");

	if (!a || !b)
		return std::nullopt;
	return *a + *b;
}

/* A program beside this one, with the shared state and its end of the socket. */
class child
{
public:
	child(const char *program, int shared_fd, int socket) : name_(program)
	{
		const auto path = std::filesystem::read_symlink("/proc/self/exe").parent_path() / program;
		const std::string fds[] = {std::to_string(shared_fd), std::to_string(socket)};

		pid_ = fork();
		if (pid_ < 0)
			fail("fork");
		if (!pid_) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			fcntl(shared_fd, F_SETFD, 0);
			fcntl(socket, F_SETFD, 0);
			execl(path.c_str(), program, fds[0].c_str(), fds[1].c_str(), nullptr);
			std::fprintf(stderr, "%s: %s\n", path.c_str(), std::strerror(errno));
			_exit(127);
		}
	}
	child(const child &) = delete;
	child &operator=(const child &) = delete;
	~child()
	{
		if (pid_ > 0 && !ended_) {
			kill(pid_, SIGKILL);
			waitpid(pid_, nullptr, 0);
		}
	}

	/* True once it has ended. */
	bool ended()
	{
		if (!ended_ && waitpid(pid_, &status_, WNOHANG) == pid_)
			ended_ = true;
		return ended_;
	}

	[[nodiscard]] bool good() const noexcept { return ended_ && status_ == 0; }

	[[nodiscard]] std::string fate() const
	{
		if (!ended_)
			return fmt::format("{} was stopped", name_);
		if (WIFSIGNALED(status_))
			return fmt::format("{} died of {}", name_, strsignal(WTERMSIG(status_)));
		return fmt::format("{} ended with status {}", name_, WEXITSTATUS(status_));
	}

private:
	const char *name_;
	pid_t pid_;
	int status_ = 0;
	bool ended_ = false;
};

class monitor
{
public:
	monitor(shared &common, const std::filesystem::path &out)
	    : common_(common), begin_(clock_type::now()), last_time_(begin_)
	{
		if (out.empty())
			return;
		samples_.reset(std::fopen((out / "demo-samples.csv").c_str(), "w"));
		if (!samples_)
			fail("demo-samples.csv");
		fmt::print(samples_.get(), "seconds,phase,resident_kib,swapped_kib,pinned_kib,reads,writes,"
					   "cpu_checked,cpu_changed,faults_minor,faults_major,fault_requests,"
					   "suspicious_pages,repeated_pages,swap_ins,swap_outs,mismatches,"
					   "pages_read,pages_written,leased_kib,leases,recalls\n");
	}

	void sample()
	{
		const auto now = clock_type::now();
		const double seconds = std::chrono::duration<double>(now - begin_).count();
		const state &s = *common_.operator->();
		const std::string status = fmt::format("/proc/{}/status", s.responder_pid.get());
		const std::uint64_t rss = guest::number_of(status, "VmRSS");
		const std::uint64_t swap = guest::number_of(status, "VmSwap");
		const std::uint64_t pin = guest::number_of(status, "VmPin");
		const swap_traffic traffic;

		look_at_leases(s);
		most_resident_ = std::max(most_resident_, rss);
		most_pinned_ = std::max(most_pinned_, pin);
		if (samples_)
			fmt::print(samples_.get(),
				   "{:.3f},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n",
				   seconds, to_string(s.now), rss, swap, pin, s.reads.get(), s.writes.get(),
				   s.cpu_checked.get(), s.cpu_changed.get(), s.minor.get(), s.major.get(),
				   s.fault_requests.get(), s.suspicious.get(), s.repeated.get(),
				   traffic.in - start_.in, traffic.out - start_.out, s.mismatches.get(),
				   s.pages_read.get(), s.pages_written.get(), kib(region_.leased),
				   region_.leases, region_.recalls());
		if (count_++ % samples_per_line == 0)
			print(now, seconds, rss, swap);
	}

	[[nodiscard]] double seconds() const noexcept
	{
		return std::chrono::duration<double>(clock_type::now() - begin_).count();
	}
	[[nodiscard]] const swap_traffic &start() const noexcept { return start_; }
	[[nodiscard]] std::uint64_t most_resident() const noexcept { return most_resident_; }
	[[nodiscard]] std::uint64_t most_pinned() const noexcept { return most_pinned_; }
	[[nodiscard]] std::uint64_t most_leased() const noexcept { return most_leased_; }
	/* The responder's, as it was seen last: it ends with its process. */
	[[nodiscard]] const rdma_show::region &region() const noexcept { return region_; }

	static constexpr std::uint64_t kib(std::uint64_t pages) noexcept
	{
		return pages * (page_size / 1024);
	}

private:
	void look_at_leases(const state &s)
	{
		const rdma_show::region r = kernel_.region_of(
		    s.opt.responder_device, static_cast<pid_t>(s.responder_pid.get()), s.opt.bytes);

		if (r.counted)
			region_ = r;
		most_leased_ = std::max(most_leased_, kib(r.leased));
	}

	void print(clock_type::time_point now, double seconds, std::uint64_t rss, std::uint64_t swap)
	{
		const state &s = *common_.operator->();
		const std::uint64_t pages = s.pages_read.get() + s.pages_written.get();
		const double passed = std::chrono::duration<double>(now - last_time_).count();

		if (!heading_++)
			fmt::print("{:>6} {:<11} {:>5} {:>9} {:>9} {:>9} {:>10} {:>10} {:>9} {:>9} {:>9}\n",
				   "time", "phase", "done", "resident", "in swap", "pages/s", "pages done",
				   "CPU checks", "minor", "major", "mismatch");
		fmt::print(
		    "{:5.1f}s {:<11} {:>4}% {:>5} MiB {:>5} MiB {:>9.0f} {:>10} {:>10} {:>9} {:>9} {:>9}\n",
		    seconds, to_string(s.now), s.progress.get() * 100 / common_.page_count(), rss >> 10,
		    swap >> 10, passed > 0 ? static_cast<double>(pages - last_pages_) / passed : 0.0, pages,
		    s.cpu_checked.get(), s.minor.get(), s.major.get(), s.mismatches.get());
		std::fflush(stdout);
		last_pages_ = pages;
		last_time_ = now;
	}

	struct closer {
		void operator()(std::FILE *f) const noexcept { std::fclose(f); }
	};

	shared &common_;
	swap_traffic start_;
	clock_type::time_point begin_, last_time_;
	std::unique_ptr<std::FILE, closer> samples_;
	rdma_show::netlink kernel_;
	rdma_show::region region_;
	std::uint64_t last_pages_ = 0, most_resident_ = 0, most_pinned_ = 0, most_leased_ = 0;
	unsigned int count_ = 0, heading_ = 0;
};

/* What has to hold, and whether it did. */
class verdicts
{
public:
	void expect(bool held, std::string what) { list_.push_back({held, std::move(what)}); }

	[[nodiscard]] bool all() const
	{
		return std::all_of(list_.begin(), list_.end(), [](const auto &v) { return v.held; });
	}

	void print() const
	{
		for (const auto &v : list_)
			fmt::print("  {:<4} {}\n", v.held ? "yes" : "NO", v.what);
	}

private:
	struct one {
		bool held;
		std::string what;
	};
	std::vector<one> list_;
};

/* The rows of the table at the end, and of the JSON file. */
using table = std::vector<std::pair<std::string, std::uint64_t>>;

void write_json(const std::filesystem::path &file, const options &opt, const table &rows, double seconds,
		bool held)
{
	std::unique_ptr<std::FILE, int (*)(std::FILE *)> f(std::fopen(file.c_str(), "w"), std::fclose);

	if (!f)
		fail(file);
	fmt::print(f.get(), "{{\n  \"region_bytes\": {},\n  \"memory_bytes\": {},\n  \"seconds\": {:.3f},\n",
		   opt.bytes, guest::number_of("/proc/meminfo", "MemTotal") << 10, seconds);
	for (const auto &[name, value] : rows)
		fmt::print(f.get(), "  \"{}\": {},\n", name, value);
	fmt::print(f.get(), "  \"held\": {}\n}}\n", held);
}

int run(const options &opt, bool leases, const std::filesystem::path &out)
{
	shared common(opt);
	const state &s = *common.operator->();
	const auto faults_before = dma_faults(opt);
	int ends[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
		fail("socketpair");
	fmt::print("{} MiB of memory, {} MiB of swap; a region of {} MiB, {}\n",
		   guest::number_of("/proc/meminfo", "MemTotal") >> 10,
		   guest::number_of("/proc/meminfo", "SwapTotal") >> 10, opt.bytes >> 20,
		   opt.memory == kind::unpinned ? "unpinned" : "pinned");
	std::fflush(stdout);

	monitor watch(common, out);
	child responder("nprdma-demo-responder", common.fd(), ends[0]);
	child peer("nprdma-demo-peer", common.fd(), ends[1]);
	/* Each end has one holder, so that who waits for a dead process is told. */
	close(ends[0]);
	close(ends[1]);

	for (auto next = clock_type::now();; next += sample_interval) {
		/* Not ||: both are to be asked. */
		const bool a = responder.ended(), b = peer.ended();

		if ((a && b) || (a && !responder.good()) || (b && !peer.good()))
			break;
		watch.sample();
		std::this_thread::sleep_until(next + sample_interval);
	}
	watch.sample();

	const swap_traffic traffic;
	const auto faults_after = dma_faults(opt);
	const std::uint64_t pages = common.page_count();
	const table rows = {
	    {"reads", s.reads.get()},
	    {"writes", s.writes.get()},
	    {"pages_read", s.pages_read.get()},
	    {"pages_written", s.pages_written.get()},
	    {"cpu_checked", s.cpu_checked.get()},
	    {"cpu_changed", s.cpu_changed.get()},
	    {"fault_requests", s.fault_requests.get()},
	    {"faults_minor", s.minor.get()},
	    {"faults_major", s.major.get()},
	    {"suspicious_pages", s.suspicious.get()},
	    {"false_suspicions", s.false_suspicions.get()},
	    {"repeated_pages", s.repeated.get()},
	    {"holds", s.holds.get()},
	    {"busy_answers", s.busy.get()},
	    {"invalidations", s.invalidations.get()},
	    {"residency_table_pages", s.table_pages.get()},
	    {"swapped_in", traffic.in - watch.start().in},
	    {"swapped_out", traffic.out - watch.start().out},
	    {"paged_out_once", s.pages_out_once.get()},
	    {"paged_out_twice", s.pages_out_twice.get()},
	    {"out_by_advice_only", s.pages_advised.get()},
	    {"most_resident_kib", watch.most_resident()},
	    {"most_pinned_kib", watch.most_pinned()},
	    {"leases", watch.region().leases},
	    {"recalls_change", watch.region().recalls_change},
	    {"recalls_memory", watch.region().recalls_memory},
	    {"recalls_budget", watch.region().recalls_budget},
	    {"recalls_age", watch.region().recalls_age},
	    {"leases_overdue", watch.region().overdue},
	    {"most_leased_kib", watch.most_leased()},
	    {"register_ns", s.register_ns.get()},
	    {"injected", s.injected.get()},
	    {"mismatches", s.mismatches.get()},
	};
	const std::uint64_t swapped_out = traffic.out - watch.start().out;
	verdicts held;

	held.expect(responder.good(), responder.fate());
	held.expect(peer.good(), peer.fate());
	held.expect(s.now == phase::done,
		    fmt::format("the run got to its end (phase: {})", to_string(s.now)));
	held.expect(s.mismatches.get() == 0, fmt::format("{} mismatches", s.mismatches.get()));
	held.expect(
	    s.pages_written.get() >= 2 * pages && s.pages_read.get() >= pages,
	    fmt::format("each of {} pages was written, read back and written again by the peer", pages));
	held.expect(s.last_checked.get() == pages,
		    fmt::format("each was checked by the CPU at the end ({})", s.last_checked.get()));
	held.expect(s.cpu_changed.get() > 0,
		    fmt::format("the CPU changed pages meanwhile ({})", s.cpu_changed.get()));
	if (opt.memory == kind::unpinned) {
		held.expect(s.pin_errno.get() != 0,
			    fmt::format("pinning the same was refused ({})",
					std::strerror(static_cast<int>(s.pin_errno.get()))));
		held.expect(s.minor.get() + s.major.get() > 0 && s.fault_requests.get() > 0,
			    fmt::format("pages were faulted in for the peer ({} minor, {} major)",
					s.minor.get(), s.major.get()));
		held.expect(swapped_out >= 2 * pages,
			    fmt::format("the kernel wrote the region to swap {:.2f} times over ({} pages)",
					static_cast<double>(swapped_out) / static_cast<double>(pages),
					swapped_out));
		held.expect((watch.region().leases > 0) == leases && (watch.most_leased() > 0) == leases,
			    fmt::format("the peer had {} leases, of {} KiB at most", watch.region().leases,
					watch.most_leased()));
		held.expect(watch.region().leased == 0,
			    fmt::format("{} pages are leased at the end", watch.region().leased));
		held.expect(s.pages_out_twice.get() == pages,
			    fmt::format("each page was changed and paged out at least twice ({} of {})",
					s.pages_out_twice.get(), pages));
	}
	if (faults_before && faults_after)
		held.expect(*faults_before == *faults_after,
			    fmt::format("no access of the HCAs was refused by the IOMMU ({})",
					*faults_after - *faults_before));
	else
		fmt::print("DMA faults: not known, the HCA has no counter here\n");

	fmt::print("\n");
	for (const auto &[name, value] : rows) {
		std::string text = name;

		std::replace(text.begin(), text.end(), '_', ' ');
		fmt::print("  {:<24}{:>12}\n", text, value);
	}
	fmt::print("\n");
	held.print();
	if (!out.empty())
		write_json(out / "demo.json", opt, rows, watch.seconds(), held.all());
	return held.all() ? 0 : 1;
}

} // namespace

int main(int argc, char **argv)
{
	const char *out_default = std::getenv("NPRDMA_OUT");
	std::string out = out_default ? out_default : "", responder, peer;
	options opt;
	int page_cluster = 5;
	bool pinned = false, leases = true;
	CLI::App app("A peer reads and writes, with RDMA, memory that the kernel pages out.");
	const std::map<std::string, inject> injections = {{"nothing", inject::nothing},
							  {"lost-write", inject::lost_write},
							  {"stale-read", inject::stale_read},
							  {"discard", inject::discard}};

	responder = opt.responder_device;
	peer = opt.peer_device;
	app.add_option("--size", opt.bytes, "size of the region, as 3G (default)")
	    ->transform(CLI::AsSizeValue(false));
	app.add_option("--qps", opt.qps, "connections (4)")->check(CLI::Range(1, 64));
	app.add_option("--window", opt.window, "operations under way on each (4)")->check(CLI::Range(1, 32));
	app.add_option("--block", opt.block, "pages in one operation (128)")->check(CLI::Range(1, 256));
	app.add_option("--cpu-rate", opt.cpu_rate, "pages the responder's CPU changes each second (250)")
	    ->check(CLI::Range(1, 1000000));
	app.add_option("--page-cluster", page_cluster,
		       "vm.page-cluster: swap is read 2^N pages at a time (5)")
	    ->check(CLI::Range(0, 8));
	app.add_option("--seed", opt.seed, "of all that is random (1)");
	app.add_flag("--pinned", pinned, "control: ordinary memory");
	app.add_flag("--huge-pages", opt.huge_pages, "ask for transparent huge pages");
	app.add_flag("!--no-prefetch", opt.prefetch,
		     "let each page fault twice, to be read and to be written");
	app.add_flag("!--no-leases", leases, "control: the kernel grants none");
	app.add_flag("--plain-verbs", opt.plain_verbs, "control: the peer does without libnprdma");
	app.add_option("--inject", opt.fault,
		       "lose a write, take old data for a read, or discard a page, "
		       "to see it found: lost-write, stale-read, discard")
	    ->transform(CLI::CheckedTransformer(injections));
	app.add_option("--responder", responder, "device (mlx5_0)");
	app.add_option("--peer", peer, "device (mlx5_1)");
	app.add_option("--out", out, "directory for demo.json and demo-samples.csv ($NPRDMA_OUT)");
	CLI11_PARSE(app, argc, argv);

	opt.bytes &= ~(page_size - 1);
	if (!opt.bytes || responder.size() >= sizeof(opt.responder_device) ||
	    peer.size() >= sizeof(opt.peer_device)) {
		std::fprintf(stderr, "nprdma-demo: no size, or a device name that is too long\n");
		return 64;
	}
	opt.memory = pinned ? kind::pinned : kind::unpinned;
	std::strcpy(opt.responder_device, responder.c_str());
	std::strcpy(opt.peer_device, peer.c_str());
	/* Not for us to insist on: this is about time, not about what is shown. */
	std::ofstream("/proc/sys/vm/page-cluster") << page_cluster;
	if (!leases)
		std::ofstream("/sys/module/ib_core/parameters/nprdma_lease_percent") << 0;
	try {
		return run(opt, leases, out);
	} catch (const std::exception &e) {
		std::fprintf(stderr, "nprdma-demo: %s\n", e.what());
		return 1;
	}
}
