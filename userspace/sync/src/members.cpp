// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "members.hpp"

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace nprdma::sync
{
namespace
{

/*
 * Who accepts many, each of which takes its adapter long, answers the first one when it has accepted the last
 * one. One that gave up before would dial again, for nothing; and one that the other end has taken for
 * connected would be missed there. But a host that has died meanwhile may be there again.
 */
constexpr auto founding_answer = std::chrono::seconds(30);

} // namespace

members::members(transport::context &context, transport::listener &listener,
		 std::vector<std::string> addresses, const transport::region &memory, const hello &own,
		 std::chrono::nanoseconds deadline)
    : deadline_(deadline),
      members_(own.common.workers),
      mesh_(context, listener, std::move(addresses), memory, own,
	    {
		.received = [this](rank_t from, const note &n) { received(from, n); },
		.connected =
		    [this](rank_t, const hello &h) {
			    /* Somebody who was here before this process has to be another one now. */
			    incarnation_ = std::max(incarnation_, h.known);
		    },
		.broken = [this](rank_t peer) { broken(peer); },
		.incarnation = [this](rank_t peer) { return members_[peer].incarnation; },
	    })
{
	for (rank_t p = 0; p < own.common.workers; ++p)
		if (p != own.rank)
			all_.push_back(p);
}

/*
 * Without this word others would have to find out, and tell each other. Such a note may come before the last
 * ones of this worker are read, which then would not be waited for.
 */
members::~members()
{
	tell_all(said(note::kind::bye));
}

void members::found(clock::time_point until)
{
	const auto absent = [&] {
		return std::find_if(all_.begin(), all_.end(), [&](rank_t p) { return !mesh_.connected(p); });
	};

	std::vector<bool> came(members_.size());
	const auto gone = [&](rank_t p) {
		return std::system_error(ECONNRESET, std::generic_category(),
					 "worker " + std::to_string(self()) + ": worker " +
					     std::to_string(p) +
					     " has connected, and is gone before all have");
	};

	for (;;) {
		/*
		 * Each one dials those below it, who may not listen yet; and whoever has come and gone, to
		 * find out whether anybody listens there: not for long, as it may be dialing us.
		 */
		clock::time_point again = until;

		for (const rank_t p : all_) {
			const auto soon = std::min(until, clock::now() + std::chrono::seconds(1));

			if (mesh_.connected(p) || (p > self() && !came[p]))
				continue;
			if (!mesh_.dialing(p) &&
			    mesh_.dial(p, came[p] ? soon : until, founding_answer) == ECONNREFUSED && came[p])
				throw gone(p);
			again = std::min(until, clock::now() + std::chrono::milliseconds(10));
		}
		mesh_.poll();
		for (const rank_t p : all_)
			came[p] = came[p] || mesh_.connected(p);
		const auto a = absent();
		if (a == all_.end())
			break;
		const auto ended =
		    std::find_if(all_.begin(), all_.end(), [&](rank_t p) { return members_[p].ended; });
		if (mesh_.disagreed()) {
			const std::string why = mesh_.complaint();

			/* They have to hear why, and not only that this worker is gone. */
			while (!mesh_.all_told() && clock::now() < until) {
				mesh_.wait(std::min(until, clock::now() + std::chrono::milliseconds(100)));
				mesh_.poll();
			}
			throw std::system_error(EPROTO, std::generic_category(),
						"worker " + std::to_string(self()) + ": " + why);
		}
		if (ended != all_.end())
			throw gone(*ended);
		if (clock::now() >= until)
			throw std::system_error(
			    ETIMEDOUT, std::generic_category(),
			    "worker " + std::to_string(self()) + ": worker " + std::to_string(*a) +
				" has not connected" +
				(mesh_.complaint().empty() ? "" : " (" + mesh_.complaint() + ")"));
		mesh_.wait(again);
	}
	for (const rank_t p : all_)
		members_[p].is = state::present;
}

void members::find(clock::time_point until)
{
	for (const rank_t p : all_)
		mesh_.dial(p, until);
	for (;;) {
		mesh_.poll();
		if (std::none_of(all_.begin(), all_.end(), [&](rank_t p) { return mesh_.dialing(p); }) ||
		    clock::now() >= until)
			break;
		mesh_.wait(until);
	}
	left_out_ = true;
}

note members::said(note::kind what) const noexcept
{
	note n;

	n.what = what;
	n.incarnation = incarnation_;
	n.step = step_;
	n.about = self();
	return n;
}

void members::tell_all(const note &n)
{
	for (const rank_t p : all_)
		if (mesh_.connected(p))
			mesh_.post(p, n);
}

void members::received(rank_t from, const note &n)
{
	member &m = members_[from];

	m.heard = clock::now();
	switch (n.what) {
	case note::kind::piece:
	case note::kind::mean:
		m.at_step = std::max(m.at_step, n.step);
		(n.what == note::kind::piece ? m.piece : m.mean)[n.step % 2] = n;
		break;
	case note::kind::part:
		/* Of one all-reduce, and the next one before the other end is done with it. */
		if (m.parts.size() < 4 * std::size_t{max_workers})
			m.parts.push_back(n);
		break;
	case note::kind::arrived:
		m.arrived = std::max(m.arrived, n.step);
		break;
	case note::kind::failed:
		failed_ = std::max(failed_, n.view);
		break;
	case note::kind::bye:
		m.ended = true;
		leave(from);
		break;
	case note::kind::ping:
		mesh_.post(from, said(note::kind::pong));
		break;
	case note::kind::pong:
		m.at_step = std::max(m.at_step, n.step);
		break;
	case note::kind::suspect:
		if (n.about == self())
			left_out_ |= n.incarnation == incarnation_;
		else if (n.about < members_.size() && members_[n.about].incarnation == n.incarnation)
			leave(n.about);
		break;
	case note::kind::join: {
		if (n.incarnation <= m.incarnation)
			break;
		leave(from);
		m.parts.clear();
		m.is = state::joining;
		m.incarnation = n.incarnation;
		m.welcomed = step_ + 1;
		m.at_step = 0;
		note answer = said(note::kind::welcome);
		answer.step = m.welcomed;
		mesh_.post(from, answer);
		break;
	}
	case note::kind::welcome:
		m.answered = true;
		m.offered = n.step;
		m.incarnation = std::max(m.incarnation, n.incarnation);
		break;
	case note::kind::joined:
		if (n.incarnation < m.incarnation)
			break;
		m.is = state::present;
		m.incarnation = n.incarnation;
		m.from = n.step;
		++epoch_;
		break;
	}
}

void members::leave(rank_t peer) noexcept
{
	member &m = members_[peer];

	if (m.is != state::absent)
		++epoch_;
	m.is = state::absent;
	m.barriers = m.arrived = 0;
	mesh_.forget(peer);
}

void members::suspect(rank_t peer)
{
	note n = said(note::kind::suspect);

	n.about = peer;
	n.incarnation = members_[peer].incarnation;
	leave(peer);
	++suspicions_;
	tell_all(n);
}

void members::fail(std::uint64_t number)
{
	note n = said(note::kind::failed);

	n.view = number;
	failed_ = std::max(failed_, number);
	tell_all(n);
}

void members::broken(rank_t peer)
{
	if (members_[peer].is != state::absent)
		suspect(peer);
}

std::uint64_t members::begin()
{
	mesh_.poll();
	if (left_out_)
		come_back();
	else
		++step_;
	in_step_ = true;
	/* Who was promised that this step is kept free has to say first whether it needs it. */
	await_while(all_, [&](rank_t p) {
		return members_[p].is == state::joining && members_[p].welcomed <= step_;
	});
	return step_;
}

void members::come_back()
{
	/* Also while this one was coming back, others may leave it out: then again. */
	do {
		left_out_ = false;
		++incarnation_;
		++epoch_;
		for (const rank_t p : all_) {
			members_[p].answered = false;
			if (!mesh_.connected(p) && !mesh_.dialing(p))
				mesh_.dial(p, clock::now() + deadline_ / 4);
		}
		const clock::time_point until = clock::now() + deadline_;
		while (clock::now() < until &&
		       std::any_of(all_.begin(), all_.end(), [&](rank_t p) { return mesh_.dialing(p); })) {
			mesh_.poll();
			mesh_.wait(std::min(until, clock::now() + deadline_ / 8));
		}
		tell_all(said(note::kind::join));
		await_while(all_, [&](rank_t p) {
			return mesh_.connected(p) && !members_[p].answered &&
			       members_[p].is != state::joining;
		});
		++step_;
		for (const rank_t p : all_) {
			member &m = members_[p];

			if (m.answered)
				step_ = std::max(step_, m.offered);
		}
	} while (left_out_);

	tell_all(said(note::kind::joined));
	for (const rank_t p : all_) {
		member &m = members_[p];

		if (m.is == state::joining)
			continue;
		if (m.answered && mesh_.connected(p)) {
			m.is = state::present;
			m.from = 0;
			m.barriers = m.arrived = 0;
		} else {
			leave(p);
		}
	}
	++epoch_;
}

std::uint64_t members::view_of(std::span<const rank_t> workers) const noexcept
{
	std::uint64_t sum = 0x243f6a8885a308d3;

	for (const rank_t w : workers) {
		const std::uint32_t i = w == self() ? incarnation_ : members_[w].incarnation;

		sum = (sum ^ (std::uint64_t{w} << 32 | i)) * 0x9fb21c651e98df25;
		sum ^= sum >> 29;
	}
	return sum;
}

std::optional<note> members::take_part(rank_t peer, std::uint64_t number)
{
	auto &parts = members_[peer].parts;
	const auto found =
	    std::find_if(parts.begin(), parts.end(), [&](const note &n) { return n.view == number; });

	if (found == parts.end())
		return std::nullopt;
	const note n = *found;
	parts.erase(found);
	return n;
}

void members::drain(std::span<const rank_t> peers)
{
	await_while(peers, [&](rank_t p) { return members_[p].is == state::present && !mesh_.idle(p); });
}

void members::barrier(std::span<const rank_t> peers)
{
	for (const rank_t p : peers) {
		if (p == self() || members_[p].is != state::present)
			continue;
		note n = said(note::kind::arrived);
		n.step = ++members_[p].barriers;
		mesh_.post(p, n);
	}
	await_while(peers, [&](rank_t p) {
		return members_[p].is == state::present && members_[p].arrived < members_[p].barriers;
	});
}

} // namespace nprdma::sync
