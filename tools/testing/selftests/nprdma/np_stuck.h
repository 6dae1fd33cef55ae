/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Memory that does not come: a file of a file system in user space that lets readers wait.
 */
#ifndef NP_STUCK_H
#define NP_STUCK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "np_test.h"

/*
 * A file whose pages are brought by a thread here, which lets readers wait. Nobody but
 * who serves it can end that, and all of it ends when the device file is closed.
 */
struct np_stuck_file {
	int dev;		/* of the file system */
	int fd;			/* of its only file */
	pthread_t server;
	atomic_int waiting;	/* requests for pages, ever */
	struct np_stuck_read {
		uint64_t unique;
		unsigned int page;
		bool brought;
	} reads[NP_DATA_PAGES];	/* these; none is asked for twice */
};

/* The mapping, or NULL. */
uint8_t *np_stuck_map(struct np_stuck_file *file);
/* Brings the page of the request number @nr, or of the oldest one from there on. */
void np_stuck_bring(struct np_stuck_file *file, int nr);

#endif /* NP_STUCK_H */
