// SPDX-License-Identifier: GPL-2.0
/*
 * Leases of the process's own memory, and of a peer's: what they are good for, how who has one
 * hears that it is wanted back, what happens if it is not given back, and how much may be leased.
 */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "np_harness.h"

#define LEASE_PERCENT	"/sys/module/ib_core/parameters/nprdma_lease_percent"
#define RECALL_MS	"/sys/module/ib_core/parameters/nprdma_recall_ms"

#define SLOT		(2UL << 20)
#define MAX_LEASES	512U

FIXTURE(lease) {
	struct np_usage before;
	struct np_end end;
	int channel;
	const volatile uint64_t *posted;	/* in the channel's page */
	uint8_t *data;
	struct ibv_mr *mr;
	int64_t leases[MAX_LEASES];
	unsigned int nr;
};

FIXTURE_SETUP(lease)
{
	ASSERT_EQ(0, np_usage_start(&self->before));
}

FIXTURE_TEARDOWN_PARENT(lease)
{
	EXPECT_TRUE(np_group_remove());
	EXPECT_EQ(0, np_write_text(LEASE_PERCENT, "25"));
	EXPECT_EQ(0, np_write_text(RECALL_MS, "1000"));
	NP_CHECK_USAGE(&self->before);
}

static const volatile uint64_t *map_posted(int channel, int prot)
{
	void *page = mmap(NULL, PAGE, prot, MAP_SHARED, channel, 0);

	return page == MAP_FAILED ? NULL : page;
}

/* Memory is charged, and its region counted, where the process is when this is called. */
static int lease_open(FIXTURE_DATA(lease) *self, size_t len)
{
	int ret = np_open(&self->end, NP_OWNER_DEV, PAGE);

	if (ret)
		return ret;
	self->channel = np_channel(self->end.ctx);
	if (self->channel < 0)
		return self->channel;
	self->posted = map_posted(self->channel, PROT_READ);
	self->data = np_map(len);
	if (!self->posted || !self->data)
		return -errno;
	self->mr = ibv_reg_mr(self->end.pd, self->data, len, NP_UNPINNED | IBV_ACCESS_LOCAL_WRITE);
	return self->mr ? 0 : -errno;
}

static int64_t lease_slot(FIXTURE_DATA(lease) *self, unsigned int nr)
{
	struct rdma_np_hold_info info;

	return np_lease(self->mr, (uintptr_t)self->data + nr * SLOT, SLOT, RDMA_NP_FAULT_WRITE,
			self->channel, nr, &info);
}

/* As many as there are: 0, or what ended it if that is not the bound. */
static int lease_all(FIXTURE_DATA(lease) *self)
{
	int64_t ret;

	while (self->nr < MAX_LEASES) {
		ret = lease_slot(self, self->nr);
		if (ret < 0)
			return ret == -EBUSY ? 0 : (int)ret;
		self->leases[self->nr++] = ret;
	}
	return -E2BIG;
}

/* Gives back what is recalled: how many that were, or -errno. */
static int obey(FIXTURE_DATA(lease) *self)
{
	struct rdma_np_event event;
	int ret, nr = 0;

	while (read(self->channel, &event, sizeof(event)) == sizeof(event)) {
		if (event.type != RDMA_NP_EVENT_RECALL || event.cookie >= self->nr)
			return -EPROTO;
		ret = np_hold_free(self->end.ctx, self->leases[event.cookie]);
		if (ret)
			return ret;
		nr++;
	}
	return nr;
}

/* --- hearing of it ------------------------------------------------------------------ */

/* Whoever looks at the word before he posts needs no system call. */
TEST_F(lease, memory_that_changes_is_announced_before_the_call_returns)
{
	struct rdma_np_event event;
	struct rdma_np_hold_info info;

	ASSERT_EQ(0, lease_open(self, SLOT));
	EXPECT_EQ(0, *self->posted);
	ASSERT_LE(0, np_lease(self->mr, (uintptr_t)self->data, 2 * PAGE, 0, self->channel, 7, &info));
	EXPECT_EQ(0, *self->posted);
	ASSERT_EQ(0, madvise(self->data + 2 * PAGE, PAGE, MADV_DONTNEED));
	EXPECT_EQ(0, *self->posted);
	ASSERT_EQ(0, madvise(self->data + PAGE, PAGE, MADV_DONTNEED));
	EXPECT_EQ(1, *self->posted);
	ASSERT_EQ((ssize_t)sizeof(event), read(self->channel, &event, sizeof(event)));
	EXPECT_EQ(RDMA_NP_EVENT_RECALL, event.type);
	EXPECT_EQ(7, event.cookie);
	/* Once. */
	ASSERT_EQ(0, madvise(self->data, PAGE, MADV_DONTNEED));
	EXPECT_EQ(1, *self->posted);
	EXPECT_EQ(-1, read(self->channel, &event, sizeof(event)));
	EXPECT_EQ(EAGAIN, errno);
}

TEST_F(lease, page_of_a_channel_can_only_be_read)
{
	ASSERT_EQ(0, lease_open(self, SLOT));
	EXPECT_EQ(NULL, map_posted(self->channel, PROT_READ | PROT_WRITE));
	EXPECT_EQ(EACCES, errno);
	EXPECT_EQ(-1, mprotect((void *)(uintptr_t)self->posted, PAGE, PROT_READ | PROT_WRITE));
	EXPECT_EQ(EACCES, errno);
	EXPECT_EQ(MAP_FAILED, mmap(NULL, 2 * PAGE, PROT_READ, MAP_SHARED, self->channel, 0));
	EXPECT_EQ(EINVAL, errno);
	EXPECT_EQ(MAP_FAILED, mmap(NULL, PAGE, PROT_READ, MAP_SHARED, self->channel, PAGE));
	EXPECT_EQ(EINVAL, errno);
}

/* The file of the channel outlives the device's; its page does only where it is mapped. */
TEST_F(lease, channel_of_a_closed_device_is_not_mapped)
{
	int channel;

	for (unsigned int i = 0; i < 16; i++) {
		struct ibv_context *ctx = np_open_device(NP_OWNER_DEV);
		const volatile uint64_t *posted;

		ASSERT_NE(NULL, ctx);
		channel = np_channel(ctx);
		ASSERT_LE(0, channel);
		posted = map_posted(channel, PROT_READ);
		ASSERT_NE(NULL, posted);
		ASSERT_EQ(0, ibv_close_device(ctx));
		EXPECT_EQ(UINT64_MAX, *posted);
		EXPECT_EQ(NULL, map_posted(channel, PROT_READ));
		EXPECT_EQ(EIO, errno);
		ASSERT_EQ(0, munmap((void *)(uintptr_t)posted, PAGE));
		EXPECT_EQ(NULL, map_posted(channel, PROT_READ));
		EXPECT_EQ(EIO, errno);
		ASSERT_EQ(0, close(channel));
	}
}

/* --- how much ----------------------------------------------------------------------- */

/* A quarter of what the group may have. */
TEST_F(lease, leases_are_a_share_of_what_a_group_may_have)
{
	ASSERT_EQ(0, np_group_enter("32M", "max"));
	ASSERT_EQ(0, lease_open(self, 32UL << 20));
	ASSERT_EQ(0, lease_all(self));
	/* The share is whole pages of a hundredth. */
	EXPECT_EQ(3, self->nr);
	ASSERT_EQ(0, np_hold_free(self->end.ctx, self->leases[0]));
	self->leases[0] = lease_slot(self, 0);
	EXPECT_LE(0, self->leases[0]);
	/* The limit may change. */
	ASSERT_EQ(0, np_write_text(NP_GROUP "/memory.high", "64M"));
	ASSERT_EQ(0, np_write_text(NP_GROUP "/memory.max", "64M"));
	ASSERT_EQ(0, lease_all(self));
	EXPECT_EQ(7, self->nr);
	EXPECT_EQ(-EBUSY, lease_slot(self, 8));
}

#define FEW	(16 * PAGE)

/* As lease_all(), and of the rest what is too little for a slot. */
static int lease_to_the_last(FIXTURE_DATA(lease) *self)
{
	struct rdma_np_hold_info info;
	int64_t ret = lease_all(self);

	if (ret)
		return (int)ret;
	do {
		ret = np_lease(self->mr, (uintptr_t)self->data + 4 * SLOT, FEW, 0, self->channel,
			       self->nr, &info);
	} while (ret >= 0);
	return ret == -EBUSY ? 0 : (int)ret;
}

/* In another process of the group, which has none yet: 0, or what it is told in the end. */
static int lease_few(void)
{
	FIXTURE_DATA(lease) other = {};
	struct rdma_np_hold_info info;
	int64_t ret = lease_open(&other, SLOT);

	if (ret)
		return (int)ret;
	np_wait_until((ret = np_lease(other.mr, (uintptr_t)other.data, FEW, 0, other.channel, 0,
				      &info)) != -EBUSY);
	return ret < 0 ? (int)ret : 0;
}

/* Of another process: its status, 0 if it got what lease_few() asks for */
static int others_get_few(void)
{
	int status = -1;
	pid_t pid = np_fork();

	if (!pid)
		_exit(-lease_few());
	return pid < 0 || waitpid(pid, &status, 0) != pid ? -1 : status;
}

/* It is stopped, say: whoever has little gets some all the same, and the rest is as it was. */
TEST_F(lease, process_that_ignores_recalls_keeps_nobody_out)
{
	ASSERT_EQ(0, np_group_enter("32M", "max"));
	ASSERT_EQ(0, lease_open(self, 32UL << 20));
	ASSERT_EQ(0, lease_to_the_last(self));
	EXPECT_EQ(0, others_get_few());
	EXPECT_LE(1, *self->posted);
	/* Who ignores them has had his share. */
	EXPECT_EQ(-EBUSY, lease_slot(self, self->nr));
}

/* In another process of the group: whatever others have is recalled, and nobody has been late yet */
static int want_all(void)
{
	FIXTURE_DATA(lease) other = {};
	struct rdma_np_hold_info info;

	if (lease_open(&other, SLOT))
		return 1;
	for (unsigned int i = 0; i < MAX_LEASES; i++) {
		if (np_lease(other.mr, (uintptr_t)other.data, FEW, 0, other.channel, 0, &info) != -EBUSY)
			return 2;
	}
	return 0;
}

/* He asks when the time has passed, and is the first to find it out: the room is not his. */
TEST_F(lease, recall_that_is_ignored_makes_room_for_others_only)
{
	int status;
	pid_t pid;

	ASSERT_EQ(0, np_write_text(RECALL_MS, "60000"));
	ASSERT_EQ(0, np_group_enter("32M", "max"));
	ASSERT_EQ(0, lease_open(self, 32UL << 20));
	ASSERT_EQ(0, lease_to_the_last(self));
	ASSERT_LE(1, self->nr);
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid)
		_exit(want_all());
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	ASSERT_EQ(0, status);
	ASSERT_TRUE(np_wait_until(*self->posted >= self->nr));
	ASSERT_EQ(0, np_write_text(RECALL_MS, "10"));
	poll(NULL, 0, 100);
	EXPECT_EQ(-EBUSY, lease_slot(self, self->nr));
	/* There was some. */
	EXPECT_EQ(0, others_get_few());
}

#define DEEP	256U

static int enter_deep(void)
{
	if (chdir(NP_GROUP))
		return -errno;
	for (unsigned int i = 0; i < DEEP; i++) {
		int ret = np_write_text("cgroup.subtree_control", "+memory");

		if (ret)
			return ret;
		if (mkdir("n", 0755) || chdir("n"))
			return -errno;
	}
	return np_write_text("cgroup.procs", "0");
}

static int leave_deep(void)
{
	int ret = np_write_text("/sys/fs/cgroup/cgroup.procs", "0");

	for (unsigned int i = 0; !ret && i < DEEP; i++) {
		if (chdir("..") || !np_wait_until(!rmdir("n")))
			ret = -errno;
	}
	return ret;
}

/* All of them are looked at, and the kernel's stack is small. */
TEST_F(lease, groups_may_be_nested_deeply)
{
	ASSERT_EQ(0, np_group_enter("32M", "max"));
	ASSERT_EQ(0, np_write_text("/sys/fs/cgroup/cgroup.procs", "0"));
	ASSERT_EQ(0, enter_deep());
	ASSERT_EQ(0, lease_open(self, 32UL << 20));
	/* That of the outermost is the smallest. */
	ASSERT_EQ(0, lease_all(self));
	EXPECT_EQ(3, self->nr);
	ASSERT_EQ(0, ibv_dereg_mr(self->mr));
	ASSERT_EQ(0, leave_deep());
}

/*
 * I10: whoever would not be killed for memory without leases is not with them: what is leased comes
 * back, and if it does not, as here first, the rest of the group's memory is as ever.
 */
TEST_F(lease, memory_that_is_leased_is_not_missed)
{
	const size_t more = 96UL << 20;
	uint8_t *heap;
	int nr = 0;

	ASSERT_EQ(0, np_group_enter("32M", "max"));
	ASSERT_EQ(0, lease_open(self, 32UL << 20));
	ASSERT_EQ(0, lease_all(self));
	heap = np_map(more);
	ASSERT_NE(NULL, heap);
	for (size_t off = 0; off < more; off += PAGE)
		np_fill(heap + off, PAGE, off / PAGE);
	/* Reclaim has asked for all of them, and nobody has listened. */
	nr = obey(self);
	EXPECT_EQ(self->nr, nr);
	for (size_t off = 0; off < more; off += PAGE)
		ASSERT_EQ(-1, np_differs(heap + off, PAGE, off / PAGE));
	/* What was given back may be leased anew. */
	self->nr = 0;
	ASSERT_EQ(0, lease_all(self));
	EXPECT_EQ(3, self->nr);
}

#define GROUP_MAX	(32UL << 20)
#define GIVE_BACK_MS	60

/*
 * Another thread of the process, which takes its time, or never gives back. The full group has no
 * room to bring its pages in again, so they stay: this is before the group is entered. A child
 * calls it anew, as it inherits no locks.
 */
static uint8_t late_stack[1UL << 16] __attribute__((aligned(4096)));

static int lock_what_is_there(void)
{
	return mlockall(MCL_CURRENT) ? -errno : 0;
}

static int start_late(pthread_t *keeper, void *(*run)(void *), void *arg)
{
	pthread_attr_t attr;
	int ret = pthread_attr_init(&attr);

	if (ret)
		return -ret;
	ret = pthread_attr_setstack(&attr, late_stack, sizeof(late_stack));
	if (!ret)
		ret = pthread_create(keeper, &attr, run, arg);
	pthread_attr_destroy(&attr);
	return -ret;
}

static void *give_back_late(void *arg)
{
	FIXTURE_DATA(lease) *self = arg;
	struct pollfd recalled = { .fd = self->channel, .events = POLLIN };
	uintptr_t given = 0;

	while (given < self->nr) {
		int nr = poll(&recalled, 1, NP_WAIT_MS);

		if (nr != 1)
			break;
		poll(NULL, 0, GIVE_BACK_MS);
		nr = obey(self);
		if (nr < 0)
			break;
		given += nr;
	}
	return (void *)given;
}

static void *give_back_never(void *arg)
{
	pause();
	return arg;
}

static long group_usage(void)
{
	char text[32];
	long ret = np_read_text(NP_GROUP "/memory.current", text, sizeof(text));

	return ret < 0 ? ret : atol(text);
}

/* What is not leased can neither be reclaimed: @left bytes are left. */
static int fill_group(size_t left)
{
	while (group_usage() >= 0 && group_usage() + (long)left < (long)GROUP_MAX) {
		uint8_t *locked = np_map(SLOT / 8);

		if (!locked || mlock(locked, SLOT / 8))
			return -errno;
	}
	return group_usage() < 0 ? -EIO : 0;
}

/*
 * I10: without leases there is enough that can be reclaimed, so nobody is killed. The kernel asks
 * nobody before it kills for a group, and has tried everything long before the leases are back.
 */
TEST_F(lease, full_group_waits_for_its_leases)
{
	pthread_t keeper;
	uint8_t *more;
	void *given;

	ASSERT_EQ(0, lock_what_is_there());
	more = np_map(2 * SLOT);
	ASSERT_NE(NULL, more);
	ASSERT_EQ(0, np_group_enter("32M", "max"));
	ASSERT_EQ(0, lease_open(self, 4 * SLOT));
	ASSERT_EQ(0, lease_all(self));
	ASSERT_EQ(3, self->nr);
	ASSERT_EQ(0, fill_group(SLOT));
	ASSERT_EQ(0, start_late(&keeper, give_back_late, self));
	ASSERT_EQ(0, mlock(more, 2 * SLOT));
	ASSERT_EQ(0, pthread_join(keeper, &given));
	EXPECT_EQ(3, (uintptr_t)given);
}

static int fill_and_keep(FIXTURE_DATA(lease) *self, uint64_t *start)
{
	uint8_t *more = np_map(8 * SLOT);
	pthread_t keeper;

	if (!more || np_group_enter("32M", "max") || lease_open(self, 4 * SLOT) ||
	    lease_all(self) || self->nr != 3 || fill_group(SLOT))
		return 1;
	if (pthread_create(&keeper, NULL, give_back_never, NULL))
		return 2;
	*start = np_now_ms();
	return mlock(more, 8 * SLOT) ? 3 : 4;
}

#define MOMENT_MS	5000U		/* what it should wait, and the rest on a slow machine */

/* Whoever does not give back does not keep the kernel from killing. */
TEST_F(lease, full_group_waits_for_a_moment_only)
{
	uint64_t *start = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
			       0);
	int status;
	pid_t pid;

	ASSERT_NE(MAP_FAILED, start);
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid)
		_exit(fill_and_keep(self, start));
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	EXPECT_GT(MOMENT_MS, np_now_ms() - *start);
}

/* A group below which others are, with processes of their own: here, and in a child. */
static int enter_groups_below(void)
{
	int ret = np_group_enter("32M", "max");

	if (!ret)
		ret = np_write_text("/sys/fs/cgroup/cgroup.procs", "0");
	if (!ret)
		ret = np_write_text(NP_GROUP "/cgroup.subtree_control", "+memory");
	if (!ret && (mkdir(NP_GROUP_OURS, 0755) || mkdir(NP_GROUP_THEIRS, 0755)))
		ret = -errno;
	return ret;
}

/* In a child: all leases of the group. */
static bool lease_all_below(FIXTURE_DATA(lease) *self)
{
	return !np_write_text(NP_GROUP_THEIRS "/cgroup.procs", "0") &&
	       !lease_open(self, 4 * SLOT) && !lease_all(self) && self->nr == 3;
}

static int give_back_below(FIXTURE_DATA(lease) *self, int ready)
{
	pthread_t keeper;
	void *given;

	if (lock_what_is_there() || !lease_all_below(self) ||
	    start_late(&keeper, give_back_late, self) || write(ready, "", 1) != 1 ||
	    pthread_join(keeper, &given))
		return 1;
	return (uintptr_t)given == 3 ? 0 : 2;
}

/* Who is killed for a group may be in another one below it than who has its leases. */
TEST_F(lease, full_group_waits_for_leases_below_it)
{
	uint8_t *more = np_map(2 * SLOT);
	int ready[2], status;
	char byte;
	pid_t pid;

	ASSERT_NE(NULL, more);
	ASSERT_EQ(0, pipe(ready));
	ASSERT_EQ(0, enter_groups_below());
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid)
		_exit(give_back_below(self, ready[1]));
	close(ready[1]);
	ASSERT_EQ(1, read(ready[0], &byte, 1));
	ASSERT_EQ(0, np_write_text(NP_GROUP_OURS "/cgroup.procs", "0"));
	ASSERT_EQ(0, fill_group(SLOT));
	ASSERT_EQ(0, mlock(more, 2 * SLOT));
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	EXPECT_EQ(0, status);
}

static int keep_below(FIXTURE_DATA(lease) *self, int ready)
{
	struct rdma_np_hold_info info;
	int64_t lease;

	if (!lease_all_below(self))
		return 1;
	do {
		lease = np_lease(self->mr, (uintptr_t)self->data + 3 * SLOT, FEW, 0, self->channel,
				 self->nr, &info);
	} while (lease >= 0);
	if (lease != -EBUSY || write(ready, "", 1) != 1)
		return 2;
	pause();
	return 3;
}

/* Leases are recalled in all groups that are below the full one, and in no other. */
TEST_F(lease, room_is_made_below_a_full_group)
{
	FIXTURE_DATA(lease) theirs = {};
	struct rdma_np_hold_info info;
	int ready[2], status;
	pid_t pid, asks;
	char byte;

	ASSERT_EQ(0, pipe(ready));
	ASSERT_EQ(0, enter_groups_below());
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid)
		_exit(keep_below(&theirs, ready[1]));
	close(ready[1]);
	ASSERT_EQ(1, read(ready[0], &byte, 1));
	ASSERT_EQ(0, lease_open(self, SLOT));
	ASSERT_LE(0, np_lease(self->mr, (uintptr_t)self->data, FEW, 0, self->channel, 0, &info));
	asks = np_fork();
	ASSERT_LE(0, asks);
	if (!asks)
		_exit(np_write_text(NP_GROUP_OURS "/cgroup.procs", "0") ? 1 : -lease_few());
	ASSERT_EQ(asks, waitpid(asks, &status, 0));
	EXPECT_EQ(0, status);
	EXPECT_EQ(0, *self->posted);
	ASSERT_EQ(0, kill(pid, SIGKILL));
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
}

/* Its owner may have moved since. */
TEST_F(lease, lease_is_recalled_where_its_region_was_registered)
{
	ASSERT_EQ(0, np_group_enter("32M", "max"));
	ASSERT_EQ(0, lease_open(self, SLOT));
	ASSERT_EQ(0, np_write_text("/sys/fs/cgroup/cgroup.procs", "0"));
	ASSERT_LE(0, lease_slot(self, 0));
	np_write_text(NP_GROUP "/memory.reclaim", "32M");
	EXPECT_EQ(1, *self->posted);
}

#define FILE_LEN	(96UL << 20)
#define FILE_MORE	(8UL << 20)

/* Page by page: who reads ahead would rather fail, and waits for nobody in any case. */
static uint8_t *map_swap_disk(void)
{
	char text[512], path[64];
	void *file;
	int fd;

	if (np_read_text("/proc/swaps", text, sizeof(text)) < 0 ||
	    sscanf(text, "%*[^\n] %63s", path) != 1)
		return NULL;
	fd = open(path, O_RDONLY | O_CLOEXEC);
	file = mmap(NULL, FILE_LEN + FILE_MORE, PROT_READ, MAP_PRIVATE, fd, 0);
	close(fd);
	if (file == MAP_FAILED || madvise(file, FILE_LEN + FILE_MORE, MADV_RANDOM))
		return NULL;
	return file;
}

/*
 * Whoever reads a large file makes the kernel reclaim all the time, and put off what it might recall.
 * There is always enough: so nobody waits when leases are recalled for another reason, and
 * there are leases as before.
 */
TEST_F(lease, reclaim_that_finds_enough_does_not_wait)
{
	struct rdma_np_hold_info info;
	uint8_t *file = map_swap_disk();
	pthread_t keeper;

	ASSERT_NE(NULL, file);
	ASSERT_EQ(0, np_group_enter("32M", "max"));
	ASSERT_EQ(0, lease_open(self, SLOT));
	ASSERT_EQ(0, pthread_create(&keeper, NULL, give_back_never, NULL));
	for (; self->nr < 16; self->nr++)
		ASSERT_LE(0, np_lease(self->mr, (uintptr_t)self->data + self->nr * PAGE, PAGE, 0,
				      self->channel, self->nr, &info));
	ASSERT_EQ(0, madvise(file, FILE_LEN, MADV_POPULATE_READ));
	ASSERT_EQ(0, madvise(self->data, self->nr * PAGE, MADV_DONTNEED));
	EXPECT_EQ(self->nr, *self->posted);
	ASSERT_EQ(0, madvise(file + FILE_LEN, FILE_MORE, MADV_POPULATE_READ));
	EXPECT_LE(0, np_lease(self->mr, (uintptr_t)self->data + SLOT - FEW, FEW, 0, self->channel,
			      self->nr, &info));
}

/* Who reclaims in a full group, of which nothing but leases is left, and why. */
FIXTURE(full_group) {
	FIXTURE_DATA(lease) lease;
	struct np_usage before;
	int told[2];
	pid_t other;
};

FIXTURE_VARIANT(full_group) {
	bool other;		/* process than who has the leases */
	bool outside;		/* of the group */
	bool keeper;		/* who has the leases has another thread */
	bool room;		/* is left: the group is not full */
	const char *file;
	const char *text;
	bool waits;
};

#define RECLAIM		.file = NP_GROUP "/memory.reclaim", .text = "32M"
#define DROP_CACHES	.file = "/proc/sys/vm/drop_caches", .text = "2"

FIXTURE_VARIANT_ADD(full_group, other_of_the_group) { .other = true, RECLAIM, .waits = true };
FIXTURE_VARIANT_ADD(full_group, other_with_room) { .other = true, .room = true, RECLAIM };
FIXTURE_VARIANT_ADD(full_group, outsider) { .other = true, .outside = true, RECLAIM };
FIXTURE_VARIANT_ADD(full_group, outsider_drops_caches) {
	.other = true, .outside = true, DROP_CACHES
};
FIXTURE_VARIANT_ADD(full_group, other_drops_caches) { .other = true, DROP_CACHES };
FIXTURE_VARIANT_ADD(full_group, only_thread) { RECLAIM };
FIXTURE_VARIANT_ADD(full_group, one_of_two_threads) { .keeper = true, RECLAIM, .waits = true };

/* What the other process does when it is told. */
static int reclaim_when_told(const FIXTURE_VARIANT(full_group) *variant, int told)
{
	char byte;

	if (read(told, &byte, 1) != 1)
		return 255;
	if (!variant->outside && np_write_text(NP_GROUP "/cgroup.procs", "0"))
		return 254;
	return -np_write_text(variant->file, variant->text);
}

FIXTURE_SETUP(full_group)
{
	pid_t other;

	ASSERT_EQ(0, np_usage_start(&self->before));
	ASSERT_EQ(0, pipe(self->told));
	if (!variant->other)
		return;
	/* Before there are leases, which it would recall. Both share what self points to. */
	other = np_fork();
	ASSERT_LE(0, other);
	if (!other)
		_exit(reclaim_when_told(variant, self->told[0]));
	self->other = other;
}

FIXTURE_TEARDOWN_PARENT(full_group)
{
	EXPECT_TRUE(np_group_remove());
	NP_CHECK_USAGE(&self->before);
}

static int reclaim(FIXTURE_DATA(full_group) *self, const FIXTURE_VARIANT(full_group) *variant)
{
	int status;

	if (!variant->other)
		return -np_write_text(variant->file, variant->text);
	if (write(self->told[1], "", 1) != 1 || waitpid(self->other, &status, 0) != self->other)
		return -1;
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Without swap. */
static int leave_nothing_but_leases(FIXTURE_DATA(lease) *self)
{
	int ret = np_group_enter("32M", "0");

	if (!ret)
		ret = lease_open(self, 4 * SLOT);
	if (!ret)
		ret = fill_group(4 * SLOT);
	if (!ret)
		ret = lease_all(self);
	if (!ret && self->nr != 3)
		ret = -ENOMEM;
	return ret;
}

/* It has less left than the kernel charges at once, but a little, so that nobody dies of it. */
static int leave_no_room(void)
{
	char text[32];

	snprintf(text, sizeof(text), "%ld", group_usage() + 48 * (long)PAGE);
	return np_write_text(NP_GROUP "/memory.max", text);
}

#define WITHOUT_LEASES_MS	5000U	/* NP_OOM_PAUSE_MS */

/* Whoever has waited has made a while begin without leases. */
TEST_F(full_group, only_who_may_kill_waits)
{
	struct rdma_np_hold_info info;
	uint64_t start, passed;
	pthread_t keeper;
	int64_t lease;

	if (variant->keeper)
		ASSERT_EQ(0, pthread_create(&keeper, NULL, give_back_never, NULL));
	ASSERT_EQ(0, leave_nothing_but_leases(&self->lease));
	if (!variant->room)
		ASSERT_EQ(0, leave_no_room());
	start = np_now_ms();
	EXPECT_EQ(strcmp(variant->text, "2") ? EAGAIN : 0, reclaim(self, variant));
	EXPECT_EQ(3, *self->lease.posted);
	ASSERT_EQ(0, np_write_text(NP_GROUP "/memory.max", "32M"));
	lease = np_lease(self->lease.mr, (uintptr_t)self->lease.data + 3 * SLOT, PAGE, 0,
			 self->lease.channel, 3, &info);
	passed = np_now_ms() - start;
	if (!variant->waits) {
		EXPECT_LE(0, lease);
		return;
	}
	/* On a machine that stood still the while is over. */
	if (passed < WITHOUT_LEASES_MS)
		EXPECT_EQ(-EBUSY, lease) TH_LOG("%lu ms", (unsigned long)passed);
	EXPECT_TRUE(np_wait_until(np_lease(self->lease.mr, (uintptr_t)self->lease.data + 3 * SLOT,
					   PAGE, 0, self->lease.channel, 3, &info) >= 0));
}

/* --- what needs other memory to go -------------------------------------------------- */

struct obedient {
	FIXTURE_DATA(lease) *self;
	atomic_bool stop;
	atomic_int ret;
};

/* A thread that gives back what is recalled. */
static void *obey_thread(void *arg)
{
	struct obedient *o = arg;

	while (!atomic_load(&o->stop)) {
		struct pollfd p = { .fd = o->self->channel, .events = POLLIN };

		if (poll(&p, 1, 20) > 0) {
			int ret = obey(o->self);

			if (ret < 0)
				atomic_store(&o->ret, ret);
		}
	}
	return NULL;
}

#define HUGE_PAGES	"/proc/sys/vm/nr_hugepages"
#define SPREAD		(512UL << 20)

static unsigned int huge_pages_of(unsigned int want)
{
	char text[32];
	int ret;

	snprintf(text, sizeof(text), "%u", want);
	ret = np_write_text(HUGE_PAGES, text);
	return ret || np_read_text(HUGE_PAGES, text, sizeof(text)) < 0 ? 0 : atoi(text);
}

/*
 * Memory is full of blocks of which nothing is used but one leased page, so who wants huge pages
 * gets them only if these pages move: I10, compaction.
 */
TEST_F(lease, huge_pages_are_there_although_each_block_has_a_leased_page)
{
	struct obedient obedient = { .self = self };
	unsigned int blocks = 0, before, most, with = 0, tries = 0;
	static bool seen[8192];
	pthread_t thread;
	size_t gap = 0;

	ASSERT_EQ(0, lease_open(self, SPREAD));
	for (size_t off = 0; off < SPREAD; off += PAGE)
		self->data[off] = 1;
	before = huge_pages_of(4000);
	ASSERT_EQ(0, huge_pages_of(0));
	for (size_t off = 0; off < SPREAD; off += PAGE) {
		uint64_t block = np_frame_of(self->data + off) >> 9;
		struct rdma_np_hold_info info;

		if (blocks == MAX_LEASES || block >= 8192 || seen[block])
			continue;
		seen[block] = true;
		self->leases[blocks] = np_lease(self->mr, (uintptr_t)self->data + off, PAGE, 0,
						self->channel, blocks, &info);
		ASSERT_LE(0, self->leases[blocks++]);
		ASSERT_EQ(0, off > gap ? madvise(self->data + gap, off - gap, MADV_DONTNEED) : 0);
		gap = off + PAGE;
	}
	ASSERT_EQ(0, madvise(self->data + gap, SPREAD - gap, MADV_DONTNEED));
	self->nr = blocks;
	/*
	 * Nobody gives back anything, then somebody does. Compaction passes over a page that
	 * is still leased, and waits for nobody: who asks again finds it given back.
	 */
	most = huge_pages_of(4000);
	most = huge_pages_of(4000);
	ASSERT_EQ(0, huge_pages_of(0));
	TH_LOG("%u huge pages beside all, %u beside %u leases of a page", before, most, blocks);
	EXPECT_GT(before + blocks / 2, most);
	ASSERT_EQ(0, pthread_create(&thread, NULL, obey_thread, &obedient));
	np_wait_until(++tries && (with = huge_pages_of(4000)) >= before + blocks / 2);
	atomic_store(&obedient.stop, true);
	ASSERT_EQ(0, pthread_join(thread, NULL));
	ASSERT_EQ(0, huge_pages_of(0));
	EXPECT_EQ(0, obedient.ret);
	TH_LOG("%u huge pages if they are given back, in %u tries; %lu recalls", with, tries,
	       (unsigned long)*self->posted);
	EXPECT_LE(before + blocks / 2, with);
}

/* Who is asked for a lease that he has not got any more may say so. */
TEST_F(lease, deregistration_does_not_wait_for_leases_of_ones_own)
{
	struct rdma_np_event event;
	long before;
	uint64_t start;

	ASSERT_EQ(0, lease_open(self, 4 * SLOT));
	before = np_pinned();
	ASSERT_EQ(0, np_write_text(RECALL_MS, "60000"));
	for (unsigned int i = 0; i < 4; i++) {
		self->leases[i] = lease_slot(self, i);
		ASSERT_LE(0, self->leases[i]);
	}
	ASSERT_LE(before + 4 * (long)(SLOT / PAGE), np_pinned());
	start = np_now_ms();
	ASSERT_EQ(0, ibv_dereg_mr(self->mr));
	EXPECT_GT(30000, np_now_ms() - start);
	EXPECT_GE(before, np_pinned());
	EXPECT_EQ(4, *self->posted);
	for (unsigned int i = 0; i < 4; i++) {
		ASSERT_EQ((ssize_t)sizeof(event), read(self->channel, &event, sizeof(event)));
		EXPECT_EQ(RDMA_NP_EVENT_RECALL, event.type);
	}
	for (unsigned int i = 0; i < 4; i++)
		EXPECT_EQ(0, np_hold_free(self->end.ctx, self->leases[i]));
}

/* Most of the host's memory that may be leased in what follows: some 20 MiB. */
static long one_percent(void)
{
	return np_meminfo_kb("MemTotal") / 100 / 4;
}

/*
 * I10. Who takes all that he can leaves as much to others: one of them, who comes later, has a
 * lease, and nobody takes it from him while the first goes on to ask.
 */
TEST_F(lease, who_asks_without_end_leaves_room_for_others)
{
	FIXTURE_DATA(lease) other = {};
	unsigned int refused = 0;
	int sock[2], status;
	pid_t pid;
	char c = 0;

	ASSERT_EQ(0, np_write_text(LEASE_PERCENT, "1"));
	ASSERT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sock));
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid) {
		/* When all is taken it leases some, and looks in the end whether it has it. */
		if (recv(sock[1], &c, 1, 0) != 1 || lease_open(&other, SLOT))
			_exit(1);
		other.leases[0] = lease_slot(&other, 0);
		if (other.leases[0] < 0 || send(sock[1], &c, 1, 0) != 1 ||
		    recv(sock[1], &c, 1, 0) != 1)
			_exit(2);
		_exit(*other.posted ? 3 : 0);
	}
	ASSERT_EQ(0, lease_open(self, 64 * SLOT));
	ASSERT_EQ(0, lease_all(self));
	TH_LOG("%u slots are leased, of %ld pages", self->nr, one_percent());
	EXPECT_LT(0, self->nr);
	EXPECT_GE(one_percent() / 2 + (long)(SLOT / PAGE), self->nr * (long)(SLOT / PAGE));
	ASSERT_EQ(1, send(sock[0], &c, 1, 0));
	ASSERT_EQ(1, recv(sock[0], &c, 1, 0));
	for (unsigned int i = 0; i < 500; i++)
		refused += lease_slot(self, self->nr + i % 8) == -EBUSY;
	EXPECT_EQ(500, refused);
	EXPECT_EQ(0, *self->posted);
	ASSERT_EQ(1, send(sock[0], &c, 1, 0));
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	EXPECT_EQ(0, status);
}

/* --- of a peer's memory ------------------------------------------------------------- */

#define FIRST		2U		/* page of the lease, and how many there are */
#define PAGES		4U
#define LEASE_OFF	(FIRST * PAGE)
#define LEASE_LEN	(PAGES * PAGE)
#define QP_LEASES	192U		/* NP_MAX_LEASES of the kernel: of one queue pair */

FIXTURE(remote_lease) {
	struct np_pair pair;
	struct rdma_np_event lease;
	long pinned;
};

FIXTURE_SETUP(remote_lease)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, np_pair_open(pair));
	ASSERT_EQ(0, np_pair_register(pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(pair));
	self->pinned = np_pinned();
}

FIXTURE_TEARDOWN_PARENT(remote_lease)
{
	EXPECT_EQ(0, np_set_hold_ms(NP_HOLD_MS));
	EXPECT_EQ(0, np_write_text(LEASE_PERCENT, "25"));
	EXPECT_EQ(0, np_hca_set(NP_PEER_DEV, NP_HCA_LOSS, 0));
	NP_CHECK_USAGE(&self->pair.before);
}

static int take(FIXTURE_DATA(remote_lease) *self, uint32_t flags)
{
	int ret = np_pair_fault(&self->pair, LEASE_OFF, LEASE_LEN,
				RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE | flags, &self->lease);

	return ret ? ret : !self->lease.hold_id || !self->lease.lease_key;
}

/* Addresses are those of the write window, also to read. */
static int lease_write(FIXTURE_DATA(remote_lease) *self, size_t off, size_t len)
{
	return np_write(&self->pair.peer, 0, len, np_write_addr(&self->pair.info, off),
			self->lease.lease_key);
}

static int lease_read(FIXTURE_DATA(remote_lease) *self, size_t off, size_t len)
{
	return np_read(&self->pair.peer, 0, len, np_write_addr(&self->pair.info, off),
		       self->lease.lease_key);
}

static bool is_recalled(FIXTURE_DATA(remote_lease) *self)
{
	struct rdma_np_event event;

	return np_wait_event(&self->pair.peer, RDMA_NP_EVENT_RECALL, &event, NP_WAIT_MS) == 1 &&
	       event.hold_id == self->lease.hold_id;
}

TEST_F(remote_lease, key_of_a_lease_is_for_its_pages)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, take(self, RDMA_NP_FAULT_WRITE));
	EXPECT_EQ(pair->info.base + LEASE_OFF, self->lease.lease_addr);
	EXPECT_EQ(LEASE_LEN, self->lease.lease_length);
	EXPECT_EQ(self->pinned + PAGES, np_pinned());
	np_fill(pair->peer.buf, LEASE_LEN, 99);
	ASSERT_EQ(0, lease_write(self, LEASE_OFF, LEASE_LEN));
	EXPECT_EQ(-1, np_differs(pair->data + LEASE_OFF, LEASE_LEN, 99));
	memset(pair->peer.buf, 0, LEASE_LEN);
	ASSERT_EQ(0, lease_read(self, LEASE_OFF, LEASE_LEN));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, LEASE_LEN, 99));
	ASSERT_EQ(0, np_fetch_add(&pair->peer, 0, np_write_addr(&pair->info, LEASE_OFF),
				  self->lease.lease_key, 1));

	/* One byte before it, and one behind it. */
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, lease_read(self, LEASE_OFF - 1, 2));
	ASSERT_EQ(0, np_reconnect(&pair->owner, &pair->peer));
	ASSERT_EQ(0, np_pair_resolve(pair));
	ASSERT_EQ(0, take(self, RDMA_NP_FAULT_WRITE));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, lease_write(self, LEASE_OFF + LEASE_LEN - 1, 2));
}

TEST_F(remote_lease, key_of_a_lease_to_read_does_not_write)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, take(self, 0));
	ASSERT_EQ(0, np_read(&pair->peer, 0, PAGE, np_read_addr(&pair->info, LEASE_OFF),
			     self->lease.lease_key));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, FIRST));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
		  np_write(&pair->peer, 0, PAGE, np_read_addr(&pair->info, LEASE_OFF),
			   self->lease.lease_key));
	EXPECT_EQ(-1, np_differs(pair->data + LEASE_OFF, PAGE, FIRST));
}

/* Until it is given back, what is there is what was there: the owner has another page by now. */
TEST_F(remote_lease, lease_is_recalled_when_memory_changes)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, take(self, RDMA_NP_FAULT_WRITE));
	ASSERT_EQ(0, madvise(pair->data + LEASE_OFF, PAGE, MADV_DONTNEED));
	ASSERT_TRUE(is_recalled(self));
	ASSERT_EQ(0, lease_read(self, LEASE_OFF, LEASE_LEN));
	for (unsigned int i = 0; i < PAGES; i++)
		EXPECT_EQ(-1, np_differs((uint8_t *)pair->peer.buf + i * PAGE, PAGE, FIRST + i));
	EXPECT_EQ(self->pinned + PAGES, np_pinned());
	ASSERT_EQ(0, np_release(&pair->peer, self->lease.hold_id));
	EXPECT_TRUE(np_wait_until(np_pinned() == self->pinned));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, lease_read(self, LEASE_OFF, 8));
}

/*
 * Who does not give it back, because his process is stopped, say, finds the key gone, and has
 * his connection still.
 */
TEST_F(remote_lease, lease_kept_for_too_long_ends_and_its_queue_pair_does_not)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(0, np_set_hold_ms(500));
	ASSERT_EQ(0, take(self, RDMA_NP_FAULT_WRITE));
	/* Nothing ends as long as nobody asks. */
	ASSERT_EQ(0, np_next_event(&pair->peer, &event, 1500));
	ASSERT_EQ(0, lease_read(self, LEASE_OFF, 8));
	ASSERT_EQ(0, madvise(pair->data + LEASE_OFF, PAGE, MADV_DONTNEED));
	ASSERT_TRUE(np_wait_until(np_pinned() == self->pinned));
	EXPECT_TRUE(is_recalled(self));
	EXPECT_EQ(IBV_QPS_RTS, np_qp_state(pair->peer.qp));
	EXPECT_EQ(IBV_QPS_RTS, np_qp_state(pair->owner.qp));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 0));
	/* The process may give back now what it has. */
	EXPECT_EQ(0, np_release(&pair->peer, self->lease.hold_id));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, lease_write(self, LEASE_OFF, 8));
	EXPECT_EQ(-1, np_differs(pair->data + LEASE_OFF + PAGE, PAGE, FIRST + 1));
}

/*
 * All packets to the peer are lost, so its kernel hears of no recall, nor does it answer. That is
 * what a cut link is to the owner, and what a kernel is that answers nothing.
 */
TEST_F(remote_lease, kernel_that_does_not_answer_a_recall_loses_the_lease_and_no_more)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(0, np_set_hold_ms(500));
	ASSERT_EQ(0, take(self, RDMA_NP_FAULT_WRITE));
	np_fill(pair->peer.buf, PAGE, 55);
	ASSERT_EQ(0, lease_write(self, LEASE_OFF + PAGE, PAGE));
	ASSERT_EQ(0, np_hca_set(NP_PEER_DEV, NP_HCA_LOSS, 1));
	ASSERT_EQ(0, madvise(pair->data + LEASE_OFF, PAGE, MADV_DONTNEED));
	EXPECT_EQ(self->pinned + PAGES, np_pinned());
	ASSERT_TRUE(np_wait_until(np_pinned() == self->pinned));
	ASSERT_EQ(0, np_hca_set(NP_PEER_DEV, NP_HCA_LOSS, 0));
	EXPECT_EQ(IBV_QPS_RTS, np_qp_state(pair->owner.qp));
	EXPECT_EQ(IBV_QPS_RTS, np_qp_state(pair->peer.qp));
	EXPECT_EQ(-1, np_differs(pair->data + LEASE_OFF + PAGE, PAGE, 55));
	EXPECT_EQ(0, *(uint64_t *)(pair->data + LEASE_OFF));
	/* The connection is good for all but that lease. */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, LEASE_OFF, PAGE, RDMA_NP_FAULT_WRITE, &event));
	ASSERT_EQ(0, np_write_proven(&pair->peer, &pair->info, 0, LEASE_OFF, PAGE));
	EXPECT_EQ(-1, np_differs(pair->data + LEASE_OFF, PAGE, 55));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, lease_write(self, LEASE_OFF, 8));
}

/*
 * I10. The attacker has a queue pair of its own, asks for a page at a time, and gives nothing back.
 * The lease of the first queue pair is as good as before.
 */
TEST_F(remote_lease, who_asks_without_end_gets_the_bound_and_others_keep_theirs)
{
	const uint32_t flags = RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE;
	struct np_pair *pair = &self->pair;
	struct np_end a = {}, o = {};
	struct rdma_np_region_info info;
	struct rdma_np_event event;
	struct ibv_qp *qp;
	unsigned long leases = 0;
	long pinned;

	ASSERT_EQ(0, take(self, RDMA_NP_FAULT_WRITE));
	/* Its own channel, so that recalls of the first one's stay there. */
	ASSERT_EQ(0, np_open(&a, NP_PEER_DEV, PAGE));
	qp = np_make_qp(&pair->owner, pair->owner.pd);
	ASSERT_NE(NULL, qp);
	o.qp = qp;
	o.lid = pair->owner.lid;
	ASSERT_EQ(0, np_qp_connect(qp, np_address(&a)));
	ASSERT_EQ(0, np_qp_connect(a.qp, np_address(&o)));
	ASSERT_EQ(0, np_resolve(&a, pair->mr->rkey, &info));
	pinned = np_pinned();
	for (unsigned int i = 0; i < QP_LEASES; i++) {
		ASSERT_EQ(RDMA_NP_OK, np_fault(&a, info.region_id, info.base + i * PAGE, PAGE,
					       flags, &event));
		leases += !!event.lease_key;
	}
	EXPECT_EQ(QP_LEASES, leases);
	EXPECT_EQ(pinned + QP_LEASES, np_pinned());
	/* Its own kernel does not even ask for more. */
	for (unsigned int i = 0; i < 100; i++) {
		EXPECT_EQ(-EBUSY, np_fault_once(&a, a.qp, info.region_id,
						info.base + (QP_LEASES + i) * PAGE, PAGE, flags,
						&event));
	}
	EXPECT_EQ(pinned + QP_LEASES, np_pinned());
	ASSERT_EQ(0, np_next_event(&pair->peer, &event, 0));
	np_fill(pair->peer.buf, PAGE, 66);
	ASSERT_EQ(0, lease_write(self, LEASE_OFF, PAGE));
	EXPECT_EQ(-1, np_differs(pair->data + LEASE_OFF, PAGE, 66));
	ASSERT_EQ(0, np_release(&pair->peer, self->lease.hold_id));
	/* And may have another one. */
	ASSERT_EQ(0, take(self, RDMA_NP_FAULT_WRITE));
}

/* I11: what was reported done is in the page; the owner waits for a bounded time. */
TEST_F(remote_lease, deregistration_ends_a_lease_that_is_kept)
{
	struct np_pair *pair = &self->pair;
	uint64_t start;

	ASSERT_EQ(0, take(self, RDMA_NP_FAULT_WRITE));
	np_fill(pair->peer.buf, PAGE, 77);
	ASSERT_EQ(0, lease_write(self, LEASE_OFF, PAGE));
	start = np_now_ms();
	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	EXPECT_LT(900, np_now_ms() - start);
	EXPECT_GT(NP_WAIT_MS, np_now_ms() - start);
	EXPECT_EQ(self->pinned, np_pinned());
	EXPECT_TRUE(is_recalled(self));
	EXPECT_EQ(-1, np_differs(pair->data + LEASE_OFF, PAGE, 77));
	np_fill(pair->peer.buf, PAGE, 78);
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, lease_write(self, LEASE_OFF, PAGE));
	EXPECT_EQ(-1, np_differs(pair->data + LEASE_OFF, PAGE, 77));
}

TEST_HARNESS_MAIN
