/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Threads that ask peers what a key is. */
#ifndef NPR_RESOLVER_HPP
#define NPR_RESOLVER_HPP

#include "protocol/engine.hpp"
#include "world/kernel.hpp"

#include <array>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace npr {

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

	/* Who asks: a queue pair. */
	class client {
	public:
		/* RESOLVE, which blocks, and all else that has to be there for it: 0 or a negative errno. */
		[[nodiscard]] virtual int ask(const remote_key &key, rdma_np_region_info &info) noexcept = 0;
		/* How long, in ns, the HCA tries to reach the peer. */
		[[nodiscard]] virtual nanoseconds tries_for() noexcept = 0;
		/* In a thread of the resolver's, when it is not asked again. */
		virtual void answered(const remote_key &key, int error, const rdma_np_region_info &info) noexcept = 0;

	protected:
		~client() = default;

	private:
		friend resolver;
		bool slow_ = false; /* its peer was, when last asked for a key */
	};

	resolver() noexcept = default;
	~resolver();

	/* Makes room for the requests of one more QP; starts the first thread. Throws. */
	void reserve(std::size_t requests);
	/* That QP has none any more: the next one may have its room. */
	void unreserve(std::size_t requests) noexcept;
	void submit(client &who, const remote_key &key) noexcept;
	/* No request of @who is waiting or running when this returns. */
	void cancel(const client &who) noexcept;

private:
	struct job {
		client *who;
		remote_key key;
		nanoseconds due, pause;
		nanoseconds begun; /* asked first; 0: not yet */
	};

	void run(std::size_t self) noexcept;
	void start_spare(std::unique_lock<std::mutex> &lock) noexcept;
	[[nodiscard]] std::vector<job>::iterator pick(nanoseconds now) noexcept;
	[[nodiscard]] bool running(const client &who) const noexcept;

	std::mutex mutex_;
	std::condition_variable wake_, idle_;
	std::vector<job> jobs_;
	std::size_t reserved_ = 0;
	std::size_t started_ = 0; /* threads */
	std::size_t spare_ = 0;   /* of these not in the kernel, or about to begin */
	std::size_t slow_ = 0;    /* of these at work for QPs that were slow */
	bool stop_ = false;
	std::array<const client *, max_threads> running_{}; /* by thread */
	std::array<std::thread, max_threads> threads_;
};

/* Repeat while the peer is over a bound or there is no memory; -ETIMEDOUT or -ENOMEM after this. */
inline constexpr nanoseconds resolve_patience = 10'000'000'000;
inline constexpr nanoseconds resolve_pause = 100'000;
inline constexpr nanoseconds max_resolve_pause = 20'000'000;

/*
 * What a RESOLVE failed of may be over the next time: bounds, memory here or at the peer,
 * or that the peer's queue pair is not connected yet.
 */
[[nodiscard]] bool passes(int error) noexcept;
/* Asked since @begun, and failed of @error: is that enough? Then it is called what @error becomes. */
[[nodiscard]] bool too_late(resolver::client &who, nanoseconds begun, int &error) noexcept;

} // namespace npr

#endif
