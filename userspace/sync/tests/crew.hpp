/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Workers for tests: threads of this process, or processes, over the shared-memory transport or over verbs.
 */
#ifndef NPRDMA_SYNC_TESTS_CREW_HPP
#define NPRDMA_SYNC_TESTS_CREW_HPP

#include "nprdma/sync/synchroniser.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace crew
{

using namespace nprdma::sync;
namespace transport = nprdma::transport;

template <class R> auto must(R r)
{
	if (!r)
		throw std::runtime_error(r.why().text);
	return std::move(*r);
}
inline void must(transport::status s)
{
	if (!s)
		throw std::runtime_error(s.why().text);
}

/* NPRDMA_TEST_VERBS=DEVICE[,DEVICE]: over these, worker i over the one whose turn it is. Otherwise shared
 * memory. */
inline std::string device_of(rank_t rank)
{
	const char *const all = std::getenv("NPRDMA_TEST_VERBS");
	std::vector<std::string> names;
	for (std::string rest = all ? all : ""; !rest.empty();) {
		const std::size_t comma = rest.find(',');
		names.push_back(rest.substr(0, comma));
		rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
	}
	return names.empty() ? "" : names[rank % names.size()];
}

/* Another one for each crew of this process. */
inline std::vector<std::string> addresses(std::uint32_t workers)
{
	static std::atomic<unsigned> crews = 0;
	const unsigned crew = crews.fetch_add(1, std::memory_order_relaxed); /* relaxed: only a number */
	std::vector<std::string> all;
	for (rank_t i = 0; i < workers; ++i)
		if (device_of(0).empty())
			all.push_back("shm:sync-" + std::to_string(::getpid()) + "-" + std::to_string(crew) +
				      "-" + std::to_string(i));
		else
			all.push_back("verbs:127.0.0.1:" + std::to_string(20000 + (crew * 64 + i) % 20000));
	return all;
}

/* One worker with what it needs. */
template <class T> struct worker {
	worker(rank_t r, const std::vector<std::string> &where, const schedule &who, std::size_t elements,
	       const settings &how)
	    : rank(r)
	{
		transport::options o;
		o.device = device_of(r);
		context = must(transport::open(where[r], link_options(o)));
		listener = must(context->listen(where[r]));
		sync = std::make_unique<synchroniser<T>>(*context, *listener, r, where, who, elements, how);
	}

	rank_t rank;
	std::unique_ptr<transport::context> context;
	std::unique_ptr<transport::listener> listener;
	std::unique_ptr<synchroniser<T>> sync;
};

/* A machine that is busy must not have workers left out that no test means to be. */
inline settings patient(settings how = {})
{
	how.deadline = std::chrono::minutes(2);
	how.founding = std::chrono::minutes(2);
	return how;
}

/*
 * @f(worker) in a thread for each, when all have founded. On a slow machine one has only dialed some of the
 * others when these are through with founding: their deadline for it would pass, or they would end, and it
 * would wait for them until the founding time is over.
 */
template <class T, class F> void run(const schedule &who, std::size_t elements, const settings &how, F &&f)
{
	const auto where = addresses(who.workers());
	std::atomic<rank_t> through = 0; /* with founding, or without */
	std::vector<std::thread> threads;
	for (rank_t r = 0; r < who.workers(); ++r)
		threads.emplace_back([&, r] {
			std::unique_ptr<worker<T>> w;
			try {
				w = std::make_unique<worker<T>>(r, where, who, elements, how);
			} catch (const std::exception &e) {
				ADD_FAILURE() << "worker " << r << ": " << e.what();
			}
			through.fetch_add(1);
			while (through.load() < who.workers())
				std::this_thread::sleep_for(std::chrono::milliseconds(1));
			try {
				if (w)
					f(*w);
			} catch (const std::exception &e) {
				ADD_FAILURE() << "worker " << r << ": " << e.what();
			}
		});
	for (std::thread &t : threads)
		t.join();
}

/* Different for each worker and element, and sums of them without rounding. */
template <class T> T value_of(rank_t rank, std::size_t i)
{
	return static_cast<T>(static_cast<long>((rank * 37 + i * 11) % 101) - 50);
}

template <class T> void fill(worker<T> &w)
{
	const auto x = w.sync->parameters();
	for (std::size_t i = 0; i < x.size(); ++i)
		x[i] = value_of<T>(w.rank, i);
}

template <class T> T mean_of(std::uint32_t workers, std::size_t i)
{
	T sum = 0;
	for (rank_t r = 0; r < workers; ++r)
		sum += value_of<T>(r, i);
	return sum / static_cast<T>(workers);
}

template <class T> void expect_mean(worker<T> &w, std::uint32_t workers, double within)
{
	const auto x = w.sync->parameters();
	for (std::size_t i = 0; i < x.size(); ++i)
		if (!(std::abs(static_cast<double>(x[i] - mean_of<T>(workers, i))) <= within)) {
			ADD_FAILURE() << "worker " << w.rank << ", element " << i << " of " << x.size()
				      << ": " << x[i] << " and not " << mean_of<T>(workers, i);
			return;
		}
}

} // namespace crew

#endif
