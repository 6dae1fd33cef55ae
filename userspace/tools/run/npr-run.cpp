/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Runs a program that knows nothing of nprdma with memory regions that are not pinned. */
#include "launch.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>

namespace
{

int fail(int status, const std::string &text)
{
	fmt::print(stderr, "npr-run: {}\n", text);
	return status;
}

std::vector<char *> pointers(std::vector<std::string> &strings)
{
	std::vector<char *> all;

	for (std::string &s : strings)
		all.push_back(s.data());
	all.push_back(nullptr);
	return all;
}

int run(int argc, char **argv)
{
	using namespace npr::run;
	auto parsed = parse(argc, argv);

	if (const auto *m = std::get_if<message>(&parsed)) {
		fmt::print(m->status ? stderr : stdout, "{}\n", m->text);
		return m->status;
	}
	auto &o = std::get<options>(parsed);
	std::string library = o.preload;

	if (library.empty()) {
		const auto found = find_library(std::filesystem::read_symlink("/proc/self/exe"));

		if (!found)
			return fail(own_failure,
				    "libnprdma-preload.so is not installed. Install it, or say where it is "
				    "with --preload.");
		library = *found;
	}
	if (const std::string trouble = library_trouble(library); !trouble.empty())
		return fail(own_failure, trouble);

	std::error_code error;
	const std::string program = find_program(o.command.front(), std::getenv("PATH"), error);

	if (error)
		return fail(error.value() == ENOENT ? not_found : cannot_run,
			    fmt::format("cannot run {}: {}", o.command.front(), error.message()));
	if (const std::string why = obstacle(program); !why.empty())
		fmt::print(stderr, "npr-run: {} Its memory stays pinned.\n", why);

	std::vector<std::string> variables = environment(environ, o, library);

	/* What a shell or execvp() would do with a script without "#!", it does. */
	execvpe(program.c_str(), pointers(o.command).data(), pointers(variables).data());
	error.assign(errno, std::generic_category());
	return fail(error.value() == ENOENT ? not_found : cannot_run,
		    fmt::format("cannot run {}: {}{}", program, error.message(),
				error.value() == ENOENT ? " (its interpreter or dynamic loader)" : ""));
}

} // namespace

int main(int argc, char **argv)
{
	try {
		return run(argc, argv);
	} catch (const std::exception &e) {
		return fail(npr::run::own_failure, e.what());
	}
}
