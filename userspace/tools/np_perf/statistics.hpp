/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Of latencies what perftest tells of them, a histogram, and bandwidths. */
#ifndef NP_PERF_STATISTICS_HPP
#define NP_PERF_STATISTICS_HPP

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace perf
{

/* In us. */
struct latency_summary {
	std::uint64_t count;
	double min, max, typical, average, deviation, p99, p999;
};

/* The median: of an even number the mean of the two in the middle. 0 of none. Sorts nothing in place. */
[[nodiscard]] inline double median(std::vector<double> all)
{
	if (all.empty())
		return 0;
	const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);

	std::nth_element(all.begin(), middle, all.end());
	return all.size() % 2 ? *middle : (*middle + *std::max_element(all.begin(), middle)) / 2;
}

/* @ns is sorted afterwards. */
[[nodiscard]] inline latency_summary summarize(std::vector<std::uint64_t> &ns)
{
	latency_summary s{};

	s.count = ns.size();
	if (ns.empty())
		return s;
	std::sort(ns.begin(), ns.end());
	/* The smallest that @q of all do not exceed. */
	const auto quantile = [&](double q) {
		const auto n = static_cast<std::size_t>(std::ceil(q * static_cast<double>(ns.size())));

		return static_cast<double>(ns[std::clamp<std::size_t>(n, 1, ns.size()) - 1]) / 1e3;
	};
	double sum = 0, squares = 0;

	for (const std::uint64_t x : ns)
		sum += static_cast<double>(x);
	const double mean = sum / static_cast<double>(ns.size());
	for (const std::uint64_t x : ns)
		squares += (static_cast<double>(x) - mean) * (static_cast<double>(x) - mean);
	s.min = static_cast<double>(ns.front()) / 1e3;
	s.max = static_cast<double>(ns.back()) / 1e3;
	s.typical = ns.size() % 2 ? quantile(0.5)
				  : static_cast<double>(ns[ns.size() / 2 - 1] + ns[ns.size() / 2]) / 2e3;
	s.average = mean / 1e3;
	s.deviation = std::sqrt(squares / static_cast<double>(ns.size())) / 1e3;
	s.p99 = quantile(0.99);
	s.p999 = quantile(0.999);
	return s;
}

/* Counts of times in ns: each power of two is cut into eight, so a bucket is at most an eighth wide. */
class histogram
{
public:
	static constexpr unsigned cuts = 8;
	static constexpr std::size_t size = 62 * cuts;

	static std::size_t bucket(std::uint64_t ns) noexcept
	{
		if (ns < cuts)
			return static_cast<std::size_t>(ns);
		const auto power = static_cast<unsigned>(std::bit_width(ns)) - 1;

		return (power - 2) * cuts + static_cast<std::size_t>(ns >> (power - 3) & (cuts - 1));
	}
	/* The smallest time of bucket @n. */
	static std::uint64_t floor(std::size_t n) noexcept
	{
		if (n < cuts)
			return n;
		const std::size_t power = n / cuts + 2;

		return power > 63 ? UINT64_MAX : (cuts + n % cuts) << (power - 3);
	}

	void add(std::uint64_t ns) noexcept { counts_[bucket(ns)]++; }
	void add(const histogram &other) noexcept
	{
		for (std::size_t i = 0; i < size; i++)
			counts_[i] += other.counts_[i];
	}
	[[nodiscard]] std::span<const std::uint64_t, size> counts() const noexcept { return counts_; }
	[[nodiscard]] std::uint64_t total() const noexcept
	{
		std::uint64_t n = 0;

		for (const std::uint64_t c : counts_)
			n += c;
		return n;
	}

private:
	std::array<std::uint64_t, size> counts_{};
};

/* So many operations of a thread had completed at that time, in ns. */
struct progress {
	std::uint64_t at, operations;
};

struct bandwidth_summary {
	std::uint64_t count;
	double seconds;
	double peak, average; /* operations per second */
};

/*
 * @marks: of each thread, in order. All began at @begin. The peak is that of the best of the @parts of equal
 * length that the whole time is cut into; a pass too short for that has its average for peak.
 */
[[nodiscard]] inline bandwidth_summary summarize(const std::vector<std::vector<progress>> &marks,
						 std::uint64_t begin, std::size_t parts = 10)
{
	bandwidth_summary s{};
	std::uint64_t end = begin;

	for (const auto &thread : marks)
		if (!thread.empty()) {
			end = std::max(end, thread.back().at);
			s.count += thread.back().operations;
		}
	if (end == begin || !s.count)
		return s;
	const auto length = static_cast<double>(end - begin);
	std::vector<double> done(parts);

	for (const auto &thread : marks) {
		std::uint64_t before = 0;

		for (const progress &p : thread) {
			const double part =
			    static_cast<double>(p.at - begin) / length * static_cast<double>(parts);

			done[std::min(static_cast<std::size_t>(part), parts - 1)] +=
			    static_cast<double>(p.operations - before);
			before = p.operations;
		}
	}
	s.seconds = length / 1e9;
	s.average = static_cast<double>(s.count) / s.seconds;
	s.peak = s.average;
	/* Completions are seen several at once: that must not look like speed. */
	if (s.count >= 100 * parts)
		s.peak = std::max(s.average, *std::max_element(done.begin(), done.end()) / s.seconds *
						 static_cast<double>(parts));
	return s;
}

} // namespace perf

#endif // NP_PERF_STATISTICS_HPP
