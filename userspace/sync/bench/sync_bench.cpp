// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * sync_bench: how long a synchronisation takes, in groups and of all, over the shared-memory transport with
 * or without an emulated link. All kinds take turns in one run, so that ratios of them mean something.
 * Workers are threads.
 *
 * CSV: workers,exchange,parameters,seconds (median, of the mean over the workers),bytes (of one worker)
 */
#include "nprdma/sync/synchroniser.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>
#include <thread>
#include <unistd.h>

namespace
{

using namespace nprdma::sync;
namespace transport = nprdma::transport;
using timer = std::chrono::steady_clock;

struct choices {
	std::vector<std::uint32_t> workers = {16};
	std::vector<std::size_t> parameters = {2506};
	std::vector<std::string> schedules = {"grid"};
	std::string format = "exact";
	std::uint32_t repetitions = 20;
	bool no_checksums = false;
	double rate = 0, latency_us = 0;
};

struct kind {
	std::string name;
	std::size_t line; /* which synchroniser */
	std::optional<synchroniser<float>::algorithm> all;
};

template <class R> auto must(R r)
{
	if (!r)
		throw std::runtime_error(r.why().text);
	return std::move(*r);
}
void must(transport::status s)
{
	if (!s)
		throw std::runtime_error(s.why().text);
}

/* seconds[kind][repetition][worker] */
using measured = std::vector<std::vector<std::vector<double>>>;

void work(rank_t rank, std::uint32_t workers, std::size_t parameters, const choices &c,
	  const std::vector<std::string> &schedules, const std::vector<kind> &kinds, measured &seconds,
	  std::vector<std::uint64_t> &bytes)
{
	transport::options link;
	link.bytes_per_second = c.rate;
	link.latency = std::chrono::nanoseconds(static_cast<std::int64_t>(c.latency_us * 1e3));
	const settings how{.format = parse_wire(c.format),
			   .deadline = std::chrono::minutes(5),
			   .founding = std::chrono::minutes(5),
			   .checksums = !c.no_checksums};
	std::vector<rank_t> all(workers);
	std::iota(all.begin(), all.end(), 0U);
	/* One link for each worker, whatever the schedule. */
	const auto context = must(transport::open("shm", link_options(link)));
	std::vector<std::unique_ptr<transport::listener>> listeners;
	std::vector<std::unique_ptr<synchroniser<float>>> lines;
	for (std::size_t i = 0; i < schedules.size(); ++i) {
		std::vector<std::string> addresses;
		for (rank_t r = 0; r < workers; ++r)
			addresses.push_back(fmt::format("shm:sync-bench-{}-{}-{}-{}-{}", ::getpid(), workers,
							parameters, i, r));
		listeners.push_back(must(context->listen(addresses[rank])));
		lines.push_back(std::make_unique<synchroniser<float>>(
		    *context, *listeners.back(), rank, addresses, schedule::parse(schedules[i], workers),
		    parameters, how));
		std::fill(lines[i]->parameters().begin(), lines[i]->parameters().end(),
			  static_cast<float>(rank));
	}
	/* The first two touch memory. */
	for (std::uint32_t k = 0; k < c.repetitions + 2; ++k)
		for (std::size_t i = 0; i < kinds.size(); ++i) {
			synchroniser<float> &s = *lines[kinds[i].line];
			const std::uint64_t sent = s.stats().bytes_sent;

			lines[0]->barrier(all);
			const auto begun = timer::now();
			if (kinds[i].all)
				must(s.all_reduce(*kinds[i].all));
			else if (!must(s.synchronise()).complete)
				throw std::runtime_error(kinds[i].name + " is not complete");
			if (k >= 2)
				seconds[i][k - 2][rank] =
				    std::chrono::duration<double>(timer::now() - begun).count();
			if (rank == 0)
				bytes[i] = s.stats().bytes_sent - sent;
		}
	lines[0]->barrier(all);
}

void measure(std::uint32_t workers, std::size_t parameters, const choices &c)
{
	using algorithm = synchroniser<float>::algorithm;
	std::vector<kind> kinds;
	for (std::size_t i = 0; i < c.schedules.size(); ++i)
		kinds.push_back({c.schedules[i], i, {}});
	kinds.push_back({"ring", 0, algorithm::ring});
	kinds.push_back({"halving-doubling", 0, algorithm::halving_doubling});
	kinds.push_back({"direct", 0, algorithm::direct});

	measured seconds(kinds.size(),
			 std::vector<std::vector<double>>(c.repetitions, std::vector<double>(workers)));
	std::vector<std::uint64_t> bytes(kinds.size());
	std::vector<std::string> trouble(workers);
	std::vector<std::thread> threads;
	for (rank_t r = 0; r < workers; ++r)
		threads.emplace_back([&, r] {
			try {
				work(r, workers, parameters, c, c.schedules, kinds, seconds, bytes);
			} catch (const std::exception &e) {
				trouble[r] = e.what();
			}
		});
	for (std::thread &t : threads)
		t.join();
	for (const std::string &t : trouble)
		if (!t.empty())
			throw std::runtime_error(t);
	for (std::size_t i = 0; i < kinds.size(); ++i) {
		std::vector<double> means;
		for (const auto &one : seconds[i])
			means.push_back(std::accumulate(one.begin(), one.end(), 0.0) / workers);
		std::nth_element(means.begin(), means.begin() + static_cast<std::ptrdiff_t>(means.size() / 2),
				 means.end());
		fmt::print("{},{},{},{:.9f},{}\n", workers, kinds[i].name, parameters,
			   means[means.size() / 2], bytes[i]);
		std::fflush(stdout);
	}
}

} // namespace

int main(int argc, char **argv)
{
	choices c;
	CLI::App app(
	    "Measures how long workers take to average their parameters in groups, and all together.");
	app.add_option("--workers", c.workers);
	app.add_option("--parameters", c.parameters, "floats");
	app.add_option("--schedules", c.schedules);
	app.add_option("--wire", c.format);
	app.add_option("--repetitions", c.repetitions)->check(CLI::Range(1, 1000000));
	app.add_flag("--no-checksums", c.no_checksums);
	app.add_option("--link-rate", c.rate, "bytes per second of each worker's emulated link");
	app.add_option("--link-latency", c.latency_us, "in microseconds");
	CLI11_PARSE(app, argc, argv);
	try {
		fmt::print("workers,exchange,parameters,seconds,bytes\n");
		for (const std::uint32_t w : c.workers)
			for (const std::size_t p : c.parameters)
				measure(w, p, c);
	} catch (const std::exception &e) {
		std::fprintf(stderr, "sync_bench: %s\n", e.what());
		return 1;
	}
}
