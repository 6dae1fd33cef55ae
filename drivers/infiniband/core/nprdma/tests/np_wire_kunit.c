// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests of what goes over the wire between kernels: messages and hostile bytes,
 * FAULT executed at most once, round trips, and addresses.
 */
#include <kunit/test.h>
#include <linux/prandom.h>

#include "np_ask_fixture.h"

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
	NP_EXPECT_BAD(-EBADMSG, wire.fault.flags = cpu_to_be32(8));
	/* A lease is a hold, of one range, within another at most */
	NP_EXPECT_BAD(-EBADMSG, wire.fault.flags = cpu_to_be32(RDMA_NP_FAULT_LEASE));
	msg.fault.flags |= RDMA_NP_FAULT_LEASE;
	msg.fault.nr_ranges = 2;
	msg.fault.ranges[1] = (struct rdma_np_range){ 0, 4096 + 5 };
	np_msg_encode(&msg, &good);
	NP_EXPECT_BAD(0, ({}));
	NP_EXPECT_BAD(0, (wire.fault.nr_ranges = cpu_to_be16(1),
			  wire.hdr.length = cpu_to_be16(be16_to_cpu(wire.hdr.length) - 16)));
	NP_EXPECT_BAD(-EBADMSG, wire.fault.ranges[1].length = cpu_to_be64(4096 + 4));
	NP_EXPECT_BAD(-EBADMSG, wire.fault.ranges[1].addr = cpu_to_be64(6));
	NP_EXPECT_BAD(-EBADMSG, (wire.fault.nr_ranges = cpu_to_be16(3),
				 wire.hdr.length = cpu_to_be16(be16_to_cpu(wire.hdr.length) + 16)));

	msg = np_sample(NP_MSG_FAULT, false);
	np_msg_encode(&msg, &good);
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

	msg = np_sample(NP_MSG_RESOLVE, true);
	np_msg_encode(&msg, &good);
	NP_EXPECT_BAD(-EBADMSG, wire.region.length = 0);
	NP_EXPECT_BAD(-EBADMSG, wire.region.base = cpu_to_be64(U64_MAX - 7));
	NP_EXPECT_BAD(-EBADMSG, wire.region.reserved2 = cpu_to_be32(1));
	NP_EXPECT_BAD(-EBADMSG, wire.region.reserved3[0] = cpu_to_be64(1));
	NP_EXPECT_BAD(-EBADMSG, wire.region.reserved3[1] = cpu_to_be64(1));
	/* Whether they can be used from here is not the decoder's to say */
	NP_EXPECT_BAD(0, wire.region.page_shift = 16);
	NP_EXPECT_BAD(-EBADMSG, wire.region.secret = 0);
	/* A refusal has its header only */
	NP_EXPECT_BAD(-EBADMSG, wire.hdr.status = RDMA_NP_ACCESS);
	NP_EXPECT_BAD(-EBADMSG, (wire.hdr.status = NP_WIRE_WORKING,
				 wire.hdr.length = 0));
	NP_EXPECT_BAD(0, (wire.hdr.status = RDMA_NP_ACCESS,
			  wire.hdr.length = 0));

	msg = np_sample(NP_MSG_RESOLVE, false);
	np_msg_encode(&msg, &good);
	NP_EXPECT_BAD(0, ({}));
	NP_EXPECT_BAD(-EBADMSG, wire.resolve.reserved = cpu_to_be32(1));
#undef NP_EXPECT_BAD
}

/* Who asks hears it at once, and not that nobody is there */
static void np_answer_of_another_version_is_heard(struct kunit *test)
{
	struct np_msg msg = np_sample(NP_MSG_RESOLVE, true), heard;
	struct np_wire wire;

	np_msg_encode(&msg, &wire);
	wire.hdr.version = NP_WIRE_VERSION + 1;
	wire.hdr.status = 0xff;
	wire.hdr.length = cpu_to_be16(U16_MAX);
	KUNIT_ASSERT_EQ(test, np_msg_decode(&wire, &heard), 0);
	KUNIT_EXPECT_EQ(test, heard.status, RDMA_NP_PROTO);
	KUNIT_EXPECT_EQ(test, heard.tid, msg.tid);
	/* By which it is known to be of who was asked */
	KUNIT_EXPECT_EQ(test, heard.nonce, msg.nonce);
	wire.hdr.flags = 0;
	KUNIT_EXPECT_EQ(test, np_msg_decode(&wire, &heard), -EPROTO);
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
		12, 6, 1, 0,			/* shifts, read_order, part_shift */
		0, 0x12, 0x34, 0x56,		/* max_pages */
		0x12, 0x34, 0x43, 0x21,		/* max_ranges, lanes */
		0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
		0, 0, 0, 0, 0, 0, 0, 0,
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

	/* A part is found by the upper bits of its addresses */
	NP_EXPECT_ACCEPT(false, info.part_shift = 12);
	NP_EXPECT_ACCEPT(true, (info.part_shift = 12, info.length = 0x1000));
	NP_EXPECT_ACCEPT(true, (info.part_shift = 30, info.length = SZ_1G,
				info.base = 3ULL * SZ_1G));
	NP_EXPECT_ACCEPT(false, (info.part_shift = 30, info.length = SZ_1G,
				 info.base = 3ULL * SZ_1G + 0x1000));
	NP_EXPECT_ACCEPT(false, (info.part_shift = 30, info.length = SZ_1G - 1,
				 info.base = 3ULL * SZ_1G));
	NP_EXPECT_ACCEPT(false, (info.part_shift = 11, info.length = 0x800));
	NP_EXPECT_ACCEPT(false, (info.part_shift = 64, info.base = 0,
				 info.length = 1));
	NP_EXPECT_ACCEPT(false, (info.part_shift = 255, info.base = 0));

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
		if (wire.hdr.version != NP_WIRE_VERSION) {
			/* An answer of whom we do not understand: what it says is not read */
			KUNIT_ASSERT_TRUE(test, msg.answer);
			KUNIT_ASSERT_EQ(test, msg.status, RDMA_NP_PROTO);
			continue;
		}
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

static struct kunit_case np_wire_cases[] = {
	KUNIT_CASE(np_msg_length_must_fit_the_type),
	KUNIT_CASE(np_msg_header_is_checked),
	KUNIT_CASE(np_answer_of_another_version_is_heard),
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
	{}
};

static struct kunit_suite np_wire_suite = {
	.name = "nprdma_proto_wire",
	.test_cases = np_wire_cases,
};

kunit_test_suite(np_wire_suite);
