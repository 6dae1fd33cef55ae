// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of registration: what is refused, which devices do not serve,
 * addresses that are left for others, and the key that the application gets.
 */
#include <kunit/static_stub.h>
#include <kunit/test.h>
#include <linux/dma-mapping.h>
#include <linux/mman.h>

#include "np_region_fixture.h"

static void np_reg_check_refuses(struct kunit *test)
{
	struct np_test *t = test->priv;
	const u32 rw = NP_TEST_ACCESS;
	static const struct {
		u64 start;
		u64 length;
		u64 hca_va;
		u32 access;
		int ret;
	} cases[] = {
		{ 0x10000, 0x1000, 0x10000, 0, 0 },
		{ 0x10001, 1, 1, 0, 0 },
		{ 0x10000, 0, 0x10000, 0, -EINVAL },
		{ 0x10001, 0x1000, 0x10000, 0, -EINVAL },
		{ U64_MAX - 0xfff, 0x1000, 0, 0, -EINVAL },
		{ U64_MAX - 0xfff, 0x2000, 0, 0, -EINVAL },
		{ 0x10000, U64_MAX, 0x10000, 0, -EINVAL },
		/* The whole address space, which has no other addresses than its own */
		{ 0, U64_MAX, 0, 0, 0 },
		{ 0, U64_MAX, 0x1000, 0, -EINVAL },
		{ 0, U64_MAX - 1, 0, 0, -EINVAL },
		{ 0, U64_MAX, 0, IB_ACCESS_ON_DEMAND, -EOPNOTSUPP },
		{ 0x10000, 0x1000, U64_MAX - 0xfff, 0, 0 },
		{ 0x10000, 0x1001, U64_MAX - 0xfff, 0, -EINVAL },
		{ 0xffff888000000000, 0x1000, 0, 0, -EFAULT },
		{ 0x10000, 0x1000, 0x10000, IB_ACCESS_ON_DEMAND, -EOPNOTSUPP },
		{ 0x10000, 0x1000, 0x10000, IB_ACCESS_MW_BIND, -EOPNOTSUPP },
		{ 0x10000, 0x1000, 0x10000, IB_ZERO_BASED, -EOPNOTSUPP },
		{ 0x10000, 0x1000, 0x10000, IB_ACCESS_HUGETLB, -EOPNOTSUPP },
		{ 0x10000, 0x1000, 0x10000, IB_ACCESS_FLUSH_GLOBAL, -EOPNOTSUPP },
		{ 0x10000, 0x1000, 0x10000, IB_ACCESS_FLUSH_PERSISTENT, -EOPNOTSUPP },
		{ 0x10000, 0x1000, 0x10000, 1 << 11, -EINVAL },
		{ 0x10000, 0x1000, 0x10000, 1U << 31, -EINVAL },
	};
	unsigned int i;

	device_initialize(&t->ibdev->dev);
	for (i = 0; i < ARRAY_SIZE(cases); i++)
		KUNIT_EXPECT_EQ_MSG(test,
				    np_reg_check(t->ibdev, cases[i].start,
						 cases[i].length, cases[i].hca_va,
						 rw | cases[i].access),
				    cases[i].ret, "case %u", i);
	KUNIT_EXPECT_EQ(test, np_reg_check(t->ibdev, 0x10000, 1, 0x10000,
					   IB_ACCESS_REMOTE_WRITE |
					   IB_ACCESS_UNPINNED), -EINVAL);
}

/* Pinned memory and drivers need addresses, too */
static void np_regions_leave_a_quarter_of_the_addresses(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct device *dev = kunit_kzalloc(test, sizeof(*dev), GFP_KERNEL);
	struct iommu_domain *domain = &t->fake.domain;
	u64 mask = DMA_BIT_MASK(48);

	KUNIT_ASSERT_NOT_NULL(test, dev);
	dev->dma_mask = &mask;
	device_initialize(&t->ibdev->dev);
	t->ibdev->dma_device = dev;
	domain->geometry.aperture_end = SZ_1T - 1;
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SZ_1T, true),
			-ENOSPC);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SIZE_MAX, true),
			-ENOSPC);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SZ_1T / 2, true),
			0);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SZ_1T / 4, true),
			-ENOSPC);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain,
						  SZ_1T / 4 - NP_SLOT_SIZE, true), 0);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain,
						  NP_SLOT_SIZE, true), -ENOSPC);
	np_device_give_iova(domain, SZ_1T / 2);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SZ_1T / 2, true),
			0);
	np_device_give_iova(domain, SZ_1T / 2);
	np_device_give_iova(domain, SZ_1T / 4 - NP_SLOT_SIZE);

	/* What peers make of one owner's address space leaves an eighth of them to registrations */
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SZ_1T / 32 * 21, false),
			-ENOSPC);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain,
						  SZ_1T / 32 * 21 - NP_SLOT_SIZE, false), 0);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, NP_SLOT_SIZE, false),
			-ENOSPC);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SZ_1T / 32 * 3, true), 0);
	np_device_give_iova(domain, SZ_1T / 32 * 3);
	np_device_give_iova(domain, SZ_1T / 32 * 21 - NP_SLOT_SIZE);

	/* What the device cannot address is nobody's */
	mask = DMA_BIT_MASK(32);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain,
						  SZ_4G / 4 * 3, true), -ENOSPC);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SZ_4G / 2, true),
			0);
	np_device_give_iova(domain, SZ_4G / 2);
	t->ibdev->dma_device = NULL;
}

/* Without ACS in the bridges above, and two functions of a card may do the same */
static void np_devices_of_a_domain_share_its_addresses(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct device *dev = kunit_kzalloc(test, sizeof(*dev), GFP_KERNEL);
	struct ib_device *other = kunit_kzalloc(test, sizeof(*other), GFP_KERNEL);
	struct iommu_domain another = {
		.geometry.aperture_end = SZ_1T - 1,
	};
	u64 mask = DMA_BIT_MASK(48);

	KUNIT_ASSERT_NOT_NULL(test, dev);
	KUNIT_ASSERT_NOT_NULL(test, other);
	dev->dma_mask = &mask;
	device_initialize(&t->ibdev->dev);
	device_initialize(&other->dev);
	t->ibdev->dma_device = dev;
	other->dma_device = dev;
	t->fake.domain.geometry.aperture_end = SZ_1T - 1;
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, &t->fake.domain,
						  SZ_1T / 2, true), 0);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(other, &t->fake.domain,
						  SZ_1T / 2, true), -ENOSPC);
	/* Those of another domain are others */
	KUNIT_EXPECT_EQ(test, np_device_take_iova(other, &another, SZ_1T / 2, true),
			0);
	np_device_give_iova(&another, SZ_1T / 2);
	np_device_give_iova(&t->fake.domain, SZ_1T / 2);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(other, &t->fake.domain,
						  SZ_1T / 2, true), 0);
	np_device_give_iova(&t->fake.domain, SZ_1T / 2);
	t->ibdev->dma_device = NULL;
}

static void np_drivers_pin_or_are_refused(struct kunit *test)
{
	struct np_test *t = test->priv;

	KUNIT_EXPECT_EQ(test, PTR_ERR(ib_umem_get(t->ibdev, 0x10000, 0x1000,
						  NP_TEST_ACCESS)),
			-EOPNOTSUPP);
}

static struct iommu_domain *fake_dma_domain(struct device *dev,
					    const char **reason)
{
	struct np_test *t = kunit_get_current_test()->priv;

	*reason = NULL;
	return &t->fake.domain;
}

static struct np_device *fake_device_get(struct ib_device *ibdev)
{
	struct np_test *t = to_test(ibdev);

	refcount_inc(&t->npdev.users);
	return &t->npdev;
}

/* A device that registrations find good, and a place for them to map */
static void np_test_registrar(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct device *dev = kunit_kzalloc(test, sizeof(*dev), GFP_KERNEL);
	u64 *mask = kunit_kzalloc(test, sizeof(*mask), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, dev);
	KUNIT_ASSERT_NOT_NULL(test, mask);
	*mask = DMA_BIT_MASK(48);
	dev->dma_mask = mask;
	device_initialize(&t->ibdev->dev);
	t->ibdev->dma_device = dev;
	t->ibdev->kverbs_provider = 1;
	t->fake.domain.geometry.aperture_end = *mask;
	t->public_pd.device = t->ibdev;
	t->npdev.pd = &t->public_pd;
	kunit_activate_static_stub(test, np_dma_domain, fake_dma_domain);
	kunit_activate_static_stub(test, np_device_get, fake_device_get);
	np_test_map(test, PROT_READ | PROT_WRITE);
}

static struct ib_mr *np_test_register(struct np_test *t, u32 access)
{
	return np_reg_user_mr(&t->pd, t->va, NP_SLOT_SIZE, 0x1000, access);
}

/* As ib_dereg_mr_user() ends it */
static void np_test_deregister(struct ib_mr *mr)
{
	struct np_region *region = mr->np;

	np_mr_dereg_begin(mr);
	np_mr_dereg_end(region, mr, fake_dereg_mr(mr, NULL));
}

/* A name: no rights, in a PD without queue pairs */
static void np_public_key_gives_no_access(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct ib_mr *mr;

	np_test_registrar(test);
	KUNIT_EXPECT_EQ(test, np_device_check(t->ibdev), 0);
	mr = np_test_register(t, NP_TEST_ACCESS);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, mr);
	KUNIT_EXPECT_PTR_EQ(test, mr->pd, &t->public_pd);
	KUNIT_EXPECT_EQ(test, t->nr_keys, 1);
	KUNIT_EXPECT_EQ(test, t->keys[0]->access, 0);
	KUNIT_EXPECT_EQ(test, t->keys[0]->length, PAGE_SIZE);
	np_test_deregister(mr);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
}

/* As long as nobody uses it, it takes no more than a region of a page */
static void np_whole_address_space_is_registered(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct np_region *part;
	struct ib_sge sge = {};
	struct ib_mr *mr;
	bool ours;

	np_test_registrar(test);
	mr = np_reg_user_mr(&t->pd, 0, U64_MAX, 0, NP_TEST_ACCESS);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, mr);
	KUNIT_EXPECT_EQ(test, t->nr_keys, 1);
	KUNIT_EXPECT_EQ(test, t->keys[0]->access, 0);
	KUNIT_EXPECT_EQ(test, mr->np->iova_size, 3 * NP_SLOT_SIZE);
	KUNIT_EXPECT_EQ(test, mr->np->length, SIZE_MAX);

	/* Prefetching makes a part, and pages of it resident */
	sge.lkey = mr->lkey;
	sge.addr = t->va;
	sge.length = 3 * PAGE_SIZE;
	KUNIT_EXPECT_EQ(test, np_advise_mr(&t->pd, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0,
					   &sge, 1, &ours), 0);
	KUNIT_EXPECT_TRUE(test, ours);
	KUNIT_EXPECT_EQ(test, atomic64_read(&mr->np->count->writable), 3);
	part = np_region_at(mr->np, t->va);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, part);
	KUNIT_EXPECT_EQ(test, part->iova_size, np_window_size(0, NP_PART_SIZE, true) +
			np_window_size(0, NP_PART_SIZE, false));
	np_region_put(part);
	sge.addr = 0;
	KUNIT_EXPECT_EQ(test, np_advise_mr(&t->pd, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH, 0,
					   &sge, 1, &ours), -EFAULT);
	/* What is there, and that is nothing */
	KUNIT_EXPECT_EQ(test, np_advise_mr(&t->pd, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, 0,
					   &sge, 1, &ours), 0);

	np_test_deregister(mr);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
	KUNIT_EXPECT_TRUE(test, xa_empty(&t->fake.slots));
}

/* Above all RELAXED_ORDERING, which no key may have */
static void np_optional_access_bits_are_ignored(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct np_resolve out;
	struct ib_mr *mr;
	unsigned int i;
	int bit;

	np_test_registrar(test);
	for (bit = 20; bit <= 29; bit += 9) {
		t->nr_keys = 0;
		mr = np_test_register(t, NP_TEST_ACCESS | BIT(bit));
		KUNIT_ASSERT_NOT_ERR_OR_NULL(test, mr);
		KUNIT_ASSERT_EQ(test, np_region_resolve(mr->np, &out), 0);
		KUNIT_EXPECT_EQ(test, out.access, NP_TEST_ACCESS);
		KUNIT_EXPECT_EQ(test, t->nr_keys, 4);
		for (i = 0; i < t->nr_keys; i++)
			KUNIT_EXPECT_EQ(test, t->keys[i]->access &
					~NP_ACCESS_RIGHTS, 0);
		np_test_deregister(mr);
		KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	}
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_register(t, NP_TEST_ACCESS |
						       BIT(19))), -EINVAL);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_register(t, NP_TEST_ACCESS |
						       BIT(30))), -EINVAL);
}

/* Whatever is asked about the key meanwhile, and whoever else is given it */
static void np_region_that_cannot_be_destroyed_keeps_its_name(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct np_promise_user user = {};
	struct np_region *region;
	struct ib_mr *mr, *other;
	u32 rkey;

	np_test_registrar(test);
	mr = np_test_register(t, NP_TEST_ACCESS);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, mr);
	region = mr->np;
	rkey = mr->rkey;
	/* To who may not reach it */
	KUNIT_EXPECT_EQ(test, np_promise_none(t->ibdev, rkey, region, &user), -EACCES);

	np_mr_dereg_begin(mr);
	KUNIT_EXPECT_NULL(test, np_region_find_rkey(t->ibdev, rkey));
	KUNIT_EXPECT_EQ(test, np_promise_none(t->ibdev, rkey, NULL, &user), -ENXIO);
	KUNIT_EXPECT_EQ(test, np_promise_none(t->ibdev, rkey, region, &user), -ENXIO);
	/* The driver makes the same key once more, and then another one */
	t->nr_keys--;
	other = np_test_register(t, NP_TEST_ACCESS);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, other);
	KUNIT_EXPECT_NE(test, other->rkey, rkey);
	KUNIT_EXPECT_EQ(test, t->live_keys, 2);
	np_mr_dereg_end(region, mr, -EIO);

	KUNIT_EXPECT_FALSE(test, np_region_is_gone(region));
	KUNIT_EXPECT_PTR_EQ(test, np_region_find_rkey(t->ibdev, rkey), region);
	np_region_put(region);
	KUNIT_EXPECT_EQ(test, np_promise_none(t->ibdev, rkey, NULL, &user), -EAGAIN);

	np_test_deregister(other);
	np_test_deregister(mr);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_TRUE(test, xa_empty(&t->npdev.rkeys));
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
	KUNIT_EXPECT_EQ(test, np_promise_none(t->ibdev, rkey, NULL, &user), -EACCES);
}

static u32 np_test_tracked(struct np_test *t)
{
	return rdma_restrack_count(t->ibdev, RDMA_RESTRACK_MR, true);
}

/* An administrator sees what a region has of the device, as long as it has it */
static void np_keys_are_tracked_until_they_are_destroyed(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_grant grant = {};
	struct np_resolve out;
	u64 addr;
	u32 lkey;
	int i;

	KUNIT_EXPECT_EQ(test, np_test_tracked(t), 0);
	KUNIT_ASSERT_EQ(test, np_region_grant(region, &grant), 0);
	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &out), 0);
	KUNIT_ASSERT_EQ(test, np_region_local_key(region, true, region->base,
						  &addr, &lkey), 0);
	KUNIT_EXPECT_EQ(test, np_test_tracked(t), 4);
	for (i = 0; i < 4; i++) {
		KUNIT_EXPECT_PTR_EQ(test, t->keys[i]->mr.np, region);
		KUNIT_EXPECT_TRUE(test, rdma_is_kernel_res(&t->keys[i]->mr.res));
	}
	np_region_ungrant(&grant);
	KUNIT_EXPECT_EQ(test, np_test_tracked(t), 4);
	np_region_close(region);
	KUNIT_EXPECT_EQ(test, np_test_tracked(t), 0);
}

/* Nothing is made before the refusal, neither of ours nor of the driver's */
static void np_test_device_is_refused(struct kunit *test)
{
	struct np_test *t = test->priv;

	t->npdev.pd = NULL;
	KUNIT_EXPECT_EQ(test, np_device_check(t->ibdev), -EOPNOTSUPP);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_register(t, NP_TEST_ACCESS)),
			-EOPNOTSUPP);
	KUNIT_EXPECT_PTR_EQ(test, t->npdev.pd, NULL);
	KUNIT_EXPECT_PTR_EQ(test, t->pd.np, NULL);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
}

/* Its reg_user_mr() would be called for a peer, without udata and current->mm */
static void np_driver_that_does_not_opt_in_is_refused(struct kunit *test)
{
	struct np_test *t = test->priv;

	np_test_registrar(test);
	t->ibdev->ops.reg_umem_mr = NULL;
	np_test_device_is_refused(test);
}

/* Nobody could answer the peers of its regions */
static void np_device_without_kernel_verbs_is_refused(struct kunit *test)
{
	struct np_test *t = test->priv;

	np_test_registrar(test);
	t->ibdev->kverbs_provider = 0;
	np_test_device_is_refused(test);
}

static void np_device_without_iommu_is_refused(struct kunit *test)
{
	struct np_test *t = test->priv;

	device_initialize(&t->ibdev->dev);
	/* No dma_device, as rxe, siw and rdmavt */
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_device_domain(t->ibdev)), -EOPNOTSUPP);
}

static bool np_test_is_relaxed(struct ib_device *ibdev)
{
	return true;
}

/* Only who is sure says that READs are executed behind WRITEs (P1, P2) */
static void np_read_order_is_known_or_asked_for(struct kunit *test)
{
	struct np_test *t = test->priv;
	u8 *driver = &t->ibdev->attrs.read_order;
	unsigned int order;

	device_initialize(&t->ibdev->dev);
	KUNIT_EXPECT_EQ(test, np_read_order_of(&t->npdev, NP_READ_ORDER_AUTO),
			RDMA_NP_READ_UNKNOWN);
	for (order = 0; order < NP_READ_ORDER_AUTO; order++) {
		*driver = order;
		KUNIT_EXPECT_EQ(test, np_read_order_of(&t->npdev,
						       NP_READ_ORDER_AUTO), order);
	}
	KUNIT_EXPECT_FALSE(test, t->npdev.said_relaxed);

	/* PCIe may let a read pass a write before it: then the device cannot know */
	kunit_activate_static_stub(test, np_device_is_relaxed, np_test_is_relaxed);
	*driver = RDMA_NP_READ_IN_ORDER;
	KUNIT_EXPECT_EQ(test, np_read_order_of(&t->npdev, NP_READ_ORDER_AUTO),
			RDMA_NP_READ_UNKNOWN);
	KUNIT_EXPECT_TRUE(test, t->npdev.said_relaxed);
	*driver = RDMA_NP_READ_OUT_OF_ORDER;
	KUNIT_EXPECT_EQ(test, np_read_order_of(&t->npdev, NP_READ_ORDER_AUTO),
			RDMA_NP_READ_OUT_OF_ORDER);

	/* The administrator knows better than both */
	for (order = 0; order < NP_READ_ORDER_AUTO; order++)
		KUNIT_EXPECT_EQ(test, np_read_order_of(&t->npdev, order), order);
}

static void np_peers_are_told_the_read_order(struct kunit *test)
{
	struct np_region *region = np_test_region_at(test, 3, 1, NP_TEST_ACCESS);
	struct np_test *t = test->priv;
	struct np_resolve out = {};

	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &out), 0);
	KUNIT_EXPECT_EQ(test, out.read_order, np_device_read_order(&t->npdev));
	KUNIT_EXPECT_EQ(test, out.page_shift, PAGE_SHIFT);
	KUNIT_EXPECT_EQ(test, 1 << out.unit_shift, 64);
	t->ibdev->attrs.read_order = RDMA_NP_READ_OUT_OF_ORDER;
	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &out), 0);
	KUNIT_EXPECT_EQ(test, out.read_order, np_device_read_order(&t->npdev));
}

static struct kunit_case np_register_cases[] = {
	KUNIT_CASE(np_reg_check_refuses),
	KUNIT_CASE(np_regions_leave_a_quarter_of_the_addresses),
	KUNIT_CASE(np_devices_of_a_domain_share_its_addresses),
	KUNIT_CASE(np_drivers_pin_or_are_refused),
	KUNIT_CASE(np_public_key_gives_no_access),
	KUNIT_CASE(np_whole_address_space_is_registered),
	KUNIT_CASE(np_optional_access_bits_are_ignored),
	KUNIT_CASE(np_region_that_cannot_be_destroyed_keeps_its_name),
	KUNIT_CASE(np_keys_are_tracked_until_they_are_destroyed),
	KUNIT_CASE(np_driver_that_does_not_opt_in_is_refused),
	KUNIT_CASE(np_device_without_kernel_verbs_is_refused),
	KUNIT_CASE(np_device_without_iommu_is_refused),
	KUNIT_CASE(np_read_order_is_known_or_asked_for),
	KUNIT_CASE(np_peers_are_told_the_read_order),
	{}
};

static struct kunit_suite np_register_suite = {
	.name = "nprdma_region_register",
	.init = np_test_init,
	.test_cases = np_register_cases,
};

kunit_test_suite(np_register_suite);
