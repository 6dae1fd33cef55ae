/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* npr-far-server(1): lends regions of memory, or of files, to clients of nprdma-far until it is told to end.
 */
#include <nprdma/far_network.hpp>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace far = nprdma::far;
namespace transport = nprdma::transport;

namespace
{

constexpr int usage_status = 64;

struct failed {
	std::string text;
	int status = EXIT_FAILURE;
};

[[noreturn]] void usage_error(const std::string &why)
{
	throw failed{why + "\nnpr-far-server --help says what there is.", usage_status};
}

template <class T> T must(transport::result<T> r)
{
	if (!r)
		throw failed{r.why().text};
	return std::move(*r);
}

void must(const transport::status &s)
{
	if (!s)
		throw failed{s.why().text};
}

/* Digits, and maybe K, M, G or T behind them, which are powers of 1024. */
std::uint64_t bytes_of(const std::string &text, const std::string &option)
{
	constexpr std::string_view units = "KMGT";
	const char *const end = text.data() + text.size();
	std::uint64_t n = 0;
	std::size_t shift = 0;
	const auto [digits_end, code] = std::from_chars(text.data(), end, n);
	const std::string_view unit(digits_end, end);

	if (unit.size() == 1)
		shift = 10 * (units.find(unit[0]) + 1); /* 0: there is no such unit */
	if (code == std::errc() && (unit.empty() || shift) &&
	    n <= std::numeric_limits<std::uint64_t>::max() >> shift)
		return n << shift;
	usage_error(fmt::format("{}: {} is no size in bytes, as 4096, 64K or 2T", option, text));
}

struct region {
	std::string name, file;
	std::uint64_t bytes = 0;
	std::size_t page_bytes = 4096;
};

/* NAME=SIZE[,page=SIZE][,file=PATH] */
region region_of(const std::string &text)
{
	const std::string option = "--lend " + text;
	const std::size_t equals = text.find('=');
	region r;

	if (equals == std::string::npos || equals == 0)
		usage_error(option + ": it is NAME=SIZE[,page=SIZE][,file=PATH]");
	r.name = text.substr(0, equals);
	std::string rest = text.substr(equals + 1);
	/* A path may have commas. */
	if (const std::size_t at = rest.find(",file="); at != std::string::npos) {
		r.file = rest.substr(at + 6);
		rest.resize(at);
		if (r.file.empty())
			usage_error(option + ": no path behind file=");
	}
	if (const std::size_t at = rest.find(','); at != std::string::npos) {
		const std::string more = rest.substr(at + 1);

		if (!more.starts_with("page="))
			usage_error(fmt::format("{}: {} is neither page=SIZE nor file=PATH, which comes last",
						option, more));
		r.page_bytes = bytes_of(more.substr(5), option);
		rest.resize(at);
	}
	r.bytes = bytes_of(rest, option);
	return r;
}

struct settings {
	std::string address;
	std::vector<region> regions;
	far::server_options server;
	transport::options link;
};

/* Nothing: help was asked for, and given. */
std::optional<settings> parse(int argc, char **argv)
{
	CLI::App app(
	    "Lends regions of memory, or of files, to clients of nprdma-far until it is told to end.",
	    "npr-far-server");
	std::vector<std::string> lend;
	std::string make;
	settings s;
	unsigned port = s.link.port;

	app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::Throw);
	app.footer("SIZE is in bytes; K, M, G and T behind it are powers of 1024.\n"
		   "npr-far-server(1) says more.");
	app.add_option("ADDRESS", s.address,
		       "verbs:HOST:PORT, verbs::PORT on all of this host's, or shm:NAME")
	    ->required();
	app.add_option("-l,--lend", lend, "a region: NAME=SIZE[,page=SIZE][,file=PATH]; may be given again")
	    ->allow_extra_args(false)
	    ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
	    ->option_text("REGION");
	app.add_option("--clients-may-make", make, "bytes of regions that clients may make (none)")
	    ->option_text("SIZE");
	app.add_option("--max-connections", s.server.max_connections, "of all clients together (1024)")
	    ->check(CLI::Range(1U, 1U << 20).description(""))
	    ->option_text("N");
	app.add_option("-d,--device", s.link.device, "the RDMA device (the first)")->option_text("DEVICE");
	app.add_option("--port", port, "its port (1)")
	    ->check(CLI::Range(1, 255).description(""))
	    ->option_text("N");
	app.add_option("-x,--gid-index", s.link.gid_index, "the index of the port's GID (0)")
	    ->check(CLI::Range(0, 65535).description(""))
	    ->option_text("N");
	try {
		app.parse(argc, argv);
	} catch (const CLI::CallForHelp &) {
		fmt::print("{}", app.help());
		return std::nullopt;
	} catch (const CLI::ParseError &e) {
		usage_error(e.what());
	}
	s.link.port = static_cast<std::uint8_t>(port);
	for (const std::string &text : lend)
		s.regions.push_back(region_of(text));
	if (!make.empty())
		s.server.clients_may_make = bytes_of(make, "--clients-may-make");
	if (s.regions.empty() && !s.server.clients_may_make)
		usage_error("There is nothing to serve: --lend lends a region, and --clients-may-make lets "
			    "clients make theirs.");
	std::set<std::string> names;
	for (const region &r : s.regions)
		if (!names.insert(r.name).second)
			usage_error(fmt::format("--lend: two regions have the name {}", r.name));
	return s;
}

/* Does this device register memory without pinning it? */
bool unpins(transport::context &context)
{
	const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
	void *const p = ::mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		throw failed{"no memory"};
	const bool is = must(context.register_memory({static_cast<std::byte *>(p), page}))->unpinned();
	(void)::munmap(p, page);
	return is;
}

/*
 * The signals that end it. nohup(1) and shells have SIGHUP or SIGINT ignored, and a signal that is blocked
 * reaches sigwait(3) all the same: those stay out.
 */
sigset_t ending_signals()
{
	sigset_t ends;

	::sigemptyset(&ends);
	::sigaddset(&ends, SIGTERM);
	for (const int number : {SIGHUP, SIGINT}) {
		struct sigaction how;

		if (!::sigaction(number, nullptr, &how) && how.sa_handler != SIG_IGN)
			::sigaddset(&ends, number);
	}
	return ends;
}

void serve(const settings &s)
{
	const sigset_t ends = ending_signals();
	int number = 0;

	/* Before there are threads, so that none of them is interrupted. */
	::pthread_sigmask(SIG_BLOCK, &ends, nullptr);

	const auto context = must(transport::open(s.address, s.link));
	if (!unpins(*context))
		fmt::print(stderr,
			   "npr-far-server: this device pins what it registers: all regions have to fit "
			   "in memory, and RLIMIT_MEMLOCK counts. \"npctl device\" says why.\n");
	const auto server = must(far::server::make(*context, s.address, s.server));
	for (const region &r : s.regions) {
		must(server->lend(r.name, r.bytes, r.page_bytes, r.file));
		fmt::print("{}: {} bytes in pages of {}, {}\n", r.name, r.bytes, r.page_bytes,
			   r.file.empty() ? "memory" : r.file);
	}
	/* Whoever waits for this line finds all of the above. */
	fmt::print("serving at {}\n", server->address());
	std::fflush(stdout);
	(void)::sigwait(&ends, &number);
	fmt::print("ends, by {}\n", ::strsignal(number));
}

} // namespace

int main(int argc, char **argv)
try {
	const std::optional<settings> s = parse(argc, argv);

	if (s)
		serve(*s);
	return EXIT_SUCCESS;
} catch (const failed &why) {
	fmt::print(stderr, "npr-far-server: {}\n", why.text);
	return why.status;
} catch (const std::exception &why) {
	fmt::print(stderr, "npr-far-server: {}\n", why.what());
	return EXIT_FAILURE;
}
