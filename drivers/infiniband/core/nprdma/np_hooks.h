/* SPDX-License-Identifier: GPL-2.0 */
/*
 * nprdma: what the rest of drivers/infiniband/core calls.
 *
 * Each hook is one line where it is called, and nothing at all in a kernel
 * without CONFIG_INFINIBAND_NPRDMA_REGIONS, where IB_UVERBS_ACCESS_UNPINNED stays an
 * unknown flag, or, for those of queue pairs and of uverbs, without
 * CONFIG_INFINIBAND_NPRDMA.
 */
#ifndef NP_HOOKS_H
#define NP_HOOKS_H

#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>

struct np_region;

#ifdef CONFIG_INFINIBAND_NPRDMA
void np_refusals_free(void);
#else
static inline void np_refusals_free(void)
{
}
#endif

#ifdef CONFIG_INFINIBAND_NPRDMA_REGIONS

int np_init(void);
void np_exit(void);

void np_pd_dealloc(struct ib_pd *pd);

struct ib_mr *np_reg_user_mr(struct ib_pd *pd, u64 start, u64 length,
			     u64 hca_va, u32 access);
int np_rereg_check(struct ib_mr *mr, int flags, u32 access);
int np_advise_mr(struct ib_pd *pd, u32 advice, u32 flags,
		 struct ib_sge *sg_list, u32 num_sge, bool *ours);
void np_mr_dereg_begin(struct ib_mr *mr);
void np_mr_dereg_end(struct np_region *region, struct ib_mr *mr, int ret);

void np_umem_release(struct ib_umem *umem);

int np_fill_res_mr(struct sk_buff *msg, struct ib_mr *mr);
int np_fill_stat_mr(struct sk_buff *msg, struct ib_mr *mr);

void np_device_enable(struct ib_device *ibdev);
void np_device_disable(struct ib_device *ibdev);

#else /* CONFIG_INFINIBAND_NPRDMA_REGIONS */

static inline int np_init(void)
{
	return 0;
}

static inline void np_exit(void)
{
	np_refusals_free();
}

static inline void np_pd_dealloc(struct ib_pd *pd)
{
}

static inline struct ib_mr *np_reg_user_mr(struct ib_pd *pd, u64 start,
					   u64 length, u64 hca_va, u32 access)
{
	return ERR_PTR(-EINVAL);
}

static inline int np_rereg_check(struct ib_mr *mr, int flags, u32 access)
{
	return 0;
}

static inline int np_advise_mr(struct ib_pd *pd, u32 advice, u32 flags,
			       struct ib_sge *sg_list, u32 num_sge, bool *ours)
{
	*ours = false;
	return 0;
}

static inline void np_mr_dereg_begin(struct ib_mr *mr)
{
}

static inline void np_mr_dereg_end(struct np_region *region, struct ib_mr *mr,
				   int ret)
{
}

static inline void np_umem_release(struct ib_umem *umem)
{
}

static inline int np_fill_res_mr(struct sk_buff *msg, struct ib_mr *mr)
{
	return 0;
}

static inline int np_fill_stat_mr(struct sk_buff *msg, struct ib_mr *mr)
{
	return 0;
}

static inline void np_device_enable(struct ib_device *ibdev)
{
}

static inline void np_device_disable(struct ib_device *ibdev)
{
}

#endif /* CONFIG_INFINIBAND_NPRDMA_REGIONS */

#ifdef CONFIG_INFINIBAND_NPRDMA

void np_device_leaves(struct ib_device *ibdev, bool leaves);
void np_qp_init(struct ib_qp *qp);
void np_qp_modify_begin(struct ib_qp *qp);
void np_qp_modify_end(struct ib_qp *qp, const struct ib_qp_attr *attr,
		      int attr_mask, int ret);
void np_qp_destroyed(struct ib_qp *qp);
void np_qp_event(struct ib_qp *qp, enum ib_event_type event);

#else /* CONFIG_INFINIBAND_NPRDMA */

static inline void np_device_leaves(struct ib_device *ibdev, bool leaves)
{
}

static inline void np_qp_init(struct ib_qp *qp)
{
}

static inline void np_qp_modify_begin(struct ib_qp *qp)
{
}

static inline void np_qp_modify_end(struct ib_qp *qp,
				    const struct ib_qp_attr *attr,
				    int attr_mask, int ret)
{
}

static inline void np_qp_destroyed(struct ib_qp *qp)
{
}

static inline void np_qp_event(struct ib_qp *qp, enum ib_event_type event)
{
}

#endif /* CONFIG_INFINIBAND_NPRDMA */
#endif /* NP_HOOKS_H */
