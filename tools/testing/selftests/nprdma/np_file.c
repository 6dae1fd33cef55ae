// SPDX-License-Identifier: GPL-2.0
/*
 * Regions in files under traffic: tmpfs, memfd, hugetlbfs, and ext4 and xfs on a block
 * device. What peers wrote is in the file, also when it is read back from the device;
 * what is cut off the file is an address error. See np_load.h for the traffic, and
 * Documentation/infiniband/nprdma-memory.rst for what is promised.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "np_harness.h"
#include "np_load.h"

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define PAGES		NP_LOAD_PAGES
#define FIRST_PAGE	(512 - PAGES / 2)	/* on both sides of a slot's, or huge page's, end */
#define ROUNDS		12

#define ASSERT_LOAD(condition) ASSERT_TRUE(condition) TH_LOG("%s", np_load_why(load))

#define DIR		"/tmp/np_file"
#define IMAGE		"/tmp/np_file.image"
#define PMEM		"/dev/pmem0"

enum kind { TMPFS, MEMFD, HUGETLB, HUGETLB_PRIVATE, DISK, DISK_PRIVATE };

FIXTURE(file) {
	struct np_pair pair;
	struct np_load load;
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
};

FIXTURE_VARIANT_ADD(file, tmpfs) { .kind = TMPFS };
FIXTURE_VARIANT_ADD(file, memfd) { .kind = MEMFD };
FIXTURE_VARIANT_ADD(file, hugetlb) { .kind = HUGETLB };
FIXTURE_VARIANT_ADD(file, hugetlb_private) { .kind = HUGETLB_PRIVATE };
FIXTURE_VARIANT_ADD(file, ext4) { .kind = DISK, .mkfs = "mkfs.ext4 -q -F" };
FIXTURE_VARIANT_ADD(file, ext4_private) { .kind = DISK_PRIVATE, .mkfs = "mkfs.ext4 -q -F" };
FIXTURE_VARIANT_ADD(file, xfs) { .kind = DISK, .mkfs = "mkfs.xfs -q -f" };
FIXTURE_VARIANT_ADD(file, ext4_dax) { .kind = DISK, .mkfs = "mkfs.ext4 -q -F", .dax = true };
FIXTURE_VARIANT_ADD(file, xfs_dax) {
	.kind = DISK, .mkfs = "mkfs.xfs -q -f -m reflink=0", .dax = true
};

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
		fd = memfd_create("np", MFD_CLOEXEC | (kind == HUGETLB ? MFD_HUGETLB : 0));
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
	if (variant->kind == HUGETLB || variant->kind == HUGETLB_PRIVATE) {
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
}

FIXTURE_TEARDOWN_PARENT(file)
{
	NP_CHECK_USAGE(&self->pair.before);
	if (self->mounted) {
		EXPECT_TRUE(np_wait_until(!umount(DIR) || errno != EBUSY));
	}
	unlink(IMAGE);
	if (self->huge_pages >= 0 &&
	    (variant->kind == HUGETLB || variant->kind == HUGETLB_PRIVATE)) {
		EXPECT_LE(0, huge_pages(self->huge_pages));
	}
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

TEST_F(file, keeps_what_peers_write)
{
	struct np_load *load = &self->load;
	const bool cached = variant->kind == DISK && !variant->dax;
	struct rdma_np_mr_info before, after;
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
		ASSERT_EQ(0, disturb(self->data, variant->kind, self->fd, i));
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
	EXPECT_LE(ROUNDS / 2, met);
	if (is_swapped(variant->kind)) {
		EXPECT_LT(0, swapped);
	}
	if (cached) {
		EXPECT_LE(PAGES, major);
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
	for (int i = 0; i < ROUNDS; i++) {
		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		np_load_step(load, first, n);
		ASSERT_EQ(0, ftruncate(self->fd, HUGE_PAGE));
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

/*
 * A huge page of tmpfs in which something is pinned cannot be split where the file ends
 * now. The next access before that place maps all of it again, what is behind included.
 */
TEST_F(file, peers_reach_beyond_the_end_what_the_owner_does)
{
	const size_t beyond = HUGE_PAGE + 200 * PAGE;
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	if (variant->kind != TMPFS && variant->kind != MEMFD)
		SKIP(return, "not tmpfs");
	for (int hold = 0; hold < 2; hold++) {
		bool reaches;

		memset(pair->data, 1, NP_DATA_LEN);
		ASSERT_EQ(0, madvise(pair->data + HUGE_PAGE, HUGE_PAGE, MADV_COLLAPSE))
			TH_LOG("%s", strerror(errno));
		event.hold_id = 0;
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, HUGE_PAGE, PAGE, hold ? RDMA_NP_FAULT_HOLD : 0,
					       &event));
		ASSERT_EQ(!!hold, !!event.hold_id);
		ASSERT_EQ(0, ftruncate(self->fd, beyond - PAGE));
		EXPECT_FALSE(np_readable(np_pair_word(pair, beyond)));
		pair->data[HUGE_PAGE] = 2;
		reaches = !madvise(pair->data + beyond, PAGE, MADV_POPULATE_WRITE);
		ASSERT_EQ(!!hold, reaches) TH_LOG("%s", strerror(errno));
		if (event.hold_id) {
			pair->data[beyond] = 3;
			EXPECT_EQ(0, np_release(&pair->peer, event.hold_id));
		}
		EXPECT_EQ(reaches ? RDMA_NP_OK : RDMA_NP_ADDRESS,
			  np_pair_fault(pair, beyond, PAGE, RDMA_NP_FAULT_WRITE, &event));
		EXPECT_EQ(reaches, np_readable(np_pair_word(pair, beyond)));
		if (reaches) {
			ASSERT_EQ(0, np_pair_read(pair, beyond, PAGE));
			EXPECT_EQ(3, pair->peer.buf[0]);
		}
		ASSERT_EQ(0, ftruncate(self->fd, NP_DATA_LEN));
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
	for (int i = 0; i < ROUNDS; i++) {
		/* Each time the second slot, which is a huge page where there are such. */
		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		np_load_step(load, PAGES - n, n);
		ASSERT_EQ(0, fallocate(self->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
				       HUGE_PAGE, HUGE_PAGE));
		np_load_lose(load, PAGES - n, n);
		for (int k = 0; k < 3; k++)
			np_load_step(load, PAGES - n, n);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
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
	struct np_load *load = &self->load;

	if (is_private(variant->kind))
		SKIP(return, "what is written is not in a file, and gone with the mapping");
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		np_load_step(load, 0, PAGES);
		ASSERT_EQ(0, map_file(self, PROT_READ, 0));
		np_load_gone(load, 0, PAGES, RDMA_NP_OK, RDMA_NP_ACCESS);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		np_load_step(load, 0, PAGES);
		ASSERT_EQ(0, map_file(self, PROT_READ | PROT_WRITE, 0));
		np_load_step(load, 0, PAGES);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
}

TEST_F(file, hold_is_refused_where_pages_cannot_be_pinned_for_long)
{
	struct rdma_np_event event = {};

	/* For write not where pages are written back, and not at all on DAX. */

	EXPECT_EQ(variant->kind == DISK ? RDMA_NP_ADDRESS : RDMA_NP_OK,
		  np_pair_fault(&self->pair, 0, PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event));
	if (event.hold_id) {
		EXPECT_EQ(0, np_release(&self->pair.peer, event.hold_id));
	}
	event.hold_id = 0;
	EXPECT_EQ(variant->dax ? RDMA_NP_ADDRESS : RDMA_NP_OK,
		  np_pair_fault(&self->pair, 0, PAGE, RDMA_NP_FAULT_HOLD, &event));
	if (event.hold_id) {
		EXPECT_EQ(0, np_release(&self->pair.peer, event.hold_id));
	}
}

/* --- bad memory ---------------------------------------------------------------------------- */

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
	/* Not while somebody else has the page in his hands for a moment. */
	if (!np_wait_until(!madvise(page, PAGE, MADV_HWPOISON) || errno != EBUSY))
		return -EBUSY;
	return np_present(page) ? -errno : 0;
}

/* WRITE all pages in use as a peer: 0 or an error. */
static int write_pages(struct np_pair *pair, uint64_t seed)
{
	for (unsigned int i = 0; i < PAGES; i++) {
		int ret;

		np_fill(pair->peer.buf, PAGE, seed + i);
		ret = np_write_proven(&pair->peer, &pair->info, 0, (FIRST_PAGE + i) * PAGE, PAGE);
		if (ret)
			return ret;
	}
	return 0;
}

/* The first page in use outside of [@off, @off + @len) that peer or owner finds wrong, or -1. */
static int wrong_outside(FIXTURE_DATA(file) *self, size_t off, size_t len, uint64_t seed)
{
	struct np_pair *pair = &self->pair;

	for (unsigned int i = 0; i < PAGES; i++) {
		const size_t at = (FIRST_PAGE + i) * PAGE;

		if (at >= off && at < off + len)
			continue;
		memset(pair->peer.buf, 0xff, PAGE);
		if (np_read_proven(&pair->peer, &pair->info, 0, at, PAGE) ||
		    np_differs(pair->peer.buf, PAGE, seed + i) != -1 ||
		    np_differs(pair->data + at, PAGE, seed + i) != -1)
			return i;
	}
	return -1;
}

static void expect_address_errors(struct __test_metadata *_metadata, struct np_pair *pair,
				  size_t off)
{
	for (int i = 0; i < 4; i++) {
		struct rdma_np_event event = {};

		EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(pair, off, PAGE,
						    (i & 1 ? RDMA_NP_FAULT_WRITE : 0) |
						    (i & 2 ? RDMA_NP_FAULT_HOLD : 0), &event));
	}
	EXPECT_FALSE(np_readable(np_pair_word(pair, off)));
	EXPECT_FALSE(np_writable(np_pair_word(pair, off)));
	/* Who does not ask brings nothing, and changes nothing. */
	memset(pair->peer.buf, 0xff, PAGE);
	EXPECT_EQ(0, np_pair_write(pair, off, PAGE));
	EXPECT_EQ(0, np_pair_read(pair, off, PAGE));
	EXPECT_TRUE(np_all(pair->peer.buf, PAGE, pair->info.signature));
}

/* Another one in its place, of the file again if there is one. */
static int map_page_again(FIXTURE_DATA(file) *self, size_t off, size_t len)
{
	uint8_t *p = self->pair.data + off;

	return mmap(p, len, PROT_READ | PROT_WRITE, self->flags | MAP_FIXED, self->fd,
		    self->fd < 0 ? 0 : off) == p && !madvise(p, len, MADV_RANDOM) ? 0 : -errno;
}

TEST_F(file, poisoned_page_is_an_address_error_until_it_is_replaced)
{
	const bool huge = variant->kind == HUGETLB || variant->kind == HUGETLB_PRIVATE;
	const bool shmem = variant->kind == TMPFS || variant->kind == MEMFD;
	/* It cannot be had from anywhere else, so it stays in the file, as what it is. */
	const bool stays = shmem || variant->kind == HUGETLB;
	const size_t unit = huge ? HUGE_PAGE : PAGE;
	struct np_pair *pair = &self->pair;
	struct np_end *peer = &pair->peer;
	int signals = 0;

	if (variant->dax)
		SKIP(return, "what is bad of it only the device could say");
	/* xfs would have several pages in one folio, which is not split while it is dirty. */
	ASSERT_EQ(0, madvise(pair->data, NP_DATA_LEN, MADV_RANDOM));
	for (int i = 0; i < 4; i++) {
		const uint64_t old = 1000 * (i + 1), seed = old + 500;
		const size_t at = (FIRST_PAGE + PAGES / 2 + 5 * i + 1) * PAGE;
		/* A huge page of hugetlbfs is one page. */
		const size_t off = huge ? HUGE_PAGE : at;
		const unsigned int page = at / PAGE - FIRST_PAGE;
		const bool split = shmem && i % 2;

		ASSERT_EQ(0, write_pages(pair, old));
		if (variant->kind == DISK) {
			ASSERT_EQ(0, fsync(self->fd));
		}
		ASSERT_EQ(0, write_pages(pair, seed));
		/*
		 * A huge page of tmpfs is split, and reached by one leaf until then. That unmaps
		 * all of it, and then nobody is sent a signal before he uses what is bad.
		 */
		if (split) {
			struct rdma_np_mr_info info;

			ASSERT_EQ(0, madvise(pair->data + HUGE_PAGE, HUGE_PAGE, MADV_COLLAPSE))
				TH_LOG("%s", strerror(errno));
			ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, at, PAGE, RDMA_NP_FAULT_WRITE, NULL));
			ASSERT_EQ(0, np_query_mr(pair->mr, &info));
			ASSERT_EQ(1, info.huge_leaves);
		}
		ASSERT_EQ(-1, wrong_outside(self, 0, 0, seed));

		ASSERT_EQ(0, poison(pair->data + at)) TH_LOG("%s", strerror(errno));
		signals += !split;
		EXPECT_EQ(signals, poisoned);
		expect_address_errors(_metadata, pair, at);
		if (huge) {
			expect_address_errors(_metadata, pair, HUGE_PAGE);
			expect_address_errors(_metadata, pair, NP_DATA_LEN - PAGE);
		}
		EXPECT_EQ(-1, wrong_outside(self, off, unit, seed));

		ASSERT_EQ(0, map_page_again(self, off, unit));
		if (stays) {
			expect_address_errors(_metadata, pair, at);
			ASSERT_EQ(0, fallocate(self->fd, FALLOC_FL_PUNCH_HOLE |
					       FALLOC_FL_KEEP_SIZE, off, unit));
			ASSERT_EQ(0, map_page_again(self, off, unit));
		}
		memset(peer->buf, 0xff, PAGE);
		ASSERT_EQ(0, np_read_proven(peer, &pair->info, 0, at, PAGE));
		/* What the device has is older than what was lost, of which the owner is told. */
		if (variant->kind == DISK) {
			EXPECT_EQ(-1, np_differs(peer->buf, PAGE, old + page));
			EXPECT_EQ(-1, fsync(self->fd));
			EXPECT_EQ(EIO, errno);
		} else {
			EXPECT_TRUE(np_all(peer->buf, PAGE, 0));
		}
		EXPECT_EQ(-1, wrong_outside(self, off, unit, seed));
	}
	ASSERT_EQ(0, write_pages(pair, 1));
	EXPECT_EQ(-1, wrong_outside(self, 0, 0, 1));
}

/* What was written back is read once more, into another frame. */
TEST_F(file, poisoned_page_that_the_device_still_has_comes_back)
{
	struct np_pair *pair = &self->pair;

	if (variant->kind != DISK || variant->dax)
		SKIP(return, "nothing is written back, or there is no frame to replace");
	for (int i = 0; i < ROUNDS; i++) {
		const size_t at = (FIRST_PAGE + 5 * i + 1) * PAGE;
		const uint64_t seed = 1000 * (i + 1);

		ASSERT_EQ(0, write_pages(pair, seed));
		ASSERT_EQ(0, fsync(self->fd));
		ASSERT_EQ(-1, wrong_outside(self, 0, 0, seed));
		ASSERT_TRUE(np_readable(np_pair_word(pair, at)));
		ASSERT_EQ(0, poison(pair->data + at)) TH_LOG("%s", strerror(errno));
		EXPECT_FALSE(np_readable(np_pair_word(pair, at)));
		EXPECT_EQ(-1, wrong_outside(self, 0, 0, seed));
		EXPECT_EQ(0, fsync(self->fd));
	}
	EXPECT_EQ(0, poisoned);
	ASSERT_EQ(0, write_pages(pair, 1));
	EXPECT_EQ(-1, wrong_outside(self, 0, 0, 1));
}

/* How the owner loses the right to write a page, or the page. */
enum loss { MSYNC, FSYNC, PROTECT, MAP_OTHER, UNMAP, LOSSES };

static const char *const loss_names[] = {
	"msync()", "fsync()", "mprotect()", "mmap() of another page", "munmap()",
};

static int lose(FIXTURE_DATA(file) *self, enum loss how)
{
	uint8_t *data = self->pair.data;

	switch (how) {
	case MSYNC:
		return msync(data, PAGE, MS_SYNC) ? -errno : 0;
	case FSYNC:
		return fsync(self->fd) ? -errno : 0;
	case PROTECT:
		return mprotect(data, NP_DATA_LEN, PROT_READ) ? -errno : 0;
	case MAP_OTHER:
		return map_file(self, PROT_READ | PROT_WRITE, HUGE_PAGE);
	default:
		return munmap(data, NP_DATA_LEN) ? -errno : 0;
	}
}

/* Does @page have the pattern of @seed? Privately, what was written is not in the file. */
static bool is_written(enum kind kind, const uint8_t *page, uint64_t seed)
{
	return is_private(kind) ? np_all(page, PAGE, 0) : np_differs(page, PAGE, seed) == -1;
}

/*
 * Who holds a page for reading may write it as long as the owner may. After that the hold
 * keeps it for reading; a WRITE that does not look whether it may goes nowhere.
 */
TEST_F(file, hold_for_reading_is_no_leave_to_write)
{
	struct np_pair *pair = &self->pair;
	struct np_end *peer = &pair->peer;
	uint8_t page[PAGE];

	if (variant->dax)
		SKIP(return, "no page can be held, for reading either");
	for (enum loss how = 0; how < LOSSES; how++) {
		const uint64_t held = 10 + how, late = 20 + how, other = 30 + how;
		const char *name = loss_names[how];
		struct rdma_np_event event = {};
		struct rdma_np_mr_info info;

		/* It is for write-back only that a page is cleaned. */
		if (how <= FSYNC && variant->kind != DISK)
			continue;
		ASSERT_EQ(0, map_file(self, PROT_READ | PROT_WRITE, 0));
		np_fill(pair->data + HUGE_PAGE, PAGE, other);
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_HOLD, &event));
		ASSERT_NE(0, event.hold_id);
		np_fill(peer->buf, PAGE, held);
		ASSERT_EQ(0, np_write_proven(peer, &pair->info, 0, 0, PAGE));
		ASSERT_EQ(-1, np_differs(pair->data, PAGE, held));

		ASSERT_EQ(0, lose(self, how));
		EXPECT_FALSE(np_writable(np_pair_word(pair, 0))) TH_LOG("%s", name);
		np_fill(peer->buf, PAGE, late);
		ASSERT_EQ(0, np_pair_write(pair, 0, PAGE));
		ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
		EXPECT_EQ(-1, np_differs(peer->buf, PAGE, held)) TH_LOG("%s", name);
		if (how <= PROTECT) {
			EXPECT_EQ(-1, np_differs(pair->data, PAGE, held)) TH_LOG("%s", name);
		}
		if (how == MAP_OTHER) {
			EXPECT_TRUE(is_written(variant->kind, pair->data, other));
		}
		if (self->fd >= 0) {
			ASSERT_EQ((ssize_t)PAGE, pread(self->fd, page, PAGE, 0));
			EXPECT_TRUE(is_written(variant->kind, page, held)) TH_LOG("%s", name);
		}
		/* The page is the owner's still, so there is no need to wait for the hold. */
		if (how <= FSYNC) {
			np_fill(peer->buf, PAGE, late);
			ASSERT_EQ(0, np_write_proven(peer, &pair->info, 0, 0, PAGE));
			EXPECT_EQ(-1, np_differs(pair->data, PAGE, late)) TH_LOG("%s", name);
		}

		/* After it its holder reaches what all reach. */
		ASSERT_EQ(0, np_release(peer, event.hold_id));
		ASSERT_TRUE(np_wait_until(!np_query_mr(pair->mr, &info) && !info.held_pages));
		EXPECT_EQ(how == PROTECT ? RDMA_NP_ACCESS : how == UNMAP ? RDMA_NP_ADDRESS : RDMA_NP_OK,
			  np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL)) TH_LOG("%s", name);
		if (how >= MAP_OTHER) {
			ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
			EXPECT_TRUE(how == UNMAP ? np_all(peer->buf, PAGE, pair->info.signature) :
						   is_written(variant->kind, peer->buf, other));
		}
	}
}

/* What of the region's pages in use the peer, or the owner, does not find as wanted, or -1. */
static int first_wrong(FIXTURE_DATA(file) *self, const uint8_t *want)
{
	struct np_pair *pair = &self->pair;

	for (unsigned int i = 0; i < PAGES; i++) {
		memset(pair->peer.buf, 0xff, PAGE);
		if (np_read_proven(&pair->peer, &pair->info, 0, (FIRST_PAGE + i) * PAGE, PAGE) ||
		    memcmp(pair->peer.buf, want + i * PAGE, PAGE) ||
		    memcmp(self->data + i * PAGE, want + i * PAGE, PAGE))
			return i;
	}
	return -1;
}

static int fill_file(int fd, uint64_t seed)
{
	uint8_t page[PAGE];

	for (unsigned int i = 0; i < PAGES; i++) {
		np_fill(page, PAGE, seed + i);
		if (pwrite(fd, page, PAGE, (FIRST_PAGE + i) * PAGE) != PAGE)
			return -errno;
	}
	return 0;
}

/* The same, of what is in the file. */
static int first_wrong_in_file(int fd, uint64_t seed)
{
	uint8_t *page = aligned_alloc(PAGE, PAGE);
	int wrong = -1;

	for (unsigned int i = 0; i < PAGES && wrong < 0; i++)
		if (pread(fd, page, PAGE, (FIRST_PAGE + i) * PAGE) != PAGE ||
		    np_differs(page, PAGE, seed + i) != -1)
			wrong = i;
	free(page);
	return wrong;
}

/* A part of each third page is the peer's, one of each third is the owner's. */
static unsigned int copied_by(unsigned int page)
{
	return page % 3;
}

TEST_F(file, private_copies_are_not_the_files)
{
	struct np_pair *pair = &self->pair;
	uint8_t *want = malloc(PAGES * PAGE);
	int direct;

	if (variant->kind != DISK_PRIVATE)
		SKIP(return, "not a private mapping of a file");
	ASSERT_NE(NULL, want);
	for (unsigned int i = 0; i < PAGES; i++)
		np_fill(want + i * PAGE, PAGE, 100 + i);
	ASSERT_EQ(0, fill_file(self->fd, 100));
	/* The peer has the file's own pages, which the others see, too, before there is a copy. */
	ASSERT_EQ(-1, first_wrong(self, want));
	for (unsigned int i = 0; i < PAGES; i++) {
		const size_t at = i * PAGE + 3 * UNIT;

		if (copied_by(i) == 2)
			continue;
		np_fill(want + at, UNIT, 200 + i);
		memcpy(copied_by(i) ? self->data + at : pair->peer.buf, want + at, UNIT);
		if (!copied_by(i)) {
			ASSERT_EQ(0, np_write_proven(&pair->peer, &pair->info, 0,
						     FIRST_PAGE * PAGE + at, UNIT));
		}
	}
	EXPECT_EQ(-1, first_wrong(self, want));
	EXPECT_EQ(-1, first_wrong_in_file(self->fd, 100));
	ASSERT_EQ(0, msync(self->data, PAGES * PAGE, MS_SYNC));
	ASSERT_EQ(0, fsync(self->fd));
	direct = open(DIR "/file", O_RDONLY | O_DIRECT | O_CLOEXEC);
	ASSERT_LE(0, direct);
	EXPECT_EQ(-1, first_wrong_in_file(direct, 100));

	/* What is written to the file, or cut out of it, is seen where there is no copy. */
	ASSERT_EQ(0, fill_file(self->fd, 300));
	for (unsigned int i = 2; i < PAGES; i += 3)
		np_fill(want + i * PAGE, PAGE, 300 + i);
	EXPECT_EQ(-1, first_wrong(self, want));
	ASSERT_EQ(0, fallocate(self->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
			       FIRST_PAGE * PAGE, PAGES * PAGE));
	for (unsigned int i = 2; i < PAGES; i += 3)
		memset(want + i * PAGE, 0, PAGE);
	EXPECT_EQ(-1, first_wrong(self, want));
	/* Under the copies there is the file. */
	ASSERT_EQ(0, fill_file(self->fd, 400));
	for (unsigned int i = 0; i < PAGES; i++)
		np_fill(want + i * PAGE, PAGE, 400 + i);
	ASSERT_EQ(0, madvise(self->data, PAGES * PAGE, MADV_DONTNEED));
	EXPECT_EQ(-1, first_wrong(self, want));
}

TEST_HARNESS_MAIN
