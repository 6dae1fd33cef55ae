// SPDX-License-Identifier: GPL-2.0
/*
 * One side of a connection between two guests, told by lines on standard input
 * what to do, and answering each with one line: tools/testing/hosts/run speaks to
 * both sides and judges. Lines begin with the name that argv gives.
 *
 *   np_host NAME DEVICE
 *
 * region MIB SEED	map, fill and register an unpinned region -> LID RKEY ADDR
 * target RKEY ADDR MIB SEED	the region of the other side
 * qp			a new QP; the last one goes -> LID QPN PSN
 * connect LID QPN PSN TIMEOUT RETRY
 * churn on|off		page the region out, again and again
 * run OPS SEED [1]	start traffic; ends by itself after OPS (0: never), at "stop"
 *			or with an error -> later "ended STATUS OPS"; 1: only additions
 *			and WRITEs with immediate, which have to take effect exactly once
 * listen		receive what WRITEs with immediate say
 * heard		-> WRITEs with immediate heard (told), those not in turn, holds taken
 * stop
 * hold OFF PAGES	take a hold on the target for write, and keep it -> enum rdma_np_status
 * state		-> state of the QP, pages held of the region, of those resident
 * check SPAN		does the region hold what it may? -> wrong words, counter
 * sum			what the initiator believes is in the region, or what is in ours
 *
 * A word of a region tells the region's seed, its place and its version, so data of
 * another region, place or time is seen at once. The initiator is the only one who
 * writes, and knows the version of each block: what it reads has to be just that,
 * but for blocks whose WRITE ended in an error, which may have both. Additions to
 * the counter in the last page have to be done once each, in the same sense.
 */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <nprdma/nprdma.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "np_test.h"

#define BLOCK		1024UL
#define BLOCK_WORDS	(BLOCK / 8)
#define BATCH		8		/* operations under way */
#define OP_BLOCKS	48		/* at most in one operation */
#define OP_BYTES	(OP_BLOCKS * BLOCK)
#define VERSION_SHIFT	40

static const char *name;
static struct np_end end;
static uint32_t psn;

/* The region: ours, or the other side's as we know it. */
static uint64_t seed, length, blocks;
static uint8_t *data;			/* ours; NULL: the other side's */
static struct ibv_mr *mr;
static uint64_t raddr;
static uint32_t rkey;
static uint32_t *version;		/* of each block, the initiator's */
static uint32_t *unsure;		/* it may be one of so many after that, too */
static uint64_t additions, unsure_additions;

static struct npr_context *ctx;
static struct npr_cq *cq;
static struct npr_qp *lib;

static pthread_t traffic_thread, churn_thread;
static bool traffic_running;
static atomic_bool stopping, churning;
static uint64_t ops_wanted, random_state;
static bool only_once;

static pthread_t listener_thread;
static atomic_ullong heard, misheard;
static uint64_t told;

static uint64_t word_of(uint64_t index, uint64_t v)
{
	return (v << VERSION_SHIFT | index) ^ seed * 0x9e3779b97f4a7c15ULL;
}

/* The version that a word of the region claims, or UINT64_MAX if it is none of its place. */
static uint64_t version_of(uint64_t index, uint64_t word)
{
	word ^= seed * 0x9e3779b97f4a7c15ULL;
	if ((word & ((1ULL << VERSION_SHIFT) - 1)) != index)
		return UINT64_MAX;
	return word >> VERSION_SHIFT;
}

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...)
{
	va_list args;

	flockfile(stdout);
	printf("%s ", name);
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf("\n");
	fflush(stdout);
	funlockfile(stdout);
}

static uint64_t next_random(void)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state >> 8;
}

/* --- traffic ------------------------------------------------------------------ */

struct op {
	enum ibv_wr_opcode code;
	uint64_t block, nr;
	uint8_t *buf;
	int status;
};

static bool writes(const struct op *op)
{
	return op->code == IBV_WR_RDMA_WRITE || op->code == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static void fill_op(struct op *op)
{
	uint64_t *w = (uint64_t *)op->buf;

	for (uint64_t i = 0; i < op->nr * BLOCK_WORDS; i++) {
		uint64_t b = op->block + i / BLOCK_WORDS;

		w[i] = word_of(op->block * BLOCK_WORDS + i, version[b] + 1 + unsure[b]);
	}
}

/* Words of a completed READ that must not be there. */
static uint64_t wrong_words(const struct op *op)
{
	const uint64_t *w = (const uint64_t *)op->buf;
	uint64_t wrong = 0;

	for (uint64_t i = 0; i < op->nr * BLOCK_WORDS; i++) {
		uint64_t b = op->block + i / BLOCK_WORDS;
		uint64_t v = version_of(op->block * BLOCK_WORDS + i, w[i]);

		if (v < version[b] || v > version[b] + unsure[b]) {
			if (!wrong)
				fprintf(stderr, "%s: block %" PRIu64 " word %" PRIu64 ": %016" PRIx64
					" is version %" PRId64 ", not %u to %u\n", name, b,
					i % BLOCK_WORDS, w[i], v, version[b], version[b] + unsure[b]);
			wrong++;
		}
	}
	return wrong;
}

static int post(struct op *op, uint64_t id)
{
	bool add = op->code == IBV_WR_ATOMIC_FETCH_AND_ADD;
	struct ibv_sge sge = {
		.addr = (uintptr_t)op->buf,
		.length = add ? 8 : op->nr * BLOCK,
		.lkey = end.mr->lkey,
	};
	struct ibv_send_wr wr = {
		.wr_id = id,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = op->code,
		.send_flags = IBV_SEND_SIGNALED,
		.imm_data = htobe32(told),
	}, *bad;

	told += op->code == IBV_WR_RDMA_WRITE_WITH_IMM;
	if (add) {
		wr.wr.atomic.remote_addr = raddr + length - PAGE;
		wr.wr.atomic.compare_add = 1;
		wr.wr.atomic.rkey = rkey;
	} else {
		wr.wr.rdma.remote_addr = raddr + op->block * BLOCK;
		wr.wr.rdma.rkey = rkey;
	}
	return npr_post_send(lib, &wr, &bad);
}

/* Ranges of one batch are apart, as operations of a batch may overtake each other. */
static bool overlaps(const struct op *ops, int nr, uint64_t block, uint64_t len)
{
	for (int i = 0; i < nr; i++)
		if (block < ops[i].block + ops[i].nr && ops[i].block < block + len)
			return true;
	return false;
}

/* What is known of operations that never completed. */
static void tell_hang(const struct op *ops, int nr, int done)
{
	struct npr_stats s = {};

	npr_get_stats(lib, &s, sizeof(s));
	fprintf(stderr, "%s: %d of %d done, QP state %d; reads %" PRIu64 " writes %" PRIu64
		" atomics %" PRIu64 " faults %" PRIu64 " busy %" PRIu64 " holds %" PRIu64
		" word reads %" PRIu64 " repeated %" PRIu64 " suspicious %" PRIu64 "\n",
		name, done, nr, np_qp_state(end.qp), (uint64_t)s.reads, (uint64_t)s.writes,
		(uint64_t)s.atomics, (uint64_t)s.faults, (uint64_t)s.busy, (uint64_t)s.holds,
		(uint64_t)s.word_reads, (uint64_t)s.repeated_pages, (uint64_t)s.suspicious_pages);
	for (int i = 0; i < nr; i++)
		fprintf(stderr, "%s: %d: opcode %d, block %" PRIu64 ", %" PRIu64 " blocks\n", name, i,
			ops[i].code, ops[i].block, ops[i].nr);
}

static int batch(uint64_t *done, uint64_t *wrong, const char **odd)
{
	uint64_t deadline;
	struct op ops[BATCH];
	int nr = 0, left, first = 0;
	uint64_t adds = 0, failed_adds = 0;

	for (int tries = 0; nr < BATCH && tries < 4 * BATCH; tries++) {
		struct op *op = &ops[nr];
		unsigned int kind = next_random() % (only_once ? 2 : 5);

		*op = (struct op){ .buf = end.buf + nr * OP_BYTES, .status = -1 };
		op->code = kind == 0 ? IBV_WR_ATOMIC_FETCH_AND_ADD :
			   only_once ? IBV_WR_RDMA_WRITE_WITH_IMM :
			   kind < 3 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
		if (kind) {
			op->nr = 1 + next_random() % (next_random() % 4 ? 4 : OP_BLOCKS);
			op->block = next_random() % (blocks - op->nr + 1);
			if (overlaps(ops, nr, op->block, op->nr))
				continue;
		}
		if (writes(op))
			fill_op(op);
		else
			memset(op->buf, 0xa5, kind ? op->nr * BLOCK : 8);
		if (post(op, nr)) {
			*odd = "post";
			break;
		}
		nr++;
	}
	deadline = np_now_ms() + NP_WAIT_MS;
	for (left = nr; left;) {
		struct ibv_wc wc;
		int ret = npr_poll_cq(cq, 1, &wc);

		if (ret < 0 || (ret && (wc.wr_id != (uint64_t)(nr - left)))) {
			*odd = ret < 0 ? "poll" : "order";
			return first;
		}
		if (ret) {
			ops[wc.wr_id].status = wc.status;
			if (wc.status && !first)
				first = wc.status;
			else if (first && wc.status != IBV_WC_WR_FLUSH_ERR)
				*odd = "status-behind-an-error";
			if (*odd)
				fprintf(stderr, "%s: status %d behind %d\n", name, wc.status, first);
			left--;
			deadline = np_now_ms() + NP_WAIT_MS;
		} else if (np_now_ms() >= deadline) {
			*odd = "hang";
			tell_hang(ops, nr, nr - left);
			return first;
		}
	}
	for (int i = 0; i < nr; i++) {
		struct op *op = &ops[i];
		uint64_t old;

		if (op->code == IBV_WR_ATOMIC_FETCH_AND_ADD && op->status) {
			failed_adds++;
		} else if (op->code == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			memcpy(&old, op->buf, 8);
			if (old < additions + adds || old > additions + adds + unsure_additions)
				(*wrong)++;
			/* One answer says what became of those before. */
			additions = old - adds;
			unsure_additions = 0;
			adds++;
		} else if (op->code == IBV_WR_RDMA_READ && !op->status) {
			*wrong += wrong_words(op);
		} else if (writes(op)) {
			for (uint64_t b = op->block; b < op->block + op->nr; b++) {
				if (op->status) {
					unsure[b]++;
				} else {
					version[b] += 1 + unsure[b];
					unsure[b] = 0;
				}
			}
		}
		*done += !op->status;
	}
	additions += adds;
	unsure_additions += failed_adds;
	return first;
}

static void *traffic(void *arg)
{
	uint64_t done = 0, wrong = 0;
	const char *odd = NULL;
	int status = 0;

	while (!status && !odd && !atomic_load(&stopping) && (!ops_wanted || done < ops_wanted))
		status = batch(&done, &wrong, &odd);
	say("ended %d %" PRIu64 " wrong %" PRIu64 " odd %s", status, done, wrong, odd ? odd : "-");
	return NULL;
}

static int attach(void)
{
	if (!ctx)
		ctx = npr_open(end.ctx, 0);
	if (ctx && !cq)
		cq = npr_attach_cq(ctx, end.cq);
	if (cq && !lib)
		lib = npr_attach_qp(cq, end.qp, NULL);
	return lib ? 0 : -errno;
}

static void join_traffic(void)
{
	if (traffic_running)
		pthread_join(traffic_thread, NULL);
	traffic_running = false;
}

/* --- the owner ---------------------------------------------------------------- */

static void *churn(void *arg)
{
	while (atomic_load(&churning)) {
		madvise(data, length, MADV_PAGEOUT);
		np_pause();
	}
	return NULL;
}

/* One after the other: what comes while there is no receive is asked to come again. */
static void *listener(void *arg)
{
	struct ibv_recv_wr recv = {}, *bad;
	struct ibv_wc wc;

	for (;;) {
		int n = ibv_poll_cq(end.cq, 1, &wc);

		if (!n) {
			np_pause();
			continue;
		}
		if (n < 0 || wc.status)
			return NULL;
		if (wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM ||
		    be32toh(wc.imm_data) != atomic_load(&heard))
			atomic_fetch_add(&misheard, 1);
		atomic_fetch_add(&heard, 1);
		if (ibv_post_recv(end.qp, &recv, &bad))
			return NULL;
	}
}

static int listen_to_peer(void)
{
	struct ibv_recv_wr recv = {}, *bad;
	int ret = -ibv_post_recv(end.qp, &recv, &bad);

	if (!ret)
		ret = -pthread_create(&listener_thread, NULL, listener, NULL);
	return ret;
}

static void say_heard(void)
{
	struct npr_stats s = {};

	if (lib)
		npr_get_stats(lib, &s, sizeof(s));
	say("heard %" PRIu64 " %" PRIu64 " %" PRIu64, data ? (uint64_t)atomic_load(&heard) : told,
	    (uint64_t)atomic_load(&misheard), (uint64_t)s.holds);
}

/* Every word is of its place, and those of a block are at most @span versions apart. */
static uint64_t check(uint64_t span)
{
	const uint64_t *w = (const uint64_t *)data;
	uint64_t wrong = 0;

	for (uint64_t b = 0; b < blocks; b++) {
		uint64_t low = UINT64_MAX, high = 0;

		for (uint64_t i = b * BLOCK_WORDS; i < (b + 1) * BLOCK_WORDS; i++) {
			uint64_t v = version_of(i, w[i]);

			if (v == UINT64_MAX) {
				wrong++;
				continue;
			}
			low = v < low ? v : low;
			high = v > high ? v : high;
		}
		wrong += low != UINT64_MAX && high > low + span;
	}
	return wrong;
}

/* Of the versions of all blocks; the same on both sides if both believe the same. */
static uint64_t sum(void)
{
	uint64_t s = 0;

	for (uint64_t b = 0; b < blocks; b++) {
		uint64_t v;

		if (data) {
			const uint64_t *w = (const uint64_t *)data + b * BLOCK_WORDS;

			v = version_of(b * BLOCK_WORDS, w[0]);
			for (uint64_t i = 1; i < BLOCK_WORDS; i++)
				if (version_of(b * BLOCK_WORDS + i, w[i]) != v)
					return 0;
		} else {
			v = version[b];
			if (unsure[b])
				return 1;
		}
		s = (s ^ v) * 0x100000001b3ULL + b;
	}
	return s;
}

static uint64_t counter(void)
{
	return data ? *(volatile uint64_t *)(data + length - PAGE) : additions;
}

static void set_region(uint64_t mib, uint64_t s)
{
	seed = s;
	length = (mib << 20) + PAGE;
	blocks = (mib << 20) / BLOCK;
}

static int make_region(uint64_t mib, uint64_t s)
{
	set_region(mib, s);
	data = np_map(length);
	if (!data)
		return -ENOMEM;
	for (uint64_t i = 0; i < blocks * BLOCK_WORDS; i++)
		((uint64_t *)data)[i] = word_of(i, 0);
	mr = npr_reg_mr(end.pd, data, length, NP_RIGHTS);
	return mr ? 0 : -errno;
}

static int make_target(uint64_t mib, uint64_t s)
{
	set_region(mib, s);
	free(version);
	free(unsure);
	version = calloc(blocks, sizeof(*version));
	unsure = calloc(blocks, sizeof(*unsure));
	additions = unsure_additions = 0;
	return version && unsure ? 0 : -ENOMEM;
}

/* --- the connection ------------------------------------------------------------- */

static int new_qp(void)
{
	int ret = 0;

	join_traffic();
	if (lib)
		ret = npr_detach_qp(lib);
	lib = NULL;
	if (!ret && end.qp)
		ret = -ibv_destroy_qp(end.qp);
	if (ret)
		return ret;
	end.qp = np_make_qp(&end, end.pd);
	psn = np_now_ms() * 2654435761U & 0xffffff;
	return end.qp ? 0 : -errno;
}

static int connect_qp(unsigned int lid, unsigned int qpn, unsigned int rq_psn, unsigned int timeout,
		      unsigned int retry)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
				   IBV_ACCESS_REMOTE_ATOMIC,
	};
	int ret = -ibv_modify_qp(end.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
						IBV_QP_ACCESS_FLAGS);

	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_4096,
		.dest_qp_num = qpn,
		.rq_psn = rq_psn,
		.max_dest_rd_atomic = 8,
		.min_rnr_timer = 12,
		.ah_attr = np_path(end.ctx, lid),
	};
	if (!ret)
		ret = -ibv_modify_qp(end.qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
						    IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS,
		.timeout = timeout,
		.retry_cnt = retry,
		.rnr_retry = 7,
		.sq_psn = psn,
		.max_rd_atomic = 8,
	};
	if (!ret)
		ret = -ibv_modify_qp(end.qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
						    IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
						    IBV_QP_MAX_QP_RD_ATOMIC);
	return ret;
}

static int hold(uint64_t off, uint64_t pages)
{
	struct rdma_np_region_info info;
	struct rdma_np_event event;
	int ret = np_resolve(&end, rkey, &info);

	if (ret)
		return ret;
	return np_fault(&end, info.region_id, info.base + off, pages * PAGE,
			RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD, &event);
}

static void state(void)
{
	struct npr_mr_attr a = {};

	if (mr)
		npr_query_mr(mr, &a);
	say("state %d %" PRIu64 " %" PRIu64, end.qp ? np_qp_state(end.qp) : -1,
	    (uint64_t)a.held_pages, (uint64_t)a.resident_pages);
}

static bool command(const char *line)
{
	uint64_t a[5] = {};
	char word[16] = "", arg[16] = "";
	int ret;

	sscanf(line, "%15s %15s", word, arg);
	sscanf(line, "%*s %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, &a[0], &a[1],
	       &a[2], &a[3], &a[4]);
	if (!strcmp(word, "region")) {
		ret = make_region(a[0], a[1]);
		if (!ret)
			say("region %u %u %" PRIu64, end.lid, mr->rkey, (uint64_t)(uintptr_t)data);
	} else if (!strcmp(word, "target")) {
		rkey = a[0];
		raddr = a[1];
		ret = make_target(a[2], a[3]);
		if (!ret)
			say("target");
	} else if (!strcmp(word, "qp")) {
		ret = new_qp();
		if (!ret)
			say("qp %u %u %u", end.lid, end.qp->qp_num, psn);
	} else if (!strcmp(word, "connect")) {
		ret = connect_qp(a[0], a[1], a[2], a[3], a[4]);
		if (!ret)
			say("connect");
	} else if (!strcmp(word, "churn")) {
		bool on = !strcmp(arg, "on");

		ret = 0;
		if (on && !atomic_exchange(&churning, true))
			ret = -pthread_create(&churn_thread, NULL, churn, NULL);
		else if (!on && atomic_exchange(&churning, false))
			pthread_join(churn_thread, NULL);
		if (!ret)
			say("churn");
	} else if (!strcmp(word, "run")) {
		join_traffic();
		ops_wanted = a[0];
		only_once = a[2];
		random_state = a[1] * 2654435761U + 88172645463325252ULL;
		atomic_store(&stopping, false);
		ret = attach();
		if (!ret)
			say("run");
		if (!ret)
			ret = -pthread_create(&traffic_thread, NULL, traffic, NULL);
		traffic_running = !ret;
	} else if (!strcmp(word, "stop")) {
		atomic_store(&stopping, true);
		say("stop");
		ret = 0;
	} else if (!strcmp(word, "listen")) {
		ret = listen_to_peer();
		if (!ret)
			say("listen");
	} else if (!strcmp(word, "heard")) {
		say_heard();
		ret = 0;
	} else if (!strcmp(word, "hold")) {
		ret = hold(a[0], a[1]);
		if (ret >= 0)
			say("hold %d", ret);
		ret = ret < 0 ? ret : 0;
	} else if (!strcmp(word, "state")) {
		state();
		ret = 0;
	} else if (!strcmp(word, "check")) {
		say("check %" PRIu64 " %" PRIu64, check(a[0]), counter());
		ret = 0;
	} else if (!strcmp(word, "sum")) {
		join_traffic();
		say("sum %" PRIx64 " %" PRIu64, sum(), counter());
		ret = 0;
	} else {
		ret = -EINVAL;
	}
	if (ret)
		say("error %s: %s", word, strerror(-ret));
	return !ret;
}

int main(int argc, char **argv)
{
	char line[256];
	int ret;

	if (argc != 3) {
		fprintf(stderr, "usage: np_host NAME DEVICE\n");
		return 2;
	}
	name = argv[1];
	ret = np_open(&end, argv[2], BATCH * OP_BYTES);
	if (ret) {
		say("error %s: %s", argv[2], strerror(-ret));
		return 1;
	}
	say("ready");
	while (fgets(line, sizeof(line), stdin))
		command(line);
	_exit(0);
}
