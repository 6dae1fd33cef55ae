/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What is behind the opaque handles: engines put on verbs.
 *
 * npr_context  one device: the kernel's methods and the threads that resolve keys
 * npr_cq       one CQ and the send queues that complete there; owns the lock
 * npr_qp       one engine and its world
 * npr_srq      one shared receive queue
 *
 * Lock order: qp_ex::mutex or cq_ex::mutex, npr_cq::mutex, then leaves:
 * those of the resolver, of receives, of tables, npr_cq::results_mutex.
 * A thread of the resolver holds no lock during its ioctl, and never npr_cq::mutex. That of the
 * lease_keeper takes npr_cq::mutex, and holds no other lock then.
 */
#ifndef NPR_OBJECTS_HPP
#define NPR_OBJECTS_HPP

#include "credits.hpp"
#include "engine.hpp"
#include "event_channel.hpp"
#include "extended.hpp"
#include "handle_table.hpp"
#include "kernel.hpp"
#include "lease_keeper.hpp"
#include "local_leases.hpp"
#include "local_regions.hpp"
#include "optional_mutex.hpp"
#include "provider.hpp"
#include "receives.hpp"
#include "uncancelled.hpp"
#include "unique_fd.hpp"
#include "visited_mutex.hpp"

#include <array>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace npr {

[[nodiscard]] nanoseconds monotonic() noexcept;
[[nodiscard]] nanoseconds monotonic_coarse() noexcept;

/*
 * RESOLVE blocks, so threads do it: a key that is new on one QP does not delay
 * another, and npr_post_send() and npr_poll_cq() never block.
 *
 * A peer that says nothing costs a thread seconds. So no QP has more than one
 * thread, there is one to spare as long as there are fewer than max_threads, and
 * QPs that were slow last time wait for the others and never have all threads.
 */
class resolver {
public:
	static constexpr std::size_t max_threads = 32;
	static constexpr std::size_t max_slow = max_threads / 2; /* threads for QPs that were slow */
	/* More than one message was lost, or the peer takes its time. */
	static constexpr nanoseconds slow_answer = 200'000'000;

	explicit resolver(kernel &k) noexcept : kernel_(k) {}
	~resolver();

	/* Makes room for the requests of one more QP; starts the first thread. Throws. */
	void reserve(std::size_t requests);
	/* That QP has none any more: the next one may have its room. */
	void unreserve(std::size_t requests) noexcept;
	void submit(npr_qp &qp, std::uint32_t rkey) noexcept;
	/* No request of @qp is waiting or running when this returns. */
	void cancel(const npr_qp &qp) noexcept;

private:
	struct job {
		npr_qp *qp;
		std::uint32_t rkey;
		nanoseconds due, pause;
		nanoseconds begun; /* asked first; 0: not yet */
	};

	void run(std::size_t self) noexcept;
	void start_spare(std::unique_lock<std::mutex> &lock) noexcept;
	[[nodiscard]] std::vector<job>::iterator pick(nanoseconds now) noexcept;
	[[nodiscard]] bool running(const npr_qp &qp) const noexcept;

	kernel &kernel_;
	std::mutex mutex_;
	std::condition_variable wake_, idle_;
	std::vector<job> jobs_;
	std::size_t reserved_ = 0;
	std::size_t started_ = 0; /* threads */
	std::size_t spare_ = 0;   /* of these not in the kernel, or about to begin */
	std::size_t slow_ = 0;    /* of these at work for QPs that were slow */
	bool stop_ = false;
	std::array<const npr_qp *, max_threads> running_{}; /* by thread */
	std::array<std::thread, max_threads> threads_;
};

/* Repeat while the peer is over a bound or there is no memory; -ETIMEDOUT or -ENOMEM after this. */
inline constexpr nanoseconds resolve_patience = 10'000'000'000;
inline constexpr nanoseconds resolve_pause = 100'000;
inline constexpr nanoseconds max_resolve_pause = 20'000'000;

/*
 * Memory that residency words are read into. It is registered, and so pinned, when there is a region whose words can be
 * read, and not before: a queue pair whose peer has none needs none.
 */
class word_ring {
public:
	/* Throws std::bad_alloc. */
	word_ring(const provider &p, ibv_pd *pd);
	word_ring(const word_ring &) = delete;
	word_ring &operator=(const word_ring &) = delete;

	[[nodiscard]] std::span<std::uint64_t> words() noexcept { return words_; }
	/* Any thread, without a lock, for it may wait for memory: 0 or a negative errno. */
	[[nodiscard]] int make() noexcept;
	/* After make(). */
	[[nodiscard]] std::uint32_t lkey() const noexcept { return mr_->lkey; }

private:
	const decltype(provider::reg_mr) reg_mr_;
	ibv_pd *const pd_;
	std::mutex mutex_;
	untouched_vector<std::uint64_t> words_;
	std::unique_ptr<ibv_mr, int (*)(ibv_mr *)> mr_;
};

struct qp_params {
	std::uint32_t depth, budget, max_sge, max_inline, cache_slots, read_words_min;
	std::uint32_t receives = 0, receive_sge = 0; /* what the receive queue takes; 0: an SRQ */
	bool sq_sig_all, relaxed;
	bool local_only = false;
	bool opaque_sinks = false;
	bool ordered_writes = false;
};

} // namespace npr

struct npr_context {
	npr_context(ibv_context *v, std::unique_ptr<npr::kernel> k, unsigned int flags, const npr::provider &p);
	~npr_context();

	ibv_context *verbs;
	const npr::provider provider;
	std::unique_ptr<npr::kernel> kernel;
	bool threads;
	rdma_np_query caps{};
	npr::resolver resolver;
	npr::receives receives;
	npr::local_regions &regions;
	npr::lease_keeper keeper;
	npr::local_leases leases;
	std::atomic<unsigned> stripes{0}; /* given to CQs */
	std::atomic<unsigned> users{0}; /* npr_cq and npr_srq */
	npr::handle_table<ibv_cq, npr_cq> cqs; /* those that this library polls */

	/*
	 * A local buffer becomes held, under a lease if it can; see local_leases. It may be paged in for that, so no lock is
	 * held here. 0, backend::no_hold or a negative errno.
	 */
	[[nodiscard]] int hold_local(ibv_sge &sge, bool write, std::uint32_t &hold, npr::local_leases::term term,
				     unsigned stripe) noexcept;
	void free_local(std::uint32_t hold) noexcept;
	[[nodiscard]] bool is_local(std::uint32_t lkey) const noexcept;
	[[nodiscard]] bool is_plain(std::uint32_t lkey) const noexcept;
	/*
	 * One receive of @queue, posted by @post(wr), which says 0 or an errno. 0 or a negative errno.
	 */
	template <class F>
	[[nodiscard]] int post_recv(const void *queue, const ibv_recv_wr &wr, std::uint32_t max_sge, unsigned stripe,
				    F &&post) noexcept;
	/*
	 * If this is the completion of a receive that holds something, it holds nothing any more.
	 * False: of one that was abandoned, and nothing to tell.
	 */
	[[nodiscard, gnu::noinline]] bool received(ibv_wc &wc) noexcept;
	void give_back(std::uint64_t receive) noexcept;
	/* Of what @queue has not completed nobody will hear. */
	void abandon(const void *queue) noexcept;
};

struct npr_qp final : npr::backend, npr::credits::waiter {
	/* Throws std::bad_alloc. */
	npr_qp(npr_cq &c, ibv_qp *q, const npr::qp_params &params, std::uint16_t cookie);
	~npr_qp() override = default;

	int post(ibv_send_wr *chain, ibv_send_wr **bad) noexcept override;
	int fault(const rdma_np_fault_req &req, std::span<const rdma_np_range> ranges) noexcept override;
	void release(std::uint64_t hold) noexcept override;
	void forget(std::uint64_t region) noexcept override;
	void resolve(std::uint32_t rkey) noexcept override;
	[[nodiscard]] bool is_local(std::uint32_t lkey) noexcept override;
	[[nodiscard]] bool is_plain(std::uint32_t lkey) noexcept override;
	[[nodiscard]] int hold_local(ibv_sge &sge, bool write, std::uint32_t &hold, npr::cpu_view &view,
				     npr::local_ticket &ticket) noexcept override;
	void free_local(std::uint32_t hold) noexcept override;
	void fail_qp() noexcept override;
	[[nodiscard]] bool connected() noexcept override;
	npr::nanoseconds now() noexcept override { return npr::monotonic(); }
	npr::nanoseconds recently() noexcept override { return npr::monotonic_coarse(); }

	/* One receive: 0 or a negative errno. */
	[[nodiscard]] int post_recv(const ibv_recv_wr &wr) noexcept;
	class prepared;
	/* Before the QP is detached: what is posted must not use what is held. */
	void abandon() noexcept;

	npr_cq &cq;
	ibv_qp *verbs;
	npr::word_ring words;
	std::uint32_t budget;
	std::uint16_t cookie;
	bool touched = false; /* on cq.touched */
	bool listed = false;  /* on cq.ready */
	bool timed = false;   /* counted in cq.timed */
	bool slow = false;    /* its peer was, when last asked for a key; the resolver's */

	/*
	 * Local buffers that are held before the CQ's lock is taken, and that the engine takes under it: holding them
	 * may wait for memory, and with the lock all threads that use the CQ would. What is not taken goes back.
	 */
	class prepared {
	public:
		explicit prepared(npr_qp &qp) noexcept : qp_(qp) {}
		prepared(const prepared &) = delete;
		prepared &operator=(const prepared &) = delete;
		~prepared() { give_back(); }

		/* Those of @wr, or of @all of its list: 0 or a negative errno. */
		[[nodiscard]] int hold(const ibv_send_wr *wr, bool all) noexcept;
		/* As backend::hold_local(), which says @rc, of one that is here. False: it is not. */
		[[nodiscard]] bool take(ibv_sge &sge, bool write, std::uint32_t &hold, int &rc) noexcept;

	private:
		struct buffer {
			ibv_sge sge, wire;
			std::uint32_t hold;
			int rc; /* 0, or backend::no_hold */
			bool write;
		};
		void give_back() noexcept;

		npr_qp &qp_;
		std::vector<buffer> buffers_;
		std::size_t next_ = 0; /* to be taken */
	};
	void use(prepared *p) noexcept { prepared_ = p; }
	/* What the engine says is to be posted: see engine::post_hot(). */
	[[nodiscard]] int post_hot(ibv_send_wr *wr, ibv_send_wr **bad) const noexcept { return post_send_(verbs, wr, bad); }

private:
	/* Room for what it asks the resolver, as long as it lives. */
	class requests {
	public:
		requests(npr::resolver &r, std::size_t n) : resolver_(r), n_(n) { resolver_.reserve(n_); }
		requests(const requests &) = delete;
		requests &operator=(const requests &) = delete;
		~requests() { resolver_.unreserve(n_); }

	private:
		npr::resolver &resolver_;
		std::size_t n_;
	};
	const decltype(npr::provider::post_send) post_send_;
	requests requests_;
	const std::uint32_t max_sge_, receive_max_sge_;
	prepared *prepared_ = nullptr; /* of the caller of post_send(), under the CQ's lock */

public:
	npr::engine engine;
	/* Apart, because the preload library's applications have it longer than this object. */
	std::unique_ptr<npr::qp_ex> ex;
};

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

	/* @whole: all of the list or nothing. */
	int post_send(npr_qp &qp, ibv_send_wr *wr, ibv_send_wr **bad, bool whole = false) noexcept;
	int post_recv(npr_qp &qp, ibv_recv_wr *wr, ibv_recv_wr **bad) noexcept;
	int poll(int n, ibv_wc *wc) noexcept;
	int req_notify(bool solicited) noexcept;
	/* The thread may be cancelled there. */
	int wait(int timeout_ms);
	int resolve(npr_qp &qp, std::uint32_t rkey, npr_region_attr *attr) noexcept;
	int advise(npr_qp &qp, std::uint32_t rkey, std::uint64_t addr, std::uint64_t length, npr_advice advice) noexcept;
	std::int64_t prefetch(npr_qp &qp, std::uint32_t rkey, std::uint64_t addr, std::uint64_t length,
			      bool write) noexcept;
	void resolved(npr_qp &qp, std::uint32_t rkey, int error, const rdma_np_region_info &info) noexcept;
	void kick() noexcept;
	/*
	 * What leases need though nobody polls: recalls are read, what was not used goes back (@age), and
	 * completions that one of them waits for are taken from the CQ.
	 */
	void tend(bool age) noexcept override;
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
	struct result {
		npr_qp *qp;
		std::uint32_t rkey;
		int error;
		rdma_np_region_info info;
	};
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
	/* The lock is to be waited for. */
	[[nodiscard, gnu::noinline]] int poll_late(int n, ibv_wc *wc) noexcept;
	[[gnu::noinline]] int post_late(npr_qp &qp, ibv_send_wr *wr, ibv_send_wr **bad, bool whole) noexcept;
	[[nodiscard, gnu::noinline]] int poll_busy(int n, ibv_wc *wc, int count, int i, int got) noexcept;
	[[gnu::noinline]] void before_post() noexcept;
	[[gnu::noinline]] int post_slow(npr_qp &qp, ibv_send_wr *wr, ibv_send_wr **bad, bool whole, bool posted) noexcept;
	[[nodiscard]] npr::engine::quick_end end_quick(ibv_wc &wc) noexcept
	{
		using end = npr::engine::quick_end;

		/* What has failed does not say what it was. */
		if (wc.opcode & IBV_WC_RECV && wc.status == IBV_WC_SUCCESS)
			return ctx.received(wc) ? end::told : end::silent;
		npr_qp *const q = find(wc.qp_num);
		return q ? q->engine.quick_cqe(wc) : end::no;
	}
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
	bool solicited_ = false; /* until something is solicited, as nothing of ours was under way */
	npr::nanoseconds timer_at_ = 0;
	std::uint16_t next_cookie_ = 0;

	std::mutex results_mutex_;
	std::vector<result> results_;
	std::vector<result> taken_;
	/* Results to take; relaxed, because the mutex orders the results themselves. */
	std::atomic<bool> have_results_{false};
};

template <class F>
int npr_cq::resize(std::uint32_t own, std::uint32_t limit, F &&resize)
{
	const std::lock_guard lock(mutex);
	/* What is posted has its entries still, and what comes next finds some. */
	const std::uint32_t least = credits.used() + credits.largest();
	int error = 0;

	if (!npr::with_credits(own, least, limit, [&](std::uint32_t n) { return !(error = resize(n)); }))
		return error;
	strays_.reserve(static_cast<std::size_t>(verbs->cqe));
	credits.resize(static_cast<std::uint32_t>(verbs->cqe) - own);
	serve_line();
	return 0;
}

namespace npr {

/* npr_open() on @provider. */
npr_context *open(ibv_context *verbs, unsigned int flags, const provider &provider) noexcept;
/* npr_dereg_mr() by @dereg, which is ibv_dereg_mr(). */
int dereg_mr(ibv_mr *mr, decltype(provider::dereg_mr) dereg) noexcept;
/* npr_attach_cq() of one that is not half the application's, but @own entries. */
npr_cq *attach_cq(npr_context *ctx, ibv_cq *cq, std::uint32_t own);

} // namespace npr

#endif
