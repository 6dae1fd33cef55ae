/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The soak test's model. A *cell* is an owner with an unpinned region and a peer
 * that uses it, each a process of its own; they share this structure, and the
 * process that started them watches it.
 *
 * The peer has three queue pairs:
 *
 * - The *main* one does all verbs on pages that are `there`. It is the only writer
 *   of these pages but for the owner, who writes only pages that nobody uses. So the
 *   content of each byte is known at every point of the queue: `shadow` is what the
 *   region contains when everything posted so far has been done. Each READ and each
 *   atomic has to bring just that, and no request may fail.
 *
 * - The *probe* READs anywhere at any time, and WRITEs where memory is being lost. What
 *   it READs has to be of this page's region, and not older than what is allowed: see
 *   tag(). Where pages are `there`, `gone` or `read_only` all the while it is known
 *   whether it has to be refused; in the other states it may be.
 *
 * - The *side* one is UC or UD, where only local buffers can be in unpinned memory: it
 *   sends messages, and WRITEs into a mailbox that is pinned. What arrives has to be what was
 *   sent, in order; what does not arrive has to have met a link that loses packets.
 *
 * The owner changes its memory all the time. Changes that peers must not notice it just
 * does. For others it takes pages away from the main queue pair first:
 *
 *   there      all may use the page
 *   going      the owner waits until the main queue pair has nothing under way there
 *   lossy      memory is unmapped, protected, emptied, ...; the probe may WRITE
 *   gone       nothing is there that peers could reach; comes and goes within lossy
 *   read_only  peers can READ, and not WRITE; the same
 *   settling   the owner waits for the probe's WRITEs, then fills memory and shadow anew
 *
 * A hold keeps a page where peers reach it, all of them, until the owner's kernel has been
 * told that it is given back, which may be after the request has completed. So the owner
 * waits until there is no hold before it expects that what was there is gone.
 *
 * A peer may be stopped (SIGSTOP) with leases of the region. If nothing was under way, it goes on
 * as if nothing had happened, whatever became of its leases. Otherwise its queue pairs may be
 * lost (`may_lose`): then one request fails with a status that says so, what completed before it
 * has been checked as ever, and all pages that no request uses have the content of the model.
 *
 * Pages are counted in (`main_users`, `probe_writers`) before their state is looked at, and
 * the state is set before the counts are looked at; both are sequentially consistent.
 */
#ifndef NPRDMA_SOAK_CELL_HPP
#define NPRDMA_SOAK_CELL_HPP

#include "kinds.hpp"

#include <infiniband/verbs.h>
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

extern "C" {
#include "np_test.h"
}

namespace soak
{

inline constexpr unsigned region_pages = 1024;
inline constexpr std::size_t region_bytes = region_pages * PAGE;
inline constexpr unsigned atomics_per_page = 8; /* words at a page's end: their bytes have no tag */
inline constexpr unsigned window = 16;          /* work requests of the main queue pair */
inline constexpr std::size_t slot_bytes = 256 << 10;
inline constexpr std::size_t message_bytes = 16 << 10;
inline constexpr unsigned messages = 32;   /* receives that the owner keeps posted */
inline constexpr unsigned side_window = 4; /* work requests of the side one */
/* Unpinned memory of the owner for messages, and of the peer for what it sends and gets */
inline constexpr std::size_t inbox_bytes = 2 * messages * message_bytes;
inline constexpr std::size_t buffer_bytes = (window + side_window) * slot_bytes;

enum class memory : std::uint32_t {
	anonymous,
	huge_pages, /* transparent ones */
	memfd,
	hugetlb,
	ext4,
	xfs,
	ext4_dax,
	xfs_dax,
	kinds
};

const char *name_of(memory m) noexcept;

/* Where files of it are; set up by the host. */
inline std::string directory_of(memory m)
{
	return std::string("/tmp/soak/") + name_of(m);
}
/* Whoever opens a file to write here while it is frozen does not end, not even killed. */
inline constexpr const char *stuck_thread = "stuck";
inline constexpr const char *frozen_directory = "/tmp/soak/frozen";

/* What a request on it counts as. */
constexpr kind on_memory(memory m) noexcept
{
	return static_cast<kind>(static_cast<unsigned>(kind::in_anonymous) + static_cast<unsigned>(m));
}

/* Files on disks cannot be pinned for write: no verb that needs a hold. */
inline bool holds_for_write(memory m) noexcept
{
	return m < memory::ext4;
}
inline bool is_shared_file(memory m) noexcept
{
	return m >= memory::memfd;
}

/*
 * A byte of a region: three bits say which cell's, two the page's epoch, three are
 * random. 0 is no cell, and 7 is memory that belongs to nobody's region (poison).
 */
inline constexpr unsigned poison = 7;

constexpr std::uint8_t tag(unsigned cell, unsigned epoch, unsigned random) noexcept
{
	return static_cast<std::uint8_t>(cell << 5 | (epoch & 3) << 3 | (random & 7));
}

enum state : std::uint32_t { there, going, lossy, gone, read_only, settling };

inline constexpr std::uint32_t states = 8;

struct page_state {
	std::atomic<std::uint32_t> step; /* % states is the state; never the same again */
	std::atomic<std::uint32_t> main_users;
	std::atomic<std::uint32_t> probe_writers;
	std::atomic<std::uint32_t> oldest; /* epoch that may still be read */
	std::atomic<std::uint32_t> newest; /* epoch that may be read already */

	[[nodiscard]] state now() const { return static_cast<state>(step % states); }
	/* The owner only. */
	void become(state s) { step = (step | (states - 1)) + 1 + s; }
};

/* How a process that was not killed ends. */
enum exit_status { done = 0, failed = 1, disconnected = 2, lost = 3 /* see may_lose */ };

/* What the owner shall do with its whole region while the peer is stopped. */
enum class order : std::uint32_t { nothing, drop, reregister };

/* Do the HCAs lose packets? */
struct link_state {
	std::atomic<std::uint32_t> lossy, changes;

	/* For what is sent now. */
	[[nodiscard]] std::uint32_t stamp() const { return lossy ? UINT32_MAX : changes.load(); }
	[[nodiscard]] bool may_have_lost(std::uint32_t stamp) const
	{
		return stamp == UINT32_MAX || stamp != changes;
	}
};

struct message {
	std::uint32_t length;
	std::uint32_t imm;
	std::uint8_t opcode; /* enum ibv_wc_opcode */
	bool has_imm;
	std::uint32_t invalidated; /* key, or 0 */
	std::uint64_t seed;        /* of its content; of SENDs, and what is in the mailbox */
	/* The side connection only */
	kind what;
	std::uint64_t number;  /* its content begins with it */
	std::uint32_t written; /* bytes in the mailbox when it arrives */
	std::uint32_t stamp;   /* of the link */
};

/* What a connection carries from the peer to the owner. */
struct mailbag {
	std::atomic<std::uint64_t>
	    credits; /* receives ever posted for it, and those that lost messages left */
	std::atomic<std::uint64_t> posted; /* messages */
	message sent[4 * messages];        /* by their number */

	message &of(std::uint64_t number) { return sent[number % std::size(sent)]; }
};

inline constexpr std::size_t ud_bytes = 2048, grh_bytes = 40;
inline constexpr std::uint32_t ud_key = 0x1234;

/* What is in a message: on the side connection its number first, so at least 8 bytes. */
std::vector<std::uint8_t> content_of(std::uint64_t seed, std::uint64_t number, std::size_t length,
				     bool numbered);

struct cell {
	/* Set before anybody starts */
	std::uint64_t seed;
	unsigned number; /* 1 to 6, the tag */
	memory kind;
	tally *count;                 /* of all cells */
	link_state *link;             /* the same */
	ibv_qp_type side;             /* UC or UD */
	bool shared_receives;         /* from an SRQ, for the main and the side connection */
	bool extended, extended_poll; /* ibv_wr_*(), ibv_start_poll() */
	bool all_signaled;            /* sq_sig_all */
	bool relaxed;                 /* NPR_QP_RELAXED_ORDER */
	bool events;                  /* completion events instead of polling */
	char group[64];               /* control group of the owner */

	std::atomic<bool> stop;          /* the peer ends, then the owner */
	std::atomic<bool> peer_is_gone;  /* killed: a new one will come */
	std::atomic<bool> owner_is_gone; /* or its device: errors are right now */
	std::atomic<bool> peer_done;
	std::atomic<bool> exec, hang; /* what the owner shall do */

	/* Who is who: the owner makes queue pairs for session n, the peer connects. */
	std::atomic<std::uint32_t> owner_session, peer_session, connected;
	np_addr owner_main, owner_probe, owner_side, peer_main, peer_probe, peer_side;
	std::atomic<std::uint64_t> base; /* of the region */
	std::atomic<std::uint32_t> rkey;
	/* The probe's queue pair after an error: wanted and made so often */
	std::atomic<std::uint32_t> probe_wanted, probe_made;

	/* Where the owner is at work: for the probe, which would seldom meet it otherwise */
	std::atomic<std::uint32_t> worksite, worksite_pages;
	std::atomic<std::uint64_t> refusals;
	std::atomic<std::uint32_t> doing;        /* enum kind: what the owner is at */
	std::atomic<bool> rest;                  /* nothing new begins that could ask for a hold */
	std::atomic<bool> quiet;                 /* the peer begins nothing new */
	std::atomic<bool> main_idle, probe_idle; /* and has nothing under way any more */
	std::atomic<std::uint32_t> under_way;    /* requests of the main connection */
	std::atomic<std::uint64_t> probed;       /* requests of the probe that have ended */
	std::atomic<bool> may_lose, has_lost;    /* the peer its queue pairs */
	std::atomic<bool> stopped;               /* the peer is, for messages */
	/* The owner waits before it does what is wanted, until it may go. */
	std::atomic<order> wanted;
	std::atomic<bool> waits, go;
	std::atomic<std::uint64_t> finished; /* requests of the main connection */
	/* Pages of the one that failed, and how many: for the owner to look at */
	std::atomic<std::uint32_t> failed_first, failed_pages;

	mailbag main_mail, side_mail;
	std::atomic<std::uint64_t> mailbox; /* of the owner, for WRITEs of the side connection */
	std::atomic<std::uint32_t> mailbox_key;
	std::atomic<std::uint32_t> window; /* on it, to be invalidated by a SEND; 0: not now */

	std::atomic<unsigned> telling, told; /* so many processes; and have done so */
	char why[2][512];                    /* what went wrong first, and what the other one says of it */

	page_state page[region_pages];
	alignas(4096) std::uint8_t shadow[region_bytes];
};

/* What a process says before it ends with exit status failed; the first one counts. */
[[noreturn]] void fail(cell &c, const std::string &why);

/* Shared with all processes that come of this one; all zero at first. */
template <class T> T *make_shared_memory()
{
	void *p = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		throw std::runtime_error("no memory");
	return new (p) T{};
}

/* The end of a wait that has no end. */
class deadline
{
public:
	deadline() : end_(np_now_ms() + NP_WAIT_MS) {}
	bool over() const { return np_now_ms() > end_; }

private:
	std::uint64_t end_;
};

/* The processes; both return an exit_status. */
int run_owner(cell &c);
int run_peer(cell &c);

} // namespace soak

#endif
