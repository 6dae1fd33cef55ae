/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * libnprdma for applications that do not know it: loaded with LD_PRELOAD, it registers
 * their regions unpinned and lets the library carry out what they do with them.
 *
 * Functions of libibverbs are replaced by ours of the same name. What verbs.h has as
 * inline functions are calls through pointers in struct ibv_context and verbs_context,
 * which are per device: those are replaced when a device is opened. The library itself
 * goes on with what was there before (provider.hpp), and so do we.
 *
 * Who posts or polls takes no lock that another queue pair, another CQ or another thread has:
 * objects are found by their handles.
 *
 * An object that the library does not take (a type of QP, a CQ with attributes) is left
 * to the provider: it works, but not with unpinned regions, which fail closed. One that it
 * cannot take, without memory or room, is not made, unless the program has pinned regions.
 */
#include "object/cq.hpp"
#include "object/srq.hpp"
#include "seam.hpp"

#include <nprdma/nprdma.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <sys/epoll.h>
#include <unordered_map>
#include <utility>

/* Macros that choose between functions; these here are the functions. */
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define NPR_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

/* --- what is behind us ------------------------------------------------- */

template <class F>
F *real(const char *name, const char *version)
{
	void *const f = dlvsym(RTLD_NEXT, name, version);

	if (!f) {
		std::fprintf(stderr, "libnprdma-preload: libibverbs has no %s@%s\n", name, version);
		std::abort();
	}
	return reinterpret_cast<F *>(f);
}

/* One that not each libibverbs has: null, and then no program calls it. */
template <class F>
F *real_if_any(const char *name, const char *version)
{
	return reinterpret_cast<F *>(dlvsym(RTLD_NEXT, name, version));
}

#define REAL(name, version) decltype(::name) *const name = real<decltype(::name)>(#name, version)

struct functions {
	REAL(ibv_open_device, "IBVERBS_1.1");
	REAL(ibv_close_device, "IBVERBS_1.1");
	REAL(ibv_reg_mr, "IBVERBS_1.1");
	REAL(ibv_reg_mr_iova, "IBVERBS_1.7");
	REAL(ibv_reg_mr_iova2, "IBVERBS_1.8");
	REAL(ibv_rereg_mr, "IBVERBS_1.1");
	REAL(ibv_dereg_mr, "IBVERBS_1.1");
	REAL(ibv_create_comp_channel, "IBVERBS_1.0");
	REAL(ibv_destroy_comp_channel, "IBVERBS_1.0");
	REAL(ibv_create_cq, "IBVERBS_1.1");
	REAL(ibv_resize_cq, "IBVERBS_1.1");
	REAL(ibv_destroy_cq, "IBVERBS_1.1");
	REAL(ibv_get_cq_event, "IBVERBS_1.1");
	REAL(ibv_ack_cq_events, "IBVERBS_1.1");
	REAL(ibv_create_srq, "IBVERBS_1.1");
	REAL(ibv_destroy_srq, "IBVERBS_1.1");
	REAL(ibv_create_qp, "IBVERBS_1.1");
	REAL(ibv_destroy_qp, "IBVERBS_1.1");
	REAL(ibv_modify_qp, "IBVERBS_1.1");
	REAL(ibv_qp_to_qp_ex, "IBVERBS_1.6");
	decltype(::ibv_query_qp_data_in_order) *const ibv_query_qp_data_in_order =
		real_if_any<decltype(::ibv_query_qp_data_in_order)>("ibv_query_qp_data_in_order", "IBVERBS_1.14");
};

#undef REAL

const functions &verbs()
{
	static const functions f;

	return f;
}

/* --- what is ours ------------------------------------------------------ */

struct device {
	device(const ibv_context &verbs, decltype(verbs_context::create_qp_ex) create, npr_context *l, int cqe) noexcept
	    : ops(verbs.ops), create_qp_ex(create), lib(l), max_cqe(cqe)
	{
	}

	const ibv_context_ops ops; /* the provider's */
	const decltype(verbs_context::create_qp_ex) create_qp_ex;
	npr_context *const lib; /* it has the CQs */
	const int max_cqe;	/* of one CQ */
	npr::handle_table<ibv_qp, npr_qp> qps;
	npr::handle_table<ibv_srq, npr_srq> srqs;
};

/* Of a device that does not say how many. */
constexpr int some_cqe = 1 << 16;

struct queue {
	npr_cq *lib;
	unsigned int events; /* that only we have seen, not acknowledged yet */
	bool armed;	     /* once at least: who never asked for events gets none */
};

/*
 * What wakes those who wait for events of a completion channel: the channel itself, and
 * what happens to the CQs on it that only the library can tell. That is edge-triggered: one
 * happening wakes one thread, once, as one event does.
 */
struct channel {
	ibv_context *context;
	npr::unique_fd epoll;
	std::mutex reading; /* the file's flags are the caller's without it */
};

/*
 * All objects by those of verbs. The application orders use and destruction, as ever. Where the
 * kernel may refuse to destroy one, it is asked first, so that a key may be of what is no more,
 * and be used anew already: keys are compared, and looked into only by who uses the object.
 */
struct objects {
	npr::handle_table<ibv_context, device> devices; /* by the descriptors of their contexts */

	/* What is not looked up by who posts or polls. */
	std::mutex mutex;
	std::unordered_map<ibv_comp_channel *, std::shared_ptr<channel>> channels;
	std::unordered_map<ibv_cq *, queue> cqs;
	/* Of QPs that could not be attached again: good until they are destroyed. */
	std::unordered_map<ibv_qp *, std::unique_ptr<npr::qp_ex>> orphans;
};

objects &all()
{
	/* Never destroyed: applications use verbs until the very end. */
	static objects &o = *std::make_unique<objects>().release();

	return o;
}

/* The library's object, or null. */
device *find(const ibv_context *context)
{
	return all().devices.find(static_cast<std::uint32_t>(context->cmd_fd), context);
}

npr_qp *find(const ibv_qp *qp)
{
	const device *const d = find(qp->context);

	return d ? d->qps.find(qp->handle, qp) : nullptr;
}

npr_cq *find(const ibv_cq *cq)
{
	const device *const d = cq ? find(cq->context) : nullptr;

	return d ? d->lib->cqs.find(cq->handle, cq) : nullptr;
}

/* A copy, or nothing. */
template <class Map, class Key>
typename Map::mapped_type find(const Map &map, Key *key)
{
	const std::lock_guard lock(all().mutex);
	const auto it = map.find(key);

	return it == map.end() ? typename Map::mapped_type{} : it->second;
}

/* False: no memory. */
template <class Map, class Key, class Value>
bool add(Map &map, Key *key, Value value)
{
	const std::lock_guard lock(all().mutex);

	try {
		map.insert_or_assign(key, value);
		return true;
	} catch (const std::bad_alloc &) {
		return false;
	}
}

/* Takes it out; null if it is not there. */
template <class Map, class Key>
typename Map::mapped_type take(Map &map, Key *key)
{
	const std::lock_guard lock(all().mutex);
	auto node = map.extract(key);

	return node ? std::move(node.mapped()) : typename Map::mapped_type{};
}

/* Takes @lib out, which was that of @cq; another may be by now. */
void drop(ibv_cq *cq, const npr_cq *lib)
{
	const std::lock_guard lock(all().mutex);

	if (const auto it = all().cqs.find(cq); it != all().cqs.end() && it->second.lib == lib)
		all().cqs.erase(it);
}

/* Some CQ of @context, or null. */
ibv_cq *any_cq(const npr_context *context)
{
	const std::lock_guard lock(all().mutex);
	const auto it = std::find_if(all().cqs.begin(), all().cqs.end(),
				     [&](const auto &entry) { return &entry.second.lib->ctx == context; });

	return it == all().cqs.end() ? nullptr : it->first;
}

/* Of those of @cq that the channel does not tell. False and errno. */
bool watch(const channel &c, ibv_cq *cq, const npr_cq &lib)
{
	for (const int fd : {lib.channel.get(), lib.event.get(), lib.timer.get()}) {
		epoll_event e{};
		e.events = EPOLLIN | EPOLLET;
		e.data.ptr = cq;
		if (epoll_ctl(c.epoll.get(), EPOLL_CTL_ADD, fd, &e))
			return false;
	}
	return true;
}

/* A child may have the descriptors, too, so that closing them need not be the end. */
void unwatch(const channel &c, const npr_cq &lib)
{
	for (const int fd : {lib.channel.get(), lib.event.get(), lib.timer.get()})
		(void)epoll_ctl(c.epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
}

/* Whether those who wait are told what happens to @cq. What it was before. */
bool set_armed(ibv_cq *cq, bool armed)
{
	const std::lock_guard lock(all().mutex);
	const auto it = all().cqs.find(cq);

	return it != all().cqs.end() && std::exchange(it->second.armed, armed);
}

/* NPRDMA_UNPINNED: regions of at least so many bytes; without it, all. */
std::size_t threshold()
{
	static const std::size_t bytes = [] {
		const char *s = std::getenv("NPRDMA_UNPINNED");
		char *end;

		if (!s || !*s)
			return std::size_t{0};
		errno = 0;
		const unsigned long long n = std::strtoull(s, &end, 0);
		if (*end || errno || *s == '-') {
			std::fprintf(stderr, "libnprdma-preload: NPRDMA_UNPINNED is not a number of bytes: %s\n", s);
			std::_Exit(64);
		}
		return static_cast<std::size_t>(n);
	}();

	return bytes;
}

/* NPRDMA_ORDERED: do WRITEs land in order, for peers that poll their memory? */
bool ordered()
{
	static const bool yes = [] {
		const char *const s = std::getenv("NPRDMA_ORDERED");

		if (!s || !*s || !std::strcmp(s, "0"))
			return false;
		if (!std::strcmp(s, "1"))
			return true;
		std::fprintf(stderr, "libnprdma-preload: NPRDMA_ORDERED is 0 or 1, not %s\n", s);
		std::_Exit(64);
	}();

	return yes;
}

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

/*
 * An object that the library could not attach: true if it may be used nevertheless, with pinned
 * regions, which only NPRDMA_UNPINNED leaves. Otherwise what is done with it would fail later,
 * where nobody knows why.
 */
bool may_be_left(const ibv_context *context, const char *what, std::uint32_t number, int error)
{
	const npr::uncancelled here;
	const bool left = threshold();

	errno = error;
	std::fprintf(stderr, "libnprdma-preload: %s: %s %u cannot have unpinned memory: %m. %s%s\n",
		     ibv_get_device_name(context->device), what, number, advice(error),
		     left ? "It works with pinned memory only." :
			    "With NPRDMA_UNPINNED=BYTES it works with pinned memory.");
	errno = error;
	return left;
}

/* --- calls through pointers -------------------------------------------- */

/* These are in the ops of @devices only, so what they are called for is of one. */

int post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad)
{
	const device &d = *find(qp->context);
	npr_qp *const lib = d.qps.find(qp->handle, qp);

	return lib ? -npr_post_send(lib, wr, bad) : d.ops.post_send(qp, wr, bad);
}

int post_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	const device &d = *find(qp->context);
	npr_qp *const lib = d.qps.find(qp->handle, qp);

	return lib ? -npr_post_recv(lib, wr, bad) : d.ops.post_recv(qp, wr, bad);
}

int post_srq_recv(ibv_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **bad)
{
	const device &d = *find(srq->context);
	npr_srq *const lib = d.srqs.find(srq->handle, srq);

	return lib ? -npr_post_srq_recv(lib, wr, bad) : d.ops.post_srq_recv(srq, wr, bad);
}

int poll_cq(ibv_cq *cq, int n, ibv_wc *wc)
{
	const device &d = *find(cq->context);
	npr_cq *const lib = d.lib->cqs.find(cq->handle, cq);

	return lib ? npr_poll_cq(lib, n, wc) : d.ops.poll_cq(cq, n, wc);
}

int req_notify_cq(ibv_cq *cq, int solicited_only)
{
	const device &d = *find(cq->context);
	npr_cq *const lib = d.lib->cqs.find(cq->handle, cq);

	if (!lib)
		return d.ops.req_notify_cq(cq, solicited_only);
	if (!lib->notifies())
		(void)set_armed(cq, true);
	return -npr_req_notify_cq(lib, solicited_only);
}

/* It posts by itself. */
int bind_mw(ibv_qp *qp, ibv_mw *mw, ibv_mw_bind *bind)
{
	const device &d = *find(qp->context);

	return d.qps.find(qp->handle, qp) ? EOPNOTSUPP : d.ops.bind_mw(qp, mw, bind);
}

/* --- events ------------------------------------------------------------- */

/* The flags of @fd as the application set them. */
int status_flags(channel &c, int fd)
{
	const std::lock_guard lock(c.reading);

	return fcntl(fd, F_GETFL);
}

/*
 * The channel's own event. It was readable, but another thread may have taken what there was, or
 * the kernel, with the CQ, and the library does not wake who waits in a read. Whether a read
 * waits is the file's flag, so that changes for a moment.
 */
int read_event(channel &c, ibv_comp_channel *verbs_channel, ibv_cq **cq, void **cq_context)
{
	const std::lock_guard lock(c.reading);
	const int fd = verbs_channel->fd;
	const int flags = fcntl(fd, F_GETFL);

	if (flags < 0)
		return -1;
	if (!(flags & O_NONBLOCK) && fcntl(fd, F_SETFL, flags | O_NONBLOCK))
		return -1;
	/* Also if the thread is cancelled in the read. */
	struct restore {
		~restore()
		{
			const int error = errno;

			if (!(flags & O_NONBLOCK))
				(void)fcntl(fd, F_SETFL, flags);
			errno = error;
		}
		int fd, flags;
	} const at_end{fd, flags};
	return verbs().ibv_get_cq_event(verbs_channel, cq, cq_context);
}

/* Something happened to CQ @key. False: nobody asked for its events. */
bool own_event(void *key, ibv_cq **cq, void **cq_context)
{
	const std::lock_guard lock(all().mutex);
	/* It may be destroyed by now. */
	const auto it = all().cqs.find(static_cast<ibv_cq *>(key));

	if (it == all().cqs.end() || !it->second.armed)
		return false;
	++it->second.events;
	*cq = it->first;
	*cq_context = it->first->cq_context;
	return true;
}

/*
 * A handler has run. The read that the application believes in goes on after it if that was
 * installed with SA_RESTART; epoll_wait() never does, and which one it was nobody tells. So it ends
 * where any handler wants calls to end, except of signals that do not come to who sleeps.
 */
bool goes_on()
{
	static constexpr int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};

	for (int s = 1; s < NSIG; ++s) {
		struct sigaction a;

		if (std::find(std::begin(own), std::end(own), s) != std::end(own) || sigaction(s, nullptr, &a))
			continue;
		if (!(a.sa_flags & SA_RESTART) && a.sa_handler != SIG_DFL && a.sa_handler != SIG_IGN)
			return false;
	}
	return true;
}

/* --- queue pairs -------------------------------------------------------- */

/*
 * What it does not take is the provider's alone. @ex: what applications already have for
 * ibv_wr_*(), from detach(); it is taken if the QP is. 0 or an errno, if it should be.
 */
int attach(ibv_qp *qp, std::unique_ptr<npr::qp_ex> &ex)
{
	device *const d = find(qp->context);
	npr_cq *const cq = find(qp->send_cq);

	if (!cq || !find(qp->recv_cq) ||
	    (qp->qp_type != IBV_QPT_RC && qp->qp_type != IBV_QPT_UC && qp->qp_type != IBV_QPT_UD))
		return 0;
	npr_qp_attr attr{};
	if (ordered())
		attr.flags = NPR_QP_ORDERED_WRITES;
	npr_qp *const lib = npr_attach_qp(cq, qp, &attr);
	if (!lib)
		return errno;
	if (!d->qps.set(qp->handle, qp, lib)) {
		(void)npr_detach_qp(lib);
		return ENOMEM;
	}
	if (ex) {
		lib->ex = std::move(ex);
		lib->ex->move_to(lib);
	}
	return 0;
}

/* @qp, or null and errno. */
ibv_qp *attach_new(ibv_qp *qp)
{
	std::unique_ptr<npr::qp_ex> none;
	const int error = attach(qp, none);

	if (!error || may_be_left(qp->context, "QP", qp->qp_num, error))
		return qp;
	(void)verbs().ibv_destroy_qp(qp);
	errno = error;
	return nullptr;
}

/* What applications have for ibv_wr_*() is left, and posts nothing. */
std::unique_ptr<npr::qp_ex> detach(ibv_qp *qp)
{
	npr_qp *const lib = find(qp);

	if (!lib)
		return take(all().orphans, qp);
	find(qp->context)->qps.remove(qp->handle, lib);
	auto ex = std::move(lib->ex);
	ex->move_to(nullptr);
	(void)npr_detach_qp(lib);
	return ex;
}

/*
 * The completions of a QP, ours or not, that a detach has taken out of its CQs and nobody has
 * polled. Those in the CQs are gone with the QP, or with RESET, so these have to be.
 */
class completions {
public:
	explicit completions(const ibv_qp *qp)
	    : cqs_{find(qp->send_cq), find(qp->recv_cq)}, qp_num_(qp->qp_num)
	{
	}

	void forget() const noexcept
	{
		for (npr_cq *const cq : cqs_)
			if (cq)
				cq->forget(qp_num_);
	}

private:
	std::array<npr_cq *, 2> cqs_;
	std::uint32_t qp_num_;
};

/* Attached, or was until that failed. */
bool is_ours(ibv_qp *qp)
{
	if (find(qp))
		return true;
	const std::lock_guard lock(all().mutex);
	return all().orphans.contains(qp);
}

/* After detach(), which left @ex. 0 or an errno. */
int attach_again(ibv_qp *qp, std::unique_ptr<npr::qp_ex> ex)
{
	const int error = attach(qp, ex);

	if (!ex)
		return error;
	const std::lock_guard lock(all().mutex);
	try {
		all().orphans[qp] = std::move(ex);
	} catch (const std::bad_alloc &) {
		/* lost is better than gone while it is in use */
		(void)ex.release();
	}
	return error;
}

/*
 * @create(cap) makes a QP, with twice as many entries of the send queue as were asked for if the
 * device has them, as the library needs two for a WRITE.
 */
template <class F>
ibv_qp *create_larger(ibv_qp_cap &cap, F &&create)
{
	const ibv_qp_cap asked = cap;

	cap.max_send_wr = 2 * std::min(asked.max_send_wr, std::numeric_limits<std::uint32_t>::max() / 2);
	if (ibv_qp *const qp = create())
		return qp;
	cap = asked;
	return create();
}

/* What npr::qp_ex has functions for. Calls through the pointers of others would end in the void. */
constexpr std::uint64_t send_ops = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
	IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
	IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD |
	IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND_WITH_INV;

ibv_qp *create_qp_ex(ibv_context *context, ibv_qp_init_attr_ex *attr)
{
	const device &d = *find(context);

	if (attr->qp_type != IBV_QPT_RC && attr->qp_type != IBV_QPT_UC && attr->qp_type != IBV_QPT_UD)
		return d.create_qp_ex(context, attr);
	if (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS && attr->send_ops_flags & ~send_ops) {
		errno = EOPNOTSUPP;
		return nullptr;
	}
	ibv_qp *const qp = create_larger(attr->cap, [&] { return d.create_qp_ex(context, attr); });
	return qp ? attach_new(qp) : qp;
}

} // namespace

/* --- functions of libibverbs -------------------------------------------- */

NPR_EXPORT ibv_context *ibv_open_device(ibv_device *dev)
{
	ibv_context *const context = verbs().ibv_open_device(dev);
	verbs_context *const extended = context ? verbs_get_ctx(context) : nullptr;

	if (!context)
		return context;
	npr::provider provider(*context);
	provider.reg_mr = verbs().ibv_reg_mr_iova2;
	provider.dereg_mr = verbs().ibv_dereg_mr;
	npr_context *const lib = npr::open(context, 0, provider);
	if (!lib) {
		std::fprintf(stderr, "libnprdma-preload: %s has no unpinned regions (%m): left as it is\n",
			     ibv_get_device_name(dev));
		return context;
	}
	int max_cqe = some_cqe;
	if (ibv_device_attr attr{}; !ibv_query_device(context, &attr))
		max_cqe = attr.max_cqe;
	std::unique_ptr<device> d(new (std::nothrow)
					  device(*context, extended ? extended->create_qp_ex : nullptr, lib, max_cqe));
	if (!d || !all().devices.set(static_cast<std::uint32_t>(context->cmd_fd), context, d.get())) {
		std::fprintf(stderr, "libnprdma-preload: no memory to know %s: left as it is\n",
			     ibv_get_device_name(dev));
		(void)npr_close(lib);
		return context;
	}
	/* All memory that has an address is registered by our functions from here on. */
	lib->regions.know_all();
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	context->ops.post_srq_recv = post_srq_recv;
	context->ops.poll_cq = poll_cq;
	context->ops.req_notify_cq = req_notify_cq;
	context->ops.bind_mw = bind_mw;
	if (d->create_qp_ex)
		extended->create_qp_ex = create_qp_ex;
	(void)d.release(); /* until ibv_close_device() */
	return context;
}

NPR_EXPORT int ibv_close_device(ibv_context *context)
{
	if (const std::unique_ptr<device> d(find(context)); d) {
		/* Not every application destroys all it has before. */
		d->qps.drain([](npr_qp *qp) { (void)npr_detach_qp(qp); });
		d->srqs.drain([](npr_srq *srq) { (void)npr_detach_srq(srq); });
		while (ibv_cq *const cq = any_cq(d->lib))
			(void)npr_detach_cq(take(all().cqs, cq).lib);
		{
			const std::lock_guard lock(all().mutex);
			std::erase_if(all().channels,
				      [&](const auto &entry) { return entry.second->context == context; });
			std::erase_if(all().orphans, [&](const auto &entry) {
				return entry.second->qp_base.context == context;
			});
		}
		d->lib->regions.clear();
		(void)npr_close(d->lib);
		context->ops = d->ops;
		if (d->create_qp_ex)
			verbs_get_ctx(context)->create_qp_ex = d->create_qp_ex;
		/* Before the descriptor is another's. */
		all().devices.remove(static_cast<std::uint32_t>(context->cmd_fd), d.get());
	}
	return verbs().ibv_close_device(context);
}

NPR_EXPORT ibv_mr *ibv_reg_mr_iova2(ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	const device *const d = find(pd->context);

	if (!d)
		return verbs().ibv_reg_mr_iova2(pd, addr, length, iova, access);
	const bool unpinned = length >= threshold();
	if (unpinned)
		access |= IBV_ACCESS_UNPINNED;
	ibv_mr *const mr = verbs().ibv_reg_mr_iova2(pd, addr, length, iova, access);
	if (!mr)
		return mr;
	try {
		npr::local_key key;
		if (unpinned)
			key.handle = mr->handle;
		key.offset = reinterpret_cast<std::uintptr_t>(addr) - iova;
		d->lib->regions.add(*mr, key);
	} catch (const std::bad_alloc &) {
		(void)verbs().ibv_dereg_mr(mr);
		errno = ENOMEM;
		return nullptr;
	}
	return mr;
}

NPR_EXPORT ibv_mr *ibv_reg_mr(ibv_pd *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, reinterpret_cast<std::uintptr_t>(addr),
				static_cast<unsigned int>(access));
}

NPR_EXPORT ibv_mr *ibv_reg_mr_iova(ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, iova, static_cast<unsigned int>(access));
}

/* Not of unpinned regions, which the kernel refuses. What it moves is at the CPU's addresses. */
NPR_EXPORT int ibv_rereg_mr(ibv_mr *mr, int flags, ibv_pd *pd, void *addr, size_t length, int access)
{
	npr::local_regions *const regions = npr::local_regions::existing(mr->context);
	auto key = regions ? regions->remove(*mr) : std::nullopt;
	const int rc = verbs().ibv_rereg_mr(mr, flags, pd, addr, length, access);

	if (!rc && key && flags & IBV_REREG_MR_CHANGE_TRANSLATION)
		key->offset = 0;
	try {
		if (key)
			regions->add(*mr, *key);
	} catch (const std::bad_alloc &) {
		/* what is not known is not looked at */
	}
	return rc;
}

NPR_EXPORT int ibv_dereg_mr(ibv_mr *mr)
{
	return -npr::dereg_mr(mr, verbs().ibv_dereg_mr);
}

NPR_EXPORT ibv_comp_channel *ibv_create_comp_channel(ibv_context *context)
{
	ibv_comp_channel *const verbs_channel = verbs().ibv_create_comp_channel(context);

	if (!verbs_channel || !find(context))
		return verbs_channel;
	epoll_event e{};
	e.events = EPOLLIN;
	int error = ENOMEM;
	try {
		auto c = std::make_shared<channel>();
		c->context = context;
		c->epoll = npr::unique_fd(epoll_create1(EPOLL_CLOEXEC));
		if (c->epoll.get() >= 0 && !epoll_ctl(c->epoll.get(), EPOLL_CTL_ADD, verbs_channel->fd, &e)) {
			if (add(all().channels, verbs_channel, std::move(c)))
				return verbs_channel;
		} else {
			error = errno;
		}
	} catch (const std::bad_alloc &) {
	}
	(void)verbs().ibv_destroy_comp_channel(verbs_channel);
	errno = error;
	return nullptr;
}

NPR_EXPORT int ibv_destroy_comp_channel(ibv_comp_channel *verbs_channel)
{
	/* The next one may be at the same address. */
	const std::lock_guard lock(all().mutex);
	const int rc = verbs().ibv_destroy_comp_channel(verbs_channel);

	if (!rc)
		all().channels.erase(verbs_channel);
	return rc;
}

NPR_EXPORT ibv_cq *ibv_create_cq(ibv_context *context, int cqe, void *cq_context, ibv_comp_channel *channel,
				 int comp_vector)
{
	const device *const d = find(context);

	if (!d || cqe < 0 || cqe > d->max_cqe)
		return verbs().ibv_create_cq(context, cqe, cq_context, channel, comp_vector);
	const auto own = static_cast<std::uint32_t>(cqe);
	ibv_cq *const cq = npr::with_credits(own, 0, static_cast<std::uint32_t>(d->max_cqe), [&](std::uint32_t n) {
		return verbs().ibv_create_cq(context, static_cast<int>(n), cq_context, channel, comp_vector);
	});
	if (!cq)
		return cq;
	npr_cq *const lib = npr::attach_cq(d->lib, cq, own);
	const auto c = find(all().channels, channel);
	int error = errno;
	if (lib) {
		if (c && !watch(*c, cq, *lib))
			error = errno;
		else if (add(all().cqs, cq, queue{lib, 0, false}))
			return cq;
		else
			error = ENOMEM;
		(void)npr_detach_cq(lib);
	}
	if (may_be_left(context, "CQ", cq->handle, error))
		return cq;
	(void)verbs().ibv_destroy_cq(cq);
	errno = error;
	return nullptr;
}

NPR_EXPORT int ibv_resize_cq(ibv_cq *cq, int cqe)
{
	const device *const d = find(cq->context);
	npr_cq *const lib = find(cq);

	if (!lib || cqe < 0 || cqe > d->max_cqe)
		return verbs().ibv_resize_cq(cq, cqe);
	return lib->resize(static_cast<std::uint32_t>(cqe), static_cast<std::uint32_t>(d->max_cqe), [&](std::uint32_t n) {
		return verbs().ibv_resize_cq(cq, static_cast<int>(n));
	});
}

NPR_EXPORT int ibv_destroy_cq(ibv_cq *cq)
{
	const queue q = find(all().cqs, cq);

	if (!q.lib)
		return verbs().ibv_destroy_cq(cq);
	/* Nobody is told of it any more, for it is gone when the call returns. */
	const auto c = find(all().channels, cq->channel);
	const bool armed = set_armed(cq, false);
	if (c)
		unwatch(*c, *q.lib);
	if (const int rc = verbs().ibv_destroy_cq(cq)) {
		/* Not without memory: then the library wakes nobody for it any more. */
		if (c)
			(void)watch(*c, cq, *q.lib);
		(void)set_armed(cq, armed);
		return rc;
	}
	drop(cq, q.lib);
	(void)npr_detach_cq(q.lib);
	return 0;
}

/* Something may have happened that only the library can tell: that is an event, too. */
NPR_EXPORT int ibv_get_cq_event(ibv_comp_channel *verbs_channel, ibv_cq **cq, void **cq_context)
{
	const auto c = find(all().channels, verbs_channel);

	if (!c)
		return verbs().ibv_get_cq_event(verbs_channel, cq, cq_context);
	for (;;) {
		const int flags = status_flags(*c, verbs_channel->fd);
		const bool waits = flags < 0 || !(flags & O_NONBLOCK);
		epoll_event e;

		switch (epoll_wait(c->epoll.get(), &e, 1, waits ? -1 : 0)) {
		case 1:
			if (e.data.ptr) {
				if (own_event(e.data.ptr, cq, cq_context))
					return 0;
			} else {
				const int rc = read_event(*c, verbs_channel, cq, cq_context);
				if (!rc || errno != EAGAIN)
					return rc;
			}
			break;
		case 0:
			errno = EAGAIN;
			return -1;
		default:
			if (errno != EINTR)
				return -1;
			if (!goes_on()) {
				errno = EINTR;
				return -1;
			}
		}
	}
}

NPR_EXPORT void ibv_ack_cq_events(ibv_cq *cq, unsigned int n)
{
	{
		const std::lock_guard lock(all().mutex);
		if (const auto it = all().cqs.find(cq); it != all().cqs.end()) {
			const unsigned int ours = std::min(n, it->second.events);
			it->second.events -= ours;
			n -= ours;
		}
	}
	if (n)
		verbs().ibv_ack_cq_events(cq, n);
}

NPR_EXPORT ibv_srq *ibv_create_srq(ibv_pd *pd, ibv_srq_init_attr *attr)
{
	ibv_srq *const srq = verbs().ibv_create_srq(pd, attr);
	device *const d = find(pd->context);

	if (!srq || !d)
		return srq;
	npr_srq *const lib = npr_attach_srq(d->lib, srq);
	if (lib && d->srqs.set(srq->handle, srq, lib))
		return srq;
	const int error = lib ? ENOMEM : errno;
	if (lib)
		(void)npr_detach_srq(lib);
	if (may_be_left(pd->context, "SRQ", srq->handle, error))
		return srq;
	(void)verbs().ibv_destroy_srq(srq);
	errno = error;
	return nullptr;
}

NPR_EXPORT int ibv_destroy_srq(ibv_srq *srq)
{
	device *const d = find(srq->context);
	const std::uint32_t handle = srq->handle;
	npr_srq *const lib = d ? d->srqs.find(handle, srq) : nullptr;

	if (const int rc = verbs().ibv_destroy_srq(srq); rc || !lib)
		return rc;
	d->srqs.remove(handle, lib);
	(void)npr_detach_srq(lib);
	return 0;
}

NPR_EXPORT ibv_qp *ibv_create_qp(ibv_pd *pd, ibv_qp_init_attr *attr)
{
	if (!find(pd->context))
		return verbs().ibv_create_qp(pd, attr);
	ibv_qp *const qp = create_larger(attr->cap, [&] { return verbs().ibv_create_qp(pd, attr); });
	return qp ? attach_new(qp) : qp;
}

NPR_EXPORT int ibv_destroy_qp(ibv_qp *qp)
{
	const completions unseen(qp);
	/* Before: what is under way ends by means of the QP. */
	auto ex = detach(qp);
	const int rc = verbs().ibv_destroy_qp(qp);

	if (!rc)
		unseen.forget();
	/* It is still there, which is what the caller is told. */
	if (rc && ex)
		(void)attach_again(qp, std::move(ex));
	return rc;
}

NPR_EXPORT int ibv_modify_qp(ibv_qp *qp, ibv_qp_attr *attr, int mask)
{
	const bool to_reset = mask & IBV_QP_STATE && attr->qp_state == IBV_QPS_RESET;
	const bool reset = to_reset && is_ours(qp);

	std::unique_ptr<npr::qp_ex> ex;
	if (reset)
		ex = detach(qp);

	ibv_qp_attr a = *attr;
	if (qp->qp_type == IBV_QPT_RC && find(qp)) {
		/* WRITEs and atomics are proven by a READ: peers need to, and we. */
		if (mask & IBV_QP_ACCESS_FLAGS && a.qp_access_flags & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC))
			a.qp_access_flags |= IBV_ACCESS_REMOTE_READ;
		if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
			a.max_dest_rd_atomic = std::max<std::uint8_t>(a.max_dest_rd_atomic, 1);
		if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
			a.max_rd_atomic = std::max<std::uint8_t>(a.max_rd_atomic, 1);
	}
	const int rc = verbs().ibv_modify_qp(qp, &a, mask);
	if (to_reset && !rc)
		completions(qp).forget();
	if (!reset)
		return rc;
	if (const int error = attach_again(qp, std::move(ex)); error && !rc)
		return may_be_left(qp->context, "QP", qp->qp_num, error) ? 0 : error;
	return rc;
}

/* What a READ brings may come in two tries, and what a WRITE brings is the peer's library to order. */
NPR_EXPORT int ibv_query_qp_data_in_order(ibv_qp *qp, ibv_wr_opcode op, std::uint32_t flags)
{
	const auto real = verbs().ibv_query_qp_data_in_order;

	return find(qp) || !real ? 0 : real(qp, op, flags);
}

NPR_EXPORT ibv_qp_ex *ibv_qp_to_qp_ex(ibv_qp *qp)
{
	npr_qp *const lib = find(qp);

	return lib ? npr_qp_to_qp_ex(lib) : verbs().ibv_qp_to_qp_ex(qp);
}
