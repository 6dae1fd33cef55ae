// SPDX-License-Identifier: GPL-2.0
/*
 * Memory that its owner changes while it is leased, to a peer and to the owner itself: what
 * np_memory does, under leases. The kernel asks for the leases. What is leased after that is
 * what is there now, and nothing is lost that the owner has not given up.
 */
#include <fcntl.h>
#include <linux/kernel-page-flags.h>
#include <signal.h>

#include "np_change.h"
#include "np_leaser.h"

#ifndef MADV_COLD
#define MADV_COLD 20
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define SOME	8U	/* pages that one change is about */
#define TIMES	6	/* changes of a test */

FIXTURE(leased) {
	struct np_pair pair;
	struct np_load load;
	struct np_leaser leaser;
	uint8_t *data;
	uint8_t *away;		/* where there is room for a slot */
};

FIXTURE_VARIANT(leased) {
	enum np_leaser_kind kind;
	bool huge;
	bool slots;		/* one lease for all of a huge page */
};

FIXTURE_VARIANT_ADD(leased, remote) { .kind = NP_LEASER_REMOTE };
FIXTURE_VARIANT_ADD(leased, local) { .kind = NP_LEASER_LOCAL };
FIXTURE_VARIANT_ADD(leased, remote_huge) { .kind = NP_LEASER_REMOTE, .huge = true };
FIXTURE_VARIANT_ADD(leased, local_huge) { .kind = NP_LEASER_LOCAL, .huge = true };
FIXTURE_VARIANT_ADD(leased, remote_slots) {
	.kind = NP_LEASER_REMOTE, .huge = true, .slots = true
};

FIXTURE_VARIANT_ADD(leased, local_slots) {
	.kind = NP_LEASER_LOCAL, .huge = true, .slots = true
};

FIXTURE_SETUP(leased)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, memory_open(pair, &self->load, &self->data));
	self->away = np_map(HUGE_PAGE);
	ASSERT_NE(NULL, self->away);
	if (variant->huge) {
		ASSERT_EQ(0, madvise(pair->data, NP_DATA_LEN, MADV_HUGEPAGE));
		/* Not while somebody else has a page in his hands for a moment. */
		ASSERT_TRUE(np_wait_until(!madvise(pair->data, NP_DATA_LEN, MADV_COLLAPSE)));
	}
	ASSERT_EQ(0, np_leaser_init(&self->leaser, variant->kind, &self->load, &pair->owner,
				    pair->mr, variant->slots));
}

FIXTURE_TEARDOWN_PARENT(leased)
{
	NP_CHECK_USAGE(&self->pair.before);
}

/* Pages to change, which are leased for writing, and may be refused and lost from now on. */
static bool begin_change(struct np_leaser *leaser, unsigned int first, unsigned int n)
{
	if (!np_load_goes_on(leaser->load, PAGES) || !np_leaser_begin(leaser, first, n))
		return false;
	np_load_step(leaser->load, first, n);
	return true;
}

static unsigned int some_page(int i)
{
	return random_of(i, PAGES - SOME);
}

#define EXPECT_RECALLS(least)						\
	do {								\
		unsigned long recalls_ = np_leaser_recalls(&self->leaser);	\
									\
		EXPECT_LE((unsigned long)(least), recalls_);			\
		TH_LOG("%lu leases, %lu recalls, %lu requests under them", self->leaser.leases, \
		       recalls_, self->leaser.uses);			\
	} while (0)

/* --- protection and fork ------------------------------------------------------------ */

TEST_F(leased, protection_is_that_of_the_next_lease)
{
	const int write = variant->kind == NP_LEASER_REMOTE ? RDMA_NP_ACCESS : RDMA_NP_ADDRESS;
	struct np_load *load = &self->load;

	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < TIMES; i++) {
		unsigned int first = some_page(i);
		uint8_t *p = self->data + first * PAGE;
		bool none = i % 2;

		ASSERT_LOAD(begin_change(&self->leaser, first, SOME));
		ASSERT_EQ(0, mprotect(p, SOME * PAGE, none ? PROT_NONE : PROT_READ));
		ASSERT_LOAD(np_leaser_end(&self->leaser, first, SOME, !none));
		np_load_gone(load, first, SOME, none ? RDMA_NP_ADDRESS : RDMA_NP_OK,
			     none ? RDMA_NP_ADDRESS : write);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		np_load_step(load, first, SOME);
		ASSERT_EQ(0, mprotect(p, SOME * PAGE, PROT_READ | PROT_WRITE));
		np_load_step(load, first, SOME);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_RECALLS(TIMES);
}

static uint64_t sum_of(const uint64_t *data)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < PAGES * PAGE / 8; i++)
		sum = sum * 31 + data[i];
	return sum;
}

/* A child that sees in the end what it saw at first; it ends when *@hold is closed. */
static pid_t fork_and_look(const uint8_t *data, int *hold)
{
	int p[2], there[2];
	pid_t pid;
	char c = 0;

	if (pipe2(p, O_CLOEXEC) || pipe2(there, O_CLOEXEC))
		return -1;
	pid = np_fork();
	if (!pid) {
		uint64_t sum;

		close(p[1]);
		sum = sum_of((const uint64_t *)data);
		if (write(there[1], &c, 1) != 1)
			_exit(2);
		_exit(read(p[0], &c, 1) || sum != sum_of((const uint64_t *)data));
	}
	close(p[0]);
	close(there[1]);
	if (pid > 0 && read(there[0], &c, 1) != 1)
		pid = -1;
	close(there[0]);
	*hold = p[1];
	return pid;
}

TEST_F(leased, fork_leaves_leased_pages_to_the_parent)
{
	struct np_load *load = &self->load;
	int hold, status;
	pid_t pid;

	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < TIMES; i++) {
		unsigned int first = some_page(i);

		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		ASSERT_LOAD(np_leaser_begin(&self->leaser, first, SOME));
		pid = fork_and_look(self->data, &hold);
		ASSERT_LT(0, pid);
		ASSERT_LOAD(np_leaser_end(&self->leaser, first, SOME, true));
		ASSERT_LOAD(np_load_goes_on(load, 4 * PAGES));
		close(hold);
		ASSERT_EQ(pid, waitpid(pid, &status, 0));
		EXPECT_EQ(0, status);
	}
	EXPECT_RIGHT(load);
	EXPECT_RECALLS(TIMES);
}

/* Leases to read: none of them may show a page that the child has, and the parent has no more. */
TEST_F(leased, owners_stores_after_fork_are_read_at_once)
{
	struct np_load *load = &self->load;
	int hold, status;
	pid_t pid;

	load->writes_of_8 = 0;
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < TIMES; i++) {
		ASSERT_LOAD(np_load_goes_on(load, 2 * PAGES));
		pid = fork_and_look(self->data, &hold);
		ASSERT_LT(0, pid);
		for (unsigned int page = 0; page < PAGES; page += 3)
			np_load_store(load, page);
		ASSERT_LOAD(np_load_goes_on(load, 2 * PAGES));
		close(hold);
		ASSERT_EQ(pid, waitpid(pid, &status, 0));
		EXPECT_EQ(0, status);
		for (unsigned int page = 0; page < PAGES; page += 2)
			np_load_store(load, page);
	}
	EXPECT_RIGHT(load);
	EXPECT_RECALLS(0);
}

TEST_F(leased, madv_dontfork_recalls_nothing)
{
	struct np_load *load = &self->load;
	int hold, status;
	pid_t pid;

	ASSERT_EQ(0, madvise(self->pair.data, NP_DATA_LEN, MADV_DONTFORK));
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < TIMES; i++) {
		unsigned int first = some_page(i);

		ASSERT_LOAD(np_leaser_begin(&self->leaser, first, SOME));
		/* It has other memory to look at. */
		pid = fork_and_look(self->away, &hold);
		ASSERT_LT(0, pid);
		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		atomic_store(&self->leaser.keep, false);
		close(hold);
		ASSERT_EQ(pid, waitpid(pid, &status, 0));
		EXPECT_EQ(0, status);
	}
	EXPECT_RIGHT(load);
	EXPECT_EQ(0, np_leaser_recalls(&self->leaser));
}

TEST_F(leased, soft_dirty_recalls_what_is_written)
{
	struct np_load *load = &self->load;

	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < TIMES; i++) {
		unsigned int first = some_page(i);

		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		ASSERT_LOAD(np_leaser_begin(&self->leaser, first, SOME));
		ASSERT_EQ(0, np_write_text("/proc/self/clear_refs", "4"));
		ASSERT_LOAD(np_leaser_end(&self->leaser, first, SOME, true));
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_RECALLS(TIMES);
}

/* --- mappings that come and go --------------------------------------------------------- */

/* What is written before the recall is seen is written to what was there, and lost with it. */
TEST_F(leased, unmapped_pages_are_address_errors_until_others_are_there)
{
	struct np_load *load = &self->load;

	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < TIMES; i++) {
		unsigned int first = some_page(i);
		uint8_t *p = self->data + first * PAGE;

		ASSERT_LOAD(begin_change(&self->leaser, first, SOME));
		ASSERT_EQ(0, munmap(p, SOME * PAGE));
		ASSERT_LOAD(np_leaser_end(&self->leaser, first, SOME, false));
		np_load_lose_for_zeros(load, first, SOME);
		np_load_gone(load, first, SOME, RDMA_NP_ADDRESS, RDMA_NP_ADDRESS);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		np_load_step(load, first, SOME);
		ASSERT_EQ(p, mmap(p, SOME * PAGE, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
		np_load_step(load, first, SOME);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_RECALLS(TIMES);
}

TEST_F(leased, dropped_pages_are_not_what_the_next_lease_is_of)
{
	struct np_load *load = &self->load;

	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < 2 * TIMES; i++) {
		unsigned int first = some_page(i);

		ASSERT_LOAD(begin_change(&self->leaser, first, SOME));
		ASSERT_EQ(0, madvise(self->data + first * PAGE, SOME * PAGE, MADV_DONTNEED));
		ASSERT_LOAD(np_leaser_end(&self->leaser, first, SOME, false));
		np_load_lose(load, first, SOME);
		/* Nothing is refused. */
		for (int k = 0; k < 3; k++)
			np_load_step(load, first, SOME);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_RECALLS(2 * TIMES);
}

/* What is written before the recall is seen is written to the page, wherever it is. */
TEST_F(leased, moved_pages_are_reached_when_they_are_back)
{
	const unsigned int n = variant->slots ? PAGES / 2 : SOME;
	const size_t len = variant->slots ? HUGE_PAGE : SOME * PAGE;
	struct np_load *load = &self->load;
	uint8_t *away = self->away;

	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < TIMES; i++) {
		unsigned int first = variant->slots ? i % 2 * n : some_page(i);
		uint8_t *p = variant->slots ? self->pair.data + i % 2 * HUGE_PAGE :
					      self->data + first * PAGE;

		ASSERT_LOAD(begin_change(&self->leaser, first, n));
		ASSERT_EQ(away, mremap(p, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, away));
		ASSERT_LOAD(np_leaser_end(&self->leaser, first, n, false));
		np_load_gone(load, first, n, RDMA_NP_ADDRESS, RDMA_NP_ADDRESS);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		np_load_step(load, first, n);
		ASSERT_EQ(p, mremap(away, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, p));
		np_load_step(load, first, n);
		/* So that nobody else moves in. */
		ASSERT_EQ(away, mmap(away, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS |
				     MAP_FIXED_NOREPLACE, -1, 0));
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_RECALLS(TIMES);
}

/* MREMAP_DONTUNMAP: the pages go, and the mapping stays. */
TEST_F(leased, moved_pages_are_not_what_the_next_lease_is_of)
{
	struct np_load *load = &self->load;

	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < TIMES; i++) {
		unsigned int first = some_page(i);
		uint8_t *p = self->data + first * PAGE;
		uint64_t sum;

		ASSERT_LOAD(begin_change(&self->leaser, first, SOME));
		ASSERT_EQ(self->away, mremap(p, SOME * PAGE, SOME * PAGE, MREMAP_MAYMOVE |
					     MREMAP_FIXED | MREMAP_DONTUNMAP, self->away));
		ASSERT_LOAD(np_leaser_end(&self->leaser, first, SOME, false));
		np_load_lose(load, first, SOME);
		for (int k = 0; k < 3; k++)
			np_load_step(load, first, SOME);
		/* From now on nobody writes there any more. */
		sum = np_pattern(*(uint64_t *)self->away, *(uint64_t *)(self->away + PAGE));
		ASSERT_LOAD(np_load_goes_on(load, 2 * PAGES));
		EXPECT_EQ(sum, np_pattern(*(uint64_t *)self->away,
					  *(uint64_t *)(self->away + PAGE)));
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_RECALLS(TIMES);
}

TEST_F(leased, shrunk_and_grown_mapping_loses_its_tail_only)
{
	const unsigned int first = 40, n = PAGES - 40;
	struct np_load *load = &self->load;
	uint8_t *start = self->data, *end = start + PAGES * PAGE;

	/* So that there is room to grow. */
	ASSERT_EQ(0, munmap(end, self->pair.data + NP_DATA_LEN - end));
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < TIMES; i++) {
		/* Of a slot that is not all there nothing is leased. */
		if (variant->slots)
			np_load_step(load, first, n);
		else
			ASSERT_LOAD(begin_change(&self->leaser, first, n));
		ASSERT_EQ(start, mremap(start, PAGES * PAGE, first * PAGE, 0));
		ASSERT_LOAD(np_leaser_end(&self->leaser, first, n, false));
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
	EXPECT_RECALLS(variant->slots ? 0 : TIMES);
}

/* --- pages that the hardware loses ------------------------------------------------------- */

static atomic_int poisoned;

static void on_poison(int number, siginfo_t *info, void *context)
{
	poisoned += info->si_code == BUS_MCEERR_AR;
}

/* A page that is pinned is unmapped all the same; a huge page with a pin in it is not. */
FIXTURE(small) {
	struct np_pair pair;
	struct np_load load;
	struct np_leaser leaser;
	uint8_t *data;
};

FIXTURE_VARIANT(small) {
	enum np_leaser_kind kind;
	bool slots;		/* one lease for all of a page table */
};

FIXTURE_VARIANT_ADD(small, remote) { .kind = NP_LEASER_REMOTE };
FIXTURE_VARIANT_ADD(small, local) { .kind = NP_LEASER_LOCAL };
FIXTURE_VARIANT_ADD(small, remote_slots) { .kind = NP_LEASER_REMOTE, .slots = true };
FIXTURE_VARIANT_ADD(small, local_slots) { .kind = NP_LEASER_LOCAL, .slots = true };

FIXTURE_SETUP(small)
{
	ASSERT_EQ(0, memory_open(&self->pair, &self->load, &self->data));
	ASSERT_EQ(0, np_leaser_init(&self->leaser, variant->kind, &self->load, &self->pair.owner,
				    self->pair.mr, variant->slots));
}

FIXTURE_TEARDOWN_PARENT(small)
{
	NP_CHECK_USAGE(&self->pair.before);
}

TEST_F(small, poisoned_page_is_an_address_error_until_it_is_replaced)
{
	struct sigaction action = { .sa_sigaction = on_poison, .sa_flags = SA_SIGINFO };
	struct np_load *load = &self->load;

	ASSERT_EQ(0, sigaction(SIGBUS, &action, NULL));
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < TIMES; i++) {
		unsigned int page = random_of(i, PAGES);
		uint8_t *p = self->data + page * PAGE;

		ASSERT_LOAD(begin_change(&self->leaser, page, 1));
		/* The kernel says EBUSY if the page is still pinned when it has done its work. */
		ASSERT_TRUE(np_wait_until(!madvise(p, PAGE, MADV_HWPOISON) || errno != EBUSY ||
					  !np_present(p)));
		EXPECT_EQ(i + 1, poisoned);
		ASSERT_FALSE(np_present(p));
		/* It goes alone, although one lease may be of many. */
		ASSERT_TRUE(np_present(p - PAGE));
		ASSERT_TRUE(np_present(p + PAGE));
		ASSERT_LOAD(np_leaser_end(&self->leaser, page, 1, false));
		np_load_lose_for_zeros(load, page, 1);
		np_load_gone(load, page, 1, RDMA_NP_ADDRESS, RDMA_NP_ADDRESS);
		ASSERT_LOAD(np_load_is_refused(load, 2));
		ASSERT_LOAD(np_load_goes_on(load, 2 * PAGES));
		np_load_step(load, page, 1);
		ASSERT_EQ(p, mmap(p, PAGE, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
		np_load_step(load, page, 1);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_RECALLS(TIMES);
}

/*
 * A page that was only read since it came from swap is in swap still. While it is leased, and so
 * pinned, the kernel may not be able to unmap it: then the owner is sent SIGBUS, and the page stays
 * mapped. Either way nobody misses it, neither its holder nor the others, later on.
 */
TEST_F(small, poisoned_page_that_swap_still_has_is_not_missed)
{
	struct sigaction action = { .sa_sigaction = on_poison, .sa_flags = SA_SIGINFO };
	struct np_leaser *leaser = &self->leaser;
	struct np_pair *pair = &self->pair;
	struct np_end *peer = &pair->peer;

	ASSERT_TRUE(np_disk_swap()) TH_LOG("swap on a disk is needed: scripts/vm run --swap 256M");
	ASSERT_EQ(0, sigaction(SIGBUS, &action, NULL));
	for (int i = 0; i < TIMES; i++) {
		/* Not one twice: what stays mapped is bad for good. */
		const unsigned int page = 9 * i + 1;
		uint8_t *p = self->data + page * PAGE;
		const size_t off = p - pair->data;

		np_fill(p, PAGE, i);
		ASSERT_EQ(0, np_page_out(p, PAGE));
		ASSERT_EQ(0, np_read_proven(peer, &pair->info, 0, off, PAGE));
		ASSERT_TRUE(np_present(p));
		ASSERT_EQ(0, np_leaser_take(leaser, page, false));
		ASSERT_FALSE(np_leaser_is_recalled(leaser, page, false));
		ASSERT_TRUE(np_wait_until(!madvise(p, PAGE, MADV_HWPOISON) || errno != EBUSY ||
					  !np_present(p)));
		EXPECT_TRUE(np_leaser_is_recalled(leaser, page, true));
		memset(peer->buf, 0xff, PAGE);
		ASSERT_EQ(0, np_leaser_use(leaser, page, false));
		EXPECT_EQ(-1, np_differs(peer->buf, PAGE, i));
		ASSERT_EQ(0, np_leaser_give_back(leaser, page));
		memset(peer->buf, 0xff, PAGE);
		ASSERT_EQ(0, np_read_proven(peer, &pair->info, 0, off, PAGE));
		EXPECT_EQ(-1, np_differs(peer->buf, PAGE, i));
		EXPECT_EQ(-1, np_differs(p, PAGE, i));
	}
}

/*
 * See np_memory: a huge page with a pin in it is not split, so the kernel changes nothing, calls
 * nobody, and the lease is not recalled. The page that is bad stays until the lease is given back.
 */
TEST_F(small, poisoned_page_stays_while_its_huge_page_is_leased)
{
	struct sigaction action = { .sa_sigaction = on_poison, .sa_flags = SA_SIGINFO };
	const uint64_t huge = 1ULL << KPF_THP, bad = 1ULL << KPF_HWPOISON;
	struct np_leaser *leaser = &self->leaser;
	struct np_pair *pair = &self->pair;
	struct np_end *peer = &pair->peer;
	uint8_t *p = pair->data + 7 * PAGE;

	ASSERT_EQ(0, sigaction(SIGBUS, &action, NULL));
	ASSERT_EQ(0, madvise(pair->data, HUGE_PAGE, MADV_HUGEPAGE));
	np_fill(pair->data, HUGE_PAGE, 1);
	np_fill(self->data, PAGE, 2);
	ASSERT_TRUE(np_wait_until(!madvise(pair->data, HUGE_PAGE, MADV_COLLAPSE)));
	ASSERT_EQ(0, np_leaser_take(leaser, 0, true));
	ASSERT_NE(0, np_frame_flags(p) & huge);
	ASSERT_EQ(-1, madvise(p, PAGE, MADV_HWPOISON));
	EXPECT_EQ(EHWPOISON, errno);
	EXPECT_EQ(1, poisoned);
	ASSERT_EQ(huge | bad, np_frame_flags(p) & (huge | bad));
	memset(peer->buf, 0xff, PAGE);
	ASSERT_EQ(0, np_leaser_use(leaser, 0, false));
	EXPECT_EQ(-1, np_differs(peer->buf, PAGE, 2));
	np_fill(peer->buf, PAGE, 3);
	ASSERT_EQ(0, np_leaser_use(leaser, 0, true));
	EXPECT_EQ(-1, np_differs(self->data, PAGE, 3));
	EXPECT_EQ(-1, np_differs(pair->data, FIRST_PAGE * PAGE, 1));
	ASSERT_EQ(huge | bad, np_frame_flags(p) & (huge | bad));
	ASSERT_EQ(0, np_leaser_give_back(leaser, 0));
	ASSERT_TRUE(np_wait_until(!madvise(p, PAGE, MADV_COLD) &&
				  (np_frame_flags(p) & (huge | bad)) == bad));
	ASSERT_EQ(0, np_read_proven(peer, &pair->info, 0, 0, FIRST_PAGE * PAGE));
	EXPECT_EQ(-1, np_differs(peer->buf, FIRST_PAGE * PAGE, 1));
	ASSERT_EQ(0, np_read_proven(peer, &pair->info, 0, FIRST_PAGE * PAGE, PAGE));
	EXPECT_EQ(-1, np_differs(peer->buf, PAGE, 3));
}

TEST_HARNESS_MAIN
