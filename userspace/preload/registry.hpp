/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The library's objects by those of verbs. */
#ifndef NPR_PRELOAD_REGISTRY_HPP
#define NPR_PRELOAD_REGISTRY_HPP

#include "builders.hpp"
#include "object/cq.hpp"
#include "object/srq.hpp"
#include "report.hpp"
#include "twins.hpp"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <unistd.h>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace npr::preload {

/*
 * Some objects of a program need all of its memory on a device pinned, such as queues that
 * it fills itself. Keys that are given out cannot be changed, so the first region that is registered decides: it is
 * pinned if there is such an object then, and all others are as well; otherwise no such object is made any more.
 */
class memory_kind {
public:
	/* A region is to be made. Null: unpinned, and unpinned_made() follows; otherwise what needs it pinned. */
	[[nodiscard]] const char *pinned_for() noexcept
	{
		const std::lock_guard lock(mutex_);

		if (what_)
			decided_ = true;
		else
			++registering_;
		return what_;
	}
	void unpinned_made(bool made) noexcept
	{
		const std::lock_guard lock(mutex_);

		--registering_;
		decided_ = decided_ || made;
	}
	/* @what is to be made; is_for() or not_made() follows. False: there may be unpinned regions. */
	[[nodiscard]] bool pin(const char *what) noexcept
	{
		const std::lock_guard lock(mutex_);

		if (!what_ && (decided_ || registering_))
			return false;
		if (!what_)
			what_ = what;
		++making_;
		return true;
	}
	/* It has been made, is @object, and ends with gone(). One that cannot be remembered stays. */
	void is_for(const void *object) noexcept
	{
		const std::lock_guard lock(mutex_);

		try {
			objects_.insert(object);
			--making_;
		} catch (const std::bad_alloc &) {
		}
	}
	/* Programs try some just to see whether they can. */
	void not_made() noexcept
	{
		const std::lock_guard lock(mutex_);

		--making_;
		forget();
	}
	void gone(const void *object) noexcept
	{
		const std::lock_guard lock(mutex_);

		if (objects_.erase(object))
			forget();
	}
	/* Is @object one of them? */
	[[nodiscard]] bool has(const void *object) noexcept
	{
		const std::lock_guard lock(mutex_);

		return objects_.contains(object);
	}
	/* Is a region that is registered now unpinned? */
	[[nodiscard]] bool may_unpin() noexcept
	{
		const std::lock_guard lock(mutex_);

		return !what_;
	}

private:
	void forget() noexcept
	{
		if (objects_.empty() && !making_ && !decided_)
			what_ = nullptr;
	}

	std::mutex mutex_;
	std::unordered_set<const void *> objects_;
	const char *what_ = nullptr; /* the first of them */
	unsigned making_ = 0, registering_ = 0;
	bool decided_ = false; /* there is a region, or was */
};

/* Of verbs_context, the provider's; null: it has none, or it is not replaced. */
struct extended_ops {
	decltype(verbs_context::create_qp_ex) create_qp_ex = nullptr;
	decltype(verbs_context::create_cq_ex) create_cq_ex = nullptr;
	decltype(verbs_context::create_srq_ex) create_srq_ex = nullptr;
	decltype(verbs_context::create_wq) create_wq = nullptr;
	decltype(verbs_context::destroy_wq) destroy_wq = nullptr;
	decltype(verbs_context::open_xrcd) open_xrcd = nullptr;
	decltype(verbs_context::close_xrcd) close_xrcd = nullptr;
	decltype(verbs_context::open_qp) open_qp = nullptr;
	decltype(verbs_context::query_device_ex) query_device_ex = nullptr;
	decltype(verbs_context::alloc_parent_domain) alloc_parent_domain = nullptr;
	decltype(verbs_context::reg_dm_mr) reg_dm_mr = nullptr;
	decltype(verbs_context::alloc_null_mr) alloc_null_mr = nullptr;
};

/* What the provider has in a receive work queue, which programs post to by our function. */
struct left_wq {
	decltype(ibv_wq::post_recv) post_recv;
};

struct device {
	/* Throws std::bad_alloc. */
	device(ibv_context &v, npr_context *l, int cqe)
	    : verbs(v), ops(v.ops), lib(l), max_cqe(cqe), told(tally_of(&v)), regions(told)
	{
	}

	ibv_context &verbs;
	const ibv_context_ops ops; /* the provider's */
	extended_ops extended;
	npr_context *const lib; /* it has the CQs */
	const int max_cqe;	/* of one CQ */
	const pid_t process = getpid(); /* not a child of it after fork() */
	bool owner = true;	/* it can have unpinned regions; peers' it can reach anyhow */
	tally &told;
	memory_kind memory;
	std::atomic<bool> xrc{false}; /* peers may reach regions through XRC; relaxed, as all().direct */
	twins regions; /* unpinned ones */
	npr::handle_table<ibv_qp, npr_qp> qps;
	npr::handle_table<ibv_srq, npr_srq> srqs;
	npr::handle_table<ibv_qp, builder> builders; /* of QPs that are left to the provider */
	npr::handle_table<ibv_wq, left_wq> wqs;
};

/* While there is one, this thread opens a device by the libibverbs that this library knows. */
class opening {
public:
	opening() noexcept;
	~opening();
	opening(const opening &) = delete;
	opening &operator=(const opening &) = delete;
};

/*
 * @what needs all memory of the program on this device pinned. False and EOPNOTSUPP: it is not, and the user is
 * told so. The user is told that memory stays pinned when the first region does.
 */
[[nodiscard]] bool keep_pinned(device &d, const char *what);
/* By @make(), an object that needs it, until forget(). Null and errno. */
template <class F>
auto make_pinned(device &d, const char *what, F &&make) -> decltype(make())
{
	if (!keep_pinned(d, what))
		return nullptr;
	const auto made = make();
	if (made)
		d.memory.is_for(made);
	else
		d.memory.not_made();
	return made;
}
/* Of an object that is left to the provider: what it uses is pinned. The user is told once. */
void tell_left(device &d, const char *what);
/* It is the provider's alone from here on, with nothing under way. */
void leave(ibv_qp *qp);
void leave(ibv_cq *cq);
/*
 * An object that the library could not attach: true if it may be used nevertheless, with pinned
 * regions. Otherwise what is done with it would fail later, where nobody knows why.
 */
[[nodiscard]] bool may_be_left(device &d, const char *what, std::uint32_t number, int error);

/* Of a device that does not say how many. */
inline constexpr int some_cqe = 1 << 16;

/* What the application asked for, where the QP has more. */
struct asked {
	ibv_context *context; /* null: nothing is known */
	unsigned int access;
	std::uint8_t max_rd_atomic, max_dest_rd_atomic;
};

/* The multicast groups of a QP: as long as it is in one it cannot be destroyed. */
struct memberships {
	ibv_context *context;
	std::set<std::pair<std::array<std::uint8_t, 16>, std::uint16_t>> groups;
};

struct queue {
	npr_cq *lib;	     /* null: it is the provider's by now */
	unsigned int events; /* that only we have seen, not acknowledged yet */
	bool armed;	     /* once at least: who never asked for events gets none */
	std::optional<ibv_cq_ex> theirs; /* with the provider's functions, if ours are in their place */
};

/*
 * What the application has for a completion channel. Its descriptor is readable when the provider's channel is, or when
 * something happened to the CQs on it that only the library can tell. That is edge-triggered: one
 * happening wakes one thread, once, as one event does.
 */
struct channel : ibv_comp_channel {
	ibv_comp_channel *real; /* its file does not block */
	npr::unique_fd epoll;	/* the application's fd */
};

/*
 * All objects by those of verbs. The application orders use and destruction, as ever. Where the
 * kernel may refuse to destroy one, it is asked first, so that a key may be of what is no more,
 * and be used anew already: keys are compared, and looked into only by who uses the object.
 */
struct objects {
	npr::handle_table<ibv_context, device> devices; /* by the descriptors of their contexts */

	/* The program has asked for direct verbs, and may use them. Relaxed: it orders what depends on each other. */
	std::atomic<bool> direct{false};

	/* What is not looked up by who posts or polls. */
	std::mutex mutex;
	std::condition_variable acknowledged; /* an event that only we have seen */
	std::unordered_map<ibv_comp_channel *, std::shared_ptr<channel>> channels;
	std::unordered_map<ibv_cq *, queue> cqs;
	std::unordered_map<ibv_qp *, asked> rights;
	std::unordered_map<ibv_qp *, memberships> groups;
	/* Of QPs that could not be attached again: good until they are destroyed. */
	std::unordered_map<ibv_qp *, std::unique_ptr<npr::qp_ex>> orphans;
	std::atomic<bool> any_orphans{false}; /* there were; relaxed: who uses one has synchronised with who made it one */
};

inline objects &all()
{
	/* Never destroyed: applications use verbs until the very end. */
	static objects &o = *std::make_unique<objects>().release();

	return o;
}

/* The library's object, or null. */
inline device *find(const ibv_context *context)
{
	return all().devices.find(static_cast<std::uint32_t>(context->cmd_fd), context);
}

inline npr_qp *find(const ibv_qp *qp)
{
	const device *const d = find(qp->context);

	return d ? d->qps.find(qp->handle, qp) : nullptr;
}

inline npr_cq *find(const ibv_cq *cq)
{
	const device *const d = cq ? find(cq->context) : nullptr;

	return d ? d->lib->cqs.find(cq->handle, cq) : nullptr;
}

/* Is it the library's? Its objects have the handle of a QP of theirs. */
inline bool find_ex(const ibv_qp_ex *ex)
{
	const device *const d = find(ex->qp_base.context);
	npr_qp *const lib = d ? d->qps.find_any(ex->qp_base.handle) : nullptr;

	return lib && lib->ex.get() == ex;
}

/*
 * The queue pair of @qp: what ibv_qp_to_qp_ex() gives has a struct ibv_qp as well, which programs use as they use the other, and
 * which is not the provider's object if the library has made it. All others are themselves.
 */
[[nodiscard]] inline ibv_qp *real_of(ibv_qp *qp)
{
	const device *const d = find(qp->context);
	npr_qp *const lib = d ? d->qps.find_any(qp->handle) : nullptr;

	if (lib && &lib->ex->qp_base == qp)
		return lib->verbs;
	if (all().any_orphans.load(std::memory_order_relaxed)) {
		const std::lock_guard lock(all().mutex);

		for (const auto &[real, ex] : all().orphans)
			if (&ex->qp_base == qp)
				return real;
	}
	return qp;
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
inline void drop(ibv_cq *cq, const npr_cq *lib)
{
	const std::lock_guard lock(all().mutex);

	if (const auto it = all().cqs.find(cq); it != all().cqs.end() && it->second.lib == lib)
		all().cqs.erase(it);
}

/* Some CQ of @context, or null. */
inline ibv_cq *any_cq(const npr_context *context)
{
	const std::lock_guard lock(all().mutex);
	const auto it = std::find_if(all().cqs.begin(), all().cqs.end(),
				     [&](const auto &entry) { return entry.second.lib && &entry.second.lib->ctx == context; });

	return it == all().cqs.end() ? nullptr : it->first;
}

/* Whether those who wait are told what happens to @cq. What it was before. */
inline bool set_armed(ibv_cq *cq, bool armed)
{
	const std::lock_guard lock(all().mutex);
	const auto it = all().cqs.find(cq);

	return it != all().cqs.end() && std::exchange(it->second.armed, armed);
}

} // namespace npr::preload

#endif
