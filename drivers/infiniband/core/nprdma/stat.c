// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: what "rdma resource show mr" and "rdma statistic show mr" say of an
 * unpinned region.  Its public MR tells all, as the owner's; the keys that were made
 * for peers and for local buffers are MRs of the kernel and tell whose they are. A
 * pinned MR says what it said before.
 */
#include <net/netlink.h>
#include <rdma/rdma_netlink.h>
#include <rdma/restrack.h>

#include "np_hooks.h"
#include "np_region.h"

/**
 * np_fill_res_mr() - describe a region to "rdma resource show mr"
 * @msg: netlink message
 * @mr: MR or key that the caller's restrack reference keeps alive
 *
 * Return: 0, also for a pinned MR, or -EMSGSIZE.
 */
int np_fill_res_mr(struct sk_buff *msg, struct ib_mr *mr)
{
	struct np_region *region;
	struct nlattr *table;
	struct np_stats stats;

	if (!mr->np)
		return 0;
	np_region_stats(mr->np, &stats);

	table = nla_nest_start(msg, RDMA_NLDEV_ATTR_DRIVER);
	if (!table)
		return -EMSGSIZE;
	/* A part is nobody's business but the whole's, whose keys it has */
	region = mr->np->whole ?: mr->np;
	if (rdma_nl_put_driver_string(msg, "memory", "unpinned") ||
	    rdma_nl_put_driver_u64(msg, "region", np_region_id(region)))
		goto cancel;
	if (rdma_is_kernel_res(&mr->res))
		goto end;
	if (rdma_nl_put_driver_u64(msg, "resident", stats.resident) ||
	    rdma_nl_put_driver_u64(msg, "writable", stats.writable) ||
	    rdma_nl_put_driver_u64(msg, "held", stats.held) ||
	    rdma_nl_put_driver_u64(msg, "leased", stats.leased) ||
	    rdma_nl_put_driver_u64(msg, "huge", stats.huge))
		goto cancel;
end:
	nla_nest_end(msg, table);
	return 0;

cancel:
	nla_nest_cancel(msg, table);
	return -EMSGSIZE;
}

/**
 * np_fill_stat_mr() - tell the counters of a region to "rdma statistic show mr"
 * @msg: netlink message
 * @mr: MR that the caller's restrack reference keeps alive, of an unpinned region;
 *	a key has no counters of its own
 *
 * Return: 0 or -EMSGSIZE.
 */
int np_fill_stat_mr(struct sk_buff *msg, struct ib_mr *mr)
{
#define NP_COUNTER(name, field) { name, offsetof(struct np_stats, field) }
	static const struct {
		const char *name;
		size_t offset;
	} counters[] = {
		NP_COUNTER("faults_minor", faults_minor),
		NP_COUNTER("faults_major", faults_major),
		NP_COUNTER("faults_noop", faults_noop),
		NP_COUNTER("faults_failed", faults_failed),
		NP_COUNTER("faults_at_once", faults_at_once),
		NP_COUNTER("retries", retries),
		NP_COUNTER("page_invalidations", pages_invalidated),
		NP_COUNTER("invalidations", invalidations),
		NP_COUNTER("page_agings", pages_aged),
		NP_COUNTER("holds", holds),
		NP_COUNTER("leases", leases),
		NP_COUNTER("leases_ended", leases_ended),
		NP_COUNTER("recalls_change", recalls_change),
		NP_COUNTER("recalls_memory", recalls_memory),
		NP_COUNTER("recalls_budget", recalls_budget),
		NP_COUNTER("recalls_age", recalls_age),
		NP_COUNTER("recalls_gone", recalls_gone),
		NP_COUNTER("leases_overdue", overdue),
		NP_COUNTER("table_pages", table_pages),
	};
#undef NP_COUNTER
	struct nlattr *table;
	struct np_stats stats;
	unsigned int i;

	if (rdma_is_kernel_res(&mr->res))
		return 0;
	np_region_stats(mr->np, &stats);
	table = nla_nest_start(msg, RDMA_NLDEV_ATTR_STAT_HWCOUNTERS);
	if (!table)
		return -EMSGSIZE;
	for (i = 0; i < ARRAY_SIZE(counters); i++) {
		u64 *value = (void *)&stats + counters[i].offset;

		if (rdma_nl_stat_hwcounter_entry(msg, counters[i].name,
						 *value)) {
			nla_nest_cancel(msg, table);
			return -EMSGSIZE;
		}
	}
	nla_nest_end(msg, table);
	return 0;
}
