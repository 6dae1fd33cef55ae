// SPDX-License-Identifier: GPL-2.0
/* Forged messages between kernels; see np_message.h. */
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <rdma/ib_user_mad.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "np_message.h"
#include "np_test.h"

#define QP1_QKEY	0x80010000

/* A vendor MAD of range 2. */
struct mad {
	uint8_t head[24];
	uint8_t rmpp[12];
	uint8_t reserved;
	uint8_t oui[3];
	struct message message;
};

_Static_assert(sizeof(struct mad) == 256, "a MAD");

int port_open(struct port *port, const char *dev, uint16_t to)
{
	struct ib_user_mad_reg_req req = {
		.qpn = 1,
		.mgmt_class = CLASS,
		.mgmt_class_version = 1,
		.oui = { 0x02, 'N', 'P' },
	};
	char path[128], name[32] = {};

	memset(port, 0, sizeof(*port));
	port->to = to;
	port->class = CLASS;
	for (int n = 0; n < 64; n++) {
		int fd;

		snprintf(path, sizeof(path), "/sys/class/infiniband_mad/umad%d/ibdev", n);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0)
			continue;
		if (read(fd, name, sizeof(name) - 1) < 0)
			name[0] = 0;
		close(fd);
		if (strncmp(name, dev, strlen(dev)) || name[strlen(dev)] != '\n')
			continue;
		snprintf(path, sizeof(path), "/dev/infiniband/umad%d", n);
		port->fd = open(path, O_RDWR | O_CLOEXEC);
		if (port->fd < 0)
			return -errno;
		/* No method: what arrives is the kernel's. */
		if (ioctl(port->fd, IB_USER_MAD_ENABLE_PKEY) ||
		    ioctl(port->fd, IB_USER_MAD_REGISTER_AGENT, &req))
			return -errno;
		port->agent = req.id;
		return 0;
	}
	return -ENODEV;
}

int send_message(struct port *port, const struct message *message)
{
	struct {
		struct ib_user_mad_hdr hdr;
		struct mad mad;
	} packet = {
		.hdr = {
			.id = port->agent,
			.length = sizeof(struct mad),
			.qpn = htobe32(1),
			.qkey = htobe32(QP1_QKEY),
			.lid = htobe16(port->to),
		},
		.mad = {
			.head = { 1, port->class, 1, 3 /* Send */ },
			.oui = { 0x02, 'N', 'P' },
			.message = *message,
		},
	};
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	uint32_t tid = htobe32(++port->tid);

	memcpy(packet.mad.head + 12, &tid, sizeof(tid));
	packet.mad.head[17] = message->type;
	/* Too many at once are refused for want of memory or room. */
	while (write(port->fd, &packet, sizeof(packet)) != sizeof(packet)) {
		if ((errno != ENOMEM && errno != EAGAIN) || np_now_ms() > deadline)
			return -errno;
		np_pause();
	}
	return 0;
}
