/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Which addresses are free. Neighbours become one, unless a wall is between them. Its user
 * has a lock.
 */
#ifndef NPRA_RANGES_HPP
#define NPRA_RANGES_HPP

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace npra {

class ranges {
public:
	/* The smallest that fits, of those the lowest. Throws std::bad_alloc, and nothing has changed. */
	[[nodiscard]] std::optional<std::uintptr_t> take(std::uintptr_t size, std::uintptr_t alignment)
	{
		for (auto i = by_size_.lower_bound({size, 0}); i != by_size_.end(); ++i) {
			const auto [length, begin] = *i;
			const std::uintptr_t at = (begin + alignment - 1) & ~(alignment - 1);
			if (at < begin || at - begin > length - size)
				continue;
			const std::uintptr_t end = begin + length, left = at + size;
			if (left != end)
				add(left, end - left);
			if (at != begin)
				resize(begin, at - begin);
			else
				remove(begin);
			return at;
		}
		return {};
	}

	/* @same(a, b): nothing is between these two addresses. Throws std::bad_alloc, and nothing has changed. */
	template <class Same>
	void give(std::uintptr_t begin, std::uintptr_t size, Same &&same)
	{
		add(begin, size);
		auto at = by_address_.find(begin);
		if (const auto next = std::next(at); next != by_address_.end() && begin + size == next->first &&
						     same(next->first - 1, next->first)) {
			size += next->second;
			remove(next->first);
			resize(begin, size);
		}
		if (at != by_address_.begin()) {
			const auto before = std::prev(at);
			if (before->first + before->second == begin && same(begin - 1, begin)) {
				remove(begin);
				resize(before->first, before->second + size);
			}
		}
	}

	/* A range that is there as a whole. */
	void remove(std::uintptr_t begin) noexcept
	{
		const auto i = by_address_.find(begin);
		by_size_.erase({i->second, begin});
		by_address_.erase(i);
	}

	[[nodiscard]] std::uintptr_t largest() const noexcept { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
	[[nodiscard]] const std::map<std::uintptr_t, std::uintptr_t> &all() const noexcept { return by_address_; }

private:
	void add(std::uintptr_t begin, std::uintptr_t size)
	{
		const auto i = by_size_.emplace(size, begin).first;
		try {
			by_address_.emplace(begin, size);
		} catch (...) {
			by_size_.erase(i);
			throw;
		}
	}

	/* Allocates nothing. */
	void resize(std::uintptr_t begin, std::uintptr_t size) noexcept
	{
		std::uintptr_t &old = by_address_.find(begin)->second;
		auto node = by_size_.extract({old, begin});
		node.value().first = size;
		by_size_.insert(std::move(node));
		old = size;
	}

	std::map<std::uintptr_t, std::uintptr_t> by_address_;		      /* begin, size */
	std::set<std::pair<std::uintptr_t, std::uintptr_t>> by_size_;	      /* size, begin */
};

} // namespace npra

#endif
