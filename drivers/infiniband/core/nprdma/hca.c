// SPDX-License-Identifier: GPL-2.0
/*
 * The protocol's part of a device: lookup, and what may wait or be served at once.
 */
#include <linux/random.h>
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "np_hca.h"

/* Made and ended by main.c, which says what may wait on them */
struct workqueue_struct *np_wq;
EXPORT_SYMBOL_IF_KUNIT(np_wq);

struct workqueue_struct *np_receive_wq;
struct workqueue_struct *np_kill_wq;

static u64 np_boot;

/* The client's functions are main.c's */
VISIBLE_IF_KUNIT struct ib_client np_client = {
	.name = "nprdma",
};
EXPORT_SYMBOL_IF_KUNIT(np_client);

/**
 * np_incarnation_init - Choose this boot's random number
 */
void np_incarnation_init(void)
{
	do
		np_boot = get_random_u64();
	while (!np_boot);
}

/**
 * np_incarnation - This boot's random number
 *
 * Return: never 0
 */
u64 np_incarnation(void)
{
	return np_boot;
}

/**
 * np_hca_init - Prepare the protocol's part of a device
 * @hca: zeroed; the caller has its first reference
 * @ibdev: the device
 */
void np_hca_init(struct np_hca *hca, struct ib_device *ibdev)
{
	hca->ibdev = ibdev;
	kref_init(&hca->ref);
	xa_init_flags(&hca->peers, XA_FLAGS_LOCK_IRQ);
	init_waitqueue_head(&hca->idle);
	mutex_init(&hca->owners_lock);
	INIT_LIST_HEAD(&hca->owners);
}
EXPORT_SYMBOL_IF_KUNIT(np_hca_init);

static void np_hca_release(struct kref *ref)
{
	struct np_hca *hca = container_of(ref, struct np_hca, ref);

	xa_destroy(&hca->peers);
	kfree_rcu(hca, rcu);
}

/**
 * np_hca_put - Give back a reference
 * @hca: the device
 */
void np_hca_put(struct np_hca *hca)
{
	kref_put(&hca->ref, np_hca_release);
}

/**
 * np_hca_get - The protocol's part of a device
 * @ibdev: the device
 *
 * Return: with a reference; NULL if there is none (any more)
 */
struct np_hca *np_hca_get(struct ib_device *ibdev)
{
	struct np_hca *hca;

	rcu_read_lock();
	hca = ib_get_client_data(ibdev, &np_client);
	if (hca && !kref_get_unless_zero(&hca->ref))
		hca = NULL;
	rcu_read_unlock();
	return hca;
}

/**
 * np_hca_begin - Count one more RESOLVE or FORGET that waits or is served
 * @hca: the device
 * @stranger: it is not from a peer
 *
 * Return: false if it is over a bound, or the device is going
 */
bool np_hca_begin(struct np_hca *hca, bool stranger)
{
	bool ok;

	xa_lock_irq(&hca->peers);
	ok = !hca->dying && hca->serving < NP_SERVE_DEVICE &&
	     hca->asked < NP_SERVE_ASKED &&
	     (!stranger || hca->strangers < NP_SERVE_STRANGERS);
	hca->serving += ok;
	hca->asked += ok;
	hca->strangers += ok && stranger;
	xa_unlock_irq(&hca->peers);
	return ok;
}
EXPORT_SYMBOL_IF_KUNIT(np_hca_begin);

/* Under the lock of @hca->peers. Who waits for the device does not wait for FAULTs. */
static void np_hca_served(struct np_hca *hca)
{
	hca->serving--;
	if (!hca->asked && !hca->refusing)
		wake_up_all(&hca->idle);
}

/**
 * np_hca_end - End what np_hca_begin() began
 * @hca: the device
 * @stranger: as then
 */
void np_hca_end(struct np_hca *hca, bool stranger)
{
	xa_lock_irq(&hca->peers);
	hca->asked--;
	hca->strangers -= stranger;
	np_hca_served(hca);
	xa_unlock_irq(&hca->peers);
}
EXPORT_SYMBOL_IF_KUNIT(np_hca_end);

/**
 * np_hca_begin_refusal - Count one more answer to who is no peer
 * @hca: the device
 *
 * Return: false if it is over the bound, or the device is going
 */
bool np_hca_begin_refusal(struct np_hca *hca)
{
	bool ok;

	xa_lock_irq(&hca->peers);
	ok = !hca->dying && hca->refusing < NP_SERVE_REFUSALS;
	hca->refusing += ok;
	hca->serving += ok;
	xa_unlock_irq(&hca->peers);
	return ok;
}
EXPORT_SYMBOL_IF_KUNIT(np_hca_begin_refusal);

/**
 * np_hca_end_refusal - End what np_hca_begin_refusal() began
 * @hca: the device
 */
void np_hca_end_refusal(struct np_hca *hca)
{
	xa_lock_irq(&hca->peers);
	hca->refusing--;
	np_hca_served(hca);
	xa_unlock_irq(&hca->peers);
}
EXPORT_SYMBOL_IF_KUNIT(np_hca_end_refusal);
