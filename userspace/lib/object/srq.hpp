/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef NPR_SRQ_HPP
#define NPR_SRQ_HPP

#include "object/context.hpp"

struct npr_srq {
	/* Throws std::bad_alloc. */
	npr_srq(npr_context &c, ibv_srq *s, std::uint32_t max_wr, std::uint32_t max_sge);
	~npr_srq();

	int post_recv(ibv_recv_wr *wr, ibv_recv_wr **bad) noexcept;

	npr_context &ctx;
	ibv_srq *verbs;

private:
	const unsigned stripe_; /* for local_leases */
	const std::uint32_t max_sge_;
};

#endif
