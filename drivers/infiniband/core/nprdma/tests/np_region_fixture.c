// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: what unit tests share of regions and residency, of their keys, and of what
 * peers get of them.
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
#include <linux/dma-mapping.h>
#include <linux/mman.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "np_region_fixture.h"

#define FAKE_IOVA	0x7000000000UL
#define FAKE_PRESENT	BIT_ULL(63)

static u64 fake_make(phys_addr_t paddr, int prot)
{
	return paddr | prot | FAKE_PRESENT;
}

struct np_slot *np_test_slot(struct np_region *region, unsigned long va)
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

int fake_dereg_mr(struct ib_mr *mr, struct ib_udata *udata)
{
	struct fake_key *key = container_of(mr, struct fake_key, mr);
	struct np_test *t = to_test(mr->device);

	if (t->keep_keys)
		return -EIO;
	if (t->on_dereg)
		t->on_dereg(t, key);
	t->keys[mr->rkey - 1] = NULL;
	t->live_keys--;
	ib_umem_release(key->umem);
	kfree(key);
	return 0;
}

/* --- the frame ------------------------------------------------------------------ */

void np_test_close(struct np_test *t)
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
	kvfree(t->npdev.promises);
}

int np_test_init(struct kunit *test)
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
	INIT_LIST_HEAD(&t->npdev.regions);
	refcount_set(&t->npdev.users, 1);
	init_completion(&t->npdev.idle);
	t->pd.device = t->ibdev;

	kunit_activate_static_stub(test, np_iova_reserve, fake_iova_reserve);
	kunit_activate_static_stub(test, np_iova_release, fake_iova_release);
	return kunit_add_action_or_reset(test, np_test_exit_region, t);
}

void np_test_map(struct kunit *test, int prot)
{
	struct np_test *t = test->priv;
	unsigned long va;

	va = kunit_vm_mmap(test, NULL, 0, 4 * NP_SLOT_SIZE, prot,
			   MAP_ANONYMOUS | MAP_PRIVATE, 0);
	KUNIT_ASSERT_NE(test, va, 0);
	t->va = ALIGN(va, NP_SLOT_SIZE);
}

/* Region of @npages pages, @first pages behind the beginning of the mapping */
struct np_region *np_test_region_at(struct kunit *test, unsigned int first,
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

struct np_region *np_test_region(struct kunit *test, unsigned int npages)
{
	return np_test_region_at(test, 0, npages, NP_TEST_ACCESS);
}

int np_test_fault(struct np_region *region, unsigned int page,
		  unsigned int npages, unsigned int flags)
{
	return np_region_fault(region, region->base + page * PAGE_SIZE,
			       (u64)npages * PAGE_SIZE, flags, NULL, NULL, 0);
}

u64 np_word(struct np_region *region, unsigned int page)
{
	return np_test_word(region, (region->start & PAGE_MASK) +
				    page * PAGE_SIZE);
}

u64 np_rights(struct np_region *region, unsigned int page)
{
	return np_word(region, page) & NP_WORD_RIGHTS;
}

u64 np_generation(struct np_region *region, unsigned int page)
{
	return np_word(region, page) >> RDMA_NP_WORD_GENERATION_SHIFT;
}

struct page *np_page_at(struct kunit *test, unsigned long va)
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

void np_touch(struct kunit *test, unsigned long va, u64 value)
{
	KUNIT_ASSERT_EQ(test, 0, put_user(value, (u64 __user *)va));
}

void np_test_unmap(struct np_test *t, unsigned int page,
		   unsigned int npages)
{
	vm_munmap(t->va + page * PAGE_SIZE, npages * PAGE_SIZE);
}

/*
 * As if the kernel invalidated just these pages: munmap() of a part of a mapping
 * invalidates the whole slot, because it might have to split a huge page. The
 * memory itself stays.
 */
void np_test_event(struct np_test *t, enum mmu_notifier_event event,
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

void np_test_invalidate(struct np_test *t, unsigned int page,
			unsigned int npages)
{
	np_test_event(t, MMU_NOTIFY_CLEAR, page, npages);
}

/* At rest: every leaf says what its word says, and nothing waits to be flushed */
void np_test_settled(struct kunit *test)
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

phys_addr_t np_read_paddr(struct np_region *region, unsigned int page)
{
	return iommu_iova_to_phys(region->read.domain, region->read.iova +
				  page * PAGE_SIZE);
}

phys_addr_t np_write_paddr(struct np_region *region, unsigned int page)
{
	return iommu_iova_to_phys(region->write.domain, region->write.iova +
				  page * PAGE_SIZE);
}

/* Runs in the fault, so that what follows is as if another CPU had done it */
void np_age_other_page(struct fake_iommu *fake)
{
	struct np_test *t = container_of(fake, struct np_test, fake);
	DECLARE_BITMAP(pages, NP_SLOT_PAGES) = {};

	fake->on_split = NULL;
	__set_bit(3, pages);
	np_region_age(t->region, t->va, pages);
}

/* Does reclaim hear that a page is used? */
bool np_test_ask(struct np_region *region, unsigned int page, bool clear)
{
	unsigned long va = (region->start & PAGE_MASK) + page * PAGE_SIZE;

	return np_aging_ask(region->aging, va, va + PAGE_SIZE, clear);
}

/* It asks, and a worker makes the page absent */
void np_test_age(struct kunit *test, struct np_region *region,
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

struct np_hold *np_test_hold(struct kunit *test, struct np_region *region,
			     unsigned int page, unsigned int npages,
			     unsigned int flags)
{
	struct np_hold *hold = np_hold_alloc(region, flags, NULL);

	KUNIT_ASSERT_NOT_NULL(test, hold);
	KUNIT_ASSERT_EQ(test, np_region_fault(region, region->base +
					      page * PAGE_SIZE,
					      (u64)npages * PAGE_SIZE, 0, hold,
					      NULL, 0), 0);
	KUNIT_EXPECT_EQ(test, np_hold_pages(hold), npages);
	return hold;
}

MODULE_IMPORT_NS(EXPORTED_FOR_KUNIT_TESTING);
MODULE_DESCRIPTION("Unit tests of memory regions that are not pinned");
MODULE_LICENSE("GPL");
