/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef NPRDMA_FAR_UMAP_SPARSE_STORE_H
#define NPRDMA_FAR_UMAP_SPARSE_STORE_H

#include <nprdma/export.hpp>
#include <umap/store/Store.hpp>

#include <string>

namespace Umap
{

class NPRDMA_API SparseStore : public Store
{
public:
	/* Made: @file_bytes is rounded up to a multiple of @page_bytes. */
	SparseStore(std::size_t bytes, std::size_t page_bytes, std::string directory, std::size_t file_bytes);
	/* Opened. */
	SparseStore(std::string directory, bool read_only);
	~SparseStore() override;

	ssize_t read_from_store(char *buf, std::size_t nb, off_t off) override;
	ssize_t write_to_store(char *buf, std::size_t nb, off_t off) override;
	std::shared_ptr<nprdma::far::store> native() override { return store_; }

	/* 0: it is there; or a value of errno. */
	int get_directory_creation_status() { return status_; }
	std::size_t get_current_capacity();
	static std::size_t get_capacity(std::string directory);
	/* 0, or -1: what was written may not be durable. */
	int close_files();

private:
	std::shared_ptr<nprdma::far::store> store_;
	int status_ = 0;
};

} // namespace Umap

#endif
