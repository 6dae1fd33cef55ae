/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Two sides that run one program, on pinned memory with plain verbs or on unpinned memory
 * with libnprdma, and all of what an application sees of it, to be compared.
 */
#ifndef NP_WORLD_H
#define NP_WORLD_H

#include <nprdma/nprdma.h>

#include "np_test.h"

#define OPS	16			/* of one chain */
#define ROUNDS	3
#define SLOT	(4 * PAGE)
#define AREA	(OPS * SLOT)
#define INLINE	64U
#define UD_MAX	1024U
#define QKEY	0x1234
#define MAX_WC	(4 * OPS * ROUNDS)
#define EVENTS	(IBV_EVENT_WQ_FATAL + 1)

enum local { PINNED, UNPINNED, MIXED, INLINED, LOCALS };
enum signals { EVERY, FOURTH, LAST, SIGNALS };
enum wait { POLL, EVENT, SOLICITED, WAITS };

struct variant {
	enum ibv_qp_type type;
	unsigned int local;		/* enum local */
	unsigned int remote;		/* PINNED or UNPINNED */
	unsigned int srq;
	unsigned int signals;		/* enum signals */
	unsigned int ex;		/* ibv_wr_*() and ibv_start_poll() */
	unsigned int wait;		/* enum wait */
};

/* The same place twice: [0] is pinned, [1] is what the test is about. */
struct area {
	uint8_t *mem[2];
	struct ibv_mr *mr[2];
};

struct side {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	uint16_t lid;
	struct npr_context *lib;
	struct ibv_qp *fence;		/* see take_events() */
	/* of one run */
	bool pinned;			/* plain verbs */
	struct ibv_comp_channel *channel[2];
	struct ibv_cq *cq[2];		/* send, receive */
	struct npr_cq *lcq[2];
	struct ibv_srq *srq;
	struct npr_srq *lsrq;
	struct ibv_qp *qp;
	struct npr_qp *lqp;
};

struct world {
	struct side a, b;		/* who asks, who is asked */
	struct area here, there, sink;	/* a's buffers, b's memory, b's receives */
};

/* What an application sees of a completion. */
struct seen {
	uint64_t wr_id;
	int status, opcode;
	uint32_t byte_len, imm, flags, qp, src_qp, slid, sl;
};

struct result {
	struct seen wc[2][MAX_WC];	/* of a's sends, b's receives */
	unsigned int count[2];
	unsigned int solicited;		/* times that b was woken for such */
	int state[2];
	unsigned int events[2][EVENTS];	/* asynchronous ones, of a side's QP and SRQ */
	uint8_t *mem[6];
};

/* Of what returns 0, or -errno with the line in *@line. */
#define TRY(call) do {							\
	ret = (call);							\
	if (ret) {							\
		*line = __LINE__;					\
		return ret;						\
	}								\
} while (0)

static inline bool is_atomic(enum ibv_wr_opcode op)
{
	return op == IBV_WR_ATOMIC_FETCH_AND_ADD || op == IBV_WR_ATOMIC_CMP_AND_SWP;
}

int side_open(struct side *s, const char *dev);
/* A QP of the variant's type in INIT, with a CQ for each direction. */
int side_start(struct side *s, const struct variant *v, bool pinned);
int side_connect(struct side *s, const struct side *to, unsigned int rnr_retry);
int side_end(struct side *s);
int post_recv(struct side *s, struct ibv_recv_wr *wr);
int post_send(struct side *s, struct ibv_send_wr *wr, bool ex);
/* One completion of a direction: 1, 0 or -errno. */
int poll_one(struct side *s, int k, bool ex, struct ibv_wc *wc);
/* The library needs to be called for what is under way, whoever waits for what. */
int note(struct result *r, struct side *s, const struct side *other, int k, bool ex);
/* Until @k has @n completions. */
int collect(struct world *w, struct result *r, const struct variant *v, int k,
	    unsigned int n);
/*
 * All events of a side up to now. They come in their order, so they were all when one has come
 * that is asked for: a QP that fails is done with its SRQ.
 */
int take_events(struct side *s, struct result *r, int k);

/* Memory as it is before a run. */
void fill(struct world *w);
struct world *make_world(bool pinned);
struct result *make_result(void);
/* Where the two differ, for a human; NULL if they do not. */
const char *difference(const struct result *want, const struct result *got);

#endif /* NP_WORLD_H */
