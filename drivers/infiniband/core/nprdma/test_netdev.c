// SPDX-License-Identifier: GPL-2.0
/*
 * Network interfaces for the emulated adapter of this project's guests.
 *
 * The driver of a RoCE port takes as its network interface the one whose parent is the
 * same PCI function, and of which the function's own Ethernet driver has told it. The
 * emulated function has no Ethernet queues, so its guests make interfaces of other
 * kinds, which have no parent; here those called "roceN" get that of mlx5_N, before they
 * are announced, and its driver is told. Nothing else of an interface changes.
 */
#include <linux/mlx5/driver.h>
#include <linux/netdevice.h>
#include <linux/pci.h>
#include <linux/rtnetlink.h>
#include <linux/slab.h>
#include <rdma/ib_verbs.h>

#include "../core_priv.h"

/**
 * struct np_netdev - a function and its interface
 * @mdev: the function
 * @ndev: its interface, or NULL; under the RTNL lock
 * @told: the one that its driver knows, with a reference; the work item's
 * @work: tells the driver, which takes the RTNL lock for that
 */
struct np_netdev {
	struct mlx5_core_dev *mdev;
	struct net_device *ndev;
	struct net_device *told;
	struct work_struct work;
};

static int np_netdev_add(struct ib_device *ibdev);
static void np_netdev_remove(struct ib_device *ibdev, void *client_data);

static struct ib_client np_netdev_client = {
	.name = "nprdma_netdev",
	.add = np_netdev_add,
	.remove = np_netdev_remove,
};

static void np_netdev_tell(struct np_netdev *np, struct net_device *ndev)
{
	if (np->told == ndev)
		return;
	if (np->told) {
		mlx5_core_uplink_netdev_set(np->mdev, NULL);
		dev_put(np->told);
	}
	np->told = ndev;
	if (ndev) {
		dev_hold(ndev);
		mlx5_core_uplink_netdev_set(np->mdev, ndev);
	}
}

static void np_netdev_work(struct work_struct *work)
{
	struct np_netdev *np = container_of(work, struct np_netdev, work);
	struct net_device *ndev;

	rtnl_lock();
	ndev = np->ndev;
	dev_hold(ndev);
	rtnl_unlock();
	np_netdev_tell(np, ndev);
	dev_put(ndev);
}

/* "roceN" of mlx5_N; the caller puts it. */
static struct ib_device *np_netdev_device(const struct net_device *ndev)
{
	char name[IB_DEVICE_NAME_MAX], rest;
	unsigned int number;

	if (sscanf(ndev->name, "roce%u%c", &number, &rest) != 1)
		return NULL;
	snprintf(name, sizeof(name), "mlx5_%u", number);
	return ib_device_get_by_name(name, RDMA_DRIVER_MLX5);
}

static int np_netdev_event(struct notifier_block *nb, unsigned long event, void *ptr)
{
	struct net_device *ndev = netdev_notifier_info_to_dev(ptr);
	struct ib_device *ibdev;
	struct np_netdev *np;

	if (event != NETDEV_POST_INIT && event != NETDEV_REGISTER &&
	    event != NETDEV_UNREGISTER)
		return NOTIFY_DONE;
	ibdev = np_netdev_device(ndev);
	if (!ibdev)
		return NOTIFY_DONE;
	np = ib_get_client_data(ibdev, &np_netdev_client);
	if (!np)
		goto out;
	if (event == NETDEV_POST_INIT) {
		/* The last event before the interface has a place in sysfs */
		if (!ndev->dev.parent)
			SET_NETDEV_DEV(ndev, ibdev->dev.parent);
	} else if (event == NETDEV_REGISTER) {
		if (ndev->dev.parent == ibdev->dev.parent && !np->ndev) {
			np->ndev = ndev;
			schedule_work(&np->work);
		}
	} else if (np->ndev == ndev) {
		np->ndev = NULL;
		schedule_work(&np->work);
	}
out:
	ib_device_put(ibdev);
	return NOTIFY_DONE;
}

static struct notifier_block np_netdev_nb = {
	.notifier_call = np_netdev_event,
};

static int np_netdev_add(struct ib_device *ibdev)
{
	struct np_netdev *np;

	if (ibdev->ops.driver_id != RDMA_DRIVER_MLX5 || !rdma_protocol_roce(ibdev, 1))
		return -EOPNOTSUPP;
	np = kzalloc(sizeof(*np), GFP_KERNEL);
	if (!np)
		return -ENOMEM;
	np->mdev = pci_get_drvdata(to_pci_dev(ibdev->dev.parent));
	INIT_WORK(&np->work, np_netdev_work);
	ib_set_client_data(ibdev, &np_netdev_client, np);
	return 0;
}

/* The function goes, and the interface may stay. */
static void np_netdev_remove(struct ib_device *ibdev, void *client_data)
{
	struct np_netdev *np = client_data;
	struct net_device *ndev;

	rtnl_lock();
	/* No event finds it any more */
	ib_set_client_data(ibdev, &np_netdev_client, NULL);
	ndev = np->ndev;
	if (ndev)
		device_move(&ndev->dev, NULL, DPM_ORDER_NONE);
	rtnl_unlock();
	cancel_work_sync(&np->work);
	np_netdev_tell(np, NULL);
	kfree(np);
}

static int __init np_netdev_init(void)
{
	int err = ib_register_client(&np_netdev_client);

	return err ?: register_netdevice_notifier(&np_netdev_nb);
}
device_initcall(np_netdev_init);
