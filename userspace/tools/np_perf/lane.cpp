// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "lane.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <sched.h>
#include <time.h>

#include <cstring>
#include <stdexcept>

namespace perf
{

namespace
{

constexpr std::uint64_t stuck_ns = 60'000'000'000; /* nothing completes: give up */
constexpr std::uint64_t silence_ns = 300'000'000;  /* no message of those that may get lost will come */
constexpr std::size_t most_samples = 32U << 20;

const char *hint(int error)
{
	switch (error) {
	case EFAULT:
		return ": nothing is mapped there";
	case ENOBUFS:
		return ": no memory, or RLIMIT_MEMLOCK (ulimit -l) is too low for the buffers of requests "
		       "under way";
	case ENOMEM:
		return ": the send queue is full";
	default:
		return "";
	}
}

} // namespace

std::uint64_t now_ns() noexcept
{
	timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(t.tv_nsec);
}

lane::lane(link &l, const test &t, const endpoint &theirs, unsigned thread, bool client)
    : test_(t),
      queue_(l.queues()[thread]),
      client_(client),
      thread_(thread),
      target_(l.mem().at(memory_plan(t, client).target(thread))),
      source_(l.mem().at(memory_plan(t, client).source(thread))),
      remote_(theirs.address + memory_plan(t, !client).target(thread)),
      rkey_(theirs.rkey),
      lkey_(l.lkey()),
      at_(t, t.size)
{
}

void lane::begin(const pass &p)
{
	const std::uint64_t number = pass_.number;

	pass_ = p;
	at_ = layout(test_, p.size);
	limit.store(no_limit, std::memory_order_relaxed);
	latencies_.clear();
	marks_.clear();
	mismatches_ = 0;
	progress_at_ = now_ns();
	if (p.prepare)
		next_ = done_ = received_ = expected_ = 0;
	else
		pass_.number = number; /* data goes on as well */
}

/* Whose data, so that what was meant for one direction or thread is not taken for another's. */
pattern lane::data(bool from_client, std::uint64_t index) const noexcept
{
	return {pass_.number, thread_ * 2U + from_client, index};
}

std::byte *lane::source(std::uint64_t i) const noexcept
{
	return source_ + test_.unaligned + i % at_.local_slots * at_.stride;
}

std::byte *lane::target(std::uint64_t slot) const noexcept
{
	return target_ + test_.unaligned + slot * at_.stride;
}

std::byte *lane::receive_place(std::uint64_t n) const noexcept
{
	return target_ + test_.unaligned + n % at_.receives * at_.receive_stride;
}

/* What the last byte of message @i of a ping-pong by WRITEs is; never that of the one before in this place.
 */
std::uint8_t lane::marker(std::uint64_t i) const noexcept
{
	return static_cast<std::uint8_t>(1 + at_.visits(i) % 255);
}

void lane::reset_memory()
{
	if (marks_memory())
		for (std::uint64_t s = 0; s < at_.slots; s++)
			target(s)[pass_.size - 1] = std::byte{0};
	if (client_)
		return;
	if (test_.is_atomic())
		for (std::uint64_t s = 0; s < at_.slots; s++)
			std::memset(target(s), 0, pass_.size);
	if (test_.verify && test_.op == verb::read)
		for (std::uint64_t s = 0; s < at_.slots; s++)
			data(false, s).fill({target(s), pass_.size});
}

void lane::post_receive()
{
	const bool ud = test_.over == transport::ud;
	ibv_recv_wr wr{};
	ibv_sge sge = {.addr = reinterpret_cast<std::uintptr_t>(receive_place(receives_posted_)),
		       .length = static_cast<std::uint32_t>(test_.size + (ud ? grh_bytes : 0)),
		       .lkey = lkey_};

	wr.wr_id = receives_posted_;
	if (test_.op == verb::send) {
		wr.sg_list = &sge;
		wr.num_sge = 1;
	}
	int error;
	while ((error = queue_.post_recv(wr)) == EAGAIN)
		idle();
	if (error)
		throw std::runtime_error(
		    fmt::format("posting a receive: {}{}", std::strerror(error), hint(error)));
	receives_posted_++;
}

void lane::post_receives()
{
	if (!test_.takes_receives() || (client_ && !test_.pingpong()))
		return;
	while (receives_posted_ - receives_done_ < queue_.receives())
		post_receive();
}

void lane::post(std::uint64_t i, bool signaled)
{
	const std::uint64_t there = remote_ + test_.unaligned + at_.slot(i) * at_.stride;
	const std::span<std::byte> out(source(i), pass_.size);
	ibv_send_wr wr{};
	ibv_sge sge = {.addr = reinterpret_cast<std::uintptr_t>(out.data()),
		       .length = static_cast<std::uint32_t>(pass_.size),
		       .lkey = lkey_};

	wr.wr_id = i;
	wr.sg_list = &sge;
	wr.num_sge = 1;
	wr.send_flags = signaled ? IBV_SEND_SIGNALED : 0;
	if (test_.is_atomic()) {
		wr.wr.atomic.remote_addr = there;
		wr.wr.atomic.rkey = rkey_;
		wr.wr.atomic.compare_add = test_.op == verb::fetch_add ? 1 : at_.visits(i);
		wr.wr.atomic.swap = at_.visits(i) + 1;
		wr.opcode =
		    test_.op == verb::fetch_add ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP;
	} else if (test_.op == verb::send) {
		/* By its number the other end knows what is to come with it, and what got lost. */
		wr.opcode = test_.verify ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND;
		if (test_.over == transport::ud)
			wr.wr.ud = {.ah = queue_.peer(),
				    .remote_qpn = queue_.peer_number(),
				    .remote_qkey = 0x11111111};
	} else {
		wr.wr.rdma.remote_addr = there;
		wr.wr.rdma.rkey = rkey_;
		wr.opcode = test_.op == verb::read    ? IBV_WR_RDMA_READ
			    : test_.op == verb::write ? IBV_WR_RDMA_WRITE
						      : IBV_WR_RDMA_WRITE_WITH_IMM;
	}
	wr.imm_data = htonl(static_cast<std::uint32_t>(i));
	if (test_.op != verb::read && !test_.is_atomic()) {
		if (test_.verify)
			data(client_, i).fill(out);
		if (marks_memory())
			out.back() = static_cast<std::byte>(marker(i));
		if (pass_.size <= test_.inline_bytes)
			wr.send_flags |= IBV_SEND_INLINE;
	}
	int error;
	while ((error = queue_.post_send(wr)) == EAGAIN) {
		poll();
		idle();
	}
	if (error)
		throw std::runtime_error(
		    fmt::format("posting operation {}: {}{}", i, std::strerror(error), hint(error)));
}

/* All of ours up to @i. */
void lane::sent(std::uint64_t i)
{
	for (; done_ <= i; done_++) {
		if (!test_.verify)
			continue;
		const std::byte *const here = source(done_);
		std::uint64_t old;

		if (test_.op == verb::read) {
			mismatches_ += !data(false, at_.slot(done_)).matches({here, pass_.size});
		} else if (test_.is_atomic()) {
			std::memcpy(&old, here, sizeof(old));
			mismatches_ += old != at_.visits(done_);
		}
	}
}

/* A message of the other end. */
void lane::came(const ibv_wc &wc)
{
	const bool ud = test_.over == transport::ud, send = test_.op == verb::send;

	receives_done_++;
	received_++;
	if (test_.verify || test_.op == verb::write_imm) {
		std::uint64_t n = expected_;

		if (wc.wc_flags & IBV_WC_WITH_IMM) {
			const std::uint32_t ahead =
			    ntohl(wc.imm_data) - static_cast<std::uint32_t>(expected_);

			/* Of what is not reliable some may be missing, but nothing comes twice. */
			if (ahead && (test_.over == transport::rc || ahead >= 1U << 31))
				mismatches_++;
			else
				n += ahead;
		} else {
			mismatches_++;
		}
		expected_ = n + 1;
		if (test_.verify && send) {
			const std::byte *const here = receive_place(wc.wr_id) + (ud ? grh_bytes : 0);

			mismatches_ += wc.byte_len != pass_.size + (ud ? grh_bytes : 0) ||
				       !data(!client_, n).matches({here, pass_.size});
		}
	}
	post_receive();
}

unsigned lane::poll()
{
	ibv_wc wc[16];
	const int n = queue_.poll(wc);

	if (n < 0)
		throw std::runtime_error(fmt::format("polling: {}", std::strerror(-n)));
	for (int i = 0; i < n; i++) {
		if (wc[i].status != IBV_WC_SUCCESS)
			throw std::runtime_error(fmt::format("operation {} of thread {}: {}", wc[i].wr_id,
							     thread_, ibv_wc_status_str(wc[i].status)));
		if (wc[i].opcode & IBV_WC_RECV)
			came(wc[i]);
		else
			sent(wc[i].wr_id);
	}
	if (n)
		idle_ = 0;
	return static_cast<unsigned>(n);
}

/* Nothing has happened. */
void lane::idle()
{
	if (abort.load(std::memory_order_relaxed))
		throw aborted();
	if (!idle_)
		progress_at_ = 0;
	if (++idle_ % 1024)
		return;
	/* Others may need this CPU to get on. */
	sched_yield();
	if (idle_ % 8192)
		return;
	const std::uint64_t now = now_ns();
	if (!progress_at_)
		progress_at_ = now;
	else if (now - progress_at_ > stuck_ns)
		throw std::runtime_error(fmt::format(
		    "thread {}: nothing has completed for {} s, after {} operations here and {} messages "
		    "of the other end",
		    thread_, stuck_ns / 1'000'000'000, done_, received_));
}

void lane::drain()
{
	while (done_ < next_)
		if (!poll())
			idle();
}

/* Data that is looked at must not be overwritten before, nor may a source change while it is used. */
std::uint64_t lane::window() const noexcept
{
	return test_.verify ? std::min<std::uint64_t>(test_.window, at_.local_slots) : test_.window;
}

bool lane::finished(const goal &g, std::uint64_t from, std::uint64_t now) const noexcept
{
	return next_ - from >= g.operations || now >= g.until_ns || latencies_.size() >= most_samples;
}

void lane::measure(const goal &g)
{
	if (test_.latency) {
		latencies_.reserve(std::min<std::uint64_t>(g.operations, 1U << 20));
		test_.pingpong() ? pingpong_first(g) : one_by_one(g);
	} else {
		marks_.reserve(std::min<std::uint64_t>(g.operations, 1U << 20));
		windowed(g);
	}
}

void lane::one_by_one(const goal &g)
{
	const std::uint64_t from = next_;
	std::uint64_t before = now_ns();

	for (; !finished(g, from, before); next_++) {
		post(next_, true);
		while (done_ <= next_)
			if (!poll())
				idle();
		const std::uint64_t now = now_ns();

		latencies_.push_back(now - before);
		before = now;
	}
}

void lane::windowed(const goal &g)
{
	const std::uint64_t from = next_, most = window();
	const std::uint64_t every = std::min<std::uint64_t>(test_.signal_every, most);
	std::uint64_t now = now_ns(), unsignaled = 0;
	bool last = false;

	while (!last || done_ < next_) {
		while (!last && next_ - done_ < most) {
			last = next_ - from + 1 >= g.operations || now >= g.until_ns ||
			       marks_.size() >= most_samples;
			/* Of the last ones the end has to be seen. */
			const bool signaled = ++unsignaled >= every || last;

			post(next_++, signaled);
			if (signaled)
				unsignaled = 0;
		}
		if (!poll()) {
			idle();
			continue;
		}
		now = now_ns();
		marks_.push_back({now, done_ - from});
	}
}

bool lane::wait_for(std::uint64_t i)
{
	const volatile std::byte *const mark = target(at_.slot(i)) + (pass_.size - 1);
	const auto want = static_cast<std::byte>(marker(i));

	for (;;) {
		if (marks_memory() ? *mark == want : received_ > i)
			break;
		if (poll())
			continue;
		idle();
		if (!client_ && limit.load(std::memory_order_relaxed) <= i)
			return false;
	}
	std::atomic_thread_fence(std::memory_order_acquire);
	idle_ = 0;
	/* Of a message the receive was looked at; the last byte of a WRITE is its mark. */
	if (test_.verify && test_.op != verb::send) {
		const std::uint64_t length = pass_.size - marks_memory();

		mismatches_ += !data(!client_, i).matches({target(at_.slot(i)), length});
	}
	return true;
}

void lane::pingpong_first(const goal &g)
{
	const std::uint64_t from = next_;
	std::uint64_t before = now_ns();

	while (!finished(g, from, before)) {
		while (next_ - done_ >= at_.local_slots)
			if (!poll())
				idle();
		const std::uint64_t i = next_++;

		post(i, true);
		(void)wait_for(i);
		const std::uint64_t now = now_ns();

		latencies_.push_back((now - before) / 2);
		before = now;
	}
	drain();
}

void lane::pingpong_second()
{
	while (wait_for(next_)) {
		while (next_ - done_ >= at_.local_slots)
			if (!poll())
				idle();
		const std::uint64_t i = next_++;

		post(i, true);
	}
	drain();
}

void lane::respond()
{
	if (test_.pingpong())
		return pingpong_second();
	std::uint64_t last = 0;

	for (;;) {
		if (poll()) {
			last = 0;
			continue;
		}
		const std::uint64_t want = limit.load(std::memory_order_acquire);

		if (received_ >= want)
			return;
		if (want != no_limit && test_.over != transport::rc) {
			const std::uint64_t now = now_ns();

			if (!last)
				last = now;
			else if (now - last > silence_ns)
				return;
		}
		idle();
		/* The client is still at work, and says so if it is not. */
		if (want == no_limit)
			idle_ %= 8192;
	}
}

void lane::check_target()
{
	const bool writes = (test_.op == verb::write && !test_.pingpong()) || test_.op == verb::write_imm;
	const std::uint64_t total = limit.load(std::memory_order_relaxed);

	if (!test_.verify || !(writes || test_.is_atomic()))
		return;
	/* The last one to each slot is among the last ones. */
	const std::uint64_t first = total > at_.slots ? total - at_.slots : 0;
	const std::uint64_t patience = now_ns() + (test_.over == transport::rc ? 0 : silence_ns);

	for (std::uint64_t i = first; i < total; i++) {
		const std::byte *const there = target(at_.slot(i));
		const auto right = [&] {
			std::uint64_t value;

			if (writes)
				return data(!client_, i).matches({there, pass_.size});
			std::memcpy(&value, there, sizeof(value));
			return value == at_.visits(i) + 1;
		};

		/* Nobody acknowledges what is not reliable: it may still be on its way. */
		while (!right()) {
			if (now_ns() < patience)
				continue;
			mismatches_++;
			break;
		}
	}
}

} // namespace perf
