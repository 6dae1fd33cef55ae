// SPDX-License-Identifier: GPL-2.0
/*
 * Regions in files while they are leased, to a peer and to the owner itself: the tests of
 * np_file.h under leases, and what stays where it is until a lease is given back. Of files that
 * are written back there are leases for reading only, and a peer WRITEs them without one.
 */
#include "np_file.h"

#define LEASED(name, ...)							\
	FIXTURE_VARIANT_ADD(file, name##_remote) {				\
		.lease = NP_LEASER_REMOTE, __VA_ARGS__				\
	};									\
	FIXTURE_VARIANT_ADD(file, name##_local) {				\
		.lease = NP_LEASER_LOCAL, __VA_ARGS__				\
	}
LEASED(tmpfs, .kind = TMPFS);
LEASED(memfd, .kind = MEMFD);
LEASED(hugetlb, .kind = HUGETLB);
LEASED(hugetlb_private, .kind = HUGETLB_PRIVATE);
LEASED(ext4, .kind = DISK, .mkfs = "mkfs.ext4 -q -F");
LEASED(ext4_private, .kind = DISK_PRIVATE, .mkfs = "mkfs.ext4 -q -F");
LEASED(xfs, .kind = DISK, .mkfs = "mkfs.xfs -q -f");

/* --- written beside the mapping ---------------------------------------------------------- */

struct beside {
	int fd;
	uint8_t *data;		/* of the first page in use, in another mapping */
};

static int put_by_store(void *arg, unsigned int page, const void *data)
{
	const struct beside *beside = arg;

	memcpy(beside->data + page * PAGE, data, PAGE);
	return 0;
}

static int put_by_write(void *arg, unsigned int page, const void *data)
{
	const struct beside *beside = arg;

	return pwrite(beside->fd, data, PAGE, (FIRST_PAGE + page) * PAGE) == PAGE ? 0 : -EIO;
}

/* It is the file's page that is leased, so nothing has to be recalled. */
TEST_F(file, what_is_written_beside_is_read_at_once)
{
	struct np_load *load = &self->load;
	struct beside beside = { .fd = self->fd };
	void *map;

	if (is_private(variant->kind))
		SKIP(return, "what is leased is a copy, which the file does not have");
	map = mmap(NULL, NP_DATA_LEN, PROT_READ | PROT_WRITE, MAP_SHARED, self->fd, 0);
	ASSERT_NE(MAP_FAILED, map);
	beside.data = (uint8_t *)map + FIRST_PAGE * PAGE;
	load->writes_of_8 = 0;
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		const unsigned int first = random_of(i, PAGES - SOME);
		/* hugetlbfs has no write(). */
		const bool by_write = i % 2 && variant->kind != HUGETLB;

		ASSERT_LOAD(np_load_goes_on(load, PAGES));
		ASSERT_LOAD(np_leaser_begin(&self->leaser, first, SOME));
		for (unsigned int page = first; page < first + SOME; page++) {
			ASSERT_EQ(0, np_load_store_by(load, page, by_write ? put_by_write :
									     put_by_store, &beside));
		}
		ASSERT_LOAD(np_load_goes_on(load, 4 * PAGES));
		EXPECT_TRUE(np_leaser_has_all(&self->leaser, first, SOME));
		np_leaser_goes_on(&self->leaser);
	}
	EXPECT_RIGHT(load);
	EXPECT_RECALLS(0);
	EXPECT_EQ(0, np_leaser_recalls(&self->leaser));
}

/* --- step by step -------------------------------------------------------------------------- */

/* How the owner, or the kernel, takes a page out of the page table that is leased. */
enum change { PAGE_OUT, DROP, HIDE, MAP_AGAIN, MAP_OTHER, UNMAP, PUNCH, TRUNCATE, POISON, CHANGES };

static const char *const change_names[] = {
	"MADV_PAGEOUT", "MADV_DONTNEED", "mprotect()", "mmap() of the same page",
	"mmap() of another page", "munmap()", "a hole in the file", "ftruncate()", "MADV_HWPOISON",
};

static bool is_possible(enum kind kind, enum change how)
{
	switch (how) {
	case PAGE_OUT:
		/* A copy that is pinned stays, and huge pages of hugetlbfs do at any time. */
		return !is_private(kind) && !is_huge(kind);
	case PUNCH:
		return !is_private(kind);
	case TRUNCATE:
		return kind != HUGETLB_PRIVATE;
	default:
		return true;
	}
}

/* Of a private mapping what is mapped later is not the copy that was leased. */
static bool comes_back(enum kind kind, enum change how)
{
	switch (how) {
	case PAGE_OUT:
	case HIDE:
		return true;
	case DROP:
	case MAP_AGAIN:
	case UNMAP:
		return !is_private(kind);
	case POISON:
		/* It was written back, so the device has it, and it is read into another frame. */
		return kind == DISK;
	default:
		return false;
	}
}

static bool is_absent(enum kind kind, enum change how)
{
	return how == HIDE || how == UNMAP || how == TRUNCATE || (how == POISON && kind != DISK);
}

static int punch(int fd, size_t at, size_t len)
{
	return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, len) ? -errno : 0;
}

static int change(FIXTURE_DATA(file) *self, enum change how, size_t at, size_t len)
{
	uint8_t *data = self->pair.data;

	switch (how) {
	case PAGE_OUT:
		return np_page_out(data + at, len);
	case DROP:
		return madvise(data + at, len, MADV_DONTNEED) ? -errno : 0;
	case HIDE:
		return mprotect(data, NP_DATA_LEN, PROT_NONE) ? -errno : 0;
	case MAP_AGAIN:
		return map_file(self, PROT_READ | PROT_WRITE, 0);
	case MAP_OTHER:
		return map_file(self, PROT_READ | PROT_WRITE, HUGE_PAGE);
	case UNMAP:
		return munmap(data, NP_DATA_LEN) ? -errno : 0;
	case PUNCH:
		return punch(self->fd, at, len);
	case TRUNCATE:
		return ftruncate(self->fd, at) ? -errno : 0;
	default:
		/* The first page in use, of a huge page as well. */
		return poison(self->data);
	}
}

/* What is absent is there again, as far as it can be. */
static int bring_back(FIXTURE_DATA(file) *self, enum kind kind, enum change how, size_t at,
		      size_t len)
{
	int ret;

	switch (how) {
	case HIDE:
		return mprotect(self->pair.data, NP_DATA_LEN, PROT_READ | PROT_WRITE) ? -errno : 0;
	case UNMAP:
		return map_file(self, PROT_READ | PROT_WRITE, 0);
	case TRUNCATE:
		return ftruncate(self->fd, NP_DATA_LEN) ? -errno : 0;
	default:
		/* A file that is in memory keeps the bad page. */
		ret = is_private(kind) ? 0 : punch(self->fd, at, len);
		return ret ?: map_page_again(self, at, len);
	}
}

/* A file of zeros, of which nothing is in memory. */
static int begin_anew(FIXTURE_DATA(file) *self)
{
	int ret;

	if (self->fd >= 0 && (ftruncate(self->fd, 0) || ftruncate(self->fd, NP_DATA_LEN)))
		return -errno;
	ret = map_file(self, PROT_READ | PROT_WRITE, 0);
	/* xfs would have several pages in one folio, and change parts of it in place. */
	return ret ?: madvise(self->pair.data, NP_DATA_LEN, MADV_RANDOM) ? -errno : 0;
}

/* Memory that comes from the lists of free pages when it is written; mapped before. */
struct taken {
	uint8_t *data;
	size_t len;
};

static int taken_map(struct taken *taken, bool huge)
{
	void *p;

	taken->len = 2 * HUGE_PAGE;
	if (!huge) {
		taken->data = np_map(taken->len);
		return taken->data ? 0 : -ENOMEM;
	}
	p = mmap(NULL, taken->len, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
	taken->data = p;
	return p == MAP_FAILED ? -errno : 0;
}

static unsigned long held_pages(struct ibv_mr *mr)
{
	struct rdma_np_mr_info info;

	return np_query_mr(mr, &info) ? ~0UL : info.held_pages;
}

/*
 * The owner is told, or the peer. Until the lease is given back requests under it reach the page
 * that was leased, and nobody else gets that page. What was written under it is in the file if
 * the page is the file's still.
 */
TEST_F(file, page_that_changes_is_recalled_and_stays_while_it_is_leased)
{
	const bool huge = is_huge(variant->kind), write = variant->kind != DISK;
	const size_t off = FIRST_PAGE * PAGE, at = huge ? 0 : off, len = huge ? HUGE_PAGE : PAGE;
	struct np_leaser *leaser = &self->leaser;
	struct np_pair *pair = &self->pair;
	uint8_t *buf = pair->peer.buf;
	struct taken taken;
	uint8_t page[PAGE];

	ASSERT_EQ(0, taken_map(&taken, huge));
	for (enum change how = 0; how < CHANGES; how++) {
		const uint64_t old = 100 + how, late = 200 + how, other = 300 + how;
		const uint64_t last = write && how != POISON ? late : old;
		const bool same = comes_back(variant->kind, how);
		const char *name = change_names[how];

		if (!is_possible(variant->kind, how))
			continue;
		ASSERT_EQ(0, begin_anew(self));
		np_fill(self->data + HUGE_PAGE, PAGE, other);
		np_fill(self->data, PAGE, old);
		/* The device has it, so that it can go. */
		if (variant->kind == DISK) {
			ASSERT_EQ(0, fsync(self->fd)) TH_LOG("%s", name);
		}
		ASSERT_EQ(0, held_pages(pair->mr));
		ASSERT_EQ(0, np_leaser_take(leaser, 0, write)) TH_LOG("%s", name);
		ASSERT_LT(0, held_pages(pair->mr));
		ASSERT_FALSE(np_leaser_is_recalled(leaser, 0, false)) TH_LOG("%s", name);

		ASSERT_EQ(0, change(self, how, at, len)) TH_LOG("%s", name);
		EXPECT_TRUE(np_leaser_is_recalled(leaser, 0, true)) TH_LOG("%s", name);
		/* Who needs memory now would get what is free. */
		np_fill(taken.data, taken.len, how);
		memset(buf, 0xff, PAGE);
		ASSERT_EQ(0, np_leaser_use(leaser, 0, false)) TH_LOG("%s", name);
		EXPECT_EQ(-1, np_differs(buf, PAGE, old)) TH_LOG("%s", name);
		if (last == late) {
			np_fill(buf, PAGE, late);
			ASSERT_EQ(0, np_leaser_use(leaser, 0, true)) TH_LOG("%s", name);
		}
		EXPECT_EQ(-1, np_differs(taken.data, taken.len, how)) TH_LOG("%s", name);
		EXPECT_LT(0, held_pages(pair->mr));
		ASSERT_EQ(0, np_leaser_give_back(leaser, 0));
		ASSERT_TRUE(np_wait_until(!held_pages(pair->mr))) TH_LOG("%s", name);
		ASSERT_EQ(0, madvise(taken.data, taken.len, MADV_DONTNEED));

		/* After it all reach what is there now. */
		if (is_absent(variant->kind, how)) {
			EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(pair, off, PAGE, 0, NULL))
				TH_LOG("%s", name);
			ASSERT_EQ(0, bring_back(self, variant->kind, how, at, len))
				TH_LOG("%s: %s", name, strerror(errno));
		}
		memset(buf, 0xff, PAGE);
		ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, off, PAGE))
			TH_LOG("%s", name);
		if (same) {
			EXPECT_EQ(-1, np_differs(buf, PAGE, last)) TH_LOG("%s", name);
		} else if (how == MAP_OTHER && !is_private(variant->kind)) {
			EXPECT_EQ(-1, np_differs(buf, PAGE, other)) TH_LOG("%s", name);
		} else {
			EXPECT_TRUE(np_all(buf, PAGE, 0)) TH_LOG("%s", name);
		}
		EXPECT_EQ(0, memcmp(self->data, buf, PAGE)) TH_LOG("%s", name);
		/* Also where another page was mapped in its place the file has what was written. */
		if (!is_private(variant->kind) && (same || how == MAP_OTHER)) {
			ASSERT_EQ((ssize_t)PAGE, pread(self->fd, page, PAGE, off));
			EXPECT_EQ(-1, np_differs(page, PAGE, last)) TH_LOG("%s", name);
		}
	}
}

/* What is pinned could be written by somebody, so the kernel does not seal it before it is not. */
TEST_F(file, memfd_is_sealed_when_its_leases_are_back)
{
	struct np_leaser *leaser = &self->leaser;
	uint8_t page[PAGE];

	if (variant->kind != MEMFD)
		SKIP(return, "what seals there are is up to memfd");
	np_fill(self->data, PAGE, 1);
	ASSERT_EQ(0, np_leaser_take(leaser, 0, true));
	ASSERT_FALSE(np_leaser_is_recalled(leaser, 0, false));
	/* There is no mapping left that could be written. */
	ASSERT_EQ(0, munmap(self->pair.data, NP_DATA_LEN));
	EXPECT_TRUE(np_leaser_is_recalled(leaser, 0, true));
	ASSERT_EQ(-1, fcntl(self->fd, F_ADD_SEALS, F_SEAL_WRITE));
	EXPECT_EQ(EBUSY, errno);
	np_fill(self->pair.peer.buf, PAGE, 2);
	ASSERT_EQ(0, np_leaser_use(leaser, 0, true));
	ASSERT_EQ(0, np_leaser_give_back(leaser, 0));
	ASSERT_TRUE(np_wait_until(!held_pages(self->pair.mr)));
	/* It waits for those who have a page in their hands, but not for long. */
	ASSERT_TRUE(np_wait_until(!fcntl(self->fd, F_ADD_SEALS, F_SEAL_WRITE) || errno != EBUSY));
	EXPECT_EQ(F_SEAL_WRITE, fcntl(self->fd, F_GET_SEALS));
	ASSERT_EQ((ssize_t)PAGE, pread(self->fd, page, PAGE, FIRST_PAGE * PAGE));
	EXPECT_EQ(-1, np_differs(page, PAGE, 2));
}

/* As a hold is: the kernel pins nothing for writing, for long, that has to be written back. */
TEST_F(file, lease_to_write_is_refused_where_pages_are_written_back)
{
	struct np_leaser *leaser = &self->leaser;

	EXPECT_EQ(variant->kind == DISK ? RDMA_NP_ADDRESS : 0, np_leaser_take(leaser, 0, true));
	EXPECT_EQ(variant->kind == DISK ? -ENOENT : 0, np_leaser_give_back(leaser, 0));
	EXPECT_EQ(0, np_leaser_take(leaser, 0, false));
	EXPECT_EQ(0, np_leaser_give_back(leaser, 0));
	ASSERT_TRUE(np_wait_until(!held_pages(self->pair.mr)));
}

TEST_HARNESS_MAIN
