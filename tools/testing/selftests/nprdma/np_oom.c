// SPDX-License-Identifier: GPL-2.0
/*
 * I10: who would not be killed for memory without leases is not killed with them. A process locks
 * so much of the host's memory that nearly all that is leased has to go to swap.
 */
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "np_harness.h"

#define SLOT		(2UL << 20)
#define LEASES		48U	/* of a slot each */
#define LEN		(LEASES * SLOT)
#define LATE_MS		60

enum kind {
	NONE,		/* what can be locked without leases */
	OWN,
	REMOTE,
};

FIXTURE(oom) {
	struct np_usage before;
	struct np_end owner;
	struct np_end peer;
	uint8_t *data;
	struct ibv_mr *mr;
	int64_t leases[LEASES];
	unsigned int nr;
	int channel;			/* that tells of recalls */
	atomic_uint recalled;
	atomic_bool failed;
};

FIXTURE_VARIANT(oom) {
	enum kind kind;
	unsigned int late;	/* ms from a recall until the lease is given back */
};

FIXTURE_VARIANT_ADD(oom, unleased) {};
FIXTURE_VARIANT_ADD(oom, own) { .kind = OWN };
FIXTURE_VARIANT_ADD(oom, own_late) { .kind = OWN, .late = LATE_MS };
FIXTURE_VARIANT_ADD(oom, remote) { .kind = REMOTE };
FIXTURE_VARIANT_ADD(oom, remote_late) { .kind = REMOTE, .late = LATE_MS };

static int give_back(FIXTURE_DATA(oom) *self, const struct rdma_np_event *event, enum kind kind)
{
	if (event->type != RDMA_NP_EVENT_RECALL)
		return -EPROTO;
	if (kind == REMOTE)
		return np_release(&self->peer, event->hold_id);
	if (event->cookie >= self->nr)
		return -EPROTO;
	return np_hold_free(self->owner.ctx, self->leases[event->cookie]);
}

static struct {
	FIXTURE_DATA(oom) *self;
	enum kind kind;
	unsigned int late;
	atomic_bool go;
	pthread_t thread;
} keeper;

/* Gives back what is recalled, at once or late: late for all that are recalled meanwhile. */
static void *give_back_all(void *arg)
{
	struct np_end end = { .channel = keeper.self->channel };
	struct rdma_np_event event;

	/* Other events are for who asks for leases. */
	while (!atomic_load(&keeper.go))
		np_pause();
	while (np_next_event(&end, &event, NP_WAIT_MS) == 1) {
		if (keeper.late)
			poll(NULL, 0, keeper.late);
		do {
			if (give_back(keeper.self, &event, keeper.kind))
				atomic_store(&keeper.self->failed, true);
			atomic_fetch_add(&keeper.self->recalled, 1);
		} while (np_next_event(&end, &event, 0) == 1);
	}
	return arg;
}

FIXTURE_SETUP(oom)
{
	ASSERT_EQ(0, np_usage_start(&self->before));
	ASSERT_EQ(0, np_open(&self->owner, NP_OWNER_DEV, PAGE));
	ASSERT_EQ(0, np_open(&self->peer, NP_PEER_DEV, PAGE));
	ASSERT_EQ(0, np_connect(&self->owner, &self->peer));
	self->channel = variant->kind == REMOTE ? self->peer.channel : self->owner.channel;
	ASSERT_LE(0, self->channel);
	keeper.self = self;
	keeper.kind = variant->kind;
	keeper.late = variant->late;
	ASSERT_EQ(0, pthread_create(&keeper.thread, NULL, give_back_all, NULL));
	/* By the time that he is late what he runs is not there, nor the memory to read it to. */
	ASSERT_EQ(0, variant->late ? mlockall(MCL_CURRENT) : 0);
	self->data = np_map(LEN);
	ASSERT_NE(NULL, self->data);
	for (size_t off = 0; off < LEN; off += PAGE)
		np_fill(self->data + off, PAGE, off / PAGE);
	self->mr = ibv_reg_mr(self->owner.pd, self->data, LEN, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, self->mr);
}

FIXTURE_TEARDOWN_PARENT(oom)
{
	NP_CHECK_USAGE(&self->before);
}

/* 0, -EBUSY or another error: a lease of what follows. */
static int lease_own(FIXTURE_DATA(oom) *self)
{
	struct rdma_np_hold_info info;
	int64_t ret = np_lease(self->mr, (uintptr_t)self->data + self->nr * SLOT, SLOT,
			       RDMA_NP_FAULT_WRITE, self->channel, self->nr, &info);

	if (ret < 0)
		return (int)ret;
	self->leases[self->nr++] = ret;
	return 0;
}

static int lease_remote(FIXTURE_DATA(oom) *self, const struct rdma_np_region_info *info)
{
	const uint32_t flags = RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE;
	struct rdma_np_event event;
	int ret = np_fault(&self->peer, info->region_id, info->base + self->nr * SLOT, SLOT,
			   flags, &event);

	if (ret)
		return ret < 0 ? ret : -EREMOTEIO;
	if (!event.lease_key)
		return -EBUSY;
	self->nr++;
	return 0;
}

static int lease_all(FIXTURE_DATA(oom) *self, enum kind kind)
{
	struct rdma_np_region_info info;
	int ret;

	if (kind == NONE)
		return 0;
	ret = np_resolve(&self->peer, self->mr->rkey, &info);
	while (!ret && self->nr < LEASES) {
		/* After the kernel has waited for leases there are none for 5 s. */
		np_wait_until((ret = kind == OWN ? lease_own(self) :
						   lease_remote(self, &info)) != -EBUSY);
	}
	return ret;
}

/* Whom the kernel would kill first. Never returns; 0: it has all of it. */
static void lock_memory(size_t len)
{
	const size_t step = SLOT / 2;
	uint8_t *data;

	if (np_write_text("/proc/self/oom_score_adj", "1000"))
		_exit(1);
	data = np_map(len);
	if (!data)
		_exit(2);
	for (size_t off = 0; off < len; off += step)
		if (mlock(data + off, step))
			_exit(3);
	_exit(0);
}

TEST_F(oom, nobody_is_killed_while_leases_can_come_back)
{
	size_t available, swapped, len;
	int status;
	pid_t pid;

	ASSERT_EQ(0, lease_all(self, variant->kind));
	atomic_store(&keeper.go, true);
	available = np_meminfo_kb("MemAvailable") * 1024UL;
	/* What can be reclaimed may be some MiB more, or fewer. */
	len = (available + LEN * 3 / 8) / SLOT * SLOT;
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid)
		lock_memory(len);
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	EXPECT_EQ(0, status);
	swapped = np_swapped(self->data, LEN / PAGE) * PAGE;
	TH_LOG("%zu MiB were available, %zu locked; %u leases, %u recalled; %zu of %lu MiB in swap",
	       available >> 20, len >> 20, self->nr, self->recalled, swapped >> 20, LEN >> 20);
	/* Without what was leased there would not have been enough. */
	EXPECT_LT(LEN / 16, swapped);
	EXPECT_FALSE(self->failed);
	for (size_t off = 0; off < LEN; off += PAGE)
		ASSERT_EQ(-1, np_differs(self->data + off, PAGE, off / PAGE));
}

TEST_HARNESS_MAIN
