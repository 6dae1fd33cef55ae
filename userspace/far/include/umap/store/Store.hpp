/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* For sources written for UMap: its names, over nprdma-far. New programs use <nprdma/far.hpp>. */
#ifndef NPRDMA_FAR_UMAP_STORE_HPP
#define NPRDMA_FAR_UMAP_STORE_HPP

#include <nprdma/export.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <sys/types.h>
#include <unistd.h>

namespace nprdma::far
{
class store;
}

namespace Umap
{

class NPRDMA_API Store
{
public:
	virtual ~Store() = default;

	/* Of the file @fd, which stays open until the store ends. @region and @alignment are not needed. */
	static Store *make_store(void *region, std::size_t bytes, std::size_t alignment, int fd);

	/* Bytes that were read, from offset @off on: fewer at the end, and the rest reads as zeros; -1: an
	 * error. */
	virtual ssize_t read_from_store(char *buf, std::size_t nb, off_t off) = 0;
	virtual ssize_t write_to_store(char *buf, std::size_t nb, off_t off) = 0;
	/* Prefetch is found out without it. */
	virtual int predict_offsets(off_t *, off_t) { return 0; }

	/* What is behind a store of ours, so that nothing is copied; nullptr: one of the user's. */
	virtual std::shared_ptr<nprdma::far::store> native() { return nullptr; }
};

} // namespace Umap

#endif
