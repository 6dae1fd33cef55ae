/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The lock of what the application and, now and then, one thread of the library use. */
#ifndef NPR_VISITED_MUTEX_HPP
#define NPR_VISITED_MUTEX_HPP

#include "optional_mutex.hpp"

#include <atomic>
#include <cstdint>
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace npr {

/*
 * An application that comes with one thread at a time needs no lock but for the thread of the library, the
 * visitor, which comes some ten times a second. So the application pays for no atomic read-modify-write: it
 * stores that it is inside and then loads whether there is a visitor; and the visitor stores that there is one, has
 * all other threads pass a full barrier, which membarrier(2) is for, and then loads whether the
 * application is inside. One of the two sees the other, and it is the application that makes way.
 */
class visited_mutex {
public:
	/* @threads: the application comes with several at a time. */
	explicit visited_mutex(bool threads) noexcept : threads_(threads || !barrier_is_there()) {}

	void lock() noexcept
	{
		if (threads_)
			return mutex_.lock();
		/* relaxed, and the order is the compiler's to keep: the visitor's barrier is one here, too */
		inside_.store(1, std::memory_order_relaxed);
		std::atomic_signal_fence(std::memory_order_seq_cst);
		/* acquire: what the last visitor wrote is seen; pairs with leave() */
		if (visitor_.load(std::memory_order_acquire)) [[unlikely]]
			make_way();
	}

	/* False: it was another one's, or a visitor was there. */
	[[nodiscard]] bool try_lock() noexcept
	{
		if (threads_)
			return mutex_.try_lock();
		/* relaxed, acquire: as in lock() */
		inside_.store(1, std::memory_order_relaxed);
		std::atomic_signal_fence(std::memory_order_seq_cst);
		if (!visitor_.load(std::memory_order_acquire)) [[likely]]
			return true;
		tell_visitor();
		return false;
	}

	void unlock() noexcept
	{
		if (threads_)
			return mutex_.unlock();
		/* release: pairs with visit() */
		inside_.store(0, std::memory_order_release);
		std::atomic_signal_fence(std::memory_order_seq_cst);
		/* relaxed: as in lock() */
		if (visitor_.load(std::memory_order_relaxed)) [[unlikely]]
			tell_visitor();
	}

	/* lock() and unlock() of the visitor. */
	void visit() noexcept
	{
		if (threads_)
			return mutex_.lock();
		visitor_.store(1, std::memory_order_relaxed); /* the barrier orders it */
		syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
		/* acquire: what the application wrote is seen; pairs with unlock() and make_way() */
		while (inside_.load(std::memory_order_acquire))
			inside_.wait(1, std::memory_order_relaxed);
	}

	void leave() noexcept
	{
		if (threads_)
			return mutex_.unlock();
		/* release: pairs with lock() and make_way(); and no load of notify_one() is before it */
		visitor_.exchange(0, std::memory_order_seq_cst);
		visitor_.notify_one();
	}

private:
	[[nodiscard]] static bool barrier_is_there() noexcept
	{
		return !syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0);
	}

	[[gnu::noinline, gnu::cold]] void make_way() noexcept
	{
		do {
			tell_visitor();
			visitor_.wait(1, std::memory_order_relaxed);
			/* relaxed, acquire: as in lock() */
			inside_.store(1, std::memory_order_relaxed);
			std::atomic_signal_fence(std::memory_order_seq_cst);
		} while (visitor_.load(std::memory_order_acquire));
	}

	[[gnu::noinline, gnu::cold]] void tell_visitor() noexcept
	{
		/* release: as in unlock(); and no load of notify_one() is before it */
		inside_.exchange(0, std::memory_order_seq_cst);
		inside_.notify_one();
	}

	const bool threads_;
	std::atomic<std::uint32_t> inside_{0}, visitor_{0};
	light_mutex mutex_;
};

/* As std::lock_guard, of the visitor. */
class visit_guard {
public:
	explicit visit_guard(visited_mutex &m) noexcept : mutex_(m) { mutex_.visit(); }
	visit_guard(const visit_guard &) = delete;
	visit_guard &operator=(const visit_guard &) = delete;
	~visit_guard() { mutex_.leave(); }

private:
	visited_mutex &mutex_;
};

} // namespace npr

#endif
