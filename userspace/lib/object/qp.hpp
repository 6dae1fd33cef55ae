/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef NPR_QP_HPP
#define NPR_QP_HPP

#include "object/context.hpp"
#include "object/extended.hpp"
#include "protocol/credits.hpp"
#include "protocol/engine.hpp"
#include "world/clock.hpp"
#include "world/local_leases.hpp"
#include "world/receive_ring.hpp"
#include "world/word_ring.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace npr {

struct qp_params {
	std::uint32_t depth, budget, max_sge, max_inline, cache_slots, read_words_min;
	std::uint32_t receives = 0, receive_sge = 0; /* what the receive queue takes; 0: an SRQ */
	bool sq_sig_all, relaxed;
	bool local_only = false;
	bool opaque_sinks = false;
	bool ordered_writes = false;
};

/* One key for each piece, one for the next work request, some for npr_resolve(). */
[[nodiscard]] inline std::size_t requests_of(std::uint32_t budget) noexcept
{
	return std::max<std::size_t>(budget, 16) + 16;
}

} // namespace npr

struct npr_qp final : npr::backend, npr::credits::waiter, npr::resolver::client {
	/* Throws std::bad_alloc. */
	npr_qp(npr_cq &c, ibv_qp *q, const npr::qp_params &params, std::uint16_t cookie);
	~npr_qp() override = default;

	int post(ibv_send_wr *chain, ibv_send_wr **bad) noexcept override;
	int fault(const rdma_np_fault_req &req, std::span<const rdma_np_range> ranges) noexcept override;
	void release(std::uint64_t hold) noexcept override;
	void forget(std::uint64_t region) noexcept override;
	void resolve(const npr::remote_key &key) noexcept override;
	[[nodiscard]] int ask(const npr::remote_key &key, rdma_np_region_info &info) noexcept override;
	[[nodiscard]] npr::nanoseconds tries_for() noexcept override;
	void answered(const npr::remote_key &key, int error, const rdma_np_region_info &info) noexcept override;
	[[nodiscard]] bool is_local(std::uint32_t lkey) noexcept override;
	[[nodiscard]] bool is_plain(std::uint32_t lkey) noexcept override;
	[[nodiscard]] int hold_local(ibv_sge &sge, bool write, std::uint32_t &hold, npr::cpu_view &view,
				     npr::local_ticket &ticket) noexcept override;
	void free_local(std::uint32_t hold) noexcept override;
	[[nodiscard]] bool local_wanted() noexcept override;
	[[nodiscard]] int narrow_local(const ibv_sge &sge, bool write, std::uint32_t &hold, ibv_sge &wire) noexcept override;
	void fail_qp() noexcept override;
	[[nodiscard]] bool connected() noexcept override;
	npr::nanoseconds now() noexcept override { return npr::monotonic(); }
	npr::nanoseconds recently() noexcept override { return npr::monotonic_coarse(); }

	/* One receive: 0 or a negative errno. */
	[[nodiscard]] int post_recv(const ibv_recv_wr &wr) noexcept;
	/*
	 * The same, under the CQ's lock, of one with one buffer with the key that was used last, under a lease that is there or
	 * in no unpinned region; or not_hot, and nothing has changed.
	 */
	[[nodiscard, gnu::always_inline]] int post_recv_hot(const ibv_recv_wr &wr) noexcept;
	static constexpr int not_hot = 1;
	/* Under the CQ's lock. The completion of a receive of the ring is the application's by now; false: of one that was given up. */
	[[nodiscard]] bool end_recv(ibv_wc &wc) noexcept;
	/* Of the oldest receive there, or request, that has succeeded: it is the application's by now; or false, and nothing has changed. */
	[[nodiscard, gnu::always_inline]] bool hot_cqe(ibv_wc &wc) noexcept
	{
		/* What has failed does not say what it was, and is neither's. */
		return wc.opcode & IBV_WC_RECV ? ring_.hot_end(wc, stripe_) : engine.hot_cqe(wc);
	}
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
	void look_at(std::uint32_t lkey) noexcept;

	/* Receives, under the CQ's lock. These are for those that are hot, for which the way by the context is long. */
	const decltype(npr::provider::post_recv) post_recv_;
	npr::local_leases &leases_;
	const std::atomic<std::uint64_t> &local_keys_;
	const unsigned stripe_; /* the CQ's, for local_leases */
	npr::receive_ring ring_;
	/* The region of the last one's buffer, when local_regions::changes() was this; or it is in none that is unpinned. */
	bool lasting_plain_ = false;
	std::uint32_t lasting_lkey_ = 0;
	std::uint64_t lasting_keys_ = 0;
	npr::local_leases::lasting lasting_;
	prepared *prepared_ = nullptr; /* of the caller of post_send(), under the CQ's lock */

public:
	npr::engine engine;
	/* Apart, because the preload library's applications have it longer than this object. */
	std::unique_ptr<npr::qp_ex> ex;
};

#endif
