// SPDX-License-Identifier: GPL-2.0
/*
 * What a peer sees of pages that come and go, one step at a time: signatures,
 * residency words, generations, faults and holds, over every kind of memory.
 */
#include "np_harness.h"

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif

FIXTURE(residency) {
	struct np_pair pair;
};

FIXTURE_SETUP(residency)
{
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
	memset(self->pair.peer.buf, 0, self->pair.peer.buf_len);
}

FIXTURE_TEARDOWN_PARENT(residency)
{
	NP_CHECK_USAGE(&self->pair.before);
}

#define np_signed(pair, len) np_all((pair)->peer.buf, len, (pair)->info.signature)

/* --- absent ------------------------------------------------------------------------ */

TEST_F(residency, absent_pages_read_as_the_signature_only)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, np_pair_read(pair, 0, NP_DATA_LEN));
	EXPECT_TRUE(np_signed(pair, NP_DATA_LEN));
	/* Nobody faulted the owner's pages either: they are as they were. */
	for (size_t i = 0; i < NP_DATA_PAGES; i++) {
		ASSERT_EQ(-1, np_differs(pair->data + i * PAGE, PAGE, i));
	}
}

TEST_F(residency, odd_parts_of_absent_pages_read_as_the_signature_in_place)
{
	struct np_pair *pair = &self->pair;
	const uint8_t *sig = (const uint8_t *)&pair->info.signature;
	static const struct { size_t off, len; } part[] = {
		{ 1, 1 }, { 3, 8 }, { 61, 7 }, { PAGE - 5, 11 }, { HUGE_PAGE - 3, 70 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(part); i++) {
		ASSERT_EQ(0, np_pair_read(pair, part[i].off, part[i].len));
		for (size_t k = 0; k < part[i].len; k++) {
			ASSERT_EQ(sig[(part[i].off + k) % 8], pair->peer.buf[k]);
		}
	}
}

TEST_F(residency, absent_words_say_generation_0)
{
	struct np_pair *pair = &self->pair;
	size_t words = np_word_index(&pair->info, NP_DATA_LEN - 1) + 1;

	ASSERT_EQ(0, np_read(&pair->peer, 0, words * 8, np_word_addr(&pair->info, 0),
			     pair->info.table_key));
	EXPECT_TRUE(np_all(pair->peer.buf, words * 8, 0));
}

TEST_F(residency, write_to_an_absent_page_changes_nothing_and_is_not_proven)
{
	struct np_pair *pair = &self->pair;
	uint64_t after;

	np_fill(pair->peer.buf, PAGE, 77);
	EXPECT_EQ(0, np_write_try(&pair->peer, &pair->info, 0, 0, PAGE, 0, &after));
	EXPECT_EQ(0, after);
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 0));
	/* Not now, and not when the page comes. */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 0));
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 0));
}

TEST_F(residency, scratch_is_never_readable_as_data)
{
	struct np_pair *pair = &self->pair;

	np_fill(pair->peer.buf, NP_DATA_LEN, 77);
	ASSERT_EQ(0, np_pair_write(pair, 0, NP_DATA_LEN));
	ASSERT_EQ(0, np_pair_read(pair, 0, NP_DATA_LEN));
	EXPECT_TRUE(np_signed(pair, NP_DATA_LEN));
}

/* --- faults -------------------------------------------------------------------------- */

TEST_F(residency, read_fault_shows_the_data_and_nothing_else)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 3 * PAGE, PAGE, 0, &event));
	EXPECT_EQ(1, event.nr_words);
	EXPECT_TRUE(np_readable(event.words[0]));
	EXPECT_FALSE(np_writable(event.words[0]));
	EXPECT_EQ(0, event.hold_id);
	ASSERT_EQ(0, np_pair_read(pair, 0, 8 * PAGE));
	for (int i = 0; i < 8; i++) {
		uint8_t *page = pair->peer.buf + i * PAGE;

		if (i == 3) {
			EXPECT_EQ(-1, np_differs(page, PAGE, 3));
		} else {
			EXPECT_TRUE(np_all(page, PAGE, pair->info.signature));
		}
	}
}

TEST_F(residency, fault_of_a_byte_is_a_fault_of_its_page)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	/* Two bytes, on two pages. */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 2 * PAGE - 1, 2, 0, &event));
	EXPECT_EQ(2, event.nr_words);
	EXPECT_FALSE(np_readable(np_pair_word(pair, 0)));
	EXPECT_TRUE(np_readable(np_pair_word(pair, PAGE)));
	EXPECT_TRUE(np_readable(np_pair_word(pair, 2 * PAGE)));
	EXPECT_FALSE(np_readable(np_pair_word(pair, 3 * PAGE)));
}

TEST_F(residency, read_resident_page_is_scratch_for_writes)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	uint64_t after;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, 0, &event));
	np_fill(pair->peer.buf, PAGE, 77);
	EXPECT_EQ(0, np_write_try(&pair->peer, &pair->info, 0, 0, PAGE, event.words[0], &after));
	EXPECT_EQ(event.words[0], after);
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 0));
}

TEST_F(residency, write_fault_makes_writes_land_and_prove)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, PAGE, PAGE, RDMA_NP_FAULT_WRITE, &event));
	EXPECT_TRUE(np_readable(event.words[0]));
	EXPECT_TRUE(np_writable(event.words[0]));
	np_fill(pair->peer.buf, PAGE, 77);
	EXPECT_EQ(1, np_write_try(&pair->peer, &pair->info, 0, PAGE, PAGE, event.words[0], NULL));
	EXPECT_EQ(-1, np_differs(pair->data + PAGE, PAGE, 77));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 0));
	EXPECT_EQ(-1, np_differs(pair->data + 2 * PAGE, PAGE, 2));
	ASSERT_EQ(0, np_pair_read(pair, PAGE, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 77));
}

TEST_F(residency, owner_and_peer_see_each_others_stores)
{
	struct np_pair *pair = &self->pair;
	volatile uint64_t *word = (uint64_t *)pair->data;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	for (uint64_t i = 1; i < 100; i++) {
		*word = i;
		ASSERT_EQ(0, np_pair_read(pair, 0, 8));
		ASSERT_EQ(i, *(uint64_t *)pair->peer.buf);
		*(uint64_t *)pair->peer.buf = ~i;
		ASSERT_EQ(0, np_pair_write(pair, 0, 8));
		ASSERT_EQ(0, np_pair_read(pair, 8, 8));
		ASSERT_EQ(~i, *word);
	}
}

TEST_F(residency, ranges_of_one_request_are_served_together)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_range ranges[RDMA_NP_MAX_RANGES];
	struct rdma_np_event event;

	for (int i = 0; i < RDMA_NP_MAX_RANGES; i++)
		ranges[i] = (struct rdma_np_range){
			.addr = pair->info.base + i * 64 * PAGE,
			.length = (i + 1) * PAGE,
		};
	ASSERT_EQ(0, np_fault_start(&pair->peer, pair->info.region_id, 0, 4711, ranges,
				    RDMA_NP_MAX_RANGES));
	ASSERT_EQ(1, np_wait_event(&pair->peer, RDMA_NP_EVENT_FAULT, &event, NP_WAIT_MS));
	ASSERT_EQ(RDMA_NP_OK, event.status);
	EXPECT_EQ(4711, event.cookie);
	EXPECT_EQ(pair->info.region_id, event.region_id);
	/* Words are those of the first range. */
	EXPECT_EQ(1, event.nr_words);
	for (size_t i = 0; i < NP_DATA_PAGES; i++) {
		bool asked = i / 64 < RDMA_NP_MAX_RANGES && i % 64 <= i / 64;

		ASSERT_EQ(asked, np_readable(np_pair_word(pair, i * PAGE)))
			TH_LOG("page %zu", i);
	}
	/* One request, one event. */
	EXPECT_EQ(0, np_next_event(&pair->peer, &event, 0));
}

/* --- words --------------------------------------------------------------------------- */

/* Are the pages [first, end) readable, and those around them not? */
static bool just_these(struct np_pair *pair, size_t first, size_t end)
{
	for (size_t i = first ? first - 1 : 0; i < end + 1; i++) {
		bool in = i >= first && i < end;

		if (np_readable(np_pair_word(pair, i * PAGE)) != in)
			return false;
	}
	return true;
}

TEST_F(residency, neighbours_that_are_there_come_with_a_fault)
{
	struct np_pair *pair = &self->pair;
	uint64_t base = pair->info.base / PAGE;
	/* blocks are aligned addresses, not aligned offsets */
	size_t first = 32 - base % 16;

	ASSERT_EQ(0, np_set_fault_around(16));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, (first + 5) * PAGE, PAGE, 0, NULL));
	EXPECT_TRUE(np_wait_until(just_these(pair, first, first + 16)));
	/* They are read only: a WRITE there needs a fault of its own. */
	EXPECT_FALSE(np_writable(np_pair_word(pair, (first + 6) * PAGE)));
	/* Across two blocks, and at both ends of the region. */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, (first + 47) * PAGE, 2 * PAGE, 0, NULL));
	EXPECT_TRUE(np_wait_until(just_these(pair, first + 32, first + 64)));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 1, 0, NULL));
	EXPECT_TRUE(np_wait_until(just_these(pair, 0, base % 16 ? 16 - base % 16 : 16)));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, NP_DATA_LEN - 1, 1, 0, NULL));
	EXPECT_TRUE(np_wait_until(np_readable(np_pair_word(pair, NP_DATA_LEN - PAGE))));
	ASSERT_EQ(0, np_pair_read(pair, first * PAGE, 16 * PAGE));
	for (size_t i = 0; i < 16; i++) {
		EXPECT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, first + i));
	}
}

TEST_F(residency, neighbours_that_are_not_there_do_not_come)
{
	struct np_pair *pair = &self->pair;
	size_t first = 32 - pair->info.base / PAGE % 16;
	bool there[16];

	ASSERT_EQ(0, np_set_fault_around(16));
	ASSERT_EQ(0, np_page_out(pair->data, NP_DATA_LEN));
	/* One is back already, the others would have to be read. */
	EXPECT_EQ(-1, np_differs(pair->data + (first + 9) * PAGE, PAGE, first + 9));
	for (size_t i = 0; i < 16; i++)
		there[i] = i == 5 || np_present(pair->data + (first + i) * PAGE);
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, (first + 5) * PAGE, PAGE, 0, NULL));
	EXPECT_TRUE(np_wait_until(np_readable(np_pair_word(pair, (first + 9) * PAGE))));
	for (size_t i = 0; i < 16; i++) {
		EXPECT_EQ(there[i], np_readable(np_pair_word(pair, (first + i) * PAGE)))
			TH_LOG("page %zu", i);
	}
}

TEST_F(residency, neighbours_come_only_with_a_fault_for_reading)
{
	static const uint32_t flags[] = { RDMA_NP_FAULT_WRITE, RDMA_NP_FAULT_HOLD, 0 };
	struct np_pair *pair = &self->pair;
	size_t first = 32 - pair->info.base / PAGE % 16;

	ASSERT_EQ(0, np_set_fault_around(16));
	for (size_t i = 0; i < ARRAY_SIZE(flags); i++, first += 32) {
		for (size_t n = 0; n < 16; n++)
			ASSERT_TRUE(np_present(pair->data + (first + n) * PAGE));
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, first * PAGE, PAGE, flags[i], NULL));
	}
	/* Neighbours come after the answer: when the last ones are there, others would be. */
	first -= 32;
	EXPECT_TRUE(np_wait_until(just_these(pair, first, first + 16)));
	EXPECT_TRUE(just_these(pair, first - 32, first - 31));
	EXPECT_TRUE(just_these(pair, first - 64, first - 63));
}

TEST_F(residency, generation_counts_each_change_of_state)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	uint64_t word = np_pair_word(pair, 0), next;

	/* absent -> readable */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, 0, &event));
	next = np_pair_word(pair, 0);
	EXPECT_EQ(event.words[0], next);
	EXPECT_EQ(np_generation(word) + 1, np_generation(next));
	EXPECT_EQ(RDMA_NP_WORD_READABLE, next & 3);
	word = next;
	/* readable -> writable */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, &event));
	next = np_pair_word(pair, 0);
	EXPECT_EQ(event.words[0], next);
	EXPECT_EQ(np_generation(word) + 1, np_generation(next));
	EXPECT_EQ(RDMA_NP_WORD_READABLE | RDMA_NP_WORD_WRITABLE, next & 3);
	word = next;
	/* resident -> absent */
	ASSERT_EQ(0, madvise(pair->data, PAGE, MADV_DONTNEED));
	next = np_pair_word(pair, 0);
	EXPECT_EQ(np_generation(word) + 1, np_generation(next));
	EXPECT_EQ(0, next & 3);
	word = next;
	/* absent -> writable */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, &event));
	next = np_pair_word(pair, 0);
	EXPECT_EQ(np_generation(word) + 1, np_generation(next));
	EXPECT_EQ(RDMA_NP_WORD_READABLE | RDMA_NP_WORD_WRITABLE, next & 3);
}

TEST_F(residency, fault_on_a_resident_page_changes_nothing)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event first, again;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 16 * PAGE, RDMA_NP_FAULT_WRITE, &first));
	ASSERT_EQ(16, first.nr_words);
	for (int i = 0; i < 4; i++) {
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 16 * PAGE, i % 2 ? RDMA_NP_FAULT_WRITE : 0,
					       &again));
		EXPECT_EQ(0, memcmp(first.words, again.words, sizeof(first.words)));
	}
	/* The pages in between that are resident stay as they are, too. */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 64 * PAGE, 0, &again));
	EXPECT_EQ(0, memcmp(first.words, again.words, sizeof(first.words)));
}

TEST_F(residency, words_belong_to_their_pages)
{
	struct np_pair *pair = &self->pair;

	for (size_t i = 0; i < NP_DATA_PAGES; i += 37) {
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, i * PAGE, PAGE, 0, NULL));
	}
	for (size_t i = 0; i < NP_DATA_PAGES; i++) {
		ASSERT_EQ(i % 37 == 0, np_readable(np_pair_word(pair, i * PAGE)))
			TH_LOG("page %zu", i);
	}
}

TEST_F(residency, counters_tell_what_happened)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_mr_info info;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 8 * PAGE, 0, NULL));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 2 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_EQ(8, info.resident_pages);
	EXPECT_EQ(2, info.writable_pages);
	EXPECT_EQ(0, info.held_pages);
	EXPECT_LE(8, info.faults_minor + info.faults_major);
	EXPECT_EQ(1, info.table_pages);
	ASSERT_EQ(0, madvise(pair->data, 4 * PAGE, MADV_DONTNEED));
	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_EQ(4, info.resident_pages);
	EXPECT_EQ(0, info.writable_pages);
	EXPECT_EQ(4, info.pages_invalidated);
	EXPECT_LE(1, info.invalidations);
}

/* --- pages that go --------------------------------------------------------------------- */

TEST_F(residency, dropped_page_reads_as_the_signature_at_once)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	for (int i = 0; i < 50; i++) {
		ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
		ASSERT_FALSE(np_signed(pair, PAGE));
		ASSERT_EQ(0, madvise(pair->data, PAGE, MADV_DONTNEED));
		ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
		ASSERT_TRUE(np_signed(pair, PAGE));
		np_fill(pair->data, PAGE, i);
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
		ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
		ASSERT_EQ(-1, np_differs(pair->peer.buf, PAGE, i));
	}
	/* Its neighbour was not touched by all that. */
	ASSERT_EQ(0, np_pair_read(pair, PAGE, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 1));
}

TEST_F(residency, dropped_page_faults_in_as_zeros)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(0, madvise(pair->data, PAGE, MADV_DONTNEED));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, 0, NULL));
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
	EXPECT_TRUE(np_all(pair->peer.buf, PAGE, 0));
}

TEST_F(residency, zero_page_is_replaced_before_a_write)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	/* A read fault of untouched memory may map the shared page of zeros. */
	ASSERT_EQ(0, madvise(pair->data, 2 * PAGE, MADV_DONTNEED));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 2 * PAGE, 0, &event));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, &event));
	np_fill(pair->peer.buf, PAGE, 77);
	ASSERT_EQ(1, np_write_try(&pair->peer, &pair->info, 0, 0, PAGE, event.words[0], NULL));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 77));
	EXPECT_TRUE(np_all(pair->data + PAGE, PAGE, 0));
}

TEST_F(residency, write_after_the_page_went_is_not_proven)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, &event));
	ASSERT_EQ(0, madvise(pair->data, PAGE, MADV_DONTNEED));
	np_fill(pair->peer.buf, PAGE, 77);
	EXPECT_EQ(0, np_write_try(&pair->peer, &pair->info, 0, 0, PAGE, event.words[0], NULL));
	/* Nor if it came back meanwhile: that is another generation. */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	EXPECT_EQ(0, np_write_try(&pair->peer, &pair->info, 0, 0, PAGE, event.words[0], NULL));
}

/* --- mappings that are not as one would like --------------------------------------------- */

TEST_F(residency, hole_is_an_address_error)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 8 * PAGE, 0, NULL));
	ASSERT_EQ(0, munmap(pair->data + 4 * PAGE, PAGE));
	ASSERT_EQ(0, np_pair_read(pair, 4 * PAGE, PAGE));
	EXPECT_TRUE(np_signed(pair, PAGE));
	EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(pair, 4 * PAGE, PAGE, 0, NULL));
	EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(pair, 0, 8 * PAGE, 0, NULL));
	/* The rest of the region works. */
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, 5 * PAGE, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(0, np_pair_read(pair, 5 * PAGE, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 5));
}

TEST_F(residency, region_follows_addresses_not_memory)
{
	struct np_pair *pair = &self->pair;
	void *p;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	p = mmap(pair->data, PAGE, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	ASSERT_EQ(pair->data, p);
	np_fill(p, PAGE, 99);
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
	EXPECT_TRUE(np_signed(pair, PAGE));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, 0, NULL));
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 99));
}

TEST_F(residency, moved_mapping_leaves_a_hole)
{
	struct np_pair *pair = &self->pair;
	void *to = np_map(HUGE_PAGE);

	ASSERT_NE(NULL, to);
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(to, mremap(pair->data, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to));
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
	EXPECT_TRUE(np_signed(pair, PAGE));
	EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(pair, 0, PAGE, 0, NULL));
	EXPECT_EQ(-1, np_differs(to, PAGE, 0));
}

TEST_F(residency, read_only_mapping_is_an_access_error_for_writes)
{
	struct np_pair *pair = &self->pair;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(0, mprotect(pair->data, PAGE, PROT_READ));
	EXPECT_FALSE(np_writable(np_pair_word(pair, 0)));
	EXPECT_EQ(RDMA_NP_ACCESS, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	np_fill(pair->peer.buf, PAGE, 77);
	ASSERT_EQ(0, np_pair_write(pair, 0, PAGE));
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, 0, NULL));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 0));
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 0));
	ASSERT_EQ(0, mprotect(pair->data, PAGE, PROT_READ | PROT_WRITE));
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
}

TEST_F(residency, inaccessible_mapping_is_an_error)
{
	struct np_pair *pair = &self->pair;
	int ret;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(0, mprotect(pair->data, PAGE, PROT_NONE));
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
	EXPECT_TRUE(np_signed(pair, PAGE));
	ret = np_pair_fault(pair, 0, PAGE, 0, NULL);
	EXPECT_TRUE(ret == RDMA_NP_ADDRESS || ret == RDMA_NP_ACCESS) TH_LOG("status %d", ret);
}

/* --- kinds of memory ------------------------------------------------------------------------ */

TEST_F(residency, fork_separates_parent_and_child)
{
	struct np_pair *pair = &self->pair;
	int to_child[2], from_child[2];
	char c = 0;
	pid_t pid;

	ASSERT_EQ(0, pipe(to_child));
	ASSERT_EQ(0, pipe(from_child));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid) {
		/* What the parent's peer writes now is none of our business. */
		if (read(to_child[0], &c, 1) != 1)
			_exit(2);
		if (np_differs(pair->data, PAGE, 0) != -1)
			_exit(3);
		np_fill(pair->data + PAGE, PAGE, 555);
		if (write(from_child[1], &c, 1) != 1 || read(to_child[0], &c, 1) != 1)
			_exit(4);
		_exit(0);
	}
	np_fill(pair->peer.buf, PAGE, 77);
	EXPECT_EQ(0, np_write_proven(&pair->peer, &pair->info, 0, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 77));
	ASSERT_EQ(1, write(to_child[1], &c, 1));
	ASSERT_EQ(1, read(from_child[0], &c, 1));
	/* What the child wrote is not the region's. */
	ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, PAGE, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 1));
	ASSERT_EQ(1, write(to_child[1], &c, 1));
	int status = -1;

	ASSERT_EQ(pid, waitpid(pid, &status, 0));
	EXPECT_EQ(0, status) TH_LOG("exit %d", WEXITSTATUS(status));
	/* With the child gone, the parent's page is still the parent's. */
	ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 77));
}

TEST_F(residency, owners_store_after_fork_reaches_the_peer)
{
	struct np_pair *pair = &self->pair;
	int hold[2];
	char c;
	pid_t pid;

	ASSERT_EQ(0, pipe(hold));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 4 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	pid = np_fork();
	ASSERT_LE(0, pid);
	if (!pid) {
		close(hold[1]);
		_exit(read(hold[0], &c, 1) != 0);
	}
	/* Copy on write gives the parent another page than the peer had. */
	np_fill(pair->data, PAGE, 88);
	ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 88));
	close(hold[1]);
	ASSERT_EQ(pid, waitpid(pid, NULL, 0));
}

/* The pair's data in huge pages. */
static int map_huge(struct np_pair *pair)
{
	/* Where there were small pages there is a table, and no room for a huge one. */
	if (mmap(pair->data, NP_DATA_LEN, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != pair->data ||
	    madvise(pair->data, NP_DATA_LEN, MADV_HUGEPAGE))
		return -errno;
	for (size_t i = 0; i < NP_DATA_PAGES; i++)
		np_fill(pair->data + i * PAGE, PAGE, i);
	return 0;
}

static long huge_leaves(struct np_pair *pair)
{
	struct rdma_np_mr_info info;

	return np_query_mr(pair->mr, &info) ?: (long)info.huge_leaves;
}

TEST_F(residency, huge_page_is_one_leaf)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	struct rdma_np_mr_info info;
	uint64_t word;

	ASSERT_EQ(0, map_huge(pair));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 9 * PAGE, PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_EQ(1, info.huge_leaves);
	EXPECT_EQ(512, info.resident_pages);
	EXPECT_EQ(512, info.writable_pages);
	/* With one fault. */
	ASSERT_EQ(0, np_pair_read(pair, 0, HUGE_PAGE));
	for (size_t i = 0; i < 512; i++) {
		ASSERT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, i));
	}
	np_fill(pair->peer.buf, PAGE, 77);
	ASSERT_EQ(0, np_word(&pair->peer, &pair->info, 300 * PAGE, &word));
	ASSERT_EQ(1, np_write_try(&pair->peer, &pair->info, 0, 300 * PAGE, PAGE,
				  word, NULL));
	EXPECT_EQ(-1, np_differs(pair->data + 300 * PAGE, PAGE, 77));

	/* What is held is a page of its own. */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 5 * PAGE, PAGE, RDMA_NP_FAULT_HOLD, &event));
	EXPECT_EQ(0, huge_leaves(pair));
	ASSERT_EQ(0, np_pair_read(pair, 0, HUGE_PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf + 300 * PAGE, PAGE, 77));
	ASSERT_EQ(0, madvise(pair->data, HUGE_PAGE, MADV_DONTNEED));
	ASSERT_EQ(0, np_pair_read(pair, 0, HUGE_PAGE));
	for (size_t i = 0; i < 512; i++) {
		if (i == 5) {
			EXPECT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, i));
		} else {
			ASSERT_TRUE(np_all(pair->peer.buf + i * PAGE, PAGE, pair->info.signature));
		}
	}
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
}

TEST_F(residency, huge_page_that_is_held_stays_one_leaf)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(0, map_huge(pair));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, HUGE_PAGE,
					    RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_WRITE, &event));
	EXPECT_EQ(1, huge_leaves(pair));
	/* A part goes: what is held stays for the peer, all of it, and for nobody else. */
	ASSERT_EQ(0, madvise(pair->data + 5 * PAGE, PAGE, MADV_DONTNEED));
	EXPECT_EQ(1, huge_leaves(pair));
	ASSERT_EQ(0, np_pair_read(pair, 0, HUGE_PAGE));
	for (size_t i = 0; i < 512; i++) {
		ASSERT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, i));
	}
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	EXPECT_TRUE(np_wait_until(huge_leaves(pair) == 0));
	ASSERT_EQ(0, np_pair_read(pair, 0, HUGE_PAGE));
	EXPECT_TRUE(np_signed(pair, HUGE_PAGE));
	for (size_t i = 0; i < 512; i++) {
		ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, i * PAGE, PAGE));
		if (i == 5) {
			EXPECT_TRUE(np_all(pair->peer.buf, PAGE, 0));
		} else {
			ASSERT_EQ(-1, np_differs(pair->peer.buf, PAGE, i)) TH_LOG("page %zu", i);
		}
	}
}

TEST_F(residency, part_of_a_huge_page_can_go)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;

	ASSERT_EQ(0, map_huge(pair));
	EXPECT_LT(0, np_vmstat("thp_fault_alloc"));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, HUGE_PAGE, RDMA_NP_FAULT_WRITE, &event));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, HUGE_PAGE, HUGE_PAGE, RDMA_NP_FAULT_WRITE, &event));
	ASSERT_EQ(0, np_pair_read(pair, 0, NP_DATA_LEN));
	for (size_t i = 0; i < NP_DATA_PAGES; i++) {
		ASSERT_EQ(-1, np_differs(pair->peer.buf + i * PAGE, PAGE, i));
	}
	EXPECT_EQ(2, huge_leaves(pair));
	ASSERT_EQ(0, madvise(pair->data + 5 * PAGE, PAGE, MADV_DONTNEED));
	EXPECT_EQ(1, huge_leaves(pair));
	ASSERT_EQ(0, np_pair_read(pair, 5 * PAGE, PAGE));
	EXPECT_TRUE(np_signed(pair, PAGE));
	for (size_t i = 0; i < NP_DATA_PAGES; i++) {
		ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, i * PAGE, PAGE));
		if (i == 5) {
			EXPECT_TRUE(np_all(pair->peer.buf, PAGE, 0));
		} else {
			ASSERT_EQ(-1, np_differs(pair->peer.buf, PAGE, i)) TH_LOG("page %zu", i);
		}
	}
}

TEST_F(residency, collapse_into_a_huge_page_loses_nothing)
{
	struct np_pair *pair = &self->pair;

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, HUGE_PAGE, RDMA_NP_FAULT_WRITE, NULL));
	np_fill(pair->peer.buf, PAGE, 77);
	ASSERT_EQ(0, np_write_proven(&pair->peer, &pair->info, 0, 7 * PAGE, PAGE));
	ASSERT_EQ(0, madvise(pair->data, NP_DATA_LEN, MADV_HUGEPAGE));
	ASSERT_EQ(0, madvise(pair->data, HUGE_PAGE, MADV_COLLAPSE));
	/* The old small pages are gone: nobody may read them any more. */
	ASSERT_EQ(0, np_pair_read(pair, 0, HUGE_PAGE));
	EXPECT_TRUE(np_signed(pair, HUGE_PAGE));
	for (size_t i = 0; i < 512; i++) {
		ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, i * PAGE, PAGE));
		ASSERT_EQ(-1, np_differs(pair->peer.buf, PAGE, i == 7 ? 77 : i));
	}
	EXPECT_EQ(1, huge_leaves(pair));
}

TEST_F(residency, merged_pages_are_separated_before_a_write)
{
	struct np_pair *pair = &self->pair;

	memset(pair->data, 0x5a, 64 * PAGE);
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 64 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(0, np_ksm_start()) TH_LOG("CONFIG_KSM is needed");
	ASSERT_EQ(0, madvise(pair->data, 64 * PAGE, MADV_MERGEABLE));
	EXPECT_TRUE(np_wait_until(np_ksm_sharing() >= 60))
		TH_LOG("%ld pages merged", np_ksm_sharing());
	np_fill(pair->peer.buf, PAGE, 77);
	ASSERT_EQ(0, np_write_proven(&pair->peer, &pair->info, 0, 3 * PAGE, PAGE));
	EXPECT_EQ(-1, np_differs(pair->data + 3 * PAGE, PAGE, 77));
	for (int i = 0; i < 64; i++)
		if (i != 3) {
			ASSERT_TRUE(np_all(pair->data + i * PAGE, PAGE, 0x5a5a5a5a5a5a5a5aULL));
		}
	EXPECT_EQ(0, np_ksm_stop());
}

TEST_F(residency, truncated_file_is_an_address_error)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_region_info info;
	struct ibv_mr *mr;
	uint8_t *p;
	int fd;

	fd = memfd_create("np", 0);
	ASSERT_LE(0, fd);
	ASSERT_EQ(0, ftruncate(fd, 8 * PAGE));
	p = mmap(NULL, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	ASSERT_NE(MAP_FAILED, p);
	for (int i = 0; i < 8; i++)
		np_fill(p + i * PAGE, PAGE, i);
	mr = ibv_reg_mr(pair->owner.pd, p, 8 * PAGE, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	ASSERT_EQ(0, np_resolve(&pair->peer, mr->rkey, &info));
	ASSERT_EQ(RDMA_NP_OK, np_fault(&pair->peer, info.region_id, info.base, 8 * PAGE, RDMA_NP_FAULT_WRITE,
				  NULL));
	np_fill(pair->peer.buf, PAGE, 77);
	ASSERT_EQ(0, np_write_proven(&pair->peer, &info, 0, 2 * PAGE, PAGE));
	/* Everybody who maps the file sees it. */
	ASSERT_EQ((ssize_t)PAGE, pread(fd, pair->peer.buf + PAGE, PAGE, 2 * PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf + PAGE, PAGE, 77));
	ASSERT_EQ(0, ftruncate(fd, 4 * PAGE));
	ASSERT_EQ(0, np_read(&pair->peer, 0, PAGE, np_read_addr(&info, 5 * PAGE), info.read_key));
	EXPECT_TRUE(np_all(pair->peer.buf, PAGE, info.signature));
	EXPECT_EQ(RDMA_NP_ADDRESS, np_fault(&pair->peer, info.region_id, info.base + 5 * PAGE, PAGE, 0,
				       NULL));
	ASSERT_EQ(0, np_read_proven(&pair->peer, &info, 0, 2 * PAGE, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 77));
}

TEST_F(residency, private_file_mapping_does_not_write_the_file)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_region_info info;
	struct ibv_mr *mr;
	uint8_t page[PAGE], *p;
	int fd;

	fd = memfd_create("np", 0);
	ASSERT_LE(0, fd);
	np_fill(page, PAGE, 11);
	ASSERT_EQ((ssize_t)PAGE, write(fd, page, PAGE));
	p = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	ASSERT_NE(MAP_FAILED, p);
	mr = ibv_reg_mr(pair->owner.pd, p, PAGE, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	ASSERT_EQ(0, np_resolve(&pair->peer, mr->rkey, &info));
	ASSERT_EQ(0, np_read_proven(&pair->peer, &info, 0, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 11));
	np_fill(pair->peer.buf, PAGE, 77);
	ASSERT_EQ(0, np_write_proven(&pair->peer, &info, 0, 0, PAGE));
	EXPECT_EQ(-1, np_differs(p, PAGE, 77));
	ASSERT_EQ((ssize_t)PAGE, pread(fd, page, PAGE, 0));
	EXPECT_EQ(-1, np_differs(page, PAGE, 11));
}

/* --- holds --------------------------------------------------------------------------------- */

TEST_F(residency, held_page_stays_until_it_is_released)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event, again;
	struct rdma_np_mr_info info;
	long before = np_pinned();

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 2 * PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event));
	ASSERT_NE(0, event.hold_id);
	EXPECT_EQ(before + 2, np_pinned());
	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_EQ(2, info.held_pages);
	EXPECT_EQ(1, info.holds);
	/* Reclaim takes its neighbours and leaves it alone. */
	ASSERT_EQ(0, np_page_out(pair->data + 2 * PAGE, 2 * PAGE));
	ASSERT_EQ(0, madvise(pair->data, 2 * PAGE, MADV_PAGEOUT));
	EXPECT_TRUE(np_present(pair->data));
	EXPECT_EQ(event.words[0], np_pair_word(pair, 0));
	np_fill(pair->peer.buf, PAGE, 77);
	EXPECT_EQ(1, np_write_try(&pair->peer, &pair->info, 0, 0, PAGE, event.words[0], NULL));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 77));
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	EXPECT_TRUE(np_wait_until(np_pinned() == before));
	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_EQ(0, info.held_pages);
	EXPECT_NE(0, np_release(&pair->peer, event.hold_id));
	/* Nothing happened to the mapping, so the page is resident still. */
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, &again));
	EXPECT_EQ(event.words[0], again.words[0]);
}

TEST_F(residency, page_dropped_under_a_hold_is_absent_after_it)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event event;
	long before = np_pinned();

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(0, madvise(pair->data, PAGE, MADV_DONTNEED));
	/* As with a pinned region: the peer has the page that was. */
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 0));
	np_fill(pair->data, PAGE, 99);
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	ASSERT_TRUE(np_wait_until(np_pinned() == before));
	ASSERT_EQ(0, np_pair_read(pair, 0, PAGE));
	EXPECT_TRUE(np_signed(pair, PAGE));
	ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, 0, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 99));
}

TEST_F(residency, page_is_held_until_the_last_hold)
{
	struct np_pair *pair = &self->pair;
	struct rdma_np_event one, two;
	struct rdma_np_mr_info info;
	long before = np_pinned();

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 4 * PAGE, RDMA_NP_FAULT_HOLD, &one));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 2 * PAGE, 4 * PAGE, RDMA_NP_FAULT_HOLD, &two));
	EXPECT_NE(one.hold_id, two.hold_id);
	ASSERT_EQ(0, np_query_mr(pair->mr, &info));
	EXPECT_EQ(6, info.held_pages);
	ASSERT_EQ(0, np_release(&pair->peer, one.hold_id));
	EXPECT_TRUE(np_wait_until(!np_query_mr(pair->mr, &info) && info.held_pages == 4));
	ASSERT_EQ(0, np_pair_read(pair, 2 * PAGE, PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, 2));
	ASSERT_EQ(0, np_release(&pair->peer, two.hold_id));
	EXPECT_TRUE(np_wait_until(np_pinned() == before));
}

TEST_F(residency, atomics_under_a_hold_happen_exactly_once)
{
	struct np_pair *pair = &self->pair;
	volatile uint64_t *word = (uint64_t *)pair->data;
	struct rdma_np_event event;

	*word = 0;
	for (int i = 0; i < 20; i++) {
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD,
					       &event));
		ASSERT_EQ(0, np_fetch_add(&pair->peer, 0, np_write_addr(&pair->info, 0),
					  pair->info.write_key, 3));
		EXPECT_EQ(3 * i, *(uint64_t *)pair->peer.buf);
		ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
		/* Out and in again: the sum is in the page, not in a copy. */
		ASSERT_EQ(0, np_page_out(pair->data, PAGE));
	}
	EXPECT_EQ(60, *word);
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event));
	ASSERT_EQ(0, np_cmp_swap(&pair->peer, 0, np_write_addr(&pair->info, 0),
				 pair->info.write_key, 60, 4711));
	EXPECT_EQ(60, *(uint64_t *)pair->peer.buf);
	EXPECT_EQ(4711, *word);
	ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
}

/* --- places where a region may begin and end ------------------------------------------------ */

FIXTURE(placement) {
	struct np_pair pair;
};

FIXTURE_VARIANT(placement) {
	size_t off;		/* of the region in its mapping */
	size_t len;
	bool iova;		/* remote addresses are not virtual addresses */
};

FIXTURE_VARIANT_ADD(placement, one_byte) { .off = 123, .len = 1 };
FIXTURE_VARIANT_ADD(placement, inside_a_page) { .off = 64, .len = 512 };
FIXTURE_VARIANT_ADD(placement, odd_begin_and_end) { .off = 4095, .len = PAGE + 2 };
FIXTURE_VARIANT_ADD(placement, across_slots) { .off = HUGE_PAGE - 8, .len = 16 };
FIXTURE_VARIANT_ADD(placement, ends_with_a_slot) { .off = HUGE_PAGE - PAGE, .len = PAGE };
FIXTURE_VARIANT_ADD(placement, begins_with_a_slot) { .off = HUGE_PAGE, .len = PAGE };
FIXTURE_VARIANT_ADD(placement, three_slots) { .off = PAGE + 40, .len = 2 * HUGE_PAGE + 3 * PAGE };
FIXTURE_VARIANT_ADD(placement, many_slots) { .off = 3 * PAGE, .len = 40 * HUGE_PAGE };
FIXTURE_VARIANT_ADD(placement, iova_0) { .off = 0, .len = 4 * PAGE, .iova = true };
FIXTURE_VARIANT_ADD(placement, iova_8) { .off = 8, .len = 4 * PAGE, .iova = true };
FIXTURE_VARIANT_ADD(placement, iova_across_slots) {
	.off = HUGE_PAGE - PAGE + 8, .len = 3 * HUGE_PAGE, .iova = true,
};

FIXTURE_SETUP(placement)
{
	size_t room = variant->off + variant->len + HUGE_PAGE;

	ASSERT_EQ(0, np_pair_open(&self->pair));
	self->pair.data = np_map((room + HUGE_PAGE) & -HUGE_PAGE);
	ASSERT_NE(NULL, self->pair.data);
	self->pair.data += variant->off;
	self->pair.mr = ibv_reg_mr_iova(self->pair.owner.pd, self->pair.data, variant->len,
					variant->iova ? variant->off % PAGE :
							(uintptr_t)self->pair.data,
					NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, self->pair.mr) TH_LOG("%s", strerror(errno));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
}

FIXTURE_TEARDOWN_PARENT(placement)
{
	NP_CHECK_USAGE(&self->pair.before);
}

/* First byte, last byte and some between: each lands where it belongs. */
TEST_F(placement, bytes_are_where_they_should_be)
{
	struct np_pair *pair = &self->pair;
	size_t step = variant->len / 7 + 1;

	for (size_t off = 0; off < variant->len;
	     off = off == variant->len - 1 || off + step < variant->len ? off + step :
									  variant->len - 1) {
		uint8_t value = off * 7 + 1;
		struct rdma_np_event event;
		uint64_t word;

		pair->data[off] = ~value;
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, 1, RDMA_NP_FAULT_WRITE, &event));
		ASSERT_EQ(0, np_pair_read(pair, off, 1));
		ASSERT_EQ((uint8_t)~value, pair->peer.buf[0]);
		ASSERT_EQ(0, np_word(&pair->peer, &pair->info, off, &word));
		ASSERT_EQ(event.words[0], word);
		pair->peer.buf[0] = value;
		ASSERT_EQ(1, np_write_try(&pair->peer, &pair->info, 0, off, 1, word, NULL));
		ASSERT_EQ(value, pair->data[off]);
	}
	if (variant->off) {
		EXPECT_EQ(0, pair->data[-1]);
	}
	EXPECT_EQ(0, pair->data[variant->len]);
}

TEST_F(placement, one_byte_beyond_is_an_error)
{
	struct np_pair *pair = &self->pair;

	EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(pair, variant->len, 1, 0, NULL));
	EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, variant->len - 1, 1, 0, NULL));
	pair->peer.buf[0] = 0xff;
	EXPECT_EQ(IBV_WC_REM_ACCESS_ERR, np_pair_write(pair, variant->len, 1));
	EXPECT_EQ(0, pair->data[variant->len]);
}

/* Nothing of the owner's that lies around the region, and nothing in between. */
TEST_F(placement, no_key_reads_what_is_not_its_own)
{
	struct np_pair *pair = &self->pair;
	const struct rdma_np_region_info *info = &pair->info;
	size_t last = variant->len - 1;
	const struct {
		const char *name;
		uint64_t addr;
		uint32_t key;
	} beyond[] = {
		{ "behind the region", np_read_addr(info, variant->len), info->read_key },
		{ "before the region", np_read_addr(info, 0) - 1, info->read_key },
		{ "behind the words", np_word_addr(info, last) + 8, info->table_key },
		{ "before the words", np_word_addr(info, 0) - 1, info->table_key },
		{ "a word, with the read key", np_word_addr(info, 0), info->read_key },
		{ "the last word, with the read key", np_word_addr(info, last), info->read_key },
		{ "the region, with the table key", np_read_addr(info, 0), info->table_key },
		{ "its end, with the table key", np_read_addr(info, last), info->table_key },
	};
	uint64_t word;

	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, 1, 0, NULL));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, last, 1, 0, NULL));
	for (unsigned int i = 0; i < ARRAY_SIZE(beyond); i++) {
		EXPECT_EQ(0, np_pair_read(pair, 0, 1));
		EXPECT_EQ(0, np_pair_read(pair, last, 1));
		EXPECT_EQ(0, np_word(&pair->peer, info, 0, &word));
		EXPECT_EQ(0, np_word(&pair->peer, info, last, &word));
		pair->peer.buf[0] = 0xff;
		EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
			  np_read(&pair->peer, 0, 1, beyond[i].addr, beyond[i].key))
			TH_LOG("%s", beyond[i].name);
		EXPECT_EQ(0xff, pair->peer.buf[0]);
		ASSERT_EQ(0, np_reconnect(&pair->owner, &pair->peer));
		ASSERT_EQ(0, np_pair_resolve(pair));
	}
}

TEST_HARNESS_MAIN
