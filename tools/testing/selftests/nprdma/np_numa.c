// SPDX-License-Identifier: GPL-2.0
/*
 * Where pages are that peers bring in: on the node where the owner's own touch would
 * have put them. In a guest with numa=fake=2.
 */
#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "np_harness.h"

#define CGROUP	"/sys/fs/cgroup"
#define GROUP	CGROUP "/nprdma-numa"
#define PAGES	64

/* How many of the pages are on a node. */
static int on_node(uint8_t *data, int node)
{
	int n = 0;

	for (size_t i = 0; i < PAGES; i++) {
		void *at = data + i * PAGE;
		int where = -1;

		if (syscall(SYS_move_pages, 0, 1UL, &at, NULL, &where, 0))
			return -errno;
		n += where == node;
	}
	return n;
}

enum how { BY_MBIND, BY_THREAD, BY_CPUSET };

FIXTURE(numa) {
	struct np_pair pair;
};

FIXTURE_VARIANT(numa) {
	enum how how;
	int node;
	bool file;
};

FIXTURE_VARIANT_ADD(numa, mbind_0) { .how = BY_MBIND, .node = 0 };
FIXTURE_VARIANT_ADD(numa, mbind_1) { .how = BY_MBIND, .node = 1 };
FIXTURE_VARIANT_ADD(numa, mbind_1_file) { .how = BY_MBIND, .node = 1, .file = true };
FIXTURE_VARIANT_ADD(numa, set_mempolicy_0) { .how = BY_THREAD, .node = 0 };
FIXTURE_VARIANT_ADD(numa, set_mempolicy_1) { .how = BY_THREAD, .node = 1 };
FIXTURE_VARIANT_ADD(numa, set_mempolicy_0_file) { .how = BY_THREAD, .node = 0, .file = true };
FIXTURE_VARIANT_ADD(numa, set_mempolicy_1_file) { .how = BY_THREAD, .node = 1, .file = true };
FIXTURE_VARIANT_ADD(numa, cpuset_0) { .how = BY_CPUSET, .node = 0 };
FIXTURE_VARIANT_ADD(numa, cpuset_1) { .how = BY_CPUSET, .node = 1 };
FIXTURE_VARIANT_ADD(numa, cpuset_0_file) { .how = BY_CPUSET, .node = 0, .file = true };
FIXTURE_VARIANT_ADD(numa, cpuset_1_file) { .how = BY_CPUSET, .node = 1, .file = true };

FIXTURE_SETUP(numa)
{
	ASSERT_EQ(0, access("/sys/devices/system/node/node1", F_OK)) TH_LOG("needs two nodes");
	ASSERT_EQ(0, np_pair_open(&self->pair));
}

FIXTURE_TEARDOWN_PARENT(numa)
{
	EXPECT_TRUE(np_wait_until(!rmdir(GROUP) || errno == ENOENT));
	NP_CHECK_USAGE(&self->pair.before);
}

static uint8_t *map(bool file)
{
	int fd = file ? memfd_create("np", MFD_CLOEXEC) : -1;
	uint8_t *data;

	if (file && (fd < 0 || ftruncate(fd, NP_DATA_LEN)))
		return NULL;
	data = mmap(NULL, NP_DATA_LEN, PROT_READ | PROT_WRITE,
		    file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
	if (data == MAP_FAILED || madvise(data, NP_DATA_LEN, MADV_NOHUGEPAGE))
		return NULL;
	if (file)
		close(fd);
	return data;
}

static int open_region(struct np_pair *pair, bool file)
{
	pair->data = map(file);
	if (!pair->data)
		return -ENOMEM;
	pair->mr = ibv_reg_mr(pair->owner.pd, pair->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
	return pair->mr ? np_pair_resolve(pair) : -errno;
}

static int enter_cpuset(int node)
{
	int ret = np_write_text(CGROUP "/cgroup.subtree_control", "+cpuset");

	if (!ret && mkdir(GROUP, 0755))
		ret = -errno;
	if (!ret)
		ret = np_write_text(GROUP "/cpuset.mems", node ? "1" : "0");
	return ret ? ret : np_write_text(GROUP "/cgroup.procs", "0");
}

static int bind(enum how how, uint8_t *data, int node)
{
	unsigned long mask = 1UL << node;
	long ret = 0;

	if (how == BY_MBIND)
		ret = syscall(SYS_mbind, data, NP_DATA_LEN, MPOL_BIND, &mask, 8 * sizeof(mask), 0);
	if (how == BY_THREAD)
		ret = syscall(SYS_set_mempolicy, MPOL_BIND, &mask, 8 * sizeof(mask));
	return ret ? -errno : 0;
}

TEST_F(numa, pages_that_peers_bring_are_where_the_owner_wants_them)
{
	struct np_pair *pair = &self->pair;
	uint8_t *touched;

	if (variant->how == BY_CPUSET) {
		ASSERT_EQ(0, enter_cpuset(variant->node));
	}
	touched = map(variant->file);
	ASSERT_NE(NULL, touched);
	ASSERT_EQ(0, open_region(pair, variant->file));
	ASSERT_EQ(0, bind(variant->how, touched, variant->node));
	ASSERT_EQ(0, bind(variant->how, pair->data, variant->node));
	for (size_t i = 0; i < PAGES; i++) {
		touched[i * PAGE] = 1;
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, i * PAGE, PAGE, RDMA_NP_FAULT_WRITE,
						    NULL));
	}
	EXPECT_EQ(PAGES, on_node(touched, variant->node));
	EXPECT_EQ(PAGES, on_node(pair->data, variant->node));
}

/* What the kernel's workers do for others is not bound by what they did for this owner. */
TEST_F(numa, policy_of_one_owner_is_not_that_of_the_next)
{
	struct np_pair *pair = &self->pair;
	const int other = !variant->node;
	unsigned long mask = 1UL << other;

	if (variant->how == BY_CPUSET) {
		ASSERT_EQ(0, enter_cpuset(variant->node));
	}
	ASSERT_EQ(0, open_region(pair, variant->file));
	ASSERT_EQ(0, bind(variant->how, pair->data, variant->node));
	for (size_t i = 0; i < PAGES; i++) {
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, i * PAGE, PAGE, RDMA_NP_FAULT_WRITE,
						    NULL));
	}
	if (variant->how == BY_CPUSET) {
		ASSERT_EQ(0, np_write_text(CGROUP "/cgroup.procs", "0"));
	}
	ASSERT_EQ(0, syscall(SYS_set_mempolicy, MPOL_BIND, &mask, 8 * sizeof(mask)));
	if (variant->how == BY_MBIND) {
		ASSERT_EQ(0, syscall(SYS_mbind, pair->data, NP_DATA_LEN, MPOL_DEFAULT, NULL, 0, 0));
	}
	for (size_t i = PAGES; i < 2 * PAGES; i++) {
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, i * PAGE, PAGE, RDMA_NP_FAULT_WRITE,
						    NULL));
	}
	EXPECT_EQ(PAGES, on_node(pair->data, variant->node));
	EXPECT_EQ(PAGES, on_node(pair->data + PAGES * PAGE, other));
}

TEST_HARNESS_MAIN
