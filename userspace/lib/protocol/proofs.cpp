/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What shows that a READ brought memory, and that a WRITE reached it. */
#include "protocol/engine.hpp"
#include "protocol/requests.hpp"

#include <algorithm>

namespace npr {

/* --- READ -------------------------------------------------------------- */

bool engine::post_read(piece &p) noexcept
{
	const bool opaque = op_at(p.op).opaque;
	/* The other runs begin with a page. */
	const bytes first = run_bytes(p, p.todo.next_run(0));
	std::uint64_t head = opaque ? 0 : split(addr_of(op_at(p.op).wr) + first.start, first.length);
	const std::uint32_t entries = p.todo.runs() + (head != 0);
	std::uint64_t page = p.first_page;
	std::uint32_t pages = 0;
	stage next = stage::read_data;

	if (p.hold.id() || p.round || opaque) {
		const page_bits::run h = p.todo.hull();
		page += h.first;
		pages = h.end - h.first;
	} else if (config_.read_words_min && p.length >= config_.read_words_min) {
		bool known = true;
		pages = p.pages;
		for (std::uint32_t i = 0; i < pages && known; ++i) {
			const std::uint64_t w = cache_.get(p.reg->uid, page + i);
			known = w != unknown_word && w & word_readable;
		}
		/* Not this time: but learn the words, for the next READ here, if ever there is room. */
		if (known)
			next = stage::read_known;
		else if (entries < max_entries_)
			next = stage::read_warming;
		else
			pages = 0;
	}
	const bool warms = next == stage::read_warming;
	if (!room(entries + warms) || (pages && !take_ring(p, page, pages)))
		return false;
	if (warms)
		push_words(p, false);
	else if (pages)
		snapshot(p);
	p.at = next;
	unsigned left = entries;
	p.todo.for_each_run([&](page_bits::run r) {
		const bytes b = run_bytes(p, r);
		if (head) {
			push_data(p, b.start, head, false);
			--left;
		}
		push_data(p, b.start + head, b.length - head, !--left);
		head = 0;
	});
	return true;
}

/*
 * What the words are to tell of has completed. Those of a READ never go before that: a READ may
 * overtake a READ on any HCA.
 */
bool engine::post_words(piece &p) noexcept
{
	if (!room(1))
		return false;
	push_words(p, true);
	return true;
}

void engine::read_arrived(piece &p) noexcept
{
	if (p.at == stage::quick_read) {
		const op &o = op_at(p.op);
		const rdma_np_region_info &i = p.reg->info;
		const std::uint64_t raddr = o.wr.wr.rdma.remote_addr - i.base + i.read_addr;

		if (!blind_ && !any_suspicious(reinterpret_cast<const std::byte *>(
					    static_cast<std::uintptr_t>(o.wr.sg_list[0].addr)),
				    raddr, p.length, i.signature))
			return end_piece(p);
		unpack(p);
	}
	if (p.at == stage::read_warming) {
		learn_words(p);
		give_ring(p);
	}
	if (p.at == stage::read_known) {
		p.at = stage::known_words;
		return proceed_first(p);
	}
	const bool opaque = op_at(p.op).opaque;
	if (!opaque && !scan(p))
		return end_piece(p);
	if (opaque || p.hold.id() || p.round) {
		p.at = stage::read_words;
		return proceed_first(p);
	}
	stats_.suspicious_pages += p.todo.count();
	ask(p, false);
}

void engine::read_words_arrived(piece &p) noexcept
{
	const page_bits was = p.todo;
	bool readable = true;

	was.for_each([&](unsigned i) {
		const std::uint64_t k = p.first_page + i - p.ring_page + p.ring_offset;
		const std::uint64_t word = config_.words[k];

		if (!(word & word_readable))
			readable = false;
		else if (p.hold.id() || word == snap_[k])
			p.todo.clear(i);
	});
	learn_words(p);
	give_ring(p);
	if (p.at == stage::known_words) {
		if (!p.todo.any() || !scan(p))
			return end_piece(p);
		stats_.suspicious_pages += p.todo.count();
		return ask(p, false);
	}
	const bool opaque = op_at(p.op).opaque;
	if (!opaque)
		stats_.false_suspicions += was.count() - p.todo.count();
	if (!p.todo.any())
		return end_piece(p);
	if (p.hold.id())
		return doubt_hold(p);
	if (opaque) {
		stats_.suspicious_pages += p.todo.count();
		++p.unproven;
		p.at = stage::write_decide;
		return proceed(p);
	}
	if (p.round == 1 && readable) {
		/* Some words had not been known, or have changed: they are known now. */
		p.round = 2;
		p.at = stage::read_data;
		p.todo.merge_runs(max_runs(p));
		return proceed(p);
	}
	ask(p, true);
}

/* --- WRITE ------------------------------------------------------------- */

bool engine::decide_write(piece &p) noexcept
{
	const bool read = op_at(p.op).kind == op_kind::read;
	const std::uint64_t right = read ? word_readable : word_writable;
	bool unknown = false;

	p.todo.merge_runs(max_runs(p));
	if (p.hold.id())
		return read ? post_read(p) : post_write(p);
	/* What lands on pages that stay where they are lands in order, and once. */
	if (config_.ordered_writes && !read && !p.hold.impossible()) {
		ask(p, true);
		return true;
	}
	p.ask.reset(p.pages);
	p.todo.for_each([&](unsigned i) {
		const std::uint64_t w = cache_.get(p.reg->uid, p.first_page + i);
		if (w == unknown_word)
			unknown = true;
		else if (!(w & right))
			p.ask.set(i);
	});
	if (unknown && p.fetches < max_fetches)
		return post_fetch(p);
	if (unknown || p.unproven >= max_unproven || (p.ask.any() && p.faulted)) {
		ask(p, true);
		return true;
	}
	if (p.ask.any()) {
		ask(p, false);
		return true;
	}
	return read ? post_read(p) : post_write(p);
}

/*
 * Knowledge for later proofs. A word that was READ too early, before WRITEs that were posted before it,
 * is an older one, and can only fail to prove; so this does not need P1.
 * Whole cache slots: the neighbours will be wanted too, and 4 KiB cost no more than 8 bytes.
 */
bool engine::post_fetch(piece &p) noexcept
{
	const page_bits::run h = p.todo.hull();
	const std::uint64_t first = (p.first_page + h.first) / slot_words * slot_words;
	const std::uint64_t end = std::min((p.first_page + h.end + slot_words - 1) / slot_words * slot_words,
					   region_pages(p.reg->info));

	if (!room(1) || !take_ring(p, first, static_cast<std::uint32_t>(end - first)))
		return false;
	p.at = stage::fetch_words;
	++p.fetches;
	push_words(p, true);
	return true;
}

bool engine::post_write(piece &p) noexcept
{
	const page_bits::run h = p.todo.hull();
	const bool chained = p.reg->in_order();
	unsigned left = p.todo.runs();

	if (!room(left + chained) || !take_ring(p, p.first_page + h.first, h.end - h.first))
		return false;
	snapshot(p);
	/*
	 * This needs P1, under a hold as well: words that were READ before the WRITE was executed
	 * would not tell of a hold that has ended with its region in between.
	 */
	p.at = chained ? stage::write_words : stage::write_data;
	p.todo.for_each_run([&](page_bits::run r) {
		const bytes b = run_bytes(p, r);
		push_data(p, b.start, b.length, !--left && !chained);
	});
	if (chained)
		push_words(p, true);
	return true;
}

/* There is one piece, and once it is posted it is not posted again. */
bool engine::post_once(piece &p) noexcept
{
	if (!p.hold.id()) {
		ask(p, true);
		return true;
	}
	/*
	 * The words are to be read after it. A READ may overtake an atomic, but for the fence: with it
	 * our HCA sends the READ when the atomic's answer is here, so this does not need P1. Behind a WRITE
	 * with immediate it does. Nothing is posted behind that one before the words are here, so it stalls nobody.
	 */
	const ibv_wr_opcode opcode = op_at(p.op).wr.opcode;
	const bool chained = is_atomic(opcode) || p.reg->in_order();

	if (!room(1 + chained) || !take_ring(p, p.first_page, p.pages))
		return false;
	p.at = chained ? stage::write_words : stage::write_data;
	push_once(p, !chained);
	if (chained)
		push_words(p, true, is_atomic(opcode) ? IBV_SEND_FENCE : 0);
	return true;
}

/*
 * All is in memory, what is new is what the receiver hears. Data that meets a page which is
 * there writes what is written there, as nobody else may until the completion; and the page
 * that is not there, or is gone with its region, has the data as well. So no words are READ,
 * and this does not need P1.
 */
bool engine::post_tail(piece &p) noexcept
{
	if (!room(1))
		return false;
	push_once(p, true);
	stalls_ = sq_tail_;
	return true;
}

/* The HCA says what comes of it, as of any request for pinned memory. */
bool engine::post_plain(piece &p) noexcept
{
	if (!room(1))
		return false;
	if (op_at(p.op).kind == op_kind::once)
		push_once(p, true);
	else
		push_data(p, p.offset, p.length, true);
	return true;
}

/*
 * Completions come in order, whatever order the peer executes in: when this READ's is here,
 * nothing before it waits for a receive. Its word is knowledge, and proves nothing. So this
 * does not need P1.
 */
bool engine::post_barrier(piece &p) noexcept
{
	if (!room(1) || !take_ring(p, p.first_page, 1))
		return false;
	push_words(p, true);
	return true;
}

void engine::write_words_arrived(piece &p) noexcept
{
	if (p.at == stage::quick_words) {
		/* They were writable, and known, when the WRITE was posted. */
		if (std::equal(&snap_[p.ring_offset], &snap_[p.ring_offset] + p.ring_pages,
			       &config_.words[p.ring_offset])) {
			give_ring(p);
			return end_piece(p);
		}
		unpack(p);
		p.at = stage::write_words;
	}
	const page_bits was = p.todo;
	was.for_each([&](unsigned i) {
		const std::uint64_t k = p.first_page + i - p.ring_page + p.ring_offset;

		if (config_.words[k] & word_writable && (p.hold.id() || config_.words[k] == snap_[k]))
			p.todo.clear(i);
	});
	learn_words(p);
	give_ring(p);
	if (!p.todo.any())
		return end_piece(p);
	if (p.hold.id())
		return doubt_hold(p);
	stats_.repeated_pages += p.todo.count();
	++p.unproven;
	p.at = stage::write_decide;
	proceed(p);
}

} // namespace npr
