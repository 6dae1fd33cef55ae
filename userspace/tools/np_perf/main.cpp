// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * np_perf: the process that the user starts. It makes a session for each mode, has the modes
 * take turns and prints what came of it; or it listens, and starts the targets of a client's sessions.
 */
#include "options.hpp"
#include "report.hpp"
#include "session.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

namespace perf
{

namespace
{

/* Beside this program, or where both are installed. */
std::string preload_library(const options &o)
{
	std::vector<std::string> places = {NPRDMA_LIBDIR "/libnprdma-preload.so"};
	std::array<char, 4096> self;
	const ssize_t n = readlink("/proc/self/exe", self.data(), self.size());

	if (!o.preload.empty()) {
		places = {o.preload};
	} else if (n > 0) {
		std::string_view directory(self.data(), static_cast<std::size_t>(n));

		directory = directory.substr(0, directory.rfind('/'));
		for (const char *const up : {"", "/../..", "/../lib", "/../" NPRDMA_LIBDIR_NAME})
			places.insert(places.begin(),
				      fmt::format("{}{}/libnprdma-preload.so", directory, up));
	}
	for (const std::string &place : places)
		if (!access(place.c_str(), R_OK))
			return place;
	throw std::runtime_error(fmt::format("mode preload: {} is not there: use --preload-library FILE",
					     o.preload.empty() ? "libnprdma-preload.so" : o.preload));
}

/* This program again, as one end of a session; @fds go with it. */
pid_t spawn(const options &o, mode how, bool ordered, const device_choice &device,
	    std::vector<std::string> arguments, std::initializer_list<int> fds)
{
	arguments.insert(arguments.begin(), "np_perf");
	if (!device.name.empty())
		arguments.insert(arguments.end(), {"--device", device.name});
	if (device.gid_index >= 0)
		arguments.insert(arguments.end(), {"--gid-index", std::to_string(device.gid_index)});
	const std::string library = how == mode::preload ? preload_library(o) : "";
	std::vector<char *> argv;

	for (std::string &a : arguments)
		argv.push_back(a.data());
	argv.push_back(nullptr);

	const pid_t pid = fork();
	if (pid < 0)
		rc::fail(errno, "fork");
	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGTERM);
	for (const int fd : fds)
		fcntl(fd, F_SETFD, 0);
	if (how == mode::preload) {
		setenv("LD_PRELOAD", library.c_str(), 1);
		setenv("NPRDMA_ORDERED", ordered ? "1" : "0", 1);
	}
	execv("/proc/self/exe", argv.data());
	_exit(127);
}

/* True if it has ended well. */
bool reap(pid_t pid)
{
	int status = -1;

	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	return status == 0;
}

/* A mode's processes on this host, which end with it. */
class session
{
public:
	session(const options &o, test t, mode how) : how_(how)
	{
		int orders[2];

		t.how = how;
		const int connection = o.host.empty() ? start_target(o, t) : connect_to(o);
		if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, orders)) {
			const int error = errno;

			close(connection);
			end();
			rc::fail(error, "socketpair");
		}
		orders_ = std::make_unique<channel>(orders[0]);
		try {
			pids_.push_back(spawn(
			    o, how, t.ordered, o.device,
			    {"--work", std::to_string(orders[1]), "--connection", std::to_string(connection)},
			    {orders[1], connection}));
			close(connection);
			close(orders[1]);
			orders_->send(encode(t));
			(void)answer();
		} catch (...) {
			end();
			throw;
		}
	}
	session(const session &) = delete;
	session &operator=(const session &) = delete;
	~session() { end(); }

	outcome pass(const order &o)
	{
		rc::send_all(orders_->fd(), &o, 1);
		return answer();
	}

	/* True if both ends have ended well. */
	bool end() noexcept
	{
		bool well = true;

		orders_.reset();
		for (const pid_t pid : pids_)
			well &= reap(pid);
		pids_.clear();
		return well;
	}

private:
	outcome answer()
	{
		outcome out;

		try {
			rc::receive_all(orders_->fd(), &out, 1);
		} catch (const std::system_error &) {
			throw std::runtime_error(fmt::format("mode {}: a process of this test has died",
							     name_of(mode_names, how_)));
		}
		if (out.failed)
			throw std::runtime_error(
			    fmt::format("mode {}: {}", name_of(mode_names, how_), out.text));
		return out;
	}

	int start_target(const options &o, const test &t)
	{
		int ends[2];

		if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
			rc::fail(errno, "socketpair");
		try {
			pids_.push_back(spawn(o, t.how, t.ordered, o.target_device,
					      {"--serve", std::to_string(ends[1])}, {ends[1]}));
		} catch (...) {
			close(ends[0]);
			close(ends[1]);
			throw;
		}
		close(ends[1]);
		return ends[0];
	}

	static int connect_to(const options &o)
	{
		addrinfo hints{}, *list = nullptr;
		int error = 0;

		hints.ai_socktype = SOCK_STREAM;
		if (const int rc = getaddrinfo(o.host.c_str(), std::to_string(o.port).c_str(), &hints, &list))
			throw std::runtime_error(fmt::format("{}: {}", o.host, gai_strerror(rc)));
		const std::unique_ptr<addrinfo, void (*)(addrinfo *)> owner(list, freeaddrinfo);
		for (const addrinfo *a = list; a; a = a->ai_next) {
			const int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);

			if (fd >= 0 && !connect(fd, a->ai_addr, a->ai_addrlen)) {
				const int on = 1;

				setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
				setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
				return fd;
			}
			error = errno;
			if (fd >= 0)
				close(fd);
		}
		rc::fail(error, fmt::format("{} port {} (is np_perf --listen {} running there?)", o.host,
					    o.port, o.port));
	}

	mode how_;
	std::unique_ptr<channel> orders_;
	std::vector<pid_t> pids_;
};

int measure(const options &o)
{
	test t = o.what;
	std::random_device random;

	t.sessions = static_cast<std::uint8_t>(o.modes.size());
	t.run = static_cast<std::uint64_t>(random()) << 32 | random();
	/* Before minutes of work, not after. */
	std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(nullptr, std::fclose);
	if (!o.json.empty()) {
		file.reset(std::fopen(o.json.c_str(), "we"));
		if (!file)
			rc::fail(errno, o.json);
	}
	std::vector<std::unique_ptr<session>> sessions;
	for (const mode m : o.modes)
		sessions.push_back(std::make_unique<session>(o, t, m));

	fmt::print("{}{}", heading(o), table_head(o));
	std::fflush(stdout);
	std::vector<turn> all;
	std::uint64_t number = t.run, mismatches = 0;

	for (const std::uint64_t size : o.sizes) {
		turn one;

		for (const mode m : o.modes)
			one.push_back({size, m, {}});
		for (int round = 0; round < o.rounds; round++)
			for (std::size_t i = 0; i < sessions.size(); i++) {
				one[i].rounds.push_back(
				    sessions[i]->pass({size, number++, o.iterations,
						       static_cast<std::uint64_t>(o.duration * 1e9),
						       static_cast<std::uint64_t>(o.warm * 1e9)}));
				mismatches += one[i].rounds.back().mismatches;
			}
		fmt::print("{}{}", table(o, one), o.histogram ? bars(one) : "");
		std::fflush(stdout);
		all.push_back(std::move(one));
	}
	if (file) {
		fmt::print(file.get(), "{}", json(o, all));
		if (std::fflush(file.get()))
			rc::fail(errno, o.json);
	}
	bool well = true;
	for (const auto &s : sessions)
		well &= s->end();
	if (!well)
		throw std::runtime_error("a process of this test has not ended well");
	if (mismatches)
		throw std::runtime_error(
		    fmt::format("{} mismatches: data was not what it has to be", mismatches));
	return 0;
}

/* What the client is going to say first, which stays there for the process that serves it. */
test look_at_hello(int fd)
{
	const timeval patience = {.tv_sec = 10, .tv_usec = 0}, none = {};
	std::vector<std::byte> bytes(head_bytes);
	const auto peek = [&] {
		const ssize_t n = recv(fd, bytes.data(), bytes.size(), MSG_PEEK | MSG_WAITALL);

		if (n != static_cast<ssize_t>(bytes.size()))
			throw bad_message("it has not said what is to be measured");
	};

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	peek();
	const head h = decode_head(bytes);
	if (h.what != kind::hello)
		throw bad_message("it has not begun with hello");
	bytes.resize(head_bytes + h.length);
	peek();
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof(none));
	return decode_test(std::span(bytes).subspan(head_bytes));
}

int open_port(std::uint16_t port)
{
	const int on = 1, off = 0;
	int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
	sockaddr_in6 any6{};
	sockaddr_in any{};

	if (fd >= 0) {
		any6.sin6_family = AF_INET6;
		any6.sin6_port = htons(port);
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
		if (!bind(fd, reinterpret_cast<const sockaddr *>(&any6), sizeof(any6)) && !listen(fd, 8))
			return fd;
		close(fd);
	}
	/* Where IPv6 is off. */
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		rc::fail(errno, "socket");
	any.sin_family = AF_INET;
	any.sin_port = htons(port);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(fd, reinterpret_cast<const sockaddr *>(&any), sizeof(any)) || listen(fd, 8))
		rc::fail(errno, fmt::format("port {}", port));
	return fd;
}

/* The sessions of one run; others are turned away meanwhile. */
int listen_for(const options &o)
{
	const int port = open_port(o.port);
	std::vector<pid_t> pids;
	std::uint64_t run = 0;
	std::size_t expected = 1;

	fmt::print("# np_perf " NP_PERF_VERSION " listens at port {} for one run\n", o.port);
	std::fflush(stdout);
	while (pids.size() < expected) {
		/* A client that fails leaves without all of its sessions. */
		pollfd p = {.fd = port, .events = POLLIN, .revents = 0};
		if (::poll(&p, 1, 1000) <= 0) {
			const bool gone =
			    !pids.empty() && std::all_of(pids.begin(), pids.end(), [](pid_t pid) {
				    siginfo_t info{};

				    return !waitid(P_PID, static_cast<id_t>(pid), &info,
						   WEXITED | WNOHANG | WNOWAIT) &&
					   info.si_pid == pid;
			    });
			if (gone)
				break;
			continue;
		}
		const int fd = accept4(port, nullptr, nullptr, SOCK_CLOEXEC);
		if (fd < 0)
			continue;
		const channel c(fd);
		try {
			const int on = 1;
			const test t = look_at_hello(fd);

			if (!pids.empty() && t.run != run)
				throw bad_message("another run is under way");
			setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
			setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
			pids.push_back(
			    spawn(o, t.how, t.ordered, o.device, {"--serve", std::to_string(fd)}, {fd}));
			run = t.run;
			expected = t.sessions;
		} catch (const std::exception &e) {
			std::fprintf(stderr, "np_perf: a connection is refused: %s\n", e.what());
			try {
				std::array<std::byte, 4096> unread;

				c.send(encode(failure{e.what()}));
				/* What nobody has read makes the other end lose what it was told. */
				shutdown(fd, SHUT_WR);
				for (int i = 0;
				     i < 16 && recv(fd, unread.data(), unread.size(), MSG_DONTWAIT) > 0; i++)
					;
			} catch (const std::exception &) {
				/* it has gone */
			}
		}
	}
	close(port);
	bool well = pids.size() == expected;
	for (const pid_t pid : pids)
		well &= reap(pid);
	if (!well)
		throw std::runtime_error("the run has not ended well");
	return 0;
}

int run(int argc, char **argv)
{
	const options o = parse(argc, argv);

	std::signal(SIGPIPE, SIG_IGN);
	if (o.serve >= 0)
		return serve(o.serve, o.device);
	if (o.work >= 0)
		return work(o.work, o.connection, o.device);
	return o.listens ? listen_for(o) : measure(o);
}

} // namespace

} // namespace perf

int main(int argc, char **argv)
{
	try {
		return perf::run(argc, argv);
	} catch (const perf::usage_error &e) {
		std::fprintf(e.status ? stderr : stdout, "%s\n", e.what());
		return e.status;
	} catch (const std::exception &e) {
		std::fflush(stdout);
		std::fprintf(stderr, "np_perf: %s\n", e.what());
		return 1;
	}
}
