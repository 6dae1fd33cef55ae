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
#include <stdatomic.h>
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
	QUERY, RESOLVE, FAULT, RELEASE, FORGET, QUERY_MR, REFUSAL, QUERY_QP, CHANNEL, HOLD, HOLD_FREE,
	ADVISE, NR_METHODS,
};

static const struct method methods[NR_METHODS] = {
	[QUERY] = { "QUERY", UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_QUERY, 1, {
		{ RDMA_NP_ATTR_QUERY_RESP, OUT, sizeof(struct rdma_np_query) } } },
	[RESOLVE] = { "RESOLVE", UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_RESOLVE, 4, {
		{ RDMA_NP_ATTR_RESOLVE_QP, HANDLE },
		{ RDMA_NP_ATTR_RESOLVE_CHANNEL, FD },
		{ RDMA_NP_ATTR_RESOLVE_RKEY, IN, sizeof(uint32_t) },
		{ RDMA_NP_ATTR_RESOLVE_RESP, OUT, sizeof(struct rdma_np_region_info) } } },
	[FAULT] = { "FAULT", UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_FAULT, 4, {
		{ RDMA_NP_ATTR_FAULT_QP, HANDLE },
		{ RDMA_NP_ATTR_FAULT_CHANNEL, FD },
		{ RDMA_NP_ATTR_FAULT_REQ, IN_OPEN, sizeof(struct rdma_np_fault_req) },
		{ RDMA_NP_ATTR_FAULT_RANGES, IN_ARRAY, sizeof(struct rdma_np_range), RDMA_NP_MAX_RANGES } } },
	[RELEASE] = { "RELEASE", UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_RELEASE, 2, {
		{ RDMA_NP_ATTR_RELEASE_QP, HANDLE },
		{ RDMA_NP_ATTR_RELEASE_HOLD, IN, sizeof(uint64_t) } } },
	[FORGET] = { "FORGET", UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_FORGET, 2, {
		{ RDMA_NP_ATTR_FORGET_QP, HANDLE },
		{ RDMA_NP_ATTR_FORGET_REGION, IN, sizeof(uint64_t) } } },
	[QUERY_MR] = { "QUERY_MR", UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_QUERY_MR, 2, {
		{ RDMA_NP_ATTR_QUERY_MR_HANDLE, HANDLE },
		{ RDMA_NP_ATTR_QUERY_MR_RESP, OUT, sizeof(struct rdma_np_mr_info) } } },
	[REFUSAL] = { "REFUSAL", UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_REFUSAL, 2, {
		{ RDMA_NP_ATTR_REFUSAL_AFTER, IN, sizeof(uint64_t) },
		{ RDMA_NP_ATTR_REFUSAL_RESP, OUT, sizeof(struct rdma_np_refusal) } } },
	[QUERY_QP] = { "QUERY_QP", UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_QUERY_QP, 2, {
		{ RDMA_NP_ATTR_QUERY_QP_NUMBER, IN, sizeof(uint32_t) },
		{ RDMA_NP_ATTR_QUERY_QP_RESP, OUT, sizeof(struct rdma_np_qp_info) } } },
	[CHANNEL] = { "CHANNEL_ALLOC", UVERBS_OBJECT_NP_CHANNEL, RDMA_NP_METHOD_CHANNEL_ALLOC, 2, {
		{ RDMA_NP_ATTR_CHANNEL_FD, NEW },
		{ RDMA_NP_ATTR_CHANNEL_EVENT_SIZE, IN, sizeof(uint32_t) } } },
	[HOLD] = { "HOLD_ALLOC", UVERBS_OBJECT_NP_HOLD, RDMA_NP_METHOD_HOLD_ALLOC, 4, {
		{ RDMA_NP_ATTR_HOLD_ALLOC_HANDLE, NEW },
		{ RDMA_NP_ATTR_HOLD_ALLOC_MR, HANDLE },
		{ RDMA_NP_ATTR_HOLD_ALLOC_REQ, IN_OPEN, sizeof(struct rdma_np_hold_req) },
		{ RDMA_NP_ATTR_HOLD_ALLOC_RESP, OUT, sizeof(struct rdma_np_hold_info) } } },
	[HOLD_FREE] = { "HOLD_FREE", UVERBS_OBJECT_NP_HOLD, RDMA_NP_METHOD_HOLD_FREE, 1, {
		{ RDMA_NP_ATTR_HOLD_FREE_HANDLE, GONE } } },
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
	/* What the arguments name, as numbers: the objects may be gone. */
	uint32_t mr_handle;
	uint32_t mr_key;
	uint32_t qp_handle;
	uint32_t qp_number;
	uint32_t pd_handle;
	int channel;
	uint64_t base;
	uint64_t region_id;
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

static void hostile_look(struct hostile *h)
{
	struct np_pair *pair = h->pair;

	h->mr_handle = pair->mr->handle;
	h->mr_key = pair->mr->rkey;
	h->qp_handle = pair->peer.qp->handle;
	h->qp_number = pair->peer.qp->qp_num;
	h->pd_handle = pair->owner.pd->handle;
	h->channel = pair->peer.channel;
	h->base = (uintptr_t)pair->data;
	h->region_id = pair->info.region_id;
}

static struct ibv_context *context_of(const struct hostile *h, unsigned int m)
{
	bool peer = m == RESOLVE || m == FAULT || m == RELEASE || m == FORGET || m == QUERY_QP ||
		    m == CHANNEL;

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
	struct rdma_np_hold_info info;
	struct rdma_np_event event;
	int ret;

	if (m == FORGET || m == FAULT || (m == RELEASE && !h->hold_id)) {
		ret = np_pair_resolve(pair);
		if (ret)
			return ret;
	}
	if (m == RELEASE && !h->hold_id) {
		ret = np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_HOLD, &event);
		if (ret)
			return ret;
		h->hold_id = event.hold_id;
	}
	if (m == HOLD_FREE && h->hold < 0) {
		h->hold = np_hold(pair->mr, (uintptr_t)pair->data, PAGE, 0, &info);
		if (h->hold < 0)
			return h->hold;
	}
	hostile_look(h);
	return 0;
}

static uint64_t good_handle(const struct hostile *h, unsigned int m)
{
	switch (m) {
	case QUERY_MR:
	case HOLD:
		return h->mr_handle;
	case HOLD_FREE:
		return h->hold;
	case ADVISE:
		return h->pd_handle;
	default:
		return h->qp_handle;
	}
}

/* The arguments of a good call; returns how many bytes go to the kernel. */
static size_t good_data(const struct hostile *h, unsigned int m, unsigned int i, uint8_t *to)
{
	struct rdma_np_hold_req hold = { .addr = h->base, .length = PAGE };
	struct rdma_np_fault_req req = { .region_id = h->region_id, .cookie = 1 };
	struct rdma_np_range range = { .addr = h->base, .length = PAGE };
	struct ib_uverbs_sge sge = { .addr = h->base, .length = PAGE, .lkey = h->mr_key };
	const struct { const void *data; size_t len; } data[] = {
		{ &h->mr_key, 4 }, { &req, sizeof(req) }, { &range, sizeof(range) },
		{ &h->hold_id, 8 }, { &h->region_id, 8 }, { &hold, sizeof(hold) },
		{ &sge, sizeof(sge) }, { (uint32_t[]){ IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH, 0 }, 8 },
		{ (uint32_t[]){ IB_UVERBS_ADVISE_MR_FLAG_FLUSH }, 4 },
		{ (uint32_t[]){ sizeof(struct rdma_np_event) }, 4 },
		{ (uint64_t[]){ 0 }, 8 }, { &h->qp_number, 4 },
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
	case CHANNEL:
		which = 9;
		break;
	case REFUSAL:
		which = 10;
		break;
	case QUERY_QP:
		which = 11;
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
			attr->data = h->channel;
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
	struct rdma_np_event event;

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
		if (np_wait_event(&h->pair->peer, RDMA_NP_EVENT_FAULT, &event, NP_WAIT_MS) != 1)
			return -ETIMEDOUT;
		return event.status == RDMA_NP_OK || event.status == RDMA_NP_BUSY ? 0 : -EPROTO;
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
METHOD(REFUSAL);
METHOD(QUERY_QP);
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
			/* The last field that is known is reserved. */
			EXPECT_CALL(-EINVAL, place(&self->h, i)[unit - 1] = 1);
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
	struct rdma_np_hold_info info;
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
	struct rdma_np_mr_info info;

	for (unsigned int a = 0; a < nr; a++) {
		for (unsigned int l = 0; l < nr; l++) {
			uint64_t addr = edges[a], len = edges[l];
			int want = RDMA_NP_ADDRESS, ret;
			bool partly;

			if (!len || addr + len - 1 < addr ||
			    pages_of(addr, len) > RDMA_NP_MAX_PAGES)
				want = -EINVAL;
			else if (is_inside(addr, len, start, NP_DATA_LEN))
				want = RDMA_NP_OK;
			partly = want == RDMA_NP_ADDRESS && is_inside(addr, 1, start, NP_DATA_LEN);
			if (partly) {
				ASSERT_EQ(0, madvise(pair->data, NP_DATA_LEN, MADV_DONTNEED));
			}
			ret = np_fault(&pair->peer, pair->info.region_id, addr, len,
				       a & 1 ? RDMA_NP_FAULT_WRITE : 0, NULL);
			EXPECT_EQ(want, ret) TH_LOG("%#lx + %#lx", addr, len);
			granted += ret == RDMA_NP_OK;
			if (!partly)
				continue;
			/* What is partly outside brings nothing of what is inside. */
			ASSERT_EQ(0, np_query_mr(pair->mr, &info));
			EXPECT_EQ(0, info.resident_pages) TH_LOG("%#lx + %#lx", addr, len);
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
			struct rdma_np_hold_info info;
			int64_t ret = np_hold(pair->mr, addr, len, a & 1 ? RDMA_NP_FAULT_WRITE : 0,
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

			EXPECT_EQ(fine ? 0 : EFAULT, ret) TH_LOG("%#lx + %#x", sge.addr, sge.length);
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

			/* The whole address space is a region, too. */
			fine = fine || (!addr && len == SIZE_MAX);

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

/* --- all of it at random, and at the same time ------------------------------------------------ */

static uint64_t next_random(uint64_t *seed)
{
	*seed ^= *seed << 13;
	*seed ^= *seed >> 7;
	*seed ^= *seed << 17;
	return *seed;
}

struct shared {
	atomic_ulong calls;
	atomic_ulong good;	/* of these */
	atomic_ulong turns;	/* of the thread that takes things away */
	atomic_ulong qps;	/* that it destroyed and made anew */
};

struct fuzzer {
	struct hostile *h;
	struct shared *shared;
	uint64_t seed;
	unsigned int nr;
};

static uint64_t strange_pointer(struct hostile *h, uint64_t r)
{
	const uint64_t pointers[] = {
		0, 1, KERNEL_ADDRESS, NO_ADDRESS, UINT64_MAX, (uintptr_t)h->read_only,
		(uintptr_t)h->arena + ARENA_LEN - r % 64, (uintptr_t)h->arena + r % ARENA_LEN,
		h->base, h->base + NP_DATA_LEN - 8,
	};

	return pointers[(r >> 32) % ARRAY_SIZE(pointers)];
}

static void spoil(struct hostile *h, struct call *call, uint64_t r)
{
	unsigned int nr = call->hdr.num_attrs ?: 1;
	struct ib_uverbs_attr *attr = &call->attrs[r % nr];
	unsigned int other = (r >> 4) % nr;

	switch (r >> 8 & 15) {
	case 0:
		attr->len += (r >> 16 & 2) - 1;
		break;
	case 1:
		attr->len = r >> 16;
		break;
	case 2:
		attr->attr_id = r >> 16 & 15;
		break;
	case 3:
		attr->flags = r >> 16;
		break;
	case 4:
		attr->attr_data.reserved = r >> 16;
		break;
	case 5:
		attr->data = strange_pointer(h, r >> 12);
		break;
	case 6:
		attr->data ^= 1ULL << (r >> 16 & 63);
		break;
	case 7:
		*attr = call->attrs[other];
		break;
	case 8:
		call->hdr.num_attrs = r >> 16 & 7;
		break;
	case 9:
		call->hdr.method_id = r >> 16 & 7;
		break;
	case 10:
		call->hdr.object_id = UVERBS_OBJECT_NPRDMA + (r >> 16 & 3);
		break;
	case 11:
		/* What a pointer points to. */
		h->arena[(r >> 16) % ARENA_LEN] = r >> 48;
		break;
	}
}

static void *fuzz(void *arg)
{
	struct fuzzer *f = arg;
	struct hostile own = *f->h;
	struct rdma_np_event events[4];

	own.arena += f->nr * (ARENA_LEN + PAGE);
	for (;;) {
		uint64_t r = next_random(&f->seed);
		unsigned int m = r % NR_METHODS, n = r >> 8 & 3;
		struct call call;

		/* The numbers as they are now. */
		own.mr_handle = f->h->mr_handle;
		own.mr_key = f->h->mr_key;
		own.qp_handle = f->h->qp_handle;
		own.channel = f->h->channel;
		own.region_id = f->h->region_id;
		own.hold = r >> 16 & 31;
		good_call(&own, m, &call);
		while (n--)
			spoil(&own, &call, next_random(&f->seed));
		if (call.hdr.num_attrs > MAX_PARAMS + 1)
			call.hdr.num_attrs = MAX_PARAMS + 1;
		if (!do_ioctl(context_of(&own, m), &call)) {
			atomic_fetch_add(&f->shared->good, 1);
			if (call.hdr.object_id == UVERBS_OBJECT_NP_CHANNEL)
				close(call.attrs[0].data);
			else if (call.hdr.object_id == UVERBS_OBJECT_NP_HOLD && r & 1 << 20)
				np_hold_free(own.pair->owner.ctx, call.attrs[0].data);
		}
		if (!(r >> 24 & 3) && read(own.channel, events, sizeof(events)) < 0 && errno == EFAULT)
			_exit(9);
		atomic_fetch_add(&f->shared->calls, 1);
	}
	return NULL;
}

/*
 * A call that uses a QP keeps it from being destroyed, and the others call all the
 * time: it is tried for a while. True: there is a new one, with another handle.
 */
static bool remake_qp(struct np_end *end)
{
	for (int i = 0; i < 1000; i++) {
		int ret = ibv_destroy_qp(end->qp);

		if (!ret) {
			end->qp = np_make_qp(end, end->pd);
			if (!end->qp)
				_exit(13);
			return true;
		}
		if (ret != EBUSY)
			_exit(14);
	}
	return false;
}

/* Takes away what the others use, and makes it anew. Never returns. */
static void take_away(struct hostile *h, struct shared *shared, uint64_t seed)
{
	struct np_pair *pair = h->pair;

	for (;;) {
		uint64_t r = next_random(&seed);
		int channel;

		switch (r & 7) {
		case 0:
			/* The number may be somebody else's at once: the others use it. */
			channel = np_channel(pair->peer.ctx);
			if (channel >= 0) {
				h->channel = channel;
				close(pair->peer.channel);
				pair->peer.channel = channel;
			}
			break;
		case 1:
			if (!ibv_dereg_mr(pair->mr)) {
				pair->mr = ibv_reg_mr(pair->owner.pd, pair->data, NP_DATA_LEN,
						      NP_RIGHTS | NP_UNPINNED);
				if (!pair->mr)
					_exit(10);
			}
			break;
		case 2:
			if (np_reconnect(&pair->owner, &pair->peer))
				_exit(11);
			break;
		case 3:
			if (mmap(pair->data + (r >> 8) % NP_DATA_PAGES * PAGE, PAGE,
				 r & 1 << 4 ? PROT_READ : PROT_READ | PROT_WRITE,
				 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
				_exit(12);
			break;
		case 4:
			madvise(pair->data, NP_DATA_LEN, MADV_DONTNEED);
			break;
		case 5:
			if (!remake_qp(r & 1 << 4 ? &pair->owner : &pair->peer))
				break;
			atomic_fetch_add(&shared->qps, 1);
			if (np_reconnect(&pair->owner, &pair->peer))
				_exit(15);
			break;
		default:
			np_pair_resolve(pair);
		}
		hostile_look(h);
		atomic_fetch_add(&shared->turns, 1);
	}
}

#define FUZZERS	3

/* Never returns. */
static void hostile_process(struct shared *shared, uint64_t seed)
{
	static struct fuzzer fuzzers[FUZZERS];
	static struct hostile h;
	static struct np_pair pair;
	struct np_usage before;
	pthread_t thread;

	if (np_open(&pair.owner, NP_OWNER_DEV, PAGE) || np_open(&pair.peer, NP_PEER_DEV, NP_BUF_LEN) ||
	    np_connect(&pair.owner, &pair.peer) || np_pair_register(&pair, NP_RIGHTS) ||
	    np_pair_resolve(&pair) || hostile_open(&h, &pair) || np_usage_get(&before))
		_exit(1);
	/* Arguments of one thread are not spoilt by another, but all end at a hole. */
	h.arena = np_map(FUZZERS * (ARENA_LEN + PAGE));
	if (!h.arena)
		_exit(2);
	hostile_look(&h);
	for (unsigned int i = 0; i < FUZZERS; i++) {
		if (mprotect(h.arena + (i + 1) * (ARENA_LEN + PAGE) - PAGE, PAGE, PROT_NONE))
			_exit(3);
		fuzzers[i] = (struct fuzzer){
			&h, shared, (seed + i * 0x9e3779b97f4a7c15ULL) | 1, i,
		};
		if (pthread_create(&thread, NULL, fuzz, &fuzzers[i]))
			_exit(4);
	}
	take_away(&h, shared, seed | 1);
}

TEST_F(edges, random_calls_beside_closing_harm_nobody_else)
{
	const char *chosen = getenv("NPRDMA_SEED");
	uint64_t seed = chosen ? strtoull(chosen, NULL, 0) : (np_now_ms() * 0x9e3779b97f4a7c15ULL) | 1;
	struct np_pair *pair = &self->pair;
	struct shared *shared;
	unsigned long rounds = 0;

	TH_LOG("NPRDMA_SEED=%#lx", seed);
	shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ASSERT_NE(MAP_FAILED, shared);
	for (int life = 0; life < 4; life++) {
		unsigned long end = atomic_load(&shared->calls) + 500 + next_random(&seed) % 1500;
		pid_t child = np_fork();
		int status;

		ASSERT_LE(0, child);
		if (!child)
			hostile_process(shared, seed);
		/* At the end of the last one it has taken away a QP, however few turns the machine gave it. */
		while (atomic_load(&shared->calls) < end ||
		       (life == 3 && !atomic_load(&shared->qps))) {
			size_t page = rounds % NP_DATA_PAGES, off = page * PAGE;

			ASSERT_EQ(0, waitpid(child, &status, WNOHANG)) TH_LOG("status %x", status);
			ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, off, PAGE));
			ASSERT_EQ(-1, np_differs(pair->peer.buf, PAGE, page));
			ASSERT_EQ(0, np_write_proven(&pair->peer, &pair->info, 0, off, PAGE));
			rounds++;
		}
		/* In the midst of whatever it does. */
		ASSERT_EQ(0, kill(child, SIGKILL));
		ASSERT_EQ(child, waitpid(child, &status, 0));
		EXPECT_TRUE(WIFSIGNALED(status));
	}
	for (size_t i = 0; i < NP_DATA_PAGES; i++)
		EXPECT_EQ(-1, np_differs(pair->data + i * PAGE, PAGE, i));
	TH_LOG("%lu calls, %lu succeeded, %lu things taken away, %lu of them QPs, %lu rounds",
	       atomic_load(&shared->calls), atomic_load(&shared->good),
	       atomic_load(&shared->turns), atomic_load(&shared->qps), rounds);
	EXPECT_LT(0, atomic_load(&shared->good));
	EXPECT_LT(0, atomic_load(&shared->turns));
	EXPECT_LT(0, atomic_load(&shared->qps));
	EXPECT_LT(0, rounds);
}

/* --- what stand-in pages show ------------------------------------------------------------------ */

/* A second pair in protection domains of its own, and what it finds where nothing is. */
static int other_open(struct np_pair *other)
{
	int ret;

	memset(other, 0, sizeof(*other));
	ret = np_open(&other->owner, NP_OWNER_DEV, NP_BUF_LEN);
	if (!ret)
		ret = np_open(&other->peer, NP_PEER_DEV, NP_BUF_LEN);
	if (!ret)
		ret = np_connect(&other->owner, &other->peer);
	if (!ret)
		ret = np_pair_register(other, NP_RIGHTS);
	return ret ? ret : np_pair_resolve(other);
}

/* The 8 bytes that are at @off of the scratch page, as an atomic shows them; -1: error. */
static uint64_t scratch_word(struct np_pair *pair, size_t off)
{
	if (np_fetch_add(&pair->peer, 0, np_write_addr(&pair->info, off), pair->info.write_key, 0))
		return ~0ULL;
	return *(uint64_t *)pair->peer.buf;
}

/* Bytes of one PD's scratch page that are not 0, looked for in all ways there are. */
static unsigned int scratch_leaks(struct np_pair *pair)
{
	unsigned int found = 0;
	struct rdma_np_hold_info info;
	struct ibv_mr *sink;
	int64_t hold;

	/* What an atomic returns. */
	for (size_t off = 0; off < HUGE_PAGE; off += PAGE / 2)
		found += !!scratch_word(pair, off);
	/* What the owner's own work requests find beyond what they hold. */
	hold = np_hold(pair->mr, (uintptr_t)pair->data, PAGE, RDMA_NP_FAULT_WRITE, &info);
	sink = ibv_reg_mr(pair->peer.pd, pair->peer.buf, NP_BUF_LEN, NP_RIGHTS);
	if (hold < 0 || !sink)
		return UINT_MAX;
	for (size_t off = PAGE; off < HUGE_PAGE; off += 64 * PAGE) {
		size_t len = off + 64 * PAGE > HUGE_PAGE ? HUGE_PAGE - off : 64 * PAGE;
		struct ibv_sge sge = { .addr = info.addr + off, .length = len, .lkey = info.lkey };
		struct ibv_send_wr wr = {
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IBV_WR_RDMA_WRITE,
			.send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { (uintptr_t)pair->peer.buf, sink->rkey },
		}, *bad;
		struct ibv_wc wc;

		memset(pair->peer.buf, 0xff, len);
		if (ibv_post_send(pair->owner.qp, &wr, &bad) || np_poll(&pair->owner, &wc))
			return UINT_MAX;
		found += !np_all(pair->peer.buf, len, 0);
	}
	np_hold_free(pair->owner.ctx, hold);
	ibv_dereg_mr(sink);
	return found;
}

TEST_F(edges, what_one_pd_writes_nowhere_is_seen_by_no_other)
{
	struct np_pair *pair = &self->pair, *other = malloc(sizeof(*other));

	ASSERT_NE(NULL, other);
	ASSERT_EQ(0, other_open(other));
	/* All of our scratch page, twice. */
	np_fill(pair->peer.buf, NP_DATA_LEN, 4711);
	ASSERT_EQ(0, np_pair_write(pair, 0, NP_DATA_LEN));
	/* It is really there, and we would see it. */
	EXPECT_NE(0, scratch_word(pair, PAGE));
	EXPECT_EQ(0, scratch_leaks(other));
	ASSERT_EQ(0, np_pair_read(other, PAGE, NP_DATA_LEN - PAGE));
	EXPECT_TRUE(np_all(other->peer.buf, NP_DATA_LEN - PAGE, other->info.signature));
	/* Nor does the memory that is faulted in later come from there. */
	for (size_t page = 1; page < 64; page++) {
		ASSERT_EQ(0, madvise(other->data + page * PAGE, PAGE, MADV_DONTNEED));
		ASSERT_EQ(RDMA_NP_OK, np_pair_fault(other, page * PAGE, PAGE, 0, NULL));
		ASSERT_EQ(0, np_pair_read(other, page * PAGE, PAGE));
		EXPECT_TRUE(np_all(other->peer.buf, PAGE, 0));
	}
	free(other);
}

TEST_F(edges, scratch_page_of_a_new_pd_is_empty)
{
	struct np_pair *other = malloc(sizeof(*other));

	ASSERT_NE(NULL, other);
	for (int i = 0; i < 5; i++) {
		uint8_t *data;

		ASSERT_EQ(0, other_open(other));
		EXPECT_EQ(0, scratch_leaks(other));
		np_fill(other->peer.buf, NP_DATA_LEN, 4711 + i);
		ASSERT_EQ(0, np_pair_write(other, 0, NP_DATA_LEN));
		EXPECT_NE(0, scratch_word(other, PAGE));
		data = other->data;
		ASSERT_EQ(0, ibv_dereg_mr(other->mr));
		ASSERT_EQ(0, np_close(&other->peer));
		ASSERT_EQ(0, np_close(&other->owner));
		ASSERT_EQ(0, munmap(data, NP_DATA_LEN));
	}
	free(other);
}

/* --- keys of another's region ------------------------------------------------------------------ */

TEST_F(edges, no_key_of_one_pd_works_in_another)
{
	struct np_pair *pair = &self->pair, *other = malloc(sizeof(*other));
	struct rdma_np_hold_info source, sink;
	int64_t holds[2];

	ASSERT_NE(NULL, other);
	ASSERT_EQ(0, other_open(other));
	holds[0] = np_hold(pair->mr, (uintptr_t)pair->data, PAGE, 0, &source);
	holds[1] = np_hold(pair->mr, (uintptr_t)pair->data, PAGE, RDMA_NP_FAULT_WRITE, &sink);
	ASSERT_LE(0, holds[0]);
	ASSERT_LE(0, holds[1]);
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, 0, PAGE, RDMA_NP_FAULT_WRITE, NULL));

	const struct {
		const char *name;
		uint32_t key;
		uint64_t addr;
	} keys[] = {
		{ "public", pair->mr->rkey, (uintptr_t)pair->data },
		{ "read", pair->info.read_key, np_read_addr(&pair->info, 0) },
		{ "table", pair->info.table_key, np_word_addr(&pair->info, 0) },
		{ "write", pair->info.write_key, np_write_addr(&pair->info, 0) },
		{ "source", source.lkey, source.addr },
		{ "sink", sink.lkey, sink.addr },
		{ "pinned", pair->peer.mr->rkey, (uintptr_t)pair->peer.buf },
	};

	np_fill(other->peer.buf, PAGE, 1234);
	for (unsigned int i = 0; i < ARRAY_SIZE(keys); i++) {
		/* From the other end of the wire. */
		EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
			  np_read(&other->peer, 0, 8, keys[i].addr, keys[i].key))
			TH_LOG("READ, %s key", keys[i].name);
		ASSERT_EQ(0, np_reconnect(&other->owner, &other->peer));
		EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
			  np_write(&other->peer, 0, 8, keys[i].addr, keys[i].key))
			TH_LOG("WRITE, %s key", keys[i].name);
		ASSERT_EQ(0, np_reconnect(&other->owner, &other->peer));
		EXPECT_EQ(IBV_WC_REM_ACCESS_ERR,
			  np_fetch_add(&other->peer, 0, keys[i].addr, keys[i].key, 1))
			TH_LOG("atomic, %s key", keys[i].name);
		ASSERT_EQ(0, np_reconnect(&other->owner, &other->peer));
		/* And on the same device, as a local buffer. */
		for (int op = 0; op < 2; op++) {
			struct ibv_sge sge = { .addr = keys[i].addr, .length = 8,
					       .lkey = keys[i].key };
			struct ibv_mr *far = ibv_reg_mr(other->peer.pd, other->peer.buf, PAGE,
							NP_RIGHTS);
			struct ibv_send_wr wr = {
				.sg_list = &sge,
				.num_sge = 1,
				.opcode = op ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
				.send_flags = IBV_SEND_SIGNALED,
			}, *bad;
			struct ibv_wc wc;

			ASSERT_NE(NULL, far);
			wr.wr.rdma.remote_addr = (uintptr_t)other->peer.buf;
			wr.wr.rdma.rkey = far->rkey;
			ASSERT_EQ(0, ibv_post_send(other->owner.qp, &wr, &bad));
			EXPECT_EQ(IBV_WC_LOC_PROT_ERR, np_poll(&other->owner, &wc))
				TH_LOG("local, %s key", keys[i].name);
			ASSERT_EQ(0, np_reconnect(&other->owner, &other->peer));
			EXPECT_EQ(0, ibv_dereg_mr(far));
		}
	}
	EXPECT_EQ(-1, np_differs(other->peer.buf, PAGE, 1234));
	EXPECT_EQ(-1, np_differs(pair->data, PAGE, 0));
	EXPECT_EQ(0, np_hold_free(pair->owner.ctx, holds[0]));
	EXPECT_EQ(0, np_hold_free(pair->owner.ctx, holds[1]));
	free(other);
}

TEST_HARNESS_MAIN
