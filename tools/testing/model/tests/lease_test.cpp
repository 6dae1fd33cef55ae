/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The protocol of leases holds in all scenarios; without any one of its steps it does not,
 * and the invariant that is broken is the one that the step is there for.
 */
#include "search.hpp"

#include <algorithm>
#include <gtest/gtest.h>
#include <ostream>
#include <set>

using model::invariant;
using model::lease::mutation;

namespace model::lease
{

static void PrintTo(const scenario &sc, std::ostream *out)
{
	*out << sc.name;
}

} // namespace model::lease

namespace
{

constexpr std::size_t max_states = 3'000'000;

struct expectation {
	mutation m;
	const char *scenario;
	invariant broken;
};

/* The step that is missing, who needs it, and what for. */
constexpr expectation expectations[] = {
    {mutation::change_not_recalled, "lease-change", invariant::i10},
    {mutation::pressure_not_recalled, "lease-pressure", invariant::i10},
    {mutation::recall_not_repeated, "lease-lost", invariant::i10},
    {mutation::busy_not_repeated, "lease-change", invariant::i10},
    {mutation::busy_is_gone, "lease-change", invariant::qp},
    {mutation::wanted_before_grant_forgotten, "lease-change", invariant::i10},
    {mutation::no_time_limit, "lease-stopped", invariant::i10},
    {mutation::limit_keeps_key, "lease-stopped", invariant::i11},
    {mutation::limit_ends_queue_pair, "lease-stopped", invariant::qp},
    {mutation::unpin_before_key, "lease-stopped", invariant::i11},
    {mutation::key_does_not_wait, "lease-change", invariant::i11},
    {mutation::key_does_not_wait, "lease-stopped", invariant::i11},
    {mutation::key_does_not_wait, "lease-deregistered-stopped", invariant::i11},
    {mutation::count_after_grant, "lease-pressure", invariant::i10},
    {mutation::uncount_before_unpin, "lease-pressure", invariant::i10},
    {mutation::release_ids_reused, "lease-idle", invariant::qp},
    {mutation::added_to_dead_peer, "lease-queue-pair-ends", invariant::i10},
    {mutation::kill_keeps_leases, "lease-queue-pair-ends", invariant::i10},
    {mutation::replay_of_ended, "lease-slow", invariant::qp},
    {mutation::replay_of_ended, "lease-deregistered-slow", invariant::qp},
    {mutation::grant_although_gone, "lease-deregistered", invariant::qp},
    {mutation::grant_although_gone, "lease-deregistered-slow", invariant::i11},
    {mutation::pin_although_closed, "lease-deregistered", invariant::i11},
    {mutation::deregistration_does_not_recall, "lease-deregistered", invariant::i11},
    {mutation::deregistration_does_not_wait, "lease-deregistered", invariant::qp},
    {mutation::deregistration_keeps_keys, "lease-deregistered-stopped", invariant::i11},
    {mutation::gone_while_asked, "lease-change", invariant::qp},
    {mutation::gone_while_kept, "lease-change", invariant::qp},
    {mutation::recall_not_told, "lease-change", invariant::i10},
    {mutation::copy_releases, "lease-lost", invariant::i9},
    {mutation::early_recall_forgotten, "lease-change", invariant::i9},
    {mutation::post_after_recall, "lease-change", invariant::i9},
    {mutation::release_before_completion, "lease-change", invariant::i9},
    {mutation::posts_behind_send, "lease-behind-send", invariant::qp},
};

/* Missing, these break nothing. */
constexpr mutation harmless[] = {
    /* Whoever makes the key finds the region gone. This only saves the work before that. */
    mutation::no_leases_unchecked,
    /* The lease stays until it is wanted back, and then nobody has it. This is only sooner. */
    mutation::late_answer_not_released,
    /* Each lease has a limit of its own after its recall. This one is shorter. */
    mutation::deregistration_waits_for_ever,
};

void PrintTo(const expectation &e, std::ostream *out)
{
	*out << name(e.m) << " in " << e.scenario;
}

std::string identifier(std::string_view name)
{
	std::string s(name);
	std::replace(s.begin(), s.end(), '-', '_');
	return s;
}

class Leases : public testing::TestWithParam<model::lease::scenario>
{
};

TEST_P(Leases, HoldInEveryInterleaving)
{
	const model::result r = model::explore(GetParam(), mutation::none, max_states);

	EXPECT_EQ(r.broken, invariant::held) << name(r.broken) << "\n" << r.trace;
	EXPECT_TRUE(r.complete);
	EXPECT_GT(r.finals, 1U);
	std::printf("%zu states, %zu steps, depth %zu, %zu ends\n", r.states, r.steps, r.depth, r.finals);
}

INSTANTIATE_TEST_SUITE_P(Scenario, Leases, testing::ValuesIn(model::lease::scenarios()),
			 [](const auto &i) { return identifier(i.param.name); });

class LeaseMutation : public testing::TestWithParam<expectation>
{
};

TEST_P(LeaseMutation, IsFound)
{
	const expectation &e = GetParam();
	const model::lease::scenario *sc = model::lease::find_scenario(e.scenario);
	ASSERT_TRUE(sc);
	const model::result r = model::explore(*sc, e.m, max_states);

	EXPECT_EQ(name(r.broken), name(e.broken)) << r.trace;
	EXPECT_FALSE(r.trace.empty());
}

INSTANTIATE_TEST_SUITE_P(Step, LeaseMutation, testing::ValuesIn(expectations), [](const auto &i) {
	return identifier(name(i.param.m)) + "_in_" + identifier(i.param.scenario);
});

TEST(LeaseMutations, EachOfThemIsExpectedToBreakSomethingOrNothing)
{
	std::set<mutation> known(std::begin(harmless), std::end(harmless));

	for (const expectation &e : expectations)
		known.insert(e.m);
	EXPECT_EQ(known.size(), static_cast<std::size_t>(mutation::count) - 1);
}

TEST(LeaseMutations, EveryInvariantIsBrokenByOneOfThem)
{
	std::set<invariant> broken;

	for (const expectation &e : expectations)
		broken.insert(e.broken);
	EXPECT_EQ(broken, (std::set{invariant::i9, invariant::i10, invariant::i11, invariant::qp}));
}

TEST(LeaseMutations, TheHarmlessOnesBreakNothing)
{
	for (const mutation m : harmless) {
		for (const model::lease::scenario &sc : model::lease::scenarios()) {
			const model::result r = model::explore(sc, m, max_states);
			EXPECT_EQ(r.broken, invariant::held) << name(m) << " in " << sc.name << "\n"
							     << r.trace;
			EXPECT_TRUE(r.complete);
		}
	}
}

/* What no interleaving reaches is not proven. */
TEST(Leases, EveryStepIsTakenSomewhere)
{
	static const char *const all[] = {
	    "memory: changes",
	    "memory: is short",
	    "fault: begins",
	    "fault: says that it is at work",
	    "fault: answers again",
	    "fault: answers again without a lease",
	    "fault: finds the region going",
	    "fault: is over the bound, the oldest is recalled",
	    "fault: counts the lease",
	    "fault: finds the chunk closed",
	    "fault: pins the page",
	    "fault: finds the region gone",
	    "fault: makes the key",
	    "fault: finds the peer dead",
	    "fault: grants and answers",
	    "fault: answers without a lease",
	    "recall: begins",
	    "recall: finds nothing granted yet",
	    "recall: sends it again",
	    "recall: asks again",
	    "recall: has OK",
	    "recall: has BUSY",
	    "recall: has GONE",
	    "recall: time is up",
	    "end: RELEASE",
	    "end: RELEASE of nothing",
	    "end: the peer is dead",
	    "end: key ends",
	    "end: has no key",
	    "end: unpins",
	    "end: counts no more",
	    "deregistration: begins, the region is gone",
	    "deregistration: recalls all leases",
	    "deregistration: finds no lease",
	    "deregistration: has waited for long enough",
	    "deregistration: key ends",
	    "deregistration: no lease has a key",
	    "deregistration: drops leaves, unpins, returns",
	    "network: loses a FAULT",
	    "network: loses a grant",
	    "network: loses a refusal",
	    "network: loses a RECALL",
	    "network: loses the answer to a RECALL",
	    "network: loses a RELEASE",
	    "network: a copy is under way, too",
	    "kernel: sends FAULT again",
	    "kernel: gives FAULT up",
	    "kernel: sends RELEASE again",
	    "kernel: gives RELEASE up",
	    "kernel: keeps the lease",
	    "kernel: has no lease",
	    "kernel: knows the answer",
	    "kernel: releases what nobody waits for",
	    "kernel: answers RECALL: OK, and tells",
	    "kernel: answers RECALL: OK, it is on its way back",
	    "kernel: answers RECALL: BUSY",
	    "kernel: answers RECALL: GONE",
	    "library: asks for a lease",
	    "library: has a lease",
	    "library: has no lease",
	    "library: was told before",
	    "library: sees the recall",
	    "library: posts a SEND",
	    "library: posts a WRITE",
	    "library: has a completion",
	    "library: writes without a lease",
	    "library: writes without a lease, after one that was overdue",
	    "library: gives back what is idle",
	    "library: is stopped for ever",
	    "library: is never heard of again, nor its host",
	    "library: destroys its QP",
	    "NIC: executes a WRITE",
	    "NIC: writes, and completes",
	    "NIC: completes what has yet to be written",
	    "NIC: writes",
	    "NIC: finds the key gone, both QPs end",
	    "NIC: has a receive, the SEND completes",
	};
	std::set<std::string> taken;

	for (const model::lease::scenario &sc : model::lease::scenarios())
		taken.merge(model::explore(sc, mutation::none, max_states).taken);
	for (const char *what : all)
		EXPECT_TRUE(taken.contains(what)) << what;
	EXPECT_EQ(taken.size(), std::size(all)) << "a step is missing in the list";
}

TEST(LeaseSearch, TraceNamesEveryStepUpToTheOneThatBreaks)
{
	const model::result r = model::explore(*model::lease::find_scenario("lease-stopped"),
					       mutation::unpin_before_key, max_states);

	ASSERT_EQ(r.broken, invariant::i11);
	EXPECT_NE(r.trace.find("end for initiator 0: unpins, lease 0"), std::string::npos);
	EXPECT_TRUE(r.trace.ends_with("WRITEs 0/0/1\n")) << r.trace;
}

} // namespace
