// SPDX-License-Identifier: GPL-2.0
/*
 * Memory keys: every right that must be there, one test per way to lack it,
 * with what both sides see of it; translations of all kinds; and what DMA
 * looks like to the bus.
 */
#include "driver.h"

using namespace nphca;
using namespace nphca::test;

namespace {

struct memory : pair_fixture {
	/* The request fails with @error; the other side's QP dies, with @event. */
	void refused(wc_error error, uint8_t event)
	{
		a.expect_error(a_cq, error);
		EXPECT_EQ(a.state(aq), 6u);
		EXPECT_EQ(b.state(bq), 6u);
		const auto events = b.events();
		if (!event) {
			EXPECT_TRUE(events.empty());
			return;
		}
		ASSERT_EQ(events.size(), 1u);
		EXPECT_EQ(events[0].type, event);
		EXPECT_EQ(events[0].number, bq.qpn);
	}
	void untouched()
	{
		EXPECT_TRUE(std::all_of(m.at(b_buf), m.at(b_buf) + size, [](uint8_t x) { return x == 0; }));
	}
	wr write(uint64_t va, uint32_t rkey, uint32_t len) { return wr(WQE_WRITE).remote(va, rkey).sge(a_buf, a_key, len); }
	wr read(uint64_t va, uint32_t rkey, uint32_t len) { return wr(WQE_READ).remote(va, rkey).sge(a_buf, a_key, len); }
	wr faa(uint64_t va, uint32_t rkey) { return wr(WQE_FAA).remote(va, rkey).atomic(1, 0).sge(a_buf, a_key, 8); }
};

TEST_F(memory, write_with_unknown_key_is_a_remote_access_error)
{
	m.fill(a_buf, 64, 1);
	a.post(aq, write(b_buf, b_key + 0x100, 64));
	refused(wc_error::remote_access, EV_QP_ACCESS);
	untouched();
	EXPECT_EQ(a.knob(NPHCA_ERR_REMOTE_ACCESS), 1u);
}

TEST_F(memory, key_with_another_variant_is_refused)
{
	a.post(aq, write(b_buf, b_key ^ 1, 64));
	refused(wc_error::remote_access, EV_QP_ACCESS);
	untouched();
}

TEST_F(memory, write_without_remote_write_right_is_refused)
{
	m.fill(a_buf, 64, 1);
	a.post(aq, write(b_buf, b.reg(b_buf, size, acc_all & ~acc_rw), 64));
	refused(wc_error::remote_access, EV_QP_ACCESS);
	untouched();
}

TEST_F(memory, read_without_remote_read_right_is_refused_and_brings_nothing)
{
	m.fill(b_buf, 64, 9);
	a.post(aq, read(b_buf, b.reg(b_buf, size, acc_all & ~acc_rr), 64));
	refused(wc_error::remote_access, EV_QP_ACCESS);
	EXPECT_EQ(*m.at(a_buf), 0);
}

TEST_F(memory, atomic_without_atomic_right_is_refused)
{
	a.post(aq, faa(b_buf, b.reg(b_buf, size, acc_all & ~acc_a)));
	refused(wc_error::remote_access, EV_QP_ACCESS);
	untouched();
}

TEST_F(memory, key_of_another_domain_is_refused)
{
	const uint32_t other = b.alloc_pd();
	m.fill(a_buf, 64, 1);
	a.post(aq, write(b_buf, b.reg(b_buf, size, acc_all, other), 64));
	refused(wc_error::remote_access, EV_QP_ACCESS);
	untouched();
}

TEST_F(memory, access_must_lie_inside_the_key)
{
	struct {
		int64_t offset;
		uint32_t len;
		bool good;
	} const cases[] = {
		{0, 4096, true}, {-1, 1, false}, {-1, 2, false}, {4095, 1, true}, {4096, 1, false},
		{0, 4097, false}, {1, 4096, false}, {4095, 2, false},
	};
	const uint64_t buf = b_buf + 8192;
	const uint32_t key = b.reg(buf, 4096, acc_all);
	for (const auto &c : cases) {
		a.post(aq, write(buf + static_cast<uint64_t>(c.offset), key, c.len));
		if (c.good) {
			a.expect(a_cq, CQE_REQ);
		} else {
			a.expect_error(a_cq, wc_error::remote_access);
			while (a.poll(a_cq))
				;
			connect({});
		}
	}
}

TEST_F(memory, wrapping_range_is_refused)
{
	a.post(aq, write(~0ull - 15, b_key, 64));
	refused(wc_error::remote_access, EV_QP_ACCESS);
}

TEST_F(memory, destroyed_key_is_refused)
{
	ASSERT_EQ(b.simple(OP_DESTROY_MKEY, b_key >> 8), 0);
	a.post(aq, read(b_buf, b_key, 64));
	refused(wc_error::remote_access, EV_QP_ACCESS);
}

TEST_F(memory, free_key_is_refused)
{
	const uint32_t key = b.create_key(MKEY_MTT, b_buf, 4096, acc_all, {b_buf, 0}, true);
	a.post(aq, write(b_buf, key, 64));
	refused(wc_error::remote_access, EV_QP_ACCESS);
	untouched();
}

TEST_F(memory, zero_length_needs_no_key)
{
	a.post(aq, wr(WQE_WRITE).remote(0, 0));
	a.expect(a_cq, CQE_REQ);
	a.post(aq, wr(WQE_READ).remote(0, 0));
	a.expect(a_cq, CQE_REQ);
}

TEST_F(memory, queue_pair_without_the_right_is_an_invalid_request)
{
	for (const int which : {0, 1, 2}) {
		qp_options r;
		r.read = which != 0;
		r.write = which != 1;
		r.atomic = which != 2;
		connect({}, r);
		b.events();
		a.post(aq, which == 0 ? read(b_buf, b_key, 64) : which == 1 ? write(b_buf, b_key, 64) : faa(b_buf, b_key));
		refused(wc_error::remote_invalid, EV_QP_INVALID_REQ);
		untouched();
	}
}

TEST_F(memory, misaligned_atomic_is_an_invalid_request)
{
	a.post(aq, faa(b_buf + 4, b_key));
	refused(wc_error::remote_invalid, EV_QP_INVALID_REQ);
}

TEST_F(memory, gather_from_a_bad_local_key_is_a_local_protection_error)
{
	const uint32_t other = a.alloc_pd();
	for (const uint32_t key : {a_key + 0x100, a.reg(a_buf, size, acc_all, other), a.reg(a_buf, 63, acc_all)}) {
		connect({});
		a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, key, 64));
		a.expect_error(a_cq, wc_error::local_protection);
		EXPECT_EQ(a.state(aq), 6u);
		EXPECT_EQ(b.state(bq), 3u) << "the other side has seen nothing";
		untouched();
	}
}

TEST_F(memory, read_into_a_key_without_local_write_is_a_local_protection_error)
{
	m.fill(b_buf, 64, 3);
	a.post(aq, wr(WQE_READ).remote(b_buf, b_key).sge(a_buf, a.reg(a_buf, size, acc_all & ~acc_lw), 64));
	a.expect_error(a_cq, wc_error::local_protection);
	EXPECT_EQ(*m.at(a_buf), 0);
}

TEST_F(memory, receive_with_a_bad_local_key_fails_on_both_sides)
{
	b.recv(bq, b_buf, b_key + 0x100, 64);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 64));
	a.expect_error(a_cq, wc_error::remote_op);
	b.expect_error(b_cq, wc_error::local_protection, true);
	untouched();
}

TEST_F(memory, receive_that_is_too_short_fails_on_both_sides)
{
	b.recv(bq, b_buf, b_key, 63);
	a.post(aq, wr(WQE_SEND).sge(a_buf, a_key, 64));
	a.expect_error(a_cq, wc_error::remote_invalid);
	b.expect_error(b_cq, wc_error::local_length, true);
}

TEST_F(memory, earlier_requests_complete_before_the_one_that_fails)
{
	m.fill(a_buf, 64, 5);
	a.post(aq, write(b_buf, b_key, 64), false);
	a.post(aq, read(b_buf, b_key, 100 * 1024), false);
	a.post(aq, wr(WQE_WRITE).remote(b_buf, b_key).sge(a_buf, 0x777700, 64), false);
	a.post(aq, write(b_buf, b_key, 64), false);
	a.post(aq, wr(WQE_SEND, false).sge(a_buf, a_key, 64));
	a.expect(a_cq, CQE_REQ);
	a.expect(a_cq, CQE_REQ);
	const uint16_t third = 2;
	EXPECT_EQ(a.expect_error(a_cq, wc_error::local_protection).counter, third);
	a.expect_error(a_cq, wc_error::flushed);
	a.expect_error(a_cq, wc_error::flushed); /* not signaled, and yet */
	EXPECT_FALSE(a.poll(a_cq));
}

/* What the IOMMU refuses */

TEST_F(memory, dma_fault_of_the_requester_is_a_local_operation_error_and_counted)
{
	const uint64_t before = a.knob(NPHCA_DMA_FAULTS);
	m.protect(a_buf, 0);
	a.post(aq, write(b_buf, b_key, 64));
	a.expect_error(a_cq, wc_error::local_qp_op);
	EXPECT_EQ(a.state(aq), 6u);
	EXPECT_EQ(a.knob(NPHCA_DMA_FAULTS), before + 1);
	untouched();
}

TEST_F(memory, dma_fault_of_the_responder_is_a_remote_operation_error_and_fatal_there)
{
	m.protect(b_buf, page_write);
	a.post(aq, read(b_buf, b_key, 64));
	refused(wc_error::remote_op, EV_QP_FATAL);
	EXPECT_EQ(b.knob(NPHCA_DMA_FAULTS), 1u);
	EXPECT_EQ(*m.at(a_buf), 0);
}

TEST_F(memory, write_to_a_page_that_is_read_only_below_faults)
{
	m.protect(b_buf + 4096, page_read);
	a.post(aq, write(b_buf + 4096, b_key, 64));
	refused(wc_error::remote_op, EV_QP_FATAL);
	untouched();
}

TEST_F(memory, dma_goes_in_aligned_requests_of_at_most_the_size_set)
{
	for (const uint64_t limit : {64, 512, 4096}) {
		ASSERT_TRUE(nphca_knob_set(a.dev, NPHCA_DMA_REQUEST_SIZE, limit));
		ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_DMA_REQUEST_SIZE, limit));
		m.requests.clear();
		m.record = true;
		a.post(aq, wr(WQE_READ).remote(b_buf + 37, b_key).sge(a_buf + 11, a_key, 20000));
		a.expect(a_cq, CQE_REQ);
		m.record = false;
		bool whole = false;
		for (const auto &r : m.requests) {
			EXPECT_LE(r.len, limit);
			EXPECT_EQ(r.iova / limit, (r.iova + r.len - 1) / limit);
			whole |= r.len == limit;
		}
		EXPECT_TRUE(limit > 1024 || whole) << "packets have 1024 bytes";
	}
}

TEST_F(memory, delay_between_requests_takes_time)
{
	ASSERT_TRUE(nphca_knob_set(b.dev, NPHCA_DMA_DELAY_NS, 1000));
	const uint64_t start = m.now, done = b.knob(NPHCA_DMA_REQUESTS);
	a.post(aq, read(b_buf, b_key, 4096));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(m.now - start, 1000 * (b.knob(NPHCA_DMA_REQUESTS) - done));
	EXPECT_GE(m.now - start, 8000u);
}

/* Translations */

struct page_sizes : memory, ::testing::WithParamInterface<uint32_t> {};

TEST_P(page_sizes, address_and_start_need_not_be_aligned)
{
	const uint32_t log = GetParam();
	const uint64_t ps = 1ull << log;
	if (3 * ps + ps > (24u << 20))
		GTEST_SKIP() << "pages larger than the test machine's memory";
	const uint64_t base = m.alloc(3 * ps, ps);
	/* Pages in reverse order, and a start that is somewhere in the first. */
	const uint64_t start = (7ull << 40) + ps / 2 + 5;
	const uint32_t key = b.create_key(MKEY_MTT, start, 2 * ps, acc_all, {base + 2 * ps, base + ps, base, 0}, false, log);
	const uint32_t len = static_cast<uint32_t>(std::min<uint64_t>(2 * ps, size));
	m.fill(a_buf, len, 77);
	const uint64_t at = start + 2 * ps - len;
	a.post(aq, write(at, key, len));
	a.expect(a_cq, CQE_REQ);
	for (uint32_t i = 0; i < len; ++i) {
		const uint64_t off = ps / 2 + 5 + (at - start) + i;
		const uint64_t where = base + (2 - off / ps) * ps + off % ps;
		ASSERT_EQ(*m.at(where), *m.at(a_buf + i)) << i;
	}
}

INSTANTIATE_TEST_SUITE_P(memory, page_sizes, ::testing::Values(12, 13, 16, 17, 21, 22));

TEST_F(memory, indirect_key_reaches_the_keys_behind_it)
{
	const uint64_t one = b_buf, two = b_buf + 65536;
	const uint32_t k1 = b.reg(one, 4096, acc_all), k2 = b.reg(two, 4096, acc_all);
	const std::vector<uint64_t> klm = {100ull << 32 | k1, one + 7, 200ull << 32 | k2, two + 9};
	const uint32_t key = b.create_key(MKEY_KLM, 0x5000, 300, acc_all, klm);
	m.fill(a_buf, 300, 2);
	a.post(aq, write(0x5000, key, 300));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(std::memcmp(m.at(one + 7), m.at(a_buf), 100), 0);
	EXPECT_EQ(std::memcmp(m.at(two + 9), m.at(a_buf + 100), 200), 0);
	/* A key behind it that has gone is found out. */
	ASSERT_EQ(b.simple(OP_DESTROY_MKEY, k2 >> 8), 0);
	a.post(aq, write(0x5000, key, 300));
	refused(wc_error::remote_access, EV_QP_ACCESS);
}

TEST_F(memory, key_that_points_to_itself_is_refused)
{
	const uint32_t next = (b.create_key(MKEY_KLM, 0, 64, acc_all, {}) >> 8) + 1;
	const uint32_t self = next << 8 | 0x5a;
	ASSERT_EQ(b.create_key(MKEY_KLM, 0, 64, acc_all, {64ull << 32 | self, 0}), self);
	a.post(aq, write(0, self, 64));
	refused(wc_error::remote_access, EV_QP_ACCESS);
}

/* Work requests that change keys */

struct umr_test : memory {
	qp_t uq;
	void SetUp() override
	{
		qp_options o;
		o.st = ST_REG_UMR;
		uq = b.create_qp(b_cq, b_cq, o);
		b.up(uq, o);
	}
	wr umr(uint32_t key, uint8_t flags, uint64_t mask, const std::vector<uint64_t> &words, uint64_t offset = 0)
	{
		wr w(WQE_UMR, true, key);
		w.raw.resize(128 + ((words.size() * 8 + 63) & ~size_t{63}));
		w.raw[16] = static_cast<uint8_t>(flags | UMR_INLINE | (offset ? UMR_OFFSET : 0));
		store16(&w.raw[20], static_cast<uint16_t>((words.size() + 1) / 2));
		store16(&w.raw[22], static_cast<uint16_t>(offset));
		store64(&w.raw[24], mask);
		for (size_t i = 0; i < words.size(); ++i)
			store64(&w.raw[128 + 8 * i], words[i]);
		return w;
	}
	static constexpr uint64_t all = UMR_MASK_LEN | UMR_MASK_PAGE_SIZE | UMR_MASK_START | UMR_MASK_PD | UMR_MASK_KEY |
					UMR_MASK_QPN | UMR_MASK_LR | UMR_MASK_LW | UMR_MASK_RR | UMR_MASK_RW | UMR_MASK_A |
					UMR_MASK_FREE;
	void context(wr &w, uint64_t start, uint64_t len)
	{
		const bytes c = part(bytes(w.raw), 64, mkc_size);
		set(c, mkc_lr, 1);
		set(c, mkc_lw, 1);
		set(c, mkc_rr, 1);
		set(c, mkc_rw, 1);
		set(c, mkc_qpn, 0xffffff);
		set(c, mkc_mkey_7_0, 0x5a);
		set(c, mkc_pd, b.pd);
		set(c, mkc_start_addr, start);
		set(c, mkc_len, len);
		set(c, mkc_log_page_size, 12);
	}
};

TEST_F(umr_test, free_key_becomes_usable_and_free_again)
{
	const uint32_t key = b.create_key(MKEY_MTT, 0, 0, 0, {}, true, 12, 8);
	wr enable = umr(key, UMR_IF_FREE, all, {b_buf | 3, (b_buf + 4096) | 3, 0, 0});
	context(enable, b_buf, 8192);
	b.post(uq, enable);
	b.expect(b_cq, CQE_REQ);
	m.fill(a_buf, 8192, 4);
	a.post(aq, write(b_buf, key, 8192));
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(m.filled(b_buf, 8192, 4));

	wr revoke = umr(key, 0, UMR_MASK_FREE, {});
	set(part(bytes(revoke.raw), 64), mkc_free, 1);
	b.post(uq, revoke);
	b.expect(b_cq, CQE_REQ);
	a.post(aq, write(b_buf, key, 64));
	a.expect_error(a_cq, wc_error::remote_access);
}

TEST_F(umr_test, condition_that_does_not_hold_fails_the_request)
{
	wr w = umr(b_key, UMR_IF_FREE, UMR_MASK_FREE, {});
	b.post(uq, w);
	b.expect_error(b_cq, wc_error::mw_bind);
	EXPECT_EQ(b.state(uq), 6u);
}

TEST_F(umr_test, translations_beyond_what_was_reserved_are_refused)
{
	const uint32_t key = b.create_key(MKEY_MTT, 0, 0, 0, {}, true, 12, 4);
	wr w = umr(key, 0, 0, std::vector<uint64_t>(8, b_buf), 4);
	b.post(uq, w);
	b.expect_error(b_cq, wc_error::mw_bind);
}

TEST_F(umr_test, offset_replaces_a_part_of_the_translations)
{
	const uint32_t key = b.create_key(MKEY_MTT, 0x10000, 4 * 4096, acc_all, {b_buf, b_buf + 4096, b_buf + 8192, b_buf + 12288},
					  false, 12, 4);
	b.post(uq, umr(key, 0, 0, {b_buf + 65536, b_buf + 69632}, 1));
	b.expect(b_cq, CQE_REQ);
	m.fill(a_buf, 16384, 6);
	a.post(aq, write(0x10000, key, 16384));
	a.expect(a_cq, CQE_REQ);
	EXPECT_TRUE(m.filled(b_buf, 8192, 6));
	EXPECT_EQ(std::memcmp(m.at(b_buf + 65536), m.at(a_buf + 8192), 8192), 0);
}

TEST_F(umr_test, user_queue_cannot_move_a_key_to_another_domain)
{
	wr w = umr(b_key, 0, UMR_MASK_PD, {});
	b.post(bq, w);
	b.expect_error(b_cq, wc_error::mw_bind);
}

TEST_F(umr_test, user_queue_cannot_change_a_key_of_another_domain)
{
	const uint32_t key = b.reg(b_buf, 4096, acc_all, b.alloc_pd());
	b.post(bq, umr(key, 0, UMR_MASK_FREE, {}));
	b.expect_error(b_cq, wc_error::mw_bind);
}

TEST_F(memory, send_with_invalidate_frees_the_key)
{
	const uint32_t key = b.reg(b_buf, 4096, acc_all);
	b.recv(bq, b_buf, b_key, 64);
	a.post(aq, wr(WQE_SEND_INVAL, true, key).sge(a_buf, a_key, 16));
	a.expect(a_cq, CQE_REQ);
	EXPECT_EQ(b.expect(b_cq, CQE_RESP_SEND_INV).imm, key);
	a.post(aq, write(b_buf, key, 64));
	refused(wc_error::remote_access, EV_QP_ACCESS);
}

TEST_F(memory, invalidating_a_key_of_another_domain_is_refused)
{
	const uint32_t key = b.reg(b_buf, 4096, acc_all, b.alloc_pd());
	b.recv(bq, b_buf, b_key, 64);
	a.post(aq, wr(WQE_SEND_INVAL, true, key).sge(a_buf, a_key, 16));
	a.expect_error(a_cq, wc_error::remote_access);
}

} // namespace
