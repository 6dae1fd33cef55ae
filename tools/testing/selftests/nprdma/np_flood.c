// SPDX-License-Identifier: GPL-2.0
/*
 * What one may take from others: peers that ask as much as they can, and owners whose
 * memory never comes. Bounded work, BUSY beyond it, and the others go on.
 */
#include <endian.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "np_harness.h"
#include "np_message.h"
#include "np_stuck.h"

/* --- somebody with many QPs --------------------------------------------------------------- */

#define MANY	16

struct many {
	struct np_pair pair;
	struct ibv_qp *owner_qp[MANY + 1];
	struct ibv_qp *peer_qp[MANY + 1];
	uint64_t secret[MANY + 1];	/* for messages */
	unsigned int nr;
};

/* @nr connections between one PD and another, all of which know the region. */
static int many_open(struct many *many, unsigned int nr, uint8_t *data)
{
	struct np_pair *pair = &many->pair;
	int ret;

	memset(many, 0, sizeof(*many));
	many->nr = nr;
	ret = np_open(&pair->owner, NP_OWNER_DEV, PAGE);
	if (!ret)
		ret = np_open(&pair->peer, NP_PEER_DEV, PAGE);
	if (ret)
		return ret;
	pair->data = data;
	pair->mr = ibv_reg_mr(pair->owner.pd, data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
	if (!pair->mr)
		return -errno;
	for (unsigned int i = 0; i < nr; i++) {
		struct ibv_qp *a = np_make_qp(&pair->owner, pair->owner.pd);
		struct ibv_qp *b = np_make_qp(&pair->peer, pair->peer.pd);

		if (!a || !b)
			return -errno;
		ret = np_qp_connect(a, (struct np_addr){ b->qp_num, pair->peer.lid });
		if (!ret)
			ret = np_qp_connect(b, (struct np_addr){ a->qp_num, pair->owner.lid });
		if (!ret)
			ret = np_resolve_on(&pair->peer, b, pair->mr->rkey, &pair->info);
		if (ret)
			return ret;
		many->owner_qp[i] = a;
		many->peer_qp[i] = b;
	}
	return 0;
}

/* One FAULT of page @page on QP @i, which may be refused; @page is its cookie. */
static int many_fault(struct many *many, unsigned int i, unsigned int page, unsigned int pages)
{
	struct rdma_np_range range = {
		.addr = many->pair.info.base + page % (NP_DATA_PAGES - pages + 1) * PAGE,
		.length = pages * PAGE,
	};
	struct ibv_qp *own = many->pair.peer.qp;
	int ret;

	many->pair.peer.qp = many->peer_qp[i];
	ret = np_fault_start(&many->pair.peer, many->pair.info.region_id, 0, page, &range, 1);
	many->pair.peer.qp = own;
	return ret;
}

/* Likewise; who was refused waits until the QP may ask again. */
static int many_ask(struct many *many, unsigned int i, unsigned int page)
{
	int ret = 0;

	np_wait_until((ret = many_fault(many, i, page, 1)) != -EBUSY);
	return ret;
}

/* --- memory that never comes takes nobody else's place --------------------------------------- */

FIXTURE(stuck) {
	struct np_pair pair;
};

FIXTURE_VARIANT(stuck) {
	unsigned int owners;
};

FIXTURE_VARIANT_ADD(stuck, one_owner) { .owners = 1 };
FIXTURE_VARIANT_ADD(stuck, four_owners) { .owners = 4 };

FIXTURE_SETUP(stuck)
{
	ASSERT_EQ(0, access("/dev/fuse", R_OK | W_OK)) TH_LOG("CONFIG_FUSE_FS is needed");
	ASSERT_EQ(0, np_pair_open(&self->pair));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
}

FIXTURE_TEARDOWN_PARENT(stuck)
{
	if (self->pair.owner.ctx)
		NP_CHECK_USAGE(&self->pair.before);
}

/*
 * What one device serves at once, without what is kept for QPs that have nothing else
 * under way; an owner gets as much as it leaves free.
 */
#define SERVE_DEVICE	(512 - 32)

/* For so long the asker's kernel waits for a page that the owner's one is bringing. */
#define GIVEN_UP_MS	60000

/*
 * Never returns. Waits until no more than @share FAULTs are under way because all
 * others were refused, says how many, and waits. Another region of the process, whose
 * memory is there, is used for the first time then: that waits for nothing.
 */
static void stuck_process(int sock, int share)
{
	static uint64_t asked[MANY * LANES];
	static struct many many;
	static struct np_stuck_file file;
	uint8_t *data = np_stuck_map(&file), *other = np_map(PAGE);
	int busy = 0, sent = 0, under_way;
	struct rdma_np_event event;
	struct ibv_sge sge;
	struct ibv_mr *mr;
	char c;

	if (!data || !other || many_open(&many, MANY, data))
		_exit(1);
	mr = ibv_reg_mr(many.pair.owner.pd, other, PAGE, NP_RIGHTS | NP_UNPINNED);
	if (!mr)
		_exit(1);
	for (unsigned int lane = 0; lane < LANES; lane++)
		for (unsigned int i = 0; i < MANY; i++) {
			asked[sent] = np_now_ms();
			sent += !many_ask(&many, i, sent);
		}
	if (sent != MANY * LANES)
		_exit(2);
	/*
	 * One page would come only if we brought it: each answer is a refusal. On a slow
	 * machine the asker gives the first ones up before the last one is refused; for the
	 * owner's kernel they are under way as before.
	 */
	while (sent - busy > share) {
		if (np_next_event(&many.pair.peer, &event, NP_WAIT_MS) != 1)
			_exit(3);
		if (event.status == RDMA_NP_TIMEOUT && event.cookie < MANY * LANES &&
		    np_now_ms() - asked[event.cookie] >= GIVEN_UP_MS)
			continue;
		if (event.status != RDMA_NP_BUSY) {
			fprintf(stderr, "FAULT %llu ended with status %u\n", event.cookie,
				event.status);
			_exit(4);
		}
		busy++;
	}
	/* And at least one that we know of is waiting for us. */
	if (!np_wait_until(atomic_load(&file.waiting) > 0))
		_exit(5);
	while (np_next_event(&many.pair.peer, &event, 0) == 1)
		busy += event.status == RDMA_NP_BUSY;
	sge = (struct ibv_sge){ (uintptr_t)other, PAGE, mr->lkey };
	if (ibv_advise_mr(many.pair.owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
			  IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1))
		_exit(9);
	under_way = sent - busy;
	if (write(sock, &under_way, sizeof(under_way)) != sizeof(under_way))
		_exit(6);
	if (read(sock, &c, 1) < 0)
		_exit(7);
	pause();
	_exit(8);
}

#define MAX_OWNERS	4

TEST_F(stuck, faults_of_others_go_on_while_an_owners_memory_never_comes)
{
	struct np_pair *pair = &self->pair;
	unsigned int total = 0;
	pid_t child[MAX_OWNERS];
	struct rdma_np_event event;
	struct ibv_mr *mr;

	for (unsigned int i = 0; i < variant->owners; i++) {
		int sock[2], under_way = 0;

		ASSERT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sock));
		child[i] = np_fork();
		ASSERT_LE(0, child[i]);
		if (!child[i])
			stuck_process(sock[1], SERVE_DEVICE >> (i + 1));
		close(sock[1]);
		ASSERT_EQ(sizeof(under_way), read(sock[0], &under_way, sizeof(under_way)))
			TH_LOG("the stuck owner ended: %x", ({
				int status;

				waitpid(child[i], &status, 0);
				status;
			}));
		TH_LOG("owner %u: %d faults never end", i, under_way);
		/* Each takes its share of what those before left. */
		EXPECT_LE(SERVE_DEVICE >> (i + 1), under_way + 8);
		total += under_way;
	}
	EXPECT_GT(SERVE_DEVICE, total);

	for (unsigned int n = 0; n < 200; n++) {
		size_t off = n % NP_DATA_PAGES * PAGE;

		ASSERT_EQ(0, madvise(pair->data + off, PAGE, MADV_DONTNEED));
		ASSERT_EQ(RDMA_NP_OK, np_fault_once(&pair->peer, pair->peer.qp, pair->info.region_id,
					       pair->info.base + off, PAGE,
					       n & 1 ? RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_HOLD : 0, &event));
		if (n & 1)
			ASSERT_EQ(0, np_release(&pair->peer, event.hold_id));
	}
	/* All the rest goes on, too. */
	mr = ibv_reg_mr(pair->owner.pd, pair->data, PAGE, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	ASSERT_EQ(0, np_resolve(&pair->peer, mr->rkey, &pair->info));
	ASSERT_EQ(0, ibv_dereg_mr(mr));
	EXPECT_EQ(1, np_wait_event(&pair->peer, RDMA_NP_EVENT_REGION_GONE, &event, NP_WAIT_MS));
	EXPECT_EQ(0, np_forget(&pair->peer, event.region_id));
	/* They die with their faults under way, and leave nothing: see the fixture. */
	for (unsigned int i = 0; i < variant->owners; i++) {
		ASSERT_EQ(0, kill(child[i], SIGKILL));
		EXPECT_EQ(child[i], waitpid(child[i], NULL, 0));
	}
}

/* --- order among those that wait for one owner ------------------------------------------------ */

#define OWNER_ACTIVE	128	/* FAULTs of an owner that may be at work at once */
#define TURNS		64

FIXTURE(order) {
	struct np_usage before;
};

FIXTURE_SETUP(order)
{
	ASSERT_EQ(0, access("/dev/fuse", R_OK | W_OK)) TH_LOG("CONFIG_FUSE_FS is needed");
	ASSERT_EQ(0, np_usage_start(&self->before));
}

FIXTURE_TEARDOWN_PARENT(order)
{
	NP_CHECK_USAGE(&self->before);
}

/* Waits until the FAULT of page @want was answered, or @nr of page @first or later refused. */
static int order_wait(struct many *many, unsigned int want, unsigned int first, unsigned int nr)
{
	struct rdma_np_event event;

	for (unsigned int refused = 0; refused < nr;) {
		if (np_next_event(&many->pair.peer, &event, NP_WAIT_MS) != 1)
			return -ETIMEDOUT;
		if (event.cookie == want)
			return event.status == RDMA_NP_OK ? 0 : -EBUSY;
		/* On a slow machine some of the flood wait for longer than anybody asks. */
		if (event.status != RDMA_NP_OK && event.status != RDMA_NP_BUSY &&
		    event.status != RDMA_NP_TIMEOUT)
			return -EIO;
		refused += event.status == RDMA_NP_BUSY && event.cookie >= first;
	}
	return 1;
}

/*
 * The flood's QPs have as many FAULTs under way as they may. The owner's memory is such
 * that a FAULT is at work until we bring its page, one page after the other; the next
 * FAULT at work then shows by the page it asks for. So it is the order in which the
 * kernel serves that is counted, and how fast anything is does not matter.
 */
TEST_F(order, qp_that_waits_for_each_fault_gets_half_beside_many_that_do_not)
{
	unsigned int page = 0, between = 0;
	static struct np_stuck_file file;
	static struct many many;
	uint8_t *data = np_stuck_map(&file);
	int at_work = OWNER_ACTIVE;

	ASSERT_NE(NULL, data);
	ASSERT_EQ(0, many_open(&many, MANY + 1, data));

	for (; page < MANY * LANES; page++)
		ASSERT_EQ(0, many_ask(&many, page % MANY, page));
	ASSERT_EQ(1, order_wait(&many, page, 0, MANY * LANES - SERVE_DEVICE / 2));
	ASSERT_TRUE(np_wait_until(atomic_load(&file.waiting) == at_work));

	for (unsigned int turn = 0, more = 2; turn < TURNS; turn++) {
		unsigned int want = page++, first = page;

		ASSERT_EQ(0, many_fault(&many, MANY, want, 1));
		/* The flood takes what is free again; its refusal says that all that arrived. */
		for (; more; more--, page++)
			ASSERT_EQ(0, many_ask(&many, page % MANY, page));
		ASSERT_GE(NP_DATA_PAGES, page);
		ASSERT_EQ(1, order_wait(&many, want, first, 1));

		/* Each page that is brought ends one FAULT, and the next one begins. */
		for (more = 2;; more++, between++) {
			ASSERT_GE(TURNS, between) TH_LOG("in turn %u", turn);
			np_stuck_bring(&file, 0);
			ASSERT_TRUE(np_wait_until(atomic_load(&file.waiting) > at_work));
			if (file.reads[at_work++].page == want)
				break;
		}
		np_stuck_bring(&file, at_work - 1);
		ASSERT_EQ(0, order_wait(&many, want, first, ~0U));
		ASSERT_TRUE(np_wait_until(atomic_load(&file.waiting) > at_work));
		at_work++;
	}
	TH_LOG("%u of others came before %u of one QP", between, TURNS);
}

#define FILLERS		(OWNER_ACTIVE / LANES)	/* QPs whose FAULTs are all that is at work */
#define DEEPEST		32			/* of so many turns one is for the last class */

/*
 * The other way round: there is always somebody who waits for a single FAULT, and who has
 * many under way is served all the same.
 */
TEST_F(order, qp_with_many_under_way_goes_on_beside_many_that_wait_for_each_fault)
{
	unsigned int owner[NP_DATA_PAGES], page = 0, deep = 0;
	static struct np_stuck_file file;
	static struct many many;
	uint8_t *data = np_stuck_map(&file);
	bool ended[NP_DATA_PAGES] = {};
	int at_work = OWNER_ACTIVE;
	struct rdma_np_event event;

	ASSERT_NE(NULL, data);
	ASSERT_EQ(0, many_open(&many, MANY + 1, data));

	for (; page < OWNER_ACTIVE; page++)
		ASSERT_EQ(0, many_fault(&many, owner[page] = page % FILLERS, page, 1));
	ASSERT_TRUE(np_wait_until(atomic_load(&file.waiting) == at_work));
	for (unsigned int lane = 0; lane < LANES; lane++, page++)
		ASSERT_EQ(0, many_fault(&many, owner[page] = FILLERS, page, 1));
	for (unsigned int i = FILLERS + 1; i <= MANY; i++, page++)
		ASSERT_EQ(0, many_fault(&many, owner[page] = i, page, 1));

	/* One place at work becomes free, and is then handed on from turn to turn. */
	np_stuck_bring(&file, 0);
	for (unsigned int turn = 0; turn < 8 * DEEPEST; turn++) {
		unsigned int next;

		ASSERT_TRUE(np_wait_until(atomic_load(&file.waiting) > at_work));
		next = file.reads[at_work].page;
		ASSERT_LE(OWNER_ACTIVE, next);
		deep += owner[next] == FILLERS;
		np_stuck_bring(&file, at_work++);
		/* Who was served asks again. On a slow machine some have waited for too long. */
		while (!ended[next]) {
			ASSERT_EQ(1, np_next_event(&many.pair.peer, &event, NP_WAIT_MS));
			ASSERT_TRUE(event.status == RDMA_NP_OK || event.status == RDMA_NP_TIMEOUT)
				TH_LOG("FAULT %llu ended with %u", event.cookie, event.status);
			ended[event.cookie] = true;
		}
		ASSERT_GT(NP_DATA_PAGES, page);
		ASSERT_EQ(0, many_fault(&many, owner[page] = owner[next], page, 1));
		page++;
	}
	TH_LOG("%u of %u turns were for the QP with %u under way", deep, 8 * DEEPEST, LANES);
	/* 31 by the rule: 1, 2, 4 and 8 of the first classes, and 8 of each of the last two. */
	EXPECT_LE(16U, deep);
}

/* --- peers that ask without end -------------------------------------------------------------- */

enum flood_kind {
	FAULTS,
	MESSAGES,		/* of the other kinds, forged, and garbage */
};

/* What the flooding process does: nothing, or it computes, or sends, until it is told to leave. */
enum {
	REST,
	BURN,			/* one thread computes */
	CROWD,			/* one for each QP, as long as there are CPUs */
	DROPPED,		/* messages that nobody takes */
	FLOOD,
	LEAVE,
};

struct shared {
	atomic_int todo, doing;
	atomic_int err;
	atomic_ulong answered;
	atomic_ulong refused;
};

FIXTURE(flood) {
	struct np_usage before;
	struct shared *shared;
};

FIXTURE_VARIANT(flood) {
	enum flood_kind kind;
	unsigned int qps;
	bool drop;		/* the owner takes its pages away all the time */
	bool same_owner;	/* the other QP's region is in the same process */
};

FIXTURE_VARIANT_ADD(flood, resident_pages) { .qps = 1 };
FIXTURE_VARIANT_ADD(flood, absent_pages) { .qps = 1, .drop = true };
FIXTURE_VARIANT_ADD(flood, same_owner) { .qps = 1, .same_owner = true };
FIXTURE_VARIANT_ADD(flood, many_qps) { .qps = MANY };
FIXTURE_VARIANT_ADD(flood, many_qps_absent_pages) { .qps = MANY, .drop = true };
FIXTURE_VARIANT_ADD(flood, many_qps_same_owner) { .qps = MANY, .same_owner = true };
FIXTURE_VARIANT_ADD(flood, messages) { .kind = MESSAGES, .qps = MANY };

FIXTURE_SETUP(flood)
{
	self->shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ASSERT_NE(MAP_FAILED, self->shared);
	ASSERT_EQ(0, np_usage_start(&self->before));
}

FIXTURE_TEARDOWN_PARENT(flood)
{
	NP_CHECK_USAGE(&self->before);
}

/*
 * Keeps as many FAULTs under way as there may be, on all QPs; counts those answered.
 * -errno, or 0 when @go_on does not hold any more and all are answered.
 */
static int flood(struct many *many, bool drop, atomic_ulong *answered, atomic_ulong *refused,
		 bool (*go_on)(void *arg), void *arg)
{
	unsigned int under_way = 0, next = 0;
	struct rdma_np_event event;
	bool more;

	do {
		more = go_on(arg);
		if (more && drop)
			madvise(many->pair.data, NP_DATA_LEN, MADV_DONTNEED);
		for (unsigned int i = 0; more && i < many->nr; i++)
			while (!many_fault(many, i, ++next, 1))
				under_way++;
		if (!under_way)
			continue;
		if (np_next_event(&many->pair.peer, &event, NP_WAIT_MS) != 1)
			return -ETIMEDOUT;
		do {
			if (event.status != RDMA_NP_OK && event.status != RDMA_NP_BUSY) {
				fprintf(stderr, "FAULT %llu ended with status %u, after %lu\n",
					event.cookie, event.status, atomic_load(answered));
				return -EIO;
			}
			under_way--;
			atomic_fetch_add(event.status == RDMA_NP_OK ? answered : refused, 1);
		} while (np_next_event(&many->pair.peer, &event, 0) == 1);
	} while (more || under_way);
	return 0;
}

#define WINDOW		64	/* messages between two that tell how far they are */
#define WINDOWS		4	/* under way: as many as an adapter receives at once */

/* What the peer's kernel may send at any time, right and wrong. */
static struct message flood_message(struct many *many, uint64_t tid)
{
	struct message m = {
		.version = VERSION,
		.src_qpn = htobe32(many->peer_qp[tid % many->nr]->qp_num),
		.dst_qpn = htobe32(many->owner_qp[tid % many->nr]->qp_num),
		.incarnation = htobe64(0x4e50),
		.tid = htobe64(tid),
		.secret = many->secret[tid % many->nr],
	};

	if (tid % WINDOW == 0) {
		m.type = FAULT;
		m.length = htobe16(16 + 16);
		m.fault.region_id = htobe64(many->pair.info.region_id);
		m.fault.flags = htobe32(RDMA_NP_FAULT_HOLD);
		m.fault.lane = htobe16(LANES - 1);
		m.fault.nr_ranges = htobe16(1);
		m.fault.ranges[0].addr = htobe64(many->pair.info.base);
		m.fault.ranges[0].length = htobe64(PAGE);
		return m;
	}
	switch (tid % 5) {
	case 0:
		m.type = RELEASE;
		m.length = htobe16(8);
		m.hold_id = htobe64(tid);
		break;
	case 1:
		m.type = RESOLVE;
		m.secret = 0;
		m.length = htobe16(8);
		m.resolve.rkey = htobe32(many->pair.mr->rkey);
		break;
	case 2:
		m.type = FORGET;
		m.length = htobe16(16);
		m.forget.region_id = htobe64(many->pair.info.region_id + 1000);
		m.forget.seq = htobe64(UINT64_MAX);
		break;
	case 3:
		/* As if from somebody new. */
		m.type = RESOLVE;
		m.secret = 0;
		m.length = htobe16(8);
		m.dst_qpn ^= htobe32(0x5a5a);
		break;
	default:
		m.type = FAULT;
		m.length = htobe16(tid % BODY);
		memset(m.body, tid, BODY);
	}
	return m;
}

/*
 * Counts those sent. As MADs are received in order and may be lost, the hold that a
 * FAULT among them gets tells that those before it were received.
 */
static int flood_messages(struct many *many, struct port *port, bool dropped, atomic_ulong *sent,
			  bool (*go_on)(void *arg), void *arg)
{
	static uint64_t tid;
	struct rdma_np_mr_info info;
	uint64_t base, asked = 0, deadline;
	bool more;

	if (np_query_mr(many->pair.mr, &info))
		return -EIO;
	base = info.holds;
	do {
		more = go_on(arg);
		for (unsigned int i = 0; more && i < WINDOW; i++, atomic_fetch_add(sent, 1)) {
			struct message m = flood_message(many, ++tid);
			int ret;

			port->class = dropped && tid % WINDOW ? NOBODYS_CLASS : CLASS;
			ret = send_message(port, &m);

			if (ret)
				return ret;
		}
		asked += more;
		deadline = np_now_ms() + 100;
		while (!np_query_mr(many->pair.mr, &info) &&
		       asked > info.holds - base + (more ? WINDOWS : 0)) {
			if (np_now_ms() > deadline) {
				asked = info.holds - base;
				break;
			}
			sched_yield();
		}
	} while (more);
	return 0;
}

static bool until_told(void *arg)
{
	struct shared *shared = arg;

	return atomic_load(&shared->todo) == atomic_load(&shared->doing);
}

/* As many threads as QPs, but no more than run at once. */
static unsigned int crowd(unsigned int qps)
{
	unsigned int cpus = sysconf(_SC_NPROCESSORS_ONLN);

	return qps < cpus ? qps : cpus;
}

struct flooder {
	struct shared *shared;
	enum flood_kind kind;
	unsigned int qps;
	bool drop;
};

/* Computes if it is told that all shall. */
static void *crowd_thread(void *arg)
{
	struct shared *shared = arg;
	int todo;

	while ((todo = atomic_load(&shared->todo)) != LEAVE)
		if (todo != CROWD)
			np_pause();
	return NULL;
}

/* Does what it is told: rests, only computes, sends what nobody takes, or floods. */
static int flood_as_told(const struct flooder *flooder)
{
	struct shared *shared = flooder->shared;
	uint8_t *data = np_map(NP_DATA_LEN);
	atomic_ulong dropped = 0;
	static struct many many;
	pthread_t thread;
	struct port port;
	int todo, ret;

	for (unsigned int i = 1; i < crowd(flooder->qps); i++)
		if (pthread_create(&thread, NULL, crowd_thread, shared) || pthread_detach(thread))
			return -EAGAIN;
	if (!data || many_open(&many, flooder->qps, data))
		return -ENODEV;
	ret = port_open(&port, NP_PEER_DEV, many.pair.owner.lid);
	for (unsigned int i = 0; !ret && flooder->kind == MESSAGES && i < many.nr; i++)
		ret = message_secret(&many.pair.peer, many.peer_qp[i], many.owner_qp[i]->qp_num,
				     many.pair.info.region_id, many.pair.info.base,
				     &many.secret[i]);
	while (!ret && (todo = atomic_load(&shared->todo)) != LEAVE) {
		atomic_store(&shared->doing, todo);
		if (todo == FLOOD && flooder->kind == FAULTS)
			ret = flood(&many, flooder->drop, &shared->answered, &shared->refused,
				    until_told, shared);
		else if (todo == FLOOD || todo == DROPPED)
			ret = flood_messages(&many, &port, todo == DROPPED,
					     todo == FLOOD ? &shared->answered : &dropped,
					     until_told, shared);
		else if (todo == REST)
			np_pause();
		else
			while (until_told(shared))
				;
	}
	return ret;
}

static void *flood_thread(void *arg)
{
	const struct flooder *flooder = arg;

	atomic_store(&flooder->shared->err, flood_as_told(flooder));
	return NULL;
}

static bool flooder_does(struct shared *shared, int what)
{
	atomic_store(&shared->todo, what);
	return np_wait_until(atomic_load(&shared->doing) == what || atomic_load(&shared->err));
}

static bool until_time(void *arg)
{
	return np_now_ms() < *(uint64_t *)arg;
}

#define SLICE_MS	300
#define SLICES		12	/* of each */

struct served {
	unsigned long answered;
	uint64_t ms;
	unsigned long rate;	/* of the last slice */
};

static unsigned long per_second(unsigned long n, uint64_t ms)
{
	return 1000 * n / (ms ?: 1);
}

static unsigned long rate(const struct served *served)
{
	return per_second(served->answered, served->ms);
}

/* How many the QP gets in a while. */
static int slice(struct many *many, bool drop, struct served *served)
{
	uint64_t begin = np_now_ms(), end = begin + SLICE_MS, ms;
	atomic_ulong answered = 0, refused = 0;
	int ret = flood(many, drop, &answered, &refused, until_time, &end);

	ms = np_now_ms() - begin;
	served->answered += answered;
	served->ms += ms;
	served->rate = per_second(answered, ms);
	return ret;
}

/* How much more than promised there was in each turn. */
struct surplus {
	double sum, squares;
};

static void surplus_add(struct surplus *surplus, double more)
{
	surplus->sum += more;
	surplus->squares += more * more;
}

static double mean(const struct surplus *surplus)
{
	return surplus->sum / SLICES;
}

/* How far the mean is off by chance. */
static double standard_error(const struct surplus *surplus)
{
	double variance = (surplus->squares - mean(surplus) * surplus->sum) / (SLICES - 1);

	return sqrt(variance / SLICES);
}

/* Student's t for twelve turns at 97.5 per cent, one-sided */
#define BY_CHANCE	2.2

/*
 * What is promised is about what the kernel does for others. A flood takes CPUs besides,
 * as anything does that runs, and that is the scheduler's business: so what a QP gets
 * is compared with what it gets beside threads that only compute, one for each of the
 * flood's QPs as long as there are CPUs for them; or that only send what nobody takes.
 * They take turns, so that a busy machine is busy for all, and what is missing in all of
 * them together has to be more than chance. Many on the memory of one owner share what is
 * served on it.
 */
TEST_F(flood, others_keep_half_their_rate)
{
	struct flooder flooder = {
		.shared = self->shared,
		.kind = variant->kind,
		.qps = variant->qps,
		.drop = variant->drop,
	};
	const int control = variant->kind == MESSAGES ? DROPPED : variant->qps > 1 ? CROWD : BURN;
	struct served with[LEAVE] = {};
	uint8_t *data = np_map(NP_DATA_LEN);
	struct surplus surplus = {};
	static struct many many;
	pthread_t thread;
	pid_t child = 0;
	int status = 0;

	if (variant->same_owner) {
		ASSERT_EQ(0, pthread_create(&thread, NULL, flood_thread, &flooder));
	} else {
		child = np_fork();
		ASSERT_LE(0, child);
		if (!child) {
			flood_thread(&flooder);
			_exit(!!self->shared->err);
		}
	}
	ASSERT_NE(NULL, data);
	ASSERT_EQ(0, many_open(&many, 1, data));
	for (int turn = 0; turn < SLICES; turn++) {
		const unsigned long before = self->shared->answered;
		uint64_t ms = with[FLOOD].ms;

		for (int what = REST; what <= FLOOD; what++) {
			if (what > BURN && what != control && what != FLOOD)
				continue;
			ASSERT_TRUE(flooder_does(self->shared, what));
			ASSERT_EQ(0, slice(&many, variant->drop, &with[what]));
			ASSERT_EQ(0, self->shared->err);
		}
		ms = with[FLOOD].ms - ms;
		surplus_add(&surplus, with[FLOOD].rate -
			    (variant->same_owner && variant->qps > 1 ?
			     per_second(self->shared->answered - before, ms) / variant->qps :
			     with[control].rate) / 2.0);
	}
	atomic_store(&self->shared->todo, LEAVE);
	if (child) {
		ASSERT_EQ(child, waitpid(child, &status, 0));
	} else {
		ASSERT_EQ(0, pthread_join(thread, NULL));
	}
	EXPECT_EQ(0, status);
	TH_LOG("%lu/s alone, %lu/s beside a thread that computes, %lu/s beside the control",
	       rate(&with[REST]), rate(&with[BURN]), rate(&with[control]));
	TH_LOG("%lu/s beside a flood of %lu/s and %lu/s refused on %u QPs",
	       rate(&with[FLOOD]), per_second(self->shared->answered, with[FLOOD].ms),
	       1000 * self->shared->refused / with[FLOOD].ms, variant->qps);
	TH_LOG("%+.0f/s of what is promised, in the mean; standard error %.0f/s",
	       mean(&surplus), standard_error(&surplus));
	/* Or there was no flood. */
	EXPECT_LT(SLICES * LANES, self->shared->answered);
	EXPECT_LE(-BY_CHANCE * standard_error(&surplus), mean(&surplus));
}

TEST_HARNESS_MAIN
