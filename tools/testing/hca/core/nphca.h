/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The emulated HCA's only interface to whatever hosts it.
 *
 * The core models mlx5 functions on a fabric of InfiniBand or Ethernet: firmware commands,
 * queues, memory keys, the reliable and unreliable transports, and one switch
 * that joins all functions of a fabric. It knows nothing of PCI emulators. A
 * host gives it DMA, interrupts, a clock and a way to be woken, and one thread
 * that calls nphca_fabric_poll(); that thread alone touches the state of the
 * fabric and its functions, so the core takes no lock on any data path.
 *
 * From any other thread a host may call nphca_mmio_read(), nphca_mmio_write(),
 * nphca_reset(), nphca_drain() and the functions for knobs. The rest wants the polling thread
 * stopped or is that thread.
 */
#ifndef NPHCA_H
#define NPHCA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NPHCA_BAR0_SIZE (16u << 20)
#define NPHCA_MSIX_VECTORS 16u
#define NPHCA_VENDOR_ID 0x15b3
#define NPHCA_DEVICE_ID 0x1018 /* a ConnectX-5 virtual function */
#define NPHCA_PF_DEVICE_ID 0x1017 /* ... and a physical one */

struct nphca_fabric;
struct nphca_device;

enum nphca_log_level { NPHCA_LOG_ERROR, NPHCA_LOG_INFO, NPHCA_LOG_DEBUG };

/* What a host provides for one function. All are called by the polling thread. */
struct nphca_host_ops {
	/*
	 * Move @len bytes; the core asks for at most one DMA request at a time
	 * and never for one that crosses the request size. Each call is one
	 * address translation. Returns 0, or nonzero if the access faulted.
	 * Calls are ordered as on a bus: whoever sees what one stored sees
	 * what those before it stored. Inside one call there is no order.
	 */
	int (*dma_read)(void *host, uint64_t iova, void *buf, size_t len);
	int (*dma_write)(void *host, uint64_t iova, const void *buf, size_t len);
	void (*msix_notify)(void *host, unsigned int vector);
	/* Hold up the polling thread, as a slow link or bus would. */
	void (*delay)(void *host, uint64_t ns);
	void (*log)(void *host, int level, const char *message);
	/*
	 * Both or none; without them no write is posted. dma_target() translates a
	 * write like dma_write(), and says where it goes, or NULL if that is not
	 * plain memory; then dma_write() does it at once. dma_commit() stores it
	 * there, later; it is called once for each target, by any thread.
	 */
	void *(*dma_target)(void *host, uint64_t iova, size_t len);
	void (*dma_commit)(void *host, void *target, const void *buf, size_t len);
};

/* What a host provides for a link to the fabric of another process; polling thread. */
struct nphca_link_ops {
	/* 1: taken; 0: not now, and nphca_fabric_poll() is called when it may be; -1: lost. */
	int (*send)(void *host, const void *packet, size_t size);
	/* The size of the next packet, of which at most @size bytes are stored; 0: there is none. */
	size_t (*receive)(void *host, void *packet, size_t size);
};

/* What a host provides for a fabric. */
struct nphca_fabric_ops {
	uint64_t (*now)(void *host); /* monotonic, ns; any thread */
	/* There is work for nphca_fabric_poll(); any thread but the polling one. */
	void (*wake)(void *host);
};

struct nphca_config {
	uint16_t lid;  /* 0: the next free one, 1, 2, ... */
	uint64_t guid; /* 0: made from the LID */
	/*
	 * Where the numbers of QPs and memory keys start after each reset; 0: at
	 * the first. Where packets of an earlier life may still be on their way,
	 * this has to differ from life to life.
	 */
	uint64_t seed;
	/*
	 * RDMA over Ethernet instead of InfiniBand: the LID is only the port's number
	 * in the switch, and makes its MAC address, 02:4e:50:00 and the LID. All ports
	 * of a fabric are of one kind.
	 */
	bool ethernet;
};

struct nphca_fabric *nphca_fabric_new(const struct nphca_fabric_ops *ops, void *host);
void nphca_fabric_free(struct nphca_fabric *fabric);

/*
 * Do a bounded amount of work. Returns true if there may be more at once;
 * otherwise *deadline is when the next timer fires (UINT64_MAX: none).
 */
bool nphca_fabric_poll(struct nphca_fabric *fabric, uint64_t *deadline);
/* Cheap: has something arrived that nphca_fabric_poll() would look at? */
bool nphca_fabric_pending(const struct nphca_fabric *fabric);

/*
 * Returns when every DMA request now under way, and every posted write, is done:
 * what the IOMMU waits for before it says that an invalidation is complete. Any
 * thread, while no function comes or goes.
 */
void nphca_drain(struct nphca_fabric *fabric);

/* NULL if the LID is taken, the other ports are of another kind, or memory is short. */
struct nphca_device *nphca_device_new(struct nphca_fabric *fabric, const struct nphca_config *config,
				      const struct nphca_host_ops *ops, void *host);
void nphca_device_free(struct nphca_device *device);

uint64_t nphca_mmio_read(struct nphca_device *device, uint64_t offset, unsigned int size);
void nphca_mmio_write(struct nphca_device *device, uint64_t offset, uint64_t value, unsigned int size);
/* Forget everything that the guest set up; takes effect at the next poll. */
void nphca_reset(struct nphca_device *device);

/*
 * Knobs and counters, one 64-bit register each. Knobs may be set at any time;
 * of the counters only 0 may be written, which clears them.
 *
 * A guest reaches them through the PCI function's vendor-specific capability
 * (capability id 9; find it in sysfs "config"):
 *
 *	+0	id, next
 *	+2	length (16), 0
 *	+4	register index, 32 bits, little-endian
 *	+8	low half of the register; reading it latches the high half
 *	+12	high half; a write to the register takes effect when +8 is
 *		written, with what was written to +12 before (initially 0)
 */
enum nphca_knob {
	NPHCA_DMA_REQUEST_SIZE, /* bytes, a power of two, 64 to 4096 (512) */
	NPHCA_DMA_DELAY_NS,	/* pause between two DMA requests (0) */
	NPHCA_READ_OVERLAP,	/* 1: a later READ of a QP may fetch before an earlier one (0) */
	NPHCA_LOSS,		/* n: one in n packets to this port is lost, at random (0: none) */
	/*
	 * What hardware may do as well. A write that is posted is translated at
	 * once, and in memory within so many ns; 0: at once.
	 */
	NPHCA_POSTED_WRITES,
	NPHCA_ACK_BEFORE_PLACEMENT, /* 1: an ACK does not wait for the writes that are posted (0) */
	NPHCA_OUT_OF_ORDER,	/* requests to this port overtake each other, delayed by up to so many ns (0) */
	NPHCA_CUT_FROM_START,	/* 1: DMA is cut at multiples of the request size from where it begins (0) */
	NPHCA_RANDOM_FETCH,	/* 1: READs and their DMA requests fetch in random order (0) */
	NPHCA_TRAILING_DMA,	/* 1: what ends with a command does DMA until that command completes (0) */
	/* What it may not do. Tests have to notice. */
	NPHCA_READ_PASSES_WRITE, /* 1: a DMA read does not push the writes that are posted (0) */
	NPHCA_NO_DRAIN,		/* 1: nor does the IOMMU's drain, which waits for nothing (0) */
	NPHCA_SPLIT_UNITS,	/* 1: DMA is cut inside units of 64 bytes, too (0) */
	NPHCA_IGNORE_INVALIDATIONS, /* 1: the host's device TLB, if it has one, keeps what it has (0) */

	NPHCA_COUNTERS = 16,
	NPHCA_DMA_REQUESTS = NPHCA_COUNTERS,
	NPHCA_DMA_FAULTS,	 /* requests that the IOMMU refused */
	NPHCA_PACKETS,		 /* received by this port */
	NPHCA_DROPPED,		 /* packets that no QP took */
	NPHCA_LOST,		 /* packets lost because NPHCA_LOSS says so */
	NPHCA_RETRANSMISSIONS,	 /* requests sent again after a time-out or NAK */
	NPHCA_RNR_NAKS,		 /* sent by responders of this port */
	NPHCA_OVERLAPPED_READS,	 /* READs that fetched before an earlier one */
	NPHCA_QP_ERRORS,	 /* work requests completed in error, but not flushed */
	NPHCA_ERR_LOCAL_LENGTH,	 /* ... and those by class */
	NPHCA_ERR_LOCAL_QP_OP,
	NPHCA_ERR_LOCAL_PROTECTION,
	NPHCA_ERR_BAD_RESPONSE,
	NPHCA_ERR_REMOTE_INVALID,
	NPHCA_ERR_REMOTE_ACCESS,
	NPHCA_ERR_REMOTE_OP,
	NPHCA_ERR_RETRY,
	NPHCA_ERR_RNR_RETRY,
	NPHCA_ERR_OTHER,
	NPHCA_FLUSHED,		 /* work requests flushed */
	NPHCA_COMMANDS,
	NPHCA_COMMAND_ERRORS,
	NPHCA_DRAIN_TIMEOUTS,	 /* drains that gave up, of the fabric */
	NPHCA_POSTED,		 /* writes that were posted */
	NPHCA_EARLY,		 /* requests executed before one that was sent before them */
	NPHCA_TRAILING,		 /* accesses of a QP or through a key that had ended */
	NPHCA_KNOBS
};

uint64_t nphca_knob_get(struct nphca_device *device, unsigned int knob);
/* False if there is no such knob or it does not take the value. */
bool nphca_knob_set(struct nphca_device *device, unsigned int knob, uint64_t value);

/*
 * Joins the fabric to that of another process: what no port of this one has as
 * its LID goes there. Both run this code, but need not trust each other. False:
 * there is a link already, or no memory.
 */
bool nphca_fabric_join(struct nphca_fabric *fabric, const struct nphca_link_ops *ops, void *host);

/*
 * Knobs and counters of the link, as those of a function; any thread. The faults
 * are those of packets that come in.
 */
enum nphca_link_knob {
	NPHCA_LINK_UP,		/* 0: cut, in both directions (1) */
	NPHCA_LINK_SEED,	/* of the faults; setting another one starts its sequence (1) */
	NPHCA_LINK_LOSS,	/* of a million packets so many are lost (0) */
	NPHCA_LINK_DUPLICATE,	/* ... come twice (0) */
	NPHCA_LINK_DELAY,	/* ... are delayed, and overtaken by others (0) */
	NPHCA_LINK_DELAY_NS,	/* at most by so much, at most 10 s (0) */

	NPHCA_LINK_COUNTERS = 16,
	NPHCA_LINK_SENT = NPHCA_LINK_COUNTERS,
	NPHCA_LINK_UNSENT,	/* of those, what found no peer or no room */
	NPHCA_LINK_RECEIVED,	/* and not lost */
	NPHCA_LINK_LOST,
	NPHCA_LINK_DUPLICATED,
	NPHCA_LINK_DELAYED,
	NPHCA_LINK_CUT,		/* packets that met a link that was down */
	NPHCA_LINK_MALFORMED,	/* packets that were none */
	NPHCA_LINK_KNOBS
};

/* 0 and false without a link. */
uint64_t nphca_link_knob_get(struct nphca_fabric *fabric, unsigned int knob);
bool nphca_link_knob_set(struct nphca_fabric *fabric, unsigned int knob, uint64_t value);

#ifdef __cplusplus
}
#endif

#endif
