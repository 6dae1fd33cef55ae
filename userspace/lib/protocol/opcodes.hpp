/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What there is to know of the opcodes of work requests, in one table, and sets of them. */
#ifndef NPR_OPCODES_HPP
#define NPR_OPCODES_HPP

#include <array>
#include <cstdint>
#include <infiniband/verbs.h>

namespace npr {

/* A set of opcodes: each request is asked about its own several times. */
class opcodes {
public:
	template <class... Op> constexpr explicit opcodes(Op... op) noexcept : bits_(((1U << op) | ... | 0U)) {}
	constexpr opcodes() noexcept : bits_(0) {}
	[[nodiscard]] constexpr bool has(ibv_wr_opcode op) const noexcept
	{
		const auto n = static_cast<std::uint32_t>(op);

		return n < 32 && bits_ >> n & 1;
	}

	constexpr void add(opcodes more) noexcept { bits_ |= more.bits_; }

private:
	std::uint32_t bits_;
};

/* What there is to know of an opcode; each request is asked about its own several times. */
struct trait {
	enum : std::uint8_t {
		known = 1,	      /* a provider, or we, would know what to do with it */
		passing = 2,	      /* may be posted as it is: it is no window's */
		remote = 4,	      /* names memory of the peer */
		atomic = 8,
		bringing = 16,	      /* what it brings is written to its local buffers */
		passive = 32,	      /* where the order is relaxed it overtakes what is not proven */
		receive_taking = 64,  /* waits for the peer to post a receive */
	};
};

/* By opcode. */
inline constexpr auto all_traits = [] {
	std::array<std::uint8_t, 32> all{};

	all[IBV_WR_RDMA_WRITE] = trait::known | trait::passing | trait::remote | trait::passive;
	all[IBV_WR_RDMA_WRITE_WITH_IMM] = trait::known | trait::passing | trait::remote | trait::receive_taking;
	all[IBV_WR_SEND] = all[IBV_WR_SEND_WITH_IMM] = all[IBV_WR_SEND_WITH_INV] = trait::known | trait::passing | trait::receive_taking;
	all[IBV_WR_RDMA_READ] = trait::known | trait::passing | trait::remote | trait::bringing | trait::passive;
	all[IBV_WR_ATOMIC_CMP_AND_SWP] = all[IBV_WR_ATOMIC_FETCH_AND_ADD] =
		trait::known | trait::passing | trait::remote | trait::atomic | trait::bringing;
	all[IBV_WR_LOCAL_INV] = trait::known | trait::passing;
	all[IBV_WR_BIND_MW] = trait::known;
	return all;
}();

[[nodiscard]] constexpr unsigned traits_of(ibv_wr_opcode op) noexcept
{
	const auto n = static_cast<std::uint32_t>(op);

	return n < all_traits.size() ? all_traits[n] : 0U;
}

[[nodiscard]] constexpr bool is_atomic(ibv_wr_opcode op) noexcept
{
	return traits_of(op) & trait::atomic;
}

[[nodiscard]] constexpr bool brings(ibv_wr_opcode op) noexcept
{
	return traits_of(op) & trait::bringing;
}

[[nodiscard]] constexpr bool is_passive(ibv_wr_opcode op) noexcept
{
	return traits_of(op) & trait::passive;
}

[[nodiscard]] constexpr bool is_known(ibv_wr_opcode op) noexcept
{
	return traits_of(op) & trait::known;
}

[[nodiscard]] constexpr bool is_remote(ibv_wr_opcode op) noexcept
{
	return traits_of(op) & trait::remote;
}

[[nodiscard]] constexpr bool takes_receive(ibv_wr_opcode op) noexcept
{
	return traits_of(op) & trait::receive_taking;
}

/* Those that have @has, and not @lacks. */
template <unsigned has, unsigned lacks = 0>
inline constexpr opcodes opcodes_of = [] {
	opcodes all;

	for (unsigned n = 0; n < all_traits.size(); ++n)
		if (all_traits[n] & has && !(all_traits[n] & lacks))
			all.add(opcodes(n));
	return all;
}();

} // namespace npr

#endif
