/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Registers memory for a peer to read and write, and shows that it is not pinned. */
#include "ends.h"

#include <inttypes.h>
#include <nprdma/nprdma.h>

int main(int argc, char **argv)
{
	const size_t size = 64 << 20;
	struct npr_device_attr device;
	struct npr_mr_attr attr;

	if (argc != 2) {
		fprintf(stderr, "usage: %s DEVICE\n", argv[0]);
		return 2;
	}
	struct end e = open_end(argv[1]);
	char *memory = map_memory(size, 'x');

	/* -EOPNOTSUPP: the kernel's log says what is missing. */
	check(npr_query_device(e.verbs, &device), "npr_query_device");

	struct ibv_mr *mr = npr_reg_mr(e.pd, memory, size, IBV_ACCESS_LOCAL_WRITE |
				       IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
	check_pointer(mr, "npr_reg_mr");
	/* An application sends these to its peers; from now on they may use them. */
	printf("%zu bytes at %p, rkey %#" PRIx32 "\n", mr->length, mr->addr, mr->rkey);

	check(npr_query_mr(mr, &attr), "npr_query_mr");
	printf("%" PRIu64 " pages are in memory, %" PRIu64 " may not leave it\n",
	       attr.resident_pages, attr.held_pages);

	check(npr_dereg_mr(mr), "npr_dereg_mr");
	munmap(memory, size);
	close_end(&e);
	return 0;
}
