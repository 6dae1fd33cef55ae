// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "report.hpp"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <algorithm>
#include <iterator>

namespace perf
{

namespace
{

template <class F> double median_of(const series &s, F &&f)
{
	std::vector<double> all;

	for (const outcome &o : s.rounds)
		all.push_back(static_cast<double>(f(o)));
	return median(std::move(all));
}

template <class F> std::uint64_t sum_of(const series &s, F &&f)
{
	std::uint64_t n = 0;

	for (const outcome &o : s.rounds)
		n += f(o);
	return n;
}

double mib_per_s(double operations, std::uint64_t size)
{
	return operations * static_cast<double>(size) / static_cast<double>(MiB);
}

std::string what_is_measured(const test &t)
{
	if (!t.latency)
		return fmt::format("bandwidth, window {}", t.window);
	if (t.pingpong())
		return "latency: half of a ping-pong's round trip";
	return "latency: from posting to completion";
}

std::string quoted(std::string_view text)
{
	std::string out = "\"";

	for (const char c : text) {
		if (static_cast<unsigned char>(c) < 0x20) {
			out += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
			continue;
		}
		if (c == '"' || c == '\\')
			out += '\\';
		out += c;
	}
	return out + '"';
}

} // namespace

ratios::ratios(const test &t, const series &s, const series &first)
{
	const auto value = [&](const outcome &o) {
		return t.latency ? o.latency.typical : o.bandwidth.average;
	};
	std::vector<double> all;

	for (std::size_t i = 0; i < std::min(s.rounds.size(), first.rounds.size()); i++)
		if (const double base = value(first.rounds[i]); base > 0)
			all.push_back(value(s.rounds[i]) / base);
	if (all.empty())
		return;
	least = *std::min_element(all.begin(), all.end());
	most = *std::max_element(all.begin(), all.end());
	median = perf::median(std::move(all));
}

std::string heading(const options &o)
{
	const test &t = o.what;
	std::string out;
	auto to = std::back_inserter(out);

	fmt::format_to(to, "# np_perf " NP_PERF_VERSION ": {} over {}, {}, {} thread{}\n",
		       name_of(verb_names, t.op), name_of(transport_names, t.over), what_is_measured(t),
		       t.threads, t.threads == 1 ? "" : "s");
	if (o.host.empty())
		fmt::format_to(to, "# {} here to {} here\n", o.device.name, o.target_device.name);
	else
		fmt::format_to(to, "# {} here to {} port {}\n",
			       o.device.name.empty() ? "the first device" : o.device.name, o.host, o.port);
	fmt::format_to(
	    to,
	    "# Modes take turns, and columns are medians of {} round{}. Times are good within one run\n"
	    "# only: on a busy or emulated machine what holds is the ratio, of {} to that of the\n"
	    "# first mode in the same round.\n",
	    o.rounds, o.rounds == 1 ? "" : "s", t.latency ? "t_typical" : "BW average");
	if (t.verify)
		fmt::format_to(to, "# Data is looked at, in the time that is measured.\n");
	if (t.ordered)
		fmt::format_to(
		    to, "# WRITEs to unpinned memory are ordered: without a lease each takes a hold.\n");
	if ((t.absent || t.local_absent || t.pressure) &&
	    std::find(o.modes.begin(), o.modes.end(), mode::pinned) != o.modes.end())
		fmt::format_to(to, "# Pinned memory is neither paged out nor reclaimed.\n");
	return out;
}

std::string table_head(const options &o)
{
	return o.what.latency
		   ? " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    "
		     "t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]  mode        ratio  (of "
		     "the rounds)\n"
		   : " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]  mode "
		     "      "
		     " ratio  (of the rounds)\n";
}

std::string table(const options &o, const turn &modes)
{
	std::string out;
	auto to = std::back_inserter(out);

	for (const series &s : modes) {
		const auto iterations =
		    static_cast<std::uint64_t>(median_of(s, [](const outcome &x) { return x.operations; }));

		if (o.what.latency) {
			const auto column = [&](double latency_summary::*p) {
				return median_of(s, [p](const outcome &x) { return x.latency.*p; });
			};

			fmt::format_to(to,
				       " {:<7} {:<10} {:>13.2f} {:>14.2f} {:>14.2f} {:>16.2f} {:>14.2f} "
				       "{:>18.2f} {:>22.2f}",
				       s.size, iterations, column(&latency_summary::min),
				       column(&latency_summary::max), column(&latency_summary::typical),
				       column(&latency_summary::average), column(&latency_summary::deviation),
				       column(&latency_summary::p99), column(&latency_summary::p999));
		} else {
			const double peak = median_of(s, [](const outcome &x) { return x.bandwidth.peak; });
			const double average =
			    median_of(s, [](const outcome &x) { return x.bandwidth.average; });

			fmt::format_to(to, " {:<10} {:<12} {:>15.2f} {:>20.2f} {:>18.6f}", s.size, iterations,
				       mib_per_s(peak, s.size), mib_per_s(average, s.size), average / 1e6);
		}
		const ratios r(o.what, s, modes[0]);

		fmt::format_to(to, "         {:<11} {:.3f}  ({:.3f} to {:.3f})\n", name_of(mode_names, s.how),
			       r.median, r.least, r.most);
	}
	/* What happened to memory meanwhile, where something was to happen, and what must not. */
	for (const series &s : modes) {
		const test &t = o.what;
		std::string line;
		auto more = std::back_inserter(line);

		if (t.absent)
			fmt::format_to(more, " target absent {:.0f} %,",
				       median_of(s, [](const outcome &x) { return x.absent; }));
		if (t.local_absent)
			fmt::format_to(more, " client absent {:.0f} %,",
				       median_of(s, [](const outcome &x) { return x.local_absent; }));
		if (t.pressure)
			fmt::format_to(more, " {} KiB reclaimed,", sum_of(s, [](const outcome &x) {
									   return x.target.reclaimed +
										  x.reclaimed;
								   }) / KiB);
		if (!line.empty() && s.how != mode::pinned)
			fmt::format_to(
			    more, " faults of the target {} minor {} major, of the client {} minor {} major,",
			    sum_of(s, [](const outcome &x) { return x.target.faults_minor; }),
			    sum_of(s, [](const outcome &x) { return x.target.faults_major; }),
			    sum_of(s, [](const outcome &x) { return x.faults_minor; }),
			    sum_of(s, [](const outcome &x) { return x.faults_major; }));
		if (const auto lost = sum_of(s, [](const outcome &x) { return x.lost; }))
			fmt::format_to(more, " {} messages lost,", lost);
		if (t.verify)
			fmt::format_to(more, " {} mismatches,",
				       sum_of(s, [](const outcome &x) { return x.mismatches; }));
		if (!line.empty()) {
			line.pop_back();
			fmt::format_to(to, "# {}:{}\n", name_of(mode_names, s.how), line);
		}
	}
	return out;
}

std::string bars(const turn &modes)
{
	std::string out;
	auto to = std::back_inserter(out);

	for (const series &s : modes) {
		constexpr double width = 50;
		histogram all;
		std::uint64_t most = 0;

		for (const outcome &o : s.rounds)
			all.add(o.latencies);
		for (const std::uint64_t n : all.counts())
			most = std::max(most, n);
		fmt::format_to(to, "# histogram: {} bytes, {}\n#     from[usec]       to[usec]      count\n",
			       s.size, name_of(mode_names, s.how));
		for (std::size_t i = 0; i < histogram::size; i++)
			if (const std::uint64_t n = all.counts()[i])
				fmt::format_to(
				    to, "# {:>14.3f} {:>14.3f} {:>10} {}\n",
				    static_cast<double>(histogram::floor(i)) / 1e3,
				    static_cast<double>(histogram::floor(i + 1)) / 1e3, n,
				    std::string(static_cast<std::size_t>(static_cast<double>(n) /
									 static_cast<double>(most) * width),
						'*'));
	}
	return out;
}

std::string json(const options &o, const std::vector<turn> &all)
{
	const test &t = o.what;
	std::string out;
	auto to = std::back_inserter(out);
	utsname system{};
	const char *comma = "";

	uname(&system);
	fmt::format_to(
	    to,
	    "{{\n  \"program\": \"np_perf\",\n  \"version\": {},\n  \"kernel\": {},\n  \"host\": {},\n"
	    "  \"device\": {},\n  \"target_device\": {},\n  \"verb\": {},\n  \"transport\": {},\n"
	    "  \"measured\": {},\n  \"threads\": {},\n  \"window\": {},\n  \"signal\": {},\n  \"inline\": "
	    "{},\n"
	    "  \"unaligned\": {},\n  \"span\": {},\n  \"random\": {},\n  \"absent\": {},\n  "
	    "\"local_absent\": {},\n"
	    "  \"minor\": {},\n  \"pressure\": {},\n  \"ordered\": {},\n  \"verify\": {},\n  \"rounds\": "
	    "{},\n"
	    "  \"note\": \"times are good as ratios within this run only\",\n  \"results\": [",
	    quoted(NP_PERF_VERSION), quoted(fmt::format("{} {}", system.release, system.version)),
	    quoted(o.host), quoted(o.device.name), quoted(o.target_device.name),
	    quoted(name_of(verb_names, t.op)), quoted(name_of(transport_names, t.over)),
	    quoted(what_is_measured(t)), t.threads, t.window, t.signal_every, t.inline_bytes, t.unaligned,
	    t.span, t.random, t.absent, t.local_absent, t.minor, t.pressure, t.ordered, t.verify, o.rounds);
	for (const turn &modes : all)
		for (const series &s : modes) {
			const ratios r(t, s, modes[0]);

			fmt::format_to(to,
				       "{}\n    {{\"bytes\": {}, \"mode\": {}, \"ratio\": {:.6g}, "
				       "\"ratio_min\": {:.6g}, \"ratio_max\": {:.6g}, \"rounds\": [",
				       comma, s.size, quoted(name_of(mode_names, s.how)), r.median, r.least,
				       r.most);
			comma = ",";
			const char *between = "";
			for (const outcome &x : s.rounds) {
				fmt::format_to(to, "{}\n      {{\"iterations\": {}, ", between, x.operations);
				between = ",";
				if (t.latency)
					fmt::format_to(to,
						       "\"t_min_usec\": {:.3f}, \"t_max_usec\": {:.3f}, "
						       "\"t_typical_usec\": {:.3f}, "
						       "\"t_avg_usec\": {:.3f}, \"t_stdev_usec\": {:.3f}, "
						       "\"p99_usec\": {:.3f}, "
						       "\"p999_usec\": {:.3f}, ",
						       x.latency.min, x.latency.max, x.latency.typical,
						       x.latency.average, x.latency.deviation, x.latency.p99,
						       x.latency.p999);
				else
					fmt::format_to(
					    to,
					    "\"seconds\": {:.6f}, \"bw_peak_mib_per_s\": {:.3f}, "
					    "\"bw_average_mib_per_s\": {:.3f}, \"msg_rate_mpps\": {:.6f}, ",
					    x.bandwidth.seconds, mib_per_s(x.bandwidth.peak, s.size),
					    mib_per_s(x.bandwidth.average, s.size),
					    x.bandwidth.average / 1e6);
				fmt::format_to(
				    to,
				    "\"mismatches\": {}, \"lost\": {}, \"target_absent_percent\": {}, "
				    "\"client_absent_percent\": {}, \"leases\": {}, \"recalls\": {}, "
				    "\"suspicious_pages\": {}, \"repeated_pages\": {}, ",
				    x.mismatches, x.lost, x.absent, x.local_absent, x.leases, x.recalls,
				    x.suspicious_pages, x.repeated_pages);
				const auto region = [&](const char *name, const auto &r) {
					fmt::format_to(to,
						       "\"{}\": {{\"faults_minor\": {}, \"faults_major\": "
						       "{}, \"invalidations\": {}, "
						       "\"holds\": {}, \"reclaimed_bytes\": {}}}",
						       name, r.faults_minor, r.faults_major, r.invalidations,
						       r.holds, r.reclaimed);
				};
				region("target", x.target);
				out += ", ";
				region("client", x);
				out += '}';
			}
			out += "\n    ]";
			if (t.latency) {
				histogram sum;

				for (const outcome &x : s.rounds)
					sum.add(x.latencies);
				out += ", \"histogram\": [";
				between = "";
				for (std::size_t i = 0; i < histogram::size; i++)
					if (const std::uint64_t n = sum.counts()[i]) {
						fmt::format_to(to, "{}{{\"from_ns\": {}, \"count\": {}}}",
							       between, histogram::floor(i), n);
						between = ", ";
					}
				out += ']';
			}
			out += '}';
		}
	out += "\n  ]\n}\n";
	return out;
}

} // namespace perf
