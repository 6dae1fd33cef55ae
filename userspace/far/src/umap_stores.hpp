/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What UMap's stores over ours have in common, and what uunmap() asks of the network's. */
#ifndef NPRDMA_FAR_UMAP_STORES_HPP
#define NPRDMA_FAR_UMAP_STORES_HPP

#include <nprdma/far.hpp>

#include <memory>
#include <sys/types.h>

namespace Umap
{

ssize_t transfer(const std::shared_ptr<nprdma::far::store> &s, char *buf, std::size_t nb, off_t off,
		 bool write);

/* What umap_network() lends at @memory is not lent any more. False: nothing is. */
bool unlend(const void *memory);

} // namespace Umap

#endif
