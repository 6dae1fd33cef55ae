/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Sockets over RDMA, of librdmacm. A receiver WRITEs into the sender's memory how much room there is, and
 * the sender polls that memory, and changes it, whether or not the immediate data of the WRITE has come. If such a WRITE
 * landed a second time the sender would write over data that nobody has received. So a program that opens
 * one has ordered WRITEs.
 */
#include "policy.hpp"
#include "real.hpp"

#include <cerrno>

using namespace npr::preload;

NPR_EXPORT int rsocket(int domain, int type, int protocol)
{
	using function = int(int domain, int type, int protocol);
	static auto *const real_rsocket = reinterpret_cast<function *>(dlsym(RTLD_NEXT, "rsocket"));

	if (!real_rsocket) {
		errno = ENOSYS;
		return -1;
	}
	order_writes();
	return real_rsocket(domain, type, protocol);
}
