/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The thread that looks after leases while the application does not: it reads recalls, and lets
 * leases go back that were not used for some time. There is one for each context.
 *
 * Its clients are what has leases: those of local memory, and completion queues with their queue pairs.
 * It sleeps as long as none of them has any, and else until one of their channels has events, or a
 * period is over.
 *
 * The thread holds no lock while it is at a client, and a client says that it has leases without one: so
 * clients are free to do that under theirs, which tend() takes.
 */
#ifndef NPR_LEASE_KEEPER_HPP
#define NPR_LEASE_KEEPER_HPP

#include "world/event_channel.hpp"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace npr {

class lease_keeper {
public:
	/* In ns. What is not used between two looks goes back at the second one. */
	static constexpr std::uint64_t period = 100'000'000;

	class client {
	public:
		client() = default;
		client(const client &) = delete;
		client &operator=(const client &) = delete;
		/* The thread calls it, but not before watch(). @age: a period is over. */
		virtual void tend(bool age) noexcept = 0;

	protected:
		~client() = default;

	private:
		friend lease_keeper;
		std::atomic<bool> watched_{false};
		int channel_ = -1;
	};

	lease_keeper() = default;
	lease_keeper(const lease_keeper &) = delete;
	lease_keeper &operator=(const lease_keeper &) = delete;
	~lease_keeper();

	/*
	 * Opens @channel, where events of the client @c will come. With the first one the thread is started.
	 * False: it is closed, and @c can have no leases, for it would not hear of recalls. Under a lock of the client's.
	 */
	[[nodiscard]] bool open(client &c, event_channel &channel) noexcept;
	/* The same with one that is open. Throws. */
	void add(client &c, int channel);
	/* The thread is not at @c any more, nor will be. Under no lock that tend() takes. */
	void remove(client &c) noexcept;
	/* @c has leases, or has asked for some; or has none any more. Under a lock of its own. */
	void watch(client &c, bool has) noexcept
	{
		/* Relaxed: the lock orders changes, and the thread, if it is late, comes again. */
		if (c.watched_.load(std::memory_order_relaxed) != has)
			change(c, has);
	}

private:
	void start();
	void change(client &c, bool has) noexcept;
	void wake() noexcept;
	void run() noexcept;

	int epoll_ = -1, event_ = -1;
	std::mutex mutex_; /* of what follows */
	std::condition_variable left_;
	std::vector<client *> clients_;
	const client *at_ = nullptr; /* where the thread is */
	bool stop_ = false;
	std::thread thread_;
};

} // namespace npr

#endif
