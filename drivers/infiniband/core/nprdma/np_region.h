/* SPDX-License-Identifier: GPL-2.0 */
/*
 * nprdma: the structures of a region.
 *
 * Its files are layers, of which each calls those below it only:
 *
 *   reg.c stat.c local.c       what the core and uverbs call
 *   part.c                     regions of the whole address space, and their parts
 *   life.c promise.c           a region's life; keys that are promised to be nobody's
 *   key.c umem.c               its keys
 *   fault.c                    pages become resident
 *   hold.c                     pins
 *   chunk.c                    pages become absent: the notifier
 *   lease.c                    holds that are asked back
 *   budget.c                   how much may be leased
 *   slot.c                     words and leaves
 *   region.c                   who has it, and what it is
 *   age.c window.c             aging; the IOVA ranges
 *   device.c host.c            the device; what absent pages map to
 *
 * qp.c, in ib_core also without regions, tells the protocol of queue pairs.  trace.c has
 * the tracepoints.  Lock order: see np.h.
 *
 * Three things end at three times:
 * - What is known about residency (chunks, words, pins, aging) is freed when the public
 *   MR ends, although a peer may keep its grant for as long as it likes.
 *   np_region_enter() delays that for a moment, and so does the lock of a chunk that is
 *   not closed: see np_region_fault_at_once().
 * - The keys that peers have are destroyed with the last grant.
 * - The struct is freed with the last reference: of the public MR, of each key (through its
 *   umem), grant, hold, and running fault.  Its windows are unmapped then, or when the
 *   device goes, if that is before: see np_regions_detach().
 *
 * A region of the whole address space has none of this but the public MR: its parts have it,
 * which are regions without a public MR.  What is done with the one of a region is done with
 * that of the whole.  A part has a reference to the whole, and has entered it, as long as it
 * has a reference and is entered itself: so the whole ends last.
 */
#ifndef NP_REGION_H
#define NP_REGION_H

#include <linux/completion.h>
#include <linux/interval_tree.h>
#include <linux/iommu.h>
#include <linux/mmu_notifier.h>
#include <linux/rcupdate.h>
#include <linux/refcount.h>
#include <linux/rwsem.h>
#include <linux/sizes.h>
#include <linux/wait.h>
#include <linux/xarray.h>
#include <rdma/ib_umem.h>

#include "np.h"

struct hmm_range;
struct np_promises;
struct shrink_control;

#define NP_SLOT_SHIFT		21
#define NP_SLOT_SIZE		BIT(NP_SLOT_SHIFT)
#define NP_SLOT_PAGES		(NP_SLOT_SIZE >> PAGE_SHIFT)
#define NP_SLOT_ORDER		(NP_SLOT_SHIFT - PAGE_SHIFT)

/*
 * 64 MiB for each lock and notifier: an invalidation makes every fault of its
 * chunk look again, and every chunk that has ever been resident costs 1.2 KiB.
 */
#define NP_CHUNK_SLOTS		32
#define NP_CHUNK_SHIFT		(NP_SLOT_SHIFT + 5)
#define NP_CHUNK_SIZE		BIT(NP_CHUNK_SHIFT)

/* The table's words of one slot fill one page */
static_assert(NP_SLOT_PAGES * sizeof(u64) == PAGE_SIZE);
static_assert(NP_CHUNK_SLOTS << NP_SLOT_SHIFT == NP_CHUNK_SIZE);

/*
 * What a part of the whole address space covers: as much as one page of the IOMMU's tables
 * maps, absent, in each window.  An address space of some terabytes has some thousand.
 */
#define NP_PART_SHIFT		30
#define NP_PART_SIZE		BIT(NP_PART_SHIFT)

/* Rights that a region may be registered with, besides being unpinned */
#define NP_ACCESS_RIGHTS                                                       \
	(IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_READ |                       \
	 IB_ACCESS_REMOTE_WRITE | IB_ACCESS_REMOTE_ATOMIC)
#define NP_ACCESS_REMOTE_CHANGE (IB_ACCESS_REMOTE_WRITE | IB_ACCESS_REMOTE_ATOMIC)
#define NP_ACCESS_REMOTE (IB_ACCESS_REMOTE_READ | NP_ACCESS_REMOTE_CHANGE)

/**
 * struct np_host - what all regions of the host share
 * @signature: random word of which an absent page of a read window consists, in the
 *	order of the CPU; in memory it is little endian, whoever reads it
 * @signature_page: 2 MiB full of it
 * @zero_page: 2 MiB of words "absent, generation 0"
 */
struct np_host {
	u64 signature;
	struct page *signature_page;
	struct page *zero_page;
};

/* Of ib_core.nprdma_read_order, beside enum rdma_np_read_order: ask the driver */
#define NP_READ_ORDER_AUTO	(RDMA_NP_READ_OUT_OF_ORDER + 1)

/**
 * struct np_device - an RDMA device
 * @ibdev: the device
 * @lock: protects @pd and the making of scratch pages
 * @pd: no QP belongs to it: the PD of public keys; made by the first region
 * @rkeys: regions by public rkey, as long as the public MR lives
 * @promises: keys that no region may have, under the lock of @rkeys; NULL: none yet
 * @regions: those whose windows are mapped
 * @users: 1 while the client is there, and 1 for each region that can be freed
 * @idle: @users became 0
 * @said_relaxed: the log says that PCIe relaxed ordering is enabled
 */
struct np_device {
	struct ib_device *ibdev;
	struct mutex lock;
	struct ib_pd *pd;
	struct xarray rkeys;
	struct np_promises *promises;
	struct list_head regions;
	refcount_t users;
	struct completion idle;
	bool said_relaxed;
};

/**
 * struct np_scratch - the scratch page of one PD
 * @ref: one for the PD and one for each region
 * @page: 2 MiB
 */
struct np_scratch {
	struct kref ref;
	struct page *page;
};

/* See promise.c: bits, and how many of them are set at once for each bitmap */
#define NP_PROMISE_ORDER	17
#define NP_PROMISE_BITS	BIT(NP_PROMISE_ORDER)
#define NP_PROMISE_MAX	8192

/*
 * Bits of these that one peer may set. A peer asks once for each key that it uses, and
 * beyond this again for each request; it takes 8 peers to use up what all may have.
 */
#define NP_PROMISE_USER_MAX	1024

/**
 * struct np_promises - keys of which peers were told that they are no region's
 * @turned: ns: when @newer became @older
 * @nr: bits of @newer
 * @newer: a bit for each hash of a key that was told since @turned
 * @older: likewise, told before
 */
struct np_promises {
	u64 turned;
	unsigned int nr;
	DECLARE_BITMAP(newer, NP_PROMISE_BITS);
	DECLARE_BITMAP(older, NP_PROMISE_BITS);
};

/**
 * struct np_window - an IOVA range that maps a region page for page
 * @dev: the device that does DMA
 * @domain: its IOMMU domain
 * @va: what @iova stands for, aligned to a slot
 * @iova: first address, congruent to @va
 * @slots: number of slots
 * @size: bytes reserved, with the residency table behind the slots if there is one
 * @absent: 2 MiB page that absent pages map to
 * @prot: IOMMU_* of every leaf
 */
struct np_window {
	struct device *dev;
	struct iommu_domain *domain;
	unsigned long va;
	dma_addr_t iova;
	unsigned long slots;
	size_t size;
	phys_addr_t absent;
	int prot;
};

/**
 * struct np_slot_holds - holds on the pages of a slot
 * @count: holds on each page; all of them pin the page that the leaves map
 * @writers: those of them that are for writing.  The others are no leave to write: a
 *	page of a file may be pinned for reading, and then be cleaned, or unmapped
 * @stale_read: the leaf in the read window maps the pinned page, although the word
 *	does not say that it is readable
 * @stale_write: likewise for the write window
 */
struct np_slot_holds {
	u16 count[NP_SLOT_PAGES];
	u16 writers[NP_SLOT_PAGES];
	DECLARE_BITMAP(stale_read, NP_SLOT_PAGES);
	DECLARE_BITMAP(stale_write, NP_SLOT_PAGES);
};

/**
 * struct np_slot - 2 MiB of a region
 * @words: page of the residency table, NULL until a page of the slot is first
 *	wanted; peers read it, so it is little endian.  It stays until the region
 *	is gone, because a generation that starts anew would let a peer prove a
 *	WRITE that was lost
 * @holds: NULL until a page of the slot is first held
 * @merges: how often the slot was merged; tells a fault that its split is undone
 * @huge: a leaf of 2 MiB may map the owner's memory: all of the slot becomes absent
 *	at once, because a split allocates; then no page of it is held, or each is, by
 *	holds of all of them
 * @read_split: the read window has leaves of single pages there, which a merge undoes
 * @write_split: likewise the write window
 * @resident: pages with RDMA_NP_WORD_READABLE
 * @writable: pages with RDMA_NP_WORD_WRITABLE
 * @held: pages with a hold
 *
 * Protected by the chunk's lock.  @words and @holds change once, and are published
 * with release ordering; a fault looks at them, at words, @merges, @huge and @held
 * without the lock first.
 */
struct np_slot {
	__le64 *words;
	struct np_slot_holds *holds;
	unsigned int merges;
	bool huge;
	bool read_split;
	bool write_split;
	u16 resident;
	u16 writable;
	u16 held;
};

/**
 * struct np_chunk - what one lock and one notifier cover
 * @rcu: for freeing: see np_region_fault_at_once()
 * @notifier: of the part of the region that lies in the chunk
 * @region: no reference: the region frees its chunks, see np_region.users
 * @lock: see above
 * @va: of the first slot
 * @closed: the region is gone; nothing becomes resident any more
 * @leased: struct np_pin of its pages on leases, by address, under @lock: those of leases to
 *	read, and of leases to write. A change of memory takes out what it covers, because a
 *	lease is recalled once: so it costs as much as what it ends, however many there are
 * @slots: those behind the region's end are never used
 */
struct np_chunk {
	struct rcu_head rcu;
	struct mmu_interval_notifier notifier;
	struct np_region *region;
	struct mutex lock;
	unsigned long va;
	bool closed;
	struct rb_root_cached leased[2];
	struct np_slot slots[NP_CHUNK_SLOTS];
};

/* Why leases are recalled */
enum np_recall_why {
	NP_RECALL_CHANGE,	/* the owner's memory has changed there */
	NP_RECALL_MEMORY,	/* memory is short */
	NP_RECALL_BUDGET,	/* others want a lease, too */
	NP_RECALL_AGE,		/* whoever has it may be dead */
	NP_RECALL_GONE,		/* the region goes */
	NP_RECALL_NR,
};

/**
 * struct np_counters - of one region; see struct np_stats
 */
struct np_counters {
	atomic64_t resident;
	atomic64_t writable;
	atomic64_t held;
	atomic64_t huge;
	atomic64_t faults_minor;
	atomic64_t faults_major;
	atomic64_t faults_noop;
	atomic64_t faults_failed;
	atomic64_t faults_at_once;
	atomic64_t retries;
	atomic64_t invalidations;
	atomic64_t pages_invalidated;
	atomic64_t pages_aged;
	atomic64_t holds;
	atomic64_t leases;
	atomic64_t leases_ended;
	atomic64_t leased;
	atomic64_t recalls[NP_RECALL_NR];
	atomic64_t overdue;
	atomic64_t table_pages;
};

/**
 * struct np_parts - what the region of a whole address space is made of
 * @lock: protects the rest, and is held while a part is made; outside of np_region.lock
 * @closed: no part is made any more
 * @at: parts by address, for peers and for the owner; each is in @all
 * @all: these, and those of single holds
 */
struct np_parts {
	struct mutex lock;
	bool closed;
	struct xarray at;
	struct list_head all;
};

/**
 * struct np_region - one unpinned memory region
 * @ref: see the top of this file
 * @users: 1 while the public MR lives, and 1 for each that has entered; then the
 *	chunks go, and @aging
 * @id: never used again on this host
 * @npdev: the device; NULL: it has gone, or may not wait for the region
 * @device_node: in its list
 * @pd: the application's; valid while the region is not gone or has keys
 * @mm: of the owner, mmgrab()ed
 * @cg: RDMA cgroup of the owner when it registered: all keys but the public one,
 *	which is charged as any MR, are charged to it
 * @start: first va
 * @length: bytes
 * @base: the application's remote address of @start
 * @access: IB_ACCESS_*, with IB_ACCESS_UNPINNED
 * @iova_size: what np_device_take_iova() gave
 * @scratch: of @pd; NULL: no write window
 * @read: read window and residency table
 * @write: write window; no slots: nobody may write
 * @lock: protects @gone, @grants, and the keys
 * @gone: the public MR is dead
 * @leaks: the driver could not destroy an MR that was to be the public one, or a lease's key
 * @public_rkey: key of np_device.rkeys
 * @ending: the public MR is being destroyed: nobody finds the region by @public_rkey,
 *	which is kept for it all the same; under the lock of np_device.rkeys
 * @table_mr: table key, NULL until the first RESOLVE
 * @read_mr: read key, likewise; NULL: nobody may read
 * @write_mr: write key, likewise; NULL: nobody may write
 * @source_mr: key to the read window without remote rights, NULL until a local
 *	buffer wants it; goes when the region is gone
 * @sink_mr: the same of the write window
 * @grants: peers that know the keys
 * @chunk_lock: protects changes of @chunks, and @closed
 * @chunks: struct np_chunk by number, made by the first fault
 * @closed: no chunk may be made any more, and no leaf be split
 * @window_sem: shared by who splits leaves, which may have to wait for memory: alone by
 *	who unmaps the windows of a region that somebody still uses
 * @aging: of @mm
 * @aging_node: in its list
 * @table_lock: serialises changes of the residency table's leaves
 * @pin_lock: whoever pins pages for a hold has it; who could not at first, alone
 * @budget: where leases of it count
 * @hold_lock: protects @holds, @lease_keys, and the lists of pins
 * @holds: of this region
 * @lease_keys: keys of leases
 * @unleased: woken when there are none
 * @parts: of a region of the whole address space, which nobody resolves, faults, or holds
 *	itself: @start is 0, @length SIZE_MAX, and the windows have a page, for the public MR
 * @whole: of a part, the region that it is of; holds a reference. @mm, @cg and @budget are
 *	those of the whole, which keeps them
 * @part_node: in np_parts.all, with a reference; whoever takes it out closes the part
 * @of_hold: of a part: it was made for one hold of the owner's, and ends with it
 * @count: statistics; of a part, the whole's
 * @own_count: those that are its own
 */
struct np_region {
	struct kref ref;
	refcount_t users;
	u64 id;
	struct np_device *npdev;
	struct list_head device_node;
	struct ib_pd *pd;
	struct mm_struct *mm;
	struct ib_rdmacg_object cg;
	unsigned long start;
	size_t length;
	u64 base;
	u32 access;
	size_t iova_size;
	struct np_scratch *scratch;
	struct np_window read;
	struct np_window write;

	struct mutex lock;
	bool gone;
	bool leaks;
	u32 public_rkey;
	bool ending;
	struct ib_mr *table_mr;
	struct ib_mr *read_mr;
	struct ib_mr *write_mr;
	struct ib_mr *source_mr;
	struct ib_mr *sink_mr;
	struct list_head grants;

	struct mutex chunk_lock;
	struct xarray chunks;
	bool closed;
	struct rw_semaphore window_sem;
	struct np_aging *aging;
	struct list_head aging_node;

	struct mutex table_lock;

	struct rw_semaphore pin_lock;
	struct np_budget *budget;
	spinlock_t hold_lock;
	struct list_head holds;
	unsigned int lease_keys;
	wait_queue_head_t unleased;

	struct np_parts *parts;
	struct np_region *whole;
	struct list_head part_node;
	bool of_hold;

	struct np_counters *count;
	struct np_counters own_count;
};

/**
 * struct np_hold - pins with one owner
 * @node: in np_region.holds
 * @lru: in the list of leases that were not recalled
 * @region: holds a reference
 * @write: pinned for write
 * @recalled: @recall was called
 * @recall: asks for it; NULL: it is no lease
 * @key: of a peer's lease, under np_region.lock; NULL: it has none, or it has ended
 * @pages: number of pages pinned
 * @pins: list of struct np_pin
 */
struct np_hold {
	struct list_head node;
	struct list_head lru;
	struct np_region *region;
	bool write;
	bool recalled;
	struct np_recall *recall;
	struct ib_mr *key;
	unsigned long pages;
	struct list_head pins;
};

/**
 * struct np_pin - pinned pages of one slot, on one hold
 * @node: in np_hold.pins
 * @range: in np_chunk.leased, if @leased and no change has recalled it; its va, last inclusive
 * @leased: @hold is a lease; it may be freed before the pin is, see np_holds_unpin()
 * @hold: hold
 * @chunk: of the slot
 * @va: of the first page
 * @npages: number of pages
 * @pages: the pages
 */
struct np_pin {
	struct list_head node;
	struct interval_tree_node range;
	bool leased;
	struct np_hold *hold;
	struct np_chunk *chunk;
	unsigned long va;
	unsigned int npages;
	struct page *pages[] __counted_by(npages);
};

/* host.c */
extern struct np_host np_host;
int np_host_pages(void);
void np_host_free(void);
struct np_scratch *np_scratch_get(struct np_device *npdev, struct ib_pd *pd);
struct np_scratch *np_scratch_share(struct np_scratch *scratch);
void np_scratch_put(struct np_scratch *scratch);

/* device.c */
struct iommu_domain *np_find_domain(struct ib_device *ibdev, const char **reason);
#if IS_ENABLED(CONFIG_KUNIT)
struct iommu_domain *np_dma_domain(struct device *dev, const char **reason);
#endif
struct np_device *np_device_get(struct ib_device *ibdev);
void np_device_put(struct np_device *npdev);
struct ib_pd *np_device_pd(struct np_device *npdev);
u8 np_device_read_order(struct np_device *npdev);
#if IS_ENABLED(CONFIG_KUNIT)
bool np_device_is_relaxed(struct ib_device *ibdev);
u8 np_read_order_of(struct np_device *npdev, unsigned int asked);
#endif
struct iommu_domain *np_device_domain(struct ib_device *ibdev);
int np_device_take_iova(struct ib_device *ibdev, struct iommu_domain *domain,
			size_t size, bool own);
void np_device_give_iova(struct iommu_domain *domain, size_t size);

/* window.c */
#if IS_ENABLED(CONFIG_KUNIT)
int np_iova_reserve(struct device *dev, size_t size, size_t align,
		    size_t offset, dma_addr_t *iova);
void np_iova_release(struct device *dev, dma_addr_t iova, size_t size);
#endif
size_t np_window_size(unsigned long start, size_t length, bool table);
int np_window_map(struct np_window *win, struct device *dev,
		  struct iommu_domain *domain, unsigned long start,
		  size_t length, bool table, phys_addr_t absent, int prot);
void np_window_unmap(struct np_window *win);
int np_window_fill(struct np_window *win, unsigned long va, unsigned long npages,
		   struct iommu_inval *inval);
int np_window_merge(struct np_window *win, unsigned long va, phys_addr_t paddr,
		    struct iommu_inval *inval);
int np_window_pages(struct np_window *win, unsigned long va, unsigned int npages,
		    const phys_addr_t *paddrs, struct iommu_inval *inval);
int np_window_split(struct np_window *win, unsigned long va);
int np_window_table_page(struct np_window *win, unsigned long va,
			 struct page *page);
void np_window_table_drop(struct np_window *win);

static inline bool np_window_exists(const struct np_window *win)
{
	return win->slots;
}

static inline dma_addr_t np_window_iova(const struct np_window *win,
					unsigned long va)
{
	return win->iova + (va - win->va);
}

/* Of the residency table's page for the slot of @va */
static inline dma_addr_t np_window_table_iova(const struct np_window *win,
					      unsigned long va)
{
	return win->iova + (win->slots << NP_SLOT_SHIFT) +
	       (((va - win->va) >> NP_SLOT_SHIFT) << PAGE_SHIFT);
}

/* region.c */
void np_region_attach(struct np_region *region, struct np_device *npdev);
void np_region_leak(struct np_region *region);
void np_regions_detach(struct np_device *npdev);

/* age.c */
/**
 * typedef np_age_fn - pages of a slot become absent, to see whether peers still use them
 * @region: region of the owner
 * @va: slot in the owner's address space, which need not be one of the region's
 * @pages: bitmap of its pages
 */
typedef void np_age_fn(struct np_region *region, unsigned long va,
		       const unsigned long *pages);

int np_aging_join(struct np_region *region);
int np_aging_join_part(struct np_region *part, struct np_region *whole, bool own);
void np_aging_show_part(struct np_region *part);
void np_aging_leave(struct np_region *region);
void np_aging_put(struct np_region *region);
int np_aging_get_slot(struct np_region *region, unsigned long va);
void np_aging_put_slot(struct np_region *region, unsigned long va);
void np_aging_use(struct np_region *region, unsigned long va, unsigned int npages);
bool np_aging_is_asked(struct np_region *region, unsigned long va,
		       unsigned int npages);
#if IS_ENABLED(CONFIG_KUNIT)
bool np_aging_ask(struct np_aging *aging, unsigned long start,
		  unsigned long end, bool clear);
#endif
int np_aging_init(np_age_fn *age);
void np_aging_exit(void);

/* budget.c */
#if IS_ENABLED(CONFIG_KUNIT)
extern unsigned int np_lease_percent;
#endif
/**
 * struct np_own_lease - what a process's lease of its own memory counts
 * @node: in np_recalled, from its recall until it is overdue, or ends
 * @region: region
 * @pages: pages
 * @wanted: it was recalled
 * @recalled: when it was, in jiffies
 * @overdue: its pages are in np_budget.overdue of the process, and count for nobody else
 */
struct np_own_lease {
	struct list_head node;
	struct np_region *region;
	unsigned long pages;
	bool wanted;
	unsigned long recalled;
	bool overdue;
};

/*
 * What has not come back by then is not waited for before somebody is killed for memory; and
 * whoever asks for leases again and again does not keep the kernel from killing
 */
#define NP_OOM_MS		200
#define NP_OOM_PAUSE_MS		5000

struct np_budget *np_budget_get(struct mm_struct *mm);
void np_budget_put(struct np_budget *budget);
struct mem_cgroup *np_budget_memcg(const struct np_budget *budget);
bool np_budget_is_below(const struct np_budget *budget, const struct np_budget *above);
int np_own_lease_reserve(struct np_own_lease *own, struct np_region *region, unsigned long pages);
void np_own_lease_recalled(struct np_own_lease *own);
void np_own_lease_unreserve(struct np_own_lease *own);
void np_budget_want(struct np_budget *budget);
void np_budget_return(struct np_budget *budget, unsigned int leases, unsigned long pages);
bool np_charges_somebody(void);
bool np_memcg_awaits_leases(struct mem_cgroup *memcg);
unsigned long np_memcg_await_leases(struct mem_cgroup *memcg);
unsigned long np_leased_pages(void);
void np_leases_pause(unsigned int ms);

/* lease.c */
#if IS_ENABLED(CONFIG_KUNIT)
extern unsigned int np_recall_ms;
extern struct shrinker *np_lease_shrinker;
bool np_may_wait(const struct shrink_control *sc);
int np_lease_oom(struct notifier_block *nb, unsigned long unused, void *freed);
#endif
unsigned int np_recall_time(void);
void np_leases_make_room(unsigned long pages, struct np_budget *full);
void np_lease_recall(struct np_hold *hold, enum np_recall_why why);
void np_leases_freed(struct np_region *region, unsigned long pages);
void np_lease_returned(const struct np_hold *hold, unsigned long pages);
void np_leases_recall(struct np_region *region);
void np_leases_end(struct np_region *region, unsigned long deadline);
unsigned long np_leases_deadline(void);
struct np_hold *np_lease_alloc(struct np_region *region, struct np_recall *recall);
void np_lease_begin(struct np_hold *hold);
void np_lease_end(struct np_hold *hold);
void np_lease_free(struct np_hold *hold);
int np_lease_init(void);
void np_lease_exit(void);

/* slot.c */
static inline struct np_slot *np_chunk_slot(struct np_chunk *chunk, unsigned long va)
{
	return &chunk->slots[(va - chunk->va) >> NP_SLOT_SHIFT];
}

static inline unsigned long np_slot_va(const struct np_chunk *chunk,
				       const struct np_slot *slot)
{
	return chunk->va + ((slot - chunk->slots) << NP_SLOT_SHIFT);
}

/* What peers would read; without the lock only a hint */
static inline u64 np_slot_word(const struct np_slot *slot, unsigned int i)
{
	return le64_to_cpu(READ_ONCE(slot->words[i]));
}

/* Is there something to do for this fault? Also without the lock, as a hint */
static inline bool np_slot_lacks(const struct np_slot *slot, unsigned int i, bool write)
{
	u64 want = RDMA_NP_WORD_READABLE | (write ? RDMA_NP_WORD_WRITABLE : 0);

	return (np_slot_word(slot, i) & want) != want;
}

static inline bool np_slot_is_held(const struct np_slot *slot, unsigned int i)
{
	return slot->held && slot->holds->count[i];
}

static inline bool np_slot_is_held_for_write(const struct np_slot *slot, unsigned int i)
{
	return slot->held && slot->holds->writers[i];
}

/* What np_slot_absent() does with pages under a hold, and with absent pages */
enum np_absent {
	NP_ABSENT_WRITE,	/* only the write window */
	NP_ABSENT_UNHELD,	/* both, and leaves that holds need stay, and are stale */
	NP_ABSENT_UNDO,		/* leaves of absent pages, too: a fault has failed */
};

void np_slot_word_set(struct np_chunk *chunk, struct np_slot *slot, unsigned int i,
		      u64 rights);
void np_slot_count(struct np_chunk *chunk, const struct np_slot *slot,
		   int resident, int writable);
void np_slot_fill_read(struct np_chunk *chunk, struct np_slot *slot,
		       unsigned int first, unsigned int end,
		       struct iommu_inval *inval);
void np_slot_fill_write(struct np_chunk *chunk, struct np_slot *slot,
			unsigned int first, unsigned int end,
			struct iommu_inval *inval);
void np_slot_set_huge(struct np_chunk *chunk, struct np_slot *slot, bool huge);
void np_slot_merged(struct np_chunk *chunk, struct np_slot *slot);
void np_slot_merge(struct np_chunk *chunk, struct np_slot *slot,
		   struct iommu_inval *inval);
unsigned int np_slot_absent(struct np_chunk *chunk, struct np_slot *slot,
			    unsigned int first, unsigned int end,
			    enum np_absent how, struct iommu_inval *inval);
unsigned int np_slot_protect(struct np_chunk *chunk, struct np_slot *slot,
			     unsigned int first, unsigned int end,
			     struct iommu_inval *inval);
void np_slot_close(struct np_chunk *chunk, struct np_slot *slot,
		   struct iommu_inval *inval);
int np_slot_make_words(struct np_region *region, struct np_slot *slot,
		       unsigned long va);
int np_slot_make_holds(struct np_chunk *chunk, struct np_slot *slot);
void np_slot_free(struct np_chunk *chunk, struct np_slot *slot);

/* chunk.c */
struct np_chunk *np_chunk_get(struct np_region *region, unsigned long va,
			      struct mm_struct *mm);
void np_chunks_close(struct np_region *region);
np_age_fn np_region_age;
void np_region_leave(struct np_region *region);

/* May residency be looked at? Then np_region_leave() follows; false if the region is gone */
static inline bool np_region_enter(struct np_region *region)
{
	return refcount_inc_not_zero(&region->users);
}

/* hold.c */
int np_pin_pages(struct np_region *region, struct mm_struct *mm, struct np_pin *pin,
		 unsigned int flags);
void np_hold_add(struct np_hold *hold, struct np_chunk *chunk, struct np_pin *pin);
unsigned int np_pin_release(struct np_pin *pin, bool write);
void np_holds_unpin(struct np_region *region);

/* fault.c */
#if IS_ENABLED(CONFIG_KUNIT)
int np_hmm_range_fault(struct hmm_range *range);
#endif
int np_region_check_range(struct np_region *region, u64 addr, u64 len,
			  unsigned int flags);

/* key.c */
int np_region_local_key(struct np_region *region, bool write, u64 addr,
			u64 *key_addr, u32 *lkey);
bool np_keys_free(struct np_region *region);
bool np_keys_free_local(struct np_region *region);
void np_keys_free_leases(struct np_region *region);

/* life.c */
struct np_region *np_region_create(struct np_device *npdev, struct ib_pd *pd,
				   struct device *dev,
				   struct iommu_domain *domain, u64 start,
				   u64 length, u64 base, u32 access);
struct np_region *np_region_create_part(struct np_region *whole, unsigned long start,
					size_t length, bool own);
void np_region_ends(struct np_region *region);
void np_region_close_by(struct np_region *region, unsigned long deadline);
void np_region_close(struct np_region *region);
void np_region_close_for_good(struct np_region *region);

/* part.c */
#if IS_ENABLED(CONFIG_KUNIT)
extern unsigned int np_max_parts;
#endif
bool np_part_may_be_added(unsigned int nr, bool own);
int np_parts_begin(struct np_region *region);
void np_parts_end(struct np_region *region, unsigned long deadline);
struct np_region *np_part_get(struct np_region *region, u64 addr);
struct np_region *np_part_of_hold(struct np_region *region, u64 addr, u64 len);
void np_part_end(struct np_region *part);

/* reg.c */
int np_reg_check(struct ib_device *ibdev, u64 start, u64 length, u64 hca_va,
		 u32 access);
#if IS_ENABLED(CONFIG_KUNIT)
struct ib_mr *np_region_make_name(struct np_region *region,
				  struct ib_pd *public_pd);
#endif

/* promise.c */
int np_name_take(struct np_device *npdev, u32 rkey, struct np_region *region);

/* umem.c */
struct ib_mr *np_umem_reg_mr(struct np_region *region, struct ib_pd *pd,
			     dma_addr_t iova, size_t length, u64 virt,
			     u32 access);

#endif /* NP_REGION_H */
