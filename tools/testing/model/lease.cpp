/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The steps of the transition system that lease.hpp describes, and what each of
 * them must not do. A step that breaks an invariant says so in state::bad; whether the end can
 * still be reached is for the search to find out.
 */
#include "lease.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

namespace model::lease
{

namespace
{

static_assert(std::has_unique_object_representations_v<state>);

/* WRITEs of a lease that its holder knows to be under way */
constexpr unsigned max_users = 2;

unsigned users(const lease &l)
{
	return l.posted + (l.executing == 1) + l.done;
}

/* On the region's list, and in nobody's way to its end */
bool is_listed(const lease &l)
{
	return l.pc >= owner_pc::counted && l.pc <= owner_pc::granted;
}

/* One expansion of one state. */
class expansion
{
public:
	expansion(const scenario &sc, mutation m, const state &s, std::vector<step> &out)
	    : sc_(sc), m_(m), s_(s), out_(out)
	{
	}

	void all()
	{
		memory();
		deregistration();
		for (unsigned i = 0; i < sc_.peers.size(); ++i) {
			job(i);
			asking(i);
			library(i);
			kill(i);
			send_completes(i);
		}
		for (unsigned l = 0; l < max_leases; ++l) {
			if (s_.leases[l].pc == owner_pc::none)
				continue;
			recall(l);
			end(l);
			releasing(l);
			messages(l);
			library_of(l);
			nic(l);
		}
	}

private:
	const scenario &sc_;
	const mutation m_;
	const state &s_;
	std::vector<step> &out_;

	bool is(mutation m) const { return m_ == m; }

	state &add(const char *actor, const char *what, unsigned who = none, unsigned of = none)
	{
		out_.push_back({s_, {actor, what, static_cast<u8>(who), static_cast<u8>(of)}});
		return out_.back().to;
	}

	static void breaks(state &n, invariant i)
	{
		if (!n.bad)
			n.bad = static_cast<u8>(i);
	}

	unsigned page_of(const lease &l) const { return sc_.peers[l.peer].page; }

	/* Does it take longer than it is given? */
	bool may_pass(const state &s, unsigned i) const
	{
		return sc_.slow || s.peers[i].runs != run::running || s.peers[i].dead;
	}

	/* Or can it not complete what was posted under a lease? That is not its fault. */
	bool may_pass(const state &s, const lease &l) const { return may_pass(s, l.peer) || l.behind; }

	/* --- memory ------------------------------------------------------- */

	static bool is_pinned(const state &s, u8 frame)
	{
		return std::any_of(s.leases.begin(), s.leases.end(),
				   [&](const lease &l) { return l.pinned && l.frame == frame; });
	}

	/* The leaf first: it was kept for the sake of leases. */
	void unpin(state &n, unsigned l) const
	{
		const u8 frame = n.leases[l].frame;
		const unsigned p = page_of(n.leases[l]);

		if (!n.leases[l].pinned)
			return;
		n.leases[l].pinned = 0;
		if (is_pinned(n, frame) || n.frame[p] == frame)
			return;
		if (n.leaf[p] == frame)
			n.leaf[p] = scratch_frame;
		n.used[frame] = 0;
	}

	static void lease_recall(state &n, unsigned l)
	{
		if (n.leases[l].recalled)
			return;
		n.leases[l].recalled = n.leases[l].work = 1;
	}

	static unsigned oldest(const state &s)
	{
		unsigned l = 0;

		while (l < max_leases && (!is_listed(s.leases[l]) || s.leases[l].recalled))
			++l;
		return l;
	}

	void memory()
	{
		for (unsigned p = 0; p < sc_.pages && s_.changes; ++p)
			changes(p);
		const unsigned l = oldest(s_);
		if (!s_.pressure || l == max_leases)
			return;
		state &n = add("memory", "is short", none, l);
		--n.pressure;
		n.leases[l].due = 1;
		if (!is(mutation::pressure_not_recalled))
			lease_recall(n, l);
	}

	void changes(unsigned p)
	{
		const auto free = std::find(s_.used.begin(), s_.used.end(), 0);
		if (free == s_.used.end()) {
			std::fprintf(stderr, "%s: too few frames\n", sc_.name.c_str());
			std::abort();
		}
		state &n = add("memory", "changes");
		const u8 was = n.frame[p];

		--n.changes;
		n.frame[p] = static_cast<u8>(free - s_.used.begin());
		n.used[n.frame[p]] = 1;
		/* A leaf that shows an older page stays as well, for the leases of that. */
		if (!is_pinned(n, was)) {
			if (n.leaf[p] == was)
				n.leaf[p] = scratch_frame;
			n.used[was] = 0;
		}
		for (unsigned l = 0; l < max_leases; ++l) {
			if (!n.leases[l].pinned || page_of(n.leases[l]) != p)
				continue;
			n.leases[l].due = 1;
			if (is_listed(n.leases[l]) && !is(mutation::change_not_recalled))
				lease_recall(n, l);
		}
	}

	/* --- the owner's kernel: grants ----------------------------------- */

	static void refuse(state &n, unsigned i)
	{
		n.peers[i].job = job_pc::idle;
		n.peers[i].answer = none;
		n.peers[i].m_refused = !n.peers[i].dead;
	}

	void drop(state &n, unsigned i) const
	{
		n.peers[i].job = job_pc::dropping;
		start_ending(n, n.peers[i].lease);
	}

	void job(unsigned i)
	{
		const peer &q = s_.peers[i];

		switch (q.job) {
		case job_pc::idle:
			return;
		case job_pc::make:
			return make(i);
		case job_pc::pin:
			return pin(i);
		case job_pc::grant:
			return grant(i);
		case job_pc::add:
			return granted(i);
		case job_pc::dropping:
			if (s_.leases[q.lease].pc == owner_pc::ended)
				refuse(add("fault", "answers without a lease", i), i);
		}
	}

	void make(unsigned i)
	{
		unsigned l = 0, counted = 0;

		if (s_.no_leases && !is(mutation::no_leases_unchecked))
			return refuse(add("fault", "finds the region going", i), i);
		for (const lease &other : s_.leases)
			counted += other.counted;
		if (counted >= sc_.bound) {
			state &n = add("fault", "is over the bound, the oldest is recalled", i);
			const unsigned old = oldest(n);
			if (old < max_leases) {
				n.leases[old].due = 1;
				lease_recall(n, old);
			}
			return refuse(n, i);
		}
		while (l < max_leases && s_.leases[l].pc != owner_pc::none)
			++l;
		if (l == max_leases) {
			std::fprintf(stderr, "%s: too few leases\n", sc_.name.c_str());
			std::abort();
		}
		state &n = add("fault", "counts the lease", i, l);
		lease &made = n.leases[l];
		made.pc = owner_pc::counted;
		made.counted = !is(mutation::count_after_grant);
		made.peer = static_cast<u8>(i);
		made.tid = n.peers[i].lane;
		n.peers[i].lease = static_cast<u8>(l);
		n.peers[i].job = job_pc::pin;
	}

	void pin(unsigned i)
	{
		const unsigned l = s_.peers[i].lease, p = sc_.peers[i].page;
		unsigned pinned = 0;

		if (s_.close == close_pc::returned && !is(mutation::pin_although_closed))
			return drop(add("fault", "finds the chunk closed", i, l), i);
		/* Whoever leases the page that was here before keeps its leaf. */
		if (s_.leaf[p] != scratch_frame && s_.leaf[p] != s_.frame[p])
			return;
		state &n = add("fault", "pins the page", i, l);
		n.leases[l].pc = owner_pc::pinned;
		n.leases[l].pinned = 1;
		n.leases[l].frame = n.leaf[p] = n.frame[p];
		n.peers[i].job = job_pc::grant;
		for (const lease &other : n.leases)
			pinned += other.pinned;
		if (pinned > sc_.bound)
			breaks(n, invariant::i10);
		if (n.close == close_pc::returned)
			breaks(n, invariant::i11);
	}

	void grant(unsigned i)
	{
		const unsigned l = s_.peers[i].lease;

		if (s_.close != close_pc::none && !is(mutation::grant_although_gone))
			return drop(add("fault", "finds the region gone", i, l), i);
		state &n = add("fault", "makes the key", i, l);
		n.leases[l].pc = owner_pc::keyed;
		n.leases[l].key = n.leases[l].counted = 1;
		n.peers[i].job = job_pc::add;
	}

	void granted(unsigned i)
	{
		const unsigned l = s_.peers[i].lease;

		if (s_.peers[i].dead && !is(mutation::added_to_dead_peer))
			return drop(add("fault", "finds the peer dead", i, l), i);
		state &n = add("fault", "grants and answers", i, l);
		n.leases[l].pc = owner_pc::granted;
		if (n.leases[l].wanted && !n.peers[i].dead && !is(mutation::wanted_before_grant_forgotten))
			want(n, l);
		n.leases[l].m_grant = !n.peers[i].dead;
		n.peers[i].answer = static_cast<u8>(l);
		n.peers[i].job = job_pc::idle;
	}

	/* A FAULT arrives. */
	void fault(unsigned i)
	{
		const peer &q = s_.peers[i];

		if (q.lane == q.tid && q.job != job_pc::idle) {
			deliver("fault", "says that it is at work", i, none, &peer::m_fault);
		} else if (q.lane == q.tid) {
			const bool lease = q.answer != none;
			const bool lives =
			    lease && s_.leases[q.answer].pc == owner_pc::granted && s_.leases[q.answer].key;
			const bool again = lives || (lease && is(mutation::replay_of_ended));
			deliver("fault", again ? "answers again" : "answers again without a lease", i, none,
				&peer::m_fault, [&](state &n) {
					if (!again) {
						n.peers[i].m_refused = 1;
						return;
					}
					n.leases[q.answer].m_grant = 1;
					/* A grant that was under way when it ended is no worse than a slow
					 * peer; one that is sent now is.
					 */
					n.leases[q.answer].dead_grant |= !lives;
				});
		} else if (q.job == job_pc::idle) {
			deliver("fault", "begins", i, none, &peer::m_fault, [&](state &n) {
				n.peers[i].lane = n.peers[i].tid;
				n.peers[i].job = job_pc::make;
			});
		}
	}

	/* --- the owner's kernel: recalls ---------------------------------- */

	/* The lease is one that the peer has. */
	static void want(state &n, unsigned l)
	{
		n.leases[l].expires = 1;
		if (n.leases[l].tell != tell_pc::none)
			return;
		n.leases[l].tell = tell_pc::under_way;
		n.leases[l].m_recall = 1;
	}

	void recall(unsigned l)
	{
		const lease &it = s_.leases[l];
		const unsigned i = it.peer;

		if (it.work) {
			const bool has = it.pc == owner_pc::granted && !s_.peers[i].dead;
			state &n = add("recall", has ? "begins" : "finds nothing granted yet", i, l);
			n.leases[l].work = 0;
			n.leases[l].wanted = 1;
			if (has)
				want(n, l);
		}
		if (it.pc != owner_pc::granted || s_.peers[i].dead)
			return;
		if ((it.tell == tell_pc::under_way && !it.m_recall && !it.m_answer &&
		     !is(mutation::recall_not_repeated)) ||
		    (it.tell == tell_pc::pause && !is(mutation::busy_not_repeated))) {
			state &n =
			    add("recall", it.tell == tell_pc::pause ? "asks again" : "sends it again", i, l);
			n.leases[l].tell = tell_pc::under_way;
			n.leases[l].m_recall = 1;
		}
		if (it.expires && may_pass(s_, it) && !is(mutation::no_time_limit)) {
			state &n = add("recall", "time is up", i, l);
			start_ending(n, l);
			n.leases[l].overdue = may_pass(s_, i);
			if (is(mutation::limit_keeps_key))
				n.leases[l].pc = owner_pc::unpinning;
			if (is(mutation::limit_ends_queue_pair)) {
				die(n, i);
				breaks(n, invariant::qp);
			}
		}
	}

	void recall_answered(unsigned l)
	{
		const char *const what[] = {nullptr, "has OK", "has BUSY", "has GONE"};
		const u8 said = s_.leases[l].m_answer;

		deliver("recall", what[said], s_.leases[l].peer, l, &lease::m_answer, [&](state &n) {
			lease &it = n.leases[l];
			if (it.tell != tell_pc::under_way)
				return;
			if (said == gone || (said == busy && is(mutation::busy_is_gone)))
				return start_ending(n, l);
			it.tell = said == busy ? tell_pc::pause : tell_pc::none;
		});
	}

	/* --- the owner's kernel: ends ------------------------------------- */

	static void start_ending(state &n, unsigned l)
	{
		lease &it = n.leases[l];

		it.pc = owner_pc::ending;
		it.tell = tell_pc::none;
		it.work = it.wanted = it.expires = 0;
	}

	void end(unsigned l)
	{
		const lease &it = s_.leases[l];
		const bool swapped = is(mutation::unpin_before_key);
		const bool waits = it.executing && !is(mutation::key_does_not_wait);

		switch (it.pc) {
		case owner_pc::ending:
		case owner_pc::unpinning:
			if ((it.pc == owner_pc::ending) == swapped) {
				state &n = add("end", "unpins", it.peer, l);
				unpin(n, l);
				n.leases[l].pc = swapped ? owner_pc::unpinning : owner_pc::uncounting;
			} else if (!waits) {
				state &n = add("end", it.key ? "key ends" : "has no key", it.peer, l);
				n.leases[l].key = 0;
				n.leases[l].pc = swapped ? owner_pc::uncounting : owner_pc::unpinning;
				if (is(mutation::uncount_before_unpin))
					n.leases[l].counted = 0;
			}
			return;
		case owner_pc::uncounting: {
			state &n = add("end", "counts no more", it.peer, l);
			n.leases[l].counted = 0;
			n.leases[l].pc = owner_pc::ended;
			return;
		}
		default:
			return;
		}
	}

	/* Once: what is granted afterwards stays. */
	void kill(unsigned i)
	{
		if (!s_.peers[i].dead || s_.peers[i].killed)
			return;
		state &n = add("end", "the peer is dead", i);
		n.peers[i].killed = 1;
		for (unsigned l = 0; l < max_leases; ++l)
			if (n.leases[l].pc == owner_pc::granted && n.leases[l].peer == i &&
			    !is(mutation::kill_keeps_leases))
				start_ending(n, l);
	}

	void deregistration()
	{
		switch (s_.close) {
		case close_pc::none:
			if (sc_.deregisters)
				add("deregistration", "begins, the region is gone").close = close_pc::gone;
			return;
		case close_pc::gone: {
			state &n = add("deregistration", "recalls all leases");
			n.close = close_pc::waiting;
			n.no_leases = 1;
			for (unsigned l = 0; l < max_leases; ++l) {
				if (!is_listed(n.leases[l]))
					continue;
				n.leases[l].due = 1;
				if (!is(mutation::deregistration_does_not_recall))
					lease_recall(n, l);
			}
			return;
		}
		case close_pc::waiting:
			return close_waits();
		case close_pc::keys:
			return close_keys();
		case close_pc::pages: {
			state &n = add("deregistration", "drops leaves, unpins, returns");
			n.close = close_pc::returned;
			for (unsigned l = 0; l < max_leases; ++l)
				unpin(n, l);
			n.leaf.fill(scratch_frame);
			return;
		}
		case close_pc::returned:
			return;
		}
	}

	void close_waits()
	{
		bool keys = false, passes = !is(mutation::deregistration_waits_for_ever);

		/* Who takes no longer than it is given has given back first. */
		for (const lease &it : s_.leases) {
			keys |= it.key;
			passes &= !it.key || may_pass(s_, it);
		}
		if (keys && !passes && !is(mutation::deregistration_does_not_wait))
			return;
		add("deregistration", keys ? "has waited for long enough" : "finds no lease").close =
		    is(mutation::deregistration_keeps_keys) ? close_pc::pages : close_pc::keys;
	}

	void close_keys()
	{
		bool keys = false;

		for (unsigned l = 0; l < max_leases; ++l) {
			const lease &it = s_.leases[l];
			keys |= it.key;
			if (!it.key || (it.executing && !is(mutation::key_does_not_wait)))
				continue;
			state &n = add("deregistration", "key ends", it.peer, l);
			n.leases[l].key = 0;
			n.leases[l].overdue |= may_pass(s_, it.peer);
		}
		if (!keys)
			add("deregistration", "no lease has a key").close = close_pc::pages;
	}

	/* --- network ------------------------------------------------------ */

	template <class F> void with_copy(const char *actor, const char *what, unsigned i, unsigned l, F f)
	{
		f(add(actor, what, i, l), false);
		if (!s_.copies)
			return;
		state &n = add("network", "a copy is under way, too", i, l);
		--n.copies;
		f(n, true);
	}

	/* A message between the kernels of @i arrives, once or with a copy behind it. */
	template <class F>
	void deliver(const char *actor, const char *what, unsigned i, unsigned, u8 peer::*m, F then)
	{
		with_copy(actor, what, i, none, [&](state &n, bool copied) {
			n.peers[i].*m = copied;
			then(n);
		});
	}

	void deliver(const char *actor, const char *what, unsigned i, unsigned l, u8 peer::*m)
	{
		deliver(actor, what, i, l, m, [](state &) {});
	}

	template <class F>
	void deliver(const char *actor, const char *what, unsigned i, unsigned l, u8 lease::*m, F then)
	{
		with_copy(actor, what, i, l, [&](state &n, bool copied) {
			const u8 was = n.leases[l].*m;
			n.leases[l].*m = 0;
			then(n);
			if (copied)
				n.leases[l].*m = was;
		});
	}

	void lose(u8 peer::*m, const char *what, unsigned i)
	{
		if (!s_.losses || !(s_.peers[i].*m))
			return;
		state &n = add("network", what, i);
		--n.losses;
		n.peers[i].*m = 0;
	}

	void lose(u8 lease::*m, const char *what, unsigned l)
	{
		if (!s_.losses || !(s_.leases[l].*m))
			return;
		state &n = add("network", what, s_.leases[l].peer, l);
		--n.losses;
		n.leases[l].*m = 0;
	}

	void messages(unsigned l)
	{
		const lease &it = s_.leases[l];
		const peer &q = s_.peers[it.peer];

		lose(&lease::m_grant, "loses a grant", l);
		lose(&lease::m_recall, "loses a RECALL", l);
		lose(&lease::m_answer, "loses the answer to a RECALL", l);
		lose(&lease::m_release, "loses a RELEASE", l);
		if (q.dead)
			return;
		if (it.m_answer)
			recall_answered(l);
		if (it.m_release)
			released(l);
		if (q.runs == run::away)
			return;
		if (it.m_grant)
			lease_answered(l);
		if (it.m_recall)
			told_recall(l);
	}

	/* A RELEASE arrives. */
	void released(unsigned l)
	{
		unsigned which = l;

		if (is(mutation::release_ids_reused))
			for (unsigned k = l + 1; k < max_leases; ++k)
				if (s_.leases[k].pc == owner_pc::granted &&
				    s_.leases[k].peer == s_.leases[l].peer)
					which = k;
		const bool has = s_.leases[which].pc == owner_pc::granted;
		deliver("end", has ? "RELEASE" : "RELEASE of nothing", s_.leases[l].peer, l,
			&lease::m_release, [&](state &n) {
				n.leases[l].releasing = 0;
				if (has)
					start_ending(n, which);
			});
	}

	/* --- the initiator's kernel --------------------------------------- */

	void asking(unsigned i)
	{
		const peer &q = s_.peers[i];

		lose(&peer::m_fault, "loses a FAULT", i);
		lose(&peer::m_refused, "loses a refusal", i);
		if (q.dead)
			return;
		if (q.m_fault)
			fault(i);
		if (q.runs == run::away)
			return;
		if (q.m_refused)
			deliver("kernel", "has no lease", i, none, &peer::m_refused, [&](state &n) {
				n.peers[i].ev_refused |= n.peers[i].asking;
				n.peers[i].asking = 0;
			});
		if (!q.asking)
			return;
		const bool answered =
		    q.m_refused || std::any_of(s_.leases.begin(), s_.leases.end(), [&](const lease &l) {
			    return l.m_grant && l.peer == i && l.tid == q.tid;
		    });
		if (!q.m_fault && !answered && q.job == job_pc::idle)
			add("kernel", "sends FAULT again", i).peers[i].m_fault = 1;
		if (s_.give_ups) {
			state &n = add("kernel", "gives FAULT up", i);
			--n.give_ups;
			n.peers[i].asking = 0;
			n.peers[i].ev_refused = 1;
		}
	}

	void releasing(unsigned l)
	{
		const lease &it = s_.leases[l];

		if (!it.releasing || s_.peers[it.peer].runs == run::away)
			return;
		if (!it.m_release)
			add("kernel", "sends RELEASE again", it.peer, l).leases[l].m_release = 1;
		if (s_.give_ups) {
			state &n = add("kernel", "gives RELEASE up", it.peer, l);
			--n.give_ups;
			n.leases[l].releasing = 0;
		}
	}

	/* An answer that grants a lease arrives. */
	void lease_answered(unsigned l)
	{
		const lease &it = s_.leases[l];
		const unsigned i = it.peer;

		if (s_.peers[i].asking && s_.peers[i].tid == it.tid) {
			deliver("kernel", "keeps the lease", i, l, &lease::m_grant, [&](state &n) {
				n.peers[i].asking = 0;
				n.leases[l].kept = n.leases[l].ev_grant = 1;
			});
			return;
		}
		const bool release =
		    it.kept ? is(mutation::copy_releases) : !is(mutation::late_answer_not_released);
		deliver("kernel", release ? "releases what nobody waits for" : "knows the answer", i, l,
			&lease::m_grant, [&](state &n) {
				if (!release)
					return;
				n.leases[l].m_release = 1;
				check_release(n, l);
			});
	}

	/* A RECALL arrives. */
	void told_recall(unsigned l)
	{
		const lease &it = s_.leases[l];
		const char *what = "answers RECALL: GONE";
		u8 said = gone;

		if (it.kept && !is(mutation::gone_while_kept)) {
			what = "answers RECALL: OK, and tells";
			said = ok;
		} else if (it.releasing) {
			what = "answers RECALL: OK, it is on its way back";
			said = ok;
		} else if (s_.peers[it.peer].asking && !is(mutation::gone_while_asked)) {
			what = "answers RECALL: BUSY";
			said = busy;
		}
		deliver("kernel", what, it.peer, l, &lease::m_recall, [&](state &n) {
			n.leases[l].m_answer = said;
			if (!n.leases[l].kept || said != ok)
				return;
			n.leases[l].ev_recall |= !n.leases[l].told && !is(mutation::recall_not_told);
			n.leases[l].told = 1;
		});
	}

	/* --- the library -------------------------------------------------- */

	bool has_live(unsigned i) const
	{
		return std::any_of(s_.leases.begin(), s_.leases.end(),
				   [&](const lease &l) { return l.peer == i && l.lib == library_pc::live; });
	}

	/* An answer is under way, or its event. */
	bool asks(const state &s, unsigned i) const
	{
		return s.peers[i].asking || s.peers[i].ev_refused ||
		       std::any_of(s.leases.begin(), s.leases.end(),
				   [&](const lease &l) { return l.peer == i && l.ev_grant; });
	}

	void library(unsigned i)
	{
		const peer &q = s_.peers[i];

		if (q.runs != run::running || q.dead)
			return;
		if (sc_.stops && !i)
			add("library", "is stopped for ever", i).peers[i].runs = run::stopped;
		if (sc_.vanishes)
			add("library", "is never heard of again, nor its host", i).peers[i].runs = run::away;
		if (sc_.quits)
			die(add("library", "destroys its QP", i), i);
		if (q.ev_refused)
			add("library", "has no lease", i).peers[i].ev_refused = 0;
		if (q.sends && !q.stalled) {
			state &n = add("library", "posts a SEND", i);
			--n.peers[i].sends;
			n.peers[i].stalled = 1;
		}
		if (has_live(i) && !q.stalled)
			return;
		if (q.writes) {
			const bool lost =
			    std::any_of(s_.leases.begin(), s_.leases.end(),
					[&](const lease &l) { return l.peer == i && l.overdue; });
			--add("library",
			      lost ? "writes without a lease, after one that was overdue"
				   : "writes without a lease",
			      i)
			      .peers[i]
			      .writes;
		}
		if (q.asks && !asks(s_, i) && !has_live(i)) {
			state &n = add("library", "asks for a lease", i);
			--n.peers[i].asks;
			++n.peers[i].tid;
			n.peers[i].asking = n.peers[i].m_fault = 1;
			n.peers[i].m_refused = 0;
		}
	}

	void check_release(state &n, unsigned l) const
	{
		if (users(n.leases[l]) || n.leases[l].lib == library_pc::live)
			breaks(n, invariant::i9);
	}

	void release(state &n, unsigned l) const
	{
		lease &it = n.leases[l];

		it.lib = library_pc::released;
		check_release(n, l);
		it.kept = it.ev_recall = 0;
		it.releasing = it.m_release = 1;
	}

	void end_lease(state &n, unsigned l) const
	{
		if (!users(n.leases[l]) || is(mutation::release_before_completion))
			release(n, l);
		else
			n.leases[l].lib = library_pc::ending;
	}

	void library_of(unsigned l)
	{
		const lease &it = s_.leases[l];
		const unsigned i = it.peer;
		const peer &q = s_.peers[i];
		const bool live = it.lib == library_pc::live;

		if (q.runs != run::running || q.dead)
			return;
		if (it.ev_grant) {
			state &n = add("library", it.early ? "was told before" : "has a lease", i, l);
			n.leases[l].ev_grant = 0;
			if (it.early)
				release(n, l);
			else
				n.leases[l].lib = library_pc::live;
		}
		if (it.ev_recall) {
			state &n = add("library", "sees the recall", i, l);
			n.leases[l].ev_recall = 0;
			n.leases[l].seen = 1;
			if (live)
				end_lease(n, l);
			else if (it.lib == library_pc::none)
				n.leases[l].early = asks(s_, i) && !is(mutation::early_recall_forgotten);
		}
		if (live && sc_.idles)
			end_lease(add("library", "gives back what is idle", i, l), l);
		if ((live || (it.lib == library_pc::ending && is(mutation::post_after_recall))) && q.writes &&
		    (!q.stalled || is(mutation::posts_behind_send)) && users(it) < max_users) {
			state &n = add("library", "posts a WRITE", i, l);
			--n.peers[i].writes;
			++n.leases[l].posted;
			n.leases[l].behind |= q.stalled;
			if (it.seen || !live)
				breaks(n, invariant::i9);
		}
		if (it.done) {
			state &n = add("library", "has a completion", i, l);
			--n.leases[l].done;
			if (it.lib == library_pc::ending && !users(n.leases[l]))
				release(n, l);
		}
	}

	/* Both QPs end. The owner's kernel has yet to notice. */
	static void die(state &n, unsigned i)
	{
		peer &q = n.peers[i];

		q.dead = 1;
		q.writes = q.asks = q.sends = q.stalled = q.asking = q.m_fault = q.m_refused = q.ev_refused =
		    0;
		for (lease &it : n.leases) {
			if (it.pc == owner_pc::none || it.peer != i)
				continue;
			it.m_grant = it.m_recall = it.m_answer = it.m_release = 0;
			it.kept = it.releasing = it.ev_grant = it.ev_recall = 0;
			it.posted = it.behind = it.done = 0;
			it.lib = library_pc::released;
		}
	}

	/* --- NIC ---------------------------------------------------------- */

	/* The other end posts a receive, after whatever time. */
	void send_completes(unsigned i)
	{
		if (!s_.peers[i].stalled)
			return;
		state &n = add("NIC", "has a receive, the SEND completes", i);
		n.peers[i].stalled = 0;
		for (lease &l : n.leases)
			if (l.pc != owner_pc::none && l.peer == i)
				l.behind = 0;
	}

	void nic(unsigned l)
	{
		const lease &it = s_.leases[l];
		const unsigned i = it.peer, p = page_of(it);

		if (it.executing == 1) {
			state &n = add("NIC", "completes what has yet to be written", i, l);
			n.leases[l].executing = 2;
			n.leases[l].done = static_cast<u8>(it.done + !s_.peers[i].dead);
		}
		if (it.executing) {
			state &n = add("NIC", it.executing == 1 ? "writes, and completes" : "writes", i, l);
			if (!it.pinned || it.frame != it.to || s_.close == close_pc::returned)
				breaks(n, invariant::i11);
			if (it.executing == 1)
				n.leases[l].done = static_cast<u8>(it.done + !s_.peers[i].dead);
			n.leases[l].executing = n.leases[l].to = 0;
			return;
		}
		if (!it.posted || it.behind)
			return;
		if (it.key) {
			state &n = add("NIC", "executes a WRITE", i, l);
			--n.leases[l].posted;
			n.leases[l].executing = 1;
			n.leases[l].to = n.leaf[p];
			return;
		}
		state &n = add("NIC", "finds the key gone, both QPs end", i, l);
		if (!it.overdue || it.dead_grant)
			breaks(n, invariant::qp);
		die(n, i);
	}
};

} // namespace

void successors(const scenario &sc, mutation m, const state &s, std::vector<step> &out)
{
	expansion(sc, m, s, out).all();
}

state initial(const scenario &sc)
{
	state s{};

	s.changes = sc.changes;
	s.pressure = sc.pressure;
	s.losses = sc.losses;
	s.copies = sc.copies;
	s.give_ups = sc.give_ups;
	s.leaf.fill(scratch_frame);
	for (u8 p = 0; p < sc.pages; ++p) {
		s.frame[p] = p;
		s.used[p] = 1;
	}
	for (unsigned i = 0; i < sc.peers.size(); ++i) {
		s.peers[i].writes = sc.peers[i].writes;
		s.peers[i].asks = sc.peers[i].asks;
		s.peers[i].sends = sc.peers[i].sends;
		s.peers[i].answer = none;
	}
	return s;
}

bool is_final(const scenario &sc, const state &s)
{
	for (unsigned i = 0; i < sc.peers.size(); ++i) {
		const peer &q = s.peers[i];
		if (q.job != job_pc::idle || (q.dead && !q.killed))
			return false;
		if (q.runs == run::running && (q.writes || q.asking || q.ev_refused))
			return false;
	}
	for (const lease &it : s.leases) {
		if (it.pc != owner_pc::none && it.pc != owner_pc::granted && it.pc != owner_pc::ended)
			return false;
		if ((it.due && it.pinned) || it.posted || it.executing)
			return false;
		if (s.peers[it.peer].runs == run::running &&
		    (it.lib == library_pc::ending || it.done || it.releasing || it.ev_grant || it.ev_recall))
			return false;
	}
	return s.close == close_pc::none || s.close == close_pc::returned;
}

invariant blame(const scenario &, const state &s)
{
	return s.close == close_pc::none || s.close == close_pc::returned ? invariant::i10 : invariant::i11;
}

std::string_view name(mutation m)
{
	static constexpr std::array<std::string_view, static_cast<unsigned>(mutation::count)> names = {
	    "none",
	    "change_not_recalled",
	    "pressure_not_recalled",
	    "recall_not_repeated",
	    "busy_not_repeated",
	    "busy_is_gone",
	    "wanted_before_grant_forgotten",
	    "no_time_limit",
	    "limit_keeps_key",
	    "limit_ends_queue_pair",
	    "unpin_before_key",
	    "key_does_not_wait",
	    "count_after_grant",
	    "uncount_before_unpin",
	    "release_ids_reused",
	    "added_to_dead_peer",
	    "kill_keeps_leases",
	    "replay_of_ended",
	    "grant_although_gone",
	    "pin_although_closed",
	    "no_leases_unchecked",
	    "deregistration_does_not_recall",
	    "deregistration_does_not_wait",
	    "deregistration_waits_for_ever",
	    "deregistration_keeps_keys",
	    "gone_while_asked",
	    "gone_while_kept",
	    "recall_not_told",
	    "copy_releases",
	    "late_answer_not_released",
	    "early_recall_forgotten",
	    "post_after_recall",
	    "release_before_completion",
	    "posts_behind_send",
	};
	return names[static_cast<unsigned>(m)];
}

std::string describe(const label &l)
{
	std::string text(l.actor);

	if (l.who != none)
		text += " for initiator " + std::to_string(l.who);
	text += ": ";
	text += l.what;
	if (l.lease != none)
		text += ", lease " + std::to_string(l.lease);
	return text;
}

std::string describe(const scenario &sc, const state &s)
{
	static const char *const owner[] = {"",       "counted",   "pinned",     "keyed", "granted",
					    "ending", "unpinning", "uncounting", "ended"};
	static const char *const library[] = {"", " live", " ending", " released"};
	static const char *const close[] = {"",          " gone",     " waiting",
					    " keys end", " pages go", " gone for good"};
	std::string text = "region" + std::string(close[static_cast<unsigned>(s.close)]);

	for (unsigned p = 0; p < sc.pages; ++p) {
		text +=
		    "; page " + std::to_string(p) + ": owner frame" + std::to_string(s.frame[p]) + " leaf->";
		text += s.leaf[p] == scratch_frame ? "scratch" : "frame" + std::to_string(s.leaf[p]);
	}
	for (unsigned l = 0; l < max_leases; ++l) {
		const lease &it = s.leases[l];
		if (it.pc == owner_pc::none)
			continue;
		text += "; lease " + std::to_string(l) + ": " + owner[static_cast<unsigned>(it.pc)] +
			(it.key ? " key" : "") + (it.pinned ? " pins frame" + std::to_string(it.frame) : "") +
			(it.recalled ? " recalled" : "") + library[static_cast<unsigned>(it.lib)];
		if (users(it))
			text += " WRITEs " + std::to_string(it.posted) + "/" +
				std::to_string(it.executing != 0) + "/" + std::to_string(it.done);
	}
	return text;
}

} // namespace model::lease
