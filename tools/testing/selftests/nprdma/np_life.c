// SPDX-License-Identifier: GPL-2.0
/*
 * The end of things: regions, queue pairs, channels and processes that go away
 * while others use them. Always an error that says so, never silence, never
 * another region's memory, and nothing left behind.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>

#include "np_harness.h"

FIXTURE(life) {
	struct np_pair pair;
};

FIXTURE_SETUP(life)
{
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
}

FIXTURE_TEARDOWN_PARENT(life)
{
	NP_CHECK_USAGE(&self->pair.before);
}

/* --- regions ------------------------------------------------------------------------ */

TEST_F(life, dead_region_tells_its_peers_and_answers_no_more)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	ASSERT_EQ(1, np_wait_event(&pair->peer, RDMA_NP_EVENT_REGION_GONE, &event, NP_WAIT_MS));
	EXPECT_EQ(pair->info.region_id, event.region_id);
	EXPECT_EQ(RDMA_NP_GONE, np_pair_fault(pair, 0, PAGE, 0, NULL));
	/* Until the peer forgets them, its keys reach nothing, and fail no QP. */
	ASSERT_EQ(0, np_pair_read(pair, 0, NP_DATA_LEN));
	EXPECT_TRUE(np_all(pair->peer.buf, NP_DATA_LEN, pair->info.signature));
	np_fill(pair->peer.buf, PAGE, 77);
	ASSERT_EQ(0, np_pair_write(pair, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 0));
	/* Told once. */
	EXPECT_EQ(0, np_next_event(&pair->peer, &event, 0));
	EXPECT_EQ(0, np_forget(&pair->peer, pair->info.region_id));
	EXPECT_EQ(-ENOENT, np_forget(&pair->peer, pair->info.region_id));
	/* Then they die. */
	EXPECT_TRUE(np_wait_until(np_pair_read(pair, 0, 8) == IBV_WC_REM_ACCESS_ERR));
}

/* Although nothing is mapped there any more, which is an error of its own. */
TEST_F(life, fault_on_a_dead_region_without_memory_says_that_it_is_dead)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	ASSERT_EQ(0, munmap(pair->data, NP_DATA_LEN));
	EXPECT_EQ(RDMA_NP_GONE, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
}

TEST_F(life, dead_region_does_not_resolve)
{
	struct rdma_np_region_info info;
	uint32_t rkey = self->pair.mr->rkey;

	ASSERT_EQ(0, ibv_dereg_mr(self->pair.mr));
	EXPECT_EQ(-EACCES, np_resolve(&self->pair.peer, rkey, &info));
}

TEST_F(life, old_keys_never_reach_the_next_region_of_the_buffer)
{
	struct np_pair *pair = &self->pair;

	for (int i = 0; i < 20; i++) {
		struct rdma_np_region_info old = pair->info;

		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
		ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
		pair->mr = ibv_reg_mr(pair->owner.pd, pair->data, NP_DATA_LEN,
				      NP_RIGHTS | NP_UNPINNED);
		ASSERT_NE(NULL, pair->mr);
		ASSERT_EQ(0, np_pair_resolve(pair));
		ASSERT_NE(old.region_id, pair->info.region_id);
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
		/* A peer that has not heard of it yet. */
		ASSERT_EQ(0, np_read(&pair->peer, 0, PAGE, np_read_addr(&old, 0), old.read_key));
		EXPECT_TRUE(np_all(pair->peer.buf, PAGE, old.signature));
		np_fill(pair->peer.buf, PAGE, 77);
		ASSERT_EQ(0, np_write(&pair->peer, 0, PAGE, np_write_addr(&old, 0),
				      old.write_key));
		EXPECT_EQ(-1, np_differs(pair->data, PAGE, 0));
		ASSERT_EQ(0, np_forget(&pair->peer, old.region_id));
	}
}

TEST_F(life, fault_on_a_dead_regions_id_does_not_reach_the_next_one)
{
	struct np_pair *pair = &self->pair;
	uint64_t old = pair->info.region_id;
	struct rdma_np_mr_info info;

	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	pair->mr = ibv_reg_mr(pair->owner.pd, pair->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, pair->mr);
	EXPECT_EQ(RDMA_NP_GONE, np_fault(&pair->peer, old, pair->info.base, PAGE, 0, NULL));
	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_EQ(0, info.resident_pages);
}

TEST_F(life, each_fault_under_way_ends_once_when_the_region_dies)
{
	struct np_pair *pair = &self->pair;

	for (int round = 0; round < 10; round++) {
		struct rdma_np_event event;
		unsigned int sent, answered[16] = {};

		for (sent = 0; sent < 16; sent++) {
			struct rdma_np_range range = {
				.addr = pair->info.base + sent * 32 * PAGE,
				.length = 32 * PAGE,
			};

			ASSERT_EQ(0, np_fault_start(&pair->peer, pair->info.region_id,
						    sent % 2 ? RDMA_NP_FAULT_WRITE : 0, sent, &range,
						    1));
		}
		ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
		for (unsigned int i = 0; i < sent; i++) {
			ASSERT_EQ(1, np_wait_event(&pair->peer, RDMA_NP_EVENT_FAULT, &event,
						   NP_WAIT_MS));
			ASSERT_GT(sent, event.cookie);
			answered[event.cookie]++;
			EXPECT_TRUE(event.status == RDMA_NP_OK || event.status == RDMA_NP_GONE)
				TH_LOG("status %u", event.status);
		}
		for (unsigned int i = 0; i < sent; i++) {
			EXPECT_EQ(1, answered[i]);
		}
		np_forget(&pair->peer, pair->info.region_id);
		ASSERT_EQ(0, np_pair_register(pair, NP_RIGHTS));
		ASSERT_EQ(0, np_pair_resolve(pair));
		while (np_next_event(&pair->peer, &event, 0) > 0) {
			EXPECT_EQ(RDMA_NP_EVENT_REGION_GONE, event.type);
		}
	}
}

TEST_F(life, region_with_a_hold_can_die)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	long before = np_pinned();

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 8 * PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(before + 8, np_pinned());
	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	/* At once: an application may use its memory for something else now. */
	EXPECT_EQ(before, np_pinned());
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
	EXPECT_TRUE(np_all(pair->peer.buf, PAGE, pair->info.signature));
	np_release(&pair->peer, event.hold_id);
}

TEST_F(life, hold_that_fails_after_pinning_pins_nothing)
{
	struct np_pair *pair = &self->pair;
	long before = np_pinned();

	/* Who pins for write needs no right to read, and who looks for a device does. */
	ASSERT_EQ(0, mprotect(pair->data, 8 * PAGE, PROT_WRITE));
	EXPECT_EQ(RDMA_NP_ADDRESS,
		  np_pair_fault(pair, 0, 8 * PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, NULL));
	EXPECT_EQ(before, np_pinned());
	ASSERT_EQ(0, mprotect(pair->data, 8 * PAGE, PROT_READ | PROT_WRITE));
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 8 * PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, NULL));
	EXPECT_EQ(before + 8, np_pinned());
}

/*
 * A pinned page is the parent's, and the child has a copy from the beginning: so who
 * holds it goes on with it, and neither end sees the other's stores.
 */
TEST_F(life, fork_leaves_held_pages_to_the_parent)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	int go[2], status;
	pid_t pid;
	char c;

	ASSERT_EQ(0, pipe2(go, O_CLOEXEC));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 2 * PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event));
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid) {
		/* What was there at the time of fork() */
		close(go[1]);
		if (read(go[0], &c, 1) != 0 || np_differs(pair->data, PAGE, 0) != -1 ||
		    np_differs(pair->data + PAGE, PAGE, 1) != -1)
			_exit(1);
		_exit(0);
	}
	/* By the leaf alone, as an atomic does it */
	np_fill(pair->peer.buf, PAGE, 1000);
	ASSERT_EQ(0, np_write(&pair->peer, 0, PAGE, np_write_addr(&pair->info, 0),
			      pair->info.write_key));
	/* A READ behind it means that it is done */
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 1000));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 1000));
	np_fill(pair->data + PAGE, PAGE, 1001);
	ASSERT_EQ(0, np_pair_read(pair, PAGE, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 1001));
	close(go[1]);
	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	EXPECT_EQ(0, status);
	close(go[0]);
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
}

/* --- protection domains ---------------------------------------------------------------- */

TEST_F(life, pd_can_go_right_after_mr_and_qp)
{
	struct np_end *owner = &self->pair.owner;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(&self->pair, 0, PAGE, RDMA_NP_FAULT_HOLD, NULL));
	/* The peer does not acknowledge anything. */
	EXPECT_EQ(0, ibv_dereg_mr(self->pair.mr));
	EXPECT_EQ(0, ibv_dereg_mr(owner->mr));
	EXPECT_EQ(0, ibv_destroy_qp(owner->qp));
	EXPECT_EQ(0, ibv_dealloc_pd(owner->pd));
}

TEST_F(life, pd_can_go_right_after_qp_and_mr)
{
	struct np_end *owner = &self->pair.owner;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(&self->pair, 0, PAGE, RDMA_NP_FAULT_HOLD, NULL));
	EXPECT_EQ(0, ibv_destroy_qp(owner->qp));
	EXPECT_EQ(0, ibv_dereg_mr(self->pair.mr));
	EXPECT_EQ(0, ibv_dereg_mr(owner->mr));
	EXPECT_EQ(0, ibv_dealloc_pd(owner->pd));
}

TEST_F(life, pd_with_a_region_is_busy)
{
	struct np_end *owner = &self->pair.owner;

	EXPECT_EQ(0, ibv_dereg_mr(owner->mr));
	EXPECT_EQ(0, ibv_destroy_qp(owner->qp));
	EXPECT_NE(0, ibv_dealloc_pd(owner->pd));
	EXPECT_EQ(0, ibv_dereg_mr(self->pair.mr));
	EXPECT_EQ(0, ibv_dealloc_pd(owner->pd));
}

/* --- queue pairs and channels -------------------------------------------------------------- */

/* Starts @n FAULTs of 8 pages each. */
static int start_faults(struct np_pair *pair, unsigned int n)
{
	for (unsigned int i = 0; i < n; i++) {
		struct rdma_np_range range = {
			.addr = pair->info.base + i * 8 * PAGE,
			.length = 8 * PAGE,
		};
		int ret = np_fault_start(&pair->peer, pair->info.region_id, RDMA_NP_FAULT_WRITE, i,
					 &range, 1);

		if (ret)
			return ret;
	}
	return 0;
}

TEST_F(life, too_many_faults_are_refused_and_the_others_served)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	struct rdma_np_query query;

	ASSERT_EQ(0, np_query(pair->peer.ctx, &query));
	/* Nothing reaches the owner, so that none is answered before the last is asked */
	ASSERT_EQ(0, np_hca_set(NP_OWNER_DEV, NP_HCA_LOSS, 1));
	EXPECT_EQ(0, start_faults(pair, query.max_outstanding));
	EXPECT_EQ(-EBUSY, start_faults(pair, 1));
	ASSERT_EQ(0, np_hca_set(NP_OWNER_DEV, NP_HCA_LOSS, 0));
	for (unsigned int i = 0; i < query.max_outstanding; i++) {
		ASSERT_EQ(1, np_wait_event(&pair->peer, RDMA_NP_EVENT_FAULT, &event, NP_WAIT_MS));
		EXPECT_EQ(RDMA_NP_OK, event.status);
	}
	EXPECT_EQ(0, start_faults(pair, 1));
	EXPECT_EQ(1, np_wait_event(&pair->peer, RDMA_NP_EVENT_FAULT, &event, NP_WAIT_MS));
}

TEST_F(life, destroyed_qp_ends_its_faults_once_each)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(0, start_faults(pair, 16));
	ASSERT_EQ(0, ibv_destroy_qp(pair->peer.qp));
	pair->peer.qp = NULL;
	for (int i = 0; i < 16; i++) {
		ASSERT_EQ(1, np_wait_event(&pair->peer, RDMA_NP_EVENT_FAULT, &event, NP_WAIT_MS));
		EXPECT_TRUE(event.status == RDMA_NP_OK || event.status == RDMA_NP_QP)
			TH_LOG("status %u", event.status);
	}
	EXPECT_EQ(0, np_next_event(&pair->peer, &event, 0));
}

TEST_F(life, channel_can_be_closed_with_faults_under_way)
{
	struct np_pair *pair = &self->pair;

	for (int i = 0; i < 10; i++) {
		ASSERT_EQ(0, start_faults(pair, 16));
		ASSERT_EQ(0, close(pair->peer.channel));
		pair->peer.channel = np_channel(pair->peer.ctx);
		ASSERT_LE(0, pair->peer.channel);
		/* The QP is not to be blamed: with another channel it works. */
		ASSERT_EQ(0, np_pair_resolve(pair));
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, 0, NULL));
	}
}

TEST_F(life, reset_qp_forgets_what_it_resolved)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	long before = np_pinned();

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(0, np_reconnect(&pair->owner, &pair->peer));
	EXPECT_EQ(before, np_pinned());
	EXPECT_EQ(-ENOENT, np_pair_fault(pair, 0, PAGE, 0, NULL));
	ASSERT_EQ(0, np_pair_resolve(pair));
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, 0, NULL));
}

TEST_F(life, owners_qp_in_error_releases_holds_at_once)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct np_pair *pair = &self->pair;
	long before = np_pinned();

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 8 * PAGE, RDMA_NP_FAULT_HOLD, NULL));
	ASSERT_EQ(before + 8, np_pinned());
	ASSERT_EQ(0, ibv_modify_qp(pair->owner.qp, &attr, IBV_QP_STATE));
	EXPECT_EQ(before, np_pinned());
}

TEST_F(life, peers_qp_in_error_releases_holds)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct np_pair *pair = &self->pair;
	long before = np_pinned();

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 8 * PAGE, RDMA_NP_FAULT_HOLD, NULL));
	ASSERT_EQ(0, ibv_modify_qp(pair->peer.qp, &attr, IBV_QP_STATE));
	EXPECT_TRUE(np_wait_until(np_pinned() == before));
}

/* Longer than a slow kernel takes to grant a hold and take it back. */
#define HOLD_MS 3000U

FIXTURE(hold_time) {
	struct np_pair pair;
};

FIXTURE_SETUP(hold_time)
{
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
	ASSERT_EQ(0, np_set_hold_ms(HOLD_MS));
}

FIXTURE_TEARDOWN_PARENT(hold_time)
{
	EXPECT_EQ(0, np_set_hold_ms(NP_HOLD_MS));
	NP_CHECK_USAGE(&self->pair.before);
}

/* A second QP of the owner's PD, @other, connected to a second peer, @third. */
static int second_peer(struct np_pair *pair, struct np_end *other, struct np_end *third)
{
	int ret = np_open(other, NP_OWNER_DEV, 0);

	if (!ret)
		ret = np_open(third, NP_PEER_DEV, PAGE);
	if (ret)
		return ret;
	ibv_destroy_qp(other->qp);
	other->qp = np_make_qp(&pair->owner, pair->owner.pd);
	return other->qp ? np_connect(other, third) : -errno;
}

TEST_F(hold_time, hold_not_given_back_ends_its_qp_and_then_the_pin)
{
	struct np_pair *pair = &self->pair;
	struct np_end other, third;
	struct rdma_np_region_info info;
	uint64_t begin, lasted;
	struct rdma_np_event event;
	long before;
	int ret;

	/* Gives back what it holds. */
	ASSERT_EQ(0, second_peer(pair, &other, &third));
	ASSERT_EQ(0, np_resolve(&third, pair->mr->rkey, &info));

	before = np_pinned();
	begin = np_now_ms();
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(RDMA_NP_OK, np_fault(&third, info.region_id, info.base + 2 * PAGE, PAGE,
				  RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(0, np_release(&third, event.hold_id));
	ASSERT_TRUE(np_wait_until(np_pinned() == before));
	/* Not before its time; how long after it depends on the machine. */
	lasted = np_now_ms() - begin;
	TH_LOG("%lu ms", (unsigned long)lasted);
	EXPECT_LE(HOLD_MS, lasted);
	EXPECT_EQ(IBV_QPS_ERR, np_qp_state(pair->owner.qp));
	EXPECT_EQ(IBV_QPS_RTS, np_qp_state(other.qp));
	/* The one who kept it hears of it... */
	ret = np_pair_read(pair, 0, PAGE);
	EXPECT_LT(0, ret) TH_LOG("%d", ret);
	/* ... and the other one does not. */
	EXPECT_EQ(RDMA_NP_OK, np_fault(&third, info.region_id, info.base, PAGE, 0, NULL));
	ASSERT_EQ(0, np_read(&third, 0, PAGE, np_read_addr(&info, 0), info.read_key));
	EXPECT_EQ(-1, np_differs(third.buf, PAGE, 0));
}

TEST_F(hold_time, hold_given_back_in_time_ends_nothing)
{
	struct np_pair *pair = &self->pair;
	uint64_t end = np_now_ms() + 2 * HOLD_MS;
	struct rdma_np_event event;

	while (np_now_ms() < end) {
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_HOLD, &event));
		ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	}
	EXPECT_EQ(IBV_QPS_RTS, np_qp_state(pair->owner.qp));
	EXPECT_EQ(0, np_pair_read(pair, 0, PAGE));
}

/* The owner's QP gives up, because the public key has no rights. */
static int fail_owners_qp(struct np_pair *pair)
{
	return np_read(&pair->peer, 0, 8, pair->info.base, pair->mr->rkey);
}

TEST_F(hold_time, qp_that_fails_by_itself_gives_back_all_it_had)
{
	struct np_pair *pair = &self->pair;
	struct np_end other, third;
	long before;

	/* It is not the time-out that ends the hold. */
	ASSERT_EQ(0, np_set_hold_ms(NP_HOLD_MS));
	ASSERT_EQ(0, second_peer(pair, &other, &third));
	before = np_pinned();
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, NULL));
	ASSERT_EQ(before + 4, np_pinned());
	ASSERT_EQ(IBV_WC_REM_ACCESS_ERR, fail_owners_qp(pair));
	EXPECT_TRUE(np_wait_until(np_pinned() == before));
	EXPECT_EQ(IBV_QPS_ERR, np_qp_state(pair->owner.qp));
	EXPECT_EQ(IBV_QPS_RTS, np_qp_state(other.qp));
	/* It was the only one that was given the keys: they die with the region. */
	ASSERT_EQ(0, np_read(&third, 0, PAGE, np_read_addr(&pair->info, 0), pair->info.read_key));
	ASSERT_EQ(0, ibv_dereg_mr(pair->mr));
	EXPECT_TRUE(np_wait_until(np_read(&third, 0, PAGE, np_read_addr(&pair->info, 0),
					  pair->info.read_key) == IBV_WC_REM_ACCESS_ERR));
}

TEST_F(hold_time, qp_that_failed_keeps_what_it_is_given_when_connected_anew)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(0, np_set_hold_ms(NP_HOLD_MS));
	for (int i = 0; i < 20; i++) {
		ASSERT_EQ(IBV_WC_REM_ACCESS_ERR, fail_owners_qp(pair));
		/* The device's event may come in at any time from here on. */
		ASSERT_EQ(0, np_reconnect(&pair->owner, &pair->peer));
		ASSERT_EQ(0, np_pair_resolve(pair));
		for (int j = 0; j < 8; j++) {
			ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_HOLD, &event));
			ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
		}
	}
}

/* --- processes ------------------------------------------------------------------------------ */

/* The owner is a process of its own, and the peer is this one; or the other way. */
struct hello {
	struct np_addr addr;
	uint32_t rkey;
};

FIXTURE(apart) {
	struct np_usage before;
	struct np_end end;
	struct rdma_np_region_info info;
	pid_t pid;
	int sock;
};

static bool say(int sock, const struct hello *h)
{
	return send(sock, h, sizeof(*h), MSG_NOSIGNAL) == sizeof(*h);
}

static bool hear(int sock, struct hello *h)
{
	return recv(sock, h, sizeof(*h), MSG_WAITALL) == sizeof(*h);
}

/* Never returns. Registers, connects, then waits to be killed or told to go. */
static void owner_process(int sock, bool leave_fds)
{
	struct hello mine = {}, theirs;
	struct np_pair pair = {};
	char c;

	if (np_open(&pair.owner, NP_OWNER_DEV, 0) || np_pair_register(&pair, NP_RIGHTS))
		_exit(1);
	mine.addr = np_address(&pair.owner);
	mine.rkey = pair.mr->rkey;
	if (!say(sock, &mine) || !hear(sock, &theirs) ||
	    np_qp_connect(pair.owner.qp, theirs.addr))
		_exit(2);
	if (leave_fds && !fork()) {
		/* Has the file descriptors, not the memory. */
		munmap(pair.data, NP_DATA_LEN);
		while (read(sock, &c, 1) == 1)
			;
		_exit(0);
	}
	/* Not before: we may be killed from now on. */
	if (!say(sock, &mine))
		_exit(2);
	for (;;) {
		/* Move the memory, so that there is something to wait for. */
		madvise(pair.data, NP_DATA_LEN, MADV_DONTNEED);
		if (recv(sock, &c, 1, leave_fds ? 0 : MSG_DONTWAIT) == 0)
			_exit(3);
	}
}

/* 0, or -errno; the peer's side of owner_process(). */
static int meet_owner(struct np_end *peer, pid_t *pid, int *sock, struct rdma_np_region_info *info,
		      bool leave_fds)
{
	struct hello mine = {}, theirs;
	int pair[2], ret;
	pid_t child;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
		return -errno;
	child = np_fork();
	if (child < 0)
		return -errno;
	if (!child) {
		close(pair[0]);
		owner_process(pair[1], leave_fds);
	}
	/* Fixtures are shared between processes: the child would write its 0. */
	*pid = child;
	close(pair[1]);
	*sock = pair[0];
	ret = np_open(peer, NP_PEER_DEV, NP_BUF_LEN);
	if (ret)
		return ret;
	mine.addr = np_address(peer);
	if (!hear(*sock, &theirs))
		return -EPIPE;
	ret = np_qp_connect(peer->qp, theirs.addr);
	if (ret)
		return ret;
	if (!say(*sock, &mine) || !hear(*sock, &theirs))
		return -EPIPE;
	return np_resolve(peer, theirs.rkey, info);
}

FIXTURE_SETUP(apart)
{
	ASSERT_EQ(0, np_usage_start(&self->before));
}

FIXTURE_TEARDOWN_PARENT(apart)
{
	NP_CHECK_USAGE(&self->before);
}

TEST_F(apart, killed_owner_ends_faults_and_traffic_with_an_error)
{
	for (int round = 0; round < 5; round++) {
		uint64_t kill_at;
		int ret = 0, faults = 0, status = RDMA_NP_OK;

		ASSERT_EQ(0, meet_owner(&self->end, &self->pid, &self->sock, &self->info, false));
		kill_at = np_now_ms() + 100 * round;
		while (!ret && status == RDMA_NP_OK) {
			struct rdma_np_range range = {
				.addr = self->info.base + faults % 64 * 8 * PAGE,
				.length = 8 * PAGE,
			};
			struct rdma_np_event event;

			if (np_now_ms() >= kill_at && self->pid) {
				/* In the middle of one. */
				ASSERT_EQ(0, np_fault_start(&self->end, self->info.region_id,
							    RDMA_NP_FAULT_WRITE, 0, &range, 1));
				ASSERT_EQ(0, kill(self->pid, SIGKILL));
				ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
				self->pid = 0;
				ASSERT_EQ(1, np_wait_event(&self->end, RDMA_NP_EVENT_FAULT, &event,
							   NP_WAIT_MS));
			}
			status = np_fault_once(&self->end, self->end.qp, self->info.region_id,
					       range.addr, range.length, faults++ % 2, &event);
			if (status == RDMA_NP_BUSY)
				status = RDMA_NP_OK;
			ret = np_read(&self->end, 0, 8 * PAGE, self->info.read_addr,
				      self->info.read_key);
			ASSERT_GT(kill_at + 2 * NP_WAIT_MS, np_now_ms());
		}
		EXPECT_EQ(0, self->pid);
		EXPECT_LE(0, ret) TH_LOG("%s", strerror(-ret));
		EXPECT_LE(0, status) TH_LOG("%s", strerror(-status));
		EXPECT_EQ(0, np_close(&self->end));
		close(self->sock);
	}
}

TEST_F(apart, owner_without_memory_is_gone_although_its_qp_lives)
{
	struct np_end *peer = &self->end;

	ASSERT_EQ(0, meet_owner(peer, &self->pid, &self->sock, &self->info, true));
	ASSERT_EQ(RDMA_NP_OK, np_fault(peer, self->info.region_id, self->info.base, 4 * PAGE,
				  RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(0, kill(self->pid, SIGKILL));
	ASSERT_EQ(self->pid, waitpid(self->pid, NULL, 0));
	/* Its child has the QP still, so READs succeed, and find nothing. */
	ASSERT_EQ(0, np_read(peer, 0, NP_DATA_LEN, self->info.read_addr, self->info.read_key));
	EXPECT_TRUE(np_all(peer->buf, NP_DATA_LEN, self->info.signature));
	EXPECT_EQ(RDMA_NP_GONE, np_fault(peer, self->info.region_id, self->info.base, PAGE, 0, NULL));
	/* The child goes, too, or its QP would outlive the test. */
	shutdown(self->sock, SHUT_RDWR);
}

TEST_F(apart, killed_peer_gives_back_its_holds)
{
	struct hello mine = {}, theirs;
	struct rdma_np_mr_info info = {};
	struct np_pair pair = {};
	int sock[2];
	char c = 0;
	pid_t pid;

	ASSERT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sock));
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid) {
		struct rdma_np_event event;

		if (!hear(sock[1], &theirs) || np_open(&pair.peer, NP_PEER_DEV, PAGE) ||
		    np_qp_connect(pair.peer.qp, theirs.addr))
			_exit(1);
		mine.addr = np_address(&pair.peer);
		if (!say(sock[1], &mine) || recv(sock[1], &c, 1, 0) != 1 ||
		    np_resolve(&pair.peer, theirs.rkey, &pair.info) ||
		    np_pair_fault(&pair, 0, 16 * PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event) ||
		    !say(sock[1], &mine))
			_exit(2);
		for (;;)
			np_pair_fault(&pair, 0, 64 * PAGE, 0, &event);
	}
	ASSERT_EQ(0, np_open(&pair.owner, NP_OWNER_DEV, 0));
	ASSERT_EQ(0, np_pair_register(&pair, NP_RIGHTS));
	mine.addr = np_address(&pair.owner);
	mine.rkey = pair.mr->rkey;
	ASSERT_TRUE(say(sock[0], &mine));
	ASSERT_TRUE(hear(sock[0], &theirs));
	ASSERT_EQ(0, np_qp_connect(pair.owner.qp, theirs.addr));
	ASSERT_EQ(1, send(sock[0], &c, 1, 0));
	ASSERT_TRUE(hear(sock[0], &theirs));
	ASSERT_EQ(0, np_query_mr(pair.mr, &info));
	EXPECT_EQ(16, info.held_pages);
	ASSERT_EQ(0, kill(pid, SIGKILL));
	ASSERT_EQ(pid, waitpid(pid, NULL, 0));
	EXPECT_TRUE(np_wait_until(!np_query_mr(pair.mr, &info) && !info.held_pages))
		TH_LOG("%lu pages held", (unsigned long)info.held_pages);
}

/* Many objects between its QP and its hold, so that there is time between their ends. */
#define YOUNGER_MRS	500

/* Never returns. Posts a SEND from unpinned memory, which nobody receives yet. */
static void sender_process(int sock)
{
	struct hello mine = {}, theirs;
	struct rdma_np_hold_info hold;
	struct np_pair pair = {};
	struct ibv_sge sge;
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	char c;

	if (np_open(&pair.owner, NP_OWNER_DEV, PAGE) || np_pair_register(&pair, NP_RIGHTS))
		_exit(1);
	mine.addr = np_address(&pair.owner);
	if (!say(sock, &mine) || !hear(sock, &theirs) ||
	    np_qp_connect(pair.owner.qp, theirs.addr))
		_exit(2);
	for (int i = 0; i < YOUNGER_MRS; i++)
		if (!ibv_reg_mr(pair.owner.pd, pair.owner.buf, PAGE, IBV_ACCESS_LOCAL_WRITE))
			_exit(3);
	if (np_hold(pair.mr, (uintptr_t)pair.data, PAGE, 0, &hold) < 0)
		_exit(4);
	sge = (struct ibv_sge){ .addr = hold.addr, .length = PAGE, .lkey = hold.lkey };
	if (ibv_post_send(pair.owner.qp, &wr, &bad) || !say(sock, &mine))
		_exit(5);
	for (;;)
		if (recv(sock, &c, 1, 0) <= 0)
			_exit(0);
}

/*
 * The kernel takes the youngest objects of a process away first, and that is the hold.
 * Its QP executes what was posted under it until its own end.
 */
TEST_F(apart, killed_sender_sends_what_it_meant_or_nothing)
{
	unsigned int received = 0, round;

	/* Which of the two it is is a race, and it is about the first. */
	for (round = 0; round < 5 || (!received && round < 100); round++) {
		struct np_end *peer = &self->end;
		struct hello mine = {}, theirs;
		struct ibv_recv_wr wr, *bad;
		struct ibv_wc wc = {};
		struct ibv_sge sge;
		bool ended = false;
		int sock[2], n;
		long pinned;
		pid_t pid;

		ASSERT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sock));
		pid = np_fork();
		ASSERT_LE(0, pid);
		if (!pid)
			sender_process(sock[1]);
		close(sock[1]);
		ASSERT_EQ(0, np_open(peer, NP_PEER_DEV, NP_BUF_LEN));
		mine.addr = np_address(peer);
		ASSERT_TRUE(hear(sock[0], &theirs));
		ASSERT_EQ(0, np_qp_connect(peer->qp, theirs.addr));
		ASSERT_TRUE(say(sock[0], &mine));
		ASSERT_TRUE(hear(sock[0], &theirs));

		pinned = np_pinned();
		ASSERT_EQ(0, kill(pid, SIGKILL));
		ASSERT_TRUE(np_wait_until(np_pinned() < pinned - 8));
		sge = (struct ibv_sge){
			.addr = (uintptr_t)peer->buf, .length = PAGE, .lkey = peer->mr->lkey
		};
		wr = (struct ibv_recv_wr){ .sg_list = &sge, .num_sge = 1 };
		ASSERT_EQ(0, ibv_post_recv(peer->qp, &wr, &bad));
		do {
			ended = waitpid(pid, NULL, WNOHANG) == pid;
			n = ibv_poll_cq(peer->cq, 1, &wc);
		} while (!n && !ended);
		if (n && wc.status == IBV_WC_SUCCESS) {
			received++;
			EXPECT_EQ(-1, np_differs(peer->buf, PAGE, 0));
		}
		if (!ended) {
			ASSERT_EQ(pid, waitpid(pid, NULL, 0));
		}
		EXPECT_EQ(0, np_close(peer));
		close(sock[0]);
	}
	TH_LOG("received %u of %u times", received, round);
	EXPECT_LT(0, received);
}

TEST_F(apart, owner_that_exits_under_traffic_leaves_nothing)
{
	int ret;

	ASSERT_EQ(0, meet_owner(&self->end, &self->pid, &self->sock, &self->info, false));
	for (int i = 0; i < 64; i++) {
		ASSERT_EQ(RDMA_NP_OK, np_fault(&self->end, self->info.region_id,
					  self->info.base + i * 8 * PAGE, 8 * PAGE,
					  RDMA_NP_FAULT_WRITE | (i % 4 ? 0 : RDMA_NP_FAULT_HOLD), NULL));
	}
	shutdown(self->sock, SHUT_RDWR);
	do {
		ret = np_read(&self->end, 0, NP_DATA_LEN, self->info.read_addr,
			      self->info.read_key);
	} while (!ret);
	EXPECT_LT(0, ret) TH_LOG("%s", strerror(-ret));
	EXPECT_EQ(self->pid, waitpid(self->pid, &ret, 0));
	EXPECT_EQ(3, WEXITSTATUS(ret));
}

TEST_HARNESS_MAIN
