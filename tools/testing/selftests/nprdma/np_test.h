/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the nprdma selftests share: two ends of an RC connection between two
 * HCAs of one host, the uverbs methods of nprdma as functions, READ and WRITE
 * proven by hand with the keys of RESOLVE (without libnprdma, so that a bug in
 * one of the two cannot hide one in the other), and looking at memory from the
 * outside.
 *
 * All functions that return int return 0 (or a count) or -errno, and wait only
 * for a bounded time. None of them sleeps in order to let something happen; what
 * has no event is polled until a deadline.
 */
#ifndef NP_TEST_H
#define NP_TEST_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <rdma/nprdma.h>

#define NP_UNPINNED	(1 << 10)
#define NP_RIGHTS	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |	\
			 IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)

#define PAGE		4096UL
#define HUGE_PAGE	(2UL << 20)
#define NP_DATA_LEN	(2 * HUGE_PAGE)
#define NP_DATA_PAGES	(NP_DATA_LEN / PAGE)
#define UNIT		64		/* bytes that an access never tears */
#define UNIT_WORDS	(UNIT / 8)
#define PAGE_WORDS	(PAGE / 8)

/* The owner of regions is on the first, the peer that reaches them on the second. */
#define NP_OWNER_DEV	"mlx5_0"
#define NP_PEER_DEV	"mlx5_1"

/* Longer than any bound of the kernel's protocol, even in a slow emulator. */
#define NP_WAIT_MS	60000

/* --- one end of a connection ------------------------------------------------ */

struct np_end {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	uint16_t lid;		/* or what stands for it, see np_port_lid() */
	int channel;		/* of fault events; -1 if the kernel has none */
	uint8_t *buf;		/* pinned, for data on its way */
	size_t buf_len;
	struct ibv_mr *mr;	/* of buf */
	uint64_t cookie;
	uint32_t status;	/* of the last FAULT: enum rdma_np_status */
};

struct np_addr {
	uint32_t qpn;
	uint16_t lid;
};

struct ibv_context *np_open_device(const char *name);
/*
 * Ports of RoCE have no LID: those of our guests have addresses that end with what it
 * would be, by which they are known here. So a port's number is its "LID" on both.
 */
int np_port_lid(struct ibv_context *ctx, uint16_t *lid);
struct ibv_ah_attr np_path(struct ibv_context *ctx, uint16_t lid);
int np_open(struct np_end *end, const char *dev, size_t buf_len);
/* Closes what is open; NULL members are skipped. First error, or 0. */
int np_close(struct np_end *end);
struct ibv_qp *np_make_qp(struct np_end *end, struct ibv_pd *pd);
struct np_addr np_address(const struct np_end *end);
int np_qp_connect(struct ibv_qp *qp, struct np_addr to);
int np_qp_reset(struct ibv_qp *qp);
int np_connect(struct np_end *a, struct np_end *b);
/* After an error: both QPs through RESET; earlier grants end with it. */
int np_reconnect(struct np_end *a, struct np_end *b);
enum ibv_qp_state np_qp_state(struct ibv_qp *qp);

/* --- the methods of the kernel ------------------------------------------------ */

int np_query(struct ibv_context *ctx, struct rdma_np_query *out);
int np_channel(struct ibv_context *ctx);
/* Records have so many bytes. */
int np_channel_of(struct ibv_context *ctx, uint32_t size);
int np_query_mr(struct ibv_mr *mr, struct rdma_np_mr_info *out);
/* Asks again while the peer is busy. */
int np_resolve(struct np_end *end, uint32_t rkey, struct rdma_np_region_info *out);
/* Of a whole address space: the part there. */
int np_resolve_at(struct np_end *end, uint32_t rkey, uint64_t addr, struct rdma_np_region_info *out);
int np_resolve_on(struct np_end *end, struct ibv_qp *qp, uint32_t rkey,
		  struct rdma_np_region_info *out);
int np_fault_start(struct np_end *end, uint64_t region, uint32_t flags, uint64_t cookie,
		   const struct rdma_np_range *ranges, unsigned int nr);
/* 1: an event, its words in the order of the CPU; 0: none in time. */
int np_next_event(struct np_end *end, struct rdma_np_event *event, int timeout_ms);
/* Waits for the event of a type; others are dropped. */
int np_wait_event(struct np_end *end, uint32_t type, struct rdma_np_event *event, int timeout_ms);
/* One range, answered; RDMA_NP_BUSY is asked again. The status, or -errno. */
int np_fault(struct np_end *end, uint64_t region, uint64_t addr, uint64_t len, uint32_t flags,
	     struct rdma_np_event *event);
/* The same, one try, on any QP of the same context. */
int np_fault_once(struct np_end *end, struct ibv_qp *qp, uint64_t region, uint64_t addr,
		  uint64_t len, uint32_t flags, struct rdma_np_event *event);
int np_release(struct np_end *end, uint64_t hold);
int np_forget(struct np_end *end, uint64_t region);
/* A hold on a local region: a handle (not negative) or -errno. */
int64_t np_hold(struct ibv_mr *mr, uint64_t addr, uint64_t len, uint32_t flags,
		struct rdma_np_hold_info *out);
/* One that is recalled by an event of @channel that has @cookie. */
int64_t np_lease(struct ibv_mr *mr, uint64_t addr, uint64_t len, uint32_t flags, int channel,
		 uint64_t cookie, struct rdma_np_hold_info *out);
int np_hold_free(struct ibv_context *ctx, int64_t handle);

/* --- verbs, one at a time ------------------------------------------------------ */

/* The ibv_wc_status, or -errno (-ETIMEDOUT: no completion). */
int np_poll(struct np_end *end, struct ibv_wc *wc);
int np_post(struct np_end *end, enum ibv_wr_opcode op, size_t offset, size_t len, uint64_t addr,
	    uint32_t rkey, unsigned int flags);
int np_read(struct np_end *end, size_t offset, size_t len, uint64_t addr, uint32_t rkey);
int np_write(struct np_end *end, size_t offset, size_t len, uint64_t addr, uint32_t rkey);
int np_fetch_add(struct np_end *end, size_t offset, uint64_t addr, uint32_t rkey, uint64_t add);
int np_cmp_swap(struct np_end *end, size_t offset, uint64_t addr, uint32_t rkey, uint64_t expect,
		uint64_t swap);

/* --- a region as a peer knows it ------------------------------------------------ */

static inline uint64_t np_read_addr(const struct rdma_np_region_info *info, size_t off)
{
	return info->read_addr + off;
}

static inline uint64_t np_write_addr(const struct rdma_np_region_info *info, size_t off)
{
	return info->write_addr + off;
}

static inline size_t np_word_index(const struct rdma_np_region_info *info, size_t off)
{
	return ((info->base + off) >> RDMA_NP_PAGE_SHIFT) - (info->base >> RDMA_NP_PAGE_SHIFT);
}

static inline uint64_t np_word_addr(const struct rdma_np_region_info *info, size_t off)
{
	return info->table_addr + 8 * np_word_index(info, off);
}

static inline bool np_readable(uint64_t word)
{
	return word & RDMA_NP_WORD_READABLE;
}

static inline bool np_writable(uint64_t word)
{
	return word & RDMA_NP_WORD_WRITABLE;
}

static inline uint64_t np_generation(uint64_t word)
{
	return word >> RDMA_NP_WORD_GENERATION_SHIFT;
}

/* The word of the page at @off, by READ; in the last 8 bytes of the buffer. */
int np_word(struct np_end *end, const struct rdma_np_region_info *info, size_t off, uint64_t *word);

/*
 * READ [off, off + len) into the buffer at @at until no unit of it is suspicious;
 * faults, then holds. Aligned to units. 0 or -errno or a positive wc status.
 */
int np_read_proven(struct np_end *end, const struct rdma_np_region_info *info, size_t at, size_t off,
		   size_t len);
/* WRITE within one page from the buffer at @at until it is proven. */
int np_write_proven(struct np_end *end, const struct rdma_np_region_info *info, size_t at, size_t off,
		    size_t len);
/*
 * One WRITE and one READ of the word; 1: proven against @word. The READ is posted with the
 * WRITE if the owner's HCA executes both in order, says @info, else after its completion.
 */
int np_write_try(struct np_end *end, const struct rdma_np_region_info *info, size_t at, size_t off,
		 size_t len, uint64_t word, uint64_t *after);

bool np_all(const void *data, size_t len, uint64_t word);

/* --- memory from the outside ------------------------------------------------------ */

void *np_map(size_t len);		/* private anonymous, no huge pages; NULL */
void *np_map_aligned(size_t len, size_t align);
bool np_present(const void *addr);	/* a page table entry with a page */
size_t np_swapped(const void *addr, size_t pages);	/* so many of them are in swap */
/* MADV_PAGEOUT until nothing of it is present any more; the pages that are. */
long np_page_out(void *addr, size_t len);
void np_fill(void *addr, size_t len, uint64_t seed);
/* Offset of the first word that differs from np_fill(), or -1. */
ssize_t np_differs(const void *addr, size_t len, uint64_t seed);
uint64_t np_pattern(uint64_t seed, size_t word);
bool np_disk_swap(void);		/* all swap is on disks, and there is some */
long np_status_kb(const char *field);	/* of /proc/self/status */
long np_vmstat(const char *name);
long np_pinned(void);			/* pages of the whole host */
long np_meminfo_kb(const char *field);

/* The page frame of an address of ours; 0: none. */
uint64_t np_frame_of(const void *addr);
/* Bits of linux/kernel-page-flags.h of it; 0: none. */
uint64_t np_frame_flags(const uint8_t *p);
/* As reclaim asks whether a page is in use; not of one on a list of a CPU. */
#define NP_PAGE_IDLE "/sys/kernel/mm/page_idle/bitmap"
int np_set_idle(uint64_t frame);
/* From a file, as much as @text has room for: its length or -errno. */
long np_read_text(const char *path, char *text, size_t size);
/* To a file of the kernel's: 0 or -errno. Nothing empties it. */
int np_write_text(const char *path, const char *text);

/* KSM, as fast as it goes: 0 or -errno, -ENOENT where the kernel has none. */
int np_ksm_start(void);
int np_ksm_stop(void);			/* and all that it has merged is separated */
long np_ksm_sharing(void);		/* pages that were saved, -1: not known */

/* A control group with limits for this process; removed when all of it are gone. */
#define NP_GROUP "/sys/fs/cgroup/nprdma-test"
#define NP_GROUP_OURS	NP_GROUP "/ours"	/* below it, if a test makes them */
#define NP_GROUP_THEIRS	NP_GROUP "/theirs"
int np_group_enter(const char *max, const char *swap_max);
bool np_group_remove(void);

/* --- the host ------------------------------------------------------------------------ */

/* Registers of the emulated HCA, see enum nphca_knob of tools/testing/hca. */
enum np_hca_register {
	NP_HCA_DMA_REQUEST_SIZE = 0,
	NP_HCA_DMA_DELAY_NS = 1,
	NP_HCA_READ_OVERLAP = 2,
	NP_HCA_LOSS = 3,
	/* what hardware may do, and seldom does */
	NP_HCA_POSTED_WRITES = 4,	/* ns */
	NP_HCA_ACK_BEFORE_PLACEMENT = 5,
	NP_HCA_OUT_OF_ORDER = 6,	/* ns */
	NP_HCA_CUT_FROM_START = 7,
	NP_HCA_RANDOM_FETCH = 8,
	NP_HCA_TRAILING_DMA = 9,
	NP_HCA_IGNORE_INVALIDATIONS = 13,
	NP_HCA_DMA_REQUESTS = 16,
	NP_HCA_DMA_FAULTS = 17,
};

int np_hca_get(const char *dev, unsigned int reg, uint64_t *value);
int np_hca_set(const char *dev, unsigned int reg, uint64_t value);

/*
 * Takes a device away, under all who use it, and says which PCI function it was. Gives it
 * back and waits for its port. The last one needs "scripts/vm run --hotplug".
 */
enum np_removal {
	NP_UNBIND,	/* from its driver */
	NP_REMOVE,	/* and from the bus, with its IOMMU domain; the HCA stays */
	NP_UNPLUG,	/* by the host: the guest lets go of it first */
};

#define NP_FUNCTION_LEN 32
int np_device_remove(const char *dev, enum np_removal how, char function[NP_FUNCTION_LEN]);
int np_device_return(const char *dev, enum np_removal how, const char *function);
/* Registers of a function without a driver: they are there, and a page of them, or NULL and errno. */
int np_device_enable(const char *function);
volatile void *np_device_registers(const char *function, size_t offset);
/* The HCA is gone before the kernel hears of it; waits until the kernel has. */
int np_slot_tear_out(const char *function);

/*
 * How long the kernel lets a peer keep a hold: longer than any test takes, except
 * where a test is about just that.
 */
#define NP_HOLD_MS	600000
int np_set_hold_ms(unsigned int ms);
/* Pages that come with one that was asked for; 1 for tests that count. */
#define NP_FAULT_AROUND	16
int np_set_fault_around(unsigned int pages);

/* What must be as before when a test and its processes are gone. */
struct np_usage {
	long objects[2][5];	/* pd, cq, qp, mr, ctx of both devices */
	long pins;		/* pages pinned by anybody */
	long unevictable;
	uint64_t dma_faults[2];
};

/* Sets NP_HOLD_MS and a fault-around of 1, too */
int np_usage_start(struct np_usage *usage);
/* Only what there is now; sets nothing. */
int np_usage_get(struct np_usage *usage);
/*
 * Waits for @before to be reached again. NULL, or what differs. DMA faults can
 * only be more, and are none of the tests' business to cause.
 */
const char *np_usage_wait(const struct np_usage *before);

/*
 * fork(); the child dies with the thread that called, so that a test that was
 * aborted leaves nobody behind with its objects.
 */
pid_t np_fork(void);

/* --- time ---------------------------------------------------------------------------- */

uint64_t np_now_ms(void);
/* Between two looks at something that has no event. */
void np_pause(void);

#define np_wait_until(condition) ({					\
	uint64_t end_ = np_now_ms() + NP_WAIT_MS;			\
	bool ok_;							\
									\
	while (!(ok_ = (condition)) && np_now_ms() < end_)		\
		np_pause();						\
	ok_;								\
})

#endif /* NP_TEST_H */
