// SPDX-License-Identifier: GPL-2.0
/*
 * A device is taken away from its driver, from the bus, or from its slot, under everybody
 * who uses it: regions, holds, connected queue pairs, READs, WRITEs and FAULTs under way.
 * When the driver has let go, nothing of it is left; memory is as it was; the other end
 * hears of it; and the device can come back.
 */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "np_harness.h"
#include "np_stuck.h"

#define FAULTS	16

FIXTURE(remove) {
	struct np_pair pair;
	long pinned;			/* pages, before there was anything */
	long owner_pinned;		/* for the owner's queues and buffer */
	long peer_pinned;
	char function[NP_FUNCTION_LEN];	/* of the device that is away */
};

FIXTURE_VARIANT(remove) {
	enum np_removal how;
};

FIXTURE_VARIANT_ADD(remove, from_its_driver) { .how = NP_UNBIND };
FIXTURE_VARIANT_ADD(remove, from_the_bus) { .how = NP_REMOVE };
FIXTURE_VARIANT_ADD(remove, from_its_slot) { .how = NP_UNPLUG };

static int join_pair(struct np_pair *pair)
{
	int ret = np_connect(&pair->owner, &pair->peer);

	if (!ret)
		ret = np_pair_register(pair, NP_RIGHTS);
	return ret ? ret : np_pair_resolve(pair);
}

static int open_pair(struct np_pair *pair)
{
	int ret = np_open(&pair->owner, NP_OWNER_DEV, PAGE);

	if (!ret)
		ret = np_open(&pair->peer, NP_PEER_DEV, NP_BUF_LEN);
	return ret ? ret : join_pair(pair);
}

FIXTURE_SETUP(remove)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(0, np_usage_start(&pair->before));
	self->pinned = np_pinned();
	ASSERT_EQ(0, np_open(&pair->owner, NP_OWNER_DEV, PAGE));
	self->owner_pinned = np_pinned() - self->pinned;
	ASSERT_EQ(0, np_open(&pair->peer, NP_PEER_DEV, NP_BUF_LEN));
	self->peer_pinned = np_pinned() - self->pinned - self->owner_pinned;
	ASSERT_EQ(0, join_pair(pair));
	np_fill(pair->peer.buf, PAGE, 77);
	ASSERT_EQ(0, np_write_proven(&pair->peer, &pair->info, 0, PAGE, PAGE));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 8 * PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(self->pinned + self->owner_pinned + self->peer_pinned + 8, np_pinned());
}

#define RECALL_MS "/sys/module/ib_core/parameters/nprdma_recall_ms"

FIXTURE_TEARDOWN_PARENT(remove)
{
	EXPECT_EQ(0, np_write_text(RECALL_MS, "1000"));
	/* The next test wants both. */
	if (self->function[0] && access("/sys/class/infiniband/" NP_OWNER_DEV, F_OK))
		EXPECT_EQ(0, np_device_return(NP_OWNER_DEV, variant->how, self->function));
	if (self->function[0] && access("/sys/class/infiniband/" NP_PEER_DEV, F_OK))
		EXPECT_EQ(0, np_device_return(NP_PEER_DEV, variant->how, self->function));
	NP_CHECK_USAGE(&self->pair.before);
}

static int start_faults(struct np_pair *pair)
{
	for (unsigned int i = 0; i < FAULTS; i++) {
		struct rdma_np_range range = {
			.addr = pair->info.base + i * 32 * PAGE,
			.length = 32 * PAGE,
		};
		int ret = np_fault_start(&pair->peer, pair->info.region_id,
					 i % 2 ? RDMA_NP_FAULT_WRITE : 0, i, &range, 1);

		if (ret)
			return ret;
	}
	return 0;
}

#define CHAIN		16U
#define READ_LEN	(HUGE_PAGE / 8)

/* READs of all windows, and WRITEs of what is there, always as many of them under way. */
struct traffic {
	struct np_pair *pair;
	pthread_t thread;
	atomic_bool stop;
	atomic_ulong done;	/* well */
	int error;		/* what ended it */
};

static int post_next(struct np_pair *pair, unsigned long n)
{
	size_t off = n / 2 * READ_LEN % NP_DATA_LEN;

	return n % 2 ? np_post(&pair->peer, IBV_WR_RDMA_WRITE, NP_DATA_LEN, PAGE / 2,
			       np_write_addr(&pair->info, PAGE), pair->info.write_key,
			       IBV_SEND_SIGNALED) :
		       np_post(&pair->peer, IBV_WR_RDMA_READ, off, READ_LEN,
			       np_read_addr(&pair->info, off), pair->info.read_key,
			       IBV_SEND_SIGNALED);
}

static void *traffic_thread(void *arg)
{
	struct traffic *t = arg;
	unsigned int under_way = 0;
	unsigned long n = 0;
	struct ibv_wc wc;

	/* After an error until all of them are flushed: the next ones to ask begin anew. */
	do {
		while (!t->error && under_way < CHAIN) {
			t->error = post_next(t->pair, n++);
			under_way += !t->error;
		}
		if (ibv_poll_cq(t->pair->peer.cq, 1, &wc) < 1)
			continue;
		under_way--;
		if (!wc.status)
			atomic_fetch_add(&t->done, 1);
		else if (!t->error)
			t->error = wc.status;
	} while (under_way && !atomic_load(&t->stop));
	return NULL;
}

static int start_traffic(struct traffic *t, struct np_pair *pair)
{
	t->pair = pair;
	np_fill(pair->peer.buf + NP_DATA_LEN, PAGE, 77);
	return -pthread_create(&t->thread, NULL, traffic_thread, t);
}

/* Whoever has the device open is told, too. */
static bool told_of_the_end(struct ibv_context *ctx)
{
	struct pollfd p = { .fd = ctx->async_fd, .events = POLLIN };
	struct ibv_async_event event;

	while (poll(&p, 1, NP_WAIT_MS) == 1 && !ibv_get_async_event(ctx, &event)) {
		ibv_ack_async_event(&event);
		if (event.event_type == IBV_EVENT_DEVICE_FATAL)
			return true;
	}
	return false;
}

/* What was the owner's memory is the owner's memory. */
static bool memory_is_intact(struct np_pair *pair)
{
	for (size_t i = 0; i < NP_DATA_PAGES; i++)
		if (np_differs(pair->data + i * PAGE, PAGE, i == 1 ? 77 : i) != -1)
			return false;
	return true;
}

TEST_F(remove, owners_device_can_go_under_all_who_use_it)
{
	struct np_pair *pair = &self->pair, again = {};
	unsigned int answered[FAULTS] = {};
	struct traffic traffic = {};
	struct rdma_np_mr_info info;
	int ret;

	ASSERT_EQ(0, start_traffic(&traffic, pair));
	ASSERT_TRUE(np_wait_until(atomic_load(&traffic.done) >= 2 * CHAIN));
	ASSERT_EQ(0, start_faults(pair));
	ASSERT_EQ(0, np_device_remove(NP_OWNER_DEV, variant->how, self->function));
	/* At once: the driver is gone, so nobody is left who could give back later. */
	EXPECT_EQ(self->pinned + self->peer_pinned, np_pinned());
	EXPECT_TRUE(memory_is_intact(pair));
	EXPECT_TRUE(told_of_the_end(pair->owner.ctx));
	EXPECT_EQ(-EIO, np_query_mr(pair->mr, &info));
	EXPECT_EQ(NULL, ibv_reg_mr(pair->owner.pd, pair->data, PAGE, NP_RIGHTS | NP_UNPINNED));

	for (int i = 0; i < FAULTS; i++) {
		struct rdma_np_event event;

		ASSERT_EQ(1, np_wait_event(&pair->peer, RDMA_NP_EVENT_FAULT, &event, NP_WAIT_MS));
		ASSERT_GT(FAULTS, event.cookie);
		EXPECT_EQ(1, ++answered[event.cookie]);
	}
	/* It was the end of the device that ended it, with all that was under way. */
	ASSERT_EQ(0, pthread_join(traffic.thread, NULL));
	EXPECT_LT(0, traffic.error) TH_LOG("%d", traffic.error);
	TH_LOG("%lu READs and WRITEs before", atomic_load(&traffic.done));
	ret = np_pair_read(pair, 0, PAGE);
	EXPECT_LT(0, ret) TH_LOG("%d", ret);

	ASSERT_EQ(0, np_device_return(NP_OWNER_DEV, variant->how, self->function));
	ASSERT_EQ(0, open_pair(&again));
	ASSERT_EQ(0, np_read_proven(&again.peer, &again.info, 0, 0, HUGE_PAGE));
	EXPECT_EQ(-1, np_differs(again.peer.buf + PAGE, PAGE, 1));
}

TEST_F(remove, peers_device_can_go_with_keys_and_holds)
{
	struct np_pair *pair = &self->pair, again = {};
	struct traffic traffic = {};
	struct rdma_np_event event;

	ASSERT_EQ(0, start_traffic(&traffic, pair));
	ASSERT_TRUE(np_wait_until(atomic_load(&traffic.done) >= 2 * CHAIN));
	ASSERT_EQ(0, start_faults(pair));
	ASSERT_EQ(0, np_device_remove(NP_PEER_DEV, variant->how, self->function));
	/*
	 * Nobody tells it: its queues are memory that no device looks at any more. But keys go
	 * before the queue pairs, so what was posted last may have met one that is not there.
	 */
	atomic_store(&traffic.stop, true);
	ASSERT_EQ(0, pthread_join(traffic.thread, NULL));
	EXPECT_TRUE(!traffic.error || traffic.error == IBV_WC_LOC_PROT_ERR) TH_LOG("%d", traffic.error);
	TH_LOG("%lu READs and WRITEs before", atomic_load(&traffic.done));
	EXPECT_TRUE(np_wait_until(np_pinned() == self->pinned + self->owner_pinned));
	EXPECT_TRUE(memory_is_intact(pair));
	EXPECT_TRUE(told_of_the_end(pair->peer.ctx));
	EXPECT_EQ(-EIO, np_pair_fault(pair, 0, PAGE, 0, &event));
	/* The owner's end works on, and can be closed with keys that nobody forgot. */
	EXPECT_EQ(0, ibv_dereg_mr(pair->mr));
	EXPECT_EQ(0, np_close(&pair->owner));

	ASSERT_EQ(0, np_device_return(NP_PEER_DEV, variant->how, self->function));
	ASSERT_EQ(0, open_pair(&again));
	ASSERT_EQ(0, np_read_proven(&again.peer, &again.info, 0, 0, HUGE_PAGE));
	EXPECT_EQ(-1, np_differs(again.peer.buf + PAGE, PAGE, 1));
}

/* Leases of both kinds, with the words that tell of recalls: 0 or -errno. */
static int take_leases(struct np_pair *pair, const volatile uint64_t **own, int *channel)
{
	struct rdma_np_hold_info info;
	struct rdma_np_event event;
	int64_t ret;
	void *page;

	ret = np_pair_fault(pair, 16 * PAGE, 8 * PAGE,
			    RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE, &event);
	if (ret || !event.lease_key)
		return ret < 0 ? ret : -EREMOTEIO;
	*channel = np_channel(pair->owner.ctx);
	if (*channel < 0)
		return *channel;
	page = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, *channel, 0);
	if (page == MAP_FAILED)
		return -errno;
	*own = page;
	ret = np_lease(pair->mr, (uintptr_t)pair->data + 32 * PAGE, 8 * PAGE, RDMA_NP_FAULT_WRITE,
		       *channel, 0, &info);
	return ret < 0 ? ret : 0;
}

/* Who gives a region up waits for its leases, here longer than the test. A device does not. */
TEST_F(remove, owners_device_does_not_wait_for_leases)
{
	struct np_pair *pair = &self->pair, again = {};
	const volatile uint64_t *own;
	struct rdma_np_event event;
	uint64_t start;
	int channel;

	ASSERT_EQ(0, np_write_text(RECALL_MS, "60000"));
	ASSERT_EQ(0, take_leases(pair, &own, &channel));
	ASSERT_EQ(self->pinned + self->owner_pinned + self->peer_pinned + 24, np_pinned());
	start = np_now_ms();
	ASSERT_EQ(0, np_device_remove(NP_OWNER_DEV, variant->how, self->function));
	EXPECT_EQ(self->pinned + self->peer_pinned, np_pinned());
	TH_LOG("removed within %lu ms", (unsigned long)(np_now_ms() - start));
	EXPECT_GT(30000, np_now_ms() - start);
	EXPECT_TRUE(memory_is_intact(pair));
	/* Nothing more is posted under the owner's, and the peer has lost its connection. */
	EXPECT_EQ(UINT64_MAX, *own);
	EXPECT_EQ(-1, read(channel, &event, sizeof(event)));
	EXPECT_NE(0, np_pair_read(pair, 0, PAGE));
	ASSERT_EQ(0, np_device_return(NP_OWNER_DEV, variant->how, self->function));
	ASSERT_EQ(0, open_pair(&again));
	ASSERT_EQ(0, take_leases(&again, &own, &channel));
}

/* Whoever had leases cannot give them back any more: the end of his queue pair does. */
TEST_F(remove, peers_device_can_go_with_leases)
{
	struct np_pair *pair = &self->pair, again = {};
	const volatile uint64_t *own;
	int channel;

	ASSERT_EQ(0, take_leases(pair, &own, &channel));
	ASSERT_EQ(0, np_device_remove(NP_PEER_DEV, variant->how, self->function));
	/* The owner's own lease and no other: it was not the owner's device. */
	EXPECT_TRUE(np_wait_until(np_pinned() == self->pinned + self->owner_pinned + 8));
	EXPECT_EQ(0, *own);
	EXPECT_TRUE(memory_is_intact(pair));
	EXPECT_EQ(0, ibv_dereg_mr(pair->mr));
	EXPECT_EQ(1, *own);
	ASSERT_EQ(0, np_device_return(NP_PEER_DEV, variant->how, self->function));
	ASSERT_EQ(0, open_pair(&again));
	ASSERT_EQ(0, take_leases(&again, &own, &channel));
}

struct asking {
	struct np_pair *pair;
	atomic_int tid;
	atomic_int ret;
};

static void *ask_nobody(void *arg)
{
	struct asking *asking = arg;
	struct rdma_np_region_info info;

	atomic_store(&asking->tid, gettid());
	atomic_store(&asking->ret, np_resolve(&asking->pair->peer, asking->pair->mr->rkey, &info));
	return NULL;
}

/* It waits, and there is only one thing that it could wait for. */
static bool asleep(int tid)
{
	char path[64], text[256] = {};
	int fd, n;

	snprintf(path, sizeof(path), "/proc/self/task/%d/wchan", tid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	n = read(fd, text, sizeof(text) - 1);
	close(fd);
	return n > 0 && strstr(text, "_resolve");
}

/* Who asks it waits for seconds in a system call, and removal for the system call. */
TEST_F(remove, device_is_not_kept_by_a_peer_that_does_not_answer)
{
	struct np_pair *pair = &self->pair;
	struct asking asking = { .pair = pair };
	struct np_addr nobody = np_address(&pair->owner);
	pthread_t thread;

	nobody.lid = 0x77;
	ASSERT_EQ(0, np_qp_reset(pair->peer.qp));
	ASSERT_EQ(0, np_qp_connect(pair->peer.qp, nobody));
	ASSERT_EQ(0, pthread_create(&thread, NULL, ask_nobody, &asking));
	ASSERT_TRUE(np_wait_until(atomic_load(&asking.tid) && asleep(atomic_load(&asking.tid))));
	ASSERT_EQ(0, np_device_remove(NP_PEER_DEV, variant->how, self->function));
	ASSERT_EQ(0, pthread_join(thread, NULL));
	/* Not -EHOSTUNREACH: it was the removal that ended it, before it gave up. */
	EXPECT_EQ(-ENOTCONN, atomic_load(&asking.ret));
	ASSERT_EQ(0, np_device_return(NP_PEER_DEV, variant->how, self->function));
}

/* Of the device that goes, on memory that comes when the parent says so. Never returns. */
static void stuck_owner(int sock)
{
	static struct np_stuck_file file;
	static struct np_pair pair;
	struct rdma_np_range range = { .length = PAGE };
	struct rdma_np_event event;
	char c = 0;

	pair.data = np_stuck_map(&file);
	if (!pair.data || np_open(&pair.owner, NP_OWNER_DEV, PAGE) ||
	    np_open(&pair.peer, NP_PEER_DEV, PAGE) || np_connect(&pair.owner, &pair.peer))
		_exit(1);
	pair.mr = ibv_reg_mr(pair.owner.pd, pair.data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
	if (!pair.mr || np_resolve(&pair.peer, pair.mr->rkey, &pair.info))
		_exit(2);
	range.addr = pair.info.base;
	if (np_fault_start(&pair.peer, pair.info.region_id, 0, 1, &range, 1) ||
	    !np_wait_until(atomic_load(&file.waiting) == 1))
		_exit(3);
	if (write(sock, &c, 1) != 1 || read(sock, &c, 1) != 1)
		_exit(4);
	/* The owner's kernel is waiting still, for a device that is long gone. */
	if (np_wait_event(&pair.peer, RDMA_NP_EVENT_FAULT, &event, NP_WAIT_MS) != 1 ||
	    event.status == RDMA_NP_OK || atomic_load(&file.waiting) != 1)
		_exit(5);
	np_stuck_bring(&file, 0);
	/* What has waited is over: memory of the process can be changed again. */
	if (munmap(pair.data, NP_DATA_LEN))
		_exit(6);
	_exit(0);
}

/*
 * Neither a peer nor a process that does not answer keeps the driver: here it is who
 * serves the file of which a page is wanted.
 */
TEST_F(remove, device_does_not_wait_for_memory_that_never_comes)
{
	struct np_pair again = {};
	int sock[2], status;
	pid_t child;
	char c = 0;

	ASSERT_EQ(0, access("/dev/fuse", R_OK | W_OK)) TH_LOG("CONFIG_FUSE_FS is needed");
	ASSERT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sock));
	child = np_fork();
	ASSERT_LE(0, child);
	if (!child)
		stuck_owner(sock[1]);
	close(sock[1]);
	ASSERT_EQ(1, read(sock[0], &c, 1));
	ASSERT_EQ(0, np_device_remove(NP_OWNER_DEV, variant->how, self->function));
	ASSERT_EQ(0, np_device_return(NP_OWNER_DEV, variant->how, self->function));
	ASSERT_EQ(0, open_pair(&again));
	ASSERT_EQ(0, np_read_proven(&again.peer, &again.info, 0, 0, HUGE_PAGE));

	ASSERT_EQ(1, write(sock[0], &c, 1));
	ASSERT_EQ(child, waitpid(child, &status, 0));
	EXPECT_EQ(0, status);
}

TEST_F(remove, device_can_come_and_go)
{
	for (int i = 0; i < 3; i++) {
		const char *dev = i % 2 ? NP_PEER_DEV : NP_OWNER_DEV;
		struct np_pair again = {};

		ASSERT_EQ(0, np_device_remove(dev, variant->how, self->function));
		ASSERT_EQ(0, np_device_return(dev, variant->how, self->function));
		ASSERT_EQ(0, open_pair(&again));
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(&again, 0, PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD,
					       NULL));
	}
}

#define TIMES	10

/* Doorbells without end: the mapping stays, whether there is an HCA behind it or not. */
static void ring_doorbells(const char *function, atomic_int *ringing)
{
	volatile uint64_t *uar = np_device_registers(function, PAGE * 256);

	if (!uar)
		_exit(1);
	for (unsigned long n = 0;; n++) {
		uar[0x800 / 8] = 0;
		if (n == 1000)
			atomic_fetch_add(ringing, 1);
	}
}

/*
 * For the HCA only. The driver of 6.12 does not survive this: it waits forever for the
 * last work requests of its own, those that end memory keys, pinned or not.
 */
TEST(slot_can_lose_a_device_whose_registers_are_written)
{
	atomic_int *ringing = mmap(NULL, PAGE, PROT_READ | PROT_WRITE,
				   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	char function[NP_FUNCTION_LEN];

	ASSERT_NE(MAP_FAILED, ringing);
	for (int i = 0; i < TIMES; i++) {
		pid_t children[2];

		atomic_store(ringing, 0);
		ASSERT_EQ(0, np_device_remove(NP_PEER_DEV, NP_UNBIND, function));
		ASSERT_EQ(0, np_device_enable(function));
		for (int c = 0; c < 2; c++) {
			children[c] = np_fork();
			if (!children[c])
				ring_doorbells(function, ringing);
		}
		ASSERT_TRUE(np_wait_until(atomic_load(ringing) == 2));
		ASSERT_EQ(0, np_slot_tear_out(function));
		for (int c = 0; c < 2; c++) {
			/* They still were at it. */
			EXPECT_EQ(0, waitpid(children[c], NULL, WNOHANG));
			kill(children[c], SIGKILL);
			ASSERT_EQ(children[c], waitpid(children[c], NULL, 0));
		}
		ASSERT_EQ(0, np_device_return(NP_PEER_DEV, NP_UNPLUG, function));
	}
}

TEST_HARNESS_MAIN
