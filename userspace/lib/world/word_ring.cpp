/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "world/word_ring.hpp"
#include "protocol/engine.hpp"

#include <cerrno>

namespace npr {

word_ring::word_ring(const provider &p, ibv_pd *pd)
    : reg_mr_(p.reg_mr), pd_(pd), words_(engine::min_words), mr_(nullptr, p.dereg_mr)
{
}

int word_ring::make() noexcept
{
	const std::lock_guard lock(mutex_);

	if (mr_)
		return 0;
	errno = 0;
	mr_.reset(reg_mr_(pd_, words_.data(), words_.size() * sizeof(words_[0]),
			  reinterpret_cast<std::uintptr_t>(words_.data()), IBV_ACCESS_LOCAL_WRITE));
	return mr_ ? 0 : errno ? -errno : -ENOMEM;
}

} // namespace npr
