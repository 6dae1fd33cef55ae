// SPDX-License-Identifier: GPL-2.0
/*
 * Memory whose pages the owner itself brings, with userfaultfd: its peers' faults wait for it
 * as its own do, and so do leases, its own as well.
 */
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#include "np_change.h"
#include "np_leaser.h"

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

FIXTURE(memory) {
	struct np_pair pair;
	struct np_load load;
	struct np_leaser leaser;
	uint8_t *data;		/* of the first page that the peer uses */
};

FIXTURE_VARIANT(memory) {
	enum np_leaser_kind lease;
};

FIXTURE_VARIANT_ADD(memory, anonymous) {};
FIXTURE_VARIANT_ADD(memory, anonymous_remote) { .lease = NP_LEASER_REMOTE };
FIXTURE_VARIANT_ADD(memory, anonymous_local) { .lease = NP_LEASER_LOCAL };

FIXTURE_SETUP(memory)
{
	ASSERT_EQ(0, memory_open(&self->pair, &self->load, &self->data));
	ASSERT_EQ(0, np_leaser_init(&self->leaser, variant->lease, &self->load, &self->pair.owner,
				    self->pair.mr, false));
}

FIXTURE_TEARDOWN_PARENT(memory)
{
	NP_CHECK_USAGE(&self->pair.before);
}

TEST_F(memory, fault_waits_for_userfaultfd_to_bring_the_page)
{
	const bool leased = variant->lease != NP_LEASER_NONE;
	struct monitor m = { .unit = PAGE };
	struct np_load *load = &self->load;
	size_t off = FIRST_PAGE * PAGE;

	ASSERT_EQ(0, monitor_init(&m, 0, UFFDIO_REGISTER_MODE_MISSING, self->data, PAGES * PAGE));
	for (int i = 0; !leased && i < 4; i++) {
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
		ASSERT_LOAD(np_leaser_begin(&self->leaser, page, 1));
		pthread_mutex_lock(&m.lock);
		np_load_step(load, page, 1);
		ASSERT_EQ(0, madvise(self->data + page * PAGE, PAGE, MADV_DONTNEED));
		/*
		 * No lease is asked for before this ends. The load may wait for the monitor all the
		 * same, with a page that went in a round before and was not used since: then it
		 * gives the lease back when the owner has told it that he is BUSY.
		 */
		ASSERT_LOAD(np_leaser_end(&self->leaser, page, 1, false));
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
	EXPECT_RECALLS(ROUNDS);
}

TEST_F(memory, write_waits_for_userfaultfd_to_lift_its_protection)
{
	/* Before the load starts; then step by step. */
	const int steps = variant->lease == NP_LEASER_NONE ? 2 : 0;
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

		if (i == steps) {
			ASSERT_EQ(0, monitor_start(&m));
			ASSERT_EQ(0, np_load_start(load));
		}
		if (i >= steps) {
			ASSERT_LOAD(np_load_goes_on(load, 50));
			ASSERT_LOAD(np_leaser_begin(&self->leaser, first, 8));
		}
		ASSERT_EQ(0, ioctl(m.uffd, UFFDIO_WRITEPROTECT, &wp));
		if (i >= steps) {
			ASSERT_LOAD(np_leaser_end(&self->leaser, first, 8, true));
		} else {
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
	EXPECT_RECALLS(ROUNDS);
}

/* The same where pages are a file's, in small pages and in huge ones. */
FIXTURE(uffd) {
	struct np_pair pair;
	struct np_load load;
	struct np_leaser leaser;
	uint8_t *data;
	int fd;
	int huge_pages;		/* that there were before */
};

FIXTURE_VARIANT(uffd) {
	bool huge;
	bool minor;		/* the file has the page, and the page table does not */
	enum np_leaser_kind lease;
};

FIXTURE_VARIANT_ADD(uffd, shmem) {};
FIXTURE_VARIANT_ADD(uffd, shmem_minor) { .minor = true };
FIXTURE_VARIANT_ADD(uffd, hugetlb) { .huge = true };
FIXTURE_VARIANT_ADD(uffd, hugetlb_minor) { .huge = true, .minor = true };

#define LEASED(name, ...)							\
	FIXTURE_VARIANT_ADD(uffd, name##_remote) {				\
		.lease = NP_LEASER_REMOTE, __VA_ARGS__				\
	};									\
	FIXTURE_VARIANT_ADD(uffd, name##_local) {				\
		.lease = NP_LEASER_LOCAL, __VA_ARGS__				\
	}
LEASED(shmem, .minor = false);
LEASED(shmem_minor, .minor = true);
LEASED(hugetlb, .huge = true);
LEASED(hugetlb_minor, .huge = true, .minor = true);

#define HUGE_PAGES "/proc/sys/vm/nr_hugepages"

FIXTURE_SETUP(uffd)
{
	char text[32];

	ASSERT_EQ(0, memory_open(&self->pair, &self->load, &self->data));
	ASSERT_LT(0, np_read_text(HUGE_PAGES, text, sizeof(text)));
	self->huge_pages = atoi(text);
	if (variant->huge) {
		ASSERT_EQ(0, np_write_text(HUGE_PAGES, "8"));
	}
	self->fd = memfd_create("np", MFD_CLOEXEC | (variant->huge ? MFD_HUGETLB : 0));
	ASSERT_LE(0, self->fd);
	ASSERT_EQ(0, ftruncate(self->fd, NP_DATA_LEN));
	ASSERT_EQ(self->pair.data, mmap(self->pair.data, NP_DATA_LEN, PROT_READ | PROT_WRITE,
					MAP_SHARED | MAP_FIXED, self->fd, 0));
	/* One lease of all that goes at once: see np_leaser_end() below. */
	ASSERT_EQ(0, np_leaser_init(&self->leaser, variant->lease, &self->load, &self->pair.owner,
				    self->pair.mr, variant->huge));
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
	const bool leased = variant->lease != NP_LEASER_NONE;
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
	for (int i = 0; !leased && i < 4; i++) {
		uint32_t flags = (i & 1 ? RDMA_NP_FAULT_WRITE : 0) |
				 (i & 2 ? RDMA_NP_FAULT_HOLD : 0);

		ASSERT_EQ(0, uffd_take(self, variant->minor, 0, m.unit));
		expect_busy(_metadata, &self->pair, &m, 0, flags);
		expect_waits(_metadata, &self->pair, &m, 0, flags);
	}
	if (!leased) {
		ASSERT_EQ(0, np_read_proven(&self->pair.peer, &self->pair.info, 0, 0, PAGE));
		EXPECT_TRUE(np_all(self->pair.peer.buf, PAGE,
				   variant->minor ? 0x0101010101010101 : 0));
	}

	ASSERT_EQ(0, monitor_start(&m));
	ASSERT_EQ(0, np_load_start(load));
	for (int i = 0; i < ROUNDS; i++) {
		/* The second huge page is that of the second half. */
		unsigned int first = variant->huge ? PAGES / 2 : random_of(i, PAGES);
		unsigned int n = variant->huge ? PAGES / 2 : 1;
		size_t off = (FIRST_PAGE + first) * PAGE;

		ASSERT_LOAD(np_load_goes_on(load, 50));
		ASSERT_LOAD(np_leaser_begin(&self->leaser, first, n));
		pthread_mutex_lock(&m.lock);
		np_load_step(load, first, n);
		ASSERT_EQ(0, uffd_take(self, variant->minor, off, m.unit));
		/*
		 * Under a lease the load does not wait for the monitor, nor does it ask for one
		 * before this ends; afterwards it does. With a page of a round before it waits,
		 * as above.
		 */
		ASSERT_LOAD(np_leaser_end(&self->leaser, first, n, false));
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
	EXPECT_RECALLS(ROUNDS);
}

TEST_HARNESS_MAIN
