/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The thread that looks after leases while the application does not: it reads recalls, and lets
 * leases go back that were not used for some time. And it takes the turns of requests of which the application
 * waits for what they do, but does not poll: for memory, say, that the peer's answer will change. There is one
 * for each context.
 *
 * Its clients are what has leases: those of local memory, and completion queues with their queue pairs.
 * It sleeps as long as none of them has any, nor anything that waits for turns, and else until one of their channels
 * has events, or a period or a pause is over.
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
	/*
	 * In ns, until the first turn of a client, and then between two: half as long as the last one if there was something to
	 * do, twice as long if not. So an application that polls is hardly disturbed, nor is one that waits for its
	 * peer, and one that does not poll waits for a few of the first.
	 */
	static constexpr std::uint64_t shortest = 500'000, longest = 16'000'000;
	/* False: nobody has turns. For tests that look at a queue while something waits there; before the first request. */
	bool gives_turns = true;

	class client {
	public:
		client() = default;
		client(const client &) = delete;
		client &operator=(const client &) = delete;
		/* The thread calls it, but not before watch(). @age: a period is over. */
		virtual void tend(bool age) noexcept = 0;
		/* The same, but not before attend(). True: there was something to do, or there may be soon. */
		virtual bool take_turn() noexcept { return false; }

	protected:
		~client() = default;

	private:
		friend lease_keeper;
		std::atomic<bool> watched_{false};
		std::atomic<std::uint64_t> attended_{0}; /* 0: it needs no turns; or for which time it does */
		/* The client's: */
		bool known_ = false; /* there was an add() */
		int channel_ = -1;
		std::uint64_t times_ = 0; /* of attended_, the last one */
		/* The thread's: attended_ as it was when the first of these turns was due, and times in ns */
		std::uint64_t serves_ = 0, pause_ = 0, turn_at_ = 0;
	};

	lease_keeper() = default;
	lease_keeper(const lease_keeper &) = delete;
	lease_keeper &operator=(const lease_keeper &) = delete;
	~lease_keeper();

	/*
	 * Opens @channel, where events of the client @c will come. With the first one the thread is started. 0; or a negative errno,
	 * and @channel is closed, and @c can have no leases, for it would not hear of recalls: -EAGAIN, if the thread
	 * could not be started, or no memory was found, now or within the last period. Under a lock of the client's.
	 */
	[[nodiscard]] int open(client &c, event_channel &channel) noexcept;
	/* The same with one that is open; none: -1. Throws. */
	void add(client &c, int channel);
	/* The thread is not at @c any more, nor will be; if it ever was. Under no lock that tend() takes. */
	void remove(client &c) noexcept;
	/* @c has leases, or has asked for some; or has none any more. Under a lock of its own. */
	void watch(client &c, bool has) noexcept
	{
		/* Relaxed: the lock orders changes, and the thread, if it is late, comes again. */
		if (c.watched_.load(std::memory_order_relaxed) != has)
			change(c, has);
	}
	/*
	 * @c has something that waits for turns, and the thread is started with the first one; or has nothing any more. Under
	 * a lock of its own. False: there is no thread, because it could not be started, now or within the last
	 * period: it is not tried more often, as each try costs system calls. @c has no turns then, but what its application
	 * does for it, and says it again when something new waits.
	 */
	bool attend(client &c, bool has) noexcept;

private:
	/* add(), but for a period after it has failed. */
	[[nodiscard]] bool try_add(client &c, int channel) noexcept;
	void start();
	void change(client &c, bool has) noexcept;
	void wake() noexcept;
	/* When the next turn is due; 0: none is waited for. */
	[[nodiscard]] std::uint64_t next_turn(std::uint64_t time) noexcept;
	void sleep(std::uint64_t time, std::uint64_t until) const noexcept;
	void read_events() noexcept;
	void run() noexcept;

	std::atomic<std::uint64_t> not_before_{0}; /* in ns: try_add() has failed */
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
