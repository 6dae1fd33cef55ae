/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The library's objects by those of verbs. */
#ifndef NPR_PRELOAD_REGISTRY_HPP
#define NPR_PRELOAD_REGISTRY_HPP

#include "object/cq.hpp"
#include "object/srq.hpp"

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

namespace npr::preload {

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
inline constexpr int some_cqe = 1 << 16;

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
				     [&](const auto &entry) { return &entry.second.lib->ctx == context; });

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
