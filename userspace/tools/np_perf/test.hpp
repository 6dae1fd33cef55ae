/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What one test is, and where its messages lie in memory. Both ends compute the same
 * from the same description, which the client sends.
 */
#ifndef NP_PERF_TEST_HPP
#define NP_PERF_TEST_HPP

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>

namespace perf
{

enum class verb : std::uint8_t { read, write, write_imm, send, fetch_add, cmp_swap };
enum class transport : std::uint8_t { rc, uc, ud };
enum class mode : std::uint8_t { pinned, optimistic, leases, preload };

inline constexpr std::array<std::string_view, 6> verb_names = {"read", "write",     "write_imm",
							       "send", "fetch_add", "cmp_swap"};
inline constexpr std::array<std::string_view, 3> transport_names = {"rc", "uc", "ud"};
inline constexpr std::array<std::string_view, 4> mode_names = {"pinned", "optimistic", "leases", "preload"};

template <class E, std::size_t N>
[[nodiscard]] constexpr std::string_view name_of(const std::array<std::string_view, N> &names, E e)
{
	return names.at(static_cast<std::size_t>(e));
}

inline constexpr std::size_t page_size = 4096;
inline constexpr std::size_t grh_bytes = 40;
inline constexpr std::uint64_t KiB = 1ULL << 10, MiB = 1ULL << 20, GiB = 1ULL << 30;

/* Bounds of what may be asked for; the device's own come on top. */
inline constexpr std::uint64_t max_size = 1 * GiB, max_span = 64 * GiB;
inline constexpr unsigned max_threads = 64, max_window = 8192, max_inline = 1024, max_sessions = 4;
/* Memory of one thread, unless there is more in one message, or --span. */
inline constexpr std::uint64_t usual_span = 16 * MiB;

struct device_choice {
	std::string name;   /* empty: the first one */
	int gid_index = -1; /* -1: the first one that suits */
};

enum end_flags : std::uint8_t { at_target = 1, at_client = 2 };

struct test {
	verb op = verb::read;
	transport over = transport::rc;
	mode how = mode::pinned;
	bool latency = true;
	bool completion = false; /* a latency is from the posting of an operation to its completion */
	bool verify = false;
	bool ordered = false;
	bool random = false;
	bool minor = false; /* what is absent stays in memory */
	std::uint16_t threads = 1, window = 1, signal_every = 1, inline_bytes = 0, unaligned = 0;
	std::uint8_t absent = 0, local_absent = 0; /* per cent */
	std::uint8_t pressure = 0;                 /* end_flags */
	std::uint64_t size = 0;                    /* of the largest message */
	std::uint64_t span = 0;                    /* 0: as much as the window needs */
	std::uint64_t run = 0;                     /* which the sessions of one run have in common */
	std::uint8_t sessions = 1;                 /* of this run */

	[[nodiscard]] bool is_atomic() const noexcept
	{
		return op == verb::fetch_add || op == verb::cmp_swap;
	}
	/* Takes receives of the other end. */
	[[nodiscard]] bool takes_receives() const noexcept
	{
		return op == verb::send || op == verb::write_imm;
	}
	/* Both ends send in turns. */
	[[nodiscard]] bool pingpong() const noexcept
	{
		return latency && !completion && op != verb::read && !is_atomic();
	}
	[[nodiscard]] bool unpinned() const noexcept { return how != mode::pinned; }
	[[nodiscard]] bool library() const noexcept { return how == mode::optimistic || how == mode::leases; }
};

/*
 * Where the messages of one size are in the two areas of a thread: the target area, where they
 * land and where READs come from, and the source area of those who post.
 */
struct layout {
	std::uint64_t stride;                     /* of messages */
	std::uint64_t slots, local_slots;         /* of the target area and the source area */
	std::uint64_t receive_stride, receives;   /* of the target area, if messages are received there */
	std::uint64_t target_bytes, source_bytes; /* of a thread, whatever the size of a message */
	std::uint64_t step;                       /* from slot to slot of the target, in order or not */

	layout(const test &t, std::uint64_t size) noexcept
	{
		const std::uint64_t largest = stride_of(t.size), window = t.pingpong() ? 4 : t.window;
		const auto span_for = [&](std::uint64_t each) {
			return std::max(each, std::min(window * each, usual_span));
		};
		const std::uint64_t span = t.span ? std::max(t.span, largest) : span_for(largest);
		const std::uint64_t received = stride_of(t.size + (t.over == transport::ud ? grh_bytes : 0));
		const std::uint64_t local = t.pingpong()               ? window * largest
					    : t.local_absent && t.span ? span
								       : span_for(largest);

		stride = stride_of(size);
		slots = t.span ? span / stride
			       : std::clamp<std::uint64_t>(span / stride, 1, t.pingpong() ? 1 : window);
		local_slots = std::max<std::uint64_t>(1, local / stride);
		if (!(t.local_absent && t.span))
			local_slots = std::min(local_slots, window);
		receive_stride = received;
		receives = std::max<std::uint64_t>(1, span / received);
		target_bytes = whole_pages(std::max(span, received) + t.unaligned);
		source_bytes = whole_pages(local + t.unaligned);
		step = 1;
		if (t.random && slots > 2) {
			/* Every slot once in each round of them, and none beside the one before. */
			step = slots * 5 / 8 | 1;
			while (std::gcd(step, slots) != 1)
				step += 2;
		}
	}

	/* Operation @i goes there. */
	[[nodiscard]] std::uint64_t slot(std::uint64_t i) const noexcept { return i % slots * step % slots; }
	/* How often its slot was visited before. */
	[[nodiscard]] std::uint64_t visits(std::uint64_t i) const noexcept { return i / slots; }

private:
	static std::uint64_t stride_of(std::uint64_t size) noexcept { return (size + 63) / 64 * 64; }
	static std::uint64_t whole_pages(std::uint64_t n) noexcept
	{
		return (n + page_size - 1) / page_size * page_size;
	}
};

/* The memory of an end: the target areas of all threads, then the source areas. */
struct memory_plan {
	std::uint64_t target_bytes, source_bytes, threads;

	memory_plan(const test &t, bool client) noexcept : threads(t.threads)
	{
		const layout l(t, t.size);

		target_bytes = !client || t.pingpong() ? l.target_bytes : 0;
		source_bytes = client || t.pingpong() ? l.source_bytes : 0;
	}
	[[nodiscard]] std::uint64_t bytes() const noexcept { return threads * (target_bytes + source_bytes); }
	[[nodiscard]] std::uint64_t target(std::uint64_t thread) const noexcept
	{
		return thread * target_bytes;
	}
	[[nodiscard]] std::uint64_t source(std::uint64_t thread) const noexcept
	{
		return threads * target_bytes + thread * source_bytes;
	}
};

} // namespace perf

#endif // NP_PERF_TEST_HPP
