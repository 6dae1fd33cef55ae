// SPDX-License-Identifier: GPL-2.0
/* See np_zram.h. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/swap.h>
#include <unistd.h>

#include "np_zram.h"

int np_swap_find(struct np_swap *swap)
{
	char text[2000], *line;

	if (!np_disk_swap() || np_read_text("/proc/swaps", text, sizeof(text)) < 0)
		return -ENODEV;
	line = strchr(text, '\n');
	if (!line || !line[1])
		return -ENODEV;
	snprintf(swap->disk, sizeof(swap->disk), "%.*s", (int)strcspn(line + 1, " \t"), line + 1);
	return 0;
}

/* What mkswap writes, on a memory that is its own disk. */
int np_swap_to_zram(struct np_swap *swap)
{
	uint8_t page[PAGE] = {};
	uint32_t info[3] = { 1, (64 << 20) / PAGE - 1, 0 };
	int ret = np_swap_find(swap), fd;

	if (!ret)
		ret = np_write_text("/sys/block/zram0/disksize", "64M");
	if (ret)
		return ret;
	memcpy(page + 1024, info, sizeof(info));
	memcpy(page + PAGE - 10, "SWAPSPACE2", 10);
	fd = open("/dev/zram0", O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (write(fd, page, PAGE) != PAGE || fsync(fd))
		ret = -EIO;
	close(fd);
	if (!ret && (swapoff(swap->disk) || swapon("/dev/zram0", 0)))
		ret = -errno;
	swap->zram = !ret;
	return ret;
}

/* What np_swap_to_zram() did, if it did, undone. */
bool np_swap_back(const struct np_swap *swap)
{
	return !swap->zram || (!swapoff("/dev/zram0") &&
			       !np_write_text("/sys/block/zram0/reset", "1") &&
			       !swapon(swap->disk, 0));
}
