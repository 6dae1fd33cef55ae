// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "session.hpp"

#include "lane.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <type_traits>

namespace perf
{

channel::~channel()
{
	close(fd_);
}

void channel::send(std::span<const std::byte> message) const
{
	rc::send_all(fd_, message.data(), message.size());
}

std::vector<std::byte> channel::receive(kind k, kind other, kind &came) const
{
	std::array<std::byte, head_bytes> bytes;

	rc::receive_all(fd_, bytes.data(), bytes.size());
	const head h = decode_head(bytes);
	std::vector<std::byte> body(h.length);

	rc::receive_all(fd_, body.data(), body.size());
	if (h.what == kind::failure)
		throw std::runtime_error("the other end: " + decode_failure(body).text);
	if (h.what != k && h.what != other)
		throw bad_message(fmt::format("the other end sent message {} where {} was to come",
					      static_cast<int>(h.what), static_cast<int>(k)));
	came = h.what;
	return body;
}

std::vector<std::byte> channel::receive(kind k) const
{
	kind came;

	return receive(k, k, came);
}

namespace
{

/* One end of a session, with its threads. */
class side
{
public:
	side(const test &t, const device_choice &device, bool client) : test_(t)
	{
		const std::uint64_t bytes = memory_plan(t, client).bytes();
		const auto all = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * page_size;

		/* The other end says how much, and whoever listens has not been asked. */
		if (bytes > all / 2)
			throw std::runtime_error(
			    fmt::format("{} MiB of memory are needed, more than half of the "
					"host's: use fewer --threads, a smaller --size or "
					"--span",
					bytes / MiB));
		absent_ = client ? t.local_absent : t.absent;
		const bool squeezed = t.pressure & (client ? at_client : at_target);
		struct sysinfo host {
		};

		sysinfo(&host);
		if (!host.totalswap && (squeezed || absent_) && !t.minor)
			throw std::runtime_error(
			    "there is no swap that memory could go to: add some (swapon), or use "
			    "--absent with --minor");
		squeezed_ = squeezed;
		try {
			if (squeezed || (absent_ && !t.minor && t.unpinned()))
				evictor_.emplace(std::clamp<std::size_t>(bytes / 16, 64 * KiB, 16 * MiB));
		} catch (const std::exception &) {
			/* Else some of what is paged out stays in the swap cache for a while. */
			if (squeezed)
				throw;
		}
		link_.emplace(t, device, client);
	}
	side(const side &) = delete;
	side &operator=(const side &) = delete;

	link &here() { return *link_; }

	void start(const endpoint &theirs, bool client)
	{
		link_->connect(theirs);
		for (unsigned i = 0; i < test_.threads; i++)
			lanes_.push_back(std::make_unique<lane>(*link_, test_, theirs, i, client));
		for (const auto &l : lanes_)
			l->post_receives();
	}

	/* Returns the per cent of memory that are absent. */
	unsigned prepare(const pass &p)
	{
		for (const auto &l : lanes_)
			l->begin(p);
		if (p.prepare) {
			for (const auto &l : lanes_)
				l->reset_memory();
			link_->mem().make_resident();
			if (absent_)
				page_out(p.number);
		}
		for (const auto &l : lanes_)
			l->post_receives();
		const unsigned absent = absent_ && p.prepare ? link_->mem().absent() : 0;

		before_ = link_->counters().value_or(npr_mr_attr{});
		if (squeezed_)
			evictor_->start();
		return absent;
	}

	/* After the pass. */
	void account(result &r)
	{
		const npr_mr_attr now = link_->counters().value_or(npr_mr_attr{});

		if (squeezed_)
			r.reclaimed = evictor_->stop();
		r.faults_minor = now.faults_minor - before_.faults_minor;
		r.faults_major = now.faults_major - before_.faults_major;
		r.invalidations = now.invalidations - before_.invalidations;
		r.holds = now.holds - before_.holds;
	}

	/*
	 * Each lane in a thread of its own. @arrived is called when there is something to read
	 * from @fd. What a thread throws is thrown when all have ended.
	 */
	void run(const std::function<void(lane &)> &part, int fd, const std::function<void()> &arrived)
	{
		const int ended = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
		std::vector<std::exception_ptr> errors(lanes_.size() + 1);
		std::vector<std::thread> threads;

		if (ended < 0)
			rc::fail(errno, "eventfd");
		for (std::size_t i = 0; i < lanes_.size(); i++) {
			lanes_[i]->abort.store(false, std::memory_order_relaxed);
			threads.emplace_back([&, i] {
				const std::uint64_t one = 1;

				try {
					part(*lanes_[i]);
				} catch (const aborted &) {
				} catch (...) {
					errors[i] = std::current_exception();
					abort_all();
				}
				(void)!write(ended, &one, sizeof(one));
			});
		}
		std::size_t running = threads.size();
		bool listen = true;

		while (running) {
			pollfd fds[2] = {{.fd = ended, .events = POLLIN, .revents = 0},
					 {.fd = listen ? fd : -1, .events = POLLIN, .revents = 0}};

			if (::poll(fds, 2, -1) < 0)
				continue;
			if (fds[0].revents) {
				std::uint64_t one;

				(void)!read(ended, &one, sizeof(one));
				running--;
				continue;
			}
			try {
				arrived();
			} catch (...) {
				errors.back() = std::current_exception();
				listen = false;
				abort_all();
			}
		}
		for (std::thread &t : threads)
			t.join();
		close(ended);
		for (const std::exception_ptr &e : errors)
			if (e)
				std::rethrow_exception(e);
	}

	[[nodiscard]] std::vector<std::unique_ptr<lane>> &lanes() noexcept { return lanes_; }
	[[nodiscard]] std::uint64_t mismatches() const noexcept
	{
		std::uint64_t n = 0;

		for (const auto &l : lanes_)
			n += l->mismatches();
		return n;
	}

private:
	void abort_all()
	{
		for (const auto &l : lanes_)
			l->abort.store(true, std::memory_order_relaxed);
	}

	/* What is leased stays until the lease goes back, a while after its last use. */
	void page_out(std::uint64_t seed)
	{
		const std::uint64_t patience = now_ns() + 5'000'000'000;
		const std::uint64_t bytes = link_->mem().all().size();

		for (;;) {
			link_->mem().make_absent(absent_, seed);
			const unsigned absent = link_->mem().absent();

			if (!test_.unpinned() || absent + 3 >= absent_ || now_ns() > patience)
				return;
			/* What has been written to swap meanwhile, which is the first that the kernel finds.
			 */
			if (evictor_)
				evictor_->reclaim(std::max(128 * KiB, bytes * (absent_ - absent) / 400));
			usleep(10'000);
		}
	}

	const test test_;
	unsigned absent_ = 0;
	bool squeezed_ = false;
	std::optional<evictor> evictor_;
	std::optional<link> link_;
	std::vector<std::unique_ptr<lane>> lanes_;
	npr_mr_attr before_{};
};

void tell_failure(const channel &c, const char *text) noexcept
{
	try {
		c.send(encode(failure{text}));
	} catch (const std::exception &) {
		/* it has gone */
	}
}

void serve_session(const channel &c, const device_choice &device)
{
	const test t = decode_test(c.receive(kind::hello));
	side mine(t, device, false);

	c.send(encode(mine.here().self()));
	mine.start(decode_endpoint(c.receive(kind::endpoint), t, true), false);
	c.send(encode(ready{}));
	for (;;) {
		kind came;
		const auto body = c.receive(kind::pass, kind::bye, came);

		if (came == kind::bye)
			return;
		const pass p = decode_pass(body, t);

		c.send(encode(ready{static_cast<std::uint8_t>(mine.prepare(p))}));
		const auto take_done = [&] {
			const done d = decode_done(c.receive(kind::done), t);

			for (std::size_t i = 0; i < mine.lanes().size(); i++)
				mine.lanes()[i]->limit.store(d.operations[i], std::memory_order_release);
		};
		if (mine.lanes()[0]->responds())
			mine.run([](lane &l) { l.respond(); }, c.fd(), take_done);
		else
			take_done();
		result r;

		mine.account(r);
		for (const auto &l : mine.lanes()) {
			l->check_target();
			r.received += l->received();
		}
		r.mismatches = mine.mismatches();
		c.send(encode(r));
	}
}

class client
{
public:
	client(const channel &c, const test &t, const device_choice &device)
	    : c_(c), test_(t), mine_(t, device, true)
	{
		c_.send(encode(t));
		const endpoint theirs = decode_endpoint(c_.receive(kind::endpoint), t, false);

		c_.send(encode(mine_.here().self()));
		mine_.start(theirs, true);
		(void)decode_ready(c_.receive(kind::ready));
	}

	outcome fulfil(const order &o)
	{
		outcome out{};
		pass p{o.size, o.number, true};

		if (o.warm_ns) {
			outcome ignored{};

			(void)one_pass(p, {no_limit, o.warm_ns}, ignored);
			out.mismatches = ignored.mismatches;
			p.prepare = false;
		}
		const std::uint64_t begin = one_pass(
		    p, {o.operations ? o.operations : no_limit, o.duration_ns ? o.duration_ns : no_limit},
		    out);

		if (test_.latency) {
			std::vector<std::uint64_t> all;

			for (const auto &l : mine_.lanes())
				all.insert(all.end(), l->latencies().begin(), l->latencies().end());
			for (const std::uint64_t ns : all)
				out.latencies.add(ns);
			out.latency = summarize(all);
			out.operations = out.latency.count;
		} else {
			std::vector<std::vector<progress>> marks;

			for (const auto &l : mine_.lanes())
				marks.push_back(l->marks());
			out.bandwidth = summarize(marks, begin);
			out.operations = out.bandwidth.count;
		}
		return out;
	}

	void leave() { c_.send(encode_bye()); }

private:
	/* @g.until_ns is a duration. Returns when it began. */
	std::uint64_t one_pass(const pass &p, goal g, outcome &out)
	{
		const npr_stats before = statistics();
		done d;

		c_.send(encode(p));
		out.absent = decode_ready(c_.receive(kind::ready)).absent;
		out.local_absent = mine_.prepare(p);
		const std::uint64_t begin = now_ns();

		if (g.until_ns != no_limit)
			g.until_ns += begin;
		mine_.run([&g](lane &l) { l.measure(g); }, c_.fd(),
			  [this] {
				  (void)c_.receive(kind::failure);
				  throw bad_message("the other end spoke out of turn");
			  });
		for (const auto &l : mine_.lanes())
			d.operations.push_back(l->operations());
		c_.send(encode(d));
		out.target = decode_result(c_.receive(kind::result));
		result own;

		mine_.account(own);
		out.faults_minor = own.faults_minor;
		out.faults_major = own.faults_major;
		out.invalidations = own.invalidations;
		out.holds = own.holds;
		out.reclaimed = own.reclaimed;
		out.mismatches += out.target.mismatches + mine_.mismatches();
		std::uint64_t total = 0;
		for (const std::uint64_t n : d.operations)
			total += n;
		if (test_.takes_receives())
			out.lost = total - std::min(total, out.target.received);

		const npr_stats now = statistics();
		out.leases = now.leases - before.leases;
		out.recalls = now.recalls - before.recalls;
		out.suspicious_pages = now.suspicious_pages - before.suspicious_pages;
		out.repeated_pages = now.repeated_pages - before.repeated_pages;
		if (test_.how == mode::optimistic && now.leases)
			throw std::runtime_error("leases were granted although they are off");
		return begin;
	}

	[[nodiscard]] npr_stats statistics()
	{
		npr_stats sum{};

		for (const queue &q : mine_.here().queues()) {
			const npr_stats s = q.statistics();

			sum.leases += s.leases;
			sum.recalls += s.recalls;
			sum.suspicious_pages += s.suspicious_pages;
			sum.repeated_pages += s.repeated_pages;
		}
		return sum;
	}

	const channel &c_;
	const test test_;
	side mine_;
};

} // namespace

int serve(int connection, const device_choice &device)
{
	const channel c(connection);

	try {
		serve_session(c, device);
		return 0;
	} catch (const std::exception &e) {
		tell_failure(c, e.what());
		std::fprintf(stderr, "np_perf: target: %s\n", e.what());
		return 1;
	}
}

int work(int orders, int connection, const device_choice &device)
{
	static_assert(std::is_trivially_copyable_v<order> && std::is_trivially_copyable_v<outcome>);
	const channel from(orders), c(connection);
	const auto out = std::make_unique<outcome>();

	try {
		const test t = decode_test(from.receive(kind::hello));
		client mine(c, t, device);

		rc::send_all(orders, out.get(), 1);
		for (order o; recv(orders, &o, sizeof(o), MSG_WAITALL) == sizeof(o);) {
			*out = mine.fulfil(o);
			rc::send_all(orders, out.get(), 1);
		}
		mine.leave();
		return 0;
	} catch (const std::exception &e) {
		tell_failure(c, e.what());
		*out = {};
		out->failed = true;
		fmt::format_to_n(out->text, sizeof(out->text) - 1, "{}", e.what());
		try {
			rc::send_all(orders, out.get(), 1);
		} catch (const std::exception &) {
			/* it has gone */
		}
		return 1;
	}
}

} // namespace perf
