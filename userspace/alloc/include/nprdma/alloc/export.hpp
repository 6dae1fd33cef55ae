/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef NPRDMA_ALLOC_EXPORT_HPP
#define NPRDMA_ALLOC_EXPORT_HPP

/* The library is built with hidden symbols. */
#define NPRDMA_ALLOC_API __attribute__((visibility("default")))

#endif
