// SPDX-License-Identifier: GPL-2.0
/*
 * Regions in files under traffic: tmpfs, memfd, hugetlbfs, and ext4 and xfs on a block
 * device. What peers wrote is in the file, also when it is read back from the device;
 * what is cut off the file is an address error. See np_load.h for the traffic, and
 * Documentation/infiniband/nprdma-memory.rst for what is promised.
 */
#include "np_file.h"

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
