/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "host.hpp"

#include "methods.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/pci_regs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>

namespace npr::ctl
{

namespace
{

/* Of a virtual capability register of VT-d: 6.2 and 10.4.2 of its specification. */
constexpr std::uint64_t cap_caching_mode = 1ULL << 7, cap_write_drain = 1ULL << 54,
			cap_read_drain = 1ULL << 55;
/* Of the header of an AMD IOMMU's capability block: 3.2.1 of its specification, bit NpCache. */
constexpr std::uint64_t amd_np_cache = 1ULL << 26;

/* At most so much of a file, read at once as sysfs wants it. */
std::optional<std::string> read_file(const std::string &path, std::size_t most)
{
	const unique_fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
	std::string content(most, '\0');
	std::size_t size = 0;

	if (file.get() < 0)
		return std::nullopt;
	while (size < most) {
		const ssize_t n = read(file.get(), content.data() + size, most - size);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return std::nullopt;
		if (!n)
			break;
		size += static_cast<std::size_t>(n);
	}
	content.resize(size);
	return content;
}

template <class T> bool whole_number(std::string_view text, T &to, int base = 10)
{
	const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), to, base);

	return error == std::errc{} && end == text.data() + text.size();
}

bool exists(const std::string &path)
{
	return !access(path.c_str(), F_OK);
}

constexpr std::string_view refused = "unpinned memory regions refused: ";

/* What the kernel wrote about it meanwhile; it does so at a limited rate. */
std::string reason_in(const std::vector<log_record> &log, const std::string &device)
{
	std::string reason;

	for (const log_record &r : log) {
		const auto text = what_nprdma_says(r);

		if (r.device == device && text && text->starts_with(refused))
			reason = text->substr(refused.size());
	}
	return reason;
}

/* What the kernel told this process. */
std::string reason_in(const refusals &all)
{
	std::string reason;

	for (const refusal &r : all.records)
		if (r.pid == static_cast<std::uint32_t>(getpid()) && r.text.starts_with(refused))
			reason = r.text.substr(refused.size());
	return reason;
}

std::string why_refused(opened_device &opened, std::optional<kernel_log> &log, const std::string &device,
			const std::string &domain)
{
	if (!exists("/sys/module/ib_core/parameters/nprdma_read_order"))
		return "this kernel is built without unpinned regions (CONFIG_INFINIBAND_NPRDMA_REGIONS)";
	if (!exists("/sys/module/ib_nprdma"))
		return "the module ib_nprdma is not loaded";
	if (const auto told = opened.refused()) {
		std::string reason = reason_in(*told);

		return reason.empty()
			   ? "so much else was refused meanwhile that the reason is lost; ask again"
			   : reason;
	}
	if (log)
		if (std::string reason = reason_in(log->read(), device); !reason.empty())
			return reason;
	return fmt::format("{}; the kernel's log has the reason, at a limited rate (npctl why){}", not_told,
			   domain.empty() ? "" : fmt::format(". Its IOMMU domain is {}", domain));
}

} // namespace

std::optional<std::string> read_line(const std::string &path)
{
	auto content = read_file(path, 4096);

	if (content)
		content->resize(std::min(content->find('\n'), content->size()));
	return content;
}

std::vector<parameter> parameters()
{
	static constexpr std::pair<const char *, const char *> known[] = {
	    {"ib_core", "nprdma_lease_percent"}, {"ib_core", "nprdma_recall_ms"},
	    {"ib_core", "nprdma_read_order"},    {"ib_nprdma", "hold_ms"},
	    {"ib_nprdma", "lease_ms"},           {"ib_nprdma", "fault_around"},
	    {"ib_nprdma", "fault_at_once"}};
	std::vector<parameter> all;

	for (const auto &[module, name] : known)
		if (const auto value = read_line(fmt::format("/sys/module/{}/parameters/{}", module, name)))
			all.push_back({module, name, *value});
	return all;
}

std::optional<bool> relaxed_ordering(bytes config)
{
	auto byte = [config](std::size_t at) { return static_cast<unsigned>(config[at]); };

	/* Who may not read all of it gets the header, whose list leads behind it. */
	if (config.size() < PCI_STD_HEADER_SIZEOF || !(byte(PCI_STATUS) & PCI_STATUS_CAP_LIST))
		return std::nullopt;
	std::size_t at = byte(PCI_CAPABILITY_LIST) & ~3U;

	/* There is no room for more capabilities, but the list may be a ring. */
	for (int n = 0; n < 48 && at >= PCI_STD_HEADER_SIZEOF && at + PCI_EXP_DEVCTL + 2 <= config.size();
	     n++) {
		if (byte(at + PCI_CAP_LIST_ID) == PCI_CAP_ID_EXP)
			return byte(at + PCI_EXP_DEVCTL) & PCI_EXP_DEVCTL_RELAX_EN;
		at = byte(at + PCI_CAP_LIST_NEXT) & ~3U;
	}
	return std::nullopt;
}

std::optional<iommu_abilities> vtd_abilities(std::string_view capabilities)
{
	std::uint64_t cap = 0;

	if (!whole_number(capabilities, cap, 16))
		return std::nullopt;
	return iommu_abilities{.drains = (cap & cap_write_drain) && (cap & cap_read_drain),
			       .caching_mode = (cap & cap_caching_mode) != 0};
}

std::vector<premise> premises(const std::string &directory, const std::optional<std::string> &read_order,
			      bool serves)
{
	premise p1{
	    .name = "P1", .what = "a READ is executed after the earlier WRITEs of its queue pair", .how = {}};
	premise p2{.name = "P2", .what = "a PCIe read does not pass an earlier posted write", .how = {}};
	premise p3{.name = "P3",
		   .what = "requests are cut at multiples of 64 bytes from where they begin",
		   .how = "cannot be asked"};
	premise p4{.name = "P4", .what = "the IOMMU waits for DMA in flight when it invalidates", .how = {}};
	premise p5{.name = "P5", .what = "a leaf of the IOMMU changes by one store", .how = {}};
	premise p6{.name = "P6",
		   .what = "datagrams carry the queue pair that sent them",
		   .how = "cannot be asked; InfiniBand requires it"};

	if (!read_order) {
		p1.how = "this kernel has no ib_core.nprdma_read_order";
	} else if (*read_order == "auto") {
		p1.how = fmt::format("what its driver knows is {}", not_told);
	} else {
		p1.holds = *read_order == "in-order"       ? verdict::yes
			   : *read_order == "out-of-order" ? verdict::no
							   : verdict::unknown;
		p1.how = fmt::format("the administrator says so (ib_core.nprdma_read_order={})", *read_order);
	}

	/* A virtual function has no such bit of its own. */
	const bool virtual_function = exists(directory + "/physfn");
	const auto config =
	    read_file(directory + (virtual_function ? "/physfn/config" : "/config"), PCI_CFG_SPACE_SIZE);
	const auto relaxed = config ? relaxed_ordering(std::as_bytes(std::span(*config))) : std::nullopt;
	const char *const whose = virtual_function ? " of its physical function" : "";

	if (!relaxed) {
		p2.how = config && config->size() < PCI_CFG_SPACE_SIZE
			     ? "only root may read the PCIe Device Control register"
			     : "it has no PCIe Device Control register that can be read";
	} else if (*relaxed) {
		p2.how = fmt::format(
		    "Enable Relaxed Ordering{} is set, so the adapter may use it; WRITEs are proven "
		    "the slow way unless ib_core.nprdma_read_order says otherwise",
		    whose);
	} else {
		p2.holds = verdict::yes;
		p2.how = fmt::format("Enable Relaxed Ordering{} is clear", whose);
	}

	const auto cap = read_line(directory + "/iommu/intel-iommu/cap");
	std::optional<iommu_abilities> abilities;
	if (cap)
		abilities = vtd_abilities(*cap);
	std::uint64_t amd_header = 0;

	if (const auto amd = read_line(directory + "/iommu/amd-iommu/cap");
	    amd && whole_number(*amd, amd_header, 16)) {
		p4.how = "AMD's IOMMU has no capability bit for it";
		p5.holds = amd_header & amd_np_cache ? verdict::no : verdict::yes;
		p5.how = amd_header & amd_np_cache
			     ? "AMD's IOMMU caches what is not present, so a hypervisor shadows the tables; "
			       "regions are refused"
			     : "AMD's IOMMU caches nothing that is not present, so no hypervisor shadows "
			       "the tables";
	} else if (!abilities) {
		p4.how = p5.how =
		    exists(directory + "/iommu")
			? "its IOMMU is neither VT-d nor AMD's, or tells no capabilities; regions are refused"
			: "no IOMMU is in its way; regions are refused";
	} else {
		p4.holds = abilities->drains ? verdict::yes : verdict::no;
		p4.how = abilities->drains ? "VT-d's capabilities DRD and DWD are set"
					   : "VT-d's capability DRD or DWD is missing; regions are refused";
		if (!abilities->caching_mode) {
			p5.holds = verdict::yes;
			p5.how = "VT-d's caching mode is off, so no hypervisor shadows the tables";
		} else if (serves) {
			p5.holds = verdict::yes;
			p5.how = "VT-d's caching mode is on, and the kernel found first-level tables";
		} else {
			p5.how = "VT-d's caching mode is on, so only first-level tables will do; which they "
				 "are is ";
			p5.how += not_told;
		}
	}
	return {p1, p2, p3, p4, p5, p6};
}

device_report look_at(const device &d)
{
	const std::string directory = "/sys/class/infiniband/" + d.name + "/device";
	device_report report{.dev = d,
			     .reason = {},
			     .bounds = {},
			     .domain = read_line(directory + "/iommu_group/type").value_or(""),
			     .premises = {}};
	std::optional<kernel_log> log;

	try {
		log.emplace(kernel_log::from::now);
	} catch (const std::system_error &) {
		/* Then only the kernel itself can tell the reason. */
	}
	try {
		opened_device opened(d.name);
		npr_device_attr bounds{};
		const int rc = npr_query_device(opened.get(), &bounds);

		if (!rc) {
			report.serves = verdict::yes;
			report.bounds = bounds;
		} else if (rc == -EOPNOTSUPP) {
			report.serves = verdict::no;
			report.reason = why_refused(opened, log, d.name, report.domain);
		} else {
			report.reason = fmt::format("the kernel cannot say: {}", std::strerror(-rc));
		}
	} catch (const std::system_error &e) {
		report.reason = e.what();
	}
	report.premises = premises(directory, read_line("/sys/module/ib_core/parameters/nprdma_read_order"),
				   report.serves == verdict::yes);
	return report;
}

std::optional<log_record> read_record(std::string_view record)
{
	log_record r;
	std::uint64_t priority = 0, time = 0;
	const std::size_t semicolon = record.find(';');
	std::string_view head = record.substr(0, semicolon);
	auto next = [&head] {
		const std::size_t comma = head.find(',');
		const std::string_view field = head.substr(0, comma);

		head = comma == head.npos ? std::string_view{} : head.substr(comma + 1);
		return field;
	};

	/* "priority,sequence,microseconds,flags,...;text", then lines of " NAME=value" */
	if (semicolon == record.npos || !whole_number(next(), priority) ||
	    !whole_number(next(), r.sequence) || !whole_number(next(), time) || time > INT64_MAX)
		return std::nullopt;
	r.since_boot = std::chrono::microseconds(time);
	record.remove_prefix(semicolon + 1);
	r.text = record.substr(0, record.find('\n'));
	record.remove_prefix(std::min(r.text.size() + 1, record.size()));
	while (!record.empty()) {
		static constexpr std::string_view device = " DEVICE=+infiniband:";
		const std::string_view line = record.substr(0, record.find('\n'));

		if (line.starts_with(device))
			r.device = line.substr(device.size());
		record.remove_prefix(std::min(line.size() + 1, record.size()));
	}
	return r;
}

std::optional<std::string> what_nprdma_says(const log_record &r)
{
	std::string_view text = r.text;
	const std::string prefix = fmt::format("infiniband {}: ", r.device);

	if (r.device.empty())
		return std::nullopt;
	if (text.starts_with(prefix))
		text.remove_prefix(prefix.size());
	if (!text.starts_with("nprdma: ") && text.find("unpinned ") == text.npos)
		return std::nullopt;
	return std::string(text);
}

kernel_log::kernel_log(from where) : file_(open("/dev/kmsg", O_RDONLY | O_CLOEXEC | O_NONBLOCK))
{
	if (file_.get() < 0 || lseek(file_.get(), 0, where == from::now ? SEEK_END : SEEK_DATA) < 0)
		throw std::system_error(errno, std::generic_category(), "the kernel's log");
}

std::vector<log_record> kernel_log::read()
{
	std::vector<log_record> all;
	std::array<char, 16384> buffer;

	for (;;) {
		const ssize_t n = ::read(file_.get(), buffer.data(), buffer.size());

		/* EPIPE: records were overwritten before they were read; the next one is there. */
		if (n < 0 && (errno == EINTR || errno == EPIPE))
			continue;
		if (n < 0 && errno != EAGAIN)
			throw std::system_error(errno, std::generic_category(), "the kernel's log");
		if (n <= 0)
			return all;
		if (auto r = read_record({buffer.data(), static_cast<std::size_t>(n)}))
			all.push_back(std::move(*r));
	}
}

std::string command_of(std::uint32_t pid)
{
	return read_line(fmt::format("/proc/{}/comm", pid)).value_or("");
}

} // namespace npr::ctl
