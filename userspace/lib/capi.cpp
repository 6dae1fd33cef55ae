/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The C ABI: checks, and no exception gets past here. */
#include "object/cq.hpp"
#include "object/srq.hpp"
#include "seam.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

#define NPR_EXPORT __attribute__((visibility("default")))

namespace {

/*
 * From this size on a READ is proven by residency words instead of a pass over
 * its data, if they are known ("READ by proof" of make bench). Chosen because the
 * pass over 64 KiB of cold data takes 7 us (scan_bench, 9 GB/s), which is more
 * than the round trip of a READ.
 */
constexpr std::uint32_t default_read_words_min = 64 * 1024;
constexpr std::uint32_t default_cache_slots = 2048;

/* f() makes an object; on failure null and errno. */
template <class F>
auto guarded(F &&f) noexcept -> decltype(f())
{
	const npr::uncancelled here;

	try {
		return f();
	} catch (const std::system_error &e) {
		errno = e.code().value();
	} catch (const std::bad_alloc &) {
		errno = ENOMEM;
	} catch (...) {
		errno = EINVAL;
	}
	return nullptr;
}

template <class T>
bool all_zero(const T &reserved) noexcept
{
	return std::all_of(std::begin(reserved), std::end(reserved), [](auto v) { return v == 0; });
}

} // namespace

NPR_EXPORT int npr_version()
{
	return NPRDMA_VERSION;
}

NPR_EXPORT int npr_query_device(ibv_context *verbs, npr_device_attr *attr)
{
	npr::uverbs_kernel k(*verbs);
	rdma_np_query q;

	if (const int rc = k.query(q))
		return rc;
	if (!(q.flags & RDMA_NP_QUERY_OWNER))
		return -EOPNOTSUPP;
	*attr = {};
	attr->abi_version = q.abi_version;
	attr->max_fault_ranges = q.max_ranges;
	attr->max_fault_pages = q.max_pages;
	attr->max_faults = q.max_outstanding;
	return 0;
}

npr_context *npr::open(ibv_context *verbs, unsigned int flags, const npr::provider &provider) noexcept
{
	if (flags & ~static_cast<unsigned int>(NPR_OPEN_SINGLE_THREADED | NPR_OPEN_NO_LEASES)) {
		errno = EINVAL;
		return nullptr;
	}
	return guarded([&] {
		return std::make_unique<npr_context>(verbs, std::make_unique<npr::uverbs_kernel>(*verbs), flags, provider)
			.release();
	});
}

NPR_EXPORT npr_context *npr_open(ibv_context *verbs, unsigned int flags)
{
	return npr::open(verbs, flags, npr::provider(*verbs));
}

NPR_EXPORT int npr_close(npr_context *ctx)
{
	const npr::uncancelled here;

	/* a count; the caller orders its calls */
	if (ctx->users.load(std::memory_order_relaxed))
		return -EBUSY;
	const std::unique_ptr<npr_context> owned(ctx);
	return 0;
}

NPR_EXPORT ibv_mr *npr_reg_mr(ibv_pd *pd, void *addr, size_t length, int access)
{
	return guarded([&]() -> ibv_mr * {
		struct dereg {
			void operator()(ibv_mr *m) const noexcept { ibv_dereg_mr(m); }
		};
		std::unique_ptr<ibv_mr, dereg> mr(ibv_reg_mr(pd, addr, length, access | IBV_ACCESS_UNPINNED));

		if (mr)
			npr::local_regions::of(mr->context).add(*mr);
		return mr.release();
	});
}

int npr::dereg_mr(ibv_mr *mr, decltype(npr::provider::dereg_mr) dereg) noexcept
{
	npr::local_regions *const regions = npr::local_regions::existing(mr->context);
	/* Another thread's region may have the key as soon as this one has not */
	const auto key = regions ? regions->remove(*mr) : std::nullopt;
	const int rc = dereg(mr);
	if (!rc)
		return 0;
	try {
		if (key)
			regions->add(*mr, *key);
	} catch (const std::bad_alloc &) {
		/* it is a region still, but no local buffer */
	}
	return -rc;
}

NPR_EXPORT int npr_dereg_mr(ibv_mr *mr)
{
	return npr::dereg_mr(mr, ibv_dereg_mr);
}

NPR_EXPORT int npr_query_mr(ibv_mr *mr, npr_mr_attr *attr)
{
	npr::uverbs_kernel k(*mr->context);
	rdma_np_query q;
	rdma_np_mr_info i;

	/* It finds the driver's number, too. */
	int rc = k.query(q);
	if (!rc)
		rc = k.query_mr(*mr, i);
	if (rc)
		return rc;
	*attr = {};
	attr->id = i.region_id;
	attr->resident_pages = i.resident_pages;
	attr->writable_pages = i.writable_pages;
	attr->held_pages = i.held_pages;
	attr->faults_minor = i.faults_minor;
	attr->faults_major = i.faults_major;
	attr->faults_noop = i.faults_noop;
	attr->faults_failed = i.faults_failed;
	attr->invalidations = i.invalidations;
	attr->pages_invalidated = i.pages_invalidated;
	attr->holds = i.holds;
	attr->table_pages = i.table_pages;
	return 0;
}

npr_cq *npr::attach_cq(npr_context *ctx, ibv_cq *cq, std::uint32_t own)
{
	if (cq->context != ctx->verbs) {
		errno = EINVAL;
		return nullptr;
	}
	return guarded([&] { return std::make_unique<npr_cq>(*ctx, cq, own).release(); });
}

/* Nobody knows what else completes there: half is for that. */
NPR_EXPORT npr_cq *npr_attach_cq(npr_context *ctx, ibv_cq *cq)
{
	return npr::attach_cq(ctx, cq, static_cast<std::uint32_t>(cq->cqe) / 2);
}

NPR_EXPORT int npr_detach_cq(npr_cq *cq)
{
	{
		const std::lock_guard lock(cq->mutex);
		if (!cq->qps.empty())
			return -EBUSY;
	}
	const std::unique_ptr<npr_cq> owned(cq);
	return 0;
}

NPR_EXPORT npr_qp *npr_attach_qp(npr_cq *cq, ibv_qp *qp, const npr_qp_attr *attr)
{
	const npr_qp_attr a = attr ? *attr : npr_qp_attr{};
	ibv_qp_attr state{};
	ibv_qp_init_attr init{};

	return guarded([&]() -> npr_qp * {
		const auto refuse = [](int error) -> npr_qp * {
			errno = error;
			return nullptr;
		};
		if (a.flags & ~static_cast<std::uint32_t>(NPR_QP_RELAXED_ORDER | NPR_QP_OPAQUE_SINKS | NPR_QP_ORDERED_WRITES) ||
		    !all_zero(a.reserved))
			return refuse(EINVAL);
		if (const int error = ibv_query_qp(qp, &state,
						   IBV_QP_STATE | IBV_QP_CAP | IBV_QP_MAX_QP_RD_ATOMIC, &init))
			return refuse(error);
		const bool rc = init.qp_type == IBV_QPT_RC;
		const bool ready = state.qp_state == IBV_QPS_RTS;
		if ((!rc && init.qp_type != IBV_QPT_UC && init.qp_type != IBV_QPT_UD) ||
		    qp->send_cq != cq->verbs || (rc && ready && !state.max_rd_atomic))
			return refuse(EINVAL);
		if (!ready && state.qp_state != IBV_QPS_RESET && state.qp_state != IBV_QPS_INIT &&
		    state.qp_state != IBV_QPS_RTR)
			return refuse(ENOTCONN);

		const std::uint32_t depth = state.cap.max_send_wr;
		npr::qp_params p{};
		p.budget = a.sq_budget ? a.sq_budget : depth;
		if (p.budget > depth)
			return refuse(ENOSPC);
		/* Without a send queue it needs nothing, and posts receives only. */
		if (p.budget < 2 && depth)
			return refuse(a.sq_budget ? EINVAL : ENOSPC);
		p.depth = a.max_send_wr ? a.max_send_wr : depth;
		if (p.depth > 1U << 20 || (p.depth && !depth))
			return refuse(EINVAL);
		p.max_sge = state.cap.max_send_sge;
		p.max_inline = state.cap.max_inline_data;
		p.cache_slots = std::min(a.word_cache_slots ? a.word_cache_slots : default_cache_slots, 1U << 20);
		p.read_words_min = a.read_words_min ? a.read_words_min : default_read_words_min;
		p.receives = qp->srq ? 0 : state.cap.max_recv_wr;
		p.receive_sge = state.cap.max_recv_sge;
		p.sq_sig_all = init.sq_sig_all;
		p.relaxed = a.flags & NPR_QP_RELAXED_ORDER;
		p.opaque_sinks = a.flags & NPR_QP_OPAQUE_SINKS;
		p.ordered_writes = a.flags & NPR_QP_ORDERED_WRITES;
		p.local_only = !rc;
		return cq->attach(qp, p);
	});
}

NPR_EXPORT int npr_detach_qp(npr_qp *qp)
{
	return qp->cq.detach(qp);
}

NPR_EXPORT int npr_post_send(npr_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad)
{
	return qp->cq.post_send(*qp, wr, bad);
}

NPR_EXPORT int npr_post_recv(npr_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	return qp->cq.post_recv(*qp, wr, bad);
}

NPR_EXPORT npr_srq *npr_attach_srq(npr_context *ctx, ibv_srq *srq)
{
	if (srq->context != ctx->verbs) {
		errno = EINVAL;
		return nullptr;
	}
	ibv_srq_attr attr{};
	if (const int error = ibv_query_srq(srq, &attr)) {
		errno = error;
		return nullptr;
	}
	return guarded(
	    [&] { return std::make_unique<npr_srq>(*ctx, srq, attr.max_wr, attr.max_sge).release(); });
}

NPR_EXPORT int npr_detach_srq(npr_srq *srq)
{
	const std::unique_ptr<npr_srq> owned(srq);
	return 0;
}

NPR_EXPORT int npr_post_srq_recv(npr_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	return srq->post_recv(wr, bad);
}

NPR_EXPORT ibv_qp_ex *npr_qp_to_qp_ex(npr_qp *qp)
{
	return qp->ex.get();
}

NPR_EXPORT ibv_cq_ex *npr_cq_to_cq_ex(npr_cq *cq)
{
	return &cq->ex;
}

NPR_EXPORT int npr_poll_cq(npr_cq *cq, int num_entries, ibv_wc *wc)
{
	return cq->poll(num_entries, wc);
}

NPR_EXPORT int npr_req_notify_cq(npr_cq *cq, int solicited_only)
{
	return cq->req_notify(solicited_only);
}

NPR_EXPORT int npr_get_fd(npr_cq *cq)
{
	return cq->epoll.get();
}

NPR_EXPORT int npr_wait_cq(npr_cq *cq, int timeout_ms)
{
	return cq->wait(timeout_ms);
}

NPR_EXPORT int npr_resolve(npr_qp *qp, uint32_t rkey, npr_region_attr *attr)
{
	return qp->cq.resolve(*qp, rkey, 0, 0, attr);
}

NPR_EXPORT int npr_resolve_range(npr_qp *qp, uint32_t rkey, uint64_t addr, uint64_t length, npr_region_attr *attr)
{
	return qp->cq.resolve(*qp, rkey, addr, length, attr);
}

NPR_EXPORT int64_t npr_prefetch(npr_qp *qp, uint32_t rkey, uint64_t addr, uint64_t length, int access)
{
	if (access != IBV_ACCESS_REMOTE_READ && access != IBV_ACCESS_REMOTE_WRITE)
		return -EINVAL;
	return qp->cq.prefetch(*qp, rkey, addr, length, access == IBV_ACCESS_REMOTE_WRITE);
}

NPR_EXPORT int npr_advise(npr_qp *qp, uint32_t rkey, uint64_t addr, uint64_t length, int advice)
{
	if (advice != NPR_ADVISE_READ_OFTEN && advice != NPR_ADVISE_WRITE_OFTEN && advice != NPR_ADVISE_SELDOM)
		return -EINVAL;
	return qp->cq.advise(*qp, rkey, addr, length, static_cast<npr_advice>(advice));
}

NPR_EXPORT int npr_get_stats(npr_qp *qp, npr_stats *stats, size_t size)
{
	const std::lock_guard lock(qp->cq.mutex);
	const npr_stats &now = qp->engine.stats();

	std::memset(stats, 0, size);
	std::memcpy(stats, &now, std::min(size, sizeof(now)));
	return 0;
}
