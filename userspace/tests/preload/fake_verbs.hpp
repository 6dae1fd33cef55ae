/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A libibverbs with one provider and a kernel, without a device: what is posted is done at once. It
 * is what the preload library finds behind itself.
 */
#ifndef FAKE_VERBS_HPP
#define FAKE_VERBS_HPP

#include <atomic>
#include <cstdint>
#include <infiniband/verbs.h>
#include <mutex>
#include <set>
#include <vector>

namespace fake {

/* Objects of verbs come first in those of the provider. */
struct context {
	verbs_context verbs;
	std::mutex mutex;
	std::set<std::uint32_t> handles; /* in use, of all objects */
	std::uint32_t first_handle;      /* that the next object may get */
	std::atomic<unsigned> holds;     /* of local memory, now */
	std::atomic<unsigned> pinned;    /* regions that were registered so */
	int refuses_unpinned, refuses_pinned; /* regions, with this errno */
	std::set<std::uint32_t> unpinned; /* regions, by handle, which the kernel knows them by */
};

struct cq {
	ibv_cq_ex verbs;
	std::uint64_t wc_flags; /* those of ibv_create_cq_ex() */
	std::mutex mutex;
	std::vector<ibv_wc> completions;
	std::size_t polled;
	std::atomic<unsigned> polls, arms;
	bool busy; /* the kernel refuses to destroy it */
};

struct srq {
	ibv_srq verbs;
	std::atomic<unsigned> receives;
	std::atomic<std::uint32_t> lkey; /* of the last one */
	bool busy;
};

struct channel {
	ibv_comp_channel verbs;
	std::vector<ibv_cq *> events;
};

struct qp {
	ibv_qp_ex verbs;
	bool extended; /* made for ibv_wr_*() */
	bool begun;    /* ibv_wr_start() has the lock */
	std::vector<ibv_sge> built; /* of the requests that were completed last, or are being built */
	unsigned aborts;
	std::atomic<unsigned> sends, receives;
	std::atomic<std::uint64_t> wr_id; /* of the last one sent */
	std::atomic<std::uint32_t> lkey;
	std::atomic<std::uint32_t> window; /* the key that was bound last */
	ibv_qp_attr attr;
	bool busy;
};

struct mr {
	ibv_mr verbs;
	unsigned access;
	std::uint64_t iova;
};

/* What the kernel gives instead of the key of an unpinned region. */
inline constexpr std::uint32_t held_lkey = 0xbeef00;
/* The handle of a pinned region of another process; lower ones are of unpinned regions. */
inline constexpr std::uint32_t foreign_pinned = 1000;
/* That of a peer's unpinned region; all others are of pinned memory. */
inline constexpr std::uint32_t unpinned_rkey = 0xfeed00;

inline context &of(ibv_context *c)
{
	return *reinterpret_cast<context *>(verbs_get_ctx(c));
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

} // namespace fake

extern "C" {

extern ibv_device fake_device;
extern std::atomic<ibv_fork_status> fake_fork_status;
/* Past ibv_open_device(). */
ibv_context *fake_open(ibv_device *device);
extern std::atomic<unsigned> fake_holds_freed; /* of all devices; for who looks when they are closed */
/* Somebody asked for an event of @cq, which the provider's channel tells now. */
void fake_event(ibv_comp_channel *real, ibv_cq *cq);
/* The region that was registered last. */
struct fake_registration {
	ibv_pd *pd;
	std::uint64_t iova;
	unsigned access;
	std::uint32_t lkey;
};
extern fake_registration fake_registered;
extern std::atomic<std::uint32_t> fake_stays; /* the region or receive work queue of this handle cannot go */
extern std::atomic<bool> fake_without_nprdma; /* the kernel's */
extern std::vector<std::uint32_t> fake_wq_keys; /* of the receive that was posted last to a receive work queue */
/* The kernel's methods: 0, or -1 and errno. */
int fake_ioctl(int fd, void *arg);

}

#endif
