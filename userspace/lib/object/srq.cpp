/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "object/srq.hpp"

using namespace npr;

npr_srq::npr_srq(npr_context &c, ibv_srq *s, std::uint32_t max_wr, std::uint32_t max_sge)
    : ctx(c), verbs(s), stripe_(c.stripes.fetch_add(1, std::memory_order_relaxed)), max_sge_(max_sge)
{
	ctx.receives.reserve(max_wr, max_sge);
	ctx.users.fetch_add(1, std::memory_order_relaxed); /* a count, nothing hangs on it */
}

npr_srq::~npr_srq()
{
	ctx.abandon(this);
	ctx.users.fetch_sub(1, std::memory_order_relaxed); /* as above */
}

int npr_srq::post_recv(ibv_recv_wr *wr, ibv_recv_wr **bad) noexcept
{
	for (; wr; wr = wr->next) {
		const int rc = ctx.post_recv(this, *wr, max_sge_, stripe_, [&](ibv_recv_wr &w) {
			ibv_recv_wr *b;
			return ctx.provider.post_srq_recv(verbs, &w, &b);
		});
		if (rc) {
			if (bad)
				*bad = wr;
			return rc;
		}
	}
	return 0;
}
