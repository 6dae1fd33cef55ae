/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "object/extended.hpp"

#include "object/cq.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

namespace npr {

/* --- sending ----------------------------------------------------------- */

qp_ex::qp_ex(npr_qp &qp, const ibv_qp &verbs, std::uint32_t depth, std::uint32_t max_sge,
	     std::uint32_t max_inline, bool threads)
    : ibv_qp_ex{},
      qp_(&qp),
      mutex_(threads),
      depth_(depth),
      max_sge_(std::max(max_sge, 1U)),
      max_inline_(max_inline)
{
	qp_base.context = verbs.context;
	qp_base.qp_context = verbs.qp_context;
	qp_base.pd = verbs.pd;
	qp_base.send_cq = verbs.send_cq;
	qp_base.recv_cq = verbs.recv_cq;
	qp_base.srq = verbs.srq;
	qp_base.handle = verbs.handle;
	qp_base.qp_num = verbs.qp_num;
	qp_base.state = verbs.state;
	qp_base.qp_type = verbs.qp_type;

	wr_start = [](ibv_qp_ex *q) {
		qp_ex &s = self(q);

		s.mutex_.lock();
		s.count_ = 0;
		s.error_ = 0;
		s.has_data_ = true; /* of no work request yet */
		if (s.wrs_.empty()) {
			try {
				/* Applications that do not use this do not pay for it. */
				s.sges_.resize(s.depth_ * s.max_sge_);
				s.inline_.resize(s.depth_ * s.max_inline_);
				s.wrs_.resize(s.depth_);
			} catch (const std::bad_alloc &) {
				s.error_ = ENOMEM;
			}
		}
	};
	wr_complete = [](ibv_qp_ex *q) {
		const int rc = self(q).complete();

		self(q).mutex_.unlock();
		return rc;
	};
	wr_abort = [](ibv_qp_ex *q) { self(q).mutex_.unlock(); };

	wr_send = [](ibv_qp_ex *q) { (void)self(q).add(IBV_WR_SEND); };
	wr_send_imm = [](ibv_qp_ex *q, __be32 imm) {
		if (ibv_send_wr *wr = self(q).add(IBV_WR_SEND_WITH_IMM))
			wr->imm_data = imm;
	};
	wr_send_inv = [](ibv_qp_ex *q, std::uint32_t rkey) {
		if (ibv_send_wr *wr = self(q).add(IBV_WR_SEND_WITH_INV))
			wr->invalidate_rkey = rkey;
	};
	wr_rdma_read = [](ibv_qp_ex *q, std::uint32_t rkey, std::uint64_t addr) {
		self(q).add_rdma(IBV_WR_RDMA_READ, rkey, addr);
	};
	wr_rdma_write = [](ibv_qp_ex *q, std::uint32_t rkey, std::uint64_t addr) {
		self(q).add_rdma(IBV_WR_RDMA_WRITE, rkey, addr);
	};
	wr_rdma_write_imm = [](ibv_qp_ex *q, std::uint32_t rkey, std::uint64_t addr, __be32 imm) {
		qp_ex &s = self(q);

		s.add_rdma(IBV_WR_RDMA_WRITE_WITH_IMM, rkey, addr);
		if (!s.error_)
			s.wrs_[s.count_ - 1].imm_data = imm;
	};
	wr_atomic_cmp_swp = [](ibv_qp_ex *q, std::uint32_t rkey, std::uint64_t addr, std::uint64_t compare,
			       std::uint64_t swap) {
		self(q).add_atomic(IBV_WR_ATOMIC_CMP_AND_SWP, rkey, addr, compare, swap);
	};
	wr_atomic_fetch_add = [](ibv_qp_ex *q, std::uint32_t rkey, std::uint64_t addr, std::uint64_t add) {
		self(q).add_atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, addr, add, 0);
	};
	wr_local_inv = [](ibv_qp_ex *q, std::uint32_t rkey) {
		if (ibv_send_wr *wr = self(q).add(IBV_WR_LOCAL_INV))
			wr->invalidate_rkey = rkey;
	};
	wr_bind_mw = [](ibv_qp_ex *q, ibv_mw *mw, std::uint32_t rkey, const ibv_mw_bind_info *info) {
		if (ibv_send_wr *wr = self(q).add(IBV_WR_BIND_MW)) {
			wr->bind_mw.mw = mw;
			wr->bind_mw.rkey = rkey;
			wr->bind_mw.bind_info = *info;
		}
	};

	wr_set_ud_addr = [](ibv_qp_ex *q, ibv_ah *ah, std::uint32_t qpn, std::uint32_t qkey) {
		qp_ex &s = self(q);

		if (!s.count_)
			s.error_ = EINVAL;
		if (s.error_)
			return;
		auto &ud = s.wrs_[s.count_ - 1].wr.ud;
		ud.ah = ah;
		ud.remote_qpn = qpn;
		ud.remote_qkey = qkey;
	};
	wr_set_sge = [](ibv_qp_ex *q, std::uint32_t lkey, std::uint64_t addr, std::uint32_t length) {
		const ibv_sge sge{addr, length, lkey};

		self(q).set_sges(1, &sge);
	};
	wr_set_sge_list = [](ibv_qp_ex *q, std::size_t n, const ibv_sge *list) { self(q).set_sges(n, list); };
	wr_set_inline_data = [](ibv_qp_ex *q, void *addr, std::size_t length) {
		const ibv_data_buf buf{addr, length};

		self(q).set_inline(1, &buf);
	};
	wr_set_inline_data_list = [](ibv_qp_ex *q, std::size_t n, const ibv_data_buf *list) {
		self(q).set_inline(n, list);
	};
}

/* Without the lock, which who began something and did not complete it has still. */
void qp_ex::move_to(npr_qp *qp) noexcept
{
	qp_ = qp;
}

ibv_send_wr *qp_ex::add(ibv_wr_opcode opcode) noexcept
{
	if (!error_ && count_ == depth_)
		error_ = ENOMEM;
	if (error_)
		return nullptr;

	ibv_send_wr &wr = wrs_[count_];
	wr = {};
	wr.wr_id = wr_id;
	wr.opcode = opcode;
	/* Inline is what ibv_wr_set_inline_data() makes so. */
	wr.send_flags = wr_flags & ~unsigned{IBV_SEND_INLINE};
	wr.sg_list = &sges_[count_ * max_sge_];
	++count_;
	has_data_ = false;
	return &wr;
}

void qp_ex::add_rdma(ibv_wr_opcode opcode, std::uint32_t rkey, std::uint64_t addr) noexcept
{
	if (ibv_send_wr *wr = add(opcode)) {
		wr->wr.rdma.rkey = rkey;
		wr->wr.rdma.remote_addr = addr;
	}
}

void qp_ex::add_atomic(ibv_wr_opcode opcode, std::uint32_t rkey, std::uint64_t addr,
		       std::uint64_t compare_add, std::uint64_t swap) noexcept
{
	if (ibv_send_wr *wr = add(opcode)) {
		wr->wr.atomic.rkey = rkey;
		wr->wr.atomic.remote_addr = addr;
		wr->wr.atomic.compare_add = compare_add;
		wr->wr.atomic.swap = swap;
	}
}

ibv_send_wr *qp_ex::data() noexcept
{
	if (!error_ && has_data_)
		error_ = EINVAL;
	if (error_)
		return nullptr;
	has_data_ = true;
	return &wrs_[count_ - 1];
}

void qp_ex::set_sges(std::size_t n, const ibv_sge *list) noexcept
{
	ibv_send_wr *wr = data();

	if (!wr)
		return;
	if (n > max_sge_) {
		error_ = ENOMEM;
		return;
	}
	std::copy_n(list, n, wr->sg_list);
	wr->num_sge = static_cast<int>(n);
}

void qp_ex::set_inline(std::size_t n, const ibv_data_buf *list) noexcept
{
	ibv_send_wr *wr = data();
	std::size_t length = 0;

	if (!wr)
		return;
	for (std::size_t i = 0; i < n; ++i) {
		if (list[i].length > max_inline_ - length) {
			error_ = ENOMEM;
			return;
		}
		if (list[i].length)
			std::memcpy(&inline_[(count_ - 1) * max_inline_ + length], list[i].addr,
				    list[i].length);
		length += list[i].length;
	}
	wr->send_flags |= IBV_SEND_INLINE;
	if (!length)
		return;
	wr->sg_list[0] = {reinterpret_cast<std::uintptr_t>(&inline_[(count_ - 1) * max_inline_]),
			  static_cast<std::uint32_t>(length), 0};
	wr->num_sge = 1;
}

int qp_ex::complete() noexcept
{
	ibv_send_wr *bad;

	if (error_ || !count_)
		return error_;
	for (std::size_t i = 0; i < count_; ++i) {
		if (qp_base.qp_type == IBV_QPT_UD && !wrs_[i].wr.ud.ah)
			return EINVAL;
		wrs_[i].next = i + 1 < count_ ? &wrs_[i + 1] : nullptr;
	}
	npr_qp *const qp = qp_;
	/* A queue pair that does not send yet says so here, as providers do. */
	if (qp && (qp->verbs->state == IBV_QPS_RESET || qp->verbs->state == IBV_QPS_INIT || qp->verbs->state == IBV_QPS_RTR))
		return EINVAL;
	if (!qp)
		return EINVAL;
	return -(count_ == 1 ? qp->cq.post_send(*qp, wrs_.data(), &bad) : qp->cq.post_whole(*qp, wrs_.data(), &bad));
}

/* --- polling ----------------------------------------------------------- */

namespace {

poller &own(ibv_cq_ex *q) noexcept
{
	return static_cast<cq_ex *>(q)->polling;
}

} // namespace

cq_ex::cq_ex(npr_cq &cq, const ibv_cq &verbs, bool threads) noexcept : ibv_cq_ex{}, polling(cq, threads)
{
	context = verbs.context;
	ibv_cq_ex::channel = verbs.channel;
	cq_context = verbs.cq_context;
	handle = verbs.handle;
	cqe = verbs.cqe;
	set_polling<own>(*this, IBV_WC_STANDARD_FLAGS);
}

int poller::start(ibv_cq_ex &q, const ibv_poll_cq_attr &attr) noexcept
{
	if (attr.comp_mask)
		return EINVAL;
	mutex_.lock();
	const int rc = next(q);
	if (rc)
		mutex_.unlock();
	return rc;
}

int poller::next(ibv_cq_ex &q) noexcept
{
	/* What a provider does not fill in is no other completion's. */
	wc_ = {};
	const int n = cq_.poll(1, &wc_);

	if (n <= 0)
		return n ? -n : ENOENT;
	q.wr_id = wc_.wr_id;
	q.status = wc_.status;
	return 0;
}

} // namespace npr
