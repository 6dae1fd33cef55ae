// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of holds: what is pinned, for how long, and what a held page is
 * for others.
 */
#include <kunit/test.h>
#include <linux/mman.h>
#include <linux/pagemap.h>

#include "np_region_fixture.h"

static void np_hold_pins_what_is_mapped(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	struct np_stats stats;
	struct page *page;

	hold = np_test_hold(test, region, 0, 2, RDMA_NP_FAULT_WRITE);
	page = np_page_at(test, t->va);
	KUNIT_EXPECT_TRUE(test, folio_maybe_dma_pinned(page_folio(page)));
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), page_to_phys(page));
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), NP_WORD_RIGHTS);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 2);
	KUNIT_EXPECT_EQ(test, stats.holds, 1);
	np_hold_release(hold);
	KUNIT_EXPECT_FALSE(test, folio_maybe_dma_pinned(page_folio(page)));
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 0);
	np_test_settled(test);
}

/* While it is pinned, devices write to it, and somebody may clean it meanwhile. */
static void np_page_held_for_write_is_dirty_afterwards(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct folio *folio;
	struct np_hold *hold;

	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	folio = page_folio(np_page_at(test, t->va));
	folio_clear_dirty(folio);
	np_hold_release(hold);
	KUNIT_EXPECT_TRUE(test, folio_test_dirty(folio));

	/* Also if it is the region that ends first */
	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	folio_clear_dirty(folio);
	np_region_close(region);
	KUNIT_EXPECT_TRUE(test, folio_test_dirty(folio));
	np_hold_release(hold);
}

static void np_held_leaf_outlives_the_mapping(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	phys_addr_t paddr;

	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	paddr = np_write_paddr(region, 0);
	np_test_unmap(t, 0, 4);
	/* Nobody can prove a WRITE by the word, but who holds the page still has it */
	KUNIT_EXPECT_EQ(test, np_word(region, 0), 2 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 2);
	np_test_settled(test);
}

static void np_stale_page_is_refreshed_if_it_is_the_same(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	phys_addr_t paddr;

	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	paddr = np_write_paddr(region, 0);
	/* As after a failed migration: invalidated, but the page stays */
	np_test_invalidate(t, 0, 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	np_hold_release(hold);
	/* The leaf in the write window was not refreshed */
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	np_test_settled(test);
}

static void np_held_page_is_protected_for_all_but_its_holder(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	phys_addr_t paddr;

	hold = np_test_hold(test, region, 0, 2, RDMA_NP_FAULT_WRITE);
	paddr = np_write_paddr(region, 0);
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 0, 2);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	/* It is the same page, so it may be written again */
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	/* Its neighbour's leaf was kept for the hold only */
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 1),
			region->write.absent + PAGE_SIZE);
	np_test_settled(test);
}

/* Who reads a file's page relies on nothing that whoever writes it may do */
static void np_hold_for_reading_is_no_leave_to_write(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *reader, *writer;
	phys_addr_t paddr;

	reader = np_test_hold(test, region, 0, 1, 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	paddr = np_write_paddr(region, 0);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	/* It is cleaned */
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 0, 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);

	/* As long as somebody holds it for writing, too, and no longer */
	writer = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 0, 1);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	np_hold_release(writer);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);

	/* It goes */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	np_test_unmap(t, 0, 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	np_hold_release(reader);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	np_test_settled(test);
}

static void np_fault_waits_for_holds_of_another_page(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	struct np_stats stats;
	phys_addr_t paddr;

	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	paddr = np_write_paddr(region, 0);
	KUNIT_ASSERT_EQ(test, t->va, vm_mmap(NULL, t->va, PAGE_SIZE,
					     PROT_READ | PROT_WRITE, MAP_FIXED |
					     MAP_ANONYMOUS | MAP_PRIVATE, 0));
	np_touch(test, t->va, 1);
	np_touch(test, t->va + PAGE_SIZE, 1);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), -EAGAIN);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	/* It sleeps: 1 s in steps that grow to 8 ms, whatever the machine */
	np_region_stats(region, &stats);
	KUNIT_EXPECT_LT(test, stats.retries, 200);
	/* Who comes along with its neighbour does not wait for it, nor does the neighbour */
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 2, NP_FAULT_PRESENT |
					    NP_FAULT_AROUND), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), RDMA_NP_WORD_READABLE);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0),
			page_to_phys(np_page_at(test, t->va)));
	np_test_settled(test);
}

static void np_page_stays_until_its_last_hold(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *a, *b;
	phys_addr_t paddr;

	a = np_test_hold(test, region, 0, 2, RDMA_NP_FAULT_WRITE);
	b = np_test_hold(test, region, 0, 1, 0);
	paddr = np_read_paddr(region, 0);
	np_test_unmap(t, 0, 4);
	np_hold_release(a);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 1),
			region->read.absent + PAGE_SIZE);
	np_hold_release(b);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	np_test_settled(test);
}

/* Reclaim asks while it is held, and for nothing; then it can take the page */
static void np_page_is_in_use_as_long_as_it_is_held(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	DECLARE_BITMAP(pages, NP_SLOT_PAGES) = {};
	struct np_hold *hold;

	hold = np_test_hold(test, region, 1, 1, 0);
	KUNIT_EXPECT_TRUE(test, np_test_ask(region, 1, true));
	/* What the worker does now, or has done */
	__set_bit(((region->start >> PAGE_SHIFT) + 1) % NP_SLOT_PAGES, pages);
	np_region_age(region, ALIGN_DOWN(region->start, NP_SLOT_SIZE), pages);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_TRUE(test, np_test_ask(region, 1, false));
	np_hold_release(hold);
	np_test_age(test, region, 1);
	np_test_settled(test);
}

/* A count that began anew would give the page away under those that it has forgotten */
static void np_page_has_as_many_holds_as_can_be_counted(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold, *more;
	phys_addr_t paddr;
	u16 *count;

	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	paddr = np_write_paddr(region, 0);
	count = &np_test_slot(region, t->va)->holds->count[0];
	*count = U16_MAX;
	more = np_hold_alloc(region, RDMA_NP_FAULT_WRITE, NULL);
	KUNIT_ASSERT_NOT_NULL(test, more);
	/* It is resident, so there is nothing else to do for it */
	KUNIT_EXPECT_EQ(test, np_region_fault(region, region->base, PAGE_SIZE, 0,
					      more, NULL, 0), -EAGAIN);
	KUNIT_EXPECT_EQ(test, *count, U16_MAX);
	KUNIT_EXPECT_EQ(test, np_hold_pages(more), 0);
	/* Who needs no hold needs no count */
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_invalidate(t, 0, 1);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	*count = 1;
	np_hold_release(more);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	np_test_settled(test);
}

static void np_end_of_region_ends_holds(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	struct page *page;

	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	page = np_page_at(test, t->va);
	np_region_close(region);
	KUNIT_EXPECT_FALSE(test, folio_maybe_dma_pinned(page_folio(page)));
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	np_test_settled(test);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), -ENXIO);
	KUNIT_EXPECT_EQ(test, np_region_fault(region, region->base, PAGE_SIZE, 0,
					      hold, NULL, 0), -ENXIO);
	KUNIT_EXPECT_FALSE(test, folio_maybe_dma_pinned(page_folio(page)));
	np_hold_release(hold);
	t->region = NULL;
	np_region_put(region);
}

/*
 * Who is about to release a hold has its pins already, and takes his time: the owner
 * does not wait for him.
 */
static void np_end_of_region_overtakes_a_release(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	LIST_HEAD(pins);

	hold = np_test_hold(test, region, 0, 2, RDMA_NP_FAULT_WRITE);
	np_test_invalidate(t, 1, 1);
	/* The first half of np_hold_release() */
	KUNIT_ASSERT_TRUE(test, np_region_enter(region));
	list_splice_init(&hold->pins, &pins);
	np_region_close(region);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 1),
			region->write.absent + PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_FALSE(test, xa_empty(&region->chunks));
	/* The second half */
	list_splice(&pins, &hold->pins);
	np_hold_release(hold);
	np_region_leave(region);
	KUNIT_EXPECT_TRUE(test, xa_empty(&region->chunks));
	np_test_settled(test);
	t->region = NULL;
	np_region_put(region);
}

static void np_test_peer_failed(struct np_fake_peer *fake)
{
	struct np_test_peer *t = container_of(fake, struct np_test_peer, fake);

	t->held = atomic64_read(&t->region->count->held) &&
		  folio_maybe_dma_pinned(page_folio(t->page));
}

/* What a peer may reach by a hold stays until it cannot reach anything. */
static void np_hold_that_expires_ends_its_qp_and_then_the_pin(struct kunit *test)
{
	unsigned int hold_ms = np_hold_ms;
	const struct np_msg *answer;
	struct np_region *region;
	struct np_test_peer *t;
	struct np_peer *peer;
	struct np_msg msg;

	region = np_test_region(test, 4);
	np_touch(test, ((struct np_test *)test->priv)->va, 1);
	t = np_test_peer(test, &((struct np_test *)test->priv)->pd);
	t->region = region;
	t->page = np_page_at(test, ((struct np_test *)test->priv)->va);
	t->fake.failed = np_test_peer_failed;
	peer = &t->fake.peer;
	np_test_grant(test, t, region);

	np_hold_ms = 1;
	msg = np_test_fault_msg(region, np_region_id(region),
				RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_WRITE);
	answer = np_test_asks(test, t, &msg, 0);
	KUNIT_EXPECT_EQ(test, answer->status, RDMA_NP_OK);
	KUNIT_EXPECT_NE(test, answer->faulted.hold_id, 0);
	KUNIT_EXPECT_NE(test, 0, wait_for_completion_timeout(&peer->gone,
							     30 * HZ));
	np_hold_ms = hold_ms;
	KUNIT_EXPECT_TRUE(test, t->held);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count->held), 0);
	KUNIT_EXPECT_FALSE(test, folio_maybe_dma_pinned(page_folio(t->page)));
}

static struct kunit_case np_hold_cases[] = {
	KUNIT_CASE(np_hold_pins_what_is_mapped),
	KUNIT_CASE(np_page_held_for_write_is_dirty_afterwards),
	KUNIT_CASE(np_hold_that_expires_ends_its_qp_and_then_the_pin),
	KUNIT_CASE(np_held_leaf_outlives_the_mapping),
	KUNIT_CASE(np_stale_page_is_refreshed_if_it_is_the_same),
	KUNIT_CASE(np_held_page_is_protected_for_all_but_its_holder),
	KUNIT_CASE(np_hold_for_reading_is_no_leave_to_write),
	KUNIT_CASE(np_fault_waits_for_holds_of_another_page),
	KUNIT_CASE(np_page_stays_until_its_last_hold),
	KUNIT_CASE(np_page_is_in_use_as_long_as_it_is_held),
	KUNIT_CASE(np_page_has_as_many_holds_as_can_be_counted),
	KUNIT_CASE(np_end_of_region_ends_holds),
	KUNIT_CASE(np_end_of_region_overtakes_a_release),
	{}
};

static struct kunit_suite np_hold_suite = {
	.name = "nprdma_region_hold",
	.init = np_test_init,
	.test_cases = np_hold_cases,
};

kunit_test_suite(np_hold_suite);
