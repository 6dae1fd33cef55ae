/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a client does when its link takes nothing for a while, and when it leads to another region. */
#include "must.hpp"

#include <nprdma/far_network.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <gtest/gtest.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace
{

using namespace nprdma::far;
using namespace std::chrono_literals;
namespace transport = nprdma::transport;

/* A link that takes no READ or WRITE so many times, as one does that finds no memory. */
class busy_line final : public transport::connection
{
public:
	busy_line(std::unique_ptr<transport::connection> of, std::atomic<int> &refusals,
		  std::atomic<int> &posts, std::atomic<int> &cuts)
	    : of_(std::move(of)), refusals_(refusals), posts_(posts), cuts_(cuts)
	{
	}

	transport::status read(std::span<const transport::segment> s, std::uint64_t id) noexcept override
	{
		if (cuts_.load() > 0 && cuts_.fetch_sub(1) > 0)
			return transport::error{ECONNRESET, "as asked for"};
		return refuses() ? transport::error{EAGAIN, "as asked for"} : of_->read(s, id);
	}
	transport::status write(std::span<const transport::segment> s, std::uint64_t id,
				std::span<const std::byte> message) noexcept override
	{
		return refuses() ? transport::error{EAGAIN, "as asked for"} : of_->write(s, id, message);
	}
	transport::status send(std::span<const std::byte> message) noexcept override
	{
		return of_->send(message);
	}
	std::size_t poll(std::span<transport::completion> to) noexcept override { return of_->poll(to); }
	transport::result<std::size_t> receive(std::span<std::byte> buffer) noexcept override
	{
		return of_->receive(buffer);
	}
	bool alive() noexcept override { return of_->alive(); }
	void shutdown() noexcept override { of_->shutdown(); }
	std::size_t max_message() const noexcept override { return of_->max_message(); }
	std::size_t max_segments() const noexcept override { return of_->max_segments(); }
	std::size_t max_operations() const noexcept override { return of_->max_operations(); }
	interest prepare_wait() noexcept override { return of_->prepare_wait(); }
	void finish_wait() noexcept override { of_->finish_wait(); }

private:
	bool refuses() noexcept
	{
		posts_++;
		return refusals_.load() > 0 && refusals_.fetch_sub(1) > 0;
	}

	const std::unique_ptr<transport::connection> of_;
	std::atomic<int> &refusals_, &posts_, &cuts_; /* cuts: of the link, when something is read */
};

class busy_context final : public transport::context
{
public:
	transport::result<std::unique_ptr<transport::region>>
	register_memory(std::span<std::byte> memory, const transport::region_options &how) override
	{
		return of_->register_memory(memory, how);
	}
	transport::result<std::unique_ptr<transport::listener>>
	listen(std::string_view address, std::optional<transport::message_room> most) override
	{
		return of_->listen(address, most);
	}
	transport::result<std::unique_ptr<transport::connection>>
	connect(std::string_view address, transport::clock::time_point deadline,
		std::optional<transport::message_room> room) override
	{
		if (before_connect)
			std::exchange(before_connect, nullptr)();
		auto c = of_->connect(address, deadline, room);

		connects++;
		if (!c)
			return c;
		return std::unique_ptr<transport::connection>(
		    std::make_unique<busy_line>(std::move(*c), refusals, posts, cuts));
	}

	std::atomic<int> refusals = 0, posts = 0, cuts = 0;
	int connects = 0;
	std::function<void()> before_connect; /* the next time */

private:
	const std::unique_ptr<transport::context> of_ = must(transport::open("shm"));
};

TEST(Link, WhatItDoesNotTakeNowIsTriedAgainUntilTheDeadline)
{
	const auto there = must(transport::open("shm"));
	busy_context here;
	const auto server =
	    must(server::make(*there, "shm:far-link-" + std::to_string(::getpid()), server_options{}));
	must(server->lend("r", 1 << 20));
	network_options how;
	how.lanes = 1;
	how.shared = true;
	const auto store = must(network_store::open(here, server->address(), "r", how));
	std::vector<std::byte> out(1 << 16, std::byte{7}), in(1 << 16);

	here.refusals = 5;
	EXPECT_EQ(store->write({0, out}).code(), 0);
	here.refusals = 5;
	EXPECT_EQ(store->read({0, in}).code(), 0);
	EXPECT_TRUE(std::ranges::equal(in, out));
	EXPECT_EQ(here.refusals, 0);
	/* There was nothing wrong with the connection. */
	EXPECT_EQ(here.connects, 1);

	how.deadline = 100ms;
	const auto hasty = must(network_store::open(here, server->address(), "r", how));
	here.refusals = 1 << 30;
	EXPECT_EQ(hasty->read({0, in}).code(), EAGAIN);
	here.refusals = 0;
	EXPECT_EQ(store->read({0, in}).code(), 0);
}

/* A region of the same name may be at the same place, with the same key: a WRITE there would be said to be
 * done. */
TEST(Link, ToAServerThatWasStartedAnewTakesNothing)
{
	const auto there = must(transport::open("shm"));
	busy_context here;
	const std::string address = "shm:far-anew-" + std::to_string(::getpid());
	auto server = must(server::make(*there, address, server_options{}));
	must(server->lend("r", 1 << 20));
	network_options how;
	how.lanes = 1;
	how.deadline = 1s;
	const auto store = must(network_store::open(here, server->address(), "r", how));
	std::vector<std::byte> out(1 << 16, std::byte{7});

	EXPECT_EQ(store->write({0, out}).code(), 0);
	server.reset();
	server = must(server::make(*there, address, server_options{}));
	must(server->lend("r", 1 << 20));
	EXPECT_EQ(store->write({0, out}).code(), ESTALE);
	const int before = here.posts;
	for (int i = 0; i < 3; i++)
		EXPECT_EQ(store->write({0, out}).code(), ESTALE);
	EXPECT_EQ(here.posts, before) << "asked of a region that is not ours";
}

/* What it has of the region, and whoever has it as the second copy of a mirror, may be old. */
TEST(Link, ThatWasCutWhileAnotherClientHadTheRegionIsNotMadeAnew)
{
	const auto there = must(transport::open("shm"));
	busy_context here;
	const auto server =
	    must(server::make(*there, "shm:far-cut-" + std::to_string(::getpid()), server_options{}));
	must(server->lend("r", 1 << 20));
	std::vector<std::byte> page(4096, std::byte{7});
	const network_options how = {.lanes = 1};
	const auto store = must(network_store::open(here, server->address(), "r", how));
	const auto open = [&](const network_options &as) {
		for (;;) {
			auto s = network_store::open(*there, server->address(), "r", as);

			if (s || s.code() != EBUSY)
				return must(std::move(s));
		}
	};

	must(store->write({0, page}));
	here.cuts = 1;
	must(store->read({0, page}));
	EXPECT_EQ(here.connects, 2);
	here.before_connect = [&] {
		std::vector<std::byte> other(4096, std::byte{8});

		/* The server sees soon that the first one is gone. */
		const auto next = open(how);
		must(next->write({0, other}));
	};
	here.cuts = 1;
	EXPECT_EQ(store->read({0, page}).code(), EREMCHG);
	EXPECT_EQ(store->read({0, page}).code(), EREMCHG);
	EXPECT_EQ(store->write({0, page}).code(), EREMCHG);
	EXPECT_EQ(store->flush().code(), EREMCHG);
	must(open({.shared = true})->read({0, page}));
	EXPECT_EQ(page[0], std::byte{8});
}

} // namespace
