/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* For loadable_test: what a plug-in does with the library. */
#include <nprdma/alloc.hpp>

#include <cstdio>
#include <cstring>
#include <exception>

extern "C" __attribute__((visibility("default"))) bool use_an_arena();

bool use_an_arena()
try {
	nprdma::alloc::host_registrar r;
	nprdma::alloc::arena a(r, {.capacity = std::size_t{64} << 20});
	for (const std::size_t bytes : {64U, 5000U, 1000000U}) {
		void *const p = a.allocate(bytes);
		std::memset(p, 1, bytes);
		a.deallocate(p);
	}
	(void)a.trim();
	return a.stats().deallocations == 3 && !a.stats().managed;
} catch (const std::exception &e) {
	std::fprintf(stderr, "%s\n", e.what());
	return false;
}
