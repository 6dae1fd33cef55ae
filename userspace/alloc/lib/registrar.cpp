/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include <nprdma/alloc/registrar.hpp>

namespace nprdma::alloc {

/* relaxed, here and below: numbers to look at, see registrar::count() */
registration::registration(registrar &by, alloc::keys keys) noexcept : by_(by), keys_(keys)
{
	by_.made_.fetch_add(1, std::memory_order_relaxed);
}

registration::~registration()
{
	by_.ended_.fetch_add(1, std::memory_order_relaxed);
}

registrar::~registrar() = default;

std::unique_ptr<registration> no_registrar::add(const memory & /* m */)
{
	struct none final : registration {
		explicit none(registrar &by) : registration(by, {}) {}
	};
	return std::make_unique<none>(*this);
}

} // namespace nprdma::alloc
