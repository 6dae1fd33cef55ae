/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a test cannot go on without. */
#ifndef NPRDMA_TRANSPORT_TESTS_MUST_HPP
#define NPRDMA_TRANSPORT_TESTS_MUST_HPP

#include <nprdma/transport.hpp>

#include <stdexcept>
#include <utility>

namespace nprdma::transport
{

/* The value, or an exception with the reason why there is none. */
template <class T> T must(result<T> r)
{
	if (!r)
		throw std::runtime_error(r.why().text);
	return std::move(*r);
}

inline void must(status s)
{
	if (!s)
		throw std::runtime_error(s.why().text);
}

} // namespace nprdma::transport

#endif
