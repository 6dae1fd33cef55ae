/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Which regions the preload library leaves unpinned, what it says of the others, and regions that are registered anew. */
#include "fake_verbs.hpp"
#include "fixture.hpp"
#include "registry.hpp"

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

namespace {

constexpr int local = IBV_ACCESS_LOCAL_WRITE, remote = local | IBV_ACCESS_REMOTE_WRITE;

/* What goes to standard error meanwhile. */
std::string said(const std::function<void()> &f)
{
	testing::internal::CaptureStderr();
	f();
	return testing::internal::GetCapturedStderr();
}

/* By its own flag, as by on-demand paging: then the library has to know the region, or its buffers are no local memory. */
TEST(Preload, RegionThatTheProgramItselfLeavesUnpinnedIsALocalBuffer)
{
	device d;
	connection c(d);
	std::array<std::byte, 64> memory{};
	const auto made = [&](device &of, unsigned access) {
		return ibv_reg_mr(&of.pd, memory.data(), memory.size(), static_cast<int>(access | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_UNPINNED));
	};

	testing::internal::CaptureStderr();
	ibv_mr *const mr = made(d, 0);
	ASSERT_TRUE(mr);
	EXPECT_EQ(fake::of(mr).access, unsigned{IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_UNPINNED});
	ibv_sge s{reinterpret_cast<std::uintptr_t>(memory.data()), memory.size(), mr->lkey};
	ibv_recv_wr wr{}, *bad;
	wr.sg_list = &s;
	wr.num_sge = 1;
	ASSERT_EQ(ibv_post_recv(c.qp, &wr, &bad), 0);
	EXPECT_TRUE(fake::is_held(fake::of(c.qp).lkey));
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
	EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "nothing stays pinned";

	/* It is never pinned instead: the program would use it as what it is not. */
	const auto refused = [&](device &of, unsigned access) {
		testing::internal::CaptureStderr();
		errno = 0;
		EXPECT_FALSE(made(of, access));
		EXPECT_EQ(errno, EOPNOTSUPP);
		return testing::internal::GetCapturedStderr();
	};
	EXPECT_EQ(refused(d, IBV_ACCESS_MW_BIND), "libnprdma-preload: fake0: a region that the program registers with IBV_ACCESS_UNPINNED "
		  "is refused, because memory windows may be bound to it\n");
	EXPECT_EQ(refused(d, IBV_ACCESS_MW_BIND), "") << "said before";
	EXPECT_EQ(fake::of(d.context).pinned, 0U);
	device e;
	ibv_srq_init_attr_ex tags = attributes_of_tags(e);
	ibv_srq *const srq = ibv_create_srq_ex(e.context, &tags);
	ASSERT_TRUE(srq);
	(void)refused(e, 0);
	EXPECT_EQ(fake::of(e.context).pinned, 0U);
	EXPECT_EQ(ibv_destroy_srq(srq), 0);
}

/* --- registered anew ---------------------------------------------------- */

/* What the program has of a region, and what of it is known by the library. */
struct known {
	explicit known(const ibv_mr *m) : mr(*m), regions(fake::of(m->context).handles.size()) {}

	/* Of these nothing has changed. */
	[[nodiscard]] bool still(const ibv_mr *m) const
	{
		npr::preload::device *const d = npr::preload::find(m->context);

		return m->lkey == mr.lkey && m->rkey == mr.rkey && m->handle == mr.handle && m->pd == mr.pd && m->addr == mr.addr &&
			m->length == mr.length && d->regions.has(m->lkey) && d->lib->is_local(m->lkey) &&
			fake::of(m->context).handles.size() == regions;
	}

	const ibv_mr mr;
	const std::size_t regions;
};

/* The kernel refuses it of what is not pinned, so there is another region in its place. */
TEST(Reregistration, OfUnpinnedMemoryChangesWhatTheProgramNames)
{
	device d;
	connection c(d);
	ibv_pd other{};
	std::array<std::byte, 64> memory{};
	ibv_mr *const mr = c.mr;

	other.context = d.context;
	EXPECT_EQ(said([&] {
		for (const int flags : {IBV_REREG_MR_CHANGE_ACCESS | 0, IBV_REREG_MR_CHANGE_PD | 0, IBV_REREG_MR_CHANGE_TRANSLATION | 0}) {
			const known before(mr);

			/* What no flag names is not looked at. */
			ASSERT_EQ(ibv_rereg_mr(mr, flags, &other, memory.data(), memory.size(),
					       flags & IBV_REREG_MR_CHANGE_ACCESS ? IBV_ACCESS_RELAXED_ORDERING : 0), 0) << flags;
			const unsigned access = IBV_ACCESS_RELAXED_ORDERING | IBV_ACCESS_UNPINNED;
			EXPECT_EQ(fake_registered.access, access);
			EXPECT_EQ(fake_registered.pd, flags == IBV_REREG_MR_CHANGE_ACCESS ? &d.pd : &other);
			EXPECT_EQ(mr->pd, fake_registered.pd);
			void *const addr = flags == IBV_REREG_MR_CHANGE_TRANSLATION ? memory.data() : c.memory.data();
			EXPECT_EQ(mr->addr, addr);
			EXPECT_EQ(fake_registered.iova, reinterpret_cast<std::uintptr_t>(addr));
			EXPECT_EQ(mr->lkey, fake_registered.lkey) << "by which the program posts";
			EXPECT_NE(mr->lkey, before.mr.lkey);
			EXPECT_EQ(fake::of(d.context).handles.size(), before.regions) << "the old one is gone";
			EXPECT_FALSE(npr::preload::find(d.context)->regions.has(before.mr.lkey));
			EXPECT_FALSE(npr::preload::find(d.context)->lib->is_local(before.mr.lkey));
			if (flags != IBV_REREG_MR_CHANGE_TRANSLATION)
				c.expect_taken();
			else
				EXPECT_EQ(c.send(78), EFAULT) << "its buffer is not in the region any more";
		}
	}), "") << "nobody else has its keys";
}

TEST(Reregistration, OfAnAddressThatIsNotTheCpusKeepsItUntilTheProgramNamesAnother)
{
	device d;
	std::array<std::byte, 64> memory{};
	ibv_mr *const mr = ibv_reg_mr_iova2(&d.pd, memory.data(), 32, 0x7000, unsigned{local});
	const auto offset = [&] { return npr::preload::find(d.context)->lib->regions.find(mr->lkey).offset; };

	ASSERT_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, 0), 0);
	EXPECT_EQ(fake_registered.iova, 0x7000U);
	EXPECT_EQ(offset(), reinterpret_cast<std::uintptr_t>(memory.data()) - 0x7000);
	ASSERT_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, &memory[32], 32, 0), 0);
	EXPECT_EQ(offset(), 0U);
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

/* A whole address space too, as long as it is one of on-demand paging. */
TEST(Reregistration, OfOnDemandPagingIsUnpinnedAgain)
{
	device d;
	ibv_mr *const mr = ibv_reg_mr(&d.pd, nullptr, SIZE_MAX, local | IBV_ACCESS_ON_DEMAND);

	ASSERT_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, IBV_ACCESS_ON_DEMAND), 0);
	EXPECT_EQ(fake_registered.access, unsigned{IBV_ACCESS_UNPINNED});
	EXPECT_EQ(mr->length, SIZE_MAX);
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

TEST(Reregistration, WithFlagsOfPinnedMemoryPinsItAndSaysSo)
{
	device d;
	connection c(d);
	ibv_mr *const mr = c.mr;

	EXPECT_EQ(said([&] { EXPECT_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, local | IBV_ACCESS_MW_BIND), 0); }),
		  "libnprdma-preload: fake0: a region of 64 bytes stays pinned, because memory windows may be bound to it: others may follow\n");
	EXPECT_EQ(fake_registered.access, unsigned{local | IBV_ACCESS_MW_BIND});
	EXPECT_FALSE(npr::preload::find(d.context)->regions.has(mr->lkey));
	ASSERT_EQ(c.receive(3), 0);
	EXPECT_EQ(fake::of(c.qp).lkey, mr->lkey);
	EXPECT_EQ(c.next(), 3U);
	/* Now it is the kernel's to change. */
	const known before(mr);
	EXPECT_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, local), 0);
	EXPECT_EQ(mr->lkey, before.mr.lkey);
	/* Not to what is not pinned. */
	EXPECT_EQ(said([&] {
		EXPECT_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, local | IBV_ACCESS_UNPINNED), IBV_REREG_MR_ERR_CMD);
		EXPECT_EQ(errno, EOPNOTSUPP);
	}), "libnprdma-preload: fake0: a pinned region is to be registered anew as one that is not: refused\n");
}

/* What goes wrong is told as by ibv_rereg_mr(3), and the region is as before. */
TEST(Reregistration, ThatFailsChangesNothing)
{
	device d;
	connection c(d);
	ibv_pd foreign{};
	ibv_context *const other = ibv_open_device(&fake_device);
	ibv_mr *const mr = c.mr;
	const known before(mr);
	const auto fails = [&](int rc, int error, int flags, ibv_pd *pd, void *addr, std::size_t length, int access) {
		errno = 0;
		EXPECT_EQ(ibv_rereg_mr(mr, flags, pd, addr, length, access), rc);
		EXPECT_EQ(errno, error);
		EXPECT_TRUE(before.still(mr));
		c.expect_taken();
	};

	foreign.context = other;
	fails(IBV_REREG_MR_ERR_INPUT, EINVAL, 1 << 7, nullptr, nullptr, 0, 0);
	fails(IBV_REREG_MR_ERR_INPUT, EINVAL, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, nullptr, 8, 0);
	fails(IBV_REREG_MR_ERR_INPUT, EINVAL, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, c.memory.data(), 0, 0);
	fails(IBV_REREG_MR_ERR_INPUT, EINVAL, IBV_REREG_MR_CHANGE_PD, &d.pd, nullptr, 0, local);
	fails(IBV_REREG_MR_ERR_CMD, EINVAL, 0, nullptr, nullptr, 0, 0);
	fails(IBV_REREG_MR_ERR_CMD, EINVAL, IBV_REREG_MR_CHANGE_PD, &foreign, nullptr, 0, 0);
	fake::of(d.context).refuses_unpinned = ENOMEM;
	fails(IBV_REREG_MR_ERR_CMD, ENOMEM, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, 0);
	fake::of(d.context).refuses_unpinned = 0;
	/* The old one cannot go, so the new one does. */
	fake_stays = mr->handle;
	fails(IBV_REREG_MR_ERR_CMD, EBUSY, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, 0);
	fake_stays = UINT32_MAX;
	EXPECT_EQ(ibv_close_device(other), 0);
}

/* Peers have the old key, and nobody tells them that there is another: not unless they have to be told another address. */
TEST(Reregistration, OfWhatPeersUseIsRefusedWhereTheyWouldNotHearOfIt)
{
	device d;
	std::array<std::byte, 64> memory{};
	ibv_pd other{};
	ibv_mr *const mr = ibv_reg_mr(&d.pd, memory.data(), memory.size(), local);
	other.context = d.context;

	const std::string line = "libnprdma-preload: fake0: a region that peers may use is to be registered anew at the same address, and is "
				 "not pinned: its key would be another, and so it is refused\n";
	const auto refused = [&](int flags, int access) {
		const known before(mr);

		EXPECT_EQ(ibv_rereg_mr(mr, flags, &other, nullptr, 0, access), IBV_REREG_MR_ERR_CMD);
		EXPECT_EQ(errno, EOPNOTSUPP);
		EXPECT_TRUE(before.still(mr));
	};
	EXPECT_EQ(said([&] { refused(IBV_REREG_MR_CHANGE_ACCESS, remote); }), line);
	ASSERT_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS | IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, memory.data(), 32, remote), 0);
	EXPECT_EQ(said([&] { refused(IBV_REREG_MR_CHANGE_PD, 0); }), "") << "said before";
	const known before(mr);
	ASSERT_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, local), 0) << "who uses it still is to fail";
	EXPECT_NE(mr->rkey, before.mr.rkey);
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

TEST(Reregistration, EndsTheTwinOfTheRegion)
{
	device d;
	connection c(d);
	ibv_qp *const raw = d.make_qp(c.cq, IBV_QPT_RAW_PACKET);
	ibv_sge s = c.sge();
	ibv_recv_wr wr{}, *bad;

	wr.sg_list = &s;
	wr.num_sge = 1;
	const std::size_t before = fake::of(d.context).handles.size();
	ASSERT_EQ(ibv_post_recv(raw, &wr, &bad), 0);
	const std::uint32_t twin = fake::of(raw).lkey;
	ASSERT_EQ(fake::of(d.context).handles.size(), before + 1);
	ASSERT_EQ(ibv_rereg_mr(c.mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, local | IBV_ACCESS_RELAXED_ORDERING), 0);
	EXPECT_EQ(fake::of(d.context).handles.size(), before);
	s.lkey = c.mr->lkey;
	ASSERT_EQ(ibv_post_recv(raw, &wr, &bad), 0);
	EXPECT_NE(fake::of(raw).lkey, c.mr->lkey);
	EXPECT_NE(fake::of(raw).lkey, twin);
	EXPECT_EQ(fake_registered.pd, c.mr->pd);
	EXPECT_EQ(fake_registered.access, unsigned{local}) << "a twin of the new one";
	fake::of(c.cq).completions.clear();
	EXPECT_EQ(ibv_destroy_qp(raw), 0);
}

/* As the kernel says, whose regions such a program knows. libnprdma may know it by its key. */
TEST(Reregistration, OfWhatTheProgramItselfLeavesUnpinnedIsRefused)
{
	device d;
	std::array<std::byte, 64> memory{};
	ibv_mr *const mr = ibv_reg_mr(&d.pd, memory.data(), memory.size(), local | IBV_ACCESS_UNPINNED);
	const known before(mr);

	EXPECT_EQ(said([&] {
		EXPECT_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, 0), IBV_REREG_MR_ERR_CMD);
		EXPECT_EQ(errno, EOPNOTSUPP);
	}), "libnprdma-preload: fake0: a region of the program's own IBV_ACCESS_UNPINNED is to be registered anew: refused\n");
	EXPECT_TRUE(before.still(mr));
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

TEST(Reregistration, OfAnotherProcessesRegionIsRefused)
{
	device d;
	ibv_mr *const mr = ibv_import_mr(&d.pd, 5);
	const std::uint32_t lkey = mr->lkey;

	EXPECT_EQ(said([&] {
		EXPECT_EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, 0), IBV_REREG_MR_ERR_CMD);
		EXPECT_EQ(errno, EOPNOTSUPP);
	}), "libnprdma-preload: fake0: an imported region that is not pinned is to be registered anew: refused\n");
	EXPECT_EQ(mr->lkey, lkey);
	EXPECT_TRUE(npr::preload::find(d.context)->regions.has(lkey));
	ibv_unimport_mr(mr);
}

/* --- twins -------------------------------------------------------------- */

/* The program only gets an error of ibv_post_send(), and would not know which memory it is about. */
TEST(Twins, ThatCannotBeMadeAreToldOfOnce)
{
	for (const bool whole : {false, true}) {
		device d;
		ibv_cq *const cq = d.make_cq();
		ibv_qp *const raw = d.make_qp(cq, IBV_QPT_RAW_PACKET);
		std::array<std::byte, 64> memory{};
		ibv_mr *const mr = whole ? ibv_reg_mr(&d.pd, nullptr, SIZE_MAX, local | IBV_ACCESS_ON_DEMAND) :
					   ibv_reg_mr(&d.pd, memory.data(), memory.size(), local);
		ibv_sge s{reinterpret_cast<std::uintptr_t>(memory.data()), memory.size(), mr->lkey};
		ibv_send_wr wr{}, *bad = nullptr;

		wr.opcode = IBV_WR_SEND;
		wr.sg_list = &s;
		wr.num_sge = 1;
		fake::of(d.context).refuses_pinned = ENOMEM;
		const auto refused = [&] {
			EXPECT_EQ(ibv_post_send(raw, &wr, &bad), whole ? EOPNOTSUPP : ENOMEM);
			EXPECT_EQ(bad, &wr);
		};
		EXPECT_EQ(said(refused), whole ?
			"libnprdma-preload: fake0: a queue that needs pinned memory uses the region of the whole address space, which cannot be "
			"pinned: refused\n" :
			"libnprdma-preload: fake0: a region of 64 bytes cannot be pinned as well for a queue that needs it: Cannot allocate "
			"memory. RLIMIT_MEMLOCK may be too low: what the queue posts of it is refused\n");
		EXPECT_EQ(said(refused), "");
		EXPECT_EQ(fake::of(raw).sends, 0U);
		fake::of(d.context).refuses_pinned = 0;
		EXPECT_EQ(ibv_dereg_mr(mr), 0);
		EXPECT_EQ(ibv_destroy_qp(raw), 0);
		EXPECT_EQ(ibv_destroy_cq(cq), 0);
	}
}

/* --- the report --------------------------------------------------------- */

/* What a child says that runs @f and ends by exit(). */
std::string of_child(const std::function<void()> &f)
{
	std::array<int, 2> ends{};
	std::string text;

	EXPECT_EQ(pipe(ends.data()), 0);
	const pid_t child = fork();
	EXPECT_GE(child, 0);
	if (!child) {
		alarm(60);
		(void)dup2(ends[1], STDERR_FILENO);
		close(ends[0]);
		close(ends[1]);
		f();
		/* With the destructors, and none of gtest's output. */
		std::exit(0);
	}
	close(ends[1]);
	for (char c; read(ends[0], &c, 1) == 1;)
		text += c;
	close(ends[0]);
	int status = -1;
	EXPECT_EQ(waitpid(child, &status, 0), child);
	EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status << text;
	const std::string pid = "(" + std::to_string(child) + ")";
	if (const auto at = text.find(pid); at != text.npos)
		text.replace(at, pid.size(), "(child)");
	return text;
}

/* With NPRDMA_REPORT=1 in the environment. */
TEST(Report, IsOfWhatTheProcessItselfHasRegistered)
{
	std::array<std::byte, 4096> memory{};
	device parents;
	ibv_mr *const mr = ibv_reg_mr(&parents.pd, memory.data(), memory.size(), local);

	EXPECT_EQ(of_child([] {}), "") << "which has opened no device";
	EXPECT_EQ(of_child([&] {
		device d;
		EXPECT_EQ(ibv_dereg_mr(ibv_reg_mr(&d.pd, memory.data(), 1024, local)), 0);
	}), "libnprdma-preload: preload_test (child) registered on fake0:\n"
	    "  1 regions, 1.0 KiB in all: unpinned\n");
	EXPECT_EQ(ibv_dereg_mr(mr), 0);
}

TEST(Report, HasAllThatStaysPinnedAndWhy)
{
	std::array<std::byte, 4096> memory{};

	EXPECT_EQ(of_child([&] {
		device d;
		ibv_dm dm{};
		dm.context = d.context;
		EXPECT_EQ(ibv_dereg_mr(ibv_reg_dm_mr(&d.pd, &dm, 0, 512, IBV_ACCESS_ZERO_BASED)), 0);
		EXPECT_EQ(ibv_dereg_mr(ibv_reg_dmabuf_mr(&d.pd, 0, 2048, 0, 3, local)), 0);
		EXPECT_EQ(ibv_dereg_mr(ibv_alloc_null_mr(&d.pd)), 0);
		ibv_unimport_mr(ibv_import_mr(&d.pd, fake::foreign_pinned));
	}), "libnprdma-preload: preload_test (child) registered on fake0:\n"
	    "  1 regions, 512 bytes in all: pinned: it is memory of the device\n"
	    "  1 regions, 2.0 KiB in all: pinned: it is a dmabuf\n"
	    "  1 regions, 0 bytes in all: pinned: it has no memory (ibv_alloc_null_mr())\n"
	    "  1 regions, 0 bytes in all: pinned: another process has pinned it\n");
	EXPECT_EQ(of_child([&] {
		fake_without_nprdma = true;
		device d;
		EXPECT_EQ(ibv_dereg_mr(ibv_reg_mr(&d.pd, memory.data(), memory.size(), local)), 0);
		EXPECT_EQ(ibv_dereg_mr(ibv_reg_dmabuf_mr(&d.pd, 0, 2048, 0, 3, local)), 0);
	}), "libnprdma-preload: fake0: no unpinned regions (Operation not supported): left as it is\n"
	    "libnprdma-preload: preload_test (child) registered on fake0:\n"
	    "  2 regions, 6.0 KiB in all: pinned: the device was left as it is\n");
}

} // namespace
