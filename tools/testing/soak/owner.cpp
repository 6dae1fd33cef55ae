// SPDX-License-Identifier: GPL-2.0
/*
 * The owner of a cell: registers a region without pinning it, receives what its peer sends
 * into unpinned memory, and changes all this memory in each way it knows, at random.
 */
#include "pages.hpp"
#include "rdma_show.hpp"
#include "verbs.hpp"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <ctime>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <fmt/format.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_HWPOISON
#define MADV_HWPOISON 100
#endif
#ifndef MADV_SOFT_OFFLINE
#define MADV_SOFT_OFFLINE 101
#endif

namespace soak
{

namespace
{

constexpr std::size_t huge_pages = HUGE_PAGE / PAGE;

/* Forked by an owner: what becomes of it nobody sees. */
bool is_child;
/* For the handler of SIGBUS */
cell *me;
volatile bool poisons;

struct range {
	unsigned first, pages;
};

/* Receives: without an SRQ the first half is the main connection's. */
constexpr unsigned slots = 2 * messages;
constexpr std::uint64_t bind_id = UINT64_MAX;

/* What comes on a connection. */
struct arrivals {
	mailbag &mail;
	std::unique_ptr<connection> link{};
	std::uint64_t received = 0;
};

/* What can happen to memory of a kind; what is of most use has several cards. */
std::vector<kind> kept_events(memory m)
{
	std::vector<kind> cards = {kind::page_out,
				   kind::page_out,
				   kind::page_out,
				   kind::page_out_all,
				   kind::page_out_inbox,
				   kind::fork,
				   kind::fork,
				   kind::dont_fork,
				   kind::others,
				   kind::clear_refs,
				   kind::lock,
				   kind::prefetch,
				   kind::move_pages,
				   kind::prefetch_write,
				   kind::prefetch_no_fault,
				   kind::reregister_refused};

	if (m != memory::hugetlb)
		cards.insert(cards.end(), {kind::cold, kind::huge_advice});
	if (m <= memory::memfd)
		cards.insert(cards.end(), {kind::collapse, kind::soft_offline});
	if (is_shared_file(m))
		cards.push_back(kind::sync);
	else
		cards.push_back(kind::unmergeable);
	return cards;
}

std::vector<kind> lossy_events(memory m)
{
	std::vector<kind> cards = {kind::drop, kind::unmap, kind::map_over, kind::protect_all,
				   kind::protect_write};

	if (m != memory::hugetlb)
		cards.push_back(kind::remap);
	if (is_shared_file(m))
		cards.insert(cards.end(), {kind::punch_hole, kind::truncate, kind::map_read_only});
	else
		cards.insert(cards.end(), {kind::free_lazily, kind::poison_page, kind::mergeable,
					   kind::userfault_missing, kind::userfault_protected});
	/* This one stops all else. */
	const std::vector<kind> twice = cards;
	cards.insert(cards.end(), twice.begin(), twice.end());
	cards.push_back(kind::reregister);
	return cards;
}

class owner
{
public:
	explicit owner(cell &c)
	    : c_(c),
	      random_(c.seed * 2 + 1),
	      device_(NP_OWNER_DEV),
	      data_(map()),
	      inbox_(static_cast<std::uint8_t *>(np_map(inbox_bytes))),
	      mailbox_(static_cast<std::uint8_t *>(np_map(messages * message_bytes))),
	      kept_(kept_events(c.kind)),
	      lossy_(lossy_events(c.kind))
	{
		if (!inbox_ || !mailbox_)
			fail(c_, "no memory for messages");
		/* Something for KSM from the beginning */
		const bool merge =
		    c_.kind == memory::anonymous && !madvise(data_, region_bytes, MADV_MERGEABLE);

		for (unsigned i = 0; i < region_pages; i++)
			refill(i, 0, merge && random_.one_in(2));
		c_.base = reinterpret_cast<std::uintptr_t>(data_);
		mr_ = nprdma::detail::own(npr_reg_mr(device_.pd.get(), data_, region_bytes, NP_RIGHTS),
					  "npr_reg_mr");
		c_.rkey = mr_->rkey;
		inbox_mr_ = nprdma::detail::own(
		    npr_reg_mr(device_.pd.get(), inbox_, inbox_bytes, IBV_ACCESS_LOCAL_WRITE), "npr_reg_mr");
		mailbox_mr_ =
		    pin(device_, mailbox_, messages * message_bytes, NP_RIGHTS | IBV_ACCESS_MW_BIND);
		c_.mailbox = reinterpret_cast<std::uintptr_t>(mailbox_);
		c_.mailbox_key = mailbox_mr_->rkey;
	}

	int run();

private:
	[[nodiscard]] std::uint8_t *at(unsigned page) const { return data_ + page * PAGE; }

	std::uint8_t *map();
	void map_at(std::uint8_t *p, std::size_t length, int rights = PROT_READ | PROT_WRITE);

	/* Sessions and messages */
	bool offer();
	bool meet();
	void serve_probe();
	void post_receive(unsigned slot);
	void post_probe_receive();
	void bind_window();
	void receive();
	void receive(arrivals &a);
	[[noreturn]] void fail_receive(const arrivals &a, const ibv_wc &wc);
	void check_message(arrivals &a, const ibv_wc &wc);
	void check_number(arrivals &a, std::uint64_t number);
	void check_all_arrived(arrivals &a);

	/* Memory */
	void refill(unsigned page, unsigned epoch, bool alike = false);
	range some_pages();
	range expendable_page();
	range last_pages()
	{
		const bool whole =
		    c_.kind == memory::hugetlb || (c_.kind == memory::memfd && random_.one_in(2));
		const auto n =
		    whole ? static_cast<unsigned>(huge_pages) : static_cast<unsigned>(random_.between(1, 64));

		return {region_pages - n, n};
	}
	range range_of(kind k);
	range many_pages() { return {static_cast<unsigned>(random_.below(region_pages - 63)), 64}; }
	bool take(range r);
	void empty(range r);
	void give_back(range r, bool alike = false);
	/* Nobody answers any more, */
	bool broken() const { return c_.peer_is_gone || c_.owner_is_gone; }
	/* or all comes to its end, in which the peer still has to finish what it began. */
	bool over() const { return c_.stop || broken(); }
	void event();
	bool kept_event(kind k);
	bool lossy_event(kind k, range r);
	void obey();
	[[nodiscard]] rdma_show::region shown()
	{
		return kernel_.region_of(NP_OWNER_DEV, getpid(), region_bytes);
	}
	bool page_out(std::uint8_t *p, std::size_t pages);
	bool page_out_again(range r);
	bool userfault(range r, bool missing);
	void become_another();
	void get_stuck();
	bool move_to_other_node(range r);
	bool advise(range r, ibv_advise_mr_advice advice);
	void become(range r, state s);
	void await_no_hold();
	void let_probe(range r, state s);
	[[nodiscard]] std::string access(range r) const;
	void note_region();
	void move(std::uint8_t *from, std::uint8_t *to);
	bool reregister();
	bool fork_child(bool touch);
	bool scribble();
	bool clear_soft_dirty();
	void pause();
	void compare();

	cell &c_;
	random_source random_;
	device device_;
	int file_ = -1; /* before map() */
	std::uint8_t *data_;
	std::uint8_t *inbox_, *mailbox_;
	nprdma::detail::handle<ibv_mr> mr_, inbox_mr_;
	own<ibv_mr> mailbox_mr_;
	own<ibv_mw> window_; /* on the mailbox; before the queue pair that it is bound to */
	std::uint32_t window_key_ = 0;
	std::optional<shared_receives> shared_; /* before those who use it */
	arrivals main_{c_.main_mail}, side_{c_.side_mail};
	std::unique_ptr<connection> probe_;
	std::array<bool, slots> posted_{};
	std::uint32_t session_ = 0;
	deck<kind> kept_, lossy_;
	npr_mr_attr seen_{}; /* of the region when it was last looked at */
	rdma_show::netlink kernel_;
	bool node_ = false;
	std::vector<pid_t> children_;
};

/* --- memory of each kind ------------------------------------------------------------------ */

void owner::map_at(std::uint8_t *p, std::size_t length, int rights)
{
	const bool file = file_ >= 0;
	void *got = mmap(p, length, rights, (file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS) | MAP_FIXED,
			 file_, file ? p - data_ : 0);

	if (got != p)
		fail(c_, fmt::format("mmap of {} bytes: {}", length, std::strerror(errno)));
	if (!file)
		madvise(p, length, c_.kind == memory::huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

std::uint8_t *owner::map()
{
	data_ = static_cast<std::uint8_t *>(np_map(region_bytes));
	if (!data_)
		fail(c_, "no address space");
	switch (c_.kind) {
	case memory::memfd:
		file_ = memfd_create("soak", MFD_CLOEXEC);
		break;
	case memory::hugetlb:
		file_ = memfd_create("soak", MFD_CLOEXEC | MFD_HUGETLB);
		break;
	case memory::ext4:
	case memory::xfs:
	case memory::ext4_dax:
	case memory::xfs_dax:
		file_ = open(fmt::format("{}/{}", directory_of(c_.kind), c_.number).c_str(),
			     O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
		break;
	default:
		break;
	}
	if (c_.kind >= memory::memfd && (file_ < 0 || ftruncate(file_, region_bytes)))
		fail(c_, fmt::format("a file of kind {}: {}", name_of(c_.kind), std::strerror(errno)));
	map_at(data_, region_bytes);
	return data_;
}

/* Alike: all pages of a tag are equal. */
void owner::refill(unsigned page, unsigned epoch, bool alike)
{
	std::uint8_t *shadow = c_.shadow + page * PAGE;
	random_source same(epoch & 3);
	random_source &random = alike ? same : random_;

	for (std::size_t i = 0; i < PAGE;) {
		std::uint64_t bits = random.word();

		for (int k = 0; k < 8; k++, i++, bits >>= 3)
			shadow[i] = tag(c_.number, epoch, static_cast<unsigned>(bits));
	}
	std::memcpy(at(page), shadow, PAGE);
}

/* What the CPU sees is what the model says, of all pages that no request uses. */
void owner::compare()
{
	for (unsigned i = 0; i < region_pages; i++) {
		if (c_.page[i].now() != there || c_.page[i].main_users ||
		    !std::memcmp(at(i), c_.shadow + i * PAGE, PAGE))
			continue;
		std::size_t k = 0;
		while (at(i)[k] == c_.shadow[i * PAGE + k])
			k++;
		fail(c_, fmt::format("the owner finds {:#x} at {:#x} of page {}, not {:#x}", at(i)[k], k, i,
				     c_.shadow[i * PAGE + k]));
	}
}

/* --- sessions ---------------------------------------------------------------------------- */

/* New queue pairs, for the peer to connect to. */
bool owner::offer()
{
	main_.link.reset();
	side_.link.reset();
	probe_.reset();
	shared_.reset();
	window_.reset();
	/* Not of a peer that was killed: it may have changed the shadow, and not posted the request. */
	if (c_.has_lost.exchange(false))
		compare();
	for (auto &p : c_.page) {
		p.main_users = 0;
		p.probe_writers = 0;
	}
	/* Nobody can tell what of a dead peer's requests was done. */
	for (unsigned i = 0; session_ && i < region_pages; i++) {
		refill(i, ++c_.page[i].newest);
		c_.page[i].oldest = c_.page[i].newest.load();
	}
	for (arrivals *a : {&main_, &side_}) {
		a->received = 0;
		a->mail.posted = 0;
		a->mail.credits = messages;
	}
	posted_ = {};
	c_.window = 0;
	c_.rest = false; /* it may have been killed while the peer had to rest */
	if (c_.shared_receives)
		shared_.emplace(device_, slots);
	connection_options o{.send = window,
			     .recv = messages,
			     .srq = shared_ ? shared_->verbs.get() : nullptr,
			     .extended_poll = c_.extended_poll};
	main_.link = std::make_unique<connection>(device_, o);
	o.type = c_.side;
	side_.link = std::make_unique<connection>(device_, o);
	probe_ = std::make_unique<connection>(device_, connection_options{.send = 4});
	c_.owner_main = main_.link->address(device_);
	c_.owner_side = side_.link->address(device_);
	c_.owner_probe = probe_->address(device_);
	c_.probe_wanted = c_.probe_made = 0;
	c_.peer_is_gone = false;
	c_.owner_session = ++session_;
	return meet();
}

bool owner::meet()
{
	for (deadline end; c_.peer_session != session_;) {
		if (over())
			return false;
		if (end.over())
			fail(c_, "no peer came");
		np_pause();
	}
	main_.link->attach(device_, c_.peer_main, 0);
	side_.link->attach(device_, c_.peer_side, 0);
	if (int error = np_qp_connect(probe_->verbs_qp.get(), c_.peer_probe)) {
		if (c_.owner_is_gone)
			return false;
		fail(c_, fmt::format("connecting the probe: {}", std::strerror(-error)));
	}
	post_probe_receive();
	for (unsigned i = 0; i < slots; i++)
		post_receive(i);
	window_ = rc::own(ibv_alloc_mw(device_.pd.get(), IBV_MW_TYPE_2), "ibv_alloc_mw");
	window_key_ = window_->rkey;
	bind_window();
	c_.connected = session_;
	return true;
}

void owner::serve_probe()
{
	if (c_.probe_wanted == c_.probe_made)
		return;
	int error = np_qp_reset(probe_->verbs_qp.get());

	if (!error)
		error = np_qp_connect(probe_->verbs_qp.get(), c_.peer_probe);
	if (error && !c_.owner_is_gone)
		fail(c_, fmt::format("connecting the probe again: {}", std::strerror(-error)));
	post_probe_receive();
	c_.probe_made++;
}

/* For a SEND that is refused. */
void owner::post_probe_receive()
{
	ibv_recv_wr wr{}, *bad;

	if (int error = ibv_post_recv(probe_->verbs_qp.get(), &wr, &bad); error && !c_.owner_is_gone)
		fail(c_, fmt::format("a receive of the probe: {}", std::strerror(error)));
}

/* Anew, after each SEND that has invalidated it. */
void owner::bind_window()
{
	ibv_send_wr wr{}, *todo = &wr;

	window_key_ = ibv_inc_rkey(window_key_);
	wr.wr_id = bind_id;
	wr.opcode = IBV_WR_BIND_MW;
	wr.send_flags = IBV_SEND_SIGNALED;
	wr.bind_mw.mw = window_.get();
	wr.bind_mw.rkey = window_key_;
	wr.bind_mw.bind_info = {mailbox_mr_.get(), reinterpret_cast<std::uintptr_t>(mailbox_), PAGE,
				IBV_ACCESS_REMOTE_READ};
	if (int error = main_.link->post(todo); error && !c_.owner_is_gone)
		fail(c_, fmt::format("binding a window: {}", std::strerror(-error)));
}

void owner::post_receive(unsigned slot)
{
	ibv_sge sge[2];
	ibv_recv_wr wr{}, *bad;
	const std::size_t cut = 64 * random_.between(1, message_bytes / 64 - 1);
	std::uint8_t *p = inbox_ + slot * message_bytes;

	sge[0] = {reinterpret_cast<std::uintptr_t>(p), static_cast<std::uint32_t>(cut), inbox_mr_->lkey};
	sge[1] = {reinterpret_cast<std::uintptr_t>(p + cut), static_cast<std::uint32_t>(message_bytes - cut),
		  inbox_mr_->lkey};
	wr.wr_id = slot;
	wr.sg_list = sge;
	wr.num_sge = 2;
	connection &link = *(slot < messages ? main_ : side_).link;
	const auto post = [&] {
		return shared_ ? shared_->srq->post_recv(wr, bad) : link.qp->post_recv(wr, bad);
	};
	int error = post();
	/* The mapping changes all the time, or is being paged out: that is for us to repeat. */
	for (deadline end; error == -EAGAIN && !end.over();)
		error = post();
	if (error && !c_.owner_is_gone)
		fail(c_, fmt::format("posting a receive: {}", std::strerror(-error)));
	posted_[slot] = true;
}

/* In order; and the side connection does not repeat what a bad link loses. */
void owner::check_number(arrivals &a, std::uint64_t number)
{
	for (; a.received < number; a.received++) {
		if (&a != &side_ || a.received >= a.mail.posted ||
		    !c_.link->may_have_lost(a.mail.of(a.received).stamp))
			fail(c_, fmt::format("message {} comes where {} is next, and the link loses nothing",
					     number, a.received));
		a.mail.credits++;
	}
	if (a.received != number)
		fail(c_, fmt::format("message {} comes where {} is next", number, a.received));
}

void owner::check_message(arrivals &a, const ibv_wc &wc)
{
	const bool ud = a.link->with.type == IBV_QPT_UD, side = &a == &side_;
	const std::uint8_t *p = inbox_ + wc.wr_id * message_bytes + (ud ? grh_bytes : 0);
	std::uint64_t number = a.received;

	if (wc.wr_id >= slots || !posted_[wc.wr_id] ||
	    (!shared_ && wc.wr_id % messages != a.received % messages && !side))
		fail(c_, fmt::format("message {} in slot {}", number, wc.wr_id));
	posted_[wc.wr_id] = false;
	if (side && wc.opcode == IBV_WC_RECV)
		std::memcpy(&number, p, sizeof(number));
	else if (side)
		number = wc.imm_data;
	check_number(a, number);

	const message &m = a.mail.of(number);
	const std::uint32_t length = m.length + (ud ? static_cast<std::uint32_t>(grh_bytes) : 0);
	const std::uint32_t invalidated = wc.wc_flags & IBV_WC_WITH_INV ? wc.invalidated_rkey : 0;

	if (wc.opcode != m.opcode || wc.byte_len != length ||
	    !!(wc.wc_flags & IBV_WC_WITH_IMM) != m.has_imm || (m.has_imm && wc.imm_data != m.imm) ||
	    invalidated != m.invalidated)
		fail(c_, fmt::format("message {}: slot {}, opcode {}, {} bytes, immediate {:#x}, flags "
				     "{:#x}, invalidated {:#x}; "
				     "not opcode {}, {} bytes, immediate {:#x}, invalidated {:#x}",
				     number, wc.wr_id, static_cast<int>(wc.opcode), wc.byte_len, wc.imm_data,
				     wc.wc_flags, invalidated, m.opcode, length, m.imm, m.invalidated));
	if (wc.opcode == IBV_WC_RECV) {
		const auto want = content_of(m.seed, number, m.length, side);

		if (std::memcmp(p, want.data(), want.size()))
			fail(c_, fmt::format("message {} of {} bytes differs", number, m.length));
	}
	if (m.written && !c_.link->may_have_lost(m.stamp)) {
		const auto want = content_of(m.seed + 1, number, m.written, true);

		if (std::memcmp(mailbox_ + number % messages * message_bytes, want.data(), want.size()))
			fail(c_, fmt::format("WRITE {} of {} bytes differs", number, m.written));
	}
	a.received++;
	c_.count->note(side ? ud ? kind::ud_received : kind::uc_received : kind::received, true);
	if (shared_)
		c_.count->note(kind::shared_received, true);
	if (c_.extended_poll)
		c_.count->note(kind::extended_poll, true);
}

/* If it is a request that has failed the peer says which: can the owner use these pages? */
void owner::fail_receive(const arrivals &a, const ibv_wc &wc)
{
	const std::uint64_t until = np_now_ms() + 2000;
	std::string all =
	    fmt::format("receive {} ({:#x}): {}", a.received, wc.wr_id, ibv_wc_status_str(wc.status));

	while (!c_.failed_pages && np_now_ms() < until)
		np_pause();
	if (const std::uint32_t pages = c_.failed_pages; pages) {
		const std::uint32_t first = c_.failed_first;

		all += fmt::format("; of page {} and the next:", first);
		for (const std::uint64_t entry : page_map(at(first), pages))
			all += fmt::format(" {:x}", entry);
		all += "; states";
		for (std::uint32_t i = first; i < first + pages; i++)
			all += fmt::format(" {}", static_cast<unsigned>(c_.page[i].now()));
		all += "; " + access({first, pages});
	}
	fail(c_, all);
}

void owner::receive()
{
	receive(main_);
	receive(side_);
}

void owner::receive(arrivals &a)
{
	ibv_wc wc[8];
	const int n = a.link->poll(wc);

	if (n < 0 && !c_.owner_is_gone)
		fail(c_, fmt::format("npr_poll_cq: {}", std::strerror(-n)));
	for (int i = 0; i < n; i++) {
		if (wc[i].status == IBV_WC_WR_FLUSH_ERR && (over() || (&a == &main_ && c_.may_lose)))
			continue;
		if (wc[i].status != IBV_WC_SUCCESS && c_.owner_is_gone)
			continue;
		if (wc[i].status != IBV_WC_SUCCESS)
			fail_receive(a, wc[i]);
		if (wc[i].wr_id == bind_id) {
			c_.window = window_key_;
			continue;
		}
		check_message(a, wc[i]);
		post_receive(static_cast<unsigned>(wc[i].wr_id));
		/* Not before: UC and UD do not wait for a receive. */
		a.mail.credits++;
		if (wc[i].wc_flags & IBV_WC_WITH_INV)
			bind_window();
	}
}

/* At the end nothing is missing but what a bad link may have lost. */
void owner::check_all_arrived(arrivals &a)
{
	for (deadline end; a.received < a.mail.posted && !broken(); receive(a)) {
		if (&a == &side_ && c_.link->may_have_lost(a.mail.of(a.received).stamp))
			return;
		if (end.over())
			fail(c_,
			     fmt::format("message {} of {} does not come", a.received, a.mail.posted.load()));
	}
}

/* --- taking pages away, and giving them back ------------------------------------------------- */

range owner::some_pages()
{
	if (c_.kind == memory::hugetlb || (c_.kind == memory::huge_pages && random_.one_in(3)))
		return {static_cast<unsigned>(huge_pages * random_.below(region_pages / huge_pages)),
			huge_pages};
	const auto n = static_cast<unsigned>(random_.between(1, random_.one_in(8) ? 64 : 8));

	return {static_cast<unsigned>(random_.below(region_pages - n + 1)), n};
}

/*
 * One whose frame may be taken out of use, mostly: what is pinned has to leave memory that
 * is to go offline, and a huge page of which a part is cold is split. ENOMEM: it could not
 * leave, e.g. because a peer's hold pins the page, too.
 */
range owner::expendable_page()
{
	const auto page = static_cast<unsigned>(random_.below(region_pages));

	try {
		pin(device_, at(page), PAGE).reset();
	} catch (const std::system_error &e) {
		if (e.code() != std::errc::not_enough_memory)
			throw;
	}
	madvise(at(page), PAGE, MADV_COLD);
	return {page, 1};
}

/*
 * From there to lossy; false: everything ends. While our device goes the peer still is at
 * work on what it began: then they stay as they are.
 */
bool owner::take(range r)
{
	deadline end;

	for (unsigned i = r.first; i < r.first + r.pages; i++)
		c_.page[i].newest++;
	become(r, going);
	for (unsigned i = r.first; i < r.first + r.pages; i++) {
		while (c_.page[i].main_users) {
			if (broken())
				break;
			if (end.over())
				fail(c_, fmt::format("page {} stays in use by {} requests", i,
						     c_.page[i].main_users.load()));
			receive();
			serve_probe();
		}
	}
	if (c_.owner_is_gone)
		return false;
	become(r, lossy);
	return !over();
}

void owner::become(range r, state s)
{
	for (unsigned i = r.first; i < r.first + r.pages; i++)
		c_.page[i].become(s);
}

/* Whatever was taken away is out of reach then. */
void owner::await_no_hold()
{
	npr_mr_attr now{};
	deadline end;

	while (!broken() && !npr_query_mr(mr_.get(), &now) && now.held_pages) {
		if (end.over()) {
			const rdma_show::region r = shown();

			fail(c_,
			     fmt::format(
				 "{} pages stay under a hold, {} leased; {} leases, {} recalls, {} overdue; "
				 "the peer {} stopped, has {} requests under way",
				 std::uint64_t{now.held_pages}, r.leased, r.leases, r.recalls(), r.overdue,
				 c_.stopped ? "is" : "is not", c_.under_way.load()));
		}
		c_.rest = true;
		receive();
		serve_probe();
	}
	c_.rest = false;
}

/*
 * Memory is now as s says: let the probe find out, for a while. Nothing depends on whether
 * it comes.
 */
void owner::let_probe(range r, state s)
{
	await_no_hold();

	const std::uint64_t refusals = c_.refusals, until = np_now_ms() + random_.below(150);

	become(r, s);
	c_.worksite = r.first;
	c_.worksite_pages = r.pages;
	do {
		receive();
		serve_probe();
	} while (np_now_ms() < until && c_.refusals < refusals + 2 && !over() && !c_.telling);
	c_.worksite_pages = 0;
	if (c_.telling)
		fail(c_, fmt::format("{} of {} pages at {}; {}",
				     kind_names[static_cast<unsigned>(c_.doing.load())], r.pages, r.first,
				     access(r)));
	become(r, lossy);
}

/* Can the owner do what the peer did? */
std::string owner::access(range r) const
{
	const auto k = static_cast<kind>(c_.doing.load());
	const char *can[2] = {"not asked", "not asked"};

	/* It would wait for who answers userfaultfd. */
	if (k != kind::userfault_missing && k != kind::userfault_protected)
		for (int write = 0; write < 2; write++)
			can[write] = madvise(at(r.first), r.pages * PAGE,
					     write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ)
					 ? std::strerror(errno)
					 : "yes";
	return fmt::format("the owner can read: {}; can write: {}", can[0], can[1]);
}

/* What was in these pages cannot be read any more. */
void owner::empty(range r)
{
	for (unsigned i = r.first; i < r.first + r.pages; i++)
		c_.page[i].oldest = c_.page[i].newest.load();
}

void owner::give_back(range r, bool alike)
{
	deadline end;

	if (c_.owner_is_gone)
		return;
	become(r, settling);
	for (unsigned i = r.first; i < r.first + r.pages; i++) {
		while (c_.page[i].probe_writers && !broken()) {
			if (end.over())
				fail(c_, fmt::format("a WRITE of the probe to page {} does not end", i));
			receive();
			serve_probe();
		}
		if (c_.owner_is_gone)
			return;
		refill(i, c_.page[i].newest, alike);
		c_.page[i].oldest = c_.page[i].newest.load();
		c_.page[i].become(there);
	}
}

/* So that others meet what was done; nothing depends on how long it is. */
void owner::pause()
{
	const std::uint64_t until = np_now_ms() + random_.below(8);

	do {
		receive();
		serve_probe();
	} while (np_now_ms() < until && !over());
}

/* --- what peers do not notice ----------------------------------------------------------------- */

bool owner::fork_child(bool touch)
{
	const auto life = static_cast<long>(random_.below(20));
	const std::uint64_t seed = random_.word();
	const pid_t pid = fork();

	if (pid < 0)
		return false;
	if (!pid) {
		random_source random(seed);
		const timespec t = {0, life * 1000000};

		is_child = true;
		/* What is private is a copy, and nobody sees what becomes of it. */
		for (int i = 0; i < 64 && touch; i++)
			std::memset(at(static_cast<unsigned>(random.below(region_pages))), tag(poison, 0, 5),
				    64);
		nanosleep(&t, nullptr);
		_exit(0);
	}
	children_.push_back(pid);
	if (random_.one_in(2) || children_.size() > 4) {
		for (pid_t p : children_)
			waitpid(p, nullptr, 0);
		children_.clear();
	}
	return true;
}

/* Memory of others, full of what no region contains, comes and goes. */
bool owner::scribble()
{
	const std::size_t length = PAGE * random_.between(1, 512);
	void *p = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		return false;
	std::memset(p, tag(poison, 0, 2), length);
	return !munmap(p, length);
}

bool owner::clear_soft_dirty()
{
	int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return false;
	const bool cleared = write(fd, random_.one_in(2) ? "1" : "4", 1) == 1;
	close(fd);
	return cleared;
}

bool owner::page_out(std::uint8_t *p, std::size_t pages)
{
	const std::size_t before = present_pages(p, pages);

	return !madvise(p, pages * PAGE, MADV_PAGEOUT) && present_pages(p, pages) < before;
}

/* The same ones for a while, and READs come: so pages go within a READ. */
bool owner::page_out_again(range r)
{
	const std::uint64_t until = np_now_ms() + random_.below(600);
	bool went = false;

	c_.worksite = r.first;
	c_.worksite_pages = r.pages;
	do {
		went |= page_out(at(r.first), r.pages);
		receive();
		serve_probe();
	} while (np_now_ms() < until && !over());
	c_.worksite_pages = 0;
	return went;
}

bool owner::move_to_other_node(range r)
{
	std::vector<void *> page(r.pages);
	std::vector<int> node(r.pages, node_), before(r.pages), after(r.pages);
	bool moved = false;

	node_ = !node_;
	for (unsigned i = 0; i < r.pages; i++)
		page[i] = at(r.first + i);
	syscall(SYS_move_pages, 0, static_cast<long>(r.pages), page.data(), nullptr, before.data(), 0);
	syscall(SYS_move_pages, 0, static_cast<long>(r.pages), page.data(), node.data(), after.data(), 2);
	syscall(SYS_move_pages, 0, static_cast<long>(r.pages), page.data(), nullptr, after.data(), 0);
	for (unsigned i = 0; i < r.pages; i++)
		moved |= before[i] == !node[i] && after[i] == node[i];
	return moved;
}

bool owner::advise(range r, ibv_advise_mr_advice advice)
{
	ibv_sge sge = {reinterpret_cast<std::uintptr_t>(at(r.first)),
		       static_cast<std::uint32_t>(r.pages * PAGE), mr_->lkey};

	return !ibv_advise_mr(device_.pd.get(), advice, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1);
}

/* True if it happened. */
bool owner::kept_event(kind k)
{
	const range r = some_pages();
	std::uint8_t *p = at(r.first);
	const std::size_t length = r.pages * PAGE;

	switch (k) {
	case kind::page_out:
		return random_.one_in(2) ? page_out_again(r) : page_out(p, r.pages);
	case kind::page_out_all:
		return page_out(data_, region_pages);
	case kind::page_out_inbox:
		/* Asked for only: what receives may go into is held. */
		return !madvise(inbox_, inbox_bytes, MADV_PAGEOUT);
	case kind::cold:
		return !madvise(p, length, MADV_COLD);
	case kind::huge_advice:
		return !madvise(p, length, random_.one_in(2) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	case kind::collapse:
		return !madvise(at(static_cast<unsigned>(r.first / huge_pages * huge_pages)), HUGE_PAGE,
				MADV_COLLAPSE);
	case kind::fork:
		return fork_child(!is_shared_file(c_.kind));
	case kind::dont_fork: {
		const bool kept = !madvise(p, length, MADV_DONTFORK) && fork_child(false);

		return !madvise(p, length, MADV_DOFORK) && kept;
	}
	case kind::others:
		return scribble();
	case kind::clear_refs:
		return clear_soft_dirty();
	case kind::unmergeable:
		return !madvise(p, length, MADV_UNMERGEABLE);
	case kind::move_pages:
		return move_to_other_node(r);
	case kind::soft_offline: {
		const range one = expendable_page();

		return is_expendable(page_map(at(one.first), 1)[0]) &&
		       !madvise(at(one.first), PAGE, MADV_SOFT_OFFLINE);
	}
	case kind::reregister_refused:
		errno = 0;
		if (ibv_rereg_mr(mr_.get(), IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0,
				 NP_RIGHTS | NP_UNPINNED) &&
		    (errno == EOPNOTSUPP || c_.owner_is_gone))
			return true;
		fail(c_, fmt::format("ibv_rereg_mr: {}", std::strerror(errno)));
	case kind::lock:
		if (mlock(p, length))
			return false;
		pause();
		return !munlock(p, length);
	case kind::sync:
		return !msync(p, length, random_.one_in(2) ? MS_SYNC : MS_ASYNC);
	case kind::prefetch:
		return advise(r, IBV_ADVISE_MR_ADVICE_PREFETCH);
	case kind::prefetch_write:
		return advise(r, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE);
	case kind::prefetch_no_fault:
		return advise(r, IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT);
	default:
		fail(c_, fmt::format("'{}' is nothing that is not noticed",
				     kind_names[static_cast<unsigned>(k)]));
	}
}

/* --- what they may notice ----------------------------------------------------------------------- */

void owner::move(std::uint8_t *from, std::uint8_t *to)
{
	if (mremap(from, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) != to)
		fail(c_, fmt::format("mremap: {}", std::strerror(errno)));
}

/*
 * Nobody answers: what is missing, or protected, stays so until it is unregistered. But what
 * KSM merges loses the protection of userfaultfd, for the owner as well.
 */
bool owner::userfault(range r, bool missing)
{
	if (!missing && madvise(at(r.first), r.pages * PAGE, MADV_UNMERGEABLE))
		return false;

	const int fd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
	uffdio_api api{.api = UFFD_API, .features = missing ? 0ULL : UFFD_FEATURE_PAGEFAULT_FLAG_WP};
	uffdio_range range{.start = reinterpret_cast<std::uintptr_t>(at(r.first)), .len = r.pages * PAGE};
	uffdio_register reg{.range = range,
			    .mode = missing ? UFFDIO_REGISTER_MODE_MISSING : UFFDIO_REGISTER_MODE_WP};
	uffdio_writeprotect wp{.range = range, .mode = UFFDIO_WRITEPROTECT_MODE_WP};

	if (fd < 0 || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &reg) ||
	    (missing ? madvise(at(r.first), range.len, MADV_DONTNEED) : ioctl(fd, UFFDIO_WRITEPROTECT, &wp)))
		fail(c_, fmt::format("userfaultfd: {}", std::strerror(errno)));
	let_probe(r, missing ? state::gone : state::read_only);
	if (ioctl(fd, UFFDIO_UNREGISTER, &range))
		fail(c_, fmt::format("userfaultfd: {}", std::strerror(errno)));
	close(fd);
	return true;
}

/* Becomes another program, with all file descriptors or without those of verbs. */
void owner::become_another()
{
	if (random_.one_in(2))
		for (int fd = 3; fd < 256; fd++)
			fcntl(fd, F_SETFD, 0);
	execlp("sleep", "sleep", "infinity", nullptr);
	fail(c_, fmt::format("exec: {}", std::strerror(errno)));
}

/*
 * A thread that ends when frozen_directory is not frozen any more, and not before: who opens
 * a file there to write that is there already and has been looked up does not wait.
 */
void owner::get_stuck()
{
	std::thread([this] {
		const std::string path = fmt::format("{}/{}", frozen_directory, c_.seed);

		prctl(PR_SET_NAME, stuck_thread);
		close(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
	}).detach();
	c_.hang = false;
}

range owner::range_of(kind k)
{
	return k == kind::mergeable     ? many_pages()
	       : k == kind::poison_page ? expendable_page()
	       : k == kind::truncate    ? last_pages()
					: some_pages();
}

/* True if it happened. The kernel refuses none of it for a reason of ours, but poison. */
bool owner::lossy_event(kind k, range r)
{
	std::uint8_t *p = at(r.first);
	const std::size_t length = r.pages * PAGE;
	const bool file = file_ >= 0;
	bool emptied = false, happened = true, alike = false;
	int error = 0;
	const auto check = [&] {
		if (error)
			fail(c_, fmt::format("{}: {}", kind_names[static_cast<unsigned>(k)],
					     std::strerror(errno)));
	};

	if (!take(r)) {
		give_back(r);
		return false;
	}
	errno = 0;
	switch (k) {
	case kind::drop: /* Emptied, if it is private */
		error = madvise(p, length, MADV_DONTNEED);
		emptied = !file;
		break;
	case kind::unmap:
		error = munmap(p, length);
		emptied = !file;
		check();
		let_probe(r, gone);
		map_at(p, length);
		break;
	case kind::map_over: /* Another mapping in its place */
		map_at(p, length);
		emptied = !file;
		break;
	case kind::remap: {
		auto *away = static_cast<std::uint8_t *>(
		    mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));

		/* Not several mappings at once, which the range may be. */
		for (unsigned i = 0; i < r.pages; i++)
			move(p + i * PAGE, away + i * PAGE);
		let_probe(r, gone);
		for (unsigned i = 0; i < r.pages; i++)
			move(away + i * PAGE, p + i * PAGE);
		munmap(away, length);
		break;
	}
	case kind::protect_all:
		error = mprotect(p, length, PROT_NONE);
		check();
		let_probe(r, gone);
		error = mprotect(p, length, PROT_READ | PROT_WRITE);
		break;
	case kind::protect_write:
		error = mprotect(p, length, PROT_READ);
		check();
		let_probe(r, read_only);
		error = mprotect(p, length, PROT_READ | PROT_WRITE);
		break;
	case kind::map_read_only:
		map_at(p, length, PROT_READ);
		let_probe(r, read_only);
		map_at(p, length);
		break;
	case kind::truncate: /* From there to its end */
		error = ftruncate(file_, p - data_);
		emptied = true;
		check();
		/*
		 * A huge page of tmpfs in which something is pinned cannot be split where the file
		 * ends now, and then is mapped as before, for the owner as well.
		 */
		let_probe(r, c_.kind == memory::memfd && r.pages < huge_pages ? lossy : gone);
		error = ftruncate(file_, region_bytes);
		break;
	case kind::userfault_missing:
	case kind::userfault_protected:
		happened = userfault(r, k == kind::userfault_missing);
		emptied = k == kind::userfault_missing;
		break;
	case kind::free_lazily:
		error = madvise(p, length, MADV_FREE);
		break;
	case kind::mergeable: /* And there will be something to merge */
		error = madvise(p, length, MADV_MERGEABLE);
		alike = true;
		break;
	case kind::punch_hole:
		error = fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, p - data_,
				  static_cast<off_t>(length));
		emptied = true;
		break;
	case kind::poison_page:
		/*
		 * What KSM has merged, or would merge just now, would be lost for all who share it.
		 * EAGAIN and EINTR say that KSM may still have it: then nothing is done. Nor does it
		 * become part of a huge page between the look and MADV_HWPOISON, of which an error
		 * says that somebody has a reference: the page may be poisoned all the same, and then
		 * is of no use.
		 */
		happened = !madvise(p, PAGE, MADV_UNMERGEABLE);
		if (!happened && errno != EAGAIN && errno != EINTR)
			fail(c_, fmt::format("MADV_UNMERGEABLE: {}", std::strerror(errno)));
		madvise(p, PAGE, MADV_NOHUGEPAGE);
		errno = 0;
		poisons = true;
		happened = happened && is_expendable(page_map(p, 1)[0]) && !madvise(p, PAGE, MADV_HWPOISON);
		poisons = false;
		if (!happened && errno != EBUSY && errno != EIO && errno != EHWPOISON && errno)
			fail(c_, fmt::format("MADV_HWPOISON: {}", std::strerror(errno)));
		/* What swap still has a copy of the kernel brings back from there, for the owner as well. */
		if (happened && madvise(p, PAGE, MADV_POPULATE_READ) && errno == EHWPOISON)
			let_probe(r, gone);
		else if (happened)
			let_probe(r, lossy);
		map_at(p, PAGE);
		emptied = true;
		break;
	default:
		fail(c_, fmt::format("'{}' is nothing that may be noticed",
				     kind_names[static_cast<unsigned>(k)]));
	}
	check();
	await_no_hold();
	if (emptied)
		empty(r);
	pause();
	give_back(r, alike);
	return happened;
}

bool owner::reregister()
{
	const range all = {0, region_pages};

	const bool taken = take(all);

	if (taken) {
		note_region();
		const std::uint64_t leased = shown().leased, begin = np_now_ms();

		if (int error = npr_dereg_mr(mr_.release()))
			fail(c_, fmt::format("npr_dereg_mr: {}", std::strerror(error)));
		/* It waits for leases, for a bounded time (I11). */
		if (np_now_ms() > begin + NP_WAIT_MS)
			fail(c_, fmt::format("npr_dereg_mr of {} leased pages takes {} ms", leased,
					     np_now_ms() - begin));
		c_.count->note(kind::recall_gone, leased != 0);
		pause();
		mr_ = nprdma::detail::own(npr_reg_mr(device_.pd.get(), data_, region_bytes, NP_RIGHTS),
					  "npr_reg_mr");
		c_.rkey = mr_->rkey;
		seen_ = {};
	}
	give_back(all);
	return taken;
}

/*
 * The peer is going to be stopped with leases. Until it is, nothing else begins here: an event would take the
 * leases, or wait for them.
 */
void owner::obey()
{
	if (c_.wanted == order::nothing)
		return;
	for (c_.waits = true; !c_.go && !over(); np_pause()) {
		receive();
		serve_probe();
	}
	c_.waits = false;
	switch (c_.wanted) {
	case order::nothing:
		break;
	case order::drop:
		c_.count->note(kind::drop, lossy_event(kind::drop, {0, region_pages}));
		break;
	case order::reregister:
		c_.count->note(kind::reregister, reregister());
		break;
	}
	note_region();
	c_.go = false;
	c_.wanted = order::nothing;
}

/* What happened to pages that peers had. */
void owner::note_region()
{
	npr_mr_attr now{};

	if (npr_query_mr(mr_.get(), &now))
		return; /* the device is gone */
	c_.count->add(kind::page_lost, now.pages_invalidated - seen_.pages_invalidated);
	c_.count->add(kind::page_faulted,
		      now.faults_minor + now.faults_major - seen_.faults_minor - seen_.faults_major);
	c_.count->add(kind::page_read_back, now.faults_major - seen_.faults_major);
	c_.count->add(kind::page_held, now.holds - seen_.holds);
	seen_ = now;
}

void owner::event()
{
	const bool kept = random_.below(10) < 7;
	const kind k = (kept ? kept_ : lossy_).draw(random_);

	c_.doing = static_cast<std::uint32_t>(k);
	c_.count->tried(k);
	c_.count->done(k, kept                    ? kept_event(k)
			  : k == kind::reregister ? reregister()
						  : lossy_event(k, range_of(k)));
	note_region();
}

int owner::run()
{
	while (!c_.stop && !c_.owner_is_gone) {
		if (!offer())
			continue;
		while (!over()) {
			event();
			if (c_.exec)
				become_another();
			if (c_.hang)
				get_stuck();
			obey();
			pause();
		}
		/* The peer drains its queue, and may need us for that. */
		for (deadline end; c_.stop && !c_.peer_done && !c_.peer_is_gone && !c_.owner_is_gone;) {
			if (end.over())
				fail(c_, "the peer does not end");
			receive();
			serve_probe();
		}
	}
	if (c_.owner_is_gone)
		return disconnected;
	if (!c_.peer_is_gone) {
		check_all_arrived(main_);
		check_all_arrived(side_);
		compare();
	}
	return done;
}

} // namespace

int run_owner(cell &c)
{
	if (c.group[0]) {
		int fd = open(fmt::format("{}/cgroup.procs", c.group).c_str(), O_WRONLY | O_CLOEXEC);

		if (fd < 0 || write(fd, "0", 1) != 1)
			fail(c, fmt::format("control group {}: {}", c.group, std::strerror(errno)));
		close(fd);
	}
	me = &c;
	struct sigaction action = {};
	action.sa_sigaction = [](int, siginfo_t *info, void *) {
		/* Or it would try again for ever. */
		if (is_child)
			_exit(0);
		/* MADV_HWPOISON tells who does it; anything else is a bug, here or there. */
		if (info->si_code != BUS_MCEERR_AR || !poisons)
			fail(*me, fmt::format("SIGBUS, code {}, at byte {} of the region", info->si_code,
					      reinterpret_cast<std::uintptr_t>(info->si_addr) - me->base));
	};
	action.sa_flags = SA_SIGINFO;
	sigaction(SIGBUS, &action, nullptr);
	try {
		return owner(c).run();
	} catch (const std::exception &e) {
		if (c.owner_is_gone)
			return disconnected;
		fail(c, fmt::format("owner: {}", e.what()));
	}
}

} // namespace soak
