/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The steps of the transition system that model.hpp describes, and what each of
 * them must not do. A step that breaks an invariant says so in state::bad; whether
 * the end can still be reached (I5, I6, I7) is for the search to find out.
 */
#include "model.hpp"

#include <cstdio>
#include <cstdlib>
#include <type_traits>

namespace model
{

namespace
{

constexpr unsigned read_window = 0, write_window = 1;
constexpr u8 nobody = 0, locked_by_reclaim = 1, locked_by_release = 2, locked_by_fault = 4;

static_assert(std::has_unique_object_representations_v<state>);

u8 bit(unsigned i)
{
	return static_cast<u8>(1U << i);
}

bool has(u8 set, unsigned i)
{
	return set >> i & 1;
}

u8 without(u8 set, u8 gone)
{
	return static_cast<u8>(set & ~gone);
}

bool is_frame(u8 f)
{
	return f < max_frames;
}

/* Memory management keeps the pages where they are, and readable. */
bool protects(u8 kind)
{
	return kind == clean || kind == fork;
}

/* One expansion of one state. */
class expansion
{
public:
	expansion(const scenario &sc, mutation m, const state &s, std::vector<step> &out)
	    : sc_(sc), m_(m), s_(s), out_(out)
	{
	}

	void all()
	{
		for (unsigned i = 0; i < max_requests; ++i)
			if (s_.requests[i].kind)
				nic(i);
		for (unsigned i = 0; i < sc_.peers.size(); ++i) {
			initiator(i);
			if (s_.releases[i].pc != release_pc::idle)
				releases(i);
		}
		for (unsigned t = 0; t <= max_peers; ++t)
			faults(t);
		prefetch();
		memory();
	}

private:
	const scenario &sc_;
	const mutation m_;
	const state &s_;
	std::vector<step> &out_;

	bool is(mutation m) const { return m_ == m; }

	state &add(const char *actor, const char *what, unsigned who = 0, unsigned page = none,
		   unsigned arg = 0)
	{
		out_.push_back(
		    {s_, {actor, what, static_cast<u8>(who), static_cast<u8>(page), static_cast<u8>(arg)}});
		return out_.back().to;
	}

	static void breaks(state &n, invariant i)
	{
		if (!n.bad)
			n.bad = static_cast<u8>(i);
	}

	/* --- pages -------------------------------------------------------- */

	u8 all_pages() const { return static_cast<u8>(bit(sc_.pages) - 1); }

	u8 allocate(state &n) const
	{
		for (u8 f = 0; f < max_frames; ++f) {
			if (!n.used[f]) {
				n.used[f] = 1;
				return f;
			}
		}
		std::fprintf(stderr, "%s: too few frames\n", sc_.name.c_str());
		std::abort();
	}

	static void free_frame(state &n, u8 f)
	{
		n.used[f] = 0;
		for (auto &unit : n.content[f])
			unit.fill(foreign);
	}

	/* What the owner has discarded goes with its last pin. */
	void unpin(state &n, u8 f) const
	{
		if (--n.pins[f])
			return;
		for (unsigned p = 0; p < sc_.pages; ++p)
			if (n.frame[p] == f)
				return;
		for (unsigned w = 0; w < 2; ++w)
			for (unsigned p = 0; p < sc_.pages; ++p)
				if (n.leaf[w][p] == f || n.cached[w][p] == f)
					breaks(n, invariant::i1);
		free_frame(n, f);
	}

	static const auto &logical(const state &s, unsigned p)
	{
		return is_frame(s.frame[p]) ? s.content[s.frame[p]] : s.backing[p];
	}

	/* A WRITE that was proven is in the page, unless somebody writes there again. */
	void check_proven(state &n) const
	{
		for (unsigned p = 0; p < sc_.pages; ++p) {
			for (unsigned u = 0; u < sc_.units; ++u) {
				const u8 v = n.proven[p][u];
				if (v != none && (logical(n, p)[u][0] != v || logical(n, p)[u][1] != v))
					breaks(n, invariant::i8);
			}
		}
	}

	/* Nobody writes the page back any more, unless it becomes dirty again. */
	bool would_be_lost(const state &n, unsigned p) const
	{
		const u8 f = n.frame[p];

		return is_frame(f) && !n.dirty[p] && n.content[f] != n.backing[p] &&
		       n.mm.pc == reclaim_pc::idle;
	}

	/* --- leaves ----------------------------------------------------------- */

	static u8 stand_in(unsigned window)
	{
		return window == write_window ? scratch_frame : signature_frame;
	}

	void set_leaf(state &n, unsigned window, unsigned p, u8 f) const
	{
		n.leaf[window][p] = f;
		if (f == not_present)
			breaks(n, invariant::i2);
		check_holds(n);
	}

	/* As long as a hold lasts, what it has pinned can be reached. */
	void check_holds(state &n) const
	{
		for (unsigned i = 0; i < sc_.peers.size(); ++i) {
			const peer &q = n.peers[i];
			for (unsigned p = 0; p < sc_.pages; ++p) {
				if (!has(q.hold, p))
					continue;
				if (n.leaf[read_window][p] != q.pin[p] ||
				    (q.hold_write && n.leaf[write_window][p] != q.pin[p]))
					breaks(n, invariant::i5);
			}
		}
	}

	/* Leaves of some pages of a slot that is one leaf cannot change: the IOMMU refuses. */
	void fill(state &n, unsigned window, u8 pages) const
	{
		if (!n.split[window] && pages != all_pages())
			return;
		for (unsigned p = 0; p < sc_.pages; ++p)
			if (has(pages, p))
				set_leaf(n, window, p, stand_in(window));
	}

	bool any_readable(const state &n) const
	{
		for (unsigned p = 0; p < sc_.pages; ++p)
			if (n.word[p] & readable)
				return true;
		return false;
	}

	bool any_held(const state &n) const
	{
		for (unsigned p = 0; p < sc_.pages; ++p)
			if (n.holds[p])
				return true;
		return false;
	}

	void merge(state &n) const
	{
		for (unsigned p = 0; p < sc_.pages; ++p) {
			set_leaf(n, read_window, p, signature_frame);
			set_leaf(n, write_window, p, scratch_frame);
		}
		n.split.fill(0);
		n.huge = 0;
		merged(n);
	}

	static void merged(state &n)
	{
		for (fault &f : n.faults)
			f.unmerged = 0;
	}

	/* An entry of 2 MiB goes with an invalidation of its size only. */
	void uncache_window(state &n, unsigned window, u8 pages) const
	{
		if (pages == all_pages())
			n.large[window] = 0;
		if (n.large[window])
			return;
		for (unsigned p = 0; p < sc_.pages; ++p)
			if (has(pages, p))
				n.cached[window][p] = none;
	}

	/* The invalidation of leaves, which drains; of the slot, while a split is not yet flushed. */
	void uncache(state &n, unsigned window, u8 pages) const
	{
		if (!pages)
			return;
		for (const fault &f : n.faults)
			if (has(f.splitting, window) && !is(mutation::split_uncounted))
				pages = all_pages();
		if (!n.split[window] && !is(mutation::huge_flush_of_one_page))
			pages = all_pages();
		uncache_window(n, window, pages);
		const u8 kind = window == write_window ? data_write : data_read;
		for (request &r : n.requests)
			if (r.kind == kind && has(pages, r.page) && r.frame != none)
				r.drain = 1;
	}

	static bool drained(const state &s)
	{
		for (const request &r : s.requests)
			if (r.drain)
				return false;
		return true;
	}

	void absent_word(state &n, unsigned p) const
	{
		u8 w = without(n.word[p], readable | writable);
		if (!is(mutation::generation_stays))
			w = static_cast<u8>(w + generation);
		n.word[p] = w;
		++n.times_absent[p];
	}

	void readable_word(state &n, unsigned p) const
	{
		u8 w = without(n.word[p], writable);
		if (!is(mutation::generation_stays) && !is(mutation::protect_generation_stays))
			w = static_cast<u8>(w + generation);
		n.word[p] = w;
		++n.times_absent[p];
	}

	/* --- the notifier, and memory management around it ----------------------- */

	void begin_reclaim(state &n, unsigned p, u8 kind) const
	{
		n.mm = {reclaim_pc::callback, static_cast<u8>(p), kind, 0, 0, 0};
		--n.budget;
	}

	/* What it says that it changes. What takes a huge page apart need say no more than its own. */
	u8 announced(const state &n) const
	{
		const u8 kind = n.mm.kind;

		return kind == fork || kind == collapse || (kind == clean && n.entry) ? all_pages()
										      : bit(n.mm.page);
	}

	/* Where a huge page could be: pages are in their order from there. */
	u8 free_block(const state &n) const
	{
		for (unsigned f = 0; f + sc_.pages <= max_frames; f += sc_.pages) {
			bool free = true;
			for (unsigned p = 0; p < sc_.pages; ++p)
				free &= !n.used[f + p];
			if (free)
				return static_cast<u8>(f);
		}
		return none;
	}

	void memory()
	{
		const reclaim &mm = s_.mm;
		const unsigned p = mm.page;

		switch (mm.pc) {
		case reclaim_pc::idle:
			return begin_event();
		case reclaim_pc::callback:
			return callback();
		case reclaim_pc::early_flush: {
			if (!drained(s_))
				return;
			state &n = add("notifier", "flushes before it writes the leaves", 0, p);
			invalidate(n);
			n.mm.pc = reclaim_pc::write_leaf;
			return;
		}
		case reclaim_pc::write_leaf:
		case reclaim_pc::write_leaf_late:
		case reclaim_pc::read_leaf:
		case reclaim_pc::read_leaf_late:
			return absent_leaf(p);
		case reclaim_pc::flush: {
			const bool wait =
			    !is(stays_readable(s_) ? mutation::protect_no_drain : mutation::absent_no_drain);
			state &n = add("notifier", "invalidates the IOTLB", 0, p);
			invalidate(n);
			n.mm.pc = wait ? reclaim_pc::drain : reclaim_pc::back;
			if (!wait)
				for (request &r : n.requests)
					r.drain = 0;
			return;
		}
		case reclaim_pc::drain:
			if (drained(s_)) {
				state &n = add("notifier", "has drained", 0, p);
				n.mm.pc = word_is_late(s_) ? reclaim_pc::late_word : reclaim_pc::back;
			}
			return;
		case reclaim_pc::late_word: {
			const bool stays = stays_readable(s_);
			state &n = add("notifier", stays ? "word := readable" : "word := absent", 0, p);
			for (unsigned q = 0; q < sc_.pages; ++q)
				if (has(mm.pages, q))
					stays ? readable_word(n, q) : absent_word(n, q);
			n.mm.pc = reclaim_pc::back;
			return;
		}
		case reclaim_pc::back:
			return notifier_returns(p);
		case reclaim_pc::unmap:
			return unmap(p);
		case reclaim_pc::end: {
			state &n = add("memory", "ends the invalidation", 0, p);
			n.mm.silenced = 0;
			n.mm.pc = mm.kind == none ? reclaim_pc::idle : reclaim_pc::write_back;
			if (n.mm.pc == reclaim_pc::idle)
				n.mm = {};
			return;
		}
		case reclaim_pc::write_back:
			return write_back(p);
		case reclaim_pc::free: {
			const bool keep = s_.present[p] || s_.dirty[p] || s_.pins[s_.frame[p]];
			state &n =
			    add("memory", keep ? "keeps the page: mapped or dirty again" : "frees the frame",
				0, p);
			if (!keep) {
				free_frame(n, s_.frame[p]);
				n.frame[p] = none;
				n.shared[p] = 0;
				check_proven(n);
			}
			n.mm = {};
			return;
		}
		case reclaim_pc::stuck:
			return;
		}
	}

	void begin_event()
	{
		if (!s_.budget)
			return;
		for (unsigned q = 0; q < sc_.pages; ++q) {
			if (!s_.present[q])
				continue;
			if (sc_.events & page_out)
				begin_reclaim(add("memory", "begins to page out", 0, q), q, page_out);
			if (sc_.events & clean && s_.may_write[q])
				begin_reclaim(add("memory", "begins to clean", 0, q), q, clean);
			if (sc_.events & move)
				begin_reclaim(add("memory", "begins to move", 0, q), q, move);
			if (sc_.events & discard)
				begin_reclaim(add("memory", "begins to discard", 0, q), q, discard);
		}
		bool any = false;
		for (unsigned q = 0; q < sc_.pages; ++q)
			any |= s_.present[q] && s_.may_write[q];
		if (sc_.events & fork && any)
			begin_reclaim(add("memory", "begins to fork", 0, none), 0, fork);
		if (sc_.events & collapse && !s_.entry && free_block(s_) != none)
			begin_reclaim(add("memory", "begins to collapse", 0, none), 0, collapse);
	}

	/* Does the notifier take it as the end of writing only? */
	bool stays_readable(const state &n) const
	{
		return protects(n.mm.kind) || is(mutation::protect_although_page_goes);
	}

	bool word_is_late(const state &n) const
	{
		return is(stays_readable(n) ? mutation::protect_word_after_leaf
					    : mutation::absent_word_after_leaf);
	}

	void invalidate(state &n) const
	{
		const u8 pages = is(mutation::huge_flush_of_one_page) ? announced(n) : n.mm.pages;
		uncache(n, write_window, pages);
		if (!stays_readable(n))
			uncache(n, read_window, pages);
	}

	void callback()
	{
		if (s_.lock != nobody)
			return;
		const bool stays = stays_readable(s_);
		const u8 right = stays ? writable : readable;
		state &n = add("notifier",
			       stays ? "takes the lock, word := readable" : "takes the lock, word := absent",
			       0, s_.mm.page);
		n.lock = locked_by_reclaim;
		n.mm.silenced = 1;
		for (fault &f : n.faults)
			f.current = 0;
		n.mm.pc = reclaim_pc::back;
		if (is(mutation::notifier_allocates)) {
			n.mm.pc = reclaim_pc::stuck;
			return;
		}

		/* One leaf cannot go in part, and its split would allocate. */
		const u8 named = announced(s_);
		const u8 pages = s_.huge && !is(mutation::huge_one_page_goes) ? all_pages() : named;
		bool out = false;
		for (unsigned p = 0; p < sc_.pages; ++p) {
			if (!has(pages, p))
				continue;
			const bool held = s_.holds[p] && !is(stays ? mutation::protect_held_leaf_goes
								   : mutation::held_leaf_goes);
			if (!held)
				n.mm.pages |= bit(p);
			if (!(s_.word[p] & right))
				continue;
			if (is(mutation::huge_words_of_others_stay) && !has(named, p))
				continue;
			if (!held) {
				out = true;
				if (word_is_late(s_))
					continue;
				if (stays && !is(mutation::protect_word_stays))
					readable_word(n, p);
				if (!stays && !is(mutation::absent_word_stays))
					absent_word(n, p);
				continue;
			}
			if (is(stays ? mutation::protect_held_word_stays : mutation::held_word_stays))
				continue;
			out = true;
			if (!stays)
				n.stale_read[p] = 1;
			if (s_.word[p] & writable && !(stays && is(mutation::protect_stale_unmarked)))
				n.stale_write[p] = 1;
			stays ? readable_word(n, p) : absent_word(n, p);
		}
		if (!out)
			n.mm.pages = 0;
		if (n.mm.pages)
			n.mm.pc = is(stays ? mutation::protect_flush_before_leaf
					   : mutation::absent_flush_before_leaf)
				      ? reclaim_pc::early_flush
				      : reclaim_pc::write_leaf;
	}

	void absent_leaf(unsigned p)
	{
		const bool stays = stays_readable(s_);
		const auto either = [&](mutation protect, mutation absent) {
			return is(stays ? protect : absent);
		};
		const reclaim_pc pc = s_.mm.pc;
		const bool write = pc == reclaim_pc::write_leaf || pc == reclaim_pc::write_leaf_late;
		const unsigned window = write ? write_window : read_window;
		const reclaim_pc next =
		    write && !stays ? reclaim_pc::read_leaf
		    : either(mutation::protect_no_flush, mutation::absent_no_flush) ||
			    either(mutation::protect_flush_before_leaf, mutation::absent_flush_before_leaf)
			? reclaim_pc::back
			: reclaim_pc::flush;
		const bool late = pc == reclaim_pc::write_leaf_late || pc == reclaim_pc::read_leaf_late;
		const bool forgets =
		    write && either(mutation::protect_leaf_stays, mutation::absent_write_leaf_stays);

		if (either(mutation::protect_through_not_present, mutation::absent_through_not_present) &&
		    !late) {
			state &n = add("notifier", "leaf := not present", 0, p, window);
			set_leaf(n, window, p, not_present);
			n.mm.pc = write ? reclaim_pc::write_leaf_late : reclaim_pc::read_leaf_late;
			return;
		}
		state &n = add("notifier", "leaf := stand-in", 0, p, window);
		if (!forgets)
			fill(n, window, s_.mm.pages);
		n.mm.pc = next;
		/* the last page of the slot: one leaf for all of them again */
		if (!write && !any_readable(n) && !any_held(n) && !is(mutation::absent_write_leaf_stays))
			merge(n);
	}

	void notifier_returns(unsigned p)
	{
		if (is(mutation::notifier_waits_for_peer))
			for (unsigned i = 0; i < sc_.peers.size(); ++i)
				if (s_.peers[i].at == stage::wait)
					return;
		const u8 pages = announced(s_);
		state &n = add("notifier", "returns", 0, p);
		n.lock = nobody;
		n.mm.pages = 0;
		n.mm.pc = reclaim_pc::unmap;
		/* Whatever is mapped, cached or under way to the old page is too much. */
		for (unsigned q = 0; q < sc_.pages; ++q) {
			const u8 f = s_.frame[q];
			if (!has(pages, q) || s_.holds[q] || !is_frame(f))
				continue;
			for (unsigned w = protects(s_.mm.kind) ? write_window : read_window; w < 2; ++w) {
				if (s_.leaf[w][q] == f || s_.cached[w][q] == f)
					breaks(n, invariant::i1);
				for (const request &r : s_.requests)
					if (r.kind == (w == write_window ? data_write : data_read) &&
					    r.frame == f)
						breaks(n, invariant::i1);
			}
		}
	}

	void unmap(unsigned p)
	{
		const u8 f = s_.frame[p], kind = s_.mm.kind;

		if (protects(kind))
			return write_protect(announced(s_));
		if (kind == collapse)
			return unmap_for_collapse();
		if (kind == copy) {
			state &n = add("memory", "maps the copy", 0, p);
			n.mm.pc = reclaim_pc::end;
			n.mm.kind = none;
			n.entry = n.shared[p] = 0;
			n.frame[p] = s_.mm.to;
			n.may_write[p] = n.dirty[p] = 1;
			/* The other process has it for itself now. */
			free_frame(n, f);
			check_proven(n);
			return;
		}
		if (kind == discard) {
			state &n = add("memory", "discards", 0, p);
			n.mm.pc = reclaim_pc::end;
			n.mm.kind = none;
			n.frame[p] = none;
			n.present[p] = n.dirty[p] = n.shared[p] = n.entry = 0;
			for (auto &unit : n.backing[p])
				unit.fill(zero);
			for (auto &v : n.proven[p])
				v = none;
			for (peer &q : n.peers) {
				q.discarded |= bit(p);
				for (auto &unit : q.allowed[p])
					for (u8 &set : unit)
						set |= bit(zero);
			}
			if (!n.pins[f])
				free_frame(n, f);
			return;
		}
		const bool stays = !s_.present[p] || s_.pins[f];
		state &n = add("memory", stays ? "leaves the page: pinned" : "unmaps", 0, p);
		n.mm.pc = reclaim_pc::end;
		if (stays)
			n.mm.kind = none;
		else
			n.present[p] = n.entry = 0;
	}

	void write_protect(u8 pages)
	{
		const unsigned p = s_.mm.page;

		if (s_.mm.kind == fork) {
			state &n = add("memory", "write-protects what is shared now", 0, none);
			n.mm.pc = reclaim_pc::end;
			n.mm.kind = none;
			/* Who has pinned a page keeps it, and the other process gets a copy. */
			for (unsigned q = 0; q < sc_.pages; ++q) {
				if (!s_.present[q] || s_.pins[s_.frame[q]])
					continue;
				n.shared[q] = 1;
				n.may_write[q] = 0;
			}
			return;
		}
		bool was = false;
		for (unsigned q = 0; q < sc_.pages; ++q)
			was |= has(pages, q) && s_.dirty[q];
		state &n =
		    add("memory", was ? "write-protects, was dirty" : "write-protects, was clean", 0, p);
		for (unsigned q = 0; q < sc_.pages; ++q)
			if (has(pages, q))
				n.may_write[q] = n.dirty[q] = 0;
		n.mm.pc = reclaim_pc::end;
		if (!was)
			n.mm.kind = none;
	}

	void unmap_for_collapse()
	{
		bool stays = false;
		for (unsigned q = 0; q < sc_.pages; ++q)
			stays |= !s_.present[q] || s_.shared[q] || s_.pins[s_.frame[q]];
		state &n = add("memory", stays ? "leaves the pages as they are" : "unmaps", 0, none);
		n.mm.pc = reclaim_pc::end;
		if (stays)
			n.mm.kind = none;
		else
			n.present.fill(0);
	}

	void write_back(unsigned p)
	{
		const u8 f = s_.frame[p];

		if (s_.mm.kind == move) {
			state &n = add("memory", "copies the page and maps the copy", 0, p);
			const u8 to = allocate(n);
			n.content[to] = s_.content[f];
			n.frame[p] = to;
			n.present[p] = 1;
			free_frame(n, f);
			n.mm = {};
			check_proven(n);
			return;
		}
		if (s_.mm.kind == collapse) {
			state &n = add("memory", "copies the pages and maps them as one", 0, none);
			const u8 to = free_block(s_);
			for (unsigned q = 0; q < sc_.pages; ++q) {
				const u8 frame = static_cast<u8>(to + q);
				n.used[frame] = 1;
				n.content[frame] = s_.content[s_.frame[q]];
				n.frame[q] = frame;
				n.present[q] = n.may_write[q] = n.dirty[q] = 1;
				free_frame(n, s_.frame[q]);
			}
			n.entry = 1;
			n.mm = {};
			check_proven(n);
			return;
		}
		const bool writes = s_.mm.kind == clean || s_.dirty[p];
		const bool remapped = s_.mm.kind == page_out && s_.present[p];
		state &n = add("memory",
			       remapped ? "keeps the page: mapped again"
			       : writes ? "writes the page back"
					: "drops the clean page",
			       0, p);
		if (remapped) {
			n.mm = {};
			return;
		}
		if (s_.mm.kind == clean) {
			for (unsigned q = 0; q < sc_.pages; ++q)
				if (has(announced(s_), q))
					n.backing[q] = s_.content[s_.frame[q]];
			n.mm = {};
			return;
		}
		if (writes)
			n.backing[p] = s_.content[f];
		n.dirty[p] = 0;
		n.mm.pc = reclaim_pc::free;
	}

	/* Owner's side of HMM and GUP: the page in the page table, with the rights asked for. */
	void fault_in(state &n, unsigned p, bool write) const
	{
		if (!n.present[p]) {
			if (!is_frame(n.frame[p])) {
				n.frame[p] = allocate(n);
				n.content[n.frame[p]] = n.backing[p];
				n.dirty[p] = 0;
			}
			n.present[p] = 1;
			n.may_write[p] = !n.shared[p];
			n.dirty[p] = n.dirty[p] || write;
		} else if (write && !n.may_write[p]) {
			for (unsigned q = 0; q < sc_.pages; ++q)
				if (q == p || n.entry)
					n.may_write[q] = n.dirty[q] = 1;
		}
	}

	bool migrating(unsigned p) const
	{
		if (s_.mm.kind == collapse)
			return !s_.present[p];
		return s_.mm.kind == move && s_.mm.page == p && !s_.present[p];
	}

	/*
	 * A page that is shared after fork() is copied first: by who wants to write there,
	 * or to pin it. The copy is made before the notifier hears of it.
	 */
	bool must_copy(unsigned t, u8 pages)
	{
		for (unsigned p = 0; p < sc_.pages; ++p) {
			if (!has(pages, p) || !s_.shared[p])
				continue;
			if (s_.mm.pc != reclaim_pc::idle)
				return true;
			state &n = add("fault", "copies a shared page", t, p);
			fault_in(n, p, false);
			const u8 to = allocate(n);
			n.content[to] = n.content[n.frame[p]];
			n.mm = {reclaim_pc::callback, static_cast<u8>(p), copy, 0, 0, to};
			return true;
		}
		return false;
	}

	/* --- fault ----------------------------------------------------------- */

	static bool lacks(u8 word, bool write)
	{
		const u8 want = static_cast<u8>(readable | (write ? writable : 0));

		return (word & want) != want;
	}

	void answer(state &n, unsigned t) const
	{
		fault &f = n.faults[t];

		for (unsigned p = 0; p < sc_.pages; ++p)
			f.word[p] = has(f.ask, p) ? n.word[p] : u8{0};
		f.pc = fault_pc::answered;
		f.huge = f.current = f.unmerged = f.to_read = f.to_write = f.worded = 0;
		f.frame.fill(0);
		if (t == prefetcher)
			f = {};
	}

	void start_fault(state &n, unsigned t, u8 ask, bool write, bool hold) const
	{
		n.faults[t] = {};
		n.faults[t].ask = ask;
		n.faults[t].write = write;
		n.faults[t].hold = hold;
		n.faults[t].pc = fault_pc::start;
	}

	void prefetch()
	{
		if (!s_.prefetches || s_.faults[prefetcher].pc != fault_pc::idle)
			return;
		state &n = add("owner", "prefetches for write", 0);
		--n.prefetches;
		start_fault(n, prefetcher, all_pages(), true, false);
	}

	/* The allocation of a page table reclaims: a notifier runs before it goes on. */
	void may_reclaim(unsigned t, fault_pc waiting)
	{
		if (!sc_.reclaims || s_.mm.pc != reclaim_pc::idle || !s_.budget)
			return;
		for (unsigned p = 0; p < sc_.pages; ++p) {
			if (!s_.present[p])
				continue;
			state &n = add("fault", "allocates, which reclaims", t, p);
			begin_reclaim(n, p, page_out);
			n.faults[t].pc = waiting;
		}
	}

	void faults(unsigned t)
	{
		const fault &f = s_.faults[t];
		const bool late = f.pc == fault_pc::write_leaf_late || f.pc == fault_pc::read_leaf_late;

		switch (f.pc) {
		case fault_pc::idle:
		case fault_pc::answered:
			return;
		case fault_pc::start: {
			bool noop = !f.hold && !is(mutation::generation_on_resident_page);
			for (unsigned p = 0; p < sc_.pages; ++p)
				if (has(f.ask, p) && lacks(s_.word[p], f.write))
					noop = false;
			state &n = add("fault", noop ? "finds all of it there" : "begins", t);
			if (noop)
				answer(n, t);
			else
				n.faults[t].pc = f.hold ? fault_pc::pin : fault_pc::begin;
			return;
		}
		case fault_pc::pin: {
			for (unsigned p = 0; p < sc_.pages; ++p)
				if (has(f.ask, p) && migrating(p))
					return;
			if (must_copy(t, f.ask))
				return;
			state &n = add("fault", "pins the pages", t);
			for (unsigned p = 0; p < sc_.pages; ++p) {
				if (!has(f.ask, p))
					continue;
				fault_in(n, p, f.write);
				n.faults[t].pin[p] = n.frame[p];
				++n.pins[n.frame[p]];
			}
			n.faults[t].pc = fault_pc::begin;
			return;
		}
		case fault_pc::begin:
			if (!s_.mm.silenced) {
				state &n = add("fault", "takes the sequence", t);
				n.faults[t].current = 1;
				n.faults[t].pc = fault_pc::look;
			}
			return;
		case fault_pc::look:
			return look(t);
		case fault_pc::prepare:
			may_reclaim(t, fault_pc::reclaiming);
			return split(t);
		case fault_pc::reclaiming:
			if (s_.mm.pc == reclaim_pc::idle)
				add("fault", "has its memory", t).faults[t].pc = fault_pc::prepare;
			return;
		case fault_pc::flush_split: {
			state &n = add("fault", "flushes what was one leaf", t);
			for (unsigned w = 0; w < 2; ++w)
				if (has(f.splitting, w) && !is(mutation::split_no_flush))
					uncache_window(n, w, all_pages());
			n.faults[t].splitting = 0;
			n.faults[t].pc =
			    is(mutation::split_counted_late) ? fault_pc::count_late : fault_pc::lock;
			return;
		}
		case fault_pc::count_late: {
			state &n = add("fault", "looks how often the slot was merged", t);
			n.faults[t].unmerged = 1;
			n.faults[t].pc = fault_pc::lock;
			return;
		}
		case fault_pc::lock:
			return f.huge ? lock_huge(t) : lock(t);
		case fault_pc::reclaiming_locked:
			if (s_.mm.pc == reclaim_pc::idle)
				add("fault", "has its memory", t).faults[t].pc = fault_pc::write_leaf;
			return;
		case fault_pc::write_leaf:
		case fault_pc::write_leaf_late:
			return map(t, write_window, late);
		case fault_pc::read_leaf:
		case fault_pc::read_leaf_late:
			return map(t, read_window, late);
		case fault_pc::flush: {
			state &n = add("fault", "invalidates the IOTLB", t);
			uncache(n, read_window, f.to_read);
			uncache(n, write_window, f.to_write);
			n.faults[t].pc = fault_pc::drain;
			if (is(mutation::resident_no_drain)) {
				for (request &r : n.requests)
					r.drain = 0;
				n.faults[t].pc = fault_pc::word;
			}
			return;
		}
		case fault_pc::drain:
			if (drained(s_))
				add("fault", "has drained", t).faults[t].pc = fault_pc::word;
			return;
		case fault_pc::word:
			return words(t);
		}
	}

	void look(unsigned t)
	{
		const fault &f = s_.faults[t];
		u8 wanted = 0;

		for (unsigned p = 0; p < sc_.pages; ++p) {
			if (!has(f.ask, p))
				continue;
			if (migrating(p))
				return;
			if (f.hold || lacks(s_.word[p], f.write) || is(mutation::generation_on_resident_page))
				wanted |= bit(p);
		}
		if (!f.current) {
			/* HMM itself says so; what is pinned stays for the next attempt. */
			add("fault", "finds its sequence out of date at once", t).faults[t].pc =
			    fault_pc::begin;
			return;
		}
		if (f.write && must_copy(t, wanted))
			return;
		state &n = add("fault", "looks into the page table", t);
		fault &g = n.faults[t];
		for (unsigned p = 0; p < sc_.pages; ++p) {
			if (has(wanted, p))
				fault_in(n, p, f.write);
			g.frame[p] = none;
		}
		bool rights = true;
		for (unsigned p = 0; p < sc_.pages; ++p) {
			if (!has(f.ask, p) && !n.entry)
				continue;
			if (n.present[p] && (!f.write || n.may_write[p]))
				g.frame[p] = n.frame[p];
			else
				rights = false;
		}
		/* One leaf for what one entry maps, but for a hold: that keeps what others lose. */
		g.huge = n.entry && rights && !f.hold && (!any_held(n) || is(mutation::huge_under_hold));
		/* How often the slot was merged, before the split that a merge would undo */
		g.unmerged = !is(mutation::split_counted_late);
		g.pc = g.huge ? fault_pc::lock : fault_pc::prepare;
	}

	void split(unsigned t)
	{
		const fault &f = s_.faults[t];
		const bool writes = f.write || (s_.huge && !is(mutation::split_write_missing));
		u8 windows = 0;

		if (!s_.split[read_window])
			windows |= bit(read_window);
		if (!s_.split[write_window] && writes)
			windows |= bit(write_window);
		state &n = add("fault", windows ? "splits the slot" : "finds the slot split", t);
		for (unsigned w = 0; w < 2; ++w)
			if (has(windows, w))
				n.split[w] = 1;
		n.faults[t].pc = is(mutation::split_counted_late) ? fault_pc::count_late : fault_pc::lock;
		/* A slot of one page is of one size. */
		if (windows && sc_.pages > 1) {
			n.faults[t].splitting = windows;
			n.faults[t].pc = fault_pc::flush_split;
		}
	}

	/* What HMM said is out of date, or cannot be had now: begin again. */
	void again(unsigned t, const char *why)
	{
		state &n = add("fault", why, t);
		fault &f = n.faults[t];

		for (unsigned p = 0; p < sc_.pages; ++p)
			if (f.hold && has(f.ask, p))
				unpin(n, f.pin[p]);
		f.pin.fill(0);
		f.frame.fill(0);
		f.huge = f.current = f.unmerged = 0;
		f.pc = f.hold ? fault_pc::pin : fault_pc::begin;
	}

	void lock(unsigned t)
	{
		const fault &f = s_.faults[t];
		u8 to_read = 0, to_write = 0;

		if (s_.lock != nobody)
			return;
		if (!f.current && !is(mutation::retry_check_missing))
			return again(t, "finds its sequence out of date");
		if (!f.unmerged && !is(mutation::merge_check_missing))
			return again(t, "finds its split undone");
		for (unsigned p = 0; p < sc_.pages; ++p) {
			if (!has(f.ask, p))
				continue;
			if (f.hold && f.frame[p] != f.pin[p] && !is(mutation::pin_check_missing))
				return again(t, "has pinned another page");
			if (!lacks(s_.word[p], f.write) && !is(mutation::generation_on_resident_page))
				continue;
			if (f.frame[p] == none)
				return again(t, "finds a page without rights");
			if (s_.holds[p] && (s_.stale_read[p] || s_.stale_write[p]) &&
			    s_.leaf[read_window][p] != f.frame[p] && !is(mutation::stale_mapped_over))
				return again(t, "waits for holds of another page");
			if (!(s_.word[p] & readable) || is(mutation::generation_on_resident_page))
				to_read |= bit(p);
			if (f.write)
				to_write |= bit(p);
		}
		locked(t, "takes the lock", to_read, to_write).huge = 0;
	}

	void lock_huge(unsigned t)
	{
		const fault &f = s_.faults[t];
		bool nothing = true;

		if (s_.lock != nobody)
			return;
		if (!f.current && !is(mutation::retry_check_missing))
			return again(t, "finds its sequence out of date");
		if (any_held(s_) && !is(mutation::huge_under_hold))
			return again(t, "finds a hold on the slot");
		for (unsigned p = 0; p < sc_.pages; ++p)
			if (has(f.ask, p) && lacks(s_.word[p], f.write))
				nothing = false;
		state &n = locked(t, "takes the lock, for one leaf", nothing ? u8{0} : all_pages(),
				  f.write && !nothing ? all_pages() : u8{0});
		if (nothing)
			return;
		n.huge = 1;
		if (is(mutation::huge_merge_counted_early))
			merged(n);
	}

	state &locked(unsigned t, const char *how, u8 to_read, u8 to_write)
	{
		state &n = add("fault", how, t);
		fault &g = n.faults[t];
		g.to_read = to_read;
		g.to_write = to_write;
		n.lock = static_cast<u8>(locked_by_fault + t);
		for (unsigned p = 0; p < sc_.pages; ++p) {
			if (is(mutation::huge_one_page_dirty) && !has(g.ask, p))
				continue;
			if (has(to_write, p) && !is(mutation::resident_not_dirty))
				n.dirty[p] = 1;
		}
		if (!(to_read | to_write)) {
			g.pc = fault_pc::word;
			return n;
		}
		if (is(mutation::resident_word_before_leaf))
			set_words(n, t);
		g.pc = to_write ? fault_pc::write_leaf : fault_pc::read_leaf;
		if (is(mutation::allocation_under_lock) && s_.budget && s_.mm.pc == reclaim_pc::idle) {
			for (unsigned p = 0; p < sc_.pages; ++p) {
				if (!s_.present[p])
					continue;
				g.pc = fault_pc::reclaiming_locked;
				begin_reclaim(n, p, page_out);
				return n;
			}
		}
		return n;
	}

	void map(unsigned t, unsigned window, bool late)
	{
		const fault &f = s_.faults[t];
		const u8 pages = window == write_window ? f.to_write : f.to_read;
		const fault_pc flush = is(mutation::resident_no_flush) ? fault_pc::word : fault_pc::flush;
		const fault_pc next = window == write_window && f.to_read ? fault_pc::read_leaf : flush;

		if (is(mutation::resident_through_not_present) && !late) {
			state &n = add("fault", "leaf := not present", t, none, window);
			for (unsigned p = 0; p < sc_.pages; ++p)
				if (has(pages, p))
					set_leaf(n, window, p, not_present);
			n.faults[t].pc =
			    window == write_window ? fault_pc::write_leaf_late : fault_pc::read_leaf_late;
			return;
		}
		state &n = add("fault", f.huge ? "leaf := pages" : "leaf := page", t, none, window);
		if (f.huge)
			n.split[window] = 0;
		for (unsigned p = 0; p < sc_.pages; ++p) {
			if (!has(pages, p))
				continue;
			/* One leaf still covers the slot: all of it now means this page. */
			for (unsigned q = 0; q < sc_.pages; ++q)
				if (q == p || (!s_.split[window] && !f.huge))
					set_leaf(n, window, q, f.frame[p]);
		}
		/* Behind the last of them: who looks before that finds his split undone. */
		if (f.huge && window == read_window && !is(mutation::huge_merge_uncounted) &&
		    !is(mutation::huge_merge_counted_early))
			merged(n);
		n.faults[t].pc = next;
		if (next == flush && is(mutation::resident_word_before_flush))
			set_words(n, t);
	}

	void set_words(state &n, unsigned t) const
	{
		fault &f = n.faults[t];

		if (f.worded)
			return;
		for (unsigned p = 0; p < sc_.pages; ++p) {
			const u8 change = f.to_read | f.to_write;
			if (!has(change, p))
				continue;
			u8 rights = static_cast<u8>(readable | (has(f.to_write, p) ? writable : 0));
			/* One leaf brings pages that were there, or might be written. */
			if (f.huge && !lacks(n.word[p], has(f.to_write, p)) &&
			    !is(mutation::huge_drops_right))
				continue;
			if (f.huge && !is(mutation::huge_drops_right))
				rights = static_cast<u8>(rights | (n.word[p] & writable));
			u8 w = without(n.word[p], readable | writable);
			if (!is(mutation::generation_stays))
				w = static_cast<u8>(w + generation);
			n.word[p] = w | rights;
			n.stale_read[p] = 0;
			if (has(f.to_write, p))
				n.stale_write[p] = 0;
		}
		f.worded = 1;
	}

	void words(unsigned t)
	{
		const fault &f = s_.faults[t];
		state &n = add("fault", "sets the words, drops the lock, answers", t);

		set_words(n, t);
		n.lock = nobody;
		if (f.hold) {
			peer &q = n.peers[t];
			q.hold = f.ask;
			q.hold_write = f.write;
			for (unsigned p = 0; p < sc_.pages; ++p) {
				if (!has(f.ask, p))
					continue;
				++n.holds[p];
				q.pin[p] = f.pin[p];
			}
		}
		n.faults[t].pin.fill(0);
		answer(n, t);
		check_holds(n);
	}

	/* --- the end of a hold --------------------------------------------------- */

	void releases(unsigned i)
	{
		const release &r = s_.releases[i];

		switch (r.pc) {
		case release_pc::idle:
			return;
		case release_pc::lock: {
			if (s_.lock != nobody)
				return;
			state &n = add("release", "takes the lock, stale leaves go", i);
			u8 dropped = 0;
			n.lock = locked_by_release;
			for (unsigned p = 0; p < sc_.pages; ++p) {
				if (!has(r.pages, p) || --n.holds[p])
					continue;
				if (is(mutation::stale_leaf_stays)) {
					n.stale_read[p] = n.stale_write[p] = 0;
					continue;
				}
				if (n.stale_read[p])
					fill(n, read_window, bit(p));
				if (n.stale_read[p] || n.stale_write[p]) {
					fill(n, write_window, bit(p));
					dropped |= bit(p);
				}
				n.stale_read[p] = n.stale_write[p] = 0;
			}
			if (dropped && !any_readable(n) && !any_held(n)) {
				merge(n);
			}
			n.releases[i].pc = dropped && !is(mutation::stale_flush_missing) ? release_pc::flush
											 : release_pc::unlock;
			return;
		}
		case release_pc::flush: {
			state &n = add("release", "invalidates the IOTLB", i);
			for (unsigned w = 0; w < 2; ++w)
				uncache(n, w, r.pages);
			n.releases[i].pc = release_pc::drain;
			return;
		}
		case release_pc::drain:
			if (drained(s_))
				add("release", "has drained", i).releases[i].pc = release_pc::unlock;
			return;
		case release_pc::unlock: {
			state &n = add("release", "drops the lock, unpins", i);
			n.lock = nobody;
			for (unsigned p = 0; p < sc_.pages; ++p) {
				if (!has(r.pages, p))
					continue;
				const u8 f = r.pin[p];
				if (r.write && n.frame[p] == f && !is(mutation::release_not_dirty))
					n.dirty[p] = 1;
				/* No hold keeps it, and no word: the next notifier would not find it. */
				if (!n.holds[p] && n.leaf[write_window][p] == n.frame[p] &&
				    !(n.word[p] & writable))
					breaks(n, invariant::i1);
				unpin(n, f);
			}
			n.releases[i] = {};
			return;
		}
		}
	}

	/* --- the NIC -------------------------------------------------------------- */

	static void remove(state &n, unsigned i)
	{
		for (; i + 1 < max_requests; ++i)
			n.requests[i] = n.requests[i + 1];
		n.requests[max_requests - 1] = {};
	}

	/* May it reach memory now? No read or write passes an earlier write of its QP. */
	bool in_order(unsigned i) const
	{
		if (is(mutation::nic_relaxed_ordering))
			return true;
		for (unsigned k = 0; k < i; ++k)
			if (s_.requests[k].kind == data_write && s_.requests[k].peer == s_.requests[i].peer)
				return false;
		return true;
	}

	/* The next one that is executed: it goes behind those that have been. */
	void nic_executes(unsigned i)
	{
		request r = s_.requests[i];
		state &n =
		    add("NIC", r.kind == data_write ? "executes a WRITE" : "executes a READ", r.peer, r.page);

		r.executed = 1;
		for (; i && !s_.requests[i - 1].executed; --i)
			n.requests[i] = s_.requests[i - 1];
		n.requests[i] = r;
	}

	void nic(unsigned i)
	{
		const request &r = s_.requests[i];

		if (!r.executed)
			return nic_executes(i);
		if (r.kind == word_read) {
			if (!in_order(i))
				return;
			state &n = add("NIC", "reads the word", r.peer, r.page, s_.word[r.page]);
			n.peers[r.peer].word[r.page] = s_.word[r.page];
			remove(n, i);
			return;
		}
		const unsigned window = r.kind == data_write ? write_window : read_window;
		if (r.frame == none) {
			const u8 cached = s_.cached[window][r.page], leaf = s_.leaf[window][r.page];
			if (cached != none)
				add("NIC", "translates (cached)", r.peer, r.page, cached).requests[i].frame =
				    cached;
			if (cached != leaf) {
				state &n = add("NIC", "translates (walk)", r.peer, r.page, leaf);
				n.requests[i].frame = n.cached[window][r.page] = leaf;
				walked(n, window);
			}
			return;
		}
		if (!in_order(i))
			return;
		const unsigned p = r.page;
		const bool ours = is_frame(r.frame) && s_.used[r.frame] &&
				  ((s_.frame[p] == r.frame && s_.present[p]) || s_.pins[r.frame]);
		state &n = add("NIC", r.kind == data_write ? "writes" : "reads", r.peer, p, r.frame);
		if (is_frame(r.frame) && !ours)
			breaks(n, invariant::i1);
		/* Memory management has seen to it that nobody writes there. */
		if (r.kind == data_write && ours && !s_.pins[r.frame] && !s_.may_write[p])
			breaks(n, invariant::i1);
		if (r.kind == data_write)
			nic_writes(n, r);
		else
			nic_reads(n, r);
		remove(n, i);
	}

	/* One leaf makes one entry; and one of 4 KiB does not stand beside it. */
	void walked(state &n, unsigned window) const
	{
		n.large[window] = sc_.pages > 1 && !n.split[window];
		if (n.large[window])
			n.cached[window] = n.leaf[window];
	}

	void nic_reads(state &n, const request &r) const
	{
		auto &data = n.peers[r.peer].data[r.page][r.unit];
		const auto from =
		    is_frame(r.frame) ? n.content[r.frame][r.unit] : std::array<u8, 2>{signature, signature};

		for (unsigned h = 0; h < 2; ++h)
			if (r.half == none || r.half == h)
				data[h] = from[h];
		/* One unit is all page or all signature, unless the page says so itself. */
		if (!sc_.user_signature && r.half != 0 && (data[0] == signature) != (data[1] == signature))
			breaks(n, invariant::i4);
	}

	void nic_writes(state &n, const request &r) const
	{
		peer &writer = n.peers[r.peer];

		if (!is_frame(r.frame)) {
			/* There is no second attempt. */
			if (r.once)
				breaks(n, invariant::i5);
			return;
		}
		n.content[r.frame][r.unit].fill(r.value);
		/* What it has pinned is the page for it, whatever the owner does. */
		if (n.frame[r.page] == r.frame || (has(writer.hold, r.page) && writer.pin[r.page] == r.frame))
			writer.landed[r.page] |= bit(r.unit);
		if (n.frame[r.page] != r.frame)
			return;
		if (r.once)
			n.proven[r.page][r.unit] = r.value;
		for (peer &q : n.peers)
			for (u8 &set : q.allowed[r.page][r.unit])
				set |= bit(r.value);
	}

	void post(state &n, request r) const
	{
		r.executed = !sc_.overtakes;
		for (request &slot : n.requests) {
			if (!slot.kind) {
				slot = r;
				return;
			}
		}
		std::fprintf(stderr, "%s: too few requests\n", sc_.name.c_str());
		std::abort();
	}

	bool waits_for_nic(unsigned i) const
	{
		for (const request &r : s_.requests)
			if ((r.kind == data_read || r.kind == word_read) && r.peer == i)
				return true;
		return false;
	}

	/* Executed, which need not mean that it is performed. */
	bool has_completed_writes(unsigned i) const
	{
		for (const request &r : s_.requests)
			if (r.kind == data_write && r.peer == i && !r.executed)
				return false;
		return true;
	}

	/* --- initiator --------------------------------------------------------- */

	const work_request &wr(const state &n, unsigned i) const { return sc_.peers[i][n.peers[i].op]; }

	/* Its op-th WRITE brings this value */
	static u8 value_of(unsigned i, unsigned op) { return static_cast<u8>(written_0 + (i ? 2 : op & 1)); }

	void post_words(state &n, unsigned i, u8 pages) const
	{
		for (unsigned p = 0; p < sc_.pages; ++p)
			if (has(pages, p))
				post(n, {word_read, static_cast<u8>(i), static_cast<u8>(p), 0, none, none, 0,
					 0, 0, 0});
	}

	void post_data(state &n, unsigned i) const
	{
		const work_request &w = wr(n, i);
		const peer &q = n.peers[i];

		for (unsigned p = 0; p < sc_.pages; ++p) {
			for (unsigned u = 0; u < sc_.units; ++u) {
				if (!has(q.todo, p) || (w.unit != none && w.unit != u))
					continue;
				request r = {w.write ? data_write : data_read,
					     static_cast<u8>(i),
					     static_cast<u8>(p),
					     static_cast<u8>(u),
					     none,
					     none,
					     w.write ? value_of(i, q.op) : u8{0},
					     0,
					     w.once,
					     0};
				if (!w.write && is(mutation::nic_splits_units)) {
					r.half = 0;
					post(n, r);
					r.half = 1;
				}
				post(n, r);
			}
		}
	}

	void learn(peer &q, u8 pages) const
	{
		for (unsigned p = 0; p < sc_.pages; ++p)
			if (has(pages, p))
				q.known[p] = q.word[p];
	}

	void ask(state &n, unsigned i, u8 pages, bool hold) const
	{
		peer &q = n.peers[i];

		hold |= sc_.hold_first;
		q.ask = hold ? q.todo : pages;
		q.at = stage::wait;
		start_fault(n, i, q.ask, wr(n, i).write, hold);
	}

	void end_op(state &n, unsigned i) const
	{
		const work_request w = wr(n, i);
		peer &q = n.peers[i];

		for (unsigned p = w.first; p < w.first + unsigned{w.pages}; ++p) {
			for (unsigned u = 0; u < sc_.units; ++u) {
				if (w.unit != none && w.unit != u)
					continue;
				if (w.write) {
					if (!w.once && !has(q.discarded, p))
						n.proven[p][u] = value_of(i, q.op);
					if (!w.once && !q.hold && would_be_lost(n, p))
						breaks(n, invariant::i8);
					continue;
				}
				for (unsigned h = 0; h < 2; ++h)
					if (!(q.allowed[p][u][h] & bit(q.data[p][u][h])))
						breaks(n, invariant::read);
			}
		}
		if (q.hold)
			give_back(n, i);
		q.todo = q.ask = q.round = q.unproven = q.faulted = q.by_words = q.lost_holds = q.discarded =
		    0;
		q.landed.fill(0);
		q.snap.fill(0);
		q.word.fill(0);
		q.data = {};
		q.allowed = {};
		q.at = ++q.op < sc_.peers[i].size() ? stage::next : stage::done;
		check_proven(n);
	}

	void give_back(state &n, unsigned i) const
	{
		peer &q = n.peers[i];

		n.releases[i] = {release_pc::lock, q.hold, q.hold_write, q.pin};
		q.hold = q.hold_write = 0;
		q.pin.fill(0);
	}

	/*
	 * The word of a held page does not say what it did: it was invalidated, although
	 * its leaf stayed. The engine cannot tell that from the end of the region, and
	 * asks again. Each time has an invalidation to blame; else there is no progress.
	 */
	void lose_hold(state &n, unsigned i) const
	{
		peer &q = n.peers[i];
		unsigned absences = 0;

		for (unsigned p = 0; p < sc_.pages; ++p)
			absences += s_.times_absent[p];
		give_back(n, i);
		if (++q.lost_holds > absences)
			breaks(n, invariant::i5);
		ask(n, i, q.todo, true);
	}

	void initiator(unsigned i)
	{
		const peer &q = s_.peers[i];

		switch (q.at) {
		case stage::next:
			if (s_.releases[i].pc == release_pc::idle)
				begin_op(i);
			return;
		case stage::wait:
			if (s_.faults[i].pc == fault_pc::answered)
				served(i);
			return;
		case stage::done:
			return;
		default:
			break;
		}
		/* one release at a time */
		if (waits_for_nic(i) || (q.hold && s_.releases[i].pc != release_pc::idle))
			return;
		switch (q.at) {
		case stage::read_data:
			return read_arrived(i);
		case stage::read_words:
			return read_words_arrived(i);
		case stage::fetch_words: {
			state &n = add("initiator", "knows the words", i);
			learn(n.peers[i], q.todo);
			return decide_write(n, i);
		}
		case stage::write_data:
			return write_completed(i);
		default:
			/* Completions come in the order of the work requests. */
			if (has_completed_writes(i))
				write_words_arrived(i);
			return;
		}
	}

	void begin_op(unsigned i)
	{
		const work_request &w = wr(s_, i);
		state &n = add("initiator", w.write ? "begins a WRITE" : "begins a READ", i);
		peer &q = n.peers[i];

		q.discarded = 0;
		for (unsigned p = w.first; p < w.first + unsigned{w.pages}; ++p) {
			q.todo |= bit(p);
			for (unsigned u = 0; u < sc_.units; ++u) {
				if (w.unit != none && w.unit != u)
					continue;
				if (w.write)
					n.proven[p][u] = none;
				else
					for (unsigned h = 0; h < 2; ++h)
						q.allowed[p][u][h] = bit(logical(n, p)[u][h]);
			}
		}
		if (w.write)
			return decide_write(n, i);
		post_read(n, i);
	}

	void snapshot(peer &q) const
	{
		for (unsigned p = 0; p < sc_.pages; ++p)
			q.snap[p] = has(q.todo, p) ? q.known[p] : u8{0};
	}

	void post_read(state &n, unsigned i) const
	{
		peer &q = n.peers[i];

		q.by_words = 0;
		if (!q.hold && !q.round && wr(n, i).by_words) {
			q.by_words = 1;
			for (unsigned p = 0; p < sc_.pages; ++p)
				if (has(q.todo, p) &&
				    (q.known[p] == unknown_word || !(q.known[p] & readable)))
					q.by_words = 0;
			if (is(mutation::read_words_not_known_before))
				q.by_words = 1;
			/* Not this time: but learn them. */
			if (!q.by_words)
				post_words(n, i, q.todo);
		}
		snapshot(q);
		q.at = stage::read_data;
		post_data(n, i);
		if (is(mutation::read_words_overlap_data) && (q.by_words || q.round)) {
			post_words(n, i, q.todo);
			q.at = stage::read_words;
		}
	}

	bool suspicious(const peer &q, unsigned p) const
	{
		if (is(mutation::read_not_scanned))
			return false;
		for (unsigned u = 0; u < sc_.units; ++u)
			if (q.data[p][u][0] == signature && !(u && is(mutation::read_first_unit_scanned)))
				return true;
		return false;
	}

	/* Leaves the suspicious pages to do. */
	bool scan(peer &q) const
	{
		for (unsigned p = 0; p < sc_.pages; ++p)
			if (has(q.todo, p) && !suspicious(q, p))
				q.todo = without(q.todo, bit(p));
		return q.todo;
	}

	void read_arrived(unsigned i)
	{
		state &n = add("initiator", "looks at what it has read", i);
		peer &q = n.peers[i];

		if (wr(n, i).by_words && !q.by_words && !q.round)
			learn(q, q.todo);
		if (q.by_words) {
			q.at = stage::read_words;
			return post_words(n, i, q.todo);
		}
		if (!scan(q))
			return end_op(n, i);
		if (q.round) {
			q.at = stage::read_words;
			return post_words(n, i, q.todo);
		}
		ask(n, i, q.todo, false);
	}

	void read_words_arrived(unsigned i)
	{
		state &n = add("initiator", "compares the words", i);
		peer &q = n.peers[i];
		const u8 was = q.todo;
		bool all_readable = true;

		for (unsigned p = 0; p < sc_.pages; ++p) {
			if (!has(was, p))
				continue;
			if (!(q.word[p] & readable))
				all_readable = false;
			else if (is(mutation::read_suspicion_is_final))
				;
			else if (q.hold || q.word[p] == q.snap[p] ||
				 is(mutation::read_words_not_known_before))
				q.todo = without(q.todo, bit(p));
		}
		learn(q, was);
		if (q.by_words) {
			q.by_words = 0;
			if (!q.todo || !scan(q))
				return end_op(n, i);
			return ask(n, i, q.todo, false);
		}
		if (!q.todo)
			return end_op(n, i);
		if (q.hold && !is(mutation::read_suspicion_is_final))
			return lose_hold(n, i);
		if (q.round == 1 && all_readable) {
			q.round = 2;
			return post_read(n, i);
		}
		if (q.hold) {
			q.at = stage::read_words;
			return post_words(n, i, q.todo);
		}
		ask(n, i, q.todo, true);
	}

	void decide_write(state &n, unsigned i) const
	{
		peer &q = n.peers[i];
		u8 absent = 0;
		bool unknown = false;

		if (q.hold || is(mutation::write_right_unchecked))
			return post_write(n, i);
		if (wr(n, i).once)
			return ask(n, i, q.todo, true);
		for (unsigned p = 0; p < sc_.pages; ++p) {
			if (!has(q.todo, p))
				continue;
			if (q.known[p] == unknown_word)
				unknown = true;
			else if (!(q.known[p] & writable))
				absent |= bit(p);
		}
		if (unknown && is(mutation::write_words_not_known_before))
			return post_write(n, i);
		if (unknown) {
			q.at = stage::fetch_words;
			return post_words(n, i, q.todo);
		}
		if ((q.unproven >= sc_.max_unproven || (absent && q.faulted)) &&
		    !is(mutation::hold_never_asked))
			return ask(n, i, q.todo, true);
		if (absent)
			return ask(n, i, absent, false);
		post_write(n, i);
	}

	void post_write(state &n, unsigned i) const
	{
		peer &q = n.peers[i];

		snapshot(q);
		q.landed.fill(0);
		q.at = stage::write_words;
		if (is(mutation::write_words_before_data)) {
			post_words(n, i, q.todo);
			return post_data(n, i);
		}
		post_data(n, i);
		if (sc_.overtakes && !is(mutation::write_words_in_one_doorbell))
			q.at = stage::write_data;
		else
			post_write_words(n, i);
	}

	void post_write_words(state &n, unsigned i) const
	{
		if (!is(mutation::write_not_verified) &&
		    !(wr(n, i).once && is(mutation::once_released_early)))
			post_words(n, i, n.peers[i].todo);
	}

	/* No READ that is posted from here on overtakes it. */
	void write_completed(unsigned i)
	{
		if (!has_completed_writes(i))
			return;
		state &n = add("initiator", "has the completion of its WRITE", i);
		n.peers[i].at = stage::write_words;
		post_write_words(n, i);
	}

	/* It has been performed, because the READ behind it has. Only the end of the region is unknown. */
	void once_arrived(unsigned i)
	{
		bool all = true;

		for (unsigned p = 0; p < sc_.pages; ++p)
			if (has(s_.peers[i].todo, p) && !(s_.peers[i].word[p] & writable))
				all = false;
		state &n =
		    add("initiator", all ? "is done, by its hold" : "asks whether the region lives", i);
		learn(n.peers[i], n.peers[i].todo);
		if (all || is(mutation::once_released_early))
			return end_op(n, i);
		if (!is(mutation::once_asks_under_hold))
			give_back(n, i);
		n.peers[i].at = stage::wait;
		n.peers[i].ask = n.peers[i].todo;
		start_fault(n, i, n.peers[i].todo, true, false);
	}

	void write_words_arrived(unsigned i)
	{
		if (wr(s_, i).once)
			return once_arrived(i);
		state &n = add("initiator", "compares the words", i);
		peer &q = n.peers[i];
		const u8 was = q.todo;
		const u8 unit = wr(n, i).unit;
		const u8 all = unit == none ? static_cast<u8>(bit(sc_.units) - 1) : bit(unit);
		unsigned absences = 0;

		for (unsigned p = 0; p < sc_.pages; ++p) {
			if (!has(was, p))
				continue;
			const u8 w = q.word[p];
			const bool right = w & writable || is(mutation::write_right_unchecked);
			const bool same =
			    q.hold || w == q.snap[p] || is(mutation::write_words_not_known_before);
			absences += s_.times_absent[p];
			if ((!right || !same) && !is(mutation::write_not_verified))
				continue;
			q.todo = without(q.todo, bit(p));
			/* Proven: it has landed in the owner's page. */
			if (q.landed[p] != all)
				breaks(n, q.hold ? invariant::i5 : invariant::i3);
		}
		learn(q, was);
		if (!q.todo)
			return end_op(n, i);
		if (q.hold)
			return lose_hold(n, i);
		++q.unproven;
		/* Each attempt that proved nothing has an invalidation to blame. */
		if (q.unproven > absences)
			breaks(n, invariant::i5);
		/* Whatever memory does, without a hold there are only so many. */
		if (q.unproven > sc_.max_unproven)
			breaks(n, invariant::i5);
		decide_write(n, i);
	}

	void served(unsigned i)
	{
		state &n = add("initiator", "has the answer to its fault", i);
		peer &q = n.peers[i];

		for (unsigned p = 0; p < sc_.pages; ++p)
			if (has(q.ask, p))
				q.known[p] = s_.faults[i].word[p];
		n.faults[i] = {};
		q.ask = 0;
		/* It was the second answer: it lives, and so did the hold. */
		if (wr(n, i).once && q.faulted)
			return end_op(n, i);
		q.faulted = 1;
		if (wr(n, i).write)
			return decide_write(n, i);
		q.round = 1;
		post_read(n, i);
	}
};

} // namespace

void successors(const scenario &sc, mutation m, const state &s, std::vector<step> &out)
{
	expansion(sc, m, s, out).all();
}

state initial(const scenario &sc)
{
	state s{};

	s.budget = sc.budget;
	s.prefetches = sc.prefetches;
	s.split.fill(sc.resident && !sc.entry);
	s.huge = sc.resident && sc.entry;
	s.entry = sc.entry;
	for (unsigned f = 0; f < max_frames; ++f)
		for (auto &unit : s.content[f])
			unit.fill(foreign);
	s.frame.fill(none);
	for (auto &page : s.proven)
		page.fill(none);
	for (auto &window : s.cached)
		window.fill(none);
	s.leaf[read_window].fill(signature_frame);
	s.leaf[write_window].fill(scratch_frame);
	for (unsigned p = 0; p < sc.pages; ++p) {
		for (auto &unit : s.backing[p])
			unit.fill(sc.user_signature && !p ? u8{signature} : static_cast<u8>(page_0 + p));
		if (!has(sc.present | sc.resident, p))
			continue;
		const u8 f = static_cast<u8>(p);
		s.used[f] = 1;
		s.content[f] = s.backing[p];
		s.frame[p] = f;
		s.present[p] = s.may_write[p] = 1;
		if (!has(sc.resident, p))
			continue;
		s.dirty[p] = 1;
		s.word[p] = generation | readable | writable;
		s.leaf[read_window][p] = s.leaf[write_window][p] = f;
	}
	for (unsigned i = 0; i < max_peers; ++i) {
		peer &q = s.peers[i];
		q.at = i < sc.peers.size() ? stage::next : stage::done;
		q.known = s.word;
		if (!sc.knows)
			q.known.fill(unknown_word);
	}
	return s;
}

bool is_final(const scenario &, const state &s)
{
	for (const peer &q : s.peers)
		if (q.at != stage::done)
			return false;
	for (const fault &f : s.faults)
		if (f.pc != fault_pc::idle)
			return false;
	for (const release &r : s.releases)
		if (r.pc != release_pc::idle)
			return false;
	return s.mm.pc == reclaim_pc::idle && s.lock == nobody;
}

invariant blame(const scenario &sc, const state &s)
{
	/* A notifier that waits: for itself, for a peer, or for one who waits for reclaim. */
	if (s.mm.pc == reclaim_pc::stuck || s.mm.pc == reclaim_pc::back)
		return invariant::i7;
	for (const fault &f : s.faults)
		if (f.pc == fault_pc::reclaiming_locked)
			return invariant::i7;
	return sc.user_signature ? invariant::i6 : invariant::i5;
}

std::string_view name(invariant i)
{
	static constexpr std::array<std::string_view, 14> names = {
	    "none", "I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "READ", "I9", "I10", "I11", "QP"};
	return names[static_cast<unsigned>(i)];
}

std::string_view name(mutation m)
{
	static constexpr std::array<std::string_view, static_cast<unsigned>(mutation::count)> names = {
	    "none",
	    "absent_word_after_leaf",
	    "absent_word_stays",
	    "absent_no_flush",
	    "absent_no_drain",
	    "absent_flush_before_leaf",
	    "absent_through_not_present",
	    "absent_write_leaf_stays",
	    "resident_no_flush",
	    "resident_no_drain",
	    "resident_word_before_leaf",
	    "resident_word_before_flush",
	    "resident_through_not_present",
	    "resident_not_dirty",
	    "generation_stays",
	    "generation_on_resident_page",
	    "retry_check_missing",
	    "merge_check_missing",
	    "held_leaf_goes",
	    "held_word_stays",
	    "stale_leaf_stays",
	    "stale_flush_missing",
	    "stale_mapped_over",
	    "protect_word_after_leaf",
	    "protect_word_stays",
	    "protect_generation_stays",
	    "protect_no_flush",
	    "protect_no_drain",
	    "protect_flush_before_leaf",
	    "protect_through_not_present",
	    "protect_leaf_stays",
	    "protect_although_page_goes",
	    "protect_held_leaf_goes",
	    "protect_held_word_stays",
	    "protect_stale_unmarked",
	    "split_no_flush",
	    "split_uncounted",
	    "split_counted_late",
	    "split_write_missing",
	    "huge_one_page_goes",
	    "huge_words_of_others_stay",
	    "huge_flush_of_one_page",
	    "huge_under_hold",
	    "huge_merge_uncounted",
	    "huge_merge_counted_early",
	    "huge_drops_right",
	    "huge_one_page_dirty",
	    "pin_check_missing",
	    "release_not_dirty",
	    "allocation_under_lock",
	    "notifier_allocates",
	    "notifier_waits_for_peer",
	    "nic_relaxed_ordering",
	    "nic_splits_units",
	    "read_not_scanned",
	    "read_first_unit_scanned",
	    "read_words_overlap_data",
	    "read_words_not_known_before",
	    "read_suspicion_is_final",
	    "write_not_verified",
	    "write_words_before_data",
	    "write_words_in_one_doorbell",
	    "write_words_not_known_before",
	    "write_right_unchecked",
	    "once_released_early",
	    "once_asks_under_hold",
	    "hold_never_asked",
	};
	return names[static_cast<unsigned>(m)];
}

namespace
{

std::string frame_name(u8 f)
{
	switch (f) {
	case none:
		return "-";
	case signature_frame:
		return "sig";
	case scratch_frame:
		return "scratch";
	case not_present:
		return "NOT PRESENT";
	default:
		return "frame" + std::to_string(f);
	}
}

std::string word_name(u8 w)
{
	return w == unknown_word
		   ? "?"
		   : std::to_string(w >> 2) + (w & readable ? "r" : "-") + (w & writable ? "w" : "-");
}

} // namespace

std::string describe(const label &l)
{
	const std::string_view actor = l.actor, what = l.what;
	std::string text(actor);

	if (actor == "NIC")
		text += " for initiator";
	if (actor == "NIC" || actor == "initiator" || actor == "release" || actor == "fault")
		text +=
		    actor == "fault" && l.who == prefetcher ? " of the owner" : " " + std::to_string(l.who);
	text += ": ";
	text += what;
	if (what.substr(0, 4) == "leaf")
		text += l.arg ? " (write window)" : " (read window)";
	if (l.page != none)
		text += ", page " + std::to_string(l.page);
	if (actor == "NIC" && what.substr(0, 8) != "executes")
		text += what == "reads the word" ? ", " + word_name(l.arg) : ", " + frame_name(l.arg);
	return text;
}

std::string describe(const scenario &sc, const state &s)
{
	std::string text;

	for (unsigned p = 0; p < sc.pages; ++p) {
		text += p ? "; page " : "page ";
		text += std::to_string(p) + ": word " + word_name(s.word[p]) + " read->" +
			frame_name(s.leaf[read_window][p]) + " write->" +
			frame_name(s.leaf[write_window][p]) + " owner " + frame_name(s.frame[p]) +
			(s.present[p] ? "" : " unmapped") + (s.dirty[p] ? " dirty" : "") +
			(s.holds[p] ? " held" : "");
	}
	return text;
}

} // namespace model
