/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A program for UMap's headers, and nothing else of ours. */
#include <umap/store/SparseStore.h>
#include <umap/store/StoreNetwork.h>
#include <umap/umap.h>

#include <nprdma/far_network.hpp>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <utility>
#include <vector>

namespace
{

class Numbers : public Umap::Store
{
public:
	ssize_t read_from_store(char *buf, std::size_t nb, off_t off) override
	{
		for (std::size_t i = 0; i < nb / 8; i++)
			reinterpret_cast<std::uint64_t *>(buf)[i] = static_cast<std::uint64_t>(off) / 8 + i;
		return static_cast<ssize_t>(nb);
	}
	ssize_t write_to_store(char *, std::size_t nb, off_t) override
	{
		written += nb;
		return static_cast<ssize_t>(nb);
	}
	std::atomic<std::size_t> written = 0;
};

/* Before the library is first called, which is when it looks. */
[[maybe_unused]] const bool has_environment = [] {
	for (const auto &[name, value] : {std::pair{"UMAP_PAGESIZE", "16384"},
					  {"UMAP_BUFSIZE", "32"},
					  {"UMAP_PAGE_FILLERS", "3"},
					  {"UMAP_PAGE_EVICTORS", "2"},
					  {"UMAP_EVICT_HIGH_WATER_THRESHOLD", "80"}})
		setenv(name, value, 1);
	return true;
}();

TEST(Umap, TheEnvironmentIsRead)
{
	EXPECT_EQ(umapcfg_get_umap_page_size(), 16384u);
	EXPECT_EQ(umapcfg_get_max_pages_in_buffer(), 32u);
	EXPECT_EQ(umapcfg_get_num_fillers(), 3u);
	EXPECT_EQ(umapcfg_get_num_flushers(), 2u);
	EXPECT_EQ(umapcfg_get_evict_high_water_threshold(), 80);
	EXPECT_EQ(umapcfg_get_system_page_size(), ::sysconf(_SC_PAGESIZE));
}

TEST(Umap, AStoreOfTheUsersIsMappedAtAnOffset)
{
	Numbers store;
	const std::size_t page = umapcfg_get_umap_page_size(), length = 200 * page;
	auto *const w = static_cast<std::uint64_t *>(Umap::umap_ex(
	    nullptr, length, PROT_READ | PROT_WRITE, UMAP_PRIVATE, -1, static_cast<off_t>(4 * page), &store));
	ASSERT_NE(static_cast<void *>(w), UMAP_FAILED);
	umap_prefetch_item items[] = {{w}, {w + page / 8}};
	umap_prefetch(2, items);
	umap_fetch_and_pin(reinterpret_cast<char *>(w + 2 * page / 8), page);
	for (std::size_t i = 0; i < length / 8; i += 100)
		ASSERT_EQ(w[i], 4 * page / 8 + i);
	w[5] = 1;
	EXPECT_EQ(umap_flush(), 0);
	EXPECT_EQ(store.written, page);
	EXPECT_EQ(uunmap(w + 100 * page / 8, 50 * page), 0);
	EXPECT_EQ(w[7], 4 * page / 8 + 7);
	EXPECT_EQ(uunmap(w, length), 0);
	EXPECT_EQ(uunmap(w, length), -1);
}

TEST(Umap, AFileIsNotMadeLongerByTheLastPage)
{
	const std::string path = testing::TempDir() + "umap-file-" + std::to_string(::getpid());
	const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	const std::size_t page = umapcfg_get_umap_page_size();
	struct stat st;

	ASSERT_EQ(::ftruncate(fd, static_cast<off_t>(2 * page + 100)), 0);
	char *const p =
	    static_cast<char *>(umap(nullptr, 3 * page, PROT_READ | PROT_WRITE, UMAP_PRIVATE, fd, 0));
	ASSERT_NE(static_cast<void *>(p), UMAP_FAILED);
	std::memset(p, 'x', 3 * page);
	EXPECT_EQ(uunmap(p, 3 * page), 0);
	ASSERT_EQ(::fstat(fd, &st), 0);
	EXPECT_EQ(static_cast<std::size_t>(st.st_size), 2 * page + 100);
	char last;
	ASSERT_EQ(::pread(fd, &last, 1, static_cast<off_t>(2 * page + 99)), 1);
	EXPECT_EQ(last, 'x');
	::close(fd);
	::unlink(path.c_str());
}

TEST(Umap, ASparseStoreIsMadeAndOpened)
{
	const std::string path = testing::TempDir() + "umap-sparse-" + std::to_string(::getpid());
	const std::size_t page = umapcfg_get_umap_page_size(), size = 100 * page;
	{
		Umap::SparseStore s(size, page, path, 10 * page);
		ASSERT_EQ(s.get_directory_creation_status(), 0);
		char *const p = static_cast<char *>(
		    Umap::umap_ex(nullptr, size, PROT_READ | PROT_WRITE, UMAP_PRIVATE, -1, 0, &s));
		ASSERT_NE(static_cast<void *>(p), UMAP_FAILED);
		p[55 * page] = 'y';
		EXPECT_EQ(uunmap(p, size), 0);
	}
	EXPECT_EQ(Umap::SparseStore::get_capacity(path), size);
	{
		Umap::SparseStore s(path, true);
		char *const p =
		    static_cast<char *>(Umap::umap_ex(nullptr, size, PROT_READ, UMAP_PRIVATE, -1, 0, &s));
		ASSERT_NE(static_cast<void *>(p), UMAP_FAILED);
		EXPECT_EQ(p[55 * page], 'y');
		EXPECT_EQ(p[54 * page], 0);
		EXPECT_EQ(uunmap(p, size), 0);
	}
	ASSERT_EQ(std::system(("rm -r " + path).c_str()), 0);
}

TEST(Umap, ANetworkStoreIsMapped)
{
	namespace far = nprdma::far;
	const std::string address = "shm:umap-" + std::to_string(::getpid());
	auto context = nprdma::transport::open("shm");
	far::server_options allow;
	allow.clients_may_make = 64 << 20;
	auto server = far::server::make(**context, address, allow);
	ASSERT_TRUE(server);
	const std::size_t size = 100 * umapcfg_get_umap_page_size();
	Umap::NetworkClient client(address);
	Umap::StoreNetwork s("a", size, &client, true);
	char *const p = static_cast<char *>(
	    Umap::umap_ex(nullptr, size, PROT_READ | PROT_WRITE, UMAP_PRIVATE, -1, 0, &s));
	ASSERT_NE(static_cast<void *>(p), UMAP_FAILED);
	for (std::size_t i = 0; i < size; i += 1000)
		p[i] = static_cast<char>(i / 1000);
	for (std::size_t i = 0; i < size; i += 1000)
		ASSERT_EQ(p[i], static_cast<char>(i / 1000));
	EXPECT_EQ(uunmap(p, size), 0);
}

} // namespace
