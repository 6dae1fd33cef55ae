/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A load (np_load.h) that works under leases, as a library would: it leases what it uses, obeys
 * recalls before it posts the next request, and gives leases back that it has used for a while,
 * so that there are some of all ages.
 *
 * It has one thread, and obeys recalls as well while the owner is BUSY with a FAULT of its own.
 * The FAULT may wait for just such a lease: where the owner's memory has another page now, peers
 * get that when the owner has given back his lease of the old one. Or it waits for somebody who
 * does nothing before a lease is back.
 *
 * Under a lease a request is posted once and nothing is proven. A peer hears of a recall by a
 * message, so until then it reaches what was there before, as on pinned memory. Before a test
 * demands that the peer sees the change it waits until none of the leases is left that there
 * were. The owner's own leases need no wait, as their recall is there before the system call
 * returns that changes memory: with them it is this that the test shows.
 */
#ifndef NP_LEASER_H
#define NP_LEASER_H

#include "np_load.h"

enum np_leaser_kind {
	NP_LEASER_NONE,		/* np_load as it is */
	/* The peer has leases of the owner's memory, and READs and WRITEs it. */
	NP_LEASER_REMOTE,
	/* The owner has leases of its own memory, and WRITEs from it and READs into it. */
	NP_LEASER_LOCAL,
};

struct np_leaser_lease {
	uint64_t hold;		/* a peer's: hold id */
	int64_t handle;		/* the owner's */
	bool taken;
	bool recalled;
	bool write;
	unsigned int uses;
	uint32_t key;
	uint64_t addr;		/* under the key, of the first byte; the owner's */
	atomic_uint state;	/* 0: there is none, and nobody asks for one */
#define NP_LEASE_ASKED		1U
#define NP_LEASE_GRANTED	2U
#define NP_LEASE_WRITE		4U
};

struct np_leaser {
	struct np_load *load;	/* of which this is the way to move pages */
	struct np_end *owner;
	struct ibv_mr *mr;	/* the region, and where it begins in the owner */
	uint8_t *data;
	enum np_leaser_kind kind;
	unsigned int unit;	/* pages of the load that one lease is for */
	size_t length;		/* bytes that one lease is of */
	atomic_bool rest;	/* no leases for now */
	int channel;
	const volatile uint64_t *posted;	/* events so far */
	uint64_t seen;		/* of them, when there were no more to read */
	struct ibv_mr *buf;	/* of the peer's buffer, for those who reach it */
	atomic_bool keep;	/* new leases are not asked for, old ones not given back unasked */
	struct np_leaser_lease lease[NP_LOAD_PAGES];
	atomic_ulong leases;	/* that there were */
	atomic_ulong recalls;	/* recalls that were heard; see np_leaser_recalls() */
	atomic_ulong uses;	/* requests under them */
};

/*
 * After np_load_init(), for region @mr of @owner: each lease is of one page, or, @slots, of a slot
 * of 2 MiB, with half of the load's pages in each. 0 or -errno.
 */
int np_leaser_init(struct np_leaser *leaser, enum np_leaser_kind kind, struct np_load *load,
		   struct np_end *owner, struct ibv_mr *mr, bool slots);
/*
 * Before a change: waits until each of pages [@first, @first + @n) is leased: for writing, if the
 * load writes and the memory can be pinned for that. Those leases stay until they are recalled,
 * and there are no new ones. The load runs. NP_LEASER_NONE: does not wait.
 */
bool np_leaser_begin(struct np_leaser *leaser, unsigned int first, unsigned int n);
/* Are they all leased, as np_leaser_begin() wants it? And is none of them, or none @to_write? */
bool np_leaser_has_all(struct np_leaser *leaser, unsigned int first, unsigned int n);
bool np_leaser_has_none(struct np_leaser *leaser, unsigned int first, unsigned int n, bool to_write);
/* After something that is no change: leases are given back and asked for as before. */
void np_leaser_goes_on(struct np_leaser *leaser);
/*
 * After it: waits until they, or, @to_write, those for writing, are all given back; false: one
 * was not. The owner's own: does not wait.
 */
bool np_leaser_end(struct np_leaser *leaser, unsigned int first, unsigned int n, bool to_write);
/*
 * Leases that were recalled. Of the owner's own also those that were given back before the recall
 * was heard; for a peer's np_leaser_end() waits.
 */
unsigned long np_leaser_recalls(struct np_leaser *leaser);
/* There are no leases, until this is called with false; all are given back when it returns. */
bool np_leaser_rest(struct np_leaser *leaser, bool rest);

/*
 * Step by step, while no load runs: the lease that @page of the load is in. Data of
 * np_leaser_use() is at the begin of the peer's buffer, for both kinds; it looks for no recall. 0,
 * the status of a fault or -errno; -EAGAIN: there was no lease to have for a long time.
 */
int np_leaser_take(struct np_leaser *leaser, unsigned int page, bool write);
int np_leaser_use(struct np_leaser *leaser, unsigned int page, bool write);
/*
 * @wait: for the message to a peer. It does not for the owner's own, which is recalled before
 * the system call returns that changes the memory.
 */
bool np_leaser_is_recalled(struct np_leaser *leaser, unsigned int page, bool wait);
int np_leaser_give_back(struct np_leaser *leaser, unsigned int page);

/* In a test whose fixture has a leaser, with leases: so many were recalled, and requests went under them. */
#define EXPECT_RECALLS(least)						\
	do {								\
		unsigned long recalls_ = np_leaser_recalls(&self->leaser);	\
									\
		if (self->leaser.kind == NP_LEASER_NONE)		\
			break;						\
		EXPECT_LE((unsigned long)(least), recalls_);		\
		EXPECT_LT(0, atomic_load(&self->leaser.uses));		\
		TH_LOG("%lu leases, %lu recalls, %lu requests under them", self->leaser.leases, \
		       recalls_, self->leaser.uses);			\
	} while (0)

#endif /* NP_LEASER_H */
