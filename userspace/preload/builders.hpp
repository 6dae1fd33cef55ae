/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* ibv_wr_*() of queue pairs that the library does not take. */
#ifndef NPR_PRELOAD_BUILDERS_HPP
#define NPR_PRELOAD_BUILDERS_HPP

#include "twins.hpp"

#include <cstddef>
#include <infiniband/verbs.h>
#include <vector>

namespace npr::preload {

/*
 * The provider builds the work requests, and the program has the provider's object: but what names local memory leads
 * here first, where the keys of unpinned regions are replaced by those of their twins. A request that cannot have them
 * is not posted, nor is any that was begun with it, and ibv_wr_complete() says why.
 *
 * From ibv_wr_start() to the end the provider's lock of the queue is held, so all of this is one thread's. If a
 * twin is made meanwhile, who else posts to that queue waits for it.
 */
class builder {
public:
	/* @ex is the provider's, of a device with these @regions. */
	builder(twins &regions, const ibv_qp_ex &ex) noexcept : regions_(regions), theirs_(ex) {}

	/* The pointers of @ex, which is known by this builder, lead here. */
	static void put_into(ibv_qp_ex &ex) noexcept;

private:
	void begin(ibv_qp_ex *ex) noexcept;
	void set_sge(ibv_qp_ex *ex, std::uint32_t lkey, std::uint64_t addr, std::uint32_t length) noexcept;
	void set_sge_list(ibv_qp_ex *ex, std::size_t n, const ibv_sge *list) noexcept;
	[[nodiscard]] int complete(ibv_qp_ex *ex) noexcept;

	twins &regions_;
	const ibv_qp_ex theirs_; /* its functions */
	std::vector<ibv_sge> sges_;
	int error_ = 0; /* of what was begun */
};

} // namespace npr::preload

#endif
