// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of the protocol between kernels: messages and hostile bytes,
 * FAULT executed at most once, transactions answered, repeated, given up and
 * killed, the bookkeeping of keys and holds, and what those are answered whom
 * nobody obeys.
 *
 * The asking side runs for real, on a peer without a device: what it sends ends
 * in a list of the test.
 */
#include <kunit/test.h>
#include <linux/prandom.h>

#include "../np_region.h"
#include "np_fake_peer.h"

MODULE_IMPORT_NS(EXPORTED_FOR_KUNIT_TESTING);

/* --- messages ------------------------------------------------------------------- */

static struct np_msg np_sample(u8 type, bool answer)
{
	struct np_msg msg = {
		.type = type,
		.answer = answer,
		.ud_pkey = 0xa5a6,
		.ud_qpn = 0x515253,
		.src_qpn = 0x123456,
		.dst_qpn = 0xabcdef,
		.tid = 0x1122334455667788,
		.secret = 0x99aabbccddeeff00,
	};
	unsigned int i;

	if (type == NP_MSG_RESOLVE) {
		msg.secret = 0;
		msg.nonce = 0x0123456789abcdef;
	}
	if (answer && type == NP_MSG_RESOLVE)
		msg.given = 0xfedcba9876543210;
	if (answer && type == NP_MSG_RESOLVE) {
		msg.region = (struct np_resolve) {
			.id = 7, .base = 0x7f0000001000, .length = 0x5000,
			.access = 0x40f, .table_key = 0x3333,
			.read_key = 0x1111, .write_key = 0x2222,
			.read_addr = 0x100000001000,
			.write_addr = 0x200000001000,
			.table_addr = 0x100000200000,
			.signature = 0xdeadbeefcafef00d,
			.page_shift = RDMA_NP_PAGE_SHIFT,
			.unit_shift = NP_UNIT_SHIFT,
			.read_order = RDMA_NP_READ_IN_ORDER,
			.max_pages = 0x123456, .max_ranges = 0x1234,
			.lanes = 0x4321,
		};
	} else if (answer && type == NP_MSG_FAULT) {
		msg.faulted.hold_id = 99;
		msg.faulted.nr_words = RDMA_NP_EVENT_WORDS;
		for (i = 0; i < RDMA_NP_EVENT_WORDS; i++)
			msg.faulted.words[i] = i << 2 | 3;
	} else if (type == NP_MSG_RESOLVE) {
		msg.rkey = 0x87654321;
	} else if (type == NP_MSG_FAULT && !answer) {
		msg.fault.region_id = 7;
		msg.fault.flags = RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD;
		msg.fault.lane = NP_LANES - 1;
		msg.fault.nr_ranges = RDMA_NP_MAX_RANGES;
		for (i = 0; i < RDMA_NP_MAX_RANGES; i++)
			msg.fault.ranges[i] = (struct rdma_np_range) {
				.addr = 0x1000 * i + 5, .length = 4096,
			};
	} else if (type == NP_MSG_RELEASE && !answer) {
		msg.hold_id = 0x99;
	} else if (!answer) {
		msg.forget.region_id = 7;
		msg.forget.seq = 0x55;
	}
	return msg;
}

static void np_msg_survives_the_wire(struct kunit *test)
{
	struct np_msg in, out;
	struct np_wire wire;
	int answer;
	u8 type;

	for (type = 1; type <= NP_MSG_LAST; type++) {
		for (answer = 0; answer < 2; answer++) {
			in = np_sample(type, answer);
			np_msg_encode(&in, &wire);
			memset(&out, 0, sizeof(out));
			KUNIT_ASSERT_EQ(test, np_msg_decode(&wire, &out), 0);
			KUNIT_EXPECT_MEMEQ(test, &in, &out, sizeof(in));
		}
	}
}

static void np_msg_length_must_fit_the_type(struct kunit *test)
{
	struct np_msg in, out;
	struct np_wire wire;
	unsigned int other;
	int answer;
	u16 length;
	u8 type;

	for (type = 1; type <= NP_MSG_LAST; type++) {
		for (answer = 0; answer < 2; answer++) {
			in = np_sample(type, answer);
			np_msg_encode(&in, &wire);
			length = be16_to_cpu(wire.hdr.length);
			for (other = 0; other <= U16_MAX; other++) {
				if (other == length)
					continue;
				wire.hdr.length = cpu_to_be16(other);
				KUNIT_EXPECT_EQ_MSG(test,
						    np_msg_decode(&wire, &out),
						    -EBADMSG,
						    "type %u answer %d length %u",
						    type, answer, other);
			}
		}
	}
}

static void np_msg_header_is_checked(struct kunit *test)
{
	struct np_msg msg = np_sample(NP_MSG_RELEASE, false), out;
	struct np_wire good, wire;

	np_msg_encode(&msg, &good);
#define NP_EXPECT_BAD(err, change)					\
	do {								\
		wire = good;						\
		change;							\
		KUNIT_EXPECT_EQ(test, np_msg_decode(&wire, &out), err);	\
	} while (0)
	NP_EXPECT_BAD(0, ({}));
	NP_EXPECT_BAD(-EINVAL, wire.hdr.tid = 0);
	NP_EXPECT_BAD(-EINVAL, wire.hdr.src_qpn = cpu_to_be32(1 << 24));
	NP_EXPECT_BAD(-EINVAL, wire.hdr.dst_qpn = cpu_to_be32(1 << 24));
	NP_EXPECT_BAD(-EINVAL, wire.hdr.ud_qpn = cpu_to_be32(1 << 24));
	NP_EXPECT_BAD(-EBADMSG, wire.hdr.reserved = cpu_to_be32(1));
	NP_EXPECT_BAD(-EPROTO, wire.hdr.version = NP_WIRE_VERSION + 1);
	NP_EXPECT_BAD(-EPROTO, wire.hdr.version = 0);
	NP_EXPECT_BAD(-EBADMSG, wire.hdr.type = 0);
	NP_EXPECT_BAD(-EBADMSG, wire.hdr.type = NP_MSG_LAST + 1);
	NP_EXPECT_BAD(-EBADMSG, wire.hdr.flags = 2);
	NP_EXPECT_BAD(-EBADMSG, wire.hdr.status = RDMA_NP_BUSY);
	/* An answer to RELEASE has no body */
	NP_EXPECT_BAD(-EBADMSG, wire.hdr.flags = NP_WIRE_ANSWER);
	NP_EXPECT_BAD(0, (wire.hdr.flags = NP_WIRE_ANSWER,
			  wire.hdr.length = 0));
	NP_EXPECT_BAD(-EBADMSG, (wire.hdr.flags = NP_WIRE_ANSWER,
				 wire.hdr.length = 0,
				 wire.hdr.status = RDMA_NP_PROTO + 1));
	/* Only FAULTs are at work, and only of them there are too many */
	NP_EXPECT_BAD(-EBADMSG, (wire.hdr.flags = NP_WIRE_ANSWER,
				 wire.hdr.length = 0,
				 wire.hdr.status = NP_WIRE_WORKING));
	NP_EXPECT_BAD(-EBADMSG, (wire.hdr.flags = NP_WIRE_ANSWER,
				 wire.hdr.length = 0,
				 wire.hdr.status = NP_WIRE_FULL));
	NP_EXPECT_BAD(0, (wire.hdr.type = NP_MSG_FAULT,
			  wire.hdr.flags = NP_WIRE_ANSWER,
			  wire.hdr.length = 0,
			  wire.hdr.status = NP_WIRE_FULL));
	NP_EXPECT_BAD(0, (wire.hdr.type = NP_MSG_FAULT,
			  wire.hdr.flags = NP_WIRE_ANSWER,
			  wire.hdr.length = 0,
			  wire.hdr.status = NP_WIRE_WORKING));

	msg = np_sample(NP_MSG_FAULT, false);
	np_msg_encode(&msg, &good);
	NP_EXPECT_BAD(0, ({}));
	NP_EXPECT_BAD(-EBADMSG, wire.fault.lane = cpu_to_be16(NP_LANES));
	NP_EXPECT_BAD(-EBADMSG, wire.fault.nr_ranges = 0);
	NP_EXPECT_BAD(-EBADMSG, wire.fault.nr_ranges = cpu_to_be16(7));
	NP_EXPECT_BAD(-EBADMSG, wire.fault.nr_ranges = cpu_to_be16(0xffff));
	NP_EXPECT_BAD(-EBADMSG, wire.fault.flags = cpu_to_be32(4));
	/* Flags of ours alone, such as NP_FAULT_PRESENT */
	NP_EXPECT_BAD(-EBADMSG, wire.fault.flags = cpu_to_be32(0x100));
	NP_EXPECT_BAD(-EBADMSG, wire.fault.ranges[7].length = 0);
	NP_EXPECT_BAD(-EBADMSG,
		      wire.fault.ranges[0].length = cpu_to_be64(U64_MAX));
	NP_EXPECT_BAD(-EBADMSG,
		      wire.fault.ranges[3].addr = cpu_to_be64(U64_MAX - 1));

	msg = np_sample(NP_MSG_FAULT, true);
	np_msg_encode(&msg, &good);
	NP_EXPECT_BAD(-EBADMSG, wire.faulted.nr_words =
				cpu_to_be32(RDMA_NP_EVENT_WORDS + 1));
	NP_EXPECT_BAD(-EBADMSG, wire.faulted.nr_words = cpu_to_be32(U32_MAX));
	NP_EXPECT_BAD(-EBADMSG, wire.faulted.reserved = cpu_to_be32(1));

	msg = np_sample(NP_MSG_RESOLVE, true);
	np_msg_encode(&msg, &good);
	NP_EXPECT_BAD(-EBADMSG, wire.region.length = 0);
	NP_EXPECT_BAD(-EBADMSG, wire.region.base = cpu_to_be64(U64_MAX - 7));
	NP_EXPECT_BAD(-EBADMSG, wire.region.reserved = 1);
	NP_EXPECT_BAD(-EBADMSG, wire.region.reserved2 = cpu_to_be32(1));
	NP_EXPECT_BAD(-EBADMSG, wire.region.reserved3[0] = cpu_to_be64(1));
	NP_EXPECT_BAD(-EBADMSG, wire.region.reserved3[1] = cpu_to_be64(1));
	/* Whether they can be used from here is not the decoder's to say */
	NP_EXPECT_BAD(0, wire.region.page_shift = 16);
	NP_EXPECT_BAD(-EBADMSG, wire.region.secret = 0);
	NP_EXPECT_BAD(-EBADMSG, wire.hdr.secret = cpu_to_be64(1));
	/* A refusal has the nonce only */
	NP_EXPECT_BAD(-EBADMSG, wire.hdr.status = RDMA_NP_ACCESS);
	NP_EXPECT_BAD(-EBADMSG, (wire.hdr.status = NP_WIRE_WORKING,
				 wire.hdr.length = cpu_to_be16(8)));
	NP_EXPECT_BAD(0, (wire.hdr.status = RDMA_NP_ACCESS,
			  wire.hdr.length = cpu_to_be16(8)));

	msg = np_sample(NP_MSG_RESOLVE, false);
	np_msg_encode(&msg, &good);
	NP_EXPECT_BAD(0, ({}));
	NP_EXPECT_BAD(-EBADMSG, wire.hdr.secret = cpu_to_be64(1));
	NP_EXPECT_BAD(-EBADMSG, wire.resolve.reserved = cpu_to_be32(1));
#undef NP_EXPECT_BAD
}

/* Byte for byte, so that it does not follow from the order of the CPU that ran it */
static void np_msg_bytes_are_of_no_cpu(struct kunit *test)
{
	static const u8 body[] = {
		0, 0, 0, 0, 0, 0, 0, 7,				/* id */
		0, 0, 0x7f, 0, 0, 0, 0x10, 0,			/* base */
		0, 0, 0, 0, 0, 0, 0x50, 0,			/* length */
		0, 0, 0x10, 0, 0, 0, 0x10, 0,			/* read_addr */
		0, 0, 0x20, 0, 0, 0, 0x10, 0,			/* write_addr */
		0, 0, 0x10, 0, 0, 0x20, 0, 0,			/* table_addr */
		0xde, 0xad, 0xbe, 0xef, 0xca, 0xfe, 0xf0, 0x0d,	/* signature */
		0, 0, 4, 0x0f,					/* access */
		0, 0, 0x33, 0x33, 0, 0, 0x11, 0x11, 0, 0, 0x22, 0x22, /* keys */
		0xfe, 0xdc, 0xba, 0x98, 0x76, 0x54, 0x32, 0x10,	/* secret */
		0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef,	/* nonce */
		12, 6, 1, 0,			/* shifts, read_order */
		0, 0x12, 0x34, 0x56,		/* max_pages */
		0x12, 0x34, 0x43, 0x21,		/* max_ranges, lanes */
		0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
	};
	struct np_msg msg = np_sample(NP_MSG_RESOLVE, true);
	struct np_wire wire;

	np_msg_encode(&msg, &wire);
	KUNIT_ASSERT_EQ(test, sizeof(body), be16_to_cpu(wire.hdr.length));
	KUNIT_EXPECT_MEMEQ(test, body, wire.body, sizeof(body));
}

static void np_region_of_another_kind_is_refused(struct kunit *test)
{
	struct np_msg msg = np_sample(NP_MSG_RESOLVE, true);
	struct np_resolve info;

#define NP_EXPECT_ACCEPT(yes, change)					\
	do {								\
		info = msg.region;					\
		change;							\
		KUNIT_EXPECT_EQ(test, yes, !np_resolve_accept(&info));	\
	} while (0)
	NP_EXPECT_ACCEPT(false, info.page_shift = 11);
	NP_EXPECT_ACCEPT(false, info.page_shift = 13);
	NP_EXPECT_ACCEPT(false, info.page_shift = 16);
	NP_EXPECT_ACCEPT(false, info.unit_shift = 2);
	NP_EXPECT_ACCEPT(true, info.unit_shift = 3);
	NP_EXPECT_ACCEPT(false, info.unit_shift = 7);
	NP_EXPECT_ACCEPT(false, info.max_pages = 0);
	NP_EXPECT_ACCEPT(false, info.max_ranges = 0);
	NP_EXPECT_ACCEPT(false, info.lanes = 0);

	/* Both ends' bounds count */
	NP_EXPECT_ACCEPT(true, ({}));
	KUNIT_EXPECT_EQ(test, info.max_pages, RDMA_NP_MAX_PAGES);
	KUNIT_EXPECT_EQ(test, info.max_ranges, RDMA_NP_MAX_RANGES);
	KUNIT_EXPECT_EQ(test, info.lanes, NP_LANES);
	KUNIT_EXPECT_EQ(test, info.read_order, RDMA_NP_READ_IN_ORDER);
	NP_EXPECT_ACCEPT(true, (info.max_pages = 1, info.max_ranges = 1,
				info.lanes = 1));
	KUNIT_EXPECT_EQ(test, info.max_pages, 1);
	KUNIT_EXPECT_EQ(test, info.max_ranges, 1);
	KUNIT_EXPECT_EQ(test, info.lanes, 1);

	/* What is not known is no licence */
	NP_EXPECT_ACCEPT(true, info.read_order = RDMA_NP_READ_OUT_OF_ORDER);
	KUNIT_EXPECT_EQ(test, info.read_order, RDMA_NP_READ_OUT_OF_ORDER);
	NP_EXPECT_ACCEPT(true, info.read_order = RDMA_NP_READ_OUT_OF_ORDER + 1);
	KUNIT_EXPECT_EQ(test, info.read_order, RDMA_NP_READ_UNKNOWN);
#undef NP_EXPECT_ACCEPT
}

/* Whatever bytes come, what is accepted is within bounds and means itself. */
static void np_msg_garbage_is_refused_or_sane(struct kunit *test)
{
	struct rnd_state rnd;
	struct np_wire wire, again;
	unsigned int i, accepted = 0;
	struct np_msg msg;

	prandom_seed_state(&rnd, 42);
	for (i = 0; i < 200000; i++) {
		struct np_msg base = np_sample(1 + i % NP_MSG_LAST, i & 8);
		unsigned int flips = 1 + i % 3;

		np_msg_encode(&base, &wire);
		while (flips--)
			((u8 *)&wire)[prandom_u32_state(&rnd) % 96] =
				prandom_u32_state(&rnd);
		memset(&msg, 0, sizeof(msg));
		if (np_msg_decode(&wire, &msg))
			continue;
		accepted++;
		if (msg.type == NP_MSG_FAULT && !msg.answer) {
			KUNIT_ASSERT_LT(test, msg.fault.lane, NP_LANES);
			KUNIT_ASSERT_EQ(test, 0,
					np_ranges_check(msg.fault.ranges,
							msg.fault.nr_ranges,
							msg.fault.flags));
		}
		if (msg.type == NP_MSG_FAULT && msg.answer && !msg.status)
			KUNIT_ASSERT_LE(test, msg.faulted.nr_words,
					RDMA_NP_EVENT_WORDS);
		np_msg_encode(&msg, &again);
		KUNIT_ASSERT_EQ(test, be16_to_cpu(wire.hdr.length),
				be16_to_cpu(again.hdr.length));
		KUNIT_ASSERT_MEMEQ(test, wire.body, again.body,
				   be16_to_cpu(wire.hdr.length));
	}
	/* Or else the test tested nothing */
	KUNIT_EXPECT_GT(test, accepted, 1000);
}

/*
 * The buffer still holds what came before, of another peer: whatever comes on top of
 * that, and however long, nothing of it is taken for a part of the new message.
 */
static void np_quick_message_is_what_arrived(struct kunit *test)
{
	struct np_msg older = np_sample(NP_MSG_FAULT, false), in, out;
	struct np_wire wire;
	unsigned int length;
	u32 cut, own;
	int answer;
	u8 *buf;
	u8 type;

	buf = kunit_kzalloc(test, NP_UD_SIZE, GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, buf);
	for (type = 1; type <= NP_MSG_LAST; type++) {
		for (answer = 0; answer < 2; answer++) {
			in = np_sample(type, answer);
			np_msg_encode(&in, &wire);
			length = sizeof(wire.hdr) +
				 be16_to_cpu(wire.hdr.length);
			/* All that is whole is of the new one, or of its copy */
			memcpy(buf + NP_UD_GRH, &wire, sizeof(wire));
			for (cut = 0; cut <= 2 * NP_UD_SIZE; cut++)
				KUNIT_EXPECT_EQ_MSG(test,
						    np_ud_decode(buf, cut, &out),
						    cut == NP_UD_GRH + length,
						    "type %u answer %d, %u bytes",
						    type, answer, cut);
			KUNIT_EXPECT_FALSE(test,
					   np_ud_decode(buf, U32_MAX, &out));
			/* A header that promises what only the older one has */
			np_msg_encode(&older, &wire);
			memcpy(buf + NP_UD_GRH, &wire, sizeof(wire));
			own = NP_UD_GRH + sizeof(wire.hdr) + 8;
			KUNIT_EXPECT_FALSE(test, np_ud_decode(buf, own, &out));
		}
	}
}

static void np_quick_garbage_is_refused_or_what_arrived(struct kunit *test)
{
	unsigned int i, flips, accepted = 0;
	u8 *buf, *other;
	struct rnd_state rnd;
	struct np_msg a, b;
	struct np_wire wire;
	u32 length;

	buf = kunit_kzalloc(test, NP_UD_SIZE, GFP_KERNEL);
	other = kunit_kzalloc(test, NP_UD_SIZE, GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, buf);
	KUNIT_ASSERT_NOT_NULL(test, other);
	prandom_seed_state(&rnd, 43);
	for (i = 0; i < 100000; i++) {
		struct np_msg base = np_sample(1 + i % NP_MSG_LAST, i & 8);

		np_msg_encode(&base, &wire);
		length = NP_UD_GRH + sizeof(wire.hdr) +
			 be16_to_cpu(wire.hdr.length);
		memcpy(buf + NP_UD_GRH, &wire, sizeof(wire));
		for (flips = i % 3; flips; flips--)
			buf[NP_UD_GRH + prandom_u32_state(&rnd) % 96] =
				prandom_u32_state(&rnd);
		if (i & 16)
			length = prandom_u32_state(&rnd) % (NP_UD_SIZE + 1);
		/* The same, on top of something else */
		prandom_bytes_state(&rnd, other, NP_UD_SIZE);
		memcpy(other, buf, length);
		memset(&a, 0, sizeof(a));
		memset(&b, 0, sizeof(b));
		if (!np_ud_decode(buf, length, &a)) {
			KUNIT_ASSERT_FALSE(test, np_ud_decode(other, length, &b));
			continue;
		}
		accepted++;
		KUNIT_ASSERT_TRUE(test, np_ud_decode(other, length, &b));
		KUNIT_ASSERT_MEMEQ(test, &a, &b, sizeof(a));
	}
	KUNIT_EXPECT_GT(test, accepted, 1000);
}

static void np_ranges_bounds(struct kunit *test)
{
	struct rdma_np_range r[RDMA_NP_MAX_RANGES + 1] = {};
	unsigned int i;

	r[0] = (struct rdma_np_range) { 0x1000, RDMA_NP_MAX_PAGES * 4096 };
	KUNIT_EXPECT_EQ(test, np_ranges_check(r, 1, 0), 0);
	r[0].length++;
	KUNIT_EXPECT_EQ(test, np_ranges_check(r, 1, 0), -EINVAL);
	/* The same length, but it touches one page more */
	r[0] = (struct rdma_np_range) { 0x1001, RDMA_NP_MAX_PAGES * 4096 };
	KUNIT_EXPECT_EQ(test, np_ranges_check(r, 1, 0), -EINVAL);
	r[0] = (struct rdma_np_range) { U64_MAX, 1 };
	KUNIT_EXPECT_EQ(test, np_ranges_check(r, 1, 0), 0);
	r[0] = (struct rdma_np_range) { U64_MAX, 2 };
	KUNIT_EXPECT_EQ(test, np_ranges_check(r, 1, 0), -EINVAL);
	r[0] = (struct rdma_np_range) { 0, U64_MAX };
	KUNIT_EXPECT_EQ(test, np_ranges_check(r, 1, 0), -EINVAL);

	for (i = 0; i <= RDMA_NP_MAX_RANGES; i++)
		r[i] = (struct rdma_np_range) { i * 4096, 64 * 4096 };
	KUNIT_EXPECT_EQ(test, np_ranges_check(r, RDMA_NP_MAX_RANGES, 0), 0);
	KUNIT_EXPECT_EQ(test, np_ranges_check(r, RDMA_NP_MAX_RANGES + 1, 0),
			-EINVAL);
	KUNIT_EXPECT_EQ(test, np_ranges_check(r, 0, 0), -EINVAL);
	r[7].length++;
	KUNIT_EXPECT_EQ(test, np_ranges_check(r, RDMA_NP_MAX_RANGES, 0), -EINVAL);
}

/* --- at most once ------------------------------------------------------------------ */

static void np_lane_serves_each_fault_once(struct kunit *test)
{
	struct np_msg msg = np_sample(NP_MSG_FAULT, false);
	struct np_msg answer = np_sample(NP_MSG_FAULT, true);
	struct np_lane lane = {};

	msg.incarnation = 5;
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_NEW);
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_WORKING);
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_WORKING);

	/* The asker gave it up and asks for something else */
	msg.tid++;
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_BUSY);
	msg.tid--;
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_WORKING);

	np_lane_answer(&lane, &answer);
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_REPLAY);
	KUNIT_EXPECT_MEMEQ(test, &lane.answer, &answer, sizeof(answer));
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_REPLAY);

	msg.tid++;
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_NEW);
	msg.tid--;
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_STALE);
	np_lane_answer(&lane, &answer);
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_STALE);
}

static void np_lane_forgets_an_earlier_boot(struct kunit *test)
{
	struct np_msg msg = np_sample(NP_MSG_FAULT, false);
	struct np_msg answer = np_sample(NP_MSG_FAULT, true);
	struct np_lane lane = {};

	msg.incarnation = 5;
	msg.tid = U64_MAX;
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_NEW);
	msg.incarnation = 6;
	msg.tid = 1;
	/* Not while somebody works in it */
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_BUSY);
	np_lane_answer(&lane, &answer);
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_NEW);
	KUNIT_EXPECT_EQ(test, np_lane_arrive(&lane, &msg), NP_LANE_WORKING);
}

static void np_rtt_stays_in_bounds(struct kunit *test)
{
	static const u64 samples[] = {
		0, 1, 100, 300, 250, U64_MAX, 90, 1000000, 0, 0, 0, 0, 60000,
	};
	struct np_rtt rtt = {};
	unsigned int i, tries;

	KUNIT_EXPECT_EQ(test, np_rtt_timeout(&rtt, 1), NP_RTO_FIRST_US);
	for (i = 0; i < ARRAY_SIZE(samples) * 20; i++) {
		unsigned long last = 0;

		np_rtt_sample(&rtt, samples[i % ARRAY_SIZE(samples)]);
		for (tries = 1; tries < 100; tries++) {
			unsigned long us = np_rtt_timeout(&rtt, tries);

			KUNIT_ASSERT_GE(test, us, NP_RTO_MIN_US);
			KUNIT_ASSERT_LE(test, us, NP_RTO_MAX_US);
			KUNIT_ASSERT_GE(test, us, last);
			last = us;
		}
	}
	/* A steady peer is asked again soon */
	for (i = 0; i < 100; i++)
		np_rtt_sample(&rtt, 200);
	KUNIT_EXPECT_EQ(test, np_rtt_timeout(&rtt, 1), NP_RTO_MIN_US);
}

static void np_addr_only_the_other_end(struct kunit *test)
{
	struct np_addr qp = { .lid = 3 }, mad = { .lid = 3 };

	KUNIT_EXPECT_TRUE(test, np_addr_match(&qp, &mad));
	mad.lid = 4;
	KUNIT_EXPECT_FALSE(test, np_addr_match(&qp, &mad));
	mad.lid = 3;
	mad.grh = true;
	KUNIT_EXPECT_TRUE(test, np_addr_match(&qp, &mad));
	mad.roce = true;
	KUNIT_EXPECT_FALSE(test, np_addr_match(&qp, &mad));

	/* A QP with a GID wants it, and the right LID as well */
	qp = (struct np_addr) { .lid = 3, .grh = true, .gid.raw = { 1 } };
	mad = (struct np_addr) { .lid = 3 };
	KUNIT_EXPECT_FALSE(test, np_addr_match(&qp, &mad));
	mad = qp;
	KUNIT_EXPECT_TRUE(test, np_addr_match(&qp, &mad));
	mad.gid.raw[15] = 1;
	KUNIT_EXPECT_FALSE(test, np_addr_match(&qp, &mad));
	mad = qp;
	mad.lid = 4;
	KUNIT_EXPECT_FALSE(test, np_addr_match(&qp, &mad));

	qp = (struct np_addr) { .roce = true, .grh = true, .gid.raw = { 1 } };
	mad = qp;
	mad.lid = 9;
	KUNIT_EXPECT_TRUE(test, np_addr_match(&qp, &mad));
	mad.grh = false;
	KUNIT_EXPECT_FALSE(test, np_addr_match(&qp, &mad));
	qp.grh = false;
	KUNIT_EXPECT_FALSE(test, np_addr_match(&qp, &mad));
}

/* --- asking -------------------------------------------------------------------------- */

#define NP_TEST_SENT	512U

/* A region of a peer that has the bounds that we have */
static struct np_resolve np_ask_region(u64 id)
{
	return (struct np_resolve) {
		.id = id, .length = 4096,
		.page_shift = RDMA_NP_PAGE_SHIFT, .unit_shift = NP_UNIT_SHIFT,
		.max_pages = RDMA_NP_MAX_PAGES, .max_ranges = RDMA_NP_MAX_RANGES,
		.lanes = NP_LANES,
	};
}

/* What the peer gave in an answer to RESOLVE */
#define NP_TEST_THEIRS	0x7468656972730000

/* A peer without a device, and what was sent to it. */
struct np_ask_test {
	struct np_fake_peer fake;
	bool had_keys;
	unsigned int failed;
	struct np_channel channel;
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

static struct np_ask_test *np_ask_test(struct kunit *test)
{
	return test->priv;
}

static void np_test_sent(struct np_ask_test *t, struct ib_ah *ah,
			 struct np_peer *peer, const struct np_msg *msg)
{
	if (!peer)
		rdma_destroy_ah(ah, RDMA_DESTROY_AH_SLEEPABLE);
	spin_lock(&t->lock);
	if (t->nr_sent < NP_TEST_SENT) {
		t->sent[t->nr_sent] = *msg;
		t->sent_at[t->nr_sent] = jiffies;
	}
	t->nr_sent++;
	spin_unlock(&t->lock);
	wake_up_all(&t->wait);
}

static int np_test_send(struct np_port *port, struct ib_ah *ah,
			u16 pkey_index, struct np_peer *peer,
			const struct np_msg *msg)
{
	struct np_ask_test *t = container_of(port, struct np_ask_test,
					     fake.port);
	struct np_msg answer = {
		.type = NP_MSG_RESOLVE,
		.answer = true,
		.tid = msg->tid,
		.nonce = msg->nonce,
		.given = NP_TEST_THEIRS,
		.region = t->resolves_to,
	};

	np_test_sent(t, ah, peer, msg);
	if (t->resolves_to.id && msg->type == NP_MSG_RESOLVE)
		np_peer_answered(&t->fake.peer, &answer);
	return 0;
}

static int np_test_send_other(struct np_port *port, struct ib_ah *ah,
			      u16 pkey_index, struct np_peer *peer,
			      const struct np_msg *msg)
{
	np_test_sent(container_of(port, struct np_ask_test, other), ah, peer,
		     msg);
	return 0;
}

static void np_test_channel_free(struct np_channel *channel)
{
	container_of(channel, struct np_ask_test, channel)->released = true;
}

static int np_ask_init_test(struct kunit *test)
{
	struct np_ask_test *t = kunit_kzalloc(test, sizeof(*t), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, t);
	test->priv = t;
	spin_lock_init(&t->lock);
	init_waitqueue_head(&t->wait);
	np_channel_init(&t->channel, np_test_channel_free);
	np_fake_peer_init(test, &t->fake);
	t->fake.port.send = np_test_send;
	t->other = t->fake.port;
	t->other.send = np_test_send_other;
	return 0;
}

/* Everything ends, nothing keeps a reference. */
static void np_ask_exit_test(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);

	np_channel_close(&t->channel);
	np_channel_put(&t->channel);
	np_fake_peer_exit(test, &t->fake);
	KUNIT_EXPECT_TRUE(test, t->released);
	KUNIT_EXPECT_EQ(test, t->channel.reserved, 0);
	KUNIT_EXPECT_TRUE(test, bitmap_empty(t->fake.peer.lanes, NP_LANES));
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_kept, 0);
}

/* As if RESOLVE had been answered. */
static void np_bind(struct kunit *test, u64 region_id)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_binding *binding = kzalloc(sizeof(*binding), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, binding);
	binding->channel = np_channel_get(&t->channel);
	binding->region_id = region_id;
	INIT_LIST_HEAD(&binding->ev.entry);
	binding->ev.ev.type = RDMA_NP_EVENT_REGION_GONE;
	binding->ev.ev.region_id = region_id;
	spin_lock(&t->fake.peer.lock);
	np_binding_add(&t->fake.peer, binding);
	spin_unlock(&t->fake.peer.lock);
}

static int np_ask_fault(struct kunit *test, u64 region_id, u64 cookie,
			u32 flags)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_range range = { 0x1000, 4096 };
	struct rdma_np_fault_req req = {
		.region_id = region_id, .cookie = cookie, .flags = flags,
	};

	return np_peer_fault(&t->fake.peer, &t->channel, &req, &range, 1);
}

static void np_answer_request(struct kunit *test, const struct np_msg *request,
			      u8 status, u64 hold_id)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg answer = {
		.type = request->type,
		.answer = true,
		.status = status,
		.tid = request->tid,
		.nonce = request->nonce,
	};

	if (!status && answer.type == NP_MSG_FAULT) {
		answer.faulted.hold_id = hold_id;
		answer.faulted.nr_words = 1;
		answer.faulted.words[0] = 7;
	}
	np_peer_answered(&t->fake.peer, &answer);
}

static void np_answer_to(struct kunit *test, unsigned int nr, u8 status,
			 u64 hold_id)
{
	np_answer_request(test, &np_ask_test(test)->sent[nr], status, hold_id);
}

static void np_fault_has_one_event(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 1, 0), -ENOENT);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);
	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 0xc00c1e, 0), 0);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 1);
	KUNIT_EXPECT_EQ(test, t->sent[0].fault.region_id, 7);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));

	/* The answer to something else */
	t->sent[0].tid--;
	np_answer_to(test, 0, RDMA_NP_OK, 0);
	t->sent[0].tid++;
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));

	np_answer_to(test, 0, RDMA_NP_OK, 0);
	np_answer_to(test, 0, RDMA_NP_OK, 0);
	np_answer_to(test, 0, RDMA_NP_ACCESS, 0);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.type, RDMA_NP_EVENT_FAULT);
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, ev.cookie, 0xc00c1e);
	KUNIT_EXPECT_EQ(test, ev.nr_words, 1);
	KUNIT_EXPECT_EQ(test, le64_to_cpu(ev.words[0]), 7);
	KUNIT_EXPECT_EQ(test, ev.hold_id, 0);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
}

static void np_fault_lanes_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	DECLARE_BITMAP(seen, NP_LANES) = {};
	struct rdma_np_event ev;
	unsigned int i;

	np_bind(test, 7);
	for (i = 0; i < NP_LANES; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, i, 0), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, i, 0), -EBUSY);
	KUNIT_EXPECT_EQ(test, t->nr_sent, NP_LANES);
	for (i = 0; i < NP_LANES; i++)
		KUNIT_EXPECT_FALSE(test, __test_and_set_bit(t->sent[i].fault.lane,
							    seen));

	/* A lane is free when its answer is there; its next tid is higher */
	np_answer_to(test, 3, RDMA_NP_BUSY, 0);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 100, 0), 0);
	KUNIT_EXPECT_EQ(test, t->sent[NP_LANES].fault.lane,
			t->sent[3].fault.lane);
	KUNIT_EXPECT_GT(test, t->sent[NP_LANES].tid, t->sent[3].tid);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, ev.cookie, 3);
}

#define NP_TEST_TIMEOUT	usecs_to_jiffies(NP_RTO_MAX_US)

/* A peer that is full is asked for no more at once than it has left under way */
static void np_fault_lanes_close_while_the_peer_is_full(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	unsigned int i;

	/* Time-outs of a second, of which none passes but those that are said to */
	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	np_bind(test, 7);
	for (i = 0; i < 8; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, i, 0), 0);
	for (i = 0; i < 3; i++)
		np_answer_to(test, i, NP_WIRE_FULL, 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 8, 0), -EBUSY);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 8, RDMA_NP_FAULT_HOLD), -EBUSY);

	/* One that was served makes room for another */
	np_answer_to(test, 3, RDMA_NP_OK, 0);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 8, 0), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 9, 0), -EBUSY);

	/* And each time-out that passes for one more, until there are as many as ever */
	peer->lanes_since -= NP_TEST_TIMEOUT;
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 9, 0), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 10, 0), -EBUSY);
	peer->lanes_since -= 3 * NP_TEST_TIMEOUT;
	for (i = 10; i < 13; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, i, 0), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, i, 0), -EBUSY);
	peer->lanes_since -= NP_LANES * NP_TEST_TIMEOUT;
	for (; i < NP_LANES + 4; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, i, 0), 0);
	KUNIT_EXPECT_TRUE(test, bitmap_full(peer->lanes, NP_LANES));
	KUNIT_EXPECT_EQ(test, peer->lanes_closed, 0);
}

/* Also if that was the only one: its QP does not ask without end */
static void np_fault_alone_waits_for_a_full_peer(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct rdma_np_event ev;

	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	np_answer_to(test, 0, NP_WIRE_FULL, 0);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, ev.cookie, 5);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 6, 0), -EBUSY);
	peer->lanes_since -= NP_TEST_TIMEOUT;
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 6, 0), 0);
}

static void np_fault_dies_with_the_qp(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	np_peer_fail(&t->fake.peer);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 6, 0), -ENOTCONN);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_QP);
	KUNIT_EXPECT_EQ(test, ev.cookie, 5);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	np_answer_to(test, 0, RDMA_NP_OK, 0);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
}

static bool np_wait_event(struct np_ask_test *t, struct rdma_np_event *ev)
{
	return wait_event_timeout(t->channel.wait,
				  np_channel_pop(&t->channel, ev), 30 * HZ);
}

static void np_fault_is_repeated_then_given_up(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;
	unsigned int i;

	/* The shortest time-outs: 3.3 s in all */
	np_rtt_sample(&t->fake.peer.rtt, 1);
	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	KUNIT_ASSERT_TRUE(test, np_wait_event(t, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_TIMEOUT);
	KUNIT_EXPECT_EQ(test, ev.cookie, 5);
	KUNIT_ASSERT_EQ(test, t->nr_sent, NP_TRIES);
	/* Not all by the same way, see ud.c */
	KUNIT_EXPECT_TRUE(test, t->sent[0].quick);
	t->sent[0].quick = false;
	for (i = 1; i < NP_TRIES; i++)
		KUNIT_EXPECT_MEMEQ(test, &t->sent[i], &t->sent[0],
				   sizeof(t->sent[0]));
	KUNIT_EXPECT_TRUE(test, bitmap_empty(t->fake.peer.lanes, NP_LANES));
}

static void np_fault_working_is_not_given_up(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;
	unsigned int seen;

	np_rtt_sample(&t->fake.peer.rtt, 1);
	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	for (seen = 1; seen <= NP_TRIES + 2; seen++) {
		KUNIT_ASSERT_NE(test, 0,
				wait_event_timeout(t->wait,
						   READ_ONCE(t->nr_sent) >= seen,
						   30 * HZ));
		np_answer_to(test, 0, NP_WIRE_WORKING, 0);
	}
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	np_answer_to(test, 0, RDMA_NP_OK, 0);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_OK);
	/* Which copy was answered is not known: it teaches nothing */
	KUNIT_EXPECT_EQ(test, t->fake.peer.rtt.srtt_us, 1);
}

static void np_fault_repeated_too_early_teaches(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg answer = {
		.type = NP_MSG_FAULT, .answer = true, .status = RDMA_NP_BUSY,
		.quick = true,
	};

	np_rtt_sample(&t->fake.peer.rtt, 1);
	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
						    READ_ONCE(t->nr_sent) >= 2,
						    30 * HZ));
	/* To the first copy: the other one did not go the quick way */
	answer.tid = t->sent[0].tid;
	np_peer_answered(&t->fake.peer, &answer);
	/* The time-out, of which a timer may leave out a part of a jiffy, with weight 1/8 */
	KUNIT_EXPECT_GE(test, t->fake.peer.rtt.srtt_us, NP_RTO_MIN_US / 16);
}

/* FAULTs that go by the quick transport first, as if the port had one; then none do */
static unsigned int np_quick_faults(struct kunit *test, unsigned int nr)
{
	struct np_ask_test *t = np_ask_test(test);
	unsigned int i, first = t->nr_sent;
	struct np_trans *trans;

	for (i = 0; i < nr; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, i, 0), 0);
	spin_lock(&t->fake.peer.lock);
	list_for_each_entry(trans, &t->fake.peer.trans, entry) {
		trans->quick = trans->msg.quick;
		trans->tries = 2;
	}
	spin_unlock(&t->fake.peer.lock);
	return first;
}

static void np_quick_transport_that_loses_all_is_left(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	unsigned int nr, i, j;

	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	np_bind(test, 7);
	/* As many at once as there are: that is one loss */
	for (i = 0; i < NP_QUICK_TRIES; i++) {
		nr = np_quick_faults(test, 4);
		for (j = nr; j < nr + 4; j++) {
			KUNIT_EXPECT_TRUE(test, t->sent[j].quick);
			np_answer_to(test, j, RDMA_NP_OK, 0);
		}
	}
	nr = np_quick_faults(test, 1);
	KUNIT_EXPECT_FALSE(test, t->sent[nr].quick);
	np_answer_to(test, nr, RDMA_NP_OK, 0);
	/* After a while it is tried again, once */
	peer->quick_after = jiffies;
	for (i = 0; i < 2; i++) {
		nr = np_quick_faults(test, 1);
		KUNIT_EXPECT_EQ(test, t->sent[nr].quick, !i);
		np_answer_to(test, nr, RDMA_NP_OK, 0);
	}
}

static void np_quick_transport_that_loses_some_is_used(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg answer = {
		.type = NP_MSG_FAULT, .answer = true, .status = RDMA_NP_BUSY,
		.quick = true,
	};
	unsigned int nr, i;

	np_rtt_sample(&t->fake.peer.rtt, NP_RTO_MAX_US);
	np_bind(test, 7);
	for (i = 0; i < 6 * NP_QUICK_TRIES; i++) {
		nr = np_quick_faults(test, 1);
		KUNIT_ASSERT_TRUE(test, t->sent[nr].quick);
		answer.tid = t->sent[nr].tid;
		/* It came, or is said to have come, just before it is left */
		if (i % NP_QUICK_TRIES == NP_QUICK_TRIES - 1 && i & 1)
			np_peer_answered(&t->fake.peer, &answer);
		else if (i % NP_QUICK_TRIES == NP_QUICK_TRIES - 1)
			np_answer_to(test, nr, NP_WIRE_WORKING, 0);
		np_answer_to(test, nr, RDMA_NP_OK, 0);
	}
}

static void np_fault_is_not_repeated_out_of_place(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	unsigned long place = jiffies + HZ / 2;

	np_rtt_sample(&t->fake.peer.rtt, 1);
	np_bind(test, 7);
	/* Others have all places before */
	t->fake.peer.again = place;
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
						    READ_ONCE(t->nr_sent) >= 2,
						    30 * HZ));
	KUNIT_EXPECT_TRUE(test, time_after_eq(jiffies, place));
	/* The one that comes next is behind it */
	KUNIT_EXPECT_TRUE(test, time_after(READ_ONCE(t->fake.peer.again), place));
	KUNIT_EXPECT_MEMEQ(test, &t->sent[1].fault, &t->sent[0].fault,
			   sizeof(t->sent[0].fault));
	np_answer_to(test, 0, RDMA_NP_OK, 0);
}

static void np_answer_to_a_repetition_hastens_the_next(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_trans *next;
	unsigned int first;

	/* A long time-out, so that a place is far away */
	np_rtt_sample(&t->fake.peer.rtt, NP_RTO_MAX_US);
	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 6, 0), 0);
	KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
						    READ_ONCE(t->nr_sent) >= 3,
						    30 * HZ));
	/* One of them; the other one has the next place */
	first = t->sent[2].tid == t->sent[0].tid ? 0 : 1;
	np_answer_to(test, 2, RDMA_NP_OK, 0);
	/* On its way, without waiting for its place, or sent already */
	spin_lock(&t->fake.peer.lock);
	next = list_first_entry(&t->fake.peer.trans, struct np_trans, entry);
	KUNIT_EXPECT_TRUE(test, !next->placed ||
				!timer_pending(&next->work.timer));
	spin_unlock(&t->fake.peer.lock);
	KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
						    READ_ONCE(t->nr_sent) >= 4,
						    30 * HZ));
	KUNIT_EXPECT_EQ(test, t->sent[3].tid, t->sent[1 - first].tid);
	np_answer_to(test, 3, RDMA_NP_OK, 0);
}

#define NP_TEST_AGAIN	220	/* requests */
#define NP_TEST_AGAINS	120	/* more than there are time-outs in NP_RTO_MAX_US */

static void np_test_done(struct np_trans *trans, u32 status,
			 const struct np_msg *answer)
{
}

/* All time out together, more of them than have a place for as long as one waits for it. */
static void np_requests_are_not_sent_again_together(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	unsigned long begin, rto = usecs_to_jiffies(NP_RTO_MIN_US);
	struct np_trans *trans;
	unsigned int i, nr = 0;

	trans = kunit_kcalloc(test, NP_TEST_AGAIN, sizeof(*trans), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, trans);
	np_rtt_sample(&t->fake.peer.rtt, 1);
	begin = jiffies;
	for (i = 0; i < NP_TEST_AGAIN; i++) {
		np_trans_init(&trans[i], &t->fake.peer, NP_MSG_FORGET,
			      np_test_done, NULL);
		KUNIT_ASSERT_EQ(test, np_trans_start(&trans[i]), 0);
	}
	KUNIT_EXPECT_NE(test, 0,
			wait_event_timeout(t->wait, READ_ONCE(t->nr_sent) >=
					   NP_TEST_AGAIN + NP_TEST_AGAINS,
					   30 * HZ));
	np_peer_fail(&t->fake.peer);
	flush_workqueue(np_wq);
	/* The first time is quick; however late we are, nobody comes before his place */
	for (i = 0; i < min(t->nr_sent, NP_TEST_SENT); i++) {
		if (t->sent[i].quick)
			continue;
		KUNIT_ASSERT_TRUE_MSG(test, time_after_eq(t->sent_at[i],
							  begin + nr * rto),
				      "number %u after %lu jiffies", nr,
				      t->sent_at[i] - begin);
		nr++;
	}
	KUNIT_EXPECT_GE(test, nr, NP_TEST_AGAINS);
}

static void np_hold_is_kept_and_given_back_once(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_EXPECT_EQ(test, np_peer_release(&t->fake.peer, 42), -ENOENT);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	/* A copy does not release what is in use */
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.hold_id, 42);

	KUNIT_EXPECT_EQ(test, np_peer_release(&t->fake.peer, 43), -ENOENT);
	KUNIT_EXPECT_EQ(test, np_peer_release(&t->fake.peer, 42), 0);
	KUNIT_EXPECT_EQ(test, np_peer_release(&t->fake.peer, 42), -ENOENT);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 2);
	KUNIT_EXPECT_EQ(test, t->sent[1].type, NP_MSG_RELEASE);
	KUNIT_EXPECT_EQ(test, t->sent[1].hold_id, 42);
	np_answer_to(test, 1, RDMA_NP_OK, 0);
}

static unsigned int np_released(struct np_ask_test *t)
{
	unsigned int i, nr = 0;

	for (i = 0; i < min(t->nr_sent, NP_TEST_SENT); i++)
		nr += t->sent[i].type == NP_MSG_RELEASE;
	return nr;
}

/* Puts @done into the place of what ends the only transaction under way. */
static void np_instead_of_done(struct kunit *test,
			       void (*done)(struct np_trans *trans, u32 status,
					    const struct np_msg *answer))
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_trans *trans;

	spin_lock(&t->fake.peer.lock);
	trans = list_first_entry(&t->fake.peer.trans, struct np_trans, entry);
	t->done = trans->done;
	trans->done = done;
	spin_unlock(&t->fake.peer.lock);
}

static void np_copy_then_done(struct np_trans *trans, u32 status,
			      const struct np_msg *answer)
{
	struct np_ask_test *t = container_of(trans->peer, struct np_ask_test,
					     fake.peer);

	np_peer_answered(trans->peer, answer);
	t->done(trans, status, answer);
}

/* The copies of an answer come by two queues, each with a worker of its own. */
static void np_hold_outlives_a_copy_beside_its_answer(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
	np_instead_of_done(test, np_copy_then_done);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, ev.hold_id, 42);
	KUNIT_EXPECT_EQ(test, np_released(t), 0);
	KUNIT_EXPECT_EQ(test, np_peer_release(&t->fake.peer, 42), 0);
	KUNIT_EXPECT_EQ(test, np_released(t), 1);
}

static void np_kill_then_done(struct np_trans *trans, u32 status,
			      const struct np_msg *answer)
{
	struct np_ask_test *t = container_of(trans->peer, struct np_ask_test,
					     fake.peer);

	np_peer_fail(trans->peer);
	t->done(trans, status, answer);
}

static void np_hold_answered_while_its_qp_ends_is_none(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
	np_instead_of_done(test, np_kill_then_done);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_QP);
	KUNIT_EXPECT_EQ(test, ev.hold_id, 0);
	KUNIT_EXPECT_EQ(test, ev.nr_words, 0);
	/* The other end's QP may live on */
	KUNIT_EXPECT_EQ(test, np_released(t), 1);
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_kept, 0);
}

static void np_hold_not_asked_for_is_given_back(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_WRITE), 0);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, ev.nr_words, 1);
	KUNIT_EXPECT_EQ(test, ev.hold_id, 0);
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_kept, 0);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 2);
	KUNIT_EXPECT_EQ(test, t->sent[1].type, NP_MSG_RELEASE);
	KUNIT_EXPECT_EQ(test, t->sent[1].hold_id, 42);
}

static void np_holds_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;
	u64 id;

	np_bind(test, 7);
	for (id = 1; id <= NP_MAX_KEPT; id++) {
		t->nr_sent = 0;
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD),
				0);
		np_answer_to(test, 0, RDMA_NP_OK, id);
		KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	}
	t->nr_sent = 0;
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), -EBUSY);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);

	/* One that is being given back counts until that was answered */
	KUNIT_EXPECT_EQ(test, np_peer_release(&t->fake.peer, 3), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), -EBUSY);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 2);
	np_answer_to(test, 1, NP_WIRE_WORKING, 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), -EBUSY);
	np_answer_to(test, 1, RDMA_NP_OK, 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
}

static void np_hold_nobody_learns_of_is_given_back(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg late;

	np_bind(test, 7);
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 5, RDMA_NP_FAULT_HOLD), 0);
	np_channel_close(&t->channel);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 6, 0), -EBADF);
	np_answer_to(test, 0, RDMA_NP_OK, 42);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 2);
	KUNIT_EXPECT_EQ(test, t->sent[1].type, NP_MSG_RELEASE);
	KUNIT_EXPECT_EQ(test, t->sent[1].hold_id, 42);

	/* An answer to a request that was given up */
	late = np_sample(NP_MSG_FAULT, true);
	np_peer_answered(&t->fake.peer, &late);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 3);
	KUNIT_EXPECT_EQ(test, t->sent[2].type, NP_MSG_RELEASE);
	KUNIT_EXPECT_EQ(test, t->sent[2].hold_id, late.faulted.hold_id);
}

static void np_gone_waits_for_forget(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_OK);
	np_bind(test, 7);
	np_bind(test, 8);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_BUSY);
	KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, ev.type, RDMA_NP_EVENT_REGION_GONE);
	KUNIT_EXPECT_EQ(test, ev.region_id, 7);
	/* Once, however often the peer repeats it */
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));

	KUNIT_EXPECT_EQ(test, np_peer_forget(&t->fake.peer, 7), 0);
	KUNIT_EXPECT_EQ(test, np_peer_forget(&t->fake.peer, 7), -ENOENT);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 1);
	KUNIT_EXPECT_EQ(test, t->sent[0].type, NP_MSG_FORGET);
	KUNIT_EXPECT_EQ(test, t->sent[0].forget.region_id, 7);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 8), RDMA_NP_BUSY);
}

static void np_gone_event_unread_at_forget_is_taken_back(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_event ev;

	np_bind(test, 7);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, np_peer_forget(&t->fake.peer, 7), 0);
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
}

static void np_gone_closed_channel_uses_nothing(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);

	np_bind(test, 7);
	np_channel_close(&t->channel);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_bindings, 0);
}

/* The answer to RESOLVE may be overtaken by GONE. */
static void np_gone_waits_for_resolve(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);

	t->fake.peer.resolving = 1;
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_BUSY);
	t->fake.peer.resolving = 0;
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, 7), RDMA_NP_OK);
}

static void np_channel_is_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	unsigned int i;

	for (i = 0; !np_channel_reserve(&t->channel); i++)
		KUNIT_ASSERT_LT(test, i, 100000);
	KUNIT_EXPECT_EQ(test, np_channel_reserve(&t->channel), -EBUSY);
	np_bind(test, 7);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, 0), -EBUSY);
	while (i--)
		np_channel_unreserve(&t->channel);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, 0), 0);
}

static void np_resolved_regions_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_resolve info;

	t->fake.peer.nr_bindings = NP_MAX_BINDINGS - 1;
	t->fake.peer.resolving = 1;
	KUNIT_EXPECT_EQ(test, np_peer_resolve(&t->fake.peer, &t->channel, 7, &info),
			-ENOSPC);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);
	t->fake.peer.nr_bindings = 0;
	t->fake.peer.resolving = 0;
}

/* What the owner says counts here, too, with the next FAULT */
static void np_fault_is_within_the_owners_bounds(struct kunit *test)
{
	struct rdma_np_range ranges[] = { { 0x1fff, 2 }, { 0x5000, 1 } };
	struct np_ask_test *t = np_ask_test(test);
	struct rdma_np_fault_req req = { .region_id = 7 };
	struct np_peer *peer = &t->fake.peer;
	struct np_resolve info;

	t->resolves_to = np_ask_region(7);
	t->resolves_to.max_pages = 1;
	t->resolves_to.max_ranges = 1;
	t->resolves_to.lanes = 2;
	KUNIT_ASSERT_EQ(test, np_peer_resolve(peer, &t->channel, 1, &info), 0);
	KUNIT_EXPECT_EQ(test, np_peer_fault(peer, &t->channel, &req, ranges, 1),
			-EINVAL);
	ranges[0].length = 1;
	KUNIT_EXPECT_EQ(test, np_peer_fault(peer, &t->channel, &req, ranges, 2),
			-EINVAL);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
	KUNIT_EXPECT_EQ(test, np_peer_fault(peer, &t->channel, &req, ranges, 1), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 2, 0), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 3, 0), -EBUSY);

	/* It changes its mind while they are under way */
	t->resolves_to.max_ranges = 2;
	t->resolves_to.max_pages = 2;
	t->resolves_to.lanes = 1;
	KUNIT_ASSERT_EQ(test, np_peer_resolve(peer, &t->channel, 1, &info), 0);
	np_answer_to(test, 2, RDMA_NP_OK, 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 4, 0), -EBUSY);
	np_answer_to(test, 1, RDMA_NP_OK, 0);
	KUNIT_EXPECT_EQ(test, np_peer_fault(peer, &t->channel, &req, ranges, 2), 0);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 7, 5, 0), -EBUSY);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 5);
	KUNIT_EXPECT_EQ(test, t->sent[4].fault.lane, 0);
}

/* ... before a key of it is used for anything */
static void np_resolve_of_another_kind_fails(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_resolve info;

	t->resolves_to = np_ask_region(7);
	t->resolves_to.page_shift = 16;
	KUNIT_EXPECT_EQ(test, np_peer_resolve(&t->fake.peer, &t->channel, 1,
					      &info), -EPROTO);
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_bindings, 0);
	KUNIT_EXPECT_EQ(test, t->fake.peer.resolving, 0);
}

static void np_test_channel_stays(struct np_channel *channel)
{
}

/* All of them are looked at under a lock when an answer comes, and when the region goes */
static void np_channels_of_a_region_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_channel *channels;
	struct np_resolve info;
	unsigned int i;

	channels = kunit_kcalloc(test, NP_MAX_CHANNELS + 1, sizeof(*channels),
				 GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, channels);
	t->resolves_to = np_ask_region(7);
	for (i = 0; i <= NP_MAX_CHANNELS; i++) {
		np_channel_init(&channels[i], np_test_channel_stays);
		KUNIT_EXPECT_EQ(test, np_peer_resolve(peer, &channels[i], 1, &info),
				i < NP_MAX_CHANNELS ? 0 : -ENOSPC);
	}
	/* Those that have it go on */
	KUNIT_EXPECT_EQ(test, np_peer_resolve(peer, &channels[3], 1, &info), 0);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, NP_MAX_CHANNELS);
	/* Who does not listen any more makes room */
	np_channel_close(&channels[3]);
	KUNIT_EXPECT_EQ(test, np_peer_resolve(peer, &channels[i - 1], 1, &info), 0);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, NP_MAX_CHANNELS);
	KUNIT_EXPECT_EQ(test, kref_read(&channels[3].ref), 1);
	for (i = 0; i <= NP_MAX_CHANNELS; i++)
		np_channel_close(&channels[i]);
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(peer, 7), RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, 0);
}

/* The place of the FORGET of a region; others may be sent again meanwhile. */
static unsigned int np_sent_forget(struct np_ask_test *t, u64 region_id)
{
	unsigned int i, nr;

	spin_lock(&t->lock);
	nr = min(t->nr_sent, NP_TEST_SENT);
	for (i = 0; i < nr; i++)
		if (t->sent[i].type == NP_MSG_FORGET &&
		    t->sent[i].forget.region_id == region_id)
			break;
	spin_unlock(&t->lock);
	return i < nr ? i : NP_TEST_SENT;
}

/* Also one whose channel found no room */
static void np_forget_undoes_all_resolves_before_it(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_channel *channels;
	struct np_resolve info;
	unsigned int i, nr;
	u64 newest;

	channels = kunit_kcalloc(test, NP_MAX_CHANNELS + 1, sizeof(*channels),
				 GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, channels);
	t->resolves_to = np_ask_region(7);
	for (i = 0; i <= NP_MAX_CHANNELS; i++) {
		np_channel_init(&channels[i], np_test_channel_stays);
		KUNIT_EXPECT_EQ(test, np_peer_resolve(peer, &channels[i], 1, &info),
				i < NP_MAX_CHANNELS ? 0 : -ENOSPC);
	}
	newest = t->sent[t->nr_sent - 1].tid;
	KUNIT_EXPECT_EQ(test, np_peer_forget(peer, 7), 0);
	nr = np_sent_forget(t, 7);
	KUNIT_ASSERT_LT(test, nr, NP_TEST_SENT);
	KUNIT_EXPECT_GE(test, t->sent[nr].forget.seq, newest);
	np_answer_to(test, nr, RDMA_NP_OK, 0);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, 0);
}

struct np_ask_resolve {
	struct work_struct work;
	struct np_ask_test *t;
	struct np_resolve info;
	int err;
};

static void np_ask_resolve(struct work_struct *work)
{
	struct np_ask_resolve *r = container_of(work, struct np_ask_resolve,
						work);

	r->err = np_peer_resolve(&r->t->fake.peer, &r->t->channel, 1, &r->info);
}

static void np_forget_then_done(struct np_trans *trans, u32 status,
				const struct np_msg *answer)
{
	struct np_ask_test *t = container_of(trans->peer, struct np_ask_test,
					     fake.peer);

	np_peer_forget(trans->peer, answer->region.id);
	t->done(trans, status, answer);
}

/* Its answer hands out keys, so what they were granted for has to last */
static void np_forget_undoes_no_resolve_under_way(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg answer = {
		.type = NP_MSG_RESOLVE,
		.answer = true,
		.region = np_ask_region(7),
	};
	struct np_ask_resolve r = { .t = t };
	unsigned int nr;

	INIT_WORK_ONSTACK(&r.work, np_ask_resolve);
	np_bind(test, 7);
	schedule_work(&r.work);
	KUNIT_EXPECT_NE(test, 0, wait_event_timeout(t->wait, READ_ONCE(t->nr_sent),
						    10 * HZ));
	answer.tid = t->sent[0].tid;
	answer.nonce = t->sent[0].nonce;
	np_instead_of_done(test, np_forget_then_done);
	np_peer_answered(&t->fake.peer, &answer);
	flush_work(&r.work);
	destroy_work_on_stack(&r.work);
	KUNIT_EXPECT_EQ(test, r.err, 0);
	KUNIT_EXPECT_EQ(test, r.info.id, 7);
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_bindings, 1);
	nr = np_sent_forget(t, 7);
	KUNIT_ASSERT_LT(test, nr, NP_TEST_SENT);
	KUNIT_EXPECT_LT(test, t->sent[nr].forget.seq, answer.tid);
	/* Nothing is under way any more: now it is undone as well */
	np_answer_to(test, nr, RDMA_NP_OK, 0);
	t->nr_sent = 0;
	KUNIT_EXPECT_EQ(test, np_peer_forget(&t->fake.peer, 7), 0);
	nr = np_sent_forget(t, 7);
	KUNIT_ASSERT_LT(test, nr, NP_TEST_SENT);
	KUNIT_EXPECT_GE(test, t->sent[nr].forget.seq, answer.tid);
	np_answer_to(test, nr, RDMA_NP_OK, 0);
}

static void np_resolves_under_way_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_resolve info;

	/* Asks again for a while, as if the peer had said so */
	t->fake.peer.resolving = NP_MAX_ASKED;
	KUNIT_EXPECT_EQ(test, np_peer_resolve(&t->fake.peer, &t->channel, 7, &info),
			-EBUSY);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);
	t->fake.peer.resolving = 0;
}

/* A device can be taken away at any time, whatever a peer does */
static void np_device_that_leaves_waits_for_no_peer(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_ask_resolve r = { .t = t };
	struct np_resolve info;

	INIT_WORK_ONSTACK(&r.work, np_ask_resolve);
	np_rtt_sample(&t->fake.peer.rtt, NP_RTO_MAX_US);
	schedule_work(&r.work);
	KUNIT_EXPECT_NE(test, 0, wait_event_timeout(t->wait, READ_ONCE(t->nr_sent),
						    10 * HZ));
	t->fake.hca.leaving = true;
	np_ask_leave(&t->fake.peer);
	/* Before its first time-out, so nobody else can have ended it */
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
	flush_work(&r.work);
	destroy_work_on_stack(&r.work);
	KUNIT_EXPECT_EQ(test, r.err, -ENOTCONN);
	KUNIT_EXPECT_EQ(test, t->fake.peer.resolving, 0);
	KUNIT_EXPECT_EQ(test, np_peer_resolve(&t->fake.peer, &t->channel, 7, &info),
			-ENODEV);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
}

/* A peer that answers none of them, or only that it is at work. */
static void np_forgets_under_way_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	unsigned int nr;
	u64 id;

	for (id = 1; id <= 2 * NP_MAX_ASKED; id++) {
		spin_lock(&t->lock);
		t->nr_sent = 0;
		spin_unlock(&t->lock);
		np_bind(test, id);
		KUNIT_ASSERT_EQ(test, np_peer_forget(&t->fake.peer, id), 0);
		/* Each is sent */
		nr = np_sent_forget(t, id);
		KUNIT_ASSERT_LT(test, nr, NP_TEST_SENT);
		np_answer_to(test, nr, NP_WIRE_WORKING, 0);
	}
	KUNIT_EXPECT_EQ(test, list_count_nodes(&t->fake.peer.trans), NP_MAX_ASKED);
	/* Also if the last one was lost, the peer is told when it asks */
	KUNIT_EXPECT_EQ(test, np_peer_told_gone(&t->fake.peer, id - 1), RDMA_NP_OK);
	np_ask_kill(&t->fake.peer);
	KUNIT_EXPECT_EQ(test, t->fake.peer.forgetting, 0);
}

/* --- serving ------------------------------------------------------------------------- */

static void np_requests_other_than_fault_are_bounded(struct kunit *test)
{
	struct np_hca *hca = &np_ask_test(test)->fake.hca;
	unsigned int nr, strangers;

	for (strangers = 0; np_hca_begin(hca, true); strangers++)
		KUNIT_ASSERT_LT(test, strangers, NP_SERVE_DEVICE);
	KUNIT_EXPECT_EQ(test, strangers, NP_SERVE_STRANGERS);
	for (nr = strangers; np_hca_begin(hca, false); nr++)
		KUNIT_ASSERT_LT(test, nr, NP_SERVE_DEVICE);
	KUNIT_EXPECT_EQ(test, nr, NP_SERVE_ASKED);
	/* FAULTs have at least the rest */
	KUNIT_EXPECT_LE(test, hca->serving, NP_SERVE_DEVICE / 2);

	for (; nr > strangers; nr--)
		np_hca_end(hca, false);
	KUNIT_EXPECT_FALSE(test, np_hca_begin(hca, true));
	for (; nr; nr--)
		np_hca_end(hca, true);
	KUNIT_EXPECT_TRUE(test, np_hca_begin(hca, true));
	np_hca_end(hca, true);

	hca->serving = NP_SERVE_DEVICE;
	KUNIT_EXPECT_FALSE(test, np_hca_begin(hca, false));
	hca->serving = 0;
}

/* FORGETs that cannot go on, because somebody else has the lock that they need. */
static void np_requests_of_one_peer_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg msg = np_sample(NP_MSG_FORGET, false);
	static const struct np_addr from;
	unsigned int i;

	msg.dst_qpn = t->fake.peer.qpn;
	msg.src_qpn = t->fake.peer.remote_qpn;
	msg.secret = t->fake.peer.our_secret;
	mutex_lock(&t->fake.peer.ctl);
	for (i = 0; i < NP_SERVE_CONTROL; i++) {
		msg.tid++;
		np_receive(&t->fake.port, &msg, false, &from, NULL);
	}
	KUNIT_EXPECT_EQ(test, READ_ONCE(t->nr_sent), 0);
	msg.tid++;
	np_receive(&t->fake.port, &msg, false, &from, NULL);
	KUNIT_EXPECT_EQ(test, READ_ONCE(t->nr_sent), 1);
	KUNIT_EXPECT_EQ(test, t->sent[0].status, RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, t->sent[0].tid, msg.tid);
	KUNIT_EXPECT_EQ(test, READ_ONCE(t->fake.hca.serving), NP_SERVE_CONTROL);
	mutex_unlock(&t->fake.peer.ctl);
	flush_workqueue(np_wq);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 1 + NP_SERVE_CONTROL);
	for (i = 1; i <= NP_SERVE_CONTROL; i++)
		KUNIT_EXPECT_EQ(test, t->sent[i].status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, t->fake.peer.control, 0);
}

/* As many as there are of @owner, in steps of a FAULT, each with a QP that has none. */
static unsigned int np_hold_all(struct kunit *test, const char *owner)
{
	struct np_peer *peer = &np_ask_test(test)->fake.peer;
	unsigned int pages = 0;

	while (!np_held_reserve(peer, owner, RDMA_NP_MAX_PAGES)) {
		pages += RDMA_NP_MAX_PAGES;
		KUNIT_ASSERT_LE(test, pages, NP_HELD_DEVICE);
		peer->held_pages = 0;
	}
	KUNIT_EXPECT_EQ(test, peer->held_pages, 0);
	return pages;
}

static void np_pages_under_hold_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	static const char owner[3];
	unsigned int pages[3], i;

	/* One QP */
	KUNIT_EXPECT_EQ(test, np_held_reserve(peer, owner, NP_HELD_QP), 0);
	KUNIT_EXPECT_EQ(test, np_held_reserve(peer, owner, 1), -EBUSY);
	KUNIT_EXPECT_EQ(test, peer->held_pages, NP_HELD_QP);
	np_held_unreserve(peer, owner, 1);
	KUNIT_EXPECT_EQ(test, np_held_reserve(peer, owner, 2), -EBUSY);
	KUNIT_EXPECT_EQ(test, np_held_reserve(peer, owner, 1), 0);
	np_held_unreserve(peer, owner, NP_HELD_QP);
	KUNIT_EXPECT_EQ(test, t->fake.hca.held_pages, 0);
	KUNIT_EXPECT_TRUE(test, hash_empty(t->fake.hca.holders));

	/* Each owner takes half of what is left, whoever else asks for it. */
	for (i = 0; i < 3; i++) {
		pages[i] = np_hold_all(test, &owner[i]);
		KUNIT_ASSERT_EQ(test, pages[i], NP_HELD_DEVICE >> (i + 1));
	}
	/* What one gives back others may have */
	peer->held_pages = RDMA_NP_MAX_PAGES;
	np_held_unreserve(peer, &owner[0], RDMA_NP_MAX_PAGES);
	KUNIT_EXPECT_EQ(test, np_held_reserve(peer, &owner[2], RDMA_NP_MAX_PAGES), 0);
	pages[0] -= RDMA_NP_MAX_PAGES;
	pages[2] += RDMA_NP_MAX_PAGES;

	for (i = 0; i < 3; i++) {
		peer->held_pages = pages[i];
		np_held_unreserve(peer, &owner[i], pages[i]);
	}
	KUNIT_EXPECT_EQ(test, t->fake.hca.held_pages, 0);
	KUNIT_EXPECT_TRUE(test, hash_empty(t->fake.hca.holders));

	np_peer_fail(peer);
	KUNIT_EXPECT_EQ(test, np_held_reserve(peer, owner, 1), -EBUSY);
}

/* --- dead regions -------------------------------------------------------------------- */

KUNIT_DEFINE_ACTION_WRAPPER(np_test_kvfree, kvfree, const void *);

/* @nr regions whose keys the peer has, with ids from 1. */
static struct np_region *np_granted_regions(struct kunit *test, unsigned int nr)
{
	struct np_peer *peer = &np_ask_test(test)->fake.peer;
	struct np_region *regions;
	unsigned int i;

	/* Behind them their owner, who is compared, and counts grants */
	regions = kvzalloc(nr * sizeof(*regions) + PAGE_SIZE, GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, regions);
	KUNIT_ASSERT_EQ(test, kunit_add_action_or_reset(test, np_test_kvfree,
							regions), 0);
	for (i = 0; i < nr; i++) {
		kref_init(&regions[i].ref);
		regions[i].id = i + 1;
		mutex_init(&regions[i].lock);
		INIT_LIST_HEAD(&regions[i].grants);
		regions[i].owner = (void *)&regions[nr];
		mutex_lock(&peer->ctl);
		KUNIT_EXPECT_NOT_ERR_OR_NULL(test,
					     np_pgrant_make(peer, &regions[i]));
		mutex_unlock(&peer->ctl);
	}
	return regions;
}

/* As in np_region_close() */
static void np_region_dies(struct np_region *region)
{
	struct np_grant *grant;

	mutex_lock(&region->lock);
	region->gone = true;
	list_for_each_entry(grant, &region->grants, node) {
		grant->told = true;
		np_peer_region_gone(grant);
	}
	mutex_unlock(&region->lock);
}

static void np_test_forgets(struct np_ask_test *t, u64 region_id)
{
	struct np_msg msg = np_sample(NP_MSG_FORGET, false);
	static const struct np_addr from;

	msg.dst_qpn = t->fake.peer.qpn;
	msg.src_qpn = t->fake.peer.remote_qpn;
	msg.secret = t->fake.peer.our_secret;
	msg.forget.region_id = region_id;
	np_receive(&t->fake.port, &msg, false, &from, NULL);
	flush_workqueue(np_wq);
}

static unsigned int np_under_way(struct np_ask_test *t)
{
	unsigned int nr;

	spin_lock(&t->fake.peer.lock);
	nr = list_count_nodes(&t->fake.peer.trans);
	spin_unlock(&t->fake.peer.lock);
	return nr;
}

/* The place of a region's GONE, looked for from @first on. */
static unsigned int np_sent_gone(struct np_ask_test *t, u64 region_id,
				 unsigned int first)
{
	unsigned int i, nr;

	spin_lock(&t->lock);
	nr = min(t->nr_sent, NP_TEST_SENT);
	for (i = first; i < nr; i++)
		if (t->sent[i].type == NP_MSG_GONE &&
		    t->sent[i].forget.region_id == region_id)
			break;
	spin_unlock(&t->lock);
	return i < nr ? i : NP_TEST_SENT;
}

/* One that is in use keeps no other from being told, and neither do many. */
static void np_gone_is_told_of_each_region(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	const unsigned int nr = 5 * NP_MAX_GONE;
	struct np_peer *peer = &t->fake.peer;
	struct np_region *regions;
	unsigned int i, at;

	/* Else they are sent again beside the test */
	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	regions = np_granted_regions(test, nr);
	for (i = 0; i < nr; i++)
		np_region_dies(&regions[i]);
	KUNIT_EXPECT_EQ(test, np_under_way(t), NP_MAX_GONE);
	KUNIT_EXPECT_EQ(test, np_sent_gone(t, NP_MAX_GONE + 1, 0), NP_TEST_SENT);

	for (i = 0; i < nr; i++) {
		at = np_sent_gone(t, i + 1, 0);
		KUNIT_ASSERT_LT_MSG(test, at, NP_TEST_SENT, "region %u", i + 1);
		np_answer_to(test, at, RDMA_NP_BUSY, 0);
		KUNIT_ASSERT_LE(test, np_under_way(t),
				NP_MAX_GONE);
	}
	KUNIT_EXPECT_EQ(test, peer->nr_dead, nr);
	KUNIT_EXPECT_FALSE(test, xa_empty(&peer->grants));

	/* Those come again in their turn: so each of them may end */
	for (i = 0; i < nr; i++) {
		KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
			(at = np_sent_gone(t, i + 1, nr)) < NP_TEST_SENT,
			30 * HZ));
		np_answer_to(test, at, RDMA_NP_OK, 0);
	}
	flush_workqueue(np_wq);
	KUNIT_EXPECT_EQ(test, peer->nr_dead, 0);
	KUNIT_EXPECT_TRUE(test, xa_empty(&peer->grants));
}

/* Not more often for those that are many, and ever more seldom. */
static void np_gone_is_seldom_repeated(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	unsigned long begin = jiffies, due = 0, pause;
	const unsigned int nr = 5 * NP_MAX_GONE;
	struct np_region *regions;
	unsigned int i;

	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	regions = np_granted_regions(test, nr);
	for (i = 0; i < nr; i++)
		np_region_dies(&regions[i]);
	for (i = 0; i < nr + 3 * NP_MAX_GONE; i++) {
		KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
			READ_ONCE(t->nr_sent) > i, 30 * HZ));
		np_answer_to(test, i, RDMA_NP_BUSY, 0);
	}
	pause = msecs_to_jiffies(NP_GONE_MIN_MS);
	for (i = nr; i < nr + 3 * NP_MAX_GONE; i += NP_MAX_GONE) {
		due += pause;
		pause *= 2;
		KUNIT_EXPECT_TRUE_MSG(test, time_after_eq(t->sent_at[i],
							  begin + due),
				      "number %u after %lu jiffies", i,
				      t->sent_at[i] - begin);
	}
}

/* Time-outs are long, so nothing is sent beside the test. */
static void np_forgotten_region_makes_room_for_a_gone(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_region *regions;
	unsigned int i;

	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	regions = np_granted_regions(test, NP_MAX_GONE + 2);
	for (i = 0; i < NP_MAX_GONE + 2; i++)
		np_region_dies(&regions[i]);
	/* One under way, and one that waits */
	np_test_forgets(t, 3);
	KUNIT_EXPECT_LT(test, np_sent_gone(t, NP_MAX_GONE + 1, 0), NP_TEST_SENT);
	KUNIT_EXPECT_EQ(test, np_sent_gone(t, NP_MAX_GONE + 2, 0), NP_TEST_SENT);
	np_test_forgets(t, NP_MAX_GONE + 2);
	KUNIT_EXPECT_EQ(test, peer->nr_dead, NP_MAX_GONE);
	KUNIT_EXPECT_EQ(test, np_under_way(t), NP_MAX_GONE);
	KUNIT_EXPECT_TRUE(test, list_empty(&peer->untold));
}

static void np_peer_that_answers_no_gone_hears_of_the_next(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_region *regions;
	unsigned int i;

	np_rtt_sample(&t->fake.peer.rtt, 1);
	regions = np_granted_regions(test, NP_MAX_GONE + 1);
	for (i = 0; i < NP_MAX_GONE + 1; i++)
		np_region_dies(&regions[i]);
	KUNIT_EXPECT_EQ(test, np_sent_gone(t, NP_MAX_GONE + 1, 0), NP_TEST_SENT);
	KUNIT_EXPECT_NE(test, 0, wait_event_timeout(t->wait,
		np_sent_gone(t, NP_MAX_GONE + 1, 0) < NP_TEST_SENT, 60 * HZ));
}

/* Of a FAULT under way; some may have been sent more than once. */
static struct np_msg np_oldest_fault(struct np_peer *peer)
{
	struct np_msg request = { };
	struct np_trans *trans;

	spin_lock(&peer->lock);
	list_for_each_entry(trans, &peer->trans, entry) {
		if (trans->msg.type == NP_MSG_FAULT) {
			request = trans->msg;
			break;
		}
	}
	spin_unlock(&peer->lock);
	return request;
}

/* @nr holds: all are asked for, and then granted. */
static void np_test_holds(struct kunit *test, unsigned int nr)
{
	struct np_ask_test *t = np_ask_test(test);
	static u64 id;
	struct np_msg request;
	struct rdma_np_event ev;
	unsigned int i;

	for (i = 0; i < nr; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 1, i, RDMA_NP_FAULT_HOLD),
				0);
	for (i = 0; i < nr; i++) {
		request = np_oldest_fault(&t->fake.peer);
		np_answer_request(test, &request, RDMA_NP_OK, ++id);
		KUNIT_ASSERT_TRUE(test, np_channel_pop(&t->channel, &ev));
	}
}

/* All that a peer can leave unanswered: among these each answer is looked up. */
static void np_all_under_way_is_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_region *regions;
	struct np_trans *resolves;
	unsigned int i, most;
	u64 id;

	np_rtt_sample(&peer->rtt, NP_RTO_MAX_US);
	resolves = kunit_kcalloc(test, NP_MAX_ASKED, sizeof(*resolves),
				 GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, resolves);
	np_bind(test, 1);
	for (i = 0; i < NP_MAX_KEPT - 1; i++)
		np_test_holds(test, 1);
	np_test_holds(test, NP_LANES);
	KUNIT_EXPECT_EQ(test, np_ask_fault(test, 1, i, RDMA_NP_FAULT_HOLD), -EBUSY);
	for (i = 0; i < NP_LANES; i++)
		KUNIT_ASSERT_EQ(test, np_ask_fault(test, 1, i, 0), 0);
	for (id = 2; id < 2 + 2 * NP_MAX_ASKED; id++) {
		np_bind(test, id);
		KUNIT_ASSERT_EQ(test, np_peer_forget(peer, id), 0);
	}
	/* Each of which somebody waits for */
	for (i = 0; i < NP_MAX_ASKED; i++) {
		np_trans_init(&resolves[i], peer, NP_MSG_RESOLVE, np_test_done,
			      NULL);
		KUNIT_ASSERT_EQ(test, np_trans_start(&resolves[i]), 0);
	}
	regions = np_granted_regions(test, 5 * NP_MAX_GONE);
	for (i = 0; i < 5 * NP_MAX_GONE; i++)
		np_region_dies(&regions[i]);

	spin_lock(&peer->lock);
	most = list_count_nodes(&peer->trans) + list_count_nodes(&peer->kept);
	spin_unlock(&peer->lock);
	KUNIT_EXPECT_EQ(test, most, NP_MAX_UNDER_WAY);
	np_peer_fail(peer);
	flush_workqueue(np_wq);
}

static void np_keys_are_there(struct np_fake_peer *fake)
{
	struct np_ask_test *t = container_of(fake, struct np_ask_test, fake);

	t->had_keys = !xa_empty(&fake->peer.grants);
	t->failed++;
}

/* Whoever kept memory for too long is ended even if he tries to go, and cannot */
static void np_qp_whose_destruction_fails_is_ended(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;

	t->fake.failed = np_keys_are_there;
	rdma_restrack_begin_del(&t->fake.qp.res);
	np_peer_fail(peer);
	np_peer_fail(peer);
	KUNIT_EXPECT_EQ(test, t->failed, 0);
	KUNIT_EXPECT_FALSE(test, peer->dead);
	rdma_restrack_abort_del(&t->fake.qp.res);
	flush_delayed_work(&peer->fail_again);
	KUNIT_EXPECT_EQ(test, t->failed, 1);
}

/* Between the look at the peer and the lock that keeps its QP as it is */
static void np_qp_connected_anew_is_not_ended_for_a_former_peer(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);

	t->fake.failed = np_keys_are_there;
	t->fake.qp.np.left++;
	np_peer_fail(&t->fake.peer);
	KUNIT_EXPECT_EQ(test, t->failed, 0);
	/* Who modified the QP is about to end the peer */
	KUNIT_EXPECT_FALSE(test, t->fake.peer.dead);
	t->fake.qp.np.left--;
	np_peer_fail(&t->fake.peer);
	KUNIT_EXPECT_EQ(test, t->failed, 1);
	KUNIT_EXPECT_TRUE(test, t->fake.peer.dead);
}

static unsigned int np_test_queries;

static int np_test_query(struct ib_qp *qp, struct ib_qp_attr *attr, int mask,
			 struct ib_qp_init_attr *init)
{
	np_test_queries++;
	return -EIO;
}

static int np_test_modify_nothing(struct ib_qp *qp, struct ib_qp_attr *attr,
				  int attr_mask, struct ib_udata *udata)
{
	return 0;
}

/* The device gives a number away as soon as its QP is destroyed */
static void np_peer_is_not_that_of_a_former_qp(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct ib_qp *qp = kunit_kzalloc(test, sizeof(*qp), GFP_KERNEL);
	struct ib_qp_attr attr = { .qp_state = IB_QPS_INIT };
	struct np_peer *peer;

	KUNIT_ASSERT_NOT_NULL(test, qp);
	np_granted_regions(test, 1);
	peer = np_peer_make(&t->fake.qp);
	KUNIT_EXPECT_PTR_EQ(test, peer, &t->fake.peer);
	if (!IS_ERR(peer))
		np_peer_put(peer);
	mutex_init(&qp->np.lock);
	qp->device = t->fake.qp.device;
	qp->real_qp = qp;
	qp->qp_num = t->fake.qp.qp_num;
	qp->qp_type = IB_QPT_RC;
	KUNIT_EXPECT_PTR_EQ(test, np_peer_get(qp), NULL);
	/* Not tracked, and so not to be ended */
	KUNIT_EXPECT_EQ(test, PTR_ERR_OR_ZERO(np_peer_make(qp)), -ENOTCONN);
	qp->res.valid = true;
	KUNIT_EXPECT_TRUE(test, IS_ERR(np_peer_make(qp)));
	KUNIT_EXPECT_FALSE(test, t->fake.peer.dead);
	t->fake.ibdev->ops.modify_qp = np_test_modify_nothing;
	/* Its number may be one of a queue of packets, which are counted for themselves */
	qp->qp_type = IB_QPT_RAW_PACKET;
	KUNIT_EXPECT_EQ(test, ib_modify_qp(qp, &attr, IB_QP_STATE), 0);
	KUNIT_EXPECT_FALSE(test, t->fake.peer.dead);
	/* What the former one knew is over before this one is connected */
	qp->qp_type = IB_QPT_RC;
	KUNIT_EXPECT_EQ(test, ib_modify_qp(qp, &attr, IB_QP_STATE), 0);
	t->fake.ibdev->ops.modify_qp = np_fake_modify_qp;
	KUNIT_EXPECT_TRUE(test, t->fake.peer.dead);
	KUNIT_EXPECT_TRUE(test, xa_empty(&t->fake.peer.grants));
}

static int np_test_modify_then_resolve(struct ib_qp *qp,
				       struct ib_qp_attr *attr, int attr_mask,
				       struct ib_udata *udata)
{
	struct np_fake_peer *fake = container_of(qp, struct np_fake_peer, qp);

	fake->peer.left = qp->np.left + 1;
	return 0;
}

/* The other end may resolve before who modified the QP looks for a peer to end */
static void np_peer_made_after_a_modification_outlives_it(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct ib_qp_attr attr = { .qp_state = IB_QPS_RTR, .dest_qp_num = 2 };
	const int mask = IB_QP_STATE | IB_QP_DEST_QPN;
	struct ib_qp *qp = &t->fake.qp;

	/* The counter may go round */
	qp->np.left = U32_MAX;
	t->fake.ibdev->ops.modify_qp = np_test_modify_then_resolve;
	KUNIT_EXPECT_EQ(test, ib_modify_qp(qp, &attr, mask), 0);
	KUNIT_EXPECT_FALSE(test, t->fake.peer.dead);
	t->fake.ibdev->ops.modify_qp = np_test_modify_nothing;
	KUNIT_EXPECT_EQ(test, ib_modify_qp(qp, &attr, mask), 0);
	KUNIT_EXPECT_TRUE(test, t->fake.peer.dead);
	t->fake.ibdev->ops.modify_qp = np_fake_modify_qp;
}

/* A device answers one query at a time, and has other things to do */
static void np_stranger_costs_no_query_of_the_device(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg msg = np_sample(NP_MSG_RESOLVE, false);
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTR,
		.dest_qp_num = 0x77,
	};
	struct ib_qp *qp = &t->fake.qp;

	np_peer_fail(&t->fake.peer);
	t->fake.ibdev->ops.modify_qp = np_test_modify_nothing;
	t->fake.ibdev->ops.query_qp = np_test_query;
	np_test_queries = 0;
	msg.dst_qpn = qp->qp_num;
	msg.src_qpn = 0x77;
	/* Not connected */
	np_fake_arrives(&t->fake.port, &msg, false, 5);
	KUNIT_EXPECT_EQ(test, np_test_queries, 0);

	rdma_ah_set_port_num(&attr.ah_attr, 1);
	rdma_ah_set_dlid(&attr.ah_attr, 5);
	attr.ah_attr.type = RDMA_AH_ATTR_TYPE_IB;
	attr.ah_attr.ib.dlid = 5;
	KUNIT_ASSERT_EQ(test, ib_modify_qp(qp, &attr, IB_QP_STATE | IB_QP_AV |
						      IB_QP_DEST_QPN), 0);
	/* Another host, or QP, says that it is connected to it */
	np_fake_arrives(&t->fake.port, &msg, false, 6);
	msg.src_qpn++;
	np_fake_arrives(&t->fake.port, &msg, false, 5);
	KUNIT_EXPECT_EQ(test, np_test_queries, 0);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 3);
	/* That may be so: now the device is asked */
	msg.src_qpn--;
	np_fake_arrives(&t->fake.port, &msg, false, 5);
	KUNIT_EXPECT_EQ(test, np_test_queries, 1);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 4);

	attr.qp_state = IB_QPS_ERR;
	KUNIT_ASSERT_EQ(test, ib_modify_qp(qp, &attr, IB_QP_STATE), 0);
	np_fake_arrives(&t->fake.port, &msg, false, 5);
	KUNIT_EXPECT_EQ(test, np_test_queries, 1);
	t->fake.ibdev->ops.modify_qp = np_fake_modify_qp;
}

static void np_dead_regions_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_region *regions;
	unsigned int i;

	t->fake.failed = np_keys_are_there;
	regions = np_granted_regions(test, NP_MAX_DEAD + 2);
	for (i = 0; i < NP_MAX_DEAD + 1; i++) {
		np_region_dies(&regions[i]);
		/* What was forgotten does not count */
		if (!i)
			np_test_forgets(t, 1);
	}
	flush_work(&peer->overdue);
	KUNIT_EXPECT_EQ(test, peer->nr_dead, NP_MAX_DEAD);
	KUNIT_EXPECT_EQ(test, t->failed, 0);
	KUNIT_EXPECT_FALSE(test, peer->dead);

	np_region_dies(&regions[i]);
	flush_work(&peer->overdue);
	/* First the QP, then the keys */
	KUNIT_EXPECT_EQ(test, t->failed, 1);
	KUNIT_EXPECT_TRUE(test, t->had_keys);
	KUNIT_EXPECT_TRUE(test, peer->dead);
	KUNIT_EXPECT_TRUE(test, xa_empty(&peer->grants));
}

static void np_regions_that_a_peer_knows_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_region *regions = np_granted_regions(test, 1);

	np_test_forgets(t, 1);
	KUNIT_EXPECT_EQ(test, peer->nr_grants, 0);
	mutex_lock(&peer->ctl);
	peer->nr_grants = NP_MAX_GRANTS;
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_pgrant_make(peer, regions)), -EBUSY);
	KUNIT_EXPECT_TRUE(test, list_empty(&regions->grants));
	/* Which an asker takes for: later */
	KUNIT_EXPECT_EQ(test, np_errno_to_status(-EBUSY), RDMA_NP_BUSY);
	peer->nr_grants = NP_MAX_GRANTS - 1;
	KUNIT_EXPECT_NOT_ERR_OR_NULL(test, np_pgrant_make(peer, regions));
	KUNIT_EXPECT_EQ(test, peer->nr_grants, NP_MAX_GRANTS);
	peer->nr_grants = 1;
	mutex_unlock(&peer->ctl);
}

/* --- answers ------------------------------------------------------------------------- */

/* As np_mad_received() does it: breaks the message, which is to be noticed. */
static void np_test_malformed(struct kunit *test, struct np_wire *wire, u16 lid)
{
	struct np_ask_test *t = np_ask_test(test);
	unsigned int nr = t->nr_sent;
	struct np_msg msg;
	int err;

	err = np_msg_decode(wire, &msg);
	KUNIT_ASSERT_TRUE(test, err == -EPROTO || err == -EBADMSG);
	KUNIT_ASSERT_FALSE(test, msg.answer);
	np_fake_arrives(&t->fake.port, &msg, true, lid);
	KUNIT_ASSERT_EQ(test, t->nr_sent, nr + 1);
	np_fake_expect(test, &msg, &t->sent[nr], RDMA_NP_PROTO);
	KUNIT_EXPECT_EQ(test, t->fake.ah_lid, lid);
}

/* Whoever sends it, and however little of it is wrong. */
static void np_malformed_request_is_called_that_and_not_obeyed(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_wire good, wire;
	struct np_msg msg;
	u16 lid;
	u8 type;

	np_granted_regions(test, 7);
	np_bind(test, 7);
	for (lid = 0; lid < 2; lid++) {
		for (type = 1; type <= NP_MSG_LAST; type++) {
			msg = np_sample(type, false);
			msg.dst_qpn = peer->qpn;
			msg.src_qpn = peer->remote_qpn;
			np_msg_encode(&msg, &good);
			wire = good;
			wire.hdr.version++;
			np_test_malformed(test, &wire, lid);
			wire = good;
			wire.hdr.type = NP_MSG_LAST + type;
			np_test_malformed(test, &wire, lid);
			wire = good;
			wire.hdr.status = RDMA_NP_BUSY;
			np_test_malformed(test, &wire, lid);
			wire = good;
			be16_add_cpu(&wire.hdr.length, 1);
			np_test_malformed(test, &wire, lid);
		}
		msg = np_sample(NP_MSG_RESOLVE, false);
		np_msg_encode(&msg, &wire);
		wire.resolve.reserved = cpu_to_be32(1);
		np_test_malformed(test, &wire, lid);
		msg = np_sample(NP_MSG_FAULT, false);
		np_msg_encode(&msg, &wire);
		wire.fault.lane = cpu_to_be16(NP_LANES);
		np_test_malformed(test, &wire, lid);
	}
	KUNIT_EXPECT_EQ(test, peer->nr_grants, 7);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, 1);
	KUNIT_EXPECT_NULL(test, peer->serve);
}

/* Sends all there is to @port, as if from @lid; none of it may be obeyed. */
static void np_test_stranger(struct kunit *test, struct np_port *port,
			     u32 dst_qpn, u32 src_qpn, u16 lid)
{
	static const u8 status[] = {
		[NP_MSG_RESOLVE] = RDMA_NP_QP,
		[NP_MSG_FAULT] = RDMA_NP_QP,
		[NP_MSG_RELEASE] = RDMA_NP_QP,
		[NP_MSG_FORGET] = RDMA_NP_QP,
		[NP_MSG_GONE] = RDMA_NP_OK,
	};
	struct np_ask_test *t = np_ask_test(test);
	struct np_addr from = { .lid = lid, .qpn = 1 };
	struct np_msg msg;
	unsigned int nr;
	u8 type;

	for (type = 1; type <= NP_MSG_LAST; type++) {
		msg = np_sample(type, false);
		msg.dst_qpn = dst_qpn;
		msg.src_qpn = src_qpn;
		nr = t->nr_sent;
		np_fake_arrives(port, &msg, false, lid);
		KUNIT_ASSERT_EQ(test, t->nr_sent, nr + 1);
		np_fake_expect(test, &msg, &t->sent[nr], status[type]);
		KUNIT_EXPECT_EQ(test, t->fake.ah_lid, lid);

		/* By the quick transport only peers are answered */
		np_receive(port, &msg, false, &from, NULL);
		/* And who answers is not asked, and gets no answer */
		msg = np_sample(type, true);
		msg.dst_qpn = dst_qpn;
		msg.src_qpn = src_qpn;
		np_fake_arrives(port, &msg, false, lid);
		KUNIT_EXPECT_EQ(test, t->nr_sent, nr + 1);
	}
}

static void np_stranger_is_answered_the_same_whatever_the_reason(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	u32 qpn = peer->qpn, remote = peer->remote_qpn;

	np_granted_regions(test, 7);
	np_bind(test, 7);
	/* There is no such QP, or it is connected to another one, host, or port */
	np_test_stranger(test, &t->fake.port, qpn + 1, remote, 0);
	np_test_stranger(test, &t->fake.port, qpn, remote + 1, 0);
	np_test_stranger(test, &t->fake.port, qpn, remote, 1);
	np_test_stranger(test, &t->other, qpn, remote, 0);
	KUNIT_EXPECT_EQ(test, peer->nr_grants, 7);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, 1);
	KUNIT_EXPECT_EQ(test, peer->ud_qpn, 0);
	KUNIT_EXPECT_NULL(test, peer->serve);
	/* Or it is not connected any more */
	np_peer_fail(peer);
	np_test_stranger(test, &t->fake.port, qpn, remote, 0);
}

/* On RoCE that may take a second, in which no MAD of the port would be looked at */
static void np_handler_makes_no_address_handle(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg msg;
	int malformed;
	u8 type;

	for (type = 1; type <= NP_MSG_LAST; type++) {
		for (malformed = 0; malformed < 2; malformed++) {
			t->fake.ah_task = NULL;
			msg = np_sample(type, false);
			np_fake_arrives(&t->fake.port, &msg, malformed, 1);
			KUNIT_EXPECT_NOT_NULL(test, t->fake.ah_task);
			KUNIT_EXPECT_PTR_NE(test, t->fake.ah_task, current);
		}
	}
}

static void np_answers_to_strangers_are_bounded(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg msg = np_sample(NP_MSG_GONE, false);
	unsigned int i;

	for (i = 0; np_hca_begin_refusal(&t->fake.hca); i++)
		KUNIT_ASSERT_LT(test, i, NP_SERVE_REFUSALS);
	KUNIT_EXPECT_EQ(test, i, NP_SERVE_REFUSALS);
	/* The device waits for them, and others have their places */
	KUNIT_EXPECT_EQ(test, t->fake.hca.serving, NP_SERVE_REFUSALS);
	KUNIT_EXPECT_TRUE(test, np_hca_begin(&t->fake.hca, true));
	np_hca_end(&t->fake.hca, true);
	np_fake_arrives(&t->fake.port, &msg, false, 1);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);
	while (i--)
		np_hca_end_refusal(&t->fake.hca);
	np_fake_arrives(&t->fake.port, &msg, false, 1);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
}

/* --- who is believed ------------------------------------------------------------------ */

/* Of the other end's, whose secret is right */
static struct np_msg np_true_msg(struct np_peer *peer, u8 type, bool answer)
{
	struct np_msg msg = np_sample(type, answer);

	msg.dst_qpn = peer->qpn;
	msg.src_qpn = peer->remote_qpn;
	if (type != NP_MSG_RESOLVE)
		msg.secret = (type == NP_MSG_GONE) == answer ?
			     peer->our_secret : peer->their_secret;
	return msg;
}

/* By MAD from QP @qpn, or by the quick transport */
static void np_test_from(struct np_ask_test *t, const struct np_msg *msg, u32 qpn)
{
	struct np_addr from = { .qpn = qpn };
	struct ib_wc wc = { .src_qp = qpn };
	struct ib_grh grh = {};
	struct ib_mad_recv_wc recv = { .wc = &wc, .recv_buf.grh = &grh };

	np_receive(&t->fake.port, msg, false, &from, msg->quick ? NULL : &recv);
	flush_workqueue(np_wq);
}

/*
 * All that the other end's kernel could send; nothing is told, and what is answered says
 * that there is nothing, but that keys are in use
 */
static void np_test_nothing_is_believed(struct kunit *test, u32 qpn, bool quick,
					u64 wrong)
{
	static const u8 status[] = {
		[NP_MSG_FAULT] = RDMA_NP_GONE,
		[NP_MSG_RELEASE] = RDMA_NP_OK,
		[NP_MSG_FORGET] = RDMA_NP_OK,
		[NP_MSG_GONE] = RDMA_NP_BUSY,
	};
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	unsigned int nr = t->nr_sent;
	struct rdma_np_event ev;
	struct np_msg msg;
	int answer;
	u8 type;

	for (type = 1; type <= NP_MSG_LAST; type++) {
		for (answer = 0; answer < 2; answer++) {
			/* Those two have no secret that could be wrong */
			if (type == NP_MSG_RESOLVE && wrong)
				continue;
			msg = np_true_msg(peer, type, answer);
			msg.quick = quick;
			msg.secret ^= wrong;
			if (type == NP_MSG_FORGET && !answer)
				msg.forget.seq = U64_MAX;
			np_test_from(t, &msg, qpn);
			if (!answer && wrong && !quick) {
				/* It may be of an earlier peer of the QP */
				KUNIT_ASSERT_EQ(test, t->nr_sent, nr + 1);
				np_fake_expect(test, &msg, &t->sent[nr],
					       status[type]);
				nr++;
			}
			KUNIT_EXPECT_EQ_MSG(test, t->nr_sent, nr,
					    "type %u answer %d", type, answer);
		}
	}
	KUNIT_EXPECT_FALSE(test, np_channel_pop(&t->channel, &ev));
	KUNIT_EXPECT_EQ(test, peer->nr_grants, 7);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, 1);
	KUNIT_EXPECT_FALSE(test, peer->ud_known);
}

static void np_test_believes_init(struct kunit *test)
{
	struct np_peer *peer = &np_ask_test(test)->fake.peer;

	peer->their_secret = NP_TEST_THEIRS;
	np_granted_regions(test, 7);
	np_bind(test, 7);
}

/* Any process may send to QP1 that may set a privileged Q_Key */
static void np_mad_is_believed_from_qp1_only(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_msg msg;

	np_test_believes_init(test);
	np_test_nothing_is_believed(test, 0x99, false, 0);
	np_test_nothing_is_believed(test, 0, false, 0);
	KUNIT_EXPECT_EQ(test, t->fake.peer.ud_qpn, 0);
	/* Nor is a stranger answered, or who sends nonsense */
	msg = np_true_msg(&t->fake.peer, NP_MSG_RESOLVE, false);
	msg.src_qpn++;
	np_test_from(t, &msg, 0x99);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);

	msg = np_true_msg(&t->fake.peer, NP_MSG_FORGET, false);
	msg.forget.seq = U64_MAX;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
	KUNIT_EXPECT_EQ(test, t->fake.peer.nr_grants, 6);
}

/* The address is the right one, as that of another function of the same adapter is */
static void np_message_without_the_secret_is_not_obeyed(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	unsigned int bit;

	np_test_believes_init(test);
	for (bit = 0; bit < 64; bit++)
		np_test_nothing_is_believed(test, 1, false, BIT_ULL(bit));
	/* That of the other one's memory */
	np_test_nothing_is_believed(test, 1, false,
				    peer->our_secret ^ peer->their_secret);
	KUNIT_EXPECT_EQ(test, peer->ud_qpn, 0);
	/* Who was given none knows none */
	peer->their_secret = 0;
	np_test_nothing_is_believed(test, 1, false, peer->our_secret);
	peer->their_secret = NP_TEST_THEIRS;
}

/* Its keys may be there from an earlier peer of the other end's QP */
static void np_gone_without_the_secret_waits_for_who_uses_the_keys(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_msg msg;

	np_test_believes_init(test);
	msg = np_true_msg(peer, NP_MSG_GONE, false);
	msg.secret ^= 1;
	np_test_from(t, &msg, 1);
	msg.forget.region_id = 8;
	np_test_from(t, &msg, 1);
	peer->resolving = 1;
	np_test_from(t, &msg, 1);
	peer->resolving = 0;
	msg.forget.region_id = 7;
	np_channel_close(&t->channel);
	np_test_from(t, &msg, 1);
	KUNIT_ASSERT_EQ(test, t->nr_sent, 4);
	KUNIT_EXPECT_EQ(test, t->sent[0].status, RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, t->sent[1].status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, t->sent[2].status, RDMA_NP_BUSY);
	KUNIT_EXPECT_EQ(test, t->sent[3].status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, peer->nr_bindings, 1);
}

static void np_quick_message_is_believed_from_its_qp_only(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_msg msg;

	np_test_believes_init(test);
	/* Nobody's, as long as no MAD has told */
	np_test_nothing_is_believed(test, 0x515253, true, 0);
	np_test_nothing_is_believed(test, 1, true, 0);
	peer->ud_qpn = 0x515253;
	np_test_nothing_is_believed(test, 0x515252, true, 0);
	np_test_nothing_is_believed(test, 1, true, 0);
	np_test_nothing_is_believed(test, 0x515253, true, 1);
	/* RESOLVE and its answer only by MAD */
	msg = np_true_msg(peer, NP_MSG_RESOLVE, false);
	msg.quick = true;
	np_test_from(t, &msg, 0x515253);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 0);

	msg = np_true_msg(peer, NP_MSG_FORGET, false);
	msg.forget.seq = U64_MAX;
	msg.quick = true;
	msg.ud_qpn = 0x777;
	np_test_from(t, &msg, 0x515253);
	KUNIT_EXPECT_EQ(test, t->nr_sent, 1);
	KUNIT_EXPECT_EQ(test, peer->nr_grants, 6);
	KUNIT_EXPECT_TRUE(test, peer->ud_known);
	/* And it tells of no other one */
	KUNIT_EXPECT_EQ(test, peer->ud_qpn, 0x515253);
}

static void np_ud_qpn_is_learned_from_a_mad_with_the_secret(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_msg msg;

	np_test_believes_init(test);
	msg = np_true_msg(peer, NP_MSG_RESOLVE, false);
	msg.ud_pkey = 0x8000;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, peer->ud_qpn, 0);
	/* The port of the test has no UD QP, whose partition is taken for 0 */
	msg = np_true_msg(peer, NP_MSG_RELEASE, false);
	msg.ud_pkey = 0x8000;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, peer->ud_qpn, msg.ud_qpn);
	/* Another partition, or limited members both of them */
	msg.ud_pkey = 0x8001;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, peer->ud_qpn, 0);
	msg.ud_pkey = 0x8000;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, peer->ud_qpn, msg.ud_qpn);
	msg.ud_pkey = 0;
	np_test_from(t, &msg, 1);
	KUNIT_EXPECT_EQ(test, peer->ud_qpn, 0);
}

/* Whoever knows the pair, and even the transaction */
static void np_answer_to_resolve_repeats_its_nonce(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);
	struct np_peer *peer = &t->fake.peer;
	struct np_ask_resolve r = { .t = t };
	struct np_msg answer, request;

	INIT_WORK_ONSTACK(&r.work, np_ask_resolve);
	schedule_work(&r.work);
	KUNIT_EXPECT_NE(test, 0, wait_event_timeout(t->wait, READ_ONCE(t->nr_sent),
						    10 * HZ));
	request = t->sent[0];
	KUNIT_EXPECT_EQ(test, request.secret, 0);
	answer = np_true_msg(peer, NP_MSG_RESOLVE, true);
	answer.tid = request.tid;
	answer.nonce = request.nonce ^ 1;
	np_test_from(t, &answer, 1);
	answer.status = RDMA_NP_ACCESS;
	np_test_from(t, &answer, 1);
	KUNIT_EXPECT_EQ(test, peer->resolving, 1);
	KUNIT_EXPECT_EQ(test, peer->their_secret, 0);

	answer.nonce = request.nonce;
	answer.status = RDMA_NP_OK;
	np_test_from(t, &answer, 1);
	flush_work(&r.work);
	destroy_work_on_stack(&r.work);
	KUNIT_EXPECT_EQ(test, r.err, 0);
	KUNIT_EXPECT_EQ(test, peer->their_secret, answer.given);
	/* And from now on FAULTs carry it */
	t->nr_sent = 0;
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, answer.region.id, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, t->sent[0].secret, answer.given);
	np_answer_to(test, 0, RDMA_NP_OK, 0);
}

/* Else its answer would be believed no more, and the QP be lost */
static void np_fault_is_repeated_with_the_newest_secret(struct kunit *test)
{
	struct np_ask_test *t = np_ask_test(test);

	np_bind(test, 7);
	t->fake.peer.their_secret = NP_TEST_THEIRS;
	KUNIT_ASSERT_EQ(test, np_ask_fault(test, 7, 1, 0), 0);
	t->fake.peer.their_secret = NP_TEST_THEIRS + 1;
	KUNIT_ASSERT_NE(test, 0, wait_event_timeout(t->wait,
						    READ_ONCE(t->nr_sent) >= 2,
						    10 * HZ));
	KUNIT_EXPECT_EQ(test, t->sent[0].secret, NP_TEST_THEIRS);
	KUNIT_EXPECT_EQ(test, t->sent[1].secret, NP_TEST_THEIRS + 1);
	np_answer_to(test, 0, RDMA_NP_OK, 0);
}

/* --- ends ---------------------------------------------------------------------------- */

/* More than may be at work at once */
#define NP_TEST_KILLS	(WQ_DFL_ACTIVE + 1)

struct np_kill_test {
	struct completion served;
	struct work_struct serve;
	atomic_t waited;
	struct work_struct kills[NP_TEST_KILLS];
};

static struct np_kill_test *np_kill_test;

static void np_test_serve(struct work_struct *work)
{
	complete_all(&np_kill_test->served);
}

/* As np_peer_kill() waits for what is being served */
static void np_test_kill(struct work_struct *work)
{
	if (wait_for_completion_timeout(&np_kill_test->served, 10 * HZ))
		atomic_inc(&np_kill_test->waited);
}

static void np_peers_that_end_do_not_keep_out_what_they_wait_for(struct kunit *test)
{
	struct np_kill_test *t = kunit_kzalloc(test, sizeof(*t), GFP_KERNEL);
	unsigned int i;

	KUNIT_ASSERT_NOT_NULL(test, t);
	np_kill_test = t;
	init_completion(&t->served);
	INIT_WORK(&t->serve, np_test_serve);
	for (i = 0; i < NP_TEST_KILLS; i++) {
		INIT_WORK(&t->kills[i], np_test_kill);
		KUNIT_EXPECT_TRUE(test, np_peer_queue_kill(&t->kills[i]));
	}
	queue_work(np_wq, &t->serve);
	flush_work(&t->serve);
	for (i = 0; i < NP_TEST_KILLS; i++)
		flush_work(&t->kills[i]);
	KUNIT_EXPECT_EQ(test, atomic_read(&t->waited), NP_TEST_KILLS);
}

static struct kunit_case np_proto_cases[] = {
	KUNIT_CASE(np_msg_length_must_fit_the_type),
	KUNIT_CASE(np_msg_header_is_checked),
	KUNIT_CASE(np_msg_bytes_are_of_no_cpu),
	KUNIT_CASE(np_region_of_another_kind_is_refused),
	KUNIT_CASE(np_msg_garbage_is_refused_or_sane),
	KUNIT_CASE(np_msg_survives_the_wire),
	KUNIT_CASE(np_quick_message_is_what_arrived),
	KUNIT_CASE(np_quick_garbage_is_refused_or_what_arrived),
	KUNIT_CASE(np_ranges_bounds),
	KUNIT_CASE(np_lane_serves_each_fault_once),
	KUNIT_CASE(np_lane_forgets_an_earlier_boot),
	KUNIT_CASE(np_rtt_stays_in_bounds),
	KUNIT_CASE(np_addr_only_the_other_end),
	KUNIT_CASE(np_peers_that_end_do_not_keep_out_what_they_wait_for),
	{}
};

static struct kunit_suite np_proto_suite = {
	.name = "nprdma_proto",
	.test_cases = np_proto_cases,
};

static struct kunit_case np_ask_cases[] = {
	KUNIT_CASE(np_fault_has_one_event),
	KUNIT_CASE(np_fault_lanes_are_bounded),
	KUNIT_CASE(np_fault_lanes_close_while_the_peer_is_full),
	KUNIT_CASE(np_fault_alone_waits_for_a_full_peer),
	KUNIT_CASE(np_fault_dies_with_the_qp),
	KUNIT_CASE_SLOW(np_fault_is_repeated_then_given_up),
	KUNIT_CASE_SLOW(np_fault_working_is_not_given_up),
	KUNIT_CASE(np_fault_repeated_too_early_teaches),
	KUNIT_CASE(np_quick_transport_that_loses_all_is_left),
	KUNIT_CASE(np_quick_transport_that_loses_some_is_used),
	KUNIT_CASE_SLOW(np_fault_is_not_repeated_out_of_place),
	KUNIT_CASE_SLOW(np_answer_to_a_repetition_hastens_the_next),
	KUNIT_CASE_SLOW(np_requests_are_not_sent_again_together),
	KUNIT_CASE(np_hold_is_kept_and_given_back_once),
	KUNIT_CASE(np_hold_outlives_a_copy_beside_its_answer),
	KUNIT_CASE(np_hold_answered_while_its_qp_ends_is_none),
	KUNIT_CASE(np_hold_not_asked_for_is_given_back),
	KUNIT_CASE(np_holds_are_bounded),
	KUNIT_CASE(np_hold_nobody_learns_of_is_given_back),
	KUNIT_CASE(np_gone_waits_for_forget),
	KUNIT_CASE(np_gone_event_unread_at_forget_is_taken_back),
	KUNIT_CASE(np_gone_closed_channel_uses_nothing),
	KUNIT_CASE(np_gone_waits_for_resolve),
	KUNIT_CASE(np_channel_is_bounded),
	KUNIT_CASE(np_resolved_regions_are_bounded),
	KUNIT_CASE(np_fault_is_within_the_owners_bounds),
	KUNIT_CASE(np_resolve_of_another_kind_fails),
	KUNIT_CASE(np_channels_of_a_region_are_bounded),
	KUNIT_CASE(np_forget_undoes_all_resolves_before_it),
	KUNIT_CASE(np_forget_undoes_no_resolve_under_way),
	KUNIT_CASE_SLOW(np_resolves_under_way_are_bounded),
	KUNIT_CASE(np_device_that_leaves_waits_for_no_peer),
	KUNIT_CASE(np_forgets_under_way_are_bounded),
	KUNIT_CASE(np_requests_other_than_fault_are_bounded),
	KUNIT_CASE(np_requests_of_one_peer_are_bounded),
	KUNIT_CASE(np_pages_under_hold_are_bounded),
	KUNIT_CASE_SLOW(np_gone_is_told_of_each_region),
	KUNIT_CASE_SLOW(np_gone_is_seldom_repeated),
	KUNIT_CASE(np_forgotten_region_makes_room_for_a_gone),
	KUNIT_CASE_SLOW(np_peer_that_answers_no_gone_hears_of_the_next),
	KUNIT_CASE(np_all_under_way_is_bounded),
	KUNIT_CASE(np_dead_regions_are_bounded),
	KUNIT_CASE(np_qp_whose_destruction_fails_is_ended),
	KUNIT_CASE(np_qp_connected_anew_is_not_ended_for_a_former_peer),
	KUNIT_CASE(np_stranger_costs_no_query_of_the_device),
	KUNIT_CASE(np_peer_is_not_that_of_a_former_qp),
	KUNIT_CASE(np_peer_made_after_a_modification_outlives_it),
	KUNIT_CASE(np_regions_that_a_peer_knows_are_bounded),
	KUNIT_CASE(np_malformed_request_is_called_that_and_not_obeyed),
	KUNIT_CASE(np_stranger_is_answered_the_same_whatever_the_reason),
	KUNIT_CASE(np_handler_makes_no_address_handle),
	KUNIT_CASE(np_answers_to_strangers_are_bounded),
	KUNIT_CASE(np_mad_is_believed_from_qp1_only),
	KUNIT_CASE(np_message_without_the_secret_is_not_obeyed),
	KUNIT_CASE(np_gone_without_the_secret_waits_for_who_uses_the_keys),
	KUNIT_CASE(np_quick_message_is_believed_from_its_qp_only),
	KUNIT_CASE(np_ud_qpn_is_learned_from_a_mad_with_the_secret),
	KUNIT_CASE(np_answer_to_resolve_repeats_its_nonce),
	KUNIT_CASE(np_fault_is_repeated_with_the_newest_secret),
	{}
};

static struct kunit_suite np_ask_suite = {
	.name = "nprdma_ask",
	.init = np_ask_init_test,
	.exit = np_ask_exit_test,
	.test_cases = np_ask_cases,
};

kunit_test_suites(&np_proto_suite, &np_ask_suite);

MODULE_DESCRIPTION("KUnit tests of nprdma's protocol");
MODULE_LICENSE("GPL");
