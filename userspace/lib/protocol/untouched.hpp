/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Vectors whose elements are all zero bits until somebody writes them. What is never touched costs address space, and no
 * memory: a queue pair has room for what it may need at worst, and mostly needs little of it.
 */
#ifndef NPR_UNTOUCHED_HPP
#define NPR_UNTOUCHED_HPP

#include <cstddef>
#include <cstdlib>
#include <new>
#include <sys/mman.h>
#include <type_traits>
#include <utility>
#include <vector>

namespace npr {

template <class T> struct untouched_allocator {
	static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);
	using value_type = T;

	untouched_allocator() noexcept = default;
	template <class U> explicit untouched_allocator(const untouched_allocator<U> &) noexcept {}

	[[nodiscard]] T *allocate(std::size_t n)
	{
		const std::size_t bytes = n * sizeof(T);

		if (bytes < page) {
			if (void *p = std::calloc(n, sizeof(T)))
				return static_cast<T *>(p);
			throw std::bad_alloc();
		}
		void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (p == MAP_FAILED)
			throw std::bad_alloc();
		/* One that is touched would bring 511 others. */
		madvise(p, bytes, MADV_NOHUGEPAGE);
		return static_cast<T *>(p);
	}
	void deallocate(T *p, std::size_t n) noexcept
	{
		if (n * sizeof(T) < page)
			std::free(p);
		else
			munmap(p, n * sizeof(T));
	}

	/* An element that nobody gives a value is zero already. */
	template <class U> void construct(U *) noexcept {}
	template <class U, class... A> void construct(U *p, A &&...args)
	{
		::new (static_cast<void *>(p)) U(std::forward<A>(args)...);
	}

	friend bool operator==(const untouched_allocator &, const untouched_allocator &) noexcept { return true; }

private:
	static constexpr std::size_t page = 4096;
};

/* Of a size that is set once. */
template <class T> using untouched_vector = std::vector<T, untouched_allocator<T>>;

} // namespace npr

#endif
