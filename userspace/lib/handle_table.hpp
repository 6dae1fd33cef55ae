/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The library's objects by those of verbs, which the kernel numbers. */
#ifndef NPR_HANDLE_TABLE_HPP
#define NPR_HANDLE_TABLE_HPP

#include "sparse_array.hpp"

#include <mutex>
#include <new>
#include <type_traits>

namespace npr {

/*
 * Each lookup is on the way of a post or a poll, and takes no lock. It is right for a @key that nobody
 * creates or destroys meanwhile: that one's slot does not change. A @key that is not here is not found,
 * whatever happens to the slot of its number, as long as its address is no other's that is here.
 *
 * Where the kernel is asked first to destroy an object, its number may be another's before remove(). So
 * set() replaces what is there, and remove() is told what it is to remove.
 */
template <class Key, class Value>
class handle_table {
public:
	[[nodiscard]] Value *find(std::uint32_t handle, const Key *key) const noexcept
	{
		const slot *const s = slots_.find(handle);

		/* acquire: pairs with set() */
		if (!s || s->key.load(std::memory_order_acquire) != key) [[unlikely]]
			return nullptr;
		/* relaxed: it stays as set() left it as long as @key may be used */
		return s->value.load(std::memory_order_relaxed);
	}

	/* Whatever has the number, or null. Nobody creates or destroys it meanwhile. */
	[[nodiscard]] Value *find_any(std::uint32_t handle) const noexcept
	{
		const slot *const s = slots_.find(handle);

		/* acquire: pairs with set() */
		return s && s->key.load(std::memory_order_acquire) ? s->value.load(std::memory_order_relaxed) : nullptr;
	}

	/* False: no memory, or there is no such number. */
	[[nodiscard]] bool set(std::uint32_t handle, const Key *key, Value *value) noexcept
	{
		const std::lock_guard lock(mutex_);

		try {
			slot *const s = slots_.make(handle);

			if (!s)
				return false;
			put(*s, key, value);
			return true;
		} catch (const std::bad_alloc &) {
			return false;
		}
	}

	/* False: @value is not there any more. */
	bool remove(std::uint32_t handle, const std::type_identity_t<Value> *value) noexcept
	{
		const std::lock_guard lock(mutex_);
		slot *const s = slots_.find(handle);

		/* relaxed: other writers have the lock */
		if (!s || s->value.load(std::memory_order_relaxed) != value)
			return false;
		put(*s, nullptr, nullptr);
		return true;
	}

	/* Calls @f(value) for each. Nobody destroys one meanwhile. */
	template <class F>
	void for_each(F &&f)
	{
		const std::lock_guard lock(mutex_);

		slots_.for_each([&](slot &s) {
			if (const Value *const v = s.value.load(std::memory_order_relaxed))
				f(v);
		});
	}

	/* Removes all, and calls @f(value) for each. Nobody else uses them any more. */
	template <class F>
	void drain(F &&f)
	{
		const std::lock_guard lock(mutex_);

		slots_.for_each([&](slot &s) {
			if (Value *const v = s.value.load(std::memory_order_relaxed)) {
				put(s, nullptr, nullptr);
				f(v);
			}
		});
	}

private:
	struct slot {
		std::atomic<const Key *> key;
		std::atomic<Value *> value;
	};

	static void put(slot &s, const Key *key, Value *value) noexcept
	{
		s.value.store(value, std::memory_order_relaxed);
		/* release: who finds the key finds its value, and all that was done to it before */
		s.key.store(key, std::memory_order_release);
	}

	sparse_array<slot> slots_;
	std::mutex mutex_; /* of those who change something */
};

} // namespace npr

#endif
