/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Trace points of regions.
 *
 * Events name a region by its own id, which "rdma resource show mr" has as drv_region.
 * Nothing here keeps state; a run with tracing off takes the same path.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM nprdma
/* The protocol's have the same name, and may be in another module */
#undef TRACE_SYSTEM_VAR
#define TRACE_SYSTEM_VAR nprdma_regions

#if !defined(NP_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define NP_TRACE_H

#include <linux/tracepoint.h>
#include <uapi/rdma/nprdma.h>

#define np_show_rights(rights)						\
	__print_symbolic(rights,					\
		{ 0,					"absent" },	\
		{ RDMA_NP_WORD_READABLE,			"read" },	\
		{ RDMA_NP_WORD_READABLE | RDMA_NP_WORD_WRITABLE,	"write" })

/*
 * Pages of a region changed their state: @rights is what their words say now
 * (0: absent).  @va is the owner's address where the range begins that was faulted
 * or invalidated, @pages how many in it changed.  @rkey is the public key.
 */
TRACE_EVENT(np_residency,
	TP_PROTO(u64 region_id, u32 rkey, u64 va, u64 pages, u32 rights),
	TP_ARGS(region_id, rkey, va, pages, rights),

	TP_STRUCT__entry(
		__field(u64, region_id)
		__field(u64, va)
		__field(u64, pages)
		__field(u32, rkey)
		__field(u32, rights)
	),

	TP_fast_assign(
		__entry->region_id = region_id;
		__entry->va = va;
		__entry->pages = pages;
		__entry->rkey = rkey;
		__entry->rights = rights;
	),

	TP_printk("region=0x%llx rkey=0x%x va=0x%llx pages=%llu now=%s",
		  __entry->region_id, __entry->rkey, __entry->va,
		  __entry->pages, np_show_rights(__entry->rights))
);

#endif /* NP_TRACE_H */

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH ../../drivers/infiniband/core/nprdma
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>
