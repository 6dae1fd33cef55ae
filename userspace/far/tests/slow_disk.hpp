/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What fdatasync(2) does in this program. The function itself is in server_test.cpp. */
#ifndef NPRDMA_FAR_TESTS_SLOW_DISK_HPP
#define NPRDMA_FAR_TESTS_SLOW_DISK_HPP

#include <chrono>
#include <condition_variable>
#include <mutex>

struct slow_disk {
	std::mutex mutex;
	std::condition_variable change;
	bool slow = false; /* it does not end, but for 30 seconds */
	int error = 0;
	unsigned inside = 0, calls = 0;

	void be(bool is_slow)
	{
		const std::lock_guard guard(mutex);

		slow = is_slow;
		calls = 0;
		change.notify_all();
	}
	void fail_with(int code)
	{
		const std::lock_guard guard(mutex);

		error = code;
	}
	[[nodiscard]] bool wait_for_one()
	{
		std::unique_lock lock(mutex);

		return change.wait_for(lock, std::chrono::seconds(10), [&] { return inside != 0; });
	}
};

extern slow_disk disk;

#endif
