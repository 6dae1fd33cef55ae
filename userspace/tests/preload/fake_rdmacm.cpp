/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* librdmacm, and a plug-in that uses it. */
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int rsocket(int domain, int type, int protocol)
{
	return domain + 16 * type + 256 * protocol;
}

/* Finds whose rsocket() comes first, as any other library would. */
EXPORT int open_socket()
{
	return rsocket(1, 2, 3);
}
