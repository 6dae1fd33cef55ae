// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "training.hpp"

#include <algorithm>
#include <chrono>
#include <csignal>

namespace digits
{
namespace
{

using timer = std::chrono::steady_clock;

double since(timer::time_point begun)
{
	return std::chrono::duration<double>(timer::now() - begun).count();
}

/* A prime, so that multiples of it come to each image of a worker once. */
constexpr std::size_t stride = 1013;

} // namespace

std::size_t parameters_of(const std::string &model)
{
	return make_model<float>(model)->parameters();
}

template <class T>
outcome<T> train(nprdma::sync::synchroniser<T> &sync, nprdma::sync::rank_t rank, std::uint32_t workers,
		 const data_set<T> &data, const plan &p)
{
	using algorithm = typename nprdma::sync::synchroniser<T>::algorithm;
	const auto m = make_model<T>(p.model);
	const std::span<T> x = sync.parameters();
	const std::size_t own = data.training.count() / workers, steps = own / p.batch;
	std::vector<T> gradient(m->moved()), velocity(m->moved());
	std::vector<std::size_t> batch(p.batch);
	outcome<T> told;
	record now;

	if (!steps) {
		told.trouble = std::to_string(own) + " images for each worker are less than a batch";
		return told;
	}
	m->initialise(x, p.seed);
	const auto begun = timer::now();
	const auto timed = [&](auto &&f) {
		const auto before = timer::now();
		auto r = f();
		now.synchronising += since(before);
		if (!r)
			told.trouble = r.why().text;
		return static_cast<bool>(r);
	};
	const auto evaluate = [&](record r) {
		r.loss = m->evaluate(x, data.training).loss;
		r.accuracy = m->evaluate(x, data.test).accuracy;
		return r;
	};
	double evaluating = 0;

	for (std::uint32_t epoch = 0; epoch < p.epochs; ++epoch) {
		for (std::size_t s = 0; s < steps; ++s) {
			if (p.die_at && now.steps + 1 == p.die_at)
				std::raise(SIGKILL);
			for (std::size_t b = 0; b < p.batch; ++b) {
				const std::size_t place =
				    (s * p.batch + b) * stride + std::size_t{epoch} * 31;
				batch[b] = place % own * workers + rank;
			}
			const bool good =
			    p.overlapped                ? timed([&] { return sync.start(); })
			    : p.how == exchange::groups ? timed([&] { return sync.synchronise(); })
			    : p.how == exchange::ring
				? timed([&] { return sync.all_reduce(algorithm::ring); })
				: timed([&] { return sync.all_reduce(algorithm::halving_doubling); });
			if (!good)
				return told;
			m->learn(x, data.training, batch, gradient);
			if (p.overlapped && !timed([&] { return sync.finish(); }))
				return told;
			for (std::size_t i = 0; i < gradient.size(); ++i) {
				velocity[i] = static_cast<T>(p.momentum) * velocity[i] + gradient[i];
				x[i] -= static_cast<T>(p.rate) * velocity[i];
			}
			++now.steps;
		}
		now.epoch = epoch + 1;
		now.seconds = since(begun) - evaluating;
		now.bytes_sent = sync.stats().bytes_sent;
		const auto before = timer::now();
		told.epochs.push_back(evaluate(now));
		evaluating += since(before);
	}
	/* If somebody is absent, what there is is this worker's own. */
	std::vector<T> mine(x.begin(), x.end());
	if (!sync.all_reduce(algorithm::direct))
		std::copy(mine.begin(), mine.end(), x.begin());
	told.last = evaluate(now);
	told.parameters.assign(x.begin(), x.end());
	return told;
}

#define DIGITS_TRAIN(T)                                                                                      \
	template outcome<T> train(nprdma::sync::synchroniser<T> &, nprdma::sync::rank_t, std::uint32_t,      \
				  const data_set<T> &, const plan &);
DIGITS_TRAIN(float)
DIGITS_TRAIN(double)
#undef DIGITS_TRAIN

} // namespace digits
