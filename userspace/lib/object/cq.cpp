/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "object/cq.hpp"
#include "object/errors.hpp"
#include "world/clock.hpp"
#include "world/uncancelled.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>

using namespace npr;

npr_cq::npr_cq(npr_context &c, ibv_cq *v, std::uint32_t own)
    : ctx(c), verbs(v), channel(*c.kernel), epoll(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      event(checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "eventfd")),
      timer(checked(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC), "timerfd_create")),
      mutex(c.threads), stripe(c.stripes.fetch_add(1, std::memory_order_relaxed)),
      credits(static_cast<std::uint32_t>(v->cqe) > own ? static_cast<std::uint32_t>(v->cqe) - own : 0),
      ex(*this, *v, c.threads), poll_cq_(c.provider.poll_cq), leases_(*c.kernel), handle_(v->handle)
{
	if (const int rc = channel.open())
		fail(-rc, "nprdma channel");
	for (const int f : {channel.get(), event.get(), timer.get(), v->channel ? v->channel->fd : -1}) {
		epoll_event e{};
		e.events = EPOLLIN;
		e.data.fd = f;
		if (f >= 0 && epoll_ctl(epoll.get(), EPOLL_CTL_ADD, f, &e))
			fail(errno, "epoll_ctl");
	}
	rebuild_table();
	strays_.reserve(static_cast<std::size_t>(verbs->cqe));
	if (!ctx.cqs.set(handle_, verbs, this))
		fail(ENOMEM, "table of CQs");
	ctx.users.fetch_add(1, std::memory_order_relaxed); /* as npr_srq */
}

npr_cq::~npr_cq()
{
	ctx.cqs.remove(handle_, this);
	ctx.keeper.remove(*this);
	ctx.users.fetch_sub(1, std::memory_order_relaxed); /* as npr_srq */
}

/* At most half full, so that a lookup ends. */
void npr_cq::rebuild_table()
{
	std::vector<npr_qp *> t(std::bit_ceil(2 * (qps.size() + 1)));

	for (const auto &q : qps) {
		std::size_t i = q->verbs->qp_num * 0x9e3779b1U;
		while (t[i & (t.size() - 1)])
			++i;
		t[i & (t.size() - 1)] = q.get();
	}
	table_.swap(t);
}

npr_qp *npr_cq::look_up(std::uint32_t qp_num) noexcept
{
	const std::size_t mask = table_.size() - 1;

	for (std::size_t i = qp_num * 0x9e3779b1U;; ++i) {
		npr_qp *const q = table_[i & mask];

		if (!q)
			return q;
		if (q->verbs->qp_num == qp_num) {
			last_num_ = qp_num;
			return last_ = q;
		}
	}
}

npr_qp *npr_cq::attach(ibv_qp *qp, const qp_params &params)
{
	const std::lock_guard lock(mutex);
	const auto taken = [&](std::uint16_t id) {
		return std::any_of(qps.begin(), qps.end(), [&](const auto &q) { return q->cookie == id; });
	};

	if (find(qp->qp_num))
		fail(EBUSY, "QP is attached");
	if (qps.size() >= 0xffff)
		fail(ENOSPC, "QPs of one CQ");
	while (taken(next_cookie_))
		++next_cookie_;

	/* For those that are there: what others had is used again. */
	std::size_t results = requests_of(params.budget);
	for (const auto &q : qps)
		results += requests_of(q->budget);
	{
		const std::lock_guard results_lock(results_mutex_);
		results_.reserve(results);
		taken_.reserve(results);
	}
	touched_.reserve(qps.size() + 1);
	ready_.reserve(qps.size() + 1);
	qps.push_back(std::make_unique<npr_qp>(*this, qp, params, next_cookie_++));
	try {
		rebuild_table();
	} catch (...) {
		qps.pop_back();
		throw;
	}
	return qps.back().get();
}

int npr_cq::detach(npr_qp *qp) noexcept
{
	const uncancelled here;

	{
		const std::lock_guard lock(mutex);

		if (std::none_of(qps.begin(), qps.end(), [&](const auto &q) { return q.get() == qp; }))
			return -EINVAL;
		/*
		 * What is posted must not write into buffers that the application takes
		 * back, nor into our words, and for what waits for an answer the peer may
		 * come to hold pages, which nobody would give back: end the QP.
		 */
		if (qp->engine.unfinished())
			qp->fail_qp();
		/* It asks the resolver nothing from here on, and nobody hears of it. */
		qp->engine.end();
		std::erase(ready_, qp);
		qp->listed = true;
	}
	/* Not under the lock: what the resolver does now may take it seconds. */
	ctx.resolver.cancel(*qp);

	const std::lock_guard lock(mutex);
	{
		const std::lock_guard results_lock(results_mutex_);
		std::erase_if(results_, [&](const result &r) { return r.qp == qp; });
	}
	/* A lease that is on its way to us has to go back, too. */
	const nanoseconds begun = monotonic();
	while ((qp->engine.waits_for_wire() || qp->engine.has_leases()) && monotonic() - begun < 1'000'000'000) {
		if (has_events()) {
			read_events();
			advance_touched();
		}
		if (take_raw())
			continue;
		qp->engine.step();
		settle(*qp);
		serve_line();
	}
	if (qp->engine.has_leases())
		qp->fail_qp();
	qp->abandon();
	credits.leave(*qp);
	turns_.timed -= qp->timed;
	forget_last();
	std::erase(touched_, qp);
	std::erase_if(qps, [&](const auto &q) { return q.get() == qp; });
	for (npr_qp *&slot : table_)
		slot = nullptr;
	/* no allocation: the table only gets emptier */
	for (const auto &q : qps) {
		std::size_t i = q->verbs->qp_num * 0x9e3779b1U;
		while (table_[i & (table_.size() - 1)])
			++i;
		table_[i & (table_.size() - 1)] = q.get();
	}
	serve_line();
	return 0;
}

void npr_cq::forget(std::uint32_t qp_num) noexcept
{
	const std::lock_guard lock(mutex);

	std::erase_if(strays_, [&](const ibv_wc &wc) { return wc.qp_num == qp_num; });
}

void npr_cq::touch(npr_qp &qp) noexcept
{
	if (!qp.touched) {
		qp.touched = turns_.pending = true;
		touched_.push_back(&qp);
	}
}

/* After anything happened to an engine: what does it wait for now? */
void npr_cq::settle(npr_qp &qp) noexcept
{
	const bool times = qp.engine.pauses();

	if (times != qp.timed) {
		turns_.timed += times;
		turns_.timed -= qp.timed;
		qp.timed = times;
	}
	if (qp.engine.credits_wanted() || qp.waits) [[unlikely]]
		credits.line_up(qp, qp.engine.credits_wanted(), qp.engine.credits_level());
	if (!qp.listed && qp.engine.ready()) {
		qp.listed = turns_.pending = true;
		ready_.push_back(&qp);
	}
}

/* After anything may have given back credits, or lined up for some that are there. */
void npr_cq::serve_line() noexcept
{
	if (!credits.line()) [[likely]]
		return;
	credits.serve([this](credits::waiter &w) {
		advance(static_cast<npr_qp &>(w));
	});
}

/* After settle() outside of poll(): who sleeps on the fd has to hear of a completion or a pause of @qp. */
void npr_cq::wake(const npr_qp &qp) noexcept
{
	if (!notifies())
		return;
	if (qp.timed)
		set_timer();
	if (qp.listed)
		kick();
}

/* Outside of poll(): what has become possible for @qp, and whoever sleeps is told if he was not before. */
void npr_cq::advance(npr_qp &qp) noexcept
{
	const bool listed = qp.listed;

	qp.engine.step();
	settle(qp);
	if (!listed)
		wake(qp);
}

void npr_cq::advance_touched() noexcept
{
	for (npr_qp *q : touched_) {
		q->touched = false;
		advance(*q);
	}
	touched_.clear();
}

/* Outside of poll(): one completion of the CQ's, which is told later if it is the application's. False: there is none. */
bool npr_cq::take_raw() noexcept
{
	ibv_wc wc{}; /* a provider fills in what a completion has */

	if (ctx.provider.poll_cq(verbs, 1, &wc) <= 0)
		return false;
	npr_qp *const q = find(wc.qp_num);
	if (q && q->engine.on_cqe(wc)) {
		advance(*q);
	} else if (received(wc)) {
		turns_.pending = true;
		strays_.push_back(wc);
	}
	return true;
}

void npr_cq::set_aside() noexcept
{
	/* What comes meanwhile may stay. */
	for (int left = verbs->cqe; left > 0 && strays_.size() < strays_.capacity() && take_raw(); --left)
		;
	serve_line();
}

/* The library's thread is here, and not the application. */
class npr_cq::blind_visit {
public:
	explicit blind_visit(npr_cq &cq) noexcept : cq_(cq), guard_(cq.mutex) { set(true); }
	blind_visit(const blind_visit &) = delete;
	blind_visit &operator=(const blind_visit &) = delete;
	~blind_visit() { set(false); }

private:
	void set(bool blind) noexcept
	{
		for (const auto &q : cq_.qps)
			q->engine.be_blind(blind);
	}

	npr_cq &cq_;
	const visit_guard guard_;
};

void npr_cq::tend(bool age) noexcept
{
	/* Who polls has read what there was. */
	if (!age && !leases_.has_events())
		return;
	const blind_visit visit(*this);
	const auto any = [this](auto what) { return std::any_of(qps.begin(), qps.end(), what); };

	if (has_events())
		read_events();
	if (age)
		for (const auto &q : qps) {
			if (!q->engine.has_leases())
				continue;
			q->engine.age_leases();
			touch(*q);
		}
	advance_touched();
	/* The application may poll in a minute, but the owner does not wait so long for a lease that it has recalled. */
	while (any([](const auto &q) { return q->engine.ends_leases(); }) && strays_.size() < strays_.capacity() &&
	       take_raw())
		;
	serve_line();
	if (age && !any([](const auto &q) { return q->engine.has_leases(); }))
		ctx.keeper.watch(*this, false);
}

bool npr_cq::take_turn() noexcept
{
	/* So many, one after the other: who posts again soon needs not say so. */
	static constexpr unsigned enough = 8;
	/* Completions, for the application may come meanwhile. */
	static constexpr unsigned most = 16;
	const auto waits = [this] {
		return std::any_of(qps.begin(), qps.end(), [](const auto &q) { return q->engine.waits_for_turns(); });
	};
	/* Are there to be more turns? True: nothing waits now. */
	const auto calm = [&] {
		if (waits()) {
			calm_turns_ = 0;
			return false;
		}
		if (qps.empty() || ++calm_turns_ == enough) {
			has_turns_ = false;
			ctx.keeper.attend(*this, false);
		}
		return true;
	};

	/* The application sees to it by itself. Relaxed: if it is seen late there is one turn more or less. */
	if (polled_.exchange(false, std::memory_order_relaxed)) {
		const visit_guard visit(mutex);

		(void)calm();
		return false;
	}
	const blind_visit visit(*this);

	if (has_events())
		read_events();
	if (have_results_.load(std::memory_order_relaxed))
		take_results();
	bool some = !touched_.empty();
	if (turns_.timed)
		for (const auto &q : qps)
			if (q->timed)
				touch(*q);
	advance_touched();
	/* Without queue pairs the CQ may be destroyed, and while nothing waits what it has is for the application to take. */
	for (unsigned n = 0; n < most && waits() && strays_.size() < strays_.capacity(); ++n) {
		const std::size_t strays = strays_.size();

		if (!take_raw())
			break;
		/* What is the application's comes as often as it likes, and brings nobody further. */
		some |= strays_.size() == strays;
	}
	serve_line();
	/* What is posted next, while there still are turns, waits for its first one no longer than otherwise. */
	return calm() || some;
}

void npr_cq::step_touched() noexcept
{
	for (npr_qp *q : touched_) {
		q->touched = false;
		q->engine.step();
		settle(*q);
	}
	touched_.clear();
}

void npr_cq::take_ready(ibv_wc *&to, int &room) noexcept
{
	const auto n = std::min<std::ptrdiff_t>(room, std::ssize(strays_));

	to = std::copy_n(strays_.begin(), n, to);
	strays_.erase(strays_.begin(), strays_.begin() + n);
	room -= static_cast<int>(n);
	while (room && !ready_.empty()) {
		npr_qp *q = ready_.back();
		if (q->engine.poll(*to)) {
			++to;
			--room;
			continue;
		}
		q->listed = false;
		ready_.pop_back();
	}
}

int npr_cq::lease_channel() noexcept
{
	return keeps_leases() || !ctx.keeper.open(*this, leases_) ? leases_.get() : -1;
}

void npr_cq::read_events() noexcept
{
	const auto tell = [this](const rdma_np_event &e) {
		for (auto &q : qps) {
			/* a region may be known to any QP, a fault is one QP's, and so is the lease that it brought */
			if (e.type != RDMA_NP_EVENT_REGION_GONE && q->cookie != e.cookie >> 48)
				continue;
			q->engine.on_event(e);
			touch(*q);
		}
	};

	for (event_channel *const c : {&channel, &leases_})
		if (c->has_events())
			c->read(tell);
}

/* From the resolver's thread. */
void npr_cq::resolved(npr_qp &qp, const remote_key &key, int error, const rdma_np_region_info &info) noexcept
{
	{
		const std::lock_guard lock(results_mutex_);
		results_.push_back({&qp, key, error, info});
	}
	have_results_.store(true, std::memory_order_relaxed);
	kick();
}

void npr_cq::take_results() noexcept
{
	have_results_.store(false, std::memory_order_relaxed);
	{
		const std::lock_guard lock(results_mutex_);
		taken_.swap(results_);
	}
	for (const result &r : taken_) {
		if (!r.error)
			r.qp->engine.use_words(r.qp->words.lkey());
		r.qp->engine.on_resolved(r.key, r.error, r.info);
		touch(*r.qp);
	}
	taken_.clear();
}

void npr_cq::kick() noexcept
{
	const uncancelled here;
	const std::uint64_t one = 1;

	/* EAGAIN: it is readable, which is all that is wanted */
	(void)!::write(event.get(), &one, sizeof(one));
}

/* What is hot needs no other call than the provider's, and so few registers. */
int npr_cq::post_send(npr_qp &qp, ibv_send_wr *wr, ibv_send_wr **bad) noexcept
{
	if (!wr) [[unlikely]]
		return 0;
	if (!mutex.try_lock()) [[unlikely]]
		return post_late(qp, wr, bad, false);
	if (!wr->next) [[likely]]
		if (ibv_send_wr *const hot = qp.engine.post_hot(*wr, [this] { return leases_.has_events(); })) [[likely]] {
			ibv_send_wr *refused;

			if (qp.post_hot(hot, &refused)) [[unlikely]]
				return post_refused(qp);
			mutex.unlock();
			return 0;
		}
	return post_warm(qp, wr, bad, false);
}

int npr_cq::post_late(npr_qp &qp, ibv_send_wr *wr, ibv_send_wr **bad, bool whole) noexcept
{
	mutex.lock();
	return post_warm(qp, wr, bad, whole);
}

int npr_cq::post_refused(npr_qp &qp) noexcept
{
	const std::lock_guard lock(mutex, std::adopt_lock);

	refuse(qp);
	return 0;
}

void npr_cq::refuse(npr_qp &qp) noexcept
{
	qp.engine.hot_refused();
	settle(qp);
	serve_line();
	wake(qp);
}

int npr_cq::post_warm(npr_qp &qp, ibv_send_wr *wr, ibv_send_wr **bad, bool whole) noexcept
{
	const std::lock_guard lock(mutex, std::adopt_lock);

	if (solicited_ || leases_.has_events())
		before_post();
	if (ibv_send_wr *const hot = wr->next ? nullptr : qp.engine.post_other(*wr)) {
		ibv_send_wr *refused;

		if (qp.post_hot(hot, &refused)) [[unlikely]]
			refuse(qp);
		return 0;
	}
	const bool posted = !wr->next && qp.engine.post_quick(*wr);
	/* Then it has completed nothing, and asks for nothing. */
	const int rc = posted && !qp.engine.ended() ? 0 : post_slow(qp, wr, bad, whole, posted);
	if (!has_turns_ && qp.engine.waits_for_turns())
		have_turns();
	return rc;
}

void npr_cq::have_turns() noexcept
{
	calm_turns_ = 0;
	/* What was polled before this request says nothing about it. Relaxed: as in take_turn() */
	polled_.store(false, std::memory_order_relaxed);
	has_turns_ = ctx.keeper.attend(*this, true);
}

void npr_cq::before_post() noexcept
{
	/* What is under way now needs us, whatever its peer solicits. */
	if (solicited_)
		arm(false);
	/* A process that was stopped may find that its leases have ended, with their keys (I9). */
	if (leases_.has_events()) {
		read_events();
		advance_touched();
	}
}

int npr_cq::post_slow(npr_qp &qp, ibv_send_wr *wr, ibv_send_wr **bad, bool whole, bool posted) noexcept
{
	npr_qp::prepared buffers(qp);
	ibv_send_wr *first_bad = wr, *held = nullptr;
	int rc = 0;

	for (;;) {
		qp.use(&buffers);
		rc = posted ? 0 : qp.engine.post_send(wr, &first_bad, whole);
		qp.use(nullptr);
		settle(qp);
		serve_line();
		wake(qp);
		if (rc != backend::would_block)
			break;
		if (!whole)
			wr = first_bad;
		/* What it needs was held, and is not what it needs now: somebody changes it. */
		if (std::exchange(held, wr) == wr) {
			rc = -EAGAIN;
			break;
		}
		mutex.unlock();
		rc = buffers.hold(wr, whole);
		mutex.lock();
		if (solicited_ || leases_.has_events())
			before_post();
		if (rc) {
			first_bad = wr;
			break;
		}
	}
	if (rc && bad)
		*bad = first_bad;
	return rc;
}

int npr_cq::post_recv(npr_qp &qp, ibv_recv_wr *wr, ibv_recv_wr **bad) noexcept
{
	int rc = 0;

	while (wr && !rc) {
		{
			const std::lock_guard lock(mutex);
			while (wr && wr->num_sge == 1 && !(rc = qp.post_recv_hot(*wr)))
				wr = wr->next;
		}
		if (wr && rc >= 0) {
			rc = post_recv_cold(qp, *wr);
			wr = rc ? wr : wr->next;
		}
	}
	if (rc && bad)
		*bad = wr;
	return rc;
}

int npr_cq::post_recv_cold(npr_qp &qp, const ibv_recv_wr &wr) noexcept
{
	const bool ours = qp.verbs->recv_cq == verbs || ctx.cqs.find(qp.verbs->recv_cq->handle, qp.verbs->recv_cq);

	return qp.verbs->srq || !ours ? -EINVAL : qp.post_recv(wr);
}

/* Mostly there is nothing but what the CQ has, and all of that is of what was posted as the last one was. */
int npr_cq::poll(int n, ibv_wc *wc) noexcept
{
	polled_.store(true, std::memory_order_relaxed); /* see take_turn() */
	if (!mutex.try_lock()) [[unlikely]]
		return poll_late(n, wc);
	if (n <= 0 || busy()) [[unlikely]]
		return poll_warm(n, wc, no_poll, 0, 0);
	const int count = poll_cq_(verbs, n, wc);
	ibv_wc *w = wc;
	for (int left = count; left > 0; --left, ++w)
		if (w->qp_num != last_num_ || !last_->hot_cqe(*w)) [[unlikely]]
			return poll_warm(n, wc, count, count - left, count - left);
	mutex.unlock();
	return count;
}

int npr_cq::poll_late(int n, ibv_wc *wc) noexcept
{
	mutex.lock();
	return poll_warm(n, wc, no_poll, 0, 0);
}

/* As poll_busy(), but that mostly what it finds needs no more than its end. */
int npr_cq::poll_warm(int n, ibv_wc *wc, int count, int i, int got) noexcept
{
	const std::lock_guard lock(mutex, std::adopt_lock);

	if (n > 0 && !busy()) [[likely]] {
		if (count == no_poll)
			count = ctx.provider.poll_cq(verbs, n, wc);
		for (; i < count; ++i) {
			const auto how = end_quick(wc[i]);

			if (how == engine::quick_end::no) [[unlikely]]
				break;
			if (how == engine::quick_end::silent)
				continue;
			if (got != i)
				wc[got] = wc[i];
			++got;
		}
		if (got < i) [[unlikely]]
			std::fill(wc + got, wc + i, ibv_wc{});
		if (i >= count && (count < n || got == n)) [[likely]]
			return count < 0 ? count : got;
	}
	return poll_busy(n, wc, count, i, got);
}

/* @count completions are in @wc, or none was asked for; @i of them were looked at, of which @got are the application's. */
int npr_cq::poll_busy(int n, ibv_wc *wc, int count, int i, int got) noexcept
{
	ibv_wc *raw = wc, *to = wc + got;
	int room = n - got, left = verbs->cqe;
	bool more = true;

	if (n < 0)
		return -EINVAL;
	if (count == no_poll)
		take_ready(to, room);
	while (room && more) {
		const int asked = raw == wc && count != no_poll ? n : room;

		if (count == no_poll) {
			/* Each raw completion needs room, as it may be nobody's but the application's; there it stays then. */
			raw = to;
			count = ctx.provider.poll_cq(verbs, asked, raw);
			if (count < 0)
				return to != wc ? n - room : count;
		}
		for (; i < count; ++i) {
			const auto how = end_quick(raw[i]);

			if (how == engine::quick_end::silent || (how == engine::quick_end::no && !take(raw[i])))
				continue;
			if (to != raw + i)
				*to = raw[i];
			++to;
			--room;
		}
		/* A provider fills in what a completion has. The rest is the application's, and no other completion's. */
		std::fill(to, raw + count, ibv_wc{});
		/*
		 * Who gets less than he asked for may sleep until there is an event, and what is in the CQ now
		 * causes none: so not before it is empty, for many are not the application's to see.
		 */
		left -= count;
		more = count == asked && left > 0;
		count = no_poll;
		i = 0;
		look_round(to, room);
	}
	if (left <= 0 && notifies())
		kick();
	return n - room;
}

bool npr_cq::received(ibv_wc &wc) noexcept
{
	if (!ctx.receives.is_of_ring(wc.wr_id) || (wc.status == IBV_WC_SUCCESS && !(wc.opcode & IBV_WC_RECV))) [[likely]]
		return ctx.received(wc);
	npr_qp *const q = find(wc.qp_num);
	return q && q->end_recv(wc);
}

/* @wc is none that the engine ends in short. True: it, or what it has become, is for the application. */
bool npr_cq::take(ibv_wc &wc) noexcept
{
	npr_qp *const q = find(wc.qp_num);

	if (!q || !q->engine.on_cqe(wc))
		return received(wc);
	if (!q->engine.calm() || q->listed) {
		touch(*q);
		return false;
	}
	/* one for one: what more has completed must not take the others' room */
	const bool told = q->engine.poll(wc);
	settle(*q);
	return told;
}

/* What else poll() has to look at. */
void npr_cq::look_round(ibv_wc *&to, int &room) noexcept
{
	if (has_events())
		read_events();
	if (have_results_.load(std::memory_order_relaxed))
		take_results();
	if (turns_.timed)
		for (auto &q : qps)
			if (q->timed)
				touch(*q);
	if (!touched_.empty())
		step_touched();
	serve_line();
	take_ready(to, room);
	if (notifies() && (turns_.timed || timer_at_))
		set_timer();
	turns_.pending = !touched_.empty() || !ready_.empty() || !strays_.empty();
}

void npr_cq::set_timer() noexcept
{
	nanoseconds at = 0;

	if (turns_.timed)
		for (auto &q : qps)
			if (const auto d = q->engine.deadline(); d && (!at || *d < at))
				at = *d;
	if (at == timer_at_)
		return;
	timer_at_ = at;
	turns_.timer = at;
	itimerspec t{};
	t.it_value.tv_sec = static_cast<time_t>(at / 1'000'000'000);
	t.it_value.tv_nsec = static_cast<long>(at % 1'000'000'000);
	timerfd_settime(timer.get(), TFD_TIMER_ABSTIME, &t, nullptr);
}

int npr_cq::arm(bool solicited) noexcept
{
	solicited_ = solicited;
	return verbs->channel ? -ctx.provider.req_notify_cq(verbs, solicited) : 0;
}

int npr_cq::req_notify(bool solicited) noexcept
{
	const uncancelled here;
	const std::lock_guard lock(mutex);
	std::uint64_t count;

	const bool told = ::read(event.get(), &count, sizeof(count)) > 0;
	(void)!::read(timer.get(), &count, sizeof(count));
	timer_at_ = 0;
	turns_.timer = false;
	notify_.store(true, std::memory_order_relaxed); /* see notifies() */
	set_timer();
	/*
	 * Who polls next finds what it told of. Who sleeps first has to hear it again: maybe nothing else is
	 * under way. Relaxed: the event that was read had been written after the flag.
	 */
	const auto completes = [](const npr_qp *q) { return q->engine.ready(); };
	if (told && (have_results_.load(std::memory_order_relaxed) ||
		     std::any_of(ready_.begin(), ready_.end(), completes)))
		kick();
	/* Of what a turn has put aside nobody was told. */
	if (!strays_.empty())
		kick();
	/* Our own completions are none of the peer's business: with any to come, all events count. */
	const bool idle = std::all_of(qps.begin(), qps.end(), [](const auto &q) { return q->engine.idle(); });
	/* Then what is posted next has to come by before_post(). */
	if (solicited && idle)
		for (const auto &q : qps)
			q->engine.cool();
	return arm(solicited && idle);
}

int npr_cq::wait(int timeout_ms)
{
	if (!verbs->channel)
		return -EINVAL;
	for (;;) {
		pollfd p{epoll.get(), POLLIN, 0};
		const int rc = ::poll(&p, 1, timeout_ms);
		if (rc < 0)
			return -errno;
		if (!rc)
			return 0;
		pollfd c{verbs->channel->fd, POLLIN, 0};
		if (::poll(&c, 1, 0) == 1) {
			ibv_cq *cq;
			void *context;
			if (ibv_get_cq_event(verbs->channel, &cq, &context))
				return -errno;
			ibv_ack_cq_events(cq, 1);
		}
		return 1;
	}
}

/* 0: @info says what it is, or nothing if it is no unpinned region's. */
int npr_cq::resolve_at(npr_qp &qp, const remote_key &key, rdma_np_region_info &info) noexcept
{
	const nanoseconds begun = monotonic();
	nanoseconds pause = resolve_pause;
	int rc;

	{
		const std::lock_guard lock(mutex);
		qp.engine.resolve_begins();
	}
	for (;;) {
		rc = qp.ask(key, info);
		if (!passes(rc) || too_late(qp, begun, rc))
			break;
		/* the clock decides when to ask again, not a count */
		const timespec t{0, static_cast<long>(pause)};
		nanosleep(&t, nullptr);
		pause = std::min(2 * pause, max_resolve_pause);
	}
	{
		const std::lock_guard lock(mutex);
		if (!rc)
			qp.engine.use_words(qp.words.lkey());
		rc = qp.engine.resolve_ended(key, rc, info, begun);
		qp.engine.step();
		settle(qp);
		serve_line();
		wake(qp);
	}
	if (rc)
		info = {};
	return rc == -EACCES || rc == -ENXIO || rc == -EHOSTUNREACH ? 0 : rc;
}

int npr_cq::resolve(npr_qp &qp, std::uint32_t rkey, std::uint64_t addr, std::uint64_t length,
		    npr_region_attr *attr) noexcept
{
	const uncancelled here;
	rdma_np_region_info first{}, last{};

	if (length && addr + (length - 1) < addr)
		return -EINVAL;
	if (const int rc = resolve_at(qp, {rkey, addr}, first))
		return rc;
	last = first;
	/* A part of a whole address space says nothing of the next one, where there may be another region by now. */
	while (last.part_shift && length && addr + (length - 1) - last.base >= last.length) {
		const std::uint64_t next = last.base + last.length;

		if (const int rc = resolve_at(qp, {rkey, next}, last))
			return rc;
		if (last.part_shift != first.part_shift)
			return -EAGAIN;
	}
	if (attr) {
		*attr = {};
		if (first.region_id) {
			attr->unpinned = 1;
			attr->access = first.access;
			attr->id = first.region_id;
			attr->base = first.base;
			attr->length = last.base - first.base + last.length;
		}
	}
	return 0;
}

int npr_cq::advise(npr_qp &qp, std::uint32_t rkey, std::uint64_t addr, std::uint64_t length, npr_advice advice) noexcept
{
	const std::lock_guard lock(mutex);

	/* What is recalled is not posted under any more. */
	if (leases_.has_events())
		before_post();
	const int rc = qp.engine.advise(rkey, addr, length, advice);
	qp.engine.step();
	settle(qp);
	serve_line();
	wake(qp);
	return rc;
}

std::int64_t npr_cq::prefetch(npr_qp &qp, std::uint32_t rkey, std::uint64_t addr, std::uint64_t length,
			      bool write) noexcept
{
	const std::lock_guard lock(mutex);
	const std::int64_t n = qp.engine.prefetch(rkey, addr, length, write);

	settle(qp);
	return n;
}
