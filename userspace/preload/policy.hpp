/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the environment says, and what the user is told. */
#ifndef NPR_PRELOAD_POLICY_HPP
#define NPR_PRELOAD_POLICY_HPP

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>

namespace npr::preload {

/* NPRDMA_UNPINNED: regions of at least so many bytes; without it, all. */
[[nodiscard]] std::size_t threshold();

/* NPRDMA_ORDERED: do WRITEs land in order, for peers that poll their memory? */
[[nodiscard]] bool ordered();

/*
 * An object that the library could not attach: true if it may be used nevertheless, with pinned
 * regions, which only NPRDMA_UNPINNED leaves. Otherwise what is done with it would fail later,
 * where nobody knows why.
 */
[[nodiscard]] bool may_be_left(const ibv_context *context, const char *what, std::uint32_t number, int error);

} // namespace npr::preload

#endif
