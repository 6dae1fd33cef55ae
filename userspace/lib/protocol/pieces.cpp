/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Pieces of work requests: their lists, and what becomes of one from its begin to its end. */
#include "protocol/engine.hpp"
#include "protocol/requests.hpp"

#include <algorithm>
#include <utility>

namespace npr {

void engine::put(list &l, piece &p) noexcept
{
	state_.waits += &l != &free_;
	p.on = &l;
	p.next = none;
	p.prev = l.last;
	(l.last == none ? l.first : pieces_[l.last].next) = index(p);
	l.last = index(p);
}

void engine::put_first(list &l, piece &p) noexcept
{
	state_.waits += &l != &free_;
	p.on = &l;
	p.prev = none;
	p.next = l.first;
	(l.first == none ? l.last : pieces_[l.first].prev) = index(p);
	l.first = index(p);
}

void engine::take(piece &p) noexcept
{
	if (!p.on)
		return;
	state_.waits -= p.on != &free_;
	(p.prev == none ? p.on->first : pieces_[p.prev].next) = p.next;
	(p.next == none ? p.on->last : pieces_[p.next].prev) = p.prev;
	p.on = nullptr;
}

/* The first of free_ is one that nobody uses. The ones used before come first: their memory has been touched. */
bool engine::has_piece() noexcept
{
	if (!free_.empty())
		return true;
	if (made_ == pieces_.size())
		return false;
	piece &p = pieces_[made_++];
	p.ring = none;
	put(free_, p);
	return true;
}

bool engine::start_piece(op &o, std::uint64_t i) noexcept
{
	const std::uint64_t addr = addr_of(o.wr) + o.issued;
	binding *b = make_binding(rkey_of(o.wr), addr);

	if (!b) {
		fail_op(i, IBV_WC_GENERAL_ERR);
		return false;
	}
	if (b->state == binding_state::bound && !may_go_on(o, *b->to)) {
		/* The owner may have ended that region, and given its key to another, before this was posted. */
		if (answered_for(*b, i))
			fail_op(i, IBV_WC_REM_ACCESS_ERR);
		else
			ask_afresh(*b, addr);
		return false;
	}
	const bool plain = b->state == binding_state::plain && is_plain(*b, i);
	if (!plain && b->state != binding_state::bound) {
		ask_resolve(*b, addr);
		return false;
	}
	/* See end_piece(): there is no key for all of it. */
	if (!plain && o.wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && !allowed(o.wr, o.length, *b->to)) {
		fail_op(i, IBV_WC_REM_INV_REQ_ERR);
		return false;
	}

	piece &p = pieces_[free_.first];
	/* Without a region there is nobody to set a bound. */
	const std::uint64_t pages = plain ? page_bits::capacity : b->to->info.max_pages;
	std::uint64_t limit = pages * page_size - addr % page_size;
	if (!plain)
		limit = std::min<std::uint64_t>(limit, b->to->info.length - (addr - b->to->info.base));

	take(p);
	p.op = i;
	p.slots = 0;
	p.ring = none;
	p.rebinds = 0;
	p.offset = o.issued;
	p.length = static_cast<std::uint32_t>(std::min<std::uint64_t>(o.length - o.issued, limit));
	o.issued += p.length;
	++o.pieces;
	if (plain)
		go_plain(p);
	else
		reset_piece(p, *b->to);
	proceed(p);
	return true;
}

/*
 * Begin, or begin again, without a region: the key is pinned memory's by now, see is_plain().
 * The keys of a dead region prove nothing, so of a request that was posted after the region
 * had died nothing is done. For one that was under way when the owner ended the region the
 * HCA says what it says of pinned memory that was deregistered under way.
 */
void engine::go_plain(piece &p) noexcept
{
	p.reg = nullptr;
	p.at = stage::plain;
}

/* Begin, or begin again with another region. */
void engine::reset_piece(piece &p, region &r) noexcept
{
	const op &o = op_at(p.op);
	const std::uint64_t addr = addr_of(o.wr) + p.offset;

	p.reg = &r;
	++r.refs;
	p.first_page = (addr >> page_shift) - (r.info.base >> page_shift);
	p.pages = pages_of(addr, p.length);
	p.todo.set_first(p.pages);
	p.round = p.unproven = p.fetches = p.faulted = 0;
	p.pause = p.short_since = 0;
	release_if(p.hold.reset(state_.holds_wanted));
	p.at = o.kind == op_kind::read && !o.opaque ? stage::read_data : stage::write_decide;
}

void engine::end_piece(piece &p) noexcept
{
	op &o = op_at(p.op);

	end_hold(p);
	if (o.kind == op_kind::write && o.wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && o.pieces == 1 &&
	    o.issued == o.length && p.at != stage::tail) {
		p.at = stage::tail;
		return proceed(p);
	}
	/* One may have come since it was posted; or there was one, under which it could not be posted: see stalled(). */
	if (config_.leases && p.reg && !p.reg->gone && !needs_hold(o) && find_lease(o.wr, o.length, *p.reg) == none)
		want_lease(o.wr, o.length, *p.reg, is_quick(p) || !p.faulted);
	free_piece(p);
	if (!--o.pieces && o.issued == o.length)
		finish(o);
}

/* The op failed. Buffers and keys stay as they are until the send queue is done with them. */
void engine::drop_piece(piece &p) noexcept
{
	take(p);
	end_hold(p);
	--op_at(p.op).pieces;
	p.at = stage::dropped;
	if (!p.slots)
		free_piece(p);
}

void engine::free_piece(piece &p) noexcept
{
	take(p);
	give_ring(p);
	unref(p);
	p.at = stage::unused;
	++p.generation;
	/* the one used last is still in the cache */
	put_first(free_, p);
}

void engine::unref(piece &p) noexcept
{
	if (region *r = std::exchange(p.reg, nullptr))
		unref(*r);
}

void engine::unref(region &r) noexcept
{
	if (!--r.refs && r.gone) {
		retire(r);
		forget_dead();
	}
}

/* Go on now if the send queue has room and nobody was first. */
void engine::proceed(piece &p) noexcept
{
	if (!posting_.empty() || !try_post(p))
		put(posting_, p);
}

/*
 * For a piece that has its words' place in the ring already and needs one send
 * queue entry: it must not stand behind one that waits for the ring.
 */
void engine::proceed_first(piece &p) noexcept
{
	if (!try_post(p))
		put_first(posting_, p);
}

bool engine::try_post(piece &p) noexcept
{
	const bool once = op_at(p.op).kind == op_kind::once;

	if (p.at == stage::plain)
		return post_plain(p);
	if (p.reg && p.reg->gone && p.at == stage::tail) {
		fail_op(p.op, IBV_WC_REM_ACCESS_ERR);
		return true;
	}
	/* What happens once was posted already when its words are to be READ: they will say that it is in doubt. */
	if (p.reg && p.reg->gone && (!p.hold.id() || (once && p.at != stage::write_words)) && p.at != stage::read_words &&
	    p.at != stage::known_words) {
		rebind(p);
		return true;
	}
	if (p.at == stage::tail && state_.holds_wanted) {
		put(tails_, p);
		return true;
	}
	switch (p.at) {
	case stage::read_data:
		return post_read(p);
	case stage::known_words:
	case stage::read_words:
	case stage::write_words:
	case stage::quick_words:
		return post_words(p);
	case stage::tail:
		return post_tail(p);
	case stage::barrier:
		return post_barrier(p);
	default:
		return once ? post_once(p) : decide_write(p);
	}
}

void engine::arrived(piece &p) noexcept
{
	switch (p.at) {
	case stage::quick_read:
	case stage::read_data:
	case stage::read_warming:
	case stage::read_known:
		return read_arrived(p);
	case stage::known_words:
	case stage::read_words:
		return read_words_arrived(p);
	case stage::fetch_words:
		learn_words(p);
		give_ring(p);
		p.at = stage::write_decide;
		return proceed(p);
	case stage::quick_write:
		p.at = stage::quick_words;
		return proceed_first(p);
	case stage::write_data:
		p.at = stage::write_words;
		return proceed_first(p);
	case stage::tail:
	case stage::plain:
		return end_piece(p);
	case stage::barrier:
		learn_words(p);
		give_ring(p);
		return ask(p, true);
	default:
		return write_words_arrived(p);
	}
}

engine::bytes engine::run_bytes(const piece &p, page_bits::run r) const noexcept
{
	const std::uint64_t addr = op_at(p.op).wr.wr.rdma.remote_addr + p.offset;
	const std::uint64_t page = addr & ~(page_size - 1);
	const std::uint64_t start = std::max(addr, page + r.first * page_size);
	const std::uint64_t end = std::min(addr + p.length, page + r.end * page_size);

	return {start - addr + p.offset, end - start};
}

/* Of the pages to do, leave those that look absent. Any? */
bool engine::scan(piece &p) noexcept
{
	if (blind_)
		return p.todo.any();
	const op &o = op_at(p.op);
	const std::uint64_t delta = o.wr.wr.rdma.remote_addr - p.reg->info.base + p.reg->info.read_addr;
	page_bits found(p.pages);

	p.todo.for_each_run([&](page_bits::run r) {
		const bytes b = run_bytes(p, r);
		scan_suspicious({o.wr.sg_list, static_cast<std::size_t>(o.wr.num_sge)}, b.start, delta + b.start,
				b.length, p.reg->info.signature, delta + p.offset, found);
	});
	p.todo = found;
	return found.any();
}

} // namespace npr
