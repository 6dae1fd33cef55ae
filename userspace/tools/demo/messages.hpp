/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What responder and peer tell each other over their socket. Both run the same
 * binary interface; the socket is local.
 */
#ifndef NPRDMA_DEMO_MESSAGES_HPP
#define NPRDMA_DEMO_MESSAGES_HPP

#include <cstdint>

namespace demo
{

/* Responder to peer, once. */
struct announcement {
	std::uint64_t addr;
	std::uint64_t bytes;
	std::uint32_t rkey;
	std::uint32_t reserved;
};

/* Peer to responder; the same byte comes back when it is done. */
enum class request : char {
	settle = 's', /* page out what memory pressure has left */
	finish = 'f', /* check all pages, page out, stop */
};

} // namespace demo

#endif // NPRDMA_DEMO_MESSAGES_HPP
