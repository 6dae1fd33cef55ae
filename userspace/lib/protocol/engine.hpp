/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The initiator's protocol for one QP, apart from verbs, threads and clocks.
 *
 * A work request of the application is an *op*. An op on an unpinned region is
 * cut into *pieces* of at most 512 pages, so that one fault request always does
 * for a piece and every buffer has a fixed size. A piece goes round between the
 * send queue, fault requests and waiting until what it moved is proven:
 *
 * READ: what came is scanned for the signature; suspicious pages are asked for
 *   and read again, this time with their residency words known before. If they
 *   still look absent, their words are read after the data came: a word that is
 *   readable and has not changed proves the data (it really equals the
 *   signature). Otherwise the pages are held, and a READ under a hold is final.
 *   A large READ whose words are all known is proven by words at once.
 *   READs that miss one behind the other are one stream: what comes next is asked
 *   for as well, twice as much each time.
 *   One whose data the CPU cannot look at is never scanned, but goes the way of a WRITE:
 *   its pages' words have to be known and readable before it is posted, and what they are
 *   when its data has come decides.
 * WRITE: posted only when the words of all its pages are known and writable. The words
 *   are READ after it: behind it in the same doorbell if the owner's HCA executes a READ
 *   after the earlier WRITEs (premise P1), and else when the WRITE has completed. A word
 *   that is the same as before and writable proves its page (invariant I3); the others are
 *   asked for where needed and written again, at last under a hold, which makes it final.
 * What must take effect exactly once is posted once: an atomic under a hold; and a WRITE
 *   with immediate is a proven WRITE and then, for the receiver's byte count, the same
 *   once more with it. That one needs no hold, whatever page it meets: its data is
 *   there. And it must have none, because it may wait for a receive without limit.
 *   Neither needs P1: the words behind an atomic have a fence, so they are READ when its
 *   answer is there, and behind the repetition with the immediate no words are READ.
 *   With ordered WRITEs (engine_config::ordered_writes) each WRITE is posted once, a piece at a
 *   time: under a lease, or else under a hold, for which it waits as an atomic does. So is one with immediate of no more
 *   than one piece; if its receive does not come before the hold has to go back, or the recalled lease, the peer's kernel
 *   ends the QP. Where no hold can be had a WRITE goes the ordinary way after some time.
 * What is in memory that is leased to this QP is posted once, as it is, but for key and address, and means
 *   what it means for pinned memory: no word is READ, nothing is split or repeated, and the HCA's
 *   completion is the application's. A request is under at most one lease. A lease is asked for when
 *   requests are in the same part of a region again and again, and find their pages there, or on advice; meanwhile they go the
 *   ways above.
 * Under a hold the words are READ as well: one without the right that the hold gave
 *   says that the region has died, or that the owner took the page from itself, which
 *   a pinned region would not notice either; the peer's kernel is asked which.
 *
 * Invariants:
 * - An op completes once, in order, and not while the send queue still refers
 *   to its buffers.
 * - While a WRITE to a region is not proven, nothing later is posted (with
 *   relaxed order: nothing but READs and WRITEs of regions).
 * - What must happen exactly once is posted once.
 * - No request is posted under a lease once its recall has been seen, also if that came before the lease; a
 *   lease is released when all requests under it have completed, and the HCA is made to say so (I9).
 * - No two requests by which the peer's HCA fetches what is scanned have bytes of the same unit.
 * - Requests that consume a receive are never queued ahead of a held request, because
 *   they may wait for longer than the time that the peer gives a hold.
 * - What ends a QP is told once, by the request that failed.
 * - An error that a pinned region's HCA would have found is one of both QPs: the peer's
 *   HCA gets something to refuse.
 * - A word that is used for a proof was known before the work request was
 *   posted: it is copied (snap_) when the request is built.
 * - Keys of a region are in use only while a piece or a lease refers to it; a dead region
 *   is forgotten when none does and no answer that could name it is under way.
 * - The number of rounds of a piece is bounded unless the peer says BUSY, or cannot hold
 *   the memory (no memory for it, a file system that refuses long-term pins): then what
 *   may be repeated is, with ever longer pauses, for as long as the region lives.
 *
 * A key of a whole address space names as many regions as the peer has parts of it, which are resolved by key and
 * address. Each piece is in one part, and all of the above is about pieces. A WRITE with immediate ends with one
 * request for all of it, so it has to be in one part.
 *
 * Local buffers in unpinned regions of our own are held from the post until the
 * completion was polled, so all of the above sees them as pinned ones. Who waits for the peer's kernel gives up what
 * a lease has around them, if that is wanted back: see keep_less().
 *
 * No call allocates, except for the first use of a remote key.
 */
#ifndef NPR_ENGINE_HPP
#define NPR_ENGINE_HPP

#include "protocol/credits.hpp"
#include "protocol/hold_state.hpp"
#include "protocol/opcodes.hpp"
#include "protocol/page_bits.hpp"
#include "protocol/remote_leases.hpp"
#include "protocol/scan.hpp"
#include "protocol/untouched.hpp"
#include "protocol/word_cache.hpp"
#include "world/local_lease.hpp" /* all that it sees of world/: a count that costs no call */

#include <nprdma/nprdma.h>
#include <rdma/nprdma.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace npr {

using nanoseconds = std::uint64_t;

/*
 * A remote key that the peer's kernel is asked about, and where it is to be used: that counts if the key is of a
 * whole address space, which has parts (see rdma_np_region_info.part_shift).
 */
struct remote_key {
	/* Not explicit: for all other keys the number is enough. */
	remote_key(std::uint32_t number, std::uint64_t at = 0, bool is_part = false) noexcept
	    : rkey(number), addr(at), part(is_part)
	{
	}

	std::uint32_t rkey;
	std::uint64_t addr;
	bool part; /* it is asked about as the key of a part: for who asks to know */
};

/* Where the CPU finds a local buffer. */
struct cpu_view {
	std::uint64_t offset = 0; /* from the address in the work request */
	bool opaque = false;	  /* nowhere */
};

/* What the engine needs from the world; none of it may block or throw. */
class backend {
public:
	virtual ~backend() = default;

	/* ibv_post_send(): 0 or an errno, then *bad is the first not posted. */
	[[nodiscard]] virtual int post(ibv_send_wr *chain, ibv_send_wr **bad) noexcept = 0;
	/* 0: exactly one event with this cookie follows. Or a negative errno. */
	[[nodiscard]] virtual int fault(const rdma_np_fault_req &req, std::span<const rdma_np_range> ranges) noexcept = 0;
	virtual void release(std::uint64_t hold) noexcept = 0;
	virtual void forget(std::uint64_t region) noexcept = 0;
	/* Exactly one engine::on_resolved() follows, never from inside this call. */
	virtual void resolve(const remote_key &key) noexcept = 0;
	/* Could this be the key of an unpinned region of ours? */
	[[nodiscard]] virtual bool is_local(std::uint32_t lkey) noexcept = 0;
	/* Is it that of pinned memory, where its addresses say, for all that is known? */
	[[nodiscard]] virtual bool is_plain(std::uint32_t lkey) noexcept = 0;
	/*
	 * A local buffer in an unpinned region is pinned, @write: to be written to. 0, and @sge
	 * is what the HCA shall be given; no_hold: @sge is another one; would_block: it takes longer than a
	 * post may, and the caller of post_send() is told; or a negative errno.
	 * @view in the first two cases. If the hold is of a lease, @ticket is for more of its holds.
	 */
	[[nodiscard]] virtual int hold_local(ibv_sge &sge, bool write, std::uint32_t &hold, cpu_view &view,
					     local_ticket &ticket) noexcept = 0;
	virtual void free_local(std::uint32_t hold) noexcept = 0;
	static constexpr int no_hold = 1, would_block = 2;
	/* Are there holds that keep more than their buffers, which is wanted back: of leases that were recalled? */
	[[nodiscard]] virtual bool local_wanted() noexcept = 0;
	/*
	 * If @hold, of the local buffer @sge as the CPU sees it, is one of those, a hold of the buffer alone takes its place: 0, and
	 * @hold and @wire, what the HCA shall be given, are new. no_hold: it is none, or that cannot be done now, and nothing has
	 * changed. Or a negative errno: the buffer is not held any more.
	 */
	[[nodiscard]] virtual int narrow_local(const ibv_sge &sge, bool write, std::uint32_t &hold, ibv_sge &wire) noexcept = 0;
	/* Move the QP to the error state: what it has posted is flushed. */
	virtual void fail_qp() noexcept = 0;
	/* Does our side of the connection still stand? Asked when something has failed. */
	[[nodiscard]] virtual bool connected() noexcept = 0;
	[[nodiscard]] virtual nanoseconds now() noexcept = 0;
	/* The same as of the last timer tick: it may be some milliseconds behind, and costs no system call. */
	[[nodiscard]] virtual nanoseconds recently() noexcept = 0;
};

struct engine_config {
	std::uint32_t depth = 0;	  /* ops */
	std::uint32_t sq_budget = 0;	  /* send queue entries, at least 2 */
	credits *pool = nullptr;	  /* of the CQ, for these */
	std::uint32_t max_sge = 1;
	std::uint32_t max_inline = 0;
	std::uint32_t max_faults = 1;	  /* requests under way */
	std::uint32_t cache_slots = 2048;
	std::uint32_t read_words_min = 0; /* bytes; 0: never */
	std::uint32_t qp_num = 0;
	std::uint32_t tag = 0;		  /* upper bits of wr_ids on the wire, any number */
	std::uint16_t cookie = 0;	  /* upper bits of cookies */
	bool sq_sig_all = false;
	bool relaxed = false;
	bool ordered_writes = false;	  /* the bytes of a WRITE land once, lower addresses first */
	bool local_only = false;	  /* UC, UD: remote keys are not looked at */
	bool local = false;		  /* unpinned local buffers are looked for */
	bool leases = false;		  /* of the peer's memory are asked for: then call age_leases() */
	bool opaque_sinks = false;	  /* what READs bring is not to be looked at */
	/* Another value at least whenever a key becomes that of an unpinned region of ours; with @local. Null: nobody says. */
	const std::atomic<std::uint64_t> *local_keys = nullptr;
	std::span<std::uint64_t> words;	  /* memory that residency words are read into */
	std::uint32_t words_lkey = 0;	  /* its key, when the first region is resolved; see use_words() */
};

class engine {
public:
	static constexpr std::uint32_t min_words = 1024; /* two of the largest pieces */
	/* No region has this key, nor the last byte there is. */
	static constexpr std::uint32_t refused_key = 0;
	static constexpr std::uint64_t refused_addr = ~0ULL;

	/* Throws std::bad_alloc. */
	engine(const engine_config &config, backend &world);
	engine(const engine &) = delete;
	engine &operator=(const engine &) = delete;
	~engine();

	/*
	 * As npr_post_send(); @whole: on error none of the list is accepted. Or backend::would_block, as an error of
	 * the request: it may be posted again.
	 */
	[[nodiscard]] int post_send(ibv_send_wr *wr, ibv_send_wr **bad, bool whole = false) noexcept;
	/*
	 * What the provider is to be given for @wr, which is no list, if it is like the last one that was posted by this or
	 * by post_other(): then there is nothing else to do unless the provider refuses it, which hot_refused() is to know. Null:
	 * it is for post_other(), and nothing has changed. @recalls(): there may be recalls that the engine has not heard of.
	 */
	template <class F> [[nodiscard, gnu::always_inline]] ibv_send_wr *post_hot(const ibv_send_wr &wr, F &&recalls) noexcept;
	/*
	 * The same if it is not like the last one, but goes the way that those go which have just been quick. Null: it is for
	 * post_quick(). The engine has heard of all recalls.
	 */
	[[nodiscard]] ibv_send_wr *post_other(const ibv_send_wr &wr) noexcept;
	void hot_refused() noexcept;
	/* The next request is for post_quick(). */
	void cool() noexcept { expand(); }
	/*
	 * One request, which is no list, if it needs no detour. False, and nothing has changed; or it is accepted, and then
	 * there is nothing else to do unless the engine has ended().
	 */
	[[nodiscard]] bool post_quick(const ibv_send_wr &wr) noexcept;
	[[nodiscard]] bool ended() const noexcept { return trouble_.dead; }
	/* Nothing waits that step() could run. */
	[[nodiscard]] bool calm() const noexcept
	{
		return next_ == tail_ && !(trouble_.any() | state_.waits | state_.chained);
	}
	/* Is there anything under way that does not end unless the application, or somebody for it, polls? */
	[[nodiscard]] bool waits_for_turns() const noexcept
	{
		return (next_ != tail_ || !state_.quiet()) && !trouble_.dead;
	}
	/*
	 * Nobody looks at the application's buffers: it may have unmapped some, without a word to us, which is no
	 * harm where it is not the application that polls. What a READ has brought is proven by words then.
	 */
	void be_blind(bool blind) noexcept { blind_ = blind; }
	/* False: not one of ours. Then step() once after a batch of these. */
	[[nodiscard, gnu::noinline]] bool on_cqe(const ibv_wc &wc) noexcept;
	/*
	 * Most completions are of what was posted as it is, and of nothing else: then on_cqe(), step() and poll() come to
	 * this, and the HCA's completion is the application's, but for the number. What this has not done of one, on_cqe() does.
	 *
	 * In short: it is for on_cqe(); or it was done, and there is nothing for the application, or the completion that
	 * @wc has become.
	 */
	enum class quick_end : std::uint8_t { no, silent, told };
	[[nodiscard, gnu::noinline]] quick_end quick_cqe(ibv_wc &wc) noexcept;
	/*
	 * The same of what was posted as the last one was, and is the oldest. True: it was done, and is for the application.
	 * False: it is for quick_cqe(), and nothing has changed. The caller knows that it is no receive.
	 */
	[[nodiscard, gnu::always_inline]] bool hot_cqe(ibv_wc &wc) noexcept;
	void on_event(const rdma_np_event &event) noexcept;
	/* The key of the words, before the first region is known. */
	void use_words(std::uint32_t lkey) noexcept { config_.words_lkey = lkey; }
	/* @key: as backend::resolve() was told; @error: 0 or a negative errno. */
	void on_resolved(const remote_key &key, int error, const rdma_np_region_info &info) noexcept;
	/* Run what has become possible, timers too. */
	[[gnu::noinline]] void step() noexcept;

	/* The next completion for the application. */
	[[nodiscard]] bool poll(ibv_wc &wc) noexcept;
	[[nodiscard]] bool ready() const noexcept { return head_ < tail_ - briefs() && complete(head_); }
	/* Does it wait for its clock? */
	[[nodiscard]] bool pauses() const noexcept { return !pausing_.empty(); }
	/* Are answers of the kernel under way? */
	[[nodiscard]] bool waits_for_kernel() const noexcept { return faults_ || resolves_; }
	/* There are leases, or are to come: so may recalls. */
	[[nodiscard]] bool has_leases() const noexcept { return !leases_.empty() || asked_leases_; }
	/* Does one wait for completions to go back? */
	[[nodiscard]] bool ends_leases() const noexcept { return leases_.any_ends(); }
	[[nodiscard]] bool waits_for_wire() const noexcept { return sq_head_ != sq_tail_; }
	/* Credits that it has found too few of, at once; there have to be so many as credits_level() says. */
	[[nodiscard]] std::uint32_t credits_wanted() const noexcept { return wanted_; }
	[[nodiscard]] std::uint32_t credits_level() const noexcept { return level(wanted_); }
	[[nodiscard]] bool idle() const noexcept { return head_ == tail_ && !faults_ && !resolves_; }
	/* Is anything posted that is not known to have succeeded? */
	[[nodiscard]] bool unfinished() const noexcept;
	/* As after an error: nothing is begun or asked for any more, and every hold is given back. */
	void end() noexcept
	{
		expand();
		die();
	}
	/* Give back what local buffers hold: nothing is posted any more, nothing will complete. */
	void abandon() noexcept;
	/* Every 100 ms or so: leases that were not used since the last time go back. Then step(). */
	void age_leases() noexcept;
	/* When step() is to be called at the latest. */
	[[nodiscard]] std::optional<nanoseconds> deadline() const noexcept;

	/*
	 * An npr_resolve() outside of the engine, which began at @asked: between the two no
	 * region is forgotten. Returns error, or -EPROTO if info makes no sense.
	 */
	void resolve_begins() noexcept { ++resolves_; }
	int resolve_ended(const remote_key &key, int error, const rdma_np_region_info &info, nanoseconds asked) noexcept;
	[[nodiscard]] std::int64_t prefetch(std::uint32_t rkey, std::uint64_t addr, std::uint64_t length,
					    bool write) noexcept;
	/* See npr_advise(). */
	[[nodiscard]] int advise(std::uint32_t rkey, std::uint64_t addr, std::uint64_t length, npr_advice advice) noexcept;

	[[nodiscard]] npr_stats stats() const noexcept;
	/* Remote keys of which something is known. */
	[[nodiscard]] std::size_t keys() const noexcept { return bindings_.size(); }
	/* So many keys that are of no region are kept: an application may use new ones for ever. */
	static constexpr std::size_t max_loose_keys = 1024;

private:
	static constexpr std::uint32_t none = ~0U;
	static constexpr std::uint32_t max_length = 1U << 31; /* bytes of a request: the InfiniBand specification's */
	static constexpr unsigned max_prefetches = 8;
	static constexpr unsigned max_lease_asks = 4;
	static constexpr std::uint64_t max_advised = 64; /* parts, by one call; a few of 256 places for candidates each */
	/* What the lowest bits of cookies begin with: pieces, then leases, then prefetches. */
	static constexpr std::uint32_t prefetch_cookie = 0x10000 - max_prefetches;
	static constexpr std::uint32_t lease_cookie = prefetch_cookie - max_lease_asks;
	/* What a peer's kernel promises of a key that is no region's: see RESOLVE in rdma/nprdma.h. */
	static constexpr nanoseconds plain_time = nanoseconds{RDMA_NP_PINNED_MS} * 1'000'000;
	static constexpr unsigned max_renewals = 8;
	/* A READ that misses no more than this behind what was asked for goes on there. */
	static constexpr std::uint64_t sequential_gap = 32;
	static constexpr std::uint32_t quick_pages = 16; /* of a WRITE that quick_move() takes */
	static constexpr nanoseconds min_backoff = 20'000;
	static constexpr nanoseconds max_backoff = 20'000'000;
	/* What cannot do without a hold asks for it so long while the peer has no memory. */
	static constexpr nanoseconds hold_patience = 10'000'000'000;

	/* A place in a ring of keys, or its head. It stays where it is. */
	struct key_ring {
		key_ring *prev = this, *next = this;
		key_ring() noexcept = default;
		key_ring(const key_ring &) = delete;
		key_ring &operator=(const key_ring &) = delete;
		[[nodiscard]] bool empty() const noexcept { return next == this; }
		void unlink() noexcept
		{
			prev->next = next;
			next->prev = prev;
			prev = next = this;
		}
		/* As the last one; of a place that is in no ring. */
		void append(key_ring &k) noexcept
		{
			k.prev = prev;
			k.next = this;
			prev = prev->next = &k;
		}
	};

	struct region {
		rdma_np_region_info info; /* of a part: there are others, for other addresses of the key */
		std::uint32_t uid;	 /* for the word cache */
		std::uint32_t refs = 0; /* pieces and leases */
		bool gone = false;
		key_ring keys;		/* those bound to it */
		region *unused = nullptr; /* the next one on unused_ */
		/* P1: a READ does not overtake an earlier WRITE. Unknown counts as no. */
		[[nodiscard]] bool in_order() const noexcept { return info.read_order == RDMA_NP_READ_IN_ORDER; }
		/* sequential READs: the first page not asked for, and how far ahead to ask */
		std::uint64_t ahead = 1ULL << 63;
		std::uint32_t window = 0;
	};

	/* Of a lease, for more requests under it. */
	struct lease_hint {
		std::uint64_t first = 0, length = 0; /* in the application's addresses */
		std::uint64_t delta = 0;	     /* from these to that under @rkey */
		std::uint64_t version = 0;	     /* of leases_, when it was like this; 0: there is none */
		std::uint32_t lease = none, rkey = 0;
		opcodes may; /* what may be done under it */
	};

	/* whole: the key is of a whole address space, whose parts have bindings of their own */
	enum class binding_state : std::uint8_t { unknown, asked, plain, bound, whole };
	/* Of which addresses of a key: of all, or of one part, whose number is one less. */
	struct binding_name {
		std::uint32_t rkey;
		std::uint64_t part = 0;
		[[nodiscard]] bool operator==(const binding_name &) const noexcept = default;
	};
	struct hash_name {
		[[nodiscard]] std::size_t operator()(const binding_name &n) const noexcept
		{
			return std::hash<std::uint64_t>{}(n.rkey ^ n.part * 0x9e3779b97f4a7c15U);
		}
	};
	/* In the ring of its region, or among the loose ones. */
	struct binding : key_ring {
		std::uint32_t rkey = 0;
		std::uint64_t part = 0;
		binding *last = nullptr; /* state whole: the part that was used last */
		binding_state state = binding_state::unknown;
		bool seen = false; /* used since drop_key() came by */
		bool renews = false; /* one of those counted in renewals_ is for it */
		std::uint32_t asks = 0; /* RESOLVEs of ours that are not answered */
		region *to = nullptr;
		lease_hint hint; /* what is behind it belongs to @to */
		/* when the first of these was asked, and the requests that there were then */
		nanoseconds asked = 0;
		std::uint64_t tail = 0;
		/* state plain: for how long it is; see is_plain() */
		nanoseconds until = 0;
		std::uint64_t upto = 0; /* those below had been posted when what is known was asked for */
	};

	enum class op_kind : std::uint8_t { undecided, pass, leased, read, write, once };
	/* Of one that is posted as it is, what is behind "below" is not filled in. */
	struct op {
		ibv_send_wr wr;		   /* sg_list: our copy, as the CPU sees it */
		std::uint32_t held;	   /* local holds, behind wire */
		std::uint32_t hold;	   /* the first of them */
		std::uint32_t length;
		std::uint32_t lease;	   /* if it is leased */
		std::uint32_t vendor_err;
		ibv_wc_status status;
		std::uint32_t slots;	   /* send queue entries */
		op_kind kind;
		bool opaque; /* a READ: sg_list means nothing to the CPU */
		bool started;
		bool finished;
		/* below: */
		std::uint32_t issued;	   /* bytes that have a piece */
		std::uint32_t pieces;	   /* live */
		ibv_sge *wire;		   /* as the HCA sees it: the application's, or with keys of holds */
	};

	/* How a request ends that was posted as it is: compared, and kept, as one word. */
	struct ending {
		std::uint8_t opcode;
		std::uint8_t send_flags; /* the application's; there are no higher ones that anybody asks for later */
		bool leased;		 /* under a lease of a region; otherwise it is to no region */
		std::uint8_t held;	 /* local holds */
		std::uint32_t hold;	 /* the first one; others are where an op has them */

		[[nodiscard]] bool operator==(const ending &e) const noexcept
		{
			return std::bit_cast<std::uint64_t>(*this) == std::bit_cast<std::uint64_t>(e);
		}
	};
	static constexpr std::uint32_t max_held = 0xff;

	/*
	 * Of a request that was posted as it is, all that its end needs, by its entry of the send queue. Only if more becomes
	 * of it than that it succeeds, or something else has to be thought of, it gets an op and a slot; see expand().
	 */
	struct brief {
		std::uint64_t wr_id;
		ending end;
		std::uint32_t length;
		std::uint32_t lease; /* none: it is under no lease */
	};

	/* What a piece does when the send queue has room for it, or waits for there. */
	enum class stage : std::uint8_t {
		unused,	     /* of no request */
		dropped,     /* its request has failed: it waits for its entries of the send queue to end */
		quick_read,  /* this and the next two: of what quick_move() has not filled in nothing means anything */
		quick_write, /* only the WRITE is posted: its words wait for its completion */
		quick_words,
		read_data,
		read_warming, /* the same, and words go before it: they are for the next READ here */
		read_known,   /* of pages whose words are all known, and are to prove it: known_words comes next */
		known_words,
		read_words,
		write_decide, /* fetch words, ask for pages, or write; or read what is opaque */
		fetch_words,
		write_data,  /* only the WRITEs are posted: the words wait for their completion */
		write_words,
		tail, /* of a WRITE with immediate: all of it is proven */
		barrier, /* before a hold: all that was posted before is to be done */
		fault, /* asks for pages, waits for its turn (asking_), or for its clock (pausing_) */
		doubt, /* the same, of what happened under a hold, which went back: did the region live? */
		rebind, /* for the region, which died, to be resolved again */
		plain, /* post with the key as it is, which names pinned memory by now */
	};

	struct list {
		std::uint32_t first = none;
		std::uint32_t last = none;
		[[nodiscard]] bool empty() const noexcept { return first == none; }
	};

	struct piece {
		std::uint64_t op;	/* index of the op */
		region *reg;
		list *on;		/* the list it is on */
		std::uint32_t prev, next;
		std::uint32_t generation; /* of the cookie */
		std::uint32_t offset, length; /* bytes of the op */
		std::uint32_t pages;
		std::uint64_t first_page; /* index in the region */
		hold_state hold;
		nanoseconds wake, pause;
		nanoseconds short_since; /* the peer has no memory for a hold; 0: has it, for all that is known */
		std::uint32_t slots;
		std::uint32_t ring;	/* record in the word ring */
		std::uint32_t ring_offset;
		std::uint64_t ring_page; /* first page whose word is there */
		std::uint32_t ring_pages;
		stage at;
		std::uint8_t round;	/* of a READ */
		std::uint8_t unproven;	/* WRITEs without proof */
		std::uint8_t fetches;
		std::uint8_t faulted;	/* fault requests that were served, and of a READ have brought something */
		std::uint8_t rebinds;
		page_bits todo;		/* not proven */
		page_bits ask;		/* of these, to be asked for */
	};

	struct slot {
		std::uint64_t op;
		std::uint32_t piece;
	};

	struct ring_record {
		std::uint32_t offset, size;
		bool free;
	};

	struct prefetch_slot {
		std::uint32_t uid = 0;
		std::uint32_t pages = 0;
		std::uint64_t page = 0;
	};

	/* A FAULT that asks for a lease. */
	struct lease_ask {
		std::uint64_t key = 0; /* of the part; 0: none is under way */
		std::uint64_t region = 0;
		std::uint64_t start = 0; /* of the part */
		std::uint32_t generation = 0; /* of the cookie */
		bool write = false;
		bool unwanted = false; /* it goes back when it comes */
	};

	/* A request that the HCA has, or had, as it is: what becomes of it is the HCA's to say. */
	[[nodiscard]] static bool as_it_is(const op &o) noexcept
	{
		return o.kind == op_kind::pass || o.kind == op_kind::leased;
	}

	/* A failed request has status, all are "complete" only once the QP is dead, if that is ours to say. */
	[[nodiscard]] bool complete(std::uint64_t i) const noexcept
	{
		const op &o = op_at(i);
		return o.status == IBV_WC_SUCCESS ? o.finished : (trouble_.dead || config_.local_only) && o.slots == 0;
	}

	[[nodiscard]] op &op_at(std::uint64_t i) noexcept { return ops_[i & op_mask_]; }
	[[nodiscard]] const op &op_at(std::uint64_t i) const noexcept { return ops_[i & op_mask_]; }
	/* Of op @i: as the CPU sees them, and max_sge further on as the HCA does. */
	[[nodiscard]] ibv_sge *sges_of(std::uint64_t i) noexcept { return &op_sges_[2 * (i & op_mask_) * config_.max_sge]; }

	/* Does something posted wait for the peer to post a receive? Then what is posted behind it does, too. */
	[[nodiscard]] bool stalled() const noexcept { return sq_head_ < stalls_; }


	/* the quick path: false, and nothing has changed, or the request is begun */
	[[nodiscard]] bool post_of_list(const ibv_send_wr &wr, bool last) noexcept;
	template <bool write>
	[[nodiscard]] bool quick_move(const ibv_send_wr &wr, region &r, bool last) noexcept;
	enum class place : std::uint8_t { alone, last, inside }; /* of a request in its list */
	template <bool leased, place at>
	[[nodiscard]] bool quick_pass(const ibv_send_wr &wr, unsigned traits, binding *b) noexcept;
	[[nodiscard, gnu::noinline]] bool post_disturbed(const ibv_send_wr &wr, bool last) noexcept;
	template <place at>
	[[nodiscard]] bool route_quick(const ibv_send_wr &wr) noexcept;
	[[nodiscard, gnu::noinline]] bool hold_all(ibv_send_wr &w, std::uint32_t &held, std::uint32_t &hold) noexcept;
	[[nodiscard, gnu::noinline]] bool look_for_lease(const ibv_send_wr &wr, std::uint32_t length, binding &b) const noexcept;
	[[nodiscard, gnu::noinline]] bool move_quick(const ibv_send_wr &wr, binding &b, bool last) noexcept;
	/* A request of a region is done. */
	[[gnu::always_inline]] void count(ibv_wr_opcode opcode, std::uint32_t length) noexcept
	{
		++done_[opcode].requests;
		done_[opcode].bytes += length;
	}
	[[nodiscard]] quick_end end_brief(ibv_wc &wc) noexcept;
	[[nodiscard]] quick_end end_quick(ibv_wc &wc) noexcept;
	[[gnu::noinline]] void free_buffers(const brief &b) noexcept;
	/* Requests that are brief. */
	[[nodiscard]] std::uint64_t briefs() const noexcept { return sq_tail_ - std::max(first_brief_, sq_head_); }
	/*
	 * Nothing is brief any more, and the hot path is closed: whoever calls this may think of ops and slots alone. So does
	 * every call but those of the quick path.
	 */
	void expand() noexcept
	{
		if (first_brief_ != sq_tail_ || hot_.most)
			expand_all();
	}
	[[gnu::noinline]] void expand_all() noexcept;
	[[gnu::noinline]] void open_hot(const binding *b) noexcept;
	void aim(const ibv_send_wr &wr, const ending &end, std::uint32_t length, bool plain) noexcept;
	void forget_last() noexcept;
	/* The entry that is the oldest by now. */
	void follow() noexcept { hot_.next = hot_.most && sq_head_ >= first_brief_ ? sq_id(sq_head_) : no_id(); }
	/* The number of no entry: none has one below the first. */
	[[nodiscard]] std::uint64_t no_id() const noexcept { return first_id_ - 1; }
	/* The number of buffers and the opcode, as one. */
	[[nodiscard, gnu::always_inline]] static std::uint64_t kind_of(const ibv_send_wr &wr) noexcept
	{
		return std::uint64_t{static_cast<std::uint32_t>(wr.opcode)} << 32 | static_cast<std::uint32_t>(wr.num_sge);
	}
	/* @flags of one more request, with whether the HCA is to tell of it. */
	[[nodiscard, gnu::always_inline]] unsigned signal(unsigned flags) noexcept
	{
		const std::uint32_t unsignaled = unsignaled_ + 1;

		if (unsignaled >= signal_every_ || !credits_.tail_may_grow())
			flags |= IBV_SEND_SIGNALED;
		set_tail(flags & IBV_SEND_SIGNALED ? 0 : unsignaled);
		return flags;
	}
	[[nodiscard, gnu::always_inline]] bool take_ticket() noexcept
	{
		if (ticket_.take()) [[likely]]
			return true;
		world_.free_local(ticket_.token());
		return false;
	}
	op &begin(const ibv_send_wr &wr, op_kind kind, std::uint32_t length) noexcept;
	/* Does the application hear of it if it succeeds? */
	[[nodiscard]] bool tells(unsigned send_flags) const noexcept
	{
		return (send_flags | hot_.signals) & IBV_SEND_SIGNALED;
	}
	[[nodiscard]] bool tells(const op &o) const noexcept { return tells(o.wr.send_flags); }
	void fill(ibv_wc &wc, const op &o, ibv_wc_status status) const noexcept;
	[[nodiscard]] bool needs_hold(const ibv_send_wr &wr) const noexcept;
	[[nodiscard]] bool takes_all(const ibv_send_wr *wr) const noexcept;

	/* ops */
	[[nodiscard, gnu::noinline]] int check(const ibv_send_wr &wr, std::uint64_t &length) const noexcept;
	[[nodiscard]] int accept(const ibv_send_wr &wr) noexcept;
	[[nodiscard]] int hold_buffers(std::uint64_t i) noexcept;
	[[gnu::noinline]] void free_buffers(op &o) noexcept;
	void retract(std::uint64_t first) noexcept;
	/* Hold @k of op @i. */
	[[nodiscard]] std::uint32_t &hold_of(op &o, std::uint64_t i, std::uint32_t k) noexcept
	{
		return k ? op_holds_[(i & op_mask_) * config_.max_sge + k] : o.hold;
	}
	[[nodiscard]] bool classify(std::uint64_t i) noexcept;
	[[nodiscard]] bool lands_once(const op &o, const region &r) const noexcept;
	[[nodiscard]] bool must_wait(const op &o) const noexcept;
	[[nodiscard]] bool allowed(const ibv_send_wr &wr, std::uint32_t length, const region &r) const noexcept;
	[[nodiscard]] static bool has_right(const ibv_send_wr &wr, const region &r) noexcept;
	[[nodiscard]] bool may_go_on(const op &o, const region &r) const noexcept;
	[[nodiscard]] bool serves(const region &r, const piece &p) const noexcept;
	void issue() noexcept;
	void finish(op &o) noexcept;
	[[nodiscard]] std::uint32_t &live(const op &o) noexcept;
	void drop_silent() noexcept;
	[[nodiscard]] ibv_wc_status not_connected() noexcept;
	void fail_op(std::uint64_t i, ibv_wc_status status) noexcept;
	void settle_failure() noexcept;
	void die() noexcept;
	void flush_rest() noexcept;

	/* pieces */
	[[nodiscard]] bool has_piece() noexcept;
	/* Is there anything that it may still do for its request? */
	[[nodiscard]] static bool is_live(const piece &p) noexcept { return p.at > stage::dropped; }
	[[nodiscard]] static bool is_quick(const piece &p) noexcept
	{
		return p.at >= stage::quick_read && p.at <= stage::quick_words;
	}
	[[nodiscard]] bool start_piece(op &o, std::uint64_t i) noexcept;
	void reset_piece(piece &p, region &r) noexcept;
	void go_plain(piece &p) noexcept;
	void end_piece(piece &p) noexcept;
	void drop_piece(piece &p) noexcept;
	void free_piece(piece &p) noexcept;
	void proceed(piece &p) noexcept;
	void proceed_first(piece &p) noexcept;
	[[nodiscard]] bool try_post(piece &p) noexcept;
	void arrived(piece &p) noexcept;
	void learn_words(piece &p) noexcept;
	void read_arrived(piece &p) noexcept;
	void unpack(piece &p) noexcept;
	void read_words_arrived(piece &p) noexcept;
	void write_words_arrived(piece &p) noexcept;
	[[nodiscard]] bool post_read(piece &p) noexcept;
	[[nodiscard]] bool post_words(piece &p) noexcept;
	[[nodiscard]] bool decide_write(piece &p) noexcept;
	[[nodiscard]] bool post_fetch(piece &p) noexcept;
	[[nodiscard]] bool post_write(piece &p) noexcept;
	[[nodiscard]] bool post_once(piece &p) noexcept;
	[[nodiscard]] bool post_tail(piece &p) noexcept;
	[[nodiscard]] bool post_plain(piece &p) noexcept;
	[[nodiscard]] bool post_barrier(piece &p) noexcept;
	void end_hold(piece &p) noexcept { release_if(p.hold.end(state_.holds_wanted)); }
	void release_if(std::uint64_t hold) noexcept
	{
		if (hold)
			world_.release(hold);
	}
	void ask(piece &p, bool hold) noexcept;
	void read_ahead(region &r, std::uint32_t rkey, std::uint64_t first, std::uint64_t end) noexcept;
	void send_fault(piece &p) noexcept;
	[[nodiscard]] bool are_known(const piece &p, const rdma_np_event &e) noexcept;
	void fault_served(piece &p, const rdma_np_event &event) noexcept;
	void doubt_hold(piece &p) noexcept;
	void go_without_hold(piece &p, bool for_good) noexcept;
	void hold_answered(piece &p, std::uint32_t status) noexcept;
	void back_off(piece &p) noexcept;
	void keep_less() noexcept;
	[[nodiscard]] bool narrow_buffers(std::uint64_t i) noexcept;
	[[nodiscard]] bool waits_for_memory(piece &p) noexcept;
	void rebind(piece &p) noexcept;
	[[nodiscard]] bool scan(piece &p) noexcept;
	/* Of what is posted, and asked for, at once. */
	[[nodiscard]] unsigned max_runs(const piece &p) const noexcept
	{
		return std::min(max_entries_ - 1, p.reg->info.max_ranges);
	}

	/* leases */
	[[nodiscard]] std::optional<remote_leases::range> lease_range(const ibv_send_wr &wr, std::uint32_t length,
								      const region &r) const noexcept;
	[[nodiscard]] std::uint32_t find_lease(const ibv_send_wr &wr, std::uint32_t length,
					       const region &r) const noexcept;
	/* Without a lease it takes a hold, whether its pages are there or not. */
	[[nodiscard]] bool needs_hold(const op &o) const noexcept
	{
		return o.kind == op_kind::once || (o.kind == op_kind::write && config_.ordered_writes);
	}
	void want_lease(const ibv_send_wr &wr, std::uint32_t length, const region &r, bool now) noexcept;
	[[nodiscard]] int advise_region(const region &r, std::uint32_t rkey, std::uint64_t addr, std::uint64_t length,
					npr_advice advice) noexcept;
	void use_seldom(const region &r, std::uint64_t addr, std::uint64_t last) noexcept;
	[[nodiscard]] static int prefetch_error(const region &r, std::uint64_t addr, std::uint64_t length, bool write) noexcept;
	void lease_answered(std::uint32_t k, const rdma_np_event &e) noexcept;
	[[nodiscard]] bool granted(const lease_ask &q, const rdma_np_event &e) noexcept;
	void recalled(std::uint64_t hold) noexcept;
	void end_lease(std::uint32_t n) noexcept;
	[[gnu::noinline]] void lease_ended(std::uint32_t n) noexcept;
	void release_unused(std::uint64_t hold) noexcept;

	/* regions and keys */
	[[nodiscard]] binding *&recent(std::uint32_t rkey) noexcept
	{
		/* The upper bits: in keys of some HCAs the lower eight are all the same. */
		return recent_[rkey * 0x9e3779b1U >> (32 - recent_bits)];
	}
	[[nodiscard]] binding *find_key(std::uint32_t rkey) noexcept
	{
		binding *b = recent(rkey);

		return b && b->rkey == rkey ? b : look_up(rkey);
	}
	/* What is known of a key where it is used: never of a whole. */
	[[nodiscard]] binding *find_binding(std::uint32_t rkey, std::uint64_t addr) noexcept
	{
		binding *b = find_key(rkey);

		return b && b->state == binding_state::whole ? find_part(*b, addr) : b;
	}
	[[nodiscard, gnu::noinline]] binding *look_up(std::uint32_t rkey) noexcept;
	[[nodiscard, gnu::noinline]] binding *find_part(binding &whole, std::uint64_t addr) noexcept;
	[[nodiscard]] binding_name part_name(std::uint32_t rkey, std::uint64_t addr) const noexcept
	{
		return {rkey, (addr >> part_shift_) + 1};
	}
	[[nodiscard]] binding *make_binding(std::uint32_t rkey, std::uint64_t addr) noexcept;
	[[nodiscard]] binding *make_named(const binding_name &name) noexcept;
	[[nodiscard]] binding *find_named(const binding_name &name) noexcept;
	[[nodiscard]] binding *asked_about(const remote_key &key) noexcept;
	void bind(binding &b, binding_state state, region *r = nullptr) noexcept;
	void erase(binding &b) noexcept;
	void drop_key() noexcept;
	void ask_resolve(binding &b, std::uint64_t addr) noexcept;
	void ask_afresh(binding &b, std::uint64_t addr) noexcept;
	void send_resolve(binding &b, std::uint64_t addr) noexcept;
	[[nodiscard]] bool is_plain(binding &b, std::uint64_t i) noexcept;
	[[nodiscard]] bool stays_plain(binding &b) noexcept;
	/* The same of a request like the last one that open_hot() was told of. */
	[[nodiscard]] bool is_hot_plain(const ibv_send_wr &wr) const noexcept
	{
		return (is_atomic(wr.opcode) ? wr.wr.atomic.rkey : wr.wr.rdma.rkey) == hot_.rkey && world_.recently() < hot_.plain_until;
	}
	[[nodiscard]] static bool answered_for(const binding &b, std::uint64_t i) noexcept { return i < b.upto; }
	void make_plain(binding &b, int error, nanoseconds asked, std::uint64_t tail) noexcept;
	[[nodiscard]] int vet(const remote_key &key, int error, const rdma_np_region_info &info) noexcept;
	void adopt(const remote_key &key, int error, const rdma_np_region_info &info, nanoseconds asked,
		   std::uint64_t tail) noexcept;
	void answer_waiting(const remote_key &key, int error, bool failed) noexcept;
	[[nodiscard]] region *find_region(std::uint64_t id) noexcept;
	[[nodiscard]] region *make_region(const rdma_np_region_info &info) noexcept;
	void region_dies(region &r) noexcept;
	void decline(const rdma_np_region_info &info) noexcept;
	void retire(region &r) noexcept;
	void forget_dead() noexcept;
	void unref(piece &p) noexcept;
	void unref(region &r) noexcept;
	void event_words(std::uint32_t uid, std::uint64_t first, std::uint32_t pages, const rdma_np_event &e) noexcept;

	/* the send queue */
	/* Credits that there have to be for @n more entries. What ends a dead queue it needs to give back the rest. */
	[[nodiscard]] std::uint32_t level(std::uint32_t n) const noexcept { return trouble_.dead ? n : under_way() + n; }
	[[nodiscard]] std::uint32_t under_way() const noexcept
	{
		return static_cast<std::uint32_t>(sq_tail_ - sq_head_);
	}
	/* For @n more entries, now, of a queue that lives. */
	[[nodiscard]] bool has_room(std::uint32_t n) const noexcept
	{
		return under_way() + n <= std::min(config_.sq_budget, credits_.free());
	}
	/* If it is for want of credits that there is no room, that is remembered until step(). */
	[[nodiscard]] bool room(std::uint32_t n) noexcept
	{
		if (under_way() + n > config_.sq_budget)
			return false;
		if (level(n) <= credits_.free())
			return true;
		wanted_ = n;
		return false;
	}
	void set_tail(std::uint32_t n) noexcept
	{
		credits_.tail(unsignaled_, n);
		unsignaled_ = n;
	}
	[[nodiscard]] ibv_send_wr &push(std::uint64_t i, piece *p, bool signaled) noexcept;
	void push_drain() noexcept;
	void push_refused(std::uint64_t i) noexcept;
	void push_data(piece &p, std::uint64_t start, std::uint64_t length, bool signaled) noexcept;
	void push_once(piece &p, bool signaled) noexcept;
	void push_words(piece &p, bool signaled, unsigned flags = 0) noexcept;
	[[nodiscard, gnu::noinline]] std::uint32_t send_chain() noexcept;
	[[gnu::noinline]] void flush() noexcept;
	[[nodiscard]] std::uint32_t posted(const ibv_send_wr *bad) const noexcept;
	[[gnu::noinline]] void not_posted(std::uint32_t n) noexcept;
	/* The wr_id on the wire of entry @i. */
	[[nodiscard]] std::uint64_t sq_id(std::uint64_t i) const noexcept { return first_id_ + i; }
	[[nodiscard]] bool take_ring(piece &p, std::uint64_t page, std::uint32_t pages) noexcept;
	void give_ring(piece &p) noexcept;
	void snapshot(piece &p) noexcept;

	struct bytes {
		std::uint64_t start, length;
	};
	[[nodiscard]] bytes run_bytes(const piece &p, page_bits::run r) const noexcept;

	/* lists */
	[[nodiscard]] std::uint32_t index(const piece &p) const noexcept
	{
		return static_cast<std::uint32_t>(&p - pieces_.data());
	}
	void put(list &l, piece &p) noexcept;
	void put_first(list &l, piece &p) noexcept;
	void take(piece &p) noexcept;

	engine_config config_;
	backend &world_;
	credits &credits_;
	std::uint32_t wanted_ = 0;
	npr_stats stats_{}; /* but for done_ */
	struct {
		std::uint64_t requests = 0, bytes = 0;
	} done_[32]; /* requests of regions, by opcode */
	/*
	 * The hot path. While it is open nothing waits, nothing is in trouble, and each request has exactly one entry of the
	 * send queue: so one number says whether there is room. It opens with a request that was posted as it is; see expand().
	 */
	static constexpr std::uint64_t no_kind = ~std::uint64_t{0} << 32 | 1; /* one buffer, and no opcode there is */
	static constexpr ending no_ending{0xff, 0, false, 0, 0};	      /* of no request */
	enum class way : std::uint8_t { passed, plain, leased, leased_atomic };
	struct {
		std::uint32_t most = 0;	    /* entries that may be under way, but for credits; 0: it is closed */
		std::uint32_t rkey = 0;	    /* the application's, of the last request that was leased, or had a plain key */
		nanoseconds plain_until = 0; /* the latter; then it is asked about again, see stays_plain() */
		lease_hint lease;	    /* of that one; what is not in lease.may is for post_quick() */
		unsigned signals = 0;	    /* these flags have all requests */
		opcodes free;		    /* for these no key is looked at */
		bool owed = false;	    /* the ticket's lease has ended, which post_quick() has to see to */
		/*
		 * What the last one was, and what was found out about it: for more that differ from it in addresses, a shorter
		 * length, and what is of no account here. Once anything of it may not hold any more it is like nothing.
		 */
		way goes = way::passed;
		bool held = false;   /* its buffer, under the ticket; otherwise it is in no unpinned region */
		bool silent = false; /* nobody hears of it */
		unsigned send_flags = 0;
		std::uint64_t kind = no_kind;
		std::uint32_t lkey = 0;
		std::uint32_t longest = 0; /* bytes */
		std::uint64_t first = 0, span = 0; /* where a buffer may begin: in [first, first + span] */
		std::uint64_t delta = 0;	   /* from there to what the HCA is given */
		std::uint64_t remote_span = 0;	   /* the same of memory under the lease */
		std::uint64_t keys = 0;		   /* of config_.local_keys, if it is not held */
		std::uint64_t next;		   /* the number of the oldest entry, if it is brief */
		ending end = no_ending;
		std::uint64_t requests = 0, bytes = 0; /* of these, done, and not counted yet */
		ibv_send_wr wr{}; /* for the HCA; in some members always the same */
		ibv_sge sge{};
	} hot_;
	static inline const std::atomic<std::uint64_t> no_local_keys_{0};
	/* Null: it is asked of each key what it is. */
	const std::atomic<std::uint64_t> *local_keys_;

	/* [head_, next_) issued, next_ perhaps in part; [next_, tail_) not yet */
	untouched_vector<op> ops_;
	untouched_vector<ibv_sge> op_sges_; /* see sges_of() */
	untouched_vector<std::uint32_t> op_holds_; /* all but the first ones */
	untouched_vector<std::byte> op_inline_;
	std::uint64_t op_mask_;
	std::uint64_t head_ = 0, next_ = 0, tail_ = 0;
	std::uint64_t failing_ = ~0ULL; /* the first op that failed while the QP lives */
	/* What most requests meet nothing of: it is looked at all at once. */
	struct {
		bool dead = false;
		bool broken = false;	 /* the provider refused something: the QP is to end */
		bool drains = false;	 /* a lease ends, and the HCA is to say when what is unsignaled is over */
		bool error_told = false; /* the application knows */
		bool failing = false;	 /* some op; see failing_ */
		std::array<bool, 3> unused{};

		[[nodiscard]] std::uint64_t any() const noexcept { return std::bit_cast<std::uint64_t>(*this); }
	} trouble_;
	bool blind_ = false;
	struct {
		std::uint32_t waits = 0;       /* pieces on a list that is not that of the free ones */
		std::uint32_t chained = 0;     /* entries of chain_ */
		std::uint32_t live_writes = 0; /* ops on regions, begun and not proven */
		std::uint32_t live_reads = 0;
		std::uint32_t live_once = 0;	/* of these nothing is overtaken, whatever the order */
		std::uint32_t holds_wanted = 0; /* by pieces */

		/* Is nothing under way that a request might have to wait for? */
		[[nodiscard]] bool quiet() const noexcept
		{
			return !(waits | chained | live_writes | live_reads | live_once | holds_wanted);
		}
	} state_;
	bool refused_ = false; /* by the peer's HCA, what we knew to be wrong */
	bool cause_told_ = false; /* that one, and no flush */
	bool lost_ = false; /* the peer was not to be reached, the HCA said */

	untouched_vector<piece> pieces_; /* the first made_ of them have been used */
	std::uint32_t made_ = 0;
	list free_, posting_, asking_, pausing_, rebinding_;
	list tails_; /* that wait for a hold to end */
	std::uint32_t max_entries_; /* of the send queue, at once */
	std::uint32_t quick_limit_; /* bytes of a READ that quick_move() takes, exclusive */

	untouched_vector<slot> slots_;
	untouched_vector<brief> briefs_;	/* beside these: from first_brief_ on, instead of them and of ops */
	std::uint64_t first_brief_ = 0;
	std::uint64_t sq_mask_;
	std::uint64_t sq_head_ = 0, sq_tail_ = 0;
	std::uint32_t unsignaled_ = 0; /* behind the last that is signaled, and not known to be over */
	std::uint32_t signal_every_;
	std::uint64_t first_id_;
	std::uint64_t stalls_ = 0; /* behind the last entry that takes a receive of the peer */
	untouched_vector<ibv_send_wr> chain_;
	untouched_vector<ibv_sge> chain_sges_;
	std::uint32_t chain_limit_; /* with so many, two more may find no room */

	untouched_vector<std::uint64_t> snap_; /* the words known before, beside config_.words */
	untouched_vector<ring_record> ring_;
	std::uint64_t ring_mask_;
	std::uint64_t ring_head_ = 0, ring_tail_ = 0;
	std::uint32_t ring_end_ = 0;

	word_cache cache_;
	static constexpr unsigned recent_bits = 6;
	std::array<binding *, 1U << recent_bits> recent_{}; /* of bindings_, by a hash */
	std::unordered_map<binding_name, binding, hash_name> bindings_;
	unsigned part_shift_ = 0; /* of the parts of all address spaces of the peer; 0: none is known */
	key_ring loose_; /* keys of no region, those longest without use first, about */
	std::size_t nr_loose_ = 0;
	std::unordered_map<std::uint64_t, region> regions_; /* by id */
	region *unused_ = nullptr; /* dead ones that no piece refers to */
	std::uint32_t next_uid_ = 1;
	std::uint32_t faults_ = 0, resolves_ = 0;
	unsigned renewals_ = 0; /* of these, for keys that are plain still */
	prefetch_slot prefetches_[max_prefetches];

	remote_leases leases_;
	local_ticket ticket_; /* of the lease under which a local buffer was last */
	std::array<lease_ask, max_lease_asks> lease_asks_;
	unsigned asked_leases_ = 0; /* of these, under way */
	/* Recalls that came meanwhile, of holds that are no leases yet. Too many: each lease is recalled. */
	std::array<std::uint64_t, 8> early_recalls_;
	std::size_t nr_early_recalls_ = 0;
};

template <class F> inline ibv_send_wr *engine::post_hot(const ibv_send_wr &wr, F &&recalls) noexcept
{
	const std::uint64_t sq_tail = sq_tail_;
	const std::uint32_t before = under_way();

	if (before >= hot_.most || before >= credits_.free() || kind_of(wr) != hot_.kind || wr.send_flags != hot_.send_flags)
		[[unlikely]]
		return nullptr;

	const ibv_sge &s = *wr.sg_list;
	const std::uint32_t length = s.length;
	/* What has none is for check() to judge. */
	if (s.lkey != hot_.lkey || length - 1 >= hot_.longest || s.addr - hot_.first > hot_.span) [[unlikely]]
		return nullptr;

	ibv_send_wr &w = hot_.wr;
	if (hot_.goes <= way::plain) {
		if (hot_.goes == way::plain && !is_hot_plain(wr)) [[unlikely]]
			return nullptr;
		w.imm_data = wr.imm_data;
		w.wr = wr.wr;
	} else {
		const std::uint64_t addr = wr.wr.rdma.remote_addr; /* an atomic's, too */
		std::uint32_t rkey = wr.wr.rdma.rkey;

		if (hot_.goes == way::leased_atomic) {
			rkey = wr.wr.atomic.rkey;
			w.wr.atomic.compare_add = wr.wr.atomic.compare_add;
			w.wr.atomic.swap = wr.wr.atomic.swap;
			if (addr % 8)
				return nullptr;
		}
		/* That nothing posted waits for a receive was seen when the last one was leased. */
		if (rkey != hot_.rkey || addr - hot_.lease.first > hot_.remote_span || recalls()) [[unlikely]]
			return nullptr;
		w.wr.rdma.remote_addr = addr + hot_.lease.delta;
	}
	if (hot_.held) [[likely]] {
		if (!ticket_.take()) [[unlikely]] {
			hot_.owed = true;
			return nullptr;
		}
	} else if (local_keys_->load(std::memory_order_acquire) != hot_.keys) [[unlikely]] {
		/* acquire: as local_regions::find() */
		return nullptr;
	}

	if (hot_.silent)
		w.send_flags = signal(wr.send_flags);
	w.wr_id = sq_id(sq_tail);
	hot_.sge.addr = s.addr + hot_.delta;
	hot_.sge.length = length;
	brief &b = briefs_[sq_tail & sq_mask_];
	b.wr_id = wr.wr_id;
	b.end = hot_.end;
	b.length = length;
	b.lease = hot_.lease.lease;
	credits_.take(1);
	sq_tail_ = sq_tail + 1;
	if (hot_.goes == way::passed)
		stalls_ = sq_tail_;
	++next_;
	++tail_;
	return &w;
}

inline bool engine::hot_cqe(ibv_wc &wc) noexcept
{
	const brief &b = briefs_[sq_head_ & sq_mask_];

	if (wc.wr_id != hot_.next || wc.status != IBV_WC_SUCCESS || b.end != hot_.end || hot_.silent) [[unlikely]]
		return false;
	if (hot_.held && !ticket_.give()) [[unlikely]]
		return false;
	++hot_.requests;
	hot_.bytes += b.length;
	credits_.give(1);
	++sq_head_;
	++head_;
	++hot_.next;
	wc.wr_id = b.wr_id;
	return true;
}

} // namespace npr

#endif
