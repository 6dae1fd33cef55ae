/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The library around the engine, on a provider and a kernel made for the test, both of one peer: a provider whose
 * posts take effect there at once, and a kernel that brings its answers when it is told to. Real threads, real file
 * descriptors.
 */
#ifndef NPR_OBJECTS_FIXTURE_HPP
#define NPR_OBJECTS_FIXTURE_HPP

#include "object/cq.hpp"
#include "object/srq.hpp"
#include "peer.hpp"

#include <nprdma/nprdma.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <poll.h>
#include <pthread.h>
#include <set>
#include <signal.h>
#include <sys/socket.h>

namespace npr::fake {

using test::peer;

constexpr std::uint32_t lkey = 0x77, held_lkey = 0x78;
constexpr std::uint32_t rkey = 0x100, read_key = 0x101, write_key = 0x102, table_key = 0x103;
constexpr std::size_t pages = 64;
constexpr std::uint64_t base = 0x10000000;

/* The provider, and the peer that it reaches. */
struct device {
	device()
	{
		context.ops.post_send = [](ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad) {
			return self(qp)->post(qp, wr, bad);
		};
		context.ops.post_recv = [](ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **) {
			return self(qp)->receive(*wr);
		};
		context.ops.post_srq_recv = [](ibv_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **) {
			return self(srq)->receive(*wr);
		};
		context.ops.poll_cq = [](ibv_cq *cq, int n, ibv_wc *wc) { return self(cq)->poll(n, wc); };
		context.ops.req_notify_cq = [](ibv_cq *cq, int solicited) {
			self(cq)->armed = solicited;
			return 0;
		};
		context.abi_compat = this;
		cq.context = pd.context = &context;
		cq.cqe = 4096;
		region.info.read_key = read_key;
		region.info.write_key = write_key;
		region.info.table_key = table_key;
		/* as those of the parts of a whole address space, which are made of it */
		region.info.read_addr = region.info.write_addr = base;
	}

	template <class T>
	static device *self(T *object)
	{
		return static_cast<device *>(object->context->abi_compat);
	}

	ibv_mr *reg_mr(void *addr, std::size_t length, unsigned access)
	{
		const std::lock_guard lock(mutex);

		if (refuse_reg) {
			errno = refuse_reg;
			return nullptr;
		}
		EXPECT_EQ(access, unsigned{IBV_ACCESS_LOCAL_WRITE});
		auto mr = std::make_unique<ibv_mr>();
		mr->context = &context;
		mr->addr = addr;
		mr->length = length;
		mr->lkey = lkey;
		++registered;
		return mr.release();
	}

	int post(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad)
	{
		const std::lock_guard lock(mutex);
		if (refuse_post) {
			*bad = wr;
			return refuse_post;
		}
		for (; wr; wr = wr->next) {
			ibv_wc wc{};
			wc.wr_id = wr->wr_id;
			wc.qp_num = qp->qp_num;
			if (dead.count(qp->qp_num)) {
				wc.status = IBV_WC_WR_FLUSH_ERR;
				complete(wc);
				continue;
			}
			posted.push_back(*wr);
			wc.opcode = wr->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
			for (int i = 0; wr->opcode == IBV_WR_RDMA_READ && i < wr->num_sge; ++i)
				wc.byte_len += wr->sg_list[i].length;
			std::uint64_t at = wr->wr.rdma.remote_addr;
			const bool data = wr->opcode == IBV_WR_RDMA_READ || wr->opcode == IBV_WR_RDMA_WRITE;
			for (int i = 0; data && i < wr->num_sge; ++i) {
				ibv_sge s = wr->sg_list[i];
				s.addr -= s.addr >> 53 ? away : 0;
				transfer(*wr, at, s);
				at += wr->sg_list[i].length;
			}
			if (!(wr->send_flags & IBV_SEND_SIGNALED))
				continue;
			if (stall)
				stalled.push_back(wc);
			else
				complete(wc);
		}
		return 0;
	}

	void complete(const ibv_wc &wc)
	{
		EXPECT_LT(completions.size(), capacity) << "CQ overrun";
		completions.push_back(wc);
	}

	/* What was stalled completes. */
	void go_on()
	{
		const std::lock_guard lock(mutex);
		stall = false;
		for (const ibv_wc &wc : stalled)
			complete(wc);
		stalled.clear();
	}

	int receive(const ibv_recv_wr &wr)
	{
		const std::lock_guard lock(mutex);
		if (receives.size() == max_receives)
			return ENOMEM;
		receives.push_back({wr.wr_id, wr.num_sge ? wr.sg_list[0].lkey : 0});
		return 0;
	}

	/* What is of no region and no lease is to pinned memory, and moves nothing. */
	void transfer(const ibv_send_wr &wr, std::uint64_t at, const ibv_sge &s)
	{
		std::span<std::byte> local(reinterpret_cast<std::byte *>(static_cast<std::uintptr_t>(s.addr)), s.length);

		if (wr.wr.rdma.rkey == table_key) {
			EXPECT_EQ(s.lkey, lkey);
			peer::read_words(region, at, local);
			return;
		}
		EXPECT_TRUE(!peer::is_lease_key(wr.wr.rdma.rkey) || far.by_lease(wr.wr.rdma.rkey))
			<< "posted under a lease that went back";
		while (!local.empty()) {
			const std::size_t n = std::min<std::size_t>(local.size(), page_size - at % page_size);
			const peer::target to = far.target_of(wr, at, n);

			if (!to.of)
				return;
			moved_lkey = s.lkey;
			if (wr.opcode == IBV_WR_RDMA_READ)
				peer::read(to, local.first(n));
			else
				(void)peer::write(to, local.first(n));
			local = local.subspan(n);
			at += n;
		}
	}

	/* --- what the peer's owner does, all at once; under the mutex if other threads may look --- */
	void all_in() { far.all_in(region, true); }
	void all_out() { far.all_out(region); }
	void page_out(std::uint64_t page) { far.page_out(region, page); }
	[[nodiscard]] bool resident(std::uint64_t page) const { return region.pages[page].word & RDMA_NP_WORD_READABLE; }

	int poll(int n, ibv_wc *wc)
	{
		const std::lock_guard lock(mutex);
		int got = 0;
		++polls;
		while (got < n && !completions.empty()) {
			wc[got++] = completions.front();
			completions.pop_front();
		}
		return got;
	}

	ibv_context context{};
	ibv_cq cq{};
	ibv_pd pd{};
	std::mutex mutex;
	std::deque<ibv_wc> completions, stalled;
	std::size_t capacity = 4096; /* entries that are not full of what else completes */
	std::deque<ibv_send_wr> posted; /* without its lists */
	peer far;
	peer::region &region = far.add_region(base, pages * page_size, rkey);
	std::vector<std::byte> &memory = *region.memory;
	std::map<std::uint32_t, bool> dead;
	static constexpr std::size_t max_receives = 4;
	int armed = -1;                                               /* for solicited events only? */
	std::deque<std::pair<std::uint64_t, std::uint32_t>> receives; /* wr_id, first lkey */
	bool stall = false;
	std::uint64_t polls = 0;
	int refuse_post = 0;
	std::atomic<int> refuse_reg{0};
	std::atomic<unsigned> registered{0};
	std::uint32_t moved_lkey = 0; /* the local key of what a region's data went to, or came from, last */
	std::uint64_t away = 0; /* the HCA's addresses of region 0x901 */
};

/* A kernel of whose event channel the test holds the other end. */
struct fake_kernel final : npr::kernel {
	explicit fake_kernel(device &d) : dev(d) {}
	~fake_kernel() override
	{
		for (const end &e : ends)
			close(e.fd);
	}

	int query(rdma_np_query &q) noexcept override
	{
		q = {RDMA_NP_ABI_VERSION, RDMA_NP_QUERY_OWNER, 8, 512, 4, 0};
		return refuse_query;
	}
	int channel(int &fd) noexcept override
	{
		int pair[2];
		if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair))
			return -errno;
		const std::lock_guard lock(mutex);
		fd = pair[0];
		end_of[fd] = &ends.emplace_back(pair[1]);
		return 0;
	}
	int resolve(const ibv_qp &qp, int, std::uint32_t key, std::uint64_t addr, rdma_np_region_info &i) noexcept override
	{
		std::unique_lock lock(mutex);
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
	int fault(const ibv_qp &qp, int channel, const rdma_np_fault_req &req, std::span<const rdma_np_range> r) noexcept override
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
			const bool waits = waits_for_local && count_local_leases(waits_for_local);
			e = dev.far.answer_fault(dev.region, req, r, waits ? RDMA_NP_BUSY : RDMA_NP_OK);
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
	/* One end of a channel, and how many events were posted there. */
	struct end {
		explicit end(int f) : fd(f) {}
		int fd;
		std::atomic<std::uint64_t> posted{0};
	};
	/* An answer comes where it was asked for. */
	end &end_for(const rdma_np_event &e)
	{
		const std::lock_guard lock(mutex);
		return e.type == RDMA_NP_EVENT_FAULT ? *asked.at(e.cookie) : ends.back();
	}
	void send(const rdma_np_event &e) { send(e, end_for(e)); }
	void send(const rdma_np_event &e, end &where)
	{
		const npr::uncancelled here; /* as an ioctl */
		ASSERT_EQ(::send(where.fd, &e, sizeof(e), 0), ssize_t{sizeof(e)});
		where.posted.fetch_add(1);
	}
	int release(const ibv_qp &qp, std::uint64_t hold) noexcept override
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
	[[nodiscard]] std::size_t answers()
	{
		const std::lock_guard lock(mutex);
		return held.size();
	}
	/* The leases of a queue pair. How many are there? */
	std::size_t recall(std::uint32_t qp_num)
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
	/* Those of local region @mr are wanted back. */
	void recall_local(std::uint32_t mr)
	{
		const std::lock_guard lock(mutex);
		for (const auto &[handle, hold] : local_holds) {
			rdma_np_event e{};
			if (hold.first != mr || !(hold.second.flags & RDMA_NP_FAULT_LEASE))
				continue;
			e.type = RDMA_NP_EVENT_RECALL;
			e.cookie = hold.second.cookie;
			send(e, *local_events);
		}
	}
	/* Of local region @mr. Under the mutex. */
	[[nodiscard]] std::size_t count_local_leases(std::uint32_t mr) const
	{
		return static_cast<std::size_t>(std::count_if(local_holds.begin(), local_holds.end(), [mr](const auto &h) {
			return h.second.first == mr && h.second.second.flags & RDMA_NP_FAULT_LEASE;
		}));
	}
	[[nodiscard]] std::size_t live()
	{
		const std::lock_guard lock(mutex);
		return leases.size();
	}
	/* Until there is none; false: for a long time there are some. */
	[[nodiscard]] bool all_back()
	{
		std::unique_lock lock(mutex);
		return returned.wait_for(lock, std::chrono::seconds(10), [&] { return leases.empty(); });
	}
	int forget(const ibv_qp &, std::uint64_t) noexcept override
	{
		++forgotten;
		return 0;
	}
	std::atomic<std::uint64_t> *map_posted(int channel) noexcept override
	{
		const std::lock_guard lock(mutex);
		return maps ? &end_of.at(channel)->posted : nullptr;
	}
	void unmap_posted(std::atomic<std::uint64_t> *) noexcept override {}
	int read_events(int channel, std::span<rdma_np_event> events) noexcept override
	{
		++reads;
		return static_cast<int>(::read(channel, events.data(), events.size_bytes()) /
					static_cast<ssize_t>(sizeof(rdma_np_event)));
	}
	int hold(std::uint32_t mr, const rdma_np_hold_req &req, rdma_np_hold_info &info, std::uint32_t &handle,
		 int channel) noexcept override
	{
		std::unique_lock lock(mutex);
		if (req.flags & RDMA_NP_FAULT_LEASE)
			local_events = end_of.at(channel);
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
		if (local_length && (req.addr < local_base || req.addr + req.length > local_base + local_length))
			return -EFAULT;
		handle = ++holds_made;
		local_leases_asked += (req.flags & RDMA_NP_FAULT_LEASE) != 0;
		local_holds[handle] = {mr, req};
		info = {req.addr, local_lkey, 0};
		return 0;
	}
	int hold_free(std::uint32_t handle) noexcept override
	{
		const std::lock_guard lock(mutex);
		EXPECT_EQ(local_holds.erase(handle), 1U);
		return 0;
	}
	int query_mr(const ibv_mr &, rdma_np_mr_info &i) noexcept override
	{
		i = {};
		i.base = local_base;
		i.length = local_length;
		return local_length ? 0 : -EINVAL;
	}
	bool connected(ibv_qp &qp) noexcept override
	{
		const std::lock_guard lock(dev.mutex);
		return !dev.dead[qp.qp_num];
	}
	std::uint64_t tries_for(ibv_qp &) noexcept override { return tries; }
	int set_error(ibv_qp &qp) noexcept override
	{
		const std::lock_guard lock(dev.mutex);
		dev.dead[qp.qp_num] = true;
		for (ibv_wc &w : dev.stalled) {
			w.status = IBV_WC_WR_FLUSH_ERR;
			dev.complete(w);
		}
		dev.stalled.clear();
		return 0;
	}

	/* RESOLVE of that queue pair does not return until unblock(), but to the test itself. */
	void block(std::uint32_t qp_num)
	{
		const std::lock_guard lock(mutex);
		blocked.insert(qp_num);
	}

	void unblock()
	{
		{
			const std::lock_guard lock(mutex);
			blocked.clear();
			block_hold = false;
		}
		gate.notify_all();
	}

	/* False: not so many, for a long time. */
	[[nodiscard]] bool await_resolves(std::size_t n = 1)
	{
		std::unique_lock lock(mutex);
		return entered.wait_for(lock, std::chrono::seconds(10), [&] { return inside == n; });
	}

	device &dev;
	std::mutex mutex;
	std::condition_variable gate, entered, returned;
	std::set<std::uint32_t> blocked, asking; /* QP numbers */
	const std::thread::id tester = std::this_thread::get_id();
	std::size_t inside = 0;
	std::set<int> interrupted_by; /* signals: threads that are not the tester's */
	std::set<std::uint32_t> keys;
	std::uint8_t part_shift = 0; /* not 0: the key is of a whole address space */
	std::uint64_t mapped = 0;    /* bytes of it, from base on */
	bool nonsense = false;
	std::atomic<unsigned> forgotten{0};
	int busy = 0, busy_answer = -EBUSY, refuse_query = 0;
	std::uint64_t tries = std::numeric_limits<std::uint64_t>::max();
	bool withhold = false;
	int refuse_fault = 0; /* once */
	int refuse_hold = 0;
	std::size_t most_held = SIZE_MAX; /* at once, leases included: RLIMIT_MEMLOCK */
	bool block_hold = false; /* until unblock(): as if the memory were on a disk */
	std::uint32_t local_lkey = held_lkey; /* of the next hold */
	std::uint32_t holds_made = 0, most_holds = ~0U;
	std::map<std::uint32_t, std::pair<std::uint32_t, rdma_np_hold_req>> local_holds;
	std::vector<rdma_np_event> held;
	struct lease {
		std::uint64_t cookie;
		end *where;
		std::uint64_t of_peer; /* the hold */
	};
	static constexpr std::uint64_t first_lease = 1'000'000; /* other holds have the peer's numbers */
	bool grants = false; /* leases of the peer's memory */
	std::atomic<unsigned> leases_asked{0}, local_leases_asked{0};
	std::uint64_t local_base = 0, local_length = 0; /* of local memory that can be leased; 0: there is none */
	end *local_events = nullptr; /* where those of local leases come */
	std::uint32_t waits_for_local = 0; /* FAULTs are of memory behind a lease of this local region: the peer is this process */
	bool maps = true;    /* says how many events there are */
	std::atomic<std::uint64_t> reads{0}; /* system calls */
	std::uint32_t last_lease_key = 0;
	std::map<std::pair<std::uint32_t, std::uint64_t>, lease> leases; /* by QP and number, which each peer counts by himself */
	std::map<std::uint32_t, std::uint64_t> made;
	std::deque<end> ends;
	std::map<int, end *> end_of; /* of these, by channel */
	std::map<std::uint64_t, end *> asked; /* by cookie */
};

/* What registers and deregisters at @dev. */
inline npr::provider provider_of(device &dev)
{
	npr::provider p(dev.context);

	p.reg_mr = [](ibv_pd *pd, void *addr, size_t length, std::uint64_t, unsigned access) -> ibv_mr * {
		return static_cast<device *>(pd->context->abi_compat)->reg_mr(addr, length, access);
	};
	p.dereg_mr = [](ibv_mr *mr) {
		static_cast<device *>(mr->context->abi_compat)->registered.fetch_sub(1);
		delete mr;
		return 0;
	};
	return p;
}

struct Objects : ::testing::Test {
	/* @turns: the library's thread may do something at any time after a request that is not done. */
	explicit Objects(unsigned flags = 0, bool turns = false)
	    : kernel_ptr(new fake_kernel(dev)),
	      ctx(&dev.context, std::unique_ptr<npr::kernel>(kernel_ptr), flags, provider_of(dev))
	{
		ctx.keeper.gives_turns = turns;
		cq = std::make_unique<npr_cq>(ctx, &dev.cq, 2048);
		for (std::size_t i = 0; i < dev.memory.size(); ++i)
			dev.memory[i] = static_cast<std::byte>(i * 5 + i / 4096);
	}

	~Objects() override
	{
		while (!cq->qps.empty())
			EXPECT_EQ(npr_detach_qp(cq->qps.back().get()), 0);
	}

	ibv_qp &make_qp(std::uint32_t number)
	{
		verbs_qps.push_back(std::make_unique<ibv_qp>());
		ibv_qp &q = *verbs_qps.back();
		q.context = &dev.context;
		q.pd = &dev.pd;
		q.qp_num = number;
		q.state = IBV_QPS_RTS;
		q.recv_cq = &dev.cq;
		return q;
	}

	npr_qp *attach(std::uint32_t number) { return cq->attach(&make_qp(number), params); }

	static int post(npr_qp *qp, ibv_wr_opcode op, std::uint64_t offset, std::span<std::byte> buffer,
			std::uint64_t id, std::uint32_t key = rkey, unsigned flags = IBV_SEND_SIGNALED)
	{
		ibv_sge s{reinterpret_cast<std::uintptr_t>(buffer.data()), static_cast<std::uint32_t>(buffer.size()), 1};
		ibv_send_wr wr{}, *bad;
		wr.wr_id = id;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = op;
		wr.send_flags = flags;
		wr.wr.rdma.remote_addr = base + offset;
		wr.wr.rdma.rkey = key;
		return npr_post_send(qp, &wr, &bad);
	}

	/* Until one comes; the kernel's thread may have to run in between. */
	ibv_wc next()
	{
		ibv_wc wc{};
		while (!npr_poll_cq(cq.get(), 1, &wc))
			std::this_thread::yield();
		return wc;
	}

	static constexpr npr::qp_params params{32, 16, 4, 64, 16, ~0U, 4, 2, false, false};
	device dev;
	fake_kernel *kernel_ptr;
	npr_context ctx;
	std::unique_ptr<npr_cq> cq;
	std::vector<std::unique_ptr<ibv_qp>> verbs_qps;
};

} // namespace npr::fake

#endif
