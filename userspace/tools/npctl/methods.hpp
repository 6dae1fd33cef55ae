/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the kernel says by the uverbs methods of a device: refusals, and what it does for queue pairs. */
#ifndef NPR_CTL_METHODS_HPP
#define NPR_CTL_METHODS_HPP

#include <infiniband/verbs.h>
#include <rdma/nprdma.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace npr::ctl
{

struct refusal {
	std::uint64_t sequence = 0;
	std::chrono::nanoseconds since_boot{}; /* of the clock that goes on in sleep */
	std::uint32_t pid = 0;                 /* 0: of the kernel */
	std::string command, device, text;
};

struct refusals {
	std::vector<refusal> records;  /* the oldest one first */
	bool of_all = false;           /* not only of this process */
	std::uint64_t overwritten = 0; /* of any device and process */
};

/*
 * Those that the kernel keeps of a device. @ask: for the first one behind a number; 0 or a negative errno.
 * Nothing: it does not know the method. Throws std::system_error.
 */
[[nodiscard]] std::optional<refusals>
read_refusals(const std::function<int(std::uint64_t after, rdma_np_refusal &)> &ask);

/* What is heard of the peer's kernel: "quick", "MAD", "asked" if it has to answer yet, or "silent". */
[[nodiscard]] const char *kernel_text(const rdma_np_qp_info &);

/* What is told of a queue pair, or why nothing is. */
struct told_of_qp {
	std::optional<rdma_np_qp_info> info; /* nothing: the kernel does nothing for it */
	std::string why_not;                 /* empty: it was told */
};

/* An opened device. Throws std::system_error if it cannot be opened. */
class opened_device
{
public:
	explicit opened_device(const std::string &name);
	[[nodiscard]] ibv_context *get() const noexcept { return context_.get(); }
	[[nodiscard]] std::optional<refusals> refused();
	[[nodiscard]] told_of_qp queue_pair(std::uint32_t number);

private:
	struct closer {
		void operator()(ibv_context *c) const noexcept { ibv_close_device(c); }
	};

	int ask_refusal(std::uint64_t after, rdma_np_refusal &);
	template <class Command> int run(Command &) const;

	std::unique_ptr<ibv_context, closer> context_;
	/* Of the driver: every call carries it, and libibverbs keeps it to itself. */
	std::uint32_t driver_ = 0;
};

} // namespace npr::ctl

#endif
