// SPDX-License-Identifier: GPL-2.0
/*
 * What a kernel without nprdma says: the flag is refused, and so are the methods.
 * Nothing is ever pinned instead. Run on the stock kernel.
 */
#include "np_harness.h"

FIXTURE(stock) {
	struct np_usage before;
	struct np_end end;
	uint8_t *data;
};

FIXTURE_SETUP(stock)
{
	ASSERT_EQ(0, np_usage_start(&self->before));
	ASSERT_EQ(0, np_open(&self->end, NP_OWNER_DEV, PAGE));
	self->data = np_map(NP_DATA_LEN);
	ASSERT_NE(NULL, self->data);
}

FIXTURE_TEARDOWN_PARENT(stock)
{
	NP_CHECK_USAGE(&self->before);
}

TEST_F(stock, flag_is_refused)
{
	long pins = np_vmstat("nr_foll_pin_acquired");

	errno = 0;
	EXPECT_EQ(NULL, ibv_reg_mr(self->end.pd, self->data, PAGE, NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(EINVAL, errno);
	EXPECT_EQ(pins, np_vmstat("nr_foll_pin_acquired"));
}

TEST_F(stock, methods_do_not_exist)
{
	struct rdma_np_mr_info info;
	struct rdma_np_query query;

	EXPECT_EQ(-EPROTONOSUPPORT, np_query(self->end.ctx, &query));
	EXPECT_EQ(-EPROTONOSUPPORT, self->end.channel);
	EXPECT_EQ(-EPROTONOSUPPORT, np_query_mr(self->end.mr, &info));
}

TEST_F(stock, pinned_memory_works)
{
	struct ibv_mr *mr;

	mr = ibv_reg_mr(self->end.pd, self->data, NP_DATA_LEN, NP_RIGHTS);
	ASSERT_NE(NULL, mr);
	EXPECT_EQ(0, ibv_dereg_mr(mr));
}

TEST_HARNESS_MAIN
