/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Leases of peers' memory while the application does something else. */
#include "objects_fixture.hpp"

#include <array>
#include <chrono>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>

using namespace npr::fake;
using namespace std::chrono_literals;

namespace {

struct KeptLeases : Objects {
	explicit KeptLeases(unsigned flags = 0, bool turns = true) : Objects(flags, turns)
	{
		kernel_ptr->grants = true;
		dev.all_in();
	}

	static npr_stats stats(npr_qp *qp)
	{
		npr_stats s;

		EXPECT_EQ(npr_get_stats(qp, &s, sizeof(s)), 0);
		return s;
	}

	npr_qp *known(std::uint32_t number)
	{
		npr_qp *const qp = attach(number);

		EXPECT_EQ(npr_resolve(qp, rkey, nullptr), 0);
		return qp;
	}

	/* One request after the other, polled, until the answer that brings a lease is read by whoever comes first. */
	void lease(npr_qp *qp)
	{
		const auto before = stats(qp).leases;

		for (const auto begun = std::chrono::steady_clock::now(); stats(qp).leases == before;) {
			ASSERT_LT(std::chrono::steady_clock::now() - begun, 10s);
			ASSERT_EQ(post(qp, IBV_WR_RDMA_WRITE, 0, b, 1), 0);
			EXPECT_EQ(next().wr_id, 1U);
			std::this_thread::sleep_for(1ms);
		}
	}

	/* A lease is asked for, and the answer stays with the kernel. All requests are done. */
	void ask(npr_qp *qp)
	{
		kernel_ptr->withhold = true;
		for (int i = 0; i < 100 && !kernel_ptr->answers(); ++i) {
			ASSERT_EQ(post(qp, IBV_WR_RDMA_WRITE, 0, b, 1), 0);
			next();
		}
		ASSERT_EQ(kernel_ptr->answers(), 1U);
	}

	/*
	 * A machine that is busy may let a lease grow old before the test goes on: so what has to happen
	 * to one is tried again. False: @f never said yes.
	 */
	template <class F>
	bool some_time(F &&f)
	{
		for (int i = 0; i < 20 && !HasFailure(); ++i)
			if (f())
				return true;
		return false;
	}

	std::array<std::byte, 64> b{};
};

TEST_F(KeptLeases, IdleOnesGoBackThoughNobodyPolls)
{
	npr_qp *const qp = known(1);

	for (int i = 0; i < 2; ++i) {
		lease(qp);
		EXPECT_TRUE(kernel_ptr->all_back());
		EXPECT_EQ(stats(qp).recalls, 0U);
	}
}

TEST_F(KeptLeases, RequestsUnderOneHaveItsKey)
{
	npr_qp *const qp = known(1);

	EXPECT_TRUE(some_time([&] {
		lease(qp);
		for (const ibv_wr_opcode op : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
			std::fill(b.begin(), b.end(), std::byte{0x55});
			EXPECT_EQ(post(qp, op, 64, b, 2), 0);
			EXPECT_EQ(next().wr_id, 2U);
			EXPECT_EQ(std::memcmp(b.data(), &dev.memory[64], b.size()), 0);
			if (dev.posted.back().wr.rdma.rkey != kernel_ptr->last_lease_key)
				return false;
		}
		return true;
	}));
}

TEST_F(KeptLeases, LeaseInUseIsNotIdle)
{
	npr_qp *const qp = known(1);

	EXPECT_TRUE(some_time([&] {
		lease(qp);
		const auto before = stats(qp).leases;
		for (int i = 0; i < 40; ++i) {
			EXPECT_EQ(post(qp, IBV_WR_RDMA_WRITE, 0, b, 1), 0);
			next();
			std::this_thread::sleep_for(10ms);
		}
		return stats(qp).leases == before && kernel_ptr->live() == 1;
	}));
}

/* I9: who was stopped for long posts first when he goes on, and the key may have ended. */
TEST_F(KeptLeases, RecallIsSeenByWhoPosts)
{
	npr_qp *const qp = known(1);

	EXPECT_TRUE(some_time([&] {
		lease(qp);
		const std::uint32_t key = kernel_ptr->last_lease_key;
		/* So that what comes is like the last ones. */
		for (int i = 0; i < 3; ++i) {
			EXPECT_EQ(post(qp, IBV_WR_RDMA_WRITE, 64, b, 2), 0);
			EXPECT_EQ(next().wr_id, 2U);
		}
		if (dev.posted.back().wr.rdma.rkey != key || kernel_ptr->recall(1) != 1)
			return false;
		dev.posted.clear();
		EXPECT_EQ(post(qp, IBV_WR_RDMA_WRITE, 64, b, 3), 0);
		EXPECT_EQ(next().wr_id, 3U);
		for (const ibv_send_wr &w : dev.posted)
			EXPECT_NE(w.wr.rdma.rkey, key);
		return true;
	}));
}

/* The library's thread comes for leases only: no turn of a request reads their events by the way. */
struct OnlyKept : KeptLeases {
	OnlyKept() : KeptLeases(0, false) {}
};

/* Nobody posts from the recall until it is counted, so it was the thread that has read it. */
TEST_F(OnlyKept, RecallIsObeyedThoughNobodyPolls)
{
	npr_qp *const qp = known(1);

	EXPECT_TRUE(some_time([&] {
		lease(qp);
		const std::uint64_t before = stats(qp).recalls;
		kernel_ptr->recall(1);
		EXPECT_TRUE(kernel_ptr->all_back());
		return stats(qp).recalls == before + 1;
	}));
}

/* Who sleeps until something happens sleeps on. */
TEST_F(KeptLeases, NoneIsSomethingToWakeFor)
{
	npr_qp *const qp = known(1);

	EXPECT_TRUE(some_time([&] {
		lease(qp);
		EXPECT_EQ(npr_req_notify_cq(cq.get(), 0), 0);
		const bool recalled = kernel_ptr->recall(1);
		pollfd p{npr_get_fd(cq.get()), POLLIN, 0};
		EXPECT_EQ(poll(&p, 1, 20), 0);
		EXPECT_TRUE(kernel_ptr->all_back());
		return recalled;
	}));
}

/* The answer that brings the lease is not polled for, nor is the recall that follows. */
TEST_F(OnlyKept, RecallOfALeaseThatNobodyHasHeardOfIsObeyed)
{
	npr_qp *const qp = known(1);

	ask(qp);
	ASSERT_EQ(kernel_ptr->live(), 1U);
	kernel_ptr->send(kernel_ptr->held[0]);
	kernel_ptr->recall(1);
	EXPECT_TRUE(kernel_ptr->all_back());
}

TEST_F(KeptLeases, RequestThatIsDoneKeepsNoLeaseThoughNobodyPolls)
{
	npr_qp *const qp = known(1);
	ibv_wc received{};

	received.wr_id = 77;
	received.opcode = IBV_WC_RECV;
	received.qp_num = 1;
	for (const unsigned flags : {unsigned{IBV_SEND_SIGNALED}, 0U}) {
		SCOPED_TRACE(flags);
		EXPECT_TRUE(some_time([&] {
			lease(qp);
			{
				const std::lock_guard lock(dev.mutex);
				dev.stall = true;
			}
			EXPECT_EQ(post(qp, IBV_WR_RDMA_WRITE, 0, b, 2, rkey, flags), 0);
			const bool under = kernel_ptr->recall(1);
			std::this_thread::sleep_for(20ms);
			EXPECT_EQ(kernel_ptr->live(), under ? 1U : 0U) << "it is under way";
			{
				const std::lock_guard lock(dev.mutex);
				dev.complete(received);
			}
			dev.go_on();
			EXPECT_TRUE(kernel_ptr->all_back());
			std::multiset<std::uint64_t> ids{next().wr_id};
			if (flags)
				ids.insert(next().wr_id);
			EXPECT_EQ(ids, flags ? (std::multiset<std::uint64_t>{2, 77}) : std::multiset<std::uint64_t>{77});
			return under;
		}));
	}
}

TEST_F(KeptLeases, SleeperHearsOfACompletionThatWasTakenForALease)
{
	npr_qp *const qp = known(1);

	EXPECT_TRUE(some_time([&] {
		ibv_wc wc;
		lease(qp);
		{
			const std::lock_guard lock(dev.mutex);
			dev.stall = true;
		}
		EXPECT_EQ(post(qp, IBV_WR_RDMA_WRITE, 0, b, 2), 0);
		const bool under = kernel_ptr->recall(1);
		EXPECT_EQ(npr_req_notify_cq(cq.get(), 0), 0);
		EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
		dev.go_on();
		EXPECT_TRUE(kernel_ptr->all_back());
		pollfd p{npr_get_fd(cq.get()), POLLIN, 0};
		const bool woken = poll(&p, 1, under ? 10'000 : 0) == 1;
		EXPECT_EQ(next().wr_id, 2U);
		return under && woken;
	}));
}

/* Each peer numbers the holds that he grants. */
TEST_F(KeptLeases, RecallIsForTheQueuePairThatHasTheLease)
{
	npr_qp *const one = known(1), *const other = known(2);

	EXPECT_TRUE(some_time([&] {
		lease(one);
		lease(other);
		const auto before = stats(other);
		if (!kernel_ptr->recall(1) || kernel_ptr->live() != 2)
			return false;
		EXPECT_TRUE(kernel_ptr->all_back());
		EXPECT_EQ(stats(other).recalls, before.recalls);
		return stats(one).recalls > 0;
	}));
	EXPECT_EQ(stats(other).recalls, 0U);
}

TEST_F(KeptLeases, DetachedQueuePairHasNone)
{
	EXPECT_TRUE(some_time([&] {
		npr_qp *const qp = known(1);
		lease(qp);
		const std::size_t had = kernel_ptr->live();
		EXPECT_EQ(npr_detach_qp(qp), 0);
		EXPECT_EQ(kernel_ptr->live(), 0U);
		return had == 1;
	}));
	/* And nobody is there to hear of it. */
	rdma_np_event e{};
	e.type = RDMA_NP_EVENT_RECALL;
	e.hold_id = fake_kernel::first_lease;
	kernel_ptr->send(e);
	ibv_wc wc;
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
}

/* It stays alive, and the application may go on with it: its peer holds no pages for it. */
TEST_F(KeptLeases, LeaseThatIsOnItsWayToADetachedQueuePairGoesBack)
{
	npr_qp *const qp = known(1);

	ask(qp);
	std::thread peer([&] {
		std::this_thread::sleep_for(20ms);
		kernel_ptr->send(kernel_ptr->held[0]);
	});
	EXPECT_EQ(npr_detach_qp(qp), 0);
	peer.join();
	EXPECT_EQ(kernel_ptr->live(), 0U);
	EXPECT_FALSE(dev.dead.count(1));
}

TEST_F(KeptLeases, LeaseThatDoesNotComeEndsADetachedQueuePair)
{
	npr_qp *const qp = known(1);

	ask(qp);
	EXPECT_EQ(npr_detach_qp(qp), 0);
	EXPECT_TRUE(dev.dead.count(1));
	kernel_ptr->leases.clear();
}

TEST_F(KeptLeases, QueueThatAsksForNoneHasNoChannelForThem)
{
	npr_qp *const qp = known(1);
	const std::size_t channels = kernel_ptr->ends.size();

	ASSERT_EQ(post(qp, IBV_WR_RDMA_WRITE, 0, b, 1), 0);
	next();
	EXPECT_FALSE(cq->keeps_leases());
	EXPECT_EQ(kernel_ptr->ends.size(), channels);
	lease(qp);
	EXPECT_TRUE(cq->keeps_leases());
	EXPECT_EQ(kernel_ptr->ends.size(), channels + 1);
}

/* Nobody would see a recall at once. It may be otherwise the next time. */
TEST_F(KeptLeases, KernelThatDoesNotCountEventsIsAskedForNone)
{
	kernel_ptr->maps = false;
	cq = std::make_unique<npr_cq>(ctx, &dev.cq, 2048);
	npr_qp *const qp = known(1);

	dev.page_out(0);
	for (int i = 0; i < 10; ++i) {
		ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
		EXPECT_EQ(next().wr_id, 1U);
	}
	EXPECT_EQ(stats(qp).faults, 1U) << "its answer was read";
	EXPECT_FALSE(cq->keeps_leases());
	EXPECT_EQ(kernel_ptr->live(), 0U);
	const std::uint64_t reads = kernel_ptr->reads;
	ibv_wc wc;
	ASSERT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
	EXPECT_EQ(kernel_ptr->reads, reads + 1) << "of the channel for all else only";
	kernel_ptr->maps = true;
	lease(qp);
}

/* The kernel's word says whether there is something to read, so that polling costs no system call. */
TEST_F(KeptLeases, PollReadsEventsWhenTheWordSaysSo)
{
	npr_qp *const qp = known(1);
	ibv_wc wc;

	kernel_ptr->grants = false;
	dev.page_out(0);
	kernel_ptr->withhold = true;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	while (kernel_ptr->held.empty())
		ASSERT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
	fake_kernel::end &end = kernel_ptr->end_for(kernel_ptr->held[0]);
	kernel_ptr->send(kernel_ptr->held[0], end);
	end.posted.fetch_sub(1);
	const std::uint64_t reads = kernel_ptr->reads;
	for (int i = 0; i < 10'000; ++i)
		ASSERT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
	EXPECT_EQ(kernel_ptr->reads, reads);
	end.posted.fetch_add(1);
	EXPECT_EQ(next().wr_id, 1U);
	EXPECT_EQ(kernel_ptr->reads, reads + 1);
}

TEST_F(KeptLeases, MoreEventsThanAreReadAtOnceAreAllRead)
{
	npr_qp *const qp = known(1);
	rdma_np_event other{};
	ibv_wc wc;
	int got = 0;

	kernel_ptr->grants = false;
	dev.page_out(0);
	kernel_ptr->withhold = true;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	while (kernel_ptr->held.empty())
		ASSERT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
	fake_kernel::end &end = kernel_ptr->end_for(kernel_ptr->held[0]);
	other.type = RDMA_NP_EVENT_REGION_GONE;
	other.region_id = 99;
	for (int i = 0; i < 20; ++i)
		kernel_ptr->send(other, end);
	kernel_ptr->send(kernel_ptr->held[0], end);
	for (int i = 0; i < 100 && !got; ++i)
		got = npr_poll_cq(cq.get(), 1, &wc);
	EXPECT_EQ(got, 1);
}

/* How often threads of the process but this one have slept. */
std::uint64_t sleeps()
{
	const std::string self = std::to_string(gettid());
	std::uint64_t n = 0;

	for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
		std::ifstream status(task.path() / "status");
		std::string word;
		std::uint64_t count;
		while (task.path().filename() != self && status >> word)
			if (word == "voluntary_ctxt_switches:" && status >> count)
				n += count;
	}
	return n;
}

TEST_F(KeptLeases, ThreadSleepsWhileThereIsNone)
{
	const auto begin = [] {
		std::this_thread::sleep_for(std::chrono::nanoseconds(2 * npr::lease_keeper::period));
		return sleeps();
	};
	const auto wakes = [&] {
		const std::uint64_t before = begin();
		std::this_thread::sleep_for(std::chrono::nanoseconds(5 * npr::lease_keeper::period));
		return sleeps() - before;
	};
	std::thread([] {}).join(); /* a sanitizer's begins with the first */
	const std::uint64_t idle = wakes();
	npr_qp *const qp = known(1);

	EXPECT_LE(wakes(), idle + 2);
	lease(qp);
	EXPECT_TRUE(kernel_ptr->all_back());
	EXPECT_LE(wakes(), idle + 2);
	/* What is no lease is nothing to wake for. */
	kernel_ptr->grants = false;
	dev.page_out(0);
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	EXPECT_EQ(next().wr_id, 1U);
	EXPECT_LE(wakes(), idle + 2);
}

/* --- the thread itself --- */

struct client final : npr::lease_keeper::client {
	client() : channel(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

	void tend(bool age) noexcept override
	{
		const std::lock_guard lock(mutex);

		inside = true;
		sigset_t mask;
		pthread_sigmask(SIG_BLOCK, nullptr, &mask);
		if (!sigismember(&mask, SIGTERM))
			takes_signals = true;
		std::uint64_t count;
		const bool event = ::read(channel.get(), &count, sizeof(count)) > 0;
		heard_between += event && !age;
		heard += event;
		++looks;
		aged += age;
		std::this_thread::sleep_for(stays);
		inside = false;
	}

	void event() const
	{
		const std::uint64_t one = 1;

		EXPECT_EQ(::write(channel.get(), &one, sizeof(one)), ssize_t{sizeof(one)});
	}

	npr::unique_fd channel;
	std::mutex mutex; /* the client's, which it holds when it says that it has leases */
	std::atomic<bool> inside{false}, takes_signals{false};
	std::atomic<unsigned> looks{0}, heard{0}, aged{0};
	std::atomic<unsigned> heard_between{0}; /* of heard: no period was over, so it was the event that woke the thread */
	std::chrono::milliseconds stays{0};
};

struct LeaseKeeper : ::testing::Test {
	LeaseKeeper() { keeper.add(c, c.channel.get()); }
	~LeaseKeeper() override { keeper.remove(c); }

	void watch(bool has)
	{
		const std::lock_guard lock(c.mutex);

		keeper.watch(c, has);
	}

	/* False: not for a long time. */
	template <class F>
	static bool comes_true(F &&f)
	{
		for (const auto begun = std::chrono::steady_clock::now(); !f(); std::this_thread::sleep_for(1ms))
			if (std::chrono::steady_clock::now() - begun > 10s)
				return false;
		return true;
	}

	npr::lease_keeper keeper;
	client c;
};

TEST_F(LeaseKeeper, ClientWithoutLeasesIsLeftAlone)
{
	const std::clock_t before = std::clock();

	c.event();
	std::this_thread::sleep_for(std::chrono::nanoseconds(3 * npr::lease_keeper::period));
	EXPECT_EQ(c.looks, 0U);
	/* While this thread sleeps no other but the keeper's runs. A busy machine gives it less of that, and not more. */
	EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC / 10) << "of processor time";
	watch(true);
	EXPECT_TRUE(comes_true([&] { return c.aged > 1; }));
	watch(false);
	EXPECT_TRUE(comes_true([&] { return !c.inside; }));
	const unsigned looks = c.looks;
	std::this_thread::sleep_for(std::chrono::nanoseconds(3 * npr::lease_keeper::period));
	EXPECT_LE(c.looks, looks + 1) << "one that was under way";
}

/*
 * Not when a period is over. A machine that is busy may run the thread so late that one is over all the same, but
 * not each time.
 */
TEST_F(LeaseKeeper, ClientWithLeasesHearsOfItsEventsAtOnce)
{
	constexpr unsigned count = 200;

	watch(true);
	for (unsigned i = 1; i <= count; ++i) {
		c.event();
		ASSERT_TRUE(comes_true([&] { return c.heard == i; }));
	}
	EXPECT_GT(c.heard_between, count / 10);
}

TEST_F(LeaseKeeper, NobodyIsAtAClientThatIsRemoved)
{
	client other;

	other.stays = 50ms;
	keeper.add(other, other.channel.get());
	keeper.watch(other, true);
	ASSERT_TRUE(comes_true([&] { return other.inside.load(); }));
	keeper.remove(other);
	EXPECT_FALSE(other.inside);
	const unsigned looks = other.looks;
	std::this_thread::sleep_for(std::chrono::nanoseconds(2 * npr::lease_keeper::period));
	EXPECT_EQ(other.looks, looks);
}

TEST_F(LeaseKeeper, SignalsAreForThreadsOfTheApplication)
{
	watch(true);
	ASSERT_TRUE(comes_true([&] { return c.looks > 0; }));
	EXPECT_FALSE(c.takes_signals);
}

/* A device that is gone has nothing to say, for ever. */
TEST_F(LeaseKeeper, ChannelThatHasEndedIsNotListenedTo)
{
	int ends[2];
	ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
	close(ends[0]);
	client gone;
	keeper.add(gone, ends[1]);
	keeper.watch(gone, true);
	EXPECT_TRUE(comes_true([&] { return gone.aged > 4; }));
	keeper.remove(gone);
	EXPECT_LE(gone.looks - gone.aged, 15U) << "looks for an event";
	close(ends[1]);
}

/* --- when it comes --- */

struct turner final : npr::lease_keeper::client {
	using clock = std::chrono::steady_clock;

	void tend(bool) noexcept override {}
	bool take_turn() noexcept override
	{
		const std::lock_guard lock(mutex);

		last = clock::now();
		++turns;
		return busy;
	}

	std::mutex mutex;
	clock::time_point last; /* that a turn came */
	std::atomic<unsigned> turns{0};
	std::atomic<bool> busy{false};
};

struct KeeperTurns : ::testing::Test {
	KeeperTurns() { keeper.add(c, -1); }
	~KeeperTurns() override { keeper.remove(c); }

	static constexpr std::chrono::nanoseconds shortest{npr::lease_keeper::shortest}, longest{npr::lease_keeper::longest};

	void attend(bool has)
	{
		const std::lock_guard lock(c.mutex);

		ASSERT_TRUE(keeper.attend(c, has));
	}

	bool comes(unsigned turn)
	{
		return LeaseKeeper::comes_true([&] { return c.turns >= turn; });
	}

	/* From attend() to the first turn. */
	std::chrono::nanoseconds first()
	{
		const unsigned before = c.turns;
		const auto begun = turner::clock::now();

		attend(true);
		while (c.turns == before && turner::clock::now() - begun < 10s)
			std::this_thread::sleep_for(50us);
		const std::lock_guard lock(c.mutex);
		return c.last - begun;
	}

	npr::lease_keeper keeper;
	turner c;
};

/* The machine may be busy, so it is the best of some. */
TEST_F(KeeperTurns, FirstOneComesAfterTheShortestPause)
{
	auto best = 10s + 0ns;

	for (const auto begun = turner::clock::now(); best > 900us && turner::clock::now() - begun < 20s;) {
		const auto t = first();
		EXPECT_GE(t, shortest) << "who polls has to have the time to do so";
		best = std::min(best, t);
		attend(false);
	}
	EXPECT_LE(best, 900us);
}

TEST_F(KeeperTurns, FirstOneComesAsSoonAfterLongPauses)
{
	auto best = 10s + 0ns;

	for (const auto begun = turner::clock::now(); best > longest / 4 && turner::clock::now() - begun < 20s;) {
		attend(true);
		ASSERT_TRUE(comes(c.turns + 7));
		attend(false);
		const auto t = first();
		EXPECT_GE(t, shortest);
		best = std::min(best, t);
		attend(false);
	}
	EXPECT_LE(best, longest / 4);
}

/* While there is something to do they come much more often than while there is not. */
TEST_F(KeeperTurns, PausesAreLongWhileThereIsNothingToDo)
{
	/* At most so many turns, if that is how long they took. */
	const auto at_most = [](std::chrono::nanoseconds time) { return static_cast<unsigned>(time / longest) + 7; };

	attend(true);
	const auto begun = turner::clock::now();
	ASSERT_TRUE(comes(12));
	const unsigned turns = c.turns;
	EXPECT_LE(turns, at_most(turner::clock::now() - begun));
	/* From 16 ms they become 0.5 ms. */
	c.busy = true;
	EXPECT_TRUE(LeaseKeeper::comes_true([&] {
		const auto from = turner::clock::now();
		const unsigned before = c.turns;
		std::this_thread::sleep_for(longest / 2);
		return c.turns - before > 5 && turner::clock::now() - from < longest;
	}));
}

/* --- when it cannot be started --- */

/* No new descriptor: it is as if there were too many. */
struct no_descriptors {
	no_descriptors()
	{
		EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
		rlimit none = before;
		none.rlim_cur = 0;
		EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
	}
	~no_descriptors() { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0); }

	rlimit before{};
};

TEST(KeeperStart, ThatHasFailedIsTriedAgainLater)
{
#ifdef __SANITIZE_ADDRESS__
	GTEST_SKIP() << "UBSan looks at what is thrown through a pipe, for which there is no descriptor";
#endif
	constexpr std::chrono::nanoseconds period(npr::lease_keeper::period);
	bool early = true;

	/* The machine may take longer than that for two calls. */
	for (int i = 0; i < 50 && early; ++i) {
		npr::lease_keeper keeper;
		turner c;
		const auto begun = turner::clock::now();
		{
			const no_descriptors here;
			EXPECT_FALSE(keeper.attend(c, true));
		}
		early = keeper.attend(c, true);
		EXPECT_TRUE(!early || turner::clock::now() - begun >= period);
		EXPECT_TRUE(LeaseKeeper::comes_true([&] { return keeper.attend(c, true); }));
		EXPECT_TRUE(LeaseKeeper::comes_true([&] { return c.turns > 0; }));
		keeper.remove(c);
	}
	EXPECT_FALSE(early);
}

/* --- and at the same time the application --- */

/* Where it was is nothing any more. */
TEST_F(KeptLeases, QueueThatIsGoneIsNotLookedAt)
{
	constexpr std::size_t size = (sizeof(npr_cq) + 4095) / 4096 * 4096;
	void *const place = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_NE(place, MAP_FAILED);
	npr::fake::cq verbs(dev, 256);
	npr_cq *const mapped = new (place) npr_cq(ctx, verbs.base(), 16);
	npr_qp *const qp = mapped->attach(&make_qp(1), params);
	EXPECT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	EXPECT_GE(mapped->lease_channel(), 0);
	ctx.keeper.watch(*mapped, true);
	EXPECT_EQ(npr_detach_qp(qp), 0);
	mapped->~npr_cq();
	munmap(place, size);
	std::this_thread::sleep_for(std::chrono::nanoseconds(2 * npr::lease_keeper::period));
}

/* Leases come, are recalled, and go with their queue pairs and CQs, which the thread looks at. */
TEST_F(KeptLeases, QueuesComeAndGo)
{
	for (std::uint32_t i = 0; i < 100; ++i) {
		npr::fake::cq verbs(dev, 256);
		verbs.base()->handle = 100 + i % 3;
		cq = std::make_unique<npr_cq>(ctx, verbs.base(), 16);
		npr_qp *const qp = known(1 + i % 5);
		lease(qp);
		if (i % 2)
			kernel_ptr->recall(1 + i % 5);
		if (i % 3 == 0)
			std::this_thread::sleep_for(1ms);
		ASSERT_EQ(npr_detach_qp(qp), 0);
		EXPECT_EQ(kernel_ptr->live(), 0U);
		cq.reset();
	}
	cq = std::make_unique<npr_cq>(ctx, &dev.cq, 2048);
}

/* One thread, and no locks of its own: the library's thread comes in between. */
struct SingleThreadedLeases : KeptLeases {
	SingleThreadedLeases() : KeptLeases(NPR_OPEN_SINGLE_THREADED) {}
};

TEST_F(SingleThreadedLeases, RecallsComeWhileTheApplicationPostsAndPolls)
{
	npr_qp *const qp = known(1);
	std::atomic<bool> stop{false};
	std::thread owner([&] {
		while (!stop) {
			kernel_ptr->recall(1);
			std::this_thread::sleep_for(1ms);
		}
	});
	std::uint64_t n = 0;

	for (const auto begun = std::chrono::steady_clock::now();
	     std::chrono::steady_clock::now() - begun < 1s || !stats(qp).recalls; ++n) {
		ASSERT_LT(std::chrono::steady_clock::now() - begun, 20s);
		b.fill(static_cast<std::byte>(n));
		ASSERT_EQ(post(qp, IBV_WR_RDMA_WRITE, n % pages * 64, b, n), 0);
		const ibv_wc wc = next();
		ASSERT_EQ(wc.wr_id, n);
		ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
	}
	stop = true;
	owner.join();
	EXPECT_TRUE(kernel_ptr->all_back());
	EXPECT_EQ(stats(qp).writes, n);
}

/* What is used often enough for a lease of it, with and without NPR_OPEN_NO_LEASES. */
struct LeasesOrNot : KeptLeases, ::testing::WithParamInterface<unsigned> {
	LeasesOrNot() : KeptLeases(GetParam()) {}

	/* @use at least 300 times, and until @asked; with the flag it never is. */
	template <class F, class A>
	void often(F &&use, A &&asked)
	{
		const bool none = GetParam() & NPR_OPEN_NO_LEASES;
		const auto begun = std::chrono::steady_clock::now();

		for (int i = 0; i < 300 || (!none && !asked()); ++i) {
			ASSERT_LT(std::chrono::steady_clock::now() - begun, 20s);
			ASSERT_NO_FATAL_FAILURE(use());
		}
		EXPECT_EQ(asked() != 0, !none);
	}
};

TEST_P(LeasesOrNot, MemoryOfAPeerIsLeasedIfItMayBe)
{
	npr_qp *const qp = known(1);

	EXPECT_EQ(npr_advise(qp, rkey, base, 64, NPR_ADVISE_WRITE_OFTEN), 0);
	for (const ibv_wr_opcode op : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
		b.fill(std::byte{0x33});
		often(
		    [&] {
			    ASSERT_EQ(post(qp, op, 0, b, 1), 0);
			    EXPECT_EQ(next().status, IBV_WC_SUCCESS);
			    EXPECT_EQ(std::memcmp(b.data(), dev.memory.data(), b.size()), 0);
		    },
		    [&] { return kernel_ptr->leases_asked.load(); });
	}
	if (GetParam()) {
		EXPECT_EQ(stats(qp).leases, 0U);
		EXPECT_EQ(kernel_ptr->live(), 0U);
	}
}

/* Without a lease each request takes a hold of its own, which ends with it. */
TEST_P(LeasesOrNot, LocalMemoryIsLeasedIfItMayBe)
{
	alignas(4096) static std::array<std::byte, 4096> sink;
	npr_qp *const qp = known(1);
	ibv_mr mr{};
	std::uint32_t requests = 0;

	kernel_ptr->grants = false;
	mr.context = &dev.context;
	mr.lkey = 0x900;
	mr.handle = 42;
	ctx.regions.add(mr);
	dev.add_region(mr.handle, sink, true);
	often(
	    [&] {
		    ibv_sge s{reinterpret_cast<std::uintptr_t>(sink.data()), 64, mr.lkey};
		    ibv_send_wr wr{}, *bad;

		    wr.sg_list = &s;
		    wr.num_sge = 1;
		    wr.opcode = IBV_WR_RDMA_READ;
		    wr.send_flags = IBV_SEND_SIGNALED;
		    wr.wr.rdma.remote_addr = base;
		    wr.wr.rdma.rkey = rkey;
		    ASSERT_EQ(npr_post_send(qp, &wr, &bad), 0);
		    EXPECT_EQ(next().status, IBV_WC_SUCCESS);
		    EXPECT_EQ(std::memcmp(sink.data(), dev.memory.data(), 64), 0);
		    ++requests;
	    },
	    [&] { return kernel_ptr->local_leases_asked.load(); });
	if (GetParam()) {
		EXPECT_EQ(kernel_ptr->holds_made, requests);
		EXPECT_TRUE(kernel_ptr->local_holds.empty());
	} else {
		EXPECT_LT(kernel_ptr->holds_made, requests);
	}
	EXPECT_TRUE(ctx.regions.remove(mr));
}

INSTANTIATE_TEST_SUITE_P(Flags, LeasesOrNot, ::testing::Values(0U, unsigned{NPR_OPEN_NO_LEASES}));

} // namespace
