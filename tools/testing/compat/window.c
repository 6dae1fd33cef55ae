// SPDX-License-Identifier: GPL-2.0
/*
 * An MPI program that shows much more memory to its peer than it uses: a table of GIB gibibytes in each of two
 * ranks, of which every rank fills a thousand entries of the other's, far apart. Each is read back by who put it, and
 * looked at by whose table it is in.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define ENTRIES 1024

/* No two on one page. */
static uint64_t place(uint64_t n, uint64_t pages)
{
	return (n * 2654435761U + 97) % pages * 4096 + n % 512 * 8;
}

static uint64_t value(int rank, uint64_t n)
{
	return (n + 1) * 0x9e3779b97f4a7c15U + (uint64_t)rank;
}

static void fail(const char *what, uint64_t n, uint64_t got)
{
	fprintf(stderr, "entry %llu %s: %llx\n", (unsigned long long)n, what, (unsigned long long)got);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv)
{
	const size_t gib = argc > 1 ? strtoul(argv[1], NULL, 0) : 4;
	const size_t size = gib << 30, pages = size >> 12;
	int rank, ranks;
	MPI_Win win;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (ranks != 2 || !gib) {
		fprintf(stderr, "usage: window [GIB], with two ranks\n");
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	uint8_t *table = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (table == MAP_FAILED) {
		perror("mmap");
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	MPI_Win_create(table, (MPI_Aint)size, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &win);
	MPI_Win_lock_all(0, win);
	for (uint64_t n = 0; n < ENTRIES; n++) {
		const uint64_t v = value(rank, n);

		MPI_Put(&v, 8, MPI_BYTE, !rank, (MPI_Aint)place(n, pages), 8, MPI_BYTE, win);
		if (n % 64 == 63)
			MPI_Win_flush(!rank, win);
		else
			MPI_Win_flush_local(!rank, win);
	}
	MPI_Win_flush(!rank, win);
	for (uint64_t n = 0; n < ENTRIES; n++) {
		uint64_t v = 0;

		MPI_Get(&v, 8, MPI_BYTE, !rank, (MPI_Aint)place(n, pages), 8, MPI_BYTE, win);
		MPI_Win_flush(!rank, win);
		if (v != value(rank, n))
			fail("read back", n, v);
	}
	MPI_Win_unlock_all(win);
	MPI_Barrier(MPI_COMM_WORLD);
	for (uint64_t n = 0; n < ENTRIES; n++) {
		const uint64_t v = *(volatile uint64_t *)(table + place(n, pages));

		if (v != value(!rank, n))
			fail("of this rank's table", n, v);
	}
	MPI_Win_free(&win);
	if (!rank)
		printf("%d entries in %zu GiB, all right\n", ENTRIES, gib);
	MPI_Finalize();
	return 0;
}
