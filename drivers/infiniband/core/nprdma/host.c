// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: what absent pages of a window map to.
 *
 * The host has one signature page and one page of absent residency words; both are mapped
 * read-only.  Each protection domain that had a region has a scratch page, which is
 * written by the peers of one protection domain and read by them only, so nothing leaks
 * between two.  All of them are 2 MiB.
 */
#include <kunit/visibility.h>
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/random.h>
#include <linux/slab.h>

#include "np_hooks.h"
#include "np_region.h"

struct np_host np_host;
EXPORT_SYMBOL_IF_KUNIT(np_host);
static DEFINE_MUTEX(np_host_lock);

static struct page *np_alloc_2m(gfp_t gfp)
{
	return alloc_pages(gfp | __GFP_ZERO | __GFP_NOWARN |
			   __GFP_RETRY_MAYFAIL, NP_SLOT_ORDER);
}

/**
 * np_host_pages() - make the signature page and the zero page, once
 *
 * Costs the host 4 MiB.
 *
 * Context: process context.
 * Return: 0 or -ENOMEM.
 */
int np_host_pages(void)
{
	__le64 *words;
	int i;

	guard(mutex)(&np_host_lock);
	if (np_host.signature_page)
		return 0;

	if (!np_host.zero_page)
		np_host.zero_page = np_alloc_2m(GFP_KERNEL);
	if (!np_host.zero_page)
		return -ENOMEM;
	np_host.signature_page = np_alloc_2m(GFP_KERNEL);
	if (!np_host.signature_page)
		return -ENOMEM;

	/* Zero is what fresh memory holds: the one value that would often match */
	do {
		np_host.signature = get_random_u64();
	} while (!np_host.signature);

	words = page_address(np_host.signature_page);
	for (i = 0; i < NP_SLOT_SIZE / sizeof(*words); i++)
		words[i] = cpu_to_le64(np_host.signature);
	return 0;
}

/**
 * np_host_free() - free what np_host_pages() made, when no region exists any more
 */
void np_host_free(void)
{
	if (np_host.signature_page)
		__free_pages(np_host.signature_page, NP_SLOT_ORDER);
	if (np_host.zero_page)
		__free_pages(np_host.zero_page, NP_SLOT_ORDER);
}

static void np_scratch_free(struct kref *ref)
{
	struct np_scratch *scratch = container_of(ref, struct np_scratch, ref);

	__free_pages(scratch->page, NP_SLOT_ORDER);
	kfree(scratch);
}

/**
 * np_scratch_get() - the scratch page of a PD, for one more region
 * @npdev: device
 * @pd: the application's PD
 *
 * The first region of a PD makes the page, and it stays for the others to come:
 * clearing 2 MiB costs more than all else that a registration does.
 *
 * Context: process context.
 * Return: the scratch page, for np_scratch_put() when no window of the region
 * maps it any more, or -ENOMEM.
 */
struct np_scratch *np_scratch_get(struct np_device *npdev, struct ib_pd *pd)
{
	struct np_scratch *scratch;

	guard(mutex)(&npdev->lock);
	scratch = pd->np;
	if (!scratch) {
		scratch = kzalloc(sizeof(*scratch), GFP_KERNEL);
		if (!scratch)
			return ERR_PTR(-ENOMEM);
		scratch->page = np_alloc_2m(GFP_KERNEL_ACCOUNT);
		if (!scratch->page) {
			kfree(scratch);
			return ERR_PTR(-ENOMEM);
		}
		kref_init(&scratch->ref);
		pd->np = scratch;
	}
	kref_get(&scratch->ref);
	return scratch;
}

/**
 * np_scratch_share() - the scratch page of a region, for one more of its PD
 * @scratch: that of a region which maps it; or NULL
 *
 * Return: @scratch; if it is not NULL np_scratch_put() follows.
 */
struct np_scratch *np_scratch_share(struct np_scratch *scratch)
{
	if (scratch)
		kref_get(&scratch->ref);
	return scratch;
}

/**
 * np_scratch_put() - a region's windows do not map the page any more
 * @scratch: of np_scratch_get()
 */
void np_scratch_put(struct np_scratch *scratch)
{
	kref_put(&scratch->ref, np_scratch_free);
}

/**
 * np_pd_dealloc() - a PD ends
 * @pd: the PD; no MR and no QP is left in it
 *
 * Windows of dead regions may still map its scratch page, which goes with them.
 *
 * Context: process context.
 */
void np_pd_dealloc(struct ib_pd *pd)
{
	if (pd->np)
		np_scratch_put(pd->np);
	pd->np = NULL;
}
EXPORT_SYMBOL_IF_KUNIT(np_pd_dealloc);
