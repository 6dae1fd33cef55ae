/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Trace points of the protocol.
 *
 * Events name a QP by its number, which is its restrack id, and a region by its
 * own id, which "rdma resource show mr" has as drv_region.  Nothing here keeps state; a
 * run with tracing off takes the same path.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM nprdma

#if !defined(NP_PEER_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define NP_PEER_TRACE_H

#include <linux/tracepoint.h>
#include <rdma/ib_verbs.h>
#include <uapi/rdma/nprdma.h>

TRACE_DEFINE_ENUM(RDMA_NP_OK);
TRACE_DEFINE_ENUM(RDMA_NP_GONE);
TRACE_DEFINE_ENUM(RDMA_NP_ACCESS);
TRACE_DEFINE_ENUM(RDMA_NP_ADDRESS);
TRACE_DEFINE_ENUM(RDMA_NP_BUSY);
TRACE_DEFINE_ENUM(RDMA_NP_TIMEOUT);
TRACE_DEFINE_ENUM(RDMA_NP_NOMEM);
TRACE_DEFINE_ENUM(RDMA_NP_QP);
TRACE_DEFINE_ENUM(RDMA_NP_PROTO);

#define np_show_status(status)						\
	__print_symbolic(status,					\
		{ RDMA_NP_OK,	"OK" },					\
		{ RDMA_NP_GONE,	"GONE" },				\
		{ RDMA_NP_ACCESS,	"ACCESS" },				\
		{ RDMA_NP_ADDRESS,	"ADDRESS" },				\
		{ RDMA_NP_BUSY,	"BUSY" },				\
		{ RDMA_NP_TIMEOUT,	"TIMEOUT" },				\
		{ RDMA_NP_NOMEM,	"NOMEM" },				\
		{ RDMA_NP_QP,	"QP" },					\
		{ RDMA_NP_PROTO,	"PROTO" },				\
		{ NP_WIRE_FULL,	"FULL" })

#define np_show_fault_flags(flags)					\
	__print_flags(flags, "|",					\
		{ RDMA_NP_FAULT_WRITE,	"WRITE" },			\
		{ RDMA_NP_FAULT_HOLD,	"HOLD" })

DECLARE_EVENT_CLASS(np_resolve_class,
	TP_PROTO(struct ib_device *ibdev, u32 qpn, u32 rkey, u64 region_id,
		 u32 status),
	TP_ARGS(ibdev, qpn, rkey, region_id, status),

	TP_STRUCT__entry(
		__string(dev, dev_name(&ibdev->dev))
		__field(u64, region_id)
		__field(u32, qpn)
		__field(u32, rkey)
		__field(u32, status)
	),

	TP_fast_assign(
		__assign_str(dev);
		__entry->region_id = region_id;
		__entry->qpn = qpn;
		__entry->rkey = rkey;
		__entry->status = status;
	),

	TP_printk("dev=%s qp=%u rkey=0x%08x region=0x%llx status=%s",
		  __get_str(dev), __entry->qpn, __entry->rkey,
		  __entry->region_id, np_show_status(__entry->status))
);

/* The asking side, when RESOLVE ended, and the side that answered it. */
DEFINE_EVENT(np_resolve_class, np_resolve,
	TP_PROTO(struct ib_device *ibdev, u32 qpn, u32 rkey, u64 region_id,
		 u32 status),
	TP_ARGS(ibdev, qpn, rkey, region_id, status));

DEFINE_EVENT(np_resolve_class, np_resolve_serve,
	TP_PROTO(struct ib_device *ibdev, u32 qpn, u32 rkey, u64 region_id,
		 u32 status),
	TP_ARGS(ibdev, qpn, rkey, region_id, status));

/* A message whose sender has not proven to be the peer's kernel: dropped. */
TRACE_EVENT(np_disbelieve,
	TP_PROTO(struct ib_device *ibdev, u32 qpn, u8 type, bool answer,
		 u32 sender),
	TP_ARGS(ibdev, qpn, type, answer, sender),

	TP_STRUCT__entry(
		__string(dev, dev_name(&ibdev->dev))
		__field(u32, qpn)
		__field(u32, sender)
		__field(u8, type)
		__field(bool, answer)
	),

	TP_fast_assign(
		__assign_str(dev);
		__entry->qpn = qpn;
		__entry->sender = sender;
		__entry->type = type;
		__entry->answer = answer;
	),

	TP_printk("dev=%s qp=%u type=%u answer=%u sender=%u",
		  __get_str(dev), __entry->qpn, __entry->type,
		  __entry->answer, __entry->sender)
);

TRACE_EVENT(np_fault_submit,
	TP_PROTO(struct ib_device *ibdev, u32 qpn, u64 tid, u64 region_id,
		 u64 addr, u64 length, u32 nr_ranges, u32 flags),
	TP_ARGS(ibdev, qpn, tid, region_id, addr, length, nr_ranges, flags),

	TP_STRUCT__entry(
		__string(dev, dev_name(&ibdev->dev))
		__field(u64, tid)
		__field(u64, region_id)
		__field(u64, addr)
		__field(u64, length)
		__field(u32, qpn)
		__field(u32, nr_ranges)
		__field(u32, flags)
	),

	TP_fast_assign(
		__assign_str(dev);
		__entry->tid = tid;
		__entry->region_id = region_id;
		__entry->addr = addr;
		__entry->length = length;
		__entry->qpn = qpn;
		__entry->nr_ranges = nr_ranges;
		__entry->flags = flags;
	),

	TP_printk("dev=%s qp=%u tid=%llu region=0x%llx first=0x%llx+0x%llx ranges=%u flags=%s",
		  __get_str(dev), __entry->qpn, __entry->tid,
		  __entry->region_id, __entry->addr, __entry->length,
		  __entry->nr_ranges, np_show_fault_flags(__entry->flags))
);

TRACE_EVENT(np_fault_serve,
	TP_PROTO(struct ib_device *ibdev, u32 qpn, u64 tid, u64 region_id,
		 bool queued, u32 status),
	TP_ARGS(ibdev, qpn, tid, region_id, queued, status),

	TP_STRUCT__entry(
		__string(dev, dev_name(&ibdev->dev))
		__field(u64, tid)
		__field(u64, region_id)
		__field(u32, qpn)
		__field(u32, status)
		__field(bool, queued)
	),

	TP_fast_assign(
		__assign_str(dev);
		__entry->tid = tid;
		__entry->region_id = region_id;
		__entry->qpn = qpn;
		__entry->status = status;
		__entry->queued = queued;
	),

	TP_printk("dev=%s qp=%u tid=%llu region=0x%llx %s status=%s",
		  __get_str(dev), __entry->qpn, __entry->tid,
		  __entry->region_id, __entry->queued ? "queued" : "inline",
		  np_show_status(__entry->status))
);

TRACE_EVENT(np_fault_complete,
	TP_PROTO(struct ib_device *ibdev, u32 qpn, u64 tid, u32 status,
		 u32 tries, u64 ns),
	TP_ARGS(ibdev, qpn, tid, status, tries, ns),

	TP_STRUCT__entry(
		__string(dev, dev_name(&ibdev->dev))
		__field(u64, tid)
		__field(u64, ns)
		__field(u32, qpn)
		__field(u32, status)
		__field(u32, tries)
	),

	TP_fast_assign(
		__assign_str(dev);
		__entry->tid = tid;
		__entry->ns = ns;
		__entry->qpn = qpn;
		__entry->status = status;
		__entry->tries = tries;
	),

	TP_printk("dev=%s qp=%u tid=%llu status=%s tries=%u ns=%llu",
		  __get_str(dev), __entry->qpn, __entry->tid,
		  np_show_status(__entry->status), __entry->tries, __entry->ns)
);

DECLARE_EVENT_CLASS(np_hold_class,
	TP_PROTO(struct ib_device *ibdev, u32 qpn, u64 hold_id,
		 unsigned long pages),
	TP_ARGS(ibdev, qpn, hold_id, pages),

	TP_STRUCT__entry(
		__string(dev, dev_name(&ibdev->dev))
		__field(u64, hold_id)
		__field(unsigned long, pages)
		__field(u32, qpn)
	),

	TP_fast_assign(
		__assign_str(dev);
		__entry->hold_id = hold_id;
		__entry->pages = pages;
		__entry->qpn = qpn;
	),

	TP_printk("dev=%s qp=%u hold=0x%llx pages=%lu",
		  __get_str(dev), __entry->qpn, __entry->hold_id,
		  __entry->pages)
);

#define NP_DEFINE_HOLD_EVENT(name)					\
	DEFINE_EVENT(np_hold_class, name,				\
		TP_PROTO(struct ib_device *ibdev, u32 qpn, u64 hold_id,	\
			 unsigned long pages),				\
		TP_ARGS(ibdev, qpn, hold_id, pages))

NP_DEFINE_HOLD_EVENT(np_hold_grant);
NP_DEFINE_HOLD_EVENT(np_hold_release);
NP_DEFINE_HOLD_EVENT(np_hold_expire);

DECLARE_EVENT_CLASS(np_gone_class,
	TP_PROTO(struct ib_device *ibdev, u32 qpn, u64 region_id, u32 status),
	TP_ARGS(ibdev, qpn, region_id, status),

	TP_STRUCT__entry(
		__string(dev, dev_name(&ibdev->dev))
		__field(u64, region_id)
		__field(u32, qpn)
		__field(u32, status)
	),

	TP_fast_assign(
		__assign_str(dev);
		__entry->region_id = region_id;
		__entry->qpn = qpn;
		__entry->status = status;
	),

	TP_printk("dev=%s qp=%u region=0x%llx status=%s", __get_str(dev),
		  __entry->qpn, __entry->region_id,
		  np_show_status(__entry->status))
);

/* The owner's side: told the peer, dropped the grant; the peer: was told. */
#define NP_DEFINE_GONE_EVENT(name)					\
	DEFINE_EVENT(np_gone_class, name,				\
		TP_PROTO(struct ib_device *ibdev, u32 qpn,		\
			 u64 region_id, u32 status),			\
		TP_ARGS(ibdev, qpn, region_id, status))

NP_DEFINE_GONE_EVENT(np_gone_send);
NP_DEFINE_GONE_EVENT(np_gone_receive);
NP_DEFINE_GONE_EVENT(np_ungrant);

#endif /* NP_PEER_TRACE_H */

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH ../../drivers/infiniband/core/nprdma
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE peer_trace
#include <trace/define_trace.h>
