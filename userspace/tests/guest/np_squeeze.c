// SPDX-License-Identifier: GPL-2.0
/*
 * An owner whose memory gets scarce, or who ends, while his peer has leases of it. The peer is
 * a process of its own with libnprdma, which runs, is stopped, or dies.
 *
 * The peer READs and WRITEs whole pages of the region's first part again and again, so that it
 * has leases of it. It knows which version of each page was reported written, so whoever looks
 * knows what has to be in the owner's memory.
 */
#include <nprdma/nprdma.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "np_harness.h"

#define LEASE_MS	"/sys/module/ib_nprdma/parameters/lease_ms"
#define RECALL_MS	"/sys/module/ib_core/parameters/nprdma_recall_ms"
#define MIB		(1UL << 20)
#define MOST_PAGES	(16 * MIB / PAGE)	/* that the peer uses */

enum command {
	REST,		/* nothing is under way */
	RUN,
	QUIT,
};

/* What the two processes share. */
struct shared {
	atomic_int command;
	atomic_int state;		/* the command that is obeyed */
	atomic_int error;		/* ibv_wc_status or -errno that ended the traffic */
	atomic_int qp_state;		/* when it rests */
	atomic_ulong ops;
	atomic_ulong leases, recalls;
	atomic_uint writing;		/* page that is written just now, plus 1 */
	atomic_uint version[MOST_PAGES];	/* reported written */
};

struct hello {
	struct np_addr addr;
	uint32_t rkey;
	uint64_t base;
	uint64_t pages;		/* to use */
};

FIXTURE(squeeze) {
	struct np_usage before;
	struct np_end owner;
	struct ibv_mr *mr;
	uint8_t *data;
	size_t pages;		/* that the peer uses */
	struct shared *shared;
	pid_t pid;
	int sock;
};

static bool say(int sock, const struct hello *h)
{
	return send(sock, h, sizeof(*h), MSG_NOSIGNAL) == sizeof(*h);
}

static bool hear(int sock, struct hello *h)
{
	return recv(sock, h, sizeof(*h), MSG_WAITALL) == sizeof(*h);
}

/* --- the peer ------------------------------------------------------------------------ */

struct peer {
	struct np_end end;
	struct npr_context *ctx;
	struct npr_cq *cq;
	struct npr_qp *qp;
	struct hello region;
	struct shared *shared;
};

static uint64_t seed_of(size_t page, unsigned int version)
{
	return (uint64_t)version << 32 | page;
}

static int run_one(struct peer *peer, enum ibv_wr_opcode op, size_t page)
{
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	struct ibv_sge sge = {
		.addr = (uintptr_t)peer->end.buf,
		.length = PAGE,
		.lkey = peer->end.mr->lkey,
	};
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = op,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = {
			.remote_addr = peer->region.base + page * PAGE,
			.rkey = peer->region.rkey,
		},
	}, *bad;
	unsigned int n = 0;
	struct ibv_wc wc;
	int ret = npr_post_send(peer->qp, &wr, &bad);

	if (ret)
		return ret > 0 ? -ret : ret;
	while (!(ret = npr_poll_cq(peer->cq, 1, &wc)))
		if (++n % 1024 == 0 && np_now_ms() > deadline)
			return -ETIMEDOUT;
	return ret < 0 ? ret : (int)wc.status;
}

/* A page, and then one of the next MiB: what is not used for 100 ms is given back */
#define STRIDE		(MIB / PAGE + 1)

/* All pages in turn, each WRITTEN and READ; 0, ibv_wc_status or -errno. */
static int use_page(struct peer *peer, unsigned long n)
{
	struct shared *shared = peer->shared;
	size_t page = n / 2 * STRIDE % peer->region.pages;
	unsigned int version = atomic_load(&shared->version[page]);
	int ret;

	if (n % 2) {
		ret = run_one(peer, IBV_WR_RDMA_READ, page);
		if (!ret && np_differs(peer->end.buf, PAGE, seed_of(page, version)) != -1)
			ret = -EBADMSG;
		return ret;
	}
	np_fill(peer->end.buf, PAGE, seed_of(page, version + 1));
	atomic_store(&shared->writing, page + 1);
	ret = run_one(peer, IBV_WR_RDMA_WRITE, page);
	if (ret)
		return ret;
	atomic_store(&shared->version[page], version + 1);
	atomic_store(&shared->writing, 0);
	return 0;
}

static void tell(struct peer *peer, enum command state)
{
	struct npr_stats stats = {};

	if (!npr_get_stats(peer->qp, &stats, sizeof(stats))) {
		atomic_store(&peer->shared->leases, stats.leases);
		atomic_store(&peer->shared->recalls, stats.recalls);
	}
	atomic_store(&peer->shared->qp_state, np_qp_state(peer->end.qp));
	atomic_store(&peer->shared->state, state);
}

static void peer_process(int sock, struct shared *shared)
{
	struct peer peer = { .shared = shared };
	struct hello mine = {};
	unsigned long n = 0;

	if (!hear(sock, &peer.region) || np_open(&peer.end, NP_PEER_DEV, PAGE))
		_exit(1);
	mine.addr = np_address(&peer.end);
	peer.ctx = npr_open(peer.end.ctx, 0);
	peer.cq = peer.ctx ? npr_attach_cq(peer.ctx, peer.end.cq) : NULL;
	peer.qp = peer.cq ? npr_attach_qp(peer.cq, peer.end.qp, NULL) : NULL;
	if (!peer.qp || np_qp_connect(peer.end.qp, peer.region.addr) || !say(sock, &mine))
		_exit(2);
	for (;;) {
		int command = atomic_load(&shared->command), ret;

		if (command != atomic_load(&shared->state))
			tell(&peer, command);
		if (command == QUIT)
			_exit(0);
		if (command == REST || atomic_load(&shared->error)) {
			np_pause();
			continue;
		}
		ret = use_page(&peer, n++);
		if (ret) {
			tell(&peer, command);
			atomic_store(&shared->error, ret);
		} else {
			atomic_fetch_add(&shared->ops, 1);
		}
	}
}

/* --- the owner ------------------------------------------------------------------------ */

static bool fixture_begin(FIXTURE_DATA(squeeze) *self)
{
	int sock[2];
	pid_t pid;

	if (np_usage_start(&self->before))
		return false;
	/* As it is outside of tests. */
	if (np_set_fault_around(NP_FAULT_AROUND))
		return false;
	self->shared = mmap(NULL, sizeof(*self->shared), PROT_READ | PROT_WRITE,
			    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (self->shared == MAP_FAILED || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sock))
		return false;
	/* Before there is memory that it would share, and outside of any group. */
	pid = np_fork();
	if (!pid) {
		close(sock[0]);
		peer_process(sock[1], self->shared);
	}
	close(sock[1]);
	self->pid = pid;
	self->sock = sock[0];
	return pid > 0;
}

FIXTURE_SETUP(squeeze)
{
	ASSERT_TRUE(fixture_begin(self));
}

static void fixture_end(struct __test_metadata *_metadata, FIXTURE_DATA(squeeze) *self)
{
	/* Stopped processes die as well. */
	EXPECT_TRUE(np_group_remove());
	EXPECT_EQ(0, np_set_hold_ms(NP_HOLD_MS));
	EXPECT_EQ(0, np_write_text(LEASE_MS, "30000"));
	EXPECT_EQ(0, np_write_text(RECALL_MS, "1000"));
	NP_CHECK_USAGE(&self->before);
}

FIXTURE_TEARDOWN_PARENT(squeeze)
{
	fixture_end(_metadata, self);
}

/* A region of so many MiB, of which the peer uses so many; it has not begun. Of @self->data. */
static int begin(FIXTURE_DATA(squeeze) *self, size_t mib, size_t used)
{
	struct hello mine = {}, theirs;
	int ret = np_open(&self->owner, NP_OWNER_DEV, PAGE);

	if (ret)
		return ret;
	if (!self->data)
		self->data = np_map(mib * MIB);
	if (!self->data)
		return -ENOMEM;
	self->pages = used * MIB / PAGE;
	/* What the peer uses is the first and so the oldest: reclaim begins there. */
	for (size_t i = 0; i < mib * MIB / PAGE; i++)
		np_fill(self->data + i * PAGE, PAGE, seed_of(i, 0));
	self->mr = ibv_reg_mr(self->owner.pd, self->data, mib * MIB, NP_RIGHTS | NP_UNPINNED);
	if (!self->mr)
		return -errno;
	mine = (struct hello){
		.addr = np_address(&self->owner), .rkey = self->mr->rkey,
		.base = (uintptr_t)self->data, .pages = self->pages,
	};
	if (!say(self->sock, &mine) || !hear(self->sock, &theirs))
		return -EPIPE;
	return np_qp_connect(self->owner.qp, theirs.addr);
}

static long held(FIXTURE_DATA(squeeze) *self)
{
	struct rdma_np_mr_info info;

	return np_query_mr(self->mr, &info) ? -1 : (long)info.held_pages;
}

static bool ended(FIXTURE_DATA(squeeze) *self)
{
	return atomic_load(&self->shared->error);
}

/* Runs until at least @pages are leased, and @ops more are done. */
static bool run_leased(FIXTURE_DATA(squeeze) *self, long pages, unsigned long ops)
{
	unsigned long until = atomic_load(&self->shared->ops) + ops;

	atomic_store(&self->shared->command, RUN);
	return np_wait_until(ended(self) || (atomic_load(&self->shared->ops) >= until &&
					     held(self) >= pages)) && !ended(self);
}

static bool rest(FIXTURE_DATA(squeeze) *self)
{
	atomic_store(&self->shared->command, REST);
	return np_wait_until(atomic_load(&self->shared->state) == REST);
}

static bool stop(FIXTURE_DATA(squeeze) *self)
{
	int status;

	return !kill(self->pid, SIGSTOP) &&
	       waitpid(self->pid, &status, WUNTRACED) == self->pid && WIFSTOPPED(status);
}

/* The first page that is not what was reported; one that was being written may be either. */
static long wrong_page(FIXTURE_DATA(squeeze) *self)
{
	unsigned int writing = atomic_load(&self->shared->writing);

	for (size_t i = 0; i < self->pages; i++) {
		unsigned int version = atomic_load(&self->shared->version[i]);
		const uint8_t *page = self->data + i * PAGE;

		if (np_differs(page, PAGE, seed_of(i, version)) == -1)
			continue;
		/* Some of it may have arrived. */
		if (i + 1 == writing)
			continue;
		return i;
	}
	return -1;
}

/* One number of a file of the group that has many, each in a line with its name. */
static long group_field(const char *file, const char *name)
{
	char path[100], text[8000], want[40], *at;

	snprintf(path, sizeof(path), NP_GROUP "/%s", file);
	text[0] = '\n';
	if (np_read_text(path, text + 1, sizeof(text) - 1) < 0)
		return -1;
	snprintf(want, sizeof(want), "\n%s ", name);
	at = strstr(text, want);
	return at ? atol(at + strlen(want)) : -1;
}

/* --- peers that do not answer ---------------------------------------------------------- */

FIXTURE(stopped) {
	FIXTURE_DATA(squeeze) s;
	uint8_t *heap;
};

/*
 * With the time-outs made short two seconds are some times each: a lease is asked back after
 * half a second, has to be back 0.2 s later, and there is none for 0.2 s after that. Those of
 * the messages between kernels are shorter than that.
 */
FIXTURE_VARIANT(stopped) {
	const char *lease_ms;
	unsigned int hold_ms;
	unsigned int ms;	/* for which it is stopped */
	unsigned int rounds;	/* with requests under way */
};

FIXTURE_VARIANT_ADD(stopped, for_seconds) {
	.lease_ms = "500", .hold_ms = 200, .ms = 2000, .rounds = 4
};

/* The time-outs are those that hold outside of tests. */
FIXTURE_VARIANT_ADD(stopped, for_a_minute) {
	.lease_ms = "30000", .hold_ms = 5000, .ms = 60000, .rounds = 2
};

#define HEAP	(24 * MIB)

FIXTURE_SETUP(stopped)
{
	ASSERT_TRUE(fixture_begin(&self->s));
	self->heap = np_map(HEAP);
	ASSERT_NE(NULL, self->heap);
	/*
	 * A soft limit, because 6.12 kills for such a hard one now and then, although all can go to
	 * swap, and without any region.
	 */
	ASSERT_EQ(0, np_group_enter("max", "max"));
	ASSERT_EQ(0, np_write_text(NP_GROUP "/memory.high", "24M"));
	ASSERT_EQ(0, begin(&self->s, 16, 4));
}

FIXTURE_TEARDOWN_PARENT(stopped)
{
	fixture_end(_metadata, &self->s);
}

/* Its group is too small for this and the region: for so long, and once at least. */
static void press(uint8_t *heap, unsigned int ms)
{
	uint64_t end = np_now_ms() + ms;
	unsigned int value = 0;

	do {
		for (size_t off = 0; off < HEAP; off += PAGE)
			heap[off] = value;
		value++;
	} while (np_now_ms() < end);
}

/* It gives back what it does not use, so it has to be stopped just then. */
static long stop_with_leases(FIXTURE_DATA(squeeze) *self)
{
	long kept = 0;

	for (unsigned int tries = 0; !kept && tries < 50; tries++) {
		if (tries && kill(self->pid, SIGCONT))
			return -1;
		if (!run_leased(self, 1, 100) || !rest(self) || !stop(self))
			return -1;
		kept = held(self);
	}
	return kept;
}

TEST_F(stopped, peer_keeps_its_idle_connection_under_memory_pressure)
{
	struct shared *shared = self->s.shared;
	long kept = stop_with_leases(&self->s);

	TH_LOG("%ld pages leased when it was stopped", kept);
	ASSERT_LT(0, kept) TH_LOG("error %d", shared->error);
	/* Before that it might have been asked too often for what it gives back in time. */
	ASSERT_EQ(0, np_set_hold_ms(variant->hold_ms));
	ASSERT_EQ(0, np_write_text(LEASE_MS, variant->lease_ms));
	press(self->heap, variant->ms);
	ASSERT_TRUE(np_wait_until(!held(&self->s)));
	EXPECT_EQ(-1, wrong_page(&self->s));
	ASSERT_EQ(0, kill(self->s.pid, SIGCONT));
	ASSERT_TRUE(run_leased(&self->s, 0, 500)) TH_LOG("error %d", shared->error);
	ASSERT_TRUE(rest(&self->s));
	EXPECT_EQ(IBV_QPS_RTS, shared->qp_state);
	EXPECT_EQ(IBV_QPS_RTS, np_qp_state(self->s.owner.qp));
	EXPECT_EQ(-1, wrong_page(&self->s));
}

/* Its requests are executed while it is stopped; later ones may find their lease gone. */
TEST_F(stopped, peer_with_requests_under_way_loses_its_connection_at_most)
{
	struct shared *shared = self->s.shared;
	unsigned int i, lost, kept = 0;

	ASSERT_EQ(0, np_set_hold_ms(variant->hold_ms));
	ASSERT_EQ(0, np_write_text(LEASE_MS, variant->lease_ms));
	for (i = 0; i < variant->rounds && !ended(&self->s); i++) {
		ASSERT_TRUE(run_leased(&self->s, 1, 200) || ended(&self->s));
		ASSERT_TRUE(stop(&self->s));
		kept += held(&self->s) > 0;
		press(self->heap, variant->ms / variant->rounds);
		/* Memory that changes is asked for in any case, and it does not change here. */
		ASSERT_EQ(0, mprotect(self->s.data, 16 * MIB, PROT_READ));
		ASSERT_TRUE(np_wait_until(!held(&self->s)));
		ASSERT_EQ(0, mprotect(self->s.data, 16 * MIB, PROT_READ | PROT_WRITE));
		EXPECT_EQ(-1, wrong_page(&self->s));
		ASSERT_EQ(0, kill(self->s.pid, SIGCONT));
	}
	lost = ended(&self->s);
	TH_LOG("stopped %u times, %u times with leases; %s", i, kept,
	       lost ? ibv_wc_status_str(shared->error) : "its connection is alive");
	EXPECT_LT(0, kept);
	EXPECT_TRUE(!lost || shared->error == IBV_WC_REM_ACCESS_ERR);
	ASSERT_TRUE(rest(&self->s));
	EXPECT_EQ(-1, wrong_page(&self->s));
}

TEST_F(squeeze, killed_peer_leaves_no_lease_behind)
{
	struct shared *shared = self->shared;
	long before = np_pinned();

	/* No time-out of the mechanism is shorter than the test. */
	ASSERT_EQ(0, begin(self, 16, 4));
	ASSERT_TRUE(run_leased(self, 64, 200)) TH_LOG("error %d", shared->error);
	ASSERT_EQ(0, kill(self->pid, SIGKILL));
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
	EXPECT_TRUE(np_wait_until(!held(self)));
	EXPECT_EQ(-1, wrong_page(self));
	/* Queues of the owner's are pinned, too. */
	EXPECT_TRUE(np_wait_until(np_pinned() <= before + 64));
}

/*
 * I11: the peer posts under leases all the while, and what was reported to it is in the owner's
 * memory when the region is gone. Deregistration does not take as long as it may.
 */
TEST_F(squeeze, write_that_was_reported_is_there_when_its_region_is_gone)
{
	struct shared *shared = self->shared;
	uint64_t start;

	ASSERT_EQ(0, begin(self, 16, 4));
	ASSERT_TRUE(run_leased(self, 64, 300)) TH_LOG("error %d", shared->error);
	start = np_now_ms();
	ASSERT_EQ(0, ibv_dereg_mr(self->mr));
	TH_LOG("deregistered within %lu ms", (unsigned long)(np_now_ms() - start));
	EXPECT_GT(1000, np_now_ms() - start);
	ASSERT_TRUE(np_wait_until(ended(self)));
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, shared->error);
	EXPECT_EQ(-1, wrong_page(self));
}

/* --- owners that end ------------------------------------------------------------------- */

FIXTURE(owner) {
	FIXTURE_DATA(squeeze) s;
};

FIXTURE_VARIANT(owner) {
	int signal;		/* 0: it is told to go */
};

FIXTURE_VARIANT_ADD(owner, killed) { .signal = SIGKILL };
FIXTURE_VARIANT_ADD(owner, exits) {};

FIXTURE_SETUP(owner)
{
	ASSERT_TRUE(fixture_begin(&self->s));
}

FIXTURE_TEARDOWN_PARENT(owner)
{
	fixture_end(_metadata, &self->s);
}

/* Never returns. */
static void owner_process(FIXTURE_DATA(squeeze) *self, int end)
{
	char c;

	if (begin(self, 4, 4))
		_exit(1);
	_exit(read(end, &c, 1) ? 2 : 0);
}

/*
 * I11, of a process that ends: it waits for none of its leases, here for longer than the test,
 * but ends them. Its memory is shared with the test, so that what the peer was told can be seen.
 */
TEST_F(owner, ends_its_leases_and_what_was_reported_is_there)
{
	struct shared *shared = self->s.shared;
	long before = np_pinned();
	int end[2], status;
	uint64_t start;
	pid_t pid;

	ASSERT_EQ(0, np_write_text(RECALL_MS, "60000"));
	self->s.data = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
			    0);
	ASSERT_NE(MAP_FAILED, self->s.data);
	ASSERT_EQ(0, pipe(end));
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid) {
		close(end[1]);
		owner_process(&self->s, end[0]);
	}
	atomic_store(&shared->command, RUN);
	ASSERT_TRUE(np_wait_until(ended(&self->s) || (atomic_load(&shared->ops) >= 300 &&
						      np_pinned() >= before + 128)));
	ASSERT_FALSE(ended(&self->s)) TH_LOG("error %d", shared->error);
	start = np_now_ms();
	ASSERT_EQ(0, variant->signal ? kill(pid, variant->signal) : close(end[1]));
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	TH_LOG("it has ended within %lu ms", (unsigned long)(np_now_ms() - start));
	EXPECT_GT(30000, np_now_ms() - start);
	EXPECT_EQ(variant->signal, status);
	ASSERT_TRUE(np_wait_until(ended(&self->s)));
	EXPECT_TRUE(shared->error == IBV_WC_REM_ACCESS_ERR ||
		    shared->error == IBV_WC_RETRY_EXC_ERR) TH_LOG("error %d", shared->error);
	/* Queues of the peer's are pinned, too. */
	EXPECT_TRUE(np_wait_until(np_pinned() <= before + 64));
	EXPECT_EQ(-1, wrong_page(&self->s));
}

/* --- groups that get too small ---------------------------------------------------------- */

FIXTURE(halved) {
	FIXTURE_DATA(squeeze) s;
};

FIXTURE_VARIANT(halved) {
	const char *file;
};

FIXTURE_VARIANT_ADD(halved, max) { .file = NP_GROUP "/memory.max" };
FIXTURE_VARIANT_ADD(halved, high) { .file = NP_GROUP "/memory.high" };

FIXTURE_SETUP(halved)
{
	ASSERT_TRUE(fixture_begin(&self->s));
}

FIXTURE_TEARDOWN_PARENT(halved)
{
	fixture_end(_metadata, &self->s);
}

#define WHOLE	32UL	/* MiB */

/*
 * Of what is leased no more than its share of the new limit may stay. The peer goes on to READ and
 * WRITE, and gives back what is recalled. The goal is 50 ms.
 */
TEST_F(halved, memory_that_is_leased_comes_back)
{
	const long share = WHOLE / 2 * MIB / PAGE / 100 * 25;
	struct shared *shared = self->s.shared;
	uint64_t start, written, back;
	long leased;

	ASSERT_EQ(0, np_group_enter("32M", "max"));
	ASSERT_EQ(0, begin(&self->s, WHOLE - 8, 7));
	ASSERT_TRUE(run_leased(&self->s, share * 3 / 2, 100))
		TH_LOG("error %d, %ld pages", shared->error, held(&self->s));
	leased = held(&self->s);
	start = np_now_ms();
	ASSERT_EQ(0, np_write_text(variant->file, "16M"));
	written = np_now_ms();
	EXPECT_TRUE(np_wait_until(held(&self->s) <= share));
	back = np_now_ms();
	TH_LOG("%ld pages leased, %ld may stay: limit written in %lu ms, back %lu ms later", leased,
	       share, (unsigned long)(written - start), (unsigned long)(back - written));
	EXPECT_GT(1000, back - written);
	EXPECT_EQ(0, group_field("memory.events", "oom_kill"));
	ASSERT_TRUE(run_leased(&self->s, 0, 500)) TH_LOG("error %d", shared->error);
	EXPECT_GE(share, held(&self->s));
	ASSERT_TRUE(rest(&self->s));
	TH_LOG("%lu leases, %lu recalls", shared->leases, shared->recalls);
	EXPECT_LT(0, shared->recalls);
	/* Who looks at all of it would have to wait. */
	ASSERT_EQ(0, np_write_text(variant->file, "max"));
	EXPECT_EQ(-1, wrong_page(&self->s));
}

TEST_HARNESS_MAIN
