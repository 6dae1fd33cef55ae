// SPDX-License-Identifier: GPL-2.0
/*
 * The peer of a cell: all verbs on the main queue pair, judged by the shadow; READs of
 * anything and WRITEs into the void on the probe; see cell.hpp.
 */
#include "pages.hpp"
#include "verbs.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cstring>
#include <ctime>
#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace soak
{

namespace
{

enum class verb { read, write, write_imm, send, send_imm, send_inv, fetch_add, compare_swap };

constexpr bool is_atomic(verb v)
{
	return v == verb::fetch_add || v == verb::compare_swap;
}
constexpr bool is_send(verb v)
{
	return v == verb::send || v == verb::send_imm || v == verb::send_inv;
}
constexpr bool is_write(verb v)
{
	return v == verb::write || v == verb::write_imm;
}
constexpr bool brings(verb v)
{
	return v == verb::read || is_atomic(v);
}
/* Those that take one of the owner's receives. */
constexpr bool is_message(verb v)
{
	return is_send(v) || v == verb::write_imm;
}

constexpr ibv_wr_opcode opcode_of(verb v)
{
	switch (v) {
	case verb::read:
		return IBV_WR_RDMA_READ;
	case verb::write:
		return IBV_WR_RDMA_WRITE;
	case verb::write_imm:
		return IBV_WR_RDMA_WRITE_WITH_IMM;
	case verb::send:
		return IBV_WR_SEND;
	case verb::send_imm:
		return IBV_WR_SEND_WITH_IMM;
	case verb::send_inv:
		return IBV_WR_SEND_WITH_INV;
	case verb::fetch_add:
		return IBV_WR_ATOMIC_FETCH_AND_ADD;
	case verb::compare_swap:
		return IBV_WR_ATOMIC_CMP_AND_SWP;
	}
	return IBV_WR_SEND;
}

constexpr kind kind_of(verb v)
{
	switch (v) {
	case verb::read:
		return kind::read;
	case verb::write:
		return kind::write;
	case verb::write_imm:
		return kind::write_imm;
	case verb::send:
		return kind::send;
	case verb::send_imm:
		return kind::send_imm;
	case verb::send_inv:
		return kind::send_inv;
	case verb::fetch_add:
		return kind::fetch_add;
	case verb::compare_swap:
		return kind::compare_swap;
	}
	return kind::end;
}

constexpr ibv_wc_opcode completion_of(verb v)
{
	switch (v) {
	case verb::read:
		return IBV_WC_RDMA_READ;
	case verb::write:
	case verb::write_imm:
		return IBV_WC_RDMA_WRITE;
	case verb::send:
	case verb::send_imm:
	case verb::send_inv:
		return IBV_WC_SEND;
	case verb::fetch_add:
		return IBV_WC_FETCH_ADD;
	case verb::compare_swap:
		return IBV_WC_COMP_SWAP;
	}
	return IBV_WC_SEND;
}

/* What a queue pair gets to hear when the other side, or a device, is gone. */
bool ends_a_connection(ibv_wc_status s)
{
	return s == IBV_WC_RETRY_EXC_ERR || s == IBV_WC_REM_ACCESS_ERR || s == IBV_WC_REM_OP_ERR ||
	       s == IBV_WC_WR_FLUSH_ERR || s == IBV_WC_REM_ABORT_ERR || s == IBV_WC_RNR_RETRY_EXC_ERR ||
	       s == IBV_WC_REM_INV_REQ_ERR || s == IBV_WC_FATAL_ERR || s == IBV_WC_GENERAL_ERR ||
	       /* The kernel takes keys away before queue pairs, the youngest first. */
	       s == IBV_WC_LOC_PROT_ERR;
}

struct extent {
	std::size_t offset, length;

	[[nodiscard]] unsigned first() const { return static_cast<unsigned>(offset / PAGE); }
	[[nodiscard]] unsigned last() const { return static_cast<unsigned>((offset + length - 1) / PAGE); }
	[[nodiscard]] bool meets(const extent &o) const
	{
		return length && o.length && offset < o.offset + o.length && o.offset < offset + length;
	}
};

struct piece {
	std::uint8_t *at;
	std::size_t length;
};

struct request {
	std::uint64_t id;
	verb what;
	extent where; /* length 0: none */
	unsigned slot;
	bool signaled;
	std::bitset<kinds> is; /* what it counts as when it is done */
	std::vector<piece> local;
	std::vector<std::uint8_t> expected; /* of those that bring something */
};

/* Of local buffers: the last ones are the side connection's. */
constexpr unsigned slots = window + side_window;

/* All ends before the owner has connected, and then it does not any more. */
struct not_needed {
};

class peer
{
public:
	explicit peer(cell &c);
	int run();

private:
	struct disconnected_now {
	};
	struct lost_now {
	};

	void main_loop();
	bool post_chain();
	bool generate(request &r, ibv_send_wr &wr, std::array<ibv_sge, 4> &sge, std::uint8_t *inlined);
	extent choose(verb v);
	bool enter(extent e);
	void leave(extent e);
	bool busy(extent e, bool readers_only) const;
	void lay_out(request &r, ibv_send_wr &wr, std::array<ibv_sge, 4> &sge, std::size_t length);
	void mark(request &r, kind k);
	void scatter(const request &r, const std::uint8_t *from);
	void finish(request &r);
	std::string failed_request(const std::deque<request> &under_way, const ibv_wc &wc);
	void mark_interfaces(request &r);
	void post(connection &q, ibv_send_wr *wr);
	template <class F> void await_news(F over);
	bool post_side();
	void poll();
	void poll(connection &q, std::deque<request> &under_way);
	void shake();
	bool fork_child();
	void await_event();
	void note_stats();

	void probe_loop();
	extent choose_probe();
	void probe_invalidate();
	void probe_once();
	std::string seen_then(extent e, ibv_send_wr wr, const npr_stats &before);
	void reconnect_probe();
	int run_one(connection &q, ibv_send_wr &wr, ibv_wc &wc);

	cell &c_;
	random_source random_, probe_random_;
	device device_;
	connection main_, side_, probe_;
	own<ibv_ah> owner_address_; /* of UD */
	std::uint8_t *pinned_, *unpinned_, *probe_buffer_;
	own<ibv_mr> pinned_mr_, probe_mr_;
	nprdma::detail::handle<ibv_mr> unpinned_mr_;

	std::deque<request> under_way_, side_under_way_;
	std::array<bool, slots> slot_used_{};
	std::uint64_t next_id_ = 1, probe_id_ = 0;
	npr_stats stats_{};
	pid_t child_ = 0;
	std::atomic<bool> probe_stop_{false};
};

peer::peer(cell &c)
    : c_(c),
      random_(c.seed * 4 + c.owner_session * 1000003ULL),
      probe_random_(c.seed * 8 + c.owner_session),
      device_(NP_PEER_DEV),
      main_(device_, {.send = window,
		      .all_signaled = c.all_signaled,
		      .extended = c.extended,
		      .extended_poll = c.extended_poll}),
      side_(device_, {.type = c.side,
		      .send = side_window,
		      .all_signaled = c.all_signaled,
		      .extended = c.extended,
		      .extended_poll = c.extended_poll}),
      probe_(device_, {.send = 4}),
      pinned_(static_cast<std::uint8_t *>(np_map(buffer_bytes))),
      unpinned_(static_cast<std::uint8_t *>(np_map_aligned(buffer_bytes, HUGE_PAGE))),
      probe_buffer_(static_cast<std::uint8_t *>(np_map(16 * PAGE)))
{
	if (!pinned_ || !unpinned_ || !probe_buffer_)
		fail(c_, "no memory for the peer's buffers");
	pinned_mr_ = pin(device_, pinned_, buffer_bytes);
	probe_mr_ = pin(device_, probe_buffer_, 16 * PAGE);
	unpinned_mr_ = nprdma::detail::own(
	    npr_reg_mr(device_.pd.get(), unpinned_, buffer_bytes, IBV_ACCESS_LOCAL_WRITE), "npr_reg_mr");

	const std::uint32_t session = c_.owner_session;

	c_.peer_main = main_.address(device_);
	c_.peer_side = side_.address(device_);
	c_.peer_probe = probe_.address(device_);
	c_.peer_session = session;
	for (deadline end; c_.connected != session;) {
		if (end.over())
			fail(c_, "the owner does not connect");
		if (c_.owner_is_gone)
			throw disconnected_now{};
		if (c_.stop)
			throw not_needed{};
		np_pause();
	}
	main_.attach(device_, c_.owner_main,
		     c_.relaxed ? static_cast<std::uint32_t>(NPR_QP_RELAXED_ORDER) : 0);
	side_.attach(device_, c_.owner_side, 0);
	if (c_.side == IBV_QPT_UD) {
		ibv_ah_attr to{};

		to.dlid = c_.owner_side.lid;
		to.port_num = 1;
		owner_address_ = rc::own(ibv_create_ah(device_.pd.get(), &to), "ibv_create_ah");
	}
	probe_.attach(device_, c_.owner_probe, 0);
}

/* --- what to do next ------------------------------------------------------------------------ */

/* Counts itself in where all pages are there. */
bool peer::enter(extent e)
{
	for (unsigned i = e.first(); i <= e.last(); i++)
		c_.page[i].main_users++;
	for (unsigned i = e.first(); i <= e.last(); i++) {
		if (c_.page[i].now() != there) {
			leave(e);
			return false;
		}
	}
	return true;
}

void peer::leave(extent e)
{
	for (unsigned i = e.first(); i <= e.last(); i++)
		c_.page[i].main_users--;
}

bool peer::busy(extent e, bool readers_only) const
{
	for (const request &r : under_way_)
		if (r.where.meets(e) && (!readers_only || brings(r.what)))
			return true;
	return false;
}

/*
 * Bytes from the beginning of a page on, less than a unit from where a page begins. Packets
 * of a READ from there end within the first or the last unit of a page: it is the only one
 * of its page that could be half page, half signature.
 */
std::size_t near_page(random_source &random)
{
	return (PAGE + random.below(127) - 63) % PAGE;
}

extent peer::choose(verb v)
{
	if (is_atomic(v))
		return {random_.below(region_pages) * PAGE + PAGE - 8 * (1 + random_.below(atomics_per_page)),
			8};

	std::size_t length;
	if (v == verb::read && random_.one_in(4)) {
		const std::uint32_t site = c_.worksite_pages;
		const std::size_t first =
		    site ? c_.worksite + random_.below(site) : random_.below(region_pages);

		return {std::min<std::size_t>(first, region_pages - 9) * PAGE + near_page(random_),
			random_.between(PAGE, 8 * PAGE)};
	}
	switch (random_.below(8)) {
	case 0:
		length = random_.between(1, 64);
		break;
	case 1:
	case 2:
		length = random_.between(1, PAGE);
		break;
	case 3:
	case 4:
		length = PAGE;
		break;
	case 5:
		length = random_.between(PAGE, 8 * PAGE);
		break;
	case 6:
		length = PAGE * random_.between(1, 16);
		break;
	default:
		length = random_.one_in(8) ? random_.between(1, slot_bytes) : 64 * random_.between(1, 64);
		break;
	}
	std::size_t offset = random_.below(region_bytes - length + 1);
	if (random_.one_in(2))
		offset &= ~63UL;
	if (length % PAGE == 0)
		offset &= ~(PAGE - 1);
	return {offset, length};
}

/* Local buffers: one to four pieces, by turns in pinned and in unpinned memory. */
void peer::lay_out(request &r, ibv_send_wr &wr, std::array<ibv_sge, 4> &sge, std::size_t length)
{
	const std::size_t base = r.slot * slot_bytes;
	const std::uint64_t pieces = is_atomic(r.what) || length < 4 ? 1 : random_.between(1, 4);
	bool unpinned = random_.one_in(2);
	std::size_t done = 0;

	for (std::uint64_t i = 0; i < pieces; i++) {
		const std::size_t n = i + 1 == pieces ? length - done : random_.below(length - done + 1);
		std::uint8_t *at = (unpinned ? unpinned_ : pinned_) + base + done;

		sge[i] = {reinterpret_cast<std::uintptr_t>(at), static_cast<std::uint32_t>(n),
			  unpinned ? unpinned_mr_->lkey : pinned_mr_->lkey};
		/* A length of 0 would be 2 GiB. */
		if (n) {
			r.local.push_back({at, n});
			sge[r.local.size() - 1] = sge[i];
			mark(r, unpinned ? kind::unpinned_local : kind::end);
		}
		done += n;
		unpinned = !unpinned;
	}
	if (r.local.size() > 1)
		mark(r, kind::mixed_local);
	wr.sg_list = sge.data();
	wr.num_sge = static_cast<int>(r.local.size());
}

/* It is tried now, and done when the request is. */
void peer::mark(request &r, kind k)
{
	if (k == kind::end || r.is[static_cast<std::size_t>(k)])
		return;
	r.is.set(static_cast<std::size_t>(k));
	c_.count->tried(k);
}

void peer::scatter(const request &r, const std::uint8_t *from)
{
	for (const piece &p : r.local) {
		std::memcpy(p.at, from, p.length);
		from += p.length;
	}
}

bool peer::generate(request &r, ibv_send_wr &wr, std::array<ibv_sge, 4> &sge, std::uint8_t *inlined)
{
	static constexpr verb verbs[] = {verb::read,  verb::read,      verb::read,      verb::write,
					 verb::write, verb::write,     verb::write_imm, verb::send,
					 verb::send,  verb::fetch_add, verb::send_imm,  verb::compare_swap};
	std::vector<std::uint8_t> data;
	std::size_t length;

	r.what = verbs[random_.below(std::size(verbs))];
	if (!holds_for_write(c_.kind) && is_atomic(r.what))
		return false;
	mailbag &mail = c_.main_mail;
	if (is_message(r.what) && mail.posted >= mail.credits)
		return false;
	wr = {};
	/* Once; then the owner makes it anew. */
	if (r.what == verb::send && c_.window && random_.one_in(2)) {
		r.what = verb::send_inv;
		wr.invalidate_rkey = c_.window.exchange(0);
	} else {
		wr.imm_data = static_cast<std::uint32_t>(random_.word());
	}
	wr.opcode = opcode_of(r.what);
	r.where = {0, 0};
	r.local.clear();
	r.expected.clear();

	if (is_send(r.what)) {
		length = random_.one_in(2) ? random_.below(65) : random_.below(message_bytes + 1);
		const std::uint64_t seed = random_.word();

		data = content_of(seed, 0, length, false);
		mail.of(mail.posted) = {.length = static_cast<std::uint32_t>(length),
					.imm = wr.imm_data,
					.opcode = static_cast<std::uint8_t>(IBV_WC_RECV),
					.has_imm = r.what == verb::send_imm,
					.invalidated = r.what == verb::send_inv ? wr.invalidate_rkey : 0,
					.seed = seed};
	} else {
		const extent e = choose(r.what);

		length = e.length;
		if (c_.relaxed && busy(e, false))
			return false;
		if (!enter(e))
			return false;
		r.where = e;
		std::uint8_t *shadow = c_.shadow + e.offset;

		/* Verbs order what follows a READ or an atomic only behind a fence. */
		if (!c_.relaxed && r.what != verb::read && busy(e, true))
			wr.send_flags |= IBV_SEND_FENCE;
		if (brings(r.what))
			r.expected.assign(shadow, shadow + length);
		if (is_write(r.what)) {
			data.resize(length);
			for (std::size_t i = 0; i < length; i++)
				data[i] = tag(c_.number, c_.page[(e.offset + i) / PAGE].newest,
					      static_cast<unsigned>(random_.word()));
			std::memcpy(shadow, data.data(), length);
		}
		wr.wr.rdma.remote_addr = c_.base + e.offset;
		wr.wr.rdma.rkey = c_.rkey;
		if (is_atomic(r.what)) {
			std::uint64_t now, next;

			std::memcpy(&now, shadow, 8);
			wr.wr.atomic.remote_addr = c_.base + e.offset;
			wr.wr.atomic.rkey = c_.rkey;
			wr.wr.atomic.compare_add =
			    r.what == verb::fetch_add || random_.one_in(3) ? random_.word() : now;
			wr.wr.atomic.swap = random_.word();
			if (r.what == verb::fetch_add)
				next = now + wr.wr.atomic.compare_add;
			else
				next = now == wr.wr.atomic.compare_add ? wr.wr.atomic.swap : now;
			std::memcpy(shadow, &next, 8);
		}
		if (r.what == verb::write_imm)
			mail.of(mail.posted) = {.length = static_cast<std::uint32_t>(length),
						.imm = wr.imm_data,
						.opcode =
						    static_cast<std::uint8_t>(IBV_WC_RECV_RDMA_WITH_IMM),
						.has_imm = true};
	}
	if (is_message(r.what))
		mail.posted++;

	if (!brings(r.what) && length && length <= 64 && random_.one_in(2)) {
		std::memcpy(inlined, data.data(), length);
		sge[0] = {reinterpret_cast<std::uintptr_t>(inlined), static_cast<std::uint32_t>(length), 0};
		wr.sg_list = sge.data();
		wr.num_sge = 1;
		wr.send_flags |= IBV_SEND_INLINE;
		mark(r, kind::inlined);
	} else if (length) {
		lay_out(r, wr, sge, length);
		if (brings(r.what))
			for (const piece &p : r.local)
				std::memset(p.at, tag(poison, 0, 7), p.length);
		else
			scatter(r, data.data());
	}
	mark(r, kind_of(r.what));
	mark(r, c_.relaxed ? kind::relaxed_order : kind::strict_order);
	if (!is_send(r.what))
		mark(r, on_memory(c_.kind));
	return true;
}

/* One to four work requests at once, some of them without a completion. */
bool peer::post_chain()
{
	const std::size_t room = window - under_way_.size();
	std::array<ibv_send_wr, 4> wr;
	std::array<std::array<ibv_sge, 4>, 4> sge;
	std::uint8_t inlined[4][64];
	std::size_t n = 0;

	for (std::uint64_t want = std::min<std::uint64_t>(room, random_.between(1, 4)); n < want;) {
		request r{};

		while (slot_used_[r.slot])
			r.slot++;
		if (!generate(r, wr[n], sge[n], inlined[n]))
			break;
		slot_used_[r.slot] = true;
		r.id = next_id_++;
		wr[n].wr_id = r.id;
		under_way_.push_back(std::move(r));
		n++;
	}
	if (!n)
		return false;
	for (std::size_t i = 0; i < n; i++) {
		request &r = under_way_[under_way_.size() - n + i];

		r.signaled = c_.all_signaled || i + 1 == n || random_.one_in(2);
		mark_interfaces(r);
		wr[i].send_flags |= r.signaled && !c_.all_signaled ? IBV_SEND_SIGNALED : 0;
		wr[i].next = i + 1 == n ? nullptr : &wr[i + 1];
	}
	post(main_, wr.data());
	return true;
}

void peer::mark_interfaces(request &r)
{
	if (c_.all_signaled)
		mark(r, kind::all_signaled);
	if (!r.signaled)
		mark(r, kind::unsignaled);
	if (c_.extended)
		mark(r, kind::extended);
}

void peer::post(connection &q, ibv_send_wr *wr)
{
	for (deadline end; const int error = q.post(wr); poll()) {
		if (c_.owner_is_gone)
			throw disconnected_now{};
		/* The local mapping changes all the time: for us to repeat. */
		if (error != -EAGAIN || end.over())
			fail(c_, fmt::format("posting: {}", std::strerror(-error)));
	}
}

/*
 * A message on the side connection. A UC WRITE tells nobody: a SEND behind it says that
 * it has to be there.
 */
bool peer::post_side()
{
	static constexpr kind uc[] = {kind::uc_send, kind::uc_send_imm, kind::uc_write, kind::uc_write_imm};
	static constexpr kind ud[] = {kind::ud_send, kind::ud_send_imm};
	const bool datagrams = c_.side == IBV_QPT_UD;
	const kind what = datagrams ? ud[random_.below(std::size(ud))] : uc[random_.below(std::size(uc))];
	const bool writes = what == kind::uc_write || what == kind::uc_write_imm,
		   sends = what != kind::uc_write_imm;
	mailbag &mail = c_.side_mail;
	const std::uint64_t number = mail.posted, seed = random_.word();
	const std::size_t longest = datagrams ? ud_bytes : message_bytes, n = what == kind::uc_write ? 2 : 1;
	message m{.opcode = static_cast<std::uint8_t>(sends ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM),
		  .seed = seed,
		  .what = what};
	std::array<ibv_send_wr, 2> wr{};
	std::array<std::array<ibv_sge, 4>, 2> sge;

	if (side_under_way_.size() + n > side_window || number >= mail.credits)
		return false;
	m.number = number;
	m.imm = static_cast<std::uint32_t>(number);
	m.has_imm = what == kind::uc_send_imm || what == kind::ud_send_imm || what == kind::uc_write_imm;
	m.stamp = c_.link->stamp();
	for (std::size_t i = 0; i < n; i++) {
		const bool write = writes && !i;
		const std::size_t length = random_.between(8, random_.one_in(2) ? 64 : longest);
		const auto data = content_of(seed + write, number, length, true);
		request r{};

		(write ? m.written : m.length) = static_cast<std::uint32_t>(length);
		r.slot = window;
		while (slot_used_[r.slot])
			r.slot++;
		slot_used_[r.slot] = true;
		r.id = next_id_++;
		r.what = write       ? m.has_imm ? verb::write_imm : verb::write
			 : m.has_imm ? verb::send_imm
				     : verb::send;
		r.signaled = c_.all_signaled || i + 1 == n;
		lay_out(r, wr[i], sge[i], length);
		scatter(r, data.data());
		if (i + 1 == n)
			mark(r, what);
		mark_interfaces(r);
		wr[i].wr_id = r.id;
		wr[i].opcode = opcode_of(r.what);
		wr[i].imm_data = m.imm;
		wr[i].send_flags = r.signaled && !c_.all_signaled ? IBV_SEND_SIGNALED : 0;
		wr[i].next = i + 1 == n ? nullptr : &wr[i + 1];
		if (datagrams) {
			wr[i].wr.ud = {owner_address_.get(), c_.owner_side.qpn, ud_key};
		} else {
			wr[i].wr.rdma.remote_addr = c_.mailbox + number % messages * message_bytes;
			wr[i].wr.rdma.rkey = c_.mailbox_key;
		}
		side_under_way_.push_back(std::move(r));
	}
	if (!sends)
		m.length = m.written;
	mail.of(number) = m;
	mail.posted++;
	post(side_, wr.data());
	return true;
}

/* --- what has been done ------------------------------------------------------------------------ */

void peer::finish(request &r)
{
	if (!r.expected.empty()) {
		const std::uint8_t *want = r.expected.data();

		for (const piece &p : r.local) {
			if (std::memcmp(p.at, want, p.length)) {
				std::size_t i = 0;

				while (p.at[i] == want[i])
					i++;
				const std::size_t at =
				    r.where.offset + static_cast<std::size_t>(want - r.expected.data()) + i;

				fail(c_, fmt::format("request {} ({}) of {} bytes at {:#x} brought {:#x} at "
						     "{:#x} (page {}, "
						     "epoch {}), not {:#x}",
						     r.id, static_cast<int>(r.what), r.where.length,
						     r.where.offset, p.at[i], at, at / PAGE,
						     c_.page[at / PAGE].newest.load(), want[i]));
			}
			want += p.length;
		}
	}
	for (std::size_t k = 0; k < kinds; k++)
		if (r.is[k])
			c_.count->done(static_cast<kind>(k));
	if (r.where.length) {
		leave(r.where);
		c_.finished++;
	}
	slot_used_[r.slot] = false;
}

/* Of a kill, which is announced after it was done; there is none if the owner has failed. */
template <class F> void peer::await_news(F over)
{
	for (deadline end; !c_.owner_is_gone && !c_.telling && !over() && !end.over();)
		np_pause();
}

std::string peer::failed_request(const std::deque<request> &under_way, const ibv_wc &wc)
{
	std::string what;

	for (const request &r : under_way) {
		if (r.id != wc.wr_id)
			continue;
		what = fmt::format(" ({}) of {} bytes at {:#x}", static_cast<int>(r.what), r.where.length,
				   r.where.offset);
		if (r.where.length) {
			c_.failed_first = r.where.first();
			c_.failed_pages = r.where.last() - r.where.first() + 1;
		}
	}
	return fmt::format("request {}{}: {}, vendor error {:#x}; the owner: {}", wc.wr_id, what,
			   ibv_wc_status_str(wc.status), wc.vendor_err, kind_names[c_.doing.load()]);
}

void peer::poll()
{
	poll(main_, under_way_);
	poll(side_, side_under_way_);
}

void peer::poll(connection &q, std::deque<request> &under_way)
{
	ibv_wc wc[8];
	const int n = q.poll(wc);

	if (n < 0 && c_.owner_is_gone)
		throw disconnected_now{};
	if (n < 0)
		fail(c_, fmt::format("npr_poll_cq: {}", std::strerror(-n)));
	if (n && c_.extended_poll)
		c_.count->add(kind::extended_poll, static_cast<unsigned>(n));
	for (int i = 0; i < n; i++) {
		if (wc[i].status != IBV_WC_SUCCESS) {
			const std::string which = failed_request(under_way, wc[i]);

			if (&q == &main_ && c_.may_lose && ends_a_connection(wc[i].status))
				throw lost_now{};
			if (ends_a_connection(wc[i].status))
				await_news([] { return false; });
			if (!c_.owner_is_gone || !ends_a_connection(wc[i].status))
				fail(c_, which);
			throw disconnected_now{};
		}
		for (;;) {
			if (under_way.empty())
				fail(c_,
				     fmt::format("a completion of {}, which is not under way", wc[i].wr_id));
			request &r = under_way.front();
			const bool it = r.id == wc[i].wr_id;

			if (r.signaled != it)
				fail(c_,
				     fmt::format("a completion of {} where {} is next", wc[i].wr_id, r.id));
			if (it && (wc[i].opcode != completion_of(r.what) ||
				   (brings(r.what) && wc[i].byte_len != r.where.length)))
				fail(c_, fmt::format("request {} completes as opcode {} with {} bytes", r.id,
						     static_cast<int>(wc[i].opcode), wc[i].byte_len));
			finish(r);
			under_way.pop_front();
			if (it)
				break;
		}
	}
}

/* The peer's own unpinned memory is not at rest either. */
void peer::shake()
{
	const std::size_t first = random_.below(buffer_bytes / PAGE);
	const std::size_t n = random_.between(1, buffer_bytes / PAGE - first);

	std::uint8_t *p = unpinned_ + first * PAGE;

	switch (random_.below(5)) {
	case 0:
		madvise(p, n * PAGE, MADV_HUGEPAGE);
		c_.count->note(kind::peer_collapse, !madvise(p, n * PAGE, MADV_COLLAPSE));
		break;
	case 1:
		c_.count->note(kind::peer_fork, fork_child());
		break;
	default: {
		const std::size_t before = present_pages(p, n);

		madvise(p, n * PAGE, MADV_PAGEOUT);
		c_.count->note(kind::peer_page_out, present_pages(p, n) < before);
	}
	}
}

/* Its buffers are copies, pinned or not, and nobody sees what becomes of them. */
bool peer::fork_child()
{
	const std::uint64_t seed = random_.word();

	if (child_)
		waitpid(child_, nullptr, 0);
	child_ = fork();
	if (!child_) {
		random_source random(seed);
		const timespec t = {0, static_cast<long>(random.below(20000000))};

		for (int i = 0; i < 64; i++)
			std::memset((i % 2 ? pinned_ : unpinned_) + random.below(buffer_bytes / PAGE) * PAGE,
				    tag(poison, 0, 1), 64);
		nanosleep(&t, nullptr);
		_exit(0);
	}
	return child_ > 0;
}

void peer::await_event()
{
	const int n = main_.cq->wait(100);

	if (n < 0 && !c_.owner_is_gone)
		fail(c_, fmt::format("npr_wait_cq: {}", std::strerror(-n)));
	c_.count->note(kind::waited, n > 0);
}

/* What the library did since the last time. */
void peer::note_stats()
{
	const npr_stats s = main_.qp->stats();

	c_.count->add(kind::fault, s.faults - stats_.faults);
	c_.count->add(kind::hold, s.holds - stats_.holds);
	c_.count->add(kind::suspicious, s.suspicious_pages - stats_.suspicious_pages);
	c_.count->add(kind::repeated, s.repeated_pages - stats_.repeated_pages);
	c_.count->add(kind::lease_got, s.leases - stats_.leases);
	c_.count->add(kind::recall_heard, s.recalls - stats_.recalls);
	stats_ = s;
}

void peer::main_loop()
{
	std::uint64_t last = np_now_ms();
	std::size_t before = 0;
	unsigned idle = 0;

	while (!c_.stop || !under_way_.empty() || !side_under_way_.empty()) {
		const bool quiet = c_.quiet;

		if (!c_.stop && !c_.rest && !quiet && under_way_.size() < window && !random_.one_in(4))
			post_chain();
		if (!c_.stop && !quiet && random_.one_in(2))
			post_side();
		c_.under_way = static_cast<std::uint32_t>(under_way_.size());
		/* Some polls more, in which the library gives back what requests have held. */
		idle = quiet && under_way_.empty() && side_under_way_.empty() ? idle + 1 : 0;
		c_.main_idle = idle > 32;
		if (c_.main_idle) {
			/* From then on it does not poll, so that the next post is the first to see a recall.
			 */
			while (c_.quiet && !c_.owner_is_gone) {
				/* Again and again: a new rest may begin before this has seen the end of the
				 * last. */
				c_.main_idle = true;
				std::this_thread::yield();
			}
			continue;
		}
		/* All it left may be pages on their way and no credits: then nothing is posted that could
		 * fail. */
		if (c_.owner_is_gone && under_way_.empty())
			throw disconnected_now{};
		if (random_.one_in(500)) {
			shake();
			note_stats();
		}
		if (c_.events && under_way_.size() == window) {
			if (const int error = main_.cq->req_notify(); error && !c_.owner_is_gone)
				fail(c_, fmt::format("npr_req_notify_cq: {}", std::strerror(-error)));
			poll();
			/* Not for longer than it takes to notice that all has ended; a device that is gone
			 * wakes all. */
			if (under_way_.size() == window)
				await_event();
		}
		poll();
		if (under_way_.empty() || under_way_.front().id != before) {
			before = under_way_.empty() ? 0 : under_way_.front().id;
			last = np_now_ms();
		} else if (np_now_ms() > last + NP_WAIT_MS && !c_.owner_is_gone) {
			fail(c_,
			     fmt::format("request {} ({}) of {} bytes at {:#x} does not complete", before,
					 static_cast<int>(under_way_.front().what),
					 under_way_.front().where.length, under_way_.front().where.offset));
		}
		if (c_.owner_is_gone && np_now_ms() > last + NP_WAIT_MS)
			fail(c_, "the owner is gone and the queue pair does not say so");
	}
}

/* --- the probe ------------------------------------------------------------------------------------ */

int peer::run_one(connection &q, ibv_send_wr &wr, ibv_wc &wc)
{
	ibv_send_wr *bad;
	deadline end;

	wr.wr_id = ++probe_id_;
	if (int error = q.qp->post_send(wr, bad))
		return error;
	for (;;) {
		const int n = q.cq->poll({&wc, 1});

		if (n < 0)
			return n;
		if (n && wc.wr_id != wr.wr_id)
			fail(c_, fmt::format("a completion ({}) of {:#x} where {:#x} is under way",
					     ibv_wc_status_str(wc.status), wc.wr_id, wr.wr_id));
		if (n)
			return 0;
		if (end.over())
			return -ETIMEDOUT;
	}
}

void peer::reconnect_probe()
{
	deadline end;

	probe_.qp.reset();
	probe_.cq.reset();
	int error = np_qp_reset(probe_.verbs_qp.get());
	for (ibv_wc wc; ibv_poll_cq(probe_.verbs_cq.get(), 1, &wc) > 0;)
		;
	const std::uint32_t wanted = ++c_.probe_wanted;
	while (c_.probe_made != wanted) {
		if (probe_stop_ || c_.owner_is_gone)
			throw disconnected_now{};
		if (end.over())
			fail(c_, "the owner does not connect the probe again");
		np_pause();
	}
	if (error && c_.owner_is_gone)
		throw disconnected_now{};
	if (error)
		fail(c_, fmt::format("reset of the probe: {}", std::strerror(-error)));
	probe_.attach(device_, c_.owner_probe, 0);
}

/* Anywhere, or where the owner is at work. */
extent peer::choose_probe()
{
	random_source &random = probe_random_;
	const auto pages = static_cast<unsigned>(random.between(1, 8));
	unsigned first = static_cast<unsigned>(random.below(region_pages - pages + 1));

	if (const std::uint32_t site = c_.worksite_pages; site)
		first = std::min<unsigned>(c_.worksite + static_cast<unsigned>(random.below(site)),
					   region_pages - pages);
	return {first * PAGE, pages * PAGE};
}

/* No key of a region was made to be invalidated by a peer. */
void peer::probe_invalidate()
{
	ibv_send_wr wr{};
	ibv_wc wc{};

	wr.opcode = IBV_WR_SEND_WITH_INV;
	wr.send_flags = IBV_SEND_SIGNALED;
	wr.invalidate_rkey = c_.rkey;
	c_.count->tried(kind::refused_invalidate);
	const int error = run_one(probe_, wr, wc);

	if (error || wc.status != IBV_WC_REM_ACCESS_ERR) {
		await_news([this] { return probe_stop_.load(); });
		if (probe_stop_ || c_.owner_is_gone)
			throw disconnected_now{};
		if (!error && c_.may_lose && ends_a_connection(wc.status))
			return reconnect_probe();
		fail(c_, fmt::format("a SEND that would invalidate a region: {}",
				     error ? std::strerror(-error) : ibv_wc_status_str(wc.status)));
	}
	c_.count->done(kind::refused_invalidate);
	reconnect_probe();
}

/* What was wrong with a request that should have been refused. */
std::string peer::seen_then(extent e, ibv_send_wr wr, const npr_stats &before)
{
	const npr_stats s = probe_.qp->stats();
	const std::vector<std::uint8_t> sent(probe_buffer_, probe_buffer_ + e.length);
	std::string all = fmt::format(
	    "{} faults, {} holds, {} repeated pages, {} READs of words; link {}lossy",
	    s.faults - before.faults, s.holds - before.holds, s.repeated_pages - before.repeated_pages,
	    s.word_reads - before.word_reads, c_.link->lossy ? "" : "not ");
	ibv_wc wc{};
	const std::uint32_t step = c_.page[e.first()].step;

	wr.opcode = IBV_WR_RDMA_READ;
	std::memset(probe_buffer_, 0xff, e.length);
	const int error = run_one(probe_, wr, wc);
	if (error || wc.status != IBV_WC_SUCCESS)
		return all + ", and a READ fails";
	for (unsigned i = 0; i <= e.last() - e.first(); i++)
		all += std::memcmp(&sent[i * PAGE], probe_buffer_ + i * PAGE, PAGE) ? ", other data"
										    : ", same data";
	return all + fmt::format("; steps {} {}", step, c_.page[e.first()].step.load());
}

void peer::probe_once()
{
	const extent e = choose_probe();
	const unsigned first = e.first(), pages = e.last() - first + 1;
	page_state *const page = c_.page + first;
	std::array<std::uint32_t, 8> step{}, oldest{};
	bool write = probe_random_.one_in(c_.worksite_pages ? 2 : 8);
	ibv_send_wr wr{};
	ibv_wc wc{};

	if (probe_random_.one_in(100))
		return probe_invalidate();
	if (write) {
		for (unsigned i = 0; i < pages; i++)
			page[i].probe_writers++;
		write = std::all_of(page, page + pages, [](const page_state &p) {
			return p.now() == lossy || p.now() == gone || p.now() == read_only;
		});
		for (unsigned i = 0; i < pages && !write; i++)
			page[i].probe_writers--;
	}
	const std::size_t skip = !write && probe_random_.one_in(2) ? near_page(probe_random_) : 0;
	ibv_sge sge = {reinterpret_cast<std::uintptr_t>(probe_buffer_) + skip,
		       static_cast<std::uint32_t>(e.length - skip), probe_mr_->lkey};
	for (unsigned i = 0; i < pages; i++) {
		step[i] = page[i].step;
		oldest[i] = page[i].oldest;
		std::memset(probe_buffer_ + i * PAGE, write ? tag(c_.number, page[i].newest, i) : 0xff, PAGE);
	}
	wr.opcode = write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
	wr.sg_list = &sge;
	wr.num_sge = 1;
	wr.send_flags = IBV_SEND_SIGNALED;
	wr.wr.rdma.remote_addr = c_.base + e.offset + skip;
	wr.wr.rdma.rkey = c_.rkey;
	c_.count->tried(write ? kind::probe_write : kind::probe_read);
	const npr_stats before = probe_.qp->stats();
	const int error = run_one(probe_, wr, wc);

	/* What each page was all the while decides; a page that changed may have been anything. */
	unsigned were[states] = {};
	for (unsigned i = 0; i < pages; i++)
		were[page[i].step == step[i] ? step[i] % states : lossy]++;
	const bool nowhere = were[gone], forbidden = write && were[read_only];
	const bool allowed = were[there] + (write ? 0 : were[read_only]) == pages;
	if (write)
		for (unsigned i = 0; i < pages; i++)
			page[i].probe_writers--;
	const char *const what = write ? "WRITE" : "READ";

	if (error == -ETIMEDOUT && !c_.owner_is_gone)
		fail(c_, fmt::format("the probe's {} of page {} does not complete", what, first));
	if (error || wc.status != IBV_WC_SUCCESS) {
		if (probe_stop_ || c_.owner_is_gone)
			throw disconnected_now{};
		if (!error && c_.may_lose && ends_a_connection(wc.status))
			return reconnect_probe();
		if (error || wc.status != IBV_WC_REM_ACCESS_ERR || allowed) {
			await_news([this] { return probe_stop_.load(); });
			if (probe_stop_ || c_.owner_is_gone)
				throw disconnected_now{};
			fail(c_, fmt::format("the probe's {} of {} pages at {}: {}, {}", what, pages, first,
					     error ? std::strerror(-error) : ibv_wc_status_str(wc.status),
					     allowed ? "all there" : "on the way"));
		}
		if (nowhere)
			c_.count->note(write ? kind::write_to_gone : kind::read_of_gone, true);
		else if (forbidden)
			c_.count->note(kind::write_to_read_only, true);
		c_.refusals++;
		reconnect_probe();
		return;
	}
	if ((nowhere || forbidden) && !c_.owner_is_gone)
		fail(c_, fmt::format("the probe's {} of {} pages at {} succeeds where {} are gone and {} "
				     "read-only: {}; {}",
				     what, pages, first, were[gone], were[read_only],
				     kind_names[c_.doing.load()], seen_then(e, wr, before)));
	c_.count->done(write ? kind::probe_write : kind::probe_read);
	if (write)
		return;
	if (were[read_only])
		c_.count->note(kind::read_of_read_only, true);
	for (unsigned i = 0; i < pages; i++) {
		const std::uint32_t newest = page[i].newest;
		const state was = static_cast<state>(step[i] % states);
		const bool has_content = (was == there || was == read_only) && page[i].step == step[i];
		const std::uint8_t *p = probe_buffer_ + i * PAGE;

		for (std::size_t k = i ? 0 : skip; k < PAGE - 8 * atomics_per_page; k++) {
			const unsigned who = p[k] >> 5, age = ((p[k] >> 3) - oldest[i]) & 3;

			if (!p[k] && !has_content)
				continue;
			if (who != c_.number || (newest - oldest[i] < 3 && age > newest - oldest[i]))
				fail(c_, fmt::format("the probe READ {:#x} at {:#x} of page {}: cell {}, "
						     "epochs {} to {}, state {}",
						     p[k], k, first + i, c_.number, oldest[i], newest,
						     static_cast<unsigned>(was)));
		}
	}
}

void peer::probe_loop()
{
	try {
		while (!probe_stop_) {
			const bool quiet = c_.quiet;

			c_.probe_idle = quiet;
			if (c_.rest || quiet) {
				np_pause();
				continue;
			}
			probe_once();
			c_.probed++;
		}
	} catch (const disconnected_now &) {
	} catch (const std::exception &e) {
		if (!c_.owner_is_gone)
			fail(c_, fmt::format("probe: {}", e.what()));
	}
}

int peer::run()
{
	int status = done;
	{
		std::jthread probe([this] { probe_loop(); });

		try {
			main_loop();
		} catch (const disconnected_now &) {
			status = disconnected;
		} catch (const lost_now &) {
			c_.has_lost = true;
			status = lost;
		}
		probe_stop_ = true;
	}
	note_stats();
	return status;
}

} // namespace

int run_peer(cell &c)
{
	try {
		return peer(c).run();
	} catch (const not_needed &) {
		return done;
	} catch (const std::exception &e) {
		if (c.owner_is_gone)
			return disconnected;
		fail(c, fmt::format("peer: {}", e.what()));
	} catch (...) {
		return disconnected;
	}
}

} // namespace soak
