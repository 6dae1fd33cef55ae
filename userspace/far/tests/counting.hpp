/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A store of this process that counts, and what its tests have in common. */
#ifndef NPRDMA_FAR_TESTS_COUNTING_HPP
#define NPRDMA_FAR_TESTS_COUNTING_HPP

#include "guarded.hpp"
#include "must.hpp"

#include <nprdma/far.hpp>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <vector>

namespace far_tests
{

using namespace nprdma::far;

inline std::uint64_t word_of(std::uint64_t index, std::uint64_t seed = 1)
{
	std::uint64_t x = (index + seed) * 0x9e3779b97f4a7c15ULL;

	return x ^ x >> 29;
}

/* A user's store: counts, and fails or stalls on demand. */
class counting : public store
{
public:
	explicit counting(std::size_t size) : memory_(size) {}

	[[nodiscard]] std::uint64_t bytes() const noexcept override { return memory_.size(); }

	status read(const piece &p) noexcept override
	{
		stall();
		reads++;
		if (fail_reads) {
			/* In part, as a link that is cut does it. */
			std::memset(p.memory.data(), 0xee, p.memory.size() / 2);
			return error{EIO, "as asked for"};
		}
		std::memcpy(p.memory.data(), memory_.data() + p.offset, p.memory.size());
		return {};
	}

	status write(const piece &p) noexcept override
	{
		writes++;
		if (p.offset == 0)
			first_writes++;
		if (fail_writes)
			return error{EIO, "as asked for"};
		std::memcpy(memory_.data() + p.offset, p.memory.data(), p.memory.size());
		return {};
	}

	status flush() noexcept override
	{
		flushes++;
		return {};
	}

	void stall()
	{
		std::unique_lock lock(mutex_);

		inside_++;
		change_.notify_all();
		change_.wait(lock, [&] { return !stalled_; });
	}
	void set_stalled(bool on)
	{
		const std::lock_guard guard(mutex_);

		stalled_ = on;
		change_.notify_all();
	}
	void wait_for_readers(int n)
	{
		std::unique_lock lock(mutex_);

		change_.wait(lock, [&] { return inside_ >= n; });
	}

	std::vector<char> memory_;
	std::atomic<int> reads = 0, writes = 0, flushes = 0;
	std::atomic<int> first_writes = 0; /* of what begins at 0 */
	std::atomic<bool> fail_reads = false, fail_writes = false;

private:
	std::mutex mutex_;
	std::condition_variable change_;
	bool stalled_ = false;
	int inside_ = 0;
};

inline std::uint64_t *words(const mapping &m)
{
	return reinterpret_cast<std::uint64_t *>(m.memory().data());
}

/* Of a page that may fail. */
inline int signal_at(const std::byte *at)
{
	return guarded::signal_of([at] { (void)*const_cast<const volatile std::byte *>(at); });
}

inline pager_options small_buffer(std::uint64_t bytes, unsigned prefetch = 0)
{
	pager_options o;

	o.buffer_bytes = bytes;
	o.prefetch = prefetch;
	return o;
}

} // namespace far_tests

#endif
