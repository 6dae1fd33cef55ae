/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Random work against a responder whose pages come and go at every step. The
 * sim checks order and keys, the app checks data and completions; the limit on
 * steps catches a livelock.
 */
#include "sim.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace npr::test {
namespace {

struct scenario {
	const char *name;
	unsigned page_out, busy, rereg, budget, slots, read_words_min;
	bool relaxed, sig_all, signature_data;
	unsigned once = 0, local = 0, no_hold = 0, opaque = 0;
	unsigned recall = 0; /* with leases */
	bool ordered = false;
	bool parts = false; /* a key is that of a whole address space */
};

class RandomWork : public ::testing::TestWithParam<scenario> {};

void run(const scenario &s, std::uint64_t seed, std::size_t count)
{
	SCOPED_TRACE(testing::Message() << "seed " << seed);
	engine_config c = small_config();
	c.sq_budget = s.budget;
	c.cache_slots = s.slots;
	c.read_words_min = s.read_words_min;
	c.relaxed = s.relaxed;
	c.sq_sig_all = s.sig_all;
	c.opaque_sinks = s.opaque == 100;
	c.leases = s.recall;
	c.ordered_writes = s.ordered;
	app a(c, seed);
	a.world.add_region(0x10000, 24 * page_size, 0x100);
	a.world.add_region(0x7f0000000123, 9 * page_size + 77, 0x200);
	a.world.add_region(0x200000 - 5 * page_size, 12 * page_size - 1, 0x300);
	for (const std::uint64_t base : {0x400000, 0x410000})
		if (s.parts)
			a.world.add_region(base, 16 * page_size, 0x400).info.part_shift = 16;
	a.world.chance_page_out = s.page_out;
	a.world.chance_busy = s.busy;
	a.world.chance_rereg = s.rereg;
	a.world.chance_no_hold = s.no_hold;
	a.world.chance_recall = s.recall;
	a.world.chance_no_lease = s.recall ? 10 : 0;
	a.world.lands_once = s.ordered;
	a.world.request = 64U << seed % 7;
	/* Two of three responders do not keep the order of READs and WRITEs, or may not. */
	a.world.out_of_order = seed % 3 == 1;
	a.world.quick = seed % 4 != 3;
	if (s.recall && a.world.out_of_order)
		a.world.ordered = false;
	for (sim_region &r : a.world.regions) {
		r.info.read_order = seed % 3 == 0   ? RDMA_NP_READ_IN_ORDER
				    : seed % 3 == 1 ? RDMA_NP_READ_OUT_OF_ORDER
						    : RDMA_NP_READ_UNKNOWN;
		if (seed % 5 == 0) {
			r.info.max_pages = 1 + static_cast<std::uint32_t>(seed) / 5;
			r.info.max_ranges = 1 + static_cast<std::uint32_t>(seed) / 10;
			r.info.max_outstanding = 2;
		}
	}
	a.chance_once = s.once;
	a.chance_local = s.local;
	a.chance_opaque = s.opaque;
	if (s.signature_data) {
		a.unique_data = false;
		/* as it would lie in memory, now and then a byte off */
		a.fill = [&a](std::span<std::byte> b) {
			const std::uint64_t shift = a.world.dice(4) ? 0 : a.world.dice(8);
			for (std::size_t i = 0; i < b.size(); ++i)
				b[i] = static_cast<std::byte>(signature >> 8 * ((i + shift) % 8));
			if (a.world.dice(2) && !b.empty())
				b[a.world.dice(b.size())] = std::byte{0x42};
		};
	}
	for (auto &m : a.world.memories)
		for (std::size_t i = 0; i < m.size(); ++i)
			m[i] = static_cast<std::byte>(s.signature_data ? signature >> 8 * (i % 8) : i * 7 + i / 251);

	std::uint64_t steps = 0;
	while (a.posted < count) {
		a.listing = a.world.dice(3) == 0;
		for (std::uint64_t n = a.listing ? a.world.dice(8) : 0; n; --n)
			a.post_random(count);
		a.post_random(count);
		a.post_list(a.world.dice(2));
		const std::uint64_t n = a.world.dice(40);
		for (std::uint64_t i = 0; i < n; ++i)
			a.world.tick();
		a.poll();
		ASSERT_FALSE(::testing::Test::HasFailure());
		ASSERT_LT(++steps, count * 20'000) << "livelock";
	}
	a.finish();
	ASSERT_FALSE(::testing::Test::HasFailure());
	a.world.chance_page_out = a.world.chance_rereg = 0;
	a.world.settle();
	a.check_memory();
	if (s.recall) {
		EXPECT_GT(a.eng->stats().leases, 0U);
		for (int i = 0; i < 2; ++i) {
			a.eng->age_leases();
			a.eng->step();
			a.world.settle();
		}
	}
	EXPECT_TRUE(a.world.holds.empty()) << "a hold was not given back";
	EXPECT_TRUE(a.world.local_holds.empty()) << "a local hold was not given back";
	for (const sim_region &r : a.world.regions)
		EXPECT_TRUE(!r.gone || !r.known || r.forgotten) << "region " << r.info.region_id;
}

TEST_P(RandomWork, EndsWithEveryByteAndCompletionRight)
{
	for (std::uint64_t seed = 1; seed <= 20; ++seed) {
		run(GetParam(), seed, 300);
		if (HasFailure())
			return;
	}
}

INSTANTIATE_TEST_SUITE_P(Scenarios, RandomWork,
	testing::Values(
		scenario{"Calm", 0, 0, 0, 16, 64, 0, false, false, false},
		scenario{"Pressure", 10, 5, 0, 16, 64, 0, false, false, false},
		scenario{"HeavyPressure", 40, 20, 0, 16, 64, 0, false, false, false},
		scenario{"SmallestQueue", 20, 5, 0, 2, 4, 0, false, false, false},
		scenario{"SmallQueueByWords", 15, 5, 0, 3, 4, 2048, false, false, false},
		scenario{"SmallestQueueByWords", 15, 5, 0, 2, 4, 2048, false, false, false},
		scenario{"ByWords", 10, 5, 0, 16, 64, 4096, false, false, false},
		scenario{"AllSignaled", 10, 5, 0, 9, 64, 0, false, true, false},
		scenario{"Relaxed", 10, 5, 0, 16, 64, 8192, true, false, false},
		scenario{"RelaxedPressure", 30, 20, 0, 5, 4, 0, true, false, false},
		scenario{"DataIsTheSignature", 10, 5, 0, 16, 64, 0, false, false, true},
		scenario{"DataIsTheSignatureByWords", 20, 5, 0, 16, 64, 4096, true, false, true},
		scenario{"ExactlyOnce", 15, 10, 0, 16, 64, 0, false, false, false, 50},
		scenario{"ExactlyOnceSmallestQueue", 20, 5, 0, 2, 4, 0, false, false, false, 30},
		scenario{"ExactlyOnceRelaxed", 15, 10, 0, 9, 64, 4096, true, true, false, 30},
		scenario{"LocalBuffers", 15, 10, 0, 16, 64, 4096, false, false, false, 20, 60},
		scenario{"LocalBuffersRelaxed", 15, 10, 0, 5, 4, 0, true, true, false, 20, 60},
		scenario{"NoMemoryForHolds", 40, 10, 0, 16, 64, 0, false, false, false, 0, 20, 60},
		scenario{"NoMemoryForHoldsRelaxed", 20, 5, 2, 5, 4, 4096, true, false, true, 0, 20, 90},
		scenario{"NoHolds", 20, 5, 0, 9, 64, 0, false, false, false, 0, 0, 100},
		scenario{"BuffersAnywhere", 15, 10, 0, 16, 64, 4096, false, false, false, 20, 30, 0, 50},
		scenario{"BuffersAnywhereSmallestQueue", 20, 5, 2, 2, 4, 0, true, false, true, 0, 30, 30, 50},
		scenario{"NothingIsLookedAt", 20, 5, 0, 9, 64, 4096, false, false, true, 0, 20, 0, 100},
		scenario{"Leases", 10, 5, 0, 16, 64, 0, false, false, false, 20, 0, 0, 0, 10},
		scenario{"LeasesPressure", 30, 10, 0, 9, 64, 4096, false, false, false, 30, 30, 20, 20, 30},
		scenario{"LeasesSmallestQueue", 10, 5, 0, 2, 4, 0, false, true, false, 20, 0, 0, 0, 20},
		scenario{"LeasesRelaxed", 20, 5, 0, 16, 64, 0, true, false, false, 20, 0, 0, 0, 20},
		scenario{"LeasesDataIsTheSignature", 20, 5, 2, 16, 64, 0, false, false, true, 0, 0, 0, 0, 10},
		scenario{"LeasesReregistration", 10, 5, 4, 9, 64, 4096, true, false, false, 0, 20, 0, 0, 20},
		scenario{"Ordered", 30, 10, 0, 16, 64, 0, false, false, false, 20, 30, 0, 0, 0, true},
		scenario{"OrderedSmallestQueue", 20, 5, 0, 2, 4, 4096, false, true, false, 20, 0, 0, 0, 0, true},
		scenario{"OrderedLeases", 20, 5, 0, 9, 64, 0, false, false, false, 20, 0, 0, 0, 20, true},
		scenario{"Reregistration", 5, 5, 4, 16, 64, 0, false, false, false},
		scenario{"ReregistrationRelaxed", 10, 10, 4, 7, 4, 4096, true, false, true},
		scenario{"Parts", 15, 10, 0, 16, 64, 4096, false, false, false, 20, 30, 0, 0, 0, false, true},
		scenario{"PartsReregistration", 10, 5, 4, 5, 4, 0, true, false, false, 0, 20, 0, 0, 20, false, true}),
	[](const auto &p) { return std::string(p.param.name); });

/*
 * The QP dies at a random moment, of what the peer does not acknowledge or of a SEND: every request
 * completes once, in order, flushed at the end, and one of them says why.
 */
TEST(RandomErrors, EveryRequestCompletesOnceInOrder)
{
	static constexpr ibv_wc_status causes[] = {IBV_WC_RETRY_EXC_ERR, IBV_WC_LOC_PROT_ERR,
						   IBV_WC_RNR_RETRY_EXC_ERR};
	unsigned flushed_before = 0;

	for (std::uint64_t seed = 1; seed <= 300; ++seed) {
		SCOPED_TRACE(testing::Message() << "seed " << seed);
		engine_config c = small_config();
		c.relaxed = seed % 2;
		c.sq_sig_all = seed / 2 % 2;
		c.sq_budget = 2 + static_cast<std::uint32_t>(seed % 9);
		app a(c, seed);
		a.expect_success = false;
		a.chance_local = 30;
		a.world.add_region(0x10000, 24 * page_size, 0x100);
		a.world.chance_page_out = 10;
		const std::size_t count = 60;
		const std::size_t death = a.world.dice(2000);
		const ibv_wc_status cause = causes[seed % std::size(causes)];
		std::uint64_t ticks = 0;
		bool died = false;
		for (std::uint64_t steps = 0; a.posted < count && steps < 100'000; ++steps) {
			a.listing = a.world.dice(2);
			a.post_random(count);
			a.post_random(count);
			a.post_list(a.world.dice(2));
			for (std::uint64_t i = 0; i < 10; ++i, ++ticks) {
				const auto first = std::find_if(a.world.queue.begin(), a.world.queue.end(),
								[](const sim::wire &w) { return !w.finished; });
				if (ticks == death && cause != IBV_WC_RETRY_EXC_ERR) {
					a.world.fail_send = cause;
				} else if (ticks >= death && !died && cause == IBV_WC_RETRY_EXC_ERR &&
					   first != a.world.queue.end()) {
					first->status = cause;
					died = a.world.qp_error = true;
				}
				a.world.tick();
			}
			a.poll();
			ASSERT_FALSE(HasFailure());
		}
		a.finish();
		a.poll();
		ASSERT_FALSE(HasFailure());
		/* The last may be what drains the send queue, for which no request waits. */
		a.world.run_wire();
		EXPECT_FALSE(a.eng->waits_for_wire());
		EXPECT_TRUE(a.world.local_holds.empty());
		if (died || a.world.failed_seq) {
			bool error = false;
			unsigned told = 0;
			for (const ibv_wc &w : a.completions) {
				EXPECT_TRUE(!error || w.status != IBV_WC_SUCCESS) << "success after an error";
				if (w.status == cause) {
					++told;
					flushed_before += error;
					/* of whoever is the first that is not done, or of the one that failed */
					if (died)
						EXPECT_FALSE(error);
					else
						EXPECT_EQ(w.wr_id, a.world.failed_seq);
				} else if (w.status != IBV_WC_SUCCESS) {
					EXPECT_EQ(w.status, IBV_WC_WR_FLUSH_ERR);
				}
				error |= w.status != IBV_WC_SUCCESS;
			}
			EXPECT_EQ(told, 1U);
		}
	}
	EXPECT_GT(flushed_before, 0U) << "no READ was caught unproven";
}

} // namespace
} // namespace npr::test
