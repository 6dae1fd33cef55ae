/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Two stores with the same data: the one that lacks something is never read from, whoever looks and whenever.
 */
#include "counting.hpp"

#include <nprdma/far_network.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <unistd.h>

namespace
{

using namespace far_tests;
using namespace std::chrono_literals;
namespace transport = nprdma::transport;
namespace fs = std::filesystem;

constexpr std::size_t bytes = 2 << 20;

std::vector<std::byte> page_of(int value)
{
	return std::vector<std::byte>(4096, static_cast<std::byte>(value));
}
status write(store &to, int value, std::uint64_t page = 0)
{
	std::vector<std::byte> memory = page_of(value);

	return to.write({page * 4096, memory});
}
int read(store &from, std::uint64_t page = 0)
{
	std::vector<std::byte> memory(4096);

	must(from.read({page * 4096, memory}));
	return static_cast<int>(memory[4000]);
}
std::vector<int> codes(const mirrored &m)
{
	std::vector<int> all;

	for (const auto &why : m.left_out())
		all.push_back(why.code);
	return all;
}

/* Two servers, each with a region of a file or of memory. */
class Mirror : public testing::Test
{
protected:
	struct host {
		std::string address;
		fs::path path; /* empty: memory */
		std::unique_ptr<transport::context> context;
		std::unique_ptr<server> serves;

		void start()
		{
			serves.reset();
			serves = must(server::make(*context, address));
			must(serves->lend("r", bytes, 4096, path));
		}
		void stop() { serves.reset(); }
	};

	void SetUp() override
	{
		static int number;

		here_ = must(transport::open("shm"));
		where_ = fs::path(testing::TempDir()) /
			 ("far-mirror-" + std::to_string(::getpid()) + "-" + std::to_string(number++));
		fs::create_directory(where_);
		for (host *h : {&a_, &b_}) {
			const std::string name = h == &a_ ? "a" : "b";

			h->address = "shm:" + where_.filename().string() + name;
			h->path = where_ / name;
			h->context = must(transport::open("shm"));
			h->start();
		}
	}
	void TearDown() override
	{
		a_.stop();
		b_.stop();
		fs::remove_all(where_);
	}

	std::shared_ptr<network_store> open(const host &of, const network_options &how = {})
	{
		network_options o = how;

		o.deadline = 300ms;
		/* The server sees soon that the last client has gone. */
		o.lanes = 1;
		for (;;) {
			auto s = network_store::open(*here_, of.address, "r", o);

			if (s)
				return *s;
			if (s.code() != EBUSY)
				throw std::runtime_error(s.why().text);
		}
	}
	std::shared_ptr<mirrored> both(const host &first, const host &second, const network_options &how = {})
	{
		return must(mirror_store({open(first, how), open(second, how)}));
	}

	host a_, b_;
	fs::path where_;
	std::unique_ptr<transport::context> here_;
};

TEST_F(Mirror, OneThatMissedAWriteIsNotReadByTheNextClient)
{
	{
		const auto m = both(a_, b_);

		must(write(*m, 1));
		must(m->flush());
		b_.stop();
		must(write(*m, 2));
		EXPECT_EQ(codes(*m)[0], 0);
		EXPECT_NE(codes(*m)[1], 0);
		/* It comes back, and stays left out. */
		b_.start();
		EXPECT_EQ(read(*m), 2);
		must(m->flush());
		must(write(*m, 3));
	}
	/* That is so whatever else is started anew. */
	a_.start();
	const auto m = both(b_, a_);
	EXPECT_EQ(codes(*m), (std::vector<int>{ESTALE, 0}));
	EXPECT_EQ(read(*m), 3);
}

TEST_F(Mirror, OneThatIsReadOnlyDoesNotReadTheOlderStoreEither)
{
	{
		const auto m = both(a_, b_);

		must(write(*m, 1));
		a_.stop();
		must(write(*m, 2));
		a_.start();
	}
	const network_options how = {.read_only = true};
	const auto m = both(a_, b_, how), second = both(a_, b_, how);
	EXPECT_EQ(codes(*m), (std::vector<int>{ESTALE, 0}));
	EXPECT_EQ(read(*m), 2);
	EXPECT_EQ(read(*second), 2);
	EXPECT_EQ(m->resync().code(), EROFS);
	EXPECT_EQ(codes(*m), (std::vector<int>{EROFS, 0}));
}

TEST_F(Mirror, ResyncBringsItUpToDate)
{
	{
		const auto m = both(a_, b_);

		must(write(*m, 1, 5));
		must(write(*m, 1, 6));
		must(m->flush());
		b_.stop();
		must(write(*m, 2, 5));
		must(m->discard(6 * 4096, 4096));
		b_.start();
		must(m->resync());
		EXPECT_EQ(codes(*m), (std::vector<int>{0, 0}));
		a_.stop();
		EXPECT_EQ(read(*m, 5), 2);
		EXPECT_EQ(read(*m, 6), 0);
		must(write(*m, 3, 5));
		a_.start();
	}
	/* Now it is the other one. */
	const auto m = both(a_, b_);
	EXPECT_EQ(codes(*m), (std::vector<int>{ESTALE, 0}));
	EXPECT_EQ(read(*m, 5), 3);
	must(m->resync());
	must(m->flush());
	EXPECT_EQ(read(*m, 5), 3);
}

TEST_F(Mirror, OneThatHasLostItsMemoryIsNotReadAsZeros)
{
	a_.path.clear();
	b_.path.clear();
	a_.start();
	b_.start();
	{
		const auto m = both(a_, b_);

		must(write(*m, 1));
	}
	a_.start();
	const auto m = both(a_, b_);
	EXPECT_EQ(codes(*m), (std::vector<int>{ESTALE, 0}));
	EXPECT_EQ(read(*m), 1);
	must(m->resync());
	b_.stop();
	EXPECT_EQ(read(*m), 1);
}

/* Both are there, and one has lost what was in its page cache. No checksum says so. */
TEST_F(Mirror, OneThatHasLostPowerIsNotReadAsItWas)
{
	const network_options how = {.checksums = false};
	{
		const auto m = both(b_, a_, how);
		std::string kept;

		must(write(*m, 1));
		must(m->flush());
		{
			std::ifstream in(b_.path, std::ios::binary);
			kept = {std::istreambuf_iterator<char>(in), {}};
		}
		must(write(*m, 2));
		b_.stop();
		std::ofstream(b_.path, std::ios::binary) << kept;
		b_.start();
		EXPECT_EQ(read(*m), 2);
		EXPECT_EQ(codes(*m), (std::vector<int>{ENOTRECOVERABLE, 0}));
		/* The other one has it. */
		must(m->flush());
		EXPECT_TRUE(m->intact());
	}
	const auto m = both(b_, a_, how);
	EXPECT_EQ(codes(*m), (std::vector<int>{ESTALE, 0}));
	EXPECT_EQ(read(*m), 2);
}

TEST_F(Mirror, BothThatMayHaveLostSomethingSaySoAndOneIsWhatCounts)
{
	const auto m = both(a_, b_);

	must(write(*m, 1));
	a_.start();
	b_.start();
	EXPECT_EQ(read(*m), 1);
	EXPECT_FALSE(m->intact());
	EXPECT_EQ(m->flush().code(), ENOTRECOVERABLE);
	EXPECT_EQ(m->flush().code(), ENOTRECOVERABLE);
	must(m->accept_loss());
	const std::vector<int> after = codes(*m);
	EXPECT_EQ(std::count(after.begin(), after.end(), ENOTRECOVERABLE), 1);
	must(write(*m, 2));
	must(m->flush());
	must(m->resync());
	must(m->flush());
	EXPECT_EQ(codes(*m), (std::vector<int>{0, 0}));
}

TEST_F(Mirror, OfRegionsThatOthersShareIsRefused)
{
	EXPECT_EQ(mirror_store({open(a_, {.shared = true}), open(b_, {.shared = true})}).code(), EINVAL);
}

/* A store of this process that fails when it is told to. */
class flaky final : public store
{
public:
	[[nodiscard]] std::uint64_t bytes() const noexcept override { return of_->bytes(); }
	status read(const piece &p) noexcept override { return of_->read(p); }
	status write(const piece &p) noexcept override
	{
		return fails ? status(error{EIO, "as asked for"}) : of_->write(p);
	}
	result<data_generation> generation() noexcept override { return of_->generation(); }
	status set_generation(const data_generation &to) noexcept override
	{
		return forgets ? status(error{ETIMEDOUT, "as asked for"}) : of_->set_generation(to);
	}

	std::atomic<bool> fails = false, forgets = false;

private:
	const std::shared_ptr<store> of_ = memory_store(::bytes);
};

TEST(Mirrors, ThatCannotBeToldApartAreRefused)
{
	EXPECT_EQ(mirror_store({}).code(), EINVAL);
	EXPECT_EQ(mirror_store({memory_store(4096), memory_store(8192)}).code(), EINVAL);
	EXPECT_EQ(mirror_store({memory_store(4096), std::make_shared<counting>(4096)}).code(), EOPNOTSUPP);
	const auto a = std::make_shared<flaky>(), b = std::make_shared<flaky>();
	must(write(*must(mirror_store({a, b})), 1));
	/* Two clients, each of which finds the other store failing. */
	const auto first = must(mirror_store({a, b})), second = must(mirror_store({a, b}));
	b->fails = true;
	must(write(*first, 2));
	b->fails = false;
	a->fails = true;
	must(write(*second, 3));
	EXPECT_EQ(mirror_store({a, b}).code(), ENOTUNIQ);
}

TEST(Mirrors, AWriteIsNotDoneBeforeTheOthersKnowWhoLacksIt)
{
	const auto a = std::make_shared<flaky>(), b = std::make_shared<flaky>();
	const auto m = must(mirror_store({a, b}));

	must(write(*m, 1));
	b->fails = true;
	a->forgets = true;
	EXPECT_EQ(write(*m, 2).code(), ETIMEDOUT);
	EXPECT_EQ(codes(*m), (std::vector<int>{0, 0}));
	a->forgets = false;
	const auto before = *a->generation();
	must(write(*m, 2));
	EXPECT_EQ(codes(*m), (std::vector<int>{0, EIO}));
	EXPECT_EQ(a->generation()->number, before.number + 1);
	EXPECT_EQ(*b->generation(), before);
	/* If none takes it nobody is behind another. */
	a->fails = true;
	EXPECT_EQ(write(*m, 3).code(), EIO);
	EXPECT_EQ(codes(*m), (std::vector<int>{0, EIO}));
}

TEST(Mirrors, WhatIsWrittenDuringAResyncIsInBoth)
{
	const auto a = std::make_shared<flaky>(), b = std::make_shared<flaky>();
	const auto m = must(mirror_store({a, b}));
	std::atomic<bool> stop = false;
	std::vector<std::thread> t;
	std::atomic<int> wrong = 0;

	b->fails = true;
	must(write(*m, 1));
	b->fails = false;
	for (unsigned i = 0; i < 2; i++)
		t.emplace_back([&, i] {
			std::minstd_rand random(i + 1);

			while (!stop) {
				/* Pages of its own. */
				const std::uint64_t page = random() % (bytes / 8192) * 2 + i;
				const int value = static_cast<int>(random() % 256);

				wrong += !write(*m, value, page) || read(*m, page) != value;
			}
		});
	for (int i = 0; i < 50; i++) {
		must(m->resync());
		EXPECT_EQ(codes(*m), (std::vector<int>{0, 0}));
		/* Whoever fails next is behind, and then it is brought up to date again. */
		flaky &next = i % 2 ? *a : *b;
		next.fails = true;
		while (codes(*m) == (std::vector<int>{0, 0}))
			std::this_thread::yield();
		next.fails = false;
	}
	must(m->resync());
	stop = true;
	for (std::thread &x : t)
		x.join();
	EXPECT_EQ(wrong, 0);
	for (std::uint64_t page = 0; page < bytes / 4096; page++)
		ASSERT_EQ(read(*a, page), read(*b, page)) << page;
}

/* Of a file in an attribute, of a directory in a file. */
TEST(Mirrors, OfFilesKnowTheOlderOneAfterwards)
{
	const fs::path where =
	    fs::path(testing::TempDir()) / ("far-mirror-files-" + std::to_string(::getpid()));
	file_options how;

	fs::create_directory(where);
	how.bytes = bytes;
	{
		const auto file = must(file_store(where / "file", how));
		const auto directory = must(sparse_store(where / "directory", bytes));
		const status s = file->set_generation({});

		if (s.code() == EOPNOTSUPP) {
			fs::remove_all(where);
			GTEST_SKIP() << "no user attributes here: " << s.why().text;
		}
		const auto m = must(mirror_store({file, directory}));
		EXPECT_EQ(*file->generation(), *directory->generation());
		EXPECT_EQ(file->generation()->number, 1u);
		const auto fails = std::make_shared<flaky>();
		must(fails->set_generation(*file->generation()));
		const auto other = must(mirror_store({fails, directory}));
		fails->fails = true;
		must(write(*other, 2));
	}
	for (int round = 0; round < 2; round++) {
		const auto m = must(mirror_store(
		    {must(file_store(where / "file")), must(sparse_store(where / "directory", 0))}));

		EXPECT_EQ(codes(*m), (std::vector<int>{round ? 0 : ESTALE, 0}));
		EXPECT_EQ(read(*m), 2);
		must(m->resync());
	}
	file_options only;
	only.read_only = true;
	EXPECT_EQ(must(file_store(where / "file", only))->set_generation({}).code(), EROFS);
	fs::remove_all(where);
}

} // namespace
