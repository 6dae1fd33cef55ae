// SPDX-License-Identifier: GPL-2.0
/*
 * The protocol between kernels, where it needs two of them or nearly so: peers
 * that do not answer, both ends on one port, requests in both directions, and
 * many QPs at once.
 */
#include <signal.h>
#include <sys/wait.h>

#include "np_harness.h"

FIXTURE(proto) {
	struct np_pair pair;
};

FIXTURE_SETUP(proto)
{
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
}

FIXTURE_TEARDOWN_PARENT(proto)
{
	NP_CHECK_USAGE(&self->pair.before);
}

/* --- peers that do not answer --------------------------------------------------- */

/* A QP connected to an address where nobody is. */
static int connect_to_nobody(struct np_pair *pair)
{
	struct np_addr nobody = np_address(&pair->owner);

	nobody.lid = 0x77;
	return np_qp_reset(pair->peer.qp) ?: np_qp_connect(pair->peer.qp, nobody);
}

TEST_F(proto, peer_that_never_answers_is_unreachable_in_seconds)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_region_info info;
	uint64_t begin;

	ASSERT_EQ(0, connect_to_nobody(pair));
	begin = np_now_ms();
	EXPECT_EQ(-EHOSTUNREACH, np_resolve(&pair->peer, pair->mr->rkey, &info));
	/* All tries take 5.5 s; the rest is a busy host */
	EXPECT_GT(NP_WAIT_MS, np_now_ms() - begin);
}

TEST_F(proto, waiting_for_an_answer_can_be_killed)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_region_info info;
	uint64_t begin, unkilled;
	int status, to_child[2];
	pid_t child;
	char c;

	/* What a wait takes here and now that nobody ends. */
	ASSERT_EQ(0, connect_to_nobody(pair));
	begin = np_now_ms();
	ASSERT_EQ(-EHOSTUNREACH, np_resolve(&pair->peer, pair->mr->rkey, &info));
	unkilled = np_now_ms() - begin;

	ASSERT_EQ(0, pipe(to_child));
	child = np_fork();
	ASSERT_LE(0, child);
	if (!child) {
		struct np_pair own;

		/* Verbs objects of one's own: those of the parent do not survive fork */
		if (np_open(&own.peer, NP_PEER_DEV, 0) ||
		    np_qp_connect(own.peer.qp, (struct np_addr){ .qpn = 99, .lid = 0x77 }))
			_exit(1);
		if (write(to_child[1], "", 1) != 1)
			_exit(2);
		np_resolve(&own.peer, pair->mr->rkey, &info);
		_exit(3);
	}
	ASSERT_EQ(1, read(to_child[0], &c, 1));
	begin = np_now_ms();
	kill(child, SIGKILL);
	ASSERT_EQ(child, waitpid(child, &status, 0));
	EXPECT_TRUE(WIFSIGNALED(status)) TH_LOG("status %x", status);
	EXPECT_GT(unkilled * 2 / 3, np_now_ms() - begin);
}

TEST_F(proto, peer_whose_qp_was_reset_says_so)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	uint64_t begin;

	ASSERT_EQ(0, np_pair_resolve(pair));
	/* The owner's kernel is there, but obeys no more. */
	ASSERT_EQ(0, np_qp_reset(pair->owner.qp));
	begin = np_now_ms();
	EXPECT_EQ(RDMA_NP_QP, np_pair_fault(pair, 0, PAGE, 0, &event));
	EXPECT_GT(NP_WAIT_MS, np_now_ms() - begin);
}

/* --- who may ask ------------------------------------------------------------------- */

TEST_F(proto, both_ends_may_ask_on_one_connection)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_region_info back;
	struct rdma_np_event event;
	struct ibv_mr *mr;
	uint8_t *data;

	data = np_map(HUGE_PAGE);
	ASSERT_NE(NULL, data);
	np_fill(data, PAGE, 5);
	mr = ibv_reg_mr(pair->peer.pd, data, HUGE_PAGE, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);

	ASSERT_EQ(0, np_pair_resolve(pair));
	ASSERT_EQ(0, np_resolve(&pair->owner, mr->rkey, &back));
	EXPECT_NE(pair->info.region_id, back.region_id);
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_HOLD, &event));
	EXPECT_EQ(RDMA_NP_OK, np_fault(&pair->owner, back.region_id, back.base, PAGE, 0, NULL));
	EXPECT_EQ(0, np_read(&pair->owner, 0, PAGE, np_read_addr(&back, 0), back.read_key));
	EXPECT_EQ(-1, np_differs(pair->owner.buf, PAGE, 5));
	EXPECT_EQ(0, np_release(&pair->peer, event.hold_id));
	/* Regions of one end mean nothing at the other. */
	EXPECT_EQ(-ENOENT, np_fault(&pair->owner, pair->info.region_id, pair->info.base, PAGE, 0,
				    NULL));
	EXPECT_EQ(-ENOENT, np_release(&pair->owner, event.hold_id));
	EXPECT_EQ(0, ibv_dereg_mr(mr));
}

TEST_F(proto, both_ends_may_be_on_one_port)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_region_info info;
	struct rdma_np_event event;
	struct np_end near;

	ASSERT_EQ(0, np_open(&near, NP_OWNER_DEV, PAGE));
	ASSERT_EQ(0, np_qp_reset(pair->owner.qp));
	ASSERT_EQ(0, np_connect(&pair->owner, &near));
	ASSERT_EQ(0, np_resolve(&near, pair->mr->rkey, &info));
	EXPECT_EQ(RDMA_NP_OK, np_fault(&near, info.region_id, info.base, 3 * PAGE, RDMA_NP_FAULT_HOLD,
				  &event));
	EXPECT_EQ(0, np_read(&near, 0, PAGE, np_read_addr(&info, 0), info.read_key));
	EXPECT_EQ(-1, np_differs(near.buf, PAGE, 0));
	EXPECT_EQ(0, np_release(&near, event.hold_id));
	EXPECT_EQ(0, ibv_dereg_mr(pair->mr));
	EXPECT_EQ(1, np_wait_event(&near, RDMA_NP_EVENT_REGION_GONE, &event, NP_WAIT_MS));
	EXPECT_EQ(0, np_forget(&near, info.region_id));
}

TEST_F(proto, hold_of_one_qp_is_nobody_elses)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_region_info info;
	struct rdma_np_event event;
	struct np_end other, third;

	ASSERT_EQ(0, np_open(&other, NP_OWNER_DEV, 0));
	ASSERT_EQ(0, np_open(&third, NP_PEER_DEV, PAGE));
	ibv_destroy_qp(other.qp);
	other.qp = np_make_qp(&pair->owner, pair->owner.pd);
	ASSERT_NE(NULL, other.qp);
	ASSERT_EQ(0, np_connect(&other, &third));
	ASSERT_EQ(0, np_resolve(&third, pair->mr->rkey, &info));
	ASSERT_EQ(0, np_pair_resolve(pair));

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_HOLD, &event));
	EXPECT_EQ(-ENOENT, np_release(&third, event.hold_id));
	EXPECT_EQ(0, np_release(&pair->peer, event.hold_id));
	EXPECT_EQ(-ENOENT, np_release(&pair->peer, event.hold_id));
}

/* --- many at once -------------------------------------------------------------------- */

#define MANY	16

TEST_F(proto, many_qps_fault_at_once_and_each_gets_its_own_events)
{
	struct np_pair *pair = &self->pair;
	struct np_end near[MANY], far[MANY];
	unsigned int seen[MANY] = {};
	struct rdma_np_region_info info;

	for (int i = 0; i < MANY; i++) {
		ASSERT_EQ(0, np_open(&near[i], NP_OWNER_DEV, 0));
		ASSERT_EQ(0, np_open(&far[i], NP_PEER_DEV, 0));
		ibv_destroy_qp(near[i].qp);
		near[i].qp = np_make_qp(&pair->owner, pair->owner.pd);
		ASSERT_NE(NULL, near[i].qp);
		ASSERT_EQ(0, np_connect(&near[i], &far[i]));
		ASSERT_EQ(0, np_resolve(&far[i], pair->mr->rkey, &info));
	}
	for (int round = 0; round < 8; round++) {
		for (int i = 0; i < MANY; i++) {
			struct rdma_np_range range = {
				info.base + (round * MANY + i) * PAGE, 4 * PAGE
			};

			ASSERT_EQ(0, np_fault_start(&far[i], info.region_id, 0, i << 8 | round,
						    &range, 1));
		}
	}
	for (int i = 0; i < MANY; i++) {
		for (int round = 0; round < 8; round++) {
			struct rdma_np_event event;

			ASSERT_EQ(1, np_next_event(&far[i], &event, NP_WAIT_MS));
			EXPECT_EQ(RDMA_NP_EVENT_FAULT, event.type);
			EXPECT_TRUE(event.status == RDMA_NP_OK || event.status == RDMA_NP_BUSY);
			EXPECT_EQ(i, event.cookie >> 8);
			EXPECT_EQ(0, seen[i] & 1 << (event.cookie & 0xff));
			seen[i] |= 1 << (event.cookie & 0xff);
		}
		EXPECT_EQ(0xff, seen[i]);
	}
}

TEST_F(proto, ranges_of_one_fault_are_all_served)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_range ranges[RDMA_NP_MAX_RANGES];
	struct rdma_np_event event;

	ASSERT_EQ(0, np_pair_resolve(pair));
	for (int i = 0; i < RDMA_NP_MAX_RANGES; i++)
		ranges[i] = (struct rdma_np_range){ pair->info.base + 4 * i * PAGE + 7, PAGE };
	ASSERT_EQ(0, np_fault_start(&pair->peer, pair->info.region_id, RDMA_NP_FAULT_WRITE, 1, ranges,
				    RDMA_NP_MAX_RANGES));
	ASSERT_EQ(1, np_next_event(&pair->peer, &event, NP_WAIT_MS));
	EXPECT_EQ(RDMA_NP_OK, event.status);
	/* The first range touches two pages, and the words are of these. */
	EXPECT_EQ(2, event.nr_words);
	EXPECT_TRUE(np_writable(event.words[0]));
	EXPECT_TRUE(np_writable(event.words[1]));
	for (int i = 0; i < 4 * RDMA_NP_MAX_RANGES; i++)
		EXPECT_EQ(i % 4 < 2, np_writable(np_pair_word(pair, i * PAGE)));
}

TEST_F(proto, words_of_an_event_are_those_of_the_table)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(0, np_pair_resolve(pair));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, (RDMA_NP_EVENT_WORDS + 3) * PAGE, 0, &event));
	EXPECT_EQ(RDMA_NP_EVENT_WORDS, event.nr_words);
	for (int i = 0; i < RDMA_NP_EVENT_WORDS; i++) {
		EXPECT_TRUE(np_readable(event.words[i]));
		EXPECT_EQ(event.words[i], np_pair_word(pair, i * PAGE));
	}
	/* Asking again for what is there changes nothing. */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, 0, &event));
	EXPECT_EQ(1, event.nr_words);
	EXPECT_EQ(event.words[0], np_pair_word(pair, 0));
}

TEST_HARNESS_MAIN
