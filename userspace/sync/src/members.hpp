/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Who of the workers takes part, as one of them sees it, and waiting for them.
 *
 * There is nobody who decides for all. A worker that is awaited and from which nothing is heard for the
 * deadline is suspected: whoever suspects it tells all, and it is left out from then on. Who waits answers
 * pings, so a worker is not suspected because it waits for another one. A suspected one learns of it and
 * comes back with a new incarnation: it asks all, each answers which step it can keep free and does not go
 * beyond that until it has heard with which step the one that asked joins, so all have it in their groups
 * from the same step on.
 *
 * For moments two may see different groups. Everything that is averaged carries a sum of the group as its
 * sender saw it (the view), and only what has the same view is combined: a mean is always one of whole,
 * equally divided contributions.
 */
#ifndef NPRDMA_SYNC_MEMBERS_HPP
#define NPRDMA_SYNC_MEMBERS_HPP

#include "mesh.hpp"

#include <algorithm>
#include <vector>

namespace nprdma::sync
{

class members
{
public:
	members(transport::context &context, transport::listener &listener,
		std::vector<std::string> addresses, const transport::region &memory, const hello &own,
		std::chrono::nanoseconds deadline);
	~members();
	members(const members &) = delete;
	members &operator=(const members &) = delete;

	/* All workers connect; throws std::system_error if they do not before @until. */
	void found(clock::time_point until);
	/* Connects to those that are there; the first begin() comes back. */
	void find(clock::time_point until);

	/*
	 * Goes on to the next step, and returns its number. If this worker was left out, it comes back first,
	 * and the number may be any higher one.
	 */
	std::uint64_t begin();
	void end() noexcept { in_step_ = false; }

	[[nodiscard]] bool takes_part(rank_t worker) const noexcept
	{
		const member &m = members_[worker];
		return worker == self() || (m.is == state::present && m.from <= step_);
	}
	/* All-reduce @number cannot come to its end: who waits for a part of this worker has to know. */
	void fail(std::uint64_t number);
	[[nodiscard]] bool failed(std::uint64_t number) const noexcept { return failed_ >= number; }
	/* Of these workers, as they are now. */
	[[nodiscard]] std::uint64_t view_of(std::span<const rank_t> workers) const noexcept;
	/* Changes whenever a view may. */
	[[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }

	/* The peer's note of this step, if it has come with this view; null: not. */
	[[nodiscard]] const note *piece(rank_t peer, std::uint64_t view) const noexcept
	{
		return matching(members_[peer].piece, view);
	}
	[[nodiscard]] const note *mean(rank_t peer, std::uint64_t view) const noexcept
	{
		return matching(members_[peer].mean, view);
	}
	/* The next part of an all-reduce with this number, taken; see mesh. */
	[[nodiscard]] std::optional<note> take_part(rank_t peer, std::uint64_t number);

	/*
	 * Until @missing(peer) is false for each of @peers that is worth to be waited for, or this worker is
	 * left out. Those from which nothing is heard are suspected.
	 */
	template <class F> void await(std::span<const rank_t> peers, F &&missing)
	{
		await_while(peers, [&](rank_t p) { return worth_awaiting(p) && missing(p); });
	}
	/* Until nothing posted to @peers is under way. */
	void drain(std::span<const rank_t> peers);
	/* All of @peers that take part have come here. */
	void barrier(std::span<const rank_t> peers);

	/* Will the step's note still come? With another view it may have come already, and then it is not
	 * combined. */
	[[nodiscard]] bool worth_awaiting(rank_t peer) const noexcept
	{
		const member &m = members_[peer];
		return m.is == state::present && m.at_step <= step_;
	}

	[[nodiscard]] bool left_out() const noexcept { return left_out_; }
	[[nodiscard]] bool disagrees(rank_t peer, std::uint64_t view) const noexcept
	{
		const note &n = members_[peer].piece[step_ % 2];
		return n.step == step_ && n.view != view;
	}
	[[nodiscard]] std::uint64_t step() const noexcept { return step_; }
	[[nodiscard]] rank_t self() const noexcept { return mesh_.self(); }
	[[nodiscard]] std::uint32_t suspicions() const noexcept { return suspicions_; }
	[[nodiscard]] std::uint32_t returns() const noexcept { return incarnation_ - 1; }
	[[nodiscard]] mesh &lines() noexcept { return mesh_; }
	[[nodiscard]] const mesh &lines() const noexcept { return mesh_; }

private:
	enum class state {
		absent,  /* or left out */
		present, /* from step @from on */
		joining, /* welcomed, and has not said yet when it comes */
	};
	struct member {
		state is = state::absent;
		std::uint32_t incarnation = 1;
		std::uint64_t from = 0;
		std::uint64_t welcomed = 0; /* joining: the first step that waits for it */
		bool ended = false;         /* it has said so */
		bool answered = false;      /* our own join */
		std::uint64_t offered = 0;  /* the step that it answered */
		std::uint64_t at_step = 0;
		std::uint64_t barriers = 0, arrived = 0; /* with this one: ours, and its */
		clock::time_point heard{}, pinged{};
		clock::time_point excused{}; /* its silence before, by a standstill of ours */
		note piece[2], mean[2];      /* by the step's lowest bit */
		std::deque<note> parts;
	};

	[[nodiscard]] const note *matching(const note (&of_step)[2], std::uint64_t view) const noexcept
	{
		const note &n = of_step[step_ % 2];
		return n.step == step_ && n.view == view ? &n : nullptr;
	}
	template <class F> void await_while(std::span<const rank_t> peers, F &&missing);
	void received(rank_t from, const note &n);
	void broken(rank_t peer);
	void suspect(rank_t peer);
	void leave(rank_t peer) noexcept;
	void come_back();
	void tell_all(const note &n);
	[[nodiscard]] note said(note::kind what) const noexcept;

	const std::chrono::nanoseconds deadline_;
	std::vector<member> members_;
	mesh mesh_;
	std::vector<rank_t> all_; /* but this one */
	std::uint64_t step_ = 0;
	bool in_step_ = false;
	std::uint32_t incarnation_ = 1;
	bool left_out_ = false;
	std::uint64_t epoch_ = 0;
	std::uint32_t suspicions_ = 0;
	std::uint64_t failed_ = 0; /* the last all-reduce that did, here or elsewhere */
};

template <class F> void members::await_while(std::span<const rank_t> peers, F &&missing)
{
	const clock::time_point begun = clock::now();
	clock::time_point looked = begun;

	for (;;) {
		bool any = false;
		clock::time_point next = clock::time_point::max();

		/* Before the look: what came while this worker was busy, or stopped, is no silence. */
		const clock::time_point now = clock::now();
		mesh_.poll();
		if (left_out_)
			return;
		for (const rank_t p : peers) {
			if (p == self() || !missing(p))
				continue;
			member &m = members_[p];
			clock::time_point heard = std::max(begun, m.heard);

			/*
			 * Where this worker has stood still the whole machine may have, and who computes
			 * there, too. It has the deadline again, once until it is heard.
			 */
			if (now - looked >= deadline_ / 2 && m.excused < heard)
				m.excused = now;
			heard = std::max(heard, m.excused);
			if (now - heard >= deadline_) {
				suspect(p);
				continue;
			}
			any = true;
			if (now - std::max(heard, m.pinged) >= deadline_ / 4) {
				mesh_.post(p, said(note::kind::ping));
				m.pinged = now;
			}
			next = std::min(next, std::max(heard, m.pinged) + deadline_ / 4);
		}
		if (!any)
			return;
		looked = now;
		mesh_.wait(next);
	}
}

} // namespace nprdma::sync

#endif
