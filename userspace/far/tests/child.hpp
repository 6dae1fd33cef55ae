/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A program that a test runs, speaks to and listens to. It is killed if the test ends before it does. */
#ifndef NPRDMA_FAR_TESTS_CHILD_HPP
#define NPRDMA_FAR_TESTS_CHILD_HPP

#include <csignal>
#include <cstdlib>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

class child
{
public:
	/* @arguments begin with the program's path. @prepare() is called in the new process. */
	template <class F> child(std::vector<std::string> arguments, F &&prepare)
	{
		int to[2], from[2];

		if (::pipe(to) || ::pipe(from))
			std::abort();
		std::vector<char *> argv;
		for (std::string &a : arguments)
			argv.push_back(a.data());
		argv.push_back(nullptr);
		pid_ = ::fork();
		if (pid_ < 0)
			std::abort();
		if (pid_ == 0) {
			::dup2(to[0], STDIN_FILENO);
			::dup2(from[1], STDOUT_FILENO);
			for (const int fd : {to[0], to[1], from[0], from[1]})
				::close(fd);
			prepare();
			::execv(argv[0], argv.data());
			::_exit(127);
		}
		::close(to[0]);
		::close(from[1]);
		input_ = to[1];
		output_ = from[0];
	}
	~child()
	{
		if (pid_ > 0) {
			::kill(pid_, SIGKILL);
			(void)end();
		}
		::close(input_);
		::close(output_);
	}
	child(const child &) = delete;
	child &operator=(const child &) = delete;

	/* Reads up to such a line. False: the output ended before. */
	[[nodiscard]] bool says(const std::string &line)
	{
		char c;

		for (std::string now; ::read(output_, &c, 1) == 1;) {
			said_ += c;
			if (c != '\n') {
				now += c;
				continue;
			}
			if (now == line)
				return true;
			now.clear();
		}
		return false;
	}
	/* All that was read. */
	[[nodiscard]] const std::string &said() const noexcept { return said_; }
	/* An empty line. */
	void tell() const { (void)!::write(input_, "\n", 1); }
	void signal(int number) const { ::kill(pid_, number); }
	[[nodiscard]] bool runs() const { return ::waitpid(pid_, nullptr, WNOHANG) == 0; }
	/* The status that it ends with, or -1. */
	int end()
	{
		int status = 0;

		(void)::waitpid(std::exchange(pid_, -1), &status, 0);
		return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
	}

private:
	pid_t pid_ = -1;
	int input_ = -1, output_ = -1;
	std::string said_;
};

#endif
