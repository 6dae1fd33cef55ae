/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef NPRDMA_EXPORT_HPP
#define NPRDMA_EXPORT_HPP

/* nprdma-transport, nprdma-far and nprdma-sync are built with hidden symbols. */
#define NPRDMA_API __attribute__((visibility("default")))

#endif
