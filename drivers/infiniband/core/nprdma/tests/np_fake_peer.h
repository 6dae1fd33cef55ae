/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A peer whose device does nothing, for KUnit tests: the protocol runs for real, what
 * it sends goes to the test, and so does what it does with the QP.
 */
#ifndef NP_FAKE_PEER_H
#define NP_FAKE_PEER_H

#include <kunit/test.h>

#include "../../restrack.h"
#include "../np_hooks.h"
#include "../np_proto.h"

/**
 * struct np_fake_peer - a QP that is connected, and its peer
 * @peer: has one reference more than the table's, the test's
 * @hca: the device's
 * @port: @port.send is the test's
 * @ibdev: the device
 * @port_data: of a port without properties, by port number
 * @qp: the QP
 * @failed: the QP goes to the error state
 * @pd: of address handles
 * @gsi: has that
 * @agent: of @gsi
 * @path: of @peer; has one reference more than that, the test's
 * @ah_lid: what the newest address handle leads to
 * @ah_task: who made it
 */
struct np_fake_peer {
	struct np_peer peer;
	struct np_hca hca;
	struct np_port port;
	struct ib_device *ibdev;
	struct ib_port_data port_data[2];
	struct ib_qp qp;
	void (*failed)(struct np_fake_peer *fake);
	struct ib_pd pd;
	struct ib_qp gsi;
	struct ib_mad_agent agent;
	struct np_path path;
	u16 ah_lid;
	struct task_struct *ah_task;
};

static inline int np_fake_create_ah(struct ib_ah *ah,
				    struct rdma_ah_init_attr *attr,
				    struct ib_udata *udata)
{
	struct np_fake_peer *fake = container_of(ah->pd, struct np_fake_peer, pd);

	fake->ah_lid = rdma_ah_get_dlid(attr->ah_attr);
	fake->ah_task = current;
	return 0;
}

static inline int np_fake_destroy_ah(struct ib_ah *ah, u32 flags)
{
	return 0;
}

static inline int np_fake_modify_qp(struct ib_qp *qp, struct ib_qp_attr *attr,
				    int attr_mask, struct ib_udata *udata)
{
	struct np_fake_peer *fake = container_of(qp, struct np_fake_peer, qp);

	if (attr_mask != IB_QP_STATE || attr->qp_state != IB_QPS_ERR)
		return -EINVAL;
	if (fake->failed)
		fake->failed(fake);
	return 0;
}

/* @fake: zeroed */
static inline void np_fake_peer_init(struct kunit *test,
				     struct np_fake_peer *fake)
{
	struct np_peer *peer = &fake->peer;
	struct ib_qp *qp = &fake->qp;

	fake->ibdev = _ib_alloc_device(sizeof(*fake->ibdev));
	KUNIT_ASSERT_NOT_NULL(test, fake->ibdev);
	fake->ibdev->port_data = fake->port_data;
	fake->ibdev->phys_port_cnt = 1;
	fake->ibdev->type = RDMA_DEVICE_TYPE_SMI;
	fake->ibdev->ops.modify_qp = np_fake_modify_qp;
	fake->ibdev->ops.create_ah = np_fake_create_ah;
	fake->ibdev->ops.destroy_ah = np_fake_destroy_ah;
	fake->ibdev->ops.size_ib_ah = sizeof(struct ib_ah);
	ib_set_client_data(fake->ibdev, &np_client, &fake->hca);

	qp->device = fake->ibdev;
	qp->real_qp = qp;
	qp->qp_num = 1;
	qp->qp_type = IB_QPT_RC;
	np_qp_init(qp);
	qp->np.connected = true;
	qp->np.dest_qpn = 2;
	rdma_restrack_new(&qp->res, RDMA_RESTRACK_QP);
	rdma_restrack_set_name(&qp->res, "kunit");
	rdma_restrack_add(&qp->res);

	np_hca_init(&fake->hca, fake->ibdev);
	fake->pd.device = fake->ibdev;
	fake->gsi.pd = &fake->pd;
	fake->agent.qp = &fake->gsi;
	fake->port.hca = &fake->hca;
	fake->port.port_num = 1;
	fake->port.agent = &fake->agent;
	fake->port.receive = np_receive;
	init_waitqueue_head(&fake->port.idle);
	fake->path.port = &fake->port;
	kref_init(&fake->path.ref);
	kref_get(&fake->path.ref);

	peer->hca = &fake->hca;
	peer->port = &fake->port;
	peer->path = &fake->path;
	peer->qp = qp;
	peer->qpn = qp->qp_num;
	peer->remote_qpn = qp->np.dest_qpn;
	np_peer_prepare(peer);
	kref_get(&peer->ref);
	KUNIT_ASSERT_EQ(test, 0, xa_err(xa_store_irq(&fake->hca.peers,
						     peer->qpn, peer,
						     GFP_KERNEL)));
}

/*
 * All that was queued is done: a RESOLVE of a stranger, then the answer to it, and then
 * the end of the path by which that went.
 */
static inline void np_fake_settle(void)
{
	unsigned int i;

	for (i = 0; i < 3; i++)
		flush_workqueue(np_wq);
}

/* A FAULT is over a little later than its answer, and nobody waits for that but tests. */
static inline void np_fake_served(struct np_hca *hca)
{
	while (READ_ONCE(hca->serving))
		usleep_range(100, 1000);
}

/*
 * A MAD from @lid, of the other end's kernel if that is 0; what it asks for is done.
 */
static inline void np_fake_arrives(struct np_port *port,
				   const struct np_msg *msg, bool malformed,
				   u16 lid)
{
	struct np_addr from = { .lid = lid, .qpn = 1 };
	struct ib_wc wc = { .slid = lid, .src_qp = 1 };
	struct ib_grh grh = {};
	struct ib_mad_recv_wc recv = { .wc = &wc, .recv_buf.grh = &grh };

	np_receive(port, msg, malformed, &from, &recv);
	np_fake_settle();
}

/* The request was answered so, and with nothing else: not a byte more or different. */
static inline void np_fake_expect(struct kunit *test, const struct np_msg *request,
				  const struct np_msg *answer, u8 status)
{
	struct np_msg msg = {
		.type = request->type,
		.answer = true,
		.status = status,
		.src_qpn = request->dst_qpn,
		.dst_qpn = request->src_qpn,
		.tid = request->tid,
		.secret = request->secret,
		.nonce = request->nonce,
	};
	struct np_wire expected, wire;

	np_msg_encode(&msg, &expected);
	np_msg_encode(answer, &wire);
	KUNIT_EXPECT_EQ(test, answer->status, status);
	KUNIT_EXPECT_MEMEQ(test, &wire, &expected, sizeof(wire));
}

/* Ends the peer as the end of its QP does; nothing keeps a reference. */
static inline void np_fake_peer_exit(struct kunit *test,
				     struct np_fake_peer *fake)
{
	struct np_peer *peer = &fake->peer;

	np_peer_fail(peer);
	flush_work(&peer->too_many_gone);
	flush_delayed_work(&peer->expire);
	np_fake_settle();
	KUNIT_EXPECT_TRUE(test, peer->dead);
	KUNIT_EXPECT_NULL(test, peer->path);
	KUNIT_EXPECT_EQ(test, kref_read(&fake->path.ref), 1);
	KUNIT_EXPECT_EQ(test, atomic_read(&fake->port.paths), 0);
	KUNIT_EXPECT_TRUE(test, completion_done(&peer->gone));
	KUNIT_EXPECT_TRUE(test, xa_empty(&peer->grants));
	KUNIT_EXPECT_EQ(test, peer->nr_grants, 0);
	KUNIT_EXPECT_EQ(test, peer->nr_gone, 0);
	KUNIT_EXPECT_EQ(test, peer->telling, 0);
	KUNIT_EXPECT_EQ(test, peer->active, 0);
	KUNIT_EXPECT_EQ(test, kref_read(&peer->ref), 1);
	KUNIT_EXPECT_EQ(test, kref_read(&fake->hca.ref), 1);
	KUNIT_EXPECT_EQ(test, fake->hca.serving, 0);
	KUNIT_EXPECT_EQ(test, fake->hca.strangers, 0);
	KUNIT_EXPECT_EQ(test, fake->hca.refusing, 0);
	KUNIT_EXPECT_EQ(test, atomic_read(&fake->pd.usecnt), 0);
	kvfree(peer->serve);
	xa_destroy(&peer->grants);
	xa_destroy(&fake->hca.peers);
	rdma_restrack_del(&fake->qp.res);
	xa_erase(&fake->ibdev->client_data, np_client.client_id);
	fake->ibdev->port_data = NULL;
	ib_dealloc_device(fake->ibdev);
}

#endif /* NP_FAKE_PEER_H */
