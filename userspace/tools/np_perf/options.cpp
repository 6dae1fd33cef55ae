// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "options.hpp"
#include "messages.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <map>

namespace perf
{

namespace
{

constexpr int usage_status = 64;

template <class E, std::size_t N>
std::map<std::string, E> values_of(const std::array<std::string_view, N> &names)
{
	std::map<std::string, E> all;

	for (std::size_t i = 0; i < N; i++)
		all.emplace(names[i], static_cast<E>(i));
	return all;
}

[[noreturn]] void refuse(const std::string &why)
{
	throw usage_error("np_perf: " + why, usage_status);
}

} // namespace

options parse(int argc, const char *const *argv)
{
	CLI::App app("np_perf: latency and bandwidth of RDMA on pinned and on unpinned memory, in one run.\n"
		     "Without HOST both ends are on this one.\n",
		     "np_perf");
	options o;
	std::string verb_name, over = "rc";
	std::vector<std::string> modes = {"pinned", "leases"};
	bool lat = false, bw = false, all = false, resident = false;
	std::uint64_t threads = 1, window = 0, every = 1, inlined = 0, unaligned = 0, absent = 0,
		      local_absent = 0;
	std::string pressure;
	std::uint16_t listen = 0;
	/* Bounds are in the text where they matter; help shows what kind of value it is. */
	const auto from_to = [](auto low, auto high) { return CLI::Range(low, high).description(""); };
	const auto one_of = [](const auto &names) {
		return CLI::IsMember(std::vector<std::string>(names.begin(), names.end())).description("");
	};
	const auto bytes = CLI::AsSizeValue(false).description("");
	const auto percent = from_to(0, 100);

	/* Once is enough; the second of two that differ would be taken in silence. */
	app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::Throw);
	app.add_option("VERB", verb_name, "read, write, write_imm, send, fetch_add or cmp_swap")
	    ->check(one_of(verb_names));
	app.add_option("HOST", o.host, "where np_perf --listen runs");
	auto *const modes_option =
	    app.add_option("-m,--mode", modes,
			   "pinned, optimistic, leases, preload; several: a,b (pinned,leases)")
		->delimiter(',')
		->allow_extra_args(false)
		->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
		->check(one_of(mode_names));
	app.add_option("-c,--transport", over, "rc, uc or ud (rc)")->check(one_of(transport_names));
	app.add_flag("--lat", lat, "latency, as perftest defines it (the default)");
	app.add_flag("--bw", bw, "bandwidth");
	app.add_flag("--completion", o.what.completion, "latency is from posting to completion, of any verb");
	auto *const size_option =
	    app.add_option("-s,--size", o.sizes,
			   "bytes of a message; several: a,b (65536 for --bw, 2 for --lat)")
		->delimiter(',')
		->allow_extra_args(false)
		->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
		->transform(bytes);
	app.add_flag("-a,--all", all, "sizes 2, 4, ... 8 MiB")->excludes(size_option);
	auto *const iterations_option =
	    app.add_option("-n,--iters", o.iterations,
			   "operations of a pass and thread (1000; 5000 for --bw)")
		->check(from_to(std::uint64_t{1}, std::uint64_t{1} << 32));
	app.add_option("-D,--duration", o.duration, "seconds of a pass, instead of --iters")
	    ->check(from_to(0.001, 3600.0))
	    ->excludes(iterations_option);
	app.add_option("-r,--rounds", o.rounds, "in each of which all modes have their turn (5)")
	    ->check(from_to(1, 1000));
	auto *const warm_option =
	    app.add_option("--warm", o.warm, "seconds of work before a pass (0.15; 0 with --absent)")
		->check(from_to(0.0, 60.0));
	app.add_option("-w,--window", window, "operations under way at once (128 for --bw)")
	    ->check(from_to(1U, max_window));
	app.add_option("-t,--threads", threads, "each with a queue pair and a completion queue (1)")
	    ->check(from_to(1U, max_threads));
	app.add_option("--signal", every, "for --bw: each Nth operation is signaled (1)")
	    ->check(from_to(1U, max_window));
	app.add_option("--inline", inlined, "messages of up to so many bytes are posted inline (0)")
	    ->check(from_to(0U, max_inline));
	app.add_option("--unaligned", unaligned, "bytes by which messages miss the beginning of a page (0)")
	    ->check(from_to(std::size_t{0}, page_size - 1));
	app.add_option("--span", o.what.span, "memory of a thread that operations go round in (the window's)")
	    ->transform(bytes)
	    ->check(from_to(std::uint64_t{1}, max_span));
	app.add_flag("--random", o.what.random, "in an order that nobody can read ahead");
	auto *const absent_option =
	    app.add_option("--absent", absent, "per cent of the target's memory paged out before each pass")
		->check(percent);
	auto *const local_absent_option =
	    app.add_option("--local-absent", local_absent, "the same of the client's memory")->check(percent);
	warm_option->excludes(absent_option)->excludes(local_absent_option);
	app.add_flag("--resident", resident, "all of the memory is resident before a pass (the default)")
	    ->excludes(absent_option)
	    ->excludes(local_absent_option);
	app.add_flag("--minor", o.what.minor, "what is absent is in memory, but not mapped");
	app.add_option("--pressure", pressure, "memory is reclaimed meanwhile at: target, local, both")
	    ->check(one_of(std::array<std::string, 3>{"target", "local", "both"}));
	app.add_flag("--ordered", o.what.ordered, "the bytes of a WRITE land in order, and once");
	app.add_flag("--verify", o.what.verify,
		     "look at all data, which takes time that is measured as well");
	app.add_flag("--histogram", o.histogram, "of latencies");
	app.add_option("--json", o.json, "a file for the results");
	auto *const listen_option =
	    app.add_option("--listen", listen, "serve one run of a client at this TCP port")
		->check(from_to(1, 65535));
	app.add_option("-p,--port", o.port, "of HOST (18525)")->check(from_to(1, 65535));
	app.add_option("-d,--device", o.device.name,
		       "RDMA device of this end (the first; without HOST mlx5_1)");
	app.add_option("--target-device", o.target_device.name, "without HOST: of the target (mlx5_0)");
	app.add_option("-x,--gid-index", o.device.gid_index,
		       "(the first one of RoCE v2 with an IPv4 address)")
	    ->check(from_to(0, 255));
	app.add_option("--preload-library", o.preload, "where libnprdma-preload.so is");
	app.add_option("--serve", o.serve)->group("");
	app.add_option("--work", o.work)->group("");
	app.add_option("--connection", o.connection)->group("");
	app.set_version_flag("--version", std::string("np_perf " NP_PERF_VERSION));
	app.footer(
	    "Before each pass memory is made as it is to be; in each round each mode has one pass. What is\n"
	    "printed are medians of the rounds. See np_perf(1).");

	try {
		app.parse(argc, argv);
	} catch (const CLI::ParseError &e) {
		std::ostringstream out, err;

		const int status = app.exit(e, out, err) ? usage_status : 0;
		std::string text = status ? "np_perf: " + err.str() : out.str();
		while (!text.empty() && text.back() == '\n')
			text.pop_back();
		throw usage_error(text, status);
	}

	o.target_device.gid_index = o.device.gid_index;
	if (o.serve >= 0 || o.work >= 0)
		return o;
	if (listen_option->count()) {
		if (!verb_name.empty())
			refuse("the client says what is measured: with --listen give no VERB and no HOST");
		o.listens = true;
		o.port = listen;
		return o;
	}
	if (verb_name.empty())
		refuse(
		    "VERB is missing: read, write, write_imm, send, fetch_add or cmp_swap; or --listen PORT");
	if (lat && bw)
		refuse("--lat and --bw are two measurements: choose one");
	if (!o.host.empty() && !o.target_device.name.empty())
		refuse("--target-device is for both ends on one host: give --device to the np_perf on HOST");
	if (o.host.empty()) {
		if (o.device.name.empty())
			o.device.name = "mlx5_1";
		if (o.target_device.name.empty())
			o.target_device.name = "mlx5_0";
	}

	test &t = o.what;

	t.op = values_of<verb>(verb_names).at(verb_name);
	t.over = values_of<transport>(transport_names).at(over);
	t.latency = !bw;
	t.threads = static_cast<std::uint16_t>(threads);
	t.window = static_cast<std::uint16_t>(window ? window : bw ? 128 : 1);
	t.signal_every = static_cast<std::uint16_t>(every);
	t.inline_bytes = static_cast<std::uint16_t>(inlined);
	t.unaligned = static_cast<std::uint16_t>(unaligned);
	t.absent = static_cast<std::uint8_t>(absent);
	t.local_absent = static_cast<std::uint8_t>(local_absent);
	t.pressure = pressure == "target"  ? at_target
		     : pressure == "local" ? at_client
		     : pressure == "both"  ? at_target | at_client
					   : 0;
	if (all)
		for (std::uint64_t size = 2; size <= (t.over == transport::ud ? 4 * KiB : 8 * MiB); size *= 2)
			o.sizes.push_back(size);
	if (o.sizes.empty())
		o.sizes = {t.is_atomic() ? 8 : bw ? 64 * KiB : 2};
	if (o.sizes.size() > 64)
		refuse("--size: no more than 64 sizes");
	for (const std::uint64_t size : o.sizes)
		if (!size || size > max_size)
			refuse(fmt::format("--size {}: a message has 1 to {} bytes", size, max_size));
	t.size = *std::max_element(o.sizes.begin(), o.sizes.end());
	if (t.over == transport::ud && !all && !size_option->count())
		t.size = o.sizes[0] = std::min<std::uint64_t>(t.size, 2 * KiB);
	/* Who looks at a WRITE when its last byte is there needs the others there as well. */
	if (t.verify && t.pingpong() && t.op == verb::write)
		t.ordered = true;
	if (o.histogram && bw)
		refuse("--histogram is of latencies: use --lat");
	if (!iterations_option->count() && o.duration == 0)
		o.iterations = bw ? 5000 : 1000;
	if (!warm_option->count())
		o.warm = absent || local_absent ? 0 : 0.15;

	for (const std::string &name : modes) {
		const mode m = values_of<mode>(mode_names).at(name);

		if (std::find(o.modes.begin(), o.modes.end(), m) != o.modes.end())
			refuse(fmt::format("--mode {} is there twice", name));
		o.modes.push_back(m);
	}
	/* UC has no way to a peer's unpinned memory, so what nobody asked for is left out. */
	if (!modes_option->count() && t.over == transport::uc && t.op != verb::send)
		o.modes = {mode::pinned};
	for (const mode m : o.modes) {
		test one = t;

		one.how = m;
		if (const std::string why = objection(one); !why.empty())
			refuse(why);
	}
	return o;
}

} // namespace perf
