// SPDX-License-Identifier: GPL-2.0
/*
 * Memory that does not come.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "np_stuck.h"

#define FUSE_BUF	(1 << 18)

static void fuse_reply(int dev, uint64_t unique, const void *data, size_t len)
{
	struct fuse_out_header out = { .len = sizeof(out) + len, .unique = unique };
	struct iovec iov[2] = { { &out, sizeof(out) }, { (void *)data, len } };

	if (writev(dev, iov, 2) < 0 && errno != ENOENT)
		perror("fuse");
}

static void *fuse_serve(void *arg)
{
	struct np_stuck_file *file = arg;
	static uint8_t buf[FUSE_BUF];
	const struct fuse_in_header *in = (void *)buf;

	while (read(file->dev, buf, sizeof(buf)) > 0) {
		struct fuse_attr_out attr = {
			.attr = { .ino = 1, .size = NP_DATA_LEN, .mode = S_IFREG | 0600,
				  .nlink = 1, .blksize = PAGE },
		};
		struct fuse_init_out init = {
			.major = FUSE_KERNEL_VERSION, .minor = 31, .max_write = PAGE,
			.max_background = 1024, .congestion_threshold = 1024,
		};
		/* Who closes it does not wait for us, who may be gone by then. */
		struct fuse_open_out opened = { .open_flags = FOPEN_NOFLUSH };

		switch (in->opcode) {
		case FUSE_INIT:
			fuse_reply(file->dev, in->unique, &init, sizeof(init));
			break;
		case FUSE_GETATTR:
			fuse_reply(file->dev, in->unique, &attr, sizeof(attr));
			break;
		case FUSE_OPEN:
			fuse_reply(file->dev, in->unique, &opened, sizeof(opened));
			break;
		case FUSE_READ: {
			const struct fuse_read_in *want = (void *)(in + 1);
			int nr = atomic_load(&file->waiting);

			file->reads[nr % NP_DATA_PAGES].unique = in->unique;
			file->reads[nr % NP_DATA_PAGES].page = want->offset / PAGE;
			atomic_store(&file->waiting, nr + 1);
			break;
		}
		default:
			fuse_reply(file->dev, in->unique, NULL, 0);
		}
	}
	return NULL;
}

uint8_t *np_stuck_map(struct np_stuck_file *file)
{
	char path[64], options[64];
	struct stat st;
	void *data;
	int fd;

	snprintf(path, sizeof(path), "/tmp/np-stuck-%d", getpid());
	fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
	file->dev = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	if (fd < 0 || file->dev < 0)
		return NULL;
	close(fd);
	snprintf(options, sizeof(options), "fd=%d,rootmode=100000,user_id=0,group_id=0",
		 file->dev);
	if (mount("np-stuck", path, "fuse", MS_NOSUID | MS_NODEV, options) ||
	    pthread_create(&file->server, NULL, fuse_serve, file))
		return NULL;
	file->fd = open(path, O_RDONLY | O_CLOEXEC);
	/* What is open stays; nothing is left to be unmounted. */
	umount2(path, MNT_DETACH);
	unlink(path);
	/* The length comes with the attributes. */
	if (file->fd < 0 || fstat(file->fd, &st) || st.st_size != NP_DATA_LEN)
		return NULL;
	data = mmap(NULL, NP_DATA_LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE, file->fd, 0);
	if (data == MAP_FAILED || madvise(data, NP_DATA_LEN, MADV_RANDOM))
		return NULL;
	return data;
}

void np_stuck_bring(struct np_stuck_file *file, int nr)
{
	static const uint8_t page[PAGE];
	struct np_stuck_read *read = &file->reads[nr];

	while (read->brought)
		read++;
	read->brought = true;
	fuse_reply(file->dev, read->unique, page, PAGE);
}
