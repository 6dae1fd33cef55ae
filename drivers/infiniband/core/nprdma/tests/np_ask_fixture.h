/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What KUnit tests of the protocol share: a peer without a device, and what was sent
 * to it.
 */
#ifndef NP_ASK_FIXTURE_H
#define NP_ASK_FIXTURE_H

#include <kunit/test.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "../np_region.h"
#include "np_fake_peer.h"

#define NP_TEST_SENT	512U

/* What the peer gave in an answer to RESOLVE */
#define NP_TEST_THEIRS	0x7468656972730000

/* A peer without a device, and what was sent to it. */
struct np_ask_test {
	struct np_fake_peer fake;
	bool had_keys;
	unsigned int failed;
	struct np_channel channel;
	struct rdma_np_range lease;	/* that answers say */
	bool released;
	struct np_resolve resolves_to; /* if it has an id: the answer to each RESOLVE */
	/* What a transaction does in the end, when a test has taken its place */
	void (*done)(struct np_trans *trans, u32 status,
		     const struct np_msg *answer);
	spinlock_t lock; /* of what follows */
	struct np_msg sent[NP_TEST_SENT];
	unsigned long sent_at[NP_TEST_SENT];
	unsigned int nr_sent;
	wait_queue_head_t wait;
	struct np_port other;
};

static inline struct np_ask_test *np_ask_test(struct kunit *test)
{
	return test->priv;
}

struct np_ask_resolve {
	struct work_struct work;
	struct np_ask_test *t;
	struct np_resolve info;
	int err;
};

struct np_msg np_sample(u8 type, bool answer);
struct np_resolve np_ask_region(u64 id);
int np_ask_init_test(struct kunit *test);
void np_ask_exit_test(struct kunit *test);
void np_bind(struct kunit *test, u64 region_id);
int np_ask_fault(struct kunit *test, u64 region_id, u64 cookie, u32 flags);
void np_answer_request(struct kunit *test, const struct np_msg *request,
		       u8 status, u64 hold_id);
void np_answer_to(struct kunit *test, unsigned int nr, u8 status, u64 hold_id);
void np_test_done(struct np_trans *trans, u32 status,
		  const struct np_msg *answer);
void np_instead_of_done(struct kunit *test,
			void (*done)(struct np_trans *trans, u32 status,
				     const struct np_msg *answer));
void np_test_channel_stays(struct np_channel *channel);
void np_ask_resolve(struct work_struct *work);
struct np_region *np_granted_regions(struct kunit *test, unsigned int nr);
void np_region_dies(struct np_region *region);
void np_test_forgets(struct np_ask_test *t, u64 region_id);
void np_keys_are_there(struct np_fake_peer *fake);

#endif /* NP_ASK_FIXTURE_H */
