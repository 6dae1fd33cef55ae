/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Everything that the soak test does, by name, with how often it was tried and how often it
 * did happen: a verb that completed, a call that the kernel took, and where it can be seen,
 * its effect (pages that went, a block that was away). A run that is long enough fails
 * if one of them never happened.
 */
#ifndef NPRDMA_SOAK_KINDS_HPP
#define NPRDMA_SOAK_KINDS_HPP

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace soak
{

#define SOAK_KINDS(X)                                                                                        \
	/* verbs of the main connection */                                                                   \
	X(read, "READ")                                                                                      \
	X(write, "WRITE")                                                                                    \
	X(write_imm, "WRITE with immediate")                                                                 \
	X(send, "SEND")                                                                                      \
	X(send_imm, "SEND with immediate")                                                                   \
	X(send_inv, "SEND with invalidate")                                                                  \
	X(fetch_add, "fetch and add")                                                                        \
	X(compare_swap, "compare and swap")                                                                  \
	X(received, "message received")                                                                      \
	/* of the side connection */                                                                         \
	X(uc_send, "UC SEND")                                                                                \
	X(uc_send_imm, "UC SEND with immediate")                                                             \
	X(uc_write, "UC WRITE")                                                                              \
	X(uc_write_imm, "UC WRITE with immediate")                                                           \
	X(ud_send, "UD SEND")                                                                                \
	X(ud_send_imm, "UD SEND with immediate")                                                             \
	X(uc_received, "UC message received")                                                                \
	X(ud_received, "UD message received")                                                                \
	X(shared_received, "message received from an SRQ")                                                   \
	/* how they were posted, polled, and on what */                                                      \
	X(inlined, "inline data")                                                                            \
	X(unpinned_local, "local buffer in unpinned memory")                                                 \
	X(mixed_local, "local buffers in pinned and unpinned memory at once")                                \
	X(unsignaled, "request without a completion")                                                        \
	X(strict_order, "request in strict order")                                                           \
	X(relaxed_order, "request in relaxed order")                                                         \
	X(all_signaled, "request with sq_sig_all")                                                           \
	X(extended, "request by ibv_wr_*()")                                                                 \
	X(extended_poll, "completion by ibv_start_poll()")                                                   \
	X(waited, "wait for a completion event")                                                             \
	X(in_anonymous, "request on anonymous memory")                                                       \
	X(in_huge_pages, "request on transparent huge pages")                                                \
	X(in_memfd, "request on memfd")                                                                      \
	X(in_hugetlb, "request on hugetlb")                                                                  \
	X(in_ext4, "request on ext4")                                                                        \
	X(in_xfs, "request on xfs")                                                                          \
	X(in_ext4_dax, "request on ext4 with DAX")                                                           \
	X(in_xfs_dax, "request on xfs with DAX")                                                             \
	/* the probe */                                                                                      \
	X(probe_read, "probe READ")                                                                          \
	X(probe_write, "probe WRITE")                                                                        \
	X(read_of_gone, "READ of what is gone, refused")                                                     \
	X(write_to_gone, "WRITE to what is gone, refused")                                                   \
	X(read_of_read_only, "READ of what is read-only")                                                    \
	X(write_to_read_only, "WRITE to what is read-only, refused")                                         \
	X(refused_invalidate, "SEND that would invalidate a region, refused")                                \
	/* what library and kernel had to do for it */                                                       \
	X(fault, "fault request")                                                                            \
	X(hold, "request for a hold")                                                                        \
	X(suspicious, "page of a READ that looked absent")                                                   \
	X(repeated, "page of a WRITE written again")                                                         \
	X(page_lost, "page that peers had and lost")                                                         \
	X(page_faulted, "page brought for peers")                                                            \
	X(page_read_back, "page brought for peers from swap or disk")                                        \
	X(page_held, "page held for peers")                                                                  \
	/* leases; the kernel counts all but the next two, which the library does */                         \
	X(lease_got, "lease that libnprdma got")                                                             \
	X(recall_heard, "recall that libnprdma heard of")                                                    \
	X(remote_lease, "lease of a peer's memory")                                                          \
	X(local_lease, "lease of a process's own memory")                                                    \
	X(lease_returned, "page of a lease given back")                                                      \
	X(lease_overdue, "lease not given back in time")                                                     \
	X(recall_change, "recall: memory changed")                                                           \
	X(recall_memory, "recall: memory is short")                                                          \
	X(recall_budget, "recall: others want leases")                                                       \
	X(recall_age, "recall: leased for long")                                                             \
	X(recall_gone, "region deregistered with leases out")                                                \
	/* of the owner's memory, not to be noticed */                                                       \
	X(page_out, "MADV_PAGEOUT")                                                                          \
	X(page_out_all, "MADV_PAGEOUT of all")                                                               \
	X(page_out_inbox, "MADV_PAGEOUT of receive buffers")                                                 \
	X(cold, "MADV_COLD")                                                                                 \
	X(huge_advice, "MADV_HUGEPAGE or MADV_NOHUGEPAGE")                                                   \
	X(collapse, "MADV_COLLAPSE")                                                                         \
	X(fork, "fork")                                                                                      \
	X(dont_fork, "fork with MADV_DONTFORK")                                                              \
	X(others, "memory of others")                                                                        \
	X(clear_refs, "clear_refs")                                                                          \
	X(mergeable, "MADV_MERGEABLE")                                                                       \
	X(unmergeable, "MADV_UNMERGEABLE")                                                                   \
	X(move_pages, "move_pages")                                                                          \
	X(soft_offline, "MADV_SOFT_OFFLINE")                                                                 \
	X(lock, "mlock")                                                                                     \
	X(sync, "msync")                                                                                     \
	X(prefetch, "IBV_ADVISE_MR_ADVICE_PREFETCH")                                                         \
	X(prefetch_write, "IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE")                                             \
	X(prefetch_no_fault, "IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT")                                       \
	X(reregister_refused, "ibv_rereg_mr, refused")                                                       \
	/* that peers may notice */                                                                          \
	X(drop, "MADV_DONTNEED")                                                                             \
	X(unmap, "munmap")                                                                                   \
	X(map_over, "mmap in its place")                                                                     \
	X(remap, "mremap away and back")                                                                     \
	X(protect_all, "PROT_NONE")                                                                          \
	X(protect_write, "PROT_READ")                                                                        \
	X(map_read_only, "mmap of a file, read-only")                                                        \
	X(free_lazily, "MADV_FREE")                                                                          \
	X(punch_hole, "hole punched")                                                                        \
	X(truncate, "file truncated")                                                                        \
	X(poison_page, "MADV_HWPOISON")                                                                      \
	X(userfault_missing, "page that userfaultfd has to bring")                                           \
	X(userfault_protected, "page that userfaultfd protects")                                             \
	X(reregister, "region registered again")                                                             \
	/* of the peer's memory */                                                                           \
	X(peer_page_out, "MADV_PAGEOUT of the peer's buffers")                                               \
	X(peer_collapse, "MADV_COLLAPSE of the peer's buffers")                                              \
	X(peer_fork, "fork of the peer")                                                                     \
	/* of the host */                                                                                    \
	X(request_size, "size of DMA requests")                                                              \
	X(dma_delay, "delay of DMA requests")                                                                \
	X(read_overlap, "READs that overlap")                                                                \
	X(posted_writes, "writes that are posted")                                                           \
	X(early_ack, "ACK before placement")                                                                 \
	X(out_of_order, "requests out of order")                                                             \
	X(cut_from_start, "requests cut from their start")                                                   \
	X(random_fetch, "packets fetched in random order")                                                   \
	X(trailing_dma, "DMA of queue pairs that failed")                                                    \
	X(link_loss, "packets lost")                                                                         \
	X(reclaim, "reclaim of the owners' group")                                                           \
	X(limit, "memory.max of the owners' group")                                                          \
	X(compact, "compaction")                                                                             \
	X(drop_caches, "caches dropped")                                                                     \
	X(swap_off, "swapoff")                                                                               \
	X(zram, "swap on zram")                                                                              \
	X(fault_around, "fault-around")                                                                      \
	X(cpu, "CPU offline")                                                                                \
	X(balancing, "NUMA balancing")                                                                       \
	X(merging, "KSM")                                                                                    \
	X(lease_age, "leases that are soon recalled")                                                        \
	X(lease_budget, "lease for who has none when all are taken")                                         \
	X(block, "memory block offline")                                                                     \
	/* stops of a peer that has leases */                                                                \
	X(stop_idle, "idle peer stopped until its leases were overdue")                                      \
	X(stop_gone, "idle peer stopped and its region deregistered")                                        \
	X(stop_busy, "peer stopped with requests under way")                                                 \
	X(stop_lived, "stopped with requests under way, all completed")                                      \
	X(stop_lost, "stopped with requests under way, queue pair lost")                                     \
	/* ends */                                                                                           \
	X(kill_peer, "peer killed")                                                                          \
	X(kill_owner, "owner killed")                                                                        \
	X(kill_both, "both killed")                                                                          \
	X(exec, "exec of an owner")                                                                          \
	X(oom_kill, "owner killed for want of memory")                                                       \
	X(reap, "owner that cannot end, reaped")                                                             \
	X(unbind, "driver unbound")                                                                          \
	X(unplug, "device unplugged")

enum class kind : unsigned {
#define X(name, text) name,
	SOAK_KINDS(X)
#undef X
	    end
};

inline constexpr std::size_t kinds = static_cast<std::size_t>(kind::end);

/* Whether a peer that was stopped with requests under way keeps its queue pair is not up to the soak. */
constexpr bool may_never_happen(kind k)
{
	return k == kind::stop_lived || k == kind::stop_lost;
}

inline constexpr const char *kind_names[kinds] = {
#define X(name, text) text,
    SOAK_KINDS(X)
#undef X
};

/* Shared by all processes. */
class tally
{
public:
	void tried(kind k, std::uint64_t n = 1) { tried_[index(k)] += n; }
	void done(kind k, std::uint64_t n = 1) { done_[index(k)] += n; }
	/* For what is done at once. */
	void note(kind k, bool happened)
	{
		tried(k);
		done(k, happened);
	}
	/* For what others did, so often. */
	void add(kind k, std::uint64_t n)
	{
		tried(k, n);
		done(k, n);
	}
	[[nodiscard]] std::uint64_t tries(kind k) const { return tried_[index(k)]; }
	[[nodiscard]] std::uint64_t count(kind k) const { return done_[index(k)]; }

private:
	static std::size_t index(kind k) { return static_cast<std::size_t>(k); }

	std::atomic<std::uint64_t> tried_[kinds], done_[kinds];
};

class random_source
{
public:
	explicit random_source(std::uint64_t seed) : engine_(seed) {}

	/* [0, bound) */
	std::uint64_t below(std::uint64_t bound) { return engine_() % bound; }
	std::uint64_t between(std::uint64_t first, std::uint64_t last)
	{
		return first + below(last - first + 1);
	}
	bool one_in(std::uint64_t n) { return !below(n); }
	std::uint64_t word() { return engine_(); }

private:
	std::mt19937_64 engine_;
};

/* Cards in random order: each has its turn before one comes again. */
template <class T> class deck
{
public:
	explicit deck(std::vector<T> cards) : cards_(std::move(cards)), next_(cards_.size()) {}

	T draw(random_source &random)
	{
		if (next_ == cards_.size()) {
			for (std::size_t i = cards_.size(); i > 1; i--)
				std::swap(cards_[i - 1], cards_[random.below(i)]);
			next_ = 0;
		}
		return cards_[next_++];
	}

private:
	std::vector<T> cards_;
	std::size_t next_;
};

} // namespace soak

#endif
