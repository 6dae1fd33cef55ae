/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What a request keeps of this process's memory while it waits for the peer's kernel. That may itself wait, for a page
 * that is in a lease around the request's buffers, so a request that kept the lease would wait for ever.
 */
#include "objects_fixture.hpp"
#include "sim.hpp"

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace npr::test {
namespace {

constexpr std::uint64_t pages = 16;

struct LocalWaits : ::testing::Test {
	/* @x has its local buffers where @of is, and posts to its own region. */
	static void lease(app &x, sim_region &of)
	{
		x.chance_local = 100;
		x.world.leased_around = &of;
	}

	static sim_region &make_region(app &x, std::uint64_t n = pages)
	{
		sim_region &r = x.world.add_region(0x100000, n * page_size, 0x100);

		r.known = true;
		x.eng->resolve_begins();
		EXPECT_EQ(x.eng->resolve_ended(r.rkey, 0, r.info, x.world.now()), 0);
		x.world.all_in(r, true);
		return r;
	}

	/* Whoever owns @r, of which @by has leases, puts other memory in the place of a page. */
	static void take(app &by, sim_region &r, std::uint64_t page)
	{
		by.world.page_taken(r, page);
		by.world.local_recalled = true;
	}

	/* What has become possible, once, and time passes. */
	static void go_on(app &x)
	{
		x.world.run_wire();
		x.world.run_control();
		if (const auto d = x.eng->deadline()) {
			x.world.clock = *d;
			x.world.step();
		}
	}

	/* Does all that is posted end? BUSY is asked again ever more seldom, so this is a long time. */
	template <class... Apps> static bool end(Apps &...x)
	{
		const auto idle = [](app &y) { return y.eng->idle(); };

		for (int n = 0; n < 100; ++n) {
			(go_on(x), ...);
			(x.poll(), ...);
			if ((idle(x) && ...))
				return true;
		}
		return false;
	}

	static engine_config ordered()
	{
		engine_config c = small_config();

		c.ordered_writes = true;
		return c;
	}

	app a{small_config()};
};

/* A process that reaches its own memory: the page is in the lease of the buffer. */
TEST_F(LocalWaits, RequestsDoNotWaitForTheirOwnLease)
{
	sim_region &r = make_region(a);

	lease(a, r);
	for (const auto op : {IBV_WR_RDMA_WRITE, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
		for (const unsigned sges : {1U, 3U}) {
			if (is_atomic(op) && sges > 1)
				continue;
			a.world.local_recalled = false;
			a.post(op, 0, 0, is_atomic(op) ? 8 : 1000, IBV_SEND_SIGNALED, sges);
			take(a, r, 0);
			ASSERT_TRUE(end(a));
			EXPECT_TRUE(a.world.local_holds.empty());
		}
	}
	EXPECT_GE(a.world.narrowed, 3U);
	a.check_memory();
}

/* Some buffers are in pinned memory: which hold is whose? sim looks at it. */
TEST_F(LocalWaits, BuffersOfARequestAreNarrowedOneByOne)
{
	sim_region &r = make_region(a);

	lease(a, r);
	a.chance_local = 50;
	for (int n = 0; n < 20; ++n) {
		a.world.local_recalled = false;
		a.post(IBV_WR_RDMA_WRITE, 0, 0, 1000, IBV_SEND_SIGNALED, 4);
		take(a, r, 0);
		ASSERT_TRUE(end(a));
	}
	EXPECT_GT(a.world.narrowed, 20U);
	a.check_memory();
}

/* Without a CPU that looks at it, what a READ brought is proven by words, which say that the page is not there. */
TEST_F(LocalWaits, ReadsThatNobodyLooksAtDoNotWaitForTheirOwnLease)
{
	engine_config c = small_config();

	c.opaque_sinks = true;
	app b(c);
	sim_region &r = make_region(b);
	lease(b, r);
	b.post(IBV_WR_RDMA_READ, 0, 0, 1000);
	take(b, r, 0);
	EXPECT_TRUE(end(b));
	EXPECT_EQ(b.world.narrowed, 1U);
}

/* Each of two processes waits for a page that is in a lease of the other. */
TEST_F(LocalWaits, TwoProcessesDoNotWaitForEachOther)
{
	app b(small_config());
	sim_region &of_b = make_region(a), &of_a = make_region(b);

	lease(a, of_a);
	lease(b, of_b);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 64);
	b.post(IBV_WR_RDMA_WRITE, 0, 0, 64);
	take(b, of_b, 0);
	take(a, of_a, 0);
	EXPECT_TRUE(end(a, b));
	a.check_memory();
	b.check_memory();
}

/* What waits for its turn has nothing posted, and may have the lease that the one before it waits for. */
TEST_F(LocalWaits, RequestsDoNotWaitForALeaseOfThoseBehindThem)
{
	sim_region &r = make_region(a);

	a.post(IBV_WR_RDMA_WRITE, 0, 0, 64);
	lease(a, r);
	a.post(IBV_WR_SEND, 0, 0, 64);
	a.post(IBV_WR_RDMA_WRITE, 0, 128, 64);
	take(a, r, 0);
	EXPECT_TRUE(end(a));
	EXPECT_EQ(a.world.narrowed, 2U);
	a.check_memory();
}

/* What is done behind one that waits is not told, and its buffers are not needed. */
TEST_F(LocalWaits, RequestsDoNotWaitForALeaseOfWhatIsDone)
{
	engine_config c = small_config();

	c.relaxed = true;
	app b(c);
	sim_region &r = make_region(b);
	b.post(IBV_WR_RDMA_WRITE, 0, 0, 64);
	lease(b, r);
	b.post(IBV_WR_RDMA_READ, 0, page_size, 64);
	take(b, r, 0);
	EXPECT_TRUE(end(b));
	EXPECT_EQ(b.world.narrowed, 0U);
}

/* Ordered WRITEs wait for holds of the peer's, and those for leases of ours. */
TEST_F(LocalWaits, OrderedWritesDoNotWaitForTheirOwnLease)
{
	app b(ordered());
	sim_region &r = make_region(b);

	b.world.lands_once = true;
	lease(b, r);
	b.post(IBV_WR_RDMA_WRITE, 0, 0, 64);
	b.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 64, 64);
	take(b, r, 0);
	EXPECT_TRUE(end(b));
	b.check_memory();
}

/* A piece waits, and another one of the same request is on its way: the HCA has the buffer. sim looks at it. */
TEST_F(LocalWaits, BufferThatTheHcaHasStaysAsItIsHeld)
{
	app b(small_config());
	sim_region &r = make_region(b, 520);

	lease(b, r);
	b.post(IBV_WR_RDMA_WRITE, 0, 0, 520 * page_size);
	/* Their words are known, and both pieces are posted. */
	for (int n = 0; n < 10 && b.world.writes < 2; ++n)
		b.world.run_wire_first();
	ASSERT_GE(b.world.writes, 2U);
	take(b, r, 0);
	while (b.world.faults.empty())
		b.world.run_wire_first();
	ASSERT_FALSE(b.world.queue.empty());
	b.world.run_control();
	EXPECT_EQ(b.world.narrowed, 0U);
	EXPECT_TRUE(end(b));
	EXPECT_EQ(b.world.narrowed, 1U);
	b.check_memory();
}

/* Nobody wants it back. */
TEST_F(LocalWaits, LeaseIsKeptThatWasNotRecalled)
{
	sim_region &r = make_region(a);

	lease(a, r);
	a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 0, 8);
	ASSERT_EQ(a.world.faults.size(), 1U);
	a.world.serve_fault(0, RDMA_NP_BUSY);
	a.world.run_control();
	EXPECT_TRUE(end(a));
	EXPECT_EQ(a.world.narrowed, 0U);
}

/* The buffer cannot be held by itself now. */
TEST_F(LocalWaits, HoldIsTriedAgain)
{
	sim_region &r = make_region(a);

	lease(a, r);
	a.world.narrow_error = 1;
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 64);
	take(a, r, 0);
	EXPECT_FALSE(end(a));
	a.world.narrow_error = 0;
	EXPECT_TRUE(end(a));
	a.check_memory();
}

/* The lease had to go first, and then there was no room for the hold. */
TEST_F(LocalWaits, RequestWithoutItsBufferFails)
{
	for (const bool behind : {false, true}) {
		app b(small_config());
		sim_region &r = make_region(b);
		b.expect_success = false;
		if (!behind)
			lease(b, r);
		b.post(IBV_WR_RDMA_WRITE, 0, 0, 64);
		if (behind) {
			lease(b, r);
			b.post(IBV_WR_SEND, 0, 0, 64, IBV_SEND_SIGNALED, 3);
			b.post(IBV_WR_RDMA_WRITE, 0, 64, 64);
		}
		b.world.narrow_error = -ENOBUFS;
		take(b, r, 0);
		EXPECT_TRUE(end(b));
		ASSERT_EQ(b.completions.size(), behind ? 3U : 1U);
		const std::size_t failed = behind;
		EXPECT_EQ(b.completions[failed].status, IBV_WC_LOC_QP_OP_ERR);
		if (behind) {
			EXPECT_EQ(b.completions[0].status, IBV_WC_SUCCESS) << "it was before";
			EXPECT_EQ(b.completions[2].status, IBV_WC_WR_FLUSH_ERR);
		}
		EXPECT_TRUE(b.world.local_holds.empty());
		EXPECT_TRUE(b.world.qp_error);
	}
}

/* --- of a queue pair -------------------------------------------------------- */

/* @away: so far the addresses of work requests are from those of the CPU. */
struct NarrowedLease : fake::Objects, ::testing::WithParamInterface<std::uint64_t> {
	static constexpr std::uint32_t key = 0x900;
	static constexpr std::uint64_t at = 256;
	static constexpr std::uint32_t length = 64;

	NarrowedLease() : qp(attach(1)), other(attach(2))
	{
		mr.context = &dev.context;
		mr.lkey = key;
		mr.handle = 42;
		add(mr);
		memory.fill({});
		EXPECT_EQ(npr_resolve(qp, fake::rkey, nullptr), 0);
		EXPECT_EQ(npr_resolve(other, fake::rkey, nullptr), 0);
	}
	~NarrowedLease() override { (void)ctx.regions.remove(mr); }

	/* A region of all of the memory. */
	void add(const ibv_mr &v)
	{
		ctx.regions.add(v, {v.handle, -GetParam()});
		const std::lock_guard lock(dev.mutex);
		dev.regions[v.handle] = {start, memory.size(), -GetParam(), true};
	}

	void read(npr_qp *q, std::uint32_t lkey = key)
	{
		ibv_sge s{start + at, length, lkey};
		ibv_send_wr wr{}, *bad;

		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = IBV_WR_RDMA_READ;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.wr.rdma.remote_addr = fake::base;
		wr.wr.rdma.rkey = fake::rkey;
		ASSERT_EQ(npr_post_send(q, &wr, &bad), 0);
	}

	template <class F> bool poll_until(F &&f)
	{
		const auto begun = std::chrono::steady_clock::now();

		while (!f()) {
			/* All that has completed, and then what was answered. */
			std::array<ibv_wc, 4> wcs;
			if (std::chrono::steady_clock::now() - begun > std::chrono::seconds(5))
				return false;
			const int n = npr_poll_cq(cq.get(), static_cast<int>(wcs.size()), wcs.data());
			done.insert(done.end(), wcs.begin(), wcs.begin() + n);
		}
		return true;
	}
	bool completes()
	{
		return poll_until([this] { return !done.empty(); });
	}

	/* READs that have their buffer under a lease, wait for a page, and are told BUSY as long as the lease is there. */
	void begin(bool both = false)
	{
		dev.all_in();
		while (!kernel_ptr->count_local_leases(mr.handle)) {
			ASSERT_NO_FATAL_FAILURE(read(qp));
			ASSERT_TRUE(completes());
			done.clear();
		}
		dev.all_out();
		memory.fill({});
		kernel_ptr->waits_for_local = mr.handle;
		ASSERT_NO_FATAL_FAILURE(read(qp));
		if (both) {
			ASSERT_NO_FATAL_FAILURE(read(other));
		}
		ASSERT_EQ(kernel_ptr->count_local_leases(mr.handle), 1U);
		kernel_ptr->recall_local(mr.handle);
	}

	[[nodiscard]] bool has_data() const { return !std::memcmp(&memory[at], dev.memory.data(), length); }

	alignas(4096) static inline std::array<std::byte, 8 * 4096> memory;
	const std::uint64_t start = reinterpret_cast<std::uintptr_t>(memory.data()) + GetParam();
	ibv_mr mr{};
	npr_qp *const qp, *const other;
	std::vector<ibv_wc> done;
};

TEST_P(NarrowedLease, IsAHoldOfTheBufferAlone)
{
	ASSERT_NO_FATAL_FAILURE(begin());
	ASSERT_TRUE(poll_until([this] { return !kernel_ptr->count_local_leases(mr.handle); }));
	ASSERT_EQ(kernel_ptr->local_holds.size(), 1U);
	const fake::fake_kernel::local_hold hold = kernel_ptr->only_local();
	EXPECT_EQ(hold.mr, mr.handle);
	EXPECT_EQ(hold.req.addr, start + at);
	EXPECT_EQ(hold.req.length, length);
	EXPECT_EQ(hold.req.flags, unsigned{RDMA_NP_FAULT_WRITE});
	ASSERT_TRUE(completes());
	EXPECT_EQ(dev.moved_lkey, hold.lkey);
	EXPECT_EQ(done[0].status, IBV_WC_SUCCESS);
	EXPECT_TRUE(has_data());
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
}

/* RLIMIT_MEMLOCK: what the lease has counts there. */
TEST_P(NarrowedLease, MakesRoomForTheHold)
{
	ASSERT_NO_FATAL_FAILURE(begin());
	kernel_ptr->most_held = 1;
	ASSERT_TRUE(completes());
	EXPECT_EQ(done[0].status, IBV_WC_SUCCESS);
	EXPECT_TRUE(has_data());
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
}

/* Nor do two of it fail: the room that it takes comes back with the last one, and neither is sooner. */
TEST_P(NarrowedLease, ThatIsSharedIsKeptUntilThereIsRoom)
{
	npr_stats s;

	ASSERT_NO_FATAL_FAILURE(begin(true));
	kernel_ptr->most_held = 1;
	for (npr_qp *const q : {qp, other})
		ASSERT_TRUE(poll_until([&] {
			EXPECT_EQ(npr_get_stats(q, &s, sizeof(s)), 0);
			return s.busy >= 3;
		}));
	EXPECT_EQ(kernel_ptr->count_local_leases(mr.handle), 1U);
	EXPECT_TRUE(done.empty());
	kernel_ptr->most_held = 100;
	ASSERT_TRUE(poll_until([this] { return done.size() == 2; }));
	for (const ibv_wc &wc : done)
		EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
}

TEST_P(NarrowedLease, IsKeptWhileTheBufferCannotBeHeld)
{
	ASSERT_NO_FATAL_FAILURE(begin());
	for (const int why : {-EAGAIN, -EFAULT, -EINVAL}) {
		npr_stats s;
		std::uint64_t busy = 0;
		kernel_ptr->refuse_hold = why;
		ASSERT_TRUE(poll_until([&] {
			EXPECT_EQ(npr_get_stats(qp, &s, sizeof(s)), 0);
			if (!busy)
				busy = s.busy + 2;
			return s.busy >= busy;
		}));
		EXPECT_EQ(kernel_ptr->count_local_leases(mr.handle), 1U);
		EXPECT_TRUE(done.empty());
	}
	kernel_ptr->refuse_hold = 0;
	ASSERT_TRUE(completes());
	EXPECT_EQ(done[0].status, IBV_WC_SUCCESS);
	EXPECT_TRUE(has_data());
}

/* Somebody else has taken the room. */
TEST_P(NarrowedLease, IsAnErrorIfThereIsNoRoomForTheHold)
{
	ASSERT_NO_FATAL_FAILURE(begin());
	kernel_ptr->refuse_hold = -ENOMEM;
	ASSERT_TRUE(completes());
	EXPECT_EQ(done[0].status, IBV_WC_LOC_QP_OP_ERR);
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
}

/* Each of two queue pairs waits for the lease that the other one has as well. */
TEST_P(NarrowedLease, IsNotKeptByAnotherQueuePairThatWaits)
{
	ASSERT_NO_FATAL_FAILURE(begin(true));
	EXPECT_TRUE(poll_until([this] { return done.size() == 2; }));
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
}

/* Those that nobody wants back stay, whoever waits. */
TEST_P(NarrowedLease, IsOneThatWasRecalled)
{
	ibv_mr kept = mr;

	kept.lkey = 0xa00;
	kept.handle = 43;
	add(kept);
	dev.all_in();
	while (!kernel_ptr->count_local_leases(kept.handle)) {
		ASSERT_NO_FATAL_FAILURE(read(qp, kept.lkey));
		ASSERT_TRUE(completes());
		done.clear();
	}
	ASSERT_NO_FATAL_FAILURE(begin());
	ASSERT_NO_FATAL_FAILURE(read(qp, kept.lkey));
	const std::uint32_t made = kernel_ptr->holds_made;
	const bool still = kernel_ptr->count_local_leases(kept.handle);
	EXPECT_TRUE(poll_until([this] { return done.size() == 2; }));
	EXPECT_EQ(kernel_ptr->holds_made, made + 1);
	EXPECT_TRUE(still);
	EXPECT_TRUE(ctx.regions.remove(kept));
}

INSTANTIATE_TEST_SUITE_P(Addresses, NarrowedLease, ::testing::Values(0U, 1ULL << 53));

} // namespace
} // namespace npr::test
