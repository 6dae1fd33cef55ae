/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What flush() says after a server was started anew, or its disk has failed: never that lost data are
 * durable. */
#include "counting.hpp"
#include "slow_disk.hpp"

#include <nprdma/far_network.hpp>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <string>
#include <unistd.h>

namespace
{

using namespace far_tests;
using namespace std::chrono_literals;
namespace transport = nprdma::transport;
namespace fs = std::filesystem;

class Durable : public testing::Test
{
protected:
	static constexpr std::size_t bytes = 64 * 4096;

	void SetUp() override
	{
		static int number;
		const std::string name =
		    "far-durable-" + std::to_string(::getpid()) + "-" + std::to_string(number++);

		address_ = "shm:" + name;
		path_ = fs::path(testing::TempDir()) / name;
		there_ = must(transport::open("shm"));
		here_ = must(transport::open("shm"));
		start();
	}
	void TearDown() override
	{
		disk.fail_with(0);
		server_.reset();
		fs::remove_all(path_);
	}

	void start()
	{
		server_.reset();
		server_ = must(server::make(*there_, address_));
		must(server_->lend("r", bytes, 4096, path_));
	}
	/* The file as it was when it was last made durable: what a host has after a loss of power. */
	void keep() { kept_ = content(); }
	void lose_power()
	{
		server_.reset();
		std::ofstream(path_, std::ios::binary) << kept_;
		start();
	}
	[[nodiscard]] std::string content() const
	{
		std::ifstream in(path_, std::ios::binary);

		return {std::istreambuf_iterator<char>(in), {}};
	}

	/* The server sees soon that the last client has gone. */
	std::shared_ptr<network_store> open(const network_options &how = {})
	{
		for (;;) {
			auto s = network_store::open(*here_, address_, "r", how);

			if (s || s.code() != EBUSY)
				return must(std::move(s));
		}
	}
	static std::vector<std::byte> page_of(int value)
	{
		return std::vector<std::byte>(4096, static_cast<std::byte>(value));
	}
	static void write(store &to, int value)
	{
		std::vector<std::byte> page = page_of(value);

		must(to.write({0, page}));
	}
	static int read(store &from)
	{
		std::vector<std::byte> page(4096);

		must(from.read({0, page}));
		return static_cast<int>(page[17]);
	}

	std::string address_, kept_;
	fs::path path_;
	std::unique_ptr<transport::context> there_, here_;
	std::unique_ptr<server> server_;
};

TEST_F(Durable, WhatIsLostWithTheHostIsNotSaidToBeDurable)
{
	const auto p = must(pager::make(small_buffer(1 << 20)));
	const auto m = must(p->map(open()));

	words(*m)[0] = 1;
	must(m->flush());
	keep();
	words(*m)[0] = 2;
	words(*m)[512] = 3;
	must(m->evict());
	lose_power();
	/* Neither what was there before nor zeros. */
	EXPECT_EQ(signal_at(m->memory().data()), SIGBUS);
	EXPECT_EQ(signal_at(m->memory().data() + 4096), SIGBUS);
	for (int i = 0; i < 3; i++)
		EXPECT_EQ(m->flush().code(), ENOTRECOVERABLE);
	EXPECT_EQ(m->unmap().code(), ENOTRECOVERABLE);
	/* Also if something else is written meanwhile. */
	words(*m)[1024] = 4;
	EXPECT_EQ(m->flush().code(), ENOTRECOVERABLE);
	must(m->accept_loss());
	m->retry();
	EXPECT_EQ(words(*m)[0], 1u);
	EXPECT_EQ(words(*m)[512], 0u);
	words(*m)[0] = 2;
	must(m->flush());
	keep();
	lose_power();
	must(m->evict());
	EXPECT_EQ(words(*m)[0], 2u);
	EXPECT_EQ(words(*m)[1024], 4u);
	must(m->flush());
}

TEST_F(Durable, AServerThatWasStartedAnewVouchesForWhatWasFlushedAndForNothingElse)
{
	const auto s = open();

	write(*s, 1);
	must(s->flush());
	start();
	/* Nothing was written meanwhile, and zeros where there are zeros are nothing. */
	EXPECT_EQ(read(*s), 1);
	std::vector<std::byte> zeros(4096);
	must(s->write({7 * 4096, zeros}));
	start();
	must(s->flush());
	write(*s, 2);
	start();
	/* The same host has it in its page cache, which the server cannot know. */
	EXPECT_EQ(read(*s), 2);
	EXPECT_FALSE(s->intact());
	EXPECT_EQ(s->flush().code(), ENOTRECOVERABLE);
	/* What is written after it does not change that. */
	write(*s, 3);
	EXPECT_EQ(s->flush().code(), ENOTRECOVERABLE);
	start();
	must(s->accept_loss());
	write(*s, 4);
	must(s->flush());
	EXPECT_TRUE(s->intact());
}

/* Nobody asked the server meanwhile: the first to do so is what follows. */
TEST_F(Durable, AWriteUnderEachOfTwoServersIsNotFlushedByTheSecondOne)
{
	const auto s = open({.lanes = 1});

	write(*s, 1);
	start();
	write(*s, 2);
	EXPECT_FALSE(s->intact());
	EXPECT_EQ(s->flush().code(), ENOTRECOVERABLE);
}

TEST_F(Durable, AnErrorOfTheServersDiskIsNotForgotten)
{
	const network_options shared = {.shared = true};
	const auto s = open(shared), other = open(shared), idle = open(shared);

	write(*s, 1);
	must(s->flush());
	std::vector<std::byte> page = page_of(2);
	must(other->write({4096, page}));
	write(*s, 2);
	disk.fail_with(EIO);
	EXPECT_EQ(s->flush().code(), ENOTRECOVERABLE);
	disk.fail_with(0);
	/* The kernel has told its error, and would say now that all is well. */
	EXPECT_EQ(s->flush().code(), ENOTRECOVERABLE);
	/* The error may be that of another client's pages. */
	EXPECT_EQ(other->flush().code(), ENOTRECOVERABLE);
	must(idle->flush());
	must(s->accept_loss());
	write(*s, 2);
	must(s->flush());
	EXPECT_EQ(other->flush().code(), ENOTRECOVERABLE);
}

TEST_F(Durable, AWriteAfterTheErrorIsMadeDurable)
{
	const network_options shared = {.shared = true};
	const auto s = open(shared);

	write(*s, 1);
	disk.fail_with(EIO);
	EXPECT_EQ(s->flush().code(), ENOTRECOVERABLE);
	disk.fail_with(0);
	/* Of a client that has nothing to do with it. */
	const auto late = open(shared);
	write(*late, 2);
	must(late->flush());
}

TEST_F(Durable, AFilesErrorIsNotForgottenEither)
{
	const fs::path file = path_.string() + "-file", directory = path_.string() + "-directory";
	file_options how;
	how.bytes = bytes;

	for (const auto &s : {must(file_store(file, how)), must(sparse_store(directory, bytes))}) {
		write(*s, 1);
		must(s->flush());
		write(*s, 2);
		disk.fail_with(EIO);
		const status first = s->flush();
		disk.fail_with(0);
		EXPECT_EQ(first.code(), ENOTRECOVERABLE);
		EXPECT_NE(first.why().text.find("Input/output error"), std::string::npos);
		EXPECT_EQ(s->flush().code(), ENOTRECOVERABLE);
		EXPECT_FALSE(s->intact());
		must(s->accept_loss());
		write(*s, 2);
		must(s->flush());
	}
	fs::remove_all(file);
	fs::remove_all(directory);
}

/* Zeros where there are zeros need not be written; where a discard has failed there are none. */
TEST_F(Durable, ZerosThatAreWrittenAfterADiscardThatFailedAreThere)
{
	{
		const auto s = open({.deadline = 300ms});

		write(*s, 7);
		must(s->flush());
		server_.reset();
		EXPECT_NE(s->discard(0, 4096).code(), 0);
		start();
		write(*s, 0);
		must(s->flush());
	}
	EXPECT_EQ(read(*open({.shared = true})), 0);
}

} // namespace
