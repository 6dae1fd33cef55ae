/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the tests have in common that change an owner's memory while a peer READs and WRITEs
 * it (np_load.h). What is promised for each change is in
 * Documentation/infiniband/nprdma-memory.rst, which names these tests.
 */
#ifndef NP_CHANGE_H
#define NP_CHANGE_H

#include "np_harness.h"
#include "np_load.h"

#define PAGES		NP_LOAD_PAGES
#define FIRST_PAGE	(512 - PAGES / 2)	/* on both sides of a slot's end */
#define ROUNDS		12

#define ASSERT_LOAD(condition) ASSERT_TRUE(condition) TH_LOG("%s", np_load_why(load))

#define EXPECT_RIGHT(load)						\
	do {								\
		EXPECT_TRUE(np_load_stop(load))				\
			TH_LOG("%s", np_load_why(load));		\
		EXPECT_EQ(-1, np_load_differs(load));			\
		TH_LOG("%lu READs, %lu WRITEs, %lu faults, %lu refused", (load)->reads, \
		       (load)->writes, atomic_load(&(load)->faults),	\
		       atomic_load(&(load)->refused));			\
	} while (0)

static inline uint64_t random_of(uint64_t n, uint64_t bound)
{
	return np_pattern(4711, n) % bound;
}

static inline int memory_open(struct np_pair *pair, struct np_load *load, uint8_t **data)
{
	int ret = np_pair_open(pair);

	if (!ret)
		ret = np_pair_register(pair, NP_RIGHTS);
	if (!ret)
		ret = np_pair_resolve(pair);
	*data = pair->data + FIRST_PAGE * PAGE;
	np_load_init(load, &pair->peer, &pair->info, *data, FIRST_PAGE * PAGE, PAGES);
	return ret;
}

/* All pages writable for the peer; before the load starts, or with it at rest. */
static inline int prefault(struct np_pair *pair)
{
	return np_pair_fault(pair, FIRST_PAGE * PAGE, PAGES * PAGE, RDMA_NP_FAULT_WRITE, NULL);
}

#endif /* NP_CHANGE_H */
