// SPDX-License-Identifier: GPL-2.0
/*
 * What arrives from the wire: messages between kernels, forged with raw MADs as a
 * hostile kernel could send them. Cut at each length, with each field at its edges,
 * again, late, out of order, from another port, and at random beside true traffic.
 *
 * What was obeyed shows in the region's count of holds: each forged FAULT asks for one.
 * The kernel that is told of a hold it has not asked for gives it back. True FAULTs of
 * another region tell when all that was sent before has been served.
 */
#include <endian.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "np_harness.h"
#include "np_message.h"

/* --- a connection, and who forges messages of its peer's kernel ------------------------------ */

/* Of the pairs of this test, which all have other QPs; found once, in learn(). */
static struct known {
	uint32_t src, dst;
	uint64_t secret;
} known[8];

static uint64_t secret_of(struct np_pair *pair)
{
	for (unsigned int i = 0; i < 8; i++)
		if (known[i].src == pair->peer.qp->qp_num && known[i].dst == pair->owner.qp->qp_num)
			return known[i].secret;
	return 0;
}

/* Whatever the peer's kernel knows, a hostile one knows as well. */
static int learn(struct np_pair *pair)
{
	unsigned int i = 0;

	while (known[i].src)
		i++;
	known[i].src = pair->peer.qp->qp_num;
	known[i].dst = pair->owner.qp->qp_num;
	return message_secret(&pair->peer, pair->peer.qp, pair->owner.qp->qp_num,
			      pair->info.region_id, pair->info.base, &known[i].secret);
}

FIXTURE(wire) {
	struct np_pair pair;
	struct port peer;	/* of the peer's host, to the owner's */
	struct port owner;	/* of the owner's, to itself */
	struct np_pair fence;	/* the same QPs, another region */
	uint64_t tid;
};

FIXTURE_SETUP(wire)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, np_pair_open(pair));
	ASSERT_EQ(0, np_pair_register(pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(pair));
	self->fence = *pair;
	ASSERT_EQ(0, np_pair_register(&self->fence, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&self->fence));
	ASSERT_EQ(0, learn(pair));
	ASSERT_EQ(0, port_open(&self->peer, NP_PEER_DEV, pair->owner.lid));
	ASSERT_EQ(0, port_open(&self->owner, NP_OWNER_DEV, pair->owner.lid));
	self->tid = 1000;
}

FIXTURE_TEARDOWN_PARENT(wire)
{
	NP_CHECK_USAGE(&self->pair.before);
}

static struct message header(struct np_pair *pair, unsigned int type, uint64_t tid)
{
	return (struct message){
		.version = VERSION,
		.type = type,
		.src_qpn = htobe32(pair->peer.qp->qp_num),
		.dst_qpn = htobe32(pair->owner.qp->qp_num),
		.incarnation = htobe64(0x4e50),
		.tid = htobe64(tid),
		.secret = type == RESOLVE ? 0 : secret_of(pair),
	};
}

static struct message make_fault(struct np_pair *pair, unsigned int lane, uint64_t tid)
{
	struct message m = header(pair, FAULT, tid);

	m.length = htobe16(16 + 16);
	m.fault.region_id = htobe64(pair->info.region_id);
	m.fault.flags = htobe32(RDMA_NP_FAULT_HOLD);
	m.fault.lane = htobe16(lane);
	m.fault.nr_ranges = htobe16(1);
	m.fault.ranges[0].addr = htobe64(pair->info.base);
	m.fault.ranges[0].length = htobe64(PAGE);
	return m;
}

static uint64_t holds(struct np_pair *pair)
{
	struct rdma_np_mr_info info;

	return np_query_mr(pair->mr, &info) ? ~0ULL : info.holds;
}

static uint64_t held(struct np_pair *pair)
{
	struct rdma_np_mr_info info;

	return np_query_mr(pair->mr, &info) ? ~0ULL : info.held_pages;
}

/*
 * A true FAULT of a region that nothing else asks for, behind all that was sent
 * before: MADs are received in order. They may be lost, so it is repeated. Returns
 * true when its hold was granted.
 */
static bool fence(struct np_pair *pair, struct port *port, uint64_t *tid)
{
	struct message m = make_fault(pair, LANES - 1, ++*tid);
	uint64_t before = holds(pair), deadline = np_now_ms() + NP_WAIT_MS;

	for (unsigned int n = 0; np_now_ms() < deadline; n++) {
		if (n % 128 == 0 && send_message(port, &m))
			return false;
		if (holds(pair) > before)
			return true;
		np_pause();
	}
	return false;
}

#define FENCE()	ASSERT_TRUE(fence(&self->fence, &self->peer, &self->tid))

/* With a fence now and then so that nothing is lost for want of room. */
#define SEND_FROM(port, m)								\
	do {										\
		ASSERT_EQ(0, send_message(&self->port, m));				\
		if (self->port.tid % 64 == 0)						\
			FENCE();							\
	} while (0)

/*
 * Exactly @want holds were granted for what was sent. A FAULT that was wrongly obeyed
 * may take a little longer than the first true one.
 */
#define EXPECT_OBEYED(want, ...)							\
	do {									\
		uint64_t want_ = (want);						\
										\
		for (int n_ = 0; n_ < 2; n_++) {				\
			FENCE();							\
			ASSERT_TRUE(np_wait_until(!held(&self->fence)));		\
		}								\
		ASSERT_TRUE(np_wait_until(holds(&self->pair) >= want_ &&		\
					  !held(&self->pair))) TH_LOG(__VA_ARGS__);	\
		EXPECT_EQ(want_, holds(&self->pair)) TH_LOG(__VA_ARGS__);	\
	} while (0)

TEST_F(wire, fault_of_the_peers_kernel_is_obeyed_once_however_often_it_comes)
{
	struct np_pair *pair = &self->pair;
	struct message m = make_fault(pair, 5, 100), old = make_fault(pair, 5, 99);
	uint64_t before = holds(pair);

	for (int i = 0; i < 20; i++)
		SEND_FROM(peer, &m);
	EXPECT_OBEYED(before + 1, "replayed");
	/* Older ones of the lane are late copies. */
	before = holds(pair);
	for (int i = 0; i < 20; i++) {
		SEND_FROM(peer, &old);
		SEND_FROM(peer, &m);
	}
	EXPECT_OBEYED(before, "out of order");
}

TEST_F(wire, message_cut_at_any_length_is_not_obeyed)
{
	struct np_pair *pair = &self->pair;
	uint64_t before = holds(pair);

	for (unsigned int length = 0; length < 2 * BODY; length++) {
		struct message m = make_fault(pair, length % 16, ++self->tid);

		if (length == 32)
			continue;
		m.length = htobe16(length);
		SEND_FROM(peer, &m);
	}
	/* And with as many ranges as the length says, of which some are empty. */
	for (unsigned int nr = 2; nr < 12; nr++) {
		struct message m = make_fault(pair, nr, ++self->tid);

		m.length = htobe16(16 + 16 * nr);
		m.fault.nr_ranges = htobe16(nr);
		SEND_FROM(peer, &m);
	}
	EXPECT_OBEYED(before, "cut");
}

TEST_F(wire, message_with_a_senseless_field_is_not_obeyed)
{
	struct np_pair *pair = &self->pair;
	uint64_t before = holds(pair), end = pair->info.base + NP_DATA_LEN;
	unsigned int sent = 0;

#define SEND(change)									\
	do {									\
		struct message m = make_fault(pair, sent % 16, ++self->tid);	\
										\
		change;								\
		sent++;								\
		SEND_FROM(peer, &m);						\
	} while (0)

	for (unsigned int v = 0; v < 256; v++) {
		if (v != VERSION)
			SEND(m.version = v);
		if (v != FAULT)
			SEND(m.type = v);
		if (v)
			SEND(m.flags = v);
		if (v)
			SEND(m.status = v);
	}
	for (unsigned int bit = 0; bit < 64; bit++) {
		if (bit < 16) {
			SEND(m.fault.nr_ranges ^= 1U << bit);
		}
		if (bit < 32) {
			SEND(m.reserved ^= 1U << bit);
			/* Another QP, of nobody or of somebody who is not connected to it. */
			SEND(m.src_qpn ^= 1U << bit);
			SEND(m.dst_qpn ^= 1U << bit);
			SEND(m.fault.flags |= htobe32(bit < 3 ? 8 : 1U << bit));
		}
		SEND(m.fault.region_id ^= 1ULL << bit);
		SEND(m.secret ^= 1ULL << bit);
	}
	SEND(m.secret = 0);
	for (unsigned int bit = 24; bit < 32; bit++)
		SEND(m.ud_qpn = htobe32(1U << bit));
	for (unsigned int lane = LANES; lane < 1 << 16; lane = lane * 2 + 1)
		SEND(m.fault.lane = htobe16(lane));
	SEND(m.tid = 0);
	/* Each device counts its QPs by itself, so the two may have one number. */
	if (pair->owner.qp->qp_num != pair->peer.qp->qp_num) {
		SEND(m.src_qpn = m.dst_qpn);
		SEND(m.dst_qpn = m.src_qpn);
	}
	SEND(m.dst_qpn = 0);
	SEND(m.dst_qpn = htobe32(1));
	/* A lease that is no hold. */
	SEND(m.fault.flags = htobe32(RDMA_NP_FAULT_LEASE));
	SEND(m.fault.region_id = 0);
	SEND(m.fault.ranges[0].length = 0);
	SEND(m.fault.ranges[0].length = htobe64(UINT64_MAX));
	SEND(m.fault.ranges[0].length = htobe64((RDMA_NP_MAX_PAGES + 1) * PAGE));
	SEND(m.fault.ranges[0].addr = htobe64(pair->info.base - 1));
	SEND(m.fault.ranges[0].addr = htobe64(end));
	SEND(m.fault.ranges[0].addr = htobe64(end - PAGE + 1));
	SEND(m.fault.ranges[0].addr = htobe64(UINT64_MAX));
	SEND(m.fault.ranges[0].addr = htobe64(-(uint64_t)PAGE));
	SEND(m.fault.ranges[0].addr = 0);
#undef SEND
	EXPECT_OBEYED(before, "of %u", sent);
}

/* Of before the newest RESOLVE: it says until when it is true. */
TEST_F(wire, late_copy_of_forget_does_not_undo_a_newer_resolve)
{
	struct np_pair *pair = &self->pair;
	struct message m;

	for (unsigned int i = 0; i < 20; i++) {
		m = header(pair, FORGET, ++self->tid);
		m.length = htobe16(16);
		m.forget.region_id = htobe64(pair->info.region_id);
		m.forget.seq = htobe64(i);
		ASSERT_EQ(0, send_message(&self->peer, &m));
		ASSERT_TRUE(fence(pair, &self->peer, &self->tid));
	}
	ASSERT_TRUE(np_wait_until(!held(pair)));
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, PAGE, PAGE, RDMA_NP_FAULT_WRITE, NULL));
}

/* Another owner and peer, in PDs of their own. */
static int make_other(struct np_pair *other)
{
	int ret = np_open(&other->owner, NP_OWNER_DEV, PAGE);

	ret = ret ?: np_open(&other->peer, NP_PEER_DEV, PAGE);
	ret = ret ?: np_connect(&other->owner, &other->peer);
	ret = ret ?: np_pair_register(other, NP_RIGHTS);
	ret = ret ?: np_pair_resolve(other);
	return ret ?: learn(other);
}

/* The same bytes, which are obeyed if they come from where they should. */
TEST_F(wire, message_from_another_port_is_not_obeyed)
{
	struct np_pair *pair = &self->pair;
	uint64_t before = holds(pair);
	struct message m;

	for (unsigned int i = 0; i < 50; i++) {
		m = make_fault(pair, i % 16, ++self->tid);
		SEND_FROM(owner, &m);
	}
	EXPECT_OBEYED(before, "from the owner's port");
	/* RESOLVE, too, is for whom it is: no keys for those who cannot use them. */
	m = header(pair, RESOLVE, ++self->tid);
	m.length = htobe16(sizeof(m.resolve));
	m.resolve.rkey = htobe32(pair->mr->rkey);
	SEND_FROM(owner, &m);
	/* FORGET, as if the peer had sent it: the peer goes on with its keys. */
	m = header(pair, FORGET, ++self->tid);
	m.length = htobe16(16);
	m.forget.region_id = htobe64(pair->info.region_id);
	m.forget.seq = htobe64(UINT64_MAX);
	SEND_FROM(owner, &m);
	EXPECT_OBEYED(before, "FORGET from the owner's port");
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, PAGE, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	EXPECT_EQ(0, np_pair_read(pair, PAGE, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 1));
}

/*
 * A RESOLVE in the peer's name with a tid beyond all of its own: if it were obeyed, the
 * peer's FORGET would be taken for a late copy.
 */
TEST_F(wire, resolve_from_another_port_does_not_outlive_forget)
{
	struct np_pair *pair = &self->pair;
	uint64_t deadline, before;

	for (unsigned int i = 0; i < 20; i++) {
		struct message m = header(pair, RESOLVE, UINT64_MAX - i);

		m.length = htobe16(sizeof(m.resolve));
		m.resolve.rkey = htobe32(pair->mr->rkey);
		SEND_FROM(owner, &m);
	}
	/* What the peer asks for is obeyed until it forgets the region ... */
	ASSERT_TRUE(fence(pair, &self->peer, &self->tid));
	ASSERT_TRUE(fence(pair, &self->peer, &self->tid));
	ASSERT_TRUE(np_wait_until(!held(pair)));
	ASSERT_EQ(0, np_forget(&pair->peer, pair->info.region_id));
	/* ... and soon after that not any more. */
	deadline = np_now_ms() + NP_WAIT_MS;
	do {
		struct message m = make_fault(pair, 5, ++self->tid);

		ASSERT_GT(deadline, np_now_ms()) TH_LOG("obeyed after FORGET");
		before = holds(pair);
		ASSERT_EQ(0, send_message(&self->peer, &m));
		for (int n = 0; n < 2; n++) {
			FENCE();
			ASSERT_TRUE(np_wait_until(!held(&self->fence)));
		}
		ASSERT_TRUE(np_wait_until(!held(pair)));
	} while (holds(pair) != before);
	/* It may have been lost once, but not for ever. */
	for (unsigned int i = 0; i < 20; i++) {
		struct message m = make_fault(pair, i % 16, ++self->tid);

		ASSERT_EQ(0, send_message(&self->peer, &m));
	}
	FENCE();
	FENCE();
	EXPECT_EQ(before, holds(pair));
}

/* Whose id it is, is not enough: the QP's own PD must have been given it. */
TEST_F(wire, fault_does_not_reach_a_region_of_another_pd)
{
	struct np_pair *pair = &self->pair, other = {};
	uint64_t before = holds(pair);
	struct message m;

	ASSERT_EQ(0, make_other(&other));
	for (unsigned int i = 0; i < 20; i++) {
		m = make_fault(pair, i, ++self->tid);
		m.fault.region_id = htobe64(other.info.region_id);
		m.fault.ranges[0].addr = htobe64(other.info.base);
		SEND_FROM(peer, &m);
	}
	EXPECT_OBEYED(before, "with the id of another PD's region");
	EXPECT_EQ(0, holds(&other));
	/* Through its own QPs it would have been obeyed. */
	EXPECT_TRUE(fence(&other, &self->peer, &self->tid));
	EXPECT_TRUE(np_wait_until(!held(&other)));
}

/* --- what was not asked for -------------------------------------------------------------------- */

TEST_F(wire, answers_that_nobody_asked_for_change_nothing)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	struct port to_peer;
	uint64_t deadline;
	int told;

	ASSERT_EQ(0, port_open(&to_peer, NP_OWNER_DEV, pair->peer.lid));
	for (unsigned int type = 0; type <= RECALL + 1; type++) {
		for (unsigned int status = 0; status < 13; status++) {
			for (unsigned int length = 0; length <= BODY; length += 8) {
				struct message m = {
					.version = VERSION,
					.type = type,
					.flags = ANSWER,
					.secret = type == RESOLVE ? 0 : secret_of(pair),
					.status = status < 11 ? status : 0x80 + status - 11,
					.length = htobe16(length),
					.src_qpn = htobe32(pair->owner.qp->qp_num),
					.dst_qpn = htobe32(pair->peer.qp->qp_num),
					.tid = htobe64(++self->tid),
				};

				m.faulted.nr_words = htobe32((length - 32) / 8);
				m.faulted.hold_id = htobe64(self->tid);
				ASSERT_EQ(0, send_message(&to_peer, &m));
			}
		}
	}
	/* A region that is said to be gone: the peer is told of those that it knows only. */
	deadline = np_now_ms() + NP_WAIT_MS;
	for (int known = 0; !(told = np_next_event(&pair->peer, &event, known ? 200 : 0)); known = 1) {
		struct message m = {
			.version = VERSION,
			.type = GONE,
			.secret = secret_of(pair),
			.length = htobe16(16),
			.src_qpn = htobe32(pair->owner.qp->qp_num),
			.dst_qpn = htobe32(pair->peer.qp->qp_num),
			.tid = htobe64(++self->tid),
			.forget.region_id = htobe64(pair->info.region_id + 1000 * !known),
		};

		ASSERT_EQ(0, send_message(&to_peer, &m));
		ASSERT_GT(deadline, np_now_ms());
	}
	ASSERT_EQ(1, told);
	EXPECT_EQ(RDMA_NP_EVENT_REGION_GONE, event.type);
	EXPECT_EQ(pair->info.region_id, event.region_id);
	EXPECT_EQ(0, np_next_event(&pair->peer, &event, 0));
	/* It was a lie of the owner's own kernel, and harms only its own region. */
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_HOLD, &event));
	EXPECT_EQ(0, np_release(&pair->peer, event.hold_id));
	EXPECT_TRUE(np_wait_until(!held(pair)));
}

TEST_F(wire, hold_ids_are_not_guessed)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, PAGE, 3 * PAGE, RDMA_NP_FAULT_HOLD, &event));
	for (unsigned int i = 0; i < 256; i++) {
		struct message m = header(pair, RELEASE, ++self->tid);

		m.length = htobe16(8);
		m.hold_id = htobe64(i < 64 ? event.hold_id ^ 1ULL << i : i - 64);
		SEND_FROM(peer, &m);
		/* The right one, but from another port. */
		m.hold_id = htobe64(event.hold_id);
		SEND_FROM(owner, &m);
	}
	/* Not EXPECT_OBEYED(), which waits until nothing is held. */
	FENCE();
	FENCE();
	EXPECT_EQ(3, held(pair));
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	EXPECT_TRUE(np_wait_until(!held(pair)));
}

/* --- who is no kernel ------------------------------------------------------------------------- */

#define TRACING "/sys/kernel/tracing/"
#define EVENT	TRACING "events/nprdma/np_disbelieve/enable"

/* A message from that QP arrived where kernels speak, and was dropped. */
static bool disbelieved(const struct forger *forger, unsigned int type)
{
	char line[512], sender[32], what[32];
	bool found = false;
	FILE *f = fopen(TRACING "trace", "re");

	snprintf(sender, sizeof(sender), " sender=%u\n", forger->qp->qp_num);
	snprintf(what, sizeof(what), " type=%u ", type);
	while (f && !found && fgets(line, sizeof(line), f))
		found = strstr(line, "np_disbelieve") && strstr(line, sender) && strstr(line, what);
	if (f)
		fclose(f);
	return found;
}

/*
 * A process that may set a privileged Q_Key (CAP_NET_RAW does) sends to QP1 and to the
 * kernel's UD QP from a UD QP of its own, on the peer's host, in the name of a QP of
 * somebody else. It even knows the secret, which it could not.
 */
TEST_F(wire, message_from_a_queue_pair_of_user_space_is_not_obeyed)
{
	struct np_pair *pair = &self->pair;
	uint64_t before = holds(pair);
	struct forger mad, quick;
	struct rdma_np_event event;
	struct message m;

	ASSERT_EQ(0, forger_open(&mad, NP_PEER_DEV, pair->owner.lid, QP1_QKEY));
	ASSERT_EQ(0, forger_open(&quick, NP_PEER_DEV, pair->owner.lid, QUICK_QKEY));
	ASSERT_EQ(0, np_write_text(TRACING "trace", ""));
	ASSERT_EQ(0, np_write_text(EVENT, "1"));
	for (unsigned int type = RESOLVE; type <= RECALL; type++) {
		if (type == FAULT) {
			m = make_fault(pair, 3, ++self->tid);
		} else {
			m = header(pair, type, ++self->tid);
			m.length = htobe16(type == RELEASE || type == RECALL ? 8 : 16);
		}
		if (type == RESOLVE)
			m.resolve.rkey = htobe32(pair->mr->rkey);
		if (type == FORGET || type == GONE) {
			m.forget.region_id = htobe64(pair->info.region_id);
			m.forget.seq = htobe64(UINT64_MAX);
		}
		/* Who is believed is told where to answer. */
		m.ud_qpn = htobe32(quick.qp->qp_num);
		m.ud_pkey = 0xffff;
		ASSERT_EQ(0, forge_mad(&mad, &m));
		EXPECT_TRUE(np_wait_until(disbelieved(&mad, type)));
		/* The number of the kernel's QP is small, and nobody's secret. */
		for (uint32_t qpn = 2; qpn < quick.qp->qp_num; qpn++)
			ASSERT_EQ(0, forge_quick(&quick, &m, qpn));
		EXPECT_TRUE(np_wait_until(disbelieved(&quick, type)));
	}
	ASSERT_EQ(0, np_write_text(EVENT, "0"));
	EXPECT_OBEYED(before, "from user space");
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, PAGE, PAGE, RDMA_NP_FAULT_HOLD, &event));
	EXPECT_EQ(0, np_release(&pair->peer, event.hold_id));
	EXPECT_EQ(0, np_pair_read(pair, PAGE, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 1));
}

/*
 * From the right port and from QP1, as from another function of the adapter, which has
 * its LID: it does not know the secret.
 */
TEST_F(wire, message_without_the_secret_is_not_obeyed)
{
	struct np_pair *pair = &self->pair;
	uint64_t before = holds(pair);
	struct message m;

	for (unsigned int i = 0; i < 50; i++) {
		m = make_fault(pair, i % 16, ++self->tid);
		m.secret = i ? m.secret ^ htobe64(i) : 0;
		SEND_FROM(peer, &m);
		m = header(pair, FORGET, ++self->tid);
		m.length = htobe16(16);
		m.secret = i ? m.secret ^ htobe64(i) : 0;
		m.forget.region_id = htobe64(pair->info.region_id);
		m.forget.seq = htobe64(UINT64_MAX);
		SEND_FROM(peer, &m);
	}
	EXPECT_OBEYED(before, "without the secret");
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, PAGE, PAGE, RDMA_NP_FAULT_WRITE, NULL));
}

/* --- at random, beside true traffic --------------------------------------------------------------- */

static uint64_t next_random(uint64_t *seed)
{
	*seed ^= *seed << 13;
	*seed ^= *seed >> 7;
	*seed ^= *seed << 17;
	return *seed;
}

struct storm {
	struct port *ports[2];
	struct np_pair *pair;
	uint64_t seed;
	atomic_ulong sent;
	atomic_bool stop;
	atomic_int err;
};

/* At least so many messages, and so much traffic beside them. */
#define STORM	5000
#define ROUNDS	30

/* True messages with some bytes changed; some of them twice, some from elsewhere. */
static void *storm(void *arg)
{
	struct storm *s = arg;
	uint64_t tid = 1 << 20;

	while (!atomic_load(&s->stop) && !s->err) {
		uint64_t r = next_random(&s->seed);
		struct message m = make_fault(s->pair, r % LANES, ++tid);
		uint8_t *bytes = (uint8_t *)&m;

		m.fault.flags = htobe32(r >> 8 & 3);
		switch (r >> 16 & 7) {
		case 0:
			m = header(s->pair, RELEASE, tid);
			m.length = htobe16(8);
			m.hold_id = next_random(&s->seed);
			break;
		case 1:
			m = header(s->pair, RESOLVE, tid);
			m.length = htobe16(sizeof(m.resolve));
			m.resolve.rkey = r & 1 << 20 ? htobe32(s->pair->mr->rkey) : r;
			break;
		case 2:
			/* Of a QP that is nobody's peer. */
			m.dst_qpn = next_random(&s->seed) & 0xffffff00;
			break;
		case 3:
			m.incarnation = next_random(&s->seed);
			break;
		case 4:
			m.flags = ANSWER;
			break;
		}
		for (unsigned int n = r >> 32 & 3; n; n--) {
			uint64_t at = next_random(&s->seed);

			/* Not FORGET of the true keys: that is the peer's kernel's right. */
			bytes[at % SIZE] = at >> 32;
		}
		if (m.type == FORGET)
			m.type = FAULT;
		for (unsigned int n = (r >> 40 & 7) == 7 ? 3 : 1; n && !s->err; n--, s->sent++)
			s->err = send_message(s->ports[r >> 48 & 1], &m);
	}
	return NULL;
}

TEST_F(wire, forged_messages_at_random_leave_true_traffic_alone)
{
	struct np_pair *pair = &self->pair, other = {};
	const char *chosen = getenv("NPRDMA_SEED");
	struct storm s = {
		.ports = { &self->peer, &self->owner },
		.pair = pair,
		.seed = chosen ? strtoull(chosen, NULL, 0) : (np_now_ms() * 0x9e3779b97f4a7c15ULL) | 1,
	};
	unsigned long rounds = 0;
	uint64_t seed = s.seed;
	pthread_t thread;

	TH_LOG("NPRDMA_SEED=%#lx", seed);
	/* True traffic of others. */
	ASSERT_EQ(0, np_open(&other.owner, NP_OWNER_DEV, PAGE));
	ASSERT_EQ(0, np_open(&other.peer, NP_PEER_DEV, NP_BUF_LEN));
	ASSERT_EQ(0, np_connect(&other.owner, &other.peer));
	ASSERT_EQ(0, np_pair_register(&other, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&other));
	ASSERT_EQ(0, pthread_create(&thread, NULL, storm, &s));
	while ((atomic_load(&s.sent) < STORM || rounds < ROUNDS) && !atomic_load(&s.err)) {
		size_t page = rounds % NP_DATA_PAGES, off = page * PAGE;

		ASSERT_EQ(0, np_read_proven(&other.peer, &other.info, 0, off, PAGE));
		ASSERT_EQ(-1, np_differs(other.peer.buf, PAGE, page));
		ASSERT_EQ(0, np_write_proven(&other.peer, &other.info, 0, off, PAGE));
		rounds++;
	}
	atomic_store(&s.stop, true);
	ASSERT_EQ(0, pthread_join(thread, NULL));
	EXPECT_EQ(0, s.err);
	TH_LOG("%lu messages, %lu rounds of traffic", atomic_load(&s.sent), rounds);
	for (size_t i = 0; i < NP_DATA_PAGES; i++)
		EXPECT_EQ(-1, np_differs(other.data + i * PAGE, PAGE, i));
	/* No forged message writes memory, whatever it asked for. */
	for (size_t i = 0; i < NP_DATA_PAGES; i++)
		EXPECT_EQ(-1, np_differs(pair->data + i * PAGE, PAGE, i));
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	/* A hold whose RELEASE was lost in the storm lasts as long as the QP at most. */
	ASSERT_EQ(0, np_qp_reset(pair->owner.qp));
	EXPECT_TRUE(np_wait_until(!held(pair)));
}

TEST_HARNESS_MAIN
