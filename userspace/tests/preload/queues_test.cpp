/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Queues: by which pointers programs name them, what is refused, and what is left to the provider. */
#include "fake_verbs.hpp"
#include "fixture.hpp"
#include "registry.hpp"

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fcntl.h>
#include <functional>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>
#include <string>
#include <unistd.h>

namespace {

/* What goes to standard error meanwhile. */
std::string said(const std::function<void()> &f)
{
	testing::internal::CaptureStderr();
	f();
	return testing::internal::GetCapturedStderr();
}

/* --- one queue pair by two pointers ------------------------------------- */

/* What ibv_qp_to_qp_ex() gives has a struct ibv_qp in it, which programs use as they use the other. */
TEST(QueuePair, IsItselfByItsExtendedObject)
{
	device d;
	connection c(d);
	ibv_qp_ex *const ex = ibv_qp_to_qp_ex(c.qp);
	ibv_qp *const base = &ex->qp_base, *const qp = c.qp;
	ibv_qp_attr attr{}, got{};
	ibv_qp_init_attr init{};

	ASSERT_NE(base, qp) << "an object of the library's";
	EXPECT_EQ(ibv_qp_to_qp_ex(base), ex);
	c.qp = base;
	EXPECT_EQ(c.send(5), 0);
	EXPECT_EQ(fake::of(qp).sends, 1U);
	EXPECT_TRUE(fake::is_held(fake::of(qp).lkey));
	EXPECT_EQ(c.next(), 5U);
	fake::of(qp).lkey = 0;
	EXPECT_EQ(c.receive(6), 0);
	EXPECT_EQ(fake::of(qp).receives, 1U);
	EXPECT_TRUE(fake::is_held(fake::of(qp).lkey));
	EXPECT_EQ(c.next(), 6U);
	attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
	EXPECT_EQ(ibv_modify_qp(base, &attr, IBV_QP_ACCESS_FLAGS), 0);
	EXPECT_EQ(fake::of(qp).attr.qp_access_flags, unsigned{IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ});
	EXPECT_EQ(ibv_query_qp(base, &got, IBV_QP_ACCESS_FLAGS, &init), 0);
	EXPECT_EQ(got.qp_access_flags, unsigned{IBV_ACCESS_REMOTE_WRITE});
	EXPECT_EQ(ibv_query_qp_data_in_order(base, IBV_WR_RDMA_WRITE, 0), 0);
	ibv_mw mw{};
	ibv_mw_bind bind{};
	mw.context = d.context;
	mw.pd = &d.pd;
	mw.rkey = 0x1200;
	mw.type = IBV_MW_TYPE_1;
	EXPECT_EQ(ibv_bind_mw(base, &mw, &bind), 0);
	EXPECT_EQ(fake::of(qp).window, 0x1201U);
	ibv_ece ece{};
	ece.options = 0xece;
	EXPECT_EQ(ibv_set_ece(base, &ece), 0);
	EXPECT_EQ(fake::of(qp).attr.qkey, 0xeceU) << "and not somewhere behind the library's object";
	ece = {};
	EXPECT_EQ(ibv_query_ece(base, &ece), 0);
	EXPECT_EQ(ece.options, 0xeceU);
	/* And when the library takes it anew. */
	attr.qp_state = IBV_QPS_RESET;
	ASSERT_EQ(ibv_modify_qp(base, &attr, IBV_QP_STATE), 0);
	EXPECT_EQ(ibv_qp_to_qp_ex(qp), ex);
	fake::of(qp).lkey = 0;
	EXPECT_EQ(c.send(7), 0);
	EXPECT_TRUE(fake::is_held(fake::of(qp).lkey));
	EXPECT_EQ(c.next(), 7U);
	fake::of(qp).busy = true;
	EXPECT_EQ(ibv_destroy_qp(base), EBUSY);
	fake::of(qp).busy = false;
	EXPECT_EQ(c.send(8), 0);
	EXPECT_EQ(c.next(), 8U);
	/* connection destroys it by that pointer. */
}

/* --- destruction -------------------------------------------------------- */

TEST(QueuePair, InAMulticastGroupIsBusyAndGoesOn)
{
	device d;
	connection c(d);
	ibv_qp *const ud = d.make_qp(c.cq, IBV_QPT_UD);
	const union ibv_gid group{}, another{{1}};
	ibv_sge s = c.sge();
	ibv_recv_wr wr{}, *bad;
	ibv_qp_attr attr{};

	attr.qp_state = IBV_QPS_RTS;
	ASSERT_EQ(ibv_modify_qp(ud, &attr, IBV_QP_STATE), 0);
	ASSERT_EQ(ibv_attach_mcast(ud, &group, 1), 0);
	ASSERT_EQ(ibv_attach_mcast(ud, &group, 1), 0) << "which is the same";
	ASSERT_EQ(ibv_attach_mcast(ud, &another, 1), 0);
	wr.wr_id = 9;
	wr.sg_list = &s;
	wr.num_sge = 1;
	ASSERT_EQ(ibv_post_recv(ud, &wr, &bad), 0);
	for (unsigned left = 2; left; --left) {
		EXPECT_EQ(ibv_destroy_qp(ud), EBUSY);
		EXPECT_EQ(ud->state, IBV_QPS_RTS);
		EXPECT_EQ(fake::holds(d.context), 1U) << "of the receive, which is still to come";
		EXPECT_EQ(ibv_detach_mcast(ud, left == 2 ? &group : &another, 1), 0);
	}
	EXPECT_EQ(ibv_detach_mcast(ud, &group, 1), EINVAL) << "the provider's answer";
	EXPECT_EQ(c.next(), 9U);
	ASSERT_EQ(ibv_post_recv(ud, &wr, &bad), 0);
	EXPECT_EQ(ibv_destroy_qp(ud), 0);
	EXPECT_EQ(fake::holds(d.context), 0U);
}

/* --- what is posted ----------------------------------------------------- */

TEST(Posts, OfNothingAreDone)
{
	device d;
	connection c(d);
	ibv_qp *const raw = d.make_qp(c.cq, IBV_QPT_RAW_PACKET);
	ibv_srq_init_attr attr{};
	ibv_srq *const srq = ibv_create_srq(&d.pd, &attr);
	ibv_send_wr *bad;
	ibv_recv_wr *bad_recv;

	for (ibv_qp *const qp : {c.qp, raw}) {
		EXPECT_EQ(ibv_post_send(qp, nullptr, &bad), 0);
		EXPECT_EQ(ibv_post_recv(qp, nullptr, &bad_recv), 0);
		EXPECT_EQ(fake::of(qp).sends + fake::of(qp).receives, 0U);
	}
	EXPECT_EQ(ibv_post_srq_recv(srq, nullptr, &bad_recv), 0);
	c.expect_taken();
	EXPECT_EQ(ibv_destroy_qp(raw), 0);
	EXPECT_EQ(ibv_destroy_srq(srq), 0);
}

TEST(Posts, OfWhatTheLibraryHasNotAreToldOfOnce)
{
	device d;
	connection c(d);
	std::array<ibv_send_wr, 2> wr{};
	ibv_send_wr *bad = nullptr;
	ibv_sge s = c.sge();

	wr[0].opcode = IBV_WR_SEND;
	wr[0].next = &wr[1];
	wr[1].opcode = IBV_WR_ATOMIC_WRITE;
	wr[0].sg_list = wr[1].sg_list = &s;
	wr[0].num_sge = wr[1].num_sge = 1;
	const auto refused = [&] {
		EXPECT_EQ(ibv_post_send(c.qp, wr.data(), &bad), EINVAL);
		EXPECT_EQ(bad, &wr[1]);
	};
	EXPECT_EQ(said(refused), "libnprdma-preload: fake0: a work request of opcode 15 (TSO, an atomic WRITE, or one of a newer libibverbs) is "
		  "refused: without this library the provider decides\n");
	EXPECT_EQ(said(refused), "");
	/* What is wrong with others the program knows. */
	wr[1].opcode = IBV_WR_SEND;
	wr[1].num_sge = 100;
	device e;
	connection o(e);
	EXPECT_EQ(said([&] { EXPECT_EQ(ibv_post_send(o.qp, &wr[1], &bad), EINVAL); }), "");
	EXPECT_EQ(fake::of(c.qp).sends, 2U);
}

TEST(CompletionQueue, OfNoEntriesIsNone)
{
	device d;
	ibv_cq_init_attr_ex attr{};

	attr.wc_flags = IBV_WC_STANDARD_FLAGS;
	errno = 0;
	EXPECT_FALSE(d.make_cq(0));
	EXPECT_EQ(errno, EINVAL);
	errno = 0;
	EXPECT_EQ(said([&] { EXPECT_FALSE(ibv_create_cq_ex(d.context, &attr)); }), "");
	EXPECT_EQ(errno, EINVAL);
}

/* --- what is left to the provider --------------------------------------- */

/* Also where memory is unpinned already. */
TEST(ReceiveWorkQueue, HasPinnedMemory)
{
	device d;
	connection c(d);
	ibv_wq_init_attr attr{};
	ibv_wq *wq = nullptr;
	ibv_sge s[2] = {c.sge(), c.sge()};
	ibv_recv_wr wr{}, *bad;

	attr.cq = c.cq;
	EXPECT_EQ(said([&] { wq = ibv_create_wq(d.context, &attr); }),
		  "libnprdma-preload: fake0: a receive work queue is left to the provider: memory that it uses is pinned, and unpinned memory of a "
		  "peer is out of its reach\n");
	ASSERT_TRUE(wq);
	s[1].lkey = 7; /* somebody else's */
	wr.wr_id = 4;
	wr.sg_list = s;
	wr.num_sge = 2;
	ASSERT_EQ(ibv_post_wq_recv(wq, &wr, &bad), 0);
	ASSERT_EQ(fake_wq_keys.size(), 2U);
	EXPECT_NE(fake_wq_keys[0], c.mr->lkey);
	EXPECT_FALSE(fake::is_held(fake_wq_keys[0]));
	EXPECT_EQ(fake_wq_keys[1], 7U);
	EXPECT_EQ(s[0].lkey, c.mr->lkey) << "the program's list is the program's";
	EXPECT_EQ(fake::of(d.context).pinned, 1U);
	EXPECT_EQ(c.next(), 4U) << "on a queue of the library's";
	c.expect_taken();
	fake_stays = wq->handle;
	EXPECT_EQ(ibv_destroy_wq(wq), EBUSY);
	fake_stays = UINT32_MAX;
	ASSERT_EQ(ibv_post_wq_recv(wq, &wr, &bad), 0);
	EXPECT_NE(fake_wq_keys[0], c.mr->lkey);
	EXPECT_EQ(c.next(), 4U);
	const std::uint32_t handle = wq->handle;
	EXPECT_TRUE(npr::preload::find(d.context)->wqs.find_any(handle));
	EXPECT_EQ(ibv_destroy_wq(wq), 0);
	EXPECT_FALSE(npr::preload::find(d.context)->wqs.find_any(handle));
	/* One whose handle nobody finds is not made. */
	fake::of(d.context).first_handle = 1U << 24;
	errno = 0;
	EXPECT_FALSE(ibv_create_wq(d.context, &attr));
	EXPECT_EQ(errno, ENOMEM);
	fake::of(d.context).first_handle = 0;
}

/* The program has the provider's functions, which it would not be given by another name. */
TEST(QueuePair, ForOperationsThatTheLibraryHasNotIsLeftToTheProvider)
{
	device d;
	connection c(d);
	ibv_qp_init_attr_ex attr{};

	attr.send_cq = attr.recv_cq = c.cq;
	attr.pd = &d.pd;
	attr.cap = {4, 4, 4, 4, 64};
	attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	std::string lines;
	for (const ibv_qp_type type : {IBV_QPT_RC, IBV_QPT_UD}) {
		attr.qp_type = type;
		/* The last are of headers to come. */
		for (unsigned bit = 0; bit < 64; ++bit) {
			attr.send_ops_flags = 1ULL << bit | IBV_QP_EX_WITH_SEND;
			ibv_qp *qp = nullptr;
			lines += said([&] { qp = ibv_create_qp_ex(d.context, &attr); });
			ASSERT_TRUE(qp) << bit;
			ibv_qp_ex *const ex = ibv_qp_to_qp_ex(qp);
			ASSERT_TRUE(ex);
			EXPECT_EQ(&ex->qp_base == qp, bit > 9) << "the provider's";
			EXPECT_EQ(npr::preload::find(qp) == nullptr, bit > 9);
			if (bit <= 9) {
				EXPECT_TRUE(ex->wr_rdma_write && ex->wr_rdma_write_imm && ex->wr_send && ex->wr_send_imm &&
					    ex->wr_rdma_read && ex->wr_atomic_cmp_swp && ex->wr_atomic_fetch_add &&
					    ex->wr_local_inv && ex->wr_bind_mw && ex->wr_send_inv);
			} else {
				const ibv_sge s = c.sge();

				ibv_wr_start(ex);
				ibv_wr_send(ex);
				ibv_wr_set_sge(ex, s.lkey, s.addr, s.length);
				EXPECT_EQ(ibv_wr_complete(ex), 0);
				EXPECT_NE(fake::of(qp).built.at(0).lkey, s.lkey) << "a twin's";
			}
			EXPECT_EQ(ibv_destroy_qp(qp), 0);
		}
	}
	EXPECT_EQ(lines, "libnprdma-preload: fake0: a queue pair for operations of ibv_wr_*() that the library does not have is left to the "
		  "provider: memory that it uses is pinned, and unpinned memory of a peer is out of its reach\n");
	EXPECT_EQ(fake::of(d.context).pinned, 1U);
}

/* --- open() ------------------------------------------------------------- */

TEST(Open, OfNoPathIsAnError)
{
	char *volatile nowhere = reinterpret_cast<char *>(8);

#ifdef __SANITIZE_THREAD__
	GTEST_SKIP() << "the thread sanitizer reads the path before the kernel does";
#endif
	for (const auto f : {open, open64}) {
		errno = 0;
		EXPECT_EQ(f(nowhere, O_RDONLY), -1);
		EXPECT_EQ(errno, EFAULT);
		EXPECT_EQ(f(nowhere, O_TMPFILE), -1) << "which the kernel refuses before it looks";
		EXPECT_EQ(errno, EINVAL);
	}
}

} // namespace
