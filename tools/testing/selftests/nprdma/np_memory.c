// SPDX-License-Identifier: GPL-2.0
/*
 * The life of memory under traffic: for each way in which the owner's memory can
 * change, a peer READs and WRITEs all the while (np_load.h). What is promised for
 * each is in Documentation/infiniband/nprdma-memory.rst, which names these tests.
 */
#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/kernel-page-flags.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/syscall.h>

#include "np_harness.h"
#include "np_load.h"

#ifndef SYS_memfd_secret
#define SYS_memfd_secret 447
#endif

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

#define PAGES		NP_LOAD_PAGES
#define FIRST_PAGE	(512 - PAGES / 2)	/* on both sides of a slot's end */
#define ROUNDS		12

#define ASSERT_LOAD(condition) ASSERT_TRUE(condition) TH_LOG("%s", np_load_why(load))

static long read_file(const char *path, char *text, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;

	if (fd < 0)
		return -errno;
	n = read(fd, text, size - 1);
	close(fd);
	text[n < 0 ? 0 : n] = 0;
	return n < 0 ? -EIO : n;
}

static uint64_t random_of(uint64_t n, uint64_t bound)
{
	return np_pattern(4711, n) % bound;
}

/* --- swap ----------------------------------------------------------------------------- */

struct swap {
	char disk[300];		/* that was there before, to be put back */
	bool zram;
};

static int swap_find(struct swap *swap)
{
	char text[2000], *line;

	if (!np_disk_swap() || read_file("/proc/swaps", text, sizeof(text)) < 0)
		return -ENODEV;
	line = strchr(text, '\n');
	if (!line || !line[1])
		return -ENODEV;
	snprintf(swap->disk, sizeof(swap->disk), "%.*s", (int)strcspn(line + 1, " \t"), line + 1);
	return 0;
}

/* What mkswap writes, on a memory that is its own disk. */
static int swap_to_zram(struct swap *swap)
{
	uint8_t page[PAGE] = {};
	uint32_t info[3] = { 1, (64 << 20) / PAGE - 1, 0 };
	int ret = swap_find(swap), fd;

	if (!ret)
		ret = np_write_text("/sys/block/zram0/disksize", "64M");
	if (ret)
		return ret;
	memcpy(page + 1024, info, sizeof(info));
	memcpy(page + PAGE - 10, "SWAPSPACE2", 10);
	fd = open("/dev/zram0", O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (write(fd, page, PAGE) != PAGE || fsync(fd))
		ret = -EIO;
	close(fd);
	if (!ret && (swapoff(swap->disk) || swapon("/dev/zram0", 0)))
		ret = -errno;
	swap->zram = !ret;
	return ret;
}

/* What swap_to_zram() did, if it did, undone. */
static bool swap_back(const struct swap *swap)
{
	return !swap->zram || (!swapoff("/dev/zram0") &&
			       !np_write_text("/sys/block/zram0/reset", "1") &&
			       !swapon(swap->disk, 0));
}

FIXTURE(memory) {
	struct np_pair pair;
	struct np_load load;
	struct swap swap;
	uint8_t *data;		/* of the first page that the peer uses */
};

static int memory_open(struct np_pair *pair, struct np_load *load, uint8_t **data)
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

FIXTURE_SETUP(memory)
{
	ASSERT_EQ(0, memory_open(&self->pair, &self->load, &self->data));
}

FIXTURE_TEARDOWN_PARENT(memory)
{
	EXPECT_TRUE(swap_back(&self->swap));
	EXPECT_TRUE(np_group_remove());
	NP_CHECK_USAGE(&self->pair.before);
}

#define EXPECT_RIGHT(load)						\
	do {								\
		EXPECT_TRUE(np_load_stop(load))				\
			TH_LOG("%s", np_load_why(load));		\
		EXPECT_EQ(-1, np_load_differs(load));			\
		TH_LOG("%lu READs, %lu WRITEs, %lu faults, %lu refused", (load)->reads, \
		       (load)->writes, atomic_load(&(load)->faults),	\
		       atomic_load(&(load)->refused));			\
	} while (0)

/* --- protection and fork ------------------------------------------------------------ */

/* All pages writable for the peer; before the load starts, or with it at rest. */
static int prefault(struct np_pair *pair)
{
	return np_pair_fault(pair, FIRST_PAGE * PAGE, PAGES * PAGE, RDMA_NP_FAULT_WRITE, NULL);
}

static pid_t fork_and_wait(int *hold)
{
	int p[2];
	pid_t pid;
	char c;

	if (pipe2(p, O_CLOEXEC))
		return -1;
	pid = np_fork();
	if (!pid) {
		close(p[1]);
		_exit(read(p[0], &c, 1) != 0);
	}
	close(p[0]);
	*hold = p[1];
	return pid;
}

TEST_F(memory, fork_leaves_readers_alone)
{
	struct np_load *load = &self->load;
	struct rdma_np_mr_info info, after;
	int hold, status;
	pid_t pid;

	load->writes_of_8 = 0;
	ASSERT_EQ(0, np_load_start(load));
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	ASSERT_TRUE(np_load_stop(load));
	load->stop = false;
	for (int i = 0; i < ROUNDS; i++) {
		ASSERT_EQ(RDMA_NP_OK, prefault(&self->pair));
		atomic_store(&load->suspicious, 0);
		ASSERT_EQ(0, np_query_mr(self->pair.mr, &info));
		ASSERT_EQ(PAGES, info.resident_pages);
		ASSERT_EQ(PAGES, info.writable_pages);
		ASSERT_EQ(0, np_load_start(load));
		ASSERT_LOAD(np_load_goes_on(load, 20));
		pid = fork_and_wait(&hold);
		ASSERT_LT(0, pid);
		ASSERT_LOAD(np_load_goes_on(load, 20));
		ASSERT_EQ(0, np_query_mr(self->pair.mr, &info));
		EXPECT_EQ(PAGES, info.resident_pages);
		EXPECT_EQ(0, info.writable_pages);
		EXPECT_EQ(0, atomic_load(&load->suspicious));
		/* Copy on write by the parent does move pages, one at a time. */
		for (unsigned int page = 0; page < 4; page++) {
			np_load_store(load, page);
			ASSERT_LOAD(np_load_goes_on(load, 10));
		}
		ASSERT_EQ(0, np_query_mr(self->pair.mr, &after));
		EXPECT_EQ(info.pages_invalidated + 4, after.pages_invalidated);
		close(hold);
		ASSERT_EQ(pid, waitpid(pid, &status, 0));
		EXPECT_EQ(0, status);
		ASSERT_TRUE(np_load_stop(load));
		load->stop = false;
	}
	ASSERT_EQ(0, np_load_start(load));
	EXPECT_RIGHT(load);
}

TEST_F(memory, protection_against_writes_leaves_readers_alone)
{
	struct np_load *load = &self->load;
	struct rdma_np_mr_info info;

	load->writes_of_8 = 0;
	ASSERT_EQ(RDMA_NP_OK, prefault(&self->pair));
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < 10 * ROUNDS; i++) {
		/* All of the mapping: cutting it might mean to cut huge pages. */
		ASSERT_EQ(0, mprotect(self->pair.data, NP_DATA_LEN,
				      i % 2 ? PROT_READ | PROT_WRITE : PROT_READ));
		ASSERT_LOAD(np_load_goes_on(load, 5));
		ASSERT_EQ(0, np_query_mr(self->pair.mr, &info));
		ASSERT_EQ(PAGES, info.resident_pages);
		ASSERT_EQ(0, info.writable_pages);
	}
	EXPECT_RIGHT(load);
	EXPECT_EQ(0, load->suspicious);
	EXPECT_EQ(0, load->faults);
}

TEST_F(memory, owners_stores_after_fork_are_read_at_once)
{
	struct np_load *load = &self->load;
	int hold, status;
	pid_t pid;

	load->writes_of_8 = 0;
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		ASSERT_LOAD(np_load_goes_on(load, 50));
		pid = fork_and_wait(&hold);
		ASSERT_LT(0, pid);
		for (unsigned int page = 0; page < PAGES; page += 3)
			np_load_store(load, page);
		ASSERT_LOAD(np_load_goes_on(load, 50));
		close(hold);
		ASSERT_EQ(pid, waitpid(pid, &status, 0));
		EXPECT_EQ(0, status);
		for (unsigned int page = 0; page < PAGES; page += 2)
			np_load_store(load, page);
	}
	EXPECT_RIGHT(load);
}

TEST_F(memory, madv_dontfork_leaves_writers_alone)
{
	struct np_load *load = &self->load;
	struct rdma_np_mr_info info, after;
	int hold, status;
	pid_t pid;

	ASSERT_EQ(0, madvise(self->pair.data, NP_DATA_LEN, MADV_DONTFORK));
	ASSERT_EQ(RDMA_NP_OK, prefault(&self->pair));
	ASSERT_EQ(0, np_query_mr(self->pair.mr, &info));
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		pid = fork_and_wait(&hold);
		ASSERT_LT(0, pid);
		ASSERT_LOAD(np_load_goes_on(load, 50));
		close(hold);
		ASSERT_EQ(pid, waitpid(pid, &status, 0));
		EXPECT_EQ(0, status);
	}
	ASSERT_EQ(0, np_query_mr(self->pair.mr, &after));
	EXPECT_EQ(info.pages_invalidated, after.pages_invalidated);
	EXPECT_RIGHT(load);
	EXPECT_EQ(0, load->faults);
}

TEST_F(memory, protection_is_the_peers_too)
{
	struct np_load *load = &self->load;

	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		unsigned int first = random_of(i, PAGES - 8);
		uint8_t *p = self->data + first * PAGE;
		bool none = i % 2;

		ASSERT_LOAD(np_load_goes_on(load, 50));
		np_load_step(load, first, 8);
		ASSERT_EQ(0, mprotect(p, 8 * PAGE, none ? PROT_NONE : PROT_READ));
		np_load_gone(load, first, 8, none ? RDMA_NP_ADDRESS : RDMA_NP_OK,
			     none ? RDMA_NP_ADDRESS : RDMA_NP_ACCESS);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		np_load_step(load, first, 8);
		ASSERT_EQ(0, mprotect(p, 8 * PAGE, PROT_READ | PROT_WRITE));
		np_load_step(load, first, 8);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
}

/* What checkpoints go by: a peer's WRITE makes a page dirty as the CPU's store does. */
static bool soft_dirty(const void *addr)
{
	int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	uint64_t entry = 0;

	if (fd < 0)
		return false;
	if (pread(fd, &entry, 8, (uintptr_t)addr / PAGE * 8) != 8)
		entry = 0;
	close(fd);
	return entry >> 55 & 1;
}

TEST_F(memory, soft_dirty_pages_are_those_that_peers_write)
{
	struct np_load *load = &self->load;
	struct np_pair *pair = &self->pair;
	struct rdma_np_mr_info info;

	ASSERT_EQ(RDMA_NP_OK, prefault(pair));
	for (int i = 0; i < ROUNDS; i++) {
		unsigned int page = random_of(i, PAGES);
		size_t off = (FIRST_PAGE + page) * PAGE;

		ASSERT_EQ(0, np_write_text("/proc/self/clear_refs", "4"));
		/* Readers stay. */
		ASSERT_EQ(0, np_query_mr(pair->mr, &info));
		EXPECT_EQ(PAGES, info.resident_pages);
		EXPECT_EQ(0, info.writable_pages);
		ASSERT_EQ(0, np_pair_read(pair, FIRST_PAGE * PAGE, PAGES * PAGE));
		np_fill(pair->peer.buf, PAGE, i);
		ASSERT_EQ(0, np_write_proven(&pair->peer, &pair->info, 0, off, PAGE));
		for (unsigned int k = 0; k < PAGES; k++) {
			EXPECT_EQ(k == page, soft_dirty(self->data + k * PAGE));
		}
	}
	/* And while the peer writes all the time nothing is lost. */
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < 5 * ROUNDS; i++) {
		ASSERT_EQ(0, np_write_text("/proc/self/clear_refs", "4"));
		ASSERT_LOAD(np_load_goes_on(load, 20));
	}
	EXPECT_RIGHT(load);
}

/* --- mappings that come and go --------------------------------------------------------- */

TEST_F(memory, unmapped_pages_are_address_errors_until_others_are_there)
{
	struct np_load *load = &self->load;

	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		unsigned int first = random_of(i, PAGES - 8);
		uint8_t *p = self->data + first * PAGE;

		ASSERT_LOAD(np_load_goes_on(load, 50));
		np_load_step(load, first, 8);
		ASSERT_EQ(0, munmap(p, 8 * PAGE));
		np_load_lose_for_zeros(load, first, 8);
		np_load_gone(load, first, 8, RDMA_NP_ADDRESS, RDMA_NP_ADDRESS);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		np_load_step(load, first, 8);
		ASSERT_EQ(p, mmap(p, 8 * PAGE, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
		np_load_step(load, first, 8);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_LT(0, load->zeros);
}

TEST_F(memory, moved_pages_are_reached_when_they_are_back)
{
	struct np_load *load = &self->load;
	uint8_t *away = np_map(HUGE_PAGE);

	ASSERT_NE(NULL, away);
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		unsigned int first = random_of(i, PAGES - 8);
		uint8_t *p = self->data + first * PAGE;

		ASSERT_LOAD(np_load_goes_on(load, 50));
		np_load_step(load, first, 8);
		ASSERT_EQ(away, mremap(p, 8 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
				       away));
		np_load_gone(load, first, 8, RDMA_NP_ADDRESS, RDMA_NP_ADDRESS);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		np_load_step(load, first, 8);
		ASSERT_EQ(p, mremap(away, 8 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, p));
		np_load_step(load, first, 8);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
}

TEST_F(memory, shrunk_and_grown_mapping_loses_its_tail_only)
{
	const unsigned int first = 40, n = PAGES - 40;
	const size_t off = (FIRST_PAGE + first) * PAGE;
	struct np_load *load = &self->load;
	struct np_pair *pair = &self->pair;
	uint8_t *start = self->data, *end = start + PAGES * PAGE;

	/* So that there is room to grow. */
	ASSERT_EQ(0, munmap(end, self->pair.data + NP_DATA_LEN - end));
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		ASSERT_LOAD(np_load_goes_on(load, 50));
		np_load_step(load, first, n);
		ASSERT_EQ(start, mremap(start, PAGES * PAGE, first * PAGE, 0));
		np_load_lose_for_zeros(load, first, n);
		np_load_gone(load, first, n, RDMA_NP_ADDRESS, RDMA_NP_ADDRESS);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		np_load_step(load, first, n);
		ASSERT_EQ(start, mremap(start, first * PAGE, PAGES * PAGE, 0));
		np_load_step(load, first, n);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_LT(0, load->zeros);
	/* Nobody writes now: what was cut off does not come back when the mapping grows. */
	for (int write = 0; write < 2; write++) {
		memset(pair->data + off, 1, n * PAGE);
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, n * PAGE, RDMA_NP_FAULT_WRITE, NULL));
		ASSERT_EQ(0, np_pair_read(pair, off, n * PAGE));
		ASSERT_TRUE(np_all(pair->peer.buf, n * PAGE, 0x0101010101010101));
		ASSERT_EQ(start, mremap(start, PAGES * PAGE, first * PAGE, 0));
		ASSERT_EQ(start, mremap(start, first * PAGE, PAGES * PAGE, 0));
		ASSERT_EQ(0, np_pair_read(pair, off, n * PAGE));
		EXPECT_TRUE(np_all(pair->peer.buf, n * PAGE, pair->info.signature));
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, n * PAGE, write ? RDMA_NP_FAULT_WRITE : 0,
					       NULL));
		ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, off, n * PAGE));
		EXPECT_TRUE(np_all(pair->peer.buf, n * PAGE, 0));
		EXPECT_TRUE(np_all(pair->data + off, n * PAGE, 0));
	}
}

/*
 * Whole slots move with one entry of the level above: that of a page table with all its
 * pages, or that of a huge page.
 */
FIXTURE(slot) {
	struct np_pair pair;
	struct np_load load;
	uint8_t *data;
	uint8_t *away;		/* where there is room for one */
};

FIXTURE_VARIANT(slot) {
	bool huge;
};

FIXTURE_VARIANT_ADD(slot, page_table) {};
FIXTURE_VARIANT_ADD(slot, huge_page) { .huge = true };

FIXTURE_SETUP(slot)
{
	ASSERT_EQ(0, memory_open(&self->pair, &self->load, &self->data));
	self->away = np_map(HUGE_PAGE);
	ASSERT_NE(NULL, self->away);
	if (variant->huge) {
		ASSERT_EQ(0, madvise(self->pair.data, NP_DATA_LEN, MADV_HUGEPAGE));
		/* Not while somebody else has a page in his hands for a moment. */
		ASSERT_TRUE(np_wait_until(!madvise(self->pair.data, NP_DATA_LEN, MADV_COLLAPSE)));
	}
}

FIXTURE_TEARDOWN_PARENT(slot)
{
	NP_CHECK_USAGE(&self->pair.before);
}

static unsigned int leaves(struct ibv_mr *mr)
{
	struct rdma_np_mr_info info;

	return np_query_mr(mr, &info) ? ~0U : info.huge_leaves;
}

TEST_F(slot, moved_away_is_reached_when_it_is_back)
{
	const unsigned int n = PAGES / 2, want = variant->huge ? NP_DATA_LEN / HUGE_PAGE : 0;
	const long split = np_vmstat("thp_split_pmd");
	struct np_load *load = &self->load;
	uint8_t *away = self->away;

	/* A hold would split a leaf. */
	load->no_holds = variant->huge;
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		const unsigned int slot = i / 2 % 2;
		uint8_t *p = self->pair.data + slot * HUGE_PAGE;
		/* Of the pages that are used half are in each slot. */
		uint8_t *used = self->data + slot * n * PAGE;
		uint64_t frame;

		ASSERT_LOAD(np_load_goes_on(load, 2 * PAGES));
		ASSERT_TRUE(np_wait_until(leaves(self->pair.mr) == want));
		frame = np_frame_of(used);
		ASSERT_NE(0, frame);
		np_load_step(load, slot * n, n);
		ASSERT_EQ(away, mremap(p, HUGE_PAGE, HUGE_PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
				       away));
		np_load_gone(load, slot * n, n, RDMA_NP_ADDRESS, RDMA_NP_ADDRESS);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		EXPECT_EQ(frame, np_frame_of(away + (used - p)));
		EXPECT_EQ(want / 2, leaves(self->pair.mr));
		np_load_step(load, slot * n, n);
		ASSERT_EQ(p, mremap(away, HUGE_PAGE, HUGE_PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, p));
		np_load_step(load, slot * n, n);
		/* So that nobody else moves in. */
		ASSERT_EQ(away, mmap(away, HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS |
				     MAP_FIXED_NOREPLACE, -1, 0));
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_EQ(split, np_vmstat("thp_split_pmd"));
}

/* MREMAP_DONTUNMAP: the pages go, and the mapping stays. */
TEST_F(slot, moved_pages_leave_zeros_where_the_mapping_stays)
{
	struct np_pair *pair = &self->pair;
	uint8_t *p = pair->data + HUGE_PAGE, *away = self->away;

	np_fill(p, HUGE_PAGE, 1);
	for (size_t off = 0; off < NP_DATA_LEN; off += HUGE_PAGE) {
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, HUGE_PAGE, RDMA_NP_FAULT_WRITE, NULL));
	}
	ASSERT_EQ(variant->huge ? NP_DATA_LEN / HUGE_PAGE : 0, leaves(pair->mr));
	ASSERT_EQ(0, np_pair_read(pair, HUGE_PAGE, HUGE_PAGE));
	ASSERT_EQ(-1, np_differs(pair->peer.buf, HUGE_PAGE, 1));
	ASSERT_EQ(away, mremap(p, HUGE_PAGE, HUGE_PAGE,
			       MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, away));
	/* A WRITE that does not ask goes nowhere, a READ brings nothing. */
	memset(pair->peer.buf, 2, HUGE_PAGE);
	ASSERT_EQ(0, np_pair_write(pair, HUGE_PAGE, HUGE_PAGE));
	ASSERT_EQ(0, np_pair_read(pair, HUGE_PAGE, HUGE_PAGE));
	EXPECT_TRUE(np_all(pair->peer.buf, HUGE_PAGE, pair->info.signature));
	EXPECT_EQ(-1, np_differs(away, HUGE_PAGE, 1));
	ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, HUGE_PAGE, HUGE_PAGE));
	EXPECT_TRUE(np_all(pair->peer.buf, HUGE_PAGE, 0));
	/* And one that does goes where the region is. */
	for (size_t off = 0; off < HUGE_PAGE; off += 100 * PAGE) {
		np_fill(pair->peer.buf, PAGE, 3);
		ASSERT_EQ(0, np_write_proven(&pair->peer, &pair->info, 0, HUGE_PAGE + off, PAGE));
		EXPECT_EQ(-1, np_differs(p + off, PAGE, 3));
		EXPECT_TRUE(np_all(p + off + PAGE, PAGE, 0));
	}
	EXPECT_EQ(-1, np_differs(away, HUGE_PAGE, 1));
}

static atomic_int poisoned;

static void on_poison(int number, siginfo_t *info, void *context)
{
	poisoned += info->si_code == BUS_MCEERR_AR;
}

TEST_F(memory, poisoned_page_is_an_address_error_until_it_is_replaced)
{
	struct sigaction action = { .sa_sigaction = on_poison, .sa_flags = SA_SIGINFO };
	struct np_load *load = &self->load;

	ASSERT_EQ(0, sigaction(SIGBUS, &action, NULL));
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		unsigned int page = random_of(i, PAGES);
		uint8_t *p = self->data + page * PAGE;

		ASSERT_LOAD(np_load_goes_on(load, 50));
		np_load_step(load, page, 1);
		/* Not while somebody else has the page in his hands for a moment. */
		ASSERT_TRUE(np_wait_until(!madvise(p, PAGE, MADV_HWPOISON) || errno != EBUSY));
		EXPECT_EQ(i + 1, poisoned);
		ASSERT_FALSE(np_present(p));
		np_load_lose_for_zeros(load, page, 1);
		np_load_gone(load, page, 1, RDMA_NP_ADDRESS, RDMA_NP_ADDRESS);
		ASSERT_LOAD(np_load_is_refused(load, 2));
		np_load_step(load, page, 1);
		ASSERT_EQ(p, mmap(p, PAGE, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
		np_load_step(load, page, 1);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_LT(0, load->zeros);
}

/*
 * A page that was only read since it came from swap is there as well: the kernel forgets
 * the frame and reads the page once more, for its owner and for peers.
 */
TEST_F(memory, poisoned_page_that_swap_still_has_comes_back)
{
	struct np_pair *pair = &self->pair;
	struct np_end *peer = &pair->peer;

	ASSERT_TRUE(np_disk_swap()) TH_LOG("swap on a disk is needed: scripts/vm run --swap 512M");
	for (int i = 0; i < ROUNDS; i++) {
		uint8_t *p = self->data + random_of(i, PAGES) * PAGE;
		size_t off = p - pair->data;

		np_fill(p, PAGE, i);
		ASSERT_EQ(0, np_page_out(p, PAGE));
		ASSERT_EQ(0, np_read_proven(peer, &pair->info, 0, off, PAGE));
		ASSERT_TRUE(np_present(p));
		ASSERT_TRUE(np_wait_until(!madvise(p, PAGE, MADV_HWPOISON) || errno != EBUSY));
		ASSERT_FALSE(np_present(p));
		memset(peer->buf, 0xff, PAGE);
		ASSERT_EQ(0, np_read_proven(peer, &pair->info, 0, off, PAGE));
		EXPECT_EQ(-1, np_differs(peer->buf, PAGE, i));
		EXPECT_EQ(-1, np_differs(p, PAGE, i));
	}
}

/* Bits of linux/kernel-page-flags.h, of the frame that a page is in; 0: in none. */
static uint64_t frame_flags(const uint8_t *p)
{
	uint64_t entry = 0, flags = 0;
	int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	int all = open("/proc/kpageflags", O_RDONLY | O_CLOEXEC);

	if (pread(map, &entry, sizeof(entry), (uintptr_t)p / PAGE * sizeof(entry)) ==
	    sizeof(entry) && entry >> 63)
		pread(all, &flags, sizeof(flags), (entry & ((1ULL << 55) - 1)) * sizeof(flags));
	close(map);
	close(all);
	return flags;
}

/*
 * What is held is pinned, and a huge page with a pin in it is not split: the kernel says so
 * and leaves it where it is. Split it is before the test ends: freed whole, it would give its
 * bad frame to whoever comes next, who would lose it when it is paged out.
 */
TEST_F(memory, poisoned_page_stays_while_its_huge_page_is_held)
{
	struct sigaction action = { .sa_sigaction = on_poison, .sa_flags = SA_SIGINFO };
	const uint64_t huge = 1ULL << KPF_THP, bad = 1ULL << KPF_HWPOISON;
	struct np_pair *pair = &self->pair;
	struct np_end *peer = &pair->peer;
	uint8_t *p = pair->data + 7 * PAGE;
	struct rdma_np_hold_info info;
	int64_t hold;

	ASSERT_EQ(0, sigaction(SIGBUS, &action, NULL));
	ASSERT_EQ(0, madvise(pair->data, HUGE_PAGE, MADV_HUGEPAGE));
	np_fill(pair->data, HUGE_PAGE, 1);
	ASSERT_TRUE(np_wait_until(!madvise(pair->data, HUGE_PAGE, MADV_COLLAPSE)));
	hold = np_hold(pair->mr, (uintptr_t)pair->data, PAGE, RDMA_NP_FAULT_WRITE, &info);
	ASSERT_LE(0, hold);
	ASSERT_NE(0, frame_flags(p) & huge);
	ASSERT_EQ(-1, madvise(p, PAGE, MADV_HWPOISON));
	EXPECT_EQ(EHWPOISON, errno);
	EXPECT_EQ(1, poisoned);
	ASSERT_EQ(huge | bad, frame_flags(p) & (huge | bad));
	ASSERT_EQ(0, np_read_proven(peer, &pair->info, 0, 0, HUGE_PAGE));
	EXPECT_EQ(-1, np_differs(peer->buf, HUGE_PAGE, 1));
	EXPECT_EQ(-1, np_differs(pair->data, HUGE_PAGE, 1));
	np_hold_free(pair->owner.ctx, hold);
	ASSERT_TRUE(np_wait_until(!madvise(p, PAGE, MADV_COLD) &&
				  (frame_flags(p) & (huge | bad)) == bad));
	ASSERT_EQ(0, np_read_proven(peer, &pair->info, 0, 0, HUGE_PAGE));
	EXPECT_EQ(-1, np_differs(peer->buf, HUGE_PAGE, 1));
}

/*
 * Nothing is pinned here, so a huge page is split, and only the bad one of its pages is lost.
 * Peers reach all of it by one leaf just before.
 */
TEST_F(slot, poisoned_page_goes_alone)
{
	const unsigned int n = PAGES / 2, want = variant->huge ? NP_DATA_LEN / HUGE_PAGE : 0;
	const uint64_t bits = 1ULL << KPF_LRU | (variant->huge ? 1ULL << KPF_THP : 0);
	struct sigaction action = { .sa_sigaction = on_poison, .sa_flags = SA_SIGINFO };
	struct np_load *load = &self->load;
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, sigaction(SIGBUS, &action, NULL));
	/* A hold would split a leaf, and keep a huge page from being split. */
	load->no_holds = true;
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		const unsigned int page = i % 2 * n + random_of(i, n);
		uint8_t *p = self->data + page * PAGE;

		ASSERT_LOAD(np_load_goes_on(load, 2 * PAGES));
		ASSERT_TRUE(np_wait_until(leaves(pair->mr) == want));
		/* Nobody has it in his hands, nor is it on a list of a CPU. */
		ASSERT_TRUE(np_wait_until((frame_flags(p) & bits) == bits));
		np_load_step(load, page, 1);
		ASSERT_EQ(0, madvise(p, PAGE, MADV_HWPOISON)) TH_LOG("%s", strerror(errno));
		EXPECT_EQ(i + 1, poisoned);
		ASSERT_FALSE(np_present(p));
		ASSERT_TRUE(np_present(p - PAGE));
		ASSERT_TRUE(np_present(p + PAGE));
		np_load_lose_for_zeros(load, page, 1);
		np_load_gone(load, page, 1, RDMA_NP_ADDRESS, RDMA_NP_ADDRESS);
		ASSERT_LOAD(np_load_is_refused(load, 2));
		ASSERT_LOAD(np_load_goes_on(load, 2 * PAGES));
		np_load_step(load, page, 1);
		/* Another mapping in its place would not be part of a huge page any more. */
		ASSERT_EQ(0, madvise(p, PAGE, MADV_DONTNEED));
		np_load_step(load, page, 1);
		if (variant->huge) {
			ASSERT_TRUE(np_wait_until(!madvise(pair->data, NP_DATA_LEN,
							   MADV_COLLAPSE)));
		}
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_LT(0, load->zeros);
}

/* --- holds in movable memory ------------------------------------------------------------ */

#define HOLDERS		3
#define HOLD_ROUNDS	200

struct holder {
	struct np_pair *pair;
	uint8_t *data;
	pthread_barrier_t *meet;
	pthread_t thread;
	int64_t failed;		/* the first error */
};

static void *hold_again_and_again(void *arg)
{
	struct holder *h = arg;

	for (int i = 0; i < HOLD_ROUNDS; i++) {
		struct rdma_np_hold_info info;
		int64_t hold;

		/* Pages that are brought in anew, for whom all memory is good enough. */
		if (pthread_barrier_wait(h->meet) == PTHREAD_BARRIER_SERIAL_THREAD) {
			madvise(h->data, 16 * PAGE, MADV_DONTNEED);
			memset(h->data, i, 16 * PAGE);
		}
		pthread_barrier_wait(h->meet);
		hold = np_hold(h->pair->mr, (uintptr_t)h->data, 16 * PAGE, RDMA_NP_FAULT_WRITE, &info);
		if (hold < 0)
			h->failed = h->failed ?: hold;
		else
			np_hold_free(h->pair->owner.ctx, hold);
	}
	return NULL;
}

/*
 * Memory that may go offline cannot be pinned: what is to be held has to move first,
 * and whoever else holds it at that moment keeps it from moving.
 */
TEST_F(memory, holds_that_meet_in_movable_memory_all_succeed)
{
	long moved = np_vmstat("pgmigrate_success");
	struct holder holder[HOLDERS];
	pthread_barrier_t meet;

	ASSERT_EQ(0, pthread_barrier_init(&meet, NULL, HOLDERS));
	for (int i = 0; i < HOLDERS; i++) {
		holder[i] = (struct holder){
			.pair = &self->pair, .data = self->data, .meet = &meet,
		};
		ASSERT_EQ(0, pthread_create(&holder[i].thread, NULL, hold_again_and_again,
					    &holder[i]));
	}
	for (int i = 0; i < HOLDERS; i++) {
		ASSERT_EQ(0, pthread_join(holder[i].thread, NULL));
		EXPECT_EQ(0, holder[i].failed);
	}
	/* There is such memory, and it was used. */
	EXPECT_LE(moved + HOLD_ROUNDS, np_vmstat("pgmigrate_success"));
}

/* --- what pinning refuses ---------------------------------------------------------------- */

/* Of a region of two pages of such memory, which nobody looked at until a peer asks. */
static void expect_refused(struct __test_metadata *_metadata, struct np_pair *pair,
			   struct ibv_mr *mr)
{
	const size_t len = 2 * PAGE;
	struct rdma_np_region_info info;
	struct rdma_np_hold_info local;
	struct rdma_np_mr_info usage;
	struct rdma_np_event event;

	ASSERT_EQ(0, np_resolve(&pair->peer, mr->rkey, &info));
	for (int i = 0; i < 8; i++) {
		size_t at = i & 4 ? PAGE : 0;
		uint64_t word = ~0ULL;

		EXPECT_EQ(RDMA_NP_ADDRESS, np_fault(&pair->peer, info.region_id, info.base + at, PAGE,
					       (i & 1 ? RDMA_NP_FAULT_WRITE : 0) |
					       (i & 2 ? RDMA_NP_FAULT_HOLD : 0), &event));
		ASSERT_EQ(0, np_word(&pair->peer, &info, at, &word));
		EXPECT_FALSE(np_readable(word));
		EXPECT_FALSE(np_writable(word));
	}
	EXPECT_EQ(-EFAULT, np_hold(mr, (uintptr_t)mr->addr, PAGE, 0, &local));
	EXPECT_EQ(-EFAULT, np_hold(mr, (uintptr_t)mr->addr, PAGE, RDMA_NP_FAULT_WRITE, &local));
	/* Who does not ask meets what stands in for it. */
	memset(pair->peer.buf, 2, len);
	ASSERT_EQ(0, np_write(&pair->peer, 0, len, np_write_addr(&info, 0), info.write_key));
	ASSERT_EQ(0, np_read(&pair->peer, 0, len, np_read_addr(&info, 0), info.read_key));
	EXPECT_TRUE(np_all(pair->peer.buf, len, info.signature));
	ASSERT_EQ(0, np_query_mr(mr, &usage));
	EXPECT_EQ(0, usage.resident_pages);
	EXPECT_EQ(0, usage.held_pages);
}

/* One such page in the place of one that peers had, and of which they have the neighbours. */
static void expect_refused_between(struct __test_metadata *_metadata, struct np_pair *pair,
				   size_t off)
{
	for (int write = 0; write < 2; write++) {
		const uint32_t flags = write ? RDMA_NP_FAULT_WRITE : 0;

		EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, PAGE, flags, NULL));
		EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(pair, off + PAGE, PAGE, flags, NULL));
		EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, off + 2 * PAGE, PAGE, flags, NULL));
		EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(pair, off, 3 * PAGE, flags, NULL));
		EXPECT_FALSE(np_readable(np_pair_word(pair, off + PAGE)));
	}
	ASSERT_EQ(0, np_pair_write(pair, off + PAGE, PAGE));
	ASSERT_EQ(0, np_pair_read(pair, off, 3 * PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, FIRST_PAGE));
	EXPECT_TRUE(np_all(pair->peer.buf + PAGE, PAGE, pair->info.signature));
	EXPECT_EQ(-1, np_differs(pair->peer.buf + 2 * PAGE, PAGE, FIRST_PAGE + 2));
	EXPECT_EQ(IBV_QPS_RTS, np_qp_state(pair->peer.qp));
}

/* Not even the kernel has a mapping of it. A registration that pins finds out at once. */
TEST_F(memory, secret_memory_is_refused)
{
	const size_t len = 2 * PAGE, off = FIRST_PAGE * PAGE;
	struct np_pair *pair = &self->pair;
	struct ibv_sge sge;
	uint8_t *secret;
	struct ibv_mr *mr;
	int fd;

	fd = syscall(SYS_memfd_secret, O_CLOEXEC);
	ASSERT_LE(0, fd) TH_LOG("%s; CONFIG_SECRETMEM is needed", strerror(errno));
	ASSERT_EQ(0, ftruncate(fd, len));
	secret = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	ASSERT_NE(MAP_FAILED, secret) TH_LOG("%s", strerror(errno));
	/* One page is there, one is not. */
	np_fill(secret, PAGE, 1);
	EXPECT_EQ(NULL, ibv_reg_mr(pair->owner.pd, secret, PAGE, NP_RIGHTS));
	EXPECT_EQ(EFAULT, errno);
	mr = ibv_reg_mr(pair->owner.pd, secret, len, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	expect_refused(_metadata, pair, mr);
	EXPECT_EQ(-1, np_differs(secret, PAGE, 1));
	EXPECT_TRUE(np_all(secret + PAGE, PAGE, 0));

	ASSERT_EQ(0, np_set_fault_around(NP_FAULT_AROUND));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, 3 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(self->data + PAGE, mmap(self->data + PAGE, PAGE, PROT_READ | PROT_WRITE,
					  MAP_SHARED | MAP_FIXED, fd, 0));
	expect_refused_between(_metadata, pair, off);
	/* To advise what need not be done ends neither for it nor before what comes after it. */
	sge = (struct ibv_sge){ (uintptr_t)self->data, PAGES * PAGE, pair->mr->lkey };
	ASSERT_FALSE(np_readable(np_pair_word(pair, off + (PAGES - 1) * PAGE)));
	EXPECT_EQ(EFAULT, ibv_advise_mr(pair->owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH,
					IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
	EXPECT_EQ(0, ibv_advise_mr(pair->owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
				   IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
	EXPECT_TRUE(np_readable(np_pair_word(pair, off + (PAGES - 1) * PAGE)));
	EXPECT_EQ(-1, np_differs(secret, PAGE, 1));
}

/* Pages of the registers of the owner's HCA. */
static uint8_t *map_registers(void *at, size_t len)
{
	char path[100];
	void *p;
	int fd;

	snprintf(path, sizeof(path), "/sys/class/infiniband/%s/device/resource0", NP_OWNER_DEV);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return NULL;
	p = mmap(at, len, PROT_READ | PROT_WRITE, MAP_SHARED | (at ? MAP_FIXED : 0), fd, 0);
	close(fd);
	return p == MAP_FAILED ? NULL : p;
}

/* The owner's CPU reaches them; what a DMA there would do is another matter. */
TEST_F(memory, registers_of_a_device_are_refused)
{
	const size_t len = 2 * PAGE, off = FIRST_PAGE * PAGE;
	uint8_t *data = self->data, *registers;
	struct np_pair *pair = &self->pair;
	volatile uint64_t *version;
	struct ibv_mr *mr;
	uint64_t was;

	registers = map_registers(NULL, len);
	ASSERT_NE(NULL, registers) TH_LOG("%s", strerror(errno));
	/* Of the firmware, which nothing changes. */
	version = (volatile uint64_t *)registers;
	was = *version;
	EXPECT_EQ(NULL, ibv_reg_mr(pair->owner.pd, registers, len, NP_RIGHTS));
	EXPECT_EQ(EFAULT, errno);
	mr = ibv_reg_mr(pair->owner.pd, registers, len, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	expect_refused(_metadata, pair, mr);
	EXPECT_EQ(was, *version);

	ASSERT_EQ(0, np_set_fault_around(NP_FAULT_AROUND));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, 3 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(data + PAGE, map_registers(data + PAGE, PAGE));
	expect_refused_between(_metadata, pair, off);
	EXPECT_EQ(was, *version);
	/* And it goes as it came. */
	ASSERT_EQ(data + PAGE, mmap(data + PAGE, PAGE, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
	ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, off, 3 * PAGE));
	EXPECT_TRUE(np_all(pair->peer.buf + PAGE, PAGE, 0));
}

/* --- userfaultfd ------------------------------------------------------------------------ */

static int uffd_open(uint64_t features)
{
	struct uffdio_api api = { .api = UFFD_API, .features = features };
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);

	if (fd >= 0 && ioctl(fd, UFFDIO_API, &api)) {
		close(fd);
		return -errno;
	}
	return fd < 0 ? -errno : fd;
}

/*
 * Who serves the owner's userfaultfd, as well as he can: brings pages of zeros, those that
 * the file has, or the right to write. A test has @lock while he shall do nothing.
 */
struct monitor {
	int uffd;
	enum { UFFD_ZEROS, UFFD_MINOR, UFFD_WP } kind;
	size_t unit;
	uint8_t *source;
	pthread_mutex_t lock;
	pthread_t thread;
	atomic_int error;
};

static int monitor_serve(struct monitor *m, uint64_t addr)
{
	struct uffdio_continue again = { .range = { .start = addr, .len = m->unit } };
	struct uffdio_copy copy = { .dst = addr, .src = (uintptr_t)m->source, .len = m->unit };
	struct uffdio_writeprotect wp = { .range = { .start = addr, .len = m->unit } };
	int ret;

	ret = m->kind == UFFD_ZEROS ? ioctl(m->uffd, UFFDIO_COPY, &copy) :
	      m->kind == UFFD_MINOR ? ioctl(m->uffd, UFFDIO_CONTINUE, &again) :
				      ioctl(m->uffd, UFFDIO_WRITEPROTECT, &wp);
	/* Of a page that two have asked for, or one twice. */
	return ret && errno != EEXIST ? -errno : 0;
}

/* The address that somebody waits for, or 0 when nobody does in time. */
static uint64_t monitor_hear(struct monitor *m, int timeout_ms)
{
	struct pollfd fd = { .fd = m->uffd, .events = POLLIN };
	struct uffd_msg msg;

	if (poll(&fd, 1, timeout_ms) != 1 || read(m->uffd, &msg, sizeof(msg)) != sizeof(msg) ||
	    msg.event != UFFD_EVENT_PAGEFAULT)
		return 0;
	return msg.arg.pagefault.address & ~(m->unit - 1);
}

static void *monitor_run(void *arg)
{
	struct monitor *m = arg;

	for (;;) {
		uint64_t addr = monitor_hear(m, -1);
		int ret;

		if (!addr)
			continue;	/* gave up meanwhile */
		pthread_mutex_lock(&m->lock);
		ret = monitor_serve(m, addr);
		pthread_mutex_unlock(&m->lock);
		if (ret)
			atomic_store(&m->error, ret);
	}
	return NULL;
}

static int monitor_start(struct monitor *m)
{
	return -pthread_create(&m->thread, NULL, monitor_run, m);
}

static int monitor_init(struct monitor *m, uint64_t features, uint64_t mode, uint8_t *data,
			size_t len)
{
	struct uffdio_register reg = {
		.range = { .start = (uintptr_t)data, .len = len }, .mode = mode,
	};

	pthread_mutex_init(&m->lock, NULL);
	m->source = np_map(HUGE_PAGE);
	m->uffd = uffd_open(features);
	if (!m->source || m->uffd < 0)
		return m->uffd < 0 ? m->uffd : -ENOMEM;
	memset(m->source, 0, HUGE_PAGE);
	return ioctl(m->uffd, UFFDIO_REGISTER, &reg) ? -errno : 0;
}

/* A fault that waits for the monitor: who is asked, and nothing comes before he answers. */
static void expect_waits(struct __test_metadata *_metadata, struct np_pair *pair,
			 struct monitor *m, size_t off, uint32_t flags)
{
	const struct rdma_np_range range = { .addr = pair->info.base + off, .length = PAGE };
	struct rdma_np_event event;
	uint64_t addr;

	ASSERT_EQ(0, np_fault_start(&pair->peer, pair->info.region_id, flags, ++pair->peer.cookie,
				    &range, 1));
	addr = monitor_hear(m, NP_WAIT_MS);
	ASSERT_EQ((uintptr_t)(pair->data + off) & ~(m->unit - 1), addr);
	EXPECT_EQ(0, np_next_event(&pair->peer, &event, 0));
	ASSERT_EQ(0, monitor_serve(m, addr));
	ASSERT_EQ(1, np_wait_event(&pair->peer, RDMA_NP_EVENT_FAULT, &event, NP_WAIT_MS));
	EXPECT_EQ(pair->peer.cookie, event.cookie);
	EXPECT_EQ(RDMA_NP_OK, event.status);
	if (flags & RDMA_NP_FAULT_HOLD && event.status == RDMA_NP_OK) {
		EXPECT_EQ(0, np_release(&pair->peer, event.hold_id));
	}
}

/* Nobody answers: the peer may ask again after a while, and others go on. */
static void expect_busy(struct __test_metadata *_metadata, struct np_pair *pair,
			struct monitor *m, size_t off, uint32_t flags)
{
	struct rdma_np_event event;
	uint64_t start = np_now_ms();

	EXPECT_EQ(RDMA_NP_BUSY, np_fault_once(&pair->peer, pair->peer.qp, pair->info.region_id,
					      pair->info.base + off, PAGE, flags, &event));
	EXPECT_LE(start + 900, np_now_ms());
	/* Nobody waits any more. */
	EXPECT_EQ(0, monitor_hear(m, 0));
}

TEST_F(memory, fault_waits_for_userfaultfd_to_bring_the_page)
{
	struct monitor m = { .unit = PAGE };
	struct np_load *load = &self->load;
	size_t off = FIRST_PAGE * PAGE;

	ASSERT_EQ(0, monitor_init(&m, 0, UFFDIO_REGISTER_MODE_MISSING, self->data, PAGES * PAGE));
	for (int i = 0; i < 4; i++) {
		uint32_t flags = (i & 1 ? RDMA_NP_FAULT_WRITE : 0) |
				 (i & 2 ? RDMA_NP_FAULT_HOLD : 0);

		ASSERT_EQ(0, madvise(self->data, 2 * PAGE, MADV_DONTNEED));
		expect_busy(_metadata, &self->pair, &m, off, flags);
		expect_waits(_metadata, &self->pair, &m, off, flags);
	}
	ASSERT_EQ(0, monitor_start(&m));
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		unsigned int page = random_of(i, PAGES);

		ASSERT_LOAD(np_load_goes_on(load, 50));
		pthread_mutex_lock(&m.lock);
		np_load_step(load, page, 1);
		ASSERT_EQ(0, madvise(self->data + page * PAGE, PAGE, MADV_DONTNEED));
		np_load_lose_for_zeros(load, page, 1);
		np_load_gone(load, page, 1, RDMA_NP_BUSY, RDMA_NP_BUSY);
		np_load_step(load, page, 1);
		pthread_mutex_unlock(&m.lock);
		np_load_step(load, page, 1);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_LT(0, load->zeros);
	EXPECT_EQ(0, atomic_load(&m.error));
}

TEST_F(memory, write_waits_for_userfaultfd_to_lift_its_protection)
{
	struct monitor m = { .unit = PAGE, .kind = UFFD_WP };
	struct np_load *load = &self->load;

	ASSERT_EQ(0, monitor_init(&m, UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFDIO_REGISTER_MODE_WP,
				  self->data, PAGES * PAGE));
	for (int i = 0; i < ROUNDS; i++) {
		unsigned int first = random_of(i, PAGES - 8);
		struct uffdio_writeprotect wp = {
			.range = { .start = (uintptr_t)self->data + first * PAGE,
				   .len = 8 * PAGE },
			.mode = UFFDIO_WRITEPROTECT_MODE_WP,
		};

		if (i == 2) {
			ASSERT_EQ(0, monitor_start(&m));
			ASSERT_EQ(0, np_load_start(load));
		}
		if (i >= 2) {
			ASSERT_LOAD(np_load_goes_on(load, 50));
		}
		ASSERT_EQ(0, ioctl(m.uffd, UFFDIO_WRITEPROTECT, &wp));
		if (i < 2) {
			size_t off = (FIRST_PAGE + first) * PAGE;

			/* Readers do not wait. */
			ASSERT_EQ(0, np_read_proven(&self->pair.peer, &self->pair.info, 0, off,
						    8 * PAGE));
			EXPECT_EQ(0, monitor_hear(&m, 0));
			expect_busy(_metadata, &self->pair, &m, off, RDMA_NP_FAULT_WRITE);
			expect_waits(_metadata, &self->pair, &m, off,
				     RDMA_NP_FAULT_WRITE | (i ? RDMA_NP_FAULT_HOLD : 0));
		}
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_EQ(0, atomic_load(&m.error));
}

/* The same where pages are a file's, in small pages and in huge ones. */
FIXTURE(uffd) {
	struct np_pair pair;
	struct np_load load;
	uint8_t *data;
	int fd;
	int huge_pages;		/* that there were before */
};

FIXTURE_VARIANT(uffd) {
	bool huge;
	bool minor;		/* the file has the page, and the page table does not */
};

FIXTURE_VARIANT_ADD(uffd, shmem) {};
FIXTURE_VARIANT_ADD(uffd, shmem_minor) { .minor = true };
FIXTURE_VARIANT_ADD(uffd, hugetlb) { .huge = true };
FIXTURE_VARIANT_ADD(uffd, hugetlb_minor) { .huge = true, .minor = true };

#define HUGE_PAGES "/proc/sys/vm/nr_hugepages"

FIXTURE_SETUP(uffd)
{
	char text[32];

	ASSERT_EQ(0, memory_open(&self->pair, &self->load, &self->data));
	ASSERT_LT(0, read_file(HUGE_PAGES, text, sizeof(text)));
	self->huge_pages = atoi(text);
	if (variant->huge) {
		ASSERT_EQ(0, np_write_text(HUGE_PAGES, "8"));
	}
	self->fd = memfd_create("np", MFD_CLOEXEC | (variant->huge ? MFD_HUGETLB : 0));
	ASSERT_LE(0, self->fd);
	ASSERT_EQ(0, ftruncate(self->fd, NP_DATA_LEN));
	ASSERT_EQ(self->pair.data, mmap(self->pair.data, NP_DATA_LEN, PROT_READ | PROT_WRITE,
					MAP_SHARED | MAP_FIXED, self->fd, 0));
}

FIXTURE_TEARDOWN_PARENT(uffd)
{
	char text[32];

	NP_CHECK_USAGE(&self->pair.before);
	snprintf(text, sizeof(text), "%d", self->huge_pages);
	EXPECT_EQ(0, np_write_text(HUGE_PAGES, text));
}

/* Out of the page table, and out of the file as well. */
static int uffd_take(FIXTURE_DATA(uffd) *self, bool minor, size_t off, size_t len)
{
	int ret = minor ? madvise(self->pair.data + off, len, MADV_DONTNEED) :
			  fallocate(self->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off, len);

	return ret ? -errno : 0;
}

TEST_F(uffd, fault_waits_for_userfaultfd_to_bring_the_page_of_a_file)
{
	struct monitor m = {
		.unit = variant->huge ? HUGE_PAGE : PAGE,
		.kind = variant->minor ? UFFD_MINOR : UFFD_ZEROS,
	};
	struct np_load *load = &self->load;

	memset(self->pair.data, 1, NP_DATA_LEN);
	ASSERT_EQ(0, monitor_init(&m, !variant->minor ? 0 :
				  variant->huge ? UFFD_FEATURE_MINOR_HUGETLBFS :
						  UFFD_FEATURE_MINOR_SHMEM,
				  variant->minor ? UFFDIO_REGISTER_MODE_MINOR :
						   UFFDIO_REGISTER_MODE_MISSING,
				  self->pair.data, NP_DATA_LEN)) TH_LOG("%s", strerror(errno));
	for (int i = 0; i < 4; i++) {
		uint32_t flags = (i & 1 ? RDMA_NP_FAULT_WRITE : 0) |
				 (i & 2 ? RDMA_NP_FAULT_HOLD : 0);

		ASSERT_EQ(0, uffd_take(self, variant->minor, 0, m.unit));
		expect_busy(_metadata, &self->pair, &m, 0, flags);
		expect_waits(_metadata, &self->pair, &m, 0, flags);
	}
	ASSERT_EQ(0, np_read_proven(&self->pair.peer, &self->pair.info, 0, 0, PAGE));
	EXPECT_TRUE(np_all(self->pair.peer.buf, PAGE, variant->minor ? 0x0101010101010101 : 0));

	ASSERT_EQ(0, monitor_start(&m));
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		/* The second huge page is that of the second half. */
		unsigned int first = variant->huge ? PAGES / 2 : random_of(i, PAGES);
		unsigned int n = variant->huge ? PAGES / 2 : 1;
		size_t off = (FIRST_PAGE + first) * PAGE;

		ASSERT_LOAD(np_load_goes_on(load, 50));
		pthread_mutex_lock(&m.lock);
		np_load_step(load, first, n);
		ASSERT_EQ(0, uffd_take(self, variant->minor, off, m.unit));
		if (!variant->minor)
			np_load_lose_for_zeros(load, first, n);
		np_load_gone(load, first, n, RDMA_NP_BUSY, RDMA_NP_BUSY);
		np_load_step(load, first, n);
		pthread_mutex_unlock(&m.lock);
		np_load_step(load, first, n);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_EQ(!variant->minor, load->zeros > 0);
	EXPECT_EQ(0, atomic_load(&m.error));
}

/* --- what peers do not notice -------------------------------------------------------------- */

FIXTURE(kept) {
	struct np_pair pair;
	struct np_load load;
	uint8_t *data;
	struct swap swap;
	bool ksm;
	bool balancing;
};

typedef FIXTURE_DATA(kept) kept;

FIXTURE_VARIANT(kept) {
	int (*begin)(kept *self);
	/* One change; how much of it happened, or -errno. */
	long (*change)(kept *self, unsigned int i);
	int rounds;
	long enough;		/* of what happened */
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
	return swap_find(&self->swap);
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
	return swap_to_zram(&self->swap);
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
		if (frame && read_file(path, text, sizeof(text)) > 0 && !strcmp(text, "Movable\n"))
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
	uint8_t *page;
	long block;
	int ret;

	if (read_file(BLOCK "block_size_bytes", text, sizeof(text)) < 0)
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

	return np_wait_until((!np_query_mr(self->pair.mr, &info) &&
			      info.huge_leaves == HUGE_PAGES_OF_DATA) ||
			     atomic_load(&self->load.stop)) ? 0 : -ETIMEDOUT;
}

static int make_huge(kept *self)
{
	/* Not while somebody else has a page in his hands for a moment. */
	if (!np_wait_until(!madvise(self->pair.data, NP_DATA_LEN, MADV_COLLAPSE)))
		return -errno;
	return wait_for_leaves(self);
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

#define KEPT(name, ...) FIXTURE_VARIANT_ADD(kept, name) { __VA_ARGS__ }
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

FIXTURE_SETUP(kept)
{
	if (variant->begin == begin_pressure) {
		ASSERT_EQ(0, begin_pressure(self));
	}
	ASSERT_EQ(0, memory_open(&self->pair, &self->load, &self->data));
	if (variant->begin && variant->begin != begin_pressure) {
		ASSERT_EQ(0, variant->begin(self));
	}
}

FIXTURE_TEARDOWN_PARENT(kept)
{
	EXPECT_TRUE(swap_back(&self->swap));
	if (self->ksm) {
		EXPECT_EQ(0, np_ksm_stop());
	}
	if (self->balancing) {
		EXPECT_EQ(0, np_write_text("/proc/sys/kernel/numa_balancing", "0"));
	}
	EXPECT_TRUE(np_group_remove());
	/* As it is already, if the test came to its end. */
	np_write_text("/sys/devices/system/cpu/cpu1/online", "1");
	NP_CHECK_USAGE(&self->pair.before);
}

TEST_F(kept, loses_nothing)
{
	struct np_load *load = &self->load;
	uint64_t last = np_now_ms() + NP_WAIT_MS;
	long happened = 0;

	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < variant->rounds || (happened < variant->enough && np_now_ms() < last);
	     i++) {
		long ret;

		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		ret = variant->change(self, i);
		ASSERT_LE(0, ret) TH_LOG("%s", strerror(-ret));
		happened += ret;
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_LE(variant->enough, happened);
	EXPECT_EQ(0, load->refused);
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

/* --- what reclaim takes first ------------------------------------------------------------- */

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
	struct swap swap;
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
	EXPECT_TRUE(swap_back(&self->swap));
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
	ASSERT_EQ(0, swap_to_zram(&self->swap));
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

/* --- owners that go, or run out of memory ------------------------------------------------- */

/* The owner is a process of its own, and the peer is this one. */
struct hello {
	struct np_addr addr;
	uint32_t rkey;
};

FIXTURE(owner) {
	struct np_usage before;
	struct np_end peer;
	struct rdma_np_region_info info;
	struct np_load load;
	pid_t pid;
	int sock;
};

static bool say(int sock, const struct hello *h)
{
	return send(sock, h, sizeof(*h), MSG_NOSIGNAL) == sizeof(*h);
}

static bool hear(int sock, struct hello *h)
{
	return recv(sock, h, sizeof(*h), MSG_WAITALL) == sizeof(*h);
}

#define DISK "/tmp/np_disk"

/* A file system that nobody else uses, in memory. */
static int make_disk(void)
{
	return system("mkdir -p " DISK " && rm -f " DISK ".image && truncate -s 64M " DISK ".image && "
		      "mkfs.ext4 -q -F " DISK ".image && "
		      "dev=$(losetup -f --show " DISK ".image) && mount $dev " DISK " && "
		      "losetup -d $dev") ? -EIO : 0;
}

/* What the owner maps, if not anonymous memory. */
static int owner_file = -1;

/* What owner_process() has made, for what it lives as. */
static struct np_pair *living;

/* Never returns. Registers, connects, tells, and lives as @live says. */
static void owner_process(int sock, size_t len, int (*live)(int sock))
{
	struct hello mine = {}, theirs;
	struct np_pair pair = {};

	living = &pair;
	if (np_open(&pair.owner, NP_OWNER_DEV, 0))
		_exit(101);
	pair.data = np_map(len);
	if (!pair.data)
		_exit(102);
	if (owner_file >= 0 && mmap(pair.data, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
				    owner_file, 0) != pair.data)
		_exit(105);
	pair.mr = ibv_reg_mr(pair.owner.pd, pair.data, len, NP_RIGHTS | NP_UNPINNED);
	if (!pair.mr)
		_exit(103);
	mine.addr = np_address(&pair.owner);
	mine.rkey = pair.mr->rkey;
	if (!say(sock, &mine) || !hear(sock, &theirs) ||
	    np_qp_connect(pair.owner.qp, theirs.addr) || !say(sock, &mine))
		_exit(104);
	_exit(live(sock));
}

static int meet_owner(FIXTURE_DATA(owner) *self, size_t len, int (*before)(void),
		      int (*live)(int sock))
{
	struct hello mine = {}, theirs;
	int pair[2], ret;
	pid_t child;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
		return -errno;
	child = np_fork();
	if (child < 0)
		return -errno;
	if (!child) {
		close(pair[0]);
		if (before && before())
			_exit(100);
		owner_process(pair[1], len, live);
	}
	/* Fixtures are shared between processes: the child would write its 0. */
	self->pid = child;
	close(pair[1]);
	self->sock = pair[0];
	ret = np_open(&self->peer, NP_PEER_DEV, NP_BUF_LEN);
	if (ret)
		return ret;
	mine.addr = np_address(&self->peer);
	if (!hear(self->sock, &theirs))
		return -EPIPE;
	ret = np_qp_connect(self->peer.qp, theirs.addr);
	if (ret)
		return ret;
	if (!say(self->sock, &mine) || !hear(self->sock, &theirs))
		return -EPIPE;
	return np_resolve(&self->peer, theirs.rkey, &self->info);
}

static int freeze(bool yes);

FIXTURE_SETUP(owner)
{
	ASSERT_EQ(0, np_usage_start(&self->before));
}

FIXTURE_TEARDOWN_PARENT(owner)
{
	/* Or its owner never ends; an error if it is not frozen, or not there */
	freeze(false);
	EXPECT_TRUE(np_wait_until(!umount(DISK) || errno != EBUSY));
	EXPECT_TRUE(np_group_remove());
	NP_CHECK_USAGE(&self->before);
}

/* When it is told, it becomes another program, which has its socket. */
static int exec_when_told(int sock, bool keep)
{
	char c;

	if (recv(sock, &c, 1, 0) != 1)
		return 1;
	for (int fd = 3; keep && fd < 256; fd++)
		fcntl(fd, F_SETFD, 0);
	if (dup2(sock, 0) || dup2(sock, 1) != 1)
		return 2;
	execlp("cat", "cat", NULL);
	return 3;
}

/* And all its other file descriptors, too. */
static int live_until_exec(int sock)
{
	return exec_when_told(sock, true);
}

/* Those of verbs are closed, as they are if nobody asks for something else. */
static int live_until_exec_closes(int sock)
{
	return exec_when_told(sock, false);
}

TEST_F(owner, region_of_a_process_that_execs_is_gone)
{
	struct np_load *load = &self->load;
	char c = 'x';

	ASSERT_EQ(0, meet_owner(self, NP_DATA_LEN, NULL, live_until_exec));
	np_load_init(load, &self->peer, &self->info, NULL, FIRST_PAGE * PAGE, PAGES);
	ASSERT_EQ(0, np_load_start(load));
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	np_load_step(load, 0, PAGES);
	ASSERT_EQ(1, send(self->sock, &c, 1, MSG_NOSIGNAL));
	/* It is the other program that answers. */
	ASSERT_EQ(1, send(self->sock, &c, 1, MSG_NOSIGNAL));
	ASSERT_EQ(1, recv(self->sock, &c, 1, 0));
	np_load_lose(load, 0, PAGES);
	np_load_gone(load, 0, PAGES, RDMA_NP_GONE, RDMA_NP_GONE);
	ASSERT_LOAD(np_load_is_refused(load, 20));
	EXPECT_TRUE(np_load_stop(load));
	ASSERT_EQ(0, np_read(&self->peer, 0, NP_DATA_LEN, np_read_addr(&self->info, 0),
			     self->info.read_key));
	EXPECT_TRUE(np_all(self->peer.buf, NP_DATA_LEN, self->info.signature));
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

/* READs and WRITEs until something fails: which page that was on. */
static size_t until_error(struct np_end *peer, const struct rdma_np_region_info *info, size_t pages)
{
	uint64_t end = np_now_ms() + 2 * NP_WAIT_MS;
	size_t done = 0;

	while (np_now_ms() < end) {
		size_t page = done % pages;

		*(uint64_t *)peer->buf = done;
		if (np_write_proven(peer, info, 0, page * PAGE, UNIT) ||
		    np_read_proven(peer, info, 0, page * PAGE, UNIT))
			break;
		done++;
	}
	return done;
}

TEST_F(owner, connections_of_a_process_that_execs_end)
{
	char c = 'x';

	ASSERT_EQ(0, meet_owner(self, NP_DATA_LEN, NULL, live_until_exec_closes));
	ASSERT_EQ(0, np_write_proven(&self->peer, &self->info, 0, 0, UNIT));
	ASSERT_EQ(1, send(self->sock, &c, 1, MSG_NOSIGNAL));
	until_error(&self->peer, &self->info, NP_DATA_PAGES);
	/* Pinned memory is not there, either: it is the connection that has ended. */
	EXPECT_TRUE(np_wait_until(np_qp_state(self->peer.qp) == IBV_QPS_ERR ||
				  np_read(&self->peer, 0, UNIT, np_read_addr(&self->info, 0),
					  self->info.read_key)));
	EXPECT_EQ(IBV_QPS_ERR, np_qp_state(self->peer.qp));
	/* And the process goes on. */
	ASSERT_EQ(1, send(self->sock, &c, 1, MSG_NOSIGNAL));
	ASSERT_EQ(1, recv(self->sock, &c, 1, 0));
	EXPECT_EQ(0, waitpid(self->pid, NULL, WNOHANG));
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

static int live_until_told(int sock)
{
	char c;

	return recv(sock, &c, 1, 0) != 1;
}

static int enter_small_group(void)
{
	return np_group_enter("16M", "0");
}

/* One number of a file of the group that has many, each in a line with its name. */
static long group_field(const char *file, const char *name)
{
	char path[100], text[8000], want[40], *at;

	snprintf(path, sizeof(path), NP_GROUP "/%s", file);
	text[0] = '\n';
	if (read_file(path, text + 1, sizeof(text) - 1) < 0)
		return -1;
	snprintf(want, sizeof(want), "\n%s ", name);
	at = strstr(text, want);
	return at ? atol(at + strlen(want)) : -1;
}

/* What peers have made present is charged to the owner; when it has too much, it dies. */
TEST_F(owner, pays_for_what_its_peers_touch)
{
	const size_t len = 64UL << 20, some = 4UL << 20;
	struct np_end *peer = &self->peer;
	char text[32];
	long before;
	int status;
	size_t done;

	ASSERT_EQ(0, meet_owner(self, len, enter_small_group, live_until_told));
	ASSERT_LT(0, read_file(NP_GROUP "/memory.current", text, sizeof(text)));
	before = atol(text);
	for (size_t off = 0; off < some; off += PAGE) {
		ASSERT_EQ(0, np_write_proven(peer, &self->info, 0, off, 8));
	}
	ASSERT_LT(0, read_file(NP_GROUP "/memory.current", text, sizeof(text)));
	/* But for what it paid for in advance. */
	EXPECT_LE(before + (long)some * 3 / 4, atol(text));
	done = until_error(peer, &self->info, len / PAGE);
	EXPECT_LE(some / PAGE, done);
	EXPECT_GE((16UL << 20) / PAGE, done);
	ASSERT_EQ(self->pid, waitpid(self->pid, &status, 0));
	EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) TH_LOG("%x", status);
	EXPECT_EQ(1, group_field("memory.events", "oom_kill"));
}

static int enter_large_group(void)
{
	return np_group_enter("max", "max");
}

/* So is what they make the kernel read from a disk. Its numbers are up to 2 s old. */
TEST_F(owner, pays_for_file_pages_that_its_peers_touch)
{
	const size_t len = 16UL << 20;
	struct rdma_np_event event;
	long before, now;

	ASSERT_EQ(0, make_disk());
	owner_file = open(DISK "/file", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	ASSERT_LE(0, owner_file);
	ASSERT_EQ(0, ftruncate(owner_file, len));
	ASSERT_EQ(0, meet_owner(self, len, enter_large_group, live_until_told));
	before = group_field("memory.stat", "file");
	ASSERT_LE(0, before);
	for (size_t off = 0; off < len; off += HUGE_PAGE) {
		ASSERT_EQ(RDMA_NP_OK, np_fault(&self->peer, self->info.region_id, self->info.base + off,
					  HUGE_PAGE, 0, &event));
	}
	EXPECT_TRUE(np_wait_until((now = group_field("memory.stat", "file")) >= before + (long)len));
	TH_LOG("file: %ld, then %ld", before, now);
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

/*
 * And what the kernel needs for it: for each 2 MiB of which they touch a page a page
 * table of the owner's, one of each window, and a page of the residency table.
 */
TEST_F(owner, pays_for_tables_that_its_peers_need)
{
	const size_t slots = 128;
	struct rdma_np_event event;
	long before, now, want;

	ASSERT_EQ(0, meet_owner(self, slots * HUGE_PAGE, enter_large_group, live_until_told));
	/* The first numbers are up to 2 s old, too, but there is not much that they lack */
	before = group_field("memory.stat", "kernel");
	ASSERT_LE(0, before);
	for (size_t i = 0; i < slots; i++) {
		ASSERT_EQ(RDMA_NP_OK, np_fault(&self->peer, self->info.region_id,
					  self->info.base + i * HUGE_PAGE, PAGE, RDMA_NP_FAULT_WRITE,
					  &event));
	}
	want = before + (long)(4 * slots * PAGE);
	EXPECT_TRUE(np_wait_until((now = group_field("memory.stat", "kernel")) >= want));
	TH_LOG("kernel: %ld, then %ld", before, now);
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

#define MANY_QPS	128

/* Makes more queue pairs, each connected to one of the peer's that it is told. */
static int live_with_queue_pairs(int sock)
{
	struct hello mine = {}, theirs;

	for (int i = 0; i < MANY_QPS; i++) {
		struct ibv_qp *qp = np_make_qp(&living->owner, living->owner.pd);

		if (!qp || !hear(sock, &theirs) || np_qp_connect(qp, theirs.addr))
			return 1;
		mine.addr = (struct np_addr){ .qpn = qp->qp_num, .lid = living->owner.lid };
		mine.rkey = living->mr->rkey;
		if (!say(sock, &mine))
			return 2;
	}
	return live_until_told(sock);
}

/* And what the kernel remembers of who knows its regions, and of what they were answered. */
TEST_F(owner, pays_for_what_is_remembered_of_its_peers)
{
	struct np_end *peer = &self->peer;
	struct rdma_np_region_info info;
	struct ibv_qp *qps[MANY_QPS];
	struct hello h = {};
	char text[32];
	long before, now;

	ASSERT_EQ(0, meet_owner(self, NP_DATA_LEN, enter_large_group, live_with_queue_pairs));
	for (int i = 0; i < MANY_QPS; i++) {
		qps[i] = np_make_qp(peer, peer->pd);
		ASSERT_NE(NULL, qps[i]);
		h.addr = (struct np_addr){ .qpn = qps[i]->qp_num, .lid = peer->lid };
		ASSERT_TRUE(say(self->sock, &h));
		ASSERT_TRUE(hear(self->sock, &h));
		ASSERT_EQ(0, np_qp_connect(qps[i], h.addr));
	}
	ASSERT_LT(0, read_file(NP_GROUP "/memory.current", text, sizeof(text)));
	before = atol(text);
	for (int i = 0; i < MANY_QPS; i++) {
		ASSERT_EQ(0, np_resolve_on(peer, qps[i], h.rkey, &info));
	}
	ASSERT_LT(0, read_file(NP_GROUP "/memory.current", text, sizeof(text)));
	now = atol(text);
	TH_LOG("%ld KiB for %d queue pairs", (now - before) >> 10, MANY_QPS);
	/* 13 KiB each, but for what it paid for in advance: 256 KiB on each CPU. */
	EXPECT_LE(before + (1L << 20), now);
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

/*
 * A region of 1 GiB whose pages are all there: 2 MiB of a file, 512 times, so that the
 * data costs next to nothing.
 */
#define DEAD_REGIONS	100
#define DEAD_LEN	(1UL << 30)

static uint8_t *map_often(void)
{
	int fd = memfd_create("np", MFD_CLOEXEC);
	uint8_t *data = np_map_aligned(DEAD_LEN, HUGE_PAGE);

	if (fd < 0 || !data || ftruncate(fd, HUGE_PAGE))
		return NULL;
	for (size_t off = 0; off < DEAD_LEN; off += HUGE_PAGE) {
		if (mmap(data + off, HUGE_PAGE, PROT_READ | PROT_WRITE,
			 MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0) == MAP_FAILED)
			return NULL;
	}
	close(fd);
	return data;
}

/* Gives its group 64 MiB more than it has got. */
static int limit_group(void)
{
	char text[32];

	if (read_file(NP_GROUP "/memory.current", text, sizeof(text)) < 0)
		return -EIO;
	snprintf(text, sizeof(text), "%ld", atol(text) + (64L << 20));
	return np_write_text(NP_GROUP "/memory.max", text);
}

/* One region after the other: tells its name, has all of it faulted, and ends it when told. */
static int live_through_regions(int sock)
{
	uint8_t *data = map_often();
	struct hello mine = {}, theirs;

	if (!data || limit_group())
		return 1;
	for (int i = 0; i < DEAD_REGIONS; i++) {
		struct ibv_sge sge = { .addr = (uintptr_t)data, .length = DEAD_LEN };
		struct ibv_mr *mr = ibv_reg_mr(living->owner.pd, data, DEAD_LEN,
					       NP_RIGHTS | NP_UNPINNED);

		if (!mr)
			return 2;
		sge.lkey = mr->lkey;
		if (ibv_advise_mr(living->owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0, &sge, 1))
			return 3;
		mine.rkey = mr->rkey;
		if (!say(sock, &mine) || !hear(sock, &theirs))
			return 4;
		if (ibv_dereg_mr(mr))
			return 5;
	}
	return live_until_told(sock);
}

/*
 * A peer that keeps the keys of dead regions keeps nothing else of them: with their
 * residency tables, which are 2 MiB each, the owner would be killed.
 */
TEST_F(owner, does_not_pay_for_dead_regions_that_its_peer_keeps)
{
	struct np_end *peer = &self->peer;
	struct rdma_np_region_info info;
	struct hello h = {};
	uint64_t word;

	ASSERT_EQ(0, meet_owner(self, NP_DATA_LEN, enter_large_group, live_through_regions));
	for (int i = 0; i < DEAD_REGIONS; i++) {
		ASSERT_TRUE(hear(self->sock, &h)) TH_LOG("owner ended in round %d", i);
		ASSERT_EQ(0, np_resolve(peer, h.rkey, &info));
		for (size_t off = 0; off < DEAD_LEN; off += DEAD_LEN - PAGE) {
			ASSERT_EQ(0, np_word(peer, &info, off, &word));
			EXPECT_TRUE(np_writable(word));
		}
		ASSERT_TRUE(say(self->sock, &h));
	}
	/*
	 * The keys are there still, of the last one as of all, and prove nothing. Faults are
	 * answered before the pages become absent, which words tell before leaves change.
	 */
	EXPECT_TRUE(np_wait_until(np_fault_once(peer, peer->qp, info.region_id, info.base, PAGE, 0,
						NULL) == RDMA_NP_GONE));
	for (size_t off = 0; off < DEAD_LEN; off += DEAD_LEN - PAGE) {
		EXPECT_TRUE(np_wait_until(!np_word(peer, &info, off, &word) && !word));
		EXPECT_TRUE(np_wait_until(!np_read(peer, 0, PAGE, np_read_addr(&info, off),
						   info.read_key) &&
					  np_all(peer->buf, PAGE, info.signature)));
		/* And do not come back. */
		ASSERT_EQ(0, np_word(peer, &info, off, &word));
		EXPECT_EQ(0, word);
	}
	EXPECT_EQ(0, group_field("memory.events", "oom_kill"));
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

static int enter_small_group_for_good(void)
{
	int ret = np_write_text("/proc/self/oom_score_adj", "-1000");

	return ret ?: enter_small_group();
}

/*
 * Where nobody can be killed the owner's CPU tries again until there is memory. So do
 * its peers: the address is a good one. A pin, though, is refused, as registration
 * of a pinned region would be.
 *
 * A page that is refused may be there the next time: what another CPU has in stock for
 * the group (drain_all_stock()) comes back after the charge that asked for it has failed.
 */
TEST_F(owner, that_nobody_kills_lets_its_peers_wait_for_memory)
{
	const size_t len = 64UL << 20;
	struct np_end *peer = &self->peer;
	struct rdma_np_event event = {};
	size_t off = 0, late = 0;
	int ret;

	ASSERT_EQ(0, meet_owner(self, len, enter_small_group_for_good, live_until_told));
	for (int busy = 0; busy < ROUNDS && off < len;) {
		ret = np_fault_once(peer, peer->qp, self->info.region_id, self->info.base + off,
				    PAGE, RDMA_NP_FAULT_WRITE, &event);
		if (ret != RDMA_NP_OK) {
			ASSERT_EQ(RDMA_NP_BUSY, ret);
			busy++;
			continue;
		}
		off += PAGE;
		late += busy > 0;
	}
	EXPECT_LE((4UL << 20), off);
	while ((ret = np_fault_once(peer, peer->qp, self->info.region_id, self->info.base + off,
				    PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event)) == RDMA_NP_OK &&
	       off < len) {
		ASSERT_EQ(0, np_release(peer, event.hold_id));
		off += PAGE;
		late++;
	}
	EXPECT_EQ(RDMA_NP_NOMEM, ret);
	EXPECT_GE((16UL << 20), off);
	TH_LOG("%zu KiB, of which %zu pages after the first refusal", off >> 10, late);
	EXPECT_LT(0, group_field("memory.events", "oom"));
	EXPECT_EQ(0, group_field("memory.events", "oom_kill"));
	ASSERT_EQ(0, np_write_text(NP_GROUP "/memory.max", "max"));
	for (; off < len; off += HUGE_PAGE) {
		ASSERT_EQ(0, np_write_proven(peer, &self->info, 0, off, 8));
	}
	ASSERT_EQ(RDMA_NP_OK, np_fault(peer, self->info.region_id, self->info.base, PAGE,
				  RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(0, np_release(peer, event.hold_id));
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

TEST_F(owner, killed_for_want_of_memory_is_gone)
{
	long kills = np_vmstat("oom_kill");
	char path[64];
	int status;
	size_t before, after;

	ASSERT_EQ(0, meet_owner(self, NP_DATA_LEN, NULL, live_until_told));
	snprintf(path, sizeof(path), "/proc/%d/oom_score_adj", self->pid);
	ASSERT_EQ(0, np_write_text(path, "1000"));
	for (size_t off = 0; off < NP_DATA_LEN; off += PAGE) {
		ASSERT_EQ(0, np_write_proven(&self->peer, &self->info, 0, off, 8));
	}
	before = np_now_ms();
	ASSERT_EQ(0, np_write_text("/proc/sysrq-trigger", "f"));
	until_error(&self->peer, &self->info, NP_DATA_PAGES);
	after = np_now_ms();
	EXPECT_GT(before + 2 * NP_WAIT_MS, after);
	ASSERT_EQ(self->pid, waitpid(self->pid, &status, 0));
	EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) TH_LOG("%x", status);
	EXPECT_EQ(kills + 1, np_vmstat("oom_kill"));
}

/* --- the reaper -------------------------------------------------------------------------- */

/* Nobody can write there: who tries does not even die. */
static int freeze(bool yes)
{
	int fd = open(DISK, O_RDONLY | O_CLOEXEC), ret = 0;

	if (fd < 0)
		return -errno;
	if (ioctl(fd, yes ? FIFREEZE : FITHAW, 0))
		ret = -errno;
	close(fd);
	return ret;
}

static void *write_where_nobody_can(void *arg)
{
	int fd = open(DISK "/file", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

	if (fd >= 0)
		close(fd);
	return NULL;
}

static int live_with_one_foot_in_the_door(int sock)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, write_where_nobody_can, NULL))
		return 1;
	return live_until_told(sock);
}

/* Does a thread of the process wait for what no signal ends? */
static bool has_stuck_thread(pid_t pid)
{
	char path[300], text[600], *state;
	struct dirent *entry;
	bool stuck = false;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	dir = opendir(path);
	while (dir && (entry = readdir(dir))) {
		snprintf(path, sizeof(path), "/proc/%d/task/%s/stat", pid, entry->d_name);
		if (entry->d_name[0] == '.' || read_file(path, text, sizeof(text)) <= 0)
			continue;
		state = strrchr(text, ')');
		stuck |= state && state[2] == 'D';
	}
	if (dir)
		closedir(dir);
	return stuck;
}

static bool kernel_said(int log, const char *what)
{
	char text[2048];
	ssize_t n;

	while ((n = read(log, text, sizeof(text) - 1)) > 0 || (n < 0 && errno == EPIPE)) {
		text[n < 0 ? 0 : n] = 0;
		if (strstr(text, what))
			return true;
	}
	return false;
}

/*
 * A process that was killed for want of memory and cannot end keeps its QPs, and its
 * memory is taken from it while peers use it, by a notifier that must not wait.
 */
TEST_F(owner, memory_that_the_reaper_takes_is_an_address_error)
{
	struct np_load *load = &self->load;
	int status, log = open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	char path[64];

	ASSERT_LE(0, log);
	ASSERT_LE(0, lseek(log, 0, SEEK_END));
	ASSERT_EQ(0, make_disk());
	ASSERT_EQ(0, freeze(true));
	ASSERT_EQ(0, meet_owner(self, NP_DATA_LEN, NULL, live_with_one_foot_in_the_door));
	ASSERT_TRUE(np_wait_until(has_stuck_thread(self->pid)));
	np_load_init(load, &self->peer, &self->info, NULL, FIRST_PAGE * PAGE, PAGES);
	ASSERT_EQ(0, np_load_start(load));
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	snprintf(path, sizeof(path), "/proc/%d/oom_score_adj", self->pid);
	ASSERT_EQ(0, np_write_text(path, "1000"));
	np_load_step(load, 0, PAGES);
	ASSERT_EQ(0, np_write_text("/proc/sysrq-trigger", "f"));
	ASSERT_TRUE(np_wait_until(kernel_said(log, "oom_reaper: reaped process")));
	np_load_lose(load, 0, PAGES);
	np_load_gone(load, 0, PAGES, RDMA_NP_ADDRESS, RDMA_NP_ADDRESS);
	ASSERT_LOAD(np_load_is_refused(load, 20));
	EXPECT_TRUE(np_load_stop(load));
	/* Its pages are not there for anybody who does not ask, either. */
	ASSERT_EQ(0, np_read(&self->peer, 0, NP_DATA_LEN, np_read_addr(&self->info, 0),
			     self->info.read_key));
	EXPECT_TRUE(np_all(self->peer.buf, NP_DATA_LEN, self->info.signature));
	ASSERT_EQ(0, freeze(false));
	ASSERT_EQ(self->pid, waitpid(self->pid, &status, 0));
	EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) TH_LOG("%x", status);
}

TEST_HARNESS_MAIN
