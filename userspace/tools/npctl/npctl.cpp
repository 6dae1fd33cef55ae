/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Shows what the kernel does for memory regions that are not pinned: devices, regions, queue pairs, refusals.
 */
#include "host.hpp"
#include "json.hpp"
#include "methods.hpp"
#include "nldev.hpp"

#include <CLI/CLI.hpp>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <rdma/nprdma.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <exception>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace
{

using namespace npr::ctl;
using clock_type = std::chrono::steady_clock;
using table = std::vector<std::vector<std::string>>;

constexpr int usage_failure = 64;

struct arguments {
	bool json = false;
	std::string device;
	double interval = 1;
	std::uint64_t count = 0; /* 0: for ever */
};

/* Also of a terminal that closed: who reads a part only is no failure of ours. */
void say(const std::string &line)
{
	fmt::print("{}\n", line);
	if (std::fflush(stdout))
		throw std::system_error(errno, std::generic_category(), "cannot write");
}

/* The first row is the head; columns before the given one are words. */
void say_table(const table &rows, std::size_t first_number)
{
	std::vector<std::size_t> width;
	std::string all;

	for (const auto &row : rows) {
		width.resize(std::max(width.size(), row.size()));
		for (std::size_t i = 0; i < row.size(); i++)
			width[i] = std::max(width[i], row[i].size());
	}
	for (const auto &row : rows) {
		std::string line;

		for (std::size_t i = 0; i < row.size(); i++)
			line += i < first_number ? fmt::format("{:<{}}  ", row[i], width[i])
						 : fmt::format("{:>{}}  ", row[i], width[i]);
		line.erase(line.find_last_not_of(' ') + 1);
		all += (all.empty() ? "" : "\n") + line;
	}
	say(all);
}

std::string size_text(std::uint64_t n)
{
	static constexpr const char *units[] = {"", "K", "M", "G", "T", "P", "E"};
	double value = static_cast<double>(n);
	std::size_t unit = 0;

	while (value >= 1024 && unit + 1 < std::size(units)) {
		value /= 1024;
		unit++;
	}
	return unit && value < 10 && value != static_cast<double>(static_cast<int>(value))
		   ? fmt::format("{:.1f}{}", value, units[unit])
		   : fmt::format("{:.0f}{}", value, units[unit]);
}

/* A number of pages that the kernel says may be anything. */
std::uint64_t page_bytes(std::uint64_t pages)
{
	return pages > std::numeric_limits<std::uint64_t>::max() / RDMA_NP_PAGE_SIZE
		   ? std::numeric_limits<std::uint64_t>::max()
		   : pages * RDMA_NP_PAGE_SIZE;
}

std::uint64_t absent_bytes(const region &r)
{
	const std::uint64_t resident = page_bytes(r.resident);

	return r.length > resident ? r.length - resident : 0;
}

std::string rate_text(const std::optional<double> &rate)
{
	return rate ? fmt::format("{:.0f}", *rate) : "-";
}

std::string owner_text(const owner &o)
{
	if (!o.kernel.empty())
		return "[" + printable(o.kernel) + "]";
	return o.pid ? std::to_string(o.pid) : "-";
}

std::string command_text(const owner &o)
{
	const std::string command = o.pid ? command_of(o.pid) : "";

	return command.empty() ? "-" : printable(command);
}

json::object owner_json(const owner &o)
{
	json::object all;

	all.emplace_back("pid", o.pid ? json(o.pid) : json());
	all.emplace_back("command", o.pid ? json(command_of(o.pid)) : json());
	return all;
}

std::vector<device> chosen(nldev &kernel, const arguments &a)
{
	std::vector<device> all = kernel.devices();

	if (a.device.empty())
		return all;
	std::string names;
	std::vector<device> one;

	for (const device &d : all) {
		names += " " + d.name;
		if (d.name == a.device)
			one.push_back(d);
	}
	if (one.empty())
		throw std::runtime_error(fmt::format("there is no RDMA device {}; there {}{}",
						     printable(a.device),
						     all.empty() ? "is none" : "are:", printable(names)));
	return one;
}

/* A region of a device and all that the kernel made for it. */
struct seen_region {
	std::string device;
	region mr;
	std::uint64_t keys = 0;
};

struct sample {
	clock_type::time_point at;
	std::vector<seen_region> regions;
	/* Keys of the kernel's whose region has no MR of a process: device and id, and how many. */
	std::map<std::pair<std::string, std::uint64_t>, std::uint64_t> orphans;

	[[nodiscard]] std::uint64_t leased() const
	{
		std::uint64_t pages = 0;

		for (const seen_region &r : regions)
			pages += r.mr.leased;
		return page_bytes(pages);
	}
};

sample take(nldev &kernel, const arguments &a)
{
	sample s;

	for (const device &d : chosen(kernel, a)) {
		std::map<std::uint64_t, std::uint64_t> keys;

		s.at = clock_type::now();
		auto all = kernel.regions(d);
		if (!all)
			continue;
		for (const region &r : *all)
			if (!r.whose.kernel.empty())
				keys[r.id]++;
		for (region &r : *all) {
			if (!r.whose.kernel.empty())
				continue;
			const auto own = keys.find(r.id);

			s.regions.push_back({d.name, std::move(r), own == keys.end() ? 0 : own->second});
			if (own != keys.end())
				keys.erase(own);
		}
		for (const auto &[id, n] : keys)
			s.orphans[{d.name, id}] = n;
	}
	return s;
}

/* How a region's counters grew in each second; nothing: it was not there. */
class rates
{
public:
	rates(const sample *before, const sample &now, const seen_region &r) : now_(r)
	{
		if (!before)
			return;
		for (const seen_region &old : before->regions)
			/* A region's number is never used again. */
			if (old.device == r.device && old.mr.id == r.mr.id && old.mr.number == r.mr.number)
				before_ = &old;
		seconds_ = std::chrono::duration<double>(now.at - before->at).count();
	}

	[[nodiscard]] std::optional<double> of(std::initializer_list<const char *> names) const
	{
		double sum = 0;

		if (!before_ || seconds_ <= 0 || before_->mr.counters.empty() || now_.mr.counters.empty())
			return std::nullopt;
		for (const char *const name : names)
			sum += static_cast<double>(now_.mr.count(name)) -
			       static_cast<double>(before_->mr.count(name));
		return sum / seconds_;
	}
	[[nodiscard]] std::optional<double> faults() const { return of({"faults_minor", "faults_major"}); }
	[[nodiscard]] std::optional<double> major() const { return of({"faults_major"}); }
	[[nodiscard]] std::optional<double> absented() const
	{
		return of({"page_invalidations", "page_agings"});
	}
	[[nodiscard]] std::optional<double> recalls() const
	{
		return of(
		    {"recalls_change", "recalls_memory", "recalls_budget", "recalls_age", "recalls_gone"});
	}

private:
	const seen_region &now_;
	const seen_region *before_ = nullptr;
	double seconds_ = 0;
};

json regions_json(const sample *before, const sample &now)
{
	json::list regions, orphans;

	for (const seen_region &r : now.regions) {
		const rates rate(before, now, r);
		json::object counters;

		for (const auto &[name, value] : r.mr.counters)
			counters.emplace_back(name, value);
		json::object o{{"device", r.device}, {"region", r.mr.id}, {"mr", r.mr.number}};
		for (auto &member : owner_json(r.mr.whose))
			o.push_back(std::move(member));
		for (auto &member : json::object{{"pd", r.mr.pd},
						 {"length", r.mr.length},
						 {"resident_bytes", page_bytes(r.mr.resident)},
						 {"writable_bytes", page_bytes(r.mr.writable)},
						 {"leased_bytes", page_bytes(r.mr.leased)},
						 {"held_bytes", page_bytes(r.mr.held)},
						 {"absent_bytes", absent_bytes(r.mr)},
						 {"huge_leaves", r.mr.huge},
						 {"keys", r.keys},
						 {"faults_per_second", rate.faults()},
						 {"major_faults_per_second", rate.major()},
						 {"pages_absented_per_second", rate.absented()},
						 {"recalls_per_second", rate.recalls()},
						 {"counters", std::move(counters)}})
			o.push_back(std::move(member));
		regions.emplace_back(std::move(o));
	}
	for (const auto &[of, keys] : now.orphans)
		orphans.emplace_back(
		    json::object{{"device", of.first}, {"region", of.second}, {"keys", keys}});
	return json::object{{"regions", std::move(regions)},
			    {"dead_regions", std::move(orphans)},
			    {"leased_bytes", now.leased()}};
}

void say_regions(const sample *before, const sample &now, bool all_rates)
{
	table rows{{"DEVICE", "REGION", "PID", "COMMAND", "LENGTH", "RESIDENT", "LEASED", "HELD", "ABSENT",
		    "FAULTS/s"}};

	if (all_rates)
		rows.front().insert(rows.front().end(), {"MAJOR/s", "ABSENTED/s", "RECALLS/s"});
	for (const seen_region &r : now.regions) {
		const rates rate(before, now, r);

		rows.push_back({printable(r.device), std::to_string(r.mr.id), owner_text(r.mr.whose),
				command_text(r.mr.whose), size_text(r.mr.length),
				size_text(page_bytes(r.mr.resident)), size_text(page_bytes(r.mr.leased)),
				size_text(page_bytes(r.mr.held)), size_text(absent_bytes(r.mr)),
				rate_text(rate.faults())});
		if (all_rates)
			rows.back().insert(
			    rows.back().end(),
			    {rate_text(rate.major()), rate_text(rate.absented()), rate_text(rate.recalls())});
	}
	if (now.regions.empty())
		say("There are no unpinned regions.");
	else
		say_table(rows, 4);
	for (const auto &[of, keys] : now.orphans)
		say(fmt::format("{}: region {} is dead, and {} of its keys wait for peers to forget them.",
				printable(of.first), of.second, keys));
}

void show_regions(const arguments &a)
{
	nldev kernel;
	sample now = take(kernel, a);
	std::optional<sample> before;

	if (a.interval > 0 && (a.json || !now.regions.empty())) {
		std::this_thread::sleep_until(now.at + std::chrono::duration_cast<clock_type::duration>(
							   std::chrono::duration<double>(a.interval)));
		before = std::move(now);
		now = take(kernel, a);
	}
	if (a.json)
		say(regions_json(before ? &*before : nullptr, now).text());
	else
		say_regions(before ? &*before : nullptr, now, false);
}

std::string wall_clock(std::chrono::system_clock::time_point t)
{
	return fmt::format("{:%F %T}", fmt::localtime(std::chrono::system_clock::to_time_t(t)));
}

void watch(const arguments &a)
{
	const bool screen = !a.json && isatty(STDOUT_FILENO);
	nldev kernel;
	std::optional<sample> before;

	for (std::uint64_t n = 0; !a.count || n < a.count; n++) {
		const auto next = (before ? before->at : clock_type::now()) +
				  std::chrono::duration_cast<clock_type::duration>(
				      std::chrono::duration<double>(before ? a.interval : 0));

		std::this_thread::sleep_until(next);
		sample now = take(kernel, a);
		const sample *const old = before ? &*before : nullptr;

		if (a.json) {
			say(regions_json(old, now).text());
		} else {
			/* To the upper left, and away with what was there. */
			if (screen)
				fmt::print("\033[H\033[2J");
			else if (before)
				say("");
			say(fmt::format("{}  leased: {}", wall_clock(std::chrono::system_clock::now()),
					size_text(now.leased())));
			say_regions(old, now, true);
		}
		before = std::move(now);
	}
}

const char *type_text(std::optional<std::uint8_t> type)
{
	switch (type.value_or(0xfe)) {
	case 0:
		return "SMI";
	case 1:
		return "GSI";
	case 2:
		return "RC";
	case 3:
		return "UC";
	case 4:
		return "UD";
	case 8:
		return "RAW";
	case 9:
		return "XRC_INI";
	case 10:
		return "XRC_TGT";
	case 0xff:
		return "DRIVER";
	default:
		return "?";
	}
}

const char *state_text(std::optional<std::uint8_t> state)
{
	static constexpr const char *names[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};

	return state && *state < std::size(names) ? names[*state] : "?";
}

/* Opens it when the first is asked about; what it says why it cannot holds for all. */
class told_of_qps
{
public:
	explicit told_of_qps(const device &d)
	{
		try {
			opened_.emplace(d.name);
		} catch (const std::system_error &e) {
			why_not_ = e.what();
		}
	}

	/* Only an RC queue pair of a process has a peer that the kernel does something for. */
	std::optional<rdma_np_qp_info> of(const queue_pair &q)
	{
		if (!opened_ || q.type != std::uint8_t{IBV_QPT_RC} || !q.whose.kernel.empty())
			return std::nullopt;
		told_of_qp told = opened_->queue_pair(q.number);

		if (!told.why_not.empty())
			why_not_ = std::move(told.why_not);
		return told.info;
	}
	[[nodiscard]] const std::string &why_not() const noexcept { return why_not_; }

private:
	std::optional<opened_device> opened_;
	std::string why_not_;
};

/* By device */
json reasons_json(const std::map<std::string, std::string> &reasons)
{
	json::object all;

	for (const auto &[name, why] : reasons)
		all.emplace_back(name, why);
	return all;
}

json protocol_json(const std::optional<rdma_np_qp_info> &info)
{
	if (!info)
		return {};
	return json::object{{"kernel", kernel_text(*info)},
			    {"faults", info->faults},
			    {"faults_served", info->faults_served},
			    {"holds", info->holds},
			    {"leases", info->leases},
			    {"leases_granted", info->leases_granted},
			    {"leased_bytes", page_bytes(info->leased_pages)},
			    {"held_bytes", page_bytes(info->held_pages)}};
}

void show_queue_pairs(const arguments &a)
{
	nldev kernel;
	table rows{{"DEVICE", "QP", "TYPE", "STATE", "PID", "COMMAND", "KERNEL", "REMOTE QP", "REGIONS",
		    "BYTES", "FAULTS", "SERVED", "HOLDS", "LEASED", "HELD"}};
	json::list list;
	std::map<std::string, std::string> untold;

	for (const device &d : chosen(kernel, a)) {
		const auto queue_pairs = kernel.queue_pairs(d);
		const auto regions = kernel.regions(d);
		told_of_qps told(d);

		if (!queue_pairs || !regions)
			continue;
		for (const queue_pair &q : *queue_pairs) {
			const auto info = told.of(q);
			std::uint64_t n = 0, length = 0;

			/* What its peer may reach, if it is RC: the regions of its protection domain. */
			for (const region &r : *regions)
				if (q.pd && r.pd == q.pd && q.whose.kernel.empty() &&
				    r.whose.kernel.empty()) {
					n++;
					length += r.length;
				}
			rows.push_back({printable(d.name), std::to_string(q.number), type_text(q.type),
					state_text(q.state), owner_text(q.whose), command_text(q.whose),
					info ? kernel_text(*info) : "-",
					q.remote ? std::to_string(*q.remote) : "-", std::to_string(n),
					size_text(length)});
			if (info)
				rows.back().insert(
				    rows.back().end(),
				    {std::to_string(info->faults), std::to_string(info->faults_served),
				     std::to_string(info->holds), size_text(page_bytes(info->leased_pages)),
				     size_text(page_bytes(info->held_pages))});
			else
				rows.back().insert(rows.back().end(), 5, "-");
			json::object o{{"device", d.name},
				       {"qp", q.number},
				       {"port", q.port},
				       {"type", type_text(q.type)},
				       {"state", state_text(q.state)},
				       {"remote_qp", q.remote},
				       {"kernel", q.whose.kernel.empty() ? json() : json(q.whose.kernel)}};
			for (auto &member : owner_json(q.whose))
				o.push_back(std::move(member));
			for (auto &member : json::object{{"pd", q.pd},
							 {"regions_in_pd", n},
							 {"region_bytes_in_pd", length},
							 {"protocol", protocol_json(info)}})
				o.push_back(std::move(member));
			list.emplace_back(std::move(o));
		}
		if (!told.why_not().empty())
			untold[d.name] = told.why_not();
	}
	if (a.json) {
		say(json(json::object{{"queue_pairs", std::move(list)}, {"not_told", reasons_json(untold)}})
			.text());
		return;
	}
	if (rows.size() == 1)
		say("There are no queue pairs.");
	else
		say_table(rows, 7);
	say("REGIONS: unpinned ones in the same protection domain. KERNEL: how that of the peer is reached.");
	for (const auto &[name, why] : untold)
		say(fmt::format("{}: what nprdma does for each queue pair is not known: {}", printable(name),
				printable(why)));
}

const char *verdict_text(verdict v)
{
	return v == verdict::yes ? "yes" : v == verdict::no ? "no" : "unknown";
}

json verdict_json(verdict v)
{
	return v == verdict::unknown ? json() : json(v == verdict::yes);
}

json device_json(const device_report &r)
{
	json::list premises;
	json bounds;

	for (const premise &p : r.premises)
		premises.emplace_back(json::object{
		    {"name", p.name}, {"what", p.what}, {"holds", verdict_json(p.holds)}, {"how", p.how}});
	if (r.bounds)
		bounds = json::object{{"abi_version", r.bounds->abi_version},
				      {"max_fault_ranges", r.bounds->max_fault_ranges},
				      {"max_fault_pages", r.bounds->max_fault_pages},
				      {"max_faults", r.bounds->max_faults}};
	return json::object{{"device", r.dev.name},
			    {"protocol", r.dev.protocol},
			    {"firmware", r.dev.firmware},
			    {"ports", r.dev.ports},
			    {"serves_unpinned_regions", verdict_json(r.serves)},
			    {"reason", r.reason.empty() ? json() : json(r.reason)},
			    {"iommu_domain", r.domain.empty() ? json() : json(r.domain)},
			    {"bounds", std::move(bounds)},
			    {"premises", std::move(premises)}};
}

void say_device(const device_report &r)
{
	say(fmt::format("{}: {}, firmware {}, {} port{}", printable(r.dev.name),
			r.dev.protocol.empty() ? "unknown protocol" : printable(r.dev.protocol),
			r.dev.firmware.empty() ? "unknown" : printable(r.dev.firmware), r.dev.ports,
			r.dev.ports == 1 ? "" : "s"));
	say(fmt::format("  serves unpinned regions: {}{}{}", verdict_text(r.serves),
			r.reason.empty() ? "" : ": ", printable(r.reason)));
	say(fmt::format("  IOMMU domain: {}", r.domain.empty() ? "none" : printable(r.domain)));
	if (r.bounds)
		say(fmt::format(
		    "  a fault request: at most {} ranges, {} pages; of one queue pair {} at once",
		    r.bounds->max_fault_ranges, r.bounds->max_fault_pages, r.bounds->max_faults));
	for (const premise &p : r.premises)
		say(fmt::format("  {} {}: {}\n     {}", p.name, p.what, verdict_text(p.holds),
				printable(p.how)));
}

void show_devices(const arguments &a)
{
	nldev kernel;
	const auto devices = chosen(kernel, a);
	const std::vector<parameter> all = parameters();
	const sample now = take(kernel, a);
	json::list reports;
	json::object values;

	if (!a.json) {
		if (devices.empty())
			say("There are no RDMA devices.");
		say(all.empty()
			? "This kernel has no unpinned regions: it has none of the parameters of nprdma."
			: "Parameters of this host:");
	}
	for (const parameter &p : all) {
		const std::string name = p.module + "." + p.name;

		if (a.json)
			values.emplace_back(name, p.value);
		else
			say(fmt::format("  {:<30} {}", name, printable(p.value)));
	}
	if (!a.json)
		say(fmt::format("Leased now{}: {}", a.device.empty() ? "" : " of this device's regions",
				size_text(now.leased())));
	for (const device &d : devices) {
		const device_report r = look_at(d);

		if (a.json)
			reports.push_back(device_json(r));
		else
			say_device(r);
	}
	if (a.json)
		say(json(json::object{{"parameters", std::move(values)},
				      {"leased_bytes", now.leased()},
				      {"devices", std::move(reports)}})
			.text());
}

/* For a clock that says how long ago the host was started. */
std::chrono::system_clock::time_point start_of(clockid_t clock)
{
	timespec up{};

	clock_gettime(clock, &up);
	return std::chrono::system_clock::now() - std::chrono::seconds(up.tv_sec) -
	       std::chrono::nanoseconds(up.tv_nsec);
}

/* What the kernel's log has of them. */
void show_logged_refusals(const arguments &a, const std::string &why)
{
	kernel_log log(kernel_log::from::begin);
	/* The log's clock stops in sleep, as this one does. */
	const auto boot = start_of(CLOCK_MONOTONIC);
	json::list list;
	bool none = true;

	for (const log_record &r : log.read()) {
		const auto text = what_nprdma_says(r);

		if (!text || (!a.device.empty() && r.device != a.device))
			continue;
		none = false;
		if (a.json)
			list.emplace_back(json::object{
			    {"sequence", r.sequence},
			    {"seconds_since_boot", static_cast<double>(r.since_boot.count()) / 1e6},
			    {"device", r.device},
			    {"pid", json()},
			    {"command", json()},
			    {"text", *text}});
		else
			say(fmt::format(
			    "{} {}: {}",
			    wall_clock(boot + std::chrono::duration_cast<std::chrono::system_clock::duration>(
						  r.since_boot)),
			    printable(r.device), printable(*text)));
	}
	if (a.json) {
		say(json(json::object{{"source", "log"},
				      {"reason", why},
				      {"records", std::move(list)},
				      {"of_all", json()},
				      {"overwritten", json()}})
			.text());
		return;
	}
	if (none)
		say("The kernel's log has no refusals.");
	say(fmt::format("This is from the log, which has them at a limited rate: {}.", printable(why)));
}

/* Of all chosen devices together. Nothing: of none; why is in @untold, or there is no device. */
std::optional<refusals> told_refusals(const arguments &a, std::map<std::string, std::string> &untold)
{
	std::optional<refusals> all;
	nldev kernel;

	for (const device &d : chosen(kernel, a)) {
		try {
			auto one = opened_device(d.name).refused();

			if (!one) {
				untold[d.name] = not_told;
				continue;
			}
			if (!all)
				all.emplace();
			all->records.insert(all->records.end(), one->records.begin(), one->records.end());
			all->of_all = one->of_all;
			all->overwritten = std::max(all->overwritten, one->overwritten);
		} catch (const std::system_error &e) {
			untold[d.name] = e.what();
		}
	}
	if (all)
		std::ranges::sort(all->records, {}, &refusal::sequence);
	return all;
}

void show_refusals(const arguments &a)
{
	std::map<std::string, std::string> untold;
	const auto told = told_refusals(a, untold);
	/* The kernel's clock for them goes on in sleep, as this one does. */
	const auto boot = start_of(CLOCK_BOOTTIME);
	json::list list;

	if (!told) {
		show_logged_refusals(a, untold.empty()
					    ? "there is no RDMA device to ask"
					    : untold.begin()->first + ": " + untold.begin()->second);
		return;
	}
	for (const refusal &r : told->records) {
		if (a.json)
			list.emplace_back(json::object{
			    {"sequence", r.sequence},
			    {"seconds_since_boot", static_cast<double>(r.since_boot.count()) / 1e9},
			    {"device", r.device},
			    {"pid", r.pid ? json(r.pid) : json()},
			    {"command", r.command},
			    {"text", r.text}});
		else
			say(fmt::format(
			    "{} {} {}{}: {}",
			    wall_clock(boot + std::chrono::duration_cast<std::chrono::system_clock::duration>(
						  r.since_boot)),
			    printable(r.device), printable(r.command),
			    r.pid ? fmt::format(" ({})", r.pid) : "", printable(r.text)));
	}
	if (a.json) {
		say(json(json::object{{"source", "kernel"},
				      {"reason", json()},
				      {"records", std::move(list)},
				      {"of_all", told->of_all},
				      {"overwritten", told->overwritten},
				      {"not_told", reasons_json(untold)}})
			.text());
		return;
	}
	if (told->records.empty())
		say("The kernel keeps no refusals that you may see.");
	if (!told->of_all)
		say("Those of other processes are shown to who has CAP_NET_ADMIN.");
	if (told->overwritten)
		say(fmt::format("{} older ones, of any process, were overwritten.", told->overwritten));
	for (const auto &[name, why] : untold)
		say(fmt::format("{}: its refusals are not known: {}", printable(name), printable(why)));
}

int run(int argc, char **argv)
{
	CLI::App app("Shows what the kernel does for memory regions that are not pinned.", "npctl");
	arguments a;
	void (*todo)(const arguments &) = nullptr;
	auto command = [&](const char *name, const char *what, void (*f)(const arguments &)) {
		CLI::App *const sub = app.add_subcommand(name, what);

		sub->add_option("DEVICE", a.device, "Only this RDMA device");
		sub->parse_complete_callback([&todo, f] { todo = f; });
		return sub;
	};

	app.require_subcommand(1);
	app.fallthrough();
	app.add_flag("--json", a.json, "Write JSON");
	app.footer("npctl(1) says more.");
	command("device",
		"Can a device serve unpinned regions, and if not, why? Premises, bounds, parameters",
		show_devices);
	command("mr", "Unpinned regions: whose, and what is resident, leased, held and absent", show_regions)
	    ->add_option("--interval", a.interval, "Measure rates for so many seconds (1); 0: no rates")
	    ->check(CLI::Range(0.0, 3600.0));
	command("qp",
		"Queue pairs, the unpinned regions of their protection domains, and what is done for them",
		show_queue_pairs);
	CLI::App *const live = command("watch", "Unpinned regions, again and again", watch);
	live->add_option("--interval", a.interval, "Seconds between two looks (1)")
	    ->check(CLI::Range(0.1, 3600.0));
	live->add_option("--count", a.count, "End after so many looks");
	command("why", "What the kernel refused, and why", show_refusals);
	try {
		app.parse(argc, argv);
	} catch (const CLI::CallForHelp &e) {
		return app.exit(e);
	} catch (const CLI::ParseError &e) {
		fmt::print(stderr, "npctl: {}\nnpctl --help says what there is.\n", e.what());
		return usage_failure;
	}
	todo(a);
	return 0;
}

} // namespace

int main(int argc, char **argv)
{
	try {
		return run(argc, argv);
	} catch (const std::exception &e) {
		fmt::print(stderr, "npctl: {}\n", e.what());
		return 1;
	}
}
