/* SPDX-License-Identifier: GPL-2.0 */
/* The fixture of tests that need no more than memory under traffic. */
#ifndef NP_MEMORY_H
#define NP_MEMORY_H

#include "np_change.h"

FIXTURE(memory) {
	struct np_pair pair;
	struct np_load load;
	uint8_t *data;		/* of the first page that the peer uses */
};

FIXTURE_SETUP(memory)
{
	ASSERT_EQ(0, memory_open(&self->pair, &self->load, &self->data));
}

FIXTURE_TEARDOWN_PARENT(memory)
{
	NP_CHECK_USAGE(&self->pair.before);
}

#endif /* NP_MEMORY_H */
