/* SPDX-License-Identifier: GPL-2.0 */
/* The fixture: both worlds, and what is unpinned is paged out all the time. */
#ifndef NP_VERBS_H
#define NP_VERBS_H

#include <pthread.h>
#include <stdatomic.h>

#include "np_harness.h"
#include "np_world.h"

FIXTURE(verbs) {
	struct np_usage before;
	struct world *pinned, *unpinned;
	struct result *expected, *result;
	pthread_t pager;
};

static atomic_bool stop;

/* Whatever is used is absent again and again. */
static void *page_out(void *arg)
{
	struct world *w = arg;
	struct area *areas[] = { &w->here, &w->there, &w->sink };

	while (!stop)
		for (int i = 0; i < 3; i++)
			madvise(areas[i]->mem[1], AREA, MADV_PAGEOUT);
	return NULL;
}

FIXTURE_SETUP(verbs)
{
	ASSERT_EQ(0, np_usage_start(&self->before));
	ASSERT_EQ(0, np_set_fault_around(NP_FAULT_AROUND));
	self->pinned = make_world(true);
	ASSERT_NE(NULL, self->pinned);
	self->unpinned = make_world(false);
	ASSERT_NE(NULL, self->unpinned) TH_LOG("%s", strerror(errno));
	self->expected = make_result();
	self->result = make_result();
	ASSERT_NE(NULL, self->expected);
	ASSERT_NE(NULL, self->result);
	ASSERT_EQ(0, pthread_create(&self->pager, NULL, page_out, self->unpinned));
}

FIXTURE_TEARDOWN_PARENT(verbs)
{
	NP_CHECK_USAGE(&self->before);
}

#endif /* NP_VERBS_H */
