// SPDX-License-Identifier: GPL-2.0
/*
 * A hostile process on the uverbs methods, and hostile neighbours.
 *
 * Each attribute of each method in each wrong size, with wrong handles and wrong
 * pointers: a clean error, no page pinned, no object left behind, and the next good
 * call works. Then all of it at random from several threads that close and destroy
 * under each other, while traffic of another process has to stay correct. Last, what
 * stand-in pages may show to whom.
 */
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "np_harness.h"

#define KERNEL_ADDRESS	0xffff888000000000ULL
#define NO_ADDRESS	0x8000000000000000ULL	/* not canonical */

/* --- the methods, as data ---------------------------------------------------------- */

enum kind {
	HANDLE,		/* of an object that exists */
	FD,		/* likewise */
	NEW,		/* of an object or file to be made */
	GONE,		/* of an object to be destroyed */
	IN,		/* exactly @len bytes to the kernel */
	IN_OPEN,	/* at least @len bytes; what the kernel does not know must be 0 */
	IN_ARRAY,	/* elements of @len bytes, at most @max of them */
	OUT,		/* at least @len bytes from the kernel */
};

struct param {
	uint16_t id;
	enum kind kind;
	uint16_t len;
	uint16_t max;
};

#define MAX_PARAMS	4

struct method {
	const char *name;
	uint16_t object;
	uint16_t method;
	unsigned int nr;
	struct param params[MAX_PARAMS];
};

enum {
	QUERY, RESOLVE, FAULT, RELEASE, FORGET, QUERY_MR, CHANNEL, HOLD, HOLD_FREE, ADVISE, NR_METHODS,
};

static const struct method methods[NR_METHODS] = {
	[QUERY] = { "QUERY", UVERBS_OBJECT_NPRDMA, NP_METHOD_QUERY, 1, {
		{ NP_ATTR_QUERY_RESP, OUT, sizeof(struct np_query) } } },
	[RESOLVE] = { "RESOLVE", UVERBS_OBJECT_NPRDMA, NP_METHOD_RESOLVE, 4, {
		{ NP_ATTR_RESOLVE_QP, HANDLE },
		{ NP_ATTR_RESOLVE_CHANNEL, FD },
		{ NP_ATTR_RESOLVE_RKEY, IN, sizeof(uint32_t) },
		{ NP_ATTR_RESOLVE_RESP, OUT, sizeof(struct np_region_info) } } },
	[FAULT] = { "FAULT", UVERBS_OBJECT_NPRDMA, NP_METHOD_FAULT, 4, {
		{ NP_ATTR_FAULT_QP, HANDLE },
		{ NP_ATTR_FAULT_CHANNEL, FD },
		{ NP_ATTR_FAULT_REQ, IN_OPEN, sizeof(struct np_fault_req) },
		{ NP_ATTR_FAULT_RANGES, IN_ARRAY, sizeof(struct np_range), NP_MAX_RANGES } } },
	[RELEASE] = { "RELEASE", UVERBS_OBJECT_NPRDMA, NP_METHOD_RELEASE, 2, {
		{ NP_ATTR_RELEASE_QP, HANDLE },
		{ NP_ATTR_RELEASE_HOLD, IN, sizeof(uint64_t) } } },
	[FORGET] = { "FORGET", UVERBS_OBJECT_NPRDMA, NP_METHOD_FORGET, 2, {
		{ NP_ATTR_FORGET_QP, HANDLE },
		{ NP_ATTR_FORGET_REGION, IN, sizeof(uint64_t) } } },
	[QUERY_MR] = { "QUERY_MR", UVERBS_OBJECT_NPRDMA, NP_METHOD_QUERY_MR, 2, {
		{ NP_ATTR_QUERY_MR_HANDLE, HANDLE },
		{ NP_ATTR_QUERY_MR_RESP, OUT, offsetof(struct np_mr_info, reserved) + 32 } } },
	[CHANNEL] = { "CHANNEL_ALLOC", UVERBS_OBJECT_NP_CHANNEL, NP_METHOD_CHANNEL_ALLOC, 1, {
		{ NP_ATTR_CHANNEL_FD, NEW } } },
	[HOLD] = { "HOLD_ALLOC", UVERBS_OBJECT_NP_HOLD, NP_METHOD_HOLD_ALLOC, 4, {
		{ NP_ATTR_HOLD_ALLOC_HANDLE, NEW },
		{ NP_ATTR_HOLD_ALLOC_MR, HANDLE },
		{ NP_ATTR_HOLD_ALLOC_REQ, IN_OPEN, sizeof(struct np_hold_req) },
		{ NP_ATTR_HOLD_ALLOC_RESP, OUT, sizeof(struct np_hold_info) } } },
	[HOLD_FREE] = { "HOLD_FREE", UVERBS_OBJECT_NP_HOLD, NP_METHOD_HOLD_FREE, 1, {
		{ NP_ATTR_HOLD_FREE_HANDLE, GONE } } },
	/* Not ours, but what it does to unpinned regions is. */
	[ADVISE] = { "ADVISE_MR", UVERBS_OBJECT_MR, UVERBS_METHOD_ADVISE_MR, 4, {
		{ UVERBS_ATTR_ADVISE_MR_PD_HANDLE, HANDLE },
		{ UVERBS_ATTR_ADVISE_MR_ADVICE, IN, 0 },
		{ UVERBS_ATTR_ADVISE_MR_FLAGS, IN, 0 },
		{ UVERBS_ATTR_ADVISE_MR_SGE_LIST, IN_ARRAY, sizeof(struct ib_uverbs_sge),
		  UINT16_MAX } } },
};

struct call {
	struct ib_uverbs_ioctl_hdr hdr;
	struct ib_uverbs_attr attrs[MAX_PARAMS + 1];
};

/* --- the hostile process -------------------------------------------------------------- */

#define ARENA_LEN	(1UL << 17)

/*
 * The methods act on two contexts: of the owner (regions, local holds), and of the
 * peer that has a QP to it.
 */
struct hostile {
	struct np_pair *pair;
	uint8_t *arena;		/* arguments; ends in a page that cannot be accessed */
	uint8_t *read_only;	/* a page of zeros */
	uint64_t hold_id;	/* of a hold of the peer; 0: none */
	int64_t hold;		/* of a local hold; -1: none */
};

static int hostile_open(struct hostile *h, struct np_pair *pair)
{
	memset(h, 0, sizeof(*h));
	h->pair = pair;
	h->hold = -1;
	h->arena = np_map(ARENA_LEN + PAGE);
	h->read_only = np_map(PAGE);
	if (!h->arena || !h->read_only)
		return -ENOMEM;
	if (mprotect(h->arena + ARENA_LEN, PAGE, PROT_NONE) ||
	    mprotect(h->read_only, PAGE, PROT_READ))
		return -errno;
	return 0;
}

static struct ibv_context *context_of(const struct hostile *h, unsigned int m)
{
	bool peer = m == RESOLVE || m == FAULT || m == RELEASE || m == FORGET || m == CHANNEL;

	return peer ? h->pair->peer.ctx : h->pair->owner.ctx;
}

static int do_ioctl(struct ibv_context *ctx, struct call *call)
{
	call->hdr.length = sizeof(call->hdr) + call->hdr.num_attrs * sizeof(call->attrs[0]);
	return ioctl(ctx->cmd_fd, RDMA_VERBS_IOCTL, &call->hdr) ? -errno : 0;
}

/* Where the data of parameter @i is: each has a quarter of the arena. */
static uint8_t *place(const struct hostile *h, unsigned int i)
{
	return h->arena + i * ARENA_LEN / MAX_PARAMS;
}

/* What a good call needs to exist. */
static int prepare(struct hostile *h, unsigned int m)
{
	struct np_pair *pair = h->pair;
	struct np_hold_info info;
	struct np_event event;
	int ret;

	if (m == FORGET || m == FAULT || (m == RELEASE && !h->hold_id)) {
		ret = np_pair_resolve(pair);
		if (ret)
			return ret;
	}
	if (m == RELEASE && !h->hold_id) {
		ret = np_pair_fault(pair, 0, PAGE, NP_FAULT_HOLD, &event);
		if (ret)
			return ret;
		h->hold_id = event.hold_id;
	}
	if (m == HOLD_FREE && h->hold < 0) {
		h->hold = np_hold(pair->mr, (uintptr_t)pair->data, PAGE, 0, &info);
		if (h->hold < 0)
			return h->hold;
	}
	return 0;
}

static uint64_t good_handle(const struct hostile *h, unsigned int m)
{
	switch (m) {
	case QUERY_MR:
	case HOLD:
		return h->pair->mr->handle;
	case HOLD_FREE:
		return h->hold;
	case ADVISE:
		return h->pair->owner.pd->handle;
	default:
		return h->pair->peer.qp->handle;
	}
}

/* The arguments of a good call; returns how many bytes go to the kernel. */
static size_t good_data(const struct hostile *h, unsigned int m, unsigned int i, uint8_t *to)
{
	uint64_t base = (uintptr_t)h->pair->data;
	struct np_hold_req hold = { .addr = base, .length = PAGE };
	struct np_fault_req req = { .region_id = h->pair->info.region_id, .cookie = 1 };
	struct np_range range = { .addr = base, .length = PAGE };
	struct ib_uverbs_sge sge = { .addr = base, .length = PAGE, .lkey = h->pair->mr->lkey };
	const struct { const void *data; size_t len; } data[] = {
		{ &h->pair->mr->rkey, 4 }, { &req, sizeof(req) }, { &range, sizeof(range) },
		{ &h->hold_id, 8 }, { &h->pair->info.region_id, 8 }, { &hold, sizeof(hold) },
		{ &sge, sizeof(sge) }, { (uint32_t[]){ IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH, 0 }, 8 },
		{ (uint32_t[]){ IB_UVERBS_ADVISE_MR_FLAG_FLUSH }, 4 },
	};
	unsigned int which;

	switch (m) {
	case RESOLVE:
		which = 0;
		break;
	case FAULT:
		which = i == 2 ? 1 : 2;
		break;
	case RELEASE:
		which = 3;
		break;
	case FORGET:
		which = 4;
		break;
	case HOLD:
		which = 5;
		break;
	default:
		which = i == 3 ? 6 : i == 1 ? 7 : 8;
	}
	memcpy(to, data[which].data, data[which].len);
	return data[which].len;
}

static bool is_in(enum kind kind)
{
	return kind == IN || kind == IN_OPEN || kind == IN_ARRAY;
}

static bool is_data(enum kind kind)
{
	return is_in(kind) || kind == OUT;
}

static void good_call(struct hostile *h, unsigned int m, struct call *call)
{
	const struct method *method = &methods[m];

	memset(call, 0, sizeof(*call));
	call->hdr.object_id = method->object;
	call->hdr.method_id = method->method;
	call->hdr.driver_id = RDMA_DRIVER_MLX5;
	call->hdr.num_attrs = method->nr;
	for (unsigned int i = 0; i < method->nr; i++) {
		const struct param *p = &method->params[i];
		struct ib_uverbs_attr *attr = &call->attrs[i];

		attr->attr_id = p->id;
		attr->flags = UVERBS_ATTR_F_MANDATORY;
		switch (p->kind) {
		case HANDLE:
		case GONE:
			attr->data = good_handle(h, m);
			break;
		case FD:
			attr->data = h->pair->peer.channel;
			break;
		case NEW:
			break;
		case OUT:
			attr->len = p->len;
			attr->data = (uintptr_t)place(h, i);
			break;
		default:
			memset(place(h, i), 0, ARENA_LEN / MAX_PARAMS);
			attr->len = good_data(h, m, i, place(h, i));
			attr->data = (uintptr_t)place(h, i);
			if (attr->len <= 8)
				memcpy(&attr->data, place(h, i), 8);
		}
	}
}

/* After success: undo it, and know what does not exist any more. */
static int undo(struct hostile *h, unsigned int m, const struct call *call)
{
	struct np_event event;

	switch (m) {
	case CHANNEL:
		return close(call->attrs[0].data) ? -errno : 0;
	case HOLD:
		return np_hold_free(h->pair->owner.ctx, call->attrs[0].data);
	case HOLD_FREE:
		h->hold = -1;
		return 0;
	case RELEASE:
		h->hold_id = 0;
		return 0;
	case FAULT:
		if (np_wait_event(&h->pair->peer, NP_EVENT_FAULT, &event, NP_WAIT_MS) != 1)
			return -ETIMEDOUT;
		return event.status == NP_OK || event.status == NP_BUSY ? 0 : -EPROTO;
	}
	return 0;
}

static int run_call(struct hostile *h, unsigned int m, struct call *call)
{
	int ret = do_ioctl(context_of(h, m), call), err;

	if (ret)
		return ret;
	err = undo(h, m, call);
	return err ? -ENOTRECOVERABLE : 0;
}

/* --- each attribute, each way to be wrong ------------------------------------------------ */

FIXTURE(methods) {
	struct np_pair pair;
	struct hostile h;
	long pinned;
};

FIXTURE_VARIANT(methods) {
	unsigned int m;
};

#define METHOD(name_)	FIXTURE_VARIANT_ADD(methods, name_) { .m = name_ }
METHOD(QUERY);
METHOD(RESOLVE);
METHOD(FAULT);
METHOD(RELEASE);
METHOD(FORGET);
METHOD(QUERY_MR);
METHOD(CHANNEL);
METHOD(HOLD);
METHOD(HOLD_FREE);
METHOD(ADVISE);

FIXTURE_SETUP(methods)
{
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
	ASSERT_EQ(0, hostile_open(&self->h, &self->pair));
	ASSERT_EQ(0, prepare(&self->h, variant->m));
	self->pinned = np_pinned();
}

FIXTURE_TEARDOWN_PARENT(methods)
{
	NP_CHECK_USAGE(&self->pair.before);
}

/* A call that @change spoils ends with @error, and is good without. */
#define EXPECT_CALL(error_, change)						\
	do {									\
		int want_ = (error_), got_;					\
										\
		ASSERT_EQ(0, prepare(&self->h, variant->m));			\
		good_call(&self->h, variant->m, &call);				\
		change;								\
		got_ = run_call(&self->h, variant->m, &call);			\
		EXPECT_EQ(want_, got_)						\
			TH_LOG("%s, attribute %u: %s", method->name, i, #change);	\
		/* What was held before may be given back by now. */		\
		EXPECT_GE(self->pinned, np_pinned())				\
			TH_LOG("%s, attribute %u: %s", method->name, i, #change);	\
	} while (0)

#define EXPECT_GOOD()	EXPECT_CALL(0, i = i)

TEST_F(methods, attribute_that_is_missing_doubled_or_unknown_is_refused)
{
	const struct method *method = &methods[variant->m];
	unsigned int i = 0;
	struct call call;

	EXPECT_GOOD();
	for (i = 0; i < method->nr; i++) {
		unsigned int last = method->nr - 1;

		EXPECT_CALL(-EINVAL, call.attrs[i] = call.attrs[last]; call.hdr.num_attrs--);
		EXPECT_CALL(-EINVAL, call.attrs[last + 1] = call.attrs[i]; call.hdr.num_attrs++);
		EXPECT_CALL(-EPROTONOSUPPORT, call.attrs[i].attr_id = 77);
		EXPECT_CALL(-EPROTONOSUPPORT, call.attrs[i].attr_id |= 1U << 12);
		/* An unknown one that may be ignored is none. */
		EXPECT_CALL(-EINVAL, call.attrs[i].attr_id = 77; call.attrs[i].flags = 0);
		EXPECT_CALL(-EINVAL, call.attrs[i].attr_data.reserved = 1);
	}
	i = method->nr;
	EXPECT_CALL(-EINVAL, call.hdr.num_attrs = 0);
	EXPECT_CALL(-EPROTONOSUPPORT, call.hdr.method_id = 55);
	EXPECT_CALL(-EPROTONOSUPPORT, call.hdr.object_id = UVERBS_OBJECT_NPRDMA + 7);
	EXPECT_CALL(-EINVAL, call.hdr.driver_id = RDMA_DRIVER_RXE);
	EXPECT_CALL(-EPROTONOSUPPORT, call.hdr.reserved1 = 1);
	EXPECT_CALL(-EPROTONOSUPPORT, call.hdr.reserved2 = 1);
	/* The header's own length. */
	good_call(&self->h, variant->m, &call);
	for (int delta = -25; delta <= 25; delta++) {
		call.hdr.length = sizeof(call.hdr) + method->nr * sizeof(call.attrs[0]) + delta;
		if (delta)
			EXPECT_NE(0, ioctl(context_of(&self->h, variant->m)->cmd_fd,
					   RDMA_VERBS_IOCTL, &call.hdr));
	}
	EXPECT_GOOD();
}

TEST_F(methods, attribute_of_another_size_is_refused)
{
	const struct method *method = &methods[variant->m];
	unsigned int i;
	struct call call;

	for (i = 0; i < method->nr; i++) {
		const struct param *p = &method->params[i];
		unsigned int len, unit = p->len;

		if (!is_data(p->kind)) {
			/* Handles are not data. */
			EXPECT_CALL(-EINVAL, call.attrs[i].len = 1);
			EXPECT_CALL(-EINVAL, call.attrs[i].len = 8);
			EXPECT_CALL(-EINVAL, call.attrs[i].len = UINT16_MAX);
			continue;
		}
		/* Those of ADVISE_MR that are by value may be of 4 or 8 bytes. */
		for (len = 0; len < (unit ? unit : 4); len++)
			EXPECT_CALL(-EINVAL, call.attrs[i].len = len);
		switch (p->kind) {
		case OUT:
			EXPECT_CALL(0, call.attrs[i].len = unit + 1);
			EXPECT_CALL(0, call.attrs[i].len = 8192);
			EXPECT_TRUE(np_all(place(&self->h, i) + (unit + 7) / 8 * 8, 4096, 0));
			/* More than is mapped. */
			EXPECT_CALL(-EFAULT, call.attrs[i].len = UINT16_MAX;
				    call.attrs[i].data = (uintptr_t)self->h.arena + ARENA_LEN - 32768);
			break;
		case IN_OPEN:
			EXPECT_CALL(0, call.attrs[i].len = unit + 1);
			EXPECT_CALL(0, call.attrs[i].len = 8192);
			EXPECT_CALL(-EOPNOTSUPP, call.attrs[i].len = unit + 1;
				    place(&self->h, i)[unit] = 1);
			EXPECT_CALL(-EOPNOTSUPP, call.attrs[i].len = 8192;
				    place(&self->h, i)[8191] = 0x80);
			break;
		case IN_ARRAY:
			EXPECT_CALL(-EINVAL, call.attrs[i].len = unit + 1);
			EXPECT_CALL(-EINVAL, call.attrs[i].len = 2 * unit - 1);
			if (p->max == UINT16_MAX)
				break;
			EXPECT_CALL(-EINVAL, call.attrs[i].len = (p->max + 1) * unit);
			EXPECT_CALL(-EINVAL, call.attrs[i].len = UINT16_MAX);
			break;
		default:
			for (len = (unit ? unit : 8) + 1; len < 24; len++)
				EXPECT_CALL(-EINVAL, call.attrs[i].len = len);
			EXPECT_CALL(-EINVAL, call.attrs[i].len = UINT16_MAX);
		}
	}
	i = method->nr;
	EXPECT_GOOD();
}

TEST_F(methods, pointer_to_nowhere_is_refused)
{
	const struct method *method = &methods[variant->m];
	struct call call;
	unsigned int i;

	for (i = 0; i < method->nr; i++) {
		const struct param *p = &method->params[i];
		uint8_t *end = self->h.arena + ARENA_LEN;

		if (!is_data(p->kind) || p->len <= 8)
			continue;
		EXPECT_CALL(-EFAULT, call.attrs[i].data = 0);
		EXPECT_CALL(-EFAULT, call.attrs[i].data = (uintptr_t)end);
		EXPECT_CALL(-EFAULT, call.attrs[i].data = (uintptr_t)end - 1);
		EXPECT_CALL(-EFAULT, call.attrs[i].data = (uintptr_t)end - p->len + 1);
		EXPECT_CALL(-EFAULT, call.attrs[i].data = KERNEL_ADDRESS);
		EXPECT_CALL(-EFAULT, call.attrs[i].data = NO_ADDRESS);
		EXPECT_CALL(-EFAULT, call.attrs[i].data = UINT64_MAX);
		EXPECT_CALL(-EFAULT, call.attrs[i].data = UINT64_MAX - p->len + 1);
		EXPECT_CALL(-EFAULT, call.attrs[i].data = -(uint64_t)PAGE);
		if (p->kind == OUT)
			EXPECT_CALL(-EFAULT, call.attrs[i].data = (uintptr_t)self->h.read_only);
		/* Where the last byte is the last, and where nothing is aligned, is fine. */
		EXPECT_CALL(0, memcpy(end - p->len, place(&self->h, i), p->len);
			    call.attrs[i].data = (uintptr_t)end - p->len);
		EXPECT_CALL(0, memmove(place(&self->h, i) + 3, place(&self->h, i), p->len);
			    call.attrs[i].data += 3);
	}
	i = method->nr;
	EXPECT_GOOD();
}

/* No error of a lookup is success, and none is a surprise. */
#define EXPECT_NO_OBJECT(change)							\
	do {									\
		int ret_;							\
										\
		ASSERT_EQ(0, prepare(&self->h, variant->m));			\
		good_call(&self->h, variant->m, &call);				\
		change;								\
		ret_ = run_call(&self->h, variant->m, &call);			\
		EXPECT_TRUE(ret_ == -ENOENT || ret_ == -EBADF || ret_ == -EINVAL)	\
			TH_LOG("%s, attribute %u: %s: %d", method->name, i, #change, ret_);	\
	} while (0)

TEST_F(methods, handle_of_something_else_is_refused)
{
	const struct method *method = &methods[variant->m];
	struct np_pair *pair = &self->pair;
	struct ibv_context *ctx = context_of(&self->h, variant->m);
	struct np_end *end = ctx == pair->owner.ctx ? &pair->owner : &pair->peer;
	struct np_hold_info info;
	struct np_end other;
	struct call call;
	unsigned int i;
	int64_t hold;

	/* Objects of the same kinds in a context of their own. */
	ASSERT_EQ(0, np_open(&other, ctx == pair->owner.ctx ? NP_OWNER_DEV : NP_PEER_DEV, PAGE));
	hold = np_hold(pair->mr, (uintptr_t)pair->data, PAGE, 0, &info);
	ASSERT_LE(0, hold);
	self->pinned = np_pinned();
	for (i = 0; i < method->nr; i++) {
		const struct param *p = &method->params[i];
		uint64_t good, bad[] = {
			end->pd->handle, end->qp->handle, ((struct ibv_cq *)end->cq)->handle,
			end->mr ? end->mr->handle : 0xfffff, hold, 0xfffffff0, UINT32_MAX,
			INT64_MAX, INT64_MIN, UINT64_MAX,
		};

		if (p->kind == HANDLE || p->kind == GONE) {
			good = good_handle(&self->h, variant->m);
			/* Objects of a context share one number space: the others are other kinds. */
			for (unsigned int b = 0; b < ARRAY_SIZE(bad); b++) {
				if (bad[b] != good && !(p->kind == GONE && bad[b] == (uint64_t)hold) &&
				    !(variant->m == QUERY_MR && bad[b] == end->mr->handle))
					EXPECT_NO_OBJECT(call.attrs[i].data = bad[b]);
			}
			EXPECT_NO_OBJECT(call.attrs[i].data |= 1ULL << 32);
			EXPECT_NO_OBJECT(call.attrs[i].data |= 1ULL << 63);
		}
		if (p->kind == FD) {
			int null = open("/dev/null", O_RDONLY | O_CLOEXEC), tube[2];
			struct ibv_comp_channel *comp = ibv_create_comp_channel(ctx);

			ASSERT_LE(0, null);
			ASSERT_NE(NULL, comp);
			ASSERT_EQ(0, pipe(tube));
			EXPECT_NO_OBJECT(call.attrs[i].data = null);
			EXPECT_NO_OBJECT(call.attrs[i].data = tube[0]);
			EXPECT_NO_OBJECT(call.attrs[i].data = comp->fd);
			EXPECT_NO_OBJECT(call.attrs[i].data = ctx->cmd_fd);
			EXPECT_NO_OBJECT(call.attrs[i].data = ctx->async_fd);
			EXPECT_NO_OBJECT(call.attrs[i].data = other.channel);
			EXPECT_NO_OBJECT(call.attrs[i].data = UINT64_MAX);
			EXPECT_NO_OBJECT(call.attrs[i].data = INT32_MAX);
			EXPECT_NO_OBJECT(call.attrs[i].data |= 1ULL << 32);
			EXPECT_NO_OBJECT(call.attrs[i].data |= 1ULL << 31);
			ibv_destroy_comp_channel(comp);
			close(null);
			close(tube[0]);
			close(tube[1]);
		}
	}
	i = method->nr;
	/* The other context's handles may be numbers of this one's; its QP is no QP of ours. */
	if (variant->m == RESOLVE || variant->m == FAULT)
		EXPECT_EQ(-ENOENT, ({
			struct ibv_context *own = pair->peer.ctx;
			int ret;

			good_call(&self->h, variant->m, &call);
			pair->peer.ctx = other.ctx;
			call.attrs[0].data = 0xfff0;
			ret = run_call(&self->h, variant->m, &call);
			pair->peer.ctx = own;
			ret;
		}));
	EXPECT_EQ(0, np_hold_free(pair->owner.ctx, hold));
	EXPECT_EQ(0, np_close(&other));
	EXPECT_GOOD();
}

/* --- addresses and lengths around each edge ------------------------------------------------ */

FIXTURE(edges) {
	struct np_pair pair;
};

FIXTURE_SETUP(edges)
{
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
}

FIXTURE_TEARDOWN_PARENT(edges)
{
	NP_CHECK_USAGE(&self->pair.before);
}

#define NR_EDGES 48

/* Where arithmetic goes wrong: powers of 2 and the region's own ends, -1/0/+1. */
static unsigned int make_edges(uint64_t start, uint64_t len, uint64_t edges[NR_EDGES])
{
	const uint64_t middle[] = {
		0, PAGE, HUGE_PAGE, 1ULL << 31, 1ULL << 32, 1ULL << 47, 1ULL << 52, 1ULL << 63,
		-(uint64_t)PAGE, start, start + PAGE, start + len, start + len - PAGE, len,
		-start, -len,
	};
	unsigned int n = 0;

	for (unsigned int i = 0; i < ARRAY_SIZE(middle); i++)
		for (int delta = -1; delta <= 1; delta++)
			edges[n++] = middle[i] + delta;
	return n;
}

static bool is_inside(uint64_t addr, uint64_t len, uint64_t start, uint64_t size)
{
	return len && addr >= start && addr - start < size && len <= size - (addr - start);
}

static uint64_t pages_of(uint64_t addr, uint64_t len)
{
	return (addr + len - 1) / PAGE - addr / PAGE + 1;
}

TEST_F(edges, fault_reaches_the_region_and_nothing_else)
{
	struct np_pair *pair = &self->pair;
	uint64_t edges[NR_EDGES], start = pair->info.base;
	unsigned int nr = make_edges(start, NP_DATA_LEN, edges), granted = 0;

	for (unsigned int a = 0; a < nr; a++) {
		for (unsigned int l = 0; l < nr; l++) {
			uint64_t addr = edges[a], len = edges[l];
			int ret = np_fault(&pair->peer, pair->info.region_id, addr, len,
					   a & 1 ? NP_FAULT_WRITE : 0, NULL);

			int want = NP_ADDRESS;

			if (!len || addr + len - 1 < addr ||
			    pages_of(addr, len) > NP_MAX_PAGES)
				want = -EINVAL;
			else if (is_inside(addr, len, start, NP_DATA_LEN))
				want = NP_OK;
			EXPECT_EQ(want, ret) TH_LOG("%#lx + %#lx", addr, len);
			granted += ret == NP_OK;
		}
	}
	EXPECT_LT(0, granted);
}

TEST_F(edges, local_hold_reaches_the_region_and_nothing_else)
{
	struct np_pair *pair = &self->pair;
	uint64_t edges[NR_EDGES], start = pair->info.base;
	unsigned int nr = make_edges(start, NP_DATA_LEN, edges), granted = 0;
	long before = np_pinned();

	for (unsigned int a = 0; a < nr; a++) {
		for (unsigned int l = 0; l < nr; l++) {
			uint64_t addr = edges[a], len = edges[l];
			struct np_hold_info info;
			int64_t ret = np_hold(pair->mr, addr, len, a & 1 ? NP_FAULT_WRITE : 0,
					      &info);

			if (!len) {
				EXPECT_EQ(-EINVAL, ret) TH_LOG("%#lx + %#lx", addr, len);
			} else if (!is_inside(addr, len, start, NP_DATA_LEN)) {
				EXPECT_EQ(-ERANGE, ret) TH_LOG("%#lx + %#lx", addr, len);
			} else {
				EXPECT_LE(0, ret) TH_LOG("%#lx + %#lx", addr, len);
				EXPECT_EQ(0, np_hold_free(pair->owner.ctx, ret));
				granted++;
			}
		}
	}
	EXPECT_LT(0, granted);
	EXPECT_GE(before, np_pinned());
}

TEST_F(edges, advice_reaches_the_region_and_nothing_else)
{
	struct np_pair *pair = &self->pair;
	uint64_t edges[NR_EDGES], start = pair->info.base;
	unsigned int nr = make_edges(start, NP_DATA_LEN, edges), granted = 0;

	for (unsigned int a = 0; a < nr; a++) {
		for (unsigned int l = 0; l < nr; l++) {
			struct ibv_sge sge = {
				.addr = edges[a], .length = edges[l], .lkey = pair->mr->lkey,
			};
			int ret = ibv_advise_mr(pair->owner.pd, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH,
						IB_UVERBS_ADVISE_MR_FLAG_FLUSH, &sge, 1);

			bool fine = !sge.length ||
				    is_inside(sge.addr, sge.length, start, NP_DATA_LEN);

			EXPECT_EQ(fine ? 0 : ERANGE, ret) TH_LOG("%#lx + %#x", sge.addr, sge.length);
			granted += !ret;
		}
	}
	EXPECT_LT(0, granted);
}

/* --- registration, byte by byte -------------------------------------------------------------- */

struct reg {
	struct ib_uverbs_cmd_hdr hdr;
	struct ib_uverbs_reg_mr cmd;
	uint8_t more[64];
};

static void good_reg(struct np_pair *pair, struct reg *reg, struct ib_uverbs_reg_mr_resp *resp)
{
	memset(reg, 0, sizeof(*reg));
	reg->hdr = (struct ib_uverbs_cmd_hdr){
		.command = IB_USER_VERBS_CMD_REG_MR,
		.in_words = (sizeof(reg->hdr) + sizeof(reg->cmd)) / 4,
		.out_words = sizeof(*resp) / 4,
	};
	reg->cmd = (struct ib_uverbs_reg_mr){
		.response = (uintptr_t)resp,
		.start = (uintptr_t)pair->data,
		.length = NP_DATA_LEN,
		.hca_va = (uintptr_t)pair->data,
		.pd_handle = pair->owner.pd->handle,
		.access_flags = NP_RIGHTS | NP_UNPINNED,
	};
}

static int dereg(struct np_pair *pair, uint32_t handle)
{
	struct {
		struct ib_uverbs_cmd_hdr hdr;
		struct ib_uverbs_dereg_mr cmd;
	} call = {
		.hdr = { .command = IB_USER_VERBS_CMD_DEREG_MR, .in_words = sizeof(call) / 4 },
		.cmd.mr_handle = handle,
	};

	return write(pair->owner.ctx->cmd_fd, &call, sizeof(call)) == sizeof(call) ? 0 : -errno;
}

/* Writes @len bytes; what was registered is deregistered again. */
static int write_reg(struct np_pair *pair, struct reg *reg, size_t len,
		     struct ib_uverbs_reg_mr_resp *resp)
{
	ssize_t n = write(pair->owner.ctx->cmd_fd, reg, len);

	if (n < 0)
		return -errno;
	return dereg(pair, resp->mr_handle);
}

static long count_mrs(void)
{
	struct np_usage usage;

	return np_usage_get(&usage) ? -1 : usage.objects[0][3];
}

TEST_F(edges, registration_that_is_cut_or_answered_nowhere_leaves_no_region)
{
	struct np_pair *pair = &self->pair;
	struct ib_uverbs_reg_mr_resp resp;
	struct reg reg;
	const size_t good = sizeof(reg.hdr) + sizeof(reg.cmd);
	uint8_t *read_only = np_map(PAGE);
	long before = count_mrs();

	ASSERT_NE(NULL, read_only);
	ASSERT_EQ(0, mprotect(read_only, PAGE, PROT_READ));
	ASSERT_LT(0, before);
	good_reg(pair, &reg, &resp);
	ASSERT_EQ(0, write_reg(pair, &reg, good, &resp));

	for (size_t len = 0; len < sizeof(reg); len++) {
		int ret;

		/* The length of the call, with the right one in it, and with the same. */
		good_reg(pair, &reg, &resp);
		if (len != good)
			EXPECT_NE(0, write_reg(pair, &reg, len, &resp)) TH_LOG("%zu bytes", len);
		good_reg(pair, &reg, &resp);
		reg.hdr.in_words = len / 4;
		ret = write_reg(pair, &reg, len, &resp);
		if (len < good || len % 4)
			EXPECT_NE(0, ret) TH_LOG("%zu bytes", len);
	}
	for (unsigned int words = 0; words < sizeof(resp) / 4; words++) {
		good_reg(pair, &reg, &resp);
		reg.hdr.out_words = words;
		EXPECT_EQ(-ENOSPC, write_reg(pair, &reg, good, &resp));
	}

	const uint64_t nowhere[] = {
		0, 1, (uintptr_t)read_only, KERNEL_ADDRESS, NO_ADDRESS, UINT64_MAX,
	};

	for (unsigned int i = 0; i < ARRAY_SIZE(nowhere); i++) {
		good_reg(pair, &reg, &resp);
		reg.cmd.response = nowhere[i];
		EXPECT_EQ(-EFAULT, write_reg(pair, &reg, good, &resp)) TH_LOG("%#lx", nowhere[i]);
		EXPECT_EQ(before, count_mrs());
	}
	good_reg(pair, &reg, &resp);
	reg.cmd.pd_handle = pair->owner.qp->handle;
	EXPECT_NE(0, write_reg(pair, &reg, good, &resp));
	reg.cmd.pd_handle = 0xffffff;
	EXPECT_NE(0, write_reg(pair, &reg, good, &resp));
	EXPECT_EQ(before, count_mrs());
	good_reg(pair, &reg, &resp);
	EXPECT_EQ(0, write_reg(pair, &reg, good, &resp));
}

TEST_F(edges, registration_of_senseless_ranges_is_refused)
{
	struct np_pair *pair = &self->pair;
	uint64_t edges[NR_EDGES], start = pair->info.base;
	unsigned int nr = make_edges(start, NP_DATA_LEN, edges), granted = 0;
	struct ib_uverbs_reg_mr_resp resp;
	long before = count_mrs();
	struct reg reg;

	for (unsigned int a = 0; a < nr; a++) {
		for (unsigned int l = 0; l < nr; l++) {
			uint64_t addr = edges[a], len = edges[l];
			bool fine = len && addr + len > addr && addr + len <= (1ULL << 47) - PAGE;
			int ret;

			/* What is user space is a region, mapped or not; a large one takes long. */
			if (len && len < 1ULL << 47 && addr < 1ULL << 47 && len > 1ULL << 30)
				continue;
			good_reg(pair, &reg, &resp);
			reg.cmd.start = addr;
			reg.cmd.hca_va = addr;
			reg.cmd.length = len;
			ret = write_reg(pair, &reg, sizeof(reg.hdr) + sizeof(reg.cmd), &resp);
			EXPECT_TRUE(fine ? !ret : ret == -EINVAL || ret == -EFAULT)
				TH_LOG("%#lx + %#lx: %d", addr, len, ret);
			granted += !ret;
		}
	}
	EXPECT_LT(0, granted);
	EXPECT_EQ(before, count_mrs());
}

TEST_HARNESS_MAIN
