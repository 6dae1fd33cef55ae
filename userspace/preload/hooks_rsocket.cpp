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

namespace {

using function = int(int domain, int type, int protocol);

/* A plug-in that was loaded for itself alone brings librdmacm where RTLD_NEXT does not look. */
function *find_real()
{
	if (void *const next = dlsym(RTLD_NEXT, "rsocket"))
		return reinterpret_cast<function *>(next);
	/* It is loaded already, and stays with who loaded it: otherwise nobody could call us. */
	void *const library = dlopen("librdmacm.so.1", RTLD_LAZY | RTLD_NOLOAD);
	if (!library)
		return nullptr;
	auto *const found = reinterpret_cast<function *>(dlsym(library, "rsocket"));
	dlclose(library);
	return found;
}

} // namespace

NPR_EXPORT int rsocket(int domain, int type, int protocol)
{
	function *const real_rsocket = find_real();

	if (!real_rsocket) {
		errno = ENOSYS;
		return -1;
	}
	order_writes();
	return real_rsocket(domain, type, protocol);
}
