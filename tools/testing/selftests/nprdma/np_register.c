// SPDX-License-Identifier: GPL-2.0
/*
 * Registration of unpinned regions: what is refused, with which error, and what
 * a registration that succeeds must not do: pin, charge, touch.
 */
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/time.h>

#include "np_harness.h"

#ifndef IBV_ACCESS_FLUSH_GLOBAL
#define IBV_ACCESS_FLUSH_GLOBAL (1 << 8)
#endif

FIXTURE(registration) {
	struct np_usage before;
	struct np_end end;
	uint8_t *data;
};

FIXTURE_SETUP(registration)
{
	ASSERT_EQ(0, np_usage_start(&self->before));
	ASSERT_EQ(0, np_open(&self->end, NP_OWNER_DEV, 0));
	self->data = np_map(NP_DATA_LEN);
	ASSERT_NE(NULL, self->data);
}

FIXTURE_TEARDOWN_PARENT(registration)
{
	NP_CHECK_USAGE(&self->before);
}

/* errno of a registration, 0 if it succeeded. */
static int np_try(struct np_end *end, const void *addr, size_t len, uint64_t iova, int access)
{
	struct ibv_mr *mr;

	errno = 0;
	mr = ibv_reg_mr_iova2(end->pd, (void *)addr, len, iova, access);
	if (!mr)
		return errno ? errno : -1;
	return ibv_dereg_mr(mr);
}

/* --- refusals ----------------------------------------------------------------- */

FIXTURE(refused_flags) {
	struct np_usage before;
	struct np_end end;
	uint8_t *data;
};

FIXTURE_VARIANT(refused_flags) {
	unsigned int access;
	int error;
};

#define REFUSED(name, flags, err)					\
	FIXTURE_VARIANT_ADD(refused_flags, name) {			\
		.access = (flags), .error = (err),			\
	}
REFUSED(on_demand, IBV_ACCESS_ON_DEMAND, EOPNOTSUPP);
REFUSED(memory_window, IBV_ACCESS_MW_BIND, EOPNOTSUPP);
REFUSED(zero_based, IBV_ACCESS_ZERO_BASED, EOPNOTSUPP);
REFUSED(hugetlb, IBV_ACCESS_HUGETLB, EOPNOTSUPP);
REFUSED(flush, IBV_ACCESS_FLUSH_GLOBAL, EOPNOTSUPP);
REFUSED(bit_11, 1 << 11, EINVAL);
REFUSED(bit_12, 1 << 12, EINVAL);
REFUSED(bit_13, 1 << 13, EINVAL);
REFUSED(bit_14, 1 << 14, EINVAL);
REFUSED(bit_15, 1 << 15, EINVAL);
REFUSED(bit_16, 1 << 16, EINVAL);
REFUSED(bit_17, 1 << 17, EINVAL);
REFUSED(bit_18, 1 << 18, EINVAL);
REFUSED(bit_19, 1 << 19, EINVAL);
REFUSED(bit_30, 1U << 30, EINVAL);
REFUSED(bit_31, 1U << 31, EINVAL);

FIXTURE_SETUP(refused_flags)
{
	ASSERT_EQ(0, np_usage_start(&self->before));
	ASSERT_EQ(0, np_open(&self->end, NP_OWNER_DEV, 0));
	self->data = np_map(NP_DATA_LEN);
	ASSERT_NE(NULL, self->data);
}

FIXTURE_TEARDOWN_PARENT(refused_flags)
{
	NP_CHECK_USAGE(&self->before);
}

TEST_F(refused_flags, registration_says_why)
{
	EXPECT_EQ(variant->error, np_try(&self->end, self->data, PAGE, (uintptr_t)self->data,
					 NP_RIGHTS | NP_UNPINNED | variant->access));
	/* The device is none the worse for it. */
	EXPECT_EQ(0, np_try(&self->end, self->data, PAGE, (uintptr_t)self->data,
			    NP_RIGHTS | NP_UNPINNED));
}

/* They are leave to do something, not a wish: whoever does not know one ignores it. */
TEST_F(registration, optional_access_bits_are_ignored)
{
	int bit;

	EXPECT_EQ(0, np_try(&self->end, self->data, PAGE, (uintptr_t)self->data,
			    NP_RIGHTS | NP_UNPINNED | IBV_ACCESS_RELAXED_ORDERING));
	for (bit = 20; bit <= 29; bit++)
		EXPECT_EQ(0, np_try(&self->end, self->data, PAGE, (uintptr_t)self->data,
				    NP_RIGHTS | NP_UNPINNED | 1 << bit))
			TH_LOG("bit %d", bit);
}

TEST_F(registration, remote_write_needs_local_write)
{
	EXPECT_EQ(EINVAL, np_try(&self->end, self->data, PAGE, (uintptr_t)self->data,
				 IBV_ACCESS_REMOTE_WRITE | NP_UNPINNED));
	EXPECT_EQ(EINVAL, np_try(&self->end, self->data, PAGE, (uintptr_t)self->data,
				 IBV_ACCESS_REMOTE_ATOMIC | NP_UNPINNED));
}

TEST_F(registration, empty_range_is_refused)
{
	EXPECT_EQ(EINVAL, np_try(&self->end, self->data, 0, (uintptr_t)self->data,
				 NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(0, np_try(&self->end, self->data, 1, (uintptr_t)self->data,
			    NP_RIGHTS | NP_UNPINNED));
}

TEST_F(registration, wrapping_range_is_refused)
{
	const uint64_t top = -PAGE;

	EXPECT_EQ(EINVAL, np_try(&self->end, (void *)top, PAGE, top, NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(EINVAL, np_try(&self->end, (void *)top, PAGE + 1, top,
				 NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(EINVAL, np_try(&self->end, self->data, -(uintptr_t)self->data,
				 (uintptr_t)self->data, NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(EINVAL, np_try(&self->end, self->data, SIZE_MAX - 1, (uintptr_t)self->data,
				 NP_RIGHTS | NP_UNPINNED));
}

TEST_F(registration, kernel_addresses_are_refused)
{
	const uint64_t kernel = 0xffff888000000000ULL;
	const uint64_t user_end = 0x7ffffffff000ULL;

	EXPECT_EQ(EFAULT, np_try(&self->end, (void *)kernel, PAGE, kernel,
				 NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(EFAULT, np_try(&self->end, (void *)(user_end - PAGE), 2 * PAGE, user_end - PAGE,
				 NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(EFAULT, np_try(&self->end, self->data, kernel - (uintptr_t)self->data,
				 (uintptr_t)self->data, NP_RIGHTS | NP_UNPINNED));
}

TEST_F(registration, iova_of_another_page_offset_is_refused)
{
	EXPECT_EQ(EINVAL, np_try(&self->end, self->data + 8, PAGE, 0, NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(0, np_try(&self->end, self->data + 8, PAGE, 8, NP_RIGHTS | NP_UNPINNED));
}

TEST_F(registration, wrapping_iova_is_refused)
{
	EXPECT_EQ(EINVAL, np_try(&self->end, self->data, 2 * PAGE, -PAGE,
				 NP_RIGHTS | NP_UNPINNED));
}

TEST_F(registration, dmabuf_regions_cannot_be_unpinned)
{
	/* The control: without the flag it is the descriptor that is wrong. */
	errno = 0;
	EXPECT_EQ(NULL, ibv_reg_dmabuf_mr(self->end.pd, 0, PAGE, 0, -1, IBV_ACCESS_LOCAL_WRITE));
	EXPECT_EQ(EBADF, errno);
	errno = 0;
	EXPECT_EQ(NULL, ibv_reg_dmabuf_mr(self->end.pd, 0, PAGE, 0, -1,
					  IBV_ACCESS_LOCAL_WRITE | NP_UNPINNED));
	EXPECT_TRUE(errno == EINVAL || errno == EOPNOTSUPP)
		TH_LOG("%s", strerror(errno));
}

TEST_F(registration, unpinned_region_cannot_be_reregistered)
{
	struct rdma_np_mr_info info;
	struct ibv_mr *mr;

	mr = ibv_reg_mr(self->end.pd, self->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	errno = 0;
	EXPECT_NE(0, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, NP_RIGHTS));
	EXPECT_EQ(EOPNOTSUPP, errno);
	errno = 0;
	EXPECT_NE(0, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0,
				  NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(EOPNOTSUPP, errno);
	errno = 0;
	EXPECT_NE(0, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, self->data, PAGE, 0));
	EXPECT_EQ(EOPNOTSUPP, errno);
	errno = 0;
	EXPECT_NE(0, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, self->end.pd, NULL, 0, 0));
	EXPECT_EQ(EOPNOTSUPP, errno);
	/* It is what it was. */
	ASSERT_EQ(0, np_query_mr(mr, &info));
	EXPECT_EQ(NP_DATA_LEN, info.length);
	EXPECT_EQ(0, ibv_dereg_mr(mr));
}

TEST_F(registration, pinned_region_cannot_become_unpinned)
{
	struct rdma_np_mr_info info;
	struct ibv_mr *mr;

	mr = ibv_reg_mr(self->end.pd, self->data, PAGE, NP_RIGHTS);
	ASSERT_NE(NULL, mr);
	errno = 0;
	EXPECT_NE(0, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0,
				  NP_RIGHTS | NP_UNPINNED));
	EXPECT_EQ(EOPNOTSUPP, errno);
	EXPECT_EQ(-EINVAL, np_query_mr(mr, &info));
	EXPECT_EQ(0, ibv_dereg_mr(mr));
}

/* libnprdma refuses to bind it; what plain verbs bind is of no use: the key is of another PD. */
TEST_F(registration, memory_window_does_not_show_it)
{
	struct ibv_mw_bind bind = {
		.bind_info = {
			.addr = (uintptr_t)self->data,
			.length = PAGE,
			.mw_access_flags = IBV_ACCESS_REMOTE_READ,
		},
		.send_flags = IBV_SEND_SIGNALED,
	};
	struct np_end peer;
	struct ibv_mw *mw;
	struct ibv_wc wc;

	self->data[0] = 1;
	ASSERT_EQ(0, np_open(&peer, NP_PEER_DEV, PAGE));
	for (int unpinned = 0; unpinned < 2; unpinned++) {
		ASSERT_EQ(0, np_reconnect(&self->end, &peer));
		mw = ibv_alloc_mw(self->end.pd, IBV_MW_TYPE_1);
		ASSERT_NE(NULL, mw);
		bind.bind_info.mr = ibv_reg_mr(self->end.pd, self->data, PAGE, unpinned ?
					       NP_RIGHTS | NP_UNPINNED : NP_RIGHTS |
					       IBV_ACCESS_MW_BIND);
		ASSERT_NE(NULL, bind.bind_info.mr);
		ASSERT_EQ(0, ibv_bind_mw(self->end.qp, mw, &bind));
		ASSERT_EQ(0, np_poll(&self->end, &wc));
		memset(peer.buf, 2, PAGE);
		EXPECT_EQ(unpinned ? IBV_WC_REM_ACCESS_ERR : IBV_WC_SUCCESS,
			  np_read(&peer, 0, PAGE, (uintptr_t)self->data, mw->rkey));
		EXPECT_EQ(unpinned ? 2 : 1, peer.buf[0]);
		ASSERT_EQ(0, ibv_dealloc_mw(mw));
		ASSERT_EQ(0, ibv_dereg_mr(bind.bind_info.mr));
	}
}

/* --- what a registration is --------------------------------------------------- */

TEST_F(registration, query_tells_the_bounds)
{
	struct rdma_np_query query;

	ASSERT_EQ(0, np_query(self->end.ctx, &query));
	EXPECT_EQ(RDMA_NP_ABI_VERSION, query.abi_version);
	EXPECT_EQ(RDMA_NP_QUERY_OWNER, query.flags);
	EXPECT_EQ(RDMA_NP_MAX_RANGES, query.max_ranges);
	EXPECT_EQ(RDMA_NP_MAX_PAGES, query.max_pages);
	EXPECT_LT(0, query.max_outstanding);
	EXPECT_EQ(0, query.reserved);
}

TEST_F(registration, pins_charges_and_touches_nothing)
{
	long rss = np_status_kb("VmRSS"), pins;
	struct rdma_np_mr_info info;
	struct ibv_mr *mr;

	pins = np_vmstat("nr_foll_pin_acquired");
	mr = ibv_reg_mr(self->end.pd, self->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	EXPECT_EQ(mr->lkey, mr->rkey);
	/* The CQ's and QP's own buffers are there before. */
	EXPECT_EQ(pins, np_vmstat("nr_foll_pin_acquired"));
	EXPECT_GT(rss + 256, np_status_kb("VmRSS"));
	for (size_t i = 0; i < NP_DATA_LEN; i += PAGE) {
		ASSERT_FALSE(np_present(self->data + i));
	}
	ASSERT_EQ(0, np_query_mr(mr, &info));
	EXPECT_EQ((uintptr_t)self->data, info.base);
	EXPECT_EQ(NP_DATA_LEN, info.length);
	EXPECT_EQ(NP_UNPINNED, info.access & NP_UNPINNED);
	EXPECT_EQ(0, info.resident_pages);
	EXPECT_EQ(0, info.table_pages);
	EXPECT_EQ(0, ibv_dereg_mr(mr));
}

TEST_F(registration, ids_are_not_used_again)
{
	uint64_t last = 0;

	for (int i = 0; i < 10; i++) {
		struct rdma_np_mr_info info;
		struct ibv_mr *mr;

		mr = ibv_reg_mr(self->end.pd, self->data, PAGE, NP_RIGHTS | NP_UNPINNED);
		ASSERT_NE(NULL, mr);
		ASSERT_EQ(0, np_query_mr(mr, &info));
		EXPECT_LT(last, info.region_id);
		last = info.region_id;
		ASSERT_EQ(0, ibv_dereg_mr(mr));
	}
}

TEST_F(registration, needs_neither_privilege_nor_memlock)
{
	struct rlimit limit = { .rlim_cur = 64 << 10, .rlim_max = 64 << 10 };
	struct ibv_mr *mr;

	ASSERT_EQ(0, setrlimit(RLIMIT_MEMLOCK, &limit));
	ASSERT_EQ(0, setresgid(65534, 65534, 65534));
	ASSERT_EQ(0, setresuid(65534, 65534, 65534));
	/* The control: the limit does bite. */
	errno = 0;
	EXPECT_EQ(NULL, ibv_reg_mr(self->end.pd, self->data, NP_DATA_LEN, NP_RIGHTS));
	EXPECT_EQ(ENOMEM, errno);
	mr = ibv_reg_mr(self->end.pd, self->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	EXPECT_EQ(0, ibv_dereg_mr(mr));
}

TEST_F(registration, many_regions_of_one_buffer_coexist)
{
	struct ibv_mr *mr[64];

	for (int i = 0; i < 64; i++) {
		mr[i] = ibv_reg_mr(self->end.pd, self->data + i * 8, NP_DATA_LEN - i * 16,
				   NP_RIGHTS | NP_UNPINNED);
		ASSERT_NE(NULL, mr[i]);
		for (int k = 0; k < i; k++) {
			ASSERT_NE(mr[k]->rkey, mr[i]->rkey);
		}
	}
	for (int i = 0; i < 64; i++) {
		EXPECT_EQ(0, ibv_dereg_mr(mr[i]));
	}
}

/* Without FLUSH the kernel may do it later; for unpinned regions it never does. */
static const uint32_t advice_flags[] = { IBV_ADVISE_MR_FLAG_FLUSH, 0 };

TEST_F(registration, advice_makes_pages_resident)
{
	struct ibv_sge sge = { .length = 16 * PAGE };
	struct rdma_np_mr_info info;
	struct ibv_mr *mr;

	np_fill(self->data, NP_DATA_LEN, 1);
	for (size_t i = 0; i < ARRAY_SIZE(advice_flags); i++) {
		mr = ibv_reg_mr(self->end.pd, self->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
		ASSERT_NE(NULL, mr);
		sge.addr = (uintptr_t)self->data + PAGE;
		sge.lkey = mr->lkey;
		ASSERT_EQ(0, ibv_advise_mr(self->end.pd, IBV_ADVISE_MR_ADVICE_PREFETCH,
					   advice_flags[i], &sge, 1));
		ASSERT_EQ(0, np_query_mr(mr, &info));
		EXPECT_EQ(16, info.resident_pages);
		EXPECT_EQ(0, info.writable_pages);
		ASSERT_EQ(0, ibv_advise_mr(self->end.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
					   advice_flags[i], &sge, 1));
		ASSERT_EQ(0, np_query_mr(mr, &info));
		EXPECT_EQ(16, info.resident_pages);
		EXPECT_EQ(16, info.writable_pages);
		EXPECT_EQ(0, ibv_dereg_mr(mr));
	}
}

TEST_F(registration, advice_without_faults_takes_what_is_there)
{
	struct ibv_sge sge = { (uintptr_t)self->data, 16 * PAGE };
	struct rdma_np_mr_info info;
	struct ibv_mr *mr;

	np_fill(self->data, 16 * PAGE, 1);
	ASSERT_EQ(0, madvise(self->data, 16 * PAGE, MADV_DONTNEED));
	np_fill(self->data + 7 * PAGE, PAGE, 1);
	for (size_t i = 0; i < ARRAY_SIZE(advice_flags); i++) {
		mr = ibv_reg_mr(self->end.pd, self->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
		ASSERT_NE(NULL, mr);
		sge.lkey = mr->lkey;
		ASSERT_EQ(0, ibv_advise_mr(self->end.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
					   advice_flags[i], &sge, 1));
		ASSERT_EQ(0, np_query_mr(mr, &info));
		EXPECT_EQ(1, info.resident_pages);
		EXPECT_EQ(0, ibv_dereg_mr(mr));
	}
}

TEST_F(registration, advice_that_fails_says_so)
{
	struct ibv_sge sge = { (uintptr_t)self->data, PAGE };
	struct rdma_np_mr_info info;
	struct ibv_mr *mr;

	np_fill(self->data, PAGE, 1);
	mr = ibv_reg_mr(self->end.pd, self->data, HUGE_PAGE, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr);
	sge.lkey = mr->lkey;
	/* Flags that are not known. */
	for (unsigned int bit = 1; bit < 32; bit++) {
		EXPECT_EQ(EINVAL, ibv_advise_mr(self->end.pd, IBV_ADVISE_MR_ADVICE_PREFETCH,
						1U << bit | IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
	}
	ASSERT_EQ(0, np_query_mr(mr, &info));
	EXPECT_EQ(0, info.resident_pages);
	/* Nobody hears later that nothing is mapped there. */
	ASSERT_EQ(0, munmap(self->data, PAGE));
	for (size_t i = 0; i < ARRAY_SIZE(advice_flags); i++) {
		EXPECT_EQ(EFAULT, ibv_advise_mr(self->end.pd, IBV_ADVISE_MR_ADVICE_PREFETCH,
						advice_flags[i], &sge, 1));
	}
	EXPECT_EQ(0, ibv_dereg_mr(mr));
}

TEST_F(registration, advice_is_for_regions_of_the_pd_and_of_one_sort)
{
	struct ibv_pd *pd = ibv_alloc_pd(self->end.pd->context);
	struct ibv_mr *mr, *pinned;
	struct rdma_np_mr_info info;
	struct ibv_sge sge[2];

	ASSERT_NE(NULL, pd);
	mr = ibv_reg_mr(self->end.pd, self->data, NP_DATA_LEN, NP_RIGHTS | NP_UNPINNED);
	pinned = ibv_reg_mr(self->end.pd, self->data, PAGE, NP_RIGHTS);
	ASSERT_NE(NULL, mr);
	ASSERT_NE(NULL, pinned);
	for (int i = 0; i < 2; i++)
		sge[i] = (struct ibv_sge){ (uintptr_t)self->data, PAGE,
					   i ? pinned->lkey : mr->lkey };
	EXPECT_EQ(EPERM, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH,
				       IBV_ADVISE_MR_FLAG_FLUSH, sge, 1));
	ASSERT_EQ(0, np_query_mr(mr, &info));
	EXPECT_EQ(0, info.resident_pages);
	EXPECT_EQ(EINVAL, ibv_advise_mr(self->end.pd, IBV_ADVISE_MR_ADVICE_PREFETCH,
					IBV_ADVISE_MR_FLAG_FLUSH, sge, 2));
	EXPECT_EQ(0, ibv_dereg_mr(pinned));
	EXPECT_EQ(0, ibv_dereg_mr(mr));
	EXPECT_EQ(0, ibv_dealloc_pd(pd));
}

/* --- size ------------------------------------------------------------------------ */

FIXTURE(size) {
	struct np_usage before;
	struct np_end end;
};

FIXTURE_VARIANT(size) {
	size_t len;
};

FIXTURE_VARIANT_ADD(size, three_times_the_memory) { .len = 0 };
FIXTURE_VARIANT_ADD(size, one_page) { .len = PAGE };
FIXTURE_VARIANT_ADD(size, slot_minus_1) { .len = HUGE_PAGE - 1 };
FIXTURE_VARIANT_ADD(size, slot) { .len = HUGE_PAGE };
FIXTURE_VARIANT_ADD(size, slot_plus_1) { .len = HUGE_PAGE + 1 };
FIXTURE_VARIANT_ADD(size, gib_minus_1) { .len = (1UL << 30) - 1 };
FIXTURE_VARIANT_ADD(size, gib_plus_1) { .len = (1UL << 30) + 1 };
FIXTURE_VARIANT_ADD(size, beyond_4_gib) { .len = (5UL << 30) + 12345 };
FIXTURE_VARIANT_ADD(size, gib_256) { .len = 256UL << 30 };

FIXTURE_SETUP(size)
{
	ASSERT_EQ(0, np_usage_start(&self->before));
	ASSERT_EQ(0, np_open(&self->end, NP_OWNER_DEV, 0));
}

FIXTURE_TEARDOWN_PARENT(size)
{
	NP_CHECK_USAGE(&self->before);
}

TEST_F(size, registers_at_the_cost_of_page_tables_only)
{
	size_t len = variant->len ? variant->len : np_meminfo_kb("MemTotal") * 3 << 10;
	long before, after;
	struct ibv_mr *mr;
	uint8_t *data;

	data = np_map((len + HUGE_PAGE) & -HUGE_PAGE);
	ASSERT_NE(NULL, data);
	before = np_meminfo_kb("MemAvailable");
	mr = ibv_reg_mr(self->end.pd, data + 8, len - 8, NP_RIGHTS | NP_UNPINNED);
	ASSERT_NE(NULL, mr) TH_LOG("%s", strerror(errno));
	after = np_meminfo_kb("MemAvailable");
	/*
	 * A leaf of 8 bytes in two windows for each 2 MiB, that is 2 MiB for
	 * 256 GiB; the rest is room for what else the machine does.
	 */
	EXPECT_GT(16 << 10, before - after);
	EXPECT_EQ(0, ibv_dereg_mr(mr));
}

/* --- signals ---------------------------------------------------------------------- */

#define SIGNALS_TOO_MANY 5000

static atomic_int signals_seen;

static void see_signal(int number)
{
	const struct itimerval none = {};

	/* By then, who begins anew for each of them will never end. */
	if (atomic_fetch_add(&signals_seen, 1) == SIGNALS_TOO_MANY)
		setitimer(ITIMER_REAL, &none, NULL);
}

/* A profiler's timer. To lock all mappings takes longer than from one signal to the next. */
TEST_F(registration, ends_while_signals_come_all_the_time)
{
	const struct itimerval often = { { 0, 1000 }, { 0, 1000 } }, none = {};
	const struct sigaction action = { .sa_handler = see_signal, .sa_flags = SA_RESTART };
	const size_t len = 256UL << 30, mappings = 60000;
	const uint64_t enough = np_now_ms() + 30000;
	uint8_t *data = np_map(len);
	struct ibv_mr *mr;

	ASSERT_NE(NULL, data);
	/* Every page of the first ones is a mapping of its own. Where that takes long, so do locks. */
	for (size_t i = 0; i < mappings && np_now_ms() < enough; i += 2)
		ASSERT_EQ(0, mprotect(data + i * PAGE, PAGE, PROT_READ));
	ASSERT_EQ(0, sigaction(SIGALRM, &action, NULL));
	ASSERT_EQ(0, setitimer(ITIMER_REAL, &often, NULL));
	mr = ibv_reg_mr(self->end.pd, data, len, NP_RIGHTS | NP_UNPINNED);
	EXPECT_EQ(0, setitimer(ITIMER_REAL, &none, NULL));
	ASSERT_NE(NULL, mr) TH_LOG("%s", strerror(errno));
	/* It did come while that went on. */
	EXPECT_LT(0, atomic_load(&signals_seen));
	EXPECT_GT(SIGNALS_TOO_MANY, atomic_load(&signals_seen));
	EXPECT_EQ(0, ibv_dereg_mr(mr));
}

TEST_HARNESS_MAIN
