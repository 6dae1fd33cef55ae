/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The protocol holds in all scenarios; without any one of its steps it does not,
 * and the invariant that is broken is the one that the step is there for.
 */
#include "search.hpp"

#include <algorithm>
#include <gtest/gtest.h>
#include <ostream>
#include <set>

using model::invariant;
using model::mutation;

namespace model
{

static void PrintTo(const scenario &sc, std::ostream *out)
{
	*out << sc.name;
}

} // namespace model

namespace
{

constexpr std::size_t max_states = 6'000'000;

struct expectation {
	mutation m;
	const char *scenario;
	invariant broken;
};

/* The step that is missing, who needs it, and what for. */
constexpr expectation expectations[] = {
    {mutation::absent_word_after_leaf, "write", invariant::i3},
    {mutation::absent_word_after_leaf, "large-read", invariant::read},
    {mutation::absent_word_stays, "write", invariant::i3},
    {mutation::absent_no_flush, "write", invariant::i1},
    {mutation::absent_no_flush, "read", invariant::i1},
    {mutation::absent_no_drain, "write", invariant::i1},
    {mutation::absent_flush_before_leaf, "write", invariant::i1},
    {mutation::absent_through_not_present, "read", invariant::i2},
    {mutation::absent_write_leaf_stays, "write", invariant::i1},
    {mutation::protect_word_after_leaf, "fork", invariant::i3},
    {mutation::protect_word_after_leaf, "huge-fork", invariant::i3},
    {mutation::protect_word_stays, "file", invariant::i3},
    {mutation::protect_no_flush, "fork", invariant::i1},
    {mutation::protect_no_drain, "fork", invariant::i1},
    {mutation::protect_flush_before_leaf, "file", invariant::i1},
    {mutation::protect_through_not_present, "file", invariant::i2},
    {mutation::protect_leaf_stays, "fork", invariant::i1},
    {mutation::protect_although_page_goes, "read", invariant::i1},
    {mutation::protect_held_leaf_goes, "fork-held", invariant::i5},
    {mutation::protect_held_word_stays, "held-and-cleaned", invariant::i8},
    {mutation::protect_stale_unmarked, "hold", invariant::i1},
    {mutation::split_no_flush, "huge-held", invariant::read},
    {mutation::split_uncounted, "huge-held", invariant::read},
    {mutation::split_counted_late, "huge-held", invariant::i1},
    {mutation::split_write_missing, "huge-held-for-read", invariant::i1},
    {mutation::huge_one_page_goes, "huge", invariant::i1},
    {mutation::huge_words_of_others_stay, "huge", invariant::i3},
    {mutation::huge_flush_of_one_page, "huge", invariant::i1},
    {mutation::huge_under_hold, "huge-held", invariant::i1},
    {mutation::huge_merge_uncounted, "huge-held", invariant::i1},
    {mutation::huge_merge_counted_early, "huge-held", invariant::i1},
    {mutation::huge_drops_right, "huge-held", invariant::i1},
    {mutation::huge_one_page_dirty, "huge", invariant::i8},
    {mutation::retry_check_missing, "huge", invariant::i1},
    {mutation::resident_no_flush, "two-writers", invariant::i3},
    {mutation::resident_no_flush, "read", invariant::read},
    {mutation::resident_word_before_leaf, "write-absent", invariant::i3},
    {mutation::resident_word_before_flush, "two-writers", invariant::i3},
    {mutation::resident_through_not_present, "read", invariant::i2},
    {mutation::resident_not_dirty, "write-absent", invariant::i8},
    {mutation::resident_not_dirty, "file", invariant::i8},
    {mutation::generation_stays, "write", invariant::i3},
    {mutation::generation_stays, "large-read", invariant::read},
    {mutation::generation_on_resident_page, "two-writers", invariant::i5},
    {mutation::retry_check_missing, "write", invariant::i1},
    {mutation::retry_check_missing, "move", invariant::i1},
    {mutation::merge_check_missing, "huge-held", invariant::i1},
    {mutation::held_leaf_goes, "hold", invariant::i5},
    {mutation::held_word_stays, "two-holds", invariant::i1},
    {mutation::stale_leaf_stays, "hold", invariant::i1},
    {mutation::stale_flush_missing, "hold", invariant::i1},
    {mutation::stale_mapped_over, "discard-held", invariant::i5},
    {mutation::pin_check_missing, "discard", invariant::i5},
    {mutation::release_not_dirty, "exactly-once", invariant::i8},
    {mutation::allocation_under_lock, "reclaim", invariant::i7},
    {mutation::notifier_allocates, "reclaim", invariant::i7},
    {mutation::notifier_waits_for_peer, "write-absent", invariant::i7},
    {mutation::nic_relaxed_ordering, "write", invariant::i3},
    {mutation::nic_splits_units, "read", invariant::i4},
    {mutation::read_not_scanned, "read", invariant::read},
    {mutation::read_first_unit_scanned, "read", invariant::read},
    {mutation::read_words_overlap_data, "large-read", invariant::read},
    {mutation::read_words_not_known_before, "large-read", invariant::read},
    {mutation::read_suspicion_is_final, "read-own-signature", invariant::i6},
    {mutation::write_not_verified, "write", invariant::i3},
    {mutation::write_words_before_data, "write", invariant::i3},
    /* Right only on a NIC whose READs do not overtake: the same with it is "write". */
    {mutation::write_words_in_one_doorbell, "write-overtaken", invariant::i3},
    {mutation::write_words_in_one_doorbell, "fork-overtaken", invariant::i3},
    /* The READ behind a WRITE also says when a hold may end. */
    {mutation::write_words_in_one_doorbell, "exactly-once-overtaken", invariant::i5},
    {mutation::nic_relaxed_ordering, "write-overtaken", invariant::i3},
    {mutation::write_words_not_known_before, "write", invariant::i3},
    {mutation::write_right_unchecked, "write", invariant::i3},
    {mutation::once_released_early, "exactly-once", invariant::i5},
    {mutation::once_asks_under_hold, "discard-held", invariant::i5},
    {mutation::hold_never_asked, "write", invariant::i5},
};

/* Missing, these break nothing. */
constexpr mutation harmless[] = {
    /*
     * A request that was translated before the page became resident hits a stand-in,
     * and its initiator cannot know the new word yet. IOMMUs drain all the same.
     */
    mutation::resident_no_drain,
    /*
     * A word that has lost the right to be written gets a new generation before it has
     * it again; and READs do not mind, for their page stays.
     */
    mutation::protect_generation_stays,
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

class Protocol : public testing::TestWithParam<model::scenario>
{
};

TEST_P(Protocol, HoldsInEveryInterleaving)
{
	const model::scenario sc = model::deeper(GetParam(), NPRDMA_MODEL_DEEPER);
	const model::result r = model::explore(sc, mutation::none, max_states);

	EXPECT_EQ(r.broken, invariant::held) << name(r.broken) << "\n" << r.trace;
	EXPECT_TRUE(r.complete);
	EXPECT_GT(r.finals, 1U) << "memory management never came between";
	std::printf("%zu states, %zu steps, depth %zu, %zu ends\n", r.states, r.steps, r.depth, r.finals);
}

INSTANTIATE_TEST_SUITE_P(Scenario, Protocol, testing::ValuesIn(model::scenarios()),
			 [](const auto &i) { return identifier(i.param.name); });

class Mutation : public testing::TestWithParam<expectation>
{
};

TEST_P(Mutation, IsFound)
{
	const expectation &e = GetParam();
	const model::scenario *sc = model::find_scenario(e.scenario);
	ASSERT_TRUE(sc);
	const model::result r = model::explore(*sc, e.m, max_states);

	EXPECT_EQ(name(r.broken), name(e.broken)) << r.trace;
	EXPECT_FALSE(r.trace.empty());
}

INSTANTIATE_TEST_SUITE_P(Step, Mutation, testing::ValuesIn(expectations), [](const auto &i) {
	return identifier(name(i.param.m)) + "_in_" + identifier(i.param.scenario);
});

TEST(Mutations, EachOfThemIsExpectedToBreakSomethingOrNothing)
{
	std::set<mutation> known(std::begin(harmless), std::end(harmless));

	for (const expectation &e : expectations)
		known.insert(e.m);
	EXPECT_EQ(known.size(), static_cast<std::size_t>(mutation::count) - 1);
}

TEST(Mutations, EveryInvariantIsBrokenByOneOfThem)
{
	std::set<invariant> broken;

	for (const expectation &e : expectations)
		broken.insert(e.broken);
	EXPECT_EQ(broken.size(), 9U);
}

TEST(Mutations, TheHarmlessOnesBreakNothing)
{
	for (const mutation m : harmless) {
		for (const model::scenario &sc : model::scenarios()) {
			const model::result r = model::explore(sc, m, max_states);
			EXPECT_EQ(r.broken, invariant::held) << name(m) << " in " << sc.name << "\n"
							     << r.trace;
			EXPECT_TRUE(r.complete);
		}
	}
}

/* What no interleaving reaches is not proven. */
TEST(Protocol, EveryStepIsTakenSomewhere)
{
	static const char *const all[] = {
	    "notifier: takes the lock, word := absent",
	    "notifier: takes the lock, word := readable",
	    "notifier: leaf := stand-in",
	    "notifier: invalidates the IOTLB",
	    "notifier: has drained",
	    "notifier: returns",
	    "memory: leaves the page: pinned",
	    "memory: unmaps",
	    "memory: write-protects, was dirty",
	    "memory: write-protects, was clean",
	    "memory: keeps the page: mapped again",
	    "memory: keeps the page: mapped or dirty again",
	    "memory: writes the page back",
	    "memory: drops the clean page",
	    "memory: frees the frame",
	    "memory: copies the page and maps the copy",
	    "memory: discards",
	    "memory: write-protects what is shared now",
	    "memory: maps the copy",
	    "memory: copies the pages and maps them as one",
	    "memory: leaves the pages as they are",
	    "owner: prefetches for write",
	    "fault: finds all of it there",
	    "fault: pins the pages",
	    "fault: copies a shared page",
	    "fault: splits the slot",
	    "fault: finds the slot split",
	    "fault: flushes what was one leaf",
	    "fault: takes the sequence",
	    "fault: looks into the page table",
	    "fault: allocates, which reclaims",
	    "fault: finds its sequence out of date",
	    "fault: finds its split undone",
	    "fault: has pinned another page",
	    "fault: waits for holds of another page",
	    "fault: finds a hold on the slot",
	    "fault: takes the lock",
	    "fault: takes the lock, for one leaf",
	    "fault: leaf := page",
	    "fault: leaf := pages",
	    "fault: has drained",
	    "fault: sets the words, drops the lock, answers",
	    "release: takes the lock, stale leaves go",
	    "release: has drained",
	    "release: drops the lock, unpins",
	    "NIC: executes a READ",
	    "NIC: executes a WRITE",
	    "NIC: translates (walk)",
	    "NIC: translates (cached)",
	    "NIC: reads",
	    "NIC: writes",
	    "NIC: reads the word",
	    "initiator: has the completion of its WRITE",
	    "initiator: compares the words",
	    "initiator: has the answer to its fault",
	    "initiator: is done, by its hold",
	};
	std::set<std::string> taken;

	for (const model::scenario &sc : model::scenarios())
		taken.merge(model::explore(sc, mutation::none, max_states).taken);
	for (const char *what : all)
		EXPECT_TRUE(taken.contains(what)) << what;
}

TEST(Search, SaysSoWhenItIsCutShort)
{
	const model::result r = model::explore(*model::find_scenario("write"), mutation::none, 1000);

	EXPECT_FALSE(r.complete);
}

TEST(Search, FindsTheSameStatesEachTime)
{
	const model::scenario &sc = *model::find_scenario("write-read");
	const model::result a = model::explore(sc, mutation::none, max_states);
	const model::result b = model::explore(sc, mutation::none, max_states);

	EXPECT_EQ(a.states, b.states);
	EXPECT_EQ(a.steps, b.steps);
}

TEST(Search, TraceNamesEveryStepUpToTheOneThatBreaks)
{
	const model::result r =
	    model::explore(*model::find_scenario("read"), mutation::absent_no_flush, max_states);

	ASSERT_EQ(r.broken, invariant::i1);
	EXPECT_NE(r.trace.find("   1  "), std::string::npos);
	EXPECT_NE(r.trace.find("notifier: leaf := stand-in (read window), page 0"), std::string::npos);
	EXPECT_TRUE(r.trace.ends_with("notifier: returns, page 0\n")) << r.trace;
}

} // namespace
