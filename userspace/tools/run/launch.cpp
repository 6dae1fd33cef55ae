/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "launch.hpp"
#include "elf_file.hpp"

#include <CLI/CLI.hpp>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

namespace npr::run
{

namespace
{

constexpr const char *library_name = "libnprdma-preload.so";
/* A script whose interpreter is a script, and so on: the kernel gives up there, too. */
constexpr int most_scripts = 5;

class file
{
public:
	explicit file(const std::string &path) : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
	file(const file &) = delete;
	file &operator=(const file &) = delete;
	~file()
	{
		if (fd_ >= 0)
			close(fd_);
	}
	[[nodiscard]] int fd() const noexcept { return fd_; }

private:
	int fd_;
};

std::string base_name(const std::string &path)
{
	return path.substr(path.rfind('/') + 1);
}

const elf_file &own_file()
{
	static const elf_file own = read_elf(file("/proc/self/exe").fd()).value_or(elf_file{});

	return own;
}

/* "64K": of 1024 bytes each, as in all that is said of memory. */
std::optional<std::uint64_t> bytes(std::string_view text)
{
	static constexpr std::string_view units = "KMGT";
	std::uint64_t n = 0;
	const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);

	if (error != std::errc{} || end == text.data())
		return std::nullopt;
	text.remove_prefix(static_cast<std::size_t>(end - text.data()));
	if (text.empty())
		return n;
	const std::size_t unit = units.find(text.front());

	if (text.size() != 1 || unit == units.npos || n > UINT64_MAX >> 10 * (unit + 1))
		return std::nullopt;
	return n << 10 * (unit + 1);
}

message usage_error(const std::string &text)
{
	return {own_failure, fmt::format("npr-run: {}\nnpr-run --help says what there is.", text)};
}

struct with_program : CLI::Formatter {
	std::string make_usage(const CLI::App *, std::string name) const override
	{
		return "Usage: " + name + " [OPTIONS] [--] PROGRAM [ARGUMENTS...]\n";
	}
};

std::string absolute(const std::string &path)
{
	std::error_code error;
	const std::filesystem::path whole = std::filesystem::absolute(path, error);

	return error ? path : whole.string();
}

} // namespace

std::variant<options, message> parse(int argc, const char *const *argv)
{
	CLI::App app("Runs a program with memory regions that are not pinned: with libnprdma-preload.so.\n"
		     "What no option says stays as the environment (NPRDMA_...) has it.",
		     "npr-run");
	bool only_remote = false, odp = false, none = false, ordered = false, no_leases = false;
	std::string min, direct_verbs, report, preload;

	app.prefix_command();
	app.formatter(std::make_shared<with_program>());
	app.footer("npr-run(1) and nprdma-preload(7) say more.");
	app.add_flag("--only-remote", only_remote, "Unpin only what peers may read or write");
	app.add_flag("--odp", odp, "Unpin only what the program registers with IBV_ACCESS_ON_DEMAND");
	auto *const has_min = app.add_option("--min", min,
					     "Unpin only regions of at least so many bytes; K, M and G are "
					     "1024 times as many each")
				  ->option_text("BYTES");
	app.add_flag("--none", none, "Unpin nothing");
	app.add_flag("--ordered", ordered, "Let WRITEs land in order, for programs that poll memory");
	app.add_flag("--no-leases", no_leases, "Pin nothing of what is used often");
	auto *const has_direct =
	    app.add_option("--direct-verbs", direct_verbs,
			   "pinned: a program that uses a provider's own functions stays pinned; "
			   "hidden: it finds none")
		->option_text("pinned|hidden");
	/* A flag, so that it does not take the program for its file. */
	auto *const has_report =
	    app.add_flag("--report", report,
			 "At exit, say what stayed pinned and why: on standard error, or in FILE")
		->option_text("[=FILE]");
	auto *const has_preload =
	    app.add_option("--preload", preload, "Use this library instead of the installed one")
		->option_text("PATH");

	try {
		app.parse(argc, argv);
	} catch (const CLI::CallForHelp &) {
		std::string text = app.help();

		text.resize(text.find_last_not_of('\n') + 1);
		return message{0, text};
	} catch (const CLI::ParseError &e) {
		return usage_error(e.what());
	}

	options o;

	o.command = app.remaining();
	if (!o.command.empty() && o.command.front() == "--")
		o.command.erase(o.command.begin());
	else if (!o.command.empty() && o.command.front().starts_with('-'))
		return usage_error(fmt::format(
		    "there is no option {}. If it is the program, put -- before it.", o.command.front()));
	if (o.command.empty() || o.command.front().empty())
		return usage_error("no program is named.");

	const bool some = only_remote || *has_min;

	if (odp + none + some > 1)
		return usage_error("--none, --odp, and --only-remote or --min exclude each other.");
	if (none || odp) {
		o.variables.emplace_back("NPRDMA_UNPINNED", none ? "none" : "odp");
	} else if (some) {
		std::string value = only_remote ? "remote" : "";

		if (*has_min) {
			const auto n = bytes(min);

			if (!n)
				return usage_error(fmt::format(
				    "--min is a number of bytes, maybe with K, M, G or T, not {}.", min));
			value += (only_remote ? "," : "") + std::to_string(*n);
		}
		o.variables.emplace_back("NPRDMA_UNPINNED", value);
	}
	if (ordered)
		o.variables.emplace_back("NPRDMA_ORDERED", "1");
	if (no_leases)
		o.variables.emplace_back("NPRDMA_LEASES", "0");
	if (*has_direct) {
		if (direct_verbs != "pinned" && direct_verbs != "hidden")
			return usage_error(
			    fmt::format("--direct-verbs is pinned or hidden, not {}.", direct_verbs));
		o.variables.emplace_back("NPRDMA_DIRECT_VERBS", direct_verbs);
	}
	/* Without a file CLI11 says "true". */
	if (*has_report)
		o.variables.emplace_back("NPRDMA_REPORT", report == "true" ? "1" : absolute(report));
	if (*has_preload) {
		if (preload.empty())
			return usage_error("--preload names no file.");
		o.preload = absolute(preload);
	}
	return o;
}

std::optional<std::string> find_library(const std::string &own_path)
{
	const std::string directory = own_path.substr(0, own_path.rfind('/'));
	const std::string places[] = {directory + "/" NPR_LIBRARY_FROM_BIN, directory, NPR_LIBRARY_DIRECTORY};

	for (const std::string &place : places) {
		const std::string path = place + "/" + library_name;

		if (!access(path.c_str(), F_OK)) {
			std::error_code error;
			const auto whole = std::filesystem::canonical(path, error);

			return error ? path : whole.string();
		}
	}
	return std::nullopt;
}

std::string library_trouble(const std::string &path)
{
	const file library(path);

	if (library.fd() < 0)
		return fmt::format("cannot read {}: {}", path, std::strerror(errno));
	if (path.find_first_of(": ") != path.npos)
		return fmt::format("LD_PRELOAD cannot hold {}, because a space or a colon ends a name there. "
				   "Copy or link it elsewhere.",
				   path);
	const auto elf = read_elf(library.fd());

	if (!elf || !elf->shared_object || !elf->loader.empty())
		return fmt::format("{} is no shared library", path);
	if (!elf->same_machine(own_file()))
		return fmt::format("{} is for another kind of machine", path);
	return {};
}

std::vector<std::string> environment(const char *const *inherited, const options &o,
				     const std::string &library)
{
	std::vector<std::string> all;
	std::string preload = library;
	auto ours = [&](std::string_view name) {
		return std::any_of(o.variables.begin(), o.variables.end(),
				   [&](const auto &v) { return v.first == name; });
	};

	for (; *inherited; inherited++) {
		const std::string_view entry = *inherited;
		const std::string_view name = entry.substr(0, entry.find('='));

		if (name == "LD_PRELOAD" && name.size() < entry.size()) {
			const std::string_view before = entry.substr(name.size() + 1);

			if (!before.empty() && preload == library)
				preload.append(":").append(before);
		} else if (!ours(name)) {
			all.emplace_back(entry);
		}
	}
	for (const auto &[name, value] : o.variables)
		all.push_back(name + "=" + value);
	all.push_back("LD_PRELOAD=" + preload);
	return all;
}

std::string find_program(const std::string &name, const char *path, std::error_code &error)
{
	std::string standard;
	int why = ENOENT;
	auto runs = [&why](const std::string &file) {
		struct stat st;

		if (stat(file.c_str(), &st)) {
			if (errno != ENOENT && errno != ENOTDIR)
				why = errno;
			return false;
		}
		if (S_ISDIR(st.st_mode)) {
			why = EISDIR;
			return false;
		}
		/* With the effective IDs, which count when it is run. */
		if (faccessat(AT_FDCWD, file.c_str(), X_OK, AT_EACCESS)) {
			why = errno;
			return false;
		}
		return true;
	};

	error.clear();
	if (name.find('/') != name.npos) {
		if (runs(name))
			return name;
		error.assign(why, std::generic_category());
		return {};
	}
	if (!path) {
		standard.resize(confstr(_CS_PATH, nullptr, 0));
		confstr(_CS_PATH, standard.data(), standard.size());
		path = standard.c_str();
	}
	for (std::string_view rest = path;;) {
		const std::size_t colon = rest.find(':');
		const std::string_view directory = rest.substr(0, colon);
		std::string file = directory.empty() ? "." : std::string(directory);

		file += '/';
		file += name;
		if (runs(file))
			return file;
		if (colon == rest.npos)
			break;
		rest.remove_prefix(colon + 1);
	}
	/* A directory of that name is not what was meant. */
	error.assign(why == EISDIR ? ENOENT : why, std::generic_category());
	return {};
}

bool is_secure(const struct stat &st, bool has_capabilities, bool set_id_ignored, const identity &who)
{
	const bool user = !set_id_ignored && st.st_mode & S_ISUID;
	/* Without the right to execute for the group the bit says something else. */
	const bool group = !set_id_ignored && (st.st_mode & (S_ISGID | S_IXGRP)) == (S_ISGID | S_IXGRP);

	return (user ? st.st_uid : who.effective_user) != who.real_user ||
	       (group ? st.st_gid : who.effective_group) != who.real_group ||
	       (has_capabilities && !set_id_ignored && who.real_user);
}

std::string obstacle(const std::string &program)
{
	std::string path = program;

	for (int i = 0; i <= most_scripts; i++) {
		const file f(path);
		struct stat st;
		struct statvfs fs;

		if (stat(path.c_str(), &st) || statvfs(path.c_str(), &fs))
			return {};
		const auto interpreter = f.fd() < 0 ? std::nullopt : read_script(f.fd());

		if (interpreter) {
			path = *interpreter;
			continue;
		}
		const std::string what =
		    path == program ? program : fmt::format("{}, which runs {},", path, program);

		if (is_secure(st, getxattr(path.c_str(), "security.capability", nullptr, 0) > 0,
			      fs.f_flag & ST_NOSUID || prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1,
			      {getuid(), geteuid(), getgid(), getegid()}))
			return fmt::format(
			    "{} gets other rights than its caller has (set-user-ID, set-group-ID or "
			    "capabilities), so LD_PRELOAD is ignored.",
			    what);
		const auto elf = f.fd() < 0 ? std::nullopt : read_elf(f.fd());

		/* Who may run it but not read it knows nothing. */
		if (!elf)
			return {};
		if (!elf->same_machine(own_file()))
			return fmt::format("{} is for another kind of machine than the library.", what);
		/* The dynamic loader itself, which is given a program, heeds LD_PRELOAD. */
		if (base_name(path) == base_name(own_file().loader))
			return {};
		if (elf->loader.empty())
			return fmt::format("{} is linked statically, so LD_PRELOAD is ignored.", what);
		if (base_name(elf->loader) != base_name(own_file().loader))
			return fmt::format("{} uses another dynamic loader ({}) than the library.", what,
					   elf->loader);
		return {};
	}
	return {};
}

} // namespace npr::run
