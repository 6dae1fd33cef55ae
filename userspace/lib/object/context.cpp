/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "object/context.hpp"
#include "object/errors.hpp"

#include <array>
#include <utility>

using namespace npr;

npr_context::npr_context(ibv_context *v, std::unique_ptr<npr::kernel> k, unsigned int flags, const npr::provider &p)
    : verbs(v), provider(p), kernel(std::move(k)), threads(!(flags & NPR_OPEN_SINGLE_THREADED)), leased(!(flags & NPR_OPEN_NO_LEASES)),
      regions(npr::local_regions::of(v)), leases(*kernel, keeper)
{
	if (const int rc = kernel->query(caps))
		fail(-rc, "nprdma query");
	regions.lease(&leases);
}

npr_context::~npr_context()
{
	regions.lease(nullptr);
}

bool npr_context::is_local(std::uint32_t lkey) const noexcept
{
	return regions.find(lkey).handle.has_value();
}

bool npr_context::is_plain(std::uint32_t lkey) const noexcept
{
	return regions.find(lkey).plain();
}

int npr_context::hold_local(ibv_sge &sge, bool write, std::uint32_t &hold, npr::local_leases::term term,
			    unsigned stripe) noexcept
{
	const local_key key = regions.find(sge.lkey);

	if (!key.handle)
		return backend::no_hold;
	if (const auto lease = leased ? leases.take(*key.handle, sge.addr, sge.length, write, term, stripe) : std::nullopt) {
		hold = lease->token;
		sge.addr = lease->addr;
		sge.lkey = lease->lkey;
		return 0;
	}
	return hold_alone(*key.handle, sge, write, hold);
}

int npr_context::hold_alone(std::uint32_t handle, ibv_sge &sge, bool write, std::uint32_t &hold) noexcept
{
	rdma_np_hold_req req{};
	rdma_np_hold_info info;

	req.addr = sge.addr;
	req.length = sge.length;
	req.flags = write ? RDMA_NP_FAULT_WRITE : 0;
	int rc = kernel->hold(handle, req, info, hold, -1);
	/* What is only leased counts as locked as well. */
	if (rc == -ENOMEM && leases.give_back_idle())
		rc = kernel->hold(handle, req, info, hold, -1);
	switch (rc) {
	case 0:
		sge.addr = info.addr;
		sge.lkey = info.lkey;
		return 0;
	case -EFAULT:
		return rc;
	case -ENOMEM:
	/* Of the region of a whole address space: no more parts, or no more addresses of the device. */
	case -EBUSY:
	case -ENOSPC:
		return -ENOBUFS;
	case -EAGAIN:
	case -EINTR:
		return -EAGAIN;
	default:
		/* Outside, no right, not there any more: the HCA says what it says of pinned memory. */
		return backend::no_hold;
	}
}

void npr_context::free_local(std::uint32_t hold) noexcept
{
	if (hold & local_leases::is_lease)
		leases.give(hold);
	else
		kernel->hold_free(hold);
}

void npr_context::give_back(std::uint64_t receive) noexcept
{
	std::array<std::uint32_t, 8> holds;
	std::size_t n;

	do {
		n = receives.take_holds(receive, holds);
		for (std::size_t k = 0; k < n; ++k)
			free_local(holds[k]);
	} while (n == holds.size());
}

bool npr_context::received(ibv_wc &wc) noexcept
{
	std::uint32_t hold;
	std::uint64_t id;

	switch (receives.completed(wc, hold, id)) {
	case receives::whose::application:
		return true;
	case receives::whose::nobody:
		return false;
	case receives::whose::receive:
		free_local(hold);
		return true;
	case receives::whose::several:
		break;
	}
	give_back(id);
	return true;
}

void npr_context::abandon(const void *queue) noexcept
{
	while (const auto id = receives.abandon(queue))
		give_back(*id);
}
