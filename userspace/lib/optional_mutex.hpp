/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The lock of everything that one thread at a time uses anyway if the application says so. */
#ifndef NPR_OPTIONAL_MUTEX_HPP
#define NPR_OPTIONAL_MUTEX_HPP

#include <atomic>
#include <cstdint>

namespace npr {

/*
 * A lock that is held for a few hundred nanoseconds and nearly never contended. It is on the path of every post
 * and poll, so the free case is one compare-and-swap in line.
 */
class light_mutex {
public:
	void lock() noexcept
	{
		std::uint32_t expected = free;

		/* acquire: what the last holder wrote is seen; pairs with unlock() */
		if (!state_.compare_exchange_strong(expected, held, std::memory_order_acquire,
						    std::memory_order_relaxed)) [[unlikely]]
			wait();
	}

	[[nodiscard]] bool try_lock() noexcept
	{
		std::uint32_t expected = free;

		/* acquire: as in lock() */
		return state_.compare_exchange_strong(expected, held, std::memory_order_acquire, std::memory_order_relaxed);
	}

	void unlock() noexcept
	{
		/* release: pairs with lock() and wait() */
		if (state_.exchange(free, std::memory_order_release) == awaited) [[unlikely]]
			wake();
	}

private:
	static constexpr std::uint32_t free = 0, held = 1, awaited = 2;

	[[gnu::noinline, gnu::cold]] void wait() noexcept
	{
		/* acquire: as in lock(); a waiter leaves "awaited", for it may not be alone */
		while (state_.exchange(awaited, std::memory_order_acquire) != free)
			state_.wait(awaited, std::memory_order_relaxed);
	}
	[[gnu::noinline, gnu::cold]] void wake() noexcept { state_.notify_one(); }

	std::atomic<std::uint32_t> state_{free};
};

/* One that an application can do without. */
class optional_mutex {
public:
	explicit optional_mutex(bool wanted) noexcept : wanted_(wanted) {}

	void lock() noexcept
	{
		if (wanted_)
			mutex_.lock();
	}
	void unlock() noexcept
	{
		if (wanted_)
			mutex_.unlock();
	}

private:
	light_mutex mutex_;
	const bool wanted_;
};

} // namespace npr

#endif
