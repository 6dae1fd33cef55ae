/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "fake_hca.hpp"

#include "protocol/scan.hpp"

#include <algorithm>
#include <cerrno>
#include <gtest/gtest.h>
#include <memory>
#include <rdma/nprdma.h>

namespace npr::fake {

/* The provider's functions, which the preload library puts its own in the place of. */
extern "C" {

int fake_post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad)
{
	return of(qp->context).post(qp, wr, bad);
}

int fake_post_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	return of(qp->context).post_recv(qp, wr, bad);
}

int fake_post_srq_recv(ibv_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	return of(srq->context).post_srq_recv(srq, wr, bad);
}

int fake_poll_cq(ibv_cq *cq, int n, ibv_wc *wc)
{
	return of(cq->context).poll(cq, n, wc);
}

int fake_req_notify_cq(ibv_cq *cq, int solicited)
{
	return of(cq->context).arm(cq, solicited);
}

} // extern "C"

cq::cq(hca &h, int cqe) : capacity(static_cast<std::size_t>(cqe))
{
	base()->context = &h.verbs.context;
	base()->cqe = cqe;
	base()->handle = h.new_handle();
}

srq::srq(hca &h, ibv_pd *pd)
{
	verbs.context = &h.verbs.context;
	verbs.pd = pd;
	verbs.handle = h.new_handle();
}

qp::qp(hca &h, std::uint32_t number, ibv_cq *send_cq, ibv_cq *recv_cq)
{
	base().context = &h.verbs.context;
	base().qp_num = number;
	base().send_cq = send_cq;
	base().recv_cq = recv_cq;
}

hca::hca()
{
	verbs.sz = sizeof(verbs);
	verbs.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	ibv_context_ops &ops = verbs.context.ops;
	ops.post_send = fake_post_send;
	ops.post_recv = fake_post_recv;
	ops.post_srq_recv = fake_post_srq_recv;
	ops.poll_cq = fake_poll_cq;
	ops.req_notify_cq = fake_req_notify_cq;
}

hca::~hca() = default;

std::uint32_t hca::new_handle()
{
	const std::lock_guard lock(mutex);
	std::uint32_t h = first_handle;

	while (!handles.insert(h).second)
		++h;
	return h;
}

void hca::free_handle(std::uint32_t h)
{
	const std::lock_guard lock(mutex);

	handles.erase(h);
}

mr *hca::register_memory(ibv_pd *pd, void *addr, std::size_t length, std::uint64_t iova, unsigned access)
{
	const bool unpinned = access & RDMA_NP_ACCESS_UNPINNED;

	if (const int error = unpinned ? refuses_unpinned : refuses_pinned) {
		errno = error;
		return nullptr;
	}
	auto m = std::make_unique<mr>();
	ibv_mr &v = m->verbs;
	m->iova = iova;
	m->access = access;
	v.context = &verbs.context;
	v.pd = pd;
	v.addr = addr;
	v.length = length;
	v.handle = new_handle();
	v.lkey = v.rkey = (v.handle + 1) << 8;
	const std::lock_guard lock(mutex);
	name_memory(*m);
	pinned += !unpinned;
	return m.release();
}

void hca::name_memory(const mr &m)
{
	const ibv_mr &v = m.verbs;
	const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(v.addr) - m.iova;

	if (m.access & RDMA_NP_ACCESS_UNPINNED)
		regions[v.handle] = {m.iova, v.length, offset};
	else
		keys[v.lkey] = {m.iova, v.length, offset, (m.access & IBV_ACCESS_LOCAL_WRITE) != 0};
}

void hca::deregister(mr *m)
{
	const std::unique_ptr<mr> owned(m);
	{
		const std::lock_guard lock(mutex);

		if (!regions.erase(m->verbs.handle)) {
			keys.erase(m->verbs.lkey);
			--pinned;
		}
	}
	free_handle(m->verbs.handle);
}

void hca::complete(ibv_cq *c, const ibv_wc &wc)
{
	EXPECT_LT(of(c).completions.size(), of(c).capacity) << "CQ overrun";
	of(c).completions.push_back(wc);
}

void hca::go_on()
{
	const std::lock_guard lock(mutex);

	stall = false;
	for (const auto &[cq, wc] : stalled)
		complete(cq, wc);
	stalled.clear();
}

void hca::fail(const ibv_qp &qp)
{
	dead.insert(qp.qp_num);
	std::erase_if(stalled, [&](auto &s) {
		auto &[cq, wc] = s;

		if (wc.qp_num != qp.qp_num)
			return false;
		wc.status = IBV_WC_WR_FLUSH_ERR;
		complete(cq, wc);
		return true;
	});
}

std::byte *hca::locate(const ibv_sge &s, std::uint64_t offset, std::uint64_t n, bool write) const
{
	const auto k = keys.find(s.lkey);
	std::uint64_t addr = s.addr + offset;

	if (k != keys.end()) {
		const std::uint64_t start = addr - k->second.base;
		EXPECT_TRUE(start <= k->second.length && n <= k->second.length - start) << "outside of what the key is of";
		EXPECT_TRUE(k->second.write || !write) << "the key is not for writing";
		addr += k->second.offset;
	}
	EXPECT_TRUE(k != keys.end() || !is_held(s.lkey)) << "a local buffer that is not held";
	return reinterpret_cast<std::byte *>(static_cast<std::uintptr_t>(addr));
}

/* The first lkey of a list of which all must be the HCA's to use; unless it is @in_line. */
std::uint32_t hca::note(const ibv_sge *list, int n, bool write, bool in_line) const
{
	for (int i = 0; i < n && !in_line; ++i)
		if (list[i].length)
			(void)locate(list[i], 0, list[i].length, write);
	return n ? list[0].lkey : 0;
}

int hca::post(ibv_qp *q, ibv_send_wr *wr, ibv_send_wr **bad)
{
	const std::lock_guard lock(mutex);
	qp &p = of(q);

	if (refuse_post) {
		*bad = wr;
		return refuse_post;
	}
	for (; wr; wr = wr->next) {
		const bool brings = wr->opcode == IBV_WR_RDMA_READ || test::is_atomic(wr->opcode);
		const std::span<const ibv_sge> sges(wr->sg_list, static_cast<std::size_t>(wr->num_sge));
		ibv_wc wc{};

		wc.wr_id = wr->wr_id;
		wc.qp_num = q->qp_num;
		if (dead.contains(q->qp_num)) {
			wc.status = IBV_WC_WR_FLUSH_ERR;
			complete(q->send_cq, wc);
			continue;
		}
		p.lkey = note(wr->sg_list, wr->num_sge, brings, wr->send_flags & IBV_SEND_INLINE);
		p.wr_id = wr->wr_id;
		if (wr->opcode == IBV_WR_BIND_MW)
			p.window = wr->bind_mw.rkey;
		p.sends.fetch_add(1);
		if (records)
			posted.push_back(*wr);
		if (brings || test::changes_memory(wr->opcode))
			transfer(*wr);
		if (!(wr->send_flags & IBV_SEND_SIGNALED))
			continue;
		test::complete_as(wc, wr->opcode, sges);
		if (stall)
			stalled.emplace_back(q->send_cq, wc);
		else
			complete(q->send_cq, wc);
	}
	return 0;
}

/* What is of no region and no lease is to pinned memory, and moves nothing. */
void hca::transfer(const ibv_send_wr &wr)
{
	const bool atomic = test::is_atomic(wr.opcode), brings = atomic || wr.opcode == IBV_WR_RDMA_READ;
	const bool in_line = wr.send_flags & IBV_SEND_INLINE;
	const std::uint32_t rkey = atomic ? wr.wr.atomic.rkey : wr.wr.rdma.rkey;
	std::uint64_t at = atomic ? wr.wr.atomic.remote_addr : wr.wr.rdma.remote_addr;
	const peer::region *const table = far.by_key(rkey, &rdma_np_region_info::table_key);

	if (!moves && !table)
		return;
	EXPECT_TRUE(!peer::is_lease_key(rkey) || far.by_lease(rkey)) << "posted under a lease that went back";
	for (int i = 0; i < wr.num_sge; ++i) {
		const ibv_sge &s = wr.sg_list[i];
		std::span<std::byte> local(in_line ? reinterpret_cast<std::byte *>(static_cast<std::uintptr_t>(s.addr))
						   : locate(s, 0, s.length, brings),
					   s.length);

		if (table) {
			EXPECT_TRUE(keys.contains(s.lkey) && !is_held(s.lkey)) << "words are the HCA's to write at any time";
			peer::read_words(*table, at, local);
			at += s.length;
			continue;
		}
		while (!local.empty()) {
			const std::size_t n = std::min<std::size_t>(local.size(), page_size - at % page_size);
			const peer::target to = far.target_of(wr, at, n);
			std::uint64_t old;

			if (!to.of)
				return;
			moved_lkey = s.lkey;
			if (atomic) {
				(void)peer::atomic(to, wr, old);
				std::ranges::copy(std::as_bytes(std::span(&old, 1)), local.begin());
			} else if (brings) {
				peer::read(to, local.first(n));
			} else {
				(void)peer::write(to, local.first(n));
			}
			local = local.subspan(n);
			at += n;
		}
	}
}

bool hca::receive(const ibv_recv_wr &wr, std::uint32_t lkey)
{
	if (receives.size() == most_receives)
		return false;
	receives.push_back({wr.wr_id, lkey});
	return true;
}

int hca::post_recv(ibv_qp *q, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	const std::lock_guard lock(mutex);

	for (; wr; wr = wr->next) {
		const std::uint32_t lkey = note(wr->sg_list, wr->num_sge, true, false);

		if (!receives_come && !receive(*wr, lkey)) {
			*bad = wr;
			return ENOMEM;
		}
		of(q).lkey = lkey;
		of(q).receives.fetch_add(1);
		if (!receives_come)
			continue;
		ibv_wc wc{};
		wc.wr_id = wr->wr_id;
		wc.qp_num = q->qp_num;
		wc.opcode = IBV_WC_RECV;
		complete(q->recv_cq, wc);
	}
	return 0;
}

int hca::post_srq_recv(ibv_srq *s, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	const std::lock_guard lock(mutex);

	for (; wr; wr = wr->next) {
		const std::uint32_t lkey = note(wr->sg_list, wr->num_sge, true, false);

		if (!receive(*wr, lkey)) {
			*bad = wr;
			return ENOMEM;
		}
		of(s).lkey = lkey;
		of(s).receives.fetch_add(1);
	}
	return 0;
}

int hca::poll(ibv_cq *c, int n, ibv_wc *wc)
{
	const std::lock_guard lock(mutex);
	std::vector<ibv_wc> &from = of(c).completions;
	const auto got = std::min<std::ptrdiff_t>(n, std::ssize(from));

	of(c).polls.fetch_add(1);
	std::copy_n(from.begin(), got, wc);
	from.erase(from.begin(), from.begin() + got);
	return static_cast<int>(got);
}

int hca::arm(ibv_cq *c, int solicited)
{
	of(c).arms.fetch_add(1);
	of(c).armed = solicited;
	return 0;
}

} // namespace npr::fake
