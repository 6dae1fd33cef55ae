/* SPDX-License-Identifier: GPL-2.0 */
/* Memory from the outside: what became of pages. */
#ifndef NPRDMA_SOAK_PAGES_HPP
#define NPRDMA_SOAK_PAGES_HPP

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace soak
{

/* The kernel's entry for each page from p on, of this process. */
std::vector<std::uint64_t> page_map(const void *p, std::size_t pages);
std::size_t present_pages(const void *p, std::size_t pages);
/*
 * May the frame of such an entry be taken out of use for good? It is nobody else's, and not
 * in a memory block that is to go offline: with a bad frame it could not come back. Nor is it
 * part of a larger page: one that cannot be split is freed whole, bad frame and all, and
 * whoever gets that frame next loses it when it is to be paged out (6.12).
 */
bool is_expendable(std::uint64_t entry);
/* The first line of a file; empty if there is none. */
std::string line_of(const std::string &path);
std::uint64_t memory_block_pages();

inline constexpr const char *memory_blocks = "/sys/devices/system/memory";

} // namespace soak

#endif
