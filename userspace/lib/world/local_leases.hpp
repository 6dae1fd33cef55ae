/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Leases of this process's own memory, for the local side of its work requests.
 *
 * Local buffers in unpinned regions are used under holds (see npr_context::hold_local()), and each costs
 * two system calls. A part of a region that is used again within a short time is leased instead: the
 * hold stays, and the next work request that begins and ends there only counts itself.
 *
 * What the HCA is done with soon shares leases of large parts. A receive may be posted for ever, and keeps the
 * lease as long: so it has one of its own pages, and keeps no others, also if a longer one that begins in the same
 * page was leased before. Else whoever waits for one of those pages might wait for ever.
 *
 * The kernel recalls a lease by an event when the memory changes, or is wanted. The number of events is
 * in a word that it writes and all can read, before the system call that changed the memory returns.
 * So who takes a lease looks at the word first, and no request is posted under a lease whose memory was
 * changed before (I9). A lease that was recalled is not found any more, and ends with the last request
 * under it. What is not used for some time goes back as well, also if nobody posts or polls: the
 * lease_keeper sees to that.
 *
 * take() and give() take no lock and write to no cache line that other users of the same part do, if
 * those have other stripes.
 */
#ifndef NPR_LOCAL_LEASES_HPP
#define NPR_LOCAL_LEASES_HPP

#include "world/event_channel.hpp"
#include "world/kernel.hpp"
#include "world/lease_keeper.hpp"
#include "world/local_lease.hpp"
#include "sparse_array.hpp"

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

namespace npr {

class local_leases final : public lease_keeper::client {
public:
	/*
	 * A region is leased in parts of this size, as a huge page has, with what a buffer that begins there needs of the next
	 * one.
	 */
	static constexpr std::uint64_t part = 2U << 20, overlap = 256U << 10;
	/* For how long the HCA may have a buffer. */
	enum class term { brief, lasting };
	/* Used again within this time, in ns, it is worth a lease. */
	static constexpr std::uint64_t warm = 100'000'000;
	/* After the kernel refused one, so long no other is asked for. */
	static constexpr std::uint64_t pause = 1'000'000'000;
	static constexpr unsigned stripes = local_lease::stripes;

	/* Hold numbers with this bit are tokens of leases. */
	static constexpr std::uint32_t is_lease = 1U << 31;

	struct use {
		std::uint32_t token, lkey;
		std::uint64_t addr;
	};

	/* Both have to live for longer. */
	local_leases(kernel &k, lease_keeper &keeper) noexcept : kernel_(k), keeper_(keeper), channel_(k) {}
	~local_leases();

	/* The region is deregistered, and another may have its number. Nothing is under way there, as ever then. */
	void remove(std::uint32_t handle) noexcept;
	/* All that are not used; true if there were any. When the process may lock no more memory. */
	bool give_back_idle() noexcept;

	/*
	 * A lease of all of the buffer in region @handle, for give(); or nothing: take a hold. @ticket is for more uses
	 * of it, of whoever has @stripe; its name is the caller's to say. Null: there are none.
	 */
	[[nodiscard]] std::optional<use> take(std::uint32_t handle, std::uint64_t addr, std::uint32_t length, bool write,
					      term t, unsigned stripe, local_ticket *ticket = nullptr) noexcept
	{
		return take(handle, addr, length, write, t, stripe, ticket, true);
	}
	/*
	 * The same of one that is there. It waits for nobody: the kernel is not asked for one, nor is who does that, which
	 * may take as long as memory takes to come in, waited for.
	 */
	[[nodiscard]] std::optional<use> find(std::uint32_t handle, std::uint64_t addr, std::uint32_t length, bool write,
					      term t, unsigned stripe, local_ticket *ticket) noexcept
	{
		return take(handle, addr, length, write, t, stripe, ticket, false);
	}
	void give(std::uint32_t token) noexcept;
	/* Are there leases that were recalled, and that only their users keep? It waits for nobody, as find(). */
	[[nodiscard]] bool any_wanted() noexcept;
	/* Is that of @token, which is not given back yet, one of them? */
	[[nodiscard]] bool is_wanted(std::uint32_t token) const noexcept;
	/* Does nobody else keep it? If it is wanted that stays so, as nobody gets it any more. */
	[[nodiscard]] bool is_alone(std::uint32_t token) const noexcept;
	void give(local_lease &l, unsigned stripe) noexcept { count_out(static_cast<lease &>(l), stripe); }

	/* Where leases of lasting buffers of one region are found, by who uses it again and again. */
	struct lasting;
	/* Nothing, if there are none. It is good until the region is deregistered. */
	[[nodiscard]] lasting look_at(std::uint32_t handle) noexcept;
	/*
	 * A lease that is there, of all of @s, which is to be written to and becomes what the HCA is given; for give(). Null:
	 * there is none, and nothing has changed. @stripe: below stripes. It waits for nobody, as find().
	 */
	[[nodiscard]] local_lease *take(const lasting &of, ibv_sge &s, unsigned stripe) noexcept;

	void tend(bool age) noexcept override;

private:
	using state = local_lease::state;
	static constexpr std::uint32_t most = 4096; /* leases */

	struct region;
	struct lease : local_lease {
		std::atomic<std::uint64_t> first{0}, end{0};
		std::uint64_t delta = 0; /* from an address of the program to that under lkey */
		std::uint32_t lkey = 0, hold = 0, number = 0;
		bool write = false;
		std::atomic<lease *> *place = nullptr; /* where it is found */
		const region *of = nullptr;

		/* For who alone may change it. */
		void become(state s) noexcept
		{
			const std::uint64_t n = life.load(std::memory_order_relaxed) >> state_bits;

			life.store((n + (s == state::live)) << state_bits | static_cast<std::uint64_t>(s),
				   std::memory_order_seq_cst);
		}
	};
	struct entry {
		std::array<std::atomic<lease *>, 2> at;		  /* to read, to write */
		std::array<std::atomic<std::uint64_t>, 2> asked;  /* when somebody last found none; 0: never */
	};
	static constexpr std::uint64_t page = RDMA_NP_PAGE_SIZE;
	struct free_entries {
		void operator()(entry *p) const noexcept { std::free(p); }
	};
	struct region {
		std::uint32_t handle = 0;
		std::uint64_t base = 0, length = 0; /* from the page where it begins; 0: no region that can be leased */
		std::uint64_t begin = 0;	    /* where in that page; the kernel leases nothing before */
		std::unique_ptr<entry[], free_entries> entries; /* one for each part */
		std::unique_ptr<entry[], free_entries> pages;	/* one for each page where a lasting buffer may begin */
		std::atomic<std::uint64_t> not_before{0};
		/*
		 * Of the whole address space: what is leased is in blocks of it, regions like this one, which are made
		 * when they are first used; by number. What reaches into a second one is not leased.
		 */
		std::unique_ptr<sparse_array<std::atomic<region *>>> blocks;
		const region *whole = nullptr; /* of a block */
	};
	static constexpr unsigned block_shift = 30; /* so all addresses of a process have numbers */

	[[nodiscard]] std::optional<use> take(std::uint32_t handle, std::uint64_t addr, std::uint32_t length, bool write,
					      term t, unsigned stripe, local_ticket *ticket, bool may_wait) noexcept;
	[[nodiscard]] region *region_of(std::uint32_t handle, bool may_wait) noexcept;
	[[nodiscard]] region *learn(std::uint32_t handle) noexcept;
	[[nodiscard]] region *block_of(region &whole, std::uint64_t addr, bool may_wait) noexcept;
	[[nodiscard]] region *learn_block(region &whole, std::uint32_t number) noexcept;
	[[nodiscard]] bool current(bool may_wait) noexcept;
	/* Is the last page of @l that of a buffer which ends at @end? */
	[[nodiscard]] static bool ends_with(const lease &l, std::uint64_t end) noexcept
	{
		/* Less than 0 is much. */
		return l.end.load(std::memory_order_relaxed) - end < page;
	}
	[[nodiscard]] std::optional<use> use_of(std::atomic<lease *> &place, std::uint64_t addr, std::uint64_t end, term t,
						unsigned stripe, local_ticket *ticket, bool may_wait) noexcept;
	void count_out(lease &l, unsigned stripe) noexcept;
	void end_if_unused(lease &l) noexcept;
	[[nodiscard]] bool ask(region &r, entry &e, std::uint64_t addr, std::uint64_t end, bool write, term t) noexcept;
	/* Under the mutex: */
	static void make_entries(region &r, std::uint64_t base, std::uint64_t length) noexcept;
	[[nodiscard]] bool start() noexcept;
	[[nodiscard]] lease *spare() noexcept;
	void read_events() noexcept;
	void withdraw(lease &l) noexcept;
	[[nodiscard]] bool look_round() noexcept;

	kernel &kernel_;
	lease_keeper &keeper_;
	sparse_array<std::atomic<region *>> by_handle_;
	sparse_array<std::atomic<lease *>> by_number_;
	event_channel channel_; /* open: the keeper has it */
	std::atomic<std::uint32_t> ending_{0}; /* leases in this state; a number, and nothing else */

	std::mutex mutex_; /* of what follows, and of all changes of the above */
	std::deque<lease> leases_; /* elements stay where they are */
	std::size_t looked_ = 0;   /* where spare() goes on */
	std::deque<std::unique_ptr<region>> regions_;
	bool refused_ = false; /* there are none on this kernel */
};

struct local_leases::lasting {
	std::uint64_t base = 0, length = 0; /* 0: there are none */
	entry *pages = nullptr;
};

inline local_lease *local_leases::take(const lasting &of, ibv_sge &s, unsigned stripe) noexcept
{
	const std::uint64_t at = s.addr - of.base;

	if (at >= of.length) [[unlikely]]
		return nullptr;
	/* acquire: as ask() has made it */
	std::atomic<lease *> &place = of.pages[at / page].at[1];
	lease *const l = place.load(std::memory_order_acquire);
	if (!l) [[unlikely]]
		return nullptr;
	l->count_in(stripe);
	/* Recalls first: what those have ended that were read is not in its place. So is what has ended otherwise: see use_of(). */
	if (channel_.has_events() || place.load(std::memory_order_seq_cst) != l ||
	    s.addr < l->first.load(std::memory_order_relaxed) || !ends_with(*l, s.addr + s.length)) [[unlikely]] {
		count_out(*l, stripe);
		return nullptr;
	}
	l->be_used();
	s.addr += l->delta;
	s.lkey = l->lkey;
	return l;
}

} // namespace npr

#endif
