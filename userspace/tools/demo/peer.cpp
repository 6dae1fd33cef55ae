// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The demo's peer: fills the responder's region by RDMA WRITE, and reads it back
 * by RDMA READ in random order. It checks each page that it has read and writes
 * the next version of it, for the responder's CPU to check. Its verbs go through libnprdma, which sees the
 * faults; with plain_verbs it posts to the provider itself, as a control on pinned memory.
 *
 * Started by nprdma-demo, which passes the shared state and a socket to the
 * responder.
 */
#include "messages.hpp"
#include "page.hpp"
#include "rc.hpp"
#include "shared.hpp"

#include <nprdma/nprdma.hpp>
#include <sys/prctl.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace
{

using namespace demo;

/* Posts and polls, either way. */
class initiator
{
public:
	initiator(const rc::endpoint &end, const std::vector<rc::handle<ibv_qp>> &qps, bool plain)
	    : end_(end), qps_(qps)
	{
		if (plain)
			return;
		/* Operations under way never overlap: each has its pages locked in the ledger. */
		npr_qp_attr relaxed{};

		relaxed.flags = NPR_QP_RELAXED_ORDER;
		context_.emplace(*end.context, NPR_OPEN_SINGLE_THREADED);
		cq_.emplace(context_->attach(*end.cq));
		for (const auto &qp : qps)
			attached_.push_back(cq_->attach(*qp, relaxed));
	}

	void post(std::size_t qp, ibv_send_wr &wr)
	{
		ibv_send_wr *bad = nullptr;
		const int error =
		    cq_ ? -attached_[qp].post_send(wr, bad) : ibv_post_send(qps_[qp].get(), &wr, &bad);

		if (error)
			rc::fail(error, "post");
	}

	/* Advice: who does not get it pays with a fault. */
	void prefetch(std::size_t qp, std::uint32_t rkey, std::uint64_t addr, std::uint64_t length) noexcept
	{
		if (cq_)
			(void)attached_[qp].prefetch(rkey, addr, length, IBV_ACCESS_REMOTE_WRITE);
	}

	/* At least one completion: after some polling in vain, by an event. */
	std::span<ibv_wc> wait(std::span<ibv_wc> wc)
	{
		for (int spins = 0; spins < 200; spins++)
			if (const int n = poll(wc))
				return wc.first(static_cast<std::size_t>(n));
		for (;;) {
			notify();
			if (const int n = poll(wc))
				return wc.first(static_cast<std::size_t>(n));
			sleep();
			if (const int n = poll(wc))
				return wc.first(static_cast<std::size_t>(n));
		}
	}

	[[nodiscard]] npr_stats stats() const noexcept
	{
		npr_stats sum{};

		for (const auto &qp : attached_) {
			const npr_stats one = qp.stats();

			sum.suspicious_pages += one.suspicious_pages;
			sum.false_suspicions += one.false_suspicions;
			sum.repeated_pages += one.repeated_pages;
			sum.faults += one.faults;
			sum.busy += one.busy;
			sum.holds += one.holds;
		}
		return sum;
	}

private:
	int poll(std::span<ibv_wc> wc)
	{
		const int n =
		    cq_ ? cq_->poll(wc) : ibv_poll_cq(end_.cq.get(), static_cast<int>(wc.size()), wc.data());

		if (n < 0)
			rc::fail(cq_ ? -n : EIO, "poll");
		return n;
	}

	void notify()
	{
		const int error = cq_ ? -cq_->req_notify() : ibv_req_notify_cq(end_.cq.get(), 0);

		if (error)
			rc::fail(error, "arm the completion queue");
	}

	void sleep()
	{
		if (cq_) {
			if (const int n = cq_->wait(); n < 0)
				rc::fail(-n, "wait for a completion");
			return;
		}
		ibv_cq *cq;
		void *unused;

		if (ibv_get_cq_event(end_.channel.get(), &cq, &unused))
			rc::fail(errno, "wait for a completion");
		ibv_ack_cq_events(cq, 1);
	}

	const rc::endpoint &end_;
	const std::vector<rc::handle<ibv_qp>> &qps_;
	std::optional<nprdma::context> context_;
	std::optional<nprdma::cq> cq_;
	std::vector<nprdma::qp> attached_;
};

/* Each writes all pages once. */
struct pass {
	phase name;
	bool read; /* first */
	bool random;
};

class peer
{
public:
	peer(shared &common, int responder)
	    : common_(common),
	      opt_(common->opt),
	      responder_(responder),
	      slots_(opt_.qps * opt_.window),
	      buffer_(slots_.size() * opt_.block * page_words),
	      end_(opt_.peer_device, static_cast<int>(opt_.qps * sq_entries * 2)),
	      mr_(end_.register_memory(buffer_.data(), buffer_.size() * sizeof(buffer_[0]),
				       IBV_ACCESS_LOCAL_WRITE))
	{
		for (std::uint64_t i = 0; i < opt_.qps; i++)
			qps_.push_back(end_.create_qp(sq_entries));
		rc::receive_all(responder, &region_, 1);
		rc::connect_all(responder, qps_);
		if (region_.bytes != opt_.bytes)
			throw std::runtime_error("the region has another size");
		wire_.emplace(end_, qps_, opt_.plain_verbs);
		common_->peer_pid.set(static_cast<std::uint64_t>(getpid()));
	}

	void run()
	{
		do_pass({phase::fill, false, false});
		ask(request::settle, phase::settle);
		do_pass({phase::read_back, true, true});
		ask(request::finish, phase::final_check);
		common_.enter(phase::done);
	}

private:
	static constexpr std::uint32_t sq_entries = 128;

	/* One operation on a block of pages, from the lock to the unlock. */
	struct slot {
		std::uint32_t first = 0, count = 0;
		bool writing = false;
		std::vector<std::uint32_t> versions;
	};

	page_data page(std::size_t slot, std::size_t i)
	{
		return page_data(&buffer_[(slot * opt_.block + i) * page_words], page_words);
	}

	void ask(request what, phase name)
	{
		common_.enter(name);
		rc::send_all(responder_, &what, 1);
		rc::receive_all(responder_, &what, 1);
	}

	/* All pages of the block or none: the responder's CPU may be at one of them. */
	bool lock(slot &s)
	{
		s.versions.clear();
		for (std::uint32_t i = 0; i < s.count; i++) {
			if (const auto version = common_.pages().try_lock(s.first + i)) {
				s.versions.push_back(*version);
				continue;
			}
			unlock(s);
			return false;
		}
		return true;
	}

	void unlock(const slot &s)
	{
		for (std::uint32_t i = 0; i < s.versions.size(); i++)
			common_.pages().unlock(s.first + i, s.versions[i]);
	}

	void post(std::size_t nr, ibv_wr_opcode opcode)
	{
		const slot &s = slots_[nr];
		ibv_sge sge = {.addr = reinterpret_cast<std::uintptr_t>(page(nr, 0).data()),
			       .length = static_cast<std::uint32_t>(s.count * page_size),
			       .lkey = mr_->lkey};
		ibv_send_wr wr{};

		wr.wr_id = nr;
		wr.sg_list = &sge;
		wr.num_sge = 1;
		wr.opcode = opcode;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.wr.rdma.remote_addr = region_.addr + s.first * page_size;
		wr.wr.rdma.rkey = region_.rkey;
		wire_->post(nr % opt_.qps, wr);
	}

	void prefetch(std::uint32_t block)
	{
		wire_->prefetch(block % opt_.qps, region_.rkey, region_.addr + block * opt_.block * page_size,
				opt_.block * page_size);
	}

	/* Returns false if no WRITE had to be posted, because it is to get lost. */
	bool post_write(std::size_t nr)
	{
		slot &s = slots_[nr];

		s.writing = true;
		for (std::uint32_t i = 0; i < s.count; i++)
			write_page(page(nr, i), s.first + i, ++s.versions[i], writer::peer);
		if (opt_.fault == inject::lost_write && common_->now == phase::read_back &&
		    !common_->injected.get()) {
			common_->injected.add();
			return false;
		}
		post(nr, IBV_WR_RDMA_WRITE);
		return true;
	}

	/* Returns false if the block is done with. */
	bool begin(std::size_t nr, const pass &p)
	{
		slots_[nr].writing = false;
		if (!p.read)
			return post_write(nr);
		post(nr, IBV_WR_RDMA_READ);
		return true;
	}

	void check(std::size_t nr)
	{
		const slot &s = slots_[nr];

		if (opt_.fault == inject::stale_read && common_->now == phase::read_back &&
		    !common_->injected.get()) {
			common_->injected.add();
			write_page(page(nr, 0), s.first, s.versions[0] - 1, writer::peer);
		}
		for (std::uint32_t i = 0; i < s.count; i++) {
			const verdict v = check_page(page(nr, i), s.first + i, s.versions[i]);

			if (v != verdict::good)
				common_.mismatch("peer", s.first + i, s.versions[i], v, page(nr, i));
		}
	}

	/* After a completion. Returns false if the block is done with. */
	bool proceed(std::size_t nr)
	{
		const slot &s = slots_[nr];

		if (s.writing) {
			common_->writes.add();
			common_->pages_written.add(s.count);
			return false;
		}
		common_->reads.add();
		common_->pages_read.add(s.count);
		check(nr);
		return post_write(nr);
	}

	void publish() noexcept
	{
		const npr_stats now = wire_->stats();

		common_->suspicious.set(now.suspicious_pages);
		common_->false_suspicions.set(now.false_suspicions);
		common_->repeated.set(now.repeated_pages);
		common_->fault_requests.set(now.faults);
		common_->busy.set(now.busy);
		common_->holds.set(now.holds);
	}

	/* Goes over all pages once, with as many operations under way as there are slots. */
	void do_pass(const pass &p)
	{
		const auto block = static_cast<std::uint32_t>(opt_.block);
		const std::uint32_t pages = common_.page_count();
		std::deque<std::uint32_t> todo((pages + block - 1) / block);
		std::vector<std::size_t> idle(slots_.size());
		std::vector<ibv_wc> wc(64);

		common_.enter(p.name);
		std::iota(todo.begin(), todo.end(), 0U);
		if (p.random) {
			random_source random(opt_.seed + static_cast<std::uint64_t>(p.name));

			for (auto i = static_cast<std::uint32_t>(todo.size()); i > 1; i--)
				std::swap(todo[i - 1], todo[random.below(i)]);
		}
		std::iota(idle.begin(), idle.end(), std::size_t{0});
		while (!todo.empty() || idle.size() < slots_.size()) {
			/* Each block that waits gets one try, then completions have a turn. */
			for (std::size_t tries = todo.size(); tries && !idle.empty(); tries--) {
				const std::size_t nr = idle.back();
				slot &s = slots_[nr];

				s.first = todo.front() * block;
				s.count = std::min(block, pages - s.first);
				todo.pop_front();
				if (!lock(s)) {
					todo.push_back(s.first / block);
					continue;
				}
				idle.pop_back();
				/* What will be read and then written should not fault twice. */
				if (opt_.prefetch && p.read && todo.size() > slots_.size())
					prefetch(todo[slots_.size()]);
				if (!begin(nr, p))
					finish(nr, idle);
			}
			if (idle.size() == slots_.size())
				continue;
			for (const ibv_wc &c : wire_->wait(wc)) {
				if (c.status != IBV_WC_SUCCESS)
					throw std::runtime_error(std::string("an operation failed: ") +
								 ibv_wc_status_str(c.status));
				if (!proceed(c.wr_id))
					finish(c.wr_id, idle);
			}
			publish();
		}
	}

	void finish(std::size_t nr, std::vector<std::size_t> &idle)
	{
		unlock(slots_[nr]);
		common_->progress.add(slots_[nr].count);
		idle.push_back(nr);
	}

	shared &common_;
	const options &opt_;
	int responder_;
	std::vector<slot> slots_;
	std::vector<std::uint64_t> buffer_;
	rc::endpoint end_;
	rc::handle<ibv_mr> mr_;
	std::vector<rc::handle<ibv_qp>> qps_;
	announcement region_{};
	std::optional<initiator> wire_;
};

} // namespace

int main(int argc, char **argv)
{
	if (argc != 3) {
		std::fprintf(stderr, "%s is started by nprdma-demo\n", argv[0]);
		return 64;
	}
	try {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		shared common(std::atoi(argv[1]));
		peer(common, std::atoi(argv[2])).run();
		return 0;
	} catch (const std::exception &e) {
		std::fprintf(stderr, "peer: %s\n", e.what());
		return 1;
	}
}
