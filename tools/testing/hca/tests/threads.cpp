// SPDX-License-Identifier: GPL-2.0
/*
 * Register accesses from other threads while one polls: what a thread
 * sanitizer has to see.
 */
#include <atomic>
#include <thread>

#include "driver.h"

using namespace nphca;
using namespace nphca::test;

namespace {

TEST(threads, registers_and_knobs_may_be_used_while_the_fabric_is_polled)
{
	machine m;
	port p(m, 1);
	std::atomic<bool> stop{false};
	std::thread poller([&] {
		uint64_t deadline;
		while (!stop.load(std::memory_order_relaxed))
			nphca_fabric_poll(m.fabric, &deadline);
	});
	std::vector<std::thread> cpus;
	for (int t = 0; t < 3; ++t)
		cpus.emplace_back([&] {
			for (int i = 0; i < 3000; ++i) {
				p.mmio((uint64_t{p.uar} << 12) + uar_eq_ci, __builtin_bswap32(p.eq.eqn << 24), 4);
				nphca_mmio_read(p.dev, 0x14, 4);
				nphca_knob_set(p.dev, NPHCA_DMA_REQUEST_SIZE, i & 1 ? 64 : 512);
				nphca_knob_get(p.dev, NPHCA_DMA_REQUESTS);
				nphca_fabric_pending(m.fabric);
			}
		});
	for (auto &t : cpus)
		t.join();
	while (nphca_fabric_pending(m.fabric))
		std::this_thread::yield();
	stop.store(true, std::memory_order_relaxed);
	poller.join();
	EXPECT_EQ(p.simple(OP_NOP), 0);
}

} // namespace
