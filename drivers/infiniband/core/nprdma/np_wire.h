/* SPDX-License-Identifier: GPL-2.0 */
/*
 * nprdma: messages between kernels, as they go over the wire and in the kernel's own
 * terms, and the small decisions of the protocol that need no device (wire.c).
 */
#ifndef NP_WIRE_H
#define NP_WIRE_H

#include <linux/types.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_verbs.h>

#include "np.h"

/* A class of vendor range 2. The OUI has the "locally administered" bit. */
#define NP_MAD_CLASS		0x3c
#define NP_MAD_CLASS_VERSION	1
#define NP_MAD_OUI		{ 0x02, 'N', 'P' }

#define NP_WIRE_VERSION		4
#define NP_WIRE_SIZE		IB_MGMT_VENDOR_DATA

enum np_msg_type {
	NP_MSG_RESOLVE = 1,
	NP_MSG_FAULT,
	NP_MSG_RELEASE,
	NP_MSG_FORGET,
	NP_MSG_GONE,
	NP_MSG_RECALL,
	NP_MSG_LAST = NP_MSG_RECALL,
};

/* np_wire_hdr.flags */
#define NP_WIRE_ANSWER		BIT(0)

/*
 * np_wire_hdr.status of FAULT, beside enum rdma_np_status: the request arrived and is
 * being served, which is said when it arrives again; there are too many FAULTs here,
 * and this one was not even looked at, which user space hears of as RDMA_NP_BUSY.
 * Nobody is kept waiting for an answer to anything else by who says that it is at work.
 */
#define NP_WIRE_WORKING		0x80
#define NP_WIRE_FULL		0x81

/**
 * struct np_wire_hdr - begins each message
 * @version: NP_WIRE_VERSION
 * @type: enum np_msg_type
 * @flags: NP_WIRE_ANSWER
 * @status: of an answer; 0 in a request
 * @length: bytes that follow the header
 * @ud_pkey: the partition of @ud_qpn
 * @ud_qpn: the sender's UD QP for the quick transport; 0: none
 * @reserved: 0
 * @src_qpn: the sender's QP of the connected pair
 * @dst_qpn: the receiver's
 * @incarnation: random number of the sender's boot
 * @tid: transaction, counted up by the asker from boot to reboot
 * @secret: of the owner of the memory that it is about, for this pair; with RESOLVE, a
 *	    nonce of the asker's, which the answer repeats
 *
 * The header is the same in all versions from 3 on.
 */
struct np_wire_hdr {
	u8 version;
	u8 type;
	u8 flags;
	u8 status;
	__be16 length;
	__be16 ud_pkey;
	__be32 ud_qpn;
	__be32 reserved;
	__be32 src_qpn;
	__be32 dst_qpn;
	__be64 incarnation;
	__be64 tid;
	__be64 secret;
};

/* The address counts if the key is of a whole address space */
struct np_wire_resolve {
	__be32 rkey;
	__be32 reserved;
	__be64 addr;
};

/* Sizes, bounds and the order of READs are what struct np_resolve says */
struct np_wire_region {
	__be64 id;
	__be64 base;
	__be64 length;
	__be64 read_addr;
	__be64 write_addr;
	__be64 table_addr;
	__be64 signature;
	__be32 access;
	__be32 table_key;
	__be32 read_key;
	__be32 write_key;
	__be64 secret;
	u8 page_shift;
	u8 unit_shift;
	u8 read_order;
	u8 part_shift;
	__be32 max_pages;
	__be16 max_ranges;
	__be16 lanes;
	__be32 reserved2;
	__be64 reserved3[3];
};

struct np_wire_range {
	__be64 addr;
	__be64 length;
};

struct np_wire_fault {
	__be64 region_id;
	__be32 flags;
	__be16 lane;
	__be16 nr_ranges;
	struct np_wire_range ranges[RDMA_NP_MAX_RANGES];
};

struct np_wire_faulted {
	__be64 hold_id;
	__be64 lease_addr;
	__be64 lease_length;
	__be32 nr_words;
	__be32 lease_key;
	__be64 words[RDMA_NP_EVENT_WORDS];
};

/* RELEASE and RECALL */
struct np_wire_release {
	__be64 hold_id;
};

/* FORGET and GONE */
struct np_wire_forget {
	__be64 region_id;
	__be64 seq;
};

struct np_wire {
	struct np_wire_hdr hdr;
	union {
		struct np_wire_resolve resolve;
		struct np_wire_region region;
		struct np_wire_fault fault;
		struct np_wire_faulted faulted;
		struct np_wire_release release;
		struct np_wire_forget forget;
		u8 body[NP_WIRE_SIZE - sizeof(struct np_wire_hdr)];
	};
};

static_assert(sizeof(struct np_wire_hdr) == 48);
static_assert(sizeof(struct np_wire_resolve) == 16);
static_assert(sizeof(struct np_wire_region) == 120);
static_assert(sizeof(struct np_wire_fault) == 144);
static_assert(sizeof(struct np_wire_faulted) == 160);
static_assert(sizeof(struct np_wire_release) == 8);
static_assert(sizeof(struct np_wire_forget) == 16);
static_assert(sizeof(struct np_wire) == NP_WIRE_SIZE);

/**
 * struct np_msg - a decoded message
 * @type: enum np_msg_type
 * @answer: it is one
 * @status: of an answer
 * @quick: came, or is to go, by the quick transport; not on the wire
 * @ud_pkey: the partition of @ud_qpn; filled in when it is sent
 * @ud_qpn: the sender's UD QP; filled in when it is sent
 * @src_qpn: the sender's QP
 * @dst_qpn: the receiver's QP
 * @incarnation: the sender's; filled in when it is sent
 * @tid: transaction
 * @secret: of the owner of the memory; 0 with RESOLVE
 * @nonce: RESOLVE and its answer: random, so that nobody else answers
 * @given: answer to RESOLVE: the secret of the messages to come
 * @rkey: RESOLVE
 * @addr: RESOLVE
 * @region: answer to RESOLVE
 * @fault: FAULT
 * @faulted: answer to FAULT
 * @hold_id: RELEASE and RECALL
 * @forget: FORGET and GONE
 */
struct np_msg {
	u8 type;
	bool answer;
	u8 status;
	bool quick;
	u16 ud_pkey;
	u32 ud_qpn;
	u32 src_qpn;
	u32 dst_qpn;
	u64 incarnation;
	u64 tid;
	u64 secret;
	u64 nonce;
	u64 given;
	union {
		struct {
			u32 rkey;
			u64 addr;
		};
		struct np_resolve region;
		struct {
			u64 region_id;
			u32 flags;
			u16 lane;
			u16 nr_ranges;
			struct rdma_np_range ranges[RDMA_NP_MAX_RANGES];
		} fault;
		struct {
			u64 hold_id;
			u64 lease_addr;
			u64 lease_length;
			u32 lease_key;
			u32 nr_words;
			u64 words[RDMA_NP_EVENT_WORDS];
		} faulted;
		u64 hold_id;
		struct {
			u64 region_id;
			u64 seq;
		} forget;
	};
};

/* FAULTs of one QP that may be under way at once */
#define NP_LANES		32

/* Is it about the memory of who asks? All others are about that of who is asked. */
static inline bool np_msg_by_owner(u8 type)
{
	return type == NP_MSG_GONE || type == NP_MSG_RECALL;
}

void np_msg_encode(const struct np_msg *msg, struct np_wire *wire);
int np_msg_decode(const struct np_wire *wire, struct np_msg *msg);
const char *np_resolve_accept(struct np_resolve *info);
u64 np_ranges_pages(const struct rdma_np_range *ranges, unsigned int nr, u32 flags);
bool np_range_holds(const struct rdma_np_range *all, const struct rdma_np_range *part);
int np_ranges_check(const struct rdma_np_range *ranges, unsigned int nr, u32 flags);
int np_status_to_errno(u32 status);
u32 np_errno_to_status(int err);

/**
 * struct np_rtt - when to ask again
 * @srtt_us: smoothed round trip; 0: none measured
 * @var_us: smoothed deviation
 */
struct np_rtt {
	u32 srtt_us;
	u32 var_us;
};

/* Bounds of the time after which a request is sent again. */
#define NP_RTO_MIN_US		20000U
#define NP_RTO_FIRST_US		100000U
#define NP_RTO_MAX_US		1000000U
/* A request that was never answered, not even WORKING, is given up after: */
#define NP_TRIES		8
/* ... and one that is still WORKING after: */
#define NP_WORKING_MS		60000U
/*
 * A GONE that was answered BUSY, or not at all, is asked again until the QP dies: as
 * many as may be under way, first after, and at last this often.
 */
#define NP_GONE_MIN_MS		100U
#define NP_GONE_MAX_MS		10000U

/*
 * Losses of the quick transport in a row, after which all goes by MAD for so long.  Then
 * one more is enough.
 */
#define NP_QUICK_TRIES		3
#define NP_QUICK_PAUSE_MS	60000U

void np_rtt_sample(struct np_rtt *rtt, u64 us);
unsigned long np_rtt_timeout(const struct np_rtt *rtt, unsigned int tries);

/**
 * enum np_lane_verdict - what to do with a FAULT that arrived
 * @NP_LANE_NEW: serve it, the lane is WORKING now
 * @NP_LANE_WORKING: a copy of what is being served: say so
 * @NP_LANE_REPLAY: a copy of what was served: send the same answer again
 * @NP_LANE_STALE: a copy of something older: drop it
 * @NP_LANE_BUSY: the asker gave up a request that is still being served
 */
enum np_lane_verdict {
	NP_LANE_NEW,
	NP_LANE_WORKING,
	NP_LANE_REPLAY,
	NP_LANE_STALE,
	NP_LANE_BUSY,
};

/**
 * struct np_lane - the answerer's memory of one of the asker's lanes
 * @incarnation: of the asker
 * @tid: newest transaction seen in this lane
 * @working: being served
 * @answer: what was answered, if not @working
 *
 * The asker has one transaction per lane at a time, with ever rising tids. So
 * one answer per lane is enough to serve each FAULT at most once, and the
 * memory is bounded by the number of lanes.
 */
struct np_lane {
	u64 incarnation;
	u64 tid;
	bool working;
	struct np_msg answer;
};

enum np_lane_verdict np_lane_arrive(struct np_lane *lane, const struct np_msg *msg);
void np_lane_answer(struct np_lane *lane, const struct np_msg *answer);

/**
 * struct np_addr - where a MAD came from, or the other end of a QP
 * @roce: Ethernet link layer: only @gid counts
 * @grh: @gid is valid
 * @lid: IB link layer
 * @qpn: of the QP that sent a message, as the adapter says
 * @gid: of the other end
 */
struct np_addr {
	bool roce;
	bool grh;
	u16 lid;
	u32 qpn;
	union ib_gid gid;
};

bool np_addr_match(const struct np_addr *qp, const struct np_addr *mad);

#endif /* NP_WIRE_H */
