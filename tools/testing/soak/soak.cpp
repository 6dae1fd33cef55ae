// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma_soak: all verbs and all events of memory at random, for as long as one likes, in a
 * guest of its own (scripts/soak). Cells (cell.hpp) come and go, their processes are killed,
 * the host is troubled (host.hpp); each round ends with a look at what is left behind.
 *
 * The seed decides what is tried and in which order; how it meets is up to the machine.
 */
#include "host.hpp"
#include "leases.hpp"
#include "pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

namespace soak
{

const char *name_of(memory m) noexcept
{
	static constexpr const char *names[] = {"anonymous", "huge pages", "memfd",    "hugetlb",
						"ext4",      "xfs",        "ext4-dax", "xfs-dax"};

	return m < memory::kinds ? names[static_cast<unsigned>(m)] : "?";
}

void fail(cell &c, const std::string &why)
{
	if (const unsigned n = c.telling++; n < std::size(c.why))
		std::strncpy(c.why[n], why.c_str(), sizeof(c.why[n]) - 1);
	c.told++;
	_exit(failed);
}

namespace
{

struct options {
	double minutes = 2;
	std::uint64_t seed = 1;
	unsigned cells = 2;
	unsigned round_seconds = 20;
	unsigned patience = 4;
	bool break_model = false, no_leases = false;
};

/* A run of so many minutes has to have done everything at least once. */
constexpr double minutes_for_all = 2;
/*
 * While a peer is stopped, peers have so long to give a hold or a lease back; at all other times
 * they have NP_HOLD_MS, so that nobody loses a queue pair for being slow. A peer that is stopped idle
 * must not lose it either, and has what the kernel gives by default.
 */
constexpr unsigned usual_hold_ms = 5000, short_hold_ms = 2000;

/* Where the threads of a process are, for whom has to find out why it does not end. */
void show_threads(pid_t pid)
{
	std::error_code error;

	for (const auto &task :
	     std::filesystem::directory_iterator(fmt::format("/proc/{}/task", pid), error)) {
		fmt::print("soak: thread {}\n", task.path().string());
		for (const char *name : {"stat", "syscall", "stack"}) {
			std::ifstream file(task.path() / name);

			for (std::string line; std::getline(file, line);)
				fmt::print("\t{}\n", line);
		}
	}
	std::fflush(stdout);
}

/* Does a thread of the process wait for what no signal ends? */
bool has_stuck_thread(pid_t pid)
{
	std::error_code error;

	for (const auto &task :
	     std::filesystem::directory_iterator(fmt::format("/proc/{}/task", pid), error)) {
		const std::string line = line_of(task.path() / "stat");
		const std::size_t end = line.rfind(')');

		/* Not in a page fault on its way there. */
		if (end != std::string::npos && line.compare(end + 2, 1, "D") == 0 &&
		    line_of(task.path() / "comm") == stuck_thread &&
		    line_of(task.path() / "syscall").starts_with(fmt::format("{} ", SYS_openat)))
			return true;
	}
	return false;
}

/* The last of what it has said about RDMA that is no mere information. */
std::string warnings()
{
	const int fd = open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	std::vector<std::string> lines;
	std::string all;
	char record[8192];

	/* EPIPE: some are lost */
	for (ssize_t n; (n = read(fd, record, sizeof(record))) > 0 || (n < 0 && errno == EPIPE);) {
		const std::string line(record, static_cast<std::size_t>(std::max<ssize_t>(n, 0)));

		/* Priority, sequence number, microseconds; then the text */
		if (!line.empty() && (std::atoi(line.c_str()) & 7) <= 4 &&
		    (line.find("infiniband") != line.npos || line.find("mlx5") != line.npos ||
		     line.find("emory failure") != line.npos) &&
		    line.find("re-registration") == line.npos && line.find("bitmask") == line.npos)
			lines.push_back(line.substr(0, line.find('\n')));
	}
	close(fd);
	for (std::size_t i = lines.size() > 20 ? lines.size() - 20 : 0; i < lines.size(); i++)
		all += "\n  " + lines[i];
	return all;
}

/* What the kernel says from now on. */
class kernel_log
{
public:
	kernel_log() : fd_(open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC))
	{
		if (fd_ < 0 || lseek(fd_, 0, SEEK_END) < 0)
			throw std::runtime_error("/dev/kmsg");
	}
	~kernel_log() { close(fd_); }
	kernel_log(const kernel_log &) = delete;
	kernel_log &operator=(const kernel_log &) = delete;

	/* False: it says the other thing, or has no reason to say anything. */
	template <class F> bool await(const std::string &what, const std::string &other, F reason)
	{
		std::string said;
		char record[8192];

		for (deadline end; !end.over(); np_pause()) {
			for (ssize_t n; (n = read(fd_, record, sizeof(record))) > 0;) {
				const std::string_view line(record, static_cast<std::size_t>(n));

				if (line.find(what) != line.npos)
					return true;
				if (line.find(other) != line.npos)
					return false;
				said += line;
			}
			if (!reason())
				return false;
		}
		throw std::runtime_error(
		    fmt::format("the kernel says neither '{}' nor '{}', but\n{}", what, other, said));
	}

private:
	int fd_;
};

/* What cells are like: each sort has its turn. */
struct cards {
	deck<memory> kind{{memory::anonymous, memory::huge_pages, memory::memfd, memory::hugetlb,
			   memory::ext4, memory::xfs, memory::ext4_dax, memory::xfs_dax}};
	deck<ibv_qp_type> side{{IBV_QPT_UC, IBV_QPT_UD}};
	deck<int> relaxed{{false, false, true}}, events{{false, false, true}};
	deck<int> shared_receives{{false, true}}, extended{{false, true}}, extended_poll{{false, true}};
	deck<int> all_signaled{{false, false, true}};
};

class slot
{
public:
	slot(unsigned number, cards &deal, tally &count, link_state &link)
	    : number_(number), deal_(deal), count_(count), link_(link)
	{
	}

	void start(random_source &random)
	{
		c_ = make_shared_memory<cell>();
		c_->seed = random.word();
		c_->number = number_;
		c_->count = &count_;
		c_->link = &link_;
		c_->kind = deal_.kind.draw(random);
		c_->relaxed = deal_.relaxed.draw(random);
		c_->events = deal_.events.draw(random);
		c_->side = deal_.side.draw(random);
		c_->shared_receives = deal_.shared_receives.draw(random);
		c_->extended = deal_.extended.draw(random);
		c_->extended_poll = deal_.extended_poll.draw(random);
		c_->all_signaled = deal_.all_signaled.draw(random);
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
		if (!peer_ || waitpid(peer_, &status, WNOHANG) != peer_)
			return;
		if (!c_->may_lose || !WIFEXITED(status) || WEXITSTATUS(status) != lost)
			broken("peer", status);
		peer_ = 0;
	}

	void kill_peer()
	{
		put_down(peer_);
		replace_peer();
	}

	/* It has ended. */
	void replace_peer()
	{
		const std::uint32_t session = c_->owner_session;

		c_->peer_is_gone = true;
		await_session(session);
		peer_ = spawn(run_peer);
	}

	/* What is under way comes to its end, and nothing new begins. */
	void be_quiet(bool yes)
	{
		if (yes)
			c_->main_idle = c_->probe_idle = false;
		c_->quiet = yes;
	}
	[[nodiscard]] bool is_idle() const { return c_->main_idle && c_->probe_idle; }

	/* True: it has leases of the region, and requests under way or none, as asked. Else it goes on. */
	bool stop_peer(lease_watch &leases, bool busy)
	{
		siginfo_t info;

		c_->stopped = true;
		kill(peer_, SIGSTOP);
		/* Until all its threads are. One that has ended instead stays for watch() to find. */
		if (waitid(P_PID, static_cast<id_t>(peer_), &info, WSTOPPED | WEXITED | WNOWAIT))
			throw std::runtime_error("waitid");
		if (info.si_code == CLD_STOPPED && (c_->under_way != 0) == busy && leases.leased_by(owner_))
			return true;
		continue_peer();
		return false;
	}
	void continue_peer()
	{
		c_->stopped = false;
		kill(peer_, SIGCONT);
	}

	/* The peer may lose its queue pairs. What the model says holds all the same. */
	void allow_loss(bool yes) { c_->may_lose = yes; }
	[[nodiscard]] bool has_lost() const { return !peer_; }

	/* The owner comes to rest, and obeys when it is told to go. */
	void give(order o) { c_->wanted = o; }
	[[nodiscard]] bool waits() const { return c_->waits; }
	/* @obey: false: the order is taken back. */
	void go(bool obey)
	{
		if (!obey)
			c_->wanted = order::nothing;
		c_->go = true;
	}
	[[nodiscard]] bool goes_on() const { return !c_->go; }

	/* Requests of the main connection, and of the probe, that have ended. */
	[[nodiscard]] std::uint64_t finished() const { return c_->finished; }
	[[nodiscard]] std::uint64_t probed() const { return c_->probed; }
	[[nodiscard]] std::string who() const
	{
		return fmt::format("a cell in {}, seed {}", name_of(c_->kind), c_->seed);
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

	/* It goes on as another program; all that is not closed by that stays open, or nothing. */
	void exec_owner()
	{
		const std::string comm = fmt::format("/proc/{}/comm", owner_);

		c_->exec = true;
		for (const std::uint64_t end = np_now_ms() + 3 * NP_WAIT_MS; line_of(comm) != "sleep";) {
			watch();
			if (np_now_ms() > end)
				throw std::runtime_error("an owner does not exec");
			np_pause();
		}
		kill_owner();
	}

	/* By the kernel; the peer has to find out by itself. */
	void oom_kill_owner()
	{
		choose_for_oom();
		kill_owner();
	}

	/*
	 * It is killed for want of memory and cannot end, so its memory is taken from it under
	 * its peer, which may find that out but not bring anything else. False: it ended all
	 * the same, or the reaper has not had the lock of its address space in time.
	 */
	bool reap_owner()
	{
		kernel_log log;

		freeze(true);
		c_->hang = true;
		/* What it waits for before that has an end of its own, and it says then what that is. */
		for (const std::uint64_t end = np_now_ms() + 3 * NP_WAIT_MS; !has_stuck_thread(owner_);) {
			watch();
			if (np_now_ms() > end) {
				show_threads(owner_);
				show_threads(peer_);
				throw std::runtime_error(fmt::format("an owner does not get stuck: {}",
								     kind_names[c_->doing.load()]));
			}
			np_pause();
		}
		choose_for_oom();
		const bool reaped = log.await(fmt::format("oom_reaper: reaped process {} ", owner_),
					      fmt::format("oom_reaper: unable to reap pid:{} ", owner_),
					      [this] { return has_stuck_thread(owner_); });
		freeze(false);
		kill_owner();
		return reaped;
	}

	/* As if a bit of each page were not what it is said to be. */
	void break_model()
	{
		for (unsigned i = 0; i < region_pages; i++)
			c_->shadow[i * PAGE] ^= 1;
	}

	/* What is ended before has been of no use, which is what a slow machine would come to. */
	[[nodiscard]] bool has_worked() const { return c_->finished >= 32; }

	void disown() { c_->owner_is_gone = true; }

	void stop()
	{
		c_->stop = true;
		await(peer_, "peer", done);
		c_->peer_done = true;
		await(owner_, "owner", done);
		end();
	}

private:
	/* The kernel kills it, and nobody else. */
	void choose_for_oom()
	{
		const long before = np_vmstat("oom_kill");

		put(fmt::format("/proc/{}/oom_score_adj", owner_), "1000");
		put("/proc/sysrq-trigger", "f");
		for (deadline end; np_vmstat("oom_kill") == before;) {
			if (end.over())
				throw std::runtime_error("nobody is killed for want of memory");
			np_pause();
		}
	}

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
				throw std::runtime_error(
				    fmt::format("the {} of a cell in {}, seed {}, does not end: {}", who,
						name_of(c_->kind), c_->seed, reason()));
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

		throw std::runtime_error(fmt::format("the {} of a cell in {}{}, seed {}: {}: {}", who,
						     name_of(c_->kind), c_->relaxed ? ", relaxed order" : "",
						     c_->seed, how, reason()));
	}

	/* What both say, if the other one says something soon, and what the kernel warned of. */
	std::string reason()
	{
		const std::uint64_t until = np_now_ms() + 5000;
		std::string all;

		while (c_->told < std::size(c_->why) && np_now_ms() < until)
			np_pause();
		for (const char *why : {c_->why[0], c_->why[1]})
			all += fmt::format("{}{}",
					   all.empty() ? "" : "\n  the other one: ", *why ? why : "nothing");
		return all + warnings();
	}

	void end()
	{
		munmap(c_, sizeof(*c_));
		c_ = nullptr;
	}

	unsigned number_;
	cards &deal_;
	tally &count_;
	link_state &link_;
	cell *c_ = nullptr;
	pid_t owner_ = 0, peer_ = 0;
};

class driver
{
public:
	explicit driver(const options &o)
	    : o_(o),
	      random_(o.seed),
	      count_(*make_shared_memory<tally>()),
	      link_(*make_shared_memory<link_state>()),
	      host_(o.seed + 1, count_, link_, !o.no_leases),
	      leases_(count_)
	{
		if (int error = np_usage_start(&before_))
			throw std::runtime_error(fmt::format("usage: {}", std::strerror(-error)));
		for (unsigned i = 0; i < o.cells; i++)
			slots_.emplace_back(i + 1, cards_, count_, link_);
	}

	void run()
	{
		const std::uint64_t begin = np_now_ms(),
				    end = begin + static_cast<std::uint64_t>(o_.minutes * 60000);
		const std::uint64_t last =
		    begin + static_cast<std::uint64_t>(o_.patience * minutes_for_all * 60000);
		const bool all = o_.minutes >= minutes_for_all;
		unsigned rounds = 0;

		begin_ = last_report_ = begin;
		/* What has not happened by then will not: nobody has to wait for hours to hear that. */
		while (np_now_ms() < (all && !missing().empty() ? last : end)) {
			const std::uint64_t length = o_.round_seconds * 1000, now = np_now_ms();

			if (now >= end)
				fmt::print("soak: goes on for: {}\n", missing());
			rounds_ = ++rounds;
			round(now < end ? std::min(end, now + length) : now + length);
		}
		report();
		for (std::size_t i = 0; i < kinds; i++)
			report(static_cast<kind>(i));
		if (all && !missing().empty())
			throw std::runtime_error(fmt::format("never happened: {}", missing()));
		fmt::print("soak: {} rounds; nothing lost, nothing left behind{}\n", rounds,
			   all ? "" : "; too short to require that all happened");
	}

private:
	void round(std::uint64_t end)
	{
		for (slot &s : slots_)
			s.start(random_);
		std::uint64_t next_kill = np_now_ms() + random_.between(2000, 8000);
		std::uint64_t next_stop = np_now_ms() + random_.between(1000, 8000);
		while (np_now_ms() < end || (np_now_ms() < end + NP_WAIT_MS && !all_worked())) {
			host_.event();
			if (o_.break_model)
				for (slot &s : slots_)
					s.break_model();
			const std::uint64_t until = np_now_ms() + random_.below(400);
			do {
				watch();
				np_pause();
			} while (np_now_ms() < until);
			if (np_now_ms() > next_stop && all_worked()) {
				stop_one();
				next_stop = np_now_ms() + random_.between(6000, 12000);
			}
			if (np_now_ms() > next_kill && all_worked()) {
				kill_one();
				next_kill = np_now_ms() + random_.between(2000, 8000);
			}
			if (np_now_ms() > last_report_ + 10000)
				report();
		}
		if (const kind how = ends_.draw(random_); how != kind::end) {
			for (slot &s : slots_)
				s.disown();
			host_.remove_device(
			    how,
			    [](void *arg) {
				    for (slot &s : static_cast<driver *>(arg)->slots_)
					    s.kill_both();
			    },
			    this);
		} else {
			for (slot &s : slots_)
				s.stop();
		}
		host_.calm();
		if (const char *differs = np_usage_wait(&before_))
			throw std::runtime_error(fmt::format("after round {} {}", rounds_, differs));
	}

	void watch()
	{
		for (slot &s : slots_)
			s.watch();
		if (np_now_ms() < next_look_)
			return;
		leases_.look();
		next_look_ = np_now_ms() + 200;
	}

	/* Cells and events of the host go on for so long. */
	void go_on(std::uint64_t ms)
	{
		const std::uint64_t end = np_now_ms() + ms;
		std::uint64_t next_event = np_now_ms() + random_.below(400);

		for (; np_now_ms() < end; np_pause()) {
			watch();
			if (np_now_ms() < next_event)
				continue;
			host_.event();
			next_event = np_now_ms() + random_.below(400);
		}
	}

	/* Waits until it is so. @otherwise: what is wrong with the cell if it takes too long. */
	template <class F> void must(const slot &s, F so, const char *otherwise)
	{
		for (const std::uint64_t end = np_now_ms() + 3 * NP_WAIT_MS; !so(); np_pause()) {
			watch();
			if (np_now_ms() > end)
				throw std::runtime_error(fmt::format("{}: {}", s.who(), otherwise));
		}
	}
	void must_rest(const slot &s)
	{
		must(
		    s, [&s] { return s.has_lost() || s.is_idle(); }, "its peer does not come to rest");
	}
	void must_do_more(const slot &s)
	{
		const std::uint64_t main = s.finished() + 32, probe = s.probed() + 1;

		must(
		    s, [&] { return s.has_lost() || (s.finished() >= main && s.probed() >= probe); },
		    "its peer does not go on");
	}

	void stop_one()
	{
		const kind how = stops_.draw(random_);
		const std::size_t first = random_.below(slots_.size());
		const stopwatch time(how);
		bool happened = false;

		count_.tried(how);
		/* A cell whose region is a file on a disk may have no lease: then it is another one's turn.
		 */
		for (std::size_t i = 0; i < slots_.size() && !happened; i++) {
			slot &s = slots_[(first + i) % slots_.size()];

			happened = how == kind::stop_busy ? stop_busy(s) : stop_idle(s, how);
		}
		count_.done(how, happened);
	}

	/* All cells but one come to rest and stay so, or go on: at rest their peers have no holds. */
	void others_quiet(const slot &s, bool yes)
	{
		for (slot &o : slots_)
			if (&o != &s)
				o.be_quiet(yes);
		for (const slot &o : slots_)
			if (&o != &s && yes)
				must_rest(o);
	}

	/*
	 * From now on the peer has so long for holds and recalls. A new peer takes its place, because the
	 * owner's kernel does not shorten a time that is running already.
	 */
	void begin_stop(slot &s, unsigned ms)
	{
		others_quiet(s, true);
		np_set_hold_ms(ms);
		s.kill_peer();
	}

	/*
	 * A peer that has nothing under way is stopped, and does not answer when its leases are
	 * recalled. The owner's kernel ends their keys. Then the peer goes on, and no request fails.
	 */
	bool stop_idle(slot &s, kind how)
	{
		bool stopped = false;

		begin_stop(s, usual_hold_ms);
		s.give(how == kind::stop_gone ? order::reregister : order::drop);
		must(
		    s, [&s] { return s.waits(); }, "its owner does not come to rest");
		/* The library gives idle leases back within 200 ms, so it may take more than one try. */
		for (int tries = 0; tries < 8 && !stopped; tries++) {
			s.be_quiet(false);
			must_do_more(s);
			s.be_quiet(true);
			must_rest(s);
			stopped = s.stop_peer(leases_, false);
		}
		s.go(stopped);
		must(
		    s, [&s] { return s.goes_on(); }, "its owner waits for a peer that is stopped");
		np_set_hold_ms(NP_HOLD_MS);
		leases_.look();
		others_quiet(s, false);
		if (stopped)
			go_on(random_.below(2000));
		/* In this order, so that the peer posts before it polls. */
		s.be_quiet(false);
		if (stopped)
			s.continue_peer();
		must_do_more(s);
		return stopped;
	}

	/*
	 * A peer is stopped in the middle of its work. The owner's kernel does not wait for its holds
	 * longer than they may last, and ends its queue pair instead. Nothing else is lost.
	 */
	bool stop_busy(slot &s)
	{
		bool stopped = false;

		begin_stop(s, short_hold_ms);
		s.allow_loss(true);
		must_do_more(s);
		for (int tries = 0; tries < 64 && !stopped && !s.has_lost(); tries++) {
			go_on(random_.below(20));
			stopped = !s.has_lost() && s.stop_peer(leases_, true);
		}
		if (stopped) {
			go_on(random_.between(short_hold_ms, 2 * short_hold_ms));
			s.continue_peer();
		}
		must_do_more(s);
		np_set_hold_ms(NP_HOLD_MS);
		/* Holds that were granted before that may still end early: until there are none, it may lose.
		 */
		s.be_quiet(true);
		must_rest(s);
		if (stopped)
			count_.note(s.has_lost() ? kind::stop_lost : kind::stop_lived, true);
		if (s.has_lost())
			s.replace_peer();
		s.allow_loss(false);
		s.be_quiet(false);
		others_quiet(s, false);
		return stopped;
	}

	[[nodiscard]] bool all_worked() const
	{
		return std::all_of(slots_.begin(), slots_.end(),
				   [](const slot &s) { return s.has_worked(); });
	}

	void kill_one()
	{
		slot &s = slots_[random_.below(slots_.size())];
		const kind how = kills_.draw(random_);
		const stopwatch time(how);
		bool happened = true;

		count_.tried(how);
		switch (how) {
		case kind::kill_peer:
			s.kill_peer();
			break;
		case kind::kill_owner:
			s.kill_owner();
			break;
		case kind::exec:
			s.exec_owner();
			break;
		case kind::oom_kill:
			s.oom_kill_owner();
			break;
		case kind::reap:
			happened = s.reap_owner();
			break;
		default:
			s.kill_both();
		}
		count_.done(how, happened);
		if (how != kind::kill_peer)
			s.start(random_);
	}

	/* The names of what has not happened yet. */
	[[nodiscard]] std::string missing() const
	{
		std::string names;

		for (std::size_t i = 0; i < kinds; i++)
			if (!count_.count(static_cast<kind>(i)) && !may_never_happen(static_cast<kind>(i)))
				names += fmt::format("{}{}", names.empty() ? "" : ", ", kind_names[i]);
		return names;
	}

	void report(kind k)
	{
		const std::uint64_t done = count_.count(k), tried = count_.tries(k);

		fmt::print("soak: {:>12} x {}{}\n", done, kind_names[static_cast<unsigned>(k)],
			   tried == done ? "" : fmt::format(" ({} tried)", tried));
	}

	[[nodiscard]] std::uint64_t sum(kind first, kind last) const
	{
		std::uint64_t n = 0;

		for (auto k = static_cast<unsigned>(first); k <= static_cast<unsigned>(last); k++)
			n += count_.count(static_cast<kind>(k));
		return n;
	}

	void report()
	{
		const std::uint64_t seconds = (np_now_ms() - begin_) / 1000;

		last_report_ = np_now_ms();
		fmt::print("soak: {}:{:02} of {}:00, round {}: {} READs, {} WRITEs, {} messages, {} atomics, "
			   "{} probes, {} events, "
			   "{} of the host, {} kills, {} stops\n",
			   seconds / 60, seconds % 60, o_.minutes, rounds_, count_.count(kind::read),
			   sum(kind::write, kind::write_imm),
			   count_.count(kind::received) + sum(kind::uc_received, kind::ud_received),
			   sum(kind::fetch_add, kind::compare_swap),
			   sum(kind::probe_read, kind::refused_invalidate),
			   sum(kind::page_out, kind::peer_fork), sum(kind::request_size, kind::block),
			   sum(kind::kill_peer, kind::reap), sum(kind::stop_idle, kind::stop_busy));
		fmt::print(
		    "soak: leases: {} of peers' memory, {} of processes' own, {} pages at most; recalled: "
		    "{} changed, {} memory, {} budget, {} age; {} overdue\n",
		    count_.count(kind::remote_lease), count_.count(kind::local_lease), leases_.most(),
		    count_.count(kind::recall_change), count_.count(kind::recall_memory),
		    count_.count(kind::recall_budget), count_.count(kind::recall_age),
		    count_.count(kind::lease_overdue));
		std::fflush(stdout);
	}

	options o_;
	random_source random_;
	tally &count_;
	link_state &link_;
	host host_;
	lease_watch leases_;
	cards cards_;
	deck<kind> kills_{{kind::kill_peer, kind::kill_peer, kind::kill_owner, kind::kill_both, kind::exec,
			   kind::oom_kill, kind::reap}};
	deck<kind> stops_{{kind::stop_idle, kind::stop_gone, kind::stop_busy}};
	/* Of rounds; end: in peace */
	deck<kind> ends_{{kind::end, kind::end, kind::unbind, kind::unplug}};
	np_usage before_{};
	std::vector<slot> slots_;
	std::uint64_t begin_ = 0, last_report_ = 0, next_look_ = 0;
	unsigned rounds_ = 0;
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
	app.add_option("--patience", o.patience, "so many times two minutes for what never happened")
	    ->check(CLI::PositiveNumber);
	app.add_flag("--no-leases", o.no_leases, "the kernel grants none: it has to fail");
	app.add_flag("--break-model", o.break_model, "let the model be wrong: it has to fail");
	app.add_option("--round", o.round_seconds, "seconds until a look at what is left behind")
	    ->check(CLI::PositiveNumber);
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
