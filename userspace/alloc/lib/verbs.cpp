/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include <nprdma/alloc/verbs.hpp>
#include <nprdma/nprdma.h>

#include <cerrno>
#include <string>
#include <system_error>

namespace nprdma::alloc {
namespace {

struct end_mr {
	bool pinned;

	/* There is nobody to tell if it fails: verbs keep the region then, and the memory with it. */
	void operator()(ibv_mr *mr) const noexcept { (void)(pinned ? ibv_dereg_mr(mr) : npr_dereg_mr(mr)); }
};
using unique_mr = std::unique_ptr<ibv_mr, end_mr>;

class verbs_registration final : public registration {
public:
	verbs_registration(registrar &by, unique_mr mr) : registration(by, {mr->lkey, mr->rkey}), mr_(std::move(mr)) {}

private:
	unique_mr mr_;
};

} // namespace

std::unique_ptr<registration> verbs_registrar::add(std::span<std::byte> memory)
{
	const bool pinned = pins();
	unique_mr mr(pinned ? ibv_reg_mr(&pd_, memory.data(), memory.size(), access_)
			    : npr_reg_mr(&pd_, memory.data(), memory.size(), access_),
		     end_mr{pinned});

	if (!mr) {
		std::string what = "registering " + std::to_string(memory.size()) + " bytes with ";
		what += ibv_get_device_name(pd_.context->device);
		if (!pinned && errno == EOPNOTSUPP)
			what += ", unpinned; \"npctl device\" says why it cannot, and pinning::pinned works without";
		else if (pinned && errno == ENOMEM)
			what += ", pinned; \"ulimit -l\" says how many KiB are allowed";
		throw std::system_error(errno, std::generic_category(), what);
	}
	return std::make_unique<verbs_registration>(*this, std::move(mr));
}

} // namespace nprdma::alloc
