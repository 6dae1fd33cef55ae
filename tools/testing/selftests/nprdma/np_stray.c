// SPDX-License-Identifier: GPL-2.0
/*
 * An HCA reads where nothing is mapped for it. That no window ever makes the IOMMU refuse
 * an access (I2) is shown by looking for reports of it, here and in scripts/vm: so the IOMMU
 * has to refuse this one, and its driver has to report it.
 */
#include <fcntl.h>
#include <sys/mman.h>

#include "np_harness.h"

#define ADDRESS		0x123456789000UL	/* nothing of ours nor of Linux's is there */
#define COMMAND		0x4			/* of the configuration space */
#define COMMAND_MASTER	0x4

/* Of the registers, as 32-bit words of big endian. */
enum { QUEUE_HIGH = 4, QUEUE_LOW = 5, DOORBELL = 6 };

static int make_master(const char *function)
{
	uint16_t command;
	char path[100];
	int fd, ret = 0;

	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/config", function);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (pread(fd, &command, sizeof(command), COMMAND) != sizeof(command))
		ret = -EIO;
	command |= COMMAND_MASTER;
	if (!ret && pwrite(fd, &command, sizeof(command), COMMAND) != sizeof(command))
		ret = -EIO;
	close(fd);
	return ret;
}

/* The HCA reads the first entry of its queue of commands. */
static int read_from(const char *function, uint64_t address)
{
	volatile uint32_t *registers = np_device_registers(function, 0);

	if (!registers)
		return -errno;
	registers[QUEUE_HIGH] = htobe32(address >> 32);
	registers[QUEUE_LOW] = htobe32((uint32_t)address);
	registers[DOORBELL] = htobe32(1);
	return munmap((void *)registers, PAGE) ? -errno : 0;
}

/* A line of the kernel's log that has all of these. */
static bool is_reported(const char *by, const char *function)
{
	char line[512], hex[32];
	FILE *f = popen("dmesg", "re");
	bool found = false;

	snprintf(hex, sizeof(hex), "0x%lx", ADDRESS);
	while (f && fgets(line, sizeof(line), f))
		/* VT-d's report does not name the domain of PCI. */
		found |= strstr(line, by) && strstr(line, strchr(function, ':') + 1) &&
			 strstr(line, hex);
	if (f)
		pclose(f);
	return found;
}

TEST(read_where_nothing_is_mapped_is_refused_and_reported)
{
	const char *report = access("/sys/class/iommu/ivhd0", F_OK) ?
			     "DMAR: [DMA Read" : "AMD-Vi: Event logged [IO_PAGE_FAULT";
	char function[NP_FUNCTION_LEN];
	uint64_t before, after;
	struct np_pair pair;

	ASSERT_EQ(0, np_hca_get(NP_OWNER_DEV, NP_HCA_DMA_FAULTS, &before));
	ASSERT_EQ(0, np_device_remove(NP_OWNER_DEV, NP_UNBIND, function));
	ASSERT_EQ(0, np_device_enable(function));
	ASSERT_EQ(0, make_master(function));
	EXPECT_FALSE(is_reported(report, function));
	/* Once: drivers report few of many. */
	ASSERT_EQ(0, read_from(function, ADDRESS));
	EXPECT_TRUE(np_wait_until(is_reported(report, function)))
		TH_LOG("no \"%s\" of address 0x%lx", report, ADDRESS);
	ASSERT_EQ(0, np_device_return(NP_OWNER_DEV, NP_UNBIND, function));
	ASSERT_EQ(0, np_hca_get(NP_OWNER_DEV, NP_HCA_DMA_FAULTS, &after));
	EXPECT_EQ(before + 1, after);

	/* No harm was done. */
	ASSERT_EQ(0, np_pair_open(&pair));
	ASSERT_EQ(0, np_pair_register(&pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&pair));
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(&pair, 0, 8 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
}

TEST_HARNESS_MAIN
