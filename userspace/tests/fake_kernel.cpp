/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "fake_kernel.hpp"

#include "world/uncancelled.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

namespace npr::fake {

fake_kernel::fake_kernel(hca &h) : dev(h) {}

fake_kernel::~fake_kernel()
{
	for (const end &e : ends) {
		close(e.reader);
		close(e.writer);
	}
}

/* --- channels ----------------------------------------------------------- */

int fake_kernel::query(rdma_np_query &q) noexcept
{
	q = {RDMA_NP_ABI_VERSION, RDMA_NP_QUERY_OWNER, 8, 512, 4, 0};
	return refuse_query;
}

int fake_kernel::channel(int &fd) noexcept
{
	int pair[2];

	++channels;
	if (refuse_channel)
		return refuse_channel;
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair))
		return -errno;
	fd = silent ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : fcntl(pair[0], F_DUPFD_CLOEXEC, 0);
	if (fd < 0) {
		const int error = errno;

		close(pair[0]);
		close(pair[1]);
		return -error;
	}
	const std::lock_guard lock(mutex);
	end_of[fd] = &ends.emplace_back(pair[0], pair[1]);
	return 0;
}

std::atomic<std::uint64_t> *fake_kernel::map_posted(int channel) noexcept
{
	const std::lock_guard lock(mutex);

	return maps ? &end_of.at(channel)->posted : nullptr;
}

int fake_kernel::read_events(int channel, std::span<rdma_np_event> events) noexcept
{
	const std::lock_guard lock(mutex);

	++reads;
	return static_cast<int>(::read(end_of.at(channel)->reader, events.data(), events.size_bytes()) /
				static_cast<ssize_t>(sizeof(rdma_np_event)));
}

fake_kernel::end &fake_kernel::end_for(const rdma_np_event &e)
{
	const std::lock_guard lock(mutex);

	return e.type == RDMA_NP_EVENT_FAULT ? *asked.at(e.cookie) : ends.back();
}

void fake_kernel::send(const rdma_np_event &e, end &where)
{
	const npr::uncancelled here; /* as an ioctl */

	ASSERT_EQ(::send(where.writer, &e, sizeof(e), 0), ssize_t{sizeof(e)});
	where.posted.fetch_add(1);
}

/* Those that are not read yet, so that no event is of an older lease with the same cookie. */
void fake_kernel::drop_events(end &where, std::uint64_t cookie)
{
	std::vector<rdma_np_event> others;
	rdma_np_event e;

	while (::read(where.reader, &e, sizeof(e)) == ssize_t{sizeof(e)})
		if (e.cookie != cookie)
			others.push_back(e);
	for (const rdma_np_event &o : others)
		EXPECT_EQ(::send(where.writer, &o, sizeof(o), 0), ssize_t{sizeof(o)});
}

std::size_t fake_kernel::answers()
{
	const std::lock_guard lock(mutex);

	return held.size();
}

/* --- the peer's memory -------------------------------------------------- */

int fake_kernel::resolve(const ibv_qp &qp, int, std::uint32_t key, std::uint64_t addr, rdma_np_region_info &i) noexcept
{
	std::unique_lock lock(mutex);
	std::uint64_t base;

	keys.insert(key);
	if (busy) {
		--busy;
		return busy_answer;
	}
	if (std::this_thread::get_id() != tester) {
		sigset_t mask;
		pthread_sigmask(SIG_BLOCK, nullptr, &mask);
		for (const int s : {SIGINT, SIGALRM, SIGTERM, SIGCHLD, SIGRTMIN, SIGRTMAX})
			if (!sigismember(&mask, s))
				interrupted_by.insert(s);
		EXPECT_TRUE(asking.insert(qp.qp_num).second) << "threads of the library for one QP";
		++inside;
		entered.notify_all();
		gate.wait(lock, [&] { return !blocked.count(qp.qp_num); });
		--inside;
		asking.erase(qp.qp_num);
	}
	{
		const std::lock_guard memory_lock(dev.mutex);
		if (const int error = dev.far.tell_region(key, addr, i))
			return error;
		base = dev.far.regions.front().info.base;
	}
	if (nonsense)
		i.length = -i.base + 1;
	if (!part_shift)
		return 0;
	/* Of a whole address space, of which there is so much. */
	if (addr < base || addr - base >= mapped)
		return -EFAULT;
	i.part_shift = part_shift;
	i.length = 1ULL << part_shift;
	i.base = i.read_addr = i.write_addr = addr & ~(i.length - 1);
	i.region_id = 100 + (addr >> part_shift);
	return 0;
}

int fake_kernel::fault(const ibv_qp &qp, int channel, const rdma_np_fault_req &req,
		       std::span<const rdma_np_range> ranges) noexcept
{
	const std::lock_guard lock(mutex);
	const bool lease = req.flags & RDMA_NP_FAULT_LEASE;

	leases_asked += lease;
	/* What is not granted needs no look by the library's thread, of which most tests know nothing. */
	if (lease && !grants)
		return -EBUSY;
	if (refuse_fault)
		return std::exchange(refuse_fault, 0);
	rdma_np_event e;
	{
		const std::lock_guard memory_lock(dev.mutex);
		auto &regions = dev.far.regions;
		auto r = std::ranges::find(regions, req.region_id, [](const auto &x) { return x.info.region_id; });

		/* Parts have numbers of their own. */
		if (part_shift)
			r = regions.begin();
		if (r == regions.end())
			return -ENOENT;
		const bool waits = waits_for_local && count_local_leases(waits_for_local);
		e = dev.far.answer_fault(*r, req, ranges, waits ? RDMA_NP_BUSY : RDMA_NP_OK);
	}
	if (lease) {
		const std::uint64_t number = first_lease + made[qp.qp_num]++;
		leases[{qp.qp_num, number}] = {req.cookie, end_of.at(channel), std::exchange(e.hold_id, number)};
		last_lease_key = e.lease_key;
	}
	asked[req.cookie] = end_of.at(channel);
	if (withhold)
		held.push_back(e);
	else
		send(e, *end_of.at(channel));
	return 0;
}

int fake_kernel::release(const ibv_qp &qp, std::uint64_t hold) noexcept
{
	const std::lock_guard lock(mutex);
	std::uint64_t id = hold;

	if (hold >= first_lease) {
		const auto l = leases.find({qp.qp_num, hold});
		EXPECT_NE(l, leases.end());
		if (l == leases.end())
			return -ENOENT;
		id = l->second.of_peer;
		leases.erase(l);
		returned.notify_all();
	}
	const std::lock_guard memory_lock(dev.mutex);
	return dev.far.end_hold(id) ? 0 : -ENOENT;
}

int fake_kernel::forget(const ibv_qp &, std::uint64_t) noexcept
{
	++forgotten;
	return 0;
}

std::size_t fake_kernel::recall(std::uint32_t qp_num)
{
	const std::lock_guard lock(mutex);
	std::size_t n = 0;

	for (const auto &[of, lease] : leases) {
		rdma_np_event e{};

		if (of.first != qp_num)
			continue;
		e.type = RDMA_NP_EVENT_RECALL;
		e.cookie = lease.cookie;
		e.hold_id = of.second;
		send(e, *lease.where);
		++n;
	}
	return n;
}

std::size_t fake_kernel::live()
{
	const std::lock_guard lock(mutex);

	return leases.size();
}

bool fake_kernel::all_back()
{
	std::unique_lock lock(mutex);

	return returned.wait_for(lock, std::chrono::seconds(10), [&] { return leases.empty(); });
}

/* --- memory of this process --------------------------------------------- */

int fake_kernel::hold(std::uint32_t mr, const rdma_np_hold_req &req, rdma_np_hold_info &info, std::uint32_t &handle,
		      int channel) noexcept
{
	std::unique_lock lock(mutex);
	const bool lease = req.flags & RDMA_NP_FAULT_LEASE;

	EXPECT_EQ(lease, channel >= 0) << "a lease that cannot be recalled, or a hold that nobody recalls";
	local_leases_asked += lease;
	if (block_hold) {
		++inside;
		entered.notify_all();
		gate.wait(lock, [&] { return !block_hold; });
		--inside;
	}
	if (refuse_hold)
		return refuse_hold;
	if (local_holds.size() >= most_held)
		return -ENOMEM;
	if (holds_made == most_holds)
		return -EFAULT;
	const std::lock_guard memory_lock(dev.mutex);
	const auto r = dev.regions.find(mr);
	if (r == dev.regions.end())
		return -EINVAL;
	const std::uint64_t start = req.addr - r->second.base;
	if (start > r->second.length || req.length > r->second.length - start)
		return -EFAULT;
	handle = ++holds_made;
	const std::uint32_t lkey = first_held_lkey + handle;
	local_holds[handle] = {mr, req, lkey, lease ? end_of.at(channel) : nullptr};
	info = {req.addr + held_offset, lkey, 0};
	dev.keys[lkey] = {info.addr, req.length, r->second.offset - held_offset, (req.flags & RDMA_NP_FAULT_WRITE) != 0};
	return 0;
}

int fake_kernel::hold_free(std::uint32_t handle) noexcept
{
	const std::lock_guard lock(mutex);
	const auto h = local_holds.find(handle);

	EXPECT_NE(h, local_holds.end()) << "a local hold was freed twice";
	if (h == local_holds.end())
		return -ENOENT;
	if (on_free)
		on_free(h->second);
	if (h->second.where)
		drop_events(*h->second.where, h->second.req.cookie);
	{
		const std::lock_guard memory_lock(dev.mutex);
		dev.keys.erase(h->second.lkey);
	}
	local_holds.erase(h);
	++freed;
	return 0;
}

int fake_kernel::query_mr(const ibv_mr &mr, rdma_np_mr_info &i) noexcept
{
	const std::lock_guard lock(dev.mutex);
	const auto r = dev.regions.find(mr.handle);

	++queries;
	i = {};
	if (r == dev.regions.end())
		return -EINVAL;
	if (!r->second.leased)
		return -EOPNOTSUPP;
	i.base = r->second.base;
	i.length = r->second.length;
	return 0;
}

std::uint32_t fake_kernel::recall_local(std::optional<std::uint32_t> mr)
{
	const std::lock_guard lock(mutex);
	std::uint32_t newest = 0;

	for (const auto &[handle, h] : local_holds) {
		rdma_np_event e{};

		if (!h.where || (mr && h.mr != *mr))
			continue;
		e.type = RDMA_NP_EVENT_RECALL;
		e.cookie = h.req.cookie;
		send(e, *h.where);
		newest = std::max(newest, h.lkey);
	}
	return newest;
}

std::size_t fake_kernel::count_local_leases(std::uint32_t mr) const
{
	return static_cast<std::size_t>(std::ranges::count_if(local_holds, [mr](const auto &h) {
		return h.second.mr == mr && h.second.where;
	}));
}

std::size_t fake_kernel::live_local()
{
	const std::lock_guard lock(mutex);

	return local_holds.size();
}

fake_kernel::local_hold fake_kernel::only_local()
{
	const std::lock_guard lock(mutex);

	EXPECT_EQ(local_holds.size(), 1U);
	return local_holds.begin()->second;
}

/* --- queue pairs -------------------------------------------------------- */

bool fake_kernel::connected(ibv_qp &qp) noexcept
{
	const std::lock_guard lock(dev.mutex);

	return !dev.dead.contains(qp.qp_num);
}

int fake_kernel::set_error(ibv_qp &qp) noexcept
{
	const std::lock_guard lock(dev.mutex);

	dev.fail(qp);
	return 0;
}

/* --- what blocks -------------------------------------------------------- */

void fake_kernel::block(std::uint32_t qp_num)
{
	const std::lock_guard lock(mutex);

	blocked.insert(qp_num);
}

void fake_kernel::unblock()
{
	{
		const std::lock_guard lock(mutex);

		blocked.clear();
		block_hold = false;
	}
	gate.notify_all();
}

bool fake_kernel::await_resolves(std::size_t n)
{
	std::unique_lock lock(mutex);

	return entered.wait_for(lock, std::chrono::seconds(10), [&] { return inside == n; });
}

} // namespace npr::fake
