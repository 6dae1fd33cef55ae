/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef NPR_CQ_HPP
#define NPR_CQ_HPP

#include "object/context.hpp"
#include "object/extended.hpp"
#include "object/qp.hpp"
#include "protocol/credits.hpp"
#include "visited_mutex.hpp"
#include "world/event_channel.hpp"
#include "world/lease_keeper.hpp"
#include "world/unique_fd.hpp"

#include <array>
#include <atomic>
#include <bit>
#include <memory>
#include <mutex>
#include <vector>

struct npr_cq final : npr::lease_keeper::client {
	/* @own: entries that are not for what the library posts. Throws std::system_error. */
	npr_cq(npr_context &c, ibv_cq *v, std::uint32_t own);
	~npr_cq();

	/* By @resize(entries), 0 or an errno: for @own completions of the application, @limit at most. */
	template <class F>
	int resize(std::uint32_t own, std::uint32_t limit, F &&resize);
	/* Throws. */
	npr_qp *attach(ibv_qp *qp, const npr::qp_params &params);
	int detach(npr_qp *qp) noexcept;
	/* The QP is destroyed or RESET: what a detach has polled of it is not told any more. */
	void forget(std::uint32_t qp_num) noexcept;

	int post_send(npr_qp &qp, ibv_send_wr *wr, ibv_send_wr **bad) noexcept;
	/* The same of all of the list or nothing. */
	int post_whole(npr_qp &qp, ibv_send_wr *wr, ibv_send_wr **bad) noexcept { return post_late(qp, wr, bad, true); }
	int post_recv(npr_qp &qp, ibv_recv_wr *wr, ibv_recv_wr **bad) noexcept;
	int poll(int n, ibv_wc *wc) noexcept;
	int req_notify(bool solicited) noexcept;
	/* The thread may be cancelled there. */
	int wait(int timeout_ms);
	int resolve(npr_qp &qp, std::uint32_t rkey, std::uint64_t addr, std::uint64_t length, npr_region_attr *attr) noexcept;
	int advise(npr_qp &qp, std::uint32_t rkey, std::uint64_t addr, std::uint64_t length, npr_advice advice) noexcept;
	std::int64_t prefetch(npr_qp &qp, std::uint32_t rkey, std::uint64_t addr, std::uint64_t length,
			      bool write) noexcept;
	void resolved(npr_qp &qp, const npr::remote_key &key, int error, const rdma_np_region_info &info) noexcept;
	void kick() noexcept;
	/*
	 * What leases need though nobody polls: recalls are read, what was not used goes back (@age), and
	 * completions that one of them waits for are taken from the CQ.
	 */
	void tend(bool age) noexcept override;
	/* What is under way goes on though nobody polls: what it ends with is told when somebody does. */
	bool take_turn() noexcept override;
	/*
	 * Under the lock, for who asks for a lease: where what is heard of leases comes. It is a channel of their
	 * own, for that is nothing that an application should wake for. -1: there is none.
	 */
	[[nodiscard]] int lease_channel() noexcept;
	[[nodiscard]] bool keeps_leases() const noexcept { return leases_.is_open(); }
	/* Has anybody asked for events? Relaxed: the lock orders what those who poll see. */
	[[nodiscard]] bool notifies() const noexcept { return notify_.load(std::memory_order_relaxed); }

	npr_context &ctx;
	ibv_cq *verbs;
	npr::event_channel channel;
	npr::unique_fd epoll, event, timer;
	npr::visited_mutex mutex;
	const unsigned stripe; /* for local_leases */
	npr::credits credits;
	std::vector<std::unique_ptr<npr_qp>> qps;
	npr::cq_ex ex;

private:
	class blind_visit;
	struct result {
		npr_qp *qp;
		npr::remote_key key;
		int error;
		rdma_np_region_info info;
	};
	[[nodiscard]] int resolve_at(npr_qp &qp, const npr::remote_key &key, rdma_np_region_info &info) noexcept;
	[[nodiscard]] npr_qp *find(std::uint32_t qp_num) noexcept
	{
		return qp_num == last_num_ ? last_ : look_up(qp_num);
	}
	[[nodiscard, gnu::noinline]] npr_qp *look_up(std::uint32_t qp_num) noexcept;
	void forget_last() noexcept { last_num_ = no_qp; }
	void rebuild_table();
	void touch(npr_qp &qp) noexcept;
	void step_touched() noexcept;
	[[gnu::noinline]] void settle(npr_qp &qp) noexcept;
	void wake(const npr_qp &qp) noexcept;
	void advance(npr_qp &qp) noexcept;
	[[gnu::noinline]] void advance_touched() noexcept;
	bool take_raw() noexcept;
	/* All that has completed until now leaves the CQ, and is told later. */
	void set_aside() noexcept;
	/* Is there anything for poll() but what the CQ has? */
	[[nodiscard]] bool busy() const noexcept
	{
		/* relaxed: see have_results_ */
		return has_events() || have_results_.load(std::memory_order_relaxed) || turns_.any() || credits.line();
	}
	static constexpr int no_poll = -1'000'000;
	/* They have the lock, and give it back. */
	[[nodiscard, gnu::noinline]] int poll_warm(int n, ibv_wc *wc, int count, int i, int got) noexcept;
	[[gnu::noinline]] int post_warm(npr_qp &qp, ibv_send_wr *wr, ibv_send_wr **bad, bool whole) noexcept;
	[[gnu::noinline]] int post_refused(npr_qp &qp) noexcept;
	/* What was to be posted hot the provider has not taken. */
	void refuse(npr_qp &qp) noexcept;
	[[nodiscard, gnu::noinline]] int post_recv_cold(npr_qp &qp, const ibv_recv_wr &wr) noexcept;
	/* The lock is to be waited for. */
	[[nodiscard, gnu::noinline]] int poll_late(int n, ibv_wc *wc) noexcept;
	[[gnu::noinline]] int post_late(npr_qp &qp, ibv_send_wr *wr, ibv_send_wr **bad, bool whole) noexcept;
	[[nodiscard, gnu::noinline]] int poll_busy(int n, ibv_wc *wc, int count, int i, int got) noexcept;
	[[gnu::noinline]] void before_post() noexcept;
	/* The lease_keeper takes turns from now on. */
	[[gnu::noinline, gnu::cold]] void have_turns() noexcept;
	[[gnu::noinline]] int post_slow(npr_qp &qp, ibv_send_wr *wr, ibv_send_wr **bad, bool whole, bool posted) noexcept;
	[[nodiscard]] npr::engine::quick_end end_quick(ibv_wc &wc) noexcept
	{
		using end = npr::engine::quick_end;

		/* What has failed does not say what it was. */
		if (wc.opcode & IBV_WC_RECV && wc.status == IBV_WC_SUCCESS)
			return received(wc) ? end::told : end::silent;
		npr_qp *const q = find(wc.qp_num);
		return q ? q->engine.quick_cqe(wc) : end::no;
	}
	/* As npr_context::received(), of receives in rings, too. */
	[[nodiscard]] bool received(ibv_wc &wc) noexcept;
	[[nodiscard, gnu::noinline]] bool take(ibv_wc &wc) noexcept;
	[[gnu::noinline]] void look_round(ibv_wc *&to, int &room) noexcept;
	void serve_line() noexcept;
	/* What there is for the application, to @to, where there is @room. */
	[[gnu::noinline]] void take_ready(ibv_wc *&to, int &room) noexcept;
	[[nodiscard]] bool has_events() const noexcept { return channel.has_events() || leases_.has_events(); }
	[[gnu::noinline]] void read_events() noexcept;
	void take_results() noexcept;
	void set_timer() noexcept;
	[[gnu::noinline]] int arm(bool solicited) noexcept;

	const decltype(npr::provider::poll_cq) poll_cq_;
	npr::event_channel leases_; /* open: the lease_keeper has it */
	std::uint32_t handle_;   /* of @verbs, which may be destroyed before this is */
	static constexpr std::uint32_t no_qp = ~0U;
	std::uint32_t last_num_ = no_qp; /* found last: */
	npr_qp *last_ = nullptr;
	std::vector<npr_qp *> table_; /* by QP number; a power of two */
	std::vector<npr_qp *> touched_, ready_;
	std::vector<ibv_wc> strays_; /* polled for others, by a detach or tend() */
	/* Looked at all at once. */
	struct {
		std::uint32_t timed = 0;
		bool pending = false; /* set before there is something in touched_, ready_ or strays_ */
		bool timer = false;   /* timer_at_ is not 0 */
		std::array<bool, 2> unused{};

		[[nodiscard]] std::uint64_t any() const noexcept { return std::bit_cast<std::uint64_t>(*this); }
	} turns_;
	std::atomic<bool> notify_{false}; /* somebody may sleep on the fd */
	bool has_turns_ = false;  /* the lease_keeper takes turns */
	std::atomic<bool> polled_{false}; /* since the last turn, or since there have been turns */
	unsigned calm_turns_ = 0; /* in a row */
	bool solicited_ = false; /* until something is solicited, as nothing of ours was under way */
	npr::nanoseconds timer_at_ = 0;
	std::uint16_t next_cookie_ = 0;

	std::mutex results_mutex_;
	std::vector<result> results_;
	std::vector<result> taken_;
	/* Results to take; relaxed, because the mutex orders the results themselves. */
	std::atomic<bool> have_results_{false};
};

inline int npr_qp::post_recv_hot(const ibv_recv_wr &wr) noexcept
{
	ibv_sge s = *wr.sg_list;
	ibv_recv_wr *bad;

	/* acquire: as local_regions::find() */
	if (s.lkey != lasting_lkey_ || !s.length || ring_.full() ||
	    local_keys_.load(std::memory_order_acquire) != lasting_keys_) [[unlikely]]
		return not_hot;
	npr::local_lease *const lease = leases_.take(lasting_, s, stripe_);
	if (!lease) [[unlikely]] {
		if (!lasting_plain_)
			return not_hot;
		ibv_recv_wr plain{wr.wr_id, nullptr, &s, 1};
		return -post_recv_(verbs, &plain, &bad);
	}
	ibv_recv_wr w{ring_.put(wr.wr_id, *lease), nullptr, &s, 1};
	const int error = post_recv_(verbs, &w, &bad);
	if (error) [[unlikely]] {
		ring_.take_back();
		leases_.give(*lease, stripe_);
	}
	return -error;
}

template <class F>
int npr_cq::resize(std::uint32_t own, std::uint32_t limit, F &&resize)
{
	const std::lock_guard lock(mutex);
	/*
	 * What is posted has its entries still, and what comes next finds some. What the application has not polled
	 * may be more than it wants entries for: left in the CQ it would have those of what is posted.
	 */
	set_aside();
	const std::uint32_t least = credits.used() + credits.largest();
	int error = 0;

	if (!npr::with_credits(own, least, limit, [&](std::uint32_t n) { return !(error = resize(n)); }))
		return error;
	strays_.reserve(static_cast<std::size_t>(verbs->cqe));
	credits.resize(static_cast<std::uint32_t>(verbs->cqe) - own);
	serve_line();
	return 0;
}

#endif
