// SPDX-License-Identifier: GPL-2.0
/* What the nprdma selftests share; np_test.h says what it is. */
#define _GNU_SOURCE
#include <ctype.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <linux/pci_regs.h>
#include <poll.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "np_test.h"

#define NP_DEPTH	64	/* of send queues */
#define NP_READS	8	/* outstanding READs */

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT	21
#endif

uint64_t np_now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000ULL + ts.tv_nsec / 1000000;
}

void np_pause(void)
{
	struct timespec ts = { .tv_nsec = 2000000 };

	nanosleep(&ts, NULL);
}

/* --- one end of a connection ------------------------------------------------ */

struct ibv_context *np_open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx = NULL;

	errno = ENODEV;
	for (int i = 0; list && list[i]; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			ctx = ibv_open_device(list[i]);
	if (list)
		ibv_free_device_list(list);
	return ctx;
}

/* The port's own address, with IPv4 and UDP, by its index; -ENOENT if there is none. */
static int np_roce_address(struct ibv_context *ctx, struct ibv_gid_entry *entry)
{
	static const uint8_t net[15] = { [10] = 0xff, 0xff, 10, 78, 80 };

	for (uint32_t i = 0; i < 256; i++) {
		int ret = ibv_query_gid_ex(ctx, 1, i, entry, 0);

		if (ret == EINVAL)
			break;
		if (!ret && entry->gid_type == IBV_GID_TYPE_ROCE_V2 &&
		    !memcmp(entry->gid.raw, net, sizeof(net)))
			return 0;
	}
	return -ENOENT;
}

int np_port_lid(struct ibv_context *ctx, uint16_t *lid)
{
	struct ibv_gid_entry entry;
	struct ibv_port_attr port;
	int ret;

	if (ibv_query_port(ctx, 1, &port))
		return -errno;
	*lid = port.lid;
	if (port.link_layer != IBV_LINK_LAYER_ETHERNET)
		return 0;
	ret = np_roce_address(ctx, &entry);
	if (!ret)
		*lid = entry.gid.raw[15];
	return ret;
}

struct ibv_ah_attr np_path(struct ibv_context *ctx, uint16_t lid)
{
	struct ibv_ah_attr path = { .dlid = lid, .port_num = 1 };
	struct ibv_gid_entry entry;
	struct ibv_port_attr port;

	if (ibv_query_port(ctx, 1, &port) || port.link_layer != IBV_LINK_LAYER_ETHERNET ||
	    np_roce_address(ctx, &entry))
		return path;
	path.dlid = 0;
	path.is_global = 1;
	path.grh.dgid = entry.gid;
	path.grh.dgid.raw[15] = lid;
	path.grh.sgid_index = entry.gid_index;
	path.grh.hop_limit = 64;
	return path;
}

struct ibv_qp *np_make_qp(struct np_end *end, struct ibv_pd *pd)
{
	struct ibv_qp_init_attr init = {
		.send_cq = end->cq,
		.recv_cq = end->cq,
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 0,
		.cap = {
			.max_send_wr = NP_DEPTH,
			.max_recv_wr = 1,
			.max_send_sge = 1,
			.max_recv_sge = 1,
		},
	};

	return ibv_create_qp(pd, &init);
}

int np_open(struct np_end *end, const char *dev, size_t buf_len)
{
	int ret;

	memset(end, 0, sizeof(*end));
	end->channel = -1;
	end->ctx = np_open_device(dev);
	if (!end->ctx)
		return -errno;
	ret = np_port_lid(end->ctx, &end->lid);
	if (ret)
		return ret;
	end->pd = ibv_alloc_pd(end->ctx);
	if (!end->pd)
		return -errno;
	end->cq = ibv_create_cq(end->ctx, 2 * NP_DEPTH, NULL, NULL, 0);
	if (!end->cq)
		return -errno;
	end->qp = np_make_qp(end, end->pd);
	if (!end->qp)
		return -errno;
	if (buf_len) {
		end->buf = np_map(buf_len);
		if (!end->buf)
			return -ENOMEM;
		end->buf_len = buf_len;
		end->mr = ibv_reg_mr(end->pd, end->buf, buf_len, IBV_ACCESS_LOCAL_WRITE);
		if (!end->mr)
			return -errno;
	}
	end->channel = np_channel(end->ctx);
	if (end->channel < 0 && end->channel != -EPROTONOSUPPORT)
		return end->channel;
	return 0;
}

int np_close(struct np_end *end)
{
	int ret = 0, err;

#define CLOSE(member, call)						\
	do {								\
		if (end->member) {					\
			err = call(end->member);			\
			if (err && !ret)				\
				ret = err > 0 ? -err : -errno;		\
			end->member = NULL;				\
		}							\
	} while (0)
	CLOSE(qp, ibv_destroy_qp);
	CLOSE(cq, ibv_destroy_cq);
	CLOSE(mr, ibv_dereg_mr);
	CLOSE(pd, ibv_dealloc_pd);
	if (end->channel >= 0)
		close(end->channel);
	end->channel = -1;
	CLOSE(ctx, ibv_close_device);
#undef CLOSE
	if (end->buf)
		munmap(end->buf, end->buf_len);
	end->buf = NULL;
	return ret;
}

struct np_addr np_address(const struct np_end *end)
{
	return (struct np_addr){ .qpn = end->qp->qp_num, .lid = end->lid };
}

int np_qp_connect(struct ibv_qp *qp, struct np_addr to)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
				   IBV_ACCESS_REMOTE_ATOMIC,
	};
	int ret;

	ret = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				       IBV_QP_ACCESS_FLAGS);
	if (ret)
		return -ret;
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_4096,
		.dest_qp_num = to.qpn,
		.max_dest_rd_atomic = NP_READS,
		.min_rnr_timer = 12,
		.ah_attr = np_path(qp->context, to.lid),
	};
	ret = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
				       IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (ret)
		return -ret;
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.max_rd_atomic = NP_READS,
	};
	return -ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
					 IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					 IBV_QP_MAX_QP_RD_ATOMIC);
}

int np_qp_reset(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };

	return -ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

int np_connect(struct np_end *a, struct np_end *b)
{
	int ret = np_qp_connect(a->qp, np_address(b));

	return ret ? ret : np_qp_connect(b->qp, np_address(a));
}

int np_reconnect(struct np_end *a, struct np_end *b)
{
	struct ibv_wc wc;
	int ret = np_qp_reset(a->qp);

	if (!ret)
		ret = np_qp_reset(b->qp);
	while (ibv_poll_cq(a->cq, 1, &wc) > 0)
		;
	while (ibv_poll_cq(b->cq, 1, &wc) > 0)
		;
	return ret ? ret : np_connect(a, b);
}

enum ibv_qp_state np_qp_state(struct ibv_qp *qp)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	if (ibv_query_qp(qp, &attr, IBV_QP_STATE, &init))
		return IBV_QPS_UNKNOWN;
	return attr.qp_state;
}

/* --- the methods of the kernel ------------------------------------------------ */

struct np_call {
	struct ib_uverbs_ioctl_hdr hdr;
	struct ib_uverbs_attr attrs[5];
};

static void np_add(struct np_call *call, unsigned int id, size_t len, uint64_t data)
{
	call->attrs[call->hdr.num_attrs++] = (struct ib_uverbs_attr){
		.attr_id = id,
		.len = len,
		.flags = UVERBS_ATTR_F_MANDATORY,
		.data = data,
	};
}

static void np_add_handle(struct np_call *call, unsigned int id, int64_t handle)
{
	np_add(call, id, 0, handle);
}

/* To the kernel; short data goes by value. */
static void np_add_in(struct np_call *call, unsigned int id, const void *data, size_t len)
{
	uint64_t value = 0;

	if (len <= sizeof(value))
		memcpy(&value, data, len);
	else
		value = (uintptr_t)data;
	np_add(call, id, len, value);
}

static void np_add_out(struct np_call *call, unsigned int id, void *data, size_t len)
{
	np_add(call, id, len, (uintptr_t)data);
}

static int np_ioctl(struct ibv_context *ctx, struct np_call *call, unsigned int object,
		    unsigned int method)
{
	const char *name = ibv_get_device_name(ctx->device);

	call->hdr.object_id = object;
	call->hdr.method_id = method;
	call->hdr.driver_id = !strncmp(name, "mlx5", 4) ? RDMA_DRIVER_MLX5 :
			      !strncmp(name, "siw", 3) ? RDMA_DRIVER_SIW : RDMA_DRIVER_RXE;
	call->hdr.length = sizeof(call->hdr) + call->hdr.num_attrs * sizeof(call->attrs[0]);
	return ioctl(ctx->cmd_fd, RDMA_VERBS_IOCTL, &call->hdr) ? -errno : 0;
}

int np_query(struct ibv_context *ctx, struct rdma_np_query *out)
{
	struct np_call call = {};

	np_add_out(&call, RDMA_NP_ATTR_QUERY_RESP, out, sizeof(*out));
	return np_ioctl(ctx, &call, UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_QUERY);
}

int np_channel_of(struct ibv_context *ctx, uint32_t size)
{
	struct np_call call = {};
	int ret;

	np_add_handle(&call, RDMA_NP_ATTR_CHANNEL_FD, 0);
	np_add_in(&call, RDMA_NP_ATTR_CHANNEL_EVENT_SIZE, &size, sizeof(size));
	ret = np_ioctl(ctx, &call, UVERBS_OBJECT_NP_CHANNEL, RDMA_NP_METHOD_CHANNEL_ALLOC);
	if (ret)
		return ret;
	ret = call.attrs[0].data_s64;
	fcntl(ret, F_SETFL, O_NONBLOCK);
	return ret;
}

int np_channel(struct ibv_context *ctx)
{
	return np_channel_of(ctx, sizeof(struct rdma_np_event));
}

int np_query_mr(struct ibv_mr *mr, struct rdma_np_mr_info *out)
{
	struct np_call call = {};

	np_add_handle(&call, RDMA_NP_ATTR_QUERY_MR_HANDLE, mr->handle);
	np_add_out(&call, RDMA_NP_ATTR_QUERY_MR_RESP, out, sizeof(*out));
	return np_ioctl(mr->context, &call, UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_QUERY_MR);
}

static int np_resolve_any(struct np_end *end, struct ibv_qp *qp, uint32_t rkey, const uint64_t *addr,
			  struct rdma_np_region_info *out)
{
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	int ret;

	do {
		struct np_call call = {};

		memset(out, 0, sizeof(*out));
		np_add_handle(&call, RDMA_NP_ATTR_RESOLVE_QP, qp->handle);
		np_add_handle(&call, RDMA_NP_ATTR_RESOLVE_CHANNEL, end->channel);
		np_add_in(&call, RDMA_NP_ATTR_RESOLVE_RKEY, &rkey, sizeof(rkey));
		np_add_out(&call, RDMA_NP_ATTR_RESOLVE_RESP, out, sizeof(*out));
		if (addr)
			np_add_in(&call, RDMA_NP_ATTR_RESOLVE_ADDR, addr, sizeof(*addr));
		ret = np_ioctl(end->ctx, &call, UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_RESOLVE);
		if (ret == -EBUSY)
			np_pause();
	} while (ret == -EBUSY && np_now_ms() < deadline);
	return ret;
}

int np_resolve_on(struct np_end *end, struct ibv_qp *qp, uint32_t rkey, struct rdma_np_region_info *out)
{
	return np_resolve_any(end, qp, rkey, NULL, out);
}

int np_resolve_at(struct np_end *end, uint32_t rkey, uint64_t addr, struct rdma_np_region_info *out)
{
	return np_resolve_any(end, end->qp, rkey, &addr, out);
}

int np_resolve(struct np_end *end, uint32_t rkey, struct rdma_np_region_info *out)
{
	return np_resolve_on(end, end->qp, rkey, out);
}

static int np_fault_post(struct np_end *end, struct ibv_qp *qp, uint64_t region, uint32_t flags,
			 uint64_t cookie, const struct rdma_np_range *ranges, unsigned int nr)
{
	struct rdma_np_fault_req req = { .region_id = region, .cookie = cookie, .flags = flags };
	struct np_call call = {};

	np_add_handle(&call, RDMA_NP_ATTR_FAULT_QP, qp->handle);
	np_add_handle(&call, RDMA_NP_ATTR_FAULT_CHANNEL, end->channel);
	np_add_in(&call, RDMA_NP_ATTR_FAULT_REQ, &req, sizeof(req));
	np_add_in(&call, RDMA_NP_ATTR_FAULT_RANGES, ranges, nr * sizeof(*ranges));
	return np_ioctl(end->ctx, &call, UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_FAULT);
}

int np_fault_start(struct np_end *end, uint64_t region, uint32_t flags, uint64_t cookie,
		   const struct rdma_np_range *ranges, unsigned int nr)
{
	return np_fault_post(end, end->qp, region, flags, cookie, ranges, nr);
}

int np_next_event(struct np_end *end, struct rdma_np_event *event, int timeout_ms)
{
	struct pollfd p = { .fd = end->channel, .events = POLLIN };
	uint64_t deadline = np_now_ms() + timeout_ms;
	ssize_t n;

	for (;;) {
		n = read(end->channel, event, sizeof(*event));
		if (n == sizeof(*event)) {
			for (unsigned int i = 0; i < RDMA_NP_EVENT_WORDS; i++)
				event->words[i] = le64toh(event->words[i]);
			return 1;
		}
		if (n >= 0)
			return -EPROTO;
		if (errno != EAGAIN && errno != EINTR)
			return -errno;
		if (np_now_ms() >= deadline)
			return 0;
		if (poll(&p, 1, deadline - np_now_ms()) < 0 && errno != EINTR)
			return -errno;
	}
}

int np_wait_event(struct np_end *end, uint32_t type, struct rdma_np_event *event, int timeout_ms)
{
	uint64_t deadline = np_now_ms() + timeout_ms;
	int ret;

	do {
		uint64_t now = np_now_ms();

		ret = np_next_event(end, event, now < deadline ? deadline - now : 0);
	} while (ret > 0 && event->type != type);
	return ret;
}

int np_fault_once(struct np_end *end, struct ibv_qp *qp, uint64_t region, uint64_t addr,
		  uint64_t len, uint32_t flags, struct rdma_np_event *event)
{
	struct rdma_np_range range = { .addr = addr, .length = len };
	uint64_t cookie = ++end->cookie;
	struct rdma_np_event unused;
	int ret;

	if (!event)
		event = &unused;
	ret = np_fault_post(end, qp, region, flags, cookie, &range, 1);
	if (ret)
		return ret;
	do {
		ret = np_wait_event(end, RDMA_NP_EVENT_FAULT, event, NP_WAIT_MS);
		if (ret <= 0)
			return ret ? ret : -ETIMEDOUT;
	} while (event->cookie != cookie);
	end->status = event->status;
	return event->status;
}

int np_fault(struct np_end *end, uint64_t region, uint64_t addr, uint64_t len, uint32_t flags,
	     struct rdma_np_event *event)
{
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	int ret;

	do {
		ret = np_fault_once(end, end->qp, region, addr, len, flags, event);
		if (ret == RDMA_NP_BUSY || ret == -EBUSY)
			np_pause();
	} while ((ret == RDMA_NP_BUSY || ret == -EBUSY) && np_now_ms() < deadline);
	return ret;
}

int np_release(struct np_end *end, uint64_t hold)
{
	struct np_call call = {};

	np_add_handle(&call, RDMA_NP_ATTR_RELEASE_QP, end->qp->handle);
	np_add_in(&call, RDMA_NP_ATTR_RELEASE_HOLD, &hold, sizeof(hold));
	return np_ioctl(end->ctx, &call, UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_RELEASE);
}

int np_forget(struct np_end *end, uint64_t region)
{
	struct np_call call = {};

	np_add_handle(&call, RDMA_NP_ATTR_FORGET_QP, end->qp->handle);
	np_add_in(&call, RDMA_NP_ATTR_FORGET_REGION, &region, sizeof(region));
	return np_ioctl(end->ctx, &call, UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_FORGET);
}

static int64_t np_hold_alloc(struct ibv_mr *mr, const struct rdma_np_hold_req *req, int channel,
			     struct rdma_np_hold_info *out)
{
	struct np_call call = {};
	int ret;

	np_add_handle(&call, RDMA_NP_ATTR_HOLD_ALLOC_HANDLE, 0);
	np_add_handle(&call, RDMA_NP_ATTR_HOLD_ALLOC_MR, mr->handle);
	np_add_in(&call, RDMA_NP_ATTR_HOLD_ALLOC_REQ, req, sizeof(*req));
	np_add_out(&call, RDMA_NP_ATTR_HOLD_ALLOC_RESP, out, sizeof(*out));
	if (channel >= 0)
		np_add_handle(&call, RDMA_NP_ATTR_HOLD_ALLOC_CHANNEL, channel);
	ret = np_ioctl(mr->context, &call, UVERBS_OBJECT_NP_HOLD, RDMA_NP_METHOD_HOLD_ALLOC);
	return ret ? ret : (int64_t)call.attrs[0].data;
}

int64_t np_hold(struct ibv_mr *mr, uint64_t addr, uint64_t len, uint32_t flags,
		struct rdma_np_hold_info *out)
{
	const struct rdma_np_hold_req req = { .addr = addr, .length = len, .flags = flags };

	return np_hold_alloc(mr, &req, -1, out);
}

int64_t np_lease(struct ibv_mr *mr, uint64_t addr, uint64_t len, uint32_t flags, int channel,
		 uint64_t cookie, struct rdma_np_hold_info *out)
{
	const struct rdma_np_hold_req req = {
		.addr = addr, .length = len, .flags = flags | RDMA_NP_FAULT_LEASE, .cookie = cookie,
	};

	return np_hold_alloc(mr, &req, channel, out);
}

int np_hold_free(struct ibv_context *ctx, int64_t handle)
{
	struct np_call call = {};

	np_add_handle(&call, RDMA_NP_ATTR_HOLD_FREE_HANDLE, handle);
	return np_ioctl(ctx, &call, UVERBS_OBJECT_NP_HOLD, RDMA_NP_METHOD_HOLD_FREE);
}

/* --- verbs, one at a time ------------------------------------------------------ */

int np_poll(struct np_end *end, struct ibv_wc *wc)
{
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	unsigned int n = 0;
	int ret;

	do {
		ret = ibv_poll_cq(end->cq, 1, wc);
		if (ret)
			return ret < 0 ? -EIO : (int)wc->status;
	} while (++n % 1024 || np_now_ms() < deadline);
	return -ETIMEDOUT;
}

int np_post(struct np_end *end, enum ibv_wr_opcode op, size_t offset, size_t len, uint64_t addr,
	    uint32_t rkey, unsigned int flags)
{
	struct ibv_sge sge = {
		.addr = (uintptr_t)end->buf + offset,
		.length = len,
		.lkey = end->mr->lkey,
	};
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = op,
		.send_flags = flags,
		.wr.rdma = { .remote_addr = addr, .rkey = rkey },
	}, *bad;

	return -ibv_post_send(end->qp, &wr, &bad);
}

static int np_do(struct np_end *end, enum ibv_wr_opcode op, size_t offset, size_t len,
		 uint64_t addr, uint32_t rkey)
{
	struct ibv_wc wc;
	int ret = np_post(end, op, offset, len, addr, rkey, IBV_SEND_SIGNALED);

	return ret ? ret : np_poll(end, &wc);
}

int np_read(struct np_end *end, size_t offset, size_t len, uint64_t addr, uint32_t rkey)
{
	return np_do(end, IBV_WR_RDMA_READ, offset, len, addr, rkey);
}

int np_write(struct np_end *end, size_t offset, size_t len, uint64_t addr, uint32_t rkey)
{
	return np_do(end, IBV_WR_RDMA_WRITE, offset, len, addr, rkey);
}

static int np_atomic(struct np_end *end, enum ibv_wr_opcode op, size_t offset, uint64_t addr,
		     uint32_t rkey, uint64_t one, uint64_t two)
{
	struct ibv_sge sge = {
		.addr = (uintptr_t)end->buf + offset,
		.length = 8,
		.lkey = end->mr->lkey,
	};
	struct ibv_send_wr wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = op,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.atomic = {
			.remote_addr = addr,
			.rkey = rkey,
			.compare_add = one,
			.swap = two,
		},
	}, *bad;
	struct ibv_wc wc;
	int ret = ibv_post_send(end->qp, &wr, &bad);

	return ret ? -ret : np_poll(end, &wc);
}

int np_fetch_add(struct np_end *end, size_t offset, uint64_t addr, uint32_t rkey, uint64_t add)
{
	return np_atomic(end, IBV_WR_ATOMIC_FETCH_AND_ADD, offset, addr, rkey, add, 0);
}

int np_cmp_swap(struct np_end *end, size_t offset, uint64_t addr, uint32_t rkey, uint64_t expect,
		uint64_t swap)
{
	return np_atomic(end, IBV_WR_ATOMIC_CMP_AND_SWP, offset, addr, rkey, expect, swap);
}

/* --- a region as a peer knows it ------------------------------------------------ */

static uint64_t *np_word_slot(struct np_end *end)
{
	return (uint64_t *)(end->buf + end->buf_len - 8);
}

int np_word(struct np_end *end, const struct rdma_np_region_info *info, size_t off, uint64_t *word)
{
	int ret = np_read(end, end->buf_len - 8, 8, np_word_addr(info, off), info->table_key);

	*word = le64toh(*np_word_slot(end));
	return ret;
}

bool np_all(const void *data, size_t len, uint64_t word)
{
	const uint64_t *p = data;

	for (size_t i = 0; i < len / 8; i++)
		if (p[i] != word)
			return false;
	return true;
}

static bool np_suspicious(const uint8_t *data, size_t len, uint64_t signature)
{
	for (size_t i = 0; i + UNIT <= len; i += UNIT)
		if (*(const uint64_t *)(data + i) == signature)
			return true;
	return false;
}

int np_read_proven(struct np_end *end, const struct rdma_np_region_info *info, size_t at, size_t off,
		   size_t len)
{
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	struct rdma_np_event event;
	int ret;

	for (int i = 0; np_now_ms() < deadline; i++) {
		uint32_t flags = i < 4 ? 0 : RDMA_NP_FAULT_HOLD;

		ret = np_read(end, at, len, np_read_addr(info, off), info->read_key);
		if (ret || !np_suspicious(end->buf + at, len, info->signature))
			return ret;
		ret = np_fault(end, info->region_id, info->base + off, len, flags, &event);
		if (ret)
			return ret < 0 ? ret : -EREMOTEIO;
		if (!flags)
			continue;
		/* Under a hold the data is what it is. */
		ret = np_read(end, at, len, np_read_addr(info, off), info->read_key);
		np_release(end, event.hold_id);
		return ret;
	}
	return -ETIMEDOUT;
}

int np_write_try(struct np_end *end, const struct rdma_np_region_info *info, size_t at, size_t off,
		 size_t len, uint64_t word, uint64_t *after)
{
	struct ibv_sge sge[2] = {
		{ .addr = (uintptr_t)end->buf + at, .length = len, .lkey = end->mr->lkey },
		{ .addr = (uintptr_t)np_word_slot(end), .length = 8, .lkey = end->mr->lkey },
	};
	struct ibv_send_wr read = {
		.sg_list = &sge[1],
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_READ,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = np_word_addr(info, off), .rkey = info->table_key },
	};
	struct ibv_send_wr write = {
		.sg_list = &sge[0],
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = np_write_addr(info, off), .rkey = info->write_key },
	}, *bad;
	struct ibv_wc wc;
	int ret;

	/* An adapter that executes the READ first would prove a WRITE that is still to come. */
	if (info->read_order == RDMA_NP_READ_IN_ORDER) {
		write.next = &read;
		write.send_flags = 0;
	}
	ret = ibv_post_send(end->qp, &write, &bad);
	if (ret)
		return -ret;
	ret = np_poll(end, &wc);
	if (!ret && !write.next) {
		ret = ibv_post_send(end->qp, &read, &bad);
		if (ret)
			return -ret;
		ret = np_poll(end, &wc);
	}
	if (ret)
		return ret < 0 ? ret : -EREMOTEIO;
	if (after)
		*after = le64toh(*np_word_slot(end));
	return np_writable(word) && le64toh(*np_word_slot(end)) == word;
}

int np_write_proven(struct np_end *end, const struct rdma_np_region_info *info, size_t at, size_t off,
		    size_t len)
{
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	struct rdma_np_event event = {};
	uint64_t word;
	int ret;

	ret = np_word(end, info, off, &word);
	if (ret)
		return ret < 0 ? ret : -EREMOTEIO;
	for (int i = 0; np_now_ms() < deadline; i++) {
		uint32_t flags = RDMA_NP_FAULT_WRITE | (i < 4 ? 0 : RDMA_NP_FAULT_HOLD);

		if (np_writable(word)) {
			ret = np_write_try(end, info, at, off, len, word, NULL);
			if (event.hold_id)
				np_release(end, event.hold_id);
			event.hold_id = 0;
			if (ret)
				return ret < 0 ? ret : 0;
		}
		ret = np_fault(end, info->region_id, info->base + off, len, flags, &event);
		if (ret)
			return ret < 0 ? ret : -EREMOTEIO;
		word = event.words[0];
	}
	if (event.hold_id)
		np_release(end, event.hold_id);
	return -ETIMEDOUT;
}

/* --- memory from the outside ------------------------------------------------------ */

void *np_map_aligned(size_t len, size_t align)
{
	uint8_t *p, *start;

	p = mmap(NULL, len + align, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return NULL;
	start = (uint8_t *)(((uintptr_t)p + align - 1) & ~(align - 1));
	if (start > p)
		munmap(p, start - p);
	munmap(start + len, p + align - start);
	return start;
}

void *np_map(size_t len)
{
	void *p = np_map_aligned(len, HUGE_PAGE);

	if (p)
		madvise(p, len, MADV_NOHUGEPAGE);
	return p;
}

/* Of @n pages at once; as if nothing was there if they cannot be told. */
static void np_pagemap(const void *addr, uint64_t *entries, size_t n)
{
	int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);

	if (fd < 0 || pread(fd, entries, n * 8, (uintptr_t)addr / PAGE * 8) != (ssize_t)(n * 8))
		memset(entries, 0, n * 8);
	if (fd >= 0)
		close(fd);
}

bool np_present(const void *addr)
{
	uint64_t entry;

	np_pagemap(addr, &entry, 1);
	return entry >> 63;
}

size_t np_swapped(const void *addr, size_t pages)
{
	uint64_t entries[64];
	size_t out = 0;

	for (size_t n; pages; pages -= n, addr = (const char *)addr + n * PAGE) {
		n = pages < 64 ? pages : 64;
		np_pagemap(addr, entries, n);
		for (size_t i = 0; i < n; i++)
			out += entries[i] >> 62 & 1;
	}
	return out;
}

long np_page_out(void *addr, size_t len)
{
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	cpu_set_t before, one;
	unsigned int cpu = 0;
	long left;

	/* Pages that a CPU has just added to its list of new pages stay: ask on each. */
	if (sched_getaffinity(0, sizeof(before), &before))
		return -errno;
	do {
		do {
			cpu = (cpu + 1) % CPU_SETSIZE;
		} while (!CPU_ISSET(cpu, &before));
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		sched_setaffinity(0, sizeof(one), &one);
		left = madvise(addr, len, MADV_PAGEOUT) ? -errno : 0;
		for (size_t i = 0; !(left < 0) && i < len; i += PAGE)
			left += np_present((char *)addr + i);
	} while (left > 0 && np_now_ms() < deadline);
	sched_setaffinity(0, sizeof(before), &before);
	return left;
}

uint64_t np_pattern(uint64_t seed, size_t word)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15ULL + word * 0xbf58476d1ce4e5b9ULL + 1;

	x ^= x >> 31;
	x *= 0x94d049bb133111ebULL;
	return x ^ x >> 29;
}

void np_fill(void *addr, size_t len, uint64_t seed)
{
	uint64_t *p = addr;

	for (size_t i = 0; i < len / 8; i++)
		p[i] = np_pattern(seed, i);
}

ssize_t np_differs(const void *addr, size_t len, uint64_t seed)
{
	const uint64_t *p = addr;

	for (size_t i = 0; i < len / 8; i++)
		if (p[i] != np_pattern(seed, i))
			return i * 8;
	return -1;
}

bool np_disk_swap(void)
{
	FILE *f = fopen("/proc/swaps", "re");
	char line[512];
	int disks = 0;

	if (!f)
		return false;
	/* The first line is the heading. */
	if (!fgets(line, sizeof(line), f))
		line[0] = 0;
	while (fgets(line, sizeof(line), f)) {
		if (strstr(line, "zram"))
			disks = -1;
		else if (disks >= 0)
			disks++;
	}
	fclose(f);
	return disks > 0;
}

static long np_field(const char *file, const char *name)
{
	FILE *f = fopen(file, "re");
	size_t n = strlen(name);
	char line[512];
	long value = -1;

	if (!f)
		return -1;
	while (fgets(line, sizeof(line), f)) {
		if (!strncmp(line, name, n) && (line[n] == ':' || isspace((unsigned char)line[n]))) {
			value = strtol(line + n + 1, NULL, 10);
			break;
		}
	}
	fclose(f);
	return value;
}

long np_status_kb(const char *field)
{
	return np_field("/proc/self/status", field);
}

long np_vmstat(const char *name)
{
	/* CPUs keep small differences to themselves; this has them added up. */
	int fd = open("/proc/sys/vm/stat_refresh", O_RDONLY | O_CLOEXEC);
	char c;

	if (fd >= 0) {
		if (read(fd, &c, 1) < 0)
			perror("stat_refresh");
		close(fd);
	}
	return np_field("/proc/vmstat", name);
}

long np_pinned(void)
{
	return np_vmstat("nr_foll_pin_acquired") - np_vmstat("nr_foll_pin_released");
}

uint64_t np_frame_of(const void *addr)
{
	int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	uint64_t entry = 0;

	if (fd < 0)
		return 0;
	if (pread(fd, &entry, 8, (uintptr_t)addr / PAGE * 8) != 8)
		entry = 0;
	close(fd);
	return entry >> 63 ? entry & ((1ULL << 55) - 1) : 0;
}

uint64_t np_frame_flags(const uint8_t *p)
{
	uint64_t entry = 0, flags = 0;
	int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	int all = open("/proc/kpageflags", O_RDONLY | O_CLOEXEC);

	if (pread(map, &entry, sizeof(entry), (uintptr_t)p / PAGE * sizeof(entry)) ==
	    sizeof(entry) && entry >> 63)
		pread(all, &flags, sizeof(flags), (entry & ((1ULL << 55) - 1)) * sizeof(flags));
	close(map);
	close(all);
	return flags;
}

int np_set_idle(uint64_t frame)
{
	uint64_t word = 1ULL << frame % 64;
	int fd = open(NP_PAGE_IDLE, O_WRONLY | O_CLOEXEC), ret = 0;

	if (fd < 0)
		return -errno;
	if (pwrite(fd, &word, 8, frame / 64 * 8) != 8)
		ret = -errno;
	close(fd);
	return ret;
}

long np_read_text(const char *path, char *text, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;

	if (fd < 0)
		return -errno;
	n = read(fd, text, size - 1);
	close(fd);
	text[n < 0 ? 0 : n] = 0;
	return n < 0 ? -EIO : n;
}

int np_write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC | (*text ? 0 : O_TRUNC)), ret = 0;

	if (fd < 0)
		return -errno;
	if (write(fd, text, strlen(text)) < 0)
		ret = -errno;
	close(fd);
	return ret;
}

#define NP_KSM "/sys/kernel/mm/ksm/"

int np_ksm_start(void)
{
	int ret = np_write_text(NP_KSM "pages_to_scan", "1000");

	if (!ret)
		ret = np_write_text(NP_KSM "sleep_millisecs", "1");
	return ret ? ret : np_write_text(NP_KSM "run", "1");
}

int np_ksm_stop(void)
{
	return np_write_text(NP_KSM "run", "2");
}

long np_ksm_sharing(void)
{
	FILE *f = fopen(NP_KSM "pages_sharing", "re");
	long pages;

	if (!f || fscanf(f, "%ld", &pages) != 1)
		pages = -1;
	if (f)
		fclose(f);
	return pages;
}

static int np_write_file(const char *group, const char *name, const char *text)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/%s", group, name);
	return np_write_text(path, text);
}

int np_group_enter(const char *max, const char *swap_max)
{
	int ret;

	ret = np_write_file("/sys/fs/cgroup", "cgroup.subtree_control", "+memory");
	if (!ret && mkdir(NP_GROUP, 0755) && errno != EEXIST)
		ret = -errno;
	if (!ret)
		ret = np_write_file(NP_GROUP, "memory.max", max);
	if (!ret)
		ret = np_write_file(NP_GROUP, "memory.swap.max", swap_max);
	if (!ret)
		ret = np_write_file(NP_GROUP, "cgroup.procs", "0");
	return ret;
}

bool np_group_remove(void)
{
	return np_wait_until((!rmdir(NP_GROUP_OURS) || errno == ENOENT) &&
			     (!rmdir(NP_GROUP_THEIRS) || errno == ENOENT) &&
			     (!rmdir(NP_GROUP) || errno == ENOENT));
}

long np_meminfo_kb(const char *field)
{
	return np_field("/proc/meminfo", field);
}

/* --- the host ------------------------------------------------------------------------ */

/* The vendor-specific capability of the PCI function; nphca.h describes it. */
static int np_hca_open(const char *dev, unsigned int reg, int *cap)
{
	char path[128];
	uint8_t at = 0;
	uint32_t index = reg;
	int fd;

	snprintf(path, sizeof(path), "/sys/class/infiniband/%s/device/config", dev);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (pread(fd, &at, 1, 0x34) == 1) {
		while (at >= 0x40) {
			uint8_t head[2];

			if (pread(fd, head, 2, at) != 2)
				break;
			if (head[0] == 9) {
				if (pwrite(fd, &index, 4, at + 4) != 4)
					break;
				*cap = at;
				return fd;
			}
			at = head[1];
		}
	}
	close(fd);
	return -ENXIO;
}

int np_hca_get(const char *dev, unsigned int reg, uint64_t *value)
{
	uint32_t low, high;
	int cap, fd = np_hca_open(dev, reg, &cap), ret = 0;

	if (fd < 0)
		return fd;
	if (pread(fd, &low, 4, cap + 8) != 4 || pread(fd, &high, 4, cap + 12) != 4)
		ret = -EIO;
	else
		*value = (uint64_t)high << 32 | low;
	close(fd);
	return ret;
}

int np_hca_set(const char *dev, unsigned int reg, uint64_t value)
{
	uint32_t low = value, high = value >> 32;
	int cap, fd = np_hca_open(dev, reg, &cap), ret = 0;

	if (fd < 0)
		return fd;
	if (pwrite(fd, &high, 4, cap + 12) != 4 || pwrite(fd, &low, 4, cap + 8) != 4)
		ret = -EIO;
	close(fd);
	return ret;
}

static const char *const np_devs[] = { NP_OWNER_DEV, NP_PEER_DEV };

/* The first region of a device makes things that stay; have them before we count. */
static void np_warm_up(void)
{
	static char page[4096];

	for (int d = 0; d < 2; d++) {
		struct ibv_context *ctx = np_open_device(np_devs[d]);
		struct ibv_pd *pd = ctx ? ibv_alloc_pd(ctx) : NULL;
		static const int access[] = { NP_RIGHTS, NP_RIGHTS | NP_UNPINNED };

		for (int i = 0; pd && i < 2; i++) {
			struct ibv_mr *mr = ibv_reg_mr(pd, page, PAGE, access[i]);

			if (mr)
				ibv_dereg_mr(mr);
		}
		if (pd)
			ibv_dealloc_pd(pd);
		if (ctx)
			ibv_close_device(ctx);
	}
}

#define NP_DRIVER "/sys/bus/pci/drivers/mlx5_core"

#define NP_PCI "/sys/bus/pci"

/* What "scripts/vm" says to a request: 0 if that is "ok". */
static int np_ask_host(const char *action, const char *dev)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	const char *path = getenv("NPRDMA_CTL");
	char text[256] = {};
	int fd, ret = -EIO;

	if (!path)
		return -ENXIO;
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
	snprintf(text, sizeof(text), "%s %s", action, dev);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	if (!connect(fd, (struct sockaddr *)&addr, sizeof(addr)) &&
	    send(fd, text, strlen(text), MSG_NOSIGNAL) > 0 &&
	    recv(fd, text, sizeof(text) - 1, 0) >= 2 && !strncmp(text, "ok", 2))
		ret = 0;
	close(fd);
	return ret;
}

/*
 * Cuts the power of the function's slot behind its driver's back, which is the end of the HCA,
 * and turns it on again: what is left is an empty slot. Its interrupt waits for that, because
 * the kernel takes a slot without power for one that it has emptied itself.
 */
int np_slot_tear_out(const char *function)
{
	char path[128];
	const uint16_t all_off = PCI_EXP_SLTCTL_PWR_IND_OFF | PCI_EXP_SLTCTL_PWR_OFF;
	uint16_t control, off;
	uint8_t at = 0, head[2];
	int fd, ret = -ENXIO;

	/* A link, whose parent is the port of the slot. */
	snprintf(path, sizeof(path), NP_PCI "/devices/%s/../config", function);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (pread(fd, &at, 1, PCI_CAPABILITY_LIST) != 1)
		at = 0;
	while (at && pread(fd, head, 2, at) == 2 && head[0] != PCI_CAP_ID_EXP)
		at = head[1];
	if (at && pread(fd, &control, 2, at + PCI_EXP_SLTCTL) == 2) {
		off = (control & ~PCI_EXP_SLTCTL_HPIE) | all_off;
		ret = pwrite(fd, &off, 2, at + PCI_EXP_SLTCTL) == 2 &&
		      pwrite(fd, &control, 2, at + PCI_EXP_SLTCTL) == 2 ? 0 : -EIO;
		/* The last that the kernel does with it, to whatever is there by then. */
		if (!ret && !np_wait_until(pread(fd, &off, 2, at + PCI_EXP_SLTCTL) == 2 &&
					   (off & all_off) == all_off))
			ret = -ETIMEDOUT;
	}
	close(fd);
	return ret;
}

int np_device_enable(const char *function)
{
	char path[128];

	snprintf(path, sizeof(path), NP_PCI "/devices/%s", function);
	return np_write_file(path, "enable", "1");
}

volatile void *np_device_registers(const char *function, size_t offset)
{
	char path[128];
	void *page;
	int fd;

	snprintf(path, sizeof(path), NP_PCI "/devices/%s/resource0", function);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return NULL;
	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
	close(fd);
	return page == MAP_FAILED ? NULL : page;
}

int np_device_remove(const char *dev, enum np_removal how, char function[NP_FUNCTION_LEN])
{
	char path[128], target[PATH_MAX] = {};
	int ret;

	snprintf(path, sizeof(path), "/sys/class/infiniband/%s/device", dev);
	if (readlink(path, target, sizeof(target) - 1) < 0)
		return -errno;
	snprintf(function, NP_FUNCTION_LEN, "%s", basename(target));
	if (how == NP_UNBIND)
		return np_write_file(NP_DRIVER, "unbind", function);
	snprintf(path, sizeof(path), NP_PCI "/devices/%s", function);
	if (how == NP_REMOVE)
		return np_write_file(path, "remove", "1");
	ret = np_ask_host("unplug", dev);
	if (ret)
		return ret;
	return np_wait_until(access(path, F_OK)) ? 0 : -ETIMEDOUT;
}

static bool np_port_active(const char *dev)
{
	struct ibv_context *ctx = np_open_device(dev);
	struct ibv_port_attr port = {};

	if (!ctx)
		return false;
	if (ibv_query_port(ctx, 1, &port))
		port.state = IBV_PORT_NOP;
	ibv_close_device(ctx);
	return port.state == IBV_PORT_ACTIVE;
}

int np_device_return(const char *dev, enum np_removal how, const char *function)
{
	int ret = 0;

	if (how == NP_UNBIND)
		ret = np_write_file(NP_DRIVER, "bind", function);
	else if (how == NP_REMOVE)
		ret = np_write_file(NP_PCI, "rescan", "1");
	else if (!np_wait_until(!np_ask_host("plug", dev)))
		/* Not before the slot has let go of what was in it. */
		ret = -ETIMEDOUT;
	if (ret)
		return ret;
	if (!np_wait_until(np_port_active(dev)))
		return -ETIMEDOUT;
	np_warm_up();
	return 0;
}

static const char *const np_object_names[] = { "pd", "cq", "qp", "mr", "ctx" };

/* "rdma" prints one line for each device: "0: mlx5_0: pd 3 cq 4 qp 5 ..." */
static int np_objects(struct np_usage *usage)
{
	FILE *f = popen("rdma resource show", "re");
	char line[512];
	int found = 0;

	if (!f)
		return -errno;
	while (fgets(line, sizeof(line), f)) {
		for (int d = 0; d < 2; d++) {
			if (!strstr(line, np_devs[d]))
				continue;
			found++;
			for (int i = 0; i < 5; i++) {
				char name[8];
				const char *at;

				snprintf(name, sizeof(name), " %s ", np_object_names[i]);
				at = strstr(line, name);
				usage->objects[d][i] = at ? atol(at + strlen(name)) : -1;
			}
		}
	}
	return pclose(f) || found != 2 ? -EIO : 0;
}

int np_usage_get(struct np_usage *usage)
{
	int ret;

	memset(usage, 0, sizeof(*usage));
	ret = np_objects(usage);
	if (ret)
		return ret;
	usage->pins = np_pinned();
	usage->unevictable = np_vmstat("nr_unevictable");
	for (int d = 0; d < 2; d++) {
		ret = np_hca_get(np_devs[d], NP_HCA_DMA_FAULTS, &usage->dma_faults[d]);
		if (ret)
			return ret;
	}
	return 0;
}

static int np_set_parameter(const char *name, unsigned int value)
{
	char text[16];

	snprintf(text, sizeof(text), "%u", value);
	return np_write_file("/sys/module/ib_nprdma/parameters", name, text);
}

int np_set_hold_ms(unsigned int ms)
{
	return np_set_parameter("hold_ms", ms);
}

int np_set_fault_around(unsigned int pages)
{
	return np_set_parameter("fault_around", pages);
}

int np_usage_start(struct np_usage *usage)
{
	int ret = np_set_hold_ms(NP_HOLD_MS);

	if (!ret)
		ret = np_set_fault_around(1);
	/* A kernel without our patches has none of these */
	if (ret && ret != -ENOENT)
		return ret;
	np_warm_up();
	return np_usage_get(usage);
}

static const char *np_usage_differs(const struct np_usage *before)
{
	static char text[160];
	struct np_usage now;

	if (np_usage_get(&now))
		return "usage cannot be read";
	for (int d = 0; d < 2; d++) {
		for (int i = 0; i < 5; i++) {
			if (now.objects[d][i] == before->objects[d][i])
				continue;
			snprintf(text, sizeof(text), "%s has %ld %s, had %ld", np_devs[d],
				 now.objects[d][i], np_object_names[i], before->objects[d][i]);
			return text;
		}
		if (now.dma_faults[d] != before->dma_faults[d]) {
			snprintf(text, sizeof(text), "the IOMMU refused %lu accesses of %s",
				 (unsigned long)(now.dma_faults[d] - before->dma_faults[d]),
				 np_devs[d]);
			return text;
		}
	}
	if (now.pins > before->pins) {
		snprintf(text, sizeof(text), "%ld pages pinned, were %ld", now.pins, before->pins);
		return text;
	}
	if (now.unevictable > before->unevictable) {
		snprintf(text, sizeof(text), "%ld pages unevictable, were %ld", now.unevictable,
			 before->unevictable);
		return text;
	}
	return NULL;
}

const char *np_usage_wait(const struct np_usage *before)
{
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	const char *text;

	while ((text = np_usage_differs(before)) && np_now_ms() < deadline)
		np_pause();
	return text;
}

pid_t np_fork(void)
{
	pid_t parent = getpid(), child = fork();

	/* The parent may have died before we could ask to be told. */
	if (!child && (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != parent))
		_exit(127);
	return child;
}
