/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A server whose client does not keep to the rules: what it may cost. */
#include "must.hpp"
#include "no_descriptors.hpp"
#include "protocol.hpp"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <functional>
#include <gtest/gtest.h>
#include <string>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace
{
std::function<void()> before_copy;
} // namespace

/* The program's own, as that of no_descriptors.hpp. */
extern "C" __attribute__((visibility("default"))) ssize_t
process_vm_writev(pid_t pid, const iovec *local, unsigned long n, const iovec *remote, unsigned long m,
		  unsigned long flags) noexcept
{
	if (before_copy)
		before_copy();
	return ::syscall(SYS_process_vm_writev, pid, local, n, remote, m, flags);
}

namespace
{

using namespace nprdma::far;
using namespace std::chrono_literals;
namespace transport = nprdma::transport;

transport::clock::time_point soon()
{
	return transport::clock::now() + 10s;
}

class Hostile : public testing::Test
{
protected:
	void SetUp() override
	{
		static int number;
		server_options how;

		how.clients_may_make = 1 << 30;
		there_ = must(transport::open("shm"));
		here_ = must(transport::open("shm"));
		server_ = must(server::make(
		    *there_, "shm:far-hostile-" + std::to_string(::getpid()) + "-" + std::to_string(number++),
		    how));
		must(server_->lend("r", 1 << 20));
	}

	std::unique_ptr<transport::connection> connect()
	{
		return must(here_->connect(server_->address(), soon(), protocol_room));
	}

	static request of(op what, const std::string &name)
	{
		request r{};

		r.magic = protocol_magic;
		r.what = what;
		r.client = 1;
		r.flags = open_shared;
		name.copy(r.name, sizeof(r.name) - 1);
		return r;
	}

	static int ask(transport::connection &c, const request &r)
	{
		answer a{};

		must(c.send(std::as_bytes(std::span(&r, 1))));
		must(transport::next_message(c, std::as_writable_bytes(std::span(&a, 1)), soon()));
		return a.code;
	}

	std::unique_ptr<transport::context> there_, here_;
	std::unique_ptr<server> server_;
};

TEST_F(Hostile, MoreRoomForMessagesThanTheProtocolNeedsIsRefused)
{
	/* The usual options, and the most that a transport takes. */
	EXPECT_EQ(here_->connect(server_->address(), soon()).code(), ENOBUFS);
	EXPECT_EQ(here_->connect(server_->address(), soon(), transport::message_room{64, 1 << 20}).code(),
		  ENOBUFS);
	auto many = protocol_room;
	many.messages++;
	EXPECT_EQ(here_->connect(server_->address(), soon(), many).code(), ENOBUFS);
	const auto c = connect();
	EXPECT_EQ(ask(*c, of(op::open, "r")), 0);
}

TEST_F(Hostile, AConnectionOpensOneRegionOnce)
{
	const auto c = connect();

	EXPECT_EQ(ask(*c, of(op::flush, "r")), EINVAL);
	EXPECT_EQ(ask(*c, of(op::open, "r")), 0);
	EXPECT_EQ(ask(*c, of(op::open, "r")), EALREADY);
	EXPECT_EQ(ask(*c, of(op::flush, "r")), 0);
	EXPECT_EQ(ask(*c, of(op::flush, "another")), EINVAL);
}

TEST_F(Hostile, RegionsThatClientsMakeAreCounted)
{
	int code = 0;
	unsigned made = 0;

	for (; !code && made < 2000; made += !code) {
		const auto c = connect();
		request r = of(op::open, "made-" + std::to_string(made));

		r.flags |= open_make;
		r.bytes = 1;
		r.page_bytes = 4096;
		code = ask(*c, r);
	}
	EXPECT_EQ(code, EDQUOT);
	EXPECT_EQ(made, 1024u);
	/* A page of it is the least. */
	request r = of(op::open, "large");
	r.flags |= open_make;
	r.bytes = (1 << 30) - 1024 * 4096 + 1;
	r.page_bytes = 4096;
	EXPECT_EQ(ask(*connect(), r), EDQUOT);
}

TEST_F(Hostile, WhatIsWithdrawnCountsNoMore)
{
	for (int i = 0; i < 3; i++) {
		auto c = connect();
		request r = of(op::open, "all");

		r.flags |= open_make;
		r.bytes = 1 << 30;
		r.page_bytes = 4096;
		ASSERT_EQ(ask(*c, r), 0) << i;
		request more = of(op::open, "more");
		more.flags |= open_make;
		more.bytes = 1;
		more.page_bytes = 4096;
		EXPECT_EQ(ask(*connect(), more), EDQUOT);
		EXPECT_EQ(server_->withdraw("all").code(), EBUSY);
		c.reset();
		while (server_->withdraw("all").code() == EBUSY)
			std::this_thread::yield();
	}
	/* What the server lends by itself was never counted. */
	must(server_->withdraw("r"));
	auto c = connect();
	request r = of(op::open, "all");
	r.flags |= open_make;
	r.bytes = (1 << 30) + 1;
	r.page_bytes = 4096;
	EXPECT_EQ(ask(*c, r), EDQUOT);
}

TEST_F(Hostile, AServerWithoutDescriptorsSaysSoOnceAndServesLater)
{
	testing::internal::CaptureStderr();
	no_descriptors = true;
	const unsigned before = accepts;
	std::thread client([&] { EXPECT_EQ(ask(*connect(), of(op::open, "r")), 0); });
	/* It looks again from time to time. */
	while (accepts - before < 3)
		std::this_thread::sleep_for(1ms);
	no_descriptors = false;
	client.join();
	const std::string said = testing::internal::GetCapturedStderr();
	const std::size_t at = said.find("ulimit -n");
	ASSERT_NE(at, std::string::npos) << said;
	EXPECT_EQ(said.find("ulimit -n", at + 1), std::string::npos) << said;
}

/* It opens @region, begins to WRITE to it, talks nonsense meanwhile, and is stopped. */
[[noreturn]] void stop_while_writing(const std::string &address, const request &open)
{
	const auto context = must(transport::open("shm"));
	std::unique_ptr<transport::connection> c;
	std::vector<std::byte> page(4096);
	const auto region = must(context->register_memory(page));
	answer a{};

	while (!c)
		if (auto r = context->connect(address, soon(), protocol_room))
			c = std::move(*r);
	must(c->send(std::as_bytes(std::span(&open, 1))));
	must(transport::next_message(*c, std::as_writable_bytes(std::span(&a, 1)), soon()));
	before_copy = [&] {
		must(c->send(std::as_bytes(std::span(&page[0], 1))));
		::raise(SIGSTOP);
	};
	const transport::segment s = {region.get(), page.data(), a.data.addr, a.data.key, 4096};
	(void)c->write({&s, 1}, 1);
	::_exit(0);
}

TEST(HostileProcess, OneThatIsStoppedWhileItWritesKeepsNobodyWaiting)
{
	const std::string address = "shm:far-stopped-" + std::to_string(::getpid());
	request open{};
	int how;

	open.magic = protocol_magic;
	open.what = op::open;
	open.client = 2;
	open.bytes = 4096;
	open.page_bytes = 4096;
	open.flags = open_make;
	open.name[0] = 'm';
	/* Before there are threads. */
	const pid_t child = ::fork();
	ASSERT_GE(child, 0);
	if (child == 0)
		stop_while_writing(address, open);

	const auto there = must(transport::open("shm")), here = must(transport::open("shm"));
	server_options options;
	options.clients_may_make = 1 << 20;
	const auto serving = must(server::make(*there, address, options));
	must(serving->lend("r", 4096));
	ASSERT_EQ(::waitpid(child, &how, WUNTRACED), child);
	ASSERT_TRUE(WIFSTOPPED(how)) << how;
	/*
	 * The server waits five seconds for the end of what it WRITEs, and others do not wait for that: one
	 * that comes after the server has read the nonsense finds the region in use still.
	 */
	for (int i = 0; i < 3; i++) {
		const auto store =
		    must(network_store::open(*here, address, "r", {.shared = true, .lanes = 1}));
		must(store->flush());
	}
	EXPECT_EQ(serving->withdraw("m").code(), EBUSY);
	EXPECT_EQ(network_store::open(*here, address, "m", {.deadline = 10ms}).code(), EBUSY);
	(void)::kill(child, SIGKILL);
	(void)::waitpid(child, nullptr, 0);
	while (serving->withdraw("m").code() == EBUSY)
		std::this_thread::yield();
}

} // namespace
