// SPDX-License-Identifier: GPL-2.0
/*
 * What an MPI program does: messages of all sizes, windows of memory, with the data checked. Between two ranks, for some
 * seconds, in memory of which much more is allocated than used.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BIG (4 << 20)
#define ROUNDS 8

static void fill(uint8_t *to, size_t n, unsigned seed)
{
	for (size_t i = 0; i < n; i++)
		to[i] = (uint8_t)(seed * 31 + i * 7 + (i >> 12));
}

static void check(const uint8_t *got, size_t n, unsigned seed, const char *what)
{
	for (size_t i = 0; i < n; i++) {
		if (got[i] == (uint8_t)(seed * 31 + i * 7 + (i >> 12)))
			continue;
		fprintf(stderr, "%s of %zu bytes, seed %u: byte %zu is wrong\n", what, n, seed, i);
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
}

int main(int argc, char **argv)
{
	int rank, ranks;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (ranks != 2) {
		fprintf(stderr, "two ranks are needed\n");
		MPI_Abort(MPI_COMM_WORLD, 1);
	}

	uint8_t *out = malloc(BIG), *in = malloc(BIG), *window;
	MPI_Win win;

	if (!out || !in)
		MPI_Abort(MPI_COMM_WORLD, 1);
	MPI_Win_allocate(BIG, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window, &win);
	for (unsigned round = 0; round < ROUNDS; round++) {
		for (size_t n = 1; n <= BIG; n *= 8) {
			unsigned mine = round * 2 + rank, theirs = round * 2 + !rank;

			fill(out, n, mine);
			MPI_Sendrecv(out, (int)n, MPI_BYTE, !rank, 1, in, (int)n, MPI_BYTE, !rank, 1, MPI_COMM_WORLD,
				     MPI_STATUS_IGNORE);
			check(in, n, theirs, "a message");

			MPI_Win_fence(0, win);
			MPI_Put(out, (int)n, MPI_BYTE, !rank, 0, (int)n, MPI_BYTE, win);
			MPI_Win_fence(0, win);
			check(window, n, theirs, "a put");
			memset(in, 0, n);
			MPI_Win_fence(0, win);
			MPI_Get(in, (int)n, MPI_BYTE, !rank, 0, (int)n, MPI_BYTE, win);
			MPI_Win_fence(0, win);
			check(in, n, mine, "a get");
		}
		long one = 1, sum = 0;
		MPI_Allreduce(&one, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
		if (sum != 2)
			MPI_Abort(MPI_COMM_WORLD, 1);
	}
	MPI_Win_free(&win);
	free(out);
	free(in);
	if (!rank)
		printf("%d rounds, all data right\n", ROUNDS);
	MPI_Finalize();
	return 0;
}
