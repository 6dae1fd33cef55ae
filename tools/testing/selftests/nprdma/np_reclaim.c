// SPDX-License-Identifier: GPL-2.0
/*
 * What reclaim takes first: it sees what peers use as it sees what the owner's CPU uses.
 */
#include <fcntl.h>

#include "np_memory.h"
#include "np_zram.h"

static long group_reclaim(const char *amount)
{
	return np_write_text(NP_GROUP "/memory.reclaim", amount);
}

/* 1: not used since np_set_idle() */
static int is_idle(uint64_t frame)
{
	int fd = open(NP_PAGE_IDLE, O_RDONLY | O_CLOEXEC), ret;
	uint64_t word;

	if (fd < 0)
		return -errno;
	ret = pread(fd, &word, 8, frame / 64 * 8) != 8 ? -EIO : word >> frame % 64 & 1;
	close(fd);
	return ret;
}

static long resident(struct ibv_mr *mr)
{
	struct rdma_np_mr_info info;

	return np_query_mr(mr, &info) ? -1 : (long)info.resident_pages;
}

static long held(struct ibv_mr *mr)
{
	struct rdma_np_mr_info info;

	return np_query_mr(mr, &info) ? -1 : (long)info.held_pages;
}

/* It asks what reclaim asks; the owner's CPU does not touch the page meanwhile. */
TEST_F(memory, idle_page_tracking_sees_what_peers_use)
{
	struct np_pair *pair = &self->pair;
	const size_t off = FIRST_PAGE * PAGE;
	uint64_t frame;

	/* Pages that the CPU has just added to a list of its own are not asked about. */
	ASSERT_EQ(0, np_write_text("/proc/sys/vm/compact_memory", "1"));
	for (int i = 0; i < ROUNDS; i++) {
		bool used = i % 3;

		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, PAGE, 0, NULL));
		frame = np_frame_of(self->data);
		ASSERT_NE(0, frame);
		ASSERT_EQ(0, np_set_idle(frame));
		/* The page is where it was; its next use will be seen. */
		ASSERT_TRUE(np_wait_until(!resident(pair->mr)));
		ASSERT_EQ(frame, np_frame_of(self->data));
		ASSERT_EQ(1, is_idle(frame));
		ASSERT_EQ(0, np_pair_read(pair, off, PAGE));
		EXPECT_TRUE(np_all(pair->peer.buf, PAGE, pair->info.signature));
		if (used) {
			/* As peers do it: reclaim may ask about the page at any time, too. */
			ASSERT_TRUE(np_wait_until(
				!np_pair_fault(pair, off, PAGE, i % 2 ? RDMA_NP_FAULT_WRITE : 0, NULL) &&
				!np_pair_read(pair, off, PAGE) &&
				np_differs(pair->peer.buf, PAGE, FIRST_PAGE) == -1));
		}
		EXPECT_EQ(!used, is_idle(frame));
	}
}

/* A page under a hold cannot be taken; it is left alone, and in use. */
TEST_F(memory, held_pages_stay_when_they_are_aged)
{
	struct np_pair *pair = &self->pair;
	const size_t off = FIRST_PAGE * PAGE;
	struct rdma_np_event event;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, PAGE, RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off + PAGE, PAGE, 0, NULL));
	/* A hold may have moved its page, and those on a list of a CPU are not asked about. */
	ASSERT_EQ(0, np_write_text("/proc/sys/vm/drop_caches", "1"));
	ASSERT_EQ(2, resident(pair->mr));
	/* Both are asked about; when the second has gone, so has had the first its turn. */
	ASSERT_EQ(0, np_set_idle(np_frame_of(self->data)));
	ASSERT_EQ(0, np_set_idle(np_frame_of(self->data + PAGE)));
	ASSERT_TRUE(np_wait_until(!(np_pair_word(pair, off + PAGE) & RDMA_NP_WORD_READABLE)));
	EXPECT_EQ(1, resident(pair->mr));
	EXPECT_NE(0, np_pair_word(pair, off) & RDMA_NP_WORD_READABLE);
	ASSERT_EQ(0, np_pair_read(pair, off, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, FIRST_PAGE));
	/* When it can be taken, it still is resident, and nobody knows that it is used. */
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	EXPECT_TRUE(np_wait_until(!held(pair->mr)));
	EXPECT_EQ(1, resident(pair->mr));
	EXPECT_EQ(0, is_idle(np_frame_of(self->data)));
}

#define OTHERS_LEN	(16UL << 20)
#define USED		16U
#define LAST		(NP_DATA_LEN - PAGE)
#define LRU_GEN		"/sys/kernel/mm/lru_gen/enabled"
#define GENERATIONS	"/sys/kernel/debug/lru_gen"

/* A look at all page tables of the group, which begins a new generation on each node. */
static int look_at_all(void)
{
	const char *group = NP_GROUP + strlen("/sys/fs/cgroup");
	unsigned int id = 0, node = 0, n, nodes = 0;
	char line[256], path[128], look[4][64];
	FILE *f = fopen(GENERATIONS, "re");
	unsigned long seq, birth;
	bool ours = false;
	int ret = 0;

	if (!f)
		return -errno;
	while (fgets(line, sizeof(line), f)) {
		if (sscanf(line, "memcg %u %127s", &n, path) == 2) {
			ours = !strcmp(path, group);
			id = n;
		} else if (ours && sscanf(line, " node %u", &n) == 1) {
			node = n;
			nodes++;
		} else if (ours && nodes <= ARRAY_SIZE(look) &&
			   sscanf(line, "%lu %lu", &seq, &birth) == 2) {
			/* The last line of a node is its youngest. */
			snprintf(look[nodes - 1], sizeof(look[0]), "+ %u %u %lu", id, node, seq);
		}
	}
	fclose(f);
	if (!nodes || nodes > ARRAY_SIZE(look))
		return -ENOENT;
	for (n = 0; n < nodes && !ret; n++)
		ret = np_write_text(GENERATIONS, look[n]);
	return ret;
}

FIXTURE(in_use) {
	struct np_pair pair;
	struct np_swap swap;
	uint8_t *data;
};

FIXTURE_VARIANT(in_use) {
	unsigned int around;	/* pages that one fault brings */
	bool unasked;		/* of those that are used only a few were asked for */
	bool generations;	/* the multi-generational LRU */
};

FIXTURE_VARIANT_ADD(in_use, one_by_one) { .around = 1 };
FIXTURE_VARIANT_ADD(in_use, with_neighbours) { .around = NP_FAULT_AROUND };
FIXTURE_VARIANT_ADD(in_use, as_neighbours) { .around = NP_FAULT_AROUND, .unasked = true };
FIXTURE_VARIANT_ADD(in_use, in_generations) { .around = NP_FAULT_AROUND, .generations = true };

FIXTURE_SETUP(in_use)
{
	if (variant->generations) {
		ASSERT_EQ(0, np_write_text(LRU_GEN, "y"));
	}
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
	ASSERT_EQ(0, np_set_fault_around(variant->around));
	self->data = self->pair.data + FIRST_PAGE * PAGE;
}

FIXTURE_TEARDOWN_PARENT(in_use)
{
	EXPECT_EQ(0, np_write_text(LRU_GEN, "n"));
	EXPECT_TRUE(np_swap_back(&self->swap));
	EXPECT_TRUE(np_group_remove());
	NP_CHECK_USAGE(&self->pair.before);
}

/*
 * What reclaim has asked about becomes absent a moment later. When a page that is asked
 * about now has become so, all have, and a READ of them leaves a trace.
 */
static int read_used(struct np_pair *pair, uint8_t *data)
{
	int ret = np_pair_fault(pair, LAST, PAGE, RDMA_NP_FAULT_WRITE, NULL);

	if (!ret)
		ret = np_set_idle(np_frame_of(pair->data + LAST));
	if (!ret && !np_wait_until(!np_readable(np_pair_word(pair, LAST))))
		ret = -ETIMEDOUT;
	for (size_t i = 0; i < USED && !ret; i++) {
		ret = np_read_proven(&pair->peer, &pair->info, 0,
				     data + i * PAGE - pair->data, PAGE);
		for (size_t n = 0; n < PAGE && !ret; n++)
			ret = pair->peer.buf[n] == 1 ? 0 : -EBADMSG;
	}
	return ret;
}

/*
 * All pages were used once, by CPU or peer. Then the peer goes on to READ the oldest of
 * them, between any two calls of reclaim, and nobody uses another one.
 */
TEST_F(in_use, pages_that_peers_use_are_not_taken_first)
{
	struct np_pair *pair = &self->pair;
	const size_t first = FIRST_PAGE * PAGE;
	uint8_t *others = np_map(OTHERS_LEN);
	unsigned int gone = 0, rounds = 0;
	uint64_t generation;
	long out, back;

	ASSERT_NE(NULL, others);
	/* A page on its way to a disk does not count yet, and another one is taken for it. */
	ASSERT_EQ(0, np_swap_to_zram(&self->swap));
	ASSERT_EQ(0, np_group_enter("max", "max"));
	/*
	 * Charged to the group but for the last, and those that will be used are the oldest. Not
	 * on a list of a CPU: reclaim does not see them there, and they are not asked about.
	 */
	ASSERT_EQ(0, madvise(pair->data, LAST, MADV_DONTNEED));
	memset(self->data, 1, USED * PAGE);
	ASSERT_EQ(0, np_write_text("/proc/sys/vm/drop_caches", "1"));
	memset(pair->data, 1, NP_DATA_LEN);
	memset(others, 1, OTHERS_LEN);
	for (size_t off = 0; off < NP_DATA_LEN && !variant->unasked; off += HUGE_PAGE) {
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, HUGE_PAGE, 0, NULL));
	}
	for (size_t i = 0; i < USED && variant->unasked; i++) {
		size_t off = first + i * PAGE;

		/* The first of each block; the others come along. */
		if (i && (pair->info.base + off) / PAGE % NP_FAULT_AROUND)
			continue;
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, PAGE, 0, NULL));
	}
	for (size_t i = 0; i < USED; i++)
		ASSERT_TRUE(np_wait_until(np_readable(np_pair_word(pair, first + i * PAGE))));
	generation = np_generation(np_pair_word(pair, first + PAGE));
	out = np_vmstat("pswpout");
	back = np_vmstat("pswpin");
	if (variant->generations) {
		/* It looks at so little memory twice in one call. */
		ASSERT_EQ(0, look_at_all());
		ASSERT_TRUE(np_wait_until(resident(pair->mr) <= 1));
	} else {
		/* No CPU has used any; else it looks at all, and then at the oldest again. */
		ASSERT_EQ(0, np_write_text("/proc/self/clear_refs", "1"));
	}
	while (np_vmstat("pswpout") - out < (long)(OTHERS_LEN / PAGE)) {
		ASSERT_GT(1000, rounds++);
		ASSERT_EQ(0, read_used(pair, self->data));
		group_reclaim("64K");
	}
	out = np_vmstat("pswpout") - out;
	/* Nobody but the peer brings any back. */
	back = np_vmstat("pswpin") - back;
	for (size_t i = 0; i < USED; i++)
		gone += !np_present(self->data + i * PAGE);
	generation = np_generation(np_pair_word(pair, first + PAGE)) - generation;
	TH_LOG("%ld pages were taken in %u rounds; of %u that are used %u are gone and %ld came back; the second changed %lu times",
	       out, rounds, USED, gone, back, (unsigned long)generation);
	/* The oldest first would be all of them. */
	EXPECT_GE(USED / 8, gone + back);
	/* The question costs a fault each time, and is not asked for nothing. */
	EXPECT_LE(2, generation);
}

TEST_HARNESS_MAIN
