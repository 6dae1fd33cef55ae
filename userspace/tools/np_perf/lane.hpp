/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The data path: one thread with its queue pair, at either end. */
#ifndef NP_PERF_LANE_HPP
#define NP_PERF_LANE_HPP

#include "link.hpp"
#include "statistics.hpp"

#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

namespace perf
{

[[nodiscard]] std::uint64_t now_ns() noexcept;

inline constexpr std::uint64_t no_limit = std::numeric_limits<std::uint64_t>::max();

/* When those who post stop: after so many operations, or at that time. */
struct goal {
	std::uint64_t operations = no_limit;
	std::uint64_t until_ns = no_limit;
};

/* Thrown by the threads that have to stop because another one has failed. */
struct aborted {
};

class lane
{
public:
	lane(link &l, const test &t, const endpoint &theirs, unsigned thread, bool client);

	/* Before a pass; operations are counted on from the one before if it does not @prepare memory. */
	void begin(const pass &p);
	/* The part of the preparation that changes memory. */
	void reset_memory();
	void post_receives();

	/* The client's part, which fills the samples. */
	void measure(const goal &g);
	/* The target's part: until the client is done with as many operations as limit says. */
	void respond();
	[[nodiscard]] bool responds() const noexcept { return test_.pingpong() || test_.takes_receives(); }
	/* Looks at what the client has left in the target area. */
	void check_target();

	[[nodiscard]] const std::vector<std::uint64_t> &latencies() const noexcept { return latencies_; }
	[[nodiscard]] std::vector<std::uint64_t> &latencies() noexcept { return latencies_; }
	[[nodiscard]] const std::vector<progress> &marks() const noexcept { return marks_; }
	/* Since memory was prepared. */
	[[nodiscard]] std::uint64_t operations() const noexcept { return next_; }
	[[nodiscard]] std::uint64_t received() const noexcept { return received_; }
	[[nodiscard]] std::uint64_t mismatches() const noexcept { return mismatches_; }

	/* Set by others. */
	std::atomic<std::uint64_t> limit{no_limit};
	std::atomic<bool> abort{false};

private:
	[[nodiscard]] std::uint64_t window() const noexcept;
	[[nodiscard]] pattern data(bool from_client, std::uint64_t index) const noexcept;
	[[nodiscard]] std::byte *source(std::uint64_t i) const noexcept;
	[[nodiscard]] std::byte *target(std::uint64_t slot) const noexcept;
	[[nodiscard]] std::byte *receive_place(std::uint64_t n) const noexcept;
	[[nodiscard]] std::uint8_t marker(std::uint64_t i) const noexcept;
	[[nodiscard]] bool marks_memory() const noexcept
	{
		return test_.pingpong() && test_.op == verb::write;
	}
	[[nodiscard]] bool finished(const goal &g, std::uint64_t from, std::uint64_t now) const noexcept;

	void post(std::uint64_t i, bool signaled);
	void post_receive();
	/* Completions seen. */
	unsigned poll();
	void idle();
	void sent(std::uint64_t i);
	void came(const ibv_wc &wc);
	void drain();

	void one_by_one(const goal &g);
	void windowed(const goal &g);
	void pingpong_first(const goal &g);
	void pingpong_second();
	/* False: it will not come. */
	bool wait_for(std::uint64_t i);

	const test &test_;
	queue &queue_;
	const bool client_;
	const unsigned thread_;
	std::byte *target_, *source_;
	std::uint64_t remote_;
	std::uint32_t rkey_, lkey_;

	pass pass_;
	layout at_;
	std::uint64_t next_ = 0, done_ = 0;         /* to be posted, and completed, of ours */
	std::uint64_t received_ = 0, expected_ = 0; /* of the other end: how many, and which one is next */
	std::uint64_t receives_posted_ = 0, receives_done_ = 0;
	std::uint64_t mismatches_ = 0, idle_ = 0, progress_at_ = 0;
	std::vector<std::uint64_t> latencies_;
	std::vector<progress> marks_;
};

} // namespace perf

#endif // NP_PERF_LANE_HPP
