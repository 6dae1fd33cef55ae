/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Stores in the memory of another process or host. A server lends named regions; it takes no part in
 * reading and writing them, which clients do by one-sided transfers. A region has, for each of its pages, an
 * entry that says whether the page was ever written, how it is coded and what its checksum is.
 */
#ifndef NPRDMA_FAR_NETWORK_HPP
#define NPRDMA_FAR_NETWORK_HPP

#include <nprdma/export.hpp>
#include <nprdma/far.hpp>
#include <nprdma/transport.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace nprdma::far
{

struct server_options {
	/* Regions that clients may make, all together; 0: they may make none. */
	std::uint64_t clients_may_make = 0;
	unsigned max_connections = 1024;
};

/* Serves in a thread of its own. */
class NPRDMA_API server
{
public:
	virtual ~server() = default;
	server(const server &) = delete;
	server &operator=(const server &) = delete;

	/* @context stays until the server ends. EAGAIN: there are no threads to be had. */
	static result<std::unique_ptr<server>> make(transport::context &context, std::string_view address,
						    const server_options &how = {});
	/*
	 * @bytes of zeros, unpinned where the device can: more than there is memory for, if there is swap.
	 * With @path the pages are those of the file, which is made if it is not there or empty, and a
	 * client's flush() is durable. @page_bytes: a power of two, 4 KiB to 4 MiB. EEXIST: there is a region
	 * of that name. EBUSY: the file is lent already, by whatever server. EINVAL: it was made with other
	 * @bytes or @page_bytes, or is something else, and is left as it is.
	 */
	virtual status lend(const std::string &name, std::uint64_t bytes, std::size_t page_bytes = 4096,
			    const std::string &path = {}) = 0;
	/*
	 * @memory of the caller's, as it is: clients read what is there when they ask, and what they write is
	 * there. No page of it is coded or has a checksum, and any number of clients may have the region open
	 * (network_options::shared), each for pages of its own. @memory stays until the region is withdrawn.
	 */
	virtual status lend(const std::string &name, std::span<std::byte> memory,
			    std::size_t page_bytes = 4096) = 0;
	/* EBUSY: a client has it. */
	virtual status withdraw(const std::string &name) = 0;
	/*
	 * Waits until @clients different ones have had the region in all, and none has it; then withdraws it.
	 * EINVAL: more than are counted (65536).
	 */
	virtual status withdraw_after(const std::string &name, std::uint64_t clients) = 0;
	/* Waits until a client was connected, and none is. */
	virtual void wait_until_left() = 0;
	[[nodiscard]] virtual std::string address() const = 0;

protected:
	server() = default;
};

enum class coding {
	raw,
	lz4,    /* without loss */
	zfp_64, /* doubles, each within network_options::error_bound; what is no finite number goes without
		   loss */
	zfp_32, /* floats */
};

struct network_options {
	/* Of the region if it is there; if not and this is not 0, it is made. */
	std::uint64_t make_bytes = 0;
	std::size_t page_bytes = 4096; /* of a region that is made */
	bool read_only = false;
	/*
	 * Several clients may have the region open with this, and write different pages: entries are asked
	 * for at each read. Without it one client has the region, or several that only read it; others get
	 * EBUSY.
	 */
	bool shared = false;
	coding code = coding::raw; /* of what is written; everything is read */
	double error_bound = 0;    /* absolute, for zfp_64 and zfp_32 */
	bool checksums = true;     /* of raw pages; others have them always */
	unsigned lanes = 4;        /* connections: as many transfers of the pager's threads at once */
	/* A read or write that did not succeed within this time fails: a link that is cut is tried again
	 * until then. */
	std::chrono::milliseconds deadline{5000};
};

struct network_statistics {
	std::uint64_t bytes_read, bytes_written; /* of pages, as they were transferred */
	std::uint64_t pages_coded, pages_raw;    /* written */
	std::uint64_t reconnects, checksum_errors;
};

class NPRDMA_API network_store : public store
{
public:
	/* @context stays until the store and all mappings of it end. ENOENT: there is no such region. */
	static result<std::shared_ptr<network_store>> open(transport::context &context,
							   std::string_view address,
							   const std::string &region,
							   const network_options &how = {});
	[[nodiscard]] virtual std::size_t page_bytes() const noexcept = 0;
	[[nodiscard]] virtual network_statistics stats() const noexcept = 0;
};

/*
 * The same data in several stores of one size: read from the one that answered last, or else from the next,
 * written to all. A write fails only if none takes it.
 *
 * A store that fails to take a write is left out from then on: it lacks something. The others keep, durably,
 * a larger generation than it has before the write is said to be done, so that it is known for the older one
 * whenever a mirror of them is made again. So is one that may have lost what was written to it, see
 * store::flush(). resync() brings them up to date.
 */
class NPRDMA_API mirrored : public store
{
public:
	/* Of each store, in their order: code 0 if it is in use, or else why it is left out. */
	[[nodiscard]] virtual std::vector<error> left_out() const = 0;
	/*
	 * Copies all of the data to the stores that are left out, and has them in use again. Reads and writes
	 * go on meanwhile. On error those that are not done yet stay left out.
	 */
	virtual status resync() = 0;

protected:
	mirrored() = default;
};

/*
 * Stores that never were in a mirror have to have the same data: all zeros, for instance. Later, those that
 * are behind another one are left out from the start, with ESTALE (left_out()). ENOTUNIQ: each of two was
 * written to without the other one, so that neither is the newer one. EOPNOTSUPP: a store keeps no
 * generation(); all of this library's do, but for block devices and for files where there are no user
 * attributes. EINVAL: they are not of one size, or one is opened with
 * network_options::shared.
 */
NPRDMA_API result<std::shared_ptr<mirrored>> mirror_store(std::vector<std::shared_ptr<store>> stores);

} // namespace nprdma::far

#endif /* NPRDMA_FAR_NETWORK_HPP */
