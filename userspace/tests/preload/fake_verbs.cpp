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
#include <set>
#include <span>
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
	hca &h = of(c);
	auto q = std::make_unique<qp>(h, ++numbers, send_cq, recv_cq);
	ibv_qp &v = q->base();

	v.pd = pd;
	v.srq = s;
	v.qp_type = type;
	v.handle = h.new_handle();
	{
		const std::lock_guard lock(groups_mutex);
		groups[&v];
	}
	const std::lock_guard lock(h.mutex);
	h.qps[v.handle] = &v;
	return &q.release()->base();
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
	auto q = std::make_unique<cq>(of(c), cqe);
	ibv_cq *const v = q->base();

	v->channel = channel;
	v->cq_context = cq_context;
	if (channel)
		++channel->refcnt;
	return q.release()->base();
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

ibv_srq *create_srq_ex(ibv_context *c, ibv_srq_init_attr_ex *attr)
{
	return &std::make_unique<srq>(of(c), attr->pd).release()->verbs;
}

ibv_mr *new_mr(ibv_pd *pd, void *addr, std::size_t length, std::uint64_t iova, unsigned access)
{
	mr *const m = of(pd->context).register_memory(pd, addr, length, iova, access);

	if (!m)
		return nullptr;
	static std::mutex last;
	const std::lock_guard lock(last);
	fake_registered = {pd, iova, access, m->verbs.lkey};
	return &m->verbs;
}

ibv_wq *create_wq(ibv_context *c, ibv_wq_init_attr *attr)
{
	auto w = std::make_unique<ibv_wq>();

	w->context = c;
	w->cq = attr->cq;
	w->handle = of(c).new_handle();
	w->post_recv = [](ibv_wq *q, ibv_recv_wr *wr, ibv_recv_wr **) {
		hca &h = of(q->context);
		const std::lock_guard lock(h.mutex);

		for (; wr; wr = wr->next) {
			ibv_wc wc{};

			fake_wq_keys.clear();
			for (int k = 0; k < wr->num_sge; ++k)
				fake_wq_keys.push_back(wr->sg_list[k].lkey);
			wc.wr_id = wr->wr_id;
			wc.qp_num = UINT32_MAX;
			wc.opcode = IBV_WC_RECV;
			h.complete(q->cq, wc);
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
	of(w->context).free_handle(w->handle);
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
	const auto it = std::ranges::find(contexts, fd, [](const context *c) { return c->verbs.context.cmd_fd; });

	return it == contexts.end() ? nullptr : *it;
}

/* 0 or a negative errno. */
int method(context &c, ib_uverbs_ioctl_hdr &h)
{
	const std::span<ib_uverbs_attr> a(h.attrs, h.num_attrs);
	const auto number = [&](std::size_t i) { return static_cast<std::uint32_t>(a[i].data); };
	const auto channel = [&](std::size_t i) { return static_cast<int>(a[i].data_s64); };
	/* The first attribute names it. */
	const auto queue_pair = [&]() -> const ibv_qp & {
		const std::lock_guard lock(c.mutex);
		return *c.qps.at(number(0));
	};

	switch (std::uint32_t{h.object_id} << 16 | h.method_id) {
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_QUERY:
		return fake_without_nprdma ? -EOPNOTSUPP : c.kernel.query(pointed_to<rdma_np_query>(a[0]));
	case UVERBS_OBJECT_NP_CHANNEL << 16 | RDMA_NP_METHOD_CHANNEL_ALLOC: {
		int fd = -1;
		const int rc = c.kernel.channel(fd);
		a[0].data_s64 = fd;
		return rc;
	}
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_RESOLVE:
		return c.kernel.resolve(queue_pair(), channel(1), number(2), a[4].data, pointed_to<rdma_np_region_info>(a[3]));
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_FAULT:
		return c.kernel.fault(queue_pair(), channel(1), pointed_to<rdma_np_fault_req>(a[2]),
				      {&pointed_to<rdma_np_range>(a[3]), a[3].len / sizeof(rdma_np_range)});
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_RELEASE:
		return c.kernel.release(queue_pair(), a[1].data);
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_FORGET:
		return c.kernel.forget(queue_pair(), a[1].data);
	case UVERBS_OBJECT_NP_HOLD << 16 | RDMA_NP_METHOD_HOLD_ALLOC: {
		std::uint32_t handle = 0;
		const int rc = c.kernel.hold(number(1), pointed_to<rdma_np_hold_req>(a[2]), pointed_to<rdma_np_hold_info>(a[3]),
					     handle, a.size() > 4 ? channel(4) : -1);
		a[0].data = handle;
		return rc;
	}
	case UVERBS_OBJECT_NP_HOLD << 16 | RDMA_NP_METHOD_HOLD_FREE:
		return c.kernel.hold_free(number(0));
	case UVERBS_OBJECT_NPRDMA << 16 | RDMA_NP_METHOD_QUERY_MR: {
		ibv_mr named{};
		named.handle = number(0);
		return c.kernel.query_mr(named, pointed_to<rdma_np_mr_info>(a[1]));
	}
	default:
		return -EOPNOTSUPP;
	}
}

} // namespace

namespace npr::fake {

context::context()
{
	/* A program that only posts and polls has something to poll, for as long as it likes. */
	receives_come = true;
	most_receives = SIZE_MAX;
	records = false;
	verbs.create_qp_ex = create_qp_ex;
	verbs.create_cq_ex = create_cq_ex;
	verbs.create_srq_ex = create_srq_ex;
	verbs.create_wq = create_wq;
	verbs.open_xrcd = [](ibv_context *v, ibv_xrcd_init_attr *) {
		auto x = std::make_unique<ibv_xrcd>();
		x->context = v;
		return x.release();
	};
	verbs.open_qp = [](ibv_context *v, ibv_qp_open_attr *) {
		return create(v, nullptr, nullptr, nullptr, nullptr, IBV_QPT_XRC_RECV);
	};
	verbs.close_xrcd = [](ibv_xrcd *x) {
		const std::unique_ptr<ibv_xrcd> owned(x);
		return 0;
	};
	verbs.destroy_wq = destroy_wq;
	verbs.reg_dm_mr = [](ibv_pd *pd, ibv_dm *, std::uint64_t, std::size_t length, unsigned access) {
		return new_mr(pd, nullptr, length, 0, access);
	};
	verbs.alloc_null_mr = [](ibv_pd *pd) { return new_mr(pd, nullptr, 0, 0, 0); };
	verbs.query_device_ex = query_device_ex;
	verbs.alloc_parent_domain = [](ibv_context *v, ibv_parent_domain_init_attr *attr) -> ibv_pd * {
		if (attr->td || attr->comp_mask != IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT || attr->alloc) {
			errno = EINVAL;
			return nullptr;
		}
		attr->pd->context = v;
		return attr->pd;
	};
	verbs.context.ops.bind_mw = bind_mw;
}

context::~context()
{
	fake_holds_freed += kernel.freed;
}

} // namespace npr::fake

EXPORT int fake_ioctl(int fd, void *arg)
{
	context *const c = by_fd(fd);

	errno = c ? -method(*c, *static_cast<ib_uverbs_ioctl_hdr *>(arg)) : EBADF;
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

	v.device = device;
	v.cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
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
	const std::unique_ptr<context> c(&opened(v));
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
	hca &h = of(v->context);
	const std::lock_guard lock(h.mutex);

	if (h.regions.contains(v->handle)) {
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
	h.name_memory(m);
	return 0;
}

EXPORT int ibv_dereg_mr(ibv_mr *v)
{
	if (v->handle == fake_stays)
		return errno = EBUSY;
	of(v->context).deregister(&of(v));
	return 0;
}

EXPORT ibv_mr *ibv_reg_dmabuf_mr(ibv_pd *pd, uint64_t, size_t length, uint64_t iova, int, int access)
{
	return new_mr(pd, nullptr, length, iova, static_cast<unsigned>(access));
}

EXPORT ibv_mr *ibv_import_mr(ibv_pd *pd, uint32_t handle)
{
	hca &h = of(pd->context);
	auto m = std::make_unique<mr>();

	m->verbs.context = pd->context;
	m->verbs.pd = pd;
	m->verbs.handle = handle;
	m->verbs.lkey = m->verbs.rkey = (handle + 1) << 8;
	const std::lock_guard lock(h.mutex);
	if (handle < foreign_pinned)
		h.regions[handle] = {0, 4096, 0, true};
	return &m.release()->verbs;
}

EXPORT void ibv_unimport_mr(ibv_mr *v)
{
	const std::unique_ptr<mr> m(&of(v));
	hca &h = of(v->context);
	const std::lock_guard lock(h.mutex);

	h.regions.erase(v->handle);
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
	hca &h = of(v->context);
	const std::lock_guard lock(h.mutex);

	v->cqe = cqe;
	of(v).capacity = static_cast<std::size_t>(cqe);
	return 0;
}

EXPORT int ibv_destroy_cq(ibv_cq *v)
{
	if (of(v).busy)
		return EBUSY;
	const std::unique_ptr<cq> q(&of(v));
	if (v->channel)
		--v->channel->refcnt;
	of(v->context).free_handle(v->handle);
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
	return &std::make_unique<srq>(of(pd->context), pd).release()->verbs;
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
	of(v->context).free_handle(v->handle);
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
	if (mask & IBV_QP_STATE) {
		hca &h = of(q->context);
		const std::lock_guard lock(h.mutex);

		q->state = attr->qp_state;
		if (q->state == IBV_QPS_ERR)
			h.fail(*q);
		if (q->state == IBV_QPS_RESET)
			h.dead.erase(q->qp_num);
	}
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
	hca &h = of(v->context);
	{
		const std::lock_guard lock(h.mutex);

		h.qps.erase(v->handle);
		h.dead.erase(v->qp_num);
	}
	h.free_handle(v->handle);
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
