/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The soak test's model. A *cell* is an owner with an unpinned region and a peer
 * that uses it, each a process of its own; they share this structure, and the
 * process that started them watches it.
 *
 * The peer has two queue pairs:
 *
 * - The *main* one does all verbs on pages that are `there`. It is the only writer
 *   of these pages but for the owner, who writes only pages that nobody uses. So the
 *   content of each byte is known at every point of the queue: `shadow` is what the
 *   region contains when everything posted so far has been done. Each READ and each
 *   atomic has to bring just that, and no request may fail.
 *
 * - The *probe* READs anywhere at any time, and WRITEs where memory is being lost. It
 *   may be refused where a page was not `there` all the while. What it READs has to be of
 *   this page's region, and not older than what is allowed: see tag().
 *
 * The owner changes its memory all the time. Changes that peers must not notice it just
 * does. For others it takes pages away from the main queue pair first:
 *
 *   there      all may use the page
 *   going      the owner waits until the main queue pair has nothing under way there
 *   lossy      memory is unmapped, protected, emptied, ...; the probe may WRITE
 *   settling   the owner waits for the probe's WRITEs, then fills memory and shadow anew
 *
 * Pages are counted in (`main_users`, `probe_writers`) before their state is looked at, and
 * the state is set before the counts are looked at; both are sequentially consistent.
 */
#ifndef NPRDMA_SOAK_CELL_HPP
#define NPRDMA_SOAK_CELL_HPP

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

extern "C" {
#include "np_test.h"
}

namespace soak
{

inline constexpr unsigned region_pages = 1024;
inline constexpr std::size_t region_bytes = region_pages * PAGE;
inline constexpr unsigned atomics_per_page = 8; /* words at a page's end: their bytes have no tag */
inline constexpr unsigned window = 16;		/* work requests of the main queue pair */
inline constexpr std::size_t slot_bytes = 256 << 10;
inline constexpr std::size_t message_bytes = 16 << 10;
inline constexpr unsigned messages = 32; /* receives that the owner keeps posted */

enum class memory : std::uint32_t {
	anonymous,
	huge_pages, /* transparent ones */
	memfd,
	hugetlb,
	ext4,
	xfs,
	kinds
};

const char *name_of(memory m) noexcept;

/* Files of ext4 and xfs cannot be pinned for write: no verb that needs a hold. */
inline bool holds_for_write(memory m) noexcept { return m != memory::ext4 && m != memory::xfs; }
inline bool is_shared_file(memory m) noexcept { return m >= memory::memfd; }

class random_source
{
public:
	explicit random_source(std::uint64_t seed) : engine_(seed) {}

	/* [0, bound) */
	std::uint64_t below(std::uint64_t bound) { return engine_() % bound; }
	std::uint64_t between(std::uint64_t first, std::uint64_t last) { return first + below(last - first + 1); }
	bool one_in(std::uint64_t n) { return !below(n); }
	std::uint64_t word() { return engine_(); }

private:
	std::mt19937_64 engine_;
};

/*
 * A byte of a region: three bits say which cell's, two the page's epoch, three are
 * random. 0 is no cell, and 7 is memory that belongs to nobody's region (poison).
 */
inline constexpr unsigned poison = 7;

constexpr std::uint8_t tag(unsigned cell, unsigned epoch, unsigned random) noexcept
{
	return static_cast<std::uint8_t>(cell << 5 | (epoch & 3) << 3 | (random & 7));
}

enum step : std::uint32_t { there, going, lossy, settling, steps };

struct page_state {
	std::atomic<std::uint32_t> step; /* % steps is the state */
	std::atomic<std::uint32_t> main_users;
	std::atomic<std::uint32_t> probe_writers;
	std::atomic<std::uint32_t> oldest; /* epoch that may still be read */
	std::atomic<std::uint32_t> newest; /* epoch that may be read already */
};

/* How a process that was not killed ends. */
enum exit_status { done = 0, failed = 1, disconnected = 2 };

struct counters {
	std::atomic<std::uint64_t> reads, writes, writes_imm, sends, atomics, inlines, unpinned_local, bytes;
	std::atomic<std::uint64_t> received;
	std::atomic<std::uint64_t> probe_reads, probe_writes, probe_refused;
	std::atomic<std::uint64_t> faults, holds, suspicious, repeated;
	std::atomic<std::uint64_t> kept_events, lossy_events, reregistrations, sessions;
};

struct message {
	std::uint32_t length;
	std::uint32_t imm;
	std::uint8_t opcode; /* enum ibv_wc_opcode */
	bool has_imm;
	std::uint64_t seed; /* of its content; SENDs only */
};

struct cell {
	/* Set before anybody starts */
	std::uint64_t seed;
	unsigned number; /* 1 to 6, the tag */
	memory kind;
	bool relaxed;	/* NPR_QP_RELAXED_ORDER */
	bool events;	/* completion events instead of polling */
	char group[64]; /* control group of the owner */

	std::atomic<bool> stop;		 /* the peer ends, then the owner */
	std::atomic<bool> peer_is_gone;	 /* killed: a new one will come */
	std::atomic<bool> owner_is_gone; /* or its device: errors are right now */
	std::atomic<bool> peer_done;

	/* Who is who: the owner makes queue pairs for session n, the peer connects. */
	std::atomic<std::uint32_t> owner_session, peer_session, connected;
	np_addr owner_main, owner_probe, peer_main, peer_probe;
	std::atomic<std::uint64_t> base; /* of the region */
	std::atomic<std::uint32_t> rkey;
	/* The probe's queue pair after an error: wanted and made so often */
	std::atomic<std::uint32_t> probe_wanted, probe_made;

	std::atomic<std::uint64_t> credits; /* receives ever posted in this session */
	message sent[4 * messages];	    /* by the number of the message */

	std::atomic_flag told;
	char why[512]; /* what went wrong first */
	counters count;

	page_state page[region_pages];
	alignas(4096) std::uint8_t shadow[region_bytes];
};

/* What a process says before it ends with exit status failed; the first one counts. */
[[noreturn]] void fail(cell &c, const std::string &why);

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
