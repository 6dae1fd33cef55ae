// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * nprdma-bench: what unpinned memory costs beside pinned memory, on two HCAs of
 * one machine, all in one run. The figures of an emulated machine are good for
 * ratios only, so ratios are what it tells.
 *
 * A target that is missed is said to be missed; the exit status is 0 if all
 * could be measured.
 */
#include "bench.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <sys/utsname.h>

#include <cstdio>
#include <cstdlib>

namespace
{

std::string environment(const char *name)
{
	const char *value = std::getenv(name);

	return value ? value : "unknown";
}

void describe(bench::report &out, const bench::options &opt)
{
	utsname system{};

	uname(&system);
	out.note("kernel", fmt::format("{} {}", system.release, system.version));
	out.note("configuration", environment("NPRDMA_KERNEL"));
	out.note("commit", environment("NPRDMA_COMMIT"));
	out.note("accelerator", environment("NPRDMA_ACCEL"));
	out.note("rounds", std::to_string(opt.rounds));
	fmt::print("kernel {} {}, configuration {}, commit {}, {}\n", system.release, system.version,
		   environment("NPRDMA_KERNEL"), environment("NPRDMA_COMMIT"), environment("NPRDMA_ACCEL"));
}

} // namespace

int main(int argc, char **argv)
{
	CLI::App app("What unpinned memory costs beside pinned memory.");
	bench::options opt;
	bench::report out;
	bool pinned_only = false;
	int socket = -1;
	std::string json;

	if (const char *dir = std::getenv("NPRDMA_OUT"))
		json = std::string(dir) + "/bench.json";
	app.add_option("--rounds", opt.rounds, "of all that is measured in turns (15)")
	    ->check(CLI::Range(1, 100));
	app.add_option("--only", opt.only, "parts: registration, data, faults, leases")
	    ->check(CLI::IsMember({"registration", "data", "faults", "leases"}));
	app.add_flag("--pinned-only", pinned_only, "nothing unpinned");
	app.add_option("--responder", opt.dev.responder, "device (mlx5_0)");
	app.add_option("--initiator", opt.dev.initiator, "device (mlx5_1)");
	app.add_option("--json", json, "file for the results ($NPRDMA_OUT/bench.json)");
	app.add_option("--serve-pingpong", socket)->group("");
	CLI11_PARSE(app, argc, argv);

	opt.unpinned = !pinned_only;
	try {
		if (socket >= 0)
			bench::pingpong::serve(opt.dev.responder, socket);
		describe(out, opt);
		if (opt.wants("registration"))
			bench::measure_registration(opt, out);
		if (opt.wants("data"))
			bench::measure_data_path(opt, out);
		if (opt.wants("faults"))
			bench::measure_faults(opt, out);
		if (opt.wants("leases"))
			bench::measure_leases(opt, out);
		out.print_targets();
		if (!json.empty())
			out.write_json(json);
		return 0;
	} catch (const std::exception &e) {
		std::fprintf(stderr, "nprdma-bench: %s\n", e.what());
		return 1;
	}
}
