// SPDX-License-Identifier: GPL-2.0
/* A load under leases; np_leaser.h says what it does. */
#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

#include "np_leaser.h"

/* Requests under one lease. It then ends, although nobody asks for it. */
#define MOST_USES	48

static struct np_leaser *of_load;

static size_t offset_of(const struct np_leaser *leaser, unsigned int unit)
{
	size_t off = leaser->load->offset + unit * leaser->unit * PAGE;

	return off / leaser->length * leaser->length;
}

static int give_back(struct np_leaser *leaser, struct np_leaser_lease *lease)
{
	int ret;

	if (!lease->taken)
		return 0;
	lease->taken = false;
	if (leaser->kind == NP_LEASER_REMOTE)
		ret = np_release(leaser->load->peer, lease->hold);
	else
		ret = np_hold_free(leaser->owner->ctx, lease->handle);
	atomic_store(&lease->state, 0);
	return ret;
}

static struct np_leaser_lease *lease_of(struct np_leaser *leaser, const struct rdma_np_event *event)
{
	for (unsigned int i = 0; i < NP_LOAD_PAGES; i++) {
		struct np_leaser_lease *lease = &leaser->lease[i];

		if (!lease->taken)
			continue;
		if (leaser->kind == NP_LEASER_REMOTE ? lease->hold == event->hold_id :
						       i == event->cookie)
			return lease;
	}
	/* It was given back meanwhile. */
	return NULL;
}

static void hear_recall(struct np_leaser *leaser, const struct rdma_np_event *event)
{
	struct np_leaser_lease *lease = lease_of(leaser, event);

	if (!lease)
		return;
	lease->recalled = true;
	atomic_fetch_add(&leaser->recalls, 1);
}

/* Of all events there are; no request is under way. */
static int obey_recalls(struct np_leaser *leaser)
{
	struct np_end end = { .channel = leaser->channel };
	struct rdma_np_event event;
	int ret;

	/* Those of leases that were given back meanwhile are not there any more. */
	while (leaser->seen != *leaser->posted) {
		leaser->seen = *leaser->posted;
		while ((ret = np_next_event(&end, &event, 0)) > 0)
			if (event.type == RDMA_NP_EVENT_RECALL)
				hear_recall(leaser, &event);
		if (ret)
			return ret;
	}
	for (unsigned int i = 0; i < NP_LOAD_PAGES; i++) {
		struct np_leaser_lease *lease = &leaser->lease[i];

		if (!lease->taken || (!lease->recalled && !atomic_load(&leaser->rest)))
			continue;
		ret = give_back(leaser, lease);
		if (ret)
			return ret;
	}
	return 0;
}

/* While a FAULT of the load itself is tried again: it may wait for a lease that is recalled. */
static int obey_while_busy(struct np_load *load)
{
	return obey_recalls(of_load);
}

/* As give_back(), if nobody says meanwhile that leases are kept: then it is there still. */
static int give_back_unasked(struct np_leaser *leaser, struct np_leaser_lease *lease)
{
	unsigned int state;

	if (atomic_load(&leaser->keep))
		return 0;
	state = atomic_exchange(&lease->state, 0);
	/* Who says so looks at the state after that. */
	if (!atomic_load(&leaser->keep))
		return give_back(leaser, lease);
	atomic_store(&lease->state, state);
	return 0;
}

/* The status of the fault; hears recalls meanwhile. */
static int fault(struct np_leaser *leaser, const struct rdma_np_range *range, uint32_t flags,
		 struct rdma_np_event *event)
{
	struct np_end end = *leaser->load->peer;
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	uint64_t cookie = ++leaser->load->peer->cookie;
	int ret;

	end.channel = leaser->channel;
	do {
		ret = np_fault_start(&end, leaser->load->info->region_id, flags, cookie, range, 1);
		if (ret == -EBUSY)
			np_pause();
	} while (ret == -EBUSY && np_now_ms() < deadline);
	if (ret)
		return ret;
	for (;;) {
		ret = np_next_event(&end, event, NP_WAIT_MS);
		if (ret <= 0)
			return ret ? ret : -ETIMEDOUT;
		if (event->type == RDMA_NP_EVENT_RECALL)
			hear_recall(leaser, event);
		else if (event->type == RDMA_NP_EVENT_FAULT && event->cookie == cookie)
			return event->status;
	}
}

static int take_remote(struct np_leaser *leaser, unsigned int unit, bool write)
{
	const struct rdma_np_range range = {
		.addr = leaser->load->info->base + offset_of(leaser, unit),
		.length = leaser->length,
	};
	struct np_leaser_lease *lease = &leaser->lease[unit];
	struct rdma_np_event event = {};
	int ret;

	ret = fault(leaser, &range, RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_LEASE |
				    (write ? RDMA_NP_FAULT_WRITE : 0), &event);
	/* A slot may have holes, of which its other pages know nothing. */
	if (ret == RDMA_NP_BUSY || (ret > 0 && leaser->length > PAGE))
		return -EAGAIN;
	if (ret)
		return ret;
	if (!event.lease_key)
		return -EAGAIN;
	if (event.lease_addr != range.addr || event.lease_length != range.length)
		return -EPROTO;
	lease->hold = event.hold_id;
	lease->key = event.lease_key;
	return 0;
}

static int take_local(struct np_leaser *leaser, unsigned int unit, bool write)
{
	struct np_leaser_lease *lease = &leaser->lease[unit];
	uint64_t addr = (uintptr_t)leaser->data + offset_of(leaser, unit);
	struct rdma_np_hold_info info;
	int64_t ret;

	ret = np_lease(leaser->mr, addr, leaser->length, write ? RDMA_NP_FAULT_WRITE : 0,
		       leaser->channel, unit, &info);
	if (ret == -EBUSY || (ret < 0 && leaser->length > PAGE))
		return -EAGAIN;
	if (ret < 0)
		return ret == -EFAULT ? RDMA_NP_ADDRESS : ret;
	lease->handle = ret;
	lease->key = info.lkey;
	lease->addr = info.addr;
	return 0;
}

static int take(struct np_leaser *leaser, unsigned int unit, bool write)
{
	struct np_leaser_lease *lease = &leaser->lease[unit];
	int ret;

	atomic_store(&lease->state, NP_LEASE_ASKED);
	/* Whoever sets that after this sees that one is asked for. */
	if (atomic_load(&leaser->keep) || atomic_load(&leaser->rest)) {
		atomic_store(&lease->state, 0);
		return -EAGAIN;
	}
	lease->recalled = false;
	lease->write = write;
	lease->uses = 0;
	ret = leaser->kind == NP_LEASER_REMOTE ? take_remote(leaser, unit, write) :
						 take_local(leaser, unit, write);
	if (ret) {
		atomic_store(&lease->state, 0);
		return ret;
	}
	lease->taken = true;
	atomic_store(&lease->state, NP_LEASE_GRANTED | (write ? NP_LEASE_WRITE : 0));
	atomic_fetch_add(&leaser->leases, 1);
	return 0;
}

/* One request of the owner, from or into the page at @addr under @key. */
static int post_local(struct np_leaser *leaser, uint64_t addr, uint32_t key, bool write)
{
	struct np_end *owner = leaser->owner;
	struct ibv_sge sge = { .addr = addr, .length = PAGE, .lkey = key };
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = write ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = {
			.remote_addr = (uintptr_t)leaser->load->peer->buf,
			.rkey = leaser->buf->rkey,
		},
	}, *bad;
	struct ibv_wc wc;
	int ret = ibv_post_send(owner->qp, &wr, &bad);

	return ret ? -ret : np_poll(owner, &wc);
}

/* @addr: under @key; a peer's: also to READ, of the write window if @of_write. */
static int use(struct np_leaser *leaser, size_t off, uint64_t addr, uint32_t key, bool write,
	       bool of_write)
{
	const struct rdma_np_region_info *info = leaser->load->info;
	struct np_end *peer = leaser->load->peer;
	int ret;

	if (leaser->kind == NP_LEASER_LOCAL)
		ret = post_local(leaser, addr, key, write);
	else if (write)
		ret = np_write(peer, 0, PAGE, np_write_addr(info, off), key);
	else
		ret = np_read(peer, 0, PAGE, of_write ? np_write_addr(info, off) :
							np_read_addr(info, off), key);
	return ret > 0 ? -EIO : ret;
}

/* The owner's buffers have to be held at least: there is no other way to use them. */
static int move_local_held(struct np_leaser *leaser, size_t off, bool write)
{
	struct rdma_np_hold_info info;
	int64_t hold;
	int ret;

	hold = np_hold(leaser->mr, (uintptr_t)leaser->data + off, PAGE,
		       write ? RDMA_NP_FAULT_WRITE : 0, &info);
	if (hold < 0)
		return hold == -EFAULT ? RDMA_NP_ADDRESS : hold;
	ret = use(leaser, off, info.addr, info.lkey, write, write);
	np_hold_free(leaser->owner->ctx, hold);
	return ret;
}

static int move(struct np_load *load, unsigned int page, bool write)
{
	struct np_leaser *leaser = of_load;
	unsigned int unit = page / leaser->unit;
	struct np_leaser_lease *lease = &leaser->lease[unit];
	size_t off = load->offset + page * PAGE;
	int ret = obey_recalls(leaser);

	if (ret)
		return ret;
	/* What is not pinned for writing is written by the peer, without a lease. */
	if (write && load->no_holds)
		return -EAGAIN;
	if (lease->taken && (lease->uses >= MOST_USES || (write && !lease->write)))
		ret = give_back_unasked(leaser, lease);
	if (!ret && !lease->taken)
		ret = take(leaser, unit, write);
	else if (!ret && write && !lease->write)
		ret = -EAGAIN;
	if (ret == -EAGAIN && leaser->kind == NP_LEASER_LOCAL)
		return move_local_held(leaser, off, write);
	if (ret)
		return ret;
	/* It may have been recalled while it was on its way here. */
	if (leaser->seen != *leaser->posted) {
		ret = obey_recalls(leaser);
		if (ret)
			return ret;
		if (!lease->taken)
			return leaser->kind == NP_LEASER_LOCAL ?
				       move_local_held(leaser, off, write) : -EAGAIN;
	}
	lease->uses++;
	atomic_fetch_add(&leaser->uses, 1);
	return use(leaser, off, lease->addr + off - offset_of(leaser, unit), lease->key, write,
		   lease->write);
}

int np_leaser_init(struct np_leaser *leaser, enum np_leaser_kind kind, struct np_load *load,
		   struct np_end *owner, struct ibv_mr *mr, bool slots)
{
	void *page;

	leaser->load = load;
	leaser->owner = owner;
	leaser->mr = mr;
	leaser->data = load->data - load->offset;
	leaser->kind = kind;
	leaser->unit = slots ? load->pages / 2 : 1;
	leaser->length = slots ? HUGE_PAGE : PAGE;
	if (kind == NP_LEASER_NONE)
		return 0;
	/* Events of both kinds tell how many there are; a channel belongs to a device. */
	leaser->channel = np_channel(kind == NP_LEASER_REMOTE ? load->peer->ctx : owner->ctx);
	if (leaser->channel < 0)
		return leaser->channel;
	page = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, leaser->channel, 0);
	if (page == MAP_FAILED)
		return -errno;
	leaser->posted = page;
	leaser->buf = ibv_reg_mr(load->peer->pd, load->peer->buf, PAGE, NP_RIGHTS);
	if (!leaser->buf)
		return -errno;
	of_load = leaser;
	load->move = move;
	load->busy = obey_while_busy;
	return 0;
}

static bool waits_in_vain(struct np_leaser *leaser)
{
	return atomic_load(&leaser->load->stop);
}

bool np_leaser_has_all(struct np_leaser *leaser, unsigned int first, unsigned int n)
{
	const bool write = atomic_load(&leaser->load->writes_of_8) && !leaser->load->no_holds;
	const unsigned int want = NP_LEASE_GRANTED | (write ? NP_LEASE_WRITE : 0);

	for (unsigned int i = first; i < first + n; i++)
		if ((atomic_load(&leaser->lease[i / leaser->unit].state) & want) != want)
			return false;
	return true;
}

static bool keep(struct np_leaser *leaser, unsigned int first, unsigned int n)
{
	if (!np_leaser_has_all(leaser, first, n))
		return false;
	atomic_store(&leaser->keep, true);
	/* One may have been given back just before. */
	if (np_leaser_has_all(leaser, first, n))
		return true;
	atomic_store(&leaser->keep, false);
	return false;
}

bool np_leaser_begin(struct np_leaser *leaser, unsigned int first, unsigned int n)
{
	if (leaser->kind == NP_LEASER_NONE)
		return !waits_in_vain(leaser);
	return np_wait_until(keep(leaser, first, n) || waits_in_vain(leaser)) &&
	       !waits_in_vain(leaser);
}

void np_leaser_goes_on(struct np_leaser *leaser)
{
	atomic_store(&leaser->keep, false);
}

bool np_leaser_has_none(struct np_leaser *leaser, unsigned int first, unsigned int n, bool to_write)
{
	const unsigned int bad = to_write ? NP_LEASE_WRITE : NP_LEASE_WRITE | NP_LEASE_GRANTED;

	for (unsigned int i = first; i < first + n; i++)
		if (atomic_load(&leaser->lease[i / leaser->unit].state) & bad)
			return false;
	return true;
}

bool np_leaser_end(struct np_leaser *leaser, unsigned int first, unsigned int n, bool to_write)
{
	bool ok = leaser->kind != NP_LEASER_REMOTE ||
		  (np_wait_until(np_leaser_has_none(leaser, first, n, to_write) ||
				 waits_in_vain(leaser)) && !waits_in_vain(leaser));

	np_leaser_goes_on(leaser);
	return ok;
}

unsigned long np_leaser_recalls(struct np_leaser *leaser)
{
	/* Nothing else is told to this channel. */
	if (leaser->kind == NP_LEASER_LOCAL)
		return *leaser->posted;
	return atomic_load(&leaser->recalls);
}

bool np_leaser_rest(struct np_leaser *leaser, bool rest)
{
	bool none = true;

	atomic_store(&leaser->rest, rest);
	if (leaser->kind == NP_LEASER_NONE || !rest)
		return true;
	for (unsigned int i = 0; none && i < NP_LOAD_PAGES; i++)
		none = np_wait_until(!atomic_load(&leaser->lease[i].state) ||
				     waits_in_vain(leaser));
	return none;
}

/* --- one at a time, without the load ------------------------------------------------- */

int np_leaser_take(struct np_leaser *leaser, unsigned int page, bool write)
{
	int ret = -EAGAIN;

	/* Who else is at work on the page may have been in the way. */
	np_wait_until((ret = take(leaser, page / leaser->unit, write)) != -EAGAIN);
	return ret;
}

int np_leaser_use(struct np_leaser *leaser, unsigned int page, bool write)
{
	const unsigned int unit = page / leaser->unit;
	struct np_leaser_lease *lease = &leaser->lease[unit];
	size_t off = leaser->load->offset + page * PAGE;

	if (!lease->taken)
		return -ENOENT;
	return use(leaser, off, lease->addr + off - offset_of(leaser, unit), lease->key, write,
		   lease->write);
}

bool np_leaser_is_recalled(struct np_leaser *leaser, unsigned int page, bool wait)
{
	const int timeout_ms = wait && leaser->kind == NP_LEASER_REMOTE ? NP_WAIT_MS : 0;
	struct np_leaser_lease *lease = &leaser->lease[page / leaser->unit];
	struct np_end end = { .channel = leaser->channel };
	struct rdma_np_event event;

	while (!lease->recalled && np_next_event(&end, &event, timeout_ms) > 0)
		if (event.type == RDMA_NP_EVENT_RECALL)
			hear_recall(leaser, &event);
	return lease->recalled;
}

int np_leaser_give_back(struct np_leaser *leaser, unsigned int page)
{
	struct np_leaser_lease *lease = &leaser->lease[page / leaser->unit];

	return lease->taken ? give_back(leaser, lease) : -ENOENT;
}
