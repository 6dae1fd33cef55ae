/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a program has of verbs, by the preload library's functions. */
#ifndef FIXTURE_HPP
#define FIXTURE_HPP

#include "fake_verbs.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <gtest/gtest.h>

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

/* Of a shared receive queue with tag matching, which needs pinned memory. */
inline ibv_srq_init_attr_ex attributes_of_tags(device &d)
{
	ibv_srq_init_attr_ex attr{};

	attr.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
	attr.srq_type = IBV_SRQT_TM;
	attr.pd = &d.pd;
	return attr;
}

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
		EXPECT_TRUE(fake::is_held(fake::of(qp).lkey));
		EXPECT_EQ(fake::holds(dev.context), 1U);
		EXPECT_EQ(next(), id);
		EXPECT_EQ(fake::holds(dev.context), 0U);
	}

	device &dev;
	std::array<std::byte, 64> memory{};
	ibv_cq *cq;
	ibv_qp *qp;
	ibv_mr *mr;
};

#endif
