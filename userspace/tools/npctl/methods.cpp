/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "methods.hpp"

#include "host.hpp"
#include "world/uverbs_cmd.hpp"

#include <rdma/rdma_user_ioctl.h>
#include <sys/ioctl.h>

#include <cerrno>
#include <cstring>
#include <system_error>

namespace npr::ctl
{

namespace
{

/* Numbers of drivers that the kernel may come to know. */
constexpr std::uint32_t most_drivers = 64;
/* The kernel keeps fewer. Whoever has things refused all the time must not keep us here. */
constexpr std::size_t most_refusals = 256;

/* It may lack its end. */
template <std::size_t Size> std::string string_of(const char (&text)[Size])
{
	return {text, strnlen(text, Size)};
}

bool is_unknown(int rc)
{
	return rc == -EPROTONOSUPPORT || rc == -ENOTTY || rc == -EINVAL;
}

} // namespace

std::optional<refusals> read_refusals(const std::function<int(std::uint64_t after, rdma_np_refusal &)> &ask)
{
	refusals all;
	std::uint64_t after = 0;

	while (all.records.size() < most_refusals) {
		rdma_np_refusal r{};
		const int rc = ask(after, r);

		if (is_unknown(rc))
			return std::nullopt;
		if (rc)
			throw std::system_error(-rc, std::generic_category(), "the kernel's refusals");
		all.of_all = r.flags & RDMA_NP_REFUSAL_ALL;
		all.overwritten = r.oldest ? r.oldest - 1 : 0;
		if (r.seq <= after)
			break;
		after = r.seq;
		all.records.push_back(
		    {.sequence = r.seq,
		     .since_boot = std::chrono::nanoseconds(static_cast<std::int64_t>(r.time & INT64_MAX)),
		     .pid = r.pid,
		     .command = string_of(r.command),
		     .device = string_of(r.device),
		     .text = string_of(r.text)});
	}
	return all;
}

const char *kernel_text(const rdma_np_qp_info &info)
{
	if (info.flags & RDMA_NP_QP_HEARD)
		return info.flags & RDMA_NP_QP_QUICK ? "quick" : "MAD";
	return info.flags & RDMA_NP_QP_ASKING ? "asked" : "silent";
}

opened_device::opened_device(const std::string &name)
{
	int n = 0;
	const std::unique_ptr<ibv_device *[], void (*)(ibv_device **)> list(ibv_get_device_list(&n),
									    ibv_free_device_list);

	for (int i = 0; list && i < n && !context_; i++) {
		if (name != ibv_get_device_name(list[static_cast<std::size_t>(i)]))
			continue;
		errno = 0;
		context_.reset(ibv_open_device(list[static_cast<std::size_t>(i)]));
		if (!context_)
			throw std::system_error(errno ? errno : EIO, std::generic_category(),
						"it cannot be opened");
	}
	if (!context_)
		throw std::system_error(ENODEV, std::generic_category(), "libibverbs does not know it");
	/* The kernel answers EINVAL to another driver's number before it looks at anything else. */
	rdma_np_refusal ignored;
	while (ask_refusal(UINT64_MAX, ignored) == -EINVAL && ++driver_ < most_drivers)
		;
}

template <class Command> int opened_device::run(Command &command) const
{
	command.set_driver(driver_);
	return ioctl(context_->cmd_fd, RDMA_VERBS_IOCTL, command.header()) ? -errno : 0;
}

int opened_device::ask_refusal(std::uint64_t after, rdma_np_refusal &to)
{
	uverbs_cmd<2> command(UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_REFUSAL);

	command.in(RDMA_NP_ATTR_REFUSAL_AFTER, after);
	command.out(RDMA_NP_ATTR_REFUSAL_RESP, to);
	return run(command);
}

std::optional<refusals> opened_device::refused()
{
	return read_refusals(
	    [this](std::uint64_t after, rdma_np_refusal &to) { return ask_refusal(after, to); });
}

told_of_qp opened_device::queue_pair(std::uint32_t number)
{
	uverbs_cmd<2> command(UVERBS_OBJECT_NPRDMA, RDMA_NP_METHOD_QUERY_QP);
	rdma_np_qp_info info{};

	command.in(RDMA_NP_ATTR_QUERY_QP_NUMBER, number);
	command.out(RDMA_NP_ATTR_QUERY_QP_RESP, info);
	const int rc = run(command);

	if (is_unknown(rc))
		return {.info = {}, .why_not = not_told};
	if (rc == -EPERM)
		return {.info = {}, .why_not = "told to who has CAP_NET_ADMIN"};
	if (rc == -ENOENT)
		return {};
	if (rc)
		return {.info = {}, .why_not = std::generic_category().message(-rc)};
	return {.info = info, .why_not = {}};
}

} // namespace npr::ctl
