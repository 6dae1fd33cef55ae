/* SPDX-License-Identifier: ((GPL-2.0 WITH Linux-syscall-note) OR BSD-2-Clause) */
/*
 * Unpinned RDMA memory regions: the interface of uverbs object "nprdma".
 *
 * A region registered with IB_UVERBS_ACCESS_UNPINNED is reached by a peer
 * through keys that RESOLVE hands out, and is made resident by FAULT. All
 * methods are ioctl methods (RDMA_VERBS_IOCTL) of the device context that the
 * QP or MR belongs to and need no privilege, but for QUERY_QP. Attributes of at most 8 bytes
 * that go to the kernel are passed by value, as for every uverbs method.
 *
 * Addresses of a region are in "base space": the address space the region was
 * registered with (the virtual address, or the IOVA that was asked for).
 *
 * A region of address 0 and length SIZE_MAX (IOVA 0) is of all memory that the process has,
 * or maps later, with one key. A process that has unmapped something, or never mapped it, has
 * no memory there.
 */
#ifndef _UAPI_RDMA_NPRDMA_H
#define _UAPI_RDMA_NPRDMA_H

#include <linux/types.h>

/* What struct rdma_np_query says in abi_version. */
#define RDMA_NP_ABI_VERSION			2

/* Object ids, in a range of the core namespace that is ours alone. */
#define UVERBS_OBJECT_NPRDMA		0x300
#define UVERBS_OBJECT_NP_CHANNEL	0x301
#define UVERBS_OBJECT_NP_HOLD		0x302

/* The same bit as IB_UVERBS_ACCESS_UNPINNED, for builds with older headers. */
#define RDMA_NP_ACCESS_UNPINNED		(1 << 10)

#define RDMA_NP_PAGE_SHIFT			12
#define RDMA_NP_PAGE_SIZE			(1 << RDMA_NP_PAGE_SHIFT)

/* Bounds of one FAULT. */
#define RDMA_NP_MAX_RANGES			8
#define RDMA_NP_MAX_PAGES			512
/* For this long a key that RESOLVE knew no region of is none's. */
#define RDMA_NP_PINNED_MS			10000
/* Residency words that one event carries. */
#define RDMA_NP_EVENT_WORDS			16
/* Bytes of what a refusal says, with the 0 behind it, and of the names in it. */
#define RDMA_NP_REFUSAL_TEXT			128
#define RDMA_NP_REFUSAL_COMMAND			16
#define RDMA_NP_REFUSAL_DEVICE			64
/* The first struct rdma_np_event: no record is smaller. */
#define RDMA_NP_EVENT_SIZE_VER0			192

/*
 * A residency word, one for each page of RDMA_NP_PAGE_SIZE. The word is little endian
 * in the owner's memory, where peers READ it, and so it is in events.
 */
#define RDMA_NP_WORD_READABLE		(1ULL << 0)
#define RDMA_NP_WORD_WRITABLE		(1ULL << 1)
#define RDMA_NP_WORD_GENERATION_SHIFT	2

/* Methods of UVERBS_OBJECT_NPRDMA. */
enum rdma_np_methods {
	RDMA_NP_METHOD_QUERY,
	RDMA_NP_METHOD_RESOLVE,
	RDMA_NP_METHOD_FAULT,
	RDMA_NP_METHOD_RELEASE,
	RDMA_NP_METHOD_FORGET,
	RDMA_NP_METHOD_QUERY_MR,
	RDMA_NP_METHOD_REFUSAL,
	RDMA_NP_METHOD_QUERY_QP,
};

/* Methods of UVERBS_OBJECT_NP_CHANNEL. */
enum rdma_np_channel_methods {
	RDMA_NP_METHOD_CHANNEL_ALLOC,
};

/* Methods of UVERBS_OBJECT_NP_HOLD. */
enum rdma_np_hold_methods {
	RDMA_NP_METHOD_HOLD_ALLOC,
	RDMA_NP_METHOD_HOLD_FREE,
};

/*
 * QUERY: what the device can do. Without RDMA_NP_QUERY_OWNER unpinned regions cannot be
 * registered on it, and REFUSAL says why; regions of peers may be
 * reached by it nevertheless. EOPNOTSUPP: these neither, as no port has MADs (iWARP).
 */
enum rdma_np_query_attrs {
	RDMA_NP_ATTR_QUERY_RESP,		/* out, struct rdma_np_query */
};

/*
 * RESOLVE: exchange the public rkey of a region of the connected peer for its
 * read, write and table keys. Blocks for a bounded time, can be killed.
 *
 * The peer's region may be of its whole address space (address 0, length SIZE_MAX). Then it
 * is made of parts, regions with keys of their own, and what is told is the part with the
 * address that the caller gives: see part_shift of struct rdma_np_region_info.
 *
 * EFAULT        the region is of the peer's whole address space, and the peer has no memory
 *               at the address that can be read
 * EACCES        no such region that this QP may reach, and none will be registered
 *               with this key for RDMA_NP_PINNED_MS from when the call began: as
 *               long it may be used as it is, and the peer's device says if it is
 *               pinned memory's
 * ENXIO         no such region now, and one may be registered with this key at any
 *               time: for each work request ask after it was posted to you
 * ENOTCONN      the QP is not RC, or neither RTR nor RTS, or its number was that of
 *               another one which was just being destroyed: make another
 * ECONNREFUSED  the peer's QP is not connected to this one, or not yet: try again
 * EHOSTUNREACH  the peer's kernel knows nothing of nprdma: it never answered
 * ETIMEDOUT     the peer answered before, but does not any more
 * EBUSY         the peer is over one of its bounds, or 64 threads wait for it
 *               on this QP: try again
 * ENOSPC        this QP has resolved 65536 regions, those that are gone but
 *               not forgotten included: FORGET some; or 16 other channels use
 *               this region through it
 * EPROTO        the peer's kernel speaks another version, has pages or units that
 *               cannot be used from here, or sends nonsense
 * EOPNOTSUPP    the port has no MADs
 * ENODEV        the device is going
 * ENOMEM        here, or at the peer: try again
 * EINTR         killed
 *
 * The channel gets RDMA_NP_EVENT_REGION_GONE for the region from here on.
 */
enum rdma_np_resolve_attrs {
	RDMA_NP_ATTR_RESOLVE_QP,		/* handle of a QP */
	RDMA_NP_ATTR_RESOLVE_CHANNEL,	/* fd of a channel */
	RDMA_NP_ATTR_RESOLVE_RKEY,		/* in, __u32 */
	RDMA_NP_ATTR_RESOLVE_RESP,		/* out, struct rdma_np_region_info */
	RDMA_NP_ATTR_RESOLVE_ADDR,		/* in, __u64, optional */
};

/*
 * FAULT: ask the peer's kernel to make ranges of a region resident. Returns 0
 * once the request is under way; then exactly one RDMA_NP_EVENT_FAULT follows on the
 * channel. EBUSY: max_outstanding requests of this QP, or unread events of
 * this channel, or with RDMA_NP_FAULT_HOLD 256 holds of this QP exist already, those
 * included whose RELEASE the peer did not answer yet; or the peer had too many
 * FAULTs to look at one of this QP's, which got RDMA_NP_BUSY, and as many are under way
 * as were left then, maybe none: one more may be for each time-out (40 ms to 1 s)
 * that passes. So there may be no event to wait for: ask again by the clock.
 * ENOENT: this QP did not resolve that region. EINVAL: also more ranges or pages than
 * the owner takes.
 */
enum rdma_np_fault_attrs {
	RDMA_NP_ATTR_FAULT_QP,		/* handle of a QP */
	RDMA_NP_ATTR_FAULT_CHANNEL,		/* fd of a channel */
	RDMA_NP_ATTR_FAULT_REQ,		/* in, struct rdma_np_fault_req */
	RDMA_NP_ATTR_FAULT_RANGES,		/* in, 1 to 8 struct rdma_np_range */
};

/*
 * With RDMA_NP_FAULT_LEASE beside RDMA_NP_FAULT_HOLD the hold has no time limit: work
 * requests in its pages need neither proof nor another hold. There are one or two ranges: the
 * first is asked for as in each FAULT; a second one, around it, says how far the lease
 * may reach where the pages are resident already. What it is of says the event, and its
 * key: work requests under the lease use this one, at the addresses that they have under
 * the region's read key, or, if it is for writing, under the write key, also to read. The owner
 * may refuse the lease: then the FAULT is as one without a hold, and hold_id is 0.
 *
 * The owner recalls the lease, by one RDMA_NP_EVENT_RECALL with its hold_id on the same
 * channel, maybe before the FAULT's own: when his memory changes there, when memory is
 * short or others want leases, or when he deregisters it. Then nothing more is posted
 * under it, and RELEASE follows when what was posted has completed; who does not do that
 * finds after some time that the key is none any more. Until then the pages stay what they were when
 * the lease was granted, whatever the owner maps there meanwhile: as with pinned memory.
 */

/* RELEASE: give back a hold. Asynchronous, without an event. */
enum rdma_np_release_attrs {
	RDMA_NP_ATTR_RELEASE_QP,		/* handle of a QP */
	RDMA_NP_ATTR_RELEASE_HOLD,		/* in, __u64, hold_id of an event */
};

/*
 * FORGET: nothing of this QP uses the keys of the region any more. After
 * RDMA_NP_EVENT_REGION_GONE (or the status RDMA_NP_GONE) this lets the peer free them.
 */
enum rdma_np_forget_attrs {
	RDMA_NP_ATTR_FORGET_QP,		/* handle of a QP */
	RDMA_NP_ATTR_FORGET_REGION,		/* in, __u64, region_id */
};

/* QUERY_MR: state and counters of a local unpinned region. EINVAL: pinned. */
enum rdma_np_query_mr_attrs {
	RDMA_NP_ATTR_QUERY_MR_HANDLE,	/* handle of an MR */
	RDMA_NP_ATTR_QUERY_MR_RESP,		/* out, struct rdma_np_mr_info */
};

/*
 * REFUSAL: why something was refused, or a QP ended. The kernel keeps the last refusals of
 * the host, numbered from 1, and overwrites the oldest one. This tells the first one with a
 * number above the given one that is of the device and that the caller may see: those of
 * his process, and with CAP_NET_ADMIN in the user namespace of the device's network
 * namespace also those of other processes of his PID namespace, and of the kernel.
 */
enum rdma_np_refusal_attrs {
	RDMA_NP_ATTR_REFUSAL_AFTER,		/* in, __u64, a number; 0: from the oldest one */
	RDMA_NP_ATTR_REFUSAL_RESP,		/* out, struct rdma_np_refusal */
};

/*
 * QUERY_QP: what is done for a QP of the device, of whichever process. Takes CAP_NET_ADMIN
 * in the user namespace of the device's network namespace (EPERM). ENOENT: nothing, or
 * there is no such QP.
 */
enum rdma_np_query_qp_attrs {
	RDMA_NP_ATTR_QUERY_QP_NUMBER,		/* in, __u32 */
	RDMA_NP_ATTR_QUERY_QP_RESP,		/* out, struct rdma_np_qp_info */
};

/*
 * CHANNEL_ALLOC: a file descriptor from which whole struct rdma_np_event records
 * are read (EINVAL for a buffer smaller than one), with O_NONBLOCK and poll().
 *
 * A record has the size that the caller gives here: sizeof(struct rdma_np_event) of
 * the header it was compiled with. Later headers add fields at the end only. So a
 * kernel that knows more leaves those out, and one that knows less fills them with 0.
 * EINVAL: the size is no multiple of 8, smaller than RDMA_NP_EVENT_SIZE_VER0, or
 * larger than 4096.
 *
 * The file's first page can be mapped for reading. Its first __u64 is how many events
 * were posted so far, in the CPU's byte order; all bits are set when the device has gone.
 * Who finds it as it was before the last read() that found no more has nothing to read.
 */
enum rdma_np_channel_alloc_attrs {
	RDMA_NP_ATTR_CHANNEL_FD,		/* new fd */
	RDMA_NP_ATTR_CHANNEL_EVENT_SIZE,	/* in, __u32 */
};

/*
 * HOLD_ALLOC: pin a range of a local unpinned region until HOLD_FREE, and get a
 * key and an address under which work requests of the region's PD may use it as a
 * local buffer: as a source, and with RDMA_NP_FAULT_WRITE as a sink too. The key has no
 * remote rights; the region's own lkey has none at all. Absent pages are brought
 * in, as if the caller touched them. A hold pins what is mapped now: what the
 * owner maps there later is not seen. It outlives the region, its key does not.
 *
 * With RDMA_NP_FAULT_LEASE it is a lease: the owner keeps it for later work requests, and
 * the channel gets one RDMA_NP_EVENT_RECALL when it is wanted back, maybe before this
 * returns: because memory is short, or because what is mapped there changes. The number of
 * posted events that can be mapped (see CHANNEL_ALLOC) has grown before munmap(), mprotect(),
 * madvise() or whatever else changes the memory returns. Nothing is posted under the lease
 * then any more, and HOLD_FREE follows when what was posted has completed.
 *
 * EINVAL  a pinned MR, no length, another flag, a lease without a channel or the other way
 * EBUSY   more is leased than ib_core.nprdma_lease_percent allows: take a hold instead; or the
 *         region is of the whole address space, and the process has ib_core.nprdma_max_parts
 *         parts of it
 * ERANGE  outside of the region; or it is of the whole address space, and the range is in two
 *         parts of it and longer than the buffer of a work request can be (4 GiB - 1)
 * EPERM   RDMA_NP_FAULT_WRITE, and the region has no local write right; or the memory
 *         is another process's
 * EFAULT  nothing is mapped there, or not with these rights
 * ENOMEM  no memory, or more than RLIMIT_MEMLOCK allows: held pages count as
 *         those of a pinned region do
 * EAGAIN  memory changed faster than the kernel could look
 */
enum rdma_np_hold_alloc_attrs {
	RDMA_NP_ATTR_HOLD_ALLOC_HANDLE,	/* new handle */
	RDMA_NP_ATTR_HOLD_ALLOC_MR,		/* handle of an MR */
	RDMA_NP_ATTR_HOLD_ALLOC_REQ,		/* in, struct rdma_np_hold_req */
	RDMA_NP_ATTR_HOLD_ALLOC_RESP,	/* out, struct rdma_np_hold_info */
	RDMA_NP_ATTR_HOLD_ALLOC_CHANNEL,	/* fd of a channel, with RDMA_NP_FAULT_LEASE only */
};

enum rdma_np_hold_free_attrs {
	RDMA_NP_ATTR_HOLD_FREE_HANDLE,
};

/* rdma_np_query.flags */
#define RDMA_NP_QUERY_OWNER			(1U << 0)	/* can have unpinned regions */

struct rdma_np_query {
	__u32 abi_version;	/* RDMA_NP_ABI_VERSION */
	__u32 flags;		/* RDMA_NP_QUERY_OWNER */
	__u32 max_ranges;	/* in one FAULT */
	__u32 max_pages;	/* in one FAULT, all ranges together; of a lease the outer one */
	__u32 max_outstanding;	/* FAULTs of one QP */
	__u32 reserved;
};

/*
 * Does the owner's adapter execute a READ after the earlier WRITEs of the same QP?
 * Only with RDMA_NP_READ_IN_ORDER may the READ of residency words that is to prove a
 * WRITE be posted behind it at once. Otherwise the READ is posted when the WRITE has
 * completed.
 */
enum rdma_np_read_order {
	RDMA_NP_READ_UNKNOWN,
	RDMA_NP_READ_IN_ORDER,
	RDMA_NP_READ_OUT_OF_ORDER,
};

/*
 * The signature is what each aligned 8 bytes of an absent page read as, so it is
 * compared with bytes in memory as it is. Sizes and bounds are the owner's; the
 * bounds are at most those that this kernel has itself (see struct rdma_np_query).
 */
struct rdma_np_region_info {
	__aligned_u64 region_id;	/* never used again on the peer's host */
	__aligned_u64 base;
	__aligned_u64 length;
	__u32 access;		/* enum ib_uverbs_access_flags */
	__u32 table_key;	/* to read the residency words */
	__u32 read_key;		/* 0: no remote read access */
	__u32 write_key;	/* 0: no remote write or atomic access */
	__aligned_u64 read_addr;	/* remote address of base under read_key */
	__aligned_u64 write_addr;	/* of base under write_key */
	__aligned_u64 table_addr;	/* of residency word 0 under table_key */
	__aligned_le64 signature;	/* never 0 */
	__u8 page_shift;	/* one residency word stands for so much */
	__u8 unit_shift;	/* an aligned unit is read whole: all page or all signature */
	__u8 read_order;	/* enum rdma_np_read_order */
	/*
	 * Not 0: the key is that of all of the peer's memory, and this is its part of so many
	 * bytes, 1 << part_shift, aligned. RESOLVE it again for other addresses.
	 */
	__u8 part_shift;
	__u32 max_pages;	/* in one FAULT of this region, all ranges together */
	__u32 max_ranges;	/* in one FAULT of this region */
	__u32 max_outstanding;	/* FAULTs of one QP that the owner serves at once */
	__aligned_u64 reserved[2];
};

/* rdma_np_fault_req.flags */
#define RDMA_NP_FAULT_WRITE			(1U << 0)	/* writable, not only readable */
#define RDMA_NP_FAULT_HOLD			(1U << 1)	/* pinned until RELEASE */
#define RDMA_NP_FAULT_LEASE			(1U << 2)	/* with HOLD: for longer, until it is recalled */

struct rdma_np_fault_req {
	__aligned_u64 region_id;
	__aligned_u64 cookie;	/* comes back in the event */
	__u32 flags;
	__u32 reserved;
};

/* Bytes; the pages that the range touches are meant. */
struct rdma_np_range {
	__aligned_u64 addr;
	__aligned_u64 length;
};

struct rdma_np_hold_req {
	__aligned_u64 addr;	/* in the region's base space */
	__aligned_u64 length;
	__aligned_u64 cookie;	/* comes back in RDMA_NP_EVENT_RECALL */
	__u32 flags;		/* RDMA_NP_FAULT_WRITE, RDMA_NP_FAULT_LEASE */
	__u32 reserved;
};

struct rdma_np_hold_info {
	__aligned_u64 addr;	/* of rdma_np_hold_req.addr under lkey */
	__u32 lkey;
	__u32 reserved;
};

enum rdma_np_event_type {
	RDMA_NP_EVENT_FAULT = 1,
	RDMA_NP_EVENT_REGION_GONE = 2,
	/* of the lease that HOLD_ALLOC gave cookie; or, with hold_id, of one that a FAULT brought */
	RDMA_NP_EVENT_RECALL = 3,
};

enum rdma_np_status {
	RDMA_NP_OK,
	RDMA_NP_GONE,	/* the region is dead: FORGET it */
	RDMA_NP_ACCESS,	/* rights of the region or of the mapping */
	RDMA_NP_ADDRESS,	/* outside of the region, or nothing mapped there */
	RDMA_NP_BUSY,	/* over a bound, or waits for memory: back off, then ask again */
	RDMA_NP_TIMEOUT,	/* the peer did not answer */
	RDMA_NP_NOMEM,	/* the peer has no memory for it, or for a hold */
	RDMA_NP_QP,		/* the QP is not connected (any more) */
	RDMA_NP_PROTO,	/* peer speaks another version, or nonsense */
};

struct rdma_np_event {
	__u32 type;		/* enum rdma_np_event_type */
	__u32 status;		/* enum rdma_np_status */
	__aligned_u64 cookie;
	__aligned_u64 region_id;
	__aligned_u64 hold_id;	/* not 0 if RDMA_NP_FAULT_HOLD was granted */
	__u32 nr_words;
	__u32 lease_key;	/* rkey of a lease, for the pages that it is of */
	/* of the first pages of the first range, as they were when it was done */
	__aligned_le64 words[RDMA_NP_EVENT_WORDS];
	/* what a lease is of, with hold_id if RDMA_NP_FAULT_LEASE was asked for */
	__aligned_u64 lease_addr;
	__aligned_u64 lease_length;
	__aligned_u64 reserved;
};

struct rdma_np_mr_info {
	__aligned_u64 region_id;
	__aligned_u64 base;
	__aligned_u64 length;
	__u32 access;
	__u32 flags;			/* none yet */
	__aligned_u64 resident_pages;	/* readable by peers now */
	__aligned_u64 writable_pages;	/* writable by peers now */
	__aligned_u64 held_pages;	/* pinned by holds now */
	__aligned_u64 faults_minor;	/* pages made resident without I/O */
	__aligned_u64 faults_major;	/* pages that had to be read first */
	__aligned_u64 faults_noop;	/* pages that were resident already */
	__aligned_u64 faults_failed;	/* requests that failed */
	__aligned_u64 invalidations;	/* notifier calls that changed pages */
	__aligned_u64 pages_invalidated;
	__aligned_u64 holds;		/* ever granted */
	__aligned_u64 table_pages;	/* of the residency table, with memory */
	__aligned_u64 huge_leaves;	/* 2 MiB that peers reach through one leaf now */
	__aligned_u64 reserved[3];
};

/* rdma_np_refusal.flags */
#define RDMA_NP_REFUSAL_ALL			(1U << 0)	/* also those of other processes */

/* Strings end with a 0, and so does what was too long. */
struct rdma_np_refusal {
	__aligned_u64 seq;		/* 0: there is none, and what follows flags is 0 */
	__aligned_u64 oldest;		/* number of the oldest one that is kept, whosever it is */
	__u32 flags;			/* RDMA_NP_REFUSAL_ALL */
	__u32 pid;			/* of the process; 0: the kernel, or it ended before */
	__aligned_u64 time;		/* ns of CLOCK_BOOTTIME */
	char command[RDMA_NP_REFUSAL_COMMAND];
	char device[RDMA_NP_REFUSAL_DEVICE];
	char text[RDMA_NP_REFUSAL_TEXT];
	__aligned_u64 reserved;
};

/* rdma_np_qp_info.flags */
#define RDMA_NP_QP_HEARD	(1U << 0)	/* the peer's kernel answered, or has keys */
#define RDMA_NP_QP_QUICK	(1U << 1)	/* requests go by the quick transport, not by MADs */
#define RDMA_NP_QP_ASKING	(1U << 2)	/* a RESOLVE of this QP is under way */

struct rdma_np_qp_info {
	__u32 qpn;
	__u32 remote_qpn;
	__u32 flags;		/* RDMA_NP_QP_* */
	__u32 faults;		/* FAULTs of this QP that the peer's kernel has not answered */
	__u32 holds;		/* of the peer's memory, leases included */
	__u32 leases;		/* of these */
	__u32 faults_served;	/* FAULTs of the peer under way here */
	__u32 leases_granted;	/* to the peer */
	__aligned_u64 held_pages;	/* for the peer, without leases */
	__aligned_u64 leased_pages;	/* to the peer */
	__aligned_u64 reserved[2];
};

#endif /* _UAPI_RDMA_NPRDMA_H */
