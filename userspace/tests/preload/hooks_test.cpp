/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Each function that preload/functions calls hooked or pinned has a check here, of what the preload library promises of
 * it. The check is true of the library's function, and has to be false of the one behind it: so none is true
 * whatever is called, and a hook that does nothing fails. Each runs in a process of its own, which ends where the check
 * ends: what the library has only once is new there, and nothing has to be given back.
 */
#include "fake_verbs.hpp"
#include "fixture.hpp"
#include "pointers.hpp"
#include "policy.hpp"
#include "real.hpp"
#include "registry.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <gtest/gtest.h>
#include <infiniband/mlx5dv.h>
#include <memory>
#include <nprdma/nprdma.h>
#include <ostream>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

extern "C" int rsocket(int domain, int type, int protocol);

namespace {

using npr::preload::all;

/* What a process of a check ends with; a sanitizer and gtest have others. */
enum status { is_true = 40, is_false, unprepared };

/* What a check needs before it calls. */
void require(bool is)
{
	if (!is)
		_exit(unprepared);
}

constexpr int local = IBV_ACCESS_LOCAL_WRITE, remote = local | IBV_ACCESS_REMOTE_WRITE;
std::array<std::byte, 4096> memory;

/* Until the process ends. */
template <class T, class... Args>
T &lasting(Args &&...args)
{
	return *std::make_unique<T>(std::forward<Args>(args)...).release();
}

device &new_device()
{
	return lasting<device>();
}

connection &new_connection()
{
	return lasting<connection>(new_device());
}

npr::preload::device &known(const device &d)
{
	npr::preload::device *const k = npr::preload::find(d.context);

	require(k);
	return *k;
}

ibv_mr *register_memory(device &d, int access = local)
{
	return ibv_reg_mr(&d.pd, memory.data(), memory.size(), access);
}

/* A region that stays as it is, and why. */
bool counted(device &d, npr::preload::because why)
{
	/* relaxed: nobody else is here */
	return known(d).told.pinned[static_cast<std::size_t>(why)].regions.load(std::memory_order_relaxed) == 1;
}

bool is_unpinned(ibv_mr *mr)
{
	return mr && fake::of(mr).access & IBV_ACCESS_UNPINNED;
}

/* Not pinned, and the library knows where in memory its addresses are. */
bool is_ours(device &d, ibv_mr *mr, std::uint64_t iova)
{
	if (!is_unpinned(mr))
		return false;
	const npr::local_key key = known(d).lib->regions.find(mr->lkey);
	return key.handle == mr->handle && key.offset == reinterpret_cast<std::uintptr_t>(memory.data()) - iova;
}

struct queue_on_a_channel {
	queue_on_a_channel() : dev(new_device()), channel(ibv_create_comp_channel(dev.context)),
		cq(ibv_create_cq(dev.context, 64, nullptr, channel, 0))
	{
		require(npr::preload::find(cq));
	}
	/* Something that only the library can tell. */
	void arm_and_kick() const
	{
		require(!ibv_req_notify_cq(cq, 0));
		npr::preload::find(cq)->kick();
	}
	[[nodiscard]] static npr::preload::queue at(ibv_cq *cq) { return npr::preload::find(all().cqs, cq); }

	device &dev;
	ibv_comp_channel *channel;
	ibv_cq *cq;
};

struct request {
	explicit request(ibv_sge s) : sge(s)
	{
		send.sg_list = receive.sg_list = &sge;
		send.num_sge = receive.num_sge = 1;
		send.opcode = IBV_WR_SEND;
	}

	ibv_sge sge;
	ibv_send_wr send{}, *bad_send = nullptr;
	ibv_recv_wr receive{}, *bad_receive = nullptr;
};

/* What goes to standard error meanwhile. */
std::string said(const std::function<void()> &f)
{
	const int file = memfd_create("said", MFD_CLOEXEC), before = dup(STDERR_FILENO);
	std::string text(4096, '\0');

	require(file >= 0 && before >= 0 && dup2(file, STDERR_FILENO) >= 0);
	f();
	require(dup2(before, STDERR_FILENO) >= 0);
	const ssize_t n = pread(file, text.data(), text.size(), 0);
	require(n >= 0);
	text.resize(static_cast<std::size_t>(n));
	return text;
}

/* It is one line, and has @what. */
bool is_line(const std::string &text, std::string_view what)
{
	return std::count(text.begin(), text.end(), '\n') == 1 && text.find(what) != text.npos;
}

/*
 * @make(d), true or errno, makes an object for which the program's memory has to be pinned: what is registered after it
 * is, and where some is unpinned already there is no such object. The user is told of either.
 */
template <class Make>
bool keeps_pinned(Make &&make)
{
	device &first = new_device(), &second = new_device();
	bool made = false, unpinned = true;
	int error = 0;

	const std::string pinned = said([&] {
		made = make(first);
		unpinned = is_unpinned(register_memory(first));
	});
	if (!made || unpinned || !is_line(pinned, "stays pinned"))
		return false;
	require(is_unpinned(register_memory(second)));
	const std::string refused = said([&] {
		errno = 0;
		made = make(second);
		error = errno;
	});
	return !made && error == EOPNOTSUPP && is_line(refused, "refused");
}

ibv_qp_init_attr_ex attributes_of_qp(device &d)
{
	ibv_qp_init_attr_ex attr{};

	attr.send_cq = attr.recv_cq = d.make_cq();
	attr.pd = &d.pd;
	attr.qp_type = IBV_QPT_RC;
	attr.cap = {4, 4, 4, 4, 64};
	attr.comp_mask = IBV_QP_INIT_ATTR_PD;
	return attr;
}

void *load(const char *library)
{
	void *const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);

	require(handle);
	return handle;
}

/* The function of that name that the hook stands before. */
void *behind(std::string_view section, const char *name)
{
	void *const library = section == "libmlx5.so.1" ? load(FAKE_MLX5) :
			      section == "librdmacm.so.1" ? load(FAKE_RDMACM) : RTLD_NEXT;

	return dlsym(library, name);
}

struct hook {
	const char *section, *name;
	void *(*ours)();
	void *(*theirs)();
	bool (*check)(void *f);
};

void PrintTo(const hook &h, std::ostream *to)
{
	*to << h.section << ' ' << h.name;
}

#define FUNCTION(section, name, ...) \
	hook{section, #name, [] { return reinterpret_cast<void *>(&::name); }, [] { return behind(section, #name); }, \
	     [](void *f) -> bool { return (__VA_ARGS__)(reinterpret_cast<decltype(&::name)>(f)); }}
/* @of: from a context to what has the pointer. */
#define POINTER(section, of, type, name, ...) \
	hook{section, #name, [] { return reinterpret_cast<void *>(of(ibv_open_device(&fake_device)).name); }, \
	     [] { return reinterpret_cast<void *>(of(fake_open(&fake_device)).name); }, \
	     [](void *f) -> bool { return (__VA_ARGS__)(reinterpret_cast<decltype(type::name)>(f)); }}
#define VERBS(name, ...) FUNCTION("libibverbs.so.1", name, __VA_ARGS__)
#define DIRECT(name, ...) FUNCTION("libmlx5.so.1", name, __VA_ARGS__)
#define OP(name, ...) POINTER("struct ibv_context_ops", ops_of, ibv_context_ops, name, __VA_ARGS__)
#define EXTENDED(name, ...) POINTER("struct verbs_context", extended_of, verbs_context, name, __VA_ARGS__)

const ibv_context_ops &ops_of(ibv_context *c)
{
	return c->ops;
}

const verbs_context &extended_of(ibv_context *c)
{
	return *verbs_get_ctx(c);
}

/* Of a libibverbs that the library does not see. */
template <class F>
bool tells_of(F *f)
{
	const std::string line = said([&] { (void)f("/dev/infiniband/uverbs99", O_RDWR); });

	return is_line(line, "does not see opens /dev/infiniband/uverbs99");
}

const hook hooks[] = {
	/* --- devices -------------------------------------------------------- */
	VERBS(ibv_open_device, [](auto *f) { return npr::preload::find(f(&fake_device)) != nullptr; }),
	VERBS(ibv_import_device, [](auto *f) { return npr::preload::find(f(0)) != nullptr; }),
	VERBS(ibv_close_device, [](auto *f) {
		ibv_context *const context = new_device().context;
		const auto fd = static_cast<std::uint32_t>(context->cmd_fd);

		require(all().devices.find(fd, context));
		return !f(context) && !all().devices.find(fd, context);
	}),
	EXTENDED(query_device_ex, [](auto *f) {
		ibv_device_attr_ex attr{};

		return !f(new_device().context, nullptr, &attr, sizeof(attr)) &&
			attr.odp_caps.general_caps & IBV_ODP_SUPPORT;
	}),
	/* The provider's refuses thread domains. */
	EXTENDED(alloc_parent_domain, [](auto *f) {
		ibv_td td{};
		ibv_pd pd{};
		int context = 0;
		ibv_parent_domain_init_attr attr{
			&pd, &td, IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT, nullptr, nullptr, &context};

		return f(new_device().context, &attr) != nullptr;
	}),
	VERBS(ibv_fork_init, [](auto *f) {
		fake_fork_status = IBV_FORK_UNNEEDED;
		return !f() && fake_fork_status == IBV_FORK_UNNEEDED;
	}),
	FUNCTION("libc.so.6", open, [](auto *f) { return tells_of(f); }),
	FUNCTION("libc.so.6", open64, [](auto *f) { return tells_of(f); }),
	FUNCTION("librdmacm.so.1", rsocket, [](auto *f) {
		constexpr int answer = 1 + 16 * 2 + 256 * 3;

		(void)load(FAKE_RDMACM);
		require(!npr::preload::ordered());
		return f(1, 2, 3) == answer && npr::preload::ordered();
	}),

	/* --- regions -------------------------------------------------------- */
	VERBS(ibv_reg_mr, [](auto *f) {
		device &d = new_device();

		return is_ours(d, f(&d.pd, memory.data(), memory.size(), local),
			       reinterpret_cast<std::uintptr_t>(memory.data()));
	}),
	VERBS(ibv_reg_mr_iova, [](auto *f) {
		device &d = new_device();

		return is_ours(d, f(&d.pd, memory.data(), memory.size(), 0x7000, local), 0x7000);
	}),
	VERBS(ibv_reg_mr_iova2, [](auto *f) {
		device &d = new_device();

		return is_ours(d, f(&d.pd, memory.data(), memory.size(), 0x7000, unsigned{local}), 0x7000);
	}),
	/* Of pinned memory, without the on-demand paging that the device has only as far as the program can tell. */
	VERBS(ibv_rereg_mr, [](auto *f) {
		device &d = new_device();
		ibv_mr *const mr = ibv_reg_mr_iova2(&d.pd, memory.data(), 64, 0x7000, local | IBV_ACCESS_MW_BIND);

		require(mr && !is_unpinned(mr));
		if (f(mr, IBV_REREG_MR_CHANGE_ACCESS | IBV_REREG_MR_CHANGE_TRANSLATION, &d.pd, &memory[64], 64,
		      local | IBV_ACCESS_ON_DEMAND))
			return false;
		const npr::local_key key = known(d).lib->regions.find(mr->lkey);
		return fake::of(mr).access == unsigned{local} && !key.handle && !key.offset;
	}),
	VERBS(ibv_dereg_mr, [](auto *f) {
		device &d = new_device();
		ibv_mr *const mr = register_memory(d);
		const std::uint32_t lkey = mr->lkey;

		require(known(d).regions.has(lkey) && known(d).lib->is_local(lkey));
		return !f(mr) && !known(d).regions.has(lkey) && !known(d).lib->is_local(lkey);
	}),
	VERBS(ibv_import_mr, [](auto *f) {
		device &d = new_device();
		ibv_mr *const mr = f(&d.pd, 5);

		return mr && known(d).regions.has(mr->lkey) && known(d).lib->is_local(mr->lkey);
	}),
	VERBS(ibv_unimport_mr, [](auto *f) {
		device &d = new_device();
		ibv_mr *const mr = ibv_import_mr(&d.pd, 5);
		const std::uint32_t lkey = mr->lkey;

		require(known(d).regions.has(lkey));
		f(mr);
		return !known(d).regions.has(lkey) && !known(d).lib->is_local(lkey);
	}),

	/* What is not the process's memory is in the report all the same. */
	VERBS(ibv_reg_dmabuf_mr, [](auto *f) {
		device &d = new_device();

		return f(&d.pd, 0, 64, 0, 0, local) && counted(d, npr::preload::because::dmabuf);
	}),
	EXTENDED(reg_dm_mr, [](auto *f) {
		device &d = new_device();
		ibv_dm dm{};

		return f(&d.pd, &dm, 0, 64, 0) && counted(d, npr::preload::because::device_memory);
	}),
	EXTENDED(alloc_null_mr, [](auto *f) {
		device &d = new_device();

		return f(&d.pd) && counted(d, npr::preload::because::null);
	}),

	/* --- completions ---------------------------------------------------- */
	VERBS(ibv_create_comp_channel, [](auto *f) {
		return npr::preload::find(all().channels, f(new_device().context)) != nullptr;
	}),
	/* The program's channel has no users as the provider counts them; that of another may not end. */
	VERBS(ibv_destroy_comp_channel, [](auto *f) {
		ibv_comp_channel *const channel = ibv_create_comp_channel(new_device().context);

		require(npr::preload::find(all().channels, channel) != nullptr);
		channel->refcnt = 1;
		return !f(channel) && !npr::preload::find(all().channels, channel);
	}),
	VERBS(ibv_create_cq, [](auto *f) {
		return npr::preload::find(f(new_device().context, 64, nullptr, nullptr, 0)) != nullptr;
	}),
	EXTENDED(create_cq_ex, [](auto *f) {
		ibv_cq_init_attr_ex attr{};

		attr.cqe = 64;
		attr.wc_flags = IBV_WC_STANDARD_FLAGS;
		ibv_cq_ex *const ex = f(new_device().context, &attr);
		return ex && npr::preload::find(ibv_cq_ex_to_cq(ex)) && ex->start_poll;
	}),
	VERBS(ibv_resize_cq, [](auto *f) {
		ibv_cq *const cq = new_device().make_cq();
		npr_cq *const lib = npr::preload::find(cq);

		require(lib && lib->credits.total() < 1000);
		return !f(cq, 1000) && lib->credits.total() >= 1000;
	}),
	VERBS(ibv_destroy_cq, [](auto *f) {
		device &d = new_device();
		ibv_cq *const cq = d.make_cq();
		const std::uint32_t handle = cq->handle;

		require(known(d).lib->cqs.find(handle, cq));
		return !f(cq) && !known(d).lib->cqs.find(handle, cq);
	}),
	OP(poll_cq, [](auto *f) {
		connection &c = new_connection();
		ibv_wc wc{};

		require(!c.send(7));
		return f(c.cq, 1, &wc) == 1 && wc.wr_id == 7;
	}),
	OP(req_notify_cq, [](auto *f) {
		const queue_on_a_channel q;

		return !f(q.cq, 0) && q.at(q.cq).armed;
	}),
	VERBS(ibv_get_cq_event, [](auto *f) {
		const queue_on_a_channel q;
		ibv_cq *cq = nullptr;
		void *context;

		q.arm_and_kick();
		return !f(q.channel, &cq, &context) && cq == q.cq;
	}),
	VERBS(ibv_ack_cq_events, [](auto *f) {
		const queue_on_a_channel q;
		ibv_cq *cq;
		void *context;

		q.arm_and_kick();
		require(!ibv_get_cq_event(q.channel, &cq, &context) && q.at(cq).events == 1);
		f(cq, 1);
		return q.at(cq).events == 0;
	}),

	/* --- queues --------------------------------------------------------- */
	VERBS(ibv_create_srq, [](auto *f) {
		device &d = new_device();
		ibv_srq_init_attr attr{};
		ibv_srq *const srq = f(&d.pd, &attr);

		return srq && known(d).srqs.find(srq->handle, srq);
	}),
	EXTENDED(create_srq_ex, [](auto *f) {
		device &d = new_device();
		ibv_srq_init_attr_ex attr{};

		attr.comp_mask = IBV_SRQ_INIT_ATTR_PD;
		attr.pd = &d.pd;
		ibv_srq *const srq = f(d.context, &attr);
		return srq && known(d).srqs.find(srq->handle, srq);
	}),
	VERBS(ibv_destroy_srq, [](auto *f) {
		device &d = new_device();
		ibv_srq_init_attr attr{};
		ibv_srq *const srq = ibv_create_srq(&d.pd, &attr);
		const std::uint32_t handle = srq->handle;

		require(known(d).srqs.find(handle, srq));
		return !f(srq) && !known(d).srqs.find(handle, srq);
	}),
	OP(post_srq_recv, [](auto *f) {
		connection &c = new_connection();
		ibv_srq_init_attr attr{};
		ibv_srq *const srq = ibv_create_srq(&c.dev.pd, &attr);
		request r(c.sge());

		return !f(srq, &r.receive, &r.bad_receive) && fake::is_held(fake::of(srq).lkey);
	}),
	VERBS(ibv_create_qp, [](auto *f) {
		device &d = new_device();
		ibv_qp_init_attr attr{};

		attr.send_cq = attr.recv_cq = d.make_cq();
		attr.qp_type = IBV_QPT_RC;
		attr.cap = {4, 4, 4, 4, 64};
		ibv_qp *const qp = f(&d.pd, &attr);
		return qp && npr::preload::find(qp);
	}),
	EXTENDED(create_qp_ex, [](auto *f) {
		device &d = new_device();
		ibv_qp_init_attr_ex attr = attributes_of_qp(d);
		ibv_qp *const qp = f(d.context, &attr);

		return qp && npr::preload::find(qp);
	}),
	/* What is held for it goes back also where it cannot be destroyed. */
	VERBS(ibv_destroy_qp, [](auto *f) {
		connection &c = new_connection();

		require(!c.send(1) && fake::holds(c.dev.context) == 1);
		fake::of(c.qp).busy = true;
		return f(c.qp) == EBUSY && fake::holds(c.dev.context) == 0;
	}),
	VERBS(ibv_modify_qp, [](auto *f) {
		connection &c = new_connection();
		ibv_qp_attr attr{};

		attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
		return !f(c.qp, &attr, IBV_QP_ACCESS_FLAGS) &&
			fake::of(c.qp).attr.qp_access_flags & IBV_ACCESS_REMOTE_READ;
	}),
	VERBS(ibv_query_qp, [](auto *f) {
		connection &c = new_connection();
		ibv_qp_attr attr{};
		ibv_qp_init_attr init;

		attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
		require(!ibv_modify_qp(c.qp, &attr, IBV_QP_ACCESS_FLAGS));
		return !f(c.qp, &attr, IBV_QP_ACCESS_FLAGS, &init) && attr.qp_access_flags == IBV_ACCESS_REMOTE_WRITE;
	}),
	/* A QP in a group is not ended in vain. */
	VERBS(ibv_attach_mcast, [](auto *f) {
		connection &c = new_connection();
		const ibv_gid gid{};

		return !f(c.qp, &gid, 1) && all().groups.contains(c.qp);
	}),
	VERBS(ibv_detach_mcast, [](auto *f) {
		connection &c = new_connection();
		const ibv_gid gid{};

		require(!ibv_attach_mcast(c.qp, &gid, 1));
		return !f(c.qp, &gid, 1) && all().groups.at(c.qp).groups.empty();
	}),
	/* By an object of the library's. */
	VERBS(ibv_query_ece, [](auto *f) {
		connection &c = new_connection();
		ibv_ece ece{};

		fake::of(c.qp).attr.qkey = 0xece;
		return !f(&ibv_qp_to_qp_ex(c.qp)->qp_base, &ece) && ece.options == 0xece;
	}),
	VERBS(ibv_set_ece, [](auto *f) {
		connection &c = new_connection();
		ibv_ece ece{0, 0xece, 0};

		return !f(&ibv_qp_to_qp_ex(c.qp)->qp_base, &ece) && fake::of(c.qp).attr.qkey == 0xece;
	}),
	VERBS(ibv_query_qp_data_in_order, [](auto *f) { return f(new_connection().qp, IBV_WR_RDMA_WRITE, 0) == 0; }),
	VERBS(ibv_qp_to_qp_ex, [](auto *f) {
		ibv_qp_ex *const ex = f(new_connection().qp);

		return ex && npr::preload::find_ex(ex);
	}),
	OP(post_send, [](auto *f) {
		connection &c = new_connection();
		request r(c.sge());

		return !f(c.qp, &r.send, &r.bad_send) && fake::is_held(fake::of(c.qp).lkey);
	}),
	OP(post_recv, [](auto *f) {
		connection &c = new_connection();
		request r(c.sge());

		return !f(c.qp, &r.receive, &r.bad_receive) && fake::is_held(fake::of(c.qp).lkey);
	}),
	/* The provider's posts where the library does not see it, and sets no key here. */
	OP(bind_mw, [](auto *f) {
		connection &c = new_connection();
		ibv_mw mw{};
		ibv_mw_bind bind{};

		mw.context = c.dev.context;
		mw.pd = &c.dev.pd;
		mw.rkey = 0x123400;
		mw.type = IBV_MW_TYPE_1;
		bind.bind_info = {register_memory(c.dev, local | IBV_ACCESS_MW_BIND),
				  reinterpret_cast<std::uintptr_t>(memory.data()), memory.size(),
				  IBV_ACCESS_REMOTE_WRITE};
		return !f(c.qp, &mw, &bind) && mw.rkey == 0x123401 && fake::of(c.qp).window == mw.rkey;
	}),
	/* Its receives are not posted with the key of an unpinned region. */
	EXTENDED(create_wq, [](auto *f) {
		connection &c = new_connection();
		ibv_wq_init_attr attr{};
		request r(c.sge());

		attr.cq = c.cq;
		ibv_wq *const wq = f(c.dev.context, &attr);
		require(wq && !ibv_post_wq_recv(wq, &r.receive, &r.bad_receive));
		return fake_wq_keys.at(0) != r.sge.lkey;
	}),
	EXTENDED(destroy_wq, [](auto *f) {
		device &d = new_device();
		ibv_wq_init_attr attr{};
		ibv_wq *const wq = ibv_create_wq(d.context, &attr);
		const std::uint32_t handle = wq->handle;

		require(known(d).wqs.find_any(handle));
		return !f(wq) && !known(d).wqs.find_any(handle);
	}),
	/* What peers may use is pinned from here on; where some is not, they may not come by XRC. */
	EXTENDED(open_xrcd, [](auto *f) {
		device &first = new_device(), &second = new_device();
		ibv_xrcd_init_attr attr{};

		require(is_unpinned(register_memory(second, remote)));
		return f(first.context, &attr) && !is_unpinned(register_memory(first, remote)) && f(second.context, &attr) &&
			!is_unpinned(register_memory(second, remote)) && is_unpinned(register_memory(second));
	}),
	EXTENDED(close_xrcd, [](auto *f) {
		device &d = new_device();
		ibv_xrcd_init_attr attr{};
		ibv_xrcd *const xrcd = ibv_open_xrcd(d.context, &attr);

		require(xrcd);
		return !f(xrcd) && is_unpinned(register_memory(d, remote));
	}),
	EXTENDED(open_qp, [](auto *f) {
		device &d = new_device();
		ibv_qp_open_attr attr{};
		bool made = true;
		int error = 0;

		require(is_unpinned(register_memory(d, remote)));
		const std::string line = said([&] {
			errno = 0;
			made = f(d.context, &attr);
			error = errno;
		});
		return !made && error == EOPNOTSUPP && is_line(line, "refused");
	}),

	/* --- direct verbs --------------------------------------------------- */
	DIRECT(mlx5dv_is_supported, [](auto *f) {
		/* relaxed: nobody else is here */
		return f(&fake_device) && all().direct.load(std::memory_order_relaxed) &&
			!is_unpinned(register_memory(new_device()));
	}),
	DIRECT(mlx5dv_open_device, [](auto *f) {
		mlx5dv_context_attr attr{};
		ibv_context *const context = f(&fake_device, &attr);

		return context && npr::preload::find(context) && !is_unpinned(register_memory(new_device()));
	}),
	/* UCX is told that there is nothing of the kind, unless its user has named it. */
	DIRECT(mlx5dv_query_device, [](auto *f) {
		auto *const by_ucx = reinterpret_cast<int (*)(decltype(f), ibv_context *, mlx5dv_context *)>(
			dlsym(load(FAKE_UCX), "query_device"));
		ibv_context *const context = new_device().context;
		mlx5dv_context attr{};

		require(by_ucx && !unsetenv("UCX_TLS") && !f(context, &attr));
		const int hidden = by_ucx(f, context, &attr);
		require(!setenv("UCX_TLS", "rc_x,self", 1));
		return hidden == EOPNOTSUPP && !by_ucx(f, context, &attr);
	}),
	DIRECT(mlx5dv_init_obj, [](auto *f) {
		return keeps_pinned([&](device &d) {
			ibv_cq *const cq = d.make_cq();
			mlx5dv_obj obj{};

			obj.qp.in = d.make_qp(cq);
			errno = f(&obj, MLX5DV_OBJ_QP);
			return !errno && !npr::preload::find(obj.qp.in);
		});
	}),
	DIRECT(mlx5dv_create_cq, [](auto *f) {
		return keeps_pinned([&](device &d) {
			ibv_cq_init_attr_ex attr{};
			mlx5dv_cq_init_attr more{};

			return f(d.context, &attr, &more) != nullptr;
		});
	}),
	DIRECT(mlx5dv_create_qp, [](auto *f) {
		return keeps_pinned([&](device &d) {
			ibv_qp_init_attr_ex attr = attributes_of_qp(d);
			mlx5dv_qp_init_attr more{};

			return f(d.context, &attr, &more) != nullptr;
		});
	}),
	DIRECT(mlx5dv_create_wq, [](auto *f) {
		return keeps_pinned([&](device &d) {
			ibv_wq_init_attr attr{};
			mlx5dv_wq_init_attr more{};

			return f(d.context, &attr, &more) != nullptr;
		});
	}),
	DIRECT(mlx5dv_create_mkey, [](auto *f) {
		return keeps_pinned([&](device &d) {
			mlx5dv_mkey_init_attr attr{};

			attr.pd = &d.pd;
			return f(&attr) != nullptr;
		});
	}),
	DIRECT(mlx5dv_devx_obj_create, [](auto *f) {
		return keeps_pinned([&](device &d) { return f(d.context, nullptr, 0, nullptr, 0) != nullptr; });
	}),
	DIRECT(mlx5dv_qp_ex_from_ibv_qp_ex, [](auto *f) {
		ibv_qp_ex *const ex = ibv_qp_to_qp_ex(new_connection().qp);

		require(ex);
		errno = 0;
		return !f(ex) && errno == EOPNOTSUPP;
	}),
};

/* Whether what @h promises is so of the function that @f() gives. */
int status_of(const hook &h, void *(*f)())
{
	const pid_t child = fork();

	if (!child) {
		alarm(60);
		/* Where the hooks look for it. */
		(void)load(FAKE_MLX5);
		void *const function = f();
		require(function);
		_exit(h.check(function) ? is_true : is_false);
	}
	int status = -1;
	EXPECT_EQ(waitpid(child, &status, 0), child);
	EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

struct Hook : ::testing::TestWithParam<hook> {};

TEST_P(Hook, DoesWhatTheFunctionBehindItDoesNot)
{
	const hook &h = GetParam();

	EXPECT_EQ(status_of(h, h.ours), is_true);
	EXPECT_EQ(status_of(h, h.theirs), is_false) << "then the check says nothing of the hook";
}

INSTANTIATE_TEST_SUITE_P(Preload, Hook, ::testing::ValuesIn(hooks),
			 [](const auto &param) { return std::string(param.param.name); });

/* As "section name" each. */
TEST(PreloadHooks, EachOfTheTableHasACheck)
{
	std::set<std::string> named, checked;
	std::ifstream table(FUNCTIONS);

	ASSERT_TRUE(table) << FUNCTIONS;
	std::string section;
	for (std::string line; std::getline(table, line);) {
		std::istringstream words(line.substr(0, line.find('#')));
		std::string name, how;

		if (line.starts_with('['))
			section = line.substr(1, line.find(']') - 1);
		else if (words >> name >> how && (how == "hooked" || how == "pinned"))
			named.insert(section + ' ' + name);
	}
	EXPECT_GT(named.size(), 50U);
	for (const hook &h : hooks)
		EXPECT_TRUE(checked.insert(std::string(h.section) + ' ' + h.name).second) << h.name << " twice";
	for (const std::string &name : named)
		EXPECT_TRUE(checked.contains(name)) << name << " is hooked, and has no check";
	for (const std::string &name : checked)
		EXPECT_TRUE(named.contains(name)) << name << " has a check, and is not hooked";
}

} // namespace
