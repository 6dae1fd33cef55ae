/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Leases of the peer's memory: who asks for them, what they change, and how they end. */
#include "sim.hpp"

#include <algorithm>
#include <cerrno>

namespace npr::test {
namespace {

constexpr unsigned signaled = IBV_SEND_SIGNALED;
constexpr nanoseconds ms = 1'000'000;

using ids = std::vector<std::uint64_t>;

engine_config lease_config()
{
	engine_config c = small_config();

	c.leases = true;
	return c;
}

struct RemoteLeases : ::testing::Test {
	explicit RemoteLeases(const engine_config &c = lease_config(), std::uint64_t pages = 16, std::uint64_t skew = 0)
	    : a(c)
	{
		add(pages, skew);
	}

	/* A region whose key is known, and whose pages are there. It begins @skew behind a part's begin. */
	sim_region &add(std::uint64_t pages, std::uint64_t skew = 0)
	{
		const auto n = static_cast<std::uint32_t>(a.world.regions.size());
		sim_region &q = a.world.add_region(skew + std::uint64_t{remote_leases::part} * (1 + std::uint64_t{n} * 16), pages * page_size,
						   0x100 + n);

		for (std::size_t i = 0; i < q.memory->size(); ++i)
			(*q.memory)[i] = static_cast<std::byte>(i * 13 + i / 4096);
		a.world.all_in(q, true);
		know(q);
		return q;
	}

	void know(sim_region &q)
	{
		a.eng->resolve_begins();
		a.eng->resolve_ended(q.rkey, 0, q.info, a.world.now());
		q.known = true;
	}

	void done(ibv_wr_opcode op, std::uint64_t offset = 0, std::uint64_t length = 64, std::size_t memory = 0)
	{
		a.post(op, memory, offset, length);
		a.world.settle();
		a.poll();
	}

	/* Twice the same, so that there is a lease: its hold. */
	std::uint64_t lease(ibv_wr_opcode op = IBV_WR_RDMA_READ, std::uint64_t offset = 0, std::size_t memory = 0)
	{
		const std::uint64_t before = stats().leases;

		a.world.clock += remote_leases::growth + 10 * ms; /* whatever was got there before */
		done(op, offset, 64, memory);
		done(op, offset, 64, memory);
		EXPECT_EQ(stats().leases, before + 1);
		EXPECT_FALSE(a.world.holds.empty());
		a.world.data_reads = a.world.word_reads = a.world.writes = 0;
		return a.world.holds.empty() ? 0 : a.world.holds.rbegin()->first;
	}

	/* Does a READ there go as on pinned memory? Else the bytes before the first unit go first. */
	bool is_leased(std::uint64_t offset = 8, std::uint64_t length = 200, std::size_t memory = 0)
	{
		EXPECT_TRUE(a.world.queue.empty());
		a.world.clock += 2000 * ms; /* it asks for nothing, nor is it a reason to ask */
		a.post(IBV_WR_RDMA_READ, memory, offset, length);
		const std::size_t n = a.world.queue.size();
		a.world.settle();
		a.poll();
		a.world.clock += 1000 * ms;
		return n == 1;
	}

	void recall(std::uint64_t hold)
	{
		a.world.recall(hold);
		a.world.deliver(a.world.events.size() - 1);
	}

	void age()
	{
		a.eng->age_leases();
		a.eng->step();
	}

	/* The last one of those that are told asks for a lease, if any does. */
	void asking(app &b, ibv_wr_opcode op, std::size_t memory, std::uint64_t offset, std::uint64_t length)
	{
		b.post(op, memory, offset, length);
		b.world.run_wire();
		EXPECT_GE(b.poll(), 1U) << "it waits for no lease";
	}

	[[nodiscard]] npr_stats stats() const { return a.eng->stats(); }
	[[nodiscard]] const std::vector<std::uint64_t> &released() const { return a.world.released; }
	sim_region &r() { return a.world.regions[0]; }

	app a;
};

/* --- who asks ------------------------------------------------------------ */

TEST_F(RemoteLeases, SecondRequestAsksAndTheFirstDoesNot)
{
	for (const auto &[op, rights] : {std::pair{IBV_WR_RDMA_READ, 0U}, std::pair{IBV_WR_RDMA_WRITE, unsigned{RDMA_NP_FAULT_WRITE}}}) {
		done(op, 100, 50);
		EXPECT_TRUE(a.world.faults.empty());
		a.post(op, 0, 200, 5000);
		EXPECT_TRUE(a.world.faults.empty()) << "nobody knows yet whether it has to be brought";
		a.world.run_wire();
		EXPECT_EQ(a.poll(), 1U) << "it waits for no lease";
		ASSERT_EQ(a.world.faults.size(), 1U);
		const sim::pending_fault f = a.world.faults[0];
		EXPECT_EQ(f.req.flags, RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE | rights);
		ASSERT_EQ(f.ranges.size(), 2U);
		EXPECT_EQ(f.ranges[0].addr, r().info.base + 200);
		EXPECT_EQ(f.ranges[0].length, 5000U);
		EXPECT_EQ(f.ranges[1].addr, r().info.base);
		EXPECT_EQ(f.ranges[1].length, r().info.length);
		a.post(op, 0, 200, 50);
		asking(a, op, 0, 200, 50);
		EXPECT_EQ(a.world.faults.size(), 1U) << "asked twice at once";
		a.world.settle();
		a.poll();
		EXPECT_EQ(a.world.holds.size(), 1U);
		recall(a.world.holds.begin()->first);
	}
}

/* What pages have come for one by one are leased when they are used again, and not while they come. */
TEST_F(RemoteLeases, RequestWhosePagesHadToComeAsksForNone)
{
	for (const ibv_wr_opcode op : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE}) {
		a.world.all_out(r());
		for (std::uint64_t p = 8; p--;) /* downwards: nothing is read ahead */
			done(op, p * page_size);
		EXPECT_EQ(a.world.lease_requests, 0U);
	}
	asking(a, IBV_WR_RDMA_WRITE, 0, 5 * page_size, 64);
	EXPECT_EQ(a.world.lease_requests, 1U) << "this one found its page";
	a.world.settle();
	EXPECT_EQ(stats().leases, 1U);
}

/* Nor does the FAULT of one whose data only looks as if it were absent count: each READ would have one for ever. */
TEST_F(RemoteLeases, RequestWhosePagesOnlyLookedAbsentAsks)
{
	for (std::size_t i = 0; i < r().memory->size(); ++i)
		(*r().memory)[i] = static_cast<std::byte>(r().info.signature >> 8 * (i % 8));
	done(IBV_WR_RDMA_READ, 0, page_size);
	EXPECT_EQ(a.world.fault_requests, 1U);
	EXPECT_EQ(a.world.lease_requests, 0U);
	done(IBV_WR_RDMA_READ, 0, page_size);
	EXPECT_EQ(a.world.lease_requests, 1U);
	const unsigned before = a.world.fault_requests;
	done(IBV_WR_RDMA_READ, 0, page_size);
	EXPECT_EQ(a.world.fault_requests, before);
}

TEST_F(RemoteLeases, LeaseThatCameMeanwhileIsNotAskedForAgain)
{
	done(IBV_WR_RDMA_READ);
	asking(a, IBV_WR_RDMA_READ, 0, 0, 64);
	ASSERT_EQ(a.world.lease_requests, 1U);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.world.run_control();
	ASSERT_EQ(stats().leases, 1U);
	a.world.clock += remote_leases::growth + 10 * ms;
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.lease_requests, 1U);
}

TEST_F(RemoteLeases, SecondRequestThatComesLateOrIsAnotherKindDoesNotAsk)
{
	done(IBV_WR_RDMA_READ);
	a.world.clock += 101 * ms;
	done(IBV_WR_RDMA_READ);
	done(IBV_WR_RDMA_WRITE);
	EXPECT_EQ(a.world.lease_requests, 0U);
	a.world.clock += 90 * ms;
	done(IBV_WR_RDMA_READ);
	EXPECT_EQ(a.world.lease_requests, 1U);
}

TEST_F(RemoteLeases, EngineThatIsNotToldToAsksForNone)
{
	for (const bool local_only : {false, true}) {
		engine_config c = small_config();
		c.leases = c.local_only = local_only;
		app b(c);
		sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.world.all_in(q, true);
		for (int i = 0; i < 3; ++i) {
			if (local_only)
				b.post(IBV_WR_SEND, 0, 0, 8);
			else
				b.post(IBV_WR_RDMA_READ, 0, 0, 8);
			b.world.settle();
			b.poll();
		}
		EXPECT_EQ(b.world.lease_requests, 0U);
	}
}

TEST_F(RemoteLeases, ReadOnlyRegionIsLeasedToBeRead)
{
	r().info.access = IBV_ACCESS_REMOTE_READ;
	a.world.replace_region(r()).info.write_key = 0;
	a.world.deliver(0);
	sim_region &q = a.world.regions.back();
	a.world.all_in(q, false);
	know(q);
	done(IBV_WR_RDMA_READ);
	asking(a, IBV_WR_RDMA_READ, 0, 0, 64);
	ASSERT_EQ(a.world.faults.size(), 1U);
	EXPECT_FALSE(a.world.faults[0].req.flags & RDMA_NP_FAULT_WRITE);
	a.world.settle();
	a.poll();
	EXPECT_TRUE(is_leased());
	a.expect_success = false;
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 64);
	a.world.settle();
	a.poll();
	EXPECT_EQ(a.completions.back().status, IBV_WC_REM_ACCESS_ERR);
	EXPECT_EQ(a.world.writes, 0U);
	EXPECT_EQ(a.world.lease_requests, 1U);
}

TEST_F(RemoteLeases, WhatMayNotBeReadIsNotReadUnderALeaseToWrite)
{
	r().info.access = IBV_ACCESS_REMOTE_WRITE;
	a.world.replace_region(r());
	a.world.deliver(0);
	a.world.all_in(a.world.regions.back(), true);
	know(a.world.regions.back());
	lease(IBV_WR_RDMA_WRITE);
	a.expect_success = false;
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.world.settle();
	a.poll();
	EXPECT_EQ(a.completions.back().status, IBV_WC_REM_ACCESS_ERR);
	EXPECT_EQ(a.world.data_reads, 0U);
}

TEST_F(RemoteLeases, RefusalIsRespectedForASecond)
{
	const auto refuse = [&](int how) {
		a.world.chance_no_lease = how == 0 ? 100 : 0;
		a.world.lease_error = how == 1 ? -EBUSY : 0;
		done(IBV_WR_RDMA_READ);
		asking(a, IBV_WR_RDMA_READ, 0, 0, 64);
		if (how == 2 && !a.world.faults.empty())
			a.world.serve_fault(0, RDMA_NP_NOMEM);
		a.world.settle();
		a.poll();
	};
	for (int how = 0; how < 3; ++how) {
		SCOPED_TRACE(how);
		const unsigned before = a.world.lease_requests;
		refuse(how);
		EXPECT_EQ(a.world.lease_requests, before + 1);
		for (int i = 0; i < 9; ++i) {
			a.world.clock += 99 * ms;
			done(IBV_WR_RDMA_READ);
		}
		EXPECT_EQ(a.world.lease_requests, before + 1);
		a.world.clock += 2000 * ms;
	}
	a.world.chance_no_lease = a.world.lease_error = 0;
	lease();
	EXPECT_TRUE(is_leased());
}

TEST_F(RemoteLeases, NoMoreThanFourAreAskedForAtOnce)
{
	engine_config c = lease_config();
	c.max_faults = 16;
	app b(c);
	for (std::uint32_t i = 0; i < 6; ++i) {
		sim_region &q = b.world.add_region(0x100000 + 0x100000 * i, 4 * page_size, 0x100 + i);
		b.world.all_in(q, true);
		b.eng->resolve_begins();
		b.eng->resolve_ended(q.rkey, 0, q.info, 1);
		for (int n = 0; n < 2; ++n) {
			b.post(IBV_WR_RDMA_READ, i, 0, 8);
			b.world.run_wire();
			b.poll();
		}
	}
	EXPECT_EQ(b.world.lease_requests, 4U);
	EXPECT_EQ(b.world.faults.size(), 4U);
	b.world.settle();
	asking(b, IBV_WR_RDMA_READ, 5, 0, 8);
	EXPECT_EQ(b.world.lease_requests, 5U);
	b.world.settle();
	b.poll();
}

/* Work requests go first. */
TEST_F(RemoteLeases, NoneIsAskedForWhereFaultsAreScarce)
{
	for (std::size_t i = 1; i <= 3; ++i) {
		add(4);
		a.post(IBV_WR_RDMA_READ, i, 0, 8);
		asking(a, IBV_WR_RDMA_READ, i, 0, 8);
	}
	add(4);
	a.post(IBV_WR_RDMA_READ, 4, 0, 8);
	asking(a, IBV_WR_RDMA_READ, 4, 0, 8);
	EXPECT_EQ(a.world.lease_requests, 3U) << "of 4, of which half and one are for others";
	a.world.settle();
	a.poll();
}

/* --- advice ---------------------------------------------------------------- */

TEST_F(RemoteLeases, AdvisedMemoryIsLeasedBeforeItsFirstRequest)
{
	const std::uint64_t base = r().info.base;

	ASSERT_EQ(a.eng->advise(r().rkey, base + 100, 5000, NPR_ADVISE_READ_OFTEN), 0);
	ASSERT_EQ(a.world.faults.size(), 1U);
	EXPECT_EQ(a.world.faults[0].req.flags, RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE);
	EXPECT_EQ(a.world.faults[0].ranges[0].addr, base + 100);
	ASSERT_EQ(a.eng->advise(r().rkey, base + 100, 5000, NPR_ADVISE_READ_OFTEN), 0);
	EXPECT_EQ(a.world.faults.size(), 1U) << "asked twice at once";
	a.world.settle();
	EXPECT_TRUE(is_leased());
	ASSERT_EQ(a.eng->advise(r().rkey, base, 64, NPR_ADVISE_READ_OFTEN), 0);
	EXPECT_TRUE(a.world.faults.empty()) << "it is leased";

	ASSERT_EQ(a.eng->advise(r().rkey, base, 64, NPR_ADVISE_WRITE_OFTEN), 0);
	ASSERT_EQ(a.world.faults.size(), 1U);
	EXPECT_EQ(a.world.faults[0].req.flags, RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE | RDMA_NP_FAULT_WRITE);
	a.world.settle();
	EXPECT_EQ(stats().leases, 2U);
}

TEST_F(RemoteLeases, AdviceIsForTheNextLeaseOnly)
{
	ASSERT_EQ(a.eng->advise(r().rkey, r().info.base, 64, NPR_ADVISE_READ_OFTEN), 0);
	a.world.settle();
	recall(a.world.holds.begin()->first);
	a.world.clock += 2000 * ms;
	done(IBV_WR_RDMA_READ);
	EXPECT_EQ(stats().leases, 1U);
}

TEST_F(RemoteLeases, MemoryThatIsSeldomUsedIsLeasedNoMore)
{
	add(16);
	const std::uint64_t hold = lease(), other = lease(IBV_WR_RDMA_READ, 0, 1);
	const std::uint64_t base = r().info.base;

	ASSERT_EQ(a.eng->advise(r().rkey, base + r().info.length - 1, 1, NPR_ADVISE_SELDOM), 0);
	EXPECT_EQ(released(), std::vector{hold}) << "of the whole region";
	EXPECT_FALSE(is_leased());
	EXPECT_TRUE(is_leased(8, 200, 1));
	sim_region &q = a.world.regions[1];
	ASSERT_EQ(a.eng->advise(q.rkey, q.info.base, 0, NPR_ADVISE_SELDOM), 0);
	EXPECT_TRUE(is_leased(8, 200, 1)) << "nothing of it";
	ASSERT_EQ(a.eng->advise(q.rkey, q.info.base, 1, NPR_ADVISE_SELDOM), 0);
	EXPECT_EQ(released(), (std::vector{hold, other}));
}

TEST_F(RemoteLeases, AdviceThatCannotBeIsRefused)
{
	const std::uint64_t base = r().info.base, length = r().info.length;

	EXPECT_EQ(a.eng->advise(0x999, base, 64, NPR_ADVISE_READ_OFTEN), -ENOENT);
	EXPECT_EQ(a.eng->advise(r().rkey, base - 1, 64, NPR_ADVISE_READ_OFTEN), -EFAULT);
	EXPECT_EQ(a.eng->advise(r().rkey, base, length + 1, NPR_ADVISE_SELDOM), -EFAULT);
	EXPECT_EQ(a.eng->advise(r().rkey, base, ~0ULL, NPR_ADVISE_READ_OFTEN), -EFAULT);
	EXPECT_EQ(a.eng->advise(r().rkey, base, 0, NPR_ADVISE_READ_OFTEN), 0);
	sim_region &q = add(4);
	q.info.region_id = 99;
	q.info.access = IBV_ACCESS_REMOTE_READ;
	q.info.write_key = 0;
	q.rkey = 0x777;
	know(q);
	EXPECT_EQ(a.eng->advise(q.rkey, q.info.base, 64, NPR_ADVISE_WRITE_OFTEN), -EACCES);
	EXPECT_TRUE(a.world.faults.empty());

	engine_config c = lease_config();
	c.leases = false;
	app b(c);
	sim_region &none = b.world.add_region(0x100000, 4 * page_size, 0x100);
	b.eng->resolve_begins();
	b.eng->resolve_ended(none.rkey, 0, none.info, 1);
	EXPECT_EQ(b.eng->advise(none.rkey, none.info.base, 64, NPR_ADVISE_READ_OFTEN), 0);
	EXPECT_TRUE(b.world.faults.empty());
}

TEST_F(RemoteLeases, AdviceIsForWhatTheRegionAllows)
{
	sim_region &q = add(4);
	const std::uint64_t base = q.info.base;

	const auto become = [&](std::uint64_t id, unsigned access) {
		q.info.region_id = id;
		q.info.access = access;
		q.rkey = static_cast<std::uint32_t>(0x700 + id);
		know(q);
	};
	become(90, IBV_ACCESS_REMOTE_WRITE);
	EXPECT_EQ(a.eng->advise(q.rkey, base, 64, NPR_ADVISE_READ_OFTEN), -EACCES);
	become(91, IBV_ACCESS_REMOTE_READ);
	EXPECT_EQ(a.eng->advise(q.rkey, base, 64, NPR_ADVISE_WRITE_OFTEN), -EACCES);
	EXPECT_TRUE(a.world.faults.empty());
	become(92, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
	EXPECT_EQ(a.eng->advise(q.rkey, base + 1, 64, NPR_ADVISE_WRITE_OFTEN), 0);
	ASSERT_EQ(a.world.faults.size(), 1U);
	EXPECT_EQ(a.world.faults[0].req.flags, RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE | RDMA_NP_FAULT_WRITE);
	EXPECT_EQ(a.world.faults[0].ranges[0].addr, base + 8);
	EXPECT_EQ(a.world.faults[0].ranges[0].length, 8U);
	a.world.faults.clear();
}

TEST_F(RemoteLeases, LeaseThatIsUnwantedWhenItComesGoesBack)
{
	ASSERT_EQ(a.eng->advise(r().rkey, r().info.base, 64, NPR_ADVISE_READ_OFTEN), 0);
	ASSERT_EQ(a.world.faults.size(), 1U);
	ASSERT_EQ(a.eng->advise(r().rkey, r().info.base, 64, NPR_ADVISE_SELDOM), 0);
	a.world.settle();
	EXPECT_EQ(stats().leases, 0U);
	EXPECT_EQ(released().size(), 1U);
	ASSERT_EQ(a.eng->advise(r().rkey, r().info.base, 64, NPR_ADVISE_READ_OFTEN), 0);
	a.world.settle();
	EXPECT_EQ(stats().leases, 1U) << "it is wanted again";
}

struct VeryLongRegion : RemoteLeases {
	/* Eight parts, of the first of which there are only some pages. */
	VeryLongRegion() : RemoteLeases(lease_config(), 4000, 48 * page_size) {}

	void read_once(unsigned part) { done(IBV_WR_RDMA_READ, std::uint64_t{part} * remote_leases::part); }
};

TEST_F(VeryLongRegion, WhatCannotBeAskedForAtOnceWaitsForItsFirstRequest)
{
	ASSERT_EQ(a.eng->advise(r().rkey, r().info.base, r().info.length, NPR_ADVISE_READ_OFTEN), 0);
	const unsigned at_once = a.world.lease_requests;
	EXPECT_EQ(at_once, 3U) << "others than leases are asked for, too";
	a.world.settle();
	a.world.clock += 2000 * ms;
	for (unsigned part = at_once; part < 7; ++part) {
		read_once(part);
		EXPECT_EQ(a.world.lease_requests, part + 1);
	}
	read_once(0);
	EXPECT_EQ(a.world.lease_requests, 7U);
}

TEST_F(VeryLongRegion, AdviceIsTakenBack)
{
	ASSERT_EQ(a.eng->advise(r().rkey, r().info.base, r().info.length, NPR_ADVISE_READ_OFTEN), 0);
	a.world.settle();
	const unsigned before = a.world.lease_requests;
	ASSERT_EQ(a.eng->advise(r().rkey, r().info.base, r().info.length, NPR_ADVISE_SELDOM), 0);
	EXPECT_EQ(released().size(), before);
	for (unsigned part = 0; part < 7; ++part) {
		a.world.clock += 2000 * ms;
		read_once(part);
	}
	EXPECT_EQ(a.world.lease_requests, before);
}

struct LongRegion : RemoteLeases {
	LongRegion() : RemoteLeases(lease_config(), 1212) {}

	std::vector<rdma_np_range> asked(std::uint64_t offset, std::uint64_t length)
	{
		done(IBV_WR_RDMA_READ, offset, length);
		asking(a, IBV_WR_RDMA_READ, 0, offset, length);
		EXPECT_EQ(a.world.faults.size(), 1U);
		const std::vector<rdma_np_range> ranges = a.world.faults.empty() ? std::vector<rdma_np_range>{}
										 : a.world.faults[0].ranges;
		a.world.settle();
		a.poll();
		return ranges;
	}

	/* As the owner says, whom another region's key tells it. */
	void limit(std::uint32_t pages, std::uint32_t ranges)
	{
		sim_region &q = a.world.replace_region(a.world.regions.back());
		a.world.deliver(0);
		q.info.max_pages = pages;
		q.info.max_ranges = ranges;
		a.world.all_in(q, true);
		know(q);
	}
};

TEST_F(LongRegion, LeaseIsOfTheRequestsPartAndOfWhatItNeedsOfTheNext)
{
	const std::uint64_t part = remote_leases::part, overlap = remote_leases::overlap;
	auto f = asked(part + 5000, 100);
	ASSERT_EQ(f.size(), 2U);
	EXPECT_EQ(f[1].addr, r().info.base + part);
	EXPECT_EQ(f[1].length, part) << "a hold of a part of a huge page would cut its leaf";
	EXPECT_TRUE(is_leased(2 * part - 8, 8)) << "ends in the part";
	EXPECT_FALSE(is_leased(2 * part - 8, 9)) << "ends behind it";

	/* A larger one, of no more pages than the owner takes */
	a.world.clock += remote_leases::growth + 10 * ms;
	f = asked(2 * part - 8, overlap);
	ASSERT_EQ(f.size(), 2U);
	EXPECT_EQ(f[1].addr + f[1].length, r().info.base + 2 * part + overlap);
	EXPECT_EQ(f[1].length, part);
	EXPECT_TRUE(is_leased(2 * part - 8, overlap)) << "begins in the part, ends in the overlap";
	EXPECT_FALSE(is_leased(2 * part - 8, overlap + 9)) << "ends behind it";
	EXPECT_TRUE(is_leased(2 * part + 8)) << "begins in the next part, where the lease used last is, too";
	EXPECT_FALSE(is_leased(part - 8)) << "begins before it";

	/* what no lease can be of, nobody asks for */
	const unsigned before = a.world.lease_requests;
	done(IBV_WR_RDMA_READ, 2 * part - 8, overlap + 9);
	done(IBV_WR_RDMA_READ, 2 * part - 8, overlap + 9);
	EXPECT_EQ(a.world.lease_requests, before);
	f = asked(2 * part + overlap + 100, 100);
	ASSERT_EQ(f.size(), 2U);
	EXPECT_EQ(f[1].addr, r().info.base + 2 * part);
	EXPECT_EQ(f[1].addr + f[1].length, r().info.base + r().info.length) << "the region ends there";
}

/* The sim counts the pages. */
TEST_F(LongRegion, NoMorePagesAreAskedForThanTheOwnerTakes)
{
	const std::uint64_t base = r().info.base;

	limit(200, 8);
	auto f = asked(10 * page_size, 50 * page_size);
	ASSERT_EQ(f.size(), 2U);
	EXPECT_EQ(f[1].addr, base + 10 * page_size);
	EXPECT_EQ(f[1].length, 200 * page_size);
	limit(200, 8);
	f = asked(511 * page_size, 50 * page_size);
	ASSERT_EQ(f.size(), 2U);
	EXPECT_EQ(f[1].addr + f[1].length, base + remote_leases::part + remote_leases::overlap);
	EXPECT_EQ(f[1].length, 200 * page_size);
	limit(200, 8);
	EXPECT_EQ(asked(0, 200 * page_size).size(), 1U) << "around it there is no room";
	limit(200, 1);
	EXPECT_EQ(asked(0, page_size).size(), 1U);
	limit(200, 8);
	const unsigned before = a.world.lease_requests;
	done(IBV_WR_RDMA_READ, 0, 201 * page_size);
	done(IBV_WR_RDMA_READ, 0, 201 * page_size);
	EXPECT_EQ(a.world.lease_requests, before);
}

/* --- what a lease changes ------------------------------------------------ */

TEST_F(RemoteLeases, RequestsArePostedOnceAsTheyAre)
{
	/* quickly, and with buffers that are to be held */
	for (const unsigned local : {0U, 100U}) {
		lease(IBV_WR_RDMA_WRITE);
		const std::uint64_t slow = stats().slow;
		a.chance_local = local;
		for (const ibv_wr_opcode op : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_ATOMIC_FETCH_AND_ADD,
					       IBV_WR_ATOMIC_CMP_AND_SWP}) {
			SCOPED_TRACE(op);
			const std::uint64_t length = is_atomic(op) ? 8 : 3 * page_size;
			a.post(op, 0, 1000, length, signaled, is_atomic(op) ? 1 : 4);
			ASSERT_EQ(a.world.queue.size(), 1U);
			const ibv_send_wr &w = a.world.queue[0].wr;
			EXPECT_EQ(w.opcode, op);
			/* In the window of the lease, and with its key. */
			EXPECT_EQ(w.wr.rdma.remote_addr, 1000 + r().info.write_addr);
			EXPECT_EQ(is_atomic(op) ? w.wr.atomic.rkey : w.wr.rdma.rkey, a.world.holds.rbegin()->second.key);
			a.world.run_wire();
			EXPECT_EQ(a.poll(), 1U);
			EXPECT_EQ(a.completions.back().status, IBV_WC_SUCCESS);
		}
		EXPECT_EQ(stats().slow, slow);
		EXPECT_EQ(a.world.word_reads, 0U);
		EXPECT_EQ(a.world.data_reads, 1U);
		EXPECT_EQ(a.world.hold_requests, 0U);
		recall(a.world.holds.rbegin()->first);
		a.chance_local = 0;
	}
	EXPECT_EQ(stats().atomics, 4U);
	EXPECT_EQ(stats().passed, 0U);
	a.check_memory();
}

TEST_F(RemoteLeases, AtomicOfNoWholeWordIsRefused)
{
	lease(IBV_WR_RDMA_WRITE);
	a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 8, 8);
	a.world.settle();
	ASSERT_EQ(a.poll(), 1U);
	a.expect_success = false;
	a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 4, 8);
	a.world.settle();
	ASSERT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.completions.back().status, IBV_WC_REM_INV_REQ_ERR);
}

/* It was recalled while requests were under way, whose completions go the quick way. */
TEST_F(RemoteLeases, QuickCompletionGivesBackALeaseThatEnds)
{
	for (const unsigned n : {1U, 3U}) {
		lease(IBV_WR_RDMA_READ);
		a.world.quick = true;
		const std::uint64_t ends = a.world.quick_ends, hot = a.world.hot_posts;
		for (unsigned i = 0; i < n; ++i)
			a.post(IBV_WR_RDMA_READ, 0, 0, 100);
		EXPECT_EQ(a.world.hot_posts, hot + n - 1);
		const std::uint64_t hold = a.world.holds.rbegin()->first;
		recall(hold);
		while (a.world.queue.size()) {
			EXPECT_EQ(a.world.holds.count(hold), 1U) << "something is under way under it";
			a.world.run_wire_first();
		}
		EXPECT_EQ(a.world.quick_ends, ends + n);
		EXPECT_EQ(a.world.holds.count(hold), 0U);
		EXPECT_EQ(a.poll(), n);
		a.world.quick = false;
	}
	a.check_memory();
}

TEST_F(RemoteLeases, HotRequestsAreCountedAndKeepTheirLease)
{
	lease(IBV_WR_RDMA_WRITE);
	const npr_stats before = stats();
	a.world.quick = true;
	for (int i = 0; i < 3; ++i) {
		for (const ibv_wr_opcode op : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD})
			a.post(op, 0, 4096 * op, is_atomic(op) ? 8 : 100);
		EXPECT_EQ(a.world.hot_posts, 2U * static_cast<unsigned>(i + 1));
		a.world.run_wire();
		EXPECT_EQ(a.poll(), 3U);
		age();
	}
	EXPECT_EQ(a.world.hot_ends, 3U) << "each last one";
	EXPECT_TRUE(released().empty());
	EXPECT_EQ(stats().writes, before.writes + 3);
	EXPECT_EQ(stats().reads, before.reads + 3);
	EXPECT_EQ(stats().atomics, before.atomics + 3);
	EXPECT_EQ(stats().bytes_written, before.bytes_written + 300);
	EXPECT_EQ(stats().bytes_read, before.bytes_read + 300);
	EXPECT_EQ(stats().passed, before.passed);
	a.check_memory();
	age();
	EXPECT_EQ(released().size(), 1U) << "now it is idle";
}

TEST_F(RemoteLeases, WhatIsNotUnderTheHotLeaseIsNotHot)
{
	add(16);
	std::byte buffer[64];
	ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer), 64, pinned_lkey};
	const auto hot = [&](ibv_wr_opcode op, std::uint64_t addr, std::uint32_t length = 64, std::uint32_t rkey = 0x100) {
		ibv_send_wr wr{};
		s.length = length;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = op;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.wr.rdma.remote_addr = addr;
		if (is_atomic(op))
			wr.wr.atomic.rkey = rkey;
		else
			wr.wr.rdma.rkey = rkey;
		return a.eng->post_hot(wr, [] { return false; }) || a.eng->post_other(wr);
	};
	const std::uint64_t base = r().info.base, end = base + r().info.length;

	a.world.quick = true;
	EXPECT_FALSE(hot(IBV_WR_RDMA_READ, base)) << "it is closed";
	for (const ibv_wr_opcode kind : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE}) {
		const std::uint64_t id = lease(kind), before = a.world.hot_posts;
		a.post(kind, 0, 0, 64);
		/* Beside one that has opened it, and beside one like it that was hot itself. */
		bool alike = false;
		unsigned hots = 0;
		const auto beside = [&] {
			if (!alike)
				return;
			for (int i = 0; i < 2; ++i)
				a.post(kind, 0, 0, 64);
			hots += 2;
			/* No app::poll(), which would close it. */
			a.world.run_wire();
		};
		const auto not_hot = [&](auto... args) {
			beside();
			EXPECT_FALSE(hot(args...));
		};
		for (const bool after : {false, true}) {
			alike = after;
			not_hot(kind, base, 64U, r().rkey + 1);
			not_hot(kind, base - 1);
			not_hot(kind, end - 63);
			not_hot(kind, end - 64, 65U);
			not_hot(kind, ~0ULL - 62);
			not_hot(kind, base, 0U);
			not_hot(IBV_WR_SEND, 0, (1U << 31) + 1); /* check() refuses it */
			not_hot(IBV_WR_RDMA_WRITE_WITH_IMM, base);
			not_hot(IBV_WR_BIND_MW, base);
			not_hot(static_cast<ibv_wr_opcode>(15), base);
			not_hot(IBV_WR_ATOMIC_FETCH_AND_ADD, base + 4, 8U);
			if (kind == IBV_WR_RDMA_READ) {
				not_hot(IBV_WR_RDMA_WRITE, base); /* it is to read */
				not_hot(IBV_WR_ATOMIC_FETCH_AND_ADD, base, 8U);
			}
		}
		beside();
		EXPECT_EQ(a.pool.used(), 0U) << "nothing has changed";
		EXPECT_EQ(a.world.hot_posts, before + hots) << "it was open all the time";
		for (int i = 0; i < 2; ++i)
			a.post(kind, 0, 4096, 64);
		EXPECT_EQ(a.world.hot_posts, before + hots + 2);
		recall(id);
		EXPECT_FALSE(hot(kind, base)) << "its lease has been recalled (I9)";
		a.world.run_wire();
		EXPECT_EQ(a.poll(), 1 + hots + 2);
		const std::uint64_t posts = a.world.hot_posts;
		for (int i = 0; i < 2; ++i)
			a.post(IBV_WR_SEND, 0, 0, 64);
		EXPECT_EQ(a.world.hot_posts, posts + 1);
		/* What waits for a receive has to be over first, or that would be the reason. */
		const std::uint64_t ends = a.world.hot_ends;
		a.world.run_wire();
		EXPECT_EQ(a.world.hot_ends, ends + 2) << "they leave it open";
		EXPECT_FALSE(hot(kind, base)) << "also if others open the hot path again (I9)";
		EXPECT_EQ(a.poll(), 2U);
	}
	/* It could not give back the lease before the peer posts a receive. */
	lease(IBV_WR_RDMA_READ);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.post(IBV_WR_SEND, 0, 0, 64);
	EXPECT_FALSE(hot(IBV_WR_RDMA_READ, base));
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 2U);
}

TEST_F(RemoteLeases, WritesAndWhatHappensOnceArePipelined)
{
	lease(IBV_WR_RDMA_WRITE);
	for (int i = 0; i < 3; ++i) {
		a.post(IBV_WR_RDMA_WRITE, 0, 0, 100);
		a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 1000, 8);
	}
	/* What waits for a receive may follow. */
	a.post(IBV_WR_SEND, 0, 0, 0);
	EXPECT_EQ(a.world.queue.size(), 7U);
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 7U);
	a.check_memory();
}

TEST_F(RemoteLeases, UnsignaledRequestsStayUnsignaled)
{
	for (const unsigned local : {0U, 100U, 0U}) {
		lease(IBV_WR_RDMA_WRITE);
		a.chance_local = local;
		for (const ibv_wr_opcode op : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_ATOMIC_FETCH_AND_ADD})
			a.post(op, 0, 2 * page_size * op, 8, 0);
		ASSERT_EQ(a.world.queue.size(), 3U);
		for (const sim::wire &w : a.world.queue)
			EXPECT_FALSE(w.wr.send_flags & IBV_SEND_SIGNALED);
		a.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
		a.world.run_wire();
		EXPECT_EQ(a.poll(), 1U);
		recall(a.world.holds.rbegin()->first);
		a.chance_local = 0;
		a.world.quick = local; /* and once hot */
	}
	EXPECT_EQ(a.world.hot_posts, 3U);
	a.check_memory();
}

TEST_F(RemoteLeases, QueueOfUnsignaledRequestsMoves)
{
	for (const bool quick : {false, true}) {
		lease(IBV_WR_RDMA_WRITE);
		a.world.quick = quick;
		for (int i = 0; i < 200; ++i) {
			a.post(IBV_WR_RDMA_WRITE, 0, 0, 8, 0);
			ASSERT_EQ(a.last_rc, 0) << i;
			a.world.run_wire();
		}
		EXPECT_EQ(a.poll(), 0U);
		recall(a.world.holds.rbegin()->first);
	}
	EXPECT_GE(a.world.hot_posts, 150U);
}

TEST_F(RemoteLeases, NothingOvertakesAWriteThatIsNotProven)
{
	add(16);
	for (const ibv_wr_opcode first : {IBV_WR_RDMA_WRITE, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
		for (const unsigned local : {0U, 100U}) {
			const std::uint64_t hold = lease(IBV_WR_RDMA_WRITE);
			done(IBV_WR_RDMA_WRITE, 0, 64, 1);
			a.world.clock += 1000 * ms; /* no lease of region 1 */
			a.post(first, 1, 0, 8);
			if (first != IBV_WR_RDMA_WRITE) {
				a.world.serve_fault(0);
				a.world.deliver(0);
			}
			ASSERT_EQ(a.world.queue.size(), 2U) << "with its words";
			a.chance_local = local;
			a.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
			a.post(IBV_WR_RDMA_READ, 0, 100, 8);
			EXPECT_EQ(a.world.queue.size(), 2U);
			a.world.run_wire();
			EXPECT_EQ(a.poll(), 3U);
			a.chance_local = 0;
			a.world.clock += 2000 * ms;
			recall(hold);
		}
	}
	a.check_memory();
}

TEST_F(RemoteLeases, FencedRequestWaitsForASuspiciousRead)
{
	lease(IBV_WR_RDMA_WRITE);
	add(16);
	a.world.all_out(a.world.regions[1]);
	a.post(IBV_WR_RDMA_READ, 1, 0, 8);
	a.world.run_wire();
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 8, signaled | IBV_SEND_FENCE);
	EXPECT_TRUE(a.world.queue.empty());
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
}

TEST_F(RemoteLeases, ImmediateWaitsForAReadThatIsToBeHeld)
{
	lease(IBV_WR_RDMA_WRITE);
	sim_region &q = add(16);
	a.post(IBV_WR_RDMA_READ, 1, 0, 8);
	while (!a.world.hold_requests) {
		while (!a.world.queue.empty()) {
			a.world.all_out(q);
			a.world.advance(0, ~0ULL, false);
			a.world.complete_one();
		}
		if (!a.world.hold_requests) {
			a.world.serve_fault(0);
			a.world.deliver(0);
		}
	}
	a.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 0, 8);
	EXPECT_TRUE(a.world.queue.empty()) << "it may wait for a receive, and the READ behind it";
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);

	/* and the other way round: a hold is not asked for until the immediate is done */
	a.world.clock += 1000 * ms;
	a.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 0, 8);
	a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, 0, 8);
	EXPECT_TRUE(a.world.faults.empty());
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
}

struct RelaxedLeases : RemoteLeases {
	static engine_config config()
	{
		engine_config c = lease_config();
		c.relaxed = true;
		return c;
	}
	RelaxedLeases() : RemoteLeases(config()) {}
};

TEST_F(RelaxedLeases, ReadsAndWritesOvertakeAWriteThatIsNotProvenAndNothingElseDoes)
{
	lease(IBV_WR_RDMA_WRITE);
	add(16);
	done(IBV_WR_RDMA_WRITE, 0, 64, 1);
	a.world.clock += 1000 * ms;
	a.post(IBV_WR_RDMA_WRITE, 1, 0, 8);
	ASSERT_EQ(a.world.queue.size(), 2U);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
	a.post(IBV_WR_RDMA_READ, 0, 100, 8);
	EXPECT_EQ(a.world.queue.size(), 4U);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 8, signaled | IBV_SEND_FENCE);
	EXPECT_EQ(a.world.queue.size(), 4U) << "a fence";
	a.world.settle();
	EXPECT_EQ(a.poll(), 4U);
	a.post(IBV_WR_RDMA_WRITE, 1, 0, 8);
	a.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 0, 8);
	EXPECT_EQ(a.world.queue.size(), 2U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
	a.post(IBV_WR_RDMA_WRITE, 1, 0, 8);
	a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 0, 8);
	EXPECT_EQ(a.world.queue.size(), 2U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
}

TEST_F(RemoteLeases, WhatIsNotInsideOfTheLeaseGoesTheOtherWay)
{
	a.world.all_out(r());
	for (const std::uint64_t p : {3, 4, 6})
		a.world.page_in(r(), p, true);
	lease(IBV_WR_RDMA_READ, 3 * page_size + 100);
	EXPECT_TRUE(is_leased(3 * page_size + 8, 2 * page_size - 8)) << "all of it";
	EXPECT_FALSE(is_leased(3 * page_size + 8, 2 * page_size - 7)) << "a byte too many";
	EXPECT_FALSE(is_leased(3 * page_size - 8, 200)) << "begins before it";
	EXPECT_FALSE(is_leased(6 * page_size + 8, 200));
	/* and is a request for what a lease to read does not allow */
	done(IBV_WR_RDMA_WRITE, 3 * page_size);
	EXPECT_GT(a.world.word_reads, 0U);
	const unsigned words = a.world.word_reads;
	done(IBV_WR_RDMA_WRITE, 3 * page_size);
	EXPECT_GT(a.world.word_reads, words);
	EXPECT_EQ(stats().leases, 2U) << "so it has got one";
	a.world.clock += 1000 * ms;
	a.post(IBV_WR_RDMA_WRITE, 0, 3 * page_size, 64);
	EXPECT_EQ(a.world.queue.size(), 1U);
	a.world.settle();
	a.poll();
	a.check_memory();
}

TEST_F(RemoteLeases, RequestOutsideOfTheRegionOrMisalignedIsAnErrorAsBefore)
{
	lease(IBV_WR_RDMA_WRITE);
	a.expect_success = false;
	std::uint64_t buffer = 0;
	ibv_sge s{reinterpret_cast<std::uintptr_t>(&buffer), 8, pinned_lkey};
	ibv_send_wr wr{}, *bad;
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
	wr.wr.atomic.rkey = r().rkey;
	wr.wr.atomic.remote_addr = r().info.base + 4;
	ASSERT_EQ(a.eng->post_send(&wr, &bad), 0);
	a.world.settle();
	ibv_wc wc;
	ASSERT_TRUE(a.eng->poll(wc));
	EXPECT_EQ(wc.status, IBV_WC_REM_INV_REQ_ERR);
	EXPECT_EQ(a.world.writes, 0U);
}

/* --- how it ends --------------------------------------------------------- */

TEST_F(RemoteLeases, RecalledLeaseGoesBackWithItsLastRequest)
{
	const std::uint64_t hold = lease(IBV_WR_RDMA_WRITE);
	a.post(IBV_WR_RDMA_READ, 0, 8, 200);
	a.post(IBV_WR_RDMA_WRITE, 0, page_size, 200);
	ASSERT_EQ(a.world.queue.size(), 2U);
	recall(hold);
	EXPECT_TRUE(released().empty());
	a.post(IBV_WR_RDMA_READ, 0, 8, 200);
	EXPECT_EQ(a.world.queue.size(), 4U) << "it goes the optimistic way";
	a.world.advance(0, ~0ULL, false);
	a.world.complete_one();
	EXPECT_TRUE(released().empty());
	a.world.advance(0, ~0ULL, false);
	EXPECT_TRUE(released().empty());
	a.world.complete_one();
	EXPECT_EQ(released(), ids{hold});
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 3U);
	EXPECT_EQ(stats().recalls, 1U);
	a.check_memory();
}

TEST_F(RemoteLeases, IdleLeaseThatIsRecalledGoesBackAtOnceAndOnce)
{
	const std::uint64_t hold = lease();
	recall(hold);
	EXPECT_EQ(released(), ids{hold});
	EXPECT_FALSE(is_leased());
	rdma_np_event e{};
	e.type = RDMA_NP_EVENT_RECALL;
	e.hold_id = hold;
	a.eng->on_event(e);
	e.hold_id = 0;
	a.eng->on_event(e);
	a.eng->step();
	EXPECT_EQ(released().size(), 1U);
}

/* Of unsignaled requests at the end of the send queue the HCA says nothing by itself. */
TEST_F(RemoteLeases, RecalledLeaseOfUnsignaledRequestsGoesBack)
{
	ids all;

	for (const ibv_wr_opcode op : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
		SCOPED_TRACE(op);
		const std::uint64_t hold = lease(op);
		a.post(op, 0, 0, 8, 0);
		a.post(op, 0, 8, 8, 0);
		recall(hold);
		ASSERT_EQ(a.world.queue.size(), 3U);
		EXPECT_EQ(a.world.queue[2].wr.opcode, IBV_WR_RDMA_READ);
		EXPECT_EQ(a.world.queue[2].length, 0U);
		EXPECT_EQ(released(), all);
		a.world.run_wire();
		all.push_back(hold);
		EXPECT_EQ(released(), all);
		EXPECT_EQ(a.poll(), 0U);
		a.post(IBV_WR_RDMA_READ, 0, 0, 8);
		EXPECT_EQ(a.world.queue.size(), 1U) << "one is enough";
		a.world.run_wire();
		EXPECT_EQ(a.poll(), 1U);
	}
}

/* The peer's QP has to end as well, and what drains the send queue is no request that this could wait for. */
TEST_F(RemoteLeases, ErrorBehindADrainIsOneOfBothQueuePairs)
{
	const std::uint64_t hold = lease(IBV_WR_RDMA_WRITE);
	a.expect_success = false;
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 8, 0);
	recall(hold);
	ASSERT_EQ(a.world.queue.size(), 2U);
	std::uint64_t buffer = 0;
	ibv_sge s{reinterpret_cast<std::uintptr_t>(&buffer), 8, pinned_lkey};
	ibv_send_wr wr{}, *bad;
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.opcode = IBV_WR_RDMA_READ;
	wr.wr.rdma = {r().info.base + 16 * page_size, r().rkey};
	ASSERT_EQ(a.eng->post_send(&wr, &bad), 0);
	a.world.settle();
	EXPECT_TRUE(a.world.peer_error);
	EXPECT_EQ(a.world.refused, IBV_WC_REM_ACCESS_ERR);
	EXPECT_EQ(released(), ids{hold});
}

TEST_F(RemoteLeases, RecallThatOvertakesItsGrantWins)
{
	done(IBV_WR_RDMA_READ);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.world.run_wire();
	a.poll();
	ASSERT_EQ(a.world.faults.size(), 1U);
	a.world.serve_fault(0);
	const std::uint64_t hold = a.world.holds.begin()->first;
	recall(hold);
	EXPECT_TRUE(released().empty());
	a.world.deliver(0);
	EXPECT_EQ(released(), ids{hold});
	EXPECT_EQ(stats().leases, 0U);
	EXPECT_FALSE(is_leased());
}

/* There is room for a few; recalls are other queue pairs' too. */
TEST_F(RemoteLeases, MoreEarlyRecallsThanThereIsRoomForRecallAll)
{
	rdma_np_event e{};
	e.type = RDMA_NP_EVENT_RECALL;
	for (e.hold_id = 1000; e.hold_id < 1100; ++e.hold_id)
		a.eng->on_event(e); /* nobody asks for anything */
	std::uint64_t hold = lease();
	EXPECT_TRUE(is_leased());
	recall(hold);
	a.world.released.clear();

	done(IBV_WR_RDMA_READ);
	asking(a, IBV_WR_RDMA_READ, 0, 0, 64);
	ASSERT_EQ(a.world.faults.size(), 1U);
	a.world.serve_fault(0);
	hold = a.world.holds.begin()->first;
	for (e.hold_id = 1000; e.hold_id < 1008; ++e.hold_id)
		a.eng->on_event(e);
	recall(hold);
	a.world.deliver(0);
	EXPECT_EQ(released(), ids{hold});
	EXPECT_EQ(stats().leases, 1U);
	a.world.run_wire();
	a.poll();

	/* all that were asked for are answered: it begins anew */
	a.world.clock += 2000 * ms;
	lease();
	EXPECT_TRUE(is_leased());
}

TEST_F(RemoteLeases, LeaseOfADeadRegionGoesBackWithItsLastRequestAndTheKeysThen)
{
	const std::uint64_t hold = lease();
	a.post(IBV_WR_RDMA_READ, 0, 8, 200);
	a.world.advance(0, ~0ULL, false);
	a.world.kill_region(r());
	a.world.deliver(0);
	EXPECT_TRUE(released().empty());
	EXPECT_FALSE(r().forgotten);
	a.world.complete_one();
	EXPECT_EQ(released(), ids{hold});
	EXPECT_TRUE(r().forgotten);
	EXPECT_EQ(a.poll(), 1U);
}

TEST_F(RemoteLeases, IdleLeaseOfADeadRegionGoesBackAtOnce)
{
	const std::uint64_t hold = lease();
	add(16);
	const std::uint64_t other = lease(IBV_WR_RDMA_READ, 0, 1);
	a.world.kill_region(r());
	a.world.deliver(0);
	EXPECT_EQ(released(), ids{hold});
	EXPECT_TRUE(r().forgotten);
	EXPECT_TRUE(is_leased(8, 200, 1));
	EXPECT_TRUE(a.world.holds.contains(other));
}

TEST_F(RemoteLeases, GrantOfADeadRegionGoesBack)
{
	done(IBV_WR_RDMA_READ);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.world.run_wire();
	a.poll();
	a.world.serve_fault(0);
	const std::uint64_t hold = a.world.holds.begin()->first;
	a.world.kill_region(r());
	a.world.deliver(1);
	EXPECT_TRUE(r().forgotten);
	a.world.deliver(0);
	EXPECT_EQ(released(), ids{hold});
}

TEST_F(RemoteLeases, IdleLeaseGoesBackWhenItAges)
{
	const std::uint64_t hold = lease();
	age();
	for (int i = 0; i < 3; ++i) {
		EXPECT_TRUE(is_leased());
		age();
		EXPECT_TRUE(released().empty()) << "it is used";
	}
	age();
	EXPECT_EQ(released(), ids{hold});
	EXPECT_FALSE(is_leased());
	EXPECT_EQ(stats().recalls, 0U);
}

TEST_F(RemoteLeases, LeaseOfUnsignaledRequestsGoesBackWhenItAges)
{
	const std::uint64_t hold = lease(IBV_WR_RDMA_WRITE);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 8, 0);
	a.world.run_wire();
	age();
	EXPECT_TRUE(a.world.queue.empty());
	age();
	EXPECT_TRUE(released().empty());
	a.world.run_wire();
	EXPECT_EQ(released(), ids{hold});
}

/* It may wait for a receive for ever, and a lease under which it was posted could not go back. */
TEST_F(RemoteLeases, NothingIsPostedUnderOneBehindWhatWaitsForAReceive)
{
	const std::uint64_t hold = lease(IBV_WR_RDMA_WRITE);
	const std::uint32_t key = a.world.holds.at(hold).key;
	for (const ibv_wr_opcode op : {IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM}) {
		SCOPED_TRACE(op);
		a.post(op, 0, 0, 8);
		a.post(IBV_WR_RDMA_WRITE, 0, 64, 8);
		a.post(IBV_WR_RDMA_READ, 0, 128, 8);
		for (const auto &w : a.world.queue)
			EXPECT_NE(w.wr.wr.rdma.rkey, key);
		a.world.settle();
		EXPECT_EQ(a.poll(), 3U);
	}
	EXPECT_TRUE(is_leased());
}

/* Pages that come in one by one are not asked for one by one. */
TEST_F(RemoteLeases, LeaseGrowsNowAndThen)
{
	a.world.all_out(r());
	lease(IBV_WR_RDMA_READ, 0);
	const unsigned asked = a.world.lease_requests;
	for (std::uint64_t p = 1; p < 8; ++p)
		done(IBV_WR_RDMA_READ, p * page_size);
	EXPECT_EQ(a.world.lease_requests, asked);
	a.world.clock += remote_leases::growth + 10 * ms;
	done(IBV_WR_RDMA_READ, 5 * page_size);
	EXPECT_EQ(a.world.lease_requests, asked + 1);
	EXPECT_TRUE(is_leased(page_size + 8));
	EXPECT_TRUE(is_leased(7 * page_size + 8));
}

TEST_F(RemoteLeases, LeaseLongestWithoutUseMakesRoom)
{
	/* Each is of one page, in one part. */
	std::vector<std::uint64_t> holds;
	a.world.all_out(r());
	for (std::uint64_t p = 4; p--;) /* downwards: nothing is read ahead */
		holds.push_back(lease(IBV_WR_RDMA_READ, 2 * p * page_size));
	EXPECT_TRUE(is_leased(6 * page_size + 8));
	a.post(IBV_WR_RDMA_READ, 0, 4 * page_size, 64);
	ASSERT_EQ(a.world.queue.size(), 1U);
	a.world.clock += remote_leases::growth + 10 * ms;
	/* The second one is under way, and of the others the third was idle for the longest time. */
	EXPECT_EQ(a.eng->advise(r().rkey, r().info.base + 8 * page_size, 64, NPR_ADVISE_READ_OFTEN), 0);
	a.world.run_control();
	EXPECT_EQ(released(), ids{holds[2]});
	EXPECT_EQ(stats().leases, 5U);
	a.world.settle();
	a.poll();
	EXPECT_TRUE(is_leased(8 * page_size + 8));
	EXPECT_FALSE(is_leased(2 * page_size + 8));
}

TEST_F(RemoteLeases, NoIdleLeaseMakesNoRoom)
{
	a.world.all_out(r());
	for (std::uint64_t p = 4; p--;)
		lease(IBV_WR_RDMA_READ, 2 * p * page_size);
	for (std::uint64_t p = 0; p < 4; ++p)
		a.post(IBV_WR_RDMA_READ, 0, 2 * p * page_size, 64);
	ASSERT_EQ(a.world.queue.size(), 4U);
	a.world.clock += remote_leases::growth + 10 * ms;
	EXPECT_EQ(a.eng->advise(r().rkey, r().info.base + 8 * page_size, 64, NPR_ADVISE_READ_OFTEN), 0);
	a.world.run_control();
	ASSERT_EQ(released().size(), 1U);
	EXPECT_EQ(stats().leases, 4U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 4U);
}

TEST(RemoteLeaseTable, HoldsNoMoreThan192)
{
	remote_leases t;
	std::uint64_t hold = 0;

	for (std::uint32_t region = 1; region <= 10; ++region)
		for (std::uint32_t part = 0; part < 200; ++part) {
			const remote_leases::range x{remote_leases::key_of(region, part), 0, 100, false};
			const std::uint32_t n = t.place(x.key);
			ASSERT_LT(n, remote_leases::most);
			if (t.hold(n)) {
				ASSERT_TRUE(t.withdraw(n));
				t.erase(n);
			}
			t.insert(n, x, ++hold, region, 0);
			ASSERT_EQ(t.find(x), n);
		}
	std::uint32_t live = 0;
	t.for_each_live([&](std::uint32_t) { ++live; });
	EXPECT_EQ(live, remote_leases::most) << "all of it is used";
	EXPECT_LE(sizeof(t), 24U << 10);
}

/* --- errors -------------------------------------------------------------- */

TEST_F(RemoteLeases, LeasesOfAQueuePairThatEndsGoBack)
{
	const std::uint64_t idle = lease();
	add(16);
	const std::uint64_t busy = lease(IBV_WR_RDMA_WRITE, 0, 1);
	a.expect_success = false;
	a.post(IBV_WR_RDMA_WRITE, 1, 0, 8);
	a.post(IBV_WR_RDMA_WRITE, 1, 8, 8, 0);
	a.world.queue[0].status = IBV_WC_REM_ACCESS_ERR;
	a.world.advance(0, ~0ULL, false);
	a.world.queue[0].status = IBV_WC_REM_ACCESS_ERR;
	a.world.qp_error = true;
	a.world.complete_one();
	EXPECT_EQ(released(), ids{idle});
	a.world.run_wire();
	a.world.settle();
	EXPECT_EQ(released(), (ids{idle, busy}));
	EXPECT_EQ(a.poll(), 2U);
	ASSERT_GE(a.completions.size(), 2U);
	EXPECT_EQ(a.completions[a.completions.size() - 2].status, IBV_WC_REM_ACCESS_ERR) << "the HCA's";
	EXPECT_EQ(a.completions.back().status, IBV_WC_WR_FLUSH_ERR);
	const unsigned asked = a.world.lease_requests;
	done(IBV_WR_RDMA_READ);
	done(IBV_WR_RDMA_READ);
	EXPECT_EQ(a.world.lease_requests, asked);
	EXPECT_TRUE(a.eng->idle());
}

TEST_F(RemoteLeases, GrantForAQueuePairThatHasEndedGoesBack)
{
	done(IBV_WR_RDMA_READ);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.world.run_wire();
	a.poll();
	a.world.serve_fault(0);
	const std::uint64_t hold = a.world.holds.begin()->first;
	a.eng->end();
	a.world.deliver(0);
	EXPECT_EQ(released(), ids{hold});
}

TEST_F(RemoteLeases, RequestsThatTheProviderRefusesAreNotUnderWay)
{
	for (const unsigned local : {0U, 100U}) {
		app b(lease_config());
		b.world.all_in(b.world.add_region(0x100000, 16 * page_size, 0x100), true);
		for (int i = 0; i < 4; ++i) {
			b.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
			b.world.settle();
			b.poll();
		}
		ASSERT_EQ(b.eng->stats().leases, 1U);
		b.expect_success = false;
		b.chance_local = local;
		b.world.refuse_post_after = 1;
		b.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
		b.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
		b.world.settle();
		EXPECT_EQ(b.poll(), 2U);
		EXPECT_TRUE(b.eng->idle());
		EXPECT_TRUE(b.world.holds.empty());
	}
}

/* --- what a peer may say ------------------------------------------------- */

struct HostileGrant : RemoteLeases {
	HostileGrant() : RemoteLeases(lease_config(), 1400, 0x8000) {}

	/* The answer to what asks for a lease, as @change makes it. */
	rdma_np_event answer(const std::function<void(rdma_np_event &)> &change, std::uint64_t offset = 0)
	{
		done(IBV_WR_RDMA_READ, offset);
		a.post(IBV_WR_RDMA_READ, 0, offset, 64);
		a.world.run_wire();
		a.poll();
		EXPECT_EQ(a.world.faults.size(), 1U);
		a.world.serve_fault(0);
		change(a.world.events[0]);
		const rdma_np_event e = a.world.events[0];
		a.world.deliver(0);
		return e;
	}
};

TEST_F(HostileGrant, LeaseOfNothingThatCanBeIsGivenBack)
{
	const std::uint64_t base = r().info.base, end = base + r().info.length;
	const std::pair<std::uint64_t, std::uint64_t> ranges[] = {
		{base, 0},
		{base - page_size, page_size},
		{base + remote_leases::part + remote_leases::overlap - 0x8000, page_size}, /* no request of its part can be there */
		{end, page_size},
		{end, ~0ULL - end},
		{base + 100, ~0ULL - base}, /* ends where it began */
		{~0ULL, 1},
		{~0ULL, 2},
		{0, 1},
		{0, 0},
	};

	std::size_t n = 0;
	for (const auto &[addr, length] : ranges) {
		SCOPED_TRACE(testing::Message() << std::hex << addr << ' ' << length);
		const rdma_np_event e = answer([&](rdma_np_event &x) {
			x.lease_addr = addr;
			x.lease_length = length;
		});
		EXPECT_EQ(released().size(), ++n);
		EXPECT_EQ(released().back(), e.hold_id);
		EXPECT_FALSE(is_leased());
		a.world.clock += 2000 * ms;
	}
	EXPECT_EQ(stats().leases, 0U);
}

TEST_F(HostileGrant, LeaseOfMoreThanThereIsIsOfWhatThereIs)
{
	/* What reaches into the next part; the region begins 0x8000 behind its part's begin. */
	answer(
	    [](rdma_np_event &x) {
		    x.lease_addr = 0;
		    x.lease_length = ~0ULL;
	    },
	    remote_leases::part - 0x8000 - 32);
	EXPECT_EQ(stats().leases, 1U);
	EXPECT_TRUE(is_leased(remote_leases::part - 0x8000 - 8, remote_leases::overlap + 8));
	EXPECT_FALSE(is_leased(remote_leases::part - 0x8000 - 8, remote_leases::overlap + 9));
	a.expect_success = false;
	std::byte buffer[8];
	ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer), 8, pinned_lkey};
	ibv_send_wr wr{}, *bad;
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.opcode = IBV_WR_RDMA_READ;
	wr.send_flags = IBV_SEND_SIGNALED;
	wr.wr.rdma.rkey = r().rkey;
	wr.wr.rdma.remote_addr = r().info.base + r().info.length - 7;
	ASSERT_EQ(a.eng->post_send(&wr, &bad), 0);
	a.world.settle();
	ibv_wc wc;
	ASSERT_TRUE(a.eng->poll(wc));
	EXPECT_EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
}

TEST_F(HostileGrant, LeaseOfSomeBytesIsOfThese)
{
	answer([&](rdma_np_event &x) {
		x.lease_addr = r().info.base + 100;
		x.lease_length = 1000;
	});
	EXPECT_TRUE(is_leased(100, 1000));
	EXPECT_FALSE(is_leased(99, 1000));
	EXPECT_FALSE(is_leased(101, 1000));
}

TEST_F(HostileGrant, HoldWithABadStatusGoesBack)
{
	const rdma_np_event e = answer([](rdma_np_event &x) { x.status = RDMA_NP_NOMEM; });
	EXPECT_EQ(released(), ids{e.hold_id});
	EXPECT_EQ(stats().leases, 0U);
}

TEST_F(HostileGrant, AnswerThatComesTwiceOrThatNobodyWaitsForChangesNothing)
{
	rdma_np_event e = answer([](rdma_np_event &x) {
		x.lease_addr = 0;
		x.lease_length = ~0ULL;
	});
	EXPECT_EQ(stats().leases, 1U);
	add(4);
	/* Something is under way, or no answer would be looked at. */
	a.world.all_out(a.world.regions[1]);
	for (int i = 0; i < 3; ++i)
		a.post(IBV_WR_RDMA_READ, 1, static_cast<std::uint64_t>(i) * page_size, 8);
	a.world.run_wire();
	ASSERT_GE(a.world.faults.size(), 3U);
	const std::uint64_t hold = std::exchange(e.hold_id, 5000);
	a.world.holds[5000] = {&r(), {}, true, false};
	a.eng->on_event(e);
	EXPECT_EQ(released(), ids{5000});
	e.hold_id = hold;
	a.eng->on_event(e);
	EXPECT_EQ(released().size(), 1U) << "it is in use";
	EXPECT_EQ(stats().leases, 1U);
}

} // namespace
} // namespace npr::test
