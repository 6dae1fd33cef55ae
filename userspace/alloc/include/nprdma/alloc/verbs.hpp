/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Memory that an RDMA adapter knows: the registrar of one protection domain. */
#ifndef NPRDMA_ALLOC_VERBS_HPP
#define NPRDMA_ALLOC_VERBS_HPP

#include <nprdma/alloc/registrar.hpp>

#include <infiniband/verbs.h>

namespace nprdma::alloc {

class NPRDMA_ALLOC_API verbs_registrar final : public registrar {
public:
	static constexpr int all_access =
		IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

	/* Unpinned memory is npr_reg_mr()'s, pinned memory ibv_reg_mr()'s. @pd has to outlive it. */
	explicit verbs_registrar(ibv_pd &pd, pinning how = pinning::unpinned, int access = all_access) noexcept
	    : pd_(pd), how_(how), access_(access)
	{
	}
	[[nodiscard]] std::unique_ptr<registration> add(std::span<std::byte> memory) override;
	[[nodiscard]] bool pins() const noexcept override { return how_ == pinning::pinned; }

private:
	ibv_pd &pd_;
	pinning how_;
	int access_;
};

} // namespace nprdma::alloc

#endif
