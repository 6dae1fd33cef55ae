// SPDX-License-Identifier: GPL-2.0
/*
 * I1 to I4 under traffic: while the owner's pages are dropped, moved, swapped,
 * collapsed and copied, a peer READs and WRITEs as fast as it can.
 *
 * Each word of a page says which page, word and version it is, so a READ can be
 * judged word by word: the signature, zeros (a new page that the owner has not
 * written yet), or this page in a version that was not dropped before the READ
 * was posted. Everything else is a page that was not ours any more. A third thread
 * takes freed pages and poisons them, so that they do not look like ours for long, and
 * looks whether anybody else writes there.
 *
 * READs begin and end anywhere. Within a 64-byte unit all words are the page's or all
 * are the signature; so one that begins inside of a unit and reaches into the next is
 * posted as two, because an HCA may cut it in multiples of 64 bytes from where it begins.
 *
 * The first thing that is wrong ends a variant. What may happen besides is said for each
 * kind of change (may_be_unmapped(), may_be_read_only()), and what a WRITE that was refused
 * leaves open, it leaves open for its page, until the next one is proven.
 *
 * NP_TRAFFIC_MS is how long each variant runs at least (default 4000); on a slow
 * machine it goes on until enough has happened.
 * NP_TRAFFIC_SEED says which of the unkind things that hardware may do the HCAs do. By
 * default that is random, and printed; 0 leaves all as the guest was started.
 * NP_TRAFFIC_DELAY_NS is the pause between DMA requests, in place of the variant's.
 * NP_TRAFFIC_WORDS says when the words are read that prove a WRITE: "behind" it, in one
 * doorbell, which is right only if the HCA executes both in order, or "after" its
 * completion. By default, as the owner says of its HCA, or after if it is out of order.
 * NP_TRAFFIC_STALE_TLB=1 breaks the owner's HCA while there is traffic: its device TLB, if it
 * has one, keeps what it should drop. Broken from the start the driver would not get so far.
 * NP_TRAFFIC_WHOLE=1 posts READs that begin inside of a unit whole: wrong, to see whether
 * the test notices.
 */
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/random.h>
#include <sys/resource.h>

#include "np_harness.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define PAGES		32	/* few, so that many changes meet an access */
#define FIRST_PAGE	(512 - PAGES / 2)	/* on both sides of a slot's end */
#define BATCH		4	/* READs under way at once */
#define SCRIBBLE_AT	(BATCH * PAGE)	/* in the peer's buffer: a unit for each page */
#define LAST_UNIT	(PAGE - UNIT)
#define LAST_VERSION	0xffffffULL	/* never stale */
#define MAGIC		0x4e50ULL
#define POISON		0xdeadbeefdeadbeefULL

/* 16 bits of magic, 24 of version, 12 of page, 12 of word. */
static uint64_t word_make(unsigned int page, uint64_t version, unsigned int word)
{
	return MAGIC << 48 | version << 24 | (uint64_t)page << 12 | word;
}

static void page_fill(void *p, unsigned int page, uint64_t version)
{
	volatile uint64_t *w = p;

	for (unsigned int i = 0; i < PAGE_WORDS; i++)
		w[i] = word_make(page, version, i);
}

enum churn {
	CHURN_DONTNEED,
	CHURN_REMAP,
	CHURN_MOVE,
	/* from here on no data is lost */
	CHURN_PAGEOUT,
	CHURN_FORK,
	CHURN_COLLAPSE,
	CHURN_PROTECT,
	CHURN_COMPACT,
};

/* Is a page, for a moment, not mapped at all? Then a FAULT may say so. */
static bool may_be_unmapped(enum churn how)
{
	return how == CHURN_REMAP || how == CHURN_MOVE;
}

/* Is a page, for a moment, the owner's to read only? Then WRITEs may be refused. */
static bool may_be_read_only(enum churn how)
{
	return how == CHURN_PROTECT || how == CHURN_COLLAPSE;
}

struct traffic {
	struct np_pair *pair;
	atomic_bool stop;
	atomic_int failed;		/* line of the first failure of a thread */
	atomic_int error;		/* what failed */
	atomic_ulong minimum[PAGES];	/* older versions are gone */
	unsigned long expected[PAGES];	/* last proven WRITE */
	bool open[PAGES];		/* the next one was refused, and may have landed */
	enum churn how;
	bool whole;			/* READs are not split */
	atomic_ulong churns;
	atomic_ulong huge;		/* leaves of 2 MiB that were seen */
	atomic_ulong moved;		/* pages that compaction gave other frames */
	atomic_ulong ops;		/* READs and WRITEs, for the churner's pace */
	unsigned long reads, writes, suspicious, faults, unproven, refused;
	unsigned long stale, torn, foreign;
	uint64_t foreign_word;
	atomic_ulong intruders;		/* words that somebody wrote where nothing is ours */
	atomic_ulong intruder;		/* one of them */
};

#define FAIL(t, err)							\
	do {								\
		int none_ = 0;						\
									\
		if (atomic_compare_exchange_strong(&(t)->failed, &none_, __LINE__)) \
			atomic_store(&(t)->error, (err));		\
		atomic_store(&(t)->stop, true);				\
	} while (0)

/* What memory is not the region's any more is POISON, and stays it. */
static void check_poison(struct traffic *t, const volatile uint64_t *p, size_t words)
{
	for (size_t i = 0; i < words; i++) {
		uint64_t word = p[i];

		if (word == POISON)
			continue;
		atomic_store(&t->intruder, word);
		atomic_fetch_add(&t->intruders, 1);
		atomic_store(&t->stop, true);
	}
}

static unsigned int next_random(unsigned int *seed)
{
	*seed = *seed * 1664525 + 1013904223;
	return *seed >> 8;
}

static uint8_t *page_at(struct traffic *t, unsigned int page)
{
	return t->pair->data + (FIRST_PAGE + page) * PAGE;
}

static size_t offset_of(unsigned int page)
{
	return (FIRST_PAGE + page) * PAGE;
}

/* --- what happens to the owner's memory ------------------------------------------- */

/* One page becomes another one that holds a newer version. */
static void churn_drop(struct traffic *t, enum churn how, unsigned int page, void *spare)
{
	uint8_t *p = page_at(t, page);
	uint64_t version = atomic_load(&t->minimum[page]);

	switch (how) {
	case CHURN_DONTNEED:
		if (madvise(p, PAGE, MADV_DONTNEED))
			FAIL(t, errno);
		break;
	case CHURN_REMAP:
		if (munmap(p, PAGE) ||
		    mmap(p, PAGE, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != p)
			FAIL(t, errno);
		break;
	case CHURN_MOVE:
		/* The page lives on, at an address that is not the region's. */
		if (*(volatile uint64_t *)spare)
			check_poison(t, spare, PAGE_WORDS);
		if (mremap(p, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, spare) != spare ||
		    mmap(p, PAGE, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != p)
			FAIL(t, errno);
		for (unsigned int i = 0; i < PAGE_WORDS; i++)
			((volatile uint64_t *)spare)[i] = POISON;
		break;
	default:
		FAIL(t, EINVAL);
	}
	/* From now on nobody may see what was. */
	atomic_store(&t->minimum[page], version + 1);
	page_fill(p, page, version + 1);
}

/* Somebody needs a page of it, and with that comes all of it. */
static void wait_for_huge_leaf(struct traffic *t)
{
	unsigned long ops = atomic_load(&t->ops) + 100;
	struct rdma_np_mr_info info = {};

	do {
		if (np_query_mr(t->pair->mr, &info))
			FAIL(t, errno);
	} while (!info.huge_leaves && !atomic_load(&t->stop) && atomic_load(&t->ops) < ops);
	if (info.huge_leaves)
		atomic_fetch_add(&t->huge, 1);
}

static void frames_of(struct traffic *t, uint64_t frame[PAGES])
{
	int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);

	memset(frame, 0, PAGES * 8);
	if (fd < 0 || pread(fd, frame, PAGES * 8, (uintptr_t)page_at(t, 0) / PAGE * 8) != PAGES * 8)
		FAIL(t, errno);
	close(fd);
	for (int i = 0; i < PAGES; i++)
		frame[i] = frame[i] >> 63 ? frame[i] & ((1ULL << 55) - 1) : 0;
}

/*
 * Compaction moves pages to free ones at the end of their zone, and there they are. So
 * first the peer's WRITEs, of pages that a child has too, bring ours anywhere else.
 */
static void compact(struct traffic *t)
{
	unsigned long ops = atomic_load(&t->ops) + 2 * PAGES;
	uint64_t before[PAGES], after[PAGES];
	int p[2], status;
	pid_t pid;
	char c;

	if (pipe2(p, O_CLOEXEC)) {
		FAIL(t, errno);
		return;
	}
	pid = np_fork();
	if (!pid) {
		close(p[1]);
		_exit(read(p[0], &c, 1) != 0);
	}
	close(p[0]);
	while (!atomic_load(&t->stop) && atomic_load(&t->ops) < ops)
		sched_yield();
	close(p[1]);
	if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
		FAIL(t, pid < 0 ? errno : status);
	/* They are the owner's only again, and nothing else moves them. */
	frames_of(t, before);
	if (np_write_text("/proc/sys/vm/compact_memory", "1"))
		FAIL(t, errno);
	frames_of(t, after);
	for (int i = 0; i < PAGES; i++)
		atomic_fetch_add(&t->moved, before[i] && after[i] && before[i] != after[i]);
}

static void churn_keep(struct traffic *t, enum churn how, unsigned int *seed)
{
	unsigned int page = next_random(seed) % PAGES;
	pid_t pid;
	int status;

	switch (how) {
	case CHURN_PAGEOUT:
		if (madvise(page_at(t, page), 8 * PAGE, MADV_PAGEOUT))
			FAIL(t, errno);
		/* A read swap-in makes a clean page, which must not be lost again. */
		(void)*(volatile uint8_t *)page_at(t, next_random(seed) % PAGES);
		break;
	case CHURN_FORK:
		pid = np_fork();
		if (!pid) {
			/* Our copy is ours. */
			for (int i = 0; i < 4; i++)
				page_at(t, (page + i) % PAGES)[8] = 0xff;
			_exit(0);
		}
		if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
			FAIL(t, pid < 0 ? errno : status);
		break;
	case CHURN_COLLAPSE:
		/* Fails if somebody holds a page just now. */
		if (!madvise(t->pair->data, HUGE_PAGE, MADV_COLLAPSE))
			wait_for_huge_leaf(t);
		/* Take it apart again. */
		__attribute__((fallthrough));
	case CHURN_PROTECT:
		if (mprotect(page_at(t, page), PAGE, PROT_READ) ||
		    mprotect(page_at(t, page), PAGE, PROT_READ | PROT_WRITE))
			FAIL(t, errno);
		break;
	case CHURN_COMPACT:
		compact(t);
		break;
	default:
		FAIL(t, EINVAL);
	}
}

static void *churn_thread(void *arg)
{
	struct traffic *t = arg;
	unsigned int seed = 4711;
	void *spare = np_map(PAGE);

	while (!atomic_load(&t->stop)) {
		unsigned long ops;

		if (t->how < CHURN_PAGEOUT)
			churn_drop(t, t->how, next_random(&seed) % PAGES, spare);
		else
			churn_keep(t, t->how, &seed);
		atomic_fetch_add(&t->churns, 1);
		/* Else all pages are absent all the time, and nothing can go wrong. */
		ops = atomic_load(&t->ops) + next_random(&seed) % 8;
		while (!atomic_load(&t->stop) && atomic_load(&t->ops) < ops)
			sched_yield();
	}
	return NULL;
}

/* Whoever gets a page that we freed writes into it at once. */
static void *poison_thread(void *arg)
{
	struct traffic *t = arg;

	/* In what time the others leave; for a thread, 0 is itself. */
	setpriority(PRIO_PROCESS, 0, 15);
	while (!atomic_load(&t->stop)) {
		size_t len = 64 * PAGE;
		volatile uint64_t *p = mmap(NULL, len, PROT_READ | PROT_WRITE,
					    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (p == MAP_FAILED) {
			FAIL(t, errno);
			break;
		}
		for (size_t i = 0; i < len / 8; i++)
			p[i] = POISON;
		sched_yield();
		check_poison(t, p, len / 8);
		munmap((void *)p, len);
	}
	return NULL;
}

/* --- the peer ------------------------------------------------------------------------ */

/* A READ of at most a page's length, in bytes of the pages */
struct read {
	size_t off;
	size_t len;
	uint64_t minimum[2];	/* of the pages that it touches, when it was posted */
};

static void choose_read(struct traffic *t, struct read *r, unsigned int *seed)
{
	unsigned int page = next_random(seed) % PAGES;

	r->off = page * PAGE;
	r->len = PAGE;
	if (next_random(seed) % 2) {
		r->off += next_random(seed) % PAGE_WORDS * 8;
		r->len = (1 + next_random(seed) % PAGE_WORDS) * 8;
		if (r->len > PAGES * PAGE - r->off)
			r->len = PAGES * PAGE - r->off;
	}
	r->minimum[0] = atomic_load(&t->minimum[page]);
	r->minimum[1] = page + 1 < PAGES ? atomic_load(&t->minimum[page + 1]) : 0;
}

static int post_read(struct traffic *t, const struct read *r, size_t at, unsigned int flags)
{
	struct rdma_np_region_info *info = &t->pair->info;
	uint64_t addr = np_read_addr(info, offset_of(0) + r->off);
	size_t edge = r->off % UNIT ? UNIT - r->off % UNIT : 0;
	int ret;

	if (edge >= r->len || t->whole)
		edge = 0;
	if (edge) {
		ret = np_post(&t->pair->peer, IBV_WR_RDMA_READ, at, edge, addr, info->read_key, 0);
		if (ret)
			return ret;
	}
	return np_post(&t->pair->peer, IBV_WR_RDMA_READ, at + edge, r->len - edge, addr + edge,
		       info->read_key, flags);
}

/* Judges what was READ; true if any of it is the signature. */
static bool judge(struct traffic *t, const uint64_t *data, const struct read *r)
{
	uint64_t signature = t->pair->info.signature;
	size_t first = r->off / 8, end = (r->off + r->len) / 8;
	bool suspicious = false;

	for (size_t next, i = first; i < end; i = next) {
		unsigned int signs = 0;
		size_t begin = i;

		next = (i / UNIT_WORDS + 1) * UNIT_WORDS;
		if (next > end)
			next = end;
		for (; i < next; i++) {
			uint64_t w = data[i - first];
			size_t page = i / PAGE_WORDS;

			if (w == signature) {
				signs++;
			} else if (w && (w >> 48 != MAGIC || (w >> 12 & 0xfff) != page ||
					 (w & 0xfff) != i % PAGE_WORDS)) {
				t->foreign++;
				t->foreign_word = w;
			} else if (w && (w >> 24 & 0xffffff) < r->minimum[page - r->off / PAGE]) {
				t->stale++;
			}
		}
		if (signs && signs < next - begin)
			t->torn++;
		suspicious |= signs;
	}
	if (t->foreign || t->stale || t->torn)
		atomic_store(&t->stop, true);
	return suspicious;
}

/*
 * A WRITE that nobody proves: it lands in this page or in none. Only the last unit of a page
 * is written, so that the others still tell their versions.
 */
static int scribble(struct traffic *t, unsigned int page)
{
	struct rdma_np_region_info *info = &t->pair->info;
	struct np_end *peer = &t->pair->peer;
	size_t at = SCRIBBLE_AT + page * UNIT;
	uint64_t *words = (uint64_t *)(peer->buf + at);

	/* The same each time, so an earlier WRITE may still be under way. */
	for (unsigned int i = 0; i < UNIT_WORDS; i++)
		words[i] = word_make(page, LAST_VERSION, LAST_UNIT / 8 + i);
	return np_post(peer, IBV_WR_RDMA_WRITE, at, UNIT,
		       np_write_addr(info, offset_of(page) + LAST_UNIT), info->write_key, 0);
}

static void *reader_thread(void *arg)
{
	struct traffic *t = arg;
	struct np_end *peer = &t->pair->peer;
	struct rdma_np_region_info *info = &t->pair->info;
	unsigned int seed = 42;

	while (!atomic_load(&t->stop)) {
		struct read read[BATCH];
		struct ibv_wc wc;
		int ret = 0;

		for (int i = 0; i < BATCH && !ret; i++) {
			choose_read(t, &read[i], &seed);
			ret = post_read(t, &read[i], i * PAGE,
					i == BATCH - 1 ? IBV_SEND_SIGNALED : 0);
		}
		/* Behind the READs, which would push them to where they go. */
		for (int i = 0; i < BATCH && !ret; i++)
			ret = scribble(t, next_random(&seed) % PAGES);
		if (ret) {
			FAIL(t, ret);
			return NULL;
		}
		/* Completions are in order: the last one is all. */
		ret = np_poll(peer, &wc);
		if (ret) {
			FAIL(t, ret);
			return NULL;
		}
		t->reads += BATCH;
		t->writes += BATCH;
		atomic_fetch_add(&t->ops, BATCH);
		for (int i = 0; i < BATCH; i++) {
			struct rdma_np_event event;

			if (!judge(t, (uint64_t *)(peer->buf + i * PAGE), &read[i]))
				continue;
			t->suspicious++;
			/* Not always, so that absent pages are READ, too. */
			if (next_random(&seed) % 4)
				continue;
			t->faults++;
			ret = np_fault(peer, info->region_id, info->base + offset_of(0),
				       PAGES * PAGE, next_random(&seed) % 2 ? RDMA_NP_FAULT_WRITE : 0,
				       &event);
			if (ret == RDMA_NP_ADDRESS && may_be_unmapped(t->how)) {
				t->refused++;
			} else if (ret != RDMA_NP_OK) {
				FAIL(t, ret);
				return NULL;
			}
		}
	}
	return NULL;
}

/* What was proven is there. A WRITE that was given up may have landed all the same. */
static bool is_expected(const struct traffic *t, unsigned int page, unsigned int i, uint64_t word)
{
	return word == word_make(page, t->expected[page], i) ||
	       (t->open[page] && word == word_make(page, t->expected[page] + 1, i));
}

static void *writer_thread(void *arg)
{
	struct traffic *t = arg;
	struct np_end *peer = &t->pair->peer;
	struct rdma_np_region_info *info = &t->pair->info;
	uint64_t *data = (uint64_t *)(peer->buf + PAGE);
	unsigned int seed = 43;

	while (!atomic_load(&t->stop)) {
		unsigned int page = next_random(&seed) % PAGES;
		struct rdma_np_event event;
		uint64_t word;
		int ret;

		/* One fault for all of them is faster than one for each. */
		ret = np_word(peer, info, offset_of(page), &word);
		if (ret)
			goto fail;
		if (!np_writable(word)) {
			t->faults++;
			ret = np_fault(peer, info->region_id, info->base + offset_of(0),
				       PAGES * PAGE, RDMA_NP_FAULT_WRITE, &event);
			if (ret == RDMA_NP_ACCESS && may_be_read_only(t->how))
				t->refused++;
			else if (ret != RDMA_NP_OK)
				goto fail;
		}
		if (next_random(&seed) % 2) {
			page_fill(peer->buf, page, t->expected[page] + 1);
			peer->status = RDMA_NP_OK;
			ret = np_write_proven(peer, info, 0, offset_of(page), PAGE);
			if (ret == -EREMOTEIO && peer->status == RDMA_NP_ACCESS &&
			    may_be_read_only(t->how)) {
				/* Nothing was promised. */
				t->unproven++;
				t->open[page] = true;
			} else if (ret) {
				goto fail;
			} else {
				t->expected[page]++;
				t->open[page] = false;
			}
			t->writes++;
			atomic_fetch_add(&t->ops, 1);
		}
		ret = np_read_proven(peer, info, PAGE, offset_of(page), PAGE);
		if (ret)
			goto fail;
		t->reads++;
		atomic_fetch_add(&t->ops, 1);
		for (unsigned int i = 0; i < PAGE_WORDS; i++) {
			if (is_expected(t, page, i, data[i]))
				continue;
			if (!t->foreign++)
				t->foreign_word = data[i];
			atomic_store(&t->stop, true);
		}
		continue;
fail:
		FAIL(t, ret);
		return NULL;
	}
	return NULL;
}

/* --- putting it together ------------------------------------------------------------------ */

FIXTURE(traffic) {
	struct np_pair pair;
	struct traffic t;
	bool unkind;		/* knobs have to be turned back */
};

FIXTURE_VARIANT(traffic) {
	enum churn how;
	uint64_t delay_ns;
	uint64_t overlap;
	uint64_t request;
};

#define TRAFFIC(name, ...) FIXTURE_VARIANT_ADD(traffic, name) { __VA_ARGS__ }
TRAFFIC(dontneed, .how = CHURN_DONTNEED, .request = 512);
TRAFFIC(dontneed_slow, .how = CHURN_DONTNEED, .request = 512, .delay_ns = 1000);
TRAFFIC(dontneed_overlap, .how = CHURN_DONTNEED, .request = 512, .delay_ns = 200, .overlap = 1);
TRAFFIC(dontneed_units, .how = CHURN_DONTNEED, .request = 64, .delay_ns = 100, .overlap = 1);
TRAFFIC(remap, .how = CHURN_REMAP, .request = 512, .delay_ns = 200, .overlap = 1);
TRAFFIC(move, .how = CHURN_MOVE, .request = 512, .delay_ns = 200, .overlap = 1);
TRAFFIC(pageout, .how = CHURN_PAGEOUT, .request = 512);
TRAFFIC(pageout_overlap, .how = CHURN_PAGEOUT, .request = 128, .delay_ns = 200, .overlap = 1);
TRAFFIC(fork, .how = CHURN_FORK, .request = 512, .overlap = 1);
TRAFFIC(fork_slow, .how = CHURN_FORK, .request = 256, .delay_ns = 1000, .overlap = 1);
TRAFFIC(collapse, .how = CHURN_COLLAPSE, .request = 512, .overlap = 1);
TRAFFIC(protect, .how = CHURN_PROTECT, .request = 512, .delay_ns = 200, .overlap = 1);
TRAFFIC(compact, .how = CHURN_COMPACT, .request = 512, .overlap = 1);

static int set_hcas(uint64_t request, uint64_t delay_ns, uint64_t overlap)
{
	static const char *const dev[] = { NP_OWNER_DEV, NP_PEER_DEV };
	int ret = 0;

	for (int i = 0; i < 2 && !ret; i++) {
		ret = np_hca_set(dev[i], NP_HCA_DMA_REQUEST_SIZE, request);
		if (!ret)
			ret = np_hca_set(dev[i], NP_HCA_DMA_DELAY_NS, delay_ns);
		if (!ret)
			ret = np_hca_set(dev[i], NP_HCA_READ_OVERLAP, overlap);
	}
	return ret;
}

static const struct {
	const char *name;
	enum np_hca_register knob;
	uint64_t value;
} unkind[] = {
	{ "posted-writes", NP_HCA_POSTED_WRITES, 20000 },
	{ "ack-before-placement", NP_HCA_ACK_BEFORE_PLACEMENT, 1 },
	{ "out-of-order", NP_HCA_OUT_OF_ORDER, 20000 },
	{ "cut-from-start", NP_HCA_CUT_FROM_START, 1 },
	{ "random-fetch", NP_HCA_RANDOM_FETCH, 1 },
	{ "trailing-dma", NP_HCA_TRAILING_DMA, 1 },
};

#define NR_UNKIND (sizeof(unkind) / sizeof(unkind[0]))

/* Turns the knobs of both HCAs: bit n of @mask is unkind[n]. */
static int set_unkind(unsigned int mask)
{
	static const char *const dev[] = { NP_OWNER_DEV, NP_PEER_DEV };
	int ret = 0;

	for (unsigned int i = 0; i < 2 * NR_UNKIND && !ret; i++) {
		uint64_t is, value = mask >> i / 2 & 1 ? unkind[i / 2].value : 0;

		ret = np_hca_set(dev[i % 2], unkind[i / 2].knob, value);
		if (!ret)
			ret = np_hca_get(dev[i % 2], unkind[i / 2].knob, &is);
		if (!ret && is != value)
			ret = -EOPNOTSUPP;
	}
	return ret;
}

/* The knobs by the seed; 0: leave them. */
static unsigned int choose_unkind(char *text, size_t size)
{
	const char *given = getenv("NP_TRAFFIC_SEED");
	unsigned int seed, mask, state;

	if (given)
		seed = atol(given);
	else if (getrandom(&seed, sizeof(seed), 0) != sizeof(seed) || !seed)
		seed = 1;
	state = seed;
	mask = seed ? next_random(&state) >> 4 & ((1 << NR_UNKIND) - 1) : 0;
	snprintf(text, size, "NP_TRAFFIC_SEED=%u:", seed);
	for (unsigned int i = 0; i < NR_UNKIND; i++)
		if (mask >> i & 1)
			snprintf(text + strlen(text), size - strlen(text), " %s", unkind[i].name);
	return seed ? mask | 1 << NR_UNKIND : 0;
}

FIXTURE_SETUP(traffic)
{
	const char *words = getenv("NP_TRAFFIC_WORDS");
	const char *delay = getenv("NP_TRAFFIC_DELAY_NS");
	char text[200];
	unsigned int knobs = choose_unkind(text, sizeof(text));

	ASSERT_EQ(0, np_pair_open(&self->pair));
	/* As it is outside of tests. */
	ASSERT_EQ(0, np_set_fault_around(NP_FAULT_AROUND));
	ASSERT_EQ(0, np_pair_register(&self->pair, NP_RIGHTS));
	ASSERT_EQ(0, np_pair_resolve(&self->pair));
	self->t.pair = &self->pair;
	self->t.how = variant->how;
	self->t.whole = getenv("NP_TRAFFIC_WHOLE");
	if (knobs >> 2 & 1)
		self->pair.info.read_order = RDMA_NP_READ_OUT_OF_ORDER;
	if (words)
		self->pair.info.read_order = strcmp(words, "behind") ? RDMA_NP_READ_UNKNOWN :
								       RDMA_NP_READ_IN_ORDER;
	for (int i = 0; i < PAGES; i++) {
		page_fill(page_at(&self->t, i), i, 1);
		atomic_store(&self->t.minimum[i], 1);
		self->t.expected[i] = 1;
	}
	if (variant->how == CHURN_COLLAPSE) {
		ASSERT_EQ(0, madvise(self->pair.data, NP_DATA_LEN, MADV_HUGEPAGE));
	}
	if (variant->how == CHURN_PAGEOUT) {
		ASSERT_TRUE(np_disk_swap())
			TH_LOG("this variant needs swap on a disk");
	}
	ASSERT_EQ(0, set_hcas(variant->request, delay ? (uint64_t)atol(delay) : variant->delay_ns,
			      variant->overlap));
	if (getenv("NP_TRAFFIC_STALE_TLB")) {
		ASSERT_EQ(0, np_hca_set(NP_OWNER_DEV, NP_HCA_IGNORE_INVALIDATIONS, 1));
	}
	TH_LOG("%s", text);
	if (knobs) {
		self->unkind = true;
		ASSERT_EQ(0, set_unkind(knobs));
	}
}

FIXTURE_TEARDOWN_PARENT(traffic)
{
	EXPECT_EQ(0, set_hcas(512, 0, 0));
	/* What goes now needs it. */
	if (getenv("NP_TRAFFIC_STALE_TLB"))
		EXPECT_EQ(0, np_hca_set(NP_OWNER_DEV, NP_HCA_IGNORE_INVALIDATIONS, 0));
	if (self->unkind)
		EXPECT_EQ(0, set_unkind(0));
	NP_CHECK_USAGE(&self->pair.before);
}

/* Has there been traffic, and did it meet changes? */
static bool enough(struct traffic *t)
{
	enum churn how = t->how;

	if (atomic_load(&t->ops) < 100 ||
	    atomic_load(&t->churns) < (how == CHURN_COMPACT ? 3 : 30))
		return false;
	if (how < CHURN_PAGEOUT)
		return t->suspicious > 10 && t->faults > 10;
	if (how == CHURN_COLLAPSE && atomic_load(&t->huge) < 3)
		return false;
	if (how == CHURN_COMPACT && atomic_load(&t->moved) < 3)
		return false;
	return t->writes > t->unproven + 30 && t->faults > (how == CHURN_COMPACT ? 0 : 3);
}

TEST_F(traffic, reaches_the_right_page_or_none)
{
	const char *ms = getenv("NP_TRAFFIC_MS");
	uint64_t end = np_now_ms() + (ms ? atol(ms) : 4000), last = end + NP_WAIT_MS;
	bool drops = variant->how < CHURN_PAGEOUT;
	struct traffic *t = &self->t;
	pthread_t thread[3];

	ASSERT_EQ(0, pthread_create(&thread[0], NULL, drops ? reader_thread : writer_thread, t));
	ASSERT_EQ(0, pthread_create(&thread[1], NULL, churn_thread, t));
	ASSERT_EQ(0, pthread_create(&thread[2], NULL, poison_thread, t));
	while (!atomic_load(&t->stop) &&
	       (np_now_ms() < end || (!enough(t) && np_now_ms() < last)))
		np_pause();
	atomic_store(&t->stop, true);
	for (int i = 0; i < 3; i++) {
		ASSERT_EQ(0, pthread_join(thread[i], NULL));
	}

	TH_LOG("%lu READs, %lu WRITEs, words %s, %lu changes of memory, %lu suspicious READs, %lu faults, %lu of them refused, %lu WRITEs refused, %lu huge leaves seen, %lu pages moved",
	       t->reads, t->writes, t->pair->info.read_order == RDMA_NP_READ_IN_ORDER ? "behind" : "after",
	        atomic_load(&t->churns),
	       t->suspicious, t->faults, t->refused, t->unproven, atomic_load(&t->huge),
	       atomic_load(&t->moved));
	EXPECT_EQ(0, atomic_load(&t->failed))
		TH_LOG("line %d: error %d", atomic_load(&t->failed), atomic_load(&t->error));
	EXPECT_EQ(0, t->stale)
		TH_LOG("words of pages that were dropped before the READ");
	EXPECT_EQ(0, t->torn)
		TH_LOG("64-byte units that are partly signature");
	EXPECT_EQ(0, t->foreign)
		TH_LOG("words that are not of this page, e.g. %lx", (long)t->foreign_word);
	EXPECT_EQ(0, atomic_load(&t->intruders))
		TH_LOG("words that are not ours were written, e.g. %lx", (long)atomic_load(&t->intruder));
	/* Nothing happened is no success. */
	if (__test_passed(_metadata))
		EXPECT_TRUE(enough(t));
	if (!drops) {
		for (int p = 0; p < PAGES; p++) {
			uint64_t *data = (uint64_t *)page_at(t, p);

			for (unsigned int i = 0; i < PAGE_WORDS; i++) {
				ASSERT_TRUE(is_expected(t, p, i, data[i]))
					TH_LOG("page %d word %u: %lx", p, i, (long)data[i]);
			}
		}
	}
}

TEST_HARNESS_MAIN
