/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "arena_state.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <pthread.h>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/types.h>
#include <thread>

extern "C" {
/*
 * Extents go back to us and are not kept; none is so large that it does at once. Blocks of a given arena only: no need
 * of more than one for everybody.
 */
extern const char *npra_je_malloc_conf;
const char *npra_je_malloc_conf = "retain:false,oversize_threshold:4611686018427387904,narenas:1,muzzy_decay_ms:0";

/* See private-jemalloc. */
char *npra_je_secure_getenv(const char *name);
char *npra_je_secure_getenv(const char * /* name */)
{
	return nullptr;
}
ssize_t npra_je_readlink(const char *path, char *to, std::size_t size);
ssize_t npra_je_readlink(const char * /* path */, char * /* to */, std::size_t /* size */)
{
	errno = ENOENT;
	return -1;
}
}

namespace nprdma::alloc {
namespace {

using npra::cache;

constexpr std::size_t min_chunk = std::size_t{2} << 20;
constexpr std::size_t commit_unit = std::size_t{32} << 20;

std::uint64_t next_serial() noexcept
{
	static std::atomic<std::uint64_t> last = 0;
	/* relaxed: a number that no other has */
	return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

std::string text(const void *p)
{
	char s[24];
	(void)std::snprintf(s, sizeof(s), "%p", p);
	return s;
}

std::string bytes_text(std::size_t n)
{
	return std::to_string(n) + (n == 1 ? " byte" : " bytes");
}

/* The last caches that this thread used, by the arena's serial number: without a search, and without a lock. */
struct slot {
	std::uint64_t serial;
	cache *found;
};
constexpr std::size_t slots_of_thread = 8;
/*
 * initial-exec: without a call for each use. Of such storage glibc keeps 144 bytes for each library that is loaded by
 * dlopen(), and some more for all: so there is little of it.
 */
#define NPRA_THREAD constinit thread_local __attribute__((tls_model("initial-exec")))
NPRA_THREAD std::array<slot, slots_of_thread> slots{};
NPRA_THREAD bool thread_ended = false;
/* What this thread's calls of jemalloc gave back, see trim(). */
NPRA_THREAD std::size_t dropped_here = 0;

struct thread_caches {
	std::vector<std::shared_ptr<cache>> all;

	~thread_caches()
	{
		thread_ended = true;
		slots = {};
		for (const auto &c : all) {
			const std::lock_guard lock(c->life);
			/* relaxed, here and below: it is set under @life, and looked at without only by its own thread */
			if (arena_state *const home = c->home.load(std::memory_order_relaxed))
				home->retire(*c);
		}
	}
};
thread_local thread_caches my_caches;

/* How often this process is a child of the one that loaded the library. */
std::atomic<std::uint64_t> forks = 0;

/* In the child, which has this thread only: what it kept of arenas is not looked at again. */
void forked() noexcept
{
	/* relaxed: there is no other thread */
	forks.fetch_add(1, std::memory_order_relaxed);
	slots = {};
	my_caches.all.clear();
}

std::uint64_t generation()
{
	static const int error = pthread_atfork(nullptr, nullptr, forked);
	if (error)
		throw std::system_error(error, std::generic_category(), "nprdma-alloc: pthread_atfork()");
	return forks.load(std::memory_order_relaxed);
}

/* work(0) to work(n - 1), each by a thread of its own, the first by this one. Throws what one of them threw. */
template <class F>
void side_by_side(std::size_t n, F &&work)
{
	std::exception_ptr failed;
	std::mutex failing;
	const auto guarded = [&](std::size_t i) {
		try {
			work(i);
		} catch (...) {
			const std::lock_guard lock(failing);
			failed = std::current_exception();
		}
	};
	{
		std::vector<std::jthread> threads;
		for (std::size_t i = 1; i < n; i++)
			threads.emplace_back(guarded, i);
		guarded(0);
	}
	if (failed)
		std::rethrow_exception(failed);
}

} // namespace

arena_state::arena_state(std::span<registrar *const> registrars, npra::backing memory, const options &how,
			 std::function<void()> cleanup)
    : how_(how), registrars_(registrars.begin(), registrars.end()), cleanup_(std::move(cleanup)),
      backing_(std::move(memory)),
      tags_(npra::mapping::zeros((backing_.size() + npra::line - 1) / npra::line, "nprdma-alloc: notes on blocks")),
      pins_(std::any_of(registrars_.begin(), registrars_.end(), [](const registrar *r) { return r->pins(); })),
      in_pieces_(pins_ && backing_.ours() && !(how.eager && how.threads <= 1)), serial_(next_serial()),
      forks_(generation())
{
	std::size_t chunk = std::bit_ceil(std::clamp(how.chunk, min_chunk, npra::max_block));
	part_ = backing_.size();
	if (in_pieces_ && how.eager) {
		/* As many parts as threads, equal but for a chunk: the index is of chunks, and not to be large. */
		const std::size_t part = (backing_.size() + how.threads - 1) / how.threads;
		chunk = std::max(min_chunk, std::bit_floor(part) / 1024);
		part_ = npra::round_up(part, chunk);
	}
	chunk_shift_ = in_pieces_ ? static_cast<unsigned int>(std::countr_zero(chunk)) : 63;
	index_ = std::vector<std::atomic<segment *>>(((backing_.size() - 1) >> chunk_shift_) + 1);
	register_all();

	hooks_ = {};
	hooks_.self = this;
	hooks_.alloc = [](npra_extent_hooks *h, void *at, std::size_t size, std::size_t alignment, bool *zero, bool *commit,
			  unsigned) -> void * {
		/* Its neighbour was wanted, or nothing. */
		void *const p = at ? nullptr : static_cast<hooks *>(h)->self->take_extent(size, alignment);
		if (p && *zero)
			std::memset(p, 0, size);
		*commit = true;
		return p;
	};
	hooks_.dalloc = [](npra_extent_hooks *h, void *p, std::size_t size, bool, unsigned) {
		return static_cast<hooks *>(h)->self->give_extent(static_cast<std::byte *>(p), size);
	};
	hooks_.split = [](npra_extent_hooks *, void *, std::size_t, std::size_t, std::size_t, bool, unsigned) { return false; };
	hooks_.merge = [](npra_extent_hooks *h, void *a, std::size_t, void *b, std::size_t, bool, unsigned) {
		const arena_state *const self = static_cast<hooks *>(h)->self;
		return self->segment_of(static_cast<std::byte *>(a)) != self->segment_of(static_cast<std::byte *>(b));
	};
	/* What jemalloc knows of extents is not to be in them: a peer might write there. */
	struct {
		npra_extent_hooks *hooks;
		bool metadata;
	} config{&hooks_, false};
	npra::je::must_control("experimental.arenas_create_ext", &jemalloc_, &config);
	flags_ = npra::je::of_arena(jemalloc_);
	ssize_t decay = how.decay.count() < 0 ? -1 : static_cast<ssize_t>(how.decay.count());
	npra::je::must_control("arena." + std::to_string(jemalloc_) + ".dirty_decay_ms", npra::je::nothing, &decay);
}

arena_state::~arena_state()
{
	if (inherited()) {
		/* Nothing here is this process's to end but its copies of pages, and the parent tells of leaks. */
		for (segment &s : segments_)
			ended(s.registrations);
		return;
	}
	try {
		const statistics s = stats();
		if (s.blocks) {
			const std::vector<leak> left = leaks(1);
			const std::string message = how_.name + ": ends with " + std::to_string(s.blocks) +
						    " blocks in use, of " + bytes_text(s.used) + "; the first is at " +
						    text(left.at(0).address) + " and has " + bytes_text(left.at(0).bytes);
			if (how_.on_leak)
				how_.on_leak(message);
			else
				(void)std::fprintf(stderr, "nprdma-alloc: %s\n", message.c_str());
		}
	} catch (...) {
		/* It was only to be told. */
	}

	std::vector<std::shared_ptr<cache>> caches;
	{
		const std::lock_guard lock(caches_mutex_);
		caches.swap(caches_);
	}
	for (const auto &c : caches) {
		const std::lock_guard lock(c->life);
		if (c->home.exchange(nullptr, std::memory_order_relaxed) && c->below != cache::no_cache)
			(void)npra::je::control("tcache.destroy", npra::je::nothing, &c->below);
	}
	(void)npra::je::control("arena." + std::to_string(jemalloc_) + ".destroy", npra::je::nothing, npra::je::nothing);
	for (segment &s : segments_)
		ended(s.registrations);
	try {
		if (cleanup_)
			cleanup_();
	} catch (...) {
		/* Nobody is left to be told. */
	}
}

/*
 * A process and its parent
 */

bool arena_state::inherited() const noexcept
{
	/* relaxed: it changes only where there is no other thread */
	return forks_ != forks.load(std::memory_order_relaxed);
}

void arena_state::refuse_inherited() const
{
	if (inherited())
		throw std::logic_error(how_.name + ": it is of the process that called fork(); this child may end, call exec(), or"
						   " make an arena of its own");
}

/*
 * Registration
 */

std::vector<std::unique_ptr<registration>> arena_state::add(std::span<std::byte> memory)
{
	std::vector<std::unique_ptr<registration>> all;

	refuse_inherited();
	all.reserve(registrars_.size());
	try {
		for (registrar *const r : registrars_) {
			all.push_back(r->add(memory));
			/* relaxed, here and below: numbers to look at */
			registrations_.fetch_add(1, std::memory_order_relaxed);
		}
	} catch (...) {
		ended(all);
		throw;
	}
	return all;
}

void arena_state::ended(std::vector<std::unique_ptr<registration>> &all) noexcept
{
	if (inherited()) {
		/* The parent's regions: to end them here would end them there. */
		for (auto &r : all)
			(void)r.release();
		return;
	}
	deregistrations_.fetch_add(all.size(), std::memory_order_relaxed);
	all.clear();
}

void arena_state::register_segment(segment &s, std::byte *begin, std::size_t size)
{
	s.registrations = add({begin, size});
	s.size = size;
	/*
	 * For find(). The segment is in no entry of the index. release: who sees that the version is odd sees so, and who
	 * sees one of the rest sees that the version is odd, or a later one.
	 */
	s.version.fetch_add(1, std::memory_order_release);
	s.begin.store(begin, std::memory_order_release);
	s.length.store(size, std::memory_order_release);
	for (std::size_t i = 0; i < s.keys.size(); i++)
		s.keys[i].store(s.registrations[i]->keys(), std::memory_order_release);
	s.version.fetch_add(1, std::memory_order_release);
}

/* From now on it is found. */
void arena_state::show_segment(segment &s) noexcept
{
	/* relaxed: it was this thread that set it, or one that has ended */
	std::byte *const begin = s.begin.load(std::memory_order_relaxed);

	free_.give(reinterpret_cast<std::uintptr_t>(begin), s.size, [](auto, auto) { return false; });
	/* release: who finds the segment finds its keys */
	for (std::size_t i = 0; i < s.size; i += std::size_t{1} << chunk_shift_)
		index_[(offset_of(begin) + i) >> chunk_shift_].store(&s, std::memory_order_release);
	registered_ += s.size;
}

arena_state::segment &arena_state::unused_segment()
{
	/* They stay where they are: someone may look at one that has just ended. */
	for (segment &s : segments_)
		if (!s.size)
			return s;
	return segments_.emplace_back(registrars_.size());
}

/* Touches all, by as many threads as are wanted, each its part. */
void arena_state::populate() const
{
	const std::size_t n = std::max(how_.threads, 1U);
	const std::size_t part = npra::round_up((backing_.size() + n - 1) / n, backing_.page());

	side_by_side((backing_.size() + part - 1) / part, [&](std::size_t i) {
		backing_.populate(backing_.begin() + i * part, std::min(part, backing_.size() - i * part));
	});
}

/* What is registered when the arena is made. */
void arena_state::register_all()
{
	if (in_pieces_ && !how_.eager) {
		chunks_.give(0, backing_.size(), [](auto, auto) { return true; });
		return;
	}
	const bool all = how_.eager || pins_ || !backing_.ours();
	if (all && !backing_.allow(backing_.begin(), backing_.size(), true))
		npra::fail(how_.name + ": making its memory accessible");
	committed_ = all ? backing_.size() : 0;
	if (how_.eager && backing_.ours())
		populate();

	const std::size_t n = (backing_.size() + part_ - 1) / part_;
	for (std::size_t i = 0; i < n; i++)
		segments_.emplace_back(registrars_.size());
	try {
		side_by_side(n, [this](std::size_t i) {
			register_segment(segments_[i], backing_.begin() + i * part_,
					 std::min(part_, backing_.size() - i * part_));
		});
	} catch (...) {
		for (segment &s : segments_)
			ended(s.registrations);
		throw;
	}
	for (segment &s : segments_)
		show_segment(s);
}

void arena_state::grow(std::size_t size, std::size_t alignment)
{
	const std::size_t chunk = std::size_t{1} << chunk_shift_;
	/* A segment begins at some page. */
	const std::size_t room = size + (alignment > npra::page ? alignment : 0);
	/* The last chunk may be less. */
	std::size_t whole = (room + chunk - 1) & ~(chunk - 1);
	auto at = chunks_.take(whole, chunk);
	if (!at && !chunks_.all().empty()) {
		const auto [offset, left] = *chunks_.all().rbegin();
		if (offset + left == backing_.size() && left % chunk && left >= room && left < whole) {
			whole = left;
			chunks_.remove(offset);
			at = offset;
		}
	}
	if (!at)
		return;

	std::byte *const begin = backing_.begin() + *at;
	try {
		if (!backing_.allow(begin, whole, true))
			npra::fail(how_.name + ": making " + bytes_text(whole) + " accessible");
		segment &s = unused_segment();
		register_segment(s, begin, whole);
		try {
			show_segment(s);
		} catch (...) {
			ended(s.registrations);
			s.size = 0;
			throw;
		}
	} catch (...) {
		(void)backing_.drop(begin, whole);
		(void)backing_.allow(begin, whole, false);
		chunks_.give(*at, whole, [](auto, auto) { return true; });
		throw;
	}
}

std::size_t arena_state::release_segments() noexcept
{
	std::size_t bytes = 0;
	const std::lock_guard lock(mutex_);

	for (segment &s : segments_) {
		if (!s.size || s.managed)
			continue;
		std::byte *const begin = s.begin.load(std::memory_order_relaxed);
		/* Its keys are not found any more when they end. */
		for (std::size_t i = 0; i < s.size; i += std::size_t{1} << chunk_shift_)
			index_[(offset_of(begin) + i) >> chunk_shift_].store(nullptr, std::memory_order_release);
		ended(s.registrations);
		registered_ -= s.size;
		free_.remove(reinterpret_cast<std::uintptr_t>(begin));
		bytes += backing_.drop(begin, s.size);
		(void)backing_.allow(begin, s.size, false);
		try {
			chunks_.give(offset_of(begin), s.size, [](auto, auto) { return true; });
		} catch (const std::bad_alloc &) {
			/* The addresses are lost; there are many. */
		}
		s.size = 0;
	}
	return bytes;
}

/*
 * Extents
 */

bool arena_state::commit(std::byte *begin, std::size_t size) noexcept
{
	const std::size_t end = offset_of(begin) + size;

	high_ = std::max(high_, end);
	if (in_pieces_ || end <= committed_)
		return true;
	const std::size_t to = std::min(backing_.size(), (end + commit_unit - 1) & ~(commit_unit - 1));
	if (!backing_.allow(backing_.begin() + committed_, to - committed_, true))
		return false;
	committed_ = to;
	return true;
}

void *arena_state::take_extent(std::size_t size, std::size_t alignment) noexcept
try {
	const std::lock_guard lock(mutex_);

	try {
		auto at = free_.take(size, alignment);
		if (!at && in_pieces_) {
			grow(size, alignment);
			at = free_.take(size, alignment);
		}
		if (!at) {
			why_ = "of " + bytes_text(backing_.size()) + ", " + bytes_text(managed_) +
			       " are taken, and the largest free range has " +
			       bytes_text(std::max(free_.largest(), chunks_.largest()));
			return nullptr;
		}
		auto *const begin = backing_.begin() + (*at - reinterpret_cast<std::uintptr_t>(backing_.begin()));
		if (!commit(begin, size)) {
			why_ = std::string("mprotect: ") + std::strerror(errno);
			free_.give(*at, size, [](auto, auto) { return true; });
			return nullptr;
		}
		segment_of(begin)->managed += size;
		managed_ += size;
		peak_ = std::max(peak_, managed_);
		return begin;
	} catch (const std::exception &e) {
		why_ = e.what();
		return nullptr;
	}
} catch (...) {
	return nullptr;
}

/* True: it has to be kept. */
bool arena_state::give_extent(std::byte *begin, std::size_t size) noexcept
{
	/* Before others can have it. */
	const std::size_t dropped = pins_ ? 0 : backing_.drop(begin, size);
	const std::lock_guard lock(mutex_);

	given_back_.fetch_add(dropped, std::memory_order_relaxed);
	dropped_here += dropped;
	try {
		free_.give(reinterpret_cast<std::uintptr_t>(begin), size, [this](std::uintptr_t a, std::uintptr_t b) {
			return segment_of(reinterpret_cast<std::byte *>(a)) == segment_of(reinterpret_cast<std::byte *>(b));
		});
	} catch (const std::bad_alloc &) {
		return true;
	}
	segment_of(begin)->managed -= size;
	managed_ -= size;
	return false;
}

/*
 * Blocks
 */

void *arena_state::from_jemalloc(unsigned int size_class, std::size_t alignment, int flags) noexcept
{
	const std::size_t bytes = npra::bytes_of(size_class);

	/* Without it jemalloc begins a large block at some line of its page. */
	if (bytes >= npra::large)
		flags |= std::countr_zero(std::max(alignment, npra::page));
	return npra_je_mallocx(bytes, flags);
}

void arena_state::purge() noexcept
{
	(void)npra::je::control("arena." + std::to_string(jemalloc_) + ".purge", npra::je::nothing, npra::je::nothing);
}

void *arena_state::must_have(std::size_t bytes, unsigned int size_class, std::size_t alignment, cache *c)
{
	if (void *const p = from_jemalloc(size_class, alignment, c ? c->flags : flags_ | npra::je::no_cache))
		return p;
	/* Free memory may be in pieces that become larger when they are put together. */
	if (c)
		flush(*c);
	purge();
	if (void *const p = from_jemalloc(size_class, alignment, flags_ | npra::je::no_cache))
		return p;
	const std::size_t rounded = npra::bytes_of(size_class);
	const std::lock_guard lock(mutex_);
	throw out_of_memory(how_.name + ": no room for a block of " + bytes_text(rounded) +
			    (rounded == bytes ? "" : ", to which the " + bytes_text(bytes) + " asked for are rounded up") + ": " +
			    why_);
}

void *arena_state::fill(cache &c, std::size_t bytes, unsigned int size_class)
{
	void *const p = must_have(bytes, size_class, npra::line, &c);
	cache::bin &b = c.bins[size_class];

	/* Half of what it may have, so that the next free does not spill. */
	for (const unsigned int n = cache::limit(size_class) / 2; b.count + 1 < n; b.count++) {
		void *const more = from_jemalloc(size_class, npra::line, c.flags);
		if (!more)
			break;
		b.blocks[b.count] = more;
	}
	return p;
}

void arena_state::spill(cache &c, unsigned int size_class) noexcept
{
	cache::bin &b = c.bins[size_class];
	const unsigned int n = b.count - b.count / 2;

	/* Those that have not been used for longest. */
	for (unsigned int i = 0; i < n; i++)
		npra_je_sdallocx(b.blocks[i], npra::bytes_of(size_class), c.flags);
	b.count -= n;
	std::copy_n(b.blocks.begin() + n, b.count, b.blocks.begin());
}

void arena_state::flush(cache &c) noexcept
{
	for (unsigned int i = 0; i < cache::classes; i++)
		while (c.bins[i].count)
			spill(c, i);
	if (c.below != cache::no_cache)
		(void)npra::je::control("tcache.flush", npra::je::nothing, &c.below);
}

void arena_state::refresh(cache &c) noexcept
{
	/* relaxed: it does not matter when it is seen */
	c.epoch = epoch_.load(std::memory_order_relaxed);
	flush(c);
}

void arena_state::retire(cache &c) noexcept
{
	flush(c);
	if (c.below != cache::no_cache)
		(void)npra::je::control("tcache.destroy", npra::je::nothing, &c.below);
	c.home.store(nullptr, std::memory_order_relaxed);
	const std::lock_guard lock(caches_mutex_);
	past_.add_freed(c.counts);
	past_.add_allocated(c.counts);
	std::erase_if(caches_, [&](const auto &x) { return x.get() == &c; });
}

cache *arena_state::my_cache() noexcept
{
	const slot &s = slots[serial_ % slots_of_thread];

	return s.serial == serial_ ? s.found : find_cache();
}

/* Null: this thread has none, which is slower and right. */
cache *arena_state::find_cache() noexcept
try {
	if (!how_.thread_caches || thread_ended)
		return nullptr;
	auto &mine = my_caches.all;
	std::erase_if(mine, [](const auto &x) { return !x->home.load(std::memory_order_relaxed); });
	auto i = std::find_if(mine.begin(), mine.end(), [this](const auto &x) { return x->home.load(std::memory_order_relaxed) == this; });
	if (i == mine.end()) {
		auto made = std::make_shared<cache>();
		made->home.store(this, std::memory_order_relaxed);
		made->epoch = epoch_.load(std::memory_order_relaxed);
		made->below = cache::no_cache;
		const std::lock_guard lock(caches_mutex_);
		mine.reserve(mine.size() + 1);
		caches_.push_back(made);
		/* jemalloc has some thousand of them. */
		if (npra::je::control("tcache.create", &made->below, npra::je::nothing))
			made->below = cache::no_cache;
		made->flags = flags_ | (made->below == cache::no_cache ? npra::je::no_cache : npra::je::of_cache(made->below));
		mine.push_back(std::move(made));
		i = mine.end() - 1;
	}
	slots[serial_ % slots_of_thread] = {serial_, i->get()};
	return i->get();
} catch (const std::bad_alloc &) {
	return nullptr;
}

void arena_state::refuse_size(std::size_t bytes, std::size_t alignment) const
{
	if (!npra::is_power_of_two(alignment))
		throw bad_size(how_.name + ": an alignment of " + std::to_string(alignment) + " is no power of two");
	throw out_of_memory(how_.name + ": a block of " + bytes_text(bytes) + ", aligned to " + std::to_string(alignment) +
			    ", is more than it has, " + bytes_text(backing_.size()));
}

void arena_state::refuse_block(const void *block) const
{
	if (offset_of(block) >= backing_.size())
		throw foreign_pointer(how_.name + ": " + text(block) + " is not of this arena");
	throw double_free(how_.name + ": no block in use begins at " + text(block) +
			  ": it was freed already, or is inside of one");
}

void arena_state::refuse_end(const void *block, unsigned int size_class, std::size_t bytes, std::size_t alignment) const
{
	throw bad_size(how_.name + ": the block at " + text(block) + " has " + bytes_text(npra::bytes_of(size_class)) +
		       ", and is freed as one of " + bytes_text(bytes) + " aligned to " + std::to_string(alignment));
}

void arena_state::refuse_twice(const void *block) const
{
	throw double_free(how_.name + ": two threads freed the block at " + text(block) + " at once");
}

/* All but a small block from a cache that has one. */
void *arena_state::allocate_slowly(std::size_t bytes, unsigned int size_class, std::size_t alignment)
{
	refuse_inherited();
	if (bytes > backing_.size()) [[unlikely]]
		refuse_size(bytes, alignment);
	cache *const c = my_cache();
	void *p;

	if (c && size_class < cache::classes && alignment <= npra::page) {
		/* relaxed: it does not matter when it is seen */
		if (c->epoch != epoch_.load(std::memory_order_relaxed))
			refresh(*c);
		cache::bin &b = c->bins[size_class];
		p = b.count ? b.blocks[--b.count] : fill(*c, bytes, size_class);
	} else {
		p = must_have(bytes, size_class, alignment, c);
	}
	/* relaxed: another thread has the block from this one, and by then knows all that it did */
	const auto tag = tag_of(offset_of(p));
	if (tag.load(std::memory_order_relaxed))
		refuse_twice(p);
	tag.store(static_cast<std::uint8_t>(size_class + 1), std::memory_order_relaxed);
	if (c) {
		c->counts.allocated[size_class].add(1);
	} else {
		const std::lock_guard lock(caches_mutex_);
		past_.allocated[size_class].add(1);
	}
	return p;
}

/* Large blocks, and those that are aligned to more than a line. */
void *arena_state::allocate_any(std::size_t bytes, std::size_t alignment)
{
	if (!npra::is_power_of_two(alignment) || bytes > backing_.size() || alignment > backing_.size()) [[unlikely]]
		refuse_size(bytes, alignment);
	return allocate_slowly(bytes, npra::class_of(bytes, alignment), alignment);
}

/* No call returns into this function, nor into deallocate(): they save no registers. Their instructions count. */
void *arena_state::allocate(std::size_t bytes, std::size_t alignment)
{
	if (!npra::is_plain_small(bytes, alignment))
		return allocate_any(bytes, alignment);
	const unsigned int size_class = npra::class_of(bytes);
	const slot &s = slots[serial_ % slots_of_thread];

	/* A slot that has a serial number has a cache. */
	if (s.serial == serial_) [[likely]] {
		cache &c = *s.found;
		cache::bin &b = c.bins[size_class];
		/* relaxed, here and below: as in allocate_slowly() */
		if (b.count && c.epoch == epoch_.load(std::memory_order_relaxed)) [[likely]] {
			void *const p = b.blocks[--b.count];
			const auto tag = tag_of(offset_of(p));
			if (tag.load(std::memory_order_relaxed)) [[unlikely]]
				refuse_twice(p);
			tag.store(static_cast<std::uint8_t>(size_class + 1), std::memory_order_relaxed);
			c.counts.allocated[size_class].add(1);
			return p;
		}
	}
	return allocate_slowly(bytes, size_class, alignment);
}

unsigned int arena_state::class_at(const void *block) const
{
	const std::size_t offset = offset_of(block);

	if (offset >= backing_.size() || offset % npra::line) [[unlikely]]
		refuse_block(block);
	const std::uint8_t tag = tag_of(offset).load(std::memory_order_relaxed);
	if (!tag) [[unlikely]]
		refuse_block(block);
	return tag - 1U;
}

void arena_state::deallocate(void *block, std::size_t bytes, std::size_t alignment)
{
	const std::size_t offset = offset_of(block);

	if (!npra::is_plain_small(bytes, alignment) || offset >= backing_.size() || offset % npra::line)
		return deallocate_any(block, bytes, alignment);
	const unsigned int size_class = npra::class_of(bytes);
	const auto tag = tag_of(offset);
	const slot &s = slots[serial_ % slots_of_thread];
	if (tag.load(std::memory_order_relaxed) == size_class + 1 && s.serial == serial_) [[likely]] {
		cache &c = *s.found;
		cache::bin &b = c.bins[size_class];
		/* relaxed: as in release() and release_slowly() */
		if (b.count != b.limit && c.epoch == epoch_.load(std::memory_order_relaxed)) [[likely]] {
			tag.store(0, std::memory_order_relaxed);
			b.blocks[b.count++] = block;
			c.counts.freed[size_class].add(1);
			return;
		}
	}
	deallocate_any(block, bytes, alignment);
}

/* And all that is to be refused. */
void arena_state::deallocate_any(void *block, std::size_t bytes, std::size_t alignment)
{
	const unsigned int size_class = class_at(block);

	if (!npra::is_power_of_two(alignment) || npra::class_of(bytes, alignment) != size_class) [[unlikely]]
		refuse_end(block, size_class, bytes, alignment);
	release(block, size_class);
}

/* All but a small block to a cache that has room for it; the tag is gone. */
void arena_state::release_slowly(void *block, unsigned int size_class) noexcept
{
	if (inherited())
		return;
	cache *const c = my_cache();

	if (c && size_class < cache::classes) {
		/* relaxed: it does not matter when it is seen */
		if (c->epoch != epoch_.load(std::memory_order_relaxed))
			refresh(*c);
		cache::bin &b = c->bins[size_class];
		if (b.count == b.limit)
			spill(*c, size_class);
		b.blocks[b.count++] = block;
	} else {
		npra_je_sdallocx(block, npra::bytes_of(size_class), c ? c->flags : flags_ | npra::je::no_cache);
	}
	if (c) {
		c->counts.freed[size_class].add(1);
	} else {
		const std::lock_guard lock(caches_mutex_);
		past_.freed[size_class].add(1);
	}
}

void arena_state::release(void *block, unsigned int size_class)
{
	const auto tag = tag_of(offset_of(block));

	/*
	 * acq_rel: of two threads that free it at once, one sees the other's zero. For a small block it would cost as
	 * much as all the rest: there allocate() notices, if the block comes from both caches again.
	 */
	if (size_class < npra::class_of(npra::large)) [[likely]]
		tag.store(0, std::memory_order_relaxed);
	else if (!tag.exchange(0, std::memory_order_acq_rel)) [[unlikely]]
		refuse_twice(block);

	const slot &s = slots[serial_ % slots_of_thread];
	if (s.serial == serial_ && s.found && size_class < cache::classes) [[likely]] {
		cache &c = *s.found;
		cache::bin &b = c.bins[size_class];
		/* relaxed: as in release_slowly() */
		if (b.count != b.limit && c.epoch == epoch_.load(std::memory_order_relaxed)) [[likely]] {
			b.blocks[b.count++] = block;
			c.counts.freed[size_class].add(1);
			return;
		}
	}
	release_slowly(block, size_class);
}

std::size_t arena_state::size_of(const void *block) const
{
	return npra::bytes_of(class_at(block));
}

const location *arena_state::find(const void *p, std::size_t registrar, location &where) const noexcept
{
	const std::size_t offset = offset_of(p);

	if (offset >= backing_.size() || registrar >= registrars_.size()) [[unlikely]]
		return nullptr;
	for (;;) {
		const segment *const s = segment_of(static_cast<const std::byte *>(p));
		if (!s) [[unlikely]]
			return nullptr;
		/*
		 * acquire, all but the last: in this order, and pairs with register_segment(). If it was changed meanwhile, the
		 * index has been changed before: the next round finds something else.
		 */
		const std::uint64_t version = s->version.load(std::memory_order_acquire);
		const std::byte *const begin = s->begin.load(std::memory_order_acquire);
		const std::size_t length = s->length.load(std::memory_order_acquire);
		const keys k = s->keys[registrar].load(std::memory_order_acquire);
		const std::size_t inside = offset - offset_of(begin);
		if (version % 2 == 0 && version == s->version.load(std::memory_order_relaxed) && inside < length) [[likely]] {
			where = {k.lkey, k.rkey, reinterpret_cast<std::uintptr_t>(begin), inside};
			return &where;
		}
	}
}

/*
 * Giving back
 */

std::size_t arena_state::discard(void *p, std::size_t bytes)
{
	const std::size_t offset = offset_of(p);

	refuse_inherited();
	if (offset >= backing_.size() || bytes > backing_.size() - offset)
		throw foreign_pointer(how_.name + ": " + bytes_text(bytes) + " at " + text(p) + " are not of this arena");
	const std::size_t dropped = pins_ ? 0 : backing_.drop(static_cast<std::byte *>(p), bytes);
	given_back_.fetch_add(dropped, std::memory_order_relaxed);
	return dropped;
}

std::size_t arena_state::trim()
{
	std::size_t bytes = 0;

	refuse_inherited();
	epoch_.fetch_add(1, std::memory_order_relaxed);
	dropped_here = 0;
	if (cache *const c = my_cache())
		refresh(*c);
	purge();
	bytes = dropped_here;
	/* Eager memory is there until the arena ends. */
	if (in_pieces_ && !how_.eager) {
		const std::size_t released = release_segments();
		given_back_.fetch_add(released, std::memory_order_relaxed);
		bytes += released;
	}
	drop_tags();
	return bytes;
}

/* No block is in free ranges, so their tags are zeros. */
void arena_state::drop_tags() noexcept
{
	const std::lock_guard lock(mutex_);

	for (const auto &[begin, size] : free_.all()) {
		const std::size_t first = (offset_of(reinterpret_cast<void *>(begin)) / npra::line + npra::page - 1) & ~(npra::page - 1);
		const std::size_t end = (offset_of(reinterpret_cast<void *>(begin)) + size) / npra::line & ~(npra::page - 1);
		if (first < end)
			(void)madvise(tags_.bytes().data() + first, end - first, MADV_DONTNEED);
	}
}

/*
 * Numbers
 */

statistics arena_state::stats() const
{
	statistics s{};
	npra::counters sum;

	refuse_inherited();
	{
		const std::lock_guard lock(caches_mutex_);
		/* What is freed was counted before as allocated: never more is freed than was allocated. */
		for (const auto &c : caches_)
			sum.add_freed(c->counts);
		sum.add_freed(past_);
		sum.add_allocated(past_);
		for (const auto &c : caches_)
			sum.add_allocated(c->counts);
	}
	const std::lock_guard lock(mutex_);
	s.capacity = backing_.size();
	s.registered = registered_;
	s.managed = managed_;
	s.peak = peak_;
	for (unsigned int i = 0; i < npra::counters::classes; i++) {
		const std::uint64_t allocated = sum.allocated[i].get(), freed = sum.freed[i].get();
		s.allocations += allocated;
		s.deallocations += freed;
		s.used += (allocated - freed) * npra::bytes_of(i);
	}
	s.free = s.managed - std::min(s.managed, s.used);
	s.blocks = s.allocations - s.deallocations;
	s.registrations = registrations_.load(std::memory_order_relaxed);
	s.deregistrations = deregistrations_.load(std::memory_order_relaxed);
	s.given_back = given_back_.load(std::memory_order_relaxed);
	return s;
}

std::vector<leak> arena_state::leaks(std::size_t limit) const
{
	std::vector<leak> found;
	std::size_t end;

	refuse_inherited();
	{
		const std::lock_guard lock(mutex_);
		end = high_;
	}
	for (std::size_t offset = 0; offset < end && found.size() < limit; offset += npra::line) {
		if (const std::uint8_t tag = tag_of(offset).load(std::memory_order_relaxed))
			found.push_back({backing_.begin() + offset, npra::bytes_of(tag - 1U)});
	}
	return found;
}

} // namespace nprdma::alloc
