/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The table, the histogram and the JSON file. */
#ifndef NP_PERF_REPORT_HPP
#define NP_PERF_REPORT_HPP

#include "options.hpp"
#include "session.hpp"

#include <string>
#include <vector>

namespace perf
{

/* The rounds of one mode at one size. */
struct series {
	std::uint64_t size;
	mode how;
	std::vector<outcome> rounds;
};

/* One for each mode; all have as many rounds. */
using turn = std::vector<series>;

/* Of a series to the first mode's, each to that of the same round. */
struct ratios {
	double median = 0, least = 0, most = 0;

	ratios(const test &t, const series &s, const series &first);
};

[[nodiscard]] std::string heading(const options &o);
[[nodiscard]] std::string table_head(const options &o);
[[nodiscard]] std::string table(const options &o, const turn &t);
[[nodiscard]] std::string bars(const turn &t);
[[nodiscard]] std::string json(const options &o, const std::vector<turn> &all);

} // namespace perf

#endif // NP_PERF_REPORT_HPP
