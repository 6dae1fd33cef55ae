// SPDX-License-Identifier: GPL-2.0
/*
 * For np_preload: a program that knows nothing of unpinned regions, and whose regions
 * are not where work requests say. It READs and WRITEs memory that is paged out. That is
 * twice as large as the peer's own, so that NPRDMA_UNPINNED can tell them apart.
 */
#include <dlfcn.h>
#include <sys/mman.h>

#include "np_harness.h"

#define LEN	(64 * PAGE)

typedef struct ibv_mr *reg_fn(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
			      unsigned int access);

FIXTURE(buffer) {
	struct np_end owner;
	struct np_end peer;
	uint8_t *data;
	uint8_t *sink;
	struct ibv_mr *mr;
	uint64_t addr;
};

FIXTURE_VARIANT(buffer) {
	bool remote_iova;
	bool iova;	/* of the peer's own buffer */
	bool unseen;	/* registered by somebody whom the preload library does not see */
};
FIXTURE_VARIANT_ADD(buffer, where_it_is) { .remote_iova = false };
FIXTURE_VARIANT_ADD(buffer, remote_elsewhere) { .remote_iova = true };
FIXTURE_VARIANT_ADD(buffer, local_elsewhere) { .iova = true };
FIXTURE_VARIANT_ADD(buffer, elsewhere) { .remote_iova = true, .iova = true };
FIXTURE_VARIANT_ADD(buffer, not_seen) { .iova = true, .unseen = true };

FIXTURE_SETUP(buffer)
{
	reg_fn *reg = ibv_reg_mr_iova2;
	uint64_t iova;

	ASSERT_EQ(0, np_open(&self->owner, NP_OWNER_DEV, 0));
	ASSERT_EQ(0, np_open(&self->peer, NP_PEER_DEV, 0));
	ASSERT_EQ(0, np_connect(&self->owner, &self->peer));
	self->data = np_map(2 * LEN);
	self->sink = np_map(LEN);
	ASSERT_TRUE(self->data && self->sink);
	self->addr = variant->remote_iova ? PAGE : (uintptr_t)self->data;
	self->mr = reg(self->owner.pd, self->data, 2 * LEN, self->addr, NP_RIGHTS);
	ASSERT_NE(NULL, self->mr) TH_LOG("%s", strerror(errno));

	if (variant->unseen) {
		void *lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);

		ASSERT_NE(NULL, lib);
		reg = (reg_fn *)dlsym(lib, "ibv_reg_mr_iova2");
		ASSERT_NE(NULL, reg);
	}
	/* Nothing is mapped there. */
	iova = variant->iova ? 3 * PAGE : (uintptr_t)self->sink;
	self->peer.mr = reg(self->peer.pd, self->sink, LEN, iova, IBV_ACCESS_LOCAL_WRITE);
	ASSERT_NE(NULL, self->peer.mr) TH_LOG("%s", strerror(errno));
	self->peer.buf = (uint8_t *)(uintptr_t)iova;
	self->peer.buf_len = LEN;
}

FIXTURE_TEARDOWN(buffer)
{
	EXPECT_EQ(0, ibv_dereg_mr(self->mr));
	self->peer.buf = NULL;
	EXPECT_EQ(0, np_close(&self->peer));
	EXPECT_EQ(0, np_close(&self->owner));
}

TEST_F(buffer, is_read_and_written)
{
	static const size_t lengths[] = { 8, PAGE, 3 * PAGE + 200, LEN };
	size_t i;

	for (i = 0; i < ARRAY_SIZE(lengths); i++) {
		np_fill(self->data, LEN, i);
		memset(self->sink, 0, LEN);
		EXPECT_EQ(0, np_page_out(self->data, LEN));
		EXPECT_EQ(0, np_read(&self->peer, 0, lengths[i], self->addr, self->mr->rkey));
		EXPECT_EQ(-1, np_differs(self->sink, lengths[i], i));
		EXPECT_EQ(0, np_read(&self->peer, 0, lengths[i], self->addr, self->mr->rkey));
		EXPECT_EQ(-1, np_differs(self->sink, lengths[i], i));

		np_fill(self->sink, LEN, i + 100);
		EXPECT_EQ(0, np_page_out(self->data, LEN));
		EXPECT_EQ(0, np_write(&self->peer, 0, lengths[i], self->addr, self->mr->rkey));
		EXPECT_EQ(-1, np_differs(self->data, lengths[i], i + 100));
	}
}

TEST_HARNESS_MAIN
