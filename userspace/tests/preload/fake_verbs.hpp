/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A libibverbs with one provider and a kernel, without a device: what the preload library finds behind itself. The HCA
 * and the kernel are those of the other unit tests, one of each for a context.
 */
#ifndef FAKE_VERBS_HPP
#define FAKE_VERBS_HPP

#include "fake_kernel.hpp"

#include <atomic>
#include <cstdint>
#include <infiniband/verbs.h>
#include <vector>

namespace npr::fake {

/* The handle of a pinned region of another process; lower ones are of unpinned regions, of a page. */
inline constexpr std::uint32_t foreign_pinned = 1000;
/* That of the peer's unpinned region; all others are of pinned memory. */
inline constexpr std::uint32_t unpinned_rkey = 0xfeed00;
inline constexpr std::uint64_t unpinned_base = 1 << 20, unpinned_length = 1 << 20;

/* What libibverbs has opened. */
struct context final : hca {
	context();
	~context();

	fake_kernel kernel{*this};
	peer::region &region = far.add_region(unpinned_base, unpinned_length, unpinned_rkey);
};

inline context &opened(ibv_context *c)
{
	return static_cast<context &>(of(c));
}

/* Holds of local memory, now. */
inline std::size_t holds(ibv_context *c)
{
	return opened(c).kernel.live_local();
}

} // namespace npr::fake

namespace fake = npr::fake;

extern "C" {

extern ibv_device fake_device;
extern std::atomic<ibv_fork_status> fake_fork_status;
/* Past ibv_open_device(). */
ibv_context *fake_open(ibv_device *device);
extern std::atomic<unsigned> fake_holds_freed; /* of devices that were closed */
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
