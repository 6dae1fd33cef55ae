/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Which memory of a device is unpinned, where an object of the program decides that. */
#include "policy.hpp"
#include "registry.hpp"

#include <cerrno>

namespace npr::preload {

bool keep_pinned(device &d, const char *what)
{
	if (d.memory.pin(what))
		return true;
	say(&d.verbs, "%s needs pinned memory, and the program has registered memory that is not pinned: refused. With "
	    "NPRDMA_UNPINNED=none all of its memory is pinned", what);
	errno = EOPNOTSUPP;
	return false;
}

void tell_left(device &d, const char *what)
{
	const std::lock_guard lock(d.told.mutex);

	try {
		if (!d.told.left.insert(what).second)
			return;
	} catch (const std::bad_alloc &) {
	}
	say(&d.verbs, "%s is left to the provider: memory that it uses is pinned, and unpinned memory of a peer is out of its "
		    "reach", what);
}

namespace {

const char *advice(int error)
{
	switch (error) {
	case ENOSPC:
		return "It has too few entries of its send queue, or its completion queue too many queue pairs. ";
	case ENOMEM:
		return "There is too little memory, or RLIMIT_MEMLOCK is too low. ";
	case EMFILE:
		return "RLIMIT_NOFILE is too low. ";
	default:
		return "";
	}
}

} // namespace

bool may_be_left(device &d, const char *what, std::uint32_t number, int error)
{
	const bool left = policy().partial() || d.memory.pin(what);

	errno = error;
	say(&d.verbs, "%s %u cannot have unpinned memory: %m. %s%s", what, number, advice(error),
	    left ? "It works with pinned memory only." : "With NPRDMA_UNPINNED=none it works with pinned memory.");
	return left;
}

} // namespace npr::preload
