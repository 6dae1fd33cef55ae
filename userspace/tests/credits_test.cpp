/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The credits of a CQ: by themselves, and dealt out to engines that share a CQ of which
 * no entry is to spare. Each of these has a responder of its own.
 */
#include "protocol/credits.hpp"
#include "sim.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <ostream>
#include <vector>

namespace npr::test {
namespace {

TEST(Credits, SmallestPoolHasTwo)
{
	for (std::uint32_t total = 0; total < 3; ++total) {
		const credits c(total);
		EXPECT_EQ(c.total(), 2U);
		EXPECT_EQ(c.largest(), 2U);
		EXPECT_FALSE(c.tail_may_grow()) << "who is silent would have all";
	}
	EXPECT_EQ(credits(1000).largest(), credits::most);
}

/* Who has all of the tails needs as many for what comes next, and as many to be left. */
TEST(Credits, TailsLeaveEnough)
{
	for (const std::uint32_t total : {2U, 9U, 40U, 1000U}) {
		credits c(total);
		std::uint32_t tail = 0;
		for (; c.tail_may_grow(); ++tail) {
			c.take(1);
			c.tail(tail, tail + 1);
		}
		EXPECT_GE(c.free(), tail + c.largest()) << total;
		EXPECT_LE(c.free(), tail + c.largest() + 1) << "no more is signaled than has to be";
	}
}

TEST(Credits, LineIsServedInOrderAndOthersFindNothingMeanwhile)
{
	credits c(8);
	std::array<credits::waiter, 3> w;
	std::vector<std::size_t> turns;
	const auto go = [&](credits::waiter &x) {
		turns.push_back(static_cast<std::size_t>(&x - w.data()));
		EXPECT_LE(x.wants, c.free());
		c.take(x.wants);
	};

	c.take(8);
	c.line_up(w[0], 3, 3);
	c.line_up(w[1], 3, 3);
	c.line_up(w[2], 2, 2);
	c.serve(go);
	c.give(2);
	c.serve(go);
	EXPECT_TRUE(turns.empty()) << "what the first wants is not there yet";
	EXPECT_EQ(c.free(), 0U);
	EXPECT_EQ(c.used(), 6U);
	c.give(5);
	c.serve(go);
	EXPECT_EQ(turns, (std::vector<std::size_t>{0, 1}));
	EXPECT_EQ(c.free(), 0U) << "one is left, for the third";
	c.leave(w[2]);
	EXPECT_EQ(c.free(), 1U);
	EXPECT_FALSE(c.line());
}

TEST(Credits, WhoHasToGiveBackFirstIsPassedBy)
{
	credits c(8);
	credits::waiter hog, other;
	std::vector<credits::waiter *> turns;
	const auto go = [&](credits::waiter &x) { turns.push_back(&x); };

	c.take(5);
	c.line_up(hog, 1, 6);
	c.line_up(other, 1, 1);
	c.serve(go);
	EXPECT_EQ(turns, (std::vector<credits::waiter *>{&other}));
	EXPECT_TRUE(hog.waits);
	c.give(3);
	c.serve(go);
	EXPECT_EQ(turns, (std::vector<credits::waiter *>{&other, &hog}));
	EXPECT_EQ(c.free(), 6U);
}

TEST(Credits, WhoWantsNothingAnyMoreIsInNobodysWay)
{
	credits c(8);
	credits::waiter a, b;
	unsigned turns = 0;

	c.take(8);
	c.line_up(a, 8, 8);
	c.line_up(b, 1, 1);
	c.line_up(a, 0, 5);
	c.give(1);
	c.serve([&](credits::waiter &) { ++turns; });
	EXPECT_EQ(turns, 2U);
	EXPECT_FALSE(c.line());
}

TEST(Credits, PoolGrowsAndShrinksWithWhatIsUsed)
{
	credits c(64);

	c.take(20);
	c.resize(40);
	EXPECT_EQ(c.free(), 20U);
	EXPECT_EQ(c.used(), 20U);
	c.resize(400);
	EXPECT_EQ(c.free(), 380U);
	credits::waiter w;
	c.line_up(w, 390, 390);
	c.resize(410);
	bool went = false;
	c.serve([&](credits::waiter &) { went = true; });
	EXPECT_TRUE(went) << "what is new is for those in line as well";
}

TEST(Credits, CqIsAsLargeAsTheDeviceHasThem)
{
	std::vector<std::uint32_t> asked;
	std::uint32_t most = ~0U;
	const auto make = [&](std::uint32_t n) {
		asked.push_back(n);
		return n <= most;
	};
	const auto got = [&](std::uint32_t own, std::uint32_t least, std::uint32_t limit) {
		asked.clear();
		return with_credits(own, least, limit, make) ? asked.back() : 0;
	};

	EXPECT_EQ(got(4096, 0, 1 << 22), 3U * 4096);
	EXPECT_EQ(got(1, 0, 1 << 22), 257U);
	EXPECT_EQ(got(0, 0, 1 << 22), 256U);
	EXPECT_EQ(got(4096, 0, 5000), 5000U) << "all that the device has";
	EXPECT_EQ(got(5000, 0, 5000), 5000U);
	EXPECT_EQ(got(4096, 300, 4200), 4396U) << "what is in use is needed, and the device refuses it";
	most = 4500;
	EXPECT_EQ(got(4096, 0, 1 << 22), 4096U + 128) << "there is no memory for more";
	EXPECT_EQ(got(4096, 300, 1 << 22), 4396U);
	most = 4000;
	EXPECT_EQ(got(4096, 0, 1 << 22), 0U);
	EXPECT_EQ(asked.back(), 4096U);
}

/* --- engines ----------------------------------------------------------- */

struct shared {
	shared(std::size_t apps, std::uint32_t entries, engine_config config = small_config()) : cq(entries)
	{
		for (std::size_t i = 0; i < apps; ++i) {
			config.tag = static_cast<std::uint32_t>(i);
			all.push_back(std::make_unique<app>(config, i + 1, &cq));
			all.back()->world.add_region(0x10000, 24 * page_size, 0x100);
		}
	}

	/* The first READ of each, so that the key is known, and the pages are there. */
	void warm_up()
	{
		for (auto &a : all) {
			a->world.all_in(a->world.regions[0], true);
			a->post(IBV_WR_RDMA_READ, 0, 0, 8);
			while (!a->world.resolves.empty())
				a->world.answer_resolve(0);
			run(*a);
			ASSERT_EQ(a->poll(), 1U);
		}
	}

	/* What there is to do for @a, and its completions, until nothing is left. */
	void run(app &a)
	{
		for (unsigned rounds = 0; rounds < 1000; ++rounds) {
			a.world.run_wire();
			a.world.run_control();
			if (!cq.poll() && a.world.queue.empty())
				return;
		}
		FAIL() << "livelock";
	}

	void run_all()
	{
		for (bool more = true; more;) {
			more = false;
			for (auto &a : all) {
				more |= !a->world.queue.empty();
				run(*a);
				a->poll();
			}
		}
	}

	sim_cq cq; /* the engines give back what they have */
	std::vector<std::unique_ptr<app>> all;
};

struct pool {
	const char *name;
	std::size_t apps;
	std::uint32_t entries, budget;
	bool relaxed = false;
};

void PrintTo(const pool &p, std::ostream *out)
{
	*out << p.name;
}

class SharedCq : public ::testing::TestWithParam<pool> {};

/* Random work of several engines: none stops for good, and the CQ has room for whatever completes. */
TEST_P(SharedCq, IsNotOverrunAndNobodyStarves)
{
	const pool &p = GetParam();
	constexpr std::size_t count = 60;

	for (std::uint64_t seed = 1; seed <= 15; ++seed) {
		SCOPED_TRACE(testing::Message() << "seed " << seed);
		engine_config c = small_config();
		c.sq_budget = p.budget;
		c.relaxed = p.relaxed;
		c.read_words_min = seed % 2 ? 0 : 4096;
		shared s(p.apps, p.entries, c);
		for (auto &a : s.all) {
			a->world.rng.seed(seed * 100 + a->config.tag);
			a->world.chance_page_out = 10;
			a->world.chance_busy = 5;
			a->world.out_of_order = seed % 3 == 0;
			if (a->world.out_of_order)
				a->world.regions[0].info.read_order = RDMA_NP_READ_OUT_OF_ORDER;
			a->chance_once = 20;
		}
		std::mt19937_64 rng(seed);
		for (std::uint64_t steps = 0;; ++steps) {
			bool busy = false;
			for (auto &a : s.all) {
				a->post_random(count);
				const std::uint64_t n = rng() % 20;
				for (std::uint64_t i = 0; i < n; ++i)
					a->world.tick();
				a->poll();
				/* the last ones may be unsignaled */
				if (a->posted == count && a->world.quiet() && !a->eng->ready() && a->eng->idle())
					a->world.ops.clear();
				busy |= a->posted < count || !a->world.ops.empty() || !a->eng->idle();
			}
			for (std::uint64_t n = rng() % (2 * p.apps); n-- && s.cq.poll();)
				;
			ASSERT_FALSE(HasFailure());
			if (!busy)
				break;
			ASSERT_LT(steps, 100'000U) << "somebody starves";
		}
		for (auto &a : s.all) {
			a->world.chance_page_out = 0;
			a->check_memory();
			EXPECT_TRUE(a->world.holds.empty());
		}
		while (s.cq.poll())
			;
		EXPECT_EQ(s.cq.pool.used(), 0U) << "a credit is lost";
		EXPECT_EQ(s.cq.pool.free(), s.cq.pool.total());
	}
}

INSTANTIATE_TEST_SUITE_P(Pools, SharedCq,
	testing::Values(pool{"One", 1, 2, 16}, pool{"Two", 3, 2, 16}, pool{"Three", 3, 3, 16, true},
			pool{"Eight", 5, 8, 16}, pool{"EightRelaxed", 5, 8, 16, true}, pool{"Sixteen", 12, 16, 16},
			pool{"Forty", 6, 40, 16, true}, pool{"Small", 6, 40, 2}, pool{"Enough", 3, 200, 16, true}),
	[](const auto &p) { return std::string(p.param.name); });

/*
 * A queue pair that does nothing more cannot give back what nobody will hear of. One request of each would take all,
 * whether it is posted at once or, behind a WRITE, when its turn comes.
 */
TEST(SharedCqs, UnsignaledTailsLeaveCreditsForOthers)
{
	for (const bool waits : {false, true}) {
		SCOPED_TRACE(waits);
		shared s(60, 40);
		ASSERT_NO_FATAL_FAILURE(s.warm_up());
		for (std::size_t i = 0; i + 1 < s.all.size(); ++i) {
			app &a = *s.all[i];
			if (waits)
				a.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
			a.post(IBV_WR_SEND, 0, 0, 8, 0);
			s.run(a);
			ASSERT_EQ(a.poll(), waits ? 1U : 0U) << "queue pair " << i;
		}
		app &last = *s.all.back();
		for (unsigned n = 0; n < 16; ++n)
			last.post(IBV_WR_RDMA_READ, 0, 0, 8);
		s.run(last);
		EXPECT_EQ(last.poll(), 16U);
	}
}

TEST(SharedCqs, TailEndsWithWhatIsSignaled)
{
	shared s(1, 40);
	app &a = *s.all[0];
	ASSERT_NO_FATAL_FAILURE(s.warm_up());
	for (unsigned n = 0; n < 100; ++n) {
		a.post(IBV_WR_SEND, 0, 0, 8, 0);
		ASSERT_FALSE(a.world.queue.back().wr.send_flags & IBV_SEND_SIGNALED) << "for no need";
		a.post(IBV_WR_RDMA_READ, 0, 0, 8);
		s.run(a);
		ASSERT_EQ(a.poll(), 1U);
	}
}

TEST(SharedCqs, QueuePairThatIsNoMoreHasNoCredits)
{
	shared s(1, 24);
	app &a = *s.all[0];
	ASSERT_NO_FATAL_FAILURE(s.warm_up());
	for (unsigned n = 0; n < 7; ++n)
		a.post(IBV_WR_SEND, 0, 0, 8, 0);
	EXPECT_EQ(s.cq.pool.used(), 7U);
	a.eng.reset();
	EXPECT_EQ(s.cq.pool.used(), 0U);
	EXPECT_TRUE(s.cq.pool.tail_may_grow());
}

/* To drain it takes one more, though it has more than it leaves to others. */
TEST(SharedCqs, QueuePairEndsThoughThePeersOfOthersAreSilent)
{
	shared s(5, 24);
	app &a = *s.all[0];
	ASSERT_NO_FATAL_FAILURE(s.warm_up());
	for (unsigned n = 0; n < 3; ++n)
		a.post(IBV_WR_SEND, 0, 0, 8, 0);
	a.world.run_wire(); /* done, and nobody hears of it */
	for (std::size_t i = 1; i < s.all.size(); ++i)
		for (unsigned n = 0; n < 32; ++n)
			s.all[i]->post(IBV_WR_SEND, 0, 0, 8);
	EXPECT_GE(s.cq.pool.used(), 24U - 3);
	a.world.fail_qp();
	a.eng->end();
	a.world.step();
	s.cq.serve();
	s.run(a);
	EXPECT_FALSE(a.eng->waits_for_wire());
}

TEST(SharedCqs, QueuePairWhosePeerIsSilentLeavesCreditsToOthers)
{
	shared s(4, 40);
	ASSERT_NO_FATAL_FAILURE(s.warm_up());
	for (std::size_t i = 0; i < 3; ++i)
		for (unsigned n = 0; n < 32; ++n)
			s.all[i]->post(IBV_WR_SEND, 0, 0, 8);
	EXPECT_GE(s.all[0]->world.queue.size(), 10U);
	EXPECT_TRUE(s.cq.pool.line());
	app &other = *s.all[3];
	other.post(IBV_WR_RDMA_READ, 0, 0, 8);
	EXPECT_EQ(other.world.queue.size(), 1U) << "at once, whatever the others wait for";
	s.run(other);
	EXPECT_EQ(other.poll(), 1U);
}

TEST(SharedCqs, TurnsAreEqual)
{
	shared s(5, 12);
	ASSERT_NO_FATAL_FAILURE(s.warm_up());
	for (auto &a : s.all)
		for (unsigned n = 0; n < 32; ++n)
			a->post(IBV_WR_RDMA_READ, 0, 8 * n, 8);
	std::vector<std::size_t> done(s.all.size());
	for (bool more = true; more;) {
		more = false;
		for (std::size_t i = 0; i < s.all.size(); ++i) {
			sim &w = s.all[i]->world;
			if (!w.queue.empty()) {
				w.advance(0, ~0ULL, false);
				more |= w.complete_one();
			}
		}
		while (s.cq.poll())
			;
		for (std::size_t i = 0; i < s.all.size(); ++i)
			done[i] += s.all[i]->poll();
		const auto [least, most] = std::minmax_element(done.begin(), done.end());
		ASSERT_LE(*most - *least, 8U) << "of 32";
	}
	EXPECT_EQ(done, std::vector<std::size_t>(s.all.size(), 32));
}

/* Flushed one by one, unsignaled ones as well, and nothing is left behind. */
TEST(SharedCqs, QueuePairThatEndsInErrorGivesBackItsCredits)
{
	/* The last one that finds a credit is unsignaled, or signaled. */
	for (const unsigned shift : {0U, 1U}) {
		SCOPED_TRACE(shift);
		shared s(3, 24);
		ASSERT_NO_FATAL_FAILURE(s.warm_up());
		app &a = *s.all[0], &b = *s.all[1];
		a.expect_success = false;
		for (unsigned n = 0; n < 3; ++n)
			a.post(IBV_WR_SEND, 0, 0, 8, 0);
		a.world.run_wire(); /* done, and nobody hears of it */
		a.world.fail_send = IBV_WC_RNR_RETRY_EXC_ERR;
		for (unsigned n = 0; n < 20; ++n)
			a.post(IBV_WR_SEND, 0, 0, 8, (n + shift) % 4 ? IBV_SEND_SIGNALED : 0);
		for (unsigned n = 0; n < 20; ++n)
			b.post(IBV_WR_RDMA_READ, 0, 0, 8);
		EXPECT_TRUE(s.cq.pool.line());
		ASSERT_EQ(!(a.world.queue.back().wr.send_flags & IBV_SEND_SIGNALED), !shift);
		const auto posts = a.world.doorbells;
		s.run_all();
		EXPECT_EQ(a.world.doorbells, posts + !shift) << "what ends the queue is for a tail";
		EXPECT_TRUE(std::any_of(a.completions.begin(), a.completions.end(),
					[](const ibv_wc &w) { return w.status == IBV_WC_RNR_RETRY_EXC_ERR; }));
		EXPECT_EQ(b.completions.size(), 21U);
		EXPECT_FALSE(a.eng->waits_for_wire());
		EXPECT_FALSE(s.cq.pool.line());
		EXPECT_EQ(s.cq.pool.used(), 0U);
		EXPECT_TRUE(s.cq.pool.tail_may_grow());
	}
}

/* npr_cq::poll() takes many completions before it steps. */
TEST(SharedCqs, QueuePairThatWasFlushedAtOnceNeedsNothingToEndIt)
{
	shared s(1, 40);
	ASSERT_NO_FATAL_FAILURE(s.warm_up());
	app &a = *s.all[0];
	a.expect_success = false;
	a.world.fail_send = IBV_WC_RNR_RETRY_EXC_ERR;
	a.post(IBV_WR_SEND, 0, 0, 8);
	a.post(IBV_WR_SEND, 0, 0, 8, 0);
	a.world.run_wire();
	ASSERT_EQ(s.cq.cqes.size(), 2U);
	const auto posts = a.world.doorbells;
	for (; !s.cq.cqes.empty(); s.cq.cqes.pop_front())
		EXPECT_TRUE(a.eng->on_cqe(s.cq.cqes.front().second));
	a.world.step();
	EXPECT_EQ(a.world.doorbells, posts);
	EXPECT_EQ(s.cq.pool.used(), 0U);
	EXPECT_TRUE(s.cq.pool.tail_may_grow());
}

/* It was refused in the middle of a chain: what is left is unsignaled, and needs a credit to be drained. */
TEST(SharedCqs, QueuePairWhosePostFailsGivesBackItsCredits)
{
	shared s(2, 2);
	ASSERT_NO_FATAL_FAILURE(s.warm_up());
	app &a = *s.all[0], &b = *s.all[1];
	a.expect_success = false;
	a.world.refuse_post_after = 2; /* the words are fetched, the WRITE is posted */
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
	b.post(IBV_WR_RDMA_READ, 0, 0, 8);
	s.run_all();
	EXPECT_FALSE(a.eng->waits_for_wire());
	EXPECT_EQ(a.completions.size(), 2U);
	EXPECT_EQ(b.completions.size(), 2U);
	EXPECT_EQ(s.cq.pool.used(), 0U);
}

TEST(SharedCqs, SmallerCqHasRoomForWhatIsPostedAndGoesOn)
{
	shared s(2, 200);
	ASSERT_NO_FATAL_FAILURE(s.warm_up());
	for (auto &a : s.all)
		for (unsigned n = 0; n < 16; ++n)
			a->post(IBV_WR_RDMA_READ, 0, 0, 8);
	EXPECT_EQ(s.cq.pool.used(), 32U);
	s.cq.pool.resize(32 + s.cq.pool.largest());
	for (auto &a : s.all)
		for (unsigned n = 0; n < 16; ++n)
			a->post(IBV_WR_RDMA_READ, 0, 0, 8);
	s.run_all();
	for (auto &a : s.all)
		EXPECT_EQ(a->completions.size(), 33U);
	EXPECT_EQ(s.cq.pool.used(), 0U);
}

} // namespace
} // namespace npr::test
