/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The library around the engine, on the HCA and the kernel of the unit tests. Real threads, real file descriptors. */
#ifndef NPR_OBJECTS_FIXTURE_HPP
#define NPR_OBJECTS_FIXTURE_HPP

#include "fake_kernel.hpp"
#include "object/cq.hpp"
#include "object/srq.hpp"

#include <nprdma/nprdma.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <gtest/gtest.h>
#include <map>
#include <poll.h>
#include <set>

namespace npr::fake {

constexpr std::uint32_t rkey = 0x100, read_key = 0x101, write_key = 0x102, table_key = 0x103;
constexpr std::size_t pages = 64;
constexpr std::uint64_t base = 0x10000000;

/* An HCA with a CQ, whose peer has one region. */
struct device : hca {
	device()
	{
		pd.context = &context;
		region.info.read_key = read_key;
		region.info.write_key = write_key;
		region.info.table_key = table_key;
		/* as those of the parts of a whole address space, which are made of it */
		region.info.read_addr = region.info.write_addr = base;
	}

	using hca::complete;
	void complete(const ibv_wc &wc) { complete(&cq, wc); }
	/* An unpinned region at @memory, as the kernel knows it. */
	void add_region(std::uint32_t handle, std::span<std::byte> memory, bool leased = false)
	{
		const std::lock_guard lock(mutex);
		regions[handle] = {reinterpret_cast<std::uintptr_t>(memory.data()), memory.size(), 0, leased};
	}

	/* --- what the peer's owner does, all at once; under the mutex if other threads may look --- */
	void all_in() { far.all_in(region, true); }
	void all_out() { far.all_out(region); }
	void page_out(std::uint64_t page) { far.page_out(region, page); }
	[[nodiscard]] bool resident(std::uint64_t page) const { return region.pages[page].word & RDMA_NP_WORD_READABLE; }

	fake::cq main{*this};
	ibv_context &context = verbs.context;
	ibv_cq &cq = *main.base();
	ibv_pd pd{};
	std::vector<ibv_wc> &completions = main.completions;
	std::size_t &capacity = main.capacity;
	peer::region &region = far.add_region(base, pages * page_size, rkey);
	std::vector<std::byte> &memory = *region.memory;
};

/* What registers and deregisters at a device. */
inline npr::provider provider_of(const device &dev)
{
	npr::provider p(dev.context);

	p.reg_mr = [](ibv_pd *pd, void *addr, size_t length, std::uint64_t iova, unsigned access) -> ibv_mr * {
		EXPECT_EQ(access, unsigned{IBV_ACCESS_LOCAL_WRITE});
		mr *const made = of(pd->context).register_memory(pd, addr, length, iova, access);
		return made ? &made->verbs : nullptr;
	};
	p.dereg_mr = [](ibv_mr *v) {
		of(v->context).deregister(&of(v));
		return 0;
	};
	return p;
}

struct Objects : ::testing::Test {
	/* @turns: the library's thread may do something at any time after a request that is not done. */
	explicit Objects(unsigned flags = 0, bool turns = false)
	    : kernel_ptr(new fake_kernel(dev)),
	      ctx(&dev.context, std::unique_ptr<npr::kernel>(kernel_ptr), flags, provider_of(dev))
	{
		ctx.keeper.gives_turns = turns;
		cq = std::make_unique<npr_cq>(ctx, &dev.cq, 2048);
		for (std::size_t i = 0; i < dev.memory.size(); ++i)
			dev.memory[i] = static_cast<std::byte>(i * 5 + i / 4096);
	}

	~Objects() override
	{
		while (!cq->qps.empty())
			EXPECT_EQ(npr_detach_qp(cq->qps.back().get()), 0);
	}

	ibv_qp &make_qp(std::uint32_t number)
	{
		ibv_cq *const completes = cq ? cq->verbs : &dev.cq;
		verbs_qps.push_back(std::make_unique<qp>(dev, number, completes, completes));
		ibv_qp &q = verbs_qps.back()->base();
		q.pd = &dev.pd;
		q.state = IBV_QPS_RTS;
		return q;
	}

	npr_qp *attach(std::uint32_t number) { return cq->attach(&make_qp(number), params); }

	static int post(npr_qp *qp, ibv_wr_opcode op, std::uint64_t offset, std::span<std::byte> buffer,
			std::uint64_t id, std::uint32_t key = rkey, unsigned flags = IBV_SEND_SIGNALED)
	{
		ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer.data()), static_cast<std::uint32_t>(buffer.size()), 1};
		ibv_send_wr wr{}, *bad;
		wr.wr_id = id;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = op;
		wr.send_flags = flags;
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

	static constexpr npr::qp_params params{32, 16, 4, 64, 16, ~0U, 4, 2, false, false};
	device dev;
	fake_kernel *kernel_ptr;
	npr_context ctx;
	std::unique_ptr<npr_cq> cq;
	std::vector<std::unique_ptr<qp>> verbs_qps;
};

} // namespace npr::fake

#endif
