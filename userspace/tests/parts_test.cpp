/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Keys of a whole address space of the peer: its parts, which are found by address. */
#include "sim.hpp"

#include <cerrno>

namespace npr::test {
namespace {

constexpr std::uint32_t key = 0x100;
constexpr unsigned shift = 16;
constexpr std::uint64_t size = 1U << shift, start = 16 * size;

struct Parts : ::testing::Test {
	/* Two parts, one behind the other, and nothing else. */
	Parts() : low(add(start)), high(add(start + size)) {}

	sim_region &add(std::uint64_t base)
	{
		sim_region &r = a.world.add_region(base, size, key);

		r.info.part_shift = shift;
		for (std::size_t i = 0; i < r.memory->size(); ++i)
			(*r.memory)[i] = static_cast<std::byte>((base + i) * 13 + i / 4096);
		a.world.all_in(r, true);
		return r;
	}

	/* A request of no app_op: what is in two memories an app does not know. */
	int post(ibv_wr_opcode opcode, std::uint64_t addr, std::span<std::byte> buffer)
	{
		ibv_sge sge{reinterpret_cast<std::uintptr_t>(buffer.data()), static_cast<std::uint32_t>(buffer.size()),
			    pinned_lkey};
		ibv_send_wr wr{}, *bad;

		wr.wr_id = 1;
		wr.opcode = opcode;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.sg_list = &sge;
		wr.num_sge = 1;
		wr.wr.rdma.remote_addr = addr;
		wr.wr.rdma.rkey = key;
		a.world.unowned = true;
		return a.eng->post_send(&wr, &bad);
	}

	/* All that is to do, but for an end that is to be told. */
	ibv_wc_status ends()
	{
		ibv_wc wc{};

		a.world.settle();
		EXPECT_TRUE(a.eng->poll(wc));
		return wc.status;
	}

	std::byte at(std::uint64_t addr) const
	{
		return addr < start + size ? (*low.memory)[addr - start] : (*high.memory)[addr - start - size];
	}

	app a{small_config()};
	sim_region &low, &high;
};

TEST_F(Parts, AreResolvedByTheAddressOfTheRequest)
{
	a.post(IBV_WR_RDMA_READ, 1, 5000, 100);
	ASSERT_EQ(a.world.resolves.size(), 1U);
	EXPECT_EQ(a.world.resolves[0].rkey, key);
	EXPECT_EQ(a.world.resolves[0].addr, start + size + 5000);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	a.post(IBV_WR_RDMA_READ, 0, 77, 100);
	ASSERT_EQ(a.world.resolves.size(), 1U) << "another part";
	EXPECT_EQ(a.world.resolves[0].addr, start + 77);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	for (std::size_t memory : {0U, 1U, 1U, 0U}) {
		a.post(IBV_WR_RDMA_WRITE, memory, 100, 100);
		EXPECT_TRUE(a.world.resolves.empty()) << "both are known";
		a.world.settle();
		EXPECT_EQ(a.poll(), 1U);
	}
	EXPECT_EQ(a.eng->stats().resolves, 2U);
	a.check_memory();
}

TEST_F(Parts, ReadIsCutWhereTheyMeet)
{
	std::vector<std::byte> buffer(3 * page_size);
	const std::uint64_t from = start + size - page_size - 5;

	a.world.all_out(high);
	ASSERT_EQ(post(IBV_WR_RDMA_READ, from, buffer), 0);
	ASSERT_EQ(ends(), IBV_WC_SUCCESS);
	for (std::size_t i = 0; i < buffer.size(); ++i)
		ASSERT_EQ(buffer[i], at(from + i)) << i;
	EXPECT_EQ(a.eng->stats().resolves, 2U);
	/* And again, when both are known. */
	std::fill(buffer.begin(), buffer.end(), std::byte{});
	ASSERT_EQ(post(IBV_WR_RDMA_READ, from, buffer), 0);
	ASSERT_EQ(ends(), IBV_WC_SUCCESS);
	for (std::size_t i = 0; i < buffer.size(); ++i)
		ASSERT_EQ(buffer[i], at(from + i)) << i;
}

TEST_F(Parts, WriteIsCutWhereTheyMeet)
{
	std::vector<std::byte> buffer(2 * page_size, std::byte{0x5a});
	const std::uint64_t from = start + size - page_size - 5;
	const std::byte before = at(from - 1), behind = at(from + buffer.size());

	a.world.all_out(low);
	a.world.all_out(high);
	ASSERT_EQ(post(IBV_WR_RDMA_WRITE, from, buffer), 0);
	ASSERT_EQ(ends(), IBV_WC_SUCCESS);
	for (std::size_t i = 0; i < buffer.size(); ++i)
		ASSERT_EQ(at(from + i), std::byte{0x5a}) << i;
	EXPECT_EQ(at(from - 1), before);
	EXPECT_EQ(at(from + buffer.size()), behind);
}

/* One request has to tell the receiver of all bytes. */
TEST_F(Parts, ImmediateAcrossTwoIsRefused)
{
	std::vector<std::byte> buffer(100);

	ASSERT_EQ(post(IBV_WR_RDMA_WRITE_WITH_IMM, start + size - 100, buffer), 0);
	EXPECT_EQ(ends(), IBV_WC_SUCCESS);
	ASSERT_EQ(post(IBV_WR_RDMA_WRITE_WITH_IMM, start + size - 99, buffer), 0);
	EXPECT_EQ(ends(), IBV_WC_REM_INV_REQ_ERR);
	EXPECT_EQ(a.world.immediates.size(), 1U);
}

TEST_F(Parts, WhereThereIsNoneIsAnAccessError)
{
	std::vector<std::byte> buffer(100);

	/* It begins in memory. */
	ASSERT_EQ(post(IBV_WR_RDMA_READ, start + 2 * size - 50, buffer), 0);
	EXPECT_EQ(ends(), IBV_WC_REM_ACCESS_ERR);
	EXPECT_TRUE(a.world.qp_error);
}

TEST_F(Parts, WhereThereIsNoneIsAnAccessErrorOfAKeyThatIsNew)
{
	std::vector<std::byte> buffer(100);

	ASSERT_EQ(post(IBV_WR_RDMA_READ, 0, buffer), 0);
	EXPECT_EQ(ends(), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Parts, ThatDieAreAskedForAgain)
{
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	a.post(IBV_WR_RDMA_READ, 1, 0, 100);
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
	sim_region &other = a.world.replace_region(low);
	a.world.all_in(other, true);
	a.world.settle();
	EXPECT_TRUE(low.forgotten);
	a.post(IBV_WR_RDMA_READ, 1, 0, 100);
	EXPECT_TRUE(a.world.resolves.empty()) << "that one lives";
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	EXPECT_EQ(a.world.resolves.size(), 1U);
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
}

/* The key is pinned memory's when the whole has ended: one answer is enough for all of its addresses. */
TEST_F(Parts, EndWhenTheKeyIsPinnedMemorys)
{
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	a.post(IBV_WR_RDMA_READ, 1, 0, 100);
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
	a.world.kill_region(high);
	sim_region &pinned = a.world.pin_region(low);
	a.world.settle();
	pinned.info.part_shift = 0;
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	ASSERT_EQ(a.world.resolves.size(), 1U);
	a.world.answer_resolve(0, -EACCES);
	ASSERT_EQ(a.world.queue.size(), 1U);
	EXPECT_EQ(a.world.queue[0].wr.wr.rdma.rkey, key);
	a.world.settle();
	a.post(IBV_WR_RDMA_READ, 0, size - 100, 100);
	EXPECT_TRUE(a.world.resolves.empty());
	a.world.settle();
	EXPECT_EQ(a.poll(), 2U);
}

/* A part that does not have the address would be asked for without end. */
TEST_F(Parts, WithoutTheAddressAreNonsense)
{
	std::vector<std::byte> buffer(100);

	ASSERT_EQ(post(IBV_WR_RDMA_READ, start, buffer), 0);
	ASSERT_EQ(a.world.resolves.size(), 1U);
	const remote_key asked = a.world.resolves[0];
	a.world.resolves.clear();
	a.eng->on_resolved(asked, 0, high.info);
	a.eng->step();
	EXPECT_EQ(ends(), IBV_WC_GENERAL_ERR);
	EXPECT_TRUE(high.forgotten) << "its owner keeps the keys until then";
}

TEST_F(Parts, OfAnotherSizeAreNonsense)
{
	rdma_np_region_info info = high.info;

	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	for (const unsigned wrong : {15U, 17U, 11U, 63U, 64U, 255U}) {
		info.part_shift = static_cast<std::uint8_t>(wrong);
		a.eng->resolve_begins();
		EXPECT_EQ(a.eng->resolve_ended({key, info.base}, 0, info, 1), -EPROTO) << wrong;
	}
	info.part_shift = shift;
	a.eng->resolve_begins();
	EXPECT_EQ(a.eng->resolve_ended({key, info.base}, 0, info, 1), 0);
}

/* What is known of the first would be taken for what is known of the second, which has none of its addresses. */
TEST_F(Parts, WithTheNameOfAnotherAreNonsense)
{
	rdma_np_region_info info = high.info;

	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	info.region_id = low.info.region_id;
	a.eng->resolve_begins();
	ASSERT_EQ(a.eng->resolve_ended({key, info.base}, 0, info, 1), -EPROTO);
	EXPECT_FALSE(low.forgotten) << "that one is used";
	EXPECT_EQ(a.eng->advise(key, start + size - 100, 200, NPR_ADVISE_READ_OFTEN), -ENOENT);
	/* The same once more is none. */
	a.eng->resolve_begins();
	EXPECT_EQ(a.eng->resolve_ended({key, start}, 0, low.info, 1), 0);
}

TEST_F(Parts, PrefetchEndsWithTheFirst)
{
	EXPECT_EQ(a.eng->prefetch(key, start, 2 * size, false), -ENOENT);
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.eng->prefetch(key, start + size - 3 * page_size, 5 * page_size, false),
		  static_cast<std::int64_t>(3 * page_size));
	EXPECT_EQ(a.eng->prefetch(key, start + size, page_size, false), -ENOENT) << "not known yet";
	a.world.settle();
}

TEST_F(Parts, AdviceIsForAllThatAreKnown)
{
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.eng->advise(key, start, size, NPR_ADVISE_READ_OFTEN), 0);
	EXPECT_EQ(a.eng->advise(key, start, size + 1, NPR_ADVISE_READ_OFTEN), -ENOENT);
	a.post(IBV_WR_RDMA_READ, 1, 0, 100);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
	EXPECT_EQ(a.eng->advise(key, start + 5, 2 * size - 5, NPR_ADVISE_READ_OFTEN), 0);
	EXPECT_EQ(a.eng->advise(key, start + 5, 2 * size - 4, NPR_ADVISE_READ_OFTEN), -ENOENT);
	EXPECT_EQ(a.eng->advise(key, ~0ULL, 2, NPR_ADVISE_READ_OFTEN), -EFAULT);
}

/* An application may use any number of addresses of which nothing is known. */
TEST_F(Parts, KeysOfNoRegionAreForgotten)
{
	for (std::uint64_t i = 0; i < 2 * engine::max_loose_keys; ++i) {
		a.eng->resolve_begins();
		a.eng->on_resolved({key, (i + 100) << shift}, -ETIMEDOUT, {});
	}
	EXPECT_LE(a.eng->keys(), engine::max_loose_keys + 1);
	a.post(IBV_WR_RDMA_READ, 0, 0, 100);
	a.world.settle();
	EXPECT_EQ(a.poll(), 1U);
}

} // namespace
} // namespace npr::test
