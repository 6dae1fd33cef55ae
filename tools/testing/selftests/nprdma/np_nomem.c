// SPDX-License-Identifier: GPL-2.0
/*
 * No memory: each allocation of a good sequence fails once (fail-nth of the fault
 * injection framework), and a control group runs full. Errors that say so, no
 * splat, no leak, and the next try succeeds.
 *
 * fail-nth counts allocations of the calling task, so it covers registration,
 * RESOLVE, FAULT, RELEASE and FORGET as far as they run in the initiator's system call,
 * advice and local holds, which fault in the caller's context, the notifier, which runs
 * in whatever takes memory away, and the end of a process. It counts accesses to the
 * caller's memory, too; those fail with EFAULT. What workers do has a test of its own,
 * which goes by the functions that allocate.
 */
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "np_harness.h"

FIXTURE(fail_nth) {
	struct np_pair pair;
};

/* All sleeping allocations, too, and quietly. */
static int set_injectors(void)
{
	static const char *const knob[][2] = {
		{ "/sys/kernel/debug/failslab/ignore-gfp-wait", "N" },
		{ "/sys/kernel/debug/failslab/verbose", "0" },
		{ "/sys/kernel/debug/fail_page_alloc/ignore-gfp-wait", "N" },
		{ "/sys/kernel/debug/fail_page_alloc/min-order", "0" },
		{ "/sys/kernel/debug/fail_page_alloc/verbose", "0" },
	};
	int ret = 0;

	for (size_t i = 0; !ret && i < ARRAY_SIZE(knob); i++)
		ret = np_write_text(knob[i][0], knob[i][1]);
	return ret;
}

FIXTURE_SETUP(fail_nth)
{
	ASSERT_EQ(0, access("/proc/thread-self/fail-nth", W_OK))
		TH_LOG("the kernel has no fault injection: --kernel debug has");
	ASSERT_EQ(0, set_injectors());
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
}

FIXTURE_TEARDOWN_PARENT(fail_nth)
{
	if (self->pair.owner.ctx)
		NP_CHECK_USAGE(&self->pair.before);
}

/* From now on the @nth allocation fails; 0 ends it, and tells whether it did. */
static bool fail_nth(int fd, unsigned int nth)
{
	char text[16];
	ssize_t n;

	if (!nth) {
		n = pread(fd, text, sizeof(text) - 1, 0);
		text[n > 0 ? n : 0] = 0;
		n = pwrite(fd, "0", 1, 0);
		return !atoi(text);
	}
	n = snprintf(text, sizeof(text), "%u", nth);
	return pwrite(fd, text, n, 0) == n;
}

static int open_fail_nth(void)
{
	return open("/proc/thread-self/fail-nth", O_RDWR | O_CLOEXEC);
}

/*
 * @call with the first failure, the second, and so on, until it makes no more. One
 * that did nobody harm is a failure all the same. @undo after success, unharmed.
 */
#define SWEEP(call, ok, allowed, undo)					\
	do {								\
		int fd_ = open_fail_nth();				\
		unsigned int nth_ = 0, failed_ = 0;			\
		bool hit_;						\
									\
		ASSERT_LE(0, fd_);					\
		do {							\
			int ret_;					\
									\
			ASSERT_TRUE(fail_nth(fd_, ++nth_));		\
			ret_ = (call);					\
			hit_ = fail_nth(fd_, 0);			\
			if (ret_ != (ok)) {				\
				failed_++;				\
				EXPECT_TRUE(hit_ && (allowed))		\
					TH_LOG("failure %u: %d (%s)", nth_, ret_, \
					       strerror(abs(ret_)));	\
			} else {					\
				undo;					\
			}						\
			ASSERT_GT(2000, nth_);				\
		} while (hit_);						\
		TH_LOG("%u failures, %u of them seen", nth_ - 1, failed_); \
		EXPECT_LT(1, nth_);					\
		close(fd_);						\
	} while (0)

TEST_F(fail_nth, registration_fails_cleanly_at_each_allocation)
{
	struct np_pair *pair = &self->pair;
	struct ibv_mr *mr = NULL;

	/* The IOVA allocator does not say whether it lacks memory or addresses: ENOSPC */
	SWEEP((mr = ibv_reg_mr(pair->owner.pd, pair->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED),
	       mr ? 0 : errno), 0, ret_ == ENOMEM || ret_ == ENOSPC || ret_ == EFAULT,
	      EXPECT_EQ(0, ibv_dereg_mr(mr)));
}

/* The request may be unreadable, and then nothing was done. Nothing else stops it. */
TEST_F(fail_nth, deregistration_fails_only_before_it_begins)
{
	struct np_pair *pair = &self->pair;
	struct ibv_mr *mr;

	mr = ibv_reg_mr(pair->owner.pd, pair->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	SWEEP(ibv_dereg_mr(mr), 0, ret_ == EFAULT,
	      mr = ibv_reg_mr(pair->owner.pd, pair->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
	      ASSERT_NE(NULL, mr));
}

TEST_F(fail_nth, resolve_fails_cleanly_at_each_allocation)
{
	struct np_pair *pair = &self->pair;

	SWEEP(np_resolve(&pair->peer, pair->mr->rkey, &pair->info), 0,
	      ret_ == -ENOMEM || ret_ == -EFAULT || ret_ == -ETIMEDOUT || ret_ == -EHOSTUNREACH,
	      EXPECT_EQ(0, np_forget(&pair->peer, pair->info.region_id)));
	ASSERT_EQ(0, np_pair_resolve(pair));
}

TEST_F(fail_nth, fault_fails_cleanly_at_each_allocation)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(0, np_pair_resolve(pair));
	SWEEP((madvise(pair->data, PAGE, MADV_DONTNEED),
	       np_fault_once(&pair->peer, pair->peer.qp, pair->info.region_id, pair->info.base,
			     PAGE, RDMA_NP_FAULT_WRITE, &event)),
	      RDMA_NP_OK, ret_ == -ENOMEM || ret_ == -EFAULT || ret_ == RDMA_NP_NOMEM || ret_ == RDMA_NP_TIMEOUT,
	      );
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, &event));
}

TEST_F(fail_nth, advice_fails_cleanly_at_each_allocation)
{
	struct np_pair *pair = &self->pair;
	struct ibv_sge sge = {
		.addr = (uintptr_t)pair->data,
		.length = 4 * PAGE,
		.lkey = pair->mr->lkey,
	};

	SWEEP((madvise(pair->data, NP_DATA_LEN, MADV_DONTNEED),
	       ibv_advise_mr(pair->owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
			     IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1)),
	      0, ret_ == ENOMEM || ret_ == EFAULT, );
	EXPECT_EQ(0, ibv_advise_mr(pair->owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
				   IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
}

TEST_F(fail_nth, local_hold_fails_cleanly_at_each_allocation)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_hold_info info;
	long before = np_pinned();
	int64_t id = -1;

	SWEEP((madvise(pair->data, NP_DATA_LEN, MADV_DONTNEED),
	       id = np_hold(pair->mr, (uintptr_t)pair->data, 4 * PAGE, RDMA_NP_FAULT_WRITE, &info),
	       id < 0 ? (int)id : 0),
	      0, ret_ == -ENOMEM || ret_ == -EFAULT, EXPECT_EQ(0, np_hold_free(pair->owner.ctx, id)));
	EXPECT_EQ(before, np_pinned());
}

TEST_F(fail_nth, release_and_forget_fail_only_before_they_begin)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	long before = np_pinned();

	ASSERT_EQ(0, np_pair_resolve(pair));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event));
	SWEEP(np_release(&pair->peer, event.hold_id), 0, ret_ == -EFAULT || ret_ == -ENOMEM,
	      ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD,
					     &event)));
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	EXPECT_TRUE(np_wait_until(np_pinned() == before));
	SWEEP(np_forget(&pair->peer, pair->info.region_id), 0,
	      ret_ == -EFAULT || ret_ == -ENOMEM, ASSERT_EQ(0, np_pair_resolve(pair)));
}

/* --- the notifier ------------------------------------------------------------------------ */

static int drop(uint8_t *page)
{
	return madvise(page, PAGE, MADV_DONTNEED);
}

static int unmap(uint8_t *page)
{
	return munmap(page, PAGE);
}

static int replace(uint8_t *page)
{
	return mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
		    -1, 0) == page ? 0 : -1;
}

static int protect(uint8_t *page)
{
	return mprotect(page, PAGE, PROT_NONE);
}

static int move(uint8_t *page)
{
	return mremap(page, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page + HUGE_PAGE) ==
	       MAP_FAILED ? -1 : 0;
}

/*
 * Whatever fails while memory goes, the notifier does not: when the call comes back
 * peers do not reach the page. I7: it needs no memory.
 */
TEST_F(fail_nth, memory_that_goes_is_gone_for_peers_at_each_allocation)
{
	static int (*const change[])(uint8_t *) = { drop, unmap, replace, protect, move };
	struct np_pair *pair = &self->pair;
	unsigned int failed = 0, done = 0;
	int fd = open_fail_nth();

	ASSERT_LE(0, fd);
	ASSERT_EQ(0, np_pair_resolve(pair));
	for (size_t c = 0; c < ARRAY_SIZE(change); c++) {
		bool hit = true;

		for (unsigned int nth = 1; hit; nth++) {
			uint8_t *page = pair->data + (1 + nth % 128) * PAGE;
			size_t off = page - pair->data;
			int ret;

			ASSERT_EQ(0, replace(page));
			np_fill(page, PAGE, nth);
			ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, PAGE, RDMA_NP_FAULT_WRITE, NULL));
			ASSERT_TRUE(fail_nth(fd, nth));
			ret = change[c](page);
			hit = fail_nth(fd, 0);
			ASSERT_EQ(0, np_pair_read(pair, off, PAGE));
			if (!ret) {
				EXPECT_TRUE(np_all(pair->peer.buf, PAGE, pair->info.signature));
				EXPECT_EQ(0, np_pair_word(pair, off) & (RDMA_NP_WORD_READABLE | RDMA_NP_WORD_WRITABLE));
				done++;
			} else {
				EXPECT_TRUE(hit) TH_LOG("%s", strerror(errno));
				EXPECT_TRUE(np_all(pair->peer.buf, PAGE, pair->info.signature) ||
					    np_differs(pair->peer.buf, PAGE, nth) == -1);
				failed++;
			}
			ASSERT_GT(500, nth);
		}
	}
	TH_LOG("%u calls failed, %u did not", failed, done);
	EXPECT_LE(ARRAY_SIZE(change), done);
	EXPECT_LT(0, failed);
	close(fd);
}

/* --- the workers, which no system call waits for ------------------------------------------- */

/* Where our functions are: those around np_region_fault() with no gap between them. */
static bool our_text(unsigned long *start, unsigned long *end)
{
	static unsigned long at[2000];
	FILE *f = fopen("/proc/kallsyms", "re");
	unsigned long addr, anchor = 0;
	unsigned int n = 0;
	char line[512], type, name[256];
	bool grown;

	while (f && fgets(line, sizeof(line), f)) {
		if (sscanf(line, "%lx %c %255s", &addr, &type, name) != 3 || (type | 32) != 't' ||
		    strncmp(name, "np_", 3) || n == ARRAY_SIZE(at))
			continue;
		at[n++] = addr;
		if (!strcmp(name, "np_region_fault"))
			anchor = addr;
	}
	if (f)
		fclose(f);
	*start = anchor;
	*end = anchor;
	do {
		grown = false;
		for (unsigned int i = 0; i < n; i++) {
			if (at[i] < *start && *start - at[i] < 0x4000) {
				*start = at[i];
				grown = true;
			}
			if (at[i] > *end && at[i] - *end < 0x4000) {
				*end = at[i];
				grown = true;
			}
		}
	} while (grown);
	return anchor && *end > *start;
}

static const char *const injector[] = { "failslab", "fail_page_alloc" };

static int inject_by(size_t which, const char *knob, unsigned long value)
{
	char path[128], text[32];

	snprintf(path, sizeof(path), "/sys/kernel/debug/%s/%s", injector[which], knob);
	snprintf(text, sizeof(text), "%lu", value);
	return np_write_text(path, text);
}

static int inject(const char *knob, unsigned long value)
{
	int ret = 0;

	for (size_t i = 0; !ret && i < ARRAY_SIZE(injector); i++)
		ret = inject_by(i, knob, value);
	return ret;
}

/* Where a function of the kernel is; its own are sorted. */
static bool text_of(const char *function, unsigned long *start, unsigned long *end)
{
	FILE *f = fopen("/proc/kallsyms", "re");
	char line[512], name[256];
	unsigned long addr;

	*start = 0;
	*end = ~0UL;
	while (f && fgets(line, sizeof(line), f)) {
		if (sscanf(line, "%lx %*c %255s", &addr, name) != 2)
			continue;
		if (!strcmp(name, function))
			*start = addr;
		if (*start && addr > *start && addr < *end)
			*end = addr;
	}
	if (f)
		fclose(f);
	return *start && *end != ~0UL;
}

/* Only allocations with this function on the stack count; NULL: one of ours. */
static int inject_from(const char *function)
{
	unsigned long start, end;
	int ret;

	if (!(function ? text_of(function, &start, &end) : our_text(&start, &end)))
		return -ENOENT;
	ret = inject("require-start", start);
	ret = ret ?: inject("require-end", end);
	return ret ?: inject("stacktrace-depth", 32);
}

static int inject_from_all(void)
{
	return inject("require-start", 0) ?: inject("require-end", ~0UL);
}

/*
 * Only what tasks allocate counts, whichever they are: workers are not known by name.
 * A stack says less than that, because under an interrupt lies that of our function.
 */
static int inject_into_tasks(void)
{
	DIR *dir = opendir("/proc");
	struct dirent *entry;
	char path[300];
	int ret = 0;

	if (!dir)
		return -errno;
	/* Those to come have it from who forks them */
	while ((entry = readdir(dir))) {
		if (!isdigit(entry->d_name[0]))
			continue;
		snprintf(path, sizeof(path), "/proc/%s/make-it-fail", entry->d_name);
		ret = np_write_text(path, "1");
		if (ret && ret != -ENOENT && ret != -ESRCH)
			break;
		ret = 0;
	}
	closedir(dir);
	return ret ?: inject("task-filter", 1);
}

/* Of all that was asked for since inject(): was one of them refused? */
static bool injected(void)
{
	bool hit = false;

	for (size_t i = 0; i < ARRAY_SIZE(injector); i++) {
		char path[128], text[32] = "";
		int fd;

		snprintf(path, sizeof(path), "/sys/kernel/debug/%s/times", injector[i]);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd >= 0 && read(fd, text, sizeof(text) - 1) > 0)
			hit |= !atoi(text);
		if (fd >= 0)
			close(fd);
	}
	return hit;
}

/* What a peer does with a region, until something fails: its status, or -errno. */
static int all_of_it(struct np_pair *pair, struct rdma_np_region_info *info)
{
	struct rdma_np_event event = {};
	struct rdma_np_hold_info local;
	int ret = np_resolve(&pair->peer, pair->mr->rkey, info);
	int64_t hold;

	madvise(pair->data, NP_DATA_LEN, MADV_DONTNEED);
	if (!ret)
		ret = np_fault(&pair->peer, info->region_id, info->base, 4 * PAGE, 0, &event);
	if (!ret)
		ret = np_fault(&pair->peer, info->region_id, info->base + HUGE_PAGE, PAGE,
			       RDMA_NP_FAULT_WRITE, &event);
	if (!ret)
		ret = np_fault(&pair->peer, info->region_id, info->base, 4 * PAGE,
			       RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event);
	if (event.hold_id) {
		int err = np_release(&pair->peer, event.hold_id);

		ret = ret ?: err;
	}
	if (!ret) {
		hold = np_hold(pair->mr, (uintptr_t)pair->data, PAGE, RDMA_NP_FAULT_WRITE, &local);
		ret = hold < 0 ? hold : np_hold_free(pair->owner.ctx, hold);
	}
	return ret;
}

/*
 * All of it, in which the injector @which refuses the one allocation with which its count
 * gets to @count. That goes on over all rounds since the host began.
 */
static int with_failure(struct np_pair *pair, size_t which, unsigned long count, int *ret)
{
	struct rdma_np_region_info info;
	int err = inject_by(which, "interval", count);

	err = err ?: inject("times", 1);
	err = err ?: inject_by(which, "probability", 100);
	*ret = err ? 0 : all_of_it(pair, &info);
	return err ?: inject_by(which, "probability", 0);
}

FIXTURE(worker) {
	struct np_pair pair;
};

FIXTURE_VARIANT(worker) {
	const char *function;
};

FIXTURE_VARIANT_ADD(worker, any) { .function = NULL };
/* Those of the owner: for RESOLVE, and for FAULT with and without a hold. */
FIXTURE_VARIANT_ADD(worker, resolve) { .function = "np_asked_work" };
FIXTURE_VARIANT_ADD(worker, fault) { .function = "np_fault_job" };
FIXTURE_VARIANT_ADD(worker, hold) { .function = "np_hold_alloc" };

FIXTURE_SETUP(worker)
{
	ASSERT_EQ(0, access("/proc/thread-self/fail-nth", W_OK))
		TH_LOG("the kernel has no fault injection: --kernel debug has");
	ASSERT_EQ(0, set_injectors());
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
	ASSERT_EQ(0, inject_from(variant->function));
	ASSERT_EQ(0, inject_into_tasks());
}

FIXTURE_TEARDOWN_PARENT(worker)
{
	inject("probability", 0);
	inject_from_all();
	inject("task-filter", 0);
	if (self->pair.owner.ctx)
		NP_CHECK_USAGE(&self->pair.before);
}

/* What the injectors have counted, over all tests. */
static unsigned long *counted;

static void __attribute__((constructor)) counted_make(void)
{
	void *p = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	counted = p == MAP_FAILED ? NULL : p;
}

/* The first, the second, and so on, until one of all that was asked for is not refused. */
TEST_F(worker, peers_hear_of_each_allocation_that_fails)
{
	struct np_pair *pair = &self->pair;
	unsigned int failed = 0, hits = 0;
	struct rdma_np_region_info info;
	struct ibv_mr *mr;

	ASSERT_NE(NULL, counted);
	for (size_t which = 0; which < ARRAY_SIZE(injector); which++) {
		bool hit = true, swept = false;
		unsigned int nth;

		/* Once more without: then some more are refused until the count is known again. */
		for (nth = 1; !swept || (!hit && nth > 1);) {
			unsigned long count = counted[which] + nth;
			int ret;

			mr = pair->mr;
			ASSERT_EQ(0, with_failure(pair, which, count, &ret));
			hit = injected();
			if (ret) {
				failed++;
				EXPECT_TRUE(hit && (ret == -ENOMEM || ret == RDMA_NP_NOMEM ||
						    ret == RDMA_NP_TIMEOUT || ret == -ETIMEDOUT ||
						    ret == -EHOSTUNREACH))
					TH_LOG("allocation %u: %d", nth, ret);
			}
			/* Nothing stays behind of it. */
			ASSERT_EQ(0, all_of_it(pair, &info)) TH_LOG("allocation %u", nth);
			pair->mr = ibv_reg_mr(pair->owner.pd, pair->data, NP_DATA_LEN,
					      NP_RIGHTS | NP_UNPINNED);
			ASSERT_NE(NULL, pair->mr);
			ASSERT_EQ(0, ibv_dereg_mr(mr));
			swept |= !hit;
			if (!hit)
				continue;
			/* The injector does not count if there is nothing to divide by. */
			counted[which] = count > 1 ? count : 0;
			hits += !swept;
			if (!swept)
				nth++;
			ASSERT_GT(500, nth);
		}
		TH_LOG("%s: %u allocations", injector[which], nth - 1);
	}
	TH_LOG("%u allocations refused, %u of them seen", hits, failed);
	EXPECT_LT(0, hits);
	EXPECT_LT(0, failed);
}

/* --- the end of a process ------------------------------------------------------------------ */

/* With keys granted, a hold of the peer's and one of its own, and an open channel. */
static int live_and_end(unsigned int nth)
{
	struct np_pair pair = {};
	struct rdma_np_hold_info info;
	struct rdma_np_event event;
	int fd = open_fail_nth();

	return fd < 0 || np_pair_open(&pair) || np_pair_register(&pair, NP_RIGHTS) ||
	       np_pair_resolve(&pair) ||
	       np_pair_fault(&pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event) ||
	       np_hold(pair.mr, (uintptr_t)pair.data, PAGE, 0, &info) < 0 || !fail_nth(fd, nth);
}

/* Accesses to the caller's memory count, too, and are not seen to fail: so not the first. */
#define NO_MORE 4

/*
 * mlx5 forgets a queue pair whose DESTROY_QP it had no memory for; then the completion queue
 * cannot be destroyed, and uverbs warns. That is so with pinned memory as well, so it gets it.
 */
static int inject_but_for_destroy_qp(void)
{
	unsigned long start, end;

	if (!text_of("mlx5_core_destroy_qp", &start, &end))
		return -ENOENT;
	return inject("reject-start", start) ?: inject("reject-end", end) ?:
	       inject("stacktrace-depth", 32);
}

FIXTURE(process) {
	struct np_usage before;
};

FIXTURE_SETUP(process)
{
	ASSERT_EQ(0, access("/proc/thread-self/fail-nth", W_OK))
		TH_LOG("the kernel has no fault injection: --kernel debug has");
	ASSERT_EQ(0, set_injectors());
	ASSERT_EQ(0, inject_but_for_destroy_qp());
	ASSERT_EQ(0, np_usage_start(&self->before));
}

FIXTURE_TEARDOWN_PARENT(process)
{
	inject("reject-start", 0);
	inject("reject-end", 0);
}

TEST_F_TIMEOUT(process, ends_cleanly_whatever_allocation_fails, 1500)
{
	unsigned int hits = 0, nth, missed = 0;

	for (nth = 1; missed < NO_MORE; nth++) {
		int status;
		pid_t pid;

		/* fail-nth counts it down as well, whatever the probability */
		ASSERT_EQ(0, inject("times", 1));
		pid = np_fork();
		ASSERT_LE(0, pid);
		if (!pid)
			_exit(live_and_end(nth));
		ASSERT_EQ(pid, waitpid(pid, &status, 0));
		EXPECT_EQ(0, status);
		NP_CHECK_USAGE(&self->before);
		missed = injected() ? 0 : missed + 1;
		hits += !missed;
		ASSERT_GT(500, nth);
	}
	TH_LOG("%u of %u allocations refused", hits, nth - 1 - NO_MORE);
	EXPECT_LT(0, hits);
}

/* --- a control group that is full ------------------------------------------------------ */

TEST(owner_at_its_memory_limit_is_killed_and_nobody_else)
{
	struct np_usage before;
	struct np_pair pair = {};
	uint8_t *data;
	int status;
	pid_t pid;

	ASSERT_EQ(0, np_usage_start(&before));
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid) {
		/* The owner; its peer in the same process asks for more than there is. */
		if (np_group_enter("16M", "0") || np_pair_open(&pair))
			_exit(1);
		pair.data = data = np_map(64 << 20);
		pair.mr = ibv_reg_mr(pair.owner.pd, data, 64 << 20, NP_RIGHTS | NP_UNPINNED);
		if (!pair.mr || np_pair_resolve(&pair))
			_exit(2);
		for (size_t off = 0; off < 64 << 20; off += HUGE_PAGE) {
			if (np_pair_fault(&pair, off, HUGE_PAGE, RDMA_NP_FAULT_WRITE, NULL) != RDMA_NP_OK)
				_exit(3);
		}
		_exit(4);
	}
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	/* The limit's OOM killer has it; it hears of no error before. */
	EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) TH_LOG("status %x", status);
	EXPECT_TRUE(np_group_remove());
	NP_CHECK_USAGE(&before);
}

TEST_HARNESS_MAIN
