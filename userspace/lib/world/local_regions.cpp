/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "world/local_regions.hpp"

#include "world/local_leases.hpp"

#include <memory>

namespace npr {

namespace {

struct tables {
	std::mutex mutex;
	std::map<const ibv_context *, std::unique_ptr<local_regions>> of;
};

tables &all()
{
	/* Never destroyed: threads, destructors and other libraries use verbs until the very end. */
	static tables &t = *std::make_unique<tables>().release();

	return t;
}

} // namespace

local_regions &local_regions::of(const ibv_context *verbs)
{
	tables &t = all();
	const std::lock_guard lock(t.mutex);
	auto &regions = t.of[verbs];

	if (!regions)
		regions = std::make_unique<local_regions>();
	return *regions;
}

local_regions *local_regions::existing(const ibv_context *verbs) noexcept
{
	tables &t = all();
	const std::lock_guard lock(t.mutex);
	const auto it = t.of.find(verbs);

	return it == t.of.end() ? nullptr : it->second.get();
}

void local_regions::put(slot &s, std::uint32_t lkey, const local_key &k) noexcept
{
	/* relaxed: other writers have the lock */
	const std::uint64_t kept = s.word.load(std::memory_order_relaxed) & more;

	s.offset.store(k.offset, std::memory_order_relaxed);
	/* release: find() sees the offset of the key that it finds */
	s.word.store(key_word(lkey) | (k.opaque ? opaque : 0) | kept |
			     (k.handle ? unpinned | std::uint64_t{*k.handle} << 32 : 0),
		     std::memory_order_release);
}

/* All loads and stores of words below are relaxed where nothing else is to be seen with them. */
std::optional<local_key> local_regions::take(std::uint32_t lkey) noexcept
{
	slot *const s = slots_.find(lkey >> variant_bits);
	const std::uint64_t word = s ? s->word.load(std::memory_order_relaxed) : 0;

	if ((word & key_mask) == key_word(lkey)) {
		const local_key k = key_of(*s, word);
		s->word.store(word & more, std::memory_order_relaxed);
		return k;
	}
	const auto node = others_.extract(lkey);
	if (!node)
		return std::nullopt;
	const auto next = others_.lower_bound(lkey & ~static_cast<std::uint32_t>(used - 1));
	if (next == others_.end() || next->first >> variant_bits != lkey >> variant_bits)
		s->word.store(word & ~more, std::memory_order_relaxed);
	return node.mapped();
}

void local_regions::add(const ibv_mr &mr, const local_key &k)
{
	const std::lock_guard lock(mutex_);
	slot &s = *slots_.make(mr.lkey >> variant_bits);

	/* One that was freed without our knowledge. */
	const auto before = take(mr.lkey);
	const std::uint64_t word = s.word.load(std::memory_order_relaxed);
	if (!(word & used)) {
		put(s, mr.lkey, k);
	} else {
		others_[mr.lkey] = k;
		/* The rest of the word stays, and others_ is under the lock. */
		s.word.store(word | more, std::memory_order_relaxed);
	}
	/* release: who finds this number finds the key as well */
	if (k.handle || (before && before->handle))
		changes_.fetch_add(1, std::memory_order_release);
}

std::optional<local_key> local_regions::remove(const ibv_mr &mr) noexcept
{
	const std::lock_guard lock(mutex_);
	const auto key = take(mr.lkey);

	if (key && key->handle) {
		/* release: pairs with who compares it */
		changes_.fetch_add(1, std::memory_order_release);
		if (leases_)
			leases_->remove(*key->handle);
	}
	return key;
}

void local_regions::lease(local_leases *leases) noexcept
{
	const std::lock_guard lock(mutex_);

	leases_ = leases;
}

void local_regions::know_all() noexcept
{
	all_known_.store(true, std::memory_order_relaxed); /* see unknown() */
}

void local_regions::clear() noexcept
{
	const std::lock_guard lock(mutex_);

	others_.clear();
	slots_.for_each([](slot &s) { s.word.store(0, std::memory_order_relaxed); });
	all_known_.store(false, std::memory_order_relaxed);
}

local_key local_regions::find_other(std::uint32_t lkey) const noexcept
{
	const std::lock_guard lock(mutex_);
	const auto it = others_.find(lkey);

	return it == others_.end() ? unknown() : it->second;
}

} // namespace npr
