/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* npr-far-server, as a process. */
#include "child.hpp"
#include "must.hpp"

#include <nprdma/far_network.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <gtest/gtest.h>
#include <initializer_list>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace
{

using namespace nprdma::far;
namespace transport = nprdma::transport;

/* It has @ignored ignored from the beginning, as nohup(1) does it; what it complains of is heard, too. */
class process : public child
{
public:
	explicit process(const std::vector<std::string> &arguments, std::initializer_list<int> ignored = {})
	    : child(with_program(arguments), [ignored] {
		      for (const int number : {SIGHUP, SIGINT})
			      ::signal(number, std::ranges::count(ignored, number) ? SIG_IGN : SIG_DFL);
		      ::dup2(STDOUT_FILENO, STDERR_FILENO);
	      })
	{
	}

private:
	static std::vector<std::string> with_program(std::vector<std::string> arguments)
	{
		arguments.insert(arguments.begin(), NPR_FAR_SERVER);
		return arguments;
	}
};

std::string some_address()
{
	static int number;

	return "shm:far-tool-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
}

/* What it says of @arguments, which it does not take, after its status. */
std::string refusal(const std::vector<std::string> &arguments)
{
	process p(arguments);

	(void)p.says("");
	return std::to_string(p.end()) + " " + p.said();
}

TEST(FarServerTool, LendsMemoryAndEndsWhenItIsTold)
{
	const std::string address = some_address();
	process p({address, "--lend", "a=1M", "--lend", "b=64K,page=16K", "--clients-may-make", "1M"});
	ASSERT_TRUE(p.says("serving at " + address)) << p.said();
	EXPECT_NE(p.said().find("a: 1048576 bytes in pages of 4096, memory\n"), std::string::npos)
	    << p.said();
	{
		const auto context = must(transport::open("shm"));
		EXPECT_EQ(must(network_store::open(*context, address, "a"))->bytes(), 1U << 20);
		EXPECT_EQ(must(network_store::open(*context, address, "b"))->page_bytes(), 16384U);
		network_options make;
		make.make_bytes = 1 << 20;
		EXPECT_EQ(must(network_store::open(*context, address, "c", make))->bytes(), 1U << 20);
		EXPECT_EQ(network_store::open(*context, address, "d", make).code(), EDQUOT);
		EXPECT_EQ(network_store::open(*context, address, "none").code(), ENOENT);
	}
	p.signal(SIGTERM);
	EXPECT_TRUE(p.says("ends, by Terminated")) << p.said();
	EXPECT_EQ(p.end(), 0);
}

/* Of signals that are waiting, that of the lowest number is the first to be taken: SIGHUP, SIGINT, SIGTERM.
 */
TEST(FarServerTool, EndsByEachSignalThatWasNotIgnoredWhenItBegan)
{
	const auto last_of = [](std::initializer_list<int> ignored, std::initializer_list<int> sent) {
		const std::string address = some_address();
		process p({address, "-l", "a=1M"}, ignored);

		EXPECT_TRUE(p.says("serving at " + address)) << p.said();
		for (const int number : sent)
			p.signal(number);
		EXPECT_FALSE(p.says(""));
		EXPECT_EQ(p.end(), 0);
		return p.said().substr(p.said().find("ends"));
	};

	EXPECT_EQ(last_of({}, {SIGHUP}), "ends, by Hangup\n");
	EXPECT_EQ(last_of({}, {SIGINT}), "ends, by Interrupt\n");
	EXPECT_EQ(last_of({SIGHUP}, {SIGHUP, SIGINT}), "ends, by Interrupt\n");
	EXPECT_EQ(last_of({SIGINT}, {SIGINT, SIGHUP}), "ends, by Hangup\n");
	EXPECT_EQ(last_of({SIGHUP, SIGINT}, {SIGHUP, SIGINT, SIGTERM}), "ends, by Terminated\n");
}

TEST(FarServerTool, KeepsInAFileWhatWasFlushed)
{
	const std::string address = some_address();
	const std::filesystem::path file =
	    std::filesystem::temp_directory_path() / ("far,tool-" + std::to_string(::getpid()));
	const auto context = must(transport::open("shm"));
	std::vector<std::byte> page(4096, std::byte{7}), back(4096);

	std::filesystem::remove(file);
	for (const bool first : {true, false}) {
		process p({address, "-l", "kept=1M,page=4096,file=" + file.string()});
		ASSERT_TRUE(p.says("serving at " + address)) << p.said();
		{
			const auto store = must(network_store::open(*context, address, "kept"));
			if (first) {
				must(store->write({8192, page}));
				must(store->flush());
			} else {
				must(store->read({8192, back}));
			}
		}
		/* As a machine that fails would end it, and as an administrator does. */
		p.signal(first ? SIGKILL : SIGINT);
		EXPECT_EQ(p.end(), first ? -1 : 0);
	}
	EXPECT_EQ(back, page);
	std::filesystem::remove(file);
}

TEST(FarServerTool, LendsAFileOnlyOnceAndOnlyAsWhatItWasMade)
{
	const std::string address = some_address();
	const std::filesystem::path file =
	    std::filesystem::temp_directory_path() / ("far-once-" + std::to_string(::getpid()));
	const std::string as = ",file=" + file.string();

	std::filesystem::remove(file);
	{
		process p({address, "-l", "x=1M" + as});
		ASSERT_TRUE(p.says("serving at " + address)) << p.said();
		EXPECT_EQ(refusal({some_address(), "-l", "x=1M" + as}),
			  "1 npr-far-server: " + file.string() +
			      ": is lent already, by this server or by another one\n");
	}
	EXPECT_EQ(refusal({some_address(), "-l", "x=1M,page=64K" + as}),
		  "1 npr-far-server: " + file.string() +
		      ": is a region of 1048576 bytes in pages of 4096, and not of 1048576 bytes in pages of "
		      "65536 as was asked for; it is left as it is\n");
	process p({address, "-l", "x=1M" + as});
	EXPECT_TRUE(p.says("serving at " + address)) << p.said();
	std::filesystem::remove(file);
}

/* 2^24 TiB is one byte more than the largest number. */
TEST(FarServerTool, TakesSizesOfDigitsWithOneUnitBehindThem)
{
	const std::string a = some_address();

	for (const std::string size : {"",
				       "K",
				       "-1",
				       "-1K",
				       "+1",
				       " 1M",
				       "1M ",
				       "1 M",
				       "0x10000",
				       "0x",
				       "1KK",
				       "1KiB",
				       "1KB",
				       "1k",
				       "1P",
				       "1.5M",
				       "1e6",
				       "18446744073709551616",
				       "18014398509481984K",
				       "16777216T",
				       "99999999T"}) {
		EXPECT_EQ(refusal({a, "-l", "x=" + size}), "64 npr-far-server: --lend x=" + size + ": " +
							       size +
							       " is no size in bytes, as 4096, 64K or 2T\n"
							       "npr-far-server --help says what there is.\n");
		EXPECT_EQ(
		    refusal({a, "-l", "x=1M,page=" + size}).rfind("64 npr-far-server: --lend x=1M,page=", 0),
		    0u)
		    << size;
	}
	/* These are numbers, which only the library refuses. */
	for (const std::string size : {"0", "0K", "18446744073709551615", "18014398509481983K",
				       "17592186044415M", "17179869183G", "16777215T"})
		EXPECT_EQ(refusal({a, "-l", "x=" + size}),
			  "1 npr-far-server: far server: a region has 1 byte to 64 TiB\n")
		    << size;
	process p({a, "-l", "k=64K,page=16K", "-l", "b=5000", "-l", "g=1G", "-l", "t=1T"});
	ASSERT_TRUE(p.says("serving at " + a)) << p.said();
	for (const std::string line :
	     {"k: 65536 bytes in pages of 16384, memory\n", "b: 5000 bytes in pages of 4096, memory\n",
	      "g: 1073741824 bytes in pages of 4096, memory\n",
	      "t: 1099511627776 bytes in pages of 4096, memory\n"})
		EXPECT_NE(p.said().find(line), std::string::npos) << p.said();
}

TEST(FarServerTool, SaysWhatIsWrongWithItsArguments)
{
	const std::string a = some_address();
	const auto begins = [](const std::string &all, const std::string &with) {
		EXPECT_EQ(all.substr(0, with.size()), with);
	};

	begins(refusal({}), "64 npr-far-server: ADDRESS is required");
	begins(refusal({a}), "64 npr-far-server: There is nothing to serve");
	begins(refusal({a, "-l", "x"}),
	       "64 npr-far-server: --lend x: it is NAME=SIZE[,page=SIZE][,file=PATH]");
	begins(refusal({a, "-l", "=1M"}), "64 npr-far-server: --lend =1M: it is NAME=SIZE");
	begins(refusal({a, "-l", "x=much"}), "64 npr-far-server: --lend x=much: much is no size in bytes");
	begins(refusal({a, "--clients-may-make", "K"}),
	       "64 npr-far-server: --clients-may-make: K is no size in bytes");
	begins(refusal({a, "-l", "x=1M,pages=4"}),
	       "64 npr-far-server: --lend x=1M,pages=4: pages=4 is neither page=SIZE nor file=PATH");
	begins(refusal({a, "-l", "x=1M,file="}),
	       "64 npr-far-server: --lend x=1M,file=: no path behind file=");
	begins(refusal({a, "-l", "x=1M", "-l", "x=2M"}),
	       "64 npr-far-server: --lend: two regions have the name x");
	/* What only the library knows. */
	begins(refusal({a, "-l", "x=1M,page=5000"}),
	       "1 npr-far-server: far server: page_bytes is a power of two from 4 KiB to 4 MiB");
	begins(refusal({"tcp:here", "-l", "x=1M"}), "1 npr-far-server: ");
}

} // namespace
