/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* One behaviour of the protocol each; failures and hostile answers first. */
#include "sim.hpp"

#include <cerrno>
#include <cstring>
#include <gtest/gtest-spi.h>
#include <sys/mman.h>

namespace npr::test {
namespace {

constexpr unsigned signaled = IBV_SEND_SIGNALED;

struct Engine : ::testing::Test {
	/* An app with one region of 16 pages whose key is known. */
	explicit Engine(engine_config c = small_config()) : a(c), r(a.world.add_region(0x100000, 16 * page_size, 0x100)) {}

	void SetUp() override
	{
		for (std::size_t i = 0; i < r.memory->size(); ++i)
			(*r.memory)[i] = static_cast<std::byte>(i * 13 + i / 4096);
	}

	void resolve()
	{
		a.eng->resolve_begins();
		a.eng->resolve_ended(r.rkey, 0, r.info, a.world.now());
		r.known = true;
	}

	void fill_signature(std::uint64_t offset, std::uint64_t n)
	{
		for (std::uint64_t i = offset; i < offset + n; ++i)
			(*r.memory)[i] = static_cast<std::byte>(signature >> 8 * (i % 8));
	}

	/* All that is posted is done, each time with no page there but what is held. */
	void lose_all()
	{
		while (!a.world.queue.empty()) {
			a.world.all_out(r);
			a.world.advance(0, ~0ULL, false);
			a.world.complete_one();
		}
	}

	/* What is posted loses its pages until they are to be held. */
	void lose_until_held()
	{
		while (!a.world.hold_requests) {
			lose_all();
			if (!a.world.hold_requests) {
				ASSERT_EQ(a.world.faults.size(), 1U);
				a.world.serve_fault(0);
				a.world.deliver(0);
			}
		}
	}

	ibv_wc_status only_status()
	{
		EXPECT_EQ(a.completions.size(), 1U);
		return a.completions.empty() ? IBV_WC_GENERAL_ERR : a.completions[0].status;
	}

	/* Post, let the peer's kernel answer @status, drain. @dead: our QP has failed by then. */
	ibv_wc_status fault_answered(rdma_np_status status, bool dead = false)
	{
		a.expect_success = false;
		resolve();
		a.post(IBV_WR_RDMA_READ, 0, 0, 100);
		a.world.run_wire();
		EXPECT_EQ(a.world.faults.size(), 1U);
		a.world.qp_error = dead;
		a.world.serve_fault(0, status);
		a.world.deliver(0);
		a.world.run_wire();
		a.poll();
		return only_status();
	}

	ibv_wc_status resolve_answered(int error)
	{
		a.expect_success = false;
		a.post(IBV_WR_RDMA_READ, 0, 0, 100);
		EXPECT_EQ(a.world.resolves.size(), 1U);
		a.world.answer_resolve(0, error);
		a.world.run_wire();
		a.poll();
		return only_status();
	}

	app a;
	sim_region &r;
};

/* Resolves @n keys of pinned memory, from @rkey on. */
void resolve_pinned(engine &e, std::uint32_t rkey, std::size_t n)
{
	for (; n; --n, ++rkey) {
		e.resolve_begins();
		EXPECT_EQ(e.resolve_ended(rkey, -EACCES, {}, 1), -EACCES);
	}
}

/* --- what is refused ---------------------------------------------------- */

TEST_F(Engine, MoreRequestsThanTheDepthAreRefused)
{
	resolve();
	a.world.all_in(r, false);
	for (unsigned i = 0; i < 32; ++i)
		a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	EXPECT_EQ(a.last_rc, 0);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	EXPECT_EQ(a.last_rc, -ENOMEM);
	a.world.settle();
	EXPECT_EQ(a.poll(), 32U);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	EXPECT_EQ(a.last_rc, 0);
}

TEST_F(Engine, BadPointsAtTheFirstRequestThatWasNotTaken)
{
	resolve();
	std::byte buffer[8];
	ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer), 8, 0};
	ibv_send_wr wr[3]{}, *bad = nullptr;
	for (int i = 0; i < 3; ++i) {
		wr[i].sg_list = &s;
		wr[i].num_sge = 1;
		wr[i].opcode = IBV_WR_RDMA_READ;
		wr[i].wr.rdma.rkey = r.rkey;
		wr[i].wr.rdma.remote_addr = r.info.base;
		wr[i].next = i < 2 ? &wr[i + 1] : nullptr;
	}
	wr[1].num_sge = 5;
	EXPECT_EQ(a.eng->post_send(wr, &bad), -EINVAL);
	EXPECT_EQ(bad, &wr[1]);
	EXPECT_EQ(a.world.queue.size(), 1U);
}

TEST_F(Engine, InlineReadAndTooMuchInlineDataAreRefused)
{
	a.post(IBV_WR_RDMA_READ, 0, 0, 8, signaled | IBV_SEND_INLINE);
	EXPECT_EQ(a.last_rc, -EINVAL);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 257, signaled | IBV_SEND_INLINE);
	EXPECT_EQ(a.last_rc, -EINVAL);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 256, signaled | IBV_SEND_INLINE);
	EXPECT_EQ(a.last_rc, 0);
}

TEST_F(Engine, AccessBeyondTheRegionIsARemoteAccessError)
{
	a.expect_success = false;
	resolve();
	std::byte buffer[8];
	ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer), 8, 0};
	for (const std::uint64_t addr : {r.info.base - 1, r.info.base + r.info.length - 7, ~0ULL - 3}) {
		app b(small_config());
		b.expect_success = false;
		sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.eng->resolve_begins();
		b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
		ibv_send_wr wr{}, *bad;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = IBV_WR_RDMA_READ;
		wr.wr.rdma.rkey = q.rkey;
		wr.wr.rdma.remote_addr = addr;
		ASSERT_EQ(b.eng->post_send(&wr, &bad), 0);
		ibv_wc wc;
		EXPECT_FALSE(b.eng->poll(wc)) << "not before the peer's QP has ended";
		b.world.settle();
		ASSERT_TRUE(b.eng->poll(wc)) << "an error completes unsignaled requests too";
		EXPECT_EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
		EXPECT_TRUE(b.world.qp_error);
		EXPECT_TRUE(b.world.peer_error);
		EXPECT_EQ(b.world.data_reads, 0U);
	}
}

TEST_F(Engine, WriteWithoutTheRightIsARemoteAccessError)
{
	a.expect_success = false;
	r.info.access = IBV_ACCESS_REMOTE_READ;
	r.info.write_key = 0;
	resolve();
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
	a.world.settle();
	a.poll();
	EXPECT_EQ(only_status(), IBV_WC_REM_ACCESS_ERR);
	EXPECT_TRUE(a.world.peer_error);
	EXPECT_EQ(a.world.writes, 0U);
}

/* Each of them makes a write window, and neither is a right to the other. */
TEST_F(Engine, RightsToWriteAndToAtomicsAreNotTheSame)
{
	for (const auto &[op, other] : {std::pair{IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_ATOMIC},
					std::pair{IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_REMOTE_WRITE}}) {
		app b(small_config());
		b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.world.regions.back().info.access = IBV_ACCESS_REMOTE_READ | other;
		b.expect_success = false;
		b.post(op, 0, 0, 8);
		b.world.settle();
		ASSERT_EQ(b.poll(), 1U);
		EXPECT_EQ(b.completions.back().status, IBV_WC_REM_ACCESS_ERR);
		EXPECT_EQ(b.world.writes, 0U);
	}
}

TEST_F(Engine, ReadWithoutTheRightIsARemoteAccessError)
{
	a.expect_success = false;
	r.info.access = IBV_ACCESS_REMOTE_WRITE;
	resolve();
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	a.world.settle();
	a.poll();
	EXPECT_EQ(only_status(), IBV_WC_REM_ACCESS_ERR);
}

/* It has no address to read from, wherever in a page it begins. */
TEST_F(Engine, RegionThatMayOnlyBeWrittenHasNoReadKey)
{
	for (const unsigned odd : {0U, 8U}) {
		app b(small_config());
		sim_region &q = b.world.add_region(0x100000 + odd, 16 * page_size, 0x100);
		q.info.access = IBV_ACCESS_REMOTE_WRITE;
		q.info.read_key = 0;
		q.info.read_addr = 0;
		b.eng->resolve_begins();
		b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
		b.post(IBV_WR_RDMA_WRITE, 0, 100, 2 * page_size);
		b.world.settle();
		EXPECT_EQ(b.poll(), 1U);
		b.post(IBV_WR_RDMA_WRITE, 0, 100, 8);
		b.world.settle();
		EXPECT_EQ(b.poll(), 1U);
		b.check_memory();
	}
}

TEST_F(Engine, AtomicWithoutTheRightIsARemoteAccessError)
{
	a.expect_success = false;
	r.info.access &= ~unsigned{IBV_ACCESS_REMOTE_ATOMIC};
	resolve();
	a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 0, 8);
	a.world.settle();
	a.poll();
	EXPECT_EQ(only_status(), IBV_WC_REM_ACCESS_ERR);
	EXPECT_EQ(a.world.hold_requests, 0U);
	EXPECT_EQ(a.world.writes, 0U);
	EXPECT_EQ(a.world.refused, IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Engine, MisalignedAtomicIsARemoteInvalidRequest)
{
	a.expect_success = false;
	resolve();
	a.post(IBV_WR_ATOMIC_CMP_AND_SWP, 0, 4, 8);
	a.world.settle();
	a.poll();
	EXPECT_EQ(only_status(), IBV_WC_REM_INV_REQ_ERR);
	EXPECT_EQ(a.world.hold_requests, 0U);
	EXPECT_EQ(a.world.writes, 0U);
	EXPECT_TRUE(a.world.peer_error);
	EXPECT_EQ(a.world.refused, IBV_WC_REM_INV_REQ_ERR);
}

TEST_F(Engine, RegionDescriptionThatMakesNoSenseIsNotUsed)
{
	for (int what = 0; what < 11; ++what) {
		SCOPED_TRACE(what);
		app b(small_config());
		b.expect_success = false;
		sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
		rdma_np_region_info i = q.info;
		if (what == 0)
			i.length = 0;
		else if (what == 1)
			i.length = ~0ULL;
		else if (what == 2)
			i.read_addr += 8;
		else if (what == 3)
			i.table_addr += 4;
		/* an owner that no one here knows how to look at */
		else if (what == 4)
			i.page_shift = 16;
		else if (what == 5)
			i.unit_shift = 5;
		else if (what == 6)
			i.unit_shift = 7;
		else if (what == 7)
			i.unit_shift = 64 + 6;
		else if (what == 8)
			i.max_pages = 0;
		else if (what == 9)
			i.max_ranges = 0;
		else
			i.max_outstanding = 0;
		b.post(IBV_WR_RDMA_READ, 0, 0, 8);
		b.world.resolves.clear();
		b.eng->on_resolved(q.rkey, 0, i);
		b.eng->step();
		b.poll();
		ASSERT_EQ(b.completions.size(), 1U);
		EXPECT_EQ(b.completions[0].status, IBV_WC_GENERAL_ERR);
	}
}

/* --- answers of the peer ------------------------------------------------ */

TEST_F(Engine, FaultAnsweredAddressIsARemoteAccessError)
{
	EXPECT_EQ(fault_answered(RDMA_NP_ADDRESS), IBV_WC_REM_ACCESS_ERR);
	EXPECT_TRUE(a.world.qp_error);
	EXPECT_TRUE(a.world.peer_error);
}
TEST_F(Engine, FaultAnsweredAccessIsARemoteAccessError)
{
	EXPECT_EQ(fault_answered(RDMA_NP_ACCESS), IBV_WC_REM_ACCESS_ERR);
}
TEST_F(Engine, FaultThatTimesOutIsARetryExceededError)
{
	EXPECT_EQ(fault_answered(RDMA_NP_TIMEOUT), IBV_WC_RETRY_EXC_ERR);
}
TEST_F(Engine, FaultAnsweredNoMemoryIsARemoteOperationError)
{
	EXPECT_EQ(fault_answered(RDMA_NP_NOMEM), IBV_WC_REM_OP_ERR);
	EXPECT_FALSE(a.world.peer_error);
}
TEST_F(Engine, FaultOnADeadQueuePairIsAFlush)
{
	EXPECT_EQ(fault_answered(RDMA_NP_QP, true), IBV_WC_WR_FLUSH_ERR);
}
TEST_F(Engine, FaultThatThePeerKnowsNoConnectionForIsARetryExceededError)
{
	EXPECT_EQ(fault_answered(RDMA_NP_QP), IBV_WC_RETRY_EXC_ERR);
}
TEST_F(Engine, FaultAnsweredNonsenseIsAnError)
{
	EXPECT_EQ(fault_answered(RDMA_NP_PROTO), IBV_WC_REM_INV_REQ_ERR);
}
TEST_F(Engine, ResolveThatTimesOutIsARetryExceededError)
{
	EXPECT_EQ(resolve_answered(-ETIMEDOUT), IBV_WC_RETRY_EXC_ERR);
}
TEST_F(Engine, ResolveOnADeadQueuePairIsAFlush)
{
	a.world.qp_error = true;
	EXPECT_EQ(resolve_answered(-ENOTCONN), IBV_WC_WR_FLUSH_ERR);
}
TEST_F(Engine, ResolveThatThePeerKnowsNoConnectionForIsARetryExceededError)
{
	EXPECT_EQ(resolve_answered(-ENOTCONN), IBV_WC_RETRY_EXC_ERR);
}

TEST_F(Engine, ResolveWithoutMemoryIsARemoteOperationError)
{
	EXPECT_EQ(resolve_answered(-ENOMEM), IBV_WC_REM_OP_ERR);
}

TEST_F(Engine, ExplicitResolveThatFailsChangesNothing)
{
	resolve();
	a.world.all_in(r, true);
	for (const int error : {-ETIMEDOUT, -ENOMEM, -ENOTCONN, -ENOSPC, -EHOSTUNREACH, -ECONNREFUSED,
				0 /* nonsense */}) {
		SCOPED_TRACE(error);
		a.eng->resolve_begins();
		a.eng->resolve_ended(r.rkey, error, {}, a.world.now());
		a.post(IBV_WR_RDMA_READ, 0, 0, 100);
		EXPECT_TRUE(a.world.resolves.empty()) << "it was known";
		a.world.run_wire();
		EXPECT_EQ(a.poll(), 1U);

		/* nor does one fail that waits for an answer of its own */
		app b(small_config());
		sim_region &s = b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.world.all_in(s, true);
		b.post(IBV_WR_RDMA_READ, 0, 0, 100);
		b.eng->resolve_begins();
		b.eng->resolve_ended(s.rkey, error, {}, b.world.now());
		b.eng->step();
		EXPECT_EQ(b.poll(), 0U);
		EXPECT_EQ(b.world.resolves.size(), 1U);
		b.world.settle();
		EXPECT_EQ(b.poll(), 1U);
	}
}

struct LateAnswer : Engine, ::testing::WithParamInterface<int> {
	/* A READ has asked; another answer came first. */
	void SetUp() override
	{
		Engine::SetUp();
		a.world.all_in(r, true);
		a.post(IBV_WR_RDMA_READ, 0, 0, 100);
		ASSERT_EQ(a.world.resolves.size(), 1U);
		resolve();
	}

	/* The region of that answer dies, and the READ has not begun. */
	sim_region &die()
	{
		sim_region &second = a.world.replace_region(r);
		a.world.all_in(second, true);
		a.eng->on_event(a.world.events[0]);
		a.world.events.clear();
		return second;
	}
};

TEST_P(LateAnswer, ThatFailsChangesNothingOfWhatAnotherHasSaid)
{
	a.world.answer_resolve(0, GetParam());
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	EXPECT_TRUE(a.world.resolves.empty());
	for (const auto &q : a.world.queue)
		EXPECT_EQ(q.wr.wr.rdma.rkey, r.info.read_key);
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 2U);
}

TEST_P(LateAnswer, OfARegionThatHasDiedIsAskedForAgain)
{
	const sim_region &second = die();
	a.world.answer_resolve(0, GetParam());
	ASSERT_EQ(a.world.resolves.size(), 1U);
	a.world.answer_resolve(0);
	ASSERT_EQ(a.world.queue.size(), 1U);
	EXPECT_EQ(a.world.queue[0].wr.wr.rdma.rkey, second.info.read_key);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

TEST_P(LateAnswer, DoesNotDecideWhileALaterOneIsToCome)
{
	const sim_region &second = die();
	a.eng->step();
	ASSERT_EQ(a.world.resolves.size(), 2U);
	a.world.answer_resolve(0, GetParam());
	EXPECT_EQ(a.world.resolves.size(), 1U);
	EXPECT_TRUE(a.world.queue.empty());
	a.world.answer_resolve(0);
	ASSERT_EQ(a.world.queue.size(), 1U);
	EXPECT_EQ(a.world.queue[0].wr.wr.rdma.rkey, second.info.read_key);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

INSTANTIATE_TEST_SUITE_P(Errors, LateAnswer,
			 ::testing::Values(-ETIMEDOUT, -ENOMEM, -ENOTCONN, -EHOSTUNREACH, -ECONNREFUSED));

TEST_F(Engine, ExplicitResolveOfAPeerThatIsNotHeardIsEnough)
{
	a.eng->resolve_begins();
	a.eng->resolve_ended(r.rkey, -EHOSTUNREACH, {}, a.world.now());
	a.post(IBV_WR_RDMA_WRITE, 0, 16, 8);
	EXPECT_TRUE(a.world.resolves.empty());
}

TEST_F(Engine, UnknownKeyGoesToTheProviderAsItIs)
{
	for (const int error : {-EACCES, -EHOSTUNREACH}) {
		app b(small_config());
		b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.post(IBV_WR_RDMA_WRITE, 0, 16, 8);
		b.world.answer_resolve(0, error);
		ASSERT_EQ(b.world.queue.size(), 1U);
		EXPECT_EQ(b.world.queue[0].wr.wr.rdma.rkey, 0x100U);
		EXPECT_EQ(b.world.queue[0].wr.wr.rdma.remote_addr, 0x100010U);
		b.post(IBV_WR_RDMA_WRITE, 0, 16, 8);
		EXPECT_TRUE(b.world.resolves.empty()) << "asked once only";
	}
}

TEST_F(Engine, ExplicitResolveCorrectsAKeyThatWasTakenForPinned)
{
	a.eng->resolve_begins();
	a.eng->resolve_ended(r.rkey, -EACCES, {}, a.world.now());
	resolve();
	a.world.all_in(r, false);
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	ASSERT_EQ(a.world.queue.size(), 1U);
	EXPECT_EQ(a.world.queue[0].wr.wr.rdma.rkey, r.info.read_key);
}

TEST_F(Engine, BusyIsAskedAgainLaterAndLaterAndNeverLost)
{
	resolve();
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	a.world.run_wire();
	nanoseconds last = 0;
	for (int i = 0; i < 40; ++i) {
		ASSERT_EQ(a.world.faults.size(), 1U) << i;
		a.world.serve_fault(0, RDMA_NP_BUSY);
		a.world.deliver(0);
		EXPECT_TRUE(a.world.faults.empty()) << "asked again at once";
		const auto d = a.eng->deadline();
		ASSERT_TRUE(d);
		const nanoseconds pause = *d - a.world.clock;
		EXPECT_GE(pause, last);
		EXPECT_LE(pause, 20'000'000U);
		last = pause;
		a.world.clock = *d - 1;
		a.eng->step();
		EXPECT_TRUE(a.world.faults.empty()) << "too early";
		a.world.clock = *d;
		a.eng->step();
	}
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.eng->stats().busy, 40U);
}

TEST_F(Engine, EventsOutOfTheBlueDoNoHarm)
{
	resolve();
	rdma_np_event e{};
	e.type = RDMA_NP_EVENT_FAULT;
	e.cookie = ~0ULL;
	a.eng->on_event(e);
	e.type = 77;
	a.eng->on_event(e);
	e.type = RDMA_NP_EVENT_REGION_GONE;
	e.region_id = 4711;
	a.eng->on_event(e);
	a.world.all_in(r, false);
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

TEST_F(Engine, HoldGrantedForARequestThatFailedIsGivenBack)
{
	a.expect_success = false;
	resolve();
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	lose_until_held();
	a.world.serve_fault(0);
	ASSERT_EQ(a.world.holds.size(), 1U);
	/* the QP dies before the answer is heard */
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	ASSERT_EQ(a.world.queue.size(), 1U);
	a.world.queue[0].status = IBV_WC_RETRY_EXC_ERR;
	a.world.qp_error = true;
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 2U);
	a.world.deliver(0);
	EXPECT_TRUE(a.world.holds.empty());
	EXPECT_TRUE(a.eng->idle());
}

/* --- READ ---------------------------------------------------------------- */

TEST_F(Engine, ReadOfResidentMemoryIsOneRead)
{
	resolve();
	a.world.all_in(r, false);
	a.post(IBV_WR_RDMA_READ, 0, 128, 3 * page_size);
	EXPECT_EQ(a.world.queue.size(), 1U);
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.fault_requests, 0U);
	EXPECT_EQ(a.world.word_reads, 0U);
	EXPECT_EQ(a.world.data_reads, 1U);
}

TEST_F(Engine, OnlyAReadThatBeginsWithinAUnitAndReachesIntoAnotherIsTwo)
{
	resolve();
	a.world.all_in(r, false);
	/* the first is the one whose key is looked up */
	for (const auto &[offset, length, reads] :
	     {std::tuple{64U, 8192U, 1U}, {64U, 8192U, 1U}, {1U, 63U, 1U}, {1U, 64U, 2U}, {63U, 1U, 1U},
	      {63U, 2U, 2U}, {1U, 256U, 2U}, {63U, 257U, 2U}, {64U, 65U, 1U}}) {
		a.world.data_reads = 0;
		a.post(IBV_WR_RDMA_READ, 0, offset, length);
		a.world.settle();
		EXPECT_EQ(a.poll(), 1U);
		EXPECT_EQ(a.world.data_reads, reads) << length << " bytes at " << offset;
	}
	EXPECT_EQ(a.eng->stats().slow, 0U) << "one or two, all are posted at once";
}

/*
 * Of a unit that two requests brought the first word would tell of the first request only, or, where that
 * ends within the word, of none. Which request brings what depends on the adapter, so all sizes are tried.
 */
TEST_F(Engine, APageThatGoesOrComesBetweenTwoRequestsOfAReadIsNoticed)
{
	std::vector<std::uint64_t> offsets{4060, 4093};
	for (std::uint64_t i = 0; i < 64; ++i)
		offsets.push_back(i);

	const auto set = [this](bool there) { there ? a.world.all_in(r, false) : a.world.all_out(r); };
	/* False: the READ is over before request @n. */
	const auto changes_before = [&](unsigned n, std::uint64_t offset, std::uint64_t length, bool comes, bool again) {
		SCOPED_TRACE(testing::Message() << length << " bytes at " << offset << ", requests of " << a.world.request
						<< (comes ? ", comes" : ", goes") << " before " << n
						<< (again ? " of the second try" : ""));
		if (HasFailure())
			return false;
		set(!comes && !again);
		a.post(IBV_WR_RDMA_READ, 0, offset, length);
		if (again) {
			a.world.run_wire();
			a.world.run_control();
			set(!comes);
		}
		unsigned done = 0;
		while (done < n && a.world.advance_request())
			++done;
		set(comes);
		a.world.settle();
		EXPECT_EQ(a.poll(), 1U);
		return done == n;
	};

	resolve();
	for (a.world.request = 64; a.world.request <= 4096; a.world.request *= 2)
		for (const std::uint64_t offset : offsets)
			for (const std::uint64_t length : {a.world.request + 20, 176U, 2 * a.world.request + 100})
				for (const bool comes : {false, true})
					for (const bool again : {false, true})
						for (unsigned n = 1; changes_before(n, offset, length, comes, again);)
							++n;
}

TEST_F(Engine, ReadAsksForTheAbsentPagesOnlyAndReadsThoseAgain)
{
	resolve();
	a.world.all_in(r, false);
	a.world.page_out(r, 3);
	a.world.page_out(r, 4);
	a.world.page_out(r, 9);
	a.post(IBV_WR_RDMA_READ, 0, 0, 16 * page_size);
	a.world.run_wire();
	ASSERT_EQ(a.world.fault_log.size(), 1U);
	ASSERT_EQ(a.world.fault_log[0].size(), 2U);
	EXPECT_EQ(a.world.fault_log[0][0].addr, r.info.base + 3 * page_size);
	EXPECT_EQ(a.world.fault_log[0][0].length, 2 * page_size);
	EXPECT_EQ(a.world.fault_log[0][1].addr, r.info.base + 9 * page_size);
	EXPECT_EQ(a.world.fault_log[0][1].length, page_size);
	a.world.serve_fault(0);
	a.world.deliver(0);
	ASSERT_EQ(a.world.queue.size(), 2U);
	EXPECT_EQ(a.world.queue[0].length, 2 * page_size);
	EXPECT_EQ(a.world.queue[1].length, page_size);
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.eng->stats().suspicious_pages, 3U);
}

TEST_F(Engine, ManyScatteredAbsentPagesFitOneRequest)
{
	sim_region &big = a.world.add_region(0x40000000, 512 * page_size, 0x500);
	for (std::uint64_t p = 0; p < 512; p += 2)
		a.world.page_in(big, p, false);
	a.eng->resolve_begins();
	a.eng->resolve_ended(big.rkey, 0, big.info, a.world.now());
	a.post(IBV_WR_RDMA_READ, 1, 0, 512 * page_size);
	a.world.run_wire();
	EXPECT_EQ(a.world.fault_log.size(), 1U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

TEST_F(Engine, ReadOfMoreThanAPieceIsCompleteAndCompletesOnce)
{
	sim_region &big = a.world.add_region(0x40000000 + 5, 1500 * page_size, 0x500);
	for (std::size_t i = 0; i < big.memory->size(); ++i)
		(*big.memory)[i] = static_cast<std::byte>(i * 31 >> 3);
	a.eng->resolve_begins();
	a.eng->resolve_ended(big.rkey, 0, big.info, a.world.now());
	a.post(IBV_WR_RDMA_READ, 1, 7, 1500 * page_size - 20, signaled, 4);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	a.world.all_out(big);
	const unsigned asked = a.world.fault_requests;
	a.post(IBV_WR_RDMA_WRITE, 1, 7, 1500 * page_size - 20, signaled, 4);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.fault_requests - asked, 3U) << "one for each 2 MiB, whatever the buffers";
	a.check_memory();
}

TEST_F(Engine, DataEqualToTheSignatureIsReadAndNeedsNoHold)
{
	resolve();
	fill_signature(0, 16 * page_size);
	a.world.all_in(r, false);
	a.post(IBV_WR_RDMA_READ, 0, 0, 16 * page_size);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.hold_requests, 0U);
	EXPECT_EQ(a.world.fault_requests, 1U);
	EXPECT_EQ(a.eng->stats().false_suspicions, 16U);
}

TEST_F(Engine, ASingleSignatureWordOrAnOddOffsetIsRead)
{
	resolve();
	a.world.all_in(r, false);
	fill_signature(128, 8);
	for (std::uint64_t i = 1000; i < 3000; ++i)
		(*r.memory)[i] = static_cast<std::byte>(signature >> 8 * ((i + 3) % 8));
	a.post(IBV_WR_RDMA_READ, 0, 0, page_size);
	a.post(IBV_WR_RDMA_READ, 0, 131, 3);
	a.post(IBV_WR_RDMA_READ, 0, 1001, 77);
	a.world.settle();
	EXPECT_EQ(a.poll(), 3U);
}

TEST_F(Engine, SignatureDataOnMoreThanSixteenPagesNeedsNoHold)
{
	/* the event tells 16 words only: the others are learnt, then compared */
	sim_region &big = a.world.add_region(0x40000000, 100 * page_size, 0x500);
	for (std::size_t i = 0; i < big.memory->size(); ++i)
		(*big.memory)[i] = static_cast<std::byte>(signature >> 8 * (i % 8));
	a.world.all_in(big, false);
	a.eng->resolve_begins();
	a.eng->resolve_ended(big.rkey, 0, big.info, a.world.now());
	a.post(IBV_WR_RDMA_READ, 1, 0, 100 * page_size);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.hold_requests, 0U);
}

/*
 * The unchanged word proves the data only if it was known before the READ: here
 * the page is absent when it is read, and resident when its word is.
 */
TEST_F(Engine, AWordReadAfterTheDataProvesNothingByItself)
{
	resolve();
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	a.world.run_wire();
	a.world.serve_fault(0);
	a.world.deliver(0);
	ASSERT_EQ(a.world.queue.size(), 1U);
	a.world.page_out(r, 0);
	a.world.advance(0, ~0ULL, false);
	a.world.page_in(r, 0, false);
	a.world.complete_one();
	ASSERT_EQ(a.world.queue.size(), 1U) << "the word";
	EXPECT_EQ(a.world.queue[0].sges[0].lkey, words_lkey);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U); /* checks the data */
}

TEST_F(Engine, ReadThatKeepsLosingEndsUnderAHold)
{
	resolve();
	a.world.before_cqe = [this](sim &w) { w.all_out(r); };
	a.world.before_cqe(a.world);
	/* absent at every fetch unless held */
	a.post(IBV_WR_RDMA_READ, 0, 0, 2 * page_size);
	for (int i = 0; i < 50 && !a.eng->ready(); ++i) {
		lose_all();
		a.world.run_control();
	}
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.hold_requests, 1U);
	EXPECT_TRUE(a.world.holds.empty());
}

/* Whatever it brings, nobody looks at it: there is nothing where its address points. */
TEST_F(Engine, ReadOfWhatTheCpuCannotSeeIsProvenByWords)
{
	resolve();
	a.chance_opaque = 100;
	fill_signature(0, 4 * page_size);
	a.reference.clear();
	for (int i = 0; i < 10; ++i) {
		a.world.all_out(r);
		a.post(IBV_WR_RDMA_READ, 0, 100, 3 * page_size, IBV_SEND_SIGNALED, 4);
		EXPECT_EQ(a.world.data_reads, i ? 1U : 0U) << "are its words known to be readable?";
		a.world.settle();
		EXPECT_EQ(a.poll(), 1U);
		const unsigned faults = a.world.fault_requests;
		/* one round when nothing is missing */
		a.world.data_reads = a.world.word_reads = 0;
		a.post(IBV_WR_RDMA_READ, 0, 100, 3 * page_size);
		a.world.settle();
		EXPECT_EQ(a.poll(), 1U);
		EXPECT_EQ(a.world.data_reads, 1U);
		EXPECT_EQ(a.world.word_reads, 1U);
		EXPECT_EQ(a.world.fault_requests, faults);
		a.world.data_reads = 0;
	}
	EXPECT_TRUE(a.world.local_holds.empty());
}

/* Signatures would be suspicious if anybody looked. */
TEST(OpaqueSinks, FlagSaysThatNobodyLooks)
{
	engine_config c = small_config();
	c.opaque_sinks = true;
	app a(c);
	sim_region &r = a.world.add_region(0x100000, 16 * page_size, 0x100);
	for (std::size_t i = 0; i < r.memory->size(); ++i)
		(*r.memory)[i] = static_cast<std::byte>(signature >> 8 * (i % 8));
	a.world.all_in(r, false);
	for (int i = 0; i < 3; ++i) {
		a.post(IBV_WR_RDMA_READ, 0, 0, 1000);
		a.world.settle();
		EXPECT_EQ(a.poll(), 1U);
	}
	EXPECT_EQ(a.world.data_reads, 3U);
	EXPECT_EQ(a.world.word_reads, 4U);
	EXPECT_EQ(a.world.fault_requests, 0U);
	EXPECT_EQ(a.eng->stats().false_suspicions, 0U);
}

TEST_F(Engine, PageThatWasAwayDuringAReadThatNobodySeesIsFound)
{
	resolve();
	a.chance_opaque = 100;
	a.world.all_in(r, false);
	a.post(IBV_WR_RDMA_READ, 0, 0, 2 * page_size);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	/* and back before its words are read: readable, but not the same */
	a.post(IBV_WR_RDMA_READ, 0, 0, 2 * page_size);
	a.world.page_out(r, 1);
	a.world.advance(0, ~0ULL, false);
	a.world.page_in(r, 1, false);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U); /* checks the data */
}

TEST_F(Engine, ReadThatNobodySeesAndKeepsLosingEndsUnderAHold)
{
	resolve();
	a.chance_opaque = 100;
	a.post(IBV_WR_RDMA_READ, 0, 0, 2 * page_size);
	for (int i = 0; i < 50 && !a.eng->ready(); ++i) {
		lose_all();
		a.world.run_control();
	}
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.hold_requests, 1U);
	EXPECT_TRUE(a.world.holds.empty());
}

struct ByWords : Engine {
	static engine_config config()
	{
		engine_config c = small_config();
		c.read_words_min = page_size;
		return c;
	}
	ByWords() : Engine(config()) {}
};

TEST_F(ByWords, LargeReadWithKnownWordsIsProvenByThem)
{
	resolve();
	a.world.all_in(r, false);
	fill_signature(0, 16 * page_size);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8 * page_size);
	a.world.settle();
	ASSERT_EQ(a.poll(), 1U);
	const unsigned faults = a.world.fault_requests;
	a.post(IBV_WR_RDMA_READ, 0, 0, 8 * page_size);
	EXPECT_EQ(a.world.queue.size(), 1U);
	a.world.settle();
	ASSERT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.fault_requests, faults) << "no suspicion without a scan";
}

/* The words that the next READ could use, if it came to that, are what there is no room for. */
TEST(SmallestQueue, HasRoomForAReadThatBeginsWithinAUnit)
{
	engine_config c = small_config();
	c.sq_budget = 2;
	c.read_words_min = page_size;
	app a(c);
	sim_region &r = a.world.add_region(0x100000, 16 * page_size, 0x100);

	for (const bool there : {true, false}) {
		if (there)
			a.world.all_in(r, false);
		else
			a.world.all_out(r);
		a.post(IBV_WR_RDMA_READ, 0, 1, 4 * page_size);
		a.world.settle();
		EXPECT_EQ(a.poll(), 1U);
	}
}

TEST_F(ByWords, WordsArePostedOnlyWhenTheDataHasCome)
{
	resolve();
	a.world.all_in(r, false);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8 * page_size);
	a.world.settle();
	a.poll();
	a.post(IBV_WR_RDMA_READ, 0, 0, 8 * page_size);
	ASSERT_EQ(a.world.queue.size(), 1U);
	a.world.advance(0, ~0ULL, false);
	/* page 2 is lost before its word is looked at, after its data came: harmless */
	a.world.page_out(r, 2);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

TEST_F(ByWords, PageThatWasAwayDuringTheReadIsFound)
{
	resolve();
	a.world.all_in(r, false);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8 * page_size);
	a.world.settle();
	a.poll();
	a.post(IBV_WR_RDMA_READ, 0, 0, 8 * page_size);
	a.world.page_out(r, 5);
	a.world.advance(0, ~0ULL, false);
	a.world.page_in(r, 5, false);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

/* --- WRITE --------------------------------------------------------------- */

TEST_F(Engine, WriteToKnownResidentMemoryIsOneDoorbell)
{
	resolve();
	a.world.all_in(r, true);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 100);
	a.world.settle();
	a.poll();
	const unsigned reads = a.world.word_reads;
	a.post(IBV_WR_RDMA_WRITE, 0, page_size, 100);
	ASSERT_EQ(a.world.queue.size(), 2U);
	EXPECT_EQ(a.world.queue[0].wr.opcode, IBV_WR_RDMA_WRITE);
	EXPECT_FALSE(a.world.queue[0].wr.send_flags & IBV_SEND_SIGNALED);
	EXPECT_EQ(a.world.queue[1].wr.opcode, IBV_WR_RDMA_READ);
	EXPECT_EQ(a.world.queue[1].length, 8U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.word_reads, reads + 1);
	EXPECT_EQ(a.world.fault_requests, 0U);
}

/* What an owner says of the order of READs and WRITEs (P1), and of what sort the WRITE is. */
struct write_order {
	const char *name;
	unsigned said;
	bool quick;
};

struct WriteOrder : Engine, ::testing::WithParamInterface<write_order> {
	/* A WRITE to a page whose word is known, and that has lost nothing yet. */
	void post_write()
	{
		r.info.read_order = static_cast<std::uint8_t>(GetParam().said);
		resolve();
		a.world.all_in(r, true);
		for (unsigned k = 0; k < 2; ++k) {
			if (k)
				a.world.settle();
			a.poll();
			/* inline data does not go the short way */
			a.post(IBV_WR_RDMA_WRITE, 0, 0, 100, signaled | (GetParam().quick ? 0 : IBV_SEND_INLINE));
		}
	}
};

TEST_P(WriteOrder, WordsAreReadBehindAWriteOnlyWhereTheOwnerKeepsTheOrder)
{
	post_write();
	const unsigned reads = a.world.word_reads;
	if (GetParam().said == RDMA_NP_READ_IN_ORDER) {
		EXPECT_EQ(a.world.queue.size(), 2U);
	} else {
		ASSERT_EQ(a.world.queue.size(), 1U);
		EXPECT_EQ(a.world.queue[0].wr.opcode, IBV_WR_RDMA_WRITE);
		EXPECT_TRUE(a.world.queue[0].wr.send_flags & IBV_SEND_SIGNALED);
		a.world.advance(0, ~0ULL, false);
		EXPECT_EQ(a.world.queue.size(), 1U) << "the WRITE is executed, but has not completed";
		a.world.complete_one();
		EXPECT_FALSE(a.eng->ready());
		ASSERT_EQ(a.world.queue.size(), 1U);
		EXPECT_EQ(a.world.queue[0].wr.opcode, IBV_WR_RDMA_READ);
		EXPECT_EQ(a.world.queue[0].length, 8U);
		EXPECT_EQ(a.world.word_reads, reads + 1);
	}
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.eng->stats().word_reads, a.world.word_reads);
	EXPECT_EQ(a.eng->stats().repeated_pages, 0U);
	a.check_memory();
}

/* The words come first, then the page goes, and then the WRITE is executed. */
TEST_P(WriteOrder, WordsThatOvertakeTheirWriteAreNoProof)
{
	a.world.out_of_order = true;
	post_write();
	if (a.world.queue.size() > 1)
		a.world.advance(1, ~0ULL, false);
	a.world.page_out(r, 0);
	a.world.settle();
	if (GetParam().said == RDMA_NP_READ_IN_ORDER) {
		/* Whoever says so and does not do so loses data: this is what the premise is for. */
		EXPECT_NONFATAL_FAILURE(a.poll(), "was reported but is not in memory");
		return;
	}
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.eng->stats().repeated_pages, 1U);
	a.check_memory();
}

TEST_P(WriteOrder, RegionThatDiesBeforeTheWordsAreReadProvesNothing)
{
	post_write();
	a.world.advance(0, ~0ULL, false);
	sim_region &next = a.world.replace_region(r);
	a.world.deliver(0);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_FALSE(next.pages[0].word == 0) << "it was not asked for";
	EXPECT_TRUE(r.forgotten);
	a.check_memory();
}

/* Under a hold, too: it ends with its region, and only words from after the WRITE tell whether that lived. */
TEST_P(WriteOrder, HoldThatEndsBeforeTheWriteIsExecutedProvesNothing)
{
	a.world.out_of_order = true;
	post_write();
	lose_until_held();
	a.world.serve_fault(0);
	a.world.deliver(0);
	ASSERT_EQ(a.world.holds.size(), 1U);
	ASSERT_EQ(a.world.queue.size(), GetParam().said == RDMA_NP_READ_IN_ORDER ? 2U : 1U);
	if (a.world.queue.size() > 1)
		a.world.advance(1, ~0ULL, false);
	a.world.replace_region(r);
	a.world.settle();
	if (GetParam().said == RDMA_NP_READ_IN_ORDER) {
		EXPECT_NONFATAL_FAILURE(a.poll(), "was reported but is not in memory");
		return;
	}
	EXPECT_EQ(a.poll(), 1U);
	a.check_memory();
}

INSTANTIATE_TEST_SUITE_P(Engine, WriteOrder,
			 ::testing::Values(write_order{"Unknown", RDMA_NP_READ_UNKNOWN, false},
					   write_order{"UnknownQuick", RDMA_NP_READ_UNKNOWN, true},
					   write_order{"OutOfOrder", RDMA_NP_READ_OUT_OF_ORDER, false},
					   write_order{"OutOfOrderQuick", RDMA_NP_READ_OUT_OF_ORDER, true},
					   write_order{"Nonsense", 77, false},
					   write_order{"InOrder", RDMA_NP_READ_IN_ORDER, false},
					   write_order{"InOrderQuick", RDMA_NP_READ_IN_ORDER, true}),
			 [](const auto &p) { return std::string(p.param.name); });

TEST_F(Engine, WordsAreLearntBeforeTheFirstWriteIsPosted)
{
	resolve();
	a.world.all_in(r, true);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 100);
	ASSERT_EQ(a.world.queue.size(), 1U);
	EXPECT_EQ(a.world.queue[0].wr.opcode, IBV_WR_RDMA_READ);
	EXPECT_EQ(a.world.queue[0].length, 16 * 8U) << "the neighbours' too, and not beyond the table";
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

TEST_F(Engine, WriteToAbsentMemoryAsksFirst)
{
	resolve();
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 100);
	a.world.run_wire();
	EXPECT_EQ(a.world.writes, 0U);
	ASSERT_EQ(a.world.faults.size(), 1U);
	EXPECT_EQ(a.world.faults[0].req.flags, std::uint32_t{RDMA_NP_FAULT_WRITE});
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	a.check_memory();
}

TEST_F(Engine, ReadablePageIsNotGoodEnoughForAWrite)
{
	resolve();
	a.world.all_in(r, false);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 100);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.fault_requests, 1U);
	EXPECT_EQ(a.world.hold_requests, 0U);
	EXPECT_EQ(a.world.writes, 1U);
	a.check_memory();
}

TEST_F(Engine, WriteThatHitScratchIsRepeatedAndReportedAfterwards)
{
	resolve();
	a.world.all_in(r, true);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 100);
	a.world.settle();
	a.poll();
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 100);
	a.world.page_out(r, 0);
	a.world.run_wire();
	EXPECT_FALSE(a.eng->ready());
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.eng->stats().repeated_pages, 1U);
	a.check_memory();
}

/* I3: away and back again between the knowledge and the word after. */
TEST_F(Engine, WritableAgainIsNotUnchanged)
{
	resolve();
	a.world.all_in(r, true);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 100);
	a.world.settle();
	a.poll();
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 100);
	a.world.page_out(r, 0);
	a.world.advance(0, ~0ULL, false);
	a.world.page_in(r, 0, true);
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 1U); /* checks that it is in memory */
	EXPECT_EQ(a.eng->stats().repeated_pages, 1U);
	a.check_memory();
}

/*
 * The word to compare with is the one known when the WRITE was posted, even if
 * another answer has brought a newer one meanwhile.
 */
TEST_F(Engine, KnowledgeThatCameAfterThePostProvesNothing)
{
	engine_config c = small_config();
	c.relaxed = true;
	app b(c);
	sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
	b.world.all_in(q, true);
	b.post(IBV_WR_RDMA_WRITE, 0, 0, 100);
	b.world.settle();
	b.poll();
	b.post(IBV_WR_RDMA_WRITE, 0, 0, 100); /* queue: WRITE, word */
	b.world.page_out(q, 0);
	b.world.advance(0, ~0ULL, false); /* into scratch */
	b.world.page_in(q, 0, true);
	/* a prefetch brings the new word */
	EXPECT_EQ(b.eng->prefetch(q.rkey, q.info.base, 100, true), 100);
	b.world.serve_fault(0);
	b.world.deliver(0);
	b.world.settle();
	EXPECT_EQ(b.poll(), 1U);
	b.check_memory();
}

TEST_F(Engine, OnlyThePagesThatAreNotProvenAreWrittenAgain)
{
	resolve();
	a.world.all_in(r, true);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 8 * page_size);
	a.world.settle();
	a.poll();
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 8 * page_size);
	a.world.page_out(r, 6);
	a.world.run_wire();
	a.world.serve_fault(0);
	a.world.deliver(0);
	ASSERT_EQ(a.world.queue.size(), 2U);
	EXPECT_EQ(a.world.queue[0].length, page_size);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	a.check_memory();
}

TEST_F(Engine, WordsOfAnEventAreThoseOfItsFirstRange)
{
	resolve();
	a.world.all_in(r, true);
	for (int i = 0; i < 5; ++i) {
		a.world.page_out(r, 5);
		a.world.page_in(r, 5, true);
	}
	a.world.page_out(r, 1);
	a.world.page_out(r, 5);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 8 * page_size);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.fault_requests, 1U);
	EXPECT_EQ(a.eng->stats().repeated_pages, 0U);
}

TEST_F(Engine, WriteThatKeepsLosingEndsUnderAHold)
{
	resolve();
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 2 * page_size);
	for (int i = 0; i < 50 && !a.eng->ready(); ++i) {
		lose_all();
		a.world.run_control();
	}
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.hold_requests, 1U);
	EXPECT_TRUE(a.world.holds.empty());
	a.check_memory();
}

/* However often the owner takes it: what was done under the hold is done. */
TEST_F(Engine, PageTakenUnderTheHoldOfAReadOrWriteEndsIt)
{
	resolve();
	for (const auto op : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
		const unsigned holds = a.world.hold_requests;
		a.world.all_out(r);
		fill_signature(0, 2 * page_size);
		a.reference.clear();
		a.fill = [](std::span<std::byte> b) { std::fill(b.begin(), b.end(), std::byte{0x33}); };
		a.post(op, 0, 0, 2 * page_size);
		for (int i = 0; i < 200 && !a.eng->ready(); ++i) {
			while (!a.world.queue.empty()) {
				/* nothing stays, but what is held */
				for (std::uint64_t p = 0; p < 16; ++p)
					a.world.page_taken(r, p);
				a.world.advance(0, ~0ULL, false);
				a.world.complete_one();
			}
			a.world.run_control();
			if (const auto d = a.eng->deadline()) {
				a.world.clock = *d;
				a.eng->step();
			}
		}
		EXPECT_EQ(a.poll(), 1U);
		EXPECT_EQ(a.world.hold_requests, holds + 1);
		EXPECT_TRUE(a.world.holds.empty());
		a.check_memory();
	}
}

/* Files on DAX or ext4, or for a while no memory, or too many holds. */
TEST_F(Engine, MemoryThatCannotBeHeldIsReadAndWrittenWithoutAHold)
{
	resolve();
	for (const auto op : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
		for (const rdma_np_status answer : {RDMA_NP_ADDRESS, RDMA_NP_NOMEM, RDMA_NP_BUSY}) {
			SCOPED_TRACE(testing::Message() << op << ' ' << answer);
			nanoseconds last = 0, pause = 0;
			unsigned pauses = 0;
			a.world.hold_answer = answer;
			a.world.hold_requests = a.world.fault_requests = 0;
			a.world.all_out(r);
			a.post(op, 0, 0, 2 * page_size);
			for (int i = 0; i < 1000; ++i) {
				lose_all();
				a.world.run_control();
				const auto d = a.eng->deadline();
				if (!d)
					continue;
				ASSERT_TRUE(a.world.queue.empty() && a.world.faults.empty()) << "no pause";
				pause = *d - a.world.clock;
				EXPECT_GE(pause, last);
				last = pause;
				++pauses;
				a.world.clock = *d;
				a.eng->step();
			}
			EXPECT_EQ(a.poll(), 0U);
			EXPECT_EQ(pause, 20'000'000U);
			EXPECT_GT(8 * pauses, a.world.fault_requests) << "pauses are few";
			if (answer == RDMA_NP_ADDRESS)
				EXPECT_EQ(a.world.hold_requests, 1U) << "it will not be held ever";
			else
				EXPECT_GT(a.world.hold_requests, 10U) << "it could be held again";
			/* the pressure ends */
			a.world.settle();
			EXPECT_EQ(a.poll(), 1U);
			a.check_memory();
		}
	}
}

TEST_F(Engine, HoldThatIsRefusedForAWhileEndsTheMatterLater)
{
	resolve();
	a.world.hold_answer = RDMA_NP_NOMEM;
	a.post(IBV_WR_RDMA_READ, 0, 0, 2 * page_size);
	a.post(IBV_WR_RDMA_WRITE, 0, 4 * page_size, 2 * page_size);
	for (int i = 0; i < 1000 && !a.world.ops.empty(); ++i) {
		if (a.world.hold_requests >= 5)
			a.world.hold_answer = RDMA_NP_OK;
		lose_all();
		a.world.run_control();
		if (const auto d = a.eng->deadline()) {
			a.world.clock = *d;
			a.eng->step();
		}
		a.poll();
	}
	EXPECT_TRUE(a.world.ops.empty());
	EXPECT_GT(a.world.hold_requests, 5U);
	EXPECT_TRUE(a.world.holds.empty());
	a.check_memory();
}

/* It waits for a hold as an atomic does, and then goes on as if nobody had asked for order. */
TEST(OrderedWrites, AreWrittenWithoutAHoldWhereThereIsNone)
{
	for (const rdma_np_status answer : {RDMA_NP_ADDRESS, RDMA_NP_NOMEM}) {
		engine_config c = small_config();
		c.ordered_writes = true;
		app b(c);
		b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.world.hold_answer = answer;
		b.post(IBV_WR_RDMA_WRITE, 0, 0, 3 * page_size);
		const nanoseconds begun = b.world.clock;
		b.world.settle();
		ASSERT_EQ(b.poll(), 1U);
		b.check_memory();
		EXPECT_EQ(b.world.clock - begun >= 10'000'000'000, answer == RDMA_NP_NOMEM);
	}
}

TEST(OrderedWrites, AskForAHoldAlsoWhereTheWordsAreKnown)
{
	engine_config c = small_config();
	c.ordered_writes = true;
	app b(c);
	b.world.add_region(0x100000, 16 * page_size, 0x100);
	b.world.lands_once = true;
	for (unsigned i = 1; i <= 3; ++i) {
		b.post(IBV_WR_RDMA_WRITE, 0, 0, 3 * page_size);
		b.world.settle();
		ASSERT_EQ(b.poll(), 1U);
		EXPECT_EQ(b.world.hold_requests, i);
	}
	b.check_memory();
}

TEST(OrderedWrites, WaitForAHoldWhileThePeerIsBusy)
{
	engine_config c = small_config();
	c.ordered_writes = true;
	app b(c);
	b.world.add_region(0x100000, 16 * page_size, 0x100);
	b.world.lands_once = true;
	b.world.hold_answer = RDMA_NP_BUSY;
	b.post(IBV_WR_RDMA_WRITE, 0, 0, 3 * page_size);
	for (int i = 0; i < 1000; ++i) {
		while (!b.world.queue.empty())
			b.world.complete_one();
		b.world.run_control();
		if (const auto d = b.eng->deadline()) {
			b.world.clock = *d;
			b.eng->step();
		}
		ASSERT_EQ(b.poll(), 0U);
	}
	b.world.hold_answer = RDMA_NP_OK;
	b.world.settle();
	EXPECT_EQ(b.poll(), 1U);
	b.check_memory();
}

TEST(OrderedWrites, WithImmediateLandOnce)
{
	for (const auto order : {RDMA_NP_READ_IN_ORDER, RDMA_NP_READ_UNKNOWN}) {
		engine_config c = small_config();
		c.ordered_writes = true;
		app b(c);
		b.world.add_region(0x100000, 16 * page_size, 0x100).info.read_order = static_cast<std::uint8_t>(order);
		b.world.lands_once = true;
		for (unsigned i = 1; i <= 3; ++i) {
			b.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 100, 3 * page_size);
			b.world.settle();
			ASSERT_EQ(b.poll(), 1U);
			EXPECT_EQ(b.world.hold_requests, i);
			EXPECT_EQ(b.world.writes, i);
			ASSERT_EQ(b.world.immediates.size(), i);
			EXPECT_EQ(b.world.immediates.back().second, 3 * page_size);
		}
		EXPECT_TRUE(b.world.holds.empty());
		b.check_memory();
	}
}

/* The hold may end with its region before the WRITE is executed, and only words from after it tell of that. */
TEST(OrderedWrites, WithImmediateAreProvenByWordsThatAreReadAfterThem)
{
	for (const auto order : {RDMA_NP_READ_IN_ORDER, RDMA_NP_READ_UNKNOWN}) {
		engine_config c = small_config();
		c.ordered_writes = true;
		app b(c);
		sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
		q.info.read_order = static_cast<std::uint8_t>(order);
		b.world.lands_once = true;
		b.eng->resolve_begins();
		b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
		q.known = true;
		b.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 0, 100);
		b.world.serve_fault(0);
		b.world.deliver(0);
		ASSERT_EQ(b.world.holds.size(), 1U);
		EXPECT_EQ(b.world.queue.size(), order == RDMA_NP_READ_IN_ORDER ? 2U : 1U);
		EXPECT_EQ(b.world.queue[0].wr.opcode, IBV_WR_RDMA_WRITE_WITH_IMM);
		EXPECT_EQ(b.poll(), 0U);
		b.world.settle();
		EXPECT_EQ(b.poll(), 1U);
		EXPECT_EQ(b.world.word_reads, 1U);
		EXPECT_TRUE(b.world.holds.empty());
		b.check_memory();
	}
}

/* Its words are READ after its completion. When it is known by then that the region is gone nobody knows where it went. */
TEST(OrderedWrites, WithImmediateIsNotSentAgainWhenItsRegionDies)
{
	for (const bool pinned : {false, true}) {
		engine_config c = small_config();
		c.ordered_writes = true;
		app b(c);
		b.expect_success = false;
		sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
		q.info.read_order = RDMA_NP_READ_UNKNOWN;
		b.world.lands_once = true;
		b.eng->resolve_begins();
		b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
		q.known = true;
		b.world.before_cqe = [&](sim &w) {
			if (q.gone || w.immediates.empty())
				return;
			(void)(pinned ? w.pin_region(q) : w.replace_region(q));
			w.deliver(w.events.size() - 1);
		};
		b.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 0, 100);
		b.world.settle();
		b.poll();
		ASSERT_EQ(b.completions.size(), 1U);
		EXPECT_EQ(b.completions[0].status, IBV_WC_REM_ACCESS_ERR);
		EXPECT_EQ(b.world.immediates.size(), 1U);
		EXPECT_EQ(b.world.writes, 1U);
	}
}

/* Under a lease nothing has to be asked, also behind one that waits for its receive. */
TEST(OrderedWrites, WithImmediateAreLeased)
{
	engine_config c = small_config();
	c.ordered_writes = c.leases = true;
	app b(c);
	b.world.add_region(0x100000, 16 * page_size, 0x100);
	b.world.lands_once = true;
	for (unsigned i = 0; i < 4; ++i) {
		b.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 100, 3 * page_size);
		b.world.settle();
		ASSERT_EQ(b.poll(), 1U);
	}
	const auto asked = b.world.hold_requests;
	for (unsigned i = 0; i < 4; ++i)
		b.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, i * page_size, page_size);
	EXPECT_EQ(b.world.queue.size(), 4U) << "all of them are under way";
	b.world.settle();
	EXPECT_EQ(b.poll(), 4U);
	EXPECT_EQ(b.world.hold_requests, asked);
	EXPECT_EQ(b.world.immediates.size(), 8U);
	b.check_memory();
}

/* Where no hold can be had, and where one hold does not do, it is proven and then sent again. */
TEST(OrderedWrites, WithImmediateAreHeardOnceInAnyCase)
{
	for (const std::uint64_t pages : {3U, 600U}) {
		engine_config c = small_config();
		c.ordered_writes = true;
		app b(c);
		b.world.add_region(0x100000, 1000 * page_size, 0x100);
		b.world.hold_answer = pages == 3 ? RDMA_NP_ADDRESS : RDMA_NP_OK;
		b.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 0, pages * page_size);
		b.world.settle();
		ASSERT_EQ(b.poll(), 1U);
		ASSERT_EQ(b.world.immediates.size(), 1U);
		EXPECT_EQ(b.world.immediates[0].second, pages * page_size);
		EXPECT_TRUE(b.world.holds.empty());
		b.check_memory();
	}
}

/* A READ that is to be held would be queued behind one that may wait for a receive. */
TEST(OrderedWrites, WithImmediateAreHeldWhenReadsHaveEnded)
{
	engine_config c = small_config();
	c.ordered_writes = true;
	app b(c);
	b.world.add_region(0x100000, 16 * page_size, 0x100);
	b.world.lands_once = true;
	b.post(IBV_WR_RDMA_WRITE, 0, page_size, 8);
	b.world.settle();
	ASSERT_EQ(b.poll(), 1U);
	const auto before = b.world.hold_requests;
	b.post(IBV_WR_RDMA_READ, 0, 0, 100);
	b.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, page_size, 8);
	b.world.run_control();
	EXPECT_EQ(b.world.hold_requests, before);
	b.world.settle();
	EXPECT_EQ(b.poll(), 2U);
	EXPECT_EQ(b.world.hold_requests, before + 1);
	EXPECT_EQ(b.world.immediates.size(), 1U);
	b.check_memory();
}

TEST_F(Engine, WhatHappensOnceFailsWithoutAHold)
{
	for (const auto &[answer, status] : {std::pair{RDMA_NP_ADDRESS, IBV_WC_REM_ACCESS_ERR},
					     std::pair{RDMA_NP_NOMEM, IBV_WC_REM_OP_ERR}}) {
		app b(small_config());
		b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.world.hold_answer = answer;
		b.expect_success = false;
		b.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 0, 8);
		const nanoseconds begun = b.world.clock;
		b.world.settle();
		ASSERT_EQ(b.poll(), 1U);
		EXPECT_EQ(b.completions.back().status, status);
		/* Where there is no memory there may be some soon. */
		EXPECT_EQ(b.world.clock - begun >= 10'000'000'000, answer == RDMA_NP_NOMEM);
	}
}

TEST_F(Engine, WhatHappensOnceWaitsForMemory)
{
	resolve();
	a.world.hold_answer = RDMA_NP_NOMEM;
	a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 0, 8);
	while (a.world.clock < 9'000'000'000) {
		while (!a.world.queue.empty())
			a.world.complete_one();
		a.world.run_control();
		const auto d = a.eng->deadline();
		ASSERT_TRUE(d) << "it waits for nothing";
		a.world.clock = *d;
		a.eng->step();
		ASSERT_EQ(a.poll(), 0U);
	}
	EXPECT_GT(a.world.hold_requests, 5U);
	a.world.hold_answer = RDMA_NP_OK;
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_TRUE(a.world.holds.empty());
	a.check_memory();
}

TEST_F(Engine, HoldThatEndedWithItsRegionIsNotTrusted)
{
	resolve();
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 100);
	lose_until_held();
	a.world.serve_fault(0);
	a.world.deliver(0);
	/* granted, posted: now the region is registered anew, with other keys */
	a.world.replace_region(r);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	a.check_memory();
}

TEST_F(Engine, InlineDataIsKeptForRepeats)
{
	resolve();
	a.post(IBV_WR_RDMA_WRITE, 0, 10, 100, signaled | IBV_SEND_INLINE, 3);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	a.check_memory(); /* the caller's buffer was overwritten at once */
}

/* --- read-ahead ------------------------------------------------------------ */

struct ReadAhead : ::testing::Test {
	ReadAhead() : a(small_config()), r(a.world.add_region(0x7f0000000200, 400 * page_size, 0x100))
	{
		a.eng->resolve_begins();
		a.eng->resolve_ended(r.rkey, 0, r.info, a.world.now());
	}

	void read(std::uint64_t page, std::uint64_t n)
	{
		a.post(IBV_WR_RDMA_READ, 0, page * page_size, n);
		a.world.settle();
		EXPECT_EQ(a.poll(), 1U);
	}

	app a;
	sim_region &r;
};

TEST_F(ReadAhead, SequentialReadsMissLessAndLess)
{
	for (unsigned i = 3; i < 399; ++i)
		read(i, page_size);
	/* 399 pages in windows that double each time: of the misses there are few */
	EXPECT_LE(a.eng->stats().suspicious_pages, 20U);
	EXPECT_GE(a.eng->stats().read_ahead, 300U);
	EXPECT_LE(a.world.fault_requests, 40U);
}

TEST_F(ReadAhead, ReadsHereAndThereAskForNothingMore)
{
	for (unsigned i = 0; i < 50; ++i)
		read(10 + i * 149 % 389 / 40 * 40, 100);
	EXPECT_EQ(a.eng->stats().read_ahead, 0U);
}

/* As if the answer were still on its way: the pages are not there when they are wanted. */
TEST_F(ReadAhead, GoesOnBehindWhatItHasOvertaken)
{
	read(0, 100);
	read(1, 100);
	EXPECT_EQ(a.eng->stats().read_ahead, 2U);
	a.world.all_out(r);
	read(2, 100);
	read(3, 100);
	EXPECT_EQ(a.eng->stats().read_ahead, 2U);
	read(4, 100);
	EXPECT_EQ(a.eng->stats().read_ahead, 6U);
	/* Before all of that is elsewhere */
	a.world.all_out(r);
	read(1, 100);
	read(2, 100);
	EXPECT_EQ(a.eng->stats().read_ahead, 8U);
}

TEST_F(ReadAhead, EndsWithTheRegion)
{
	read(0, page_size);
	for (unsigned i = 1; i < 400; ++i)
		read(i, i < 399 ? page_size : page_size);
	for (const auto &ranges : a.world.fault_log)
		for (const rdma_np_range &range : ranges)
			EXPECT_LE(range.addr + range.length, r.info.base + r.info.length);
}

TEST_F(ReadAhead, WritesAndDeadRegionsHaveNone)
{
	for (unsigned i = 3; i < 60; ++i) {
		a.post(IBV_WR_RDMA_WRITE, 0, i * page_size, page_size);
		a.world.settle();
		a.poll();
	}
	EXPECT_EQ(a.eng->stats().read_ahead, 0U);
	sim_region &n = a.world.replace_region(r);
	a.world.settle();
	for (unsigned i = 3; i < 20; ++i)
		read(i, page_size);
	EXPECT_GT(a.eng->stats().read_ahead, 0U);
	EXPECT_FALSE(n.gone);
	a.check_memory();
}

/* --- exactly once --------------------------------------------------------- */

TEST_F(Engine, AtomicIsDoneOnceUnderAHold)
{
	resolve();
	for (const auto op : {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP}) {
		a.world.all_out(r);
		const unsigned holds = a.world.hold_requests;
		a.post(op, 0, 64, 8);
		EXPECT_TRUE(a.world.queue.empty()) << "not before the hold";
		a.world.settle();
		EXPECT_EQ(a.poll(), 1U);
		EXPECT_EQ(a.world.hold_requests, holds + 1);
		EXPECT_TRUE(a.world.holds.empty());
	}
	EXPECT_EQ(a.world.writes, 2U);
	EXPECT_EQ(a.eng->stats().atomics, 2U);
	a.check_memory();
}

/* The hold's own page is what a pinned region would have changed, too. */
TEST_F(Engine, PageTakenByItsOwnerUnderTheHoldIsNoFailure)
{
	resolve();
	for (const auto op : {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP}) {
		const unsigned writes = a.world.writes;
		a.post(op, 0, 128, 8);
		a.world.serve_fault(0);
		a.world.deliver(0);
		a.world.page_taken(r, 0);
		a.world.run_wire();
		ASSERT_EQ(a.world.faults.size(), 1U) << "the peer is asked whether the region lives";
		EXPECT_FALSE(a.world.faults[0].req.flags & RDMA_NP_FAULT_HOLD);
		EXPECT_TRUE(a.world.holds.empty()) << "or it would wait for ours";
		a.world.serve_fault(0, RDMA_NP_BUSY);
		a.world.deliver(0);
		EXPECT_EQ(a.poll(), 0U);
		a.world.settle();
		EXPECT_EQ(a.poll(), 1U);
		EXPECT_EQ(a.world.writes, writes + 1);
		EXPECT_TRUE(a.world.holds.empty());
	}
	a.check_memory();
}

TEST_F(Engine, OnceIsNotTriedAgainWhenNobodyKnowsWhetherItHappened)
{
	for (const bool told : {false, true}) {
		app b(small_config());
		sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.expect_success = false;
		b.eng->resolve_begins();
		b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
		q.known = true;
		b.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 0, 8);
		b.world.serve_fault(0);
		b.world.deliver(0);
		ASSERT_EQ(b.world.queue.size(), 2U);
		b.world.replace_region(q);
		if (told)
			b.world.deliver(0);
		b.world.settle();
		b.poll();
		ASSERT_EQ(b.completions.size(), 1U);
		EXPECT_EQ(b.completions[0].status, IBV_WC_REM_ACCESS_ERR);
		EXPECT_TRUE(b.world.qp_error);
		EXPECT_EQ(b.world.writes, 1U);
	}
}

TEST_F(Engine, RegionThatDiesBeforeAnAtomicIsPostedIsLookedUpAgain)
{
	resolve();
	a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 0, 8);
	a.world.serve_fault(0);
	a.world.replace_region(r);
	/* the region is gone when the hold arrives */
	a.world.deliver(1);
	a.world.deliver(0);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.world.writes, 1U);
	a.check_memory();
}

/* The words are not to be read before the atomic is done, and a READ may overtake one. */
TEST_F(Engine, WordsBehindAnAtomicAreFenced)
{
	resolve();
	a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 0, 8);
	a.world.serve_fault(0);
	a.world.deliver(0);
	ASSERT_EQ(a.world.queue.size(), 2U);
	EXPECT_FALSE(a.world.advance(1, ~0ULL, false));
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

TEST_F(Engine, NothingOvertakesWhatHappensOnce)
{
	for (const bool relaxed : {false, true}) {
		engine_config c = small_config();
		c.relaxed = relaxed;
		app b(c);
		sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.eng->resolve_begins();
		b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
		b.world.all_in(q, true);
		for (const auto op : {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP}) {
			/* it waits for what is not proven yet ... */
			b.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
			b.world.run_wire();
			b.poll();
			b.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
			b.post(op, 0, page_size, 8);
			EXPECT_TRUE(b.world.faults.empty());
			b.world.run_wire();
			ASSERT_EQ(b.world.faults.size(), 1U);
			/* ... and all else waits for it */
			for (const auto next : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_SEND})
				b.post(next, 0, 2 * page_size, 8);
			EXPECT_TRUE(b.world.queue.empty());
			b.world.serve_fault(0);
			b.world.deliver(0);
			EXPECT_EQ(b.world.queue.size(), 2U);
			b.world.settle();
			EXPECT_EQ(b.poll(), 5U);
		}
		/* and so with a WRITE with immediate */
		b.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
		b.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, page_size, 8);
		for (const auto next : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_SEND})
			b.post(next, 0, 2 * page_size, 8);
		while (b.world.immediates.empty()) {
			ASSERT_FALSE(b.world.queue.empty());
			for (const sim::wire &w : b.world.queue)
				EXPECT_TRUE(w.wr.opcode != IBV_WR_SEND &&
					    (w.wr.wr.rdma.remote_addr & 0xffff) != 2 * page_size);
			EXPECT_LE(b.world.queue.size(), 2U);
			b.world.advance(0, ~0ULL, false);
			b.world.complete_one();
		}
		b.world.settle();
		EXPECT_EQ(b.poll(), 5U);
		b.check_memory();
	}
}

/* The SEND may wait for a receive for longer than the peer lets a hold live. */
TEST_F(Engine, AtomicBehindASendIsHeldForWhenThatIsDone)
{
	resolve();
	for (unsigned i = 1; i <= 3; ++i) {
		a.post(IBV_WR_SEND, 0, 0, 0, 0);
		a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 0, 8);
		ASSERT_EQ(a.world.queue.size(), 2U);
		a.world.advance(1, ~0ULL, false);
		EXPECT_FALSE(a.world.complete_one());
		EXPECT_EQ(a.world.hold_requests, i - 1);
		a.world.run_wire();
		EXPECT_EQ(a.world.hold_requests, i);
		a.world.settle();
		EXPECT_EQ(a.poll(), 1U);
	}
	/* which is known at once if its completion was there before */
	a.post(IBV_WR_SEND, 0, 0, 0);
	a.world.run_wire();
	a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 0, 8);
	EXPECT_TRUE(a.world.queue.empty());
	EXPECT_EQ(a.world.hold_requests, 4U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
	a.check_memory();
}

TEST_F(Engine, SendWaitsForAReadThatIsToBeHeld)
{
	resolve();
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	lose_until_held();
	a.post(IBV_WR_SEND, 0, 0, 0);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	EXPECT_TRUE(a.world.queue.empty());
	a.world.serve_fault(0);
	a.world.deliver(0);
	ASSERT_EQ(a.world.queue.size(), 1U);
	a.world.run_wire();
	a.world.settle();
	EXPECT_EQ(a.poll(), 3U);
	EXPECT_TRUE(a.world.holds.empty());
}

TEST_F(Engine, ImmediateWaitsForAReadThatIsToBeHeld)
{
	resolve();
	a.world.page_in(r, 1, true);
	a.post(IBV_WR_RDMA_WRITE, 0, page_size, 8);
	a.world.settle();
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	a.world.run_wire();
	a.world.serve_fault(0);
	a.world.deliver(0);
	a.world.page_out(r, 0);
	a.world.advance(0, ~0ULL, false);
	a.world.complete_one();
	ASSERT_EQ(a.world.queue.size(), 1U) << "the word that says that it is absent";
	a.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, page_size, 8);
	ASSERT_EQ(a.world.queue.size(), 3U);
	a.world.run_wire();
	/* It is proven, and the receiver does not hear of it yet. */
	EXPECT_EQ(a.world.hold_requests, 1U);
	EXPECT_TRUE(a.world.immediates.empty());
	a.world.serve_fault(0);
	a.world.deliver(0);
	ASSERT_EQ(a.world.queue.size(), 1U);
	EXPECT_EQ(a.world.queue[0].wr.opcode, IBV_WR_RDMA_READ);
	a.world.settle();
	EXPECT_EQ(a.poll(), 3U);
	EXPECT_EQ(a.world.immediates.size(), 1U);
	EXPECT_TRUE(a.world.holds.empty());
	a.check_memory();
}

TEST_F(Engine, WriteWithImmediateIsHeardOnceWithItsLength)
{
	resolve();
	a.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 100, 3 * page_size, signaled, 3);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	ASSERT_EQ(a.world.immediates.size(), 1U);
	EXPECT_EQ(a.world.immediates[0].second, 3 * page_size);
	EXPECT_EQ(a.world.writes, 2U);
	EXPECT_EQ(a.world.hold_requests, 0U) << "it may wait for a receive";
	a.check_memory();
}

/* Its data is proven, then it is sent again with the immediate. */
TEST_F(Engine, LongWriteWithImmediateIsHeardOnceWhenAllOfItIsThere)
{
	app b(small_config());
	const std::uint64_t length = 1300 * page_size;
	sim_region &q = b.world.add_region(0x100000, 2000 * page_size, 0x100);
	b.eng->resolve_begins();
	b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
	b.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 5000, length);
	for (int i = 0; i < 2000 && b.world.immediates.empty(); ++i) {
		const bool last = !b.world.queue.empty() &&
				  b.world.queue.back().wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
		if (last) {
			b.check_memory();
			/* nobody needs to find it there any more */
			b.world.all_out(q);
		}
		while (!b.world.queue.empty()) {
			b.world.advance(0, ~0ULL, false);
			b.world.complete_one();
			if (b.world.dice(4) == 0)
				b.world.page_out(q, b.world.dice(q.pages.size()));
		}
		b.world.run_control();
	}
	EXPECT_EQ(b.poll(), 1U);
	ASSERT_EQ(b.world.immediates.size(), 1U);
	EXPECT_EQ(b.world.immediates[0].second, length);
	b.check_memory();
}

TEST_F(Engine, LongWriteWithImmediateToADeadRegionIsNotHeard)
{
	app b(small_config());
	b.expect_success = false;
	sim_region &q = b.world.add_region(0x100000, 600 * page_size, 0x100);
	b.eng->resolve_begins();
	b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
	q.known = true;
	b.world.all_in(q, true);
	b.world.before_cqe = [&](sim &w) {
		/* as the last proof arrives */
		if (!q.gone && w.queue.empty() && w.writes >= 2) {
			w.replace_region(q);
			w.deliver(w.events.size() - 1);
		}
	};
	b.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 0, 600 * page_size);
	b.world.settle();
	b.poll();
	ASSERT_EQ(b.completions.size(), 1U);
	EXPECT_EQ(b.completions[0].status, IBV_WC_REM_ACCESS_ERR);
	EXPECT_TRUE(b.world.immediates.empty());
}

/* --- local buffers in unpinned regions -------------------------------------- */

TEST_F(Engine, LocalBuffersAreHeldFromThePostUntilTheCompletionIsPolled)
{
	resolve();
	a.world.all_in(r, true);
	a.chance_local = 100;
	for (const auto op : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_SEND, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
		a.post(op, 0, 0, 8);
		ASSERT_EQ(a.world.local_holds.size(), 1U);
		EXPECT_EQ(a.world.local_holds.begin()->second.write,
			  op == IBV_WR_RDMA_READ || op == IBV_WR_ATOMIC_FETCH_AND_ADD);
		a.world.settle();
		EXPECT_EQ(a.world.local_holds.size(), 1U);
		EXPECT_EQ(a.poll(), 1U);
		EXPECT_TRUE(a.world.local_holds.empty());
	}
	a.check_memory();
}

/* They are as many regions, if it comes to that. */
TEST_F(Engine, EveryLocalBufferHasAHoldOfItsOwn)
{
	resolve();
	a.world.all_in(r, true);
	a.chance_local = 100;
	a.post(IBV_WR_RDMA_READ, 0, 0, 1000, signaled, 4);
	ASSERT_EQ(a.world.queue.size(), 1U);
	const auto &sges = a.world.queue[0].sges;
	EXPECT_GT(sges.size(), 1U);
	EXPECT_EQ(a.world.local_holds.size(), sges.size());
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_TRUE(a.world.local_holds.empty());
}

TEST_F(Engine, InlineDataNeedsNoHold)
{
	resolve();
	a.chance_local = 100;
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 100, signaled | IBV_SEND_INLINE);
	EXPECT_TRUE(a.world.local_holds.empty());
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	a.check_memory();
}

TEST_F(Engine, LocalBufferThatCannotBeHeldIsRefusedAndNothingStaysHeld)
{
	resolve();
	a.chance_local = 100;
	std::byte buffer[64];
	ibv_sge s[2] = {{reinterpret_cast<std::uintptr_t>(buffer), 32, pinned_lkey},
			{reinterpret_cast<std::uintptr_t>(buffer) + 32, 32, local_lkey}};
	ibv_send_wr wr[2]{}, *bad = nullptr;
	for (int i = 0; i < 2; ++i) {
		wr[i].sg_list = s;
		wr[i].num_sge = 2;
		wr[i].opcode = IBV_WR_SEND;
		wr[i].send_flags = signaled;
	}
	wr[0].next = &wr[1];
	a.world.local_error = -EFAULT;
	EXPECT_EQ(a.eng->post_send(wr, &bad), -EFAULT);
	EXPECT_EQ(bad, &wr[0]);
	EXPECT_TRUE(a.world.queue.empty());
	EXPECT_TRUE(a.world.local_holds.empty());
	/* not ours after all: the HCA sees the key that it was given */
	a.world.local_error = backend::no_hold;
	wr[0].next = nullptr;
	EXPECT_EQ(a.eng->post_send(wr, &bad), 0);
	ASSERT_EQ(a.world.queue.size(), 1U);
	EXPECT_EQ(a.world.queue[0].sges[1].lkey, local_lkey);
	a.eng->abandon();
}

/* What is posted as it is, and completes, goes the quick way with its local buffers, too. */
TEST_F(Engine, LocalBuffersAreHeldOnTheQuickWay)
{
	a.world.quick = true;
	a.chance_local = 100;
	resolve();
	for (int i = 0; i < 3; ++i)
		a.post(IBV_WR_SEND, 0, 0, 64, 0, 2);
	EXPECT_EQ(a.world.local_holds.size(), 6U);
	a.post(IBV_WR_SEND, 0, 0, 64, signaled, 2);
	ASSERT_EQ(a.world.queue.size(), 4U);
	for (const sim::wire &w : a.world.queue)
		for (const ibv_sge &s : w.sges)
			EXPECT_EQ(s.lkey, held_lkey);
	EXPECT_EQ(a.eng->stats().slow, 0U);
	a.world.run_wire();
	EXPECT_EQ(a.world.quick_ends, 1U);
	EXPECT_TRUE(a.world.local_holds.empty());
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_TRUE(a.eng->idle());

	EXPECT_EQ(a.pool.used(), 0U) << "credits that nobody gave back";

	/* The second buffer of a request cannot be held: then the first one is not, either. */
	std::byte buffer[64];
	ibv_sge s[2] = {{reinterpret_cast<std::uintptr_t>(buffer), 32, local_lkey},
			{reinterpret_cast<std::uintptr_t>(buffer) + 32, 32, local_lkey}};
	ibv_send_wr wr{}, *bad = nullptr;
	wr.sg_list = s;
	wr.num_sge = 2;
	wr.opcode = IBV_WR_SEND;
	a.world.local_errors_from = 1;
	EXPECT_EQ(a.eng->post_send(&wr, &bad), -EFAULT);
	EXPECT_EQ(bad, &wr);
	EXPECT_TRUE(a.world.local_holds.empty());
	EXPECT_TRUE(a.eng->idle());
}

/* --- the hot path -------------------------------------------------------- */

TEST_F(Engine, HotIsWhatIsLikeTheLast)
{
	a.world.quick = true;
	resolve();
	for (int i = 0; i < 3; ++i)
		a.post(IBV_WR_SEND, 0, 0, 64);
	EXPECT_EQ(a.world.hot_posts, 2U) << "the first one opens it";
	a.world.run_wire();
	EXPECT_EQ(a.world.hot_ends, 3U);
	EXPECT_EQ(a.poll(), 3U);
	EXPECT_EQ(a.eng->stats().passed, 3U);

	/* Whatever else is called closes it. */
	a.eng->step();
	a.post(IBV_WR_SEND, 0, 0, 64);
	EXPECT_EQ(a.world.hot_posts, 2U);
	a.post(IBV_WR_SEND, 0, 0, 64);
	EXPECT_EQ(a.world.hot_posts, 3U);
	/* A READ that has to be proven, and what is behind it. */
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.post(IBV_WR_SEND, 0, 0, 64);
	a.post(IBV_WR_SEND, 0, 0, 64);
	EXPECT_EQ(a.world.hot_posts, 3U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 5U);
	EXPECT_TRUE(a.eng->idle());
	EXPECT_EQ(a.pool.used(), 0U);
}

/* Its region is gone, and an unpinned one has the key. */
TEST_F(Engine, HotBufferWhoseKeyIsAnotherRegionsByNowIsHeld)
{
	a.world.quick = true;
	resolve();
	for (int i = 0; i < 3; ++i)
		a.post(IBV_WR_SEND, 0, 0, 64);
	EXPECT_EQ(a.world.hot_posts, 2U);
	EXPECT_TRUE(a.world.local_holds.empty());
	std::byte buffer[64];
	ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer), 64, local_lkey};
	ibv_send_wr wr{};
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.opcode = IBV_WR_SEND;
	wr.send_flags = IBV_SEND_SIGNALED;
	EXPECT_FALSE(a.eng->post_hot(wr, [] { return false; }) || a.eng->post_other(wr)) << "a key of a region of ours";
	for (int i = 0; i < 2; ++i)
		a.post(IBV_WR_SEND, 0, 0, 64);
	EXPECT_EQ(a.world.hot_posts, 4U);
	a.world.unpinned_later = pinned_lkey;
	++a.world.local_keys;
	a.post(IBV_WR_SEND, 0, 0, 64);
	EXPECT_EQ(a.world.local_holds.size(), 1U);
	EXPECT_EQ(a.world.queue.back().sges[0].lkey, held_lkey);
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 6U);
	EXPECT_TRUE(a.world.local_holds.empty());
}

/* Only what is the same is taken to be, and each gets its own number and flags back. */
TEST_F(Engine, HotRequestsMayDiffer)
{
	a.world.quick = true;
	resolve();
	a.post(IBV_WR_SEND, 0, 0, 64);
	const auto post = [&](ibv_wr_opcode op, std::uint32_t length, unsigned flags, int sges = 1) {
		const std::uint64_t hot = a.world.hot_posts;
		a.post(op, 0, 0, length, flags, sges);
		const ibv_send_wr &w = a.world.queue.back().wr;
		EXPECT_EQ(w.opcode, op);
		EXPECT_EQ(w.send_flags & ~unsigned{IBV_SEND_SIGNALED}, flags & ~unsigned{IBV_SEND_SIGNALED});
		EXPECT_EQ(a.world.queue.back().length, length);
		return a.world.hot_posts != hot;
	};
	for (int round = 0; round < 2; ++round) {
		EXPECT_EQ(post(IBV_WR_SEND, 64, IBV_SEND_SIGNALED), !round) << "app::poll() closes it";
		EXPECT_TRUE(post(IBV_WR_SEND, 65, IBV_SEND_SIGNALED)) << "longer";
		EXPECT_TRUE(post(IBV_WR_SEND, 1, IBV_SEND_SIGNALED)) << "shorter";
		EXPECT_TRUE(post(IBV_WR_SEND, 64, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED));
		EXPECT_TRUE(post(IBV_WR_SEND, 64, 0)) << "silent";
		EXPECT_TRUE(post(IBV_WR_SEND, 64, 0));
		EXPECT_TRUE(post(IBV_WR_SEND, 64, IBV_SEND_SIGNALED));
		EXPECT_TRUE(post(IBV_WR_SEND_WITH_IMM, 64, IBV_SEND_SIGNALED));
		EXPECT_FALSE(post(IBV_WR_SEND_WITH_IMM, 64, IBV_SEND_SIGNALED | IBV_SEND_FENCE));
		EXPECT_FALSE(post(IBV_WR_SEND_WITH_IMM, 64, IBV_SEND_SIGNALED, 2));
		a.world.run_wire();
		EXPECT_EQ(a.poll(), round ? 8U : 9U);
		EXPECT_TRUE(a.eng->idle());
		EXPECT_EQ(a.pool.used(), 0U);
	}
	EXPECT_EQ(a.eng->stats().passed, 21U);
}

TEST_F(Engine, HotPathHasAsMuchRoomAsTheQueue)
{
	engine_config c = small_config();
	c.sq_budget = 4 * c.depth;
	for (int tight = 0; tight < 2; ++tight, c.sq_budget = c.depth / 2) {
		app b(c);
		b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.world.quick = true;
		b.world.budget = c.sq_budget;
		b.expect_success = false;
		const std::uint32_t room = std::min(c.depth, c.sq_budget);
		for (int round = 0; round < 3; ++round) {
			for (std::uint32_t i = 0; i < room; ++i)
				b.post(IBV_WR_SEND, 0, 0, 64);
			EXPECT_EQ(b.world.queue.size(), room);
			b.post(IBV_WR_SEND, 0, 0, 64);
			EXPECT_EQ(b.world.queue.size(), room) << "there is no room for it";
			b.world.settle();
			EXPECT_GE(b.poll(), room);
			EXPECT_TRUE(b.eng->idle());
		}
		EXPECT_GE(b.world.hot_posts, 2 * room);
	}
}

TEST_F(Engine, HotRequestThatTheProviderRefusesFails)
{
	a.world.quick = true;
	a.expect_success = false;
	resolve();
	a.post(IBV_WR_SEND, 0, 0, 64);
	a.world.refuse_post_after = 0;
	a.post(IBV_WR_SEND, 0, 0, 64);
	EXPECT_EQ(a.world.hot_posts, 1U);
	EXPECT_TRUE(a.world.qp_error);
	a.world.settle();
	ASSERT_EQ(a.poll(), 2U);
	EXPECT_EQ(a.completions[0].status, IBV_WC_WR_FLUSH_ERR);
	EXPECT_EQ(a.completions[1].status, IBV_WC_LOC_QP_OP_ERR);
	EXPECT_TRUE(a.eng->idle());
	EXPECT_EQ(a.pool.used(), 0U);
}

TEST_F(Engine, HotRequestsThatFailAreToldInOrder)
{
	a.world.quick = true;
	a.expect_success = false;
	resolve();
	for (int i = 0; i < 4; ++i)
		a.post(IBV_WR_SEND, 0, 0, 64);
	a.world.run_wire_first();
	a.world.fail_qp();
	a.world.settle();
	ASSERT_EQ(a.poll(), 4U);
	EXPECT_EQ(a.completions[0].status, IBV_WC_SUCCESS);
	for (std::size_t i = 1; i < 4; ++i)
		EXPECT_EQ(a.completions[i].status, IBV_WC_WR_FLUSH_ERR);
	EXPECT_TRUE(a.eng->idle());
}

/* The quick way is that of the oldest request: others wait for what is before them. */
TEST_F(Engine, CompletionBehindAReadThatIsRepeatedIsNotToldFirst)
{
	a.world.quick = true;
	resolve();
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.post(IBV_WR_SEND, 0, 0, 0);
	ASSERT_EQ(a.world.queue.size(), 2U);
	a.world.run_wire();
	EXPECT_EQ(a.world.quick_ends, 0U);
	EXPECT_EQ(a.poll(), 0U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
	a.check_memory();

	/* Nor is it if that one has ended, and was not polled; whether it is brief or not. */
	for (const bool brief : {true, false}) {
		a.world.quick = false;
		a.post(IBV_WR_SEND, 0, 0, 0);
		a.world.run_wire();
		ASSERT_TRUE(a.eng->ready());
		a.world.quick = true;
		a.post(IBV_WR_SEND, 0, 0, 0);
		if (!brief)
			a.eng->step();
		a.world.run_wire();
		EXPECT_EQ(a.world.quick_ends, 0U);
		EXPECT_EQ(a.poll(), 2U);
		EXPECT_TRUE(a.eng->idle());
	}
}

TEST_F(Engine, QueueWithoutAnswersPassesAllOnAndHoldsItsBuffers)
{
	engine_config c = small_config();
	c.local_only = true;
	app b(c);
	b.world.add_region(0x100000, 16 * page_size, 0x100);
	b.chance_local = 100;
	b.expect_success = false;
	/* a remote key is nobody's but the HCA's */
	for (const auto op : {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_SEND}) {
		b.post(op, 0, 0, 8, 0);
		ASSERT_EQ(b.world.queue.size(), 1U);
		EXPECT_EQ(b.world.queue[0].sges[0].lkey, held_lkey);
		/* so that nothing has to be posted to a dead queue */
		EXPECT_TRUE(b.world.queue[0].wr.send_flags & IBV_SEND_SIGNALED);
		b.world.queue.pop_front();
	}
	EXPECT_TRUE(b.world.resolves.empty());
	b.eng->abandon();
}

/* The application revives the QP; what the error took with it is told all the same, before or after. */
TEST_F(Engine, QueueWithoutAnswersGoesOnAfterAnError)
{
	for (const bool told_first : {true, false}) {
		engine_config c = small_config();
		c.local_only = true;
		c.sq_budget = 4;
		app b(c);
		b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.expect_success = false;
		b.post(IBV_WR_SEND, 0, 0, 8, 0);
		b.post(IBV_WR_SEND, 0, 0, 8);
		b.world.run_wire();
		EXPECT_EQ(b.poll(), 1U);

		/* four have room, two wait */
		b.world.fail_send = IBV_WC_LOC_PROT_ERR;
		for (int i = 0; i < 6; ++i)
			b.post(IBV_WR_SEND, 0, 0, 8, i % 2 ? signaled : 0);
		ASSERT_EQ(b.world.queue.size(), 4U);
		for (std::size_t i = 0; i < 4; ++i)
			b.world.advance(i, ~0ULL, false);
		ASSERT_TRUE(b.world.complete_one());
		if (told_first)
			b.world.run_wire();
		b.world.qp_error = false;
		b.post(IBV_WR_SEND, 0, 0, 8, 0);
		b.post(IBV_WR_SEND, 0, 0, 8);
		b.world.run_wire();
		b.poll();

		ASSERT_EQ(b.completions.size(), 8U);
		EXPECT_EQ(b.completions[1].status, IBV_WC_LOC_PROT_ERR);
		for (std::size_t i = 2; i < 7; ++i)
			EXPECT_EQ(b.completions[i].status, IBV_WC_WR_FLUSH_ERR) << i;
		EXPECT_EQ(b.completions[7].status, IBV_WC_SUCCESS);
		EXPECT_TRUE(b.eng->idle());
	}
}

TEST_F(Engine, AbandonedRequestsGiveBackTheirBuffers)
{
	resolve();
	a.chance_local = 100;
	for (int i = 0; i < 5; ++i)
		a.post(IBV_WR_RDMA_READ, 0, 0, 100, 0, 3);
	EXPECT_FALSE(a.world.local_holds.empty());
	a.eng->abandon();
	EXPECT_TRUE(a.world.local_holds.empty());
}

/* --- order and completions ----------------------------------------------- */

TEST_F(Engine, NothingIsPostedBehindAnUnprovenWrite)
{
	resolve();
	a.world.all_in(r, true);
	for (const auto next : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND}) {
		a.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
		a.world.settle();
		a.poll();
		a.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
		EXPECT_EQ(a.world.queue.size(), 2U);
		a.post(next, 0, page_size, 8);
		EXPECT_EQ(a.world.queue.size(), 2U) << next;
		a.world.settle();
		EXPECT_EQ(a.poll(), 2U);
	}
}

TEST_F(Engine, RelaxedOrderPipelinesWritesButNotASend)
{
	engine_config c = small_config();
	c.relaxed = true;
	app b(c);
	sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
	b.world.all_in(q, true);
	b.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
	b.world.settle();
	b.poll();
	b.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
	b.post(IBV_WR_RDMA_WRITE, 0, 100, 8);
	b.post(IBV_WR_RDMA_READ, 0, 5000, 8);
	EXPECT_EQ(b.world.queue.size(), 5U);
	b.post(IBV_WR_SEND, 0, 0, 0);
	EXPECT_EQ(b.world.queue.size(), 5U);
	b.world.settle();
	EXPECT_EQ(b.poll(), 4U);
}

TEST_F(Engine, ReadsAreNotDelayedByASuspiciousRead)
{
	resolve();
	a.world.all_in(r, false);
	a.world.page_out(r, 0);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	a.world.run_wire();
	a.post(IBV_WR_RDMA_READ, 0, page_size, 8);
	EXPECT_EQ(a.world.queue.size(), 1U);
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 0U) << "in order all the same";
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
}

TEST_F(Engine, FenceWaitsForASuspiciousRead)
{
	resolve();
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	a.world.run_wire();
	a.post(IBV_WR_SEND, 0, 0, 0, signaled | IBV_SEND_FENCE);
	EXPECT_TRUE(a.world.queue.empty());
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
}

TEST_F(Engine, UnsignaledRequestsLeaveNoCompletionAndNoTrace)
{
	resolve();
	a.world.all_in(r, true);
	for (int i = 0; i < 100; ++i) {
		a.post(i % 2 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, 0, 0, 8, 0);
		ASSERT_EQ(a.last_rc, 0);
		a.world.settle();
		EXPECT_EQ(a.poll(), 0U);
	}
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

TEST_F(Engine, UnsignaledSendsAreSignaledNowAndThenSoThatTheQueueMoves)
{
	/* quickly, and with buffers that are to be held */
	for (const unsigned local : {0U, 100U}) {
		a.chance_local = local;
		for (int i = 0; i < 200; ++i) {
			a.post(IBV_WR_SEND, 0, 0, 8, 0);
			ASSERT_EQ(a.last_rc, 0) << i;
			a.world.run_wire();
		}
	}
	EXPECT_EQ(a.poll(), 0U);
}

TEST_F(Engine, CompletionsOfOthersAreLeftAlone)
{
	resolve();
	a.world.all_in(r, false);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	ibv_wc wc{};
	wc.wr_id = a.world.queue[0].wr.wr_id;
	wc.opcode = IBV_WC_RECV;
	EXPECT_FALSE(a.eng->on_cqe(wc)) << "a receive that has our wr_id";
	wc.opcode = IBV_WC_SEND;
	wc.wr_id ^= 1ULL << 40;
	EXPECT_FALSE(a.eng->on_cqe(wc)) << "another tag";
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

TEST_F(Engine, ErrorsBeforeItDoNotDisturbARequestThatIsEarlier)
{
	a.expect_success = false;
	resolve();
	a.world.all_in(r, false);
	a.world.page_out(r, 0);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);	      /* will be repaired */
	a.world.run_wire();
	r.info.write_key = 0;			      /* next: a WRITE that is not allowed */
	a.world.regions.front().info.access = IBV_ACCESS_REMOTE_READ;
	resolve();
	std::byte byte{};
	ibv_sge s{reinterpret_cast<std::uintptr_t>(&byte), 1, 0};
	ibv_send_wr wr{}, *bad;
	wr.wr_id = 99;
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.opcode = IBV_WR_RDMA_READ;
	wr.wr.rdma.rkey = r.rkey;
	wr.wr.rdma.remote_addr = r.info.base - 1;
	ASSERT_EQ(a.eng->post_send(&wr, &bad), 0);
	EXPECT_FALSE(a.world.qp_error) << "not while an earlier one is under way";
	a.world.settle();
	ibv_wc wc;
	ASSERT_TRUE(a.eng->poll(wc));
	EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
	ASSERT_TRUE(a.eng->poll(wc));
	EXPECT_EQ(wc.wr_id, 99U);
	EXPECT_EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
	EXPECT_TRUE(a.world.qp_error);
}

TEST_F(Engine, UnsignaledRequestThatWasDoneBeforeAFailureIsNoFailure)
{
	resolve();
	a.post(IBV_WR_SEND, 0, 0, 0, 0);
	a.world.run_wire(); /* nobody hears of it */
	std::byte byte{};
	ibv_sge s{reinterpret_cast<std::uintptr_t>(&byte), 1, 0};
	ibv_send_wr wr{}, *bad;
	wr.wr_id = 99;
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.opcode = IBV_WR_RDMA_READ;
	wr.wr.rdma.rkey = r.rkey;
	wr.wr.rdma.remote_addr = r.info.base - 1;
	ASSERT_EQ(a.eng->post_send(&wr, &bad), 0);
	ASSERT_EQ(a.world.resolves.size(), 1U) << "another region may have the key by now";
	a.world.answer_resolve(0);
	a.world.run_wire();
	EXPECT_TRUE(a.world.qp_error);
	ibv_wc wc;
	ASSERT_TRUE(a.eng->poll(wc));
	EXPECT_EQ(wc.wr_id, 99U);
	EXPECT_EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
	EXPECT_FALSE(a.eng->poll(wc));
	EXPECT_TRUE(a.eng->idle());
}

/* Here there is nothing for the HCA to refuse, which would tell. */
TEST_F(Engine, UnsignaledRequestThatWasDoneBeforeATimeOutIsNoFailure)
{
	a.expect_success = false;
	a.post(IBV_WR_SEND, 0, 0, 0, 0);
	a.world.run_wire();
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	ASSERT_EQ(a.world.resolves.size(), 1U);
	a.world.answer_resolve(0, -ETIMEDOUT);
	a.world.run_wire();
	EXPECT_TRUE(a.world.qp_error);
	ASSERT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.completions[0].status, IBV_WC_RETRY_EXC_ERR);
	EXPECT_TRUE(a.eng->idle());
}

TEST(SigAll, RequestBeforeAFailureThatAsksForNoCompletionHasItsOwn)
{
	engine_config c = small_config();
	c.sq_sig_all = true;
	app a(c);
	a.world.add_region(0x100000, 16 * page_size, 0x100);
	a.expect_success = false;
	a.post(IBV_WR_SEND, 0, 0, 0, 0);
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	ASSERT_EQ(a.world.resolves.size(), 1U);
	a.world.answer_resolve(0, -ETIMEDOUT);
	EXPECT_FALSE(a.world.qp_error) << "what comes before it is under way";
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 2U);
	EXPECT_EQ(a.completions[0].status, IBV_WC_SUCCESS);
	EXPECT_EQ(a.completions[1].status, IBV_WC_RETRY_EXC_ERR);
	EXPECT_TRUE(a.world.qp_error);
}

/* The peer may be away, or its QP gone: what we know to be wrong stays what it is. */
TEST_F(Engine, ErrorIsTheOneThatWasFoundWhateverBecomesOfItsRefusal)
{
	for (const bool posted : {true, false}) {
		app b(small_config());
		b.expect_success = false;
		sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
		q.info.access = IBV_ACCESS_REMOTE_WRITE;
		b.eng->resolve_begins();
		b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
		if (!posted)
			b.world.refuse_post_after = 0;
		b.post(IBV_WR_RDMA_READ, 0, 0, 8);
		ASSERT_EQ(b.world.resolves.size(), 1U) << "another region may have the key by now";
		b.world.answer_resolve(0);
		if (posted) {
			ASSERT_EQ(b.world.queue.size(), 1U);
			b.world.queue[0].status = IBV_WC_RETRY_EXC_ERR;
			b.world.qp_error = true;
		}
		b.world.run_wire();
		EXPECT_EQ(b.poll(), 1U);
		EXPECT_EQ(b.completions[0].status, IBV_WC_REM_ACCESS_ERR);
		EXPECT_TRUE(b.world.qp_error);
		EXPECT_FALSE(b.world.peer_error);
		EXPECT_TRUE(b.eng->idle());
	}
}

/* A SEND for which the peer has no receive may stay where it is for ever. */
TEST_F(Engine, LaterRequestDoesNotKeepAnErrorBack)
{
	a.expect_success = false;
	resolve();
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	a.world.advance(0, 1, false);
	a.world.complete_one();
	a.post(IBV_WR_SEND, 0, 0, 0);
	ASSERT_EQ(a.world.queue.size(), 1U) << "it has overtaken the READ";
	a.world.serve_fault(0, RDMA_NP_ADDRESS);
	a.world.deliver(0);
	EXPECT_TRUE(a.world.qp_error);
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.completions[0].status, IBV_WC_REM_ACCESS_ERR);
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.completions[1].status, IBV_WC_WR_FLUSH_ERR);
}

/* With a full send queue the refusal waits for its place. */
TEST_F(Engine, RefusalWaitsForRoomInTheSendQueue)
{
	engine_config c = small_config();
	c.sq_budget = 2;
	app b(c);
	b.expect_success = false;
	b.world.budget = 2;
	sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
	q.info.access = IBV_ACCESS_REMOTE_WRITE;
	b.eng->resolve_begins();
	b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
	b.post(IBV_WR_SEND, 0, 0, 0, 0);
	b.post(IBV_WR_SEND, 0, 0, 0, 0);
	b.post(IBV_WR_RDMA_READ, 0, 0, 8);
	EXPECT_EQ(b.world.queue.size(), 2U);
	b.world.settle();
	EXPECT_EQ(b.poll(), 1U);
	EXPECT_EQ(b.completions[0].status, IBV_WC_REM_ACCESS_ERR);
	EXPECT_TRUE(b.world.peer_error);
}

TEST_F(Engine, AfterAnErrorEverythingIsFlushedEvenWhatIsPostedLater)
{
	a.expect_success = false;
	resolve();
	a.world.all_in(r, false);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8, 0);
	a.post(IBV_WR_SEND, 0, 0, 0, 0);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	a.world.queue[0].status = IBV_WC_REM_OP_ERR;
	a.world.qp_error = true;
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 3U);
	ASSERT_EQ(a.completions.size(), 3U);
	EXPECT_EQ(a.completions[0].status, IBV_WC_REM_OP_ERR);
	EXPECT_EQ(a.completions[1].status, IBV_WC_WR_FLUSH_ERR);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8, 0);
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.completions.back().status, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(Engine, PeerThatIsLostIsToldOnceOfTheFirstRequestNotDone)
{
	a.expect_success = false;
	resolve();
	a.world.all_in(r, false);
	a.world.page_out(r, 0);
	/* The first waits for its page when the HCA gives up the second. */
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	a.world.run_wire();
	ASSERT_EQ(a.world.faults.size(), 1U);
	a.post(IBV_WR_RDMA_READ, 0, page_size, 8);
	ASSERT_EQ(a.world.queue.size(), 1U);
	a.world.queue[0].status = IBV_WC_RETRY_EXC_ERR;
	a.world.qp_error = true;
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 2U);
	ASSERT_EQ(a.completions.size(), 2U);
	EXPECT_EQ(a.completions[0].status, IBV_WC_RETRY_EXC_ERR);
	EXPECT_EQ(a.completions[1].status, IBV_WC_WR_FLUSH_ERR);
}

/* The READ cannot be repeated, and says nothing about what went wrong. */
TEST_F(Engine, ErrorBehindAnUnprovenReadIsToldByTheRequestThatFailed)
{
	for (const auto status : {IBV_WC_LOC_PROT_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_REM_OP_ERR}) {
		app b(small_config());
		sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.expect_success = false;
		b.eng->resolve_begins();
		b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
		b.post(IBV_WR_RDMA_READ, 0, 0, 8);
		b.post(IBV_WR_SEND, 0, 0, 0);
		b.world.run_wire();
		ASSERT_EQ(b.world.faults.size(), 1U);
		b.post(IBV_WR_SEND, 0, 0, 0);
		b.post(IBV_WR_SEND, 0, 0, 0);
		ASSERT_EQ(b.world.queue.size(), 2U);
		b.world.queue[0].status = status;
		b.world.queue[0].finished = b.world.qp_error = true;
		b.world.run_wire();
		b.post(IBV_WR_SEND, 0, 0, 0);
		b.poll();
		std::vector<ibv_wc_status> told;
		for (const ibv_wc &wc : b.completions)
			told.push_back(wc.status);
		EXPECT_EQ(told, (std::vector{IBV_WC_WR_FLUSH_ERR, IBV_WC_WR_FLUSH_ERR, status,
					     IBV_WC_WR_FLUSH_ERR, IBV_WC_WR_FLUSH_ERR}));
	}
}

TEST_F(Engine, CompletionsOfAFailedQueuePairWaitForTheirBuffers)
{
	a.expect_success = false;
	resolve();
	a.world.all_in(r, false);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	a.post(IBV_WR_RDMA_READ, 0, 64, 8);
	a.world.queue[0].status = IBV_WC_REM_OP_ERR;
	a.world.qp_error = true;
	a.world.advance(0, 1, false);
	a.world.complete_one();
	EXPECT_EQ(a.poll(), 1U) << "the second is still with the send queue";
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 1U);
}

TEST_F(Engine, ProviderThatRefusesAPostEndsTheQueuePair)
{
	for (int after = 0; after < 6; ++after) {
		SCOPED_TRACE(after);
		app b(small_config());
		b.expect_success = false;
		sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.world.all_in(q, true);
		b.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
		b.world.settle();
		b.poll();
		b.completions.clear();
		b.world.refuse_post_after = after;
		b.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
		b.post(IBV_WR_SEND, 0, 0, 8, 0);
		b.post(IBV_WR_RDMA_READ, 0, 0, 8);
		b.world.refuse_post_after = after == 5 ? 0 : b.world.refuse_post_after;
		b.world.settle();
		b.post(IBV_WR_RDMA_READ, 0, 0, 8);
		b.world.settle();
		b.poll();
		EXPECT_TRUE(b.world.queue.empty());
		EXPECT_TRUE(b.eng->idle()) << "everything has completed";
	}
}

/* --- the quick path ------------------------------------------------------ */

TEST_F(Engine, ListOfReadsIsPostedQuicklyAndInOneCall)
{
	resolve();
	a.world.all_in(r, false);
	for (const bool whole : {false, true}) {
		a.world.doorbells = 0;
		a.listing = true;
		for (unsigned i = 0; i < 6; ++i)
			a.post(IBV_WR_RDMA_READ, 0, 1000 * i, 4096);
		a.post_list(whole);
		EXPECT_EQ(a.world.doorbells, 1U);
		EXPECT_EQ(a.world.queue.size(), 11U) << "only the first one begins with a unit";
		for (std::size_t i = 0; i + 1 < a.world.queue.size(); ++i)
			EXPECT_EQ(a.world.queue[i + 1].wr.wr_id, a.world.queue[i].wr.wr_id + 1);
		a.world.settle();
		EXPECT_EQ(a.poll(), 6U);
	}
	EXPECT_EQ(a.eng->stats().slow, 0U);
}

TEST_F(Engine, RequestOfAListThatIsNotQuickKeepsItsPlaceAndLeavesTheOthersQuick)
{
	resolve();
	a.world.all_in(r, false);
	a.listing = true;
	a.post(IBV_WR_SEND, 0, 0, 10);
	a.post(IBV_WR_RDMA_READ, 0, 64, 4096);
	a.post(IBV_WR_RDMA_READ, 0, 128, 4096, signaled, 3);
	a.post(IBV_WR_SEND, 0, 0, 11);
	a.post(IBV_WR_RDMA_READ, 0, 192, 4096);
	a.post_list(false);
	EXPECT_EQ(a.world.doorbells, 1U);
	EXPECT_EQ(a.eng->stats().slow, 1U);
	ASSERT_EQ(a.world.queue.size(), 5U);
	for (std::size_t i = 0; i < 5; ++i)
		EXPECT_EQ(a.world.queue[i].wr.opcode, i % 3 ? IBV_WR_RDMA_READ : IBV_WR_SEND) << i;
	EXPECT_EQ(a.world.queue[0].length, 10U);
	EXPECT_EQ(a.world.queue[3].length, 11U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 5U);
}

TEST_F(Engine, ListIsQuickUntilTheSendQueueIsFull)
{
	resolve();
	a.world.all_in(r, false);
	a.listing = true;
	for (unsigned i = 0; i < 30; ++i)
		a.post(IBV_WR_RDMA_READ, 0, 64 * i, 128);
	a.post_list(false);
	EXPECT_EQ(a.world.queue.size(), 16U);
	EXPECT_EQ(a.eng->stats().slow, 14U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 30U);
}

/* In strict order one WRITE is under way, in relaxed order as many as there is room for. */
TEST_F(Engine, ListOfWritesIsQuickWhereTheOrderIsRelaxed)
{
	for (const bool relaxed : {false, true}) {
		engine_config c = small_config();
		c.relaxed = relaxed;
		app b(c);
		sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.world.all_in(q, true);
		b.post(IBV_WR_RDMA_WRITE, 0, 0, 8);
		b.world.settle();
		EXPECT_EQ(b.poll(), 1U);
		const std::uint64_t before = b.eng->stats().slow;
		b.world.doorbells = 0;
		b.listing = true;
		for (unsigned i = 0; i < 4; ++i)
			b.post(IBV_WR_RDMA_WRITE, 0, page_size * i, 64);
		b.post_list(false);
		EXPECT_EQ(b.world.doorbells, 1U);
		EXPECT_EQ(b.world.queue.size(), relaxed ? 8U : 2U);
		EXPECT_EQ(b.eng->stats().slow - before, relaxed ? 0U : 3U);
		b.world.settle();
		EXPECT_EQ(b.poll(), 4U);
		b.check_memory();
	}
}

/* Of a list that is to be posted as a whole nothing is, if anything in it is refused. */
TEST_F(Engine, NothingOfAListIsBegunOfWhichOneIsRefused)
{
	resolve();
	std::byte buffer[8];
	ibv_sge s[5]{{reinterpret_cast<std::uintptr_t>(buffer), 8, pinned_lkey}};
	ibv_send_wr wr[3]{}, *bad = nullptr;
	for (int i = 0; i < 3; ++i) {
		wr[i].sg_list = s;
		wr[i].num_sge = 1;
		wr[i].opcode = i == 1 ? IBV_WR_SEND : IBV_WR_RDMA_READ;
		wr[i].wr.rdma.rkey = r.rkey;
		wr[i].wr.rdma.remote_addr = r.info.base;
		wr[i].next = i < 2 ? &wr[i + 1] : nullptr;
	}
	wr[2].num_sge = 5;
	EXPECT_EQ(a.eng->post_send(wr, &bad, true), -EINVAL);
	EXPECT_EQ(bad, &wr[2]);
	wr[2].num_sge = 2;
	s[1] = {reinterpret_cast<std::uintptr_t>(buffer), 8, local_lkey};
	a.world.local_error = -EFAULT;
	EXPECT_EQ(a.eng->post_send(wr, &bad, true), -EFAULT);
	EXPECT_EQ(bad, &wr[2]);
	EXPECT_EQ(a.world.doorbells, 0U);
	EXPECT_TRUE(a.eng->idle());
	/* More than there is room for. */
	std::vector<ibv_send_wr> many(33, wr[0]);
	for (std::size_t i = 0; i < many.size(); ++i)
		many[i].next = i + 1 < many.size() ? &many[i + 1] : nullptr;
	EXPECT_EQ(a.eng->post_send(many.data(), &bad, true), -ENOMEM);
	EXPECT_EQ(bad, &many[32]);
	EXPECT_EQ(a.world.doorbells, 0U);
	EXPECT_TRUE(a.eng->idle());
	EXPECT_EQ(a.eng->stats().slow, 0U) << "all of it is taken back";
}

/* What the provider has not taken of a list fails, the first with the reason. */
TEST_F(Engine, ProviderThatRefusesAPartOfAListEndsTheQueuePair)
{
	for (int after = 0; after < 7; ++after) {
		SCOPED_TRACE(after);
		app b(small_config());
		b.expect_success = false;
		sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
		b.world.all_in(q, true);
		b.eng->resolve_begins();
		ASSERT_EQ(b.eng->resolve_ended(q.rkey, 0, q.info, 1), 0);
		b.world.refuse_post_after = after;
		b.listing = true;
		b.post(IBV_WR_RDMA_READ, 0, 0, 64);
		b.post(IBV_WR_RDMA_READ, 0, 8, 640);
		b.post(IBV_WR_SEND, 0, 0, 8, 0);
		b.post(IBV_WR_RDMA_READ, 0, 128, 64);
		b.post(IBV_WR_RDMA_READ, 0, 8, 640);
		b.post_list(false);
		EXPECT_EQ(b.eng->stats().slow, 0U);
		b.world.settle();
		b.poll();
		EXPECT_TRUE(b.eng->idle()) << "everything has completed";
		EXPECT_TRUE(b.world.qp_error);
		unsigned refused = 0;
		for (const ibv_wc &wc : b.completions)
			refused += wc.status == IBV_WC_LOC_QP_OP_ERR;
		EXPECT_EQ(refused, 1U);
	}
}

TEST_F(Engine, WhatIsPassedOnIsQuick)
{
	a.world.pin_region(r);
	a.world.deliver(0);
	resolve_pinned(*a.eng, r.rkey, 1);
	a.post(IBV_WR_SEND, 0, 0, 64);
	a.post(IBV_WR_SEND, 0, 0, 64, signaled | IBV_SEND_INLINE);
	a.post(IBV_WR_SEND, 0, 0, 64, IBV_SEND_SOLICITED, 4);
	a.post(IBV_WR_SEND, 0, 0, 64, signaled | IBV_SEND_FENCE);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 0);
	a.post(IBV_WR_RDMA_READ, 0, 7, 2 * page_size, signaled, 4);
	a.post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 0, 64);
	a.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 128, 8);
	EXPECT_EQ(a.eng->stats().slow, 0U);
	ASSERT_EQ(a.world.queue.size(), 8U);
	EXPECT_EQ(a.world.queue[2].wr.send_flags & IBV_SEND_SOLICITED, unsigned{IBV_SEND_SOLICITED});
	EXPECT_EQ(a.world.queue[3].wr.send_flags & IBV_SEND_FENCE, unsigned{IBV_SEND_FENCE});
	EXPECT_EQ(a.world.queue[5].sges.size(), 4U);
	EXPECT_EQ(a.world.queue[5].wr.wr.rdma.rkey, r.rkey);
	EXPECT_EQ(a.world.queue[5].wr.wr.rdma.remote_addr, r.info.base + 7);
	a.world.settle();
	EXPECT_EQ(a.poll(), 7U);
	EXPECT_EQ(a.eng->stats().passed, 8U);
	a.post(IBV_WR_SEND, 0, 0, 257, signaled | IBV_SEND_INLINE);
	EXPECT_EQ(a.last_rc, -EINVAL);
}

/* Each for a reason of its own: each of these has to go the long way, or to wait. */
TEST_F(Engine, WhatIsPassedOnIsNotQuickerThanItMayBe)
{
	resolve();
	a.world.all_in(r, true);
	a.chance_local = 100;
	a.post(IBV_WR_SEND, 0, 0, 64);
	EXPECT_EQ(a.world.local_holds.size(), 1U) << "a buffer that is to be held";
	a.chance_local = 0;
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 64);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	std::uint64_t slow = a.eng->stats().slow;
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 64);
	EXPECT_EQ(a.eng->stats().slow, slow);
	a.post(IBV_WR_SEND, 0, 0, 64);
	EXPECT_EQ(a.world.queue.size(), 2U) << "behind a WRITE that is not proven";
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
	slow = a.eng->stats().slow;
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	EXPECT_EQ(a.eng->stats().slow, slow);
	a.post(IBV_WR_SEND, 0, 0, 64, signaled | IBV_SEND_FENCE);
	EXPECT_EQ(a.world.queue.size(), 1U) << "a fence behind a READ that is not proven";
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
}

/* Not even for a moment: other threads may post the same one, and memory may be read-only. */
TEST_F(Engine, RequestsOfTheCallerAreNotWrittenTo)
{
	struct constant {
		ibv_send_wr wr[3];
		ibv_sge s;
	};
	resolve();
	a.world.all_in(r, true);
	void *const page = mmap(nullptr, page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_NE(page, MAP_FAILED);
	auto *c = new (page) constant{};
	std::vector<std::byte> buffer(100);
	c->s = {reinterpret_cast<std::uintptr_t>(buffer.data()), 100, pinned_lkey};
	for (int i = 0; i < 3; ++i) {
		c->wr[i].wr_id = 7;
		c->wr[i].next = i < 2 ? &c->wr[i + 1] : nullptr;
		c->wr[i].sg_list = &c->s;
		c->wr[i].num_sge = 1;
		c->wr[i].opcode = i == 1 ? IBV_WR_RDMA_READ : IBV_WR_SEND;
		c->wr[i].imm_data = 1;
		c->wr[i].wr.rdma.rkey = r.rkey;
		c->wr[i].wr.rdma.remote_addr = r.info.base + 1;
	}
	ASSERT_EQ(mprotect(page, page_size, PROT_READ), 0);
	ibv_send_wr *bad;
	/* Unsignaled: now and then one of them is made to be signaled. */
	for (unsigned i = 0; i < 4; ++i) {
		EXPECT_EQ(a.eng->post_send(c->wr, &bad, i % 2), 0);
		a.world.settle();
	}
	EXPECT_EQ(a.eng->stats().slow, 0U);
	munmap(page, page_size);
}

TEST_F(Engine, ZeroLengthNeedsNoKey)
{
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 0);
	EXPECT_EQ(a.world.queue.size(), 1U);
	EXPECT_TRUE(a.world.resolves.empty());
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

/* --- regions that die ------------------------------------------------------ */

TEST_F(Engine, RegionThatIsGoneForGoodIsARemoteAccessError)
{
	a.expect_success = false;
	resolve();
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	a.world.kill_region(r, false);
	a.world.settle();
	a.poll();
	EXPECT_EQ(only_status(), IBV_WC_REM_ACCESS_ERR);
	EXPECT_TRUE(r.forgotten);
}

TEST_F(Engine, DeadRegionIsForgottenWhenItsLastKeyIsOutOfUse)
{
	resolve();
	a.world.all_in(r, false);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	a.world.advance(0, ~0ULL, false);
	a.world.kill_region(r);
	a.world.deliver(0);
	EXPECT_FALSE(r.forgotten) << "the READ is not completed";
	a.world.complete_one();
	EXPECT_TRUE(r.forgotten);
	EXPECT_EQ(a.poll(), 1U) << "its data came before";
}

TEST_F(Engine, KeyOfARegionThatDiedIsResolvedAnew)
{
	resolve();
	sim_region &second = a.world.replace_region(r);
	a.world.deliver(0);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	EXPECT_EQ(a.world.resolves.size(), 1U);
	a.world.all_in(second, false);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

/* The owner tells of a death by a message, and the next region of the key may be announced sooner. */
TEST_F(Engine, WhatTheRegionThatAKeyNamedHasNotTheNextOneMayHave)
{
	r.info.length = 4 * page_size;
	resolve();
	sim_region &next = a.world.replace_region(r);
	next.info.length = 8 * page_size;
	a.world.all_in(next, false);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8 * page_size);
	EXPECT_EQ(a.world.resolves.size(), 1U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	/* What is outside of that one as well fails, after one question. */
	a.expect_success = false;
	a.completions.clear();
	a.post(IBV_WR_RDMA_READ, 0, 8 * page_size - 8, 16);
	EXPECT_EQ(a.world.resolves.size(), 1U);
	a.world.settle();
	a.poll();
	EXPECT_EQ(only_status(), IBV_WC_REM_ACCESS_ERR);
	EXPECT_TRUE(a.world.resolves.empty());
}

/* A key value comes again, as that of pinned memory, and nobody has told yet that its region died. */
TEST_F(Engine, KeyOfARegionThatDiedMayBePinnedMemorysByNow)
{
	for (const auto op : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
		for (const bool told : {false, true}) {
			SCOPED_TRACE(::testing::Message() << op << told);
			app b(small_config());
			sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
			b.eng->resolve_begins();
			b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
			q.known = true;
			b.world.pin_region(q);
			if (told)
				b.world.deliver(0);
			b.post(op, 0, 64, op == IBV_WR_ATOMIC_FETCH_AND_ADD ? 8 : 5 * page_size);
			b.world.settle();
			EXPECT_EQ(b.poll(), 1U);
			b.check_memory();
			b.post(IBV_WR_RDMA_READ, 0, 64, 5 * page_size);
			EXPECT_TRUE(b.world.resolves.empty()) << "asked once only";
			b.world.settle();
			EXPECT_EQ(b.poll(), 1U);
		}
	}
}

/* More pieces than there are at once: the last ones begin when RESOLVE has said that the key is no region's. */
TEST_F(Engine, PiecesThatBeginWhenTheirKeyIsPinnedMemorysGoWithTheKeyAsItIs)
{
	for (const auto op : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM}) {
		for (const bool told : {false, true}) {
			SCOPED_TRACE(::testing::Message() << op << told);
			app b(small_config());
			sim_region &q = b.world.add_region(0x100000, 72 * page_size, 0x100);
			for (std::size_t i = 0; i < q.memory->size(); ++i)
				(*q.memory)[i] = static_cast<std::byte>(i * 13 + i / 4096);
			q.info.max_pages = 4;
			b.eng->resolve_begins();
			b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
			q.known = true;
			b.post(op, 0, 0, 72 * page_size, signaled, 3);
			b.world.run_wire();
			ASSERT_FALSE(b.world.faults.empty());
			b.world.pin_region(q);
			if (told)
				b.world.deliver(0);
			b.world.settle();
			EXPECT_EQ(b.poll(), 1U);
			EXPECT_EQ(b.world.immediates.size(), op == IBV_WR_RDMA_WRITE_WITH_IMM ? 1U : 0U);
			b.check_memory();
			EXPECT_TRUE(b.eng->idle());
		}
	}
}

/* It was the region's when the request was looked at, which then had to wait. */
TEST_F(Engine, RequestThatWaitedUntilItsKeyWasPinnedMemorysGoesWithTheKeyAsItIs)
{
	for (const auto op : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
		for (const bool told : {false, true}) {
			SCOPED_TRACE(::testing::Message() << op << told);
			app b(small_config());
			sim_region &q = b.world.add_region(0x100000, 16 * page_size, 0x100);
			b.eng->resolve_begins();
			b.eng->resolve_ended(q.rkey, 0, q.info, b.world.now());
			q.known = true;
			b.post(IBV_WR_RDMA_WRITE, 0, 64, 5 * page_size);
			b.world.run_wire();
			ASSERT_EQ(b.world.faults.size(), 1U) << "unproven";
			b.post(op, 0, 128, op == IBV_WR_ATOMIC_FETCH_AND_ADD ? 8 : 5 * page_size);
			EXPECT_TRUE(b.world.queue.empty()) << "it waits";
			b.world.pin_region(q);
			if (told)
				b.world.deliver(0);
			b.world.settle();
			EXPECT_EQ(b.poll(), 2U);
			EXPECT_EQ(b.world.immediates.size(), op == IBV_WR_RDMA_WRITE_WITH_IMM ? 1U : 0U);
			b.check_memory();
			EXPECT_TRUE(b.eng->idle());
		}
	}
}

constexpr nanoseconds pinned_time = RDMA_NP_PINNED_MS * 1'000'000ULL;

TEST_F(Engine, KeyThatWasPinnedMemorysIsAskedAboutAgainInTime)
{
	a.world.pin_region(r);
	a.world.deliver(0);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	ASSERT_EQ(a.world.resolves.size(), 1U);
	/* it counts from the question */
	a.world.clock += pinned_time / 4;
	a.world.answer_resolve(0);
	a.world.clock += pinned_time / 4 - 1;
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	EXPECT_TRUE(a.world.resolves.empty()) << "too early";
	a.world.clock += 2;
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	EXPECT_EQ(a.world.queue.size(), 4U) << "nothing waits for it";
	ASSERT_EQ(a.world.resolves.size(), 1U) << "once";
	a.world.clock += pinned_time / 2 - 2;
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	EXPECT_EQ(a.world.queue.size(), 5U);
	a.world.answer_resolve(0);
	a.world.clock += 1;
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	EXPECT_EQ(a.world.queue.size(), 6U) << "the answer is good for longer";
	a.world.settle();
	EXPECT_EQ(a.poll(), 6U);
}

/* Whose answer comes first nobody knows, so with two questions at a time none would be good enough for ever. */
TEST_F(Engine, WrongRequestFailsThoughItsKeyIsBeingAskedAbout)
{
	a.expect_success = false;
	a.world.pin_region(r);
	a.world.deliver(0);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.world.answer_resolve(0);
	a.world.clock += pinned_time / 2 + 1;
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	ASSERT_EQ(a.world.resolves.size(), 1U) << "the promise is renewed";
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
	a.world.clock += pinned_time / 2 + 1;
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	ASSERT_EQ(a.world.resolves.size(), 1U);
	a.world.run_wire();
	a.world.clock += pinned_time;
	sim_region &second = a.world.replace_region(a.world.regions.back());
	second.pinned = false;
	second.info.length = 4 * page_size;
	a.world.events.clear();
	a.post(IBV_WR_RDMA_READ, 0, second.info.length - 8, 16);
	for (unsigned k = 0; k < 8 && !a.world.resolves.empty(); ++k)
		a.world.answer_resolve(0);
	EXPECT_TRUE(a.world.resolves.empty()) << "a request that asks for ever";
	a.world.settle();
	a.poll();
	ASSERT_EQ(a.completions.size(), 4U);
	EXPECT_EQ(a.completions[3].status, IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Engine, KeyThatWasPinnedMemorysIsNotUsedLongerThanPromised)
{
	for (const nanoseconds late : {nanoseconds{0}, pinned_time}) {
		app b(small_config());
		b.world.pin_region(b.world.add_region(0x100000, 16 * page_size, 0x100));
		b.world.deliver(0);
		b.post(IBV_WR_RDMA_READ, 0, 0, 64);
		b.world.clock += 5;
		b.world.answer_resolve(0);
		b.world.settle();
		EXPECT_EQ(b.poll(), 1U);
		b.world.clock += pinned_time - 5 + late;
		sim_region &second = b.world.replace_region(b.world.regions.back());
		second.pinned = false;
		second.info.read_addr = 0x710000000000;
		b.world.events.clear();
		b.post(IBV_WR_RDMA_READ, 0, 0, 64);
		EXPECT_TRUE(b.world.queue.empty());
		b.world.all_in(second, false);
		b.world.settle();
		EXPECT_EQ(b.poll(), 1U);
	}
}

/* What is hot is compared with the last request, and no key is looked up. */
TEST_F(Engine, HotRequestsWithAKeyOfPinnedMemoryAskAboutItInTime)
{
	const std::uint32_t rkey = r.rkey;

	a.world.quick = true;
	a.eng->resolve_begins();
	a.eng->resolve_ended(rkey, -EACCES, {}, a.world.now());
	a.world.pin_region(r);
	a.world.deliver(0);
	const ibv_wr_opcode kinds[] = {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_ATOMIC_FETCH_AND_ADD};
	for (const ibv_wr_opcode op : kinds)
		for (unsigned k = 0; k < 4; ++k)
			a.post(op, 0, 8 * k, 8);
	EXPECT_EQ(a.world.hot_posts, 11U) << "the first one opens it";
	for (const auto &q : a.world.queue)
		EXPECT_EQ(is_atomic(q.wr.opcode) ? q.wr.wr.atomic.rkey : q.wr.wr.rdma.rkey, rkey);
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 12U);
	EXPECT_EQ(a.eng->stats().passed, 12U);

	/* Until half of the time is over. */
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	const std::uint64_t hot = a.world.hot_posts;
	EXPECT_GE(hot, 12U);
	a.world.clock += pinned_time / 2 - 1;
	EXPECT_TRUE(a.world.resolves.empty());
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	EXPECT_EQ(a.world.hot_posts, hot + 1) << "half of the time is not over";
	a.world.clock += 2;
	for (unsigned k = 0; k < 3; ++k)
		a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	EXPECT_EQ(a.world.hot_posts, hot + 1);
	EXPECT_EQ(a.world.queue.size(), 6U) << "nothing waits for the answer";
	EXPECT_EQ(a.world.resolves.size(), 1U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 6U);
}

/* A SEND opens the hot path again, and knows of no key. */
TEST_F(Engine, KeyThatIsARegionsByNowIsNotHotAsPinnedMemorys)
{
	a.world.quick = true;
	a.eng->resolve_begins();
	a.eng->resolve_ended(r.rkey, -EACCES, {}, a.world.now());
	a.world.pin_region(r);
	a.world.deliver(0);
	for (unsigned k = 0; k < 3; ++k)
		a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	EXPECT_EQ(a.world.hot_posts, 2U);
	a.world.run_wire();
	EXPECT_EQ(a.poll(), 3U);
	sim_region &second = a.world.replace_region(a.world.regions.back());
	second.pinned = false;
	second.info.read_addr = 0x710000000000;
	a.world.events.clear();
	a.world.all_in(second, false);
	a.eng->resolve_begins();
	a.eng->resolve_ended(second.rkey, 0, second.info, a.world.now());
	for (unsigned k = 0; k < 2; ++k)
		a.post(IBV_WR_SEND, 0, 0, 64);
	EXPECT_EQ(a.world.hot_posts, 3U);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	EXPECT_EQ(a.world.queue.back().wr.wr.rdma.rkey, second.info.read_key);
	a.world.settle();
	EXPECT_EQ(a.poll(), 3U);
}

TEST_F(Engine, KeyOfWhichNothingIsPromisedIsAskedAboutForEachRequest)
{
	a.world.pin_region(r);
	a.world.deliver(0);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	ASSERT_EQ(a.world.resolves.size(), 1U);
	a.world.answer_resolve(0, -ENXIO);
	EXPECT_EQ(a.world.queue.size(), 1U) << "the second was posted after it was asked";
	ASSERT_EQ(a.world.resolves.size(), 1U);
	a.post(IBV_WR_RDMA_READ, 0, 0, 64);
	a.world.answer_resolve(0, -ENXIO);
	EXPECT_EQ(a.world.queue.size(), 2U);
	ASSERT_EQ(a.world.resolves.size(), 1U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 3U);
}

TEST_F(Engine, SeveralKeysInTurnAreQuick)
{
	std::vector<sim_region *> all{&r};
	for (std::uint32_t k = 1; k < 5; ++k)
		all.push_back(&a.world.add_region(0x100000 + (k << 24), page_size, 0x100 + (k << 8)));
	for (sim_region *q : all) {
		a.eng->resolve_begins();
		ASSERT_EQ(a.eng->resolve_ended(q->rkey, 0, q->info, a.world.now()), 0);
		a.world.all_in(*q, true);
	}
	for (unsigned i = 0; i < 15; ++i)
		a.post(IBV_WR_RDMA_READ, i % 5, 0, 64);
	EXPECT_EQ(a.eng->stats().slow, 0U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 15U);
}

/* A peer may have new keys for ever. */
TEST_F(Engine, KeysThatAreOfNoRegionAreForgottenButForThoseInUse)
{
	resolve();
	sim_region &second = a.world.add_region(0x2000000, page_size, 0x200);
	a.world.pin_region(second);
	a.world.deliver(0);
	resolve_pinned(*a.eng, second.rkey, 1);
	for (std::uint32_t i = 0; i < 40; ++i) {
		resolve_pinned(*a.eng, 0x10000 + 100 * i, 100);
		EXPECT_LE(a.eng->keys(), engine::max_loose_keys + 1);
		a.post(IBV_WR_RDMA_READ, 1, 0, 64);
		a.post(IBV_WR_RDMA_READ, 0, 0, 64);
		EXPECT_TRUE(a.world.resolves.empty()) << "both are known";
		a.world.settle();
		EXPECT_EQ(a.poll(), 2U);
	}
	resolve_pinned(*a.eng, 0x20000, engine::max_loose_keys * 2);
	a.post(IBV_WR_RDMA_READ, 1, 0, 64);
	EXPECT_EQ(a.world.resolves.size(), 1U) << "forgotten by now";
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

TEST_F(Engine, KeyThatIsAskedAboutIsNotForgotten)
{
	a.expect_success = false;
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	ASSERT_EQ(a.world.resolves.size(), 1U);
	resolve_pinned(*a.eng, 0x10000, 2 * engine::max_loose_keys);
	a.world.answer_resolve(0, -ETIMEDOUT);
	a.world.run_wire();
	a.poll();
	EXPECT_EQ(only_status(), IBV_WC_RETRY_EXC_ERR);
}

TEST_F(Engine, KeysOfDeadRegionsAreForgotten)
{
	for (std::uint32_t k = 0; k < 50; ++k) {
		sim_region &q = a.world.add_region(0x2000000, page_size, 0x200 + k);
		a.eng->resolve_begins();
		ASSERT_EQ(a.eng->resolve_ended(q.rkey, 0, q.info, a.world.now()), 0);
		a.world.kill_region(q);
		a.world.deliver(0);
		EXPECT_TRUE(q.forgotten);
		EXPECT_EQ(a.eng->keys(), 0U);
	}
}

/* Which is the kernel's mistake; the hold must not be lost by it. */
TEST_F(Engine, AnswerThatCameBeforeGivesItsHoldBack)
{
	resolve();
	a.post(IBV_WR_RDMA_READ, 0, 8 * page_size, 8);
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	a.world.run_wire();
	ASSERT_EQ(a.world.faults.size(), 2U);
	a.world.serve_fault(0, RDMA_NP_BUSY);
	rdma_np_event again = a.world.events[0];
	a.world.deliver(0);
	again.status = RDMA_NP_OK;
	again.hold_id = 77;
	a.world.holds[77] = {&r, {}};
	a.eng->on_event(again);
	a.eng->step();
	EXPECT_EQ(a.world.released, std::vector<std::uint64_t>{77});
	EXPECT_TRUE(a.world.queue.empty() && a.eng->deadline()) << "it waits for its clock still";
}

TEST_F(Engine, AnswerThatNamesADeadRegionIsNotBelieved)
{
	/* RESOLVE is answered, the region dies, and the death is heard first */
	a.post(IBV_WR_RDMA_READ, 0, 0, 8);
	const rdma_np_region_info old = r.info;
	sim_region &second = a.world.replace_region(r);
	a.world.deliver(0);
	ASSERT_EQ(a.world.resolves.size(), 1U);
	a.world.resolves.clear();
	a.eng->on_resolved(r.rkey, 0, old);
	a.eng->step();
	EXPECT_TRUE(a.world.queue.empty());
	EXPECT_EQ(a.world.resolves.size(), 1U) << "asked again";
	a.world.all_in(second, false);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

/* --- several at once ------------------------------------------------------- */

TEST_F(Engine, NoMoreFaultRequestsAreUnderWayThanTheKernelTakes)
{
	resolve();
	for (unsigned i = 0; i < 12; ++i)
		a.post(IBV_WR_RDMA_READ, 0, i * page_size, 8);
	a.world.run_wire();
	EXPECT_EQ(a.world.faults.size(), 4U);
	a.world.serve_fault(2);
	a.world.deliver(0);
	EXPECT_EQ(a.world.faults.size(), 4U) << "the next one, at once";
	a.world.settle();
	EXPECT_EQ(a.poll(), 12U);
}

/* The sim checks each request. */
TEST_F(Engine, RequestsAreAsSmallAndAsFewAsTheOwnerSays)
{
	r.info.max_pages = 5;
	r.info.max_ranges = 2;
	r.info.max_outstanding = 1;
	resolve();
	for (const ibv_wr_opcode op : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM}) {
		a.world.all_out(r);
		for (std::uint64_t p = 0; p < 16; p += 2)
			a.world.page_in(r, p, op != IBV_WR_RDMA_READ);
		const unsigned asked = a.world.fault_requests;
		a.post(op, 0, 100, 15 * page_size);
		a.world.settle();
		EXPECT_EQ(a.poll(), 1U);
		EXPECT_GE(a.world.fault_requests - asked, 4U) << "pages 0 to 4, to 9, to 14, and 15";
	}
	a.check_memory();
	EXPECT_EQ(a.eng->prefetch(r.rkey, r.info.base, 16 * page_size, false), static_cast<std::int64_t>(5 * page_size));
	a.world.settle();
}

TEST_F(Engine, RequestThatTheNextRegionOfItsKeyCannotServeFails)
{
	a.expect_success = false;
	resolve();
	a.post(IBV_WR_RDMA_READ, 0, 0, 4 * page_size);
	a.world.run_wire();
	ASSERT_EQ(a.world.faults.size(), 1U);
	a.world.replace_region(r).info.max_pages = 3;
	a.world.settle();
	a.poll();
	EXPECT_EQ(only_status(), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Engine, PrefetchMakesPagesResidentAndTheirWordsKnown)
{
	EXPECT_EQ(a.eng->prefetch(r.rkey, r.info.base, page_size, true), -ENOENT);
	resolve();
	EXPECT_EQ(a.eng->prefetch(r.rkey, r.info.base + r.info.length - 10, 11, true), -EFAULT);
	EXPECT_EQ(a.eng->prefetch(r.rkey, r.info.base, 4 * page_size, true), std::int64_t{4 * page_size});
	a.world.settle();
	a.post(IBV_WR_RDMA_WRITE, 0, 0, 4 * page_size);
	EXPECT_EQ(a.world.queue.size(), 2U) << "WRITE and words: nothing had to be asked";
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

TEST_F(Engine, PrefetchLeavesRoomForWork)
{
	sim_region &big = a.world.add_region(0x40000000, 8192 * page_size, 0x500);
	a.eng->resolve_begins();
	a.eng->resolve_ended(big.rkey, 0, big.info, a.world.now());
	const std::int64_t n = a.eng->prefetch(big.rkey, big.info.base, big.info.length, false);
	EXPECT_GT(n, 0);
	EXPECT_LT(static_cast<std::uint64_t>(n), big.info.length);
	EXPECT_LT(a.world.faults.size(), 4U);
	a.world.settle();
}

} // namespace
} // namespace npr::test
