// SPDX-License-Identifier: GPL-2.0
/*
 * What peers do not notice, but for the time it takes: changes that the kernel makes to an
 * owner's memory, and that leave its content as it is. Each of them once more while the memory
 * is leased to a peer, and while it is leased to its owner.
 */
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/swap.h>
#include <sys/syscall.h>

#include "np_change.h"
#include "np_leaser.h"
#include "np_zram.h"

#ifndef MADV_COLD
#define MADV_COLD 20
#endif
#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_SOFT_OFFLINE
#define MADV_SOFT_OFFLINE 101
#endif

FIXTURE(kept) {
	struct np_pair pair;
	struct np_load load;
	struct np_leaser leaser;
	uint8_t *data;
	struct np_swap swap;
	bool ksm;
	bool balancing;
};

typedef FIXTURE_DATA(kept) kept;

struct kept_change {
	int (*begin)(kept *self);
	/* One change; how much of it happened, or -errno. */
	long (*change)(kept *self, unsigned int i);
	int rounds;
	long enough;		/* of what happened */
	bool recalls;		/* it makes the kernel ask for leases */
};

FIXTURE_VARIANT(kept) {
	struct kept_change what;
};

/* Once more, while the memory is leased. */
FIXTURE(kept_leased) {
	kept kept;
};

FIXTURE_VARIANT(kept_leased) {
	enum np_leaser_kind lease;
	struct kept_change what;
};

/* It is about what reclaim takes first, and there is none: nothing becomes absent. */
static long change_cold(kept *self, unsigned int i)
{
	struct rdma_np_mr_info before, after;
	int ret = np_query_mr(self->pair.mr, &before);

	if (!ret && madvise(self->data, PAGES * PAGE, MADV_COLD))
		ret = -errno;
	if (!ret)
		ret = np_query_mr(self->pair.mr, &after);
	if (!ret && after.pages_invalidated != before.pages_invalidated)
		ret = -EFAULT;
	return ret ?: before.resident_pages > 0;
}

static long change_page_out(kept *self, unsigned int i)
{
	long out = 0;

	if (madvise(self->data, PAGES * PAGE, MADV_PAGEOUT))
		return -errno;
	for (unsigned int page = 0; page < PAGES; page++)
		out += !np_present(self->data + page * PAGE);
	return out;
}

static int begin_swap(kept *self)
{
	return np_swap_find(&self->swap);
}

/*
 * All of it comes back at once, while the peer has it brought back page by page: how many
 * pages were in swap when it began. Who brings which is a race.
 */
static long change_swap_off(kept *self, unsigned int i)
{
	long out;

	if (madvise(self->data, PAGES * PAGE, MADV_PAGEOUT))
		return -errno;
	out = np_swapped(self->data, PAGES);
	if (swapoff(self->swap.disk))
		return -errno;
	return swapon(self->swap.disk, 0) ? -errno : out;
}

static int begin_zram(kept *self)
{
	return np_swap_to_zram(&self->swap);
}

/* Another page frame each time; the old one is taken out of use. */
static long change_soft_offline(kept *self, unsigned int i)
{
	uint8_t *p = self->data + random_of(i, PAGES) * PAGE;
	uint64_t before = np_frame_of(p);

	if (madvise(p, PAGE, MADV_SOFT_OFFLINE) && errno != EBUSY && errno != EIO)
		return -errno;
	return before && np_frame_of(p) && np_frame_of(p) != before;
}

static int begin_nodes(kept *self)
{
	return access("/sys/devices/system/node/node1", F_OK) ? -ENODEV : 0;
}

/* Where pages are, or with @to not negative: they shall be there. */
static int move_pages(kept *self, int to, int status[PAGES])
{
	int node[PAGES];
	void *page[PAGES];

	for (unsigned int k = 0; k < PAGES; k++) {
		page[k] = self->data + k * PAGE;
		node[k] = to;
	}
	return syscall(SYS_move_pages, 0, (long)PAGES, page, to < 0 ? NULL : node, status,
		       to < 0 ? 0 : 2 /* MPOL_MF_MOVE */) < 0 ? -errno : 0;
}

/* Pages that were on one node before, and are on the other now. */
static long change_node(kept *self, unsigned int i)
{
	int before[PAGES], after[PAGES], to = i % 2;
	int ret = move_pages(self, -1, before);
	long moved = 0;

	ret = ret ?: move_pages(self, to, after);
	ret = ret ?: move_pages(self, -1, after);
	for (unsigned int k = 0; k < PAGES; k++)
		moved += before[k] == !to && after[k] == to;
	return ret ?: moved;
}

#define BALANCING "/sys/kernel/debug/sched/numa_balancing/"

static int begin_balancing(kept *self)
{
	int ret = begin_nodes(self);

	if (!ret)
		ret = np_write_text(BALANCING "scan_delay_ms", "1");
	if (!ret)
		ret = np_write_text(BALANCING "scan_period_min_ms", "1");
	if (!ret)
		ret = np_write_text(BALANCING "scan_period_max_ms", "10");
	if (!ret)
		ret = np_write_text("/proc/sys/kernel/numa_balancing", "1");
	self->balancing = !ret;
	return ret;
}

/* Pages of the region behind which the CPU found a trap, and the peer a page. */
static long change_balancing(kept *self, unsigned int i)
{
	long hints = np_vmstat("numa_hint_faults");
	struct rusage before, after;

	if (!np_load_goes_on(&self->load, 4 * PAGES))
		return -EIO;
	/* The pages are all there: what faults on them is a trap. */
	if (getrusage(RUSAGE_THREAD, &before))
		return -errno;
	for (unsigned int page = 0; page < PAGES; page++)
		(void)*(volatile uint8_t *)(self->data + page * PAGE);
	if (getrusage(RUSAGE_THREAD, &after))
		return -errno;
	hints = np_vmstat("numa_hint_faults") - hints;
	after.ru_minflt -= before.ru_minflt;
	return after.ru_minflt < hints ? after.ru_minflt : hints;
}

#define BLOCK "/sys/devices/system/memory/"

/* The first page, from page @i on, in a memory block that may go; its block, or -1. */
static long movable_block(kept *self, unsigned int i, uint64_t block_pages, uint8_t **page)
{
	char path[128], text[64];

	for (unsigned int k = 0; k < PAGES; k++) {
		uint64_t frame;

		*page = self->data + random_of(i + k, PAGES) * PAGE;
		frame = np_frame_of(*page);
		snprintf(path, sizeof(path), BLOCK "memory%lu/valid_zones",
			 (unsigned long)(frame / block_pages));
		if (frame && np_read_text(path, text, sizeof(text)) > 0 && !strcmp(text, "Movable\n"))
			return frame / block_pages;
	}
	return -1;
}

/*
 * The second node's last block has pages of the kernel in it, and so has each block in
 * which another zone begins: "guests" says how large memory is. Pages are given out
 * from the end, so fill that block, and move to the one below it.
 */
static int begin_blocks(kept *self)
{
	const size_t len = 192 << 20;
	unsigned long node1 = 2;
	unsigned int there = 0;
	int node[PAGES], ret;
	uint8_t *fill;

	if (begin_nodes(self))
		return -ENODEV;
	if (syscall(SYS_set_mempolicy, 2 /* MPOL_BIND */, &node1, 8 * sizeof(node1)))
		return -errno;
	fill = np_map(len);
	for (size_t off = 0; fill && off < len; off += PAGE)
		fill[off] = 1;
	if (!fill || syscall(SYS_set_mempolicy, 0 /* MPOL_DEFAULT */, NULL, 0))
		return -ENOMEM;
	ret = move_pages(self, 1, node);
	ret = ret ?: move_pages(self, -1, node);
	for (unsigned int k = 0; k < PAGES; k++)
		there += node[k] == 1;
	return ret ?: there < PAGES / 2 ? -EAGAIN : 0;
}

/* Takes the memory block of a page offline, and back. */
static long change_block(kept *self, unsigned int i)
{
	char path[128], text[32];
	uint64_t size, frame;
	int node[PAGES], ret;
	uint8_t *page;
	long block;

	/* What is leased has left such blocks. So it goes back, and is leased meanwhile again. */
	if (self->leaser.kind != NP_LEASER_NONE) {
		if (!np_leaser_rest(&self->leaser, true) || move_pages(self, 1, node))
			return -EIO;
		np_leaser_rest(&self->leaser, false);
	}

	if (np_read_text(BLOCK "block_size_bytes", text, sizeof(text)) < 0)
		return -ENODEV;
	size = strtoull(text, NULL, 16) / PAGE;
	block = movable_block(self, i * 7, size, &page);
	if (block < 0)
		return 0;
	snprintf(path, sizeof(path), BLOCK "memory%ld/state", block);
	/* For as long as it takes: offlining ends when all is moved, or with a signal. */
	ret = np_write_text(path, "offline");
	if (ret)
		return ret == -EBUSY ? 0 : ret;
	frame = np_frame_of(page);
	ret = np_write_text(path, "online_movable");
	if (ret)
		return ret;
	return (long)(frame / size) != block;
}

/* All of memory; pages of the region that moved for it. */
static long change_compact(kept *self, unsigned int i)
{
	uint64_t before[PAGES];
	long moved = 0;
	int ret;

	for (unsigned int k = 0; k < PAGES; k++)
		before[k] = np_frame_of(self->data + k * PAGE);
	ret = np_write_text("/proc/sys/vm/compact_memory", "1");
	for (unsigned int k = 0; k < PAGES; k++)
		moved += before[k] && np_frame_of(self->data + k * PAGE) != before[k];
	return ret ?: moved;
}

static long change_cpu(kept *self, unsigned int i)
{
	int ret = np_write_text("/sys/devices/system/cpu/cpu1/online", i % 2 ? "1" : "0");

	return ret ? ret : 1;
}

static int begin_ksm(kept *self)
{
	int ret = np_ksm_start();

	self->ksm = !ret;
	self->load.alike = true;
	self->load.writes_of_8 = 1;
	return ret ? ret : madvise(self->data, PAGES * PAGE, MADV_MERGEABLE) ? -errno : 0;
}

/* Of this process's pages, those that are KSM's. What KSM counts it corrects as it comes by. */
static long pages_merged(void)
{
	FILE *f = fopen("/proc/self/smaps_rollup", "re");
	char line[128];
	long kib = -1;

	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "KSM: %ld kB", &kib) == 1)
			break;
	if (f)
		fclose(f);
	return kib < 0 ? -1 : kib * 1024 / PAGE;
}

/*
 * Pages that were merged and had to be separated by a WRITE. KSM takes a page that has not
 * changed since it looked last, and while nothing is merged WRITEs are faster than it looks:
 * they cease until it has some, and there are some of both then.
 */
static long change_ksm(kept *self, unsigned int i)
{
	long before = np_vmstat("cow_ksm");

	self->load.writes_of_8 = 0;
	if (!np_wait_until(pages_merged() > 0 || atomic_load(&self->load.stop)))
		return -ETIMEDOUT;
	self->load.writes_of_8 = 1;
	return np_wait_until(np_vmstat("cow_ksm") != before ||
			     atomic_load(&self->load.stop)) ? np_vmstat("cow_ksm") - before :
							      -ETIMEDOUT;
}

/* The owner's control group is too small for this and the rest of it. */
static int begin_pressure(kept *self)
{
	return np_group_enter("12M", "max");
}

/*
 * Pages of the region that go for it and are read again for peers. Those that peers use are
 * not the first, and hardly one goes while there are others; so, in the end, the group is to
 * give all it has.
 */
static long change_pressure(kept *self, unsigned int i)
{
	static uint8_t *other;
	struct rdma_np_mr_info before, after;
	int ret;

	if (!other)
		other = np_map(16 << 20);
	if (!other)
		return -ENOMEM;
	ret = np_query_mr(self->pair.mr, &before);
	for (size_t off = 0; off < 16 << 20; off += PAGE)
		other[off] = i;
	/* It says that there was less than that. */
	np_write_text(NP_GROUP "/memory.reclaim", "16M");
	ret = ret ?: np_query_mr(self->pair.mr, &after);
	return ret ?: (long)(after.faults_major - before.faults_major);
}

/*
 * What is proven after it stays; of the rest, pages that the owner gave up and that were
 * taken. Half of the pages are written again before.
 */
static long change_free(kept *self, unsigned int i)
{
	long freed = np_vmstat("pglazyfreed");

	np_load_step(&self->load, 0, PAGES);
	if (madvise(self->data, PAGES * PAGE, MADV_FREE))
		return -errno;
	np_load_lose(&self->load, 0, PAGES);
	for (int k = 0; k < 3; k++)
		np_load_step(&self->load, 0, PAGES);
	if (!np_load_goes_on(&self->load, PAGES / 2))
		return -EIO;
	if (madvise(self->data, PAGES * PAGE, MADV_PAGEOUT))
		return -errno;
	return np_vmstat("pglazyfreed") - freed;
}

#define HUGE_PAGES_OF_DATA (NP_DATA_LEN / HUGE_PAGE)

static int begin_huge(kept *self)
{
	return madvise(self->pair.data, NP_DATA_LEN, MADV_HUGEPAGE) ? -errno : 0;
}

/* Huge pages, which the peer reaches through one leaf each. */
static int wait_for_leaves(kept *self)
{
	struct rdma_np_mr_info info;

	/* None reaches what only its owner uses. */
	if (self->leaser.kind == NP_LEASER_LOCAL)
		return 0;
	return np_wait_until((!np_query_mr(self->pair.mr, &info) &&
			      info.huge_leaves == HUGE_PAGES_OF_DATA) ||
			     atomic_load(&self->load.stop)) ? 0 : -ETIMEDOUT;
}

static int make_huge(kept *self)
{
	int ret = 0;

	/* What is leased is pinned, and pages that are pinned are not collapsed. */
	if (!np_leaser_rest(&self->leaser, true))
		return -EIO;
	/* Not while somebody else has a page in his hands for a moment. */
	if (!np_wait_until(!madvise(self->pair.data, NP_DATA_LEN, MADV_COLLAPSE)))
		ret = -errno;
	ret = ret ?: wait_for_leaves(self);
	np_leaser_rest(&self->leaser, false);
	return ret;
}

/* Pages that went to swap, of what was written through leaves of 2 MiB; the peer has them back. */
static long change_huge_page_out(kept *self, unsigned int i)
{
	int ret = make_huge(self);
	long out;

	if (!ret && !np_load_goes_on(&self->load, PAGES))
		ret = -EIO;
	if (!ret)
		ret = wait_for_leaves(self);
	out = np_vmstat("pswpout");
	if (!ret && madvise(self->pair.data, NP_DATA_LEN, MADV_PAGEOUT))
		ret = -errno;
	return ret ?: np_vmstat("pswpout") - out;
}

/* All of it, and it is written again through the same leaves before it is paged out. */
static long change_huge_free(kept *self, unsigned int i)
{
	long split = np_vmstat("thp_split_pmd");
	int ret = make_huge(self);

	if (ret)
		return ret;
	np_load_step(&self->load, 0, PAGES);
	if (madvise(self->pair.data, NP_DATA_LEN, MADV_FREE))
		return -errno;
	np_load_lose(&self->load, 0, PAGES);
	for (int k = 0; k < 3; k++)
		np_load_step(&self->load, 0, PAGES);
	if (!np_load_goes_on(&self->load, PAGES))
		return -EIO;
	ret = wait_for_leaves(self);
	split = np_vmstat("thp_split_pmd") - split;
	if (!ret && madvise(self->pair.data, NP_DATA_LEN, MADV_PAGEOUT))
		ret = -errno;
	return ret ?: !split;
}

static uint64_t sum_of(const uint64_t *data)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < NP_DATA_LEN / 8; i++)
		sum = sum * 31 + data[i];
	return sum;
}

/* Huge pages that are the child's and its parent's, until the peer writes: split ones. */
static long change_huge_fork(kept *self, unsigned int i)
{
	long split = np_vmstat("thp_split_pmd");
	int ret = make_huge(self), p[2], status;
	pid_t pid;
	char c;

	if (!ret && pipe2(p, O_CLOEXEC))
		ret = -errno;
	if (ret)
		return ret;
	pid = np_fork();
	if (!pid) {
		uint64_t sum = sum_of((uint64_t *)self->pair.data);

		close(p[1]);
		/* The peer's WRITEs are the parent's. */
		_exit(read(p[0], &c, 1) || sum != sum_of((uint64_t *)self->pair.data));
	}
	close(p[0]);
	if (pid < 0 || !np_load_goes_on(&self->load, 4 * PAGES))
		ret = -EIO;
	split = np_vmstat("thp_split_pmd") - split;
	close(p[1]);
	if (pid > 0 && (waitpid(pid, &status, 0) != pid || status))
		ret = -EFAULT;
	return ret ?: split;
}

/* Huge pages that went to the other node as such, and the peer's leaves with them. */
static long change_huge_node(kept *self, unsigned int i)
{
	long moved = np_vmstat("thp_migration_success");
	int ret = make_huge(self), status[PAGES];

	ret = ret ?: move_pages(self, i % 2, status);
	moved = np_vmstat("thp_migration_success") - moved;
	if (!ret && !np_load_goes_on(&self->load, PAGES))
		ret = -EIO;
	ret = ret ?: wait_for_leaves(self);
	return ret ?: moved;
}

static int begin_huge_nodes(kept *self)
{
	return begin_nodes(self) ?: begin_huge(self);
}

static int begin_huge_swap(kept *self)
{
	return begin_swap(self) ?: begin_huge(self);
}

#define KEPT(name, ...) FIXTURE_VARIANT_ADD(kept, name) { .what = { __VA_ARGS__ } }
KEPT(cold, .change = change_cold, .rounds = 50, .enough = 50);
KEPT(page_out, .begin = begin_swap, .change = change_page_out, .rounds = ROUNDS, .enough = 1);
KEPT(freed, .begin = begin_swap, .change = change_free, .rounds = ROUNDS, .enough = 2 * PAGES);
KEPT(huge_page_out, .begin = begin_huge_swap, .change = change_huge_page_out, .rounds = 6,
     .enough = 6 * 512);
KEPT(huge_freed, .begin = begin_huge_swap, .change = change_huge_free, .rounds = 6, .enough = 6);
KEPT(huge_forked, .begin = begin_huge, .change = change_huge_fork, .rounds = 6, .enough = 6);
KEPT(huge_node, .begin = begin_huge_nodes, .change = change_huge_node, .rounds = 6,
     .enough = 6);
KEPT(swap_off, .begin = begin_swap, .change = change_swap_off, .rounds = 5, .enough = 5);
KEPT(zram, .begin = begin_zram, .change = change_page_out, .rounds = ROUNDS, .enough = 1);
KEPT(pressure, .begin = begin_pressure, .change = change_pressure, .rounds = 2, .enough = PAGES);
KEPT(soft_offline, .change = change_soft_offline, .rounds = 30, .enough = 5);
KEPT(node, .begin = begin_nodes, .change = change_node, .rounds = ROUNDS, .enough = 2 * PAGES);
/* How often it comes by depends on how often its traps are met, so on the machine. */
KEPT(balanced, .begin = begin_balancing, .change = change_balancing, .rounds = 10, .enough = 8);
KEPT(offline, .begin = begin_blocks, .change = change_block, .rounds = 4, .enough = 1);
KEPT(cpu, .change = change_cpu, .rounds = 6, .enough = 6);
KEPT(merged, .begin = begin_ksm, .change = change_ksm, .rounds = 20, .enough = 20);

/*
 * Pinned pages do not go, so there is less of each; between two leases of a page they do. Under
 * leases of whole slots huge pages stay what they are, and so do the leaves.
 */
#define LEASED(name, ...)							\
	FIXTURE_VARIANT_ADD(kept_leased, remote_##name) {			\
		.lease = NP_LEASER_REMOTE, .what = { __VA_ARGS__ }		\
	};									\
	FIXTURE_VARIANT_ADD(kept_leased, local_##name) {			\
		.lease = NP_LEASER_LOCAL, .what = { __VA_ARGS__ }		\
	}
LEASED(cold, .change = change_cold, .rounds = 20, .enough = 20);
LEASED(page_out, .begin = begin_swap, .change = change_page_out, .rounds = ROUNDS, .enough = 1);
LEASED(freed, .begin = begin_swap, .change = change_free, .rounds = ROUNDS, .enough = 1);
LEASED(huge_page_out, .begin = begin_huge_swap, .change = change_huge_page_out, .rounds = 3);
LEASED(huge_freed, .begin = begin_huge_swap, .change = change_huge_free, .rounds = 3,
       .enough = 3);
LEASED(huge_forked, .begin = begin_huge, .change = change_huge_fork, .rounds = 3, .enough = 3,
       .recalls = true);
LEASED(huge_node, .begin = begin_huge_nodes, .change = change_huge_node, .rounds = 3);
LEASED(swap_off, .begin = begin_swap, .change = change_swap_off, .rounds = 3, .enough = 1);
LEASED(zram, .begin = begin_zram, .change = change_page_out, .rounds = ROUNDS, .enough = 1);
LEASED(pressure, .begin = begin_pressure, .change = change_pressure, .rounds = 2, .enough = PAGES,
       .recalls = true);
LEASED(soft_offline, .change = change_soft_offline, .rounds = 20, .enough = 2);
LEASED(node, .begin = begin_nodes, .change = change_node, .rounds = ROUNDS, .enough = PAGES,
       .recalls = true);
LEASED(balanced, .begin = begin_balancing, .change = change_balancing, .rounds = 4, .enough = 4,
       .recalls = true);
/* What is leased to its owner leaves blocks that can go offline when it is pinned. */
FIXTURE_VARIANT_ADD(kept_leased, remote_offline) {
	.lease = NP_LEASER_REMOTE,
	.what = { .begin = begin_blocks, .change = change_block, .rounds = 4, .enough = 1 },
};
LEASED(compacted, .change = change_compact, .rounds = 4, .enough = 1);
LEASED(cpu, .change = change_cpu, .rounds = 6, .enough = 6);
LEASED(merged, .begin = begin_ksm, .change = change_ksm, .rounds = 10, .enough = 10);

static void kept_begin(struct __test_metadata *_metadata, kept *self,
		       const struct kept_change *what, enum np_leaser_kind lease)
{
	bool slots = what->begin == begin_huge || what->begin == begin_huge_nodes ||
		     what->begin == begin_huge_swap;

	ASSERT_EQ(0, what->begin == begin_pressure ? begin_pressure(self) : 0);
	ASSERT_EQ(0, memory_open(&self->pair, &self->load, &self->data));
	ASSERT_EQ(0, what->begin && what->begin != begin_pressure ? what->begin(self) : 0);
	ASSERT_EQ(0, np_leaser_init(&self->leaser, lease, &self->load, &self->pair.owner,
				    self->pair.mr, slots));
}

static void kept_end(struct __test_metadata *_metadata, kept *self)
{
	EXPECT_TRUE(np_swap_back(&self->swap));
	EXPECT_EQ(0, self->ksm ? np_ksm_stop() : 0);
	EXPECT_EQ(0, self->balancing ?
		     np_write_text("/proc/sys/kernel/numa_balancing", "0") : 0);
	EXPECT_TRUE(np_group_remove());
	/* As it is already, if the test came to its end. */
	np_write_text("/sys/devices/system/cpu/cpu1/online", "1");
	NP_CHECK_USAGE(&self->pair.before);
}

static void kept_run(struct __test_metadata *_metadata, kept *self,
		     const struct kept_change *what)
{
	struct np_load *load = &self->load;
	uint64_t last = np_now_ms() + NP_WAIT_MS;
	long happened = 0;

	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < what->rounds || (happened < what->enough && np_now_ms() < last); i++) {
		long ret;

		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		ret = what->change(self, i);
		ASSERT_LE(0, ret) TH_LOG("%s", strerror(-ret));
		happened += ret;
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_LE(what->enough, happened);
	EXPECT_EQ(0, load->refused);
}

FIXTURE_SETUP(kept)
{
	kept_begin(_metadata, self, &variant->what, NP_LEASER_NONE);
}

FIXTURE_TEARDOWN_PARENT(kept)
{
	kept_end(_metadata, self);
}

TEST_F(kept, loses_nothing)
{
	kept_run(_metadata, self, &variant->what);
}

FIXTURE_SETUP(kept_leased)
{
	kept_begin(_metadata, &self->kept, &variant->what, variant->lease);
}

FIXTURE_TEARDOWN_PARENT(kept_leased)
{
	kept_end(_metadata, &self->kept);
}

TEST_F(kept_leased, loses_nothing)
{
	struct np_leaser *leaser = &self->kept.leaser;

	kept_run(_metadata, &self->kept, &variant->what);
	TH_LOG("%lu leases, %lu recalls, %lu requests under them", leaser->leases,
	       np_leaser_recalls(leaser), leaser->uses);
	EXPECT_LT(10 * PAGES, leaser->uses);
	EXPECT_LE(variant->what.recalls, np_leaser_recalls(leaser));
}

FIXTURE(kept_readers) {
	struct np_pair pair;
	struct np_load load;
	uint8_t *data;
	bool balancing;
};

FIXTURE_SETUP(kept_readers)
{
	kept scan = {};

	ASSERT_EQ(0, memory_open(&self->pair, &self->load, &self->data));
	ASSERT_EQ(0, begin_balancing(&scan));
	self->balancing = scan.balancing;
}

FIXTURE_TEARDOWN_PARENT(kept_readers)
{
	if (self->balancing) {
		EXPECT_EQ(0, np_write_text("/proc/sys/kernel/numa_balancing", "0"));
	}
	NP_CHECK_USAGE(&self->pair.before);
}

/*
 * A trap for the CPU is no change of the page: readers keep their leaves, and writers lose
 * theirs, which tells that it was these pages. The owner's CPU does not touch them.
 */
TEST_F(kept_readers, do_not_notice_traps_of_numa_balancing)
{
	struct np_load *load = &self->load;
	struct rdma_np_mr_info info;

	load->writes_of_8 = 0;
	for (int i = 0; i < ROUNDS; i++) {
		long traps = np_vmstat("numa_pte_updates");

		/* This touches them, and there is no trap yet. */
		ASSERT_EQ(0, np_write_text("/proc/sys/kernel/numa_balancing", "0"));
		for (unsigned int page = 0; page < PAGES; page++)
			*(volatile uint8_t *)(self->data + page * PAGE) = 1;
		ASSERT_EQ(RDMA_NP_OK, prefault(&self->pair));
		ASSERT_EQ(0, np_load_start(load));
		ASSERT_LOAD(np_load_goes_on(load, 10));
		ASSERT_EQ(0, np_query_mr(self->pair.mr, &info));
		ASSERT_EQ(PAGES, info.writable_pages);
		ASSERT_EQ(0, load->suspicious);
		ASSERT_EQ(0, np_write_text("/proc/sys/kernel/numa_balancing", "1"));
		ASSERT_TRUE(np_wait_until(!np_query_mr(self->pair.mr, &info) &&
					  !info.writable_pages))
			TH_LOG("%llu pages are writable", info.writable_pages);
		EXPECT_LE(traps + PAGES, np_vmstat("numa_pte_updates"));
		ASSERT_LOAD(np_load_goes_on(load, 2 * PAGES));
		ASSERT_EQ(0, np_query_mr(self->pair.mr, &info));
		EXPECT_EQ(PAGES, info.resident_pages);
		EXPECT_EQ(0, load->suspicious);
		EXPECT_EQ(0, load->faults);
		ASSERT_TRUE(np_load_stop(load)) TH_LOG("%s", np_load_why(load));
		load->stop = false;
	}
	ASSERT_EQ(0, np_load_start(load));
	EXPECT_RIGHT(load);
}

TEST_HARNESS_MAIN
