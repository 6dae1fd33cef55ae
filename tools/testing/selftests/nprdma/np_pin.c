// SPDX-License-Identifier: GPL-2.0
/*
 * Memory that cannot be pinned, or not where it is: it has to move before it can be held, or
 * is refused.
 */
#include <fcntl.h>
#include <sys/syscall.h>

#include "np_memory.h"

#ifndef SYS_memfd_secret
#define SYS_memfd_secret 447
#endif

/* --- holds in movable memory ------------------------------------------------------------ */

#define HOLDERS		3
#define HOLD_ROUNDS	200

struct holder {
	struct np_pair *pair;
	uint8_t *data;
	pthread_barrier_t *meet;
	pthread_t thread;
	int64_t failed;		/* the first error */
};

static void *hold_again_and_again(void *arg)
{
	struct holder *h = arg;

	for (int i = 0; i < HOLD_ROUNDS; i++) {
		struct rdma_np_hold_info info;
		int64_t hold;

		/* Pages that are brought in anew, for whom all memory is good enough. */
		if (pthread_barrier_wait(h->meet) == PTHREAD_BARRIER_SERIAL_THREAD) {
			madvise(h->data, 16 * PAGE, MADV_DONTNEED);
			memset(h->data, i, 16 * PAGE);
		}
		pthread_barrier_wait(h->meet);
		hold = np_hold(h->pair->mr, (uintptr_t)h->data, 16 * PAGE, RDMA_NP_FAULT_WRITE, &info);
		if (hold < 0)
			h->failed = h->failed ?: hold;
		else
			np_hold_free(h->pair->owner.ctx, hold);
	}
	return NULL;
}

/*
 * Memory that may go offline cannot be pinned: what is to be held has to move first,
 * and whoever else holds it at that moment keeps it from moving.
 */
TEST_F(memory, holds_that_meet_in_movable_memory_all_succeed)
{
	long moved = np_vmstat("pgmigrate_success");
	struct holder holder[HOLDERS];
	pthread_barrier_t meet;

	ASSERT_EQ(0, pthread_barrier_init(&meet, NULL, HOLDERS));
	for (int i = 0; i < HOLDERS; i++) {
		holder[i] = (struct holder){
			.pair = &self->pair, .data = self->data, .meet = &meet,
		};
		ASSERT_EQ(0, pthread_create(&holder[i].thread, NULL, hold_again_and_again,
					    &holder[i]));
	}
	for (int i = 0; i < HOLDERS; i++) {
		ASSERT_EQ(0, pthread_join(holder[i].thread, NULL));
		EXPECT_EQ(0, holder[i].failed);
	}
	/* There is such memory, and it was used. */
	EXPECT_LE(moved + HOLD_ROUNDS, np_vmstat("pgmigrate_success"));
}

/* --- what pinning refuses ---------------------------------------------------------------- */

/* Of a region of two pages of such memory, which nobody looked at until a peer asks. */
static void expect_refused(struct __test_metadata *_metadata, struct np_pair *pair,
			   struct ibv_mr *mr)
{
	const size_t len = 2 * PAGE;
	struct rdma_np_region_info info;
	struct rdma_np_hold_info local;
	struct rdma_np_mr_info usage;
	struct rdma_np_event event;

	ASSERT_EQ(0, np_resolve(&pair->peer, mr->rkey, &info));
	for (int i = 0; i < 8; i++) {
		size_t at = i & 4 ? PAGE : 0;
		uint64_t word = ~0ULL;

		EXPECT_EQ(RDMA_NP_ADDRESS, np_fault(&pair->peer, info.region_id, info.base + at, PAGE,
					       (i & 1 ? RDMA_NP_FAULT_WRITE : 0) |
					       (i & 2 ? RDMA_NP_FAULT_HOLD : 0), &event));
		ASSERT_EQ(0, np_word(&pair->peer, &info, at, &word));
		EXPECT_FALSE(np_readable(word));
		EXPECT_FALSE(np_writable(word));
	}
	EXPECT_EQ(-EFAULT, np_hold(mr, (uintptr_t)mr->addr, PAGE, 0, &local));
	EXPECT_EQ(-EFAULT, np_hold(mr, (uintptr_t)mr->addr, PAGE, RDMA_NP_FAULT_WRITE, &local));
	/* Who does not ask meets what stands in for it. */
	memset(pair->peer.buf, 2, len);
	ASSERT_EQ(0, np_write(&pair->peer, 0, len, np_write_addr(&info, 0), info.write_key));
	ASSERT_EQ(0, np_read(&pair->peer, 0, len, np_read_addr(&info, 0), info.read_key));
	EXPECT_TRUE(np_all(pair->peer.buf, len, info.signature));
	ASSERT_EQ(0, np_query_mr(mr, &usage));
	EXPECT_EQ(0, usage.resident_pages);
	EXPECT_EQ(0, usage.held_pages);
}

/* One such page in the place of one that peers had, and of which they have the neighbours. */
static void expect_refused_between(struct __test_metadata *_metadata, struct np_pair *pair,
				   size_t off)
{
	for (int write = 0; write < 2; write++) {
		const uint32_t flags = write ? RDMA_NP_FAULT_WRITE : 0;

		EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, PAGE, flags, NULL));
		EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(pair, off + PAGE, PAGE, flags, NULL));
		EXPECT_EQ(RDMA_NP_OK, np_pair_fault(pair, off + 2 * PAGE, PAGE, flags, NULL));
		EXPECT_EQ(RDMA_NP_ADDRESS, np_pair_fault(pair, off, 3 * PAGE, flags, NULL));
		EXPECT_FALSE(np_readable(np_pair_word(pair, off + PAGE)));
	}
	ASSERT_EQ(0, np_pair_write(pair, off + PAGE, PAGE));
	ASSERT_EQ(0, np_pair_read(pair, off, 3 * PAGE));
	EXPECT_EQ(-1, np_differs(pair->peer.buf, PAGE, FIRST_PAGE));
	EXPECT_TRUE(np_all(pair->peer.buf + PAGE, PAGE, pair->info.signature));
	EXPECT_EQ(-1, np_differs(pair->peer.buf + 2 * PAGE, PAGE, FIRST_PAGE + 2));
	EXPECT_EQ(IBV_QPS_RTS, np_qp_state(pair->peer.qp));
}

/* Not even the kernel has a mapping of it. A registration that pins finds out at once. */
TEST_F(memory, secret_memory_is_refused)
{
	const size_t len = 2 * PAGE, off = FIRST_PAGE * PAGE;
	struct np_pair *pair = &self->pair;
	struct ibv_sge sge;
	uint8_t *secret;
	struct ibv_mr *mr;
	int fd;

	fd = syscall(SYS_memfd_secret, O_CLOEXEC);
	ASSERT_LE(0, fd) TH_LOG("%s; CONFIG_SECRETMEM is needed", strerror(errno));
	ASSERT_EQ(0, ftruncate(fd, len));
	secret = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	ASSERT_NE(MAP_FAILED, secret) TH_LOG("%s", strerror(errno));
	/* One page is there, one is not. */
	np_fill(secret, PAGE, 1);
	EXPECT_EQ(NULL, ibv_reg_mr(pair->owner.pd, secret, PAGE, NP_RIGHTS));
	EXPECT_EQ(EFAULT, errno);
	mr = ibv_reg_mr(pair->owner.pd, secret, len, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	expect_refused(_metadata, pair, mr);
	EXPECT_EQ(-1, np_differs(secret, PAGE, 1));
	EXPECT_TRUE(np_all(secret + PAGE, PAGE, 0));

	ASSERT_EQ(0, np_set_fault_around(NP_FAULT_AROUND));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, 3 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(self->data + PAGE, mmap(self->data + PAGE, PAGE, PROT_READ | PROT_WRITE,
					  MAP_SHARED | MAP_FIXED, fd, 0));
	expect_refused_between(_metadata, pair, off);
	/* To advise what need not be done ends neither for it nor before what comes after it. */
	sge = (struct ibv_sge){ (uintptr_t)self->data, PAGES * PAGE, pair->mr->lkey };
	ASSERT_FALSE(np_readable(np_pair_word(pair, off + (PAGES - 1) * PAGE)));
	EXPECT_EQ(EFAULT, ibv_advise_mr(pair->owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH,
					IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
	EXPECT_EQ(0, ibv_advise_mr(pair->owner.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
				   IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
	EXPECT_TRUE(np_readable(np_pair_word(pair, off + (PAGES - 1) * PAGE)));
	EXPECT_EQ(-1, np_differs(secret, PAGE, 1));
}

/* Pages of the registers of the owner's HCA. */
static uint8_t *map_registers(void *at, size_t len)
{
	char path[100];
	void *p;
	int fd;

	snprintf(path, sizeof(path), "/sys/class/infiniband/%s/device/resource0", NP_OWNER_DEV);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return NULL;
	p = mmap(at, len, PROT_READ | PROT_WRITE, MAP_SHARED | (at ? MAP_FIXED : 0), fd, 0);
	close(fd);
	return p == MAP_FAILED ? NULL : p;
}

/* The owner's CPU reaches them; what a DMA there would do is another matter. */
TEST_F(memory, registers_of_a_device_are_refused)
{
	const size_t len = 2 * PAGE, off = FIRST_PAGE * PAGE;
	uint8_t *data = self->data, *registers;
	struct np_pair *pair = &self->pair;
	volatile uint64_t *version;
	struct ibv_mr *mr;
	uint64_t was;

	registers = map_registers(NULL, len);
	ASSERT_NE(NULL, registers) TH_LOG("%s", strerror(errno));
	/* Of the firmware, which nothing changes. */
	version = (volatile uint64_t *)registers;
	was = *version;
	EXPECT_EQ(NULL, ibv_reg_mr(pair->owner.pd, registers, len, NP_RIGHTS));
	EXPECT_EQ(EFAULT, errno);
	mr = ibv_reg_mr(pair->owner.pd, registers, len, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	expect_refused(_metadata, pair, mr);
	EXPECT_EQ(was, *version);

	ASSERT_EQ(0, np_set_fault_around(NP_FAULT_AROUND));
	ASSERT_EQ(RDMA_NP_OK, np_pair_fault(pair, off, 3 * PAGE, RDMA_NP_FAULT_WRITE, NULL));
	ASSERT_EQ(data + PAGE, map_registers(data + PAGE, PAGE));
	expect_refused_between(_metadata, pair, off);
	EXPECT_EQ(was, *version);
	/* And it goes as it came. */
	ASSERT_EQ(data + PAGE, mmap(data + PAGE, PAGE, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
	ASSERT_EQ(0, np_read_proven(&pair->peer, &pair->info, 0, off, 3 * PAGE));
	EXPECT_TRUE(np_all(pair->peer.buf + PAGE, PAGE, 0));
}

TEST_HARNESS_MAIN
