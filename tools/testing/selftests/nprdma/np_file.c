// SPDX-License-Identifier: GPL-2.0
/*
 * Regions in files under traffic: tmpfs, memfd, hugetlbfs, and ext4 and xfs on a block
 * device. What peers wrote is in the file, also when it is read back from the device;
 * what is cut off the file is an address error. See np_load.h for the traffic, and
 * Documentation/infiniband/nprdma-memory.rst for what is promised.
 */
#include <fcntl.h>
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

enum kind { TMPFS, MEMFD, HUGETLB, HUGETLB_PRIVATE, DISK };

FIXTURE(file) {
	struct np_pair pair;
	struct np_load load;
	uint8_t *data;		/* of the first page that the peer uses */
	int fd;
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
FIXTURE_VARIANT_ADD(file, xfs) { .kind = DISK, .mkfs = "mkfs.xfs -q -f" };
FIXTURE_VARIANT_ADD(file, ext4_dax) { .kind = DISK, .mkfs = "mkfs.ext4 -q -F", .dax = true };
FIXTURE_VARIANT_ADD(file, xfs_dax) {
	.kind = DISK, .mkfs = "mkfs.xfs -q -f -m reflink=0", .dax = true
};

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

FIXTURE_SETUP(file)
{
	struct np_pair *pair = &self->pair;
	int flags = MAP_SHARED;

	self->fd = -1;
	ASSERT_EQ(0, np_pair_open(pair));
	if (variant->kind == HUGETLB || variant->kind == HUGETLB_PRIVATE) {
		self->huge_pages = huge_pages(16);
		ASSERT_LE(0, self->huge_pages);
	}
	if (variant->kind == TMPFS || variant->kind == DISK) {
		ASSERT_TRUE(!mkdir(DIR, 0700) || errno == EEXIST);
		ASSERT_EQ(0, variant->dax ? make_pmem(variant->mkfs) :
			     variant->kind == DISK ? make_disk(variant->mkfs) :
						     mount("np", DIR, "tmpfs", 0, NULL));
		self->mounted = true;
	}
	if (variant->kind == HUGETLB_PRIVATE) {
		flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB;
	} else {
		self->fd = open_file(variant->kind);
		ASSERT_LE(0, self->fd) TH_LOG("%s", strerror(-self->fd));
		ASSERT_EQ(variant->dax, is_dax(self->fd));
	}
	/* Where there is room for huge pages, so that slots and they have the same ends. */
	pair->data = np_map(NP_DATA_LEN);
	ASSERT_NE(NULL, pair->data);
	ASSERT_EQ(pair->data, mmap(pair->data, NP_DATA_LEN, PROT_READ | PROT_WRITE,
				   flags | MAP_FIXED, self->fd, 0))
		TH_LOG("%s", strerror(errno));
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
	struct np_mr_info before, after;
	long swapped = 0, met = 0, major;
	uint8_t *page;
	int fd;

	if (variant->kind == TMPFS || variant->kind == MEMFD) {
		ASSERT_TRUE(np_disk_swap());
	}
	/* A page that is read from the device brings no others. */
	ASSERT_EQ(0, madvise(self->pair.data, NP_DATA_LEN, MADV_RANDOM));
	ASSERT_EQ(0, np_load_start(load));
	ASSERT_EQ(0, np_query_mr(self->pair.mr, &before));
	major = before.faults_major;
	for (int i = 0; i < ROUNDS; i++) {
		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		/* Peers had pages, and did not have them any more. */
		ASSERT_EQ(0, np_query_mr(self->pair.mr, &before));
		ASSERT_EQ(0, disturb(self->data, variant->kind, self->fd, i));
		if (variant->kind == TMPFS || variant->kind == MEMFD)
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
	if (variant->kind == TMPFS || variant->kind == MEMFD) {
		EXPECT_LT(0, swapped);
	}
	if (cached) {
		EXPECT_LE(PAGES, major);
	}
	if (variant->kind != DISK)
		return;
	/* From the device, past the page cache, once it has been written back. */
	ASSERT_EQ(0, fsync(self->fd));
	page = aligned_alloc(PAGE, PAGE);
	fd = open(DIR "/file", O_RDONLY | O_DIRECT | O_CLOEXEC);
	ASSERT_LE(0, fd);
	for (unsigned int i = 0; i < PAGES; i++) {
		ASSERT_EQ((ssize_t)PAGE, pread(fd, page, PAGE, (FIRST_PAGE + i) * PAGE));
		EXPECT_TRUE(np_load_page_is_right(load, i, page)) TH_LOG("page %u", i);
	}
}

TEST_F(file, truncation_is_an_address_error)
{
	/* From here on: also the end of a huge page. */
	const unsigned int first = 512 - FIRST_PAGE, n = PAGES - first;
	struct np_load *load = &self->load;

	if (variant->kind == HUGETLB_PRIVATE)
		SKIP(return, "not a file");
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		np_load_step(load, first, n);
		ASSERT_EQ(0, ftruncate(self->fd, HUGE_PAGE));
		np_load_lose(load, first, n);
		np_load_gone(load, first, n, NP_ADDRESS, NP_ADDRESS);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		np_load_step(load, first, n);
		ASSERT_EQ(0, ftruncate(self->fd, NP_DATA_LEN));
		np_load_step(load, first, n);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
}

/*
 * A huge page of tmpfs in which something is pinned cannot be split where the file ends
 * now. The next access before that place maps all of it again, what is behind included.
 */
TEST_F(file, peers_reach_beyond_the_end_what_the_owner_does)
{
	const size_t beyond = HUGE_PAGE + 200 * PAGE;
	struct np_pair *pair = &self->pair;
	struct np_event event;

	if (variant->kind != TMPFS && variant->kind != MEMFD)
		SKIP(return, "not tmpfs");
	for (int hold = 0; hold < 2; hold++) {
		bool reaches;

		memset(pair->data, 1, NP_DATA_LEN);
		ASSERT_EQ(0, madvise(pair->data + HUGE_PAGE, HUGE_PAGE, MADV_COLLAPSE))
			TH_LOG("%s", strerror(errno));
		event.hold_id = 0;
		ASSERT_EQ(NP_OK, np_pair_fault(pair, HUGE_PAGE, PAGE, hold ? NP_FAULT_HOLD : 0,
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
		EXPECT_EQ(reaches ? NP_OK : NP_ADDRESS,
			  np_pair_fault(pair, beyond, PAGE, NP_FAULT_WRITE, &event));
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
	struct np_event event;

	if (variant->kind == HUGETLB_PRIVATE)
		SKIP(return, "not a file");
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
	ASSERT_EQ(NP_OK, np_pair_fault(&self->pair, HUGE_PAGE, PAGE, 0, &event));
	ASSERT_EQ(0, np_pair_read(&self->pair, HUGE_PAGE, PAGE));
	EXPECT_TRUE(np_all(self->pair.peer.buf, PAGE, 0));
}

TEST_F(file, read_only_mapping_is_read_and_not_written)
{
	struct np_load *load = &self->load;

	if (variant->kind == HUGETLB_PRIVATE)
		SKIP(return, "not a file");
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		np_load_step(load, 0, PAGES);
		ASSERT_EQ(self->pair.data, mmap(self->pair.data, NP_DATA_LEN, PROT_READ,
						MAP_SHARED | MAP_FIXED, self->fd, 0));
		np_load_gone(load, 0, PAGES, NP_OK, NP_ACCESS);
		ASSERT_LOAD(np_load_is_refused(load, 5));
		np_load_step(load, 0, PAGES);
		ASSERT_EQ(self->pair.data, mmap(self->pair.data, NP_DATA_LEN,
						PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
						self->fd, 0));
		np_load_step(load, 0, PAGES);
	}
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	EXPECT_RIGHT(load);
}

TEST_F(file, hold_is_refused_where_pages_cannot_be_pinned_for_long)
{
	struct np_event event = {};

	/* For write not where pages are written back, and not at all on DAX. */

	EXPECT_EQ(variant->kind == DISK ? NP_ADDRESS : NP_OK,
		  np_pair_fault(&self->pair, 0, PAGE, NP_FAULT_WRITE | NP_FAULT_HOLD, &event));
	if (event.hold_id) {
		EXPECT_EQ(0, np_release(&self->pair.peer, event.hold_id));
	}
	event.hold_id = 0;
	EXPECT_EQ(variant->dax ? NP_ADDRESS : NP_OK,
		  np_pair_fault(&self->pair, 0, PAGE, NP_FAULT_HOLD, &event));
	if (event.hold_id) {
		EXPECT_EQ(0, np_release(&self->pair.peer, event.hold_id));
	}
}

TEST_HARNESS_MAIN
