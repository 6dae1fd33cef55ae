/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Four workers fit a line to points, of which each has others. They average in pairs that change, over shared
 * memory of this host; in a program of your own they are processes, of one host or, with "verbs" instead of
 * "shm", of many.
 */
#include <nprdma/sync/synchroniser.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace ns = nprdma::sync;
namespace transport = nprdma::transport;

constexpr std::uint32_t workers = 4;
constexpr int steps = 400;

template <class T> static T must(transport::result<T> r)
{
	if (!r) {
		std::fprintf(stderr, "sync-line: %s\n", r.why().text.c_str());
		std::exit(1);
	}
	return std::move(*r);
}

/* Alone, it would find a line of its own: its points are a quarter of the range, and lie off the line by a
 * little. */
static void learn(std::uint32_t rank, const std::vector<std::string> &addresses, double *line)
{
	const auto context = must(transport::open("shm", ns::link_options()));
	const auto listener = must(context->listen(addresses[rank]));
	/* The rows and the columns of a grid in turn: after two steps all workers have heard of each other.
	 */
	ns::synchroniser<double> sync(*context, *listener, rank, addresses, ns::schedule::grid(2, 2), 2);
	const auto parameters = sync.parameters(); /* slope and offset; in registered memory */

	for (int step = 0; step < steps; step++) {
		double slope = 0, offset = 0;
		for (int i = 0; i < 50; i++) {
			const double x = (rank + i / 50.0) / workers;
			const double y = 3 * x + 1 + 0.1 * std::sin(1000 * x);
			const double error = parameters[0] * x + parameters[1] - y;
			slope += error * x / 50;
			offset += error / 50;
		}
		parameters[0] -= 0.8 * slope;
		parameters[1] -= 0.8 * offset;
		must(sync.synchronise()); /* the mean of this step's pair replaces the parameters */
	}
	line[0] = parameters[0];
	line[1] = parameters[1];
}

int main()
{
	std::vector<std::string> addresses;
	std::vector<std::thread> threads;
	double line[workers][2];
	bool good = true;

	for (std::uint32_t rank = 0; rank < workers; rank++)
		addresses.push_back("shm:sync-line-" + std::to_string(::getpid()) + "-" +
				    std::to_string(rank));
	for (std::uint32_t rank = 0; rank < workers; rank++)
		threads.emplace_back([&, rank] { learn(rank, addresses, line[rank]); });
	for (std::thread &t : threads)
		t.join();
	for (const auto &of : line) {
		std::printf("y = %.2f x + %.2f\n", of[0], of[1]);
		good = good && std::abs(of[0] - 3) < 0.1 && std::abs(of[1] - 1) < 0.1;
	}
	std::puts(good ? "all have found y = 3 x + 1" : "WRONG: it is y = 3 x + 1");
	return good ? 0 : 1;
}
