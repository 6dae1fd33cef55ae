/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the search for the signature costs, beside a memcpy() of the same buffer
 * and a plain pass that loads all of it, in one run. "Cold" walks through a set
 * of buffers much larger than the caches, as data does that a device has written.
 */
#include "protocol/scan.hpp"

#include <benchmark/benchmark.h>
#include <cstring>
#include <random>
#include <vector>

namespace {

constexpr std::uint64_t signature = 0x5a17c0de9e3779b9ULL;
constexpr std::size_t cold_bytes = 512UL << 20;

/* Buffers of @size bytes, taken in turn. */
class buffers {
public:
	buffers(std::size_t size, bool cold) : size_(size), count_(cold ? std::max<std::size_t>(cold_bytes / size, 1) : 1)
	{
		data_.resize(size_ * count_);
		std::mt19937_64 rng(1);
		for (std::size_t i = 0; i < data_.size(); i += 8) {
			const std::uint64_t x = rng();
			std::memcpy(&data_[i], &x, 8);
		}
	}

	std::byte *next()
	{
		std::byte *p = &data_[at_ * size_];
		at_ = (at_ + 1) % count_;
		return p;
	}

private:
	std::size_t size_, count_, at_ = 0;
	std::vector<std::byte> data_;
};

void count(benchmark::State &state)
{
	state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * state.range(0));
}

void scan(benchmark::State &state)
{
	const auto size = static_cast<std::size_t>(state.range(0));
	buffers b(size, state.range(1));
	for (auto _ : state) {
		const ibv_sge s{reinterpret_cast<std::uintptr_t>(b.next()), static_cast<std::uint32_t>(size), 0};
		npr::page_bits found(static_cast<unsigned>(size / npr::page_size));
		npr::scan_suspicious({&s, 1}, 0, 0x10000, size, signature, 0x10000, found);
		benchmark::DoNotOptimize(found);
	}
	count(state);
}

void copy(benchmark::State &state)
{
	const auto size = static_cast<std::size_t>(state.range(0));
	buffers from(size, state.range(1));
	std::vector<std::byte> to(size);
	for (auto _ : state) {
		std::memcpy(to.data(), from.next(), size);
		benchmark::ClobberMemory();
	}
	count(state);
}

void load(benchmark::State &state)
{
	const auto size = static_cast<std::size_t>(state.range(0));
	buffers b(size, state.range(1));
	for (auto _ : state) {
		const std::byte *p = b.next();
		std::uint64_t sum = 0;
		for (std::size_t i = 0; i < size; i += 8) {
			std::uint64_t x;
			std::memcpy(&x, p + i, 8);
			sum += x;
		}
		benchmark::DoNotOptimize(sum);
	}
	count(state);
}

void sizes(benchmark::internal::Benchmark *b)
{
	b->ArgNames({"bytes", "cold"});
	for (const std::int64_t cold : {0, 1})
		for (const std::int64_t bytes : {4 << 10, 64 << 10, 2 << 20})
			b->Args({bytes, cold});
}

BENCHMARK(scan)->Apply(sizes);
BENCHMARK(copy)->Apply(sizes)->Name("memcpy");
BENCHMARK(load)->Apply(sizes);

} // namespace

BENCHMARK_MAIN();
