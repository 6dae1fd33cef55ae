/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The preload library's functions, which are this program's own, before a libibverbs that needs no
 * device. A post that the library has taken has a wr_id of its own at the provider, and the
 * provider sees the key of a hold.
 */
#include "fake_verbs.hpp"

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <gtest/gtest.h>
#include <memory>
#include <nprdma/nprdma.h>
#include <thread>
#include <tuple>
#include <vector>

namespace {

struct device {
	device() : context(ibv_open_device(&fake_device))
	{
		pd.context = context;
	}
	device(const device &) = delete;
	device &operator=(const device &) = delete;
	~device() { EXPECT_EQ(ibv_close_device(context), 0); }

	[[nodiscard]] ibv_cq *make_cq(int cqe = 64) { return ibv_create_cq(context, cqe, nullptr, nullptr, 0); }
	[[nodiscard]] ibv_qp *make_qp(ibv_cq *cq, ibv_qp_type type = IBV_QPT_RC)
	{
		ibv_qp_init_attr attr{};

		attr.send_cq = attr.recv_cq = cq;
		attr.qp_type = type;
		attr.cap = {4, 4, 4, 4, 64};
		return ibv_create_qp(&pd, &attr);
	}

	ibv_context *context;
	ibv_pd pd{};
};

/* One CQ, one QP and a region on a device. */
struct connection {
	explicit connection(device &d) : dev(d), cq(d.make_cq()), qp(d.make_qp(cq)),
		mr(ibv_reg_mr(&d.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE)) {}
	connection(const connection &) = delete;
	connection &operator=(const connection &) = delete;
	~connection()
	{
		EXPECT_EQ(ibv_destroy_qp(qp), 0);
		EXPECT_EQ(ibv_destroy_cq(cq), 0);
		EXPECT_EQ(ibv_dereg_mr(mr), 0);
	}

	[[nodiscard]] ibv_sge sge()
	{
		return {reinterpret_cast<std::uintptr_t>(memory.data()), static_cast<std::uint32_t>(memory.size()),
			mr->lkey};
	}

	[[nodiscard]] int send(std::uint64_t id)
	{
		ibv_sge s = sge();
		ibv_send_wr wr{}, *bad;

		wr.wr_id = id;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = IBV_WR_SEND;
		wr.send_flags = IBV_SEND_SIGNALED;
		return ibv_post_send(qp, &wr, &bad);
	}

	[[nodiscard]] int receive(std::uint64_t id)
	{
		ibv_sge s = sge();
		ibv_recv_wr wr{}, *bad;

		wr.wr_id = id;
		wr.sg_list = &s;
		wr.num_sge = 1;
		return ibv_post_recv(qp, &wr, &bad);
	}

	/* The wr_id of what completes next; nothing: 0. */
	[[nodiscard]] std::uint64_t next()
	{
		ibv_wc wc{};

		return ibv_poll_cq(cq, 1, &wc) == 1 && wc.status == IBV_WC_SUCCESS ? wc.wr_id : 0;
	}

	/* A send goes by the library, and is told of. */
	void expect_taken(std::uint64_t id = 77)
	{
		const unsigned before = fake::of(qp).sends;

		ASSERT_EQ(send(id), 0);
		EXPECT_EQ(fake::of(qp).sends, before + 1);
		EXPECT_NE(fake::of(qp).wr_id, id);
		EXPECT_EQ(fake::of(qp).lkey, fake::held_lkey);
		EXPECT_EQ(fake::of(dev.context).holds, 1U);
		EXPECT_EQ(next(), id);
		EXPECT_EQ(fake::of(dev.context).holds, 0U);
	}

	device &dev;
	std::array<std::byte, 64> memory{};
	ibv_cq *cq;
	ibv_qp *qp;
	ibv_mr *mr;
};

TEST(Preload, PostsAndPollsReachTheObjectsThatTheyName)
{
	device a, b;
	connection c[] = {connection(a), connection(b), connection(a), connection(b)};

	ASSERT_EQ(c[0].qp->handle, c[1].qp->handle) << "of two contexts: the numbers do not tell them apart";
	ASSERT_EQ(c[0].mr->lkey, c[1].mr->lkey);
	for (std::uint64_t i = 0; i < 4; ++i)
		c[i].expect_taken(100 + i);
	for (std::uint64_t i = 0; i < 4; ++i) {
		EXPECT_EQ(c[i].receive(200 + i), 0);
		EXPECT_EQ(fake::of(c[i].qp).receives, 1U);
		EXPECT_EQ(fake::of(c[i].qp).lkey, fake::held_lkey);
	}
	for (std::uint64_t i = 0; i < 4; ++i) {
		EXPECT_EQ(c[i].next(), 200 + i);
		EXPECT_EQ(c[i].next(), 0U);
	}
}

TEST(Preload, SharedReceivesReachTheQueueThatTheyName)
{
	device a, b;
	ibv_srq_init_attr attr{};
	ibv_srq *srq[] = {ibv_create_srq(&a.pd, &attr), ibv_create_srq(&b.pd, &attr), ibv_create_srq(&b.pd, &attr)};
	std::array<std::byte, 64> memory{};

	for (ibv_srq *const s : srq) {
		ibv_mr *const mr = ibv_reg_mr(s->pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE);
		ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory.data()), memory.size(), mr->lkey};
		ibv_recv_wr wr{}, *bad;
		wr.sg_list = &sge;
		wr.num_sge = 1;
		EXPECT_EQ(ibv_post_srq_recv(s, &wr, &bad), 0);
		EXPECT_EQ(fake::of(s).receives, 1U);
		EXPECT_EQ(fake::of(s).lkey, fake::held_lkey);
		fake::of(s).lkey = 0;
		fake::of(s).busy = true;
		EXPECT_EQ(ibv_destroy_srq(s), EBUSY);
		EXPECT_EQ(ibv_post_srq_recv(s, &wr, &bad), 0);
		EXPECT_EQ(fake::of(s).receives, 2U);
		EXPECT_EQ(fake::of(s).lkey, fake::held_lkey);
		fake::of(s).busy = false;
		EXPECT_EQ(ibv_dereg_mr(mr), 0);
	}
	for (ibv_srq *const s : srq)
		EXPECT_EQ(ibv_destroy_srq(s), 0);
}

TEST(Preload, WhatTheLibraryDoesNotTakeIsTheProviders)
{
	device d;
	connection ours(d);
	ibv_cq *const cq = d.make_cq(1 << 25);
	ibv_qp *const raw = d.make_qp(ours.cq, IBV_QPT_RAW_PACKET), *const elsewhere = d.make_qp(cq);
	ibv_mw_bind bind{};
	ibv_mw mw{};

	EXPECT_EQ(ibv_query_qp_data_in_order(ours.qp, IBV_WR_RDMA_WRITE, 0), 0) << "nobody can promise that";
	for (ibv_qp *const qp : {raw, elsewhere}) {
		EXPECT_EQ(ibv_query_qp_data_in_order(qp, IBV_WR_RDMA_WRITE, 0), 1);
		ibv_send_wr wr{}, *bad;
		wr.wr_id = 5;
		wr.opcode = IBV_WR_SEND;
		wr.send_flags = IBV_SEND_SIGNALED;
		EXPECT_EQ(ibv_post_send(qp, &wr, &bad), 0);
		EXPECT_EQ(fake::of(qp).wr_id, 5U);
		ibv_recv_wr rr{}, *bad_recv;
		EXPECT_EQ(ibv_post_recv(qp, &rr, &bad_recv), 0);
		EXPECT_EQ(fake::of(qp).receives, 1U);
		EXPECT_EQ(d.context->ops.bind_mw(qp, &mw, &bind), 0);
	}
	EXPECT_EQ(d.context->ops.bind_mw(ours.qp, &mw, &bind), EOPNOTSUPP);
	ibv_wc wc{};
	ASSERT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
	EXPECT_EQ(wc.wr_id, 5U);
	EXPECT_EQ(fake::of(cq).polls, 1U);
	EXPECT_EQ(ibv_req_notify_cq(cq, 0), 0);
	EXPECT_EQ(fake::of(cq).arms, 1U);
	EXPECT_EQ(ibv_destroy_qp(raw), 0);
	EXPECT_EQ(ibv_destroy_qp(elsewhere), 0);
	EXPECT_EQ(ibv_destroy_cq(cq), 0);
}

/* What the application calls through, counted. */
ibv_context_ops counted;
unsigned calls;

TEST(Preload, LibraryDoesNotCallItself)
{
	device d;
	ibv_comp_channel *const channel = ibv_create_comp_channel(d.context);
	ibv_cq *const cq = ibv_create_cq(d.context, 64, nullptr, channel, 0);
	ibv_qp *const qp = d.make_qp(cq);
	ibv_context_ops &ops = d.context->ops;

	counted = ops;
	calls = 0;
	ops.post_send = [](ibv_qp *q, ibv_send_wr *wr, ibv_send_wr **bad) { return ++calls, counted.post_send(q, wr, bad); };
	ops.post_recv = [](ibv_qp *q, ibv_recv_wr *wr, ibv_recv_wr **bad) { return ++calls, counted.post_recv(q, wr, bad); };
	ops.poll_cq = [](ibv_cq *c, int n, ibv_wc *wc) { return ++calls, counted.poll_cq(c, n, wc); };
	ops.req_notify_cq = [](ibv_cq *c, int solicited) { return ++calls, counted.req_notify_cq(c, solicited); };
	ibv_send_wr wr{}, *bad;
	wr.opcode = IBV_WR_SEND;
	EXPECT_EQ(ibv_post_send(qp, &wr, &bad), 0);
	EXPECT_EQ(fake::of(qp).sends, 1U);
	EXPECT_EQ(calls, 1U);
	ibv_recv_wr rr{}, *bad_recv;
	EXPECT_EQ(ibv_post_recv(qp, &rr, &bad_recv), 0);
	EXPECT_EQ(calls, 2U);
	ibv_wc wc[8];
	EXPECT_EQ(ibv_poll_cq(cq, 8, wc), 1);
	EXPECT_GT(fake::of(cq).polls, 0U);
	EXPECT_EQ(calls, 3U);
	EXPECT_EQ(ibv_req_notify_cq(cq, 0), 0);
	EXPECT_EQ(fake::of(cq).arms, 1U);
	EXPECT_EQ(calls, 4U);
	/* What it polls when it gives a queue pair back is not the application's call either. */
	EXPECT_EQ(ibv_destroy_qp(qp), 0);
	EXPECT_EQ(calls, 4U);
	EXPECT_EQ(ibv_destroy_cq(cq), 0);
	EXPECT_EQ(ibv_destroy_comp_channel(channel), 0);
}

TEST(Preload, RegionsOfTheApplicationAreUnpinnedAndTheLibrarysAreNot)
{
	device d;
	const std::size_t before = fake::of(d.context).handles.size();
	connection c(d);

	EXPECT_TRUE(fake::of(c.mr).access & IBV_ACCESS_UNPINNED);
	/* CQ, QP, region; the library has one of its own when the peer has some. */
	EXPECT_EQ(fake::of(d.context).handles.size(), before + 3);
	ibv_sge s = c.sge();
	/* Those of nobody, and the library's own, are not held. */
	ibv_recv_wr wr{}, *bad;
	wr.sg_list = &s;
	wr.num_sge = 1;
	for (std::uint32_t lkey = 0; lkey < 16; ++lkey) {
		s.lkey = lkey << 8;
		EXPECT_EQ(ibv_post_recv(c.qp, &wr, &bad), 0);
		EXPECT_EQ(fake::of(c.qp).lkey, s.lkey == c.mr->lkey ? fake::held_lkey : s.lkey);
	}
	ibv_send_wr read{}, *bad_read;
	read.sg_list = &s;
	read.num_sge = 1;
	read.opcode = IBV_WR_RDMA_READ;
	read.wr.rdma.remote_addr = 1 << 20;
	read.wr.rdma.rkey = fake::unpinned_rkey;
	EXPECT_EQ(fake::of(d.context).pinned, 0U);
	ASSERT_EQ(ibv_post_send(c.qp, &read, &bad_read), 0);
	for (int i = 0; i < 5000 && !fake::of(d.context).pinned; ++i)
		std::this_thread::sleep_for(std::chrono::milliseconds(1));
	EXPECT_EQ(fake::of(d.context).pinned, 1U);
	EXPECT_EQ(fake::of(d.context).handles.size(), before + 4);
}

TEST(Preload, DestructionThatIsRefusedChangesNothing)
{
	device d;
	connection c(d);

	fake::of(c.cq).busy = fake::of(c.qp).busy = true;
	EXPECT_EQ(ibv_destroy_cq(c.cq), EBUSY);
	c.expect_taken();
	EXPECT_EQ(ibv_destroy_qp(c.qp), EBUSY);
	c.expect_taken();
	fake::of(c.cq).busy = fake::of(c.qp).busy = false;
}

TEST(Preload, QueuePairThatIsResetGoesOnAndSoDoesItsExtendedOne)
{
	device d;
	connection c(d);
	ibv_qp_ex *const ex = ibv_qp_to_qp_ex(c.qp);
	ibv_qp_attr attr{};

	ASSERT_TRUE(ex);
	for (std::uint64_t id = 1; id <= 3; ++id) {
		const unsigned before = fake::of(c.qp).sends;
		ibv_wr_start(ex);
		ex->wr_id = id;
		ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_send(ex);
		const ibv_sge s = c.sge();
		ibv_wr_set_sge(ex, s.lkey, s.addr, s.length);
		EXPECT_EQ(ibv_wr_complete(ex), 0);
		EXPECT_EQ(fake::of(c.qp).sends, before + 1);
		EXPECT_EQ(fake::of(c.qp).lkey, fake::held_lkey);
		EXPECT_EQ(c.next(), id);
		attr.qp_state = IBV_QPS_RESET;
		ASSERT_EQ(ibv_modify_qp(c.qp, &attr, IBV_QP_STATE), 0);
		c.expect_taken();
		EXPECT_EQ(ibv_qp_to_qp_ex(c.qp), ex);
	}
}

/* As by a provider that does not have them; what they are called through would be null. */
TEST(Preload, QueuePairForOperationsThatTheLibraryHasNotIsRefused)
{
	device d;
	ibv_cq *const cq = d.make_cq();
	ibv_qp_init_attr_ex attr{};

	attr.send_cq = attr.recv_cq = cq;
	attr.pd = &d.pd;
	attr.cap = {4, 4, 4, 4, 64};
	attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	for (const ibv_qp_type type : {IBV_QPT_RC, IBV_QPT_UD}) {
		attr.qp_type = type;
		/* The last are of headers to come. */
		for (unsigned bit = 0; bit < 64; ++bit) {
			attr.send_ops_flags = 1ULL << bit | IBV_QP_EX_WITH_SEND;
			errno = 0;
			ibv_qp *const qp = ibv_create_qp_ex(d.context, &attr);
			EXPECT_EQ(qp != nullptr, bit <= 9) << bit;
			if (!qp) {
				EXPECT_EQ(errno, EOPNOTSUPP);
				continue;
			}
			ibv_qp_ex *const ex = ibv_qp_to_qp_ex(qp);
			EXPECT_TRUE(ex->wr_rdma_write && ex->wr_rdma_write_imm && ex->wr_send && ex->wr_send_imm &&
				    ex->wr_rdma_read && ex->wr_atomic_cmp_swp && ex->wr_atomic_fetch_add &&
				    ex->wr_local_inv && ex->wr_bind_mw && ex->wr_send_inv);
			EXPECT_EQ(ibv_destroy_qp(qp), 0);
		}
	}
	/* That one is the provider's alone. */
	attr.qp_type = IBV_QPT_RAW_PACKET;
	attr.send_ops_flags = IBV_QP_EX_WITH_TSO;
	ibv_qp *const raw = ibv_create_qp_ex(d.context, &attr);
	ASSERT_TRUE(raw);
	EXPECT_EQ(ibv_destroy_qp(raw), 0);
	EXPECT_EQ(ibv_destroy_cq(cq), 0);
}

TEST(Preload, HandlesAreUsedAgainByObjectsOfAnyKind)
{
	device d;
	connection c(d);
	ibv_srq_init_attr attr{};

	for (unsigned i = 0; i < 8; ++i) {
		ibv_cq *const cq = d.make_cq();
		const std::uint32_t handle = cq->handle;
		EXPECT_EQ(ibv_destroy_cq(cq), 0);
		ibv_qp *const raw = d.make_qp(c.cq, IBV_QPT_RAW_PACKET);
		EXPECT_EQ(raw->handle, handle);
		ibv_send_wr wr{}, *bad;
		wr.wr_id = 9;
		wr.opcode = IBV_WR_SEND;
		EXPECT_EQ(ibv_post_send(raw, &wr, &bad), 0);
		EXPECT_EQ(fake::of(raw).wr_id, 9U);
		EXPECT_EQ(ibv_destroy_qp(raw), 0);
		ibv_srq *const srq = ibv_create_srq(&d.pd, &attr);
		EXPECT_EQ(srq->handle, handle);
		EXPECT_EQ(ibv_destroy_srq(srq), 0);
		{
			connection again(d);
			EXPECT_EQ(again.cq->handle, handle);
			again.expect_taken();
		}
		c.expect_taken();
	}
}

TEST(Preload, ContextThatIsOpenedAgainIsANewOne)
{
	std::vector<std::tuple<std::unique_ptr<fake::mr>, std::unique_ptr<fake::qp>, std::unique_ptr<fake::cq>>> left;
	int fd = -1;
	std::uint32_t old_key = 0;

	for (unsigned i = 0; i < 4; ++i) {
		device d;
		if (fd >= 0) {
			EXPECT_EQ(d.context->cmd_fd, fd);
		}
		fd = d.context->cmd_fd;
		ibv_cq *const cq = d.make_cq();
		ibv_qp *const qp = d.make_qp(cq);
		ibv_send_wr wr{}, *bad;
		ibv_sge s{0, 8, old_key};
		wr.wr_id = 3;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = IBV_WR_SEND;
		wr.send_flags = IBV_SEND_SIGNALED;
		ASSERT_EQ(ibv_post_send(qp, &wr, &bad), 0);
		EXPECT_EQ(fake::of(qp).lkey, old_key) << "a key of the context that was closed";
		EXPECT_NE(fake::of(qp).wr_id, 3U);
		ibv_wc wc{};
		ASSERT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
		EXPECT_EQ(wc.wr_id, 3U);
		connection c(d);
		c.expect_taken();
		/* Not every application destroys all it has. */
		ibv_mr *const mr = ibv_reg_mr(&d.pd, &s, sizeof(s), IBV_ACCESS_LOCAL_WRITE);
		old_key = mr->lkey;
		left.emplace_back(&fake::of(mr), &fake::of(qp), &fake::of(cq));
	}
}

/* There it would be found by nobody, and the program would not know why its memory is refused. */
TEST(Preload, ObjectWithAHandleOutOfRangeIsNotMade)
{
	device d;
	ibv_cq *const cq = d.make_cq();
	ibv_srq_init_attr attr{};

	fake::of(d.context).first_handle = 1U << 24;
	const std::size_t before = fake::of(d.context).handles.size();
	errno = 0;
	EXPECT_FALSE(d.make_cq());
	EXPECT_EQ(errno, ENOMEM);
	errno = 0;
	EXPECT_FALSE(d.make_qp(cq));
	EXPECT_EQ(errno, ENOMEM);
	errno = 0;
	EXPECT_FALSE(ibv_create_srq(&d.pd, &attr));
	EXPECT_EQ(errno, ENOMEM);
	EXPECT_EQ(fake::of(d.context).handles.size(), before);
	EXPECT_EQ(ibv_destroy_cq(cq), 0);
}

TEST(Preload, ThreadsPostWhileOthersCreateAndDestroy)
{
	device a, b;
	std::atomic<bool> stop{false};
	std::vector<std::thread> threads;

	for (device *const d : {&a, &b})
		threads.emplace_back([&stop, d] {
			for (unsigned i = 0; !stop.load(std::memory_order_relaxed); ++i) {
				connection c(*d);
				ASSERT_EQ(c.send(i + 1), 0);
				ASSERT_EQ(c.next(), i + 1);
			}
		});
	threads.emplace_back([&stop] {
		while (!stop.load(std::memory_order_relaxed)) {
			device d;
			connection c(d);
			c.expect_taken();
		}
	});
	std::vector<std::thread> posters;
	for (device *const d : {&a, &b, &a})
		posters.emplace_back([d] {
			connection c(*d);
			for (std::uint64_t i = 1; i <= 2000; ++i) {
				ASSERT_EQ(c.send(i), 0);
				ASSERT_NE(fake::of(c.qp).wr_id, i);
				ASSERT_EQ(c.next(), i);
			}
		});
	for (std::thread &t : posters)
		t.join();
	stop.store(true, std::memory_order_relaxed);
	for (std::thread &t : threads)
		t.join();
	EXPECT_EQ(fake::of(a.context).holds, 0U);
	EXPECT_EQ(fake::of(b.context).holds, 0U);
}

} // namespace
