/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef NPRDMA_FAR_UMAP_STORE_NETWORK_H
#define NPRDMA_FAR_UMAP_STORE_NETWORK_H

#include <nprdma/export.hpp>
#include <umap/store/Store.hpp>

#include <memory>
#include <string>

namespace Umap
{

/* "shm:NAME" or "verbs:HOST:PORT" of a server of nprdma-far. It outlives its stores. */
class NPRDMA_API NetworkClient
{
public:
	explicit NetworkClient(const std::string &address);
	~NetworkClient();

private:
	friend class StoreNetwork;
	struct state;
	std::unique_ptr<state> state_;
};

class NPRDMA_API StoreNetwork : public Store
{
public:
	/* The region @id, which is made with @bytes if it is not there; throws std::system_error. */
	StoreNetwork(const std::string &id, std::size_t bytes, NetworkClient *client,
		     bool compression = false);
	~StoreNetwork() override;

	ssize_t read_from_store(char *buf, std::size_t nb, off_t off) override;
	ssize_t write_to_store(char *buf, std::size_t nb, off_t off) override;
	std::shared_ptr<nprdma::far::store> native() override { return store_; }

private:
	std::shared_ptr<nprdma::far::store> store_;
};

} // namespace Umap

#endif
