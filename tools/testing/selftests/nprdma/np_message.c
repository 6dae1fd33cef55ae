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
	struct ibv_context *ctx = np_open_device(dev);
	char path[128], name[32] = {};

	memset(port, 0, sizeof(*port));
	if (!ctx)
		return -errno;
	port->to = np_path(ctx, to);
	ibv_close_device(ctx);
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

static struct mad make_mad(const struct message *message, uint8_t class, uint32_t tid)
{
	struct mad mad = {
		.head = { 1, class, 1, 3 /* Send */ },
		.oui = { 0x02, 'N', 'P' },
		.message = *message,
	};

	tid = htobe32(tid);
	memcpy(mad.head + 12, &tid, sizeof(tid));
	mad.head[17] = message->type;
	return mad;
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
			.lid = htobe16(port->to.dlid),
			.grh_present = port->to.is_global,
			.gid_index = port->to.grh.sgid_index,
			.hop_limit = port->to.grh.hop_limit,
		},
		.mad = make_mad(message, port->class, ++port->tid),
	};
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;

	memcpy(packet.hdr.gid, port->to.grh.dgid.raw, sizeof(packet.hdr.gid));
	/* Too many at once are refused for want of memory or room. */
	while (write(port->fd, &packet, sizeof(packet)) != sizeof(packet)) {
		if ((errno != ENOMEM && errno != EAGAIN) || np_now_ms() > deadline)
			return -errno;
		np_pause();
	}
	return 0;
}

/* --- secrets ------------------------------------------------------------------------- */

#define TRACING "/sys/kernel/tracing/"
#define PROBE	TRACING "events/kprobes/np_secret/enable"

/* The members of struct np_msg of the kernel that say of which FAULT it is. */
static const char probe[] = "p:np_secret np_msg_encode type=+0($arg1):u8 answer=+1($arg1):u8 "
			    "src=+12($arg1):u32 dst=+16($arg1):u32 secret=+40($arg1):x64\n";

static int find_secret(uint32_t src, uint32_t dst, uint64_t *secret)
{
	unsigned int type, answer, s, d;
	unsigned long long value;
	int ret = -ENOENT;
	char line[512];
	FILE *f = fopen(TRACING "trace", "re");

	while (f && fgets(line, sizeof(line), f)) {
		const char *at = strstr(line, " type=");

		if (!at || sscanf(at, " type=%u answer=%u src=%u dst=%u secret=0x%llx", &type,
				  &answer, &s, &d, &value) != 5)
			continue;
		if (type != FAULT || answer || s != src || d != dst || !value)
			continue;
		*secret = htobe64(value);
		ret = 0;
	}
	if (f)
		fclose(f);
	return ret;
}

int message_secret(struct np_end *peer, struct ibv_qp *qp, uint32_t to, uint64_t region,
		   uint64_t addr, uint64_t *secret)
{
	struct rdma_np_event event;
	int ret;

	/* Of who was killed on the way */
	np_write_text(PROBE, "0");
	np_write_text(TRACING "kprobe_events", "-:np_secret\n");
	ret = np_write_text(TRACING "kprobe_events", probe);
	ret = ret ?: np_write_text(TRACING "trace", "");
	ret = ret ?: np_write_text(PROBE, "1");
	if (!ret && np_fault_once(peer, qp, region, addr, PAGE, 0, &event) < 0)
		ret = -EIO;
	ret = ret ?: find_secret(qp->qp_num, to, secret);
	np_write_text(PROBE, "0");
	np_write_text(TRACING "kprobe_events", "-:np_secret\n");
	return ret;
}

/* --- who is no kernel ----------------------------------------------------------------- */

int forger_open(struct forger *forger, const char *dev, uint16_t to, uint32_t qkey)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = qkey };
	int ret = np_open(&forger->end, dev, PAGE);
	struct ibv_ah_attr ah = ret ? (struct ibv_ah_attr){} : np_path(forger->end.ctx, to);
	struct ibv_qp_init_attr init = {
		.send_cq = forger->end.cq,
		.recv_cq = forger->end.cq,
		.cap = { .max_send_wr = 8, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_UD,
		.sq_sig_all = 1,
	};

	if (ret)
		return ret;
	forger->qkey = qkey;
	forger->qp = ibv_create_qp(forger->end.pd, &init);
	forger->ah = ibv_create_ah(forger->end.pd, &ah);
	if (!forger->qp || !forger->ah)
		return -errno;
	ret = ibv_modify_qp(forger->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
						IBV_QP_QKEY);
	attr.qp_state = IBV_QPS_RTR;
	ret = ret ?: ibv_modify_qp(forger->qp, &attr, IBV_QP_STATE);
	attr.qp_state = IBV_QPS_RTS;
	return -(ret ?: ibv_modify_qp(forger->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

static int forge(struct forger *forger, const void *data, size_t len, uint32_t qpn)
{
	struct ibv_sge sge = { (uintptr_t)forger->end.buf, len, forger->end.mr->lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.wr.ud = { .ah = forger->ah, .remote_qpn = qpn, .remote_qkey = forger->qkey },
	}, *bad;
	struct ibv_wc wc;
	int ret;

	memcpy(forger->end.buf, data, len);
	ret = ibv_post_send(forger->qp, &wr, &bad);
	return ret ? -ret : np_poll(&forger->end, &wc);
}

int forge_mad(struct forger *forger, const struct message *message)
{
	struct mad mad = make_mad(message, CLASS, 1);

	return forge(forger, &mad, sizeof(mad), 1);
}

int forge_quick(struct forger *forger, const struct message *message, uint32_t qpn)
{
	return forge(forger, message, HEADER + be16toh(message->length), qpn);
}
