// SPDX-License-Identifier: GPL-2.0
/*
 * Messages between kernels: encoding and decoding, and the small decisions of
 * the protocol that need no device: bounds of a request, when to ask again,
 * and whether an arriving FAULT was seen before.
 *
 * Whatever comes out of np_msg_decode() is within the bounds that the rest of
 * the protocol relies on; nothing else looks at bytes of the wire.
 */
#include <linux/build_bug.h>
#include <linux/errno.h>
#include <linux/overflow.h>
#include <linux/string.h>
#include <linux/time64.h>
#include <kunit/visibility.h>

#include "np_proto.h"

static u16 np_fault_length(unsigned int nr)
{
	return offsetof(struct np_wire_fault, ranges) +
	       nr * sizeof(struct np_wire_range);
}

static u16 np_faulted_length(unsigned int nr)
{
	return offsetof(struct np_wire_faulted, words) + nr * sizeof(__be64);
}

static u16 np_encode_answer(const struct np_msg *msg, struct np_wire *wire)
{
	unsigned int i;

	switch (msg->type) {
	case NP_MSG_RESOLVE:
		if (msg->status != RDMA_NP_OK)
			return 0;
		wire->region = (struct np_wire_region) {
			.id = cpu_to_be64(msg->region.id),
			.base = cpu_to_be64(msg->region.base),
			.length = cpu_to_be64(msg->region.length),
			.read_addr = cpu_to_be64(msg->region.read_addr),
			.write_addr = cpu_to_be64(msg->region.write_addr),
			.table_addr = cpu_to_be64(msg->region.table_addr),
			.signature = cpu_to_be64(msg->region.signature),
			.access = cpu_to_be32(msg->region.access),
			.table_key = cpu_to_be32(msg->region.table_key),
			.read_key = cpu_to_be32(msg->region.read_key),
			.write_key = cpu_to_be32(msg->region.write_key),
			.secret = cpu_to_be64(msg->given),
			.page_shift = msg->region.page_shift,
			.unit_shift = msg->region.unit_shift,
			.read_order = msg->region.read_order,
			.part_shift = msg->region.part_shift,
			.max_pages = cpu_to_be32(msg->region.max_pages),
			.max_ranges = cpu_to_be16(msg->region.max_ranges),
			.lanes = cpu_to_be16(msg->region.lanes),
		};
		return sizeof(wire->region);
	case NP_MSG_FAULT:
		if (msg->status != RDMA_NP_OK)
			return 0;
		wire->faulted.hold_id = cpu_to_be64(msg->faulted.hold_id);
		wire->faulted.lease_addr = cpu_to_be64(msg->faulted.lease_addr);
		wire->faulted.lease_length = cpu_to_be64(msg->faulted.lease_length);
		wire->faulted.lease_key = cpu_to_be32(msg->faulted.lease_key);
		wire->faulted.nr_words = cpu_to_be32(msg->faulted.nr_words);
		for (i = 0; i < msg->faulted.nr_words; i++)
			wire->faulted.words[i] =
				cpu_to_be64(msg->faulted.words[i]);
		return np_faulted_length(msg->faulted.nr_words);
	default:
		return 0;
	}
}

static u16 np_encode_request(const struct np_msg *msg, struct np_wire *wire)
{
	unsigned int i;

	switch (msg->type) {
	case NP_MSG_RESOLVE:
		wire->resolve.rkey = cpu_to_be32(msg->rkey);
		wire->resolve.addr = cpu_to_be64(msg->addr);
		return sizeof(wire->resolve);
	case NP_MSG_FAULT:
		wire->fault.region_id = cpu_to_be64(msg->fault.region_id);
		wire->fault.flags = cpu_to_be32(msg->fault.flags);
		wire->fault.lane = cpu_to_be16(msg->fault.lane);
		wire->fault.nr_ranges = cpu_to_be16(msg->fault.nr_ranges);
		for (i = 0; i < msg->fault.nr_ranges; i++) {
			wire->fault.ranges[i].addr =
				cpu_to_be64(msg->fault.ranges[i].addr);
			wire->fault.ranges[i].length =
				cpu_to_be64(msg->fault.ranges[i].length);
		}
		return np_fault_length(msg->fault.nr_ranges);
	case NP_MSG_RELEASE:
	case NP_MSG_RECALL:
		wire->release.hold_id = cpu_to_be64(msg->hold_id);
		return sizeof(wire->release);
	default:
		wire->forget.region_id = cpu_to_be64(msg->forget.region_id);
		wire->forget.seq = cpu_to_be64(msg->forget.seq);
		return sizeof(wire->forget);
	}
}

/**
 * np_msg_encode - Write a message of ours as it goes over the wire
 * @msg: the message; its counts are within bounds
 * @wire: filled completely, zero where nothing is said
 */
void np_msg_encode(const struct np_msg *msg, struct np_wire *wire)
{
	u16 length;

	memset(wire, 0, sizeof(*wire));
	length = msg->answer ? np_encode_answer(msg, wire) :
			       np_encode_request(msg, wire);
	wire->hdr = (struct np_wire_hdr) {
		.version = NP_WIRE_VERSION,
		.type = msg->type,
		.flags = msg->answer ? NP_WIRE_ANSWER : 0,
		.status = msg->answer ? msg->status : 0,
		.length = cpu_to_be16(length),
		.ud_pkey = cpu_to_be16(msg->ud_pkey),
		.ud_qpn = cpu_to_be32(msg->ud_qpn),
		.src_qpn = cpu_to_be32(msg->src_qpn),
		.dst_qpn = cpu_to_be32(msg->dst_qpn),
		.incarnation = cpu_to_be64(msg->incarnation),
		.tid = cpu_to_be64(msg->tid),
		.secret = cpu_to_be64(msg->type == NP_MSG_RESOLVE ? msg->nonce :
								    msg->secret),
	};
}
EXPORT_SYMBOL_IF_KUNIT(np_msg_encode);

static int np_decode_answer(const struct np_wire *wire, u16 length,
			    struct np_msg *msg)
{
	unsigned int i, nr;

	/* Only success says more than a status */
	if (msg->status != RDMA_NP_OK ||
	    (msg->type != NP_MSG_RESOLVE && msg->type != NP_MSG_FAULT))
		return length ? -EBADMSG : 0;

	if (msg->type == NP_MSG_RESOLVE) {
		u64 end;

		if (length != sizeof(wire->region) ||
		    wire->region.reserved2 ||
		    memchr_inv(wire->region.reserved3, 0,
			       sizeof(wire->region.reserved3)))
			return -EBADMSG;
		msg->region = (struct np_resolve) {
			.id = be64_to_cpu(wire->region.id),
			.base = be64_to_cpu(wire->region.base),
			.length = be64_to_cpu(wire->region.length),
			.read_addr = be64_to_cpu(wire->region.read_addr),
			.write_addr = be64_to_cpu(wire->region.write_addr),
			.table_addr = be64_to_cpu(wire->region.table_addr),
			.signature = be64_to_cpu(wire->region.signature),
			.access = be32_to_cpu(wire->region.access),
			.table_key = be32_to_cpu(wire->region.table_key),
			.read_key = be32_to_cpu(wire->region.read_key),
			.write_key = be32_to_cpu(wire->region.write_key),
			.page_shift = wire->region.page_shift,
			.unit_shift = wire->region.unit_shift,
			.read_order = wire->region.read_order,
			.part_shift = wire->region.part_shift,
			.max_pages = be32_to_cpu(wire->region.max_pages),
			.max_ranges = be16_to_cpu(wire->region.max_ranges),
			.lanes = be16_to_cpu(wire->region.lanes),
		};
		msg->given = be64_to_cpu(wire->region.secret);
		if (!msg->region.length || !msg->given ||
		    check_add_overflow(msg->region.base,
				       msg->region.length - 1, &end))
			return -EBADMSG;
		return 0;
	}

	if (length < np_faulted_length(0))
		return -EBADMSG;
	nr = be32_to_cpu(wire->faulted.nr_words);
	if (nr > RDMA_NP_EVENT_WORDS || length != np_faulted_length(nr))
		return -EBADMSG;
	msg->faulted.hold_id = be64_to_cpu(wire->faulted.hold_id);
	msg->faulted.lease_addr = be64_to_cpu(wire->faulted.lease_addr);
	msg->faulted.lease_length = be64_to_cpu(wire->faulted.lease_length);
	msg->faulted.lease_key = be32_to_cpu(wire->faulted.lease_key);
	msg->faulted.nr_words = nr;
	for (i = 0; i < nr; i++)
		msg->faulted.words[i] = be64_to_cpu(wire->faulted.words[i]);
	return 0;
}

static int np_decode_request(const struct np_wire *wire, u16 length,
			     struct np_msg *msg)
{
	unsigned int i, nr;

	if (msg->status)
		return -EBADMSG;

	switch (msg->type) {
	case NP_MSG_RESOLVE:
		if (length != sizeof(wire->resolve) || wire->resolve.reserved)
			return -EBADMSG;
		msg->rkey = be32_to_cpu(wire->resolve.rkey);
		msg->addr = be64_to_cpu(wire->resolve.addr);
		return 0;
	case NP_MSG_FAULT:
		if (length < np_fault_length(1))
			return -EBADMSG;
		nr = be16_to_cpu(wire->fault.nr_ranges);
		if (nr > RDMA_NP_MAX_RANGES || length != np_fault_length(nr))
			return -EBADMSG;
		msg->fault.region_id = be64_to_cpu(wire->fault.region_id);
		msg->fault.flags = be32_to_cpu(wire->fault.flags);
		msg->fault.lane = be16_to_cpu(wire->fault.lane);
		msg->fault.nr_ranges = nr;
		if (msg->fault.lane >= NP_LANES)
			return -EBADMSG;
		for (i = 0; i < nr; i++) {
			msg->fault.ranges[i].addr =
				be64_to_cpu(wire->fault.ranges[i].addr);
			msg->fault.ranges[i].length =
				be64_to_cpu(wire->fault.ranges[i].length);
		}
		if (np_ranges_check(msg->fault.ranges, nr, msg->fault.flags))
			return -EBADMSG;
		return 0;
	case NP_MSG_RELEASE:
	case NP_MSG_RECALL:
		if (length != sizeof(wire->release))
			return -EBADMSG;
		msg->hold_id = be64_to_cpu(wire->release.hold_id);
		return 0;
	default:
		if (length != sizeof(wire->forget))
			return -EBADMSG;
		msg->forget.region_id = be64_to_cpu(wire->forget.region_id);
		msg->forget.seq = be64_to_cpu(wire->forget.seq);
		return 0;
	}
}

/**
 * np_msg_decode - Check and read what a peer sent
 * @wire: hostile bytes
 * @msg: filled on success; for -EPROTO and -EBADMSG its header is valid and
 *       enough to answer RDMA_NP_PROTO
 *
 * An answer of another version is one with the status RDMA_NP_PROTO: so who asks hears at
 * once that the two hosts do not understand each other.
 *
 * Return: 0; -EPROTO: a request of another version; -EBADMSG: malformed; -EINVAL: not
 * even the header makes sense, so there is nothing to answer
 */
int np_msg_decode(const struct np_wire *wire, struct np_msg *msg)
{
	const struct np_wire_hdr *hdr = &wire->hdr;
	u16 length = be16_to_cpu(hdr->length);

	msg->type = hdr->type;
	msg->answer = hdr->flags & NP_WIRE_ANSWER;
	msg->status = hdr->status;
	msg->quick = false;
	msg->ud_pkey = be16_to_cpu(hdr->ud_pkey);
	msg->ud_qpn = be32_to_cpu(hdr->ud_qpn);
	msg->src_qpn = be32_to_cpu(hdr->src_qpn);
	msg->dst_qpn = be32_to_cpu(hdr->dst_qpn);
	msg->incarnation = be64_to_cpu(hdr->incarnation);
	msg->tid = be64_to_cpu(hdr->tid);
	msg->secret = be64_to_cpu(hdr->secret);
	msg->nonce = 0;
	msg->given = 0;
	if (msg->type == NP_MSG_RESOLVE)
		swap(msg->secret, msg->nonce);

	/* The header is the same in all versions */
	if (msg->src_qpn >> 24 || msg->dst_qpn >> 24 || msg->ud_qpn >> 24 ||
	    !msg->tid)
		return -EINVAL;
	if (hdr->version != NP_WIRE_VERSION && msg->answer) {
		/* Whatever it says, it is no answer to what was asked here */
		msg->status = RDMA_NP_PROTO;
		return 0;
	}
	if (hdr->version != NP_WIRE_VERSION)
		return -EPROTO;
	if (!msg->type || msg->type > NP_MSG_LAST ||
	    hdr->flags & ~NP_WIRE_ANSWER || hdr->reserved ||
	    length > sizeof(wire->body))
		return -EBADMSG;
	if (msg->answer && msg->status > RDMA_NP_PROTO &&
	    (msg->type != NP_MSG_FAULT || (msg->status != NP_WIRE_WORKING &&
					   msg->status != NP_WIRE_FULL)))
		return -EBADMSG;

	return msg->answer ? np_decode_answer(wire, length, msg) :
			     np_decode_request(wire, length, msg);
}
EXPORT_SYMBOL_IF_KUNIT(np_msg_decode);

/* A part of the whole address space covers the addresses with the same upper bits */
static bool np_part_is_aligned(const struct np_resolve *info)
{
	u64 size;

	if (!info->part_shift)
		return true;
	if (info->part_shift < RDMA_NP_PAGE_SHIFT || info->part_shift >= 64)
		return false;
	size = 1ULL << info->part_shift;
	return info->length == size && !(info->base & (size - 1));
}

/**
 * np_resolve_accept - Can this host use a region of another one
 * @info: what its owner says; well-formed. Bounds become ours where those are smaller
 *
 * The library READs a word for each 4 KiB, and compares one word of each unit of at
 * most 64 bytes. It finds the part for an address by that address's upper bits.
 *
 * Return: NULL, or why not
 */
const char *np_resolve_accept(struct np_resolve *info)
{
	if (info->page_shift != RDMA_NP_PAGE_SHIFT)
		return "its pages have another size";
	if (info->unit_shift < NP_UNIT_SHIFT_MIN ||
	    info->unit_shift > NP_UNIT_SHIFT)
		return "it reads units of another size";
	if (!info->max_pages || !info->max_ranges || !info->lanes)
		return "it serves no page faults";

	if (!np_part_is_aligned(info))
		return "its parts are not what they are said to be";

	info->max_pages = min(info->max_pages, RDMA_NP_MAX_PAGES);
	info->max_ranges = min(info->max_ranges, RDMA_NP_MAX_RANGES);
	info->lanes = min(info->lanes, NP_LANES);
	/* What we never heard of is no licence */
	if (info->read_order > RDMA_NP_READ_OUT_OF_ORDER)
		info->read_order = RDMA_NP_READ_UNKNOWN;
	return NULL;
}
EXPORT_SYMBOL_IF_KUNIT(np_resolve_accept);

/**
 * np_ranges_pages - How many pages do the ranges of a FAULT touch
 * @ranges: none is empty or wraps
 * @nr: at most RDMA_NP_MAX_RANGES of them; not 0
 * @flags: RDMA_NP_FAULT_*; the last range of a lease holds the others, which are not counted
 *
 * Return: pages
 */
u64 np_ranges_pages(const struct rdma_np_range *ranges, unsigned int nr, u32 flags)
{
	u64 pages = 0;
	unsigned int i;

	/* At most 2^52 for each: the sum cannot wrap */
	for (i = flags & RDMA_NP_FAULT_LEASE ? nr - 1 : 0; i < nr; i++)
		pages += ((ranges[i].addr + ranges[i].length - 1) >>
			  RDMA_NP_PAGE_SHIFT) -
			 (ranges[i].addr >> RDMA_NP_PAGE_SHIFT) + 1;
	return pages;
}
EXPORT_SYMBOL_IF_KUNIT(np_ranges_pages);

/**
 * np_range_holds - Is a range a part of another one
 * @all: neither is empty nor wraps
 * @part: likewise
 *
 * Return: true if so
 */
bool np_range_holds(const struct rdma_np_range *all, const struct rdma_np_range *part)
{
	return part->addr >= all->addr &&
	       part->addr + (part->length - 1) <= all->addr + (all->length - 1);
}

/**
 * np_ranges_check - Are the ranges of a FAULT within the bounds of one request
 * @ranges: the ranges
 * @nr: their number
 * @flags: RDMA_NP_FAULT_*
 *
 * Says nothing about the region, which may be somewhere else.
 *
 * Return: 0 or -EINVAL
 */
int np_ranges_check(const struct rdma_np_range *ranges, unsigned int nr, u32 flags)
{
	unsigned int i;

	if (!nr || nr > RDMA_NP_MAX_RANGES ||
	    flags & ~(RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE))
		return -EINVAL;
	if (flags & RDMA_NP_FAULT_LEASE && (!(flags & RDMA_NP_FAULT_HOLD) || nr > 2))
		return -EINVAL;

	for (i = 0; i < nr; i++) {
		u64 last;

		if (!ranges[i].length ||
		    check_add_overflow(ranges[i].addr, ranges[i].length - 1,
				       &last))
			return -EINVAL;
	}
	if (flags & RDMA_NP_FAULT_LEASE && !np_range_holds(&ranges[nr - 1], &ranges[0]))
		return -EINVAL;
	return np_ranges_pages(ranges, nr, flags) > RDMA_NP_MAX_PAGES ? -EINVAL : 0;
}
EXPORT_SYMBOL_GPL(np_ranges_check);

/**
 * np_errno_to_status - What to tell the peer about an error of the regions
 * @err: 0 or a negative errno
 *
 * Return: enum rdma_np_status
 */
u32 np_errno_to_status(int err)
{
	switch (err) {
	case 0:
		return RDMA_NP_OK;
	case -ENXIO:
		return RDMA_NP_GONE;
	case -EPERM:
	case -EACCES:
		return RDMA_NP_ACCESS;
	case -EFAULT:
	case -ERANGE:
		return RDMA_NP_ADDRESS;
	case -ENOMEM:
		return RDMA_NP_NOMEM;
	case -ENOTCONN:
		return RDMA_NP_QP;
	default:
		/* -EAGAIN, -EINTR and whatever may pass */
		return RDMA_NP_BUSY;
	}
}
EXPORT_SYMBOL_IF_KUNIT(np_errno_to_status);

/**
 * np_status_to_errno - What a blocking method returns for a status
 * @status: enum rdma_np_status
 *
 * Return: 0 or a negative errno
 */
int np_status_to_errno(u32 status)
{
	switch (status) {
	case RDMA_NP_OK:
		return 0;
	case RDMA_NP_GONE:
		return -ENXIO;
	case RDMA_NP_ACCESS:
		return -EACCES;
	case RDMA_NP_ADDRESS:
		return -EFAULT;
	case RDMA_NP_BUSY:
		return -EBUSY;
	case RDMA_NP_TIMEOUT:
		return -ETIMEDOUT;
	case RDMA_NP_NOMEM:
		return -ENOMEM;
	case RDMA_NP_QP:
		return -ENOTCONN;
	default:
		return -EPROTO;
	}
}
EXPORT_SYMBOL_IF_KUNIT(np_status_to_errno);

/**
 * np_rtt_sample - Learn from a request of which it is known which copy was answered
 * @rtt: the estimate
 * @us: microseconds it took
 */
void np_rtt_sample(struct np_rtt *rtt, u64 us)
{
	s64 err;

	us = min_t(u64, us, NP_RTO_MAX_US);
	if (!rtt->srtt_us) {
		rtt->srtt_us = max_t(u32, us, 1);
		rtt->var_us = us / 2;
		return;
	}
	err = (s64)us - rtt->srtt_us;
	rtt->srtt_us = max_t(s64, rtt->srtt_us + err / 8, 1);
	rtt->var_us += ((err < 0 ? -err : err) - (s64)rtt->var_us) / 4;
}
EXPORT_SYMBOL_IF_KUNIT(np_rtt_sample);

/**
 * np_rtt_timeout - How long to wait for an answer
 * @rtt: the estimate
 * @tries: times the request was sent already, the last time included
 *
 * Return: microseconds
 */
unsigned long np_rtt_timeout(const struct np_rtt *rtt, unsigned int tries)
{
	u64 us = NP_RTO_FIRST_US;

	if (rtt->srtt_us)
		us = clamp_t(u64, rtt->srtt_us + 4ULL * rtt->var_us,
			     NP_RTO_MIN_US, NP_RTO_MAX_US);
	if (tries > 1)
		us <<= min(tries - 1, 16U);
	return min_t(u64, us, NP_RTO_MAX_US);
}
EXPORT_SYMBOL_IF_KUNIT(np_rtt_timeout);

/**
 * np_lane_arrive - A FAULT arrived for this lane
 * @lane: the answerer's lane
 * @msg: the request
 *
 * Another incarnation means that the asker's host was booted again since, so
 * what the lane remembers is of nobody.
 *
 * Context: under the peer's lock
 * Return: what to do with it
 */
enum np_lane_verdict np_lane_arrive(struct np_lane *lane,
				    const struct np_msg *msg)
{
	if (lane->incarnation == msg->incarnation) {
		if (msg->tid < lane->tid)
			return NP_LANE_STALE;
		if (msg->tid == lane->tid)
			return lane->working ? NP_LANE_WORKING : NP_LANE_REPLAY;
	}
	if (lane->working)
		return NP_LANE_BUSY;

	lane->incarnation = msg->incarnation;
	lane->tid = msg->tid;
	lane->working = true;
	return NP_LANE_NEW;
}
EXPORT_SYMBOL_IF_KUNIT(np_lane_arrive);

/**
 * np_lane_answer - A FAULT was served
 * @lane: the lane that np_lane_arrive() called NEW
 * @answer: what is answered, now and to each copy
 *
 * Context: under the peer's lock
 */
void np_lane_answer(struct np_lane *lane, const struct np_msg *answer)
{
	lane->answer = *answer;
	lane->working = false;
}
EXPORT_SYMBOL_IF_KUNIT(np_lane_answer);

/**
 * np_addr_match - Did a MAD come from the other end of a QP
 * @qp: the other end, as the QP's address vector names it
 * @mad: the sender
 *
 * Return: true if so
 */
bool np_addr_match(const struct np_addr *qp, const struct np_addr *mad)
{
	if (qp->roce != mad->roce)
		return false;
	if (!qp->roce && qp->lid != mad->lid)
		return false;
	if (qp->roce || qp->grh)
		return qp->grh && mad->grh &&
		       !memcmp(&qp->gid, &mad->gid, sizeof(qp->gid));
	return true;
}
EXPORT_SYMBOL_IF_KUNIT(np_addr_match);
