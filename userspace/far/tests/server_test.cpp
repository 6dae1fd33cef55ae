/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A server whose client does not keep to the rules: what it may cost. */
#include "must.hpp"
#include "no_descriptors.hpp"
#include "protocol.hpp"
#include "slow_disk.hpp"

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <dlfcn.h>
#include <filesystem>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <iterator>
#include <mutex>
#include <optional>
#include <pthread.h>
#include <string>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace
{
std::function<void()> before_copy;
std::atomic<int> failing_thread = 0; /* 1: the next one that is to be started; 0: none */
} // namespace

slow_disk disk;

/* The program's own, as that of no_descriptors.hpp. */
extern "C" __attribute__((visibility("default"))) ssize_t
process_vm_writev(pid_t pid, const iovec *local, unsigned long n, const iovec *remote, unsigned long m,
		  unsigned long flags) noexcept
{
	if (before_copy)
		before_copy();
	return ::syscall(SYS_process_vm_writev, pid, local, n, remote, m, flags);
}

extern "C" __attribute__((visibility("default"))) int fdatasync(int fd)
{
	std::unique_lock lock(disk.mutex);

	disk.calls++;
	disk.inside++;
	disk.change.notify_all();
	disk.change.wait_for(lock, std::chrono::seconds(30), [] { return !disk.slow; });
	disk.inside--;
	errno = disk.error;
	return disk.error ? -1 : static_cast<int>(::syscall(SYS_fdatasync, fd));
}

extern "C" __attribute__((visibility("default"))) int
pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*f)(void *), void *with) noexcept
{
	static const auto real =
	    reinterpret_cast<decltype(&::pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));

	if (failing_thread > 0 && --failing_thread == 0)
		return EAGAIN;
	return real(thread, how, f, with);
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

	static void say(transport::connection &c, const request &r)
	{
		must(c.send(std::as_bytes(std::span(&r, 1))));
	}
	static int hear(transport::connection &c)
	{
		answer a{};

		must(transport::next_message(c, std::as_writable_bytes(std::span(&a, 1)), soon()));
		return a.code;
	}
	static int ask(transport::connection &c, const request &r)
	{
		say(c, r);
		return hear(c);
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

/* Its old connection is seen to be closed before the new one is heard. */
TEST_F(Hostile, WhatAClientHasClosedTheNextOneOpensAtOnce)
{
	request r = of(op::open, "r");

	r.flags = 0;
	for (int i = 0; i < 200; i++) {
		r.client++;
		ASSERT_EQ(ask(*connect(), r), 0) << i;
	}
}

/* Two regions of files besides. */
class HostileToADisk : public Hostile
{
protected:
	void SetUp() override
	{
		Hostile::SetUp();
		where_ =
		    std::filesystem::path(testing::TempDir()) / ("far-disk-" + std::to_string(::getpid()));
		std::filesystem::create_directory(where_);
		must(server_->lend("f", 1 << 20, 4096, where_ / "f"));
		must(server_->lend("g", 1 << 20, 4096, where_ / "g"));
		disk.be(false);
	}
	void TearDown() override
	{
		disk.fail_with(0);
		disk.be(false);
		server_.reset();
		std::filesystem::remove_all(where_);
	}

	/* Of one client, alone. */
	std::unique_ptr<transport::connection> open(const std::string &name, std::uint64_t client)
	{
		request r = of(op::open, name);
		auto c = connect();

		r.flags = 0;
		r.client = client;
		return ask(*c, r) == 0 ? std::move(c) : nullptr;
	}
	std::unique_ptr<transport::connection> open_when_free(const std::string &name, std::uint64_t client)
	{
		for (const auto until = soon(); transport::clock::now() < until;)
			if (auto c = open(name, client))
				return c;
		return nullptr;
	}

	std::filesystem::path where_;
};

TEST_F(HostileToADisk, ThatIsSlowOnlyWhoFlushesWaits)
{
	const auto writer = open("f", 1), other = open("r", 2);
	answer a{};

	ASSERT_TRUE(writer && other);
	disk.be(true);
	say(*writer, of(op::flush, "f"));
	ASSERT_TRUE(disk.wait_for_one());
	for (int i = 0; i < 3; i++)
		EXPECT_EQ(ask(*other, of(op::flush, "r")), 0);
	EXPECT_TRUE(open("g", 3));
	EXPECT_EQ(*writer->receive(std::as_writable_bytes(std::span(&a, 1))), 0u);
	EXPECT_TRUE(writer->alive());
	disk.be(false);
	EXPECT_EQ(hear(*writer), 0);
	/* And so on. */
	EXPECT_EQ(ask(*writer, of(op::flush, "f")), 0);
}

TEST_F(HostileToADisk, ThatFailsIsAnError)
{
	const auto c = open("f", 1);

	ASSERT_TRUE(c);
	disk.fail_with(EIO);
	EXPECT_EQ(ask(*c, of(op::flush, "f")), EIO);
	disk.fail_with(0);
	EXPECT_EQ(ask(*c, of(op::flush, "f")), 0);
}

TEST_F(HostileToADisk, WhoAsksBeforeTheAnswerIsDropped)
{
	const auto c = open("f", 1);

	ASSERT_TRUE(c);
	disk.be(true);
	say(*c, of(op::flush, "f"));
	ASSERT_TRUE(disk.wait_for_one());
	say(*c, of(op::flush, "f"));
	const auto until = soon();
	while (c->alive() && transport::clock::now() < until)
		std::this_thread::yield();
	EXPECT_FALSE(c->alive());
}

TEST_F(HostileToADisk, WhoIsGoneMeanwhileIsForgotten)
{
	auto first = open("f", 1), second = open("g", 2);

	ASSERT_TRUE(first && second);
	disk.be(true);
	say(*first, of(op::flush, "f"));
	ASSERT_TRUE(disk.wait_for_one());
	say(*second, of(op::flush, "g"));
	first.reset();
	second.reset();
	/* The next ones have the regions, as connections have ended; the files are not given back yet. */
	ASSERT_TRUE(open_when_free("f", 3) && open_when_free("g", 4));
	EXPECT_EQ(server_->withdraw("f").code(), EBUSY);
	const unsigned before = disk.calls;
	disk.be(false);
	for (const std::string name : {"f", "g"}) {
		int code;

		while ((code = server_->withdraw(name).code()) == EBUSY)
			std::this_thread::yield();
		EXPECT_EQ(code, 0);
	}
	/* What was to be flushed for nobody was not. */
	EXPECT_EQ(before, 1u);
	EXPECT_EQ(disk.calls, 0u);
	EXPECT_EQ(ask(*connect(), of(op::open, "r")), 0);
}

TEST_F(HostileToADisk, TheServerEndsAfterWhatIsUnderWay)
{
	const auto first = open("f", 1), second = open("g", 2);

	ASSERT_TRUE(first && second);
	disk.be(true);
	say(*first, of(op::flush, "f"));
	ASSERT_TRUE(disk.wait_for_one());
	say(*second, of(op::flush, "g"));
	auto end = std::async(std::launch::async, [&] { server_.reset(); });
	/* Both have lost their connections: nobody waits. */
	const auto until = soon();
	while ((first->alive() || second->alive()) && transport::clock::now() < until)
		std::this_thread::yield();
	EXPECT_FALSE(first->alive() || second->alive());
	EXPECT_EQ(end.wait_for(0s), std::future_status::timeout);
	disk.be(false);
	end.get();
}

TEST(ServerThreads, ThatCannotBeHadAreAnErrorAfterWhichNoneIsLeft)
{
	const auto context = must(transport::open("shm"));
	const std::string address = "shm:far-threads-" + std::to_string(::getpid());
	const auto threads = [] {
		return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
	};
	const auto before = threads();
	int n = 0;

	for (;; n++) {
		failing_thread = n + 1;
		const auto server = server::make(*context, address);
		failing_thread = 0;
		if (server)
			break;
		EXPECT_EQ(server.code(), EAGAIN) << server.why().text;
		/* Who has been joined may be seen for a moment still. */
		const auto until = soon();
		while (threads() != before && transport::clock::now() < until)
			std::this_thread::yield();
		EXPECT_EQ(threads(), before);
	}
	EXPECT_GE(n, 2);
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

/* What a process does that is stopped in the middle of a WRITE. */
struct stopped {
	std::string address;
	std::string region;      /* which it makes, of a page */
	bool nonsense = false;   /* it talks nonsense meanwhile, upon which the server ends its connection */
	bool by_another = false; /* the WRITE is by way of a second connection, before which it stops, too */
};

/* What it opens, and opens with. */
[[nodiscard]] std::unique_ptr<transport::connection> connect_until_there(transport::context &context,
									 const std::string &address)
{
	for (;;)
		if (auto c = context.connect(address, soon(), protocol_room))
			return std::move(*c);
}

[[noreturn]] void stop_while_writing(const stopped &how)
{
	const auto context = must(transport::open("shm"));
	const auto c = connect_until_there(*context, how.address);
	std::unique_ptr<transport::connection> second;
	std::vector<std::byte> page(4096);
	const auto region = must(context->register_memory(page));
	request open{};
	answer a{};

	open.magic = protocol_magic;
	open.what = op::open;
	open.client = static_cast<std::uint64_t>(::getpid());
	open.bytes = 4096;
	open.page_bytes = 4096;
	open.flags = open_make;
	how.region.copy(open.name, sizeof(open.name) - 1);
	must(c->send(std::as_bytes(std::span(&open, 1))));
	must(transport::next_message(*c, std::as_writable_bytes(std::span(&a, 1)), soon()));
	if (how.by_another) {
		::raise(SIGSTOP);
		second = connect_until_there(*context, how.address);
	}
	before_copy = [&] {
		if (how.nonsense)
			must(c->send(std::as_bytes(std::span(&page[0], 1))));
		::raise(SIGSTOP);
	};
	const transport::segment s = {region.get(), page.data(), a.data.addr, a.data.key, 4096};
	(void)(second ? second : c)->write({&s, 1}, 1);
	::_exit(0);
}

/* Children are made before there are threads. */
class HostileProcess : public testing::Test
{
protected:
	void TearDown() override { kill(); }

	void fork(const stopped &how)
	{
		const pid_t child = ::fork();

		ASSERT_GE(child, 0);
		if (child == 0)
			stop_while_writing(how);
		children_.push_back(child);
	}
	void wait_until_stopped() const
	{
		int how;

		for (const pid_t child : children_) {
			ASSERT_EQ(::waitpid(child, &how, WUNTRACED), child);
			ASSERT_TRUE(WIFSTOPPED(how)) << how;
		}
	}
	void kill()
	{
		for (const pid_t child : children_) {
			(void)::kill(child, SIGKILL);
			(void)::waitpid(child, nullptr, 0);
		}
		children_.clear();
	}
	void start(transport::context &context, unsigned max_connections = 1024)
	{
		server_options how;

		how.clients_may_make = 1 << 20;
		how.max_connections = max_connections;
		server_ = must(server::make(context, address_, how));
		must(server_->lend("r", 4096));
	}
	std::shared_ptr<network_store> open()
	{
		return must(network_store::open(*here_, address_, "r", {.shared = true, .lanes = 1}));
	}
	/* As soon as nobody has it. */
	status withdraw(const std::string &name)
	{
		status s;

		while ((s = server_->withdraw(name)).code() == EBUSY)
			std::this_thread::yield();
		return s;
	}

	const std::string address_ = "shm:far-stopped-" + std::to_string(::getpid());
	std::vector<pid_t> children_;
	const std::unique_ptr<transport::context> there_ = must(transport::open("shm")),
						  here_ = must(transport::open("shm"));
	std::unique_ptr<server> server_;
};

TEST_F(HostileProcess, ThatIsStoppedWhileItWritesKeepsNobodyWaiting)
{
	fork({address_, "m", true});
	start(*there_);
	wait_until_stopped();
	/*
	 * The server waits five seconds for the end of what it WRITEs, and others do not wait for that: one
	 * that comes after the server has read the nonsense finds the region in use still.
	 */
	for (int i = 0; i < 3; i++)
		must(open()->flush());
	EXPECT_EQ(server_->withdraw("m").code(), EBUSY);
	EXPECT_EQ(network_store::open(*here_, address_, "m", {.deadline = 10ms}).code(), EBUSY);
	kill();
	EXPECT_EQ(withdraw("m").code(), 0);
}

/* Each of them is given five seconds, and the same ones. */
TEST_F(HostileProcess, SeveralOfThemAreWaitedForAtTheSameTime)
{
	for (const std::string name : {"m", "n", "o"})
		fork({address_, name, true});
	start(*there_);
	wait_until_stopped();
	const auto begin = transport::clock::now();
	for (const std::string name : {"m", "n", "o"})
		EXPECT_EQ(withdraw(name).code(), 0);
	const auto took = transport::clock::now() - begin;
	EXPECT_GT(took, 3s);
	EXPECT_LT(took, 9s);
}

/* The end of a region waits for all copies that peers make, of whatever region. */
TEST_F(HostileProcess, ThatHoldsUpTheEndOfARegionHoldsUpNobodyElse)
{
	fork({address_, "m", false});
	start(*there_);
	must(server_->lend("gone", 4096));
	const auto store = open();
	wait_until_stopped();
	auto end = std::async(std::launch::async, [&] { return server_->withdraw("gone"); });
	/* It has been taken away, and its end is waited for. */
	while (server_->lend("gone", 4096).code() == EEXIST)
		std::this_thread::yield();
	for (int i = 0; i < 100; i++)
		must(store->flush());
	EXPECT_EQ(end.wait_for(0s), std::future_status::timeout);
	kill();
	EXPECT_EQ(end.get().code(), 0);
}

/* Where the connection of some number is held until its peer has done something. */
class holding_listener final : public transport::listener
{
public:
	holding_listener(std::unique_ptr<transport::listener> of, int which, std::function<void()> until)
	    : of_(std::move(of)), which_(which), until_(std::move(until))
	{
	}

	transport::result<std::unique_ptr<transport::connection>>
	accept(transport::clock::time_point deadline) override
	{
		auto c = of_->accept(deadline);

		if (c && --which_ == 0)
			until_();
		return c;
	}
	int fd() const noexcept override { return of_->fd(); }
	std::string address() const override { return of_->address(); }

private:
	const std::unique_ptr<transport::listener> of_;
	int which_;
	const std::function<void()> until_;
};

class holding_context final : public transport::context
{
public:
	holding_context(int which, std::function<void()> until) : which_(which), until_(std::move(until)) {}

	transport::result<std::unique_ptr<transport::region>>
	register_memory(std::span<std::byte> memory, const transport::region_options &how) override
	{
		return of_->register_memory(memory, how);
	}
	transport::result<std::unique_ptr<transport::listener>>
	listen(std::string_view address, std::optional<transport::message_room> most) override
	{
		auto l = of_->listen(address, most);

		if (!l)
			return l;
		return std::unique_ptr<transport::listener>(
		    std::make_unique<holding_listener>(std::move(*l), which_, until_));
	}
	transport::result<std::unique_ptr<transport::connection>>
	connect(std::string_view address, transport::clock::time_point deadline,
		std::optional<transport::message_room> room) override
	{
		return of_->connect(address, deadline, room);
	}

private:
	const std::unique_ptr<transport::context> of_ = must(transport::open("shm"));
	const int which_;
	const std::function<void()> until_;
};

TEST_F(HostileProcess, ThatIsOneTooManyAndStoppedKeepsNobodyWaiting)
{
	std::promise<void> in_the_copy;
	/* Those of the child and of this process come first. */
	holding_context there(3, [&] {
		wait_until_stopped();
		in_the_copy.set_value();
	});

	fork({address_, "m", false, true});
	start(there, 2);
	wait_until_stopped();
	const auto store = open();
	ASSERT_EQ(::kill(children_[0], SIGCONT), 0);
	in_the_copy.get_future().wait();
	const auto begin = transport::clock::now();
	for (int i = 0; i < 100; i++)
		must(store->flush());
	EXPECT_LT(transport::clock::now() - begin, 3s);
	kill();
	EXPECT_EQ(withdraw("m").code(), 0);
	server_.reset();
}

} // namespace
