// SPDX-License-Identifier: GPL-2.0
/* A peer that READs and WRITEs without pause; np_load.h says how it judges. */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "np_load.h"

#define MAGIC 0x4c4fULL

/* 16 bits of magic, 24 of version, 12 of page, 12 of word. */
static uint64_t word_make(const struct np_load *load, unsigned int page, uint64_t version,
			  unsigned int word)
{
	return MAGIC << 48 | (version & 0xffffff) << 24 |
	       (uint64_t)(load->alike ? 0 : page) << 12 | word;
}

static void page_fill(const struct np_load *load, void *p, unsigned int page, uint64_t version)
{
	volatile uint64_t *w = p;

	for (unsigned int i = 0; i < PAGE_WORDS; i++)
		w[i] = word_make(load, page, version, i);
}

static bool page_is(const struct np_load *load, const void *p, unsigned int page, uint64_t version)
{
	const volatile uint64_t *w = p;

	for (unsigned int i = 0; i < PAGE_WORDS; i++)
		if (w[i] != word_make(load, page, version, i))
			return false;
	return true;
}

static void fail(struct np_load *load, int line, unsigned int page, long error)
{
	load->error = error;
	load->at = page;
	atomic_store(&load->failed, line);
	atomic_store(&load->stop, true);
}

#define FAIL(load, page, error) fail(load, __LINE__, page, error)

static unsigned int next_random(unsigned int *seed)
{
	*seed = *seed * 1664525 + 1013904223;
	return *seed >> 8;
}

static size_t offset_of(const struct np_load *load, unsigned int page)
{
	return load->offset + page * PAGE;
}

static int fault(struct np_load *load, unsigned int page, uint32_t flags, int round,
		 struct rdma_np_event *event)
{
	const uint64_t addr = load->info->base + offset_of(load, page);
	const uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	int ret, err;

	if (round >= 4 && !load->no_holds)
		flags |= RDMA_NP_FAULT_HOLD;
	atomic_fetch_add(&load->faults, 1);
	memset(event, 0, sizeof(*event));
	for (;;) {
		ret = np_fault_once(load->peer, load->peer->qp, load->info->region_id, addr, PAGE,
				    flags, event);
		if ((ret != RDMA_NP_BUSY && ret != -EBUSY) || np_now_ms() >= deadline)
			return ret;
		err = load->busy ? load->busy(load) : 0;
		if (err)
			return err;
		np_pause();
	}
}

static void release(struct np_load *load, struct rdma_np_event *event)
{
	if (event->hold_id)
		np_release(load->peer, event->hold_id);
	event->hold_id = 0;
}

/* 0, the status of a fault, or -errno; what was read is at the begin of the buffer. */
static int read_page(struct np_load *load, unsigned int page)
{
	const struct rdma_np_region_info *info = load->info;
	uint64_t deadline = np_now_ms() + NP_WAIT_MS;
	const uint64_t *w = (uint64_t *)load->peer->buf;
	struct rdma_np_event event = {};
	int ret;

	for (int round = 0; np_now_ms() < deadline; round++) {
		bool held = event.hold_id, suspicious = false;

		ret = np_read(load->peer, 0, PAGE, np_read_addr(info, offset_of(load, page)),
			      info->read_key);
		release(load, &event);
		if (ret)
			return ret < 0 ? ret : -EIO;
		for (unsigned int i = 0; i < PAGE_WORDS; i += UNIT_WORDS)
			suspicious |= w[i] == info->signature;
		if (!suspicious || held)
			return 0;
		atomic_fetch_add(&load->suspicious, 1);
		ret = fault(load, page, 0, round, &event);
		if (ret)
			return ret;
	}
	release(load, &event);
	return -ETIMEDOUT;
}

/* Likewise, of what is there; 0: proven. */
static int write_page(struct np_load *load, unsigned int page)
{
	uint64_t deadline = np_now_ms() + NP_WAIT_MS, word;
	struct rdma_np_event event = {};
	int ret;

	ret = np_word(load->peer, load->info, offset_of(load, page), &word);
	if (ret)
		return ret < 0 ? ret : -EIO;
	for (int round = 0; np_now_ms() < deadline; round++) {
		if (np_writable(word)) {
			ret = np_write_try(load->peer, load->info, 0, offset_of(load, page), PAGE,
					   word, NULL);
			release(load, &event);
			if (ret)
				return ret < 0 ? ret : 0;
		}
		ret = fault(load, page, RDMA_NP_FAULT_WRITE, round, &event);
		if (ret)
			return ret;
		word = event.words[0];
	}
	release(load, &event);
	return -ETIMEDOUT;
}

static int move_page(struct np_load *load, unsigned int page, bool write)
{
	int ret = load->move ? load->move(load, page, write) : -EAGAIN;

	if (ret != -EAGAIN)
		return ret;
	return write ? write_page(load, page) : read_page(load, page);
}

static void operate(struct np_load *load, unsigned int number, bool write)
{
	struct np_load_page *page = &load->page[number];
	unsigned int step = atomic_load(&page->step), lost = atomic_load(&page->lost);
	unsigned int phase = step % NP_LOAD_PHASES;
	uint64_t version = atomic_load(&page->version);
	bool steady, there, gone, right;
	int ret, promised;

	if (lost != page->seen_lost) {
		page->seen_lost = lost;
		page->unsure = true;
		page->zeros = atomic_load(&page->zeroed) == lost;
	}
	/* Nothing is known of its content: make it known. What is new is READ first. */
	if (page->zeros)
		write &= phase != NP_LOAD_THERE;
	else
		write |= page->unsure && load->writes_of_8;
	if (write)
		page_fill(load, load->peer->buf, number, version + 1);
	ret = move_page(load, number, write);
	if (ret < 0) {
		FAIL(load, number, ret);
		return;
	}
	steady = atomic_load(&page->step) == step;
	there = steady && phase == NP_LOAD_THERE;
	gone = steady && phase == NP_LOAD_GONE;
	promised = atomic_load(write ? &page->write_status : &page->read_status);

	if (there && ret)
		FAIL(load, number, ret);
	else if (gone && ret != promised)
		FAIL(load, number, 1000 + ret);
	else if (ret && ret != RDMA_NP_ADDRESS && ret != RDMA_NP_ACCESS && ret != RDMA_NP_GONE)
		FAIL(load, number, ret);
	if (write) {
		/*
		 * One that was refused may have landed all the same, unless there was nothing
		 * where it could. If the page was lost meanwhile, nobody knows in which of the
		 * two it landed; if after this one, the next operation finds out.
		 */
		page->seen_lost = atomic_load(&page->lost);
		page->unsure = ret || page->seen_lost != lost;
		page->zeros &= gone && ret;
		atomic_store(&page->version, version + 1);
	} else if (!ret && (there || gone)) {
		right = page->zeros ? np_all(load->peer->buf, PAGE, 0) :
			page->unsure || page_is(load, load->peer->buf, number, version);
		if (!right)
			FAIL(load, number, *(long *)load->peer->buf);
		load->zeros += page->zeros;
		page->zeros = false;
	}
	if (ret) {
		atomic_fetch_add(&load->refused, 1);
		return;
	}
	if (write)
		load->writes++;
	else
		load->reads++;
	atomic_fetch_add(&load->ops, 1);
}

static void *load_thread(void *arg)
{
	struct np_load *load = arg;
	unsigned int seed = 42;

	while (!atomic_load(&load->stop)) {
		unsigned int page = next_random(&seed) % load->pages;

		operate(load, page, next_random(&seed) % 8 < load->writes_of_8);
	}
	return NULL;
}

void np_load_init(struct np_load *load, struct np_end *peer, const struct rdma_np_region_info *info,
		  uint8_t *data, size_t offset, unsigned int pages)
{
	memset(load, 0, sizeof(*load));
	load->peer = peer;
	load->info = info;
	load->data = data;
	load->offset = offset;
	load->pages = pages;
	load->writes_of_8 = 4;
}

int np_load_start(struct np_load *load)
{
	for (unsigned int i = 0; i < load->pages; i++) {
		atomic_store(&load->page[i].version, 1);
		if (load->data)
			page_fill(load, load->data + i * PAGE, i, 1);
		else
			load->page[i].unsure = true;
	}
	return -pthread_create(&load->thread, NULL, load_thread, load);
}

static bool advances(struct np_load *load, atomic_ulong *count, unsigned long n)
{
	unsigned long end = atomic_load(count) + n;

	return np_wait_until(atomic_load(&load->stop) || atomic_load(count) >= end) &&
	       !atomic_load(&load->stop);
}

bool np_load_goes_on(struct np_load *load, unsigned long n)
{
	return advances(load, &load->ops, n);
}

bool np_load_is_refused(struct np_load *load, unsigned long n)
{
	return advances(load, &load->refused, n);
}

const char *np_load_why(struct np_load *load)
{
	static char text[120];

	snprintf(text, sizeof(text), "np_load.c:%d: page %u in step %u, error 0x%lx",
		 atomic_load(&load->failed), load->at,
		 atomic_load(&load->page[load->at].step), load->error);
	return text;
}

bool np_load_stop(struct np_load *load)
{
	atomic_store(&load->stop, true);
	pthread_join(load->thread, NULL);
	return !atomic_load(&load->failed);
}

bool np_load_page_is_right(struct np_load *load, unsigned int number, const void *data)
{
	struct np_load_page *page = &load->page[number];

	if (atomic_load(&page->lost) != page->seen_lost)
		return true;
	if (page->zeros)
		return np_all(data, PAGE, 0);
	return page->unsure || page_is(load, data, number, atomic_load(&page->version));
}

int np_load_differs(struct np_load *load)
{
	for (unsigned int i = 0; i < load->pages; i++)
		if (!np_load_page_is_right(load, i, load->data + i * PAGE))
			return i;
	return -1;
}

void np_load_step(struct np_load *load, unsigned int first, unsigned int n)
{
	for (unsigned int i = first; i < first + n; i++)
		atomic_fetch_add(&load->page[i].step, 1);
}

void np_load_gone(struct np_load *load, unsigned int first, unsigned int n, int read_status,
		  int write_status)
{
	for (unsigned int i = first; i < first + n; i++) {
		atomic_store(&load->page[i].read_status, read_status);
		atomic_store(&load->page[i].write_status, write_status);
	}
	np_load_step(load, first, n);
}

void np_load_lose(struct np_load *load, unsigned int first, unsigned int n)
{
	for (unsigned int i = first; i < first + n; i++)
		atomic_fetch_add(&load->page[i].lost, 1);
}

void np_load_lose_for_zeros(struct np_load *load, unsigned int first, unsigned int n)
{
	for (unsigned int i = first; i < first + n; i++)
		atomic_store(&load->page[i].zeroed, atomic_load(&load->page[i].lost) + 1);
	np_load_lose(load, first, n);
}

int np_load_store_by(struct np_load *load, unsigned int page,
		     int (*put)(void *arg, unsigned int page, const void *data), void *arg)
{
	uint64_t data[PAGE_WORDS];
	int ret;

	np_load_step(load, page, 1);
	page_fill(load, data, page, atomic_fetch_add(&load->page[page].version, 1) + 1);
	ret = put(arg, page, data);
	/* Through the phase in which it is gone, which nobody sees. */
	for (int i = 0; i < 3; i++)
		np_load_step(load, page, 1);
	return ret;
}

/* By the CPU, at the address where the region is. */
static int store(void *arg, unsigned int page, const void *data)
{
	const struct np_load *load = arg;

	memcpy(load->data + page * PAGE, data, PAGE);
	return 0;
}

void np_load_store(struct np_load *load, unsigned int page)
{
	np_load_store_by(load, page, store, load);
}
