// SPDX-License-Identifier: GPL-2.0
/*
 * Registers, DMA, knobs and the port of one function.
 */
#include "device.h"

#include <algorithm>
#include <cstdio>

#include "administrator.h"

namespace nphca {

device::device(fabric &f, uint16_t l, const nphca_config &config, const nphca_host_ops &ops, void *host)
	: fab(f), lid(l), guid(config.guid ? config.guid : guid_of_lid(l)),
	  ethernet(config.ethernet), posted(ops_, host), ops_(ops), host_(host), seed_(config.seed)
{
	start_numbers();
	knob_set(NPHCA_DMA_REQUEST_SIZE, 512);
}

device::~device()
{
	posted.commit_all(); /* while it has a host */
}

void device::log(int level, const char *format, ...) noexcept
{
	char text[256];
	va_list args;

	va_start(args, format);
	std::vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	if (ops_.log)
		ops_.log(host_, level, text);
}

uint64_t device::knob_get(uint32_t k) const noexcept
{
	return k < NPHCA_KNOBS ? knobs_[k].load(std::memory_order_relaxed) : 0;
}

bool device::knob_set(uint32_t k, uint64_t value) noexcept
{
	switch (k) {
	case NPHCA_DMA_REQUEST_SIZE:
		if (value < 64 || value > 4096 || value & (value - 1))
			return false;
		break;
	case NPHCA_DMA_DELAY_NS:
	case NPHCA_POSTED_WRITES:
		if (value > 1000000000)
			return false;
		break;
	case NPHCA_OUT_OF_ORDER:
		if (value > 10000000)
			return false;
		break;
	case NPHCA_LOSS:
		break;
	case NPHCA_READ_OVERLAP:
	case NPHCA_ACK_BEFORE_PLACEMENT:
	case NPHCA_CUT_FROM_START:
	case NPHCA_RANDOM_FETCH:
	case NPHCA_TRAILING_DMA:
	case NPHCA_READ_PASSES_WRITE:
	case NPHCA_NO_DRAIN:
	case NPHCA_SPLIT_UNITS:
	case NPHCA_IGNORE_INVALIDATIONS:
		if (value > 1)
			return false;
		break;
	default:
		if (k < NPHCA_COUNTERS || k >= NPHCA_KNOBS || value)
			return false;
	}
	/* Relaxed: each is read by itself, at the next request. */
	knobs_[k].store(value, std::memory_order_relaxed);
	return true;
}

uint64_t device::random() noexcept
{
	random_ ^= random_ << 13;
	random_ ^= random_ >> 7;
	random_ ^= random_ << 17;
	return random_;
}

/* Translated now, stored later; false if that cannot be. */
bool device::post_write(uint64_t iova, const void *buf, size_t len) noexcept
{
	const uint64_t latest = knob(NPHCA_POSTED_WRITES);

	if (!latest || !ops_.dma_target)
		return false;
	void *target = ops_.dma_target(host_, iova, len);
	if (!target)
		return false;
	if (posted.post(target, buf, len, fab.now() + random() % latest)) {
		count(NPHCA_POSTED);
		return true;
	}
	posted.commit_all();
	ops_.dma_commit(host_, target, buf, len);
	return true;
}

/* One DMA request, from its translation to its end. */
template <class P>
bool device::request(int (*op)(void *host, uint64_t iova, P *buf, size_t len), uint64_t iova, P *buf, size_t len) noexcept
{
	constexpr bool is_write = std::is_const_v<P>;
	bool ok = true;

	count(NPHCA_DMA_REQUESTS);
	if (!is_write && posted.any() && !knob(NPHCA_READ_PASSES_WRITE))
		posted.commit_all();
	fab.begin_dma();
	if (!is_write || !post_write(iova, buf, len)) {
		if (is_write)
			posted.commit_all();
		ok = !op(host_, iova, buf, len);
	}
	fab.end_dma();
	if (!ok)
		count(NPHCA_DMA_FAULTS);
	return ok;
}

/*
 * The length of the next request. None crosses 4 KiB, as PCI Express has it. By default
 * none crosses a multiple of the size either; a requester that cuts from where it begins
 * makes the first one as long as the others.
 */
size_t device::cut(uint64_t iova, size_t len, bool *split) noexcept
{
	constexpr size_t page = 4096, word = 8, unit = 64;
	const size_t size = knob(NPHCA_DMA_REQUEST_SIZE);
	const size_t most = knob(NPHCA_CUT_FROM_START) ? std::min(size, page - (iova & (page - 1))) : size - (iova & (size - 1));
	size_t n = std::min(len, most);

	if (!knob(NPHCA_SPLIT_UNITS) || n <= word)
		return n;
	/* Every other request ends inside a unit; a word of 8 bytes stays whole. */
	*split = !*split;
	if (!*split)
		return n;
	uint64_t end = (iova + word + random() % (n - word)) & ~uint64_t{word - 1};
	if (!(end & (unit - 1)))
		end += iova + n - end > word ? word : -word;
	return end > iova ? std::min<size_t>(n, end - iova) : n;
}

/* One request after the other; reads in any order if they may be. */
template <class P>
bool device::dma(int (*op)(void *host, uint64_t iova, P *buf, size_t len), uint64_t iova, P *buf, size_t len) noexcept
{
	using byte = std::conditional_t<std::is_const_v<P>, const uint8_t, uint8_t>;
	struct piece {
		uint64_t iova;
		byte *p;
		size_t n;
	};
	std::array<piece, 64> pieces;
	const bool shuffle = !std::is_const_v<P> && knob(NPHCA_RANDOM_FETCH);
	const uint64_t pause = knob(NPHCA_DMA_DELAY_NS);
	auto *p = static_cast<byte *>(buf);
	bool split = false;

	while (len) {
		size_t count = 0;
		do {
			const size_t n = cut(iova, len, &split);
			pieces[count++] = {iova, p, n};
			iova += n;
			p += n;
			len -= n;
		} while (shuffle && len && count < pieces.size());
		for (size_t i = 0; i < count; ++i) {
			if (shuffle)
				std::swap(pieces[i], pieces[i + random() % (count - i)]);
			if (!request<P>(op, pieces[i].iova, pieces[i].p, pieces[i].n))
				return false;
			if (pause)
				ops_.delay(host_, pause);
		}
	}
	return true;
}

bool device::dma_read(uint64_t iova, void *buf, size_t len) noexcept
{
	return dma(ops_.dma_read, iova, buf, len);
}

bool device::dma_write(uint64_t iova, const void *buf, size_t len) noexcept
{
	return dma(ops_.dma_write, iova, buf, len);
}

/* The init segment's words are big-endian; a bus reads it as bytes. */
uint64_t device::mmio_read(uint64_t offset, uint32_t size) noexcept
{
	if (size > 8)
		return 0;
	uint64_t value = 0;
	for (uint32_t i = 0; i < size; ++i) {
		const uint64_t at = offset + i;
		uint32_t word = 0;
		const uint64_t t = fab.now();

		switch (at & ~3ull) {
		case 0x0: /* firmware revision */
			word = 35u << 16 | 16;
			break;
		case 0x4: /* command interface revision, sub-minor */
			word = 5u << 16 | 1000;
			break;
		case seg_cmdq_high:
			word = cmdq_high_.load(std::memory_order_relaxed);
			break;
		case seg_cmdq_low: /* 32 entries of 64 bytes; NIC mode as set */
			word = (cmdq_low_.load(std::memory_order_relaxed) & 0x300) | 0x56;
			break;
		case seg_timer_high:
			word = static_cast<uint32_t>(t >> 32);
			break;
		case seg_timer_low:
			word = static_cast<uint32_t>(t);
			break;
		case seg_health_counter: /* must be seen to move */
			word = static_cast<uint32_t>(t / 10000000) & 0xffffff;
			break;
		default:
			break;
		}
		value |= uint64_t{(word >> (24 - 8 * (at & 3))) & 0xff} << (8 * i);
	}
	return value;
}

void device::mmio_write(uint64_t offset, uint64_t value, uint32_t size) noexcept
{
	/* What needs no order with commands and doorbells is done here. */
	if (size == 4 && offset == seg_cmdq_high) {
		cmdq_high_.store(__builtin_bswap32(static_cast<uint32_t>(value)), std::memory_order_relaxed);
		return;
	}
	if (size == 4 && offset == seg_cmdq_low) {
		cmdq_low_.store(__builtin_bswap32(static_cast<uint32_t>(value)), std::memory_order_relaxed);
		return;
	}
	if ((size != 4 && size != 8) || offset % size)
		return;
	if (offset < uint64_t{first_uar} << 12) {
		if (offset == seg_doorbell)
			fab.post({this, offset, value, size});
		return;
	}
	/* The rest of a BlueFlame write repeats what is in the queue. */
	const uint64_t reg = offset & 0xfff;
	if (reg < uar_sq ? reg >= uar_eq_ci + 8 : (reg & 0xff) >= 8)
		return;
	fab.post({this, offset, value, size});
}

void device::handle_posting(const posting &p)
{
	if (!p.size) {
		reset();
		return;
	}
	if (p.offset == seg_doorbell) {
		run_commands(__builtin_bswap32(static_cast<uint32_t>(p.value)));
		return;
	}
	const uint32_t reg = static_cast<uint32_t>(p.offset & 0xfff);
	const uint32_t low = __builtin_bswap32(static_cast<uint32_t>(p.value));
	uint32_t first = low, second = 0;

	if (p.size == 8) {
		second = __builtin_bswap32(static_cast<uint32_t>(p.value >> 32));
	} else if (reg != uar_eq_arm && reg != uar_eq_ci) {
		if (!(reg & 4)) {
			half_word_ = low;
			return;
		}
		first = half_word_;
		second = low;
	}
	if (reg >= uar_sq) {
		if (qp *q = qps.find(second >> 8))
			q->doorbell();
		return;
	}
	switch (reg & ~7u) {
	case uar_cq_arm:
		arm_cq(second & 0xffffff, first);
		break;
	case uar_eq_arm:
		if (!(reg & 4))
			update_eq(first >> 24, first & 0xffffff, true);
		break;
	case uar_eq_ci:
		if (!(reg & 4))
			update_eq(first >> 24, first & 0xffffff, false);
		break;
	default:
		break;
	}
}

/* Elsewhere after each reset, if the host asks for that. */
void device::start_numbers() noexcept
{
	if (!seed_)
		return;
	for (int i = 0; i < 2; ++i) {
		seed_ = seed_ * 6364136223846793005ull + 1442695040888963407ull;
		if (i)
			qps.start(seed_ >> 33);
		else
			mkeys.start(seed_ >> 33);
	}
}

/* As after power-on; knobs and counters stay. */
void device::reset() noexcept
{
	posted.commit_all();
	qps.clear();
	srqs.clear();
	cqs.clear();
	eqs.clear();
	mkeys.clear();
	pds.clear();
	xrcds.clear();
	uars.clear();
	counters.clear();
	domains.clear();
	multicast.clear();
	addresses.fill({});
	if (ethernet)
		fab.learn_macs();
	roce_enabled_ = false;
	special_qp[0] = special_qp[1] = 0;
	xlt_words = 0;
	start_numbers();
	issi_ = 0;
	half_word_ = 0;
	cmdq_high_.store(0, std::memory_order_relaxed);
	cmdq_low_.store(0, std::memory_order_relaxed);
}

/* Does an Ethernet frame's network address belong to this port, in the frame's VLAN? */
bool device::is_for_us(const packet &p) const noexcept
{
	const bool multicast_frame = fabric::is_multicast(p);
	const gid_bytes gid = destination_gid(p);

	return std::any_of(addresses.begin(), addresses.end(), [&](const roce_address &a) {
		return a.valid && a.tagged == p.tagged && (!a.tagged || a.vlan == (p.tag & 0xfff)) &&
		       (multicast_frame || (a.kind == p.kind && a.gid == gid));
	});
}

void device::receive(packet &p)
{
	count(NPHCA_PACKETS);
	if (p.ethernet && !is_for_us(p)) {
		count(NPHCA_DROPPED);
		return;
	}
	if (const uint64_t loss = knob(NPHCA_LOSS)) {
		if (random() % loss == 0) {
			count(NPHCA_LOST);
			return;
		}
	}
	if (fabric::is_multicast(p)) {
		if (!p.has_grh)
			return;
		const auto [from, to] = multicast.equal_range(destination_gid(p));
		for (auto it = from; it != to; ++it)
			/* The sender does not hear itself. */
			if (qp *q = qps.find(it->second); q && !(fab.from(p) == this && p.sqpn == q->qpn))
				q->receive(p);
		return;
	}
	qp *q = qps.find(p.dqpn < 2 ? special_qp[p.dqpn] : p.dqpn);
	if (q)
		q->receive(p);
	else
		count(NPHCA_DROPPED);
}

} // namespace nphca
