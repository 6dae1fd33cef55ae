/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "engine.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

namespace npr {

namespace {

constexpr std::uint64_t no_op = ~0ULL;
constexpr unsigned max_fetches = 8;
constexpr unsigned max_unproven = 3;
constexpr unsigned max_rebinds = 8;
/* Bytes that a lease may be of, from its part's first one on. */
constexpr std::uint64_t lease_span = remote_leases::part + remote_leases::overlap;

constexpr std::uint32_t atomic_size = 8;

/* By opcode. Those that are not known do not complete. */
constexpr auto completion_opcodes = [] {
	std::array<ibv_wc_opcode, 32> all{};

	all.fill(IBV_WC_SEND);
	all[IBV_WR_RDMA_WRITE] = all[IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE;
	all[IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ;
	all[IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP;
	all[IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD;
	all[IBV_WR_LOCAL_INV] = IBV_WC_LOCAL_INV;
	all[IBV_WR_BIND_MW] = IBV_WC_BIND_MW;
	return all;
}();

std::uint32_t rkey_of(const ibv_send_wr &wr) noexcept
{
	return is_atomic(wr.opcode) ? wr.wr.atomic.rkey : wr.wr.rdma.rkey;
}

/* The address comes first in both: one member may be read through the other. */
std::uint64_t addr_of(const ibv_send_wr &wr) noexcept
{
	return wr.wr.rdma.remote_addr;
}

/*
 * @wr with a key, and the address under which the HCA reaches the region with it. A lease's key is for one
 * window, whatever is done under it. The address comes first, as above.
 */
void translate(ibv_send_wr &wr, const rdma_np_region_info &i, std::uint32_t rkey, bool write) noexcept
{
	(is_atomic(wr.opcode) ? wr.wr.atomic.rkey : wr.wr.rdma.rkey) = rkey;
	wr.wr.rdma.remote_addr += (write ? i.write_addr : i.read_addr) - i.base;
}

/* What a failed RESOLVE means for a work request that needed it. */
ibv_wc_status resolve_status(int error) noexcept
{
	switch (error) {
	case -ETIMEDOUT:
		return IBV_WC_RETRY_EXC_ERR;
	case -ENOMEM:
		return IBV_WC_REM_OP_ERR;
	default:
		return IBV_WC_GENERAL_ERR;
	}
}

/* Of RESOLVE: it is no unpinned region, or nothing is known of it, and the HCA will say. */
bool is_answer(int error) noexcept
{
	return error == -EACCES || error == -ENXIO || error == -EHOSTUNREACH || error == -ECONNREFUSED;
}

ibv_wc_status fault_status(std::uint32_t status) noexcept
{
	switch (status) {
	case RDMA_NP_ACCESS:
	case RDMA_NP_ADDRESS:
		return IBV_WC_REM_ACCESS_ERR;
	case RDMA_NP_TIMEOUT:
		return IBV_WC_RETRY_EXC_ERR;
	case RDMA_NP_NOMEM:
		return IBV_WC_REM_OP_ERR;
	default:
		return IBV_WC_REM_INV_REQ_ERR;
	}
}

/* Nonsense, or an owner whose pages or units are not those that we know how to look at. */
bool sane(const rdma_np_region_info &i) noexcept
{
	const std::uint64_t in_page = page_size - 1;

	return i.page_shift == page_shift && i.unit_shift == unit_shift && i.max_pages && i.max_ranges &&
	       i.max_outstanding && i.length && i.base + (i.length - 1) >= i.base &&
	       (!i.read_key || (i.base & in_page) == (i.read_addr & in_page)) &&
	       (!i.write_key || (i.base & in_page) == (i.write_addr & in_page)) && i.table_addr % 8 == 0;
}

/*
 * How many bytes of a READ that will be scanned go first, by themselves.
 *
 * The responder fetches a READ by PCIe requests, and may cut these at any multiple of a unit's
 * size behind the READ's address (P3). A unit in which a request ends comes in two parts, and
 * can be half page, half signature (I4). So a READ that reaches into another unit begins with
 * a unit, and then each of its requests does. The bytes before that unit are a READ of their own.
 */
std::uint64_t split(std::uint64_t raddr, std::uint64_t length) noexcept
{
	const std::uint64_t head = -raddr % unit_size;

	return length > head ? head : 0;
}

std::uint32_t pages_of(std::uint64_t addr, std::uint32_t length) noexcept
{
	return static_cast<std::uint32_t>(((addr + length - 1) >> page_shift) - (addr >> page_shift) + 1);
}

std::uint64_t region_pages(const rdma_np_region_info &i) noexcept
{
	return ((i.base + (i.length - 1)) >> page_shift) - (i.base >> page_shift) + 1;
}

} // namespace

engine::engine(const engine_config &config, backend &world)
    : config_(config), world_(world), credits_(*config.pool), cache_(config.cache_slots)
{
	const std::uint32_t budget = config_.sq_budget;
	const std::size_t ops = std::bit_ceil(std::max<std::size_t>(config_.depth, 1));
	const std::size_t slots = std::bit_ceil(std::size_t{budget});
	const std::size_t pieces = std::clamp<std::size_t>(budget, 16, 1024);
	const std::size_t records = std::bit_ceil(pieces);

	config_.max_sge = std::max(config_.max_sge, 1U);
	config_.max_faults = std::max(config_.max_faults, 1U);
	config_.leases &= !config_.local_only;
	ops_.resize(ops);
	op_mask_ = ops - 1;
	op_sges_.resize(ops * config_.max_sge);
	op_wire_.resize(ops * config_.max_sge);
	op_holds_.resize(ops * config_.max_sge);
	op_inline_.resize(ops * config_.max_inline);

	slots_.resize(slots);
	briefs_.resize(slots);
	sq_mask_ = slots - 1;
	hot_.wr.sg_list = &hot_.sge;
	hot_.wr.num_sge = 1;
	hot_.signals = config_.sq_sig_all ? unsigned{IBV_SEND_SIGNALED} : 0U;
	hot_.free = config_.local_only ? opcodes_of<trait::passing> : opcodes_of<trait::passing, trait::remote>;
	chain_.resize(std::min(budget, 16U));
	chain_sges_.resize(chain_.size() * config_.max_sge);
	chain_limit_ = static_cast<std::uint32_t>(chain_.size()) - 1;
	/* What drains a dead queue is a WRITE, which not every type of QP has. */
	signal_every_ = config_.local_only ? 1U : std::max(std::min(budget, config_.depth) / 4, 1U);
	first_id_ = std::uint64_t{config_.tag} << 32;
	quick_limit_ = config_.read_words_min ? config_.read_words_min - 1 : ~0U;
	max_entries_ = std::min(budget, credits_.largest());

	snap_.resize(config_.words.size());
	ring_.resize(records);
	ring_mask_ = records - 1;

	pieces_.resize(pieces);
}

engine::~engine()
{
	/* Nobody hears of them any more. */
	set_tail(0);
	credits_.give(under_way());
}

/* --- lists ------------------------------------------------------------- */

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

/* --- ops --------------------------------------------------------------- */

/* 0, and the bytes of local buffers; or what is wrong with the request by itself. */
int engine::check(const ibv_send_wr &wr, std::uint64_t &length) const noexcept
{
	length = 0;
	if (wr.num_sge < 0 || static_cast<std::uint32_t>(wr.num_sge) > config_.max_sge || !is_known(wr.opcode))
		return -EINVAL;
	/* What a window shows would have to stay where it is. */
	if (wr.opcode == IBV_WR_BIND_MW && wr.bind_mw.bind_info.mr && wr.bind_mw.bind_info.length &&
	    world_.is_local(wr.bind_mw.bind_info.mr->lkey))
		return -EOPNOTSUPP;
	for (int i = 0; i < wr.num_sge; ++i)
		length += wr.sg_list[i].length;
	if (length > max_length ||
	    (wr.send_flags & IBV_SEND_INLINE && (length > config_.max_inline || wr.opcode == IBV_WR_RDMA_READ)))
		return -EINVAL;
	return 0;
}

int engine::accept(const ibv_send_wr &wr) noexcept
{
	const bool inlined = wr.send_flags & IBV_SEND_INLINE;
	std::uint64_t length;

	expand();
	if (const int rc = check(wr, length))
		return rc;
	if (tail_ - head_ >= config_.depth) {
		drop_silent();
		if (tail_ - head_ >= config_.depth)
			return -ENOMEM;
	}

	op &o = op_at(tail_);
	ibv_sge *sges = &op_sges_[(tail_ & op_mask_) * config_.max_sge];

	o.wr = wr;
	o.wr.next = nullptr;
	o.wr.sg_list = o.wire = sges;
	o.held = 0;
	o.length = is_atomic(wr.opcode) ? atomic_size : static_cast<std::uint32_t>(length);
	o.issued = o.pieces = o.slots = o.vendor_err = 0;
	o.status = trouble_.dead ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS;
	o.kind = op_kind::undecided;
	o.opaque = config_.opaque_sinks && wr.opcode == IBV_WR_RDMA_READ;
	o.started = o.finished = false;
	if (inlined && length) {
		/* The application may use its buffer again at once: this copy serves repeats. */
		std::byte *copy = &op_inline_[(tail_ & op_mask_) * config_.max_inline];
		sges[0] = {reinterpret_cast<std::uintptr_t>(copy), o.length, 0};
		o.wr.num_sge = 1;
		for (int i = 0; i < wr.num_sge; ++i) {
			std::memcpy(copy,
				    reinterpret_cast<const void *>(
					    static_cast<std::uintptr_t>(wr.sg_list[i].addr)),
				    wr.sg_list[i].length);
			copy += wr.sg_list[i].length;
		}
	} else {
		sges[0] = {}; /* as in push() */
		std::copy_n(wr.sg_list, wr.num_sge, sges);
		if (config_.local && length)
			if (const int rc = hold_buffers(tail_))
				return rc;
	}
	++tail_;
	++stats_.slow;
	if (trouble_.dead)
		next_ = tail_;
	return 0;
}

/* Local buffers of op @i that are in unpinned regions become held; and where does the CPU find them? */
int engine::hold_buffers(std::uint64_t i) noexcept
{
	op &o = op_at(i);
	ibv_sge *wire = &op_wire_[(i & op_mask_) * config_.max_sge];
	const bool write = brings(o.wr.opcode);

	std::copy_n(o.wr.sg_list, o.wr.num_sge, wire);
	for (int k = 0; k < o.wr.num_sge; ++k) {
		cpu_view view;

		if (!wire[k].length || world_.is_plain(wire[k].lkey))
			continue;
		const int rc = world_.hold_local(wire[k], write, hold_of(o, i, o.held), view, ticket_);
		if (rc && rc != backend::no_hold) {
			free_buffers(o);
			return rc;
		}
		o.held += !rc;
		o.opaque |= view.opaque && o.wr.opcode == IBV_WR_RDMA_READ;
		o.wr.sg_list[k].addr += view.offset;
	}
	o.wire = wire;
	return 0;
}

void engine::free_buffers(op &o) noexcept
{
	const auto i = static_cast<std::uint64_t>(&o - ops_.data());

	while (o.held) {
		const std::uint32_t hold = hold_of(o, i, --o.held);

		if (hold != ticket_.token() || !ticket_.give())
			world_.free_local(hold);
	}
}

npr_stats engine::stats() const noexcept
{
	npr_stats all = stats_;

	for (unsigned n = 0; n < std::size(leased_); ++n) {
		if (n == IBV_WR_RDMA_READ) {
			all.reads += leased_[n].requests;
			all.bytes_read += leased_[n].bytes;
		} else if (all_traits[n] & trait::atomic) {
			all.atomics += leased_[n].requests;
		} else {
			all.writes += leased_[n].requests;
			all.bytes_written += leased_[n].bytes;
		}
	}
	return all;
}

bool engine::unfinished() const noexcept
{
	for (std::uint64_t i = head_; i < tail_; ++i)
		if (!op_at(i).finished)
			return true;
	return waits_for_wire();
}

void engine::abandon() noexcept
{
	expand();
	for (; head_ < tail_; ++head_)
		free_buffers(op_at(head_));
}

/*
 * A READ, or a WRITE to pages that are known to be writable, in one piece and with nothing else to think of. Of
 * the piece only what every end of it needs is filled in; unpack() does the rest if it turns out that one try was
 * not enough.
 */
template <bool write>
bool engine::quick_move(const ibv_send_wr &wr, region &r, bool last) noexcept
{
	if (wr.num_sge != 1 || wr.send_flags & ~unsigned{IBV_SEND_SIGNALED} ||
	    (config_.local && !world_.is_plain(wr.sg_list[0].lkey)) || !has_piece())
		return false;

	const rdma_np_region_info &info = r.info;
	const std::uint64_t addr = wr.wr.rdma.remote_addr;
	const ibv_sge s = wr.sg_list[0];
	const std::uint32_t length = s.length;
	/* The words of a WRITE go with it, or when it has completed. */
	const bool chained = write && r.in_order();
	const std::uint64_t head = write ? 0 : split(addr, length);
	const std::uint32_t entries = chained || head ? 2 : 1;

	if (!has_room(entries) || !length || addr < info.base || length > info.length ||
	    addr - info.base > info.length - length)
		return false;

	piece &p = pieces_[free_.first];
	ibv_send_wr *const w = &chain_[state_.chained];
	ibv_send_wr &second = w[entries - 1];
	if constexpr (write) {
		if (config_.ordered_writes)
			return false;
		const std::uint64_t page = (addr >> page_shift) - (info.base >> page_shift);
		const std::uint32_t pages = pages_of(addr, length);

		if (pages > std::min(quick_pages, info.max_pages) || page % slot_words + pages > slot_words || !info.write_key ||
		    !(info.access & IBV_ACCESS_REMOTE_WRITE))
			return false;
		const std::uint64_t *known = cache_.peek(r.uid, page);
		if (!known)
			return false;
		for (std::uint32_t k = 0; k < pages; ++k)
			if (known[k] == unknown_word || !(known[k] & word_writable))
				return false;
		if (!take_ring(p, page, pages))
			return false;
		std::copy_n(known, pages, &snap_[p.ring_offset]);

		w->wr.rdma.rkey = info.write_key;
		w->wr.rdma.remote_addr = addr - info.base + info.write_addr;
		if (chained) {
			second.sg_list = &chain_sges_[(state_.chained + 1) * config_.max_sge];
			second.sg_list[0] = {reinterpret_cast<std::uintptr_t>(&config_.words[p.ring_offset]),
					     static_cast<std::uint32_t>(pages * sizeof(std::uint64_t)), config_.words_lkey};
			second.wr.rdma.rkey = info.table_key;
			second.wr.rdma.remote_addr = info.table_addr + page * sizeof(std::uint64_t);
		}
		w->sg_list = wr.sg_list;
	} else {
		/* in one piece for sure: no need to count its pages */
		if (length > (info.max_pages - 1) * page_size || length - 1 >= quick_limit_ ||
		    !info.read_key || !(info.access & IBV_ACCESS_REMOTE_READ) || config_.opaque_sinks)
			return false;
		p.ring = none;
		w->wr.rdma.rkey = info.read_key;
		w->wr.rdma.remote_addr = addr - info.base + info.read_addr;
		w->sg_list = wr.sg_list;
		if (head) {
			w->sg_list = &chain_sges_[state_.chained * config_.max_sge];
			w->sg_list[0] = {s.addr, static_cast<std::uint32_t>(head), s.lkey};
			second.sg_list = &chain_sges_[(state_.chained + 1) * config_.max_sge];
			second.sg_list[0] = {s.addr + head, static_cast<std::uint32_t>(length - head), s.lkey};
			second.wr.rdma.rkey = info.read_key;
			second.wr.rdma.remote_addr = w->wr.rdma.remote_addr + head;
		}
	}
	expand();
	w->wr_id = sq_id(sq_tail_);
	w->num_sge = 1;
	w->opcode = wr.opcode;
	w->send_flags = 0;
	w->next = w + 1;
	if (entries == 2) {
		second.wr_id = sq_id(sq_tail_ + 1);
		second.num_sge = 1;
		second.opcode = IBV_WR_RDMA_READ;
		second.next = &second + 1;
	}
	second.send_flags = IBV_SEND_SIGNALED;
	state_.chained += entries;

	const std::uint32_t lost = last ? send_chain() : 0;

	op &o = begin(wr, write ? op_kind::write : op_kind::read, length);
	o.wr.sg_list = o.wire = &op_sges_[(tail_ & op_mask_) * config_.max_sge];
	o.wr.sg_list[0] = s;
	o.wr.num_sge = 1;
	o.wr.wr.rdma = wr.wr.rdma;
	o.pieces = 1;
	o.slots = entries;
	++(write ? state_.live_writes : state_.live_reads);
	stats_.word_reads += chained;

	take(p);
	p.op = tail_;
	p.reg = &r;
	++r.refs;
	p.offset = 0;
	p.length = length;
	p.hold = 0;
	p.slots = entries;
	p.at = !write ? stage::read_data : chained ? stage::write_words : stage::write_data;
	p.rebinds = 0;
	p.live = p.quick = true;
	p.dropped = false;

	slots_[sq_tail_ & sq_mask_] = {tail_, index(p)};
	if (entries == 2)
		slots_[(sq_tail_ + 1) & sq_mask_] = {tail_, index(p)};
	first_brief_ = sq_tail_ += entries;
	credits_.take(entries);
	if (unsignaled_)
		set_tail(0);
	next_ = ++tail_;
	if (lost) [[unlikely]] {
		not_posted(lost);
		step();
	}
	return true;
}

/*
 * The local buffers of @w, the next entry of the chain and request of the next op, become held, so many as @held
 * says; @hold is the first. False: none is, and why accept() will find out. Where the CPU finds them is of no use
 * here: the HCA alone looks at what is posted as it is.
 */
bool engine::hold_all(ibv_send_wr &w, std::uint32_t &held, std::uint32_t &hold) noexcept
{
	const bool write = brings(w.opcode);
	ibv_sge *const wire = &chain_sges_[state_.chained * config_.max_sge];
	op &o = op_at(tail_);

	o.held = 0;
	for (int k = 0; k < w.num_sge; ++k) {
		cpu_view view;

		wire[k] = w.sg_list[k];
		if (!wire[k].length)
			continue;
		const int rc = world_.hold_local(wire[k], write, hold_of(o, tail_, o.held), view, ticket_);
		if (rc && rc != backend::no_hold) {
			free_buffers(o);
			return false;
		}
		o.held += !rc;
	}
	w.sg_list = wire;
	held = o.held;
	hold = o.hold;
	return true;
}

/* The hint of @b becomes that of a lease under which @wr may be posted. False: there is none. */
bool engine::look_for_lease(const ibv_send_wr &wr, std::uint32_t length, binding &b) const noexcept
{
	const rdma_np_region_info &i = b.to->info;
	const auto need = lease_range(wr, length, *b.to);
	const std::uint32_t n = need ? leases_.find(*need) : none;

	if (n == none)
		return false;
	const remote_leases::range has = leases_.bytes(n);
	lease_hint &h = b.hint;
	h.first = addr_of(wr) - need->first + has.first;
	h.length = has.end - has.first;
	h.delta = (has.write ? i.write_addr : i.read_addr) - i.base;
	h.version = leases_.version();
	h.lease = n;
	h.rkey = leases_.rkey(n);
	h.may = opcodes();
	if (i.access & IBV_ACCESS_REMOTE_READ && i.read_key)
		h.may.add(opcodes(IBV_WR_RDMA_READ));
	if (has.write && i.access & IBV_ACCESS_REMOTE_WRITE && i.write_key)
		h.may.add(opcodes(IBV_WR_RDMA_WRITE));
	if (has.write && i.access & IBV_ACCESS_REMOTE_ATOMIC && i.write_key)
		h.may.add(opcodes_of<trait::atomic>);
	return true;
}

/*
 * A request that is posted as it is, with its local buffers where they are and, if it has a key, with one that
 * is known (@b) to be pinned memory's; or @leased: one of a region, to memory that is leased to this QP.
 *
 * The caller's request gets neither our wr_id nor our flags, not for a moment: threads may share one, and it may
 * be in memory that cannot be written to. So it is copied, once, but for what only windows need.
 */
template <bool leased, engine::place at>
[[gnu::always_inline]] inline bool engine::quick_pass(const ibv_send_wr &wr, unsigned traits, binding *b) noexcept
{
	/* Those flags that change nothing here. */
	constexpr unsigned no_matter = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;
	const std::uint64_t tail = tail_, sq_tail = sq_tail_;
	const std::uint32_t chained = at == place::alone ? 0 : state_.chained;
	const ibv_sge *one = nullptr; /* the only buffer */
	bool looks = config_.local;
	std::uint64_t length;

	if (wr.num_sge == 1 && !(wr.send_flags & ~no_matter) && wr.sg_list[0].length <= max_length) [[likely]] {
		one = wr.sg_list;
		length = one->length;
	} else {
		if (check(wr, length))
			return false;
		looks &= !(wr.send_flags & IBV_SEND_INLINE);
	}
	looks &= length != 0;
	if (traits & trait::atomic)
		length = atomic_size;
	if (!(traits & trait::passing) || !has_room(1))
		return false;
	if constexpr (leased) {
		const lease_hint &h = b->hint;
		const std::uint64_t start = addr_of(wr) - h.first;

		if (h.version != leases_.version() || start >= h.length || length - 1 >= h.length - start ||
		    !h.may.has(wr.opcode) || (traits & trait::atomic && addr_of(wr) % atomic_size)) [[unlikely]]
			if (!look_for_lease(wr, static_cast<std::uint32_t>(length), *b))
				return false;
	} else if (traits & trait::remote && !config_.local_only && length && (!b || !stays_plain(*b))) {
		return false;
	}

	ibv_send_wr &w = chain_[chained];
	/* All but what windows need. */
	w.sg_list = wr.sg_list;
	w.num_sge = wr.num_sge;
	w.opcode = wr.opcode;
	w.send_flags = wr.send_flags;
	w.imm_data = wr.imm_data;
	w.wr = wr.wr;
	w.qp_type = wr.qp_type;
	/* From here on it is posted, or else its buffers are free again. */
	std::uint32_t held = 0, hold = 0;
	if (looks) {
		if (one && ticket_.covers(*one, traits & trait::bringing) && take_ticket()) [[likely]] {
			w.sg_list = &chain_sges_[chained * config_.max_sge];
			*w.sg_list = ticket_.wire(*one);
			hold = ticket_.token();
			held = 1;
		} else if (!(one && !world_.is_local(one->lkey)) && !hold_all(w, held, hold)) {
			return false;
		}
	}
	w.wr_id = sq_id(sq_tail);
	w.next = at == place::alone ? nullptr : &w + 1;
	w.send_flags = signal(wr.send_flags | hot_.signals);
	if constexpr (leased) {
		(traits & trait::atomic ? w.wr.atomic.rkey : w.wr.rdma.rkey) = b->hint.rkey;
		w.wr.rdma.remote_addr += b->hint.delta; /* an atomic's, too: see addr_of() */
	}

	std::uint32_t lost = 0;
	if constexpr (at == place::alone) {
		ibv_send_wr *bad;

		lost = world_.post(&w, &bad) != 0;
	} else {
		state_.chained = chained + 1;
		if (at == place::last)
			lost = send_chain();
	}

	briefs_[sq_tail & sq_mask_] = {wr.wr_id, wr.opcode, wr.send_flags, hold, held, static_cast<std::uint32_t>(length),
				       leased ? b->hint.lease : none};
	if constexpr (leased)
		leases_.use(b->hint.lease);
	--hot_.room;
	sq_tail_ = sq_tail + 1;
	credits_.take(1);
	if (traits & trait::receive_taking)
		stalls_ = sq_tail + 1;
	next_ = tail_ = tail + 1;
	if (lost) [[unlikely]] {
		not_posted(lost);
		step();
	} else if constexpr (at == place::alone) {
		open_hot(leased ? b : nullptr);
	}
	return true;
}

/* What needs no detour, as its opcode and key have it. Nothing is under way that it would have to wait for. */
template <engine::place at>
[[gnu::always_inline]] inline bool engine::route_quick(const ibv_send_wr &wr) noexcept
{
	const unsigned traits = traits_of(wr.opcode);

	/* What is not proven nothing overtakes but READs and WRITEs of regions. */
	const bool passes = at == place::alone || !state_.live_writes;

	if (config_.local_only || !(traits & trait::remote))
		return passes && quick_pass<false, at>(wr, traits, nullptr);

	binding *b = find_binding(traits & trait::atomic ? wr.wr.atomic.rkey : wr.wr.rdma.rkey);
	if (!b || b->state != binding_state::bound)
		return passes && quick_pass<false, at>(wr, traits, b);
	if (!leases_.empty() && !stalled() && quick_pass<true, at>(wr, traits, b))
		return true;
	/* Its region is not gone, and no more happens to it here than that its QP ends. */
	return move_quick(wr, *b, at != place::inside);
}

/*
 * The hot path opens, or stays open, behind a request that was posted as it is; @b: under the lease that its hint
 * is of.
 */
void engine::open_hot(const binding *b) noexcept
{
	if (next_ != tail_ || trouble_.any() || !state_.quiet() || tail_ - head_ != under_way())
		return;
	hot_.room = static_cast<std::int64_t>(std::min<std::uint64_t>(config_.depth - (tail_ - head_),
								     config_.sq_budget - under_way()));
	if (!b)
		return;
	hot_.lease = b->hint;
	hot_.rkey = b->rkey;
}

void engine::expand_all() noexcept
{
	std::uint64_t i = std::max(first_brief_, sq_head_);
	std::uint64_t n = tail_ - briefs();

	for (; i != sq_tail_; ++i, ++n) {
		const brief &b = briefs_[i & sq_mask_];
		op &o = op_at(n);

		o.wr.wr_id = b.wr_id;
		o.wr.opcode = b.opcode;
		o.wr.send_flags = b.send_flags;
		o.held = b.held;
		o.hold = b.hold;
		o.length = b.length;
		o.lease = b.lease;
		o.vendor_err = 0;
		o.status = IBV_WC_SUCCESS;
		o.slots = 1;
		o.kind = b.lease == none ? op_kind::pass : op_kind::leased;
		o.opaque = false;
		o.started = true;
		o.finished = false;
		if (b.lease != none)
			leases_.take(b.lease);
		slots_[i & sq_mask_] = {n, none};
	}
	first_brief_ = sq_tail_;
	hot_.lease = {};
	hot_.room = closed;
}

/* The buffers of the oldest request, which is brief. */
void engine::free_buffers(const brief &b) noexcept
{
	op &o = op_at(head_);

	o.held = b.held;
	o.hold = b.hold;
	free_buffers(o);
}

void engine::hot_refused() noexcept
{
	not_posted(1);
	step();
}

/*
 * What needs no detour, of a QP of which nothing waits, is posted as it comes. What the HCA has to know comes
 * first: the rest is written while it works.
 */
bool engine::post_quick(const ibv_send_wr &wr) noexcept
{
	if (hot_.owed) {
		hot_.owed = false;
		world_.free_local(ticket_.token());
	}
	if (next_ != tail_ || trouble_.any() || tail_ - head_ >= config_.depth)
		return false;
	if (!state_.quiet()) [[unlikely]]
		return calm() && post_disturbed(wr, true);
	return route_quick<place::alone>(wr);
}

/* The same of the @last one of a list, and with it, in one call, of what is in the chain; one before it goes into the chain. */
bool engine::post_of_list(const ibv_send_wr &wr, bool last) noexcept
{
	if (state_.chained >= chain_limit_)
		flush();
	if (next_ != tail_ || trouble_.any() || state_.waits || tail_ - head_ >= config_.depth)
		return false;
	return post_disturbed(wr, last);
}

/* Something is under way, which @wr may have to wait for. */
bool engine::post_disturbed(const ibv_send_wr &wr, bool last) noexcept
{
	/* A READ or WRITE that waits for no proof need not wait for what is proven. */
	const bool passive = is_passive(wr.opcode) && !(wr.send_flags & IBV_SEND_FENCE);

	if (state_.live_once || (state_.live_writes && !(config_.relaxed && passive)) ||
	    (state_.holds_wanted && takes_receive(wr.opcode)) || (wr.send_flags & IBV_SEND_FENCE && state_.live_reads))
		return false;
	return last ? route_quick<place::last>(wr) : route_quick<place::inside>(wr);
}

bool engine::move_quick(const ibv_send_wr &wr, binding &b, bool last) noexcept
{
	region &r = *b.to;

	if (!(wr.opcode == IBV_WR_RDMA_READ	 ? quick_move<false>(wr, r, last)
	      : wr.opcode == IBV_WR_RDMA_WRITE && quick_move<true>(wr, r, last)))
		return false;
	if (config_.leases)
		want_lease(wr, wr.sg_list[0].length, r);
	return true;
}

/* The next op, which is posted or in the chain: what is the same for all of them. */
engine::op &engine::begin(const ibv_send_wr &wr, op_kind kind, std::uint32_t length) noexcept
{
	op &o = op_at(tail_);

	o.wr.wr_id = wr.wr_id;
	o.wr.opcode = wr.opcode;
	o.wr.send_flags = wr.send_flags;
	o.held = 0;
	o.length = o.issued = length;
	o.vendor_err = 0;
	o.status = IBV_WC_SUCCESS;
	o.kind = kind;
	o.opaque = false;
	o.started = true;
	o.finished = false;
	return o;
}

/* A quick piece needs more than one try. */
void engine::unpack(piece &p) noexcept
{
	region &r = *p.reg;

	p.quick = false;
	--r.refs;
	reset_piece(p, r);
}

/* Ops from @first on, just accepted and not begun, were never there. */
void engine::retract(std::uint64_t first) noexcept
{
	stats_.slow -= tail_ - first;
	while (tail_ > first)
		free_buffers(op_at(--tail_));
	next_ = std::min(next_, tail_);
}

/* Is any of its local buffers one for which hold_buffers() asks the kernel? */
bool engine::needs_hold(const ibv_send_wr &wr) const noexcept
{
	if (!config_.local || wr.send_flags & IBV_SEND_INLINE)
		return false;
	for (int k = 0; k < wr.num_sge; ++k)
		if (wr.sg_list[k].length && !world_.is_plain(wr.sg_list[k].lkey))
			return true;
	return false;
}

/* Is there nothing for which accept() would refuse one of the list? */
bool engine::takes_all(const ibv_send_wr *wr) const noexcept
{
	std::uint64_t n = tail_ - head_, length;

	for (; wr; wr = wr->next) {
		if (++n > config_.depth || check(*wr, length) || needs_hold(*wr))
			return false;
	}
	return true;
}

int engine::post_send(ibv_send_wr *wr, ibv_send_wr **bad, bool whole) noexcept
{
	const std::uint64_t first = tail_;
	/* What is begun is not taken back. */
	const bool at_once = !whole || !wr->next || takes_all(wr);
	int rc;

	for (;; wr = wr->next) {
		if (at_once && post_of_list(*wr, !wr->next)) {
			if (!wr->next)
				return 0;
			continue;
		}
		rc = accept(*wr);
		if (rc) {
			if (bad)
				*bad = wr;
			if (!at_once)
				retract(first);
			break;
		}
		if (!wr->next)
			break;
		/* If it waits for nothing the next one may be quick. */
		if (at_once && posting_.empty())
			issue();
	}
	step();
	return rc;
}

bool engine::allowed(const ibv_send_wr &wr, std::uint32_t length, const region &r) const noexcept
{
	const rdma_np_region_info &i = r.info;
	const std::uint64_t addr = addr_of(wr);

	if (addr < i.base || length > i.length || addr - i.base > i.length - length)
		return false;
	if (wr.opcode == IBV_WR_RDMA_READ)
		return i.read_key && i.access & IBV_ACCESS_REMOTE_READ;
	return i.write_key &&
	       i.access & (is_atomic(wr.opcode) ? IBV_ACCESS_REMOTE_ATOMIC : IBV_ACCESS_REMOTE_WRITE);
}

/* Can it take the place of the region of @p, which has died? A piece has the size that the first one served. */
bool engine::serves(const region &r, const piece &p) const noexcept
{
	const op &o = op_at(p.op);

	return allowed(o.wr, o.length, r) && pages_of(addr_of(o.wr) + p.offset, p.length) <= r.info.max_pages;
}

/* What is op @i, the next to be issued? False: not known yet, or it failed. */
bool engine::classify(std::uint64_t i) noexcept
{
	op &o = op_at(i);

	if (config_.local_only || !is_remote(o.wr.opcode)) {
		o.kind = op_kind::pass;
		return true;
	}
	/* Nothing is accessed, so no key is looked at. */
	if (!o.length) {
		o.kind = op_kind::pass;
		return true;
	}
	binding *b = make_binding(rkey_of(o.wr));
	if (!b) {
		fail_op(i, IBV_WC_GENERAL_ERR);
		return false;
	}
	switch (b->state) {
	case binding_state::plain:
		if (!is_plain(*b, i)) {
			ask_resolve(*b);
			return false;
		}
		o.kind = op_kind::pass;
		return true;
	case binding_state::bound:
		break;
	default:
		ask_resolve(*b);
		return false;
	}
	if (is_atomic(o.wr.opcode) && addr_of(o.wr) % atomic_size) {
		fail_op(i, IBV_WC_REM_INV_REQ_ERR);
		return false;
	}
	if (o.wr.opcode == IBV_WR_RDMA_READ)
		o.kind = op_kind::read;
	else
		o.kind = is_atomic(o.wr.opcode) ? op_kind::once : op_kind::write;
	return true;
}

bool engine::must_wait(const op &o) const noexcept
{
	if (state_.live_once || (state_.live_writes && (!config_.relaxed || !is_passive(o.wr.opcode) || o.kind == op_kind::pass)))
		return true;
	if (state_.holds_wanted && takes_receive(o.wr.opcode))
		return true;
	/*
	 * What the HCA does not know to be under way it cannot fence. This does not need P1: all before
	 * it has completed, words included.
	 */
	return o.wr.send_flags & IBV_SEND_FENCE && (state_.live_reads || state_.live_writes);
}

void engine::issue() noexcept
{
	while (next_ < tail_ && next_ < failing_ && !trouble_.dead) {
		op &o = op_at(next_);

		if (!o.started) {
			if (o.kind == op_kind::undecided && !classify(next_))
				return;
			if (must_wait(o))
				return;
		}
		const region *r = nullptr;
		std::uint32_t lease = none;
		if (config_.leases && !o.started && o.kind != op_kind::pass && !stalled()) {
			const binding *b = find_binding(rkey_of(o.wr));
			if (b && b->state == binding_state::bound) {
				r = b->to;
				lease = find_lease(o.wr, o.length, *r);
			}
		}
		if (o.kind == op_kind::pass || lease != none) {
			/* Until there is, the lease may be recalled. */
			if (!room(1))
				return;
			const bool signaled = config_.sq_sig_all || o.wr.send_flags & IBV_SEND_SIGNALED ||
					      unsignaled_ + 1 >= signal_every_ || !credits_.tail_may_grow();
			o.started = true;
			ibv_send_wr &w = push(next_, nullptr, signaled);
			const std::uint64_t id = w.wr_id;
			w = o.wr;
			w.next = &w + 1;
			w.sg_list = o.wire;
			w.wr_id = id;
			if (signaled)
				w.send_flags |= IBV_SEND_SIGNALED;
			if (takes_receive(w.opcode))
				stalls_ = sq_tail_;
			if (lease != none) {
				translate(w, r->info, leases_.rkey(lease), leases_.bytes(lease).write);
				o.kind = op_kind::leased;
				o.lease = lease;
				leases_.take(lease);
			}
			++next_;
			continue;
		}
		if (!o.started) {
			o.started = true;
			++live(o);
			if (r)
				want_lease(o.wr, o.length, *r);
		}
		while (o.issued < o.length) {
			if (!has_piece() || !posting_.empty() ||
			    (config_.ordered_writes && o.kind == op_kind::write && o.pieces) || !start_piece(o, next_))
				return;
			if (trouble_.dead || failing_ <= next_)
				return;
		}
		++next_;
	}
}

void engine::finish(op &o) noexcept
{
	o.finished = true;
	if (o.kind == op_kind::pass) {
		++stats_.passed;
		return;
	}
	if (o.kind != op_kind::leased)
		--live(o);
	if (o.wr.opcode == IBV_WR_RDMA_READ) {
		++stats_.reads;
		stats_.bytes_read += o.length;
	} else if (is_atomic(o.wr.opcode)) {
		++stats_.atomics;
	} else {
		++stats_.writes;
		stats_.bytes_written += o.length;
	}
}

/* The number of those under way whose order is kept as that of @o. */
std::uint32_t &engine::live(const op &o) noexcept
{
	if (o.kind == op_kind::read)
		return state_.live_reads;
	return o.wr.opcode == IBV_WR_RDMA_WRITE ? state_.live_writes : state_.live_once;
}

/* Ops at the head that succeed without a completion. */
void engine::drop_silent() noexcept
{
	if (config_.sq_sig_all || trouble_.error_told)
		return;
	while (head_ < tail_) {
		op &o = op_at(head_);
		if (o.status != IBV_WC_SUCCESS || !o.finished || o.wr.send_flags & IBV_SEND_SIGNALED)
			return;
		free_buffers(o);
		++head_;
	}
}

bool engine::poll(ibv_wc &wc) noexcept
{
	expand();
	while (head_ < tail_ && complete(head_)) {
		op &o = op_at(head_++);
		ibv_wc_status status = o.status;

		if (o.held)
			free_buffers(o);

		/*
		 * What has failed says so, once, and after it there is nothing but flushes: RC
		 * would not have begun it. Before it only what could not be proven any more is
		 * flushed. But the first request that an unreachable peer has not done is the one
		 * whose retries were in vain, whichever of those under way the HCA had.
		 */
		if (cause_told_ || (trouble_.error_told && status == IBV_WC_SUCCESS))
			status = IBV_WC_WR_FLUSH_ERR;
		else if (status == IBV_WC_WR_FLUSH_ERR && lost_)
			status = IBV_WC_RETRY_EXC_ERR;
		if (status == IBV_WC_SUCCESS && !tells(o))
			continue;
		if (!config_.local_only) {
			trouble_.error_told |= status != IBV_WC_SUCCESS;
			cause_told_ |= status != IBV_WC_SUCCESS && status != IBV_WC_WR_FLUSH_ERR;
		}
		fill(wc, o, status);
		return true;
	}
	return false;
}

/* The application's completion of @o. */
void engine::fill(ibv_wc &wc, const op &o, ibv_wc_status status) const noexcept
{
	wc = {};
	wc.wr_id = o.wr.wr_id;
	wc.status = status;
	wc.opcode = completion_opcodes[o.wr.opcode];
	wc.vendor_err = o.vendor_err;
	wc.byte_len = brings(o.wr.opcode) ? o.length : 0;
	/* Only a receiver has a use for it, but providers say it here, too. */
	if (opcodes(IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM).has(o.wr.opcode))
		wc.wc_flags = IBV_WC_WITH_IMM;
	wc.qp_num = config_.qp_num;
}

/* The connection is said not to stand: on our side, or only on the peer's, which then does not answer? */
ibv_wc_status engine::not_connected() noexcept
{
	return world_.connected() ? IBV_WC_RETRY_EXC_ERR : IBV_WC_WR_FLUSH_ERR;
}

/* Op @i cannot succeed. The QP ends when all before it are done. */
void engine::fail_op(std::uint64_t i, ibv_wc_status status) noexcept
{
	op &o = op_at(i);

	if (trouble_.dead)
		return;
	if (o.status == IBV_WC_SUCCESS)
		o.status = status;
	failing_ = std::min(failing_, i);
	trouble_.failing = true;
	for (piece &p : std::span(pieces_.data(), made_))
		if (p.live && !p.dropped && p.op == i)
			drop_piece(p);
}

void engine::settle_failure() noexcept
{
	if (trouble_.dead || failing_ == no_op || op_at(failing_).slots)
		return;
	for (std::uint64_t i = head_; i < failing_; ++i) {
		const op &o = op_at(i);
		/* Of an unsignaled request that the HCA did nobody may ever hear. */
		const bool signaled = config_.sq_sig_all || o.wr.send_flags & IBV_SEND_SIGNALED;
		if (!o.finished && (!as_it_is(o) || signaled))
			return;
	}
	/*
	 * What the peer's HCA has not refused yet it has to refuse, so that its QP ends as well. Not if
	 * something later was begun, behind which this could wait for ever (for a receive).
	 */
	const ibv_wc_status status = op_at(failing_).status;
	std::uint64_t end = sq_tail_;
	while (end != sq_head_ && slots_[(end - 1) & sq_mask_].op == no_op)
		--end;
	const bool last = end == sq_head_ || slots_[(end - 1) & sq_mask_].op <= failing_;
	if ((status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR) && last && !trouble_.broken &&
	    !refused_) {
		if (!room(1))
			return;
		refused_ = true;
		push_refused(failing_);
		flush();
		if (!trouble_.broken)
			return;
	}
	world_.fail_qp();
	die();
}

/* The QP is in the error state. What it has posted comes back flushed. */
void engine::die() noexcept
{
	if (trouble_.dead)
		return;
	trouble_.dead = true;
	for (piece &p : std::span(pieces_.data(), made_))
		if (p.live && !p.dropped)
			drop_piece(p);
	for (std::uint64_t i = head_; i < tail_; ++i) {
		op &o = op_at(i);
		/* What the HCA has, it tells; or it is done, unsignaled, and nothing is to tell. */
		if (!o.finished && o.status == IBV_WC_SUCCESS && !(as_it_is(o) && o.slots))
			o.status = IBV_WC_WR_FLUSH_ERR;
	}
	next_ = tail_;
	leases_.for_each_live([this](std::uint32_t n) { end_lease(n); });
}

/*
 * An error stops the send queue of a UC or UD QP, until the application lets it go on: what
 * comes then is the HCA's to judge. What it had no room for was posted before that.
 */
void engine::flush_rest() noexcept
{
	for (; next_ < tail_; ++next_)
		op_at(next_).status = IBV_WC_WR_FLUSH_ERR;
}

/* --- pieces ------------------------------------------------------------ */

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
	binding *b = make_binding(rkey_of(o.wr));

	if (!b || (b->state == binding_state::bound && !allowed(o.wr, o.length, *b->to))) {
		fail_op(i, b ? IBV_WC_REM_ACCESS_ERR : IBV_WC_GENERAL_ERR);
		return false;
	}
	const bool plain = b->state == binding_state::plain && is_plain(*b, i);
	if (!plain && b->state != binding_state::bound) {
		ask_resolve(*b);
		return false;
	}

	piece &p = pieces_[free_.first];
	const std::uint64_t addr = addr_of(o.wr) + o.issued;
	/* Without a region there is nobody to set a bound. */
	const std::uint64_t pages = plain ? page_bits::capacity : b->to->info.max_pages;
	const std::uint64_t limit = pages * page_size - addr % page_size;

	take(p);
	p.op = i;
	p.live = true;
	p.dropped = false;
	p.slots = 0;
	p.ring = none;
	p.rebinds = 0;
	p.hold = 0;
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
	p.quick = p.done_held = false;
	want_hold(p, false);
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
	want_hold(p, false);
	p.warms = p.by_words = p.quick = p.done_held = p.no_hold = p.refused = false;
	p.at = o.kind == op_kind::read && !o.opaque ? stage::read_data : stage::write_decide;
}

void engine::end_piece(piece &p) noexcept
{
	op &o = op_at(p.op);

	if (p.hold)
		world_.release(p.hold);
	p.hold = 0;
	want_hold(p, false);
	if (o.kind == op_kind::write && o.wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && o.pieces == 1 &&
	    o.issued == o.length && p.at != stage::tail) {
		p.at = stage::tail;
		return proceed(p);
	}
	free_piece(p);
	if (!--o.pieces && o.issued == o.length)
		finish(o);
}

/* The op failed. Buffers and keys stay as they are until the send queue is done with them. */
void engine::drop_piece(piece &p) noexcept
{
	take(p);
	if (p.hold)
		world_.release(p.hold);
	p.hold = 0;
	want_hold(p, false);
	--op_at(p.op).pieces;
	p.dropped = true;
	if (!p.slots)
		free_piece(p);
}

void engine::free_piece(piece &p) noexcept
{
	take(p);
	give_ring(p);
	unref(p);
	p.live = false;
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
	if (p.reg && p.reg->gone && (!p.hold || once) && p.at != stage::read_words) {
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
	case stage::read_words:
	case stage::write_words:
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
	case stage::read_data:
		return read_arrived(p);
	case stage::read_words:
		return read_words_arrived(p);
	case stage::fetch_words:
		learn_words(p);
		give_ring(p);
		p.at = stage::write_decide;
		return proceed(p);
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

	p.warms = p.by_words = false;
	if (p.hold || p.round || opaque) {
		const page_bits::run h = p.todo.hull();
		page += h.first;
		pages = h.end - h.first;
	} else if (config_.read_words_min && p.length >= config_.read_words_min) {
		p.by_words = true;
		pages = p.pages;
		for (std::uint32_t i = 0; i < pages && p.by_words; ++i) {
			const std::uint64_t w = cache_.get(p.reg->uid, page + i);
			p.by_words = w != unknown_word && w & word_readable;
		}
		if (!p.by_words) {
			/* Not this time: but learn the words, for the next READ here, if ever there is room. */
			p.warms = entries < max_entries_;
			pages = p.warms ? pages : 0;
		}
	}
	if (!room(entries + p.warms) || (pages && !take_ring(p, page, pages)))
		return false;
	if (p.warms)
		push_words(p, false);
	else if (pages)
		snapshot(p);
	p.at = stage::read_data;
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
	if (p.quick) {
		const op &o = op_at(p.op);
		const rdma_np_region_info &i = p.reg->info;
		const std::uint64_t raddr = o.wr.wr.rdma.remote_addr - i.base + i.read_addr;

		if (!any_suspicious(reinterpret_cast<const std::byte *>(
					    static_cast<std::uintptr_t>(o.wr.sg_list[0].addr)),
				    raddr, p.length, i.signature))
			return end_piece(p);
		unpack(p);
	}
	if (p.warms) {
		learn_words(p);
		give_ring(p);
	}
	if (p.by_words) {
		p.at = stage::read_words;
		return proceed_first(p);
	}
	const bool opaque = op_at(p.op).opaque;
	if (!opaque && !scan(p))
		return end_piece(p);
	if (opaque || p.hold || p.round) {
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
		else if (p.hold || word == snap_[k])
			p.todo.clear(i);
	});
	learn_words(p);
	give_ring(p);
	if (p.by_words) {
		p.by_words = false;
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
	if (p.hold)
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
	if (p.hold)
		return read ? post_read(p) : post_write(p);
	/* What lands on pages that stay where they are lands in order, and once. */
	if (config_.ordered_writes && !read && !p.no_hold) {
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
	if (!p.hold) {
		ask(p, true);
		return true;
	}
	if (!room(2) || !take_ring(p, p.first_page, p.pages))
		return false;
	p.at = stage::write_words;
	push_once(p, false);
	/*
	 * The words are to be read after it: a READ may overtake an atomic, but for the fence. With it
	 * our HCA sends the READ when the atomic's answer is here, so this does not need P1.
	 */
	push_words(p, true, IBV_SEND_FENCE);
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
	if (p.quick) {
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

		if (config_.words[k] & word_writable && (p.hold || config_.words[k] == snap_[k]))
			p.todo.clear(i);
	});
	learn_words(p);
	give_ring(p);
	if (!p.todo.any())
		return end_piece(p);
	if (p.hold)
		return doubt_hold(p);
	stats_.repeated_pages += p.todo.count();
	++p.unproven;
	p.at = stage::write_decide;
	proceed(p);
}

/* --- faults ------------------------------------------------------------ */

/* From here until it needs no hold any more. */
void engine::want_hold(piece &p, bool want) noexcept
{
	state_.holds_wanted += want;
	state_.holds_wanted -= p.ask_hold;
	p.ask_hold = want;
}

void engine::ask(piece &p, bool hold) noexcept
{
	if (hold && p.no_hold)
		return go_without_hold(p);
	want_hold(p, hold);
	if (hold && stalled()) {
		p.at = stage::barrier;
		return proceed(p);
	}
	const op &o = op_at(p.op);
	if (hold || p.done_held || (o.kind != op_kind::write && !o.opaque)) {
		p.todo.merge_runs(max_runs(p));
		p.ask = p.todo;
	} else {
		p.ask.merge_runs(p.reg->info.max_ranges);
	}
	p.at = stage::fault;
	if (hold || p.done_held || o.kind != op_kind::read)
		return send_fault(p);

	region &r = *p.reg;
	const std::uint32_t rkey = rkey_of(o.wr);
	const page_bits::run h = p.ask.hull();
	const std::uint64_t first = p.first_page + h.first, end = p.first_page + h.end;
	send_fault(p);
	/* If the region died meanwhile it may not even be there any more */
	if (p.reg == &r && p.at == stage::fault && !trouble_.dead)
		read_ahead(r, rkey, first, end);
}

/* A READ has missed the pages [first, end). */
void engine::read_ahead(region &r, std::uint32_t rkey, std::uint64_t first, std::uint64_t end) noexcept
{
	const rdma_np_region_info &i = r.info;
	const bool goes_on = first - r.ahead < sequential_gap;

	/* It has overtaken what was asked for before, which is on its way */
	if (end <= r.ahead && r.ahead - first <= r.window)
		return;
	r.ahead = end;
	if (!goes_on) {
		r.window = 0;
		return;
	}
	r.window = std::min<std::uint32_t>(2 * std::max<std::uint32_t>(r.window, static_cast<std::uint32_t>(end - first)),
					   RDMA_NP_MAX_PAGES);
	const std::uint64_t pages = std::min<std::uint64_t>(r.window, region_pages(i) - end);
	if (!pages)
		return;
	const std::uint64_t start = (i.base & ~(page_size - 1)) + end * page_size;
	const auto length = std::min<std::uint64_t>(pages * page_size, i.base + (i.length - 1) - start + 1);
	const std::int64_t asked = prefetch(rkey, start, length, false);
	if (asked > 0) {
		const std::uint64_t n = (static_cast<std::uint64_t>(asked) + page_size - 1) >> page_shift;
		r.ahead = end + n;
		stats_.read_ahead += n;
	}
}

void engine::send_fault(piece &p) noexcept
{
	const rdma_np_region_info &i = p.reg->info;
	std::array<rdma_np_range, RDMA_NP_MAX_RANGES> ranges;
	std::size_t n = 0;

	if (p.reg->gone)
		return p.done_held ? hold_answered(p, RDMA_NP_GONE) : rebind(p);
	if (faults_ >= config_.max_faults)
		return put(asking_, p);

	const std::uint64_t origin = (i.base & ~(page_size - 1)) + p.first_page * page_size;
	p.ask.for_each_run([&](page_bits::run r) {
		const std::uint64_t start = std::max<std::uint64_t>(i.base, origin + r.first * page_size);
		/* inclusive: the region may end where addresses do */
		const std::uint64_t last = std::min<std::uint64_t>(i.base + (i.length - 1), origin + r.end * page_size - 1);
		ranges[n++] = {start, last - start + 1};
	});

	rdma_np_fault_req req{};
	req.region_id = i.region_id;
	req.cookie = std::uint64_t{config_.cookie} << 48 | std::uint64_t{p.generation} << 16 | index(p);
	req.flags = (op_at(p.op).kind != op_kind::read ? RDMA_NP_FAULT_WRITE : 0) | (p.ask_hold ? RDMA_NP_FAULT_HOLD : 0);
	const int rc = world_.fault(req, {ranges.data(), n});
	switch (rc) {
	case 0:
		++faults_;
		++stats_.faults;
		stats_.holds += p.ask_hold;
		return;
	case -EBUSY:
	case -EAGAIN:
	case -EINTR:
	case -ENOMEM:
		return back_off(p);
	case -ENOENT:
		region_dies(*p.reg);
		return p.done_held ? hold_answered(p, RDMA_NP_GONE) : rebind(p);
	case -ENOTCONN:
		return fail_op(p.op, not_connected());
	default:
		return fail_op(p.op, IBV_WC_GENERAL_ERR);
	}
}

/* The peer's word for the first pages; of the others only that they were worse before. */
void engine::event_words(std::uint32_t uid, std::uint64_t first, std::uint32_t pages, const rdma_np_event &e) noexcept
{
	const std::uint32_t n = std::min({pages, e.nr_words, std::uint32_t{RDMA_NP_EVENT_WORDS}});

	for (std::uint32_t k = 0; k < n; ++k)
		cache_.set(uid, first + k, e.words[k]);
	for (std::uint32_t k = n; k < pages; ++k)
		cache_.forget(uid, first + k);
}

/*
 * What was done under a hold is done, unless the hold ended before, with its region.
 * But a word says that a page has not the right that the hold gave: either the region
 * has died, or the owner has taken the page away, from itself and not from the hold,
 * which a pinned region would not notice either. The peer's kernel is asked which. The
 * hold is given back first, or that could wait for it: another page may be there now.
 */
void engine::doubt_hold(piece &p) noexcept
{
	world_.release(p.hold);
	p.hold = 0;
	p.done_held = true;
	ask(p, false);
}

/* If the region lives now it lived then, and with it the hold. */
void engine::hold_answered(piece &p, std::uint32_t status) noexcept
{
	switch (status) {
	case RDMA_NP_OK:
	case RDMA_NP_ACCESS:
	case RDMA_NP_ADDRESS:
	case RDMA_NP_NOMEM:
		return end_piece(p);
	case RDMA_NP_GONE:
		region_dies(*p.reg);
		if (op_at(p.op).kind != op_kind::once)
			return rebind(p);
		/* nobody knows whether it happened */
		return fail_op(p.op, IBV_WC_REM_ACCESS_ERR);
	case RDMA_NP_BUSY:
		++stats_.busy;
		return back_off(p);
	default:
		return fail_op(p.op, status == RDMA_NP_QP ? not_connected() : fault_status(status));
	}
}

void engine::fault_served(piece &p, const rdma_np_event &event) noexcept
{
	bool first = true;

	if (p.ask_hold && !event.hold_id)
		return fail_op(p.op, IBV_WC_REM_INV_REQ_ERR);
	if (event.hold_id && !p.ask_hold)
		world_.release(event.hold_id);
	else
		p.hold = event.hold_id;
	p.ask.for_each_run([&](page_bits::run r) {
		rdma_np_event e = event;
		if (!first)
			e.nr_words = 0;
		first = false;
		event_words(p.reg->uid, p.first_page + r.first, r.end - r.first, e);
	});
	if (!p.refused)
		p.pause = 0;
	++p.faulted;
	if (op_at(p.op).kind == op_kind::read && !op_at(p.op).opaque) {
		p.round = 1;
		p.at = stage::read_data;
	} else {
		p.at = stage::write_decide;
	}
	proceed(p);
}

/* The pages are wanted in time for one more round, not for good. A later round may ask for a hold again. */
void engine::go_without_hold(piece &p) noexcept
{
	want_hold(p, false);
	p.refused = true;
	p.unproven = p.fetches = p.faulted = 0;
	p.todo.merge_runs(max_runs(p));
	p.ask = p.todo;
	back_off(p);
}

void engine::back_off(piece &p) noexcept
{
	p.at = stage::backoff;
	p.pause = std::clamp(2 * p.pause, min_backoff, max_backoff);
	p.wake = world_.now() + p.pause;
	put(pausing_, p);
}

/* A pinned region would have its pages: the pressure may pass, but nobody waits for ever. */
bool engine::waits_for_memory(piece &p) noexcept
{
	const nanoseconds now = world_.now();

	if (!p.ask_hold)
		return false;
	if (!p.short_since)
		p.short_since = now;
	return now - p.short_since < hold_patience;
}

void engine::on_event(const rdma_np_event &e) noexcept
{
	expand();
	if (e.type == RDMA_NP_EVENT_REGION_GONE) {
		if (region *r = find_region(e.region_id)) {
			region_dies(*r);
			forget_dead();
		} else if (resolves_) {
			/* An answer that names it may be on its way: it must not be believed. */
			rdma_np_region_info info{};
			info.region_id = e.region_id;
			if (region *z = make_region(info)) {
				z->gone = true;
				retire(*z);
			}
		}
		return;
	}
	if (e.type == RDMA_NP_EVENT_RECALL)
		return recalled(e.hold_id);
	if (e.type != RDMA_NP_EVENT_FAULT || !faults_)
		return;
	--faults_;

	const std::uint32_t i = e.cookie & 0xffff;
	if (i >= lease_cookie && i < prefetch_cookie)
		return lease_answered(i - lease_cookie, e);
	if (i >= prefetch_cookie) {
		prefetch_slot &f = prefetches_[0xffff - i];
		if (e.status == RDMA_NP_OK)
			event_words(f.uid, f.page, f.pages, e);
		f.uid = 0;
		return;
	}
	piece *p = i < made_ ? &pieces_[i] : nullptr;
	if (!p || !p->live || p->dropped || p->at != stage::fault ||
	    p->generation != static_cast<std::uint32_t>(e.cookie >> 16)) {
		/* for a work request that has failed meanwhile */
		return release_unused(e.hold_id);
	}
	if (p->done_held)
		return hold_answered(*p, e.status);
	const op_kind kind = op_at(p->op).kind;
	const bool waits = kind == op_kind::once || (kind == op_kind::write && config_.ordered_writes && !p->no_hold);
	const bool repeatable_hold = p->ask_hold && !waits;
	switch (e.status) {
	case RDMA_NP_OK:
		return fault_served(*p, e);
	case RDMA_NP_GONE:
		region_dies(*p->reg);
		return rebind(*p);
	case RDMA_NP_BUSY:
		++stats_.busy;
		if (repeatable_hold)
			return go_without_hold(*p);
		return back_off(*p);
	case RDMA_NP_ADDRESS:
	case RDMA_NP_NOMEM:
		/* Nothing is mapped there, or nothing that can be pinned for long, or not now. */
		if (e.status == RDMA_NP_NOMEM && !repeatable_hold && waits_for_memory(*p))
			return back_off(*p);
		if (p->ask_hold && kind != op_kind::once) {
			/* An ordered WRITE has waited in vain. */
			p->no_hold = e.status == RDMA_NP_ADDRESS || waits;
			return go_without_hold(*p);
		}
		[[fallthrough]];
	default:
		return fail_op(p->op, e.status == RDMA_NP_QP ? not_connected() : fault_status(e.status));
	}
}

/* Which rights does it ask for, and is it inside of the region? */
int engine::prefetch_error(const region &r, std::uint64_t addr, std::uint64_t length, bool write) noexcept
{
	const rdma_np_region_info &i = r.info;

	if (addr < i.base || length > i.length || addr - i.base > i.length - length)
		return -EFAULT;
	return write && !i.write_key ? -EACCES : 0;
}

int engine::advise(std::uint32_t rkey, std::uint64_t addr, std::uint64_t length, npr_advice advice) noexcept
{
	using leases = remote_leases;
	const binding *b = find_binding(rkey);

	expand();
	if (!b || b->state != binding_state::bound)
		return -ENOENT;
	const region &r = *b->to;
	const bool write = advice == NPR_ADVISE_WRITE_OFTEN;
	if (const int error = prefetch_error(r, addr, length, write))
		return error;
	if (!length || !config_.leases)
		return 0;
	const std::uint64_t base = r.info.base >> leases::part_shift, last = addr + (length - 1);
	const std::uint64_t end = std::min((last >> leases::part_shift) + 1, (addr >> leases::part_shift) + max_advised);

	for (std::uint64_t part = addr >> leases::part_shift; part < end; ++part) {
		const std::uint64_t key = leases::key_of(r.uid, static_cast<std::uint32_t>(part - base));

		if (advice == NPR_ADVISE_SELDOM) {
			leases_.expect(key, false, false);
			leases_.expect(key, true, false);
			continue;
		}
		leases_.expect(key, write, true);
		/* As its first request would, as long as there is room. */
		const std::uint64_t first = std::max(addr, part << leases::part_shift);
		ibv_send_wr wr{};
		wr.opcode = write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
		wr.wr.rdma.remote_addr = first;
		wr.wr.rdma.rkey = rkey;
		const auto bytes = static_cast<std::uint32_t>(std::min(last - first, page_size - 1 - first % page_size) + 1);
		if (find_lease(wr, bytes, r) == none)
			want_lease(wr, bytes, r);
	}
	if (advice == NPR_ADVISE_SELDOM)
		leases_.for_each_live([&](std::uint32_t n) {
			const leases::range x = leases_.bytes(n);
			const std::uint64_t part = (base + (x.key & ~0U)) << leases::part_shift;

			if (x.key >> 32 == r.uid && part + x.first <= last && part + x.end > addr)
				end_lease(n);
		});
	return 0;
}

std::int64_t engine::prefetch(std::uint32_t rkey, std::uint64_t addr, std::uint64_t length, bool write) noexcept
{
	const binding *b = find_binding(rkey);
	std::uint64_t done = 0;

	expand();
	if (!b || b->state != binding_state::bound)
		return -ENOENT;
	const rdma_np_region_info &i = b->to->info;
	if (const int error = prefetch_error(*b->to, addr, length, write))
		return error;
	for (unsigned k = 0; k < max_prefetches && done < length; ++k) {
		/* work requests go first */
		if (trouble_.dead || faults_ > config_.max_faults / 2)
			break;
		prefetch_slot &f = prefetches_[k];
		if (f.uid)
			continue;
		const std::uint64_t start = addr + done;
		const std::uint64_t n = std::min(length - done, i.max_pages * page_size - start % page_size);
		const rdma_np_range range{start, n};
		rdma_np_fault_req req{};
		req.region_id = i.region_id;
		req.cookie = std::uint64_t{config_.cookie} << 48 | (0xffff - k);
		req.flags = write ? RDMA_NP_FAULT_WRITE : 0;
		if (world_.fault(req, {&range, 1}))
			break;
		++faults_;
		++stats_.faults;
		f.uid = b->to->uid;
		f.page = (start >> page_shift) - (i.base >> page_shift);
		f.pages = static_cast<std::uint32_t>(((start + n - 1) >> page_shift) - (start >> page_shift) + 1);
		done += n;
	}
	return static_cast<std::int64_t>(done);
}

/* --- leases ------------------------------------------------------------ */

/* The bytes of a region that @wr needs; or nothing if it may not have them, or no lease can be of them all. */
std::optional<remote_leases::range> engine::lease_range(const ibv_send_wr &wr, std::uint32_t length,
							const region &r) const noexcept
{
	using leases = remote_leases;
	const std::uint64_t addr = addr_of(wr);

	if (!length || !allowed(wr, length, r) || (is_atomic(wr.opcode) && addr % atomic_size))
		return {};
	/* It may wait for a receive for ever, and a lease has to go back in time. */
	if (takes_receive(wr.opcode))
		return {};
	const std::uint64_t index = (addr >> leases::part_shift) - (r.info.base >> leases::part_shift);
	const auto first = static_cast<std::uint32_t>(addr % leases::part);
	if (index > ~0U || length > lease_span - first)
		return {};
	return leases::range{leases::key_of(r.uid, static_cast<std::uint32_t>(index)), first, first + length,
			     wr.opcode != IBV_WR_RDMA_READ};
}

/* The number of a lease under which @wr may be posted now. */
std::uint32_t engine::find_lease(const ibv_send_wr &wr, std::uint32_t length, const region &r) const noexcept
{
	const auto need = lease_range(wr, length, r);

	return need ? leases_.find(*need) : none;
}

/*
 * A request begins without a lease. The second one of its kind in this part within a short time asks for
 * one: of its pages, and of all others of the part that are resident already.
 */
void engine::want_lease(const ibv_send_wr &wr, std::uint32_t length, const region &r) noexcept
{
	const rdma_np_region_info &i = r.info;
	const auto need = lease_range(wr, length, r);

	if (!need || trouble_.dead || trouble_.broken || !leases_.wants(need->key, need->write, world_.recently()))
		return;
	/* work requests go first */
	if (asked_leases_ == max_lease_asks || faults_ > config_.max_faults / 2)
		return;
	lease_ask *q = nullptr;
	for (lease_ask &x : lease_asks_) {
		if (x.key == need->key && x.write == need->write)
			return;
		if (!x.key)
			q = &x;
	}

	const std::uint64_t addr = addr_of(wr), start = addr - need->first;
	const std::uint32_t pages = pages_of(addr, length);
	std::array<rdma_np_range, 2> ranges{{{addr, length}}};
	std::size_t n = 1;
	if (pages > i.max_pages)
		return;
	/* The part with its overlap, or so many of its pages around the request as the owner takes; last is inclusive. */
	std::uint64_t first = std::max<std::uint64_t>(start, i.base);
	std::uint64_t last = std::min<std::uint64_t>(start + std::min(lease_span - 1, ~start),
				      i.base + (i.length - 1));
	const std::uint64_t around = std::min<std::uint64_t>((last >> page_shift) - (first >> page_shift) + 1,
							     i.max_pages - pages);
	if (i.max_ranges > 1 && around >= pages && last - first >= length) {
		const std::uint64_t page = std::min(addr >> page_shift, (last >> page_shift) + 1 - around);
		first = std::max(first, page << page_shift);
		last = std::min(last, (page + around - 1) << page_shift | (page_size - 1));
		ranges[n++] = {first, last - first + 1};
	}

	rdma_np_fault_req req{};
	req.region_id = i.region_id;
	req.cookie = std::uint64_t{config_.cookie} << 48 | std::uint64_t{q->generation} << 16 |
		     (lease_cookie + static_cast<std::uint32_t>(q - lease_asks_.data()));
	req.flags = RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE | (need->write ? RDMA_NP_FAULT_WRITE : 0);
	if (world_.fault(req, {ranges.data(), n}))
		return leases_.refused(need->key, need->write, world_.recently());
	q->key = need->key;
	q->region = i.region_id;
	q->start = start;
	q->write = need->write;
	++asked_leases_;
	++faults_;
}

void engine::lease_answered(std::uint32_t k, const rdma_np_event &e) noexcept
{
	lease_ask &q = lease_asks_[k];

	if (!q.key || q.generation != static_cast<std::uint32_t>(e.cookie >> 16))
		return release_unused(e.hold_id);
	if (!granted(q, e)) {
		release_unused(e.hold_id);
		leases_.refused(q.key, q.write, world_.recently());
	}
	q.key = 0;
	++q.generation;
	if (!--asked_leases_)
		nr_early_recalls_ = 0;
}

/* False: there is no lease, or it is of no use. What it is of a peer has said. */
bool engine::granted(const lease_ask &q, const rdma_np_event &e) noexcept
{
	const std::uint64_t said = e.lease_addr + (e.lease_length - 1);
	region *r = find_region(q.region);

	if (e.status != RDMA_NP_OK || !e.hold_id || !e.lease_length || trouble_.dead || !r || r->gone ||
	    leases_.by_hold(e.hold_id) != none)
		return false;
	/* A recall that came first wins (I9). */
	const std::size_t known = std::min(nr_early_recalls_, early_recalls_.size());
	if (nr_early_recalls_ > known || std::count(early_recalls_.data(), early_recalls_.data() + known, e.hold_id))
		return false;

	/* What of it is in the region, and in the part or its overlap; last is inclusive, and less if there was an overflow. */
	const std::uint64_t first = std::max<std::uint64_t>({e.lease_addr, q.start, r->info.base});
	const std::uint64_t last = std::min<std::uint64_t>(said, r->info.base + (r->info.length - 1));
	if (first > last || first - q.start >= lease_span)
		return false;
	const std::uint32_t n = leases_.place(q.key);
	if (n == none)
		return false;
	if (leases_.hold(n))
		end_lease(n);
	const std::uint64_t end = std::min(last - q.start, lease_span - 1) + 1;
	leases_.insert(n, {q.key, static_cast<std::uint32_t>(first - q.start), static_cast<std::uint32_t>(end), q.write},
		       e.hold_id, q.region, e.lease_key);
	leases_.granted(q.key, q.write, world_.recently());
	++r->refs;
	++stats_.leases;
	return true;
}

void engine::recalled(std::uint64_t hold) noexcept
{
	const std::uint32_t n = hold ? leases_.by_hold(hold) : none;

	if (n != none) {
		if (leases_.is_live(n)) {
			++stats_.recalls;
			end_lease(n);
		}
		return;
	}
	/* It may be of what an answer on its way brings; or of another QP, for which there is no room for ever. */
	if (hold && asked_leases_ && nr_early_recalls_ <= early_recalls_.size()) {
		if (nr_early_recalls_ < early_recalls_.size())
			early_recalls_[nr_early_recalls_] = hold;
		++nr_early_recalls_;
	}
}

/* From now on nothing is posted under it (I9). It goes back when what was has completed. */
void engine::end_lease(std::uint32_t n) noexcept
{
	if (leases_.withdraw(n))
		return lease_ended(n);
	/* Of what is unsignaled at the end of the send queue the HCA would say nothing. */
	trouble_.drains |= unsignaled_ && !trouble_.dead;
}

/* Nothing is under way under it, nor will be. */
void engine::lease_ended(std::uint32_t n) noexcept
{
	region *r = find_region(leases_.region(n));

	world_.release(leases_.hold(n));
	leases_.erase(n);
	unref(*r);
}

/* An answer that nobody waits for has brought a hold, unless it has come before. */
void engine::release_unused(std::uint64_t hold) noexcept
{
	if (hold && leases_.by_hold(hold) == none)
		world_.release(hold);
}

void engine::age_leases() noexcept
{
	expand();
	/* What waits for its turn may be for one that it has only just got. */
	if (next_ < tail_)
		return;
	leases_.for_each_idle([this](std::uint32_t n) { end_lease(n); });
}

/* --- regions and keys -------------------------------------------------- */

engine::binding *engine::look_up(std::uint32_t rkey) noexcept
{
	const auto i = bindings_.find(rkey);

	return i == bindings_.end() ? nullptr : recent(rkey) = &i->second;
}

engine::binding *engine::make_binding(std::uint32_t rkey) noexcept
{
	if (binding *b = find_binding(rkey))
		return b;
	if (nr_loose_ >= max_loose_keys)
		drop_key();
	try {
		binding &b = bindings_[rkey];
		b.rkey = rkey;
		loose_.append(b);
		++nr_loose_;
		return recent(rkey) = &b;
	} catch (const std::bad_alloc &) {
		return nullptr;
	}
}

/* What is known of @b now; @r: the region that it names. */
void engine::bind(binding &b, binding_state state, region *r) noexcept
{
	b.state = state;
	if (b.to == r)
		return;
	b.hint.version = 0;
	nr_loose_ += !r;
	nr_loose_ -= !b.to;
	b.to = r;
	b.unlink();
	(r ? r->keys : loose_).append(b);
}

/* Nothing is known of it, and no answer is to come. */
void engine::erase(binding &b) noexcept
{
	const std::uint32_t rkey = b.rkey;

	if (recent(rkey) == &b)
		recent(rkey) = nullptr;
	nr_loose_ -= !b.to;
	b.unlink();
	bindings_.erase(rkey);
}

/*
 * One key of no region makes room for another, and is asked about if it is used again. One that was used since
 * this came by last, or that is asked about, is passed over; of the latter there are few, for a piece has one key.
 */
void engine::drop_key() noexcept
{
	for (std::size_t tries = 2 * nr_loose_; tries; --tries) {
		binding &b = static_cast<binding &>(*loose_.next);

		if (!b.asks && !b.seen)
			return erase(b);
		b.seen = false;
		b.unlink();
		loose_.append(b);
	}
}

void engine::send_resolve(binding &b) noexcept
{
	if (!b.asks++) {
		b.asked = world_.now();
		b.tail = tail_;
	}
	++resolves_;
	world_.resolve(b.rkey);
}

void engine::ask_resolve(binding &b) noexcept
{
	if (b.state == binding_state::asked)
		return;
	bind(b, binding_state::asked);
	send_resolve(b);
}

/*
 * May request @i be posted with its key as it is?
 *
 * A key value that was pinned memory's may be an unpinned region's later. The peer's kernel
 * promises that it is none for a time, which it counts from its answer, and which is counted
 * here from before the question: so what is posted before it is over here was posted before
 * any such region was registered. Without that promise the answer is good for the requests
 * that had been posted when it was asked for, and for no other.
 *
 * A key that is used is asked about again at half of the time, so that nothing waits.
 */
bool engine::is_plain(binding &b, std::uint64_t i) noexcept
{
	b.seen = true;
	if (i < b.upto || b.until == ~0ULL)
		return true;

	/*
	 * Where the clock source is not the TSC, now() is a system call. The owner remembers the
	 * promise for twice as long, so the milliseconds that recently() is behind do not matter.
	 */
	const nanoseconds now = world_.recently();
	if (now >= b.until)
		return false;
	if (b.until - now < plain_time / 2 && !b.asks && renewals_ < max_renewals) {
		b.renews = true;
		++renewals_;
		send_resolve(b);
	}
	return true;
}

/* As is_plain() for a request that is posted now, if the key need not be asked about for that. */
bool engine::stays_plain(binding &b) noexcept
{
	if (b.state != binding_state::plain)
		return false;
	b.seen = true;
	if (b.until == ~0ULL)
		return true;

	const nanoseconds now = world_.recently();
	return now < b.until && (b.asks || b.until - now >= plain_time / 2);
}

/* RESOLVE, asked at @asked with requests below @tail, said that it is no unpinned region. */
void engine::make_plain(binding &b, int error, nanoseconds asked, std::uint64_t tail) noexcept
{
	if (b.state != binding_state::plain)
		b.until = b.upto = 0;
	bind(b, binding_state::plain);
	b.upto = std::max(b.upto, tail);
	if (error == -EACCES)
		b.until = std::max(b.until, asked + plain_time);
	else if (error == -EHOSTUNREACH)
		b.until = ~0ULL; /* there is nobody who could register one */
}

engine::region *engine::find_region(std::uint64_t id) noexcept
{
	const auto i = regions_.find(id);

	return i == regions_.end() ? nullptr : &i->second;
}

engine::region *engine::make_region(const rdma_np_region_info &info) noexcept
{
	try {
		region &r = regions_[info.region_id];
		r.info = info;
		/* What the arrays here have room for. */
		r.info.max_pages = std::min<std::uint32_t>(info.max_pages, page_bits::capacity);
		r.info.max_ranges = std::min<std::uint32_t>(info.max_ranges, RDMA_NP_MAX_RANGES);
		r.uid = next_uid_++;
		return &r;
	} catch (const std::bad_alloc &) {
		return nullptr;
	}
}

void engine::region_dies(region &r) noexcept
{
	if (r.gone)
		return;
	leases_.for_each_live([&](std::uint32_t n) {
		if (leases_.region(n) == r.info.region_id)
			end_lease(n);
	});
	r.gone = true;
	++stats_.gone;
	while (!r.keys.empty()) {
		binding &b = static_cast<binding &>(*r.keys.next);

		/* An answer finds the question that it belongs to. */
		if (b.asks)
			bind(b, binding_state::unknown);
		else
			erase(b);
	}
	if (!r.refs)
		retire(r);
}

/* It is dead, and no piece refers to it, nor ever will. */
void engine::retire(region &r) noexcept
{
	r.unused = unused_;
	unused_ = &r;
}

void engine::forget_dead() noexcept
{
	while (!resolves_ && unused_) {
		const std::uint64_t id = unused_->info.region_id;

		unused_ = unused_->unused;
		world_.forget(id);
		regions_.erase(id);
	}
}

/* The region of @p has died: its key may name another one by now. */
void engine::rebind(piece &p) noexcept
{
	const op &o = op_at(p.op);

	take(p);
	give_ring(p);
	if (p.hold)
		world_.release(p.hold);
	p.hold = 0;
	want_hold(p, false);
	unref(p);
	p.at = stage::rebind;
	binding *b = make_binding(rkey_of(o.wr));
	if (!b)
		return fail_op(p.op, IBV_WC_GENERAL_ERR);
	if (++p.rebinds > max_rebinds || (b->state == binding_state::bound && !serves(*b->to, p)))
		return fail_op(p.op, IBV_WC_REM_ACCESS_ERR);
	if (b->state == binding_state::plain && is_plain(*b, p.op)) {
		go_plain(p);
		return put(posting_, p);
	}
	if (b->state == binding_state::bound) {
		reset_piece(p, *b->to);
		return put(posting_, p);
	}
	put(rebinding_, p);
	ask_resolve(*b);
}

void engine::adopt(std::uint32_t rkey, int error, const rdma_np_region_info &info, nanoseconds asked,
		   std::uint64_t tail) noexcept
{
	binding *b = make_binding(rkey);
	/* Another answer may have come first, and its region have died; or a later one is to come. */
	const bool awaited = !b || (b->state == binding_state::asked && !b->asks);

	--resolves_;
	if (!error && !sane(info))
		error = -EPROTO;
	/* What is known stays so if this one says nothing; that a key is none only -EACCES says. */
	if (b && (awaited || !error || error == -EACCES)) {
		if (is_answer(error)) {
			/* Pinned, or nonsense: the HCA will say. */
			make_plain(*b, error, asked, tail);
		} else {
			bind(*b, binding_state::unknown);
		}
		if (!error) {
			region *r = find_region(info.region_id);
			if (!r)
				r = make_region(info);
			if (!r) {
				error = -ENOBUFS;
			} else if (!r->gone) {
				bind(*b, binding_state::bound, r);
				/* It is the peer's bound for the QP, which all of its regions tell. */
				config_.max_faults = std::min(config_.max_faults, info.max_outstanding);
				++stats_.resolves;
			}
		}
	}

	const bool failed = error && awaited && (!b || b->state == binding_state::unknown);
	if (failed && next_ < tail_ && next_ < failing_ && !trouble_.dead) {
		const op &o = op_at(next_);
		if (is_remote(o.wr.opcode) && rkey_of(o.wr) == rkey)
			fail_op(next_, error == -ENOTCONN ? not_connected() : resolve_status(error));
	}
	for (std::uint32_t i = rebinding_.first, after; i != none; i = after) {
		piece &p = pieces_[i];
		after = p.next;
		if (rkey_of(op_at(p.op).wr) != rkey)
			continue;
		if (failed) {
			fail_op(p.op, error == -ENOTCONN ? not_connected() : resolve_status(error));
			/* that took other pieces from the list too */
			after = rebinding_.first;
		} else if (!b) {
			continue;
		} else if (b->state == binding_state::unknown || b->state == binding_state::asked) {
			ask_resolve(*b);
		} else if (b->state == binding_state::bound && serves(*b->to, p)) {
			take(p);
			reset_piece(p, *b->to);
			put(posting_, p);
		} else if (b->state == binding_state::plain) {
			if (is_plain(*b, p.op)) {
				take(p);
				go_plain(p);
				put(posting_, p);
			} else {
				ask_resolve(*b);
			}
		} else {
			fail_op(p.op, IBV_WC_REM_ACCESS_ERR);
			after = rebinding_.first;
		}
	}
	forget_dead();
}

void engine::on_resolved(std::uint32_t rkey, int error, const rdma_np_region_info &info) noexcept
{
	nanoseconds asked = 0;
	std::uint64_t tail = 0;

	expand();
	if (binding *b = find_binding(rkey); b && b->asks) {
		/* Whose answer this is nobody knows: that of the first one is the safe assumption. */
		asked = b->asked;
		tail = b->tail;
		if (!--b->asks && b->renews) {
			b->renews = false;
			--renewals_;
		}
	}
	adopt(rkey, error, info, asked, tail);
}

/* No request waits for this answer: one that does asks for itself. */
int engine::resolve_ended(std::uint32_t rkey, int error, const rdma_np_region_info &info, nanoseconds asked) noexcept
{
	expand();
	if (!error && !sane(info))
		error = -EPROTO;
	if (!error || error == -EACCES) {
		adopt(rkey, error, info, asked, 0);
		return error;
	}
	/* A peer that was never heard need not be asked again for a key of which nothing was known. */
	if (error == -EHOSTUNREACH && !find_binding(rkey))
		if (binding *b = make_binding(rkey))
			make_plain(*b, error, asked, 0);
	--resolves_;
	forget_dead();
	return error;
}

/* --- the send queue ---------------------------------------------------- */

ibv_send_wr &engine::push(std::uint64_t i, piece *p, bool signaled) noexcept
{
	if (state_.chained == chain_.size())
		flush();

	/* The rest is zero, or of a request that was passed on, and nothing to a READ or WRITE. */
	ibv_send_wr &w = chain_[state_.chained];
	w.next = &w + 1;
	w.num_sge = 0;
	w.wr_id = sq_id(sq_tail_);
	/* Some providers look at the first entry of a list that has none, too. */
	w.sg_list = &chain_sges_[state_.chained * config_.max_sge];
	w.sg_list[0] = {};
	w.send_flags = signaled ? IBV_SEND_SIGNALED : 0;
	slots_[sq_tail_ & sq_mask_] = {i, p ? index(*p) : none};
	first_brief_ = ++sq_tail_;
	++state_.chained;
	credits_.take(1);
	set_tail(signaled || config_.sq_sig_all ? 0 : unsignaled_ + 1);
	if (i != no_op)
		++op_at(i).slots;
	if (p)
		++p->slots;
	return w;
}

/* @length bytes of the op from @start on. */
void engine::push_data(piece &p, std::uint64_t start, std::uint64_t length, bool signaled) noexcept
{
	const op &o = op_at(p.op);
	const bool read = o.kind == op_kind::read;
	ibv_send_wr &w = push(p.op, &p, signaled);

	w.opcode = read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
	w.send_flags |= o.wr.send_flags & (IBV_SEND_FENCE | IBV_SEND_INLINE);
	w.wr.rdma.rkey = rkey_of(o.wr);
	w.wr.rdma.remote_addr = addr_of(o.wr) + start;
	if (p.reg) {
		const rdma_np_region_info &i = p.reg->info;
		w.wr.rdma.rkey = read ? i.read_key : i.write_key;
		w.wr.rdma.remote_addr += (read ? i.read_addr : i.write_addr) - i.base;
	}
	for (int k = 0; length; ++k) {
		const ibv_sge &s = o.wire[k];
		if (start >= s.length) {
			start -= s.length;
			continue;
		}
		const auto n = static_cast<std::uint32_t>(std::min<std::uint64_t>(s.length - start, length));
		w.sg_list[w.num_sge++] = {s.addr + start, n, s.lkey};
		length -= n;
		start = 0;
	}
}

/* The op as the application posted it, but for the key. */
void engine::push_once(piece &p, bool signaled) noexcept
{
	const op &o = op_at(p.op);
	ibv_send_wr &w = push(p.op, &p, signaled);

	w.opcode = o.wr.opcode;
	w.send_flags |= o.wr.send_flags & (IBV_SEND_FENCE | IBV_SEND_INLINE | IBV_SEND_SOLICITED);
	w.imm_data = o.wr.imm_data;
	w.wr = o.wr.wr;
	if (p.reg)
		translate(w, p.reg->info, p.reg->info.write_key, true);
	w.num_sge = o.wr.num_sge;
	std::copy_n(o.wire, o.wr.num_sge, w.sg_list);
}

/* READ the residency words for which the piece has a place in the ring. */
void engine::push_words(piece &p, bool signaled, unsigned flags) noexcept
{
	ibv_send_wr &w = push(p.op, &p, signaled);

	w.opcode = IBV_WR_RDMA_READ;
	w.send_flags |= flags;
	w.wr.rdma.rkey = p.reg->info.table_key;
	w.wr.rdma.remote_addr = p.reg->info.table_addr + p.ring_page * sizeof(std::uint64_t);
	w.sg_list[0] = {reinterpret_cast<std::uintptr_t>(&config_.words[p.ring_offset]),
			static_cast<std::uint32_t>(p.ring_pages * sizeof(std::uint64_t)), config_.words_lkey};
	w.num_sge = 1;
	++stats_.word_reads;
}

/* For op @i, in its place: what every HCA refuses, with the event that the peer would have had for it. */
void engine::push_refused(std::uint64_t i) noexcept
{
	const op &o = op_at(i);
	/* Of no whole word; its key comes second. */
	const bool misaligned = is_atomic(o.wr.opcode) && o.status == IBV_WC_REM_INV_REQ_ERR;
	ibv_send_wr &w = push(i, nullptr, true);

	w.sg_list[0] = {reinterpret_cast<std::uintptr_t>(config_.words.data()), misaligned ? atomic_size : 1,
			config_.words_lkey};
	w.num_sge = 1;
	if (misaligned) {
		w.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
		w.wr.atomic = {refused_addr, 0, 0, refused_key};
	} else {
		w.opcode = IBV_WR_RDMA_WRITE;
		w.wr.rdma = {refused_addr, refused_key};
	}
}

/*
 * Completions come in order, so that of this one says that all before it are over, unsignaled ones that
 * had succeeded included. A dead QP flushes it. The peer of a live one looks at no key, for it accesses nothing, but
 * at what its QP allows. Both QPs allow READs: a lease is granted after another request to the region, none of which
 * is proven without one.
 */
void engine::push_drain() noexcept
{
	ibv_send_wr &w = push(no_op, nullptr, true);

	w.opcode = trouble_.dead ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
	w.wr.rdma = {};
}

/* How many of the chain, which is not empty, could not be posted? */
std::uint32_t engine::send_chain() noexcept
{
	const std::uint32_t n = std::exchange(state_.chained, 0);
	ibv_send_wr *bad = nullptr;

	chain_[n - 1].next = nullptr;
	/* Nothing may follow what could not be posted. */
	if ((!trouble_.broken || trouble_.dead) && !world_.post(chain_.data(), &bad))
		return 0;
	return n - posted(bad);
}

void engine::flush() noexcept
{
	if (!state_.chained)
		return;
	if (const std::uint32_t lost = send_chain())
		not_posted(lost);
}

/* How many work requests of the chain the provider took before @bad. */
std::uint32_t engine::posted(const ibv_send_wr *bad) const noexcept
{
	return bad ? static_cast<std::uint32_t>(bad - chain_.data()) : 0;
}

/* The last @n entries of the send queue are not there. */
void engine::not_posted(std::uint32_t n) noexcept
{
	std::uint64_t first = no_op;

	expand();
	credits_.give(n);
	for (; n; --n) {
		const slot &s = slots_[--sq_tail_ & sq_mask_];
		if (s.op == no_op)
			continue;
		first = s.op;
		op &o = op_at(s.op);
		--o.slots;
		if (o.kind == op_kind::leased && leases_.give(o.lease))
			lease_ended(o.lease);
		if (s.piece != none && !--pieces_[s.piece].slots && pieces_[s.piece].dropped)
			free_piece(pieces_[s.piece]);
	}
	first_brief_ = sq_tail_;
	/* Some of what is left may be signaled, but nobody knows any more. */
	set_tail(under_way());
	if (!trouble_.broken && !trouble_.dead && first != no_op && op_at(first).status == IBV_WC_SUCCESS)
		op_at(first).status = IBV_WC_LOC_QP_OP_ERR;
	/* step() ends the QP: here somebody may be in the middle of a piece. */
	trouble_.broken = true;
}

bool engine::on_cqe(const ibv_wc &wc) noexcept
{
	const std::uint64_t i = wc.wr_id - first_id_;
	if (i - sq_head_ >= under_way() || (wc.status == IBV_WC_SUCCESS && wc.opcode & IBV_WC_RECV))
		return false;

	const bool bad = wc.status != IBV_WC_SUCCESS;
	expand();
	lost_ |= !trouble_.dead && wc.status == IBV_WC_RETRY_EXC_ERR;
	credits_.give(static_cast<std::uint32_t>(i + 1 - sq_head_));
	while (sq_head_ <= i) {
		const slot s = slots_[sq_head_ & sq_mask_];
		const bool failed = bad && sq_head_ == i;

		++sq_head_;
		if (s.op == no_op)
			continue;
		op &o = op_at(s.op);
		--o.slots;
		if (failed) {
			if (o.status == IBV_WC_SUCCESS)
				o.status = wc.status;
			o.vendor_err = wc.vendor_err;
		}
		if (s.piece == none) {
			if (o.kind == op_kind::leased && leases_.give(o.lease))
				lease_ended(o.lease);
			if (!failed && o.status == IBV_WC_SUCCESS)
				finish(o);
			continue;
		}
		piece &p = pieces_[s.piece];
		if (--p.slots)
			continue;
		if (p.dropped)
			free_piece(p);
		else if (!bad)
			arrived(p);
	}
	if (bad || trouble_.broken)
		set_tail(std::min(unsignaled_, under_way()));
	if (bad && !config_.local_only)
		die();
	else if (bad && wc.status != IBV_WC_WR_FLUSH_ERR)
		flush_rest();
	return true;
}

engine::quick_end engine::quick_cqe(ibv_wc &wc) noexcept
{
	const std::uint64_t i = wc.wr_id - first_id_;

	/* Of a receive that has succeeded the caller knows. */
	if (i - sq_head_ >= under_way() || wc.status != IBV_WC_SUCCESS || !calm())
		return quick_end::no;
	/* It is that of entry @i, and the end of unsignaled ones before it. */
	while (sq_head_ != i) {
		/* One that is to be told has no completion: poll() tells it. */
		const bool told = sq_head_ < first_brief_ ? tells(op_at(head_)) : tells(briefs_[sq_head_ & sq_mask_].send_flags);

		if (told || end_quick(wc) == quick_end::no)
			return quick_end::no;
	}
	return end_quick(wc);
}

/* That of the oldest entry has succeeded. */
engine::quick_end engine::end_quick(ibv_wc &wc) noexcept
{
	if (sq_head_ >= first_brief_)
		return tail_ - head_ == briefs() ? end_brief(wc) : quick_end::no;

	const slot &s = slots_[sq_head_ & sq_mask_];
	op &o = op_at(head_);

	if (s.op != head_ || s.piece != none || o.status != IBV_WC_SUCCESS || !as_it_is(o))
		return quick_end::no;
	o.slots = 0;
	if (o.kind == op_kind::leased && leases_.give(o.lease))
		lease_ended(o.lease);
	finish(o);
	free_buffers(o);
	credits_.give(1);
	++sq_head_;
	++head_;
	++hot_.room;
	if (!tells(o))
		return quick_end::silent;
	wc.wr_id = o.wr.wr_id;
	return quick_end::told;
}

bool engine::take_ring(piece &p, std::uint64_t page, std::uint32_t pages) noexcept
{
	const auto size = static_cast<std::uint32_t>(config_.words.size());
	std::uint32_t offset;

	if (ring_tail_ - ring_head_ == ring_.size())
		return false;
	if (ring_head_ == ring_tail_)
		ring_end_ = 0;
	const std::uint32_t begin = ring_head_ == ring_tail_ ? 0 : ring_[ring_head_ & ring_mask_].offset;
	if (ring_end_ >= begin) {
		if (pages <= size - ring_end_)
			offset = ring_end_;
		else if (pages < begin)
			offset = 0;
		else
			return false;
	} else if (pages < begin - ring_end_) {
		offset = ring_end_;
	} else {
		return false;
	}
	p.ring = static_cast<std::uint32_t>(ring_tail_ & ring_mask_);
	p.ring_offset = offset;
	p.ring_page = page;
	p.ring_pages = pages;
	ring_[p.ring] = {offset, pages, false};
	++ring_tail_;
	ring_end_ = offset + pages;
	return true;
}

void engine::give_ring(piece &p) noexcept
{
	if (p.ring == none)
		return;
	ring_[p.ring].free = true;
	p.ring = none;
	while (ring_head_ != ring_tail_ && ring_[ring_head_ & ring_mask_].free)
		++ring_head_;
}

/* The words as they are known before what proves with them is posted. */
void engine::snapshot(piece &p) noexcept
{
	for (std::uint32_t k = 0; k < p.ring_pages; ++k)
		snap_[p.ring_offset + k] = cache_.get(p.reg->uid, p.ring_page + k);
}

void engine::learn_words(piece &p) noexcept
{
	for (std::uint32_t k = 0; k < p.ring_pages; ++k)
		cache_.set(p.reg->uid, p.ring_page + k, config_.words[p.ring_offset + k]);
}

std::optional<nanoseconds> engine::deadline() const noexcept
{
	std::optional<nanoseconds> first;

	for (std::uint32_t i = pausing_.first; i != none; i = pieces_[i].next)
		if (!first || pieces_[i].wake < *first)
			first = pieces_[i].wake;
	return first;
}

void engine::step() noexcept
{
	expand();
	wanted_ = 0;
	if (calm())
		return drop_silent();
	if (!trouble_.dead && !pausing_.empty()) {
		const nanoseconds now = world_.now();
		for (std::uint32_t i = pausing_.first, after; i != none && !trouble_.dead; i = after) {
			piece &p = pieces_[i];
			after = p.next;
			if (p.wake > now)
				continue;
			take(p);
			p.at = stage::fault;
			send_fault(p);
			if (failing_ != no_op)
				after = pausing_.first == i ? none : pausing_.first;
		}
	}
	while (!trouble_.dead && !asking_.empty() && faults_ < config_.max_faults) {
		piece &p = pieces_[asking_.first];
		take(p);
		send_fault(p);
	}
	if (!state_.holds_wanted && !tails_.empty()) {
		piece &p = pieces_[tails_.first];
		take(p);
		put(posting_, p);
	}
	while (!trouble_.dead && !posting_.empty()) {
		piece &p = pieces_[posting_.first];
		take(p);
		if (!try_post(p)) {
			put_first(posting_, p);
			break;
		}
	}
	if (!trouble_.dead && posting_.empty())
		issue();
	/* With the next signaled one all would be said as well. */
	if (trouble_.drains && (trouble_.dead || !unsignaled_ || room(1))) {
		trouble_.drains = false;
		if (!trouble_.dead && unsignaled_)
			push_drain();
	}
	flush();
	if (trouble_.broken && !trouble_.dead) {
		world_.fail_qp();
		die();
	}
	settle_failure();
	if (trouble_.dead && unsignaled_ && room(1)) {
		push_drain();
		flush();
	}
	drop_silent();
}

} // namespace npr
