/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the C API and the preload library share, beyond the objects. */
#ifndef NPR_SEAM_HPP
#define NPR_SEAM_HPP

#include "object/context.hpp"

namespace npr {

/* npr_open() on @provider. */
npr_context *open(ibv_context *verbs, unsigned int flags, const provider &provider) noexcept;
/* npr_dereg_mr() by @dereg, which is ibv_dereg_mr(). */
int dereg_mr(ibv_mr *mr, decltype(provider::dereg_mr) dereg) noexcept;
/* npr_attach_cq() of one that is not half the application's, but @own entries. */
npr_cq *attach_cq(npr_context *ctx, ibv_cq *cq, std::uint32_t own);

} // namespace npr

#endif
