// SPDX-License-Identifier: GPL-2.0
/*
 * Channels: queues of events for user space.
 *
 * A channel allocates nothing to deliver an event: each is part of what it tells
 * about, a FAULT that was under way or a binding, and was paid for when that
 * began.  A closed channel drops its events; what is still under way finds it
 * closed.
 */
#include <linux/export.h>
#include <linux/poll.h>
#include <kunit/visibility.h>

#include "np_proto.h"

/* FAULTs under way or with an unread event, for one channel */
#define NP_CHANNEL_EVENTS	1024

/**
 * np_channel_init - Begin a channel
 * @channel: zeroed; the caller has its first reference
 * @release: called with the last one
 */
void np_channel_init(struct np_channel *channel,
		     void (*release)(struct np_channel *channel))
{
	kref_init(&channel->ref);
	channel->release = release;
	spin_lock_init(&channel->lock);
	INIT_LIST_HEAD(&channel->events);
	init_waitqueue_head(&channel->wait);
}
EXPORT_SYMBOL_GPL(np_channel_init);

/**
 * np_channel_get - Take a reference
 * @channel: the channel
 *
 * Return: @channel
 */
struct np_channel *np_channel_get(struct np_channel *channel)
{
	kref_get(&channel->ref);
	return channel;
}
EXPORT_SYMBOL_GPL(np_channel_get);

static void np_channel_free(struct kref *ref)
{
	struct np_channel *channel = container_of(ref, struct np_channel, ref);

	channel->release(channel);
}

/**
 * np_channel_put - Give back a reference
 * @channel: the channel
 */
void np_channel_put(struct np_channel *channel)
{
	kref_put(&channel->ref, np_channel_free);
}
EXPORT_SYMBOL_GPL(np_channel_put);

/**
 * np_channel_reserve - Count an event that will come
 * @channel: the channel
 *
 * Return: 0, then it is posted or np_channel_unreserve() follows; -EBUSY;
 * -EBADF: closed
 */
int np_channel_reserve(struct np_channel *channel)
{
	int err = 0;

	spin_lock(&channel->lock);
	if (channel->closed)
		err = -EBADF;
	else if (channel->reserved >= NP_CHANNEL_EVENTS)
		err = -EBUSY;
	else
		channel->reserved++;
	spin_unlock(&channel->lock);
	return err;
}
EXPORT_SYMBOL_IF_KUNIT(np_channel_reserve);

/**
 * np_channel_unreserve - The event will not come
 * @channel: the channel
 */
void np_channel_unreserve(struct np_channel *channel)
{
	spin_lock(&channel->lock);
	channel->reserved--;
	spin_unlock(&channel->lock);
}
EXPORT_SYMBOL_IF_KUNIT(np_channel_unreserve);

/* Under the channel's lock. False: it is closed */
static bool np_channel_append(struct np_channel *channel, struct np_ev *ev)
{
	lockdep_assert_held(&channel->lock);
	ev->seq = ++channel->seq;
	if (channel->closed) {
		channel->reserved -= ev->reserved;
		return false;
	}
	list_add_tail(&ev->entry, &channel->events);
	if (channel->posted)
		WRITE_ONCE(*channel->posted, ev->seq);
	return true;
}

/**
 * np_channel_post - Append an event
 * @channel: the channel
 * @ev: the event; the channel's until @ev->consumed is called
 *
 * Context: atomic context too
 * Return: false: the channel is closed, the event still the caller's
 */
bool np_channel_post(struct np_channel *channel, struct np_ev *ev)
{
	bool ok;

	spin_lock(&channel->lock);
	ok = np_channel_append(channel, ev);
	spin_unlock(&channel->lock);
	if (ok)
		wake_up_interruptible_poll(&channel->wait,
					   EPOLLIN | EPOLLRDNORM);
	return ok;
}
EXPORT_SYMBOL_GPL(np_channel_post);

/**
 * np_channel_try_post - Append an event, if nobody has the channel's lock
 * @channel: the channel
 * @ev: as for np_channel_post()
 *
 * Context: softirq too: whom it interrupts may have the lock
 * Return: false: nothing has happened, or the channel is closed: np_channel_post() says which
 */
bool np_channel_try_post(struct np_channel *channel, struct np_ev *ev)
{
	bool ok;

	if (!spin_trylock(&channel->lock))
		return false;
	ok = !channel->closed && np_channel_append(channel, ev);
	spin_unlock(&channel->lock);
	if (ok)
		wake_up_interruptible_poll(&channel->wait,
					   EPOLLIN | EPOLLRDNORM);
	return ok;
}
EXPORT_SYMBOL_GPL(np_channel_try_post);

/**
 * np_channel_unpost - Take back an event, if it was not read yet
 * @channel: the channel
 * @ev: not reserved, without @consumed
 */
void np_channel_unpost(struct np_channel *channel, struct np_ev *ev)
{
	spin_lock(&channel->lock);
	list_del_init(&ev->entry);
	spin_unlock(&channel->lock);
}
EXPORT_SYMBOL_GPL(np_channel_unpost);

/**
 * np_channel_is_closed - Can nobody read events any more
 * @channel: the channel
 *
 * Return: true if so
 */
bool np_channel_is_closed(struct np_channel *channel)
{
	return READ_ONCE(channel->closed);
}
EXPORT_SYMBOL_GPL(np_channel_is_closed);

/**
 * np_channel_peek - Look at the first event
 * @channel: the channel
 * @out: what it says
 *
 * Return: its number, for np_channel_take(); 0 if there is none
 */
u64 np_channel_peek(struct np_channel *channel, struct rdma_np_event *out)
{
	struct np_ev *ev;
	u64 seq = 0;

	spin_lock(&channel->lock);
	ev = list_first_entry_or_null(&channel->events, struct np_ev, entry);
	if (ev) {
		*out = ev->ev;
		seq = ev->seq;
	}
	spin_unlock(&channel->lock);
	return seq;
}
EXPORT_SYMBOL_GPL(np_channel_peek);

/**
 * np_channel_take - Take out the first event, after it was looked at
 * @channel: the channel
 * @seq: its number; another event stays, because this one was taken back meanwhile
 */
void np_channel_take(struct np_channel *channel, u64 seq)
{
	void (*consumed)(struct np_ev *ev) = NULL;
	struct np_ev *ev;

	spin_lock(&channel->lock);
	ev = list_first_entry_or_null(&channel->events, struct np_ev, entry);
	if (ev && ev->seq == seq) {
		list_del_init(&ev->entry);
		channel->reserved -= ev->reserved;
		consumed = ev->consumed;
	}
	spin_unlock(&channel->lock);
	/* An event without may be gone by now */
	if (consumed)
		consumed(ev);
}
EXPORT_SYMBOL_GPL(np_channel_take);

/**
 * np_channel_pop - Take out the first event
 * @channel: the channel
 * @out: what it says
 *
 * Return: false if there is none; with another reader @out may be his as well
 */
bool np_channel_pop(struct np_channel *channel, struct rdma_np_event *out)
{
	u64 seq = np_channel_peek(channel, out);

	if (seq)
		np_channel_take(channel, seq);
	return seq;
}
EXPORT_SYMBOL_GPL(np_channel_pop);

/**
 * np_channel_close - No more events
 * @channel: the channel
 *
 * Drops those that were not read, and wakes the readers.
 */
void np_channel_close(struct np_channel *channel)
{
	struct rdma_np_event ev;

	spin_lock(&channel->lock);
	channel->closed = true;
	/* Who looks at it only reads, and finds the end */
	if (channel->posted)
		WRITE_ONCE(*channel->posted, U64_MAX);
	spin_unlock(&channel->lock);
	while (np_channel_pop(channel, &ev))
		;
	wake_up_interruptible_poll(&channel->wait, EPOLLERR);
}
EXPORT_SYMBOL_GPL(np_channel_close);
