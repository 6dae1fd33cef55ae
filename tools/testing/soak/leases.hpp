/* SPDX-License-Identifier: GPL-2.0 */
/* Leases of all cells, as the kernel counts them. */
#ifndef NPRDMA_SOAK_LEASES_HPP
#define NPRDMA_SOAK_LEASES_HPP

#include "cell.hpp"
#include "rdma_show.hpp"

#include <map>
#include <utility>

namespace soak
{

/*
 * A region's counters end with it. So they are read again and again, what is new is added up, and the
 * sums are lower bounds.
 */
class lease_watch
{
public:
	explicit lease_watch(tally &count) : count_(count) {}

	void look();
	/* Pages of a cell's region that are leased now. */
	[[nodiscard]] std::uint64_t leased_by(pid_t owner)
	{
		return kernel_.region_of(NP_OWNER_DEV, owner, region_bytes).leased;
	}
	/* Pages of all cells that were leased at a time, at most. */
	[[nodiscard]] std::uint64_t most() const { return most_; }

private:
	void note(const rdma_show::region &now, const rdma_show::region &before);

	tally &count_;
	rdma_show::netlink kernel_;
	std::map<std::pair<std::uint32_t, std::uint32_t>, rdma_show::region> seen_;
	std::uint64_t most_ = 0;
};

} // namespace soak

#endif
