/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the host says of nprdma beside netlink: sysfs, the device's answer to QUERY, and the kernel's log. */
#ifndef NPR_CTL_HOST_HPP
#define NPR_CTL_HOST_HPP

#include "nldev.hpp"
#include "world/unique_fd.hpp"

#include <nprdma/nprdma.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace npr::ctl
{

/* What cannot be found out, and would have to come from the kernel. */
inline constexpr const char *not_told = "not told by this kernel";

/* First line of a small file; nothing: it cannot be read. */
[[nodiscard]] std::optional<std::string> read_line(const std::string &path);

/* Of ib_core and ib_nprdma, in the order in which they matter; without those that this kernel does not have.
 */
struct parameter {
	std::string module, name, value;
};
[[nodiscard]] std::vector<parameter> parameters();

/* "Enable Relaxed Ordering" of PCIe's Device Control register, in a function's configuration space. */
[[nodiscard]] std::optional<bool> relaxed_ordering(bytes config);

/* What a VT-d unit's capability register says, in hexadecimal digits. */
struct iommu_abilities {
	bool drains, caching_mode;
};
[[nodiscard]] std::optional<iommu_abilities> vtd_abilities(std::string_view capabilities);

enum class verdict { yes, no, unknown };

struct premise {
	const char *name, *what;
	verdict holds = verdict::unknown;
	std::string how;
};

struct device_report {
	device dev;
	verdict serves = verdict::unknown; /* unpinned regions, as their owner */
	std::string reason;                /* if not yes */
	std::optional<npr_device_attr> bounds;
	std::string domain; /* of the IOMMU; empty: unknown */
	std::vector<premise> premises;
};

/* Opens the device, and lets the kernel look whether it could register a region. */
[[nodiscard]] device_report look_at(const device &);
/* The part that needs no device: a directory like /sys/class/infiniband/mlx5_0/device. */
[[nodiscard]] std::vector<premise> premises(const std::string &directory,
					    const std::optional<std::string> &read_order, bool serves);

struct log_record {
	std::uint64_t sequence = 0;
	std::chrono::microseconds since_boot{};
	std::string device; /* RDMA device, or empty */
	std::string text;
};

/* A record of /dev/kmsg. Nothing: it is not one. */
[[nodiscard]] std::optional<log_record> read_record(std::string_view);
/* Is it of nprdma, and if it is of a refusal, why? The record's text without its prefix. */
[[nodiscard]] std::optional<std::string> what_nprdma_says(const log_record &);

/* The kernel's log. Throws std::system_error if it may not be read. */
class kernel_log
{
public:
	enum class from { begin, now };

	explicit kernel_log(from);
	/* Those since the last call. */
	[[nodiscard]] std::vector<log_record> read();

private:
	unique_fd file_;
};

/* Of a process; empty: it has gone. */
[[nodiscard]] std::string command_of(std::uint32_t pid);

} // namespace npr::ctl

#endif
