// SPDX-License-Identifier: GPL-2.0
#include "leases.hpp"

#include <algorithm>

namespace soak
{

namespace
{

/* Not of the processes that host::want_leases() starts. */
bool is_of_a_cell(const rdma_show::region &r)
{
	return r.length == region_bytes || r.length == inbox_bytes || r.length == buffer_bytes;
}

} // namespace

void lease_watch::look()
{
	decltype(seen_) now;
	std::uint64_t leased = 0;

	for (const char *device : {NP_OWNER_DEV, NP_PEER_DEV})
		for (const rdma_show::region &r : kernel_.regions(device))
			if (r.counted && is_of_a_cell(r))
				now.insert({{r.device, r.mrn}, r});
	for (const auto &[key, r] : now) {
		const auto before = seen_.find(key);

		note(r, before == seen_.end() ? rdma_show::region{} : before->second);
		leased += r.leased;
	}
	seen_ = std::move(now);
	most_ = std::max(most_, leased);
}

void lease_watch::note(const rdma_show::region &now, const rdma_show::region &before)
{
	/* Only the peer uses the region, and only its own process the memory of messages and buffers. */
	count_.add(now.length == region_bytes ? kind::remote_lease : kind::local_lease,
		   now.leases - before.leases);
	count_.add(kind::recall_change, now.recalls_change - before.recalls_change);
	count_.add(kind::recall_memory, now.recalls_memory - before.recalls_memory);
	count_.add(kind::recall_budget, now.recalls_budget - before.recalls_budget);
	count_.add(kind::recall_age, now.recalls_age - before.recalls_age);
	count_.add(kind::lease_overdue, now.overdue - before.overdue);
	/* Or more of them, if others were granted meanwhile. */
	if (now.leased < before.leased)
		count_.add(kind::lease_returned, before.leased - now.leased);
}

} // namespace soak
