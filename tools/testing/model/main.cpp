/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * nprdma_model: explore the protocols of residency and of leases, as they are or with
 * one step missing, and print how much was seen and the shortest way to what went wrong.
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
		   "protocols as they are, or with MUTATION, which is a step of one of them; with -d,\n"
		   "one level deeper. The status is 0 if every invariant holds, 1 if one is broken; then\n"
		   "the shortest trace is printed.\n",
		   to);
	return to == stdout ? 0 : 64;
}

template <class Scenarios> void list_scenarios(const Scenarios &scenarios)
{
	for (const auto &sc : scenarios)
		std::printf("  %s\n", sc.name.c_str());
}

template <class Mutation> void list_mutations()
{
	for (unsigned i = 1; i < static_cast<unsigned>(Mutation::count); ++i)
		std::printf("  %s\n", name(static_cast<Mutation>(i)).data());
}

int list()
{
	std::puts("scenarios of residency:");
	list_scenarios(model::scenarios());
	std::puts("mutations of residency:");
	list_mutations<model::mutation>();
	std::puts("scenarios of leases:");
	list_scenarios(model::lease::scenarios());
	std::puts("mutations of leases:");
	list_mutations<model::lease::mutation>();
	return 0;
}

/* Sets @m, if there is such a mutation. */
template <class Mutation> bool find_mutation(std::string_view wanted, Mutation &m)
{
	for (unsigned k = 1; k < static_cast<unsigned>(Mutation::count); ++k) {
		if (name(static_cast<Mutation>(k)) != wanted)
			continue;
		m = static_cast<Mutation>(k);
		return true;
	}
	return false;
}

/* False: an invariant is broken, or there were too many states. */
template <class Scenario, class Mutation>
bool run(const std::vector<Scenario> &scenarios, Mutation m, unsigned more)
{
	bool good = true;

	for (const Scenario &sc : scenarios) {
		const auto begin = std::chrono::steady_clock::now();
		const model::result r = model::explore(deeper(sc, more), m, max_states);
		const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
		const char *verdict = !r.complete                          ? "TOO LARGE"
				      : r.broken == model::invariant::held ? "holds"
									   : "BROKEN: ";
		std::printf("%-26s %9zu states %9zu steps  depth %3zu  %7zu ends  %5.1f s  %s%s\n",
			    sc.name.c_str(), r.states, r.steps, r.depth, r.finals, took.count(), verdict,
			    r.broken == model::invariant::held ? "" : model::name(r.broken).data());
		std::fputs(r.trace.c_str(), stdout);
		std::fflush(stdout);
		good &= r.complete && r.broken == model::invariant::held;
	}
	return good;
}

} // namespace

int main(int argc, char **argv)
{
	model::mutation m = model::mutation::none;
	model::lease::mutation lease_m = model::lease::mutation::none;
	std::vector<model::scenario> chosen;
	std::vector<model::lease::scenario> chosen_leases;
	unsigned more = 0;

	for (int i = 1; i < argc; ++i) {
		const std::string_view arg = argv[i];
		if (arg == "-h" || arg == "--help")
			return usage(stdout);
		if (arg == "--list")
			return list();
		if (arg == "-m" && i + 1 < argc) {
			m = model::mutation::none;
			lease_m = model::lease::mutation::none;
			if (!find_mutation(argv[++i], m) && !find_mutation(argv[i], lease_m)) {
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
		if (const model::scenario *sc = model::find_scenario(arg)) {
			chosen.push_back(*sc);
		} else if (const model::lease::scenario *of_leases = model::lease::find_scenario(arg)) {
			chosen_leases.push_back(*of_leases);
		} else {
			std::fprintf(stderr, "nprdma_model: no scenario %s, see --list\n", argv[i]);
			return 64;
		}
	}
	/* A mutation is of one of the two systems. */
	const bool is_residency = m != model::mutation::none,
		   is_lease = lease_m != model::lease::mutation::none;
	if ((is_residency && !chosen_leases.empty()) || (is_lease && !chosen.empty())) {
		std::fprintf(stderr, "nprdma_model: the mutation is not one of this scenario, see --list\n");
		return 64;
	}
	if (chosen.empty() && chosen_leases.empty()) {
		if (!is_lease)
			chosen = model::scenarios();
		if (!is_residency)
			chosen_leases = model::lease::scenarios();
	}

	const bool good = run(chosen, m, more);
	return run(chosen_leases, lease_m, more) && good ? 0 : 1;
}
