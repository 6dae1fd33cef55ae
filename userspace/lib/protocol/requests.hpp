/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the engine's parts have to know of work requests, regions, and the kernel's answers.
 */
#ifndef NPR_REQUESTS_HPP
#define NPR_REQUESTS_HPP

#include "protocol/engine.hpp"

#include <array>
#include <cerrno>

namespace npr {

inline constexpr std::uint64_t no_op = ~0ULL;
inline constexpr unsigned max_fetches = 8;
inline constexpr unsigned max_unproven = 3;
inline constexpr unsigned max_rebinds = 8;
/* Bytes that a lease may be of, from its part's first one on. */
inline constexpr std::uint64_t lease_span = remote_leases::part + remote_leases::overlap;

inline constexpr std::uint32_t atomic_size = 8;

/* By opcode. Those that are not known do not complete. */
inline constexpr auto completion_opcodes = [] {
	std::array<ibv_wc_opcode, 32> all{};

	all.fill(IBV_WC_SEND);
	all[IBV_WR_RDMA_WRITE] = all[IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE;
	all[IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ;
	all[IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP;
	all[IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD;
	all[IBV_WR_LOCAL_INV] = IBV_WC_LOCAL_INV;
	all[IBV_WR_BIND_MW] = IBV_WC_BIND_MW;
	return all;
}();

[[nodiscard]] inline std::uint32_t rkey_of(const ibv_send_wr &wr) noexcept
{
	return is_atomic(wr.opcode) ? wr.wr.atomic.rkey : wr.wr.rdma.rkey;
}

/* The address comes first in both: one member may be read through the other. */
[[nodiscard]] inline std::uint64_t addr_of(const ibv_send_wr &wr) noexcept
{
	return wr.wr.rdma.remote_addr;
}

/*
 * @wr with a key, and the address under which the HCA reaches the region with it. A lease's key is for one
 * window, whatever is done under it. The address comes first, as above.
 */
inline void translate(ibv_send_wr &wr, const rdma_np_region_info &i, std::uint32_t rkey, bool write) noexcept
{
	(is_atomic(wr.opcode) ? wr.wr.atomic.rkey : wr.wr.rdma.rkey) = rkey;
	wr.wr.rdma.remote_addr += (write ? i.write_addr : i.read_addr) - i.base;
}

/* What a failed RESOLVE means for a work request that needed it. */
[[nodiscard]] inline ibv_wc_status resolve_status(int error) noexcept
{
	switch (error) {
	case -ETIMEDOUT:
		return IBV_WC_RETRY_EXC_ERR;
	case -ENOMEM:
		return IBV_WC_REM_OP_ERR;
	case -EFAULT:
		return IBV_WC_REM_ACCESS_ERR;
	default:
		return IBV_WC_GENERAL_ERR;
	}
}

/* Of RESOLVE: it is no unpinned region, or nothing is known of it, and the HCA will say. */
[[nodiscard]] inline bool is_answer(int error) noexcept
{
	return error == -EACCES || error == -ENXIO || error == -EHOSTUNREACH || error == -ECONNREFUSED;
}

[[nodiscard]] inline ibv_wc_status fault_status(std::uint32_t status) noexcept
{
	switch (status) {
	case RDMA_NP_ACCESS:
	case RDMA_NP_ADDRESS:
		return IBV_WC_REM_ACCESS_ERR;
	case RDMA_NP_TIMEOUT:
		return IBV_WC_RETRY_EXC_ERR;
	case RDMA_NP_NOMEM:
		return IBV_WC_REM_OP_ERR;
	default:
		return IBV_WC_REM_INV_REQ_ERR;
	}
}

/* Nonsense, or an owner whose pages or units are not those that we know how to look at. */
[[nodiscard]] inline bool sane(const rdma_np_region_info &i) noexcept
{
	const std::uint64_t in_page = page_size - 1;

	return i.page_shift == page_shift && i.unit_shift == unit_shift && i.max_pages && i.max_ranges &&
	       i.max_outstanding && i.length && i.base + (i.length - 1) >= i.base &&
	       (!i.read_key || (i.base & in_page) == (i.read_addr & in_page)) &&
	       (!i.write_key || (i.base & in_page) == (i.write_addr & in_page)) && i.table_addr % 8 == 0;
}

[[nodiscard]] inline bool is_inside(std::uint64_t addr, std::uint64_t length, const rdma_np_region_info &i) noexcept
{
	return addr >= i.base && length <= i.length && addr - i.base <= i.length - length;
}

/* Of a part: are its addresses those with the same upper bits as @addr? */
[[nodiscard]] inline bool is_part_of(const rdma_np_region_info &i, std::uint64_t addr) noexcept
{
	return i.part_shift >= page_shift && i.part_shift < 63 && i.length == 1ULL << i.part_shift &&
	       i.base >> i.part_shift << i.part_shift == i.base && is_inside(addr, 1, i);
}

[[nodiscard]] inline bool same_addresses(const rdma_np_region_info &a, const rdma_np_region_info &b) noexcept
{
	return a.base == b.base && a.length == b.length && a.part_shift == b.part_shift;
}

/*
 * How many bytes of a READ that will be scanned go first, by themselves.
 *
 * The responder fetches a READ by PCIe requests, and may cut these at any multiple of a unit's
 * size behind the READ's address (P3). A unit in which a request ends comes in two parts, and
 * can be half page, half signature (I4). So a READ that reaches into another unit begins with
 * a unit, and then each of its requests does. The bytes before that unit are a READ of their own.
 */
[[nodiscard]] inline std::uint64_t split(std::uint64_t raddr, std::uint64_t length) noexcept
{
	const std::uint64_t head = -raddr % unit_size;

	return length > head ? head : 0;
}

[[nodiscard]] inline std::uint32_t pages_of(std::uint64_t addr, std::uint32_t length) noexcept
{
	return static_cast<std::uint32_t>(((addr + length - 1) >> page_shift) - (addr >> page_shift) + 1);
}

[[nodiscard]] inline std::uint64_t region_pages(const rdma_np_region_info &i) noexcept
{
	return ((i.base + (i.length - 1)) >> page_shift) - (i.base >> page_shift) + 1;
}

} // namespace npr

#endif
