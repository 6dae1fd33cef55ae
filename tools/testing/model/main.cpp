/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * nprdma_model: explore the residency protocol, as it is or with one of its steps
 * missing, and print how much was seen and the shortest way to what went wrong.
 */
#include "search.hpp"

#include <chrono>
#include <cstdio>

namespace
{

constexpr std::size_t max_states = 6'000'000;

int usage(FILE *to)
{
	std::fputs("usage: nprdma_model [-h | --list] [-d] [-m MUTATION] [SCENARIO...]\n\n"
		   "Explores all interleavings of the scenarios (default: all of them), of the\n"
		   "protocol as it is, or with MUTATION; with -d, one level deeper. The status is 0 if\n"
		   "every invariant holds, 1 if one is broken; then the shortest trace is printed.\n",
		   to);
	return to == stdout ? 0 : 64;
}

int list()
{
	std::puts("scenarios:");
	for (const model::scenario &sc : model::scenarios())
		std::printf("  %s\n", sc.name.c_str());
	std::puts("mutations:");
	for (unsigned i = 1; i < static_cast<unsigned>(model::mutation::count); ++i)
		std::printf("  %s\n", model::name(static_cast<model::mutation>(i)).data());
	return 0;
}

} // namespace

int main(int argc, char **argv)
{
	model::mutation m = model::mutation::none;
	std::vector<model::scenario> chosen;
	unsigned more = 0;

	for (int i = 1; i < argc; ++i) {
		const std::string_view arg = argv[i];
		if (arg == "-h" || arg == "--help")
			return usage(stdout);
		if (arg == "--list")
			return list();
		if (arg == "-m" && i + 1 < argc) {
			const std::string_view wanted = argv[++i];
			for (unsigned k = 0; k < static_cast<unsigned>(model::mutation::count); ++k)
				if (model::name(static_cast<model::mutation>(k)) == wanted)
					m = static_cast<model::mutation>(k);
			if (model::name(m) != wanted) {
				std::fprintf(stderr, "nprdma_model: no mutation %s, see --list\n", argv[i]);
				return 64;
			}
			continue;
		}
		if (arg == "-d") {
			++more;
			continue;
		}
		if (arg.starts_with("-"))
			return usage(stderr);
		const model::scenario *sc = model::find_scenario(arg);
		if (!sc) {
			std::fprintf(stderr, "nprdma_model: no scenario %s, see --list\n", argv[i]);
			return 64;
		}
		chosen.push_back(*sc);
	}

	int status = 0;
	for (const model::scenario &sc : chosen.empty() ? model::scenarios() : chosen) {
		const auto begin = std::chrono::steady_clock::now();
		const model::result r = model::explore(model::deeper(sc, more), m, max_states);
		const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
		const char *verdict = !r.complete                          ? "TOO LARGE"
				      : r.broken == model::invariant::held ? "holds"
									   : "BROKEN: ";
		std::printf("%-26s %9zu states %9zu steps  depth %3zu  %7zu ends  %5.1f s  %s%s\n",
			    sc.name.c_str(), r.states, r.steps, r.depth, r.finals, took.count(), verdict,
			    r.broken == model::invariant::held ? "" : model::name(r.broken).data());
		std::fputs(r.trace.c_str(), stdout);
		std::fflush(stdout);
		if (!r.complete || r.broken != model::invariant::held)
			status = 1;
	}
	return status;
}
