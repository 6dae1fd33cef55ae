// SPDX-License-Identifier: GPL-2.0
/*
 * Serving a peer: what we do for it with our memory.
 *
 * A FAULT is executed once, however often it arrives: see struct np_lane.  It waits for
 * its turn among those of the memory's owner, and then for the memory, for as long as the
 * owner likes.  Nothing waits for it, neither the end of its peer nor that of the device:
 * it keeps only the memory of its peer, and finds the peer dead when it is done.
 *
 * Where neither has to be waited for it is served in the handler in which it arrived, which
 * saves the way over a worker: for a page that is in memory, a sixth of the time from the
 * system call that sends the FAULT to its event.
 */
#include <linux/ktime.h>
#include <linux/moduleparam.h>
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "np_proto.h"
#include "peer_trace.h"

static unsigned int np_fault_around = 16;
module_param_named(fault_around, np_fault_around, uint, 0644);
MODULE_PARM_DESC(fault_around,
		 "Pages of an aligned block that come with a fault for reading if the owner has them, at most 512; 1: none; over 16 no such fault is served at once");

static bool np_at_once = true;
module_param_named(fault_at_once, np_at_once, bool, 0644);
MODULE_PARM_DESC(fault_at_once,
		 "Serve a fault where it arrives, without a worker, if nothing has to be waited for");

/**
 * struct np_serve_lane - a lane of the other end
 * @lane: what was answered in it
 * @job: serves the FAULT
 * @peer: reference while it is served
 * @region: reference while it is served
 * @owner: of that; reference while it is served
 * @msg: the FAULT
 */
struct np_serve_lane {
	struct np_lane lane;
	struct np_job job;
	struct np_peer *peer;
	struct np_region *region;
	struct np_owner *owner;
	struct np_msg msg;
};

struct np_serve {
	struct np_serve_lane lanes[NP_LANES];
};

/* Who has more FAULTs under way does not wait for each of them */
#define NP_AT_ONCE_DEPTH	4

static unsigned int np_range_pages(const struct rdma_np_range *range)
{
	return ((range->addr + range->length - 1) >> RDMA_NP_PAGE_SHIFT) -
	       (range->addr >> RDMA_NP_PAGE_SHIFT) + 1;
}

static unsigned int np_fault_pages(const struct np_msg *msg)
{
	unsigned int i, pages = 0;

	for (i = 0; i < msg->fault.nr_ranges; i++)
		pages += np_range_pages(&msg->fault.ranges[i]);
	return pages;
}

static int np_fault_ranges(struct np_serve_lane *sl, struct np_hold *hold,
			   struct np_msg *answer)
{
	const struct rdma_np_range *range = sl->msg.fault.ranges;
	unsigned int i, nr_words, nr = sl->msg.fault.nr_ranges;
	int err;

	/* The other one says how far a lease may reach */
	if (sl->msg.fault.flags & RDMA_NP_FAULT_LEASE)
		nr = 1;

	nr_words = min_t(unsigned int, np_range_pages(range), RDMA_NP_EVENT_WORDS);
	for (i = 0; i < nr; i++) {
		err = np_region_fault(sl->region, range[i].addr,
				      range[i].length,
				      sl->msg.fault.flags & RDMA_NP_FAULT_WRITE,
				      hold, i ? NULL : answer->faulted.words,
				      i ? 0 : nr_words);
		if (err)
			return err;
	}
	answer->faulted.nr_words = nr_words;
	return 0;
}

/*
 * What a lease is of beside the pages that were asked for is what peers reach already, and is
 * still there. The answer waits for nothing else. If all of it can be held at once that is done: a
 * leaf of 2 MiB stays one under a hold of all of it, and is cut by a hold of a part.
 */
static int np_fault_lease(struct np_serve_lane *sl, struct np_held *held,
			  struct np_msg *answer)
{
	const struct rdma_np_range *most =
		&sl->msg.fault.ranges[sl->msg.fault.nr_ranges - 1];
	u32 present = (sl->msg.fault.flags & RDMA_NP_FAULT_WRITE) | NP_FAULT_PRESENT;
	struct rdma_np_range asked = sl->msg.fault.ranges[0], all;
	u64 before, behind;
	int err;

	err = np_fault_ranges(sl, NULL, answer);
	if (err)
		return err;
	/* Of two slots one might be held, and the other one not */
	if (np_region_around(sl->region, present, &asked, &all, most) &&
	    !np_region_fault(sl->region, all.addr, all.length, present, held->hold, NULL, 0))
		goto grant;
	err = np_fault_ranges(sl, held->hold, answer);
	if (err)
		return err;
	np_region_around(sl->region, present, &asked, &all, most);
	before = asked.addr - all.addr;
	if (before && np_region_fault(sl->region, all.addr, before, present, held->hold, NULL,
				      0)) {
		all.addr += before;
		all.length -= before;
	}
	behind = all.addr + all.length - (asked.addr + asked.length);
	if (behind && np_region_fault(sl->region, asked.addr + asked.length, behind, present,
				      held->hold, NULL, 0))
		all.length -= behind;
grant:
	np_held_shrink(held, np_range_pages(&all));
	answer->faulted.lease_addr = all.addr;
	answer->faulted.lease_length = all.length;
	return np_hold_grant(held->hold, all.addr, all.length, &answer->faulted.lease_key);
}

static int np_fault_held(struct np_serve_lane *sl, struct np_msg *answer)
{
	bool lease = sl->msg.fault.flags & RDMA_NP_FAULT_LEASE;
	unsigned int pages = np_fault_pages(&sl->msg);
	struct np_peer *peer = sl->peer;
	struct np_held *held;
	int err;

	if (lease)
		pages = np_range_pages(&sl->msg.fault.ranges[sl->msg.fault.nr_ranges - 1]);
	held = np_held_make(peer, sl->region, sl->owner, pages, sl->msg.fault.flags);
	if (IS_ERR(held) && lease)
		return np_fault_ranges(sl, NULL, answer);
	if (IS_ERR(held))
		return PTR_ERR(held);
	answer->faulted.hold_id = held->id;

	if (lease)
		err = np_fault_lease(sl, held, answer);
	else
		err = np_fault_ranges(sl, held->hold, answer);
	if (!err && !np_held_add(peer, held))
		err = -ENOTCONN;
	if (!err)
		return 0;
	np_held_drop(peer, held);
	answer->faulted.hold_id = 0;
	answer->faulted.lease_key = 0;
	/* Not all memory can be pinned, for which pages need no lease */
	return lease && err != -ENOTCONN ? np_fault_ranges(sl, NULL, answer) : err;
}

/* The FAULT of a lane was served. */
static void np_fault_served(struct np_serve_lane *sl, struct np_msg *answer,
			    bool queued)
{
	struct np_peer *peer = sl->peer;
	bool alive = np_peer_begin(peer);

	/* Else the device may be gone by now */
	if (alive)
		trace_np_fault_serve(peer->hca->ibdev, peer->qpn, sl->msg.tid,
				     sl->msg.fault.region_id, queued,
				     answer->status);
	spin_lock(&peer->lock);
	np_lane_answer(&sl->lane, answer);
	peer->faulting--;
	spin_unlock(&peer->lock);
	/* The lane may be used again from here on */
	if (alive) {
		np_answer_peer(peer, answer);
		np_peer_end(peer);
	}
	np_peer_put(peer);
}

/* The part of the region in the aligned blocks that a range touches */
static struct rdma_np_range np_fault_block(struct np_region *region,
					   const struct rdma_np_range *range, u64 block)
{
	struct rdma_np_range all;
	struct np_resolve what;
	u64 last, end, rest;

	np_region_describe(region, &what);
	end = what.base + (what.length - 1);
	all.addr = max(what.base, range->addr - range->addr % block);
	last = range->addr + (range->length - 1);
	rest = block - 1 - last % block;
	last = end - last > rest ? last + rest : end;
	all.length = last - all.addr + 1;
	return all;
}

/* Size of such a block in bytes; PAGE_SIZE: nothing comes along */
static u64 np_fault_block_size(void)
{
	return clamp_t(u64, READ_ONCE(np_fault_around), 1, RDMA_NP_MAX_PAGES)
	       << RDMA_NP_PAGE_SHIFT;
}

/*
 * What lies around the pages that were asked for is likely to be asked for next.
 * What the owner's page tables have of it comes along; nothing is read from a disk,
 * and nothing becomes writable, because that would make it dirty.
 */
static void np_fault_neighbours(struct np_region *region,
				const struct rdma_np_range *range)
{
	u64 block = np_fault_block_size();
	struct rdma_np_range all;

	if (block == RDMA_NP_PAGE_SIZE)
		return;
	all = np_fault_block(region, range, block);
	np_region_fault(region, all.addr, all.length,
			NP_FAULT_PRESENT | NP_FAULT_AROUND, NULL, NULL, 0);
}

static void np_fault_job(struct np_job *job)
{
	struct np_serve_lane *sl = container_of(job, struct np_serve_lane, job);
	struct np_region *region = sl->region;
	struct np_owner *owner = sl->owner;
	struct rdma_np_range ranges[RDMA_NP_MAX_RANGES];
	unsigned int i, nr_ranges = 0;
	struct np_msg answer;
	int err;

	np_answer_init(&answer, &sl->msg, RDMA_NP_OK);
	if (READ_ONCE(sl->peer->dead))
		err = -ENOTCONN;
	else if (sl->msg.fault.flags & RDMA_NP_FAULT_HOLD)
		err = np_fault_held(sl, &answer);
	else
		err = np_fault_ranges(sl, NULL, &answer);
	/*
	 * Whoever asks whether a hold lived must hear of a region's end, also if a
	 * hole in its memory or a lack of ours was met first.
	 */
	if (err && np_region_is_gone(sl->region))
		err = -ENXIO;
	answer.status = np_errno_to_status(err);
	if (!err && !sl->msg.fault.flags) {
		nr_ranges = sl->msg.fault.nr_ranges;
		memcpy(ranges, sl->msg.fault.ranges,
		       nr_ranges * sizeof(ranges[0]));
	}
	np_fault_served(sl, &answer, true);
	/* The peer does not wait for these, and the lane is not ours any more */
	for (i = 0; i < nr_ranges; i++)
		np_fault_neighbours(region, &ranges[i]);
	np_region_put(region);
	np_owner_end(owner);
	np_owner_put(owner);
}

/*
 * Serve a FAULT in the handler in which it arrived, if it has its turn at once, and
 * nothing has to be waited for. Else nothing has happened, and it goes to its owner's queue.
 *
 * Behind this one others wait for the handler, of all owners and queue pairs. So they wait
 * for it only half of the time: as long as it took nothing is served here again. What
 * arrives meanwhile waits in the owners' queues, where it is sorted, and as long as
 * something does, nothing of that owner is served here. And so that those who have many
 * FAULTs under way do not take this from those who wait for each, it is for the latter, who
 * may have a few others that take long: for a lease, or from a disk.
 */
static bool np_fault_at_once(struct np_serve_lane *sl, unsigned int depth)
{
	const struct rdma_np_range *range = sl->msg.fault.ranges;
	u32 flags = sl->msg.fault.flags;
	struct np_owner *owner = sl->owner;
	struct np_port *port = sl->peer->port;
	struct rdma_np_range around = *range;
	struct np_msg answer;
	u64 begin, until;
	bool done;

	if (!READ_ONCE(np_at_once) || depth > NP_AT_ONCE_DEPTH || flags & RDMA_NP_FAULT_HOLD ||
	    sl->msg.fault.nr_ranges > 1)
		return false;
	begin = ktime_get_ns();
	if (begin < READ_ONCE(port->at_once_from) || np_owner_has_waiting(owner))
		return false;
	np_answer_init(&answer, &sl->msg, RDMA_NP_OK);
	answer.faulted.nr_words = min_t(unsigned int, np_range_pages(range),
					RDMA_NP_EVENT_WORDS);
	/* As in np_fault_job() */
	if (!flags)
		around = np_fault_block(sl->region, range, np_fault_block_size());
	/* If nobody else has the region any more, a worker frees it, and looks once again */
	done = np_region_fault_at_once(sl->region, range, &around, flags,
				       answer.faulted.words, answer.faulted.nr_words) &&
	       np_region_put_unless_last(sl->region);
	until = 2 * ktime_get_ns() - begin;
	/* The port's other handler, for MADs or for the quick transport, may have been longer */
	if (until > READ_ONCE(port->at_once_from))
		WRITE_ONCE(port->at_once_from, until);
	if (!done)
		return false;
	np_fault_served(sl, &answer, false);
	np_owner_end(owner);
	np_owner_put(owner);
	return true;
}

/**
 * np_serve_fault - A FAULT arrived
 * @peer: of whom
 * @msg: the request
 *
 * Context: handler of what arrives: process context, does not sleep
 */
void np_serve_fault(struct np_peer *peer, const struct np_msg *msg)
{
	enum np_lane_verdict verdict;
	struct np_serve_lane *sl;
	unsigned int depth;
	struct np_msg answer;

	spin_lock(&peer->lock);
	if (peer->dead || !peer->serve) {
		spin_unlock(&peer->lock);
		np_answer_status(peer, msg, peer->dead ? RDMA_NP_QP : RDMA_NP_GONE);
		return;
	}
	sl = &peer->serve->lanes[msg->fault.lane];
	verdict = np_lane_arrive(&sl->lane, msg);
	if (verdict == NP_LANE_REPLAY) {
		answer = sl->lane.answer;
		np_held_answered(peer, &answer);
	}
	peer->faulting += verdict == NP_LANE_NEW;
	depth = peer->faulting;
	spin_unlock(&peer->lock);

	switch (verdict) {
	case NP_LANE_NEW:
		break;
	case NP_LANE_REPLAY:
		answer.quick = msg->quick;
		np_answer_peer(peer, &answer);
		return;
	case NP_LANE_WORKING:
		np_answer_status(peer, msg, NP_WIRE_WORKING);
		return;
	case NP_LANE_BUSY:
		np_answer_status(peer, msg, RDMA_NP_BUSY);
		return;
	case NP_LANE_STALE:
		return;
	}

	/* The lane is ours until np_lane_answer() */
	kref_get(&peer->ref);
	sl->peer = peer;
	sl->msg = *msg;
	sl->region = np_grant_begin(peer, msg->fault.region_id, depth, &sl->owner);
	if (!IS_ERR(sl->region)) {
		if (!np_fault_at_once(sl, depth))
			np_owner_serve(sl->owner, &sl->job, depth);
		return;
	}
	np_answer_init(&answer, msg, PTR_ERR(sl->region) == -EBUSY ?
				     NP_WIRE_FULL : RDMA_NP_GONE);
	np_fault_served(sl, &answer, false);
}

VISIBLE_IF_KUNIT int np_serve_alloc(struct np_peer *peer)
{
	struct np_serve *serve;
	unsigned int i;

	if (peer->serve)
		return 0;
	serve = kvzalloc(sizeof(*serve), GFP_KERNEL_ACCOUNT);
	if (!serve)
		return -ENOMEM;
	for (i = 0; i < NP_LANES; i++)
		serve->lanes[i].job.serve = np_fault_job;
	spin_lock(&peer->lock);
	peer->serve = serve;
	spin_unlock(&peer->lock);
	return 0;
}
EXPORT_SYMBOL_IF_KUNIT(np_serve_alloc);

/**
 * np_serve_resolve - Serve a RESOLVE
 * @peer: of whom; np_peer.ctl is held
 * @msg: the request
 * @out: the answer, on success
 *
 * Context: process context, may sleep
 * Return: 0 or a negative errno
 */
int np_serve_resolve(struct np_peer *peer, const struct np_msg *msg,
		     struct np_resolve *out)
{
	struct np_region *named, *region;
	struct np_charge charge;
	struct np_pgrant *pg;
	bool made;
	int err;

	named = np_region_find_rkey(peer->hca->ibdev, msg->rkey);
	/* Whose PD it is not must not learn that it exists */
	if (!named)
		return np_promise_none(peer->hca->ibdev, msg->rkey, NULL,
				       &peer->promised);
	if (np_region_pd(named) != peer->pd) {
		err = -EACCES;
		goto out;
	}
	/* If it is of the whole address space: what is granted is a part of it */
	region = np_region_at(named, msg->addr);
	if (IS_ERR(region)) {
		err = PTR_ERR(region);
		goto out;
	}

	pg = np_pgrant_find(peer, np_region_id(region));
	made = !pg;
	if (made) {
		np_region_charge(region, &charge);
		err = np_serve_alloc(peer);
		pg = err ? ERR_PTR(err) : np_pgrant_make(peer, region);
		np_region_uncharge(&charge);
		if (IS_ERR(pg)) {
			err = PTR_ERR(pg);
			goto put;
		}
	}
	err = np_region_resolve(region, out);
	out->max_pages = RDMA_NP_MAX_PAGES;
	out->max_ranges = RDMA_NP_MAX_RANGES;
	out->lanes = NP_LANES;
	if (!err)
		np_pgrant_resolved(pg, msg->tid);
	else if (made)
		np_pgrant_drop(pg);
put:
	np_region_put(region);
out:
	/* A region that is gone is no region, and any other error may pass */
	if (err == -EACCES || err == -EPERM || err == -ENXIO)
		err = np_promise_none(peer->hca->ibdev, msg->rkey, named,
				      &peer->promised);
	np_region_put(named);
	return err;
}

/**
 * np_serve_release - Serve a RELEASE
 * @peer: of whom
 * @msg: the request
 *
 * Context: handler of what arrives: process context, does not sleep
 */
void np_serve_release(struct np_peer *peer, const struct np_msg *msg)
{
	np_held_release(peer, msg->hold_id);
	np_answer_status(peer, msg, RDMA_NP_OK);
}

/**
 * np_serve_forget - Serve a FORGET
 * @peer: of whom; np_peer.ctl is held
 * @msg: the request
 *
 * Context: process context, may sleep
 */
void np_serve_forget(struct np_peer *peer, const struct np_msg *msg)
{
	np_grant_forget(peer, msg);
}

/**
 * np_serve_init - Prepare a peer's part of serving
 * @peer: zeroed
 */
void np_serve_init(struct np_peer *peer)
{
	np_held_init(peer);
	np_grant_init(peer);
}

/**
 * np_serve_leave - The device is leaving
 * @peer: of it
 */
void np_serve_leave(struct np_peer *peer)
{
	np_held_leave(peer);
}

/**
 * np_serve_kill - The QP is not connected any more: undo what we did for it
 * @peer: dead, and nobody serves it
 */
void np_serve_kill(struct np_peer *peer)
{
	np_held_kill(peer);
	np_grant_kill(peer);
}
EXPORT_SYMBOL_IF_KUNIT(np_serve_kill);
