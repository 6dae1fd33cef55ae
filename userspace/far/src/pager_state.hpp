/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The threads of a pager, its buffer, and what its mappings ask of it. */
#ifndef NPRDMA_FAR_PAGER_STATE_HPP
#define NPRDMA_FAR_PAGER_STATE_HPP

#include "area.hpp"

#include <condition_variable>
#include <shared_mutex>
#include <thread>

namespace nprdma::far
{

class pager_state
{
public:
	pager_state(const pager_options &how, uffd u, transport::descriptor events,
		    transport::descriptor work);
	~pager_state();

	status start();
	status add(std::shared_ptr<area> a);

	status flush(area &a);
	status evict(area &a);
	status discard(area &a, std::uint64_t offset, std::uint64_t bytes);
	status advise(area &a, std::uint64_t offset, std::uint64_t bytes, hint what);
	void retry(area &a);
	status unmap(const std::shared_ptr<area> &a, std::uint64_t offset, std::uint64_t bytes);
	/* Without a regard to what cannot be written back if @force. */
	status unmap_all(const std::shared_ptr<area> &a, bool force);

	[[nodiscard]] statistics stats(const area &a) const noexcept;
	[[nodiscard]] statistics stats() const noexcept;
	[[nodiscard]] const uffd &faults() const noexcept { return uffd_; }
	void set_buffer_bytes(std::uint64_t bytes) noexcept;

private:
	using reference = std::shared_ptr<area>;

	/* A thread that works on pages of an area: while there is one, the addresses are not given back. */
	class visit
	{
	public:
		visit() = default;
		visit(reference a, pager_state &p) noexcept : area_(std::move(a)), pager_(&p) {}
		visit(visit &&) = default;
		visit &operator=(visit &&) = delete;
		~visit();
		explicit operator bool() const noexcept { return area_ != nullptr; }
		area &operator*() const noexcept { return *area_; }
		const reference &shared() const noexcept { return area_; }

	private:
		reference area_;
		pager_state *pager_ = nullptr;
	};

	static constexpr std::size_t no_page = SIZE_MAX;
	struct ahead {
		reference of;
		std::vector<std::size_t> pages;
		std::size_t trigger = no_page; /* left unmapped: see learn() */
		std::uint64_t evictions = 0;   /* of the area when it was asked for */
	};

	[[nodiscard]] visit find(std::uintptr_t address) noexcept;
	[[nodiscard]] visit enter(const reference &a) noexcept;
	[[nodiscard]] std::vector<reference> areas() const;

	void filler(unsigned number) noexcept;
	void evictor() noexcept;
	/* @evictions: of all areas, before the message was read. */
	void fault(const uffd_msg &m, std::uint64_t evictions) noexcept;
	void bring(const reference &of, std::size_t page, bool write, std::uint64_t evictions) noexcept;
	void fail(area &a, std::size_t page) noexcept;
	void poison(area &a, std::size_t page, kind as = poisoned) noexcept;
	void learn(const reference &of, std::size_t page, bool expected, std::uint64_t evictions) noexcept;
	void push_ahead(ahead work) noexcept;
	[[nodiscard]] bool some_ahead() noexcept;
	status bring_ahead(area &a, std::span<const std::size_t> pages, std::size_t trigger_page,
			   std::uint64_t evictions, bool patient) noexcept;
	[[nodiscard]] status fill(area &a, std::size_t page) noexcept;
	void map(area &a, std::size_t page, bool write) noexcept;
	void enqueue(area &a, std::size_t page) noexcept;

	[[nodiscard]] bool reserve(area &a, bool wait) noexcept;
	void release(area &a, std::size_t pages) noexcept;
	/* What the buffer, or the area by itself, may have: above high, and until it is below low. */
	struct marks {
		std::uint64_t most, high, low;
	};
	[[nodiscard]] marks marks_of(std::uint64_t bytes, std::uint64_t page_bytes) const noexcept;
	/* @excess: bytes above its low mark. */
	[[nodiscard]] reference to_evict_from(std::uint64_t &excess, const area *fruitless) noexcept;
	struct evicted {
		std::size_t freed, moved; /* pages; moved: from one queue to the other */
	};
	evicted evict_some(area &a, std::size_t most, bool all, status *why) noexcept;
	status evict_idle(area &a) noexcept;
	[[nodiscard]] status give_back(area &a, std::vector<std::size_t> dirties,
				       std::vector<std::size_t> freed, bool all, std::size_t &count) noexcept;
	void cool_passed(area &a, std::size_t most) noexcept;
	[[nodiscard]] std::size_t unmap_some(area &a, std::size_t most) noexcept;
	[[nodiscard]] status write_back(area &a, std::span<const std::size_t> pages) noexcept;
	/* Own the page, waiting for who does. What it was. */
	[[nodiscard]] kind take(area &a, std::size_t page, kind as) noexcept;
	void hurry() noexcept;
	/* Set or take the entries of [first, end) from the queues. */
	void cool(area &a, std::size_t first, std::size_t end) noexcept;
	status pin(area &a, std::size_t first, std::size_t end) noexcept;

	const pager_options how_;
	const uffd uffd_;
	const transport::descriptor events_, work_;
	mutable std::shared_mutex areas_mutex_;
	std::vector<reference> areas_; /* by address */
	counters past_ = {};           /* of areas that are gone */

	std::atomic<std::uint64_t> buffer_bytes_;
	std::atomic<std::uint64_t> resident_ = 0, largest_page_ = 4096, clock_ = 0;
	std::mutex room_mutex_;
	std::condition_variable room_, evict_;
	std::atomic<unsigned> waiting_ = 0;
	bool evict_wanted_ = false;          /* under room_mutex_, as the next */
	std::uint64_t releases_ = 0;         /* that waiters were told of */
	std::atomic<bool> draining_ = false; /* above high, and not yet below low */

	std::mutex ahead_mutex_;
	std::deque<ahead> ahead_;  /* under ahead_mutex_, as the next */
	unsigned prefetching_ = 0; /* fillers */

	std::atomic<std::uint64_t> evictions_ = 0; /* of all of an area, that have begun */
	std::atomic<bool> stop_ = false;
	std::vector<std::thread> threads_;
};

} // namespace nprdma::far

#endif
