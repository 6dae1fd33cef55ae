/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Acquire and release of registered memory, beside other ways to have memory. Run by alloc_bench.py, which shows ratios.
 *
 *	arena		an arena of nprdma-alloc
 *	plain		jemalloc as Debian builds it, on plain memory: the same allocator
 *	malloc		of the C library
 *	carved		one big region, cut by hand into blocks of one size: a list of them and a lock
 *	mlock		a block of malloc() that is locked in memory for each use: what pinning costs, and so a stand-in for
 *			register-per-use where there is no adapter. A real registration costs more: the adapter is told, too.
 *
 * "pair" acquires one block and releases it, "window" has 16 blocks in use and replaces the oldest.
 */
#include <nprdma/alloc.hpp>

#include <algorithm>
#include <array>
#include <benchmark/benchmark.h>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <sys/mman.h>
#include <sys/types.h>
#include <system_error>
#include <vector>

extern "C" {
void *plain_je_mallocx(std::size_t, int);
void plain_je_sdallocx(void *, std::size_t, int);

/* As in the library: configuration from outside is the program's. */
char *plain_je_secure_getenv(const char *name);
char *plain_je_secure_getenv(const char * /* name */)
{
	return nullptr;
}
ssize_t plain_je_readlink(const char *path, char *to, std::size_t size);
ssize_t plain_je_readlink(const char * /* path */, char * /* to */, std::size_t /* size */)
{
	errno = ENOENT;
	return -1;
}
}

namespace {

using namespace nprdma::alloc;

constexpr std::size_t kib = 1024, mib = 1024 * kib, gib = 1024 * mib;

struct in_arena {
	static arena &home()
	{
		static host_registrar nobody;
		static arena a(nobody, {.capacity = 64 * gib});
		return a;
	}
	/* Without the test whether it is there already. */
	static inline arena &home_ = home();
	static void prepare(std::size_t) {}
	static void *acquire(std::size_t bytes) { return home_.allocate(bytes); }
	static void release(void *p, std::size_t bytes) { home_.deallocate(p, bytes, 64); }
	static std::uint64_t registrations() { return home().stats().registrations; }
};

struct plain {
	static void prepare(std::size_t) {}
	static void *acquire(std::size_t bytes) { return plain_je_mallocx(bytes, 0); }
	static void release(void *p, std::size_t bytes) { plain_je_sdallocx(p, bytes, 0); }
	static std::uint64_t registrations() { return 0; }
};

struct libc {
	static void prepare(std::size_t) {}
	static void *acquire(std::size_t bytes) { return std::malloc(bytes); }
	static void release(void *p, std::size_t) { std::free(p); }
	static std::uint64_t registrations() { return 0; }
};

struct carved {
	static inline std::mutex mutex;
	static inline std::vector<void *> blocks;

	static void prepare(std::size_t bytes)
	{
		constexpr std::size_t n = 8 * 16 + 8;
		static void *region = nullptr;
		const std::lock_guard lock(mutex);
		static std::size_t now = 0;
		if (now == bytes)
			return;
		if (region)
			(void)munmap(region, n * now);
		region = mmap(nullptr, n * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (region == MAP_FAILED)
			std::abort();
		now = bytes;
		blocks.clear();
		for (std::size_t i = 0; i < n; i++)
			blocks.push_back(static_cast<std::byte *>(region) + i * bytes);
	}
	static void *acquire(std::size_t)
	{
		const std::lock_guard lock(mutex);
		void *const p = blocks.back();
		blocks.pop_back();
		return p;
	}
	static void release(void *p, std::size_t)
	{
		const std::lock_guard lock(mutex);
		blocks.push_back(p);
	}
	static std::uint64_t registrations() { return 0; }
};

struct locked_per_use {
	static inline host_registrar pins{pinning::pinned};
	static inline std::mutex mutex;
	struct registered {
		std::unique_ptr<registration> r;
		void *p;
	};

	static void prepare(std::size_t) {}
	static void *acquire(std::size_t bytes)
	{
		void *p = nullptr;
		if (posix_memalign(&p, 4096, bytes < 4096 ? 4096 : bytes))
			std::abort();
		try {
			return new registered{pins.add({static_cast<std::byte *>(p), bytes}), p};
		} catch (...) {
			std::free(p);
			throw;
		}
	}
	static void release(void *p, std::size_t)
	{
		const std::unique_ptr<registered> all(static_cast<registered *>(p));
		all->r.reset();
		std::free(all->p);
	}
	static std::uint64_t registrations() { return pins.count().made; }
};

template <class How>
void pair(benchmark::State &state)
{
	const auto bytes = static_cast<std::size_t>(state.range(0));
	How::prepare(bytes);
	try {
		for (int i = 0; i < 100; i++) /* the warm-up */
			How::release(How::acquire(bytes), bytes);
	} catch (const std::exception &e) {
		/* ulimit -l, for one */
		state.SkipWithError(e.what());
		return;
	}
	const std::uint64_t before = How::registrations();
	for (auto _ : state) {
		void *const p = How::acquire(bytes);
		benchmark::DoNotOptimize(p);
		How::release(p, bytes);
	}
	if (!state.thread_index())
		state.counters["registrations"] = static_cast<double>(How::registrations() - before);
}

template <class How>
void window(benchmark::State &state)
{
	const auto bytes = static_cast<std::size_t>(state.range(0));
	How::prepare(bytes);
	std::array<void *, 16> live;
	for (void *&p : live)
		p = How::acquire(bytes);
	std::size_t i = 0;
	for (auto _ : state) {
		How::release(live[i], bytes);
		live[i] = How::acquire(bytes);
		benchmark::DoNotOptimize(live[i]);
		i = (i + 1) % live.size();
	}
	for (void *const p : live)
		How::release(p, bytes);
}

void all_sizes(benchmark::internal::Benchmark *b)
{
	b->ArgName("bytes");
	for (const std::size_t bytes : {std::size_t{64}, 4 * kib, 64 * kib, mib, 64 * mib})
		b->Arg(static_cast<std::int64_t>(bytes));
	b->Threads(1)->Threads(2)->Threads(8);
}

/* By one thread: it takes long. Sizes above ulimit -l are skipped, which says so. */
void few_sizes(benchmark::internal::Benchmark *b)
{
	b->ArgName("bytes")->Arg(64)->Arg(4 * kib)->Arg(64 * kib)->Arg(mib)->Arg(64 * mib);
}

BENCHMARK_TEMPLATE(pair, in_arena)->Name("pair/arena")->Apply(all_sizes);
BENCHMARK_TEMPLATE(pair, plain)->Name("pair/plain")->Apply(all_sizes);
BENCHMARK_TEMPLATE(pair, carved)->Name("pair/carved")->Apply(all_sizes);
BENCHMARK_TEMPLATE(pair, libc)->Name("pair/malloc")->Apply(all_sizes);
BENCHMARK_TEMPLATE(pair, locked_per_use)->Name("pair/mlock")->Apply(few_sizes);
BENCHMARK_TEMPLATE(window, in_arena)->Name("window/arena")->Apply(all_sizes);
BENCHMARK_TEMPLATE(window, plain)->Name("window/plain")->Apply(all_sizes);
BENCHMARK_TEMPLATE(window, carved)->Name("window/carved")->Apply(all_sizes);
BENCHMARK_TEMPLATE(window, libc)->Name("window/malloc")->Apply(all_sizes);

void locate(benchmark::State &state)
{
	arena &a = in_arena::home();
	auto *const p = static_cast<std::byte *>(a.allocate(mib));
	std::size_t i = 0;
	for (auto _ : state)
		benchmark::DoNotOptimize(a.locate(p + (i++ & (mib - 1))));
	a.deallocate(p);
}
BENCHMARK(locate)->Threads(1)->Threads(8);

void make_64_gib(benchmark::State &state)
{
	host_registrar nobody;
	for (auto _ : state) {
		const arena a(nobody, {.capacity = 64 * gib});
		benchmark::DoNotOptimize(&a);
	}
}
BENCHMARK(make_64_gib)->UseRealTime()->Unit(benchmark::kMillisecond);

/* Blocks with 256 MiB in all, of 1 byte to 64 KiB or of one size, of which all but some are freed, at random. */
void memory_after_trim(benchmark::State &state)
{
	const auto one_size = static_cast<std::size_t>(state.range(0));
	const auto left = static_cast<std::size_t>(state.range(1)); /* per cent */
	host_registrar nobody;
	for (auto _ : state) {
		arena a(nobody, {.capacity = 64 * gib, .decay = std::chrono::milliseconds(-1)});
		std::mt19937_64 random(1);
		std::vector<void *> blocks;
		for (std::size_t sum = 0; sum < 256 * mib;) {
			const std::size_t bytes = one_size ? one_size : 1 + random() % (64 * kib);
			blocks.push_back(a.allocate(bytes));
			std::memset(blocks.back(), 1, bytes);
			sum += bytes;
		}
		const double peak = static_cast<double>(a.resident());
		std::shuffle(blocks.begin(), blocks.end(), random);
		for (const std::size_t n = blocks.size() * left / 100; blocks.size() > n; blocks.pop_back())
			a.deallocate(blocks.back());
		(void)a.trim();
		constexpr double m = static_cast<double>(mib);
		state.counters["peak_MiB"] = peak / m;
		state.counters["used_MiB"] = static_cast<double>(a.stats().used) / m;
		state.counters["after_MiB"] = static_cast<double>(a.resident()) / m;
		state.counters["registrations"] = static_cast<double>(a.stats().registrations);
		for (void *const p : blocks)
			a.deallocate(p);
		(void)a.trim();
		state.counters["empty_MiB"] = static_cast<double>(a.resident()) / m;
	}
}
BENCHMARK(memory_after_trim)->ArgNames({"bytes", "left"})->Iterations(1)->Unit(benchmark::kMillisecond)
	->Args({0, 10})->Args({512, 25})->Args({5 * kib, 25})->Args({14 * kib, 25})->Args({64 * kib, 25});

} // namespace

BENCHMARK_MAIN();
