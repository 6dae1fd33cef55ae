/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * libnprdma: RDMA READ and WRITE on unpinned memory regions of a peer.
 *
 * An application keeps its verbs objects. It hands its CQs and QPs to this
 * library, posts through npr_post_send() and polls through
 * npr_poll_cq(). What it sees is what verbs would have shown with a pinned
 * region: its own wr_ids, in order, each once, with the status a pinned region
 * would have given. Page faults of the peer are resolved in between.
 *
 * Remote keys of pinned regions, and operations without a remote address, go
 * to the provider as they are.
 *
 * Errors: functions that make an object return NULL and set errno; all others
 * return 0 or a count, or a negative errno. What goes wrong with one work
 * request later is the ibv_wc_status of its completion.
 *
 * Threads: all functions may be called from any thread at any time, like
 * verbs. One lock per CQ covers the CQ and the QPs attached to it; a context
 * opened with NPR_OPEN_SINGLE_THREADED has no locks, and then each CQ with its
 * QPs belongs to one thread at a time.
 *
 * While a QP is attached, everything is posted to its send queue by this
 * library: ibv_post_send() and ibv_bind_mw() on it are undefined. Receives may be
 * posted either way: those with buffers in unpinned regions with npr_post_recv() or
 * npr_post_srq_recv(), and then every CQ on which they complete is attached.
 *
 * Structures grow by their reserved words, so that programs need not be compiled anew: an application
 * sets those to 0 that it hands in, or the call is refused, and the library those that it fills.
 *
 * ibv_wr_*() and ibv_start_poll() with what belongs to it are there, too, on the
 * objects that npr_qp_to_qp_ex() and npr_cq_to_cq_ex() return.
 */
#ifndef NPRDMA_NPRDMA_H
#define NPRDMA_NPRDMA_H

#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of this header; npr_version() is that of the library which the program runs with. */
#define NPRDMA_VERSION_MAJOR 1
#define NPRDMA_VERSION_MINOR 0
#define NPRDMA_VERSION_MICRO 0
#define NPRDMA_VERSION_NUMBER(major, minor, micro) ((major) << 16 | (minor) << 8 | (micro))
#define NPRDMA_VERSION \
	NPRDMA_VERSION_NUMBER(NPRDMA_VERSION_MAJOR, NPRDMA_VERSION_MINOR, NPRDMA_VERSION_MICRO)

/* Access flag of ibv_reg_mr(): do not pin. Kernels without it answer EINVAL. */
#ifndef IBV_ACCESS_UNPINNED
#define IBV_ACCESS_UNPINNED (1 << 10)
#endif

struct npr_context;
struct npr_cq;
struct npr_qp;
struct npr_srq;

/* What the device and its kernel can do. */
struct npr_device_attr {
	uint32_t abi_version;
	uint32_t flags;			/* none yet */
	uint32_t max_fault_ranges;	/* ranges in one fault request */
	uint32_t max_fault_pages;	/* pages in one fault request */
	uint32_t max_faults;		/* fault requests of one QP under way */
	uint32_t reserved[3];
};

enum npr_open_flags {
	NPR_OPEN_SINGLE_THREADED = 1 << 0,
	/* Neither memory of a peer nor local buffers are leased: each request proves its own, or holds it. */
	NPR_OPEN_NO_LEASES = 1 << 1,
};

enum npr_qp_flags {
	/*
	 * READs and WRITEs may overtake earlier WRITEs that are not proven
	 * yet, so that WRITEs are pipelined. Everything else, WRITEs with
	 * immediate and atomics included, still waits for all earlier WRITEs. Ranges of WRITEs under way at once must not
	 * overlap. Without this flag each WRITE to an unpinned region is proven
	 * before anything that follows it on the QP is posted.
	 */
	NPR_QP_RELAXED_ORDER = 1 << 0,
	/*
	 * The CPU is not to look at what READs brought to see whether it came from the
	 * owner's memory: addresses of their local buffers are not the CPU's, as those of device
	 * memory, of dmabufs and of ibv_reg_mr_iova(). Residency words decide, which costs one
	 * more round trip. Regions of npr_reg_mr() need it not.
	 */
	NPR_QP_OPAQUE_SINKS = 1 << 1,
	/*
	 * For a peer that polls its memory for what WRITEs bring: the bytes of a WRITE without immediate land once, and
	 * in the order in which the HCA writes them. Without this flag, and without a lease, the last ones
	 * may land before others, and all may land again later. A WRITE without a lease asks for a
	 * hold, which costs a round trip by way of the kernels. See npr_attach_qp(3).
	 */
	NPR_QP_ORDERED_WRITES = 1 << 2,
};

/* Zero in any member asks for the default. */
struct npr_qp_attr {
	uint32_t flags;			/* enum npr_qp_flags */
	uint32_t max_send_wr;		/* work requests not completed yet; default: the QP's */
	uint32_t sq_budget;		/* send queue entries to use, at least 2; see npr_attach_qp(3) */
	uint32_t word_cache_slots;	/* 4 KiB each, for 2 MiB of remote memory; default 2048 */
	uint32_t read_words_min;	/* READs of at least so many bytes are proven by residency words */
	uint32_t reserved[3];
};

/* A remote key, as npr_resolve() found it. */
struct npr_region_attr {
	uint32_t unpinned;		/* 0: not a region that this QP may resolve; plain verbs */
	uint32_t access;		/* enum ibv_access_flags */
	uint64_t id;
	uint64_t base;
	uint64_t length;
	uint64_t reserved[3];
};

/* A local unpinned region. */
struct npr_mr_attr {
	uint64_t id;
	uint64_t resident_pages;
	uint64_t writable_pages;
	uint64_t held_pages;
	uint64_t faults_minor;
	uint64_t faults_major;
	uint64_t faults_noop;
	uint64_t faults_failed;
	uint64_t invalidations;
	uint64_t pages_invalidated;
	uint64_t holds;
	uint64_t table_pages;
	uint64_t reserved[4];
};

/* Counters of one attached QP since it was attached. */
struct npr_stats {
	uint64_t reads;			/* READs of unpinned regions completed */
	uint64_t writes;		/* WRITEs to unpinned regions completed */
	uint64_t passed;		/* other work requests completed */
	uint64_t bytes_read;
	uint64_t bytes_written;
	uint64_t suspicious_pages;	/* pages of READs that looked absent */
	uint64_t false_suspicions;	/* of these, pages whose data equals the signature */
	uint64_t repeated_pages;	/* pages of WRITEs that were written again */
	uint64_t word_reads;		/* READs of residency words */
	uint64_t faults;		/* fault requests sent */
	uint64_t busy;			/* of these, answered busy */
	uint64_t holds;			/* pages pinned for a last try: requests */
	uint64_t resolves;		/* remote keys resolved */
	uint64_t gone;			/* regions that died under us */
	uint64_t atomics;		/* atomics on unpinned regions completed */
	uint64_t read_ahead;		/* pages asked for ahead of sequential READs */
	uint64_t slow;			/* work requests that were not posted at once, as they came */
	uint64_t leases;		/* of the peer's memory, granted */
	uint64_t recalls;		/* of these, recalled */
	uint64_t reserved[3];
};

/* NPRDMA_VERSION of the library: what a program compiled with an older one calls is in it. */
int npr_version(void);

/* Can the device of @verbs have unpinned regions? -EOPNOTSUPP: it cannot, and may reach those of peers. */
int npr_query_device(struct ibv_context *verbs, struct npr_device_attr *attr);

struct npr_context *npr_open(struct ibv_context *verbs, unsigned int flags);
/* -EBUSY while CQs or SRQs are attached. */
int npr_close(struct npr_context *ctx);

/*
 * ibv_reg_mr() with IBV_ACCESS_UNPINNED added; npr_dereg_mr() ends it. Its lkey
 * works in npr_post_send() and npr_post_recv(): pages are pinned, and count in
 * RLIMIT_MEMLOCK, from the post until the completion was polled.
 *
 * @addr NULL and @length SIZE_MAX: all memory that the process has, or maps later, under one key. Where nothing is
 * mapped peers find nothing. A WRITE with immediate must not cross a multiple of 1 GiB there.
 */
struct ibv_mr *npr_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
/* ibv_dereg_mr(), which would leave the key in the library. */
int npr_dereg_mr(struct ibv_mr *mr);
/* -EINVAL: a pinned region. */
int npr_query_mr(struct ibv_mr *mr, struct npr_mr_attr *attr);

/*
 * Take over the polling of @cq. All attached QPs together use no more than half of its entries, rounded up;
 * the rest is for everything else that completes there.
 */
struct npr_cq *npr_attach_cq(struct npr_context *ctx, struct ibv_cq *cq);
/* -EBUSY while QPs are attached. The ibv_cq stays. */
int npr_detach_cq(struct npr_cq *cq);

/*
 * Take over the send queue of @qp, in any state but SQD and those of errors, whose send CQ is
 * that of @cq and that has nothing under way. @attr may be NULL. A UC or UD QP can use local buffers in
 * unpinned regions; unpinned regions of a peer it cannot reach, as nothing that it
 * sends is answered.
 */
struct npr_qp *npr_attach_qp(struct npr_cq *cq, struct ibv_qp *qp, const struct npr_qp_attr *attr);
/*
 * Before ibv_destroy_qp() or a reset, and before its memory regions go. Work
 * requests that are not completed get no completion any more; the QP moves to
 * the error state if there are any.
 */
int npr_detach_qp(struct npr_qp *qp);

/*
 * Receives of @srq with buffers in regions of npr_reg_mr(). QPs that use it may, but
 * need not be attached.
 */
struct npr_srq *npr_attach_srq(struct npr_context *ctx, struct ibv_srq *srq);
/*
 * Gives back what receives hold that are not completed: the QPs that use the SRQ must
 * have been destroyed or reset before. Then follows ibv_destroy_srq().
 */
int npr_detach_srq(struct npr_srq *srq);

/*
 * ibv_post_send(). -ENOMEM: max_send_wr work requests are not completed yet.
 * -EINVAL: too many entries in the list, too much inline data, or an opcode that the
 * library does not know. -EOPNOTSUPP: a memory window on an unpinned region. Of local buffers
 * in regions of npr_reg_mr(): -EFAULT: nothing is mapped there; -ENOBUFS: no memory,
 * more than RLIMIT_MEMLOCK allows, or, of the whole address space, no more parts or addresses
 * of the device; -EAGAIN: the mapping changes all the time. On error, *@bad is the first work
 * request that was not accepted.
 */
int npr_post_send(struct npr_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);

/*
 * ibv_post_recv(), for buffers in regions of npr_reg_mr() too. Errors as of
 * npr_post_send(); -EINVAL also for a QP with an SRQ, or whose receive CQ is not attached.
 */
int npr_post_recv(struct npr_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
/*
 * ibv_post_srq_recv(), the same for an SRQ. It is the caller who sees to it that the receive
 * CQs of all QPs of the SRQ are attached: elsewhere the completions have wr_ids of ours.
 */
int npr_post_srq_recv(struct npr_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

/*
 * For ibv_wr_start(), ibv_wr_complete() and all between, but for ibv_wr_send_tso(),
 * ibv_wr_atomic_write() and ibv_wr_set_xrc_srqn(); whatever the QP was created for. Nothing
 * else may be done with the object, which goes when @qp is detached. ibv_wr_complete() returns
 * the errors of npr_post_send(), as positive numbers, and ENOMEM for a list or inline data that
 * are too long; then nothing of the batch is posted.
 */
struct ibv_qp_ex *npr_qp_to_qp_ex(struct npr_qp *qp);

/*
 * ibv_poll_cq(), and where progress is made: as long as work requests are under way an application
 * calls it again and again, or when npr_get_fd() says so. If it does not, a thread of the library makes progress, now and then.
 */
int npr_poll_cq(struct npr_cq *cq, int num_entries, struct ibv_wc *wc);

/*
 * For ibv_start_poll(), ibv_next_poll(), ibv_end_poll() and what ibv_wc_read_*() finds in a
 * struct ibv_wc (no time stamps, flow tags, VLANs or tags), however the CQ was created. Nothing
 * else may be done with the object, which goes when @cq is detached.
 */
struct ibv_cq_ex *npr_cq_to_cq_ex(struct npr_cq *cq);

/*
 * ibv_req_notify_cq(). Arm, then poll until empty, then wait. With work requests under way,
 * events that are not solicited count as well.
 */
int npr_req_notify_cq(struct npr_cq *cq, int solicited_only);
/*
 * Readable (poll, epoll) when npr_poll_cq() should be called. Made of the
 * completion channel of the CQ and of what else the library waits for. It
 * belongs to the library. Wake-ups without a completion happen: arm again.
 */
int npr_get_fd(struct npr_cq *cq);
/*
 * Wait for npr_get_fd() and take (and acknowledge) the events of the CQ's
 * completion channel, which must not be shared with other CQs. Returns 1, or 0
 * after @timeout_ms (-1: never). -EINVAL: the CQ has no completion channel.
 */
int npr_wait_cq(struct npr_cq *cq, int timeout_ms);

/*
 * Ask the peer what @rkey is. Work requests do so by themselves at the first
 * use of a key; this call does it ahead, always asks again, and so is needed
 * when a peer registers anew and announces a key value that it has used before
 * for a *pinned* region. Blocks, for a bounded time. @attr may be NULL.
 */
int npr_resolve(struct npr_qp *qp, uint32_t rkey, struct npr_region_attr *attr);
/*
 * The same of a key of all of the peer's memory (see npr_reg_mr()), for the addresses that are to be used. The
 * peer serves it in parts, of 1 GiB on x86: each of those that the range touches is asked for, and @attr says what all of
 * them are together, with the id of the first one. Other keys it resolves as npr_resolve() does. -EFAULT: the peer has
 * nothing mapped at @addr or where another part begins, which npr_resolve() says of such a key; -EAGAIN: the
 * key is another region's meanwhile.
 */
int npr_resolve_range(struct npr_qp *qp, uint32_t rkey, uint64_t addr, uint64_t length,
		      struct npr_region_attr *attr);

/*
 * Ask for pages of a resolved region to be made resident, for @access
 * IBV_ACCESS_REMOTE_READ or _WRITE. Advice: nothing is reported. Returns the
 * bytes asked for, from @addr on, which may be less than @length if many
 * requests are under way. -ENOENT: @rkey is not resolved or not unpinned.
 */
int64_t npr_prefetch(struct npr_qp *qp, uint32_t rkey, uint64_t addr, uint64_t length, int access);

/* How memory of a peer is going to be used by one queue pair. */
enum npr_advice {
	NPR_ADVISE_READ_OFTEN = 1,	/* read, many times */
	NPR_ADVISE_WRITE_OFTEN = 2,	/* written, or changed by atomics, many times; and read */
	NPR_ADVISE_SELDOM = 3,		/* not any more */
};

/*
 * What the library finds out by itself when memory is used twice within 100 ms, it knows before: a
 * lease of it is worth while, by which requests cost what they cost on pinned memory. Leases are
 * asked for at once, as long as few are under way, and else by the first such request to each MiB, of
 * the first 64 that the range touches. NPR_ADVISE_SELDOM gives back those that touch the range. It is advice:
 * the peer may refuse, and recall them, and what is not used for some 100 ms goes back. Does not block.
 *
 * 0; -ENOENT: @rkey is not resolved or not unpinned; -EFAULT: the range is not inside of the region;
 * -EACCES: the region has no such right; -EINVAL: @advice.
 */
int npr_advise(struct npr_qp *qp, uint32_t rkey, uint64_t addr, uint64_t length, int advice);

int npr_get_stats(struct npr_qp *qp, struct npr_stats *stats, size_t size);

#ifdef __cplusplus
}
#endif

#endif /* NPRDMA_NPRDMA_H */
