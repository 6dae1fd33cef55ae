/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Queue pairs. */
#include "pointers.hpp"
#include "policy.hpp"
#include "real.hpp"
#include "registry.hpp"

#include <nprdma/nprdma.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

using namespace npr::preload;

namespace {

/*
 * What it does not take is the provider's alone. @ex: what applications already have for
 * ibv_wr_*(), from detach(); it is taken if the QP is. 0 or an errno, if it should be.
 */
int attach(ibv_qp *qp, std::unique_ptr<npr::qp_ex> &ex)
{
	device *const d = find(qp->context);
	npr_cq *const cq = find(qp->send_cq);

	/* A program that fills its queues itself goes on to. */
	if (!cq || !find(qp->recv_cq) || d->memory.has(qp) ||
	    (qp->qp_type != IBV_QPT_RC && qp->qp_type != IBV_QPT_UC && qp->qp_type != IBV_QPT_UD))
		return 0;
	npr_qp_attr attr{};
	if (ordered())
		attr.flags = NPR_QP_ORDERED_WRITES;
	npr_qp *const lib = npr_attach_qp(cq, qp, &attr);
	if (!lib)
		return errno;
	if (!d->qps.set(qp->handle, qp, lib)) {
		(void)npr_detach_qp(lib);
		return ENOMEM;
	}
	if (ex) {
		lib->ex = std::move(ex);
		lib->ex->move_to(lib);
	}
	return 0;
}

/* @qp, or null and errno. */
ibv_qp *attach_new(ibv_qp *qp)
{
	std::unique_ptr<npr::qp_ex> none;
	const int error = attach(qp, none);

	if (!error || may_be_left(*find(qp->context), "QP", qp->qp_num, error))
		return qp;
	(void)verbs().ibv_destroy_qp(qp);
	errno = error;
	return nullptr;
}

/* What applications have for ibv_wr_*() is left, and posts nothing. */
std::unique_ptr<npr::qp_ex> detach(ibv_qp *qp)
{
	npr_qp *const lib = find(qp);

	if (!lib)
		return take(all().orphans, qp);
	find(qp->context)->qps.remove(qp->handle, lib);
	auto ex = std::move(lib->ex);
	ex->move_to(nullptr);
	(void)npr_detach_qp(lib);
	return ex;
}

/*
 * The completions of a QP, ours or not, that a detach has taken out of its CQs and nobody has
 * polled. Those in the CQs are gone with the QP, or with RESET, so these have to be.
 */
class completions {
public:
	explicit completions(const ibv_qp *qp)
	    : cqs_{find(qp->send_cq), find(qp->recv_cq)}, qp_num_(qp->qp_num)
	{
	}

	void forget() const noexcept
	{
		for (npr_cq *const cq : cqs_)
			if (cq)
				cq->forget(qp_num_);
	}

private:
	std::array<npr_cq *, 2> cqs_;
	std::uint32_t qp_num_;
};

/* Attached, or was until that failed. */
bool is_ours(ibv_qp *qp)
{
	if (find(qp))
		return true;
	const std::lock_guard lock(all().mutex);
	return all().orphans.contains(qp);
}

/* @ex is good until @qp is destroyed. */
void make_orphan(ibv_qp *qp, std::unique_ptr<npr::qp_ex> ex)
{
	const std::lock_guard lock(all().mutex);

	try {
		all().orphans[qp] = std::move(ex);
		all().any_orphans.store(true, std::memory_order_relaxed); /* see there */
	} catch (const std::bad_alloc &) {
		/* lost is better than gone while it is in use */
		(void)ex.release();
	}
}

/* After detach(), which left @ex. 0 or an errno. */
int attach_again(ibv_qp *qp, std::unique_ptr<npr::qp_ex> ex)
{
	const int error = attach(qp, ex);

	if (!ex)
		return error;
	make_orphan(qp, std::move(ex));
	return error;
}

bool is_taken(ibv_qp_type type)
{
	return type == IBV_QPT_RC || type == IBV_QPT_UC || type == IBV_QPT_UD;
}

/* What ibv_wr_*() posts to @qp, which is left to the provider, has keys of twins. @qp; or null and errno. */
ibv_qp *with_builder(device &d, ibv_qp *qp)
{
	ibv_qp_ex *const ex = verbs().ibv_qp_to_qp_ex(qp);

	if (!ex)
		return qp;
	try {
		auto b = std::make_unique<builder>(d.regions, *ex);

		if (d.builders.set(qp->handle, qp, b.get())) {
			builder::put_into(*ex);
			(void)b.release(); /* until the QP is destroyed */
			return qp;
		}
	} catch (const std::bad_alloc &) {
	}
	if (may_be_left(d, "QP", qp->qp_num, ENOMEM))
		return qp;
	(void)verbs().ibv_destroy_qp(qp);
	errno = ENOMEM;
	return nullptr;
}

/* Why the library leaves a QP to the provider; @ops: it has functions for what ibv_wr_*() is to post. */
const char *why_left(ibv_qp_type type, bool ops)
{
	if (!is_taken(type))
		return "a queue pair that is neither RC nor UC nor UD";
	return ops ? "a queue pair on a completion queue that the library does not take" :
		     "a queue pair for operations of ibv_wr_*() that the library does not have";
}

/*
 * By @make(), a QP that the library does not take; @ex: with ibv_wr_*(). Its memory is pinned, by twins of regions. That
 * is not enough for XRC: peers reach regions through it, and have no way to ask for pages. It is not enough where
 * receives into unpinned memory would complete on a CQ that the library does not poll.
 */
template <class F>
ibv_qp *make_left(device &d, ibv_qp_type type, ibv_cq *recv_cq, ibv_srq *srq, bool ex, bool ops, F &&make)
{
	if (type == IBV_QPT_XRC_RECV && d.regions.any_remote())
		return make_pinned(d, "an XRC queue pair of a program with memory for peers", make);
	if (srq && d.srqs.find(srq->handle, srq) && !find(recv_cq))
		return make_pinned(d, "a shared receive queue whose completions come where the library does not poll", make);
	tell_left(d, why_left(type, ops));
	ibv_qp *const qp = make();
	return qp && ex ? with_builder(d, qp) : qp;
}

/*
 * @create() makes a QP of @cap, of RC with twice as many entries of the send queue as were asked for if the
 * device has them, as the library needs two for a WRITE; and of no type with a single one.
 */
template <class F>
ibv_qp *create_larger(ibv_qp_type type, ibv_qp_cap &cap, F &&create)
{
	const ibv_qp_cap asked = cap;

	if (type != IBV_QPT_RC && asked.max_send_wr != 1)
		return create();
	cap.max_send_wr = 2 * std::min(asked.max_send_wr, std::numeric_limits<std::uint32_t>::max() / 2);
	if (ibv_qp *const qp = create())
		return qp;
	cap = asked;
	return create();
}

/* What npr::qp_ex has functions for. A QP for others has the provider's. */
constexpr std::uint64_t send_ops = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
	IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
	IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD |
	IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND_WITH_INV;

/* A QP has READs if it has anything else of a peer's: WRITEs and atomics are proven by them. */
constexpr unsigned proven = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

/* What the application asked for of what modify_qp() makes more of. */
void remember(ibv_qp *qp, const ibv_qp_attr &attr, int mask)
{
	if (!(mask & (IBV_QP_ACCESS_FLAGS | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MAX_QP_RD_ATOMIC)))
		return;
	const std::lock_guard lock(all().mutex);
	try {
		asked &a = all().rights[qp];

		a.context = qp->context;
		if (mask & IBV_QP_ACCESS_FLAGS)
			a.access = attr.qp_access_flags;
		if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
			a.max_dest_rd_atomic = attr.max_dest_rd_atomic;
		if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
			a.max_rd_atomic = attr.max_rd_atomic;
	} catch (const std::bad_alloc &) {
		/* Then it is told what it has. */
	}
}

std::pair<std::array<std::uint8_t, 16>, std::uint16_t> name_of(const ibv_gid &gid, std::uint16_t lid)
{
	return {std::to_array(gid.raw), lid};
}

/* False: it was there before, or there is no memory to know it. */
bool join(ibv_qp *qp, const ibv_gid &gid, std::uint16_t lid)
{
	const std::lock_guard lock(all().mutex);

	try {
		memberships &m = all().groups[qp];

		m.context = qp->context;
		return m.groups.insert(name_of(gid, lid)).second;
	} catch (const std::bad_alloc &) {
		return false;
	}
}

void part(ibv_qp *qp, const ibv_gid &gid, std::uint16_t lid)
{
	const std::lock_guard lock(all().mutex);
	const auto it = all().groups.find(qp);

	if (it != all().groups.end())
		it->second.groups.erase(name_of(gid, lid));
}

bool in_groups(ibv_qp *qp)
{
	const std::lock_guard lock(all().mutex);
	const auto it = all().groups.find(qp);

	return it != all().groups.end() && !it->second.groups.empty();
}

} // namespace

ibv_qp *npr::preload::create_qp_ex(ibv_context *context, ibv_qp_init_attr_ex *attr)
{
	device &d = *find(context);
	const bool ex = attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	const auto make = [&] { return d.extended.create_qp_ex(context, attr); };

	const bool ops = !ex || !(attr->send_ops_flags & ~send_ops);

	if (!ops || !is_taken(attr->qp_type) || !find(attr->send_cq) || !find(attr->recv_cq))
		return make_left(d, attr->qp_type, attr->recv_cq, attr->srq, ex, ops, make);
	ibv_qp *const qp = create_larger(attr->qp_type, attr->cap, make);
	return qp ? attach_new(qp) : qp;
}

/* One that another process may have made, of XRC. */
ibv_qp *npr::preload::open_qp(ibv_context *context, ibv_qp_open_attr *attr)
{
	device &d = *find(context);

	return make_left(d, IBV_QPT_XRC_RECV, nullptr, nullptr, false, true, [&] { return d.extended.open_qp(context, attr); });
}

NPR_EXPORT ibv_qp *ibv_create_qp(ibv_pd *pd, ibv_qp_init_attr *attr)
{
	device *const d = find(pd->context);
	const auto make = [&] { return verbs().ibv_create_qp(pd, attr); };

	if (!d)
		return make();
	if (!is_taken(attr->qp_type) || !find(attr->send_cq) || !find(attr->recv_cq))
		return make_left(*d, attr->qp_type, attr->recv_cq, attr->srq, false, true, make);
	ibv_qp *const qp = create_larger(attr->qp_type, attr->cap, make);
	return qp ? attach_new(qp) : qp;
}

NPR_EXPORT int ibv_destroy_qp(ibv_qp *qp)
{
	qp = real_of(qp);
	/* As the kernel answers then. But to take the QP from the library it has to be ended if anything is posted. */
	if (in_groups(qp))
		return EBUSY;
	const completions unseen(qp);
	device *const d = find(qp->context);
	const std::uint32_t handle = qp->handle;
	builder *const left = d ? d->builders.find(handle, qp) : nullptr;
	/* Before: what is under way ends by means of the QP. */
	auto ex = detach(qp);
	const int rc = verbs().ibv_destroy_qp(qp);

	if (!rc) {
		unseen.forget();
		(void)take(all().rights, qp);
		(void)take(all().groups, qp);
		if (d)
			d->memory.gone(qp);
		if (left) {
			const std::unique_ptr<builder> owned(left);

			d->builders.remove(handle, left);
		}
	}
	/* It is still there, which is what the caller is told. */
	if (rc && ex)
		(void)attach_again(qp, std::move(ex));
	return rc;
}

NPR_EXPORT int ibv_attach_mcast(ibv_qp *qp, const ibv_gid *gid, uint16_t lid)
{
	qp = real_of(qp);
	const bool joined = find(qp->context) && join(qp, *gid, lid);
	const int rc = verbs().ibv_attach_mcast(qp, gid, lid);

	if (rc && joined)
		part(qp, *gid, lid);
	return rc;
}

NPR_EXPORT int ibv_detach_mcast(ibv_qp *qp, const ibv_gid *gid, uint16_t lid)
{
	qp = real_of(qp);
	const int rc = verbs().ibv_detach_mcast(qp, gid, lid);

	if (!rc)
		part(qp, *gid, lid);
	return rc;
}

NPR_EXPORT int ibv_query_ece(ibv_qp *qp, ibv_ece *ece)
{
	const auto theirs = verbs().ibv_query_ece;

	return theirs ? theirs(real_of(qp), ece) : EOPNOTSUPP;
}

NPR_EXPORT int ibv_set_ece(ibv_qp *qp, ibv_ece *ece)
{
	const auto theirs = verbs().ibv_set_ece;

	return theirs ? theirs(real_of(qp), ece) : EOPNOTSUPP;
}

NPR_EXPORT int ibv_modify_qp(ibv_qp *qp, ibv_qp_attr *attr, int mask)
{
	qp = real_of(qp);
	const bool to_reset = mask & IBV_QP_STATE && attr->qp_state == IBV_QPS_RESET;
	const bool reset = to_reset && is_ours(qp);

	std::unique_ptr<npr::qp_ex> ex;
	if (reset)
		ex = detach(qp);

	ibv_qp_attr a = *attr;
	const bool more = qp->qp_type == IBV_QPT_RC && find(qp);
	if (more) {
		/* Peers need them, and we. */
		if (mask & IBV_QP_ACCESS_FLAGS && a.qp_access_flags & proven)
			a.qp_access_flags |= IBV_ACCESS_REMOTE_READ;
		if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
			a.max_dest_rd_atomic = std::max<std::uint8_t>(a.max_dest_rd_atomic, 1);
		if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
			a.max_rd_atomic = std::max<std::uint8_t>(a.max_rd_atomic, 1);
	}
	const int rc = verbs().ibv_modify_qp(qp, &a, mask);
	if (more && !rc)
		remember(qp, *attr, mask);
	if (to_reset && !rc) {
		completions(qp).forget();
		(void)take(all().rights, qp);
	}
	if (!reset)
		return rc;
	if (const int error = attach_again(qp, std::move(ex)); error && !rc)
		return may_be_left(*find(qp->context), "QP", qp->qp_num, error) ? 0 : error;
	return rc;
}

NPR_EXPORT int ibv_query_qp(ibv_qp *qp, ibv_qp_attr *attr, int mask, ibv_qp_init_attr *init)
{
	qp = real_of(qp);
	const int rc = verbs().ibv_query_qp(qp, attr, mask, init);
	const asked a = find(all().rights, qp);

	if (rc || !a.context)
		return rc;
	if (a.access & proven && !(a.access & IBV_ACCESS_REMOTE_READ))
		attr->qp_access_flags &= ~unsigned{IBV_ACCESS_REMOTE_READ};
	if (!a.max_rd_atomic && attr->max_rd_atomic == 1)
		attr->max_rd_atomic = 0;
	if (!a.max_dest_rd_atomic && attr->max_dest_rd_atomic == 1)
		attr->max_dest_rd_atomic = 0;
	return rc;
}

/* What a READ brings may come in two tries, and what a WRITE brings is the peer's library to order. */
NPR_EXPORT int ibv_query_qp_data_in_order(ibv_qp *qp, ibv_wr_opcode op, std::uint32_t flags)
{
	const auto real = verbs().ibv_query_qp_data_in_order;

	qp = real_of(qp);
	return find(qp) || !real ? 0 : real(qp, op, flags);
}

NPR_EXPORT ibv_qp_ex *ibv_qp_to_qp_ex(ibv_qp *qp)
{
	qp = real_of(qp);
	npr_qp *const lib = find(qp);

	return lib ? npr_qp_to_qp_ex(lib) : verbs().ibv_qp_to_qp_ex(qp);
}

void npr::preload::leave(ibv_qp *qp)
{
	const completions unseen(qp);
	auto ex = detach(qp);

	unseen.forget();
	if (!ex)
		return;
	/* The program may have it still. */
	make_orphan(qp, std::move(ex));
}
