/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Nanoseconds of the clocks that the library goes by. */
#ifndef NPR_CLOCK_HPP
#define NPR_CLOCK_HPP

#include "protocol/engine.hpp"

#include <time.h>

namespace npr {

[[nodiscard]] inline nanoseconds read_clock(clockid_t clock) noexcept
{
	timespec t;

	clock_gettime(clock, &t);
	return static_cast<nanoseconds>(t.tv_sec) * 1'000'000'000 + static_cast<nanoseconds>(t.tv_nsec);
}

[[nodiscard]] inline nanoseconds monotonic() noexcept
{
	return read_clock(CLOCK_MONOTONIC);
}

[[nodiscard]] inline nanoseconds monotonic_coarse() noexcept
{
	return read_clock(CLOCK_MONOTONIC_COARSE);
}

} // namespace npr

#endif
