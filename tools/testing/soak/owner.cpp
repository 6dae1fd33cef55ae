// SPDX-License-Identifier: GPL-2.0
/*
 * The owner of a cell: registers a region without pinning it, receives what its peer sends
 * into unpinned memory, and changes all this memory in each way it knows, at random.
 */
#include "verbs.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <ctime>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <fmt/format.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_HWPOISON
#define MADV_HWPOISON 100
#endif

namespace soak
{

namespace
{

constexpr std::size_t huge_pages = HUGE_PAGE / PAGE;

struct range {
	unsigned first, pages;
};

class owner
{
public:
	explicit owner(cell &c)
	    : c_(c), random_(c.seed * 2 + 1), device_(NP_OWNER_DEV), data_(map()),
	      inbox_(static_cast<std::uint8_t *>(np_map(messages * message_bytes)))
	{
		if (!inbox_)
			fail(c_, "no memory for messages");
		for (unsigned i = 0; i < region_pages; i++)
			refill(i, 0);
		c_.base = reinterpret_cast<std::uintptr_t>(data_);
		mr_ = nprdma::detail::own(npr_reg_mr(device_.pd.get(), data_, region_bytes, NP_RIGHTS),
					  "npr_reg_mr");
		c_.rkey = mr_->rkey;
		inbox_mr_ = nprdma::detail::own(npr_reg_mr(device_.pd.get(), inbox_, messages * message_bytes,
							   IBV_ACCESS_LOCAL_WRITE),
						"npr_reg_mr");
	}

	int run();

private:
	[[nodiscard]] std::uint8_t *at(unsigned page) const { return data_ + page * PAGE; }

	std::uint8_t *map();
	void map_at(std::uint8_t *p, std::size_t length);

	/* Sessions and messages */
	bool offer();
	bool meet();
	void serve_probe();
	void post_receive(unsigned slot);
	void receive();
	void check_message(const ibv_wc &wc);

	/* Memory */
	void refill(unsigned page, unsigned epoch);
	range some_pages();
	bool take(range r);
	void empty(range r);
	void give_back(range r);
	/* Nobody answers any more, */
	bool broken() const { return c_.peer_is_gone || c_.owner_is_gone; }
	/* or all comes to its end, in which the peer still has to finish what it began. */
	bool gone() const { return c_.stop || broken(); }
	void event();
	void kept_event();
	void lossy_event();
	void move(std::uint8_t *from, std::uint8_t *to);
	void reregister();
	void fork_child(bool touch);
	void scribble();
	void clear_soft_dirty();
	void pause();
	void compare();

	cell &c_;
	random_source random_;
	device device_;
	int file_ = -1; /* before map() */
	std::uint8_t *data_;
	std::uint8_t *inbox_;
	nprdma::detail::handle<ibv_mr> mr_, inbox_mr_;
	std::unique_ptr<connection> main_, probe_;
	std::uint32_t session_ = 0;
	std::uint64_t received_ = 0;
	bool node_ = false;
	std::vector<pid_t> children_;
};

/* --- memory of each kind ------------------------------------------------------------------ */

void owner::map_at(std::uint8_t *p, std::size_t length)
{
	const bool file = file_ >= 0;
	void *got = mmap(p, length, PROT_READ | PROT_WRITE,
			 (file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS) | MAP_FIXED, file_,
			 file ? p - data_ : 0);

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
		file_ = open(fmt::format("/tmp/soak/{}/{}", name_of(c_.kind), c_.number).c_str(),
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

void owner::refill(unsigned page, unsigned epoch)
{
	std::uint8_t *shadow = c_.shadow + page * PAGE;

	for (std::size_t i = 0; i < PAGE;) {
		std::uint64_t bits = random_.word();

		for (int k = 0; k < 8; k++, i++, bits >>= 3)
			shadow[i] = tag(c_.number, epoch, static_cast<unsigned>(bits));
	}
	std::memcpy(at(page), shadow, PAGE);
}

/* In the CPU's eyes the region is what the model says; nobody uses it now. */
void owner::compare()
{
	for (unsigned i = 0; i < region_pages; i++) {
		if (c_.page[i].step % steps != there || !std::memcmp(at(i), c_.shadow + i * PAGE, PAGE))
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
	main_.reset();
	probe_.reset();
	for (auto &p : c_.page) {
		p.main_users = 0;
		p.probe_writers = 0;
	}
	/* Nobody can tell what of a dead peer's requests was done. */
	for (unsigned i = 0; session_ && i < region_pages; i++) {
		refill(i, ++c_.page[i].newest);
		c_.page[i].oldest = c_.page[i].newest.load();
	}
	received_ = 0;
	c_.credits = 0;
	main_ = std::make_unique<connection>(device_, window, messages);
	probe_ = std::make_unique<connection>(device_, 4, 1);
	c_.owner_main = main_->address(device_);
	c_.owner_probe = probe_->address(device_);
	c_.probe_wanted = c_.probe_made = 0;
	c_.count.sessions++;
	c_.peer_is_gone = false;
	c_.owner_session = ++session_;
	return meet();
}

bool owner::meet()
{
	for (deadline end; c_.peer_session != session_;) {
		if (gone())
			return false;
		if (end.over())
			fail(c_, "no peer came");
		np_pause();
	}
	main_->attach(device_, c_.peer_main, 0);
	if (int error = np_qp_connect(probe_->verbs_qp.get(), c_.peer_probe))
		fail(c_, fmt::format("connecting the probe: {}", std::strerror(-error)));
	for (unsigned i = 0; i < messages; i++)
		post_receive(i);
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
	c_.probe_made++;
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
	int error = main_->qp->post_recv(wr, bad);
	/* The mapping changes all the time, or is being paged out: that is for us to repeat. */
	for (deadline end; error == -EAGAIN && !end.over();)
		error = main_->qp->post_recv(wr, bad);
	if (error && !c_.owner_is_gone)
		fail(c_, fmt::format("npr_post_recv: {}", std::strerror(-error)));
	c_.credits++;
}

void owner::check_message(const ibv_wc &wc)
{
	const message &m = c_.sent[received_ % std::size(c_.sent)];
	const std::uint8_t *p = inbox_ + wc.wr_id * message_bytes;

	if (wc.wr_id != received_ % messages || wc.opcode != m.opcode || wc.byte_len != m.length ||
	    !!(wc.wc_flags & IBV_WC_WITH_IMM) != m.has_imm || (m.has_imm && wc.imm_data != m.imm))
		fail(c_, fmt::format("message {}: slot {}, opcode {}, {} bytes, immediate {:#x}, flags {:#x}; "
				     "not opcode {}, {} bytes, immediate {:#x}",
				     received_, wc.wr_id, static_cast<int>(wc.opcode), wc.byte_len, wc.imm_data,
				     wc.wc_flags, m.opcode, m.length, m.imm));
	if (wc.opcode == IBV_WC_RECV) {
		random_source content(m.seed);

		for (std::uint32_t i = 0; i < m.length; i++)
			if (p[i] != static_cast<std::uint8_t>(content.word()))
				fail(c_, fmt::format("message {} of {} bytes differs at {}", received_, m.length, i));
	}
	received_++;
	c_.count.received++;
}

void owner::receive()
{
	ibv_wc wc[8];
	const int n = main_->cq->poll(wc);

	if (n < 0 && !c_.owner_is_gone)
		fail(c_, fmt::format("npr_poll_cq: {}", std::strerror(-n)));
	for (int i = 0; i < n; i++) {
		if (wc[i].status == IBV_WC_WR_FLUSH_ERR && gone())
			continue;
		if (wc[i].status != IBV_WC_SUCCESS && c_.owner_is_gone)
			continue;
		if (wc[i].status != IBV_WC_SUCCESS)
			fail(c_, fmt::format("receive {}: {}", received_, ibv_wc_status_str(wc[i].status)));
		check_message(wc[i]);
		post_receive(static_cast<unsigned>(wc[i].wr_id));
	}
}

/* --- taking pages away, and giving them back ------------------------------------------------- */

range owner::some_pages()
{
	if (c_.kind == memory::hugetlb || (c_.kind == memory::huge_pages && random_.one_in(3)))
		return {static_cast<unsigned>(huge_pages * random_.below(region_pages / huge_pages)), huge_pages};
	const auto n = static_cast<unsigned>(random_.between(1, random_.one_in(8) ? 64 : 8));

	return {static_cast<unsigned>(random_.below(region_pages - n + 1)), n};
}

/*
 * From there to lossy; false: everything ends. While our device goes the peer still is at
 * work on what it began: then they stay as they are.
 */
bool owner::take(range r)
{
	deadline end;

	for (unsigned i = r.first; i < r.first + r.pages; i++) {
		c_.page[i].newest++;
		c_.page[i].step++;
	}
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
	for (unsigned i = r.first; i < r.first + r.pages; i++)
		c_.page[i].step++;
	return !gone();
}

/* What was in these pages cannot be read any more. */
void owner::empty(range r)
{
	for (unsigned i = r.first; i < r.first + r.pages; i++)
		c_.page[i].oldest = c_.page[i].newest.load();
}

void owner::give_back(range r)
{
	deadline end;

	if (c_.owner_is_gone)
		return;
	for (unsigned i = r.first; i < r.first + r.pages; i++)
		c_.page[i].step++;
	for (unsigned i = r.first; i < r.first + r.pages; i++) {
		while (c_.page[i].probe_writers && !broken()) {
			if (end.over())
				fail(c_, fmt::format("a WRITE of the probe to page {} does not end", i));
			receive();
			serve_probe();
		}
		if (c_.owner_is_gone)
			return;
		refill(i, c_.page[i].newest);
		c_.page[i].oldest = c_.page[i].newest.load();
		c_.page[i].step++;
	}
}

/* So that others meet what was done; nothing depends on how long it is. */
void owner::pause()
{
	const std::uint64_t until = np_now_ms() + random_.below(8);

	do {
		receive();
		serve_probe();
	} while (np_now_ms() < until && !gone());
}

/* --- what peers do not notice ----------------------------------------------------------------- */

void owner::fork_child(bool touch)
{
	const auto life = static_cast<long>(random_.below(20));
	const std::uint64_t seed = random_.word();
	const pid_t pid = fork();

	if (pid < 0)
		return;
	if (!pid) {
		random_source random(seed);
		const timespec t = {0, life * 1000000};

		/* What is private is a copy, and nobody sees what becomes of it. */
		for (int i = 0; i < 64 && touch; i++)
			std::memset(at(static_cast<unsigned>(random.below(region_pages))), tag(poison, 0, 5), 64);
		nanosleep(&t, nullptr);
		_exit(0);
	}
	children_.push_back(pid);
	if (random_.one_in(2) || children_.size() > 4) {
		for (pid_t p : children_)
			waitpid(p, nullptr, 0);
		children_.clear();
	}
}

/* Memory of others, full of what no region contains, comes and goes. */
void owner::scribble()
{
	const std::size_t length = PAGE * random_.between(1, 512);
	void *p = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		return;
	std::memset(p, tag(poison, 0, 2), length);
	munmap(p, length);
}

void owner::clear_soft_dirty()
{
	int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return;
	if (write(fd, random_.one_in(2) ? "1" : "4", 1) != 1)
		errno = 0; /* not configured */
	close(fd);
}

void owner::kept_event()
{
	const range r = some_pages();
	std::uint8_t *p = at(r.first);
	const std::size_t length = r.pages * PAGE;

	c_.count.kept_events++;
	switch (random_.below(16)) {
	case 0:
	case 1:
	case 2:
		madvise(p, length, MADV_PAGEOUT);
		break;
	case 3:
		madvise(data_, region_bytes, MADV_PAGEOUT);
		break;
	case 4:
		madvise(inbox_, messages * message_bytes, MADV_PAGEOUT);
		break;
	case 5:
		madvise(p, length, MADV_COLD);
		break;
	case 6:
		madvise(p, length, random_.one_in(2) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
		break;
	case 7:
		madvise(at(r.first / huge_pages * huge_pages), HUGE_PAGE, MADV_COLLAPSE);
		break;
	case 8:
		fork_child(!is_shared_file(c_.kind));
		break;
	case 9:
		scribble();
		break;
	case 10:
		clear_soft_dirty();
		break;
	case 11:
		madvise(p, length, random_.one_in(2) ? MADV_MERGEABLE : MADV_UNMERGEABLE);
		break;
	case 12: {
		std::vector<void *> page(r.pages);
		std::vector<int> node(r.pages, node_), status(r.pages);

		node_ = !node_;
		for (unsigned i = 0; i < r.pages; i++)
			page[i] = p + i * PAGE;
		syscall(SYS_move_pages, 0, static_cast<long>(r.pages), page.data(), node.data(), status.data(), 2);
		break;
	}
	case 13:
		if (!mlock(p, length)) {
			pause();
			munlock(p, length);
		}
		break;
	case 14:
		madvise(p, length, MADV_DONTFORK);
		fork_child(false);
		madvise(p, length, MADV_DOFORK);
		break;
	case 15: {
		ibv_sge sge = {reinterpret_cast<std::uintptr_t>(p), static_cast<std::uint32_t>(length), mr_->lkey};
		static constexpr ibv_advise_mr_advice advice[] = {IBV_ADVISE_MR_ADVICE_PREFETCH,
								  IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
								  IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT};

		if (is_shared_file(c_.kind) && random_.one_in(2))
			msync(p, length, random_.one_in(2) ? MS_SYNC : MS_ASYNC);
		else
			ibv_advise_mr(device_.pd.get(), advice[random_.below(3)], IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1);
		break;
	}
	}
}

/* --- what they may notice ----------------------------------------------------------------------- */

void owner::move(std::uint8_t *from, std::uint8_t *to)
{
	if (mremap(from, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) != to)
		fail(c_, fmt::format("mremap: {}", std::strerror(errno)));
}

void owner::lossy_event()
{
	const range r = some_pages();
	std::uint8_t *p = at(r.first);
	const std::size_t length = r.pages * PAGE;
	const bool file = file_ >= 0, huge = c_.kind == memory::hugetlb;
	bool emptied = false;
	int error = 0;

	c_.count.lossy_events++;
	if (!take(r))
		return give_back(r);
	switch (random_.below(8)) {
	case 0: /* Emptied, if it is private */
		error = madvise(p, length, MADV_DONTNEED);
		emptied = !file;
		break;
	case 1:
		error = munmap(p, length);
		emptied = !file;
		pause();
		map_at(p, length);
		break;
	case 2: /* Another mapping in its place */
		map_at(p, length);
		emptied = !file;
		break;
	case 3:
		if (!huge) {
			void *away = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

			/* Not several mappings at once, which the range may be. */
			for (unsigned i = 0; i < r.pages; i++)
				move(p + i * PAGE, static_cast<std::uint8_t *>(away) + i * PAGE);
			pause();
			for (unsigned i = 0; i < r.pages; i++)
				move(static_cast<std::uint8_t *>(away) + i * PAGE, p + i * PAGE);
			munmap(away, length);
		}
		break;
	case 4:
		error = mprotect(p, length, PROT_NONE);
		pause();
		error |= mprotect(p, length, PROT_READ | PROT_WRITE);
		break;
	case 5:
		error = mprotect(p, length, PROT_READ);
		pause();
		error |= mprotect(p, length, PROT_READ | PROT_WRITE);
		break;
	case 6:
		if (file) {
			error = fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, p - data_,
					  static_cast<off_t>(length));
			emptied = true;
		} else {
			error = madvise(p, length, MADV_FREE);
		}
		break;
	case 7:
		/*
		 * Takes a page frame away for good, and its memory block can go offline no more,
		 * so seldom. These errors say that somebody has a reference, or that a huge page
		 * was not split: the page may be poisoned all the same, and then is of no use.
		 */
		if (!file && random_.one_in(500)) {
			if (madvise(p, PAGE, MADV_HWPOISON) && errno != EBUSY && errno != EIO && errno != EHWPOISON)
				fail(c_, fmt::format("MADV_HWPOISON: {}", std::strerror(errno)));
			pause();
			map_at(p, PAGE);
		}
		break;
	}
	if (error)
		fail(c_, fmt::format("an event: {}", std::strerror(errno)));
	if (emptied)
		empty(r);
	pause();
	give_back(r);
}

void owner::reregister()
{
	const range all = {0, region_pages};

	c_.count.reregistrations++;
	if (take(all)) {
		if (int error = npr_dereg_mr(mr_.release()))
			fail(c_, fmt::format("npr_dereg_mr: {}", std::strerror(error)));
		pause();
		mr_ = nprdma::detail::own(npr_reg_mr(device_.pd.get(), data_, region_bytes, NP_RIGHTS),
					  "npr_reg_mr");
		c_.rkey = mr_->rkey;
	}
	give_back(all);
}

void owner::event()
{
	const std::uint64_t which = random_.below(100);

	if (which < 70)
		kept_event();
	else if (which < 98)
		lossy_event();
	else if (random_.one_in(8))
		reregister();
}

int owner::run()
{
	while (!c_.stop && !c_.owner_is_gone) {
		if (!offer())
			continue;
		while (!gone()) {
			event();
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
	if (!c_.peer_is_gone)
		compare();
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
	struct sigaction action = {};
	action.sa_sigaction = [](int, siginfo_t *info, void *) {
		/* What MADV_HWPOISON sends; anything else is a bug, here or there. */
		if (info->si_code != BUS_MCEERR_AR && info->si_code != BUS_MCEERR_AO)
			_exit(98);
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
