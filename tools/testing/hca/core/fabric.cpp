// SPDX-License-Identifier: GPL-2.0
/*
 * The switch, the scheduler and the hand-over from other threads.
 */
#include "fabric.h"

#include <algorithm>
#include <thread>

#include "administrator.h"
#include "device.h"
#include "link.h"
#include "qp.h"

namespace nphca {

packet *packet_pool::get(size_t reserve) noexcept
{
	if (!available(reserve))
		return nullptr;
	if (free_.empty()) {
		try {
			free_.reserve(capacity);
			all_.push_back(std::make_unique<packet>());
		} catch (const std::bad_alloc &) {
			return nullptr;
		}
		free_.push_back(all_.back().get());
	}
	packet *p = free_.back();
	free_.pop_back();
	++used_;
	p->opcode = p->sl = p->syndrome = 0;
	p->ack_req = p->solicited = p->has_grh = p->ethernet = false;
	p->slid = p->dlid = 0;
	p->kind = network::grh;
	p->pkey = 0xffff;
	p->sqpn = p->psn = p->msn = 0;
	p->qkey = p->rkey = p->length = p->imm = p->srqn = 0;
	p->va = p->operand = p->compare = 0;
	p->placeable = false;
	p->offset = 0;
	p->size = 0;
	return p;
}

void packet_pool::put(packet *p) noexcept
{
	free_.push_back(p); /* cannot allocate: get() reserved for all */
	--used_;
}

fabric::fabric(const nphca_fabric_ops &ops, void *host) : ops_(ops), host_(host)
{
	postings_.reserve(1024);
	taken_.reserve(1024);
}

fabric::~fabric() = default;

/*
 * Called by vCPU threads. The queue is bounded; a guest that fills it faster
 * than it is emptied loses register accesses, as it would overrun a bus.
 */
void fabric::post(const posting &p) noexcept
{
	{
		std::lock_guard lock(mutex_);
		if (postings_.size() >= max_postings && p.size)
			return;
		try {
			postings_.push_back(p);
		} catch (const std::bad_alloc &) {
			return;
		}
		/* Release: what was posted before the count says so. */
		posted_.store(postings_.size(), std::memory_order_release);
	}
	ops_.wake(host_);
}

bool fabric::run_postings()
{
	if (!pending())
		return false;
	{
		std::lock_guard lock(mutex_);
		taken_.swap(postings_);
		/* Relaxed: under the mutex, and read as a hint. */
		posted_.store(0, std::memory_order_relaxed);
	}
	for (const posting &p : taken_)
		/* A device may have been removed after it posted. */
		if (std::find(ports_.begin(), ports_.end(), p.dev) != ports_.end())
			p.dev->handle_posting(p);
	taken_.clear();
	return true;
}

bool fabric::add(device *dev, uint16_t lid)
{
	if (!lid || lid >= first_multicast_lid || by_lid_[lid] || (!ports_.empty() && dev->ethernet != is_ethernet()))
		return false;
	{
		const std::lock_guard lock(mutex_);
		ports_.push_back(dev);
	}
	by_lid_[lid] = dev;
	learn_macs();
	return true;
}

bool fabric::is_ethernet() const noexcept
{
	return !ports_.empty() && ports_.front()->ethernet;
}

/* Of two ports with one address the older one has it. */
void fabric::learn_macs()
{
	by_mac_.clear();
	for (device *port : ports_)
		if (port->ethernet) {
			by_mac_.emplace(port->mac(), port);
			for (const roce_address &a : port->addresses)
				if (a.valid)
					by_mac_.emplace(a.mac, port);
		}
}

/* Nothing of @dev may be looked up any more; its QPs are gone already. */
void fabric::remove(device *dev)
{
	for (auto &port : by_lid_)
		if (port == dev)
			port = nullptr;
	std::erase_if(by_mac_, [dev](const auto &m) { return m.second == dev; });
	std::lock_guard lock(mutex_);
	std::erase(ports_, dev);
	std::erase_if(postings_, [dev](const posting &p) { return p.dev == dev; });
}

/*
 * Called by the thread that invalidated translations. The limit only matters to a
 * guest that points DMA at registers of a device, where the polling thread may wait
 * for a lock that the caller holds. It is counted, as it breaks what was promised.
 */
void fabric::drain() noexcept
{
	const std::lock_guard lock(mutex_);

	if (std::any_of(ports_.begin(), ports_.end(), [](const device *d) { return d->knob(NPHCA_NO_DRAIN); }))
		return;
	/* After the invalidation; pairs with begin_dma(), and so is a write, too. */
	const uint64_t seq = dma_seq_.fetch_add(0, std::memory_order_acq_rel);
	if (seq & 1) {
		const uint64_t start = now();
		while (dma_seq_.load(std::memory_order_acquire) == seq) {
			if (now() - start > drain_limit) {
				for (device *d : ports_)
					d->count(NPHCA_DRAIN_TIMEOUTS);
				break;
			}
			std::this_thread::yield();
		}
	}
	for (device *d : ports_)
		d->posted.commit_all();
}

uint16_t fabric::free_lid() const noexcept
{
	for (uint16_t lid = 1; lid < first_multicast_lid; ++lid)
		if (!by_lid_[lid])
			return lid;
	return 0;
}

bool fabric::join(const nphca_link_ops &ops, void *host)
{
	if (link_)
		return false;
	link_ = std::make_unique<link>(*this, ops, host);
	return true;
}

void fabric::deliver(packet &p)
{
	if (is_for_administrator(p)) {
		administer(p);
		deliver_from_link(p);
		return;
	}
	deliver_from_link(p);
	if (link_ && !to(p))
		link_->send(p);
}

void fabric::deliver_from_link(packet &p)
{
	if (!is_multicast(p)) {
		if (device *port = to(p))
			port->receive(p);
		return;
	}
	for (device *port : ports_)
		port->receive(p);
}

bool fabric::run_link()
{
	const bool more = link_->poll();

	if (!waiting_.empty() && !link_->blocked()) {
		for (const handle &h : waiting_)
			if (qp *q = find(h)) {
				q->waiting = false;
				ready(*q);
			}
		waiting_.clear();
	}
	return more;
}

static bool is_request(uint8_t opcode) noexcept
{
	switch (opcode) {
	case BTH_ACK:
	case BTH_ATOMIC_ACK:
	case BTH_READ_FIRST:
	case BTH_READ_MIDDLE:
	case BTH_READ_LAST:
	case BTH_READ_ONLY:
		return false;
	default:
		return !(opcode & BTH_CLASS);
	}
}

/* Requests to a port that takes them out of order come out of order: every other one is late. */
bool fabric::hold_back(packet *p)
{
	device *port = to(*p);
	const uint64_t latest = port ? port->knob(NPHCA_OUT_OF_ORDER) : 0;

	if (!latest || !is_request(p->opcode) || port->random() & 1)
		return false;
	late_.push_back({now() + 1 + port->random() % latest, p});
	std::push_heap(late_.begin(), late_.end(), std::greater<>());
	return true;
}

bool fabric::run_late(uint64_t *deadline)
{
	bool any = false;

	while (!late_.empty()) {
		const late_packet first = late_.front();
		if (first.when > now()) {
			*deadline = std::min(*deadline, first.when);
			break;
		}
		std::pop_heap(late_.begin(), late_.end(), std::greater<>());
		late_.pop_back();
		deliver(*first.p);
		pool.put(first.p);
		any = true;
	}
	return any;
}

void fabric::forget(const qp &q) noexcept
{
	const auto to_it = [&](const late_packet &l) { return to(*l.p) == &q.dev && l.p->dqpn == q.qpn; };

	for (const late_packet &l : late_)
		if (to_it(l))
			pool.put(l.p);
	if (std::erase_if(late_, to_it))
		std::make_heap(late_.begin(), late_.end(), std::greater<>());
}

bool fabric::run_wire()
{
	constexpr int turn = 256;

	for (int i = 0; i < turn; ++i) {
		if (wire_.empty())
			return i > 0;
		packet *p = wire_.front();
		wire_.pop_front();
		if (hold_back(p))
			continue;
		deliver(*p);
		pool.put(p);
	}
	return true;
}

qp *fabric::find(const handle &h) noexcept
{
	if (std::find(ports_.begin(), ports_.end(), h.dev) == ports_.end())
		return nullptr;
	return h.dev->qps.find(h.qpn);
}

void fabric::ready(qp &q) noexcept
{
	if (q.queued)
		return;
	q.queued = true;
	ready_.push_back({&q.dev, q.qpn});
}

/*
 * Each QP has at most one entry, which is moved on when it comes up too early:
 * deadlines change with every acknowledgement, and mostly to later.
 */
void fabric::set_timer(qp &q, uint64_t when) noexcept
{
	const bool earlier = when < q.deadline;

	q.deadline = when;
	if (when == UINT64_MAX || (q.timer_queued && !earlier))
		return;
	q.timer_queued = true;
	timers_.push({when, {&q.dev, q.qpn}});
}

bool fabric::run_ready()
{
	/* Only those that wait now: one that goes on takes its next turn later. */
	size_t n = std::min<size_t>(ready_.size(), 64);
	const bool any = n > 0;

	while (n--) {
		const handle h = ready_.front();
		ready_.pop_front();
		if (qp *q = find(h)) {
			q->queued = false;
			if (!link_ || !link_->blocked() || !q->sends_to_others()) {
				q->turn();
			} else if (!q->waiting) {
				q->waiting = true;
				waiting_.push_back(h);
			}
		}
	}
	return any;
}

bool fabric::run_timers(uint64_t *deadline)
{
	bool any = false;

	*deadline = UINT64_MAX;
	if (timers_.empty())
		return false;
	const uint64_t t = now();
	while (!timers_.empty()) {
		const timer first = timers_.top();
		if (first.when > t) {
			*deadline = first.when;
			break;
		}
		timers_.pop();
		qp *q = find(first.h);
		if (!q)
			continue;
		q->timer_queued = false;
		if (q->deadline <= t) {
			q->deadline = UINT64_MAX;
			q->timer();
			any = true;
		} else if (q->deadline != UINT64_MAX) {
			q->timer_queued = true;
			timers_.push({q->deadline, first.h});
		}
	}
	return any;
}

void fabric::ready_when_placed(qp &q)
{
	if (q.placing)
		return;
	q.placing = true;
	placing_.push_back({&q.dev, q.qpn});
}

void fabric::run_posted(uint64_t *deadline) noexcept
{
	for (device *port : ports_)
		if (port->posted.any()) {
			port->posted.commit_due(now());
			*deadline = std::min(*deadline, port->posted.deadline());
		}
	std::erase_if(placing_, [this](const handle &h) {
		qp *q = find(h);
		if (!q)
			return true;
		q->placing = q->waits_for_placement();
		if (!q->placing)
			ready(*q);
		return !q->placing;
	});
}

bool fabric::poll(uint64_t *deadline)
{
	bool more = run_postings();

	if (link_)
		more |= run_link();
	more |= run_wire();
	more |= run_ready();
	more |= run_timers(deadline);
	if (!late_.empty())
		more |= run_late(deadline);
	run_posted(deadline);
	if (link_)
		*deadline = std::min(*deadline, link_->deadline());
	return more || !wire_.empty() || !ready_.empty();
}

} // namespace nphca

using namespace nphca;

struct nphca_fabric {
	nphca_fabric(const nphca_fabric_ops &ops, void *host) : f(ops, host) {}
	fabric f;
};

struct nphca_device {
	nphca_device(fabric &f, uint16_t lid, const nphca_config &config, const nphca_host_ops &ops, void *host)
		: d(f, lid, config, ops, host)
	{
	}
	device d;
};

extern "C" {

struct nphca_fabric *nphca_fabric_new(const struct nphca_fabric_ops *ops, void *host)
try {
	return new nphca_fabric(*ops, host);
} catch (...) {
	return nullptr;
}

void nphca_fabric_free(struct nphca_fabric *f)
{
	delete f;
}

bool nphca_fabric_poll(struct nphca_fabric *f, uint64_t *deadline)
try {
	return f->f.poll(deadline);
} catch (...) {
	/* Out of memory in the middle of a turn: what was lost is retried. */
	*deadline = f->f.now();
	return true;
}

bool nphca_fabric_pending(const struct nphca_fabric *f)
{
	return f->f.pending();
}

struct nphca_device *nphca_device_new(struct nphca_fabric *f, const struct nphca_config *config,
				      const struct nphca_host_ops *ops, void *host)
try {
	const uint16_t lid = config->lid ? config->lid : f->f.free_lid();
	auto dev = std::make_unique<nphca_device>(f->f, lid, *config, *ops, host);

	if (!f->f.add(&dev->d, lid))
		return nullptr;
	return dev.release();
} catch (...) {
	return nullptr;
}

void nphca_device_free(struct nphca_device *dev)
{
	if (!dev)
		return;
	dev->d.reset();
	dev->d.fab.remove(&dev->d);
	delete dev;
}

uint64_t nphca_mmio_read(struct nphca_device *dev, uint64_t offset, unsigned int size)
{
	return dev->d.mmio_read(offset, size);
}

void nphca_mmio_write(struct nphca_device *dev, uint64_t offset, uint64_t value, unsigned int size)
{
	dev->d.mmio_write(offset, value, size);
}

void nphca_drain(struct nphca_fabric *f)
{
	f->f.drain();
}

void nphca_reset(struct nphca_device *dev)
{
	dev->d.fab.post({&dev->d, 0, 0, 0});
}

uint64_t nphca_knob_get(struct nphca_device *dev, unsigned int knob)
{
	return dev->d.knob_get(knob);
}

bool nphca_knob_set(struct nphca_device *dev, unsigned int knob, uint64_t value)
{
	return dev->d.knob_set(knob, value);
}

bool nphca_fabric_join(struct nphca_fabric *f, const struct nphca_link_ops *ops, void *host)
try {
	return f->f.join(*ops, host);
} catch (...) {
	return false;
}

uint64_t nphca_link_knob_get(struct nphca_fabric *f, unsigned int knob)
{
	return f->f.uplink() ? f->f.uplink()->knob_get(knob) : 0;
}

bool nphca_link_knob_set(struct nphca_fabric *f, unsigned int knob, uint64_t value)
{
	return f->f.uplink() && f->f.uplink()->knob_set(knob, value);
}

} /* extern "C" */
