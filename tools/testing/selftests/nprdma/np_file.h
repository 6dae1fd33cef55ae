/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The fixture of tests of regions in files, and the tests that np_file runs without leases and
 * np_leased_file under leases. Each of the two has variants of its own.
 */
#ifndef NP_FILE_H
#define NP_FILE_H

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "np_change.h"
#include "np_leaser.h"

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define SOME	8U	/* pages of which it is certain that they are leased */

#define DIR		"/tmp/np_file"
#define IMAGE		"/tmp/np_file.image"
#define PMEM		"/dev/pmem0"

enum kind { TMPFS, MEMFD, HUGETLB, HUGETLB_PRIVATE, DISK, DISK_PRIVATE };

FIXTURE(file) {
	struct np_pair pair;
	struct np_load load;
	struct np_leaser leaser;
	uint8_t *data;		/* of the first page that the peer uses */
	int fd;
	int flags;		/* of its mapping */
	int huge_pages;		/* that there were before */
	bool mounted;
};

FIXTURE_VARIANT(file) {
	enum kind kind;
	const char *mkfs;
	bool dax;		/* on persistent memory, without page cache */
	enum np_leaser_kind lease;
};

static bool is_huge(enum kind kind)
{
	return kind == HUGETLB || kind == HUGETLB_PRIVATE;
}

/* A page that is written there is a copy, which no file has. */
static bool is_private(enum kind kind)
{
	return kind == HUGETLB_PRIVATE || kind == DISK_PRIVATE;
}

static bool is_swapped(enum kind kind)
{
	return kind == TMPFS || kind == MEMFD || kind == DISK_PRIVATE;
}

#define HUGE_PAGES "/proc/sys/vm/nr_hugepages"

static int huge_pages(int want)
{
	FILE *f = fopen(HUGE_PAGES, "r+e");
	int have = -1;

	if (!f)
		return -errno;
	if (fscanf(f, "%d", &have) != 1)
		have = -EIO;
	rewind(f);
	if (want >= 0)
		fprintf(f, "%d\n", want);
	fclose(f);
	return have;
}

/* The image is in memory; the file system does not know. */
static int make_disk(const char *mkfs)
{
	char command[200];
	int fd = open(IMAGE, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600), ret = 0;

	if (fd < 0)
		return -errno;
	if (ftruncate(fd, 384 << 20))
		ret = -errno;
	close(fd);
	if (ret)
		return ret;
	/* Detached with the last user, which is the mount: it wants no other writer. */
	snprintf(command, sizeof(command),
		 "%s " IMAGE " && dev=$(losetup -f --show " IMAGE ") && "
		 "{ mount \"$dev\" " DIR "; e=$?; losetup -d \"$dev\"; exit $e; }", mkfs);
	return system(command) ? -EIO : 0;
}

/* "guests" says that there is such memory. */
static int make_pmem(const char *mkfs)
{
	char command[200];

	snprintf(command, sizeof(command), "%s " PMEM " && mount -o dax " PMEM " " DIR, mkfs);
	return system(command) ? -EIO : 0;
}

static bool is_dax(int fd)
{
	struct statx stat = {};

	return !statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &stat) &&
	       stat.stx_attributes & STATX_ATTR_DAX;
}

static int open_file(enum kind kind)
{
	int fd;

	if (kind == MEMFD || kind == HUGETLB)
		fd = memfd_create("np", MFD_CLOEXEC | MFD_ALLOW_SEALING |
				  (kind == HUGETLB ? MFD_HUGETLB : 0));
	else
		fd = open(DIR "/file", O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, NP_DATA_LEN)) {
		close(fd);
		return -errno;
	}
	return fd;
}

/* The file from @offset on, from where the region begins. */
static int map_file(FIXTURE_DATA(file) *self, int prot, off_t offset)
{
	return mmap(self->pair.data, NP_DATA_LEN - offset, prot, self->flags | MAP_FIXED, self->fd,
		    offset) == self->pair.data ? 0 : -errno;
}

FIXTURE_SETUP(file)
{
	struct np_pair *pair = &self->pair;

	self->fd = -1;
	self->flags = is_private(variant->kind) ? MAP_PRIVATE : MAP_SHARED;
	ASSERT_EQ(0, np_pair_open(pair));
	if (is_huge(variant->kind)) {
		self->huge_pages = huge_pages(16);
		ASSERT_LE(0, self->huge_pages);
	}
	if (variant->kind == TMPFS || variant->mkfs) {
		ASSERT_TRUE(!mkdir(DIR, 0700) || errno == EEXIST);
		ASSERT_EQ(0, variant->dax ? make_pmem(variant->mkfs) :
			     variant->mkfs ? make_disk(variant->mkfs) :
					     mount("np", DIR, "tmpfs", 0, NULL));
		self->mounted = true;
	}
	if (variant->kind == HUGETLB_PRIVATE) {
		self->flags |= MAP_ANONYMOUS | MAP_HUGETLB;
	} else {
		self->fd = open_file(variant->kind);
		ASSERT_LE(0, self->fd) TH_LOG("%s", strerror(-self->fd));
		ASSERT_EQ(variant->dax, is_dax(self->fd));
	}
	/* Where there is room for huge pages, so that slots and they have the same ends. */
	pair->data = np_map(NP_DATA_LEN);
	ASSERT_NE(NULL, pair->data);
	ASSERT_EQ(0, map_file(self, PROT_READ | PROT_WRITE, 0));
	pair->mr = ibv_reg_mr(pair->owner.pd, pair->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, pair->mr);
	ASSERT_EQ(0, np_pair_resolve(pair));
	self->data = pair->data + FIRST_PAGE * PAGE;
	np_load_init(&self->load, &pair->peer, &pair->info, self->data, FIRST_PAGE * PAGE, PAGES);
	/* The kernel refuses long-term pins for write of what has to be written back. */
	self->load.no_holds = variant->kind == DISK;
	/* A lease of one page of a huge one would pin all of it. */
	ASSERT_EQ(0, np_leaser_init(&self->leaser, variant->lease, &self->load, &pair->owner,
				    pair->mr, is_huge(variant->kind)));
}

FIXTURE_TEARDOWN_PARENT(file)
{
	NP_CHECK_USAGE(&self->pair.before);
	if (self->mounted) {
		EXPECT_TRUE(np_wait_until(!umount(DIR) || errno != EBUSY));
	}
	unlink(IMAGE);
	if (self->huge_pages >= 0 && is_huge(variant->kind)) {
		EXPECT_LE(0, huge_pages(self->huge_pages));
	}
}

static atomic_int poisoned;

static void on_poison(int number, siginfo_t *info, void *context)
{
	poisoned += info->si_code == BUS_MCEERR_AR;
}

static int poison(uint8_t *page)
{
	struct sigaction action = { .sa_sigaction = on_poison, .sa_flags = SA_SIGINFO };

	if (sigaction(SIGBUS, &action, NULL))
		return -errno;
	/*
	 * Not while somebody else has the page in his hands for a moment. The kernel says EBUSY
	 * as well if a page is still pinned when it has done its work.
	 */
	if (!np_wait_until(!madvise(page, PAGE, MADV_HWPOISON) || errno != EBUSY ||
			   !np_present(page)))
		return -EBUSY;
	return np_present(page) ? -errno : 0;
}

/* Another one in its place, of the file again if there is one. */
static int map_page_again(FIXTURE_DATA(file) *self, size_t off, size_t len)
{
	uint8_t *p = self->pair.data + off;

	return mmap(p, len, PROT_READ | PROT_WRITE, self->flags | MAP_FIXED, self->fd,
		    self->fd < 0 ? 0 : off) == p && !madvise(p, len, MADV_RANDOM) ? 0 : -errno;
}

/* Pages to change, which are leased if any are, and may be refused and lost from now on. */
static bool begin_change(FIXTURE_DATA(file) *self, unsigned int first, unsigned int n)
{
	if (!np_load_goes_on(&self->load, PAGES) || !np_leaser_begin(&self->leaser, first, n))
		return false;
	np_load_step(&self->load, first, n);
	return true;
}

/* Each lease is a message or an event, so there are fewer rounds of those. */
static int rounds_of(enum np_leaser_kind lease)
{
	return lease == NP_LEASER_NONE ? ROUNDS : ROUNDS / 2;
}

static int drop_caches(void)
{
	int fd = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC), ret = 0;

	if (fd < 0)
		return -errno;
	if (write(fd, "3", 1) != 1)
		ret = -errno;
	close(fd);
	return ret;
}

static long pages_out(const uint8_t *data)
{
	long out = 0;

	for (unsigned int page = 0; page < PAGES; page++)
		out += !np_present(data + page * PAGE);
	return out;
}

/* What the kernel does to the pages of a file on its own; nobody loses anything. */
static int disturb(uint8_t *data, enum kind kind, int fd, int i)
{
	int status;
	pid_t pid;

	switch (kind) {
	case DISK:
		if (i % 3 == 0)
			return fsync(fd);
		if (msync(data, PAGES * PAGE, MS_SYNC))
			return -errno;
		/* Only pages that nobody has mapped; then those that are, if they are clean. */
		return i % 3 == 1 ? drop_caches() :
		       madvise(data, PAGES * PAGE, MADV_PAGEOUT) ? -errno : 0;
	case TMPFS:
	case MEMFD:
	case DISK_PRIVATE:
		return madvise(data, PAGES * PAGE, MADV_PAGEOUT) ? -errno : 0;
	default:
		/* Out of the page tables; the file has the page still. */
		if (kind == HUGETLB && i % 2)
			return madvise(data - (uintptr_t)data % HUGE_PAGE, HUGE_PAGE,
				       MADV_DONTNEED) ? -errno : 0;
		pid = np_fork();
		if (!pid) {
			/* A private page is copied, a shared one is shared. */
			if (kind == HUGETLB_PRIVATE)
				data[5] = 0xff;
			_exit(0);
		}
		return pid < 0 || waitpid(pid, &status, 0) != pid ? -errno : -status;
	}
}

/* Does that take pages out of the page table, those that are leased as well? */
static bool disturbs_leases(enum kind kind, int i)
{
	switch (kind) {
	case DISK:
		return i % 3 == 2;
	case DISK_PRIVATE:
		/* A copy is anonymous: the kernel leaves it where it is while it is pinned. */
		return false;
	case HUGETLB:
		return i % 2;
	default:
		return true;
	}
}

/* For 100 ms, which is enough for a recall and its answer. */
static bool ends_soon(struct np_leaser *leaser, unsigned int first)
{
	bool none = false;

	for (int i = 0; !none && i < 50; i++) {
		none = np_leaser_has_none(leaser, first, SOME, false);
		if (!none)
			np_pause();
	}
	return none;
}

/*
 * Until no page of [@first, @first + SOME) is leased, if it comes to that. A page stays while it is
 * in somebody's hands for a moment, or on a CPU's list of new pages: so this asks on each CPU.
 */
static int disturb_leased(FIXTURE_DATA(file) *self, enum kind kind, unsigned int first, int i)
{
	const uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	cpu_set_t before, one;
	bool ended = false;
	int ret = 0;

	if (sched_getaffinity(0, sizeof(before), &before))
		return -errno;
	for (long k = 0; !ret && !ended && !atomic_load(&self->load.stop); k++) {
		CPU_ZERO(&one);
		CPU_SET(k % cpus, &one);
		sched_setaffinity(0, sizeof(one), &one);
		ret = disturb(self->data, kind, self->fd, i);
		ended = !disturbs_leases(kind, i) || ends_soon(&self->leaser, first);
		if (!ended && np_now_ms() > deadline)
			ret = -ETIMEDOUT;
	}
	sched_setaffinity(0, sizeof(before), &before);
	return ret ?: ended ? 0 : -EIO;
}

TEST_F(file, keeps_what_peers_write)
{
	struct np_load *load = &self->load;
	const bool cached = variant->kind == DISK && !variant->dax;
	const bool leased = variant->lease != NP_LEASER_NONE;
	struct rdma_np_mr_info before, after;
	int recalled = 0;
	long swapped = 0, met = 0, major;
	uint8_t *page;
	int fd;

	if (is_swapped(variant->kind)) {
		ASSERT_TRUE(np_disk_swap());
	}
	/* A page that is read from the device brings no others. */
	ASSERT_EQ(0, madvise(self->pair.data, NP_DATA_LEN, MADV_RANDOM));
	/* Private copies are the peer's work from the first one on. */
	if (variant->kind == DISK_PRIVATE)
		load->data = NULL;
	ASSERT_EQ(0, np_load_start(load));
	load->data = self->data;
	ASSERT_EQ(0, np_query_mr(self->pair.mr, &before));
	major = before.faults_major;
	for (int i = 0; i < ROUNDS; i++) {
		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		/* Peers had pages, and did not have them any more. */
		ASSERT_EQ(0, np_query_mr(self->pair.mr, &before));
		if (leased) {
			/* In the slot that disturb() is about, where pages are huge. */
			const unsigned int first = random_of(i, PAGES / 2 - SOME);

			ASSERT_LOAD(np_leaser_begin(&self->leaser, first, SOME));
			ASSERT_EQ(0, disturb_leased(self, variant->kind, first, i))
				TH_LOG("round %d: %s", i, np_load_why(load));
			recalled += disturbs_leases(variant->kind, i);
			/* Write-back takes the right to write, and leaves the readers alone. */
			if (variant->kind == DISK && i % 3 == 0) {
				ASSERT_LOAD(np_load_goes_on(load, PAGES));
				EXPECT_TRUE(np_leaser_has_all(&self->leaser, first, SOME));
			}
			np_leaser_goes_on(&self->leaser);
		} else {
			ASSERT_EQ(0, disturb(self->data, variant->kind, self->fd, i));
		}
		if (is_swapped(variant->kind))
			swapped += pages_out(self->data);
		ASSERT_EQ(0, np_query_mr(self->pair.mr, &after));
		met += after.pages_invalidated > before.pages_invalidated;
	}
	ASSERT_LOAD(np_load_goes_on(load, PAGES));
	EXPECT_RIGHT(load);
	ASSERT_EQ(0, np_query_mr(self->pair.mr, &after));
	major = after.faults_major - major;
	TH_LOG("%ld of %d times pages went, %ld were paged out, %ld were read for peers", met,
	       ROUNDS, swapped, major);
	/* What is leased does not go: it is out of the page table, and there again at once. */
	EXPECT_RECALLS(recalled);
	if (!leased) {
		EXPECT_LE(ROUNDS / 2, met);
		if (is_swapped(variant->kind)) {
			EXPECT_LT(0, swapped);
		}
		if (cached) {
			EXPECT_LE(PAGES, major);
		}
	}
	if (!variant->mkfs)
		return;
	/* From the device, past the page cache, once it has been written back. */
	ASSERT_EQ(0, fsync(self->fd));
	page = aligned_alloc(PAGE, PAGE);
	fd = open(DIR "/file", O_RDONLY | O_DIRECT | O_CLOEXEC);
	ASSERT_LE(0, fd);
	for (unsigned int i = 0; i < PAGES; i++) {
		ASSERT_EQ((ssize_t)PAGE, pread(fd, page, PAGE, (FIRST_PAGE + i) * PAGE));
		EXPECT_TRUE(variant->kind == DISK ? np_load_page_is_right(load, i, page) :
						    np_all(page, PAGE, 0)) TH_LOG("page %u", i);
	}
}

TEST_F(file, truncation_is_an_address_error)
{
	/* From here on: also the end of a huge page. */
	const unsigned int first = 512 - FIRST_PAGE, n = PAGES - first;
	struct np_load *load = &self->load;
	struct np_pair *pair = &self->pair;

	if (variant->kind == HUGETLB_PRIVATE)
		SKIP(return, "not a file");
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < rounds_of(variant->lease); i++) {
		ASSERT_LOAD(begin_change(self, first, n));
		ASSERT_EQ(0, ftruncate(self->fd, HUGE_PAGE));
		ASSERT_LOAD(np_leaser_end(&self->leaser, first, n, false));
		np_load_lose_for_zeros(load, first, n);
		np_load_gone(load, first, n, RDMA_NP_ADDRESS, RDMA_NP_ADDRESS);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		np_load_step(load, first, n);
		ASSERT_EQ(0, ftruncate(self->fd, NP_DATA_LEN));
		np_load_step(load, first, n);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_LT(0, load->zeros);
	EXPECT_RECALLS(rounds_of(variant->lease));
	/* What is leased still would be read. */
	if (variant->lease != NP_LEASER_NONE)
		return;
	/* Nobody writes now: what was cut off does not come back when the file grows. */
	for (int write = 0; write < 2; write++) {
		memset(pair->data + HUGE_PAGE, 1, n * PAGE);
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, HUGE_PAGE, n * PAGE, RDMA_NP_FAULT_WRITE, NULL));
		ASSERT_EQ(0, np_pair_read(pair, HUGE_PAGE, n * PAGE));
		ASSERT_TRUE(np_all(pair->peer.buf, n * PAGE, 0x0101010101010101));
		ASSERT_EQ(0, ftruncate(self->fd, HUGE_PAGE));
		ASSERT_EQ(0, ftruncate(self->fd, NP_DATA_LEN));
		ASSERT_EQ(0, np_pair_read(pair, HUGE_PAGE, n * PAGE));
		EXPECT_TRUE(np_all(pair->peer.buf, n * PAGE, pair->info.signature));
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, HUGE_PAGE, n * PAGE,
					       write ? RDMA_NP_FAULT_WRITE : 0, NULL));
		ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, HUGE_PAGE, n * PAGE));
		EXPECT_TRUE(np_all(pair->peer.buf, n * PAGE, 0));
		EXPECT_TRUE(np_all(pair->data + HUGE_PAGE, n * PAGE, 0));
	}
}

TEST_F(file, punched_hole_is_zeros_and_can_be_written)
{
	const unsigned int n = PAGES - (512 - FIRST_PAGE);
	struct np_load *load = &self->load;
	struct rdma_np_event event;

	if (variant->kind == HUGETLB_PRIVATE)
		SKIP(return, "not a file");
	if (variant->kind == DISK_PRIVATE)
		SKIP(return, "a private copy stays where the file has a hole");
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < rounds_of(variant->lease); i++) {
		/* Each time the second slot, which is a huge page where there are such. */
		ASSERT_LOAD(begin_change(self, PAGES - n, n));
		ASSERT_EQ(0, fallocate(self->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
				       HUGE_PAGE, HUGE_PAGE));
		ASSERT_LOAD(np_leaser_end(&self->leaser, PAGES - n, n, false));
		np_load_lose(load, PAGES - n, n);
		for (int k = 0; k < 3; k++)
			np_load_step(load, PAGES - n, n);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_RECALLS(rounds_of(variant->lease));
	if (variant->lease != NP_LEASER_NONE)
		return;
	ASSERT_EQ(0, fallocate(self->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, HUGE_PAGE,
			       HUGE_PAGE));
	ASSERT_EQ(0, np_pair_read(&self->pair, HUGE_PAGE, PAGE));
	EXPECT_TRUE(np_all(self->pair.peer.buf, PAGE, self->pair.info.signature));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(&self->pair, HUGE_PAGE, PAGE, 0, &event));
	ASSERT_EQ(0, np_pair_read(&self->pair, HUGE_PAGE, PAGE));
	EXPECT_TRUE(np_all(self->pair.peer.buf, PAGE, 0));
}

TEST_F(file, read_only_mapping_is_read_and_not_written)
{
	/* Of the owner's own buffers it is the address that is wrong, as with pinned ones. */
	const int write = variant->lease == NP_LEASER_LOCAL && variant->kind != DISK ?
				  RDMA_NP_ADDRESS : RDMA_NP_ACCESS;
	struct np_load *load = &self->load;

	if (is_private(variant->kind))
		SKIP(return, "what is written is not in a file, and gone with the mapping");
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < rounds_of(variant->lease); i++) {
		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		ASSERT_LOAD(np_leaser_begin(&self->leaser, random_of(i, PAGES - SOME), SOME));
		np_load_step(load, 0, PAGES);
		ASSERT_EQ(0, map_file(self, PROT_READ, 0));
		ASSERT_LOAD(np_leaser_end(&self->leaser, 0, PAGES, false));
		np_load_gone(load, 0, PAGES, RDMA_NP_OK, write);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		np_load_step(load, 0, PAGES);
		ASSERT_EQ(0, map_file(self, PROT_READ | PROT_WRITE, 0));
		np_load_step(load, 0, PAGES);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
	EXPECT_RECALLS(rounds_of(variant->lease));
}

#endif /* NP_FILE_H */
