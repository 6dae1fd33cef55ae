/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A jemalloc of our own: the archive that Debian builds for libraries, with each symbol renamed. So malloc()
 * of the program stays what it is, whatever that is.
 */
#ifndef NPRA_JEMALLOC_HPP
#define NPRA_JEMALLOC_HPP

#include <cstddef>
#include <string>
#include <system_error>

extern "C" {
struct npra_extent_hooks {
	void *(*alloc)(npra_extent_hooks *, void *, std::size_t, std::size_t, bool *, bool *, unsigned);
	bool (*dalloc)(npra_extent_hooks *, void *, std::size_t, bool, unsigned);
	void (*destroy)(npra_extent_hooks *, void *, std::size_t, bool, unsigned);
	bool (*commit)(npra_extent_hooks *, void *, std::size_t, std::size_t, std::size_t, unsigned);
	bool (*decommit)(npra_extent_hooks *, void *, std::size_t, std::size_t, std::size_t, unsigned);
	bool (*purge_lazy)(npra_extent_hooks *, void *, std::size_t, std::size_t, std::size_t, unsigned);
	bool (*purge_forced)(npra_extent_hooks *, void *, std::size_t, std::size_t, std::size_t, unsigned);
	bool (*split)(npra_extent_hooks *, void *, std::size_t, std::size_t, std::size_t, bool, unsigned);
	bool (*merge)(npra_extent_hooks *, void *, std::size_t, void *, std::size_t, bool, unsigned);
};

void *npra_je_mallocx(std::size_t, int);
void npra_je_sdallocx(void *, std::size_t, int);
int npra_je_mallctl(const char *, void *, std::size_t *, void *, std::size_t);
}

namespace npra::je {

/* As jemalloc(3) defines them. */
[[nodiscard]] constexpr int of_arena(unsigned int arena) { return static_cast<int>((arena + 1) << 20); }
[[nodiscard]] constexpr int of_cache(unsigned int cache) { return static_cast<int>((cache + 2) << 8); }
inline constexpr int no_cache = 1 << 8;

/* Asks one thing, or sets it. */
template <class Out, class In>
[[nodiscard]] int control(const std::string &name, Out *out, In *in)
{
	std::size_t size = sizeof(Out);
	return npra_je_mallctl(name.c_str(), out, out ? &size : nullptr, in, in ? sizeof(In) : 0);
}

template <class Out, class In>
void must_control(const std::string &name, Out *out, In *in)
{
	if (const int error = control(name, out, in))
		throw std::system_error(error, std::generic_category(), "jemalloc: " + name);
}

inline constexpr char *nothing = nullptr; /* for what is not asked, or not set */

} // namespace npra::je

#endif
