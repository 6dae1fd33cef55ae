/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The file of a region: what a server takes for one, and what it finds there when it is started anew. */
#include "must.hpp"

#include <nprdma/far_network.hpp>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace
{

using namespace nprdma::far;
using namespace std::chrono_literals;
namespace transport = nprdma::transport;
namespace fs = std::filesystem;

class RegionFile : public testing::Test
{
protected:
	static constexpr std::size_t bytes = 1 << 20;

	void SetUp() override
	{
		static int number;
		const std::string name =
		    "far-file-" + std::to_string(::getpid()) + "-" + std::to_string(number++);

		address_ = "shm:" + name;
		where_ = fs::path(testing::TempDir()) / name;
		fs::create_directory(where_);
		path_ = where_ / "region";
		there_ = must(transport::open("shm"));
		here_ = must(transport::open("shm"));
		start();
	}
	void TearDown() override
	{
		server_.reset();
		fs::remove_all(where_);
	}

	void start()
	{
		server_.reset();
		server_ = must(server::make(*there_, address_));
	}
	status lend(std::size_t page_bytes, std::size_t size = bytes)
	{
		return server_->lend("r", size, page_bytes, path_);
	}
	std::shared_ptr<network_store> open()
	{
		network_options how;

		how.lanes = 1;
		return must(network_store::open(*here_, address_, "r", how));
	}

	static std::string content(const fs::path &path)
	{
		std::ifstream in(path, std::ios::binary);

		return {std::istreambuf_iterator<char>(in), {}};
	}
	static void make(const fs::path &path, const std::string &of)
	{
		std::ofstream(path, std::ios::binary) << of;
	}

	std::string address_;
	fs::path where_, path_;
	std::unique_ptr<transport::context> there_, here_;
	std::unique_ptr<server> server_;
};

/* With both page sizes the data and the entries take as many bytes. */
TEST_F(RegionFile, OfAnotherPageSizeIsRefusedAndHasItsDataStill)
{
	std::vector<std::byte> out(4096, std::byte{7});
	std::vector<std::byte> in(4096);

	must(lend(4096));
	{
		const auto s = open();

		must(s->write({5 * 4096, out}));
		must(s->flush());
	}
	start();
	const std::string before = content(path_);
	const status other = lend(65536);
	ASSERT_EQ(other.code(), EINVAL);
	EXPECT_EQ(other.why().text,
		  path_.string() +
		      ": is a region of 1048576 bytes in pages of 4096, and not of 1048576 bytes "
		      "in pages of 65536 as was asked for; it is left as it is");
	EXPECT_EQ(lend(4096, bytes - 1).code(), EINVAL);
	EXPECT_EQ(lend(4096, 2 * bytes).code(), EINVAL);
	EXPECT_TRUE(content(path_) == before);
	must(lend(4096));
	must(open()->read({5 * 4096, in}));
	EXPECT_EQ(in, out);
}

TEST_F(RegionFile, ThatIsSomethingElseIsRefusedAndLeftAsItIs)
{
	/* The data, the entries and the mark. */
	constexpr std::size_t all = bytes + 4096 + 4096;

	for (const std::size_t size :
	     {std::size_t{1}, std::size_t{4095}, std::size_t{4096}, all - 4096, all}) {
		make(path_, std::string(size, 'x'));
		EXPECT_EQ(lend(4096).code(), EINVAL) << size;
		EXPECT_TRUE(content(path_) == std::string(size, 'x')) << size;
	}
	/* A region of which something is missing. */
	fs::remove(path_);
	must(lend(4096));
	ASSERT_EQ(fs::file_size(path_), all);
	start();
	const std::string whole = content(path_), cut = whole.substr(4096);
	make(path_, cut);
	EXPECT_EQ(lend(4096).code(), EINVAL);
	EXPECT_TRUE(content(path_) == cut);
	make(path_, whole);
	must(lend(4096));
}

TEST_F(RegionFile, HasToBeARegularOneAndMayBeEmpty)
{
	ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
	EXPECT_EQ(lend(4096).code(), EINVAL);
	fs::remove(path_);
	EXPECT_EQ(server_->lend("r", bytes, 4096, where_).code(), EISDIR);
	make(path_, "");
	must(lend(4096));
	must(open()->flush());
}

TEST_F(RegionFile, IsTheSameRegionWhereItIsCopiedToAndAnotherOneWhenItIsMadeAnew)
{
	std::vector<std::byte> out(4096, std::byte{7});
	std::vector<std::byte> in(4096);

	must(lend(4096));
	const auto s = open();
	must(s->write({0, out}));
	must(s->flush());
	server_.reset();
	const fs::path copy = where_ / "copy";
	fs::copy_file(path_, copy);
	start();
	must(server_->lend("r", bytes, 4096, copy));
	must(s->read({0, in}));
	EXPECT_EQ(in, out);
	/* The file system may give the new file the number of the old one. */
	server_.reset();
	fs::remove(copy);
	start();
	must(server_->lend("r", bytes, 4096, copy));
	EXPECT_EQ(s->read({0, in}).code(), ESTALE);
}

TEST_F(RegionFile, IsLentOnceAtATimeUnderWhateverName)
{
	const fs::path link = where_ / "link";
	const auto other = must(server::make(*there_, address_ + "-other"));

	must(lend(4096));
	fs::create_hard_link(path_, link);
	for (const fs::path &path : {path_, link}) {
		EXPECT_EQ(server_->lend("again", bytes, 4096, path).code(), EBUSY) << path;
		EXPECT_EQ(other->lend("again", bytes, 4096, path).code(), EBUSY) << path;
	}
	must(server_->withdraw("r"));
	must(other->lend("r", bytes, 4096, link));
}

} // namespace
