/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Memory that is somewhere else: a range of addresses whose pages come from a store when they are touched,
 * and go back there when room is needed. The store is memory of another host (network.hpp), a file, or one of
 * yours.
 *
 * A page is filled in place: the frames are those of a memfd, which is mapped twice, once for the
 * application, guarded by userfaultfd, and once for stores, which read into it. A page that could not be
 * brought is an error at whoever touches it, SIGBUS, and never a page of zeros.
 *
 * Sizes are bytes; offsets are those in the mapping unless the store is spoken of. Errors are values. All
 * functions may be called from any thread, unless they end the object.
 */
#ifndef NPRDMA_FAR_HPP
#define NPRDMA_FAR_HPP

#include <nprdma/export.hpp>
#include <nprdma/transport.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace nprdma::far
{

using transport::error;
using transport::result;
using transport::status;

/* One page, or the part of it that is in the store. */
struct piece {
	std::uint64_t offset; /* in the store */
	std::span<std::byte> memory;
};

/*
 * For mirror_store(): of two stores with the same history the one with the larger number is the newer one;
 * the tag tells two histories apart.
 */
struct data_generation {
	std::uint64_t number = 0, tag = 0;

	friend bool operator==(const data_generation &, const data_generation &) = default;
};

/*
 * Where pages come from and go to. Several threads call at once, for different pages. Calls end: within a
 * time that the store knows, with an error if need be.
 */
class NPRDMA_API store
{
public:
	virtual ~store() = default;
	store(const store &) = delete;
	store &operator=(const store &) = delete;

	[[nodiscard]] virtual std::uint64_t bytes() const noexcept = 0;
	/* All of @p.memory, or an error: it may then have been changed in part. */
	virtual status read(const piece &p) noexcept = 0;
	virtual status write(const piece &p) noexcept = 0;
	/* The same of many pages, for stores that have several under way. An error says nothing of single
	 * pages. */
	virtual status read_many(std::span<const piece> pieces) noexcept;
	virtual status write_many(std::span<const piece> pieces) noexcept;
	/* False: nothing was ever written there, it reads as zeros, and nobody need ask. */
	[[nodiscard]] virtual bool written(std::uint64_t, std::uint64_t) noexcept { return true; }
	/*
	 * What was written survives what the store is meant to survive. ENOTRECOVERABLE: some of what was
	 * written since the last flush() that succeeded may be lost. That stays so until accept_loss().
	 */
	virtual status flush() noexcept { return {}; }
	/* False: flush() would fail with ENOTRECOVERABLE. */
	[[nodiscard]] virtual bool intact() noexcept { return true; }
	/* Somebody knows that something may be lost: flush() vouches for what is written from here on. */
	virtual status accept_loss() noexcept { return {}; }
	/* The content of the range is not needed any more, and may read as zeros from now on, or as it was.
	 */
	virtual status discard(std::uint64_t, std::uint64_t) noexcept { return {}; }
	/*
	 * Kept with the data, as long as they are; 0 at first. Durable when set_generation() returns, if the
	 * data can be. Whoever calls has the store alone, and calls one of the two at a time.
	 */
	virtual result<data_generation> generation() noexcept;
	virtual status set_generation(const data_generation &) noexcept;
	/* @frames is what pages of a mapping are read into and written from, until detach(): to be registered
	 * once. */
	virtual status attach(std::span<std::byte>) noexcept { return {}; }
	virtual void detach(std::span<std::byte>) noexcept {}

protected:
	store() = default;
};

/* In memory of this process, @bytes that begin as zeros. */
NPRDMA_API std::shared_ptr<store> memory_store(std::uint64_t bytes);

struct file_options {
	bool read_only = false;
	/* Made, or made longer or shorter; 0: as long as it is. */
	std::uint64_t bytes = 0;
	/* Past the page cache (O_DIRECT), where the file system can. */
	bool direct = false;
};
/* A regular file or a block device. flush() is fdatasync(2). Holes of the file are not read. */
NPRDMA_API result<std::shared_ptr<store>> file_store(const std::string &path, const file_options &how = {});

struct sparse_options {
	bool read_only = false;
	std::uint64_t file_bytes = 64 << 20; /* of each file, a multiple of 4 KiB */
};
/*
 * A directory with one file for each range of @file_bytes that was ever written, and one that says how large
 * all of it is. An existing directory keeps its sizes; @bytes 0 asks for it.
 */
NPRDMA_API result<std::shared_ptr<store>> sparse_store(const std::string &directory, std::uint64_t bytes,
						       const sparse_options &how = {});

enum class hint {
	will_need, /* bring it, off the path of faults */
	cold,      /* not needed soon: first to go */
	stream,    /* read once from front to end: far ahead, and what it has passed goes first */
	random,    /* no prefetch */
	normal,
	pin, /* bring it, and keep it until unpin; fails with ENOBUFS if too much of the buffer were pinned */
	unpin,
};

struct map_options {
	std::size_t page_bytes = 0;     /* a power of two from the system's page to 16 MiB; 0: the system's */
	std::uint64_t store_offset = 0; /* a multiple of page_bytes */
	std::uint64_t length = 0;       /* 0: to the end of the store */
	void *address = nullptr;        /* with @fixed: exactly there, in place of what is mapped */
	bool fixed = false;
	bool read_only = false;
	std::uint64_t budget = 0; /* most bytes in memory, and at least 8 pages; 0: what the buffer has */
};

/* Since it was mapped, or made. Pages are those of page_bytes. */
struct statistics {
	std::uint64_t demand;      /* pages brought because somebody waits */
	std::uint64_t prefetched;  /* pages brought before */
	std::uint64_t empty;       /* of these two, never written, and not asked for */
	std::uint64_t again;       /* faults on pages that were in memory, and not mapped */
	std::uint64_t first_write; /* faults of a first write to a page that was read before */
	std::uint64_t evicted, written_back;
	std::uint64_t poisoned; /* pages that could not be brought */
	std::uint64_t write_errors;
	std::uint64_t waits; /* for room in the buffer */
	std::uint64_t resident_bytes;
};

class area;
class pager_state;

/* Unmapped by the destructor, which writes back; unmap() says whether that went well. Ends before its pager.
 */
class NPRDMA_API mapping
{
public:
	~mapping();
	mapping(const mapping &) = delete;
	mapping &operator=(const mapping &) = delete;

	[[nodiscard]] std::span<std::byte> memory() const noexcept;
	[[nodiscard]] std::size_t page_bytes() const noexcept;

	/*
	 * Write back what is dirty, then the store's flush(): what was written before the call is durable if
	 * it succeeds. ENOTRECOVERABLE: what was written since the last one that succeeded may be lost, as a
	 * server was started anew or a disk reported an error. It fails so until accept_loss().
	 */
	status flush();
	/*
	 * After flush() has failed with ENOTRECOVERABLE: evict(), so that all that is not pinned reads as the
	 * store has it, and go on. What may be lost is to be written again after this call, and before the
	 * next flush(). Nothing happens if nothing may be lost.
	 */
	status accept_loss();
	/* Write back, and give the memory back, but for what is pinned. */
	status evict();
	/*
	 * Whole pages inside of the range, without writing them back: they read as zeros, or as the store has
	 * them. Who touches one that is not in memory waits until the store is done.
	 */
	status discard(std::uint64_t offset, std::uint64_t bytes);
	status advise(std::uint64_t offset, std::uint64_t bytes, hint what);
	/*
	 * Pages that could not be brought are asked for again when they are touched. What was written to one
	 * that could not be mapped again is not lost: it is written back like all, and then asked for, too.
	 */
	void retry();
	/*
	 * Write back and unmap whole pages; nobody may touch them meanwhile. On error all is as it was, but
	 * for what was written back.
	 */
	status unmap(std::uint64_t offset, std::uint64_t bytes);
	status unmap();

	[[nodiscard]] statistics stats() const noexcept;
	/* Of the last page that could not be brought, or written back in the background; code 0: there was
	 * none. */
	[[nodiscard]] error last_error() const;

private:
	friend class pager;
	mapping(std::shared_ptr<pager_state> p, std::shared_ptr<area> a) noexcept;

	std::shared_ptr<pager_state> pager_;
	std::shared_ptr<area> area_;
};

struct pager_options {
	/*
	 * The most that pages of all mappings take. Less than 8 of the largest pages count as 8, here and in
	 * set_buffer_bytes(): one instruction can touch several at once, and needs all of them to go on.
	 */
	std::uint64_t buffer_bytes = 256 << 20;
	/* Eviction begins above the one and ends below the other: parts of buffer_bytes. */
	double high = 0.9, low = 0.8;
	unsigned fillers = 4;   /* threads that bring pages: 1 to 256 */
	unsigned evictors = 2;  /* threads that take them away: 1 to 64 */
	unsigned prefetch = 32; /* most pages ahead of a pattern of faults; 0: none */
	/* How long a fault may wait for room before it fails: dirty pages have nowhere to go, or all is
	 * pinned. */
	std::chrono::milliseconds room_deadline{10'000};
	/*
	 * Only faults of user code are served, which needs no privilege: system calls then fail with EFAULT
	 * on pages that are not in memory. Without it that is what happens only if the kernel allows no more.
	 */
	bool user_faults_only = false;
	/*
	 * Protected pages say that they are written to first. Without it, or where the kernel lacks it for
	 * shared memory (CONFIG_PTE_MARKER_UFFD_WP), a page that is mapped for writing counts as written.
	 */
	bool write_protection = true;
};

/* The threads and the buffer that mappings share. */
class NPRDMA_API pager
{
public:
	~pager();
	pager(const pager &) = delete;
	pager &operator=(const pager &) = delete;

	/* ENOSYS: the kernel is older than 6.6, or has no userfaultfd. */
	static result<std::unique_ptr<pager>> make(const pager_options &how = {});

	result<std::unique_ptr<mapping>> map(std::shared_ptr<store> from, const map_options &how = {});
	[[nodiscard]] statistics stats() const noexcept;
	[[nodiscard]] bool user_faults_only() const noexcept;
	/* False: not asked for, or the kernel lacks it; see pager_options. */
	[[nodiscard]] bool write_protection() const noexcept;
	/* Another size of the buffer: more is evicted at once, in the background. */
	void set_buffer_bytes(std::uint64_t bytes) noexcept;

private:
	explicit pager(std::shared_ptr<pager_state> state) noexcept;

	std::shared_ptr<pager_state> state_;
};

} // namespace nprdma::far

#endif /* NPRDMA_FAR_HPP */
