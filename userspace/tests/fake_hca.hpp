/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The HCA of the unit tests: verbs objects, and a provider whose posts take effect at the peer at once. The tests of
 * the library's objects make the objects themselves. Those of the preload library get them from fake_verbs, which has
 * the names of libibverbs.
 *
 * What it checks by itself (as test failures): no CQ is overrun; the key of a hold is used while there is the hold,
 * inside of it, and for what it is; nothing is posted under a lease that went back; words are brought to pinned memory.
 */
#ifndef NPR_TESTS_FAKE_HCA_HPP
#define NPR_TESTS_FAKE_HCA_HPP

#include "peer.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <infiniband/verbs.h>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace npr::fake {

using test::peer;

/* Keys that the kernel gives for holds; no region has one of these. */
inline constexpr std::uint32_t first_held_lkey = 0xb0000000, last_held_lkey = 0xbfffffff;

[[nodiscard]] constexpr bool is_held(std::uint32_t lkey)
{
	return lkey >= first_held_lkey && lkey <= last_held_lkey;
}

struct hca;

/* Objects of verbs come first in those of the provider. */
struct cq {
	explicit cq(hca &h, int cqe = 4096);

	[[nodiscard]] ibv_cq *base() { return ibv_cq_ex_to_cq(&verbs); }

	ibv_cq_ex verbs{};
	std::uint64_t wc_flags = 0; /* those of ibv_create_cq_ex() */
	std::vector<ibv_wc> completions;
	std::size_t capacity; /* entries that are not full of what else completes */
	std::atomic<std::uint64_t> polls{0}, arms{0};
	int armed = -1;	   /* for solicited events only? */
	bool busy = false; /* the kernel refuses to destroy it */
};

struct srq {
	explicit srq(hca &h, ibv_pd *pd = nullptr);

	ibv_srq verbs{};
	std::atomic<unsigned> receives{0};
	std::atomic<std::uint32_t> lkey{0}; /* of the last one */
	bool busy = false;
};

struct channel {
	ibv_comp_channel verbs;
	std::vector<ibv_cq *> events;
};

struct qp {
	qp(hca &h, std::uint32_t number, ibv_cq *send_cq, ibv_cq *recv_cq);

	[[nodiscard]] ibv_qp &base() { return verbs.qp_base; }

	ibv_qp_ex verbs{};
	bool extended = false; /* made for ibv_wr_*() */
	bool begun = false;    /* ibv_wr_start() has the lock */
	std::vector<ibv_sge> built; /* of the requests that were completed last, or are being built */
	unsigned aborts = 0;
	std::atomic<unsigned> sends{0}, receives{0};
	std::atomic<std::uint64_t> wr_id{0}; /* of the last one sent */
	std::atomic<std::uint32_t> lkey{0};
	std::atomic<std::uint32_t> window{0}; /* the key that was bound last */
	ibv_qp_attr attr{};
	bool busy = false;
};

struct mr {
	ibv_mr verbs{};
	unsigned access = 0;
	std::uint64_t iova = 0;
};

/* An unpinned region of this process, of which the kernel knows more than its key. */
struct local_region {
	std::uint64_t base = 0, length = 0; /* by the HCA's addresses */
	std::uint64_t offset = 0;	    /* from these to the CPU's */
	bool leased = false;		    /* if somebody wants that */
};

/* A device that is open. */
struct hca {
	/* What the HCA finds behind an lkey. */
	struct local_key {
		std::uint64_t base, length, offset;
		bool write;
	};

	hca();
	hca(const hca &) = delete;
	hca &operator=(const hca &) = delete;
	~hca();

	/* --- objects --- */
	/* The lowest that is free, as the kernel has it. */
	std::uint32_t new_handle();
	void free_handle(std::uint32_t h);
	/* Null and errno: it is refused. */
	mr *register_memory(ibv_pd *pd, void *addr, std::size_t length, std::uint64_t iova, unsigned access);
	void deregister(mr *m);

	/* --- under the mutex --- */
	void complete(ibv_cq *cq, const ibv_wc &wc);
	/* Where in memory @s is, @offset bytes behind its address. */
	[[nodiscard]] std::byte *locate(const ibv_sge &s, std::uint64_t offset, std::uint64_t n, bool write) const;
	/* What the keys of a pinned region, or the number of another one, are of. */
	void name_memory(const mr &m);
	/* The queue pair has ended, and what is stalled there. */
	void fail(const ibv_qp &qp);

	/* --- what takes it --- */
	/* What was stalled completes. */
	void go_on();
	int post(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad);
	int post_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad);
	int post_srq_recv(ibv_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **bad);
	int poll(ibv_cq *cq, int n, ibv_wc *wc);
	int arm(ibv_cq *cq, int solicited);

	verbs_context verbs{}; /* the first */
	std::mutex mutex;
	peer far;
	std::set<std::uint32_t> handles; /* in use, of all objects */
	std::uint32_t first_handle = 0;	 /* that the next object may get */
	std::map<std::uint32_t, ibv_qp *> qps; /* that libibverbs has made, by handle */
	std::map<std::uint32_t, local_region> regions; /* by handle */
	std::map<std::uint32_t, local_key> keys; /* of pinned regions, and of holds; others are of memory at their addresses */
	std::atomic<unsigned> pinned{0}; /* regions that are */
	std::atomic<int> refuses_unpinned{0}, refuses_pinned{0}; /* regions, with this errno */
	std::set<std::uint32_t> dead; /* queue pairs in their error state, by number */
	bool records = true;		/* what is posted, in these two */
	std::deque<ibv_send_wr> posted; /* without its lists */
	std::deque<std::pair<std::uint64_t, std::uint32_t>> receives; /* wr_id, first lkey */
	std::size_t most_receives = 4;	/* there; more are refused */
	bool receives_come = false;	/* to those of queue pairs there is a message at once */
	bool moves = true;		/* data, and not only words */
	bool stall = false;		/* nothing completes */
	std::deque<std::pair<ibv_cq *, ibv_wc>> stalled;
	int refuse_post = 0;
	std::uint32_t moved_lkey = 0; /* the local key of what the peer's data went to, or came from, last */

private:
	[[nodiscard]] std::uint32_t note(const ibv_sge *list, int n, bool write, bool in_line) const;
	[[nodiscard]] bool receive(const ibv_recv_wr &wr, std::uint32_t lkey);
	void transfer(const ibv_send_wr &wr);
};

inline hca &of(ibv_context *c)
{
	return *reinterpret_cast<hca *>(verbs_get_ctx(c));
}

inline channel &of(ibv_comp_channel *c)
{
	return *reinterpret_cast<channel *>(c);
}

inline cq &of(ibv_cq *c)
{
	return *reinterpret_cast<cq *>(c);
}

inline srq &of(ibv_srq *s)
{
	return *reinterpret_cast<srq *>(s);
}

inline qp &of(ibv_qp *q)
{
	return *reinterpret_cast<qp *>(q);
}

inline mr &of(ibv_mr *m)
{
	return *reinterpret_cast<mr *>(m);
}

} // namespace npr::fake

#endif
