/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* npr-run: arguments, environment, what a program is, and the program itself. */
#include "elf_file.hpp"
#include "launch.hpp"

#include <gtest/gtest.h>

#include <elf.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace
{

using namespace npr::run;
namespace fs = std::filesystem;
using strings = std::vector<std::string>;

class directory
{
public:
	directory()
	{
		char name[] = "/tmp/npr-run-XXXXXX";

		if (!mkdtemp(name))
			std::abort();
		path_ = name;
	}
	~directory()
	{
		std::error_code ignored;
		fs::remove_all(path_, ignored);
	}
	directory(const directory &) = delete;
	directory &operator=(const directory &) = delete;
	[[nodiscard]] std::string operator/(const std::string &name) const { return path_ + "/" + name; }

	std::string file(const std::string &name, const std::string &content, mode_t mode = 0755) const
	{
		const std::string path = *this / name;

		std::ofstream(path, std::ios::binary) << content;
		if (chmod(path.c_str(), mode))
			std::abort();
		return path;
	}

private:
	std::string path_;
};

std::variant<options, message> parsed(strings arguments)
{
	std::vector<const char *> argv{"npr-run"};

	for (const std::string &a : arguments)
		argv.push_back(a.c_str());
	return parse(static_cast<int>(argv.size()), argv.data());
}

/* What the arguments before "prog" set. */
strings variables(strings arguments)
{
	arguments.push_back("prog");
	const auto p = parsed(arguments);
	strings all;

	if (const auto *m = std::get_if<message>(&p))
		return {m->text};
	for (const auto &[name, value] : std::get<options>(p).variables)
		all.push_back(name + "=" + value);
	return all;
}

strings command(strings arguments)
{
	const auto p = parsed(arguments);
	const auto *o = std::get_if<options>(&p);

	return o ? o->command : strings{};
}

/* The text of what is refused, or nothing. */
std::string refusal(strings arguments)
{
	const auto p = parsed(arguments);
	const auto *m = std::get_if<message>(&p);

	return m && m->status == own_failure ? m->text : "";
}

TEST(RunArguments, WithoutOptionsTheEnvironmentHolds)
{
	EXPECT_EQ(variables({}), strings{});
}

TEST(RunArguments, SayWhatIsUnpinned)
{
	EXPECT_EQ(variables({"--none"}), strings{"NPRDMA_UNPINNED=none"});
	EXPECT_EQ(variables({"--odp"}), strings{"NPRDMA_UNPINNED=odp"});
	EXPECT_EQ(variables({"--only-remote"}), strings{"NPRDMA_UNPINNED=remote"});
	EXPECT_EQ(variables({"--min", "4096"}), strings{"NPRDMA_UNPINNED=4096"});
	EXPECT_EQ(variables({"--min=0"}), strings{"NPRDMA_UNPINNED=0"});
	EXPECT_EQ(variables({"--min", "64K", "--only-remote"}), strings{"NPRDMA_UNPINNED=remote,65536"});
	EXPECT_EQ(variables({"--min=2T"}), strings{"NPRDMA_UNPINNED=2199023255552"});
	EXPECT_EQ(variables({"--min=18446744073709551615"}), strings{"NPRDMA_UNPINNED=18446744073709551615"});
}

TEST(RunArguments, SizesThatAreNoneAreRefused)
{
	for (const char *size : {"", "K", "-1", "+1", "1.5K", "4096 ", " 4096", "0x1000", "1k", "1KB", "1E",
				 "18446744073709551616", "18014398509481984K", "16777216T"})
		EXPECT_NE(refusal({std::string("--min=") + size, "prog"}), "") << size;
	EXPECT_EQ(variables({"--min=18014398509481983K"}), strings{"NPRDMA_UNPINNED=18446744073709550592"});
}

TEST(RunArguments, PoliciesThatContradictEachOtherAreRefused)
{
	EXPECT_NE(refusal({"--none", "--odp", "prog"}), "");
	EXPECT_NE(refusal({"--none", "--min", "1", "prog"}), "");
	EXPECT_NE(refusal({"--odp", "--only-remote", "prog"}), "");
	EXPECT_NE(refusal({"--odp", "--min=1", "prog"}), "");
}

TEST(RunArguments, SayHow)
{
	EXPECT_EQ(variables({"--ordered", "--no-leases", "--direct-verbs", "hidden"}),
		  (strings{"NPRDMA_ORDERED=1", "NPRDMA_LEASES=0", "NPRDMA_DIRECT_VERBS=hidden"}));
	EXPECT_EQ(variables({"--direct-verbs=pinned"}), strings{"NPRDMA_DIRECT_VERBS=pinned"});
	EXPECT_NE(refusal({"--direct-verbs", "seen", "prog"}), "");
	EXPECT_NE(refusal({"--preload=", "prog"}), "");
}

TEST(RunArguments, AReportDoesNotTakeTheProgramForItsFile)
{
	EXPECT_EQ(variables({"--report"}), strings{"NPRDMA_REPORT=1"});
	EXPECT_EQ(command({"--report", "prog", "x"}), (strings{"prog", "x"}));
	EXPECT_EQ(variables({"--report=/a/b"}), strings{"NPRDMA_REPORT=/a/b"});
	EXPECT_EQ(variables({"--report=b"}), strings{"NPRDMA_REPORT=" + fs::current_path().string() + "/b"});
	EXPECT_EQ(variables({"--report="}), strings{"NPRDMA_REPORT=1"});
}

TEST(RunArguments, WhatFollowsTheProgramIsTheProgramsOwn)
{
	EXPECT_EQ(command({"prog", "--odp", "--", "-h", "--min"}),
		  (strings{"prog", "--odp", "--", "-h", "--min"}));
	EXPECT_EQ(variables({"prog", "--odp"}), strings{});
	EXPECT_EQ(command({"--odp", "--", "prog", "--none"}), (strings{"prog", "--none"}));
	EXPECT_EQ(command({"--", "--odd", "-h"}), (strings{"--odd", "-h"}));
	EXPECT_EQ(command({"--", "--", "x"}), (strings{"--", "x"}));
	EXPECT_EQ(command({"prog", "", "a b"}), (strings{"prog", "", "a b"}));
}

TEST(RunArguments, WithoutAProgramOrWithAnUnknownOptionThereIsAnError)
{
	EXPECT_NE(refusal({}), "");
	EXPECT_NE(refusal({"--"}), "");
	EXPECT_NE(refusal({""}), "");
	EXPECT_NE(refusal({"--only-remote"}), "");
	EXPECT_NE(refusal({"--relaxed", "prog"}).find("--relaxed"), std::string::npos);
	EXPECT_NE(refusal({"-x", "prog"}).find("-x"), std::string::npos);
	EXPECT_NE(refusal({"--min"}), "");
}

TEST(RunArguments, HelpIsNoFailure)
{
	const auto p = parsed({"--help"});
	const auto &m = std::get<message>(p);

	EXPECT_EQ(m.status, 0);
	for (const char *option : {"--only-remote", "--odp", "--min", "--none", "--ordered", "--no-leases",
				   "--direct-verbs", "--report", "--preload"})
		EXPECT_NE(m.text.find(option), std::string::npos) << option;
}

strings made(std::vector<const char *> inherited, strings arguments)
{
	arguments.push_back("prog");
	inherited.push_back(nullptr);
	return environment(inherited.data(), std::get<options>(parsed(arguments)), "/lib/npr.so");
}

TEST(RunEnvironment, TheLibraryComesBeforeThoseThatAreThere)
{
	EXPECT_EQ(made({"A=b"}, {}), (strings{"A=b", "LD_PRELOAD=/lib/npr.so"}));
	EXPECT_EQ(made({"LD_PRELOAD=", "A="}, {}), (strings{"A=", "LD_PRELOAD=/lib/npr.so"}));
	EXPECT_EQ(made({"LD_PRELOAD=/x.so y.so"}, {}), strings{"LD_PRELOAD=/lib/npr.so:/x.so y.so"});
}

TEST(RunEnvironment, OptionsReplaceWhatWasThereAndNothingElse)
{
	EXPECT_EQ(made({"NPRDMA_ORDERED=0", "NPRDMA_UNPINNED=7", "NPRDMA_ORDERED_=x", "odd"}, {"--ordered"}),
		  (strings{"NPRDMA_UNPINNED=7", "NPRDMA_ORDERED_=x", "odd", "NPRDMA_ORDERED=1",
			   "LD_PRELOAD=/lib/npr.so"}));
	/* A name that is there twice is set for whoever takes the first and whoever takes the last. */
	EXPECT_EQ(made({"NPRDMA_UNPINNED=1", "NPRDMA_UNPINNED=2"}, {"--none"}),
		  (strings{"NPRDMA_UNPINNED=none", "LD_PRELOAD=/lib/npr.so"}));
}

TEST(RunProgram, IsLookedForAsAShellDoes)
{
	const directory d;
	std::error_code error;

	fs::create_directory(d / "a");
	fs::create_directory(d / "b");
	fs::create_directory(d / "a/dir");
	d.file("b/prog", "");
	d.file("b/closed", "", 0644);
	d.file("b/dir", "");
	const std::string path = (d / "none") + ":" + (d / "a") + ":" + (d / "b");

	auto why = [&error](const std::string &name, const char *in) {
		EXPECT_EQ(find_program(name, in, error), "");
		return error.value();
	};

	EXPECT_EQ(find_program("prog", path.c_str(), error), d / "b/prog");
	EXPECT_FALSE(error);
	EXPECT_EQ(find_program("dir", path.c_str(), error), d / "b/dir");
	EXPECT_EQ(find_program(d / "b/prog", "", error), d / "b/prog");
	EXPECT_EQ(find_program("env", nullptr, error).substr(0, 1), "/");
	EXPECT_EQ(why("prog", (d / "a").c_str()), ENOENT);
	EXPECT_EQ(why("dir", (d / "a").c_str()), ENOENT);
	EXPECT_EQ(why("closed", path.c_str()), EACCES);
	EXPECT_EQ(why(d / "a", ""), EISDIR);
	EXPECT_EQ(why(d / "b/prog/x", ""), ENOENT);
}

TEST(RunProgram, AnEmptyPartOfThePathIsTheDirectoryOfNow)
{
	const directory d;
	std::error_code error;
	const fs::path before = fs::current_path();

	d.file("prog", "");
	fs::current_path(d / "");
	EXPECT_EQ(find_program("prog", "/none:", error), "./prog");
	EXPECT_EQ(find_program("prog", ":/none", error), "./prog");
	EXPECT_EQ(find_program("prog", "", error), "./prog");
	fs::current_path(before);
}

TEST(RunProgram, OtherRightsThanTheCallersAreFoundOut)
{
	constexpr identity user{1000, 1000, 1000, 1000}, root{0, 0, 0, 0};
	auto file = [](mode_t mode, uid_t owner, gid_t group) {
		struct stat st {
		};

		st.st_mode = S_IFREG | mode;
		st.st_uid = owner;
		st.st_gid = group;
		return st;
	};

	EXPECT_FALSE(is_secure(file(0755, 0, 0), false, false, user));
	EXPECT_TRUE(is_secure(file(04755, 0, 0), false, false, user));
	EXPECT_FALSE(is_secure(file(04755, 1000, 0), false, false, user));
	EXPECT_TRUE(is_secure(file(02755, 0, 0), false, false, user));
	EXPECT_FALSE(is_secure(file(02745, 0, 0), false, false, user)) << "not the group's to execute";
	EXPECT_TRUE(is_secure(file(0755, 0, 0), true, false, user));
	EXPECT_FALSE(is_secure(file(0755, 0, 0), true, false, root));
	EXPECT_FALSE(is_secure(file(04755, 0, 0), false, false, root));
	EXPECT_TRUE(is_secure(file(04755, 1000, 0), false, false, root));
	/* Mounted nosuid, or no new privileges. */
	EXPECT_FALSE(is_secure(file(06755, 0, 0), true, true, user));
	EXPECT_TRUE(is_secure(file(0755, 0, 0), false, false, {1000, 0, 1000, 1000}));
}

template <class T> void append(std::string &to, const T &value)
{
	to.append(reinterpret_cast<const char *>(&value), sizeof(value));
}

struct elf_image {
	Elf64_Ehdr header{};
	std::vector<Elf64_Phdr> segments;
	std::string tail;

	elf_image()
	{
		std::memcpy(header.e_ident, ELFMAG, SELFMAG);
		header.e_ident[EI_CLASS] = ELFCLASS64;
		header.e_ident[EI_DATA] = ELFDATA2LSB;
		header.e_type = ET_DYN;
		header.e_machine = EM_X86_64;
		header.e_phoff = sizeof(header);
		header.e_phentsize = sizeof(Elf64_Phdr);
	}
	void loader(const std::string &name)
	{
		Elf64_Phdr s{};

		s.p_type = PT_LOAD;
		segments.push_back(s);
		s.p_type = PT_INTERP;
		s.p_offset = sizeof(header) + 2 * sizeof(s);
		s.p_filesz = name.size() + 1;
		segments.push_back(s);
		tail = name + '\0';
		header.e_phnum = 2;
	}
	[[nodiscard]] std::string bytes() const
	{
		std::string all;

		append(all, header);
		for (const Elf64_Phdr &s : segments)
			append(all, s);
		return all + tail;
	}
};

std::optional<elf_file> inspected(const std::string &content)
{
	const directory d;
	const int fd = open(d.file("f", content).c_str(), O_RDONLY | O_CLOEXEC);
	const auto elf = read_elf(fd);

	close(fd);
	return elf;
}

TEST(RunElf, ALoaderIsFound)
{
	elf_image image;

	image.loader("/lib64/ld-linux-x86-64.so.2");
	const auto elf = inspected(image.bytes());
	ASSERT_TRUE(elf);
	EXPECT_EQ(elf->loader, "/lib64/ld-linux-x86-64.so.2");
	EXPECT_EQ(elf->bits, 64);
	EXPECT_EQ(elf->machine, EM_X86_64);
	EXPECT_TRUE(elf->shared_object);
}

TEST(RunElf, WithoutALoaderItIsStatic)
{
	elf_image image;

	image.header.e_type = ET_EXEC;
	const auto elf = inspected(image.bytes());
	ASSERT_TRUE(elf);
	EXPECT_EQ(elf->loader, "");
	EXPECT_FALSE(elf->shared_object);
}

TEST(RunElf, OtherMachinesAreRead)
{
	Elf32_Ehdr small{};
	std::string content;

	std::memcpy(small.e_ident, ELFMAG, SELFMAG);
	small.e_ident[EI_CLASS] = ELFCLASS32;
	small.e_ident[EI_DATA] = ELFDATA2MSB;
	small.e_machine = static_cast<Elf32_Half>(EM_PPC << 8);
	small.e_type = static_cast<Elf32_Half>(ET_DYN << 8);
	append(content, small);
	const auto elf = inspected(content);
	ASSERT_TRUE(elf);
	EXPECT_EQ(elf->machine, EM_PPC);
	EXPECT_EQ(elf->bits, 32);
	EXPECT_TRUE(elf->shared_object);
	EXPECT_FALSE(elf->same_machine(*inspected(elf_image().bytes())));
}

TEST(RunElf, NoPrefixOfAFileIsTakenForTheWhole)
{
	elf_image image;

	image.loader("/lib/ld.so");
	const std::string all = image.bytes();
	for (std::size_t n = 0; n < all.size(); n++)
		EXPECT_FALSE(inspected(all.substr(0, n))) << n;
	EXPECT_TRUE(inspected(all));
}

TEST(RunElf, HeadersThatLeadOutOfTheFileAreRefused)
{
	auto changed = [](auto change) {
		elf_image image;

		image.loader("/lib/ld.so");
		change(image);
		return inspected(image.bytes());
	};

	EXPECT_TRUE(changed([](elf_image &) {}));
	EXPECT_FALSE(changed([](elf_image &i) { i.header.e_phoff = UINT64_MAX; }));
	EXPECT_FALSE(changed([](elf_image &i) { i.header.e_phoff = UINT64_MAX - 55; }));
	EXPECT_FALSE(changed([](elf_image &i) { i.header.e_phoff = LONG_MAX; }));
	EXPECT_FALSE(
	    changed([](elf_image &i) { i.header.e_phnum = 0xffff, i.segments[1].p_type = PT_NOTE; }));
	EXPECT_FALSE(changed([](elf_image &i) { i.header.e_phentsize = 32; }));
	EXPECT_FALSE(changed([](elf_image &i) { i.header.e_ident[EI_CLASS] = 3; }));
	EXPECT_FALSE(changed([](elf_image &i) { i.header.e_ident[EI_DATA] = 0; }));
	EXPECT_FALSE(changed([](elf_image &i) { i.segments[1].p_offset = UINT64_MAX; }));
	EXPECT_FALSE(changed([](elf_image &i) { i.segments[1].p_filesz = UINT64_MAX; }));
	EXPECT_FALSE(changed([](elf_image &i) { i.segments[1].p_filesz = PATH_MAX + 1; }));
	EXPECT_FALSE(changed([](elf_image &i) { i.segments[1].p_filesz = 1; }));
	EXPECT_FALSE(changed([](elf_image &i) { i.tail.back() = 'x'; }));
}

std::optional<std::string> interpreter(const std::string &content)
{
	const directory d;
	const int fd = open(d.file("f", content).c_str(), O_RDONLY | O_CLOEXEC);
	const auto path = read_script(fd);

	close(fd);
	return path;
}

TEST(RunScript, ItsInterpreterIsFound)
{
	EXPECT_EQ(interpreter("#!/bin/sh\nexit\n"), "/bin/sh");
	EXPECT_EQ(interpreter("#! \t/usr/bin/env python3\n"), "/usr/bin/env");
	EXPECT_EQ(interpreter("#!/bin/sh"), "/bin/sh");
	EXPECT_EQ(interpreter("#!"), std::nullopt);
	EXPECT_EQ(interpreter("#! \n/bin/sh"), std::nullopt);
	EXPECT_EQ(interpreter(""), std::nullopt);
	EXPECT_EQ(interpreter("#"), std::nullopt);
	EXPECT_EQ(interpreter("echo\n"), std::nullopt);
	EXPECT_EQ(interpreter("#!/bin/" + std::string(1000, 'x'))->size(), 254u);
}

TEST(RunObstacle, WhatIgnoresTheLibraryIsNamed)
{
	const directory d;
	elf_image fixed, other, foreign, library;

	fixed.header.e_type = ET_EXEC;
	other.loader("/lib/ld-musl-x86_64.so.1");
	foreign.loader("/lib/ld-linux.so.2");
	foreign.header.e_machine = EM_S390;
	EXPECT_EQ(obstacle("/usr/bin/env"), "");
	EXPECT_NE(obstacle(d.file("static", fixed.bytes())).find("statically"), std::string::npos);
	EXPECT_NE(obstacle(d.file("static-pie", library.bytes())).find("statically"), std::string::npos);
	EXPECT_NE(obstacle(d.file("musl", other.bytes())).find("ld-musl"), std::string::npos);
	EXPECT_NE(obstacle(d.file("s390", foreign.bytes())).find("machine"), std::string::npos);
	EXPECT_EQ(obstacle(d.file("script", "#!/bin/sh\n")), "");
	EXPECT_EQ(obstacle(d.file("text", "echo\n")), "");
	const std::string nested = obstacle(d.file("nested", "#!" + (d / "static") + "\n"));
	EXPECT_NE(nested.find("statically"), std::string::npos);
	EXPECT_NE(nested.find(d / "nested"), std::string::npos);
	EXPECT_EQ(obstacle(d.file("endless", "#!" + (d / "endless") + "\n")), "");
	EXPECT_EQ(obstacle(d / "none"), "");
}

TEST(RunObstacle, OtherRightsAreNamed)
{
	const directory d;
	const std::string path = d.file("p", "x");

	if (geteuid())
		GTEST_SKIP() << "only root gives files away";
	ASSERT_EQ(chown(path.c_str(), 65534, 0), 0);
	EXPECT_EQ(obstacle(path), "");
	ASSERT_EQ(chmod(path.c_str(), 04755), 0);
	EXPECT_NE(obstacle(path).find("set-user-ID"), std::string::npos);
}

TEST(RunLibrary, OneThatWouldBeIgnoredIsRefused)
{
	const directory d;
	elf_image program, foreign;

	EXPECT_EQ(library_trouble(NPR_LOADED), "");
	EXPECT_NE(library_trouble(d / "none"), "");
	EXPECT_NE(library_trouble("/usr/bin/env"), "");
	EXPECT_NE(library_trouble(d.file("text", "x")), "");
	foreign.header.e_machine = EM_S390;
	EXPECT_NE(library_trouble(d.file("foreign", foreign.bytes())), "");
	fs::copy_file(NPR_LOADED, d / "a b.so");
	EXPECT_NE(library_trouble(d / "a b.so"), "");
	fs::copy_file(NPR_LOADED, d / "a:b.so");
	EXPECT_NE(library_trouble(d / "a:b.so"), "");
}

struct outcome {
	int status;
	std::string out, err;

	[[nodiscard]] bool has(const std::string &line) const
	{
		return ("\n" + out).find("\n" + line + "\n") != std::string::npos;
	}
};

outcome run(strings arguments)
{
	const directory d;
	const pid_t pid = fork();
	outcome o{};

	if (!pid) {
		std::vector<char *> argv;

		for (std::string &a : arguments)
			argv.push_back(a.data());
		argv.push_back(nullptr);
		setenv("KEPT", "a value", 1);
		unsetenv("LOADED");
		if (!std::freopen((d / "out").c_str(), "w", stdout) ||
		    !std::freopen((d / "err").c_str(), "w", stderr))
			_exit(99);
		execv(argv[0], argv.data());
		_exit(98);
	}
	int status = 0;

	waitpid(pid, &status, 0);
	o.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
	auto content = [&d](const char *name) {
		std::ifstream f(d / name);
		return std::string(std::istreambuf_iterator<char>(f), {});
	};
	o.out = content("out");
	o.err = content("err");
	return o;
}

TEST(RunWhole, TheProgramRunsWithTheLibraryAndItsVariables)
{
	const outcome o =
	    run({NPR_RUN, "--preload", NPR_LOADED, "--only-remote", "--min", "8K", "--ordered", "env"});

	EXPECT_EQ(o.status, 0);
	EXPECT_EQ(o.err, "");
	EXPECT_TRUE(o.has("LOADED=yes")) << o.out;
	EXPECT_TRUE(o.has("LD_PRELOAD=" NPR_LOADED)) << o.out;
	EXPECT_TRUE(o.has("NPRDMA_UNPINNED=remote,8192")) << o.out;
	EXPECT_TRUE(o.has("NPRDMA_ORDERED=1")) << o.out;
	EXPECT_TRUE(o.has("KEPT=a value")) << o.out;
	EXPECT_EQ(o.out.find("NPRDMA_LEASES"), std::string::npos);
}

TEST(RunWhole, AnInstalledOneFindsItsLibrary)
{
	const directory d;
	const std::string library = (d / NPR_LIBDIR "/nprdma/libnprdma-preload.so");

	fs::create_directories(d / "bin");
	fs::create_directories(d / NPR_LIBDIR "/nprdma");
	fs::copy_file(NPR_RUN, d / "bin/npr-run");
	fs::copy_file(NPR_LOADED, library);
	/* Also through a link elsewhere. */
	fs::create_symlink(d / "bin/npr-run", d / "link");
	for (const char *name : {"bin/npr-run", "link"}) {
		const outcome o = run({d / name, "env"});

		EXPECT_EQ(o.status, 0) << o.err;
		EXPECT_TRUE(o.has("LD_PRELOAD=" + library)) << o.out;
		EXPECT_TRUE(o.has("LOADED=yes")) << o.out;
	}
}

TEST(RunWhole, OneOfABuildTreeFindsTheLibraryBesideItself)
{
	const directory d;

	fs::copy_file(NPR_RUN, d / "npr-run");
	fs::copy_file(NPR_LOADED, d / "libnprdma-preload.so");
	EXPECT_TRUE(run({d / "npr-run", "env"}).has("LD_PRELOAD=" + (d / "libnprdma-preload.so")));
}

TEST(RunWhole, TheStatusIsTheProgramsOwn)
{
	EXPECT_EQ(run({NPR_RUN, "--preload", NPR_LOADED, "sh", "-c", "exit 7"}).status, 7);
	EXPECT_EQ(run({NPR_RUN, "--preload", NPR_LOADED, "sh", "-c", "kill -9 $$"}).status, -1);
}

TEST(RunWhole, WhatCannotRunIsNamedWithItsStatus)
{
	const directory d;
	auto with = [](const std::string &program) {
		return run({NPR_RUN, "--preload", NPR_LOADED, program});
	};

	EXPECT_EQ(with("there-is-no-such-program").status, not_found);
	EXPECT_NE(with("there-is-no-such-program").err.find("there-is-no-such-program"), std::string::npos);
	EXPECT_EQ(with(d / "none").status, not_found);
	EXPECT_EQ(with(d.file("closed", "x", 0644)).status, cannot_run);
	EXPECT_EQ(with(d / "").status, cannot_run);
	EXPECT_EQ(with(d.file("orphan", "#!/none/such\n")).status, not_found);
	EXPECT_EQ(run({NPR_RUN, "--nonsense", "env"}).status, own_failure);
	EXPECT_EQ(run({NPR_RUN, "--preload", d / "none", "env"}).status, own_failure);
	EXPECT_EQ(run({NPR_RUN, "--help"}).status, 0);
}

TEST(RunWhole, AScriptWithoutAnInterpreterRunsInAShell)
{
	const directory d;
	const outcome o = run({NPR_RUN, "--preload", NPR_LOADED, d.file("plain", "echo $1 $LOADED\n"), "x"});

	EXPECT_EQ(o.out, "x yes\n") << o.err;
}

} // namespace
