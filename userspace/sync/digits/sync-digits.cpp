// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * sync-digits: learn handwritten digits with divide-and-shuffle synchronisation. Under mpirun each process is
 * a worker; with
 * --threads N there are N of them in this process.
 */
#include "training.hpp"

#include "nprdma/sync/job.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <optional>
#include <thread>
#include <unistd.h>

namespace
{

using namespace nprdma::sync;
namespace transport = nprdma::transport;

struct choices {
	digits::plan plan;
	std::string schedule = "grid", format = "exact", how = "groups", kind = "shm", host = "127.0.0.1",
		    data = digits::debian_file;
	std::string curve, final_parameters;
	std::uint32_t threads = 0, parts = 1;
	std::optional<std::uint32_t> die_rank;
	double deadline = 5;
	transport::options link;
	double latency_us = 0;
	bool doubles = false;
};

template <class R> auto must(R r)
{
	if (!r)
		throw std::runtime_error(r.why().text);
	return std::move(*r);
}

settings settings_of(const choices &c)
{
	return {.format = parse_wire(c.format),
		.deadline = std::chrono::nanoseconds(static_cast<std::int64_t>(c.deadline * 1e9)),
		.parts = c.parts};
}

digits::plan plan_of(const choices &c, rank_t rank)
{
	digits::plan p = c.plan;

	if (c.how == "ring")
		p.how = digits::exchange::ring;
	else if (c.how == "halving-doubling")
		p.how = digits::exchange::halving_doubling;
	if (c.die_rank != rank)
		p.die_at = 0;
	return p;
}

/* The mean over the workers: where they differ, none of them is the result. */
template <class T>
void report_all(const std::vector<digits::outcome<T>> &all, const choices &c, const std::string &schedule)
{
	const double n = static_cast<double>(all.size());
	std::vector<digits::record> mean = all[0].epochs;
	digits::record last;
	double own_accuracy = 0;

	for (std::size_t e = 0; e < mean.size(); ++e) {
		digits::record m = mean[e];
		m.seconds = m.synchronising = m.loss = m.accuracy = 0;
		m.bytes_sent = 0;
		for (const auto &o : all) {
			m.seconds += o.epochs[e].seconds / n;
			m.synchronising += o.epochs[e].synchronising / n;
			m.loss += o.epochs[e].loss / n;
			m.accuracy += o.epochs[e].accuracy / n;
			m.bytes_sent += o.epochs[e].bytes_sent;
		}
		mean[e] = m;
	}
	for (const auto &o : all) {
		last.loss += o.last.loss / n;
		last.accuracy += o.last.accuracy / n;
		own_accuracy += o.epochs.back().accuracy / n;
	}
	if (!c.curve.empty()) {
		std::ofstream file(c.curve);
		file << "epoch,steps,seconds,synchronising,bytes,loss,accuracy\n";
		for (const auto &m : mean)
			file << fmt::format("{},{},{:.6f},{:.6f},{},{:.9g},{:.6f}\n", m.epoch, m.steps,
					    m.seconds, m.synchronising, m.bytes_sent, m.loss, m.accuracy);
		if (!file.flush())
			throw std::runtime_error(c.curve + " cannot be written");
	}
	if (!c.final_parameters.empty()) {
		std::ofstream file(c.final_parameters);
		for (const T v : all[0].parameters)
			file << fmt::format("{:.17g}\n", v);
		if (!file.flush())
			throw std::runtime_error(c.final_parameters + " cannot be written");
	}
	const auto &end = mean.back();
	fmt::print("model {}, schedule {}, exchange {}, {} workers: loss {:.4f}, accuracy {:.4f} of the mean "
		   "of all and {:.4f} of each, {} steps, "
		   "{:.3f} s of which {:.3f} synchronising, {} bytes sent\n",
		   c.plan.model, schedule, c.how, all.size(), last.loss, last.accuracy, own_accuracy,
		   end.steps, end.seconds, end.synchronising, end.bytes_sent);
}

template <class T> int run_threads(const choices &c)
{
	const schedule who = schedule::parse(c.schedule, c.threads);
	const auto data = digits::load<T>(c.data);
	std::vector<std::string> addresses;
	std::vector<digits::outcome<T>> all(c.threads);
	std::vector<std::thread> threads;

	for (rank_t r = 0; r < c.threads; ++r)
		addresses.push_back(fmt::format("shm:sync-digits-{}-{}", ::getpid(), r));
	for (rank_t r = 0; r < c.threads; ++r)
		threads.emplace_back([&, r] {
			try {
				const auto context = must(transport::open("shm", link_options(c.link)));
				const auto listener = must(context->listen(addresses[r]));
				synchroniser<T> sync(*context, *listener, r, addresses, who,
						     digits::parameters_of(c.plan.model), settings_of(c));
				all[r] = digits::train(sync, r, c.threads, data, plan_of(c, r));
			} catch (const std::exception &e) {
				all[r].trouble = e.what();
			}
		});
	for (std::thread &t : threads)
		t.join();
	for (const auto &o : all)
		if (!o.trouble.empty())
			throw std::runtime_error(o.trouble);
	report_all(all, c, who.name());
	return 0;
}

template <class T> int run_launched(const choices &c)
{
	job j;
	const schedule who = schedule::parse(c.schedule, j.size());
	const auto data = digits::load<T>(c.data);
	const auto context = must(transport::open(c.kind, link_options(c.link)));
	const auto listener =
	    must(context->listen(c.kind == "verbs" ? "verbs:" + c.host + ":0" : "shm:" + j.name()));
	synchroniser<T> sync(*context, *listener, j.rank(), j.exchange("address", listener->address()), who,
			     digits::parameters_of(c.plan.model), settings_of(c));
	const auto told = digits::train(sync, j.rank(), j.size(), data, plan_of(c, j.rank()));

	if (!told.trouble.empty())
		throw std::runtime_error(fmt::format("worker {}: {}", j.rank(), told.trouble));
	const auto present = sync.present();
	/* Who goes on here has ended for the others, which are to be counted before. */
	sync.barrier(present);
	if (j.rank() == present.front()) {
		if (present.size() < j.size())
			fmt::print("{} of {} workers came to the end\n", present.size(), j.size());
		report_all<T>({told}, c, who.name());
	}
	return 0;
}

} // namespace

int main(int argc, char **argv)
{
	choices c;
	CLI::App app("Learns handwritten digits with workers that average their parameters in small, "
		     "changing groups.");

	app.add_option("--threads", c.threads,
		       "so many workers, as threads; otherwise each process that mpirun starts is one");
	app.add_option("--schedule", c.schedule,
		       "full, local, pairs, grid, grid:RxC, radix:AxB..., unequal:SIZE, random:SIZE:SEED, or "
		       "0,1|2,3;0,3|1,2");
	app.add_option("--exchange", c.how, "groups, as the schedule says, or an all-reduce instead")
	    ->check(CLI::IsMember({"groups", "ring", "halving-doubling"}));
	app.add_option("--model", c.plan.model, "logistic or network")
	    ->check(CLI::IsMember({"logistic", "network"}));
	app.add_option("--epochs", c.plan.epochs)->check(CLI::Range(1, 100000));
	app.add_option("--batch", c.plan.batch, "images of one worker in one step")
	    ->check(CLI::Range(1, 10000));
	app.add_option("--rate", c.plan.rate, "learning rate");
	app.add_option("--momentum", c.plan.momentum);
	app.add_option("--seed", c.plan.seed);
	app.add_option("--wire", c.format, "exact, int16 or int8");
	app.add_option("--parts", c.parts, "exchange one of so many parts in each step")
	    ->check(CLI::Range(1, 1000));
	app.add_flag("--overlap", c.plan.overlapped, "exchange while the gradient is computed");
	app.add_flag("--double", c.doubles, "parameters of 64 bits");
	app.add_option("--deadline", c.deadline, "seconds without a word after which a worker is left out")
	    ->check(CLI::Range(0.001, 1e6));
	app.add_option("--transport", c.kind)->check(CLI::IsMember({"shm", "verbs"}));
	app.add_option("--device", c.link.device, "verbs: the adapter");
	app.add_option("--host", c.host, "verbs: this host's address for the others");
	app.add_option("--link-rate", c.link.bytes_per_second,
		       "shm: bytes per second of each worker's emulated link")
	    ->check(CLI::NonNegativeNumber);
	app.add_option("--link-latency", c.latency_us, "shm: of it, in microseconds")
	    ->check(CLI::Range(0.0, 1e6));
	app.add_option("--data", c.data, "digits.csv.gz");
	app.add_option("--curve", c.curve, "a file for the loss and accuracy of each epoch, as CSV");
	app.add_option("--parameters", c.final_parameters, "a file for the parameters at the end");
	app.add_option("--die-rank", c.die_rank, "this worker is killed");
	app.add_option("--die-at", c.plan.die_at, "in this step");
	CLI11_PARSE(app, argc, argv);
	c.link.latency = std::chrono::nanoseconds(static_cast<std::int64_t>(c.latency_us * 1e3));

	try {
		if (c.threads)
			return c.doubles ? run_threads<double>(c) : run_threads<float>(c);
		return c.doubles ? run_launched<double>(c) : run_launched<float>(c);
	} catch (const std::exception &e) {
		std::fprintf(stderr, "sync-digits: %s\n", e.what());
		return 1;
	}
}
