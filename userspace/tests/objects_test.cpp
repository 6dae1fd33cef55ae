/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The library around the engine, on a provider and a kernel made for the test:
 * a provider whose posts take effect at once, and a kernel that answers when
 * it is told to. Real threads, real file descriptors.
 */
#include "local_regions.hpp"
#include "objects.hpp"

#include <nprdma/nprdma.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <map>
#include <poll.h>
#include <sys/socket.h>

namespace {

constexpr std::uint64_t signature = 0x5a17c0de9e3779b9ULL;
constexpr std::uint32_t lkey = 0x77, held_lkey = 0x78;
constexpr std::uint32_t rkey = 0x100, read_key = 0x101, write_key = 0x102;
constexpr std::size_t pages = 64;
constexpr std::uint64_t base = 0x10000000;

/* Provider and responder. */
struct device {
	device()
	{
		context.ops.post_send = [](ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **) {
			return self(qp)->post(qp, wr);
		};
		context.ops.post_recv = [](ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **) {
			for (; wr; wr = wr->next)
				self(qp)->receives.push_back({wr->wr_id, wr->num_sge ? wr->sg_list[0].lkey : 0});
			return 0;
		};
		context.ops.poll_cq = [](ibv_cq *cq, int n, ibv_wc *wc) { return self(cq)->poll(n, wc); };
		context.ops.req_notify_cq = [](ibv_cq *, int) { return 0; };
		context.abi_compat = this;
		cq.context = &context;
		cq.cqe = 4096;
		memory.resize(pages * 4096);
		words.resize(pages);
	}

	template <class T>
	static device *self(T *object)
	{
		return static_cast<device *>(object->context->abi_compat);
	}

	int post(ibv_qp *qp, ibv_send_wr *wr)
	{
		const std::lock_guard lock(mutex);
		for (; wr; wr = wr->next) {
			ibv_wc wc{};
			wc.wr_id = wr->wr_id;
			wc.qp_num = qp->qp_num;
			if (dead.count(qp->qp_num)) {
				wc.status = IBV_WC_WR_FLUSH_ERR;
				completions.push_back(wc);
				continue;
			}
			wc.opcode = wr->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
			std::uint64_t at = wr->wr.rdma.remote_addr;
			for (int i = 0; wr->opcode != IBV_WR_SEND && i < wr->num_sge; ++i) {
				transfer(*wr, at, wr->sg_list[i]);
				at += wr->sg_list[i].length;
			}
			if (wr->send_flags & IBV_SEND_SIGNALED)
				(stall ? stalled : completions).push_back(wc);
		}
		return 0;
	}

	void transfer(const ibv_send_wr &wr, std::uint64_t at, const ibv_sge &s)
	{
		auto *local = reinterpret_cast<std::byte *>(static_cast<std::uintptr_t>(s.addr));
		if (wr.wr.rdma.rkey == read_key && s.lkey == lkey) {
			std::memcpy(local, &words[at / 8], s.length);
			return;
		}
		for (std::uint32_t i = 0; i < s.length; ++i, ++at) {
			const std::uint64_t w = words[(at - base) / 4096];
			if (wr.wr.rdma.rkey == read_key)
				local[i] = w & 1 ? memory[at - base]
						 : static_cast<std::byte>(signature >> 8 * (at % 8));
			else if (wr.wr.rdma.rkey == write_key && w & 2)
				memory[at - base] = local[i];
		}
	}

	int poll(int n, ibv_wc *wc)
	{
		const std::lock_guard lock(mutex);
		int got = 0;
		while (got < n && !completions.empty()) {
			wc[got++] = completions.front();
			completions.pop_front();
		}
		return got;
	}

	ibv_context context{};
	ibv_cq cq{};
	std::mutex mutex;
	std::deque<ibv_wc> completions, stalled;
	std::vector<std::byte> memory;
	std::vector<std::uint64_t> words;
	std::map<std::uint32_t, bool> dead;
	std::deque<std::pair<std::uint64_t, std::uint32_t>> receives; /* wr_id, first lkey */
	bool stall = false;
};

/* A kernel of whose event channel the test holds the other end. */
struct fake_kernel final : npr::kernel {
	explicit fake_kernel(device &d) : dev(d) {}
	~fake_kernel() override
	{
		for (int fd : ends)
			close(fd);
	}

	int query(np_query &q) noexcept override
	{
		q = {NP_ABI_VERSION, 0, 8, 512, 4, 0};
		return refuse_query;
	}
	int channel(int &fd) noexcept override
	{
		int pair[2];
		if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, pair))
			return -errno;
		fd = pair[0];
		ends.push_back(pair[1]);
		return 0;
	}
	int resolve(const ibv_qp &qp, int, std::uint32_t key, np_region_info &i) noexcept override
	{
		std::unique_lock lock(mutex);
		++resolves;
		if (busy) {
			--busy;
			return -EBUSY;
		}
		entered.notify_all();
		++inside;
		gate.wait(lock, [&] { return blocked_qp != qp.qp_num; });
		--inside;
		if (key != rkey)
			return -EACCES;
		i = {1, base, pages * 4096, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE, read_key, write_key,
		     0, base, base, 0, signature};
		return 0;
	}
	int fault(const ibv_qp &, int, const np_fault_req &req, std::span<const np_range> r) noexcept override
	{
		const std::lock_guard lock(mutex);
		np_event e{};
		e.type = NP_EVENT_FAULT;
		e.cookie = req.cookie;
		e.region_id = req.region_id;
		for (const np_range &x : r)
			for (std::uint64_t p = (x.addr - base) / 4096; p <= (x.addr + x.length - 1 - base) / 4096; ++p) {
				const std::lock_guard memory_lock(dev.mutex);
				dev.words[p] = (dev.words[p] / 4 + 1) * 4 | 3;
				if (&x == r.data() && e.nr_words < NP_EVENT_WORDS)
					e.words[e.nr_words++] = dev.words[p];
			}
		if (withhold)
			held.push_back(e);
		else
			send(e);
		return 0;
	}
	void send(const np_event &e) { ASSERT_EQ(::send(ends.back(), &e, sizeof(e), 0), ssize_t{sizeof(e)}); }
	int release(const ibv_qp &, std::uint64_t) noexcept override { return 0; }
	int forget(const ibv_qp &, std::uint64_t) noexcept override { return 0; }
	int hold(std::uint32_t mr, const np_hold_req &req, np_hold_info &info, std::uint32_t &handle) noexcept override
	{
		const std::lock_guard lock(mutex);
		if (refuse_hold)
			return refuse_hold;
		handle = ++holds_made;
		local_holds[handle] = {mr, req};
		info = {req.addr, held_lkey, 0};
		return 0;
	}
	int hold_free(std::uint32_t handle) noexcept override
	{
		const std::lock_guard lock(mutex);
		EXPECT_EQ(local_holds.erase(handle), 1U);
		return 0;
	}
	int query_mr(const ibv_mr &, np_mr_info &) noexcept override { return -EINVAL; }
	int set_error(ibv_qp &qp) noexcept override
	{
		const std::lock_guard lock(dev.mutex);
		dev.dead[qp.qp_num] = true;
		for (ibv_wc &w : dev.stalled) {
			w.status = IBV_WC_WR_FLUSH_ERR;
			dev.completions.push_back(w);
		}
		dev.stalled.clear();
		return 0;
	}

	device &dev;
	std::mutex mutex;
	std::condition_variable gate, entered;
	std::uint32_t blocked_qp = 0;
	int inside = 0, resolves = 0, busy = 0, refuse_query = 0;
	bool withhold = false;
	int refuse_hold = 0;
	std::uint32_t holds_made = 0;
	std::map<std::uint32_t, std::pair<std::uint32_t, np_hold_req>> local_holds;
	std::vector<np_event> held;
	std::vector<int> ends;
};

struct Objects : ::testing::Test {
	Objects() : kernel_ptr(new fake_kernel(dev)), ctx(&dev.context, std::unique_ptr<npr::kernel>(kernel_ptr), 0)
	{
		cq = std::make_unique<npr_cq>(ctx, &dev.cq);
		for (std::size_t i = 0; i < dev.memory.size(); ++i)
			dev.memory[i] = static_cast<std::byte>(i * 5 + i / 4096);
	}

	~Objects() override
	{
		while (!cq->qps.empty())
			EXPECT_EQ(npr_detach_qp(cq->qps.back().get()), 0);
	}

	npr_qp *attach(std::uint32_t number)
	{
		verbs_qps.push_back(std::make_unique<ibv_qp>());
		ibv_qp &q = *verbs_qps.back();
		q.context = &dev.context;
		q.qp_num = number;
		q.recv_cq = &dev.cq;
		const npr::qp_params p{32, 16, 4, 64, 16, ~0U, 4, 2, false, false};
		return cq->attach(&q, p, &lkey);
	}

	static int post(npr_qp *qp, ibv_wr_opcode op, std::uint64_t offset, std::span<std::byte> buffer,
			std::uint64_t id, std::uint32_t key = rkey)
	{
		ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer.data()), static_cast<std::uint32_t>(buffer.size()), 1};
		ibv_send_wr wr{}, *bad;
		wr.wr_id = id;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = op;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.wr.rdma.remote_addr = base + offset;
		wr.wr.rdma.rkey = key;
		return npr_post_send(qp, &wr, &bad);
	}

	/* Until one comes; the kernel's thread may have to run in between. */
	ibv_wc next()
	{
		ibv_wc wc{};
		while (!npr_poll_cq(cq.get(), 1, &wc))
			std::this_thread::yield();
		return wc;
	}

	device dev;
	fake_kernel *kernel_ptr;
	npr_context ctx;
	std::unique_ptr<npr_cq> cq;
	std::vector<std::unique_ptr<ibv_qp>> verbs_qps;
};

TEST_F(Objects, DeviceWithoutSupportIsRefusedWithTheKernelsReason)
{
	auto k = std::make_unique<fake_kernel>(dev);
	k->refuse_query = -EOPNOTSUPP;
	try {
		npr_context c(&dev.context, std::move(k), 0);
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
	EXPECT_EQ(s.reserved[5], 0U);
}

/* --- local buffers in unpinned regions --- */

struct Local : Objects {
	Local()
	{
		mr.context = &dev.context;
		mr.lkey = 0x900;
		mr.handle = 42;
		npr::local_regions::all().add(mr);
	}
	~Local() override { npr::local_regions::all().remove(mr); }

	static int receive(npr_qp *qp, std::uint64_t id, std::span<ibv_sge> sges)
	{
		ibv_recv_wr wr{}, *bad;
		wr.wr_id = id;
		wr.sg_list = sges.data();
		wr.num_sge = static_cast<int>(sges.size());
		return npr_post_recv(qp, &wr, &bad);
	}

	/* What the HCA does with the oldest receive of QP @number. */
	void arrive(std::uint32_t number)
	{
		ibv_wc wc{};
		wc.wr_id = dev.receives.front().first;
		wc.opcode = IBV_WC_RECV;
		wc.qp_num = number;
		dev.receives.pop_front();
		dev.completions.push_back(wc);
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
	EXPECT_EQ(kernel_ptr->local_holds[1].first, 42U);
	EXPECT_EQ(kernel_ptr->local_holds[1].second.length, 32U);
	EXPECT_EQ(kernel_ptr->local_holds[1].second.flags, 0U);
	EXPECT_EQ(next().status, IBV_WC_SUCCESS);
	EXPECT_TRUE(kernel_ptr->local_holds.empty());
}

TEST_F(Local, ReceivesAreHeldUntilTheirCompletionsArePolled)
{
	npr_qp *qp = attach(1);
	for (std::uint64_t i = 0; i < 20; ++i) {
		ASSERT_EQ(receive(qp, 100 + i, i % 2 ? std::span<ibv_sge>(local) : std::span<ibv_sge>(pinned)), 0);
		ASSERT_EQ(receive(qp, 200 + i, std::span(local, 1)), 0);
		EXPECT_EQ(dev.receives[0].second, i % 2 ? held_lkey : 1U);
		EXPECT_EQ(dev.receives[1].second, held_lkey);
		ASSERT_EQ(kernel_ptr->local_holds.size(), i % 2 ? 3U : 1U);
		for (const auto &[handle, hold] : kernel_ptr->local_holds)
			EXPECT_EQ(hold.second.flags, NP_FAULT_WRITE);
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
	kernel_ptr->refuse_hold = -ENOMEM;
	EXPECT_EQ(receive(qp, 1, local), -ENOBUFS);
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
	dev.words.assign(pages, 4 | 3);
	dev.words[0] = 0;
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
	dev.words.assign(pages, 4 | 3);
	{
		const std::lock_guard lock(kernel_ptr->mutex);
		kernel_ptr->blocked_qp = 1;
	}
	std::array<std::byte, 100> one, two;
	ASSERT_EQ(post(a, IBV_WR_RDMA_READ, 0, one, 1), 0);
	for (int i = 0; i < 50; ++i) {
		ASSERT_EQ(post(b, IBV_WR_RDMA_READ, 8192, two, 2), 0);
		EXPECT_EQ(next().wr_id, 2U);
	}
	{
		const std::lock_guard lock(kernel_ptr->mutex);
		kernel_ptr->blocked_qp = 0;
	}
	kernel_ptr->gate.notify_all();
	EXPECT_EQ(next().wr_id, 1U);
}

TEST_F(Objects, BusyPeerIsAskedAgainForAKey)
{
	npr_qp *qp = attach(1);
	kernel_ptr->busy = 3;
	dev.words.assign(pages, 4 | 3);
	std::array<std::byte, 8> b;
	ASSERT_EQ(post(qp, IBV_WR_RDMA_READ, 0, b, 1), 0);
	EXPECT_EQ(next().status, IBV_WC_SUCCESS);
	kernel_ptr->busy = 2;
	npr_region_attr attr;
	EXPECT_EQ(npr_resolve(qp, rkey, &attr), 0);
	EXPECT_EQ(attr.unpinned, 1U);
	EXPECT_EQ(attr.base, base);
	EXPECT_EQ(npr_resolve(qp, 0x999, &attr), 0);
	EXPECT_EQ(attr.unpinned, 0U);
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

TEST_F(Objects, DetachEndsWhatIsUnderWayAndKeepsTheOthers)
{
	npr_qp *a = attach(1), *b = attach(2);
	ASSERT_EQ(npr_resolve(a, rkey, nullptr), 0);
	ASSERT_EQ(npr_resolve(b, rkey, nullptr), 0);
	dev.words.assign(pages, 4 | 3);
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

TEST_F(Objects, DetachWaitsForAKeyBeingResolved)
{
	npr_qp *a = attach(1);
	{
		const std::lock_guard lock(kernel_ptr->mutex);
		kernel_ptr->blocked_qp = 1;
	}
	std::array<std::byte, 8> b;
	ASSERT_EQ(post(a, IBV_WR_RDMA_READ, 0, b, 1), 0);
	{
		std::unique_lock lock(kernel_ptr->mutex);
		kernel_ptr->entered.wait(lock, [&] { return kernel_ptr->inside == 1; });
		kernel_ptr->blocked_qp = 0;
	}
	kernel_ptr->gate.notify_all();
	ASSERT_EQ(npr_detach_qp(a), 0);
	ibv_wc wc;
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0);
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
	np_event e = kernel_ptr->held[0];
	e.status = NP_BUSY;
	ASSERT_EQ(npr_req_notify_cq(cq.get(), 0), 0);
	kernel_ptr->send(e);
	EXPECT_EQ(npr_poll_cq(cq.get(), 1, &wc), 0); /* begins the pause */
	kernel_ptr->withhold = false;
	EXPECT_EQ(poll(&p, 1, 10'000), 1) << "the pause";
	EXPECT_EQ(next().wr_id, 1U);
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

} // namespace
