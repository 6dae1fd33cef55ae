// SPDX-License-Identifier: GPL-2.0
/*
 * Owners that become other programs, that pay for what their peers do, or that run out of
 * memory. The owner is a process of its own.
 */
#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>

#include "np_change.h"

/* The owner is a process of its own, and the peer is this one. */
struct hello {
	struct np_addr addr;
	uint32_t rkey;
};

FIXTURE(owner) {
	struct np_usage before;
	struct np_end peer;
	struct rdma_np_region_info info;
	struct np_load load;
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

#define DISK "/tmp/np_disk"

/* A file system that nobody else uses, in memory. */
static int make_disk(void)
{
	return system("mkdir -p " DISK " && rm -f " DISK ".image && truncate -s 64M " DISK ".image && "
		      "mkfs.ext4 -q -F " DISK ".image && "
		      "dev=$(losetup -f --show " DISK ".image) && mount $dev " DISK " && "
		      "losetup -d $dev") ? -EIO : 0;
}

/* What the owner maps, if not anonymous memory. */
static int owner_file = -1;

/* What owner_process() has made, for what it lives as. */
static struct np_pair *living;

/* Never returns. Registers, connects, tells, and lives as @live says. */
static void owner_process(int sock, size_t len, int (*live)(int sock))
{
	struct hello mine = {}, theirs;
	struct np_pair pair = {};

	living = &pair;
	if (np_open(&pair.owner, NP_OWNER_DEV, 0))
		_exit(101);
	pair.data = np_map(len);
	if (!pair.data)
		_exit(102);
	if (owner_file >= 0 && mmap(pair.data, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
				    owner_file, 0) != pair.data)
		_exit(105);
	pair.mr = ibv_reg_mr(pair.owner.pd, pair.data, len, NP_RIGHTS | NP_UNPINNED);
	if (!pair.mr)
		_exit(103);
	mine.addr = np_address(&pair.owner);
	mine.rkey = pair.mr->rkey;
	if (!say(sock, &mine) || !hear(sock, &theirs) ||
	    np_qp_connect(pair.owner.qp, theirs.addr) || !say(sock, &mine))
		_exit(104);
	_exit(live(sock));
}

static int meet_owner(FIXTURE_DATA(owner) *self, size_t len, int (*before)(void),
		      int (*live)(int sock))
{
	struct hello mine = {}, theirs;
	int pair[2], ret;
	pid_t child;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
		return -errno;
	child = np_fork();
	if (child < 0)
		return -errno;
	if (!child) {
		close(pair[0]);
		if (before && before())
			_exit(100);
		owner_process(pair[1], len, live);
	}
	/* Fixtures are shared between processes: the child would write its 0. */
	self->pid = child;
	close(pair[1]);
	self->sock = pair[0];
	ret = np_open(&self->peer, NP_PEER_DEV, NP_BUF_LEN);
	if (ret)
		return ret;
	mine.addr = np_address(&self->peer);
	if (!hear(self->sock, &theirs))
		return -EPIPE;
	ret = np_qp_connect(self->peer.qp, theirs.addr);
	if (ret)
		return ret;
	if (!say(self->sock, &mine) || !hear(self->sock, &theirs))
		return -EPIPE;
	return np_resolve(&self->peer, theirs.rkey, &self->info);
}

static int freeze(bool yes);

FIXTURE_SETUP(owner)
{
	ASSERT_EQ(0, np_usage_start(&self->before));
}

FIXTURE_TEARDOWN_PARENT(owner)
{
	/* Or its owner never ends; an error if it is not frozen, or not there */
	freeze(false);
	EXPECT_TRUE(np_wait_until(!umount(DISK) || errno != EBUSY));
	EXPECT_TRUE(np_group_remove());
	NP_CHECK_USAGE(&self->before);
}

/* When it is told, it becomes another program, which has its socket. */
static int exec_when_told(int sock, bool keep)
{
	char c;

	if (recv(sock, &c, 1, 0) != 1)
		return 1;
	for (int fd = 3; keep && fd < 256; fd++)
		fcntl(fd, F_SETFD, 0);
	if (dup2(sock, 0) || dup2(sock, 1) != 1)
		return 2;
	execlp("cat", "cat", NULL);
	return 3;
}

/* And all its other file descriptors, too. */
static int live_until_exec(int sock)
{
	return exec_when_told(sock, true);
}

/* Those of verbs are closed, as they are if nobody asks for something else. */
static int live_until_exec_closes(int sock)
{
	return exec_when_told(sock, false);
}

TEST_F(owner, region_of_a_process_that_execs_is_gone)
{
	struct np_load *load = &self->load;
	char c = 'x';

	ASSERT_EQ(0, meet_owner(self, NP_DATA_LEN, NULL, live_until_exec));
	np_load_init(load, &self->peer, &self->info, NULL, FIRST_PAGE * PAGE, PAGES);
	ASSERT_EQ(0, np_load_start(load));
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	np_load_step(load, 0, PAGES);
	ASSERT_EQ(1, send(self->sock, &c, 1, MSG_NOSIGNAL));
	/* It is the other program that answers. */
	ASSERT_EQ(1, send(self->sock, &c, 1, MSG_NOSIGNAL));
	ASSERT_EQ(1, recv(self->sock, &c, 1, 0));
	np_load_lose(load, 0, PAGES);
	np_load_gone(load, 0, PAGES, RDMA_NP_GONE, RDMA_NP_GONE);
	ASSERT_LOAD(np_load_is_refused(load, 20));
	EXPECT_TRUE(np_load_stop(load));
	ASSERT_EQ(0, np_read(&self->peer, 0, NP_DATA_LEN, np_read_addr(&self->info, 0),
			     self->info.read_key));
	EXPECT_TRUE(np_all(self->peer.buf, NP_DATA_LEN, self->info.signature));
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

/* READs and WRITEs until something fails: which page that was on. */
static size_t until_error(struct np_end *peer, const struct rdma_np_region_info *info, size_t pages)
{
	uint64_t end = np_now_ms() + 2 * NP_WAIT_MS;
	size_t done = 0;

	while (np_now_ms() < end) {
		size_t page = done % pages;

		*(uint64_t *)peer->buf = done;
		if (np_write_proven(peer, info, 0, page * PAGE, UNIT) ||
		    np_read_proven(peer, info, 0, page * PAGE, UNIT))
			break;
		done++;
	}
	return done;
}

TEST_F(owner, connections_of_a_process_that_execs_end)
{
	char c = 'x';

	ASSERT_EQ(0, meet_owner(self, NP_DATA_LEN, NULL, live_until_exec_closes));
	ASSERT_EQ(0, np_write_proven(&self->peer, &self->info, 0, 0, UNIT));
	ASSERT_EQ(1, send(self->sock, &c, 1, MSG_NOSIGNAL));
	until_error(&self->peer, &self->info, NP_DATA_PAGES);
	/* Pinned memory is not there, either: it is the connection that has ended. */
	EXPECT_TRUE(np_wait_until(np_qp_state(self->peer.qp) == IBV_QPS_ERR ||
				  np_read(&self->peer, 0, UNIT, np_read_addr(&self->info, 0),
					  self->info.read_key)));
	EXPECT_EQ(IBV_QPS_ERR, np_qp_state(self->peer.qp));
	/* And the process goes on. */
	ASSERT_EQ(1, send(self->sock, &c, 1, MSG_NOSIGNAL));
	ASSERT_EQ(1, recv(self->sock, &c, 1, 0));
	EXPECT_EQ(0, waitpid(self->pid, NULL, WNOHANG));
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

static int live_until_told(int sock)
{
	char c;

	return recv(sock, &c, 1, 0) != 1;
}

static int enter_small_group(void)
{
	return np_group_enter("16M", "0");
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

/* What peers have made present is charged to the owner; when it has too much, it dies. */
TEST_F(owner, pays_for_what_its_peers_touch)
{
	const size_t len = 64UL << 20, some = 4UL << 20;
	struct np_end *peer = &self->peer;
	char text[32];
	long before;
	int status;
	size_t done;

	ASSERT_EQ(0, meet_owner(self, len, enter_small_group, live_until_told));
	ASSERT_LT(0, np_read_text(NP_GROUP "/memory.current", text, sizeof(text)));
	before = atol(text);
	for (size_t off = 0; off < some; off += PAGE) {
		ASSERT_EQ(0, np_write_proven(peer, &self->info, 0, off, 8));
	}
	ASSERT_LT(0, np_read_text(NP_GROUP "/memory.current", text, sizeof(text)));
	/* But for what it paid for in advance. */
	EXPECT_LE(before + (long)some * 3 / 4, atol(text));
	done = until_error(peer, &self->info, len / PAGE);
	EXPECT_LE(some / PAGE, done);
	EXPECT_GE((16UL << 20) / PAGE, done);
	ASSERT_EQ(self->pid, waitpid(self->pid, &status, 0));
	EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) TH_LOG("%x", status);
	EXPECT_EQ(1, group_field("memory.events", "oom_kill"));
}

static int enter_large_group(void)
{
	return np_group_enter("max", "max");
}

/* So is what they make the kernel read from a disk. Its numbers are up to 2 s old. */
TEST_F(owner, pays_for_file_pages_that_its_peers_touch)
{
	const size_t len = 16UL << 20;
	struct rdma_np_event event;
	long before, now;

	ASSERT_EQ(0, make_disk());
	owner_file = open(DISK "/file", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	ASSERT_LE(0, owner_file);
	ASSERT_EQ(0, ftruncate(owner_file, len));
	ASSERT_EQ(0, meet_owner(self, len, enter_large_group, live_until_told));
	before = group_field("memory.stat", "file");
	ASSERT_LE(0, before);
	for (size_t off = 0; off < len; off += HUGE_PAGE) {
		ASSERT_EQ(RDMA_NP_OK, np_fault(&self->peer, self->info.region_id, self->info.base + off,
					  HUGE_PAGE, 0, &event));
	}
	EXPECT_TRUE(np_wait_until((now = group_field("memory.stat", "file")) >= before + (long)len));
	TH_LOG("file: %ld, then %ld", before, now);
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

/*
 * And what the kernel needs for it: for each 2 MiB of which they touch a page a page
 * table of the owner's, one of each window, and a page of the residency table.
 */
TEST_F(owner, pays_for_tables_that_its_peers_need)
{
	const size_t slots = 128;
	struct rdma_np_event event;
	long before, now, want;

	ASSERT_EQ(0, meet_owner(self, slots * HUGE_PAGE, enter_large_group, live_until_told));
	/* The first numbers are up to 2 s old, too, but there is not much that they lack */
	before = group_field("memory.stat", "kernel");
	ASSERT_LE(0, before);
	for (size_t i = 0; i < slots; i++) {
		ASSERT_EQ(RDMA_NP_OK, np_fault(&self->peer, self->info.region_id,
					  self->info.base + i * HUGE_PAGE, PAGE, RDMA_NP_FAULT_WRITE,
					  &event));
	}
	want = before + (long)(4 * slots * PAGE);
	EXPECT_TRUE(np_wait_until((now = group_field("memory.stat", "kernel")) >= want));
	TH_LOG("kernel: %ld, then %ld", before, now);
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

#define MANY_QPS	128

/* Makes more queue pairs, each connected to one of the peer's that it is told. */
static int live_with_queue_pairs(int sock)
{
	struct hello mine = {}, theirs;

	for (int i = 0; i < MANY_QPS; i++) {
		struct ibv_qp *qp = np_make_qp(&living->owner, living->owner.pd);

		if (!qp || !hear(sock, &theirs) || np_qp_connect(qp, theirs.addr))
			return 1;
		mine.addr = (struct np_addr){ .qpn = qp->qp_num, .lid = living->owner.lid };
		mine.rkey = living->mr->rkey;
		if (!say(sock, &mine))
			return 2;
	}
	return live_until_told(sock);
}

/* And what the kernel remembers of who knows its regions, and of what they were answered. */
TEST_F(owner, pays_for_what_is_remembered_of_its_peers)
{
	struct np_end *peer = &self->peer;
	struct rdma_np_region_info info;
	struct ibv_qp *qps[MANY_QPS];
	struct hello h = {};
	char text[32];
	long before, now;

	ASSERT_EQ(0, meet_owner(self, NP_DATA_LEN, enter_large_group, live_with_queue_pairs));
	for (int i = 0; i < MANY_QPS; i++) {
		qps[i] = np_make_qp(peer, peer->pd);
		ASSERT_NE(NULL, qps[i]);
		h.addr = (struct np_addr){ .qpn = qps[i]->qp_num, .lid = peer->lid };
		ASSERT_TRUE(say(self->sock, &h));
		ASSERT_TRUE(hear(self->sock, &h));
		ASSERT_EQ(0, np_qp_connect(qps[i], h.addr));
	}
	ASSERT_LT(0, np_read_text(NP_GROUP "/memory.current", text, sizeof(text)));
	before = atol(text);
	for (int i = 0; i < MANY_QPS; i++) {
		ASSERT_EQ(0, np_resolve_on(peer, qps[i], h.rkey, &info));
	}
	ASSERT_LT(0, np_read_text(NP_GROUP "/memory.current", text, sizeof(text)));
	now = atol(text);
	TH_LOG("%ld KiB for %d queue pairs", (now - before) >> 10, MANY_QPS);
	/* 13 KiB each, but for what it paid for in advance: 256 KiB on each CPU. */
	EXPECT_LE(before + (1L << 20), now);
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

/*
 * A region of 1 GiB whose pages are all there: 2 MiB of a file, 512 times, so that the
 * data costs next to nothing.
 */
#define DEAD_REGIONS	100
#define DEAD_LEN	(1UL << 30)

static uint8_t *map_often(void)
{
	int fd = memfd_create("np", MFD_CLOEXEC);
	uint8_t *data = np_map_aligned(DEAD_LEN, HUGE_PAGE);

	if (fd < 0 || !data || ftruncate(fd, HUGE_PAGE))
		return NULL;
	for (size_t off = 0; off < DEAD_LEN; off += HUGE_PAGE) {
		if (mmap(data + off, HUGE_PAGE, PROT_READ | PROT_WRITE,
			 MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0) == MAP_FAILED)
			return NULL;
	}
	close(fd);
	return data;
}

/* Gives its group 64 MiB more than it has got. */
static int limit_group(void)
{
	char text[32];

	if (np_read_text(NP_GROUP "/memory.current", text, sizeof(text)) < 0)
		return -EIO;
	snprintf(text, sizeof(text), "%ld", atol(text) + (64L << 20));
	return np_write_text(NP_GROUP "/memory.max", text);
}

/* One region after the other: tells its name, has all of it faulted, and ends it when told. */
static int live_through_regions(int sock)
{
	uint8_t *data = map_often();
	struct hello mine = {}, theirs;

	if (!data || limit_group())
		return 1;
	for (int i = 0; i < DEAD_REGIONS; i++) {
		struct ibv_sge sge = { .addr = (uintptr_t)data, .length = DEAD_LEN };
		struct ibv_mr *mr = ibv_reg_mr(living->owner.pd, data, DEAD_LEN,
					       NP_RIGHTS | NP_UNPINNED);

		if (!mr)
			return 2;
		sge.lkey = mr->lkey;
		if (ibv_advise_mr(living->owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0, &sge, 1))
			return 3;
		mine.rkey = mr->rkey;
		if (!say(sock, &mine) || !hear(sock, &theirs))
			return 4;
		if (ibv_dereg_mr(mr))
			return 5;
	}
	return live_until_told(sock);
}

/*
 * A peer that keeps the keys of dead regions keeps nothing else of them: with their
 * residency tables, which are 2 MiB each, the owner would be killed.
 */
TEST_F(owner, does_not_pay_for_dead_regions_that_its_peer_keeps)
{
	struct np_end *peer = &self->peer;
	struct rdma_np_region_info info;
	struct hello h = {};
	uint64_t word;

	ASSERT_EQ(0, meet_owner(self, NP_DATA_LEN, enter_large_group, live_through_regions));
	for (int i = 0; i < DEAD_REGIONS; i++) {
		ASSERT_TRUE(hear(self->sock, &h)) TH_LOG("owner ended in round %d", i);
		ASSERT_EQ(0, np_resolve(peer, h.rkey, &info));
		for (size_t off = 0; off < DEAD_LEN; off += DEAD_LEN - PAGE) {
			ASSERT_EQ(0, np_word(peer, &info, off, &word));
			EXPECT_TRUE(np_writable(word));
		}
		ASSERT_TRUE(say(self->sock, &h));
	}
	/*
	 * The keys are there still, of the last one as of all, and prove nothing. Faults are
	 * answered before the pages become absent, which words tell before leaves change.
	 */
	EXPECT_TRUE(np_wait_until(np_fault_once(peer, peer->qp, info.region_id, info.base, PAGE, 0,
						NULL) == RDMA_NP_GONE));
	for (size_t off = 0; off < DEAD_LEN; off += DEAD_LEN - PAGE) {
		EXPECT_TRUE(np_wait_until(!np_word(peer, &info, off, &word) && !word));
		EXPECT_TRUE(np_wait_until(!np_read(peer, 0, PAGE, np_read_addr(&info, off),
						   info.read_key) &&
					  np_all(peer->buf, PAGE, info.signature)));
		/* And do not come back. */
		ASSERT_EQ(0, np_word(peer, &info, off, &word));
		EXPECT_EQ(0, word);
	}
	EXPECT_EQ(0, group_field("memory.events", "oom_kill"));
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

static int enter_small_group_for_good(void)
{
	int ret = np_write_text("/proc/self/oom_score_adj", "-1000");

	return ret ?: enter_small_group();
}

/*
 * Where nobody can be killed the owner's CPU tries again until there is memory. So do
 * its peers: the address is a good one. A pin, though, is refused, as registration
 * of a pinned region would be.
 *
 * A page that is refused may be there the next time: what another CPU has in stock for
 * the group (drain_all_stock()) comes back after the charge that asked for it has failed.
 */
TEST_F(owner, that_nobody_kills_lets_its_peers_wait_for_memory)
{
	const size_t len = 64UL << 20;
	struct np_end *peer = &self->peer;
	struct rdma_np_event event = {};
	size_t off = 0, late = 0;
	int ret;

	ASSERT_EQ(0, meet_owner(self, len, enter_small_group_for_good, live_until_told));
	for (int busy = 0; busy < ROUNDS && off < len;) {
		ret = np_fault_once(peer, peer->qp, self->info.region_id, self->info.base + off,
				    PAGE, RDMA_NP_FAULT_WRITE, &event);
		if (ret != RDMA_NP_OK) {
			ASSERT_EQ(RDMA_NP_BUSY, ret);
			busy++;
			continue;
		}
		off += PAGE;
		late += busy > 0;
	}
	EXPECT_LE((4UL << 20), off);
	while ((ret = np_fault_once(peer, peer->qp, self->info.region_id, self->info.base + off,
				    PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event)) == RDMA_NP_OK &&
	       off < len) {
		ASSERT_EQ(0, np_release(peer, event.hold_id));
		off += PAGE;
		late++;
	}
	EXPECT_EQ(RDMA_NP_NOMEM, ret);
	EXPECT_GE((16UL << 20), off);
	TH_LOG("%zu KiB, of which %zu pages after the first refusal", off >> 10, late);
	EXPECT_LT(0, group_field("memory.events", "oom"));
	EXPECT_EQ(0, group_field("memory.events", "oom_kill"));
	ASSERT_EQ(0, np_write_text(NP_GROUP "/memory.max", "max"));
	for (; off < len; off += HUGE_PAGE) {
		ASSERT_EQ(0, np_write_proven(peer, &self->info, 0, off, 8));
	}
	ASSERT_EQ(RDMA_NP_OK, np_fault(peer, self->info.region_id, self->info.base, PAGE,
				  RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(0, np_release(peer, event.hold_id));
	shutdown(self->sock, SHUT_RDWR);
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
}

TEST_F(owner, killed_for_want_of_memory_is_gone)
{
	long kills = np_vmstat("oom_kill");
	char path[64];
	int status;
	size_t before, after;

	ASSERT_EQ(0, meet_owner(self, NP_DATA_LEN, NULL, live_until_told));
	snprintf(path, sizeof(path), "/proc/%d/oom_score_adj", self->pid);
	ASSERT_EQ(0, np_write_text(path, "1000"));
	for (size_t off = 0; off < NP_DATA_LEN; off += PAGE) {
		ASSERT_EQ(0, np_write_proven(&self->peer, &self->info, 0, off, 8));
	}
	before = np_now_ms();
	ASSERT_EQ(0, np_write_text("/proc/sysrq-trigger", "f"));
	until_error(&self->peer, &self->info, NP_DATA_PAGES);
	after = np_now_ms();
	EXPECT_GT(before + 2 * NP_WAIT_MS, after);
	ASSERT_EQ(self->pid, waitpid(self->pid, &status, 0));
	EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) TH_LOG("%x", status);
	EXPECT_EQ(kills + 1, np_vmstat("oom_kill"));
}

/* --- the reaper -------------------------------------------------------------------------- */

/* Nobody can write there: who tries does not even die. */
static int freeze(bool yes)
{
	int fd = open(DISK, O_RDONLY | O_CLOEXEC), ret = 0;

	if (fd < 0)
		return -errno;
	if (ioctl(fd, yes ? FIFREEZE : FITHAW, 0))
		ret = -errno;
	close(fd);
	return ret;
}

static void *write_where_nobody_can(void *arg)
{
	int fd = open(DISK "/file", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

	if (fd >= 0)
		close(fd);
	return NULL;
}

static int live_with_one_foot_in_the_door(int sock)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, write_where_nobody_can, NULL))
		return 1;
	return live_until_told(sock);
}

/* Does a thread of the process wait for what no signal ends? */
static bool has_stuck_thread(pid_t pid)
{
	char path[300], text[600], *state;
	struct dirent *entry;
	bool stuck = false;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	dir = opendir(path);
	while (dir && (entry = readdir(dir))) {
		snprintf(path, sizeof(path), "/proc/%d/task/%s/stat", pid, entry->d_name);
		if (entry->d_name[0] == '.' || np_read_text(path, text, sizeof(text)) <= 0)
			continue;
		state = strrchr(text, ')');
		stuck |= state && state[2] == 'D';
	}
	if (dir)
		closedir(dir);
	return stuck;
}

static bool kernel_said(int log, const char *what)
{
	char text[2048];
	ssize_t n;

	while ((n = read(log, text, sizeof(text) - 1)) > 0 || (n < 0 && errno == EPIPE)) {
		text[n < 0 ? 0 : n] = 0;
		if (strstr(text, what))
			return true;
	}
	return false;
}

/*
 * A process that was killed for want of memory and cannot end keeps its QPs, and its
 * memory is taken from it while peers use it, by a notifier that must not wait.
 */
TEST_F(owner, memory_that_the_reaper_takes_is_an_address_error)
{
	struct np_load *load = &self->load;
	int status, log = open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	char path[64];

	ASSERT_LE(0, log);
	ASSERT_LE(0, lseek(log, 0, SEEK_END));
	ASSERT_EQ(0, make_disk());
	ASSERT_EQ(0, freeze(true));
	ASSERT_EQ(0, meet_owner(self, NP_DATA_LEN, NULL, live_with_one_foot_in_the_door));
	ASSERT_TRUE(np_wait_until(has_stuck_thread(self->pid)));
	np_load_init(load, &self->peer, &self->info, NULL, FIRST_PAGE * PAGE, PAGES);
	ASSERT_EQ(0, np_load_start(load));
	ASSERT_LOAD(np_load_goes_on(load, 10 * PAGES));
	snprintf(path, sizeof(path), "/proc/%d/oom_score_adj", self->pid);
	ASSERT_EQ(0, np_write_text(path, "1000"));
	np_load_step(load, 0, PAGES);
	ASSERT_EQ(0, np_write_text("/proc/sysrq-trigger", "f"));
	ASSERT_TRUE(np_wait_until(kernel_said(log, "oom_reaper: reaped process")));
	np_load_lose(load, 0, PAGES);
	np_load_gone(load, 0, PAGES, RDMA_NP_ADDRESS, RDMA_NP_ADDRESS);
	ASSERT_LOAD(np_load_is_refused(load, 20));
	EXPECT_TRUE(np_load_stop(load));
	/* Its pages are not there for anybody who does not ask, either. */
	ASSERT_EQ(0, np_read(&self->peer, 0, NP_DATA_LEN, np_read_addr(&self->info, 0),
			     self->info.read_key));
	EXPECT_TRUE(np_all(self->peer.buf, NP_DATA_LEN, self->info.signature));
	ASSERT_EQ(0, freeze(false));
	ASSERT_EQ(self->pid, waitpid(self->pid, &status, 0));
	EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) TH_LOG("%x", status);
}

TEST_HARNESS_MAIN
