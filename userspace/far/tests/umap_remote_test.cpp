/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* umap_remote.cpp, as servers and clients in processes of their own. */
#include "child.hpp"

#include <umap/umap.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace
{

using environment = std::vector<std::pair<std::string, std::string>>;

class UmapRemote : public testing::Test
{
protected:
	void SetUp() override
	{
		std::string path = testing::TempDir() + "umap-remote-XXXXXX";

		ASSERT_TRUE(::mkdtemp(path.data()));
		directory_ = path;
	}
	void TearDown() override { std::filesystem::remove_all(directory_); }

	[[nodiscard]] std::unique_ptr<child> start(std::vector<std::string> arguments,
						   const environment &more = {}) const
	{
		/* Less than the data, so that pages come and go; no adapter, unless the caller names one. */
		environment all = {{"UMAP_PAGESIZE", "8192"},
				   {"UMAP_BUFSIZE", "16"},
				   {"NPRDMA_UMAP_ADDRESS", "shm:umap-" + std::to_string(::getpid()) + "-" +
							       std::to_string(number_++)}};

		all.insert(all.end(), more.begin(), more.end());
		arguments.insert(arguments.begin(), UMAP_REMOTE);
		return std::make_unique<child>(std::move(arguments), [this, &all] {
			for (const auto &[name, value] : all)
				::setenv(name.c_str(), value.c_str(), 1);
			if (::chdir(directory_.c_str()))
				::_exit(126);
		});
	}
	[[nodiscard]] int run(const std::vector<std::string> &arguments) const
	{
		return start(arguments)->end();
	}
	[[nodiscard]] bool has_serverfile() const
	{
		return std::filesystem::exists(directory_ + "/serverfile");
	}

	std::string directory_;
	static inline int number_;
};

TEST_F(UmapRemote, ClientsReadAndWriteTheServersMemory)
{
	/* No whole number of pages, of whatever size. */
	const auto server = start({"lend", "50001", "0", "3"});

	ASSERT_TRUE(server->says("lent"));
	EXPECT_TRUE(has_serverfile());
	EXPECT_EQ(run({"read", "50001"}), 0);
	EXPECT_EQ(run({"read", "30001"}), 0);
	EXPECT_EQ(run({"write"}), 0);
	EXPECT_EQ(server->end(), 0);
	EXPECT_FALSE(has_serverfile());
}

TEST_F(UmapRemote, TheServerEndsAfterAsManyClientsAsItWasTold)
{
	const auto server = start({"lend", "5000", "0", "1"});

	ASSERT_TRUE(server->says("lent"));
	EXPECT_TRUE(server->runs());
	EXPECT_EQ(run({"read", "5000"}), 0);
	EXPECT_EQ(server->end(), 0);
}

TEST_F(UmapRemote, MemoryIsLentByACallUntilItIsUnmapped)
{
	const auto server = start({"lend-by-call", "50001"});

	ASSERT_TRUE(server->says("lent"));
	EXPECT_EQ(run({"read", "50001"}), 0);
	server->tell();
	EXPECT_EQ(server->end(), 0);
}

TEST_F(UmapRemote, MoreThanIsLentIsRefused)
{
	const auto server = start({"lend-by-call", "1000"});

	ASSERT_TRUE(server->says("lent"));
	EXPECT_EQ(run({"read", "1001"}), 2);
	server->tell();
	EXPECT_EQ(server->end(), 0);
}

TEST_F(UmapRemote, PartsOfSeveralServersAreOne)
{
	constexpr unsigned servers = 3;
	/* Whole pages of 4 KiB, and not of the clients' 8 KiB. */
	constexpr std::size_t words = 512 * 21;
	std::vector<std::unique_ptr<child>> all;

	/* The first one waits for the others. */
	for (const unsigned rank : {0u, 2u, 1u})
		all.push_back(start({"lend", std::to_string(words), std::to_string(rank * words), "1"},
				    {{"PMIX_RANK", std::to_string(rank)},
				     {"OMPI_COMM_WORLD_SIZE", std::to_string(servers)},
				     {"PMIX_NAMESPACE", "job/1"}}));
	for (const auto &p : all)
		ASSERT_TRUE(p->says("lent"));
	EXPECT_EQ(run({"read", std::to_string(servers * words)}), 0);
	for (const auto &p : all)
		EXPECT_EQ(p->end(), 0);
	/* Nothing is left of how they found each other. */
	EXPECT_TRUE(std::filesystem::is_empty(directory_));
}

TEST_F(UmapRemote, AFileOfAServerThatIsGoneIsWaitedOut)
{
	std::ofstream(directory_ + "/serverfile") << "shm:umap-gone\n";
	const auto client = start({"read", "1000"});
	const auto server = start({"lend", "1000", "0", "1"});

	EXPECT_TRUE(server->says("lent"));
	EXPECT_EQ(client->end(), 0);
	EXPECT_EQ(server->end(), 0);
}

TEST_F(UmapRemote, AServerLendsWhatItsClientAsksForUntilThatIsGone)
{
	const std::string address = "shm:umap-own-" + std::to_string(::getpid());
	const auto server = start({"own-server"}, {{"NPRDMA_UMAP_ADDRESS", address}});

	/* It waits for the first one. */
	ASSERT_TRUE(server->says("lent"));
	EXPECT_EQ(run({"own-client", address, "30000"}), 0);
	EXPECT_EQ(server->end(), 0);
}

TEST_F(UmapRemote, AClientWaitsForItsServer)
{
	const std::string address = "shm:umap-soon-" + std::to_string(::getpid());
	const auto client = start({"own-client", address, "30000"});
	const auto server = start({"own-server"}, {{"NPRDMA_UMAP_ADDRESS", address}});

	EXPECT_EQ(client->end(), 0);
	EXPECT_EQ(server->end(), 0);
}

TEST_F(UmapRemote, AServerLendsNoMoreThanItIsTold)
{
	const std::string address = "shm:umap-most-" + std::to_string(::getpid());
	const auto server = start(
	    {"own-server"}, {{"NPRDMA_UMAP_ADDRESS", address}, {"NPRDMA_UMAP_SERVER_BYTES", "0x80000"}});

	ASSERT_TRUE(server->says("lent"));
	EXPECT_EQ(run({"own-client", address, "30000"}), 4);
	EXPECT_EQ(server->end(), 0);
}

TEST(UmapNetwork, AStoreOfAServerIsItsMemory)
{
	char memory[100] = "abc", buffer[200] = {};
	const std::string path = testing::TempDir() + "umap-serverfile-" + std::to_string(::getpid());

	::setenv("NPRDMA_UMAP_SERVERFILE", path.c_str(), 1);
	::setenv("NPRDMA_UMAP_ADDRESS", ("shm:umap-here-" + std::to_string(::getpid())).c_str(), 1);
	{
		Umap::StoreNetworkServer s("here", memory, sizeof(memory));

		EXPECT_EQ(s.get_size(), sizeof(memory));
		EXPECT_EQ(s.read_from_store(buffer, 200, 1), 99);
		EXPECT_STREQ(buffer, "bc");
		EXPECT_EQ(s.read_from_store(buffer, 200, -1), -1);
		EXPECT_EQ(s.write_to_store(buffer, 200, 98), 2);
		EXPECT_EQ(memory[98], 'b');
		EXPECT_THROW(Umap::StoreNetworkServer("here", memory, sizeof(memory)), std::exception);
	}
	EXPECT_FALSE(std::filesystem::exists(path));
	::unsetenv("NPRDMA_UMAP_SERVERFILE");
	::unsetenv("NPRDMA_UMAP_ADDRESS");
}

} // namespace
