/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The preload library's functions, which are this program's own, before a libibverbs that needs no
 * device. A post that the library has taken has a wr_id of its own at the provider, and the
 * provider sees the key of a hold.
 */
#include "fake_verbs.hpp"
#include "fixture.hpp"
#include "pointers.hpp"
#include "policy.hpp"
#include "registry.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <gtest/gtest.h>
#include <infiniband/mlx5dv.h>
#include <cstddef>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <memory>
#include <nprdma/nprdma.h>
#include <poll.h>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <tuple>
#include <unistd.h>
#include <vector>

extern "C" int rsocket(int domain, int type, int protocol);

namespace {

/* What the program does not see. */
npr_cq *find_cq(ibv_cq *cq)
{
	return npr::preload::find(cq);
}

ibv_comp_channel *real_channel(ibv_comp_channel *c)
{
	return npr::preload::find(npr::preload::all().channels, c)->real;
}

/* Something happens to it that only the library can tell. */
void kick(npr_cq *cq)
{
	cq->kick();
}

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
		EXPECT_TRUE(fake::is_held(fake::of(c[i].qp).lkey));
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
		EXPECT_TRUE(fake::is_held(fake::of(s).lkey));
		fake::of(s).lkey = 0;
		fake::of(s).busy = true;
		EXPECT_EQ(ibv_destroy_srq(s), EBUSY);
		EXPECT_EQ(ibv_post_srq_recv(s, &wr, &bad), 0);
		EXPECT_EQ(fake::of(s).receives, 2U);
		EXPECT_TRUE(fake::is_held(fake::of(s).lkey));
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
		EXPECT_EQ(fake::is_held(fake::of(c.qp).lkey), s.lkey == c.mr->lkey);
		EXPECT_TRUE(s.lkey == c.mr->lkey || fake::of(c.qp).lkey == s.lkey);
	}
	ibv_send_wr read{}, *bad_read;
	read.sg_list = &s;
	read.num_sge = 1;
	read.opcode = IBV_WR_RDMA_READ;
	read.wr.rdma.remote_addr = fake::unpinned_base;
	read.wr.rdma.rkey = fake::unpinned_rkey;
	EXPECT_EQ(fake::of(d.context).pinned, 0U);
	ASSERT_EQ(ibv_post_send(c.qp, &read, &bad_read), 0);
	for (int i = 0; i < 5000 && !fake::of(d.context).pinned; ++i)
		std::this_thread::sleep_for(std::chrono::milliseconds(1));
	EXPECT_EQ(fake::of(d.context).pinned, 1U);
	EXPECT_EQ(fake::of(d.context).handles.size(), before + 4);
}

/* By way of all that there is: pointers, engine, methods of the kernel, and the HCA with a key of a hold. */
TEST(Preload, ReadsAndWritesReachThePeersMemory)
{
	device d;
	connection c(d);
	fake::context &f = fake::opened(d.context);
	std::vector<std::byte> &there = *f.region.memory;
	ibv_qp_attr attr{};
	ibv_sge s = c.sge();
	ibv_send_wr wr{}, *bad;

	attr.qp_state = IBV_QPS_RTS;
	ASSERT_EQ(ibv_modify_qp(c.qp, &attr, IBV_QP_STATE), 0);
	wr.sg_list = &s;
	wr.num_sge = 1;
	wr.send_flags = IBV_SEND_SIGNALED;
	wr.wr.rdma.rkey = fake::unpinned_rkey;
	for (const ibv_wr_opcode op : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE}) {
		/* The page is absent, and then it is resident. */
		for (std::uint64_t id = 1; id <= 2; ++id) {
			const std::size_t at = 4096 * static_cast<std::size_t>(op) + 8;
			std::uint64_t done = 0;

			{
				const std::lock_guard lock(f.mutex);
				std::fill_n(&there[at], 64, static_cast<std::byte>(id));
			}
			c.memory.fill(static_cast<std::byte>(0x10 + id));
			wr.wr_id = id;
			wr.opcode = op;
			wr.wr.rdma.remote_addr = fake::unpinned_base + at;
			ASSERT_EQ(ibv_post_send(c.qp, &wr, &bad), 0);
			for (int i = 0; i < 10'000 && !(done = c.next()); ++i)
				std::this_thread::sleep_for(std::chrono::milliseconds(1));
			ASSERT_EQ(done, id);
			const std::byte same{static_cast<unsigned char>(op == IBV_WR_RDMA_READ ? id : 0x10 + id)};
			EXPECT_EQ(std::count(c.memory.begin(), c.memory.end(), same), 64);
			EXPECT_EQ(std::count(&there[at], &there[at] + 64, same), 64);
		}
	}
	EXPECT_EQ(fake::holds(d.context), 0U);
	EXPECT_FALSE(f.kernel.asked.empty()) << "no page was asked for";
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
		for (const ibv_qp_state state : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS}) {
			ibv_wr_start(ex);
			ibv_wr_send(ex);
			EXPECT_EQ(ibv_wr_complete(ex), EINVAL) << "it does not send yet";
			attr.qp_state = state;
			ASSERT_EQ(ibv_modify_qp(c.qp, &attr, IBV_QP_STATE), 0);
		}
		ibv_wr_start(ex);
		ex->wr_id = id;
		ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_send(ex);
		const ibv_sge s = c.sge();
		ibv_wr_set_sge(ex, s.lkey, s.addr, s.length);
		EXPECT_EQ(ibv_wr_complete(ex), 0);
		EXPECT_EQ(fake::of(c.qp).sends, before + 1);
		EXPECT_TRUE(fake::is_held(fake::of(c.qp).lkey));
		EXPECT_EQ(c.next(), id);
		attr.qp_state = IBV_QPS_RESET;
		ASSERT_EQ(ibv_modify_qp(c.qp, &attr, IBV_QP_STATE), 0);
		c.expect_taken();
		EXPECT_EQ(ibv_qp_to_qp_ex(c.qp), ex);
	}
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

/*
 * By a destructor that exit() calls, for one. There a thread to be joined would be waited for for ever, and what is
 * freed is the parent's.
 */
TEST(Preload, ChildClosesItsDeviceAndTheParentsGoesOn)
{
	device d;
	connection c(d);

	/* Its hold is the adapter's to use until the parent has polled. */
	ASSERT_EQ(c.send(1), 0);
	ASSERT_EQ(fake::holds(d.context), 1U);
	const unsigned before = fake_holds_freed;
	const pid_t child = fork();
	ASSERT_GE(child, 0);
	if (!child) {
		alarm(10);
		const int rc = ibv_close_device(d.context);
		_exit(rc ? 1 : fake_holds_freed == before ? 0 : 2);
	}
	int status = -1;
	ASSERT_EQ(waitpid(child, &status, 0), child);
	EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
	EXPECT_EQ(c.next(), 1U);
	c.expect_taken(3);
}

TEST(Preload, LibibverbsThatIsNotSeenIsToldOfOnce)
{
	const auto said = [](auto &&f) {
		testing::internal::CaptureStderr();
		f();
		return testing::internal::GetCapturedStderr();
	};
	constexpr char none[] = "/dev/infiniband/uverbs99";

	EXPECT_EQ(said([] {
		device d;
		close(open("/dev/null", O_RDONLY));
	}), "");
	EXPECT_EQ(said([&] { EXPECT_EQ(open(none, O_RDWR), -1); }),
		  "libnprdma-preload: a libibverbs that this library does not see opens /dev/infiniband/uverbs99: "
		  "what it registers stays pinned\n");
	EXPECT_EQ(said([&] { EXPECT_EQ(open64(none, O_RDWR), -1); }), "");
	EXPECT_EQ(errno, ENOENT);

	/* And files are opened as ever. */
	const std::string path = testing::TempDir() + "npr-open-" + std::to_string(getpid());
	const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL, 0640);
	struct stat st{};
	ASSERT_GE(fd, 0);
	EXPECT_EQ(fstat(fd, &st), 0);
	EXPECT_EQ(st.st_mode & 0707U, 0600U);
	close(fd);
	EXPECT_EQ(unlink(path.c_str()), 0);
}

/* There it would be found by nobody, and the program would not know why its memory is refused. */
TEST(Preload, ObjectWithAHandleOutOfRangeIsNotMade)
{
	device d;
	ibv_cq *const cq = d.make_cq();
	ibv_srq_init_attr attr{};
	connection unpinned(d);

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
	EXPECT_EQ(fake::holds(a.context), 0U);
	EXPECT_EQ(fake::holds(b.context), 0U);
}

/* --- what programs do besides ------------------------------------------- */

ibv_cq_ex *make_cq_ex(device &d, std::uint64_t wc_flags, ibv_comp_channel *channel = nullptr)
{
	ibv_cq_init_attr_ex attr{};

	attr.cqe = 64;
	attr.channel = channel;
	attr.wc_flags = wc_flags;
	return ibv_create_cq_ex(d.context, &attr);
}

/* The program sees its own wr_ids, whichever way it polls. */
TEST(Preload, ExtendedQueueOfCompletionsIsTaken)
{
	device d;
	ibv_cq_ex *const ex = make_cq_ex(d, IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_QP_NUM);
	ASSERT_TRUE(ex);
	ibv_cq *const cq = ibv_cq_ex_to_cq(ex);
	ibv_qp *const qp = d.make_qp(cq);
	std::array<std::byte, 64> memory{};
	ibv_mr *const mr = ibv_reg_mr(&d.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE);
	ibv_sge s{reinterpret_cast<std::uintptr_t>(memory.data()), memory.size(), mr->lkey};
	ibv_recv_wr wr{}, *bad;

	EXPECT_EQ(fake::of(cq).wc_flags, IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_QP_NUM);
	EXPECT_TRUE(ex->read_byte_len && ex->read_qp_num && ex->read_opcode && ex->read_wc_flags && ex->read_vendor_err);
	EXPECT_FALSE(ex->read_src_qp || ex->read_imm_data || ex->read_completion_ts) << "not asked for";
	ibv_poll_cq_attr attr{};
	EXPECT_EQ(ibv_start_poll(ex, &attr), ENOENT);
	wr.sg_list = &s;
	wr.num_sge = 1;
	for (std::uint64_t id = 1; id <= 3; ++id) {
		wr.wr_id = id;
		ASSERT_EQ(ibv_post_recv(qp, &wr, &bad), 0);
		EXPECT_TRUE(fake::is_held(fake::of(qp).lkey));
	}
	ASSERT_EQ(ibv_start_poll(ex, &attr), 0);
	EXPECT_EQ(ex->wr_id, 1U);
	EXPECT_EQ(ex->status, IBV_WC_SUCCESS);
	EXPECT_EQ(ibv_wc_read_opcode(ex), IBV_WC_RECV);
	EXPECT_EQ(ibv_wc_read_qp_num(ex), qp->qp_num);
	ASSERT_EQ(ibv_next_poll(ex), 0);
	EXPECT_EQ(ex->wr_id, 2U);
	ibv_end_poll(ex);
	ibv_wc wc{};
	ASSERT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
	EXPECT_EQ(wc.wr_id, 3U);
	EXPECT_EQ(fake::holds(d.context), 0U);
	EXPECT_EQ(ibv_destroy_qp(qp), 0);
	EXPECT_EQ(ibv_destroy_cq(cq), 0);
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

/* What the library leaves to the provider uses pinned memory, though the region is unpinned, and not more of it. */
TEST(Preload, WhatIsLeftToTheProviderHasPinnedMemory)
{
	device d;
	connection c(d);
	ibv_cq_ex *const ex = make_cq_ex(d, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);
	ASSERT_TRUE(ex);
	EXPECT_FALSE(ex->start_poll) << "the provider's own";
	ibv_qp *const timed = d.make_qp(ibv_cq_ex_to_cq(ex)), *const raw = d.make_qp(c.cq, IBV_QPT_RAW_PACKET);
	ASSERT_TRUE(timed && raw);
	ibv_sge s[2] = {c.sge(), c.sge()};
	s[1].lkey = 7; /* somebody else's */
	ibv_recv_wr rr{}, *bad_recv;
	ibv_send_wr wr{}, *bad;

	EXPECT_EQ(fake::of(d.context).pinned, 0U);
	wr.opcode = IBV_WR_SEND;
	wr.num_sge = rr.num_sge = 2;
	wr.sg_list = rr.sg_list = s;
	for (ibv_qp *const qp : {timed, raw}) {
		wr.wr_id = 5;
		EXPECT_EQ(ibv_post_send(qp, &wr, &bad), 0);
		EXPECT_EQ(fake::of(qp).wr_id, 5U);
		EXPECT_EQ(fake::of(d.context).pinned, 1U) << "one twin for all";
		const std::uint32_t twin = fake::of(qp).lkey;
		EXPECT_NE(twin, c.mr->lkey);
		EXPECT_FALSE(fake::is_held(twin));
		EXPECT_EQ(ibv_post_recv(qp, &rr, &bad_recv), 0);
		EXPECT_EQ(fake::of(qp).lkey, twin);
		EXPECT_EQ(s[0].lkey, c.mr->lkey) << "the program's list is the program's";
		wr.send_flags = IBV_SEND_INLINE;
		EXPECT_EQ(ibv_post_send(qp, &wr, &bad), 0);
		EXPECT_EQ(fake::of(qp).lkey, c.mr->lkey) << "which nobody looks at";
		wr.send_flags = 0;
	}
	EXPECT_EQ(c.next(), 0U) << "that of the raw one";
	c.expect_taken();
	const std::size_t before = fake::of(d.context).handles.size();
	EXPECT_EQ(ibv_dereg_mr(c.mr), 0);
	EXPECT_EQ(fake::of(d.context).handles.size(), before - 2) << "the region and its twin";
	c.mr = ibv_reg_mr(&d.pd, c.memory.data(), c.memory.size(), IBV_ACCESS_LOCAL_WRITE);
	EXPECT_EQ(ibv_destroy_qp(timed), 0);
	EXPECT_EQ(ibv_destroy_qp(raw), 0);
	EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(ex)), 0);
}

TEST(Preload, ProvidersWorkRequestsKeepTheirOrderAndTheFirstBadOneIsNamed)
{
	device d;
	connection c(d);
	ibv_qp *const raw = d.make_qp(c.cq, IBV_QPT_RAW_PACKET);
	ibv_sge s = c.sge();
	std::array<ibv_send_wr, 3> wr{};
	ibv_send_wr *bad = nullptr;

	for (std::size_t k = 0; k < wr.size(); ++k) {
		wr[k].wr_id = k;
		wr[k].next = k + 1 < wr.size() ? &wr[k + 1] : nullptr;
		wr[k].sg_list = &s;
		wr[k].num_sge = 1;
		wr[k].opcode = IBV_WR_SEND;
		wr[k].send_flags = IBV_SEND_SIGNALED;
	}
	EXPECT_EQ(ibv_post_send(raw, wr.data(), &bad), 0);
	EXPECT_EQ(fake::of(raw).sends, 3U);
	for (std::uint64_t k = 0; k < wr.size(); ++k)
		EXPECT_EQ(fake::of(c.cq).completions[k].wr_id, k);
	fake::of(d.context).refuses_pinned = ENOMEM;
	connection other(d);
	ibv_sge t = other.sge();
	wr[1].sg_list = &t;
	EXPECT_EQ(ibv_post_send(raw, wr.data(), &bad), ENOMEM);
	EXPECT_EQ(bad, &wr[1]);
	EXPECT_EQ(fake::of(raw).sends, 4U);
	fake::of(d.context).refuses_pinned = 0;
	fake::of(c.cq).completions.clear();
	EXPECT_EQ(ibv_destroy_qp(raw), 0);
}

/* An XRC queue pair of a peer cannot ask for pages. */
TEST(Preload, XrcNeedsAllRemoteMemoryPinned)
{
	device d;
	ibv_cq *const cq = d.make_cq();
	std::array<std::byte, 64> memory{};
	constexpr int remote = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	ibv_xrcd_init_attr domain{};
	ibv_qp_open_attr open{};
	const auto unpinned = [&](device &of, int access) {
		ibv_mr *const mr = ibv_reg_mr(&of.pd, memory.data(), memory.size(), access);
		const bool is = fake::of(mr).access & IBV_ACCESS_UNPINNED;

		EXPECT_EQ(ibv_dereg_mr(mr), 0);
		return is;
	};

	/* Just to see whether it can. */
	ibv_xrcd *xrcd = ibv_open_xrcd(d.context, &domain);
	ASSERT_TRUE(xrcd);
	EXPECT_EQ(ibv_close_xrcd(xrcd), 0);
	ibv_mr *const theirs = ibv_reg_mr(&d.pd, memory.data(), memory.size(), remote);
	EXPECT_TRUE(fake::of(theirs).access & IBV_ACCESS_UNPINNED);
	/* Peers have its key. */
	for (unsigned k = 0; k < 2; ++k) {
		errno = 0;
		EXPECT_FALSE(k ? d.make_qp(cq, IBV_QPT_XRC_RECV) : ibv_open_qp(d.context, &open));
		EXPECT_EQ(errno, EOPNOTSUPP);
	}
	ibv_qp *const sender = d.make_qp(cq, IBV_QPT_XRC_SEND);
	EXPECT_TRUE(sender) << "which has twins, and by which nobody comes";
	EXPECT_EQ(ibv_dereg_mr(theirs), 0);
	xrcd = ibv_open_xrcd(d.context, &domain);
	ibv_qp *const target = d.make_qp(cq, IBV_QPT_XRC_RECV);
	ASSERT_TRUE(xrcd && target);
	EXPECT_FALSE(unpinned(d, remote)) << "from here on";
	EXPECT_TRUE(unpinned(d, IBV_ACCESS_LOCAL_WRITE));
	EXPECT_EQ(ibv_destroy_qp(target), 0);
	EXPECT_EQ(ibv_destroy_qp(sender), 0);
	EXPECT_EQ(ibv_close_xrcd(xrcd), 0);
	EXPECT_EQ(ibv_destroy_cq(cq), 0);

	/* Its queue pairs are made when memory is registered. */
	device other;
	xrcd = ibv_open_xrcd(other.context, &domain);
	EXPECT_FALSE(unpinned(other, remote));
	EXPECT_EQ(ibv_close_xrcd(xrcd), 0);
	EXPECT_FALSE(unpinned(other, remote)) << "one was pinned, and so are all";
}

/* What failed, or was refused by the kernel, has decided nothing. */
TEST(Preload, OnlyARegionThatIsUnpinnedRefusesWhatNeedsPinnedMemory)
{
	device d;
	std::array<std::byte, 64> memory{};
	ibv_srq_init_attr_ex tags = attributes_of_tags(d);

	fake::of(d.context).refuses_unpinned = EFAULT;
	EXPECT_FALSE(ibv_reg_mr(&d.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE));
	fake::of(d.context).refuses_unpinned = EOPNOTSUPP;
	ibv_mr *const mr = ibv_reg_mr(&d.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE);
	ASSERT_TRUE(mr);
	ibv_srq *const made = ibv_create_srq_ex(d.context, &tags);
	ASSERT_TRUE(made);
	EXPECT_EQ(ibv_destroy_srq(made), 0);
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
	fake::of(d.context).refuses_unpinned = 0;
	connection c(d);
	c.expect_taken();
	EXPECT_FALSE(ibv_create_srq_ex(d.context, &tags));
}

/* And where the program builds its work requests by ibv_wr_*(). */
TEST(Preload, ExtendedRequestsOfWhatIsLeftHavePinnedMemory)
{
	std::unique_ptr<fake::qp> forgotten; /* what not every application destroys */
	device d;
	connection c(d);
	ibv_cq_ex *const timed = make_cq_ex(d, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);
	ibv_qp_init_attr_ex attr{};
	ibv_sge list[2] = {c.sge(), c.sge()};
	std::uint32_t twin = 0;

	list[1].lkey = 7; /* somebody else's */
	attr.pd = &d.pd;
	attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	attr.send_ops_flags = IBV_QP_EX_WITH_SEND;
	attr.cap = {4, 4, 4, 4, 64};
	for (const ibv_qp_type type : {IBV_QPT_XRC_SEND, IBV_QPT_RAW_PACKET, IBV_QPT_RC}) {
		attr.qp_type = type;
		attr.send_cq = attr.recv_cq = type == IBV_QPT_RC ? ibv_cq_ex_to_cq(timed) : c.cq;
		ibv_qp *const qp = ibv_create_qp_ex(d.context, &attr);
		ASSERT_TRUE(qp) << type;
		ibv_qp_ex *const ex = ibv_qp_to_qp_ex(qp);
		ASSERT_EQ(&ex->qp_base, qp) << "the provider's";
		const std::vector<ibv_sge> &built = fake::of(qp).built;

		ibv_wr_start(ex);
		ibv_wr_send(ex);
		ibv_wr_set_sge(ex, list[0].lkey, list[0].addr, 8);
		ibv_wr_send(ex);
		ibv_wr_set_sge_list(ex, 2, list);
		EXPECT_EQ(ibv_wr_complete(ex), 0);
		EXPECT_EQ(fake::of(qp).sends, 1U);
		ASSERT_EQ(built.size(), 3U);
		twin = built[0].lkey;
		EXPECT_NE(twin, c.mr->lkey);
		EXPECT_FALSE(fake::is_held(twin));
		EXPECT_EQ(built[0].addr, list[0].addr);
		EXPECT_EQ(built[0].length, 8U);
		EXPECT_EQ(built[1].lkey, twin);
		EXPECT_EQ(built[2].lkey, 7U);
		EXPECT_EQ(list[0].lkey, c.mr->lkey) << "the program's list is the program's";
		EXPECT_EQ(fake::of(d.context).pinned, 1U) << "one twin for all";
		const std::uint32_t handle = qp->handle;
		EXPECT_TRUE(npr::preload::find(d.context)->builders.find_any(handle));
		EXPECT_EQ(ibv_destroy_qp(qp), 0);
		EXPECT_FALSE(npr::preload::find(d.context)->builders.find_any(handle));
	}
	c.expect_taken();
	attr.qp_type = IBV_QPT_XRC_SEND;
	attr.send_cq = attr.recv_cq = c.cq;
	forgotten.reset(&fake::of(ibv_create_qp_ex(d.context, &attr)));
	EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(timed)), 0);
}

TEST(Preload, ExtendedRequestsWithoutPinnedMemoryAreNotPosted)
{
	device d;
	connection c(d);
	ibv_qp_init_attr_ex attr{};

	attr.pd = &d.pd;
	attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	attr.send_ops_flags = IBV_QP_EX_WITH_SEND;
	attr.cap = {4, 4, 4, 4, 64};
	attr.qp_type = IBV_QPT_XRC_SEND;
	attr.send_cq = attr.recv_cq = c.cq;
	ibv_qp *const qp = ibv_create_qp_ex(d.context, &attr);
	ASSERT_TRUE(qp);
	ibv_qp_ex *const ex = ibv_qp_to_qp_ex(qp);
	ibv_sge list[2] = {c.sge(), c.sge()};

	list[0].lkey = 7;
	fake::of(d.context).refuses_pinned = ENOMEM;
	for (const bool as_list : {false, true}) {
		fake::of(qp).aborts = 0;
		ibv_wr_start(ex);
		ibv_wr_send(ex);
		if (as_list)
			ibv_wr_set_sge_list(ex, 2, list);
		else
			ibv_wr_set_sge(ex, list[1].lkey, list[1].addr, 8);
		/* What could have been posted alone is not, either. */
		ibv_wr_send(ex);
		ibv_wr_set_sge(ex, 7, list[0].addr, 8);
		EXPECT_EQ(ibv_wr_complete(ex), ENOMEM);
		EXPECT_EQ(fake::of(qp).sends, 0U);
		EXPECT_EQ(fake::of(qp).aborts, 1U) << "the provider's lock is given back";
		EXPECT_TRUE(fake::of(qp).built.empty());
	}
	/* What is begun next is another's. */
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	ibv_wr_set_sge(ex, list[1].lkey, list[1].addr, 8);
	ibv_wr_abort(ex);
	fake::of(d.context).refuses_pinned = 0;
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	ibv_wr_set_sge(ex, list[1].lkey, list[1].addr, 8);
	EXPECT_EQ(ibv_wr_complete(ex), 0);
	EXPECT_EQ(fake::of(qp).sends, 1U);
	/* One that cannot be destroyed goes on. */
	fake::of(qp).busy = true;
	EXPECT_EQ(ibv_destroy_qp(qp), EBUSY);
	fake::of(qp).busy = false;
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	ibv_wr_set_sge_list(ex, 1, &list[1]);
	EXPECT_EQ(ibv_wr_complete(ex), 0);
	EXPECT_NE(fake::of(qp).built.at(0).lkey, c.mr->lkey);
	/* One whose handle nobody finds is not made. */
	fake::of(d.context).first_handle = 1U << 24;
	const std::size_t before = fake::of(d.context).handles.size();
	errno = 0;
	EXPECT_FALSE(ibv_create_qp_ex(d.context, &attr));
	EXPECT_EQ(errno, ENOMEM);
	EXPECT_EQ(fake::of(d.context).handles.size(), before);
	EXPECT_EQ(ibv_destroy_qp(qp), 0);
}

TEST(Preload, QueueThatTheLibraryCannotPostToNeedsPinnedMemory)
{
	device d;
	ibv_srq_init_attr_ex tags = attributes_of_tags(d);
	{
		connection unpinned(d);

		errno = 0;
		EXPECT_FALSE(ibv_create_srq_ex(d.context, &tags));
		EXPECT_EQ(errno, EOPNOTSUPP);
		unpinned.expect_taken();
	}
	device e;

	tags.pd = &e.pd;
	ibv_srq *const s = ibv_create_srq_ex(e.context, &tags);
	EXPECT_TRUE(s);
	std::array<std::byte, 64> memory{};
	ibv_mr *const mr = ibv_reg_mr(&e.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE);
	EXPECT_FALSE(fake::of(mr).access & IBV_ACCESS_UNPINNED);
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
	EXPECT_EQ(ibv_destroy_srq(s), 0);
}

TEST(Preload, SharedReceiveQueueOfTheExtendedKindIsTaken)
{
	device d;
	connection c(d);
	ibv_srq_init_attr_ex attr{};
	ibv_sge s = c.sge();
	ibv_recv_wr wr{}, *bad;

	wr.sg_list = &s;
	wr.num_sge = 1;
	attr.pd = &d.pd;
	attr.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ;
	attr.cq = c.cq;
	for (const ibv_srq_type type : {IBV_SRQT_BASIC, IBV_SRQT_XRC}) {
		attr.srq_type = type;
		ibv_srq *const srq = ibv_create_srq_ex(d.context, &attr);
		ASSERT_TRUE(srq);
		ASSERT_EQ(ibv_post_srq_recv(srq, &wr, &bad), 0);
		EXPECT_EQ(fake::is_held(fake::of(srq).lkey), type == IBV_SRQT_BASIC);
		EXPECT_NE(fake::of(srq).lkey, c.mr->lkey);
		EXPECT_EQ(ibv_destroy_srq(srq), 0);
	}
	/* Its receives would complete where nobody translates them. */
	ibv_srq_init_attr plain{};
	ibv_srq *const srq = ibv_create_srq(&d.pd, &plain);
	ibv_cq_ex *const timed = make_cq_ex(d, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);
	ibv_qp_init_attr qp{};
	qp.send_cq = c.cq;
	qp.recv_cq = ibv_cq_ex_to_cq(timed);
	qp.srq = srq;
	qp.qp_type = IBV_QPT_RC;
	errno = 0;
	EXPECT_FALSE(ibv_create_qp(&d.pd, &qp));
	EXPECT_EQ(errno, EOPNOTSUPP);
	EXPECT_EQ(ibv_destroy_srq(srq), 0);
	EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(timed)), 0);
}

TEST(Preload, WindowOnPinnedMemoryIsBoundInOrderAndOnUnpinnedRefused)
{
	device d;
	connection c(d);
	std::array<std::byte, 64> memory{};
	ibv_mr *const pinned =
		ibv_reg_mr(&d.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	ibv_mw_bind bind{};
	ibv_mw mw{};

	EXPECT_FALSE(fake::of(pinned).access & IBV_ACCESS_UNPINNED);
	EXPECT_TRUE(fake::of(pinned).access & IBV_ACCESS_MW_BIND);
	mw.context = d.context;
	mw.pd = &d.pd;
	mw.rkey = 0x1234ff;
	mw.type = IBV_MW_TYPE_1;
	bind.wr_id = 9;
	bind.send_flags = IBV_SEND_SIGNALED;
	bind.bind_info = {pinned, reinterpret_cast<std::uintptr_t>(memory.data()), memory.size(), IBV_ACCESS_REMOTE_WRITE};
	ASSERT_EQ(ibv_bind_mw(c.qp, &mw, &bind), 0);
	EXPECT_EQ(mw.rkey, 0x123400U) << "the next of its 256";
	EXPECT_EQ(fake::of(c.qp).window, mw.rkey);
	EXPECT_EQ(c.next(), 9U);
	bind.bind_info.mr = c.mr;
	EXPECT_EQ(ibv_bind_mw(c.qp, &mw, &bind), EOPNOTSUPP);
	EXPECT_EQ(mw.rkey, 0x123400U);
	bind.bind_info.mr = nullptr;
	EXPECT_EQ(ibv_bind_mw(c.qp, &mw, &bind), EINVAL);
	bind.bind_info = {};
	mw.type = IBV_MW_TYPE_2;
	EXPECT_EQ(ibv_bind_mw(c.qp, &mw, &bind), EINVAL);
	EXPECT_EQ(ibv_dereg_mr(pinned), 0);
}

TEST(Preload, FlagsThatOnlyPinnedMemoryHasKeepItPinned)
{
	device d;
	std::array<std::byte, 64> memory{};
	const auto made = [&](unsigned access) {
		ibv_mr *const mr = ibv_reg_mr_iova2(&d.pd, memory.data(), memory.size(), 0, access | IBV_ACCESS_LOCAL_WRITE);
		const unsigned got = mr ? fake::of(mr).access : 0;

		if (mr) {
			EXPECT_EQ(ibv_dereg_mr(mr), 0);
		}
		return got & ~unsigned{IBV_ACCESS_LOCAL_WRITE};
	};
	constexpr unsigned unpinned = IBV_ACCESS_UNPINNED;

	EXPECT_EQ(made(0), unpinned);
	EXPECT_EQ(made(IBV_ACCESS_RELAXED_ORDERING), unpinned | IBV_ACCESS_RELAXED_ORDERING);
	EXPECT_EQ(made(IBV_ACCESS_HUGETLB), unpinned) << "a hint";
	EXPECT_EQ(made(IBV_ACCESS_ON_DEMAND), unpinned);
	EXPECT_EQ(made(IBV_ACCESS_MW_BIND), unsigned{IBV_ACCESS_MW_BIND});
	EXPECT_EQ(made(IBV_ACCESS_MW_BIND | IBV_ACCESS_ON_DEMAND), unsigned{IBV_ACCESS_MW_BIND | IBV_ACCESS_ON_DEMAND}) << "the device says whether it can";
	EXPECT_EQ(made(IBV_ACCESS_ZERO_BASED), unsigned{IBV_ACCESS_ZERO_BASED});
	EXPECT_EQ(made(1 << 8), 1U << 8) << "of a header to come";
	fake::of(d.context).refuses_unpinned = EOPNOTSUPP;
	EXPECT_EQ(made(IBV_ACCESS_HUGETLB), unsigned{IBV_ACCESS_HUGETLB}) << "as the program asked for it";
	fake::of(d.context).refuses_unpinned = EFAULT;
	errno = 0;
	EXPECT_EQ(made(0), 0U);
	EXPECT_EQ(errno, EFAULT);
}

/* Which without on-demand paging is no region at all. */
TEST(Preload, WholeAddressSpaceIsUnpinnedWithOnDemandPaging)
{
	device d;
	ibv_mr *mr = ibv_reg_mr(&d.pd, nullptr, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND);

	ASSERT_TRUE(mr);
	EXPECT_EQ(fake::of(mr).access, unsigned{IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_UNPINNED});
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
	mr = ibv_reg_mr(&d.pd, nullptr, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE);
	ASSERT_TRUE(mr) << "the kernel says what is wrong with it";
	EXPECT_EQ(fake::of(mr).access, unsigned{IBV_ACCESS_LOCAL_WRITE});
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

TEST(Preload, DeviceSaysThatItHasOnDemandPaging)
{
	device d;
	ibv_device_attr_ex attr{};

	ASSERT_EQ(ibv_query_device_ex(d.context, nullptr, &attr), 0);
	EXPECT_EQ(attr.odp_caps.general_caps, std::uint64_t{IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT});
	EXPECT_TRUE(attr.odp_caps.per_transport_caps.rc_odp_caps & IBV_ODP_SUPPORT_ATOMIC);
	EXPECT_FALSE(attr.odp_caps.per_transport_caps.uc_odp_caps & IBV_ODP_SUPPORT_READ);
	EXPECT_EQ(attr.xrc_odp_caps, 0U);
	/* A program of another header has a shorter structure. */
	ibv_device_attr_ex guarded;
	std::memset(&guarded, 0xa5, sizeof(guarded));
	ASSERT_EQ(verbs_get_ctx(d.context)->query_device_ex(d.context, nullptr, &guarded, offsetof(ibv_device_attr_ex, odp_caps)), 0);
	EXPECT_EQ(guarded.odp_caps.general_caps, 0xa5a5a5a5a5a5a5a5U);
	/* Not where memory stays pinned. */
	device e;
	ibv_srq_init_attr_ex tags = attributes_of_tags(e);
	ibv_srq *const made = ibv_create_srq_ex(e.context, &tags);
	ASSERT_TRUE(made);
	std::array<std::byte, 64> memory{};
	ibv_mr *const mr = ibv_reg_mr(&e.pd, memory.data(), memory.size(), 0);
	ASSERT_EQ(ibv_query_device_ex(e.context, nullptr, &attr), 0);
	EXPECT_EQ(attr.odp_caps.general_caps, 0U);
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
	EXPECT_EQ(ibv_destroy_srq(made), 0);
}

TEST(Preload, QueryTellsWhatTheProgramAskedFor)
{
	device d;
	connection c(d);
	ibv_qp_attr attr{}, got{};
	ibv_qp_init_attr init{};
	constexpr int mask = IBV_QP_ACCESS_FLAGS | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MAX_QP_RD_ATOMIC;

	attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
	ASSERT_EQ(ibv_modify_qp(c.qp, &attr, mask), 0);
	EXPECT_EQ(fake::of(c.qp).attr.qp_access_flags, unsigned{IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ});
	EXPECT_EQ(fake::of(c.qp).attr.max_dest_rd_atomic, 1);
	ASSERT_EQ(ibv_query_qp(c.qp, &got, mask, &init), 0);
	EXPECT_EQ(got.qp_access_flags, unsigned{IBV_ACCESS_REMOTE_WRITE});
	EXPECT_EQ(got.max_dest_rd_atomic, 0);
	EXPECT_EQ(got.max_rd_atomic, 0);
	attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	attr.max_dest_rd_atomic = 4;
	attr.max_rd_atomic = 1;
	ASSERT_EQ(ibv_modify_qp(c.qp, &attr, mask), 0);
	ASSERT_EQ(ibv_query_qp(c.qp, &got, mask, &init), 0);
	EXPECT_EQ(got.qp_access_flags, attr.qp_access_flags);
	EXPECT_EQ(got.max_dest_rd_atomic, 4);
	EXPECT_EQ(got.max_rd_atomic, 1);
}

/* Of another process: where it is in this one nobody knows, but it is no pinned memory. */
TEST(Preload, ImportedRegionIsWhatItIs)
{
	device d;
	ibv_context *const shared = ibv_import_device(d.context->cmd_fd);
	ASSERT_TRUE(shared);
	ibv_pd pd{};
	pd.context = shared;
	ibv_cq *const cq = ibv_create_cq(shared, 64, nullptr, nullptr, 0);
	ibv_qp_init_attr attr{};
	attr.send_cq = attr.recv_cq = cq;
	attr.qp_type = IBV_QPT_RC;
	attr.cap = {4, 4, 4, 4, 64};
	ibv_qp *const qp = ibv_create_qp(&pd, &attr);
	ASSERT_TRUE(qp);
	attr.qp_type = IBV_QPT_RAW_PACKET;
	ibv_qp *const left = ibv_create_qp(&pd, &attr);
	ASSERT_TRUE(left);
	for (const std::uint32_t handle : {5U, fake::foreign_pinned}) {
		ibv_mr *const mr = ibv_import_mr(&pd, handle);
		ASSERT_TRUE(mr);
		ibv_sge s{0, 64, mr->lkey};
		ibv_recv_wr wr{}, *bad;
		wr.sg_list = &s;
		wr.num_sge = 1;
		ASSERT_EQ(ibv_post_recv(qp, &wr, &bad), 0);
		EXPECT_EQ(fake::is_held(fake::of(qp).lkey), handle == 5);
		EXPECT_TRUE(handle == 5 || fake::of(qp).lkey == mr->lkey);
		/* Where the library does not post, there is no twin of it: it is nobody's local memory here. */
		ibv_send_wr send{}, *bad_send;
		send.sg_list = &s;
		send.num_sge = 1;
		EXPECT_EQ(ibv_post_send(left, &send, &bad_send), handle == 5 ? EOPNOTSUPP : 0);
		ibv_unimport_mr(mr);
	}
	EXPECT_EQ(ibv_destroy_qp(left), 0);
	EXPECT_EQ(ibv_destroy_qp(qp), 0);
	EXPECT_EQ(ibv_destroy_cq(cq), 0);
	EXPECT_EQ(ibv_close_device(shared), 0);
}

/* Each pointer that preload/functions calls hooked. */
TEST(Preload, EveryPointerIsReplacedAndGivenBack)
{
	ibv_context *const plain = fake_open(&fake_device);
	const ibv_context_ops theirs = plain->ops;
	const verbs_context extended = *verbs_get_ctx(plain);
	ibv_context *const context = ibv_open_device(&fake_device);
	const verbs_context *const v = verbs_get_ctx(context);

#define REPLACED(member) EXPECT_NE(context->ops.member, theirs.member) << #member
	REPLACED(post_send);
	REPLACED(post_recv);
	REPLACED(post_srq_recv);
	REPLACED(poll_cq);
	REPLACED(req_notify_cq);
	REPLACED(bind_mw);
#undef REPLACED
#define REPLACED(member) \
	EXPECT_TRUE(extended.member) << #member; \
	EXPECT_NE(v->member, extended.member) << #member
	REPLACED(create_qp_ex);
	REPLACED(create_cq_ex);
	REPLACED(create_srq_ex);
	REPLACED(create_wq);
	REPLACED(destroy_wq);
	REPLACED(open_xrcd);
	REPLACED(close_xrcd);
	REPLACED(open_qp);
	REPLACED(query_device_ex);
	REPLACED(alloc_parent_domain);
	REPLACED(reg_dm_mr);
	REPLACED(alloc_null_mr);
#undef REPLACED
	EXPECT_EQ(ibv_close_device(context), 0);
	EXPECT_EQ(ibv_close_device(plain), 0);
	/* One of an older libibverbs ends before some. */
	ibv_context *const old = fake_open(&fake_device);
	verbs_get_ctx(old)->sz = sizeof(verbs_context) - offsetof(verbs_context, create_cq_ex) - 1;
	npr::preload::adopt_opened(old);
	EXPECT_EQ(verbs_get_ctx(old)->create_cq_ex, extended.create_cq_ex);
	EXPECT_NE(verbs_get_ctx(old)->create_qp_ex, extended.create_qp_ex);
	EXPECT_EQ(ibv_close_device(old), 0);
}

/* --- direct verbs ------------------------------------------------------- */

/* In a scope of its own, where nothing of the program's is looked for. */
struct with_provider : ::testing::Test {
	with_provider()
	{
		static void *const library = dlopen(FAKE_MLX5, RTLD_NOW | RTLD_LOCAL);

		EXPECT_TRUE(library) << dlerror();
	}
};
struct DirectVerbs : with_provider {};
struct DirectVerbsHidden : with_provider {};

bool registers_unpinned(device &d)
{
	std::array<std::byte, 64> memory{};
	ibv_mr *const mr = ibv_reg_mr(&d.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE);
	const bool unpinned = fake::of(mr).access & IBV_ACCESS_UNPINNED;

	EXPECT_EQ(ibv_dereg_mr(mr), 0);
	return unpinned;
}

TEST_F(DirectVerbs, QueueThatTheProgramFillsIsNotTheLibrarys)
{
	device d;
	ibv_cq *const cq = d.make_cq();
	ibv_qp *const qp = d.make_qp(cq);
	mlx5dv_obj obj{};

	obj.qp.in = qp;
	obj.cq.in = cq;
	ASSERT_EQ(mlx5dv_init_obj(&obj, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ), 0);
	ibv_send_wr wr{}, *bad;
	wr.wr_id = 5;
	wr.opcode = IBV_WR_SEND;
	wr.send_flags = IBV_SEND_SIGNALED;
	ASSERT_EQ(ibv_post_send(qp, &wr, &bad), 0);
	EXPECT_EQ(fake::of(qp).wr_id, 5U);
	ibv_wc wc{};
	ASSERT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
	EXPECT_EQ(wc.wr_id, 5U);
	EXPECT_FALSE(registers_unpinned(d));
	EXPECT_EQ(ibv_destroy_qp(qp), 0);
	EXPECT_EQ(ibv_destroy_cq(cq), 0);
}

/* What the program has of them still works, by the provider. */
TEST_F(DirectVerbs, ExtendedObjectsOfAQueueThatIsLeftAreTheProviders)
{
	device d;
	ibv_cq_ex *const ex = make_cq_ex(d, IBV_WC_STANDARD_FLAGS);
	ibv_cq *const cq = ibv_cq_ex_to_cq(ex), *const receives = d.make_cq();
	ibv_qp_init_attr attr{};
	attr.send_cq = receives;
	attr.recv_cq = cq;
	attr.qp_type = IBV_QPT_RC;
	attr.cap = {4, 4, 4, 4, 64};
	ibv_qp *const qp = ibv_create_qp(&d.pd, &attr);
	ibv_qp_ex *const qp_ex = ibv_qp_to_qp_ex(qp);
	mlx5dv_obj obj{};

	ASSERT_TRUE(ex->start_poll && qp_ex);
	obj.cq.in = cq;
	ASSERT_EQ(mlx5dv_init_obj(&obj, MLX5DV_OBJ_CQ), 0);
	EXPECT_FALSE(ex->start_poll) << "the provider's, of which there is none here";
	ibv_recv_wr wr{}, *bad;
	wr.wr_id = 4;
	EXPECT_EQ(ibv_post_recv(qp, &wr, &bad), 0) << "whose completions are not the library's any more";
	ibv_wc wc{};
	ASSERT_EQ(ibv_poll_cq(cq, 1, &wc), 1);
	EXPECT_EQ(wc.wr_id, 4U);
	ibv_wr_start(qp_ex);
	ibv_wr_send(qp_ex);
	EXPECT_EQ(ibv_wr_complete(qp_ex), EINVAL);
	ibv_qp_attr reset{};
	obj.qp.in = qp;
	ASSERT_EQ(mlx5dv_init_obj(&obj, MLX5DV_OBJ_QP), 0);
	ASSERT_EQ(ibv_modify_qp(qp, &reset, IBV_QP_STATE), 0);
	EXPECT_EQ(ibv_post_recv(qp, &wr, &bad), 0);
	EXPECT_EQ(fake::of(qp).receives, 2U);
	EXPECT_EQ(ibv_destroy_qp(qp), 0);
	EXPECT_EQ(ibv_destroy_cq(cq), 0);
	EXPECT_EQ(ibv_destroy_cq(receives), 0);
}

TEST_F(DirectVerbs, ThatCameToNothingDecideNothing)
{
	device d;
	ibv_cq *const cq = d.make_cq();
	ibv_qp *const qp = d.make_qp(cq);
	mlx5dv_obj obj{};

	obj.qp.in = qp;
	obj.cq.in = cq;
	ASSERT_EQ(mlx5dv_init_obj(&obj, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ), 0);
	EXPECT_EQ(ibv_destroy_qp(qp), 0);
	EXPECT_EQ(ibv_destroy_cq(cq), 0);
	EXPECT_TRUE(registers_unpinned(d));
}

TEST_F(DirectVerbs, AreRefusedWhereMemoryIsUnpinned)
{
	device d;
	connection c(d);
	mlx5dv_obj obj{};

	obj.qp.in = c.qp;
	EXPECT_EQ(mlx5dv_init_obj(&obj, MLX5DV_OBJ_QP), EOPNOTSUPP);
	errno = 0;
	EXPECT_FALSE(mlx5dv_devx_obj_create(d.context, nullptr, 0, nullptr, 0));
	EXPECT_EQ(errno, EOPNOTSUPP);
	/* A domain is no queue. */
	EXPECT_EQ(mlx5dv_init_obj(&obj, MLX5DV_OBJ_PD), 0);
	ibv_qp_ex *const ex = ibv_qp_to_qp_ex(c.qp);
	errno = 0;
	EXPECT_FALSE(mlx5dv_qp_ex_from_ibv_qp_ex(ex)) << "it is no object of the provider's";
	EXPECT_EQ(errno, EOPNOTSUPP);
	c.expect_taken();
}

TEST_F(DirectVerbs, ProgramThatAsksForThemHasPinnedMemory)
{
	ASSERT_TRUE(mlx5dv_is_supported(&fake_device));
	device d;
	EXPECT_FALSE(registers_unpinned(d));
	ibv_context *const opened = mlx5dv_open_device(&fake_device, nullptr);
	ASSERT_TRUE(opened);
	ibv_cq *const cq = ibv_create_cq(opened, 64, nullptr, nullptr, 0);
	EXPECT_TRUE(find_cq(cq)) << "a device like another";
	EXPECT_EQ(ibv_destroy_cq(cq), 0);
	EXPECT_EQ(ibv_close_device(opened), 0);
}

/* With NPRDMA_DIRECT_VERBS=hidden in the environment. */
TEST_F(DirectVerbsHidden, ProgramIsToldThatThereAreNone)
{
	device d;
	connection c(d);
	mlx5dv_obj obj{};
	mlx5dv_context attr{};

	obj.qp.in = c.qp;
	EXPECT_FALSE(mlx5dv_is_supported(&fake_device));
	EXPECT_FALSE(mlx5dv_open_device(&fake_device, nullptr));
	EXPECT_EQ(mlx5dv_query_device(d.context, &attr), EOPNOTSUPP);
	EXPECT_EQ(mlx5dv_init_obj(&obj, MLX5DV_OBJ_QP), EOPNOTSUPP);
	EXPECT_FALSE(mlx5dv_devx_obj_create(d.context, nullptr, 0, nullptr, 0));
	EXPECT_TRUE(registers_unpinned(d));
	c.expect_taken();
}

/* With NPRDMA_UNPINNED=odp in the environment. */
TEST(PolicyOdp, OnlyWhatAsksForOnDemandPagingIsUnpinned)
{
	device d;
	std::array<std::byte, 64> memory{};

	EXPECT_FALSE(registers_unpinned(d));
	ibv_mr *mr = ibv_reg_mr(&d.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND);
	EXPECT_EQ(fake::of(mr).access, unsigned{IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_UNPINNED});
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
	mr = ibv_reg_mr(&d.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_UNPINNED);
	EXPECT_EQ(fake::of(mr).access, unsigned{IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_UNPINNED});
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

/* With NPRDMA_UNPINNED=none. */
TEST(PolicyNone, NothingIsUnpinned)
{
	device d;
	ibv_device_attr_ex attr{};

	EXPECT_FALSE(registers_unpinned(d));
	ASSERT_EQ(ibv_query_device_ex(d.context, nullptr, &attr), 0);
	EXPECT_EQ(attr.odp_caps.general_caps, 0U);
	/* But for what the program itself registers so, by libnprdma maybe, which holds it to be what it asked for. */
	std::array<std::byte, 64> memory{};
	ibv_mr *const mr = ibv_reg_mr(&d.pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_UNPINNED);
	EXPECT_EQ(fake::of(mr).access, unsigned{IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_UNPINNED});
	EXPECT_TRUE(npr::preload::find(d.context)->lib->is_local(mr->lkey));
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
	/* A peer's unpinned memory is in reach all the same. */
	ibv_cq *const cq = d.make_cq();
	EXPECT_TRUE(find_cq(cq));
	EXPECT_EQ(ibv_destroy_cq(cq), 0);
	/* Nor is anything else than without the library. */
	fake_fork_status = IBV_FORK_UNNEEDED;
	EXPECT_EQ(ibv_fork_init(), 0);
	EXPECT_EQ(fake_fork_status, IBV_FORK_ENABLED);
}

/* --- completion channels ------------------------------------------------ */

struct channel {
	explicit channel(device &d, bool blocks = false) : made(ibv_create_comp_channel(d.context))
	{
		if (!blocks) {
			EXPECT_EQ(fcntl(made->fd, F_SETFL, fcntl(made->fd, F_GETFL) | O_NONBLOCK), 0);
		}
	}
	[[nodiscard]] bool readable(int ms = 0) const
	{
		pollfd p{made->fd, POLLIN, 0};

		return poll(&p, 1, ms) == 1;
	}
	/* Of which CQ there is an event, or null. */
	[[nodiscard]] ibv_cq *event() const
	{
		ibv_cq *cq;
		void *context;

		if (!ibv_get_cq_event(made, &cq, &context))
			return cq;
		EXPECT_EQ(errno, EAGAIN);
		return nullptr;
	}
	ibv_comp_channel *made;
};

/* Programs hand the descriptor to poll(), epoll and libraries of events. */
TEST(PreloadChannel, DescriptorIsReadableForEveryEvent)
{
	device d;
	channel ch(d);
	ibv_cq *const cq = ibv_create_cq(d.context, 64, nullptr, ch.made, 0);
	ibv_cq *const silent = ibv_create_cq(d.context, 64, nullptr, ch.made, 0);
	ASSERT_TRUE(cq && silent);
	EXPECT_EQ(cq->channel, ch.made);
	npr_cq *const lib = find_cq(cq), *const other = find_cq(silent);
	ASSERT_TRUE(lib && other);

	EXPECT_FALSE(ch.readable());
	EXPECT_EQ(ch.event(), nullptr);
	/* Nobody has asked. */
	kick(lib);
	EXPECT_FALSE(ch.readable()) << "who waits in ibv_get_cq_event() after that would wait for ever";
	ASSERT_EQ(ibv_req_notify_cq(cq, 0), 0);
	EXPECT_FALSE(ch.readable()) << "the program polls after it has asked";
	kick(other);
	EXPECT_FALSE(ch.readable());
	/* What only the library can tell, */
	kick(lib);
	ASSERT_TRUE(ch.readable());
	EXPECT_EQ(ch.event(), cq);
	EXPECT_EQ(ch.event(), nullptr);
	/* and what the provider tells. */
	fake_event(real_channel(ch.made), silent);
	ASSERT_TRUE(ch.readable());
	EXPECT_EQ(ch.event(), silent);
	EXPECT_EQ(ch.event(), nullptr);
	EXPECT_FALSE(ch.readable());
	EXPECT_EQ(ibv_destroy_comp_channel(ch.made), EBUSY);
	std::atomic<bool> gone = false;
	std::thread destroyer([&] {
		EXPECT_EQ(ibv_destroy_cq(cq), 0);
		gone = true;
	});
	std::this_thread::sleep_for(std::chrono::milliseconds(20));
	EXPECT_FALSE(gone) << "who has the event may use the CQ until it acknowledges it";
	ibv_ack_cq_events(cq, 1);
	destroyer.join();
	fake_event(real_channel(ch.made), silent);
	EXPECT_TRUE(ch.readable()) << "after a destruction that was refused";
	EXPECT_EQ(ch.event(), silent);
	fake::of(silent).busy = true;
	EXPECT_EQ(ibv_destroy_cq(silent), EBUSY);
	EXPECT_EQ(silent->channel, ch.made);
	fake::of(silent).busy = false;
	EXPECT_EQ(ibv_destroy_cq(silent), 0);
	EXPECT_EQ(ibv_destroy_comp_channel(ch.made), 0);
}

TEST(PreloadChannel, WhoWaitsInAReadIsWokenByBoth)
{
	device d;
	channel ch(d, true);
	ibv_cq_ex *const ex = make_cq_ex(d, IBV_WC_STANDARD_FLAGS, ch.made);
	ibv_cq *const cq = ibv_cq_ex_to_cq(ex);
	npr_cq *const lib = find_cq(cq);
	ASSERT_TRUE(lib);
	EXPECT_EQ(ex->channel, ch.made);

	ASSERT_EQ(ibv_req_notify_cq(cq, 0), 0);
	for (unsigned k = 0; k < 4; ++k) {
		std::thread waker([&] {
			std::this_thread::sleep_for(std::chrono::milliseconds(5));
			if (k % 2)
				kick(lib);
			else
				fake_event(real_channel(ch.made), cq);
		});
		EXPECT_EQ(ch.event(), cq);
		waker.join();
	}
	ibv_ack_cq_events(cq, 2);
	EXPECT_EQ(ibv_destroy_cq(cq), 0);
	EXPECT_EQ(ibv_destroy_comp_channel(ch.made), 0);
}

/* The library's own thread uses what the program makes there. */
TEST(ThreadDomains, AreNone)
{
	device d;
	ibv_td td{};
	ibv_pd pd{};
	int context;
	ibv_parent_domain_init_attr attr{&pd, &td, IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
		[](ibv_pd *, void *, std::size_t, std::size_t, std::uint64_t) -> void * { return nullptr; }, nullptr, &context};

	EXPECT_EQ(ibv_alloc_parent_domain(d.context, &attr), &pd);
	EXPECT_EQ(attr.td, &td) << "the program's";
}

/* Ranges of regions are taken from children only where the kernel does not copy what is pinned. */
TEST(Fork, LeavesAllMemoryToChildren)
{
	EXPECT_EQ(ibv_fork_init(), 0);
	EXPECT_EQ(fake_fork_status, IBV_FORK_ENABLED);
	fake_fork_status = IBV_FORK_UNNEEDED;
	EXPECT_EQ(ibv_fork_init(), 0);
	EXPECT_EQ(fake_fork_status, IBV_FORK_UNNEEDED) << "the real one was called";
}

TEST(Rsockets, HaveOrderedWrites)
{
	constexpr int answer = 1 + 16 * 2 + 256 * 3;

	EXPECT_FALSE(npr::preload::ordered());
	EXPECT_EQ(rsocket(1, 2, 3), -1) << "nobody has one";
	EXPECT_FALSE(npr::preload::ordered());

	/* Only the plug-in sees it, and then all do. */
	void *const plug_in = dlopen(FAKE_RDMACM, RTLD_NOW | RTLD_LOCAL);
	ASSERT_TRUE(plug_in) << dlerror();
	auto *const open_socket = reinterpret_cast<int (*)()>(dlsym(plug_in, "open_socket"));
	ASSERT_TRUE(open_socket);
	EXPECT_EQ(open_socket(), answer);
	EXPECT_TRUE(npr::preload::ordered());
	ASSERT_TRUE(dlopen(FAKE_RDMACM, RTLD_NOW | RTLD_GLOBAL)) << dlerror();
	EXPECT_EQ(rsocket(1, 2, 3), answer);
}

} // namespace
