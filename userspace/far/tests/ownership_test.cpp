/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A page has one owner at a time: what happens when eviction, flush, prefetch, pins and writers want one
 * page. */
#include "counting.hpp"

#include <gtest/gtest.h>
#include <thread>

namespace
{

using namespace far_tests;

/*
 * A page that is unmapped is dirty and still mapped for a moment. If a flush takes it then, what is written
 * behind the flush's back is lost with the page, which counts as clean.
 */
TEST(Ownership, WhatIsWrittenWhileAPageGoesOutOfSightIsNotLost)
{
	constexpr std::size_t pages = 1024;
	const auto back = std::make_shared<counting>(pages * 4096);
	const auto p = must(pager::make(small_buffer(4 * pages * 4096)));
	const auto m = must(p->map(back));
	volatile std::uint64_t *const w = words(*m);
	std::vector<std::uint64_t> last(pages);
	std::uint64_t n = 0;

	for (int round = 0; round < 10; round++) {
		std::atomic<bool> stop = false;
		std::thread writer([&] {
			while (!stop)
				for (std::size_t page = 0; page < pages; page++)
					w[page * 512] = last[page] = ++n;
		});
		std::thread cooler([&] { EXPECT_EQ(m->advise(0, pages * 4096, hint::cold).code(), 0); });
		EXPECT_EQ(m->flush().code(), 0);
		cooler.join();
		stop = true;
		writer.join();
		must(m->evict());
		for (std::size_t page = 0; page < pages; page++) {
			std::uint64_t is;

			std::memcpy(&is, back->memory_.data() + page * 4096, 8);
			ASSERT_EQ(is, last[page]) << page << " in round " << round;
		}
	}
}

/* Requests are worked on in their order where one filler prefetches: when the last has come, all had their
 * turn. */
TEST(Ownership, WhatWasAskedForBeforeAnEvictionDoesNotComeAfterIt)
{
	const auto back = std::make_shared<counting>(256 * 4096);
	pager_options o = small_buffer(4 << 20);
	o.fillers = 2;
	const auto p = must(pager::make(o));
	const auto m = must(p->map(back));

	/* One page is written back before evict() waits for what is being read: so it is known to have begun.
	 */
	words(*m)[255 * 512] = 1;
	back->set_stalled(true);
	must(m->advise(0, 100 * 4096, hint::will_need));
	back->wait_for_readers(2);
	std::thread evictor([&] { EXPECT_EQ(m->evict().code(), 0); });
	while (back->writes == 0)
		std::this_thread::yield();
	back->set_stalled(false);
	evictor.join();
	EXPECT_EQ(m->stats().resident_bytes, 0u);
	must(m->advise(200 * 4096, 1, hint::will_need));
	while (m->stats().resident_bytes == 0 || m->stats().prefetched == 0)
		std::this_thread::yield();
	(void)*const_cast<volatile std::uint64_t *>(words(*m) + 200 * 512);
	EXPECT_EQ(m->stats().resident_bytes, 4096u);
	/* Those two, and one batch that was on its way. */
	EXPECT_LE(back->reads, 10);
}

TEST(Ownership, PinsThatFailLeaveEarlierOnesAlone)
{
	const auto back = std::make_shared<counting>(256 * 4096);
	const auto p = must(pager::make(small_buffer(64 * 4096)));
	const auto m = must(p->map(back));

	must(m->advise(0, 30 * 4096, hint::pin));
	/* What is pinned already counts once. */
	must(m->advise(0, 31 * 4096, hint::pin));
	back->fail_reads = true;
	EXPECT_EQ(m->advise(0, 40 * 4096, hint::pin).code(), EIO);
	back->fail_reads = false;
	must(m->evict());
	EXPECT_EQ(m->stats().resident_bytes, 31u * 4096);
	must(m->advise(0, 31 * 4096, hint::unpin));
	must(m->evict());
	EXPECT_EQ(m->stats().resident_bytes, 0u);
	/* And nothing is counted that is not pinned any more. */
	must(m->advise(100 * 4096, 50 * 4096, hint::pin));
}

} // namespace
