/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What is known of the local keys of a device's context: a work request that names an unpinned
 * region as its local side needs a hold, and to look at what a READ brought its buffer's
 * address for the CPU is needed. Without the preload library these are the regions that
 * npr_reg_mr() made, and all others are taken for pinned memory that the HCA knows by the
 * CPU's addresses. With it these are all whose addresses are known, and others (device memory,
 * dmabufs, imported regions) may be anywhere.
 *
 * Every post looks up the keys of its buffers, so that takes no lock. The upper 24 bits of a key are the
 * number of a region, the lower 8 a variant: where a device has two keys of one number at a time,
 * the second is kept apart, under the lock.
 */
#ifndef NPR_LOCAL_REGIONS_HPP
#define NPR_LOCAL_REGIONS_HPP

#include "sparse_array.hpp"

#include <atomic>
#include <cstdint>
#include <infiniband/verbs.h>
#include <map>
#include <mutex>
#include <optional>

namespace npr {

class local_leases;

struct local_key {
	std::optional<std::uint32_t> handle; /* the MR's, of an unpinned region */
	std::uint64_t offset = 0; /* from an address of a work request to that of the CPU */
	bool opaque = false;	  /* it has none */

	/* Pinned memory where its addresses say. */
	[[nodiscard]] bool plain() const noexcept { return !handle && !offset && !opaque; }
};

class local_regions {
public:
	/* Those of @verbs, which are never freed: a thread may post while the process exits. Throws std::bad_alloc. */
	[[nodiscard]] static local_regions &of(const ibv_context *verbs);
	/* Null: nobody has asked for them yet. */
	[[nodiscard]] static local_regions *existing(const ibv_context *verbs) noexcept;

	/* Throws std::bad_alloc. */
	void add(const ibv_mr &mr, const local_key &key);
	/* An unpinned region that the HCA knows by the CPU's addresses. */
	void add(const ibv_mr &mr) { add(mr, {mr.handle}); }
	/* What it was, if it was there. */
	std::optional<local_key> remove(const ibv_mr &mr) noexcept;
	/* From here on what is not there is opaque. Before the first region. */
	void know_all() noexcept;
	/* The context is closed; another may have its address. */
	void clear() noexcept;
	/* Another value whenever a key becomes that of an unpinned region, or is it no more. Who may use it has synchronised with who made it. */
	[[nodiscard]] const std::atomic<std::uint64_t> &changes() const noexcept { return changes_; }
	/* Those of the context, which hear of regions that go; null: none any more. */
	void lease(local_leases *leases) noexcept;
	/* Who may use a region has synchronised with who made it. */
	[[nodiscard]] local_key find(std::uint32_t lkey) const noexcept
	{
		const slot *const s = slots_.find(lkey >> variant_bits);
		/* acquire: pairs with put() */
		const std::uint64_t word = s ? s->word.load(std::memory_order_acquire) : 0;

		if ((word & key_mask) == key_word(lkey))
			return key_of(*s, word);
		if (word & more) [[unlikely]]
			return find_other(lkey);
		return unknown();
	}

private:
	static constexpr unsigned variant_bits = 8;

	/* A slot's word, from below: the key's lower bits, flags, and the handle in the upper half. */
	static constexpr std::uint64_t used = 1U << variant_bits;
	static constexpr std::uint64_t unpinned = used << 1, opaque = used << 2;
	static constexpr std::uint64_t more = used << 3; /* others of its number are in others_ */
	static constexpr std::uint64_t key_mask = used | (used - 1);

	struct slot {
		std::atomic<std::uint64_t> word;
		std::atomic<std::uint64_t> offset;
	};

	[[nodiscard]] static std::uint64_t key_word(std::uint32_t lkey) noexcept { return used | (lkey & (used - 1)); }
	[[nodiscard]] static local_key key_of(const slot &s, std::uint64_t word) noexcept
	{
		local_key k;

		if (word & unpinned)
			k.handle = static_cast<std::uint32_t>(word >> 32);
		/* relaxed: it stays as put() left it as long as the region may be used */
		k.offset = s.offset.load(std::memory_order_relaxed);
		k.opaque = word & opaque;
		return k;
	}
	/* Relaxed: it was set before the context had any region. */
	[[nodiscard]] local_key unknown() const noexcept
	{
		return {std::nullopt, 0, all_known_.load(std::memory_order_relaxed)};
	}
	static void put(slot &s, std::uint32_t lkey, const local_key &k) noexcept;
	std::optional<local_key> take(std::uint32_t lkey) noexcept;
	[[nodiscard]] local_key find_other(std::uint32_t lkey) const noexcept;

	sparse_array<slot> slots_;
	std::atomic<bool> all_known_{false};
	std::atomic<std::uint64_t> changes_{0};
	mutable std::mutex mutex_; /* of those who change something, and of others_ */
	std::map<std::uint32_t, local_key> others_;
	local_leases *leases_ = nullptr;
};

} // namespace npr

#endif
