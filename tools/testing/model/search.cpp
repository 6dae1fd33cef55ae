/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "search.hpp"

#include <algorithm>
#include <cstring>

namespace model
{

namespace
{

constexpr std::uint32_t nothing = ~0U;

template <class State> struct steps_from;
template <> struct steps_from<state> {
	using list = std::vector<step>;
};
template <> struct steps_from<lease::state> {
	using list = std::vector<lease::step>;
};

template <class State> std::uint64_t hash_of(const State &s)
{
	std::array<std::uint64_t, (sizeof(State) + 7) / 8> words{};
	std::uint64_t h = 0x9e3779b97f4a7c15ULL;

	std::memcpy(words.data(), &s, sizeof(s));
	for (std::uint64_t w : words) {
		h = (h ^ w) * 0xff51afd7ed558ccdULL;
		h ^= h >> 32;
	}
	return h;
}

/* States in the order in which they were found, and a table to find them again. */
template <class State> class visited
{
public:
	visited() : table_(1U << 12, nothing) {}

	/* Its number, and whether it is new. */
	std::pair<std::uint32_t, bool> insert(const State &s, std::uint32_t from)
	{
		if (2 * (states_.size() + 1) > table_.size())
			grow();
		std::size_t i = hash_of(s) & (table_.size() - 1);
		for (; table_[i] != nothing; i = (i + 1) & (table_.size() - 1))
			if (states_[table_[i]] == s)
				return {table_[i], false};
		table_[i] = static_cast<std::uint32_t>(states_.size());
		states_.push_back(s);
		parents_.push_back(from);
		return {table_[i], true};
	}

	[[nodiscard]] std::size_t size() const { return states_.size(); }
	/* A copy: what is found moves the others. */
	[[nodiscard]] State at(std::uint32_t i) const { return states_[i]; }
	[[nodiscard]] std::uint32_t parent(std::uint32_t i) const { return parents_[i]; }

private:
	void grow()
	{
		std::vector<std::uint32_t> more(2 * table_.size(), nothing);
		for (std::uint32_t n = 0; n < states_.size(); ++n) {
			std::size_t i = hash_of(states_[n]) & (more.size() - 1);
			while (more[i] != nothing)
				i = (i + 1) & (more.size() - 1);
			more[i] = n;
		}
		table_.swap(more);
	}

	std::vector<State> states_;
	std::vector<std::uint32_t> parents_;
	std::vector<std::uint32_t> table_;
};

template <class Scenario, class Mutation, class State>
std::string trace(const Scenario &sc, Mutation m, const visited<State> &seen, std::uint32_t last)
{
	std::vector<std::uint32_t> path;
	typename steps_from<State>::list out;
	std::string text = "      " + describe(sc, seen.at(0)) + "\n";

	for (std::uint32_t i = last; i != nothing; i = seen.parent(i))
		path.push_back(i);
	std::reverse(path.begin(), path.end());
	for (std::size_t k = 1; k < path.size(); ++k) {
		const State to = seen.at(path[k]);
		out.clear();
		successors(sc, m, seen.at(path[k - 1]), out);
		const auto how =
		    std::find_if(out.begin(), out.end(), [&](const auto &s) { return s.to == to; });
		const std::string number = std::to_string(k), after = describe(sc, to);
		text += std::string(4 - std::min<std::size_t>(number.size(), 4), ' ') + number + "  " +
			describe(how->how) + "\n";
		if (after != describe(sc, seen.at(path[k - 1])))
			text += "      " + after + "\n";
	}
	return text;
}

/* Which states lead to one of @finals? */
std::vector<bool> lead_to(const std::vector<std::uint32_t> &finals, std::size_t states,
			  const std::vector<std::pair<std::uint32_t, std::uint32_t>> &steps)
{
	std::vector<std::uint32_t> first(states + 1), from(steps.size()), todo(finals);
	std::vector<bool> can(states);

	for (const auto &[a, b] : steps)
		++first[b];
	std::uint32_t sum = 0;
	for (std::uint32_t &n : first)
		n = sum += n;
	for (const auto &[a, b] : steps)
		from[--first[b]] = a;
	for (std::uint32_t f : finals)
		can[f] = true;
	while (!todo.empty()) {
		const std::uint32_t b = todo.back();
		todo.pop_back();
		for (std::uint32_t k = first[b]; k < first[b + 1]; ++k) {
			if (!can[from[k]]) {
				can[from[k]] = true;
				todo.push_back(from[k]);
			}
		}
	}
	return can;
}

} // namespace

template <class Scenario, class Mutation>
result explore(const Scenario &sc, Mutation m, std::size_t max_states)
{
	using State = decltype(initial(sc));
	std::vector<std::pair<std::uint32_t, std::uint32_t>> steps;
	std::vector<std::uint32_t> finals;
	typename steps_from<State>::list out;
	std::set<std::pair<const char *, const char *>> taken;
	visited<State> seen;
	result r;

	seen.insert(initial(sc), nothing);
	std::size_t level = 1;
	for (std::uint32_t i = 0; i < seen.size(); ++i) {
		if (i == level) {
			++r.depth;
			level = seen.size();
		}
		const State s = seen.at(i);
		if (is_final(sc, s))
			finals.push_back(i);
		out.clear();
		successors(sc, m, s, out);
		for (const auto &next : out) {
			const auto [to, is_new] = seen.insert(next.to, i);
			steps.emplace_back(i, to);
			taken.emplace(next.how.actor, next.how.what);
			if (!is_new || !next.to.bad)
				continue;
			r.broken = static_cast<invariant>(next.to.bad);
			r.trace = trace(sc, m, seen, to);
			r.states = seen.size();
			r.steps = steps.size();
			return r;
		}
		if (seen.size() > max_states) {
			r.complete = false;
			break;
		}
	}
	r.states = seen.size();
	r.steps = steps.size();
	r.finals = finals.size();
	for (const auto &[actor, what] : taken)
		r.taken.insert(std::string(actor) + ": " + what);
	if (!r.complete)
		return r;

	const std::vector<bool> can = lead_to(finals, seen.size(), steps);
	const auto lost = std::find(can.begin(), can.end(), false);
	if (lost != can.end()) {
		/* One in which nobody moves any more; or the last that was found, which goes round. */
		std::uint32_t i = 0;
		for (auto k = static_cast<std::uint32_t>(lost - can.begin()); k < can.size(); ++k) {
			if (can[k])
				continue;
			i = k;
			out.clear();
			successors(sc, m, seen.at(k), out);
			if (out.empty())
				break;
		}
		r.broken = blame(sc, seen.at(i));
		r.trace = trace(sc, m, seen, i) + "      and from here the end cannot be reached any more\n";
	}
	return r;
}

template result explore(const scenario &sc, mutation m, std::size_t max_states);
template result explore(const lease::scenario &sc, lease::mutation m, std::size_t max_states);

} // namespace model
