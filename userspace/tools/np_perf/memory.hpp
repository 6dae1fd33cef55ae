/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Memory of one end, what is resident of it, and what takes it away. */
#ifndef NP_PERF_MEMORY_HPP
#define NP_PERF_MEMORY_HPP

#include "test.hpp"

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace perf
{

/* Data that tells from which operation it is. */
struct pattern {
	std::uint64_t key;

	/* @pass: number; @from: who sends it: a thread, and which end; @index: operation or slot. */
	pattern(std::uint64_t pass, std::uint64_t from, std::uint64_t index) noexcept;
	void fill(std::span<std::byte> out) const noexcept;
	[[nodiscard]] bool matches(std::span<const std::byte> in) const noexcept;
};

class memory
{
public:
	/* @minor: what make_absent() takes stays in memory. */
	memory(std::size_t bytes, bool minor, bool small_pages);
	memory(const memory &) = delete;
	memory &operator=(const memory &) = delete;
	~memory();

	[[nodiscard]] std::byte *at(std::size_t offset) const noexcept { return addr_ + offset; }
	[[nodiscard]] std::span<std::byte> all() const noexcept { return {addr_, bytes_}; }

	void make_resident() const noexcept;
	/* Of each 100 pages @percent, as far as the kernel does it. */
	void make_absent(unsigned percent, std::uint64_t seed) const;
	/* Per cent of the pages that are not in memory, or, of a memory whose pages stay there, not mapped.
	 */
	[[nodiscard]] unsigned absent() const;

private:
	[[nodiscard]] std::size_t not_in_memory() const;
	[[nodiscard]] std::size_t not_mapped() const;

	std::byte *addr_ = nullptr;
	std::size_t bytes_;
	bool minor_;
};

/*
 * This process in a memory group of its own, and a child outside of it that makes the kernel
 * reclaim from the group as long as it is told to.
 */
class evictor
{
public:
	/* Before anything of verbs is opened, because it forks. */
	explicit evictor(std::size_t bytes_at_once);
	evictor(const evictor &) = delete;
	evictor &operator=(const evictor &) = delete;
	~evictor();

	/* Once, and no more than that. */
	void reclaim(std::size_t bytes) const;
	void start();
	/* Returns the bytes that were reclaimed since start(). */
	std::uint64_t stop();

private:
	[[noreturn]] void evict(int commands, std::size_t bytes) const;
	void tell(char what) const;

	std::string group_;
	std::uint64_t before_ = 0;
	int commands_ = -1;
	pid_t child_ = -1;
};

} // namespace perf

#endif // NP_PERF_MEMORY_HPP
