/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The kselftest harness, and the fixtures most tests here have in common.
 *
 * A test runs in a process of its own. It closes nothing: the exit of that
 * process is one more thing that has to work, and the parent waits until all
 * objects, pins and unevictable pages of it are gone and checks that the IOMMU
 * refused none of the HCAs' accesses (I2).
 */
#ifndef NP_HARNESS_H
#define NP_HARNESS_H

#include "kselftest_harness.h"
#include "np_test.h"

/*
 * Only a hang takes so long: an emulated machine, whose kernel checks all it does, on a
 * busy host. A guest of the base kernel ends before, and its log tells in which test.
 */
#undef TEST_TIMEOUT_DEFAULT
#define TEST_TIMEOUT_DEFAULT 1200

#define NP_CHECK_USAGE(before)						\
	do {								\
		const char *differs_ = np_usage_wait(before);		\
									\
		EXPECT_EQ(NULL, differs_)				\
			TH_LOG("after the test %s", differs_);		\
	} while (0)

#define NP_BUF_LEN	(NP_DATA_LEN + PAGE)

/*
 * An owner with an unpinned region of two slots full of a pattern, and a
 * connected peer. Page n is filled with np_fill(page, PAGE, n).
 */
struct np_pair {
	struct np_usage before;
	struct np_end owner;
	struct np_end peer;
	uint8_t *data;
	struct ibv_mr *mr;
	struct rdma_np_region_info info;	/* after np_pair_resolve() */
};

static inline int np_pair_open(struct np_pair *pair)
{
	int ret;

	memset(pair, 0, sizeof(*pair));
	ret = np_usage_start(&pair->before);
	if (ret)
		return ret;
	ret = np_open(&pair->owner, NP_OWNER_DEV, PAGE);
	if (ret)
		return ret;
	ret = np_open(&pair->peer, NP_PEER_DEV, NP_BUF_LEN);
	if (ret)
		return ret;
	return np_connect(&pair->owner, &pair->peer);
}

static inline int np_pair_register(struct np_pair *pair, int access)
{
	pair->data = np_map(NP_DATA_LEN);
	if (!pair->data)
		return -ENOMEM;
	for (size_t i = 0; i < NP_DATA_PAGES; i++)
		np_fill(pair->data + i * PAGE, PAGE, i);
	pair->mr = ibv_reg_mr(pair->owner.pd, pair->data, NP_DATA_LEN, access | NP_UNPINNED);
	return pair->mr ? 0 : -errno;
}

static inline int np_pair_resolve(struct np_pair *pair)
{
	return np_resolve(&pair->peer, pair->mr->rkey, &pair->info);
}

/* FAULT of pages of the pair's region. */
static inline int np_pair_fault(struct np_pair *pair, size_t off, size_t len, uint32_t flags,
				struct rdma_np_event *event)
{
	return np_fault(&pair->peer, pair->info.region_id, pair->info.base + off, len, flags,
			event);
}

static inline int np_pair_read(struct np_pair *pair, size_t off, size_t len)
{
	return np_read(&pair->peer, 0, len, np_read_addr(&pair->info, off), pair->info.read_key);
}

static inline int np_pair_write(struct np_pair *pair, size_t off, size_t len)
{
	return np_write(&pair->peer, 0, len, np_write_addr(&pair->info, off),
			pair->info.write_key);
}

static inline uint64_t np_pair_word(struct np_pair *pair, size_t off)
{
	uint64_t word;

	return np_word(&pair->peer, &pair->info, off, &word) ? ~0ULL : word;
}

#endif /* NP_HARNESS_H */
