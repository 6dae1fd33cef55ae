// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma_soak: all verbs and all events of memory at random, for as long as one likes, in a
 * guest of its own (scripts/soak). Cells (cell.hpp) come and go, their processes are killed,
 * the host is troubled (host.hpp); each round ends with a look at what is left behind.
 *
 * The seed decides what is tried and in which order; how it meets is up to the machine.
 */
#include "host.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

namespace soak
{

const char *name_of(memory m) noexcept
{
	static constexpr const char *names[] = {"anonymous", "huge pages", "memfd", "hugetlb", "ext4", "xfs"};

	return m < memory::kinds ? names[static_cast<unsigned>(m)] : "?";
}

void fail(cell &c, const std::string &why)
{
	if (!c.told.test_and_set()) {
		std::strncpy(c.why, why.c_str(), sizeof(c.why) - 1);
		std::atomic_thread_fence(std::memory_order_seq_cst);
	}
	_exit(failed);
}

namespace
{

struct options {
	double minutes = 2;
	std::uint64_t seed = 1;
	unsigned cells = 2;
	unsigned round_seconds = 60;
};

/* What all cells did, those that are gone included. */
struct totals {
	std::uint64_t n[18] = {};
	static constexpr const char *names[] = {
	    "READ",	   "WRITE",	    "WRITE with immediate", "SEND",	    "atomic",	   "inline",
	    "local buffer in unpinned memory", "MiB",	    "message",		    "probe READ",   "probe WRITE", "probe refused",
	    "fault",	   "hold",	    "suspicious page",	    "event not to be noticed",
	    "event to be noticed", "re-registration"};

	void add(const counters &c)
	{
		const std::uint64_t more[] = {c.reads,	   c.writes,	   c.writes_imm,    c.sends,
					      c.atomics,   c.inlines,	   c.unpinned_local, c.bytes,
					      c.received,  c.probe_reads,  c.probe_writes,  c.probe_refused,
					      c.faults,	   c.holds,	   c.suspicious,    c.kept_events,
					      c.lossy_events, c.reregistrations};
		static_assert(std::size(more) == std::size(names));
		for (std::size_t i = 0; i < std::size(more); i++)
			n[i] += more[i];
	}
};

/* Where the threads of a process are, for whom has to find out why it does not end. */
void show_threads(pid_t pid)
{
	std::error_code error;

	for (const auto &task : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", pid), error)) {
		fmt::print("soak: thread {}\n", task.path().string());
		for (const char *name : {"stat", "syscall", "stack"}) {
			std::ifstream file(task.path() / name);

			for (std::string line; std::getline(file, line);)
				fmt::print("\t{}\n", line);
		}
	}
	std::fflush(stdout);
}

class slot
{
public:
	slot(unsigned number, totals &sum) : number_(number), sum_(sum) {}

	void start(random_source &random)
	{
		void *p = mmap(nullptr, sizeof(cell), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

		if (p == MAP_FAILED)
			throw std::runtime_error("no memory for a cell");
		c_ = new (p) cell{};
		c_->seed = random.word();
		c_->number = number_;
		c_->kind = static_cast<memory>(random.below(static_cast<unsigned>(memory::kinds)));
		c_->relaxed = random.one_in(3);
		c_->events = random.one_in(3);
		std::strncpy(c_->group, owners_group, sizeof(c_->group) - 1);
		owner_ = spawn(run_owner);
		await_session(0);
		peer_ = spawn(run_peer);
	}

	/* What has ended by itself has failed. */
	void watch()
	{
		int status;

		if (owner_ && waitpid(owner_, &status, WNOHANG) == owner_)
			broken("owner", status);
		if (peer_ && waitpid(peer_, &status, WNOHANG) == peer_)
			broken("peer", status);
	}

	void kill_peer()
	{
		const std::uint32_t session = c_->owner_session;

		put_down(peer_);
		c_->peer_is_gone = true;
		await_session(session);
		peer_ = spawn(run_peer);
	}

	/* The peer has to find out by itself. */
	void kill_owner()
	{
		put_down(owner_);
		c_->owner_is_gone = true;
		await(peer_, "peer", disconnected);
		end();
	}

	void kill_both()
	{
		put_down(owner_);
		c_->owner_is_gone = true;
		put_down(peer_);
		end();
	}

	void disown() { c_->owner_is_gone = true; }

	void stop()
	{
		c_->stop = true;
		await(peer_, "peer", done);
		c_->peer_done = true;
		await(owner_, "owner", done);
		end();
	}

	[[nodiscard]] bool runs() const { return c_; }
	[[nodiscard]] const cell &state() const { return *c_; }

private:
	template <class F> pid_t spawn(F run)
	{
		std::fflush(nullptr);
		const pid_t pid = np_fork();

		if (pid < 0)
			throw std::runtime_error("fork");
		if (!pid)
			_exit(run(*c_));
		return pid;
	}

	void put_down(pid_t &pid)
	{
		int status;

		kill(pid, SIGKILL);
		if (waitpid(pid, &status, 0) != pid)
			throw std::runtime_error("waitpid");
		/* It may have seen the end of its device before. */
		if (!(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) &&
		    !(c_->owner_is_gone && WIFEXITED(status) && WEXITSTATUS(status) == disconnected))
			broken("killed process", status);
		pid = 0;
	}

	void await(pid_t &pid, const char *who, int wanted)
	{
		const std::uint64_t until = np_now_ms() + 3 * NP_WAIT_MS;
		int status;

		while (waitpid(pid, &status, WNOHANG) != pid) {
			if (np_now_ms() > until) {
				show_threads(pid);
				throw std::runtime_error(fmt::format("the {} of a cell in {}, seed {}, does not end: {}", who,
								     name_of(c_->kind), c_->seed,
								     c_->why[0] ? c_->why : "it said nothing"));
			}
			np_pause();
		}
		if (!WIFEXITED(status) || WEXITSTATUS(status) != wanted)
			broken(who, status);
		pid = 0;
	}

	void await_session(std::uint32_t before)
	{
		for (deadline end; c_->owner_session == before;) {
			watch_owner();
			if (end.over())
				throw std::runtime_error("an owner does not begin");
			np_pause();
		}
	}

	void watch_owner()
	{
		int status;

		if (waitpid(owner_, &status, WNOHANG) == owner_)
			broken("owner", status);
	}

	[[noreturn]] void broken(const char *who, int status)
	{
		const std::string how = WIFSIGNALED(status) ? fmt::format("signal {}", WTERMSIG(status))
							     : fmt::format("status {}", WEXITSTATUS(status));

		throw std::runtime_error(fmt::format("the {} of a cell in {}{}, seed {}: {}: {}", who, name_of(c_->kind),
						     c_->relaxed ? ", relaxed order" : "", c_->seed, how,
						     c_->why[0] ? c_->why : "it said nothing"));
	}

	void end()
	{
		sum_.add(c_->count);
		munmap(c_, sizeof(*c_));
		c_ = nullptr;
	}

	unsigned number_;
	totals &sum_;
	cell *c_ = nullptr;
	pid_t owner_ = 0, peer_ = 0;
};

class driver
{
public:
	explicit driver(const options &o) : o_(o), random_(o.seed), host_(o.seed + 1)
	{
		if (int error = np_usage_start(&before_))
			throw std::runtime_error(fmt::format("usage: {}", std::strerror(-error)));
		for (unsigned i = 0; i < o.cells; i++)
			slots_.emplace_back(i + 1, sum_);
	}

	void run()
	{
		const std::uint64_t begin = np_now_ms(), end = begin + static_cast<std::uint64_t>(o_.minutes * 60000);
		unsigned rounds = 0;

		begin_ = last_report_ = begin;
		while (np_now_ms() < end) {
			rounds_ = ++rounds;
			round(std::min<std::uint64_t>(end, np_now_ms() + o_.round_seconds * 1000));
		}
		report();
		fmt::print("soak: {} rounds, {} processes killed; nothing lost, nothing left behind\n", rounds, kills_);
		for (std::size_t i = 0; i < std::size(sum_.n); i++)
			fmt::print("soak: {:>12} x {}\n", i == 7 ? sum_.n[i] >> 20 : sum_.n[i], totals::names[i]);
		for (const auto &[name, n] : host_.events())
			fmt::print("soak: {:>12} x host: {}\n", n, name);
	}

private:
	void round(std::uint64_t end)
	{
		for (slot &s : slots_)
			s.start(random_);
		std::uint64_t next_kill = np_now_ms() + random_.between(3000, 15000);
		while (np_now_ms() < end) {
			host_.event();
			const std::uint64_t until = np_now_ms() + random_.below(400);
			do {
				for (slot &s : slots_)
					s.watch();
				np_pause();
			} while (np_now_ms() < until);
			if (np_now_ms() > next_kill) {
				kill_one();
				next_kill = np_now_ms() + random_.between(3000, 15000);
			}
			if (np_now_ms() > last_report_ + 10000)
				report();
		}
		if (random_.one_in(4)) {
			for (slot &s : slots_)
				s.disown();
			host_.remove_device([](void *arg) {
				for (slot &s : static_cast<driver *>(arg)->slots_)
					s.kill_both();
			}, this);
		} else {
			for (slot &s : slots_)
				s.stop();
		}
		host_.calm();
		if (const char *differs = np_usage_wait(&before_))
			throw std::runtime_error(fmt::format("after round {} {}", rounds_, differs));
	}

	void kill_one()
	{
		slot &s = slots_[random_.below(slots_.size())];

		kills_++;
		switch (random_.below(4)) {
		case 0:
		case 1:
			return s.kill_peer();
		case 2:
			s.kill_owner();
			break;
		case 3:
			s.kill_both();
			break;
		}
		s.start(random_);
	}

	void report()
	{
		totals now = sum_;
		const std::uint64_t seconds = (np_now_ms() - begin_) / 1000;

		for (const slot &s : slots_)
			if (s.runs())
				now.add(s.state().count);
		last_report_ = np_now_ms();
		fmt::print("soak: {}:{:02} of {}:00, round {}: {} READs, {} WRITEs, {} messages, {} atomics, {} probes, {} events, "
			   "{} kills\n",
			   seconds / 60, seconds % 60, o_.minutes, rounds_, now.n[0], now.n[1] + now.n[2], now.n[8], now.n[4],
			   now.n[9] + now.n[10], now.n[15] + now.n[16], kills_);
		std::fflush(stdout);
	}

	options o_;
	random_source random_;
	host host_;
	np_usage before_{};
	totals sum_;
	std::vector<slot> slots_;
	std::uint64_t begin_ = 0, last_report_ = 0;
	unsigned rounds_ = 0, kills_ = 0;
};

} // namespace
} // namespace soak

int main(int argc, char **argv)
{
	soak::options o;
	CLI::App app{"All verbs and all events of memory at random, in a guest of its own"};

	app.add_option("--minutes", o.minutes, "how long")->check(CLI::PositiveNumber);
	app.add_option("--seed", o.seed, "of what is tried");
	app.add_option("--cells", o.cells, "owners with a peer at a time")->check(CLI::Range(1, 6));
	app.add_option("--round", o.round_seconds, "seconds until a look at what is left behind")->check(CLI::PositiveNumber);
	CLI11_PARSE(app, argc, argv);
	fmt::print("soak: {} minutes, seed {}\n", o.minutes, o.seed);
	std::fflush(stdout);
	try {
		soak::driver(o).run();
		return 0;
	} catch (const std::exception &e) {
		fmt::print("soak: FAILED (seed {}): {}\n", o.seed, e.what());
		return 1;
	}
}
