// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of regions and residency, of their keys, and of what peers get
 * of them.
 *
 * The regions are real, and so is the memory: an address space of the test's own,
 * HMM, notifiers, pins.  The driver makes keys that are numbers, and the peers are
 * those of np_fake_peer.h.  The IOMMU is a fake that keeps its leaves in memory
 * and looks, each time that one changes, at everything that the design promises
 * for that moment:
 *
 *  - a leaf that changes was present before (I2);
 *  - a leaf is pointed at a page while the word does not grant the right yet, and
 *    the word grants it only after an invalidation;
 *  - a leaf is taken from a page only when the word does not grant the right any
 *    more, and an invalidation follows before anybody goes on.
 */
#include <kunit/static_stub.h>
#include <kunit/test.h>
#include <linux/cred.h>
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/hmm.h>
#include <linux/iommu.h>
#include <linux/mman.h>
#include <linux/module.h>
#include <linux/pagemap.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "../np_hooks.h"
#include "../np_region.h"
#include "np_fake_peer.h"

#define FAKE_IOVA	0x7000000000UL
#define FAKE_PRESENT	BIT_ULL(63)

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

#define FAKE_KEYS	16	/* ever made */

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
	struct np_device npdev;
	struct ib_device *ibdev;
	struct ib_pd pd;
	struct ib_pd public_pd;
	struct np_region *region;
	unsigned long va;	/* of the mapping, aligned to a slot */
};

static struct fake_iommu *to_fake(struct iommu_domain *domain)
{
	return container_of(domain, struct fake_iommu, domain);
}

static struct fake_slot *fake_slot(struct fake_iommu *fake, unsigned long iova)
{
	return xa_load(&fake->slots, iova >> NP_SLOT_SHIFT);
}

static u64 fake_leaf(struct fake_iommu *fake, unsigned long iova)
{
	struct fake_slot *slot = fake_slot(fake, iova);
	unsigned long offset = iova & (NP_SLOT_SIZE - 1);

	if (!slot)
		return 0;
	if (slot->leaf)
		return slot->leaf[offset >> PAGE_SHIFT];
	return slot->whole + (offset & PAGE_MASK);
}

static phys_addr_t fake_paddr(u64 leaf)
{
	return leaf & GENMASK_ULL(51, PAGE_SHIFT);
}

static u64 fake_make(phys_addr_t paddr, int prot)
{
	return paddr | prot | FAKE_PRESENT;
}

static struct np_slot *np_test_slot(struct np_region *region, unsigned long va)
{
	struct np_chunk *chunk = xa_load(&region->chunks, (va - region->read.va) >>
					 NP_CHUNK_SHIFT);

	return chunk ? &chunk->slots[(va - chunk->va) >> NP_SLOT_SHIFT] : NULL;
}

/* What a peer reads in the residency table */
static u64 np_test_word(struct np_region *region, unsigned long va)
{
	u64 leaf = fake_leaf(to_fake(region->read.domain),
			     np_window_table_iova(&region->read, va));
	const __le64 *words = phys_to_virt(fake_paddr(leaf));

	return le64_to_cpu(words[(va & (NP_SLOT_SIZE - 1)) >> PAGE_SHIFT]);
}

static bool np_test_held(struct np_region *region, unsigned long va)
{
	struct np_slot *slot = np_test_slot(region, va);

	return slot && slot->holds &&
	       slot->holds->count[(va & (NP_SLOT_SIZE - 1)) >> PAGE_SHIFT];
}

/* A leaf of a window changes: are words and leaves in step? */
static void fake_check(struct fake_iommu *fake, unsigned long iova, u64 old,
		       u64 new)
{
	struct np_region *region = fake->region;
	struct kunit *test = fake->test;
	struct np_window *win;
	u64 right, word;
	unsigned long va;

	KUNIT_EXPECT_TRUE_MSG(test, old & FAKE_PRESENT, "%lx was not present", iova);
	if (!region)
		return;
	if (np_window_exists(&region->write) && iova >= region->write.iova &&
	    iova < region->write.iova + region->write.size) {
		win = &region->write;
		right = RDMA_NP_WORD_WRITABLE;
	} else {
		win = &region->read;
		right = RDMA_NP_WORD_READABLE;
	}
	if (iova >= win->iova + (win->slots << NP_SLOT_SHIFT))
		return;	/* residency table */
	va = win->va + (iova - win->iova);
	word = np_test_word(region, va);
	if (old != new)
		KUNIT_EXPECT_FALSE_MSG(test, word & right,
				       "leaf of %lx changes under word %llx", va,
				       word);
	if (fake_paddr(new) != win->absent + (va & (NP_SLOT_SIZE - 1)))
		KUNIT_EXPECT_EQ(test, new & IOMMU_WRITE,
				win == &region->write ? IOMMU_WRITE : 0);
}

static void fake_set(struct fake_iommu *fake, unsigned long iova, u64 *leaf,
		     u64 new)
{
	fake_check(fake, iova, *leaf, new);
	if (*leaf == new)
		return;
	*leaf = new;
	fake->pending++;
	fake->changes++;
}

static void fake_set_whole(struct fake_iommu *fake, unsigned long iova,
			   struct fake_slot *slot, u64 new)
{
	u64 leaf;
	int i;

	if (slot->whole == new)
		return;
	for (i = 0; i < NP_SLOT_PAGES; i++) {
		leaf = slot->whole + ((u64)i << PAGE_SHIFT);
		fake_set(fake, iova + (i << PAGE_SHIFT), &leaf,
			 new + ((u64)i << PAGE_SHIFT));
	}
	slot->whole = new;
}

/* What is a table and what is not: nothing else keeps two faults from asking at once */
static DEFINE_MUTEX(fake_tables);

static int fake_split_slot(struct fake_iommu *fake, struct fake_slot *slot)
{
	/* Not under the lock, which invalidations that reclaim waits for take */
	u64 *leaf = kcalloc(NP_SLOT_PAGES, sizeof(u64), GFP_KERNEL);
	int i;

	if (!leaf)
		return -ENOMEM;
	guard(mutex)(&fake_tables);
	if (slot->leaf) {
		kfree(leaf);
		return 0;
	}
	for (i = 0; i < NP_SLOT_PAGES; i++)
		leaf[i] = slot->whole + ((u64)i << PAGE_SHIFT);
	slot->leaf = leaf;
	fake->splits++;
	return 0;
}

static int fake_split(struct iommu_domain *domain, unsigned long iova, gfp_t gfp)
{
	struct fake_iommu *fake = to_fake(domain);
	struct fake_slot *slot = fake_slot(fake, iova);
	int ret;

	if (!slot)
		return -ENOENT;
	if (fake->split_error)
		return fake->split_error;
	ret = fake_split_slot(fake, slot);
	if (!ret && fake->on_split)
		fake->on_split(fake);
	return ret;
}

static int fake_merge(struct iommu_domain *domain, unsigned long iova,
		      phys_addr_t paddr, int prot, struct iommu_inval *inval)
{
	struct fake_iommu *fake = to_fake(domain);
	struct fake_slot *slot = fake_slot(fake, iova);
	int i;

	if (!slot)
		return -ENOENT;
	if (fake->on_merge)
		fake->on_merge(fake);
	if (fake->read_pages_error && !(prot & IOMMU_WRITE) &&
	    fake->region && paddr != fake->region->read.absent &&
	    paddr != page_to_phys(np_host.zero_page))
		return fake->read_pages_error;
	guard(mutex)(&fake_tables);
	if (!slot->leaf) {
		fake_set_whole(fake, iova, slot, fake_make(paddr, prot));
		iommu_inval_add(inval, iova, NP_SLOT_SIZE, false);
		return 0;
	}
	for (i = 0; i < NP_SLOT_PAGES; i++)
		fake_set(fake, iova + (i << PAGE_SHIFT), &slot->leaf[i],
			 fake_make(paddr + (i << PAGE_SHIFT), prot));
	kfree(slot->leaf);
	slot->leaf = NULL;
	slot->whole = fake_make(paddr, prot);
	fake->merges++;
	iommu_inval_add(inval, iova, NP_SLOT_SIZE, true);
	return 0;
}

static int fake_replace(struct iommu_domain *domain, unsigned long iova,
			size_t pgsize, phys_addr_t paddr, int prot,
			struct iommu_leaf *old, struct iommu_inval *inval)
{
	struct fake_iommu *fake = to_fake(domain);
	struct fake_slot *slot = fake_slot(fake, iova);

	if (!slot)
		return -ENOENT;
	if (!slot->leaf) {
		fake->refused++;
		return -EBUSY;
	}
	fake_set(fake, iova,
		 &slot->leaf[(iova & (NP_SLOT_SIZE - 1)) >> PAGE_SHIFT],
		 fake_make(paddr, prot));
	iommu_inval_add(inval, iova, pgsize, false);
	return 0;
}

static int fake_replace_pages(struct iommu_domain *domain, unsigned long iova,
			      unsigned int npages, const phys_addr_t *paddrs,
			      int prot, struct iommu_inval *inval)
{
	struct fake_iommu *fake = to_fake(domain);
	unsigned int i;
	int ret;

	if (fake->read_pages_error && !(prot & IOMMU_WRITE))
		return fake->read_pages_error;
	for (i = 0; i < npages; i++, iova += PAGE_SIZE) {
		if (paddrs[i] == IOMMU_LEAF_KEEP)
			continue;
		ret = fake_replace(domain, iova, PAGE_SIZE, paddrs[i], prot,
				   NULL, inval);
		if (ret)
			return ret;
	}
	return 0;
}

static int fake_replace_fill(struct iommu_domain *domain, unsigned long iova,
			     size_t len, phys_addr_t paddr, int prot,
			     struct iommu_inval *inval)
{
	unsigned long end = iova + len;
	struct fake_slot *slot;
	int ret;

	for (; iova < end; iova += PAGE_SIZE) {
		u64 want = fake_make(paddr + (iova & (NP_SLOT_SIZE - 1)), prot);

		slot = fake_slot(to_fake(domain), iova);
		if (slot && !slot->leaf && IS_ALIGNED(iova, NP_SLOT_SIZE) &&
		    end - iova >= NP_SLOT_SIZE) {
			fake_set_whole(to_fake(domain), iova, slot, want);
			iommu_inval_add(inval, iova, NP_SLOT_SIZE, false);
			iova += NP_SLOT_SIZE - PAGE_SIZE;
			continue;
		}
		if (fake_leaf(to_fake(domain), iova) == want)
			continue;
		ret = fake_replace(domain, iova, PAGE_SIZE, fake_paddr(want),
				   prot, NULL, inval);
		if (ret)
			return ret;
	}
	return 0;
}

static int fake_map_fill(struct iommu_domain *domain, unsigned long iova,
			 size_t len, phys_addr_t paddr, int prot, gfp_t gfp,
			 size_t *mapped)
{
	struct fake_iommu *fake = to_fake(domain);
	struct fake_slot *slot;

	for (*mapped = 0; *mapped < len; *mapped += NP_SLOT_SIZE) {
		slot = kzalloc(sizeof(*slot), GFP_KERNEL);
		if (!slot)
			return -ENOMEM;
		slot->whole = fake_make(paddr, prot);
		if (xa_insert(&fake->slots, (iova + *mapped) >> NP_SLOT_SHIFT,
			      slot, GFP_KERNEL)) {
			kfree(slot);
			return -EEXIST;
		}
	}
	return 0;
}

static void fake_inval_sync(struct iommu_domain *domain,
			    struct iommu_inval *inval)
{
	struct fake_iommu *fake = to_fake(domain);

	fake->pending = 0;
	fake->syncs++;
}

static size_t fake_unmap_pages(struct iommu_domain *domain, unsigned long iova,
			       size_t pgsize, size_t pgcount,
			       struct iommu_iotlb_gather *gather)
{
	struct fake_iommu *fake = to_fake(domain);
	struct fake_slot *slot;
	size_t i;

	for (i = 0; i < pgcount; i++) {
		slot = xa_erase(&fake->slots,
				(iova + i * pgsize) >> NP_SLOT_SHIFT);
		KUNIT_EXPECT_NOT_NULL(fake->test, slot);
		if (slot)
			kfree(slot->leaf);
		kfree(slot);
	}
	return pgsize * pgcount;
}

static phys_addr_t fake_iova_to_phys(struct iommu_domain *domain, dma_addr_t iova)
{
	return fake_paddr(fake_leaf(to_fake(domain), iova));
}

static const struct iommu_domain_ops fake_ops = {
	.unmap_pages = fake_unmap_pages,
	.iova_to_phys = fake_iova_to_phys,
};

static const struct iommu_replace_ops fake_replace_ops = {
	.replace = fake_replace,
	.replace_pages = fake_replace_pages,
	.replace_fill = fake_replace_fill,
	.split = fake_split,
	.merge = fake_merge,
	.map_fill = fake_map_fill,
	.inval_sync = fake_inval_sync,
};

static int fake_iova_reserve(struct device *dev, size_t size, size_t align,
			     size_t offset, dma_addr_t *iova)
{
	struct np_test *t = kunit_get_current_test()->priv;

	*iova = ALIGN(t->fake.next_iova, align) + offset;
	t->fake.next_iova = *iova + size;
	return 0;
}

static void fake_iova_release(struct device *dev, dma_addr_t iova, size_t size)
{
}

/* --- the driver ------------------------------------------------------------------ */

static struct np_test *to_test(struct ib_device *ibdev)
{
	return container_of(ibdev, struct fake_device, ibdev)->t;
}

/* Like that of mlx5: the umem is its own, also if it fails */
static struct ib_mr *fake_reg_umem_mr(struct ib_pd *pd, struct ib_umem *umem,
				      u64 iova, int access)
{
	struct np_test *t = to_test(pd->device);
	struct fake_key *key;

	if (t->nr_keys == FAKE_KEYS || t->nr_keys + 1 == t->fail_key)
		goto release;
	key = kzalloc(sizeof(*key), GFP_KERNEL);
	if (!key)
		goto release;
	key->umem = umem;
	key->addr = iova;
	key->length = umem->length;
	key->access = access;
	t->keys[t->nr_keys++] = key;
	t->live_keys++;
	key->mr.lkey = t->nr_keys;
	key->mr.rkey = t->nr_keys;
	return &key->mr;

release:
	ib_umem_release(umem);
	return ERR_PTR(-ENOMEM);
}

/* Like those of mthca and mlx4: reads udata, and takes the caller's mmap_lock */
static struct ib_mr *fake_reg_user_mr(struct ib_pd *pd, u64 start, u64 length,
				      u64 virt_addr, int access,
				      struct ib_udata *udata)
{
	struct np_test *t = to_test(pd->device);

	KUNIT_FAIL(t->fake.test, "reg_user_mr() was called for an unpinned region");
	if (!udata->inlen)
		return ERR_PTR(-EINVAL);
	mmap_read_lock(current->mm);
	mmap_read_unlock(current->mm);
	return ERR_PTR(-EOPNOTSUPP);
}

static int fake_dereg_mr(struct ib_mr *mr, struct ib_udata *udata)
{
	struct fake_key *key = container_of(mr, struct fake_key, mr);
	struct np_test *t = to_test(mr->device);

	if (t->keep_keys)
		return -EIO;
	t->keys[mr->rkey - 1] = NULL;
	t->live_keys--;
	ib_umem_release(key->umem);
	kfree(key);
	return 0;
}

/* --- the frame ------------------------------------------------------------------ */

static void np_test_close(struct np_test *t)
{
	if (!t->region)
		return;
	if (!np_region_is_gone(t->region))
		np_region_close(t->region);
	t->fake.region = NULL;
	np_region_put(t->region);
	t->region = NULL;
}

static void np_test_exit_region(void *data)
{
	struct np_test *t = data;

	np_test_close(t);
	np_pd_dealloc(&t->pd);
	rdmacg_unregister_device(&t->ibdev->cg_device);
	kvfree(t->npdev.told);
}

static int np_test_init(struct kunit *test)
{
	struct fake_device *dev;
	struct np_test *t;
	int i;

	t = kunit_kzalloc(test, sizeof(*t), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, t);
	dev = kunit_kzalloc(test, sizeof(*dev), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, dev);
	dev->t = t;
	for (i = 0; i < RDMA_RESTRACK_MAX; i++)
		xa_init_flags(&dev->res[i].xa, XA_FLAGS_ALLOC);
	dev->ibdev.res = dev->res;
	dev->ibdev.cg_device.name = "fake";
	rdmacg_register_device(&dev->ibdev.cg_device);
	dev->ibdev.ops.reg_user_mr = fake_reg_user_mr;
	dev->ibdev.ops.reg_umem_mr = fake_reg_umem_mr;
	dev->ibdev.ops.dereg_mr = fake_dereg_mr;
	t->ibdev = &dev->ibdev;
	test->priv = t;

	t->fake.test = test;
	t->fake.next_iova = FAKE_IOVA;
	xa_init(&t->fake.slots);
	t->fake.domain.type = IOMMU_DOMAIN_DMA;
	t->fake.domain.pgsize_bitmap = SZ_4K | SZ_2M;
	t->fake.domain.ops = &fake_ops;
	t->fake.domain.replace_ops = &fake_replace_ops;

	t->npdev.ibdev = t->ibdev;
	mutex_init(&t->npdev.lock);
	xa_init(&t->npdev.rkeys);
	refcount_set(&t->npdev.users, 1);
	init_completion(&t->npdev.idle);
	t->pd.device = t->ibdev;

	kunit_activate_static_stub(test, np_iova_reserve, fake_iova_reserve);
	kunit_activate_static_stub(test, np_iova_release, fake_iova_release);
	return kunit_add_action_or_reset(test, np_test_exit_region, t);
}

static void np_test_map(struct kunit *test, int prot)
{
	struct np_test *t = test->priv;
	unsigned long va;

	va = kunit_vm_mmap(test, NULL, 0, 4 * NP_SLOT_SIZE, prot,
			   MAP_ANONYMOUS | MAP_PRIVATE, 0);
	KUNIT_ASSERT_NE(test, va, 0);
	t->va = ALIGN(va, NP_SLOT_SIZE);
}

#define NP_TEST_ACCESS (NP_ACCESS_RIGHTS | IB_ACCESS_UNPINNED)

/* Region of @npages pages, @first pages behind the beginning of the mapping */
static struct np_region *np_test_region_at(struct kunit *test, unsigned int first,
					   unsigned int npages, u32 access)
{
	struct np_test *t = test->priv;
	struct np_region *region;

	if (!t->va)
		np_test_map(test, PROT_READ | PROT_WRITE);
	refcount_inc(&t->npdev.users);
	region = np_region_create(&t->npdev, &t->pd, NULL, &t->fake.domain,
				  t->va + first * PAGE_SIZE,
				  (u64)npages * PAGE_SIZE, 0x1000, access);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, region);
	t->region = region;
	t->fake.region = region;
	return region;
}

static struct np_region *np_test_region(struct kunit *test, unsigned int npages)
{
	return np_test_region_at(test, 0, npages, NP_TEST_ACCESS);
}

static int np_test_fault(struct np_region *region, unsigned int page,
			 unsigned int npages, unsigned int flags)
{
	return np_region_fault(region, region->base + page * PAGE_SIZE,
			       (u64)npages * PAGE_SIZE, flags, NULL, NULL, 0);
}

static u64 np_word(struct np_region *region, unsigned int page)
{
	return np_test_word(region, (region->start & PAGE_MASK) +
				    page * PAGE_SIZE);
}

static u64 np_rights(struct np_region *region, unsigned int page)
{
	return np_word(region, page) & NP_WORD_RIGHTS;
}

static u64 np_generation(struct np_region *region, unsigned int page)
{
	return np_word(region, page) >> RDMA_NP_WORD_GENERATION_SHIFT;
}

static struct page *np_page_at(struct kunit *test, unsigned long va)
{
	struct page *page = NULL;
	int locked = 1;

	mmap_read_lock(current->mm);
	KUNIT_ASSERT_EQ(test, 1, get_user_pages_remote(current->mm, va, 1, 0,
						       &page, &locked));
	if (locked)
		mmap_read_unlock(current->mm);
	put_page(page);
	return page;
}

static void np_touch(struct kunit *test, unsigned long va, u64 value)
{
	KUNIT_ASSERT_EQ(test, 0, put_user(value, (u64 __user *)va));
}

static void np_test_unmap(struct np_test *t, unsigned int page,
			  unsigned int npages)
{
	vm_munmap(t->va + page * PAGE_SIZE, npages * PAGE_SIZE);
}

/*
 * As if the kernel invalidated just these pages: munmap() of a part of a mapping
 * invalidates the whole slot, because it might have to split a huge page. The
 * memory itself stays.
 */
static void np_test_event(struct np_test *t, enum mmu_notifier_event event,
			  unsigned int page, unsigned int npages)
{
	struct np_chunk *chunk = xa_load(&t->region->chunks, 0);
	struct mmu_notifier_range range = {
		.mm = current->mm,
		.start = t->va + page * PAGE_SIZE,
		.end = t->va + (page + npages) * PAGE_SIZE,
		.flags = MMU_NOTIFIER_RANGE_BLOCKABLE,
		.event = event,
	};

	mmap_read_lock(current->mm);
	KUNIT_EXPECT_TRUE(t->fake.test,
			  chunk->notifier.ops->invalidate(&chunk->notifier, &range,
							  chunk->notifier.invalidate_seq));
	mmap_read_unlock(current->mm);
}

static void np_test_invalidate(struct np_test *t, unsigned int page,
			       unsigned int npages)
{
	np_test_event(t, MMU_NOTIFY_CLEAR, page, npages);
}

/* At rest: every leaf says what its word says, and nothing waits to be flushed */
static void np_test_settled(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct np_region *region = t->region;
	unsigned long va, end;
	u64 word, leaf;

	KUNIT_EXPECT_EQ(test, t->fake.pending, 0);
	end = region->read.va + (region->read.slots << NP_SLOT_SHIFT);
	for (va = region->read.va; va < end; va += PAGE_SIZE) {
		word = np_test_word(region, va);
		if (np_test_held(region, va))
			continue;
		leaf = fake_leaf(&t->fake, np_window_iova(&region->read, va));
		KUNIT_EXPECT_TRUE(test, leaf & FAKE_PRESENT);
		KUNIT_EXPECT_EQ(test, !!(word & RDMA_NP_WORD_READABLE),
				fake_paddr(leaf) != region->read.absent +
				(va & (NP_SLOT_SIZE - 1)));
		if (!np_window_exists(&region->write))
			continue;
		leaf = fake_leaf(&t->fake, np_window_iova(&region->write, va));
		KUNIT_EXPECT_TRUE(test, leaf & FAKE_PRESENT);
		KUNIT_EXPECT_EQ(test, !!(word & RDMA_NP_WORD_WRITABLE),
				fake_paddr(leaf) != region->write.absent +
				(va & (NP_SLOT_SIZE - 1)));
	}
}

static phys_addr_t np_read_paddr(struct np_region *region, unsigned int page)
{
	return iommu_iova_to_phys(region->read.domain, region->read.iova +
				  page * PAGE_SIZE);
}

static phys_addr_t np_write_paddr(struct np_region *region, unsigned int page)
{
	return iommu_iova_to_phys(region->write.domain, region->write.iova +
				  page * PAGE_SIZE);
}

/* --- windows ----------------------------------------------------------------------- */

static void np_new_region_is_absent_everywhere(struct kunit *test)
{
	struct np_region *region = np_test_region_at(test, 3, 600, NP_TEST_ACCESS);
	struct np_test *t = test->priv;
	u64 leaf;

	KUNIT_EXPECT_EQ(test, region->read.slots, 2);
	KUNIT_EXPECT_EQ(test, region->read.size, 3 * NP_SLOT_SIZE);
	KUNIT_EXPECT_EQ(test, region->write.size, 2 * NP_SLOT_SIZE);
	np_test_settled(test);
	leaf = fake_leaf(&t->fake, np_window_table_iova(&region->read,
							region->read.va));
	KUNIT_EXPECT_EQ(test, fake_paddr(leaf),
			page_to_phys(np_host.zero_page));
	KUNIT_EXPECT_FALSE(test, leaf & IOMMU_WRITE);
	KUNIT_EXPECT_TRUE(test, xa_empty(&region->chunks));
	KUNIT_EXPECT_EQ(test, t->fake.splits, 0);
}

static void np_window_is_congruent_to_the_address(struct kunit *test)
{
	struct np_region *region = np_test_region_at(test, 3, 600, NP_TEST_ACCESS);
	unsigned long mask = 2 * NP_SLOT_SIZE - 1;

	KUNIT_EXPECT_EQ(test, region->read.iova & mask, region->read.va & mask);
	KUNIT_EXPECT_EQ(test, region->write.iova & mask, region->write.va & mask);
}

static void np_signature_fills_its_page(struct kunit *test)
{
	__le64 *words;

	np_test_region(test, 1);
	words = page_address(np_host.signature_page);
	KUNIT_EXPECT_NE(test, np_host.signature, 0);
	KUNIT_EXPECT_EQ(test, le64_to_cpu(words[0]), np_host.signature);
	KUNIT_EXPECT_EQ(test, le64_to_cpu(words[NP_SLOT_SIZE / 8 - 1]),
			np_host.signature);
	KUNIT_EXPECT_PTR_EQ(test, memchr_inv(page_address(np_host.zero_page), 0,
					     NP_SLOT_SIZE), NULL);
}

static void np_region_without_write_right_has_no_write_window(struct kunit *test)
{
	struct np_region *region;

	region = np_test_region_at(test, 0, 4,
				   IB_ACCESS_REMOTE_READ | IB_ACCESS_UNPINNED);
	KUNIT_EXPECT_FALSE(test, np_window_exists(&region->write));
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), -EPERM);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	np_test_settled(test);
	np_test_unmap(test->priv, 0, 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	np_test_settled(test);
}

static void np_closed_region_unmaps_its_windows(struct kunit *test)
{
	struct np_test *t = test->priv;

	np_test_region(test, 600);
	KUNIT_ASSERT_EQ(test, np_test_fault(t->region, 0, 600, RDMA_NP_FAULT_WRITE), 0);
	np_test_close(t);
	KUNIT_EXPECT_TRUE(test, xa_empty(&t->fake.slots));
	KUNIT_EXPECT_EQ(test, kref_read(&t->pd.np->ref), 1);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
}

static void np_scratch_is_shared_within_a_pd_only(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct np_region *a, *b, *c;
	struct ib_pd other = { .device = t->ibdev };

	np_test_map(test, PROT_READ | PROT_WRITE);
	refcount_add(3, &t->npdev.users);
	a = np_region_create(&t->npdev, &t->pd, NULL, &t->fake.domain, t->va,
			     PAGE_SIZE, 0, NP_TEST_ACCESS);
	b = np_region_create(&t->npdev, &t->pd, NULL, &t->fake.domain, t->va,
			     PAGE_SIZE, 0, NP_TEST_ACCESS);
	c = np_region_create(&t->npdev, &other, NULL, &t->fake.domain, t->va,
			     PAGE_SIZE, 0, NP_TEST_ACCESS);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, a);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, b);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, c);
	KUNIT_EXPECT_EQ(test, a->write.absent, b->write.absent);
	KUNIT_EXPECT_NE(test, a->write.absent, c->write.absent);
	KUNIT_EXPECT_NE(test, a->id, b->id);
	np_region_close(a);
	np_region_put(a);
	np_region_close(b);
	/* b's windows still exist, but a new PD at that address must not get its page */
	np_pd_dealloc(&t->pd);
	KUNIT_EXPECT_EQ(test, kref_read(&b->scratch->ref), 1);
	refcount_inc(&t->npdev.users);
	a = np_region_create(&t->npdev, &t->pd, NULL, &t->fake.domain, t->va,
			     PAGE_SIZE, 0, NP_TEST_ACCESS);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, a);
	KUNIT_EXPECT_NE(test, a->write.absent, b->write.absent);
	np_region_put(b);
	np_region_close(a);
	np_region_put(a);
	np_region_close(c);
	np_region_put(c);
	np_pd_dealloc(&other);
}

/* A PD whose regions come and go one at a time clears one page, not one for each. */
static void np_scratch_stays_with_its_pd(struct kunit *test)
{
	struct np_test *t = test->priv;
	struct np_region *region;
	phys_addr_t page = 0;
	int i;

	np_test_map(test, PROT_READ | PROT_WRITE);
	for (i = 0; i < 3; i++) {
		refcount_inc(&t->npdev.users);
		region = np_region_create(&t->npdev, &t->pd, NULL, &t->fake.domain,
					  t->va, PAGE_SIZE, 0, NP_TEST_ACCESS);
		KUNIT_ASSERT_NOT_ERR_OR_NULL(test, region);
		if (i)
			KUNIT_EXPECT_EQ(test, region->write.absent, page);
		page = region->write.absent;
		np_region_close(region);
		np_region_put(region);
	}
}

/* --- becoming resident ------------------------------------------------------------------ */

static void np_read_fault_maps_read_window_only(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	np_touch(test, t->va + PAGE_SIZE, 1);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 1, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, 1),
			NP_WORD_GENERATION | RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 1),
			page_to_phys(np_page_at(test, t->va + PAGE_SIZE)));
	KUNIT_EXPECT_EQ(test, np_word(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, 2), 0);
	np_test_settled(test);
}

static void np_write_fault_maps_both_windows(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	phys_addr_t paddr;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 1, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, 1),
			NP_WORD_GENERATION | NP_WORD_RIGHTS);
	paddr = page_to_phys(np_page_at(test, t->va + PAGE_SIZE));
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 1), paddr);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 1), paddr);
	np_test_settled(test);
}

static void np_writable_page_is_dirty(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct folio *folio;

	np_touch(test, t->va, 1);
	folio = page_folio(np_page_at(test, t->va));
	folio_clear_dirty(folio);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	KUNIT_EXPECT_FALSE(test, folio_test_dirty(folio));
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_PTR_EQ(test, page_folio(np_page_at(test, t->va)), folio);
	KUNIT_EXPECT_TRUE(test, folio_test_dirty(folio));
}

static void np_fault_on_resident_page_changes_nothing(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	unsigned int changes, syncs;
	struct np_stats stats;
	u64 words[2] = {};

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 2, RDMA_NP_FAULT_WRITE), 0);
	changes = t->fake.changes;
	syncs = t->fake.syncs;
	KUNIT_EXPECT_EQ(test, np_region_fault(region, region->base, 2 * PAGE_SIZE,
					      RDMA_NP_FAULT_WRITE, NULL, words, 2), 0);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 2, 0), 0);
	KUNIT_EXPECT_EQ(test, t->fake.changes, changes);
	KUNIT_EXPECT_EQ(test, t->fake.syncs, syncs);
	KUNIT_EXPECT_EQ(test, words[0], NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, words[1], NP_WORD_GENERATION | NP_WORD_RIGHTS);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.faults_noop, 4);
	KUNIT_EXPECT_EQ(test, stats.resident, 2);
	KUNIT_EXPECT_EQ(test, stats.writable, 2);
}

static void np_fault_next_to_resident_page_leaves_it_alone(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 1, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_generation(region, 0), 1);
	KUNIT_EXPECT_EQ(test, np_generation(region, 1), 1);
	KUNIT_EXPECT_EQ(test, np_generation(region, 3), 1);
	np_test_settled(test);
}

static void np_upgrade_changes_the_generation(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	phys_addr_t paddr;

	np_touch(test, t->va, 1);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	paddr = np_read_paddr(region, 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, 0),
			2 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	np_test_settled(test);
}

static void np_fault_crosses_slots(struct kunit *test)
{
	struct np_region *region = np_test_region_at(test, 510, 600,
						     NP_TEST_ACCESS);
	u64 words[4] = {};
	unsigned int i;

	KUNIT_ASSERT_EQ(test, np_region_fault(region, region->base + 1,
					      4 * PAGE_SIZE, RDMA_NP_FAULT_WRITE,
					      NULL, words, 4), 0);
	for (i = 0; i < 4; i++)
		KUNIT_EXPECT_EQ(test, words[i],
				NP_WORD_GENERATION | NP_WORD_RIGHTS);
	for (i = 0; i < 5; i++)
		KUNIT_EXPECT_EQ(test, np_rights(region, i), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 5), 0);
	np_test_settled(test);
}

static void np_prefetch_without_fault_takes_what_is_there(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	np_touch(test, t->va + PAGE_SIZE, 1);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, NP_FAULT_PRESENT |
					    RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 2), 0);
	np_test_settled(test);
}

static void np_fault_checks_range(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 2);
	u64 base = region->base, len = region->length;
	static const struct {
		s64 addr;
		s64 len;
		int ret;
	} cases[] = {
		{ 0, 0, -ERANGE },	 { -1, 1, -ERANGE },
		{ -1, 2, -ERANGE },	 { 0, 1, 0 },
		{ 0, 0x2000, 0 },	 { 0, 0x2001, -ERANGE },
		{ 0x1fff, 1, 0 },	 { 0x1fff, 2, -ERANGE },
		{ 0x2000, 1, -ERANGE },	 { 0x2000, 0, -ERANGE },
		{ 1, -1, -ERANGE },	 { 1, S64_MIN, -ERANGE },
		{ S64_MIN, 1, -ERANGE },
	};
	unsigned int i;

	KUNIT_ASSERT_EQ(test, len, 0x2000);
	for (i = 0; i < ARRAY_SIZE(cases); i++)
		KUNIT_EXPECT_EQ_MSG(test,
				    np_region_fault(region, base + cases[i].addr,
						    cases[i].len, 0, NULL, NULL, 0),
				    cases[i].ret, "case %u", i);
}

static void np_fault_checks_rights(struct kunit *test)
{
	struct np_region *region;

	region = np_test_region_at(test, 0, 2, IB_ACCESS_LOCAL_WRITE |
				   IB_ACCESS_REMOTE_WRITE | IB_ACCESS_UNPINNED);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), -EPERM);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, NP_FAULT_LOCAL), 0);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
}

static void np_fault_says_what_is_wrong_with_the_mapping(struct kunit *test)
{
	struct np_region *region;

	np_test_map(test, PROT_READ);
	region = np_test_region(test, 4);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), -EPERM);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	np_test_unmap(test->priv, 2, 1);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 2, 1, 0), -EFAULT);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 1, 3, 0), -EFAULT);
	np_test_settled(test);
}

static void np_failed_split_changes_nothing(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 3, 1, 0), 0);
	t->fake.split_error = -ENOMEM;
	/* The owner is told; a peer asks again */
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE |
					    NP_FAULT_LOCAL), -ENOMEM);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), -EAGAIN);
	KUNIT_EXPECT_EQ(test, np_word(region, 0), 0);
	np_test_settled(test);
	t->fake.split_error = 0;
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_settled(test);
}

static void np_failed_read_leaf_undoes_the_write_leaf(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 3, 1, RDMA_NP_FAULT_WRITE), 0);
	t->fake.read_pages_error = -EINVAL;
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 2, RDMA_NP_FAULT_WRITE), -EINVAL);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 3), NP_WORD_RIGHTS);
	np_test_settled(test);
}

/* --- becoming absent --------------------------------------------------------------------- */

static void np_invalidation_makes_absent(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_stats stats;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, RDMA_NP_FAULT_WRITE), 0);
	np_test_invalidate(test->priv, 1, 2);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_word(region, 1), 2 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, np_word(region, 2), 2 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, np_rights(region, 3), NP_WORD_RIGHTS);
	np_test_settled(test);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.resident, 2);
	KUNIT_EXPECT_EQ(test, stats.invalidations, 1);
	KUNIT_EXPECT_EQ(test, stats.pages_invalidated, 2);
}

static void np_invalidation_of_absent_pages_costs_no_flush(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	unsigned int syncs;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	syncs = t->fake.syncs;
	np_test_invalidate(t, 2, 2);
	KUNIT_EXPECT_EQ(test, t->fake.syncs, syncs);
	KUNIT_EXPECT_EQ(test, np_word(region, 2), 0);
}

static void np_absent_slot_is_merged(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 600);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 600, RDMA_NP_FAULT_WRITE), 0);
	np_test_invalidate(t, 0, 511);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 0);
	np_test_invalidate(t, 511, 1);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 2);
	KUNIT_EXPECT_NULL(test, fake_slot(&t->fake, region->read.iova)->leaf);
	KUNIT_EXPECT_NULL(test, fake_slot(&t->fake, region->write.iova)->leaf);
	np_test_settled(test);
}

static void np_generation_survives_a_merge(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 1);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_unmap(t, 0, 1);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 2);
	KUNIT_ASSERT_EQ(test, t->va, vm_mmap(NULL, t->va, PAGE_SIZE,
					     PROT_READ | PROT_WRITE, MAP_FIXED |
					     MAP_ANONYMOUS | MAP_PRIVATE, 0));
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, 0),
			3 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
	np_test_settled(test);
}

/* Runs in the fault, so that what follows is as if another CPU had done it */
static void np_age_other_page(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);
	DECLARE_BITMAP(pages, NP_SLOT_PAGES) = {};

	fake->on_split = NULL;
	__set_bit(3, pages);
	np_region_age(t->region, t->va, pages);
}

/* The table that the fault has just made is merged away before it takes the lock */
static void np_fault_notices_that_its_split_is_undone(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_stats stats;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 3, 1, RDMA_NP_FAULT_WRITE), 0);
	/* In the split of the read window, which comes last; the notifier is silent */
	t->fake.on_split = np_age_other_page;
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 2);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_GE(test, stats.retries, 1);
	/* It knows from the count, and need not try */
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_settled(test);
}

/* Does reclaim hear that a page is used? */
static bool np_test_ask(struct np_region *region, unsigned int page, bool clear)
{
	unsigned long va = (region->start & PAGE_MASK) + page * PAGE_SIZE;

	return np_aging_ask(region->aging, va, va + PAGE_SIZE, clear);
}

/* It asks, and a worker makes the page absent */
static void np_test_age(struct kunit *test, struct np_region *region,
			unsigned int page)
{
	struct np_chunk *chunk = xa_load(&region->chunks, 0);
	unsigned long deadline = jiffies + 10 * HZ;

	KUNIT_EXPECT_TRUE(test, np_test_ask(region, page, true));
	while (np_rights(region, page) && time_before(jiffies, deadline))
		cond_resched();
	KUNIT_ASSERT_EQ(test, np_rights(region, page), 0);
	/* The word goes first; then leaves are changed, and flushed, under the lock */
	mutex_lock(&chunk->lock);
	mutex_unlock(&chunk->lock);
	KUNIT_EXPECT_FALSE(test, np_test_ask(region, page, false));
}

static void np_neighbour_counts_as_used(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	np_touch(test, t->va, 1);
	np_touch(test, t->va + PAGE_SIZE, 1);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, NP_FAULT_AROUND |
					    NP_FAULT_PRESENT), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_TRUE(test, np_test_ask(region, 0, false));
	KUNIT_EXPECT_TRUE(test, np_test_ask(region, 1, false));
	/* Nobody can use what is not there */
	KUNIT_EXPECT_FALSE(test, np_test_ask(region, 2, false));
	np_test_settled(test);
}

static void np_page_that_was_asked_about_comes_when_it_is_used(struct kunit *test)
{
	static const unsigned int flags[] = { 0, NP_FAULT_PRESENT };
	struct np_region *region = np_test_region(test, 4);
	unsigned int i;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, 0), 0);
	for (i = 0; i < ARRAY_SIZE(flags); i++) {
		np_test_age(test, region, 1);
		np_test_age(test, region, 2);
		/* As often as others are asked for */
		KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
		KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4,
						    NP_FAULT_AROUND |
						    NP_FAULT_PRESENT), 0);
		KUNIT_EXPECT_EQ(test, np_rights(region, 1), 0);
		KUNIT_EXPECT_EQ(test, np_rights(region, 2), 0);
		KUNIT_EXPECT_FALSE(test, np_test_ask(region, 1, false));
		/* Not as a neighbour, by whatever else */
		KUNIT_ASSERT_EQ(test, np_test_fault(region, 1, 1, flags[i]), 0);
		KUNIT_EXPECT_EQ(test, np_rights(region, 1), RDMA_NP_WORD_READABLE);
		KUNIT_EXPECT_EQ(test, np_rights(region, 2), 0);
		KUNIT_EXPECT_TRUE(test, np_test_ask(region, 1, false));
		KUNIT_ASSERT_EQ(test, np_test_fault(region, 2, 1, 0), 0);
	}
	np_test_settled(test);
}

static void np_invalidation_that_may_not_block_gives_up(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 1);
	struct np_test *t = test->priv;
	struct mmu_notifier_range range = {
		.start = t->va,
		.end = t->va + PAGE_SIZE,
	};
	struct np_chunk *chunk;
	unsigned long seq;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	chunk = xa_load(&region->chunks, 0);
	seq = chunk->notifier.invalidate_seq;
	mutex_lock(&chunk->lock);
	KUNIT_EXPECT_FALSE(test, chunk->notifier.ops->invalidate(&chunk->notifier,
								 &range, seq));
	mutex_unlock(&chunk->lock);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_TRUE(test, chunk->notifier.ops->invalidate(&chunk->notifier,
								&range, seq));
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	np_test_settled(test);
}

/* fork(), soft dirty, write-back; mprotect() and others in readable memory */
static void np_protection_leaves_the_read_window(struct kunit *test)
{
	static const enum mmu_notifier_event events[] = {
		MMU_NOTIFY_PROTECTION_PAGE,
		MMU_NOTIFY_SOFT_DIRTY,
		MMU_NOTIFY_PROTECTION_VMA,
	};
	struct np_region *region = np_test_region(test, 6);
	struct np_test *t = test->priv;
	struct np_stats stats;
	phys_addr_t paddr;
	unsigned int i;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 6, RDMA_NP_FAULT_WRITE), 0);
	for (i = 0; i < ARRAY_SIZE(events); i++) {
		paddr = np_read_paddr(region, i + 1);
		np_test_event(t, events[i], i + 1, 1);
		KUNIT_EXPECT_EQ(test, np_word(region, i + 1),
				2 * NP_WORD_GENERATION | RDMA_NP_WORD_READABLE);
		KUNIT_EXPECT_EQ(test, np_read_paddr(region, i + 1), paddr);
		KUNIT_EXPECT_EQ(test, np_write_paddr(region, i + 1),
				region->write.absent + (i + 1) * PAGE_SIZE);
		np_test_settled(test);
	}
	/* Their neighbours are as before */
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 4), NP_WORD_RIGHTS);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.resident, 6);
	KUNIT_EXPECT_EQ(test, stats.writable, 3);

	/* The way back is an upgrade, and the way out is that of readable pages */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 3, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, 1),
			3 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
	np_test_invalidate(t, 0, 6);
	KUNIT_EXPECT_EQ(test, np_word(region, 3), 3 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 2);
	np_test_settled(test);
}

static void np_protection_of_readable_pages_costs_no_flush(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	unsigned int syncs;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, 0), 0);
	syncs = t->fake.syncs;
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 0, 4);
	KUNIT_EXPECT_EQ(test, t->fake.syncs, syncs);
	KUNIT_EXPECT_EQ(test, np_word(region, 0),
			NP_WORD_GENERATION | RDMA_NP_WORD_READABLE);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	syncs = t->fake.syncs;
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 1, 3);
	KUNIT_EXPECT_EQ(test, t->fake.syncs, syncs);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
}

/* mprotect(PROT_NONE) has changed the mapping when it calls */
static void np_protection_of_what_is_not_readable_makes_absent(struct kunit *test)
{
	struct np_region *region;
	struct np_test *t = test->priv;

	np_test_map(test, PROT_READ | PROT_WRITE);
	region = np_test_region(test, 4);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 4, RDMA_NP_FAULT_WRITE), 0);
	mmap_write_lock(current->mm);
	vm_flags_clear(vma_lookup(current->mm, t->va), VM_READ);
	mmap_write_unlock(current->mm);
	np_test_event(t, MMU_NOTIFY_PROTECTION_VMA, 0, 1);
	KUNIT_EXPECT_EQ(test, np_word(region, 0), 2 * NP_WORD_GENERATION);
	np_test_settled(test);
	mmap_write_lock(current->mm);
	vm_flags_set(vma_lookup(current->mm, t->va), VM_READ);
	mmap_write_unlock(current->mm);

	/* More than one mapping: nobody looks at all of them */
	KUNIT_ASSERT_EQ(test, t->va + 2 * PAGE_SIZE,
			vm_mmap(NULL, t->va + 2 * PAGE_SIZE, PAGE_SIZE,
				PROT_NONE, MAP_FIXED | MAP_ANONYMOUS | MAP_PRIVATE,
				0));
	KUNIT_EXPECT_EQ(test, np_rights(region, 2), 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 2, RDMA_NP_FAULT_WRITE), 0);
	np_test_event(t, MMU_NOTIFY_PROTECTION_VMA, 1, 3);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), 0);
	np_test_settled(test);
}

static void np_neighbours_of_the_region_do_not_matter(struct kunit *test)
{
	struct np_region *region = np_test_region_at(test, 2, 2, NP_TEST_ACCESS);
	struct np_chunk *chunk;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 2, 0), 0);
	chunk = xa_load(&region->chunks, 0);
	KUNIT_EXPECT_EQ(test, chunk->notifier.interval_tree.start, region->start);
	KUNIT_EXPECT_EQ(test, chunk->notifier.interval_tree.last,
			region->start + 2 * PAGE_SIZE - 1);
}

/* --- holds ------------------------------------------------------------------------------------ */

static struct np_hold *np_test_hold(struct kunit *test, struct np_region *region,
				    unsigned int page, unsigned int npages,
				    unsigned int flags)
{
	struct np_hold *hold = np_hold_alloc(region, flags);

	KUNIT_ASSERT_NOT_NULL(test, hold);
	KUNIT_ASSERT_EQ(test, np_region_fault(region, region->base +
					      page * PAGE_SIZE,
					      (u64)npages * PAGE_SIZE, 0, hold,
					      NULL, 0), 0);
	KUNIT_EXPECT_EQ(test, np_hold_pages(hold), npages);
	return hold;
}

static void np_hold_pins_what_is_mapped(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	struct np_stats stats;
	struct page *page;

	hold = np_test_hold(test, region, 0, 2, RDMA_NP_FAULT_WRITE);
	page = np_page_at(test, t->va);
	KUNIT_EXPECT_TRUE(test, folio_maybe_dma_pinned(page_folio(page)));
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), page_to_phys(page));
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), NP_WORD_RIGHTS);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 2);
	KUNIT_EXPECT_EQ(test, stats.holds, 1);
	np_hold_release(hold);
	KUNIT_EXPECT_FALSE(test, folio_maybe_dma_pinned(page_folio(page)));
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 0);
	np_test_settled(test);
}

/* While it is pinned, devices write to it, and somebody may clean it meanwhile. */
static void np_page_held_for_write_is_dirty_afterwards(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct folio *folio;
	struct np_hold *hold;

	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	folio = page_folio(np_page_at(test, t->va));
	folio_clear_dirty(folio);
	np_hold_release(hold);
	KUNIT_EXPECT_TRUE(test, folio_test_dirty(folio));

	/* Also if it is the region that ends first */
	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	folio_clear_dirty(folio);
	np_region_close(region);
	KUNIT_EXPECT_TRUE(test, folio_test_dirty(folio));
	np_hold_release(hold);
}

static void np_held_leaf_outlives_the_mapping(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	phys_addr_t paddr;

	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	paddr = np_write_paddr(region, 0);
	np_test_unmap(t, 0, 4);
	/* Nobody can prove a WRITE by the word, but who holds the page still has it */
	KUNIT_EXPECT_EQ(test, np_word(region, 0), 2 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 2);
	np_test_settled(test);
}

static void np_stale_page_is_refreshed_if_it_is_the_same(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	phys_addr_t paddr;

	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	paddr = np_write_paddr(region, 0);
	/* As after a failed migration: invalidated, but the page stays */
	np_test_invalidate(t, 0, 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	np_hold_release(hold);
	/* The leaf in the write window was not refreshed */
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	np_test_settled(test);
}

static void np_held_page_is_protected_for_all_but_its_holder(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	phys_addr_t paddr;

	hold = np_test_hold(test, region, 0, 2, RDMA_NP_FAULT_WRITE);
	paddr = np_write_paddr(region, 0);
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 0, 2);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	/* It is the same page, so it may be written again */
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	/* Its neighbour's leaf was kept for the hold only */
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 1),
			region->write.absent + PAGE_SIZE);
	np_test_settled(test);
}

/* Who reads a file's page relies on nothing that whoever writes it may do */
static void np_hold_for_reading_is_no_leave_to_write(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *reader, *writer;
	phys_addr_t paddr;

	reader = np_test_hold(test, region, 0, 1, 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	paddr = np_write_paddr(region, 0);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	/* It is cleaned */
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 0, 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);

	/* As long as somebody holds it for writing, too, and no longer */
	writer = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 0, 1);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	np_hold_release(writer);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);

	/* It goes */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	np_test_unmap(t, 0, 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	np_hold_release(reader);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	np_test_settled(test);
}

static void np_fault_waits_for_holds_of_another_page(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	struct np_stats stats;
	phys_addr_t paddr;

	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	paddr = np_write_paddr(region, 0);
	KUNIT_ASSERT_EQ(test, t->va, vm_mmap(NULL, t->va, PAGE_SIZE,
					     PROT_READ | PROT_WRITE, MAP_FIXED |
					     MAP_ANONYMOUS | MAP_PRIVATE, 0));
	np_touch(test, t->va, 1);
	np_touch(test, t->va + PAGE_SIZE, 1);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), -EAGAIN);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	/* It sleeps: 1 s in steps that grow to 8 ms, whatever the machine */
	np_region_stats(region, &stats);
	KUNIT_EXPECT_LT(test, stats.retries, 200);
	/* Who comes along with its neighbour does not wait for it, nor does the neighbour */
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 2, NP_FAULT_PRESENT |
					    NP_FAULT_AROUND), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), RDMA_NP_WORD_READABLE);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0),
			page_to_phys(np_page_at(test, t->va)));
	np_test_settled(test);
}

/* Runs in the fault, after it has looked */
static void np_replace_first_page(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);

	fake->on_split = NULL;
	KUNIT_EXPECT_EQ(fake->test, t->va,
			vm_mmap(NULL, t->va, PAGE_SIZE, PROT_READ | PROT_WRITE,
				MAP_FIXED | MAP_ANONYMOUS | MAP_PRIVATE, 0));
}

/* What it has seen is not the owner's any more. A hold keeps the slot from a merge */
static void np_fault_looks_again_after_an_invalidation(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	struct np_stats stats;
	struct page *old;

	hold = np_test_hold(test, region, 3, 1, 0);
	np_touch(test, t->va, 1);
	old = np_page_at(test, t->va);
	get_page(old);	/* or it might come again */
	t->fake.on_split = np_replace_first_page;
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_GE(test, stats.retries, 1);
	KUNIT_EXPECT_PTR_NE(test, np_page_at(test, t->va), old);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0),
			page_to_phys(np_page_at(test, t->va)));
	np_test_settled(test);
	put_page(old);
	np_hold_release(hold);
}

/*
 * Runs in each attempt, after it has looked: as if somebody took away pages of the
 * mapping faster than two of them can be brought.
 */
static void np_take_away_what_is_not_alone(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);
	unsigned int i, present = 0;
	struct page *page;

	for (i = 0; i < 16; i++) {
		if (get_user_pages_fast_only(t->va + i * PAGE_SIZE, 1, 0,
					     &page) != 1)
			continue;
		put_page(page);
		present++;
	}
	if (present < 2)
		return;
	KUNIT_EXPECT_EQ(fake->test, t->va,
			vm_mmap(NULL, t->va, 16 * PAGE_SIZE,
				PROT_READ | PROT_WRITE, MAP_FIXED |
				MAP_ANONYMOUS | MAP_PRIVATE, 0));
	fake->taken_away++;
}

/* The owner's CPU needs one page at a time, and so does a fault if it must */
static void np_fault_goes_on_while_memory_changes(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_test *t = test->priv;
	struct np_stats stats;
	u64 words[16] = {};
	unsigned int i;

	t->fake.on_split = np_take_away_what_is_not_alone;
	KUNIT_ASSERT_EQ(test, np_region_fault(region, region->base,
					      16 * PAGE_SIZE, RDMA_NP_FAULT_WRITE,
					      NULL, words, ARRAY_SIZE(words)), 0);
	t->fake.on_split = NULL;
	for (i = 0; i < ARRAY_SIZE(words); i++)
		KUNIT_EXPECT_EQ_MSG(test, words[i] & NP_WORD_RIGHTS,
				    NP_WORD_RIGHTS, "page %u", i);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 15), NP_WORD_RIGHTS);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_GE(test, stats.faults_minor, 16);
	np_test_settled(test);
}

/* One page can not be made less: it is there when the first look at it ends too late */
static void np_replace_page_slowly(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);

	fake->on_split = NULL;
	fake->taken_away++;
	msleep(1100);
	KUNIT_EXPECT_EQ(fake->test, t->va,
			vm_mmap(NULL, t->va, PAGE_SIZE, PROT_READ | PROT_WRITE,
				MAP_FIXED | MAP_ANONYMOUS | MAP_PRIVATE, 0));
}

static void np_replace_page_next_time(struct fake_iommu *fake)
{
	fake->on_split = np_replace_page_slowly;
}

/* The first look at two, and then the one at one, takes longer than the deadline */
static void np_take_away_slowly(struct fake_iommu *fake)
{
	np_take_away_what_is_not_alone(fake);
	if (!fake->taken_away)
		return;
	/* The other window is split in the same attempt */
	fake->on_split = np_replace_page_next_time;
	msleep(1100);
}

static void np_fault_asks_for_less_before_it_gives_up(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_test *t = test->priv;

	t->fake.on_split = np_take_away_slowly;
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 2, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, t->fake.taken_away, 2);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), NP_WORD_RIGHTS);
	np_test_settled(test);
}

static void np_hold_gets_its_pages_while_memory_changes(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	struct np_stats stats;

	t->fake.on_split = np_take_away_what_is_not_alone;
	hold = np_test_hold(test, region, 0, 16, RDMA_NP_FAULT_WRITE);
	t->fake.on_split = NULL;
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 16);
	KUNIT_EXPECT_EQ(test, stats.holds, 1);
	np_hold_release(hold);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 0);
	np_test_settled(test);
}

/* Memory changes while more than one page is looked at */
static int np_look_at_one_page(struct hmm_range *range)
{
	if (range->end - range->start > PAGE_SIZE)
		return -EBUSY;
	return hmm_range_fault(range);
}

static void np_hold_in_parts_pins_what_it_counts(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 16);
	struct np_hold *hold;
	struct np_stats stats;
	unsigned int i;

	kunit_activate_static_stub(test, np_hmm_range_fault,
				   np_look_at_one_page);
	/* What one takes too much, or gives back too often, the next one meets */
	for (i = 1; i <= 2; i++) {
		hold = np_test_hold(test, region, 0, 16, RDMA_NP_FAULT_WRITE);
		np_region_stats(region, &stats);
		KUNIT_EXPECT_EQ(test, stats.held, 16);
		KUNIT_EXPECT_EQ(test, stats.holds, i);
		np_hold_release(hold);
		np_region_stats(region, &stats);
		KUNIT_EXPECT_EQ(test, stats.held, 0);
	}
	kunit_deactivate_static_stub(test, np_hmm_range_fault);
	np_test_settled(test);
}

/* What is seen of more than one page is not what was pinned */
static int np_look_at_others(struct hmm_range *range)
{
	int ret = hmm_range_fault(range);

	if (!ret && range->end - range->start > PAGE_SIZE)
		swap(range->hmm_pfns[0], range->hmm_pfns[1]);
	return ret;
}

static void np_hold_asks_for_less_while_pages_are_replaced(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_hold *hold;
	struct np_stats stats;

	kunit_activate_static_stub(test, np_hmm_range_fault, np_look_at_others);
	hold = np_test_hold(test, region, 0, 4, RDMA_NP_FAULT_WRITE);
	kunit_deactivate_static_stub(test, np_hmm_range_fault);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 4);
	np_hold_release(hold);
	np_test_settled(test);
}

static void np_page_stays_until_its_last_hold(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *a, *b;
	phys_addr_t paddr;

	a = np_test_hold(test, region, 0, 2, RDMA_NP_FAULT_WRITE);
	b = np_test_hold(test, region, 0, 1, 0);
	paddr = np_read_paddr(region, 0);
	np_test_unmap(t, 0, 4);
	np_hold_release(a);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 1),
			region->read.absent + PAGE_SIZE);
	np_hold_release(b);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	np_test_settled(test);
}

/* Reclaim asks while it is held, and for nothing; then it can take the page */
static void np_page_is_in_use_as_long_as_it_is_held(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	DECLARE_BITMAP(pages, NP_SLOT_PAGES) = {};
	struct np_hold *hold;

	hold = np_test_hold(test, region, 1, 1, 0);
	KUNIT_EXPECT_TRUE(test, np_test_ask(region, 1, true));
	/* What the worker does now, or has done */
	__set_bit(((region->start >> PAGE_SHIFT) + 1) % NP_SLOT_PAGES, pages);
	np_region_age(region, ALIGN_DOWN(region->start, NP_SLOT_SIZE), pages);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_TRUE(test, np_test_ask(region, 1, false));
	np_hold_release(hold);
	np_test_age(test, region, 1);
	np_test_settled(test);
}

/* A count that began anew would give the page away under those that it has forgotten */
static void np_page_has_as_many_holds_as_can_be_counted(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold, *more;
	phys_addr_t paddr;
	u16 *count;

	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	paddr = np_write_paddr(region, 0);
	count = &np_test_slot(region, t->va)->holds->count[0];
	*count = U16_MAX;
	more = np_hold_alloc(region, RDMA_NP_FAULT_WRITE);
	KUNIT_ASSERT_NOT_NULL(test, more);
	/* It is resident, so there is nothing else to do for it */
	KUNIT_EXPECT_EQ(test, np_region_fault(region, region->base, PAGE_SIZE, 0,
					      more, NULL, 0), -EAGAIN);
	KUNIT_EXPECT_EQ(test, *count, U16_MAX);
	KUNIT_EXPECT_EQ(test, np_hold_pages(more), 0);
	/* Who needs no hold needs no count */
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_invalidate(t, 0, 1);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), paddr);
	*count = 1;
	np_hold_release(more);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	np_test_settled(test);
}

static void np_end_of_region_ends_holds(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	struct page *page;

	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	page = np_page_at(test, t->va);
	np_region_close(region);
	KUNIT_EXPECT_FALSE(test, folio_maybe_dma_pinned(page_folio(page)));
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	np_test_settled(test);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), -ENXIO);
	KUNIT_EXPECT_EQ(test, np_region_fault(region, region->base, PAGE_SIZE, 0,
					      hold, NULL, 0), -ENXIO);
	KUNIT_EXPECT_FALSE(test, folio_maybe_dma_pinned(page_folio(page)));
	np_hold_release(hold);
	t->region = NULL;
	np_region_put(region);
}

/*
 * Who is about to release a hold has its pins already, and takes his time: the owner
 * does not wait for him.
 */
static void np_end_of_region_overtakes_a_release(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	LIST_HEAD(pins);

	hold = np_test_hold(test, region, 0, 2, RDMA_NP_FAULT_WRITE);
	np_test_invalidate(t, 1, 1);
	/* The first half of np_hold_release() */
	KUNIT_ASSERT_TRUE(test, np_region_enter(region));
	list_splice_init(&hold->pins, &pins);
	np_region_close(region);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 0), region->write.absent);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 1),
			region->write.absent + PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), 0);
	KUNIT_EXPECT_FALSE(test, xa_empty(&region->chunks));
	/* The second half */
	list_splice(&pins, &hold->pins);
	np_hold_release(hold);
	np_region_leave(region);
	KUNIT_EXPECT_TRUE(test, xa_empty(&region->chunks));
	np_test_settled(test);
	t->region = NULL;
	np_region_put(region);
}

/* --- local holds ------------------------------------------------------------------------------ */

static struct np_local *np_test_local(struct np_region *region, u64 offset,
				      u64 len, unsigned int flags)
{
	u64 addr;
	u32 lkey;

	return np_local_hold(region, region->base + offset, len, flags, &addr,
			     &lkey);
}

static u64 np_test_charged(void)
{
	return atomic64_read(&current->mm->pinned_vm);
}

/* Whole pages, however little of them; each hold for itself, until its own end */
static void np_local_hold_is_charged_until_it_ends(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test *t = test->priv;
	struct np_local *a, *b;
	struct np_stats stats;

	KUNIT_ASSERT_EQ(test, np_test_charged(), 0);
	a = np_test_local(region, PAGE_SIZE - 1, 2, 0);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, a);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 2);
	b = np_test_local(region, PAGE_SIZE, 3 * PAGE_SIZE, RDMA_NP_FAULT_WRITE);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, b);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 5);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, 4);
	np_local_release(a);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 3);
	KUNIT_EXPECT_TRUE(test, np_local_is_needed(b));

	/* The region's end ends the pins and the keys, but the hold is still there */
	KUNIT_EXPECT_EQ(test, t->live_keys, 2);
	np_region_close(region);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_FALSE(test, np_local_is_needed(b));
	KUNIT_EXPECT_EQ(test, np_test_charged(), 3);
	np_local_release(b);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 0);
	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_local(region, 0, 1, 0)), -ENXIO);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 0);
}

/* Neither memory nor a key for longer than the attempt takes */
static void np_test_no_local(struct kunit *test, struct np_region *region,
			     u64 offset, u64 len, unsigned int flags, int err)
{
	u64 charged = np_test_charged();
	struct np_stats stats;

	KUNIT_EXPECT_EQ(test, PTR_ERR(np_test_local(region, offset, len, flags)),
			err);
	KUNIT_EXPECT_EQ(test, np_test_charged(), charged);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.held, charged);
}

static void np_local_hold_that_fails_costs_nothing(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	struct np_test *t = test->priv;
	struct np_local *local;

	np_test_unmap(t, 6, 1);
	np_test_no_local(test, region, 0, 0, 0, -ERANGE);
	np_test_no_local(test, region, 8 * PAGE_SIZE - 1, 2, 0, -ERANGE);
	t->fail_key = 1;
	np_test_no_local(test, region, 0, PAGE_SIZE, 0, -ENOMEM);
	t->fail_key = 0;
	/* Some pages are there, and then comes a hole */
	np_test_no_local(test, region, 4 * PAGE_SIZE, 3 * PAGE_SIZE, 0, -EFAULT);
	local = np_test_local(region, 0, PAGE_SIZE, 0);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, local);
	np_test_no_local(test, region, 4 * PAGE_SIZE, 3 * PAGE_SIZE,
			 RDMA_NP_FAULT_WRITE, -EFAULT);
	np_local_release(local);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 0);
}

static void np_local_hold_beyond_the_limit_charges_nothing(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 8);
	const struct cred *old;
	struct np_local *local;
	struct cred *new;

	/* Of this test alone, whose thread ends with it */
	current->signal->rlim[RLIMIT_MEMLOCK].rlim_cur = 4 * PAGE_SIZE;
	new = prepare_creds();
	KUNIT_ASSERT_NOT_NULL(test, new);
	cap_lower(new->cap_effective, CAP_IPC_LOCK);
	old = override_creds(new);
	np_test_no_local(test, region, 0, 5 * PAGE_SIZE, 0, -ENOMEM);
	local = np_test_local(region, 0, 4 * PAGE_SIZE, 0);
	KUNIT_EXPECT_NOT_ERR_OR_NULL(test, local);
	np_test_no_local(test, region, 5 * PAGE_SIZE, 1, 0, -ENOMEM);
	/* Also what is held already: each hold may be the last one */
	np_test_no_local(test, region, 0, 1, 0, -ENOMEM);
	if (!IS_ERR(local))
		np_local_release(local);
	local = np_test_local(region, 4 * PAGE_SIZE, 4 * PAGE_SIZE, 0);
	KUNIT_EXPECT_NOT_ERR_OR_NULL(test, local);
	revert_creds(old);
	put_cred(new);

	/* Who may lock as much as he likes is charged all the same */
	KUNIT_EXPECT_EQ(test, np_test_charged(), 4);
	if (!IS_ERR(local))
		np_local_release(local);
	local = np_test_local(region, 0, 8 * PAGE_SIZE, 0);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, local);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 8);
	np_local_release(local);
	KUNIT_EXPECT_EQ(test, np_test_charged(), 0);
}

/* --- huge pages ------------------------------------------------------------------------------- */

/* Region of @npages pages, @first pages behind the beginning of huge pages */
static struct np_region *np_test_huge(struct kunit *test, unsigned int first,
				      unsigned int npages)
{
	struct np_test *t = test->priv;
	unsigned int i;

	np_test_map(test, PROT_READ | PROT_WRITE);
	mmap_write_lock(current->mm);
	vm_flags_set(vma_lookup(current->mm, t->va), VM_HUGEPAGE);
	mmap_write_unlock(current->mm);
	for (i = 0; i < 3; i++) {
		unsigned long va = t->va + i * NP_SLOT_SIZE;

		np_touch(test, va, i);
		KUNIT_ASSERT_GE(test, compound_order(np_page_at(test, va)),
				NP_SLOT_ORDER);
	}
	return np_test_region_at(test, first, npages, NP_TEST_ACCESS);
}

static bool np_test_is_whole(struct np_test *t, const struct np_window *win,
			     unsigned int slot)
{
	return !fake_slot(&t->fake, win->iova + slot * NP_SLOT_SIZE)->leaf;
}

static u64 np_test_huge_leaves(struct np_region *region)
{
	struct np_stats stats;

	np_region_stats(region, &stats);
	return stats.huge;
}

/* All pages of the first slot have this word */
static void np_test_words(struct kunit *test, struct np_region *region, u64 word)
{
	unsigned int i, other = 0;

	for (i = 0; i < NP_SLOT_PAGES; i++)
		other += np_word(region, i) != word;
	KUNIT_EXPECT_EQ_MSG(test, other, 0, "word is not %llx", word);
	np_test_settled(test);
}

static void np_huge_page_is_one_leaf(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, 2 * NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	phys_addr_t paddr = page_to_phys(np_page_at(test, t->va));
	struct np_stats stats;
	struct folio *folio;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 7, 1, 0), 0);
	np_test_words(test, region, NP_WORD_GENERATION | RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), paddr);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 511), paddr + 511 * PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, np_rights(region, 512), 0);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_EQ(test, stats.huge, 1);
	KUNIT_EXPECT_EQ(test, stats.resident, 512);
	KUNIT_EXPECT_EQ(test, stats.faults_minor, 512);
	KUNIT_EXPECT_EQ(test, stats.faults_noop, 0);

	folio = page_folio(pfn_to_page(PHYS_PFN(paddr)));
	folio_lock(folio);
	folio_clear_dirty_for_io(folio);
	folio_unlock(folio);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 9, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_words(test, region, 2 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_write_paddr(region, 511), paddr + 511 * PAGE_SIZE);
	KUNIT_EXPECT_TRUE(test, PageDirty(pfn_to_page(PHYS_PFN(paddr))));
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	/* Of the residency table's page */
	KUNIT_EXPECT_EQ(test, t->fake.splits, 1);
	KUNIT_EXPECT_TRUE(test, np_test_is_whole(t, &region->read, 0));
	KUNIT_EXPECT_TRUE(test, np_test_is_whole(t, &region->write, 0));
}

static void np_look_at_count_of_merges(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);

	KUNIT_EXPECT_EQ(fake->test, np_test_slot(t->region, t->va)->merges, 0);
}

/* Who knows the count before he splits, and no lock, would not split what is a table yet */
static void np_merge_counts_when_the_tables_are_gone(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	struct np_hold *hold;

	hold = np_test_hold(test, region, 3, 1, RDMA_NP_FAULT_WRITE);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
	t->fake.on_merge = np_look_at_count_of_merges;
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, NP_SLOT_PAGES, RDMA_NP_FAULT_WRITE), 0);
	t->fake.on_merge = NULL;
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	KUNIT_EXPECT_EQ(test, t->fake.merges, 2);
	KUNIT_EXPECT_EQ(test, np_test_slot(region, t->va)->merges, 1);
}

/* A split allocates, and the notifier may not */
static void np_huge_leaf_goes_as_a_whole(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, 2 * NP_SLOT_PAGES);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1024, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 2);
	np_test_invalidate(t, 3, 1);
	np_test_words(test, region, 2 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 512), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_invalidate(t, 512, 512);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
	np_test_settled(test);
}

static void np_huge_leaf_is_protected_as_a_whole(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_event(t, MMU_NOTIFY_PROTECTION_PAGE, 100, 1);
	np_test_words(test, region, 2 * NP_WORD_GENERATION | RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_words(test, region, 3 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
}

static void np_huge_leaf_is_aged_as_a_whole(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_age_other_page(&t->fake);
	np_test_words(test, region, 2 * NP_WORD_GENERATION);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
}

static void np_huge_leaf_that_was_asked_about_comes_when_it_is_used(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_age(test, region, 0);
	np_test_words(test, region, 2 * NP_WORD_GENERATION);
	/* Of neighbours in the next slot; the first page is not among them */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 1, 4, NP_FAULT_AROUND |
					    NP_FAULT_PRESENT), 0);
	np_test_words(test, region, 2 * NP_WORD_GENERATION);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	np_test_words(test, region, 3 * NP_WORD_GENERATION | NP_WORD_RIGHTS);
}

/* What is pinned stays when its neighbours go */
static void np_hold_cuts_a_huge_leaf(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	phys_addr_t paddr;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, RDMA_NP_FAULT_WRITE), 0);
	/* For read: the write window's leaf has to be cut, too */
	hold = np_test_hold(test, region, 5, 1, 0);
	np_test_words(test, region, NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
	KUNIT_EXPECT_FALSE(test, np_test_is_whole(t, &region->read, 0));
	KUNIT_EXPECT_FALSE(test, np_test_is_whole(t, &region->write, 0));
	paddr = np_read_paddr(region, 5);
	np_test_invalidate(t, 4, 3);
	KUNIT_EXPECT_EQ(test, np_rights(region, 3), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 6), 0);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 5), paddr);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);

	/* As long as it is there, single pages come back */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 6, 1, 0), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 6), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_rights(region, 4), 0);
	np_test_settled(test);
	np_hold_release(hold);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 5), region->read.absent +
			5 * PAGE_SIZE);
	np_test_settled(test);

	/* What was resident has not changed */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 4, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	KUNIT_EXPECT_EQ(test, np_word(region, 3),
			NP_WORD_GENERATION | NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 5), NP_WORD_RIGHTS);
	KUNIT_EXPECT_TRUE(test, np_test_is_whole(t, &region->write, 0));
	np_test_settled(test);
}

/* Pages of the owner's that are not the region's stay out of it */
static void np_huge_leaf_lies_within_the_region(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 1, 3 * NP_SLOT_PAGES - 2);
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 3 * NP_SLOT_PAGES - 2, 0),
			0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 1);
	KUNIT_EXPECT_FALSE(test, np_test_is_whole(t, &region->read, 0));
	KUNIT_EXPECT_TRUE(test, np_test_is_whole(t, &region->read, 1));
	KUNIT_EXPECT_FALSE(test, np_test_is_whole(t, &region->read, 2));
	np_test_settled(test);
}

static void np_read_other_page(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);

	fake->on_split = NULL;
	KUNIT_EXPECT_EQ(fake->test, np_test_fault(t->region, 8, 1, 0), 0);
	KUNIT_EXPECT_EQ(fake->test, np_test_huge_leaves(t->region), 1);
}

static void np_write_other_page(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);

	fake->on_split = NULL;
	KUNIT_EXPECT_EQ(fake->test,
			np_test_fault(t->region, 8, 1, RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(fake->test, np_test_huge_leaves(t->region), 1);
}

static void np_let_one_split_pass(struct fake_iommu *fake)
{
	fake->on_split = np_write_other_page;
}

/* The tables that a hold has just made, of both windows, give way to large leaves */
static void np_hold_for_write_notices_new_huge_leaves(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	struct np_hold *hold;

	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	np_test_invalidate(t, 0, 1);
	t->fake.on_split = np_let_one_split_pass;
	hold = np_test_hold(test, region, 0, 1, RDMA_NP_FAULT_WRITE);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_invalidate(t, 1, 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), NP_WORD_RIGHTS);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), 0);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_settled(test);
	np_hold_release(hold);
}

/* The same of one window, when the other one's has not been split */
static void np_hold_notices_a_new_huge_leaf(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	struct np_hold *hold;
	struct np_stats stats;

	/* So that only the slot's own splits are seen */
	KUNIT_ASSERT_EQ(test, np_test_fault(region, 0, 1, 0), 0);
	np_test_invalidate(t, 0, 1);
	t->fake.on_split = np_read_other_page;
	hold = np_test_hold(test, region, 0, 1, 0);
	np_region_stats(region, &stats);
	KUNIT_EXPECT_GE(test, stats.retries, 1);
	KUNIT_EXPECT_EQ(test, stats.huge, 0);
	KUNIT_EXPECT_EQ(test, t->fake.refused, 0);
	np_test_invalidate(t, 1, 1);
	KUNIT_EXPECT_EQ(test, np_rights(region, 0), RDMA_NP_WORD_READABLE);
	KUNIT_EXPECT_EQ(test, np_rights(region, 1), 0);
	KUNIT_EXPECT_EQ(test, np_rights(region, 2), RDMA_NP_WORD_READABLE);
	np_test_settled(test);
	np_hold_release(hold);
}

static void np_failed_huge_leaf_is_undone(struct kunit *test)
{
	struct np_region *region = np_test_huge(test, 0, NP_SLOT_PAGES);
	struct np_test *t = test->priv;

	t->fake.read_pages_error = -EINVAL;
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 2, RDMA_NP_FAULT_WRITE), -EINVAL);
	np_test_words(test, region, 0);
	KUNIT_EXPECT_EQ(test, np_test_huge_leaves(region), 0);
}

/* --- refusals ----------------------------------------------------------------------------------- */

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
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SZ_1T),
			-ENOSPC);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SIZE_MAX),
			-ENOSPC);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SZ_1T / 2),
			0);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SZ_1T / 4),
			-ENOSPC);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain,
						  SZ_1T / 4 - NP_SLOT_SIZE), 0);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain,
						  NP_SLOT_SIZE), -ENOSPC);
	np_device_give_iova(domain, SZ_1T / 2);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SZ_1T / 2),
			0);
	np_device_give_iova(domain, SZ_1T / 2);
	np_device_give_iova(domain, SZ_1T / 4 - NP_SLOT_SIZE);

	/* What the device cannot address is nobody's */
	mask = DMA_BIT_MASK(32);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain,
						  SZ_4G / 4 * 3), -ENOSPC);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(t->ibdev, domain, SZ_4G / 2),
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
						  SZ_1T / 2), 0);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(other, &t->fake.domain,
						  SZ_1T / 2), -ENOSPC);
	/* Those of another domain are others */
	KUNIT_EXPECT_EQ(test, np_device_take_iova(other, &another, SZ_1T / 2),
			0);
	np_device_give_iova(&another, SZ_1T / 2);
	np_device_give_iova(&t->fake.domain, SZ_1T / 2);
	KUNIT_EXPECT_EQ(test, np_device_take_iova(other, &t->fake.domain,
						  SZ_1T / 2), 0);
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
	struct np_told_user user = {};
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
	KUNIT_EXPECT_FALSE(test, t->npdev.told_relaxed);

	/* PCIe may let a read pass a write before it: then the device cannot know */
	kunit_activate_static_stub(test, np_device_is_relaxed, np_test_is_relaxed);
	*driver = RDMA_NP_READ_IN_ORDER;
	KUNIT_EXPECT_EQ(test, np_read_order_of(&t->npdev, NP_READ_ORDER_AUTO),
			RDMA_NP_READ_UNKNOWN);
	KUNIT_EXPECT_TRUE(test, t->npdev.told_relaxed);
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

/* --- peers ------------------------------------------------------------------------------------ */

struct np_test_peer {
	struct np_fake_peer fake;
	struct np_test *t;
	struct np_region *region;
	struct completion answered;
	struct np_msg answer;
	struct page *page;
	bool held;	/* when the QP was moved to the error state */
	u64 tid;
};

static int np_test_peer_send(struct np_port *port, struct ib_ah *ah,
			     u16 pkey_index, struct np_peer *peer,
			     const struct np_msg *msg)
{
	struct np_test_peer *t = container_of(port, struct np_test_peer,
					      fake.port);

	if (!peer)
		rdma_destroy_ah(ah, RDMA_DESTROY_AH_SLEEPABLE);
	if (!msg->answer)
		return 0;
	t->answer = *msg;
	complete(&t->answered);
	return 0;
}

/* The regions' client was registered just before the protocol's. */
static struct ib_client np_regions_client(void)
{
	return (struct ib_client){ .client_id = np_client.client_id - 1 };
}

static void np_test_peer_exit(void *data)
{
	struct ib_client client = np_regions_client();
	struct np_test_peer *peer = data;

	/* A FAULT is over a little later than its answer */
	wait_event(peer->fake.hca.idle, !READ_ONCE(peer->fake.hca.serving));
	xa_erase(&peer->fake.ibdev->client_data, client.client_id);
	peer->t->npdev.ibdev = peer->t->ibdev;
	np_fake_peer_exit(peer->t->fake.test, &peer->fake);
}

/* A peer with a QP in @pd, on the device of the regions */
static struct np_test_peer *np_test_peer(struct kunit *test, struct ib_pd *pd)
{
	struct ib_client client = np_regions_client();
	struct np_test *t = test->priv;
	struct np_test_peer *peer;

	peer = kunit_kzalloc(test, sizeof(*peer), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, peer);
	init_completion(&peer->answered);
	peer->t = t;
	np_fake_peer_init(test, &peer->fake);
	peer->fake.port.send = np_test_peer_send;
	peer->fake.peer.pd = pd;
	t->npdev.ibdev = peer->fake.ibdev;
	ib_set_client_data(peer->fake.ibdev, &client, &t->npdev);
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, np_test_peer_exit,
							   peer));
	return peer;
}

/* What the peer is answered, or somebody at @lid who says that he is the peer */
static const struct np_msg *np_test_asks(struct kunit *test,
					 struct np_test_peer *peer,
					 struct np_msg *msg, u16 lid)
{
	msg->src_qpn = peer->fake.peer.remote_qpn;
	msg->dst_qpn = peer->fake.peer.qpn;
	msg->tid = ++peer->tid;
	if (msg->type != NP_MSG_RESOLVE)
		msg->secret = peer->fake.peer.our_secret;
	np_fake_arrives(&peer->fake.port, msg, false, lid);
	KUNIT_ASSERT_NE(test, 0, wait_for_completion_timeout(&peer->answered,
							     30 * HZ));
	return &peer->answer;
}

/* As np_test_asks(), and the answer is to be just this status */
static noinline_for_stack void np_test_refused(struct kunit *test,
					       struct np_test_peer *peer,
					       struct np_msg *msg, u16 lid,
					       u8 status)
{
	const struct np_msg *answer = np_test_asks(test, peer, msg, lid);

	np_fake_expect(test, msg, answer, status);
}

static noinline_for_stack void np_test_resolve(struct kunit *test,
					       struct np_test_peer *peer,
					       u32 rkey, u16 lid, u8 status)
{
	struct np_msg msg = { .type = NP_MSG_RESOLVE, .rkey = rkey };

	np_test_refused(test, peer, &msg, lid, status);
}

static noinline_for_stack void np_test_forget(struct kunit *test,
					      struct np_test_peer *peer, u64 id)
{
	struct np_msg msg = {
		.type = NP_MSG_FORGET, .forget.region_id = id,
		.forget.seq = U64_MAX,
	};

	np_test_refused(test, peer, &msg, 0, RDMA_NP_OK);
}

static noinline_for_stack void np_test_release(struct kunit *test,
					       struct np_test_peer *peer,
					       u64 id, u16 lid, u8 status)
{
	struct np_msg msg = { .type = NP_MSG_RELEASE, .hold_id = id };

	np_test_refused(test, peer, &msg, lid, status);
}

/* Of the first page */
static struct np_msg np_test_fault_msg(struct np_region *region, u64 id,
				       unsigned int flags)
{
	return (struct np_msg){
		.type = NP_MSG_FAULT, .fault.region_id = id,
		.fault.flags = flags, .fault.nr_ranges = 1,
		.fault.ranges[0] = { region->base, PAGE_SIZE },
	};
}

/* As if the peer had resolved it */
static void np_test_grant(struct kunit *test, struct np_test_peer *peer,
			  struct np_region *region)
{
	mutex_lock(&peer->fake.peer.ctl);
	KUNIT_EXPECT_EQ(test, np_serve_alloc(&peer->fake.peer), 0);
	KUNIT_EXPECT_NOT_ERR_OR_NULL(test,
				     np_pgrant_make(&peer->fake.peer, region));
	mutex_unlock(&peer->fake.peer.ctl);
}

/* One more region, of the first page, behind the one of np_test_region() */
static struct np_region *np_test_more(struct kunit *test, struct ib_pd *pd,
				      u32 access)
{
	struct np_test *t = test->priv;
	struct np_region *region;

	refcount_inc(&t->npdev.users);
	region = np_region_create(&t->npdev, pd, NULL, &t->fake.domain, t->va,
				  PAGE_SIZE, 0x1000, access);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, region);
	return region;
}

static void np_test_end(struct np_region *region)
{
	np_region_close(region);
	np_region_put(region);
}

static void np_test_peer_failed(struct np_fake_peer *fake)
{
	struct np_test_peer *t = container_of(fake, struct np_test_peer, fake);

	t->held = atomic64_read(&t->region->count.held) &&
		  folio_maybe_dma_pinned(page_folio(t->page));
}

/* What a peer may reach by a hold stays until it cannot reach anything. */
static void np_hold_that_expires_ends_its_qp_and_then_the_pin(struct kunit *test)
{
	unsigned int hold_ms = np_hold_ms;
	const struct np_msg *answer;
	struct np_region *region;
	struct np_test_peer *t;
	struct np_peer *peer;
	struct np_msg msg;

	region = np_test_region(test, 4);
	np_touch(test, ((struct np_test *)test->priv)->va, 1);
	t = np_test_peer(test, &((struct np_test *)test->priv)->pd);
	t->region = region;
	t->page = np_page_at(test, ((struct np_test *)test->priv)->va);
	t->fake.failed = np_test_peer_failed;
	peer = &t->fake.peer;
	np_test_grant(test, t, region);

	np_hold_ms = 1;
	msg = np_test_fault_msg(region, np_region_id(region),
				RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_WRITE);
	answer = np_test_asks(test, t, &msg, 0);
	KUNIT_EXPECT_EQ(test, answer->status, RDMA_NP_OK);
	KUNIT_EXPECT_NE(test, answer->faulted.hold_id, 0);
	KUNIT_EXPECT_NE(test, 0, wait_for_completion_timeout(&peer->gone,
							     30 * HZ));
	np_hold_ms = hold_ms;
	KUNIT_EXPECT_TRUE(test, t->held);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count.held), 0);
	KUNIT_EXPECT_FALSE(test, folio_maybe_dma_pinned(page_folio(t->page)));
}

/* --- keys --------------------------------------------------------------------------------- */

/* The driver's part of it */
static void np_test_key(struct kunit *test, u32 rkey, u64 addr, u64 length,
			int access)
{
	struct np_test *t = test->priv;
	struct fake_key *key;

	KUNIT_ASSERT_GE(test, rkey, 1);
	KUNIT_ASSERT_LE(test, rkey, t->nr_keys);
	key = t->keys[rkey - 1];
	KUNIT_ASSERT_NOT_NULL(test, key);
	KUNIT_EXPECT_EQ(test, key->addr, addr);
	KUNIT_EXPECT_EQ(test, key->length, length);
	KUNIT_EXPECT_EQ(test, key->access, access);
	KUNIT_EXPECT_PTR_EQ(test, key->mr.pd, &t->pd);
}

static void np_keys_are_made_once_for_all_peers(struct kunit *test)
{
	struct np_region *region = np_test_region_at(test, 3, 600, NP_TEST_ACCESS);
	struct np_resolve first = {}, again = {};
	struct np_test *t = test->priv;

	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &first), 0);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	KUNIT_EXPECT_EQ(test, atomic_read(&t->pd.usecnt), 3);
	np_test_key(test, first.table_key, first.table_addr, 600 * sizeof(u64),
		    IB_ACCESS_REMOTE_READ);
	np_test_key(test, first.read_key, first.read_addr, region->length,
		    IB_ACCESS_REMOTE_READ);
	np_test_key(test, first.write_key, first.write_addr, region->length,
		    IB_ACCESS_LOCAL_WRITE | NP_ACCESS_REMOTE_CHANGE);
	KUNIT_EXPECT_EQ(test, np_region_resolve(region, &again), 0);
	KUNIT_EXPECT_MEMEQ(test, &again, &first, sizeof(first));
	KUNIT_EXPECT_EQ(test, t->nr_keys, 3);
	KUNIT_EXPECT_EQ(test, atomic_read(&t->pd.usecnt), 3);
}

static void np_keys_have_the_rights_of_the_region(struct kunit *test)
{
	struct np_region *region, *more;
	struct np_test *t = test->priv;
	struct np_resolve out = {};

	region = np_test_region_at(test, 0, 1, IB_ACCESS_LOCAL_WRITE |
				   IB_ACCESS_UNPINNED);
	KUNIT_EXPECT_EQ(test, np_region_resolve(region, &out), -EPERM);
	KUNIT_EXPECT_EQ(test, t->nr_keys, 0);

	more = np_test_more(test, &t->pd, IB_ACCESS_LOCAL_WRITE |
			    IB_ACCESS_REMOTE_READ | IB_ACCESS_UNPINNED);
	KUNIT_EXPECT_EQ(test, np_region_resolve(more, &out), 0);
	KUNIT_EXPECT_NE(test, out.read_key, 0);
	KUNIT_EXPECT_EQ(test, out.write_key, 0);
	KUNIT_EXPECT_EQ(test, t->live_keys, 2);
	np_test_end(more);

	out = (struct np_resolve){};
	more = np_test_more(test, &t->pd, IB_ACCESS_LOCAL_WRITE |
			    IB_ACCESS_REMOTE_WRITE | IB_ACCESS_UNPINNED);
	KUNIT_EXPECT_EQ(test, np_region_resolve(more, &out), 0);
	KUNIT_EXPECT_EQ(test, out.read_key, 0);
	np_test_key(test, out.table_key, out.table_addr, sizeof(u64),
		    IB_ACCESS_REMOTE_READ);
	np_test_key(test, out.write_key, out.write_addr, PAGE_SIZE,
		    IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE);
	np_test_end(more);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
}

/* All or none */
static void np_key_that_cannot_be_made_leaves_no_other(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_resolve out = {}, none = {};
	struct np_test *t = test->priv;
	unsigned int i;

	for (i = 1; i <= 3; i++) {
		t->fail_key = t->nr_keys + i;
		KUNIT_EXPECT_EQ(test, np_region_resolve(region, &out), -ENOMEM);
		KUNIT_EXPECT_EQ(test, t->live_keys, 0);
		KUNIT_EXPECT_EQ(test, atomic_read(&t->pd.usecnt), 0);
		KUNIT_EXPECT_MEMEQ(test, &out, &none, sizeof(none));
	}
	t->fail_key = 0;
	KUNIT_EXPECT_EQ(test, np_region_resolve(region, &out), 0);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
}

/* Also if it is for a peer, which is granted the keys before they are made */
static void np_resolve_that_fails_leaves_no_key(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_msg msg = { .type = NP_MSG_RESOLVE, .rkey = 7 };
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct np_grant other = {};
	unsigned int i;

	KUNIT_ASSERT_EQ(test, np_name_take(&t->npdev, 7, region), 0);
	for (i = 2; i <= 3; i++) {
		t->fail_key = t->nr_keys + i;
		np_test_resolve(test, peer, 7, 0, RDMA_NP_NOMEM);
		KUNIT_EXPECT_EQ(test, t->live_keys, 0);
		KUNIT_EXPECT_EQ(test, atomic_read(&t->pd.usecnt), 0);
	}
	/* Another one's grant makes no difference */
	KUNIT_EXPECT_EQ(test, np_region_grant(region, &other), 0);
	t->fail_key = t->nr_keys + 2;
	np_test_resolve(test, peer, 7, 0, RDMA_NP_NOMEM);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	np_region_ungrant(&other);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_grants, 0);

	t->fail_key = 0;
	KUNIT_EXPECT_EQ(test, np_test_asks(test, peer, &msg, 0)->status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_grants, 1);
	xa_destroy(&t->npdev.rkeys);
}

static void np_keys_that_nobody_was_granted_end_with_the_region(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_grant grant = {};
	struct np_resolve out;

	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &out), 0);
	/* Granted, and taken back, once */
	KUNIT_ASSERT_EQ(test, np_region_grant(region, &grant), 0);
	KUNIT_EXPECT_EQ(test, list_count_nodes(&region->grants), 1);
	np_region_ungrant(&grant);
	np_region_ungrant(&grant);
	KUNIT_EXPECT_TRUE(test, list_empty(&region->grants));
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	/* The keys' and ours */
	KUNIT_EXPECT_EQ(test, kref_read(&region->ref), 4);

	np_region_close(region);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_EQ(test, atomic_read(&t->pd.usecnt), 0);
	KUNIT_EXPECT_EQ(test, kref_read(&region->ref), 1);
	/* And nobody is granted any more */
	KUNIT_EXPECT_EQ(test, np_region_resolve(region, &out), -ENXIO);
	KUNIT_EXPECT_EQ(test, t->nr_keys, 3);
	KUNIT_EXPECT_EQ(test, np_region_grant(region, &grant), -ENXIO);
	KUNIT_EXPECT_TRUE(test, list_empty(&region->grants));
	KUNIT_EXPECT_NULL(test, grant.region);
	KUNIT_EXPECT_EQ(test, kref_read(&region->ref), 1);
}

/* Of all regions of an owner together, whose memory they take */
static void np_grants_of_an_owner_are_bounded(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4), *more;
	unsigned int bound = np_owner_max_grants;
	struct np_grant grant[3] = {};
	struct np_test *t = test->priv;

	more = np_test_more(test, &t->pd, NP_TEST_ACCESS);
	KUNIT_ASSERT_EQ(test, np_region_grant(region, &grant[0]), 0);
	np_owner_max_grants = 2;
	KUNIT_EXPECT_EQ(test, np_region_grant(more, &grant[1]), 0);
	KUNIT_EXPECT_EQ(test, np_region_grant(more, &grant[2]), -EBUSY);
	KUNIT_EXPECT_NULL(test, grant[2].region);
	KUNIT_EXPECT_EQ(test, np_region_grant(region, &grant[2]), -EBUSY);
	/* One makes room, of whichever region */
	np_region_ungrant(&grant[0]);
	KUNIT_EXPECT_EQ(test, np_region_grant(more, &grant[2]), 0);
	np_owner_max_grants = bound;
	np_region_ungrant(&grant[1]);
	np_region_ungrant(&grant[2]);
	np_test_end(more);
}

/* A region that is kept for good is freed all the same, so that nothing leaks here */
static void np_test_unleak(struct np_test *t, struct np_region *region)
{
	unsigned int i;

	region->leaked = false;
	refcount_inc(&t->npdev.users);
	t->keep_keys = false;
	for (i = 0; i < t->nr_keys; i++)
		if (t->keys[i])
			fake_dereg_mr(&t->keys[i]->mr, NULL);
}

/* Sick firmware may let keys be: what they reach stays, and the device can go */
static void np_device_does_not_wait_for_keys_that_stay(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_resolve out;

	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &out), 0);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 2);
	t->keep_keys = true;
	np_region_close(region);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
	/* The umems' and ours: the windows stay */
	KUNIT_EXPECT_EQ(test, kref_read(&region->ref), 4);
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	np_test_unleak(t, region);
	KUNIT_EXPECT_EQ(test, kref_read(&region->ref), 1);
}

/* Nor for the region of a public MR that the driver keeps */
static void np_device_does_not_wait_for_an_orphan(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;

	np_region_orphan(region);
	KUNIT_EXPECT_EQ(test, refcount_read(&t->npdev.users), 1);
	KUNIT_EXPECT_TRUE(test, np_region_is_gone(region));
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), -ENXIO);
	np_test_unleak(t, region);
}

static void np_keys_of_a_dead_region_stay_for_who_has_them(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *a = np_test_peer(test, &t->pd);
	struct np_test_peer *b = np_test_peer(test, &t->pd);
	u64 id = np_region_id(region);
	struct np_resolve out;

	np_test_grant(test, a, region);
	np_test_grant(test, b, region);
	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &out), 0);
	np_region_close(region);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	KUNIT_EXPECT_EQ(test, a->fake.peer.nr_dead, 1);
	KUNIT_EXPECT_EQ(test, b->fake.peer.nr_dead, 1);
	/* Which are no use: the windows show stand-ins, and nothing comes back */
	KUNIT_EXPECT_EQ(test, np_read_paddr(region, 0), region->read.absent);
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), -ENXIO);

	np_test_forget(test, a, id);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	/* One says it twice: that is not two */
	np_test_forget(test, a, id);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	/* The other one says it by losing the QP */
	np_peer_fail(&b->fake.peer);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_EQ(test, atomic_read(&t->pd.usecnt), 0);
	KUNIT_EXPECT_TRUE(test, list_empty(&region->grants));
}

/*
 * What a peer keeps a dead region for is its keys.  All that tells of its pages goes,
 * although nobody has forgotten anything.
 */
static void np_dead_region_gives_back_what_tells_of_its_pages(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 2 * NP_SLOT_PAGES);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct np_region *other;
	struct np_resolve out;

	np_test_grant(test, peer, region);
	KUNIT_ASSERT_EQ(test, np_region_resolve(region, &out), 0);
	KUNIT_ASSERT_EQ(test, np_test_fault(region, NP_SLOT_PAGES - 1, 2,
					    RDMA_NP_FAULT_WRITE), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count.table_pages), 2);
	/* Of the same memory, so that what is known of the address space stays */
	refcount_inc(&t->npdev.users);
	other = np_region_create(&t->npdev, &t->pd, NULL, &t->fake.domain, t->va,
				 NP_SLOT_SIZE, 0x1000, NP_TEST_ACCESS);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, other);
	KUNIT_ASSERT_EQ(test, np_test_fault(other, 0, 1, 0), 0);

	np_region_close(region);
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	KUNIT_EXPECT_TRUE(test, xa_empty(&region->chunks));
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count.table_pages), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count.resident), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count.writable), 0);
	KUNIT_EXPECT_EQ(test, np_word(region, NP_SLOT_PAGES), 0);
	np_test_settled(test);
	/* The tables of the two windows and of the words: all but those of the other one */
	KUNIT_EXPECT_EQ(test, t->fake.splits - t->fake.merges, 2);
	/* The second slot is of no use to reclaim any more, the first one is */
	KUNIT_EXPECT_TRUE(test, np_test_ask(other, 0, false));
	KUNIT_EXPECT_FALSE(test, np_test_ask(other, NP_SLOT_PAGES, false));
	KUNIT_EXPECT_EQ(test, np_test_fault(region, 0, 1, 0), -ENXIO);

	np_region_close(other);
	np_region_put(other);
	np_test_forget(test, peer, np_region_id(region));
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
}

/* --- what peers are answered -------------------------------------------------------------- */

static void np_resolve_is_refused_the_same_whatever_the_reason(struct kunit *test)
{
	enum { NONE, LIVE, OTHER, MUTE, DEAD, NR };
	struct np_region *region[NR] = {};
	const struct np_msg *answer;
	struct np_test *t = test->priv;
	struct ib_pd other = { .device = t->ibdev };
	struct np_test_peer *peer;
	struct np_resolve out;
	struct np_msg msg;
	unsigned int i;

	region[LIVE] = np_test_region(test, 4);
	region[OTHER] = np_test_more(test, &other, NP_TEST_ACCESS);
	region[MUTE] = np_test_more(test, &t->pd, IB_ACCESS_LOCAL_WRITE |
				    IB_ACCESS_UNPINNED);
	region[DEAD] = np_test_more(test, &t->pd, NP_TEST_ACCESS);
	np_region_close(region[DEAD]);
	for (i = LIVE; i < NR; i++)
		KUNIT_ASSERT_EQ(test, 0, xa_err(xa_store(&t->npdev.rkeys, i,
							 region[i],
							 GFP_KERNEL)));
	peer = np_test_peer(test, &t->pd);
	for (i = NONE; i < NR; i++)
		if (i != LIVE)
			np_test_resolve(test, peer, i, 0, RDMA_NP_ACCESS);
	/* From another host */
	for (i = NONE; i < NR; i++)
		np_test_resolve(test, peer, i, 1, RDMA_NP_QP);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_grants, 0);
	KUNIT_EXPECT_EQ(test, t->nr_keys, 0);
	for (i = LIVE; i < NR; i++)
		KUNIT_EXPECT_TRUE(test, list_empty(&region[i]->grants));

	msg = (struct np_msg){ .type = NP_MSG_RESOLVE, .rkey = LIVE };
	answer = np_test_asks(test, peer, &msg, 0);
	KUNIT_EXPECT_EQ(test, answer->status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_region_resolve(region[LIVE], &out), 0);
	out.max_pages = RDMA_NP_MAX_PAGES;
	out.max_ranges = RDMA_NP_MAX_RANGES;
	out.lanes = NP_LANES;
	KUNIT_EXPECT_MEMEQ(test, &answer->region, &out, sizeof(out));
	KUNIT_EXPECT_EQ(test, t->live_keys, 3);
	KUNIT_EXPECT_EQ(test, list_count_nodes(&region[LIVE]->grants), 1);

	/* Now the peer, but nobody else, has them */
	np_test_resolve(test, peer, LIVE, 1, RDMA_NP_QP);
	np_test_resolve(test, peer, OTHER, 0, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_grants, 1);
	xa_destroy(&t->npdev.rkeys);
	for (i = OTHER; i < NR; i++) {
		if (i != DEAD)
			np_region_close(region[i]);
		np_region_put(region[i]);
	}
	np_pd_dealloc(&other);
}

/* As many ms later than it is */
static void np_test_told_ages(struct np_test *t, u64 ms)
{
	t->npdev.told->turned -= ms * NSEC_PER_MSEC;
}

static void np_key_that_was_told_is_no_name(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);

	np_test_resolve(test, peer, 7, 0, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), -EADDRINUSE);
	/* It leaves no trace */
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), -EADDRINUSE);
	/* What was not asked about will do */
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 8, region), 0);
	np_test_told_ages(t, RDMA_NP_PINNED_MS);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), -EADDRINUSE);
	np_test_told_ages(t, RDMA_NP_PINNED_MS);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), -EADDRINUSE);
	/* It was told again before that */
	np_test_resolve(test, peer, 7, 0, RDMA_NP_ACCESS);
	np_test_told_ages(t, 2 * RDMA_NP_PINNED_MS);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), -EADDRINUSE);
	np_test_told_ages(t, 2 * RDMA_NP_PINNED_MS);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), 0);
	xa_destroy(&t->npdev.rkeys);
}

static void np_key_that_was_told_long_ago_is_a_name(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);

	np_test_resolve(test, peer, 7, 0, RDMA_NP_ACCESS);
	np_test_told_ages(t, 4 * RDMA_NP_PINNED_MS);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), 0);
	xa_destroy(&t->npdev.rkeys);
}

/* Of a region of another's, or without remote rights, as of none */
static void np_key_that_is_refused_is_no_name_later(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct ib_pd other = { .device = t->ibdev };
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct np_region *mute;

	mute = np_test_more(test, &t->pd, IB_ACCESS_LOCAL_WRITE |
			    IB_ACCESS_UNPINNED);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, mute), 0);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 8, region), 0);
	np_test_resolve(test, peer, 7, 0, RDMA_NP_ACCESS);
	peer->fake.peer.pd = &other;
	np_test_resolve(test, peer, 8, 0, RDMA_NP_ACCESS);
	peer->fake.peer.pd = &t->pd;
	xa_erase(&t->npdev.rkeys, 7);
	xa_erase(&t->npdev.rkeys, 8);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), -EADDRINUSE);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 8, region), -EADDRINUSE);
	np_test_end(mute);
	xa_destroy(&t->npdev.rkeys);
}

static void np_region_that_appears_is_not_denied(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);

	/* The peer's key was looked up, and then registered */
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), 0);
	KUNIT_EXPECT_EQ(test, np_promise_none(peer->fake.ibdev, 7, NULL,
					      &peer->fake.peer.promised), -EAGAIN);
	xa_erase(&t->npdev.rkeys, 7);
	KUNIT_EXPECT_EQ(test, np_promise_none(peer->fake.ibdev, 7, region,
					      &peer->fake.peer.promised), -EAGAIN);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, 7, region), 0);
	xa_destroy(&t->npdev.rkeys);
}

/* Beyond a bound nothing is promised, and so nothing has to be remembered */
static void np_promises_are_bounded(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	u32 rkey;
	int ret;

	for (rkey = 1; rkey <= 2 * NP_TOLD_MAX; rkey++) {
		/* Each time another peer */
		struct np_told_user user = {};

		ret = np_promise_none(peer->fake.ibdev, rkey, NULL, &user);
		if (ret != -EACCES)
			break;
	}
	KUNIT_ASSERT_EQ(test, ret, -ENXIO);
	KUNIT_EXPECT_EQ(test, t->npdev.told->nr, NP_TOLD_MAX);
	np_test_resolve(test, peer, rkey, 0, RDMA_NP_GONE);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, rkey, region), 0);
	/* What was promised already is promised again */
	np_test_resolve(test, peer, 1, 0, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, bitmap_weight(t->npdev.told->newer, NP_TOLD_BITS),
			NP_TOLD_MAX);
	xa_destroy(&t->npdev.rkeys);
}

/* And one peer leaves some for the others */
static void np_promises_to_one_peer_are_bounded(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *greedy = np_test_peer(test, &t->pd);
	struct np_test_peer *other = np_test_peer(test, &t->pd);
	u32 rkey;
	int ret;

	for (rkey = 1; rkey <= 2 * NP_TOLD_MAX; rkey++) {
		ret = np_promise_none(greedy->fake.ibdev, rkey, NULL,
				      &greedy->fake.peer.promised);
		if (ret != -EACCES)
			break;
	}
	KUNIT_ASSERT_EQ(test, ret, -ENXIO);
	KUNIT_EXPECT_EQ(test, t->npdev.told->nr, NP_TOLD_USER_MAX);
	np_test_resolve(test, greedy, rkey, 0, RDMA_NP_GONE);
	KUNIT_EXPECT_EQ(test, np_name_take(&t->npdev, rkey, region), 0);
	xa_destroy(&t->npdev.rkeys);

	/* What is promised already costs nobody anything */
	np_test_resolve(test, greedy, 1, 0, RDMA_NP_ACCESS);
	np_test_resolve(test, other, 1, 0, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, other->fake.peer.promised.nr, 0);
	np_test_resolve(test, other, rkey, 0, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, other->fake.peer.promised.nr, 1);
	/* Nor does what was promised long ago */
	np_test_told_ages(t, 2 * RDMA_NP_PINNED_MS);
	np_test_resolve(test, greedy, rkey, 0, RDMA_NP_ACCESS);
	KUNIT_EXPECT_EQ(test, greedy->fake.peer.promised.nr, 1);
}

static void np_region_gets_a_key_that_was_not_told(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct ib_pd public_pd = { .device = t->ibdev };
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct ib_mr *mr;

	np_test_resolve(test, peer, 1, 0, RDMA_NP_ACCESS);
	np_test_resolve(test, peer, 2, 0, RDMA_NP_ACCESS);
	mr = np_region_make_name(region, &public_pd);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, mr);
	KUNIT_EXPECT_EQ(test, mr->rkey, 3);
	KUNIT_EXPECT_PTR_EQ(test, mr->np, region);
	KUNIT_EXPECT_EQ(test, region->public_rkey, 3);
	KUNIT_EXPECT_EQ(test, t->live_keys, 1);
	KUNIT_EXPECT_PTR_EQ(test, xa_load(&t->npdev.rkeys, 3), region);
	KUNIT_EXPECT_NULL(test, xa_load(&t->npdev.rkeys, 1));
	xa_destroy(&t->npdev.rkeys);
	KUNIT_EXPECT_EQ(test, fake_dereg_mr(mr, NULL), 0);

	/* Without a key there is no region, and nothing is left of those that would not do */
	np_test_resolve(test, peer, 4, 0, RDMA_NP_ACCESS);
	t->fail_key = 5;
	mr = np_region_make_name(region, &public_pd);
	KUNIT_EXPECT_EQ(test, PTR_ERR(mr), -ENOMEM);
	KUNIT_EXPECT_EQ(test, t->live_keys, 0);
	KUNIT_EXPECT_TRUE(test, xa_empty(&t->npdev.rkeys));
}

static noinline_for_stack void np_test_fault_refused(struct kunit *test,
						     struct np_test_peer *peer,
						     struct np_region *region,
						     u64 id, unsigned int flags,
						     u16 lid, u8 status)
{
	struct np_msg msg = np_test_fault_msg(region, id, flags);

	np_test_refused(test, peer, &msg, lid, status);
}

/* Whatever is asked for, it is answered so, and nothing happens to the region */
static void np_test_no_fault(struct kunit *test, struct np_test_peer *peer,
			     struct np_region *region, u64 id, u16 lid, u8 status)
{
	np_test_fault_refused(test, peer, region, id, 0, lid, status);
	np_test_fault_refused(test, peer, region, id,
			      RDMA_NP_FAULT_HOLD | RDMA_NP_FAULT_WRITE, lid, status);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count.resident), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count.faults_failed), 0);
	KUNIT_EXPECT_EQ(test, atomic64_read(&region->count.holds), 0);
}

static void np_fault_without_a_grant_is_answered_as_of_no_region(struct kunit *test)
{
	struct np_region *live = np_test_region(test, 4), *mine, *theirs, *dead;
	struct np_test *t = test->priv;
	struct ib_pd other = { .device = t->ibdev };
	struct np_test_peer *peer = np_test_peer(test, &t->pd);
	struct np_msg msg;
	unsigned int i;

	mine = np_test_more(test, &t->pd, NP_TEST_ACCESS);
	theirs = np_test_more(test, &other, NP_TEST_ACCESS);
	dead = np_test_more(test, &t->pd, NP_TEST_ACCESS);
	np_region_close(dead);
	for (i = 0; i < 2; i++) {
		np_test_no_fault(test, peer, mine, mine->id, 0, RDMA_NP_GONE);
		np_test_no_fault(test, peer, theirs, theirs->id, 0, RDMA_NP_GONE);
		np_test_no_fault(test, peer, dead, dead->id, 0, RDMA_NP_GONE);
		np_test_no_fault(test, peer, mine, U64_MAX, 0, RDMA_NP_GONE);
		/* The same of who has resolved another one */
		if (!i)
			np_test_grant(test, peer, live);
	}
	/* Of that one, but not in the peer's name from elsewhere */
	np_test_no_fault(test, peer, live, live->id, 1, RDMA_NP_QP);
	msg = np_test_fault_msg(live, live->id, 0);
	KUNIT_EXPECT_EQ(test, np_test_asks(test, peer, &msg, 0)->status, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_rights(live, 0), RDMA_NP_WORD_READABLE);

	/* When it is dead, and when it was forgotten */
	np_region_close(live);
	np_test_fault_refused(test, peer, live, live->id, 0, 0, RDMA_NP_GONE);
	np_test_forget(test, peer, live->id);
	KUNIT_EXPECT_EQ(test, peer->fake.peer.nr_grants, 0);
	np_test_fault_refused(test, peer, live, live->id, 0, 0, RDMA_NP_GONE);
	np_test_end(mine);
	np_test_end(theirs);
	np_region_put(dead);
	np_pd_dealloc(&other);
}

static u64 np_test_pages_held(struct np_region *region)
{
	return atomic64_read(&region->count.held);
}

/* Who guesses ids does not learn which there are, and gives nothing back */
static void np_release_of_no_hold_is_answered_as_of_one(struct kunit *test)
{
	struct np_region *region = np_test_region(test, 4);
	struct np_test *t = test->priv;
	struct np_test_peer *a = np_test_peer(test, &t->pd);
	struct np_test_peer *b = np_test_peer(test, &t->pd);
	unsigned int hold_ms = np_hold_ms;
	struct np_msg msg;
	u64 id;

	np_hold_ms = 600000;
	np_test_grant(test, a, region);
	np_test_grant(test, b, region);
	msg = np_test_fault_msg(region, np_region_id(region), RDMA_NP_FAULT_HOLD);
	id = np_test_asks(test, a, &msg, 0)->faulted.hold_id;
	np_hold_ms = hold_ms;
	KUNIT_EXPECT_NE(test, id, 0);
	KUNIT_EXPECT_EQ(test, np_test_pages_held(region), 1);

	np_test_release(test, a, id + 1, 0, RDMA_NP_OK);
	np_test_release(test, a, 0, 0, RDMA_NP_OK);
	np_test_release(test, b, id, 0, RDMA_NP_OK);
	np_test_release(test, a, id, 1, RDMA_NP_QP);
	KUNIT_EXPECT_EQ(test, np_test_pages_held(region), 1);
	np_test_release(test, a, id, 0, RDMA_NP_OK);
	KUNIT_EXPECT_EQ(test, np_test_pages_held(region), 0);
	/* A copy */
	np_test_release(test, a, id, 0, RDMA_NP_OK);
}

/* --- order of service --------------------------------------------------------------------- */

/*
 * FAULTs of one owner that may be at work at once, as region.c has it: when all but one
 * wait, those that are queued are served one after the other, in the order they were
 * chosen.
 */
#define NP_TEST_SERVERS	128
#define NP_TEST_CLASSES	6
#define NP_TEST_STEPS	64
#define NP_TEST_ANSWERS	(NP_TEST_SERVERS + NP_TEST_STEPS + 1)

struct np_asker {
	struct np_fake_peer fake;
	struct np_order *order;
	unsigned int depth[NP_LANES];	/* FAULTs under way, with the one in the lane */
	u64 tid;	/* the lane is the rest of its division by NP_LANES */
};

/* FAULTs whose answers do not go before the test says so */
struct np_order {
	struct kunit *test;
	struct np_region *region;
	wait_queue_head_t wait;
	bool over;
	spinlock_t lock; /* of what follows */
	unsigned int nr;	/* answers */
	DECLARE_BITMAP(go, NP_TEST_ANSWERS);
	struct np_asker *asker[NP_TEST_ANSWERS];
	u64 tid[NP_TEST_ANSWERS];
	unsigned int nr_busy;
	unsigned int nr_askers;
	struct np_asker askers[] __counted_by(nr_askers);
};

static int np_order_send(struct np_port *port, struct ib_ah *ah,
			 u16 pkey_index, struct np_peer *peer,
			 const struct np_msg *msg)
{
	struct np_asker *asker = container_of(port, struct np_asker, fake.port);
	struct np_order *order = asker->order;
	unsigned int nr = NP_TEST_ANSWERS;

	spin_lock(&order->lock);
	if (msg->status == NP_WIRE_FULL)
		order->nr_busy++;
	else if (order->nr < NP_TEST_ANSWERS)
		nr = order->nr++;
	if (nr < NP_TEST_ANSWERS) {
		order->asker[nr] = asker;
		order->tid[nr] = msg->tid;
	}
	spin_unlock(&order->lock);
	wake_up_all(&order->wait);
	if (nr < NP_TEST_ANSWERS)
		wait_event(order->wait,
			   READ_ONCE(order->over) || test_bit(nr, order->go));
	return 0;
}

static void np_asker_asks(struct np_asker *asker, unsigned int lane)
{
	struct np_region *region = asker->order->region;
	static const struct np_addr from;
	struct np_msg msg;

	msg = np_test_fault_msg(region, np_region_id(region), 0);
	msg.src_qpn = asker->fake.peer.remote_qpn;
	msg.dst_qpn = asker->fake.peer.qpn;
	msg.secret = asker->fake.peer.our_secret;
	msg.fault.lane = lane;
	asker->tid = round_down(asker->tid, NP_LANES) + NP_LANES + lane;
	msg.tid = asker->tid;
	spin_lock(&asker->fake.peer.lock);
	asker->depth[lane] = asker->fake.peer.faulting + 1;
	spin_unlock(&asker->fake.peer.lock);
	np_receive(&asker->fake.port, &msg, false, &from, NULL);
}

static void np_order_end(void *data)
{
	struct np_order *order = data;
	struct np_asker *asker;
	unsigned int i;

	WRITE_ONCE(order->over, true);
	wake_up_all(&order->wait);
	for (i = 0; i < order->nr_askers; i++) {
		asker = &order->askers[i];
		if (!asker->order)
			continue;
		wait_event(asker->fake.hca.idle,
			   !READ_ONCE(asker->fake.hca.serving));
		np_fake_peer_exit(order->test, &asker->fake);
	}
}

static struct np_order *np_order_make(struct kunit *test, unsigned int nr_askers)
{
	struct np_order *order;
	struct np_asker *asker;
	unsigned int i;

	order = kunit_kzalloc(test, struct_size(order, askers, nr_askers),
			      GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, order);
	order->nr_askers = nr_askers;
	order->test = test;
	order->region = np_test_region(test, 4);
	spin_lock_init(&order->lock);
	init_waitqueue_head(&order->wait);
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, np_order_end,
							   order));
	for (i = 0; i < nr_askers; i++) {
		asker = &order->askers[i];
		np_fake_peer_init(test, &asker->fake);
		asker->order = order;
		asker->fake.port.send = np_order_send;
		mutex_lock(&asker->fake.peer.ctl);
		KUNIT_EXPECT_EQ(test, np_serve_alloc(&asker->fake.peer), 0);
		KUNIT_EXPECT_NOT_ERR_OR_NULL(test,
					     np_pgrant_make(&asker->fake.peer,
							    order->region));
		mutex_unlock(&asker->fake.peer.ctl);
	}
	return order;
}

/* The answer to @lane of the asker that is returned is number @nr, and the last one */
static struct np_asker *np_order_served(struct kunit *test, struct np_order *order,
					unsigned int nr, unsigned int *lane)
{
	KUNIT_ASSERT_NE(test, 0, wait_event_timeout(order->wait,
						    READ_ONCE(order->nr) > nr,
						    60 * HZ));
	KUNIT_ASSERT_EQ(test, order->nr, nr + 1);
	*lane = order->tid[nr] % NP_LANES;
	return order->asker[nr];
}

static void np_order_go(struct np_order *order, unsigned int nr)
{
	set_bit(nr, order->go);
	wake_up_all(&order->wait);
}

#define NP_TEST_BLOCKERS	(NP_TEST_SERVERS / NP_LANES)

/* All servers are taken, by askers behind @nr that are the test's */
static struct np_order *np_order_blocked(struct kunit *test, unsigned int nr)
{
	struct np_order *order = np_order_make(test, nr + NP_TEST_BLOCKERS);
	unsigned int i, lane;

	KUNIT_ASSERT_EQ(test, np_test_fault(order->region, 0, 1, 0), 0);
	for (i = nr; i < nr + NP_TEST_BLOCKERS; i++)
		for (lane = 0; lane < NP_LANES; lane++)
			np_asker_asks(&order->askers[i], lane);
	np_order_served(test, order, NP_TEST_SERVERS - 1, &lane);
	return order;
}

/*
 * QPs that have 1, 2, 4, ..., 32 under way, always: who has one waits for at most one of
 * those that have more, who has two or three gets a quarter, and so on, and each 32nd is
 * one that waits behind as many of its own.
 */
static void np_fault_waits_for_few_of_those_of_qps_with_more(struct kunit *test)
{
	struct np_order *order = np_order_blocked(test, NP_TEST_CLASSES);
	unsigned int next[NP_TEST_CLASSES] = {}, count[NP_TEST_CLASSES] = {};
	unsigned int i, lane, class, every;
	struct np_asker *asker;

	for (i = 0; i < NP_TEST_CLASSES; i++)
		for (lane = 0; lane < 1 << i; lane++)
			np_asker_asks(&order->askers[i], lane);
	np_order_go(order, 0);
	for (i = 0; i < NP_TEST_STEPS; i++) {
		asker = np_order_served(test, order, NP_TEST_SERVERS + i, &lane);
		class = ilog2(asker->depth[lane]);
		every = min(2 << class, NP_LANES);
		KUNIT_ASSERT_LT(test, class, NP_TEST_CLASSES);
		KUNIT_EXPECT_LT_MSG(test, i, next[class] + every,
				    "behind %u of its QP", asker->depth[lane]);
		next[class] = i + 1;
		count[class]++;
		np_asker_asks(asker, lane);
		np_order_go(order, NP_TEST_SERVERS + i);
	}
	for (class = 0; class < NP_TEST_CLASSES; class++)
		KUNIT_EXPECT_EQ(test, count[class],
				NP_TEST_STEPS / min(2 << class, NP_LANES));
	kunit_release_action(test, np_order_end, order);
}

static void np_qps_that_ask_in_the_same_way_take_turns(struct kunit *test)
{
	const unsigned int nr = 5;
	struct np_order *order = np_order_blocked(test, nr);
	struct np_asker *asker;
	unsigned int i, lane;

	for (i = 0; i < nr; i++)
		np_asker_asks(&order->askers[i], 0);
	np_order_go(order, 0);
	for (i = 0; i < 4 * nr; i++) {
		asker = np_order_served(test, order, NP_TEST_SERVERS + i, &lane);
		KUNIT_EXPECT_EQ(test, asker - order->askers, i % nr);
		np_asker_asks(asker, lane);
		np_order_go(order, NP_TEST_SERVERS + i);
	}
	kunit_release_action(test, np_order_end, order);
}

/* One more, when the device has @free places */
static bool np_asker_may(struct np_asker *asker, unsigned int lane, unsigned int free)
{
	unsigned int busy = asker->order->nr_busy;
	struct np_hca *hca = &asker->fake.hca;
	unsigned int others = NP_SERVE_DEVICE - free - hca->serving;

	hca->serving += others;
	np_asker_asks(asker, lane);
	xa_lock_irq(&hca->peers);
	hca->serving -= others;
	xa_unlock_irq(&hca->peers);
	return asker->order->nr_busy == busy;
}

/* As much as it has under way, and the last places are for who has nothing else there */
static void np_faults_on_one_owners_memory_leave_places_free(struct kunit *test)
{
	struct np_order *order = np_order_make(test, 3);
	struct np_asker *a = &order->askers[0], *b = &order->askers[1];
	struct np_asker *c = &order->askers[2];

	WRITE_ONCE(order->over, true);
	/* What is at work stays there, because it waits for memory */
	mmap_write_lock(current->mm);
	KUNIT_EXPECT_FALSE(test, np_asker_may(a, 0, 0));
	KUNIT_EXPECT_TRUE(test, np_asker_may(a, 0, 1));
	KUNIT_EXPECT_FALSE(test, np_asker_may(b, 0, 1));
	KUNIT_EXPECT_TRUE(test, np_asker_may(b, 0, 2));
	KUNIT_EXPECT_FALSE(test, np_asker_may(b, 1, 32 + 2));
	KUNIT_EXPECT_FALSE(test, np_asker_may(c, 0, 2));
	KUNIT_EXPECT_TRUE(test, np_asker_may(c, 0, 3));
	KUNIT_EXPECT_FALSE(test, np_asker_may(c, 1, 32 + 3));
	KUNIT_EXPECT_TRUE(test, np_asker_may(c, 1, 32 + 4));
	KUNIT_EXPECT_EQ(test, READ_ONCE(order->nr), 0);
	mmap_write_unlock(current->mm);
	KUNIT_EXPECT_NE(test, 0, wait_event_timeout(order->wait,
						    READ_ONCE(order->nr) == 4,
						    60 * HZ));
	KUNIT_EXPECT_EQ(test, order->nr_busy, 5);
	kunit_release_action(test, np_order_end, order);
}

static struct kunit_case np_region_cases[] = {
	KUNIT_CASE(np_new_region_is_absent_everywhere),
	KUNIT_CASE(np_window_is_congruent_to_the_address),
	KUNIT_CASE(np_signature_fills_its_page),
	KUNIT_CASE(np_region_without_write_right_has_no_write_window),
	KUNIT_CASE(np_closed_region_unmaps_its_windows),
	KUNIT_CASE(np_scratch_is_shared_within_a_pd_only),
	KUNIT_CASE(np_scratch_stays_with_its_pd),
	KUNIT_CASE(np_read_fault_maps_read_window_only),
	KUNIT_CASE(np_write_fault_maps_both_windows),
	KUNIT_CASE(np_writable_page_is_dirty),
	KUNIT_CASE(np_fault_on_resident_page_changes_nothing),
	KUNIT_CASE(np_fault_next_to_resident_page_leaves_it_alone),
	KUNIT_CASE(np_upgrade_changes_the_generation),
	KUNIT_CASE(np_fault_crosses_slots),
	KUNIT_CASE(np_prefetch_without_fault_takes_what_is_there),
	KUNIT_CASE(np_fault_checks_range),
	KUNIT_CASE(np_fault_checks_rights),
	KUNIT_CASE(np_fault_says_what_is_wrong_with_the_mapping),
	KUNIT_CASE(np_failed_split_changes_nothing),
	KUNIT_CASE(np_failed_read_leaf_undoes_the_write_leaf),
	KUNIT_CASE(np_invalidation_makes_absent),
	KUNIT_CASE(np_invalidation_of_absent_pages_costs_no_flush),
	KUNIT_CASE(np_absent_slot_is_merged),
	KUNIT_CASE(np_generation_survives_a_merge),
	KUNIT_CASE(np_fault_notices_that_its_split_is_undone),
	KUNIT_CASE(np_neighbour_counts_as_used),
	KUNIT_CASE(np_page_that_was_asked_about_comes_when_it_is_used),
	KUNIT_CASE(np_invalidation_that_may_not_block_gives_up),
	KUNIT_CASE(np_protection_leaves_the_read_window),
	KUNIT_CASE(np_protection_of_readable_pages_costs_no_flush),
	KUNIT_CASE(np_protection_of_what_is_not_readable_makes_absent),
	KUNIT_CASE(np_neighbours_of_the_region_do_not_matter),
	KUNIT_CASE(np_huge_page_is_one_leaf),
	KUNIT_CASE(np_merge_counts_when_the_tables_are_gone),
	KUNIT_CASE(np_huge_leaf_goes_as_a_whole),
	KUNIT_CASE(np_huge_leaf_is_protected_as_a_whole),
	KUNIT_CASE(np_huge_leaf_is_aged_as_a_whole),
	KUNIT_CASE(np_huge_leaf_that_was_asked_about_comes_when_it_is_used),
	KUNIT_CASE(np_hold_cuts_a_huge_leaf),
	KUNIT_CASE(np_huge_leaf_lies_within_the_region),
	KUNIT_CASE(np_hold_notices_a_new_huge_leaf),
	KUNIT_CASE(np_hold_for_write_notices_new_huge_leaves),
	KUNIT_CASE(np_failed_huge_leaf_is_undone),
	KUNIT_CASE(np_hold_pins_what_is_mapped),
	KUNIT_CASE(np_page_held_for_write_is_dirty_afterwards),
	KUNIT_CASE(np_hold_that_expires_ends_its_qp_and_then_the_pin),
	KUNIT_CASE(np_held_leaf_outlives_the_mapping),
	KUNIT_CASE(np_stale_page_is_refreshed_if_it_is_the_same),
	KUNIT_CASE(np_held_page_is_protected_for_all_but_its_holder),
	KUNIT_CASE(np_hold_for_reading_is_no_leave_to_write),
	KUNIT_CASE(np_fault_waits_for_holds_of_another_page),
	KUNIT_CASE(np_fault_looks_again_after_an_invalidation),
	KUNIT_CASE(np_fault_goes_on_while_memory_changes),
	KUNIT_CASE(np_fault_asks_for_less_before_it_gives_up),
	KUNIT_CASE(np_hold_gets_its_pages_while_memory_changes),
	KUNIT_CASE(np_hold_in_parts_pins_what_it_counts),
	KUNIT_CASE(np_hold_asks_for_less_while_pages_are_replaced),
	KUNIT_CASE(np_page_stays_until_its_last_hold),
	KUNIT_CASE(np_page_is_in_use_as_long_as_it_is_held),
	KUNIT_CASE(np_page_has_as_many_holds_as_can_be_counted),
	KUNIT_CASE(np_end_of_region_ends_holds),
	KUNIT_CASE(np_end_of_region_overtakes_a_release),
	KUNIT_CASE(np_dead_region_gives_back_what_tells_of_its_pages),
	KUNIT_CASE(np_local_hold_is_charged_until_it_ends),
	KUNIT_CASE(np_local_hold_that_fails_costs_nothing),
	KUNIT_CASE(np_local_hold_beyond_the_limit_charges_nothing),
	KUNIT_CASE(np_keys_are_made_once_for_all_peers),
	KUNIT_CASE(np_keys_have_the_rights_of_the_region),
	KUNIT_CASE(np_key_that_cannot_be_made_leaves_no_other),
	KUNIT_CASE(np_resolve_that_fails_leaves_no_key),
	KUNIT_CASE(np_keys_that_nobody_was_granted_end_with_the_region),
	KUNIT_CASE(np_grants_of_an_owner_are_bounded),
	KUNIT_CASE(np_device_does_not_wait_for_keys_that_stay),
	KUNIT_CASE(np_device_does_not_wait_for_an_orphan),
	KUNIT_CASE(np_keys_of_a_dead_region_stay_for_who_has_them),
	KUNIT_CASE(np_resolve_is_refused_the_same_whatever_the_reason),
	KUNIT_CASE(np_key_that_was_told_is_no_name),
	KUNIT_CASE(np_key_that_was_told_long_ago_is_a_name),
	KUNIT_CASE(np_key_that_is_refused_is_no_name_later),
	KUNIT_CASE(np_region_that_appears_is_not_denied),
	KUNIT_CASE(np_promises_are_bounded),
	KUNIT_CASE(np_promises_to_one_peer_are_bounded),
	KUNIT_CASE(np_region_gets_a_key_that_was_not_told),
	KUNIT_CASE(np_fault_without_a_grant_is_answered_as_of_no_region),
	KUNIT_CASE(np_release_of_no_hold_is_answered_as_of_one),
	KUNIT_CASE_SLOW(np_fault_waits_for_few_of_those_of_qps_with_more),
	KUNIT_CASE_SLOW(np_qps_that_ask_in_the_same_way_take_turns),
	KUNIT_CASE(np_faults_on_one_owners_memory_leave_places_free),
	KUNIT_CASE(np_reg_check_refuses),
	KUNIT_CASE(np_regions_leave_a_quarter_of_the_addresses),
	KUNIT_CASE(np_devices_of_a_domain_share_its_addresses),
	KUNIT_CASE(np_drivers_pin_or_are_refused),
	KUNIT_CASE(np_public_key_gives_no_access),
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

static struct kunit_suite np_region_suite = {
	.name = "nprdma-region",
	.init = np_test_init,
	.test_cases = np_region_cases,
};
kunit_test_suite(np_region_suite);

MODULE_IMPORT_NS(EXPORTED_FOR_KUNIT_TESTING);
MODULE_DESCRIPTION("Unit tests of memory regions that are not pinned");
MODULE_LICENSE("GPL");
