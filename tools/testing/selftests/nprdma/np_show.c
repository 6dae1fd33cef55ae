// SPDX-License-Identifier: GPL-2.0
/*
 * What an administrator sees of unpinned regions: "rdma resource show mr", "rdma
 * statistic show mr" and the tracepoints. The numbers have to be those of the region.
 */
#include <fcntl.h>
#include <libgen.h>
#include <sys/stat.h>

#include "np_harness.h"

#define TRACING "/sys/kernel/tracing/"
#define DOCUMENT "../../../../Documentation/infiniband/nprdma.rst"

/* Longer than a slow kernel takes to grant a hold. */
#define HOLD_MS 1000U

FIXTURE(show) {
	struct np_pair pair;
};

FIXTURE_SETUP(show)
{
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
}

FIXTURE_TEARDOWN_PARENT(show)
{
	NP_CHECK_USAGE(&self->pair.before);
}

/* The line of @command's output in which @word stands. */
static bool find_line(const char *command, const char *word, char *line, size_t size)
{
	FILE *f = popen(command, "re");
	bool found = false;

	while (f && !found && fgets(line, size, f))
		found = strstr(line, word);
	while (f && getc(f) != EOF)
		;
	return f && !pclose(f) && found;
}

/* "... NAME VALUE ...": the value, or -1. */
static long value_of(const char *line, const char *name)
{
	char word[64];
	const char *at;

	snprintf(word, sizeof(word), " %s ", name);
	at = strstr(line, word);
	return at ? strtol(at + strlen(word), NULL, 0) : -1;
}

/* What the one unpinned region's counter says, or -1. */
static long counter(const char *name)
{
	char line[2048];

	if (!find_line("rdma statistic show mr", "faults_minor", line, sizeof(line)))
		return -1;
	return value_of(line, name);
}

TEST_F(show, resource_says_what_is_resident_and_held)
{
	struct np_pair *pair = &self->pair;
	char region[32], line[1024];
	struct rdma_np_event event = {};

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 5 * PAGE, 0, &event));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 3 * PAGE, RDMA_NP_FAULT_WRITE, &event));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 8 * PAGE, 2 * PAGE, RDMA_NP_FAULT_HOLD, &event));

	snprintf(region, sizeof(region), " drv_region %llu ", (unsigned long long)pair->info.region_id);
	ASSERT_TRUE(find_line("rdma resource show mr -dd", region, line, sizeof(line)));
	TH_LOG("%s", line);
	EXPECT_NE(NULL, strstr(line, NP_OWNER_DEV));
	EXPECT_NE(NULL, strstr(line, " drv_memory unpinned "));
	EXPECT_EQ(NP_DATA_LEN, value_of(line, "mrlen"));
	EXPECT_EQ(getpid(), value_of(line, "pid"));
	EXPECT_EQ(7, value_of(line, "drv_resident"));
	EXPECT_EQ(3, value_of(line, "drv_writable"));
	EXPECT_EQ(2, value_of(line, "drv_held"));
	EXPECT_EQ(0, value_of(line, "drv_huge"));
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	/* A pinned region is what it always was. */
	ASSERT_TRUE(find_line("rdma resource show mr -dd", NP_PEER_DEV, line, sizeof(line)));
	EXPECT_EQ(NP_BUF_LEN, value_of(line, "mrlen"));
	EXPECT_EQ(NULL, strstr(line, "unpinned"));
}

/* How many lines of @command's output have both words. */
static int count_lines(const char *command, const char *word, const char *other)
{
	FILE *f = popen(command, "re");
	char line[1024];
	int n = 0;

	while (f && fgets(line, sizeof(line), f))
		n += strstr(line, word) && strstr(line, other);
	return f && !pclose(f) ? n : -1;
}

TEST_F(show, resource_says_which_keys_a_region_has)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	char region[32];

	snprintf(region, sizeof(region), " drv_region %llu", (unsigned long long)pair->info.region_id);
	EXPECT_EQ(3, count_lines("rdma resource show mr -dd", region, "[nprdma]"));
	EXPECT_EQ(1, count_lines("rdma resource show mr -dd", region, " pid "));
	/* A key has no counters of its own. */
	EXPECT_EQ(1, count_lines("rdma statistic show mr", NP_OWNER_DEV, "faults_minor"));
	/* While the peer may use them they are there. */
	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	EXPECT_EQ(3, count_lines("rdma resource show mr -dd", region, "[nprdma]"));
	EXPECT_EQ(0, count_lines("rdma resource show mr -dd", region, " pid "));
	ASSERT_EQ(1, np_wait_event(&pair->peer, RDMA_NP_EVENT_REGION_GONE, &event, NP_WAIT_MS));
	ASSERT_EQ(0, np_forget(&pair->peer, pair->info.region_id));
	EXPECT_TRUE(np_wait_until(!count_lines("rdma resource show mr -dd", region, "")));
}

FIXTURE(charged) {
	struct np_pair pair;
};

FIXTURE_SETUP(charged)
{
	ASSERT_EQ(0, np_write_text("/sys/fs/cgroup/cgroup.subtree_control", "+rdma"));
	ASSERT_TRUE(!mkdir(NP_GROUP, 0755) || errno == EEXIST);
	ASSERT_EQ(0, np_write_text(NP_GROUP "/cgroup.procs", "0"));
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
}

FIXTURE_TEARDOWN_PARENT(charged)
{
	EXPECT_TRUE(np_group_remove());
	NP_CHECK_USAGE(&self->pair.before);
}

/* Objects of the owner's device that our group is charged for, or -1. */
static long charged_objects(void)
{
	FILE *f = fopen(NP_GROUP "/rdma.current", "re");
	const char *at;
	char line[256];
	long n = -1;

	while (f && fgets(line, sizeof(line), f)) {
		at = strstr(line, "hca_object=");
		if (!strncmp(line, NP_OWNER_DEV " ", strlen(NP_OWNER_DEV) + 1) && at)
			n = strtol(at + strlen("hca_object="), NULL, 10);
	}
	if (f)
		fclose(f);
	return n;
}

static int limit_objects(long max)
{
	char text[64];

	snprintf(text, sizeof(text), NP_OWNER_DEV " hca_object=%ld", max);
	return np_write_text(NP_GROUP "/rdma.max", text);
}

/* Peers make the kernel register keys: it is the owner's group that has them. */
TEST_F(charged, keys_are_charged_to_the_owner_until_they_are_destroyed)
{
	struct np_pair *pair = &self->pair;
	long base = charged_objects();
	struct rdma_np_event event;

	ASSERT_LT(0, base);
	ASSERT_EQ(0, limit_objects(base));
	EXPECT_EQ(-ENOMEM, np_pair_resolve(pair));
	EXPECT_EQ(base, charged_objects());
	/* With room for them it works. */
	ASSERT_EQ(0, limit_objects(base + 3));
	ASSERT_EQ(0, np_pair_resolve(pair));
	EXPECT_EQ(base + 3, charged_objects());
	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	EXPECT_EQ(base + 2, charged_objects());
	ASSERT_EQ(1, np_wait_event(&pair->peer, RDMA_NP_EVENT_REGION_GONE, &event, NP_WAIT_MS));
	ASSERT_EQ(0, np_forget(&pair->peer, pair->info.region_id));
	EXPECT_TRUE(np_wait_until(charged_objects() == base - 1))
		TH_LOG("%ld, %ld before", charged_objects(), base);
}

TEST_F(show, statistic_counts_what_happens)
{
	struct np_pair *pair = &self->pair;
	char line[2048];
	struct rdma_np_event event = {};

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 5 * PAGE, 0, NULL));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 5 * PAGE, 0, NULL));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	ASSERT_EQ(0, madvise(pair->data, 2 * PAGE, MADV_DONTNEED));
	ASSERT_EQ(0, munmap(pair->data + HUGE_PAGE, PAGE));
	ASSERT_EQ(RDMA_NP_ADDRESS, np_pair_fault(pair, HUGE_PAGE, PAGE, 0, NULL));

	ASSERT_TRUE(find_line("rdma statistic show mr", "faults_minor", line, sizeof(line)));
	TH_LOG("%s", line);
	EXPECT_NE(NULL, strstr(line, NP_OWNER_DEV));
	EXPECT_EQ(5, value_of(line, "faults_minor"));
	EXPECT_EQ(6, value_of(line, "faults_noop"));
	EXPECT_EQ(0, value_of(line, "faults_major"));
	EXPECT_EQ(1, value_of(line, "faults_failed"));
	EXPECT_EQ(1, value_of(line, "holds"));
	EXPECT_EQ(1, value_of(line, "invalidations"));
	EXPECT_EQ(2, value_of(line, "page_invalidations"));
	EXPECT_EQ(2, value_of(line, "table_pages"));
}

/*
 * Who waits for each fault has the owner's turn. Now and then the handler has to leave one to
 * a worker, as a lock is taken; and what needs a table of leaves, or pins, it always leaves.
 */
TEST_F(show, statistic_tells_what_was_served_at_once)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event = {};
	long before;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	EXPECT_EQ(0, counter("faults_at_once"));
	for (int i = 1; i <= 32; i++)
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, i * PAGE, PAGE,
						    i % 2 ? RDMA_NP_FAULT_WRITE : 0, NULL));
	TH_LOG("%ld of 32 were served at once", counter("faults_at_once"));
	EXPECT_LE(16, counter("faults_at_once"));
	EXPECT_GE(32, counter("faults_at_once"));
	EXPECT_EQ(33, counter("faults_minor"));

	before = counter("faults_at_once");
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 40 * PAGE, PAGE, RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	EXPECT_EQ(before, counter("faults_at_once"));
}

/* What is in swap has to be read; not all of it, where more comes along. */
TEST_F(show, statistic_tells_what_waited_for_a_disk)
{
	struct np_pair *pair = &self->pair;
	long faults = 0;

	ASSERT_TRUE(np_disk_swap()) TH_LOG("needs a guest with swap");
	/* A page on its way to the disk is in memory still. */
	for (int i = 0; i < 20 && counter("faults_major") < 1; i++) {
		ASSERT_EQ(0, np_page_out(pair->data, HUGE_PAGE));
		ASSERT_EQ(0, counter("faults_major"));
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, HUGE_PAGE, 0, NULL));
		faults += HUGE_PAGE / PAGE;
	}
	TH_LOG("%ld of %ld", counter("faults_major"), faults);
	EXPECT_LE(1, counter("faults_major"));
	EXPECT_EQ(faults, counter("faults_major") + counter("faults_minor"));
	EXPECT_EQ(0, counter("faults_noop"));
}

/* Another page is where one is held, and comes when the hold has ended. */
TEST_F(show, statistic_counts_retries)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event = {};

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(0, madvise(pair->data, PAGE, MADV_DONTNEED));
	EXPECT_EQ(0, counter("retries"));
	EXPECT_EQ(RDMA_NP_BUSY, np_fault_once(&pair->peer, pair->peer.qp, pair->info.region_id,
					 pair->info.base, PAGE, 0, NULL));
	EXPECT_LE(1, counter("retries"));
	EXPECT_EQ(1, counter("faults_failed"));
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, 0, NULL));
}

TEST_F(show, statistic_counts_what_was_made_absent_to_see_who_uses_it)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 3 * PAGE, 0, NULL));
	EXPECT_EQ(0, counter("page_agings"));
	/* Nobody is asked about a page that is on a list of a CPU. */
	ASSERT_EQ(0, np_write_text("/proc/sys/vm/drop_caches", "1"));
	ASSERT_EQ(0, np_set_idle(np_frame_of(pair->data + PAGE)));
	EXPECT_TRUE(np_wait_until(counter("page_agings") > 0));
	EXPECT_EQ(1, counter("page_agings"));
	EXPECT_EQ(0, np_pair_word(pair, PAGE) & RDMA_NP_WORD_READABLE);
	/* The owner has lost nothing. */
	EXPECT_EQ(0, counter("page_invalidations"));
	EXPECT_EQ(0, counter("invalidations"));
}

#define MAX_NAMES 32

/* The "``NAME``" in the document's paragraph on counters: how many there are. */
static int documented(char names[MAX_NAMES][32])
{
	char path[] = __FILE__, line[512];
	bool inside = false;
	int n = 0;
	FILE *f;

	if (chdir(dirname(path)))
		return -errno;
	f = fopen(DOCUMENT, "re");
	if (!f)
		return -errno;
	while (fgets(line, sizeof(line), f)) {
		const char *at = line;

		if (inside && *line == '\n')
			break;
		if (inside)
			while (n < MAX_NAMES && (at = strstr(at, "``")) &&
			       sscanf(at, "``%31[a-z_]``", names[n]) == 1)
				at += 4 + strlen(names[n++]);
		inside |= !strcmp(line, "``rdma statistic show mr``\n");
	}
	fclose(f);
	return n;
}

TEST_F(show, document_names_all_counters)
{
	char line[2048], names[MAX_NAMES][32], name[32];
	const char *at;
	int nr, n, shown = 0;
	long value;

	ASSERT_TRUE(find_line("rdma statistic show mr", "faults_minor", line, sizeof(line)));
	nr = documented(names);
	if (nr == -ENOENT)
		SKIP(return, "not on the machine that this was built on");
	ASSERT_LT(0, nr) TH_LOG("%s: %s", DOCUMENT, strerror(-nr));
	for (int i = 0; i < nr; i++) {
		EXPECT_LE(0, value_of(line, names[i])) TH_LOG("%s is not shown", names[i]);
	}
	/* "dev DEVICE mrn NUMBER NAME VALUE NAME VALUE ..." */
	at = strstr(line, " mrn ");
	ASSERT_NE(NULL, at);
	for (; sscanf(at, " %31s %ld%n", name, &value, &n) == 2; at += n) {
		bool found = !shown;

		for (int i = 0; i < nr; i++)
			found |= !strcmp(name, names[i]);
		EXPECT_TRUE(found) TH_LOG("nobody says what %s is", name);
		shown++;
	}
	EXPECT_EQ(nr, shown - 1);
}

/* Is there a line with all of @words? NULL ends them. */
static bool traced(const char *const words[])
{
	char line[1024];
	bool found = false;
	FILE *f = fopen(TRACING "trace", "re");

	while (f && !found && fgets(line, sizeof(line), f)) {
		found = true;
		for (int i = 0; words[i]; i++)
			found &= !!strstr(line, words[i]);
	}
	if (f)
		fclose(f);
	return found;
}

#define EXPECT_TRACED(...)							\
	EXPECT_TRUE(np_wait_until(traced((const char *[]){ __VA_ARGS__, NULL })))

TEST_F(show, tracepoints_tell_the_life_of_a_region)
{
	struct np_pair *pair = &self->pair;
	char id[40], owner_qp[32], peer_qp[32], hold[40];
	struct rdma_np_event event = {};

	ASSERT_EQ(0, np_forget(&pair->peer, pair->info.region_id));
	ASSERT_EQ(0, np_write_text(TRACING "trace", ""));
	ASSERT_EQ(0, np_write_text(TRACING "events/nprdma/enable", "1"));
	ASSERT_EQ(0, np_pair_resolve(pair));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 2 * PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	ASSERT_EQ(0, madvise(pair->data + 4 * PAGE, PAGE, MADV_DONTNEED));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 4 * PAGE, PAGE, 0, NULL));
	ASSERT_EQ(0, madvise(pair->data + 4 * PAGE, PAGE, MADV_DONTNEED));
	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	ASSERT_EQ(1, np_wait_event(&pair->peer, RDMA_NP_EVENT_REGION_GONE, &event, NP_WAIT_MS));
	ASSERT_EQ(0, np_forget(&pair->peer, pair->info.region_id));

	snprintf(id, sizeof(id), "region=0x%llx ", (unsigned long long)pair->info.region_id);
	snprintf(owner_qp, sizeof(owner_qp), "qp=%u ", pair->owner.qp->qp_num);
	snprintf(peer_qp, sizeof(peer_qp), "qp=%u ", pair->peer.qp->qp_num);
	snprintf(hold, sizeof(hold), "pages=2");
	EXPECT_TRACED("np_resolve:", "dev=" NP_PEER_DEV, peer_qp, id, "status=OK");
	EXPECT_TRACED("np_resolve_serve:", "dev=" NP_OWNER_DEV, owner_qp, id, "status=OK");
	EXPECT_TRACED("np_fault_submit:", "dev=" NP_PEER_DEV, peer_qp, id, "ranges=1");
	EXPECT_TRACED("np_fault_serve:", "dev=" NP_OWNER_DEV, owner_qp, id, "status=OK");
	EXPECT_TRACED("np_fault_complete:", "dev=" NP_PEER_DEV, peer_qp, "status=OK");
	EXPECT_TRACED("np_hold_grant:", "dev=" NP_OWNER_DEV, owner_qp, hold);
	EXPECT_TRACED("np_hold_release:", "dev=" NP_OWNER_DEV, owner_qp, hold);
	EXPECT_TRACED("np_residency:", id, "pages=2");
	EXPECT_TRACED("np_residency:", id, "pages=1", "now=absent");
	EXPECT_TRACED("np_gone_send:", "dev=" NP_OWNER_DEV, owner_qp, id);
	EXPECT_TRACED("np_gone_receive:", "dev=" NP_PEER_DEV, peer_qp, id);
	EXPECT_TRACED("np_ungrant:", "dev=" NP_OWNER_DEV, owner_qp, id);
	EXPECT_FALSE(traced((const char *[]){ "np_hold_expire:", NULL }));
	ASSERT_EQ(0, np_write_text(TRACING "events/nprdma/enable", "0"));
}

TEST_F(show, tracepoint_tells_whose_hold_expired)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event = {};
	char qp[32], hold[40];

	ASSERT_EQ(0, np_set_hold_ms(HOLD_MS));
	ASSERT_EQ(0, np_write_text(TRACING "trace", ""));
	ASSERT_EQ(0, np_write_text(TRACING "events/nprdma/enable", "1"));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 3 * PAGE, RDMA_NP_FAULT_HOLD, &event));
	snprintf(qp, sizeof(qp), "qp=%u ", pair->owner.qp->qp_num);
	snprintf(hold, sizeof(hold), "hold=0x%llx ", (unsigned long long)event.hold_id);
	EXPECT_TRACED("np_hold_grant:", "dev=" NP_OWNER_DEV, qp, hold, "pages=3");
	EXPECT_TRACED("np_hold_expire:", "dev=" NP_OWNER_DEV, qp, hold, "pages=3");
	/* It is the end of the QP. */
	EXPECT_TRUE(np_wait_until(np_qp_state(pair->owner.qp) == IBV_QPS_ERR));
	ASSERT_EQ(0, np_write_text(TRACING "events/nprdma/enable", "0"));
	ASSERT_EQ(0, np_set_hold_ms(NP_HOLD_MS));
}

TEST_HARNESS_MAIN
