// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "mesh.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <type_traits>

namespace nprdma::sync
{
namespace
{

using namespace std::chrono_literals;

static_assert(std::is_trivially_copyable_v<note> && std::is_trivially_copyable_v<hello>);

/* What a transport takes as one segment has a count of 32 bits. */
constexpr std::size_t largest_segment = std::size_t{1} << 30;
constexpr auto greeting_time = 2s; /* of who has connected to us */
/* Of who is turned away, to read why and hang up: an emulated adapter on a busy machine needs seconds. */
constexpr auto refusal_time = 10s;

template <class M> std::span<const std::byte> bytes_of(const M &m) noexcept
{
	return std::as_bytes(std::span(&m, 1));
}

} // namespace

mesh::mesh(transport::context &context, transport::listener &listener, std::vector<std::string> addresses,
	   const transport::region &memory, const hello &own, events e)
    : context_(context),
      listener_(listener),
      addresses_(std::move(addresses)),
      memory_(memory),
      own_(own),
      events_(std::move(e)),
      links_(own.common.workers)
{
}

bool mesh::dialing(rank_t peer) const noexcept
{
	return std::any_of(strangers_.begin(), strangers_.end(),
			   [&](const stranger &s) { return s.dialed == peer; });
}

bool mesh::greet(transport::connection &line, rank_t peer)
{
	hello h = own_;

	h.known = events_.incarnation(peer);
	return static_cast<bool>(line.send(bytes_of(h)));
}

int mesh::dial(rank_t peer, clock::time_point deadline, std::chrono::nanoseconds answer)
{
	auto line = context_.connect(addresses_[peer], deadline);

	if (!line) {
		complaint_ = line.why().text;
		return line.code();
	}
	if (!greet(**line, peer))
		return ECONNRESET;
	strangers_.push_back({std::move(*line), peer, clock::now() + answer});
	return 0;
}

void mesh::take_callers()
{
	/* accept() with a deadline that has passed takes who is there. */
	for (;;) {
		auto line = listener_.accept(clock::now());

		if (!line) {
			if (line.code() == EMFILE || line.code() == ENFILE)
				complaint_ = line.why().text;
			break;
		}
		strangers_.push_back({std::move(*line), std::nullopt, clock::now() + greeting_time});
	}
	for (std::size_t i = 0; i < strangers_.size();) {
		std::array<std::byte, sizeof(hello)> buffer;
		const auto n = strangers_[i].line->receive(buffer);
		bool keep = n && !*n && clock::now() < strangers_[i].until;

		if (n && *n == sizeof(hello)) {
			hello h;
			stranger s = std::move(strangers_[i]);

			std::memcpy(static_cast<void *>(&h), buffer.data(), sizeof(h));
			strangers_.erase(strangers_.begin() + static_cast<std::ptrdiff_t>(i));
			welcome(s, h);
			continue;
		}
		if (keep)
			++i;
		else
			strangers_.erase(strangers_.begin() + static_cast<std::ptrdiff_t>(i));
	}
}

void mesh::hang_up()
{
	std::erase_if(refused_,
		      [](const stranger &s) { return !s.line->alive() || clock::now() >= s.until; });
}

std::string mesh::wrong_with(const stranger &s, const hello &h) const
{
	if (h.magic != hello::right_magic)
		return "it is no worker of nprdma-sync, or of another version";
	if (h.rank >= workers() || h.rank == self() || (s.dialed && *s.dialed != h.rank))
		return "it says that it is worker " + std::to_string(h.rank);
	const auto differs = [](const char *what, auto theirs, auto ours) {
		return std::string(what) + ", " + std::to_string(theirs) + " there and " +
		       std::to_string(ours) + " here";
	};
	if (h.common.workers != own_.common.workers)
		return differs("it has another number of workers", h.common.workers, own_.common.workers);
	if (h.common.elements != own_.common.elements)
		return differs("it has another number of parameters", h.common.elements,
			       own_.common.elements);
	if (h.common.element_bytes != own_.common.element_bytes)
		return differs("its parameters have another size", h.common.element_bytes,
			       own_.common.element_bytes);
	if (h.common.schedule != own_.common.schedule)
		return "it has another schedule";
	if (!(h.common == own_.common))
		return "it has another wire format, or checksums and we do not";
	if (h.memory.length != memory_.memory().size())
		return differs("its memory has another size", h.memory.length, memory_.memory().size());
	return "";
}

bool mesh::welcome(stranger &s, const hello &h)
{
	if (const std::string wrong = wrong_with(s, h); !wrong.empty()) {
		complaint_ = (s.dialed ? "the peer at " + addresses_[*s.dialed] : "a peer that connected") +
			     ": " + wrong;
		disagreed_ |= h.magic == hello::right_magic;
		/* So that it can say so, too. */
		if (!s.dialed && h.magic == hello::right_magic && h.rank < workers() &&
		    greet(*s.line, h.rank)) {
			/* Over verbs what is not sent yet goes with the line. */
			if (refused_.size() >= workers())
				refused_.erase(refused_.begin());
			refused_.push_back({std::move(s.line), std::nullopt, clock::now() + refusal_time});
		}
		return false;
	}
	link &l = links_[h.rank];
	const rank_t dialer = s.dialed ? self() : h.rank;

	/* If two dial each other both keep the line that the higher rank has dialed. */
	if (l.line && l.birth == h.birth && l.dialer > dialer && l.line->alive())
		return false;
	if (!s.dialed && !greet(*s.line, h.rank))
		return false;
	const bool replaces = l.line && l.birth != h.birth;
	if (replaces)
		lose(h.rank);
	l.line = std::move(s.line);
	l.dialer = dialer;
	l.birth = h.birth;
	l.memory = h.memory;
	l.under_way = 0;
	events_.connected(h.rank, h);
	flush(h.rank);
	return true;
}

void mesh::lose(rank_t peer)
{
	link &l = links_[peer];

	if (!l.line)
		return;
	l.line.reset();
	l.waiting.clear();
	l.under_way = 0;
	events_.broken(peer);
}

void mesh::post(rank_t peer, std::span<const std::byte> data, std::uint64_t offset, const note &n)
{
	if (!links_[peer].line)
		return;
	links_[peer].waiting.push_back({data, offset, n});
	flush(peer);
}

bool mesh::idle(rank_t peer) const noexcept
{
	return links_[peer].waiting.empty() && !links_[peer].under_way;
}

void mesh::flush(rank_t peer)
{
	link &l = links_[peer];

	while (l.line && !l.waiting.empty()) {
		const outgoing &o = l.waiting.front();
		transport::status done;

		if (o.data.empty()) {
			done = l.line->send(bytes_of(o.n));
		} else {
			/* As many as data in one piece can have: it is no larger than the memory. */
			std::vector<transport::segment> segments;
			for (std::size_t at = 0; at < o.data.size(); at += largest_segment)
				segments.push_back({&memory_, const_cast<std::byte *>(o.data.data()) + at,
						    l.memory.addr + o.offset + at, l.memory.key,
						    static_cast<std::uint32_t>(
							std::min(largest_segment, o.data.size() - at))});
			done = l.line->write(segments, 0, bytes_of(o.n));
			l.under_way += done ? 1U : 0U;
		}
		if (!done)
			return; /* EAGAIN, or broken, which poll() finds out */
		bytes_sent_ += o.data.size() + sizeof(note);
		l.waiting.pop_front();
	}
}

void mesh::receive_all(rank_t peer)
{
	std::array<std::byte, sizeof(hello)> buffer;
	std::array<transport::completion, 16> done;
	link &l = links_[peer];

	while (l.line) {
		const std::size_t n = l.line->poll(done);

		l.under_way -= std::min(n, l.under_way);
		if (n < done.size())
			break;
	}
	/* A note may have the line replaced. */
	while (l.line) {
		const auto n = l.line->receive(buffer);

		if (!n)
			return lose(peer);
		if (!*n)
			break;
		if (*n != sizeof(note)) {
			complaint_ = "worker " + std::to_string(peer) + " has sent what is no note";
			return lose(peer);
		}
		note received;
		std::memcpy(static_cast<void *>(&received), buffer.data(), sizeof(received));
		events_.received(peer, received);
	}
	flush(peer);
}

void mesh::poll()
{
	take_callers();
	hang_up();
	for (rank_t peer = 0; peer < workers(); ++peer)
		receive_all(peer);
}

void mesh::wait(clock::time_point deadline)
{
	waited_.clear();
	for (const link &l : links_)
		if (l.line)
			waited_.push_back(l.line.get());
	for (const auto *some : {&strangers_, &refused_})
		for (const stranger &s : *some)
			waited_.push_back(s.line.get());
	/* An error here is one of poll(2), which says no more than that poll() has to look. */
	(void)transport::wait(waited_, deadline, listener_.fd());
}

} // namespace nprdma::sync
