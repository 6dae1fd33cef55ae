/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "fake_verbs.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <iterator>
#include <map>
#include <memory>
#include <rdma/nprdma.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <string>
#include <sys/eventfd.h>
#include <unistd.h>
#include <utility>

/* Macros that choose between functions; these here are the functions. */
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define EXPORT extern "C" __attribute__((visibility("default")))

__attribute__((visibility("default"))) std::atomic<unsigned> fake_holds_freed{0};

__attribute__((visibility("default"))) ibv_device fake_device{};
__attribute__((visibility("default"))) fake_registration fake_registered{};
__attribute__((visibility("default"))) std::atomic<std::uint32_t> fake_stays{UINT32_MAX};
__attribute__((visibility("default"))) std::atomic<bool> fake_without_nprdma{false};
__attribute__((visibility("default"))) std::vector<std::uint32_t> fake_wq_keys;

using namespace fake;

namespace {

/* The lowest that is free, as the kernel has it. */
std::uint32_t new_handle(context &c)
{
	const std::lock_guard lock(c.mutex);
	std::uint32_t h = c.first_handle;

	while (!c.handles.insert(h).second)
		++h;
	return h;
}

void free_handle(context &c, std::uint32_t h)
{
	const std::lock_guard lock(c.mutex);

	c.handles.erase(h);
}

void complete(ibv_cq *c, std::uint64_t wr_id, std::uint32_t qp_num, ibv_wc_opcode opcode)
{
	cq &q = of(c);
	const std::lock_guard lock(q.mutex);
	ibv_wc wc{};

	wc.wr_id = wr_id;
	wc.qp_num = qp_num;
	wc.opcode = opcode;
	q.completions.push_back(wc);
}

int post_send(ibv_qp *q, ibv_send_wr *wr, ibv_send_wr **)
{
	qp &p = of(q);

	for (; wr; wr = wr->next) {
		p.lkey = wr->num_sge ? wr->sg_list[0].lkey : 0;
		p.wr_id = wr->wr_id;
		if (wr->opcode == IBV_WR_BIND_MW)
			p.window = wr->bind_mw.rkey;
		p.sends.fetch_add(1);
		if (wr->send_flags & IBV_SEND_SIGNALED)
			complete(q->send_cq, wr->wr_id, q->qp_num, IBV_WC_SEND);
	}
	return 0;
}

int post_recv(ibv_qp *q, ibv_recv_wr *wr, ibv_recv_wr **)
{
	qp &p = of(q);

	for (; wr; wr = wr->next) {
		p.lkey = wr->num_sge ? wr->sg_list[0].lkey : 0;
		p.receives.fetch_add(1);
		complete(q->recv_cq, wr->wr_id, q->qp_num, IBV_WC_RECV);
	}
	return 0;
}

int post_srq_recv(ibv_srq *s, ibv_recv_wr *wr, ibv_recv_wr **)
{
	srq &r = of(s);

	for (; wr; wr = wr->next) {
		r.lkey = wr->num_sge ? wr->sg_list[0].lkey : 0;
		r.receives.fetch_add(1);
	}
	return 0;
}

int poll_cq(ibv_cq *c, int n, ibv_wc *wc)
{
	cq &q = of(c);
	const std::lock_guard lock(q.mutex);
	int got = 0;

	q.polls.fetch_add(1);
	while (got < n && q.polled < q.completions.size())
		wc[got++] = q.completions[q.polled++];
	if (q.polled == q.completions.size()) {
		q.completions.clear();
		q.polled = 0;
	}
	return got;
}

int req_notify_cq(ibv_cq *c, int)
{
	of(c).arms.fetch_add(1);
	return 0;
}

int bind_mw(ibv_qp *q, ibv_mw *, ibv_mw_bind *)
{
	of(q).sends.fetch_add(1);
	return 0;
}

/* Of multicast, by queue pair, of which there are no others. */
std::mutex groups_mutex;
std::map<const ibv_qp *, std::set<std::string>> groups;

template <class F>
int with_groups(const ibv_qp *q, F &&f)
{
	const std::lock_guard lock(groups_mutex);
	const auto it = groups.find(q);

	return it == groups.end() ? EINVAL : f(it->second);
}

std::string name_of(const ibv_gid &gid, std::uint16_t lid)
{
	return std::string(std::begin(gid.raw), std::end(gid.raw)) + std::to_string(lid);
}

ibv_qp *create(ibv_context *c, ibv_pd *pd, ibv_cq *send_cq, ibv_cq *recv_cq, ibv_srq *s, ibv_qp_type type)
{
	static std::atomic<std::uint32_t> numbers{0};
	auto q = std::make_unique<qp>();
	ibv_qp &v = q->verbs.qp_base;

	v.context = c;
	v.pd = pd;
	v.send_cq = send_cq;
	v.recv_cq = recv_cq;
	v.srq = s;
	v.qp_type = type;
	v.handle = new_handle(of(c));
	v.qp_num = ++numbers;
	{
		const std::lock_guard lock(groups_mutex);
		groups[&v];
	}
	return &q.release()->verbs.qp_base;
}

/* Between ibv_wr_start() and the end; elsewhere a provider has no lock, and the program is wrong. */
qp &begun_of(ibv_qp_ex *q)
{
	if (!of(&q->qp_base).begun)
		std::abort();
	return of(&q->qp_base);
}

void set_building(ibv_qp_ex &ex)
{
	ex.wr_start = [](ibv_qp_ex *q) {
		qp &p = of(&q->qp_base);

		if (std::exchange(p.begun, true))
			std::abort();
		p.built.clear();
	};
	ex.wr_send = [](ibv_qp_ex *q) { (void)begun_of(q); };
	ex.wr_set_sge = [](ibv_qp_ex *q, std::uint32_t lkey, std::uint64_t addr, std::uint32_t length) {
		begun_of(q).built.push_back({addr, length, lkey});
	};
	ex.wr_set_sge_list = [](ibv_qp_ex *q, std::size_t n, const ibv_sge *list) {
		qp &p = begun_of(q);

		p.built.insert(p.built.end(), list, list + n);
	};
	ex.wr_complete = [](ibv_qp_ex *q) {
		qp &p = begun_of(q);

		p.begun = false;
		p.sends.fetch_add(1);
		return 0;
	};
	ex.wr_abort = [](ibv_qp_ex *q) {
		qp &p = begun_of(q);

		p.begun = false;
		++p.aborts;
	};
}

ibv_qp *create_qp_ex(ibv_context *c, ibv_qp_init_attr_ex *attr)
{
	ibv_qp *const q = create(c, attr->pd, attr->send_cq, attr->recv_cq, attr->srq, attr->qp_type);

	if (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) {
		of(q).extended = true;
		set_building(of(q).verbs);
	}
	return q;
}

ibv_cq *new_cq(ibv_context *c, int cqe, void *cq_context, ibv_comp_channel *channel)
{
	if (cqe <= 0) {
		errno = EINVAL;
		return nullptr;
	}
	auto q = std::make_unique<cq>();
	ibv_cq *const v = ibv_cq_ex_to_cq(&q->verbs);

	v->context = c;
	v->channel = channel;
	v->cq_context = cq_context;
	v->cqe = cqe;
	v->handle = new_handle(of(c));
	if (channel)
		++channel->refcnt;
	return ibv_cq_ex_to_cq(&q.release()->verbs);
}

/* Of its functions none works: the library has to have its own. */
ibv_cq_ex *create_cq_ex(ibv_context *c, ibv_cq_init_attr_ex *attr)
{
	ibv_cq *const q = new_cq(c, static_cast<int>(attr->cqe), attr->cq_context, attr->channel);

	if (!q)
		return nullptr;
	of(q).wc_flags = attr->wc_flags;
	return &of(q).verbs;
}

ibv_srq *new_srq(ibv_context *c, ibv_pd *pd)
{
	auto s = std::make_unique<srq>();

	s->verbs.context = c;
	s->verbs.pd = pd;
	s->verbs.handle = new_handle(of(c));
	return &s.release()->verbs;
}

ibv_srq *create_srq_ex(ibv_context *c, ibv_srq_init_attr_ex *attr)
{
	return new_srq(c, attr->pd);
}

ibv_mr *new_mr(ibv_pd *pd, void *addr, std::size_t length, std::uint64_t iova, unsigned access)
{
	auto m = std::make_unique<mr>();

	context &c = of(pd->context);
	if (const int error = access & RDMA_NP_ACCESS_UNPINNED ? c.refuses_unpinned : c.refuses_pinned) {
		errno = error;
		return nullptr;
	}
	m->iova = iova;
	m->access = access;
	m->verbs.context = pd->context;
	m->verbs.pd = pd;
	m->verbs.addr = addr;
	m->verbs.length = length;
	m->verbs.handle = new_handle(of(pd->context));
	m->verbs.lkey = m->verbs.rkey = (m->verbs.handle + 1) << 8;
	of(pd->context).pinned += !(access & RDMA_NP_ACCESS_UNPINNED);
	if (access & RDMA_NP_ACCESS_UNPINNED) {
		const std::lock_guard lock(c.mutex);
		c.unpinned.insert(m->verbs.handle);
	}
	{
		static std::mutex last;
		const std::lock_guard lock(last);
		fake_registered = {pd, iova, access, m->verbs.lkey};
	}
	return &m.release()->verbs;
}

ibv_wq *create_wq(ibv_context *c, ibv_wq_init_attr *attr)
{
	auto w = std::make_unique<ibv_wq>();

	w->context = c;
	w->cq = attr->cq;
	w->handle = new_handle(of(c));
	w->post_recv = [](ibv_wq *q, ibv_recv_wr *wr, ibv_recv_wr **) {
		for (; wr; wr = wr->next) {
			fake_wq_keys.clear();
			for (int k = 0; k < wr->num_sge; ++k)
				fake_wq_keys.push_back(wr->sg_list[k].lkey);
			complete(q->cq, wr->wr_id, UINT32_MAX, IBV_WC_RECV);
		}
		return 0;
	};
	return w.release();
}

int destroy_wq(ibv_wq *w)
{
	if (w->handle == fake_stays)
		return EBUSY;
	const std::unique_ptr<ibv_wq> owned(w);
	free_handle(of(w->context), w->handle);
	return 0;
}

int query_device_ex(ibv_context *, const ibv_query_device_ex_input *, ibv_device_attr_ex *attr, std::size_t size)
{
	std::memset(attr, 0, size);
	return 0;
}

/* --- the kernel --------------------------------------------------------- */

template <class T>
T &pointed_to(const ib_uverbs_attr &a)
{
	return *reinterpret_cast<T *>(static_cast<std::uintptr_t>(a.data));
}

std::mutex contexts_mutex;
std::set<context *> contexts;

context *by_fd(int fd)
{
	const std::lock_guard lock(contexts_mutex);
	const auto it = std::find_if(contexts.begin(), contexts.end(),
				     [&](const context *c) { return c->verbs.context.cmd_fd == fd; });

	return it == contexts.end() ? nullptr : *it;
}

/* 0 or an errno. */
int method(context &c, ib_uverbs_ioctl_hdr &h)
{
	const std::uint32_t id = std::uint32_t{h.object_id} << 16 | h.method_id;

	switch (id) {
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_QUERY:
		if (fake_without_nprdma)
			return EOPNOTSUPP;
		pointed_to<rdma_np_query>(h.attrs[0]) = {RDMA_NP_ABI_VERSION, RDMA_NP_QUERY_OWNER, 8, 512, 4, 0};
		return 0;
	case UVERBS_OBJECT_NP_CHANNEL << 16 | RDMA_NP_METHOD_CHANNEL_ALLOC:
		h.attrs[0].data_s64 = eventfd(0, EFD_CLOEXEC);
		return h.attrs[0].data_s64 < 0 ? errno : 0;
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_RESOLVE:
		if (h.attrs[2].data != unpinned_rkey)
			return EACCES;
		pointed_to<rdma_np_region_info>(h.attrs[3]) = {
			1, 1 << 20, 1 << 20, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE, 3, 1, 2, 1 << 20, 1 << 20, 0,
			0x5a17c0de9e3779b9, 12, 6, RDMA_NP_READ_IN_ORDER, 0, RDMA_NP_MAX_PAGES, RDMA_NP_MAX_RANGES, 16, {}};
		return 0;
	case UVERBS_OBJECT_NP_HOLD << 16 | RDMA_NP_METHOD_HOLD_ALLOC:
		pointed_to<rdma_np_hold_info>(h.attrs[3]) = {pointed_to<rdma_np_hold_req>(h.attrs[2]).addr, held_lkey, 0};
		h.attrs[0].data = 1;
		c.holds.fetch_add(1);
		return 0;
	case UVERBS_OBJECT_NP_HOLD << 16 | RDMA_NP_METHOD_HOLD_FREE:
		c.holds.fetch_sub(1);
		fake_holds_freed.fetch_add(1);
		return 0;
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_QUERY_MR:
		/* Those of this process are not leased, which no test here is about. */
		if (const std::lock_guard lock(c.mutex); c.handles.contains(static_cast<std::uint32_t>(h.attrs[0].data)))
			return EOPNOTSUPP;
		if (h.attrs[0].data >= foreign_pinned)
			return EINVAL;
		pointed_to<rdma_np_mr_info>(h.attrs[1]) = {};
		pointed_to<rdma_np_mr_info>(h.attrs[1]).length = 4096;
		return 0;
	default:
		return EOPNOTSUPP;
	}
}

} // namespace

EXPORT int fake_ioctl(int fd, void *arg)
{
	context *const c = by_fd(fd);

	errno = c ? method(*c, *static_cast<ib_uverbs_ioctl_hdr *>(arg)) : EBADF;
	return errno ? -1 : 0;
}

/* --- libibverbs --------------------------------------------------------- */

EXPORT const char *ibv_get_device_name(ibv_device *)
{
	return "fake0";
}

EXPORT int ibv_query_device(ibv_context *, ibv_device_attr *attr)
{
	*attr = {};
	attr->max_cqe = 1 << 22;
	return 0;
}

EXPORT ibv_context *fake_open(ibv_device *device)
{
	/* As the real one opens its file: by what the program has for open(). */
	if (const int fd = open("/dev/infiniband/uverbs0", O_RDWR | O_CLOEXEC); fd >= 0)
		close(fd);

	auto c = std::make_unique<context>();
	ibv_context &v = c->verbs.context;

	c->verbs.sz = sizeof(c->verbs);
	c->verbs.create_qp_ex = create_qp_ex;
	c->verbs.create_cq_ex = create_cq_ex;
	c->verbs.create_srq_ex = create_srq_ex;
	c->verbs.create_wq = create_wq;
	c->verbs.open_xrcd = [](ibv_context *v, ibv_xrcd_init_attr *) {
		auto x = std::make_unique<ibv_xrcd>();
		x->context = v;
		return x.release();
	};
	c->verbs.open_qp = [](ibv_context *v, ibv_qp_open_attr *) {
		return create(v, nullptr, nullptr, nullptr, nullptr, IBV_QPT_XRC_RECV);
	};
	c->verbs.close_xrcd = [](ibv_xrcd *x) {
		const std::unique_ptr<ibv_xrcd> owned(x);
		return 0;
	};
	c->verbs.destroy_wq = destroy_wq;
	c->verbs.reg_dm_mr = [](ibv_pd *pd, ibv_dm *, std::uint64_t, std::size_t length, unsigned access) {
		return new_mr(pd, nullptr, length, 0, access);
	};
	c->verbs.alloc_null_mr = [](ibv_pd *pd) { return new_mr(pd, nullptr, 0, 0, 0); };
	c->verbs.query_device_ex = query_device_ex;
	c->verbs.alloc_parent_domain = [](ibv_context *v, ibv_parent_domain_init_attr *attr) -> ibv_pd * {
		if (attr->td || attr->comp_mask != IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT || attr->alloc) {
			errno = EINVAL;
			return nullptr;
		}
		attr->pd->context = v;
		return attr->pd;
	};
	v.abi_compat = __VERBS_ABI_IS_EXTENDED;
	v.device = device;
	v.cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	v.ops.post_send = post_send;
	v.ops.post_recv = post_recv;
	v.ops.post_srq_recv = post_srq_recv;
	v.ops.poll_cq = poll_cq;
	v.ops.req_notify_cq = req_notify_cq;
	v.ops.bind_mw = bind_mw;
	const std::lock_guard lock(contexts_mutex);
	contexts.insert(c.get());
	return &c.release()->verbs.context;
}

EXPORT ibv_context *ibv_open_device(ibv_device *device)
{
	return fake_open(device);
}

EXPORT int ibv_close_device(ibv_context *v)
{
	const std::unique_ptr<context> c(&of(v));
	const std::lock_guard lock(contexts_mutex);

	contexts.erase(c.get());
	close(v->cmd_fd);
	return 0;
}

EXPORT ibv_context *ibv_import_device(int)
{
	return fake_open(&fake_device);
}

/* Of these three none calls another, which the program may have in its place. */
EXPORT ibv_mr *ibv_reg_mr_iova2(ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	return new_mr(pd, addr, length, iova, access);
}

EXPORT ibv_mr *ibv_reg_mr(ibv_pd *pd, void *addr, size_t length, int access)
{
	return new_mr(pd, addr, length, reinterpret_cast<std::uintptr_t>(addr), static_cast<unsigned>(access));
}

EXPORT ibv_mr *ibv_reg_mr_iova(ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return new_mr(pd, addr, length, iova, static_cast<unsigned>(access));
}

/* Not what is unpinned, as the kernel has it. */
EXPORT int ibv_rereg_mr(ibv_mr *v, int flags, ibv_pd *, void *addr, size_t length, int access)
{
	mr &m = of(v);
	context &c = of(v->context);

	if (const std::lock_guard lock(c.mutex); c.unpinned.contains(v->handle)) {
		errno = EOPNOTSUPP;
		return IBV_REREG_MR_ERR_CMD;
	}
	if (flags & IBV_REREG_MR_CHANGE_ACCESS)
		m.access = static_cast<unsigned>(access);
	if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
		v->addr = addr;
		v->length = length;
		m.iova = reinterpret_cast<std::uintptr_t>(addr);
	}
	return 0;
}

EXPORT int ibv_dereg_mr(ibv_mr *v)
{
	context &c = of(v->context);

	if (v->handle == fake_stays)
		return errno = EBUSY;
	{
		const std::lock_guard lock(c.mutex);
		c.unpinned.erase(v->handle);
	}
	const std::unique_ptr<mr> m(&of(v));

	free_handle(of(v->context), v->handle);
	return 0;
}

EXPORT ibv_mr *ibv_reg_dmabuf_mr(ibv_pd *pd, uint64_t, size_t length, uint64_t iova, int, int access)
{
	return new_mr(pd, nullptr, length, iova, static_cast<unsigned>(access));
}

EXPORT ibv_mr *ibv_import_mr(ibv_pd *pd, uint32_t handle)
{
	auto m = std::make_unique<mr>();

	m->verbs.context = pd->context;
	m->verbs.pd = pd;
	m->verbs.handle = handle;
	m->verbs.lkey = m->verbs.rkey = (handle + 1) << 8;
	return &m.release()->verbs;
}

EXPORT void ibv_unimport_mr(ibv_mr *v)
{
	const std::unique_ptr<mr> m(&of(v));
}

EXPORT ibv_comp_channel *ibv_create_comp_channel(ibv_context *c)
{
	auto made = std::make_unique<channel>();

	made->verbs.context = c;
	made->verbs.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	return &made.release()->verbs;
}

EXPORT int ibv_destroy_comp_channel(ibv_comp_channel *c)
{
	if (c->refcnt)
		return EBUSY;
	const std::unique_ptr<channel> owned(&of(c));

	close(c->fd);
	return 0;
}

EXPORT void fake_event(ibv_comp_channel *real, ibv_cq *cq)
{
	const std::uint64_t one = 1;

	of(real).events.push_back(cq);
	if (write(real->fd, &one, sizeof(one)) != sizeof(one))
		std::abort();
}

EXPORT ibv_cq *ibv_create_cq(ibv_context *c, int cqe, void *cq_context, ibv_comp_channel *channel, int)
{
	return new_cq(c, cqe, cq_context, channel);
}

EXPORT int ibv_resize_cq(ibv_cq *v, int cqe)
{
	v->cqe = cqe;
	return 0;
}

EXPORT int ibv_destroy_cq(ibv_cq *v)
{
	if (of(v).busy)
		return EBUSY;
	const std::unique_ptr<cq> q(&of(v));
	if (v->channel)
		--v->channel->refcnt;
	free_handle(of(v->context), v->handle);
	return 0;
}

/* Waits, unless the file does not. */
EXPORT int ibv_get_cq_event(ibv_comp_channel *c, ibv_cq **cq, void **cq_context)
{
	std::uint64_t n;

	if (read(c->fd, &n, sizeof(n)) != sizeof(n))
		return -1;
	*cq = of(c).events.front();
	*cq_context = (*cq)->cq_context;
	of(c).events.erase(of(c).events.begin());
	return 0;
}

EXPORT void ibv_ack_cq_events(ibv_cq *, unsigned int) {}

EXPORT ibv_srq *ibv_create_srq(ibv_pd *pd, ibv_srq_init_attr *)
{
	return new_srq(pd->context, pd);
}

EXPORT int ibv_query_srq(ibv_srq *, ibv_srq_attr *attr)
{
	*attr = {16, 4, 0};
	return 0;
}

EXPORT int ibv_destroy_srq(ibv_srq *v)
{
	if (of(v).busy)
		return EBUSY;
	const std::unique_ptr<srq> s(&of(v));
	free_handle(of(v->context), v->handle);
	return 0;
}

__attribute__((visibility("default"))) std::atomic<ibv_fork_status> fake_fork_status{IBV_FORK_DISABLED};

EXPORT ibv_fork_status ibv_is_fork_initialized()
{
	return fake_fork_status;
}

/* As that of rdma-core 44: it takes ranges from children whether that is needed or not. */
EXPORT int ibv_fork_init()
{
	fake_fork_status = IBV_FORK_ENABLED;
	return 0;
}

EXPORT ibv_qp *ibv_create_qp(ibv_pd *pd, ibv_qp_init_attr *attr)
{
	return create(pd->context, pd, attr->send_cq, attr->recv_cq, attr->srq, attr->qp_type);
}

EXPORT int ibv_query_qp(ibv_qp *q, ibv_qp_attr *attr, int, ibv_qp_init_attr *init)
{
	*attr = {};
	*init = {};
	attr->qp_state = q->state;
	attr->cap = init->cap = {16, 16, 4, 4, 64};
	attr->max_rd_atomic = std::max<std::uint8_t>(of(q).attr.max_rd_atomic, 1);
	attr->max_dest_rd_atomic = of(q).attr.max_dest_rd_atomic;
	attr->qp_access_flags = of(q).attr.qp_access_flags;
	init->qp_type = q->qp_type;
	return 0;
}

EXPORT int ibv_modify_qp(ibv_qp *q, ibv_qp_attr *attr, int mask)
{
	if (mask & IBV_QP_STATE)
		q->state = attr->qp_state;
	if (mask & IBV_QP_ACCESS_FLAGS)
		of(q).attr.qp_access_flags = attr->qp_access_flags;
	if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
		of(q).attr.max_rd_atomic = attr->max_rd_atomic;
	if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
		of(q).attr.max_dest_rd_atomic = attr->max_dest_rd_atomic;
	return 0;
}

/* As the kernel has them: a group once. */
EXPORT int ibv_attach_mcast(ibv_qp *q, const ibv_gid *gid, uint16_t lid)
{
	return with_groups(q, [&](auto &of_it) {
		of_it.insert(name_of(*gid, lid));
		return 0;
	});
}

EXPORT int ibv_detach_mcast(ibv_qp *q, const ibv_gid *gid, uint16_t lid)
{
	return with_groups(q, [&](auto &of_it) { return of_it.erase(name_of(*gid, lid)) ? 0 : EINVAL; });
}

/* Of the provider's part of the object. */
EXPORT int ibv_query_ece(ibv_qp *q, ibv_ece *ece)
{
	return with_groups(q, [&](auto &) {
		ece->options = of(q).attr.qkey;
		return 0;
	});
}

EXPORT int ibv_set_ece(ibv_qp *q, ibv_ece *ece)
{
	return with_groups(q, [&](auto &) {
		of(q).attr.qkey = ece->options;
		return 0;
	});
}

EXPORT int ibv_destroy_qp(ibv_qp *v)
{
	if (of(v).busy)
		return EBUSY;
	if (const int error = with_groups(v, [](auto &of_it) { return of_it.empty() ? 0 : EBUSY; }))
		return error;
	{
		const std::lock_guard lock(groups_mutex);
		groups.erase(v);
	}
	const std::unique_ptr<qp> q(&of(v));
	free_handle(of(v->context), v->handle);
	return 0;
}

/* Of an adapter that says yes. */
EXPORT int ibv_query_qp_data_in_order(ibv_qp *, ibv_wr_opcode, uint32_t)
{
	return 1;
}

EXPORT ibv_qp_ex *ibv_qp_to_qp_ex(ibv_qp *q)
{
	return of(q).extended ? &of(q).verbs : nullptr;
}
