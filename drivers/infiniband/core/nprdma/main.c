// SPDX-License-Identifier: GPL-2.0
/*
 * The protocol as a client of the RDMA core: the life of its part of a device.
 */
#include <linux/module.h>
#include <linux/slab.h>
#include <kunit/visibility.h>

#include "np_proto.h"

/*
 * When it returns nobody uses the device but FAULTs that wait for memory of its owner,
 * who may take as long as he likes: they look at the region, which knows that its device
 * is gone, and at the memory of their peer.
 */
static void np_hca_close(struct np_hca *hca, u32 nr_ports)
{
	u32 i;

	np_peer_kill_device(hca);
	for (i = 0; i < nr_ports; i++)
		np_port_close(&hca->ports[i]);
	/* Works that found their peer dead, and still name the device */
	flush_workqueue(np_kill_wq);
	flush_workqueue(np_wq);
	np_hca_put(hca);
}

static int np_client_add(struct ib_device *ibdev)
{
	struct np_hca *hca;
	u32 i;
	int err;

	hca = kzalloc(struct_size(hca, ports, ibdev->phys_port_cnt),
		      GFP_KERNEL);
	if (!hca)
		return -ENOMEM;
	hca->nr_ports = ibdev->phys_port_cnt;
	np_hca_init(hca, ibdev);

	for (i = 0; i < hca->nr_ports; i++)
		np_port_init(&hca->ports[i], hca, i + 1, np_receive,
			     np_receive_at_once);
	/*
	 * A handler finds its peers through the port alone, but user space
	 * finds the device by its client data: last.
	 */
	for (i = 0; i < hca->nr_ports; i++) {
		err = np_port_open(&hca->ports[i]);
		if (err) {
			ibdev_warn(ibdev, "nprdma: no MAD agent on port %u: %d\n",
				   i + 1, err);
			goto err_close;
		}
	}
	/* Before the first peer can be made, and when the client has a number */
	np_peer_listen();
	ib_set_client_data(ibdev, &np_client, hca);
	return 0;

err_close:
	np_hca_close(hca, i + 1);
	return err;
}

static void np_client_remove(struct ib_device *ibdev, void *client_data)
{
	struct np_hca *hca = client_data;

	ib_set_client_data(ibdev, &np_client, NULL);
	/* User QPs went with uverbs, which is a younger client than we are */
	np_hca_close(hca, hca->nr_ports);
}

static void np_peer_leave(struct np_peer *peer)
{
	np_ask_leave(peer);
	np_serve_leave(peer);
}

static const struct np_peer_ops np_ops_of_peers = {
	.init = np_serve_init,
	.end_asking = np_ask_kill,
	.end_serving = np_serve_kill,
	.leave = np_peer_leave,
};

static int __init np_module_init(void)
{
	int err;

	/*
	 * For the protocol itself; what may wait for user memory is served by the
	 * queues of np_owner. Not dependent on new workers, because the peer's
	 * memory pressure may wait for us.
	 *
	 * As many of its works as may run at once may be at work, so none may wait
	 * for another one that is still queued, nor for who does. Transactions and
	 * holds given back take spinlocks and the locks of residency. RESOLVE, FORGET
	 * and GONE take np_peer.ctl as well, which is held by works that are running and
	 * by who has waited for them before (np_serve_kill()), and np_region.lock. An
	 * owner's end waits for its queue's last work, which is about to return. Answers to
	 * who is no peer wait for a neighbour, but a second at most, and they are few. None
	 * waits for the end of a peer.
	 */
	np_wq = alloc_workqueue("nprdma",
				WQ_UNBOUND | WQ_HIGHPRI | WQ_MEM_RECLAIM, 0);
	if (!np_wq)
		return -ENOMEM;
	/* What arrives on the quick transports is behind nobody who waits for something */
	np_receive_wq = alloc_workqueue("nprdma-receive",
					WQ_UNBOUND | WQ_HIGHPRI | WQ_MEM_RECLAIM, 0);
	if (!np_receive_wq) {
		err = -ENOMEM;
		goto err_wq;
	}
	/*
	 * For the end of peers, which waits for works of the other one. Pages under
	 * hold are freed by it.
	 */
	np_kill_wq = alloc_workqueue("nprdma-kill",
				     WQ_UNBOUND | WQ_MEM_RECLAIM, 0);
	if (!np_kill_wq) {
		err = -ENOMEM;
		goto err_receive;
	}
	np_tid_init();
	np_incarnation_init();
	np_lose_init();
	np_peer_init(&np_ops_of_peers);
	np_client.add = np_client_add;
	np_client.remove = np_client_remove;
	err = ib_register_client(&np_client);
	if (err)
		goto err_lose;
	return 0;

err_lose:
	np_lose_exit();
	destroy_workqueue(np_kill_wq);
err_receive:
	destroy_workqueue(np_receive_wq);
err_wq:
	destroy_workqueue(np_wq);
	return err;
}

static void __exit np_module_exit(void)
{
	/* Who looks for a device by the client's number must not do so when it has none */
	np_peer_deafen();
	ib_unregister_client(&np_client);
	/* A device that came meanwhile has made us listen again */
	np_peer_deafen();
	np_lose_exit();
	/* No peers are left, but works that are about to return; these use np_wq */
	destroy_workqueue(np_kill_wq);
	destroy_workqueue(np_receive_wq);
	destroy_workqueue(np_wq);
}

/* Before uverbs, whose objects go before our client does */
fs_initcall(np_module_init);
module_exit(np_module_exit);

MODULE_DESCRIPTION("Access to memory of peers that is not pinned");
MODULE_LICENSE("GPL");
