/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What both ends set of the TCP connection that a connection over verbs has been arranged by. */
#ifndef NPRDMA_TRANSPORT_TCP_HPP
#define NPRDMA_TRANSPORT_TCP_HPP

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

namespace nprdma::transport
{

/*
 * Nothing is sent by way of it later, and an end that only serves READs and WRITEs posts nothing either: of a
 * peer's host that has lost its power it would never hear. The kernel asks after 10 s of silence, every 5 s,
 * and after 4 times without an answer the connection is at its end.
 */
inline void set_up_tcp(int fd) noexcept
{
	const int on = 1, idle = 10, interval = 5, probes = 4; /* seconds */

	(void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	(void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
	(void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
	(void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
	(void)::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
}

} // namespace nprdma::transport

#endif
