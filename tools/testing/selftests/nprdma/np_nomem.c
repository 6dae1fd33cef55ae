// SPDX-License-Identifier: GPL-2.0
/*
 * No memory: each allocation of a good sequence fails once (fail-nth of the fault
 * injection framework), and a control group runs full. Errors that say so, no
 * splat, no leak, and the next try succeeds.
 *
 * fail-nth counts allocations of the calling task, so it covers registration,
 * RESOLVE, FAULT and FORGET as far as they run in the initiator's system call, and
 * advice, which faults in the caller's context. It counts accesses to the caller's
 * memory, too; those fail with EFAULT.
 */
#include <fcntl.h>

#include "np_harness.h"

FIXTURE(fail_nth) {
	struct np_pair pair;
};

static int write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC), ret = 0;

	if (fd < 0)
		return -errno;
	if (write(fd, text, strlen(text)) < 0)
		ret = -errno;
	close(fd);
	return ret;
}

FIXTURE_SETUP(fail_nth)
{
	/* All sleeping allocations, too, and quietly. */
	static const char *const knob[][2] = {
		{ "/sys/kernel/debug/failslab/ignore-gfp-wait", "N" },
		{ "/sys/kernel/debug/failslab/verbose", "0" },
		{ "/sys/kernel/debug/fail_page_alloc/ignore-gfp-wait", "N" },
		{ "/sys/kernel/debug/fail_page_alloc/min-order", "0" },
		{ "/sys/kernel/debug/fail_page_alloc/verbose", "0" },
	};

	if (access("/proc/thread-self/fail-nth", W_OK))
		SKIP(return, "the kernel has no fault injection: --kernel debug has");
	for (size_t i = 0; i < ARRAY_SIZE(knob); i++) {
		ASSERT_EQ(0, write_text(knob[i][0], knob[i][1]))
			TH_LOG("%s", knob[i][0]);
	}
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
	struct np_event event;

	ASSERT_EQ(0, np_pair_resolve(pair));
	SWEEP((madvise(pair->data, PAGE, MADV_DONTNEED),
	       np_fault_once(&pair->peer, pair->peer.qp, pair->info.region_id, pair->info.base,
			     PAGE, NP_FAULT_WRITE, &event)),
	      NP_OK, ret_ == -ENOMEM || ret_ == -EFAULT || ret_ == NP_NOMEM || ret_ == NP_TIMEOUT,
	      );
	EXPECT_EQ(NP_OK, np_pair_fault(pair, 0, PAGE, NP_FAULT_WRITE, &event));
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
	struct np_hold_info info;
	long before = np_pinned();
	int64_t id = -1;

	SWEEP((madvise(pair->data, NP_DATA_LEN, MADV_DONTNEED),
	       id = np_hold(pair->mr, (uintptr_t)pair->data, 4 * PAGE, NP_FAULT_WRITE, &info),
	       id < 0 ? (int)id : 0),
	      0, ret_ == -ENOMEM || ret_ == -EFAULT, EXPECT_EQ(0, np_hold_free(pair->owner.ctx, id)));
	EXPECT_EQ(before, np_pinned());
}

/* --- a control group that is full ------------------------------------------------------ */

TEST(owner_at_its_memory_limit_fails_its_own_faults_only)
{
	struct np_usage before;
	struct np_pair pair = {};
	int ret = 0, bad = 0, status;
	uint8_t *data;
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
			ret = np_pair_fault(&pair, off, HUGE_PAGE, NP_FAULT_WRITE, NULL);
			if (ret != NP_OK)
				break;
		}
		/* Either we are told, or the limit's OOM killer has us. */
		_exit(ret == NP_NOMEM || ret == NP_GONE || ret == NP_ADDRESS ? 0 : 3);
	}
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	bad = !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) &&
	      !(WIFEXITED(status) && !WEXITSTATUS(status));
	EXPECT_FALSE(bad) TH_LOG("status %x", status);
	EXPECT_TRUE(np_group_remove());
	NP_CHECK_USAGE(&before);
}

TEST_HARNESS_MAIN
