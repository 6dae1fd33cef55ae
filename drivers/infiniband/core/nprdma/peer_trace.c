// SPDX-License-Identifier: GPL-2.0
/*
 * Where the trace points of the protocol are instantiated.
 */
#include "np_proto.h"

#define CREATE_TRACE_POINTS
#include "peer_trace.h"
