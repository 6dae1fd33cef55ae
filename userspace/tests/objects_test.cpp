/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The library around the engine. */
#include "objects_fixture.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <sanitizer/asan_interface.h>
#include <set>
#include <signal.h>
#include <sys/eventfd.h>

using namespace npr::fake;

namespace {

TEST_F(Objects, DeviceWithoutSupportIsRefusedWithTheKernelsReason)
{
	auto k = std::make_unique<fake_kernel>(dev);
	k->refuse_query = -EOPNOTSUPP;
	try {
		npr_context c(&dev.context, std::move(k), 0, provider_of(dev));
		FAIL();
	} catch (const std::system_error &e) {
		EXPECT_EQ(e.code().value(), EOPNOTSUPP);
	}
}

TEST_F(Objects, WhatIsInUseIsNotClosed)
{
	attach(1);
	EXPECT_EQ(npr_close(&ctx), -EBUSY);
	EXPECT_EQ(npr_detach_cq(cq.get()), -EBUSY);
	EXPECT_THROW(attach(1), std::system_error);
}

/* Pages of this process: of address space, and those that have memory. Pages of files are not counted: how many of its
 * own program a process has mapped is the page cache's matter. */
std::pair<std::size_t, std::size_t> process_pages()
{
	std::ifstream f("/proc/self/statm");
	std::size_t size = 0, resident = 0, of_files = 0;

	f >> size >> resident >> of_files;
	EXPECT_TRUE(f);
	return {size, resident - of_files};
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool sanitized = true; /* which takes memory of its own, and malloc() is not that of libc */
#else
constexpr bool sanitized = false;
#endif

TEST_F(Objects, ReconnectingTakesNoMoreMemory)
{
	ibv_qp &q = make_qp(2);
	attach(1);
	const auto used = [&](unsigned times) {
		while (times--)
			EXPECT_EQ(npr_detach_qp(cq->attach(&q, params)), 0);
		const struct mallinfo2 m = mallinfo2();
		return std::pair(m.uordblks + m.hblkhd, process_pages().first);
	};
	const auto before = used(8), after = used(512);
	EXPECT_LT(after.first, before.first + 16 * 1024);
	if (!sanitized) {
		EXPECT_LT(after.second, before.second + 256) << "mapped, and not unmapped";
	}
}

/* 256 requests, in a send queue of 512 entries, as the preload library makes it. */
TEST_F(Objects, QueuePairThatIsUsedALittleTakesLittleMemory)
{
	constexpr std::uint32_t qps = 64, window = 16;
	constexpr std::size_t most = 64 * 1024;
	npr::qp_params p = params;
	std::array<std::byte, 64> b;
	std::vector<npr_qp *> attached;

	p.depth = 256;
	p.budget = 512;
	p.cache_slots = 2048;
	p.receives = 256;
	dev.cq.cqe = 1 << 20;
	cq = std::make_unique<npr_cq>(ctx, &dev.cq, 1U << 19);
	const std::size_t before = process_pages().second;
	for (std::uint32_t i = 0; i < qps; ++i)
		attached.push_back(cq->attach(&make_qp(i + 1), p));
	for (npr_qp *qp : attached) {
		for (std::uint32_t i = 0; i < window; ++i)
			ASSERT_EQ(post(qp, i % 2 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, 64 * i, b, i), 0);
		for (std::uint32_t i = 0; i < window; ++i)
			ASSERT_EQ(next().status, IBV_WC_SUCCESS);
	}
	/* The HCA reads words into all of the ring, some time: it is pinned. */
	for (npr_qp *qp : attached)
		std::ranges::fill(qp->words.words(), 0);
	const std::size_t each = (process_pages().second - before) * 4096 / qps;
	RecordProperty("bytes", std::to_string(each));
	if (!sanitized) {
		EXPECT_LE(each, most);
	}
}

/* --- the place for words --- */

TEST_F(Objects, WordsHaveAPlaceOnceThereIsARegion)
{
	npr_qp *const qp = attach(1), *const other = attach(2);
	std::array<std::byte, 64> b{};
	npr_region_attr attr{};

	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1, 0x999), 0);
	EXPECT_EQ(next().status, IBV_WC_SUCCESS);
	EXPECT_EQ(dev.pinned, 0U) << "for pinned memory";
	ASSERT_EQ(post(qp, IBV_WR_RDMA_WRITE, 0, b, 2), 0);
	EXPECT_EQ(next().status, IBV_WC_SUCCESS);
	EXPECT_EQ(dev.pinned, 1U);
	ASSERT_EQ(npr_resolve(other, rkey, &attr), 0);
	EXPECT_EQ(attr.unpinned, 1U);
	EXPECT_EQ(dev.pinned, 2U);
	ASSERT_EQ(post(other, IBV_WR_RDMA_WRITE, 0, b, 3), 0);
	EXPECT_EQ(next().status, IBV_WC_SUCCESS);
	EXPECT_EQ(dev.pinned, 2U);
	EXPECT_EQ(npr_detach_qp(other), 0);
	EXPECT_EQ(dev.pinned, 1U);
}

/* ENOMEM is RLIMIT_MEMLOCK's, too. */
TEST_F(Objects, PlaceForWordsIsTriedAgainWhileThereIsNoMemory)
{
	std::array<std::byte, 64> b{};
	ibv_wc wc;
	std::uint32_t number = 0;

	for (const int error : {ENOMEM, EAGAIN}) {
		npr_qp *const qp = attach(++number);
		dev.refuses_pinned = error;
		ASSERT_EQ(post(qp, IBV_WR_RDMA_WRITE, 0, b, 1), 0);
		for (int i = 0; i < 20; ++i) {
			ASSERT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0) << error;
			std::this_thread::sleep_for(std::chrono::milliseconds(1));
		}
		dev.refuses_pinned = 0;
		EXPECT_EQ(next().status, IBV_WC_SUCCESS) << error;
	}
}

TEST_F(Objects, WithoutAPlaceForWordsARequestFails)
{
	npr_qp *const qp = attach(1);
	std::array<std::byte, 64> b{};

	dev.refuses_pinned = EPERM;
	EXPECT_EQ(npr_resolve(qp, rkey, nullptr), -EPERM);
	/* What the peer might have said. */
	for (const int error : {EACCES, ENXIO, EHOSTUNREACH, ECONNREFUSED}) {
		dev.refuses_pinned = error;
		EXPECT_EQ(npr_resolve(qp, rkey, nullptr), -EIO);
	}
	EXPECT_EQ(kernel_ptr->forgotten, 5U) << "each time that the region was got for nothing";
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	EXPECT_EQ(next().status, IBV_WC_GENERAL_ERR);
}

TEST_F(Objects, QueuePairWithoutASendQueueSendsNothing)
{
	npr::qp_params p = params;
	p.depth = p.budget = 0;
	std::array<std::byte, 8> b{};
	for (std::uint32_t i = 1; i <= 8; ++i) {
		npr_qp *const qp = cq->attach(&make_qp(i), p);
		EXPECT_EQ(post(qp, IBV_WR_SEND, 0, b, i), -ENOMEM);
		ibv_sge s{reinterpret_cast<std::uintptr_t>(b.data()), 8, 1};
		ibv_recv_wr wr{}, *bad;
		wr.wr_id = i;
		wr.sg_list = &s;
		wr.num_sge = 1;
		EXPECT_EQ(npr_post_recv(qp, &wr, &bad), i > dev.most_receives ? -ENOMEM : 0);
	}
	EXPECT_TRUE(dev.posted.empty());
}

/*
 * Queue pairs that share a CQ sized for what they signal, more of them than it has entries if that
 * is all. The entries of the application are full of what it has not polled.
 */
struct Crowd : Objects {
	explicit Crowd(bool turns = false) : Objects(0, turns) {}

	static constexpr std::uint32_t queues = 64, depth = 256, every = 64;

	void make(std::uint32_t own, std::uint32_t entries)
	{
		dev.cq.cqe = static_cast<int>(entries);
		dev.capacity = std::max(entries - own, 2U);
		cq = std::make_unique<npr_cq>(ctx, &dev.cq, own);
		for (std::uint32_t i = 1; i <= queues; ++i) {
			npr::qp_params p = params;
			p.depth = depth;
			p.budget = 2 * depth;
			p.relaxed = true;
			qps.push_back(cq->attach(&make_qp(i), p));
			ASSERT_EQ(npr_resolve(qps.back(), rkey, nullptr), 0);
		}
		dev.all_in();
	}

	void post_all()
	{
		for (std::uint64_t n = 1; n <= depth; ++n)
			for (npr_qp *qp : qps) {
				/* a SEND waits for the WRITEs before it */
				const ibv_wr_opcode op = n % 128 == 1 ? IBV_WR_SEND
							 : n % 4 == 0 ? IBV_WR_RDMA_WRITE
								      : IBV_WR_RDMA_READ;
				ASSERT_EQ(post(qp, op, 8 * n, buffer, n, rkey, n % every ? 0 : IBV_SEND_SIGNALED), 0);
			}
	}

	/* All that was asked for, in order. */
	void poll_all()
	{
		std::map<std::uint32_t, std::uint64_t> last;
		const auto begun = npr::monotonic();

		for (std::uint32_t left = queues * depth / every; left;) {
			ibv_wc wc[16];
			const int n = npr_poll_cq(cq.get(), 16, wc);
			ASSERT_GE(n, 0);
			ASSERT_LT(npr::monotonic() - begun, 60'000'000'000U) << left << " are missing";
			for (int i = 0; i < n; ++i, --left) {
				ASSERT_EQ(wc[i].status, IBV_WC_SUCCESS);
				ASSERT_EQ(wc[i].wr_id, last[wc[i].qp_num] += every);
			}
		}
		EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc_), 0);
		const std::lock_guard lock(cq->mutex);
		EXPECT_EQ(cq->credits.used(), 0U) << "the last of each is signaled";
	}

	std::array<std::byte, 8> buffer{};
	std::vector<npr_qp *> qps;
	ibv_wc wc_;
};

TEST_F(Crowd, CompletesOnACqForWhatItSignals)
{
	ASSERT_NO_FATAL_FAILURE(make(4096, 3 * 4096));
	ASSERT_NO_FATAL_FAILURE(post_all());
	ASSERT_NO_FATAL_FAILURE(poll_all());
}

TEST_F(Crowd, CompletesOnACqOf16)
{
	ASSERT_NO_FATAL_FAILURE(make(16, 16 + 256));
	ASSERT_NO_FATAL_FAILURE(post_all());
	ASSERT_NO_FATAL_FAILURE(poll_all());
}

struct CrowdWithTurns : Crowd {
	CrowdWithTurns() : Crowd(true) {}
};

TEST_F(CrowdWithTurns, CompletesOnACqOf16)
{
	ASSERT_NO_FATAL_FAILURE(make(16, 16 + 256));
	ASSERT_NO_FATAL_FAILURE(post_all());
	ASSERT_NO_FATAL_FAILURE(poll_all());
}

TEST_F(Crowd, CompletesIfTheDeviceHasNoEntriesMore)
{
	ASSERT_NO_FATAL_FAILURE(make(4096, 4096));
	ASSERT_NO_FATAL_FAILURE(post_all());
	ASSERT_NO_FATAL_FAILURE(poll_all());
}

TEST_F(Crowd, CompletesOnACqThatIsMadeSmallerAndLarger)
{
	std::uint32_t entries = 0;
	const auto resize = [&](std::uint32_t own) {
		return cq->resize(own, 1 << 22, [&](std::uint32_t n) {
			EXPECT_LE(dev.completions.size() + own, n) << "what has completed is lost";
			dev.cq.cqe = static_cast<int>(entries = n);
			dev.capacity = n - own;
			return 0;
		});
	};
	ASSERT_NO_FATAL_FAILURE(make(4096, 3 * 4096));
	/* The library's thread finds nothing that has completed. */
	dev.stall = true;
	ASSERT_NO_FATAL_FAILURE(post_all());
	const std::uint32_t used = cq->credits.used();
	EXPECT_GT(used, 4096U);
	ASSERT_EQ(resize(16), 0);
	EXPECT_EQ(entries, 16 + used + npr::credits::most) << "all that is posted may complete";
	EXPECT_EQ(cq->credits.total(), used + npr::credits::most);
	dev.go_on();
	ASSERT_NO_FATAL_FAILURE(poll_all());

	ASSERT_EQ(resize(16), 0);
	EXPECT_EQ(cq->credits.total(), 256U);
	{
		const std::lock_guard lock(dev.mutex);
		dev.stall = true;
	}
	ASSERT_NO_FATAL_FAILURE(post_all());
	ASSERT_EQ(resize(4096), 0);
	EXPECT_EQ(cq->credits.total(), 2U * 4096);
	EXPECT_GT(cq->credits.used(), 256U) << "who stood in line goes on";
	dev.go_on();
	ASSERT_NO_FATAL_FAILURE(poll_all());
}

/* Receives that it has not polled, more than it wants entries for now. On pinned memory it is refused that. */
TEST_F(Crowd, CqThatIsMadeSmallerThanWhatWasNotPolledLosesNothing)
{
	constexpr std::uint64_t first = 0x5000'0000'0000, receives = 1000;
	std::uint64_t received = 0, sent = 0;

	ASSERT_NO_FATAL_FAILURE(make(4096, 3 * 4096));
	dev.capacity = 3 * 4096;
	dev.stall = true;
	ASSERT_NO_FATAL_FAILURE(post_all());
	for (std::uint64_t i = 0; i < receives; ++i) {
		ibv_wc wc{};
		wc.wr_id = first + i;
		wc.opcode = IBV_WC_RECV;
		wc.qp_num = 1;
		const std::lock_guard lock(dev.mutex);
		dev.complete(wc);
	}
	ASSERT_EQ(cq->resize(16, 1 << 22, [&](std::uint32_t n) {
		dev.cq.cqe = static_cast<int>(n);
		dev.capacity = n;
		return dev.completions.size() > n ? EINVAL : 0;
	}), 0);
	EXPECT_LT(dev.capacity, receives + cq->credits.used()) << "for both there would be no room";
	/* All that is posted completes, in the entries that are left to it. */
	dev.go_on();
	const auto begun = npr::monotonic();
	while (received < receives || sent < queues * depth / every) {
		ASSERT_LT(npr::monotonic() - begun, 60'000'000'000U) << received << " and " << sent;
		const int n = npr_poll_cq(cq.get(), 1, &wc_);
		ASSERT_GE(n, 0);
		if (!n)
			continue;
		ASSERT_EQ(wc_.status, IBV_WC_SUCCESS);
		if (wc_.opcode == IBV_WC_RECV) {
			ASSERT_EQ(wc_.wr_id, first + received++) << "once, in order";
		} else {
			++sent;
		}
	}
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc_), 0);
}

TEST_F(Crowd, CqThatCannotBeResizedStaysAsItIs)
{
	ASSERT_NO_FATAL_FAILURE(make(16, 16 + 64));
	EXPECT_EQ(cq->resize(64, 1 << 22, [](std::uint32_t) { return ENOMEM; }), ENOMEM);
	EXPECT_EQ(cq->credits.total(), 64U);
	ASSERT_NO_FATAL_FAILURE(post_all());
	ASSERT_NO_FATAL_FAILURE(poll_all());
}

TEST_F(Crowd, DetachedQueuePairGivesItsCreditsToThoseInLine)
{
	ASSERT_NO_FATAL_FAILURE(make(16, 16 + 8));
	dev.stall = true;
	for (std::uint64_t n = 1; n <= depth; ++n)
		ASSERT_EQ(post(qps[0], IBV_WR_RDMA_READ, 0, buffer, n), 0);
	dev.stall = false;
	const std::size_t posted = dev.posted.size();
	for (std::uint64_t n = 1; n <= 16; ++n)
		ASSERT_EQ(post(qps[1], IBV_WR_SEND, 0, buffer, n), 0);
	EXPECT_LT(dev.posted.size(), posted + 16) << "the others stand in line";
	const std::size_t before = dev.posted.size();
	ASSERT_EQ(npr_detach_qp(qps[0]), 0);
	EXPECT_GT(dev.posted.size(), before) << "nobody need poll for that";
	for (std::uint64_t n = 1; n <= 16; ++n)
		EXPECT_EQ(next().wr_id, n);
	EXPECT_EQ(cq->credits.used(), 0U);
}

TEST_F(Crowd, QueuePairsBehindSilentOnesPostAtOnce)
{
	ASSERT_NO_FATAL_FAILURE(make(16, 16 + 64));
	dev.stall = true;
	for (std::size_t i = 0; i < 4; ++i)
		for (std::uint64_t n = 1; n <= depth; ++n)
			ASSERT_EQ(post(qps[i], IBV_WR_RDMA_READ, 0, buffer, n), 0);
	EXPECT_TRUE(cq->credits.line());
	const std::size_t posted = dev.posted.size();
	ASSERT_EQ(post(qps[4], IBV_WR_RDMA_READ, 0, buffer, 1), 0);
	EXPECT_EQ(dev.posted.size(), posted + 1);
	dev.capacity = dev.posted.size(); /* what is under way is flushed */
}

/* Nobody says what else completes there. */
TEST_F(Objects, HalfOfACqIsTheApplications)
{
	npr::fake::cq verbs(dev, 1023);
	npr_cq *const half = npr_attach_cq(&ctx, verbs.base());
	ASSERT_TRUE(half);
	EXPECT_EQ(half->credits.total(), 512U);
	EXPECT_EQ(npr_detach_cq(half), 0);
}

TEST_F(Objects, ReadOfAbsentMemoryBringsTheMemory)
{
	npr_qp *qp = attach(1);
	std::array<std::byte, 300> b;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 4000, b, 7), 0);
	const ibv_wc wc = next();
	EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
	EXPECT_EQ(wc.wr_id, 7U);
	EXPECT_EQ(wc.qp_num, 1U);
	EXPECT_EQ(wc.byte_len, 300U);
	EXPECT_TRUE(std::equal(b.begin(), b.end(), dev.memory.begin() + 4000));
}

TEST_F(Objects, WriteToAbsentMemoryReachesIt)
{
	npr_qp *qp = attach(1);
	std::array<std::byte, 5000> b;
	b.fill(std::byte{0x5c});
	ASSERT_EQ(post(qp, IBV_WR_RDMA_WRITE, 8000, b, 8), 0);
	EXPECT_EQ(next().status, IBV_WC_SUCCESS);
	EXPECT_TRUE(std::equal(b.begin(), b.end(), dev.memory.begin() + 8000));
	npr_stats s;
	std::memset(&s, 0xff, sizeof(s));
	ASSERT_EQ(npr_get_stats(qp, &s, sizeof(s)), 0);
	EXPECT_EQ(s.writes, 1U);
	EXPECT_EQ(s.bytes_written, 5000U);
	EXPECT_EQ(s.reserved[std::size(s.reserved) - 1], 0U);
}

TEST_F(Objects, AdviceIsOfThreeKinds)
{
	npr_qp *qp = attach(1);
	ASSERT_EQ(npr_advise(qp, rkey, base, 64, NPR_ADVISE_READ_OFTEN), -ENOENT);
	ASSERT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	EXPECT_EQ(npr_advise(qp, rkey, base, 64, 0), -EINVAL);
	EXPECT_EQ(npr_advise(qp, rkey, base, 64, 4), -EINVAL);
	kernel_ptr->grants = true;
	ASSERT_EQ(npr_advise(qp, rkey, base, 64, NPR_ADVISE_READ_OFTEN), 0);
	npr_stats s{};
	ibv_wc wc;
	for (int i = 0; i < 5000 && !s.leases; ++i) {
		EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
		ASSERT_EQ(npr_get_stats(qp, &s, sizeof(s)), 0);
		std::this_thread::sleep_for(std::chrono::milliseconds(1));
	}
	EXPECT_EQ(s.leases, 1U);
	EXPECT_EQ(npr_advise(qp, rkey, base, 64, NPR_ADVISE_SELDOM), 0);
	EXPECT_TRUE(kernel_ptr->leases.empty());
}

/* --- local buffers in unpinned regions --- */

struct Local : Objects {
	Local()
	{
		mr.context = &dev.context;
		mr.lkey = 0x900;
		mr.handle = 42;
		ctx.regions.add(mr);
		dev.add_region(mr.handle, b);
	}
	~Local() override { ctx.regions.remove(mr); }

	static int receive(npr_qp *qp, std::uint64_t id, std::span<ibv_sge> sges)
	{
		ibv_recv_wr wr{}, *bad;
		wr.wr_id = id;
		wr.sg_list = sges.data();
		wr.num_sge = static_cast<int>(sges.size());
		return npr_post_recv(qp, &wr, &bad);
	}

	static int receive(npr_srq *srq, std::uint64_t id, std::span<ibv_sge> sges)
	{
		ibv_recv_wr wr{}, *bad;
		wr.wr_id = id;
		wr.sg_list = sges.data();
		wr.num_sge = static_cast<int>(sges.size());
		return npr_post_srq_recv(srq, &wr, &bad);
	}

	/* What the HCA does with a receive, the oldest, of QP @number. */
	void arrive(std::uint32_t number, std::size_t i = 0, ibv_wc_status status = IBV_WC_SUCCESS)
	{
		arrive(dev.main, number, i, status);
	}
	void arrive(npr::fake::cq &at, std::uint32_t number, std::size_t i = 0, ibv_wc_status status = IBV_WC_SUCCESS)
	{
		ibv_wc wc{};
		wc.wr_id = dev.receives[i].first;
		wc.status = status;
		wc.opcode = status == IBV_WC_SUCCESS ? IBV_WC_RECV : ibv_wc_opcode{};
		wc.qp_num = number;
		dev.receives.erase(dev.receives.begin() + static_cast<std::ptrdiff_t>(i));
		at.completions.push_back(wc);
	}

	ibv_mr mr{};
	std::array<std::byte, 64> b{};
	ibv_sge local[2] = {{reinterpret_cast<std::uintptr_t>(b.data()), 32, 0x900},
			    {reinterpret_cast<std::uintptr_t>(b.data()) + 32, 32, 0x900}};
	ibv_sge pinned[1] = {{reinterpret_cast<std::uintptr_t>(b.data()), 64, 1}};
};

TEST_F(Local, SendIsHeldUntilItsCompletionIsPolled)
{
	npr_qp *qp = attach(1);
	ibv_send_wr wr{}, *bad;
	wr.sg_list = local;
	wr.num_sge = 1;
	wr.opcode = IBV_WR_SEND;
	wr.send_flags = IBV_SEND_SIGNALED;
	ASSERT_EQ(npr_post_send(qp, &wr, &bad), 0);
	ASSERT_EQ(kernel_ptr->local_holds.size(), 1U);
	EXPECT_EQ(kernel_ptr->local_holds[1].mr, 42U);
	EXPECT_EQ(kernel_ptr->local_holds[1].req.length, 32U);
	EXPECT_EQ(kernel_ptr->local_holds[1].req.flags, 0U);
	EXPECT_EQ(next().status, IBV_WC_SUCCESS);
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
}

TEST_F(Local, WhatWaitsForMemoryKeepsNobodyElseWaiting)
{
	npr_qp *const waits = attach(1), *const other = attach(2);
	for (const bool send : {true, false}) {
		kernel_ptr->block_hold = true;
		std::thread poster([&] {
			ibv_send_wr wr{}, *bad;
			wr.wr_id = 7;
			wr.sg_list = local;
			wr.num_sge = 2;
			wr.opcode = IBV_WR_SEND;
			wr.send_flags = IBV_SEND_SIGNALED;
			EXPECT_EQ(send ? npr_post_send(waits, &wr, &bad) : receive(waits, 8, std::span(local, 1)), 0);
		});
		EXPECT_TRUE(kernel_ptr->await_resolves());
		/* Of the same CQ, by the same thread that the first one could be. */
		for (unsigned i = 0; i < 3; ++i) {
			ibv_send_wr wr{}, *bad;
			wr.wr_id = i;
			wr.sg_list = pinned;
			wr.num_sge = 1;
			wr.opcode = IBV_WR_SEND;
			wr.send_flags = IBV_SEND_SIGNALED;
			EXPECT_EQ(npr_post_send(other, &wr, &bad), 0);
			EXPECT_EQ(next().wr_id, i);
		}
		EXPECT_EQ(receive(other, 9, pinned), 0);
		kernel_ptr->unblock();
		poster.join();
		if (send) {
			EXPECT_EQ(next().wr_id, 7U);
		}
	}
	ASSERT_EQ(dev.receives.size(), 3U);
	for (int i = 0; i < 3; ++i) {
		arrive(1);
		(void)next();
	}
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
}

/* Each one's buffers are held when it is its turn. */
TEST_F(Local, ListIsPostedInOrderAndNoHoldIsLost)
{
	npr_qp *const qp = attach(1);
	std::array<ibv_send_wr, 5> wrs{};
	ibv_send_wr *bad = nullptr;
	for (std::size_t i = 0; i < wrs.size(); ++i) {
		ibv_send_wr &wr = wrs[i];
		wr.wr_id = i;
		wr.sg_list = i % 2 ? pinned : local;
		wr.num_sge = i % 2 ? 1 : 2;
		wr.opcode = IBV_WR_SEND;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.next = i + 1 < wrs.size() ? &wrs[i + 1] : nullptr;
	}
	ASSERT_EQ(npr_post_send(qp, wrs.data(), &bad), 0);
	EXPECT_EQ(kernel_ptr->local_holds.size(), 6U);
	for (std::size_t i = 0; i < wrs.size(); ++i)
		EXPECT_EQ(next().wr_id, i);
	EXPECT_TRUE(kernel_ptr->local_holds.empty());

	/* What cannot be held is told of the request that wants it, and those before it are posted. */
	kernel_ptr->refuse_hold = -EFAULT;
	std::swap(wrs[0].sg_list, wrs[1].sg_list);
	std::swap(wrs[0].num_sge, wrs[1].num_sge);
	EXPECT_EQ(npr_post_send(qp, wrs.data(), &bad), -EFAULT);
	EXPECT_EQ(bad, &wrs[1]);
	EXPECT_EQ(next().wr_id, 0U);
	ibv_wc wc;
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);

	/* Of two buffers the second one cannot be. */
	kernel_ptr->refuse_hold = 0;
	kernel_ptr->most_holds = kernel_ptr->holds_made + 1;
	wrs[1].next = nullptr;
	EXPECT_EQ(npr_post_send(qp, &wrs[1], &bad), -EFAULT);
	EXPECT_EQ(kernel_ptr->holds_made, kernel_ptr->most_holds);
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
}

TEST_F(Local, ReceivesAreHeldUntilTheirCompletionsArePolled)
{
	npr_qp *qp = attach(1);
	for (std::uint64_t i = 0; i < 20; ++i) {
		ASSERT_EQ(receive(qp, 100 + i, i % 2 ? std::span<ibv_sge>(local) : std::span<ibv_sge>(pinned)), 0);
		ASSERT_EQ(receive(qp, 200 + i, std::span(local, 1)), 0);
		EXPECT_EQ(is_held(dev.receives[0].second), i % 2 != 0);
		EXPECT_TRUE(is_held(dev.receives[1].second));
		ASSERT_EQ(kernel_ptr->local_holds.size(), i % 2 ? 3U : 1U);
		for (const auto &[handle, hold] : kernel_ptr->local_holds)
			EXPECT_EQ(hold.req.flags, RDMA_NP_FAULT_WRITE);
		arrive(1);
		EXPECT_EQ(next().wr_id, 100 + i);
		EXPECT_EQ(kernel_ptr->local_holds.size(), 1U);
		arrive(1);
		EXPECT_EQ(next().wr_id, 200 + i);
		EXPECT_TRUE(kernel_ptr->local_holds.empty());
	}
}

TEST_F(Local, ReceiveThatCannotBeHeldOrPostedIsRefused)
{
	npr_qp *qp = attach(1);
	/* With any of these the HCA would end the queue pair, for a key that is not for it. */
	for (const int lack : {-ENOMEM, -EBUSY, -ENOSPC}) {
		kernel_ptr->refuse_hold = lack;
		EXPECT_EQ(receive(qp, 1, local), -ENOBUFS) << lack;
	}
	kernel_ptr->refuse_hold = -EFAULT;
	EXPECT_EQ(receive(qp, 1, local), -EFAULT);
	EXPECT_TRUE(dev.receives.empty());
	kernel_ptr->refuse_hold = 0;
	ibv_sge three[3] = {local[0], local[0], local[0]};
	EXPECT_EQ(receive(qp, 1, three), -EINVAL);
	for (int i = 0; i < 4; ++i)
		EXPECT_EQ(receive(qp, 1, local), 0);
	EXPECT_EQ(receive(qp, 1, local), -ENOMEM) << "as many as the receive queue takes";
	EXPECT_EQ(kernel_ptr->local_holds.size(), 8U);
	/* and what is posted must not go on using it */
	EXPECT_EQ(npr_detach_qp(qp), 0);
	EXPECT_TRUE(dev.dead.count(1));
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
}

TEST_F(Local, ReceiveOfAnotherQueueIsRefused)
{
	npr_qp *qp = attach(1);
	ibv_cq other{};
	qp->verbs->recv_cq = &other;
	EXPECT_EQ(receive(qp, 1, pinned), -EINVAL);
	ibv_srq srq{};
	qp->verbs->recv_cq = &dev.cq;
	qp->verbs->srq = &srq;
	EXPECT_EQ(receive(qp, 1, pinned), -EINVAL);
}

TEST_F(Local, ReceivesCompleteOnAnotherCqToo)
{
	npr_qp *qp = attach(1);
	npr::fake::cq verbs(dev, 16);
	npr_cq receiver(ctx, verbs.base(), 16);
	qp->verbs->recv_cq = verbs.base();
	ASSERT_EQ(receive(qp, 7, local), 0);
	EXPECT_EQ(kernel_ptr->local_holds.size(), 2U);
	arrive(verbs, 1);
	ibv_wc wc;
	ASSERT_EQ(npr_poll_cq(&receiver, 1, &wc), 1);
	EXPECT_EQ(wc.wr_id, 7U);
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
}

/* What the HCA completes in which order is its business. */
TEST_F(Local, SharedReceivesAreGivenBackEachWithItsCompletion)
{
	srq verbs(dev);
	npr_srq shared(ctx, &verbs.verbs, 4, 2);
	for (std::uint64_t i = 0; i < 20; ++i) {
		ASSERT_EQ(receive(&shared, 10, local), 0);
		ASSERT_EQ(receive(&shared, 11, pinned), 0);
		ASSERT_EQ(receive(&shared, 12, std::span(local, 1)), 0);
		ASSERT_EQ(receive(&shared, 13, local), 0);
		ASSERT_EQ(receive(&shared, 14, local), -ENOMEM);
		EXPECT_EQ(dev.receives[1].first, 11U) << "nothing to give back";
		EXPECT_EQ(kernel_ptr->local_holds.size(), 5U);
		arrive(99, 2);
		EXPECT_EQ(next().wr_id, 12U);
		EXPECT_EQ(kernel_ptr->local_holds.size(), 4U);
		arrive(98, 2, IBV_WC_WR_FLUSH_ERR);
		const ibv_wc flushed = next();
		EXPECT_EQ(flushed.wr_id, 13U);
		EXPECT_EQ(flushed.status, IBV_WC_WR_FLUSH_ERR);
		EXPECT_EQ(kernel_ptr->local_holds.size(), 2U);
		arrive(99, 1);
		arrive(99, 0);
		EXPECT_EQ(next().wr_id, 11U);
		EXPECT_EQ(kernel_ptr->local_holds.size(), 2U);
		EXPECT_EQ(next().wr_id, 10U);
		EXPECT_TRUE(kernel_ptr->local_holds.empty());
	}
}

TEST_F(Local, SharedQueueGivesBackWhatItHeldAndNoOtherDoes)
{
	npr_qp *qp = attach(1);
	srq verbs(dev);
	{
		npr_srq shared(ctx, &verbs.verbs, 4, 2);
		ASSERT_EQ(receive(&shared, 1, local), 0);
		ASSERT_EQ(receive(&shared, 2, local), 0);
		ASSERT_EQ(receive(qp, 3, std::span(local, 1)), 0);
		EXPECT_EQ(npr_close(&ctx), -EBUSY);
	}
	EXPECT_EQ(kernel_ptr->local_holds.size(), 1U);
	arrive(1, 2);
	EXPECT_EQ(next().wr_id, 3U);
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
	/* What completes after all is no reason to give back something else. */
	ASSERT_EQ(receive(qp, 4, local), 0);
	std::swap(dev.receives[0].first, dev.receives[1].first);
	dev.receives[2].first ^= 1ULL << 40;
	arrive(1, 2);
	(void)next();
	EXPECT_EQ(kernel_ptr->local_holds.size(), 2U);
}

TEST_F(Local, LateCompletionOfADetachedQueuePairIsNobodys)
{
	ibv_wc wc{};
	npr_qp *a = attach(1), *other = attach(2);

	ASSERT_EQ(receive(a, 50, local), 0);
	const auto late = dev.receives.front();
	ASSERT_EQ(npr_detach_qp(a), 0);
	ASSERT_TRUE(kernel_ptr->local_holds.empty());
	arrive(1, 0, IBV_WC_WR_FLUSH_ERR);
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0) << "of wr_id " << wc.wr_id;

	/* and when its place is another's by then */
	ASSERT_EQ(receive(other, 60, local), 0);
	dev.receives.push_back(late);
	arrive(1, 1, IBV_WC_WR_FLUSH_ERR);
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0) << "of wr_id " << wc.wr_id;
	EXPECT_EQ(kernel_ptr->local_holds.size(), 2U) << "of a receive that is posted";
	arrive(2);
	ASSERT_EQ(npr_poll_cq(cq.get(), 1, &wc), 1);
	EXPECT_EQ(wc.wr_id, 60U);
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
}

TEST_F(Local, LateCompletionPolledByADetachIsNobodys)
{
	ibv_wc wc{};
	npr_qp *a = attach(1), *other = attach(2);

	ASSERT_EQ(receive(a, 50, local), 0);
	ASSERT_EQ(npr_detach_qp(a), 0);
	dev.stall = true;
	ASSERT_EQ(post(other, IBV_WR_SEND, 0, b, 61), 0);
	arrive(1, 0, IBV_WC_WR_FLUSH_ERR);
	ASSERT_EQ(npr_detach_qp(other), 0);
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0) << "of wr_id " << wc.wr_id;
}

TEST(Receives, IdOfAnAbandonedReceiveIsNeverUsedAgain)
{
	npr::receives all;
	std::vector<std::uint64_t> ids;
	std::uint32_t hold = 0;
	std::uint64_t id = 0;

	for (unsigned i = 0; i < 3000; ++i) {
		ids.push_back(all.add(&all, i, i).value());
		ASSERT_EQ(ids.front() >> 32, ids.back() >> 32) << "the upper half tells them from others";
		const auto abandoned = all.abandon(&all);
		ASSERT_TRUE(abandoned);
		std::array<std::uint32_t, 1> held;
		ASSERT_EQ(all.take_holds(*abandoned, held), 1U);
		EXPECT_EQ(held[0], i);
		EXPECT_EQ(all.take_holds(*abandoned, held), 0U);
	}
	ids.push_back(all.add(&all, 7, 8).value());
	std::sort(ids.begin(), ids.end() - 1);
	EXPECT_EQ(std::adjacent_find(ids.begin(), ids.end() - 1), ids.end() - 1);
	for (const std::uint64_t x : ids) {
		ibv_wc wc{};
		wc.wr_id = x;
		wc.status = IBV_WC_WR_FLUSH_ERR;
		EXPECT_EQ(all.completed(wc, hold, id), x == ids.back() ? npr::receives::whose::receive
								       : npr::receives::whose::nobody);
	}
	EXPECT_EQ(hold, 8U);
	EXPECT_FALSE(all.any());
}

TEST(Receives, EachHoldOfManyIsGivenBack)
{
	for (std::uint32_t count = 2; count < 6; ++count) {
		npr::receives all;
		std::uint32_t hold = 0;
		std::uint64_t id = 0;
		const auto made = all.add(&all, 7, 1);
		std::multiset<std::uint32_t> holds, expected{1};

		ASSERT_TRUE(made);
		for (std::uint32_t k = 2; k <= count; ++k) {
			ASSERT_TRUE(all.add_hold(*made, k));
			expected.insert(k);
		}
		ibv_wc wc{};
		wc.wr_id = *made;
		wc.opcode = IBV_WC_RECV;
		EXPECT_EQ(all.completed(wc, hold, id), npr::receives::whose::several);
		EXPECT_EQ(wc.wr_id, 7U);
		EXPECT_EQ(id, *made);
		std::array<std::uint32_t, 2> some;
		std::size_t n;
		do {
			n = all.take_holds(id, some);
			holds.insert(some.begin(), some.begin() + static_cast<std::ptrdiff_t>(n));
			/* Its place is another one's as soon as it is no more, and then nobody may come back for it. */
			EXPECT_EQ(all.any(), n == some.size());
		} while (n == some.size());
		EXPECT_EQ(holds, expected);
	}
}

/* As ibv_reg_mr_iova() with the preload library: nothing is at the addresses of work requests. */
TEST_F(Local, SinkAtAnotherAddressIsHeldAndLookedAtWhereItIs)
{
	npr_qp *qp = attach(1);
	constexpr std::uint64_t away = 1ULL << 53;
	std::array<std::byte, 300> sink;
	for (const bool unpinned : {true, false}) {
		ibv_mr iova = mr;
		iova.lkey = 0x901;
		ctx.regions.add(iova, {unpinned ? std::optional(43U) : std::nullopt, -away});
		const std::uint64_t at = reinterpret_cast<std::uintptr_t>(sink.data()) + away;
		dev.regions.erase(43);
		dev.keys.erase(iova.lkey);
		if (unpinned)
			dev.regions[43] = {at, sink.size(), -away};
		else
			dev.keys[iova.lkey] = {at, sink.size(), -away, true};
		dev.all_out();
		ibv_sge s{at, sink.size(), iova.lkey};
		ibv_send_wr wr{}, *bad;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = IBV_WR_RDMA_READ;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.wr.rdma.remote_addr = base + 4000;
		wr.wr.rdma.rkey = rkey;
		sink.fill({});
		ASSERT_EQ(npr_post_send(qp, &wr, &bad), 0);
		EXPECT_EQ(kernel_ptr->local_holds.size(), unpinned ? 1U : 0U);
		if (unpinned) {
			EXPECT_EQ(kernel_ptr->local_holds.begin()->second.mr, 43U);
			EXPECT_EQ(kernel_ptr->local_holds.begin()->second.req.addr, s.addr);
		}
		EXPECT_EQ(next().status, IBV_WC_SUCCESS);
		EXPECT_TRUE(std::equal(sink.begin(), sink.end(), dev.memory.begin() + 4000));
		EXPECT_TRUE(kernel_ptr->local_holds.empty());
		EXPECT_TRUE(ctx.regions.remove(iova));
	}
}

/* The application freed it with ibv_dereg_mr(), and its key names another one now. */
TEST_F(Local, KeyThatIsNoRegionAnyMoreGoesToTheHca)
{
	npr_qp *qp = attach(1);
	for (const int error : {-EINVAL, -ENOENT, -ERANGE, -EPERM}) {
		kernel_ptr->refuse_hold = error;
		EXPECT_EQ(receive(qp, 1, local), 0);
		EXPECT_EQ(dev.receives.back().second, 0x900U);
	}
	EXPECT_EQ(npr_detach_qp(qp), 0);
	EXPECT_FALSE(dev.dead.count(1)) << "nothing was held";
}

TEST_F(Objects, FaultOnOneQueuePairDoesNotDelayAnother)
{
	npr_qp *a = attach(1), *b = attach(2);
	dev.all_in();
	dev.page_out(0);
	kernel_ptr->withhold = true;
	std::array<std::byte, 100> one, two;
	ASSERT_EQ(post(a, IBV_WR_RDMA_READ, 0, one, 1), 0);
	for (;;) {
		ibv_wc wc;
		ASSERT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
		const std::lock_guard lock(kernel_ptr->mutex);
		if (!kernel_ptr->held.empty())
			break;
	}
	for (int i = 0; i < 50; ++i) {
		ASSERT_EQ(post(b, IBV_WR_RDMA_READ, 8192, two, 2), 0);
		EXPECT_EQ(next().wr_id, 2U);
	}
	kernel_ptr->send(kernel_ptr->held[0]);
	EXPECT_EQ(next().wr_id, 1U);
}

TEST_F(Objects, KeyBeingResolvedOnOneQueuePairDoesNotDelayAnother)
{
	npr_qp *a = attach(1), *b = attach(2);
	ASSERT_EQ(npr_resolve(b, rkey, nullptr), 0);
	dev.all_in();
	kernel_ptr->block(1);
	std::array<std::byte, 100> one, two;
	ASSERT_EQ(post(a, IBV_WR_RDMA_READ, 0, one, 1), 0);
	for (int i = 0; i < 50; ++i) {
		ASSERT_EQ(post(b, IBV_WR_RDMA_READ, 8192, two, 2), 0);
		EXPECT_EQ(next().wr_id, 2U);
	}
	kernel_ptr->unblock();
	EXPECT_EQ(next().wr_id, 1U);
}

struct Silent : Objects {
	/* Peers of these say nothing until unblock(), but hear what they are asked. */
	void silence(std::size_t n)
	{
		while (qps.size() < n)
			qps.push_back(attach(static_cast<std::uint32_t>(100 + qps.size())));
		for (const npr_qp *q : qps)
			kernel_ptr->block(q->verbs->qp_num);
	}

	/* As the engine does. */
	void ask(npr_qp *q, std::uint32_t key)
	{
		q->engine.resolve_begins();
		ctx.resolver.submit(*q, key);
	}

	/* False: no answer, for a long time. */
	[[nodiscard]] bool answered(npr_qp *q)
	{
		const npr::nanoseconds begun = npr::monotonic();
		ibv_wc wc;
		while (q->engine.waits_for_kernel()) {
			if (npr::monotonic() - begun > 10'000'000'000)
				return false;
			EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
			std::this_thread::yield();
		}
		return true;
	}

	~Silent() override { kernel_ptr->unblock(); }

	static constexpr std::uint32_t pinned_key = 0x9000;
	npr_qp *qp = attach(1);
	std::vector<npr_qp *> qps;
};

TEST_F(Silent, PeersDelayNoKeyOfAnother)
{
	silence(20);
	std::array<std::byte, 8> b;
	for (npr_qp *q : qps)
		ASSERT_EQ(post(q, IBV_WR_RDMA_READ, 0, b, 5), 0);
	ASSERT_TRUE(kernel_ptr->await_resolves(qps.size()));
	ask(qp, pinned_key);
	EXPECT_TRUE(answered(qp));
}

/* Another thread's work comes and goes meanwhile: it is no luck that a second one is free. */
TEST_F(Silent, PeerHasOneThreadWhateverIsAsked)
{
	silence(1);
	for (std::uint32_t i = 0; i < 8; ++i)
		ask(qps[0], pinned_key + i);
	ASSERT_TRUE(kernel_ptr->await_resolves());
	for (std::uint32_t i = 0; i < 50; ++i) {
		ask(qp, pinned_key + i);
		ASSERT_TRUE(answered(qp));
	}
	kernel_ptr->unblock();
	EXPECT_TRUE(answered(qps[0]));
}

TEST_F(Silent, PeersThatWereSlowLeaveThreadsToOthers)
{
	silence(npr::resolver::max_threads);
	for (npr_qp *q : qps)
		ask(q, pinned_key);
	ASSERT_TRUE(kernel_ptr->await_resolves(qps.size()));
	const npr::nanoseconds begun = npr::monotonic();
	while (npr::monotonic() - begun <= npr::resolver::slow_answer)
		std::this_thread::yield();
	kernel_ptr->unblock();
	for (npr_qp *q : qps)
		ASSERT_TRUE(answered(q));
	silence(qps.size());
	for (npr_qp *q : qps)
		ask(q, pinned_key + 1);
	for (std::uint32_t i = 0; i < 50; ++i) {
		ask(qp, pinned_key + i);
		ASSERT_TRUE(answered(qp));
	}
	ASSERT_TRUE(kernel_ptr->await_resolves(npr::resolver::max_slow));
	/* and in the end it is their turn */
	kernel_ptr->unblock();
	for (npr_qp *q : qps)
		EXPECT_TRUE(answered(q));
}

/* The first thread and spares: who waits for a signal, or blocks it, does so in his own threads. */
TEST_F(Objects, SignalsAreForThreadsOfTheApplication)
{
	std::array<std::byte, 8> b;
	sigset_t before, after;
	pthread_sigmask(SIG_BLOCK, nullptr, &before);
	for (std::uint32_t i = 1; i <= 4; ++i) {
		npr_qp *qp = attach(i);
		kernel_ptr->block(i);
		ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, i), 0);
	}
	EXPECT_TRUE(kernel_ptr->await_resolves(4));
	pthread_sigmask(SIG_BLOCK, nullptr, &after);
	kernel_ptr->unblock();
	EXPECT_EQ(kernel_ptr->interrupted_by, std::set<int>{});
	for (int s = 1; s <= SIGRTMAX; ++s)
		EXPECT_EQ(sigismember(&before, s), sigismember(&after, s)) << s;
}

TEST_F(Objects, BusyPeerIsAskedAgainForAKey)
{
	npr_qp *qp = attach(1);
	kernel_ptr->busy = 3;
	dev.all_in();
	std::array<std::byte, 8> b;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	EXPECT_EQ(next().status, IBV_WC_SUCCESS);
	npr_region_attr attr;
	kernel_ptr->busy_answer = -ENOMEM;
	for (std::uint32_t i = 2; i < 5; ++i) {
		kernel_ptr->busy = 1;
		ASSERT_EQ(post(attach(i), IBV_WR_RDMA_READ, 0, b, i), 0);
		EXPECT_EQ(next().status, IBV_WC_SUCCESS);
		kernel_ptr->busy = 1;
		EXPECT_EQ(npr_resolve(qp, rkey, &attr), 0);
	}
	kernel_ptr->busy_answer = -EBUSY;
	kernel_ptr->busy = 2;
	EXPECT_EQ(npr_resolve(qp, rkey, &attr), 0);
	EXPECT_EQ(attr.unpinned, 1U);
	EXPECT_EQ(attr.base, base);
	EXPECT_EQ(npr_resolve(qp, 0x999, &attr), 0);
	EXPECT_EQ(attr.unpinned, 0U);
}

TEST_F(Objects, RegionThatMakesNoSenseIsNoAnswer)
{
	npr_qp *qp = attach(1);
	kernel_ptr->nonsense = true;
	npr_region_attr attr = {.unpinned = 7, .access = 7, .id = 7, .base = 7, .length = 7, .reserved = {7, 7, 7}};
	EXPECT_EQ(npr_resolve(qp, rkey, &attr), -EPROTO);
	EXPECT_EQ(attr.base, 7U);
	kernel_ptr->nonsense = false;
	EXPECT_EQ(npr_resolve(qp, rkey, &attr), 0);
	EXPECT_EQ(attr.base, base);
	for (const std::uint64_t r : attr.reserved)
		EXPECT_EQ(r, 0U);
}

/* Each of the parts that the range touches is known then. */
TEST_F(Objects, RangeOfAWholeAddressSpaceIsResolvedPartByPart)
{
	npr_qp *qp = attach(1);
	npr_region_attr attr{};
	const std::uint64_t part = 1U << 14;

	kernel_ptr->part_shift = 14;
	kernel_ptr->mapped = 10 * part;
	ASSERT_EQ(npr_resolve_range(qp, rkey, base + part + 5, 2 * part, &attr), 0);
	EXPECT_EQ(attr.unpinned, 1U);
	EXPECT_EQ(attr.id, 100 + (base + part) / part);
	EXPECT_EQ(attr.base, (base + part) / part * part);
	EXPECT_EQ(attr.length, 3 * part);
	for (const std::uint64_t at : {base + part, base + 2 * part, base + 3 * part})
		EXPECT_EQ(npr_prefetch(qp, rkey, at / part * part, 2 * part, IBV_ACCESS_REMOTE_READ), static_cast<std::int64_t>(part)) << at;
	EXPECT_EQ(npr_prefetch(qp, rkey, base + 5 * part, 1, IBV_ACCESS_REMOTE_READ), -ENOENT);
	/* To the last byte, and no further. */
	ASSERT_EQ(npr_resolve_range(qp, rkey, base + part, part, &attr), 0);
	EXPECT_EQ(attr.length, base % part ? 2 * part : part);
	ASSERT_EQ(npr_resolve_range(qp, rkey, base, 0, &attr), 0);
	EXPECT_EQ(attr.length, part);
	EXPECT_EQ(npr_resolve_range(qp, rkey, base + 9 * part, 2 * part, &attr), -EFAULT);
	EXPECT_EQ(npr_resolve_range(qp, rkey, 0, 1, &attr), -EFAULT);
	EXPECT_EQ(npr_resolve_range(qp, rkey, ~0ULL, 2, &attr), -EINVAL);
	EXPECT_EQ(npr_resolve(qp, rkey, &attr), -EFAULT) << "without an address";
	EXPECT_EQ(npr_resolve_range(qp, 0x999, base, part, &attr), 0);
	EXPECT_EQ(attr.unpinned, 0U);
}

TEST(Version, OfTheLibraryIsTheHeaders)
{
	EXPECT_EQ(npr_version(), NPRDMA_VERSION);
	EXPECT_EQ(NPRDMA_VERSION_NUMBER(1, 2, 3), 0x010203);
}

/* Who is connected first may ask before the other end is. */
TEST_F(Objects, PeerThatIsNotConnectedYetIsAskedAgainForAKey)
{
	npr_qp *qp = attach(1);
	kernel_ptr->busy = 3;
	kernel_ptr->busy_answer = -ECONNREFUSED;
	dev.all_in();
	std::array<std::byte, 8> b;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	EXPECT_EQ(next().status, IBV_WC_SUCCESS);
	EXPECT_EQ(dev.posted.back().wr.rdma.rkey, read_key);
	kernel_ptr->busy = 3;
	EXPECT_EQ(npr_resolve(qp, rkey, nullptr), 0);
}

/* For as long as the HCA would try; then it is asked, which knows why. */
TEST_F(Objects, PeerThatIsNeverConnectedIsLeftToTheHca)
{
	npr_qp *qp = attach(1);
	kernel_ptr->tries = 0;
	kernel_ptr->busy = 2;
	kernel_ptr->busy_answer = -ECONNREFUSED;
	EXPECT_EQ(npr_resolve(qp, rkey, nullptr), -ECONNREFUSED);
	std::array<std::byte, 8> b;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	EXPECT_EQ(next().wr_id, 1U);
	EXPECT_EQ(kernel_ptr->busy, 0);
	EXPECT_EQ(dev.posted.back().wr.rdma.rkey, rkey);
}

/* Nobody has polled since it came, but another thread has resolved the key. */
TEST_F(Objects, RefusalThatIsReadLateUndoesNothing)
{
	npr_qp *qp = attach(1);
	kernel_ptr->tries = 0;
	kernel_ptr->busy = 1;
	kernel_ptr->busy_answer = -ECONNREFUSED;
	dev.all_in();
	ASSERT_EQ(npr_req_notify_cq(cq.get(), 0), 0);
	std::array<std::byte, 8> b;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	pollfd p{npr_get_fd(cq.get()), POLLIN, 0};
	ASSERT_EQ(poll(&p, 1, 10000), 1);
	EXPECT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	EXPECT_EQ(next().status, IBV_WC_SUCCESS);
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 4096, b, 2), 0);
	EXPECT_EQ(next().wr_id, 2U);
	EXPECT_EQ(dev.posted.back().wr.rdma.rkey, read_key);
}

TEST_F(Objects, ReceivesAndStrangersAreDeliveredAsTheyCame)
{
	attach(1);
	ibv_wc wc{};
	wc.qp_num = 1;
	wc.wr_id = 0x1122334455667788;
	wc.opcode = IBV_WC_RECV;
	wc.imm_data = 9;
	dev.completions.push_back(wc);
	wc.qp_num = 99;
	wc.status = IBV_WC_WR_FLUSH_ERR;
	dev.completions.push_back(wc);
	ibv_wc got[4];
	ASSERT_EQ(npr_poll_cq(cq.get(), 4, got), 2);
	EXPECT_EQ(got[0].wr_id, wc.wr_id);
	EXPECT_EQ(got[0].imm_data, 9U);
	EXPECT_EQ(got[1].qp_num, 99U);
}

/*
 * Receive work queues (ibv_create_wq) complete in CQs of the library, too, and it knows none of them. Their numbers are
 * not those of queue pairs, so one may be that of a queue pair; and of what has failed the opcode says nothing.
 */
TEST_F(Objects, CompletionsOfAWorkQueueWithTheNumberOfAQueuePairAreDeliveredAsTheyCame)
{
	constexpr std::uint64_t count = 32;
	npr_qp *const qp = attach(1);
	ASSERT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	dev.all_in();
	std::array<std::byte, 8> b;
	const auto arrive = [&](bool flushed) {
		for (std::uint64_t i = 0; i < count; ++i) {
			ibv_wc wc{};
			wc.qp_num = 1;
			wc.wr_id = i;
			wc.opcode = flushed ? IBV_WC_RDMA_READ : IBV_WC_RECV;
			wc.status = flushed ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS;
			wc.byte_len = 7;
			dev.completions.push_back(wc);
		}
	};
	const auto expect_all = [&](bool flushed) {
		for (std::uint64_t i = 0; i < count; ++i) {
			const ibv_wc wc = next();
			ASSERT_EQ(wc.wr_id, i);
			EXPECT_EQ(wc.qp_num, 1U);
			EXPECT_EQ(wc.status, flushed ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS);
			EXPECT_EQ(wc.byte_len, 7U);
		}
	};

	for (const bool flushed : {false, true}) {
		dev.stall = true;
		ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1000), 0);
		arrive(flushed);
		expect_all(flushed);
		dev.go_on();
		const ibv_wc wc = next();
		EXPECT_EQ(wc.wr_id, 1000U);
		EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
	}
	/* And those that a detach finds while it waits for the queue pair's own. */
	dev.stall = true;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1000), 0);
	dev.stall = false;
	arrive(true);
	ASSERT_EQ(npr_detach_qp(qp), 0);
	expect_all(true);
	ibv_wc wc;
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
}

TEST_F(Objects, DetachEndsWhatIsUnderWayAndKeepsTheOthers)
{
	npr_qp *a = attach(1), *b = attach(2);
	ASSERT_EQ(npr_resolve(a, rkey, nullptr), 0);
	ASSERT_EQ(npr_resolve(b, rkey, nullptr), 0);
	dev.all_in();
	dev.stall = true;
	std::array<std::byte, 8> one, two;
	ASSERT_EQ(post(a, IBV_WR_RDMA_READ, 0, one, 1), 0);
	dev.stall = false;
	ibv_wc recv{};
	recv.qp_num = 1;
	recv.opcode = IBV_WC_RECV;
	recv.wr_id = 5;
	dev.completions.push_back(recv);
	ASSERT_EQ(post(b, IBV_WR_RDMA_READ, 0, two, 2), 0);
	ASSERT_EQ(npr_detach_qp(a), 0);
	EXPECT_TRUE(dev.dead.count(1)) << "it had something under way";
	std::vector<std::uint64_t> ids{next().wr_id, next().wr_id};
	std::sort(ids.begin(), ids.end());
	EXPECT_EQ(ids, (std::vector<std::uint64_t>{2, 5}));
	ibv_wc wc;
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
}

/* As a CQ is without the completions of a QP that is destroyed. */
TEST_F(Objects, NothingIsToldOfAQueuePairThatIsForgotten)
{
	npr_qp *a = attach(1);
	std::array<std::byte, 8> b;
	ASSERT_EQ(npr_resolve(a, rkey, nullptr), 0);
	dev.all_in();
	dev.stall = true;
	ASSERT_EQ(post(a, IBV_WR_RDMA_READ, 0, b, 1), 0);
	for (const std::uint32_t number : {1U, 2U, 1U, 3U}) {
		ibv_wc recv{};
		recv.qp_num = number;
		recv.opcode = IBV_WC_RECV;
		recv.wr_id = 10 + number;
		dev.completions.push_back(recv);
	}
	ASSERT_EQ(npr_detach_qp(a), 0);
	ASSERT_TRUE(dev.completions.empty()) << "they were in the way";
	cq->forget(1);
	EXPECT_EQ(next().wr_id, 12U);
	EXPECT_EQ(next().wr_id, 13U);
	ibv_wc wc;
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0) << "of wr_id " << wc.wr_id;
}

TEST_F(Objects, DetachWaitsForAKeyBeingResolved)
{
	npr_qp *a = attach(1);
	kernel_ptr->block(1);
	std::array<std::byte, 8> b;
	ASSERT_EQ(post(a, IBV_WR_RDMA_READ, 0, b, 1), 0);
	ASSERT_TRUE(kernel_ptr->await_resolves());
	kernel_ptr->unblock();
	ASSERT_EQ(npr_detach_qp(a), 0);
	ibv_wc wc;
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
}

/* The completion of the WRITE is there, and the READ, whose key is new, comes after two of them. */
TEST_F(Objects, DetachAsksForNoKeyOnBehalfOfWhatIsFreed)
{
	npr_qp *a = attach(1), *b = attach(2);
	ASSERT_EQ(npr_resolve(a, rkey, nullptr), 0);
	dev.all_in();
	std::array<std::byte, 8> buffer;
	/* so that the words are known */
	ASSERT_EQ(post(a, IBV_WR_RDMA_WRITE, 0, buffer, 1), 0);
	EXPECT_EQ(next().wr_id, 1U);
	ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer.data()), 8, 1};
	ibv_send_wr wr[3]{}, *bad;
	for (int i = 0; i < 3; ++i) {
		wr[i].sg_list = &s;
		wr[i].num_sge = 1;
		wr[i].opcode = i < 2 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
		wr[i].wr.rdma.remote_addr = base;
		wr[i].wr.rdma.rkey = i < 2 ? rkey : rkey + 0x1000;
		wr[i].next = i < 2 ? &wr[i + 1] : nullptr;
	}
	ASSERT_EQ(npr_post_send(a, wr, &bad), 0);
	ASSERT_FALSE(dev.completions.empty());
	ASSERT_EQ(npr_detach_qp(a), 0);
	EXPECT_TRUE(dev.dead.count(1));
	/* what came before is asked by then, too */
	kernel_ptr->busy = 5;
	ASSERT_EQ(post(b, IBV_WR_RDMA_READ, 0, buffer, 2), 0);
	EXPECT_EQ(next().wr_id, 2U);
	EXPECT_EQ(kernel_ptr->keys, std::set{rkey});
}

TEST_F(Objects, DetachDelaysNobodyAndNobodyHearsOfTheQueuePair)
{
	npr_qp *a = attach(1), *b = attach(2);
	ASSERT_EQ(npr_resolve(b, rkey, nullptr), 0);
	dev.all_in();
	kernel_ptr->block(1);
	std::array<std::byte, 8> one, two;
	ASSERT_EQ(post(a, IBV_WR_RDMA_READ, 0, one, 1), 0);
	ASSERT_TRUE(kernel_ptr->await_resolves());
	std::thread detacher([&] { EXPECT_EQ(npr_detach_qp(a), 0); });
	for (bool dead = false; !dead; std::this_thread::yield()) {
		const std::lock_guard lock(dev.mutex);
		dead = dev.dead.count(1);
	}
	for (int i = 0; i < 50; ++i) {
		ASSERT_EQ(post(b, IBV_WR_RDMA_READ, 8192, two, 2), 0);
		EXPECT_EQ(next().wr_id, 2U);
	}
	kernel_ptr->unblock();
	detacher.join();
	ibv_wc wc;
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
}

/* The peer's kernel may hold pages by now, and what gives a hold back is the end of the QP. */
TEST_F(Objects, DetachEndsAQueuePairThatWaitsForAnAnswerOnly)
{
	npr_qp *qp = attach(1);
	ASSERT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	dev.all_in();
	kernel_ptr->withhold = true;
	std::array<std::byte, 8> b;
	ibv_sge s{reinterpret_cast<std::uintptr_t>(b.data()), 8, 1};
	ibv_send_wr wr{}, *bad;
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
	wr.wr.atomic.remote_addr = base;
	wr.wr.atomic.rkey = rkey;
	ASSERT_EQ(npr_post_send(qp, &wr, &bad), 0);
	ASSERT_EQ(kernel_ptr->held.size(), 1U);
	ASSERT_TRUE(dev.posted.empty());
	ASSERT_EQ(npr_detach_qp(qp), 0);
	EXPECT_TRUE(dev.dead.count(1));
	/* and what comes late is nobody's */
	kernel_ptr->held[0].hold_id = 7;
	kernel_ptr->send(kernel_ptr->held[0]);
	ibv_wc wc;
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
}

TEST_F(Objects, DetachLeavesAQueuePairAliveThatIsDone)
{
	npr_qp *qp = attach(1);
	ASSERT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	dev.all_in();
	dev.page_out(0);
	std::array<std::byte, 8> b[2];
	/* The first needs an answer, so the second is done before it. */
	for (std::uint64_t i = 0; i < 2; ++i)
		ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, i * 8192, b[i], i), 0);
	EXPECT_EQ(next().wr_id, 0U);
	EXPECT_TRUE(dev.completions.empty());
	ASSERT_EQ(npr_detach_qp(qp), 0);
	EXPECT_FALSE(dev.dead.count(1)) << "one completion was not polled";
}

TEST_F(Objects, FdWakesForAnAnswerOfTheKernel)
{
	npr_qp *a = attach(1);
	ASSERT_EQ(npr_resolve(a, rkey, nullptr), 0);
	kernel_ptr->withhold = true;
	std::array<std::byte, 8> b;
	ASSERT_EQ(post(a, IBV_WR_RDMA_READ, 0, b, 1), 0);
	ibv_wc wc;
	ASSERT_EQ(npr_req_notify_cq(cq.get(), 0), 0);
	while (npr_poll_cq(cq.get(), 1, &wc) == 0 && kernel_ptr->held.empty())
		;
	pollfd p{npr_get_fd(cq.get()), POLLIN, 0};
	EXPECT_EQ(poll(&p, 1, 0), 0) << "nothing has happened";
	kernel_ptr->send(kernel_ptr->held[0]);
	EXPECT_EQ(poll(&p, 1, 10'000), 1);
	EXPECT_EQ(next().wr_id, 1U);
}

TEST_F(Objects, FdWakesForAResolvedKeyAndForTheEndOfAPause)
{
	npr_qp *a = attach(1);
	kernel_ptr->withhold = true;
	std::array<std::byte, 8> b;
	ibv_wc wc;
	ASSERT_EQ(npr_req_notify_cq(cq.get(), 0), 0);
	ASSERT_EQ(post(a, IBV_WR_RDMA_READ, 0, b, 1), 0);
	pollfd p{npr_get_fd(cq.get()), POLLIN, 0};
	EXPECT_EQ(poll(&p, 1, 10'000), 1) << "the key";
	while (kernel_ptr->held.empty())
		EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
	rdma_np_event e = kernel_ptr->held[0];
	e.status = RDMA_NP_BUSY;
	ASSERT_EQ(npr_req_notify_cq(cq.get(), 0), 0);
	/* A busy machine may be so late that the pause is over at once. */
	kernel_ptr->withhold = false;
	kernel_ptr->send(e);
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0); /* begins the pause */
	EXPECT_EQ(poll(&p, 1, 10'000), 1) << "the pause";
	EXPECT_EQ(next().wr_id, 1U);
}

/* --- what happens outside of a poll, while somebody sleeps on the fd --- */

struct Sleeper : Objects {
	/* As an event loop: it sleeps from here on. */
	void arm()
	{
		ibv_wc wc;
		ASSERT_EQ(npr_req_notify_cq(cq.get(), 0), 0);
		ASSERT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
		ASSERT_FALSE(woken(0));
	}

	[[nodiscard]] bool woken(int timeout_ms = 10'000) const
	{
		pollfd p{npr_get_fd(cq.get()), POLLIN, 0};
		return poll(&p, 1, timeout_ms) == 1;
	}

	int post_atomic()
	{
		ibv_sge s{reinterpret_cast<std::uintptr_t>(b.data()), 8, 1};
		ibv_send_wr wr{}, *bad;
		wr.wr_id = 3;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.wr.atomic.remote_addr = base;
		wr.wr.atomic.rkey = rkey;
		return npr_post_send(qp, &wr, &bad);
	}

	npr_qp *qp = attach(1);
	std::array<std::byte, 8> b{};
};

TEST_F(Sleeper, HearsOfThePauseOfWhatIsPosted)
{
	ASSERT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	for (const int error : {-ENOMEM, -EBUSY}) {
		kernel_ptr->refuse_fault = error;
		arm();
		ASSERT_EQ(post_atomic(), 0);
		ASSERT_TRUE(woken());
		const ibv_wc wc = next();
		EXPECT_EQ(wc.wr_id, 3U);
		EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
	}
}

TEST_F(Sleeper, HearsOfThePauseThatNprResolveBegins)
{
	kernel_ptr->block(1);
	kernel_ptr->refuse_fault = -ENOMEM;
	arm();
	ASSERT_EQ(post_atomic(), 0);
	ASSERT_TRUE(kernel_ptr->await_resolves());
	ASSERT_FALSE(woken(0)) << "the key is not known yet";
	ASSERT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	EXPECT_TRUE(woken());
	EXPECT_EQ(next().status, IBV_WC_SUCCESS);
	kernel_ptr->unblock();
}

TEST_F(Sleeper, HearsOfWhatIsRefusedWhenItsTurnComes)
{
	npr_qp *other = attach(2);
	ASSERT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	const std::uint32_t all = cq->credits.free();
	cq->credits.take(all);
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	ASSERT_TRUE(cq->credits.line());
	arm();
	dev.refuse_post = EINVAL;
	cq->credits.give(all);
	ASSERT_EQ(npr_detach_qp(other), 0);
	ASSERT_TRUE(woken());
	EXPECT_EQ(next().status, IBV_WC_LOC_QP_OP_ERR);
	dev.refuse_post = 0;
}

/* A READ whose key and page are known is posted at once. */
TEST_F(Sleeper, HearsOfWhatTheProviderRefuses)
{
	ASSERT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	dev.all_in();
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	EXPECT_EQ(next().wr_id, 1U);
	arm();
	dev.refuse_post = EINVAL;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 2), 0);
	ASSERT_TRUE(woken());
	const ibv_wc wc = next();
	EXPECT_EQ(wc.wr_id, 2U);
	EXPECT_EQ(wc.status, IBV_WC_LOC_QP_OP_ERR);
}

/* Armed twice, as by a program that posts in between and polls when it is told to. */
TEST_F(Sleeper, HearsOfAKeyThatWasThereWhenItArmed)
{
	arm();
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	ASSERT_TRUE(woken());
	ASSERT_EQ(npr_req_notify_cq(cq.get(), 0), 0);
	EXPECT_TRUE(woken(0)) << "nothing is posted before somebody polls";
	EXPECT_EQ(next().wr_id, 1U);
	arm();
}

TEST_F(Sleeper, HearsOfARefusalThatWasThereWhenItArmed)
{
	ASSERT_EQ(npr_resolve(qp, rkey, nullptr), 0);
	arm();
	dev.refuse_post = EINVAL;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 2), 0);
	ASSERT_TRUE(woken());
	ASSERT_EQ(npr_req_notify_cq(cq.get(), 0), 0);
	EXPECT_TRUE(woken(0));
	EXPECT_EQ(next().wr_id, 2U);
	arm();
}

/* --- threads that are to end --- */

/* ASan is not told that a thread unwinds, and takes what is left of its frames for overflows. */
struct unwound {
	~unwound()
	{
		constexpr std::size_t below = 16384, above = 1024;
		ASAN_UNPOISON_MEMORY_REGION(reinterpret_cast<std::byte *>(this) - below, below + above);
	}
};

/* False: @f was not done to its end by a thread that was cancelled before it. */
template <class F>
bool done_by_cancelled(F &&f)
{
	struct job {
		F &f;
		bool done;
	} j{f, false};
	pthread_t thread;
	void *result = nullptr;

	EXPECT_EQ(pthread_create(
			  &thread, nullptr,
			  [](void *arg) -> void * {
				  auto *const self = static_cast<job *>(arg);
				  const unwound here;

				  pthread_cancel(pthread_self());
				  self->f();
				  self->done = true;
				  pthread_testcancel();
				  return nullptr;
			  },
			  &j),
		  0);
	EXPECT_EQ(pthread_join(thread, &result), 0);
	EXPECT_EQ(result, PTHREAD_CANCELED);
	return j.done;
}

TEST_F(Objects, ThreadsAreNotCancelledInTheLibrary)
{
	npr_qp *qp = attach(1);
	std::array<std::byte, 8> b{};
	EXPECT_TRUE(done_by_cancelled([&] {
		kernel_ptr->busy = 1;
		EXPECT_EQ(npr_resolve(qp, rkey, nullptr), 0) << "and a pause in it";
	}));
	EXPECT_TRUE(done_by_cancelled([&] { EXPECT_EQ(npr_req_notify_cq(cq.get(), 0), 0); }));
	EXPECT_TRUE(done_by_cancelled([&] {
		EXPECT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
		EXPECT_EQ(next().wr_id, 1U) << "after an answer of the kernel";
	}));
	EXPECT_TRUE(done_by_cancelled([&] {
		dev.refuse_post = EINVAL;
		EXPECT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 2), 0) << "which wakes who sleeps";
	}));
	EXPECT_TRUE(done_by_cancelled([&] { EXPECT_EQ(npr_detach_qp(qp), 0); }));
	EXPECT_TRUE(done_by_cancelled([&] {
		npr_cq *const another = npr_attach_cq(&ctx, &dev.cq);
		ASSERT_NE(another, nullptr);
		EXPECT_EQ(npr_detach_cq(another), 0);
	}));
}

TEST_F(Objects, ThreadsAreCancelledWhereTheyWait)
{
	ibv_comp_channel channel{&dev.context, eventfd(0, 0), 0};
	npr::fake::cq verbs(dev, 1);
	verbs.base()->channel = &channel;
	{
		npr_cq waits(ctx, verbs.base(), 1);
		EXPECT_FALSE(done_by_cancelled([&] { (void)npr_wait_cq(&waits, -1); }));
	}
	close(channel.fd);
}

TEST_F(Objects, WaitNeedsACompletionChannel)
{
	EXPECT_EQ(npr_wait_cq(cq.get(), 0), -EINVAL);
	EXPECT_EQ(npr_poll_cq(cq.get(), -1, nullptr), -EINVAL);
}

TEST_F(Objects, ThreadsMayPostAndPollAsTheyLike)
{
	constexpr unsigned posters = 3, count = 400;
	std::vector<npr_qp *> qps;
	for (unsigned i = 0; i < posters; ++i)
		qps.push_back(attach(i + 1));
	std::vector<std::vector<std::array<std::byte, 64>>> buffers(posters,
								      std::vector<std::array<std::byte, 64>>(count));
	std::atomic<unsigned> done{0};
	std::vector<std::vector<std::uint64_t>> seen(posters + 1);
	std::mutex seen_mutex;
	std::vector<std::thread> threads;
	for (unsigned t = 0; t < posters; ++t)
		threads.emplace_back([&, t] {
			for (unsigned i = 0; i < count; ++i) {
				const auto op = i % 3 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
				buffers[t][i].fill(static_cast<std::byte>(t + 1));
				const std::uint64_t at = (t * 16 + i % 16) * 4096;
				int rc;
				while ((rc = post(qps[t], op, at, buffers[t][i], i)) == -ENOMEM)
					std::this_thread::yield();
				ASSERT_EQ(rc, 0);
			}
		});
	for (unsigned t = 0; t < 2; ++t)
		threads.emplace_back([&] {
			while (done.load() < posters * count) {
				/* the order of one QP's completions is seen only under one lock */
				const std::lock_guard lock(seen_mutex);
				ibv_wc wc[8];
				const int n = npr_poll_cq(cq.get(), 8, wc);
				ASSERT_GE(n, 0);
				for (int i = 0; i < n; ++i) {
					EXPECT_EQ(wc[i].status, IBV_WC_SUCCESS);
					seen[wc[i].qp_num].push_back(wc[i].wr_id);
				}
				done += static_cast<unsigned>(n);
			}
		});
	for (auto &t : threads)
		t.join();
	for (unsigned t = 1; t <= posters; ++t) {
		ASSERT_EQ(seen[t].size(), count);
		for (unsigned i = 0; i < count; ++i)
			ASSERT_EQ(seen[t][i], i);
	}
}

/* --- the extended interfaces --- */

struct Extended : Local {
	npr_qp *qp = attach(1);
	ibv_qp_ex *q = npr_qp_to_qp_ex(qp);
	ibv_cq_ex *c = npr_cq_to_cq_ex(cq.get());
	ibv_poll_cq_attr attr{};
};

TEST_F(Extended, BatchIsPostedAsItWasBuilt)
{
	char inl[8] = "inlined";
	ibv_data_buf bufs[2] = {{inl, 3}, {inl + 3, 5}};
	ibv_ah ah{};

	ibv_wr_start(q);
	q->wr_id = 1;
	q->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
	ibv_wr_send(q);
	ibv_wr_set_sge(q, 1, 64, 8);
	q->wr_id = 2;
	q->wr_flags = IBV_SEND_SOLICITED;
	ibv_wr_send_imm(q, 0x1234);
	ibv_wr_set_inline_data_list(q, 2, bufs);
	std::memset(inl, 0, sizeof(inl));
	q->wr_flags = IBV_SEND_FENCE;
	ibv_wr_send_inv(q, 0x77);
	ibv_wr_set_sge_list(q, 2, local);
	ibv_wr_send(q);
	ibv_wr_set_ud_addr(q, &ah, 5, 6);
	EXPECT_TRUE(dev.posted.empty());
	ASSERT_EQ(ibv_wr_complete(q), 0);
	ASSERT_EQ(dev.posted.size(), 4U);
	EXPECT_EQ(dev.posted[0].opcode, IBV_WR_SEND);
	EXPECT_EQ(dev.posted[0].num_sge, 1);
	EXPECT_FALSE(dev.posted[0].send_flags & IBV_SEND_INLINE);
	EXPECT_EQ(dev.posted[1].opcode, IBV_WR_SEND_WITH_IMM);
	EXPECT_EQ(dev.posted[1].imm_data, 0x1234U);
	EXPECT_TRUE(dev.posted[1].send_flags & IBV_SEND_INLINE);
	EXPECT_TRUE(dev.posted[1].send_flags & IBV_SEND_SOLICITED);
	EXPECT_EQ(dev.posted[2].opcode, IBV_WR_SEND_WITH_INV);
	EXPECT_EQ(dev.posted[2].invalidate_rkey, 0x77U);
	EXPECT_EQ(dev.posted[2].num_sge, 2);
	EXPECT_TRUE(dev.posted[2].send_flags & IBV_SEND_FENCE);
	EXPECT_EQ(dev.posted[3].num_sge, 0);
	EXPECT_EQ(dev.posted[3].wr.ud.ah, &ah);
	EXPECT_EQ(dev.posted[3].wr.ud.remote_qkey, 6U);
	EXPECT_EQ(kernel_ptr->local_holds.size(), 2U);
}

TEST_F(Extended, ReadsAndWritesReachUnpinnedMemory)
{
	std::array<std::byte, 300> in, out;
	std::array<std::byte, 8> small;
	out.fill(std::byte{0x3c});
	small.fill(std::byte{0x3d});
	ibv_wr_start(q);
	q->wr_flags = IBV_SEND_SIGNALED;
	q->wr_id = 1;
	ibv_wr_rdma_write(q, rkey, base + 100);
	ibv_wr_set_sge(q, 1, reinterpret_cast<std::uintptr_t>(out.data()), 300);
	q->wr_id = 2;
	ibv_wr_rdma_write(q, rkey, base + 200);
	ibv_wr_set_inline_data(q, small.data(), small.size());
	small.fill(std::byte{});
	q->wr_id = 3;
	ibv_wr_rdma_read(q, rkey, base + 4000);
	ibv_wr_set_sge(q, 1, reinterpret_cast<std::uintptr_t>(in.data()), 300);
	ASSERT_EQ(ibv_wr_complete(q), 0);
	for (std::uint64_t i = 1; i <= 3; ++i) {
		const ibv_wc wc = next();
		EXPECT_EQ(wc.wr_id, i);
		EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
	}
	EXPECT_TRUE(std::equal(in.begin(), in.end(), dev.memory.begin() + 4000));
	EXPECT_TRUE(std::equal(out.begin(), out.begin() + 100, dev.memory.begin() + 100));
	EXPECT_EQ(dev.memory[200], std::byte{0x3d});
	EXPECT_EQ(dev.memory[208], std::byte{0x3c});
}

TEST_F(Extended, BatchThatFailsInPartIsNotThereAtAll)
{
	kernel_ptr->withhold = true;
	for (std::uint32_t i = 0; i < 40; ++i) {
		ibv_wr_start(q);
		q->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_send(q);
		ibv_wr_set_sge_list(q, 2, local);
		ibv_wr_send(q);
		ibv_wr_set_sge(q, 1, 0, 1U << 31);
		ibv_wr_send(q);
		ibv_wr_set_sge(q, 1, 0, ~0U);
		EXPECT_EQ(ibv_wr_complete(q), EINVAL);
	}
	EXPECT_TRUE(dev.posted.empty());
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
	ibv_wc wc;
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
	/* 32 fit, but none of a batch of more */
	for (const auto &[n, expected] :
	     {std::pair{33, ENOMEM}, {20, 0}, {20, ENOMEM}, {12, 0}, {1, ENOMEM}}) {
		ibv_wr_start(q);
		q->wr_flags = 0;
		for (int i = 0; i < n; ++i) {
			ibv_wr_rdma_read(q, rkey, base);
			ibv_wr_set_sge(q, 1, reinterpret_cast<std::uintptr_t>(b.data()), 64);
		}
		EXPECT_EQ(ibv_wr_complete(q), expected) << n;
	}
}

TEST_F(Extended, MistakesOfTheBuilderAreRefused)
{
	ibv_sge many[5]{};
	std::array<std::byte, 65> big{};
	const auto built = [&](auto &&build) {
		ibv_wr_start(q);
		q->wr_flags = 0;
		build();
		return ibv_wr_complete(q);
	};
	EXPECT_EQ(built([&] {}), 0);
	EXPECT_EQ(built([&] { ibv_wr_set_sge(q, 1, 0, 1); }), EINVAL) << "data of nothing";
	EXPECT_EQ(built([&] { ibv_wr_set_ud_addr(q, nullptr, 0, 0); }), EINVAL);
	EXPECT_EQ(built([&] {
			  ibv_wr_send(q);
			  ibv_wr_set_sge(q, 1, 0, 1);
			  ibv_wr_set_sge(q, 1, 0, 1);
		  }),
		  EINVAL)
	    << "data twice";
	EXPECT_EQ(built([&] {
			  ibv_wr_send(q);
			  ibv_wr_set_sge_list(q, 5, many);
			  ibv_wr_send(q);
		  }),
		  ENOMEM);
	EXPECT_EQ(built([&] {
			  ibv_wr_send(q);
			  ibv_wr_set_inline_data(q, big.data(), big.size());
		  }),
		  ENOMEM);
	EXPECT_EQ(built([&] {
			  ibv_wr_send(q);
			  ibv_wr_set_inline_data(q, big.data(), 64);
			  q->qp_base.qp_type = IBV_QPT_UD;
		  }),
		  EINVAL)
	    << "no address";
	q->qp_base.qp_type = IBV_QPT_RC;
	ibv_wr_start(q);
	ibv_wr_send(q);
	ibv_wr_abort(q);
	EXPECT_TRUE(dev.posted.empty());
	EXPECT_EQ(built([&] {
			  ibv_wr_send(q);
			  ibv_wr_set_inline_data(q, big.data(), 64);
		  }),
		  0)
	    << "an error is one batch's";
	EXPECT_EQ(dev.posted.size(), 1U);
}

TEST_F(Extended, WindowOnUnpinnedMemoryIsRefused)
{
	ibv_mw mw{};
	ibv_mw_bind_info info{&mr, 0, 64, IBV_ACCESS_REMOTE_READ};
	ibv_wr_start(q);
	ibv_wr_bind_mw(q, &mw, 1, &info);
	EXPECT_EQ(ibv_wr_complete(q), EOPNOTSUPP);
	ibv_mr pinned_mr{};
	pinned_mr.context = &dev.context;
	info.mr = &pinned_mr;
	ibv_wr_start(q);
	ibv_wr_bind_mw(q, &mw, 1, &info);
	EXPECT_EQ(ibv_wr_complete(q), 0);
	info.mr = &mr;
	info.length = 0;
	ibv_wr_start(q);
	ibv_wr_bind_mw(q, &mw, 1, &info);
	ibv_wr_local_inv(q, 5);
	EXPECT_EQ(ibv_wr_complete(q), 0);
	ASSERT_EQ(dev.posted.size(), 3U);
	EXPECT_EQ(dev.posted[2].opcode, IBV_WR_LOCAL_INV);
	EXPECT_EQ(dev.posted[2].invalidate_rkey, 5U);
}

TEST_F(Extended, CompletionsAreReadOneByOne)
{
	ibv_poll_cq_attr bad{1};
	EXPECT_EQ(ibv_start_poll(c, &bad), EINVAL);
	EXPECT_EQ(ibv_start_poll(c, &attr), ENOENT);
	EXPECT_EQ(ibv_start_poll(c, &attr), ENOENT) << "it is not locked";
	ibv_wc wc{};
	wc.wr_id = 5;
	wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
	wc.byte_len = 77;
	wc.imm_data = 0x88;
	wc.qp_num = 99;
	wc.src_qp = 98;
	wc.wc_flags = IBV_WC_WITH_IMM;
	wc.slid = 3;
	wc.sl = 4;
	wc.dlid_path_bits = 6;
	dev.completions.push_back(wc);
	std::array<std::byte, 300> in;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 4000, in, 7), 0);
	ASSERT_EQ(ibv_start_poll(c, &attr), 0);
	EXPECT_EQ(c->wr_id, 5U);
	EXPECT_EQ(c->status, IBV_WC_SUCCESS);
	EXPECT_EQ(ibv_wc_read_opcode(c), IBV_WC_RECV_RDMA_WITH_IMM);
	EXPECT_EQ(ibv_wc_read_byte_len(c), 77U);
	EXPECT_EQ(ibv_wc_read_imm_data(c), 0x88U);
	EXPECT_EQ(ibv_wc_read_invalidated_rkey(c), 0x88U);
	EXPECT_EQ(ibv_wc_read_qp_num(c), 99U);
	EXPECT_EQ(ibv_wc_read_src_qp(c), 98U);
	EXPECT_EQ(ibv_wc_read_wc_flags(c), unsigned{IBV_WC_WITH_IMM});
	EXPECT_EQ(ibv_wc_read_slid(c), 3U);
	EXPECT_EQ(ibv_wc_read_sl(c), 4U);
	EXPECT_EQ(ibv_wc_read_dlid_path_bits(c), 6U);
	/* as applications do: post while they poll */
	ASSERT_EQ(post(qp, IBV_WR_SEND, 0, in, 8), 0);
	for (const std::uint64_t id : {7U, 8U}) {
		int rc;
		while ((rc = ibv_next_poll(c)) == ENOENT)
			std::this_thread::yield();
		EXPECT_EQ(rc, 0);
		EXPECT_EQ(c->wr_id, id);
		EXPECT_EQ(ibv_wc_read_vendor_err(c), 0U);
	}
	EXPECT_EQ(ibv_next_poll(c), ENOENT);
	ibv_end_poll(c);
	EXPECT_EQ(ibv_start_poll(c, &attr), ENOENT);
}

TEST_F(Extended, BatchesOfThreadsDoNotMix)
{
	std::vector<std::thread> threads;
	std::atomic<bool> stop{false};
	for (std::uint64_t t = 0; t < 3; ++t)
		threads.emplace_back([&, t] {
			for (int i = 0; i < 500;) {
				ibv_wr_start(q);
				q->wr_flags = IBV_SEND_SIGNALED;
				q->wr_id = t;
				for (int k = 0; k < 4; ++k)
					ibv_wr_send(q);
				if (i % 5 == 4) {
					ibv_wr_abort(q);
					++i;
					continue;
				}
				const int rc = ibv_wr_complete(q);
				ASSERT_TRUE(!rc || rc == ENOMEM);
				i += !rc;
			}
		});
	std::vector<std::uint64_t> seen;
	std::thread poller([&] {
		while (seen.size() < 3 * 400 * 4 && !stop) {
			if (ibv_start_poll(c, &attr))
				continue;
			do
				seen.push_back(c->wr_id);
			while (!ibv_next_poll(c));
			ibv_end_poll(c);
		}
	});
	for (auto &t : threads)
		t.join();
	poller.join();
	ASSERT_EQ(seen.size(), 3U * 400 * 4);
	for (std::size_t i = 0; i < seen.size(); i += 4)
		for (std::size_t k = 1; k < 4; ++k)
			ASSERT_EQ(seen[i], seen[i + k]) << i;
}

/* Whoever arms, polls until nothing comes and then sleeps is not woken for what was there. */
TEST_F(Objects, NothingIsPolledOnlyFromAnEmptyQueue)
{
	npr_qp *qp = attach(1);
	std::array<std::byte, 8> b;
	for (std::uint64_t i = 0; i < 8; ++i) {
		ibv_sge s{reinterpret_cast<std::uintptr_t>(b.data()), 8, 1};
		ibv_send_wr wr{}, *bad;
		wr.wr_id = i;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = IBV_WR_SEND;
		wr.send_flags = i == 7 ? IBV_SEND_SIGNALED : 0;
		ASSERT_EQ(npr_post_send(qp, &wr, &bad), 0);
	}
	ASSERT_GT(dev.completions.size(), 1U) << "some the application did not ask for";
	ibv_wc wc;
	ASSERT_EQ(npr_poll_cq(cq.get(), 1, &wc), 1);
	EXPECT_EQ(wc.wr_id, 7U);
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
}

/* --- solicited events --- */

TEST_F(Objects, EventsAreForSolicitedOnesOnlyWhileNothingIsUnderWay)
{
	npr_qp *qp = attach(1);
	ibv_comp_channel channel{};
	channel.fd = -1;
	dev.cq.channel = &channel;
	std::array<std::byte, 8> b;
	ASSERT_EQ(npr_req_notify_cq(cq.get(), 1), 0);
	EXPECT_EQ(dev.main.armed, 1);
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	EXPECT_EQ(dev.main.armed, 0) << "it goes on with what is not solicited";
	ASSERT_EQ(npr_req_notify_cq(cq.get(), 1), 0);
	EXPECT_EQ(dev.main.armed, 0);
	EXPECT_EQ(next().wr_id, 1U);
	ASSERT_EQ(npr_req_notify_cq(cq.get(), 1), 0);
	EXPECT_EQ(dev.main.armed, 1);
	ASSERT_EQ(npr_req_notify_cq(cq.get(), 0), 0);
	EXPECT_EQ(dev.main.armed, 0);
	dev.cq.channel = nullptr;
}

} // namespace
