/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "object/qp.hpp"
#include "object/cq.hpp"
#include "world/uncancelled.hpp"

#include <algorithm>
#include <cerrno>
#include <random>

using namespace npr;

namespace {

/* So that a wr_id of the application's receives is not taken for ours after an error. */
std::uint32_t random_tag()
{
	return std::random_device{}();
}

engine_config make_config(npr_cq &cq, const ibv_qp *qp, const qp_params &params, std::uint16_t cookie,
			  std::span<std::uint64_t> words)
{
	engine_config c;

	c.depth = params.depth;
	/* None if there is no send queue, but then it accepts nothing either. */
	c.sq_budget = std::max(params.budget, 2U);
	c.pool = &cq.credits;
	c.max_sge = params.max_sge;
	c.max_inline = params.max_inline;
	c.max_faults = cq.ctx.caps.max_outstanding;
	c.cache_slots = params.cache_slots;
	c.read_words_min = params.read_words_min;
	c.qp_num = qp->qp_num;
	c.tag = random_tag();
	c.cookie = cookie;
	c.sq_sig_all = params.sq_sig_all;
	c.relaxed = params.relaxed;
	c.ordered_writes = params.ordered_writes;
	c.local = true;
	c.local_keys = &cq.ctx.regions.changes();
	c.leases = cq.ctx.leased;
	c.local_only = params.local_only;
	c.opaque_sinks = params.opaque_sinks;
	c.words = words;
	return c;
}

/* None for a queue whose completions are not polled under the lock under which it is posted to. */
std::uint32_t ring_size(const npr_cq &cq, const ibv_qp &qp, const qp_params &params)
{
	return qp.srq || qp.recv_cq != cq.verbs || params.receives > receive_ring::indices ? 0 : params.receives;
}

} // namespace

npr_qp::npr_qp(npr_cq &c, ibv_qp *q, const qp_params &params, std::uint16_t id)
    : cq(c), verbs(q), words(c.ctx.provider, q->pd), budget(params.budget), cookie(id), post_send_(c.ctx.provider.post_send),
      requests_(c.ctx.resolver, requests_of(params.budget)),
      max_sge_(std::max(params.max_sge, 1U)), receive_max_sge_(params.receive_sge),
      post_recv_(c.ctx.provider.post_recv), leases_(c.ctx.leases), local_keys_(c.ctx.regions.changes()),
      stripe_(c.stripe % local_leases::stripes), ring_(ring_size(c, *q, params), c.ctx.receives.ring_id()),
      engine(make_config(c, q, params, id, words.words()), *this),
      ex(std::make_unique<qp_ex>(*this, *q, params.depth, params.max_sge, params.max_inline, c.ctx.threads))
{
	c.ctx.receives.reserve(params.receives, params.receive_sge);
}

int npr_qp::post(ibv_send_wr *chain, ibv_send_wr **bad) noexcept
{
	return post_send_(verbs, chain, bad);
}

int npr_qp::fault(const rdma_np_fault_req &req, std::span<const rdma_np_range> ranges) noexcept
{
	const bool lease = req.flags & RDMA_NP_FAULT_LEASE;
	const int channel = lease ? cq.lease_channel() : cq.channel.get();
	const int rc = channel < 0 ? -EMFILE : cq.ctx.kernel->fault(*verbs, channel, req, ranges);

	/* It may be recalled from here on, whoever polls. */
	if (!rc && lease)
		cq.ctx.keeper.watch(cq, true);
	return rc;
}

void npr_qp::release(std::uint64_t hold) noexcept
{
	cq.ctx.kernel->release(*verbs, hold);
}

void npr_qp::forget(std::uint64_t region) noexcept
{
	cq.ctx.kernel->forget(*verbs, region);
}

void npr_qp::resolve(const remote_key &key) noexcept
{
	cq.ctx.resolver.submit(*this, key);
}

int npr_qp::ask(const remote_key &key, rdma_np_region_info &info) noexcept
{
	const int rc = cq.ctx.kernel->resolve(*verbs, cq.channel.get(), key.rkey, key.addr, info);

	if (rc)
		return rc;
	/* None of it is to be taken for the peer's answer, or for its silence. */
	switch (const int error = words.make()) {
	case 0:
	case -EPERM:
	case -ENOMEM:
		return error;
	case -EAGAIN:
	case -EBUSY:
	case -EINTR:
		return -ENOMEM;
	default:
		return -EIO;
	}
}

nanoseconds npr_qp::tries_for() noexcept
{
	return cq.ctx.kernel->tries_for(*verbs);
}

void npr_qp::answered(const remote_key &key, int error, const rdma_np_region_info &info) noexcept
{
	cq.resolved(*this, key, error, info);
}

bool npr_qp::is_local(std::uint32_t lkey) noexcept
{
	return cq.ctx.is_local(lkey);
}

bool npr_qp::is_plain(std::uint32_t lkey) noexcept
{
	return cq.ctx.is_plain(lkey);
}

int npr_qp::hold_local(ibv_sge &sge, bool write, std::uint32_t &hold, cpu_view &view, local_ticket &ticket) noexcept
{
	const local_key key = cq.ctx.regions.find(sge.lkey);

	view = {key.offset, key.opaque};
	if (!key.handle)
		return no_hold;
	if (int rc; prepared_ && prepared_->take(sge, write, hold, rc))
		return rc;
	const auto lease = cq.ctx.leases.find(*key.handle, sge.addr, sge.length, write, local_leases::term::brief, cq.stripe,
					      &ticket);
	if (!lease)
		return would_block;
	ticket.name(sge.lkey);
	hold = lease->token;
	sge.addr = lease->addr;
	sge.lkey = lease->lkey;
	return 0;
}

void npr_qp::prepared::give_back() noexcept
{
	for (; next_ < buffers_.size(); ++next_)
		if (!buffers_[next_].rc)
			qp_.free_local(buffers_[next_].hold);
	buffers_.clear();
	next_ = 0;
}

int npr_qp::prepared::hold(const ibv_send_wr *wr, bool all) noexcept
{
	const uncancelled here;

	/* Those before them found a lease after all. */
	give_back();
	for (; wr; wr = all ? wr->next : nullptr) {
		const bool write = brings(wr->opcode);

		/* What is wrong with it the engine says. */
		if (wr->num_sge < 0 || static_cast<std::uint32_t>(wr->num_sge) > qp_.max_sge_ ||
		    wr->send_flags & IBV_SEND_INLINE)
			continue;
		for (int k = 0; k < wr->num_sge; ++k) {
			const ibv_sge &s = wr->sg_list[k];
			buffer b{s, s, 0, 0, write};

			if (!s.length || !qp_.is_local(s.lkey))
				continue;
			b.rc = qp_.cq.ctx.hold_local(b.wire, write, b.hold, local_leases::term::brief, qp_.cq.stripe);
			if (b.rc < 0)
				return b.rc;
			try {
				buffers_.push_back(b);
			} catch (const std::bad_alloc &) {
				if (!b.rc)
					qp_.free_local(b.hold);
				return -ENOMEM;
			}
		}
	}
	return 0;
}

bool npr_qp::prepared::take(ibv_sge &sge, bool write, std::uint32_t &hold, int &rc) noexcept
{
	if (next_ == buffers_.size())
		return false;
	const buffer &b = buffers_[next_];

	if (b.sge.addr != sge.addr || b.sge.length != sge.length || b.sge.lkey != sge.lkey || b.write != write)
		return false;
	++next_;
	sge = b.wire;
	hold = b.hold;
	rc = b.rc;
	return true;
}

void npr_qp::free_local(std::uint32_t hold) noexcept
{
	cq.ctx.free_local(hold);
}

bool npr_qp::local_wanted() noexcept
{
	return cq.ctx.leases.any_wanted();
}

/*
 * Under the CQ's lock. The hold is taken while the lease is there, so its pages are in memory, and nothing is waited for.
 * But if the program has put other memory in the place of the buffer itself, the kernel waits for the lease, and says
 * after a second that this was in vain.
 */
int npr_qp::narrow_local(const ibv_sge &sge, bool write, std::uint32_t &hold, ibv_sge &wire) noexcept
{
	const local_key key = cq.ctx.regions.find(sge.lkey);

	if (!key.handle || !(hold & local_leases::is_lease) || !cq.ctx.leases.is_wanted(hold))
		return no_hold;
	ibv_sge alone = sge;
	std::uint32_t own;
	alone.addr -= key.offset;
	int rc = cq.ctx.hold_alone(*key.handle, alone, write, own);
	/* If others keep it, its room does not come back with our share: each of them gives up his, and then the last one can. */
	if (rc && (rc != -ENOBUFS || !cq.ctx.leases.is_alone(hold)))
		return no_hold;
	cq.ctx.free_local(hold);
	/* RLIMIT_MEMLOCK was reached, where what the lease had counted, too. */
	if (rc && (rc = cq.ctx.hold_alone(*key.handle, alone, write, own)))
		return rc < 0 ? rc : -EFAULT;
	hold = own;
	wire = alone;
	return 0;
}

int npr_qp::post_recv(const ibv_recv_wr &wr) noexcept
{
	return cq.ctx.post_recv(this, wr, receive_max_sge_, cq.stripe, [&](ibv_recv_wr &w) {
		ibv_recv_wr *bad;
		/* The provider may have no locks, for an application that comes with one thread. */
		const std::lock_guard lock(cq.mutex);
		const int error = cq.ctx.provider.post_recv(verbs, &w, &bad);
		/* If they complete on another CQ, whose lock is not held, the region may be gone by now. */
		if (!error && wr.num_sge == 1 && ring_.size())
			look_at(wr.sg_list->lkey);
		return error;
	});
}

/* The next receives may be in the region of this key. */
void npr_qp::look_at(std::uint32_t lkey) noexcept
{
	/* acquire: as local_regions::find() */
	const std::uint64_t keys = local_keys_.load(std::memory_order_acquire);

	/* What has no leases yet may have some by now. */
	if (lkey == lasting_lkey_ && keys == lasting_keys_ && (lasting_.length || lasting_plain_))
		return;
	const auto handle = cq.ctx.regions.find(lkey).handle;
	lasting_ = handle && cq.ctx.leased ? leases_.look_at(*handle) : local_leases::lasting{};
	lasting_plain_ = !handle;
	lasting_lkey_ = lkey;
	lasting_keys_ = keys;
}

bool npr_qp::end_recv(ibv_wc &wc) noexcept
{
	local_lease *const lease = ring_.end(wc.wr_id);

	if (lease)
		leases_.give(*lease, stripe_);
	return lease;
}

void npr_qp::abandon() noexcept
{
	if (cq.ctx.receives.any(this) || !ring_.empty())
		fail_qp();
	cq.ctx.abandon(this);
	ring_.drain([this](local_lease &l) { leases_.give(l, stripe_); });
	engine.abandon();
}

void npr_qp::fail_qp() noexcept
{
	/* Nothing else can be done if this fails: the QP is dead already then. */
	(void)cq.ctx.kernel->set_error(*verbs);
}

bool npr_qp::connected() noexcept
{
	return cq.ctx.kernel->connected(*verbs);
}
