/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Shared receive queues. */
#include "policy.hpp"
#include "real.hpp"
#include "registry.hpp"

#include <nprdma/nprdma.h>

#include <cerrno>
#include <cstdint>

using namespace npr::preload;

NPR_EXPORT ibv_srq *ibv_create_srq(ibv_pd *pd, ibv_srq_init_attr *attr)
{
	ibv_srq *const srq = verbs().ibv_create_srq(pd, attr);
	device *const d = find(pd->context);

	if (!srq || !d)
		return srq;
	npr_srq *const lib = npr_attach_srq(d->lib, srq);
	if (lib && d->srqs.set(srq->handle, srq, lib))
		return srq;
	const int error = lib ? ENOMEM : errno;
	if (lib)
		(void)npr_detach_srq(lib);
	if (may_be_left(pd->context, "SRQ", srq->handle, error))
		return srq;
	(void)verbs().ibv_destroy_srq(srq);
	errno = error;
	return nullptr;
}

NPR_EXPORT int ibv_destroy_srq(ibv_srq *srq)
{
	device *const d = find(srq->context);
	const std::uint32_t handle = srq->handle;
	npr_srq *const lib = d ? d->srqs.find(handle, srq) : nullptr;

	if (const int rc = verbs().ibv_destroy_srq(srq); rc || !lib)
		return rc;
	d->srqs.remove(handle, lib);
	(void)npr_detach_srq(lib);
	return 0;
}
