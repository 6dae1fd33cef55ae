// SPDX-License-Identifier: GPL-2.0
/*
 * I8: what a peer wrote and proved survives page-out, whatever the CPU's dirty
 * bit said. Needs swap on a disk: zram keeps no copy behind that a clean page
 * could be dropped in favour of, so there the bug would not show.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "np_harness.h"

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif

#define PAGES 64

enum memory { PRIVATE, SHARED };

FIXTURE(swap) {
	struct np_pair pair;
};

FIXTURE_VARIANT(swap) {
	enum memory memory;
};

FIXTURE_VARIANT_ADD(swap, anonymous) { .memory = PRIVATE };
FIXTURE_VARIANT_ADD(swap, shared) { .memory = SHARED };

FIXTURE_SETUP(swap)
{
	struct np_pair *pair = &self->pair;

	ASSERT_TRUE(np_disk_swap())
		TH_LOG("swap on a disk is needed: scripts/vm run --swap 1G");
	ASSERT_EQ(0, np_pair_open(pair));
	/* As it is outside of tests. */
	ASSERT_EQ(0, np_set_fault_around(NP_FAULT_AROUND));
	if (variant->memory == SHARED) {
		pair->data = mmap(NULL, NP_DATA_LEN, PROT_READ | PROT_WRITE,
				  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		ASSERT_NE(MAP_FAILED, pair->data);
	} else {
		pair->data = np_map(NP_DATA_LEN);
		ASSERT_NE(NULL, pair->data);
	}
	for (size_t i = 0; i < PAGES; i++)
		np_fill(pair->data + i * PAGE, PAGE, i);
	pair->mr = ibv_reg_mr(pair->owner.pd, pair->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, pair->mr);
	ASSERT_EQ(0, np_pair_resolve(pair));
}

FIXTURE_TEARDOWN_PARENT(swap)
{
	EXPECT_TRUE(np_group_remove());
	NP_CHECK_USAGE(&self->pair.before);
}

/* WRITEs one word into each page, proven; the rest of the page is the owner's. */
static int write_words(struct np_pair *pair, uint64_t seed)
{
	for (size_t i = 0; i < PAGES; i++) {
		int ret;

		*(uint64_t *)pair->peer.buf = np_pattern(seed, i);
		ret = np_write_proven(&pair->peer, &pair->info, 0, i * PAGE + 64, 8);
		if (ret)
			return ret;
	}
	return 0;
}

/* Pages on which the word or the rest is not what it should be. */
static int lost_words(struct np_pair *pair, uint64_t seed)
{
	int lost = 0;

	for (size_t i = 0; i < PAGES; i++) {
		volatile uint64_t *w = (uint64_t *)(pair->data + i * PAGE);
		bool ok = w[8] == np_pattern(seed, i);

		for (size_t k = 0; k < PAGE_WORDS; k++)
			ok &= k == 8 || w[k] == np_pattern(i, k);
		lost += !ok;
	}
	return lost;
}

static int touch(struct np_pair *pair)
{
	int sum = 0;

	for (size_t i = 0; i < PAGES; i++)
		sum += *(volatile uint8_t *)(pair->data + i * PAGE);
	return sum;
}

TEST_F(swap, proven_write_after_read_swap_in_survives_page_out)
{
	struct np_pair *pair = &self->pair;

	for (int round = 0; round < 3; round++) {
		ASSERT_EQ(0, np_page_out(pair->data, PAGES * PAGE));
		/* The page comes back clean, with its copy still in swap. */
		touch(pair);
		ASSERT_EQ(0, write_words(pair, 100 + round));
		ASSERT_EQ(0, np_page_out(pair->data, PAGES * PAGE));
		EXPECT_EQ(0, lost_words(pair, 100 + round));
	}
}

TEST_F(swap, proven_write_after_faulted_swap_in_survives_page_out)
{
	struct np_pair *pair = &self->pair;

	for (int round = 0; round < 3; round++) {
		ASSERT_EQ(0, np_page_out(pair->data, PAGES * PAGE));
		/* The same, but it is the peer that has it read from swap. */
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGES * PAGE, 0, NULL));
		ASSERT_EQ(0, write_words(pair, 200 + round));
		ASSERT_EQ(0, np_page_out(pair->data, PAGES * PAGE));
		EXPECT_EQ(0, lost_words(pair, 200 + round));
	}
}

TEST_F(swap, second_proven_write_survives_page_out_too)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, np_page_out(pair->data, PAGES * PAGE));
	touch(pair);
	ASSERT_EQ(0, write_words(pair, 1));
	/* No fault any more: the pages are resident and writable. */
	ASSERT_EQ(0, write_words(pair, 2));
	ASSERT_EQ(0, np_page_out(pair->data, PAGES * PAGE));
	EXPECT_EQ(0, lost_words(pair, 2));
}

TEST_F(swap, swapped_pages_are_read_and_written_right)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_mr_info info;

	ASSERT_EQ(0, np_page_out(pair->data, PAGES * PAGE));
	for (size_t i = 0; i < PAGES; i++) {
		ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, i * PAGE, PAGE));
		ASSERT_EQ(-1, np_differs(pair->peer.buf, PAGE, i));
	}
	/* Not all are major: a page on its way to the disk is in the swap cache still. */
	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_EQ(PAGES, info.faults_minor + info.faults_major);
	ASSERT_EQ(0, np_page_out(pair->data, PAGES * PAGE));
	ASSERT_EQ(0, write_words(pair, 3));
	EXPECT_EQ(0, lost_words(pair, 3));
}

TEST_F(swap, paged_out_region_leaves_nothing_resident)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_mr_info info;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGES * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_EQ(PAGES, info.resident_pages);
	ASSERT_EQ(0, np_page_out(pair->data, PAGES * PAGE));
	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_EQ(0, info.resident_pages);
	EXPECT_EQ(0, info.writable_pages);
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGES * PAGE));
	EXPECT_TRUE(np_all(pair->peer.buf, PAGES * PAGE, pair->info.signature));
}

TEST_F(swap, proven_write_after_madv_free_survives_page_out)
{
	struct np_pair *pair = &self->pair;

	if (variant->memory == SHARED)
		SKIP(return, "MADV_FREE is for private anonymous memory");
	ASSERT_EQ(0, madvise(pair->data, PAGES * PAGE, MADV_FREE));
	for (size_t i = 0; i < PAGES; i++) {
		np_fill(pair->peer.buf, PAGE, 300 + i);
		ASSERT_EQ(0, np_write_proven(&pair->peer, &pair->info, 0, i * PAGE, PAGE));
	}
	ASSERT_EQ(0, np_page_out(pair->data, PAGES * PAGE));
	for (size_t i = 0; i < PAGES; i++) {
		EXPECT_EQ(-1, np_differs(pair->data + i * PAGE, PAGE, 300 + i))
			TH_LOG("page %zu", i);
	}
}

TEST_F(swap, proven_write_before_madv_free_may_go_but_never_half)
{
	struct np_pair *pair = &self->pair;
	unsigned int gone = 0;
	long freed;

	if (variant->memory == SHARED)
		SKIP(return, "MADV_FREE is for private anonymous memory");
	for (size_t i = 0; i < PAGES; i++) {
		np_fill(pair->peer.buf, PAGE, 400 + i);
		ASSERT_EQ(0, np_write_proven(&pair->peer, &pair->info, 0, i * PAGE, PAGE));
	}
	ASSERT_EQ(0, madvise(pair->data, PAGES * PAGE, MADV_FREE));
	/* Who only reads them does not keep them. */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGES / 2 * PAGE, 0, NULL));
	freed = np_vmstat("pglazyfreed");
	ASSERT_EQ(0, np_page_out(pair->data, PAGES * PAGE));
	freed = np_vmstat("pglazyfreed") - freed;
	for (size_t i = 0; i < PAGES; i++) {
		uint8_t *p = pair->data + i * PAGE;

		ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, i * PAGE, PAGE));
		EXPECT_EQ(0, memcmp(p, pair->peer.buf, PAGE));
		EXPECT_TRUE(np_all(p, PAGE, 0) || np_differs(p, PAGE, 400 + i) == -1);
		gone += np_all(p, PAGE, 0);
	}
	/* A page that a CPU has just added to its list of new ones is not given up. */
	TH_LOG("%u of %u pages went", gone, PAGES);
	EXPECT_LE(PAGES * 3 / 4, gone);
	EXPECT_LE(gone, freed);
}

struct thief {
	void *addr;
	size_t len;
	atomic_bool stop;
};

static void *steal(void *arg)
{
	struct thief *thief = arg;
	unsigned int cpu = 0;
	cpu_set_t all, one;

	/* On each CPU in its turn, or those that it has on a list of its own would stay. */
	sched_getaffinity(0, sizeof(all), &all);
	while (!atomic_load(&thief->stop)) {
		do {
			cpu = (cpu + 1) % CPU_SETSIZE;
		} while (!CPU_ISSET(cpu, &all));
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		sched_setaffinity(0, sizeof(one), &one);
		madvise(thief->addr, thief->len, MADV_PAGEOUT);
	}
	return NULL;
}

/*
 * Out of the swap cache, too: a page that was just written stays there, and comes back without
 * the disk, until it is mapped and taken once more. Brings those for the thief to take.
 */
static bool all_on_disk(const uint8_t *data)
{
	unsigned char in_core[HUGE_PAGE / PAGE];
	bool all = !mincore((void *)data, HUGE_PAGE, in_core);

	for (size_t i = 0; i < HUGE_PAGE / PAGE; i++)
		if (in_core[i] & 1) {
			(void)*(volatile const uint8_t *)(data + i * PAGE);
			all = false;
		}
	return all;
}

/* They may never be there all at once, but each has its turn. */
TEST_F(swap, fault_ends_although_pages_go_as_fast_as_they_come)
{
	static const uint32_t flags[] = {
		0, RDMA_NP_FAULT_WRITE, RDMA_NP_FAULT_HOLD, RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_WRITE,
	};
	struct np_pair *pair = &self->pair;
	struct thief thief = { .addr = pair->data, .len = NP_DATA_LEN };
	struct rdma_np_mr_info before, after;
	struct rdma_np_event event = {};
	pthread_t thread;

	for (size_t i = PAGES; i < HUGE_PAGE / PAGE; i++)
		np_fill(pair->data + i * PAGE, PAGE, i);
	ASSERT_EQ(0, np_page_out(pair->data, HUGE_PAGE));
	ASSERT_EQ(0, np_query_mr(pair->mr, &before));
	ASSERT_EQ(0, pthread_create(&thread, NULL, steal, &thief));
	for (size_t i = 0; i < ARRAY_SIZE(flags); i++) {
		/* A shared page that is mapped has to be written anew. */
		if (variant->memory != SHARED)
			ASSERT_TRUE(np_wait_until(all_on_disk(pair->data)));
		EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, HUGE_PAGE, flags[i], &event))
			TH_LOG("flags %u", flags[i]);
		if (event.hold_id)
			EXPECT_EQ(0, np_release(&pair->peer, event.hold_id));
	}
	/* He was not idle, nor is he now. */
	EXPECT_TRUE(np_wait_until(!np_query_mr(pair->mr, &after) &&
				  after.pages_invalidated - before.pages_invalidated >= PAGES));
	atomic_store(&thief.stop, true);
	ASSERT_EQ(0, pthread_join(thread, NULL));
	TH_LOG("%llu pages went", after.pages_invalidated - before.pages_invalidated);
	for (size_t i = 0; i < HUGE_PAGE / PAGE; i++)
		EXPECT_EQ(-1, np_differs(pair->data + i * PAGE, PAGE, i));
}

/* More than its control group may have: everything is paged out and in by need. */
TEST_F(swap, region_larger_than_memory_keeps_its_data)
{
	const size_t pages = (48UL << 20) / PAGE, step = 31;
	struct np_pair *pair = &self->pair;
	struct rdma_np_region_info info;
	struct rdma_np_mr_info counters;
	struct ibv_mr *mr;
	uint8_t *big;

	if (variant->memory == SHARED)
		SKIP(return, "once is enough");
	ASSERT_EQ(0, np_group_enter("24M", "max"));
	big = np_map(pages * PAGE);
	ASSERT_NE(NULL, big);
	mr = ibv_reg_mr(pair->owner.pd, big, pages * PAGE, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	ASSERT_EQ(0, np_resolve(&pair->peer, mr->rkey, &info));
	for (size_t i = 0; i < pages; i++) {
		if (i % step) {
			*(volatile uint64_t *)(big + i * PAGE) = np_pattern(i, 0);
			continue;
		}
		*(uint64_t *)pair->peer.buf = np_pattern(i, 0);
		ASSERT_EQ(0, np_write_proven(&pair->peer, &info, 0, i * PAGE, 8));
	}
	for (size_t i = 0; i < pages; i++) {
		if (i % step == 1) {
			ASSERT_EQ(0, np_read_proven(&pair->peer, &info, 0, i * PAGE, UNIT));
			ASSERT_EQ(np_pattern(i, 0), *(uint64_t *)pair->peer.buf);
		} else {
			ASSERT_EQ(np_pattern(i, 0), *(volatile uint64_t *)(big + i * PAGE))
				TH_LOG("page %zu", i);
		}
	}
	ASSERT_EQ(0, np_query_mr(mr, &counters));
	EXPECT_LT(0, counters.faults_major);
	EXPECT_GT((24 << 20) / PAGE, counters.resident_pages);
}

TEST_HARNESS_MAIN
