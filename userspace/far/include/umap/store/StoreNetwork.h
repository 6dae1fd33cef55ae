/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * For sources written for one of the two published extensions of UMap by memory of other hosts.
 *
 * StoreNetworkServer lends memory of its process by a name; StoreNetworkClient, or umap_network(), finds it.
 * The server writes its address to the file "serverfile" of the working directory, which clients read;
 * processes that a launcher started together (PMIx, PMI, Open MPI, Slurm) each lend a part, in the order of
 * their ranks, and clients see the parts as one.
 *
 * NetworkServer lends what its clients ask for, as StoreNetwork with a NetworkClient.
 *
 * From the environment: NPRDMA_UMAP_ADDRESS, where servers listen ("verbs:HOST:PORT", "shm:NAME");
 * NPRDMA_UMAP_SERVERFILE, in place of "serverfile"; NPRDMA_UMAP_SERVER_BYTES, the most that clients of a
 * NetworkServer may ask for in all. Without the first, servers listen over verbs, or between processes of
 * this host if there is no RDMA device. Constructors throw std::system_error.
 */
#ifndef NPRDMA_FAR_UMAP_STORE_NETWORK_H
#define NPRDMA_FAR_UMAP_STORE_NETWORK_H

#include <nprdma/export.hpp>
#include <umap/store/Store.hpp>

#include <memory>
#include <string>

namespace Umap
{

class NPRDMA_API NetworkEndpoint
{
public:
	virtual ~NetworkEndpoint() = default;
	NetworkEndpoint(const NetworkEndpoint &) = delete;
	NetworkEndpoint &operator=(const NetworkEndpoint &) = delete;

protected:
	NetworkEndpoint() = default;
};

class NPRDMA_API NetworkServer : public NetworkEndpoint
{
public:
	NetworkServer();
	~NetworkServer() override;

	/* Until a client was there, and none is. */
	void wait_till_disconnect();

private:
	struct state;
	std::unique_ptr<state> state_;
};

/* @address: "shm:NAME" or "verbs:HOST:PORT" of a server of nprdma-far, or the host where a NetworkServer is.
 */
class NPRDMA_API NetworkClient : public NetworkEndpoint
{
public:
	explicit NetworkClient(const std::string &address);
	~NetworkClient() override;

private:
	friend class StoreNetwork;
	struct state;
	std::unique_ptr<state> state_;
};

class NPRDMA_API StoreNetwork : public Store
{
public:
	/*
	 * The region @id of the server, which is made with @bytes if it is not there. While the same client
	 * has one of that name, another one is meant, and made: "ID#2".
	 */
	StoreNetwork(const std::string &id, std::size_t bytes, NetworkEndpoint *client,
		     bool compression = false);
	~StoreNetwork() override;

	std::size_t get_size() { return size_; }
	ssize_t read_from_store(char *buf, std::size_t nb, off_t off) override;
	ssize_t write_to_store(char *buf, std::size_t nb, off_t off) override;
	std::shared_ptr<nprdma::far::store> native() override { return store_; }

protected:
	StoreNetwork(std::shared_ptr<nprdma::far::store> store, std::size_t size);

private:
	std::shared_ptr<nprdma::far::store> store_;
	std::size_t size_ = 0;
};

/*
 * Lends @bytes at @memory, as they are: clients see what is there when they read, and what they write is
 * there.
 * @memory stays until the destructor has returned, which waits until @clients different ones have been there
 * and none is.
 */
class NPRDMA_API StoreNetworkServer : public StoreNetwork
{
public:
	StoreNetworkServer(const char *id, void *memory, std::size_t bytes, std::size_t clients = 0);
	~StoreNetworkServer() override;

	/* Of the memory itself. */
	ssize_t read_from_store(char *buf, std::size_t nb, off_t off) override;
	ssize_t write_to_store(char *buf, std::size_t nb, off_t off) override;

private:
	struct state;
	std::unique_ptr<state> state_;
};

/* @bytes of what servers lend by the name @id, or all of it if that is 0. It is there until mappings of it
 * end, too. */
class NPRDMA_API StoreNetworkClient : public StoreNetwork
{
public:
	StoreNetworkClient(const char *id, std::size_t bytes);
	~StoreNetworkClient() override;

private:
	StoreNetworkClient(std::shared_ptr<nprdma::far::store> store, std::size_t bytes);
};

} // namespace Umap

#endif
