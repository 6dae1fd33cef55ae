/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "kinds.hpp"

#include <cerrno>

namespace nprdma::transport
{

result<std::unique_ptr<context>> open_verbs(const options &)
{
	return error{EOPNOTSUPP, "transport \"verbs\": not yet"};
}

} // namespace nprdma::transport
