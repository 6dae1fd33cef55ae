// SPDX-License-Identifier: GPL-2.0
/*
 * Memory keys: rights, translation, and work requests that change them.
 *
 * Nothing here is cached beyond the key itself: each access walks the key's
 * translation and asks the host for every request, so that the IOMMU below has
 * its say on every one of them.
 */
#include "mkey.h"

#include <algorithm>

#include "device.h"
#include "qp.h"

namespace nphca {

/* Of all keys of a function together: enough for 256 GiB in 4 KiB pages. */
static constexpr size_t max_xlt_words = 64u << 20;

void mkey::decode() noexcept
{
	const_bytes c = context;

	free = get(c, mkc_free);
	umr_enabled = get(c, mkc_umr_en);
	remote_invalidate = get(c, mkc_en_rinval);
	any_length = get(c, mkc_length64);
	rights = static_cast<uint8_t>((get(c, mkc_lr) ? LOCAL_READ : 0) | (get(c, mkc_lw) ? LOCAL_WRITE : 0) |
				      (get(c, mkc_rr) ? REMOTE_READ : 0) | (get(c, mkc_rw) ? REMOTE_WRITE : 0) |
				      (get(c, mkc_a) ? REMOTE_ATOMIC : 0));
	mode = static_cast<uint8_t>(get(c, mkc_access_mode_4_2) << 2 | get(c, mkc_access_mode_1_0));
	log_page_size = static_cast<uint8_t>(get(c, mkc_log_page_size));
	variant = static_cast<uint8_t>(get(c, mkc_mkey_7_0));
	pd = get32(c, mkc_pd);
	qpn = get32(c, mkc_qpn);
	start = get(c, mkc_start_addr);
	length = get(c, mkc_len);
	/* In words; requests that fill it come in multiples of 64 bytes. */
	xlt_capacity = (size_t{2} * get32(c, mkc_translations_octword_size) + 7) & ~size_t{7};
}

mkey *device::find_mkey(uint32_t key) noexcept
{
	mkey *m = mkeys.find(key >> 8);
	return m && m->variant == (key & 0xff) ? m : nullptr;
}

mem_result device::check_key(uint32_t key, uint64_t va, uint64_t len, uint8_t need, const accessor &who,
			     const mkey **found) noexcept
{
	const mkey *m = find_mkey(key);

	*found = m;
	if (!m || m->free || (m->rights & need) != need)
		return mem_result::protection;
	if (m->pd != who.pd && !who.privileged)
		return mem_result::protection;
	if (m->qpn != 0xffffff && m->qpn != who.qpn)
		return mem_result::protection;
	if (m->any_length)
		return va + len < va ? mem_result::protection : mem_result::ok;
	if (va < m->start || len > m->length || va - m->start > m->length - len)
		return mem_result::protection;
	return mem_result::ok;
}

mem_result device::access(uint32_t key, uint64_t va, uint8_t *buf, uint64_t len, bool write, uint8_t need,
			  const accessor &who) noexcept
{
	const mkey *m;

	if (!len)
		return mem_result::ok;
	if (check_key(key, va, len, need, who, &m) != mem_result::ok)
		return mem_result::protection;
	return copy(*m, va, buf, len, write, 0);
}

/* Move bytes of [va, va+len), which lies inside @m. */
mem_result device::copy(const mkey &m, uint64_t va, uint8_t *buf, uint64_t len, bool write, int depth) noexcept
{
	constexpr int max_indirection = 4;
	auto dma = [&](uint64_t iova, uint64_t n) {
		return write ? dma_write(iova, buf, n) : dma_read(iova, buf, n);
	};

	if (m.mode == MKEY_PA)
		return dma(va, len) ? mem_result::ok : mem_result::dma_fault;

	if (m.log_page_size < 6 && m.mode != MKEY_KLM)
		return mem_result::protection;
	const uint64_t page = 1ull << m.log_page_size;
	/* The translation starts where the page of the first byte does. */
	uint64_t at = va - m.start;
	if (m.mode == MKEY_MTT)
		at += m.start & (page - 1);

	/* A list of byte counts is walked once, as the access proceeds. */
	size_t entry = 0;
	uint64_t in_entry = at;

	while (len) {
		uint64_t n, target;
		if (m.mode == MKEY_MTT) {
			const uint64_t index = at >> m.log_page_size, in_page = at & (page - 1);
			if (index >= m.xlt.size())
				return mem_result::protection;
			n = std::min(len, page - in_page);
			target = (m.xlt[index] & ~7ull) + in_page;
			if (!dma(target, n))
				return mem_result::dma_fault;
		} else {
			uint64_t size = page;
			if (m.mode == MKEY_KSM) {
				entry = at >> m.log_page_size;
				in_entry = at & (page - 1);
			} else if (m.mode == MKEY_KLM) {
				for (; 2 * entry + 1 < m.xlt.size(); ++entry) {
					size = m.xlt[2 * entry] >> 32;
					if (in_entry < size)
						break;
					in_entry -= size;
				}
			} else {
				return mem_result::protection;
			}
			if (2 * entry + 1 >= m.xlt.size() || depth >= max_indirection)
				return mem_result::protection;
			const mkey *sub = find_mkey(static_cast<uint32_t>(m.xlt[2 * entry]));
			n = std::min(len, size - in_entry);
			target = m.xlt[2 * entry + 1] + in_entry;
			const uint8_t need = write ? LOCAL_WRITE : LOCAL_READ;
			if (!sub || sub == &m || sub->free || sub->pd != m.pd || !(sub->rights & need))
				return mem_result::protection;
			if (!sub->any_length && (target < sub->start || n > sub->length ||
						 target - sub->start > sub->length - n))
				return mem_result::protection;
			const mem_result r = copy(*sub, target, buf, n, write, depth + 1);
			if (r != mem_result::ok)
				return r;
		}
		at += n;
		in_entry += n;
		buf += n;
		len -= n;
	}
	return mem_result::ok;
}

/* Layout of the request: control 16, UMR control 48, mkey context 64, then translations or a data segment. */
wc_error device::umr(const qp &q, const_bytes wqe) noexcept
{
	constexpr size_t at_flags = 16, at_octowords = 20, at_offset = 22, at_mask = 24, at_offset_high = 32, at_mkey = 64,
			 at_data = 128;

	if (wqe.size() < at_data)
		return wc_error::local_qp_op;
	const uint8_t flags = wqe[at_flags];
	const uint64_t mask = load64(&wqe[at_mask]);
	const size_t words = size_t{2} * load16(&wqe[at_octowords]);
	size_t first = 0;
	if (flags & UMR_OFFSET)
		first = 2 * (size_t{load32(&wqe[at_offset_high])} << 16 | load16(&wqe[at_offset]));

	/* The variant of the key may be about to change: look up by index. */
	mkey *m = mkeys.find(load32(&wqe[12]) >> 8);
	if (!m || !m->umr_enabled || (q.st != ST_REG_UMR && m->pd != q.pd))
		return wc_error::mw_bind;
	if (q.st != ST_REG_UMR && mask & UMR_MASK_PD)
		return wc_error::mw_bind;
	if ((flags & UMR_IF_FREE && !m->free) || (flags & UMR_IF_NOT_FREE && m->free))
		return wc_error::mw_bind;

	if (words) {
		const uint8_t *xlt = nullptr;
		std::vector<uint8_t> fetched;
		size_t have = words;

		if (first > m->xlt_capacity || words > m->xlt_capacity - first)
			return wc_error::mw_bind;
		if (flags & UMR_INLINE) {
			if (wqe.size() - at_data < words * 8)
				return wc_error::local_qp_op;
			xlt = &wqe[at_data];
		} else {
			if (wqe.size() < at_data + 16)
				return wc_error::local_qp_op;
			const uint32_t len = load32(&wqe[at_data]) & ~seg_inline;
			have = std::min<size_t>(words, len / 8);
			try {
				fetched.resize(have * 8);
			} catch (const std::bad_alloc &) {
				return wc_error::local_qp_op;
			}
			switch (access(load32(&wqe[at_data + 4]), load64(&wqe[at_data + 8]), fetched.data(), have * 8, false,
				       LOCAL_READ, q.self())) {
			case mem_result::ok:
				break;
			case mem_result::protection:
				return wc_error::local_protection;
			case mem_result::dma_fault:
				return wc_error::local_qp_op;
			}
			xlt = fetched.data();
		}
		if (first + have > m->xlt.size()) {
			const size_t more = first + have - m->xlt.size();
			if (more > max_xlt_words - xlt_words)
				return wc_error::local_qp_op;
			try {
				m->xlt.resize(first + have);
			} catch (const std::bad_alloc &) {
				return wc_error::local_qp_op;
			}
			xlt_words += more;
		}
		for (size_t i = 0; i < have; ++i)
			m->xlt[first + i] = load64(xlt + 8 * i);
	}

	const const_bytes seg = wqe.subspan(at_mkey, mkc_size);
	const struct {
		uint64_t bit;
		field f;
	} fields[] = {
		{UMR_MASK_LEN, mkc_len},	  {UMR_MASK_LEN, mkc_length64}, {UMR_MASK_PAGE_SIZE, mkc_log_page_size},
		{UMR_MASK_START, mkc_start_addr}, {UMR_MASK_PD, mkc_pd},	{UMR_MASK_RINVAL, mkc_en_rinval},
		{UMR_MASK_KEY, mkc_mkey_7_0},	  {UMR_MASK_QPN, mkc_qpn},	{UMR_MASK_LR, mkc_lr},
		{UMR_MASK_LW, mkc_lw},		  {UMR_MASK_RR, mkc_rr},	{UMR_MASK_RW, mkc_rw},
		{UMR_MASK_A, mkc_a},		  {UMR_MASK_FREE, mkc_free},
	};
	for (const auto &f : fields)
		if (mask & f.bit)
			set(m->context, f.f, get(seg, f.f));
	m->decode();
	return wc_error::none;
}

cmd_status device::cmd_mkey(uint16_t op, const_bytes in, bytes out)
{
	const uint32_t number = get32(in, cmd_object);

	if (op == OP_CREATE_MKEY) {
		auto m = std::make_unique<mkey>();
		const const_bytes ctx = part(in, cmd_in_ctx, mkc_size);
		if (ctx.size() != mkc_size)
			return cmd_status::bad_in_len;
		std::copy(ctx.begin(), ctx.end(), m->context.begin());
		m->decode();
		if (m->mode > MKEY_KSM || m->log_page_size > 47)
			return cmd_status::bad_param;
		if (m->pd && !pds.find(m->pd))
			return cmd_status::bad_resource;
		/* Translations may come along. */
		const const_bytes xlt = part(in, cmd_in_pas);
		const size_t words = std::min(size_t{2} * get32(in, create_mkey_in_translations_octword_actual_size), xlt.size() / 8);
		if (words > m->xlt_capacity || words > max_xlt_words - xlt_words)
			return cmd_status::bad_param;
		m->xlt.resize(words);
		for (size_t i = 0; i < words; ++i)
			m->xlt[i] = load64(xlt.data() + 8 * i);
		const cmd_status status = enlist(mkeys, std::move(m), &mkey::index, out);
		if (status == cmd_status::ok)
			xlt_words += words;
		return status;
	}

	mkey *m = mkeys.find(number);
	if (!m)
		return cmd_status::bad_resource;
	if (op == OP_DESTROY_MKEY) {
		qps.each([number](qp &q) { q.trail_reads(number); });
		xlt_words -= m->xlt.size();
		mkeys.remove(number);
		return cmd_status::ok;
	}
	const bytes ctx = part(out, cmd_in_ctx, mkc_size);
	std::copy_n(m->context.begin(), ctx.size(), ctx.begin());
	return cmd_status::ok;
}

} // namespace nphca
