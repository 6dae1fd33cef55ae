/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A channel of the kernel's: events, and a word that the kernel writes and all can read, which says how many
 * were posted there so far. So it costs no system call to see that there is nothing to read.
 */
#ifndef NPR_EVENT_CHANNEL_HPP
#define NPR_EVENT_CHANNEL_HPP

#include "world/kernel.hpp"
#include "world/uncancelled.hpp"
#include "world/unique_fd.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace npr {

class event_channel {
public:
	explicit event_channel(kernel &k) noexcept : kernel_(k) {}
	event_channel(const event_channel &) = delete;
	event_channel &operator=(const event_channel &) = delete;
	~event_channel() { close(); }

	/* 0 or a negative errno. */
	[[nodiscard]] int open() noexcept
	{
		int fd;

		if (const int rc = kernel_.channel(fd))
			return rc;
		fd_ = unique_fd(fd);
		mapped_ = kernel_.map_posted(fd);
		posted_ = mapped_ ? mapped_ : &always_;
		return 0;
	}

	void close() noexcept
	{
		if (mapped_)
			kernel_.unmap_posted(mapped_);
		mapped_ = nullptr;
		posted_ = &seen_;
		fd_ = unique_fd();
	}

	[[nodiscard]] int get() const noexcept { return fd_.get(); }
	[[nodiscard]] bool is_open() const noexcept { return fd_.get() >= 0; }
	/* False: the kernel does not say how many there are, and whoever wants to know has to read. */
	[[nodiscard]] bool is_mapped() const noexcept { return mapped_; }

	/* Is there something to read, for all that is known? If not, what read() found before was done. */
	[[nodiscard, gnu::always_inline]] bool has_events() const noexcept
	{
		/* acquire, the first: what is posted up to here can be read; the second: pairs with read() */
		return posted_->load(std::memory_order_acquire) != seen_.load(std::memory_order_acquire);
	}

	/* The word of has_events(), for who remembers what it was, as long as this is open: it is never behind seen(). */
	[[nodiscard]] const std::atomic<std::uint64_t> &posted() const noexcept { return *posted_; }
	/* So many were read, and what read() found was done. */
	[[nodiscard]] std::uint64_t seen() const noexcept
	{
		return seen_.load(std::memory_order_acquire); /* acquire: pairs with read() */
	}

	/* All that there are, by @f(event). One thread at a time. */
	template <class F> void read(F &&f) noexcept
	{
		const uncancelled here;
		std::array<rdma_np_event, 8> events;
		/* acquire: as in has_events() */
		const std::uint64_t posted = mapped_ ? mapped_->load(std::memory_order_acquire) : 0;

		for (;;) {
			const int n = kernel_.read_events(fd_.get(), events);

			for (int i = 0; i < n; ++i)
				f(events[static_cast<std::size_t>(i)]);
			/* The kernel gives as many as there are. */
			if (n < static_cast<int>(events.size()))
				break;
		}
		/* release: who sees that they were read sees what @f did */
		seen_.store(posted, std::memory_order_release);
	}

private:
	kernel &kernel_;
	unique_fd fd_;
	std::atomic<std::uint64_t> *mapped_ = nullptr; /* null: the kernel does not say */
	std::atomic<std::uint64_t> seen_{0};	       /* up to here they were read */
	/* What has_events() compares: nothing is there before it is open, and always something if the kernel does not say. */
	const std::atomic<std::uint64_t> *posted_ = &seen_;
	static inline const std::atomic<std::uint64_t> always_{~0ULL};
};

} // namespace npr

#endif
