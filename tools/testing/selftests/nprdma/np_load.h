/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A peer that READs and WRITEs pages of a region without pause, in a thread of its
 * own, while the test changes the owner's memory.
 *
 * Each word of a page tells page, version and place. The peer knows the version of
 * each page that its last proven WRITE left there, and every READ has to bring just
 * that. What a fault may answer is known as well: a page is in one of four phases,
 * and the test moves it to the next around each change that peers may notice:
 *
 *   NP_LOAD_THERE     operations succeed
 *   NP_LOAD_GOING     between: either is right
 *   NP_LOAD_GONE      operations end with the promised status, and with no other
 *   NP_LOAD_COMING    between: either is right
 *
 * An operation is judged, and what it READ compared, if the phase was the same before
 * and after it.
 * Changes that peers may not notice need no phases.
 */
#ifndef NP_LOAD_H
#define NP_LOAD_H

#include <pthread.h>
#include <stdatomic.h>

#include "np_test.h"

#define NP_LOAD_PAGES 64

enum np_load_phase {
	NP_LOAD_THERE,
	NP_LOAD_GOING,
	NP_LOAD_GONE,
	NP_LOAD_COMING,
	NP_LOAD_PHASES,
};

struct np_load_page {
	atomic_uint step;		/* % NP_LOAD_PHASES is the phase */
	atomic_uint lost;		/* how often its content was given up */
	atomic_uint zeroed;		/* the last of them for zeros */
	atomic_int read_status;		/* what is promised while it is gone */
	atomic_int write_status;
	atomic_ulong version;
	unsigned int seen_lost;
	bool unsure;			/* until the next proven WRITE */
	bool zeros;			/* and this until a READ has seen it */
};

struct np_load {
	/* The caller's, before np_load_start() */
	struct np_end *peer;
	const struct rdma_np_region_info *info;
	uint8_t *data;			/* of the first page, in the owner */
	size_t offset;			/* of the first page in the region */
	unsigned int pages;
	atomic_uint writes_of_8;	/* of 8 operations, how many are WRITEs */
	bool alike;			/* pages of one version are equal: see KSM */
	bool no_holds;			/* memory that cannot be pinned for long */
	/*
	 * Another way to READ a page to the begin of the buffer, or to WRITE it from there: 0, the
	 * status of a fault or -errno; -EAGAIN: not this time. NULL: there is none.
	 */
	int (*move)(struct np_load *load, unsigned int page, bool write);
	/*
	 * The owner is BUSY with a FAULT, which is tried again after this; no request is under way.
	 * 0 or -errno. NULL: there is nothing to do.
	 */
	int (*busy)(struct np_load *load);

	struct np_load_page page[NP_LOAD_PAGES];
	pthread_t thread;
	atomic_bool stop;
	atomic_int failed;		/* line of the first failure */
	long error;			/* what failed there */
	unsigned int at;		/* on which page */
	atomic_ulong ops;		/* that succeeded */
	atomic_ulong refused;		/* that ended with the promised status */
	atomic_ulong suspicious;	/* READs that met the signature */
	atomic_ulong faults;
	unsigned long reads, writes;
	unsigned long zeros;		/* READs of pages that are new */
};

/* All pages of @pair's region from @first on; the owner fills them. */
void np_load_init(struct np_load *load, struct np_end *peer, const struct rdma_np_region_info *info,
		  uint8_t *data, size_t offset, unsigned int pages);
int np_load_start(struct np_load *load);
/* Until @n more operations succeeded (were refused); false: it failed, or hangs. */
bool np_load_goes_on(struct np_load *load, unsigned long n);
bool np_load_is_refused(struct np_load *load, unsigned long n);
/* What it was that failed. */
const char *np_load_why(struct np_load *load);
/* Ends the thread; true if all was as it should be. */
bool np_load_stop(struct np_load *load);
/* The first page that the owner's CPU finds different, or -1; after the end. */
int np_load_differs(struct np_load *load);
/* The same for one page, wherever it was read from. */
bool np_load_page_is_right(struct np_load *load, unsigned int page, const void *data);

/* The next phase for pages [first, first + n). */
void np_load_step(struct np_load *load, unsigned int first, unsigned int n);
void np_load_gone(struct np_load *load, unsigned int first, unsigned int n, int read_status,
		  int write_status);
/* What was in them does not come back: in NP_LOAD_GOING or NP_LOAD_COMING. */
void np_load_lose(struct np_load *load, unsigned int first, unsigned int n);
/*
 * The same, and zeros come instead: whoever READs them before he WRITEs has to see that. While
 * nobody can reach what was there nor what comes.
 */
void np_load_lose_for_zeros(struct np_load *load, unsigned int first, unsigned int n);
/* The owner writes a page itself: nobody else may just then. */
void np_load_store(struct np_load *load, unsigned int page);
/* The same by @put, which is given what to write: its error. */
int np_load_store_by(struct np_load *load, unsigned int page,
		     int (*put)(void *arg, unsigned int page, const void *data), void *arg);

#endif /* NP_LOAD_H */
