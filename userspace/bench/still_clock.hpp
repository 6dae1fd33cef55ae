/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The clock of objects_bench and preload_bench stands still. The library gives leases back that were not used
 * for some 100 ms, and a busy machine, or callgrind, may well take as long between two requests. So no lease
 * grows old here. What the library asks the clock costs as much as ever. One file of the program includes
 * this.
 */
#ifndef NPR_BENCH_STILL_CLOCK_HPP
#define NPR_BENCH_STILL_CLOCK_HPP

#include <cstdlib>
#include <dlfcn.h>
#include <time.h>

namespace npr::bench
{

using clock_function = int (*)(clockid_t, timespec *);

/* That of libc. */
inline clock_function real_clock() noexcept
{
	static const auto f = reinterpret_cast<clock_function>(dlsym(RTLD_NEXT, "clock_gettime"));

	return f;
}

/* In ns, of the clock that goes on. */
[[nodiscard]] inline double real_time() noexcept
{
	timespec t;

	if (real_clock()(CLOCK_MONOTONIC, &t))
		std::abort();
	return 1e9 * static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec);
}

} // namespace npr::bench

/* The program's is found before that of libc. */
extern "C" __attribute__((visibility("default"))) int clock_gettime(clockid_t clock, timespec *t) noexcept
{
	const int rc = npr::bench::real_clock()(clock, t);

	*t = {1'000'000, 0};
	return rc;
}

#endif
