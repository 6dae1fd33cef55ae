/* SPDX-License-Identifier: GPL-2.0 */
/*
 * nprdma: memory regions that RDMA reaches without pinning them.
 *
 * The boundary between the regions, which are a part of ib_core (np_region.h), and the
 * protocol by which kernels speak of them, a module of its own (np_proto.h).  What the
 * rest of drivers/infiniband/core calls is in np_hooks.h.
 *
 * Vocabulary: "addr" is in the space of the application's remote addresses
 * (the hca_va it registered), "va" is the owner's virtual address, "iova" an
 * address in a window.  "end" is exclusive, "last" inclusive.  A "slot" is
 * 2 MiB of va, aligned; it is one 2 MiB slot of each window and one page of
 * the residency table.  A "chunk" is what one lock and one interval notifier
 * cover: NP_CHUNK_SLOTS slots.
 *
 * Ends: a region is "gone" once its public MR is destroyed, which closes it; a grant
 * of its keys to a peer is then still there, until it is "ungranted".  A hold is
 * "released".  A peer is "killed" and from then on "dead".  A request is "finished",
 * whatever the answer was, or "cancelled".  Ports, channels and chunks are "closed".
 * What only has memory is "freed".
 *
 * Lock order, outer first.  What is indented is taken under what it is indented under;
 * locks of the same depth are not taken under each other, unless it is said:
 *
 *   ib_qp_np.modify		while the device modifies a QP
 *   np_device.lock		the PD of public keys, scratch pages
 *   np_host_lock, np_spaces_lock	alone
 *   np_peer.ctl		RESOLVE, FORGET and ungranting of one peer
 *     np_hca.owners_lock
 *     np_parts.lock		parts of the whole address space; held while one is made. Outside of
 *				np_region.lock, for their end
 *       np_spaces_lock, np_aging.lock, np_regions_lock
 *     np_region.lock		keys, grants, "gone"; held across calls of the driver, and of
 *				np_grant.gone()
 *       np_region.chunk_lock	which chunks exist; held across notifier insertion
 *         mmap_lock
 *         np_aging.lock	regions of an owner; held while pages are aged, and under
 *				np_region.table_lock
 *       np_region.pin_lock	shared by holds that pin; alone: pages have to move first
 *         mmap_lock
 *       np_region.table_lock	pages of the residency table; held across iommu_split()
 *       np_chunk.lock		residency: words and leaves.  Taken by the notifier,
 *				so nothing that may enter reclaim runs under it;
 *				lockdep is told so in np_chunk_alloc().
 *         np_region.hold_lock	lists of holds
 *         leases (lease.c)	held across np_recall.fn
 *           np_recalled_lock
 *           np_channel.lock
 *       np_region.window_sem	shared by who splits leaves; alone by who unmaps windows
 *       np_regions_lock	which regions a device has
 *
 * np_region_fault_at_once() takes np_chunk.lock, and under it mmap_lock, if they are free.
 *
 * and, spinlocks:
 *
 *   ib_qp_np.lock		who a QP is connected to
 *     np_hca.peers		peers of a device, and its bounds; interrupts are off
 *   np_peer.grants
 *     np_hca.peers
 *   np_peer.lock
 *     np_channel.lock
 *   np_owner.lock
 *   np_port.lock		interrupts are off
 *   np_ud.lock
 *   np_budgets_lock		also taken in reclaim
 *   np_refusals_lock		taken under any of the mutexes
 */
#ifndef NP_H
#define NP_H

#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/ratelimit.h>
#include <linux/types.h>
#include <linux/workqueue.h>
#include <rdma/ib_verbs.h>
#include <uapi/rdma/nprdma.h>

struct np_region;
struct np_hold;
struct np_local;
struct np_recall;

/* RDMA_NP_WORD_READABLE, RDMA_NP_WORD_WRITABLE and RDMA_NP_FAULT_WRITE are user space's, too */
#define NP_WORD_RIGHTS		(RDMA_NP_WORD_READABLE | RDMA_NP_WORD_WRITABLE)
#define NP_WORD_GENERATION	(1ULL << RDMA_NP_WORD_GENERATION_SHIFT)

/* A READ returns an aligned unit as the owner's page or as signature, never mixed (I4) */
#define NP_UNIT_SHIFT		6
/* The signature fills 8 bytes */
#define NP_UNIT_SHIFT_MIN	3

/*
 * For np_region_fault(), never on the wire: take only what the owner's page
 * tables have now; a page that is not there is no error.
 */
#define NP_FAULT_PRESENT	BIT(8)
/* Likewise, with NP_FAULT_PRESENT: only neighbours of what a peer has asked for */
#define NP_FAULT_AROUND		BIT(10)
/* For np_region_fault(): not for a peer, so the region's remote rights do not count */
#define NP_FAULT_LOCAL		BIT(9)

/* So many pages may np_region_fault_at_once() look at */
#define NP_AT_ONCE_PAGES	16

/**
 * struct np_resolve - what a peer needs in order to use a region
 * @id: never used again on this host
 * @base: first address, in the space of the application's remote addresses
 * @length: bytes
 * @access: IB_ACCESS_* the application asked for, IB_ACCESS_UNPINNED included
 * @table_key: rkey of the residency words of the region's pages
 * @read_key: rkey of the region in the read window; 0: nobody may read
 * @write_key: rkey of the region in the write window; 0: nobody may write
 * @read_addr: remote address of @base under @read_key
 * @write_addr: remote address of @base under @write_key
 * @table_addr: remote address of the word of @base's page under @table_key
 * @signature: the word of which a page that is not resident consists
 * @page_shift: of a page, for which one residency word stands
 * @unit_shift: of a unit, which a READ returns whole (I4)
 * @read_order: enum rdma_np_read_order: does the device execute READs behind WRITEs
 * @part_shift: it is a part, of so many bytes, of what the key is of; 0: it is all of it
 * @max_pages: bound of one FAULT, all ranges together
 * @max_ranges: bound of one FAULT
 * @lanes: FAULTs of one QP that may be under way at once
 *
 * Sizes and bounds are those of the region's host.
 */
struct np_resolve {
	u64 id;
	u64 base;
	u64 length;
	u32 access;
	u32 table_key;
	u32 read_key;
	u32 write_key;
	u64 read_addr;
	u64 write_addr;
	u64 table_addr;
	u64 signature;
	u8 page_shift;
	u8 unit_shift;
	u8 read_order;
	u8 part_shift;
	u32 max_pages;
	u16 max_ranges;
	u16 lanes;
};

/**
 * struct np_grant - one peer QP that was given a region's keys
 * @node: in the region's list, NULL list when not granted
 * @region: holds a reference while granted
 * @gone: the region is gone.  Called once for each grant, in process context, under the
 *	  region's mutex, under which np_region_resolve(), np_region_grant() and
 *	  np_region_ungrant() work too: so it queues the work, and takes no lock under which
 *	  one of these is called.
 *
 * Embedded in the protocol's object for (QP pair, region).
 */
struct np_grant {
	struct list_head node;
	struct np_region *region;
	void (*gone)(struct np_grant *grant);
};

/**
 * struct np_stats - a region's counters, as np_region_stats() reads them
 * @resident: pages mapped in the read window now
 * @writable: of these, mapped in the write window too
 * @held: pages under at least one hold now
 * @huge: slots of which peers reach the owner's memory through leaves of 2 MiB now
 * @faults_minor: pages that became resident without I/O
 * @faults_major: pages that had to be read first
 * @faults_noop: pages asked for that were resident already
 * @faults_failed: fault requests that ended in an error
 * @faults_at_once: fault requests of peers that were served where they arrived
 * @retries: fault attempts repeated because memory changed meanwhile
 * @invalidations: notifier calls that made a page absent
 * @pages_invalidated: pages that they made absent
 * @pages_aged: pages made absent to see whether peers still use them
 * @holds: holds that pinned a page, ever
 * @leases: holds that were leases, ever
 * @leases_ended: of these, given back, in time or not, or ended with their holder
 * @leased: pages under leases now, counted for each
 * @recalls_change: leases recalled because the owner's memory has changed
 * @recalls_memory: because memory was short
 * @recalls_budget: because others wanted leases
 * @recalls_age: because their holders might be dead
 * @recalls_gone: because the region goes
 * @overdue: leases that peers did not give back in time, and whose keys ended
 * @table_pages: pages of the residency table that exist
 */
struct np_stats {
	u64 resident;
	u64 writable;
	u64 held;
	u64 huge;
	u64 faults_minor;
	u64 faults_major;
	u64 faults_noop;
	u64 faults_failed;
	u64 faults_at_once;
	u64 retries;
	u64 invalidations;
	u64 pages_invalidated;
	u64 pages_aged;
	u64 holds;
	u64 leases;
	u64 leases_ended;
	u64 leased;
	u64 recalls_change;
	u64 recalls_memory;
	u64 recalls_budget;
	u64 recalls_age;
	u64 recalls_gone;
	u64 overdue;
	u64 table_pages;
};

/* Has the port the MADs by which kernels find each other? iWARP has none. */
static inline bool np_port_may_ask(struct ib_device *ibdev, u32 port_num)
{
	return rdma_cap_ib_mad(ibdev, port_num) && rdma_cap_ib_cm(ibdev, port_num);
}

/* Refusals (refuse.c) */

/* So many are kept */
#define NP_REFUSALS		64

/* Some process's; NULL: nobody's. Logged at a limited rate for each place that refuses. */
#define np_refuse_task(task, ibdev, fmt, ...)					\
do {										\
	static DEFINE_RATELIMIT_STATE(_rs, DEFAULT_RATELIMIT_INTERVAL,		\
				      DEFAULT_RATELIMIT_BURST);			\
										\
	np_refusal_add(task, ibdev, &_rs, fmt, ##__VA_ARGS__);			\
} while (0)

/* The caller's */
#define np_refuse(ibdev, fmt, ...)						\
	np_refuse_task(current, ibdev, fmt, ##__VA_ARGS__)

__printf(4, 5)
void np_refusal_add(struct task_struct *task, struct ib_device *ibdev,
		    struct ratelimit_state *rs, const char *fmt, ...);
void np_refusal_next(struct ib_device *ibdev, u64 after, struct rdma_np_refusal *out);
bool np_may_see_all(struct ib_device *ibdev);
#if IS_ENABLED(CONFIG_KUNIT)
bool np_refusal_is_visible(struct pid *tgid, bool all);
#endif

/* Regions, for the protocol */

#ifdef CONFIG_INFINIBAND_NPRDMA_REGIONS
/* 0, or -EOPNOTSUPP with a refusal that says why: can the device have regions? */
int np_device_check(struct ib_device *ibdev);
/* Without a reference; NULL: the MR is a pinned one */
struct np_region *np_mr_region(struct ib_mr *mr);
bool np_local_is_needed(struct np_local *local);
void np_local_release(struct np_local *local);
#else
static inline int np_device_check(struct ib_device *ibdev)
{
	return -EOPNOTSUPP;
}

static inline struct np_region *np_mr_region(struct ib_mr *mr)
{
	return NULL;
}

static inline bool np_local_is_needed(struct np_local *local)
{
	return false;
}

static inline void np_local_release(struct np_local *local)
{
}
#endif

/*
 * A lookup takes a reference.  A reference keeps the struct and its windows,
 * nothing of the application's; drop it soon, device removal waits for it.
 */
struct np_region *np_region_find_rkey(struct ib_device *ibdev, u32 rkey);
/*
 * What serves an address of a region: the region, or if it is of the whole address space, the
 * part there, which is made if the owner has memory at the address.  With a reference; -EFAULT
 * nothing is mapped there, -ENXIO gone, -EBUSY or -EAGAIN later, -ENOMEM.  Process context;
 * does not wait for the owner.
 */
struct np_region *np_region_at(struct np_region *region, u64 addr);
void np_region_get(struct np_region *region);
void np_region_put(struct np_region *region);
bool np_region_put_unless_last(struct np_region *region);	/* does not sleep */
bool np_region_is_gone(struct np_region *region);
u64 np_region_id(struct np_region *region);
struct ib_pd *np_region_pd(struct np_region *region);	/* compare only; the application's */
struct mm_struct *np_region_mm(struct np_region *region);	/* the owner's; grabbed */
void np_region_stats(struct np_region *region, struct np_stats *stats);
/* np_region_resolve() without keys, bounds and order */
void np_region_describe(struct np_region *region, struct np_resolve *out);

/*
 * Make the keys if they do not exist, and say what they are; bounds are 0.  May sleep, any
 * process context.  0, -ENXIO (gone), -EPERM (no remote rights), -ENOMEM or what
 * the driver said.
 * Grant before you send the answer: keys nobody was granted go with the region.
 */
int np_region_resolve(struct np_region *region, struct np_resolve *out);

/*
 * Make the pages of [addr, addr + len) resident.  With @hold they are pinned on it
 * as well, for write if the hold was allocated so (RDMA_NP_FAULT_WRITE).  @words (or NULL)
 * receives the residency words of the first @nr_words pages, as they were when the
 * pages of their part became resident: a slot's, or less if memory changes.
 * -EFAULT no such mapping, -EPERM rights of the region or of the mapping,
 * -ENXIO region or owner gone, -ENOMEM, -EAGAIN memory changed faster than we
 * could look (BUSY), -ERANGE outside the region, -EINTR killed.
 * Process context, may sleep; the caller holds no mmap lock.
 */
int np_region_fault(struct np_region *region, u64 addr, u64 len,
		    unsigned int flags, struct np_hold *hold,
		    u64 *words, unsigned int nr_words);

/*
 * The same without a hold, if nothing has to be waited for; and what the owner's page
 * tables have of the rest of @around becomes resident with what is not. Does not sleep.
 * False: no word has changed, and np_region_fault() has to do it.
 */
bool np_region_fault_at_once(struct np_region *region, const struct rdma_np_range *range,
			     const struct rdma_np_range *around, unsigned int flags,
			     u64 *words, unsigned int nr_words);

/**
 * struct np_recall - who has a lease
 * @fn: tells him that it is wanted back: he uses it no more, and releases it soon. Called at
 *	most once, not after np_hold_release() has returned; allocates nothing, sleeps not,
 *	and releases nothing itself
 *
 * Embedded in what has the hold.
 */
struct np_recall {
	void (*fn)(struct np_recall *recall);
};

bool np_region_around(struct np_region *region, unsigned int flags,
		      struct rdma_np_range *range, struct rdma_np_range *all,
		      const struct rdma_np_range *most);
int np_lease_reserve(struct np_region *region, unsigned long pages, unsigned long own);
void np_lease_unreserve(struct np_region *region, unsigned long pages);

/*
 * A hold pins pages of one region.  After an error of np_region_fault() it may
 * keep a part of the range; release it.  Releasing never fails.  Pages whose
 * invalidation was skipped become absent.  A region that dies drops the pins
 * of its holds itself; the hold must be released all the same.  With @recall it is a
 * lease.
 */
struct np_hold *np_hold_alloc(struct np_region *region, unsigned int flags,
			      struct np_recall *recall);
int np_hold_grant(struct np_hold *hold, u64 addr, u64 len, u32 *rkey);
void np_hold_revoke(struct np_hold *hold, bool overdue);
void np_hold_recall(struct np_hold *hold);
void np_hold_release(struct np_hold *hold);
unsigned long np_hold_pages(const struct np_hold *hold);

/*
 * A hold of the region's own process, for local buffers of work requests, with the
 * key that they use.  The caller is the owner.  See local.c.
 */
struct np_local *np_local_hold(struct np_region *region, u64 addr, u64 len,
			       unsigned int flags, struct np_recall *recall,
			       u64 *key_addr, u32 *lkey);

/**
 * struct np_charge - who pays for what is allocated meanwhile
 * @memcg: the owner's
 * @other: who paid before
 */
struct np_charge {
	struct mem_cgroup *memcg;
	struct mem_cgroup *other;
};

/*
 * The region's owner pays for what its peers make the kernel allocate with
 * GFP_KERNEL_ACCOUNT in between.
 */
void np_region_charge(struct np_region *region, struct np_charge *charge);
void np_region_uncharge(struct np_charge *charge);

/*
 * -ENXIO when the region is gone.  np_region_ungrant() of the last grant of a
 * region that is gone destroys its keys before it returns.  It is a no-op on a
 * grant that is not granted (zeroed struct).
 */
int np_region_grant(struct np_region *region, struct np_grant *grant);
void np_region_ungrant(struct np_grant *grant);

/**
 * struct np_promise_user - what a peer takes of the promises of a device
 * @turned: np_promises.turned, when @nr was last counted
 * @nr: promises that were made to it since, and to nobody before
 *
 * Zeroed at first; under the lock of np_device.rkeys.
 */
struct np_promise_user {
	u64 turned;
	unsigned int nr;
};

/*
 * The key is no region's that the peer may reach, or is @region's, which it may not.
 * -EACCES: so it stays for RDMA_NP_PINNED_MS, -ENXIO: so it is now, -EAGAIN: look again.
 * Process context.
 */
int np_promise_none(struct ib_device *ibdev, u32 rkey, struct np_region *region,
		    struct np_promise_user *user);

/* Queue pairs, for the protocol (qp.c) */

/**
 * struct np_qp_ops - what the protocol wants to hear of RC QPs
 * @left: the QP was modified, so that what was known of its other end is not true any
 *	  more; @left is ib_qp_np.left.  Process context, may sleep.
 * @destroyed: the device has destroyed it; no lookup finds it.  Process context, may sleep.
 * @failed: the device says that it has failed.  Any context.
 */
struct np_qp_ops {
	void (*left)(struct ib_qp *qp, u32 left);
	void (*destroyed)(struct ib_qp *qp);
	void (*failed)(struct ib_qp *qp);
};

void np_qp_listen(const struct np_qp_ops *ops);

static inline bool np_state_connected(enum ib_qp_state state)
{
	return state == IB_QPS_RTR || state == IB_QPS_RTS || state == IB_QPS_SQD;
}

#endif /* NP_H */
