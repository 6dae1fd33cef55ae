/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The residency protocol as a transition system that is small enough to explore
 * in full: all interleavings of the owner's kernel, its memory management, the
 * IOMMU, the NIC and the initiators, to the bounds that a scenario states.
 *
 * One step of the model is one step of somebody that others can observe:
 *
 * notifier  (np_chunk_invalidate): take the lock, make a fault's sequence stale,
 *   word := absent | write leaf | read leaf | IOTLB entries go | drain | return.
 *   A held page's leaves stay and are stale; the last absent page merges the slot. If
 *   the owner keeps the page (np_slot_protect), word := readable | write leaf | entries
 *   of the write window go | drain | return. Of a huge slot all pages go at once.
 * fault (np_region_fault): look without the lock | pin | read_begin | HMM, count of
 *   merges | split | flush of what was one leaf | lock, sequence and merge check, plan,
 *   mark dirty | write leaf | read leaf | IOTLB entries go | drain | words, hold |
 *   answer. Whatever is out of date begins again. What one entry of the CPU's page table
 *   maps becomes one leaf, unless somebody holds a page of it: no split | lock, sequence
 *   and hold check, huge | write leaf | read leaf, one more merge | and so on.
 * release (np_pin_release): lock, stale leaves go | IOTLB | drain | unlock, unpin.
 * memory management: page-out (notifier, unmap unless pinned, write if dirty, free
 *   if still unmapped and clean), clean (notifier, write protect, write back), move
 *   (notifier, unmap, copy, map), discard (notifier, unmap, pinned or not; the next
 *   page there is a new one), fork (notifier, write protect unless pinned; who wants to
 *   write there then, or to pin it: copy, notifier, map), collapse (notifier, unmap,
 *   copy, map all pages with one entry). Clean and fork are protections. What takes an
 *   entry for all pages apart announces no more than its own page, which is less than
 *   the kernel does. A page that is read in from swap is writable and clean.
 *   A free frame belongs to somebody else at once, and holds his data.
 * IOMMU: two windows of leaves, of single pages or one for all; a cached translation for
 *   each, used or dropped at the will of the hardware until it is invalidated; that of
 *   one leaf for all only together. Who changes a leaf while a split is not flushed
 *   yet invalidates all. Draining waits for every request that was translated before.
 * NIC: a work request is one DMA request for each 64-byte unit. A request is translated
 *   once, and reaches memory later. READs overlap in every order; WRITEs are performed
 *   in order, and no read passes an earlier WRITE of its queue pair; a WRITE may
 *   pass a READ. The completion of a WRITE does not mean that it is performed.
 *   A NIC that places out of order executes the requests of a queue pair as they
 *   arrive, so a READ may overtake an earlier WRITE. No read passes a WRITE that was
 *   executed before, and a WRITE completes when it has been executed.
 * initiator (userspace/lib/protocol/): READ with scan or by words, fault, READ again,
 *   words, hold; WRITE on known words with a READ of the words behind it, or after its
 *   completion where a READ may overtake it, proof, repetition, hold. An operation
 *   that has to take effect exactly once is posted under
 *   a hold and relies on it alone. The READ of the words behind it says that it has
 *   been performed. Then the hold is given back, and if the words are not writable the
 *   peer is asked whether the region lives.
 *
 * Abstracted away: one slot, so one lock and one notifier; a slot has one or two pages; a
 * huge page is paged out in parts only; aging; the residency table is always mapped;
 * paging-structure caches; the numbers of sequence counters (a fault's is current or is
 * not); deadlines and BUSY (a fault begins again for ever); loss on the wire; death of
 * regions and peers; stores by the owner's CPU (which are just one more writer of the
 * page); several pieces of one work request; the weak order of CPU stores, of which
 * tools/testing/litmus/ is the proof. max_unproven is smaller than in the engine, so
 * that holds are reached within the bounds.
 */
#ifndef NPRDMA_MODEL_HPP
#define NPRDMA_MODEL_HPP

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace model
{

using u8 = std::uint8_t;

inline constexpr unsigned max_pages = 2;
inline constexpr unsigned max_units = 2;
inline constexpr unsigned max_frames = 4;
inline constexpr unsigned max_peers = 2;
inline constexpr unsigned max_requests = 10;
inline constexpr unsigned prefetcher = max_peers; /* the fault thread of the owner itself */

/* Frames that are none, and what leaves say besides frames */
inline constexpr u8 none = 0xff;
inline constexpr u8 signature_frame = 0xfe;
inline constexpr u8 scratch_frame = 0xfd;
inline constexpr u8 not_present = 0xfc;

/* What a half of a unit holds; fits into a set of eight */
enum value : u8 { zero, page_0, page_1, written_0, written_1, written_2, signature, foreign };

/* A residency word: generation << 2 | writable << 1 | readable */
inline constexpr u8 readable = 1, writable = 2, generation = 4, unknown_word = 0xff;

/*
 * The invariants of the design page; progress is I5, I6 or I7 by what stands in its way. I9 to
 * I11, and that nobody loses his QP for nothing, are those of leases: see lease.hpp.
 */
enum class invariant : u8 { held, i1, i2, i3, i4, i5, i6, i7, i8, read, i9, i10, i11, qp };

/* A protocol step that is missing, swapped or wrong */
enum class mutation : u8 {
	none,
	absent_word_after_leaf,
	absent_word_stays,
	absent_no_flush,
	absent_no_drain,
	absent_flush_before_leaf,
	absent_through_not_present,
	absent_write_leaf_stays,
	resident_no_flush,
	resident_no_drain,
	resident_word_before_leaf,
	resident_word_before_flush,
	resident_through_not_present,
	resident_not_dirty,
	generation_stays,
	generation_on_resident_page,
	retry_check_missing,
	merge_check_missing,
	held_leaf_goes,
	held_word_stays,
	stale_leaf_stays,
	stale_flush_missing,
	stale_mapped_over,
	protect_word_after_leaf,
	protect_word_stays,
	protect_generation_stays,
	protect_no_flush,
	protect_no_drain,
	protect_flush_before_leaf,
	protect_through_not_present,
	protect_leaf_stays,
	protect_although_page_goes,
	protect_held_leaf_goes,
	protect_held_word_stays,
	protect_stale_unmarked,
	split_no_flush,
	split_uncounted,
	split_counted_late,
	split_write_missing,
	huge_one_page_goes,
	huge_words_of_others_stay,
	huge_flush_of_one_page,
	huge_under_hold,
	huge_merge_uncounted,
	huge_merge_counted_early,
	huge_drops_right,
	huge_one_page_dirty,
	pin_check_missing,
	release_not_dirty,
	allocation_under_lock,
	notifier_allocates,
	notifier_waits_for_peer,
	nic_relaxed_ordering,
	nic_splits_units,
	read_not_scanned,
	read_first_unit_scanned,
	read_words_overlap_data,
	read_words_not_known_before,
	read_suspicion_is_final,
	write_not_verified,
	write_words_before_data,
	write_words_in_one_doorbell,
	write_words_not_known_before,
	write_right_unchecked,
	once_released_early,
	once_asks_under_hold,
	hold_never_asked,
	count, /* not one of them */
};

struct work_request {
	bool write;
	u8 first, pages; /* pages of the region */
	u8 unit;         /* only this unit of each page, or none: all */
	bool by_words;   /* a large READ */
	bool once;       /* has to take effect exactly once: a WRITE that relies on its hold alone */
};

/* The last is none that comes by itself: a fault for write finds the page shared. */
enum event : u8 { page_out = 1, clean = 2, move = 4, discard = 8, fork = 16, collapse = 32, copy = 64 };

struct scenario {
	std::string name;
	u8 pages = 1;
	u8 units = 1;
	std::vector<std::vector<work_request>> peers;
	u8 events = page_out;        /* which ones memory management knows */
	u8 budget = 1;               /* how many of them happen */
	u8 prefetches = 0;           /* faults for write by the owner itself */
	u8 present = 0;              /* pages in memory at first, clean; the others are in swap */
	u8 resident = 0;             /* pages that are resident and writable at first; present, too */
	bool entry = false;          /* one entry of the CPU's page table maps the slot at first */
	bool knows = false;          /* the initiators know the words of the start */
	bool user_signature = false; /* page 0 is full of the signature */
	bool reclaims = false;       /* an allocation may reclaim, and wait for that */
	u8 max_unproven = 1;
	bool hold_first = false; /* the initiators' first fault asks for a hold */
	bool overtakes = false;  /* the NIC executes requests as they arrive */
};

enum request_kind : u8 { no_request, data_read, data_write, word_read };

struct request {
	u8 kind, peer, page, unit, half, frame, value, drain, once, executed;
};

enum class fault_pc : u8 {
	idle,
	start,
	pin,
	begin,
	look,
	prepare,
	reclaiming, /* waits for an allocation, that is: for a notifier */
	flush_split,
	count_late,
	lock,
	reclaiming_locked,
	write_leaf,
	write_leaf_late, /* it was not present for a moment */
	read_leaf,
	read_leaf_late,
	flush,
	drain,
	word,
	answered,
};

struct fault {
	fault_pc pc;
	u8 ask, write, hold, huge, splitting, current, unmerged, to_read, to_write, worded;
	std::array<u8, max_pages> frame, pin, word;
};

enum class release_pc : u8 { idle, lock, flush, drain, unlock };

struct release {
	release_pc pc;
	u8 pages, write;
	std::array<u8, max_pages> pin;
};

enum class reclaim_pc : u8 {
	idle,
	callback,
	early_flush,
	write_leaf,
	write_leaf_late,
	read_leaf,
	read_leaf_late,
	flush,
	drain,
	late_word,
	back,
	unmap,
	end,
	write_back,
	free,
	stuck,
};

struct reclaim {
	reclaim_pc pc;
	u8 page, kind, silenced; /* silenced: between the callback and the end */
	u8 pages, to;            /* whose leaves change; the copy of a shared page */
};

enum class stage : u8 { next, read_data, read_words, fetch_words, write_data, write_words, wait, done };

struct peer {
	stage at;
	u8 op, todo, ask, round, unproven, faulted, by_words, hold, hold_write, lost_holds, discarded;
	std::array<u8, max_pages> known, snap, word, landed, pin;
	std::array<std::array<std::array<u8, 2>, max_units>, max_pages> data, allowed;
};

/* Bytes only, so that equal states are equal bytes */
struct state {
	u8 bad; /* invariant that the last step has broken */
	u8 lock;
	u8 huge, entry;                 /* one leaf may map the owner's memory; one entry of the CPU's does */
	std::array<u8, 2> split, large; /* of a window: it has tables; the IOTLB has it as one entry */
	u8 budget, prefetches;
	std::array<std::array<std::array<u8, 2>, max_units>, max_frames> content;
	std::array<u8, max_frames> used, pins;
	/* memory management's view of the pages */
	std::array<u8, max_pages> frame, present, may_write, dirty, shared;
	std::array<std::array<std::array<u8, 2>, max_units>, max_pages> backing;
	/* leaves and cached translations: [0] read window, [1] write window */
	std::array<std::array<u8, max_pages>, 2> leaf, cached;
	/* the core's view */
	std::array<u8, max_pages> word, holds, stale_read, stale_write, times_absent;
	std::array<std::array<u8, max_units>, max_pages> proven;
	std::array<request, max_requests> requests;
	std::array<fault, max_peers + 1> faults;
	std::array<release, max_peers> releases;
	reclaim mm;
	std::array<peer, max_peers> peers;

	/* They are nothing but bytes. */
	bool operator==(const state &other) const { return !std::memcmp(this, &other, sizeof(*this)); }
};

/* What a step was, for a trace; formatted only when somebody wants to read it */
struct label {
	const char *actor;
	const char *what;
	u8 who, page, arg;
};

struct step {
	state to;
	label how;
};

/* All steps that @s can do next, appended to @out. */
void successors(const scenario &sc, mutation m, const state &s, std::vector<step> &out);
[[nodiscard]] state initial(const scenario &sc);
/* Every work request has completed and nobody is in the middle of anything. */
[[nodiscard]] bool is_final(const scenario &sc, const state &s);
/* What is in the way of a state that cannot get to its end any more? */
[[nodiscard]] invariant blame(const scenario &sc, const state &s);

[[nodiscard]] std::string_view name(invariant i);
[[nodiscard]] std::string_view name(mutation m);
[[nodiscard]] std::string describe(const label &l);
/* Words, leaves and who is where, in one line. */
[[nodiscard]] std::string describe(const scenario &sc, const state &s);

[[nodiscard]] const std::vector<scenario> &scenarios();
[[nodiscard]] const scenario *find_scenario(std::string_view name);
/* The same with @more events of memory management and as many more prefetches. */
[[nodiscard]] scenario deeper(scenario sc, unsigned more);

} // namespace model

#endif
