/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What is behind the opaque handles: engines put on verbs.
 *
 * npr_context  one device: the kernel's methods and the threads that resolve keys
 * npr_cq       one CQ and the send queues that complete there; owns the lock
 * npr_qp       one engine and its world
 * npr_srq      one shared receive queue
 *
 * Lock order: qp_ex::mutex or cq_ex::mutex, npr_cq::mutex, then leaves:
 * those of the resolver, of receives, of tables, npr_cq::results_mutex.
 * A thread of the resolver holds no lock during its ioctl, and never npr_cq::mutex. That of the
 * lease_keeper takes npr_cq::mutex, and holds no other lock then.
 */
#ifndef NPR_CONTEXT_HPP
#define NPR_CONTEXT_HPP

#include "handle_table.hpp"
#include "world/kernel.hpp"
#include "world/lease_keeper.hpp"
#include "world/local_leases.hpp"
#include "world/local_regions.hpp"
#include "world/provider.hpp"
#include "world/receives.hpp"
#include "world/resolver.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <memory>
#include <new>
#include <optional>

struct npr_context {
	npr_context(ibv_context *v, std::unique_ptr<npr::kernel> k, unsigned int flags, const npr::provider &p);
	~npr_context();

	ibv_context *verbs;
	const npr::provider provider;
	std::unique_ptr<npr::kernel> kernel;
	bool threads;
	const bool leased; /* NPR_OPEN_NO_LEASES was not said */
	rdma_np_query caps{};
	npr::resolver resolver;
	npr::receives receives;
	npr::local_regions &regions;
	npr::lease_keeper keeper;
	npr::local_leases leases;
	std::atomic<unsigned> stripes{0}; /* given to CQs */
	std::atomic<unsigned> users{0}; /* npr_cq and npr_srq */
	npr::handle_table<ibv_cq, npr_cq> cqs; /* those that this library polls */

	/*
	 * A local buffer becomes held, under a lease if it can; see local_leases. It may be paged in for that, so no lock is
	 * held here. 0, backend::no_hold or a negative errno.
	 */
	[[nodiscard]] int hold_local(ibv_sge &sge, bool write, std::uint32_t &hold, npr::local_leases::term term,
				     unsigned stripe) noexcept;
	/* The same of one in the unpinned region @handle, with a hold of its own. */
	[[nodiscard]] int hold_alone(std::uint32_t handle, ibv_sge &sge, bool write, std::uint32_t &hold) noexcept;
	void free_local(std::uint32_t hold) noexcept;
	[[nodiscard]] bool is_local(std::uint32_t lkey) const noexcept;
	[[nodiscard]] bool is_plain(std::uint32_t lkey) const noexcept;
	/*
	 * One receive of @queue, posted by @post(wr), which says 0 or an errno. 0 or a negative errno.
	 */
	template <class F>
	[[nodiscard]] int post_recv(const void *queue, const ibv_recv_wr &wr, std::uint32_t max_sge, unsigned stripe,
				    F &&post) noexcept;
	/*
	 * If this is the completion of a receive that holds something, it holds nothing any more.
	 * False: of one that was abandoned, and nothing to tell.
	 */
	[[nodiscard, gnu::noinline]] bool received(ibv_wc &wc) noexcept;
	void give_back(std::uint64_t receive) noexcept;
	/* Of what @queue has not completed nobody will hear. */
	void abandon(const void *queue) noexcept;
};

template <class F>
int npr_context::post_recv(const void *queue, const ibv_recv_wr &wr, std::uint32_t max_sge, unsigned stripe,
			   F &&post) noexcept
{
	/* More than adapters have; for others there is the heap. */
	std::array<ibv_sge, 32> some;
	std::unique_ptr<ibv_sge[]> many;
	std::optional<std::uint64_t> id;
	ibv_recv_wr w = wr;
	int rc = 0;

	if (wr.num_sge < 0 || static_cast<std::uint32_t>(wr.num_sge) > max_sge)
		return -EINVAL;
	const auto n = static_cast<std::size_t>(wr.num_sge);
	if (n > some.size()) {
		many.reset(new (std::nothrow) ibv_sge[n]);
		if (!many)
			return -ENOMEM;
	}
	w.next = nullptr;
	w.sg_list = n > some.size() ? many.get() : some.data();
	std::copy_n(wr.sg_list, n, w.sg_list);
	for (std::size_t k = 0; k < n && rc >= 0; ++k) {
		std::uint32_t hold;

		if (!w.sg_list[k].length || !is_local(w.sg_list[k].lkey))
			continue;
		rc = hold_local(w.sg_list[k], true, hold, npr::local_leases::term::lasting, stripe);
		if (rc)
			continue;
		if (id ? receives.add_hold(*id, hold) : (id = receives.add(queue, wr.wr_id, hold)).has_value())
			continue;
		free_local(hold);
		rc = -ENOMEM;
	}
	if (rc >= 0) {
		if (id)
			w.wr_id = *id;
		rc = -post(w);
	}
	if (rc && id)
		give_back(*id);
	return rc;
}

#endif
