// SPDX-License-Identifier: GPL-2.0
/*
 * User space's side of nprdma: the uverbs methods, and the files of channels.
 *
 * Here what an application gave is checked; what happens then is in ask.c.
 */
#include <linux/poll.h>
#include <linux/uaccess.h>
#include <rdma/uverbs_ioctl.h>
#include <rdma/uverbs_std_types.h>

#include "../rdma_core.h"
#include "../uverbs.h"
#include "np_proto.h"

#define UVERBS_MODULE_NAME ib_uverbs
#include <rdma/uverbs_named_ioctl.h>

/* The largest record that a program may ask for, far more than any will need */
#define NP_EVENT_SIZE_MAX	4096

/**
 * struct np_channel_uobject - the file of a channel
 * @uobj: uverbs' part; the file keeps it after the object was destroyed
 * @channel: the channel; its references together have one to @uobj
 * @page: begins with np_channel.posted
 * @event_size: bytes of a record, as the program was compiled
 * @read_lock: an event is looked at, delivered and taken out by one reader at a time
 */
struct np_channel_uobject {
	struct ib_uobject uobj;
	struct np_channel channel;
	struct page *page;
	u32 event_size;
	struct mutex read_lock;
};

static struct np_channel *np_uobj_channel(struct ib_uobject *uobj)
{
	return &container_of(uobj, struct np_channel_uobject, uobj)->channel;
}

static struct np_channel *np_file_channel(struct file *filp)
{
	return np_uobj_channel(filp->private_data);
}

/* Fields that the program does not know are left out, those that we do not are 0 */
static bool np_channel_copy(char __user *to, const struct rdma_np_event *ev,
			    u32 size)
{
	u32 known = min_t(u32, size, sizeof(*ev));

	return !copy_to_user(to, ev, known) &&
	       !clear_user(to + known, size - known);
}

/* What cannot be delivered stays: it may be all that is known of a hold. */
static int np_channel_read_one(struct np_channel *channel, char __user *buf)
{
	struct np_channel_uobject *file =
		container_of(channel, struct np_channel_uobject, channel);
	struct rdma_np_event ev;
	int ret = 0;
	u64 seq;

	if (mutex_lock_interruptible(&file->read_lock))
		return -ERESTARTSYS;
	seq = np_channel_peek(channel, &ev);
	if (seq) {
		ret = -EFAULT;
		if (np_channel_copy(buf, &ev, file->event_size)) {
			np_channel_take(channel, seq);
			ret = 1;
		}
	}
	mutex_unlock(&file->read_lock);
	return ret;
}

static ssize_t np_channel_read(struct file *filp, char __user *buf,
			       size_t count, loff_t *pos)
{
	struct np_channel *channel = np_file_channel(filp);
	u32 size = container_of(channel, struct np_channel_uobject,
				channel)->event_size;
	ssize_t done = 0;
	int ret;

	if (count < size)
		return -EINVAL;

	while (count - done >= size) {
		ret = np_channel_read_one(channel, buf + done);
		if (ret > 0) {
			done += size;
			continue;
		}
		if (done)
			break;
		if (ret)
			return ret;
		if (np_channel_is_closed(channel))
			return -EIO;
		if (filp->f_flags & O_NONBLOCK)
			return -EAGAIN;
		if (wait_event_interruptible(channel->wait,
					     !list_empty_careful(&channel->events) ||
					     np_channel_is_closed(channel)))
			return -ERESTARTSYS;
	}
	return done;
}

static __poll_t np_channel_poll(struct file *filp, struct poll_table_struct *pt)
{
	struct np_channel *channel = np_file_channel(filp);
	__poll_t mask = 0;

	poll_wait(filp, &channel->wait, pt);
	spin_lock(&channel->lock);
	if (!list_empty(&channel->events))
		mask |= EPOLLIN | EPOLLRDNORM;
	if (channel->closed)
		mask |= EPOLLERR;
	spin_unlock(&channel->lock);
	return mask;
}

/*
 * To read only. The page stays for as long as somebody maps it. The file outlives the channel,
 * which goes with the device, or with the uverbs file, and may take the page along.
 */
static int np_channel_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct np_channel_uobject *file =
		container_of(np_file_channel(filp), struct np_channel_uobject, channel);
	struct page *page = NULL;
	int ret;

	if (vma->vm_pgoff || vma_pages(vma) != 1)
		return -EINVAL;
	if (vma->vm_flags & (VM_WRITE | VM_EXEC))
		return -EPERM;
	spin_lock(&file->channel.lock);
	if (!file->channel.closed) {
		page = file->page;
		get_page(page);
	}
	spin_unlock(&file->channel.lock);
	if (!page)
		return -EIO;
	vm_flags_mod(vma, VM_DONTEXPAND, VM_MAYWRITE | VM_MAYEXEC);
	ret = vm_insert_page(vma, vma->vm_start, page);
	put_page(page);
	return ret;
}

static const struct file_operations np_channel_fops = {
	.owner = THIS_MODULE,
	.read = np_channel_read,
	.poll = np_channel_poll,
	.mmap = np_channel_mmap,
	.release = uverbs_uobject_fd_release,
};

static void np_channel_free(struct np_channel *channel)
{
	struct np_channel_uobject *file =
		container_of(channel, struct np_channel_uobject, channel);

	__free_page(file->page);
	uverbs_uobject_put(&file->uobj);
}

/* Last close, or the device goes: then reading finds the end. */
static void np_channel_destroy(struct ib_uobject *uobj,
			       enum rdma_remove_reason why)
{
	np_channel_close(np_uobj_channel(uobj));
	np_channel_put(np_uobj_channel(uobj));
}

/* Methods */

static struct np_channel *np_attr_channel(struct uverbs_attr_bundle *attrs,
					  u16 id)
{
	return np_uobj_channel(uverbs_attr_get_uobject(attrs, id));
}

static int UVERBS_HANDLER(RDMA_NP_METHOD_CHANNEL_ALLOC)(struct uverbs_attr_bundle *attrs)
{
	struct ib_uobject *uobj = uverbs_attr_get_uobject(attrs,
							  RDMA_NP_ATTR_CHANNEL_FD);
	struct np_channel_uobject *file;
	u32 size;
	int err;

	BUILD_BUG_ON(sizeof(struct rdma_np_event) < RDMA_NP_EVENT_SIZE_VER0);
	err = uverbs_copy_from(&size, attrs, RDMA_NP_ATTR_CHANNEL_EVENT_SIZE);
	if (err)
		return err;
	if (size < RDMA_NP_EVENT_SIZE_VER0 || size > NP_EVENT_SIZE_MAX ||
	    !IS_ALIGNED(size, sizeof(u64)))
		return -EINVAL;

	file = container_of(uobj, struct np_channel_uobject, uobj);
	file->page = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (!file->page)
		return -ENOMEM;
	file->event_size = size;
	mutex_init(&file->read_lock);
	uverbs_uobject_get(uobj);
	np_channel_init(np_uobj_channel(uobj), np_channel_free);
	file->channel.posted = page_address(file->page);
	return 0;
}

/* Can the device reach regions of peers? That asks nothing of its driver or its IOMMU */
static bool np_may_ask(struct ib_device *ibdev)
{
	u32 port;

	rdma_for_each_port(ibdev, port)
		if (np_port_may_ask(ibdev, port))
			return true;
	return false;
}

static int UVERBS_HANDLER(RDMA_NP_METHOD_QUERY)(struct uverbs_attr_bundle *attrs)
{
	struct rdma_np_query query = {
		.abi_version = RDMA_NP_ABI_VERSION,
		.max_ranges = RDMA_NP_MAX_RANGES,
		.max_pages = RDMA_NP_MAX_PAGES,
		.max_outstanding = NP_LANES,
	};
	struct ib_ucontext *ucontext = ib_uverbs_get_ucontext(attrs);
	int err;

	if (IS_ERR(ucontext))
		return PTR_ERR(ucontext);
	err = np_device_check(ucontext->device);
	if (!err)
		query.flags |= RDMA_NP_QUERY_OWNER;
	else if (err != -EOPNOTSUPP || !np_may_ask(ucontext->device))
		return err;
	return uverbs_copy_to_struct_or_zero(attrs, RDMA_NP_ATTR_QUERY_RESP, &query,
					     sizeof(query));
}

static int UVERBS_HANDLER(RDMA_NP_METHOD_RESOLVE)(struct uverbs_attr_bundle *attrs)
{
	struct ib_qp *qp = uverbs_attr_get_obj(attrs, RDMA_NP_ATTR_RESOLVE_QP);
	struct np_channel *channel = np_attr_channel(attrs,
						     RDMA_NP_ATTR_RESOLVE_CHANNEL);
	struct rdma_np_region_info info = {};
	struct np_resolve out;
	struct np_peer *peer;
	u64 addr = 0;
	u32 rkey;
	int err;

	err = uverbs_copy_from(&rkey, attrs, RDMA_NP_ATTR_RESOLVE_RKEY);
	if (err)
		return err;
	if (uverbs_attr_is_valid(attrs, RDMA_NP_ATTR_RESOLVE_ADDR)) {
		err = uverbs_copy_from(&addr, attrs, RDMA_NP_ATTR_RESOLVE_ADDR);
		if (err)
			return err;
	}
	peer = np_peer_make(qp);
	if (IS_ERR(peer))
		return PTR_ERR(peer);
	err = np_peer_resolve(peer, channel, rkey, addr, &out);
	np_peer_put(peer);
	if (err)
		return err;

	info.region_id = out.id;
	info.base = out.base;
	info.length = out.length;
	info.access = out.access;
	info.table_key = out.table_key;
	info.read_key = out.read_key;
	info.write_key = out.write_key;
	info.read_addr = out.read_addr;
	info.write_addr = out.write_addr;
	info.table_addr = out.table_addr;
	info.signature = cpu_to_le64(out.signature);
	info.page_shift = out.page_shift;
	info.unit_shift = out.unit_shift;
	info.read_order = out.read_order;
	info.part_shift = out.part_shift;
	info.max_pages = out.max_pages;
	info.max_ranges = out.max_ranges;
	info.max_outstanding = out.lanes;
	return uverbs_copy_to_struct_or_zero(attrs, RDMA_NP_ATTR_RESOLVE_RESP,
					     &info, sizeof(info));
}

static int UVERBS_HANDLER(RDMA_NP_METHOD_FAULT)(struct uverbs_attr_bundle *attrs)
{
	struct ib_qp *qp = uverbs_attr_get_obj(attrs, RDMA_NP_ATTR_FAULT_QP);
	struct np_channel *channel = np_attr_channel(attrs,
						     RDMA_NP_ATTR_FAULT_CHANNEL);
	struct rdma_np_range ranges[RDMA_NP_MAX_RANGES];
	struct rdma_np_fault_req req;
	struct np_peer *peer;
	int err, nr;

	nr = uverbs_attr_ptr_get_array_size(attrs, RDMA_NP_ATTR_FAULT_RANGES,
					    sizeof(ranges[0]));
	if (nr < 0)
		return nr;
	if (nr > RDMA_NP_MAX_RANGES)
		return -EINVAL;
	/* It may be longer than what we know, if the rest is zero */
	err = uverbs_copy_from_or_zero(&req, attrs, RDMA_NP_ATTR_FAULT_REQ);
	if (err)
		return err;
	/* The address of the array: what is copied is as large as what it points to */
	err = uverbs_copy_from_or_zero(&ranges, attrs, RDMA_NP_ATTR_FAULT_RANGES);
	if (err)
		return err;
	if (req.reserved)
		return -EINVAL;
	err = np_ranges_check(ranges, nr, req.flags);
	if (err)
		return err;

	/* Without a peer nothing can have been resolved */
	peer = np_peer_get(qp);
	if (!peer)
		return -ENOENT;
	err = np_peer_fault(peer, channel, &req, ranges, nr);
	np_peer_put(peer);
	return err;
}

static int UVERBS_HANDLER(RDMA_NP_METHOD_RELEASE)(struct uverbs_attr_bundle *attrs)
{
	struct ib_qp *qp = uverbs_attr_get_obj(attrs, RDMA_NP_ATTR_RELEASE_QP);
	struct np_peer *peer;
	u64 hold_id;
	int err;

	err = uverbs_copy_from(&hold_id, attrs, RDMA_NP_ATTR_RELEASE_HOLD);
	if (err)
		return err;
	peer = np_peer_get(qp);
	if (!peer)
		return -ENOENT;
	err = np_peer_release(peer, hold_id);
	np_peer_put(peer);
	return err;
}

static int UVERBS_HANDLER(RDMA_NP_METHOD_FORGET)(struct uverbs_attr_bundle *attrs)
{
	struct ib_qp *qp = uverbs_attr_get_obj(attrs, RDMA_NP_ATTR_FORGET_QP);
	struct np_peer *peer;
	u64 region_id;
	int err;

	err = uverbs_copy_from(&region_id, attrs, RDMA_NP_ATTR_FORGET_REGION);
	if (err)
		return err;
	peer = np_peer_get(qp);
	if (!peer)
		return -ENOENT;
	err = np_peer_forget(peer, region_id);
	np_peer_put(peer);
	return err;
}

/**
 * struct np_hold_uobject - a process's hold of its own memory
 * @recall: called if it is a lease
 * @local: the hold
 * @channel: reference; NULL: it is no lease
 * @ev: RDMA_NP_EVENT_RECALL
 */
struct np_hold_uobject {
	struct np_recall recall;
	struct np_local *local;
	struct np_channel *channel;
	struct np_ev ev;
};

static void np_hold_recalled(struct np_recall *recall)
{
	struct np_hold_uobject *hold = container_of(recall, struct np_hold_uobject,
						    recall);

	np_channel_post(hold->channel, &hold->ev);
}

/* Nobody can recall it any more */
static void np_hold_free(struct np_hold_uobject *hold)
{
	if (hold->channel) {
		np_channel_unpost(hold->channel, &hold->ev);
		np_channel_put(hold->channel);
	}
	kfree(hold);
}

static int np_hold_destroy(struct ib_uobject *uobj, enum rdma_remove_reason why,
			   struct uverbs_attr_bundle *attrs)
{
	struct np_hold_uobject *hold = uobj->object;

	/*
	 * When a process ends or a device goes, the youngest objects go first, and
	 * that is the hold: older QPs may still execute what was posted under it.
	 * The end of the region, of its keys above all, ends that. uverbs come round
	 * again for what is busy. Nothing was posted under a hold that is given up
	 * while it is made, and that must not be busy.
	 */
	if (why != RDMA_REMOVE_DESTROY && why != RDMA_REMOVE_ABORT &&
	    np_local_is_needed(hold->local))
		return -EBUSY;
	np_local_release(hold->local);
	np_hold_free(hold);
	return 0;
}

/* The channel that hears of the recall; NULL: the hold is to be no lease */
static struct np_channel *np_hold_channel(struct uverbs_attr_bundle *attrs, u32 flags)
{
	bool given = uverbs_attr_is_valid(attrs, RDMA_NP_ATTR_HOLD_ALLOC_CHANNEL);

	if (given != !!(flags & RDMA_NP_FAULT_LEASE))
		return ERR_PTR(-EINVAL);
	return given ? np_attr_channel(attrs, RDMA_NP_ATTR_HOLD_ALLOC_CHANNEL) : NULL;
}

static int UVERBS_HANDLER(RDMA_NP_METHOD_HOLD_ALLOC)(struct uverbs_attr_bundle *attrs)
{
	struct ib_uobject *uobj = uverbs_attr_get_uobject(attrs,
							  RDMA_NP_ATTR_HOLD_ALLOC_HANDLE);
	struct ib_mr *mr = uverbs_attr_get_obj(attrs, RDMA_NP_ATTR_HOLD_ALLOC_MR);
	struct np_region *region = np_mr_region(mr);
	struct rdma_np_hold_info info = {};
	struct np_hold_uobject *hold;
	struct rdma_np_hold_req req;
	struct np_channel *channel;
	int err;

	err = uverbs_copy_from_or_zero(&req, attrs, RDMA_NP_ATTR_HOLD_ALLOC_REQ);
	if (err)
		return err;
	if (!region || !req.length || req.reserved ||
	    req.flags & ~(RDMA_NP_FAULT_WRITE | RDMA_NP_FAULT_LEASE))
		return -EINVAL;
	channel = np_hold_channel(attrs, req.flags);
	if (IS_ERR(channel))
		return PTR_ERR(channel);
	hold = kzalloc(sizeof(*hold), GFP_KERNEL_ACCOUNT);
	if (!hold)
		return -ENOMEM;
	INIT_LIST_HEAD(&hold->ev.entry);
	hold->ev.ev.type = RDMA_NP_EVENT_RECALL;
	hold->ev.ev.cookie = req.cookie;
	hold->recall.fn = np_hold_recalled;
	if (channel)
		hold->channel = np_channel_get(channel);
	hold->local = np_local_hold(region, req.addr, req.length,
				    req.flags & RDMA_NP_FAULT_WRITE,
				    channel ? &hold->recall : NULL,
				    &info.addr, &info.lkey);
	if (IS_ERR(hold->local)) {
		err = PTR_ERR(hold->local);
		np_hold_free(hold);
		return err;
	}
	uobj->object = hold;
	uverbs_finalize_uobj_create(attrs, RDMA_NP_ATTR_HOLD_ALLOC_HANDLE);
	return uverbs_copy_to_struct_or_zero(attrs, RDMA_NP_ATTR_HOLD_ALLOC_RESP,
					     &info, sizeof(info));
}

static int UVERBS_HANDLER(RDMA_NP_METHOD_QUERY_MR)(struct uverbs_attr_bundle *attrs)
{
	struct ib_mr *mr = uverbs_attr_get_obj(attrs, RDMA_NP_ATTR_QUERY_MR_HANDLE);
	struct np_region *region = np_mr_region(mr);
	struct rdma_np_mr_info info = {};
	struct np_resolve what;
	struct np_stats stats;

	if (!region)
		return -EINVAL;
	np_region_describe(region, &what);
	np_region_stats(region, &stats);
	info.region_id = what.id;
	info.base = what.base;
	info.length = what.length;
	info.access = what.access;
	info.resident_pages = stats.resident;
	info.writable_pages = stats.writable;
	info.held_pages = stats.held;
	info.faults_minor = stats.faults_minor;
	info.faults_major = stats.faults_major;
	info.faults_noop = stats.faults_noop;
	info.faults_failed = stats.faults_failed;
	info.invalidations = stats.invalidations;
	info.pages_invalidated = stats.pages_invalidated;
	info.holds = stats.holds;
	info.table_pages = stats.table_pages;
	info.huge_leaves = stats.huge;
	return uverbs_copy_to_struct_or_zero(attrs, RDMA_NP_ATTR_QUERY_MR_RESP,
					     &info, sizeof(info));
}

static int UVERBS_HANDLER(RDMA_NP_METHOD_REFUSAL)(struct uverbs_attr_bundle *attrs)
{
	struct ib_ucontext *ucontext = ib_uverbs_get_ucontext(attrs);
	struct rdma_np_refusal refusal;
	u64 after;
	int err;

	if (IS_ERR(ucontext))
		return PTR_ERR(ucontext);
	err = uverbs_copy_from(&after, attrs, RDMA_NP_ATTR_REFUSAL_AFTER);
	if (err)
		return err;
	np_refusal_next(ucontext->device, after, &refusal);
	return uverbs_copy_to_struct_or_zero(attrs, RDMA_NP_ATTR_REFUSAL_RESP,
					     &refusal, sizeof(refusal));
}

static int UVERBS_HANDLER(RDMA_NP_METHOD_QUERY_QP)(struct uverbs_attr_bundle *attrs)
{
	struct ib_ucontext *ucontext = ib_uverbs_get_ucontext(attrs);
	struct rdma_np_qp_info info;
	u32 qpn;
	int err;

	if (IS_ERR(ucontext))
		return PTR_ERR(ucontext);
	err = uverbs_copy_from(&qpn, attrs, RDMA_NP_ATTR_QUERY_QP_NUMBER);
	if (err)
		return err;
	/* It may be another process's, as those that rdma netlink shows */
	if (!np_may_see_all(ucontext->device))
		return -EPERM;
	err = np_peer_tell(ucontext->device, qpn, &info);
	if (err)
		return err;
	return uverbs_copy_to_struct_or_zero(attrs, RDMA_NP_ATTR_QUERY_QP_RESP,
					     &info, sizeof(info));
}

DECLARE_UVERBS_NAMED_METHOD(
	RDMA_NP_METHOD_QUERY,
	UVERBS_ATTR_PTR_OUT(RDMA_NP_ATTR_QUERY_RESP,
			    UVERBS_ATTR_STRUCT(struct rdma_np_query, reserved),
			    UA_MANDATORY));

DECLARE_UVERBS_NAMED_METHOD(
	RDMA_NP_METHOD_RESOLVE,
	UVERBS_ATTR_IDR(RDMA_NP_ATTR_RESOLVE_QP, UVERBS_OBJECT_QP,
			UVERBS_ACCESS_READ, UA_MANDATORY),
	UVERBS_ATTR_FD(RDMA_NP_ATTR_RESOLVE_CHANNEL, UVERBS_OBJECT_NP_CHANNEL,
		       UVERBS_ACCESS_READ, UA_MANDATORY),
	UVERBS_ATTR_PTR_IN(RDMA_NP_ATTR_RESOLVE_RKEY, UVERBS_ATTR_TYPE(u32),
			   UA_MANDATORY),
	UVERBS_ATTR_PTR_OUT(RDMA_NP_ATTR_RESOLVE_RESP,
			    UVERBS_ATTR_STRUCT(struct rdma_np_region_info,
					       reserved),
			    UA_MANDATORY),
	UVERBS_ATTR_PTR_IN(RDMA_NP_ATTR_RESOLVE_ADDR, UVERBS_ATTR_TYPE(u64),
			   UA_OPTIONAL));

DECLARE_UVERBS_NAMED_METHOD(
	RDMA_NP_METHOD_FAULT,
	UVERBS_ATTR_IDR(RDMA_NP_ATTR_FAULT_QP, UVERBS_OBJECT_QP,
			UVERBS_ACCESS_READ, UA_MANDATORY),
	UVERBS_ATTR_FD(RDMA_NP_ATTR_FAULT_CHANNEL, UVERBS_OBJECT_NP_CHANNEL,
		       UVERBS_ACCESS_READ, UA_MANDATORY),
	UVERBS_ATTR_PTR_IN(RDMA_NP_ATTR_FAULT_REQ,
			   UVERBS_ATTR_STRUCT(struct rdma_np_fault_req, reserved),
			   UA_MANDATORY),
	UVERBS_ATTR_PTR_IN(RDMA_NP_ATTR_FAULT_RANGES,
			   UVERBS_ATTR_SIZE(sizeof(struct rdma_np_range),
					    RDMA_NP_MAX_RANGES *
					    sizeof(struct rdma_np_range)),
			   UA_MANDATORY));

DECLARE_UVERBS_NAMED_METHOD(
	RDMA_NP_METHOD_RELEASE,
	UVERBS_ATTR_IDR(RDMA_NP_ATTR_RELEASE_QP, UVERBS_OBJECT_QP,
			UVERBS_ACCESS_READ, UA_MANDATORY),
	UVERBS_ATTR_PTR_IN(RDMA_NP_ATTR_RELEASE_HOLD, UVERBS_ATTR_TYPE(u64),
			   UA_MANDATORY));

DECLARE_UVERBS_NAMED_METHOD(
	RDMA_NP_METHOD_FORGET,
	UVERBS_ATTR_IDR(RDMA_NP_ATTR_FORGET_QP, UVERBS_OBJECT_QP,
			UVERBS_ACCESS_READ, UA_MANDATORY),
	UVERBS_ATTR_PTR_IN(RDMA_NP_ATTR_FORGET_REGION, UVERBS_ATTR_TYPE(u64),
			   UA_MANDATORY));

DECLARE_UVERBS_NAMED_METHOD(
	RDMA_NP_METHOD_QUERY_MR,
	UVERBS_ATTR_IDR(RDMA_NP_ATTR_QUERY_MR_HANDLE, UVERBS_OBJECT_MR,
			UVERBS_ACCESS_READ, UA_MANDATORY),
	UVERBS_ATTR_PTR_OUT(RDMA_NP_ATTR_QUERY_MR_RESP,
			    UVERBS_ATTR_STRUCT(struct rdma_np_mr_info, reserved),
			    UA_MANDATORY));

DECLARE_UVERBS_NAMED_METHOD(
	RDMA_NP_METHOD_REFUSAL,
	UVERBS_ATTR_PTR_IN(RDMA_NP_ATTR_REFUSAL_AFTER, UVERBS_ATTR_TYPE(u64),
			   UA_MANDATORY),
	UVERBS_ATTR_PTR_OUT(RDMA_NP_ATTR_REFUSAL_RESP,
			    UVERBS_ATTR_STRUCT(struct rdma_np_refusal, reserved),
			    UA_MANDATORY));

DECLARE_UVERBS_NAMED_METHOD(
	RDMA_NP_METHOD_QUERY_QP,
	UVERBS_ATTR_PTR_IN(RDMA_NP_ATTR_QUERY_QP_NUMBER, UVERBS_ATTR_TYPE(u32),
			   UA_MANDATORY),
	UVERBS_ATTR_PTR_OUT(RDMA_NP_ATTR_QUERY_QP_RESP,
			    UVERBS_ATTR_STRUCT(struct rdma_np_qp_info, reserved),
			    UA_MANDATORY));

DECLARE_UVERBS_GLOBAL_METHODS(
	UVERBS_OBJECT_NPRDMA,
	&UVERBS_METHOD(RDMA_NP_METHOD_QUERY),
	&UVERBS_METHOD(RDMA_NP_METHOD_RESOLVE),
	&UVERBS_METHOD(RDMA_NP_METHOD_FAULT),
	&UVERBS_METHOD(RDMA_NP_METHOD_RELEASE),
	&UVERBS_METHOD(RDMA_NP_METHOD_FORGET),
	&UVERBS_METHOD(RDMA_NP_METHOD_QUERY_MR),
	&UVERBS_METHOD(RDMA_NP_METHOD_REFUSAL),
	&UVERBS_METHOD(RDMA_NP_METHOD_QUERY_QP));

DECLARE_UVERBS_NAMED_METHOD(
	RDMA_NP_METHOD_CHANNEL_ALLOC,
	UVERBS_ATTR_FD(RDMA_NP_ATTR_CHANNEL_FD, UVERBS_OBJECT_NP_CHANNEL,
		       UVERBS_ACCESS_NEW, UA_MANDATORY),
	UVERBS_ATTR_PTR_IN(RDMA_NP_ATTR_CHANNEL_EVENT_SIZE,
			   UVERBS_ATTR_TYPE(u32), UA_MANDATORY));

DECLARE_UVERBS_NAMED_OBJECT(
	UVERBS_OBJECT_NP_CHANNEL,
	UVERBS_TYPE_ALLOC_FD(sizeof(struct np_channel_uobject),
			     np_channel_destroy, &np_channel_fops, "[nprdma]", O_RDONLY),
	&UVERBS_METHOD(RDMA_NP_METHOD_CHANNEL_ALLOC));

DECLARE_UVERBS_NAMED_METHOD(
	RDMA_NP_METHOD_HOLD_ALLOC,
	UVERBS_ATTR_IDR(RDMA_NP_ATTR_HOLD_ALLOC_HANDLE, UVERBS_OBJECT_NP_HOLD,
			UVERBS_ACCESS_NEW, UA_MANDATORY),
	UVERBS_ATTR_IDR(RDMA_NP_ATTR_HOLD_ALLOC_MR, UVERBS_OBJECT_MR,
			UVERBS_ACCESS_READ, UA_MANDATORY),
	UVERBS_ATTR_PTR_IN(RDMA_NP_ATTR_HOLD_ALLOC_REQ,
			   UVERBS_ATTR_STRUCT(struct rdma_np_hold_req, reserved),
			   UA_MANDATORY),
	UVERBS_ATTR_PTR_OUT(RDMA_NP_ATTR_HOLD_ALLOC_RESP,
			    UVERBS_ATTR_STRUCT(struct rdma_np_hold_info, reserved),
			    UA_MANDATORY),
	UVERBS_ATTR_FD(RDMA_NP_ATTR_HOLD_ALLOC_CHANNEL, UVERBS_OBJECT_NP_CHANNEL,
		       UVERBS_ACCESS_READ, UA_OPTIONAL));

DECLARE_UVERBS_NAMED_METHOD_DESTROY(
	RDMA_NP_METHOD_HOLD_FREE,
	UVERBS_ATTR_IDR(RDMA_NP_ATTR_HOLD_FREE_HANDLE, UVERBS_OBJECT_NP_HOLD,
			UVERBS_ACCESS_DESTROY, UA_MANDATORY));

DECLARE_UVERBS_NAMED_OBJECT(
	UVERBS_OBJECT_NP_HOLD,
	UVERBS_TYPE_ALLOC_IDR(np_hold_destroy),
	&UVERBS_METHOD(RDMA_NP_METHOD_HOLD_ALLOC),
	&UVERBS_METHOD(RDMA_NP_METHOD_HOLD_FREE));

const struct uapi_definition uverbs_def_obj_nprdma[] = {
	UAPI_DEF_CHAIN_OBJ_TREE_NAMED(UVERBS_OBJECT_NPRDMA),
	UAPI_DEF_CHAIN_OBJ_TREE_NAMED(UVERBS_OBJECT_NP_CHANNEL),
	UAPI_DEF_CHAIN_OBJ_TREE_NAMED(UVERBS_OBJECT_NP_HOLD),
	{}
};
