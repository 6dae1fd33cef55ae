// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Leases of local memory. */
#include "world/local_leases.hpp"

#include "fake_kernel.hpp"
#include "sim.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <vector>

using namespace std::chrono_literals;
using npr::local_leases;
using npr::fake::held_offset;

namespace {

constexpr std::uint64_t page = 4096;
constexpr std::uint32_t mr = 5, program_lkey = 77;

class LocalLeases : public ::testing::Test {
protected:
	explicit LocalLeases(std::uint64_t bytes = 8U << 20) : bytes_(bytes)
	{
		memory_ = static_cast<char *>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
						   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
		EXPECT_NE(memory_, MAP_FAILED);
		madvise(memory_, bytes_, MADV_NOHUGEPAGE);
		be_region(address(0), bytes_);
		/* The thread comes by its clock only. */
		kernel_.silent = true;
	}
	~LocalLeases() override { munmap(memory_, bytes_); }

	void be_region(std::uint64_t base, std::uint64_t length) { hca_.regions[mr] = {base, length, 0, true}; }
	[[nodiscard]] std::uint64_t address(std::uint64_t offset) const
	{
		return reinterpret_cast<std::uintptr_t>(memory_) + offset;
	}
	void touch(std::uint64_t offset, std::uint64_t n)
	{
		for (std::uint64_t at = offset; at < offset + n; at += page)
			const_cast<volatile char *>(memory_)[at] = 1;
	}
	std::optional<local_leases::use> take(std::uint64_t offset, std::uint32_t n, bool write = false)
	{
		return leases_.take(mr, address(offset), n, write, local_leases::term::brief, 0);
	}
	/* Used once, maybe for the first time, and then again. */
	std::optional<local_leases::use> take_again(std::uint64_t offset, std::uint32_t n, bool write = false)
	{
		touch(offset / page * page, n + offset % page);
		if (const auto u = take(offset, n, write))
			return u;
		return take(offset, n, write);
	}

	std::uint64_t bytes_;
	char *memory_;
	npr::fake::hca hca_;
	npr::fake::fake_kernel kernel_{hca_};
	npr::lease_keeper keeper_;
	local_leases leases_{kernel_, keeper_};
};

/* Memory of malloc() does neither begin nor end at a page. */
TEST_F(LocalLeases, RegionNeedNotBeginAtAPage)
{
	be_region(address(16), 3 * page);
	ASSERT_TRUE(take_again(16, 100, true));
	EXPECT_EQ(kernel_.only_local().req.addr, address(16));

	/* The pages around are leased with it, the first one included. */
	const auto other = take_again(page + 8, static_cast<std::uint32_t>(2 * page), true);
	ASSERT_TRUE(other);
	EXPECT_EQ(other->addr, address(page + 8) + held_offset);
	EXPECT_EQ(kernel_.local_holds.rbegin()->second.req.addr, address(16));
	EXPECT_EQ(kernel_.local_holds.rbegin()->second.req.length, 3 * page);
	EXPECT_EQ(kernel_.local_leases_asked, 2U);
}

TEST_F(LocalLeases, SecondUseWithinAShortTimeIsLeased)
{
	touch(10 * page, page);
	EXPECT_FALSE(take(10 * page + 8, 100));
	EXPECT_EQ(kernel_.local_leases_asked, 0U);
	const auto first = take(10 * page + 8, 100);

	ASSERT_TRUE(first);
	EXPECT_TRUE(first->token & local_leases::is_lease);
	EXPECT_EQ(first->lkey, kernel_.only_local().lkey);
	EXPECT_EQ(first->addr, address(10 * page + 8) + held_offset);
	EXPECT_EQ(kernel_.only_local().req.addr, address(10 * page));
	EXPECT_EQ(kernel_.only_local().req.length, page);
	for (int i = 0; i < 1000; ++i) {
		const auto more = take(10 * page + 4, 4);
		ASSERT_TRUE(more);
		leases_.give(more->token);
	}
	leases_.give(first->token);
	EXPECT_EQ(kernel_.local_leases_asked, 1U);
	EXPECT_EQ(kernel_.queries, 1U);
}

/* What is leased of the whole address space is found by address, in one of its blocks. */
TEST_F(LocalLeases, WholeAddressSpaceIsLeasedInBlocks)
{
	be_region(0, ~0ULL);
	const std::uint64_t block = 1U << 30;
	const std::uint64_t boundary = (address(0) + block) / block * block;
	/* Where the kernel is asked nothing about: what is in memory is not looked for beyond what is used. */
	const auto take_at = [&](std::uint64_t addr, std::uint32_t n) {
		const auto once = [&] { return leases_.take(mr, addr, n, true, local_leases::term::lasting, 0); };
		const auto u = once();
		return u ? u : once();
	};

	const auto here = take_again(10 * page + 8, 100, true);
	ASSERT_TRUE(here);
	EXPECT_EQ(here->addr, address(10 * page + 8) + held_offset);
	const auto last = take_at(boundary - page, static_cast<std::uint32_t>(page));
	ASSERT_TRUE(last);
	EXPECT_FALSE(take_at(boundary - page, static_cast<std::uint32_t>(page) + 1)) << "in two blocks";
	const auto next = take_at(boundary, 1);
	ASSERT_TRUE(next);
	EXPECT_NE(next->lkey, last->lkey);
	EXPECT_FALSE(take_at(~0ULL - page, 1));
	EXPECT_EQ(kernel_.queries, 1U);
	EXPECT_EQ(kernel_.live_local(), 3U);
	for (const auto &u : {here, last, next})
		leases_.give(u->token);
	leases_.remove(mr);
	EXPECT_EQ(kernel_.live_local(), 0U);
}

/* A receive may be posted for ever: its lease keeps no other memory. */
TEST_F(LocalLeases, LastingUseLeasesItsOwnPages)
{
	const auto lasting = [&](std::uint64_t offset, std::uint32_t n) {
		return leases_.take(mr, address(offset), n, true, local_leases::term::lasting, 0);
	};

	touch(0, 16 * page);
	EXPECT_FALSE(lasting(4 * page + 8, page));
	const auto u = lasting(4 * page + 8, page);
	ASSERT_TRUE(u);
	EXPECT_EQ(kernel_.only_local().req.addr, address(4 * page));
	EXPECT_EQ(kernel_.only_local().req.length, 2 * page);
	/* And does not make a brief one's larger, which is another */
	const auto brief = take_again(4 * page, 8, true);
	ASSERT_TRUE(brief);
	EXPECT_EQ(kernel_.live_local(), 2U);

	/* Of several that begin in a page those share a lease that end in the same one */
	const auto same = lasting(4 * page + 64, page);
	ASSERT_TRUE(same);
	EXPECT_EQ(same->lkey, u->lkey);
	EXPECT_EQ(kernel_.local_leases_asked, 2U);
	const auto small = lasting(4 * page + 64, 8);
	ASSERT_TRUE(small);
	EXPECT_NE(small->lkey, u->lkey);
	const auto large = lasting(4 * page, 3 * page);
	ASSERT_TRUE(large);
	EXPECT_NE(large->lkey, u->lkey);
	EXPECT_EQ(kernel_.live_local(), 4U);
	/* Whatever is posted still, the pages that only those need that are done go back */
	for (const auto &x : {u, brief, same, large})
		leases_.give(x->token);
	leases_.give_back_idle();
	EXPECT_EQ(kernel_.only_local().req.addr, address(4 * page));
	EXPECT_EQ(kernel_.only_local().req.length, page);
	leases_.give(small->token);
}

TEST_F(LocalLeases, SeldomUseIsNotLeased)
{
	touch(0, page);
	for (int i = 0; i < 3; ++i) {
		EXPECT_FALSE(take(0, 8));
		std::this_thread::sleep_for(std::chrono::nanoseconds(local_leases::warm) + 20ms);
	}
	EXPECT_EQ(kernel_.local_leases_asked, 0U);
}

/* I9: the word tells, before the thread has read the event. */
TEST_F(LocalLeases, NothingIsTakenAfterTheRecall)
{
	const auto u = take_again(0, 8);

	ASSERT_TRUE(u);
	kernel_.recall_local();
	kernel_.refuse_hold = -EBUSY;
	EXPECT_FALSE(take(0, 8));
	EXPECT_EQ(kernel_.live_local(), 1U);
	leases_.give(u->token);
	EXPECT_EQ(kernel_.live_local(), 0U);
}

TEST_F(LocalLeases, RecalledLeaseEndsWithItsLastUse)
{
	const auto a = take_again(0, 8), b = take(0, 8);

	ASSERT_TRUE(a && b);
	kernel_.recall_local();
	kernel_.refuse_hold = -EBUSY;
	EXPECT_FALSE(take(0, 8));
	leases_.give(a->token);
	EXPECT_EQ(kernel_.live_local(), 1U);
	leases_.give(b->token);
	EXPECT_EQ(kernel_.live_local(), 0U);
}

TEST_F(LocalLeases, RecalledOnesAreWantedWhileTheyAreUsed)
{
	EXPECT_FALSE(leases_.any_wanted());
	const auto u = take_again(0, 8);
	ASSERT_TRUE(u);
	EXPECT_FALSE(leases_.any_wanted());
	kernel_.recall_local();
	EXPECT_TRUE(leases_.any_wanted());
	const auto next = take_again(0, 8);
	ASSERT_TRUE(next);
	EXPECT_TRUE(leases_.is_wanted(u->token));
	EXPECT_FALSE(leases_.is_wanted(next->token));
	leases_.give(u->token);
	EXPECT_FALSE(leases_.any_wanted());
	leases_.give(next->token);
}

TEST_F(LocalLeases, NextLeaseDoesNotWaitForARecalledOne)
{
	const auto a = take_again(0, 8);

	ASSERT_TRUE(a);
	kernel_.recall_local();
	const auto b = take(0, 8);
	ASSERT_TRUE(b);
	EXPECT_NE(a->lkey, b->lkey);
	EXPECT_EQ(kernel_.live_local(), 2U);
	leases_.give(a->token);
	EXPECT_EQ(kernel_.only_local().lkey, b->lkey);
	leases_.give(b->token);
}

TEST_F(LocalLeases, IdleOnesGoBackByThemselves)
{
	const auto u = take_again(0, 8);

	ASSERT_TRUE(u);
	/* Not while it is used */
	std::this_thread::sleep_for(std::chrono::nanoseconds(4 * local_leases::warm));
	EXPECT_EQ(kernel_.live_local(), 1U);
	leases_.give(u->token);
	for (int i = 0; i < 200 && kernel_.live_local(); ++i)
		std::this_thread::sleep_for(10ms);
	EXPECT_EQ(kernel_.live_local(), 0U);
	/* And the thread, which sleeps now, looks after the next one, too. */
	const auto again = take_again(0, 8);
	ASSERT_TRUE(again);
	leases_.give(again->token);
	for (int i = 0; i < 200 && kernel_.live_local(); ++i)
		std::this_thread::sleep_for(10ms);
	EXPECT_EQ(kernel_.live_local(), 0U);
}

TEST_F(LocalLeases, WhatMayBeWrittenMayBeRead)
{
	const auto w = take_again(0, 8, true);

	ASSERT_TRUE(w);
	EXPECT_TRUE(kernel_.only_local().req.flags & RDMA_NP_FAULT_WRITE);
	const auto r = take(0, 8);
	ASSERT_TRUE(r);
	EXPECT_EQ(r->lkey, w->lkey);
	leases_.give(r->token);
	leases_.give(w->token);

	const auto source = take_again(4 << 20, 8);
	ASSERT_TRUE(source);
	kernel_.refuse_hold = -EFAULT;
	EXPECT_FALSE(take_again(4 << 20, 8, true));
	leases_.give(source->token);
}

/* Memory that nobody has touched stays so. */
TEST_F(LocalLeases, OnlyWhatIsInMemoryIsLeased)
{
	touch(3 * page, 5 * page);
	touch(9 * page, page);
	const auto u = take_again(4 * page + 10, 20);

	ASSERT_TRUE(u);
	EXPECT_EQ(kernel_.only_local().req.addr, address(3 * page));
	EXPECT_EQ(kernel_.only_local().req.length, 5 * page);
	leases_.give(u->token);

	/* What it has not is leased with the rest, and the smaller one ends. */
	touch(8 * page, page);
	const auto more = take_again(8 * page, 8);
	ASSERT_TRUE(more);
	EXPECT_EQ(kernel_.only_local().req.addr, address(3 * page));
	EXPECT_EQ(kernel_.only_local().req.length, 7 * page);
	leases_.give(more->token);
}

/* Parts are those of huge pages: a hold of a part of one would cut its leaf. */
TEST_F(LocalLeases, BuffersMayReachIntoTheNextPart)
{
	const std::uint64_t begin = local_leases::part - address(0) % local_leases::part, end = begin + local_leases::part;

	touch(0, bytes_);
	const auto whole = take_again(begin + 5 * page, 8);
	ASSERT_TRUE(whole);
	EXPECT_EQ(kernel_.only_local().req.addr, address(begin));
	EXPECT_EQ(kernel_.only_local().req.length, local_leases::part);
	leases_.give(whole->token);
	const auto u = take_again(end - 100, 4096);
	ASSERT_TRUE(u);
	EXPECT_EQ(kernel_.only_local().req.addr, address(begin));
	EXPECT_EQ(kernel_.only_local().req.length, local_leases::part + local_leases::overlap);
	leases_.give(u->token);
	EXPECT_FALSE(take_again(end - 100, local_leases::overlap + 4096));
	/* The region's end is not a whole part. */
	const auto last = take_again(bytes_ - 100, 100);
	ASSERT_TRUE(last);
	leases_.give(last->token);
	EXPECT_FALSE(take(bytes_ - 100, 101));
	EXPECT_FALSE(take(bytes_, 1));
	EXPECT_FALSE(leases_.take(mr, address(0) - 1, 8, false, local_leases::term::brief, 0));
	EXPECT_FALSE(leases_.take(mr, ~0ULL - 3, 100, false, local_leases::term::brief, 0));
}

TEST_F(LocalLeases, RefusalIsNotRepeatedForEachRequest)
{
	kernel_.refuse_hold = -EBUSY;
	touch(0, page);
	for (int i = 0; i < 100; ++i)
		EXPECT_FALSE(take(0, 8));
	EXPECT_EQ(kernel_.local_leases_asked, 1U);
}

TEST_F(LocalLeases, KernelWithoutLeasesIsAskedOnce)
{
	kernel_.refuse_channel = -EINVAL;
	touch(0, page);
	for (int i = 0; i < 100; ++i)
		EXPECT_FALSE(take(0, 8));
	EXPECT_EQ(kernel_.local_leases_asked, 0U);
}

/* Descriptors were wanting, as the thread may be, or memory. */
TEST_F(LocalLeases, WhatWasWantingIsLookedForAgain)
{
#ifdef __SANITIZE_ADDRESS__
	GTEST_SKIP() << "UBSan looks at what is thrown through a pipe, for which there is no descriptor";
#endif
	rlimit before{};
	ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
	rlimit none = before;
	none.rlim_cur = 0;

	touch(0, page);
	ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
	EXPECT_FALSE(take(0, 8));
	const auto begun = std::chrono::steady_clock::now();
	while (std::chrono::steady_clock::now() - begun < 20ms)
		EXPECT_FALSE(take(0, 8));
	ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
	EXPECT_LE(kernel_.channels, 1U) << "not for each request";

	std::optional<local_leases::use> u;
	while (!(u = take(0, 8)) && std::chrono::steady_clock::now() - begun < 20s)
		std::this_thread::sleep_for(1ms);
	ASSERT_TRUE(u);
	leases_.give(u->token);
}

TEST_F(LocalLeases, RegionThatGoesGivesItsLeasesBack)
{
	const auto u = take_again(0, 8);

	ASSERT_TRUE(u);
	leases_.give(u->token);
	leases_.remove(mr);
	EXPECT_EQ(kernel_.live_local(), 0U);
	/* The next one with its number is another one. */
	be_region(address(1 << 20), 1 << 20);
	EXPECT_FALSE(take_again(0, 8));
	const auto other = take_again(1 << 20, 8);
	ASSERT_TRUE(other);
	leases_.give(other->token);
	EXPECT_EQ(kernel_.queries, 2U);
	/* An MR that is no region has none. */
	EXPECT_FALSE(leases_.take(mr + 1, address(0), 8, false, local_leases::term::brief, 0));
	EXPECT_FALSE(leases_.take(mr + 1, address(0), 8, false, local_leases::term::brief, 0));
}

TEST_F(LocalLeases, AllThatIsIdleGoesBackWhenAsked)
{
	const auto u = take_again(0, 8);

	ASSERT_TRUE(u);
	EXPECT_FALSE(leases_.give_back_idle());
	leases_.give(u->token);
	EXPECT_EQ(kernel_.live_local(), 0U);
	const auto again = take_again(0, 8);
	ASSERT_TRUE(again);
	leases_.give(again->token);
	EXPECT_TRUE(leases_.give_back_idle());
	EXPECT_EQ(kernel_.live_local(), 0U);
}

/* Threads use leases while all are recalled again and again: none ends in use, and none is taken that was recalled. */
class LocalTicket : public LocalLeases {
protected:
	LocalTicket()
	{
		touch(0, 2 * page);
		EXPECT_FALSE(take(0, 8));
		const auto u = leases_.take(mr, address(0), 2 * page, false, local_leases::term::brief, 0, &ticket_);
		EXPECT_TRUE(u);
		ticket_.name(program_lkey);
		EXPECT_EQ(u->token, ticket_.token());
		leases_.give(u->token);
	}
	[[nodiscard]] bool covers(std::uint64_t offset, std::uint64_t n, bool write = false, std::uint32_t lkey = program_lkey) const
	{
		return ticket_.covers({address(0) + offset, static_cast<std::uint32_t>(n), lkey}, write);
	}

	npr::local_ticket ticket_;
};

TEST(LocalTicketOfNothing, CoversNothing)
{
	EXPECT_FALSE(npr::local_ticket().covers({0, 0, 0}, false));
	EXPECT_FALSE(npr::local_ticket().covers({0, 1, 0}, false));
}

/* Whoever made it had counted itself in just before: that use is given back by its token, where it is seen to be the last one. */
TEST_F(LocalTicket, OfALeaseThatEndsIsOfNoUse)
{
	npr::local_lease l;
	npr::event_channel recalls(kernel_);
	npr::local_ticket t;

	l.life = 1U << npr::local_lease::state_bits | static_cast<unsigned>(npr::local_lease::state::ending);
	t.become(l, l.life, recalls, recalls.seen(), 0, address(0), page, 0, 5, 6, true);
	t.name(program_lkey);
	EXPECT_NE(t.token(), 6U);
	EXPECT_FALSE(t.covers({address(0), 1, program_lkey}, false));
}

TEST_F(LocalTicket, CoversWhatItsLeaseDoes)
{
	EXPECT_TRUE(covers(0, 2 * page));
	EXPECT_TRUE(covers(2 * page - 1, 1));
	EXPECT_FALSE(covers(0, 2 * page + 1));
	EXPECT_FALSE(covers(2 * page - 1, 2));
	EXPECT_FALSE(covers(2 * page, 1));
	EXPECT_FALSE(covers(~0ULL, 2)) << "begins before it";
	EXPECT_FALSE(covers(0, 8, true)) << "it is to be read only";
	EXPECT_FALSE(covers(0, 8, false, program_lkey + 1)) << "another region's";
	const ibv_sge w = ticket_.wire({address(8), 16, program_lkey});
	EXPECT_EQ(w.addr, address(8) + held_offset);
	EXPECT_EQ(w.length, 16U);
	EXPECT_EQ(w.lkey, kernel_.only_local().lkey);
}

TEST_F(LocalTicket, IsNotTakenAfterTheRecall)
{
	ASSERT_TRUE(ticket_.take());
	kernel_.recall_local();
	EXPECT_FALSE(ticket_.take()) << "nobody has read the recall";
	leases_.give(ticket_.token());
	/* All that there are: then the life says so. */
	kernel_.refuse_hold = -EBUSY;
	EXPECT_FALSE(take(0, 8));
	EXPECT_EQ(kernel_.live_local(), 1U);
	EXPECT_FALSE(ticket_.take());
	leases_.give(ticket_.token());
	EXPECT_EQ(kernel_.live_local(), 1U) << "one use is left";
	EXPECT_FALSE(ticket_.give());
	leases_.give(ticket_.token());
	EXPECT_EQ(kernel_.live_local(), 0U);
}

TEST_F(LocalTicket, IsNotTakenWhenItsPlaceIsAnotherLeases)
{
	EXPECT_TRUE(leases_.give_back_idle());
	const auto other = take_again(0, 8);
	ASSERT_TRUE(other);
	ASSERT_EQ(other->token, ticket_.token()) << "no test of this";
	EXPECT_FALSE(ticket_.take());
	leases_.give(ticket_.token());
	EXPECT_EQ(kernel_.live_local(), 1U);
	leases_.give(other->token);
	EXPECT_TRUE(leases_.give_back_idle());
	EXPECT_EQ(kernel_.live_local(), 0U);
}

/* The hot path counts itself in, sees the recall, and leaves it to the quick path to count itself out. */
TEST_F(LocalTicket, HotRequestThatSeesTheRecallKeepsNoUse)
{
	struct world_of_leases final : npr::test::sim {
		explicit world_of_leases(local_leases &l) : leases(l) {}
		int post(ibv_send_wr *, ibv_send_wr **) noexcept override { return 0; }
		bool is_local(std::uint32_t lkey) noexcept override { return lkey == program_lkey; }
		int hold_local(ibv_sge &sge, bool write, std::uint32_t &hold, npr::cpu_view &,
			       npr::local_ticket &ticket) noexcept override
		{
			const auto u = leases.take(mr, sge.addr, sge.length, write, local_leases::term::brief, 0, &ticket);

			if (!u)
				return no_hold;
			ticket.name(sge.lkey);
			hold = u->token;
			sge = {u->addr, sge.length, u->lkey};
			return 0;
		}
		void free_local(std::uint32_t hold) noexcept override { leases.give(hold); }

		local_leases &leases;
	} world(leases_);
	npr::credits pool(64);
	std::vector<std::uint64_t> words(npr::engine::min_words);
	npr::engine_config c = npr::test::small_config();
	c.pool = &pool;
	c.local = true;
	c.words = words;
	npr::engine e(c, world);
	ibv_sge s{address(0), 8, program_lkey};
	ibv_send_wr wr{};
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.opcode = IBV_WR_SEND;
	wr.send_flags = IBV_SEND_SIGNALED;
	const auto hot = [&] { return e.post_hot(wr, [] { return false; }) || e.post_other(wr); };

	ASSERT_TRUE(e.post_quick(wr));
	ASSERT_TRUE(hot());
	kernel_.recall_local();
	kernel_.refuse_hold = -EBUSY;
	EXPECT_FALSE(hot());
	EXPECT_TRUE(e.post_quick(wr));
	EXPECT_EQ(kernel_.live_local(), 1U) << "two requests are under way under it";
	e.abandon();
	EXPECT_EQ(kernel_.live_local(), 0U);
}

TEST_F(LocalTicket, EndsWithItsRegion)
{
	leases_.remove(mr);
	EXPECT_EQ(kernel_.live_local(), 0U);
	EXPECT_FALSE(ticket_.take());
	leases_.give(ticket_.token());
}

TEST_F(LocalTicket, UseKeepsTheLeaseFromAging)
{
	const auto until = std::chrono::steady_clock::now() + 5 * std::chrono::nanoseconds(local_leases::warm);

	while (std::chrono::steady_clock::now() < until) {
		ASSERT_TRUE(ticket_.take());
		ASSERT_TRUE(ticket_.give());
		std::this_thread::sleep_for(5ms);
	}
	EXPECT_EQ(kernel_.live_local(), 1U);
}

TEST_F(LocalLeases, ThreadsAndRecalls)
{
	constexpr std::size_t keys = 1 << 20;
	std::vector<std::atomic<int>> in_use(keys);
	std::atomic<std::uint32_t> recalled{0}; /* keys up to here were */
	std::atomic<bool> stop{false};
	std::atomic<std::uint64_t> taken{0}, by_ticket{0};
	std::vector<std::thread> threads;

	kernel_.on_free = [&](const npr::fake::fake_kernel::local_hold &l) { EXPECT_EQ(in_use[l.lkey % keys].load(), 0); };
	touch(0, bytes_);
	for (unsigned t = 0; t < 4; ++t)
		threads.emplace_back([&, t] {
			npr::local_ticket ticket;
			const auto use = [&](std::uint32_t lkey, std::uint32_t before) {
				EXPECT_GT(lkey, before);
				++in_use[lkey % keys];
				++taken;
				--in_use[lkey % keys];
			};

			ticket.name(program_lkey);
			for (std::uint64_t i = t; !stop; i += 7) {
				const ibv_sge s{address(i / 64 % 4 * local_leases::part), 64, program_lkey};
				const bool write = i & 8;
				std::uint32_t before = recalled;

				if (ticket.covers(s, write)) {
					const bool valid = ticket.take();

					if (valid) {
						++by_ticket;
						use(ticket.wire(s).lkey, before);
					}
					if (!valid || !ticket.give())
						leases_.give(ticket.token());
					before = recalled;
				}
				if (const auto u = leases_.take(mr, s.addr, s.length, write, local_leases::term::brief, t, &ticket)) {
					use(u->lkey, before);
					if (!ticket.give())
						leases_.give(u->token);
				}
			}
		});
	for (int i = 0; i < 300; ++i) {
		recalled = std::max(recalled.load(), kernel_.recall_local());
		std::this_thread::sleep_for(1ms);
	}
	stop = true;
	for (std::thread &t : threads)
		t.join();
	EXPECT_GT(taken, 0U);
	EXPECT_GT(by_ticket, 0U);
	/* What is idle goes back meanwhile. */
	const std::lock_guard lock(kernel_.mutex);
	kernel_.on_free = nullptr;
}

} // namespace
