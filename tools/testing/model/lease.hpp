/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Leases of a peer's memory as a transition system, beside that of residency in
 * model.hpp and explored by the same search: all interleavings of the owner's kernel
 * and its memory management, the network, the initiators' kernels and libraries, and
 * the NIC, to the bounds that a scenario states.
 *
 * memory: a page changes (np_chunk_invalidate): the owner has another frame there. Who
 *   leases it keeps the old frame and the leaf that shows it, and is recalled
 *   (np_chunk_recall). Memory is short (np_lease_scan): the oldest lease is recalled.
 * fault (np_fault_held, one for each initiator at a time): count, or refuse and recall the
 *   oldest (np_lease_reserve), on the region's list from here on (np_hold_alloc) | pin,
 *   waits for leases of an older page (np_fault_plan) | make the key (np_hold_grant) |
 *   add to the peer and answer (np_held_add, np_fault_served); RECALL if it was wanted
 *   before. A copy of a FAULT that was answered gets the answer again (np_lane_arrive),
 *   without the lease if that has ended.
 * recall: (np_lease_tell) | time begins, RECALL goes (np_held_wanted, np_held_want) |
 *   again when it was not answered, or BUSY (np_recall_done). GONE ends the lease.
 * end of a lease: RELEASE or GONE (np_held_release), its time (np_held_expire), the end of the
 *   QP pair (np_held_kill), or it was not granted (np_held_drop): key ends, which waits for
 *   what executes under it (np_hold_revoke) | stale leaves go, unpin
 *   (np_hold_release) | count (np_held_unreserve).
 * deregistration (np_region_close): gone | no leases, recall all (np_leases_end) | wait until no
 *   lease has a key, for some time | keys end one by one (np_keys_free_leases) | leaves go
 *   (np_chunks_close), unpin (np_holds_unpin), return.
 * network: each message may be overtaken by any other; some get lost, some come twice.
 * initiator's kernel: FAULT and RELEASE, again until answered, or given up; keeps the hold of
 *   an answer that it waits for (np_fault_keep), and releases that of another one, if it
 *   is no copy (np_answer_late). Answers RECALL (np_peer_recall): OK and an event; OK if
 *   it is being released; BUSY while a FAULT for a lease is under way; GONE.
 * initiator's library (userspace/lib/protocol/): want_lease | granted, unless the recall came
 *   first, then RELEASE | WRITEs under it | recalled, or idle (end_lease) | RELEASE when the last
 *   one has completed (lease_ended). It reads the two events of a lease in any order.
 *   Without a lease it writes the optimistic way, which is that of model.hpp; and also while
 *   a SEND waits for a receive, because what is behind that may wait for longer than the
 *   limit. It may be stopped for ever; or its host is never heard of again; or it destroys
 *   the QP.
 * NIC: looks at the key when it begins to execute a WRITE. Without the key both QPs end. With
 *   it the WRITE reaches the frame that the leaf shows, later, and completes, before that or then.
 *
 * Time passes, for the limit after a recall and for who deregisters, only where the initiator
 * is stopped, or its host away, or the scenario says that it may be slow, or what it posted
 * is behind a SEND that waits: so a peer that gives back what is wanted must never lose its
 * QP without one of the first three.
 *
 * I9: nothing is posted under a lease whose recall was seen, or which was released; RELEASE
 *   goes when all that was posted has completed. I10: leased pages never exceed the bound,
 *   and what is wanted back is unpinned in the end, whatever the initiator does from any
 *   moment on. I11: what is reported done under a lease is in the page that it pins;
 *   deregistration always ends, and nothing lands afterwards. QP: an initiator loses its QP only
 *   for a WRITE under a lease whose time had passed, and whose end it could have heard of.
 *
 * Abstracted away: a lease is of one page and for writing (a READ finds the key gone in
 * the same way); residency itself, which is model.hpp; holds that are no leases; the
 * answers to RELEASE (one that is lost is a RELEASE that comes twice); WORKING; secrets,
 * tids (what is late is known to be) and the two transports; unsignaled requests, of which
 * the HCA is made to tell; the budgets of cgroups (one bound); the time without leases after one
 * that was overdue; leases of one's own memory; the leaving of a device; the reuse of key
 * values (a stale key's address is in the region's window, which is in quarantine); WRITEs with
 * immediate, which wait for a receive themselves.
 */
#ifndef NPRDMA_MODEL_LEASE_HPP
#define NPRDMA_MODEL_LEASE_HPP

#include "model.hpp"

namespace model::lease
{

inline constexpr unsigned max_pages = 2;
inline constexpr unsigned max_frames = 5;
inline constexpr unsigned max_peers = 2;
inline constexpr unsigned max_leases = 3;

/* A protocol step that is missing, swapped or wrong */
enum class mutation : u8 {
	none,
	/* the owner's kernel */
	change_not_recalled,
	pressure_not_recalled,
	recall_not_repeated,
	busy_not_repeated,
	busy_is_gone,
	wanted_before_grant_forgotten,
	no_time_limit,
	limit_keeps_key,
	limit_ends_queue_pair,
	unpin_before_key,
	key_does_not_wait,
	count_after_grant,
	uncount_before_unpin,
	release_ids_reused,
	added_to_dead_peer,
	kill_keeps_leases,
	replay_of_ended,
	/* deregistration */
	grant_although_gone,
	pin_although_closed,
	no_leases_unchecked,
	deregistration_does_not_recall,
	deregistration_does_not_wait,
	deregistration_waits_for_ever,
	deregistration_keeps_keys,
	/* the initiator's kernel */
	gone_while_asked,
	gone_while_kept,
	recall_not_told,
	copy_releases,
	late_answer_not_released,
	/* the library */
	early_recall_forgotten,
	post_after_recall,
	release_before_completion,
	posts_behind_send,
	count, /* not one of them */
};

struct initiator {
	u8 page = 0;
	u8 writes = 1;
	u8 asks = 1;  /* so many FAULTs for a lease */
	u8 sends = 0; /* SENDs, whose receive may never be posted */
};

struct scenario {
	std::string name;
	u8 pages = 1;
	std::vector<initiator> peers;
	u8 changes = 0;  /* so often memory changes */
	u8 pressure = 0; /* so often it is short */
	u8 bound = 3;    /* pages that may be leased */
	u8 losses = 0;   /* messages that get lost, in all */
	u8 copies = 0;   /* messages that come twice */
	u8 give_ups = 0; /* requests that are not repeated any more */
	bool deregisters = false;
	bool idles = false;    /* libraries give back leases that nobody wants */
	bool slow = false;     /* initiators may take longer than they are given */
	bool stops = false;    /* the first one's library may be stopped for ever */
	bool vanishes = false; /* hosts may never be heard of again */
	bool quits = false;    /* libraries may destroy their QP */
};

/* What the owner's kernel is about with a lease */
enum class owner_pc : u8 {
	none,
	counted, /* on the region's list */
	pinned,
	keyed,
	granted,
	ending, /* the key ends */
	unpinning,
	uncounting,
	ended,
};

enum class library_pc : u8 { none, live, ending, released };

enum class tell_pc : u8 { none, under_way, pause };

/* What answers a RECALL */
enum answer : u8 { no_answer, ok, busy, gone };

struct lease {
	/* the owner */
	owner_pc pc;
	u8 peer, tid, frame, pinned, counted, key;
	u8 recalled, work, wanted, expires, overdue;
	tell_pc tell;
	/* messages under way */
	u8 m_grant, m_recall, m_answer, m_release;
	/* the initiator's kernel */
	u8 kept, told, releasing, ev_grant, ev_recall;
	/* the library */
	library_pc lib;
	u8 early;
	/* its WRITEs */
	u8 posted, behind, executing, done, to; /* behind: what is posted is, behind a SEND that waits */
	/* for the invariants alone: who wants it, what was seen, and granted although it had ended */
	u8 due, seen, dead_grant;
};

enum class job_pc : u8 { idle, make, pin, grant, add, dropping };
enum class run : u8 { running, stopped, away };

struct peer {
	run runs;
	u8 dead, killed; /* both QPs have ended; the owner's kernel has seen to that */
	u8 writes, asks, sends;
	u8 stalled;     /* a SEND waits for a receive */
	u8 tid, asking; /* of the last FAULT; it is under way */
	u8 m_fault, m_refused, ev_refused;
	/* at the owner */
	u8 lane, answer; /* tid of the last FAULT; the lease that was the answer, or none */
	job_pc job;
	u8 lease; /* of the job */
};

enum class close_pc : u8 { none, gone, waiting, keys, pages, returned };

struct state {
	u8 bad;
	u8 changes, pressure, losses, copies, give_ups;
	close_pc close;
	u8 no_leases;
	std::array<u8, max_frames> used;
	std::array<u8, max_pages> frame; /* the owner's */
	std::array<u8, max_pages> leaf;  /* a frame, or scratch_frame */
	std::array<peer, max_peers> peers;
	std::array<lease, max_leases> leases;

	bool operator==(const state &other) const { return !std::memcmp(this, &other, sizeof(*this)); }
};

struct label {
	const char *actor;
	const char *what;
	u8 who, lease; /* or none */
};

struct step {
	state to;
	label how;
};

void successors(const scenario &sc, mutation m, const state &s, std::vector<step> &out);
[[nodiscard]] state initial(const scenario &sc);
/* Nobody has anything to do, but for who is stopped, and nothing that is wanted back is pinned. */
[[nodiscard]] bool is_final(const scenario &sc, const state &s);
[[nodiscard]] invariant blame(const scenario &sc, const state &s);

[[nodiscard]] std::string_view name(mutation m);
[[nodiscard]] std::string describe(const label &l);
[[nodiscard]] std::string describe(const scenario &sc, const state &s);

[[nodiscard]] const std::vector<scenario> &scenarios();
[[nodiscard]] const scenario *find_scenario(std::string_view name);
/* The same with @more of whatever happens a bounded number of times. */
[[nodiscard]] scenario deeper(scenario sc, unsigned more);

} // namespace model::lease

#endif
