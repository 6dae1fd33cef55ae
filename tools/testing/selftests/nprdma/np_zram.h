/* SPDX-License-Identifier: GPL-2.0 */
/* Swap in memory, in the place of the guest's disk. */
#ifndef NP_ZRAM_H
#define NP_ZRAM_H

#include "np_test.h"

struct np_swap {
	char disk[300];		/* that was there before, to be put back */
	bool zram;
};

/* Which disk it is: 0, or -ENODEV where there is none. */
int np_swap_find(struct np_swap *swap);
int np_swap_to_zram(struct np_swap *swap);
bool np_swap_back(const struct np_swap *swap);

#endif /* NP_ZRAM_H */
