// SPDX-License-Identifier: GPL-2.0
/*
 * The life of memory under traffic: what the owner does to its mapping, and peers have to
 * notice, and pages that the hardware loses.
 */
#include <fcntl.h>
#include <linux/kernel-page-flags.h>
#include <signal.h>

#include "np_memory.h"

#ifndef MADV_COLD
#define MADV_COLD 20
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* --- protection and fork ------------------------------------------------------------ */

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

/* --- pages that the hardware loses ------------------------------------------------------- */

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
	ASSERT_NE(0, np_frame_flags(p) & huge);
	ASSERT_EQ(-1, madvise(p, PAGE, MADV_HWPOISON));
	EXPECT_EQ(EHWPOISON, errno);
	EXPECT_EQ(1, poisoned);
	ASSERT_EQ(huge | bad, np_frame_flags(p) & (huge | bad));
	ASSERT_EQ(0, np_read_proven(peer, &pair->info, 0, 0, HUGE_PAGE));
	EXPECT_EQ(-1, np_differs(peer->buf, HUGE_PAGE, 1));
	EXPECT_EQ(-1, np_differs(pair->data, HUGE_PAGE, 1));
	np_hold_free(pair->owner.ctx, hold);
	ASSERT_TRUE(np_wait_until(!madvise(p, PAGE, MADV_COLD) &&
				  (np_frame_flags(p) & (huge | bad)) == bad));
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
		ASSERT_TRUE(np_wait_until((np_frame_flags(p) & bits) == bits));
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

TEST_HARNESS_MAIN
