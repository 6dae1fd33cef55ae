/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A range of addresses that is registered once, and allocated from.
 *
 * Blocks are whole lines of 64 bytes: what an adapter writes, and what libnprdma judges, is
 * never shared by two of them. The allocator is jemalloc with a memory of its own; all that it knows of
 * blocks is elsewhere, so peers who may write the arena cannot break it. What this class adds is
 * one byte for each line, which says where a block in use begins and how large it is: whatever is
 * freed is compared with it.
 *
 * Any thread may call anything. Blocks that are freed stay in a cache of the thread for its next
 * ones. The arena has to outlive its blocks and the threads' use of it.
 *
 * A child that fork() makes has a copy of the memory, and none of the registrations: keys are its parent's. There
 * allocate(), adopt(), discard(), trim(), stats() and leaks() throw std::logic_error, and what ends with the child ends
 * nothing of the parent's. It may make arenas of its own.
 */
#ifndef NPRDMA_ALLOC_ARENA_HPP
#define NPRDMA_ALLOC_ARENA_HPP

#include <nprdma/alloc/errors.hpp>
#include <nprdma/alloc/export.hpp>
#include <nprdma/alloc/registrar.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace nprdma::alloc {

class arena_state;
class buffer;

enum class page_size {
	base,	     /* what the system has */
	transparent, /* huge pages where the kernel finds some */
	huge,	     /* 2 MiB of hugetlbfs: all are reserved when the arena is made, and kept until it ends */
};

enum class numa_policy {
	none,
	preferred,  /* @numa_nodes has one: there, if there is room */
	bind,	    /* on these nodes, or not at all */
	interleave, /* page by page over these nodes */
};

struct options {
	std::string name = "arena"; /* for messages */
	std::size_t capacity = std::size_t{1} << 30;
	/* All is touched, and registered, when the arena is made; otherwise memory is taken when it is used. */
	bool eager = false;
	/* Pinned memory is registered in pieces of so much, or of a block that is larger. */
	std::size_t chunk = std::size_t{64} << 20;
	/*
	 * An eager arena is touched by so many threads at once, and if it is pinned, registered by them in as many parts; no
	 * block is larger than a part.
	 */
	unsigned int threads = 1;
	page_size pages = page_size::base;
	numa_policy numa = numa_policy::none;
	std::uint64_t numa_nodes = 0; /* one bit each */
	/* Pages that are not used for so long go back by themselves; negative: by trim() only. */
	std::chrono::milliseconds decay = std::chrono::seconds(10);
	bool thread_caches = true;
	/* Called by the destructor if blocks are in use still. Empty: one line on stderr. */
	std::function<void(const std::string &message)> on_leak = {};
};

struct statistics {
	std::size_t capacity;	/* addresses */
	std::size_t registered; /* bytes that have keys */
	std::size_t managed;	/* bytes that the allocator has taken of these */
	std::size_t peak;	/* most that were managed at once */
	std::size_t used;	/* of what is managed: blocks in use */
	std::size_t free;	/* of what is managed: all else, caches included */
	std::uint64_t blocks;	/* in use */
	std::uint64_t allocations;
	std::uint64_t deallocations;
	std::uint64_t registrations;   /* made for this arena, of all registrars */
	std::uint64_t deregistrations; /* of these, ended */
	std::uint64_t given_back;      /* bytes that were in memory, by decay, trim() and discard() */
};

struct leak {
	const void *address;
	std::size_t bytes;
};

class NPRDMA_ALLOC_API arena final : public std::pmr::memory_resource {
public:
	/* The registrars, one for each adapter and protection domain, number its keys. They outlive the arena. */
	explicit arena(std::span<registrar *const> registrars, const options &how = {});
	explicit arena(registrar &one, const options &how = {});
	/* In memory of the caller, who gets it back by @cleanup when the arena ends. It is all used as it is. */
	arena(std::span<registrar *const> registrars, std::span<std::byte> given, std::function<void()> cleanup,
	      const options &how = {});
	~arena() override;
	arena(const arena &) = delete;
	arena &operator=(const arena &) = delete;

	/*
	 * As those of std::pmr::memory_resource. allocate() throws out_of_memory and bad_size, deallocate() foreign_pointer,
	 * double_free and bad_size; allocate() throws double_free if it finds that two threads had freed a block. Memory comes
	 * as it was left. A block is aligned to 64 bytes, and its size is rounded up to the next of four for each power of
	 * two, by less than a quarter: that much room is needed.
	 */
	[[nodiscard]] void *allocate(std::size_t bytes, std::size_t alignment = 64);
	void deallocate(void *block);
	/* As above, and the size and alignment have to be those that it was taken with. */
	void deallocate(void *block, std::size_t bytes, std::size_t alignment);
	/* One that gives itself back. */
	[[nodiscard]] buffer acquire(std::size_t bytes, std::size_t alignment = 64);
	/* Memory of the caller, registered on its own for as long as the buffer lives; then @cleanup. Throws bad_size if it is empty. */
	[[nodiscard]] buffer adopt(std::span<std::byte> given, std::function<void()> cleanup);

	/* All bytes that the block has. */
	[[nodiscard]] std::size_t size_of(const void *block) const;
	[[nodiscard]] bool owns(const void *p) const noexcept;
	/* Of any address in the arena, also inside of a block; no lock, no search. Throws foreign_pointer. */
	[[nodiscard]] location locate(const void *p, std::size_t registrar = 0) const;
	[[nodiscard]] std::optional<location> find(const void *p, std::size_t registrar = 0) const noexcept;

	/*
	 * The content of whole pages in this range is not needed any more: they read as zeros, keys stay valid.
	 * Returns the bytes of those that were in memory; 0, and nothing changes, where memory is pinned, the caller's, or of
	 * hugetlbfs.
	 */
	std::size_t discard(void *p, std::size_t bytes);
	/*
	 * Gives back what the allocator does not use: pages of large blocks that were freed, and those of small blocks where
	 * all that share a run of pages were. Keys of unpinned memory stay valid; pinned memory is deregistered in pieces, of
	 * which no part is used, unless it is eager. Caches of other threads follow when these use the arena again. Returns
	 * the bytes given back that were in memory.
	 */
	std::size_t trim();

	[[nodiscard]] statistics stats() const;
	/* Bytes in memory now: the kernel is asked about each page. */
	[[nodiscard]] std::size_t resident() const;
	/* Blocks in use, by address; at most @limit. */
	[[nodiscard]] std::vector<leak> leaks(std::size_t limit = 100) const;
	[[nodiscard]] std::span<std::byte> range() const noexcept;

private:
	friend buffer;
	void *do_allocate(std::size_t bytes, std::size_t alignment) override { return allocate(bytes, alignment); }
	void do_deallocate(void *p, std::size_t bytes, std::size_t alignment) override { deallocate(p, bytes, alignment); }
	[[nodiscard]] bool do_is_equal(const memory_resource &other) const noexcept override { return this == &other; }

	std::unique_ptr<arena_state> state_;
};

/* Owns a block, or memory that was adopted. Move-only; ends by itself. */
class NPRDMA_ALLOC_API buffer {
public:
	buffer() noexcept = default;
	buffer(buffer &&other) noexcept { swap(other); }
	buffer &operator=(buffer &&other) noexcept
	{
		buffer(std::move(other)).swap(*this);
		return *this;
	}
	~buffer();

	void swap(buffer &other) noexcept
	{
		std::swap(home_, other.home_);
		std::swap(bytes_, other.bytes_);
		std::swap(adopted_, other.adopted_);
	}

	[[nodiscard]] explicit operator bool() const noexcept { return bytes_.data() != nullptr; }
	[[nodiscard]] std::byte *data() const noexcept { return bytes_.data(); }
	[[nodiscard]] std::size_t size() const noexcept { return bytes_.size(); }
	[[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }
	[[nodiscard]] arena *home() const noexcept { return home_; }
	/* Of its first byte. */
	[[nodiscard]] location where(std::size_t registrar = 0) const;

private:
	friend arena;
	struct adopted {
		std::vector<std::unique_ptr<registration>> registrations;
		std::function<void()> cleanup;
	};

	arena *home_ = nullptr;
	std::span<std::byte> bytes_;
	std::unique_ptr<adopted> adopted_;
};

/* For containers that take a type of allocator; std::pmr's own take an arena as it is. */
template <class T>
class allocator {
public:
	using value_type = T;

	explicit allocator(arena &home) noexcept : home_(&home) {}
	template <class U>
	allocator(const allocator<U> &other) noexcept : home_(&other.home())
	{
	}

	[[nodiscard]] T *allocate(std::size_t n)
	{
		if (n > SIZE_MAX / sizeof(T))
			throw std::bad_array_new_length();
		return static_cast<T *>(home_->allocate(n * sizeof(T), alignof(T)));
	}
	void deallocate(T *p, std::size_t n) { home_->deallocate(p, n * sizeof(T), alignof(T)); }
	[[nodiscard]] arena &home() const noexcept { return *home_; }

	template <class U>
	[[nodiscard]] bool operator==(const allocator<U> &other) const noexcept
	{
		return home_ == &other.home();
	}

private:
	arena *home_;
};

} // namespace nprdma::alloc

#endif
