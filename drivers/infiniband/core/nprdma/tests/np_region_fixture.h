/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What unit tests of regions share: an IOMMU that is a fake and looks at each change
 * (np_region_fixture.c), regions on a driver whose keys are numbers, and peers of them
 * (np_region_peer.c).
 */
#ifndef NP_REGION_FIXTURE_H
#define NP_REGION_FIXTURE_H

#include <kunit/test.h>
#include <linux/iommu.h>
#include <linux/mm.h>
#include <linux/xarray.h>

#include "../np_hooks.h"
#include "../np_region.h"
#include "np_fake_peer.h"

struct fake_slot {
	u64 whole;	/* leaf of 2 MiB, if not split */
	u64 *leaf;	/* 512 leaves, if split */
};

struct fake_iommu {
	struct iommu_domain domain;
	struct kunit *test;
	struct np_region *region;
	struct xarray slots;
	dma_addr_t next_iova;
	unsigned int pending;	/* leaves changed, not yet invalidated */
	unsigned int changes;	/* leaves changed, ever */
	unsigned int syncs;
	unsigned int splits;
	unsigned int merges;
	unsigned int refused;	/* changes of leaves in slots that are not split */
	int split_error;
	int read_pages_error;
	void (*on_split)(struct fake_iommu *fake);
	unsigned int taken_away;	/* so often, by on_split */
	void (*on_merge)(struct fake_iommu *fake);
};

/* A key that the driver made */
struct fake_key {
	struct ib_mr mr;
	struct ib_umem *umem;
	u64 addr;
	u64 length;
	int access;
};

#define FAKE_KEYS	256	/* ever made */

struct fake_device {
	struct ib_device ibdev;
	struct rdma_restrack_root res[RDMA_RESTRACK_MAX];
	struct np_test *t;
};

struct np_test {
	struct fake_iommu fake;
	struct fake_key *keys[FAKE_KEYS];	/* NULL: destroyed */
	unsigned int nr_keys;	/* made */
	unsigned int live_keys;
	unsigned int fail_key;	/* this one, counted from 1 */
	bool keep_keys;		/* those that there are cannot be destroyed */
	void (*on_dereg)(struct np_test *t, const struct fake_key *key);
	struct np_device npdev;
	struct ib_device *ibdev;
	struct ib_pd pd;
	struct ib_pd public_pd;
	struct np_region *region;
	unsigned long va;	/* of the mapping, aligned to a slot */
};

static inline struct fake_iommu *to_fake(struct iommu_domain *domain)
{
	return container_of(domain, struct fake_iommu, domain);
}

static inline struct fake_slot *fake_slot(struct fake_iommu *fake, unsigned long iova)
{
	return xa_load(&fake->slots, iova >> NP_SLOT_SHIFT);
}

static inline u64 fake_leaf(struct fake_iommu *fake, unsigned long iova)
{
	struct fake_slot *slot = fake_slot(fake, iova);
	unsigned long offset = iova & (NP_SLOT_SIZE - 1);

	if (!slot)
		return 0;
	if (slot->leaf)
		return slot->leaf[offset >> PAGE_SHIFT];
	return slot->whole + (offset & PAGE_MASK);
}

static inline phys_addr_t fake_paddr(u64 leaf)
{
	return leaf & GENMASK_ULL(51, PAGE_SHIFT);
}

static inline struct np_test *to_test(struct ib_device *ibdev)
{
	return container_of(ibdev, struct fake_device, ibdev)->t;
}

#define NP_TEST_ACCESS (NP_ACCESS_RIGHTS | IB_ACCESS_UNPINNED)

struct np_test_peer {
	struct np_fake_peer fake;
	struct np_test *t;
	struct np_region *region;
	struct completion answered;
	struct np_msg answer;
	struct completion told;
	struct np_msg asked;	/* by us, when @told was completed */
	struct page *page;
	bool held;	/* when the QP was moved to the error state */
	u64 tid;
};

struct np_slot *np_test_slot(struct np_region *region, unsigned long va);
int fake_dereg_mr(struct ib_mr *mr, struct ib_udata *udata);
void np_test_close(struct np_test *t);
int np_test_init(struct kunit *test);
void np_test_map(struct kunit *test, int prot);
struct np_region *np_test_region_at(struct kunit *test, unsigned int first,
				    unsigned int npages, u32 access);
struct np_region *np_test_region(struct kunit *test, unsigned int npages);
int np_test_fault(struct np_region *region, unsigned int page,
		  unsigned int npages, unsigned int flags);
u64 np_word(struct np_region *region, unsigned int page);
u64 np_rights(struct np_region *region, unsigned int page);
u64 np_generation(struct np_region *region, unsigned int page);
struct page *np_page_at(struct kunit *test, unsigned long va);
void np_touch(struct kunit *test, unsigned long va, u64 value);
void np_test_unmap(struct np_test *t, unsigned int page, unsigned int npages);
void np_test_event(struct np_test *t, enum mmu_notifier_event event,
		   unsigned int page, unsigned int npages);
void np_test_invalidate(struct np_test *t, unsigned int page,
			unsigned int npages);
void np_test_settled(struct kunit *test);
phys_addr_t np_read_paddr(struct np_region *region, unsigned int page);
phys_addr_t np_write_paddr(struct np_region *region, unsigned int page);
void np_age_other_page(struct fake_iommu *fake);
bool np_test_ask(struct np_region *region, unsigned int page, bool clear);
void np_test_age(struct kunit *test, struct np_region *region,
		 unsigned int page);
struct np_hold *np_test_hold(struct kunit *test, struct np_region *region,
			     unsigned int page, unsigned int npages,
			     unsigned int flags);
void np_test_peer_exit(void *data);
struct np_test_peer *np_test_peer(struct kunit *test, struct ib_pd *pd);
const struct np_msg *np_test_asks(struct kunit *test, struct np_test_peer *peer,
				  struct np_msg *msg, u16 lid);
void np_test_refused(struct kunit *test, struct np_test_peer *peer,
		     struct np_msg *msg, u16 lid, u8 status);
void np_test_resolve(struct kunit *test, struct np_test_peer *peer, u32 rkey,
		     u16 lid, u8 status);
void np_test_forget(struct kunit *test, struct np_test_peer *peer, u64 id);
void np_test_release(struct kunit *test, struct np_test_peer *peer, u64 id,
		     u16 lid, u8 status);
struct np_msg np_test_fault_msg(struct np_region *region, u64 id,
				unsigned int flags);
void np_test_grant(struct kunit *test, struct np_test_peer *peer,
		   struct np_region *region);
struct np_region *np_test_more(struct kunit *test, struct ib_pd *pd,
			       u32 access);
void np_test_end(struct np_region *region);

#endif /* NP_REGION_FIXTURE_H */
