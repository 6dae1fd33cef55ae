// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Averaging between workers that all live; members_test.cpp has the others. */
#include "crew.hpp"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>

using namespace crew;

namespace
{

template <class T> class Synchroniser : public testing::Test
{
};
using types = testing::Types<float, double>;
TYPED_TEST_SUITE(Synchroniser, types);

template <class T> double rounding()
{
	return 400 * static_cast<double>(std::numeric_limits<T>::epsilon());
}

TYPED_TEST(Synchroniser, PromisedRoundsGiveTheMean)
{
	using T = TypeParam;
	for (const schedule &s :
	     {schedule::full(3), schedule::pairs(4), schedule::grid(3, 3), schedule::mixed_radix({2, 2, 2}),
	      schedule::unequal(5, 3), schedule::unequal(7, 3), schedule::random(6, 2, 1).with_full_every(3)})
		for (const std::size_t elements : {1U, 1000U, 10007U}) {
			SCOPED_TRACE(s.name());
			run<T>(s, elements, patient(), [&](worker<T> &w) {
				fill(w);
				for (std::uint32_t k = 0; k < s.exact_mean().rounds; ++k) {
					const report r = must(w.sync->synchronise());
					const grouping now = s.at(k);
					EXPECT_EQ(r.step, k + 1);
					EXPECT_EQ(r.group, now.of(w.rank).members.size());
					EXPECT_EQ(r.contributed, r.group);
					EXPECT_TRUE(r.complete);
				}
				expect_mean(w, s.workers(), rounding<T>());
			});
		}
}

/* Also where rounding is another one for each order of the sum. */
TYPED_TEST(Synchroniser, MembersOfAGroupHaveTheSameBits)
{
	using T = TypeParam;
	for (const wire format : {wire::exact, wire::int16, wire::int8}) {
		const schedule s = schedule::grid(3, 3);
		std::vector<std::vector<T>> after(9);
		settings how = patient();
		how.format = format;
		run<T>(s, 777, how, [&](worker<T> &w) {
			const auto x = w.sync->parameters();
			for (std::size_t i = 0; i < x.size(); ++i)
				x[i] = std::sin(static_cast<T>(i * 13 + w.rank * 7));
			for (int k = 0; k < 3; ++k)
				must(w.sync->synchronise());
			after[w.rank].assign(x.begin(), x.end());
		});
		for (const group &g : s.at(2).groups)
			for (const rank_t m : g.members)
				EXPECT_EQ(after[m], after[g.members[0]]) << m;
	}
}

TYPED_TEST(Synchroniser, AllReducesGiveTheMean)
{
	using T = TypeParam;
	using how = typename synchroniser<T>::algorithm;
	for (const std::uint32_t n : {1U, 2U, 3U, 4U, 6U, 8U})
		for (const std::size_t elements : {1U, 1000U})
			run<T>(schedule::full(n), elements, patient(), [&](worker<T> &w) {
				for (const how h :
				     {how::ring, how::halving_doubling, how::direct, how::ring}) {
					fill(w);
					must(w.sync->all_reduce(h));
					expect_mean(w, n, rounding<T>());
				}
			});
}

/* What has not been sent yet is carried, and together with that nothing is lost. */
TYPED_TEST(Synchroniser, QuantisedTheSumIsConserved)
{
	using T = TypeParam;
	for (const wire format : {wire::int16, wire::int8}) {
		const schedule s = schedule::grid(2, 2);
		constexpr std::size_t elements = 500;
		settings how = patient();
		how.format = format;
		std::vector<std::vector<T>> whole(4);
		run<T>(s, elements, how, [&](worker<T> &w) {
			fill(w);
			for (int k = 0; k < 20; ++k)
				must(w.sync->synchronise());
			const auto x = w.sync->parameters();
			whole[w.rank].assign(x.begin(), x.end());
			ASSERT_EQ(w.sync->carried().size(), elements);
			double most = 0;
			for (std::size_t i = 0; i < elements; ++i) {
				most = std::max(most, std::abs(static_cast<double>(w.sync->carried()[i])));
				whole[w.rank][i] += w.sync->carried()[i];
				EXPECT_NEAR(x[i], mean_of<T>(4, i),
					    50.0 * 4 / (format == wire::int8 ? 127 : 32767));
			}
			EXPECT_GT(most, 0);
		});
		for (std::size_t i = 0; i < elements; ++i)
			EXPECT_NEAR(whole[0][i] + whole[1][i] + whole[2][i] + whole[3][i],
				    4 * mean_of<T>(4, i), 20 * rounding<T>())
			    << i;
	}
}

TEST(Ranges, OnlyTheRangeIsExchanged)
{
	run<float>(schedule::full(3), 1000, patient(), [](worker<float> &w) {
		fill(w);
		EXPECT_TRUE(must(w.sync->synchronise(100, 333)).complete);
		const auto x = w.sync->parameters();
		for (std::size_t i = 0; i < 1000; ++i)
			EXPECT_NEAR(x[i],
				    i >= 100 && i < 433 ? mean_of<float>(3, i) : value_of<float>(w.rank, i),
				    1e-4)
			    << i;
		EXPECT_EQ(w.sync->synchronise(0, 0).code(), EINVAL);
		EXPECT_EQ(w.sync->synchronise(999, 2).code(), EINVAL);
		EXPECT_EQ(w.sync->synchronise(2, ~std::size_t{0}).code(), EINVAL);
		EXPECT_TRUE(w.sync->synchronise(999, 1));
	});
}

TEST(Ranges, PartsTakeTurnsAndKeepThePromise)
{
	settings how = patient();
	how.parts = 3;
	run<float>(schedule::pairs(4), 1000, how, [](worker<float> &w) {
		fill(w);
		must(w.sync->synchronise());
		unsigned changed = 0;
		for (std::size_t i = 0; i < 1000; ++i)
			changed += w.sync->parameters()[i] != value_of<float>(w.rank, i);
		EXPECT_GT(changed, 200U);
		EXPECT_LE(changed, 384U);
		for (int k = 1; k < 6; ++k)
			must(w.sync->synchronise());
		expect_mean(w, 4, 1e-4);
	});
}

TEST(Overlap, WhatIsChangedMeanwhileIsKept)
{
	run<double>(schedule::pairs(4), 2000, patient(), [](worker<double> &w) {
		fill(w);
		const auto x = w.sync->parameters();
		for (int k = 0; k < 2; ++k) {
			must(w.sync->start());
			EXPECT_EQ(w.sync->start().code(), EBUSY);
			EXPECT_EQ(w.sync->synchronise().code(), EBUSY);
			EXPECT_EQ(w.sync->all_reduce(synchroniser<double>::algorithm::ring).code(), EBUSY);
			for (double &v : x)
				v += 1 + w.rank;
			EXPECT_TRUE(must(w.sync->finish()).complete);
		}
		EXPECT_EQ(w.sync->finish().code(), EINVAL);
		/* What the first round's updates are apart the second one averages in its pairs; its own
		 * stay. */
		for (std::size_t i = 0; i < x.size(); ++i)
			ASSERT_NEAR(x[i], mean_of<double>(4, i) + 2.5 + 1 + w.rank, 1e-9) << i;
	});
}

TEST(Wires, NotFiniteIsRefusedBeforeItIsSent)
{
	settings how = patient();
	how.format = wire::int8;
	run<float>(schedule::full(2), 1000, how, [](worker<float> &w) {
		fill(w);
		if (w.rank == 1) {
			/* In the other one's share. */
			w.sync->parameters()[3] = std::numeric_limits<float>::quiet_NaN();
			EXPECT_EQ(w.sync->synchronise().code(), EDOM);
			return; /* and the other one sees that it is gone */
		}
		const report r = must(w.sync->synchronise());
		/* Where this one begins late, the other one has gone before. */
		EXPECT_TRUE(!r.complete || r.group == 1);
		for (const float x : w.sync->parameters())
			EXPECT_TRUE(std::isfinite(x));
	});
}

TEST(Wires, BytesAreThoseOfReduceScatterAndAllGather)
{
	constexpr std::size_t elements = 64 * 160;
	for (const auto &[format, bytes] :
	     {std::pair{wire::exact, 4.0}, {wire::int16, 2 + 4.0 / 64}, {wire::int8, 1 + 4.0 / 64}}) {
		settings how = patient();
		how.format = format;
		run<float>(schedule::grid(4, 2), elements, how, [&](worker<float> &w) {
			for (const double g : {2, 4}) {
				const auto before = w.sync->stats().bytes_sent;
				must(w.sync->synchronise());
				const auto sent = static_cast<double>(w.sync->stats().bytes_sent - before);
				/* Notes beside it. */
				EXPECT_NEAR(sent, 2 * (g - 1) / g * elements * bytes + 2 * (g - 1) * 72,
					    2 * (g - 1) * 72);
			}
			/* Who ends is said to be gone, in notes. */
			w.sync->barrier(std::array<rank_t, 8>{0, 1, 2, 3, 4, 5, 6, 7});
		});
	}
}

TEST(Groups, AreMadeReadyOnce)
{
	run<float>(schedule::grid(2, 2), 100, patient(), [](worker<float> &w) {
		for (int k = 0; k < 20; ++k)
			must(w.sync->synchronise());
		EXPECT_EQ(w.sync->stats().groups, 2U);
		EXPECT_EQ(w.sync->stats().discarded, 0U);
		EXPECT_EQ(w.sync->next_step(), 21U);
	});
}

TEST(Groups, BarrierIsOfTheGroupOnly)
{
	std::atomic<int> arrived[2] = {};
	std::atomic<bool> first_done = false;
	run<float>(schedule::grid(2, 2), 100, patient(), [&](worker<float> &w) {
		const std::vector<std::vector<rank_t>> groups = {{0, 1}, {2, 3}};
		const unsigned mine = w.rank / 2;
		/* The second group comes only when the first one is through. relaxed: the barrier is what is
		 * tested */
		while (mine == 1 && !first_done.load(std::memory_order_acquire))
			std::this_thread::yield();
		for (int k = 1; k <= 10; ++k) {
			arrived[mine].fetch_add(1, std::memory_order_relaxed);
			w.sync->barrier(groups[mine]);
			EXPECT_GE(arrived[mine].load(std::memory_order_relaxed), 2 * k);
			w.sync->barrier(groups[mine]);
		}
		if (mine == 0)
			first_done.store(true, std::memory_order_release);
	});
	EXPECT_EQ(arrived[0].load(), 20);
}

TEST(Agreement, WorkersThatDifferAreToldWhatDiffers)
{
	const auto refused = [](const schedule &a, std::size_t elements_a, settings how_a, const schedule &b,
				std::size_t elements_b, settings how_b) {
		const auto where = addresses(2);
		std::string said[2];
		std::thread threads[2];
		for (rank_t r = 0; r < 2; ++r)
			threads[r] = std::thread([&, r] {
				settings how = r ? how_b : how_a;
				how.founding = std::chrono::minutes(1);
				try {
					worker<float> w(r, where, r ? b : a, r ? elements_b : elements_a,
							how);
				} catch (const std::system_error &e) {
					said[r] = e.what();
				}
			});
		for (std::thread &t : threads)
			t.join();
		EXPECT_NE(said[1], "");
		return said[0];
	};
	const settings plain, eight{.format = wire::int8};
	const schedule two = schedule::full(2), other = schedule::local(2);
	EXPECT_NE(refused(two, 100, plain, two, 101, plain)
		      .find("another number of parameters, 101 there and 100 here"),
		  std::string::npos);
	EXPECT_NE(refused(two, 100, plain, other, 100, plain).find("another schedule"), std::string::npos);
	EXPECT_NE(refused(two, 100, plain, two, 100, eight).find("another wire format"), std::string::npos);
}

TEST(Agreement, BadArgumentsAreRefused)
{
	const auto where = addresses(2);
	const schedule two = schedule::full(2);
	EXPECT_THROW(worker<float>(0, {where[0]}, two, 10, {}), std::invalid_argument);
	EXPECT_THROW(worker<float>(0, where, two, 0, {}), std::invalid_argument);
	EXPECT_THROW(worker<float>(0, where, two, ~std::size_t{0} / 4, {}), std::invalid_argument);
	EXPECT_THROW(worker<float>(0, where, two, 10, {.parts = 0}), std::invalid_argument);
	EXPECT_THROW(worker<float>(0, where, two, 10, {.deadline = std::chrono::nanoseconds(0)}),
		     std::invalid_argument);
	EXPECT_THROW(worker<float>(0, where, two, 10, {.founding = std::chrono::milliseconds(20)}),
		     std::system_error);
}

} // namespace
