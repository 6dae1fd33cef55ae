/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Breadth-first search of all states of a scenario, of residency (model.hpp) or of
 * leases (lease.hpp). It ends with the shortest trace to a step that breaks an
 * invariant; or, if there is none, to a state from which the end cannot be reached
 * any more.
 */
#ifndef NPRDMA_MODEL_SEARCH_HPP
#define NPRDMA_MODEL_SEARCH_HPP

#include "lease.hpp"
#include "model.hpp"

#include <cstddef>
#include <set>
#include <string>

namespace model
{

struct result {
	invariant broken = invariant::held;
	std::string trace;           /* one line for each step, if something is broken */
	std::size_t states = 0;      /* distinct ones */
	std::size_t steps = 0;       /* between them */
	std::size_t depth = 0;       /* of the longest shortest path */
	std::size_t finals = 0;      /* states in which everything is done */
	bool complete = true;        /* false: there were more than max_states */
	std::set<std::string> taken; /* which kinds of steps there were: "actor: what" */
};

/*
 * Of a transition system: initial(), successors(), is_final(), blame() and describe() are looked up
 * in the namespace of its scenarios.
 */
template <class Scenario, class Mutation>
[[nodiscard]] result explore(const Scenario &sc, Mutation m, std::size_t max_states);

extern template result explore(const scenario &sc, mutation m, std::size_t max_states);
extern template result explore(const lease::scenario &sc, lease::mutation m, std::size_t max_states);

} // namespace model

#endif
