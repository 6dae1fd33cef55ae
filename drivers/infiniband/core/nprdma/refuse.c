// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: refusals.
 *
 * An errno or a status does not say why something was refused, nor does a QP that was
 * ended.  The reason goes to the log, at a limited rate, and always to a ring that user
 * space reads by the method REFUSAL.
 *
 * Anybody can have something refused as often as he likes.  That costs the host no
 * memory, and others their places in the ring, which they see by the numbers.
 */
#include <linux/capability.h>
#include <linux/device.h>
#include <linux/pid.h>
#include <linux/sched.h>
#include <linux/spinlock.h>
#include <linux/timekeeping.h>
#include <net/net_namespace.h>
#include <kunit/visibility.h>

#include "np.h"
#include "np_hooks.h"

/**
 * struct np_refusal - one that is kept
 * @tgid: reference to its process, which may have ended; NULL: the kernel's
 * @device: index of its device, which no other device gets
 * @told: what user space reads, without @told.oldest, @told.flags and @told.pid
 */
struct np_refusal {
	struct pid *tgid;
	u32 device;
	struct rdma_np_refusal told;
};

static DEFINE_SPINLOCK(np_refusals_lock); /* of what follows */
static struct np_refusal np_refusals[NP_REFUSALS];
static u64 np_refusals_last; /* number of the newest one; 0: there was none */

/**
 * np_refusal_add() - something is refused, or a QP is ended
 * @task: of which process; NULL: of none
 * @ibdev: device of a live registration, or held by a client
 * @rs: limits the rate of the log
 * @fmt: why, and what to do about it; without a line feed
 *
 * Call it by np_refuse() and the like.
 *
 * Context: any but interrupts; does not sleep.
 */
void np_refusal_add(struct task_struct *task, struct ib_device *ibdev,
		    struct ratelimit_state *rs, const char *fmt, ...)
{
	struct np_refusal new = { .device = ibdev->index }, *slot;
	struct va_format vaf = { .fmt = fmt };
	struct pid *old;
	va_list args;

	va_start(args, fmt);
	vaf.va = &args;
	if (__ratelimit(rs))
		dev_warn(&ibdev->dev, "%pV\n", &vaf);
	vscnprintf(new.told.text, sizeof(new.told.text), fmt, args);
	va_end(args);

	BUILD_BUG_ON(sizeof(new.told.device) != sizeof(ibdev->name));
	strscpy(new.told.device, ibdev->name);
	new.told.time = ktime_get_boottime_ns();
	if (task)
		get_task_comm(new.told.command, task);
	if (task && !(task->flags & PF_KTHREAD))
		new.tgid = get_task_pid(task, PIDTYPE_TGID);

	spin_lock(&np_refusals_lock);
	new.told.seq = ++np_refusals_last;
	slot = &np_refusals[new.told.seq % NP_REFUSALS];
	old = slot->tgid;
	*slot = new;
	spin_unlock(&np_refusals_lock);
	put_pid(old);
}
EXPORT_SYMBOL_GPL(np_refusal_add);

/**
 * np_may_see_all() - may the caller see what other processes do with a device?
 * @ibdev: device of a system call that is under way, which keeps its namespace
 *
 * Return: true if he administers it.
 */
bool np_may_see_all(struct ib_device *ibdev)
{
	/* Without is no offence: he sees what is his own */
	return ns_capable_noaudit(read_pnet(&ibdev->coredev.rdma_net)->user_ns,
				  CAP_NET_ADMIN);
}
EXPORT_SYMBOL_GPL(np_may_see_all);

/*
 * May the caller see a refusal of @tgid, NULL: of the kernel? @all: he administers the
 * device. It may have come from another namespace: processes that he does not see are none
 * of his business.
 */
VISIBLE_IF_KUNIT bool np_refusal_is_visible(struct pid *tgid, bool all)
{
	if (tgid == task_tgid(current))
		return true;
	return all && (!tgid || pid_vnr(tgid));
}
EXPORT_SYMBOL_IF_KUNIT(np_refusal_is_visible);

/**
 * np_refusal_next() - the next refusal of a device that the caller may see
 * @ibdev: device of a system call that is under way
 * @after: number of one that he has seen, or anything else
 * @out: set
 *
 * Context: process context.
 */
void np_refusal_next(struct ib_device *ibdev, u64 after, struct rdma_np_refusal *out)
{
	bool all = np_may_see_all(ibdev);
	const struct np_refusal *r;
	u64 oldest = 1, seq;

	memset(out, 0, sizeof(*out));
	spin_lock(&np_refusals_lock);
	if (np_refusals_last > NP_REFUSALS)
		oldest = np_refusals_last - NP_REFUSALS + 1;
	for (seq = oldest; seq <= np_refusals_last; seq++) {
		r = &np_refusals[seq % NP_REFUSALS];
		if (seq <= after || r->device != ibdev->index ||
		    !np_refusal_is_visible(r->tgid, all))
			continue;
		*out = r->told;
		out->pid = pid_vnr(r->tgid);
		break;
	}
	spin_unlock(&np_refusals_lock);
	out->oldest = oldest;
	out->flags = all ? RDMA_NP_REFUSAL_ALL : 0;
}
EXPORT_SYMBOL_GPL(np_refusal_next);

/**
 * np_refusals_free() - end with ib_core; nobody refuses anything any more
 */
void np_refusals_free(void)
{
	unsigned int i;

	for (i = 0; i < NP_REFUSALS; i++)
		put_pid(np_refusals[i].tgid);
}
