/* SPDX-License-Identifier: GPL-2.0 */
/*
 * nprdma-hca: the emulated HCA as a QEMU PCI device.
 *
 *   -device nprdma-hca[,bus=BUS][,lid=N][,guid=N][,seed=N][,pf=on|off]
 *           [,ats=on|off][,pasid=on|off][,ethernet=on|off]
 *           [,KNOB=VALUE...]
 *   -device nprdma-link,path=SOCKET,peer=SOCKET
 *
 * All functions of one QEMU process share a fabric: a switch that routes by
 * LID. With "pf" the function says that it is a physical one. "lid" defaults to
 * 1, 2, ... in order of creation. With "ethernet" (for all or none of them) the
 * switch is one of Ethernet, and carries RoCE; of other frames it knows nothing, so
 * the guest's network interfaces are other devices. Knobs are those of enum nphca_knob, named in
 * hca_knobs below: numbers and switches, by default as kind as hardware gets. They
 * may be changed while the guest runs (qom-set, or the PCI capability described in
 * core/nphca.h). The function is a PCIe endpoint: put it on pcie.0 or behind a
 * pcie-root-port; DMA goes through the IOMMU of the machine if there is one.
 *
 * nprdma-link joins the fabric to that of another process, for LIDs that are not
 * here. Each side listens on its own socket (Unix, packets in sequence) and
 * connects to its peer's when it has something to send, again and again: what
 * is sent to a process that is not there is lost. So either may start first, end,
 * and start again. The link's faults are properties (see enum nphca_link_knob),
 * to be changed at any time, and "up", which cuts it and heals it.
 *
 * With "ats" the function has a device TLB: it asks for a translation once, and uses
 * it until the IOMMU says that it is no longer good. A guest enables that if the
 * IOMMU offers it (-device intel-iommu,device-iotlb=on; amd-iommu always does).
 *
 * With "pasid" it has the PASID capability, of which it makes no use.
 *
 * This file is glue only. The device's logic, its DMA included, runs in one
 * worker thread, without the big QEMU lock, beside the vCPUs. An access of a
 * guest to BAR 0 only posts to that thread.
 *
 * DMA without the lock needs what hardware does by itself: when the guest
 * invalidates IOTLB entries, it may rely on transfers that used them being
 * finished. The core knows which request is under way and which writes are posted,
 * and the IOMMU's model waits in hca_drain() before it reports completion.
 */
#include "qemu/osdep.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include "hw/i386/x86-iommu.h"
#include "hw/pci/msix.h"
#include "hw/pci/pci.h"
#include "hw/pci/pcie.h"
#include "hw/qdev-properties.h"
#include "qapi/error.h"
#include "qapi/visitor.h"
#include "qemu/cutils.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "qemu/module.h"
#include "qemu/rcu.h"
#include "qemu/thread.h"
#include "qemu/timer.h"
#include "qom/object.h"

#include "nphca.h"

#define TYPE_NPRDMA_HCA "nprdma-hca"
OBJECT_DECLARE_SIMPLE_TYPE(NprdmaHca, NPRDMA_HCA)

#define TYPE_NPRDMA_LINK "nprdma-link"
OBJECT_DECLARE_SIMPLE_TYPE(NprdmaLink, NPRDMA_LINK)

#define HCA_CAP_LEN 16
#define HCA_PCIE_CAP 0x60
#define HCA_VENDOR_CAP 0xc0
#define HCA_SPIN_NS 30000
#define HCA_KNOBS 16
#define HCA_ATS_CAP 0x100
#define HCA_ATC_BITS 10
#define HCA_PASID_BITS 20
#define HCA_PAGE_BITS 12
#define HCA_PAGE_SIZE (1ull << HCA_PAGE_BITS)

/* A translation that the device TLB keeps. */
typedef struct HcaTranslation {
    uint64_t iova;
    MemoryRegion *mr; /* NULL: none */
    hwaddr offset;
} HcaTranslation;

/* One part of an IOMMU's region, and whom it tells of invalidations. */
typedef struct HcaNotifier {
    IOMMUNotifier n;
    NprdmaHca *hca;
    MemoryRegion *mr;
    hwaddr from;
    QLIST_ENTRY(HcaNotifier) next;
} HcaNotifier;

struct NprdmaHca {
    PCIDevice parent_obj;

    MemoryRegion bar0;
    struct nphca_device *core;
    uint32_t latched_high;

    uint16_t lid;
    uint64_t guid;
    uint64_t seed;
    bool ethernet;
    bool pf;
    bool ats;
    bool pasid;
    QemuMutex atc_lock;       /* of the device TLB */
    HcaTranslation *atc;      /* for reads, and after those for writes */
    uint64_t atc_generation;  /* counts invalidations */
    MemoryListener listener;
    QLIST_HEAD(, HcaNotifier) notifiers;
    uint64_t knob[HCA_KNOBS]; /* values set before the device is realized */
    uint32_t knob_set;
};

struct NprdmaLink {
    DeviceState parent_obj;

    char *path, *peer;
    struct sockaddr_un peer_addr;
    int listener, in, out; /* -1: none; the worker's, but for the listener */
    bool full;             /* nothing more goes into out */
    bool joined;
    uint64_t knob[NPHCA_LINK_COUNTERS]; /* values set before */
    uint32_t knob_set;
};

/* One fabric and one worker per process. Never freed: see hca_fabric_get(). */
typedef struct HcaFabric {
    struct nphca_fabric *core;
    QemuThread thread;
    QemuMutex lock;    /* held by the worker while it polls */
    int event;         /* wakes the worker */
    int sleeping;      /* worker is about to block on event */
    int stop_requests; /* somebody wants the lock: let go between polls */
    NprdmaLink *link;  /* NULL: none */
} HcaFabric;

static HcaFabric *hca_fabric;

static const struct {
    const char *name;
    bool is_switch;
} hca_knobs[] = {
    [NPHCA_DMA_REQUEST_SIZE] = { "dma-request-size" },
    [NPHCA_DMA_DELAY_NS] = { "dma-delay-ns" },
    [NPHCA_READ_OVERLAP] = { "read-overlap", true },
    [NPHCA_LOSS] = { "loss" },
    [NPHCA_POSTED_WRITES] = { "posted-writes" },
    [NPHCA_ACK_BEFORE_PLACEMENT] = { "ack-before-placement", true },
    [NPHCA_OUT_OF_ORDER] = { "out-of-order" },
    [NPHCA_CUT_FROM_START] = { "cut-from-start", true },
    [NPHCA_RANDOM_FETCH] = { "random-fetch", true },
    [NPHCA_TRAILING_DMA] = { "trailing-dma", true },
    [NPHCA_READ_PASSES_WRITE] = { "read-passes-write", true },
    [NPHCA_NO_DRAIN] = { "no-drain", true },
    [NPHCA_SPLIT_UNITS] = { "split-units", true },
    [NPHCA_IGNORE_INVALIDATIONS] = { "ignore-invalidations", true },
};

QEMU_BUILD_BUG_ON(ARRAY_SIZE(hca_knobs) > HCA_KNOBS);

static const struct {
    const char *name;
    unsigned int counter;
} hca_counters[] = {
    { "dma-requests", NPHCA_DMA_REQUESTS },
    { "dma-faults", NPHCA_DMA_FAULTS },
    { "drain-timeouts", NPHCA_DRAIN_TIMEOUTS },
    { "posted", NPHCA_POSTED },
    { "early", NPHCA_EARLY },
    { "trailing", NPHCA_TRAILING },
};

static void hca_dma_commit(void *host, void *target, const void *buf,
                           size_t len)
{
    memcpy(target, buf, len);
    /* Marks it dirty and gives up the reference. */
    address_space_unmap(pci_get_address_space(PCI_DEVICE(host)), target, len,
                        true, len);
}

/*
 * Through the device TLB: what it has, or what the IOMMU says, which it keeps. NULL:
 * it is off, or there is no plain memory. The caller has a reference then.
 */
static MemoryRegion *hca_translated(void *host, uint64_t iova, bool is_write,
                                    hwaddr *offset)
{
    NprdmaHca *hca = NPRDMA_HCA(host);
    uint64_t page = iova & ~(HCA_PAGE_SIZE - 1), generation;
    HcaTranslation *entry = hca->atc + (is_write << HCA_ATC_BITS) +
        ((iova >> HCA_PAGE_BITS) & ((1u << HCA_ATC_BITS) - 1));
    hwaddr n = HCA_PAGE_SIZE;
    MemoryRegion *mr = NULL;

    if (!(pci_get_word(PCI_DEVICE(host)->config + HCA_ATS_CAP + PCI_ATS_CTRL) &
          PCI_ATS_CTRL_ENABLE)) {
        return NULL;
    }
    RCU_READ_LOCK_GUARD();
    WITH_QEMU_LOCK_GUARD(&hca->atc_lock) {
        generation = hca->atc_generation;
        if (entry->iova == page && entry->mr) {
            mr = entry->mr;
            *offset = entry->offset + (iova - page);
            memory_region_ref(mr);
        }
    }
    if (mr) {
        return mr;
    }
    mr = address_space_translate(pci_get_address_space(PCI_DEVICE(host)), page,
                                 offset, &n, is_write, MEMTXATTRS_UNSPECIFIED);
    if (!memory_access_is_direct(mr, is_write) || n < HCA_PAGE_SIZE) {
        return NULL;
    }
    memory_region_ref(mr);
    WITH_QEMU_LOCK_GUARD(&hca->atc_lock) {
        /* What was invalidated meanwhile is good for this request only. */
        if (generation == hca->atc_generation) {
            *entry = (HcaTranslation) { page, mr, *offset };
        }
    }
    *offset += iova - page;
    return mr;
}

static void hca_atc_flush(NprdmaHca *hca, uint64_t first, uint64_t last)
{
    unsigned int i;

    QEMU_LOCK_GUARD(&hca->atc_lock);
    hca->atc_generation++;
    for (i = 0; i < 2u << HCA_ATC_BITS; i++) {
        /* Its memory is the machine's, which stays. */
        if (hca->atc[i].iova >= first && hca->atc[i].iova <= last) {
            hca->atc[i].mr = NULL;
        }
    }
}

static void hca_atc_invalidate(IOMMUNotifier *n, IOMMUTLBEntry *iotlb)
{
    HcaNotifier *notifier = container_of(n, HcaNotifier, n);
    uint64_t first = notifier->from + iotlb->iova;

    if (!nphca_knob_get(notifier->hca->core, NPHCA_IGNORE_INVALIDATIONS)) {
        hca_atc_flush(notifier->hca, first & ~(HCA_PAGE_SIZE - 1),
                      first + iotlb->addr_mask);
    }
}

static void hca_region_add(MemoryListener *listener, MemoryRegionSection *s)
{
    NprdmaHca *hca = container_of(listener, NprdmaHca, listener);
    Error *err = NULL;
    HcaNotifier *n;
    Int128 end;

    if (!memory_region_is_iommu(s->mr)) {
        return;
    }
    n = g_new0(HcaNotifier, 1);
    n->hca = hca;
    n->mr = s->mr;
    n->from = s->offset_within_address_space - s->offset_within_region;
    end = int128_sub(int128_add(int128_make64(s->offset_within_region), s->size),
                     int128_one());
    iommu_notifier_init(&n->n, hca_atc_invalidate, IOMMU_NOTIFIER_DEVIOTLB_UNMAP,
                        s->offset_within_region, int128_get64(end),
                        memory_region_iommu_attrs_to_index(
                            IOMMU_MEMORY_REGION(s->mr), MEMTXATTRS_UNSPECIFIED));
    if (memory_region_register_iommu_notifier(s->mr, &n->n, &err)) {
        warn_report_err(err);
        g_free(n);
        return;
    }
    QLIST_INSERT_HEAD(&hca->notifiers, n, next);
}

static void hca_region_del(MemoryListener *listener, MemoryRegionSection *s)
{
    NprdmaHca *hca = container_of(listener, NprdmaHca, listener);
    HcaNotifier *n, *next;

    QLIST_FOREACH_SAFE(n, &hca->notifiers, next, next) {
        if (n->mr == s->mr && n->n.start == s->offset_within_region) {
            memory_region_unregister_iommu_notifier(n->mr, &n->n);
            QLIST_REMOVE(n, next);
            g_free(n);
        }
    }
    hca_atc_flush(hca, 0, UINT64_MAX);
}

static void hca_atc_init(NprdmaHca *hca)
{
    pcie_ats_init(PCI_DEVICE(hca), HCA_ATS_CAP, true);
    qemu_mutex_init(&hca->atc_lock);
    QLIST_INIT(&hca->notifiers);
    hca->atc = g_new0(HcaTranslation, 2u << HCA_ATC_BITS);
    hca->listener = (MemoryListener) {
        .name = "nprdma-hca",
        .region_add = hca_region_add,
        .region_del = hca_region_del,
    };
    memory_listener_register(&hca->listener,
                             pci_get_address_space(PCI_DEVICE(hca)));
}

static void hca_atc_exit(NprdmaHca *hca)
{
    memory_listener_unregister(&hca->listener);
    g_free(hca->atc);
    hca->atc = NULL;
    qemu_mutex_destroy(&hca->atc_lock);
}

static int hca_dma(void *host, uint64_t iova, void *buf, size_t len,
                   DMADirection dir)
{
    bool is_write = dir == DMA_DIRECTION_FROM_DEVICE;
    MemoryRegion *mr = NULL;
    hwaddr offset;

    if (NPRDMA_HCA(host)->atc && (mr = hca_translated(host, iova, is_write,
                                                      &offset))) {
        void *ram = qemu_map_ram_ptr(mr->ram_block, offset);

        if (is_write) {
            hca_dma_commit(host, ram, buf, len);
        } else {
            memcpy(buf, ram, len);
            memory_region_unref(mr);
        }
        return 0;
    }
    return pci_dma_rw(PCI_DEVICE(host), iova, buf, len, dir,
                      MEMTXATTRS_UNSPECIFIED) == MEMTX_OK ? 0 : -1;
}

static int hca_dma_read(void *host, uint64_t iova, void *buf, size_t len)
{
    return hca_dma(host, iova, buf, len, DMA_DIRECTION_TO_DEVICE);
}

static int hca_dma_write(void *host, uint64_t iova, const void *buf, size_t len)
{
    return hca_dma(host, iova, (void *)buf, len, DMA_DIRECTION_FROM_DEVICE);
}

/* A translation without the access, which hca_dma_commit() makes up for. */
static void *hca_dma_target(void *host, uint64_t iova, size_t len)
{
    AddressSpace *as = pci_get_address_space(PCI_DEVICE(host));
    hwaddr xlat, n = len;
    MemoryRegion *mr;

    if (NPRDMA_HCA(host)->atc &&
        (mr = hca_translated(host, iova, true, &xlat))) {
        return qemu_map_ram_ptr(mr->ram_block, xlat);
    }
    RCU_READ_LOCK_GUARD();
    mr = address_space_translate(as, iova, &xlat, &n, true,
                                 MEMTXATTRS_UNSPECIFIED);
    if (!memory_access_is_direct(mr, true) || n < len) {
        return NULL;
    }
    memory_region_ref(mr);
    return qemu_map_ram_ptr(mr->ram_block, xlat);
}

static void hca_drain(void)
{
    nphca_drain(hca_fabric->core);
}

static void hca_msix_notify(void *host, unsigned int vector)
{
    qemu_mutex_lock_iothread();
    msix_notify(PCI_DEVICE(host), vector);
    qemu_mutex_unlock_iothread();
}

static uint64_t hca_now(void *host)
{
    return get_clock();
}

static void hca_delay(void *host, uint64_t ns)
{
    int64_t end = get_clock() + ns;

    if (ns >= 100000) {
        g_usleep(ns / 1000);
    }
    while (get_clock() < end) {
        cpu_relax();
    }
}

static void hca_log(void *host, int level, const char *message)
{
    if (level == NPHCA_LOG_ERROR) {
        warn_report("nprdma-hca %s: %s", PCI_DEVICE(host)->name, message);
    } else if (g_getenv("NPRDMA_HCA_DEBUG")) {
        info_report("nprdma-hca: %s", message);
    }
}

static void hca_wake(void *host)
{
    HcaFabric *fabric = host;

    smp_mb(); /* the work is posted before this looks: pairs with hca_wait() */
    if (qatomic_read(&fabric->sleeping)) {
        uint64_t one = 1;

        if (write(fabric->event, &one, sizeof(one)) < 0) {
            /* The counter is full, so the worker is being woken anyway. */
            return;
        }
    }
}

static const struct nphca_host_ops hca_host_ops = {
    .dma_read = hca_dma_read,
    .dma_write = hca_dma_write,
    .msix_notify = hca_msix_notify,
    .delay = hca_delay,
    .log = hca_log,
    .dma_target = hca_dma_target,
    .dma_commit = hca_dma_commit,
};

static const struct nphca_fabric_ops hca_fabric_ops = {
    .now = hca_now,
    .wake = hca_wake,
};

static void hca_link_close(int *fd)
{
    if (*fd >= 0) {
        close(*fd);
        *fd = -1;
    }
}

/* Without a peer that listens a packet is lost, as it is on a cable. */
static int hca_link_send(void *host, const void *packet, size_t size)
{
    NprdmaLink *link = host;
    bool fresh = false;

    link->full = false;
    for (;;) {
        if (link->out < 0) {
            fresh = true;
            link->out = socket(AF_UNIX,
                               SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
            if (link->out < 0) {
                return -1;
            }
            if (connect(link->out, (struct sockaddr *)&link->peer_addr,
                        sizeof(link->peer_addr))) {
                hca_link_close(&link->out);
                return -1;
            }
        }
        if (send(link->out, packet, size, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) {
            return 1;
        }
        if (errno == EINTR) {
            continue;
        }
        if (errno == EAGAIN) {
            link->full = true;
            return 0;
        }
        hca_link_close(&link->out);
        if (fresh) {
            return -1;
        }
    }
}

/* One sender at a time: the next one when that before it has gone. */
static size_t hca_link_receive(void *host, void *packet, size_t size)
{
    NprdmaLink *link = host;

    for (;;) {
        ssize_t n;

        if (link->in < 0) {
            link->in = accept4(link->listener, NULL, NULL,
                               SOCK_NONBLOCK | SOCK_CLOEXEC);
            if (link->in < 0) {
                return 0;
            }
        }
        n = recv(link->in, packet, size, MSG_DONTWAIT | MSG_TRUNC);
        if (n > 0) {
            return n;
        }
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && errno == EAGAIN) {
            return 0;
        }
        hca_link_close(&link->in);
    }
}

static const struct nphca_link_ops hca_link_ops = {
    .send = hca_link_send,
    .receive = hca_link_receive,
};

/* What the worker waits for; returns how many. */
static unsigned int hca_events(HcaFabric *fabric, struct pollfd pfd[3])
{
    NprdmaLink *link = qatomic_load_acquire(&fabric->link);
    unsigned int n = 0;

    pfd[n++] = (struct pollfd) { .fd = fabric->event, .events = POLLIN };
    if (link) {
        pfd[n++] = (struct pollfd) {
            .fd = link->in < 0 ? link->listener : link->in, .events = POLLIN
        };
        if (link->full && link->out >= 0) {
            pfd[n++] = (struct pollfd) { .fd = link->out, .events = POLLOUT };
        }
    }
    return n;
}

/* Spin briefly, since doorbells come in bursts, then sleep. */
static void hca_wait(HcaFabric *fabric, uint64_t deadline)
{
    int64_t start = get_clock(), timeout = -1;
    struct pollfd pfd[3];
    unsigned int nr = hca_events(fabric, pfd);
    struct timespec ts;
    uint64_t drop;

    for (;;) {
        int64_t now = get_clock();

        if (nphca_fabric_pending(fabric->core) ||
            qatomic_read(&fabric->stop_requests) ||
            (uint64_t)now >= deadline) {
            return;
        }
        if (nr > 1 && poll(pfd + 1, nr - 1, 0) > 0) {
            return;
        }
        if (now - start > HCA_SPIN_NS) {
            break;
        }
        cpu_relax();
    }

    qatomic_set(&fabric->sleeping, 1);
    smp_mb(); /* pairs with hca_wake() */
    if (!nphca_fabric_pending(fabric->core) &&
        !qatomic_read(&fabric->stop_requests)) {
        if (deadline != UINT64_MAX) {
            timeout = MAX((int64_t)(deadline - get_clock()), 0);
            ts.tv_sec = timeout / NANOSECONDS_PER_SECOND;
            ts.tv_nsec = timeout % NANOSECONDS_PER_SECOND;
        }
        if (ppoll(pfd, nr, timeout < 0 ? NULL : &ts, NULL) > 0 &&
            pfd[0].revents & POLLIN &&
            read(fabric->event, &drop, sizeof(drop)) < 0) {
            /* Somebody else took it, which nobody does. */
            abort();
        }
    }
    qatomic_set(&fabric->sleeping, 0);
}

static void *hca_worker(void *opaque)
{
    const struct sched_param param = { .sched_priority = 1 };
    HcaFabric *fabric = opaque;
    uint64_t deadline;
    bool more;

    rcu_register_thread();
    /*
     * Hardware does not wait for a time slice, and a polling guest would keep
     * both CPUs of a small host. Without the right to do so latency gets worse,
     * and nothing else.
     */
    if (pthread_setschedparam(pthread_self(), SCHED_RR, &param)) {
        setpriority(PRIO_PROCESS, syscall(SYS_gettid), -15);
    }

    for (;;) {
        qemu_mutex_lock(&fabric->lock);
        more = nphca_fabric_poll(fabric->core, &deadline);
        qemu_mutex_unlock(&fabric->lock);
        while (qatomic_read(&fabric->stop_requests)) {
            g_usleep(100);
        }
        if (!more) {
            hca_wait(fabric, deadline);
        }
    }
    return NULL;
}

/*
 * The worker outlives every device: at exit QEMU tears down around running
 * threads, so nothing that it uses may have a destructor.
 */
static HcaFabric *hca_fabric_get(Error **errp)
{
    HcaFabric *fabric = hca_fabric;

    if (fabric) {
        return fabric;
    }
    fabric = g_new0(HcaFabric, 1);
    fabric->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fabric->event < 0) {
        error_setg_errno(errp, errno, "eventfd");
        g_free(fabric);
        return NULL;
    }
    fabric->core = nphca_fabric_new(&hca_fabric_ops, fabric);
    if (!fabric->core) {
        error_setg(errp, "out of memory");
        close(fabric->event);
        g_free(fabric);
        return NULL;
    }
    qemu_mutex_init(&fabric->lock);
    hca_fabric = fabric;
    x86_iommu_drain_hook = hca_drain;
    qemu_thread_create(&fabric->thread, "nprdma-hca", hca_worker, fabric,
                       QEMU_THREAD_DETACHED);
    return fabric;
}

/* The worker takes the BQL for interrupts, so wait for it without. */
static void hca_stop(HcaFabric *fabric)
{
    qatomic_inc(&fabric->stop_requests);
    hca_wake(fabric);
    qemu_mutex_unlock_iothread();
    qemu_mutex_lock(&fabric->lock);
    qemu_mutex_lock_iothread();
}

static void hca_continue(HcaFabric *fabric)
{
    qemu_mutex_unlock(&fabric->lock);
    qatomic_dec(&fabric->stop_requests);
}

/*
 * A CPU that already was on its way here when hca_exit() took the BAR away comes
 * when that is over.
 */
static uint64_t hca_bar0_read(void *opaque, hwaddr addr, unsigned int size)
{
    NprdmaHca *hca = opaque;

    return hca->core ? nphca_mmio_read(hca->core, addr, size) : UINT64_MAX;
}

static void hca_bar0_write(void *opaque, hwaddr addr, uint64_t value,
                           unsigned int size)
{
    NprdmaHca *hca = opaque;

    if (hca->core) {
        nphca_mmio_write(hca->core, addr, value, size);
    }
}

static const MemoryRegionOps hca_bar0_ops = {
    .read = hca_bar0_read,
    .write = hca_bar0_write,
    .endianness = DEVICE_LITTLE_ENDIAN,
    .valid = { .min_access_size = 1, .max_access_size = 8 },
    .impl = { .min_access_size = 1, .max_access_size = 8 },
};

static uint32_t hca_config_read(PCIDevice *dev, uint32_t addr, int len)
{
    NprdmaHca *hca = NPRDMA_HCA(dev);

    if (addr == HCA_VENDOR_CAP + 8 && hca->core) {
        uint32_t index = pci_get_long(dev->config + HCA_VENDOR_CAP + 4);
        uint64_t value = nphca_knob_get(hca->core, index);

        pci_set_long(dev->config + HCA_VENDOR_CAP + 8, value);
        pci_set_long(dev->config + HCA_VENDOR_CAP + 12, value >> 32);
        hca->latched_high = 0;
    }
    return pci_default_read_config(dev, addr, len);
}

static void hca_config_write(PCIDevice *dev, uint32_t addr, uint32_t value,
                             int len)
{
    NprdmaHca *hca = NPRDMA_HCA(dev);

    pci_default_write_config(dev, addr, value, len);
    if (hca->atc && ranges_overlap(addr, len, HCA_ATS_CAP, PCI_EXT_CAP_ATS_SIZEOF)) {
        hca_atc_flush(hca, 0, UINT64_MAX);
    }
    if (!hca->core) {
        return;
    }
    if (addr == HCA_VENDOR_CAP + 12 && len == 4) {
        hca->latched_high = value;
    } else if (addr == HCA_VENDOR_CAP + 8 && len == 4) {
        uint32_t index = pci_get_long(dev->config + HCA_VENDOR_CAP + 4);

        nphca_knob_set(hca->core, index,
                       (uint64_t)hca->latched_high << 32 | value);
        hca->latched_high = 0;
    }
}

static void hca_realize(PCIDevice *dev, Error **errp)
{
    NprdmaHca *hca = NPRDMA_HCA(dev);
    struct nphca_config config = {
        .lid = hca->lid, .guid = hca->guid, .seed = hca->seed,
        .ethernet = hca->ethernet
    };
    HcaFabric *fabric = hca_fabric_get(errp);
    unsigned int i;

    if (!fabric) {
        return;
    }
    dev->config[PCI_INTERRUPT_PIN] = 0;
    if (hca->pf) {
        pci_config_set_device_id(dev->config, NPHCA_PF_DEVICE_ID);
    }
    if (pcie_endpoint_cap_init(dev, HCA_PCIE_CAP) < 0) {
        error_setg(errp, "cannot add the PCI Express capability");
        return;
    }
    if (pci_add_capability(dev, PCI_CAP_ID_VNDR, HCA_VENDOR_CAP, HCA_CAP_LEN,
                           errp) < 0) {
        return;
    }
    dev->config[HCA_VENDOR_CAP + 2] = HCA_CAP_LEN;
    memset(dev->wmask + HCA_VENDOR_CAP + 4, 0xff, HCA_CAP_LEN - 4);

    memory_region_init_io(&hca->bar0, OBJECT(hca), &hca_bar0_ops, hca,
                          "nprdma-hca", NPHCA_BAR0_SIZE);
    pci_register_bar(dev, 0,
                     PCI_BASE_ADDRESS_SPACE_MEMORY | PCI_BASE_ADDRESS_MEM_TYPE_64 |
                     PCI_BASE_ADDRESS_MEM_PREFETCH, &hca->bar0);
    if (msix_init_exclusive_bar(dev, NPHCA_MSIX_VECTORS, 4, errp) < 0) {
        return;
    }
    for (i = 0; i < NPHCA_MSIX_VECTORS; i++) {
        msix_vector_use(dev, i);
    }

    hca_stop(fabric);
    hca->core = nphca_device_new(fabric->core, &config, &hca_host_ops, hca);
    hca_continue(fabric);
    if (!hca->core) {
        error_setg(errp, "cannot add a port with LID %u%s", hca->lid,
                   hca->ethernet ? " and Ethernet" : "");
        return;
    }
    for (i = 0; i < ARRAY_SIZE(hca_knobs); i++) {
        if (hca->knob_set & (1u << i) &&
            !nphca_knob_set(hca->core, i, hca->knob[i])) {
            error_setg(errp, "%s cannot be %" PRIu64, hca_knobs[i].name,
                       hca->knob[i]);
            hca_stop(fabric);
            nphca_device_free(hca->core);
            hca->core = NULL;
            hca_continue(fabric);
            return;
        }
    }
    if (hca->ats) {
        hca_atc_init(hca);
    }
    if (hca->pasid) {
        uint16_t at = HCA_ATS_CAP + (hca->ats ? PCI_EXT_CAP_ATS_SIZEOF : 0);

        pcie_add_capability(dev, PCI_EXT_CAP_ID_PASID, 1, at,
                            PCI_EXT_CAP_PASID_SIZEOF);
        pci_set_word(dev->config + at + PCI_PASID_CAP, HCA_PASID_BITS << 8);
        pci_set_word(dev->wmask + at + PCI_PASID_CTRL, PCI_PASID_CTRL_ENABLE);
    }
}

static void hca_exit(PCIDevice *dev)
{
    NprdmaHca *hca = NPRDMA_HCA(dev);

    if (hca->core) {
        uint64_t faults, timeouts;

        hca_stop(hca_fabric);
        faults = nphca_knob_get(hca->core, NPHCA_DMA_FAULTS);
        timeouts = nphca_knob_get(hca->core, NPHCA_DRAIN_TIMEOUTS);
        nphca_device_free(hca->core);
        hca->core = NULL;
        hca_continue(hca_fabric);
        if (faults) {
            /* Nobody can ask for it any more; scripts/vm looks for this line. */
            warn_report("nprdma-hca %s: %" PRIu64 " DMA faults",
                        DEVICE(dev)->id ?: "", faults);
        }
        if (timeouts) {
            warn_report("nprdma-hca %s: %" PRIu64 " drain time-outs",
                        DEVICE(dev)->id ?: "", timeouts);
        }
    }
    if (hca->atc) {
        hca_atc_exit(hca);
    }
    msix_uninit_exclusive_bar(dev);
    pcie_cap_exit(dev);
}

static void hca_reset(DeviceState *dev)
{
    NprdmaHca *hca = NPRDMA_HCA(dev);

    /* Bus mastering is off by now, so DMA has stopped already. */
    if (hca->core) {
        nphca_reset(hca->core);
    }
}

static void hca_get_knob(Object *obj, Visitor *v, const char *name,
                         void *opaque, Error **errp)
{
    NprdmaHca *hca = NPRDMA_HCA(obj);
    unsigned int knob = (uintptr_t)opaque;
    uint64_t value;

    if (hca->core) {
        value = nphca_knob_get(hca->core, knob);
    } else {
        value = knob < ARRAY_SIZE(hca->knob) ? hca->knob[knob] : 0;
    }
    visit_type_uint64(v, name, &value, errp);
}

static void hca_set_knob(Object *obj, Visitor *v, const char *name,
                         void *opaque, Error **errp)
{
    NprdmaHca *hca = NPRDMA_HCA(obj);
    unsigned int knob = (uintptr_t)opaque;
    uint64_t value;

    if (!visit_type_uint64(v, name, &value, errp)) {
        return;
    }
    if (!hca->core) {
        hca->knob[knob] = value;
        hca->knob_set |= 1u << knob;
    } else if (!nphca_knob_set(hca->core, knob, value)) {
        error_setg(errp, "%s cannot be %" PRIu64, name, value);
    }
}

static void hca_get_switch(Object *obj, Visitor *v, const char *name,
                           void *opaque, Error **errp)
{
    NprdmaHca *hca = NPRDMA_HCA(obj);
    unsigned int knob = (uintptr_t)opaque;
    bool value = hca->core ? nphca_knob_get(hca->core, knob) : hca->knob[knob];

    visit_type_bool(v, name, &value, errp);
}

static void hca_set_switch(Object *obj, Visitor *v, const char *name,
                           void *opaque, Error **errp)
{
    NprdmaHca *hca = NPRDMA_HCA(obj);
    unsigned int knob = (uintptr_t)opaque;
    bool value;

    if (!visit_type_bool(v, name, &value, errp)) {
        return;
    }
    if (hca->core) {
        nphca_knob_set(hca->core, knob, value);
    } else {
        hca->knob[knob] = value;
        hca->knob_set |= 1u << knob;
    }
}

static void hca_instance_init(Object *obj)
{
    unsigned int i;

    PCI_DEVICE(obj)->cap_present |= QEMU_PCI_CAP_EXPRESS;
    for (i = 0; i < ARRAY_SIZE(hca_knobs); i++) {
        bool is_switch = hca_knobs[i].is_switch;

        object_property_add(obj, hca_knobs[i].name,
                            is_switch ? "bool" : "uint64",
                            is_switch ? hca_get_switch : hca_get_knob,
                            is_switch ? hca_set_switch : hca_set_knob,
                            NULL, (void *)(uintptr_t)i);
    }
    for (i = 0; i < ARRAY_SIZE(hca_counters); i++) {
        object_property_add(obj, hca_counters[i].name, "uint64", hca_get_knob,
                            NULL, NULL,
                            (void *)(uintptr_t)hca_counters[i].counter);
    }
}

static Property hca_properties[] = {
    DEFINE_PROP_UINT16("lid", NprdmaHca, lid, 0),
    DEFINE_PROP_UINT64("guid", NprdmaHca, guid, 0),
    DEFINE_PROP_UINT64("seed", NprdmaHca, seed, 0),
    DEFINE_PROP_BOOL("pf", NprdmaHca, pf, false),
    DEFINE_PROP_BOOL("ats", NprdmaHca, ats, false),
    DEFINE_PROP_BOOL("pasid", NprdmaHca, pasid, false),
    DEFINE_PROP_BOOL("ethernet", NprdmaHca, ethernet, false),
    DEFINE_PROP_END_OF_LIST(),
};

static void hca_class_init(ObjectClass *klass, void *data)
{
    DeviceClass *dc = DEVICE_CLASS(klass);
    PCIDeviceClass *pc = PCI_DEVICE_CLASS(klass);

    pc->realize = hca_realize;
    pc->exit = hca_exit;
    pc->config_read = hca_config_read;
    pc->config_write = hca_config_write;
    pc->vendor_id = NPHCA_VENDOR_ID;
    pc->device_id = NPHCA_DEVICE_ID;
    pc->class_id = 0x0207; /* InfiniBand controller */
    dc->reset = hca_reset;
    dc->desc = "emulated mlx5 InfiniBand HCA";
    dc->user_creatable = true;
    set_bit(DEVICE_CATEGORY_NETWORK, dc->categories);
    device_class_set_props(dc, hca_properties);
}

static const TypeInfo hca_info = {
    .name = TYPE_NPRDMA_HCA,
    .parent = TYPE_PCI_DEVICE,
    .instance_size = sizeof(NprdmaHca),
    .instance_init = hca_instance_init,
    .class_init = hca_class_init,
    .interfaces = (InterfaceInfo[]) {
        { INTERFACE_PCIE_DEVICE },
        { },
    },
};

static const struct {
    const char *name;
    unsigned int knob;
} hca_link_knobs[] = {
    { "seed", NPHCA_LINK_SEED },
    { "loss", NPHCA_LINK_LOSS },
    { "duplicate", NPHCA_LINK_DUPLICATE },
    { "delay", NPHCA_LINK_DELAY },
    { "delay-ns", NPHCA_LINK_DELAY_NS },
    { "sent", NPHCA_LINK_SENT },
    { "unsent", NPHCA_LINK_UNSENT },
    { "received", NPHCA_LINK_RECEIVED },
    { "lost", NPHCA_LINK_LOST },
    { "duplicated", NPHCA_LINK_DUPLICATED },
    { "delayed", NPHCA_LINK_DELAYED },
    { "cut", NPHCA_LINK_CUT },
    { "malformed", NPHCA_LINK_MALFORMED },
};

static uint64_t hca_link_get(NprdmaLink *link, unsigned int knob)
{
    if (link->joined) {
        return nphca_link_knob_get(hca_fabric->core, knob);
    }
    return knob < ARRAY_SIZE(link->knob) ? link->knob[knob] : 0;
}

static bool hca_link_set(NprdmaLink *link, unsigned int knob, uint64_t value)
{
    if (link->joined) {
        return nphca_link_knob_set(hca_fabric->core, knob, value);
    }
    link->knob[knob] = value;
    link->knob_set |= 1u << knob;
    return true;
}

static void hca_link_get_knob(Object *obj, Visitor *v, const char *name,
                              void *opaque, Error **errp)
{
    uint64_t value = hca_link_get(NPRDMA_LINK(obj), (uintptr_t)opaque);

    visit_type_uint64(v, name, &value, errp);
}

static void hca_link_set_knob(Object *obj, Visitor *v, const char *name,
                              void *opaque, Error **errp)
{
    uint64_t value;

    if (visit_type_uint64(v, name, &value, errp) &&
        !hca_link_set(NPRDMA_LINK(obj), (uintptr_t)opaque, value)) {
        error_setg(errp, "%s cannot be %" PRIu64, name, value);
    }
}

static bool hca_link_get_up(Object *obj, Error **errp)
{
    return hca_link_get(NPRDMA_LINK(obj), NPHCA_LINK_UP);
}

static void hca_link_set_up(Object *obj, bool value, Error **errp)
{
    hca_link_set(NPRDMA_LINK(obj), NPHCA_LINK_UP, value);
}

static bool hca_link_address(struct sockaddr_un *addr, const char *path,
                             Error **errp)
{
    addr->sun_family = AF_UNIX;
    if (!path || !*path || strlen(path) >= sizeof(addr->sun_path)) {
        error_setg(errp, "path and peer have to be names of less than %zu bytes",
                   sizeof(addr->sun_path));
        return false;
    }
    pstrcpy(addr->sun_path, sizeof(addr->sun_path), path);
    return true;
}

static void hca_link_realize(DeviceState *dev, Error **errp)
{
    NprdmaLink *link = NPRDMA_LINK(dev);
    HcaFabric *fabric = hca_fabric_get(errp);
    struct sockaddr_un own = {};
    unsigned int i;

    if (!fabric) {
        return;
    }
    if (fabric->link) {
        error_setg(errp, "there is a link already");
        return;
    }
    if (!hca_link_address(&own, link->path, errp) ||
        !hca_link_address(&link->peer_addr, link->peer, errp)) {
        return;
    }
    link->listener = socket(AF_UNIX,
                            SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    /* What an earlier process of this host has left. */
    unlink(link->path);
    if (link->listener < 0 ||
        bind(link->listener, (struct sockaddr *)&own, sizeof(own)) ||
        listen(link->listener, 8)) {
        error_setg_errno(errp, errno, "%s", link->path);
        hca_link_close(&link->listener);
        return;
    }

    hca_stop(fabric);
    link->joined = nphca_fabric_join(fabric->core, &hca_link_ops, link);
    if (link->joined) {
        qatomic_store_release(&fabric->link, link);
    }
    hca_continue(fabric);
    if (!link->joined) {
        error_setg(errp, "out of memory");
        hca_link_close(&link->listener);
        return;
    }
    for (i = 0; i < ARRAY_SIZE(link->knob); i++) {
        if (link->knob_set & 1u << i &&
            !nphca_link_knob_set(fabric->core, i, link->knob[i])) {
            error_setg(errp, "a probability is at most 1000000, and delay-ns "
                       "10000000000");
            return;
        }
    }
}

static void hca_link_init(Object *obj)
{
    NprdmaLink *link = NPRDMA_LINK(obj);
    unsigned int i;

    link->listener = link->in = link->out = -1;
    link->knob[NPHCA_LINK_UP] = 1;
    for (i = 0; i < ARRAY_SIZE(hca_link_knobs); i++) {
        unsigned int knob = hca_link_knobs[i].knob;

        object_property_add(obj, hca_link_knobs[i].name, "uint64",
                            hca_link_get_knob,
                            knob < NPHCA_LINK_COUNTERS ? hca_link_set_knob : NULL,
                            NULL, (void *)(uintptr_t)knob);
    }
    object_property_add_bool(obj, "up", hca_link_get_up, hca_link_set_up);
}

static Property hca_link_properties[] = {
    DEFINE_PROP_STRING("path", NprdmaLink, path),
    DEFINE_PROP_STRING("peer", NprdmaLink, peer),
    DEFINE_PROP_END_OF_LIST(),
};

/* Like the worker, it stays until QEMU ends. */
static void hca_link_class_init(ObjectClass *klass, void *data)
{
    DeviceClass *dc = DEVICE_CLASS(klass);

    dc->realize = hca_link_realize;
    dc->desc = "link from the fabric of emulated HCAs to that of another process";
    dc->user_creatable = true;
    dc->hotpluggable = false;
    set_bit(DEVICE_CATEGORY_NETWORK, dc->categories);
    device_class_set_props(dc, hca_link_properties);
}

static const TypeInfo hca_link_info = {
    .name = TYPE_NPRDMA_LINK,
    .parent = TYPE_DEVICE,
    .instance_size = sizeof(NprdmaLink),
    .instance_init = hca_link_init,
    .class_init = hca_link_class_init,
};

static void hca_register(void)
{
    type_register_static(&hca_info);
    type_register_static(&hca_link_info);
}

type_init(hca_register)
