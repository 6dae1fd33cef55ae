/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What npr-run makes of its arguments, and what it knows of a program before it runs it. */
#ifndef NPR_RUN_LAUNCH_HPP
#define NPR_RUN_LAUNCH_HPP

#include <sys/stat.h>

#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

namespace npr::run
{

/* As env, nice and timeout have it. */
inline constexpr int own_failure = 125, cannot_run = 126, not_found = 127;

/* What is said instead of running a program. */
struct message {
	int status = own_failure; /* 0: it was asked for */
	std::string text;
};

struct options {
	/* Only what the command line says: the environment of the caller holds for the rest. */
	std::vector<std::pair<std::string, std::string>> variables;
	std::string preload; /* empty: the installed one */
	std::vector<std::string> command;
};

/* A file name in the arguments is meant from the directory of now: the program may change to another. */
[[nodiscard]] std::variant<options, message> parse(int argc, const char *const *argv);

/*
 * The library beside the program that asks for it: installed, of a build tree, or where it was
 * configured to go. Nothing: it is at none of these.
 */
[[nodiscard]] std::optional<std::string> find_library(const std::string &own_path);

/* Why the dynamic loader of our own machine would leave it out; empty: it would not. */
[[nodiscard]] std::string library_trouble(const std::string &path);

/* "NAME=VALUE" of all that the program gets. */
[[nodiscard]] std::vector<std::string> environment(const char *const *inherited, const options &,
						   const std::string &library);

/* As the shell looks for it; path is the value of PATH, if it has one. The error says why there is none. */
[[nodiscard]] std::string find_program(const std::string &name, const char *path, std::error_code &);

struct identity {
	uid_t real_user, effective_user;
	gid_t real_group, effective_group;
};

/* Does the kernel start it as what others must not reach into, so that LD_PRELOAD is ignored? */
[[nodiscard]] bool is_secure(const struct stat &, bool has_capabilities, bool set_id_ignored,
			     const identity &);

/* Why the library will not see the program, one sentence; empty: nothing is known against it. */
[[nodiscard]] std::string obstacle(const std::string &program);

} // namespace npr::run

#endif
