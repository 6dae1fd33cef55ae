// SPDX-License-Identifier: GPL-2.0
/*
 * Where the trace points of regions are instantiated.
 */
#include <linux/types.h>

#define CREATE_TRACE_POINTS
#include "trace.h"
