// SPDX-License-Identifier: GPL-2.0
/*
 * Devices and configurations that cannot have unpinned regions refuse them, with
 * EOPNOTSUPP, and pinned memory works there as always. Each test needs a guest of
 * its own (see "guests"): choose it with -t.
 */
#include "np_harness.h"

static bool file_has(const char *path, const char *text)
{
	char line[4096];
	bool found = false;
	FILE *f = fopen(path, "re");

	while (f && fgets(line, sizeof(line), f))
		found |= !!strstr(line, text);
	if (f)
		fclose(f);
	return found;
}

static bool run(const char *command)
{
	int ret = system(command);

	if (ret)
		ksft_print_msg("%s: status %d\n", command, ret);
	return !ret;
}

/* @asks: it may reach regions of peers nevertheless */
static void check_refusal(struct __test_metadata *_metadata, const char *dev, bool asks)
{
	uint8_t *data = np_map(NP_DATA_LEN);
	struct ibv_context *ctx = np_open_device(dev);
	struct rdma_np_query query;
	struct ibv_pd *pd;
	struct ibv_mr *mr;

	ASSERT_NE(NULL, data);
	ASSERT_NE(NULL, ctx);
	pd = ibv_alloc_pd(ctx);
	ASSERT_NE(NULL, pd);
	memset(&query, 0xff, sizeof(query));
	ASSERT_EQ(asks ? 0 : -EOPNOTSUPP, np_query(ctx, &query));
	if (asks) {
		EXPECT_EQ(0, query.flags);
	}
	for (int i = 0; i < 3; i++) {
		errno = 0;
		EXPECT_EQ(NULL, ibv_reg_mr(pd, data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED));
		EXPECT_EQ(EOPNOTSUPP, errno);
	}
	mr = ibv_reg_mr(pd, data, PAGE, NP_RIGHTS);
	EXPECT_NE(NULL, mr);
	EXPECT_TRUE(run("dmesg | grep -q 'unpinned memory regions refused: '"));
	if (mr) {
		EXPECT_EQ(0, ibv_dereg_mr(mr));
	}
	EXPECT_EQ(0, ibv_dealloc_pd(pd));
	EXPECT_EQ(0, ibv_close_device(ctx));
}

TEST(passthrough_domain)
{
	ASSERT_TRUE(file_has("/proc/cmdline", "iommu=pt"));
	check_refusal(_metadata, NP_OWNER_DEV, true);
}

TEST(iommu_off)
{
	ASSERT_TRUE(file_has("/proc/cmdline", "intel_iommu=off") ||
		    file_has("/proc/cmdline", "amd_iommu=off"));
	check_refusal(_metadata, NP_OWNER_DEV, true);
}

/* The kernel's log says which of the reasons it was. */
TEST(shadowed_tables)
{
	check_refusal(_metadata, NP_OWNER_DEV, true);
	EXPECT_TRUE(run("dmesg | grep -Eq 'unpinned memory regions refused: .*(caching mode|NpCache)'"));
}

TEST(device_tlb)
{
	check_refusal(_metadata, NP_OWNER_DEV, true);
	EXPECT_TRUE(run("dmesg | grep -q 'unpinned memory regions refused: .*pci=noats'"));
}

TEST(forced_passthrough)
{
	check_refusal(_metadata, NP_OWNER_DEV, true);
	EXPECT_TRUE(run("dmesg | grep -q 'unpinned memory regions refused: .*amd_iommu=force_isolation'"));
}

TEST(no_drain)
{
	check_refusal(_metadata, NP_OWNER_DEV, true);
	EXPECT_TRUE(run("dmesg | grep -q 'unpinned memory regions refused: .*in flight'"));
}

TEST(software_device)
{
	/* The kernel's own request for the algorithm does not know where we have modules. */
	ASSERT_TRUE(run("modprobe crc32_generic; modprobe rdma_rxe"));
	ASSERT_TRUE(run("ip link add npdummy type dummy && ip link set npdummy up"));
	ASSERT_TRUE(run("rdma link add rxe_np type rxe netdev npdummy"));
	check_refusal(_metadata, "rxe_np", true);
	EXPECT_TRUE(run("rdma link delete rxe_np"));
	/* One that has no MADs either. */
	ASSERT_TRUE(run("modprobe siw; rdma link add siw_np type siw netdev npdummy"));
	check_refusal(_metadata, "siw_np", false);
	EXPECT_TRUE(run("rdma link delete siw_np && ip link delete npdummy"));
}

TEST_HARNESS_MAIN
